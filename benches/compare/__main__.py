"""Measures libunsloth on a GPU beside PyTorch and other libraries, in one process.

    make CUDA=1 stage && python3 benches/compare rms_norm rope swiglu embedding kv_append linear attention host calls

Needs PyTorch; peers that are installed (Triton, Liger, FlashInfer) take part. Writes benches/results/OP_DEVICE_DATE.json, which
`python3 benches/report.py render` turns into the README's tables and plots.
"""

import importlib
import sys
import traceback

import abi
import torch


def main():
    names = sys.argv[1:]
    if not names:
        sys.exit(__doc__)
    library = abi.Library()
    print(library.build_info, torch.__version__, torch.cuda.get_device_name(), flush=True)
    ctx = library.context()
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
