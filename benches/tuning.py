"""Writes src/cuda/tuning from what was timed: a file for each device that has a record.

    python3 benches/tuning.py write     # benches/results/{tuning,rings}_DEVICE_DATE.json -> src/cuda/tuning/DEVICE.rs
    python3 benches/tuning.py check     # fails where a file is not what its record gives

A record has the microseconds of every candidate in every case. What is chosen changes from case to case only where that gains
more than NOISE.
"""

import itertools
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
TUNING = ROOT / "src" / "cuda" / "tuning"
DEVICES = {"h100": "H100", "h200": "H200"}
# What two runs of one kernel differ by.
NOISE = 1.02
ANY = "usize::MAX"
# Rows from which on who is the fastest does not change.
MANY = 2048
# `CUBLASLT_CLUSTER_SHAPE_*`.
CLUSTERS = {"1x2": 5, "4x2": 7}
# Rows of a tile under a causal mask, up to 1024 queries.
TILE_ROWS = 128


def newest(device, kind="tuning"):
    return sorted(RESULTS.glob(f"{kind}_{device}_*.json"))[-1]


def mean(ratios):
    ratios = list(ratios)
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def by_rows(section):
    """{words: [(rows, {candidate: microseconds})]} of cases such as `bf16 4096x14336 m8`."""
    found = {}
    for case, times in section.items():
        *words, rows = case.split()
        found.setdefault(tuple(words), []).append((int(rows[1:]), times))
    return {words: sorted(rows, key=lambda row: row[0]) for words, rows in found.items()}


def server(candidate):
    """The name of a `tuning::Server`."""
    if candidate.startswith("library, cluster "):
        return f"Cluster({CLUSTERS[candidate.split()[-1]]})"
    return {"own": "Own", "library": "Library", "library, workspace": "Workspace"}[candidate]


def serving(rows, with_workspace):
    """[(rows, server)]: who is the fastest up to so many rows, one entry for each run of one server, the last without an end."""
    runs, before = [], None
    for count, times in rows:
        there = {c: us for c, us in times.items() if c != "default" and (with_workspace or "workspace" not in c)}
        enough = NOISE * min(there.values())
        # The one before, if it is as good as any; else the plainest that is.
        candidates = [before, *sorted(there, key=["own", "library"].__contains__, reverse=True)]
        best = next(c for c in candidates if there.get(c, math.inf) <= enough)
        if best == before:
            runs.pop()
        runs.append((count, server(best)))
        before = best
    # Our kernels read the weights for every 32 rows, and the others' gains end somewhere: what was not measured is the library's.
    most = rows[-1][0]
    if before == "library" or (before == "library, workspace" and most >= MANY):
        runs.pop()
    return [*runs, (ANY, server(before) if most >= MANY else "Library")]


def shapes(section):
    for (dtype, shape), rows in sorted(by_rows(section).items(), key=lambda item: [int(n) for n in item[0][1].split("x")]):
        # Without a row for each number of rows, as where a run was cut short, a shape tells too little.
        if dtype == "bf16" and rows[-1][0] >= 128:
            columns, in_features = shape.split("x")
            yield "Shape {", f"columns: {columns},", f"in_features: {in_features},", *(
                f"{name}: &[" + ", ".join(f"({most}, {who})" for most, who in serving(rows, name == "with")) + "],"
                for name in ("alone", "with")
            ), "},"


def mlp(section):
    """(tokens at a time, tokens to ask room for, tokens by kernels of one intermediate)."""
    rows = [row for all in by_rows(section).values() for row in all]

    def cost(most):
        ratios = []
        for count, times in rows:
            cut = {int(name.split()[-1]): us for name, us in times.items() if name.startswith("both, parts")}
            parts = next((parts for parts in sorted(cut) if parts * most >= count), max(cut))
            ratios.append(cut[parts] / min(cut.values()))
        return mean(ratios)

    costs = {most: cost(most) for most in (512, 1024, 2048, 4096, 8192)}
    tokens = next(most for most in costs if costs[most] <= 1.0005 * min(costs.values()))
    asked = next(most for most in costs if costs[most] <= 1.005 * min(costs.values()))
    kernels = max(count for count, times in rows if times.get("own", math.inf) <= times.get("both, parts 2", times["asked"]) * NOISE)
    return min(tokens, 4096), asked, kernels


