"""The backward passes of RMSNorm and LayerNorm, with the gradients of gains and biases, and of RMSNorm
with a residual's gradient added: bf16, hidden sizes of real models.

PyTorch and torch.compile run what autograd recorded once; QuACK has its statistics kept by the
forward pass; Liger runs its kernels in place, as a trainer would, so the gradient of the output is
lost and each burst works on what is left of it.
"""

import torch
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(16384, 4096), (16384, 8192), (32768, 2048), (8192, 16384), (262144, 768), (64, 4096), (1, 4096)]
EPSILON = 1e-5
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes: x, dout and dx, and a residual's gradient."
)


def compare(ctx):
    record = Record("norm_backward", ctx.library, METHOD, ("liger-kernel", "quack-kernels"))
    for rows, dim in SHAPES:
        for name in ("rms_norm", "rms_norm + residual", "layer_norm"):
            one(ctx, record, name, rows, dim)
            torch.cuda.empty_cache()


def one(ctx, record, name, rows, dim):
    residual = name.endswith("residual")
    centred = name == "layer_norm"
    tensors = 4 if residual else 3
    bytes_moved = tensors * rows * dim * 2
    count = num_sets(bytes_moved)
    make = lambda: [randn(rows, dim) for _ in range(count)]
    x, dout, dx = make(), make(), make()
    more = make() if residual else None
    w, b = randn(dim), randn(dim)
    dw, db = torch.empty_like(w), torch.empty_like(b)

    def ours_of(i):
        fields = dict(x=x[i], dout=dout[i], dx=dx[i], weight=w, dweight=dw, epsilon=EPSILON)
        if residual:
            fields["dresidual"] = more[i]
        if centred:
            fields["dbias"] = db
        return ctx.op("layer_norm_backward" if centred else "rms_norm_backward", **fields)

    ours = [ours_of(i) for i in range(count)]

    if centred:
        def formula(x, dout, w):
            x, dout = x.float(), dout.float()
            centred = x - x.mean(-1, keepdim=True)
            scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPSILON)
            n, g = centred * scale, dout * w.float()
            back = scale * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
            return back.bfloat16(), (dout * n).sum(0).bfloat16(), dout.sum(0).bfloat16()
        fast = compiled(formula)
        plain = lambda i: torch.ops.aten.native_layer_norm_backward(
            dout[i], x[i], [dim], *statistics[i], w, b, [True, True, True])
        statistics = [torch.ops.aten.native_layer_norm(t, [dim], w, b, EPSILON)[1:] for t in x]
        compile_of = lambda i: fast(x[i], dout[i], w)
        kept_by_quack = [[t.flatten() for t in reversed(both)] for both in statistics]
    else:
        def formula(x, dout, w, more):
            x, dout = x.float(), dout.float()
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
            n, g = x * scale, dout * w.float()
            back = scale * (g - n * (g * n).mean(-1, keepdim=True))
            if more is not None:
                back = back + more.float()
            return back.bfloat16(), (dout * n).sum(0).bfloat16()
        fast = compiled(formula)
        scales = [torch.rsqrt(t.float().square().mean(-1, keepdim=True) + EPSILON) for t in x]

        def plain(i):
            back, of_w = torch.ops.aten._fused_rms_norm_backward(dout[i], x[i], [dim], scales[i], w, [True, True])
            return (back + more[i] if residual else back), of_w
        compile_of = lambda i: fast(x[i], dout[i], w, more[i] if residual else None)
        kept_by_quack = [[t.flatten()] for t in scales]
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, plain),
        "torch.compile": ring(count, compile_of),
        "copy": copies(bytes_moved),
    }
    contenders |= quack(name, count, lambda module, i: (
        module.layernorm_bwd(x[i], w, dout[i], *kept_by_quack[i]) if centred
        else module.rmsnorm_bwd(x[i], w, dout[i], *kept_by_quack[i], more[i] if residual else None)))
    for contender in contenders.values():
        contender(0)
    kept = {key: c.results[0][0] for key, c in contenders.items() if hasattr(c, "results")}
    agree(f"{name} {rows}x{dim}", {"torch": kept.pop("torch"), OURS: dx[0]} | kept)
    agree(f"{name} {rows}x{dim} dweight", {"torch": contenders["torch"].results[0][1], OURS: dw})
    if centred:
        agree(f"{name} {rows}x{dim} dbias", {"torch": contenders["torch"].results[0][2], OURS: db})
    contenders |= liger(name, rows, dim, x, dout, w, b, count, residual, centred)
    record.add(f"{name} {rows}x{dim}", graphs(contenders), dtype="bf16", bytes=bytes_moved)


def quack(name, count, call):
    module = peer("quack.rmsnorm")
    if not module:
        return {}
    run = ring(count, lambda i: call(module, i))
    try:
        run(0)
        torch.cuda.synchronize()
    except Exception as error:  # a peer's signature changes with its version
        print(f"without quack for {name}: {error!r:.300}")
        return {}
    return {"quack": run}


def liger(name, rows, dim, x, dout, w, b, count, residual, centred):
    module = peer("liger_kernel.ops.layer_norm" if centred else "liger_kernel.ops.rms_norm")
    if not module or residual:
        return {}
    if centred:
        kept = [module.layer_norm_forward(t, w, b, EPSILON) for t in x]
        run = lambda i: module.layer_norm_backward(dout[i % count], x[i % count], w, b, *kept[i % count][2:4])
    else:
        kept = [module.rms_norm_forward(t, w, EPSILON, 0.0, "llama", None) for t in x]

        def run(i):
            _, again, scale, size, warps, mode = kept[i % count]
            return module.rms_norm_backward(dout[i % count], again, w, scale, 0.0, mode, size, warps, True, None)
    try:
        run(0)
        torch.cuda.synchronize()
    except Exception as error:  # a peer's signature changes with its version
        print(f"without liger for {name}: {error!r:.300}")
        return {}
    return {"liger": run}
