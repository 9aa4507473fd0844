"""The backward pass of attention: bf16, heads of real models, beside FlashAttention-2 and cuDNN
through PyTorch, and beside FlashAttention-3 through JAX (`dew_flash_attn`, where it is installed).

Kernel time by CUPTI of everything between the call and the gradients. FLOP are those of five products
over the pairs of a query and a key that the mask leaves. CASES=REGEX leaves the cases whose names begin so.
"""

import dataclasses
import math
import os
import re

import torch
from common import OURS, Record, agree, kernels, peer, randn

TOKENS = 16384
METHOD = (
    "Microseconds of one call: the kernels' time by CUPTI, contenders by turns, medians. `deterministic_us` is ours with the same bits "
    "every time; in rows named so it is what all contenders give. Of 16,384 tokens in all. A window's w is of w keys up to the query's own. "
    "Documents are packed sequences of 64 to 4,096 tokens. Where values have fewer dimensions than keys, peers "
    "get them filled up with zeros before."
)
# Of packed documents, with a few long ones as in training data.
DOCUMENTS = [4096, 2048, 2048, 1024, 1024, 1024, 768, 768, 512, 512, 512, 384, 384, 256, 256, 256, 128, 128, 128, 64, 64]
assert sum(DOCUMENTS) == TOKENS


@dataclasses.dataclass
class Case:
    """Batched sequences of `seq` tokens, or those documents with 0."""

    seq: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    dim_v: int = 0
    window: int = 0
    deterministic: bool = False

    def __post_init__(self):
        self.dim_v = self.dim_v or self.dim
        self.lengths = [self.seq] * (TOKENS // self.seq) if self.seq else DOCUMENTS

    def __str__(self):
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        length = f"s{self.seq}" if self.seq else "documents"
        return f"hd{dims} {self.heads}/{self.kv_heads} {mask} {length}" + " deterministic" * self.deterministic

    def flops(self):
        pairs = 0
        for n in self.lengths:
            if self.window:
                w = min(self.window, n)
                pairs += w * (w + 1) // 2 + (n - w) * w
            else:
                pairs += n * n // (2 if self.causal else 1)
        return 2 * self.heads * pairs * (3 * self.dim + 2 * self.dim_v)


CASES = [
    Case(seq, heads, kv_heads, dim, causal)
    for dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (256, 8, 8), (128, 32, 8))
    for seq in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (False, True)
]
# Heads of Phi-3 and of DeepSeek, packed documents, windows, and the same bits every time.
OTHERS = [
    *(Case(seq, 32, 32, 96, causal) for seq in (2048, 8192) for causal in (False, True)),
    *(Case(seq, 16, 16, 192, causal, dim_v=128) for seq in (2048, 8192) for causal in (False, True)),
    *(Case(seq, 16, 16, 192, True) for seq in (2048, 8192)),
    *(Case(0, heads, kv_heads, dim, True) for dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8))),
    *(Case(16384, heads, heads, dim, True, window=1024) for dim, heads in ((64, 32), (128, 16), (256, 8))),
    *(
        Case(seq, heads, heads, dim, causal, deterministic=True)
        for dim, heads in ((64, 32), (128, 16), (256, 8))
        for seq in (2048, 8192)
        for causal in (False, True)
    ),
]


def compare(ctx):
    record = Record("attention_backward", ctx.library, METHOD, ("dew-flash-attn-cu13",))
    fa3 = peer("dew_flash_attn")
    wanted = [case for case in CASES + OTHERS if re.match(os.environ.get("CASES", ""), str(case))]
    for case in wanted:
        one(ctx, record, fa3, case)
        torch.cuda.empty_cache()


class Inputs:
    """Tensors as the library and FlashAttention take them: `[batch, seq, heads, dim]`, or packed `[tokens, heads, dim]`."""

    def __init__(self, case):
        shape = (len(case.lengths), case.seq) if case.seq else (TOKENS,)
        self.q, self.dout = randn(*shape, case.heads, case.dim), randn(*shape, case.heads, case.dim_v)
        self.k, self.v = randn(*shape, case.kv_heads, case.dim), randn(*shape, case.kv_heads, case.dim_v)
        self.starts = None
        if not case.seq:
            starts = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
            self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.longest = max(case.lengths)


