"""Reads GGUF files with the standard library alone, as far as the tests need it."""

import math
import struct

SCALARS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIif?Qqd"))
STRING, ARRAY = 8, 9
F32, F16, Q8_0, BF16 = 0, 1, 8, 30


class Gguf:
    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 0
        magic, version, tensors, metadata = self.unpack("4sIQQ")
        assert magic == b"GGUF" and version == 3
        self.metadata = {}
        for _ in range(metadata):
            key = self.string()
            self.metadata[key] = self.value(self.unpack("I")[0])
        self.tensors = {}
        for _ in range(tensors):
            name = self.string()
            (rank,) = self.unpack("I")
            shape = self.unpack(f"{rank}Q")[::-1]
            self.tensors[name] = (shape, *self.unpack("IQ"))
        self.start = (self.at + 31) // 32 * 32

    def unpack(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self):
        (size,) = self.unpack("Q")
        return self.unpack(f"{size}s")[0].decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.unpack("IQ")
            return [self.value(element) for _ in range(count)]
        return self.unpack(SCALARS[kind])[0]

    def floats(self, name):
        """The elements of a tensor that is not quantised."""
        shape, kind, offset = self.tensors[name]
        count = math.prod(shape)
        start = self.start + offset
        if kind == F32:
            return list(struct.unpack_from(f"<{count}f", self.data, start))
        if kind == F16:
            return list(struct.unpack_from(f"<{count}e", self.data, start))
        assert kind == BF16
        halves = struct.unpack_from(f"<{count}H", self.data, start)
        words = struct.pack(f"<{count}I", *(half << 16 for half in halves))
        return list(struct.unpack(f"<{count}f", words))
