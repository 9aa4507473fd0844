//! Appending to the paged KV cache: one head of one new token is a row, copied or converted to its page. Keys and values go in one
//! launch; keys may be rotated on their way, and with them the queries of the same tokens, which stay outside the cache.

use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use crate::Error;
use crate::e4m3::stored;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rotation::{AngleSource, angle, angle_source, load_pairs, store_turned, style_name};
use crate::rows::{self, Divisor, divide};

const THREADS: u32 = 128;
/// Threads that share a row: with 16 bytes each they cover 128 elements of a 16-bit dtype.
const PER_ROW: u32 = 16;

/// Where rows of one side lie, in vectors.
#[derive(CubeType, Clone, Copy)]
struct Side {
    length: u32,
    token: usize,
    head: usize,
    page: usize,
    slot: usize,
    page_head: usize,
}

/// Where rows of queries lie, in vectors.
#[derive(CubeType, Clone, Copy)]
struct Queries {
    /// Of a row, as far as it is written: what does not turn stays where it is in place.
    length: u32,
    token: usize,
    head: usize,
    out_token: usize,
    out_head: usize,
    /// Of all tokens.
    rows: u32,
    heads: Divisor,
}

/// Copies or converts a row from vector `first` on; the first vector of each thread has been loaded. Codes are what is stored
/// times `factor`.
#[cube]
fn store<S: Float, D: Numeric, N: Size, L: Scalar, M: Size>(
    from: &Array<Vector<L, M>>,
    pages: &mut Array<Vector<D, N>>,
    loaded: Vector<L, M>,
    length: u32,
    first: u32,
    source: usize,
    target: usize,
    factor: f32,
    #[comptime] codes: bool,
) {
    let mut i = first + UNIT_POS_X % PER_ROW;
    if i < length {
        pages[target + i as usize] = converted::<S, D, N, L, M>(loaded, factor, codes);
        i += PER_ROW;
    }
    while i < length {
        let v = from[source + i as usize];
        pages[target + i as usize] = converted::<S, D, N, L, M>(v, factor, codes);
        i += PER_ROW;
    }
}

#[cube]
fn converted<S: Float, D: Numeric, N: Size, L: Scalar, M: Size>(
    loaded: Vector<L, M>,
    factor: f32,
    #[comptime] codes: bool,
) -> Vector<D, N> {
    let x = Vector::<S, N>::reinterpret(loaded);
    if comptime!(codes) {
        stored::<D, N>(Vector::cast_from(x), factor, true)
    } else {
        Vector::cast_from(x)
    }
}

/// Where a row of the new tokens begins.
#[cube]
fn source_of(side: Side, token: u32, head: u32) -> usize {
    token as usize * side.token + head as usize * side.head
}

/// Where its copy begins.
#[cube]
fn target_of(side: Side, page: u32, slot: u32, head: u32) -> usize {
    page as usize * side.page + slot as usize * side.slot + head as usize * side.page_head
}

/// Where a new token belongs.
#[derive(CubeType, Clone, Copy)]
struct Place {
    page: u32,
    slot: u32,
}

#[cube]
fn place_of(
    token: u32,
    seq_lens: &Array<u32>,
    cu_seqlens: &Array<u32>,
    block_table: &Array<u32>,
    num_tokens: u32,
    num_sequences: u32,
    page_size: Divisor,
    pages_per_sequence: usize,
) -> Place {
    // Where sequences have a token each, as in decoding, nothing needs to be searched.
    let mut low = 0u32;
    if num_tokens == num_sequences {
        low = token;
    }
    let begin = cu_seqlens[low as usize];
    let mut end = cu_seqlens[low as usize + 1];
    let mut len = seq_lens[low as usize];
    if begin > token || end <= token {
        // The last sequence that starts at or before the token: those before it may be empty.
        low = 0u32;
        let mut high = num_sequences;
        while high - low > 1 {
            let middle = (low + high) / 2;
            if cu_seqlens[middle as usize] <= token {
                low = middle;
            } else {
                high = middle;
            }
        }
        end = cu_seqlens[low as usize + 1];
        len = seq_lens[low as usize];
    }
    let index = len - (end - token);
    let of_sequence = divide(index, page_size);
    Place {
        page: block_table[low as usize * pages_per_sequence + of_sequence as usize],
        slot: index - of_sequence * page_size.size,
    }
}

