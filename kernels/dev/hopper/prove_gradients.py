"""Proves attention's gradients on a GPU through the library, and writes down what came of it:

    prove_gradients.py RECORD.json DELAYED [REPEATS]

The library is the one that the Python module finds; DELAYED is the same one built with UNSLOTH_JITTER, in which warps wait for random
times wherever they synchronise. All on Hopper's kernels, bf16:

delays   DELAYED repeats a call on memory that is NaN before each one, replayed as a graph, on batches of one length and packed ones. Every
         gradient must have the first one's bits, and that be right; dq, where it is summed in no order, be within a rounding of it.
repeats  The same as shipped, half as often, on a longer sequence, and on many, whose heads come in runs of either direction.
edges    Lengths around the tiles' edges, no keys, no queries, one token, tokens of no sequence (NaN), guards around gradients.
zeros    Equal keys: rows of ds sum to zero, so dq is zero.
long     65,536 tokens, against f64 on sampled rows.

PARTS names the parts to run, DIMS the head dims (256, or 192/128 where values have others); all of them unless said.
"""

import json
import math
import os
import sys
import time

import torch

import bench
import reference
from launcher import guarded

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
sys.path += [os.path.join(ROOT, "python"), os.path.join(ROOT, "compare")]
import unsloth

HOPPER = 3
NAN = math.nan
DTYPE = torch.bfloat16
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
if "DIMS" in os.environ:
    DIMS = [tuple(map(int, (dims.split("/") * 2)[:2])) for dims in os.environ["DIMS"].split()]
MASKS = {"full": {}, "causal": {"causal": 1}, "window": {"window_left": 100, "causal": 1}, "wide window": {"window_left": 1700, "causal": 1},
         "softcap": {"softcap": 5.0}}
NAMES = ("dq", "dk", "dv")
# Tokens before the first packed sequence, more than a block of them.
LEAD = 150
# A bound of packed lengths that lets wide heads have the kernel for many keys, whatever the lengths are.
MANY_KEYS = 3072


