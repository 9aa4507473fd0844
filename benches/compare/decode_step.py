"""A step of decoding, one token, through layers of Llama-3-8B's shape: the calls that an engine makes, with weights in blocks and in
bf16, with the promise that weights are constant and without it, beside a copy of as many bytes.

The GPU is never idle between kernels that wait for each other; `kernels` lists what CUPTI sees of each, with the time in which it only waits
for the one before.
"""

import ctypes
from collections import defaultdict

import torch
from common import OURS, Record, copies, graphs, randn
from linear_blocks import FORMATS, blocks, described

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 14336, 32, 8, 128, 16
LAYERS, EPSILON = 8, 1e-5
KEYS = (440, 8192)
METHOD = (
    "Microseconds of one layer: a graph of steps, each of 8 layers whose weights together exceed the cache, replayed by turns, medians. `ours` "
    "has weights that are constant, `variable` the same without that promise. `copy` moves as many bytes as weights and cache have, half "
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
    for name in ("bf16", "Q4_0", "Q4_K", "Q8_0"):
        for keys in KEYS if name in ("bf16", "Q4_0") else KEYS[:1]:
            step(ctx, record, name, keys)
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


def layer(ctx, weights, cache, number, x, normed, constant):
    w = {name: tensor_of(ctx, made, constant) for name, made in weights.items()}
    attention = dict(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotate=1, rotation=dict(rotary_dim=HEAD_DIM, theta=500000.0),
        qkv_weight=w["qkv"], out_weight=w["out"], cache=cache.handle.value, layer=number,
    )
    mlp = dict(activation=ctx.library.constants["ACTIVATION_SILU"], gate_weight=w["gate"], up_weight=w["up"], down_weight=w["down"])
    calls = [
        ctx.op("rms_norm", x=x, weight=weights_of_norm(), out=normed, epsilon=EPSILON),
        ctx.op("attention_block", x=normed, residual=x, out=x, **attention),
        ctx.op("rms_norm", x=x, weight=weights_of_norm(), out=normed, epsilon=EPSILON),
        ctx.op("mlp", x=normed, residual=x, out=x, **mlp),
    ]
    return calls, w


def weights_of_norm():
    return torch.ones(HIDDEN, device="cuda")


def bytes_of(name, rows, columns):
    return rows * columns * 2 if name == "bf16" else rows * columns // FORMATS[name][1] * FORMATS[name][2]


def step(ctx, record, name, keys):
    make = lambda n, k: (randn(n, k) * k**-0.5, None) if name == "bf16" else (blocks(name, n, k), name, n, k)
    layers = [{matrix: make(*shape) for matrix, shape in MATRICES.items()} for _ in range(LAYERS)]
    cache = Cache(ctx, keys)
    contenders, results, kept = {}, {}, []
    start = randn(1, HIDDEN)
    for contender, constant in ((OURS, True), ("variable", False)):
        x, normed = start.clone(), torch.empty_like(start)
        made = [layer(ctx, weights, cache, i, x, normed, constant) for i, weights in enumerate(layers)]
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
    assert torch.equal(*results.values()), f"{name}: the promise changes bits"
    assert results[OURS].isfinite().all(), name
    size = LAYERS * (sum(bytes_of(name, *shape) for shape in MATRICES.values()) + 2 * keys * KV_HEADS * HEAD_DIM * 2)
    contenders["copy"] = copies(-(-size // (1 << 20)) << 20)
    times = {contender: us / LAYERS for contender, us in graphs(contenders, calls=4, seconds=0.3).items()}
    of_copy = round(times["copy"] / times[OURS], 3)
    gain = round(times["variable"] / times[OURS], 3)
    record.add(
        f"{name} {keys} keys", times, weights=name, keys=keys, bytes=size // LAYERS, of_copy=of_copy, gain=gain, kernels=profiled(contenders[OURS]),
    )
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
