"""Compiles for the host what the emulator runs, and prints the path of it.

    python3 kernels/dev/emulator/compile.py driver      its libcuda.so.1 and libnccl.so.2
    python3 kernels/dev/emulator/compile.py NAME        a kernel, which the driver asks for at its first launch

A kernel's text is that which the last build with `--features cuda` compiled (in target/cuda-kernels, or in the
folder that EMULATOR_KERNELS names) for sm_80, or with EMULATOR_ARCH=90 for sm_90a; of kernels in CUDA C++ that in
kernels/cuda, with the headers of hopper/ in place of kernels/cuda/common. What is compiled lies in target/emulator,
by what it was made of.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[2] / "target"))
KERNELS = pathlib.Path(os.environ.get("EMULATOR_KERNELS", TARGET / "cuda-kernels"))
OUT = TARGET / "emulator"
HOPPER = os.environ.get("EMULATOR_ARCH") == "90"
CUDA = HERE.parents[1] / "cuda"
# Products and sums are contracted as nvcc does it.
FLAGS = "-std=c++20 -O1 -g1 -fPIC -shared -mavx2 -mfma -mf16c -ffp-contract=fast -fno-strict-aliasing -pthread -w -Wno-psabi"


class NotThere(Exception):
    pass


def text_of(name):
    """The namespace of the kernel, from the image that was written last."""
    opening = f"namespace ns_{name} {{\n"
    images = f"*/{'sm_90a' if HOPPER else 'sm_80'}/source.cu"
    sources = sorted(KERNELS.glob(images), key=lambda path: -path.stat().st_mtime)
    for source in sources:
        text = source.read_text()
        begin = text.find(opening)
        if begin >= 0:
            end = text.find("\nnamespace ns_", begin + 1)
            return text[begin : end if end >= 0 else len(text)]
    raise NotThere(f"no kernel {name} in {KERNELS}/{images}")


def shared_of_host(text):
    """The text with the block's shared memory as a pointer, where it declares an array without a size."""
    return re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1 *\2 = reinterpret_cast<\1 *>(machine::block->shared());",
        text,
    )


def with_neighbours(path, seen):
    """A file's text with those of its folder in the place of their includes."""
    if path in seen:
        return ""
    seen.add(path)
    return re.sub(
        r'^#include "(\w+\.\w+)"$',
        lambda line: with_neighbours(path.parent / line[1], seen) if (path.parent / line[1]).exists() else line[0],
        path.read_text().replace("#pragma once", ""),
        flags=re.MULTILINE,
    )


def makes(source, rest):
    """Whether a file has a macro that is given this name, or its beginning."""
    given = re.findall(r"^\w+\((\w+),", source.read_text(), re.MULTILINE)
    return any(f"{rest}_".startswith(f"{name}_") for name in given)


def of_family(name):
    """A kernel of kernels/cuda as C++ of the host: of the family that its name names, and the file that it names or that makes it."""
    families = [(re.search(r'name: "(\w+)"', path.read_text())[1], path) for path in CUDA.glob("**/family.rs")]
    # The longest name first, here and of files: one may begin with another.
    for of_all, family in sorted(families, key=lambda of: -len(of[0])):
        if not name.startswith(of_all):
            continue
        sources = sorted(family.parent.glob("*.cu"), key=lambda path: (-len(path.stem), path))
        named = (path for path in sources if f"_{path.stem}" in name)
        made = (path for path in sources if len(sources) == 1 or makes(path, name.removeprefix(f"{of_all}_")))
        source = next(named, None) or next(made)
        return (
            "#include <cuda.h>\n\n#undef __global__\n#define __global__ inline\n"
            f"{shared_of_host(with_neighbours(source, set()))}\n"
            'extern "C" const machine::Entry emulator_entry = '
            f"machine::Kernel<&{name}>::of_cluster(machine::cluster_of({name}_launch));\n"
        )
    return None


def for_host(name):
    """The kernel as C++ of the host: without PTX, and with what the driver calls."""
    text = text_of(name)
    head, kernel = text.split('extern "C" __global__', 1)
    # Wrappers of PTX, for which device.h stands in.
    head = re.sub(
        r"^(?:template <[^\n]*>\n)?inline __device__ (?:void|uint32)\n__\w+(?:<\d+>)?\(.*?\n {0,4}\}\n",
        "",
        head,
        flags=re.DOTALL | re.MULTILINE,
    )
    # What is for ptxas alone, and the wait for the kernel before: here none starts before that has ended.
    kernel = re.sub(r'^(?:asm\("" : |\s*asm volatile\("griddepcontrol)[^\n]*\n', "", kernel, flags=re.MULTILINE)
    kernel = shared_of_host(kernel)
    # Numbers as bits: device.h makes CUDA's NaN of any.
    kernel = re.sub(
        r"reinterpret_cast<(u?int32) const&>\((\w+)\)", r"machine::bits<\1>(\2)", kernel
    )
    if "asm" in head + kernel or "__shared__" in kernel:
        raise NotThere(f"{name} has PTX or shared memory that the emulator does not know")
    # Its symbol is the driver's kernel's: of no use here, where many are loaded.
    return (
        f'#include "device.h"\n\n{head}__global__{kernel}\n'
        f'extern "C" const machine::Entry emulator_entry = machine::Kernel<&ns_{name}::{name}>::entry;\n'
    )


def compiled(name, text, suffix, *flags):
    """The shared library of a text, compiled if it was not before."""
    headers = sorted(HERE.glob("*.h"))
    if "-I" in " ".join(flags):
        headers += sorted(path for folder in (HERE, CUDA) for path in folder.glob("**/*.cu*"))
    parts = [text, FLAGS, *flags, *(path.read_text() for path in headers)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = OUT / key
    library = folder / suffix
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / f"{name}.cpp"
        source.write_text(text)
        partial = folder / f"{suffix}.{os.getpid()}"
        subprocess.run(["g++", *FLAGS.split(), *flags, f"-I{HERE}", source, "-o", partial], check=True)
        partial.rename(library)
    return library


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    name = sys.argv[1]
    if name == "driver":
        text = (HERE / "driver.cpp").read_text()
        flags = ["-Wl,-soname,libcuda.so.1", f'-DCOMPILE="{sys.executable} {HERE / "compile.py"}"']
        library = compiled(name, text, "libcuda.so.1", *flags, "-ldl")
        nccl = compiled("nccl", (HERE / "nccl.cpp").read_text(), "libnccl.so.2")
        print(f"{library.parent}:{nccl.parent}")
        return
    try:
        text = of_family(name)
        if text is not None:
            folders = [f"-I{HERE / 'hopper'}", f"-I{CUDA}", f"-I{KERNELS / 'include'}"]
            architecture = f"-D__CUDA_ARCH__={900 if HOPPER else 800}"
            print(compiled(name, text, "kernel.so", architecture, *folders))
        else:
            print(compiled(name, for_host(name), "kernel.so"))
    except (NotThere, subprocess.CalledProcessError) as error:
        sys.exit(f"emulator: {error}")


main()
