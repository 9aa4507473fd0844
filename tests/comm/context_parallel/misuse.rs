//! What is refused, before any rank has sent anything.

use unsloth::ops::context_parallel_attention::{self as divided, Method, Order, backward};
use unsloth::{Comm, Context, DType, Error, Stream};

use crate::common::{DeviceTensor, TestTensor, rng};
use crate::group::{random, ranks};
use crate::parallel::{poisoned, unbound, unbound_ref};

/// What a rank of two is called with: `q`, `k`, `v`, `out`, `lse`, `dout`, `dq`, `dk`, `dv`.
struct Call {
    method: Method,
    order: Order,
    causal: bool,
    window_left: usize,
    tensors: Vec<(DType, Vec<usize>)>,
    scale: f32,
    softcap: f32,
    /// `cu_seqlens_q`, `cu_seqlens_k`, `alibi_slopes`, `sinks` and `dsinks`.
    given: [bool; 5],
    no_gradients: bool,
    of_other: bool,
}

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const OUT: usize = 3;
const LSE: usize = 4;
const DOUT: usize = 5;

impl Call {
    fn new() -> Call {
        let [q, k, lse] = [&[1, 3, 4, 8][..], &[1, 3, 2, 8], &[1, 4, 3]];
        let shapes = [q, k, k, q, lse, q, q, k, k];
        Call {
            method: Method::Ulysses,
            order: Order::Contiguous,
            causal: false,
            window_left: 0,
            tensors: shapes.map(|shape| (DType::F32, shape.to_vec())).into(),
            scale: 0.0,
            softcap: 0.0,
            given: [false; 5],
            no_gradients: false,
            of_other: false,
        }
    }

    /// All tensors without their first dimension, which is that of one sequence.
    fn pack(&mut self) {
        self.given[..2].fill(true);
        for (_, shape) in &mut self.tensors {
            shape.remove(0);
        }
    }

    fn uploaded(&self, ctx: &Context) -> Vec<DeviceTensor> {
        let rng = &mut rng();
        let tensor = |(i, (dtype, shape)): (usize, &(DType, Vec<usize>))| match i {
            Q | K | V | DOUT => random(rng, *dtype, shape),
            _ => poisoned(*dtype, shape),
        };
        let tensors: Vec<TestTensor> = self.tensors.iter().enumerate().map(tensor).collect();
        tensors.iter().map(|t| t.upload(ctx)).collect()
    }

    /// The errors of the forward and of the backward pass, of queries and of the calls.
    fn errors(&self, ctx: &Context, comm: &Comm) -> [Vec<Option<Error>>; 2] {
        let other = Context::cpu().unwrap();
        let ctx = if self.of_other { &other } else { ctx };
        let mut t = self.uploaded(ctx);
        // SAFETY: they live while the calls run.
        let mut outputs = t.iter_mut().map(|t| unsafe { Some(unbound(t)) });
        let mut outputs: Vec<_> = (0..9).map(|_| outputs.next().unwrap()).collect();
        let lengths = TestTensor::of(DType::I32, &[2], &[0.0, 0.0]).upload(ctx);
        let numbers = TestTensor::of(DType::F32, &[4], &[0.0; 4]).upload(ctx);
        let mut dsinks = poisoned(DType::F32, &[4]).upload(ctx);
        let given = |i: usize, t: &DeviceTensor| {
            // SAFETY: they live while the calls run.
            self.given[i].then(|| unsafe { unbound_ref(t) })
        };
        let params = divided::Params {
            cu_seqlens_q: given(0, &lengths),
            cu_seqlens_k: given(1, &lengths),
            alibi_slopes: given(2, &numbers),
            sinks: given(3, &numbers),
            lse: outputs[LSE].take(),
            method: self.method,
            order: self.order,
            causal: self.causal,
            window_left: self.window_left,
            scale: self.scale,
            softcap: self.softcap,
            ..divided::Params::new(
                comm,
                t[Q].view(),
                t[K].view(),
                t[V].view(),
                outputs[OUT].take().unwrap(),
            )
        };
        let mut forward = vec![
            divided::supported(ctx, &params).err(),
            divided::workspace_size(ctx, &params).err(),
        ];
        if forward[0].is_some() {
            forward.push(divided::forward(ctx, &params, Stream::DEFAULT).err());
        }
        let mut params = backward::Params {
            cu_seqlens_q: given(0, &lengths),
            cu_seqlens_k: given(1, &lengths),
            alibi_slopes: given(2, &numbers),
            sinks: given(3, &numbers),
            // SAFETY: as above.
            dsinks: self.given[4].then(|| unsafe { unbound(&mut dsinks) }),
            method: self.method,
            order: self.order,
            causal: self.causal,
            window_left: self.window_left,
            scale: self.scale,
            softcap: self.softcap,
            ..backward::Params::new(
                comm,
                [t[Q].view(), t[K].view(), t[V].view()],
                t[OUT].view(),
                t[LSE].view(),
                t[DOUT].view(),
            )
        };
        if !self.no_gradients {
            (params.dq, params.dk) = (outputs[6].take(), outputs[7].take());
            params.dv = outputs[8].take();
        }
        let mut back = vec![
            backward::supported(ctx, &params).err(),
            backward::workspace_size(ctx, &params).err(),
        ];
        if back[0].is_some() {
            back.push(backward(ctx, &params, Stream::DEFAULT).err());
        }
        [forward, back]
    }
}

