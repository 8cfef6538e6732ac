#!/usr/bin/env python3
"""KL of 8-bit attention operands, on a model and on copies with outliers planted in keys and values.

    bench/attention_operands.py BINARY MODEL TOKENS.json:KEY WORK_FOLDER

Each change leaves the model's function unchanged (the first line of the table measures that):
- channels: one RoPE pair of key channels per head × 100, the same pair of query channels / 100;
- values: one value channel per head × 100, the columns of the output projection that read it / 100.
Needs torch and safetensors.
"""

import json
import pathlib
import sys

from outliers import layers_of, planted, run

FACTOR = 100.0
OPERANDS = [
    "int8", "int8,smooth", "int8,rotate", "fp8", "fp8,rotate",
    "q=int8-head,k=int8-head", "v=int8-head", "p=int8", "p=fp8-e4m3", "q=int4-head", "k=int4-head", "k=int4-head,rotate", "p=int4",
]


def plant_keys(tensors, heads, kv_heads, dim):
    for layer in range(layers_of(tensors)):
        prefix = f"model.layers.{layer}.self_attn."
        for projection, count, factor in [("k", kv_heads, FACTOR), ("q", heads, 1 / FACTOR)]:
            weight = tensors[f"{prefix}{projection}_proj.weight"].view(count, dim, -1)
            # The slowest RoPE pair, which positions hardly rotate.
            weight[:, [dim // 2 - 1, dim - 1]] *= factor


def plant_values(tensors, heads, kv_heads, dim):
    for layer in range(layers_of(tensors)):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}v_proj.weight"].view(kv_heads, dim, -1)[:, 0] *= FACTOR
        tensors[f"{prefix}o_proj.weight"].view(-1, heads, dim)[:, :, 0] /= FACTOR


def main():
    binary, source, tokens, work = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    config = json.loads((source / "config.json").read_text())
    sizes = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    work.mkdir(parents=True, exist_ok=True)
    models = {
        "as it is": source,
        "channels": planted(source, work / "channels", lambda tensors: plant_keys(tensors, *sizes)),
        "values": planted(source, work / "values", lambda tensors: plant_values(tensors, *sizes)),
    }
    print("| operands | " + " | ".join(models) + " |\n|---|" + "---|" * len(models))
    for operands in [None, *OPERANDS]:
        cells = []
        for model in models.values():
            more = ["--attention-operands", operands] if operands else []
            found, error = run(binary, "eval", model, "--reference", source, "--tokens", tokens, "--json", "--quiet", *more)
            cells.append(error or f"{found['kl']:.1e}" if operands is None else f"{found['kl']:.5f} ± {found['kl_se']:.5f}")
        print(f"| {f'`{operands}`' if operands else 'f32 (KL to the model as it is)'} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
