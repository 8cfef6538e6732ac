#!/usr/bin/env python3
"""Quantizes a synthetic checkpoint of the shape of a large mixture of experts, with little memory.

    python bench/size.py DIR [--layers N | --full] [--once] [--gptq] [--keep]

Writes a checkpoint of Qwen3-VL-30B-A3B's shape (fused experts, vision tower) and a head that predicts several tokens into
DIR/model. With --full it has all layers, as a sparse file: weights are zeros that take no disk, except one random block
at the start of every tensor. Without it, it has N layers (2) of random weights.

Then runs `mantissa quantize` to int4 and NVFP4 with one thread under an address limit of 8 GB, kills a second run twice
at different points, resumes it, and compares the bytes of the weight files. Prints peak memory and times, and those of
GPTQ for the random model, with the times predicted for the full one.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

MANTISSA = Path(os.environ.get("MANTISSA", Path(__file__).resolve().parent.parent / "target/ci/mantissa"))
LIMIT = 8_000_000_000
LAYERS, HIDDEN, EXPERTS, WIDTH, HEADS, KV, HEAD, VOCABULARY = 48, 2048, 128, 768, 32, 4, 128, 151_936
TOWER_LAYERS, TOWER = 27, 1152


def shapes(layers):
    """Names and shapes of all tensors, in bf16."""
    yield "model.language_model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(layers):
        at = f"model.language_model.layers.{layer}."
        yield at + "input_layernorm.weight", [HIDDEN]
        yield at + "post_attention_layernorm.weight", [HIDDEN]
        yield at + "self_attn.q_proj.weight", [HEADS * HEAD, HIDDEN]
        yield at + "self_attn.k_proj.weight", [KV * HEAD, HIDDEN]
        yield at + "self_attn.v_proj.weight", [KV * HEAD, HIDDEN]
        yield at + "self_attn.o_proj.weight", [HIDDEN, HEADS * HEAD]
        yield at + "self_attn.q_norm.weight", [HEAD]
        yield at + "self_attn.k_norm.weight", [HEAD]
        yield at + "mlp.gate.weight", [EXPERTS, HIDDEN]
        yield at + "mlp.experts.gate_up_proj", [EXPERTS, HIDDEN, 2 * WIDTH]
        yield at + "mlp.experts.down_proj", [EXPERTS, WIDTH, HIDDEN]
    yield "model.language_model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]
    for layer in range(TOWER_LAYERS):
        at = f"model.visual.blocks.{layer}."
        yield at + "attn.qkv.weight", [3 * TOWER, TOWER]
        yield at + "attn.proj.weight", [TOWER, TOWER]
        yield at + "mlp.linear_fc1.weight", [4304, TOWER]
        yield at + "mlp.linear_fc2.weight", [TOWER, 4304]
    yield "model.visual.merger.linear_fc2.weight", [HIDDEN, 4 * TOWER]
    yield "mtp.fc.weight", [HIDDEN, 2 * HIDDEN]
    yield "mtp.layers.0.mlp.gate.weight", [EXPERTS, HIDDEN]


def config(layers):
    text = dict(model_type="qwen3_vl_moe_text", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=layers, intermediate_size=6144,
                num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD, num_experts=EXPERTS, num_experts_per_tok=8,
                moe_intermediate_size=WIDTH, norm_topk_prob=True, rms_norm_eps=1e-6, max_position_embeddings=262_144, hidden_act="silu",
                rope_theta=5e6, decoder_sparse_step=1, mlp_only_layers=[], rope_scaling=dict(rope_type="default", mrope_interleaved=True,
                                                                                           mrope_section=[24, 20, 20]))
    return dict(architectures=["Qwen3VLMoeForConditionalGeneration"], model_type="qwen3_vl_moe", dtype="bfloat16", tie_word_embeddings=False,
                text_config=text, vision_config=dict(model_type="qwen3_vl_moe", hidden_size=TOWER, depth=TOWER_LAYERS))


def block(seed, count):
    """`count` random bf16 values of about .02."""
    bits = random.Random(seed).randbytes(2 * count)
    # Sign and mantissa at random, exponent from 2^-9 to 2^-6.
    return b"".join(struct.pack("<H", (a & 0x807F) | ((118 + (a >> 8 & 3)) << 7)) for (a,) in struct.iter_unpack("<H", bits))


def write_model(path, layers, sparse):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(layers)))
    header, at = {}, 0
    for name, shape in shapes(layers):
        size = 2
        for n in shape:
            size *= n
        header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + size])
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random_block = block(0, 1 << 20)
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        for i, entry in enumerate(header.values()):
            start, end = entry["data_offsets"]
            file.seek(begin + start)
            size = end - start
            if sparse:
                file.write(random_block[: min(size, 1 << 16)])
                continue
            # Every tensor begins elsewhere in the block.
            turn = 2 * (i * 7919 % (1 << 20))
            turned = random_block[turn:] + random_block[:turn]
            while size > 0:
                file.write(turned[: min(size, len(turned))])
                size -= len(turned)
        file.truncate(begin + at)
    return at


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


def run(arguments, kill_after=None):
    """Runs mantissa under the limit; returns seconds of processor and wall, and peak memory in bytes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    child = subprocess.Popen([MANTISSA, *map(str, arguments)], preexec_fn=limit, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if kill_after is not None:
        time.sleep(kill_after)
        child.send_signal(signal.SIGKILL)
    _, said = child.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if kill_after is None and child.returncode != 0:
        sys.exit(said.decode())
    user = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return user, time.time() - start, 1024 * after.ru_maxrss


def digests(path):
    def of(file):
        digest = hashlib.sha256()
        with open(file, "rb") as data:
            while piece := data.read(1 << 22):
                digest.update(piece)
        return digest.hexdigest()

    return {file.name: of(file) for file in sorted(path.glob("*.safetensors"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the outputs")
    parser.add_argument("--recipes", nargs="*", default=["rtn-int4-g128", "rtn-nvfp4"])
    parser.add_argument("--once", action="store_true", help="do not kill and resume")
    parser.add_argument("--gptq", action="store_true", help="also measure GPTQ of the random model")
    args = parser.parse_args()
    layers = LAYERS if args.full else args.layers
    model, out = args.dir / "model", args.dir / "out"
    shutil.rmtree(model, ignore_errors=True)
    size = write_model(model, layers, args.full)
    print(f"{layers} layers, {size / 2e9:.2f} B parameters, {size / 1e9:.2f} GB of tensors, "
          f"{os.stat(model / 'model.safetensors').st_blocks * 512 / 1e9:.2f} GB on disk")
    quantize = ["quantize", model, "--out", out, "--threads", "1", "--verify=false", "--quiet"]
    for recipe in args.recipes:
        shutil.rmtree(out, ignore_errors=True)
        user, wall, peak = run([*quantize, "--recipe", recipe])
        once = digests(out)
        written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        print(f"{recipe}: {wall:.0f} s wall, {user:.0f} s of processor, peak {peak / 1e9:.2f} GB, {written / 1e9:.2f} GB written")
        if args.once:
            continue
        shutil.rmtree(out)
        for share in (0.35, 0.4):
            run([*quantize, "--recipe", recipe], kill_after=max(wall * share, 1))
        run([*quantize, "--recipe", recipe])
        same = digests(out) == once
        print(f"{recipe}: killed twice and resumed: {'the same bytes' if same else 'OTHER BYTES'}")
        if not same:
            sys.exit(1)
    if args.gptq:
        windows = args.dir / "windows.json"
        draw = random.Random(1)
        windows.write_text(json.dumps([[draw.randrange(VOCABULARY) for _ in range(512)] for _ in range(16)]))
        shutil.rmtree(out, ignore_errors=True)
        user, wall, peak = run([*quantize, "--recipe", "gptq-int4-g128", "--calibration-tokens", windows])
        print(f"gptq-int4-g128, 8192 tokens: {user:.0f} s of processor, peak {peak / 1e9:.2f} GB; "
              f"{LAYERS} layers predicted: {user / layers * LAYERS / 3600:.1f} h")
    if not args.keep:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(model, ignore_errors=True)


if __name__ == "__main__":
    main()
