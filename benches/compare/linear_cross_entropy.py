"""A head's loss and all gradients in one call: bf16, vocabularies of real models; time and memory.

PyTorch computes logits, loss and gradients by autograd, plainly and compiled. Liger computes gradients in its forward, in
chunks too: as it comes, where shares of the weight's gradient are added in bf16, and in f32, as libunsloth adds them.
"""

import torch
from common import OURS, Record, agree, compiled, kernels, peer, randn
from torch.nn import functional

SHAPES = [(8192, 576, 49152), (8192, 2048, 128256), (8192, 4096, 128256), (4096, 4096, 128256)]
METHOD = (
    "Microseconds of loss and gradients of x and weight: the kernels' time by CUPTI (Liger's host waits for a count, so it cannot "
    "be captured), by turns, medians. `peak` are the bytes above inputs while they are computed, gradients among them, by "
    "PyTorch's allocator, from which libunsloth's workspace is too; `workspace` is what it has of them. `main_grad` leaves the "
    "weight's gradient in f32, as optimizers with f32 masters take it. The rate is that of three products."
)


def compare(ctx):
    record = Record("linear_cross_entropy", ctx.library, METHOD, ("liger-kernel",))
    liger = peer("liger_kernel.ops.fused_linear_cross_entropy")
    for shape in SHAPES:
        one(ctx, record, liger, *shape)
        torch.cuda.empty_cache()


def loss_of(x, weight, targets):
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def peak(function):
    """Bytes at the most above what is there before a warm call, whose results are dropped."""
    function()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def ours(ctx, x, weight, targets, dtype, **fields):
    """A call whose gradients and workspace are allocated for it, as PyTorch's are."""

    def run():
        loss = torch.empty(1, device="cuda", dtype=torch.float32)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight, dtype=dtype)
        # The context's own workspace may be larger, of another shape.
        ctx.workspace, ctx.workspace_size = None, 0
        call = ctx.op(
            "linear_cross_entropy", x=x, weight=weight, targets=targets, loss=loss, dx=dx, dweight=dweight, **fields)
        run.workspace = call.params.workspace_size
        call()
        ctx.workspace, ctx.workspace_size = None, 0
        return loss, dx, dweight

    return run


def by_autograd(function, x, weight, targets):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))

    def run():
        loss = function(x, weight, targets)
        return loss.detach().reshape(1), *torch.autograd.grad(loss, (x, weight))

    return run


def by_liger(liger, x, weight, targets, dtype):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))

    @torch.no_grad()  # as inside its autograd function
    def run():
        got = liger.fused_linear_cross_entropy_forward(x, weight, targets, accum_dtype=dtype)
        tensors = [t for t in got if torch.is_tensor(t)]
        gradients = [next(t for t in tensors if t.shape == like.shape) for like in (x, weight)]
        return tensors[0].detach().reshape(1), *gradients

    return run


def one(ctx, record, liger, tokens, hidden, vocab):
    case = f"{tokens}x{hidden}x{vocab}"
    x = randn(tokens, hidden)
    weight = randn(vocab, hidden) * (2 / hidden**0.5)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    contenders = {
        OURS: ours(ctx, x, weight, targets, torch.bfloat16),
        "unsloth main_grad": ours(ctx, x, weight, targets, torch.float32),
        "unsloth 1024 at a time": ours(ctx, x, weight, targets, torch.float32, chunk_tokens=1024),
        "unsloth 256 at a time": ours(ctx, x, weight, targets, torch.float32, chunk_tokens=256),
        "torch": by_autograd(loss_of, x, weight, targets),
        "torch.compile": by_autograd(compiled(loss_of), x, weight, targets),
    }
    if liger:
        contenders["liger"] = by_liger(liger, x, weight, targets, None)
        contenders["liger f32"] = by_liger(liger, x, weight, targets, torch.float32)
    expected = contenders["torch"]()
    memory = {}
    for name in list(contenders):
        try:
            got = contenders[name]()
            for what, of_torch, of_this in zip(("loss", "dx", "dweight"), expected, got):
                agree(f"{what} {case}", {"torch": of_torch, name: of_this}, tolerance=5e-2)
            del got, of_this
            memory[name] = peak(contenders[name])
        except Exception as error:  # a peer's signature changes with its version, and memory is finite
            if name.startswith(OURS):
                raise
            print(f"{case} without {name}: {error!r:.300}")
            del contenders[name]
    del expected, of_torch
    times = kernels({name: (lambda i, f=function: f()) for name, function in contenders.items()}, calls=2)
    workspace = contenders[OURS].workspace
    record.add(case, times, dtype="bf16", flops=6 * tokens * hidden * vocab, peak=memory, workspace=workspace)
    print(" ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items()), flush=True)
