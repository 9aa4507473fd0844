"""Attention forward through the library beside cuDNN (PyTorch's) and FlashAttention-3
(`dew_flash_attn`, where it is installed).

cells: bf16; head dims 64, 128 and 256, full and causal, sequences of 512 to 16,384, 16,384 tokens
in all, heads * dim = 2048.
shapes: Llama-3-8B's heads (32 on 8, of 128), one causal sequence; batches of many lengths; and what
a feature costs, as speed over the plain kernel's on the same work ("plain").

A figure is the kernel time, by CUPTI, of a burst of 8 calls on 8 queries: the median of 6 bursts,
contenders by turns, each as often first as last. ATTENTION_FORWARD names the parts to measure
(cells,shapes), and words that cells must contain.
"""

import datetime
import json
import math
import os
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from common import OURS, ROOT, agree, busy, peer, randn, smi
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
BURST = 8
TOKENS = 16384
HEADS = {64: 32, 128: 16, 256: 8}
HOPPER = 3


def compare(ctx):
    parts = os.environ.get("ATTENTION_FORWARD", "cells,shapes").split(",")
    words = [part for part in parts if part not in ("cells", "shapes")]
    result = {
        "device": smi("name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"),
        "library": ctx.library.build_info,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fa3": "dew-flash-attn-cu13 0.3.6",
        "method": __doc__,
        "unit": "TFLOP/s",
        "commit": os.environ.get("UNSLOTH_COMMIT", ""),
        "date": os.environ.get("UNSLOTH_DATE") or datetime.date.today().isoformat(),
        "cells": {},
        "shapes": {},
        "clocks": {},
    }
    path = pathlib.Path(os.environ.get("UNSLOTH_RESULTS", ROOT / "benches" / "results"))
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    path = path / f"attention_forward_{device}_{result['date']}.json"
    # Warm the chip up to the clock that it keeps under load.
    a = randn(8192, 8192)
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
    bench = Bench(ctx, result, path, words)
    if "cells" in parts:
        for dim, heads in HEADS.items():
            for causal in (False, True):
                for length in (512, 1024, 2048, 4096, 8192, 16384):
                    name = f"d{dim}.{'causal' if causal else 'full'}.s{length}"
                    bench.batched("cells", name, [length] * (TOKENS // length), heads, heads, dim, causal)
    if "shapes" in parts:
        shapes(bench)


def shapes(bench):
    for length in (2048, 4096, 8192, 16384, 32768):
        bench.batched("shapes", f"llama-3-8b causal s{length}", [length], 32, 8, 128, True)
    draw = random.Random(1)
    ragged = [min(16384, max(16, int(draw.lognormvariate(7, 1.2)))) for _ in range(32)]
    short = [draw.randint(1, 700) for _ in range(256)]
    for causal in (True, False):
        mask = "causal" if causal else "full"
        bench.packed(f"ragged 32 of up to 16384 {mask}", ragged, 32, 8, 128, causal)
        bench.packed(f"one long among 63 short {mask}", [16384] + [300] * 63, 32, 8, 128, causal)
        bench.packed(f"256 of up to 700 {mask}", short, 32, 8, 128, causal)
    for dim in (64, 128, 256):
        bench.features(dim, HEADS[dim])


def turns(contenders, rounds=6):
    """{contender: microseconds of a call}. The order goes round: under its power limit the chip is
    slower for who comes second."""
    names = list(contenders)
    for run in contenders.values():
        run()
    torch.cuda.synchronize()
    times = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                contenders[name]()
                torch.cuda.synchronize()
            times[name].append(busy(profiled) / BURST)
    return {name: statistics.median(all) for name, all in times.items()}


class Bench:
    def __init__(self, ctx, result, path, words):
        self.ctx, self.result, self.path, self.words = ctx, result, path, words
        self.fa3 = peer("dew_flash_attn")

    def call(self, **fields):
        call = self.ctx.op("attention", **fields)
        assert self.ctx.implementation("attention", call.params) == HOPPER, fields
        return call

    def measure(self, section, name, contenders, flops, baseline=None):
        us = turns(contenders)
        rates = {who: round(flops / t / 1e6, 1) for who, t in us.items()}
        self.result[section][name] = rates
        self.result["clocks"][name] = smi("clocks.sm,power.draw,temperature.gpu")
        others = [rate for who, rate in rates.items() if who != OURS]
        print(name, rates, f"{rates[OURS] / max(others):.3f}" if others else "", flush=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def skips(self, name):
        return self.words and not any(word in name + "." for word in self.words)

    def batched(self, section, name, lengths, heads, kv_heads, dim, causal):
        """Sequences of one length: ours, cuDNN, FlashAttention-3."""
        if self.skips(name):
            return
        batch, length = len(lengths), lengths[0]
        qs = [randn(batch, length, heads, dim) for _ in range(BURST)]
        k, v = (randn(batch, length, kv_heads, dim) for _ in range(2))
        outs = [torch.empty_like(q) for q in qs]
        lse = torch.empty(batch, heads, length, device="cuda")
        ours = [self.call(q=q, k=k, v=v, out=o, lse=lse, causal=causal) for q, o in zip(qs, outs)]
        # As PyTorch lays heads out, and cuDNN is quickest: [batch, heads, seq, dim].
        qt = [q.transpose(1, 2).contiguous() for q in qs]
        kt, vt = (t.transpose(1, 2).contiguous() for t in (k, v))

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return [F.scaled_dot_product_attention(q, kt, vt, is_causal=causal, enable_gqa=kv_heads < heads) for q in qt]

        contenders = {OURS: lambda: [call() for call in ours], "cudnn": cudnn}
        if self.fa3:
            contenders["fa3"] = self.fa3_burst(qs, k, v, None, None, causal)
        ours[0]()
        agree(name, {"cudnn": cudnn()[0].transpose(1, 2), OURS: outs[0]})
        flops = 4 * batch * heads * length * length * dim * (0.5 if causal else 1)
        self.measure(section, name, contenders, flops)

    def packed(self, name, lengths, heads, kv_heads, dim, causal):
        """Sequences of many lengths, one behind the other: ours and FlashAttention-3."""
        if self.skips(name):
            return
        total = sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        qs = [randn(total, heads, dim) for _ in range(BURST)]
        k, v = (randn(total, kv_heads, dim) for _ in range(2))
        outs = [torch.empty_like(q) for q in qs]
        lse = torch.empty(heads, total, device="cuda")
        longest = max(lengths)
        at = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
        ours = [self.call(q=q, k=k, v=v, out=o, lse=lse, causal=causal, **at) for q, o in zip(qs, outs)]
        contenders = {OURS: lambda: [call() for call in ours]}
        if self.fa3:
            contenders["fa3"] = self.fa3_burst(qs, k, v, starts, longest, causal)
        flops = sum(4 * heads * n * n * dim * (0.5 if causal else 1) for n in lengths)
        self.measure("shapes", name, contenders, flops)

    def features(self, dim, heads):
        """What features cost: each beside the plain kernel on the same tensors, or on as many
        keys."""
        name = f"features d{dim}"
        if self.skips(name):
            return
        batch, length = 4, 4096
        qs = [randn(batch, length, heads, dim) for _ in range(BURST)]
        k, v = (randn(batch, length, heads, dim) for _ in range(2))
        outs = [torch.empty_like(q) for q in qs]
        lse = torch.empty(batch, heads, length, device="cuda")
        flops = 2 * batch * heads * length * length * dim

        def burst(k=k, v=v, **more):
            calls = [self.call(q=q, k=k, v=v, out=o, lse=lse, **more) for q, o in zip(qs, outs)]
            return lambda: [call() for call in calls]

        contenders = {
            "plain": burst(causal=1),
            # As many keys as the causal kernel sees; the mask alone differs.
            "window": burst(causal=1, window_left=length),
            "softcap": burst(causal=1, softcap=50.0),
            "sinks": burst(causal=1, sinks=torch.randn(heads, device="cuda")),
        }
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        for page in (16, 64, 256):
            table = torch.randperm(batch * length // page).to(torch.int32).view(batch, -1).cuda()
            pages = [t.reshape(-1, page, heads, dim) for t in (k, v)]
            contenders[f"page {page}"] = burst(*pages, causal=1, block_table=table, seq_lens_k=lens)
        us = turns(contenders)
        rates = {who: round(flops / t / 1e6, 1) for who, t in us.items()}
        self.result["shapes"][name] = rates
        print(name, rates, {who: round(rate / rates["plain"], 3) for who, rate in rates.items()}, flush=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def fa3_burst(self, qs, k, v, starts, longest, causal):
        import jax

        scale = 1 / math.sqrt(k.shape[-1])
        at = None if starts is None else (longest, longest)

        def burst(qs, k, v, starts):
            ends = None if starts is None else (starts, starts)
            return [self.fa3._forward3(q, k, v, ends, at, scale, causal, (-1, -1))[0] for q in qs]

        share = jax.dlpack.from_dlpack
        compiled = jax.jit(burst)
        given = ([share(q) for q in qs], share(k), share(v), None if starts is None else share(starts))
        return lambda: jax.block_until_ready(compiled(*given))
