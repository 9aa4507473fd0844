"""LayerNorm with gains and biases: bf16, hidden sizes of real models."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(16384, 4096), (16384, 8192), (32768, 2048), (8192, 16384), (262144, 768), (64, 4096), (1, 4096)]
EPSILON = 1e-5
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes."
)


def compare(ctx):
    liger = peer("liger_kernel.ops.layer_norm")
    record = Record("layer_norm", ctx.library, METHOD, ("liger-kernel",))
    for rows, dim in SHAPES:
        bytes_moved = 2 * rows * dim * 2
        count = num_sets(bytes_moved)
        x = [randn(rows, dim) for _ in range(count)]
        out = [torch.empty_like(t) for t in x]
        w, b = randn(dim), randn(dim)
        ours = [ctx.op("layer_norm", x=x[i], out=out[i], weight=w, bias=b, epsilon=EPSILON) for i in range(count)]
        norm = lambda x: F.layer_norm(x, (dim,), w, b, EPSILON)
        fast = compiled(norm)
        contenders = {
            OURS: lambda i: ours[i % count](),
            "torch": ring(count, lambda i: norm(x[i])),
            "torch.compile": ring(count, lambda i: fast(x[i])),
            "copy": copies(bytes_moved),
        }
        if liger:
            apply = liger.LigerLayerNormFunction.apply
            contenders["liger"] = ring(count, lambda i: apply(x[i], w, b, EPSILON))
        for contender in contenders.values():
            contender(0)
        kept = {name: c.results[0] for name, c in contenders.items() if hasattr(c, "results")}
        agree(f"layer_norm {rows}x{dim}", {"torch": kept.pop("torch"), OURS: out[0]} | kept)
        record.add(f"{rows}x{dim}", graphs(contenders), dtype="bf16", bytes=bytes_moved)
        torch.cuda.empty_cache()
