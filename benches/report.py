"""Turns what was measured into result files, plots and tables.

    python3 benches/report.py record            # target/criterion -> benches/results/cpu-DATE.json
                                                #   and train_candle_cpu_DATE.json
    python3 benches/report.py record train      # the latter alone
    python3 benches/report.py render            # the newest results -> plots, benches/README.md,
                                                #   the summary in README.md
    python3 benches/report.py compare OLD NEW   # what became slower, by name; exit status 1 if
                                                #   anything did (regression.py)

What `benches/compare` measured on a GPU is in results of its own, one for each operation and
device.

A group is one operation; in it `unsloth` and `candle` ran in the same process on the same data.
Figures are medians; the ratio is candle's time over ours. The attention bench also writes the peak
of live heap bytes of each contender, which `record` takes in. That of training steps measures by
itself, and has a record of its own.
"""

import datetime
import itertools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import textwrap

import attention_report
import llama_cpp
import ranks_report
import regression
import scale_model
import train_candle
import training
from attention_report import mean

ROOT = pathlib.Path(__file__).resolve().parent.parent
CRITERION = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "criterion"
MEMORY = CRITERION / "attention-memory.json"
TRAIN = CRITERION / "train.json"
RESULTS = ROOT / "benches" / "results"
OURS, BASELINE = "unsloth", "candle"
# What small products on the CPU are compared with.
LOOPS = "loops"
# The README's summary: its columns, and its rows by the operation of a record. What a call costs
# the host is another quantity, and kernels that no longer serve a shape are history.
PEERS = ("copy", "torch", "torch.compile", "liger", "quack", "candle", "fa2", "FlashAttention-3", "cuDNN")
SUMMARISED = {
    **{
        op: op
        for op in (
            "embedding",
            "kv_append",
            "linear",
            "mlp",
            "rms_norm",
            "layer_norm",
            "rope",
            "qk_norm_rope",
            "swiglu",
        )
    },
    "argmax": "argmax, cast",
    "cast": "argmax, cast",
    "norm_backward": "norms, gradients",
    # A run of its own, with what QuACK needs.
    "norm_backward_quack": "norms, gradients",
    "swiglu_backward": "swiglu, gradients",
    "linear_backward": "linear, gradients",
    "embedding_backward": "embedding, gradients",
    "attention_backward": "attention, gradients",
    "block_backward": "mlp and attention block, gradients",
    "cross_entropy": "cross_entropy",
    "linear_blocks": "linear, quantised weights",
    "linear_codes": "linear, quantised weights",
    "linear_mixed": "linear, quantised weights",
    "linear_cross_entropy": "linear_cross_entropy",
    "optimizer": "optimizer",
    "attention_candle": "attention",
    "attention_hopper": "attention",
    "attention_decode": "attention, decoding",
}
# Whose table the README has; benches/README.md has every device's cases.
SHOWN = ("CPU", "H200")
# Dense products of 16-bit numbers on tensor cores, in FLOP/s, as the vendor names them.
PEAKS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def output_of(*command):
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def version_of(crate):
    """The version of a dependency that Cargo.lock pins."""
    found = re.search(rf'name = "{crate}"\nversion = "([^"]+)"', (ROOT / "Cargo.lock").read_text())
    return found.group(1) if found else "unknown"


def measured():
    """{group: {case: {contender: median in nanoseconds}}} of the last `cargo bench`."""
    groups = {}
    for path in sorted(CRITERION.glob("**/new/benchmark.json")):
        about = json.loads(path.read_text())
        estimates = json.loads((path.parent / "estimates.json").read_text())
        case = about["value_str"] or ""
        group = groups.setdefault(about["group_id"], {})
        group.setdefault(case, {})[about["function_id"]] = estimates["median"]["point_estimate"]
    return groups


