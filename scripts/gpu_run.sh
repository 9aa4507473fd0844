#!/bin/bash
# Runs, on a machine with a GPU, what scripts/gpu_pack.sh built: Rust tests, C tests, the engine, the same tests under
# compute-sanitizer where there is one, and benchmarks, those beside PyTorch where there is a PyTorch. Logs and figures go to $OUT
# (results/ beside this script), and what is printed to gpu_run.log there. Ends with the number of what failed.
#
# TESTS, C_TESTS, SANITIZED, BENCHES and COMPARE name parts of each; an empty one leaves the kind out, as ENGINE= does the engine's
# speed. SECONDS_EACH bounds every one; TESTERS and SANITIZERS say how many run side by side.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/results}
mkdir -p "$out"
cd "$here" || exit 1
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} UNSLOTH_RESULTS=$out
export UNSLOTH_LIBRARY=$here/lib/libunsloth.so.0 UNSLOTH_HEADER=$here/include/unsloth.h PYTHONDONTWRITEBYTECODE=1
export UNSLOTH_BENCHES=$here/benches
[ -f commit ] && UNSLOTH_COMMIT=$(cat commit) && export UNSLOTH_COMMIT
limit=${SECONDS_EACH:-300}

all() { ls "$1" 2>/dev/null | tr '\n' ' '; }

# Whether a log tells of a race where nothing is copied by the copy engine, whose writes racecheck takes for races: cuBLAS' kernels and
# those of Hopper's attention read what it brings.
races() { grep "Race reported between" "$1" | grep -qvE " at (nvjet|attention_forward_)"; }

# check NAME COMMAND...: a line that says how it went; failures are counted by the files that they leave.
rm -f "$out"/*.failed
check() {
  local name=$1 began=$SECONDS
  shift
  if timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 && ! races "$out/$name.log"; then
    echo "ok      $name, $((SECONDS - began)) s  $(grep -h '^test result' "$out/$name.log" | tail -1)"
  else
    touch "$out/$name.failed"
    echo "FAILED  $name, $((SECONDS - began)) s"
    tail -n "${TAIL:-25}" "$out/$name.log"
  fi
}

everything() {
  echo "commit ${UNSLOTH_COMMIT:-unknown}, $(date +%F)"
  nvidia-smi --query-gpu=name,driver_version,compute_cap,clocks.sm,clocks.mem,clocks.max.sm,power.draw --format=csv | tee "$out/device.csv"

  # Processes of their own, several at a time: a failing kernel fails its own test only, and most of a test is the host's work.
  for test in ${TESTS-$(all tests)}; do
    while [ "$(jobs -rp | wc -l)" -ge "${TESTERS:-6}" ]; do wait -n; done
    check "$test" "tests/$test" --test-threads=2 &
  done
  wait
  for test in ${C_TESTS-$(all c)}; do
    check "c.$test" "c/$test"
  done
  model=$(find model -name '*.gguf' 2>/dev/null | head -1)
  if [ -x engine ] && [ -n "$model" ]; then
    check engine ./engine --model "$model" --device cuda --prompt "The capital of France is" --tokens 48 --temperature 0
  fi

  # Tables of cases without the properties, which repeat them at random, and without the fault that is meant. A refused allocation is no
  # error here. Sanitizers leave the GPU idle, so several run at a time.
  skipped='a_fault_is_told_as_such scale_invariant scores_are_relative packed_equals_apart inverse_undoes norm_is_kept
    histories_agree_with_a_list'
  skips=$(for name in $skipped; do echo "--skip $name"; done)
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -n "$sanitizer" ]; then
    for tool in memcheck initcheck racecheck; do
      # The longest first; no races where Hopper's attention serves nearly all.
      hopper=$([ "$tool" = racecheck ] || echo attention attention_hopper attention_block attention_block_cached)
      for test in ${SANITIZED-linear cuda_attention cuda_dense cast argmax swiglu $hopper mlp cuda memory rope rms_norm embedding \
        kv_cache kv_cache_append kv_cache_history kv_cache_steps}; do
        while [ "$(jobs -rp | wc -l)" -ge "${SANITIZERS:-8}" ]; do wait -n; done
        slow=
        case $tool in
          memcheck) options="--report-api-errors no --error-exitcode 1" ;;
          initcheck) options="--error-exitcode 1" ;;
          racecheck) options="--print-limit 0" ;;
        esac
        # Its threads, which call cuBLAS side by side, did not end under racecheck within minutes; why is not known.
        [ "$tool.$test" = racecheck.cuda_dense ] && slow="--skip threads_share_a_context"
        # shellcheck disable=SC2086
        check "$tool.$test" "$sanitizer" --tool "$tool" $options "tests/$test" --test-threads=1 $skips $slow &
      done
    done
    wait
  fi

  # What is compared with candle is a Rust program, which the comparison of that name runs and records.
  candle=$([ ! -x benches/candle ] || echo candle)
  for bench in ${BENCHES-$(all benches | sed 's/\<candle\>//')}; do
    check "bench.$bench" "benches/$bench"
    grep '^{' "$out/bench.$bench.log" >"$out/$bench.json"
  done
  if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    for op in ${COMPARE-rms_norm rope swiglu embedding kv_append linear attention attention_forward host calls $candle}; do
      TAIL=12 check "compare.$op" python3 compare "$op"
    done
  fi
  if [ "${ENGINE-1}" = 1 ] && [ -x engine ] && [ -n "$model" ]; then
    name=$(tail -n +2 "$out/device.csv" | head -1 | sed -E 's/^(NVIDIA )?([^ ,]+).*/\2/' | tr '[:upper:]' '[:lower:]')
    check bench.engine python3 engine.py --engine ./engine --model "$model" --rounds 3 --out "$out/engine_${name}_$(date +%F).json"
  fi
  failed=$(find "$out" -name '*.failed' | wc -l)
  echo "$failed failed"
  exit "$failed"
}

everything | tee "$out/gpu_run.log"
exit "${PIPESTATUS[0]}"
