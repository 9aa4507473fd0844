#!/usr/bin/env python3
"""Runs models with random weights that differ in what a file may hold, and compares with llama.cpp.

Grouped and single key heads, rotations stretched in each way, separate and tied output, biases,
every tensor type, both tokenizers: reference/record_tiny.py recorded what must come out.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "common" / "tests"))
import tiny_models

NLL_TOLERANCE = 1e-4

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", required=True)
parser.add_argument("--reference", required=True, type=pathlib.Path)
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()


def run(path, *flags, weights="f32"):
    where = ["--model", str(path), "--device", arguments.device, "--dtype", "f32", "--weights", weights, "--json"]
    done = subprocess.run(
        [arguments.engine, *where, *flags], capture_output=True, timeout=120, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{path.stem}: {done.stderr.decode()}")
    return json.loads(done.stdout)


def problems(expected, directory):
    path = tiny_models.write(expected["name"], directory)
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected["sha256"]:
        yield "the file is not the one that was recorded"
    found = run(path, "--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature", "0")
    for key in ("prompt_tokens", "tokens"):
        if found[key] != expected[key]:
            yield f"{key} are {found[key]}, not {expected[key]}"
    again = run(path, "--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature", "0", "--warm-up")
    for key in ("tokens", "mean_nll"):
        if again[key] != found[key]:
            yield f"{key} is {again[key]} after a warm-up, {found[key]} without"
    error = found["mean_nll"] / expected["mean_nll"] - 1
    if not abs(error) < NLL_TOLERANCE:
        yield f"the mean NLL is off by {error:.2e}"
    print(f"{expected['name']}: {len(found['tokens'])} tokens, mean NLL off by {error:.1e}")


def problems_of_mixed_types(directory):
    """A file whose matrices are not all of one type, as they are and decoded."""
    path = directory / "mixed.gguf"
    kind = tiny_models.Q8_0
    tiny_models.make(path, seed=21, add_tokenizer=tiny_models.bpe, kind=kind, head_dim=10)
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "8", "--temperature", "0"]
    as_in_file, decoded = (run(path, *flags, weights=weights) for weights in ("file", "f32"))
    error = as_in_file["mean_nll"] / decoded["mean_nll"] - 1
    if not abs(error) < NLL_TOLERANCE:
        yield f"the mean NLL is off by {error:.2e}"


def main():
    reference = json.loads(arguments.reference.read_text())
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for expected in reference["models"]:
            for problem in problems(expected, pathlib.Path(directory)):
                print(f"FAILED: {expected['name']}: {problem}")
                failures += 1
        for problem in problems_of_mixed_types(pathlib.Path(directory)):
            print(f"FAILED: mixed types: {problem}")
            failures += 1
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
