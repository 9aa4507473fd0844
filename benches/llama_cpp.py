#!/usr/bin/env python3
"""Measures the engine of examples/engine beside llama.cpp, on the same files.

    make engine model
    python3 benches/llama_cpp.py --engine build/engine/engine --llama-bench PATH/llama-bench FILE.gguf...

Decoding of 128 tokens from a short prompt and prefill of about 512, in turns of both programs with as
many threads, for each file; a file's weights are used as they are. The machine has to be quiet:
what else ran shows in the spread of `all`. With `--device cuda` both run on a GPU, and ours with
weights of bf16, too. On a CPU prefill by quantised weights is measured with `--int8-activations`, too, which is what ratios are of: llama.cpp
has activations of 8 bits. So is decoding by AVX2; by AVX-512 the flag changes nothing of it. With `--batches 8,64 --llama-batched-bench PATH/llama-batched-bench` also decoding
of so many sequences at once, 128 tokens of each behind a common prompt of about 128: rates count the
tokens of all. Writes benches/results/llama_cpp_DEVICE_DATE.json, where a processor without AVX-512 is
"avx2"; `--out` names another file, as llama_cpp_xeon_DATE.json, whose table is to stand beside that of
another processor with the same instructions. Standard library only.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (
    "The lighthouse had been dark for eleven winters when the new keeper came over the causeway with a cart, "
    "a dog and a box of brass fittings. People in the harbour watched him from behind their curtains. "
)

# Our engine with such activations as llama.cpp has.
OF_8_BITS = "unsloth, 8 bits"

# What files of floats end in, before .gguf: their products round no activations.
OF_FLOATS = ("f32", "f16", "bf16")

# That each of several sequences makes.
TOKENS = 128


def output(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.decode()}")
    return done.stdout.decode()


def run(*command):
    return json.loads(output(*command))


def ours(arguments, path, weights, *flags):
    always = ["--json", "--temperature", 0, "--threads", arguments.threads, "--device", arguments.device]
    always += ["--dtype", arguments.dtype] if arguments.dtype else []
    return run(arguments.engine, "--model", path, *always, "--weights", weights, *flags)


def theirs(arguments, path, prompt, tokens):
    flags = ["-p", prompt, "-n", tokens, "-t", arguments.threads, "-r", 1, "-fa", 1, "-o", "json"]
    if arguments.device == "cuda":
        # A prompt is one micro-batch, as ours is.
        flags += ["-ngl", 999, "-ub", max(512, prompt)]
    return run(arguments.llama_bench, "-m", path, *flags)[0]["avg_ts"]


def theirs_at_once(arguments, path, sequences, prompt):
    """Of sequences that share a prompt of so many tokens. The context is that of as many whole ones, which is enough where it is divided
    evenly among them."""
    context = sequences * (prompt + TOKENS)
    flags = ["-c", context, "-b", 2048, "-ub", 512, "-npp", prompt, "-ntg", TOKENS]
    flags += ["-npl", sequences, "-pps", "-fa", "on", "-t", arguments.threads, "--output-format", "jsonl"]
    if arguments.device == "cuda":
        flags += ["-ngl", 999]
    lines = output(arguments.llama_batched_bench, "-m", path, *flags).splitlines()
    rates = {found["pl"]: found["speed_tg"] for found in map(json.loads, filter(lambda line: line.startswith("{"), lines))}
    if sequences not in rates:
        sys.exit(f"{arguments.llama_batched_bench} has no line of {sequences} sequences: {lines}")
    return rates[sequences]


def at_once(sequences):
    """The name of a figure."""
    return f"decode x{sequences}"


def measured(found):
    """The figures of a file that programs are compared by."""
    return ["decode", *(what for what in found["ratio"] if what.startswith("decode x")), "prefill"]


def spread(values):
    return {"median": round(statistics.median(values), 1), "all": [round(value, 1) for value in values]}


def measure(arguments, path):
    """Tokens per second of both programs."""
    weights = {"unsloth": "file"}
    if arguments.device == "cuda" and not arguments.dtype:
        weights["unsloth, bf16"] = "bf16"
    compared = ["decode", *map(at_once, arguments.batches), "prefill"]
    rates = {who: {what: [] for what in compared} for who in (*weights, "llama.cpp")}
    if arguments.device == "cpu" and path.stem.split(".")[-1].lower() not in OF_FLOATS:
        rates[OF_8_BITS] = {what: [] for what in (["decode"] if vectors() == "avx2" else []) + ["prefill"]}
    for _ in range(arguments.rounds):
        for who, kind in weights.items():
            short = ["--prompt", "The lighthouse", "--tokens", "128"]
            found = ours(arguments, path, kind, *short)
            rates[who]["decode"].append(found["decode_tokens_per_second"])
            if "decode" in rates.get(OF_8_BITS, ()):
                of_8_bits = ours(arguments, path, kind, *short, "--int8-activations")
                rates[OF_8_BITS]["decode"].append(of_8_bits["decode_tokens_per_second"])
            whole = ["--prompt", TEXT * arguments.repeats, "--tokens", "1", "--warm-up"]
            found = ours(arguments, path, kind, *whole)
            rates[who]["prefill"].append(found["prefill_tokens_per_second"])
            if OF_8_BITS in rates:
                of_8_bits = ours(arguments, path, kind, *whole, "--int8-activations")
                rates[OF_8_BITS]["prefill"].append(of_8_bits["prefill_tokens_per_second"])
            prompt = len(found["prompt_tokens"])
            for sequences in arguments.batches:
                flags = ["--tokens", TOKENS, "--sequences", sequences]
                found = ours(arguments, path, kind, "--prompt", TEXT * 3, *flags)
                rates[who][at_once(sequences)].append(found["decode_tokens_per_second"])
                shared = len(found["prompt_tokens"])
        rates["llama.cpp"]["decode"].append(theirs(arguments, path, 0, 128))
        rates["llama.cpp"]["prefill"].append(theirs(arguments, path, prompt, 0))
        for sequences in arguments.batches:
            rates["llama.cpp"][at_once(sequences)].append(theirs_at_once(arguments, path, sequences, shared))
    figures = {who: {what: spread(values) for what, values in of.items()} for who, of in rates.items()}
    ratios = {}
    for what in compared:
        like = figures.get(OF_8_BITS, {}).get(what) or figures["unsloth"][what]
        ratios[what] = round(like["median"] / figures["llama.cpp"][what]["median"], 3)
    return {"bytes": path.stat().st_size, "prompt_tokens": prompt, **figures, "ratio": ratios}


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def vectors():
    """What records of this processor are called: "avx2" if it has that and no AVX-512, else "cpu"."""
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    return "avx2" if "avx2" in flags and "avx512f" not in flags else "cpu"


def rate(found):
    return f"{found['median']:,.1f}" if found else ""


def prompts(files):
    """How long prompts were; names go with numbers that are not the first file's."""
    names = {}
    for name, found in files.items():
        names.setdefault(found["prompt_tokens"], []).append(name)
    first, *others = names
    return ", ".join([f"{first:,}", *(f"{tokens:,} ({', '.join(names[tokens])})" for tokens in others)])


