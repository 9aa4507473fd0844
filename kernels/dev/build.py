"""Compiles the kernels that `--example dev` wrote to DIR: build.py DIR [ARCH] [FILTER]. NVCC names the compiler.

Prints registers, and what spills; keeps what did not change.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys

NVCC = os.environ.get("NVCC", "nvcc")


def compile_one(directory, arch, kernel):
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
    spills = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)]
    registers = re.findall(r"Used (\d+) registers", log)[0]
    text = f"{name} sm_{arch}: {registers} registers" + (f" SPILLS {spills}" if any(spills) else "")
    with open(stamp, "w") as f:
        f.write(digest + "\n" + text)
    return text


def main(directory, arch="90a", only=""):
    kernels = [k for k in json.load(open(os.path.join(directory, "kernels.json"))) if only in k["name"]]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda k: compile_one(directory, arch, k), kernels):
            print(text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
