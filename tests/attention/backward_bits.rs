//! Which gradients of attention have the same bits in every call on a GPU.

use crate::common::attention::backward::{BackwardCall, Host, Wanted};
use crate::common::attention::{Case, KeyForm, QueryForm};
use crate::common::rng;
use unsloth::{Context, DType, Stream};

/// The same bits of gradients of each case in every call.
fn expect_same_bits(ctx: &Context, cases: &[Case], wanted: Wanted) {
    for case in cases {
        for dtype in [DType::F16, DType::Bf16] {
            let host = Host::new(&mut rng(), dtype, case, wanted);
            let mut call = BackwardCall::new(ctx, case, wanted, &host).unwrap();
            let mut bits = || -> Vec<Vec<u8>> {
                call.queue(ctx, Stream::DEFAULT);
                ctx.synchronize(Stream::DEFAULT).unwrap();
                let results = call.results();
                results.iter().flatten().map(|t| t.bits()).collect()
            };
            let first = bits();
            for _ in 0..3 {
                assert!(bits() == first, "{dtype}, {case:?}");
            }
        }
    }
}

/// Of up to 256 keys without asking: a sum of two parts is the same in any order.
#[test]
fn bits_of_two_parts_are_the_same() {
    let Some(ctx) = crate::common::gpu() else {
        return;
    };
    let cases = [64, 96, 128, 256].map(|dim| Case {
        lens: vec![(700, 256); 2],
        heads: 8,
        kv_heads: 4,
        dim,
        dim_v: dim,
        ..Case::default()
    });
    expect_same_bits(&ctx, &cases, Wanted::ALL);
}

/// Where they are asked for, the same bits in every call, also where blocks of keys add to sums in memory, several heads' blocks at once.
#[test]
fn bits_of_sums_are_the_same() {
    let Some(ctx) = crate::common::gpu() else {
        return;
    };
    let wanted = Wanted {
        deterministic: true,
        ..Wanted::ALL
    };
    let base = Case {
        lens: vec![(130, 1250)],
        heads: 4,
        kv_heads: 2,
        ..Case::default()
    };
    let packed = Case {
        lens: vec![(70, 2500), (65, 300)],
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        causal: true,
        ..base.clone()
    };
    let window = Case {
        lens: vec![(150, 1700)],
        window_left: Some(1300),
        window_right: Some(400),
        ..base.clone()
    };
    for dim in [64, 128, 192, 256] {
        let cases = [&base, &packed, &window].map(|case| Case {
            dim,
            dim_v: dim,
            ..case.clone()
        });
        expect_same_bits(&ctx, &cases, wanted);
    }
}
