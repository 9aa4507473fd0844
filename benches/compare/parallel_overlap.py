"""What sums beside products gain: the same prefill with ranks' sums behind all products, in so many chunks of rows, and as
the library divides them, as an engine's calls and as decoder layers; and both passes of decoder layers."""

import torch
from common import OURS
from parallel_layer import LLAMA_8B, Layer, make_weights, numbers
from parallel_measure import SMALL, agree, all_reduced, forward, of_ranks, run_all, tensors, torch_forward

PREFILL, TRAINING = (2, 4096), (2, 2048)
LAYERS = 4
# Rows over these are those of a chunk; None is the library's choice.
CHUNKS = {"off": 1, "chosen": None, "2 chunks": 2, "4 chunks": 4}


def chunk_rows(rows, chunks):
    return 0 if chunks is None else rows // chunks


def layers(r, c, all_weights, x, parallel=None, trains=False):
    """Decoder layers behind each other that keep nothing, or what their backward pass needs, which follows: their calls, what they
    give, and what has to live as long."""
    made, given = [], x
    for w in all_weights:
        layer = Layer(r.ctx, c, w, given, torch.ones_like(x) if trains else None, parallel, policy="NONE" if trains else "FULL")
        made.append(layer)
        given = layer.out
    passes = [[layer.calls[i] for layer in made] for i in range(2 if trains else 1)]
    return [call for calls in passes for call in calls], (made[0].dx if trains else given), made


def overlap(r):
    c = LLAMA_8B if r.cuda else SMALL
    count = LAYERS if r.cuda else 2
    all_weights = [make_weights(c, r.device, torch.bfloat16, seed=seed) for seed in range(1, 1 + count)]
    divided = tensors(r, c, all_weights)
    batch, seq = PREFILL if r.cuda else (2, 16)
    of_prefill(r, c, divided, all_weights, numbers(r.device, torch.bfloat16, batch, seq, c["hidden"], seed=2))
    r.empty_cache()
    batch, seq = TRAINING if r.cuda else (2, 16)
    of_training(r, c, divided, all_weights[:2], numbers(r.device, torch.bfloat16, batch, seq, c["hidden"], seed=2))


def of_prefill(r, c, divided, all_weights, x):
    own, parts = divided
    rows = x.shape[0] * x.shape[1]
    ones = [f"{OURS} one GPU", f"{OURS} one GPU, layers"]
    made = dict(zip(ones, (forward(r, c, all_weights, x), layers(r, c, all_weights, x))))
    of_rank = x.chunk(r.size)[r.rank].contiguous() if len(x) % r.size == 0 else None
    for name, chunks in CHUNKS.items():
        least = chunk_rows(rows, chunks)
        made[f"{OURS} blocks, {name}"] = forward(r, own, parts, x, r.parallel(chunk_rows=least))
        made[f"{OURS} layers, {name}"] = layers(r, own, parts, x, r.parallel(chunk_rows=least))
        if of_rank is not None:
            made[f"{OURS} sequence parallel, {name}"] = forward(r, own, parts, of_rank, r.parallel(sequence=1, chunk_rows=least))
    contenders = {name: run_all(calls) for name, (calls, *_) in made.items()}
    if r.cuda:
        contenders["torch one GPU"], _ = torch_forward(r, c, all_weights, x, lambda t: t)
        contenders["torch tensor parallel"], _ = torch_forward(r, own, parts, x, all_reduced)
    # The first run of each is of the same tokens.
    for run in contenders.values():
        run()
    r.synchronize()
    hidden = {name: h for name, (_, h, *_) in made.items()}
    one = hidden.pop(ones[0])
    case = f"prefill, {x.shape[0]} x {x.shape[1]} tokens, bf16, in chunks"
    agree(r, case, one, {name: h for name, h in hidden.items() if "sequence" not in name})
    if of_rank is not None:
        agree(r, case, one.chunk(r.size)[r.rank], {name: h for name, h in hidden.items() if "sequence" in name})
    row(r, case, contenders, ones, rows, len(all_weights))


def of_training(r, c, divided, all_weights, x):
    own, parts = divided
    rows = x.shape[0] * x.shape[1]
    ones = [f"{OURS} one GPU"]
    made = {ones[0]: layers(r, c, all_weights, x, trains=True)}
    for name, chunks in CHUNKS.items():
        parallel = r.parallel(chunk_rows=chunk_rows(rows, chunks))
        made[f"{OURS} layers, {name}"] = layers(r, own, parts[: len(all_weights)], x, parallel, trains=True)
    contenders = {name: run_all(calls) for name, (calls, *_) in made.items()}
    for run in contenders.values():
        run()
    r.synchronize()
    gradients = {name: dx for name, (_, dx, *_) in made.items()}
    case = f"forward and backward pass, {x.shape[0]} x {x.shape[1]} tokens, bf16, in chunks"
    agree(r, case, gradients.pop(ones[0]), gradients)
    row(r, case, contenders, ones, rows, len(all_weights))


def row(r, case, contenders, ones, rows, count):
    """Microseconds of one layer, and shares of linear. One GPU goes the way that is faster there."""
    times = {name: us / count for name, us in r.times(contenders).items()}
    times[ones[0]] = min(times.pop(name) for name in ones)
    r.row(case, times, dtype="bf16", tokens=rows, layers=count, **of_ranks(r, times))
