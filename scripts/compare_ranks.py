#!/usr/bin/env python3
"""Runs the engine and the trainer on one rank and on several, and sees that the text and the losses are the same.

    compare_ranks.py --engine ENGINE --trainer TRAINER --models FOLDER [--model FILE] [--device cuda] [--ranks 2]

FOLDER has the small models that examples/trainer/tests/write_models.py writes. Numbers of f32 are to be the same but for the
order of sums. FILE is a model of any size: where its heads cannot be divided that is said, and is no failure; its text in
bf16 may part from one rank's where two tokens are nearly as likely, so its mean NLL is what is compared.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

TEXT = "The quick brown fox jumps over the lazy dog, again and again; 12 times, then 345 more! "
F32_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-2
# Of losses and norms when several steps have followed gradients that were rounded.
TRAINED_BF16_TOLERANCE = 2e-2
SECONDS = 60
# In which ranks divide the work.
ENGINE_WAYS = ("--tensor-parallel", "--pipeline-parallel", "--context-parallel")
TRAINER_WAYS = ("--data-parallel", "--pipeline-parallel", "--context-parallel")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--engine", required=True)
parser.add_argument("--trainer", required=True)
parser.add_argument("--models", required=True, type=pathlib.Path)
parser.add_argument("--model", type=pathlib.Path)
parser.add_argument("--device", default="cpu")
parser.add_argument("--ranks", type=int, default=2)
arguments = parser.parse_args()

wrong = []


def run_processes(name, size, *command):
    """What the first of so many processes prints, each a rank; nothing, and something wrong, where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        of_rank = lambda rank: [*map(str, command), "--rank", str(rank), "--meet", f"{folder}/ids"]
        started = [subprocess.Popen(of_rank(rank), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(size)]
        try:
            said = [process.communicate(timeout=SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            wrong.append(f"{name}: {SECONDS} s were not enough")
            return None
        finally:
            # One that failed leaves the others waiting for it.
            for process in started:
                process.kill()
    for process, (_, errors) in zip(started, said):
        if process.returncode != 0:
            wrong.append(f"{name}: status {process.returncode}: {errors[-500:]}")
            return None
    return said[0][0]


def run(name, *command):
    """What it prints; nothing, and something wrong, where it fails."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        wrong.append(f"{name}: {SECONDS} s were not enough")
        return None
    if done.returncode != 0:
        wrong.append(f"{name}: status {done.returncode}: {done.stderr[-500:]}")
        return None
    return done.stdout


def engine(name, model, way, size, *flags, processes=False):
    command = [arguments.engine, "--model", model, "--device", arguments.device, "--json", "--temperature", "0", *flags]
    name = f"{name} on {size}"
    said = run_processes(name, size, *command, way, size) if processes and size > 1 else run(name, *command, way, size)
    return said and json.loads(said)


def compare_text(way, model, *flags, tolerance, same_text, processes=False):
    name = f"engine {way}{' of processes' * processes}, {model.stem} {' '.join(flags[:4])}"
    flags = ("--prompt", TEXT * 3, "--tokens", "32", *flags)
    one, several = (engine(name, model, way, size, *flags, processes=processes) for size in (1, arguments.ranks))
    if not one or not several:
        return
    off = abs(several["mean_nll"] / one["mean_nll"] - 1)
    alike = sum(a == b for a, b in zip(one["tokens"], several["tokens"]))
    rates = ", ".join(f"{r['decode_tokens_per_second']:.0f} tokens/s" for r in (one, several))
    print(f"{name}: {alike} of {len(one['tokens'])} tokens the same, mean NLL off by {off:.1e}; decoding {rates}", flush=True)
    if same_text and one["tokens"] != several["tokens"]:
        wrong.append(f"{name}: tokens are {several['tokens']}, of one rank {one['tokens']}")
    if not off < tolerance:
        wrong.append(f"{name}: mean NLL is {several['mean_nll']}, of one rank {one['mean_nll']}")


def divides(way, model):
    """Whether ranks can share the model at all; its heads may not allow it."""
    command = [arguments.engine, "--model", model, "--device", arguments.device, "--prompt", "a", "--tokens", "1"]
    command += [way, str(arguments.ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    refused = f"size is {arguments.ranks}" in done.stderr
    if refused:
        print(f"engine {way}, {model.stem}: {done.stderr.strip()}")
    return not refused


def compare_losses(folder, way, *flags, batches=4, of_ranks=(), tolerance=F32_TOLERANCE):
    """Of steps of so many batches; several ranks have flags that one has not."""
    name = f"trainer {way} {' '.join((*flags, *of_ranks))}"
    data = folder / "lines.jsonl"
    rows = [{"prompt": f"again {i}", "completion": f" over the {i * i}"} for i in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for size in (1, arguments.ranks):
        command = [arguments.trainer, "--model", arguments.models / "plain_f32.gguf", "--data", data, "--device", arguments.device]
        command += ["--json", "--steps", "12", "--batch-tokens", "64", "--accumulate", batches, "--output", folder / f"{size}.gguf"]
        said = run(f"{name} on {size}", *command, way, size, *flags, *(of_ranks if size > 1 else ()))
        if said is None:
            return
        found.append([json.loads(line) for line in said.splitlines()])
    one, several = found
    pairs = list(zip(one, several, strict=True))
    apart = max(abs(b[key] / a[key] - 1) for a, b in pairs for key in ("loss", "gradient_norm"))
    first, last, of_several = one[0]["loss"], one[-1]["loss"], several[-1]["loss"]
    print(f"{name}: loss {first:.4f} to {last:.4f}, of ranks {of_several:.4f}; apart {apart:.1e}", flush=True)
    if not apart < tolerance:
        wrong.append(f"{name}: losses or norms are {apart:.1e} apart")


def main():
    exact = ["--dtype", "f32", "--weights", "f32"]
    for way in ENGINE_WAYS:
        for model in ("plain_f32", "mqa_bf16"):
            compare_text(way, arguments.models / f"{model}.gguf", *exact, tolerance=F32_TOLERANCE, same_text=True)
        # Ranks on the CPU are threads.
        if arguments.device != "cpu":
            model = arguments.models / "plain_f32.gguf"
            compare_text(way, model, *exact, tolerance=F32_TOLERANCE, same_text=True, processes=True)
        if arguments.model and divides(way, arguments.model):
            compare_text(way, arguments.model, tolerance=BF16_TOLERANCE, same_text=False)
    with tempfile.TemporaryDirectory() as folder:
        for way in TRAINER_WAYS:
            compare_losses(pathlib.Path(folder), way, "--learning-rate", "1e-3")
            if way == "--data-parallel":
                compare_losses(pathlib.Path(folder), way, "--learning-rate", "1e-3", of_ranks=("--shard-optimizer",))
            compare_losses(pathlib.Path(folder), way, "--lora", "4", "--learning-rate", "5e-3")
        bf16 = ("--dtype", "bf16", "--learning-rate", "3e-4")
        narrow = ("--gradients", "bf16")
        # One rank has more batches than one to add up.
        of_ranks = dict(batches=arguments.ranks, of_ranks=narrow, tolerance=TRAINED_BF16_TOLERANCE)
        compare_losses(pathlib.Path(folder), "--data-parallel", *bf16, **of_ranks)
        of_ranks["of_ranks"] = (*narrow, "--shard-optimizer")
        compare_losses(pathlib.Path(folder), "--data-parallel", *bf16, **of_ranks)
        compare_losses(pathlib.Path(folder), "--context-parallel", *bf16, *narrow, batches=1, tolerance=TRAINED_BF16_TOLERANCE)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
