"""Runs a kernel built with -DUNSLOTH_TRACE on a shape and writes down when block 0's warpgroups passed
which mark: trace.py OUT DIR sequence [filter]."""

import ctypes
import json
import sys

import torch

import bench
import driver

out, directory, s = sys.argv[1], sys.argv[2], int(sys.argv[3])
result = {}
for info in json.load(open(f"{directory}/kernels.json")):
    if len(sys.argv) > 4 and sys.argv[4] not in info["name"]:
        continue
    d = info["head_dim"]
    b, h = 16384 // s, bench.HEADS[d]
    kernel = driver.Kernel(f"{directory}/{info['file']}", info["name"])
    qs, k, v = bench.tensors(b, s, h, d)
    run = bench.our_burst(kernel, qs, k, v, info["mask"] == "kCausal")
    run()
    torch.cuda.synchronize()
    result[info["name"]] = [
        [list(note) for note in group] for group in kernel.global_("unsloth_trace", ctypes.c_uint32 * 2 * 2048 * 4)]
json.dump(result, open(out, "w"))
