"""The backward pass of gated activations, apart, in place of gate and up: bf16, sizes of real models."""

import torch
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(16384, 14336), (8192, 8192), (4096, 1536), (64, 14336)]
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes: gate, up and the gradient of the output, and two gradients. Liger and ours overwrite gate and up."
)


def compare(ctx):
    record = Record("swiglu_backward", ctx.library, METHOD, ("liger-kernel",))
    liger = peer("liger_kernel.ops.swiglu")
    for rows, dim in SHAPES:
        one(ctx, record, liger, rows, dim)
        torch.cuda.empty_cache()


def formula(gate, up, dout):
    gate, up, dout = gate.float(), up.float(), dout.float()
    s = torch.sigmoid(gate)
    return (dout * up * (s + gate * s * (1 - s))).bfloat16(), (dout * gate * s).bfloat16()


def one(ctx, record, liger, rows, dim):
    bytes_moved = 5 * rows * dim * 2
    count = min(4, num_sets(bytes_moved))
    make = lambda: [randn(rows, dim) for _ in range(count)]
    gate, up, dout = make(), make(), make()
    fast = compiled(formula)
    expected = formula(gate[0], up[0], dout[0])
    a, b = torch.empty_like(gate[0]), torch.empty_like(up[0])
    ctx.op("swiglu_backward", gate=gate[0], up=up[0], dout=dout[0], dgate=a, dup=b)()
    agree(f"dgate {rows}x{dim}", {"torch": expected[0], OURS: a})
    agree(f"dup {rows}x{dim}", {"torch": expected[1], OURS: b})
    ours = [
        ctx.op("swiglu_backward", gate=gate[i], up=up[i], dout=dout[i], dgate=gate[i], dup=up[i]) for i in range(count)
    ]
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch.compile": ring(count, lambda i: fast(gate[i], up[i], dout[i])),
        "copy": copies(bytes_moved),
    }
    if liger:
        contenders["liger"] = lambda i: liger.swiglu_backward(gate[i % count], up[i % count], dout[i % count])
    record.add(f"{rows}x{dim}", graphs(contenders), dtype="bf16", bytes=bytes_moved)
