"""Checks the portable attention kernels against an f64 definition, and times them beside FlashAttention-2 (torch).

Usage: attention.py DIR check|bench|decode [filter]. DIR holds the cubins and kernels.json. CASES=n checks a sample; RUN_ONLY=1 leaves
out the reference.
"""

import itertools
import math
import os
import random
import sys

import torch
import torch.nn.functional as F

from driver import graph_us, load_all
from launcher import guarded

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
NO_LIMIT = 1 << 30
LEAST_KEYS = 256
CU_Q, CU_K, LENS_K, PAGED, LSE, SINKS, MASK, ALIBI, OUT_F32 = (1 << i for i in range(9))


def strides(x, dims, unit):
    return [0 if d is None else x.stride(d) // unit for d in dims]


def repeated(x):
    return [0 if n == 1 else s for n, s in zip(x.shape, x.stride())]


def up(a, b):
    return -(-a // b)


class Attention:
    """What the library's host code does: chooses a kernel, fills its arguments."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def prepare(self, kernel, q, k, v, out, lse=None, *, causal=False, window_left=0, window_right=0, scale=0.0, softcap=0.0,
                bias=None, mask=None, alibi=None, sinks=None, cu_q=None, cu_k=None, seq_lens_k=None, block_table=None,
                head_major=False, max_q=0, max_k=0, splits=None):
        kernel = self.kernels[kernel] if isinstance(kernel, str) else kernel
        c = kernel.choices
        simt, decode = "simt" in kernel.name, "decode" in kernel.name
        unit = c["width"]
        t = 0 if cu_q is not None else 1
        batch = len(cu_q) - 1 if cu_q is not None else q.shape[0]
        heads, dim, dim_v = q.shape[t + 1], q.shape[t + 2], v.shape[-1]
        token, head = (2, 1) if head_major else ((0, 1) if cu_k is not None else (1, 2))
        outer = None if cu_k is not None else 0
        kv_heads = k.shape[head]
        group = heads // kv_heads
        seqlen_q = max_q if cu_q is not None else q.shape[1]
        if block_table is not None:
            seqlen_k = max_k or block_table.shape[1] * k.shape[token]
        elif cu_k is not None:
            seqlen_k = max_k
        else:
            seqlen_k = k.shape[1]
        scale = scale or 1 / math.sqrt(dim)
        packed = simt or decode
        row_blocks = up(seqlen_q * (group if packed else 1), c["rows"])
        if not packed:
            splits, split_keys, grid = 1, LEAST_KEYS, row_blocks * heads * batch
        else:
            blocks = row_blocks * kv_heads * batch
            if dim_v % 4 or any(x % 4 for x in out.stride()[:-1]):
                splits = 1  # the combining kernel stores quads
            # Parts of a given number are as short as they may be.
            split_keys = LEAST_KEYS if splits is None else 64
            if splits is None:
                visible = min(seqlen_k, (window_left or NO_LIMIT) + seqlen_q)
                splits = choose_splits(blocks, visible, self.processors * kernel.blocks_per_processor)
            grid = splits * blocks
        rows = batch * seqlen_q * heads
        flags = 0
        for flag, given in ((CU_Q, cu_q), (CU_K, cu_k), (LENS_K, seq_lens_k), (PAGED, block_table), (LSE, lse), (SINKS, sinks),
                            (MASK, mask), (ALIBI, alibi)):
            flags |= flag if given is not None else 0
        flags |= OUT_F32 if out.dtype == torch.float32 and q.dtype != torch.float32 else 0
        s = dict(scale=scale, softcap=softcap, softcap_inverse=1 / softcap if softcap else 0.0, num_heads=heads,
                 num_kv_heads=kv_heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, row_blocks=row_blocks, splits=splits,
                 split_keys=split_keys, rows=rows, head_dim=dim, head_dim_v=dim_v, window_left=window_left or NO_LIMIT,
                 window_right=1 if causal else (window_right or NO_LIMIT), flags=flags)
        q_outer = None if cu_q is not None else 0
        for name, x, dims in (("q", q, (q_outer, t, t + 1)), ("k", k, (outer, token, head)), ("v", v, (outer, token, head)),
                              ("out", out, (q_outer, t, t + 1))):
            s[name + "_outer"], s[name + "_token"], s[name + "_head"] = strides(x, dims, unit)
        if lse is not None:
            s["lse_outer"], s["lse_token"], s["lse_head"] = strides(lse, (0, 2, 1) if t else (None, 1, 0), 1)
        buffers = dict(q=q, k=k, v=v, out=out, out_f32=out, lse=lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seq_lens_k=seq_lens_k,
                       block_table=block_table, sinks=sinks, mask=mask, alibi_slopes=alibi)
        if block_table is not None:
            s["page_log2"], s["table_outer"] = k.shape[token].bit_length() - 1, block_table.stride(0)
        if bias is not None:
            s["bias_dtype"] = DTYPES[bias.dtype]
            buffers[{1: "bias_f32", 2: "bias_f16", 3: "bias_bf16"}[s["bias_dtype"]]] = bias
            s["bias_outer"], s["bias_head"], s["bias_token"], s["bias_key"] = repeated(bias)
        if mask is not None:
            s["mask_outer"], s["mask_head"], s["mask_token"], s["mask_key"] = repeated(mask)
        if alibi is not None and alibi.dim() == 2:
            s["alibi_outer"] = alibi.stride(0)
        if splits == 1:
            return kernel.prepare(grid, buffers, s)
        workspace, intact = guarded(splits * rows * (dim_v + 1), dtype=torch.float32)
        buffers["partial"], buffers["partial_lse"] = workspace, workspace.data_ptr() + splits * rows * dim_v * 4
        first = kernel.prepare(grid, buffers, s)
        name = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[out.dtype]
        combine = self.kernels["attention_combine_" + name]
        for n in ("outer", "token", "head"):
            s["out_" + n] *= unit
        fields = {name for name, _, _ in combine.info["scalars"]}
        second = combine.prepare(up(rows, 4), {n: b for n, b in buffers.items() if n in combine.info["buffers"]},
                                 {n: x for n, x in s.items() if n in fields})

        def launch():
            first()
            second()

        launch.intact, launch.splits = intact, splits
        return launch


def choose_splits(blocks, keys, room):
    """As few as keep the chip about as busy as any number would, if each part keeps so many keys."""
    most = max(1, min(3 * room // max(1, blocks), up(keys, LEAST_KEYS), 256))
    busy = [blocks * s / (up(blocks * s, room) * room) for s in range(1, most + 1)]
    return next(i for i, b in enumerate(busy, 1) if b >= 0.95 * max(busy))


def visible(sq, sk, causal, window_left, window_right, device):
    i = torch.arange(sq, device=device)[:, None] + sk - sq
    j = torch.arange(sk, device=device)[None]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= i
    if window_left:
        seen &= j > i - window_left
    if window_right:
        seen &= j < i + window_right
    return seen


def reference(q, k, v, dtype, *, causal=False, window_left=0, window_right=0, scale=0.0, softcap=0.0, bias=None, mask=None,
              alibi=None, sinks=None):
    """One sequence: q [Sq, H, D], k and v [Sk, Hkv, ..]; bias and mask [H or 1, Sq, Sk]. Returns out and lse [H, Sq]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = (q @ k.transpose(1, 2)) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    sq, sk = s.shape[1:]
    if bias is not None:
        s = s + bias.to(dtype)
    if alibi is not None:
        i = torch.arange(sq, device=q.device)[:, None] + sk - sq
        s = s - alibi.to(dtype)[:, None, None] * (i - torch.arange(sk, device=q.device)[None]).abs().to(dtype)
    s = s.masked_fill(~visible(sq, sk, causal, window_left, window_right, q.device), -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype)[:, None, None].expand(-1, sq, 1)], -1)
    lse = torch.logsumexp(s.double(), -1)
    p = torch.softmax(s, -1).masked_fill((lse == -math.inf)[..., None], 0)
    if sinks is not None:
        p = p[..., :-1]
    return (p @ v).transpose(0, 1), lse


