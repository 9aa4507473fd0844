"""Attention in f64, and the plain 16-bit implementation that bounds the allowed error."""

import math

import torch


def visible(seqlen_q, seqlen_k, causal, window, device):
    """Which keys each query sees; masks are aligned bottom-right."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= i
    if window is not None:
        left, right = window
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
    return seen


def attention(q, k, v, *, scale=None, causal=False, window=None, softcap=0.0, sinks=None,
              dtype=torch.float64):
    """q, k, v: [batch, seq, heads, dim]. Returns o in q's layout and the log-sum-exp [batch, heads, seq].

    With dtype 16 bits wide, every intermediate is rounded, as a plain implementation would.
    """
    group = q.shape[2] // k.shape[2]
    q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k_, v_ = (x.repeat_interleave(group, 1) for x in (k_, v_))
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    s = (q_ * scale) @ k_.transpose(-1, -2)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    seen = visible(q.shape[1], k.shape[1], causal, window, q.device)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(s.double(), -1)
    weights = torch.softmax(s, -1)
    weights = weights.masked_fill((lse == -math.inf)[..., None], 0)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ v_).transpose(1, 2), lse