def argmax(section):
    """(thin blocks, full blocks)"""
    def best(name, default):
        kinds = {int(c.removeprefix(name)) for times in section.values() for c in times if c.startswith(name)}
        ratios = {k: [times[f"{name}{k}"] / times["default"] for times in section.values()] for k in kinds} | {default: [1.0]}
        # None that loses more than noise anywhere.
        return min((k for k in ratios if max(ratios[k]) <= NOISE), key=lambda k: mean(ratios[k]))

    return best("thin", 256), best("full", 1024)


def attention(section):
    """(short siblings, pairs together)"""
    short = {}
    together = []
    for case, times in section.items():
        dim, mask, length = case.split(".")
        dim, length = int(dim[1:]), int(length[1:])
        # Without a mask none was ever the faster one: there is none.
        if mask == "causal" and "short sibling" in times and times["short sibling"] < times["usual sibling"]:
            short[dim] = max(length, short.get(dim, 0))
        pairs = {int(c.split()[-1]): us for c, us in times.items() if c.startswith("together ")}
        # Powers of two, which divide what L2 has room for.
        pairs = {n: us for n, us in pairs.items() if n & (n - 1) == 0 and n > 0}
        best = min(pairs, key=pairs.get)
        if mask == "causal" and length <= 1024 and times["ours"] >= 1.012 * pairs[best]:
            together.append((dim, length // TILE_ROWS, best))
    return sorted(short.items()), sorted(together)


def decoding(section):
    """Rows of `tuning::Decoding`: the bounds with which Hopper's kernels gain the most and never lose more than noise."""
    found = []
    for dims, ragged in itertools.product(((1, 64), (65, 128)), (False, True)):
        cases = []
        for case, times in section.items():
            dim, shape, *paged = case.split()
            if int(dim[1:]) == dims[1] and bool(paged) == ragged and "hopper" in times:
                batch, keys = map(int, shape.split("x"))
                cases.append((batch * 8, keys, times["portable"] / times["hopper"]))
        best = (0.0, None)
        for tiles, keys in itertools.product((256, 512, 1024, 2048, 4096), (512,) if ragged else (512, 1024, 2048, 4096)):
            gains = [gain for t, k, gain in cases if t >= tiles and k <= keys]
            gain = sum(map(math.log, gains))
            if gains and min(gains) >= 1 / NOISE and gain > best[0]:
                best = gain, (tiles, keys)
        if best[1]:
            found.append((*dims, ragged, *best[1]))
    return found


def norm_backward(cells):
    """{field of `tuning::NormBackward`: value}, from the microseconds of cells: {"OP ROWSxCOLUMNS": {"copy": us, "KERNEL THREADSxSTAGES WHEN": us}}.
    Stages and when they are filled again are chosen; the number of threads follows from the columns."""
    for name, cell in cells.items():
        assert len({c.split("x")[0] for c in cell if "x" in c}) == 1, f"{name}: one number of threads was expected"

    def best(*names, when=""):
        ratios = [{c.split("x")[1]: us / cells[name]["copy"] for c, us in cells[name].items() if "x" in c and c.endswith(when)} for name in names]
        common = sorted(set(ratios[0]).intersection(*ratios))
        stages, when = min(common, key=lambda c: mean(of[c] for of in ratios)).split(" ", 1)
        return int(stages), when

    def ring(*names):
        stages, when = best(*names)
        return f"({stages}, Refill::{when.title().replace(' ', '')})"

    single, _ = best("rms_norm 16384x8192", when="after sums")
    return {
        "rms_norm": ring("rms_norm 16384x4096", "rms_norm 32768x2048"),
        "rms_norm_full": ring("rms_norm 8192x16384"),
        "rms_norm_single_bytes": f"{single * 8192 * 2 * 2 >> 10} << 10",
        "layer_norm": ring("layer_norm 16384x4096", "layer_norm 16384x8192", "layer_norm 32768x2048"),
        "layer_norm_single": ring("layer_norm 8192x16384"),
    }


def group_bytes(device):
    """Bytes of x up to which gradients of norms by groups take no longer than by rings, from what a record has of either; any number where
    there is none, as on an H100, whose record is of large x alone."""
    records = sorted(RESULTS.glob(f"norm_groups_or_ring_{device}_*.json"))
    if not records:
        return ANY, ""
    sizes = {}
    for name, us in json.loads(records[-1].read_text())["us"].items():
        rows, columns = map(int, name.split(" ")[1].split("x"))
        sizes.setdefault(2 * rows * columns, []).append(us["group"] / us["ring"])
    slower = min((size for size, ratios in sizes.items() if mean(ratios) > NOISE), default=None)
    if slower is None:
        return ANY, records[-1].name
    # Between the two sizes.
    most = max(size for size in sizes if size < slower)
    return f"{(most + slower) // 2 >> 20} << 20", records[-1].name


def fetch(device):
    """What the cache reads at a time where decoding streams keys: 256 bytes, or 128 where that gains more than NOISE in the mean."""
    path = newest(device, "attention_decode_fetch")
    of_256 = [row["us"]["128 bytes"] / row["us"]["256 bytes"] for row in json.loads(path.read_text())["rows"]]
    return ("Bytes128" if mean(of_256) * NOISE < 1 else "Bytes256"), path.name


def pairs(found):
    return "&[" + ", ".join(f"({', '.join(map(str, one))})" for one in found) + "]"


def text(device):
    path = newest(device)
    rings = newest(device, "rings")
    record = json.loads(path.read_text())
    # Other runs are of variants.
    (run,) = (run for run in json.loads(rings.read_text())["runs"] if run["what"].startswith("the library's kernels"))
    s = record["sections"]
    thin, full = argmax(s["argmax"])
    tokens, asked, kernels = mlp(s["mlp"])
    short, together = attention(s["attention"])
    groups, groups_record = group_bytes(device)
    fetched, fetch_record = fetch(device)
    sources = [name for name in (path.name, rings.name, groups_record, fetch_record) if name]
    lines = [
        f"//! An {DEVICES[device]}. `python3 benches/tuning.py write` made this from, in `benches/results`,",
        f"//! {', '.join(f'`{name}`' for name in sources)}.",
        "",
        "use super::linear::{Linear, Server::*, Shape};",
        "use super::rules::F32;",
        "use super::{Argmax, Decoding, Fetch, Hopper, Mlp, NormBackward, Refill, Tuning};",
        "",
        "pub(super) const TUNING: Tuning = Tuning {",
        f"argmax: Argmax {{ thin_blocks: {thin}, full_blocks: {full} }},",
        "linear: Linear { halves: HALVES, f32: F32 },",
        f"mlp: Mlp {{ tokens: {tokens}, asked_tokens: {asked}, tokens_by_kernels: {kernels} }},",
        "hopper: Hopper {",
        f"short: {pairs(short)},",
        f"together: {pairs(together)},",
        "decoding: &[",
    ]
    for least, most, ragged, tiles, keys in decoding(s["decode"]):
        lines.append(f"Decoding {{ head_dims: ({least}, {most}), ragged: {str(ragged).lower()}, tiles: {tiles}, keys: {keys} }},")
    lines += ["],", f"decoding_fetch: Fetch::{fetched},", "},", "norm_backward: NormBackward {", f"group_bytes: {groups},"]
    lines += [f"{field}: {value}," for field, value in norm_backward(run["us"]).items()]
    lines += ["},", "};", "", "const HALVES: &[Shape] = &["]
    for shape in shapes(s["linear"]):
        lines += shape
    lines += ["];", ""]
    return "\n".join(lines)


def formatted(source):
    import subprocess

    command = ["rustfmt", "--edition", "2024", "--emit", "stdout"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main(what):
    stale = []
    for device in DEVICES:
        path = TUNING / f"{device}.rs"
        fresh = formatted(text(device))
        if what == "write":
            path.write_text(fresh)
        elif path.read_text() != fresh:
            stale.append(str(path.relative_to(ROOT)))
    if stale:
        sys.exit(f"{' and '.join(stale)}: not what `python3 benches/tuning.py write` makes")


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    main(sys.argv[1])