#[test]
fn what_is_wrong_is_refused() {
    type Spoil = fn(&mut Call);
    // How it is spoiled, and what both passes say; `None` where that is nothing.
    let cases: [(Spoil, Option<&str>, Option<&str>); 28] = [
        (|_| {}, None, None),
        (
            |c| {
                c.method = Method::AllGather;
                for i in [K, V, 7, 8] {
                    c.tensors[i].1[2] = 1;
                }
            },
            None,
            None,
        ),
        (
            |c| {
                (c.method, c.causal) = (Method::AllGather, true);
                for i in [K, V, 7, 8] {
                    c.tensors[i].1[1] = 4;
                }
            },
            None,
            None,
        ),
        (
            |c| (c.method, c.window_left) = (Method::AllGather, 2),
            None,
            None,
        ),
        (
            |c| (c.method, c.order) = (Method::AllGather, Order::Zigzag),
            Some("q has 3 tokens, zigzag needs a multiple of 2"),
            Some("q has 3 tokens, zigzag needs a multiple of 2"),
        ),
        (
            |c| {
                (c.method, c.order) = (Method::AllGather, Order::Zigzag);
                for i in [Q, OUT, DOUT, 6] {
                    c.tensors[i].1[1] = 4;
                }
                c.tensors[LSE].1[2] = 4;
            },
            Some("k has 3 tokens, zigzag needs a multiple of 2"),
            Some("k has 3 tokens, zigzag needs a multiple of 2"),
        ),
        (
            |c| (c.method, c.order) = (Method::Ring, Order::Zigzag),
            Some("q has 3 tokens, zigzag needs a multiple of 2"),
            Some("q has 3 tokens, zigzag needs a multiple of 2"),
        ),
        (
            |c| c.order = Order::Zigzag,
            Some("order is zigzag, allowed with ulysses: contiguous"),
            Some("order is zigzag, allowed with ulysses: contiguous"),
        ),
        (
            |c| {
                for i in [K, V, 7, 8] {
                    c.tensors[i].1[2] = 1;
                }
            },
            Some("k has 1 heads, which 2 ranks do not share evenly"),
            Some("k has 1 heads, which 2 ranks do not share evenly"),
        ),
        (
            |c| c.tensors[Q].1 = vec![3, 4, 8],
            Some("q has rank 3, allowed: 4"),
            Some("q has rank 3, allowed: 4"),
        ),
        (
            |c| c.tensors[K].1[3] = 4,
            Some("k has head_dim 4, q has 8"),
            Some("k has head_dim 4, q has 8"),
        ),
        (
            |c| c.tensors[OUT].1[1] = 2,
            Some("out has shape [1, 2, 4, 8], expected [1, 3, 4, 8]"),
            Some("out has shape [1, 2, 4, 8], expected [1, 3, 4, 8]"),
        ),
        (
            |c| c.tensors[LSE].0 = DType::F16,
            Some("lse has dtype f16, allowed: f32"),
            Some("lse has dtype f16, allowed: f32"),
        ),
        (
            |c| c.tensors[OUT].0 = DType::F16,
            Some("out has dtype f16, allowed: f32"),
            Some("out has dtype f16, allowed: f32"),
        ),
        (
            |c| c.tensors[DOUT].1[3] = 4,
            None,
            Some("dout has shape [1, 3, 4, 4], out has [1, 3, 4, 8]"),
        ),
        (
            |c| c.tensors[7].1[1] = 4,
            None,
            Some("dk has shape [1, 4, 2, 8], k has [1, 3, 2, 8]"),
        ),
        (
            |c| c.no_gradients = true,
            None,
            Some("dq is absent, as are dk and dv: nothing is asked for"),
        ),
        (
            |c| c.softcap = -1.0,
            Some("softcap is -1, at least 0 is needed"),
            Some("softcap is -1, at least 0 is needed"),
        ),
        (
            |c| c.given[0] = true,
            Some("cu_seqlens_k is absent, cu_seqlens_q needs it"),
            Some("cu_seqlens_k is absent, cu_seqlens_q needs it"),
        ),
        (
            |c| c.given[1] = true,
            Some("cu_seqlens_q is absent, cu_seqlens_k needs it"),
            Some("cu_seqlens_q is absent, cu_seqlens_k needs it"),
        ),
        (
            |c| c.given[..2].fill(true),
            Some("q has rank 4, allowed: 3"),
            Some("q has rank 4, allowed: 3"),
        ),
        (
            |c| {
                c.pack();
                c.order = Order::Zigzag;
            },
            Some("order is zigzag, allowed with cu_seqlens_q: contiguous"),
            Some("order is zigzag, allowed with cu_seqlens_q: contiguous"),
        ),
        (
            |c| {
                c.pack();
                c.method = Method::Ring;
            },
            Some("method is ring, allowed with cu_seqlens_q: ulysses, all_gather"),
            Some("method is ring, allowed with cu_seqlens_q: ulysses, all_gather"),
        ),
        (
            |c| {
                c.pack();
                (c.method, c.window_left) = (Method::AllGather, 2);
            },
            Some("window_left is 2, allowed with cu_seqlens_q and all_gather unless causal: 0"),
            Some("window_left is 2, allowed with cu_seqlens_q and all_gather unless causal: 0"),
        ),
        (
            |c| (c.method, c.given[2]) = (Method::Ring, true),
            Some("alibi_slopes is given, allowed with ring: absent"),
            Some("alibi_slopes is given, allowed with ring: absent"),
        ),
        (
            |c| (c.method, c.given[2]) = (Method::AllGather, true),
            Some("alibi_slopes is given, allowed with all_gather unless causal: absent"),
            Some("alibi_slopes is given, allowed with all_gather unless causal: absent"),
        ),
        (
            |c| c.given[4] = true,
            None,
            Some("dsinks is given without sinks"),
        ),
        (
            |c| c.of_other = true,
            Some("comm belongs to another context"),
            Some("comm belongs to another context"),
        ),
    ];
    for (spoil, of_forward, of_backward) in cases {
        let found = ranks(2, |ctx, comm| {
            let mut call = Call::new();
            spoil(&mut call);
            call.errors(ctx, comm)
        });
        for [forward, back] in found {
            for (op, errors, expected) in [
                ("context_parallel_attention", forward, of_forward),
                ("context_parallel_attention_backward", back, of_backward),
            ] {
                let expected = expected.map(|text| format!("{op}: {text}"));
                for error in errors {
                    assert_eq!(error.map(|error| error.to_string()), expected);
                }
            }
        }
    }
}

