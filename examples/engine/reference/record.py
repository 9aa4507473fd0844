#!/usr/bin/env python3
"""Records what llama.cpp makes of the prompts and texts in texts.py.

    python -m venv venv && . venv/bin/activate
    pip install jinja2 gguf==0.19.0 llama-cpp-python==0.3.36        # compiles llama.cpp
    python record.py ../../../models/SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-q4_1.json

Of each prompt it keeps the tokens and the greedy continuation, up to the token that ends the
generation; of each longer text the tokens and the mean negative log-likelihood of all but the first.

Each is recorded twice: of the file as it is, where llama.cpp rounds the activations to 8 bits before it
multiplies them with quantised weights; and, as `f32`, of the same weights decoded to f32 by the gguf
package, with keys and values kept in f32. The second is what an engine computes that decodes at load.
"""

import argparse
import hashlib
import json
import pathlib
import tempfile

import gguf
import jinja2
import llama_cpp
import numpy as np

from texts import PROMPTS, SCORED

CONTINUATION = 32


def decode_weights(source, target):
    """Writes a copy of the file with every tensor as f32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path, **options):
    return llama_cpp.Llama(str(path), n_ctx=2048, logits_all=True, verbose=False, **options)


def render_chat(model, message):
    """The model's own template, run by Jinja."""
    template = jinja2.Environment().from_string(model.metadata["tokenizer.chat_template"])
    messages = [{"role": "user", "content": message}]
    return template.render(messages=messages, add_generation_prompt=True)


def continue_greedily(model, tokens):
    model.reset()
    model.eval(tokens)
    continuation = []
    while len(continuation) < CONTINUATION:
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        if llama_cpp.llama_vocab_is_eog(model._model.vocab, token):
            break
        continuation.append(token)
        model.eval([token])
    return continuation


def mean_nll(model, tokens):
    model.reset()
    model.eval(tokens)
    logits = model.scores[: len(tokens) - 1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(-log_probabilities[np.arange(len(tokens) - 1), tokens[1:]].mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()

    model = load(arguments.model)
    with tempfile.TemporaryDirectory() as directory:
        decoded = pathlib.Path(directory) / "f32.gguf"
        decode_weights(arguments.model, decoded)
        f32 = llama_cpp.GGML_TYPE_F32
        model_f32 = load(decoded, type_k=f32, type_v=f32)
    # Whether a sequence begins with BOS is the file's own wish.
    add_bos = model.metadata.get("tokenizer.ggml.add_bos_token") == "true"

    prompts = []
    for name, prompt, chat in PROMPTS:
        text = render_chat(model, prompt) if chat else prompt
        tokens = model.tokenize(text.encode(), add_bos=add_bos, special=True)
        prompts.append(
            {
                "name": name,
                "prompt": prompt,
                "chat": chat,
                "prompt_tokens": tokens,
                "tokens": continue_greedily(model, tokens),
                "tokens_f32": continue_greedily(model_f32, tokens),
            }
        )
    texts = []
    for name, text in SCORED:
        tokens = model.tokenize(text.encode(), add_bos=add_bos, special=False)
        texts.append(
            {
                "name": name,
                "text": text,
                "tokens": tokens,
                "mean_nll": mean_nll(model, tokens),
                "mean_nll_f32": mean_nll(model_f32, tokens),
            }
        )

    reference = {
        "model": arguments.model.name,
        "model_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "recorded_with": f"llama-cpp-python {llama_cpp.__version__}, CPU, by record.py",
        "prompts": prompts,
        "texts": texts,
    }
    arguments.output.write_text(compact(json.dumps(reference, indent=1, ensure_ascii=False)) + "\n")


def compact(text):
    """Puts each list of numbers on one line."""
    lines, numbers = [], None
    for line in text.splitlines():
        if numbers is None and line.endswith("["):
            head, numbers = line, []
        elif numbers is not None and line.strip().rstrip(",").lstrip("-").isdigit():
            numbers.append(line.strip().rstrip(","))
        elif numbers:
            lines.append(head + ", ".join(numbers) + line.strip())
            numbers = None
        elif numbers is not None:
            lines.extend([head, line])
            numbers = None
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
