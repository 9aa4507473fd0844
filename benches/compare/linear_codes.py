"""Products with weights of 8 or 2 bits whose scales lie apart, beside torch's (cuBLAS) with bf16 and
with 8-bit ones, and a copy of as many bytes; and the rounding of rows, which is a part of those of integers, alone."""

import ctypes
import os

import torch
from common import OURS, Record, agree, copies, graphs, named_layers, named_rows, num_sets, randn

# Value in the C ABI, weights of a byte, greatest code.
DTYPES = {"i8": (9, 1, 127), "ternary": (10, 4, 1), "f8e4m3": (7, 1, 448)}
# UNSLOTH_TENSOR_CONSTANT.
CONSTANT = 4
# (out_features, in_features): BitNet b1.58 2B-4T's and the other shapes of its own kernel.
LAYERS = [
    (2560, 2560), (3840, 2560), (13824, 2560), (2560, 6912), (3200, 3200),
    (4800, 3200), (3200, 10240), (20480, 3200), (5120, 27648), (55296, 5120),
]  # fmt: skip
# And of models of 8B and 70B parameters.
MORE_LAYERS = [(14336, 4096), (4096, 14336), (28672, 8192)]
FEW, MORE = (1, 4), (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096, 8192)
COUNTS = {layer: MORE for layer in [(13824, 2560), (2560, 6912), *MORE_LAYERS]}
# Of 8B parameters, and a head of as many.
OF_FLOATS = [(4096, 4096), (14336, 4096), (4096, 14336), (32768, 4096)]
ROWS_OF_FLOATS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
# Rows and their elements, of which only the rounding is measured.
ROUNDED = [(1, 4096), (64, 2560), (64, 4096), (512, 2560), (512, 6912)]
ROUNDED += [(rows, k) for rows in (4096, 8192) for k in (2560, 4096, 6912, 14336)]
# NAMES chooses some of these parts; LAYERS names other layers and ROWS other rows of products.
NAMES = os.environ.get("NAMES", "rounding,i8,ternary,f8e4m3").split(",")
CHOSEN = named_rows()
METHOD = (
    "Microseconds of one call: a graph of calls on weights that together exceed the cache, which ours are told are constant, replayed by "
    "turns, medians. Of i8 and ternary weights ours rounds x to 8 bits in each call. `copy` moves as many bytes as weights, x and output "
    "have, half read and half written. `torch` multiplies by bf16 weights, `torch int8` by 8-bit ones without scales (from 17 rows on), `BitNet` is that model's kernel for ternary weights, one row and ten shapes, "
    "which does not round x (gpu/bitnet_kernels of its repository, built for sm_90; left out where UNSLOTH_BITNET names no such library), "
    "`torch fp8` x that is e4m3, too, by e4m3 ones with a scale (rows by 16)."
)


def compare(ctx):
    record = Record("linear_codes", ctx.library, METHOD)
    for rows, k in ROUNDED if "rounding" in NAMES else ():
        rounding(ctx, record, rows, k)
    integers = [name for name in NAMES if name in ("i8", "ternary")]
    for n, k in named_layers(LAYERS + MORE_LAYERS) if integers else ():
        plain = [randn(n, k) * k**-0.5 for _ in range(num_sets(n * k * 2))]
        for name in integers:
            layer(ctx, record, name, n, k, plain, CHOSEN or COUNTS.get((n, k), FEW))
        torch.cuda.empty_cache()
    for n, k in named_layers(OF_FLOATS) if "f8e4m3" in NAMES else ():
        plain = [randn(n, k) * k**-0.5 for _ in range(num_sets(n * k * 2))]
        layer(ctx, record, "f8e4m3", n, k, plain, CHOSEN or ROWS_OF_FLOATS)
        torch.cuda.empty_cache()


