"""The gated feed-forward block beside torch, with gate and up apart and side by side in one
tensor."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, compiled, graphs, num_sets, randn, ring

ROWS = (1, 8, 16, 32, 64, 128, 512, 1024, 2048, 8192)
# (hidden, intermediate)
BLOCKS = [(4096, 14336)]
METHOD = (
    "Microseconds of one call: a graph of calls on weights that together exceed the cache, replayed by turns, medians. torch is "
    "F.linear, silu, a product and F.linear again. Ours has the workspace that it asks for; `no offer` is with one intermediate, "
    "which it needs, `twice the offer` with twice what it asks for."
)


def compare(ctx):
    # Sums of bf16 products stay f32 in torch too, as ours do.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    record = Record("mlp", ctx.library, METHOD)
    for hidden, dim in BLOCKS:
        sets = num_sets(3 * hidden * dim * 2)
        both = [randn(2 * dim, hidden) * hidden**-0.5 for _ in range(sets)]
        down = [randn(hidden, dim) * dim**-0.5 for _ in range(sets)]
        for rows in ROWS:
            x = randn(rows, hidden)
            together(ctx, record, x, both, down)
            apart(ctx, record, x, [weights.chunk(2) for weights in both], down)
            torch.cuda.empty_cache()


def together(ctx, record, x, both, down):
    def plain(x, both, down):
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    weights = [{"gate_up_weight": w, "down_weight": d} for w, d in zip(both, down)]
    block(ctx, record, "in one tensor", x, weights, plain)


def apart(ctx, record, x, halves, down):
    def plain(x, gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    weights = [{"gate_weight": g, "up_weight": u, "down_weight": d} for (g, u), d in zip(halves, down)]
    block(ctx, record, "apart", x, weights, plain)


def block(ctx, record, kind, x, weights, plain):
    sets = len(weights)
    hidden, dim = weights[0]["down_weight"].shape
    out = torch.empty_like(x)
    # With what is asked for, with what is needed alone, and with more than there is use for.
    make = lambda **room: [ctx.op("mlp", **room, x=x, **w, out=out) for w in weights]
    needed = torch.empty(len(x) * dim, device="cuda", dtype=x.dtype)
    least = make(workspace=needed.data_ptr(), workspace_size=needed.nbytes)
    ours, more = make(), make(room=2)
    fast = compiled(plain)
    contenders = {
        OURS: lambda i: ours[i % sets](),
        "torch": ring(sets, lambda i: plain(x, *weights[i].values())),
        "torch.compile": ring(sets, lambda i: fast(x, *weights[i].values())),
        "unsloth, no offer": lambda i: least[i % sets](),
        "unsloth, twice the offer": lambda i: more[i % sets](),
    }
    kept = {}
    for name, contender in contenders.items():
        contender(0)
        kept[name] = contender.results[0] if hasattr(contender, "results") else out.clone()
    agree(f"block of {len(x)} {kind}", kept)
    flops = 6 * len(x) * hidden * dim
    times = graphs(contenders, calls=max(4, min(16, int(2e12 // flops))))
    record.add(f"m{len(x)} {hidden}x{dim} {kind}", times, dtype="bf16", bytes=3 * hidden * dim * 2, flops=flops)
