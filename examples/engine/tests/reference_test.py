#!/usr/bin/env python3
"""Compares the engine with what llama.cpp was recorded to do (reference/record.py).

The tokens of a prompt must be the same. llama.cpp multiplies quantised activations, so that two close
logits may swap: the greedy continuation must be the same for 16 tokens on four prompts of five, and the
mean negative log-likelihood of a text within 2 %.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

GREEDY_TOKENS = 16
GREEDY_SHARE = 0.8
NLL_TOLERANCE = 0.02

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", required=True)
parser.add_argument("--model", required=True, type=pathlib.Path)
parser.add_argument("--reference", required=True, type=pathlib.Path)
parser.add_argument("--device", default="cpu")
parser.add_argument("--weights", default="f32")
arguments = parser.parse_args()

failures = []


def check(condition, message):
    if not condition:
        print(f"FAILED: {message}")
        failures.append(message)


def run(*flags, expected_status=0):
    command = [arguments.engine, *flags]
    done = subprocess.run(command, capture_output=True, timeout=600, check=False)
    check(
        done.returncode == expected_status,
        f"{flags} ended with {done.returncode}, not {expected_status}: {done.stderr.decode()}",
    )
    return done


def report(*flags):
    where = ["--model", str(arguments.model), "--device", arguments.device]
    done = run(*where, "--weights", arguments.weights, "--json", *flags)
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
    check(0.9 <= ratio <= 1.1, f"{name}: the peak is {ratio:.3f} of the estimate")


def check_prompt(case):
    name = case["name"]
    flags = ["--prompt", case["prompt"], "--temperature", "0"]
    flags += ["--tokens", str(max(len(case["tokens"]), GREEDY_TOKENS))]
    found = report(*flags, *(["--chat"] if case["chat"] else []))
    check(found["prompt_tokens"] == case["prompt_tokens"], f"{name}: tokens of the prompt differ")
    check_report(found, name)
    expected = case["tokens"]
    same = 0
    while same < min(len(expected), len(found["tokens"])) and expected[same] == found["tokens"][same]:
        same += 1
    print(f"{name}: {same} of {len(expected)} greedy tokens agree; {found['text']!r}")
    if name == "capital":
        check("Paris" in found["text"], f"{name}: no Paris in {found['text']!r}")
    return same >= min(GREEDY_TOKENS, len(expected))


def check_text(case):
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
        file.write(case["text"].encode())
        file.flush()
        found = report("--perplexity", file.name)
    check(found["prompt_tokens"] == case["tokens"], f"{case['name']}: tokens of the text differ")
    check(found["tokens"] == [], f"{case['name']}: scoring generated tokens")
    check_report(found, case["name"])
    error = found["mean_nll"] / case["mean_nll"] - 1
    print(f"{case['name']}: mean NLL {found['mean_nll']:.4f}, {100 * error:+.2f} % of the reference")
    check(abs(error) < NLL_TOLERANCE, f"{case['name']}: mean NLL is off by {100 * error:.2f} %")


def check_sampling():
    """A seed repeats its text; another one does not; the stream is the text of the report."""
    flags = ["--prompt", "Once upon a time", "--tokens", "24", "--temperature", "1"]
    first, again = (report(*flags, "--seed", "1") for _ in range(2))
    check(first["tokens"] == again["tokens"], "equal seeds gave different tokens")
    other = report(*flags, "--seed", "2")
    check(first["tokens"] != other["tokens"], "different seeds gave equal tokens")
    where = ["--model", str(arguments.model), "--device", arguments.device]
    streamed = run(*where, "--weights", arguments.weights, *flags, "--seed", "1").stdout.decode()
    check(streamed.strip() == ("Once upon a time" + first["text"]).strip(), f"the stream is {streamed!r}")


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
    agreeing = [check_prompt(case) for case in reference["prompts"]]
    share = sum(agreeing) / len(agreeing)
    print(f"{sum(agreeing)} of {len(agreeing)} prompts agree for {GREEDY_TOKENS} tokens or more")
    check(share >= GREEDY_SHARE, f"only {share:.0%} of the prompts agree for {GREEDY_TOKENS} tokens")
    for case in reference["texts"]:
        check_text(case)
    check_sampling()
    check_errors()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
