//! What must hold of attention whatever the numbers: splitting and merging, order of keys, equal
//! forms, equal bits on any threads.

use crate::common::attention::{Case, KeyForm, QueryForm, Scratch, Strides, run};
use crate::common::{DeviceTensor, FLOATS, TestTensor, contexts};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use unsloth::ops::attention::{self, PageLayout, Params};
use unsloth::{Backend, Context, ContextOptions, DType, Layout, Stream};

fn tensor(values: &[f64], shape: &[usize]) -> TestTensor {
    TestTensor::of(DType::F32, shape, values)
}

/// Plain attention of one sequence: `out` and `lse`.
fn plain(ctx: &Context, q: &TestTensor, k: &TestTensor, v: &TestTensor) -> (Vec<f64>, Vec<f64>) {
    let shape = q.layout.shape();
    let poisoned = |dtype, shape: &[usize]| {
        TestTensor::poisoned(dtype, Layout::contiguous(shape).unwrap()).upload(ctx)
    };
    let mut out = poisoned(q.dtype, &[1, shape[1], shape[2], v.layout.dim(3)]);
    let mut lse = poisoned(DType::F32, &[1, shape[2], shape[1]]);
    let (q, k, v) = (q.upload(ctx), k.upload(ctx), v.upload(ctx));
    let mut params = Params::new(q.view(), k.view(), v.view(), out.view_mut());
    params.lse = Some(lse.view_mut());
    let size = attention::workspace_size(ctx, &params).unwrap();
    let mut scratch = Scratch::new(ctx, size);
    params.workspace = scratch.workspace();
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let values = |t: &DeviceTensor| t.download_output().values();
    (values(&out), values(&lse))
}

fn assert_near(what: &str, a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a == b || (a - b).abs() <= tolerance,
            "{what}: {a} and {b} at {i}"
        );
    }
}

#[derive(Clone, Debug)]
struct Sizes {
    seed: u64,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let heads = prop::sample::select(vec![(1, 1), (4, 2), (6, 1)]);
    (any::<u64>(), 1usize..40, 2usize..200, heads, 1usize..40).prop_map(
        |(seed, queries, keys, (heads, kv_heads), dim)| Sizes {
            seed,
            queries,
            keys,
            heads,
            kv_heads,
            dim,
        },
    )
}

impl Sizes {
    fn tensors(&self) -> [TestTensor; 3] {
        let rng = &mut StdRng::seed_from_u64(self.seed);
        let mut normal = |n, heads| {
            TestTensor::normal(
                rng,
                DType::F32,
                Layout::contiguous(&[1, n, heads, self.dim]).unwrap(),
            )
        };
        [
            normal(self.queries, self.heads),
            normal(self.keys, self.kv_heads),
            normal(self.keys, self.kv_heads),
        ]
    }

