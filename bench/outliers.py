#!/usr/bin/env python3
"""Robustness to outliers: KL of methods on a model, on a copy with outlier channels, and on one with massive activations.

    bench/outliers.py BINARY MODEL TOKENS.json WORK_FOLDER [TABLE.md PLOT.svg]

TOKENS.json holds windows of ids under `calib` and `eval_in`. Both changes leave the model's function unchanged (the first column of
the table measures that):
- channels: of every norm before attention and MLP, the weight of each 32nd channel × 100, and the columns of the linear layers
  that read it / 100;
- tokens: of every MLP, the row of up_proj whose product with the gate is the most concentrated on few tokens × 1000, and the
  column of down_proj that reads it / 1000.
Needs torch, transformers and safetensors.
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CHANNEL_STEP, CHANNEL_FACTOR, TOKEN_FACTOR = 32, 100.0, 1000.0
RECIPES = {
    "W8A8": [
        "rtn-int8-channel+int8-token",
        "gptq-int8-channel+int8-token",
        "smooth-int8-channel+int8-token",
        "rotate-int8-channel+int8-token",
        # LLM.int8(): inputs of 6 and more are not quantized.
        "rtn-int8-channel:restricted+int8-token:restricted --format bitsandbytes",
        "fp8-dynamic",
    ],
    "W4A4": [
        "rtn-int4-channel+int4-token",
        "rotate-gptq-int4-channel+int4-token",
        "rtn-nvfp4+nvfp4",
        "rotate-gptq-nvfp4+nvfp4",
    ],
    "W4A16": [
        "rtn-int4-g32",
        "hqq-int4-g32",
        "awq-int4-g32-asym",
        "gptq-int4-g32-asym",
        "spqr-int4-g32-asym",
        "autoround-int4-g32",
    ],
}
# A method survives if its KL is at most twice that on the unchanged model.
SURVIVES = 2.0


def layers_of(tensors):
    return 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))


def plant_channels(tensors):
    for layer in range(layers_of(tensors)):
        prefix = f"model.layers.{layer}."
        for norm, readers in [
            ("input_layernorm", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ]:
            tensors[f"{prefix}{norm}.weight"][::CHANNEL_STEP] *= CHANNEL_FACTOR
            for reader in readers:
                tensors[f"{prefix}{reader}.weight"][:, ::CHANNEL_STEP] /= CHANNEL_FACTOR


def concentrated(model_dir, windows):
    """Returns for each layer the MLP channel with the largest ratio of amax to root mean square."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    seen = {}

    def hook(layer):
        def look(_, inputs):
            seen.setdefault(layer, []).append(inputs[0].detach().flatten(0, 1))
        return look

    for i, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(hook(i))
    with torch.no_grad():
        model(torch.tensor(windows))
    chosen = []
    for layer in sorted(seen):
        h = torch.cat(seen[layer])
        ratio = h.abs().amax(0) / h.square().mean(0).sqrt()
        channel = int(ratio.argmax())
        strong = (h[:, channel].abs() > 0.5 * h[:, channel].abs().max()).float().mean().item()
        chosen.append((channel, ratio.max().item(), strong))
    return chosen


def plant_tokens(tensors, chosen):
    for layer, (channel, _, _) in enumerate(chosen):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][channel] *= TOKEN_FACTOR
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, channel] /= TOKEN_FACTOR


def planted(source, out, plant):
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    files = list(out.glob("*.safetensors"))
    assert len(files) == 1, "a model of one file"
    tensors = load_file(files[0])
    plant(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, files[0], metadata={"format": "pt"})
    return out


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout), None


