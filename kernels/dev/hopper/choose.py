"""What the library chooses (src/cuda/attention/hopper/choose.rs), as far as the harness follows it: which kernel serves a problem, and how its
tiles are scheduled. What is tried here is changed there."""

# Smallest head dims first; the first that fits both widths serves.
WIDTHS = [("hd64", 64, 64), ("hd96", 96, 96), ("hd128", 128, 128), ("hd192v128", 192, 128),
          ("hd192", 192, 192), ("hd256", 256, 256)]

# Up to this many queries a kernel's `short` sibling is faster (measured on H200).
SHORT = {("hd64", "causal"): 1024}


def kernel(dtype, dim, dim_v, seqlen_q, *, causal=False, window=None, softcap=0.0):
    width = next(name for name, d, dv in WIDTHS if dim <= d and dim_v <= dv)
    mask = "softcap" if softcap else "window" if window is not None else "causal" if causal else "full"
    short = "_short" if seqlen_q <= SHORT.get((width, mask), 0) else ""
    return f"attention_forward_{dtype}_{width}_{mask}{short}"


def pairs_in_l2(row_blocks, bytes_per_pair, group):
    """(batch, head) pairs whose tiles are scheduled together, longest first, so that K and V stay in L2.

    Where a pair has few tiles, fewer pairs: a wave of tiles then reads K and V of fewer pairs for the first time,
    and memory is kept busy more evenly.
    """
    budget = (8 if row_blocks <= 4 else 16 if row_blocks <= 16 else 32) << 20
    fits = budget // max(1, bytes_per_pair)
    return max(1, 1 << max(0, fits.bit_length() - 1)) * group


def keys_in_l2(columns):
    """Keys of one head that 32 MB of L2 hold K and V of."""
    return (32 << 20) // (2 * columns)
