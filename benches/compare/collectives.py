"""Collectives of the GPUs of one host beside torch.distributed's, which calls the same NCCL: one process a GPU.

Before anything is timed, results are torch's, and a captured collective gives the same bits in 1000 replays. The last
group loses a rank: the others' error says so, and they end it without waiting.
"""

import ctypes
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from common import OURS, Record
from ranks import in_group

SIZES = [8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
CALLS, ROUNDS, REPLAYS = 20, 7, 1000
METHOD = (
    "Microseconds of one call: a graph of 20 calls, replayed by turns after a barrier, medians of rank 0. `bytes` are those of the "
    "whole tensor, bf16. torch.distributed calls the same NCCL."
)


def compare(ctx):
    ranks = torch.cuda.device_count()
    if ranks < 2:
        print("collectives: one GPU alone")
        return
    record = Record("collectives", ctx.library, METHOD)
    record.result["ranks"] = ranks
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (ranks, folder), nprocs=ranks)
        for case, times, about in torch.load(os.path.join(folder, "rows")):
            record.add(case, times, **about)


def group_of(ctx, rank, ranks):
    """A group of libunsloth's, by an id that torch.distributed passes on."""
    library = ctx.library
    kind = library.constants["COMM_KIND_NCCL"]
    identity = library.structs["unsloth_comm_id"]()
    if rank == 0:
        params = library.struct("comm_id_params", kind=kind)
        library.call("comm_id_create", ctypes.byref(params), ctypes.byref(identity))
    shared = [bytes(identity)]
    dist.broadcast_object_list(shared)
    ctypes.memmove(ctypes.byref(identity), shared[0], ctypes.sizeof(identity))
    params = library.struct("comm_params", kind=kind, rank=rank, size=ranks, id=identity)
    comm = ctypes.c_void_p()
    library.call("comm_create", ctx.handle, ctypes.byref(params), ctypes.byref(comm))
    library.call("comm_warm_up", comm, ctx.stream())
    return comm.value


