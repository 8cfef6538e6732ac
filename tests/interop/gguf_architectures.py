#!/usr/bin/env python3
"""Compares GGUF files of every architecture with their source and with llama.cpp.

    python gguf_architectures.py MANTISSA [NAME…] [--recipe rtn-f32] [--work DIR] [--llama-tol 0.005]

Each tiny model of tests/data/tiny, with features that llama.cpp lacks changed in its config, is written as a GGUF file,
verified and run: by the binary, whose logits must equal the source's bit for bit under rtn-f32, and by llama.cpp
(llama-cpp-python, keys and values in f32). Exit code 1 if logits differ more than that, or a file does not load.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import NormalDist

import numpy as np
from safetensors.numpy import load_file, save_file

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
EPSILON = {"rms_norm_eps": 1e-6}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
# Layers of the tiny model that are the layers of the model, where llama.cpp requires others.
LAYERS = {"llama4": [1, 0, 1, 2], "exaone-moe": [1, 0, 2], "glm4-moe-lite": [1, 0, 2]}
# Models with rates of decay.
DECAYING = ["qwen3-next-square", "qwen3-5-square", "qwen3-5-moe-square", "granite-hybrid", "jamba-wide", "falcon-h1", "nemotron-h",
            "granite-hybrid-moe", "nemotron-h-moe", "nemotron-h-latent", "kimi-linear", "mamba2"]
# Largest difference of llama.cpp's logits where it is larger. In Gemma 4 embeddings of layers pass a GELU, from llama.cpp's
# table in f16, after the MLP's: without both 2.2e-6 are left.
TOLERANCE = {"gemma4": 0.02, "gemma3n": 0.02}
# Tokens of a window, if not 24: so many that entries of 128 tokens are attended to.
LENGTHS = {"deepseek4": 280}
# Changes of the config; {} if llama.cpp supports the whole model.
MODELS = {
    "llama3-rope": {},
    "llama-yarn": {},
    "mixtral": {},
    "qwen2-bias": {},
    "qwen2-moe": {"num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": ["full_attention"]},
    "qwen3-qknorm": {},
    "qwen3-moe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3": {"query_pre_attn_scalar": 12},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phi3-longrope": {},
    "olmo": {},
    "olmo2": {},
    "gpt-neox": {},
    "gpt-neox-serial": {"hidden_act": "gelu"},
    "bitnet-silu": {},
    "gpt2": {},
    "smollm3": {"no_rope_layers": [1, 1]},
    # llama.cpp does not rotate the last of each four layers.
    "smollm3-nope": {"num_hidden_layers": 4, "layer_types": None, "no_rope_layers": [1, 1, 1, 0]},
    "seed-oss": {},
    "arcee": {},
    # llama.cpp has windows in the model of 64 layers only, and rotates every layer of the others.
    "exaone4": {"sliding_window": None, "layer_types": None},
    "exaone4-windows": {
        "num_hidden_layers": 64,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    },
    "starcoder2": {"sliding_window": None},
    # 27 layers, otherwise llama.cpp expects a query latent.
    "deepseek-v2": {"topk_method": "greedy", "num_hidden_layers": 27, **EPSILON},
    "deepseek-v3": EPSILON,
    "kimi-k2": EPSILON,
    "granite": {},
    "ernie4-5": {"use_bias": False},
    "ernie4-5-moe": {"num_hidden_layers": 2},
    "glm4": {},
    "glm4-moe": {},
    "minimax-m2": {},
    "cohere2": {},
    "olmo3": {},
    "ministral3": {},
    "exaone-moe": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], **DENSE_FIRST},
    "glm4-moe-lite": {**DENSE_FIRST, **EPSILON},
    # llama.cpp fixes chunks, growth of queries and layers without position embedding.
    "llama4": {
        "num_hidden_layers": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "gemma4": {},
    "gemma4-keys-are-values": {},
    "gemma4-moe": {},
    "qwen3-next-square": {},
    "qwen3-5-square": {},
    "qwen3-5-moe-square": {},
    "lfm2": {"conv_bias": False},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    # llama.cpp has no limits of time steps, and no biases of the projections.
    "granite-hybrid": {"time_step_limit": [0.0, {"__float__": "Infinity"}], "mamba_proj_bias": False},
    "jamba-wide": {},
    "falcon-h1": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "nemotron-h": {"time_step_min": 0.001},
    "granite-hybrid-moe": {},
    "cohere2-moe": {},
    # llama.cpp rotates index keys in blocks of 64.
    "deepseek-v32-sparse": {"index_head_dim": 64, **EPSILON},
    "glm-moe-dsa-sparse": {"index_head_dim": 64, **EPSILON},
    "nemotron-h-moe": {},
    "nemotron-h-latent": {},
    "hunyuan": {},
    "mamba2": {},
    "apertus": {},
    # A RoPE base for which the ends of YaRN's ramp are integers: llama.cpp rounds them, gpt-oss does not.
    "gpt-oss": {
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.7,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
}


def renamed(tensors, name):
    """Returns the tensors of a model with other layers than the tiny one."""
    if name == "qwen2-moe":
        # The first layer has no experts.
        return {k.replace("layers.1.", "layers.0."): v for k, v in tensors.items() if "layers.0." not in k}
    if name in LAYERS:
        of_layer = [(f"layers.{old}.", f"layers.{new}.") for new, old in enumerate(LAYERS[name])]
        kept = {k: v for k, v in tensors.items() if "layers." not in k}
        return kept | {k.replace(old, new): v for old, new in of_layer for k, v in tensors.items() if old in k}
    if "index_head_dim" in MODELS[name]:
        return tensors | {k: wider(k, v) for k, v in tensors.items() if ".indexer." in k and "weights_proj" not in k}
    layers = MODELS[name].get("num_hidden_layers", 0)
    if name in ("ernie4-5", "lfm2"):
        return {k: v for k, v in tensors.items() if not k.endswith("bias")}
    if name == "granite-hybrid":
        return {k: v for k, v in tensors.items() if not k.endswith("_proj.bias")}
    if name == "ernie4-5-moe":
        return {k: v for k, v in tensors.items() if "layers.2." not in k}
    return tensors | {
        k.replace("layers.1.", f"layers.{layer}."): v
        for k, v in tensors.items()
        for layer in range(2, layers)
        if "layers.1." in k
    }


def wider(name, tensor):
    """Returns random weights of an indexer of heads of 64 instead of 8."""
    shape = (8 * tensor.shape[0], *tensor.shape[1:])
    values = np.random.default_rng(len(name) + shape[0]).normal(0.0, 0.25, shape)
    return (values + 1.0 if name.endswith("norm.weight") else values).astype(np.float32)


def gemma3n(out, hard=False):
    """Writes a random Gemma 3n of the sizes that llama.cpp fixes, with narrow attention and MLP. With `hard` gates are so large
    that none meets llama.cpp's table of the GELU. The layers change the states little, else 22 random ones amplify any rounding."""
    layers, hidden, width, heads, dim, ffn, laurel = 22, 64, 256, 4, 16, 512, 64
    config = json.loads((TINY / "gemma3n" / "config.json").read_text()) | {
        "num_hidden_layers": layers, "hidden_size": hidden, "hidden_size_per_layer_input": width, "num_attention_heads": heads,
        "head_dim": dim, "num_key_value_heads": 2, "intermediate_size": ffn, "laurel_rank": laurel, "altup_num_inputs": 4,
        "layer_types": ["full_attention" if (layer + 1) % 5 == 0 or layer == 21 else "sliding_attention" for layer in range(layers)],
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12, "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 64, "rms_norm_eps": 1e-6,
    }
    random = np.random.default_rng(31)
    factor = 1e5 if hard else 1.0
    tensors = {}

    def put(name, *shape, scale=1.0):
        values = random.normal(0.0, scale * shape[-1] ** -0.5, shape) if len(shape) > 1 else random.normal(scale, 0.1 * scale, shape)
        tensors[f"model.{name}" if name.endswith("scale") else f"model.{name}.weight"] = values.astype(np.float32)

    put("embed_tokens", 64, hidden)
    put("embed_tokens_per_layer", 64, layers * width, scale=4.0)
    put("per_layer_model_projection", layers * width, hidden, scale=8.0)
    put("per_layer_projection_norm", width)
    put("norm", hidden)
    for stream in range(3):
        put(f"altup_projections.{stream}", hidden, hidden)
        put(f"altup_unembed_projections.{stream}", hidden, hidden)
    for layer in range(layers):
        of = f"layers.{layer}."
        for name in ["input_layernorm", "pre_feedforward_layernorm", "altup.router_norm", "altup.correct_output_scale"]:
            put(of + name, hidden)
        for name in ["post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm", "laurel.post_laurel_norm"]:
            put(of + name, hidden, scale=0.3)
        put(of + "altup.modality_router", 4, hidden, scale=6.4)
        put(of + "altup.correction_coefs", 4, 4, scale=0.05)
        put(of + "altup.prediction_coefs", 16, 4, scale=0.05)
        put(of + "laurel.linear_left", laurel, hidden)
        put(of + "laurel.linear_right", hidden, laurel)
        put(of + "self_attn.q_proj", heads * dim, hidden)
        put(of + "self_attn.o_proj", hidden, heads * dim)
        put(of + "self_attn.q_norm", dim, scale=0.3)
        if layer < 20:
            put(of + "self_attn.k_proj", 2 * dim, hidden)
            put(of + "self_attn.v_proj", 2 * dim, hidden)
            put(of + "self_attn.k_norm", dim, scale=0.3)
        put(of + "mlp.gate_proj", ffn, hidden, scale=factor)
        put(of + "mlp.up_proj", ffn, hidden)
        put(of + "mlp.down_proj", hidden, ffn)
        put(of + "per_layer_input_gate", width, hidden, scale=factor)
        put(of + "per_layer_projection", hidden, width)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")


