"""Attention's gradients as a table, and both passes as one picture, from what was measured beside FlashAttention and cuDNN."""

import math
import re
import textwrap

OURS, FA3, CUDNN, FA2 = "unsloth", "FlashAttention-3", "cuDNN", "FlashAttention-2"
COLORS = {OURS: "#3465a4", FA3: "#cc6600", CUDNN: "#73a946", FA2: "#75507b"}


def mean(values):
    """The geometric one."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def of_gradients(result):
    """{(head_dim, mask): {sequence: {contender: TFLOP/s}}} of heads that have keys of their own, and the same with the share of the
    speed that is left where the same bits are asked for."""
    panels, shares = {}, {}
    for row in result["rows"]:
        found = re.fullmatch(r"hd(64|128|256) (\d+)/(\d+) (full|causal) s(\d+)", row["case"])
        if not found or found[2] != found[3]:
            continue
        at, length = (int(found[1]), found[4]), int(found[5])
        speeds = {FA2 if who == "fa2" else who: row["flops"] / us / 1e6 for who, us in row["us"].items()}
        panels.setdefault(at, {})[length] = speeds
        shares.setdefault(at, {})[length] = row["us"][OURS] / row["deterministic_us"]
    return panels, shares


def section(result):
    panels, shares = of_gradients(result)
    lengths = sorted(next(iter(panels.values())))
    ratios = [
        cell[OURS] / max(cell[who] for who in (FA3, CUDNN) if who in cell)
        for cells in panels.values()
        for cell in cells.values()
    ]
    in_order = [share for cells in shares.values() for share in cells.values()]
    lines = textwrap.wrap(
        f"Gradients: {result['device']['name']}, {result['date']}; libunsloth / FlashAttention-3 / cuDNN (which has none above 128 "
        f"dimensions), TFLOP/s of all kernels from the call to the gradients. Geometric mean over the better of the other two: "
        f"{mean(ratios):.3f}; the lowest of the {len(ratios)} cells: {min(ratios):.3f}. With the same bits every time "
        f"{mean(in_order):.2f} of the speed, at least {min(in_order):.2f}.",
        100,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines += ["", "| gradients | " + " | ".join(map(str, lengths)) + " |", "|-|" + "-|" * len(lengths)]
    for (dim, mask), cells in sorted(panels.items(), key=lambda item: (item[0][0], item[0][1] == "causal")):
        speeds = (
            " / ".join(f"{cells[n][who]:.0f}" for who in (OURS, FA3, CUDNN) if who in cells[n]) for n in lengths
        )
        lines.append(f"| hd{dim} {mask} | " + " | ".join(speeds) + " |")
    return "\n".join(lines)


def plot(forward, backward, device, path):
    """A row for each pass and mask, a column for each head dimension; `backward` may be empty."""
    import matplotlib.pyplot as plt

    dims = sorted({dim for dim, _ in forward})
    rows = [(name, panels, mask) for name, panels in (("forward", forward), ("gradients", backward)) if panels for mask in ("full", "causal")]
    figure, grid = plt.subplots(len(rows), len(dims), figsize=(4 * len(dims), 3 * len(rows)), sharex=True, layout="constrained")
    for line, (name, panels, mask) in zip(grid, rows):
        for axes, dim in zip(line, dims):
            cells = panels[dim, mask]
            lengths = sorted(cells)
            for who, color in COLORS.items():
                points = [(n, cells[n][who]) for n in lengths if who in cells[n]]
                if points:
                    axes.plot(*zip(*points), marker="o", label=who, color=color, linestyle=":" if who == FA2 else "-")
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.set_ylim(bottom=0)
            axes.set_title(f"{name}, head dim {dim}, {mask}")
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("TFLOP/s")
    grid[0][0].legend(frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    figure.suptitle(f"Attention, bf16, {device}")
    figure.savefig(path, metadata={"Date": None})
