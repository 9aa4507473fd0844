#!/usr/bin/env python3
"""Puts the build tools that this machine lacks into .tools/, from PyPI.

    python3 scripts/tools.py cmake ninja pkg-config clang-format pip numpy matplotlib

A tool that the machine has, in a version that serves, is left to the machine. Executables appear
in .tools/bin, Python modules in .tools/python; the Makefile puts both on the search paths.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
BIN = TOOLS / "bin"
MODULES = TOOLS / "python"

# What PyPI has it as, the executables inside, and the oldest version of the machine's own that
# serves (None: only this one, since every version of clang-format formats a little differently).
PROGRAMS = {
    "cmake": ("cmake==4.1.2", ["cmake/data/bin/cmake", "cmake/data/bin/ctest"], (3, 20)),
    "ninja": ("ninja==1.13.0", ["bin/ninja"], (1, 8)),
    "pkg-config": ("pkgconf==2.5.1.post1", ["pkgconf/.bin/pkgconf"], (0, 29)),
    "clang-format": ("clang-format==21.1.2", ["clang_format/data/bin/clang-format"], None),
}
# NVIDIA has divided its compiler into packages; kernels/src/nvcc.rs tells users of the same ones.
PROGRAMS["nvcc"] = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85",
    ["nvidia/cu13/bin/nvcc"],
    (12, 8),
)
PACKAGES = {"numpy": "numpy", "matplotlib": "matplotlib==3.10.7"}


def machines_own(name):
    """Where the machine has the program, other than in .tools."""
    places = [p for p in os.get_exec_path() if pathlib.Path(p) != BIN]
    if name == "nvcc":
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        places += [os.path.join(home, "bin") for home in homes if home]
    return shutil.which(name, path=os.pathsep.join(places))


def serves(program, oldest):
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return found is not None and tuple(map(int, found.groups())) >= oldest


def pip_runs():
    found = [sys.executable, "-m", "pip", "--version"]
    return subprocess.run(found, capture_output=True, env=environment(), check=False).returncode == 0


def environment():
    """The environment with .tools/python among the places that modules are looked for."""
    paths = [str(MODULES), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def provide_pip():
    """Takes pip, if it is missing, from Debian's package of its wheel: python3 comes without it
    there, and this needs no root."""
    if pip_runs():
        return
    MODULES.mkdir(parents=True, exist_ok=True)
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with tempfile.TemporaryDirectory() as folder:
            fetched = subprocess.run(["apt-get", "download", "-qq", "python3-pip-whl"], cwd=folder, check=False)
            if fetched.returncode == 0:
                (package,) = pathlib.Path(folder).glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
                (wheel,) = pathlib.Path(folder).glob("usr/share/python-wheels/pip-*.whl")
                shutil.unpack_archive(wheel, MODULES, "zip")
    if not pip_runs():
        sys.exit("pip is missing: install it (on Debian, `apt-get install python3-pip`) and try again")


def install(requirement, target):
    provide_pip()
    print(f"installing {requirement} into {target.relative_to(ROOT)}", flush=True)
    # --target, since Debian's venv lacks ensurepip.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--root-user-action=ignore", "--target", target, *requirement.split()]
    subprocess.run(pip, env=environment(), check=True)


def provide_program(name):
    requirement, executables, oldest = PROGRAMS[name]
    own = machines_own(name)
    if oldest is not None and own is not None and serves(own, oldest):
        return
    # A folder for each: pip would replace one tool's bin/ by another's.
    folder = TOOLS / requirement.split()[0].replace("==", "-")
    if not all((folder / executable).exists() for executable in executables):
        shutil.rmtree(folder, ignore_errors=True)
        install(requirement, folder)
    BIN.mkdir(parents=True, exist_ok=True)
    for executable in executables:
        target = folder / executable
        target.chmod(0o755)
        link = BIN / (name if len(executables) == 1 else target.name)
        if not link.is_symlink() or not link.samefile(target):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, BIN))


def main():
    for name in sys.argv[1:]:
        if name in PROGRAMS:
            provide_program(name)
        elif name in PACKAGES:
            sys.path.append(str(MODULES))
            if importlib.util.find_spec(name) is None:
                install(PACKAGES[name], MODULES)
        elif name == "pip":
            provide_pip()
        else:
            sys.exit(f"{name} is none of {', '.join([*PROGRAMS, *PACKAGES, 'pip'])}")


if __name__ == "__main__":
    main()
