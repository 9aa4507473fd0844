//! Which tokens of sequences ranks hold: all ranks together have each once.

use proptest::prelude::*;
use unsloth::comm::tokens::{Order, Packed, Params};
use unsloth::ffi::context_parallel_tokens::*;
use unsloth::ffi::status::*;

use crate::common::abi::assert_fails;

proptest! {
    /// Each token is of one rank; positions and ids agree, and the rest is padding.
    #[test]
    fn every_token_is_of_one_rank(
        lengths in prop::collection::vec(0i64..40, 0..5),
        more in 0usize..9,
        size in 1usize..9,
        order in prop::sample::select(Order::ALL.to_vec()),
    ) {
        let longest = lengths.iter().max().map_or(0, |length| *length as usize) + more;
        let mut times = vec![0; lengths.len() * longest];
        for rank in 0..size {
            let of = Params {
                order,
                lengths: Some(&lengths),
                ..Params::new(rank, size, lengths.len(), longest)
            };
            let tokens = of.tokens().unwrap();
            let chunks = size * order.chunks();
            prop_assert_eq!(tokens, longest.div_ceil(chunks) * order.chunks());
            let all: Vec<_> = of.each().unwrap().collect();
            prop_assert_eq!(all.len(), tokens * lengths.len());
            for (i, (position, id)) in all.into_iter().enumerate() {
                if id < 0 {
                    prop_assert_eq!((position, id), (0, -1));
                    continue;
                }
                let (sequence, at) = (id as usize / longest, id as usize % longest);
                prop_assert_eq!((sequence, at), (i / tokens, position as usize));
                prop_assert!((at as i64) < lengths[sequence]);
                times[id as usize] += 1;
            }
        }
        for (id, times) in times.into_iter().enumerate() {
            let is_there = ((id % longest) as i64) < lengths[id / longest];
            prop_assert_eq!(times, i32::from(is_there));
        }
    }

    /// Causal, the queries of every rank see as many keys in zigzag, but for what does not divide.
    #[test]
    fn zigzag_is_even(chunk in 1usize..9, size in 1usize..9) {
        let length = 2 * size * chunk;
        let seen = |rank| {
            let of = Params { order: Order::Zigzag, ..Params::new(rank, size, 1, length) };
            of.each().unwrap().map(|(position, _)| i64::from(position) + 1).sum::<i64>()
        };
        prop_assert!((0..size).all(|rank| seen(rank) == seen(0)));
    }
}

proptest! {
    /// Queries of all ranks are those of the sequences; causal, a rank's keys end with its queries.
    #[test]
    fn packed_sequences_are_cut(
        lengths in prop::collection::vec(0i32..9, 0..6),
        first in 0i32..4,
        more in 0usize..5,
        size in 1usize..7,
        causal in any::<bool>(),
    ) {
        let mut starts = vec![first];
        starts.extend(lengths.iter().scan(first, |start, length| {
            *start += length;
            Some(*start)
        }));
        let last = starts[lengths.len()];
        let tokens = (last as usize).div_ceil(size) + more;
        let mut of_sequence = vec![0; lengths.len()];
        for rank in 0..size {
            let of = Packed { rank, size, tokens, cu_seqlens: &starts, causal };
            let (of_queries, of_keys): (Vec<_>, Vec<_>) = of.each().unwrap().unzip();
            let positions: Vec<_> = of.positions().unwrap().collect();
            let (begin, end) = ((rank * tokens) as i32, ((rank + 1) * tokens) as i32);
            let mut expected = vec![0; tokens];
            for (i, count) in of_sequence.iter_mut().enumerate() {
                let queries = of_queries[i]..of_queries[i + 1];
                let keys = of_keys[i]..of_keys[i + 1];
                *count += queries.len();
                for query in queries.clone() {
                    expected[query as usize] = begin + query - starts[i];
                }
                if !causal {
                    prop_assert_eq!(keys, starts[i]..starts[i + 1]);
                } else if !queries.is_empty() {
                    prop_assert_eq!(keys, starts[i]..begin + queries.end);
                } else {
                    prop_assert!(keys.end <= end);
                }
            }
            prop_assert_eq!(positions, expected);
        }
        let expected: Vec<_> = lengths.iter().map(|length| *length as usize).collect();
        prop_assert_eq!(of_sequence, expected);
    }
}

