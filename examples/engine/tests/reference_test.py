#!/usr/bin/env python3
"""Compares the engine with what llama.cpp was recorded to do (reference/record.py).

The tokens of a prompt must be the same. So must what llama.cpp makes of the weights decoded to
f32: the greedy continuations (but for a few, where two logits may be too close to call) and the
mean negative log-likelihoods. Of the file as it is llama.cpp multiplies quantised activations,
which swaps close logits: most continuations must be the same for 16 tokens, and likelihoods within
2 %.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

GREEDY_TOKENS = 16
NLL_TOLERANCE = 0.02
# By the type of the weights: how far the mean negative log-likelihood may be from that with f32,
# and how many of the prompts may continue differently.
NLL_TOLERANCE_F32 = {"f32": 1e-4, "f16": 5e-4, "bf16": 2e-3, "file": 1e-4}
# The same of the file where products may round what they multiply to 8 bits.
NLL_TOLERANCE_INT8 = 2e-3
DIFFERENT_F32 = {"f32": 1, "f16": 2, "bf16": 3, "file": 1}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", required=True)
parser.add_argument("--model", required=True, type=pathlib.Path)
parser.add_argument("--reference", required=True, type=pathlib.Path)
parser.add_argument("--device", default="cpu")
parser.add_argument("--weights", default="f32", choices=NLL_TOLERANCE_F32)
arguments = parser.parse_args()

failures = []


def check(condition, message):
    if not condition:
        print(f"FAILED: {message}")
        failures.append(message)


def run(*flags, expected_status=0, typed=""):
    command = [arguments.engine, *flags]
    done = subprocess.run(
        command, capture_output=True, input=typed.encode(), timeout=600, check=False
    )
    check(
        done.returncode == expected_status,
        f"{flags} ended with {done.returncode}, not {expected_status}: {done.stderr.decode()}",
    )
    return done


def run_model(*flags, typed=""):
    where = ["--model", str(arguments.model), "--device", arguments.device]
    dtypes = ["--dtype", "f32", "--weights", arguments.weights]
    return run(*where, *dtypes, *flags, typed=typed)


def report(*flags):
    done = run_model("--json", *flags)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as error:
        sys.exit(f"{flags} printed no JSON ({error}): {done.stdout!r} {done.stderr!r}")


def check_report(found, name):
    """What must hold of any run, whatever the text."""
    for rate in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        check(found[rate] >= 0, f"{name}: {rate} is {found[rate]}")
    estimated, real = found["memory"]["estimated"], found["memory"]["real"]
    parts = sum(size for part, size in estimated.items() if part != "total")
    check(parts == estimated["total"], f"{name}: the estimate {estimated} does not add up")
    ratio = real["peak"] / estimated["total"]
    # Token ids, and with 16-bit weights the norms' f32 gains, are what an estimate leaves out.
    check(1 <= ratio < 1.001, f"{name}: the peak is {ratio:.4f} of the estimate")


def check_prompt(case):
    name = case["name"]
    flags = ["--prompt", case["prompt"], "--temperature", "0", "--tokens", "32"]
    found = report(*flags, *(["--chat"] if case["chat"] else []))
    check(found["prompt_tokens"] == case["prompt_tokens"], f"{name}: tokens of the prompt differ")
    check_report(found, name)
    if name == "capital":
        check("Paris" in found["text"], f"{name}: no Paris in {found['text']!r}")
    same, same_f32 = (common_prefix(found["tokens"], case[key]) for key in ("tokens", "tokens_f32"))
    print(
        f"{name}: {same} of {len(case['tokens'])} tokens as the file's, "
        f"{same_f32} of {len(case['tokens_f32'])} as f32's; {found['text']!r}"
    )
    return same >= min(GREEDY_TOKENS, len(case["tokens"])), found["tokens"] == case["tokens_f32"]


def common_prefix(a, b):
    pairs = list(zip(a, b))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def check_text(case):
    found = score(case)
    compare_nll(case, found, "mean_nll", NLL_TOLERANCE)
    compare_nll(case, found, "mean_nll_f32", NLL_TOLERANCE_F32[arguments.weights])
    if arguments.weights == "file":
        compare_nll(case, score(case, "--int8-activations"), "mean_nll_f32", NLL_TOLERANCE_INT8)


def score(case, *flags):
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
        file.write(case["text"].encode())
        file.flush()
        found = report("--perplexity", file.name, *flags)
    check(found["prompt_tokens"] == case["tokens"], f"{case['name']}: tokens of the text differ")
    check(found["tokens"] == [], f"{case['name']}: scoring generated tokens")
    check_report(found, case["name"])
    return found


def compare_nll(case, found, key, tolerance):
    error = found["mean_nll"] / case[key] - 1
    print(f"{case['name']}: mean NLL {found['mean_nll']:.5f}, {100 * error:+.3f} % of {key}")
    check(abs(error) < tolerance, f"{case['name']}: mean NLL is {100 * error:+.3f} % of {key}")


def check_sampling():
    """A seed repeats its text; another one does not; the stream is the text of the report."""
    flags = ["--prompt", "Once upon a time", "--tokens", "24", "--temperature", "1"]
    first, again = (report(*flags, "--seed", "1") for _ in range(2))
    check(first["tokens"] == again["tokens"], "equal seeds gave different tokens")
    other = report(*flags, "--seed", "2")
    check(first["tokens"] != other["tokens"], "different seeds gave equal tokens")
    streamed = run_model(*flags, "--seed", "1").stdout.decode()
    check(streamed.strip() == ("Once upon a time" + first["text"]).strip(), f"the stream is {streamed!r}")


def check_conversation():
    """A second turn run on top of the cache is the same as the whole conversation run at once."""
    lines = ["What is the capital of France?", "And of Italy?"]
    typed = "".join(line + "\n" for line in lines)
    chat = run_model("--chat", "--tokens", "24", typed=typed).stdout.decode()
    replies = [reply.strip() for reply in chat.split("> ")[1:3]]
    # SmolLM2's template, written out.
    whole = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{lines[0]}<|im_end|>\n<|im_start|>assistant\n{replies[0]}"
        f"<|im_end|>\n<|im_start|>user\n{lines[1]}<|im_end|>\n<|im_start|>assistant\n"
    )
    found = report("--prompt", whole, "--tokens", "24")
    print(f"conversation: {replies}")
    check(found["text"].strip() == replies[1], f"the whole gives {found['text']!r}, not {replies}")


def check_ranks():
    """Ranks that divide the layers, or the tokens of the text, write what one writes."""
    flags = ["--prompt", "Once upon a time, in a small village by the sea,", "--tokens", "24"]
    one = report(*flags)
    for way, size in (("--pipeline-parallel", "3"), ("--context-parallel", "2")):
        found = report(*flags, way, size)
        check(found["tokens"] == one["tokens"], f"{way} {size} writes {found['text']!r}, not {one['text']!r}")
        error = found["mean_nll"] / one["mean_nll"] - 1
        print(f"{way} {size}: mean NLL off by {error:.1e}")
        check(abs(error) < NLL_TOLERANCE_F32["f32"], f"{way} {size}: mean NLL is off by {error:.1e}")


def check_limits():
    found = report("--prompt", "a", "--tokens", "0")
    check(found["tokens"] == [] and found["text"] == "", f"no tokens were asked for: {found}")
    check(found["mean_nll"] is None, f"one token has no likelihood, but {found['mean_nll']}")
    one, many = (report("--prompt", "Once upon", "--threads", n, "--tokens", "8") for n in "14")
    check(one["tokens"] == many["tokens"], "the number of threads changed the tokens")


def check_errors():
    model = str(arguments.model)
    bad_flag = run("--model", model, "--colour", "red", expected_status=2)
    check(b"--colour" in bad_flag.stderr, "the message does not name the flag")
    run(expected_status=2)
    check(b"--perplexity FILE" in run("--help").stdout, "--help lacks a flag")
    missing = run("--model", "/nonexistent.gguf", "--prompt", "a", expected_status=1)
    check(b"/nonexistent.gguf: cannot open" in missing.stderr, "the message does not name the file")
    other = run("--model", str(arguments.reference), "--prompt", "a", expected_status=1)
    check(b"not a GGUF file" in other.stderr, "the message does not say what the file is not")
    empty = run("--model", model, "--prompt", "", expected_status=1)
    check(b"no token" in empty.stderr, "an empty prompt is not explained")


def main():
    reference = json.loads(arguments.reference.read_text())
    as_file, as_f32 = zip(*(check_prompt(case) for case in reference["prompts"]))
    print(f"{sum(as_file)} of {len(as_file)} prompts begin as the file's, {sum(as_f32)} are f32's")
    check(sum(as_file) > len(as_file) / 2, "too few prompts agree with the file's")
    different = len(as_f32) - sum(as_f32)
    check(different <= DIFFERENT_F32[arguments.weights], f"{different} prompts disagree with f32's")
    for case in reference["texts"]:
        check_text(case)
    check_sampling()
    check_conversation()
    if arguments.device == "cpu":
        check_ranks()
    check_limits()
    check_errors()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
