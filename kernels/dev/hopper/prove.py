"""Proves the kernels on a GPU and writes down what came of it: prove.py RECORD.json [BUILD [REPEATS]]

BUILD holds the kernels as they ship (BUILD/plain) and with random delays wherever they synchronise (BUILD/jitter), and is made with
build.py where it is missing. With the delays, every bf16 kernel repeats a launch on batches of one length, packed ones and paged ones:
every result must have the first one's bits, and that be right. As shipped, they compute long contexts and more than 2^31 elements.
check.py and the library's tests have the rest.
"""

import json
import os
import subprocess
import sys
import time

import torch

import bench
import check
import check_long
from driver import Kernel

HERE = os.path.dirname(os.path.abspath(__file__))


def build(directory):
    for name, flags in (("plain", []), ("jitter", ["-DUNSLOTH_JITTER"])):
        where = os.path.join(directory, name)
        if not os.path.exists(os.path.join(where, "kernels.json")):
            subprocess.run([sys.executable, os.path.join(HERE, "..", "build.py"), where, "-", *flags], check=True)


def main(record, directory="build/kernels", repeats="2000"):
    build(directory)
    result = {"date": time.strftime("%Y-%m-%d"), "command": "python3 kernels/dev/hopper/prove.py", "device": bench.gpu_state(),
              "torch": torch.__version__, "cuda": torch.version.cuda, "method": __doc__, "repeats": {}, "long": {}}
    failures = 0

    def note(section, name, good, text):
        nonlocal failures
        failures += not good
        result[section][name] = text if good else "WRONG: " + text
        print(name, result[section][name], flush=True)
        json.dump(result, open(record, "w"), indent=1)

    jitter = os.path.join(directory, "jitter")
    for info in json.load(open(os.path.join(jitter, "kernels.json"))):
        if info["dtype"] == "bf16":
            kernel = Kernel(os.path.join(jitter, info["file"]), info["name"])
            for form in ("batched", "packed", "paged"):
                note("repeats", f"{info['name']}, {form}", *check.run_repeats(kernel, info, int(repeats), form))
    for case in check_long.CASES:
        good, text = check_long.run(os.path.join(directory, "plain"), *case)
        name, text = text.split(": ")
        note("long", name, good, text)
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
