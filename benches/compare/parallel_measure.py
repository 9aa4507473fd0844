"""What two GPUs gain in an engine's forward pass: layers of Llama-3-8B's shape in prefill and in decoding, tensor and sequence
parallel, beside one GPU of the same run and beside PyTorch."""

import torch
import torch.distributed as dist
from common import OURS
from parallel_layer import EPSILON, LLAMA_8B, Cache, angles, attended, blocks, blocks_and_sums, blocks_of_divided_rows, blocks_with_norms
from parallel_layer import gated, make_weights, numbers, part_of, part_of_shape

# Sequences, and tokens of each. Two sequences are independent, so that one's products hide the other's sums.
PREFILL = [(2, 4096), (2, 2048), (1, 4096), (2, 16384)]
PREFILL_LAYERS, DECODE_LAYERS, DECODE_TOKENS = 4, 8, 1024
# A layer that runs beside another has its own sums behind its products.
NO_CHUNKS = 1 << 40
SMALL = dict(hidden=64, intermediate=96, heads=8, kv_heads=4, head_dim=16)


def shape_of(r):
    return LLAMA_8B if r.cuda else SMALL


def scaling(r, times, one, several):
    return round(times[one] / (r.size * times[several]), 4)


def of_ranks(r, times, one=f"{OURS} one GPU", peer="torch one GPU"):
    """What a row says besides: the scaling of each contender that ranks divide."""
    about = {name: scaling(r, times, peer if name.startswith("torch") else one, name) for name in times if "one GPU" not in name}
    divided = {name: us for name, us in times.items() if "one GPU" not in name}
    ours, theirs = (min((us for name, us in divided.items() if name.startswith(who)), default=None) for who in (OURS, "torch"))
    return dict(scaling=about, ranks=r.size) | (dict(of_torch=round(theirs / ours, 4)) if ours and theirs else {})


def run_all(calls):
    def run():
        for call in calls:
            call()

    return run


def side_by_side(r, first, second):
    """Two lists of calls on streams of their own: sums of one run beside products of the other."""
    if not r.cuda:
        return run_all([*first, *second])
    streams = [torch.cuda.Stream() for _ in range(2)]

    def run():
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        # By turns of a call, so that collectives are queued in the order in which they are ready.
        for pair in zip(first, second):
            for stream, call in zip(streams, pair):
                with torch.cuda.stream(stream):
                    call()
        for stream in streams:
            here.wait_stream(stream)

    return run


def sums_beside(r, first, second):
    """Two lists of pairs of a block and its sum. Blocks take turns on one stream, and each sum runs on another one beside the other
    list's block: two streams of blocks would come to their sums at the same time."""
    if not r.cuda:
        return run_all([call for pair in zip(first, second) for both in pair for call in both])
    side = torch.cuda.Stream()

    def run():
        here, summed = torch.cuda.current_stream(), [None, None]
        for pair in zip(first, second):
            for i, (block, its_sum) in enumerate(pair):
                if summed[i]:
                    here.wait_event(summed[i])
                block()
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    its_sum()
                    summed[i] = side.record_event()
        here.wait_stream(side)

    return run


def divided_rows(r, c, all_weights, x):
    """Pairs of calls of all layers for one half of the sequences, and this rank's rows of the residual stream."""
    hidden = x.view(-1, x.shape[-1]).chunk(r.size)[r.rank].clone()
    normed, partial = r.in_group(torch.zeros_like(x)), r.in_group(torch.zeros_like(x))
    pairs = blocks_of_divided_rows(r.ctx, c, all_weights, (hidden, normed, partial), r.comm)
    begin = r.ctx.op("rms_norm", x=x, weight=all_weights[0]["norm1"], out=normed, epsilon=EPSILON)
    return [(begin, lambda: None), *pairs], hidden


def mlp_in_halves(r, c, all_weights, x):
    """A forward pass of one sequence: the MLP takes half of the tokens on each of two streams, so that one half's sum runs beside
    the other's products."""
    hidden, normed = x.clone(), torch.empty_like(x)
    to = r.parallel()
    attention = [blocks(r.ctx, c, w, hidden, normed, to)[:2] for w in all_weights]
    halves = []
    for h, n in zip(*(t.view(-1, t.shape[-1]).chunk(2) for t in (hidden, normed))):
        r.apart()
        halves.append([blocks(r.ctx, c, w, h, n, r.parallel(chunk_rows=NO_CHUNKS))[2:] for w in all_weights])
    r.apart()
    return run_all([call for i, calls in enumerate(attention) for call in (*calls, side_by_side(r, halves[0][i], halves[1][i]))]), hidden


def tensors(r, c, all_weights):
    """Weights and shape of one rank, and this rank's part."""
    return part_of_shape(c, r.size), [part_of(c, w, r.rank, r.size) for w in all_weights]


def forward(r, c, all_weights, x, parallel=None):
    """Calls of all layers, and the residual stream, which stays as large as it was: norms divide by it."""
    hidden, normed = x.clone(), torch.empty_like(x)
    return [call for w in all_weights for call in blocks(r.ctx, c, w, hidden, normed, parallel)], hidden


