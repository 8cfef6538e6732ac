#!/usr/bin/env python3
"""Writes one module in each layout of float weights and quantized inputs: compressed-tensors, ModelOpt, bitsandbytes, DeepSeek's FP8.

    python make_float_conventions.py float_conventions

Like make_conventions.py: codes and scales are drawn from a seed and packed from the descriptions of the formats, the expected
weight is computed in float64 from the same numbers, and no code of the Rust readers is used. The metadata of each weight file
name the format that writes the layout, and the scheme of the input as printed by mantissa.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

from make_conventions import MODULE, ROWS, stream

N, K = 32, 96
NAMES = {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "uint32": "U32", "float16": "F16", "float32": "F32"}
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4_BNB = [x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def main():
    out = Path(sys.argv[1])
    for make in (ct_actorder, ct_padded, ct_int4_in_bytes, ct_fp8_block, ct_hadamard, modelopt_fp8, modelopt_per_channel,
                 modelopt_int4_awq, modelopt_nvfp4, modelopt_mxfp8, modelopt_mixed, bnb_nf4, bnb_nf4_dq, bnb_fp4, bnb_int8,
                 fp8_blocks, fp8_powers, fp8_static, mlx_affine4, mlx_affine3, mlx_affine6, mlx_mxfp4, mlx_mxfp8, mlx_nvfp4):
        folder = out / make.__name__.replace("_", "-")
        write(folder, *make(np.random.default_rng(len(folder.name) * 1000 + sum(folder.name.encode()))))


# --- values ---


def e4m3(codes):
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(sign == 1, -1, 1) * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def e2m1(codes):
    return np.array(E2M1 + [-x for x in E2M1], np.float64)[codes]


def fp8_codes(rng, shape):
    """All codes except NaN."""
    codes = rng.integers(0, 254, shape)
    return (codes + (codes >= 127)).astype(np.uint8)


def scales(rng, shape):
    return rng.uniform(0.01, 0.1, shape).astype(np.float32)


def powers(rng, shape):
    return rng.integers(120, 130, shape).astype(np.uint8)


def spread(blocks, down, across):
    """Repeats each block's value for all its elements, cropped at the edges."""
    return np.repeat(np.repeat(blocks, down, 0), across, 1)[:N, :K].astype(np.float64)


