#!/usr/bin/env python3
"""Measures the engine of examples/engine on a GPU, and compares its tokens with those of the CPU.

    make CUDA=1 engine model
    python3 benches/engine.py --engine build/engine/engine \\
        --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Decoding with and without a CUDA graph, in turns; prefill, the first of a process and after one;
memory as estimated, as allocated and as the driver counts it; and how many of the CPU's greedy
tokens come out of the GPU. Writes benches/results/engine_DEVICE_DATE.json. Standard library only.
"""

import argparse
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIELDS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
TEXT = (
    "The lighthouse had been dark for eleven winters when the new keeper came over the causeway with a cart, "
    "a dog and a box of brass fittings. People in the harbour watched him from behind their curtains. "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three primary colors are",
    "Count: 1, 2, 3, 4, 5,",
    "In 1969, two people walked on",
    "The lens gathers what would be lost and sends it where",
]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--engine", required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--note", default="", help="what is particular about the model")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--tokens", type=int, default=256, help="tokens that a decoding run generates")
parser.add_argument("--out", type=pathlib.Path)
arguments = parser.parse_args()


def run(*flags):
    command = [arguments.engine, "--model", arguments.model, "--json", "--temperature", "0", *flags]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.decode()}")
    return json.loads(done.stdout)


def device():
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader", "--id=0"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(FIELDS.split(","), values))


def spread(values):
    return {"median": round(statistics.median(values), 1), "all": [round(value, 1) for value in values]}


def speed(dtype):
    """Tokens per second. A model may end its text early: what counts is the rate."""
    prompt = TEXT * 4
    prefills = {"prefill_128": 3, "prefill_2000": 46}
    rates = {name: [] for name in ("decode_graph", "decode_no_graph", *prefills, *(f"first_{name}" for name in prefills))}
    for _ in range(arguments.rounds):
        for name, flags in (("decode_graph", []), ("decode_no_graph", ["--no-graph"])):
            found = run("--device", "cuda", "--dtype", dtype, "--prompt", prompt, "--tokens", str(arguments.tokens), *flags)
            rates[name].append(found["decode_tokens_per_second"])
        for name, repeats in prefills.items():
            for prefix, flags in (("first_", []), ("", ["--warm-up"])):
                found = run("--device", "cuda", "--dtype", dtype, "--prompt", TEXT * repeats, "--tokens", "1", *flags)
                rates[prefix + name].append(found["prefill_tokens_per_second"])
            rates[name + "_tokens"] = len(found["prompt_tokens"])
    figures = {name: spread(value) if isinstance(value, list) else value for name, value in rates.items()}
    figures["graph_speed_up"] = round(figures["decode_graph"]["median"] / figures["decode_no_graph"]["median"], 3)
    return figures


def memory(dtype):
    """Bytes: what the library estimates, what it allocated, and by how much the device's free
    memory fell."""
    found = run("--device", "cuda", "--dtype", dtype, "--prompt", TEXT * 20, "--tokens", "1000")["memory"]
    estimated, real = found["estimated"]["total"], found["real"]
    return {
        "estimated": found["estimated"],
        "real": real,
        "device_over_estimated": round(real["device"] / estimated, 4),
        "allocated_over_estimated": round(real["peak"] / estimated, 4),
    }


@functools.cache
def greedy(device, dtype, weights, prompt):
    flags = ["--device", device, "--dtype", dtype, "--weights", weights, "--prompt", prompt]
    return run(*flags, "--tokens", "32")["tokens"]


def agreement(dtype):
    """Leading greedy tokens of the GPU that are the CPU's, which keeps hidden states in f32; of
    32."""
    weights = "f16" if dtype == "f16" else "bf16"
    prefixes = []
    for prompt in PROMPTS:
        expected, found = greedy("cpu", "f32", weights, prompt), greedy("cuda", dtype, weights, prompt)
        differing = (i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1])
        prefixes.append([next(differing, len(expected)), len(expected)])
    return {
        "same_and_all_by_prompt": prefixes,
        "prompts_all_the_same": sum(same == count for same, count in prefixes),
        "prompts": len(prefixes),
    }


def main():
    first = device()
    results = {
        "date": datetime.date.today().isoformat(),
        "device": first,
        "model": pathlib.Path(arguments.model).name,
        "note": arguments.note,
        "command": " ".join(sys.argv),
        "unit": "tokens/s, bytes",
        "speed": {dtype: speed(dtype) for dtype in ("bf16", "f16")},
        "device_after": device(),
        "memory": {dtype: memory(dtype) for dtype in ("bf16", "f32")},
        "agreement_with_cpu": {dtype: agreement(dtype) for dtype in ("f32", "f16", "bf16")},
    }
    name = first["name"].split()[-1].lower()
    out = arguments.out or ROOT / "benches" / "results" / f"engine_{name}_{results['date']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
