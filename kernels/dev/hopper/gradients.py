"""Checks variants of the gradients' kernels against f64, and times them beside FlashAttention-3.

Usage: gradients.py OUT.json DIR check|bench|once [CELL,...]. Each DIR/VARIANT.cubin has kernels attention_gradients_full, _causal, _prepare and,
above 128 dimensions, _finish, of bf16. Up to 128 dimensions each is run as it comes and with sums in order, where `check` wants the same bits
again; above, as it was made. A cell is like d128.causal.s4096 (all of 16,384 tokens, as many heads as HEADS says) or, with twice as many of
which four share keys, d128g4.causal.s4096; by default s512, s2048 and s8192. `once` runs each contender once, for a profiler.

A figure is the kernel time, by CUPTI, of four calls: the median of 3 rounds, contenders by turns; the main kernel's alone beside it.
"""

import ctypes
import glob
import json
import math
import os
import re
import sys
import time
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch.profiler import ProfilerActivity, profile

from driver import NO_LIMIT, TensorMap, encode

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from launcher import allow_shared, check, cuda, function, launch, load

HEADS = {64: 32, 96: 32, 128: 16, 192: 8, 256: 8}
TOKENS = 16384
CALLS = 4


def structs(include):
    with open(os.path.join(include, "attention", "backward", "arguments.h")) as f:
        header = f.read()
    types = {"CUtensorMap": TensorMap, "int64_t": c_int64, "int32_t": c_int32, "float": c_float}
    found = []
    for name in ("AttentionGradientsArguments", "AttentionGradientsLaunch"):
        body = re.search(r"struct (?:alignas\(\d+\) )?%s {\n(.*?)};" % name, header, re.S)[1]
        fields = re.findall(r"^  (?:const )?([\w ]+?) (\*?)(\w+);", body, re.M)
        found.append(type(name, (ctypes.Structure,), {"_fields_": [(f, c_void_p if p else types[k]) for k, p, f in fields]}))
    return found


