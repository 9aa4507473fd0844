"""Cross-entropy with its gradient in the logits' place: bf16, vocabularies of real models.

PyTorch computes the loss and, from its own log-probabilities, the gradient; torch.compile does both in one
function; Liger's kernel does both in place.
"""

import torch
from common import OURS, Record, agree, compiled, copies, kernels, peer, randn, ring

SHAPES = [(8192, 49152), (8192, 128256), (4096, 151936), (64, 128256)]
METHOD = (
    "Microseconds of one call: the kernels' time by CUPTI (Liger's host waits for a count, so it cannot be captured), working sets "
    "that exceed the cache, by turns, medians. `copy` moves as many bytes as one reading and one writing of the logits."
)


def compare(ctx):
    record = Record("cross_entropy", ctx.library, METHOD, ("liger-kernel",))
    liger = peer("liger_kernel.ops.cross_entropy")
    for tokens, vocab in SHAPES:
        one(ctx, record, liger, tokens, vocab)
        torch.cuda.empty_cache()


def formula(logits, targets):
    logits = logits.float()
    lse = torch.logsumexp(logits, -1, keepdim=True)
    picked = logits.gather(-1, targets[:, None])
    gradient = torch.exp(logits - lse)
    gradient = gradient.scatter_add(-1, targets[:, None], -torch.ones_like(picked)) / targets.numel()
    return (lse - picked).mean(), gradient.bfloat16()


def one(ctx, record, liger, tokens, vocab):
    bytes_moved = 2 * tokens * vocab * 2
    count = 2
    logits = [randn(tokens, vocab) for _ in range(count)]
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    loss = torch.empty(1, device="cuda", dtype=torch.float32)
    fast = compiled(formula)
    expected = fast(logits[0], targets)
    again = torch.empty_like(logits[0])
    ctx.op("cross_entropy", logits=logits[0], dlogits=again, targets=targets, loss=loss)()
    agree(f"dlogits {tokens}x{vocab}", {"torch.compile": expected[1], OURS: again})
    agree(f"loss {tokens}x{vocab}", {"torch.compile": expected[0].reshape(1), OURS: loss})
    del again
    ours = [
        ctx.op("cross_entropy", logits=t, dlogits=t, targets=targets, loss=loss) for t in logits
    ]
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch.compile": ring(count, lambda i: fast(logits[i], targets)),
        "copy": copies(bytes_moved),
    }
    if liger:
        # Without it only the loss is computed.
        wanted = [t.detach().requires_grad_() for t in logits]

        def run(i):
            liger.cross_entropy_forward(
                wanted[i % count], targets, None, -100, 0.0, 0.0, "mean", None, False)
        try:
            run(0)
            torch.cuda.synchronize()
            contenders["liger"] = run
        except Exception as error:  # a peer's signature changes with its version
            print(f"without liger: {error!r:.300}")
    record.add(f"{tokens}x{vocab}", kernels(contenders, calls=4), dtype="bf16", bytes=bytes_moved)
