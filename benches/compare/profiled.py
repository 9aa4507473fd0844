"""What limits products that are behind a goal: Nsight Compute's counters of single launches, ours and torch's (cuBLAS).

Runs itself under `ncu` (NCU names the program), which replays every launch alone, with empty caches and the clocks that
the GPU takes."""

import csv
import io
import os
import pathlib
import re
import subprocess
import sys

import torch
from common import ROOT, Record, randn
from linear_blocks import FORMATS, blocks
from linear_blocks import described as described_blocks
from linear_codes import described as described_codes
from linear_codes import quantized

# Dtype of the weight (bf16: torch's product), rows of x, out_features, in_features.
CASES = [
    *[("ternary", m, *nk) for m in (1, 16, 64) for nk in ((13824, 2560), (2560, 6912), (4096, 14336))],
    ("ternary", 1, 3200, 10240),
    *[("i8", 4096, *nk) for nk in ((13824, 2560), (2560, 6912), (4096, 14336))],
    *[(name, m, *nk) for m in (512, 535) for nk in ((4096, 4096), (14336, 4096)) for name in ("Q4_0", "Q6_K", "bf16")],
    *[(name, 535, 4096, 14336) for name in ("Q4_0", "Q6_K", "bf16")],
    *[(name, 2048, 14336, 4096) for name in ("Q4_0", "Q6_K", "bf16")],
]
SECTIONS = "SpeedOfLight,LaunchStats,SchedulerStats,WarpStateStats,ComputeWorkloadAnalysis,MemoryWorkloadAnalysis"
# What is kept: a counter's pattern, and its name here.
KEPT = {
    r"gpu__time_duration\.sum": "ns",
    r"launch__grid_size": "blocks",
    r"launch__waves_per_multiprocessor": "rounds",
    r"(smsp__cycles_active|sm__cycles_active)\.avg": "active cycles",
    r"sm__pipe_tensor\w*cycles_active\.avg\.pct_of_peak_sustained_active": "tensor cores, %",
    r"smsp__issue_active\.avg\.pct_of_peak_sustained_active|smsp__issue_active\.avg\.per_cycle_active": "issue",
    r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed": "memory, %",
    r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed": "second cache, %",
}
STALLS = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
METHOD = (
    "Nsight Compute's counters of every launch of one call, alone, --cache-control all --clock-control none, behind a call that warmed up. Nothing is "
    "read ahead of such a launch, so that it takes longer than in a graph. Stalls: warps of a scheduler that wait, for each instruction."
)


def compare(ctx):
    if "UNSLOTH_PROFILED" in os.environ:
        calls(ctx)
        return
    record = Record("products_profile", ctx.library, METHOD)
    command = [os.environ.get("NCU", "ncu"), "--csv", "--page", "raw", "--cache-control", "all", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--target-processes", "all"]
    for section in SECTIONS.split(","):
        command += ["--section", section]
    run = subprocess.run(
        [*command, sys.executable, str(pathlib.Path(__file__).parent), "profiled"],
        env={**os.environ, "UNSLOTH_PROFILED": "1"}, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    print(run.stderr[-2000:], file=sys.stderr)
    run.check_returncode()
    lines = run.stdout.splitlines()
    cases = iter([line.removeprefix("case ") for line in lines if line.startswith("case ")])
    for launch in rows_of("\n".join(line for line in lines if line.startswith('"'))):
        # Before the launches of a case one of torch's fills a tensor.
        if "elementwise" in launch["kernel"]:
            case = next(cases)
            continue
        record.result["rows"].append({"case": case, **launch})
        print(case, launch, flush=True)
    record.save()


def rows_of(text):
    """Of each launch, in order, what is kept."""
    names, units, *rows = csv.reader(io.StringIO(text))
    found = []
    for row in rows:
        of = dict(zip(names, row, strict=True))
        launch = {"kernel": of["Kernel Name"].split("(")[0].split("<")[0]}
        for name, unit in zip(names, units, strict=True):
            short = next((short for pattern, short in KEPT.items() if re.fullmatch(pattern, name)), None)
            if short is not None:
                launch.setdefault(short, " ".join(filter(None, (of[name], unit))))
        stalls = [(float(of[name] or 0), match[1]) for name in names if (match := STALLS.fullmatch(name))]
        launch["stalls"] = {name: round(value, 2) for value, name in sorted(stalls, reverse=True)[:4]}
        found.append(launch)
    return found


def calls(ctx):
    mark = torch.empty(1, device="cuda")
    for name, rows, n, k in CASES:
        x, out = randn(rows, k), torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        plain = randn(n, k) * k**-0.5
        if name == "bf16":
            call = lambda: torch.mm(x, plain.t(), out=out)
        elif name in FORMATS:
            made = blocks(name, n, k)
            call = ctx.op("linear", x=x, weight=described_blocks(ctx, made, name, n, k), out=out)
        else:
            codes, scale, _ = quantized(ctx, plain, name)
            weight, keep = described_codes(ctx, codes, name, n, k, scale)
            call = ctx.op("linear", x=x, weight=weight, out=out)
        call()
        torch.cuda.synchronize()
        print(f"case {name} m{rows} n{n} k{k}", flush=True)
        torch.cuda.profiler.start()
        mark.fill_(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
