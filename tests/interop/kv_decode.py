#!/usr/bin/env python3
"""KL of transformers' quantized KV caches (quanto, HQQ) during generation.

    python kv_decode.py MODEL_DIR --tokens FILE.json:KEY [--last 32] [--prefill 32] [--backend quanto|hqq …] [--bits 4]
                        [--group 16 64] [--residual 0 128] [--keys-axis 0]

Runs the last windows of the file: --prefill tokens in one pass, then token by token through the cache. One JSON line per
combination: mean KL(whole pass in float32 || through the cache) over the positions from the last of the prompt on, and the
bits per element that codes, scales and shifts of the quantized part take. To compare with ours:

    mantissa eval MODEL_DIR --reference MODEL_DIR --tokens LAST.json --kv POLICY --prefill 32 --json

Needs `pip install optimum-quanto==0.2.7 hqq==0.2.8.post1 ninja` and a C++ compiler in addition to requirements.txt.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, QuantizedCache


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    path, _, key = args.tokens.partition(":")
    windows = json.loads(Path(path).read_text())
    windows = torch.tensor((windows[key] if key else windows)[-args.last :])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = model(windows, use_cache=False).logits[:, args.prefill - 1 : -1].log_softmax(-1)
        for backend in args.backend:
            for bits in args.bits:
                for group in args.group:
                    for residual in args.residual:
                        one(args, model, windows, reference, backend, bits, group, residual)


def one(args, model, windows, reference, backend, bits, group, residual):
    axes = {"axis_key": args.keys_axis, "axis_value": args.values_axis}
    if backend == "hqq":
        axes = {name: max(axis, 0) for name, axis in axes.items()}
    cache = QuantizedCache(
        backend=backend, config=model.config, nbits=bits, q_group_size=group, residual_length=residual, **axes
    )
    logits = [model(windows[:, : args.prefill], past_key_values=cache, use_cache=True).logits[:, -1:]]
    for position in range(args.prefill, windows.shape[1] - 1):
        logits.append(model(windows[:, position : position + 1], past_key_values=cache, use_cache=True).logits)
    ours = torch.cat(logits, 1).log_softmax(-1)
    kl = (reference.exp() * (reference - ours)).sum(-1).mean().item()
    report = {"backend": backend, "bits": bits, "group": group, "residual": residual, **axes}
    print(json.dumps({**report, "kl": round(kl, 6), "bits_per_element": round(stored_bits(cache), 3)}), flush=True)


def stored_bits(cache):
    """Returns the bits per element of the quantized part: codes, scales and shifts as stored."""
    bits, elements = 0, 0
    for layer in cache.layers:
        for part in (layer._quantized_keys, layer._quantized_values):
            if isinstance(part, tuple):
                codes, meta = part
                held = [codes, meta["scale"], meta["zero"]]
                elements += torch.Size(meta["shape"]).numel()
            else:
                data = part._data
                held = [getattr(data, "_data", data), part._scale, part._shift]
                elements += part.numel()
            bits += sum(8 * t.numel() * t.element_size() for t in held)
    return bits / elements


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--last", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=32)
    parser.add_argument("--backend", nargs="+", default=["quanto"])
    parser.add_argument("--bits", nargs="+", type=int, default=[4])
    parser.add_argument("--group", nargs="+", type=int, default=[64])
    parser.add_argument("--residual", nargs="+", type=int, default=[0])
    parser.add_argument("--keys-axis", type=int, default=0)
    parser.add_argument("--values-axis", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