def section(result):
    """The record as a table."""
    ours = next(iter(result["files"].values()))
    on = result["device"]["name"] if "device" in result else f"{result['processor']}, {result['threads']} threads"
    compared = measured(ours)
    others = {what: [who for who in ours if who.startswith("unsloth, ") and what in ours[who]] for what in compared}
    heads = [
        name for what in compared for name in (what.replace("decode", "decoding"), *others[what], "llama.cpp", "")
    ]
    lines = [
        f"{on}, {result['date']}; llama.cpp of {result['llama.cpp']};",
        f"tokens per second, medians of turns; prompts of {prompts(result['files'])} tokens.",
        "",
        f"| file | {' | '.join(heads)} |",
        "|-" * (len(heads) + 1) + "|",
    ]
    for name, found in result["files"].items():
        cells = [name]
        for what in compared:
            cells += [rate(found.get(who, {}).get(what)) for who in ("unsloth", *others[what], "llama.cpp")]
            cells.append(f"{found['ratio'][what]:.2f}×" if what in found["ratio"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu():
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return dict(zip(fields, values))


def main():
    # Whoever ends this ends the program that runs: it would disturb what is measured next.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--llama-version", required=True, help="what was built, and how")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", help="of our hidden states, where it is not to be the engine's own; then the file's weights alone")
    parser.add_argument("--repeats", type=int, default=12, help="of the text that is the prompt: 42 tokens of most models")
    batches = lambda text: list(map(int, text.split(",")))
    parser.add_argument("--batches", type=batches, default=[], help="sequences to decode at once, such as 8,64")
    parser.add_argument("--llama-batched-bench", help="needed for --batches")
    parser.add_argument("--commit", help="that the engine was built from")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.batches and not arguments.llama_batched_bench:
        parser.error("--batches needs --llama-batched-bench")
    result = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": arguments.threads,
        "llama.cpp": arguments.llama_version,
        "unit": "tokens/s",
        "files": {},
    }
    if arguments.device == "cuda":
        result["device"] = gpu()
    if arguments.commit:
        result["commit"] = arguments.commit
    where = result["device"]["name"].split()[-1].lower() if "device" in result else vectors()
    out = arguments.out or ROOT / "benches" / "results" / f"llama_cpp_{where}_{result['date']}.json"
    for path in arguments.files:
        result["files"][path.name] = measure(arguments, path)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(section(result))


if __name__ == "__main__":
    main()
