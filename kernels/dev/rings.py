"""Checks variants of the kernels whose rows pass through shared memory, and times how their threads and stages may be parted.

Usage: rings.py OUT.json DIR [PART...], a part being norm or cross_entropy, or norm_once or cross_entropy_once, which launch each
kernel once, for a profiler. DIR has include/, layer_norm.VARIANT.cubin, rms_norm.VARIANT.cubin, group_layer_norm.VARIANT.cubin,
group_rms_norm.VARIANT.cubin and tokens.VARIANT.cubin. Microseconds of one launch, a graph of launches on sets that exceed the cache,
contenders by turns; `copy` moves as many bytes. A name ends in threads x stages, and when a stage is filled again; of a group in
threads to a row x stages.
"""

import ctypes
import glob
import json
import os
import random
import re
import statistics
import sys
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import torch

from launcher import function, launch, load

TYPES = {"int64_t": c_int64, "uint64_t": c_uint64, "int32_t": c_int32, "uint32_t": c_uint32, "float": c_float}
SMS = torch.cuda.get_device_properties(0).multi_processor_count
SHARED = 227 * 1024
BF16 = 3  # a contract's Float
REFILLS = ("at once", "before sums", "after sums")


def arguments_of(include, family, name):
    with open(os.path.join(include, family, "arguments.h")) as f:
        body = re.search(r"struct (?:alignas\(\d+\) )?%s {\n(.*?)};" % name, f.read(), re.S)[1]
    fields = re.findall(r"^  (?:const )?([\w ]+?) (\*?)(\w+);", body, re.M)
    return type(name, (ctypes.Structure,), {"_fields_": [(f, c_void_p if p else TYPES[k]) for k, p, f in fields]})


def launcher(kernel, grid, threads, p, *keep):
    pointers = (c_void_p * 1)(ctypes.addressof(p))

    def run():
        launch(kernel, grid, threads, SHARED, pointers)

    run.keep = (p, pointers, keep)
    return run


def timed(contenders, rounds=9):
    """{name: microseconds}, each contender being launches on different sets."""
    graphs = {}
    for name, runs in contenders.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for run in runs:
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                for run in runs:
                    run()
        graphs[name] = (graph, 3 * len(runs))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / calls * 1e3)
    return {name: round(statistics.median(all), 2) for name, all in times.items()}


def copies(bytes_moved, sets):
    words = bytes_moved // 16
    pairs = [(torch.ones(words, device="cuda", dtype=torch.int64), torch.empty(words, device="cuda", dtype=torch.int64)) for _ in range(sets)]
    parts = [list(zip(a.split(1 << 25), b.split(1 << 25))) for a, b in pairs]
    return [lambda part=part: [b.copy_(a) for a, b in part] for part in parts]