class Workspace:
    """Memory that is NaN when a call gets it."""

    def __init__(self, size):
        self.memory = torch.full((-(-size // 4),), NAN, device="cuda")
        self.address = self.memory.data_ptr()


def randn(*shape):
    return torch.randn(*shape, device="cuda").to(DTYPE)


def exact(q, k, v, dout, how, dtype=torch.float64):
    """dq, dk and dv of [batch, seq, heads, dim]; every intermediate is rounded to `dtype`."""
    group = q.shape[2] // k.shape[2]
    q, k, v, dout = (x.to(dtype).transpose(1, 2) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale, cap = 1 / math.sqrt(q.shape[-1]), how.get("softcap", 0)
    s = (q * scale) @ k.transpose(-1, -2)
    slope = 1
    if cap:
        s = torch.tanh(s / cap)
        slope, s = 1 - s * s, s * cap
    left = how.get("window_left", 0) - 1
    seen = reference.visible(q.shape[2], k.shape[2], bool(how.get("causal")), (left, -1), q.device)
    s = s.masked_fill(~seen, -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0)
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    ds = p * (dout @ v.transpose(-1, -2) - delta) * slope
    of_group = lambda x: x.unflatten(1, (-1, group)).sum(2)
    found = ds @ k * scale, of_group(ds.transpose(-1, -2) @ q * scale), of_group(p.transpose(-1, -2) @ dout)
    return [x.transpose(1, 2) for x in found]


def errors(got, q, k, v, dout, how):
    """What is wrong with gradients. Allowed are three times the error of a plain 16-bit implementation, a rounding, and what f32 leaves where
    all terms cancel, as with a single key."""
    wanted = exact(q, k, v, dout, how)
    plain = exact(q, k, v, dout, how, q.dtype)
    wrong = []
    for name, x, want, rough in zip(NAMES, got, wanted, plain):
        if not x.numel():
            continue
        error = (x.double() - want).abs().max().item()
        allowed = 3 * (rough.double() - want).abs().max().item() + want.abs().max().item() * 2**-8 + 1e-5
        if not error <= allowed:
            wrong.append(f"{name} {error:.2e} of {allowed:.2e}")
    return wrong


class Problem:
    """Inputs, gradients between guards, and the call. Tokens before and behind packed sequences are NaN."""

    def __init__(self, ctx, dims, heads, lengths_q, lengths_k, how, deterministic, packed=True, equal_keys=False):
        dim, dim_v = dims
        self.how, self.packed, self.deterministic = how, packed, deterministic
        heads_q, heads_kv = heads
        self.lengths = list(zip(lengths_q, lengths_k))
        before, behind = (LEAD, 70) if packed else (0, 0)
        starts = lambda lengths: [before + sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.starts = starts(lengths_q), starts(lengths_k)

        def rows(lengths, *sizes):
            x = randn(before + sum(lengths) + behind, *sizes)
            x[:before] = x[before + sum(lengths) :] = NAN
            return x if packed else x.unflatten(0, (len(lengths), lengths[0]))

        self.q, self.dout = rows(lengths_q, heads_q, dim), rows(lengths_q, heads_q, dim_v)
        self.k, self.v = rows(lengths_k, heads_kv, dim), rows(lengths_k, heads_kv, dim_v)
        if equal_keys:
            self.k[:] = randn(*self.k.shape[-2:])
        out = torch.zeros_like(self.dout)
        shape = (heads_q, out.shape[0]) if packed else (len(lengths_q), heads_q, lengths_q[0])
        lse = torch.zeros(shape, device="cuda")
        fields = dict(q=self.q, k=self.k, v=self.v, **how)
        if packed:
            for name, x in zip("qk", self.starts):
                fields[f"cu_seqlens_{name}"] = torch.tensor(x, dtype=torch.int32, device="cuda")
            fields |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(*lengths_k, MANY_KEYS if dim > 128 else 0)}
        ctx.op("attention", **fields, out=out, lse=lse)()
        made = [guarded(*x.shape, dtype=DTYPE) for x in (self.q, self.k, self.v)]
        self.gradients, self.guards = zip(*made)
        self.call = ctx.op("attention_backward", **fields, out=out, lse=lse, dout=self.dout, deterministic=int(deterministic),
                           **dict(zip(NAMES, self.gradients)))
        self.out, self.lse = out, lse
        assert ctx.implementation("attention_backward", self.call.params) == HOPPER, f"{dims} {how} is not Hopper's"

    def whole(self):
        """Gradients of tokens that belong to a sequence."""
        if not self.packed:
            return list(self.gradients)
        return [x[LEAD : of[-1]] for x, of in zip(self.gradients, (self.starts[0], self.starts[1], self.starts[1]))]

    def poison(self):
        for x in (*self.gradients, *(w.memory for w in self.call.kept)):
            x.fill_(NAN)

    def wrong(self):
        """What is wrong with the gradients that are there."""
        found = [] if all(guard() for guard in self.guards) else ["a guard is overwritten"]
        if not self.packed:
            return found + errors(self.gradients, self.q, self.k, self.v, self.dout, self.how)
        for x, of in zip(self.gradients, (self.starts[0], self.starts[1], self.starts[1])):
            if not (torch.isnan(x[of[-1] :]).all() and torch.isnan(x[:LEAD]).all()):
                found.append("tokens of no sequence are written")
        for i, lengths in enumerate(self.lengths):
            a, b = (slice(of[i], of[i + 1]) for of in self.starts)
            parts = [x[of][None] for x, of in zip((*self.gradients, self.q, self.k, self.v, self.dout), (a, b, b, a, b, b, a))]
            if 0 in lengths:
                if any(x.numel() and x.abs().max() != 0 for x in parts[:3]):
                    found.append(f"{lengths}: not zero")
                continue
            found += [f"{lengths}: {text}" for text in errors(parts[:3], *parts[3:], self.how)]
        return found


def repeat(problem, count):
    """Replays a graph of: poison, call, comparison with the first result."""
    problem.poison()
    problem.call()
    torch.cuda.synchronize()
    wrong = problem.wrong()
    first = [x.clone() for x in problem.whole()]
    different = torch.zeros(3, dtype=torch.int64, device="cuda")
    farthest = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.poison()
        problem.call()
        different += torch.stack([(x != y).any() for x, y in zip(problem.whole(), first)])
        torch.maximum(farthest, (problem.whole()[0].float() - first[0].float()).abs().max(), out=farthest)
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    # A softcap's dq is of the same bits without asking.
    sums = not problem.deterministic and "softcap" not in problem.how
    apart = farthest.item() / first[0].float().abs().max().item()
    bits = different.tolist()
    if sums:
        bits, about = bits[1:], f", dq within {apart:.1e} of its largest"
        good = not any(bits) and apart <= 2**-7
    else:
        good, about = not any(bits), ""
    good = good and not wrong and not problem.wrong()
    return good, f"{count} calls, {sum(bits)} differ{about}; {'; '.join(wrong) or 'right'}"


def delays(ctx, count):
    for dims in DIMS:
        for mask, how in MASKS.items():
            for deterministic in (False, True):
                if deterministic and mask == "softcap":
                    continue
                for packed in (False, True):
                    if packed:
                        lengths = [1 + i * 211 % 700 for i in range(9)]
                        problem = Problem(ctx, dims, (6, 2), lengths, [n + 77 for n in lengths], how, deterministic)
                    else:
                        # Wide heads have the kernel for many keys where queries see as many.
                        keys = MANY_KEYS if dims[0] > 128 else 500
                        problem = Problem(ctx, dims, (20, 20), [500, 500], [keys, keys], how, deterministic, packed=False)
                    kind = ("packed" if packed else "batched") + (", deterministic" if deterministic else "")
                    yield f"hd{dims[0]}/{dims[1]} {mask}, {kind}", *repeat(problem, count)


def repeats(ctx, count):
    for dims in DIMS:
        for deterministic in (False, True):
            for heads, lengths in (((8, 4), [3000]), ((10, 5), [2000] * 7)):
                problem = Problem(ctx, dims, heads, lengths, lengths, MASKS["causal"], deterministic, packed=False)
                name = f"hd{dims[0]}/{dims[1]} causal, {heads[0]} heads on {heads[1]}, {len(lengths)} of {lengths[0]} tokens"
                yield name + ", deterministic" * deterministic, *repeat(problem, count)


def edges(ctx):
    lengths = [(1, 1), (1, 200), (200, 1), (63, 65), (64, 64), (65, 63), (64, 128), (127, 129), (128, 127), (129, 128), (191, 193), (192, 192),
               (193, 320), (256, 255), (257, 257), (320, 100), (391, 517)]
    # Packed, wide heads have the kernel for many keys at all of these lengths.
    ragged = [tuple(zip(*lengths)), ([1, 0, 300, 64, 129, 700], [5, 17, 300, 1000, 129, 701]), ([5, 130, 0, 1], [0, 64, 3, 1])]
    for dims in DIMS:
        for mask, how in MASKS.items():
            wrong, count = [], 0
            for deterministic in (False, True):
                made = [([q] * 2, [k] * 2, False) for q, k in lengths] + [(q, k, True) for q, k in ragged]
                for lengths_q, lengths_k, packed in made:
                    problem = Problem(ctx, dims, (4, 2), lengths_q, lengths_k, how, deterministic, packed)
                    problem.poison()
                    problem.call()
                    torch.cuda.synchronize()
                    wrong += [f"{lengths_q} on {lengths_k}: {text}" for text in problem.wrong()]
                    count += 1
            yield f"hd{dims[0]}/{dims[1]} {mask}", not wrong, f"{count} problems; {'; '.join(wrong[:4]) or 'all right'}"


def zeros(ctx):
    """Of equal keys, dq is scale * (sum of a row of ds) * key: nothing but roundings of ds, and of sums of as many numbers as there are
    keys, beside what single terms are."""
    tokens = 1300
    for dims in DIMS:
        problem = Problem(ctx, dims, (4, 4), [tokens], [tokens], {}, False, packed=False, equal_keys=True)
        problem.call()
        torch.cuda.synchronize()
        q, k, v, dout = (x.double().transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout))
        # All weights are 1 / tokens.
        terms = (dout @ (v - v.mean(2, keepdim=True)).transpose(-1, -2)).abs().mean(-1, keepdim=True)
        term = terms * k.abs().amax(-1, keepdim=True)[:, :, :1] / math.sqrt(dims[0])
        worst = (problem.gradients[0].double().transpose(1, 2).abs() / term).max().item()
        yield f"hd{dims[0]}/{dims[1]}", worst <= 2**-7, f"dq is {worst:.1e} of the sum of its terms' magnitudes"


def long(ctx):
    tokens, heads = 65536, (2, 1)
    for dims in DIMS:
        for mask in ("full", "causal"):
            for deterministic in (False, True):
                problem = Problem(ctx, dims, heads, [tokens], [tokens], MASKS[mask], deterministic, packed=False)
                problem.poison()
                problem.call()
                torch.cuda.synchronize()
                worst = sampled(problem, mask == "causal")
                lost = any(torch.isnan(x).any().item() for x in problem.gradients)
                name = f"hd{dims[0]}/{dims[1]} {mask}" + ", deterministic" * deterministic
                yield name, worst < 2e-2 and not lost, f"error {worst:.1e} of the largest" + ", NaN" * lost
                del problem
                torch.cuda.empty_cache()


def sampled(problem, causal):
    """The greatest error of some rows of every gradient, as a part of what is largest in the row."""
    q, k, v, dout, out = (x[0].double().transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout, problem.out))
    lse, scale, tokens = problem.lse[0].double(), 1 / math.sqrt(q.shape[-1]), q.shape[1]
    delta = (dout * out).sum(-1)
    dq, dk, dv = (x[0].double() for x in problem.gradients)
    rows = torch.tensor([0, 1, 63, 64, 127, 128, tokens // 2, tokens - 129, tokens - 1], device="cuda")
    at = torch.arange(tokens, device="cuda")
    worst = 0.0

    def note(got, want):
        nonlocal worst
        error = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-3)
        worst = max(worst, error.max().item())

    want_dk, want_dv = 0, 0
    for h in range(q.shape[0]):
        p = torch.exp(q[h, rows] @ k[0].T * scale - lse[h, rows, None])
        p = p * (at[None] <= rows[:, None]) if causal else p
        ds = p * (dout[h, rows] @ v[0].T - delta[h, rows, None])
        note(dq[rows, h], ds @ k[0] * scale)
        p = torch.exp(q[h] @ k[0, rows].T * scale - lse[h, :, None])
        p = p * (rows[None] <= at[:, None]) if causal else p
        ds = p * (dout[h] @ v[0, rows].T - delta[h, :, None])
        want_dk, want_dv = want_dk + ds.T @ q[h] * scale, want_dv + p.T @ dout[h]
    note(dk[rows, 0], want_dk)
    note(dv[rows, 0], want_dv)
    return worst


def main(record, delayed, count="2000"):
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    count = int(count)
    shipped = unsloth.Library()
    slow = unsloth.Library(delayed)
    assert "random delays" in slow.build_info and "random delays" not in shipped.build_info
    ctx, slow_ctx = (unsloth.Context("cuda", library=x, allocate=Workspace) for x in (shipped, slow))
    result = {"date": time.strftime("%Y-%m-%d"), "command": "python3 kernels/dev/hopper/prove_gradients.py", "device": bench.gpu_state(),
              "library": shipped.build_info, "commit": os.environ.get("UNSLOTH_COMMIT", ""), "torch": torch.__version__,
              "cuda": torch.version.cuda, "method": __doc__}
    failures = 0
    parts = {"zeros": zeros(ctx), "edges": edges(ctx), "long": long(ctx), "repeats": repeats(ctx, count // 2),
             "delays": delays(slow_ctx, count)}
    for part in os.environ.get("PARTS", " ".join(parts)).split():
        found, result[part] = parts[part], {}
        for name, good, text in found:
            failures += not good
            result[part][name] = text if good else "WRONG: " + text
            print(part, name, result[part][name], flush=True)
            json.dump(result, open(record, "w"), indent=1)
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
