"""What ranks compute is what one computes: every parallel form against the library's own of one rank and a reference in f64.

The error may be twice that of one rank, three times of gradients, and a rounding of each rank's part. Where the
documentation promises it, ranks have the same bits. Then 1,000 replays of a graph give the bits of the first call; outputs are
NaN before each.
"""

import ctypes
import hashlib
import traceback

import torch
import torch.nn.functional as F
from parallel_layer import (
    EPSILON, Cache, Layer, attention_fields, blocks, defined, layer, make_weights, mlp_fields, numbers, part_of, part_of_shape
)

REPLAYS, REPLAYS_ON_CPU = 1000, 2
GPU = dict(hidden=1024, intermediate=2816, heads=8, kv_heads=4, head_dim=128)
CPU = dict(hidden=64, intermediate=96, heads=8, kv_heads=4, head_dim=16)
# Whether rows are divided among ranks, and over what they are those of a chunk whose sum runs beside the next one's product.
FORMS = ((0, 0), (1, 0), (0, 3), (1, 3))
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
# What one rank may be off by, of the greatest number: more, and the reference is of something else.
SANE = {torch.float32: 1e-4, torch.bfloat16: 0.06}


class Output:
    """A tensor of this rank's, what one rank has in its place, and what is exact. `same`: on all ranks."""

    def __init__(self, name, got, one, exact, gradient=False, same=False, bits=False, floor=0.0):
        self.name, self.got, self.one, self.exact = name, got, one, exact.double()
        self.gradient, self.same, self.bits, self.floor = gradient, same, bits, floor


def bits_of(t):
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def check(r, name, dtype, calls, outputs):
    def run():
        for output in outputs:
            output.got.fill_(float("nan"))
        for call in calls:
            call()

    run()
    r.synchronize()
    for o in outputs:
        error, of_one = ((t.double() - o.exact).abs().max().item() for t in (o.got, o.one))
        greatest = o.exact.abs().max().item()
        if not of_one <= SANE[dtype] * max(greatest, 1):
            r.wrong.append(f"{name} {dtype} {o.name}, rank {r.rank}: one rank is off by {of_one:.3e} of {greatest:.3e}")
        allowed = (3 if o.gradient else 2) * of_one + greatest * (ROUNDING[dtype] * r.size + o.floor)
        if not error <= allowed:  # NaN is not
            r.wrong.append(f"{name} {dtype} {o.name}, rank {r.rank}: off by {error:.3e}, one rank {of_one:.3e}, allowed {allowed:.3e}")
        if o.bits and not torch.equal(bits_of(o.got), bits_of(o.one)):
            r.wrong.append(f"{name} {dtype} {o.name}, rank {r.rank}: other bits than one rank")
    digests = [hashlib.sha256(bits_of(o.got).cpu().numpy().tobytes()).hexdigest() for o in outputs if o.same]
    if any(other != digests for other in r.exchange(digests)):
        r.wrong.append(f"{name} {dtype}: ranks have different bits")
    first = [o.got.clone() for o in outputs]
    others = torch.zeros(1, dtype=torch.int64, device=r.device)

    def again():
        run()
        for o, before in zip(outputs, first):
            others.add_((bits_of(o.got) != bits_of(before)).sum())

    replay = r.capture(again)
    for _ in range(REPLAYS if r.cuda else REPLAYS_ON_CPU):
        replay()
    r.synchronize()
    if others.item():
        r.wrong.append(f"{name} {dtype}, rank {r.rank}: {others.item()} elements have other bits in replays")


def checks(r):
    """All forms, in both dtypes."""
    c = GPU if r.cuda else CPU
    for dtype in (torch.bfloat16, torch.float32):
        for form in (linears, mlp_and_attention, layers, cached, vocabulary, contexts, pipeline):
            torch.backends.cuda.matmul.allow_tf32 = False
            try:
                form(r, c, dtype)
            except Exception:
                r.wrong.append(f"{form.__name__} {dtype}, rank {r.rank}: {traceback.format_exc(limit=-3)}")
            r.empty_cache()
    found = sum(map(len, r.exchange(r.wrong)))
    if r.rank == 0:
        print(f"checks: {found} found wrong", flush=True)


