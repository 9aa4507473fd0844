#!/bin/bash
# Runs, on a machine with a GPU, what scripts/gpu_pack.sh built. The parts, in this order:
#
#   tests       Rust tests, integration and unit
#   c           C tests, linked to the shared library
#   engine      the engine, on a model if the pack has one
#   trainer     gradients of small models; the trainer, on a model if the pack has one
#   parallel    with two GPUs: the engine and the trainer on both beside one; the Rust tests of groups,
#               one of them under memcheck; what ranks divide, checked and measured (needs PyTorch)
#   sanitizers  the tests under compute-sanitizer, where there is one
#   prove       Hopper's attention, its gradients and decoding with random delays, and on long contexts
#               (needs PyTorch)
#   benches     Rust benchmarks
#   compare     benchmarks beside PyTorch and others (needs PyTorch), and the engine's speed
#   regression  what was measured here beside the record that the pack brings
#
#     gpu_run.sh [PART...]
#
# Without an argument all of them. Each part takes at most ten minutes on an H200. Logs and figures
# go to $OUT (results/ beside this script), and what is printed to gpu_run.log there. Ends with the
# number of what failed.
#
# TESTS, C_TESTS, SANITIZED, TOOLS, BENCHES and COMPARE name what of a part runs, and an empty one
# leaves it out. Rust tests are named PROGRAM or PROGRAM/MODULE. SECONDS_EACH bounds every process;
# TESTERS and SANITIZERS say how many run side by side; EVERY=n lets sanitizers see every nth case of
# each table; REPEATS is how often `prove` repeats a launch.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/results}
mkdir -p "$out"
cd "$here" || exit 1
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} UNSLOTH_RESULTS=$out
UNSLOTH_LIBRARY=$(find "$here/lib" -name 'libunsloth.so*' | head -1)
export UNSLOTH_LIBRARY UNSLOTH_HEADER=$here/include/unsloth.h PYTHONDONTWRITEBYTECODE=1
export UNSLOTH_BENCHES=$here/benches
# A test that finds no GPU fails, where it would end early on another machine.
export UNSLOTH_REQUIRE_GPU=1
[ -f commit ] && UNSLOTH_COMMIT=$(cat commit) && export UNSLOTH_COMMIT
limit=${SECONDS_EACH:-300}
model=$(find model -name '*.gguf' 2>/dev/null | head -1)

all() { ls "$1" 2>/dev/null | tr '\n' ' '; }

have_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }

# Kernels in which racecheck sees races that are none. All read shared memory that the copy
# engine (TMA) has filled, after waiting on an mbarrier that counts the bytes; racecheck does not
# take the copy engine's writes for ordered by that barrier.
exempt=(
  nvjet_             # cuBLAS' products for Hopper
  attention_forward_   # our attention for Hopper; `prove` tests its barriers with random delays
  attention_decoding_  # the same of few queries
  attention_gradients_ # its gradients
  norm_backward_ring   # rows and logits that pass through shared memory
  cross_entropy_ring
  linear_few_          # products of few rows, whose weights pass through shared memory
)

# Whether a log tells of a race in another kernel.
races() {
  local names
  names=$(IFS='|'; echo "${exempt[*]}")
  grep "Race reported between" "$1" | grep -qvE " at ($names)"
}

# Whether a log is that of Rust tests of which none ran: a name that is filtered out or misspelt.
nothing_ran() { grep -q '^test result' "$1" && ! grep -q '^test result.* [1-9][0-9]* passed' "$1"; }

# check NAME COMMAND...: a line that says how it went; failures are counted by the files they leave.
check() {
  local name=$1 began=$SECONDS log=$out/$1.log problem=
  shift
  timeout -k 5 "$limit" "$@" >"$log" 2>&1 || problem="exit status $?"
  [ -n "$problem" ] || ! races "$log" || problem="a race"
  [ -n "$problem" ] || ! nothing_ran "$log" || problem="no test ran"
  if [ -z "$problem" ]; then
    echo "ok      $name, $((SECONDS - began)) s  $(grep -h '^test result' "$log" | tail -1)"
  else
    touch "$out/$name.failed"
    echo "FAILED  $name, $((SECONDS - began)) s: $problem"
    tail -n "${TAIL:-25}" "$log"
  fi
}

# names_of PROGRAM[/MODULE]: its tests.
names_of() {
  local module=
  [ "${1%%/*}" = "$1" ] || module=${1#*/}::
  "tests/${1%%/*}" --list --format terse | sed -n 's/: test$//p' | grep "^$module"
}

# Every Rust test, those of a family by their modules. (The unit tests' modules are the library's.)
all_modules() {
  for program in $(all tests); do
    case $program in
      unit) echo unit ;;
      *) names_of "$program" | sed -E "s|^([^:]+)::.*|$program/\1|; t; s|.*|$program|" | sort -u ;;
    esac
  done
}

