//! What a rank holds of a matrix: all ranks together have all of it, and their parts fit what divided
//! layers ask for.

use proptest::prelude::*;
use unsloth::comm::shard::{Kind, Params, Shard, shard};
use unsloth::ffi::shard::*;
use unsloth::ffi::status::*;
use unsloth::{DType, Error};

use crate::common::abi::assert_fails;

/// How often the ranks of a group have each element, having seen that each part is what its pieces are.
fn counted(params: &Params) -> Vec<usize> {
    let [rows, columns] = params.shape;
    let mut times = vec![0; rows * columns];
    for rank in 0..params.size {
        let part = shard(&Params { rank, ..*params }).unwrap();
        let mut next = 0;
        for piece in &part.pieces {
            assert_eq!((piece.to_row, piece.columns), (next, part.columns));
            next += piece.rows;
            for row in piece.row..piece.row + piece.rows {
                for column in piece.column..piece.column + piece.columns {
                    times[row * columns + column] += 1;
                }
            }
        }
        match params.kind {
            Kind::Vocabulary => assert!(next <= part.rows),
            _ => assert_eq!(next, part.rows),
        }
    }
    times
}

fn parts(params: &Params) -> Vec<Shard> {
    let of = |rank| shard(&Params { rank, ..*params }).unwrap();
    (0..params.size).map(of).collect()
}

proptest! {
    /// Rows, columns, gate and up: each element is of one rank, in whole units, and the greatest part has a
    /// unit more than the least.
    #[test]
    fn every_element_is_of_one_rank(
        units in 1usize..20,
        unit in 1usize..5,
        other in 0usize..4,
        size in 1usize..9,
        kind in prop::sample::select(vec![Kind::Column, Kind::Row, Kind::GateUp]),
    ) {
        prop_assume!(size <= units);
        let n = units * unit;
        let shape = match kind {
            Kind::Row => [other, n],
            Kind::GateUp => [2 * n, other],
            _ => [n, other],
        };
        let params = Params { unit, ..Params::new(kind, shape, 0, size) };
        prop_assert!(counted(&params).iter().all(|times| *times == 1));
        let lens: Vec<_> = parts(&params).iter().map(|part| match kind {
            Kind::Row => part.columns,
            Kind::GateUp => part.rows / 2,
            _ => part.rows,
        }).collect();
        prop_assert!(lens.iter().all(|len| len % unit == 0));
        prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= unit);
    }

    /// Heads: queries are of one rank each, keys and values too where there are as many as ranks, else of
    /// as many ranks as share one. Matrices apart, packed, and the output's agree.
    #[test]
    fn heads_stay_with_those_that_they_read(
        kv_heads in 1usize..9,
        group in 1usize..5,
        dim in 1usize..4,
        v_dim in 1usize..4,
        size in 1usize..13,
    ) {
        let heads = kv_heads * group;
        let fits = size <= kv_heads || size <= heads && size % kv_heads == 0;
        let [q, k, v] = [heads * dim, kv_heads * dim, kv_heads * v_dim];
        let of = |kind, shape| Params {
            heads: (heads, kv_heads),
            dims: (dim, v_dim),
            ..Params::new(kind, shape, 0, size)
        };
        let packed = of(Kind::Qkv, [q + k + v, 2]);
        if !fits {
            prop_assert!(shard(&packed).is_err());
            return Ok(());
        }
        let copies = if size > kv_heads { size / kv_heads } else { 1 };
        let once = |params: &Params, times: usize| counted(params).iter().all(|t| *t == times);
        let [queries, keys, values] = [
            of(Kind::Query, [q, 2]),
            of(Kind::Key, [k, 2]),
            of(Kind::Value, [v, 2]),
        ];
        let out = of(Kind::AttentionOut, [3, heads * v_dim]);
        prop_assert!(once(&queries, 1) && once(&out, 1));
        prop_assert!(once(&keys, copies) && once(&values, copies));
        let all = [&queries, &keys, &values, &out, &packed].map(parts);
        for rank in 0..size {
            let [queries, keys, values, out, packed] = all.each_ref().map(|parts| &parts[rank]);
            let (own, own_kv) = packed.heads;
            prop_assert!(own > 0 && own_kv > 0 && own % own_kv == 0);
            prop_assert_eq!(queries.rows, own * dim);
            prop_assert_eq!(out.columns, own * v_dim);
            prop_assert_eq!(queries.pieces[0].row / dim, out.pieces[0].column / v_dim);
            // The packed matrix has the three parts behind each other.
            let starts = [0, q, q + k];
            for (i, part) in [queries, keys, values].into_iter().enumerate() {
                prop_assert_eq!(packed.pieces[i].row, starts[i] + part.pieces[0].row);
                prop_assert_eq!(packed.pieces[i].rows, part.rows);
                prop_assert_eq!(part.heads, packed.heads);
            }
            // Query heads read the rank's heads of keys.
            let first = queries.pieces[0].row / dim;
            prop_assert_eq!(keys.pieces[0].row / dim, packed.first_kv_head);
            for head in first..first + own {
                let read = packed.first_kv_head + (head - first) / (own / own_kv);
                prop_assert_eq!(head / group, read);
            }
        }
    }

    /// A vocabulary: each row is of one rank, and all ranks have as many rows, whole units.
    #[test]
    fn a_vocabulary_is_padded(vocabulary in 0usize..70, unit in 0usize..9, size in 1usize..9) {
        let params = Params { unit, ..Params::new(Kind::Vocabulary, [vocabulary, 3], 0, size) };
        prop_assert!(counted(&params).iter().all(|times| *times == 1));
        let parts = parts(&params);
        let rows = parts[0].rows;
        prop_assert!(parts.iter().all(|part| part.rows == rows));
        prop_assert!(rows.is_multiple_of(unit.max(1)) && rows * size >= vocabulary);
        // Rows of a rank begin where those of the ranks before it end.
        for (rank, part) in parts.iter().enumerate() {
            prop_assert!(part.pieces.iter().all(|piece| piece.row == rank * rows));
        }
    }
}

