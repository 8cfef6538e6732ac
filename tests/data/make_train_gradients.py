#!/usr/bin/env python3
"""Records PyTorch's training steps of three models under tests/data/tiny: losses, gradients, updates.

    python make_train_gradients.py TINY OUT

One file per model, `OUT/<variant>.safetensors`: `loss` F64[4], the mean cross-entropy of predicting each next token of the
model's recorded `input_ids` before each of three AdamW steps and after the last; `grad.<parameter>`, the gradients of the
first loss; `after.<parameter>`, the parameters after the third step. All in float32 on CPU with eager attention.

AdamW decays every parameter, like `torch.optim.AdamW(model.parameters())`. Its eps is large: some gradients are 0 up to
rounding (a bias of the keys does not change the softmax), and with the usual eps the first steps would follow that rounding.

Needs torch 2.15, transformers 5.23, safetensors 0.8 (another version may round differently).
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

VARIANTS = ["llama1-mha", "llama2-gqa-tied", "qwen2-bias"]
ADAMW = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
STEPS = 3


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def record(source: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    ids = load_file(source / "expected.safetensors")["input_ids"]
    # A tied head is the embedding and listed once.
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), **ADAMW)
    losses, tensors = [], {}
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
    metadata = {"producer": f"torch {torch.__version__}", "adamw": json.dumps(ADAMW)}
    save_file(tensors, out / f"{source.name}.safetensors", metadata)
    print(source.name, losses)


def main() -> None:
    tiny, out = map(Path, sys.argv[1:])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        record(tiny / variant, out)


if __name__ == "__main__":
    main()
