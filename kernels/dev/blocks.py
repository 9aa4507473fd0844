"""Checks variants of the products of few rows with weights in blocks, and times how a multiprocessor may be parted.

Usage: blocks.py OUT.json DIR [quick|once]: DIR has include/ and NAME.VARIANT.cubin, of the files of kernels/cuda/linear/blocks.
Microseconds of one launch, a graph of launches on weights that together exceed the cache, contenders by turns; `copy` moves as many
bytes. A name ends in warps x slots. `once` launches each kernel once, for a profiler.
"""

import glob
import json
import os
import sys

import torch

from launcher import function, launch, load
from rings import SMS, arguments_of, copies, timed
import ctypes
from ctypes import c_void_p

BF16, F32 = 3, 1
ROOM = 227 * 1024
# Dtype, weights and bytes of a block, weights of a unit, places of factors, greatest code.
FORMATS = {
    "q8_0": (11, 32, 34, 256, (0,), 128),
    "q4_0": (12, 32, 18, 256, (0,), 8),
    "q4_1": (13, 32, 20, 256, (0, 2), 8),
    "q5_0": (19, 32, 22, 256, (0,), 16),
    "q4_k": (14, 256, 144, 256, (0, 2), 500),
    "q5_k": (21, 256, 176, 256, (0, 2), 1000),
    "q6_k": (15, 256, 210, 256, (208,), 4000),
    "tq2_0": (17, 256, 66, 512, (64,), 1),
}


def decoded(name, blocks):
    """[rows, weights] of [rows, blocks, bytes]."""
    b = blocks.int()
    half = lambda at: blocks[..., at : at + 2].contiguous().view(torch.float16).float()
    if name == "q8_0":
        w = half(0) * blocks[..., 2:].contiguous().view(torch.int8).float()
    elif name == "q4_0":
        q = b[..., 2:]
        w = half(0) * (torch.cat([q & 15, q >> 4], -1) - 8)
    elif name == "q4_1":
        q = b[..., 4:]
        w = half(0) * torch.cat([q & 15, q >> 4], -1) + half(2)
    elif name == "q4_k":
        s = b[..., 4:16]
        scale = torch.cat([s[..., :4] & 63, (s[..., 8:] & 15) | (s[..., :4] >> 6 << 4)], -1)
        offset = torch.cat([s[..., 4:8] & 63, (s[..., 8:] >> 4) | (s[..., 4:8] >> 6 << 4)], -1)
        q = b[..., 16:].unflatten(-1, (4, 32))
        q = torch.stack([q & 15, q >> 4], -2).flatten(-3, -2)
        w = ((half(0) * scale)[..., None] * q - (half(2) * offset)[..., None]).flatten(-2)
    elif name == "q6_k":
        low, high = b[..., :128].unflatten(-1, (2, 64)), b[..., 128:192].unflatten(-1, (2, 32))
        low = torch.cat([low & 15, low >> 4], -1).unflatten(-1, (4, 32))
        high = torch.stack([high >> 2 * i & 3 for i in range(4)], -2)
        q = (low | high << 4) - 32
        scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
        w = (half(208) * scales)[..., None] * q.flatten(-3).unflatten(-1, (16, 16))
        w = w.flatten(-2)
    elif name == "tq2_0":
        q = torch.stack([b[..., :64].unflatten(-1, (2, 32)) >> 2 * i & 3 for i in range(4)], -2)
        w = half(64) * (q.flatten(-3) - 1)
    else:
        return None
    return w.flatten(-2)


