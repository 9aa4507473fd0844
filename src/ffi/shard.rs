//! Which part of a matrix a rank holds.

use crate::comm::shard::{Kind, Params, shard};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_dtype;
use crate::ffi::{check_out, count, guard};

const OP: &str = "shard_get";

/// What a matrix is, which says how ranks divide it.
pub type unsloth_shard_kind = u32;
/// Divided by rows: gate, or up, or a linear layer.
pub const UNSLOTH_SHARD_KIND_COLUMN: unsloth_shard_kind = 0;
/// Divided by columns: down, or a linear layer.
pub const UNSLOTH_SHARD_KIND_ROW: unsloth_shard_kind = 1;
/// The projection to queries, `[num_heads * head_dim, hidden]`, divided by heads.
pub const UNSLOTH_SHARD_KIND_QUERY: unsloth_shard_kind = 2;
/// To keys, `[num_kv_heads * head_dim, hidden]`.
pub const UNSLOTH_SHARD_KIND_KEY: unsloth_shard_kind = 3;
/// To values, `[num_kv_heads * v_head_dim, hidden]`.
pub const UNSLOTH_SHARD_KIND_VALUE: unsloth_shard_kind = 4;
/// To all three, the rows of queries first, then keys, then values.
pub const UNSLOTH_SHARD_KIND_QKV: unsloth_shard_kind = 5;
/// The projection of attention's output, `[hidden, num_heads * v_head_dim]`, divided by heads.
pub const UNSLOTH_SHARD_KIND_ATTENTION_OUT: unsloth_shard_kind = 6;
/// Gate and up in one matrix, in either order: each is divided by rows.
pub const UNSLOTH_SHARD_KIND_GATE_UP: unsloth_shard_kind = 7;
/// An embedding or the projection to logits, `[vocabulary, hidden]`: every rank has as many rows, of which
/// the last ones may lie past the vocabulary's end.
pub const UNSLOTH_SHARD_KIND_VOCABULARY: unsloth_shard_kind = 8;

/// Arguments of `unsloth_shard_get`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_shard_params {
    /// `sizeof(unsloth_shard_params)`.
    pub struct_size: u32,
    /// What the matrix is, one of `UNSLOTH_SHARD_KIND_*`. A bias is as the rows of its matrix, with one
    /// column.
    pub kind: unsloth_shard_kind,
    /// Of its elements, one of `UNSLOTH_DTYPE_*`.
    pub dtype: unsloth_dtype,
    /// Zero.
    pub reserved: u32,
    /// Which rank, from 0.
    pub rank: i32,
    /// Ranks of the group.
    pub size: i32,
    /// Rows of the whole matrix.
    pub rows: i64,
    /// Its columns; of a format in blocks, whole blocks.
    pub columns: i64,
    /// Of columns, rows, gate and up, and a vocabulary: how many rows or columns stay together; 0 for one,
    /// or for a block where columns are divided. Gate and up have that of down, so that their rows are its
    /// columns.
    pub unit: i64,
    /// Query heads, of attention's matrices.
    pub num_heads: i64,
    /// Key and value heads; 0 for `num_heads`. More ranks than these are a multiple of them: then several
    /// ranks have the same key and value head, and the sum of their gradients is its gradient.
    pub num_kv_heads: i64,
    /// Components of a query or key head.
    pub head_dim: i64,
    /// Components of a value head; 0 for `head_dim`.
    pub v_head_dim: i64,
}
params!(unsloth_shard_params, [reserved]);

/// Rows and columns of a matrix that a rank holds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_shard_piece {
    /// The first row in the whole.
    pub row: i64,
    /// The first column in the whole, with which a block begins.
    pub column: i64,
    /// How many rows.
    pub rows: i64,
    /// How many columns, whole blocks.
    pub columns: i64,
    /// The row of the rank's part that the first one is; its first column is that of the part.
    pub to_row: i64,
}