/// A rank's own mistake, in a group of one: no other waits.
#[test]
fn data_and_workspace_are_checked() {
    ranks(1, |ctx, comm| {
        let call = Call::new();
        let mut t = call.uploaded(ctx);
        // SAFETY: alive while the calls run, which refuse it.
        let same = unsafe { unbound(&mut t[Q]) };
        let params = divided::Params::new(comm, t[Q].view(), t[K].view(), t[V].view(), same);
        let error = divided::forward(ctx, &params, Stream::DEFAULT).unwrap_err();
        let expected = "context_parallel_attention: out overlaps q";
        assert_eq!(error.to_string(), expected);
    });
    ranks(2, |ctx, comm| {
        let call = Call::new();
        let mut t = call.uploaded(ctx);
        // SAFETY: alive while the call runs, which refuses it.
        let out = unsafe { unbound(&mut t[OUT]) };
        let params = divided::Params::new(comm, t[Q].view(), t[K].view(), t[V].view(), out);
        let required = divided::workspace_size(ctx, &params).unwrap();
        let error = divided::forward(ctx, &params, Stream::DEFAULT).unwrap_err();
        let op = "context_parallel_attention";
        let expected = Error::WorkspaceTooSmall {
            op,
            required,
            provided: 0,
        };
        assert_eq!(error, expected);
        t.pop().unwrap().download_output();
    });
}
