"""Ranks of a comparison: one process a GPU, over NCCL; or, to see that a script runs where there is no GPU, one thread
a rank on the CPU, over a local group.

What ranks do is a list of parts, which they begin together. A part that fails, or takes longer than it may, ends all of
them, and new ones go on with the parts behind it.
"""

import ctypes
import faulthandler
import gc
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist
from common import OURS, Workspace

SECONDS_OF_PART = int(os.environ.get("PARALLEL_SECONDS", "120"))
ROUNDS = 7
WARM_SECONDS = 0.06


class Told(list):
    """What is wrong, said at once too: what comes after may not end."""

    def append(self, text):
        print(text, file=sys.stderr, flush=True)
        super().append(text)


def in_group(library, comm, tensor):
    """A copy of a tensor in memory that a group gives, which ends with the group. Every rank makes it."""
    pointer = ctypes.c_void_p()
    library.call("comm_memory_alloc", comm, ctypes.c_size_t(tensor.nbytes), ctypes.byref(pointer))
    if tensor.is_cuda:
        view = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3}
        there = torch.as_tensor(type("There", (), {"__cuda_array_interface__": view})(), device=tensor.device)
    else:
        there = torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(pointer.value), dtype=torch.uint8)
    return there.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Rank:
    """One of them, with a context and its part in the group. `found` are rows for the record, of the first rank;
    `wrong` what checks have found."""

    def __init__(self, ctx, rank, size, device, board):
        self.ctx, self.rank, self.size, self.device, self.board = ctx, rank, size, device, board
        self.found, self.wrong, self.rows = [], Told(), None
        self.cuda = device.type == "cuda"
        self.comm = self.join()

    def join(self):
        """The group, by an id that the first rank makes."""
        library = self.ctx.library
        kind = library.constants["COMM_KIND_NCCL" if self.cuda else "COMM_KIND_LOCAL"]
        identity = library.structs["unsloth_comm_id"]()
        if self.rank == 0:
            params = library.struct("comm_id_params", kind=kind)
            library.call("comm_id_create", ctypes.byref(params), ctypes.byref(identity))
        ctypes.memmove(ctypes.byref(identity), self.exchange(bytes(identity))[0], ctypes.sizeof(identity))
        params = library.struct("comm_params", kind=kind, rank=self.rank, size=self.size, id=identity, timeout_ms=60000)
        comm = ctypes.c_void_p()
        library.call("comm_create", self.ctx.handle, ctypes.byref(params), ctypes.byref(comm))
        library.call("comm_warm_up", comm, self.ctx.stream())
        return comm.value

    def parallel(self, **fields):
        return dict(comm=self.comm, **fields)

    def in_group(self, tensor):
        """A copy of it in memory that the group gives. Every rank makes it."""
        return in_group(self.ctx.library, self.comm, tensor)

    def exchange(self, mine):
        """What every rank has, in their order."""
        return self.board.exchange(self.rank, mine)

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def empty_cache(self):
        # The context's own workspace was the last large thing.
        self.ctx.workspace, self.ctx.workspace_size = None, 0
        # A model and its calls know each other.
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def apart(self):
        """What is made next has a workspace of its own, so that it may run beside what was made before."""
        self.ctx.workspace, self.ctx.workspace_size = None, 0

    def capture(self, function):
        """What repeats a call: a graph of it, once it has run; on the CPU the call."""
        if not self.cuda:
            return function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        return graph.replay

    def times(self, contenders, rounds=ROUNDS):
        """{contender: microseconds of one call}, by turns, each after a barrier and calls that do not count: medians of the rank that
        took longest. Those that do not count bring the GPU to the clocks at which it goes on: a contender that draws much power
        lowers them for the one behind it."""
        replays = {name: self.capture(function) for name, function in contenders.items()}
        counts = {name: self.warming(replay) for name, replay in replays.items()}
        taken = {name: [] for name in replays}
        for turn in range(rounds + 1):
            for name, replay in replays.items():
                self.exchange(None)
                taken[name].append(self.once(replay, counts[name]))
        mine = {name: statistics.median(all[1:]) for name, all in taken.items()}
        all = self.exchange(mine)
        return {name: max(of_rank[name] for of_rank in all) for name in mine}

    def warming(self, replay):
        """How many calls take `WARM_SECONDS`, the same for all ranks."""
        if not self.cuda:
            return 0
        self.exchange(None)
        longest = max(self.exchange(self.once(replay, 1)))
        return min(max(int(WARM_SECONDS * 1e6 / longest), 1), 1000)

    def once(self, replay, warming):
        if not self.cuda:
            started = time.perf_counter()
            replay()
            return (time.perf_counter() - started) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(warming):
            replay()
        begin.record()
        counted = max(1, warming // 4)
        for _ in range(counted):
            replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / counted

    def row(self, case, times, **about):
        """A row of the record, in which the best of ours that ranks divide has our name, as tables want it."""
        divided = [us for name, us in times.items() if name.startswith(OURS) and "one GPU" not in name]
        times = {OURS: min(divided)} | times if divided else times
        self.found.append((case, times, about))
        if self.rank == 0:
            if self.rows:
                torch.save(self.found, self.rows)
            shown = {name: value for name, value in about.items() if name in ("scaling", "of_torch")}
            print(f"{case}: {' '.join(f'{name} {us:.1f}' for name, us in times.items())} {shown}", flush=True)


class Board:
    """Where threads leave what the others read."""

    def __init__(self, size):
        self.barrier, self.left = threading.Barrier(size), [None] * size

    def exchange(self, rank, mine):
        self.left[rank] = mine
        self.barrier.wait()
        all = list(self.left)
        self.barrier.wait()
        return all


class Files:
    """The same between processes, by a store of files: no sockets, and nothing on the device."""

    def __init__(self, store, size):
        self.store, self.size, self.count = store, size, 0

    def exchange(self, rank, mine):
        self.count += 1
        self.store.set(f"{self.count}/{rank}", pickle.dumps(mine))
        return [pickle.loads(self.store.get(f"{self.count}/{rank}")) for rank in range(self.size)]


def on_cpu(parts, size):
    """Runs the parts on threads, and gives what was found and what was wrong."""
    import unsloth

    board, made, errors = Board(size), [None] * size, []

    def one(rank):
        try:
            made[rank] = Rank(unsloth.Context("cpu", num_threads=1), rank, size, torch.device("cpu"), board)
            for _, part in parts:
                part(made[rank])
        except Exception:
            errors.append(traceback.format_exc())
            board.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [text for rank in made if rank for text in rank.wrong]
    return made[0].found if made[0] else [], wrong + errors


def on_gpus(parts, size, add):
    """The same of one process a GPU. `add` takes rows as parts end."""
    wrong, left = [], list(parts)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            attempt = os.path.join(folder, str(len(left)))
            os.mkdir(attempt)
            try:
                torch.multiprocessing.spawn(one_gpu, (size, attempt, left), nprocs=size)
            except Exception as error:  # the process that ended first says why
                print(f"{error!s:.2000}", file=sys.stderr)
            done = 0
            for name, _ in left:
                file = os.path.join(attempt, name)
                ended = os.path.exists(file)
                if os.path.exists(f"{file}.rows"):
                    for case, times, about in torch.load(f"{file}.rows", weights_only=False):
                        add(case, times, **about)
                if not ended:
                    break
                wrong += torch.load(file, weights_only=False)
                done += 1
            if done < len(left):
                wrong.append(f"{left[done][0]} did not end")
            left = left[done + 1 :]
    return wrong


def one_gpu(rank, size, folder, parts):
    import unsloth

    faulthandler.dump_traceback_later(SECONDS_OF_PART, exit=True)
    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    board = Files(dist.FileStore(os.path.join(folder, "board"), size), size)
    here = Rank(unsloth.Context("cuda", device=rank, allocate=Workspace), rank, size, device, board)
    for name, part in parts:
        started = time.perf_counter()
        here.found, here.wrong, here.rows = [], Told(), os.path.join(folder, f"{name}.rows")
        faulthandler.dump_traceback_later(SECONDS_OF_PART, exit=True)
        part(here)
        here.synchronize()
        here.empty_cache()
        wrong = [text for of_rank in here.exchange(here.wrong) for text in of_rank]
        if rank == 0:
            torch.save(wrong, os.path.join(folder, f"{name}.new"))
            os.rename(os.path.join(folder, f"{name}.new"), os.path.join(folder, name))
            print(f"{name} took {time.perf_counter() - started:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    # Graphs that hold a group's collectives may outlive it; the process ends here, and all of it.
    sys.stdout.flush()
    here.exchange(None)
    os._exit(0)
