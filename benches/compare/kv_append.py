"""Writing new keys and values into the pages of a cache: 8 KV heads, head dim 128, pages of 16
tokens, one layer a call."""

import ctypes

import torch
from common import OURS, Record, agree, copies, graphs, peer, randn, ring

# Sequences and new tokens of each: prefill, and decoding.
BATCHES = [(4, 4096), (1, 2048), (256, 1), (64, 1)]
HEADS, DIM, PAGE, LAYERS = 8, 128, 16, 16
METHOD = (
    "Microseconds of one call: a graph of calls, each for another layer, replayed by turns, medians. `copy` moves as many bytes. "
    "PyTorch writes k and v by an index per token, made before; FlashInfer takes its own tables, made before."
)


def compare(ctx):
    flashinfer = peer("flashinfer")
    record = Record("kv_append", ctx.library, METHOD, ("flashinfer-python",))
    for sequences, tokens in BATCHES:
        case(ctx, record, flashinfer, sequences, tokens)
        torch.cuda.empty_cache()


def case(ctx, record, flashinfer, sequences, tokens):
    library = ctx.library
    total = sequences * tokens
    pages_each = -(-tokens // PAGE)
    num_pages = sequences * pages_each
    bytes_moved = 2 * 2 * total * HEADS * DIM * 2
    k, v = ([randn(total, HEADS, DIM) for _ in range(LAYERS)] for _ in range(2))

    params = library.struct(
        "kv_cache_params",
        dtype=library.constants["DTYPE_BF16"],
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        page_size=PAGE,
        num_pages=num_pages,
        max_batch_size=sequences,
        max_batch_tokens=total,
    )
    cache = ctypes.c_void_p()
    library.call("kv_cache_create", ctx.handle, ctypes.byref(params), ctypes.byref(cache))
    ids = (ctypes.c_int64 * sequences)()
    for i in range(sequences):
        library.call("kv_cache_sequence_create", cache, ctypes.byref(ids, 8 * i))
    counts = (ctypes.c_int64 * sequences)(*[tokens] * sequences)
    library.call("kv_cache_extend", cache, ids, counts, ctypes.c_size_t(sequences), None)
    torch.cuda.synchronize()
    appends = [library.struct("kv_cache_append_params", layer=i, k=k[i], v=v[i]) for i in range(LAYERS)]

    def ours(i):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        library.call("kv_cache_append", cache, ctypes.byref(appends[i % LAYERS]), stream)

    # Pages in the order in which ours are handed out: by sequence.
    index = torch.arange(tokens, device="cuda").repeat(sequences)
    first = torch.arange(sequences, device="cuda").repeat_interleave(tokens) * pages_each
    page, slot = first + index // PAGE, index % PAGE
    pages = [torch.zeros(num_pages, 2, PAGE, HEADS, DIM, device="cuda", dtype=k[0].dtype) for _ in range(LAYERS)]

    def plain(i):
        pages[i][page, 0, slot] = k[i]
        pages[i][page, 1, slot] = v[i]

    contenders = {OURS: ours, "torch": ring(LAYERS, plain), "copy": copies(bytes_moved)}
    if flashinfer:
        to = lambda t: torch.tensor(t, device="cuda", dtype=torch.int32)
        owner = torch.arange(sequences, device="cuda").repeat_interleave(tokens).to(torch.int32)
        tables = to(list(range(num_pages))), to([i * pages_each for i in range(sequences + 1)])
        last = to([(tokens - 1) % PAGE + 1] * sequences)
        contenders["flashinfer"] = lambda i: flashinfer.page.append_paged_kv_cache(
            k[i % LAYERS], v[i % LAYERS], owner, index.to(torch.int32), pages[i % LAYERS], *tables, last, "NHD"
        )
    times = graphs(contenders)
    check(ctx, cache, tokens, k, v, ids)
    record.add(f"{sequences}x{tokens}", times, dtype="bf16", bytes=bytes_moved)
    library.call("kv_cache_destroy", cache)


def check(ctx, cache, tokens, k, v, ids):
    """The last token of the first sequence lies where the cache says."""
    library = ctx.library
    tensor = library.structs["unsloth_tensor"]
    found, size = (tensor(), tensor()), ctypes.c_size_t()
    table = (ctypes.c_int32 * -(-tokens // PAGE))()
    library.call("kv_cache_layer_get", cache, ctypes.c_int64(3), *map(ctypes.byref, found))
    arguments = table, ctypes.c_size_t(len(table)), ctypes.byref(size)
    library.call("kv_cache_sequence_pages_get", cache, ctypes.c_int64(ids[0]), *arguments)
    at = tokens - 1
    for there, given in zip(found, (k, v)):
        element = table[at // PAGE] * there.strides[0] + at % PAGE * there.strides[1]
        row = (ctypes.c_uint16 * (HEADS * DIM))()
        copy_back(ctx, row, there.data + 2 * element)
        got = torch.frombuffer(row, dtype=torch.bfloat16)
        agree("kv_append", {"given": given[3][at].flatten().cpu(), OURS: got}, tolerance=0)


def copy_back(ctx, row, address):
    kind = ctx.library.constants["COPY_KIND_DEVICE_TO_HOST"]
    size, kind = ctypes.c_size_t(ctypes.sizeof(row)), ctypes.c_uint32(kind)
    ctx.library.call("memory_copy", ctx.handle, row, ctypes.c_void_p(address), size, kind, None)
    ctx.library.call("stream_synchronize", ctx.handle, None)
