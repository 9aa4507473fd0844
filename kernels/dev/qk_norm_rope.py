"""Checks variants of the kernels of QK-norm and RoPE that walk over tokens, and times how their blocks may share them out.

Usage: qk_norm_rope.py OUT.json DIR [PART...], a part being forward or backward. DIR has include/ and forward.VARIANT.cubin and
backward.VARIANT.cubin. Microseconds of one launch, a graph of launches on sets that exceed the cache, contenders by turns; `copy` moves as
many bytes. A name ends in blocks of a multiprocessor, and warps that share a token's queries and keys.
"""

import ctypes
import glob
import itertools
import json
import os
import re
import sys

import torch

from launcher import check, cuda, function, launch, load
from rings import BF16, SMS, arguments_of, copies, timed

THREADS, EPSILON, THETA = 128, 1e-6, 1e6
# Heads of queries and of keys, their dimension, tokens.
LARGE = [(32, 8, 128, 16384), (8, 4, 256, 16384), (64, 8, 64, 16384)]
SMALL = [(32, 8, 128, 512), (32, 8, 128, 64), (32, 8, 128, 2048), (8, 4, 256, 512), (64, 8, 64, 512), (32, 8, 128, 1)]
ODD = [(5, 3, 128, 77), (1, 1, 256, 3), (9, 17, 64, 1001)]


