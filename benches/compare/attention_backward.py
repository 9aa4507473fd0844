"""The backward pass of attention: bf16, heads of real models, beside FlashAttention-2 and cuDNN
through PyTorch. FlashAttention-3, the best peer for
most cells, is not among them yet.

Kernel time by CUPTI of everything between the call and the gradients. FLOP are those of five products.
"""

import torch
from common import OURS, Record, agree, kernels, randn

# Sequence, query heads, key heads, head dim, causal; 16384 tokens in all.
TOKENS = 16384
CASES = [
    (seq, heads, kv_heads, dim, causal)
    for dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8))
    for seq in (1024, 4096)
    for causal in (False, True)
]
METHOD = "Microseconds of one call: the kernels' time by CUPTI, contenders by turns, medians."


def compare(ctx):
    record = Record("attention_backward", ctx.library, METHOD)
    for case in CASES:
        one(ctx, record, *case)
        torch.cuda.empty_cache()


def one(ctx, record, seq, heads, kv_heads, dim, causal):
    batch = TOKENS // seq
    q, out, dout, dq = (randn(batch, seq, heads, dim) for _ in range(4))
    k, v, dk, dv = (randn(batch, seq, kv_heads, dim) for _ in range(4))
    lse = torch.empty(batch, heads, seq, device="cuda", dtype=torch.float32)
    ctx.op("attention", q=q, k=k, v=v, out=out, lse=lse, causal=int(causal))()
    ours = ctx.op(
        "attention_backward", q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, causal=int(causal)
    )
    ours()
    contenders = {OURS: lambda i: ours()}
    for name, backend in (
        ("cuDNN", torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
        ("fa2", torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(backend):
            result = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=causal, enable_gqa=heads != kv_heads
            )
        gradient = dout.transpose(1, 2)

        def run(i, result=result, leaves=leaves):
            return torch.autograd.grad(result, leaves, gradient, retain_graph=True)

        expected = run(0)
        for what, got, wanted in zip(("dq", "dk", "dv"), (dq, dk, dv), expected):
            agree(f"{what} {seq} {heads} {dim} {name}", {name: wanted.transpose(1, 2), OURS: got})
        contenders[name] = run
    flops = 10 * batch * heads * seq * seq * dim // (2 if causal else 1)
    times = kernels(contenders, calls=4)
    about = {name: round(flops / us / 1e6) for name, us in times.items()}
    print(f"attention_backward {seq} {heads}/{kv_heads} hd{dim} {'causal' if causal else 'full'}: TFLOP/s {about}", flush=True)
    mask = "causal" if causal else "full"
    record.add(f"hd{dim} {heads}/{kv_heads} {mask} s{seq}", times, dtype="bf16", flops=flops)
