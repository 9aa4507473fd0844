"""A step of decoding, one token, through layers of Llama-3-8B's shape: the calls that an engine makes, with weights in blocks and in
bf16, with the promise that weights and gains are constant and without it, beside a copy of as many bytes.

The GPU is never idle between kernels that wait for each other; `kernels` lists what CUPTI sees of each, with the time in which it only waits
for the one before. UNSLOTH_BEFORE and UNSLOTH_BEFORE_HEADER name an older library, which is a contender then: its norms are calls of their own.
"""

import ctypes
import os
from collections import defaultdict

import torch
from common import OURS, Record, Workspace, agree, copies, graphs, randn
from linear_blocks import FORMATS, blocks, described

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 14336, 32, 8, 128, 16
LAYERS, EPSILON = 8, 1e-5
KEYS = (440, 8192)
METHOD = (
    "Microseconds of one layer: a graph of steps, each of 8 layers whose weights together exceed the cache, replayed by turns, medians. `ours` "
    "has weights and gains that are constant, and norms within the products that they go to; `variable` the same without the promise, `apart` with "
    "norms of their own, `before` an older library with these. `copy` moves as many bytes as weights and cache have, half "
    "read and half written."
)
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


def compare(ctx):
    record = Record("decode_step", ctx.library, METHOD)
    before = older(ctx)
    for name in ("bf16", "Q4_0", "Q4_K", "Q8_0"):
        for keys in KEYS if name in ("bf16", "Q4_0") else KEYS[:1]:
            step(ctx, before, record, name, keys)
            torch.cuda.empty_cache()


class Cache:
    """Of one sequence, whose last token is the step's."""

    def __init__(self, ctx, tokens):
        library = ctx.library
        params = library.struct(
            "kv_cache_params", dtype=library.constants["DTYPE_BF16"], num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            page_size=PAGE, num_pages=-(-tokens // PAGE), max_batch_size=1, max_batch_tokens=tokens,
        )
        self.library, self.handle, ids = library, ctypes.c_void_p(), (ctypes.c_int64 * 1)()
        library.call("kv_cache_create", ctx.handle, ctypes.byref(params), ctypes.byref(self.handle))
        library.call("kv_cache_sequence_create", self.handle, ctypes.byref(ids))
        for count in (tokens - 1, 1):
            library.call("kv_cache_extend", self.handle, ids, (ctypes.c_int64 * 1)(count), ctypes.c_size_t(1), ctx.stream())

    def close(self):
        torch.cuda.synchronize()
        self.library.call("kv_cache_destroy", self.handle)


def tensor_of(ctx, made, constant):
    """A weight, plain or in blocks."""
    tensor = ctx.library.tensor(made[0]) if made[1] is None else described(ctx, *made)
    tensor.flags |= ctx.library.constants["TENSOR_CONSTANT"] if constant else 0
    return tensor


def layer(ctx, weights, cache, number, x, normed, constant, fused):
    w = {name: tensor_of(ctx, made, constant) for name, made in weights.items()}
    attention = dict(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotate=1, rotation=dict(rotary_dim=HEAD_DIM, theta=500000.0),
        qkv_weight=w["qkv"], out_weight=w["out"], cache=cache.handle.value, layer=number,
    )
    mlp = dict(activation=ctx.library.constants["ACTIVATION_SILU"], gate_weight=w["gate"], up_weight=w["up"], down_weight=w["down"])
    kept = weights_of_norm()
    gains = tensor_of(ctx, (kept, None), constant)
    if fused:
        calls = [
            ctx.op("attention_block", x=x, x_norm=gains, norm_epsilon=EPSILON, residual=x, out=x, **attention),
            ctx.op("mlp", x=x, x_norm=gains, x_norm_epsilon=EPSILON, residual=x, out=x, **mlp),
        ]
        return calls, (w, kept)
    norm = ctx.op("rms_norm", x=x, weight=gains, out=normed, epsilon=EPSILON)
    calls = [
        norm,
        ctx.op("attention_block", x=normed, residual=x, out=x, **attention),
        norm,
        ctx.op("mlp", x=normed, residual=x, out=x, **mlp),
    ]
    return calls, (w, kept)


def weights_of_norm():
    return 1 + 0.1 * randn(HIDDEN, dtype=torch.float32)


def older(ctx):
    """A context of the older library, or None."""
    import unsloth

    path = os.environ.get("UNSLOTH_BEFORE")
    if path is None:
        return None
    library = unsloth.Library(path, os.environ["UNSLOTH_BEFORE_HEADER"])
    return unsloth.Context("cuda", library=library, allocate=Workspace)


def bytes_of(name, rows, columns):
    return rows * columns * 2 if name == "bf16" else rows * columns // FORMATS[name][1] * FORMATS[name][2]


def step(ctx, before, record, name, keys):
    make = lambda n, k: (randn(n, k) * k**-0.5, None) if name == "bf16" else (blocks(name, n, k), name, n, k)
    layers = [{matrix: make(*shape) for matrix, shape in MATRICES.items()} for _ in range(LAYERS)]
    caches = {context: Cache(context, keys) for context in (ctx, before) if context is not None}
    contenders, results, kept = {}, {}, []
    start = randn(1, HIDDEN)
    ways = {OURS: (ctx, True, True), "variable": (ctx, False, True), "apart": (ctx, True, False), "before": (before, True, False)}
    for contender, (context, constant, fused) in ways.items():
        if context is None:
            continue
        x, normed = start.clone(), torch.empty_like(start)
        torch.manual_seed(1)
        made = [layer(context, weights, caches[context], i, x, normed, constant, fused) for i, weights in enumerate(layers)]
        kept.append(made)
        calls = [call for of_layer, _ in made for call in of_layer]

        def run(i, x=x, calls=calls):
            x.copy_(start)
            for call in calls:
                call()

        run(0)
        results[contender] = x.clone()
        contenders[contender] = run
    torch.cuda.synchronize()
    for contender, result in results.items():
        assert result.isfinite().all(), (name, contender)
        if contender != "before":
            assert torch.equal(result, results[OURS]), f"{name}: {contender} has other bits"
    agree(name, results, tolerance=5e-2)
    size = LAYERS * (sum(bytes_of(name, *shape) for shape in MATRICES.values()) + 2 * keys * KV_HEADS * HEAD_DIM * 2)
    contenders["copy"] = copies(-(-size // (1 << 20)) << 20)
    times = {contender: us / LAYERS for contender, us in graphs(contenders, calls=4, seconds=0.3).items()}
    of_copy = round(times["copy"] / times[OURS], 3)
    gains = {other: round(times[other] / times[OURS], 3) for other in contenders if other not in (OURS, "copy")}
    record.add(
        f"{name} {keys} keys", times, weights=name, keys=keys, bytes=size // LAYERS, of_copy=of_copy, gain=gains, kernels=profiled(contenders[OURS]),
    )
    for cache in caches.values():
        cache.close()


def profiled(run):
    """{kernel: [of one layer, microseconds of each]}"""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(0)
        torch.cuda.synchronize()
    spans = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans[event.name.split("(")[0][:60]].append(event.time_range.elapsed_us())
    return {name: [len(all) / LAYERS, round(sum(all) / len(all), 2)] for name, all in spans.items()}
