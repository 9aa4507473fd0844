"""Compiles kernels for the harnesses. NVCC names the compiler; what did not change is kept.

    build.py DIR                        the kernels that `--example dev -- DIR` wrote: for attention.py and linear.py
    build.py DIR --arch 80 --only simt  some of them, for another architecture
    build.py DIR - [FLAGS]              Hopper's attention as it ships, for hopper/; FLAGS such as -DUNSLOTH_JITTER go to the compiler
    build.py DIR LIST [FLAGS]           tiles to try, a line of LIST each:

        name dtype mask softcap tile [flags]   (the tile as in config.h, without spaces)

Writes cubins, and for Hopper kernels.json and the headers that the kernels were compiled with. Prints registers, and what spills.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.dirname(HERE)
SOURCES = os.path.join(KERNELS, "cuda")
# By its real path: it looks for headers beside that, not beside a link.
NVCC = os.environ.get("NVCC") or os.path.realpath(shutil.which("nvcc") or "nvcc")
TYPES = {"bf16": "__nv_bfloat16", "f16": "__half"}


def usage_of(log):
    """Registers, and whether there is a stack frame or anything spilled."""
    spills = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)]
    return re.findall(r"Used (\d+) registers", log), any(spills)


def compile_one(directory, arch, kernel):
    """A CubeCL kernel, in a file of its own."""
    name = kernel["name"]
    source, cubin, stamp = (os.path.join(directory, name + end) for end in (".cu", f".{arch}.cubin", f".{arch}.stamp"))
    command = [NVCC, "-cubin", f"-arch=sm_{arch}", "-O3", "-std=c++17", "-diag-suppress=68,177", "-Xptxas", "-v", *kernel["flags"]]
    digest = hashlib.sha256((" ".join(command) + open(source).read()).encode()).hexdigest()
    if os.path.exists(stamp) and open(stamp).read().startswith(digest):
        return open(stamp).read().split("\n", 1)[1]
    done = subprocess.run([*command, "-o", cubin, source], capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        return f"{name}: FAILED {log[:2000]}"
    registers, spills = usage_of(log)
    text = f"{name} sm_{arch}: {registers[0]} registers" + (" SPILLS" if spills else "")
    with open(stamp, "w") as f:
        f.write(digest + "\n" + text)
    return text


def portable(directory, arch, only):
    kernels = [k for k in json.load(open(os.path.join(directory, "kernels.json"))) if only in k["name"]]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda k: compile_one(directory, arch, k), kernels):
            print(text, flush=True)


def headers(directory):
    """Writes what the kernels' crate generates for CUDA C++ to DIR/include."""
    include = os.path.join(directory, "include")
    manifest = os.path.join(KERNELS, "Cargo.toml")
    subprocess.run(["cargo", "run", "--quiet", "--manifest-path", manifest, "--example", "headers", "--", include], check=True)
    return include


def nvcc_hopper(directory, name, source, flags):
    """Compiles to DIR/NAME.cubin, and gives the compiler's log."""
    command = [NVCC, "-std=c++20", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-I", os.path.join(directory, "include"),
               "-I", SOURCES, "-Xptxas", "-v", *flags, "-o", os.path.join(directory, name + ".cubin"), source]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        sys.exit(log)
    return log


def tile(directory, name, dtype, mask, softcap, shape, *flags):
    """A tile to try, and what is known of its kernel."""
    source = os.path.join(directory, name + ".cu")
    with open(source, "w") as f:
        f.write(f'#include "attention/forward/forward.cuh"\n'
                f"namespace unsloth {{ constexpr TileConfig kVariant = {{{shape}}}; }}\n"
                f"UNSLOTH_ATTENTION_FORWARD({name}, {TYPES[dtype]}, kVariant, Mask::{mask}, {softcap}, kUsual)\n")
    log = nvcc_hopper(directory, name, source, flags)
    registers, spills = usage_of(log)
    print(name, "registers", registers, "SPILLS" if spills else "", re.findall(r"C75\d\d", log), flush=True)
    fields = [int(x) if x.isdigit() else x for x in shape.split(",")]
    return dict(name=name, file=name + ".cubin", dtype=dtype, mask=mask, softcap=softcap == "true",
                head_dim=fields[0], head_dim_v=fields[1])


def shipped(directory, source, flags):
    """A file of attention/forward, and what its names tell of its kernels."""
    stem = os.path.splitext(os.path.basename(source))[0]
    infos = []
    for name in re.findall(r"Compiling entry function '(\w+)'", nvcc_hopper(directory, stem, source, flags)):
        parts = re.match(r"attention_forward_(bf16|f16)_hd(\d+)(?:v(\d+))?_(full|causal|window|softcap)(_short)?$", name)
        infos.append(dict(name=name, file=stem + ".cubin", dtype=parts[1], head_dim=int(parts[2]), head_dim_v=int(parts[3] or parts[2]),
                          softcap=parts[4] == "softcap", mask={"full": "kNone", "causal": "kCausal"}.get(parts[4], "kWindow")))
    return infos


def hopper(directory, listing, flags):
    os.makedirs(directory, exist_ok=True)
    headers(directory)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        if listing == "-":
            sources = sorted(glob.glob(os.path.join(SOURCES, "attention", "forward", "*.cu")))
            infos = [i for found in pool.map(lambda s: shipped(directory, s, flags), sources) for i in found]
        else:
            lines = [line.split("#")[0].split() for line in open(listing)]
            infos = list(pool.map(lambda line: tile(directory, *line, *flags), filter(None, lines)))
    json.dump(infos, open(os.path.join(directory, "kernels.json"), "w"), indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("listing", nargs="?")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--only", default="")
    arguments, rest = parser.parse_known_args()
    if arguments.listing:
        hopper(arguments.directory, arguments.listing, rest)
    else:
        portable(arguments.directory, arguments.arch, arguments.only)
