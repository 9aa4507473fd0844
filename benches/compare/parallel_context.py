"""What two GPUs gain in attention over one long sequence that they divide: both passes, every method."""

import torch
from common import OURS
from parallel_checks import METHODS, held
from parallel_layer import attend, numbers
from parallel_measure import of_ranks, run_all

SEQUENCES = [32768, 8192]
HEADS, KV_HEADS, DIM = 32, 8, 128


def attention(r):
    for seq in SEQUENCES if r.cuda else [32 * r.size]:
        one_sequence(r, seq, (HEADS, KV_HEADS, DIM) if r.cuda else (8, 4, 16))
        r.empty_cache()


def one_sequence(r, seq, shape):
    heads, kv, d = shape
    k, bf16 = r.ctx.library.constants, torch.bfloat16
    q, dout = (numbers(r.device, bf16, 1, seq, heads, d, seed=seed) for seed in (12, 13))
    keys, values = (numbers(r.device, bf16, 1, seq, kv, d, seed=seed) for seed in (14, 15))
    new = torch.empty_like
    out, lse, gradients = new(q), torch.empty(1, heads, seq, device=r.device), [new(q), new(keys), new(values)]
    named = lambda tensors: dict(zip(("dq", "dk", "dv"), tensors))  # noqa: E731
    one = f"{OURS} one GPU"
    forward = {one: r.ctx.op("attention", q=q, k=keys, v=values, out=out, lse=lse, causal=1)}
    fields = dict(q=q, k=keys, v=values, out=out, lse=lse, dout=dout, causal=1)
    backward = {one: r.ctx.op("attention_backward", **fields, **named(gradients))}
    run_all([forward[one], backward[one]])()
    for method, order in METHODS:
        ids = held(r, order, seq)
        own_q, own_k, own_v, own_dout, own_out = (t[:, ids].contiguous() for t in (q, keys, values, dout, out))
        got, got_lse, got_gradients = new(own_q), torch.empty(1, heads, len(ids), device=r.device), [new(own_q), new(own_k), new(own_v)]
        fields = dict(
            method=k[f"CONTEXT_METHOD_{method}"], order=k[f"CONTEXT_ORDER_{order}"], comm=r.comm, causal=1, q=own_q, k=own_k, v=own_v,
            out=got, lse=got_lse,
        )
        name = f"{OURS} {method.lower()} {order.lower()}"
        forward[name] = r.ctx.op("context_parallel_attention", **fields)
        backward[name] = r.ctx.op("context_parallel_attention_backward", dout=own_dout, **fields, **named(got_gradients))
        run_all([forward[name], backward[name]])()
        for what, a, b in zip(("out", "dq", "dk", "dv"), (got, *got_gradients), (own_out, *(g[:, ids] for g in gradients))):
            off = (a.float() - b.float()).abs().max().item() / b.float().abs().max().item()
            if not off < 5e-2:
                r.wrong.append(f"{name}, {seq} tokens, rank {r.rank}: {what} is {off:.3f} of the largest number away")
    if r.cuda:
        transposed = [t.transpose(1, 2) for t in (q, keys, values)]
        forward["torch one GPU"] = lambda: attend(*transposed)
    flops = 2 * heads * seq * seq * d
    about = dict(dtype="bf16", heads=heads, kv_heads=kv, head_dim=d, seq=seq)
    times = r.times(forward)
    r.row(f"causal attention, {seq} tokens", times, flops_of_all=flops, **about, **of_ranks(r, times))
    times = r.times(backward)
    r.row(f"causal attention's gradients, {seq} tokens", times, flops_of_all=flops * 5 // 2, **about, **of_ranks(r, times))
