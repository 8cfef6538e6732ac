#!/usr/bin/env python3
"""Makes the adapters under tests/data/peft with peft, and the logits that transformers and peft compute with them.

    python make_peft.py OUT [NAME…]

One folder per adapter: the files of `save_pretrained`, and `expected.safetensors` with `input_ids` I64[1,T] and `logits`
F32[1,T,V] (float32, whole sequence, no cache). The base is a tiny model of tests/data/tiny, named in `BASES`. All
weights of the adapter are random, so every part changes the logits: the script refuses an adapter that changes them by
less than 100 times the tests' tolerance (1e-4), and one whose feature, taken away, leaves them as they are.

Needs torch 2.15, transformers 5.24, peft 0.18, safetensors 0.8 (other versions may draw other random numbers).
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
TOKENS = 24
TINY = Path(__file__).parent / "tiny"
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Name: (base, settings, settings without which the logits must differ)
ADAPTERS = {
    "lora": ("llama2-gqa-tied", dict(r=4, lora_alpha=8, target_modules=LLAMA), dict(lora_alpha=4)),
    "dora": ("mqa", dict(r=2, lora_alpha=4, use_dora=True, target_modules=LLAMA), dict(lora_alpha=2)),
    "patterns": (
        "llama1-mha",
        dict(
            r=4,
            lora_alpha=6,
            use_rslora=True,
            target_modules=["q_proj", "v_proj", "down_proj", "lm_head"],
            rank_pattern={"down_proj": 2, "^model.layers.1.self_attn.q_proj": 3},
            alpha_pattern={r"layers\.1\..*v_proj": 9},
        ),
        dict(use_rslora=False),
    ),
    "dora-bias": ("qwen2-bias", dict(r=2, lora_alpha=3, use_dora=True, target_modules=["q_proj", "v_proj", "up_proj"], bias="all"), dict(lora_alpha=2)),
    "fused": ("phi3", dict(r=3, lora_alpha=6, target_modules=["qkv_proj", "gate_up_proj", "down_proj"]), dict(lora_alpha=3)),
    "conv1d": ("gpt2", dict(r=2, lora_alpha=4, use_dora=True, fan_in_fan_out=True, target_modules=["c_attn", "c_fc"]), dict(lora_alpha=2)),
    "saved": (
        "smollm3",
        dict(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
        dict(lora_alpha=2),
    ),
}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def randomize(model, seed):
    """Gives every trainable weight random values of a size that changes the logits; magnitudes stay near the norms."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.requires_grad:
            noise = torch.randn(weight.shape, generator=generator)
            with torch.no_grad():
                if "magnitude" in name:
                    weight.mul_(1 + 0.3 * noise)
                elif "lora_" in name:
                    weight.copy_(0.3 * noise)
                else:
                    weight.add_(0.1 * noise)


def make(name, out, seed):
    base_name, settings, without = ADAPTERS[name]
    load = lambda: AutoModelForCausalLM.from_pretrained(TINY / base_name, dtype=torch.float32).eval()
    base = load()
    ids = torch.randint(base.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    plain = logits(base, ids)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    randomize(model, seed)
    expected = logits(model, ids)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    # Sets are written in an order that changes from run to run.
    config["target_modules"] = sorted(config["target_modules"])
    config["base_model_name_or_path"] = base_name
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    again = logits(PeftModel.from_pretrained(load(), folder).eval(), ids)
    assert torch.equal(again, expected), f"{name}: does not load as it was saved"
    changed = folder.with_name(name + "-without")
    shutil.copytree(folder, changed)
    (changed / "adapter_config.json").write_text(json.dumps(config | without))
    other = logits(PeftModel.from_pretrained(load(), changed).eval(), ids)
    shutil.rmtree(changed)
    for what, found in [("the adapter", plain), (str(without), other)]:
        difference = (found - expected).abs().max().item()
        assert difference > 100 * TOLERANCE, f"{name}: {what} changes the logits by {difference} only"
    save_file({"input_ids": ids, "logits": expected}, folder / "expected.safetensors")
    print(name, "made from", base_name)


def main():
    out = Path(sys.argv[1])
    for seed, name in enumerate(ADAPTERS):
        if not sys.argv[2:] or name in sys.argv[2:]:
            make(name, out, seed)


if __name__ == "__main__":
    main()
