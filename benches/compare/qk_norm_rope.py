"""QK-norm and RoPE in one pass, forward and backward: Qwen 3's heads, half-split, bf16, positions
from 0; beside the same mathematics by torch.compile and beside our own norms and rotation."""

import torch
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, randn, ring

# Batch, tokens, query heads, key heads, head dim.
SHAPES = [(4, 4096, 32, 8, 128), (4, 4096, 8, 4, 256), (1, 16384, 64, 8, 64), (1, 512, 32, 8, 128), (64, 1, 32, 8, 128)]
THETA, EPSILON = 1e6, 1e-6
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes: heads and outputs, or heads, their outputs' gradients and theirs. `apart` is libunsloth's RMSNorm of queries and "
    "of keys and RoPE of both, or their gradients. Backward passes give the gradients of both gains too."
)


def compare(ctx):
    record = Record("qk_norm_rope", ctx.library, METHOD)
    for shape in SHAPES:
        forward(ctx, record, *shape)
        torch.cuda.empty_cache()
        backward(ctx, record, *shape)
        torch.cuda.empty_cache()


def tables(seq, dim):
    frequencies = THETA ** -(torch.arange(0, dim, 2, device="cuda").float() / dim)
    angles = torch.arange(seq, device="cuda")[:, None] * frequencies
    return [torch.cat([f(angles)] * 2, -1)[None, :, None] for f in (torch.cos, torch.sin)]


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def formula(x, w, cos, sin):
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * w.float()
    return (y * cos + turned(y) * sin).bfloat16()


def gradient(x, dout, w, cos, sin):
    x, dout = x.float(), dout.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    g, n = dout * cos - turned(dout * sin), x * scale
    h = g * w.float()
    dx = scale * (h - n * (h * n).mean(-1, keepdim=True))
    return dx.bfloat16(), (g * n).sum((0, 1, 2)).bfloat16()


def name_of(which, batch, seq, heads, kv_heads, dim):
    return f"{which} {batch}x{seq} {heads}/{kv_heads}x{dim}"


def forward(ctx, record, batch, seq, heads, kv_heads, dim):
    bytes_moved = 2 * batch * seq * (heads + kv_heads) * dim * 2
    count = num_sets(bytes_moved)
    make = lambda n: [randn(batch, seq, n, dim) for _ in range(count)]
    q, q_out, k, k_out = make(heads), make(heads), make(kv_heads), make(kv_heads)
    wq, wk = randn(dim), randn(dim)
    cos, sin = tables(seq, dim)
    both = lambda i: (formula(q[i], wq, cos, sin), formula(k[i], wk, cos, sin))
    fast = compiled(lambda q, k: (formula(q, wq, cos, sin), formula(k, wk, cos, sin)))
    rotation = {"theta": THETA}

    ours = [
        ctx.op(
            "qk_norm_rope", q=q[i], q_out=q_out[i], k=k[i], k_out=k_out[i], q_weight=wq, k_weight=wk,
            epsilon=EPSILON, rotation=rotation,
        )
        for i in range(count)
    ]
    apart = [
        [
            ctx.op("rms_norm", x=q[i], out=q_out[i], weight=wq, epsilon=EPSILON),
            ctx.op("rms_norm", x=k[i], out=k_out[i], weight=wk, epsilon=EPSILON),
            ctx.op("rope", q=q_out[i], q_out=q_out[i], k=k_out[i], k_out=k_out[i], rotation=rotation),
        ]
        for i in range(count)
    ]
    ours[0]()
    name = name_of("forward", batch, seq, heads, kv_heads, dim)
    exact = both(0)
    agree(f"{name}, q", {"torch": exact[0], OURS: q_out[0]})
    agree(f"{name}, k", {"torch": exact[1], OURS: k_out[0]})
    contenders = {
        OURS: lambda i: ours[i % count](),
        "apart": lambda i: [call() for call in apart[i % count]],
        "torch": ring(count, both),
        "torch.compile": ring(count, lambda i: fast(q[i], k[i])),
        "copy": copies(bytes_moved),
    }
    record.add(name, graphs(contenders), dtype="bf16", bytes=bytes_moved)


def backward(ctx, record, batch, seq, heads, kv_heads, dim):
    bytes_moved = 3 * batch * seq * (heads + kv_heads) * dim * 2
    count = num_sets(bytes_moved)
    make = lambda n: [randn(batch, seq, n, dim) for _ in range(count)]
    q, dq_out, dq = make(heads), make(heads), make(heads)
    k, dk_out, dk = make(kv_heads), make(kv_heads), make(kv_heads)
    wq, wk = randn(dim), randn(dim)
    dwq, dwk = torch.empty_like(wq), torch.empty_like(wk)
    cos, sin = tables(seq, dim)

    def both(q, dq_out, k, dk_out):
        return *gradient(q, dq_out, wq, cos, sin), *gradient(k, dk_out, wk, cos, sin)

    fast = compiled(both)
    rotation = {"theta": THETA}
    ours = [
        ctx.op(
            "qk_norm_rope_backward", q=q[i], dq_out=dq_out[i], dq=dq[i], k=k[i], dk_out=dk_out[i], dk=dk[i],
            q_weight=wq, k_weight=wk, dq_weight=dwq, dk_weight=dwk, epsilon=EPSILON, rotation=rotation,
        )
        for i in range(count)
    ]
    apart = [
        [
            ctx.op("rope", q=dq_out[i], q_out=dq[i], k=dk_out[i], k_out=dk[i], inverse=1, rotation=rotation),
            ctx.op("rms_norm_backward", x=q[i], dout=dq[i], dx=dq[i], weight=wq, dweight=dwq, epsilon=EPSILON),
            ctx.op("rms_norm_backward", x=k[i], dout=dk[i], dx=dk[i], weight=wk, dweight=dwk, epsilon=EPSILON),
        ]
        for i in range(count)
    ]
    ours[0]()
    name = name_of("backward", batch, seq, heads, kv_heads, dim)
    exact = both(q[0], dq_out[0], k[0], dk_out[0])
    for what, wanted, got in zip(("dq", "dq_weight", "dk", "dk_weight"), exact, (dq[0], dwq, dk[0], dwk)):
        agree(f"{name}, {what}", {"torch": wanted, OURS: got})
    contenders = {
        OURS: lambda i: ours[i % count](),
        "apart": lambda i: [call() for call in apart[i % count]],
        "torch": ring(count, lambda i: both(q[i], dq_out[i], k[i], dk_out[i])),
        "torch.compile": ring(count, lambda i: fast(q[i], dq_out[i], k[i], dk_out[i])),
        "copy": copies(bytes_moved),
    }
    record.add(name, graphs(contenders), dtype="bf16", bytes=bytes_moved)