/// Columns of formats in blocks are divided in whole blocks: 43 of them among 3 ranks, and gate's rows with
/// them.
#[test]
fn blocks_are_not_cut() {
    let down = Params {
        dtype: DType::Q4K,
        ..Params::new(Kind::Row, [4096, 11008], 0, 3)
    };
    let gate = Params {
        dtype: DType::Q4K,
        unit: 256,
        ..Params::new(Kind::Column, [11008, 4096], 0, 3)
    };
    let columns: Vec<_> = parts(&down).iter().map(|part| part.columns).collect();
    assert_eq!(columns, [15 * 256, 14 * 256, 14 * 256]);
    let rows: Vec<_> = parts(&gate).iter().map(|part| part.rows).collect();
    assert_eq!(rows, columns);
}

#[test]
fn what_does_not_divide_is_refused() {
    let good = Params {
        heads: (8, 2),
        dims: (4, 4),
        ..Params::new(Kind::Qkv, [48, 16], 0, 2)
    };
    shard(&good).unwrap();
    let cases: [(Params, &str); 16] = [
        (
            Params { size: 0, ..good },
            "size is 0, allowed: 1 to 2147483647",
        ),
        (Params { rank: 2, ..good }, "rank is 2, allowed: 0 to 1"),
        (
            Params {
                shape: [1 << 31, 1],
                ..good
            },
            "rows is 2147483648, allowed: 0 to 2147483647",
        ),
        (
            Params {
                heads: (0, 0),
                ..good
            },
            "num_heads is 0, allowed: 1 to 1048576",
        ),
        (
            Params {
                heads: (8, 0),
                ..good
            },
            "num_kv_heads is 0, allowed: 1 to 1048576",
        ),
        (
            Params {
                heads: (8, 3),
                ..good
            },
            "num_heads is 8, a multiple of num_kv_heads 3 is needed",
        ),
        (
            Params { size: 3, ..good },
            "size is 3, above num_kv_heads 2 a multiple of it is needed",
        ),
        (Params { size: 10, ..good }, "size is 10, above num_heads 8"),
        (
            Params {
                dims: (0, 4),
                ..good
            },
            "head_dim is 0, allowed: 1 to 1048576",
        ),
        (
            Params {
                dims: (4, 0),
                ..good
            },
            "v_head_dim is 0, allowed: 1 to 1048576",
        ),
        (
            Params {
                shape: [47, 16],
                ..good
            },
            "rows is 47, the heads have 48",
        ),
        (
            Params {
                kind: Kind::AttentionOut,
                ..good
            },
            "columns is 16, the heads have 32",
        ),
        (
            Params {
                kind: Kind::GateUp,
                shape: [7, 2],
                ..good
            },
            "rows is 7, an even number is needed",
        ),
        (
            Params {
                kind: Kind::Column,
                unit: 5,
                ..good
            },
            "rows is 48, a multiple of the unit 5 is needed",
        ),
        (
            Params {
                kind: Kind::Row,
                unit: 16,
                ..good
            },
            "size is 2, above the number of units, 1",
        ),
        (
            Params {
                dtype: DType::Q8_0,
                ..good
            },
            "columns is 16, allowed for q8_0: multiples of 32",
        ),
    ];
    for (params, problem) in cases {
        let error = shard(&params).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        assert_eq!(error.to_string(), format!("shard_get: {problem}"));
    }
    let in_blocks = Params {
        kind: Kind::Row,
        dtype: DType::Q8_0,
        unit: 48,
        ..Params::new(Kind::Row, [4, 96], 0, 2)
    };
    let error = shard(&in_blocks).unwrap_err().to_string();
    assert_eq!(
        error,
        "shard_get: unit is 48, allowed for columns of q8_0: multiples of 32"
    );
    let cut = Params {
        kind: Kind::AttentionOut,
        dtype: DType::Q8_0,
        shape: [4, 32],
        ..good
    };
    let error = shard(&cut).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let expected = "shard_get: columns 0 to 16 of rank 0 cut blocks of 32 elements of q8_0";
    assert_eq!(error.to_string(), expected);
}

