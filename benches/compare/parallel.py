"""What ranks divide among two GPUs or more, one process each: whether it is what one GPU computes, and how much faster.

    python3 benches/compare parallel
    python3 benches/compare/parallel.py --ranks 2       # on the CPU: that it runs, and the same checks

`scaling` is the time of one GPU, measured in the same run by turns, over the ranks' share of it: 1 is linear. Beside it
PyTorch's own on the same shapes, with its all-reduce over the same NCCL. PARALLEL names the parts to run.
"""

import argparse
import ctypes
import os
import sys

METHOD = (
    "Microseconds of one call, captured in a graph (of prefill and decoding, of one layer of several): medians of 7 by turns, each of "
    "some replays behind a barrier and 60 ms of replays that do not count, of the rank that took longest. `scaling` is one GPU's time, of "
    "the same run, over `ranks` times that of the ranks. PyTorch's ranks are its own products and attention with dist.all_reduce in a "
    "graph, and again where torch.compile has what lies between; its data parallel is DDP, not captured, with gradients in bf16, where "
    "ours are in f32 or, where it is said, in bf16 but for the table of tokens."
)


def parts():
    from parallel_checks import checks
    from parallel_context import attention
    from parallel_measure import decode, prefill, prefill_compiled
    from parallel_overlap import overlap
    from parallel_train import head, steps

    all = [("checks", checks), ("prefill", prefill), ("decode", decode), ("context", attention), ("head", head), ("steps", steps)]
    all += [("compiled", prefill_compiled), ("overlap", overlap)]
    wanted = os.environ.get("PARALLEL")
    return [part for part in all if wanted is None or part[0] in wanted.split()]


def nccl_version():
    """That of the library that is loaded, which may be another than PyTorch was built with."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def compare(ctx):
    import torch
    from common import Record
    from ranks import on_gpus

    size = torch.cuda.device_count()
    if size < 2:
        print("parallel: one GPU alone")
        return
    record = Record("parallel", ctx.library, METHOD)
    record.result["ranks"] = size
    record.result["versions"]["nccl"] = nccl_version()
    wrong = on_gpus(parts(), size, record.add)
    record.result["wrong"] = wrong
    record.save()
    if wrong:
        raise AssertionError("\n".join(wrong))


def main():
    from ranks import on_cpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    size = parser.parse_args().ranks
    _, wrong = on_cpu(parts(), size)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    from common import ROOT

    sys.path.append(str(ROOT / "python"))
    staged = ROOT / "build" / "prefix" / "lib" / "libunsloth.so"
    if staged.exists():
        os.environ.setdefault("UNSLOTH_LIBRARY", str(staged))
    main()
