//! Tensors without elements, however large their other dimensions: nothing is to be done, and no memory is asked for.

use unsloth::ops::{attention, attention_block, embedding, linear, mlp, rope, swiglu};
use unsloth::{Context, DType, Element, InOut, Layout, Stream, TensorMut, TensorRef, Workspace};

const HUGE: usize = 1 << 40;

fn input(dtype: DType, shape: &[usize]) -> TensorRef<'static> {
    // SAFETY: there is no element.
    unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(shape).unwrap()) }
}

fn output(dtype: DType, shape: &[usize]) -> TensorMut<'static> {
    let layout = Layout::contiguous(shape).unwrap();
    // SAFETY: there is no element.
    unsafe { TensorMut::from_raw(std::ptr::null_mut(), dtype, layout) }
}

/// One element, repeated.
fn repeated<'a, T: Element>(element: &'a T, shape: &[usize]) -> TensorRef<'a> {
    let layout = Layout::strided(shape, &vec![0; shape.len()]).unwrap();
    // SAFETY: every index is that of the element.
    unsafe { TensorRef::from_raw(std::ptr::from_ref(element).cast(), T::DTYPE, layout) }
}

fn apart(shape: &[usize]) -> InOut<'static> {
    InOut::Apart {
        input: input(DType::F32, shape),
        output: output(DType::F32, shape),
    }
}

#[test]
fn rope_of_nothing() {
    let ctx = Context::cpu().unwrap();
    let position = 7i64;
    for shape in [
        [HUGE, 0, 8],
        [0, 1, HUGE],
        [3, 0, 1 << 36],
        [0, HUGE, 8],
        [HUGE, 2, 0],
    ] {
        for per_token in [false, true] {
            let params = rope::Params {
                q: Some(apart(&shape)),
                positions: match per_token {
                    true => rope::Positions::PerToken(repeated(&position, &shape[..1])),
                    false => rope::Positions::From(5),
                },
                ..rope::Params::default()
            };
            rope::forward(&ctx, &params, Stream::DEFAULT).unwrap();
        }
    }
}

#[test]
fn embedding_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (ids, strides, dim) in [
        ([HUGE, 1], [0, 1], 0),
        ([HUGE, 0], [0, 1], 8),
        ([0, HUGE], [1, 0], 1 << 15),
    ] {
        let id = 1i32;
        let layout = Layout::strided(&ids, &strides).unwrap();
        // SAFETY: every index is that of the only id.
        let indices = unsafe { TensorRef::from_raw((&raw const id).cast(), DType::I32, layout) };
        let params = embedding::Params {
            vocabulary: None,
            workspace: Workspace::none(),
            table: match dim {
                0 => input(DType::F32, &[4, 0]),
                _ => input(DType::F32, &[0, dim]),
            },
            ids: indices,
            out: output(DType::F32, &[ids[0], ids[1], dim]),
        };
        embedding::forward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}

#[test]
fn embedding_backward_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (ids, strides, vocab, dim) in [
        ([HUGE, 1], [0, 1], 1 << 40, 0),
        ([HUGE, 0], [0, 1], 4, 0),
        ([0, HUGE], [1, 0], 0, 1 << 15),
    ] {
        let id = 1i32;
        let layout = Layout::strided(&ids, &strides).unwrap();
        // SAFETY: every index is that of the only id.
        let indices = unsafe { TensorRef::from_raw((&raw const id).cast(), DType::I32, layout) };
        let params = embedding::backward::Params {
            vocabulary: None,
            dout: input(DType::F32, &[ids[0], ids[1], dim]),
            ids: indices,
            dweight: output(DType::F32, &[vocab, dim]),
            padding_idx: None,
            accumulate: false,
            workspace: Workspace::none(),
        };
        embedding::backward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}

fn weights(shape: &[usize]) -> linear::Weights<'static> {
    linear::Weights {
        weight: input(DType::F32, shape),
        bias: None,
    }
}