def one(ctx, record, fa3, case):
    x = Inputs(case)
    out, dq, dk, dv = (torch.empty_like(t) for t in (x.dout, x.q, x.k, x.v))
    lse = torch.empty(*((len(case.lengths), case.heads, case.seq) if case.seq else (case.heads, TOKENS)), device="cuda")
    fields = dict(q=x.q, k=x.k, v=x.v, out=out, lse=lse, causal=int(case.causal), window_left=case.window)
    if x.starts is not None:
        fields |= dict(cu_seqlens_q=x.starts, cu_seqlens_k=x.starts, max_seqlen_q=x.longest, max_seqlen_k=x.longest)
    ctx.op("attention", **fields)()
    fields |= dict(dout=x.dout, dq=dq, dk=dk, dv=dv)
    ordered = ctx.op("attention_backward", **fields, deterministic=1)
    ours = ordered if case.deterministic else ctx.op("attention_backward", **fields)
    ours()
    contenders = {OURS: lambda i: ours(), f"{OURS}, deterministic": lambda i: ordered()}
    for name, make in peers_of(case, fa3, x, out, lse).items():
        try:
            run, gradients = make()
            found = gradients(run(0))
        except Exception as error:  # each refuses in its own way
            print(f"attention_backward {case}: without {name}: {error!r:.200}", flush=True)
            continue
        for what, got, wanted in zip(("dq", "dk", "dv"), (dq, dk, dv), found):
            agree(f"{what} {case} {name}", {name: wanted[..., : got.shape[-1]], OURS: got})
        contenders[name] = run
    times = kernels(contenders, calls=4)
    about = {name: round(case.flops() / us / 1e6) for name, us in times.items()}
    print(f"attention_backward {case}: TFLOP/s {about}", flush=True)
    deterministic = round(times.pop(f"{OURS}, deterministic"), 3)
    record.add(str(case), times, dtype="bf16", flops=case.flops(), deterministic_us=deterministic)


def peers_of(case, fa3, x, out, lse):
    """{peer: a function that gives a call, and what takes gradients like ours from its result}."""
    found = {}
    # Nothing in this build of FlashAttention-3 asks for the same bits.
    if fa3 and not case.deterministic:
        found["FlashAttention-3"] = lambda: of_fa3(fa3, case, x, out, lse)
    # cuDNN has no backward pass for more than 128 dimensions on Hopper, and PyTorch gives it neither windows nor documents.
    if case.dim <= 128 and case.seq and not case.window and not case.deterministic:
        found["cuDNN"] = lambda: of_torch("CUDNN_ATTENTION", case, x)
    if case.seq and not case.window:
        found["fa2"] = lambda: of_torch("FLASH_ATTENTION", case, x)
    else:
        found["fa2"] = lambda: of_fa2(case, x)
    return found


def filled(case, tensor):
    """With as many dimensions as keys have."""
    return torch.nn.functional.pad(tensor, (0, case.dim - case.dim_v))


def of_torch(backend, case, x):
    """A call of autograd's backward pass."""
    wide = [filled(case, t) for t in (x.v, x.dout)]
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (x.q, x.k, wide[0])]
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        result = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
        )
    gradient = wide[1].transpose(1, 2)

    def run(i):
        torch.use_deterministic_algorithms(case.deterministic)
        results = torch.autograd.grad(result, leaves, gradient, retain_graph=True)
        torch.use_deterministic_algorithms(False)
        return results

    return run, lambda results: [t.transpose(1, 2) for t in results]


def of_fa2(case, x):
    """PyTorch's kernel itself, which knows windows and documents. Of heads that share keys it wants copies of these, and gives gradients
    of the copies: time of adding them up is counted, that of copying is not."""
    group = case.heads // case.kv_heads
    q, k, v = x.q, *(t.repeat_interleave(group, -2) for t in (x.k, x.v))
    scale, of = 1 / math.sqrt(case.dim), torch.ops.aten
    window = dict(window_size_left=case.window - 1, window_size_right=0) if case.window else {}
    lengths = (x.starts, x.starts, x.longest, x.longest)
    if x.starts is None:
        lengths = (None, None, case.seq, case.seq)
    out, lse, state, unused, _ = of._flash_attention_forward(q, k, v, *lengths, 0.0, case.causal, False, scale=scale, **window)

    def run(i):
        dq, dk, dv = of._flash_attention_backward(
            x.dout, q, k, v, out, lse, *lengths, 0.0, case.causal, state, unused, scale=scale, **window
        )
        if group > 1:
            dk, dv = (t.unflatten(-2, (case.kv_heads, group)).sum(-2) for t in (dk, dv))
        return dq, dk, dv

    return run, list


def of_fa3(fa3, case, x, out, lse):
    """FlashAttention-3, on the memory of the tensors and from our output. The binding takes values of as many dimensions as keys have."""
    import jax

    scale, window = 1 / math.sqrt(case.dim), (case.window - 1, 0) if case.window else (-1, -1)
    # An array of starts is an argument, the greatest length a constant.
    starts = () if x.starts is None else (x.starts,) * 2
    longest = (x.longest,) * 2 if starts else None
    backward = jax.jit(
        lambda dout, q, k, v, out, lse, *s: fa3._backward3(dout, q, k, v, out, lse, s or None, longest, scale, case.causal, window)
    )
    dout, v, out = (filled(case, t) for t in (x.dout, x.v, out))
    arguments = [jax.dlpack.from_dlpack(t) for t in (dout, x.q, x.k, v, out, lse, *starts)]
    run = lambda i: jax.block_until_ready(backward(*arguments))
    return run, lambda results: [torch.from_dlpack(t) for t in results[:3]]
