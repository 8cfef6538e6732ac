#!/usr/bin/env python3
"""Checks one of our GGUF files with third-party readers.

    check_gguf.py FILE.gguf --dense DENSE.safetensors
        the `gguf` package reads the file; every tensor it dequantizes equals DENSE (written by the example `dense` of
        mantissa-model from the same file) bit for bit

    check_gguf.py FILE.gguf --tokens WINDOWS.json[:KEY] [--windows N] [--nll OURS.json] [--tolerance 0.005]
        llama.cpp (llama-cpp-python) runs the file on token windows; its perplexity is printed and, with OURS.json (written
        by `mantissa eval FILE.gguf --tokens ... --json=OURS.json`), compared with ours

    check_gguf.py FILE.gguf --tokenizer FOLDER [--text FILE]
        llama.cpp's tokenizer gives the ids of FOLDER/tokenizer.json

Exit code 0 if all requested checks pass, 1 if not.
"""

import argparse
import json
import math
import sys

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def stored_name(name):
    module, part = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        layer, module = module[len("model.layers."):].split(".", 1)
        return f"blk.{layer}.{NAMES[module]}.{part}"
    return f"{NAMES[module]}.{part}"


def interleave(rows, heads):
    """The converter's permutation of q and k in the llama architecture, Hugging Face to GGUF."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def check_values(path, dense):
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    reader = GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    heads = {
        "attn_q": reader.fields[f"{architecture}.attention.head_count"].contents(),
        "attn_k": reader.fields[f"{architecture}.attention.head_count_kv"].contents(),
    }
    failed, types = 0, {}
    with safe_open(dense, "np") as ours:
        for name in ours.keys():
            tensor = tensors[stored_name(name)]
            theirs = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1])
            scale = tensors.get(tensor.name.removesuffix(".weight") + ".scale")
            if scale is not None:
                # Same order of multiplication: the block scale times the factor first.
                theirs = theirs * scale.data.astype(np.float32)[0]
            values = ours.get_tensor(name)
            which = stored_name(name).split(".")[-2]
            if architecture == "llama" and which in heads:
                values = interleave(values, heads[which])
            key = tensor.tensor_type.name + (" with a factor" if scale is not None else "")
            types[key] = types.get(key, 0) + 1
            if scale is not None:
                same = np.allclose(values, theirs, rtol=3e-7, atol=0)
            else:
                same = np.array_equal(values.view(np.uint32) & mask(values), theirs.view(np.uint32) & mask(theirs))
            if not same:
                failed += 1
                print(f"{name}: differs, at most by {np.abs(values - theirs).max()}")
    counts = ", ".join(f"{count} {ty}" for ty, count in sorted(types.items()))
    print(f"gguf package: {counts}; {failed} tensors differ")
    return failed == 0


def mask(values):
    """Compares values; zeros are equal whatever their sign, since a block's -0 depends on the order of two factors."""
    return np.where(values == 0, np.uint32(0x7FFFFFFF), np.uint32(0xFFFFFFFF))


def windows_of(argument, limit):
    path, _, key = argument.partition(":")
    with open(path) as file:
        windows = json.load(file)
    return (windows[key] if key else windows)[:limit]


def llama(path, **options):
    """Loads a model with llama.cpp's plain CPU kernels: the AMX ones of the pinned version crash on some machines, on files
    that llama.cpp quantized itself too."""
    import llama_cpp

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    try:
        return llama_cpp.Llama(path, n_gpu_layers=0, verbose=False, **options)
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = defaults


def check_perplexity(path, windows, ours, tolerance):
    longest = max(len(window) for window in windows)
    model = llama(path, n_ctx=longest, n_batch=longest, logits_all=True)
    total, count = 0.0, 0
    for window in windows:
        model.reset()
        model.eval(window)
        logits = np.asarray(model.scores[: len(window) - 1], dtype=np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        total += float((log_sum - logits[np.arange(len(window) - 1), window[1:]]).sum())
        count += len(window) - 1
    theirs = math.exp(total / count)
    print(f"llama.cpp: perplexity {theirs:.4f} over {count} tokens", end="")
    if ours is None:
        print()
        return True
    with open(ours) as file:
        ours = json.load(file)
    assert ours["tokens"] == count, f"ours saw {ours['tokens']} tokens"
    ratio = theirs / ours["ppl"] - 1
    print(f", ours {ours['ppl']:.4f}: {100 * ratio:+.3f} %")
    return abs(ratio) <= tolerance


TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "don't you'll 12345 3.14159 CamelCase snake_case\n\ttabs and\n\nlines",
    "One day, Tom said: \"It's mine!\" and ran away...",
]


def check_tokenizer(path, folder, text):
    from tokenizers import Tokenizer

    model = llama(path, vocab_only=True)
    theirs = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = TEXTS + ([open(text).read()[:20000]] if text else [])
    failed = 0
    for text in texts:
        ours = model.tokenize(text.encode(), add_bos=True, special=False)
        expected = theirs.encode(text).ids
        if ours != expected:
            failed += 1
            at = next((i for i, (a, b) in enumerate(zip(ours, expected)) if a != b), min(len(ours), len(expected)))
            print(f"tokens differ from {at} on: {ours[at:at + 5]} for {expected[at:at + 5]}, in {text[:40]!r}")
    print(f"llama.cpp's tokenizer: {len(texts) - failed} of {len(texts)} texts have the same ids")
    return failed == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--dense")
    parser.add_argument("--tokens")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--nll")
    parser.add_argument("--tolerance", type=float, default=0.005)
    parser.add_argument("--tokenizer")
    parser.add_argument("--text")
    args = parser.parse_args()
    held = True
    if args.dense:
        held &= check_values(args.file, args.dense)
    if args.tokens:
        held &= check_perplexity(args.file, windows_of(args.tokens, args.windows), args.nll, args.tolerance)
    if args.tokenizer:
        held &= check_tokenizer(args.file, args.tokenizer, args.text)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