#[test]
fn packed_sequences_that_are_wrong_are_refused() {
    let good = Packed {
        rank: 1,
        size: 2,
        tokens: 4,
        cu_seqlens: &[0, 3, 8],
        causal: true,
    };
    let found: Vec<_> = good.each().unwrap().collect();
    assert_eq!(found, [(0, 0), (0, 3), (4, 8)]);
    let cases: [(Packed<'_>, &str); 7] = [
        (
            Packed { size: 0, ..good },
            "size is 0, at least 1 is needed",
        ),
        (Packed { rank: 2, ..good }, "rank is 2, allowed: 0 to 1"),
        (
            Packed {
                tokens: 1 << 30,
                ..good
            },
            "tokens is 1073741824, too many on 2 ranks: at most 2147483647",
        ),
        (
            Packed {
                cu_seqlens: &[],
                ..good
            },
            "cu_seqlens has no entries, at least 1 is needed",
        ),
        (
            Packed {
                cu_seqlens: &[0, 9],
                ..good
            },
            "cu_seqlens has 9 at index 1, allowed: 0 to 8",
        ),
        (
            Packed {
                cu_seqlens: &[0, 4, 3],
                ..good
            },
            "cu_seqlens has 3 at index 2, allowed: 4 to 8",
        ),
        (
            Packed {
                cu_seqlens: &[-1, 4],
                ..good
            },
            "cu_seqlens has -1 at index 0, allowed: 0 to 8",
        ),
    ];
    for (packed, expected) in cases {
        let expected = format!("context_parallel_packed_get: {expected}");
        assert_eq!(packed.each().err().unwrap().to_string(), expected);
        assert_eq!(packed.positions().err().unwrap().to_string(), expected);
    }
}

#[test]
fn what_is_wrong_is_refused() {
    let good = Params::new(0, 2, 2, 6);
    good.tokens().unwrap();
    let cases: [(Params<'_>, &str); 7] = [
        (
            Params { size: 0, ..good },
            "size is 0, allowed: 1 to 2147483647",
        ),
        (Params { rank: 2, ..good }, "rank is 2, allowed: 0 to 1"),
        (
            Params {
                length: 1 << 31,
                ..good
            },
            "length is 2147483648, allowed: 0 to 2147483647",
        ),
        (
            Params {
                lengths: Some(&[6, 7]),
                ..good
            },
            "lengths has 7 at index 1, allowed: 0 to 6",
        ),
        (
            Params {
                lengths: Some(&[-1, 6]),
                ..good
            },
            "lengths has -1 at index 0, allowed: 0 to 6",
        ),
        (
            Params {
                lengths: Some(&[6]),
                ..good
            },
            "lengths has 1 entries, batch is 2",
        ),
        (
            Params {
                batch: usize::MAX / 4,
                ..good
            },
            "batch is 4611686018427387903, too many of 6 tokens each",
        ),
    ];
    for (params, expected) in cases {
        let error = params.fill(None, None).unwrap_err();
        let expected = format!("context_parallel_tokens_get: {expected}");
        assert_eq!(error.to_string(), expected);
    }
    let mut positions = [7; 5];
    let error = good.fill(Some(&mut positions), None).unwrap_err();
    let expected = "context_parallel_tokens_get: positions has room for 5, the rank has 6 tokens";
    assert_eq!(error.to_string(), expected);
    let error = good.fill(None, Some(&mut [])).unwrap_err();
    let expected = "context_parallel_tokens_get: ids has room for 0, the rank has 6 tokens";
    assert_eq!(error.to_string(), expected);
    assert_eq!(positions, [7; 5]);
}

/// Through C: the number first, then all; nothing is written where it is refused.
#[test]
fn c_has_the_same() {
    let lengths = [5, 2];
    let mut p = unsloth_context_parallel_tokens_params {
        struct_size: size_of::<unsloth_context_parallel_tokens_params>() as u32,
        order: UNSLOTH_CONTEXT_ORDER_ZIGZAG,
        rank: 0,
        size: 2,
        batch: 2,
        length: 5,
        lengths: lengths.as_ptr(),
    };
    let (mut tokens, mut positions, mut ids) = (0, [9; 9], [9; 9]);
    let mut get = |p: &_, capacity, asked: bool| {
        let [positions, ids] = match asked {
            true => [positions.as_mut_ptr().cast(), ids.as_mut_ptr().cast::<u8>()],
            false => [std::ptr::null_mut(); 2],
        };
        // SAFETY: they have room for 9 entries each, and `p` is live.
        let (tokens, ids) = (&mut tokens, ids.cast());
        unsafe {
            unsloth_context_parallel_tokens_get(p, tokens, positions.cast::<i32>(), ids, capacity)
        }
    };
    assert_eq!(get(&p, 0, false), UNSLOTH_STATUS_SUCCESS);
    assert_eq!(get(&p, 9, true), UNSLOTH_STATUS_SUCCESS);
    assert_eq!(tokens, 4);
    assert_eq!(positions, [0, 1, 0, 0, 0, 1, 0, 0, 9]);
    assert_eq!(ids, [0, 1, -1, -1, 5, 6, -1, -1, 9]);
    let mut get = |p: &_, capacity| {
        let (tokens, positions) = (&mut tokens, positions.as_mut_ptr());
        // SAFETY: as above.
        unsafe {
            unsloth_context_parallel_tokens_get(p, tokens, positions, ids.as_mut_ptr(), capacity)
        }
    };
    let invalid = UNSLOTH_STATUS_INVALID_ARGUMENT;
    assert_fails(
        get(&p, 7),
        invalid,
        "context_parallel_tokens_get: capacity is 7, the rank has 8 tokens",
    );
    p.order = 2;
    assert_fails(
        get(&p, 9),
        invalid,
        "context_parallel_tokens_get: order is 2, allowed: 0 (contiguous), 1 (zigzag)",
    );
    p.order = 0;
    p.batch = -1;
    assert_fails(
        get(&p, 9),
        invalid,
        "context_parallel_tokens_get: batch is -1, at least 0 is needed",
    );
    assert_eq!((tokens, positions[8], ids[8]), (4, 9, 9));
}
