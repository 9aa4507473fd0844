#!/usr/bin/env python3
"""Runs models with random weights that differ in what a file may hold, and compares with llama.cpp.

Grouped and single key heads, rotations stretched in each way, separate and tied output, biases,
every tensor type, both tokenizers: reference/record_tiny.py recorded what must come out, of one
rank and, on the CPU, of several that divide the model, in each way.
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
# Of ternary layers, whose activations are rounded to 8 bits.
TERNARY_TOLERANCE = 0.01
# How many ranks may divide each model: 2, and more where heads and blocks allow it.
RANKS = {"plain_f32": (2, 4), "mqa_bf16": (2, 3, 4)}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", required=True)
parser.add_argument("--reference", required=True, type=pathlib.Path)
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()


def start(path, *flags, weights="f32"):
    where = ["--model", str(path), "--device", arguments.device, "--dtype", "f32", "--weights", weights, "--json"]
    return subprocess.run(
        [arguments.engine, *where, *flags], capture_output=True, timeout=120, check=False
    )


def run(path, *flags, weights="f32"):
    done = start(path, *flags, weights=weights)
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
    if arguments.device == "cpu":
        yield from problems_of_ranks(expected, path, found)
        yield from problems_of_sequences(path, found, ([], ["--tensor-parallel", "2"]))
        yield from problems_of_stages(path, found, "2")
        yield from problems_of_divided_text(path, found, "3")
    error = found["mean_nll"] / expected["mean_nll"] - 1
    if not abs(error) < NLL_TOLERANCE:
        yield f"the mean NLL is off by {error:.2e}"
    print(f"{expected['name']}: {len(found['tokens'])} tokens, mean NLL off by {error:.1e}")


def problems_of_ranks(expected, path, of_one):
    """Ranks that divide the model write the same text, each with less memory than one."""
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature", "0"]
    for size in RANKS.get(expected["name"], (2,)):
        for weights in ("f32", "file"):
            found = run(path, *flags, "--tensor-parallel", str(size), weights=weights)
            if found["tokens"] != expected["tokens"]:
                yield f"tokens of {size} ranks are {found['tokens']}, not {expected['tokens']}"
            error = found["mean_nll"] / expected["mean_nll"] - 1
            if not abs(error) < NLL_TOLERANCE:
                yield f"the mean NLL of {size} ranks is off by {error:.2e}"
            part, whole = (r["memory"]["estimated"]["weights"] for r in (found, of_one))
            if not part < 0.75 * whole:
                yield f"of {whole} bytes of weights each of {size} ranks has {part}"
            peak, estimated = found["memory"]["real"]["peak"], found["memory"]["estimated"]["total"]
            if not 1 <= peak / estimated < 1.01:
                yield f"of {size} ranks each took {peak} bytes, estimated as {estimated}"
    # Drawn tokens too: all ranks draw the same.
    drawn = [*flags[:-1], "1", "--seed", "7"]
    one, two = (run(path, *drawn, "--tensor-parallel", size) for size in "12")
    if one["tokens"] != two["tokens"]:
        yield f"drawn tokens of 2 ranks are {two['tokens']}, not {one['tokens']}"


def problems_of_sequences(path, of_one, ways):
    """Continuations of one prompt are alike where the likeliest tokens are taken, and differ where tokens are drawn."""
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature"]
    drawn = {}
    for way in ways:
        # As many as kernels for few tokens take, and more.
        for number in (3, 11):
            found = run(path, *flags, "0", "--sequences", str(number), *way)
            expected = [{key: of_one[key] for key in ("text", "tokens")}] * number
            if found["sequences"] != expected:
                yield f"{number} sequences {way} are {found['sequences']}, not each {of_one['tokens']}"
            if found["tokens"] != of_one["tokens"]:
                yield f"tokens beside {number} sequences {way} are {found['tokens']}, not {of_one['tokens']}"
            peak, estimated = found["memory"]["real"]["peak"], found["memory"]["estimated"]["total"]
            if not 1 <= peak / estimated < 1.01:
                yield f"{number} sequences {way} took {peak} bytes, estimated as {estimated}"
        first, again = (
            run(path, *flags, "1", "--seed", "9", "--sequences", "3", *way)["sequences"] for _ in range(2)
        )
        if first != again:
            yield f"sequences drawn {way} are {again}, and were {first}"
        if len({tuple(each["tokens"]) for each in first}) != 3:
            yield f"sequences drawn {way} are alike: {first}"
        drawn[str(way)] = first
    if len(set(map(str, drawn.values()))) != 1:
        yield f"drawn sequences of each way are {drawn}"


def problems_of_stages(path, of_one, size):
    """Ranks that have some of the layers each write what one writes, to the bit."""
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature", "0"]
    found = run(path, *flags, "--pipeline-parallel", size)
    for key in ("tokens", "mean_nll"):
        if found[key] != of_one[key]:
            yield f"{key} of {size} stages is {found[key]}, not {of_one[key]}"
    for part in ("weights", "kv_cache"):
        own, whole = (r["memory"]["estimated"][part] for r in (found, of_one))
        if not own < 0.75 * whole:
            yield f"of {whole} bytes of {part} the first of {size} stages has {own}"
    peak, estimated = found["memory"]["real"]["peak"], found["memory"]["estimated"]["total"]
    if not 1 <= peak / estimated < 1.01:
        yield f"the first of {size} stages took {peak} bytes, estimated as {estimated}"


def problems_of_divided_text(path, of_one, size):
    """Ranks that have some of the tokens each write what one writes, with a part of its cache."""
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "32", "--temperature", "0"]
    found = run(path, *flags, "--context-parallel", size)
    if found["tokens"] != of_one["tokens"]:
        yield f"tokens of {size} parts of the text are {found['tokens']}, not {of_one['tokens']}"
    error = found["mean_nll"] / of_one["mean_nll"] - 1
    if not abs(error) < NLL_TOLERANCE:
        yield f"the mean NLL of {size} parts of the text is off by {error:.2e}"
    own, whole = (r["memory"]["estimated"]["kv_cache"] for r in (found, of_one))
    if not own < 1.2 * whole / int(size):
        yield f"of {whole} bytes of the cache each of {size} ranks has {own}"
    peak, estimated = found["memory"]["real"]["peak"], found["memory"]["estimated"]["total"]
    if not 1 <= peak / estimated < 1.01:
        yield f"a rank with a part of the text took {peak} bytes, estimated as {estimated}"


def problems_of_texts_in_parts(directory):
    """Prompts of a few tokens, of which ranks have none, and of many; a text of more than one window; drawn tokens;
    parts of which each is several ranks'."""
    path, text = directory / "parts.gguf", directory / "text.txt"
    tiny_models.make(path, seed=43, add_tokenizer=tiny_models.bpe, kind=tiny_models.Q8_0, head_dim=32, layers=3)
    text.write_text(tiny_models.TEXT * 12)
    prompt = ["--tokens", "16", "--temperature"]
    cases = [["--prompt", words, *prompt, "0"] for words in ("a", "again", "over the lazy dog", tiny_models.TEXT * 6)]
    cases += [["--prompt", tiny_models.TEXT, *prompt, "1", "--seed", "8"], ["--perplexity", str(text)]]
    ways = [["--context-parallel", size] for size in ("2", "3", "5")]
    for flags in cases:
        one = run(path, *flags, weights="file")
        for way in [*ways, ["--context-parallel", "2", "--tensor-parallel", "2"]]:
            found = run(path, *flags, *way, weights="file")
            if found["tokens"] != one["tokens"]:
                yield f"{flags[1][:20]}: tokens with {way} are {found['tokens']}, not {one['tokens']}"
            same = found["mean_nll"] == one["mean_nll"]  # of one token there is none
            if not same and not abs(found["mean_nll"] / one["mean_nll"] - 1) < NLL_TOLERANCE:
                yield f"{flags[1][:20]}: the mean NLL with {way} is {found['mean_nll']}, not {one['mean_nll']}"


