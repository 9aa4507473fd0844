#!/bin/bash
# Uses an archive of dist.sh as a machine without Rust would: test_dist.sh ARCHIVE. It unpacks it
# somewhere, checks its sums, and builds and runs the C example through CMake and through
# pkg-config, and the Python module where there is NumPy.
set -euo pipefail
archive=$(realpath "$1")
root=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Whoever calls Rust fails, and nothing says where a library lies.
mkdir "$work/stubs"
for tool in cargo rustc; do
  printf '#!/bin/sh\necho "%s was called" >&2\nexit 1\n' "$tool" > "$work/stubs/$tool"
  chmod +x "$work/stubs/$tool"
done
clean() {
  env -u CMAKE_PREFIX_PATH -u LD_LIBRARY_PATH -u UNSLOTH_LIBRARY -u UNSLOTH_HEADER PATH="$work/stubs:$PATH" "$@"
}

(cd "$(dirname "$archive")" && sha256sum --quiet --check "$(basename "$archive").sha256")
tar -xzf "$archive" -C "$work"
prefix=$(echo "$work"/libunsloth-*)
(cd "$prefix" && sha256sum --quiet --check SHA256SUMS)
for wanted in include/unsloth.h include/unsloth.hpp share/licenses/unsloth/LICENSE share/unsloth/python/unsloth/__init__.py; do
  [ -f "$prefix/$wanted" ] || { echo "$wanted is missing"; exit 1; }
done
if readelf -S "$prefix"/lib*/libunsloth.so | grep -q '\.debug_info'; then
  echo "the library is not stripped"
  exit 1
fi

clean cmake -S "$root/examples/c" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" > "$work/log" || { cat "$work/log"; exit 1; }
clean cmake --build "$work/build" > "$work/log" || { cat "$work/log"; exit 1; }
clean "$work/build/attention"

config=$(dirname "$(find "$prefix" -name unsloth.pc)")
for package in unsloth unsloth-static; do
  flags=$(clean env PKG_CONFIG_PATH="$config" pkg-config --cflags --libs "$package")
  # shellcheck disable=SC2086
  clean cc "$root/examples/c/attention.c" -o "$work/attention" $flags -Wl,-rpath,"$(dirname "$config")"
  clean "$work/attention" > "$work/log"
done

if python3 -c 'import numpy' 2> /dev/null; then
  clean env PYTHONPATH="$prefix/share/unsloth/python:${PYTHONPATH:-}" python3 "$root/examples/python/attention.py" > "$work/log"
fi
