"""libunsloth from Python: the C functions on tensors of NumPy, PyTorch, JAX or anything else with
DLPack, without copies.

    import numpy as np
    import unsloth

    x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    out = np.empty_like(x)
    with unsloth.Context() as ctx:      # the CPU; Context("cuda", device=0) is a GPU
        ctx.rms_norm(x=x, out=out, weight=np.ones(64, np.float32), epsilon=1e-5)

A call names the fields of the operation's struct in unsloth.h. Structs, constants and functions
are read from that header, so everything in it is here under its own name: `ctx.attention(...)` is
`unsloth_attention_forward`, `ctx.rms_norm_backward(...)` is
`unsloth_rms_norm_backward`, and functions that are no operations are
`library.call("kv_cache_create", ...)`.

The library and its header are those that this file was installed with, or the machine's.
`UNSLOTH_LIBRARY` and `UNSLOTH_HEADER` name others.
"""

import ctypes
import os
import pathlib
import re
import sys

__all__ = ["Buffer", "Context", "Error", "Library"]

_SCALARS = {
    "char": ctypes.c_char,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "uint8_t": ctypes.c_uint8,
    "void": None,
}


class Error(RuntimeError):
    """A call failed. The text is the library's message, `status` the name of what the call
    returned."""

    def __init__(self, message, status=None):
        super().__init__(message)
        self.status = status