EPSILON = {torch.float32: 2.0 ** -24, torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8}


def compare(out, lse, q, k, v, **how):
    """The flash rule: at most twice the error of a plain implementation in the same dtype, plus rounding."""
    if out.numel() == 0:
        return ""
    exact, exact_lse = reference(q, k, v, torch.float64, **how)
    plain, _ = reference(q, k, v, q.dtype, **how)
    error, plain_error = ((x.double() - exact).abs().max().item() for x in (out, plain))
    bound = 2 * plain_error + exact.abs().max().item() * EPSILON[q.dtype] * (8 if q.dtype == torch.float32 else 1) + 1e-6
    empty = exact_lse == -math.inf
    lse_error = (lse.double() - exact_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
    lse_bound = 1e-3 if q.dtype != torch.float32 else 2e-5
    good = (error <= bound and lse_error <= lse_bound and bool((lse[empty] == -math.inf).all())
            and bool((out.transpose(0, 1)[empty] == 0).all()) and not torch.isnan(out).any() and not torch.isnan(lse).any())
    return "" if good else f"error {error:.2e} of {bound:.2e}, lse {lse_error:.1e}, nan {torch.isnan(out).sum().item()}/{out.numel()}"


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def run_case(attention, kernel, rng, q_dtype, kv_dtype, lengths_q, lengths_k, heads, kv_heads, dim, dim_v, form_q, form_k, how,
             page=16, head_major=False, out_f32=False, splits=None, misaligned=False):
    """form_q: batched | packed; form_k: batched | padded | packed | paged. Returns what is wrong."""
    batch = len(lengths_q)
    extra = 1 if misaligned else 8
    spread = rng.random() < 0.5

    def rows(count, h, d, dtype):
        # Heads of a larger tensor, as when q, k and v come from one projection.
        return randn(count, h + 1, d + extra, dtype=dtype)[:, :h, :d] if spread or misaligned else randn(count, h, d, dtype=dtype)

    total_q, total_k = sum(lengths_q), sum(lengths_k)
    qs = [rows(n, heads, dim, q_dtype) for n in lengths_q]
    ks = [rows(n, kv_heads, dim, kv_dtype) for n in lengths_k]
    vs = [rows(n, kv_heads, dim_v, kv_dtype) for n in lengths_k]
    out_dtype = torch.float32 if out_f32 else q_dtype
    cu = lambda lengths: torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    options = {}
    if form_q == "batched":
        q = torch.stack(qs)
        out, intact = guarded(batch, lengths_q[0], heads, dim_v, dtype=out_dtype)
        lse, lse_intact = guarded(batch, heads, lengths_q[0], dtype=torch.float32)
    else:
        q, options["cu_q"], options["max_q"] = torch.cat(qs), cu(lengths_q), max(lengths_q)
        out, intact = guarded(total_q, heads, dim_v, dtype=out_dtype)
        lse, lse_intact = guarded(heads, total_q, dtype=torch.float32)
    lens = torch.tensor(lengths_k, dtype=torch.int32, device="cuda")
    if form_k == "batched":
        k, v = torch.stack(ks), torch.stack(vs)
    elif form_k == "padded":
        room = max(lengths_k) + 3
        k, v = (torch.full((batch, room, kv_heads, d), float("nan"), device="cuda", dtype=kv_dtype) for d in (dim, dim_v))
        for i, n in enumerate(lengths_k):
            k[i, :n], v[i, :n] = ks[i], vs[i]
        options["seq_lens_k"] = lens
    elif form_k == "packed":
        k, v, options["cu_k"], options["max_k"] = torch.cat(ks), torch.cat(vs), cu(lengths_k), max(lengths_k)
    else:
        most = max(up(n, page) for n in lengths_k) + 1
        count = batch * most + 2
        order = torch.randperm(count)
        table = torch.full((batch, most), 2 ** 30, dtype=torch.int32)
        k, v = (torch.full((count, page, kv_heads, d), float("nan"), device="cuda", dtype=kv_dtype) for d in (dim, dim_v))
        for i, n in enumerate(lengths_k):
            for j in range(up(n, page)):
                where = int(order[i * most + j])
                table[i, j] = where
                part = slice(j * page, min(n, (j + 1) * page))
                k[where, :part.stop - part.start], v[where, :part.stop - part.start] = ks[i][part], vs[i][part]
        if head_major:
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        options |= dict(block_table=table.cuda(), seq_lens_k=lens, head_major=head_major)
    if misaligned:
        wide = torch.empty(q.shape[:-1] + (dim + 1,), device="cuda", dtype=q_dtype)[..., 1:]
        q = wide.copy_(q)
    how = dict(how)
    biases, masks, slopes = [None] * batch, [None] * batch, [None] * batch
    most_q, most_k = max(lengths_q), max(lengths_k) + (3 if form_k == "padded" else 0)
    if form_k == "paged":
        most_k = options["block_table"].shape[1] * page
    for name, per in (("bias", biases), ("mask", masks)):
        if name in how:
            shape = [batch if rng.random() < 0.5 else 1, heads if rng.random() < 0.5 else 1, most_q if rng.random() < 0.8 else 1,
                     most_k if rng.random() < 0.9 else 1]
            x = randn(*shape, dtype=how[name]) if name == "bias" else torch.rand(*shape, device="cuda") < 0.8
            options[name] = x
            x = x.expand(batch, heads, most_q, most_k)
            for i in range(batch):
                per[i] = x[i, :, :lengths_q[i], :lengths_k[i]]
            del how[name]
    if "alibi" in how:
        shape = (batch, heads) if rng.random() < 0.5 else (heads,)
        options["alibi"] = torch.rand(*shape, device="cuda")
        slopes = [options["alibi"].expand(batch, heads)[i] for i in range(batch)]
        del how["alibi"]
    if "sinks" in how:
        how["sinks"] = options["sinks"] = randn(heads, dtype=torch.float32)
    options |= {n: x for n, x in how.items() if n != "sinks"}
    launch = attention.prepare(kernel, q, k, v, out, lse, splits=splits, **options)
    launch()
    torch.cuda.synchronize()
    if "RUN_ONLY" in os.environ:  # racecheck cannot follow the library kernels of the reference
        return []
    wrong = [] if intact() and lse_intact() and getattr(launch, "intact", lambda: True)() else ["guards"]
    at = 0
    for i in range(batch):
        n = lengths_q[i]
        o, l = (out[i], lse[i]) if form_q == "batched" else (out[at:at + n], lse[:, at:at + n])
        at += n
        text = compare(o, l, qs[i], ks[i], vs[i], bias=biases[i], mask=masks[i], alibi=slopes[i], **how)
        if text:
            wrong.append(f"sequence {i}: {text}")
    return wrong


def check(attention, only):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    total = bad = 0
    for name, kernel in attention.kernels.items():
        if only not in name or "combine" in name:
            continue
        c = kernel.choices
        by_code = {code: dtype for dtype, code in DTYPES.items()}
        q_dtype, kv_dtype = by_code[c["dtype"]], by_code[c.get("kv_dtype", c["dtype"])]
        d = c["head_dim"]
        decode, simt = "decode" in name, "simt" in name
        scalar = simt and c["width"] == 1
        cases = []

        def add(lengths_q, lengths_k, form_q="batched", form_k="batched", how={}, **more):
            more = dict(dim=d, dim_v=d, heads=4, kv_heads=2) | more
            cases.append((lengths_q, lengths_k, form_q, form_k, how, more))

        long_q = (1, 2, 3) if decode else (1, 63, 65, 128, 200)
        for sq in long_q:
            for sk in (1, 16, 63, 64, 65, 333):
                for how in ({}, {"causal": True}) if sk > 60 else ({"causal": True},):
                    add([sq, sq], [sk, sk], how=how)
        lq = [1, 3, 2, 0, 1] if decode else [1, 130, 64, 0, 77]
        lk = [5, 333, 64, 3, 0]
        smaller = {64: (40, 64), 128: (80, 112), 256: (136, 256)}[d]
        for how in ({"causal": True}, {"window_left": 37, "window_right": 11}, {"causal": True, "window_left": 64}, {"sinks": 1},
                    {"causal": True, "sinks": 1, "scale": 0.3}, {"window_right": 5}):
            add(lq, lk, "packed", "packed", how)
            add(lq, lk, "packed", "paged", how, page=rng.choice([1, 4, 16, 64]), head_major=rng.random() < 0.5)
            add([lq[1]] * 5, lk, "batched", "padded", how, out_f32=True, dim=smaller[0], dim_v=smaller[1])
            add(lq, lk, "packed", "paged", how, heads=rng.choice([6, 8]), kv_heads=2, dim=smaller[1], dim_v=smaller[0])
        if decode or simt:
            for splits in (2, 3, 7):
                for how in ({}, {"causal": True, "sinks": 1}, {"causal": True, "window_left": 100}):
                    more = dict(out_f32=rng.random() < 0.3) if not scalar else {}
                    add([2, 1, 3], [700, 130, 64], "packed", "packed", how, splits=splits, **more)
                    add([1, 1, 1], [700, 0, 1], "batched", "padded", how, splits=splits, heads=40, kv_heads=2, **more)
                    add([4, 4], [513, 70], "batched", "paged", how, splits=splits, page=16, heads=7, kv_heads=1, **more)
        if decode:  # without `scores` too
            for how in ({"softcap": 4.0}, {"softcap": 30.0, "causal": True, "window_left": 90, "sinks": 1}):
                add(lq, lk, "packed", "paged", how, page=16)
        if c.get("scores", 1):
            for how in ({"softcap": 5.0}, {"bias": torch.float32}, {"bias": torch.bfloat16, "causal": True}, {"mask": 1},
                        {"alibi": 1, "causal": True}, {"bias": torch.float16, "mask": 1, "alibi": 1, "softcap": 3.0, "sinks": 1},
                        {"mask": 1, "causal": True, "window_left": 50, "scale": -0.2}):
                add([lq[1]] * 2, [200, 200], "batched", "batched", how)
                add(lq, lk, "packed", "paged", how, page=16)
                add([lq[1]] * 3, [100, 7, 0], "batched", "padded", how)
        if scalar:
            cases = [x for x in cases if rng.random() < 0.35]
            for dims in ((7, 9), (33, 33), (100, 101), (256, 1)):
                add(lq, lk, "packed", "packed", {"causal": True}, dim=dims[0], dim_v=dims[1], misaligned=True)
        if "CASES" in os.environ:  # a sample, under a sanitizer say
            cases = rng.sample(cases, min(len(cases), int(os.environ["CASES"])))
        failed = 0
        for lengths_q, lengths_k, form_q, form_k, how, more in cases:
            wrong = run_case(attention, kernel, rng, q_dtype, kv_dtype, lengths_q, lengths_k, form_q=form_q, form_k=form_k, how=how, **more)
            if wrong:
                failed += 1
                if failed <= 3:
                    print("  WRONG", name, lengths_q, lengths_k, form_q, form_k, how, more, wrong[:2], flush=True)
        print(f"{name}: {len(cases) - failed} of {len(cases)} right", flush=True)
        total, bad = total + len(cases), bad + failed
    print(f"attention: {total - bad} of {total} right (seed {seed})", flush=True)


def bench(attention, only):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    calls = 6
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for s in (1024, 8192):
            for causal in (False, True):
                b = 16384 // s
                q, k, v = (randn(b, s, h, d, dtype=torch.bfloat16) for _ in range(3))
                out, lse = torch.empty_like(q), torch.empty(b, h, s, device="cuda")
                flop = 4 * b * h * s * s * d * (0.5 if causal else 1)
                rates = {}
                for name, kernel in attention.kernels.items():
                    if f"attention_bf16_d{d}" in name and "scores" not in name and only in name:
                        launch = attention.prepare(kernel, q, k, v, out, lse, causal=causal)
                        rates[name.replace(f"attention_bf16_d{d}", "ours")] = graph_us(lambda: [launch() for _ in range(calls)], calls)
                qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))

                def fa2():
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        return [F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal) for _ in range(calls)]
                rates["fa2"] = graph_us(fa2, calls)
                rates = {n: flop / t / 1e6 for n, t in rates.items()}
                best = max(r for n, r in rates.items() if n != "fa2")
                print(f"d{d} s{s} {'causal' if causal else 'full'}: " + " ".join(f"{n}={r:.0f}" for n, r in rates.items())
                      + f"  best/fa2 {best / rates['fa2']:.2f}", flush=True)

    q, k, v = (randn(4, 2048, 16, 128, dtype=torch.float32) for _ in range(3))
    out = torch.empty_like(q)
    launch = attention.prepare("attention_simt_f32_f32_w4", q, k, v, out, causal=True)
    us = graph_us(lambda: launch(), 1)
    print(f"f32 d128 4x2048 causal: {4 * 4 * 16 * 2048 ** 2 * 128 / 2 / us / 1e6:.1f} TFLOP/s", flush=True)


