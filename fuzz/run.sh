#!/bin/bash
# Builds the fuzz target and runs it for FUZZ_SECONDS (default 30) in FUZZ_WORKERS processes (default: one for each processor);
# further arguments go to libFuzzer.
#
# `cargo fuzz run c_abi` does the same with a nightly toolchain. Here the flags that it would pass are passed by hand, so that the
# stable toolchain does: only the address sanitizer is unstable, and RUSTC_BOOTSTRAP lets this one build have it.
set -euo pipefail
cd "$(dirname "$0")"
target=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="--cfg fuzzing -Zsanitizer=address"
# The library and the target report coverage. Dependencies do not: what their schedulers and kernels do differs from run to run or
# tells nothing, and costs most of the time.
export RUSTC_WRAPPER=$PWD/rustc.sh
cargo build --release --locked --target "$target" --target-dir target

mkdir -p corpus/c_abi artifacts/c_abi
# Left alone, the fuzzer begins with inputs of a few bytes, which decide little. These decide everything, each differently;
# their first bytes, which choose what is called, are all that there are.
workers=${FUZZ_WORKERS:-$(nproc)}
seeds=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$seeds"' EXIT
python3 - "$seeds" "$workers" <<'END'
import os, pathlib, sys
workers = int(sys.argv[2])
for i in range(4096):
    folder = pathlib.Path(sys.argv[1], str(i // 256 % workers))
    folder.mkdir(exist_ok=True)
    (folder / str(i)).write_bytes(bytes([i % 256]) + os.urandom(255))
END
# Of the time of a run more than half went into the schedule that prefers inputs of rare features, and
# into shortening inputs of one length: inputs decide as much as they have bytes, so both are off.
# A call that takes twenty seconds on these small tensors does not end; the limit of memory catches sizes that were not checked.
for worker in "$seeds"/*; do
  "target/$target/release/c_abi" corpus/c_abi "$worker" -artifact_prefix=artifacts/c_abi/ -max_total_time="${FUZZ_SECONDS:-30}" \
    -timeout=20 -rss_limit_mb=4096 -max_len=1024 -len_control=0 -entropic=0 -reduce_inputs=0 -verbosity=0 -print_final_stats=1 "$@" &
done
# The first that fails ends the run.
while [ -n "$(jobs -p)" ]; do
  wait -n
done
