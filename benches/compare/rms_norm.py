"""RMSNorm, alone and with the residual's addition before it: bf16, hidden sizes of real models."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(16384, 4096), (16384, 8192), (32768, 2048), (8192, 16384), (524288, 128), (64, 4096), (1, 4096)]
EPSILON = 1e-5
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes."
)


def compare(ctx):
    liger, flashinfer = peer("liger_kernel.ops.rms_norm"), peer("flashinfer")
    record = Record("rms_norm", ctx.library, METHOD, ("liger-kernel", "flashinfer-python"))
    for rows, dim in SHAPES:
        plain(ctx, record, liger, flashinfer, rows, dim)
        residual(ctx, record, flashinfer, rows, dim)
        torch.cuda.empty_cache()


def plain(ctx, record, liger, flashinfer, rows, dim):
    bytes_moved = 2 * rows * dim * 2
    count = num_sets(bytes_moved)
    x = [randn(rows, dim) for _ in range(count)]
    out = [torch.empty_like(t) for t in x]
    w = randn(dim)
    ours = [ctx.op("rms_norm", x=x[i], out=out[i], weight=w, epsilon=EPSILON) for i in range(count)]
    norm = lambda x: F.rms_norm(x, (dim,), w, EPSILON)
    fast = compiled(norm)
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, lambda i: norm(x[i])),
        "torch.compile": ring(count, lambda i: fast(x[i])),
        "copy": copies(bytes_moved),
    }
    if liger:
        apply = liger.LigerRMSNormFunction.apply
        contenders["liger"] = ring(count, lambda i: apply(x[i], w, EPSILON, 0.0, "llama", False))
    if flashinfer:
        contenders["flashinfer"] = ring(count, lambda i: flashinfer.norm.rmsnorm(x[i], w, eps=EPSILON))
    for name, contender in contenders.items():
        contender(0)
    kept = {name: c.results[0] for name, c in contenders.items() if hasattr(c, "results")}
    agree(f"rms_norm {rows}x{dim}", {"torch": kept.pop("torch"), OURS: out[0]} | kept)
    record.add(f"{rows}x{dim}", graphs(contenders), dtype="bf16", bytes=bytes_moved)


def residual(ctx, record, flashinfer, rows, dim):
    """x + residual is kept and normalised, both in place, as FlashInfer does it."""
    bytes_moved = 4 * rows * dim * 2
    count = num_sets(bytes_moved)
    # Zero gains but for a trace keep sums finite however often they are added to.
    w = randn(dim) * 1e-3
    make = lambda: [randn(rows, dim) for _ in range(count)]
    x, r = make(), make()
    ours = [
        ctx.op("rms_norm", x=x[i], out=x[i], residual=r[i], residual_out=r[i], weight=w, epsilon=EPSILON)
        for i in range(count)
    ]

    def added(x, r):
        r = x + r
        return F.rms_norm(r, (dim,), w, EPSILON), r

    fast = compiled(added)
    expected = added(x[0], r[0])
    ours[0]()
    agree(f"rms_norm with residual {rows}x{dim}", {"torch": expected[0], OURS: x[0]})
    agree(f"sum of residual {rows}x{dim}", {"torch": expected[1], OURS: r[0]})
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, lambda i: added(x[i], r[i])),
        "torch.compile": ring(count, lambda i: fast(x[i], r[i])),
        "copy": copies(bytes_moved),
    }
    if flashinfer:
        contenders["flashinfer"] = lambda i: flashinfer.norm.fused_add_rmsnorm(x[i % count], r[i % count], w, EPSILON)
    record.add(f"{rows}x{dim} with residual", graphs(contenders), dtype="bf16", bytes=bytes_moved)