    /// Keys or values at the given places.
    fn picked(&self, t: &TestTensor, keys: &[usize]) -> TestTensor {
        let (values, width) = (t.values(), self.kv_heads * self.dim);
        let picked: Vec<f64> = keys
            .iter()
            .flat_map(|&j| values[j * width..][..width].iter().copied())
            .collect();
        tensor(&picked, &[1, keys.len(), self.kv_heads, self.dim])
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Attention over two disjoint sets of keys, merged by LSE, is attention over their union.
    #[test]
    fn parts_merge_by_lse(sizes in sizes(), share in 0.0f64..1.0) {
        for ctx in contexts() {
            let [q, k, v] = sizes.tensors();
            let cut = (share * sizes.keys as f64) as usize;
            let (first, second): (Vec<usize>, Vec<usize>) = (0..sizes.keys).partition(|&j| j < cut);
            let part = |keys: &[usize]| plain(&ctx, &q, &sizes.picked(&k, keys), &sizes.picked(&v, keys));
            let (whole_out, whole_lse) = plain(&ctx, &q, &k, &v);
            let ((out1, lse1), (out2, lse2)) = (part(&first), part(&second));
            let lse: Vec<f64> = lse1.iter().zip(&lse2).map(|(a, b)| {
                let max = a.max(*b);
                max + ((a - max).exp() + (b - max).exp()).ln()
            }).collect();
            let row = |index: usize| {
                let row = index / sizes.dim;
                (row % sizes.heads) * sizes.queries + row / sizes.heads
            };
            let out: Vec<f64> = (0..out1.len()).map(|i| {
                let r = row(i);
                (lse1[r] - lse[r]).exp() * out1[i] + (lse2[r] - lse[r]).exp() * out2[i]
            }).collect();
            assert_near("lse", &lse, &whole_lse, 2e-5);
            assert_near("out", &out, &whole_out, 2e-5);
        }
    }

    /// Without a mask the order of keys does not matter.
    #[test]
    fn keys_may_be_permuted(sizes in sizes()) {
        for ctx in contexts() {
            let [q, k, v] = sizes.tensors();
            let mut order: Vec<usize> = (0..sizes.keys).collect();
            order.shuffle(&mut StdRng::seed_from_u64(sizes.seed ^ 1));
            let (out, lse) = plain(&ctx, &q, &k, &v);
            let (shuffled_out, shuffled_lse) = plain(&ctx, &q, &sizes.picked(&k, &order), &sizes.picked(&v, &order));
            assert_near("out", &out, &shuffled_out, 2e-5);
            assert_near("lse", &lse, &shuffled_lse, 2e-5);
        }
    }

    /// Paged, packed and padded keys, and packed queries, give the bits of each sequence on its
    /// own. What is given around them does not matter.
    #[test]
    fn forms_are_equal(
        seed in any::<u64>(),
        lens in prop::collection::vec((0usize..20, 0usize..90), 1..5),
        page_size in prop::sample::select(vec![1usize, 2, 16, 64]),
        head_major in any::<bool>(),
        causal in any::<bool>(),
        window_left in prop::option::of(1usize..100),
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
    ) {
        let page_layout = if head_major { PageLayout::HeadMajor } else { PageLayout::TokenMajor };
        for ctx in contexts() {
            let forms = [KeyForm::Packed, KeyForm::Padded, KeyForm::Paged(page_size, page_layout)];
            let results: Vec<Vec<u8>> = forms.into_iter().map(|keys| {
                let strides = if keys == KeyForm::Padded { Strides::HeadsFirst } else { Strides::Contiguous };
                let case = Case {
                    lens: lens.clone(), causal, window_left, keys, strides, queries: QueryForm::Packed, ..Case::default()
                };
                // The same seed draws the same sequences before anything else.
                run(&ctx, &case, &case.inputs(&mut StdRng::seed_from_u64(seed), dtype)).0.bits()
            }).collect();
            prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]));

            let case = Case {
                lens: lens.clone(), causal, window_left, queries: QueryForm::Packed, keys: KeyForm::Packed, ..Case::default()
            };
            let inputs = case.inputs(&mut StdRng::seed_from_u64(seed), dtype);
            let together = run(&ctx, &case, &inputs).0.values();
            let mut before = 0;
            for sequence in inputs.sequences {
                let n = sequence.q.len();
                let alone = Case { lens: vec![(sequence.q_len, sequence.k_len)], queries: QueryForm::Batched, keys: KeyForm::Batched, ..case.clone() };
                let mut inputs = alone.inputs(&mut StdRng::seed_from_u64(seed), dtype);
                inputs.q.set_values(&sequence.q);
                inputs.k.set_values(&sequence.k);
                inputs.v.set_values(&sequence.v);
                prop_assert_eq!(&run(&ctx, &alone, &inputs).0.values(), &together[before..before + n]);
                before += n;
            }
        }
    }
}

/// Cases that take every path of the CPU backend: tiles of many rows, of few rows, split keys.
fn every_path() -> Vec<Case> {
    let base = Case {
        causal: true,
        sinks: true,
        ..Case::default()
    };
    vec![
        Case {
            lens: vec![(150, 150); 3],
            heads: 6,
            ..base.clone()
        },
        Case {
            lens: vec![(1, 3000)],
            ..base.clone()
        },
        Case {
            lens: vec![(9, 2500); 2],
            ..base.clone()
        },
        Case {
            lens: vec![(1, 2100), (70, 70), (5, 900), (0, 3)],
            queries: QueryForm::Packed,
            keys: KeyForm::Paged(16, PageLayout::TokenMajor),
            ..base
        },
    ]
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for case in every_path() {
        let inputs = case.inputs(&mut crate::common::rng(), DType::F32);
        let results: Vec<_> = [1, 2, 3, 8]
            .into_iter()
            .map(|num_threads| {
                let options = ContextOptions {
                    backend: Backend::Cpu,
                    num_threads,
                    ..ContextOptions::default()
                };
                let (out, lse) = run(&Context::new(&options).unwrap(), &case, &inputs);
                (out.bits(), lse.bits())
            })
            .collect();
        assert!(
            results.windows(2).all(|pair| pair[0] == pair[1]),
            "{case:?}"
        );
    }
}