def gemma3n_hard(out):
    """Writes such a model without the table's error."""
    gemma3n(out, hard=True)


def gemma3n_as_llama(model):
    """Changes the shares of gates to those that cut where llama.cpp does, which divides variances by the number less 1."""
    config = json.loads((model / "config.json").read_text())
    normal, width = NormalDist(), config["intermediate_size"]
    share = normal.cdf(normal.inv_cdf(0.95) * (width / (width - 1)) ** 0.5)
    config["activation_sparsity_pattern"] = [share if cut else 0.0 for cut in config["activation_sparsity_pattern"]]
    (model / "config.json").write_text(json.dumps(config))


def kimi_linear(out):
    """Writes the tiny Kimi Linear with as many heads in its mixers as in its attention."""
    config = json.loads((TINY / "kimi-linear" / "config.json").read_text()) | {"linear_num_heads": 4, **EPSILON}
    random, tensors = np.random.default_rng(32), {}
    for name, tensor in load_file(TINY / "kimi-linear" / "model.safetensors").items():
        mixer = "layers.0.self_attn" in name or "layers.2.self_attn" in name
        shape = tuple({18: 24, 3: 4}.get(n, n) for n in tensor.shape) if mixer else tensor.shape
        tensors[name] = tensor if shape == tensor.shape else random.normal(0.0, 0.5, shape).astype(np.float32)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")