def blocks_of(name, n, k):
    _, length, size, _, factors, greatest = FORMATS[name]
    made = torch.randint(0, 256, (n, k // length, size), dtype=torch.uint8, device="cuda")
    for at in factors:
        factor = (torch.rand(n, k // length, 1, device="cuda") / greatest * k**-0.5).half()
        made[..., at : at + 2] = factor.view(torch.uint8)
    return made


def up(n, d):
    return -(-n // d)


def arguments(Arguments, name, x, weight, out, rows_of_block, slots, dtype=BF16):
    _, length, size, unit, _, _ = FORMATS[name]
    n, blocks, _ = weight.shape
    k = blocks * length
    p = Arguments()
    p.x, p.weight, p.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    p.residual = p.out
    p.weight_bytes, p.weight_stride = weight.numel(), blocks * size
    p.x_stride, p.out_stride = x.stride(0) * x.element_size(), out.stride(0) * out.element_size()
    p.residual_stride = p.out_stride
    p.rows, p.out_features, p.blocks, p.steps = len(x), n, blocks, up(k, unit)
    p.slots, p.rows_of_block_log2, p.columns_of_block = slots, rows_of_block.bit_length() - 1, up(n, min(SMS, n))
    p.gapless = p.x_aligned = 1
    p.aligned = 2 if blocks * size % 16 == 0 else 1
    p.x_dtype = p.dtype = dtype
    return p


def main():
    result, directory, mode = sys.argv[1], sys.argv[2], (sys.argv[3:] or [""])[0]
    Arguments = arguments_of(os.path.join(directory, "include"), "linear/blocks", "LinearBlocksArguments")
    variants = {}
    for path in sorted(glob.glob(os.path.join(directory, "*.cubin"))):
        with open(path, "rb") as f:
            variants.setdefault(path.split(".")[-2], []).append(load(f.read()))
    times = {}
    shapes = [(14336, 4096), (4096, 4096), (4096, 14336), (1024, 4096), (2560, 2560), (333, 576)] if mode != "once" else [(14336, 4096)]
    for n, k in shapes:
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(2, min(64, (300 << 20) // (n * k * 2))))]
        for name in FORMATS:
            _, length, size, unit, _, _ = FORMATS[name]
            if k % length or (mode and name not in ("q8_0", "q4_0", "q4_k", "q6_k")):
                continue
            total = n * k // length * size
            sets = max(2, min(64, (200 << 20) // total))
            weights = [blocks_of(name, n, k) for _ in range(sets)]
            plain_weight = decoded(name, weights[0])
            for rows in (1, 2, 4, 8) if not mode else (1, 4, 8):
                x = torch.randn(rows, k, device="cuda").bfloat16()
                contenders = {"copy": copies(up(total + rows * (n + k) * 2, 1 << 16) << 16, sets)}
                torch_out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
                contenders["torch bf16"] = [lambda w=w: torch.mm(x, w.t(), out=torch_out) for w in plain]
                for variant, modules in variants.items():
                    for warps, slots in ((16, 2), (16, 3), (16, 4), (8, 4)) if mode != "once" else ((16, 2),):
                        at_once = next(r for r in (1, 2, 4, 8) if r >= rows)
                        lines = (unit // length * size + 14 + 15) // 16
                        slot = 16 * (lines // 2 * 2 + 1) * 16
                        digits = 80 if name == "q6_k" else 72
                        at_most = lambda: 4 if at_once == 2 else at_once
                        room = lambda: warps * slots * slot + k // 32 * at_once * digits + warps * 128 * at_most()
                        while at_once > 1 and room() > ROOM:
                            at_once //= 2
                        if room() > ROOM:
                            continue
                        kernel_name = f"linear_blocks_{name}_{at_most()}"
                        kernel = None
                        for module in modules:
                            try:
                                kernel = function(module, kernel_name, ROOM)
                                break
                            except RuntimeError:
                                pass
                        out = torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                        runs = []
                        for weight in weights:
                            p = arguments(Arguments, name, x, weight, out, at_once, slots)
                            grid = (up(n, p.columns_of_block), up(rows, at_once))
                            pointers = (c_void_p * 1)(ctypes.addressof(p))

                            def run(p=p, keep=out, pointers=pointers, grid=grid, kernel=kernel, shared=room(), threads=warps * 32):
                                launch(kernel, grid, threads, shared, pointers, early=True)

                            runs.append(run)
                        runs[0]()
                        torch.cuda.synchronize()
                        label = f"{variant} {warps}x{slots}"
                        if plain_weight is not None:
                            expected = x.double() @ plain_weight.double().t()
                            error = ((out.double() - expected).norm() / expected.norm()).item()
                            if not error < 2.5e-3:
                                print("WRONG", name, n, k, rows, label, error)
                        elif out.isnan().any():
                            print("NaN", name, n, k, rows, label)
                        contenders[label] = runs
                if mode == "once":
                    continue
                cell = f"{name} m{rows} n{n} k{k}"
                times[cell] = timed(contenders, 5)
                best = min((v, c) for c, v in times[cell].items() if c not in ("copy", "torch bf16"))
                print(cell, times[cell], "best", best[1], round(times[cell]["copy"] / best[0], 3), flush=True)
                with open(result, "w") as f:
                    json.dump(times, f, indent=1)


if __name__ == "__main__":
    main()
