//! Gradients of the attention block against their definition, which is proved by differences of the
//! forward's; what is kept against what is computed again.

mod call;
mod misuse;

use call::*;

use crate::common::attention_block::*;
use crate::common::reference::attention_block::Arithmetic;
use crate::common::reference::mlp::Layer;
use crate::common::workspace::poisoned_workspace;
use crate::common::{FLOATS, TestTensor, assert_gradient_rule, contexts, cut_off, rounded};
use unsloth::ops::attention_block;
use unsloth::ops::linear::Output;
use unsloth::{Context, DType, Layout, Stream};

/// A case, and the lengths of its sequences where they are packed.
#[derive(Clone, Copy, Debug)]
struct Packed {
    case: Case,
    lens: &'static [usize],
    accumulate: bool,
}

const NOT_PACKED: Packed = Packed {
    case: PLAIN,
    lens: &[],
    accumulate: false,
};

fn cases() -> Vec<Packed> {
    let of = |case| Packed { case, ..NOT_PACKED };
    vec![
        of(PLAIN),
        Packed {
            accumulate: true,
            ..of(Case {
                packed: true,
                biases: true,
                tokens: &[9],
                ..PLAIN
            })
        },
        of(Case {
            biases: true,
            norm: Norm::Heads,
            weight_dtype: Some(DType::F32),
            ..PLAIN
        }),
        Packed {
            accumulate: true,
            ..of(Case {
                packed: true,
                biases: true,
                norm: Norm::All,
                heads: (3, 1),
                dims: (8, 5),
                ..PLAIN
            })
        },
        of(Case {
            rotate: false,
            bidirectional: true,
            window: 3,
            tokens: &[3, 11],
            ..PLAIN
        }),
        of(Case {
            rotate: false,
            norm: Norm::Heads,
            tokens: &[7],
            ..PLAIN
        }),
        of(Case {
            window: 4,
            softcap: 5.0,
            logits: true,
            tokens: &[1, 33],
            ..PLAIN
        }),
        Packed {
            lens: &[5, 0, 7],
            ..of(Case {
                tokens: &[12],
                packed: true,
                logits: true,
                ..PLAIN
            })
        },
        Packed {
            lens: &[3, 9],
            ..of(Case {
                tokens: &[12],
                norm: Norm::Heads,
                ..PLAIN
            })
        },
        of(Case {
            tokens: &[1],
            logits: true,
            ..PLAIN
        }),
        Packed {
            accumulate: true,
            ..of(Case {
                tokens: &[0],
                logits: true,
                ..PLAIN
            })
        },
        of(Case {
            tokens: &[2, 0],
            packed: true,
            biases: true,
            ..PLAIN
        }),
    ]
}

/// The gradients' names, in the order of the reference's.
const NAMES: [&str; 12] = [
    "dx",
    "q weight",
    "q bias",
    "k weight",
    "k bias",
    "v weight",
    "v bias",
    "q norm",
    "k norm",
    "sinks",
    "out weight",
    "out bias",
];

impl Packed {
    /// Lengths of the sequences, packed or not.
    fn sequences(&self) -> Vec<usize> {
        match (self.lens, self.case.tokens) {
            ([], [len]) => vec![*len],
            ([], [batch, len]) => vec![*len; *batch],
            (lens, _) => lens.to_vec(),
        }
    }

    fn num_tokens(&self) -> usize {
        self.case.tokens.iter().product()
    }

    /// The shape of a tensor of the tokens.
    fn shape(&self, columns: usize) -> Vec<usize> {
        [self.case.tokens, &[columns]].concat()
    }

    fn columns(&self) -> [usize; 3] {
        let ((nq, nk), (d, dv)) = (self.case.heads, self.case.dims);
        [nq * d, nk * d, nk * dv]
    }

    fn attended(&self) -> usize {
        self.case.heads.0 * self.case.dims.1
    }
}