def torch_forward(r, c, all_weights, x, summed, attention=attended, mlp=gated):
    hidden = x.clone()
    cos, sin = angles(c, torch.arange(x.shape[1], device=x.device), x.dtype)

    def run():
        with torch.no_grad():
            for w in all_weights:
                hidden.add_(summed(attention(c, w, hidden, cos, sin)))
                hidden.add_(summed(mlp(w, hidden)))

    return run, hidden


def all_reduced(t):
    dist.all_reduce(t)
    return t


def agree(r, case, one, others, tolerance=5e-2):
    for name, other in others.items():
        off = (one.float() - other.float()).abs().max().item() / one.float().abs().max().item()
        if not off < tolerance:
            r.wrong.append(f"{case}, rank {r.rank}: {name} is {off:.3f} of the largest number away")


def prefill(r):
    c = shape_of(r)
    all_weights = [make_weights(c, r.device, torch.bfloat16, seed=seed) for seed in range(1, 1 + (PREFILL_LAYERS if r.cuda else 2))]
    own, parts = tensors(r, c, all_weights)
    for batch, seq in PREFILL if r.cuda else [(2, 16), (1, 16)]:
        one_prefill(r, c, (own, parts), all_weights, batch, seq)
        r.empty_cache()


def one_prefill(r, c, divided, all_weights, batch, seq):
    own, parts = divided
    x = numbers(r.device, torch.bfloat16, batch, seq, c["hidden"], seed=2)
    case = f"prefill, {batch} x {seq} tokens, bf16"
    made = {f"{OURS} one GPU": forward(r, c, all_weights, x)}
    made[f"{OURS} tensor parallel"] = forward(r, own, parts, x, r.parallel())
    if batch % r.size == 0:
        rows = x.chunk(r.size)[r.rank].contiguous()
        made[f"{OURS} sequence parallel"] = forward(r, own, parts, rows, r.parallel(sequence=1))
    contenders = {name: run_all(calls) for name, (calls, _) in made.items()}
    hidden = {name: h for name, (_, h) in made.items()}
    if batch == 2:
        halves = []
        for half in x.chunk(2):
            r.apart()
            halves.append(forward(r, own, parts, half.contiguous(), r.parallel(chunk_rows=NO_CHUNKS)))
        name = f"{OURS} tensor parallel, sequences side by side"
        contenders[name] = side_by_side(r, *(calls for calls, _ in halves))
        # One stream has all blocks of both, so they share a workspace.
        r.apart()
        divided = [divided_rows(r, own, parts, half.contiguous()) for half in x.chunk(2)]
        contenders[f"{OURS} tensor parallel, rows divided"] = sums_beside(r, *(pairs for pairs, _ in divided))
    halved = f"{OURS} tensor parallel, MLP in halves"
    contenders[halved], hidden[halved] = mlp_in_halves(r, own, parts, x)
    if r.cuda:
        contenders["torch one GPU"], hidden["torch one GPU"] = torch_forward(r, c, all_weights, x, lambda t: t)
        contenders["torch tensor parallel"], hidden["torch tensor parallel"] = torch_forward(r, own, parts, x, all_reduced)
    # The first run of each is of the same tokens.
    for run in contenders.values():
        run()
    r.synchronize()
    one = hidden.pop(f"{OURS} one GPU")
    others = {name: h for name, h in hidden.items() if "sequence parallel" not in name}
    if batch == 2:
        others[name] = torch.cat([h for _, h in halves])
        for half, (_, own_rows) in zip(one.chunk(2), divided):
            rows = half.view(-1, half.shape[-1]).chunk(r.size)[r.rank]
            agree(r, case, rows, {"divided rows": own_rows})
    agree(r, case, one, others)
    if f"{OURS} sequence parallel" in hidden:
        agree(r, case, one.chunk(r.size)[r.rank], {"sequence parallel": hidden[f"{OURS} sequence parallel"]})
    times = {name: us / len(all_weights) for name, us in r.times(contenders).items()}
    r.row(case, times, dtype="bf16", tokens=batch * seq, layers=len(all_weights), **of_ranks(r, times))


def prefill_compiled(r):
    """PyTorch's layers with what lies between products compiled."""
    if not r.cuda:
        return
    c = LLAMA_8B
    all_weights = [make_weights(c, r.device, torch.bfloat16, seed=seed) for seed in range(1, 1 + PREFILL_LAYERS)]
    own, parts = tensors(r, c, all_weights)
    batch, seq = PREFILL[0]
    x = numbers(r.device, torch.bfloat16, batch, seq, c["hidden"], seed=2)
    attention, mlp = (torch.compile(function, dynamic=False) for function in (attended, gated))
    contenders = {
        "torch.compile one GPU": torch_forward(r, c, all_weights, x, lambda t: t, attention, mlp)[0],
        "torch.compile tensor parallel": torch_forward(r, own, parts, x, all_reduced, attention, mlp)[0],
        f"{OURS} one GPU": run_all(forward(r, c, all_weights, x)[0]),
        f"{OURS} tensor parallel": run_all(forward(r, own, parts, x, r.parallel())[0]),
    }
    for run in contenders.values():
        run()
    times = {name: us / len(all_weights) for name, us in r.times(contenders).items()}
    about = of_ranks(r, times, peer="torch.compile one GPU")
    r.row(f"prefill, {batch} x {seq} tokens, bf16, compiled", times, dtype="bf16", tokens=batch * seq, layers=len(all_weights), **about)