def norm(directory, result, once):
    include = os.path.join(directory, "include")
    Arguments = arguments_of(include, "norm/backward", "NormBackwardRingArguments")
    cells = [("rms_norm", 16384, 4096), ("layer_norm", 16384, 4096), ("layer_norm", 16384, 8192), ("layer_norm", 32768, 2048), ("rms_norm", 16384, 8192), ("rms_norm", 32768, 2048), ("rms_norm", 8192, 16384), ("layer_norm", 8192, 16384)]
    modules = {}
    for path in sorted(glob.glob(os.path.join(directory, "*_norm.*.cubin"))):
        with open(path, "rb") as f:
            modules[os.path.basename(path).removesuffix(".cubin")] = load(f.read())
    for op, rows, columns in cells:
        centered = op == "layer_norm"
        sets = 3
        tensors = [[torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)] + [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)] for _ in range(sets)]
        weight = torch.randn(columns, device="cuda").bfloat16()
        shares = torch.full((2, SMS, columns), float("nan"), device="cuda")
        x, dout = (t[:1024].double().requires_grad_() for t in tensors[0][:2])
        y = torch.nn.functional.layer_norm(x, (columns,), weight.double(), None, 1e-5) if centered else torch.nn.functional.rms_norm(x, (columns,), weight.double(), 1e-5)
        (expected,) = torch.autograd.grad(y, x, dout.detach())
        contenders = {"copy": copies(rows * columns * 6, sets)}
        length = columns // 8

        def contend(name, kernel, threads, stages, refill, kept):
            runs = []
            for a, b, c in tensors:
                p = Arguments()
                p.x, p.dout, p.dx, p.weight = a.data_ptr(), b.data_ptr(), c.data_ptr(), weight.data_ptr()
                p.dweights, p.dbiases = shares[0].data_ptr(), shares[1].data_ptr()
                p.x_0 = p.dout_0 = p.dx_0 = columns * 2
                p.rows, p.length, p.threads, p.stages, p.refill = rows, length, threads, stages, refill
                p.size_1 = p.size_2 = 1
                p.weight_dtype, p.epsilon, p.inverse_length = BF16, 1e-5, 1 / columns
                runs.append(launcher(kernel, SMS, 512, p))
            runs[0]()
            torch.cuda.synchronize()
            error = ((tensors[0][2][:1024].double() - expected).norm() / expected.norm()).item()
            if error > 4e-3 or not error == error:
                print("WRONG", op, rows, columns, name, error)
            if kept:
                contenders[name] = runs

        for variant, module in modules.items():
            # As many threads to a row as the library takes, which has no groups for longer rows.
            group = next((g for g in (128, 256, 512) if 2 * g >= length and not (centered and g == 512)), None)
            if variant.startswith(f"group_{op}") and group:
                kernel = function(module, f"norm_backward_ring_group_{op}_bf16_{group}", SHARED)
                for stages in (2, 3):
                    contend(f"{variant} {group} of {stages}", kernel, group, stages, 2, True)
            if not variant.startswith(op):
                continue
            for per_thread in (1, 2, 4):
                threads = max(32, length // per_thread)
                if threads > 512:
                    continue
                for stages, refill in [(s, r) for s in range(2, 6) for r in range(3)]:
                    # RMSNorm's kernels are made for one time of refilling.
                    if not centered and refill == 0:
                        continue
                    early = "_early" if not centered and refill == 1 else ""
                    kernel = function(module, f"norm_backward_ring_{op}_bf16{early}", SHARED)
                    head = 4096 + (columns * 4 if centered else 0)
                    if stages * (512 // threads) * columns * 4 + head > SHARED:
                        continue
                    name = f"{variant} {threads}x{stages} {REFILLS[refill]}"
                    contend(name, kernel, threads, stages, refill, per_thread == (4 if centered or columns > 8192 else 2))
        if once:
            continue
        times = timed(contenders)
        result[f"{op} {rows}x{columns}"] = times
        print(f"{op} {rows}x{columns}", sorted(times.items(), key=lambda t: t[1])[:12], flush=True)
        del contenders, tensors
        torch.cuda.empty_cache()


def cross_entropy(directory, result, once):
    include = os.path.join(directory, "include")
    Arguments = arguments_of(include, "cross_entropy", "CrossEntropyRingArguments")
    for tokens, vocab in [(8192, 49152), (8192, 128256), (4096, 151936)]:
        logits = [torch.randn(tokens, vocab, device="cuda").mul_(3).bfloat16() for _ in range(2)]
        targets = torch.randint(0, vocab, (tokens,), device="cuda")
        out = torch.empty_like(logits[0])
        losses = torch.empty(tokens, device="cuda")
        few = logits[0][:512].double()
        expected = torch.softmax(few, -1)
        expected_loss = torch.nn.functional.cross_entropy(few, targets[:512], reduction="none")
        expected[torch.arange(512), targets[:512]] -= 1
        contenders = {"copy": copies(tokens * vocab * 4, 2)}
        for path in sorted(glob.glob(os.path.join(directory, "tokens.*.cubin"))):
            with open(path, "rb") as f:
                module = load(f.read())
            for form, blocks in (("tokens", 1), ("pairs", 2)):
                kernel = function(module, f"cross_entropy_ring_{form}_bf16", SHARED)
                runs = []
                for a in logits:
                    p = Arguments()
                    p.logits, p.targets, p.dlogits, p.losses = a.data_ptr(), targets.data_ptr(), out.data_ptr(), losses.data_ptr()
                    p.ignore_index, p.wide_targets = -100, 1
                    p.logits_0 = p.dlogits_0 = vocab * 2
                    p.targets_0 = 8
                    p.tokens, p.length, p.size_1, p.size_2 = tokens, vocab // 8, 1, 1
                    counter = torch.randint(1 << 62, (2,), device="cuda")
                    p.counter, p.launch_tag = counter.data_ptr(), random.getrandbits(64) | 1
                    runs.append(launcher(kernel, SMS // blocks * blocks, 544, p, counter))
                runs[0]()
                torch.cuda.synchronize()
                error = ((out[:512].double() - expected).norm() / expected.norm()).item()
                of_loss = (losses[:512].double() - expected_loss).abs().max().item()
                name = os.path.basename(path).removesuffix(".cubin") + " " + form
                print(name, vocab, "gradient", error, "loss", of_loss)
                contenders[name] = runs
        if once:
            continue
        times = timed(contenders)
        result[f"cross_entropy {tokens}x{vocab}"] = times
        print(f"cross_entropy {tokens}x{vocab}", times, flush=True)
        del contenders, logits, out, expected, few
        torch.cuda.empty_cache()


def main():
    out, directory, what = sys.argv[1], sys.argv[2], sys.argv[3:] or ["norm", "cross_entropy"]
    result = {}
    for part in what:
        {"norm": norm, "cross_entropy": cross_entropy}[part.removesuffix("_once")](directory, result, part.endswith("_once"))
    with open(out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
