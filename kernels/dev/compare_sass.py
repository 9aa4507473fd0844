"""Compares the machine code of two builds, kernel by kernel: compare_sass.py OLD NEW [ARCH].

OLD and NEW are `target/cuda-kernels` folders, or folders or files of cubins. Lists kernels whose instructions, registers or shared
memory differ, and those that only one build has; exits with 1 if there are any. Needs nothing but Python.
"""

import glob
import os
import struct
import sys

# Between builds a kernel may move from one image to another: its name is what it is known by.
INSTRUCTION = 16


def sections(image):
    """Name, bytes and sh_info of each section of a 64-bit ELF file."""
    offset, = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, at, length, _, info, _, _ in headers:
        end = image.index(b"\0", strings + name)
        yield image[strings + name:end].decode(), b"" if kind == 8 else image[at:at + length], length, info


def kernels(path):
    """What there is to compare of every kernel of a cubin."""
    found = {}
    with open(path, "rb") as f:
        image = f.read()
    for name, contents, length, info in sections(image):
        for prefix, what in ((".text.", "code"), (".nv.shared.", "shared"), (".nv.constant0.", "parameters")):
            if name.startswith(prefix):
                kernel = found.setdefault(name[len(prefix):], {"registers": 0, "code": b"", "shared": 0, "parameters": 0})
                kernel[what] = contents if what == "code" else length
                if what == "code":
                    kernel["registers"] = info >> 24
    return {name: kernel for name, kernel in found.items() if kernel["code"]}


def build(path, arch):
    """Every kernel of a build."""
    files = [path] if os.path.isfile(path) else glob.glob(os.path.join(path, "**", "*.cubin"), recursive=True)
    if not os.path.isfile(path) and arch:
        files = [f for f in files if f"sm_{arch}" in f]
    found = {}
    for file in files:
        folder = os.path.basename(os.path.dirname(file))
        found.update({(folder if folder.startswith("sm_") else "", name): k for name, k in kernels(file).items()})
    return found


def main(old, new, arch=""):
    before, after = build(old, arch), build(new, arch)
    same, differs = 0, 0
    for key in sorted(before.keys() | after.keys()):
        label = " ".join(filter(None, key))
        a, b = before.get(key), after.get(key)
        if a is None or b is None:
            print(f"{label}: only in the {'new' if a is None else 'old'} build")
            differs += 1
        elif a == b:
            same += 1
        else:
            differs += 1
            counts = lambda k: f"{len(k['code']) // INSTRUCTION} instructions, {k['registers']} registers"
            print(f"{label}: {counts(a)} -> {counts(b)}")
    print(f"{same} kernels are the same, {differs} are not")
    return int(differs > 0 or same == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
