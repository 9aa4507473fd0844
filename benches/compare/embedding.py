"""Rows of an embedding table by token ids: a vocabulary of 128,256, hidden size 4096."""

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, copies, graphs, num_sets, randn, ring

TOKENS = [16384, 2048, 64, 1]
VOCABULARY, DIM = 128256, 4096
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes."
)


def compare(ctx):
    record = Record("embedding", ctx.library, METHOD)
    table = randn(VOCABULARY, DIM)
    for tokens in TOKENS:
        bytes_moved = 2 * tokens * DIM * 2
        count = num_sets(bytes_moved)
        ids = [torch.randint(VOCABULARY, (tokens,), device="cuda", dtype=torch.int32) for _ in range(count)]
        out = [torch.empty(tokens, DIM, device="cuda", dtype=table.dtype) for _ in range(count)]
        ours = [ctx.op("embedding", table=table, ids=i, out=o) for i, o in zip(ids, out)]
        theirs = ring(count, lambda i: F.embedding(ids[i], table))
        ours[0](), theirs(0)
        agree(f"embedding {tokens}", {"torch": theirs.results[0], OURS: out[0]}, tolerance=0)
        contenders = {OURS: lambda i: ours[i % count](), "torch": theirs, "copy": copies(bytes_moved)}
        record.add(f"{tokens} tokens", graphs(contenders), dtype="bf16", bytes=bytes_moved)
        torch.cuda.empty_cache()