def _read_header(text):
    """({struct: class}, {constant without UNSLOTH_: value}, {function: (result, [arguments])}) of
    the header."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    constants = {
        name: int(value) for name, value in re.findall(r"#define UNSLOTH_(\w+) (-?\d+)\n", text)
    }
    types = dict(_SCALARS)
    structs = {}

    def type_of(kind, pointer):
        # An address is passed as it is. What is no scalar and no struct (a callback) is one too.
        return ctypes.c_void_p if pointer else types.get(kind, ctypes.c_void_p)

    declared = r"(?:const )?(?:struct )?(\w+) ((?:\*const |\*)*)(\w+)(?:\[(\w+)\])?"
    pattern = r"typedef (u?int\d+_t) (unsloth_\w+);|typedef struct (unsloth_\w+) \{(.*?)\}"
    for scalar, alias, name, body in re.findall(pattern, text, flags=re.DOTALL):
        if alias:
            types[alias] = types[scalar]
            continue
        fields = []
        for line in filter(None, map(str.strip, body.split(";"))):
            kind, pointer, field, count = re.fullmatch(declared, " ".join(line.split())).groups()
            kind = type_of(kind, pointer)
            if count:
                kind *= int(count) if count.isdigit() else constants[count.removeprefix("UNSLOTH_")]
            fields.append((field, kind))
        structs[name] = types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})

    functions = {}
    pattern = r"^(?:const )?(?:struct )?(\w+) (\*?)(unsloth_\w+)\(([^)]*)\);"
    for kind, pointer, name, arguments in re.findall(pattern, text, flags=re.MULTILINE):
        result = type_of(kind, pointer)
        if pointer and kind == "char":
            result = ctypes.c_char_p
        arguments = [" ".join(argument.split()) for argument in arguments.split(",")]
        found = [re.fullmatch(declared, argument) for argument in arguments if argument != "void"]
        # An argument that is declared in another way is a pointer to a function.
        functions[name] = (
            result,
            [type_of(*f.groups()[:2]) if f else ctypes.c_void_p for f in found],
        )
    return structs, constants, functions


def _is_pointer(struct, name):
    """Whether a field of a struct is an address."""
    return dict((field, kind) for field, kind, *_ in struct._fields_)[name] is ctypes.c_void_p


def _installed():
    """The library and the header to use."""
    library, header = os.environ.get("UNSLOTH_LIBRARY"), os.environ.get("UNSLOTH_HEADER")
    prefixes = [*pathlib.Path(__file__).resolve().parents, pathlib.Path(sys.prefix)]
    prefixes += map(pathlib.Path, ("/usr/local", "/usr"))
    if library:
        # The header beside a library that is named comes before those of the machine.
        prefixes = [*pathlib.Path(library).resolve().parents, *prefixes]
    for prefix in prefixes:
        if not header and (prefix / "include" / "unsloth.h").is_file():
            header = prefix / "include" / "unsloth.h"
        for pattern in ("lib*/libunsloth.so", "lib/*/libunsloth.so"):
            library = library or next(map(str, prefix.glob(pattern)), None)
        if library and header:
            return library, header
    missing = "libunsloth.so" if not library else "unsloth.h"
    raise Error(
        f"{missing} was not found: set UNSLOTH_LIBRARY and UNSLOTH_HEADER to where they are"
    )


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
# DLPack's flag of a tensor that may not be written to.
_READ_ONLY = 1
# DLPack's devices, by the backend that can read their memory: host and pinned; CUDA, pinned and
# managed.
_DEVICES = {"CPU": (1, 3), "CUDA": (2, 3, 13)}


class Library:
    """The shared library, and what its header declares.

    `structs["unsloth_tensor"]` and `constants["DTYPE_F32"]` are the header's; `lib` is the library
    of ctypes, whose functions know the types of their arguments.
    """

    def __init__(self, path=None, header=None):
        if path is None or header is None:
            found = _installed()
            path, header = path or found[0], header or found[1]
        self.lib = ctypes.CDLL(str(path))
        self.structs, self.constants, functions = _read_header(pathlib.Path(header).read_text())
        for name, (result, arguments) in functions.items():
            # A header of a later patch version may declare more than the library has.
            if hasattr(self.lib, name):
                function = getattr(self.lib, name)
                function.restype, function.argtypes = result, arguments
        version = tuple(self.constants[f"VERSION_{part}"] for part in ("MAJOR", "MINOR"))
        self.version = self.lib.unsloth_version().decode()
        if tuple(map(int, self.version.split(".")[:2])) != version:
            raise Error(
                f"{path} has version {self.version}, {header} is of {version[0]}.{version[1]}"
            )
        self.build_info = self.lib.unsloth_build_info().decode()

    def check(self, status):
        """Raises the library's message unless the status is success."""
        if status != 0:
            message = ctypes.create_string_buffer(1024)
            self.lib.unsloth_last_error_message(message, len(message))
            raise Error(
                message.value.decode(errors="replace"),
                self.lib.unsloth_status_name(status).decode(),
            )

    def call(self, name, *arguments):
        """Calls `unsloth_<name>`, which returns a status."""
        self.check(getattr(self.lib, f"unsloth_{name}")(*arguments))

    def struct(self, name, /, **fields):
        """`unsloth_<name>` with its size and these fields set: numbers, tensors, dicts for structs
        inside, structs for pointers to them. It keeps tensors and structs alive."""
        return self._struct(name, fields, None, None)

    def _struct(self, name, fields, backend, stream):
        """The same for a backend ("CPU" or "CUDA"), where tensors must be, and a stream, where
        they will be used, so that an exporter with a queue of its own lets that wait for them."""
        made = self.structs[f"unsloth_{name}"]()
        if made._fields_[0][0] == "struct_size":
            made.struct_size = ctypes.sizeof(made)
        made.kept = []
        self._fill(made, fields, backend, stream, made.kept)
        return made

    def _fill(self, struct, fields, backend, stream, kept):
        for name, value in fields.items():
            if not hasattr(struct, name):
                known = ", ".join(field for field, *_ in struct._fields_)
                raise AttributeError(f"{type(struct).__name__} has no field {name}; it has {known}")
            if value is None:
                continue
            if isinstance(value, dict):
                self._fill(getattr(struct, name), value, backend, stream, kept)
            elif hasattr(value, "__dlpack__"):
                tensor = self.tensor(
                    value, backend, stream, name, writable=name == "out" or name.endswith("_out")
                )
                setattr(struct, name, tensor)
                kept.append(tensor)
            elif isinstance(value, ctypes.Structure) and _is_pointer(struct, name):
                setattr(struct, name, ctypes.addressof(value))
                kept.append(value)
            else:
                setattr(struct, name, value)

    def tensor(self, exporter, backend=None, stream=None, name="tensor", writable=False):
        """An `unsloth_tensor` of the memory of a tensor with DLPack, which it keeps alive."""
        if hasattr(exporter, "detach"):  # a tensor of PyTorch that asks for gradients
            exporter = exporter.detach()
        device, _ = exporter.__dlpack_device__()
        # On a GPU an exporter is told the stream; 1 is the default one, and 0 is not allowed.
        options = {"stream": int(stream or 1)} if int(device) == 2 else {}
        try:
            capsule = exporter.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # of DLPack 0
            capsule = exporter.__dlpack__(**options)
        kind = _name_of(capsule)
        address = _pointer_of(capsule, kind)
        made = self.structs["unsloth_tensor"]()
        where, flags = ctypes.c_int32(), ctypes.c_uint64()
        outputs = [ctypes.byref(made), ctypes.byref(where), None]
        try:
            if kind == b"dltensor_versioned":
                self.call("tensor_from_dlpack_versioned", address, *outputs, ctypes.byref(flags))
            else:
                self.call("tensor_from_dlpack", address, *outputs)
        except Error as error:
            raise Error(f"{name}: {error}", error.status) from None
        if writable and flags.value & _READ_ONLY:
            raise Error(f"{name}: is an output, and the tensor is read-only")
        if backend is not None and where.value not in _DEVICES[backend]:
            raise Error(
                f"{name}: is on DLPack's device {where.value}, "
                f"the {backend} backend takes {_DEVICES[backend]}"
            )
        made.kept = capsule
        return made