def parallel(r, form, rows, **fields):
    sequence, chunks = form
    return r.parallel(sequence=sequence, chunk_rows=rows // chunks if chunks else 0, **fields)


def name_of(form):
    sequence, chunks = form
    return f"{'sequence' if sequence else 'tensor'} parallel" + (f", {chunks} chunks" if chunks else "")


def op(r, name, **fields):
    """The call's function, once it has run."""
    call = r.ctx.op(name, **fields)
    call()
    return call


def linears(r, c, dtype):
    tokens, k = 64 * r.size, r.ctx.library.constants
    x = numbers(r.device, dtype, tokens, c["hidden"], seed=2)
    w = numbers(r.device, dtype, c["intermediate"], c["hidden"], seed=3, scale=c["hidden"] ** -0.5)
    dout = numbers(r.device, dtype, tokens, c["intermediate"], seed=4)
    one, dx, dw = torch.empty_like(dout), torch.empty_like(x), torch.empty_like(w, dtype=torch.float32)
    op(r, "linear", x=x, weight=w, out=one)
    op(r, "linear_backward", x=x, weight=w, dout=dout, dx=dx, dweight=dw)
    exact, exact_dx, exact_dw = x.double() @ w.double().T, dout.double() @ w.double(), dout.double().T @ x.double()
    rows = lambda t: t.chunk(r.size)[r.rank].contiguous()  # noqa: E731
    columns = lambda t: t.chunk(r.size, 1)[r.rank].contiguous()  # noqa: E731
    for form in FORMS:
        sequence, name = form[0], name_of(form)
        whole = rows if sequence else (lambda t: t)
        # By rows: the output is divided by columns.
        to = parallel(r, form, tokens, partition=k["PARTITION_COLUMN"])
        out, got_dx, got_dw = torch.empty_like(columns(one)), torch.empty_like(whole(dx)), torch.empty_like(rows(dw))
        fields = dict(x=whole(x), weight=rows(w), parallel=to)
        calls = [
            r.ctx.op("linear", out=out, **fields),
            r.ctx.op("linear_backward", dout=columns(dout), dx=got_dx, dweight=got_dw, **fields),
        ]
        check(r, f"linear by rows, {name}", dtype, calls, [
            Output("out", out, columns(one), columns(exact)),
            Output("dx", got_dx, whole(dx), whole(exact_dx), gradient=True, same=not sequence),
            Output("dweight", got_dw, rows(dw), rows(exact_dw), gradient=True),
        ])
        # By columns: the output is a sum.
        to = parallel(r, form, tokens, partition=k["PARTITION_ROW"])
        out, got_dx, got_dw = torch.empty_like(whole(one)), torch.empty_like(columns(dx)), torch.empty_like(columns(dw))
        fields = dict(x=columns(x), weight=columns(w), parallel=to)
        calls = [
            r.ctx.op("linear", out=out, **fields),
            r.ctx.op("linear_backward", dout=whole(dout), dx=got_dx, dweight=got_dw, **fields),
        ]
        check(r, f"linear by columns, {name}", dtype, calls, [
            Output("out", out, whole(one), whole(exact), same=not sequence),
            Output("dx", got_dx, columns(dx), columns(exact_dx), gradient=True),
            Output("dweight", got_dw, columns(dw), columns(exact_dw), gradient=True),
        ])


def mlp_and_attention(r, c, dtype):
    x = numbers(r.device, dtype, r.size, 96, c["hidden"], seed=5)
    weights = make_weights(c, r.device, dtype)
    own, parts = part_of_shape(c, r.size), part_of(c, weights, r.rank, r.size)
    one = torch.empty_like(x)
    exact_of = {name: w.double() for name, w in weights.items()} | {name: torch.ones(c["hidden"], device=r.device).double()
                                                                     for name in ("norm1", "norm2")}
    # The blocks alone have no norm: one of ones is taken out again.
    plain = x.double()
    gate, up = F.linear(plain, exact_of["gate_up"]).chunk(2, -1)
    exact = {"mlp": F.linear(F.silu(gate) * up, exact_of["down"])}
    exact["attention_block"] = unnormed(c, exact_of, plain)
    for name, fields in (("mlp", mlp_fields), ("attention_block", attention_fields)):
        given = lambda shape, w, parallel=None, f=fields, n=name: (  # noqa: E731
            f(r.ctx, w, parallel) if n == "mlp" else f(r.ctx, shape, w, parallel))
        op(r, name, x=x, out=one, **given(c, weights))
        for form in FORMS:
            whole = (lambda t: t.chunk(r.size)[r.rank].contiguous()) if form[0] else (lambda t: t)
            out = torch.empty_like(whole(x))
            call = r.ctx.op(name, x=whole(x), out=out, **given(own, parts, parallel(r, form, r.size * 96)))
            output = Output("out", out, whole(one.clone()), whole(exact[name]), same=not form[0])
            check(r, f"{name}, {name_of(form)}", dtype, [call], [output])


def unnormed(c, weights, x):
    from parallel_layer import angles, rotated

    batch, seq, _ = x.shape
    sizes = [c["heads"] * c["head_dim"]] + [c["kv_heads"] * c["head_dim"]] * 2
    cos, sin = angles(c, torch.arange(seq, device=x.device), x.dtype)
    q, k, v = (t.view(batch, seq, -1, c["head_dim"]).transpose(1, 2) for t in F.linear(x, weights["qkv"]).split(sizes, -1))
    a = defined(rotated(q, cos, sin), rotated(k, cos, sin), v)[0]
    return F.linear(a.transpose(1, 2).reshape(batch, seq, -1), weights["out"])


def layers(r, c, dtype):
    """Both passes of a decoder layer."""
    x, dout = (numbers(r.device, dtype, r.size, 96, c["hidden"], seed=seed) for seed in (5, 6))
    weights = make_weights(c, r.device, dtype)
    exact = {name: w.double().requires_grad_() for name, w in weights.items()}
    exact_x = x.double().requires_grad_()
    exact_out = layer(c, exact, exact_x)
    exact_out.backward(dout.double())
    one = Layer(r.ctx, c, weights, x, dout)
    for call in one.calls:
        call()
    own, parts = part_of_shape(c, r.size), part_of(c, weights, r.rank, r.size)
    of_one = part_of(c, one.gradients, r.rank, r.size)
    of_exact = part_of(c, {name: w.grad for name, w in exact.items()}, r.rank, r.size)
    for form in FORMS:
        sequence = form[0]
        for policy in ("NONE", "FULL"):
            whole = (lambda t: t.chunk(r.size)[r.rank].contiguous()) if sequence else (lambda t: t)
            two = Layer(r.ctx, own, parts, whole(x), whole(dout), parallel(r, form, r.size * 96), policy)
            calls = list(two.calls)
            if sequence:  # of a rank's rows, until they are added up
                calls += [r.ctx.op("all_reduce", comm=r.comm, x=two.gradients[name]) for name in ("norm1", "norm2")]
            outputs = [
                Output("out", two.out, whole(one.out), whole(exact_out.detach()), same=not sequence),
                Output("dx", two.dx, whole(one.dx), whole(exact_x.grad), gradient=True, same=not sequence),
            ]
            outputs += [
                Output(f"d{name}", two.gradients[name], of_one[name], of_exact[name], gradient=True, same="norm" in name)
                for name in weights
            ]
            check(r, f"decoder layer, {name_of(form)}, {policy.lower()}", dtype, calls, outputs)


def cached(r, c, dtype):
    """A step of one token behind others, whose keys and values are in a cache that heads divide."""
    before, layers_of = 40, 2
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    x = numbers(r.device, dtype, before + 1, c["hidden"], seed=7)
    all_weights = [make_weights(c, r.device, dtype, seed=seed) for seed in (1, 2)]

    def steps(c, of_rank, parallel):
        cache, outs = Cache(r.ctx, c, name, layers_of, before + 1), []
        for rows in (x[:before], x[before:]):
            hidden, normed = rows.clone(), torch.empty_like(rows)
            cache.extend(len(rows))
            calls = [call for i, w in enumerate(of_rank) for call in blocks(r.ctx, c, w, hidden, normed, parallel, **cache.of(i))]
            # A call adds to what is there: each begins with the token.
            outs.append((hidden, calls := [lambda h=hidden, rows=rows: h.copy_(rows), *calls]))
            for call in calls:
                call()
        r.synchronize()
        return outs[1], cache

    (one, _), kept = steps(c, all_weights, None)
    parts = [part_of(c, w, r.rank, r.size) for w in all_weights]
    (two, calls), cache = steps(part_of_shape(c, r.size), parts, r.parallel())
    exact = x.double()[None]
    for w in all_weights:
        exact = layer(c, {name: t.double() for name, t in w.items()}, exact)
    check(r, "decoding, tensor parallel", dtype, calls, [Output("out", two, one, exact[0, before:], same=True)])
    kept.close()
    cache.close()


def vocabulary(r, c, dtype):
    tokens, hidden = 64 * r.size, c["hidden"]
    vocab = 1000 * r.size if r.cuda else 40 * r.size
    begin, own = r.rank * vocab // r.size, vocab // r.size
    ids = torch.randint(0, vocab, (tokens,), device=r.device, generator=torch.Generator(r.device).manual_seed(8))
    table = numbers(r.device, dtype, vocab, hidden, seed=9)
    weight = numbers(r.device, dtype, vocab, hidden, seed=10, scale=2 * hidden**-0.5)
    x = numbers(r.device, dtype, tokens, hidden, seed=11)
    rows = lambda t: t[begin : begin + own].contiguous()  # noqa: E731
    f32 = lambda *shape: torch.empty(*shape, device=r.device)  # noqa: E731
    of = dict(vocab_begin=begin, vocab_size=vocab)
    exact_table = torch.zeros_like(table, dtype=torch.float64).index_add_(0, ids, x.double())
    exact_x, exact_w = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = exact_x @ exact_w.T
    exact_losses = F.cross_entropy(logits, ids, reduction="none")
    exact_losses.mean().backward()
    out, dtable = torch.empty_like(x), f32(vocab, hidden)
    op(r, "embedding", table=table, ids=ids, out=out)
    op(r, "embedding_backward", ids=ids, dout=x, dweight=dtable)
    one = dict(loss=f32(1), losses=f32(tokens), lse=f32(tokens), dx=torch.empty_like(x), dweight=f32(vocab, hidden))
    op(r, "linear_cross_entropy", x=x, weight=weight, targets=ids, **one)
    r.synchronize()
    for sequence in (0, 1):
        whole = (lambda t: t.chunk(r.size)[r.rank].contiguous()) if sequence else (lambda t: t)
        to = dict(parallel=r.parallel(sequence=sequence), **of)
        kind = f"{'sequence' if sequence else 'vocabulary'} parallel"
        got, got_dtable = torch.empty_like(whole(out)), f32(own, hidden)
        calls = [
            r.ctx.op("embedding", table=rows(table), ids=ids, out=got, **to),
            r.ctx.op("embedding_backward", ids=ids, dout=whole(x), dweight=got_dtable, **to),
        ]
        check(r, f"embedding, {kind}", dtype, calls, [
            Output("out", got, whole(out), whole(out), same=not sequence, bits=True),
            Output("dweight", got_dtable, rows(dtable), rows(exact_table), gradient=True),
        ])
        two = dict(loss=f32(1), losses=f32(tokens), lse=f32(tokens), dx=torch.empty_like(whole(x)), dweight=f32(own, hidden))
        call = r.ctx.op("linear_cross_entropy", x=whole(x), weight=rows(weight), targets=ids, **two, **to)
        floor = 1e-3 if dtype == torch.bfloat16 else 1e-5  # one number may be exact by chance
        check(r, f"linear_cross_entropy, {kind}", dtype, [call], [
            Output("loss", two["loss"], one["loss"], exact_losses.detach().mean()[None], same=True, floor=floor),
            Output("losses", two["losses"], one["losses"], exact_losses.detach(), same=True),
            Output("lse", two["lse"], one["lse"], logits.detach().logsumexp(-1), same=True),
            Output("dx", two["dx"], whole(one["dx"]), whole(exact_x.grad), gradient=True, same=not sequence),
            Output("dweight", two["dweight"], rows(one["dweight"]), rows(exact_w.grad), gradient=True),
        ])


def held(r, order, length):
    """Tokens of a sequence that this rank has, in its order."""
    library, count = r.ctx.library, ctypes.c_int64()
    params = library.struct(
        "context_parallel_tokens_params", order=library.constants[f"CONTEXT_ORDER_{order}"], rank=r.rank, size=r.size, batch=1,
        length=length,
    )
    library.call("context_parallel_tokens_get", ctypes.byref(params), ctypes.byref(count), None, None, ctypes.c_size_t(0))
    ids = (ctypes.c_int64 * count.value)()
    library.call("context_parallel_tokens_get", ctypes.byref(params), ctypes.byref(count), None, ids, ctypes.c_size_t(count.value))
    return torch.tensor(list(ids), device=r.device)


METHODS = (("ALL_GATHER", "ZIGZAG"), ("ALL_GATHER", "CONTIGUOUS"), ("RING", "ZIGZAG"), ("ULYSSES", "CONTIGUOUS"))


def contexts(r, c, dtype):
    """Both passes of attention over a sequence that ranks divide."""
    seq, heads, kv, d = 128 * r.size if r.cuda else 16 * r.size, c["heads"], c["kv_heads"], c["head_dim"]
    k = r.ctx.library.constants
    q, dout = (numbers(r.device, dtype, 1, seq, heads, d, seed=seed) for seed in (12, 13))
    keys, values = (numbers(r.device, dtype, 1, seq, kv, d, seed=seed) for seed in (14, 15))
    exact = [t.double().requires_grad_() for t in (q, keys, values)]
    exact_out, exact_lse = defined(*(t.transpose(1, 2) for t in exact))
    exact_out = exact_out.transpose(1, 2)
    exact_out.backward(dout.double())
    out, lse = torch.empty_like(q), torch.empty(1, heads, seq, device=r.device)
    gradients = [torch.empty_like(t) for t in (q, keys, values)]
    op(r, "attention", q=q, k=keys, v=values, out=out, lse=lse, causal=1)
    tensors = dict(zip(("dq", "dk", "dv"), gradients))
    op(r, "attention_backward", q=q, k=keys, v=values, out=out, lse=lse, dout=dout, causal=1, deterministic=1, **tensors)
    for method, order in METHODS:
        ids = held(r, order, seq)
        own = lambda t, i=ids: t[:, i].contiguous()  # noqa: E731
        fields = dict(
            method=k[f"CONTEXT_METHOD_{method}"], order=k[f"CONTEXT_ORDER_{order}"], comm=r.comm, causal=1, q=own(q), k=own(keys),
            v=own(values),
        )
        got_out, got_lse = torch.empty_like(own(out)), torch.empty(1, heads, len(ids), device=r.device)
        got = [torch.empty_like(own(t)) for t in gradients]
        calls = [
            r.ctx.op("context_parallel_attention", out=got_out, lse=got_lse, **fields),
            r.ctx.op(
                "context_parallel_attention_backward", out=got_out, lse=got_lse, dout=own(dout), deterministic=1,
                **dict(zip(("dq", "dk", "dv"), got)), **fields,
            ),
        ]
        outputs = [
            Output("out", got_out, own(out), own(exact_out.detach())),
            Output("lse", got_lse, lse[:, :, ids], exact_lse.detach()[:, :, ids]),
        ]
        outputs += [
            Output(name, g, own(one), own(e.grad), gradient=True)
            for name, g, one, e in zip(("dq", "dk", "dv"), got, gradients, exact)
        ]
        check(r, f"context parallel, {method.lower()} {order.lower()}", dtype, calls, outputs)


def pipeline(r, c, dtype):
    """Each rank has a layer, and passes on what it makes; the last one gives it back to the first."""
    hidden, tokens = c["hidden"], 64
    x = numbers(r.device, dtype, tokens, hidden, seed=16)
    all_weights = [numbers(r.device, dtype, hidden, hidden, seed=20 + i, scale=hidden**-0.5) for i in range(r.size)]
    one, exact = x, x.double()
    for w in all_weights:
        given, one = one, torch.empty_like(x)
        op(r, "linear", x=given, weight=w, out=one)
        exact = exact @ w.double().T
    taken, made, final = x.clone(), torch.empty_like(x), torch.empty_like(x)
    linear = r.ctx.op("linear", x=taken, weight=all_weights[r.rank], out=made)
    of = lambda **fields: r.ctx.op("send_receive", comm=r.comm, **fields)  # noqa: E731
    following, previous = (r.rank + 1) % r.size, r.rank - 1
    if r.rank == 0:
        calls = [linear, of(to=following, x=made), of(out=final, **{"from": r.size - 1})]
    else:
        calls = [of(out=taken, **{"from": previous}), linear, of(to=following, x=made)]
    outputs = [Output("out", final, one, exact, bits=True)] if r.rank == 0 else []
    check(r, "pipeline", dtype, calls, outputs)
