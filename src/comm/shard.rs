//! Which part of a matrix a rank holds, where ranks divide a model's weights
//! ([`parallel`](crate::ops::parallel)).
//!
//! It is arithmetic on the host, of sizes alone: an engine asks before it loads, and loads only its part.
//! What does not divide evenly goes to the first ranks, whose parts are greater by one unit. A unit is what
//! stays together: a block of a format in blocks, a head of keys with the query heads that read it, or as
//! many rows or columns as the caller says.
//!
//! ```
//! use unsloth::DType;
//! use unsloth::comm::shard::{Kind, Params, shard};
//!
//! // Rank 1 of 2 of the packed projections of a model with 4 query and 2 key and value heads of 8.
//! let part = shard(&Params {
//!     heads: (4, 2),
//!     dims: (8, 8),
//!     ..Params::new(Kind::Qkv, [64, 32], 1, 2)
//! })?;
//! assert_eq!((part.rows, part.columns, part.heads), (32, 32, (2, 1)));
//! let rows: Vec<_> = part.pieces.iter().map(|p| (p.row, p.rows, p.to_row)).collect();
//! assert_eq!(rows, [(16, 16, 0), (40, 8, 16), (56, 8, 24)]);
//! # Ok::<(), unsloth::Error>(())
//! ```

use std::ops::Range;

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::{Error, Result, text};

const OP: &str = "shard_get";

/// What a matrix is, which says how it is divided. The discriminants are those of the C ABI
/// (`UNSLOTH_SHARD_KIND_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Kind {
    /// Divided by rows: gate, or up, or a linear layer.
    #[default]
    Column = 0,
    /// Divided by columns: down, or a linear layer.
    Row = 1,
    /// The projection to queries, `[num_heads * head_dim, hidden]`, divided by heads.
    Query = 2,
    /// To keys, `[num_kv_heads * head_dim, hidden]`.
    Key = 3,
    /// To values, `[num_kv_heads * v_head_dim, hidden]`.
    Value = 4,
    /// To all three, the rows of queries first, then keys, then values.
    Qkv = 5,
    /// The projection of attention's output, `[hidden, num_heads * v_head_dim]`, divided by heads.
    AttentionOut = 6,
    /// Gate and up in one matrix, in either order: each is divided by rows.
    GateUp = 7,
    /// An embedding or the projection to logits, `[vocabulary, hidden]`: every rank has as many rows, of
    /// which the last ones may lie past the vocabulary's end.
    Vocabulary = 8,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 9] = [
        Kind::Column,
        Kind::Row,
        Kind::Query,
        Kind::Key,
        Kind::Value,
        Kind::Qkv,
        Kind::AttentionOut,
        Kind::GateUp,
        Kind::Vocabulary,
    ];

    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == value)
    }
}

/// What to divide.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// What the matrix is. A bias is as the rows of its matrix, with one column.
    pub kind: Kind,
    /// Of its elements.
    pub dtype: DType,
    /// Rows and columns of the whole.
    pub shape: [usize; 2],
    /// Which rank, below `size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Of [`Kind::Column`], [`Kind::Row`], [`Kind::GateUp`] and [`Kind::Vocabulary`]: rows or columns that
    /// stay together; 0 for one, or for a block where columns are divided. Gate and up have that of down, so
    /// that their rows are its columns.
    pub unit: usize,
    /// Query heads, and heads of keys and values, of attention's matrices. More ranks than key heads
    /// are a multiple of these: then several have the same key head, and the sum of their gradients is its.
    pub heads: (usize, usize),
    /// Components of a query or key head, and of a value head.
    pub dims: (usize, usize),
}

impl Params {
    /// Of f32, in units of one.
    pub fn new(kind: Kind, shape: [usize; 2], rank: usize, size: usize) -> Params {
        Params {
            kind,
            dtype: DType::F32,
            shape,
            rank,
            size,
            unit: 0,
            heads: (0, 0),
            dims: (0, 0),
        }
    }
}

/// A rank's part of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Rows of the part. Of a vocabulary the last ones may be of no piece.
    pub rows: usize,
    /// Columns of the part.
    pub columns: usize,
    /// Of attention's matrices: the rank's query heads, and its heads of keys and values.
    pub heads: (usize, usize),
    /// The first of the latter.
    pub first_kv_head: usize,
    /// What the part is made of, one behind the other; of up to three matrices in one.
    pub pieces: ArrayVec<Piece, 3>,
}

