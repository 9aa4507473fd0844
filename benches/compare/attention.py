"""Attention beside FlashAttention-2 (PyTorch's), and memory beside the product written out. Decoding
has a module of its own.

Both sides take and give [batch, seq, heads, dim] and write the LSE. Each row tells which of the
library's implementations answered.
"""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, graphs, host, num_sets, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. fa2 is PyTorch's flash "
    "backend of scaled_dot_product_attention, on the same tensors. `products` is softmax(QK^T)V by PyTorch's matrix "
    "products, with all scores in memory; `memory` is the peak beyond q, k, v. Rows of the host: microseconds until a call returns, the "
    "least of 20 rounds of 200 calls, from Python."
)
TOKENS = 16384
# Head dim, heads.
FORWARD = [(64, 32), (128, 16), (256, 8)]
HEADS, KV_HEADS = 32, 8
IMPLEMENTATIONS = {2: "portable", 3: "hopper"}


def compare(ctx):
    probe = randn(1, 128, 1, 128)
    by = served(ctx, ctx.op("attention", q=probe, k=probe, v=probe, out=torch.empty_like(probe)))
    record = Record(f"attention_{by}", ctx.library, METHOD)
    for dim, heads in FORWARD:
        for seq in (1024, 8192):
            for causal in (False, True):
                forward(ctx, record, dim, heads, seq, causal)
                torch.cuda.empty_cache()
    record = Record("attention_memory", ctx.library, METHOD)
    for seq in (2048, 4096):
        memory(ctx, record, seq)
        torch.cuda.empty_cache()
    of_host(ctx, Record("attention_host", ctx.library, METHOD))


def served(ctx, call):
    return IMPLEMENTATIONS.get(ctx.implementation("attention", call.params), "unknown")


def fa2(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2)


def forward(ctx, record, dim, heads, seq, causal):
    batch = TOKENS // seq
    shape = batch, seq, heads, dim
    count = num_sets(4 * TOKENS * heads * dim * 2)
    sets = [[randn(*shape) for _ in range(3)] for _ in range(count)]
    out, lse = torch.empty_like(sets[0][0]), torch.empty(batch, heads, seq, device="cuda")
    ours = [ctx.op("attention", q=q, k=k, v=v, out=out, lse=lse, causal=causal) for q, k, v in sets]
    ours[0]()
    case = f"head_dim {dim} seq {seq} {'causal' if causal else 'full'}"
    agree(case, {"fa2": fa2(*sets[0], causal), OURS: out})
    flops = 4 * batch * heads * seq * seq * dim // (2 if causal else 1)
    contenders = {OURS: lambda i: ours[i % count](), "fa2": lambda i: fa2(*sets[i % count], causal)}
    times = graphs(contenders, calls=4 if seq > 4096 else 8)
    rates = {name: round(flops / us / 1e6, 1) for name, us in times.items()}
    about = dict(dtype="bf16", batch=batch, heads=heads, flops=flops, tflops=rates, served=served(ctx, ours[0]))
    record.add(case, times, of_fa2=round(times["fa2"] / times[OURS], 3), **about)


def memory(ctx, record, seq):
    """Time and peak memory of one sequence of 32 heads beside the path that writes all scores."""
    q, k, v = (randn(1, seq, HEADS, 128) for _ in range(3))

    def products(i=0):
        qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
        scores = qt @ kt.transpose(2, 3) * 128**-0.5
        return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ vt).transpose(1, 2)

    def peak(function):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, kept

    def make():
        out, lse = torch.empty_like(q), torch.empty(1, HEADS, seq, device="cuda")
        ctx.workspace = None  # its own counts
        ours = ctx.op("attention", q=q, k=k, v=v, out=out, lse=lse)
        ours()
        return ours, out

    (need, (ours, out)), (theirs, expected) = peak(make), peak(products)
    agree(f"memory {seq}", {"products": expected, OURS: out}, tolerance=0.1)
    needs = {OURS: need, "products": theirs}
    about = dict(dtype="bf16", heads=HEADS, memory=needs, saved=round(1 - need / theirs, 4), served=served(ctx, ours))
    times = graphs({OURS: lambda i: ours(), "products": products}, calls=4)
    record.add(f"head_dim 128 seq {seq}", times, speedup=round(times["products"] / times[OURS], 3), **about)


def of_host(ctx, record):
    """One launch, and two: few queries that see many keys are joined by another kernel."""
    stream = torch.cuda.current_stream().cuda_stream
    for queries, keys in [(256, 256), (1, 256), (1, 4096)]:
        q, k, v = (randn(1, n, heads, 128) for n, heads in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)))
        ours = ctx.op("attention", stream=stream, q=q, k=k, v=v, out=torch.empty_like(q), causal=True)
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        contenders = {
            OURS: lambda i: ours(),
            "torch": lambda i: F.scaled_dot_product_attention(*heads, enable_gqa=True),
            "nothing through ctypes": lambda i: ctx.library.lib.unsloth_context_destroy(None),
        }
        record.add(f"{queries} queries {keys} keys", host(contenders), launches=2 if keys > 256 else 1)
