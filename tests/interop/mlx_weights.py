#!/usr/bin/env python3
"""Decodes an MLX folder with the mlx package on the CPU, and compares with our decoder.

    python mlx_weights.py DIR DENSE.safetensors

`mlx.core.dequantize` decodes each weight from the tensors of the folder with the module's group size, bits and mode from the config, like
`mlx.nn.QuantizedLinear`. The result must agree with the tensor of that name in DENSE.safetensors (`cargo run --release -p mantissa-model
--example dense -- DIR DENSE.safetensors`) within the rounding of one product and one sum. Exit 1 if it does not.
Needs `pip install mlx==0.32.4 mlx-cpu==0.32.4` (Linux on x86-64) and numpy.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file


def main():
    folder, dense = Path(sys.argv[1]), load_file(sys.argv[2])
    mx.set_default_device(mx.cpu)
    config = json.loads((folder / "config.json").read_text())["quantization"]
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(mx.load(str(file)))
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    equal, worst = 0, 0.0
    for module in modules:
        how = config.get(module, config)
        parts = [tensors[f"{module}.weight"], tensors[f"{module}.scales"]]
        if how.get("mode", "affine") == "affine":
            parts.append(tensors[f"{module}.biases"])
        weight = mx.dequantize(*parts, group_size=how["group_size"], bits=how["bits"], mode=how.get("mode", "affine"))
        found, expected = np.array(weight.astype(mx.float32)), dense[f"{module}.weight"]
        equal += bool(np.array_equal(found, expected))
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    print(json.dumps({"mode": config.get("mode"), "modules": len(modules), "equal": equal, "largest_relative_difference": worst}))
    sys.exit(not modules or worst > 2e-7)


if __name__ == "__main__":
    main()
