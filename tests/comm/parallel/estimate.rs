//! What a rank is estimated to take, against what it holds and what the divided blocks ask for.

use unsloth::comm::Comm;
use unsloth::comm::shard::{self, Kind, shard};
use unsloth::estimate::{
    Inference, InferenceMemory, Model, inference_memory, inference_memory_of_rank,
};
use unsloth::kv_cache::{Config, KvCache};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::parallel::{Parallel, Partition};
use unsloth::ops::rope::Positions;
use unsloth::ops::swiglu::Activation;
use unsloth::{Context, DType, Layout, Stream, TensorMut, TensorRef, Workspace};

use crate::group::{ranks, sizes};

/// Rows of the vocabulary that no number of ranks divides, and key heads that three do not.
const MODEL: Model = Model {
    vocab_size: 101,
    hidden_size: 64,
    intermediate_size: 288,
    num_layers: 2,
    num_heads: 8,
    num_kv_heads: 4,
    head_dim: 32,
    v_head_dim: 32,
    tied_embeddings: false,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};

const DTYPE: DType = DType::Bf16;

fn described(dtype: DType, shape: &[usize]) -> TensorRef<'static> {
    // SAFETY: queries do not look at data.
    unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(shape).unwrap()) }
}

fn output(dtype: DType, shape: &[usize]) -> Output<'static> {
    let layout = Layout::contiguous(shape).unwrap();
    // SAFETY: as above.
    Output::Write(unsafe { TensorMut::from_raw(std::ptr::null_mut(), dtype, layout) })
}

/// A rank's part of a matrix of the model.
fn part(comm: &Comm, dtype: DType, kind: Kind, rows: usize, columns: usize) -> shard::Shard {
    let params = shard::Params {
        dtype,
        heads: (8, 4),
        dims: (32, 32),
        ..shard::Params::new(kind, [rows, columns], comm.rank(), comm.size())
    };
    shard(&params).unwrap()
}

fn inference(comm: &Comm, weight_dtype: DType, num_tokens: u64) -> Inference {
    let (_, kv_heads) = part(comm, weight_dtype, Kind::Query, 256, 64).heads;
    Inference {
        model: MODEL,
        weight_dtype,
        dtype: DTYPE,
        cache: Config {
            max_batch_tokens: 80,
            ..Config::new(2, kv_heads, 32, 12, DTYPE)
        },
        batch_size: 1,
        num_tokens,
        num_logits: 3,
    }
}

/// Bytes of the rank's parts.
fn weights(comm: &Comm, dtype: DType) -> u64 {
    let matrices = [
        (Kind::Qkv, 512, 64, 2),
        (Kind::AttentionOut, 64, 256, 2),
        (Kind::GateUp, 576, 64, 2),
        (Kind::Row, 64, 288, 2),
        (Kind::Vocabulary, 101, 64, 2),
    ];
    let bytes = matrices.map(|(kind, rows, columns, count)| {
        // Gate and up have the unit of down.
        let unit = if kind == Kind::GateUp {
            dtype.block().0
        } else {
            0
        };
        let params = shard::Params {
            dtype,
            unit,
            heads: (8, 4),
            dims: (32, 32),
            ..shard::Params::new(kind, [rows, columns], comm.rank(), comm.size())
        };
        let part = shard(&params).unwrap();
        count * part.rows * dtype.row_bytes(part.columns)
    });
    let gains = 5
        * 64
        * if dtype.is_in_blocks() {
            4
        } else {
            dtype.size()
        };
    (bytes.iter().sum::<usize>() + gains) as u64
}

