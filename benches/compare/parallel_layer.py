"""A decoder layer of Llama's for the comparisons of ranks: its weights, whole and a rank's part of them, the library's
calls, and PyTorch's, which are the reference in f64 too."""

import ctypes

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LLAMA_8B = dict(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128)
EPSILON, THETA = 1e-5, 10000.0
PAGE = 16


def numbers(device, dtype, *shape, seed=0, scale=1.0):
    """Normal ones, the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).mul_(scale).to(dtype)


def make_weights(c, device, dtype, seed=1):
    attended, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    shapes = {
        "qkv": (attended + 2 * kv, c["hidden"]),
        "out": (c["hidden"], attended),
        "gate_up": (2 * c["intermediate"], c["hidden"]),
        "down": (c["hidden"], c["intermediate"]),
    }
    weights = {
        name: numbers(device, dtype, *shape, seed=seed * 10 + i, scale=shape[1] ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }
    for i, name in enumerate(("norm1", "norm2")):
        weights[name] = 1 + numbers(device, dtype, c["hidden"], seed=seed * 10 + 5 + i, scale=0.1)
    return weights


def part_of_shape(c, size):
    return c | {name: c[name] // size for name in ("intermediate", "heads", "kv_heads")}


def part_of(c, weights, rank, size):
    """A rank's part: its heads' rows of queries, keys and values, its rows of gate and of up, its columns of the others."""
    kv = c["kv_heads"] * c["head_dim"]
    rows = lambda tensors: torch.cat([t.chunk(size)[rank] for t in tensors])  # noqa: E731
    return weights | {
        "qkv": rows(weights["qkv"].split([c["heads"] * c["head_dim"], kv, kv])),
        "gate_up": rows(weights["gate_up"].chunk(2)),
        "out": weights["out"].chunk(size, 1)[rank].contiguous(),
        "down": weights["down"].chunk(size, 1)[rank].contiguous(),
    }


# --- the library's ----------------------------------------------------------------------------------------


def attention_fields(ctx, c, weights, parallel=None):
    style = ctx.library.constants["ROPE_STYLE_HALF_SPLIT"]
    fields = dict(
        num_heads=c["heads"], num_kv_heads=c["kv_heads"], head_dim=c["head_dim"], rotate=1,
        rotation=dict(rotary_dim=c["head_dim"], theta=THETA, style=style), qkv_weight=weights["qkv"], out_weight=weights["out"],
    )
    return fields | ({"parallel": parallel} if parallel else {})


def mlp_fields(ctx, weights, parallel=None):
    fields = dict(
        activation=ctx.library.constants["ACTIVATION_SILU"], gate_up_weight=weights["gate_up"], down_weight=weights["down"]
    )
    return fields | ({"parallel": parallel} if parallel else {})


def size_of(ctx, function, params):
    size = ctypes.c_size_t()
    ctx.library.call(function, ctx.handle, ctypes.byref(params), ctypes.byref(size))
    return size.value


def blocks(ctx, c, weights, x, normed, parallel=None, **cached):
    """A forward pass as engines make it, of a layer that adds to `x`: four calls. With sequence parallelism `normed` is of this
    rank's rows, as `x` is."""
    return [
        ctx.op("rms_norm", x=x, weight=weights["norm1"], out=normed, epsilon=EPSILON),
        ctx.op("attention_block", x=normed, residual=x, out=x, **attention_fields(ctx, c, weights, parallel), **cached),
        ctx.op("rms_norm", x=x, weight=weights["norm2"], out=normed, epsilon=EPSILON),
        ctx.op("mlp", x=normed, residual=x, out=x, **mlp_fields(ctx, weights, parallel)),
    ]


def blocks_with_norms(ctx, c, weights, hidden, **cached):
    """The same of few tokens on one GPU, norms within the products: two calls."""
    return [
        ctx.op("attention_block", x=hidden, residual=hidden, out=hidden, x_norm=weights["norm1"], norm_epsilon=EPSILON,
               **attention_fields(ctx, c, weights), **cached),
        ctx.op("mlp", x=hidden, residual=hidden, out=hidden, x_norm=weights["norm2"], x_norm_epsilon=EPSILON, **mlp_fields(ctx, weights)),
    ]


def blocks_and_sums(ctx, c, weights, hidden, normed, partial, comm, next_norm, **cached):
    """The same of few tokens by ranks whose sums are normalised in one call: `normed` is what the layer takes in, and what the
    next one does."""
    added = dict(comm=comm, x=partial, residual=hidden, out=normed, epsilon=EPSILON)
    return [
        ctx.op("attention_block", x=normed, out=partial, **attention_fields(ctx, c, weights), **cached),
        ctx.op("all_reduce_rms_norm", weight=weights["norm2"], **added),
        ctx.op("mlp", x=normed, out=partial, **mlp_fields(ctx, weights)),
        ctx.op("all_reduce_rms_norm", weight=next_norm, **added),
    ]


def blocks_of_divided_rows(ctx, c, all_weights, tensors, comm):
    """The same of many tokens by ranks that divide the residual stream, `hidden`: pairs of a block, and of what sums, normalises
    and gathers what it gives. `normed` is what the first layer takes in; it and `partial` are in the group's memory."""
    hidden, normed, partial = tensors
    rows = [t.view(-1, t.shape[-1]) for t in (partial, normed)]
    made = []
    for i, w in enumerate(all_weights):
        following = all_weights[(i + 1) % len(all_weights)]["norm1"]
        calls = [
            ctx.op("attention_block", x=normed, out=partial, **attention_fields(ctx, c, w)),
            ctx.op("mlp", x=normed, out=partial, **mlp_fields(ctx, w)),
        ]
        for call, norm in zip(calls, (w["norm2"], following)):
            sums = dict(comm=comm, sequence=1, x=rows[0], out=rows[1], residual=hidden, weight=norm, epsilon=EPSILON)
            made.append((call, ctx.op("all_reduce_rms_norm", **sums)))
    return made


