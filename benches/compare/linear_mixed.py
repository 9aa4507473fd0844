"""Products of one row among other kernels, as an engine calls them: a burst of calls of one kernel, which `linear_codes`
and `linear_blocks` measure, has that kernel's instructions in the near caches all along."""

import torch
from common import OURS, Record, graphs, randn
from linear_blocks import FORMATS, blocks
from linear_blocks import described as described_blocks
from linear_codes import CONSTANT, quantized
from linear_codes import described as described_codes

# Dtype of the weight, out_features, in_features: what is measured, and what is called around it.
CASES = [
    ("ternary", 2560, 2560), ("ternary", 13824, 2560), ("ternary", 2560, 6912), ("ternary", 14336, 4096),
    ("i8", 2560, 2560), ("i8", 13824, 2560), ("Q4_0", 4096, 4096), ("Q4_0", 14336, 4096), ("Q6_K", 4096, 4096), ("bf16", 4096, 4096),
]  # fmt: skip
OTHERS = [("Q4_0", 4096, 2560), ("Q6_K", 4096, 2560), ("bf16", 2560, 2560), ("i8", 2560, 2560), ("f8e4m3", 2560, 2560), ("ternary", 2560, 2560)]
# The products of BitNet b1.58 2B-4T's layer, a norm before the first, the third and the last.
LAYER = [(3840, 2560), (2560, 2560), (13824, 2560), (13824, 2560), (2560, 6912)]
NORMS = {0: 2560, 2: 2560, 4: 6912}
SETS = 24
METHOD = (
    "One row, bf16 x; ours are told that weights of blocks and of codes are constant. 24 sequences of calls in a graph, each by weights of its own, replayed by turns, medians. "
    "Of a product: what it adds to a sequence of products by other kernels of ours (weights of the other dtypes, 2560 to 4096 rows), `torch` what its product "
    "by bf16 weights adds to the same ones, `others` what these take. Of the layer: norms and products, `torch` by bf16 weights."
)


def compare(ctx):
    record = Record("linear_mixed", ctx.library, METHOD)
    others = {name: products(ctx, name, n, k) for name, n, k in OTHERS}
    for name, n, k in CASES:
        around = [calls for other, calls in others.items() if other != name]
        ours, theirs = products(ctx, name, n, k), torch_products(n, k)
        times = graphs({"others": sequence(around), OURS: sequence([*around, ours]), "torch": sequence([*around, theirs])}, SETS)
        alone = times.pop("others")
        record.add(f"{name} m1 n{n} k{k}", {key: us - alone for key, us in times.items()}, dtype="bf16", others=round(alone, 3))
        torch.cuda.empty_cache()
    ours, theirs = [], []
    for i, (n, k) in enumerate(LAYER):
        if i in NORMS:
            norm, plain = norms(ctx, NORMS[i])
            ours.append([norm] * SETS)
            theirs.append([plain] * SETS)
        ours.append(products(ctx, "ternary", n, k))
        theirs.append(torch_products(n, k))
    record.add("BitNet layer", graphs({OURS: sequence(ours), "torch": sequence(theirs)}, SETS), dtype="bf16")


def sequence(of_calls):
    def run(i):
        for calls in of_calls:
            calls[i]()

    return run


def products(ctx, name, n, k):
    """A call for each set of weights."""
    x, out = randn(1, k), torch.empty(1, n, device="cuda", dtype=torch.bfloat16)
    calls = []
    for _ in range(SETS):
        if name in FORMATS:
            made = blocks(name, n, k)
            weight = described_blocks(ctx, made, name, n, k)
            weight.flags = CONSTANT
        elif name == "bf16":
            made = weight = randn(n, k) * k**-0.5
        else:
            codes, scale, _ = quantized(ctx, randn(n, k) * k**-0.5, name)
            weight, quantization = described_codes(ctx, codes, name, n, k, scale)
            made = (codes, scale, quantization)
        calls.append(keeping(ctx.op("linear", x=x, weight=weight, out=out), made))
    return calls


def torch_products(n, k):
    x, out = randn(1, k), torch.empty(1, n, device="cuda", dtype=torch.bfloat16)
    weights = [randn(n, k) * k**-0.5 for _ in range(SETS)]
    return [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]


def norms(ctx, dim):
    """Ours, and torch's."""
    x, weight, out = randn(1, dim), randn(dim), torch.empty(1, dim, device="cuda", dtype=torch.bfloat16)
    ours = ctx.op("rms_norm", x=x, weight=weight, out=out, epsilon=1e-5)
    return ours, lambda: torch.nn.functional.rms_norm(x, (dim,), weight, 1e-5)


def keeping(call, made):
    """The call, and what its weight points to."""
    return lambda: (made, call())
