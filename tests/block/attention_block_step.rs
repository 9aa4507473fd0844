//! Steps of one token a sequence with a cache, which a GPU may run as one kernel between the projections: beside the same steps with
//! a window that hides nothing, which are the operations one by one.

use crate::common::attention_block::*;
use crate::common::workspace::poisoned_workspace;
use crate::common::{TestTensor, contexts, for_each_case, rng};
use unsloth::kv_cache::{Append, Config, KvCache, PageLayout};
use unsloth::ops::attention;
use unsloth::ops::attention_block;
use unsloth::ops::linear::Output;
use unsloth::ops::rope::{Angles, Rotation, Style};
use unsloth::{Buffer, Context, DType, Layout, Stream};

/// A step, and what came before it.
#[derive(Clone, Copy, Debug)]
struct Step {
    dtype: DType,
    heads: (usize, usize),
    dim: usize,
    page_size: usize,
    page_layout: PageLayout,
    /// Tokens of each sequence before the first step.
    before: &'static [usize],
    /// That any may have.
    most: usize,
    turn: Turn,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    None,
    Halves,
    /// Neighbours, of so many components.
    Neighbours(usize),
    /// The first half of so many components.
    Some(usize),
    /// By factors, or by a table.
    Factors,
    Table,
}

const PLAIN_STEP: Step = Step {
    dtype: DType::Bf16,
    heads: (8, 2),
    dim: 128,
    page_size: 16,
    page_layout: PageLayout::TokenMajor,
    before: &[39],
    most: 256,
    turn: Turn::Halves,
};

/// Lengths about the edges of groups of 16 keys, of a warp's, of a block's and of a cluster's turns; each group of heads; pages
/// shorter and longer than a group; every way of turning.
fn steps() -> Vec<Step> {
    let mut all = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for (heads, dim) in [
            ((8, 2), 128),
            ((8, 1), 64),
            ((3, 3), 128),
            ((16, 1), 128),
            ((9, 3), 64),
            ((12, 1), 64),
        ] {
            all.push(Step {
                dtype,
                heads,
                dim,
                before: &[15, 0, 130],
                ..PLAIN_STEP
            });
        }
    }
    for before in [
        &[0][..],
        &[14],
        &[126],
        &[127],
        &[255, 3],
        &[1021],
        &[1022, 17, 640],
        &[1300],
        &[3070, 2],
    ] {
        all.push(Step {
            before,
            most: before[0] + 3,
            ..PLAIN_STEP
        });
        all.push(Step {
            before,
            most: 4096,
            dim: 64,
            ..PLAIN_STEP
        });
    }
    for (page_size, page_layout) in [
        (1, PageLayout::TokenMajor),
        (4, PageLayout::HeadMajor),
        (64, PageLayout::HeadMajor),
        (256, PageLayout::TokenMajor),
    ] {
        all.push(Step {
            page_size,
            page_layout,
            before: &[77, 5],
            ..PLAIN_STEP
        });
    }
    for turn in [
        Turn::None,
        Turn::Neighbours(128),
        Turn::Neighbours(32),
        Turn::Some(64),
        Turn::Some(6),
        Turn::Factors,
        Turn::Table,
    ] {
        all.push(Step { turn, ..PLAIN_STEP });
    }
    // More pairs than are one kernel.
    all.push(Step {
        before: &[3; 40],
        heads: (8, 8),
        ..PLAIN_STEP
    });
    all
}

const ANY_WINDOW: usize = 1 << 20;

#[test]
fn steps_are_their_operations() {
    for ctx in contexts() {
        for_each_case(&steps(), |step| run(&ctx, step));
    }
}