fn check(ctx: &Context, dtype: DType, packed: &Packed) {
    let call = Call::new(ctx, dtype, packed);
    let (out, kept) = forward(ctx, &call);
    // The output is that of a call that keeps nothing.
    let mut plain_out = TestTensor::poisoned(dtype, out.layout).upload(ctx);
    let mut params = call.forward(Output::Write(plain_out.view_mut()));
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(ctx, size);
    params.workspace = workspace.workspace();
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    assert_same(ctx, &out, &plain_out.download_output());

    // Of parameters, gradients have their dtype or f32.
    let wide = packed.accumulate || dtype == DType::Bf16;
    let grad_dtype = if wide {
        DType::F32
    } else {
        packed.case.weight_dtype.unwrap_or(dtype)
    };
    let before = |layout: Layout| match packed.accumulate {
        true => TestTensor::from_values(grad_dtype, layout, &vec![0.25; layout.num_elements()]),
        false => TestTensor::poisoned(grad_dtype, layout),
    };
    let [qkv, attended, lse] = kept.0.each_ref().map(Some);
    let all = |kept| backward(ctx, &call, kept, &|_| true, &before);
    let got = all([qkv, attended, lse]);
    let bits = |t: &Option<TestTensor>| t.as_ref().map(TestTensor::bits);
    for kept in [[qkv, None, None], [None, attended, lse], [None; 3]] {
        let again = all(kept);
        for (i, (got, again)) in got.iter().zip(&again).enumerate() {
            let there = kept.map(|t| t.is_some());
            assert!(
                bits(got) == bits(again),
                "{}: other bits with {there:?}",
                NAMES[i]
            );
        }
    }

    let (x, dout) = (call.t.x.download().values(), call.dout.download().values());
    let (block, lens) = (call.reference(), packed.sequences());
    let start = if packed.accumulate { 0.25 } else { 0.0 };
    let apart = !packed.case.packed;
    let run = |arithmetic| block.backward((&x, &dout), &lens, arithmetic, apart);
    let exact = listed(run(Arithmetic::Exact), start);
    let terms = run(Arithmetic::Stored(dtype)).terms;
    // Roundings of few elements may cancel by chance: the worse of two ways to round counts.
    let others = [Arithmetic::Plain(dtype), Arithmetic::Stored(dtype)];
    let others = others.map(|arithmetic| listed(run(arithmetic), start));
    let plain = |i: usize, of: DType| -> Vec<f64> {
        let [a, b] = others.each_ref().map(|all| rounded(of, &all[i]));
        let worse = |((a, b), exact): ((f64, f64), &f64)| {
            if (a - exact).abs() < (b - exact).abs() {
                b
            } else {
                a
            }
        };
        a.into_iter().zip(b).zip(&exact[i]).map(worse).collect()
    };
    for (i, got) in unpacked(packed, &got).into_iter().enumerate() {
        let Some(got) = got else {
            let optional = match i {
                7 | 8 => packed.case.norm == Norm::None,
                9 => !packed.case.logits,
                _ => i > 0 && i % 2 == 0 && i < 7 || i == 11,
            };
            assert!(optional, "{} is missing", NAMES[i]);
            continue;
        };
        let of = match i {
            0 => dtype,
            9 => DType::F32,
            _ => grad_dtype,
        };
        let depth = if i == 0 {
            packed.columns().iter().sum()
        } else {
            packed.num_tokens()
        };
        let most = terms[i].max(cut_off(ctx, dtype, depth, &exact[i]));
        assert_gradient_rule(NAMES[i], of, &got, &exact[i], &plain(i, of), most);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// Each gradient alone has the bits that it has among all.
#[test]
fn a_gradient_does_not_depend_on_what_else_is_asked_for() {
    for ctx in contexts() {
        for (packed, norm) in [(false, Norm::Heads), (true, Norm::None)] {
            let case = Case {
                packed,
                norm,
                biases: true,
                logits: true,
                ..PLAIN
            };
            let call = Call::new(&ctx, DType::F32, &Packed { case, ..NOT_PACKED });
            let (_, kept) = forward(&ctx, &call);
            let kept = kept.0.each_ref().map(Some);
            let poisoned = |layout| TestTensor::poisoned(DType::F32, layout);
            let run = |kept, wanted: &dyn Fn(usize) -> bool| {
                backward(&ctx, &call, kept, wanted, &poisoned).map(|t| t.map(|t| t.bits()))
            };
            let all = run(kept, &|_| true);
            for i in (0..12).filter(|i| all[*i].is_some()) {
                for kept in [kept, [None; 3]] {
                    assert!(run(kept, &|j| i == j)[i] == all[i], "{packed} {}", NAMES[i]);
                }
            }
        }
    }
}

/// The reference is the derivative of the forward's, along any direction, by differences.
#[test]
fn the_reference_is_the_derivative_of_the_forwards() {
    let ctx = &contexts()[0];
    for norm in [Norm::Heads, Norm::All, Norm::None] {
        let case = Case {
            norm,
            biases: true,
            logits: true,
            tokens: &[8],
            ..PLAIN
        };
        let packed = Packed {
            case,
            lens: &[3, 5],
            ..NOT_PACKED
        };
        let call = Call::new(ctx, DType::F32, &packed);
        let (x, dout) = (call.t.x.download().values(), call.dout.download().values());
        let (block, lens) = (call.reference(), packed.sequences());
        let g = block.backward((&x, &dout), &lens, Arithmetic::Exact, false);
        let along = Call::new(ctx, DType::F32, &packed);
        let (vx, v) = (along.t.x.download().values(), along.reference());
        let moved = |a: &[f64], v: &[f64], h: f64| -> Vec<f64> {
            a.iter().zip(v).map(|(a, v)| a + h * v).collect()
        };
        let optional = |a: &Option<Vec<f64>>, v: &Option<Vec<f64>>, h: f64| {
            a.as_ref().zip(v.as_ref()).map(|(a, v)| moved(a, v, h))
        };
        let layer = |a: &Layer, v: &Layer, h: f64| Layer {
            weight: moved(&a.weight, &v.weight, h),
            bias: optional(&a.bias, &v.bias, h),
        };
        let loss = |h: f64| {
            let mut at = block.clone();
            at.projections = [0, 1, 2].map(|i| layer(&block.projections[i], &v.projections[i], h));
            at.norms = [0, 1].map(|i| optional(&block.norms[i], &v.norms[i], h));
            at.options.sinks = optional(&block.options.sinks, &v.options.sinks, h);
            at.out = layer(&block.out, &v.out, h);
            let out = at.forward(&moved(&x, &vx, h), &lens, Arithmetic::Exact).out;
            out.iter().zip(&dout).map(|(a, b)| a * b).sum::<f64>()
        };
        let h = 1e-5;
        let difference = (loss(h) - loss(-h)) / (2.0 * h);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let of_layer = |(weight, bias): &(Vec<f64>, Vec<f64>), v: &Layer| {
            dot(weight, &v.weight) + dot(bias, v.bias.as_ref().unwrap())
        };
        let mut derivative = dot(&g.dx, &vx) + of_layer(&g.out, &v.out);
        for i in 0..3 {
            derivative += of_layer(&g.projections[i], &v.projections[i]);
        }
        for (g, v) in g.norms.iter().zip(&v.norms) {
            derivative += v.as_ref().map_or(0.0, |v| dot(g, v));
        }
        derivative += dot(&g.sinks, v.options.sinks.as_ref().unwrap());
        let error = (difference - derivative).abs();
        assert!(
            error < 1e-6 * derivative.abs().max(100.0),
            "{difference} {derivative}"
        );
    }
}
