#!/usr/bin/env python3
"""Writes tests/pretokenizer_cases.inc: how the published regular expressions cut texts into words.

    pip install regex==2026.11.15
    python reference/pretokenizer.py

The expressions are those of the models' own tokenizer.json; the PyPI package regex runs them.
"""

import pathlib

import regex

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "pretokenizer_cases.inc"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each expression cuts the pieces that the one before it left.
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}|\P{N}+", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}

TEXTS = [
    "Hello world",
    " Hello  world ",
    "it's I'm you're we've he'll she'd IT'S YOU'RE 'tis o'clock'",
    "1234567 12ab34 a1b2 3.14 ½ Ⅷ ٣٤٥ x²",
    "a\n\nb\r\n\r\n  c\n \n d \t\n\te   ",
    "\t\tindented();\n    return x;  // done\n",
    "!!!??? ... (a) [b] {c} -- 'q' \"r\" $5.00 100%\n\n!\n",
    "Voilà l'été naïve ÀÉ Straße",
    "Привет мир 你好世界 こんにちは नमस्ते",
    "🍕👩\u200d👩\u200d👧 🇫🇷! e\u0301 ﬁ",
    "\u00a0nbsp\u00a0\u00a0x\u2003y\u3000z\u0085w\u200bv\u2028u\ufeff",
    "  \n",
    " ",
    "\n",
    "   x",
    "'",
    "''s '  's",
    "a_b-c/d@e #f",
]


def split(rule, text):
    pieces = [text]
    for expression in RULES[rule]:
        pieces = [word for piece in pieces for word in regex.findall(expression, piece)]
    assert "".join(pieces) == text
    return pieces


def literal(text):
    """A C++ string literal in ASCII; octal escapes cannot run into what follows them."""
    plain = set(range(0x20, 0x7F)) - {ord('"'), ord("\\"), ord("?")}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


def main():
    lines = ["// Written by reference/pretokenizer.py."]
    for rule in RULES:
        for text in TEXTS:
            words = ", ".join(literal(word) for word in split(rule, text))
            lines.append(f'{{"{rule}", {literal(text)}, {{{words}}}}},')
    OUTPUT.write_text("\n".join(lines) + "\n")
    print(f"{OUTPUT}: {len(RULES) * len(TEXTS)} cases")


if __name__ == "__main__":
    main()
