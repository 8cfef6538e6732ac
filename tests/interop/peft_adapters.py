#!/usr/bin/env python3
"""Adapters between mantissa and peft.

    python peft_adapters.py MANTISSA                     peft's adapters in the binary
    python peft_adapters.py MANTISSA MODEL ADAPTER       an adapter written by mantissa, in peft

First form: for every adapter under tests/data/peft, `mantissa eval --adapter --logits` computes the logits that
transformers and peft compute now, within 1e-4. Second form: peft loads ADAPTER on MODEL (a dense folder), and both
compute the same logits within 1e-3; all of peft's warnings about keys are errors. Exit 1 if they differ.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parent.parent / "data"


def ours(binary, model, adapter, ids):
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens.json", Path(folder) / "logits.safetensors"
        tokens.write_text(json.dumps(ids.tolist()))
        command = [binary, "eval", model, "--adapter", adapter, "--tokens", tokens, "--logits", out, "--quiet"]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        return load_file(out)["logits"]


def theirs(model, adapter, ids):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
        adapted = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        return adapted(input_ids=ids, use_cache=False).logits.float()


def main():
    binary, *rest = sys.argv[1:]
    if rest:
        cases, tolerance = [tuple(map(Path, rest))], 1e-3
    else:
        folders = sorted(path for path in (DATA / "peft").iterdir() if path.is_dir())
        base = lambda folder: json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        cases, tolerance = [(DATA / "tiny" / base(folder), folder) for folder in folders], 1e-4
    failed = False
    for model, adapter in cases:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        ids = torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))
        difference = (ours(binary, model, adapter, ids) - theirs(model, adapter, ids)).abs().max().item()
        failed |= not difference <= tolerance
        print(f"{adapter.name}: {difference:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
