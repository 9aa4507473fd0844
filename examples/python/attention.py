#!/usr/bin/env python3
"""Attention through ctypes on NumPy arrays, without copies, beside the same in NumPy.

    UNSLOTH_LIBRARY=/usr/local/lib/libunsloth.so python3 attention.py

NumPy arrays are described to the library as they lie in memory, strides included; so would be any DLPack tensor, by
unsloth_tensor_from_dlpack.
"""

import ctypes
import os

import numpy as np

MAX_RANK = 6
DTYPES = {"float32": 1, "float16": 2, "int32": 4, "int64": 5, "bool": 6}


class Tensor(ctypes.Structure):
    """unsloth_tensor"""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_int64 * MAX_RANK),
        ("dtype", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    ]

    @classmethod
    def of(cls, array):
        pad = (0,) * (MAX_RANK - array.ndim)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return cls(array.ctypes.data, array.shape + pad, strides + pad, DTYPES[array.dtype.name], array.ndim)


class AttentionParams(ctypes.Structure):
    """unsloth_attention_params"""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("causal", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("page_layout", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
        ("bias", Tensor),
        ("mask", Tensor),
        ("alibi_slopes", Tensor),
        ("sinks", Tensor),
        ("cu_seqlens_q", Tensor),
        ("cu_seqlens_k", Tensor),
        ("seq_lens_k", Tensor),
        ("block_table", Tensor),
    ]


class Library:
    """The few functions of libunsloth that this example calls; a failed one raises with the library's message."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.unsloth_last_error_message.restype = ctypes.c_size_t
        self.context = ctypes.c_void_p()
        self.call("context_create", None, ctypes.byref(self.context))

    def call(self, name, *arguments):
        if getattr(self.lib, f"unsloth_{name}")(*arguments) != 0:
            message = ctypes.create_string_buffer(1024)
            self.lib.unsloth_last_error_message(message, ctypes.c_size_t(len(message)))
            raise RuntimeError(message.value.decode())

    def close(self):
        self.call("context_destroy", self.context)

    def attention(self, q, k, v, causal=False):
        """`softmax(q kᵀ / √dim) v` of `[batch, seq, heads, dim]` arrays, and the scores' log-sum-exp."""
        out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
        params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), causal=int(causal))
        params.q, params.k, params.v = Tensor.of(q), Tensor.of(k), Tensor.of(v)
        params.out, params.lse = Tensor.of(out), Tensor.of(lse)
        size = ctypes.c_size_t()
        self.call("attention_workspace_size", self.context, ctypes.byref(params), ctypes.byref(size))
        # 255 bytes more, to start at a multiple of 256.
        workspace = np.empty(size.value + 255, np.uint8)
        params.workspace = (workspace.ctypes.data + 255) & ~255
        params.workspace_size = size.value
        self.call("attention_forward", self.context, ctypes.byref(params), None)
        return out, lse


def reference(q, k, v, causal=False):
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
    library = Library(os.environ.get("UNSLOTH_LIBRARY", "libunsloth.so.0"))
    random = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
        for causal in (False, True):
            q = random.standard_normal((2, 33, 8, 64)).astype(dtype)
            # Every other one of a larger array, to show that strides are kept.
            k, v = random.standard_normal((2, 2, 57 * 2, 2, 64)).astype(dtype)[:, :, ::2]
            out, lse = library.attention(q, k, v, causal)
            expected_out, expected_lse = reference(q, k, v, causal)
            errors = np.abs(out - expected_out).max(), np.abs(lse - expected_lse).max()
            name = f"{np.dtype(dtype).name}{', causal' if causal else ''}"
            print(f"{name}: largest error of out {errors[0]:.1e}, of lse {errors[1]:.1e}")
            # A NaN fails too.
            if not max(errors) <= tolerance:
                raise SystemExit(f"{name}: above {tolerance}")
    library.close()


if __name__ == "__main__":
    main()
