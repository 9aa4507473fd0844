"""Measures libunsloth on a GPU beside PyTorch and other libraries, in one process.

    make CUDA=1 stage
    python3 benches/compare rms_norm layer_norm rope swiglu embedding kv_append linear mlp attention attention_decode host calls

Needs PyTorch; peers that are installed (Triton, Liger, FlashInfer) take part. Writes
benches/results/OP_DEVICE_DATE.json, which `python3 benches/report.py render` turns into tables and
plots.
"""

import importlib
import os
import sys
import traceback

import torch
from common import ROOT, Workspace

# In a checkout: the module of its sources, and what `make stage` installed. A GPU run has the
# module beside this file.
sys.path.append(str(ROOT / "python"))
staged = ROOT / "build" / "prefix" / "lib" / "libunsloth.so"
if staged.exists():
    os.environ.setdefault("UNSLOTH_LIBRARY", str(staged))

import unsloth


def main():
    names = sys.argv[1:]
    if not names:
        sys.exit(__doc__)
    ctx = unsloth.Context("cuda", allocate=Workspace)
    print(ctx.library.build_info, torch.__version__, torch.cuda.get_device_name(), flush=True)
    failed = []
    for name in names:
        # A comparison that fails does not take the others' figures with it.
        try:
            importlib.import_module(name).compare(ctx)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