def problems_of_pipelines(directory):
    """Stages of unlike length and a prompt of more than one chunk; drawn tokens; scores; stages of more ranks."""
    path, text = directory / "layers.gguf", directory / "text.txt"
    tiny_models.make(path, seed=41, add_tokenizer=tiny_models.bpe, kind=tiny_models.Q8_0, layers=5)
    text.write_text(tiny_models.TEXT * 12)
    prompt = ["--prompt", tiny_models.TEXT * 6, "--tokens", "16", "--temperature"]
    for flags in ([*prompt, "0"], [*prompt, "1", "--seed", "7"], ["--perplexity", str(text)]):
        one = run(path, *flags, weights="file")
        for size in ("2", "3", "5"):
            found = run(path, *flags, "--pipeline-parallel", size, weights="file")
            for key in ("tokens", "mean_nll"):
                if found[key] != one[key]:
                    yield f"{flags[::2]}: {key} of {size} stages is {found[key]}, not {one[key]}"
        # Of two ranks each, which add up in another order.
        found = run(path, *flags, "--pipeline-parallel", "2", "--tensor-parallel", "2", weights="file")
        if found["tokens"] != one["tokens"]:
            yield f"{flags[::2]}: tokens of 2 stages of 2 ranks are {found['tokens']}, not {one['tokens']}"
        error = found["mean_nll"] / one["mean_nll"] - 1
        if not abs(error) < NLL_TOLERANCE:
            yield f"{flags[::2]}: the mean NLL of 2 stages of 2 ranks is off by {error:.2e}"