def rounding(ctx, record, rows, k):
    x, out = randn(rows, k), torch.empty(rows, k, device="cuda", dtype=torch.int8)
    scale, sums = torch.empty(rows, device="cuda"), torch.empty(rows, device="cuda", dtype=torch.int32)
    ours = ctx.op("quantize", x=x, out=out, scale=scale, sum=sums)
    moved = x.numel() * 3 + rows * 8
    contenders = {OURS: lambda i: ours(), "copy": copies(-(-moved // (1 << 16)) << 16)}
    for contender in contenders.values():
        contender(0)
    agree(f"{rows}x{k}", {"x": x, OURS: out.float() * scale[:, None]})
    record.add(f"round m{rows} k{k}", graphs(contenders, seconds=0.1), dtype="bf16", bytes=moved)


def described(ctx, codes, name, n, k, scale):
    """Codes as an `unsloth_tensor`, with one scale."""
    quantization = ctx.library.structs["unsloth_quantization"]()
    quantization.struct_size = ctypes.sizeof(quantization)
    quantization.scale.data, quantization.scale.dtype, quantization.scale.rank = scale.data_ptr(), 1, 1
    quantization.scale.shape[0] = 1
    tensor = ctx.library.structs["unsloth_tensor"]()
    tensor.data, tensor.dtype, tensor.rank = codes.data_ptr(), DTYPES[name][0], 2
    tensor.shape[0], tensor.shape[1] = n, k
    tensor.quantization, tensor.flags = ctypes.addressof(quantization), CONSTANT
    return tensor, quantization  # which the tensor points to


def quantized(ctx, weight, name):
    """The weight's codes by the operation, its scale, and what they stand for."""
    n, k = weight.shape
    value, per_byte, most = DTYPES[name]
    codes = torch.empty(n, k // per_byte, device="cuda", dtype=torch.int8)
    scale = weight.float().abs().mean() if name == "ternary" else weight.float().abs().max() / most
    if name == "f8e4m3":
        codes = (weight.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn)
        return codes, scale.reshape(1), codes.float()
    of_codes = (weight.float() / scale).round().clamp(-most, most)
    if name == "ternary":
        blocks = (of_codes.view(n, k // 128, 4, 32) + 1).to(torch.uint8)
        packed = blocks[:, :, 0] | blocks[:, :, 1] << 2 | blocks[:, :, 2] << 4 | blocks[:, :, 3] << 6
        codes.copy_(packed.reshape(n, k // 4).view(torch.int8))
    else:
        codes.copy_(of_codes)
    return codes, scale.reshape(1), of_codes


def bitnet():
    """BitNet's own product of one row, or None."""
    path = os.environ.get("UNSLOTH_BITNET")
    if path is None:
        return None
    call = ctypes.CDLL(path).bitlinear_int8xint2
    call.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    call.restype = None
    return call


def layer(ctx, record, name, n, k, plain, counts):
    size = n * k // DTYPES[name][1]
    # A burst reads as many: more than the cache has, of the smallest ones, too.
    sets = max(2, min(128, -(-(192 << 20) // size)))
    calls = max(16, sets)
    made = [quantized(ctx, plain[i % len(plain)], name)[:2] + (None,) for i in range(sets)]
    weights = [described(ctx, codes, name, n, k, scale) for codes, scale, _ in made]
    meant = quantized(ctx, plain[0], name)[2] * made[0][1]
    one = torch.ones(1, device="cuda")
    for rows in counts:
        x, out = randn(rows, k), torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        ours = [ctx.op("linear", x=x, weight=weight, out=out) for weight, _ in weights]
        ours[0]()
        agree(f"{name} {rows}x{k} by {n}", {"torch": x.float() @ meant.t(), OURS: out})
        theirs = torch.empty_like(out)
        contenders = {
            OURS: lambda i: ours[i % sets](),
            "torch": lambda i: torch.mm(x, plain[i % len(plain)].t(), out=theirs),
        }
        if name == "i8" and rows > 16:
            rounded = torch.randint(-127, 128, (rows, k), device="cuda", dtype=torch.int8)
            contenders["torch int8"] = lambda i: torch._int_mm(rounded, made[i % sets][0].t())
        theirs_alone = bitnet() if name == "ternary" and rows == 1 and (n, k) in LAYERS else None
        if theirs_alone is not None:
            rounded = torch.randint(-127, 128, (rows, k), device="cuda", dtype=torch.int8)
            scales = torch.ones(8, device="cuda", dtype=torch.bfloat16)
            contenders["BitNet"] = lambda i: theirs_alone(
                rounded.data_ptr(), made[i % sets][0].data_ptr(), theirs.data_ptr(), scales.data_ptr(), scales.data_ptr(),
                rows, n, k, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
        if name == "f8e4m3" and rows % 16 == 0:
            short = x.to(torch.float8_e4m3fn)
            contenders["torch fp8"] = lambda i: torch._scaled_mm(
                short, made[i % sets][0].t(), one, made[i % sets][1], out_dtype=torch.bfloat16
            )
        moved = size + (x.numel() + out.numel()) * 2
        contenders["copy"] = copies(-(-moved // (1 << 16)) << 16)
        for contender in contenders.values():
            contender(0)
        times = graphs(contenders, calls, seconds=0.1)
        record.add(f"{name} m{rows} n{n} k{k}", times, dtype="bf16", bytes=moved, flops=2 * rows * n * k)