def pairs(codes):
    """Packs two codes per byte along the last axis, the first in the low nibble."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def F8(codes):
    return ("F8_E4M3", codes)


# --- compressed-tensors ---


def ct(weights, fmt, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": fmt}
    return {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["lm_head"], "config_groups": {"group_0": group}, **more}


def words(codes, bits, per_word=None):
    """Packs rows of codes into int32 words, densely or with whole codes per word."""
    per_row = []
    for row in codes:
        row = [int(c) for c in row]
        if per_word is None:
            per_row.append(stream(row, bits))
        else:
            per_row.append(np.concatenate([stream(row[at:at + per_word], bits) for at in range(0, len(row), per_word)]))
    return np.stack(per_row).view(np.int32)


def ct_actorder(rng):
    codes, scale = rng.integers(0, 16, (N, K)), scales(rng, (N, K // 32))
    g_idx = (np.arange(K) // 32)[rng.permutation(K)]
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": "group", "dynamic": False}
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scale, "weight_shape": np.array([N, K], np.int64),
               "weight_g_idx": g_idx.astype(np.int32)}
    return ct(args, "pack-quantized"), tensors, scale[:, g_idx].astype(np.float64) * (codes - 8), "", ""


def ct_padded(rng):
    codes, zeros, scale = rng.integers(0, 8, (N, K)), rng.integers(0, 8, (N, K // 32)), scales(rng, (N, K // 32))
    args = {"num_bits": 3, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, "dynamic": False}
    tensors = {"weight_packed": words(codes, 3, 10), "weight_scale": scale, "weight_shape": np.array([N, K], np.int64),
               "weight_zero_point": np.ascontiguousarray(words(zeros.T, 3, 10).T)}
    weight = spread(scale, 1, 32) * (codes - np.repeat(zeros, 32, 1))
    return ct(args, "pack-quantized"), tensors, weight, "", ""


def ct_int4_in_bytes(rng):
    codes, scale = rng.integers(-8, 8, (N, K)).astype(np.int8), scales(rng, (N, 1))
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return ct(args, "int-quantized", inputs), {"weight": codes, "weight_scale": scale}, scale * codes.astype(np.float64), "", "fp8-e4m3-token"


def ct_fp8_block(rng):
    codes, scale = fp8_codes(rng, (N, K)), scales(rng, (2, 2))
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [24, 48], "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 48, "dynamic": True}
    weight = spread(scale, 24, 48) * e4m3(codes)
    return ct(args, "float-quantized", inputs), {"weight": F8(codes), "weight_scale": scale}, weight, "", "fp8-e4m3-g48"


def ct_hadamard(rng):
    """The input is rotated by Sylvester's matrix of order 32, block by block."""
    codes, scale = rng.integers(-128, 128, (N, K)).astype(np.int8), scales(rng, (N, 1))
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    transforms = {"config_groups": {"u": {"type": "hadamard", "head_dim": 32, "randomize": False, "apply": [
        {"targets": ["Linear"], "location": "input", "inverse": False, "ignore": ["lm_head"]},
        {"targets": ["Linear"], "location": "weight_input", "inverse": True, "ignore": ["lm_head"]}]}}}
    h = np.ones((1, 1))
    while len(h) < 32:
        h = np.block([[h, h], [h, -h]])
    rotated = (scale * codes.astype(np.float64)).reshape(N, K // 32, 32) @ (h / np.sqrt(32)).T
    return ct(args, "int-quantized", transform_config=transforms), {"weight": codes, "weight_scale": scale}, rotated.reshape(N, K), "", ""


# --- ModelOpt ---


def modelopt(algo, **more):
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.47.0"}, **more}


def modelopt_fp8(rng):
    codes, scale = fp8_codes(rng, (N, K)), scales(rng, ())
    tensors = {"weight": F8(codes), "weight_scale": scale, "input_scale": np.float32(0.037)}
    return modelopt("FP8"), tensors, scale * e4m3(codes), "modelopt", "fp8-e4m3-tensor@static"


def modelopt_per_channel(rng):
    codes, scale = fp8_codes(rng, (N, K)), scales(rng, (N,))
    tensors = {"weight": F8(codes), "weight_scale": scale}
    return modelopt("FP8_PER_CHANNEL_PER_TOKEN"), tensors, scale[:, None] * e4m3(codes), "modelopt", "fp8-e4m3-token"


def modelopt_int4_awq(rng):
    codes, scale = rng.integers(0, 16, (N, K)), scales(rng, (N, K // 32))
    factor = rng.uniform(0.5, 2, K).astype(np.float32)
    packed = (codes[::2] | codes[1::2] << 4).astype(np.uint8)
    tensors = {"weight": packed, "weight_scale": scale, "pre_quant_scale": factor}
    weight = spread(scale, 1, 32) * (codes - 16 * (codes > 7)) * factor
    return modelopt("W4A16_AWQ"), tensors, weight, "modelopt", ""


def nvfp4(rng):
    codes, blocks = rng.integers(0, 16, (N, K)), rng.integers(0x20, 0x60, (N, K // 16)).astype(np.uint8)
    outer = np.float32(0.003)
    tensors = {"weight": pairs(codes), "weight_scale": F8(blocks), "weight_scale_2": outer}
    return tensors, spread(e4m3(blocks), 1, 16) * np.float64(outer) * e2m1(codes)


def modelopt_nvfp4(rng):
    tensors, weight = nvfp4(rng)
    return modelopt("NVFP4", group_size=16), {**tensors, "input_scale": np.float32(0.0625)}, weight, "modelopt", "nvfp4"


def modelopt_mxfp8(rng):
    codes, blocks = fp8_codes(rng, (N, K)), powers(rng, (N, K // 32))
    weight = spread(2.0 ** (blocks.astype(np.float64) - 127), 1, 32) * e4m3(codes)
    return modelopt("MXFP8", group_size=32), {"weight": F8(codes), "weight_scale": blocks}, weight, "modelopt", "mxfp8-e4m3:rceil"


def modelopt_mixed(rng):
    tensors, weight = nvfp4(rng)
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}, MODULE: {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    return modelopt("MIXED_PRECISION", quantized_layers=layers), tensors, weight, "modelopt", ""


# --- bitsandbytes ---


def bnb(**more):
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0, **more}


def dynamic_map():
    """Signed dynamic map of 8 bits: seven decades, each with twice the levels of the one below, plus zero and one."""
    levels = [0.0, 1.0]
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2**decade + 1)
        means = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - 6)
        levels += [*means, *-means]
    return np.sort(np.array(levels)).astype(np.float32)


def four_bits(rng, name, levels, block, doubled):
    codes, count = rng.integers(0, 16, N * K), N * K // block
    state = {"quant_type": name, "blocksize": block, "dtype": "float32", "shape": [N, K]}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]}
    if doubled:
        of_scale, amax, mean = rng.integers(60, 256, count).astype(np.uint8), np.array([0.05], np.float32), np.float32(0.0739)
        scale = dynamic_map().astype(np.float64)[of_scale] * amax[0] + mean
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(mean)}
        tensors |= {"weight.absmax": of_scale, "weight.nested_absmax": amax, "weight.nested_quant_map": dynamic_map()}
    else:
        scale = scales(rng, count)
        tensors["weight.absmax"] = scale
    tensors["weight.quant_map"] = np.array(levels, np.float32)
    tensors[f"weight.quant_state.bitsandbytes__{name}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    weight = np.array(levels)[codes] * np.repeat(scale, block)
    return bnb(bnb_4bit_quant_type=name, bnb_4bit_use_double_quant=doubled), tensors, weight.reshape(N, K), "bitsandbytes", ""


def bnb_nf4(rng):
    return four_bits(rng, "nf4", NF4, 64, False)


def bnb_nf4_dq(rng):
    return four_bits(rng, "nf4", NF4, 64, True)


def bnb_fp4(rng):
    return four_bits(rng, "fp4", FP4_BNB, 128, False)


def bnb_int8(rng):
    codes, amax = rng.integers(-127, 128, (N, K)).astype(np.int8), rng.uniform(0.1, 2, N).astype(np.float32)
    tensors = {"weight": codes, "SCB": amax, "weight_format": np.uint8(0)}
    weight = codes * (amax[:, None].astype(np.float64) / 127)
    return bnb(load_in_4bit=False, load_in_8bit=True), tensors, weight, "bitsandbytes", "int8-token:restricted"


# --- FP8 of DeepSeek and transformers ---


def fp8(**more):
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **more}


def fp8_blocks(rng):
    codes, scale = fp8_codes(rng, (N, K)), scales(rng, (2, 3))
    tensors = {"weight": F8(codes), "weight_scale_inv": scale}
    return fp8(weight_block_size=[24, 40]), tensors, spread(scale, 24, 40) * e4m3(codes), "deepseek-fp8", "fp8-e4m3-g40"


def fp8_powers(rng):
    codes, blocks = fp8_codes(rng, (N, K)), powers(rng, (2, 3))
    tensors = {"weight": F8(codes), "weight_scale_inv": ("F8_E8M0", blocks)}
    weight = spread(2.0 ** (blocks.astype(np.float64) - 127), 24, 40) * e4m3(codes)
    return fp8(weight_block_size=[24, 40], scale_fmt="ue8m0"), tensors, weight, "deepseek-fp8", "fp8-e4m3-t1x40:ue8m0"


def fp8_static(rng):
    codes, scale = fp8_codes(rng, (N, K)), scales(rng, (1,))
    tensors = {"weight": F8(codes), "weight_scale": scale, "input_scale": np.array([0.02], np.float32)}
    return {**fp8(), "activation_scheme": "static"}, tensors, scale * e4m3(codes), "", "fp8-e4m3-tensor@static"


# --- MLX ---


def mlx(bits, group, mode):
    return {"bits": bits, "group_size": group, "mode": mode}


def affine(rng, bits):
    codes, scale = rng.integers(0, 1 << bits, (N, K)), scales(rng, (N, K // 32))
    bias = rng.uniform(-0.5, 0.1, (N, K // 32)).astype(np.float32)
    tensors = {"weight": words(codes, bits).view(np.uint32), "scales": scale, "biases": bias}
    return mlx(bits, 32, "affine"), tensors, spread(scale, 1, 32) * codes + spread(bias, 1, 32), "mlx", ""


def mlx_affine4(rng):
    return affine(rng, 4)


def mlx_affine3(rng):
    return affine(rng, 3)


def mlx_affine6(rng):
    return affine(rng, 6)


def mlx_mxfp4(rng):
    codes, blocks = rng.integers(0, 16, (N, K)), powers(rng, (N, K // 32))
    weight = spread(2.0 ** (blocks.astype(np.float64) - 127), 1, 32) * e2m1(codes)
    return mlx(4, 32, "mxfp4"), {"weight": words(codes, 4).view(np.uint32), "scales": blocks}, weight, "mlx", ""


def mlx_mxfp8(rng):
    codes, blocks = fp8_codes(rng, (N, K)), powers(rng, (N, K // 32))
    weight = spread(2.0 ** (blocks.astype(np.float64) - 127), 1, 32) * e4m3(codes)
    return mlx(8, 32, "mxfp8"), {"weight": words(codes, 8).view(np.uint32), "scales": blocks}, weight, "mlx", ""


def mlx_nvfp4(rng):
    codes, blocks = rng.integers(0, 16, (N, K)), rng.integers(0x20, 0x60, (N, K // 16)).astype(np.uint8)
    weight = spread(e4m3(blocks), 1, 16) * e2m1(codes)
    return mlx(4, 16, "nvfp4"), {"weight": words(codes, 4).view(np.uint32), "scales": blocks}, weight, "mlx", ""


# --- files ---


def write(folder, config, tensors, weight, container, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    everything = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    everything["expected_rows"] = np.array(ROWS, np.int32)
    everything["expected"] = weight[list(ROWS)].astype(np.float32)
    header, at, data = {"__metadata__": {"container": container, "input": inputs}}, 0, b""
    for name, tensor in everything.items():
        dtype, array = tensor if isinstance(tensor, tuple) else (NAMES[str(np.asarray(tensor).dtype)], np.asarray(tensor))
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
