"""Decoding: one query token of each sequence to many keys, beside a copy of as many bytes, cuDNN (through PyTorch, without pages) and
FlashInfer (with pages); and the same of a cache of 8-bit floats, beside our own of bf16.

CASES=REGEX leaves the cases whose names begin so.
"""

import ctypes
import dataclasses
import os
import re

import torch
import torch.nn.functional as F
from common import OURS, Record, agree, graphs, num_sets, peer, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

METHOD = (
    "Microseconds of one call: a graph of calls on working sets that exceed the cache, replayed by turns, medians. `copy` reads and writes "
    "as many bytes together as K and V have, by a kernel (a negation: graphs give plain copies to copy engines, which are slower). `cudnn` "
    "has the same tensors, `heads first` are tensors with each head's keys one after the other; with pages both have none, and are there to tell "
    "what pages cost. `flashinfer` has its pages of K and V in one tensor, and plans before. Ragged: 64 sequences of 128 to 16,384 keys. "
    "Of an fp8 cache (e4m3, a scale for each head) `copy` moves its bytes, `unsloth, bf16` has the same sequences in bf16, and `of_bf16` "
    "says how many times as fast the other is."
)
PAGE = 16
IMPLEMENTATIONS = {2: "portable", 3: "hopper"}


@dataclasses.dataclass
class Case:
    """So many sequences of `keys` keys, or the ragged ones with 0."""

    batch: int
    keys: int
    dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    paged: bool = False
    fp8: bool = False

    def __post_init__(self):
        self.lengths = [self.keys] * self.batch
        if not self.keys:
            drawn = torch.randint(128, 16384, (self.batch,), generator=torch.Generator().manual_seed(1))
            self.lengths = drawn.tolist()

    def __str__(self):
        heads = "" if (self.heads, self.kv_heads) == (32, 8) else f" heads {self.heads}/{self.kv_heads}"
        return f"head_dim {self.dim}{heads} {self.batch}x{self.keys or 'ragged'}{' paged' if self.paged else ''}{' fp8 cache' if self.fp8 else ''}"

    def bytes(self):
        return 2 * sum(self.lengths) * self.kv_heads * self.dim * (1 if self.fp8 else 2)


SHAPES = [
    *(dict(batch=batch, keys=keys) for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (20, 8192), (32, 4096), (128, 2048))),
    *(dict(batch=batch, keys=keys) for batch, keys in ((256, 1024), (512, 333), (3, 30011), (16, 1777), (1, 1024), (64, 128))),
    *(dict(batch=batch, keys=keys, dim=dim) for dim in (64, 256) for batch, keys in ((1, 131072), (32, 4096), (512, 333))),
    *(dict(batch=batch, keys=keys, heads=8) for batch, keys in ((1, 131072), (32, 4096))),
    *(dict(batch=batch, keys=keys, heads=64) for batch, keys in ((1, 131072), (32, 4096))),
    dict(batch=32, keys=4096, dim=64, heads=32, kv_heads=4),
    dict(batch=1, keys=131072, heads=8, kv_heads=1),
]
CASES = [Case(**shape, paged=paged) for shape in SHAPES for paged in (False, True)] + [Case(64, 0, paged=True)]
OF_FP8 = [
    *(dict(batch=batch, keys=keys) for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (32, 4096), (128, 2048), (512, 333))),
    *(dict(batch=batch, keys=keys, dim=dim) for dim in (64, 256) for batch, keys in ((1, 131072), (32, 4096))),
    *(dict(batch=32, keys=4096, heads=heads) for heads in (8, 64)),
]
CASES += [Case(**shape, paged=paged, fp8=True) for shape in OF_FP8 for paged in (False, True)] + [Case(64, 0, paged=True, fp8=True)]


def compare(ctx):
    record = Record("attention_decode", ctx.library, METHOD, ("flashinfer-python",))
    for case in CASES:
        if re.match(os.environ.get("CASES", ""), str(case)):
            (one_of_fp8 if case.fp8 else one)(ctx, record, case)
            torch.cuda.empty_cache()


