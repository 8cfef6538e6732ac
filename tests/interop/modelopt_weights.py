#!/usr/bin/env python3
"""Decodes a ModelOpt folder (NVFP4, FP8) with the classes of nvidia-modelopt on the CPU, and compares with our decoder.

    python modelopt_weights.py DIR DENSE.safetensors

nvidia-modelopt writes its unified format but has no reader of such a folder: engines load it. Its classes of quantized tensors
(`NVFP4QTensor`, `FP8QTensor`) decode each weight from the tensors of the folder. The result must equal the tensor of that name in
DENSE.safetensors (`cargo run --profile ci -p mantissa-model --example dense -- DIR DENSE.safetensors`). Exit 1 if it does not.
Needs `pip install nvidia-modelopt==0.47.0 torch safetensors`.
"""

import json
import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file


def decode(tensors, module):
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if weight.dtype == torch.float8_e4m3fn:
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    packed = NVFP4QTensor((rows, columns), torch.float32, weight)
    outer = tensors[f"{module}.weight_scale_2"]
    return packed.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: columns // scale.shape[1]})


def main():
    folder, dense = Path(sys.argv[1]), load_file(sys.argv[2])
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    equal, worst = 0, 0.0
    for module in modules:
        found, expected = decode(tensors, module), dense[f"{module}.weight"].float()
        equal += bool(torch.equal(found, expected))
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    print(json.dumps({"modules": len(modules), "equal": equal, "largest_relative_difference": worst}))
    sys.exit(not modules or equal < len(modules))


if __name__ == "__main__":
    main()