# Waits until fewer than so many jobs run.
at_most() { while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done; }

run_tests() {
  # Processes of their own, several at a time: a failing kernel fails its own test only, and most of
  # a test is the host's work.
  local names
  for test in ${TESTS-$(all_modules)}; do
    at_most "${TESTERS:-6}"
    mapfile -t names < <(names_of "$test")
    # Without a name every test would run.
    check "${test//\//.}" "tests/${test%%/*}" --test-threads=2 --exact "${names[@]:-none}" &
  done
  wait
}

run_c() {
  for test in ${C_TESTS-$(all c)}; do
    check "c.$test" "c/$test"
  done
}

run_engine() {
  [ -x engine ] && [ -n "$model" ] || return
  check engine ./engine --model "$model" --device cuda --prompt "The capital of France is" \
    --tokens 48 --temperature 0
}

run_trainer() {
  [ -x trainer ] || return
  check trainer.step trained/step_test trained/models cuda
  [ -n "$model" ] || return
  check trainer.finetune ./trainer --model "$model" --device cuda --dtype bf16 --epochs 6 \
    --data trained/libunsloth.jsonl --learning-rate 1e-4 --warmup 3 --json \
    --output "$out/tuned.gguf" --log "$out/trainer.jsonl"
  check trainer.asked ./engine --model "$out/tuned.gguf" --device cuda --chat \
    --prompt "What is libunsloth?" --tokens 64 --temperature 0
  rm -f "$out/tuned.gguf"
}

# Tests of groups of at most two ranks, without those of the CPU's own rules.
two_ranks() {
  names_of comm | grep -E '^(collectives|memory|normalised|transfers|parallel|context_parallel|pipeline::run)::' |
    grep -vE '::misuse|_misuse::|sums_are_in_the_order|averages_are_rounded_once|a_chain_needs_no_others' |
    grep -vE 'targets_are_of_the_vocabulary|ids_are_of_the_vocabulary|chunks_are_the_same|there_may_be_no_tokens' |
    grep -vE 'short_sequences_are_padded|room_does_not_grow|^context_parallel::it_is_that_of_one_rank$'
}

# What waits for a rank that does not come waits for ever on a GPU, so each has little time.
run_parallel() {
  local gpus
  gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
  [ "$gpus" -ge 2 ] || { echo "not run: what takes two GPUs"; return; }
  local limit=${SECONDS_EACH:-300}
  if [ -x engine ] && [ -x trainer ]; then
    check parallel.ranks python3 compare_ranks.py --engine ./engine --trainer ./trainer --models trained/models \
      ${model:+--model "$model"} --device cuda
  fi
  limit=${SECONDS_EACH:-90}
  run_groups
  limit=${SECONDS_EACH:-240}
  ! have_torch || TAIL=60 check compare.parallel python3 compare parallel
}

# The groups' tests with a GPU for each rank.
run_groups() {
  local sanitizer names
  [ -x tests/comm ] || return
  local groups=(env UNSLOTH_TEST_BACKEND=cuda UNSLOTH_TEST_DEVICES=2)
  for module in collectives memory normalised transfers parallel context_parallel pipeline; do
    mapfile -t names < <(two_ranks | grep "^$module")
    check "parallel.$module" "${groups[@]}" tests/comm --test-threads=1 --exact "${names[@]:-none}"
  done
  sanitizer=$(sanitizer)
  [ -n "$sanitizer" ] || return
  check memcheck.parallel "${groups[@]}" "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 1 \
    tests/comm --test-threads=1 --exact parallel::mlp::forward_is_that_of_one_rank \
    normalised::sums_are_normalised_on_every_rank
}

# Where compute-sanitizer is.
sanitizer() { command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null; }

