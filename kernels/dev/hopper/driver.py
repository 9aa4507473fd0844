"""Launches the attention kernels from Python: the CUDA driver through ctypes, tensors from torch."""

import ctypes
import math
import os
import random
import re
import sys
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import torch

import choose

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from launcher import allow_shared, check, cuda, function, launch, load

NO_LIMIT = 1 << 30


class TensorMap(ctypes.Structure):
    _fields_ = [("opaque", c_uint64 * 16)]


def structs(directory):
    """The argument struct and the launch struct of the header that build.py left in DIR/include, as ctypes."""
    with open(os.path.join(directory, "include", "attention", "forward", "arguments.h")) as f:
        header = f.read()
    types = {"CUtensorMap": TensorMap, "uint64_t": c_uint64, "int64_t": c_int64, "uint32_t": c_uint32, "int32_t": c_int32,
             "float": c_float}
    found = []
    for name in ("AttentionForwardArguments", "AttentionForwardLaunch"):
        body = re.search(r"struct (?:alignas\(\d+\) )?%s {\n(.*?)};" % name, header, re.S)[1]
        fields = re.findall(r"^  (?:const )?([\w ]+?) (\*?)(\w+);", body, re.M)
        fields = [(field, c_void_p if pointer else types[kind]) for kind, pointer, field in fields]
        found.append(type(name, (ctypes.Structure,), {"_fields_": fields}))
    offsets = re.findall(r"offsetof\(AttentionForwardArguments, (\w+)\) == (\d+)", header)
    assert [(field, getattr(found[0], field).offset) for field, _ in found[0]._fields_] == [(f, int(n)) for f, n in offsets]
    return found


def encode(map_, tensor_dtype, pointer, extents, strides, box):
    """A tiled tensor map: extents and box innermost first, strides in bytes from dimension 1."""
    rank = len(extents)
    kind = {torch.float16: 6, torch.bfloat16: 9}[tensor_dtype]
    check(cuda.cuTensorMapEncodeTiled(
        byref(map_), c_int32(kind), c_uint32(rank), c_void_p(pointer),
        (c_uint64 * rank)(*extents), (c_uint64 * (rank - 1))(*strides),
        (c_uint32 * rank)(*box), (c_uint32 * rank)(*([1] * rank)),
        c_int32(0),  # no interleave
        c_int32(3),  # 128-byte swizzle
        c_int32(3),  # promote to 256-byte L2 fetches
        c_int32(0)))  # outside reads as zero


