#!/usr/bin/env python3
"""Runs a GPTQ or AWQ checkpoint with the weights that GPTQModel decodes; writes the logits.

    python integer_logits.py ARTIFACT_DIR [--tokens FILE.json:KEY] [--windows N] --out logits.safetensors

GPTQModel loads the directory on the CPU, as for inference. Each quantized layer decodes its own weight, with
the scales widened to float32 first so that the product is not rounded to float16. Those weights run in a dense float32 model of transformers.
Output and options are those of compressed_tensors_logits.py.
"""

import argparse
import json
import os
from pathlib import Path

# GPTQModel compiles its decoder for scales in float16.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

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
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, **LOADING)
    weights = {f"{name}.weight": weight for name, weight in decoded(artifact)}
    parts = ("qweight", "qzeros", "scales", "g_idx")
    rest = {name: tensor for name, tensor in read_tensors(artifact).items() if name.rsplit(".", 1)[1] not in parts}
    model.load_state_dict({**weights, **{name: tensor.float() for name, tensor in rest.items()}}, strict=False)
    left = set(dict(model.named_parameters())) - set(weights) - set(rest)
    assert left <= {"lm_head.weight"} and (not left or config.tie_word_embeddings), f"the checkpoint lacks {left}"
    return model


def decoded(artifact):
    """Names and float32 weights [out, in] of the layers that GPTQModel finds quantized."""
    from gptqmodel import BACKEND, GPTQModel

    # In bfloat16, the dtype of many models, the stored f16 scales would be rounded.
    loaded = GPTQModel.load(str(artifact), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
    for name, module in loaded.named_modules():
        if hasattr(module, "qweight"):
            module.scales.data = module.scales.data.float()
            yield name, decode(module).float().T.contiguous()


def decode(module):
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)


if __name__ == "__main__":
    main()
