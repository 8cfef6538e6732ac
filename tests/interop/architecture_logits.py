#!/usr/bin/env python3
"""Compares the logits of every tiny model, computed by transformers, with those of the binary.

    python architecture_logits.py MANTISSA [MODEL_DIR…] [--tol 1e-4]

Without directories: all under tests/data/tiny. Both run the recorded input_ids in float32, eager attention. Prints the
largest difference of each model; exit code 1 if one exceeds the tolerance or is not finite.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def ours(binary, model, input_ids):
    with tempfile.TemporaryDirectory() as folder:
        windows, out = Path(folder) / "windows.json", Path(folder) / "logits.safetensors"
        windows.write_text(json.dumps(input_ids.tolist()))
        command = [binary, "eval", model, "--tokens", windows, "--overwrite", "--logits", out, "--quiet", "--json"]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        with safe_open(out, "pt") as file:
            return file.get_tensor("logits")


def theirs(model, input_ids):
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return loaded.eval()(input_ids, use_cache=False).logits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa", type=Path)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--tol", type=float, default=1e-4)
    args = parser.parse_args()
    worst = 0.0
    for model in args.models or sorted(path for path in TINY.iterdir() if path.is_dir()):
        with safe_open(model / "expected.safetensors", "pt") as file:
            input_ids = file.get_tensor("input_ids")
        difference = (ours(args.mantissa, model, input_ids) - theirs(model, input_ids)).abs().max().item()
        print(f"{model.name:32} {difference:.1e}")
        # A comparison with NaN is false.
        worst = difference if not difference <= worst else worst
    sys.exit(0 if worst <= args.tol else 1)


if __name__ == "__main__":
    main()
