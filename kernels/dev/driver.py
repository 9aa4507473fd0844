"""Launches catalog kernels from Python, by the layout in kernels.json; tensors are torch's."""

import ctypes
import json
import os
import struct

import torch

from launcher import check, cuda, function, launch, load


class Kernel:
    def __init__(self, directory, info):
        self.name, self.info, self.choices = info["name"], info, info["choices"]
        with open(os.path.join(directory, info["name"] + ".cubin"), "rb") as f:
            self.function = function(load(f.read()), info["name"], info["shared_bytes"])
        blocks = ctypes.c_int()
        check(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks), self.function, info["threads"], ctypes.c_size_t(info["shared_bytes"])))
        self.blocks_per_processor = blocks.value

    def prepare(self, grid, buffers, scalars):
        """buffers: tensors, addresses or None by name; scalars: numbers by name. Returns a function that launches on the current stream."""
        info = self.info
        unknown = (set(buffers) - set(info["buffers"])) | (set(scalars) - {name for name, _, _ in info["scalars"]})
        assert not unknown, unknown
        address = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else (x or 0)
        pointers = [ctypes.c_uint64(address(buffers.get(name))) for name in info["buffers"]]
        block = ctypes.create_string_buffer(info["scalars_size"])
        for name, kind, offset in info["scalars"]:
            struct.pack_into({"f32": "<f", "u32": "<I", "u64": "<Q"}[kind], block, offset, scalars.get(name, 0))
        params = (ctypes.c_void_p * (len(pointers) + 1))(*[ctypes.addressof(p) for p in pointers], ctypes.addressof(block))
        keep = (buffers, pointers, block)

        def run(keep=keep):
            launch(self.function, grid, info["threads"], info["shared_bytes"], params)

        return run


def load_all(directory, only=""):
    with open(os.path.join(directory, "kernels.json")) as f:
        return {k["name"]: Kernel(directory, k) for k in json.load(f) if only in k["name"]
                and os.path.exists(os.path.join(directory, k["name"] + ".cubin"))}


def graph_us(run, calls, replays=5):
    """Median microseconds of one of `calls` calls that run() makes, from a graph, so that the host does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times[1:])[len(times[1:]) // 2]
