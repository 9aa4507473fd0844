"""Long contexts and more than 2^31 elements, against f64 on sampled rows: check_long.py DIR."""

import json
import math
import sys

import torch

import choose
from driver import Kernel

# Tokens, query heads, key heads, head dim, causal; the last one has 2.2e9 elements of Q, and of O.
CASES = [(65536, 4, 2, 128, True), (131072, 2, 2, 128, False), (131072, 2, 1, 64, True), (131072, 2, 2, 256, True),
         (131072, 132, 1, 128, True)]


def run(directory, s, hq, hk, d, causal):
    files = {i["name"]: i["file"] for i in json.load(open(f"{directory}/kernels.json"))}
    name = choose.kernel("bf16", d, d, s, causal=causal)
    kernel = Kernel(f"{directory}/{files[name]}", name)
    make = lambda h: torch.empty(1, s, h, d, device="cuda", dtype=torch.bfloat16).normal_()
    q, k, v = make(hq), make(hk), make(hk)
    o = torch.full_like(q, math.nan)
    lse = torch.full((1, hq, s), math.nan, device="cuda")
    kernel.prepare(q, k, v, o, lse, causal=causal)()
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
    whole = not torch.isnan(lse).any().item() and not torch.isnan(o[0, :, -1]).any().item()
    good = worst < 2e-2 and worst_lse < 1e-3 and whole
    text = f"{s} tokens, {hq} heads on {hk} of {d}, {'causal' if causal else 'full'}: error {worst:.1e} of the largest, lse {worst_lse:.1e}"
    return good, text


if __name__ == "__main__":
    all_good = True
    for case in CASES:
        good, text = run(sys.argv[1], *case)
        print(text, "right" if good else "WRONG", flush=True)
        all_good &= good
    sys.exit(0 if all_good else 1)
