#!/bin/sh
# Builds what a GPU machine needs into .gpu/, which Git ignores: stripped tests and benchmarks, the library, and the script that runs
# them. Such a machine needs a driver and nothing else.
#
#     scripts/gpu_pack.sh && scp -r .gpu host: && ssh host .gpu/gpu_run.sh
#
# PROFILE is Cargo's profile (release), PACK the folder.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
profile=${PROFILE:-release}
pack=${PACK:-$root/.gpu}
python3 scripts/tools.py nvcc
PATH="$root/.tools/bin:$PATH"

# Operations with CUDA kernels, the misuse of each, and what belongs to the backend as a whole.
tests='context cuda embedding kv_cache rms_norm rms_norm_misuse rope swiglu'

set -- --features cuda --profile "$profile" --bench cuda
for test in $tests; do
    set -- "$@" --test "$test"
done
mkdir -p "$pack/tests" "$pack/benches"
rm -f "$pack"/tests/* "$pack"/benches/*
cargo test --no-run --message-format=json-render-diagnostics "$@" |
    python3 -c '
import json, sys
for line in sys.stdin:
    built = json.loads(line)
    if built.get("reason") == "compiler-artifact" and built["executable"]:
        kind = built["target"]["kind"][0]
        if kind in ("test", "bench"):
            print({"test": "tests", "bench": "benches"}[kind], built["target"]["name"], built["executable"])
' | while read -r folder name executable; do
    strip -o "$pack/$folder/$name" "$executable"
done
cp scripts/gpu_run.sh "$pack/"
du -sh "$pack" >&2
