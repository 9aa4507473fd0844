#!/usr/bin/env python3
"""Writes a model of Llama-3-8B's shape with random weights and a vocabulary of 49,152 tokens, for measuring.

    python3 benches/large_model.py FORMAT FILE.gguf [1B]

FORMAT: f16, or what all matrices are in: q8_0, q4_0, q4_1, q4_k, q5_k, q6_k, tq1_0, tq2_0. With 1B the shape is
Llama-3.2-1B's. Most tokens are words that no text has: what the model writes makes no sense. Standard library only.
"""

import collections
import pathlib
import random
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples" / "common" / "tests"))
import tiny_models
from tiny_models import FLOAT32, STRING, UINT32

# Type in the file, weights and bytes of a block, where it has factors of f16, and these.
FORMATS = {
    "f16": (1, 1, 2, None, 0),
    "q4_0": (2, 32, 18, (0,), 0.002),
    "q4_1": (3, 32, 20, (0, 2), 0.002),
    "q8_0": (8, 32, 34, (0,), 0.0002),
    "q4_k": (12, 256, 144, (0, 2), 0.00004),
    "q5_k": (13, 256, 176, (0, 2), 0.00002),
    "q6_k": (14, 256, 210, (208,), 0.00001),
    "tq1_0": (34, 256, 54, (52,), 0.01),
    "tq2_0": (35, 256, 66, (64,), 0.01),
}
Shape = collections.namedtuple("Shape", "hidden intermediate layers heads kv_heads")
SHAPES = {"8B": Shape(4096, 14336, 32, 32, 8), "1B": Shape(2048, 8192, 16, 32, 8)}
VOCAB = 49152


def random_blocks(kind, weights):
    """Some, over and over."""
    _, length, size, factors, factor = FORMATS[kind]
    some = bytearray(random.Random(0).randbytes(4096 * size))
    if factors is None:
        # Small numbers: the exponent's upper bits are those of 2^-7.
        some = bytearray(byte & 0x83 | 0x20 if i % 2 else byte for i, byte in enumerate(some))
    for at in factors or ():
        for block in range(0, len(some), size):
            some[block + at : block + at + 2] = struct.pack("<e", factor)
    whole, rest = divmod(weights // length * size, len(some))
    return bytes(some) * whole + bytes(some[:rest])


def metadata(shape):
    model = tiny_models.Gguf(0)
    model.set("general.architecture", STRING, "llama")
    model.set("general.name", STRING, "random")
    model.set("llama.context_length", UINT32, 8192)
    model.set("llama.embedding_length", UINT32, shape.hidden)
    model.set("llama.block_count", UINT32, shape.layers)
    model.set("llama.feed_forward_length", UINT32, shape.intermediate)
    model.set("llama.attention.head_count", UINT32, shape.heads)
    model.set("llama.attention.head_count_kv", UINT32, shape.kv_heads)
    model.set("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5)
    model.set("llama.rope.freq_base", FLOAT32, 500000.0)
    model.set("llama.rope.dimension_count", UINT32, shape.hidden // shape.heads)
    tiny_models.add_byte_level_tokenizer(model, VOCAB)
    return model.metadata, model.count


def tensors(shape):
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (VOCAB, hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (hidden,)
        yield block + "attn_q.weight", (hidden, hidden)
        yield block + "attn_k.weight", (kv, hidden)
        yield block + "attn_v.weight", (kv, hidden)
        yield block + "attn_output.weight", (hidden, hidden)
        yield block + "ffn_norm.weight", (hidden,)
        yield block + "ffn_gate.weight", (shape.intermediate, hidden)
        yield block + "ffn_up.weight", (shape.intermediate, hidden)
        yield block + "ffn_down.weight", (hidden, shape.intermediate)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (VOCAB, hidden)


def main():
    kind, path = sys.argv[1], pathlib.Path(sys.argv[2])
    shape = SHAPES[sys.argv[3] if len(sys.argv) > 3 else "8B"]
    code, length, size, _, _ = FORMATS[kind]
    described, count = metadata(shape)
    listed = list(tensors(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), count) + described
    place, sizes = 0, []
    for name, sides in listed:
        weights = sides[0] * (sides[1] if len(sides) == 2 else 1)
        matrix = len(sides) == 2
        sizes.append((matrix, weights, weights // length * size if matrix else 4 * weights))
        head += tiny_models.string(name) + struct.pack("<I", len(sides))
        head += b"".join(struct.pack("<Q", n) for n in reversed(sides))
        head += struct.pack("<IQ", code if matrix else 0, place)
        place += sizes[-1][2] + -sizes[-1][2] % 32
    made = {}
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for matrix, weights, length_in_bytes in sizes:
            if matrix and weights not in made:
                made[weights] = random_blocks(kind, weights)
            data = made[weights] if matrix else struct.pack("<f", 1.0) * weights
            file.write(data + bytes(-length_in_bytes % 32))


if __name__ == "__main__":
    main()
