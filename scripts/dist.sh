#!/bin/bash
# Packs an installed tree for machines without Rust: dist.sh PREFIX FOLDER writes FOLDER/NAME.tar.gz
# and its checksum, and prints the archive's path. NAME has the version, the machine, and what the
# library was built with.
#
# Inside are libraries without symbols for debuggers, headers, CMake and pkg-config files, the
# Python module, the licence, and SHA256SUMS of all of it. It works wherever it is unpacked.
set -euo pipefail
prefix=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")

library=$(realpath "$(find "$prefix" -name libunsloth.so | head -1)")
version=${library##*/libunsloth.so.}
kind=
# What the library says of itself, as `strings` finds it.
if grep -aq "backends: cpu, cuda" "$library"; then kind=-cuda; fi
name=libunsloth-$version-$(uname -m)-linux-gnu$kind

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -a "$prefix" "$work/$name"
find "$work/$name" -name __pycache__ -prune -exec rm -r {} +
strip --strip-unneeded "$work/$name${library#"$prefix"}"
strip --strip-debug "$(find "$work/$name" -name libunsloth.a)"
(cd "$work/$name" && find . -type f ! -name SHA256SUMS -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum > SHA256SUMS)

# The same bytes from the same tree.
epoch=$(git -C "$(dirname "$0")" log -1 --format=%ct 2> /dev/null || echo 0)
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" --directory "$work" "$name" |
  gzip -n9 > "$folder/$name.tar.gz"
(cd "$folder" && sha256sum "$name.tar.gz" > "$name.tar.gz.sha256")
echo "$folder/$name.tar.gz"
