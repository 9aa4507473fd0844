"""Proves decoding attention on a GPU through the library, and writes down what came of it:

    prove_decode.py RECORD.json DELAYED [REPEATS]

The library is the one that the Python module finds; DELAYED is the same one built with UNSLOTH_JITTER, in which warps wait for random
times wherever they synchronise. Each problem is run REPEATS times with DELAYED, and half as often with the library as shipped: on memory
that is NaN before each call, replayed as a graph. Every output must have the first one's bits, and that be right. bf16, without pages and
with them (behind each sequence's keys the last page is NaN), on sequences of one length and of many, with few heads and many, windows and
sinks. Where the portable kernels are what the library takes, the problem's name says so.
"""

import json
import math
import os
import sys
import time

import torch

import bench
from launcher import guarded
from prove_gradients import DTYPE, HOPPER, NAN, Workspace, randn, unsloth

PAGE = 16
RAGGED = [1, 15, 16, 17, 63, 64, 65, 128, 129, 333, 1000, 2047, 4096, 5000]
# Lengths; queries of a sequence, heads and key heads; more arguments.
PROBLEMS = {
    "ragged": (RAGGED, 1, 16, 4, {}),
    "ragged, 3 queries": (RAGGED, 3, 16, 4, {"causal": 1}),
    "ragged, window": (RAGGED, 1, 16, 4, {"window_left": 100, "causal": 1}),
    "ragged, sinks": (RAGGED, 1, 16, 4, {"sinks": 16}),
    "ragged, softcap": (RAGGED, 1, 16, 4, {"softcap": 20.0}),
    "one of 20,000": ([20000], 1, 16, 1, {}),
    "one of 20,000, 16 rows": ([20000], 2, 32, 4, {"causal": 1}),
    "300 of 100": ([100] * 300, 1, 8, 8, {}),
    "7 of 3,001": ([3001] * 7, 1, 8, 8, {}),
}


class Problem:
    """Inputs, the output between guards, and the call."""

    def __init__(self, ctx, dim, lengths, queries, heads, kv_heads, more, paged):
        self.lengths, self.more = lengths, dict(more)
        self.q = randn(len(lengths), queries, heads, dim)
        if paged:
            pages = [-(-n // PAGE) for n in lengths]
            order = torch.randperm(sum(pages), device="cuda").to(torch.int32)
            self.tables = order.split(pages)
            table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cuda")
            k, v = (randn(sum(pages), PAGE, kv_heads, dim) for _ in range(2))
            for row, of, n in zip(table, self.tables, lengths):
                row[: len(of)] = of
                for x in (k, v):
                    x[of[-1].item(), (n - 1) % PAGE + 1 :] = NAN
            self.k, self.v = ([x[of.long()].flatten(0, 1)[:n] for of, n in zip(self.tables, lengths)] for x in (k, v))
            fields = dict(block_table=table)
        else:
            k, v = (randn(len(lengths), max(lengths), kv_heads, dim) for _ in range(2))
            for i, n in enumerate(lengths):
                k[i, n:] = v[i, n:] = NAN
            self.k, self.v = ([x[i, :n] for i, n in enumerate(lengths)] for x in (k, v))
            fields = {}
        if paged or len(set(lengths)) > 1:
            fields |= dict(seq_lens_k=torch.tensor(lengths, dtype=torch.int32, device="cuda"), max_seqlen_k=max(lengths))
        if "sinks" in self.more:
            self.more["sinks"] = torch.randn(heads, device="cuda")
        self.out, self.guard = guarded(*self.q.shape, dtype=DTYPE)
        self.call = ctx.op("attention", q=self.q, k=k, v=v, out=self.out, **fields, **self.more)
        self.served = ctx.implementation("attention", self.call.params) == HOPPER

    def poison(self):
        for x in (self.out, *(w.memory for w in self.call.kept)):
            x.fill_(NAN)

    def wrong(self):
        found = [] if self.guard() else ["a guard is overwritten"]
        for i, n in enumerate(self.lengths):
            plain, exact = (self.exact(i, n, dtype) for dtype in (DTYPE, torch.float64))
            error = (self.out[i].double() - exact).abs().max().item()
            allowed = 3 * (plain.double() - exact).abs().max().item() + exact.abs().max().item() * 2**-8
            if not error <= allowed:
                found.append(f"sequence of {n}: {error:.2e} of {allowed:.2e}")
        return found

    def exact(self, i, n, dtype):
        q, k, v = (x.to(dtype).transpose(0, 1) for x in (self.q[i], self.k[i], self.v[i]))
        group, queries = q.shape[0] // k.shape[0], q.shape[1]
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        cap = self.more.get("softcap")
        s = torch.tanh(s / cap) * cap if cap else s
        row, column = torch.arange(queries, device="cuda")[:, None] + n - queries, torch.arange(n, device="cuda")
        left = self.more.get("window_left", n + 1)
        if self.more.get("causal"):
            s = s.masked_fill((column > row) | (column <= row - left), -math.inf)
        if "sinks" in self.more:
            s = torch.cat([s, self.more["sinks"].to(dtype)[:, None, None].expand(-1, queries, 1)], -1)
        weights = torch.softmax(s, -1).nan_to_num(0)[..., :n]
        return (weights @ v).transpose(0, 1)


def repeat(problem, count):
    """Replays a graph of: poison, call, comparison with the first result."""
    problem.poison()
    problem.call()
    torch.cuda.synchronize()
    wrong = problem.wrong()
    first = problem.out.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.poison()
        problem.call()
        different += (problem.out != first).any()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    bits = different.item()
    return not bits and not wrong and not problem.wrong(), f"{count} calls, {bits} differ; {'; '.join(wrong) or 'right'}"


def main(record, delayed, count="2000"):
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    shipped = unsloth.Library()
    slow = unsloth.Library(delayed)
    assert "random delays" in slow.build_info and "random delays" not in shipped.build_info
    result = {"date": time.strftime("%Y-%m-%d"), "command": "python3 kernels/dev/hopper/prove_decode.py", "device": bench.gpu_state(),
              "library": shipped.build_info, "commit": os.environ.get("UNSLOTH_COMMIT", ""), "torch": torch.__version__,
              "cuda": torch.version.cuda, "method": __doc__}
    failures = 0
    for part, library, calls in (("delays", slow, int(count)), ("repeats", shipped, int(count) // 2)):
        ctx = unsloth.Context("cuda", library=library, allocate=Workspace)
        result[part] = {}
        for dim in (64, 128, 256):
            for name, given in PROBLEMS.items():
                for paged in (False, True):
                    problem = Problem(ctx, dim, *given, paged)
                    label = f"hd{dim} {name}" + ", paged" * paged + (", portable" if not problem.served else "")
                    good, text = repeat(problem, calls)
                    failures += not good
                    result[part][label] = text if good else "WRONG: " + text
                    print(part, label, result[part][label], flush=True)
                    json.dump(result, open(record, "w"), indent=1)
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
