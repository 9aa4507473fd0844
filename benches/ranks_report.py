"""What ranks divide, as a table: `benches/compare/parallel.py` measured it."""

ONE = " one GPU"


def section(result, what=""):
    """Each way's time, and its share of what as many GPUs would give: one GPU's time over theirs together."""
    device = result["device"]
    lines = [
        f"{what}{': ' if what else ''}{result['ranks']} {device['name']}, driver {device['driver_version']}, NCCL {result['versions']['nccl']}, {result['date']}; one GPU's",
        "time of the same run, over that of the ranks together.",
        "",
        "| | one GPU | " + f"{result['ranks']} GPUs | of linear |",
        "|-|-|-|-|",
    ]
    for row in result["rows"]:
        times, unit = (row["us"], "µs") if "us" in row and "tokens_per_s" not in row else (row["tokens_per_s"], "tokens/s")
        lines.append(f"| **{row['case']}** | | | |")
        for way, share in row["scaling"].items():
            one = next(times[who] for who in times if who.endswith(ONE) and way.startswith(who.removesuffix(ONE)))
            lines.append(f"| {way} | {one:,.0f} {unit} | {times[way]:,.0f} {unit} | {share:.2f} |")
    return "\n".join(lines)
