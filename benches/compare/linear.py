"""Linear layers beside torch (cuBLAS): few rows, bound by reading the weights, and many, bound by
the tensor cores."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, copies, graphs, host, num_sets, randn

# (out_features, in_features)
LAYERS = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (2048, 2048)]
FEW = (1, 4, 8, 16)
MANY = (17, 32, 64, 128, 512, 2048, 8192)
METHOD = (
    "Microseconds of one call: a graph of calls on weights that together exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes as weights, x and output have, half read and half written. f32 without TF32. `host` rows: microseconds until a call "
    "from Python returns."
)


def compare(ctx):
    torch.backends.cuda.matmul.allow_tf32 = False
    # Sums of bf16 products stay f32 in torch too, as ours do.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    record = Record("linear", ctx.library, METHOD)
    for n, k in LAYERS:
        layer(ctx, record, n, k, torch.bfloat16, FEW + (MANY if n < 100000 else (17, 64, 512)))
        if n < 100000:
            layer(ctx, record, n, k, torch.float32, (1, 4, 8, 16, 32, 64, 128, 512))
        torch.cuda.empty_cache()
    for n, k in ((4096, 4096), (128256, 4096)):
        mixed(ctx, record, n, k)
    calls(ctx, record)


def mixed(ctx, record, n, k):
    """What gives logits: bf16 weights, an output in f32, and x in bf16 or f32."""
    sets = num_sets(n * k * 2)
    weights = [randn(n, k) * k**-0.5 for _ in range(sets)]
    for dtype, counts in ((torch.bfloat16, (1, 8, 64)), (torch.float32, (1, 4, 8, 16))):
        for rows in counts:
            x, out = randn(rows, k, dtype=dtype), torch.empty(rows, n, device="cuda")
            ours = [ctx.op("linear", x=x, weight=w, out=out) for w in weights]
            narrow, theirs = x.bfloat16(), torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            moved = n * k * 2 + x.numel() * dtype.itemsize + out.numel() * 4
            contenders = {
                OURS: lambda i: ours[i % sets](),
                # All in bf16, which loses what f32 keeps.
                "torch": lambda i: torch.mm(narrow, weights[i % sets].t(), out=theirs),
                "copy": copies(-(-moved // (1 << 16)) << 16),
            }
            for contender in contenders.values():
                contender(0)
            agree(f"{dtype} {rows}x{k} by {n}", {"torch": theirs, OURS: out})
            short = "bf16" if dtype == torch.bfloat16 else "f32"
            record.add(f"{short} bf16 to f32 m{rows} n{n} k{k}", graphs(contenders), dtype=short, bytes=moved, flops=2 * rows * n * k)
    torch.cuda.empty_cache()


def layer(ctx, record, n, k, dtype, counts):
    size = n * k * dtype.itemsize
    sets = num_sets(size)
    weights = [randn(n, k, dtype=dtype) * k**-0.5 for _ in range(sets)]
    for rows in counts:
        x, out = randn(rows, k, dtype=dtype), torch.empty(rows, n, device="cuda", dtype=dtype)
        ours = [ctx.op("linear", x=x, weight=w, out=out) for w in weights]
        theirs = torch.empty_like(out)
        contenders = {
            OURS: lambda i: ours[i % sets](),
            "torch": lambda i: torch.mm(x, weights[i % sets].t(), out=theirs),
        }
        moved = size + (x.numel() + out.numel()) * dtype.itemsize
        flops = 2 * rows * n * k
        if rows <= 64:
            # A round size, which copies fastest.
            contenders["copy"] = copies(-(-moved // (1 << 16)) << 16)
        for contender in contenders.values():
            contender(0)
        short = "bf16" if dtype == torch.bfloat16 else "f32"
        agree(f"{rows}x{k} by {n}", {"torch": theirs, OURS: out})
        times = graphs(contenders, calls=max(4, min(16, int(2e12 // flops))))
        record.add(f"{short} m{rows} n{n} k{k}", times, dtype=short, bytes=moved, flops=flops)


def calls(ctx, record):
    """What a call costs the host."""
    stream = torch.cuda.current_stream().cuda_stream
    weight = randn(64, 64)
    for rows in (1, 64):
        x, out = randn(rows, 64), randn(rows, 64)
        ours = ctx.op("linear", stream=stream, x=x, weight=weight, out=out)
        nothing = ctx.library.lib.unsloth_context_destroy
        contenders = {
            OURS: lambda i: ours(),
            "torch": lambda i: F.linear(x, weight),
            "nothing through ctypes": lambda i: nothing(None),
        }
        record.add(f"host m{rows}", host(contenders))
    logits, ids = randn(64, 128256), torch.empty(64, device="cuda", dtype=torch.int64)
    narrow, wide = randn(8192, 4096), torch.empty(8192, 4096, device="cuda")
    ours = {
        "argmax 64x128256": (ctx.op("argmax", x=logits, out=ids), lambda i: logits.argmax(-1), logits.numel() * 2),
        "argmax 1x128256": (ctx.op("argmax", x=logits[:1], out=ids[:1]), lambda i: logits[:1].argmax(-1), 128256 * 2),
        "cast bf16 to f32": (ctx.op("cast", x=narrow, out=wide), lambda i: wide.copy_(narrow), narrow.numel() * 6),
        "cast f32 to bf16": (ctx.op("cast", x=wide, out=narrow), lambda i: narrow.copy_(wide), narrow.numel() * 6),
    }
    for case, (run, theirs, moved) in ours.items():
        contenders = {OURS: lambda i, run=run: run(), "torch": theirs, "copy": copies(moved)}
        record.add(case, graphs(contenders), dtype="bf16", bytes=moved)
