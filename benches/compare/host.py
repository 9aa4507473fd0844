"""What a call costs the host: the time until it returns, from Python, on tensors too small to
matter.

Calls into libunsloth go through ctypes with arguments made before, as an engine keeps them; what
ctypes itself takes is measured by a call that does nothing. `benches/cuda.rs` has the same figure
without Python.
"""

import ctypes

import torch
import torch.nn.functional as F
from common import OURS, Record, compiled, host, peer, randn

METHOD = "Microseconds until a call returns, 200 calls a round, the least of 20 rounds by turns; from Python."
HEADS, KV_HEADS, DIM, HIDDEN = 32, 8, 128, 4096


def compare(ctx):
    liger, flashinfer = peer("liger_kernel"), peer("flashinfer")
    record = Record("host", ctx.library, METHOD, ("liger-kernel", "flashinfer-python"))
    stream = torch.cuda.current_stream().cuda_stream
    nothing = ctx.library.lib.unsloth_context_destroy
    bare = lambda i: nothing(None)
    one = lambda run: lambda i: run()
    keep = []

    def ours(op, **fields):
        keep.append(ctx.op(op, stream=stream, **fields))
        return one(keep[-1])

    x, w, out = randn(1, HIDDEN), randn(HIDDEN), randn(1, HIDDEN)
    norm = lambda: F.rms_norm(x, (HIDDEN,), w, 1e-5)
    contenders = {
        OURS: ours("rms_norm", x=x, out=out, weight=w, epsilon=1e-5),
        "torch": one(norm),
        "torch.compile": one(compiled(norm)),
        "nothing through ctypes": bare,
    }
    if liger:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        contenders["liger"] = lambda i: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False)
    if flashinfer:
        contenders["flashinfer"] = lambda i: flashinfer.norm.rmsnorm(x, w, eps=1e-5, out=out)
    record.add("rms_norm", host(contenders))

    gate, up = randn(1, HIDDEN), randn(1, HIDDEN)
    contenders = {OURS: ours("swiglu", gate=gate, up=up, out=out), "torch": lambda i: F.silu(gate) * up}
    record.add("swiglu", host(contenders))

    q, k = randn(1, 1, HEADS, DIM), randn(1, 1, KV_HEADS, DIM)
    positions = torch.zeros(1, 1, device="cuda", dtype=torch.int32)
    contenders = {OURS: ours("rope", q=q, q_out=q, k=k, k_out=k, positions=positions)}
    if flashinfer:
        at, flat = positions.view(-1), (q.view(1, HEADS, DIM), k.view(1, KV_HEADS, DIM))
        contenders["flashinfer"] = lambda i: flashinfer.rope.apply_rope_pos_ids_inplace(*flat, at)
    record.add("rope", host(contenders))

    table, ids = randn(1000, HIDDEN), torch.zeros(1, device="cuda", dtype=torch.int32)
    contenders = {OURS: ours("embedding", table=table, ids=ids, out=out), "torch": lambda i: F.embedding(ids, table)}
    record.add("embedding", host(contenders))
    further(ctx, record, ours, x, out)


def further(ctx, record, ours, x, out):
    """Operations that a build may not have on this device."""
    weight = randn(HIDDEN, HIDDEN)
    q = randn(1, 1, HEADS, DIM)
    k, v = randn(1, 512, KV_HEADS, DIM), randn(1, 512, KV_HEADS, DIM)
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    attend = lambda i: F.scaled_dot_product_attention(*heads, enable_gqa=True)
    cases = {
        "linear": (dict(x=x, weight=weight, out=out), lambda i: F.linear(x, weight)),
        "attention": (dict(q=q, k=k, v=v, out=torch.empty_like(q)), attend),
    }
    for op, (fields, theirs) in cases.items():
        served = ctypes.c_uint32()
        params = ctx.params(op, **fields)
        if getattr(ctx.library.lib, f"unsloth_{op}_supported")(ctx.handle, ctypes.byref(params), ctypes.byref(served)) == 0:
            record.add(op, host({OURS: ours(op, **fields), "torch": theirs}))
