"""Turns what criterion measured into a result file, a plot and the README's table.

    python3 benches/report.py record    # target/criterion -> benches/results/cpu-DATE.json
    python3 benches/report.py render    # the newest result -> benches/results/cpu.svg and README.md

A group is one operation; in it `unsloth` and `candle` ran in the same process on the same data. Figures are medians; the ratio is
candle's time over ours. The attention bench also writes the peak of live heap bytes of each contender, which `record` takes in.
"""

import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CRITERION = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "criterion"
MEMORY = CRITERION / "attention-memory.json"
RESULTS = ROOT / "benches" / "results"
OURS, BASELINE = "unsloth", "candle"


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


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


def record():
    groups = measured()
    if not groups:
        sys.exit(f"nothing under {CRITERION}: run `cargo bench` first")
    result = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": os.cpu_count(),
        "rustc": output_of("rustc", "--version"),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "candle": version_of("candle-core"),
        "unit": "ns, median",
        "groups": groups,
    }
    if MEMORY.exists():
        result["attention_peak_bytes"] = json.loads(MEMORY.read_text())
    path = RESULTS / f"cpu-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.relative_to(ROOT))


def newest():
    return json.loads(max(RESULTS.glob("cpu-*.json")).read_text())


def duration(nanoseconds):
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def rows(result):
    for group, cases in sorted(result["groups"].items()):
        for case, times in sorted(cases.items()):
            if OURS in times and BASELINE in times:
                yield group, case, times[OURS], times[BASELINE]


def table(result):
    lines = [
        f"{result['cpu']}, {result['threads']} threads, candle {result['candle']}, {result['date']}; "
        "medians of one run, f32 unless named.",
        "",
        "| | case | libunsloth | candle | ratio |",
        "|-|-|-|-|-|",
    ]
    for group, case, ours, theirs in rows(result):
        lines.append(f"| {group} | {case} | {duration(ours)} | {duration(theirs)} | {theirs / ours:.2f}× |")
    memory = result.get("attention_peak_bytes")
    if memory:
        lines += ["", "Peak heap of one attention call, MiB:", "", "| sequence | libunsloth | candle |", "|-|-|-|"]
        for length, peaks in sorted(memory.items(), key=lambda item: int(item[0])):
            mib = [f"{peaks[name] / 2**20:.1f}" for name in (OURS, BASELINE)]
            lines.append(f"| {length} | {mib[0]} | {mib[1]} |")
    return "\n".join(lines)


def plot(result, path):
    import matplotlib

    matplotlib.use("svg")
    # Element ids that do not change from run to run.
    matplotlib.rcParams["svg.hashsalt"] = "unsloth"
    import matplotlib.pyplot as plt

    data = list(rows(result))[::-1]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(data)), layout="constrained")
    axes.barh([f"{g} {c}" for g, c, _, _ in data], [b / a for _, _, a, b in data], color="#3465a4")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as candle")
    axes.set_title(f"CPU backend, {result['cpu']}, {result['threads']} threads")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def render():
    result = newest()
    plot(result, RESULTS / "cpu.svg")
    readme = ROOT / "README.md"
    text = readme.read_text()
    begin, end = "<!-- cpu table: made by benches/report.py -->\n", "<!-- end of cpu table -->"
    if begin not in text or end not in text:
        sys.exit("README.md has no place for the cpu table")
    head, rest = text.split(begin, 1)
    readme.write_text(head + begin + table(result) + "\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    commands = {"record": record, "render": render}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
