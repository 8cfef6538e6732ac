#!/usr/bin/env python3
"""Records PyTorch's gradients of the tiny models of many architectures under tests/data/tiny.

    python make_arch_gradients.py TINY OUT.json

For each model: `loss`, the mean cross-entropy of predicting each next token of its recorded `input_ids`, and for each
parameter the norm of its gradient and its product with the vector `cos(0.7 i)`, i counting its elements, both in float64.
For mixtures of experts the loss includes BALANCE times transformers' load-balancing loss, which is recorded as `balance`.
All in float32 on CPU with eager attention.

transformers 5 holds the experts of a layer in two tensors; their gradients are split into the checkpoint's.

Needs torch 2.15, transformers 5.24, safetensors 0.8 (another version may round differently).
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

VARIANTS = [
    "arcee", "bitnet-relu2", "bitnet-silu", "exaone4", "gemma", "gemma2", "gemma3", "gpt-neox", "gpt-neox-serial", "gpt2",
    "apertus", "hunyuan", "mistral-window", "mixtral", "olmo", "olmo2", "phi", "phi3", "qwen2-moe", "qwen3-moe", "qwen3-qknorm", "starcoder2",
]
BALANCE = 0.1


def split_experts(name, grad, names):
    """Yields checkpoint names and gradients of a parameter."""
    for stored in [name, name.replace("lm_head", "embed_out"), name.replace(".mlp.", ".block_sparse_moe.")]:
        if stored in names:
            yield stored, grad
            return
    prefix, part = name.rsplit(".", 1)
    kinds = {"gate_up_proj": (["w1", "w3"], ["gate_proj", "up_proj"]), "down_proj": (["w2"], ["down_proj"])}[part]
    for expert, own in enumerate(grad):
        for options, piece in zip(zip(*kinds), own.chunk(len(kinds[0]))):
            found = [f"{prefix}.{expert}.{option}.weight" for option in options]
            found += [name.replace(".mlp.", ".block_sparse_moe.") for name in found]
            yield next(name for name in found if name in names), piece


def numbers(grad):
    flat = grad.double().flatten()
    along = torch.cos(0.7 * torch.arange(flat.numel(), dtype=torch.float64))
    return [flat.norm().item(), (flat @ along).item()]


def record(source: Path) -> dict:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    ids = load_file(source / "expected.safetensors")["input_ids"]
    with safe_open(source / "model.safetensors", "pt") as file:
        names = set(file.keys())
    mixed = getattr(model.config, "router_aux_loss_coef", None) is not None
    out = model(input_ids=ids, use_cache=False, **({"output_router_logits": True} if mixed else {}))
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found = {"loss": loss.item()}
    if mixed:
        found["balance"] = out.aux_loss.item()
        loss = loss + BALANCE * out.aux_loss
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        grads.update({name: numbers(piece) for name, piece in split_experts(name, grad, names)})
    # Constants of activations, which a checkpoint stores beside what is learned.
    grads.update({name: [0.0, 0.0] for name, _ in model.named_buffers() if name in names})
    assert set(grads) <= names, sorted(set(grads) - names)
    return {**found, "gradients": grads}


def main() -> None:
    tiny, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    found = {}
    for variant in VARIANTS:
        try:
            found[variant] = record(tiny / variant)
        except Exception as error:
            print(variant, repr(error)[:300])
            continue
        print(variant, found[variant]["loss"], found[variant].get("balance"))
    lines = []
    for variant, record_ in found.items():
        grads = ",\n".join(f'   {json.dumps(n)}: [{a:.8g}, {b:.8g}]' for n, (a, b) in record_["gradients"].items())
        rest = "".join(f'"{k}": {v!r}, ' for k, v in record_.items() if k != "gradients")
        lines.append(f' "{variant}": {{{rest}"gradients": {{\n{grads}}}}}')
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