/// The most that the rank's calls of one pass ask for.
fn workspace(ctx: &Context, group: Parallel<'_>, i: &Inference) -> u64 {
    let (tokens, hidden) = (i.num_tokens as usize, 64);
    let (comm, dtype) = (group.comm, i.weight_dtype);
    let weights = |kind, rows, columns| {
        let part = part(comm, dtype, kind, rows, columns);
        Weights {
            weight: described(dtype, &[part.rows, part.columns]),
            bias: None,
        }
    };
    let (num_heads, num_kv_heads) = part(comm, dtype, Kind::Query, 256, 64).heads;
    let mut cache = KvCache::new(ctx, &i.cache).unwrap();
    let sequence = cache.create_sequence().unwrap();
    cache
        .extend(&[(sequence, tokens)], Stream::DEFAULT)
        .unwrap();
    let block = attention_block::Params {
        x_norm: None,
        parallel: Some(group),
        x: described(DTYPE, &[tokens, hidden]),
        num_heads,
        num_kv_heads,
        head_dim: 32,
        v_head_dim: 32,
        projections: Projections::Packed(weights(Kind::Qkv, 512, hidden)),
        q_norm: None,
        k_norm: None,
        norm_weight_offset: 0.0,
        norm_epsilon: 0.0,
        rotation: None,
        positions: Positions::From(0),
        cache: Some(cache.lend(1).unwrap()),
        cu_seqlens: None,
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        attended_norm: None,
        out_projection: weights(Kind::AttentionOut, hidden, 256),
        output: output(DTYPE, &[tokens, hidden]),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let attention = attention_block::workspace_size(ctx, &block).unwrap();
    let down = weights(Kind::Row, hidden, 288);
    let intermediate = down.weight.layout().dim(1);
    let gate = || Weights {
        weight: described(dtype, &[intermediate, hidden]),
        bias: None,
    };
    let block = mlp::Params {
        x_norm: None,
        parallel: Some(group),
        x: described(DTYPE, &[tokens, hidden]),
        gate_up: GateUp::Apart {
            gate: gate(),
            up: gate(),
        },
        activation: Activation::default(),
        intermediate_norm: None,
        down,
        output: output(DTYPE, &[tokens, hidden]),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    let mlp = mlp::workspace_size(ctx, &block).unwrap();
    let head = weights(Kind::Vocabulary, 101, hidden);
    let rows = head.weight.layout().dim(0);
    let logits = linear::Params {
        x_norm: None,
        parallel: Some(Parallel {
            partition: Partition::Column,
            ..group
        }),
        x: described(DTYPE, &[3, hidden]),
        weights: head,
        output: output(DType::F32, &[3, rows]),
        workspace: Workspace::none(),
    };
    let logits = linear::workspace_size(ctx, &logits).unwrap();
    attention.max(mlp).max(logits) as u64
}

/// Of few tokens and many, in one chunk and in several, by floats and by blocks.
#[test]
fn ranks_take_what_they_say() {
    for size in sizes() {
        ranks(size, |ctx, comm| {
            // 288 columns are nine blocks of 32: enough for eight ranks.
            for dtype in [DType::Bf16, DType::Q4_0] {
                for (tokens, chunk_rows) in [(1, 0), (70, 0), (70, 16)] {
                    let group = Parallel {
                        chunk_rows,
                        ..Parallel::new(comm)
                    };
                    let i = inference(comm, dtype, tokens);
                    let memory = inference_memory_of_rank(ctx, &i, &group).unwrap();
                    let rows = part(comm, dtype, Kind::Vocabulary, 101, 64).rows as u64;
                    let mut expected = InferenceMemory {
                        weights: weights(comm, dtype),
                        kv_cache: i.cache.size().unwrap().total(),
                        activations: 2 * tokens * 64 * 2,
                        workspace: workspace(ctx, group, &i),
                        logits: 3 * rows * 4,
                        total: 0,
                    };
                    expected.total = expected.weights
                        + expected.kv_cache
                        + expected.activations
                        + expected.workspace
                        + expected.logits;
                    assert_eq!(memory, expected, "{size} ranks, {dtype}, {tokens} tokens");
                    if size == 1 {
                        let whole = inference_memory(ctx, &i).unwrap();
                        assert_eq!(whole.weights, memory.weights);
                    }
                }
            }
        });
    }
}

/// A cache of all key heads, rows that are divided, a model that cannot be.
#[test]
fn what_no_rank_takes_is_refused() {
    for size in sizes().filter(|size| [2, 8].contains(size)) {
        ranks(size, |ctx, comm| {
            let group = Parallel::new(comm);
            let refused = |i: &Inference, group: &Parallel<'_>| {
                let error = inference_memory_of_rank(ctx, i, group).unwrap_err();
                error.to_string()
            };
            let fine = inference(comm, DType::Bf16, 4);
            let mut whole = fine.clone();
            whole.cache.num_kv_heads = 4;
            let (_, kv_heads) = part(comm, DType::Bf16, Kind::Query, 256, 64).heads;
            let expected =
                format!("estimate: num_kv_heads of the cache is 4, the model has {kv_heads}");
            assert_eq!(refused(&whole, &group), expected);
            let divided = Parallel {
                sequence: true,
                ..group
            };
            let expected =
                "estimate: sequence divides rows, which inference is not asked about".to_string();
            assert_eq!(refused(&fine, &divided), expected);
            let mut few = fine.clone();
            few.model.intermediate_size = 1;
            let expected = format!("estimate: size is {size}, above the number of units, 1");
            assert_eq!(refused(&few, &group), expected);
        });
    }
}