class Kernel:
    """One kernel of a cubin, with what it exports of its launch."""

    def __init__(self, path, name):
        self.name = name
        with open(path, "rb") as f:
            self.module = load(f.read())
        self.function = function(self.module, name)
        self.arguments, launch_struct = structs(os.path.dirname(path) or ".")
        self.launch = self.global_(f"{name}_launch", launch_struct)
        allow_shared(self.function, self.launch.shared_bytes)
        self.counter = torch.randint(1 << 62, (2,), dtype=torch.int64, device="cuda")
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def global_(self, name, kind):
        """A copy of a variable of the module, as a ctypes `kind`."""
        address, size, value = c_uint64(), c_size_t(), kind()
        check(cuda.cuModuleGetGlobal_v2(byref(address), byref(size), self.module, name.encode()))
        check(cuda.cuMemcpyDtoH_v2(byref(value), address, c_size_t(ctypes.sizeof(kind))))
        return value

    def prepare(self, q, k, v, o, lse=None, *, scale=None, causal=False, window=None, softcap=0.0,
                sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                max_seqlen_k=None, seqlens_k=None, block_table=None, pack=1, longest_first=None,
                pairs_in_l2=None):
        """Returns a function that launches on the current stream.

        q, o: [batch, seq, heads, dim] or [tokens, heads, dim]; k, v: likewise, or
        [pages, page, heads, dim] with a block_table.
        """
        ragged_q = cu_seqlens_q is not None
        ragged_k = cu_seqlens_k is not None
        if ragged_q:
            q, o = q.unsqueeze(0), o.unsqueeze(0)
        if ragged_k:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        batch = len(cu_seqlens_q) - 1 if ragged_q else q.shape[0]
        heads_q, heads_kv, dim, dim_v = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        seqlen_q = max_seqlen_q if ragged_q else q.shape[1]
        seqlen_k = max_seqlen_k or k.shape[1]
        scale = scale if scale is not None else 1 / math.sqrt(dim)
        at = self.launch
        # Aligned as tensor maps demand.
        memory = ctypes.create_string_buffer(ctypes.sizeof(self.arguments) + 256)
        p = self.arguments.from_buffer(memory, -ctypes.addressof(memory) % 128)
        for map_, x in ((p.q, q), (p.o, o)):
            sb, ss, sh, _ = (2 * s for s in x.stride())
            encode(map_, x.dtype, x.data_ptr(),
                   (x.shape[3], pack, x.shape[1], heads_q // pack, x.shape[0]),
                   (sh, ss, sh * pack, max(sb, 16)), (64, pack, 64 // pack, 1, 1))
        rows = at.block_n
        if block_table is not None:
            while rows > k.shape[1] or k.shape[1] % rows or at.block_n % rows:
                rows -= 8
            p.block_table, p.block_table_stride, p.page_log2 = (
                block_table.data_ptr(), block_table.stride(0), k.shape[1].bit_length() - 1)
        p.kv_box_rows = rows
        for map_, x in ((p.k, k), (p.v, v)):
            sb, ss, sh, _ = (2 * s for s in x.stride())
            encode(map_, x.dtype, x.data_ptr(), (x.shape[3], x.shape[1], heads_kv, x.shape[0]),
                   (ss, sh, max(sb, 16)), (64, rows, 1, 1))
        p.o_pointer = o.data_ptr()
        p.o_batch_stride, p.o_sequence_stride, p.o_head_stride = o.stride()[:3]
        if lse is not None:
            p.lse = lse.data_ptr()
            p.lse_batch_stride, p.lse_head_stride, p.lse_sequence_stride = (0, *lse.stride()) if ragged_q else lse.stride()
        for name, x in (("sinks", sinks), ("cu_seqlens_q", cu_seqlens_q),
                        ("cu_seqlens_k", cu_seqlens_k), ("seqlens_k", seqlens_k)):
            if x is not None:
                setattr(p, name, x.data_ptr())
        p.batch, p.heads_q, p.heads_kv, p.head_dim_v = batch, heads_q, heads_kv, dim_v
        p.seqlen_q, p.seqlen_k, p.pack_log2 = seqlen_q, seqlen_k, pack.bit_length() - 1
        left, right = window if window is not None else (-1, -1)
        p.window_left = left if left >= 0 else NO_LIMIT
        p.window_right = 0 if causal else (right if right >= 0 else NO_LIMIT)
        p.row_blocks = -(-seqlen_q * pack // at.block_m)
        pairs = batch * heads_q // pack
        p.tiles = p.row_blocks * pairs
        p.ragged = ragged_q or ragged_k or seqlens_k is not None
        if ragged_q:
            p.tiles = min(p.tiles, (q.shape[1] * pack // at.block_m + batch) * (heads_q // pack))
        p.chunk_from = p.tiles
        p.keys_in_l2 = choose.keys_in_l2(dim + dim_v)
        if longest_first is None:
            longest_first = causal or window is not None or ragged_q
        if longest_first:
            p.pairs_in_l2 = min(pairs, choose.pairs_in_l2(
                p.row_blocks, seqlen_k * (dim + dim_v) * 2, heads_q // pack // heads_kv))
        if pairs_in_l2 is not None:
            p.pairs_in_l2 = min(pairs, pairs_in_l2)
        grid = min(p.tiles, self.processors)
        if p.tiles > grid:
            p.tile_counter = self.counter.data_ptr()
            p.launch_tag = random.getrandbits(64) | 1
        p.scale_log2 = (softcap if softcap else scale) * math.log2(math.e)
        p.softcap_scale = scale / softcap if softcap else 0.0
        arguments = (c_void_p * 1)(ctypes.addressof(p))
        keep = (memory, q, k, v, o, lse, sinks, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table)

        def run():
            launch(self.function, grid, at.threads, at.shared_bytes, arguments)

        run.keep = keep
        return run
