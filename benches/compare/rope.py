"""RoPE of queries and keys in one call: half-split, 32 heads on 8, head dim 128, positions from
0."""

import torch
from common import OURS, Record, agree, compiled, copies, graphs, num_sets, peer, randn, ring

SHAPES = [(4, 4096), (1, 512), (64, 1), (1, 1)]
HEADS, KV_HEADS, DIM, THETA = 32, 8, 128, 500000.0
METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` moves as "
    "many bytes. libunsloth and FlashInfer compute angles and rotate in place; Liger and PyTorch read tables of bf16, made before."
)


def compare(ctx):
    liger, flashinfer = peer("liger_kernel.ops.rope"), peer("flashinfer")
    record = Record("rope", ctx.library, METHOD, ("liger-kernel", "flashinfer-python"))
    for batch, seq in SHAPES:
        case(ctx, record, liger, flashinfer, batch, seq)
        torch.cuda.empty_cache()


def turned(x):
    return torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)


def case(ctx, record, liger, flashinfer, batch, seq):
    bytes_moved = 2 * batch * seq * (HEADS + KV_HEADS) * DIM * 2
    count = num_sets(bytes_moved)
    q = [randn(batch, seq, HEADS, DIM) for _ in range(count)]
    k = [randn(batch, seq, KV_HEADS, DIM) for _ in range(count)]
    positions = torch.arange(seq, device="cuda")
    frequencies = THETA ** -(torch.arange(0, DIM, 2, device="cuda").float() / DIM)
    angles = positions[:, None] * frequencies
    tables = [torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin)]
    wide = [t[None, :, None] for t in tables]
    exact = [x.float() * wide[0] + turned(x.float()) * wide[1] for x in (q[0], k[0])]
    cos, sin = (t.bfloat16() for t in wide)
    rotate = lambda q, k: (q * cos + turned(q) * sin, k * cos + turned(k) * sin)
    fast = compiled(rotate)

    ours = [
        ctx.op("rope", q=q[i], q_out=q[i], k=k[i], k_out=k[i], rotation={"theta": THETA}) for i in range(count)
    ]
    ours[0]()
    agree(f"rope {batch}x{seq}, q", {"f32": exact[0], OURS: q[0]})
    agree(f"rope {batch}x{seq}, k", {"f32": exact[1], OURS: k[0]})
    contenders = {
        OURS: lambda i: ours[i % count](),
        "torch": ring(count, lambda i: rotate(q[i], k[i])),
        "torch.compile": ring(count, lambda i: fast(q[i], k[i])),
        "copy": copies(bytes_moved),
    }
    if liger:
        narrow = [t.bfloat16()[None] for t in tables]
        turned_about = [(a.transpose(1, 2), b.transpose(1, 2)) for a, b in zip(q, k)]
        contenders["liger"] = ring(count, lambda i: liger.LigerRopeFunction.apply(*turned_about[i], *narrow))
    if flashinfer:
        at = positions.repeat(batch).to(torch.int32)
        flat = [(a.view(-1, HEADS, DIM), b.view(-1, KV_HEADS, DIM)) for a, b in zip(q, k)]
        in_place = flashinfer.rope.apply_rope_pos_ids_inplace
        contenders["flashinfer"] = lambda i: in_place(*flat[i % count], at, rope_theta=THETA)
    record.add(f"{batch}x{seq}", graphs(contenders), dtype="bf16", bytes=bytes_moved)
