#!/usr/bin/env python3
"""Records the steps that peft and PyTorch take with adapters on models under tests/data/tiny.

    python make_lora_gradients.py TINY OUT

One file per case, `OUT/<case>.safetensors`: `init.<tensor>`, the adapter's tensors (B and the magnitudes are random too, so
that no gradient is 0); `loss` F64[4], the mean cross-entropy of predicting each next token of the model's recorded
`input_ids` before each of three AdamW steps and after the last; `grad.<tensor>`, the gradients of the first loss;
`after.<tensor>`, the tensors after the third step; `merged.<module>`, the weights that peft merges then. Tensors have the
names of peft's files. All in float32 on CPU with eager attention.

Needs torch 2.15, transformers 5.24, peft 0.21, safetensors 0.8 (another version may round differently).
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CASES = {
    "lora": ("llama1-mha", dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])),
    "dora": ("llama2-gqa-tied", dict(r=2, lora_alpha=8, use_rslora=True, use_dora=True, target_modules="all-linear")),
}
ADAMW = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
STEPS = 3


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def in_file(name: str) -> str:
    return name.replace(".default.weight", ".weight").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def record(case: str, source: Path, settings: dict, out: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    ids = load_file(source / "expected.safetensors")["input_ids"]
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    parameters = {in_file(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in parameters.items():
            noise = torch.randn(p.shape)
            p.copy_(p * (1 + 0.1 * noise) if "magnitude" in name else 0.2 * noise)
    tensors = {f"init.{name}": p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), **ADAMW)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            tensors.update({f"grad.{name}": p.grad.clone() for name, p in parameters.items()})
        optimizer.step()
    with torch.no_grad():
        losses.append(loss_of(model, ids).item())
    tensors.update({f"after.{name}": p.detach().clone() for name, p in parameters.items()})
    tensors["loss"] = torch.tensor(losses, dtype=torch.float64)
    merged = model.merge_and_unload()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        tensors[f"merged.{name}"] = merged.get_submodule(name).weight.detach().clone()
    import peft

    metadata = {"producer": f"torch {torch.__version__}, peft {peft.__version__}", "adamw": json.dumps(ADAMW)}
    save_file(tensors, out / f"{case}.safetensors", metadata)
    print(case, losses)


def main() -> None:
    tiny, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for case, (model, settings) in CASES.items():
        torch.manual_seed(0)
        record(case, tiny / model, settings, out)


if __name__ == "__main__":
    main()