#[cube]
fn kv_append<S: Float, D: Numeric, N: Size, L: Scalar, M: Size>(
    k: &Array<Vector<L, M>>,
    v: &Array<Vector<L, M>>,
    q: &Array<Vector<L, M>>,
    k_pages: &mut Array<Vector<D, N>>,
    v_pages: &mut Array<Vector<D, N>>,
    q_out: &mut Array<Vector<S, N>>,
    seq_lens: &Array<u32>,
    cu_seqlens: &Array<u32>,
    block_table: &Array<u32>,
    positions: &Array<i32>,
    k_factors: &Array<f32>,
    v_factors: &Array<f32>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    num_tokens: u32,
    num_heads: Divisor,
    num_sequences: u32,
    page_size: Divisor,
    pages_per_sequence: usize,
    k_side: Side,
    v_side: Side,
    queries: Queries,
    angles: AngleSource,
    per_head: u32,
    per_half: u32,
    rotated: u32,
    #[comptime] style: Style,
    #[comptime] codes: bool,
) {
    let width = comptime!(N::value() as u32);
    // Rows: every head of every token of the keys, then of the values, then of the queries.
    let row_of_block = UNIT_POS_X / PER_ROW;
    let lane = UNIT_POS_X % PER_ROW;
    let row = CUBE_POS_X * comptime!(THREADS / PER_ROW) + row_of_block;
    let per_side = num_tokens * num_heads.size;
    let is_value = row >= per_side && row < 2 * per_side;
    let is_query = row >= 2 * per_side;
    let mut of_side = row;
    if is_value {
        of_side = row - per_side;
    }
    let mut token = divide(of_side, num_heads);
    let mut head = of_side - token * num_heads.size;
    let mut rows = 2 * per_side;
    if comptime!(style != Style::Plain) {
        rows += queries.rows;
        if is_query {
            of_side = row - 2 * per_side;
            token = divide(of_side, queries.heads);
            head = of_side - token * queries.heads.size;
        }
    }

    // What is stored is on its way while its place is sought.
    let k_source = source_of(k_side, token, head);
    let v_source = source_of(v_side, token, head);
    let q_source = token as usize * queries.token + head as usize * queries.head;
    // A pair of vectors, and one behind the rotated part.
    let mut loaded = Array::<Vector<L, M>>::new(3usize);
    if is_value {
        if lane < v_side.length {
            loaded[0] = v[v_source + lane as usize];
        }
    } else if comptime!(style == Style::Plain) {
        if row < per_side && lane < k_side.length {
            loaded[0] = k[k_source + lane as usize];
        }
    } else if is_query {
        if row < rows && lane < per_head {
            load_pairs(q, &mut loaded, q_source, lane, per_half, width, style);
        }
        if row < rows && rotated + lane < queries.length {
            loaded[2] = q[q_source + (rotated + lane) as usize];
        }
    } else {
        if lane < per_head && k_side.length > 0 {
            load_pairs(k, &mut loaded, k_source, lane, per_half, width, style);
        }
        if rotated + lane < k_side.length {
            loaded[2] = k[k_source + (rotated + lane) as usize];
        }
    }

    let factor = if comptime!(codes) {
        code_factor(k_factors, v_factors, head, is_value, row < 2 * per_side)
    } else {
        f32::new(1.0)
    };

    let sines = comptime!(MAX_PAIRS * (THREADS / PER_ROW));
    let room = comptime!(if style == Style::Plain { 1 } else { 2 * sines });
    let mut turns = SharedMemory::<f32>::new(comptime!(room as usize));
    let first = row_of_block * MAX_PAIRS;
    if comptime!(style != Style::Plain) {
        if (row < per_side && k_side.length > 0) || (is_query && row < rows) {
            let position = i64::cast_from(positions[token as usize]);
            let mut pair = lane;
            while pair < angles.pairs {
                let turned = angle(
                    position,
                    pair,
                    angles,
                    factors,
                    cos_table,
                    sin_table,
                    frequencies[pair as usize],
                );
                turns[(first + pair) as usize] = turned.cos;
                turns[(sines + first + pair) as usize] = turned.sin;
                pair += PER_ROW;
            }
        }
        sync_cube();
    }

    if row < 2 * per_side {
        let place = place_of(
            token,
            seq_lens,
            cu_seqlens,
            block_table,
            num_tokens,
            num_sequences,
            page_size,
            pages_per_sequence,
        );
        if is_value {
            let target = target_of(v_side, place.page, place.slot, head);
            store::<S, D, N, L, M>(
                v,
                v_pages,
                loaded[0],
                v_side.length,
                0u32,
                v_source,
                target,
                factor,
                codes,
            );
        } else {
            let target = target_of(k_side, place.page, place.slot, head);
            if comptime!(style == Style::Plain) {
                store::<S, D, N, L, M>(
                    k,
                    k_pages,
                    loaded[0],
                    k_side.length,
                    0u32,
                    k_source,
                    target,
                    factor,
                    codes,
                );
            } else {
                if k_side.length > 0 {
                    let mut vector = lane;
                    while vector < per_head {
                        store_turned::<S, D, N, L, M>(
                            &loaded, k_pages, target, vector, per_half, first, &turns, factor,
                            sines, style, codes,
                        );
                        vector += PER_ROW;
                        if vector < per_head {
                            load_pairs(k, &mut loaded, k_source, vector, per_half, width, style);
                        }
                    }
                }
                store::<S, D, N, L, M>(
                    k,
                    k_pages,
                    loaded[2],
                    k_side.length,
                    rotated,
                    k_source,
                    target,
                    factor,
                    codes,
                );
            }
        }
    } else if comptime!(style != Style::Plain) {
        let is_query = row < rows;
        if is_query {
            let target = token as usize * queries.out_token + head as usize * queries.out_head;
            let mut vector = lane;
            while vector < per_head {
                store_turned::<S, S, N, L, M>(
                    &loaded, q_out, target, vector, per_half, first, &turns, 1.0f32, sines, style,
                    false,
                );
                vector += PER_ROW;
                if vector < per_head {
                    load_pairs(q, &mut loaded, q_source, vector, per_half, width, style);
                }
            }
            store::<S, S, N, L, M>(
                q,
                q_out,
                loaded[2],
                queries.length,
                rotated,
                q_source,
                target,
                1.0f32,
                false,
            );
        }
    }
}

