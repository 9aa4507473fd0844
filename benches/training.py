"""What `benches/compare/train.py` measured, as a table and a plot."""

OURS = "unsloth"


def parts(steps):
    """({policy: step} of ours, with the dtype behind a comma where it is another, {name: step} of others)."""
    ours = {who.removeprefix(OURS + " "): step for who, step in steps.items() if who.startswith(OURS)}
    return ours, {who: step for who, step in steps.items() if not who.startswith(OURS)}


def section(result):
    """How far the curves are apart, then a step's speed and memory under each policy."""
    device = result["device"]
    lines = [
        f"{device['name']}, driver {device['driver_version']}, torch {result['versions']['torch']}, {result['date']}.",
        "Losses of 200 steps of AdamW on the same batches from the same weights differ from PyTorch's by",
        "at most",
    ]
    apart = (
        f"{curve['apart_first_50']:.1e} in the first 50 steps of {dtype}"
        for dtype, curve in result["curves"].items()
    )
    lines[-1] += f" {' and '.join(apart)}."
    for case, steps in result["steps"].items():
        ours, others = parts(steps)
        most = ours["none"]["peak_gib"]
        lines += [
            "",
            f"| {case}, bf16 | tokens/s | peak GiB | of keeping all |",
            "|-|-|-|-|",
        ]
        for policy, step in ours.items():
            lines.append(
                f"| libunsloth, checkpointing {policy} | {step['tokens_per_s']:,} | {step['peak_gib']:.2f} "
                f"| {step['peak_gib'] / most:.0%} |"
            )
        lines += [f"| {who} | {step['tokens_per_s']:,} | {step['peak_gib']:.2f} | |" for who, step in others.items()]
    return "\n".join(lines)


def plot(result, path):
    """Loss curves over each other, and speed over memory."""
    import matplotlib.pyplot as plt

    curves, steps = result["curves"], next(iter(result["steps"].values()))
    figure, axes = plt.subplots(1, 1 + len(curves), figsize=(4 * (1 + len(curves)), 3.6), layout="constrained")
    for axis, (dtype, curve) in zip(axes, curves.items()):
        axis.plot(curve["losses"]["torch"], color="C1", linewidth=3, alpha=0.5, label="PyTorch")
        axis.plot(curve["losses"][OURS], color="C0", linewidth=1, label="libunsloth")
        axis.set_title(f"loss, {dtype}")
        axis.set_xlabel("step")
        axis.legend(frameon=False)
    ours, others = parts(steps)
    policies = {who: step for who, step in ours.items() if "," not in who}
    axis = axes[-1]
    xs, ys = zip(*((step["peak_gib"], step["tokens_per_s"] / 1e3) for step in policies.values()))
    axis.plot(xs, ys, "o-", color="C0", label="libunsloth by policy")
    for index, (who, step) in enumerate(others.items(), 1):
        axis.plot(step["peak_gib"], step["tokens_per_s"] / 1e3, "s", color=f"C{index}", label=who)
    for policy, step in policies.items():
        axis.annotate(policy, (step["peak_gib"], step["tokens_per_s"] / 1e3), fontsize=7, xytext=(3, -9), textcoords="offset points")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.set_title(next(iter(result["steps"])))
    axis.set_xlabel("peak GiB")
    axis.set_ylabel("thousand tokens/s")
    axis.legend(frameon=False, fontsize=7, loc="lower right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