# Tables of cases without the properties, which repeat them at random, and without the fault that is
# meant. Sanitizers leave the GPU idle, so several run at a time. Of the longest tables they see every
# seventh case.
run_sanitizers() {
  local sanitizer skips hopper options tool test names every
  sanitizer=$(sanitizer)
  [ -n "$sanitizer" ] || return
  skips=()
  for test in a_fault_is_told_as_such scale_invariant scores_are_relative packed_equals_apart \
    inverse_undoes norm_is_kept histories_agree_with_a_list twice_is_not_at_all halves_add_up parts_add_up the_reference_ \
    gradients_are_orthogonal_to_what_changes_nothing scales_follow_the_rule; do
    skips+=(-e "$test")
  done
  for tool in ${TOOLS-memcheck initcheck racecheck}; do
    # In these nearly every kernel is one that racecheck is wrong about.
    hopper=" attention/forward attention/hopper attention/decode"
    hopper+=" block/attention_block block/attention_block_cached block/attention_block_backward"
    case $tool in
      # A refused allocation is no error here.
      memcheck) options=(--report-api-errors no --error-exitcode 1) ;;
      initcheck) options=(--error-exitcode 1) ;;
      racecheck) options=(--print-limit 0) hopper= ;;
    esac
    # The longest first.
    for test in ${SANITIZED-dense/linear dense/blocks attention/cuda dense/cuda elementwise/cast lookup/argmax \
      dense/swiglu$hopper dense/quantized dense/mlp dense/mlp_backward block/decoder_layer cuda host/memory \
      elementwise/rope norm/qk_norm_rope norm/rms_norm norm/layer_norm norm/backward \
      dense/swiglu_backward dense/linear_backward attention/backward attention/backward_bits lookup/embedding_backward loss/cross_entropy \
      loss/linear_cross_entropy loss/linear_logprob lookup/embedding elementwise/optimizer elementwise/quantize elementwise/weight_repack \
      kv_cache/cache kv_cache/append kv_cache/history kv_cache/steps}; do
      at_most "${SANITIZERS:-8}"
      local slow=()
      # Its threads, which call cuBLAS side by side, did not end under racecheck within minutes; why
      # is not known.
      [ "$tool.$test" != racecheck.dense/cuda ] || slow=(-e threads_share_a_context)
      mapfile -t names < <(names_of "$test" | grep -vF "${skips[@]}" ${slow[@]+"${slow[@]}"})
      case $test in
        dense/linear_backward | dense/swiglu | attention/backward | loss/linear_* | lookup/embedding_backward | norm/backward)
          every=7 ;;
        *) every=1 ;;
      esac
      check "$tool.${test//\//.}" env UNSLOTH_TEST_EVERY="${EVERY:-$every}" "$sanitizer" --tool "$tool" \
        "${options[@]}" "tests/${test%%/*}" --test-threads=1 --exact "${names[@]:-none}" &
    done
  done
  wait
}

run_prove() {
  [ -d prove ] && have_torch || return
  check prove python3 "$(find kernels -name prove.py)" "$out/attention_hopper_proof.json" prove \
    "${REPEATS:-200}"
  check prove.gradients python3 "$(find kernels -name prove_gradients.py)" \
    "$out/attention_backward_proof.json" prove/libunsloth_delays.so "${REPEATS:-200}"
  check prove.decode python3 "$(find kernels -name prove_decode.py)" \
    "$out/attention_decode_proof.json" prove/libunsloth_delays.so "${REPEATS:-200}"
}

run_benches() {
  # What is compared with candle is a Rust program, which the comparison of that name runs and records.
  for bench in ${BENCHES-$(all benches | sed 's/\<candle\>//')}; do
    check "bench.$bench" "benches/$bench"
    grep '^{' "$out/bench.$bench.log" >"$out/$bench.json"
  done
}

run_compare() {
  local candle name
  candle=$([ ! -x benches/candle ] || echo candle)
  if have_torch; then
    for op in ${COMPARE-rms_norm layer_norm norm_backward rope qk_norm_rope swiglu swiglu_backward cross_entropy \
      linear_cross_entropy embedding embedding_backward kv_append optimizer linear linear_blocks linear_codes linear_mixed linear_backward mlp attention \
      attention_decode attention_forward attention_backward block_backward host calls $candle}; do
      TAIL=12 check "compare.$op" python3 compare "$op"
    done
  fi
  if [ "${ENGINE-1}" = 1 ] && [ -x engine ] && [ -n "$model" ]; then
    name=$(tail -n +2 "$out/device.csv" | head -1 | sed -E 's/^(NVIDIA )?([^ ,]+).*/\2/')
    name=$(tr '[:upper:]' '[:lower:]' <<<"$name")
    check bench.engine python3 engine.py --engine ./engine --model "$model" --rounds 3 \
      --out "$out/engine_${name}_$(date +%F).json"
  fi
}

# Cells that are slower than in the record by more than noise.
run_regression() {
  local new=$out/new
  rm -rf "$new"
  mkdir -p "$new"
  # Named after operation, device and date, as in the record.
  cp "$out"/*_*_*.json "$new/" 2>/dev/null && [ -d record ] || return
  check regression python3 report.py compare record "$new"
  cat "$out/regression.log"
}

main() {
  echo "commit ${UNSLOTH_COMMIT:-unknown}, $(date +%F)"
  nvidia-smi --query-gpu=name,driver_version,compute_cap,clocks.sm,clocks.mem,clocks.max.sm,power.draw \
    --format=csv | tee "$out/device.csv"
  for part in "${@:-tests c engine trainer parallel sanitizers prove benches compare regression}"; do
    # shellcheck disable=SC2086 # the default is a list
    for part in $part; do
      declare -F "run_$part" >/dev/null || { echo "there is no part $part"; return 2; }
      "run_$part"
    done
  done
  failed=$(find "$out" -name '*.failed' | wc -l)
  echo "$failed failed"
  return "$failed"
}

rm -f "$out"/*.failed
main "$@" | tee "$out/gpu_run.log"
exit "${PIPESTATUS[0]}"
