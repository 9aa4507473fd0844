"""A step of AdamW with clipping: the parameters of a model of 135M, and one large tensor."""

import ctypes

import torch
from common import OURS, Record, agree, copies, graphs, randn

METHOD = (
    "Microseconds of one step with clipping of the norm: a graph of steps, replayed by turns, medians. `copy` moves as many bytes: "
    "the gradient twice, and weight (or master) and moments once each way. PyTorch's AdamW is fused and capturable, after "
    "`clip_grad_norm_` with foreach, which writes the gradients too; it has no masters, and stands beside weights of f32 alone."
)
RATE, DECAY, MAX_NORM = 1e-4, 0.1, 1.0
F32, BF16 = torch.float32, torch.bfloat16
# Name, dtypes of weights and gradients, where f32 values are kept, and bytes of a parameter.
KINDS = [
    ("f32", F32, F32, "NONE", 4 + 4 + 8 * 3),
    ("bf16 and f32 masters", BF16, BF16, "F32", 2 + 2 + 2 + 8 * 3),
    ("bf16 and remainders", BF16, BF16, "REMAINDER", 2 + 2 + 4 * 2 + 8 * 2),
    ("bf16 at random", BF16, BF16, "STOCHASTIC", 2 + 2 + 4 + 8 * 2),
]


def small_model():
    """SmolLM2-135M, whose output is its embedding."""
    hidden, ffn, kv, vocab, layers = 576, 1536, 192, 49152, 30
    block = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    block += [(ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]
    return [(vocab, hidden), *block * layers, (hidden,)]


CASES = [("135M in 272 tensors", small_model()), ("one tensor of 512M", [(512 << 20,)])]


class Ours:
    """An optimizer of the library over tensors of PyTorch, which it keeps alive."""

    def __init__(self, ctx, weights, gradients, master):
        self.library, self.kept = ctx.library, (weights, gradients)
        library = ctx.library
        parameters = (library.structs["unsloth_parameter"] * len(weights))()
        for parameter, weight, gradient in zip(parameters, weights, gradients):
            parameter.weight = library.tensor(weight.view(-1))
            parameter.gradient = library.tensor(gradient.view(-1))
        groups = (library.structs["unsloth_parameter_group"] * 1)((RATE, DECAY))
        params = library.struct(
            "optimizer_params",
            decoupled=1,
            max_norm=MAX_NORM,
            precision={"master": library.constants[f"MASTER_{master}"]},
            parameters=ctypes.addressof(parameters),
            num_parameters=len(weights),
            groups=ctypes.addressof(groups),
            num_groups=1,
        )
        size = ctypes.c_size_t()
        library.call("optimizer_state_size", ctx.handle, ctypes.byref(params), ctypes.byref(size))
        self.state = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        params.state, params.state_size = self.state.data_ptr(), size.value
        self.handle = ctypes.c_void_p()
        torch.cuda.synchronize()
        library.call("optimizer_create", ctx.handle, ctypes.byref(params), None, ctypes.byref(self.handle))
        torch.cuda.synchronize()

    def step(self, _=None):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library.call("optimizer_step", self.handle, stream)

    def close(self):
        torch.cuda.synchronize()
        self.library.call("optimizer_destroy", self.handle)


def compare(ctx):
    record = Record("optimizer", ctx.library, METHOD)
    for case, shapes in CASES:
        for kind in KINDS:
            one(ctx, record, case, shapes, *kind)
            torch.cuda.empty_cache()


def one(ctx, record, case, shapes, name, dtype, gradient_dtype, master, bytes_each):
    weights = [randn(*shape, dtype=dtype) for shape in shapes]
    gradients = [randn(*shape, dtype=gradient_dtype) for shape in shapes]
    theirs = None
    if dtype == F32:
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()
        adamw = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True, capturable=True)

        def theirs(_=None):
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
            adamw.step()

    ours = Ours(ctx, weights, gradients, master)
    if theirs:
        ours.step()
        theirs()
        torch.cuda.synchronize()
        agree(case, {"torch": parameters[0].detach(), OURS: weights[0]}, 1e-6)
    bytes_moved = bytes_each * sum(weight.numel() for weight in weights)
    contenders = {OURS: ours.step}
    if theirs:
        contenders["torch"] = theirs
    # A gigabyte is copied, and the time scaled to all: the rest of the memory is taken.
    part = min(bytes_moved, 1 << 30)
    contenders["copy"] = copies(part)
    times = graphs(contenders, calls=4)
    times["copy"] *= bytes_moved / part
    record.add(f"{case}, {name}", times, dtype=name, bytes=bytes_moved)
    ours.close()