def about():
    """What a record of this machine begins with."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": os.cpu_count(),
        "rustc": output_of("rustc", "--version"),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "candle": version_of("candle-core"),
    }


def write(name, result):
    path = RESULTS / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.relative_to(ROOT))


def record():
    groups = measured()
    if not groups:
        sys.exit(f"nothing under {CRITERION}: run `cargo bench` first")
    result = {**about(), "unit": "ns, median", "groups": groups}
    if MEMORY.exists():
        result["attention_peak_bytes"] = json.loads(MEMORY.read_text())
    write(f"cpu-{result['date']}.json", result)
    if TRAIN.exists():
        record_train()


def record_train():
    if not TRAIN.exists():
        sys.exit(f"there is no {TRAIN}: run `cargo bench --bench train` first")
    result = {**about(), **json.loads(TRAIN.read_text())}
    write(f"train_candle_cpu_{result['date']}.json", result)


def newest(pattern):
    """The latest result of a kind, or None; names end in the date."""
    found = sorted(RESULTS.glob(pattern), key=lambda path: path.stem[-10:])
    return json.loads(found[-1].read_text()) if found else None


def of_devices(kind):
    """{device as file names have it: its latest result of a kind}, the newer devices first."""
    results = {}
    for path in sorted(RESULTS.glob(f"{kind}_*.json"), key=lambda path: path.stem[-10:]):
        found = re.fullmatch(rf"{kind}_([a-z0-9]+)_[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}", path.stem)
        if found:
            results[found.group(1)] = json.loads(path.read_text())
    return dict(sorted(results.items(), reverse=True))


def duration(nanoseconds):
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def rows(result, baseline=BASELINE):
    for group, cases in sorted(result["groups"].items()):
        for case, times in sorted(cases.items()):
            if OURS in times and baseline in times:
                yield group, case, times[OURS], times[baseline]


def table(result):
    lines = prose(
        f"{result['cpu']}, {result['threads']} threads, candle {result['candle']}, {result['date']}; "
        "medians of one run, f32 unless named."
    )
    for (group, baseline), cases in itertools.groupby(
        ((row, baseline) for baseline in (BASELINE, LOOPS) for row in rows(result, baseline)),
        key=lambda pair: (pair[0][0], pair[1]),
    ):
        cases = [row for row, _ in cases]
        faster = mean([theirs / ours for *_, ours, theirs in cases])
        lines += [
            "",
            f"<details><summary>{group}: in the mean {faster:.1f}× as fast as {baseline}</summary>",
            "",
        ]
        lines += [f"| {group} | libunsloth | {baseline} | ratio |", "|-|-|-|-|"]
        for _, case, ours, theirs in cases:
            lines.append(
                f"| {case} | {duration(ours)} | {duration(theirs)} | {theirs / ours:.2f}× |"
            )
        lines += ["", "</details>"]
    memory = result.get("attention_peak_bytes")
    if memory:
        lines += [
            "",
            "Peak heap of one attention call, MiB:",
            "",
            "| sequence | libunsloth | candle |",
            "|-|-|-|",
        ]
        for length, peaks in sorted(memory.items(), key=lambda item: int(item[0])):
            mib = [f"{peaks[name] / 2**20:.1f}" for name in (OURS, BASELINE)]
            lines.append(f"| {length} | {mib[0]} | {mib[1]} |")
    return "\n".join(lines)


def plot(result, path):
    import matplotlib.pyplot as plt

    data = list(rows(result))[::-1]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(data)), layout="constrained")
    axes.barh([f"{g} {c}" for g, c, _, _ in data], [b / a for _, _, a, b in data], color="#3465a4")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as candle")
    axes.set_title(f"CPU backend, {result['cpu']}, {result['threads']} threads")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def hopper_cells(result):
    """{(head_dim, mask): {sequence: {contender: TFLOP/s}}} of a Hopper attention result."""
    panels = {}
    for name, speeds in result["cells"].items():
        dim, mask, length = re.fullmatch(r"d(\d+)\.(\w+)\.s(\d+)", name).groups()
        ours = max(v for k, v in speeds.items() if k not in ("cudnn", "fa3"))
        cell = {OURS: ours, "FlashAttention-3": speeds["fa3"], "cuDNN": speeds["cudnn"]}
        panels.setdefault((int(dim), mask), {})[int(length)] = cell
    return panels


def hopper_table(result):
    panels = hopper_cells(result)
    lengths = sorted(next(iter(panels.values())))
    ratios = [
        cell[OURS] / max(v for k, v in cell.items() if k != OURS)
        for p in panels.values()
        for cell in p.values()
    ]
    lines = prose(
        f"{result['device']['name']}, driver {result['device']['driver_version']}, {result['date']}; bf16, 16,384 tokens in "
        "all, heads · dim = 2048; TFLOP/s of kernel time, contenders by turns: libunsloth / FlashAttention-3 / cuDNN "
        f"{result['cudnn'] // 10000}.{result['cudnn'] // 100 % 100}. Geometric mean of our speed over the better of the other "
        f"two: {mean(ratios):.3f}; the lowest of the {len(ratios)} cells: {min(ratios):.3f}."
    )
    lines += [
        "",
        "| forward | " + " | ".join(map(str, lengths)) + " |",
        "|-|" + "-|" * len(lengths),
    ]
    for (dim, mask), cells in sorted(
        panels.items(), key=lambda item: (item[0][0], item[0][1] == "causal")
    ):
        speeds = (" / ".join(f"{v:.0f}" for v in cells[n].values()) for n in lengths)
        lines.append(f"| hd{dim} {mask} | " + " | ".join(speeds) + " |")
    return "\n".join(lines + hopper_shapes(result.get("shapes", {})))


def hopper_section(device, result):
    """A device's plot and tables."""
    name = short_name(result["device"]["name"])
    backward = of_devices("attention_backward").get(device)
    tables = [hopper_table(result), *([attention_report.section(backward)] if backward else [])]
    return "\n\n".join([*tables, f"![Attention on one {name}](results/attention_{device}.svg)"])


