"""Attention on candle's CUDA tensors beside candle's own, and the memory that each needs: what the
Rust bench `candle` prints.

    cargo bench --features candle-cuda --bench candle --no-run
    UNSLOTH_BENCHES=target/release/deps python3 benches/compare candle
"""

import json
import os
import pathlib
import subprocess
import sys

from common import OURS, Record

METHOD = (
    "Microseconds of one call of [1, keys, 32, 128] without a mask, 5 in a row until the device is idle, contenders by turns, medians of 15 "
    "rounds, from Rust in Cargo's test profile: candle's matrix products and softmax on its CUDA tensors, and this library on the same. `memory` is the peak of the "
    "device's memory pool beyond the inputs, the result included."
)


def compare(ctx):
    folder = os.environ.get("UNSLOTH_BENCHES")
    if not folder:
        sys.exit(f"UNSLOTH_BENCHES is not set.{__doc__}")
    ran = subprocess.run([pathlib.Path(folder) / "candle"], capture_output=True, text=True, check=True)
    record = Record("attention_candle", ctx.library, METHOD)
    for line in ran.stdout.splitlines():
        row = json.loads(line)
        memory = row["memory"]
        record.add(row["case"], row["us"], dtype=row["dtype"], memory=memory, saved=round(1 - memory[OURS] / memory["candle"], 4))
