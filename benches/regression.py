"""What became slower between two records: `python3 benches/report.py compare OLD NEW`.

OLD and NEW are result files, or folders of them, as benches/compare, benches/engine.py and
`report.py record` write them. Of a folder the newest result of each kind and device counts. A cell
is one case of one operation on one device.

    --noise SHARE   a cell is lost if it is slower by more than this share (0.03 unless said or
    measured) --twin AGAIN    a second run of the build of OLD: the noise of an operation is then
    the greatest change of its cells between
                    the two, or 0.01 if that is more

Cells that are lost are printed by name, and so are those of a measured operation that NEW no
longer has; the exit status is 1 if there are any. `beside` is how much the others of the same row
(PyTorch, a copy) changed: where they changed as much, it was the machine.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from dataclasses import dataclass, field

OURS = "unsloth"
NOISE = 0.03
LEAST_NOISE = 0.01


@dataclass
class Cell:
    """Our time or speed, and those of the others in the row."""

    value: float
    faster_is_more: bool = False
    beside: dict = field(default_factory=dict)

    def slower(self, new):
        """By which share `new` is slower, negative if it is faster."""
        return self.value / new.value - 1 if self.faster_is_more else new.value / self.value - 1

    def drift(self, new):
        """The median of the same for the others that both have, or None."""
        shared = [name for name in self.beside if name in new.beside]
        moved = [
            Cell(self.beside[n], self.faster_is_more).slower(Cell(new.beside[n])) for n in shared
        ]
        return statistics.median(moved) if moved else None


def cells_of(result):
    """(kind, {case: Cell}) of a result, or None where it is no table of cases."""
    if "rows" in result and "op" in result:
        found = {}
        for row in result["rows"]:
            times = dict(row["us"])
            if OURS in times:
                found[row["case"]] = Cell(times.pop(OURS), beside=times)
        return result["op"], found
    if "groups" in result:
        found = {}
        for group, cases in result["groups"].items():
            for case, times in cases.items():
                if OURS in times:
                    beside = {name: time for name, time in times.items() if name != OURS}
                    found[f"{group} {case}".strip()] = Cell(times[OURS], beside=beside)
        return "cpu", found
    if "cells" in result and "fa3" in result:
        found = {}
        for case, speeds in {**result["cells"], **result.get("shapes", {})}.items():
            others = {name: speeds[name] for name in ("cudnn", "fa3") if name in speeds}
            ours = [(name, speed) for name, speed in speeds.items() if name not in others]
            for name, speed in ours:
                found[f"{case} {name}" if len(ours) > 1 else case] = Cell(speed, True, others)
        return "attention_forward", found
    if "steps" in result and "candle" in result:
        found = {}
        for case, step in result["steps"].items():
            beside = dict(step["seconds"])
            found[case] = Cell(beside.pop(OURS), beside=beside)
        return "train_candle", found
    if "speed" in result and "model" in result:
        found = {}
        for dtype, speeds in result["speed"].items():
            for name, speed in speeds.items():
                # A process' first step loads libraries from disk, and is what the disk is.
                if isinstance(speed, dict) and "median" in speed and not name.startswith("first_"):
                    found[f"{dtype} {name}"] = Cell(speed["median"], True)
        return "engine", found
    return None


def load(path):
    """{(kind, device): {case: Cell}} of a file, or of the newest of each kind in a folder."""
    path = pathlib.Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    newest = {}
    for file in files:
        result = json.loads(file.read_text())
        found = cells_of(result) if isinstance(result, dict) else None
        if found is None:
            continue
        kind, cells = found
        device = result["device"]["name"] if "device" in result else result.get("cpu", "")
        key = kind, device
        if key not in newest or newest[key][0] <= result["date"]:
            newest[key] = result["date"], cells
    if not newest:
        sys.exit(f"{path} has no results")
    return {key: cells for key, (_, cells) in newest.items()}


def noise_between(old, twin):
    """{(kind, device): noise} of two runs of one build."""
    noise = {}
    for key in old.keys() & twin.keys():
        changes = [
            abs(math.log1p(cell.slower(twin[key][case])))
            for case, cell in old[key].items()
            if case in twin[key]
        ]
        if changes:
            noise[key] = max(LEAST_NOISE, math.expm1(max(changes)))
    return noise


def compare(old, new, noise, default=NOISE):
    """([lost], [summary]): lines of what is slower or gone, and one for each operation that both
    measured."""
    lost, summary = [], []
    for key in sorted(old.keys() & new.keys()):
        kind, device = key
        before, after = old[key], new[key]
        allowed = noise.get(key, default)
        changes = {case: cell.slower(after[case]) for case, cell in before.items() if case in after}
        for case, change in changes.items():
            if change > allowed:
                drift = before[case].drift(after[case])
                beside = "" if drift is None else f", beside {drift:+.1%}"
                values = f"{before[case].value:.4g} -> {after[case].value:.4g}"
                lost.append(f"{kind}, {device}: {case}: {change:+.1%} ({values}{beside})")
        lost += [
            f"{kind}, {device}: {case}: no longer measured" for case in before if case not in after
        ]
        if changes:
            mean = math.expm1(statistics.mean(map(math.log1p, changes.values())))
            slower = sum(change > allowed for change in changes.values())
            faster = sum(-change > allowed for change in changes.values())
            summary.append(
                f"{kind}, {device}: {len(changes)} cells, {mean:+.1%} of time in the mean; "
                f"beyond {allowed:.1%}: {slower} slower, {faster} faster"
            )
    return lost, summary


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="report.py compare", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--noise", type=float)
    parser.add_argument("--twin")
    options = parser.parse_args(arguments)
    old, new = load(options.old), load(options.new)
    noise = noise_between(old, load(options.twin)) if options.twin else {}
    if options.noise is not None:
        noise = dict.fromkeys(old, options.noise)
    if not old.keys() & new.keys():
        sys.exit(f"{options.old} and {options.new} have no operation and device in common")
    lost, summary = compare(old, new, noise)
    print("\n".join(summary))
    if lost:
        print("\n".join(["", "lost:", *lost]))
        sys.exit(1)
