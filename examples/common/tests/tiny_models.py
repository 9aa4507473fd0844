"""Llama models of a few hundred kilobytes with random weights, one for each way a file may differ.

Written with the standard library alone and the same bytes everywhere: reference/tiny_models.json
keeps what llama.cpp makes of them.
"""

import math
import random
import struct

UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
F32, F16, Q4_0, Q4_1, Q8_0, BF16, I2_S = 0, 1, 2, 3, 8, 30, 36
BLOCK = 32
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

TEXT = "The quick brown fox jumps over the lazy dog, again and again; 12 times, then 345 more! "


class Gguf:
    def __init__(self, seed, decoded=False):
        self.random = random.Random(seed)
        self.decoded = decoded  # I2_S as the floats that it stands for
        self.metadata, self.count = b"", 0
        self.tensors = []

    def set(self, key, kind, value):
        self.metadata += string(key) + struct.pack("<I", kind) + scalar(kind, value)
        self.count += 1

    def set_array(self, key, kind, values):
        head = struct.pack("<IIQ", ARRAY, kind, len(values))
        self.metadata += string(key) + head + b"".join(scalar(kind, value) for value in values)
        self.count += 1

    def uniform(self, scale):
        return (2 * self.random.random() - 1) * scale

    def add(self, name, shape, kind, scale=0.0, around=0.0):
        """A tensor of uniform values: `around` plus or minus `scale`."""
        size = math.prod(shape)
        if kind == F32:
            data = struct.pack(f"<{size}f", *(around + self.uniform(scale) for _ in range(size)))
        elif kind == F16:
            data = struct.pack(f"<{size}e", *(self.uniform(scale) for _ in range(size)))
        elif kind == BF16:
            data = b"".join(struct.pack("<f", self.uniform(scale))[2:] for _ in range(size))
        elif kind == I2_S:
            codes = [self.random.randrange(3) for _ in range(size)]
            kind, data = (F32, floats(codes, scale)) if self.decoded else (I2_S, ternary(codes, scale))
        else:
            data = b"".join(self.block(kind, scale) for _ in range(size // BLOCK))
        self.tensors.append((name, shape, kind, data))

    def block(self, kind, scale):
        quants = self.random.getrandbits(8 * (BLOCK if kind == Q8_0 else BLOCK // 2))
        quants = quants.to_bytes(BLOCK if kind == Q8_0 else BLOCK // 2, "little")
        if kind == Q8_0:
            return struct.pack("<e", scale / 128) + quants
        minimum = struct.pack("<e", -scale) if kind == Q4_1 else b""
        return struct.pack("<e", scale / 8) + minimum + quants

    def write(self, path):
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), self.count) + self.metadata
        body = b""
        for name, shape, kind, data in self.tensors:
            sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
            head += string(name) + struct.pack("<I", len(shape)) + sizes
            head += struct.pack("<IQ", kind, len(body))
            body += data + bytes(-len(data) % 32)
        path.write_bytes(head + bytes(-len(head) % 32) + body)


def ternary(codes, scale):
    """I2_S: four codes a byte, 32 apart, the first in the high bits; then 32 bytes that begin with the scale."""
    packed = bytearray(len(codes) // 4)
    for i, code in enumerate(codes):
        packed[i // 128 * 32 + i % 32] |= code << (6 - 2 * (i % 128 // 32))
    return bytes(packed) + struct.pack("<f", scale) + bytes(28)


def floats(codes, scale):
    (scale,) = struct.unpack("<f", struct.pack("<f", scale))
    return struct.pack(f"<{len(codes)}f", *((code - 1) * scale for code in codes))


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def scalar(kind, value):
    if kind == STRING:
        return string(value)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f"}[kind], value)


def add_byte_level_tokenizer(model, size=0):
    """Every byte, and the merges that a short list of words needs; and tokens that no text has, up to `size` in all."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + i) for i in range(256 - len(printable)))
    alphabet = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    tokens, merges = list(alphabet), []
    for word in ["the", "Ġthe", "Ġa", "Ġag", "ain", "Ġagain", "er", "ov", "over", "mo", "re"]:
        pieces = list(word)
        while len(pieces) > 1:
            merge = f"{pieces[0]} {pieces[1]}"
            pieces[:2] = [pieces[0] + pieces[1]]
            if merge not in merges:
                merges.append(merge)
                tokens.append(pieces[0])
    tokens += [f"<none {i}>" for i in range(size - len(tokens) - 2)]
    kinds = [NORMAL] * len(tokens) + [CONTROL, CONTROL]
    tokens += ["<|begin_of_text|>", "<|end_of_text|>"]
    model.set("tokenizer.ggml.model", STRING, "gpt2")
    model.set("tokenizer.ggml.pre", STRING, "llama-bpe")
    model.set_array("tokenizer.ggml.tokens", STRING, tokens)
    model.set_array("tokenizer.ggml.token_type", INT32, kinds)
    model.set_array("tokenizer.ggml.merges", STRING, merges)
    model.set("tokenizer.ggml.bos_token_id", UINT32, len(tokens) - 2)
    model.set("tokenizer.ggml.eos_token_id", UINT32, len(tokens) - 1)
    return len(tokens)


def add_sentence_piece_tokenizer(model):
    words = ["▁", "▁the", "▁a", "th", "the", "ag", "ain", "▁again", "over", "▁over", "mo", "re"]
    words += ["▁ag", "▁t", "▁th", "in", "ai", "ov", "er", "▁o", "▁ov"]
    words += [chr(c) for c in range(0x21, 0x7F)]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    model.set("tokenizer.ggml.model", STRING, "llama")
    model.set("tokenizer.ggml.pre", STRING, "default")
    model.set_array("tokenizer.ggml.tokens", STRING, tokens)
    model.set_array("tokenizer.ggml.token_type", INT32, kinds)
    model.set_array("tokenizer.ggml.scores", FLOAT32, scores)
    model.set("tokenizer.ggml.bos_token_id", UINT32, 1)
    model.set("tokenizer.ggml.eos_token_id", UINT32, 2)
    model.set("tokenizer.ggml.unknown_token_id", UINT32, 0)
    return len(tokens)


def make(
    path,
    seed,
    add_tokenizer,
    kind,
    num_heads=4,
    num_kv_heads=2,
    head_dim=None,
    theta=10000.0,
    scaling=None,
    rope_factors=False,
    tied=False,
    biases=False,
    hidden=64,
    intermediate=96,
    decoded=False,
    layers=2,
):
    model = Gguf(seed, decoded)
    model.set("general.architecture", STRING, "llama")
    model.set("general.name", STRING, path.stem)
    model.set("llama.context_length", UINT32, 512)
    model.set("llama.embedding_length", UINT32, hidden)
    model.set("llama.block_count", UINT32, layers)
    model.set("llama.feed_forward_length", UINT32, intermediate)
    model.set("llama.attention.head_count", UINT32, num_heads)
    model.set("llama.attention.head_count_kv", UINT32, num_kv_heads)
    model.set("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5)
    model.set("llama.rope.freq_base", FLOAT32, theta)
    if head_dim is not None:
        model.set("llama.attention.key_length", UINT32, head_dim)
        model.set("llama.attention.value_length", UINT32, head_dim)
    head_dim = head_dim or hidden // num_heads
    model.set("llama.rope.dimension_count", UINT32, head_dim)
    if scaling is not None:
        model.set("llama.rope.scaling.type", STRING, scaling)
        model.set("llama.rope.scaling.factor", FLOAT32, 4.0)
        model.set("llama.rope.scaling.original_context_length", UINT32, 128)
    vocab = add_tokenizer(model)

    # Of ternary models the layers are.
    of_vocabulary = F32 if kind == I2_S else kind
    model.add("token_embd.weight", [vocab, hidden], of_vocabulary, 1.0)
    if rope_factors:
        model.add("rope_freqs.weight", [head_dim // 2], F32, 3.0, around=4.5)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    for layer in range(layers):
        block = f"blk.{layer}."
        model.add(block + "attn_norm.weight", [hidden], F32, 0.2, around=1.0)
        for name, size in (("attn_q", q_size), ("attn_k", kv_size), ("attn_v", kv_size)):
            model.add(f"{block}{name}.weight", [size, hidden], kind, 0.4)
            if biases:
                model.add(f"{block}{name}.bias", [size], F32, 0.2)
        # Rows that are not whole blocks stay floats, as llama-quantize has it.
        of_output = kind if q_size % 32 == 0 else F32
        model.add(block + "attn_output.weight", [hidden, q_size], of_output, 0.4)
        model.add(block + "ffn_norm.weight", [hidden], F32, 0.2, around=1.0)
        model.add(block + "ffn_gate.weight", [intermediate, hidden], kind, 0.3)
        model.add(block + "ffn_up.weight", [intermediate, hidden], kind, 0.3)
        model.add(block + "ffn_down.weight", [hidden, intermediate], kind, 0.3)
    model.add("output_norm.weight", [hidden], F32, 0.2, around=1.0)
    if not tied:
        model.add("output.weight", [vocab, hidden], of_vocabulary, 0.5)
    model.write(path)


bpe, spm = add_byte_level_tokenizer, add_sentence_piece_tokenizer
# name: how the file is made
MODELS = {
    "plain_f32": {"seed": 1, "add_tokenizer": bpe, "kind": F32, "tied": True},
    "llama3_f16": {
        "seed": 12,
        "add_tokenizer": bpe,
        "kind": F16,
        "head_dim": 32,
        "theta": 500000.0,
        "rope_factors": True,
    },
    "linear_q8_0": {"seed": 3, "add_tokenizer": spm, "kind": Q8_0, "scaling": "linear"},
    "yarn_q4_0": {"seed": 14, "add_tokenizer": spm, "kind": Q4_0, "scaling": "yarn", "num_heads": 2},
    "biases_q4_1": {"seed": 5, "add_tokenizer": bpe, "kind": Q4_1, "biases": True},
    "mqa_bf16": {"seed": 6, "add_tokenizer": spm, "kind": BF16, "num_kv_heads": 1},
}


def write(name, directory):
    path = directory / f"{name}.gguf"
    make(path, **MODELS[name])
    return path


def write_ternary(directory):
    """A model whose layers are I2_S, and the same in the floats that these stand for."""
    paths = [directory / f"ternary_{form}.gguf" for form in ("codes", "floats")]
    for path, decoded in zip(paths, (False, True)):
        layers = {"num_heads": 8, "head_dim": 32, "hidden": 128, "intermediate": 256}
        make(path, seed=31, add_tokenizer=bpe, kind=I2_S, decoded=decoded, **layers)
    return paths