fn run(ctx: &Context, step: &Step) {
    let sequences = step.before.len();
    let tokens: &'static [usize] = Box::leak(Box::new([sequences]));
    let case = Case {
        tokens,
        heads: step.heads,
        dims: (step.dim, step.dim),
        packed: true,
        rotate: false,
        ..PLAIN
    };
    let (dtype, kv_heads) = (step.dtype, step.heads.1);
    let pages = sequences * step.most.div_ceil(step.page_size);
    let config = Config {
        page_size: step.page_size,
        page_layout: step.page_layout,
        max_batch_size: sequences,
        max_sequence_length: step.most.next_multiple_of(step.page_size),
        max_batch_tokens: step.before.iter().sum::<usize>().max(sequences),
        ..Config::new(1, kv_heads, step.dim, pages, dtype)
    };
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let held: usize = step.before.iter().sum();
    let [k, v] = [0, 1].map(|_| {
        let layout = contiguous(&[held, kv_heads, step.dim]);
        TestTensor::normal(&mut rng(), dtype, layout).upload(ctx)
    });
    let mut caches = [0, 1].map(|_| KvCache::new(ctx, &config).unwrap());
    let ids = [0, 1].map(|i: usize| {
        let cache = &mut caches[i];
        let ids: Vec<_> = (0..sequences)
            .map(|_| cache.create_sequence().unwrap())
            .collect();
        let batch: Vec<_> = ids
            .iter()
            .copied()
            .zip(step.before.iter().copied())
            .collect();
        cache.extend(&batch, Stream::DEFAULT).unwrap();
        let append = Append {
            layer: 0,
            k: k.view(),
            v: v.view(),
            q: None,
            rotation: None,
        };
        cache.append(&append, Stream::DEFAULT).unwrap();
        ids
    });
    let half = match step.turn {
        Turn::Neighbours(dim) | Turn::Some(dim) => dim / 2,
        _ => step.dim / 2,
    };
    let numbers = |shape: &[usize], of: &dyn Fn(f64) -> f64| {
        let values = (0..shape.iter().product()).map(|i: usize| of(i as f64));
        let values: Vec<f64> = values.collect();
        TestTensor::from_values(DType::F32, contiguous(shape), &values).upload(ctx)
    };
    let factors = numbers(&[half], &|i| 1.0 + i / 50.0);
    let table = [0.3, 1.1].map(|phase| numbers(&[step.most, half], &|i| (i * 0.7 + phase).cos()));
    let rotation = match step.turn {
        Turn::None => None,
        turn => Some(Rotation {
            rotary_dim: 2 * half,
            style: match turn {
                Turn::Neighbours(_) => Style::Interleaved,
                _ => Style::HalfSplit,
            },
            angles: match turn {
                Turn::Factors => Angles::Computed {
                    theta: 500.0,
                    scaling: Default::default(),
                    freq_factors: Some(factors.view()),
                    attention_factor: 1.5,
                },
                Turn::Table => Angles::Table {
                    cos: table[0].view(),
                    sin: table[1].view(),
                },
                _ => Angles::default(),
            },
        }),
    };
    for _ in 0..3 {
        let t = Tensors::new(ctx, dtype, &case);
        let outs = [0, 1].map(|i: usize| {
            let cache = &mut caches[i];
            let batch: Vec<_> = ids[i].iter().map(|id| (*id, 1)).collect();
            cache.extend(&batch, Stream::DEFAULT).unwrap();
            let (mut out, _) = t.outputs(ctx, &case);
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            params.rotation = rotation;
            params.window = [0, ANY_WINDOW][i];
            params.cache = Some(cache.lend(0).unwrap());
            attention_block::supported(ctx, &params).unwrap();
            let size = attention_block::workspace_size(ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(ctx, size);
            params.workspace = workspace.workspace();
            attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
            out.download_output()
        });
        assert_same(ctx, &outs[0], &outs[1]);
    }
    // The caches hold the same: one kernel gives the same bits of both.
    let q = TestTensor::normal(
        &mut rng(),
        dtype,
        contiguous(&[sequences, step.heads.0, step.dim]),
    );
    let q = q.upload(ctx);
    let [a, b] = [0, 1].map(|i: usize| attend(ctx, &mut caches[i], &q));
    assert!(a.bits() == b.bits(), "the caches differ");
}

fn attend(ctx: &Context, cache: &mut KvCache, q: &crate::common::DeviceTensor) -> TestTensor {
    let mut out = TestTensor::poisoned(q.dtype, q.layout).upload(ctx);
    let params = cache.attention(0, q.view(), out.view_mut()).unwrap();
    let mut workspace = Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}
