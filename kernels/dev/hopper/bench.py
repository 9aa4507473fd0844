"""Times kernels beside cuDNN and FlashAttention-3, interleaved in one process; benches/compare/attention_forward.py does so through
the library.

Usage: bench.py OUT.json DIR [full | all | variants] [filter]

full: 36 cells (bf16; head dims 64, 128, 256; full and causal; sequences of 512 to 16,384; 16,384 tokens in all,
heads * dim = 2048) for the kernels of DIR that choose.py picks, cuDNN (torch) and FlashAttention-3
(`dew_flash_attn`, when installed). all: every kernel of DIR that serves a cell. variants: likewise, without peers.

A figure is the kernel time, by CUPTI, of a burst of 8 calls on 8 queries: the median of 3 bursts, contenders by turns.
"""

import json
import math
import os
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import choose
from driver import Kernel

BURST = 8
SHAPES = [(32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)]
HEADS = {64: 32, 128: 16, 256: 8}
MASKS = {False: "kNone", True: "kCausal"}


def flops(b, s, h, d, causal):
    return 4 * b * s * s * h * d * (0.5 if causal else 1.0)


def kernel_ms(run):
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        run()
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in p.key_averages()) / 1e3


def event_ms(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def gpu_state():
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    out = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip()
    return dict(zip(fields.split(","), (x.strip() for x in out.split(","))))


def our_burst(kernel, qs, k, v, causal, **options):
    outs = [torch.empty_like(q) for q in qs]
    b, s, h, _ = qs[0].shape
    lse = torch.empty(b, h, s, device="cuda")
    launches = [kernel.prepare(q, k, v, o, lse, causal=causal, **options) for q, o in zip(qs, outs)]
    return lambda: [launch() for launch in launches]


def fa3_burst(qs, k, v, causal):
    import dew_flash_attn as da
    import jax
    scale = 1 / math.sqrt(k.shape[-1])
    f = jax.jit(lambda qs, k, v: [da._forward3(q, k, v, None, None, scale, causal, (-1, -1))[0] for q in qs])
    args = ([jax.dlpack.from_dlpack(q) for q in qs], jax.dlpack.from_dlpack(k), jax.dlpack.from_dlpack(v))
    return lambda: jax.block_until_ready(f(*args))


def cudnn_burst(qs, k, v, causal):
    # As torch lays heads out: [batch, heads, seq, dim], contiguous.
    qt, kt, vt = [q.transpose(1, 2).contiguous() for q in qs], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return [F.scaled_dot_product_attention(q, kt, vt, is_causal=causal) for q in qt]
    return run


def tensors(b, s, h, d):
    make = lambda: torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16)
    return [make() for _ in range(BURST)], make(), make()


def load(directory):
    kernels = json.load(open(os.path.join(directory, "kernels.json")))
    for info in kernels:
        info["kernel"] = Kernel(os.path.join(directory, info["file"]), info["name"])
    return kernels


def measure(contenders, ms=kernel_ms, rounds=3):
    times = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(ms(run) / BURST)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def full(directory, only, result, everything=False):
    kernels = load(directory)
    for d, h in HEADS.items():
        for causal in (False, True):
            for b, s in SHAPES:
                cell = f"d{d}.{'causal' if causal else 'full'}.s{s}"
                if not any(o in cell + "." for o in only.split(",")):
                    continue
                qs, k, v = tensors(b, s, h, d)
                contenders = {}
                chosen = choose.kernel("bf16", d, d, s, causal=causal)
                for info in kernels:
                    if not everything and info["name"] != chosen:
                        continue
                    if info["head_dim"] == d and info["mask"] == MASKS[causal] and info["dtype"] == "bf16":
                        for label, options in info.get("options", {"": {}}).items():
                            contenders[info["name"] + label] = our_burst(info["kernel"], qs, k, v, causal, **options)
                if not contenders:
                    continue
                contenders["cudnn"] = cudnn_burst(qs, k, v, causal)
                try:
                    contenders["fa3"] = fa3_burst(qs, k, v, causal)
                except ImportError as e:
                    print("no fa3:", e)
                times = measure(contenders)
                rates = {n: round(flops(b, s, h, d, causal) / t / 1e9, 1) for n, t in times.items()}
                result["cells"][cell] = rates
                ours = max(r for n, r in rates.items() if n not in ("cudnn", "fa3"))
                best = max(rates.get("cudnn", 0), rates.get("fa3", 0))
                print(cell, rates, f"{ours / best:.3f}", flush=True)


def variants(directory, only, result):
    kernels = load(directory)
    for d, h in HEADS.items():
        for causal in (False, True):
            for b, s in SHAPES:
                cell = f"d{d}.{'causal' if causal else 'full'}.s{s}"
                contenders = {}
                for info in kernels:
                    if (info["head_dim"] == d and info["mask"] == MASKS[causal] and only in info["name"]
                            and s in info.get("sequences", [1024, 4096, 16384])):
                        if not contenders:
                            qs, k, v = tensors(b, s, h, d)
                        for label, options in info.get("options", {"": {}}).items():
                            contenders[info["name"] + label] = our_burst(info["kernel"], qs, k, v, causal, **options)
                if not contenders:
                    continue
                times = measure(contenders, event_ms, 5)
                rates = {n: round(flops(b, s, h, d, causal) / t / 1e9, 1) for n, t in times.items()}
                result["cells"][cell] = rates
                print(cell, " ".join(f"{n}={r}" for n, r in rates.items()), flush=True)


def main(out, directory, mode="full", only=""):
    result = {"device": gpu_state(), "torch": torch.__version__, "cuda": torch.version.cuda,
              "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"),
              "unit": "TFLOP/s", "cells": {}}
    # Warm the chip up to the clock it keeps under load.
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
    {"full": full, "all": lambda *a: full(*a, everything=True), "variants": variants}[mode](directory, only, result)
    result["device_after"] = gpu_state()
    json.dump(result, open(out, "w"), indent=1)
    print(result["device_after"])


if __name__ == "__main__":
    main(*sys.argv[1:])
