"""What more GPUs than were measured would give, by a model of the measured ones. Nothing here was measured on more than two.

Assumed: ranks of a host of eight reach each other at the rate that two do (NVSwitch), and a ring moves 2 (n - 1) / n of the bytes of an
all-reduce; its latency grows with its steps. Between hosts each GPU has NETWORK bytes a second, and all-reduces go in three steps:
scattered within the host, reduced between hosts by parts, gathered within the host. Two GPUs take longer than half the time of one. That
excess, as a share of the time that the all-reduces take by themselves, is assumed for more GPUs, too: it stands for the part of them that
nothing hides, and for all else that two GPUs lose (smaller products, norms that each computes whole).
"""

import math

# A 400 Gb/s adapter for each GPU, of which collectives get four fifths.
NETWORK = 40e9
HOST = 8


class Links:
    """All-reduce as measured between two GPUs: latency in µs, and bytes a µs."""

    def __init__(self, collectives):
        times = {row["bytes"]: row["us"]["unsloth"] for row in collectives["rows"] if row["case"].startswith("all_reduce")}
        few, many = min(times), max(times)
        self.latency = times[few]
        self.rate = many / (times[many] - times[few])

    def all_reduce(self, size, ranks):
        """µs, in one host."""
        return self.latency * math.log2(ranks) + size * 2 * (ranks - 1) / ranks / self.rate if ranks > 1 else 0.0

    def between_hosts(self, size, ranks):
        """µs, hosts full of ranks."""
        hosts = ranks // HOST
        if hosts <= 1:
            return self.all_reduce(size, ranks)
        return self.all_reduce(size, HOST) + size / HOST * 2 * (hosts - 1) / hosts / (NETWORK / 1e6)


def shares(links, one, two, sums, size, divided):
    """{ranks: share of linear} of `sums` all-reduces of a size in what takes one GPU and two so long. `divided`: they share the work,
    or else each has as much."""
    ideal = lambda ranks: one / ranks if divided else one
    visible = (two - ideal(2)) / (sums * links.all_reduce(size, 2))
    found = {}
    for ranks in (2, 4, 8, 64):
        # Hosts beside each other take sequences of their own.
        within = min(ranks, HOST) if divided else ranks
        found[ranks] = ideal(within) / (ideal(within) + visible * sums * links.between_hosts(size, within))
    return found


def tensor_parallel(links, row):
    """A layer of hidden size 4096, with two sums of its rows in bf16."""
    fastest = min(us for name, us in row["us"].items() if name.startswith("unsloth one GPU"))
    one, two = (us / row["layers"] for us in (fastest, row["us"]["unsloth tensor parallel"]))
    return shares(links, one, two, 2, row["tokens"] * 4096 * 2, True)


def training(links, row, weights=1.24e9):
    """As many tokens for each GPU, and f32 gradients added up under the backward pass."""
    one, two = row["us"]["unsloth one GPU"], row["us"]["unsloth data parallel"]
    return shares(links, one, two, 1, 4 * weights, False)


def section(parallel, collectives):
    links = Links(collectives)
    rows = {row["case"]: row for row in parallel["rows"]}
    of = lambda start: next(row for case, row in rows.items() if case.startswith(start))
    found = {
        "prefill, 2 x 4096 tokens, tensor parallel": tensor_parallel(links, of("prefill, 2 x 4096")),
        "decoding, tensor parallel": tensor_parallel(links, of("decoding")),
        "training step of 1.24 B, data parallel": training(links, of("training step")),
    }
    lines = [
        "Shares of linear by [a model](scale_model.py) of these figures and of the collectives' "
        f"({links.latency:.1f} µs, {links.rate / 1e3:.0f} GB/s between two), which says what",
        "it assumes; more than two GPUs were not measured. Of 64, hosts of eight: tensor parallel in each.",
        "",
        "| | 2 (measured) | 4 | 8 | 64 |",
        "|-|-|-|-|-|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{share:.2f}" for share in of_ranks.values()) + " |" for name, of_ranks in found.items()]
    return "\n".join(lines)
