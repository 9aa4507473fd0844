"""Compiles kernels for the harness: build.py DIR [LIST] [FLAGS]. Writes cubins and kernels.json to DIR. NVCC names the compiler.

Without LIST (or with -) what ships, as the library's build does; FLAGS such as -DUNSLOTH_JITTER go to the compiler. LIST holds lines of

    name dtype mask softcap tile [flags]   (the tile as in config.h, without spaces)

for experiments with tiles.
"""

import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
NVCC = os.environ.get("NVCC", "nvcc")
FLAGS = ["-std=c++20", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-I", ROOT, "-Xptxas", "-v"]
TYPES = {"bf16": "__nv_bfloat16", "f16": "__half"}


def compile_one(directory, name, dtype, mask, softcap, tile, extra=()):
    source = os.path.join(directory, name + ".cu")
    with open(source, "w") as f:
        f.write(f'#include "attention/forward.cuh"\n'
                f"namespace unsloth {{ constexpr TileConfig kVariant = {{{tile}}}; }}\n"
                f"UNSLOTH_ATTENTION_FORWARD({name}, {TYPES[dtype]}, kVariant, Mask::{mask}, {softcap}, kUsual)\n")
    done = subprocess.run([NVCC, *FLAGS, *extra, "-o", os.path.join(directory, name + ".cubin"), source],
                          capture_output=True, text=True)
    log = done.stdout + done.stderr
    trouble = re.findall(r"C75\d\d|error.*", log)
    spills = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)]
    registers = re.findall(r"Used (\d+) registers", log)
    print(name, "registers", registers, "TROUBLE" if trouble or any(spills) else "", trouble[:2], spills, flush=True)
    if done.returncode:
        print(log[:3000])
        return None
    fields = [int(x) if x.isdigit() else x for x in tile.split(",")]
    return dict(name=name, file=name + ".cubin", dtype=dtype, mask=mask, softcap=softcap == "true",
                head_dim=fields[0], head_dim_v=fields[1])


def compile_file(directory, source, extra):
    """A file of attention/, and what its names tell of its kernels."""
    cubin = os.path.splitext(os.path.basename(source))[0] + ".cubin"
    done = subprocess.run([NVCC, *FLAGS, *extra, "-o", os.path.join(directory, cubin), source], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    infos = []
    for name in re.findall(r"Compiling entry function '(\w+)'", done.stdout + done.stderr):
        parts = re.match(r"attention_forward_(bf16|f16)_hd(\d+)(?:v(\d+))?_(full|causal|window|softcap)(_short)?$", name)
        infos.append(dict(name=name, file=cubin, dtype=parts[1], head_dim=int(parts[2]), head_dim_v=int(parts[3] or parts[2]),
                          softcap=parts[4] == "softcap", mask={"full": "kNone", "causal": "kCausal"}.get(parts[4], "kWindow")))
    return infos


def main(directory, listing="-", *flags):
    os.makedirs(directory, exist_ok=True)
    if listing == "-":
        sources = sorted(glob.glob(os.path.join(ROOT, "attention", "*.cu")))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            infos = [i for found in pool.map(lambda s: compile_file(directory, s, flags), sources) for i in found]
        json.dump(infos, open(os.path.join(directory, "kernels.json"), "w"), indent=1)
        return
    jobs = []
    for line in open(listing):
        line = line.split("#")[0].split()
        if line:
            jobs.append(line)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda job: compile_one(directory, *job[:5], extra=job[5:]), jobs))
    json.dump([i for i in infos if i], open(os.path.join(directory, "kernels.json"), "w"), indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
