#!/usr/bin/env python3
"""Writes one module as stored by hqq and optimum-quanto, with the weight that the package decodes.

    python make_package_conventions.py conventions    (ninja on PATH; hqq 0.2.8.post1, optimum-quanto 0.2.7, torch 2.15, on the CPU)

Folders have the form of make_conventions.py: `config.json` (and quanto's `quanto_qmap.json`) and `model.safetensors` with the tensors of
the module `model.layers.0.mlp.up_proj` as the package serializes them, `expected_rows` and `expected`, those rows of the
weight decoded by its own `dequantize` in float32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MODULE = "model.layers.0.mlp.up_proj"
ROWS = (0, 5, 15)
SHAPE = (32, 96)
WIDE = (16, 256)  # quanto has groups in rows of more than 128


def main():
    out = Path(sys.argv[1])
    for bits in (8, 4, 3, 2, 1):
        hqq(out / f"hqq-int{bits}", bits, 32, 1)
    hqq(out / "hqq-int4-channel", 4, None, 1)
    hqq(out / "hqq-int4-axis0", 4, 32, 0)
    hqq(out / "hqq-int3-axis0", 3, 64, 0)
    for name in ("qint2", "qint4", "qint8", "qfloat8_e4m3fn"):
        quanto(out / f"quanto-{name.split('_')[0]}", name, SHAPE)
    quanto(out / "quanto-qint4-g128", "qint4", WIDE)


def linear(shape=SHAPE):
    torch.manual_seed(1)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    layer.weight.data = torch.randn(shape) * 0.05
    return layer


def hqq(folder, bits, group, axis):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    layer = HQQLinear(linear(), config, compute_dtype=torch.float32, device="cpu")
    weight = layer.dequantize().float()
    # Same as transformers' `HqqConfig.to_dict`.
    quantization = {"quant_config": config, "quant_method": "hqq", "skip_modules": ["lm_head"]}
    write(folder, {"quantization_config": quantization}, layer.state_dict(), weight)


def quanto(folder, name, shape):
    import optimum.quanto as q

    model = torch.nn.ModuleDict({"up_proj": linear(shape)})
    q.quantize(model, weights=q.qtypes[name])
    q.freeze(model)
    weight = model["up_proj"].weight.dequantize().float()
    tensors = {key.removeprefix("up_proj."): value for key, value in model.state_dict().items()}
    write(folder, {}, tensors, weight)
    qmap = {f"{MODULE}{key.removeprefix('up_proj')}": value for key, value in q.quantization_map(model).items()}
    (folder / "quanto_qmap.json").write_text(json.dumps(qmap, indent=4))


def write(folder, config, tensors, weight):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config) + "\n")
    everything = {f"{MODULE}.{name}": tensor.detach().contiguous() for name, tensor in tensors.items() if tensor is not None}
    everything["expected_rows"] = torch.tensor(ROWS, dtype=torch.int32)
    everything["expected"] = weight[list(ROWS)].contiguous()
    save_file(everything, folder / "model.safetensors", metadata={"shape": str(list(weight.shape))})


if __name__ == "__main__":
    main()
