//! What attention's f32 arithmetic is held to beyond the rule for its results: errors of long heads, and the processor's flags.

use rand::Rng;
use unsloth::ops::attention::{self, Params};
use unsloth::{Context, ContextOptions, DType, Stream, TensorMut, TensorRef};

use crate::common::rng;
use crate::common::tensor::normal;

/// One head of `keys` tokens, f32: queries, keys and values, which are `dim` long.
struct Inputs {
    keys: usize,
    dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Inputs {
    fn new(rng: &mut impl Rng, queries: usize, keys: usize, dim: usize) -> Inputs {
        let mut random = |n: usize| (0..n * dim).map(|_| normal(rng) as f32).collect();
        Inputs {
            keys,
            dim,
            q: random(queries),
            k: random(keys),
            v: random(keys),
        }
    }

    fn run(&self, ctx: &Context, change: impl Fn(&mut Params<'_>)) -> Vec<f32> {
        let queries = self.q.len() / self.dim;
        let mut out = vec![f32::NAN; self.q.len()];
        let [q, k] = [queries, self.keys].map(|tokens| [1, tokens, 1, self.dim]);
        let mut params = Params::new(
            TensorRef::from_slice(&self.q, &q).unwrap(),
            TensorRef::from_slice(&self.k, &k).unwrap(),
            TensorRef::from_slice(&self.v, &k).unwrap(),
            TensorMut::from_slice(&mut out, &q).unwrap(),
        );
        change(&mut params);
        attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
        out
    }

    /// Softmax of the scaled scores times the values, with sums by `dot`, the rest in f64.
    fn expected(&self, dot: impl Fn(&[f32], &[f32]) -> f64) -> Vec<f64> {
        let scale = 1.0 / (self.dim as f64).sqrt();
        let column =
            |x: usize| -> Vec<f32> { self.v.iter().skip(x).step_by(self.dim).copied().collect() };
        let columns: Vec<Vec<f32>> = (0..self.dim).map(column).collect();
        let mut out = Vec::new();
        for q in self.q.chunks(self.dim) {
            let scores: Vec<f64> = (self.k.chunks(self.dim))
                .map(|k| scale * dot(q, k))
                .collect();
            let max = scores.iter().fold(f64::MIN, |m, s| m.max(*s));
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let narrow: Vec<f32> = weights.iter().map(|w| (w / sum) as f32).collect();
            out.extend(columns.iter().map(|v| dot(&narrow, v)));
        }
        out
    }
}

/// A dot product as a plain f32 implementation has it: eight partial sums, as of one vector register.
fn plain(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f32; 8];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        sums[i % 8] += a * b;
    }
    f64::from(sums.iter().sum::<f32>())
}

fn exact(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

/// The sum of squared errors.
fn squares(a: impl Iterator<Item = f64>, b: &[f64]) -> f64 {
    a.zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

#[test]
fn long_heads_are_as_accurate_as_plain_f32() {
    let ctx = Context::cpu().unwrap();
    let mut rng = rng();
    for queries in [1, 40] {
        // Of thousands of elements the root mean square says what the arithmetic loses; the worst of
        // them says which input was drawn.
        let (mut ours, mut theirs) = (0.0f64, 0.0f64);
        for _ in 0..8 {
            let inputs = Inputs::new(&mut rng, queries, 300, 512);
            let truth = inputs.expected(exact);
            let out = inputs.run(&ctx, |_| ());
            ours += squares(out.iter().map(|x| f64::from(*x)), &truth);
            theirs += squares(inputs.expected(plain).into_iter(), &truth);
        }
        let (ours, theirs) = (ours.sqrt(), theirs.sqrt());
        println!("{queries} queries: {ours:.2e}, plain {theirs:.2e}");
        assert!(
            ours < 1.5 * theirs,
            "{queries} queries: {ours:e}, plain {theirs:e}"
        );
    }
}

/// Nothing in the work on finite numbers is invalid: masks hide with −∞, and −∞ is never subtracted from itself.
#[test]
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
fn finite_inputs_raise_no_invalid_operation() {
    #[link(name = "m")]
    unsafe extern "C" {
        fn feclearexcept(flags: i32) -> i32;
        fn fetestexcept(flags: i32) -> i32;
    }
    const FE_INVALID: i32 = 1;
    // The flags are a thread's own, and with one thread that is the caller's.
    let options = ContextOptions {
        num_threads: 1,
        ..ContextOptions::default()
    };
    let ctx = Context::new(&options).unwrap();
    let mut rng = rng();
    for (queries, keys, dim) in [
        (1, 3, 24),
        (1, 70, 33),
        (5, 200, 64),
        (40, 130, 40),
        (40, 20, 8),
    ] {
        let inputs = Inputs::new(&mut rng, queries, keys, dim);
        let hidden = vec![f32::NEG_INFINITY; queries * keys];
        let mask: Vec<u8> = (0..queries * keys).map(|i| u8::from(i % 3 == 0)).collect();
        type Change<'c> = (&'static str, &'c dyn Fn(&mut Params<'_>));
        let changes: [Change<'_>; 4] = [
            ("plain", &|_| ()),
            ("causal", &|p| p.causal = true),
            ("window", &|p| (p.causal, p.window_left) = (true, 2)),
            ("softcap", &|p| (p.causal, p.softcap) = (true, 20.0)),
        ];
        for (what, change) in changes {
            // SAFETY: only the flags change.
            unsafe { feclearexcept(FE_INVALID) };
            inputs.run(&ctx, change);
            // SAFETY: the flags are read.
            assert_eq!(
                unsafe { fetestexcept(FE_INVALID) },
                0,
                "{what} {queries} {keys} {dim}"
            );
        }
        // With a mask that hides some, and a bias that hides all.
        let mut out = vec![f32::NAN; queries * dim];
        let shape = [1, 1, queries, keys];
        let layout = unsloth::Layout::contiguous(&shape).unwrap();
        for hide_all in [false, true] {
            let [q, k] = [queries, keys].map(|tokens| [1, tokens, 1, dim]);
            let mut params = Params::new(
                TensorRef::from_slice(&inputs.q, &q).unwrap(),
                TensorRef::from_slice(&inputs.k, &k).unwrap(),
                TensorRef::from_slice(&inputs.v, &k).unwrap(),
                TensorMut::from_slice(&mut out, &q).unwrap(),
            );
            if hide_all {
                params.bias = Some(TensorRef::from_slice(&hidden, &shape).unwrap());
            } else {
                // SAFETY: as many bytes as the layout has elements.
                let mask =
                    unsafe { TensorRef::from_raw(mask.as_ptr().cast(), DType::Bool, layout) };
                params.mask = Some(mask);
            }
            // SAFETY: as above.
            unsafe { feclearexcept(FE_INVALID) };
            attention::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            // SAFETY: as above.
            assert_eq!(
                unsafe { fetestexcept(FE_INVALID) },
                0,
                "{hide_all} {queries} {keys} {dim}"
            );
        }
    }
}
