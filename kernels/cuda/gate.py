"""Builds the Hopper kernels and holds them to what their speed rests on: gate.py OUT_DIR.

Fails on a ptxas warning of serialised wgmma (C75xx), a spill, a stack frame, or SASS that does not look as it should:
local memory, wgmma outside its few groups, or operand descriptors put together between two wgmma of a group.
Writes the cubins, resources.json (registers and instruction counts per kernel) and kernels.json (for dev/).
NVCC names the compiler, NVDISASM the disassembler (without one, the SASS is not looked at).
"""

import concurrent.futures
import glob
import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
NVCC = os.environ.get("NVCC") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
NVDISASM = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
FLAGS = ["-std=c++20", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
TRANSITIONS = 5  # groups of wgmma: Q K^T and P V outside and inside the loop, and a causal tile's half block


def compile_(source, directory):
    cubin = os.path.join(directory, os.path.splitext(os.path.basename(source))[0] + ".cubin")
    done = subprocess.run([NVCC, *FLAGS, "-o", cubin, source], capture_output=True, text=True)
    return cubin, done.returncode, done.stdout + done.stderr


def resources(log):
    """Per kernel, from ptxas -v."""
    found = {}
    for entry in re.split(r"Compiling entry function '", log)[1:]:
        name = entry.split("'")[0]
        frame, stores, loads = map(int, re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry).groups())
        found[name] = dict(registers=int(re.search(r"Used (\d+) registers", entry)[1]), stack=frame,
                           spill_stores=stores, spill_loads=loads)
    return found


def disassemble(cubin):
    """Opcodes per kernel, in order."""
    text = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    for section in re.split(r"^\.text\.", text, flags=re.M)[1:]:
        name = section.split(":")[0]
        yield name, re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", section)


def look(name, ops, record, complain):
    wgmma = [i for i, op in enumerate(ops) if op.startswith("HGMMA")]
    waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in ops)
    record.update(wgmma=len(wgmma), waits=waits, instructions=len(ops))
    if any(op.startswith(("LDL", "STL")) for op in ops):
        complain(f"{name}: local memory")
    if not any(op.startswith("USETMAXREG") for op in ops):
        complain(f"{name}: setmaxnreg is missing")
    if waits > TRANSITIONS or not wgmma:
        complain(f"{name}: {len(wgmma)} wgmma in {waits} groups")
    # Descriptors belong in uniform registers; R2UR between two wgmma says that they are not.
    between = sum("R2UR" in ops[a:b] for a, b in zip(wgmma, wgmma[1:]) if b - a < 12)
    record["descriptors_moved"] = between
    if between:
        complain(f"{name}: {between} descriptors go through ordinary registers")


def main(directory):
    os.makedirs(directory, exist_ok=True)
    complaints, record, kernels = [], {}, []
    sources = sorted(glob.glob(os.path.join(HERE, "attention", "*.cu")))
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        built = list(pool.map(lambda s: compile_(s, directory), sources))
    for cubin, status, log in built:
        if status:
            print(log)
            sys.exit(f"{cubin}: not compiled")
        complaints += sorted(set(re.findall(r"\(C75\d\d\).*", log)))
        for name, used in resources(log).items():
            record[name] = used
            if used["stack"] or used["spill_stores"] or used["spill_loads"]:
                complaints.append(f"{name}: {used}")
            parts = re.match(r"attention_forward_(bf16|f16)_hd(\d+)(?:v(\d+))?_(full|causal|window|softcap)(_short)?", name)
            kernels.append(dict(
                name=name, file=os.path.basename(cubin), dtype=parts[1], head_dim=int(parts[2]),
                head_dim_v=int(parts[3] or parts[2]), softcap=parts[4] == "softcap",
                mask={"full": "kNone", "causal": "kCausal"}.get(parts[4], "kWindow")))
        if NVDISASM:
            for name, ops in disassemble(cubin):
                if name in record:
                    look(name, ops, record[name], complaints.append)
    json.dump(record, open(os.path.join(directory, "resources.json"), "w"), indent=1, sort_keys=True)
    json.dump(kernels, open(os.path.join(directory, "kernels.json"), "w"), indent=1)
    for line in complaints:
        print("GATE", line)
    print(f"{len(record)} kernels, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