def main():
    binary, source, tokens, work = sys.argv[1], *map(pathlib.Path, sys.argv[2:5])
    windows = json.loads(tokens.read_text())["calib"][:32]
    chosen = concentrated(source, windows)
    for layer, (channel, ratio, strong) in enumerate(chosen):
        print(f"layer {layer}: MLP channel {channel}, {ratio:.0f} times its root mean square, above half of it on {100 * strong:.2f} % of tokens", file=sys.stderr)
    work.mkdir(parents=True, exist_ok=True)
    models = {
        "as it is": source,
        "channels": planted(source, work / "channels", plant_channels),
        "tokens": planted(source, work / "tokens", lambda tensors: plant_tokens(tensors, chosen)),
    }
    lines = ["| recipe | " + " | ".join(models) + " | survives |", "|---|" + "---|" * (len(models) + 1)]
    unchanged = []
    for model in models.values():
        found, error = run(binary, "eval", model, "--reference", source, "--tokens", f"{tokens}:eval_in", "--json", "--quiet")
        if error:
            sys.exit(error)
        unchanged.append(found["kl"])
    lines.append("| none (KL to the model as it is) | " + " | ".join(f"{kl:.1e}" for kl in unchanged) + " | |")
    points = []
    for kind, recipes in RECIPES.items():
        for recipe in recipes:
            cells, kls = [], []
            for model in models.values():
                out = work / "quantized"
                shutil.rmtree(out, ignore_errors=True)
                _, error = run(binary, "quantize", model, "--recipe", *recipe.split(), "--calibration-tokens", f"{tokens}:calib", "--overwrite", "--out", out, "--json", "--quiet")
                found = None
                if error is None:
                    found, error = run(binary, "eval", out, "--reference", model, "--tokens", f"{tokens}:eval_in", "--json", "--quiet")
                if error:
                    print(f"{recipe}: {error}", file=sys.stderr)
                    cells.append("refused")
                    kls.append(math.nan)
                    continue
                cells.append(f"{found['kl']:.5f} ± {found['kl_se']:.5f}")
                kls.append(found["kl"])
            survives = [name for name, kl in list(zip(models, kls))[1:] if kl <= SURVIVES * kls[0]]
            lines.append(f"| {kind} `{recipe}` | " + " | ".join(cells) + f" | {' and '.join(survives) or 'neither'} |")
            points.append((f"{kind} {recipe.split()[0]}", kls))
            print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    if len(sys.argv) > 6:
        pathlib.Path(sys.argv[5]).write_text(table)
        pathlib.Path(sys.argv[6]).write_text(plot(points, list(models)))
    else:
        print(table)


def plot(points, names):
    """Draws KL as dots on a logarithmic axis, one line per recipe."""
    left, right, top, row = 350, 30, 50, 24
    width, height = 920, top + row * len(points) + 40
    values = [kl for _, kls in points for kl in kls if kl == kl and kl > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    x = lambda kl: left + (math.log10(kl) - low) / (high - low) * (width - left - right)
    colors = ["#444444", "#c03030", "#2060c0"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{top - 8}" x2="{at:.1f}" y2="{height - 34}" stroke="#dddddd"/><text x="{at:.1f}" y="{height - 18}" text-anchor="middle">1e{power}</text>')
    for i, (name, color) in enumerate(zip(names, colors)):
        parts.append(f'<circle cx="{left + 110 * i}" cy="18" r="5" fill="{color}"/><text x="{left + 110 * i + 10}" y="22">{name}</text>')
    for i, (name, kls) in enumerate(points):
        y = top + row * i + 8
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        dots = [(kl, color) for kl, color in zip(kls, colors) if kl == kl and kl > 0]
        if dots:
            ends = [x(kl) for kl, _ in dots]
            parts.append(f'<line x1="{min(ends):.1f}" y1="{y}" x2="{max(ends):.1f}" y2="{y}" stroke="#bbbbbb" stroke-width="2"/>')
        parts += [f'<circle cx="{x(kl):.1f}" cy="{y}" r="5" fill="{color}" fill-opacity="0.85"/>' for kl, color in dots]
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 3}" text-anchor="middle">KL to the model before quantization, nats (logarithmic)</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
