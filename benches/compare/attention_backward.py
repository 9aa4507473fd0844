"""The backward pass of attention: bf16, heads of real models, beside FlashAttention-2 and cuDNN
through PyTorch, and beside FlashAttention-3 through JAX (`dew_flash_attn`, where it is installed).

Kernel time by CUPTI of everything between the call and the gradients. FLOP are those of five products.
"""

import math

import torch
from common import OURS, Record, agree, kernels, peer, randn

# Sequence, query heads, key heads, head dim, causal; 16384 tokens in all.
TOKENS = 16384
CASES = [
    (seq, heads, kv_heads, dim, causal)
    for dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (256, 8, 8), (128, 32, 8))
    for seq in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (False, True)
]
METHOD = (
    "Microseconds of one call: the kernels' time by CUPTI, contenders by turns, medians. `deterministic_us` is ours with the same bits "
    "every time."
)


def compare(ctx):
    record = Record("attention_backward", ctx.library, METHOD, ("dew-flash-attn-cu13",))
    fa3 = peer("dew_flash_attn")
    for case in CASES:
        one(ctx, record, fa3, *case)
        torch.cuda.empty_cache()


def one(ctx, record, fa3, seq, heads, kv_heads, dim, causal):
    batch = TOKENS // seq
    q, out, dout, dq = (randn(batch, seq, heads, dim) for _ in range(4))
    k, v, dk, dv = (randn(batch, seq, kv_heads, dim) for _ in range(4))
    lse = torch.empty(batch, heads, seq, device="cuda", dtype=torch.float32)
    ctx.op("attention", q=q, k=k, v=v, out=out, lse=lse, causal=int(causal))()
    fields = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, causal=int(causal))
    ordered = ctx.op("attention_backward", **fields, deterministic=1)
    ours = ctx.op("attention_backward", **fields)
    ours()
    contenders = {OURS: lambda i: ours(), f"{OURS}, deterministic": lambda i: ordered()}
    peers = {}
    if fa3:
        peers["FlashAttention-3"] = lambda: of_fa3(fa3, q, k, v, dout, causal)
    # cuDNN has no backward pass for more than 128 dimensions on Hopper.
    if dim <= 128:
        peers["cuDNN"] = lambda: of_torch("CUDNN_ATTENTION", q, k, v, dout, causal)
    peers["fa2"] = lambda: of_torch("FLASH_ATTENTION", q, k, v, dout, causal)
    for name, make in peers.items():
        run, gradients = make()
        for what, got, wanted in zip(("dq", "dk", "dv"), (dq, dk, dv), gradients(run(0))):
            agree(f"{what} {seq} {heads} {dim} {name}", {name: wanted, OURS: got})
        contenders[name] = run
    flops = 10 * batch * heads * seq * seq * dim // (2 if causal else 1)
    times = kernels(contenders, calls=4)
    about = {name: round(flops / us / 1e6) for name, us in times.items()}
    mask = "causal" if causal else "full"
    print(f"attention_backward {seq} {heads}/{kv_heads} hd{dim} {mask}: TFLOP/s {about}", flush=True)
    deterministic = round(times.pop(f"{OURS}, deterministic"), 3)
    case = f"hd{dim} {heads}/{kv_heads} {mask} s{seq}"
    record.add(case, times, dtype="bf16", flops=flops, deterministic_us=deterministic)


def of_torch(backend, q, k, v, dout, causal):
    """A call of autograd's backward pass, and what takes gradients like ours from its result."""
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        result = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
        )
    gradient = dout.transpose(1, 2)
    run = lambda i: torch.autograd.grad(result, leaves, gradient, retain_graph=True)
    return run, lambda results: [t.transpose(1, 2) for t in results]


def of_fa3(fa3, q, k, v, dout, causal):
    """The same of FlashAttention-3, on the memory of the tensors."""
    import jax

    scale, window = 1 / math.sqrt(q.shape[-1]), (-1, -1)
    share = jax.dlpack.from_dlpack
    given = [share(t) for t in (q, k, v)]
    out, lse = jax.jit(lambda q, k, v: fa3._forward3(q, k, v, None, None, scale, causal, window)[:2])(*given)
    backward = jax.jit(
        lambda dout, q, k, v, out, lse: fa3._backward3(dout, q, k, v, out, lse, None, None, scale, causal, window)
    )
    arguments = (share(dout), *given, out, lse)
    run = lambda i: jax.block_until_ready(backward(*arguments))
    return run, lambda results: [torch.from_dlpack(t) for t in results[:3]]
