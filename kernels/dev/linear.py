"""Checks the linear kernels against f64 products, and times them beside a copy and cuBLAS (torch).

Usage: linear.py DIR check|bench [filter].
"""

import random
import sys

import torch
import torch.nn.functional as F

from attention import DTYPES, EPSILON, copy_tbps, randn, up
from driver import graph_us, load_all
from launcher import guarded

ROWS, ROWS_SIMT, TILES, TILES_SIMT = range(4)


def prepare(kernel, x, w, out, bias=None, residual=None):
    """What the library's host code does."""
    c = kernel.choices
    m, k = x.shape
    n = w.shape[0]
    unit = c["width"]
    assert k % unit == 0
    row_tiles, column_tiles = up(m, c["rows"]), up(n, c["columns"])
    grid = (row_tiles, column_tiles)
    if c["kind"] in (ROWS, ROWS_SIMT):
        resident = torch.cuda.get_device_properties(0).multi_processor_count * kernel.blocks_per_processor
        grid = min(row_tiles * column_tiles, resident)
    buffers = dict(x=x, w=w, out=out, residual=residual)
    s = dict(rows=m, in_features=k, out_features=n, epilogue=int(residual is not None), x_stride=x.stride(0) // unit,
             w_stride=w.stride(0) // unit, out_stride=out.stride(0), residual_stride=residual.stride(0) if residual is not None else 0)
    if bias is not None:
        s["bias_dtype"] = DTYPES[bias.dtype]
        buffers[{1: "bias_f32", 2: "bias_f16", 3: "bias_bf16"}[s["bias_dtype"]]] = bias
    return kernel.prepare(grid, buffers, s)


def check(kernels, only):
    rng = random.Random()
    total = bad = 0
    by_code = {code: dtype for dtype, code in DTYPES.items()}
    for name, kernel in kernels.items():
        if only not in name:
            continue
        c = kernel.choices
        dtype, weight = by_code[c["dtype"]], by_code[c["weight"]]
        failed = 0
        shapes = [(1, 8, 1), (1, 64, 33), (3, 4096, 100), (8, 1000, 64), (16, 264, 70), (5, 2056, 4097 % 1000)]
        if c["kind"] in (TILES, TILES_SIMT):
            shapes += [(64, 64, 64), (65, 72, 63), (200, 328, 130), (129, 32, 1)]
        if c["kind"] == ROWS:
            shapes += [(c["rows"], 512, 48), (50, 520, 70)]
        if c["width"] == 1:
            shapes += [(3, 7, 5), (16, 33, 65)]
        for m, k, n in shapes:
            for extra in (0, 1, 2):
                pad = 0 if extra == 0 else (3 if c["width"] == 1 else 8)
                x, w = randn(m, k + pad, dtype=dtype)[:, :k], randn(n, k + pad, dtype=weight)[:, :k]
                bias = randn(n, dtype=rng.choice(list(DTYPES))) if extra else None
                out, intact = guarded(m, n, dtype=dtype)
                residual = randn(m, n, dtype=dtype) if extra else None
                exact = x.double() @ w.double().t()
                plain = x.float() @ w.float().t()
                for y in (bias, residual):
                    if y is not None:
                        exact, plain = exact + y.double(), plain + y.float()
                if extra == 2:
                    out.copy_(residual)
                    residual = out
                prepare(kernel, x, w, out, bias, residual)()
                torch.cuda.synchronize()
                error = (out.double() - exact).abs()
                bound = exact.abs() * EPSILON[dtype] + 2 * (plain.double() - exact).abs().max() + 1e-5 * k ** 0.5
                if not (bool((error <= bound).all()) and intact()):
                    failed += 1
                    if failed <= 3:
                        print("  WRONG", name, m, k, n, extra, f"{(error - bound).max().item():.2e}", intact(), flush=True)
                total += 1
        bad += failed
        if failed:
            print(f"{name}: {failed} wrong")
    print(f"linear: {total - bad} of {total} right", flush=True)


def bench(kernels, only):
    torch.backends.cuda.matmul.allow_tf32 = False
    copy = copy_tbps()
    print(f"copy {copy:.2f} TB/s")
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        for k, n in ((4096, 4096), (4096, 14336), (14336, 4096), (2048, 2048), (4096, 128256)):
            size = k * n * dtype.itemsize
            sets = max(2, min(24, (300 << 20) // size + 1))
            ws = [randn(n, k, dtype=dtype) for _ in range(sets)]
            for m in (1, 8, 16):
                x, out = randn(m, k, dtype=dtype), torch.empty(m, n, device="cuda", dtype=dtype)
                served = lambda c: m <= c["rows"] and (c["rows"] <= 8 or m > 8) and (c["rows"] > 1 or m == 1) and c["width"] > 1
                names = [name for name, its in kernels.items() if its.choices["kind"] in (ROWS, ROWS_SIMT) and served(its.choices)
                         and f"_{short}_" in name]
                text = []
                for name in names:
                    launches = [prepare(kernels[name], x, w, out) for w in ws]
                    us = graph_us(lambda: [launch() for launch in launches], sets)
                    text.append(f"{name} {us:.1f}us {size / us / 1e6 / copy:.0%}")
                us = graph_us(lambda: [F.linear(x, w) for w in ws], sets)
                print(f"{short} m{m} k{k} n{n}: " + ", ".join(text) + f", cublas {us:.1f}us {size / us / 1e6 / copy:.0%}", flush=True)
    for m, k, n in ((128, 4096, 4096), (2048, 4096, 4096)) if "linear_tiles_bf16" in kernels else ():
        x, w = randn(m, k, dtype=torch.bfloat16), randn(n, k, dtype=torch.bfloat16)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        launch = prepare(kernels["linear_tiles_bf16"], x, w, out)
        ours, cublas = graph_us(lambda: [launch() for _ in range(5)], 5), graph_us(lambda: [F.linear(x, w) for _ in range(5)], 5)
        print(f"tiles m{m}: {2 * m * k * n / ours / 1e6:.0f} TFLOP/s, cublas {2 * m * k * n / cublas / 1e6:.0f}")


if __name__ == "__main__":
    directory, what = sys.argv[1:3]
    {"check": check, "bench": bench}[what](load_all(directory, "linear"), sys.argv[3] if len(sys.argv) > 3 else "")
