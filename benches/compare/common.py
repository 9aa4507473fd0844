"""What every comparison shares: working sets, timing, records.

A comparison has contenders, each a function of a working set's number that does the same work with
the same layouts and outputs. Working sets together exceed the GPU's cache, so memory is really
read. Contenders take turns within each round; figures are medians.

Two clocks. `graphs` captures a burst of calls of each contender into a CUDA graph and times its
replay: what a step of an engine sees, without the host. `kernels` sums the device time of all
kernels of a burst as CUPTI reports it: for work that cannot be captured, and for kernels beside
kernels. `host` is the time until a call returns.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Several times the L2 cache of today's GPUs.
WORKING_SET = 512 << 20
OURS = "unsloth"


class Workspace:
    """From PyTorch's allocator, whose peak some comparisons measure. It aligns to 512 bytes, the
    library asks for 256."""

    def __init__(self, size):
        self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.address = self.memory.data_ptr()


def peer(name):
    """A module to compare with, or None where it is not installed."""
    try:
        return __import__(name, fromlist=["x"])
    except Exception as error:  # a peer may fail on import in its own ways
        print(f"without {name}: {error!r:.200}", file=sys.stderr)
        return None


def num_sets(bytes_of_one):
    return max(2, min(32, -(-WORKING_SET // max(bytes_of_one, 1))))


def named_layers(layers):
    """(out_features, in_features) that LAYERS names (28672x4096,6144x4096), or `layers`."""
    names = os.environ.get("LAYERS")
    return layers if names is None else [tuple(map(int, name.split("x"))) for name in names.split(",")]


def named_rows():
    """Rows of x that ROWS names (512,535), or None."""
    names = os.environ.get("ROWS")
    return None if names is None else tuple(map(int, names.split(",")))


def randn(*shape, dtype=torch.bfloat16):
    """Standard normal numbers: zeros would cost the GPU less power."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def agree(case, results, tolerance=2e-2):
    """Stops the comparison if contenders differ by more than `tolerance` of the largest number."""
    (first, expected), *others = results.items()
    for name, got in others:
        assert got.shape == expected.shape, f"{case}: {name} gives {got.shape}, {first} {expected.shape}"
        worst = (got.float() - expected.float()).abs().max().item()
        bound = tolerance * expected.float().abs().max().item()
        assert worst <= bound, f"{case}: {name} is {worst} away from {first}, {bound} is allowed"


def captured(function, calls):
    """A graph of a burst of calls. Every contender is warm before: torch.compile and Triton
    compile at the first call."""
    # What was queued before may still use the workspace of the same call.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for i in range(calls):
                function(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            function(i)
    return graph


def graphs(contenders, calls=None, rounds=15, seconds=0.25):
    """{contender: microseconds of one call} by replays of graphs, in turns. A replay that counts
    follows one of the same contender: after another's, what that left in the cache to be written
    to memory would be counted too."""
    calls = calls or 16
    bursts = {name: captured(function, calls) for name, function in contenders.items()}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {name: [] for name in bursts}
    stop = time.perf_counter() + seconds * len(bursts)
    for turn in range(rounds + 1):
        for name, graph in bursts.items():
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn > 0:  # the first one warms
                times[name].append(begin.elapsed_time(end) / calls * 1e3)
        if turn >= 5 and time.perf_counter() > stop:
            break
    return {name: statistics.median(all) for name, all in times.items()}


def busy(profiled):
    """Microseconds in which a profiled GPU has kernels. One that is started while the one before it still runs, and
    waits for that, counts once."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernels(contenders, calls=8, rounds=3):
    """{contender: microseconds of kernel time of one call} by CUPTI, in turns."""
    from torch.profiler import ProfilerActivity, profile

    for function in contenders.values():
        for i in range(calls):
            function(i)
    torch.cuda.synchronize()
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for i in range(calls):
                    function(i)
                torch.cuda.synchronize()
            times[name].append(busy(profiled) / calls)
    return {name: statistics.median(all) for name, all in times.items()}


def host(contenders, calls=200, rounds=20):
    """{contender: microseconds until a call returns}, the queue never full: the least of the
    rounds, in turns."""
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in contenders.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for i in range(calls):
                function(i)
            took = (time.perf_counter() - started) / calls * 1e6
            least[name] = min(least[name], took)
    torch.cuda.synchronize()
    return least


def copies(bytes_moved):
    """A contender that copies, reading and writing `bytes_moved` together: the roof of what is
    bound by memory."""
    count = num_sets(bytes_moved)
    words = max(bytes_moved // 16, 1)
    sources = [torch.randint(-(1 << 60), 1 << 60, (words,), device="cuda") for _ in range(count)]
    # Parts of at most 256 MiB: larger copies are a third slower.
    pairs = [list(zip(source.split(1 << 25), torch.empty_like(source).split(1 << 25))) for source in sources]

    def run(i):
        for source, target in pairs[i % count]:
            target.copy_(source)

    return run


def smi(fields):
    asked = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split("\n")[0]
        return dict(zip(fields.split(","), (value.strip() for value in said.split(","))))
    except (OSError, subprocess.CalledProcessError):
        return {}


class Record:
    """What a comparison measured, written to results/OP_DEVICE_DATE.json as it goes."""

    def __init__(self, op, library, method, peers=()):
        properties = torch.cuda.get_device_properties(0)
        name = properties.name
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        for package in ("triton", *peers):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = None
        self.result = {
            "op": op,
            "date": os.environ.get("UNSLOTH_DATE") or datetime.date.today().isoformat(),
            "device": {"name": name, "multiprocessors": properties.multi_processor_count}
            | smi("driver_version,clocks.max.sm,clocks.max.mem,power.limit"),
            "library": library.build_info,
            "commit": os.environ.get("UNSLOTH_COMMIT", ""),
            "versions": versions,
            "command": " ".join(["python3", *sys.argv]),
            "method": method,
            "rows": [],
        }
        short = name.removeprefix("NVIDIA ").split()[0].lower()
        folder = pathlib.Path(os.environ.get("UNSLOTH_RESULTS", ROOT / "benches" / "results"))
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{op}_{short}_{self.result['date']}.json"

    def add(self, case, times, **about):
        """One row: the case, microseconds of each contender, and what else there is to know
        (bytes, flops, dtype)."""
        row = {"case": case, **about, "us": {name: round(us, 3) for name, us in times.items()}}
        row |= {"clocks": smi("clocks.sm,clocks.mem,power.draw")}
        self.result["rows"].append(row)
        text = " ".join(f"{name} {us:.2f}" for name, us in times.items())
        if OURS in times and "bytes" in about:
            text += f" | {about['bytes'] / times[OURS] / 1e6:.3f} TB/s"
        print(f"{self.result['op']} {case}: {text}", flush=True)
        self.save()

    def save(self):
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


def ring(count, function):
    """A contender that keeps its result for each of `count` working sets, as an engine would: the
    next call cannot write to cached memory."""
    results = [None] * count

    def run(i):
        results[i % count] = function(i % count)

    run.results = results
    return run


def compiled(function):
    """torch.compile of a function, for one shape."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)
