//! Attention, full and causal, with as many key heads as query heads and with fewer.

use unsloth::ops::attention::{self, backward};
use unsloth::{DType, Stream};

use super::{Leaf, assert_gradients, gradients};
use crate::candle_llama;
use crate::common::workspace::poisoned_workspace;
use crate::common::{contexts, for_each_case};
use crate::{normal, output};

/// Scores reach 5; exp makes an error of theirs as much larger relative to the weights.
const UNITS: f64 = 32.0;

#[derive(Debug)]
struct Case {
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    causal: bool,
}

const BASE: Case = Case {
    queries: 33,
    keys: 33,
    heads: 4,
    kv_heads: 4,
    dim: 48,
    causal: false,
};

const CASES: [Case; 6] = [
    BASE,
    Case {
        causal: true,
        ..BASE
    },
    Case {
        kv_heads: 2,
        ..BASE
    },
    Case {
        heads: 9,
        kv_heads: 3,
        queries: 130,
        keys: 130,
        dim: 64,
        causal: true,
    },
    Case {
        queries: 1,
        keys: 70,
        kv_heads: 1,
        ..BASE
    },
    // The last query sees the last key.
    Case {
        queries: 20,
        keys: 45,
        kv_heads: 2,
        causal: true,
        ..BASE
    },
];

#[test]
fn attention() {
    for ctx in contexts() {
        for_each_case(&CASES, |case| {
            let batch = 2;
            let of_queries = [batch, case.queries, case.heads, case.dim];
            let of_keys = [batch, case.keys, case.kv_heads, case.dim];
            let q = Leaf::normal(&ctx, &of_queries);
            let [k, v] = [0, 1].map(|_| Leaf::normal(&ctx, &of_keys));
            let dout = normal(DType::F32, &of_queries);
            let ours = dout.upload(&ctx);
            let mut out = output(&ctx, DType::F32, &of_queries);
            let mut lse = output(&ctx, DType::F32, &[batch, case.heads, case.queries]);
            let views = (q.ours.view(), k.ours.view(), v.ours.view());
            let mut dq = q.gradient(&ctx);
            let mut dk = k.gradient(&ctx);
            let mut dv = v.gradient(&ctx);
            let mut params = attention::Params::new(views.0, views.1, views.2, out.view_mut());
            params.causal = case.causal;
            params.lse = Some(lse.view_mut());
            attention::forward(&ctx, &params, Stream::DEFAULT).unwrap();

            let mut params = backward::Params::new(
                views.0,
                views.1,
                views.2,
                out.view(),
                lse.view(),
                ours.view(),
            );
            params.causal = case.causal;
            params.dq = Some(dq.view_mut());
            params.dk = Some(dk.view_mut());
            params.dv = Some(dv.view_mut());
            let size = backward::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            attention::backward(&ctx, &params, Stream::DEFAULT).unwrap();

            let y = || {
                let heads_first = |x: &Leaf| x.theirs.transpose(1, 2)?.contiguous();
                let mask = candle_llama::causal_mask(case.queries, case.keys)?;
                let mask = case.causal.then_some(&mask);
                let (q, k, v) = (heads_first(&q)?, heads_first(&k)?, heads_first(&v)?);
                candle_llama::attention(&q, &k, &v, mask)?.transpose(1, 2)
            };
            let theirs = gradients(&[(y(), &dout)]);
            assert_gradients(
                "attention",
                &[("q", &q, &dq), ("k", &k, &dk), ("v", &v, &dv)],
                &theirs,
                UNITS,
            );
        });
    }
}