#[test]
fn linear_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (rows, depth, columns) in [(0, 0, 1 << 50), (HUGE, 0, 0), (64, 0, 0)] {
        let params = linear::Params {
            x_norm: None,
            parallel: None,
            x: input(DType::F32, &[rows, depth]),
            weights: weights(&[columns, depth]),
            output: linear::Output::Write(output(DType::F32, &[rows, columns])),
            workspace: Workspace::none(),
        };
        linear::forward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}

#[test]
fn linear_backward_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (rows, depth, columns) in [(0, 0, 1 << 50), (HUGE, 0, 0), (64, 0, 0), (0, 0, 0)] {
        let params = linear::backward::Params {
            parallel: None,
            dout: input(DType::F32, &[rows, columns]),
            x: Some(input(DType::F32, &[rows, depth])),
            weight: Some(input(DType::F32, &[columns, depth])),
            dx: Some(output(DType::F32, &[rows, depth])),
            dweight: Some(output(DType::F32, &[columns, depth])),
            dbias: (columns == 0).then(|| output(DType::F32, &[0])),
            accumulate: false,
            workspace: Workspace::none(),
        };
        assert_eq!(linear::backward::workspace_size(&ctx, &params).unwrap(), 0);
        linear::backward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}

#[test]
fn mlp_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (tokens, hidden, intermediate) in
        [(0, 0, 1 << 50), (3, 0, 1 << 44), (HUGE, 0, 0), (0, HUGE, 0)]
    {
        let params = mlp::Params {
            x_norm: None,
            parallel: None,
            x: input(DType::F32, &[tokens, hidden]),
            gate_up: mlp::GateUp::Apart {
                gate: weights(&[intermediate, hidden]),
                up: weights(&[intermediate, hidden]),
            },
            activation: swiglu::Activation::Silu,
            intermediate_norm: None,
            down: weights(&[hidden, intermediate]),
            output: linear::Output::Write(output(DType::F32, &[tokens, hidden])),
            workspace: Workspace::none(),
            gate_up_out: None,
        };
        assert_eq!(mlp::workspace_size(&ctx, &params).unwrap(), 0);
        mlp::forward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}

/// Tokens that become rows without columns: no workspace holds what passes between operations.
#[test]
fn attention_block_of_nothing() {
    let ctx = Context::cpu().unwrap();
    let (tokens, hidden) = (4, 8);
    let data = vec![0.5f32; tokens * hidden];
    let qkv = vec![0.5f32; 12 * hidden];
    let params = attention_block::Params {
        x_norm: None,
        parallel: None,
        x: TensorRef::from_slice(&data, &[tokens, hidden]).unwrap(),
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 4,
        v_head_dim: 4,
        projections: attention_block::Projections::Packed(linear::Weights {
            weight: TensorRef::from_slice(&qkv, &[12, hidden]).unwrap(),
            bias: None,
        }),
        q_norm: None,
        k_norm: None,
        norm_weight_offset: 0.0,
        norm_epsilon: 0.0,
        rotation: None,
        positions: rope::Positions::From(0),
        cache: None,
        cu_seqlens: None,
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        attended_norm: None,
        out_projection: weights(&[0, 4]),
        output: linear::Output::Write(output(DType::F32, &[tokens, 0])),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    assert_eq!(attention_block::workspace_size(&ctx, &params).unwrap(), 0);
    attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
}

#[test]
fn attention_of_nothing() {
    let ctx = Context::cpu().unwrap();
    for (batch, queries, keys) in [(0, HUGE, HUGE), (HUGE, 0, 0), (HUGE, 0, 4)] {
        let params = attention::Params::new(
            input(DType::F32, &[batch, queries, 1, 1]),
            repeated(&0.5f32, &[batch, keys, 1, 1]),
            repeated(&0.5f32, &[batch, keys, 1, 1]),
            output(DType::F32, &[batch, queries, 1, 1]),
        );
        attention::forward(&ctx, &params, Stream::DEFAULT).unwrap();
    }
}
