#!/bin/bash
# Builds what a GPU machine needs into .gpu/, which Git ignores: the library, Rust tests and
# benchmarks, C tests, the engine and the trainer, the scripts that compare with PyTorch, the record to
# compare with, and the script that runs it all. Such a machine needs a driver; compute-sanitizer and PyTorch are
# used where they are.
#
#     scripts/gpu_pack.sh && scp -r .gpu host: && ssh host .gpu/gpu_run.sh
#
# PROFILE is Cargo's profile (release) of the library and of what is measured; Rust tests have their
# own, with its assertions. PACK is the folder. MODEL is a GGUF file for the engine and the
# trainer (none: the engine is not run, and the trainer on small models alone). TESTS names Rust tests; by default all of them, of which each takes the devices that it
# finds. PROVE=0 leaves out Hopper's kernels with random delays, and the library with such, which take minutes.
# SAME_BITS=1 adds the comparison with CubeCL's own runtime, CANDLE=1 what runs on candle's CUDA
# tensors (candle links the CUDA toolkit).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PATH="$root/.tools/bin:$PATH"
profile=${PROFILE:-release}
pack=${PACK:-$root/.gpu}
mkdir -p "$pack"/{tests,benches,c,lib,include,model}
rm -f "$pack"/{tests,benches,c,lib,include,model}/* "$pack"/{engine,trainer}
rm -rf "$pack"/{compare,kernels,prove,record,trained}

make --no-print-directory CUDA=1 PROFILE="$profile" build-test-c
soname=$(readelf -d build/prefix/lib/libunsloth.so | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
strip -o "$pack/lib/$soname" build/prefix/lib/libunsloth.so
cp build/prefix/include/unsloth.h "$pack/include/"
# As C and linked to the shared library: that is what a GPU adds nothing to.
for test in build/c_tests/*.c.shared; do
  name=$(basename "$test" .c.shared)
  case $name in layout | links | inits) continue ;; esac
  strip -o "$pack/c/$name" "$test"
done
make --no-print-directory CUDA=1 PROFILE="$profile" engine
strip -o "$pack/engine" build/engine/engine
make --no-print-directory CUDA=1 PROFILE="$profile" trainer
cmake --build build/trainer --target trainer_step_test
strip -o "$pack/trainer" build/trainer/trainer
mkdir -p "$pack/trained"
strip -o "$pack/trained/step_test" build/trainer/tests/trainer_step_test
python3 examples/trainer/tests/write_models.py "$pack/trained/models"
cp examples/trainer/data/libunsloth.jsonl "$pack/trained/"
[ -z "${MODEL:-}" ] || cp "$MODEL" "$pack/model/"

tests=${TESTS:-$(git ls-files 'tests/*.rs' | sed -nE 's|^tests/(([^/]+)\.rs\|([^/]+)/main\.rs)$|\2\3|p' | grep -vE '^(candle|header|oracle_candle|floors)$')}
# Unit tests too: some of them need a device.
select=(--features cuda --lib)
for test in $tests; do
  select+=(--test "$test")
done
built() {
  python3 -c '
import json, sys
for line in sys.stdin:
    built = json.loads(line)
    if built.get("reason") == "compiler-artifact" and built["executable"]:
        kind, name = built["target"]["kind"][0], built["target"]["name"]
        folder = {"test": "tests", "bench": "benches"}.get(kind, "tests")
        print(folder, name if kind in ("test", "bench") else "unit", built["executable"])
' | while read -r folder name executable; do
    strip -o "$pack/$folder/$name" "$executable"
  done
}
cargo test --locked --no-run --message-format=json-render-diagnostics "${select[@]}" | built
cargo bench --locked --no-run --message-format=json-render-diagnostics --features cuda --profile "$profile" --bench cuda | built
if [ "${SAME_BITS:-0}" = 1 ]; then
  cargo test --no-run --message-format=json-render-diagnostics --manifest-path kernels/same_bits/Cargo.toml | built
fi

if [ "${CANDLE:-0}" = 1 ]; then
  # In one profile: candle's kernels take minutes to compile.
  cargo test --locked --no-run --message-format=json-render-diagnostics --features candle-cuda --test candle --bench candle | built
fi

mkdir -p "$pack"/{compare,record}
cp benches/compare/*.py "$pack/compare/"
cp -r python/unsloth "$pack/compare/"
cp benches/{attention_report,engine,llama_cpp,ranks_report,regression,report,scale_model,train_candle,training}.py "$pack/"
cp benches/results/*.json "$pack/record/"

# The harness of Hopper's kernels, these as they ship and with random delays, and the library with such.
if [ "${PROVE:-1}" = 1 ]; then
  git ls-files 'kernels/*.py' | while read -r script; do
    install -D -m 644 "$script" "$pack/$script"
  done
  build=$(git ls-files 'kernels/*build.py' | grep cuda || git ls-files 'kernels/*build.py')
  python3 "$build" "$pack/prove/plain" -
  python3 "$build" "$pack/prove/jitter" - -DUNSLOTH_JITTER
  rm -f "$pack"/prove/*/*.cu
  UNSLOTH_JITTER=1 cargo build --locked --features cuda --lib
  strip -o "$pack/prove/libunsloth_delays.so" target/debug/libunsloth.so
fi
cp scripts/{gpu_run.sh,compare_ranks.py} "$pack/"
git rev-parse --short HEAD >"$pack/commit"
du -sh "$pack" >&2