/// Through the C ABI: the same, and what C can get wrong.
#[test]
fn c_asks_the_same() {
    let zeroed = || unsloth_shard_params {
        struct_size: size_of::<unsloth_shard_params>() as u32,
        kind: UNSLOTH_SHARD_KIND_QKV,
        dtype: DType::Bf16 as u32,
        reserved: 0,
        rank: 1,
        size: 2,
        rows: 48,
        columns: 16,
        unit: 0,
        num_heads: 8,
        num_kv_heads: 2,
        head_dim: 4,
        v_head_dim: 0,
    };
    let piece = unsloth_shard_piece {
        row: -1,
        column: -1,
        rows: -1,
        columns: -1,
        to_row: -1,
    };
    let mut told = unsloth_shard {
        struct_size: size_of::<unsloth_shard>() as u32,
        num_pieces: 77,
        rows: -1,
        columns: -1,
        num_heads: -1,
        num_kv_heads: -1,
        first_kv_head: -1,
        pieces: [piece; 3],
    };
    // SAFETY: live structs that say how large they are.
    let get = |params: &unsloth_shard_params, told: &mut unsloth_shard| unsafe {
        unsloth_shard_get(params, told)
    };
    let invalid = UNSLOTH_STATUS_INVALID_ARGUMENT;
    type Case = (fn(&mut unsloth_shard_params), &'static str);
    let cases: [Case; 5] = [
        (|p| p.kind = 9, "shard_get: kind is 9, allowed: 0 to 8"),
        (
            |p| p.dtype = 99,
            "shard_get: dtype is 99, which does not exist",
        ),
        (
            |p| p.rank = -1,
            "shard_get: rank is -1, at least 0 is needed",
        ),
        (
            |p| p.columns = -1,
            "shard_get: columns is -1, at least 0 is needed",
        ),
        (|p| p.reserved = 1, "shard_get: reserved is 1, allowed: 0"),
    ];
    for (spoil, message) in cases {
        let mut params = zeroed();
        spoil(&mut params);
        assert_fails(get(&params, &mut told), invalid, message);
        assert_eq!(
            (told.num_pieces, told.rows),
            (77, -1),
            "a failed call wrote"
        );
    }
    assert_eq!(get(&zeroed(), &mut told), UNSLOTH_STATUS_SUCCESS);
    assert_eq!((told.num_pieces, told.rows, told.columns), (3, 24, 16));
    assert_eq!(
        (told.num_heads, told.num_kv_heads, told.first_kv_head),
        (4, 1, 1)
    );
    let found = told
        .pieces
        .map(|p| (p.row, p.column, p.rows, p.columns, p.to_row));
    assert_eq!(
        found,
        [(16, 0, 16, 16, 0), (36, 0, 4, 16, 16), (44, 0, 4, 16, 20)]
    );
}
