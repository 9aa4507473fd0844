#!/usr/bin/env python3
"""Records what llama.cpp makes of the models of common/tests/tiny_models.py, with their weights decoded to f32.

    python record_tiny.py tiny_models.json        # with the packages that record.py names
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile

import llama_cpp

from record import compact, continue_greedily, decode_weights, load, mean_nll

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "common" / "tests"))
import tiny_models


def record(name, directory):
    path = tiny_models.write(name, directory)
    decoded = directory / "f32.gguf"
    decode_weights(path, decoded)
    model = load(decoded, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    # Every one of them asks for BOS, by its tokenizer's default.
    tokens = model.tokenize((tiny_models.TEXT * 3).encode(), add_bos=True, special=False)
    return {
        "name": name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "prompt_tokens": tokens,
        "tokens": continue_greedily(model, tokens),
        "mean_nll": mean_nll(model, tokens),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as directory:
        models = [record(name, pathlib.Path(directory)) for name in tiny_models.MODELS]
    reference = {
        "recorded_with": f"llama-cpp-python {llama_cpp.__version__}, CPU, by record_tiny.py",
        "models": models,
    }
    output.write_text(compact(json.dumps(reference, indent=1)) + "\n")


if __name__ == "__main__":
    main()
