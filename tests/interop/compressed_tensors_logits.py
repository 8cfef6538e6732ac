#!/usr/bin/env python3
"""Runs a compressed-tensors checkpoint with transformers and the compressed_tensors package; writes its logits.

    python compressed_tensors_logits.py ARTIFACT_DIR [--tokens FILE.json:KEY] [--windows N] --out logits.safetensors

Writes `logits` F32[W,T,V] and `input_ids` I64[W,T], computed on CPU in float32 with eager attention, and prints the
perplexity over the windows (position t predicts t+1). Only the installed packages decode weights and
quantize activations. `--via` chooses the path (README.md states when each one is needed):

  transformers  from_pretrained; weights are decompressed at the first forward, activations quantized as configured
  dequantize    from_pretrained with CompressedTensorsConfig(dequantize=True): weights only, no activation quantization
  package       the float32 decode of compressed_tensors put into a dense model, its forward for the activations
  auto          (default) transformers where it can run the checkpoint in float32 and exactly, else one of the others
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

LOADING = {"dtype": torch.float32, "attn_implementation": "eager"}
FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
# Formats the package decodes to bfloat16: NVFP4 loses bits there, the others do not.
BF16_FORMATS = (*FP4_FORMATS, "mxfp6-pack-quantized", "mxfp8-quantized")


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    scheme = QuantizationConfig.model_validate(read_json(args.artifact / "config.json")["quantization_config"])
    via = choose_path(scheme) if args.via == "auto" else args.via
    model = {"transformers": load_transformers, "dequantize": load_dequantized, "package": load_with_package}[via](args.artifact)
    if args.no_activation_quantization:
        disable_quantization(model)
    input_ids = read_tokens(args.tokens, args.windows, model.config.vocab_size)
    logits = run(model.eval(), input_ids, args.batch)
    save_file({"logits": logits, "input_ids": input_ids}, args.out)
    print(json.dumps({
        "artifact": args.artifact.name,
        "via": via,
        "activation_quantization": sum(quantizes_input(module) for module in model.modules()),
        "windows": len(input_ids),
        "perplexity": perplexity(logits, input_ids),
    }))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", help="FILE.json:KEY, token windows [W][T]; without it, windows of a fixed pattern")
    parser.add_argument("--windows", type=int, default=4, help="use the first N windows (default 4)")
    parser.add_argument("--batch", type=int, default=4, help="windows per forward (default 4)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--via", choices=("auto", "transformers", "dequantize", "package"), default="auto")
    parser.add_argument("--no-activation-quantization", action="store_true", help="run decoded weights on plain float32 activations")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


# --- three ways to load ---


def choose_path(config):
    groups = config.config_groups.values()
    formats = {group.format or config.format for group in groups}
    if formats & set(BF16_FORMATS):
        # A float32 forward refuses the bfloat16 weights.
        return "package"
    if any(group.weights is not None and not group.weights.symmetric for group in groups):
        # transformers expects the zero points of a packed checkpoint unpacked, and fails on their shape.
        return "package" if any(group.input_activations for group in groups) else "dequantize"
    return "transformers"


def load_transformers(artifact):
    return AutoModelForCausalLM.from_pretrained(artifact, **LOADING)


def load_dequantized(artifact):
    # `run_compressed=False` is the deprecated spelling of the same.
    return AutoModelForCausalLM.from_pretrained(artifact, quantization_config=CompressedTensorsConfig(dequantize=True), **LOADING)


def load_with_package(artifact):
    config = AutoConfig.from_pretrained(artifact)
    quantization = QuantizationConfig.model_validate(config.quantization_config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, **LOADING)
    stored = read_tensors(artifact)
    # For the package's forward, status "compressed" means that the weight is decoded already and only the input is quantized.
    apply_quantization_config(model, quantization, show_progress=False)
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            fill_quantized(module, take(stored, name), quantization)
    load_dense(model, stored)
    return model


def fill_quantized(module, state, quantization):
    scheme = module.quantization_scheme
    fmt = scheme.format or quantization.format or infer_module_format(type(module), scheme)
    with torch.no_grad():
        weight = decode(state, scheme, str(getattr(fmt, "value", fmt)))
        assert weight.shape == module.weight.shape and weight.dtype == torch.float32
        module.weight.copy_(weight)
        if module.bias is not None:
            module.bias.copy_(state["bias"])
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name.startswith(("input_", "output_")):
                parameter.copy_(state[name])
            elif name.startswith("weight_"):
                delattr(module, name)


def decode(state, scheme, fmt):
    """Weight in float32, by the package's own unpacking and dequantization."""
    if fmt in FP4_FORMATS:
        rows, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32)
        scale = state["weight_scale"]
        scale = decompress_mx_scale(scale) if fmt.startswith("mx") else scale
        return dequantize(codes, scale.float(), args=scheme.weights, dtype=torch.float32,
                          global_scale=state.get("weight_global_scale"))
    if fmt not in BF16_FORMATS:
        state = {**state, "weight_scale": state["weight_scale"].float()}
    return BaseCompressor.get_value_from_registry(fmt).decompress(state, scheme)["weight"].float()


def load_dense(model, stored):
    """Tensors without a scheme: embeddings, norms, ignored modules."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in stored.items():
            parameters.pop(name).copy_(tensor)
    quantized = [name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")]
    left = [name for name in parameters if name.rsplit(".", 1)[0] not in quantized]
    assert not left, f"the checkpoint lacks {left}"


# --- running ---


def run(model, input_ids, batch):
    with torch.no_grad():
        parts = [model(part, use_cache=False).logits.float() for part in input_ids.split(batch)]
    return torch.cat(parts).contiguous()


def perplexity(logits, input_ids):
    log_probabilities = logits[:, :-1].log_softmax(-1)
    nll = -log_probabilities.gather(-1, input_ids[:, 1:, None]).double()
    return math.exp(nll.mean().item())


def quantizes_input(module):
    scheme = getattr(module, "quantization_scheme", None)
    return scheme is not None and scheme.input_activations is not None and getattr(module, "quantization_enabled", True)


def disable_quantization(model):
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False


# --- files ---


def read_tokens(spec, windows, vocab_size):
    if spec is None:
        return (torch.arange(windows * 64).reshape(windows, 64) * 7919 + 13) % vocab_size
    path, key = spec.rsplit(":", 1)
    return torch.tensor(read_json(path)[key][:windows], dtype=torch.int64)


def read_json(path):
    return json.loads(Path(path).read_text())


def read_tensors(artifact):
    index = artifact / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    return {key: tensor for name in names for key, tensor in load_file(artifact / name).items()}


def take(stored, module_name):
    """Removes and returns the tensors of one module, by their local names."""
    prefix = f"{module_name}."
    names = [name for name in stored if name.startswith(prefix) and "." not in name[len(prefix):]]
    return {name[len(prefix):]: stored.pop(name) for name in names}


if __name__ == "__main__":
    main()
