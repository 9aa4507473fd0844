"""The CUDA driver through ctypes, and tensors of torch's: what the harnesses of the kernels share.

A harness takes the place of the library's host code, so that a kernel can be checked and timed as soon as it compiles. What it
repeats of the host's choices is only for that.
"""

import ctypes
import math

import torch

cuda = ctypes.CDLL("libcuda.so.1")
MAX_DYNAMIC_SHARED_SIZE = 8  # a CUfunction_attribute


def check(status):
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {status} {text.value}")


def load(image):
    """A module, in the device's primary context."""
    torch.zeros(1, device="cuda")  # which is current from here on
    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), image))
    return module


def function(module, name, shared_bytes=None):
    """A kernel of a module, of which blocks may have so much dynamic shared memory."""
    found = ctypes.c_void_p()
    check(cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
    if shared_bytes is not None:
        allow_shared(found, shared_bytes)
    return found


def allow_shared(function, shared_bytes):
    check(cuda.cuFuncSetAttribute(function, ctypes.c_int(MAX_DYNAMIC_SHARED_SIZE), ctypes.c_int(shared_bytes)))


class Attribute(ctypes.Structure):
    """A CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]


EARLY = Attribute(6, 0, (ctypes.c_int * 16)(1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def launch(function, grid, threads, shared_bytes, arguments, early=False):
    """On the current stream. `arguments`: an array of pointers to them. `early`: the kernel waits for the one before it itself."""
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    sizes = (ctypes.c_uint * 7)(x, y, 1, threads, 1, 1, shared_bytes)
    config = Config(sizes, torch.cuda.current_stream().cuda_stream, ctypes.pointer(EARLY), int(early))
    check(cuda.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None))


def guarded(*shape, dtype):
    """A NaN-filled tensor between NaN guards; returns it and a function that checks the guards."""
    count = math.prod(shape)
    pad = 1024
    whole = torch.full((count + 2 * pad,), math.nan, device="cuda", dtype=dtype)
    intact = lambda: bool(torch.isnan(whole[:pad]).all() and torch.isnan(whole[pad + count:]).all())
    return whole[pad:pad + count].view(shape), intact
