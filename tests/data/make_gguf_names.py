#!/usr/bin/env python3
"""Records the tensor names and metadata keys of the `gguf` package (0.19.0, gguf-py of llama.cpp in llama-cpp-python 0.3.36) for the architectures of tests/data/tiny.

    python make_gguf_names.py tiny gguf_names.json

Per architecture of GGUF: `tensors`, every name that a file of it may have, and `names`, the name that the package's map gives
each module of the tiny models. `keys`: every metadata key of the package, with `{arch}` for the architecture.
"""

import json
import re
import sys
from pathlib import Path

import gguf
from safetensors import safe_open

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "seed_oss": "seed_oss",
    "arcee": "arcee", "exaone4": "exaone4", "starcoder2": "starcoder2", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi": "phi2", "phi3": "phi3", "olmo": "olmo", "olmo2": "olmo2",
    "gpt_neox": "gptneox", "bitnet": "bitnet", "gpt2": "gpt2", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss", "granite": "granite", "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe", "glm4": "glm4", "glm4_moe": "glm4moe", "cohere2": "cohere2", "olmo3": "olmo2",
    "ministral3": "mistral3", "minimax_m2": "minimax-m2", "exaone_moe": "exaone-moe", "llama4_text": "llama4",
    "glm4_moe_lite": "deepseek2", "gemma4_text": "gemma4", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "jamba": "jamba", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h", "deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa", "cohere2_moe": "cohere2moe",
    "gemma3n_text": "gemma3n", "kimi_linear": "kimi-linear", "deepseek_v4": "deepseek4", "hunyuan_v1_dense": "hunyuan-dense",
    "mamba2": "mamba2", "apertus": "apertus",
}

EXPERTS = r"\.experts\.|block_sparse_moe\.(in|out)put_linear"


def modules(model):
    """Returns the modules of a model, with {bid} for the layer; experts are one tensor in GGUF and left out."""
    with safe_open(model / "model.safetensors", "numpy") as file:
        names = {re.sub(r"\.(weight|bias)$", "", name) for name in file.keys()}
    return {re.sub(r"\.(\d+)\.", ".{bid}.", name, count=1) for name in names if not re.search(EXPERTS, name)}


def keys(holder):
    """Returns every key below a class of constants."""
    found = set()
    for name, value in vars(holder).items():
        if isinstance(value, type):
            found |= keys(value)
        elif isinstance(value, str) and not name.startswith("__"):
            found.add(value)
    return found


def main():
    tiny, out = Path(sys.argv[1]), Path(sys.argv[2])
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    found = {}
    for model in sorted(path.parent for path in tiny.glob("*/model.safetensors")):
        config = json.loads((model / "config.json").read_text())
        name = ARCHITECTURES.get(config["model_type"])
        if name == "nemotron_h" and "moe" in config.get("layers_block_type", []):
            name = "nemotron_h_moe"
        if name is None:
            continue
        names = gguf.get_tensor_name_map(by_name[name], 1)
        row = found.setdefault(name, {"tensors": [], "names": {}})
        row["tensors"] = sorted(gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[by_name[name]])
        for module in modules(model):
            mapped = names.get_name(module.replace("{bid}", "0"))
            if mapped:
                row["names"][module] = mapped.replace("blk.0.", "blk.{bid}.")
    for row in found.values():
        row["names"] = dict(sorted(row["names"].items()))
    record = {"producer": "gguf 0.19.0", "keys": sorted(keys(gguf.Keys)), "architectures": dict(sorted(found.items()))}
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
