"""The gradient of an embedding's table: bf16, all of the table written, ids as a text has them (Zipf's law)
and all different."""

import torch
from common import OURS, Record, agree, copies, graphs, randn, ring

# Tokens, vocabulary, hidden size.
SHAPES = [(16384, 49152, 576), (16384, 128256, 2048), (16384, 128256, 4096), (2048, 128256, 4096)]
METHOD = (
    "Microseconds of one call: a graph of calls on two working sets, replayed by turns, medians. `copy` moves as many bytes as one "
    "reading of dout and one writing of the table."
)


def compare(ctx):
    record = Record("embedding_backward", ctx.library, METHOD)
    for shape in SHAPES:
        for kind in ("text", "different"):
            one(ctx, record, *shape, kind)
            torch.cuda.empty_cache()


def ids_of(kind, tokens, vocab):
    if kind == "different":
        return torch.randperm(vocab, device="cuda")[:tokens]
    weights = 1.0 / torch.arange(1, vocab + 1, device="cuda", dtype=torch.float64)
    return torch.multinomial(weights, tokens, replacement=True)


def one(ctx, record, tokens, vocab, dim, kind):
    bytes_moved = 2 * dim * (tokens + vocab)
    douts = [randn(tokens, dim) for _ in range(2)]
    ids = [ids_of(kind, tokens, vocab) for _ in range(2)]
    tables = [torch.empty(vocab, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    ours = [ctx.op("embedding_backward", dout=d, ids=i, dweight=t) for d, i, t in zip(douts, ids, tables)]
    theirs = ring(2, lambda i: torch.ops.aten.embedding_dense_backward(douts[i], ids[i], vocab, -1, False))
    ours[0](), theirs(0)
    # PyTorch rounds parts of a sum to bf16, so neither is the other's measure.
    exact = torch.zeros(vocab, dim, device="cuda").index_add_(0, ids[0], douts[0].float())
    agree(f"embedding_backward {tokens} {vocab} {kind}", {"sum": exact.bfloat16(), OURS: tables[0]}, tolerance=4e-3)
    agree(f"embedding_backward {tokens} {vocab} {kind}", {"sum": exact, "torch": theirs.results[0]}, tolerance=5e-2)
    del exact
    contenders = {OURS: lambda i: ours[i % 2](), "torch": theirs, "copy": copies(bytes_moved)}
    record.add(f"{tokens} of {vocab}x{dim} {kind}", graphs(contenders, calls=4), dtype="bf16", bytes=bytes_moved)
