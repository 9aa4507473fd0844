#!/usr/bin/env python3
"""Attention on NumPy arrays, without copies, beside the same in NumPy.

PYTHONPATH=/usr/local/share/unsloth/python python3 attention.py
"""

import numpy as np

import unsloth


def attention(ctx, q, k, v, causal):
    """`softmax(q kᵀ / √dim) v` of `[batch, seq, heads, dim]` arrays, and the scores'
    log-sum-exp."""
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    ctx.attention(q=q, k=k, v=v, out=out, lse=lse, causal=int(causal))
    return out, lse


def reference(q, k, v, causal):
    """The same in float64."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat(groups, axis=1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        # The last query sees the last key.
        rows, columns = scores.shape[-2:]
        hidden = np.triu(np.ones((rows, columns), bool), columns - rows + 1)
        scores = np.where(hidden, -np.inf, scores)
    lse = np.log(np.exp(scores).sum(-1))
    out = np.exp(scores - lse[..., None]) @ v
    return out.transpose(0, 2, 1, 3), lse


def main():
    random = np.random.default_rng(0)
    with unsloth.Context() as ctx:
        for dtype, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
            for causal in (False, True):
                q = random.standard_normal((2, 33, 8, 64)).astype(dtype)
                # Every other one of a larger array, to show that strides are kept.
                k, v = random.standard_normal((2, 2, 57 * 2, 2, 64)).astype(dtype)[:, :, ::2]
                out, lse = attention(ctx, q, k, v, causal)
                expected_out, expected_lse = reference(q, k, v, causal)
                errors = np.abs(out - expected_out).max(), np.abs(lse - expected_lse).max()
                name = f"{np.dtype(dtype).name}{', causal' if causal else ''}"
                print(f"{name}: largest error of out {errors[0]:.1e}, of lse {errors[1]:.1e}")
                # A NaN fails too.
                if not max(errors) <= tolerance:
                    raise SystemExit(f"{name}: above {tolerance}")


if __name__ == "__main__":
    main()