/// A rank's part of a matrix.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_shard {
    /// `sizeof(unsloth_shard)`, set by the caller.
    pub struct_size: u32,
    /// How many of `pieces` there are: one, of a packed matrix two or three; none of a vocabulary that ends
    /// before this rank's rows.
    pub num_pieces: u32,
    /// Rows of the part. Of a vocabulary the last ones may be of no piece: the caller fills them.
    pub rows: i64,
    /// Columns of the part.
    pub columns: i64,
    /// Of attention's matrices: the rank's query heads.
    pub num_heads: i64,
    /// The rank's key and value heads.
    pub num_kv_heads: i64,
    /// The first of these.
    pub first_kv_head: i64,
    /// What the part is made of, one behind the other.
    pub pieces: [unsloth_shard_piece; 3],
}
params!(unsloth_shard, []);

impl unsloth_shard_params {
    fn convert(&self) -> Result<Params> {
        let kind = Kind::from_raw(self.kind).ok_or_else(|| {
            let problem = text!("is {}, allowed: 0 to {}", self.kind, Kind::ALL.len() - 1);
            Error::invalid(OP, "kind", problem)
        })?;
        let number = |name, value| count(OP, name, value);
        let or = |name, value, default| -> Result<usize> {
            let value = count(OP, name, value)?;
            Ok(if value == 0 { default } else { value })
        };
        let num_heads = number("num_heads", self.num_heads)?;
        let head_dim = number("head_dim", self.head_dim)?;
        Ok(Params {
            kind,
            dtype: DType::from_raw(self.dtype).ok_or_else(|| {
                let problem = text!("is {}, which does not exist", self.dtype);
                Error::invalid(OP, "dtype", problem)
            })?,
            shape: [number("rows", self.rows)?, number("columns", self.columns)?],
            rank: number("rank", self.rank.into())?,
            size: number("size", self.size.into())?,
            unit: number("unit", self.unit)?,
            heads: (num_heads, or("num_kv_heads", self.num_kv_heads, num_heads)?),
            dims: (head_dim, or("v_head_dim", self.v_head_dim, head_dim)?),
        })
    }
}

/// Writes to `shard`, whose `struct_size` the caller has set (`UNSLOTH_SHARD_INIT`), which part of a matrix
/// a rank holds where `unsloth_parallel` divides it. It is arithmetic on sizes: an engine asks it for every
/// matrix, and loads only its part. What does not divide evenly goes to the first ranks.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `shard` is NULL or points to
/// `shard->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_shard_get(
    params: *const unsloth_shard_params,
    shard: *mut unsloth_shard,
) -> unsloth_status {
    guard(OP, || {
        check_out(OP, "shard", shard)?;
        // SAFETY: the caller's promises.
        let (asked, told) = unsafe {
            (
                params::read(OP, params)?,
                params::read(OP, shard.cast_const())?,
            )
        };
        let found = self::shard(&asked.convert()?)?;
        // At most as great as what was asked, which an i64 holds.
        let mut pieces = [unsloth_shard_piece {
            row: 0,
            column: 0,
            rows: 0,
            columns: 0,
            to_row: 0,
        }; 3];
        for (to, piece) in pieces.iter_mut().zip(&found.pieces) {
            *to = unsloth_shard_piece {
                row: piece.row as i64,
                column: piece.column as i64,
                rows: piece.rows as i64,
                columns: piece.columns as i64,
                to_row: piece.to_row as i64,
            };
        }
        let told = unsloth_shard {
            struct_size: told.struct_size,
            num_pieces: found.pieces.len() as u32,
            rows: found.rows as i64,
            columns: found.columns as i64,
            num_heads: found.heads.0 as i64,
            num_kv_heads: found.heads.1 as i64,
            first_kv_head: found.first_kv_head as i64,
            pieces,
        };
        // SAFETY: `read` accepted it; the caller promises that it is writable.
        unsafe { params::write(&told, shard) };
        Ok(())
    })
}
