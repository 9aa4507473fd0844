"""Runs each kernel and each peer once on one shape, for a profiler: once.py DIR head_dim causal sequence [filter]."""

import sys

import torch

import bench

directory, d, causal, s = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4])
only = sys.argv[5].split(",") if len(sys.argv) > 5 else [""]
b, h = 16384 // s, bench.HEADS[d]
bench.BURST = 1
qs, k, v = bench.tensors(b, s, h, d)
runs = {}
for info in bench.load(directory):
    if info["head_dim"] == d and info["mask"] == bench.MASKS[causal] and any(o in info["name"] for o in only):
        runs[info["name"]] = bench.our_burst(info["kernel"], qs, k, v, causal)
runs["cudnn"] = bench.cudnn_burst(qs, k, v, causal)
runs["fa3"] = bench.fa3_burst(qs, k, v, causal)
for name, run in runs.items():
    run()
    torch.cuda.synchronize()
