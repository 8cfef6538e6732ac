#!/usr/bin/env python3
"""Records run-time activation quantization by the compressed_tensors package, by scheme.

    python make_activation_golden.py DATA_DIR

Reads DATA_DIR/golden/mx_formats.safetensors (its `x`, seeded rows of many kinds) and writes
DATA_DIR/activation_fake_quant.safetensors:

  x                    F32[R,64]  the rows for which every scheme below is finite
  input_global_scale   F32[1]     of NVFP4: 2688 / 12.5, so that some blocks saturate their E4M3 scale
  SCHEME.y             F32[R,64]  x after the package's fake quantization (quantize, dequantize, float32 throughout)

SCHEME is int8_token, fp8_token, mxfp4, mxfp8 or nvfp4; `schemes` in the metadata holds the JSON of each, as in
a checkpoint's `input_activations`. The output is bit-exact reference data, except that zeros compare by value.

Needs compressed-tensors 0.20 and torch.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file, save_file

SCHEMES = {
    "int8_token": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    "fp8_token": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "mxfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
              "dynamic": True, "scale_dtype": "torch.uint8"},
    "mxfp8": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
              "dynamic": True, "scale_dtype": "torch.uint8"},
    "nvfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
              "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
}
GLOBAL_SCALE = 2688.0 / 12.5


def main(data):
    x = load_file(data / "golden" / "mx_formats.safetensors")["x"]
    outputs = {name: fake_quantize(x, args) for name, args in SCHEMES.items()}
    finite = torch.stack([y.isfinite().all(dim=1) for y in outputs.values()]).all(dim=0)
    assert finite.sum() >= len(x) - 2, "only the rows next to the largest float32 may overflow a scale"
    check(x[finite], {name: y[finite] for name, y in outputs.items()})
    save_file(
        {"x": x[finite], "input_global_scale": torch.tensor([GLOBAL_SCALE]), **{f"{name}.y": y[finite] for name, y in outputs.items()}},
        data / "activation_fake_quant.safetensors",
        metadata={"schemes": json.dumps(SCHEMES, sort_keys=True)},
    )


def fake_quantize(x, args):
    """Quantizes like a Linear of the package: on [batch, position, hidden], with the module's stored global scale."""
    arguments = QuantizationArgs.model_validate(args)
    module = torch.nn.Linear(x.shape[1], 1, bias=False)
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=arguments)
    module.quantization_status = QuantizationStatus.DECOMPRESSED
    if args["strategy"] == "tensor_group":
        module.input_global_scale = torch.nn.Parameter(torch.tensor([GLOBAL_SCALE]), requires_grad=False)
    return forward_quantize(module, x[None], "input", arguments)[0].contiguous()


def check(x, outputs):
    """Checks int8 against its formula, and that every scheme changes some values and keeps zeros and magnitudes."""
    scale = x.abs().amax(1, keepdim=True) / 127.5
    scale[scale == 0] = torch.finfo(torch.float32).eps
    assert torch.equal((x / scale).clamp(-128, 127).round() * scale, outputs["int8_token"])
    for name, y in outputs.items():
        assert y.dtype == torch.float32 and not torch.equal(x, y), name
        assert (y[x == 0] == 0).all(), name
    saturated = outputs["nvfp4"].abs().amax(1) < 0.9 * x.abs().amax(1)
    assert saturated.any(), "some block must exceed what the global scale allows"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