def deepseek4(out):
    """Writes the tiny DeepSeek-V4 with the streams, the tokens of an entry and the width of index keys that llama.cpp has."""
    config = json.loads((TINY / "deepseek-v4" / "config.json").read_text()) | {
        "hc_mult": 4, "index_head_dim": 64, "max_position_embeddings": 512,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    }
    shapes = {
        "hc_attn_fn": (24, 128), "hc_attn_base": (24,), "hc_ffn_fn": (24, 128), "hc_ffn_base": (24,), "hc_head.hc_fn": (4, 128),
        "hc_head.hc_base": (4,), "1.attn.compressor.ape": (128, 8), "2.attn.compressor.ape": (4, 16), "indexer.wq_b.weight": (512, 10),
        "indexer.compressor.ape": (4, 128), "indexer.compressor.wkv.weight": (128, 32), "indexer.compressor.wgate.weight": (128, 32),
        "indexer.compressor.norm.weight": (64,),
    }
    random, tensors = np.random.default_rng(33), {}
    for name, tensor in load_file(TINY / "deepseek-v4" / "model.safetensors").items():
        shape = next((shape for end, shape in shapes.items() if name.endswith(end)), tensor.shape)
        values = random.normal(1.0 if "norm" in name else 0.0, 0.25, shape)
        tensors[name] = tensor if shape == tensor.shape else values.astype(np.float32)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")


