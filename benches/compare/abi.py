"""libunsloth through ctypes: structs and constants are read from its header, so nothing here repeats them.

    lib = Library()
    ctx = lib.context(cuda=True)
    norm = ctx.op("rms_norm", x=x, out=out, weight=w, epsilon=1e-5)    # tensors of torch's, on the context's device
    norm()                                                              # on torch's current stream

The library is UNSLOTH_LIBRARY, the header UNSLOTH_HEADER; without them what `make stage` installed.
"""

import ctypes
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STAGE = ROOT / "build" / "prefix"
SCALARS = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
}


class Error(RuntimeError):
    """A call failed; the text is the library's message."""


def read_header(text):
    """({struct: class}, {constant: value}) of the header."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    constants = {name: int(value) for name, value in re.findall(r"#define UNSLOTH_(\w+) (-?\d+)\n", text)}
    types = dict(SCALARS)
    pattern = r"typedef (u?int\d+_t) (unsloth_\w+);|typedef struct (unsloth_\w+) \{(.*?)\}"
    structs = {}
    for scalar, alias, name, body in re.findall(pattern, text, flags=re.DOTALL):
        if alias:
            types[alias] = types[scalar]
            continue
        fields = []
        for declared in re.findall(r"\s*([^;]+);", body):
            kind, star, field, count = re.fullmatch(
                r"(?:const )?(?:struct )?(\w+) (\*?)(\w+)(?:\[(\w+)\])?", declared.strip()
            ).groups()
            ty = ctypes.c_void_p if star else types[kind]
            if count:
                length = int(count) if count.isdigit() else constants[count.removeprefix("UNSLOTH_")]
                ty *= length
            fields.append((field, ty))
        structs[name] = types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs, constants


class Library:
    """The library and what its header says."""

    def __init__(self, path=None, header=None):
        path = path or os.environ.get("UNSLOTH_LIBRARY") or STAGE / "lib" / "libunsloth.so"
        header = header or os.environ.get("UNSLOTH_HEADER") or ROOT / "include" / "unsloth.h"
        self.lib = ctypes.CDLL(str(path))
        self.structs, self.constants = read_header(pathlib.Path(header).read_text())
        self.lib.unsloth_last_error_message.restype = ctypes.c_size_t
        self.lib.unsloth_build_info.restype = ctypes.c_char_p
        self.build_info = self.lib.unsloth_build_info().decode()

    def call(self, name, *arguments):
        if getattr(self.lib, f"unsloth_{name}")(*arguments) != 0:
            message = ctypes.create_string_buffer(1024)
            self.lib.unsloth_last_error_message(message, ctypes.c_size_t(len(message)))
            raise Error(message.value.decode())

    def struct(self, name, **fields):
        """A struct with its size and these fields set: numbers, tensors, dicts for structs inside."""
        made = self.structs[f"unsloth_{name}"]()
        if made._fields_[0][0] == "struct_size":
            made.struct_size = ctypes.sizeof(made)
        self.fill(made, fields)
        return made

    def fill(self, struct, fields):
        for name, value in fields.items():
            if value is None:
                continue
            if isinstance(value, dict):
                self.fill(getattr(struct, name), value)
            elif hasattr(value, "data_ptr"):
                setattr(struct, name, self.tensor(value))
            elif hasattr(struct, name):
                setattr(struct, name, value)
            else:
                raise AttributeError(f"{type(struct).__name__} has no {name}")

    def tensor(self, tensor):
        """A tensor of torch's as it lies in memory."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "bool": "BOOL"}
        made = self.structs["unsloth_tensor"]()
        made.data = tensor.data_ptr()
        made.dtype = self.constants[f"DTYPE_{names[dtype]}"]
        made.rank = tensor.dim()
        for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            made.shape[i], made.strides[i] = size, stride
        return made

    def context(self, cuda=True, **fields):
        return Context(self, cuda, fields)


class Context:
    """A context; lives until the process ends."""

    def __init__(self, library, cuda, fields):
        self.library = library
        self.handle = ctypes.c_void_p()
        self.workspace = None
        backend = library.constants["BACKEND_CUDA" if cuda else "BACKEND_CPU"]
        params = library.struct("context_params", backend=backend, **fields)
        library.call("context_create", ctypes.byref(params), ctypes.byref(self.handle))

    def params(self, op, **fields):
        return self.library.struct(f"{op}_params", **fields)

    def implementation(self, op, params):
        """Which implementation serves the call; raises where none does."""
        served = ctypes.c_uint32()
        self.library.call(f"{op}_supported", self.handle, ctypes.byref(params), ctypes.byref(served))
        return served.value

    def op(self, op, stream=None, room=1, **fields):
        """What runs the operation with these arguments and a workspace, `room` times what it asks for: on `stream`, a cudaStream_t, or
        torch's current one. Operations made one after another share a workspace, as an engine's do, so they must not run at once."""
        import torch

        library = self.library
        params = self.params(op, **fields)
        kept = list(fields.values())
        query = getattr(library.lib, f"unsloth_{op}_workspace_size", None)
        if query is not None:
            size = ctypes.c_size_t()
            library.call(f"{op}_workspace_size", self.handle, ctypes.byref(params), ctypes.byref(size))
            if size.value:
                # The caching allocator aligns to 512 bytes, the library asks for 256.
                if self.workspace is None or self.workspace.numel() < room * size.value:
                    self.workspace = torch.empty(room * size.value, dtype=torch.uint8, device="cuda")
                kept.append(self.workspace)
                params.workspace, params.workspace_size = self.workspace.data_ptr(), room * size.value
        function = getattr(library.lib, f"unsloth_{op}_forward")
        handle, arguments = self.handle, ctypes.byref(params)

        def run():
            queue = torch.cuda.current_stream().cuda_stream if stream is None else stream
            if function(handle, arguments, ctypes.c_void_p(queue)) != 0:
                message = ctypes.create_string_buffer(1024)
                library.lib.unsloth_last_error_message(message, ctypes.c_size_t(len(message)))
                raise Error(message.value.decode())

        run.params, run.kept = params, kept
        return run
