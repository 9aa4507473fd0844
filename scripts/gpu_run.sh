#!/bin/sh
# Runs, on a machine with a GPU, what scripts/gpu_pack.sh built: tests, the same under compute-sanitizer where there is one, benchmarks.
# Logs and figures go to $OUT (results/ beside this script). Ends with the number of what failed.
#
# SANITIZE=0 leaves the sanitizer out; TESTS, BENCHES name a part.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/results}
mkdir -p "$out"
failed=0

check() {
    log=$1
    shift
    if "$@" >"$out/$log.log" 2>&1; then
        echo "ok      $log  $(grep -h '^test result' "$out/$log.log" | tail -1)"
    else
        failed=$((failed + 1))
        echo "FAILED  $log"
        tail -25 "$out/$log.log"
    fi
}

nvidia-smi --query-gpu=name,driver_version,compute_cap,clocks.sm,clocks.mem,power.draw --format=csv | tee "$out/device.csv"

for test in ${TESTS-$(ls "$here/tests")}; do
    # One at a time: allocations wait for the device, and a failing kernel fails its own test only.
    check "$test" "$here/tests/$test" --test-threads=1
done

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ "${SANITIZE:-1}" != 0 ] && [ -n "$sanitizer" ]; then
    for tool in memcheck initcheck racecheck; do
        for test in ${TESTS-embedding rms_norm rope swiglu}; do
            # Tables of cases without the properties, which repeat them at random.
            check "$tool.$test" timeout "${SANITIZER_SECONDS:-600}" "$sanitizer" --tool "$tool" --error-exitcode 1 \
                "$here/tests/$test" --test-threads=1 \
                --skip scale_invariant --skip scores_are_relative --skip packed_equals_apart
        done
    done
fi

for bench in ${BENCHES-$(ls "$here/benches")}; do
    if "$here/benches/$bench" >"$out/$bench.json" 2>"$out/$bench.err"; then
        cat "$out/$bench.json"
    else
        failed=$((failed + 1))
        echo "FAILED  $bench"
        cat "$out/$bench.err"
    fi
done
exit $failed