#[test]
fn one_context_serves_eight_threads() {
    for ctx in contexts() {
        for case in every_path() {
            let inputs = case.inputs(&mut crate::common::rng(), DType::Bf16);
            let (out, lse) = run(&ctx, &case, &inputs);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        let (again, lse_again) = run(&ctx, &case, &inputs);
                        assert!(
                            again.bits() == out.bits() && lse_again.bits() == lse.bits(),
                            "{case:?}"
                        );
                    });
                }
            });
        }
    }
}

/// One query that sees nothing gives zeros and LSE −∞ (its sink, if there is one), beside queries
/// that see something.
#[test]
fn hidden_rows() {
    for ctx in contexts() {
        for queries in [2, 40] {
            for sink in [false, true] {
                let shape = [1, queries, 2, 8];
                let q = tensor(&vec![1.0; queries * 16], &shape).upload(&ctx);
                let k = tensor(&vec![0.5; 3 * 16], &[1, 3, 2, 8]).upload(&ctx);
                let v = tensor(&vec![2.0; 3 * 16], &[1, 3, 2, 8]).upload(&ctx);
                let visible: Vec<f64> = (0..queries * 3)
                    .map(|i| f64::from(u8::from(i / 3 != 1)))
                    .collect();
                let mask = TestTensor::of(DType::Bool, &[1, 1, queries, 3], &visible).upload(&ctx);
                let sinks = tensor(&[0.25, 0.75], &[2]).upload(&ctx);
                let mut out = TestTensor::poisoned(DType::F32, Layout::contiguous(&shape).unwrap())
                    .upload(&ctx);
                let lse = Layout::contiguous(&[1, 2, queries]).unwrap();
                let mut lse = TestTensor::poisoned(DType::F32, lse).upload(&ctx);
                let mut params = Params::new(q.view(), k.view(), v.view(), out.view_mut());
                params.lse = Some(lse.view_mut());
                params.mask = Some(mask.view());
                params.sinks = sink.then(|| sinks.view());
                attention::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                let (out, lse) = (
                    out.download_output().values(),
                    lse.download_output().values(),
                );
                assert!(out[16..32].iter().all(|x| *x == 0.0));
                assert!(out[..16].iter().chain(&out[32..]).all(|x| *x > 0.5));
                let hidden = [lse[1], lse[queries + 1]];
                assert_eq!(
                    hidden,
                    if sink {
                        [0.25, 0.75]
                    } else {
                        [f64::NEG_INFINITY; 2]
                    }
                );
            }
        }
    }
}

/// A NaN in a visible key or value reaches the output; it is never taken for a hidden key.
#[test]
fn nan_comes_through() {
    for ctx in contexts() {
        for (queries, dtype) in [1, 40].into_iter().flat_map(|n| FLOATS.map(|d| (n, d))) {
            for keys in [5, 2500] {
                for spoil in 0..3 {
                    let normal = |n| vec![0.5; n * 8];
                    let mut values = [normal(queries), normal(keys), normal(keys)];
                    let place = values[spoil].len() - 3;
                    values[spoil][place] = f64::NAN;
                    let [q, k, v] = [(0, queries), (1, keys), (2, keys)]
                        .map(|(i, n)| TestTensor::of(dtype, &[1, n, 1, 8], &values[i]));
                    let (out, _) = plain(&ctx, &q, &k, &v);
                    assert!(
                        out[(queries - 1) * 8 + 5].is_nan(),
                        "{dtype} {queries} {keys} {spoil}"
                    );
                }
            }
        }
    }
}
