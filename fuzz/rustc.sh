#!/bin/sh
# The compiler, with what libFuzzer needs to see which code runs, for our own crates.
compiler=$1
shift
case ${CARGO_CRATE_NAME:-} in
  unsloth | c_abi)
    set -- "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 \
      -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
      -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
esac
exec "$compiler" "$@"
