#!/usr/bin/env python3
"""KL of a model whose norm weights alone are rounded, a scale per tensor.

    bench/norms.py BINARY MODEL WORK_FOLDER

Needs torch and safetensors.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file


def e4m3(x):
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def integer(bits):
    largest = 2 ** (bits - 1) - 1

    def rounded(x):
        scale = x.abs().max() / largest
        return (x / scale).round().clamp(-largest, largest) * scale

    return rounded


def main(binary, model, work):
    model, work = pathlib.Path(model), pathlib.Path(work)
    for name, rounded in [("int8", integer(8)), ("int6", integer(6)), ("e4m3", e4m3), ("int4", integer(4))]:
        out = work / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for path in model.iterdir():
            if path.suffix == ".json":
                shutil.copy(path, out)
            elif path.suffix == ".safetensors":
                tensors = load_file(path)
                for key, value in tensors.items():
                    if "norm" in key:
                        tensors[key] = rounded(value.float())
                save_file(tensors, out / path.name, metadata={"format": "pt"})
        command = [binary, "eval", out, "--reference", model, "--text", "default", "--limit", "4096", "--context", "256", "--json", "--quiet"]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {name} | {figures['kl']:.2e} ± {figures['kl_se']:.1e} | {figures['top1']:.4f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