fn queries(b: &mut Builder) -> QueriesExpand {
    use ScalarType::{U32, U64};
    QueriesExpand {
        length: b.scalar("q_length", U32).into(),
        token: b.scalar("q_token", U64).into(),
        head: b.scalar("q_head", U64).into(),
        out_token: b.scalar("q_out_token", U64).into(),
        out_head: b.scalar("q_out_head", U64).into(),
        rows: b.scalar("q_rows", U32).into(),
        heads: rows::divisor(b, ["q_heads", "q_heads_multiplier", "q_heads_shift"]),
    }
}

/// What elements of a head are multiplied by before they are rounded to codes.
#[cube]
fn code_factor(
    k_factors: &Array<f32>,
    v_factors: &Array<f32>,
    head: u32,
    is_value: bool,
    is_there: bool,
) -> f32 {
    let mut factor = 1.0f32;
    if is_there {
        if is_value {
            factor = v_factors[head as usize];
        } else {
            factor = k_factors[head as usize];
        }
    }
    factor
}

fn side(b: &mut Builder, names: [&'static str; 6]) -> SideExpand {
    let [length, token, head, page, slot, page_head] = names;
    use ScalarType::{U32, U64};
    SideExpand {
        length: b.scalar(length, U32).into(),
        token: b.scalar(token, U64).into(),
        head: b.scalar(head, U64).into(),
        page: b.scalar(page, U64).into(),
        slot: b.scalar(slot, U64).into(),
        page_head: b.scalar(page_head, U64).into(),
    }
}

macro_rules! kernel {
    ($b:ident, $s:ty, $d:ty, $n:ty, $l:ty, $m:ty, $style:ident, $codes:literal) => {{
        let from = $b.type_of::<Vector<$l, $m>>();
        let to = $b.type_of::<Vector<$d, $n>>();
        let word = $b.type_of::<u32>();
        let k = $b.read("k", from);
        let v = $b.read("v", from);
        // The queries that are written may be those that are read.
        let q = $b.write("q", from);
        let k_pages = $b.write("k_pages", to);
        let v_pages = $b.write("v_pages", to);
        let turned = $b.type_of::<Vector<$s, $n>>();
        let q_out = $b.write("q_out", turned);
        let seq_lens = $b.read("seq_lens", word);
        let cu_seqlens = $b.read("cu_seqlens", word);
        let block_table = $b.read("block_table", word);
        let (signed, real) = ($b.type_of::<i32>(), $b.type_of::<f32>());
        let positions = $b.read("positions", signed);
        // Whose arguments the others have not.
        let code_factors = match $codes {
            true => Some(["k_factors", "v_factors"].map(|name| $b.read(name, real))),
            false => None,
        };
        let factors = $b.read("factors", real);
        let cos_table = $b.read("cos_table", real);
        let sin_table = $b.read("sin_table", real);
        let [k_factors, v_factors] =
            code_factors.unwrap_or_else(|| [factors.clone(), factors.clone()]);
        let frequencies = $b.by_value("frequencies", MAX_PAIRS as usize);
        let [num_tokens, num_sequences] =
            ["num_tokens", "num_sequences"].map(|name| $b.scalar(name, ScalarType::U32));
        let [num_heads, page_size] = [
            ["num_heads", "num_heads_multiplier", "num_heads_shift"],
            ["page_size", "page_size_multiplier", "page_size_shift"],
        ]
        .map(|names| rows::divisor(&mut $b, names));
        let pages_per_sequence = $b.scalar("pages_per_sequence", ScalarType::U64);
        let k_side = side(
            &mut $b,
            [
                "k_length",
                "k_token",
                "k_head",
                "k_page",
                "k_slot",
                "k_page_head",
            ],
        );
        let v_side = side(
            &mut $b,
            [
                "v_length",
                "v_token",
                "v_head",
                "v_page",
                "v_slot",
                "v_page_head",
            ],
        );
        let queries = queries(&mut $b);
        let angles = angle_source(&mut $b);
        let [per_head, per_half, rotated] =
            ["per_head", "per_half", "rotated"].map(|name| $b.scalar(name, ScalarType::U32));
        kv_append::expand::<$s, $d, $n, $l, $m>(
            $b.scope(),
            k.into(),
            v.into(),
            q.into(),
            k_pages.into(),
            v_pages.into(),
            q_out.into(),
            seq_lens.into(),
            cu_seqlens.into(),
            block_table.into(),
            positions.into(),
            k_factors.into(),
            v_factors.into(),
            factors.into(),
            cos_table.into(),
            sin_table.into(),
            frequencies.into(),
            num_tokens.into(),
            num_heads,
            num_sequences.into(),
            page_size,
            pages_per_sequence.into(),
            k_side,
            v_side,
            queries,
            angles,
            per_head.into(),
            per_half.into(),
            rotated.into(),
            $style,
            $codes,
        );
    }};
}

fn kernel(from: Dtype, pages: Dtype, style: Style, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let width = from.per_vector().min(pages.per_vector());
    let words = width * if from == Dtype::F32 { 4 } else { 2 } / 4;
    with_vector!(from, S, _N => with_vector!(pages, D, _M => match (vectors, width, words) {
        (false, ..) => kernel!(b, S, D, Const<1>, S, Const<1>, style, false),
        (true, 4, 2) => kernel!(b, S, D, Const<4>, u32, Const<2>, style, false),
        (true, 4, _) => kernel!(b, S, D, Const<4>, u32, Const<4>, style, false),
        (true, ..) => kernel!(b, S, D, Const<8>, u32, Const<4>, style, false),
    }));
    let width = if vectors { width } else { 1 };
    finished(b, (from, pages.name(), pages.code()), style, width)
}

fn codes_kernel(from: Dtype, style: Style, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let width = if vectors { from.per_vector() } else { 1 };
    with_vector!(from, S, _N => match width {
        1 => kernel!(b, S, u8, Const<1>, S, Const<1>, style, true),
        4 => kernel!(b, S, u8, Const<4>, u32, Const<4>, style, true),
        _ => kernel!(b, S, u8, Const<8>, u32, Const<4>, style, true),
    });
    finished(b, (from, "e4m3", contract::E4M3), style, width)
}

/// With the name and the code of what pages hold.
fn finished(
    b: Builder,
    (from, pages, code): (Dtype, &str, u32),
    style: Style,
    width: u32,
) -> Result<Kernel, Error> {
    let symbol = format!(
        "kv_append_{}_{}_{pages}x{width}",
        style_name(style),
        from.name(),
    );
    let choices = vec![
        ("from", from.code()),
        ("dtype", code),
        ("style", style.code()),
        ("width", width),
        ("rows_per_block", THREADS / PER_ROW),
    ];
    let kernel = b.finish(symbol, choices, THREADS)?;
    Ok(match style {
        Style::Plain => kernel,
        // 64 registers for each thread.
        _ => kernel.for_blocks(1024 / THREADS),
    })
}

/// Every form: the dtype of new tokens by the cache's, by how keys are rotated, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for from in Dtype::ALL.iter().copied() {
        for pages in Dtype::ALL.iter().copied() {
            for style in Style::ALL {
                for vectors in [true, false] {
                    kernels.push(kernel(from, pages, *style, vectors)?);
                }
            }
        }
    }
    Ok(kernels)
}

/// Every form where the cache holds codes of 8-bit floats.
pub fn e4m3_kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for from in Dtype::ALL.iter().copied() {
        for style in Style::ALL {
            for vectors in [true, false] {
                kernels.push(codes_kernel(from, *style, vectors)?);
            }
        }
    }
    Ok(kernels)
}
