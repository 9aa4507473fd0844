"""Checks kernels against an f64 reference by the FlashAttention rule.

Usage: check.py DIR [filter]: DIR holds the cubins and kernels.json, which lists
{"name", "file", "dtype", "head_dim", "head_dim_v", "mask", "softcap"}.
"""

import json
import math
import os
import sys
import traceback

import torch

import reference
from driver import Kernel
from launcher import guarded

NAN = float("nan")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def compare(what, o, lse, q, k, v, **how):
    """The flash rule: at most twice the error of a plain 16-bit implementation, plus rounding."""
    exact, exact_lse = reference.attention(q, k, v, **how)
    plain, _ = reference.attention(q, k, v, dtype=q.dtype, **how)
    error = (o.double() - exact).abs().max().item() if o.numel() else 0.0
    plain_error = (plain.double() - exact).abs().max().item() if o.numel() else 0.0
    rounding = exact.abs().max().item() * 2.0 ** (-8 if q.dtype == torch.bfloat16 else -11) if o.numel() else 0
    empty = exact_lse == -math.inf
    finite = (lse.double() - exact_lse)[~empty]
    lse_error = finite.abs().max().item() if finite.numel() else 0.0
    good = (error <= 2 * plain_error + rounding and lse_error <= 1e-3
            and bool((lse[empty] == -math.inf).all())
            and not bool(torch.isnan(o).any()) and not bool(torch.isnan(lse).any()))
    return good, f"{what}: error {error:.2e} (plain {plain_error:.2e}), lse {lse_error:.1e}"


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def lengths(block_m, block_n):
    for sq in (1, 63, 64, 65, block_m - 1, block_m, block_m + 1, 3 * block_m + 7):
        for sk in (1, block_n - 1, block_n, block_n + 1, 2 * block_n, 3 * block_n + 5):
            yield sq, sk


def dense_cases(kernel, info):
    at = kernel.launch
    bm, bn = at.block_m, at.block_n
    d, dv, dtype = info["head_dim"], info["head_dim_v"], DTYPES[info["dtype"]]
    mask = info["mask"]
    hows = {"kNone": [{}], "kCausal": [{"causal": True}],
            "kWindow": [{"window": (37, 11)}, {"window": (200, -1), "causal": True}, {"window": (0, 0)},
                        {"window": (-1, 64)}, {}, {"causal": True}]}[mask]
    if info.get("softcap"):
        hows = [dict(how, softcap=5.0) for how in hows]
    for how in hows:
        for sq, sk in lengths(bm, bn):
            yield dict(b=2, sq=sq, sk=sk, hq=2, hk=1, d=d, dv=dv, dtype=dtype, how=how)
        yield dict(b=3, sq=1000, sk=1000, hq=8, hk=8, d=d, dv=dv, dtype=dtype, how=how)
        yield dict(b=1, sq=2048, sk=2048, hq=40, hk=40, d=d, dv=dv, dtype=dtype, how=how)
        yield dict(b=1, sq=333, sk=777, hq=8, hk=2, d=d, dv=dv, dtype=dtype, how=how, pack=4)
        yield dict(b=2, sq=1, sk=777, hq=16, hk=2, d=d, dv=dv, dtype=dtype, how=how, pack=8)
        yield dict(b=2, sq=300, sk=500, hq=4, hk=2, d=d - 8, dv=dv - 8, dtype=dtype, how=how)
        yield dict(b=2, sq=300, sk=500, hq=4, hk=2, d=d, dv=dv, dtype=dtype, how=how, sinks=True)
        yield dict(b=2, sq=300, sk=500, hq=4, hk=4, d=d, dv=dv, dtype=dtype, how=how, scale=4.0)


def run_dense(kernel, b, sq, sk, hq, hk, d, dv, dtype, how, pack=1, sinks=False, scale=None):
    q, k, v = randn(b, sq, hq, d, dtype=dtype), randn(b, sk, hk, d, dtype=dtype), randn(b, sk, hk, dv, dtype=dtype)
    o, intact = guarded(b, sq, hq, dv, dtype=dtype)
    lse, lse_intact = guarded(b, hq, sq, dtype=torch.float32)
    s = torch.randn(hq, device="cuda") if sinks else None
    kernel.prepare(q, k, v, o, lse, pack=pack, sinks=s, scale=scale, **how)()
    torch.cuda.synchronize()
    good, text = compare(f"b{b} q{sq} k{sk} h{hq}/{hk} d{d}/{dv} pack{pack} {how} sinks={sinks} scale={scale}",
                         o, lse, q, k, v, sinks=s, scale=scale, **how)
    return good and intact() and lse_intact(), text + f" guards {intact()} {lse_intact()}"


