"""SwiGLU, silu(gate) * up: gate and up apart, and side by side in one tensor."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(16384, 14336), (4096, 11008), (64, 14336), (1, 14336)]
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes."
)


def compare(ctx):
    liger, flashinfer = peer("liger_kernel.ops.swiglu"), peer("flashinfer")
    record = Record("swiglu", ctx.library, METHOD, ("liger-kernel", "flashinfer-python"))
    for rows, dim in SHAPES:
        bytes_moved = 3 * rows * dim * 2
        count = num_sets(bytes_moved)
        both = [randn(rows, 2 * dim) for _ in range(count)]
        out = [randn(rows, dim) for _ in range(count)]
        packed(ctx, record, flashinfer, both, out, bytes_moved)
        halves = [[half.contiguous() for half in t.chunk(2, -1)] for t in both]
        apart(ctx, record, liger, halves, out, bytes_moved)
        del both, halves, out
        torch.cuda.empty_cache()


def apart(ctx, record, liger, halves, out, bytes_moved):
    count = len(out)
    ours = [ctx.op("swiglu", gate=gate, up=up, out=o) for (gate, up), o in zip(halves, out)]
    plain = lambda gate, up: F.silu(gate) * up
    fast = compiled(plain)
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, lambda i: plain(*halves[i])),
        "torch.compile": ring(count, lambda i: fast(*halves[i])),
        "copy": copies(bytes_moved),
    }
    if liger:
        contenders["liger"] = ring(count, lambda i: liger.LigerSiLUMulFunction.apply(*halves[i]))
    check("swiglu", contenders, out)
    rows, dim = out[0].shape
    record.add(f"{rows}x{dim}", graphs(contenders), dtype="bf16", bytes=bytes_moved)


def packed(ctx, record, flashinfer, both, out, bytes_moved):
    count = len(out)
    ours = [ctx.op("swiglu", gate_up=t, out=o) for t, o in zip(both, out)]

    def plain(t):
        gate, up = t.chunk(2, -1)
        return F.silu(gate) * up

    fast = compiled(plain)
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, lambda i: plain(both[i])),
        "torch.compile": ring(count, lambda i: fast(both[i])),
        "copy": copies(bytes_moved),
    }
    if flashinfer:
        contenders["flashinfer"] = ring(count, lambda i: flashinfer.activation.silu_and_mul(both[i]))
    check("swiglu of one tensor", contenders, out)
    rows, dim = out[0].shape
    record.add(f"{rows}x{dim} in one tensor", graphs(contenders), dtype="bf16", bytes=bytes_moved)


def check(case, contenders, out):
    for contender in contenders.values():
        contender(0)
    kept = {name: c.results[0] for name, c in contenders.items() if hasattr(c, "results")}
    agree(case, {"torch": kept.pop("torch"), OURS: out[0]} | kept)