def one_rank(rank, ranks, folder):
    import unsloth

    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    ctx = unsloth.Context("cuda", device=rank)
    comm = group_of(ctx, rank, ranks)
    info = ctx.library.struct("comm_info")
    ctx.library.call("comm_info_get", comm, ctypes.byref(info))
    assert (info.rank, info.size) == (rank, ranks)
    if rank == 0:
        print(f"NCCL {info.library_version}, {ranks} ranks", flush=True)
    agree(ctx, comm, rank, ranks)
    replay(ctx, comm, rank)
    rows = []
    for size in SIZES:
        for case, calls in pairs(ctx, comm, rank, ranks, size // 2).items():
            times = graphs(calls)
            rows.append((f"{case} {size >> 10} KiB", times, {"dtype": "bf16", "bytes": size, "nccl": info.library_version}))
            if rank == 0:
                print(rows[-1][0], times, flush=True)
    if rank == 0:
        torch.save(rows, os.path.join(folder, "rows"))
    ctx.library.call("comm_destroy", comm)
    lose(ctx, rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


def pairs(ctx, comm, rank, ranks, elements):
    """{collective: {who: call}}, of the same tensors."""
    whole = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(whole)
    part = torch.randn(elements // ranks, device="cuda", dtype=torch.bfloat16)
    mine = torch.empty_like(part)
    add = ctx.library.constants["REDUCE_OP_SUM"]
    summed = torch.zeros_like(whole)
    reached = in_group(ctx.library, comm, summed)
    return {
        "all_reduce": {
            OURS: lambda: ctx.all_reduce(comm=comm, op=add, x=summed),
            f"{OURS} in the group's memory": lambda: ctx.all_reduce(comm=comm, op=add, x=reached),
            "torch": lambda: dist.all_reduce(summed),
        },
        "all_gather": {
            OURS: lambda: ctx.all_gather(comm=comm, x=part, out=out),
            "torch": lambda: dist.all_gather_into_tensor(out, part),
        },
        "reduce_scatter": {
            OURS: lambda: ctx.reduce_scatter(comm=comm, op=add, x=whole, out=mine),
            "torch": lambda: dist.reduce_scatter_tensor(mine, whole),
        },
        "all_to_all": {
            OURS: lambda: ctx.all_to_all(comm=comm, x=whole, out=out),
            "torch": lambda: dist.all_to_all_single(out, whole),
        },
    }


def agree(ctx, comm, rank, ranks):
    """Ours and torch's, of random tensors that differ by rank; sums to a rounding."""
    torch.manual_seed(rank)
    op = ctx.library.constants["REDUCE_OP_SUM"]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole = torch.randn(ranks * 1000, device="cuda").to(dtype)
        part = torch.randn(1000, device="cuda").to(dtype)
        ours, theirs = torch.empty_like(whole), whole.clone()
        ctx.all_reduce(comm=comm, op=op, x=whole, out=ours)
        dist.all_reduce(theirs)
        close("all_reduce", ours, theirs)
        ctx.all_gather(comm=comm, x=part, out=ours)
        dist.all_gather_into_tensor(theirs, part)
        close("all_gather", ours, theirs)
        ctx.all_to_all(comm=comm, x=whole, out=ours)
        dist.all_to_all_single(theirs, whole)
        close("all_to_all", ours, theirs)
        ours, theirs = torch.empty_like(part), torch.empty_like(part)
        ctx.reduce_scatter(comm=comm, op=op, x=whole, out=ours)
        dist.reduce_scatter_tensor(theirs, whole)
        close("reduce_scatter", ours, theirs)
        ours, theirs = part.clone(), part.clone()
        ctx.broadcast(comm=comm, root=ranks - 1, x=part, out=ours)
        dist.broadcast(theirs, ranks - 1)
        close("broadcast", ours, theirs)
        following, previous = (rank + 1) % ranks, (rank - 1) % ranks
        ctx.send_receive(comm=comm, to=following, **{"from": previous}, x=part, out=ours)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, part, following), dist.P2POp(dist.irecv, theirs, previous)])
        for request in requests:
            request.wait()
        close("send_receive", ours, theirs)
    if rank == 0:
        print("results are torch's", flush=True)


def close(name, ours, theirs):
    torch.cuda.synchronize()
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{name}: {text}")


def replay(ctx, comm, rank):
    x = torch.randn(100_000, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    call = ctx.op("all_reduce", comm=comm, op=ctx.library.constants["REDUCE_OP_SUM"], x=x, out=out)
    call()
    torch.cuda.synchronize()
    first, graph, stream = out.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for _ in range(REPLAYS):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first), "a replay gives other bits"
    if rank == 0:
        print(f"{REPLAYS} replays give the same bits", flush=True)


def graphs(contenders):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    bursts, times = {}, {name: [] for name in contenders}
    for name, call in contenders.items():
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        bursts[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bursts[name], stream=stream):
            for _ in range(CALLS):
                call()
    for _ in range(ROUNDS):
        for name, graph in bursts.items():
            dist.barrier()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {name: statistics.median(all) for name, all in times.items()}


def lose(ctx, rank, ranks):
    """A group whose last rank leaves; the others abort what waits for it."""
    comm = group_of(ctx, rank, ranks)
    x = torch.ones(1000, device="cuda")
    dist.barrier()
    if rank == ranks - 1:
        ctx.library.call("comm_abort", comm)
        ctx.library.call("comm_destroy", comm)
        return
    ctx.all_reduce(comm=comm, x=x)
    time.sleep(0.5)
    started = time.perf_counter()
    ctx.library.call("comm_abort", comm)
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    assert took < 20, f"aborting took {took} s"
    try:
        ctx.all_reduce(comm=comm, x=x)
        raise AssertionError("an aborted group takes calls")
    except Exception as error:
        text = str(error)
    ctx.library.call("comm_destroy", comm)
    if rank == 0:
        print(f"a lost rank: aborted in {took:.2f} s; then {text}", flush=True)
