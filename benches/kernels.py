"""Lists what the compiled kernels use and how many of their blocks a multiprocessor runs at once.

    python3 benches/kernels.py              # every kernel of the newest build
    python3 benches/kernels.py decode 90a   # those whose names contain this, for one architecture

The build writes this record, `kernels.json`, beside what it embeds.
"""

import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
COLUMNS = ("kernel", "sm", "registers", "threads", "shared", "blocks", "occupancy")


def row(kernel):
    """The cells of a kernel's line; those of its occupancy are empty where its build knew none."""
    found = kernel.get("occupancy")
    cells = [kernel["kernel"], kernel["architecture"], kernel["registers"]]
    if not found:
        return [*cells, "", kernel["static_shared_bytes"], "", ""]
    shared = kernel["static_shared_bytes"] + found["dynamic_shared_bytes"]
    return [*cells, found["threads"], shared, found["blocks"], f"{found['percent']} %"]


def table(kernels, name="", architecture=""):
    chosen = [k for k in kernels if name in k["kernel"] and architecture in ("", k["architecture"])]
    lines = (COLUMNS, *sorted(map(row, chosen), key=lambda line: line[:2]))
    rows = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:]))
        yield "  ".join((first.ljust(widths[0]), *cells))


def main(name="", architecture=""):
    reports = TARGET.glob("**/build/unsloth-rs-*/out/kernels.json")
    newest = max(reports, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        sys.exit(f"no build with CUDA under {TARGET}")
    print(*table(json.loads(newest.read_text()), name, architecture), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