def copies(bytes_moved):
    count = num_sets(bytes_moved)
    sources = [torch.randn(bytes_moved // 8, device="cuda") for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i: torch.neg(sources[i % count], out=targets[i % count])


class Sets:
    """Keys and values as the library takes them, and where pages are."""

    def __init__(self, case):
        self.count = num_sets(case.bytes())
        self.more, self.tables = {}, None
        if not case.paged:
            self.all = [[randn(case.batch, case.keys, case.kv_heads, case.dim) for _ in range(2)] for _ in range(self.count)]
            return
        self.pages = [-(-length // PAGE) for length in case.lengths]
        order = torch.randperm(sum(self.pages), device="cuda").to(torch.int32)
        self.tables = order.split(self.pages)
        table = torch.zeros(case.batch, max(self.pages), dtype=torch.int32, device="cuda")
        for row, pages in zip(table, self.tables):
            row[: len(pages)] = pages
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        self.more = dict(block_table=table, seq_lens_k=lengths, max_seqlen_k=max(case.lengths))
        # K and V of a page side by side, as FlashInfer has them.
        self.both = [randn(sum(self.pages), 2, PAGE, case.kv_heads, case.dim) for _ in range(self.count)]
        self.all = [[both[:, 0], both[:, 1]] for both in self.both]

    def of_sequence(self, case, i):
        """K and V of one sequence of the first set, without pages."""
        if not case.paged:
            return [t[i : i + 1] for t in self.all[0]]
        pages = self.tables[i].long()
        return [t[pages].flatten(0, 1)[None, : case.lengths[i]] for t in self.all[0]]


def one(ctx, record, case):
    sets = Sets(case)
    q = randn(case.batch, 1, case.heads, case.dim)
    out = torch.empty_like(q)
    ours = [ctx.op("attention", q=q, k=k, v=v, out=out, **sets.more) for k, v in sets.all]
    ours[0]()
    for i in (0, case.batch - 1):
        heads = [t.transpose(1, 2).float() for t in (q[i : i + 1], *sets.of_sequence(case, i))]
        expected = F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2)
        agree(f"{case}, sequence {i}", {"torch": expected, OURS: out[i : i + 1]})
    contenders = {OURS: lambda i: ours[i % sets.count](), "copy": copies(case.bytes())}
    if not case.paged:
        contenders[f"{OURS}, heads first"] = heads_first(ctx, case, sets, q)
    makers = dict(flashinfer=flashinfer) if case.paged else {}
    if case.keys:
        makers |= {"cudnn": cudnn, "cudnn, heads first": cudnn_heads_first}
    for name, make in makers.items():
        try:
            run, comparable = make(case, sets, q)
            found = run(0).view_as(out) if name == "flashinfer" else run(0).transpose(1, 2)
            torch.cuda.synchronize()
        except Exception as error:  # each refuses in its own way
            print(f"attention_decode {case}: without {name}: {error!r:.200}", flush=True)
            continue
        if comparable:
            agree(f"{case} {name}", {name: found, OURS: out})
        contenders[name] = run
    times = graphs(contenders, calls=8)
    peers = [us for name, us in times.items() if name != "copy" and not name.startswith(OURS)]
    best = min(peers, default=None)
    implementation = IMPLEMENTATIONS.get(ctx.implementation("attention", ours[0].params), "unknown")
    about = dict(dtype="bf16", heads=case.heads, kv_heads=case.kv_heads, bytes=case.bytes(), served=implementation)
    if best:
        about["of_best_peer"] = round(best / times[OURS], 3)
    print(f"attention_decode {case}: {about}", flush=True)
    record.add(str(case), times, of_copy=round(times["copy"] / times[OURS], 3), **about)


def heads_first(ctx, case, sets, q):
    """Ours, of a cache that has each head's keys one after the other."""
    shape = case.batch, case.kv_heads, case.keys, case.dim
    tensors = [[randn(*shape).transpose(1, 2) for _ in range(2)] for _ in range(sets.count)]
    out = torch.empty_like(q)
    ours = [ctx.op("attention", q=q, k=k, v=v, out=out) for k, v in tensors]
    ours[0]()
    heads = [t[:1].transpose(1, 2).float() for t in (q, *tensors[0])]
    expected = F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2)
    agree(f"{case}, heads first", {"torch": expected, OURS: out[:1]})
    return lambda i: ours[i % sets.count]()


def one_of_fp8(ctx, record, case):
    of_bf16 = dataclasses.replace(case, fp8=False)
    q = randn(case.batch, 1, case.heads, case.dim)
    out, wide = torch.empty_like(q), torch.empty_like(q)
    sets = Sets(of_bf16)
    scales = [torch.rand(case.kv_heads, device="cuda") / 50 + 0.02 for _ in range(2)]
    ours, kept = [], []
    for _ in range(num_sets(case.bytes())):
        codes = [(t / scale[:, None]).to(torch.float8_e4m3fn) for t, scale in zip(sets.all[0], scales)]
        (k, v), owned = codes_of(ctx, codes, scales)
        ours.append(ctx.op("attention", q=q, k=k, v=v, out=out, **sets.more))
        kept.append((codes, owned))
    # What codes stand for, in bf16: the nearest to it there.
    sets.all[0] = [(t.float() * scale[:, None]).bfloat16() for t, scale in zip(kept[0][0], scales)]
    plain = [ctx.op("attention", q=q, k=k, v=v, out=wide, **sets.more) for k, v in sets.all]
    ours[0]()
    plain[0]()
    agree(str(case), {"bf16": wide, OURS: out})
    contenders = {
        OURS: lambda i: ours[i % len(ours)](),
        f"{OURS}, bf16": lambda i: plain[i % len(plain)](),
        "copy": copies(case.bytes()),
    }
    times = graphs(contenders, calls=8)
    served = IMPLEMENTATIONS.get(ctx.implementation("attention", ours[0].params), "unknown")
    about = dict(dtype="bf16", cache="f8e4m3", heads=case.heads, kv_heads=case.kv_heads, bytes=case.bytes(), served=served)
    about["of_bf16"] = round(times[f"{OURS}, bf16"] / times[OURS], 3)
    print(f"attention_decode {case}: {about} {times}", flush=True)
    record.add(str(case), times, of_copy=round(times["copy"] / times[OURS], 3), **about)


def codes_of(ctx, tensors, scales):
    """Tensors of 8-bit floats with their scales, for which DLPack has no word, and what they point to."""
    made, kept = [], []
    for codes, scale in zip(tensors, scales):
        tensor = ctx.library.tensor(codes.view(torch.int8), "CUDA", ctx.stream())
        tensor.dtype = ctx.library.constants["DTYPE_F8E4M3"]
        quantization = ctx.library.struct("quantization", scale=scale)
        tensor.quantization = ctypes.addressof(quantization)
        made.append(tensor)
        kept += [tensor, quantization]
    return made, kept


def flashinfer(case, sets, q):
    module = peer("flashinfer")
    if module is None:
        raise ImportError("flashinfer")
    ends = torch.tensor([0, *torch.tensor(sets.pages).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    last = torch.tensor([(length - 1) % PAGE + 1 for length in case.lengths], dtype=torch.int32, device="cuda")
    memory = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=True)
    shape = case.heads, case.kv_heads, case.dim, PAGE
    wrapper.plan(ends, torch.cat(sets.tables), last, *shape, q_data_type=q.dtype, kv_data_type=q.dtype)
    rows = q.view(case.batch, case.heads, case.dim)
    return lambda i: wrapper.run(rows, sets.both[i % sets.count]), True


def of_cudnn(q, keys_and_values):
    def run(i):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q.transpose(1, 2), *keys_and_values[i % len(keys_and_values)], enable_gqa=True)

    return run


def cudnn(case, sets, q):
    tensors = sets.all
    if case.paged:
        shape = case.batch, case.keys, case.kv_heads, case.dim
        tensors = [[randn(*shape) for _ in range(2)] for _ in range(sets.count)]
    return of_cudnn(q, [[t.transpose(1, 2) for t in both] for both in tensors]), not case.paged


def cudnn_heads_first(case, sets, q):
    shape = case.batch, case.kv_heads, case.keys, case.dim
    return of_cudnn(q, [[randn(*shape) for _ in range(2)] for _ in range(sets.count)]), False
