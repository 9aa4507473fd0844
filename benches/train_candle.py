"""What `cargo bench --bench train` measured beside candle, as a table."""

OURS, CANDLE = "unsloth", "candle"


def section(result):
    """A step's time, speed and memory of both, by its sequences and their length."""
    apart = max(
        abs(ours - theirs) / theirs
        for step in result["steps"].values()
        for ours, theirs in zip(*(step["losses"][who] for who in (OURS, CANDLE)))
    )
    lines = [
        f"{result['cpu']}, {result['threads']} threads each, candle {result['candle']}, {result['date']}; {result['dtype']}, "
        f"{result['layers']} layers;",
        f"medians of {result['rounds']} steps by turns. Losses are at most {apart:.1e} of themselves apart.",
        "",
        "| sequences | libunsloth | tokens/s | peak GiB | candle | tokens/s | peak GiB | ratio |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for case, step in result["steps"].items():
        cells = [case]
        for who in (OURS, CANDLE):
            seconds = step["seconds"][who]
            cells += [f"{seconds:.2f} s", f"{step['tokens'] / seconds:,.0f}", f"{step['peak_bytes'][who] / 2**30:.1f}"]
        cells.append(f"{step['seconds'][CANDLE] / step['seconds'][OURS]:.2f}×")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
