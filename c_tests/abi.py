#!/usr/bin/env python3
"""Checks what the shared library shows the world.

    abi.py LIBRARY HEADER SYMBOLS [--update]

Its exported symbols are those of the checked-in list and those that the header declares; its
soname, its size, and what it needs itself, the version of glibc included, are as they should be:
with the CUDA backend too, no library of a driver or toolkit. With --update the list is written
first (`make header`).
"""

import os
import pathlib
import re
import subprocess
import sys

# What every 64-bit glibc system has.
ALLOWED = re.compile(r"(libc|libm|libgcc_s|libpthread|libdl|librt|ld-linux-.*)\.so\.\d+")
# The least glibc that serves, for a library that was built where glibc is 2.36 (Debian 12) or
# older. README.md names it.
GLIBC = (2, 34)
# Of what is loaded, which stripping leaves; with kernels for every architecture.
MAX_SIZE = 40 << 20


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def differences(kind, found, expected):
    for name in sorted(found - expected):
        yield f"{name} is exported, but not {kind}"
    for name in sorted(expected - found):
        yield f"{name} is {kind}, but not exported"


def problems(library, header, symbols):
    exported = {line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    declared = re.findall(r"^\w[\w *]*?\b(unsloth_\w+)\(", text, flags=re.M)
    if "--update" in sys.argv:
        symbols.write_text("".join(f"{name}\n" for name in sorted(exported)))
    yield from differences(f"in {symbols.name}", exported, set(symbols.read_text().split()))
    yield from differences("declared in the header", exported, set(declared))
    for name in sorted(set(declared)):
        if declared.count(name) > 1:
            yield f"{name} is declared {declared.count(name)} times"

    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", output("objdump", "-T", library))
    asked = max(tuple(map(int, version)) for version in versions)
    here = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
    if asked > GLIBC and here <= (2, 36):
        yield f"it needs glibc {asked[0]}.{asked[1]}, README.md says {GLIBC[0]}.{GLIBC[1]}"

    dynamic = output("readelf", "-d", library)
    sonames = re.findall(r"\(SONAME\).*\[(.*)\]", dynamic)
    version = dict(re.findall(r"#define UNSLOTH_VERSION_(\w+) (\d+)", header.read_text()))
    if sonames != [f"libunsloth.so.{version['MAJOR']}.{version['MINOR']}"]:
        yield f"the soname is {sonames}"
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not ALLOWED.fullmatch(needed):
            yield f"it needs {needed}"
    loaded = re.findall(r"^ +LOAD +(?:0x\w+ +){3}(0x\w+)", output("readelf", "-lW", library), flags=re.M)
    size = sum(int(segment, 16) for segment in loaded)
    if not 0 < size < MAX_SIZE:
        yield f"it takes {size} bytes, fewer than {MAX_SIZE} are allowed"
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        yield "it has a search path of its own"


def main():
    library, header, symbols = map(pathlib.Path, sys.argv[1:4])
    found = list(problems(library, header, symbols))
    if found:
        sys.exit("\n".join([f"{library}:", *found]))


if __name__ == "__main__":
    main()