def copy_tbps():
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    # A kernel: graphs give copies to the slower copy engines.
    return 2 * x.nbytes / graph_us(lambda: [torch.neg(x, out=y) for _ in range(4)], 4) / 1e6


def decode(attention, only):
    copy = copy_tbps()
    print(f"copy {copy:.2f} TB/s")
    heads, kv_heads = 32, 8
    for d, (batch, length), page in itertools.product((128, 64, 256), ((1, 8192), (1, 131072), (8, 8192), (32, 4096), (128, 2048), (256, 1024)), (0, 16)):
        if d != 128 and (batch, length) not in ((1, 131072), (32, 4096)):
            continue
        q = randn(batch, 1, heads, d, dtype=torch.bfloat16)
        bytes_ = 2 * batch * length * kv_heads * d * 2
        sets = max(1, min(8, (200 << 20) // bytes_ + 1))  # past the L2 cache
        ks, vs = ([randn(batch, length, kv_heads, d, dtype=torch.bfloat16) for _ in range(sets)] for _ in range(2))
        out = torch.empty_like(q)
        kernel = attention.kernels[f"attention_decode_bf16_d{d}"]
        options = {}
        if page:
            pages = batch * length // page
            options = dict(block_table=torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1),
                           seq_lens_k=torch.full((batch,), length, dtype=torch.int32, device="cuda"))
            view = lambda x: x.view(pages, page, kv_heads, d)
            ks, vs = [view(x) for x in ks], [view(x) for x in vs]
        room = attention.processors * kernel.blocks_per_processor
        base = choose_splits(batch * kv_heads, length, room)
        text = []
        for splits in sorted({base, max(1, base // 2), base * 2} if page == 0 else {base}):
            launches = [attention.prepare(kernel, q, k, v, out, splits=splits, **options) for k, v in zip(ks, vs)]
            us = graph_us(lambda: [launch() for launch in launches], sets)
            text.append(f"{splits}:{us:.1f}us/{bytes_ / us / 1e6:.2f}TB/s/{bytes_ / us / 1e6 / copy:.0%}")
        print(f"decode d{d} {batch}x{length} page {page} (chosen {base}): " + " ".join(text), flush=True)


if __name__ == "__main__":
    directory, what = sys.argv[1:3]
    only = sys.argv[3] if len(sys.argv) > 3 else ""
    {"check": check, "bench": bench, "decode": decode}[what](Attention(load_all(directory, "attention")), only)
