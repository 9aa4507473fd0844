"""How long a call keeps the host, without Python: what the Rust bench `cuda` prints when asked for
`host`.

    cargo bench --features cuda --bench cuda --no-run
    UNSLOTH_BENCHES=target/release/deps python3 benches/compare calls
"""

import json
import os
import pathlib
import subprocess
import sys

from common import OURS, Record

METHOD = (
    "Microseconds until a call returns, from Rust: means of 100 calls, the least of 50 rounds and of 5 processes. cuLaunchKernel is that of "
    "an empty kernel with the parameters of rms_norm's, cuMemcpyDtoDAsync that of 1 KiB. `context_ms` is how long making a context took in each "
    "process: the first, which starts the driver, and another one."
)
BASELINES = {"launch": "cuLaunchKernel", "copy": "cuMemcpyDtoDAsync"}
PROCESSES = 5


def case(row):
    about = row["about"]
    if row["op"] == "attention":
        parts = 1 if about["workspace_size"] < 1024 else 2
        return f"attention, {about['queries']} queries, {about['keys']} keys, {parts} launch{'es' if parts > 1 else ''}"
    return f"{row['op']} {'x'.join(map(str, about['shape']))}"


def compare(ctx):
    folder = os.environ.get("UNSLOTH_BENCHES")
    if not folder:
        sys.exit(f"UNSLOTH_BENCHES is not set.{__doc__}")
    record = Record("calls", ctx.library, METHOD)
    least, contexts = {}, []
    for _ in range(PROCESSES):
        ran = subprocess.run([pathlib.Path(folder) / "cuda", "host"], capture_output=True, text=True, check=True)
        started, *rows = map(json.loads, ran.stdout.splitlines())
        contexts.append([round(started[name], 1) for name in ("first_context_ms", "context_ms")])
        for row in rows:
            name = BASELINES.get(row["op"]) or case(row)
            least[name] = min(row["host_us"], least.get(name, row["host_us"]))
    record.result["context_ms"] = contexts
    baselines = {name: least.pop(name) for name in BASELINES.values()}
    for name, us in least.items():
        record.add(name, {OURS: us} | baselines)
