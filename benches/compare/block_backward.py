"""The backward passes of the two blocks of a decoder layer: bf16, Llama-3-8B's and SmolLM2-135M's
shapes, with everything kept by the forward and with what the backward computes again.

PyTorch and torch.compile run what autograd recorded once: what it keeps is more than ours keeps, and
its calls to the backward of attention are cuDNN's.
"""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, kernels, randn

# Name, hidden, intermediate, query heads, key heads, head dim.
MODELS = [("8B", 4096, 14336, 32, 8, 128), ("135M", 576, 1536, 9, 3, 64)]
BATCH, LENGTH = 4, 2048
METHOD = "Microseconds of one call: the kernels' time by CUPTI, contenders by turns, medians."


def compare(ctx):
    record = Record("block_backward", ctx.library, METHOD)
    for model in MODELS:
        mlp(ctx, record, *model[:3])
        torch.cuda.empty_cache()
        attention(ctx, record, *model[:2], *model[3:])
        torch.cuda.empty_cache()


def weight(rows, columns):
    return randn(rows, columns) * columns**-0.5


def mlp(ctx, record, name, hidden, dim):
    tokens = BATCH * LENGTH
    x, out, dout, dx = (randn(tokens, hidden) for _ in range(4))
    weights = dict(gate_up_weight=weight(2 * dim, hidden), down_weight=weight(hidden, dim))
    gradients = {f"d{key}": torch.empty_like(w) for key, w in weights.items()}
    kept = randn(tokens, 2 * dim)
    forward = dict(x=x, **weights, out=out)
    ctx.op("mlp", **forward, gate_up_out=kept)()
    fields = dict(forward=ctx.params("mlp", **forward), dout=dout, dx=dx, **gradients)
    ours = {
        OURS: ctx.op("mlp_backward", **fields, gate_up=kept),
        f"{OURS}, gate and up again": ctx.op("mlp_backward", **fields),
    }

    def plain(x, both, down):
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    # The products of the backward pass: of x and of the weights, of two layers.
    flops = 4 * tokens * 3 * hidden * dim
    leaves = [x, *weights.values()]
    measure(record, f"mlp {name}", ours, plain, leaves, dout, [dx, *gradients.values()], flops)


def attention(ctx, record, name, hidden, heads, kv_heads, head_dim):
    rows = (heads + 2 * kv_heads) * head_dim
    x, out, dout, dx = (randn(BATCH, LENGTH, hidden) for _ in range(4))
    weights = dict(qkv_weight=weight(rows, hidden), out_weight=weight(hidden, heads * head_dim))
    gradients = {f"d{key}": torch.empty_like(w) for key, w in weights.items()}
    kept = dict(
        qkv=randn(BATCH, LENGTH, rows),
        attended=randn(BATCH, LENGTH, heads * head_dim),
        lse=torch.empty(BATCH, heads, LENGTH, device="cuda"),
    )
    forward = dict(x=x, **weights, out=out, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_seqlen=LENGTH)
    ctx.op("attention_block", **forward, **{f"{key}_out": t for key, t in kept.items()})()
    fields = dict(forward=ctx.params("attention_block", **forward), dout=dout, dx=dx, **gradients)
    ours = {
        OURS: ctx.op("attention_block_backward", **fields, **kept),
        f"{OURS}, qkv again": ctx.op("attention_block_backward", **fields, attended=kept["attended"], lse=kept["lse"]),
        f"{OURS}, all again": ctx.op("attention_block_backward", **fields),
    }

    def plain(x, qkv, out):
        q, k, v = F.linear(x, qkv).split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
        q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return F.linear(o.transpose(1, 2).flatten(-2), out)

    products = 4 * BATCH * LENGTH * hidden * (rows + heads * head_dim)
    flops = products + 5 * BATCH * heads * LENGTH * LENGTH * head_dim
    leaves = [x, *weights.values()]
    measure(record, f"attention {name}", ours, plain, leaves, dout, [dx, *gradients.values()], flops)


def measure(record, case, ours, plain, leaves, dout, gradients, flops):
    """Ours against autograd's backward pass, eager and compiled, of `plain`."""
    contenders = {}
    for name, function in (("torch", plain), ("torch.compile", torch.compile(plain, dynamic=False))):
        inputs = [t.detach().requires_grad_() for t in leaves]
        result = function(*inputs)

        def run(i, result=result, inputs=inputs):
            return torch.autograd.grad(result, inputs, dout, retain_graph=True)

        contenders[name] = run
    expected = contenders["torch"](0)
    for name, call in ours.items():
        call()
        for i, (wanted, got) in enumerate(zip(expected, gradients)):
            agree(f"{case} gradient {i} {name}", {"torch": wanted, OURS: got})
    contenders |= {name: lambda i, call=call: call() for name, call in ours.items()}
    record.add(case, kernels(contenders, calls=4), dtype="bf16", flops=flops)
