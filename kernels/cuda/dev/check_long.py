"""Long contexts and more than 2^31 elements, against f64 on sampled rows: check_long.py DIR; `small`: a few small cases, for a memory checker."""

import json
import math
import sys

import torch

import check
import choose
from driver import Kernel

directory = sys.argv[1]
files = {i["name"]: i["file"] for i in json.load(open(f"{directory}/kernels.json"))}


def kernel(d, s, causal):
    name = choose.kernel("bf16", d, d, s, causal=causal)
    return Kernel(open(f"{directory}/{files[name]}", "rb").read(), name)


def run(s, hq, hk, d, causal):
    make = lambda h: torch.empty(1, s, h, d, device="cuda", dtype=torch.bfloat16).normal_()
    q, k, v = make(hq), make(hk), make(hk)
    o = torch.full_like(q, math.nan)
    lse = torch.full((1, hq, s), math.nan, device="cuda")
    kernel(d, s, causal).prepare(q, k, v, o, lse, causal=causal)()
    torch.cuda.synchronize()
    worst = worst_lse = 0.0
    for row in (0, 1, 127, 128, s // 2, s - 129, s - 1):
        for head in {0, hq // 2, hq - 1}:
            n = row + 1 if causal else s
            kv = head // (hq // hk)
            scores = (k[0, :n, kv].double() @ q[0, row, head].double()) / math.sqrt(d)
            want = torch.softmax(scores, 0) @ v[0, :n, kv].double()
            worst = max(worst, (o[0, row, head].double() - want).abs().max().item() / max(1e-3, want.abs().max().item()))
            worst_lse = max(worst_lse, abs(lse[0, head, row].item() - torch.logsumexp(scores, 0).item()))
    good = worst < 2e-2 and worst_lse < 1e-3 and not torch.isnan(lse).any().item() and not torch.isnan(o[0, :, -1]).any().item()
    print(f"s{s} h{hq}/{hk} d{d} causal {causal}: relative error {worst:.1e}, lse {worst_lse:.1e}", "right" if good else "WRONG", flush=True)
    return good


if len(sys.argv) > 2:
    for d in (64, 128, 256):
        for causal in (False, True):
            how = {"causal": True} if causal else {}
            for sq, sk in ((1, 1), (129, 200), (300, 77)):
                print(check.run_dense(kernel(d, sq, causal), b=2, sq=sq, sk=sk, hq=4, hk=2, d=d, dv=d, dtype=torch.bfloat16, how=how))
else:
    results = [run(65536, 4, 2, 128, True), run(131072, 2, 2, 128, False), run(131072, 2, 1, 64, True),
               run(131072, 2, 2, 256, True), run(131072, 132, 1, 128, True)]
    sys.exit(0 if all(results) else 1)