/// Rows and columns of the whole, and where they lie in the part: at its first column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first row.
    pub row: usize,
    /// The first column, which a block begins with.
    pub column: usize,
    /// How many rows.
    pub rows: usize,
    /// How many columns, whole blocks.
    pub columns: usize,
    /// The row of the part that the first one is.
    pub to_row: usize,
}

/// What a rank holds of a matrix.
///
/// # Errors
/// Sizes do not fit together, there are more ranks than units, or a part would cut a block.
pub fn shard(params: &Params) -> Result<Shard> {
    let Params { rank, size, .. } = *params;
    if size == 0 || size > i32::MAX as usize {
        let problem = text!("is {size}, allowed: 1 to {}", i32::MAX);
        return Err(invalid("size", problem));
    }
    if rank >= size {
        let problem = text!("is {rank}, allowed: 0 to {}", size - 1);
        return Err(invalid("rank", problem));
    }
    let [rows, columns] = params.shape;
    for (name, value) in [("rows", rows), ("columns", columns), ("unit", params.unit)] {
        if value > MOST {
            return Err(invalid(name, text!("is {value}, allowed: 0 to {MOST}")));
        }
    }
    let (block, _) = params.dtype.block();
    if !columns.is_multiple_of(block) {
        let dtype = params.dtype;
        let problem = text!("is {columns}, allowed for {dtype}: multiples of {block}");
        return Err(invalid("columns", problem));
    }
    let mut shard = Shard {
        rows,
        columns,
        heads: (0, 0),
        first_kv_head: 0,
        pieces: ArrayVec::new(),
    };
    match params.kind {
        Kind::Column => shard.take_rows(&[(0, params.units("rows", rows, 1)?)], columns),
        Kind::GateUp => {
            let half = rows / 2;
            if !rows.is_multiple_of(2) {
                return Err(invalid(
                    "rows",
                    text!("is {rows}, an even number is needed"),
                ));
            }
            let range = params.units("rows", half, 1)?;
            shard.take_rows(&[(0, range.clone()), (half, range)], columns);
        }
        Kind::Row => shard.take_columns(params.units("columns", columns, block)?),
        Kind::Vocabulary => shard.take_vocabulary(params),
        _ => shard.take_heads(params)?,
    }
    Ok(shard)
}

/// Rows and columns at the most, whose products with a number of heads or ranks do not overflow.
const MOST: usize = i32::MAX as usize;

fn invalid(name: &'static str, problem: String) -> Error {
    Error::invalid(OP, name, problem)
}

/// A rank's share of a number of things, as even as it goes.
fn share(number: usize, size: usize, rank: usize) -> Range<usize> {
    let before = |rank: usize| number / size * rank + rank.min(number % size);
    before(rank)..before(rank + 1)
}

impl Params {
    /// A rank's rows or columns in whole units, of which a block is the least.
    fn units(&self, name: &'static str, length: usize, block: usize) -> Result<Range<usize>> {
        let unit = if self.unit == 0 { block } else { self.unit };
        if !unit.is_multiple_of(block) {
            let dtype = self.dtype;
            let problem = text!("is {unit}, allowed for columns of {dtype}: multiples of {block}");
            return Err(invalid("unit", problem));
        }
        if !length.is_multiple_of(unit) {
            let problem = text!("is {length}, a multiple of the unit {unit} is needed");
            return Err(invalid(name, problem));
        }
        let (units, size) = (length / unit, self.size);
        if units < size {
            let problem = text!("is {size}, above the number of units, {units}");
            return Err(invalid("size", problem));
        }
        let units = share(units, size, self.rank);
        Ok(units.start * unit..units.end * unit)
    }

