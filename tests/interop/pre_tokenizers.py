#!/usr/bin/env python3
"""Compares the pre-tokenizers that GGUF names (`tokenizer.ggml.pre`) with llama.cpp's.

    pre_tokenizers.py MANTISSA LLAMA_TOKENIZE VOCABULARY.gguf NAME ...

For each name a file of a tiny model with the byte-level vocabulary of VOCABULARY.gguf is made. llama-tokenize encodes the
probe texts from it, and the library `tokenizers` from the tokenizer.json that `mantissa quantize` writes of it. Prints the
first differences; needs gguf, numpy and tokenizers.
"""

import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy
from tokenizers import Tokenizer

TEXTS = [
    "Hello world, don't stop; WE'LL go. It's  two  spaces,   three\ttab\n\n newline\r\nEND ",
    "1 12 123 1234 12345 123456789 3.14159 2024-11-29 0x1F ½ ① ٣٤٥",
    "naïve café Å ﬁ ß İ Привет мир 你好世界 日本語テキスト 한국어 مرحبا हिन्दी ไทย",
    "🦀 👩\u200d👩\u200d👧 \u200b\u00a0x snake_case camelCase HTTPServer x+=1; // a\n    if (a && b) {\n\t\treturn;\n    }\n",
    "École's L'été's don’t “quoted” — dash… (a)[b]{c} $100 #tag @user a/b\\c 50% ~~ ||",
    "   leading\n\n\n   and trailing   ",
]


def write(path, source, name):
    """Writes a model of one layer of 32 columns with the vocabulary of `source`."""
    value = lambda key: source.fields[key].contents()
    tokens = value("tokenizer.ggml.tokens")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64), writer.add_embedding_length(32), writer.add_block_count(1)
    writer.add_feed_forward_length(32), writer.add_head_count(4), writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(10000.0), writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens), writer.add_token_types(value("tokenizer.ggml.token_type"))
    writer.add_token_merges(value("tokenizer.ggml.merges"))
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_add_bos_token(False)
    wave = lambda *shape: numpy.sin(numpy.arange(numpy.prod(shape), dtype=numpy.float32)).reshape(shape)
    writer.add_tensor("token_embd.weight", wave(len(tokens), 32).astype(numpy.float16))
    writer.add_tensor("output_norm.weight", numpy.ones(32, numpy.float32))
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{norm}.weight", numpy.ones(32, numpy.float32))
    for linear in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{linear}.weight", wave(32, 32).astype(numpy.float16))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


def main():
    mantissa, llama, vocabulary, *names = sys.argv[1:]
    source, different = gguf.GGUFReader(vocabulary), 0
    with tempfile.TemporaryDirectory() as folder:
        model, out = pathlib.Path(folder) / "m.gguf", pathlib.Path(folder) / "out"
        for name in names:
            write(model, source, name)
            run = [mantissa, "quantize", model, "--recipe", "rtn-int8-channel", "--out", out, "--overwrite", "--quiet"]
            done = subprocess.run(run, capture_output=True, text=True)
            if done.returncode != 0 or not (out / "tokenizer.json").exists():
                print(f"{name}: not read: {done.stderr.strip()[:200]}")
                different += 1
                continue
            ours, differs = Tokenizer.from_file(str(out / "tokenizer.json")), None
            for text in TEXTS:
                (pathlib.Path(folder) / "text").write_text(text, newline="")
                run = [llama, "-m", model, "--ids", "--log-disable", "--no-bos", "-f", pathlib.Path(folder) / "text"]
                done = subprocess.run(run, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
                if not lines:
                    differs = f"llama-tokenize: {done.stderr.strip()[-200:]}"
                    break
                theirs = [int(i) for i in lines[-1].strip("[]").split(",") if i.strip()]
                mine = ours.encode(text, add_special_tokens=False).ids
                if mine != theirs:
                    at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
                    piece = ours.decode(mine[max(0, at - 1):at + 3])
                    differs = f"token {at} near {piece!r}: mantissa {mine[at:at + 4]}, llama.cpp {theirs[at:at + 4]}"
                    break
            different += differs is not None
            print(f"{name}: {differs or 'equal'}", flush=True)
    print(f"{len(names)} names, {different} differ")
    sys.exit(different > 0)


main()