class Cache:
    """A cache of one sequence, with room for so many tokens."""

    def __init__(self, ctx, c, dtype, layers, tokens):
        library = ctx.library
        self.library = library
        params = library.struct(
            "kv_cache_params", dtype=library.constants[f"DTYPE_{dtype}"], num_layers=layers, num_kv_heads=c["kv_heads"],
            head_dim=c["head_dim"], page_size=PAGE, num_pages=-(-tokens // PAGE), max_batch_size=1, max_batch_tokens=tokens,
        )
        handle, self.ids = ctypes.c_void_p(), (ctypes.c_int64 * 1)()
        library.call("kv_cache_create", ctx.handle, ctypes.byref(params), ctypes.byref(handle))
        self.handle, self.stream = handle, ctx.stream
        library.call("kv_cache_sequence_create", handle, ctypes.byref(self.ids))

    def extend(self, tokens):
        counts = (ctypes.c_int64 * 1)(tokens)
        self.library.call("kv_cache_extend", self.handle, self.ids, counts, ctypes.c_size_t(1), self.stream())

    def of(self, layer):
        return dict(cache=self.handle.value, layer=layer)

    def close(self):
        self.library.call("kv_cache_destroy", self.handle)


class Layer:
    """Forward and backward pass of `decoder_layer`; with `sequence` of this rank's rows."""

    def __init__(self, ctx, c, weights, x, dout, parallel=None, policy="NONE"):
        new = lambda like, dtype=None: torch.zeros_like(like, dtype=dtype)  # noqa: E731
        self.out, self.dx = new(x), new(x)
        # Only a backward pass writes them.
        self.gradients = {name: new(w, torch.float32) for name, w in weights.items()} if dout is not None else {}
        g = self.gradients
        attention = ctx.params("attention_block", **attention_fields(ctx, c, weights, parallel))
        mlp = ctx.params("mlp", **mlp_fields(ctx, weights, parallel))
        fields = dict(
            checkpointing=ctx.library.constants[f"CHECKPOINTING_{policy}"], norm_epsilon=EPSILON, attention=attention, mlp=mlp, x=x,
            attention_norm=weights["norm1"], mlp_norm=weights["norm2"], out=self.out,
        )
        forward = ctx.params("decoder_layer", **fields)
        size = size_of(ctx, "decoder_layer_saved_size", forward)
        self.saved = torch.zeros(max(size, 1) + 256, dtype=torch.uint8, device=x.device)
        saved = dict(saved=-(-self.saved.data_ptr() // 256) * 256, saved_size=size)
        forward.saved, forward.saved_size = saved["saved"], size
        self.calls = [ctx.op("decoder_layer", **fields, **saved)]
        if dout is not None:
            backward = ctx.op(
                "decoder_layer_backward", deterministic=1, forward=forward, dout=dout, dx=self.dx, dattention_norm=g["norm1"],
                attention=ctx.params("attention_block_backward", dqkv_weight=g["qkv"], dout_weight=g["out"]),
                mlp=ctx.params("mlp_backward", dgate_up_weight=g["gate_up"], ddown_weight=g["down"]), dmlp_norm=g["norm2"],
            )
            self.calls.append(backward)


# --- PyTorch's --------------------------------------------------------------------------------------------


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def angles(c, positions, dtype):
    d = c["head_dim"]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = THETA ** (-torch.arange(0, d, 2, device=positions.device, dtype=wide) / d)
    angle = torch.cat([positions.to(wide)[:, None] * frequency] * 2, -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def attend(q, k, v, causal=True):
    """`[batch, heads, seq, dim]`; f64 by its definition."""
    if q.dtype != torch.float64:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return defined(q, k, v, causal)[0]


def defined(q, k, v, causal=True):
    """Attention and its lse by the definition. The last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~ones.tril(scores.shape[-1] - scores.shape[-2]), float("-inf"))
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def attended(c, weights, x, cos, sin, cache=None):
    """The attention block's product, without its residual; of a cache `(keys, values)` the new token is the last."""
    batch, seq, _ = x.shape
    sizes = [c["heads"] * c["head_dim"]] + [c["kv_heads"] * c["head_dim"]] * 2
    normed = F.rms_norm(x, x.shape[-1:], weights["norm1"], EPSILON)
    q, k, v = (t.view(batch, seq, -1, c["head_dim"]).transpose(1, 2) for t in F.linear(normed, weights["qkv"]).split(sizes, -1))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if cache:
        cache[0][:, :, -seq:].copy_(k)
        cache[1][:, :, -seq:].copy_(v)
        k, v = cache
    a = attend(q, k, v, causal=seq > 1)
    return F.linear(a.transpose(1, 2).reshape(batch, seq, -1), weights["out"])


def gated(weights, x):
    """The MLP's product, without its residual."""
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], weights["norm2"], EPSILON), weights["gate_up"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weights["down"])


def layer(c, weights, x):
    cos, sin = angles(c, torch.arange(x.shape[1], device=x.device), x.dtype)
    x = x + attended(c, weights, x, cos, sin)
    return x + gated(weights, x)