def problems_of_too_many_ranks(directory):
    """What ranks cannot share is an error, of all ranks, and not a rank that waits."""
    path = tiny_models.write("plain_f32", directory)
    for way, said in (("--tensor-parallel", b"size is 3"), ("--pipeline-parallel", b"2 layers, too few for 3 ranks")):
        done = start(path, "--prompt", "a", way, "3")
        if done.returncode != 1 or said not in done.stderr:
            yield f"{way} 3 ended with {done.returncode}: {done.stderr.decode()}"


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


def problems_of_ternary_layers(directory):
    """BitNet's I2_S beside the floats that it stands for: decoded the same bits, and multiplied as codes."""
    files = tiny_models.write_ternary(directory)
    flags = ["--prompt", tiny_models.TEXT * 3, "--tokens", "8", "--temperature", "0"]
    decoded, expected = (run(path, *flags) for path in files)
    for key in ("tokens", "mean_nll"):
        if decoded[key] != expected[key]:
            yield f"{key} is {decoded[key]}, of floats {expected[key]}"
    # A matrix of codes has one scale: projections are apart.
    ways = [[]]
    if arguments.device == "cpu":
        ways += [["--tensor-parallel", "2"], ["--pipeline-parallel", "2"], ["--context-parallel", "2"]]
    for way in ways:
        found = run(files[0], *flags, *way, weights="file")
        error = found["mean_nll"] / expected["mean_nll"] - 1
        print(f"ternary layers {' '.join(way)}: mean NLL off by {error:.1e}")
        if not abs(error) < TERNARY_TOLERANCE:
            yield f"the mean NLL with {way} is off by {error:.2e}"


def main():
    reference = json.loads(arguments.reference.read_text())
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for expected in reference["models"]:
            for problem in problems(expected, pathlib.Path(directory)):
                print(f"FAILED: {expected['name']}: {problem}")
                failures += 1
        checks = [problems_of_mixed_types, problems_of_ternary_layers, problems_of_too_many_ranks]
        if arguments.device == "cpu":
            checks += [problems_of_pipelines, problems_of_texts_in_parts]
        for check in checks:
            for problem in check(pathlib.Path(directory)):
                print(f"FAILED: {check.__name__}: {problem}")
                failures += 1
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