def hopper_shapes(shapes):
    """Other shapes beside the peers, and what features leave of the plain kernel's speed."""
    if not shapes:
        return []
    lines = ["", "| 32 heads on 8, hd128 | libunsloth | FlashAttention-3 | cuDNN |", "|-|-|-|-|"]
    for name, speeds in shapes.items():
        if "plain" not in speeds:
            cells = [
                f"{speeds[who]:.0f}" if who in speeds else "" for who in ("unsloth", "fa3", "cudnn")
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    features = {name: speeds for name, speeds in shapes.items() if "plain" in speeds}
    if features:
        kinds = list(next(iter(features.values())))
        lines += ["", "Features, causal, sequences of 4096: share of the plain kernel's speed.", ""]
        lines += ["| | " + " | ".join(kinds) + " |", "|-|" + "-|" * len(kinds)]
        for name, speeds in features.items():
            shares = (f"{speeds[kind] / speeds['plain']:.2f}" for kind in kinds)
            lines.append(
                f"| {name.removeprefix('features ').replace('d', 'hd')} | "
                + " | ".join(shares)
                + " |"
            )
    return lines


def ranks_section():
    """What two GPUs divide, and what more would by a model of them."""
    parallel, collectives = (list(of_devices(kind).values()) for kind in ("parallel", "collectives"))
    modelled = [scale_model.section(parallel[0], collectives[0])] if parallel and collectives else []
    # Measured after the tables above, on another pair of the same GPUs.
    overlap = of_devices("overlap").values()
    beside = [ranks_report.section(result, "Sums beside products") for result in overlap]
    return "\n\n".join([*map(ranks_report.section, parallel), *beside, *modelled])


def both_passes(device, forward):
    """The cells of the forward pass, with FlashAttention-2 where it was measured (on the same shapes and device, by replays of
    graphs), and of the gradients."""
    panels = hopper_cells(forward)
    for row in of_devices("attention_hopper").get(device, {"rows": []})["rows"]:
        found = re.fullmatch(r"head_dim (\d+) seq (\d+) (\w+)", row["case"])
        if found:
            cell = panels.get((int(found[1]), found[3]), {}).get(int(found[2]))
            if cell:
                cell[attention_report.FA2] = row["tflops"]["fa2"]
    backward = of_devices("attention_backward").get(device)
    return panels, attention_report.of_gradients(backward)[0] if backward else {}


def prose(text):
    """Lines of at most 100 columns."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def compared():
    """{device: [the newest result of `benches/compare` for each operation]}, but for what ranks divide."""
    devices = {}
    for path in sorted(RESULTS.glob("*_*.json"), key=lambda path: path.stem[-10:]):
        result = json.loads(path.read_text())
        # What is measured in other ways than by calls is none of these.
        is_ours = any(OURS in row.get("us", {}) for row in result.get("rows", []))
        if is_ours and result.get("op", "parallel") != "parallel":
            devices.setdefault(result["device"]["name"], {})[result["op"]] = result
    return {
        device: list(results.values()) for device, results in sorted(devices.items(), reverse=True)
    }


def contenders(result):
    """Whom the operation is compared with, in the order of the first row that has most of them."""
    names = max((row["us"] for row in result["rows"] if OURS in row["us"]), key=len)
    # What is ours in another form is no other's.
    return tuple(
        name
        for name in names
        if name.split()[0] != OURS and name not in ("copy", "nothing through ctypes")
    )


def ratios(results, name):
    """A contender's times over ours."""
    rows = [row["us"] for result in results for row in result["rows"]]
    return [us[name] / us[OURS] for us in rows if OURS in us and name in us]


def limits(row, device):
    """(column, share) of what bounds the kernel of a row, where the record has it."""
    us = row["us"]
    if "copy" in us:
        yield "of copy", f"{us['copy'] / us[OURS]:.0%}"
    elif "flops" in row and row.get("dtype") in ("bf16", "f16") and device in PEAKS:
        yield "of peak", f"{row['flops'] / (us[OURS] * 1e-6) / PEAKS[device]:.0%}"
    if "occupancy" in row:
        yield "occupancy", f"{row['occupancy']:.0%}"


def compared_table(devices):
    """A table for each device and operation, folded under its geometric means: microseconds, and
    in brackets how many times ours."""
    lines = []
    for device, results in devices.items():
        first = results[0]
        versions = f"driver {first['device']['driver_version']}, torch {first['versions']['torch']}"
        lines += [*[""] * bool(lines), f"{device}, {versions}; bf16 unless named; µs of one call."]
        for result in results:
            lines += ["", *compared_rows(result, device)]
    return "\n".join(lines)


def compared_rows(result, device):
    names = contenders(result)
    rows = [row for row in result["rows"] if OURS in row["us"]]
    bounds = list(dict.fromkeys(name for row in rows for name, _ in limits(row, device)))
    means = [f"{mean(ratios([result], name)):.2f}× as fast as {name}" for name in names]
    if ratios([result], "copy"):
        means.append(f"{mean(ratios([result], 'copy')):.0%} of copy")
    yield f"<details><summary>{result['op']}: in the mean {', '.join(means)}</summary>"
    yield ""
    columns = [result["op"], "libunsloth", *bounds, *names]
    yield "| " + " | ".join(columns) + " |"
    yield "|-" * len(columns) + "|"
    for row in rows:
        us, shares = row["us"], dict(limits(row, device))
        others = (f"{us[n]:.4g} ({us[n] / us[OURS]:.2f}×)" if n in us else "" for n in names)
        yield (
            "| "
            + " | ".join(
                [row["case"], f"{us[OURS]:.4g}", *(shares.get(b, "") for b in bounds), *others]
            )
            + " |"
        )
    yield ""
    yield "</details>"


def summary(cpu, devices, forwards):
    """A table of geometric means for each device: an operation in a row, whom it is compared with
    in the columns."""
    ratios_of = {}  # {(operation, device, other): [the other's time over ours]}

    def add(*place, ratio):
        ratios_of.setdefault(place, []).append(ratio)

    if cpu is not None:
        for group, _, ours, theirs in rows(cpu):
            add(group, "CPU", "candle", ratio=theirs / ours)
    for device, results in devices.items():
        for result in results:
            for row in result["rows"]:
                # The record of linear layers holds what else an engine's products need.
                first = row["case"].split()[0]
                inner = result["op"] == "linear" and first in ("mlp", "argmax", "cast", "host")
                operation = SUMMARISED.get(first if inner else result["op"])
                if OURS in row["us"] and operation:
                    for other, us in row["us"].items():
                        add(operation, short_name(device), other, ratio=us / row["us"][OURS])
    for forward in forwards:
        for cells in hopper_cells(forward).values():
            for cell in cells.values():
                for other in ("FlashAttention-3", "cuDNN"):
                    add(
                        "attention",
                        short_name(forward["device"]["name"]),
                        other,
                        ratio=cell[OURS] / cell[other],
                    )

    lines = []
    for device in SHOWN:
        found = [(operation, other) for operation, where, other in ratios_of if where == device]
        others = [other for other in PEERS if any(other == there for _, there in found)]
        if not found:
            continue
        lines += [
            *[""] * bool(lines),
            f"| {device} | " + " | ".join(others) + " |",
            "|-" * (len(others) + 1) + "|",
        ]
        for operation in sorted({operation for operation, other in found if other in others}):
            values = [(other, ratios_of.get((operation, device, other))) for other in others]
            shown = (
                f"{mean(v):{'.0%' if other == 'copy' else '.2f'}}" if v else ""
                for other, v in values
            )
            lines.append("| " + " | ".join([operation, *shown]) + " |")
    return "\n".join(lines)


def short_name(device):
    return device.removeprefix("NVIDIA ").split()[0]


def compared_plot(results, path):
    """How many times as fast as each contender, on a logarithmic scale: of an operation's cases
    the geometric mean, and their range."""
    import matplotlib.pyplot as plt

    results = [result for result in results if contenders(result)][::-1]
    names = list(dict.fromkeys(name for result in results for name in contenders(result)))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(results)), layout="constrained")
    for index, name in enumerate(names):
        points = [
            (at + 0.1 * (index - len(names) / 2), ratios([result], name))
            for at, result in enumerate(results)
        ]
        points = [(at, values) for at, values in points if values]
        for at, values in points:
            axes.plot(
                [min(values), max(values)], [at, at], color=f"C{index}", linewidth=1.2, alpha=0.6
            )
        axes.plot(
            [mean(values) for _, values in points],
            [at for at, _ in points],
            "o",
            color=f"C{index}",
            label=name,
        )
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), [result["op"] for result in results])
    axes.set_xlabel("libunsloth is how many times as fast: mean and range of an operation's cases")
    axes.set_title(f"CUDA backend, {results[0]['device']['name']}")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def engine_table(result):
    device, agreement = result["device"], result["agreement_with_cpu"]
    first = next(iter(result["speed"].values()))
    prefills = ("prefill_128", "prefill_2000")
    columns = " | ".join(
        f"prefill of {first[name + '_tokens']:,} (a process' first)" for name in prefills
    )
    lines = prose(
        f"{device['name']}, driver {device['driver_version']}, {result['date']}; {result['model']}, one sequence, tokens per "
        "second."
    )
    lines += [
        "",
        f"| | {columns} | decoding | without a graph | graph's gain | memory over its estimate |",
        "|-|-|-|-|-|-|-|",
    ]
    for dtype, speed in result["speed"].items():
        rate = lambda name: f"{speed[name]['median']:,.0f}"
        rates = [
            *(f"{rate(name)} ({rate('first_' + name)})" for name in prefills),
            rate("decode_graph"),
            rate("decode_no_graph"),
        ]
        memory = result["memory"].get(dtype)
        over = f"{memory['device_over_estimated'] - 1:.1%}" if memory else ""
        lines.append(
            "| " + " | ".join([dtype, *rates, f"{speed['graph_speed_up']:.2f}×", over]) + " |"
        )
    same = ", ".join(
        f"{a['prompts_all_the_same']} of {a['prompts']} in {dtype}"
        for dtype, a in agreement.items()
    )
    lines += ["", f"Prompts whose greedy tokens are all those of the CPU in f32: {same}."]
    return "\n".join(lines)