class Buffer:
    """Device memory of a context: zeros at `address`, freed with this object."""

    def __init__(self, context, size):
        self.context, self.size = context, size
        address = ctypes.c_void_p()
        context.library.call("memory_alloc", context.handle, size, ctypes.byref(address))
        self.address = address.value

    def __del__(self):
        # A context that is closed has freed it.
        if getattr(self, "address", None) and self.context.handle:
            self.context.library.lib.unsloth_memory_free(self.context.handle, self.address)


class Context:
    """A backend on one device: `Context()` is the CPU, `Context("cuda", device=1)` the second GPU.

    Every operation of the header is a method: `ctx.linear(x=x, weight=w, out=y)` computes it on
    `stream`, with a workspace that the context keeps. Calls that may run at the same time on
    several streams need a context each, for they would share it.
    """

    def __init__(self, backend="cpu", library=None, allocate=None, **fields):
        """`allocate(size)` gives an object with the `address` of so many bytes of workspace; a
        `Buffer` unless said."""
        self.handle = None
        self.library = library or Library()
        self.backend = backend.upper()
        self.allocate = allocate or (lambda size: Buffer(self, size))
        self.workspace, self.workspace_size = None, 0
        backend = self.library.constants[f"BACKEND_{self.backend}"]
        params = self.library.struct("context_params", backend=backend, **fields)
        handle = ctypes.c_void_p()
        self.library.call("context_create", ctypes.byref(params), ctypes.byref(handle))
        self.handle = handle

    def close(self):
        """Ends the context; without it, the end of the process does."""
        handle, self.handle = self.handle, None
        if handle:
            self.library.call("context_destroy", handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getattr__(self, op):
        """The operation of that name, computed at once."""
        if op.startswith("_") or not hasattr(self.library.lib, f"unsloth_{op}_supported"):
            raise AttributeError(f"there is no operation {op}")
        return lambda stream=None, **fields: self.op(op, stream, **fields)()

    def params(self, op, /, stream=None, **fields):
        """`unsloth_<op>_params` with these fields."""
        return self.library._struct(f"{op}_params", fields, self.backend, self.stream(stream))

    def stream(self, stream=None):
        """The stream, by its address; PyTorch's current one where there is PyTorch and none is
        given."""
        if stream is None and self.backend == "CUDA" and "torch" in sys.modules:
            return sys.modules["torch"].cuda.current_stream().cuda_stream
        return stream

    def implementation(self, op, params):
        """Which implementation serves the call; raises where none does."""
        served = ctypes.c_uint32()
        self.library.call(
            f"{op}_supported", self.handle, ctypes.byref(params), ctypes.byref(served)
        )
        return served.value

    def op(self, op, /, stream=None, room=1, **fields):
        """A function that computes the operation on these tensors each time it is called, on
        `stream` or on the one that is current then.

        It has a workspace of `room` times what the operation asks for. Functions made one after
        another share it, as the steps of an engine do, so they must not run at the same time.
        """
        params = self.params(op, stream, **fields)
        kept = []
        if hasattr(self.library.lib, f"unsloth_{op}_workspace_size"):
            size = ctypes.c_size_t()
            self.library.call(
                f"{op}_workspace_size", self.handle, ctypes.byref(params), ctypes.byref(size)
            )
            if size.value and not fields.get("workspace"):
                if self.workspace is None or self.workspace_size < room * size.value:
                    self.workspace, self.workspace_size = (
                        self.allocate(room * size.value),
                        room * size.value,
                    )
                kept.append(self.workspace)
                params.workspace, params.workspace_size = self.workspace.address, room * size.value
        function, handle, check = (
            getattr(self.library.lib, f"unsloth_{op}" + ("" if op.endswith("_backward") else "_forward")),
            self.handle,
            self.library.check,
        )
        arguments, stream_of = ctypes.byref(params), self.stream

        def run():
            status = function(handle, arguments, stream_of() if stream is None else stream)
            if status != 0:
                check(status)

        run.params, run.kept = params, kept
        return run
