"""Products with weights in GGUF's blocks beside those with bf16 weights, ours and torch's (cuBLAS), and
a copy of as many bytes: few rows, bound by reading the blocks, and more."""

import os

import torch
from common import OURS, Record, agree, copies, graphs, named_layers, named_rows, num_sets, randn

# Value in the C ABI, weights and bytes of a block, where its f16 factors are, the greatest code times
# the greatest factor of factors.
FORMATS = {
    "Q8_0": (11, 32, 34, (0,), 128),
    "Q4_0": (12, 32, 18, (0,), 8),
    "Q4_1": (13, 32, 20, (0, 2), 8),
    "Q5_0": (19, 32, 22, (0,), 16),
    "Q5_1": (20, 32, 24, (0, 2), 16),
    "Q4_K": (14, 256, 144, (0, 2), 500),
    "Q5_K": (21, 256, 176, (0, 2), 1000),
    "Q6_K": (15, 256, 210, (208,), 4000),
}
LAYERS = named_layers([(4096, 4096), (14336, 4096), (4096, 14336)])
FEW = (1, 4, 8)
MORE = (16, 32, 33, 64, 128, 256, 300, 512, 535, 2048)
# Formats that are measured with FEW and MORE rows; the others with FEW. FORMATS names other ones, and ROWS
# the rows, which leaves out all else. With RESIDUAL one is added.
OF_MORE = os.environ.get("FORMATS", "Q8_0,Q4_0,Q4_K,Q6_K").split(",")
CHOSEN = named_rows()
# Whether a residual is added, by all contenders.
ADDS = "RESIDUAL" in os.environ
METHOD = (
    "Microseconds of one call: a graph of calls on weights that together exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes as blocks, x and output have, half read and half written. `bf16` is our product with bf16 weights of the same shape."
)


def compare(ctx):
    record = Record("linear_blocks", ctx.library, METHOD)
    for n, k in LAYERS:
        plain = [randn(n, k) * k**-0.5 for _ in range(num_sets(n * k * 2))]
        for name in FORMATS if CHOSEN is None else OF_MORE:
            counts = CHOSEN or FEW + (MORE if name in OF_MORE else ())
            layer(ctx, record, name, n, k, plain, counts, torch.bfloat16)
        # What an engine's logits are.
        if CHOSEN is None:
            layer(ctx, record, "Q6_K", n, k, plain, (1,), torch.float32)
        torch.cuda.empty_cache()


def blocks(name, n, k):
    """Random blocks: rows of bytes."""
    _, length, size, factors, greatest = FORMATS[name]
    made = torch.randint(0, 256, (n * k // length, size), dtype=torch.uint8, device="cuda")
    for at in factors:
        factor = (torch.rand(len(made), 1, device="cuda") / greatest * k**-0.5).half()
        made[:, at : at + 2] = factor.view(torch.uint8)
    return made.view(n, -1)


def described(ctx, made, name, n, k):
    """The blocks as an `unsloth_tensor`."""
    tensor = ctx.library.structs["unsloth_tensor"]()
    tensor.data, tensor.dtype, tensor.rank = made.data_ptr(), FORMATS[name][0], 2
    tensor.shape[0], tensor.shape[1] = n, k
    return tensor


def layer(ctx, record, name, n, k, plain, counts, dtype):
    size = n * k // FORMATS[name][1] * FORMATS[name][2]
    sets = num_sets(size)
    made = [blocks(name, n, k) for _ in range(sets)]
    weights = [described(ctx, one, name, n, k) for one in made]
    # The first, decoded, by which torch multiplies.
    decoded = torch.empty(n, k, device="cuda")
    ctx.op("embedding", table=weights[0], ids=torch.arange(n, device="cuda"), out=decoded)()
    for rows in counts:
        x, out = randn(rows, k, dtype=dtype), torch.empty(rows, n, device="cuda", dtype=dtype)
        added = randn(rows, n, dtype=dtype) if ADDS else None
        more = dict(residual=added) if ADDS else {}
        ours = [ctx.op("linear", x=x, weight=weight, out=out, **more) for weight in weights]
        ours[0]()
        expected = x.float() @ decoded.t()
        agree(f"{name} {rows}x{k} by {n}", {"torch": expected + added if ADDS else expected, OURS: out})
        contenders = {OURS: lambda i: ours[i % sets]()}
        if dtype == torch.bfloat16:
            by_plain, theirs = torch.empty_like(out), torch.empty_like(out)
            floats = [ctx.op("linear", x=x, weight=w, out=by_plain, **more) for w in plain]
            contenders["bf16"] = lambda i: floats[i % len(plain)]()
            by_torch = (lambda w: torch.addmm(added, x, w, out=theirs)) if ADDS else (lambda w: torch.mm(x, w, out=theirs))
            contenders["torch"] = lambda i: by_torch(plain[i % len(plain)].t())
        moved = size + (x.numel() + out.numel()) * dtype.itemsize
        contenders["copy"] = copies(-(-moved // (1 << 16)) << 16)
        for contender in contenders.values():
            contender(0)
        times = graphs(contenders, seconds=0.1 if CHOSEN is None else 0.03)
        short = "f32" if dtype == torch.float32 else "bf16"
        record.add(f"{name} {short} m{rows} n{n} k{k}", times, dtype=short, bytes=moved, flops=2 * rows * n * k)