def set_section(path, name, body):
    text = path.read_text()
    begin, end = f"<!-- {name}: made by benches/report.py -->\n", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        sys.exit(f"{path.relative_to(ROOT)} has no place for the {name}")
    head, rest = text.split(begin, 1)
    path.write_text(head + begin + body + "\n" + end + rest.split(end, 1)[1])


def render():
    try:
        import matplotlib
    except ImportError:
        print("the plots are left as they are: there is no matplotlib", file=sys.stderr)
        matplotlib = None
    else:
        matplotlib.use("svg")
        # Element ids that do not change from run to run.
        matplotlib.rcParams["svg.hashsalt"] = "unsloth"
    page = ROOT / "benches" / "README.md"
    cpu, devices = newest("cpu-*.json"), compared()
    forwards, engines = of_devices("attention_forward"), of_devices("engine")
    trained, beside = of_devices("train"), of_devices("llama_cpp")
    steps = of_devices("train_candle")
    for name, body in (
        ("cpu table", table(cpu) if cpu else None),
        ("step table", "\n\n".join(map(train_candle.section, steps.values()))),
        ("hopper table", "\n\n".join(map(hopper_section, forwards, forwards.values()))),
        ("ranks table", ranks_section()),
        ("engine table", "\n\n".join(map(engine_table, engines.values()))),
        ("llama.cpp table", "\n\n".join(map(llama_cpp.section, beside.values()))),
        ("training table", "\n\n".join(map(training.section, trained.values()))),
        ("cuda table", compared_table(devices)),
    ):
        if body:
            set_section(page, name, body)
    if matplotlib:
        if cpu:
            plot(cpu, RESULTS / "cpu.svg")
        for device, forward in forwards.items():
            passes = both_passes(device, forward)
            attention_report.plot(*passes, forward["device"]["name"], RESULTS / f"attention_{device}.svg")
        for device, result in trained.items():
            training.plot(result, RESULTS / f"train_{device}.svg")
        if devices:
            compared_plot(next(iter(devices.values())), RESULTS / "cuda.svg")
    summarised = summary(cpu, devices, forwards.values())
    set_section(ROOT / "README.md", "summary", summarised)


if __name__ == "__main__":
    commands = {"record": record, "record train": record_train, "render": render}
    if sys.argv[1:2] == ["compare"]:
        regression.main(sys.argv[2:])
    elif (command := " ".join(sys.argv[1:])) in commands:
        commands[command]()
    else:
        sys.exit(__doc__)