# Models that are made here, with sizes of which no tiny one is recorded.
MADE = {"gemma3n": gemma3n, "gemma3n-hard": gemma3n_hard, "kimi-linear": kimi_linear, "deepseek4": deepseek4}


# What llama.cpp computes differently and cannot be told: its logits are compared with those of the source changed so.
CHANGED = {"gemma3n-hard": gemma3n_as_llama}


def make(name, folder):
    out = folder / name
    out.mkdir(parents=True)
    if name in MADE:
        MADE[name](out)
        return out
    tiny = next(TINY / name.removesuffix(end) for end in ("", "-nope", "-windows") if (TINY / name.removesuffix(end)).exists())
    config = json.loads((tiny / "config.json").read_text()) | MODELS[name]
    (out / "config.json").write_text(json.dumps(config))
    save_file(renamed(load_file(tiny / "model.safetensors"), name), out / "model.safetensors")
    return out


def run(binary, *arguments):
    done = subprocess.run([str(binary), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]}: {done.stderr.strip()[-600:]}")


def logits(binary, model, windows, folder):
    out = folder / "logits.safetensors"
    out.unlink(missing_ok=True)
    run(binary, "eval", model, "--tokens", windows, "--overwrite", "--logits", out, "--quiet", "--json")
    return load_file(out)["logits"]


def peers(file, windows):
    """Returns the logits of llama.cpp; for a model with a second set of RoPE factors, with a context that uses it or not."""
    from check_gguf import llama

    size = 64 if len(windows[0]) < 64 else 320
    model = llama(str(file), n_ctx=size, n_batch=size, logits_all=True, type_k=0, type_v=0)  # f32
    found = []
    for window in windows:
        model.reset()
        model.eval(window)
        found.append(np.asarray(model.scores[: len(window)]).copy())
    return np.stack(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa", type=Path)
    parser.add_argument("names", nargs="*", default=[*MODELS, *MADE])
    parser.add_argument("--recipe", default="rtn-f32")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--llama-tol", type=float, default=0.005)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.work))
    failed = False
    for name in args.names:
        windows = [[int(x) for x in np.random.default_rng(seed).integers(0, 64, LENGTHS.get(name, 24))] for seed in (1, 2)]
        (folder / "windows.json").write_text(json.dumps(windows))
        try:
            model, file = make(name, folder), folder / f"{name}.gguf"
            run(args.mantissa, "quantize", model, "--recipe", args.recipe, "--format", "gguf", "--overwrite", "--out", file, "--quiet")
            run(args.mantissa, "verify", file, "--reference", model)
            source = logits(args.mantissa, model, folder / "windows.json", folder)
            ours = logits(args.mantissa, file, folder / "windows.json", folder)
            theirs = peers(file, windows)
            if name in CHANGED:
                CHANGED[name](model)
            near = logits(args.mantissa, model, folder / "windows.json", folder) if name in CHANGED else ours
        except (RuntimeError, ValueError) as error:
            print(f"{name:18} {error}")
            failed = True
            continue
        loss, apart = np.abs(source - ours).max(), np.abs(near - theirs).max()
        # Rates of decay are stored as exponentials of the source's logarithms, rounded.
        exact = args.recipe != "rtn-f32" or loss <= (1e-5 if name in DECAYING else 0)
        # A comparison with NaN is false.
        failed |= not (exact and apart <= TOLERANCE.get(name, args.llama_tol))
        print(f"{name:18} source {loss:.1e}  llama.cpp {apart:.1e}  of {np.abs(source).max():.1f}", flush=True)
    shutil.rmtree(folder)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