def shared_bytes(module, name):
    """What the kernel says of its launch, last."""
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, f"{name}_launch".encode()))
    words = (ctypes.c_int32 * (size.value // 4))()
    check(cuda.cuMemcpyDtoH_v2(words, address, size))
    return words[-1]


def resident(kernel, shared):
    count = ctypes.c_int()
    check(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(count), kernel, THREADS, ctypes.c_size_t(shared)))
    return count.value


def divisor(p, size):
    shift = max(size - 1, 0).bit_length()
    p.tokens_per_batch, p.tokens_per_batch_shift = size, shift
    p.tokens_per_batch_multiplier = ((1 << 32) * ((1 << shift) - size)) // size + 1


def strides(p, name, t):
    for dim, of in enumerate(("batch", "token", "head")):
        setattr(p, f"{name}_{of}", t.stride(dim) * t.element_size())


class Case:
    """A set of tensors: of each, queries and keys."""

    def __init__(self, shape, batch, backward):
        heads, dim, tokens = shape[:2], shape[2], shape[3]
        of = lambda n: (batch, tokens // batch, n, dim)
        random = lambda: [torch.randn(of(n), device="cuda").bfloat16() for n in heads]
        self.x, self.dout = random(), random() if backward else [None, None]
        self.to = [torch.full(of(n), float("nan"), device="cuda", dtype=torch.bfloat16) for n in heads]
        self.weights = [torch.randn(dim, device="cuda").bfloat16() for _ in heads]
        self.shape, self.batch = shape, batch
        self.frequencies = (1.0 / THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
        self.positions = torch.randint(0, 4096, (tokens,), device="cuda") if tokens < 4096 else None

    def expected(self):
        """The outputs, or the gradients of inputs, then those of weights."""
        _, _, dim, tokens = self.shape
        stands = self.positions if self.positions is not None else torch.arange(tokens // self.batch, device="cuda").repeat(self.batch)
        angles = stands[:, None].float() * self.frequencies.cuda()
        cos, sin = (f(angles.double()).view(self.batch, -1, 1, dim // 2) for f in (torch.cos, torch.sin))
        rows, sums = [], []
        for x, dout, weight in zip(self.x, self.dout, self.weights):
            x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
            a, b = torch.nn.functional.rms_norm(x, (dim,), weight, EPSILON).chunk(2, -1)
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            if dout is None:
                rows.append(y.detach())
            else:
                dx, dweight = torch.autograd.grad(y, (x, weight), dout.double())
                rows.append(dx)
                sums.append(dweight)
        return rows, sums

    def arguments(self, Arguments, grid, parts):
        """Of a launch of so many blocks of queries and of keys."""
        p = Arguments()
        keep = []
        for i, name in enumerate("qk"):
            shares = torch.full((grid[i], self.shape[2]), float("nan"), device="cuda")
            keep.append(shares)
            for field, t in ((name, self.x[i]), (f"{name}_to", self.to[i]), (f"d{name}_out", self.dout[i])):
                if t is not None:
                    setattr(p, field, t.data_ptr())
                    strides(p, field, t)
            setattr(p, f"{name}_weight", self.weights[i].data_ptr())
            setattr(p, f"{name}_weight_dtype", BF16)
            setattr(p, f"{name}_heads", self.shape[i])
            setattr(p, f"d{name}_weights", shares.data_ptr())
            setattr(p, f"{name}_parts_log2", parts[i].bit_length() - 1)
        p.q_blocks, p.tokens = grid[0], self.shape[3]
        divisor(p, self.shape[3] // self.batch)
        if self.positions is not None:
            p.positions, p.position_kind, p.position_token = self.positions.data_ptr(), 2, 1
            p.position_batch = self.shape[3] // self.batch
        p.epsilon, p.inverse_length = EPSILON, 1 / self.shape[2]
        p.scale, p.direction = 1.0, -1.0 if self.dout[0] is not None else 1.0
        for i, frequency in enumerate(self.frequencies.tolist()):
            p.frequencies[i] = frequency
        return p, keep


def grids(shape, per_multiprocessor):
    """{name: (blocks, parts)}: ways to share tokens out."""
    heads = 32 // (shape[2] // 16)
    items = [-(-n // heads) for n in shape[:2]]
    found = {}
    large = shape[3] >= 8192
    fills = [per_multiprocessor * n for n in ((1, 2, 4, 8, 1000) if large else (1, 2))]
    for fill, q, k in itertools.product(fills, (1, 2, 4, 8), (1, 2, 4)):
        if q >= 2 * items[0] or k >= 2 * items[1] or (large and (k > 2 or k > q)):
            continue
        blocks = fill * SMS
        share = [min(max(round(blocks * n / sum(items)), 1), blocks - 1) for n in items]
        grid = tuple(min(a, -(-shape[3] * parts // 4)) for a, parts in zip(share, (q, k)))
        found.setdefault((grid, (q, k)), f"{fill} {q}+{k}")
    return {name: key for key, name in found.items()}


def part(directory, result, backward):
    name = "backward" if backward else "forward"
    Arguments = arguments_of(os.path.join(directory, "include"), "qk_norm_rope", "QkNormRopeRingArguments")
    fields = [*Arguments._fields_, ("frequencies", ctypes.c_float * 128)]
    Arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    modules = {}
    for path in sorted(glob.glob(os.path.join(directory, f"{name}.*.cubin"))):
        with open(path, "rb") as f:
            modules[re.search(r"\w+\.(.*)\.cubin", os.path.basename(path))[1]] = load(f.read())
    for shape in ODD + SMALL + LARGE:
        heads, dim, tokens = shape[0] + shape[1], shape[2], shape[3]
        moved = heads * dim * tokens * (6 if backward else 4)
        sets = 1 if shape in ODD else max(2, min(24, (200 << 20) // moved))
        cases = [Case(shape, 4 if tokens >= 8192 else 1, backward) for _ in range(sets)]
        rows, sums = cases[0].expected()
        contenders = {"copy": copies(moved, sets)}
        for variant, module in modules.items():
            symbol = f"qk_norm_rope_ring_{name}_bf16_{dim}"
            shared = shared_bytes(module, symbol)
            kernel = function(module, symbol, shared)
            for way, (grid, parts) in grids(shape, resident(kernel, shared)).items():
                runs = []
                for case in cases:
                    p, keep = case.arguments(Arguments, grid, parts)
                    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(p))
                    run = lambda of=(kernel, sum(grid), THREADS, shared, pointers), keep=(p, keep): launch(*of)
                    runs.append((run, keep))
                for t in cases[0].to:
                    t.fill_(float("nan"))
                runs[0][0]()
                torch.cuda.synchronize()
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(cases[0].to, rows)]
                errors += [((a.double().sum(0) - b).norm() / b.norm()).item() for a, b in zip(runs[0][1], sums)]
                if not all(error < 4e-3 for error in errors):
                    print("WRONG", name, shape, variant, way, errors)
                contenders[f"{variant} {way}"] = [run for run, _ in runs]
        del rows, sums
        if shape in ODD:
            continue
        times = timed(contenders)
        result[f"{name} {shape}"] = times
        print(name, shape, "copy", times["copy"], sorted((t for t in times.items() if t[0] != "copy"), key=lambda t: t[1])[:14], flush=True)
        del contenders, cases
        torch.cuda.empty_cache()


def main():
    out, directory, what = sys.argv[1], sys.argv[2], sys.argv[3:] or ["forward", "backward"]
    result = {}
    for each in what:
        part(directory, result, each == "backward")
        with open(out, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