def decode(r):
    """Steps of one token behind a thousand others, in a cache."""
    c = shape_of(r)
    count, tokens = (DECODE_LAYERS, DECODE_TOKENS) if r.cuda else (2, 48)
    all_weights = [make_weights(c, r.device, torch.bfloat16, seed=seed) for seed in range(1, 1 + count)]
    own, parts = tensors(r, c, all_weights)
    x = numbers(r.device, torch.bfloat16, tokens, c["hidden"], seed=3)
    caches = []

    def constant(weights):
        """As an engine promises them."""
        made = {name: r.ctx.library.tensor(w) for name, w in weights.items() if w.dim() == 2}
        for tensor in made.values():
            tensor.flags |= r.ctx.library.constants["TENSOR_CONSTANT"]
        return weights | made

    def steps(of_rank, make):
        """`make` gives hidden states and the calls of all layers, for the tokens before and for the one behind them."""
        cache = Cache(r.ctx, c if of_rank is all_weights else own, "BF16", count, tokens)
        caches.append(cache)
        for rows in (x[:-1], x[-1:]):
            cache.extend(len(rows))
            hidden, calls = make(rows, [constant(w) for w in of_rank], cache)
            run_all(calls)()
        r.synchronize()
        return run_all(calls), hidden

    def apart(parallel, in_group=False):
        def make(rows, of_rank, cache):
            hidden, normed = r.in_group(rows) if in_group else rows.clone(), torch.empty_like(rows)
            shape = own if parallel else c
            return hidden, sum((blocks(r.ctx, shape, w, hidden, normed, parallel, **cache.of(i)) for i, w in enumerate(of_rank)), [])

        return make

    def in_products(rows, of_rank, cache):
        hidden = rows.clone()
        return hidden, sum((blocks_with_norms(r.ctx, c, w, hidden, **cache.of(i)) for i, w in enumerate(of_rank)), [])

    def in_sums(rows, of_rank, cache):
        hidden, normed, partial = rows.clone(), torch.empty_like(rows), torch.empty_like(rows)
        calls = [r.ctx.op("rms_norm", x=hidden, weight=of_rank[0]["norm1"], out=normed, epsilon=EPSILON)]
        for i, w in enumerate(of_rank):
            following = of_rank[(i + 1) % count]["norm1"]
            calls += blocks_and_sums(r.ctx, own, w, hidden, normed, partial, r.comm, following, **cache.of(i))
        return hidden, calls

    made = {
        f"{OURS} one GPU": steps(all_weights, apart(None)),
        f"{OURS} one GPU, norms in products": steps(all_weights, in_products),
        f"{OURS} tensor parallel": steps(parts, in_sums),
        f"{OURS} tensor parallel, norms apart": steps(parts, apart(r.parallel(), in_group=True)),
        f"{OURS} tensor parallel, norms apart, sums in other memory": steps(parts, apart(r.parallel())),
    }
    contenders = {name: run for name, (run, _) in made.items()}
    (_, one), *others = made.values()
    agree(r, "decoding", one, {name: hidden for name, (_, hidden) in zip(list(made)[1:], others)})
    if r.cuda:
        contenders["torch one GPU"] = torch_step(c, all_weights, x[-1:], tokens, lambda t: t)
        contenders["torch tensor parallel"] = torch_step(own, parts, x[-1:], tokens, all_reduced)
        for run in contenders.values():
            run()
    times = {name: us / count for name, us in r.times(contenders).items()}
    one = min((name for name in times if name.startswith(f"{OURS} one GPU")), key=times.get)
    about = dict(dtype="bf16", layers=count, tokens=1, context=tokens, **of_ranks(r, times, one=one))
    weights = sum(w.nbytes for w in all_weights[0].values())
    r.row(f"decoding behind {tokens - 1} tokens, bf16", times, weight_bytes=weights, **about)
    for cache in caches:
        cache.close()


def torch_step(c, all_weights, token, tokens, summed):
    shape = 1, c["kv_heads"], tokens, c["head_dim"]
    caches = [tuple(torch.randn(shape, device=token.device, dtype=token.dtype) for _ in range(2)) for _ in all_weights]
    cos, sin = angles(c, torch.tensor([tokens - 1], device=token.device), token.dtype)
    hidden = token[None].clone()

    def run():
        with torch.no_grad():
            for w, cache in zip(all_weights, caches):
                hidden.add_(summed(attended(c, w, hidden, cos, sin, cache)))
                hidden.add_(summed(gated(w, hidden)))

    return run