def ragged_problem(info, lengths_q, lengths_k, hq, hk, page=None):
    """Variable lengths, K and V packed or paged; what lies between and behind is NaN. Returns q, packed K and V, K and V as the
    kernel gets them, where sequences start in both, and what else the kernel is told."""
    d, dv, dtype = info["head_dim"], info["head_dim_v"], DTYPES[info["dtype"]]
    batch = len(lengths_q)
    offsets = lambda n: torch.tensor([0] + list(torch.tensor(n).cumsum(0)), dtype=torch.int32, device="cuda")
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    q = randn(sum(lengths_q), hq, d, dtype=dtype)
    k, v = randn(sum(lengths_k), hk, d, dtype=dtype), randn(sum(lengths_k), hk, dv, dtype=dtype)
    extra = dict(cu_seqlens_q=cu_q, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
    if page is None:
        kk, vv = k, v
        extra["cu_seqlens_k"] = cu_k
    else:
        need = [-(-n // page) for n in lengths_k]
        order = torch.randperm(sum(need) + 3)
        table = torch.full((batch, max(need) + 1), 1 << 28, dtype=torch.int32)
        kk = torch.full((sum(need) + 3, page, hk, d), NAN, device="cuda", dtype=dtype)
        vv = torch.full((sum(need) + 3, page, hk, dv), NAN, device="cuda", dtype=dtype)
        at = 0
        for i, n in enumerate(lengths_k):
            for j in range(need[i]):
                where = int(order[at]); at += 1
                table[i, j] = where
                rows = min(page, n - j * page)
                start = int(cu_k[i]) + j * page
                kk[where, :rows] = k[start:start + rows]
                vv[where, :rows] = v[start:start + rows]
        extra["block_table"] = table.cuda()
        extra["seqlens_k"] = torch.tensor(lengths_k, dtype=torch.int32, device="cuda")
    return q, k, v, kk, vv, cu_q, cu_k, extra


def run_ragged(kernel, info, lengths_q, lengths_k, hq, hk, how, pack=1, page=None):
    dtype = DTYPES[info["dtype"]]
    q, k, v, kk, vv, cu_q, cu_k, extra = ragged_problem(info, lengths_q, lengths_k, hq, hk, page)
    o, intact = guarded(sum(lengths_q), hq, info["head_dim_v"], dtype=dtype)
    lse, lse_intact = guarded(hq, sum(lengths_q), dtype=torch.float32)
    kernel.prepare(q, kk, vv, o, lse, pack=pack, **extra, **how)()
    torch.cuda.synchronize()
    good, texts = True, []
    for i in range(len(lengths_q)):
        a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        ok, text = compare(f"ragged pack{pack} page{page} {how} q{lengths_q[i]} k{lengths_k[i]}", o[a][None],
                           lse[:, a][None], q[a][None], k[b][None], v[b][None], **how)
        good &= ok
        if not ok:
            texts.append(text)
    return good and intact() and lse_intact(), f"ragged page{page} pack{pack} {how} guards {intact()} {lse_intact()} " + "; ".join(texts)


def run_structured(kernel, info):
    """Inputs whose results are known exactly: they show which row or column goes astray."""
    d, dv, dtype = info["head_dim"], info["head_dim_v"], DTYPES[info["dtype"]]
    if info["mask"] != "kNone" or info.get("softcap"):
        return True, "structured: not for this mask"
    s, h = 512, 2
    at = torch.arange(s, device="cuda")
    lse = torch.full((1, h, s), NAN, device="cuda")
    out = []
    # K = 0: uniform weights, so O is the mean of V's rows.
    q = randn(1, s, h, d, dtype=dtype)
    v = (torch.arange(dv, device="cuda") % 64).to(dtype).expand(1, s, h, dv).contiguous()
    o = torch.full((1, s, h, dv), NAN, device="cuda", dtype=dtype)
    kernel.prepare(q, torch.zeros_like(q), v, o, lse)()
    out.append(("column ids", torch.equal(o, v)))
    # Keys one-hot with a large scale: query i selects row i % d of V.
    eye = torch.zeros(1, s, h, d, device="cuda", dtype=dtype)
    eye[0, at, :, at % d] = 1
    one = torch.zeros_like(eye); one[0, at[:d], :, at[:d] % d] = 1
    v = (at % 256).to(dtype)[None, :, None, None].expand(1, s, h, dv).contiguous()
    kernel.prepare(eye, one, v, o, lse, scale=200.0)()
    want = ((at % d) % 256).to(dtype)[None, :, None, None].expand(1, s, h, dv)
    torch.cuda.synchronize()
    out.append(("row selection", torch.equal(o, want)))
    return all(good for _, good in out), f"structured: {out}"


def run_repeats(kernel, info, count, form="batched"):
    """The same launch again and again, on more tiles than there are multiprocessors: every bit of every result is the first one's,
    which is right. form: batched, packed or paged."""
    d, dv, dtype = info["head_dim"], info["head_dim_v"], DTYPES[info["dtype"]]
    how = {"causal": True} if info["mask"] == "kCausal" else {}
    if info.get("softcap"):
        how["softcap"] = 5.0
    if form == "batched":
        q, k, v = (randn(2, 800, 20, n, dtype=dtype) for n in (d, d, dv))
        o = torch.full((2, 800, 20, dv), NAN, device="cuda", dtype=dtype)
        lse = torch.full((2, 20, 800), NAN, device="cuda")
        launch = kernel.prepare(q, k, v, o, lse, longest_first=True, **how)
        launch()
        good, text = compare("repeated", o, lse, q, k, v, **how)
    else:
        lengths = [1 + i * 211 % 900 for i in range(9)]
        page = 16 if form == "paged" else None
        q, k, v, kk, vv, cu_q, cu_k, extra = ragged_problem(info, lengths, [n + 77 for n in lengths], 12, 4, page)
        o = torch.full((sum(lengths), 12, dv), NAN, device="cuda", dtype=dtype)
        lse = torch.full((12, sum(lengths)), NAN, device="cuda")
        launch = kernel.prepare(q, kk, vv, o, lse, **extra, **how)
        launch()
        good, text = True, ""
        for i in range(len(lengths)):
            a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
            ok, text = compare("repeated", o[a][None], lse[:, a][None], q[a][None], k[b][None], v[b][None], **how)
            good &= ok
    first, first_lse = o.clone(), lse.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        o.fill_(NAN)
        launch()
        different += ((o != first).any() | (lse != first_lse).any())
    return good and different.item() == 0, f"{count} repeats, {different.item()} differ, the first is {'right' if good else 'wrong'}"


def main(directory, only="", repeats="50"):
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    failures = total = 0
    for info in json.load(open(os.path.join(directory, "kernels.json"))):
        if not any(o in info["name"] for o in only.split(",")):
            continue
        bad = count = 0
        kernel = Kernel(os.path.join(directory, info["file"]), info["name"])
        how = {"causal": info["mask"] == "kCausal"}
        jobs = [(run_structured, (kernel, info), {}), *((run_repeats, (kernel, info, int(repeats), form), {}) for form in ("batched", "packed", "paged"))]
        jobs += [(run_dense, (kernel,), case) for case in dense_cases(kernel, info)]
        if not info.get("softcap"):
            rq, rk = [1, 0, 300, 64, 129, 700], [5, 17, 300, 1000, 129, 701]
            for page in (None, 16, 64, 256):
                for pack, heads in ((1, (4, 2)), (4, (8, 2))):
                    jobs.append((run_ragged, (kernel, info, rq, rk, *heads, how), dict(pack=pack, page=page)))
            jobs.append((run_ragged, (kernel, info, [5, 130, 0], [0, 64, 3], 4, 4, how), {}))
            # More sequences than a warp has lanes, of every class of length.
            many = [1 + (i * 37) % (1000 >> i % 8) for i in range(70)]
            jobs.append((run_ragged, (kernel, info, many, [n + i % 3 for i, n in enumerate(many)], 4, 2, how), {}))
        for job, args, kwargs in jobs:
            count += 1
            try:
                good, text = job(*args, **kwargs)
            except Exception as e:  # a launch failure ends the context: stop
                print(f"{info['name']}: {kwargs}\n{traceback.format_exc()}")
                sys.exit(1)
            if not good:
                bad += 1
                if bad <= 8:
                    print("  WRONG", text)
        print(f"{info['name']}: {count - bad} of {count} right", flush=True)
        failures += bad
        total += count
    print(f"{total - failures} of {total} right")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