class Variant:
    """The kernels of a cubin."""

    def __init__(self, path, include):
        self.name = os.path.basename(path).removesuffix(".cubin")
        with open(path, "rb") as f:
            self.module = load(f.read())
        self.arguments, launch_struct = structs(include)
        self.parts = {}
        for part in ("full", "causal", "prepare", "finish"):
            name = f"attention_gradients_{part}"
            address, size, info = ctypes.c_uint64(), ctypes.c_size_t(), launch_struct()
            if cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self.module, f"{name}_launch".encode()):
                continue
            check(cuda.cuMemcpyDtoH_v2(ctypes.byref(info), address, ctypes.c_size_t(ctypes.sizeof(info))))
            kernel = function(self.module, name)
            allow_shared(kernel, info.shared_bytes)
            self.parts[part] = (kernel, info)
        self.head_dim, self.head_dim_v = self.parts["full"][1].head_dim, self.parts["full"][1].head_dim_v
        # Up to 128 dimensions blocks of keys count what they add, and the last one of a step writes dq; they take an order, too.
        self.counts = "finish" not in self.parts
        self.orders = (False, True) if self.counts else (bool(self.parts["full"][1].in_order),)

    def prepare(self, q, k, v, out, lse, dout, dq, dk, dv, causal, ordered=False):
        """Batched, contiguous. A function that launches."""
        batch, seq, heads, dim = q.shape
        kv_seq, kv_heads = k.shape[1:3]
        main, info = self.parts["causal" if causal else "full"]
        step = 64  # queries that the copy engine brings at once
        memory = ctypes.create_string_buffer(ctypes.sizeof(self.arguments) + 256)
        p = self.arguments.from_buffer(memory, -ctypes.addressof(memory) % 128)
        for map_, x, box in ((p.q, q, step), (p.dout, dout, step), (p.k, k, info.block_keys // info.blocks), (p.v, v, info.block_keys // info.blocks)):
            sb, ss, sh, _ = (2 * s for s in x.stride())
            encode(map_, x.dtype, x.data_ptr(), (x.shape[3], x.shape[1], x.shape[2], x.shape[0]), (ss, sh, sb), (64, box, 1, 1))
        blocks = -(-seq // 128) * 2
        statistics = torch.full((heads * blocks * batch, 2 * 64), math.nan, device="cuda")
        columns = -(-dim // 64) * 64  # as they lie in memory
        sums = torch.full((heads * blocks * batch, 64 * columns), math.nan, device="cuda")
        order = torch.full((2 * heads * blocks * batch + 1,), 77, dtype=torch.int32, device="cuda")
        p.statistics, p.sums, p.order = statistics.data_ptr(), sums.data_ptr(), order.data_ptr() if self.counts or ordered else None
        p.ordered = ordered
        terms = torch.full((heads * blocks * batch * 64, 8), math.nan, device="cuda", dtype=torch.bfloat16)
        p.terms = terms.data_ptr() if self.counts else None
        for name, x in (("out", out), ("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)):
            setattr(p, "dout_pointer" if name == "dout" else name, x.data_ptr())
            for axis, stride in zip(("batch", "sequence", "head"), x.stride()):
                setattr(p, f"{name}_{axis}_stride", stride)
        p.lse = lse.data_ptr()
        p.lse_batch_stride, p.lse_head_stride, p.lse_sequence_stride = lse.stride()
        p.blocks_per_head, p.batch, p.heads_q, p.heads_kv = blocks * batch, batch, heads, kv_heads
        p.group, p.head_dim, p.head_dim_v, p.seqlen_q, p.seqlen_k = heads // kv_heads, dim, v.shape[3], seq, kv_seq
        p.row_blocks, p.key_blocks = blocks, -(-kv_seq // info.block_keys)
        p.window_left, p.window_right = NO_LIMIT, 0 if causal else NO_LIMIT
        p.scale = 1 / math.sqrt(dim)
        p.scale_log2 = p.scale * math.log2(math.e)
        p.alibi_factor = 1.0
        arguments = (c_void_p * 1)(ctypes.addressof(p))
        keep = (memory, statistics, terms, sums, order, q, k, v, out, lse, dout, dq, dk, dv)

        def run():
            for part, grid in (("prepare", blocks * batch * heads), (None, p.key_blocks * batch * kv_heads), ("finish", blocks * batch * heads)):
                if part == "finish" and self.counts:
                    continue
                kernel, of = self.parts[part] if part else (main, info)
                launch(kernel, grid * of.blocks, of.threads, of.shared_bytes, arguments)

        run.keep = keep
        return run


def forward(q, k, v, causal, dtype):
    """Output [batch, seq, heads, dim] and LSE [batch, heads, seq]."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return (weights @ v).transpose(1, 2), lse


def run_check(variants, result):
    """Lengths around the tiles; twice, for what one launch leaves to the next."""
    bad = 0
    for variant, ordered in ((v, o) for v in variants for o in v.orders):
        dim = variant.head_dim
        for causal in (False, True)[: 1 + ("causal" in variant.parts)]:
            for seq, kv_seq, heads, kv_heads in ((64, 128, 1, 1), (128, 128, 2, 2), (1, 1, 2, 1), (63, 129, 2, 1), (200, 200, 4, 2), (333, 500, 2, 2),
                                                 (1024, 1024, 4, 1), (2048, 2048, 2, 2), (129, 64, 1, 1)):
                q, dout = (torch.randn(2, seq, heads, d, device="cuda").bfloat16() for d in (dim, variant.head_dim_v))
                k, v = (torch.randn(2, kv_seq, kv_heads, d, device="cuda").bfloat16() for d in (dim, variant.head_dim_v))
                leaves = [x.double().requires_grad_() for x in (q, k, v)]
                exact, lse = forward(*leaves, causal, torch.float64)
                wanted = torch.autograd.grad((exact * dout.double()).sum(), leaves)
                out = exact.detach().bfloat16()
                gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
                run = variant.prepare(q, k, v, out, lse.detach().float(), dout, *gradients, causal, ordered)
                run()
                first = [x.clone() for x in gradients]
                run()
                torch.cuda.synchronize()
                if ordered and not all(map(torch.equal, first, gradients)):
                    bad += 1
                    print("OTHER BITS", variant.name, causal, seq, kv_seq, heads, kv_heads, flush=True)
                for name, got, want in zip(("dq", "dk", "dv"), gradients, wanted):
                    want = want.nan_to_num(0)
                    error = (got.double() - want).abs().max().item() / max(want.abs().max().item(), 1e-3)
                    if not error < 2e-2:
                        bad += 1
                        print("WRONG", variant.name, causal, seq, kv_seq, heads, kv_heads, name, error, flush=True)
        print(variant.name, "in order" if ordered else "", "checked", flush=True)
    result["wrong"] = bad
    return bad


def kernel_us(run):
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    times = {}
    for e in p.key_averages():
        times[e.key] = times.get(e.key, 0) + e.device_time_total / CALLS
    return times


def of_fa3(q, k, v, dout, causal):
    import dew_flash_attn as fa3
    import jax

    scale, window = 1 / math.sqrt(q.shape[-1]), (-1, -1)
    given = [jax.dlpack.from_dlpack(t) for t in (q, k, v)]
    out, lse = jax.jit(lambda q, k, v: fa3._forward3(q, k, v, None, None, scale, causal, window)[:2])(*given)
    backward = jax.jit(lambda dout, q, k, v, out, lse: fa3._backward3(dout, q, k, v, out, lse, None, None, scale, causal, window))
    arguments = (jax.dlpack.from_dlpack(dout), *given, out, lse)
    return lambda: jax.block_until_ready(backward(*arguments))


def bench(variants, cells, result, once=False):
    dims = sorted({v.head_dim for v in variants})
    cells = cells or [f"d{d}.{mask}.s{s}" for d in dims for mask in ("full", "causal") for s in (512, 2048, 8192)]
    for cell in cells:
        dim, group, mask, seq = re.fullmatch(r"d(\d+)(?:g(\d+))?\.(\w+)\.s(\d+)", cell).groups()
        dim, group, seq, causal = int(dim), int(group or 1), int(seq), mask == "causal"
        heads, batch = HEADS[dim] * (2 if group > 1 else 1), TOKENS // seq
        q, dout, k, v = (torch.randn(batch, seq, n, dim, device="cuda").bfloat16() for n in (heads, heads, heads // group, heads // group))
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
        out = out.transpose(1, 2).contiguous()
        # About what it is for such data; time does not depend on it.
        lse = torch.full((batch, heads, seq), math.log(seq) + 0.5, device="cuda")
        contenders = {}
        for variant in variants:
            for ordered in variant.orders:
                if variant.head_dim == dim:
                    run = variant.prepare(q, k, v, out, lse, dout, *map(torch.empty_like, (q, k, v)), causal, ordered)
                    contenders[variant.name + ", in order" * ordered] = run
        try:
            contenders["fa3"] = of_fa3(q, k, v, dout, causal)
        except ImportError as e:
            print("no fa3:", e)
        for run in contenders.values():
            run()
            torch.cuda.synchronize()
        if once:
            continue
        times = {name: [] for name in contenders}
        for _ in range(3):
            for name, run in contenders.items():
                times[name].append(kernel_us(run))
        flops = 10 * batch * heads * seq * seq * dim // (2 if causal else 1)
        row = {}
        for name, of in times.items():
            of = sorted(of, key=lambda t: sum(t.values()))[1]
            total = sum(of.values())
            main = max(of.values())
            row[name] = dict(us=round(total, 1), tflops=round(flops / total / 1e6), main=round(flops / main / 1e6))
        result["cells"][cell] = row
        print(cell, " ".join(f"{n}={r['tflops']}({r['main']})" for n, r in row.items()), flush=True)


def trace(variants, result):
    """How long warpgroups of block 0 take from mark to mark, cycles; medians over the loop's turns."""
    for variant in variants:
        dim = variant.head_dim
        x = [torch.randn(4, 4096, HEADS[dim], dim, device="cuda").bfloat16() for _ in range(8)]
        lse = torch.full((4, HEADS[dim], 4096), math.log(4096) + 0.5, device="cuda")
        run = variant.prepare(*x[:4], lse, *x[4:], False)
        run()
        torch.cuda.synchronize()
        notes, address, size = (ctypes.c_uint32 * 2 * 2048 * 4)(), ctypes.c_uint64(), ctypes.c_size_t()
        check(cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), variant.module, b"unsloth_trace"))
        check(cuda.cuMemcpyDtoH_v2(notes, address, ctypes.c_size_t(ctypes.sizeof(notes))))
        starts = []
        for group in (1, 2):
            events = [tuple(note) for note in notes[group]]
            marks = max(mark for mark, _ in events) + 1
            turns = [events[i : i + marks + 1] for i in range(len(events) - marks) if events[i][0] == 0]
            turns = [t for t in turns if [m for m, _ in t] == [*range(marks), 0]][4:]
            spans = [[(t[i + 1][1] - t[i][1]) % 2**32 for t in turns] for i in range(marks)]
            median = [sorted(span)[len(span) // 2] for span in spans]
            starts.append([t[0][1] for t in turns])
            print(variant.name, group, median, sum(median), len(turns), flush=True)
        lag = [(b - a) % 2**32 for a, b in zip(*starts)]
        lag = sorted(n - 2**32 if n > 2**31 else n for n in lag)
        print(variant.name, "lag", lag[:: max(1, len(lag) // 8)], flush=True)


def main(out, directory, mode, cells=""):
    result = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "method": __doc__, "cells": {}}
    include = os.path.join(directory, "include")
    variants = [Variant(path, include) for path in sorted(glob.glob(os.path.join(directory, "*.cubin")))]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(30):
        a @ a
    if mode == "trace":
        trace(variants, result)
    elif mode == "check":
        run_check(variants, result)
    else:
        bench(variants, [c for c in cells.split(",") if c], result, mode == "once")
    json.dump(result, open(out, "w"), indent=1)
    return result.get("wrong", 0)


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
