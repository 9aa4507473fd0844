"""The gradients of linear layers: bf16, shapes of real models, the weight's gradient in bf16 and added to f32.

PyTorch computes the same products by `matmul`; it has no product that adds to f32, so there it adds a second kernel.
"""

import torch
from common import OURS, Record, agree, graphs, randn

SHAPES = [(8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (2048, 2048, 8192), (8192, 576, 1536)]
METHOD = "Microseconds of one call: a graph of calls, replayed by turns, medians."


def compare(ctx):
    record = Record("linear_backward", ctx.library, METHOD)
    for rows, inner, outer in SHAPES:
        one(ctx, record, rows, inner, outer)
        torch.cuda.empty_cache()


def one(ctx, record, rows, inner, outer):
    x, dout, w = randn(rows, inner), randn(rows, outer), randn(outer, inner)
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty(outer, device="cuda", dtype=torch.bfloat16)
    main = torch.zeros(outer, inner, device="cuda", dtype=torch.float32)
    name = f"m{rows} k{inner} n{outer}"
    flops = 2 * rows * inner * outer

    def pair(case, ours, theirs, **about):
        ours(), theirs(0)
        record.add(f"{name} {case}", graphs({OURS: lambda i: ours(), "torch": theirs}, calls=4), dtype="bf16", **about)

    of_dx = ctx.op("linear_backward", dout=dout, weight=w, dx=dx)
    of_dx()
    agree(f"dx {name}", {"torch": dout @ w, OURS: dx})
    pair("dx", of_dx, lambda i: torch.mm(dout, w, out=dx), flops=flops)
    of_dw = ctx.op("linear_backward", dout=dout, x=x, dweight=dw)
    of_dw()
    agree(f"dweight {name}", {"torch": dout.t() @ x, OURS: dw})
    pair("dweight", of_dw, lambda i: torch.mm(dout.t(), x, out=dw), flops=flops)
    of_main = ctx.op("linear_backward", dout=dout, x=x, dweight=main, accumulate=1)
    pair("dweight added to f32", of_main, lambda i: main.add_(dout.t() @ x), flops=flops)
    of_db = ctx.op("linear_backward", dout=dout, dbias=db)
    of_db()
    agree(f"dbias {name}", {"torch": dout.float().sum(0).bfloat16(), OURS: db})
    pair("dbias", of_db, lambda i: torch.sum(dout, 0, out=db), bytes=dout.numel() * 2)