    /// Checks numbers of heads and gives a rank's: of queries, and of keys and values.
    fn heads(&self) -> Result<(Range<usize>, Range<usize>)> {
        let ((heads, kv_heads), size) = (self.heads, self.size);
        for (name, value) in [("num_heads", heads), ("num_kv_heads", kv_heads)] {
            if !(1..=1 << 20).contains(&value) {
                return Err(invalid(
                    name,
                    text!("is {value}, allowed: 1 to {}", 1 << 20),
                ));
            }
        }
        if !heads.is_multiple_of(kv_heads) {
            let problem = text!("is {heads}, a multiple of num_kv_heads {kv_heads} is needed");
            return Err(invalid("num_heads", problem));
        }
        if size > heads {
            let problem = text!("is {size}, above num_heads {heads}");
            return Err(invalid("size", problem));
        }
        let group = heads / kv_heads;
        if size <= kv_heads {
            let kv = share(kv_heads, size, self.rank);
            return Ok((kv.start * group..kv.end * group, kv));
        }
        if !size.is_multiple_of(kv_heads) {
            let problem =
                text!("is {size}, above num_kv_heads {kv_heads} a multiple of it is needed");
            return Err(invalid("size", problem));
        }
        // Several ranks have one head of keys, and divide the query heads that read it.
        let copies = size / kv_heads;
        let kv = self.rank / copies;
        let queries = share(group, copies, self.rank % copies);
        let first = kv * group;
        Ok((first + queries.start..first + queries.end, kv..kv + 1))
    }
}

impl Shard {
    /// Takes ranges of rows, each from the start of one of several matrices.
    fn take_rows(&mut self, ranges: &[(usize, Range<usize>)], columns: usize) {
        self.rows = 0;
        for (start, range) in ranges {
            self.pieces.push(Piece {
                row: start + range.start,
                column: 0,
                rows: range.len(),
                columns,
                to_row: self.rows,
            });
            self.rows += range.len();
        }
    }

    fn take_columns(&mut self, range: Range<usize>) {
        self.columns = range.len();
        self.pieces.push(Piece {
            row: 0,
            column: range.start,
            rows: self.rows,
            columns: range.len(),
            to_row: 0,
        });
    }

    fn take_vocabulary(&mut self, params: &Params) {
        let vocabulary = self.rows;
        let each = vocabulary.div_ceil(params.size);
        self.rows = each.next_multiple_of(params.unit.clamp(1, MOST));
        let start = self.rows.saturating_mul(params.rank).min(vocabulary);
        let rows = self.rows.min(vocabulary - start);
        if rows > 0 {
            self.pieces.push(Piece {
                row: start,
                column: 0,
                rows,
                columns: self.columns,
                to_row: 0,
            });
        }
    }

    fn take_heads(&mut self, params: &Params) -> Result<()> {
        let (queries, kv) = params.heads()?;
        let ((heads, kv_heads), (dim, v_dim)) = (params.heads, params.dims);
        for (name, value) in [("head_dim", dim), ("v_head_dim", v_dim)] {
            if !(1..=1 << 20).contains(&value) {
                return Err(invalid(
                    name,
                    text!("is {value}, allowed: 1 to {}", 1 << 20),
                ));
            }
        }
        self.heads = (queries.len(), kv.len());
        self.first_kv_head = kv.start;
        let of = |heads: &Range<usize>, dim: usize| heads.start * dim..heads.end * dim;
        let [rows, columns] = params.shape;
        let [of_queries, of_keys, of_values] = [heads * dim, kv_heads * dim, kv_heads * v_dim];
        let (name, found, expected) = match params.kind {
            Kind::Query => ("rows", rows, of_queries),
            Kind::Key => ("rows", rows, of_keys),
            Kind::Value => ("rows", rows, of_values),
            Kind::Qkv => ("rows", rows, of_queries + of_keys + of_values),
            _ => ("columns", columns, heads * v_dim),
        };
        if found != expected {
            let problem = text!("is {found}, the heads have {expected}");
            return Err(invalid(name, problem));
        }
        let (q, k, v) = (of(&queries, dim), of(&kv, dim), of(&kv, v_dim));
        match params.kind {
            Kind::Query => self.take_rows(&[(0, q)], columns),
            Kind::Key => self.take_rows(&[(0, k)], columns),
            Kind::Value => self.take_rows(&[(0, v)], columns),
            Kind::Qkv => {
                let values = of_queries + of_keys;
                self.take_rows(&[(0, q), (of_queries, k), (values, v)], columns);
            }
            _ => {
                let range = of(&queries, v_dim);
                let (block, _) = params.dtype.block();
                if !range.start.is_multiple_of(block) || !range.len().is_multiple_of(block) {
                    let (dtype, rank) = (params.dtype, params.rank);
                    let problem = text!(
                        "{} to {} of rank {rank} cut blocks of {block} elements of {dtype}",
                        range.start,
                        range.end
                    );
                    return Err(Error::unsupported(OP, "columns", problem));
                }
                self.take_columns(range);
            }
        }
        Ok(())
    }
}
