#!/usr/bin/env python3
"""Decodes an EXL3 folder like exllamav3, and compares with our decoder.

    python exl3_weights.py DIR DENSE.safetensors

exllamav3 runs only on GPUs; this script reimplements its decoding in numpy, from `exllamav3_ext/quant/codebook.cuh` (decode_3inst, decode_mul1: f16
arithmetic, operation by operation), `exl3_dq.cuh` (the window of a state), `exl3_lib/quantize.py` (tensor_core_perm, preapply_had_l and _r) and
`modules/quant/exl3.py` (get_weight_tensor). The rotations are sums of f64 here and of f32 in ours: each weight must be within 1e-6 of the largest of its
tensor in DENSE.safetensors (`cargo run --release -p mantissa-model --example dense -- DIR DENSE.safetensors`). Exit 1 if one is not, or if
`quantization_config.json` does not match the stored tensors.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

BOOKS = {"": (89226354, 64248484), "mcg": (0xCBAC1FED, 0), "mul1": (0x83DCD12D, 0)}


def main():
    folder, dense = Path(sys.argv[1]), load_file(sys.argv[2])
    stored, shapes = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():
                shapes[name] = tensors.get_slice(name).get_shape()
                if name.rsplit(".", 1)[-1] in ("trellis", "suh", "svh", "mcg", "mul1"):
                    stored[name] = tensors.get_tensor(name)
    storage = json.loads((folder / "quantization_config.json").read_text())["tensor_storage"]
    listed = {name: tuple(entry["shape"]) for module in storage.values() for name, entry in module["stored_tensors"].items()}
    assert listed == {name: tuple(shape) for name, shape in shapes.items()}, "tensor_storage lists what is stored"
    modules = [name.removesuffix(".trellis") for name in stored if name.endswith(".trellis")]
    worst, bits = 0.0, set()
    for module in modules:
        entry = storage[module]
        assert entry["quant_format"] == "exl3" and entry["bits_per_weight"] * 16 == stored[f"{module}.trellis"].shape[-1]
        weight = decode(stored, module)
        expected = dense[f"{module}.weight"].astype(np.float64)
        worst = max(worst, float(np.abs(weight - expected).max() / np.abs(expected).max()))
        bits.add(entry["bits_per_weight"])
    print(json.dumps({"modules": len(modules), "worst": worst, "bits": sorted(bits)}))
    sys.exit(not modules or worst > 1e-6)


def decode(stored, module):
    book = next((name for name in ("mcg", "mul1") if f"{module}.{name}" in stored), "")
    if book:
        assert int(np.asarray(stored[f"{module}.{book}"]).view(np.uint32).reshape(-1)[0]) == BOOKS[book][0]
    tiles = stored[f"{module}.trellis"].view(np.uint16)
    down, across, width = tiles.shape
    half_bits = width // 8
    # Pairs of 16-bit words are 32-bit words of the device, highest bit first.
    words = tiles.reshape(down, across, width // 2, 2)[..., ::-1].reshape(down, across, width)
    ring = np.unpackbits(words.astype(">u2").view(np.uint8).reshape(down, across, -1), axis=-1)
    ends = (np.arange(256) + 1) * half_bits // 2
    at = (ends[:, None] - 16 + np.arange(16)) % ring.shape[-1]
    states = (ring[..., at].astype(np.uint32) << np.arange(15, -1, -1, dtype=np.uint32)).sum(-1).astype(np.uint32)
    values = value(states, *BOOKS[book], book == "mul1")
    inner = np.zeros((down, across, 16, 16), np.float64)
    i = np.arange(256)
    lane, part = i // 8, i % 8
    inner[..., lane % 4 * 2 + part % 2 + part // 2 % 2 * 8, lane // 4 + part // 4 * 8] = values
    w = inner.transpose(0, 2, 1, 3).reshape(down * 16, across * 16)
    h = np.array([[(-1.0) ** bin(a & b).count("1") for b in range(128)] for a in range(128)]) / np.sqrt(128)
    w = (h @ w.reshape(-1, 128, w.shape[1])).reshape(w.shape) * stored[f"{module}.suh"].astype(np.float64)[:, None]
    w = (w.reshape(w.shape[0], -1, 128) @ h).reshape(w.shape) * stored[f"{module}.svh"].astype(np.float64)
    return w.T


def value(states, multiplier, addend, sums):
    x = (states.astype(np.uint64) * multiplier + addend).astype(np.uint32)
    if sums:
        total = (x & 0xFF) + (x >> 8 & 0xFF) + (x >> 16 & 0xFF) + (x >> 24)
        inverse, bias = (np.uint16(pattern).view(np.float16).astype(np.float64) for pattern in (0x1EEE, 0xC931))
        # One fused multiply-add in f16, on the sum plus 1024.
        return ((total + 1024.0) * inverse + bias).astype(np.float16).astype(np.float64)
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (x & 0xFFFF).astype(np.uint16).view(np.float16), (x >> 16).astype(np.uint16).view(np.float16)
    return (low + high).astype(np.float16).astype(np.float64)


if __name__ == "__main__":
    main()
