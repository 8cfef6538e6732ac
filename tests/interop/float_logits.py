#!/usr/bin/env python3
"""Runs a bitsandbytes or FP8 checkpoint with the weights that bitsandbytes or transformers decode; writes the logits.

    python float_logits.py ARTIFACT_DIR [--tokens FILE.json:KEY] [--windows N] --out logits.safetensors

bitsandbytes: the package builds each layer's QuantState from the stored tensors and decodes it with its own CPU code
(the portable 4-bit code, `int8_vectorwise_dequant`). FP8 (`quant_method: "fp8"`): transformers loads the directory with
`dequantize=True`. The weights run in a dense float32 model, inputs unquantized. Output and options are those of
compressed_tensors_logits.py; needs `pip install bitsandbytes==0.50.2 accelerate` beside it.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from compressed_tensors_logits import LOADING, perplexity, read_tensors, read_tokens, run


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.artifact)
    input_ids = read_tokens(args.tokens, args.windows, model.config.vocab_size)
    logits = run(model.eval(), input_ids, args.batch)
    save_file({"logits": logits, "input_ids": input_ids}, args.out)
    print(json.dumps({"artifact": args.artifact.name, "windows": len(input_ids), "perplexity": perplexity(logits, input_ids)}))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", help="FILE.json:KEY, token windows [W][T]; without it, windows of a fixed pattern")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def load(artifact):
    config = AutoConfig.from_pretrained(artifact)
    if config.quantization_config["quant_method"] == "fp8":
        kept = config.quantization_config.get("modules_to_not_convert")
        block = tuple(config.quantization_config["weight_block_size"])
        how = FineGrainedFP8Config(dequantize=True, weight_block_size=block, modules_to_not_convert=kept)
        return AutoModelForCausalLM.from_pretrained(artifact, quantization_config=how, **LOADING).float()
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, **LOADING)
    stored = decoded(read_tensors(artifact))
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()}, strict=False)
    left = set(dict(model.named_parameters())) - set(stored)
    assert left <= {"lm_head.weight"} and (not left or config.tie_word_embeddings), f"the checkpoint lacks {left}"
    return model


def decoded(stored):
    """Decodes every weight to float32 with the package's own reader and decoder."""
    from bitsandbytes import functional

    weights = {}
    for name, tensor in stored.items():
        if not name.endswith(".weight"):
            if name.rsplit(".", 1)[1] == "bias":
                weights[name] = tensor
            continue
        state = {key: value for key, value in stored.items() if key.startswith(f"{name}.")}
        module = name.removesuffix(".weight")
        if state:
            weights[name] = four_bits(tensor, functional.QuantState.from_dict(state, device=torch.device("cpu")))
        elif f"{module}.SCB" in stored:
            weights[name] = functional.int8_vectorwise_dequant(tensor, stored[f"{module}.SCB"]).float()
        else:
            weights[name] = tensor
    return weights


def four_bits(codes, state):
    """Decodes with the package's portable code: its CPU kernel assumes rows of whole blocks, and is wrong for others."""
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(codes.reshape(-1), absmax, state.code, state.blocksize, state.shape, torch.float32)


if __name__ == "__main__":
    main()
