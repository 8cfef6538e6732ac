#!/usr/bin/env python3
"""Writes one module in each layout of integer weights: GPTQ (v1, v2, planar, act-order), AWQ, EXL2, EXL3.

    python make_conventions.py conventions

Codes, zero points and scales are drawn from a seed; words are packed bit by bit from the descriptions of the formats, and the
expected weight is computed in float64 from the same numbers. The script has no quantizer and uses no code of the Rust
readers. Each folder holds `config.json` and `model.safetensors` with the tensors of the module `model.layers.0.mlp.up_proj`,
`expected_rows` I32[r] and `expected` F32[r, K], those rows of its weight.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

MODULE = "model.layers.0.mlp.up_proj"
ROWS = (0, 5, 17, 31)  # of the weight, recorded
DTYPES = {"int32": "I32", "int16": "I16", "float16": "F16", "float32": "F32"}


def main():
    out = Path(sys.argv[1])
    for bits in (2, 3, 4, 8):
        gptq(out / f"gptq-v1-int{bits}", bits, "gptq", sym=True)
        gptq(out / f"gptq-v2-int{bits}-asym", bits, "gptq_v2", sym=False)
    for bits in (3, 5, 6, 7):
        gptq(out / f"gptq-planar-int{bits}", bits, "gptq_p", sym=False)
    gptq(out / "gptq-v1-int4-act-order", 4, "gptq", sym=True, act_order=True)
    gptq(out / "gptq-v2-int4-labelled-v1", 4, "gptq_v2", sym=True, label="gptq")
    awq(out / "awq")
    exl2(out / "exl2")
    for book in ("3inst", "mcg", "mul1"):
        exl3(out / f"exl3-{book}", book, {"3inst": 2, "mcg": 3, "mul1": 4}[book])
    exl3(out / "exl3-mul1-half", "mul1", 2.5)


# --- packing, one bit at a time ---


def words_of_bits(bits):
    """Little-endian words of a list of bits, the first one lowest."""
    bits = [int(b) for b in bits]
    bits += [0] * (-len(bits) % 32)
    return np.array([sum(b << i for i, b in enumerate(bits[at : at + 32])) for at in range(0, len(bits), 32)], np.uint32)


def stream(codes, bits):
    return words_of_bits(code >> i & 1 for code in codes for i in range(bits))


def planar(codes, bits):
    planes = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]
    words = []
    for at in range(0, len(codes), 32):
        shift = 0
        for width in planes:
            words.append(words_of_bits(c >> shift + i & 1 for c in codes[at : at + 32] for i in range(width)))
            shift += width
    return np.concatenate(words)


def down(codes, bits, pack):
    """Packs `[k, n]` along k: `[words, n]`."""
    return np.stack([pack([int(c) for c in codes[:, n]], bits) for n in range(codes.shape[1])], 1).view(np.int32)


def across(codes, bits, pack):
    """Packs `[k, n]` along n: `[k, words]`."""
    return np.stack([pack([int(c) for c in row], bits) for row in codes]).view(np.int32)


# --- conventions ---


def gptq(folder, bits, version, sym, act_order=False, label=None):
    n, k, group = 32, 96, 32
    rng = np.random.default_rng(bits * 10 + sym)
    codes = rng.integers(0, 1 << bits, (k, n))
    middle = 1 << bits - 1
    zeros = np.full((k // group, n), middle) if sym else rng.integers(1, 1 << bits, (k // group, n))
    scales = rng.uniform(0.01, 0.1, (k // group, n)).astype(np.float16)
    g_idx = np.arange(k) // group
    if act_order:
        g_idx = g_idx[rng.permutation(k)]
    weight = scales[g_idx].astype(np.float64) * (codes - zeros[g_idx])
    pack = planar if version == "gptq_p" else stream
    tensors = {
        "qweight": down(codes, bits, pack),
        "qzeros": across(zeros - (version == "gptq"), bits, pack),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym,
              "checkpoint_format": label or version, "pack_dtype": "int32", "lm_head": False}
    write(folder, config, tensors, weight.T)


def awq(folder):
    n, k, group = 32, 96, 32
    rng = np.random.default_rng(7)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = rng.uniform(0.01, 0.1, (k // group, n)).astype(np.float16)
    # Column 8c + order[i] in nibble i of word c.
    order = np.array([8 * (i // 8) + [0, 2, 4, 6, 1, 3, 5, 7][i % 8] for i in range(n)])
    tensors = {"qweight": across(codes[:, order], 4, stream), "qzeros": across(zeros[:, order], 4, stream), "scales": scales}
    weight = np.repeat(scales, group, 0).astype(np.float64) * (codes - np.repeat(zeros, group, 0))
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    write(folder, config, tensors, weight.T)


def exl2(folder):
    # Two rows less than a multiple of 32, so that columns of words are padded; the last group is short.
    n, groups = 62, [(8, 32), (6, 32), (5, 32), (4, 64), (3, 32), (2, 48)]
    k, padded = sum(size for _, size in groups), 64
    rng = np.random.default_rng(9)
    perm = rng.permutation(k)  # column at each position of the codes
    weight, words, fields, largest, table, row, at = np.zeros((k, n)), [], [], [], [], 0, 0
    for bits, size in groups:
        codes = rng.integers(0, 1 << bits, (size, padded))
        codes[:, n:] = 1 << bits - 1
        s = rng.integers(1, 17, padded)
        top = np.float16(rng.uniform(1, 9))
        scale = np.float16(np.float64(np.float16(np.float64(top) / 256)) * (s * s))
        weight[perm[at : at + size]] = (codes[:, :n] - (1 << bits - 1)) * scale[:n].astype(np.float64)
        packed = down(codes, bits, stream)
        table += [bits, row]
        words.append(packed)
        fields.append(s - 1)
        largest.append(top)
        row, at = row + len(packed), at + size
    tensors = {
        "q_weight": np.concatenate(words),
        "q_scale": across(np.array(fields), 4, stream),
        "q_scale_max": np.array(largest, np.float16),
        "q_groups": np.array(table, np.int16),
        "q_invperm": np.argsort(perm).astype(np.int32),
    }
    write(folder, {"quant_method": "exl2", "bits": 4.4, "version": "0.3.2"}, tensors, weight.T)


def exl3(folder, book, bits):
    n, k = 128, 256
    rng = np.random.default_rng(int(11 + bits))
    suh = (rng.choice([-1, 1], k) * rng.uniform(0.5, 2, k)).astype(np.float16)
    svh = (rng.choice([-1, 1], n) * rng.uniform(0.01, 0.1, n)).astype(np.float16)
    inner, trellis = np.zeros((k, n)), np.zeros((k // 16, n // 16, int(16 * bits)), np.int16)
    for i in range(k // 16):
        for j in range(n // 16):
            ring = rng.integers(0, 2, int(256 * bits))
            # The highest bit of each 32-bit word first.
            words = np.array([sum(int(b) << 31 - t for t, b in enumerate(ring[at : at + 32])) for at in range(0, len(ring), 32)], np.uint32)
            trellis[i, j] = words.view(np.int16)
            tile = np.zeros((16, 16))
            last = 0
            for t in range(256):
                state = 0
                # Half a bit more on average: odd weights have one more bit.
                last += int(bits) + (t % 2 if bits % 1 else 0)
                for b in range(last - 16, last):
                    state = state << 1 | int(ring[b % len(ring)])
                lane, element = divmod(t, 8)
                tile[lane % 4 * 2 + (0, 1, 8, 9)[element % 4], lane // 4 + element // 4 * 8] = value(book, state)
            inner[16 * i : 16 * i + 16, 16 * j : 16 * j + 16] = tile
    h = np.array([[1.0]])
    while len(h) < 128:
        h = np.block([[h, h], [h, -h]])
    h /= np.sqrt(128)
    left, right = np.kron(np.eye(k // 128), h), np.kron(np.eye(n // 128), h)
    weight = suh[:, None].astype(np.float64) * (left @ inner @ right) * svh.astype(np.float64)
    tensors = {"trellis": trellis, "suh": suh, "svh": svh}
    if book != "3inst":
        tensors[book] = np.array({"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[book], np.uint32).view(np.int32)
    write(folder, {"quant_method": "exl3", "bits": float(bits), "version": "0.0.6"}, tensors, weight.T)


def value(book, state):
    multiplier = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[book]
    x = state * multiplier + (64248484 if book == "3inst" else 0) & 0xFFFFFFFF
    half = lambda bits: np.frombuffer(struct.pack("<H", bits), np.float16)[0]
    if book == "mul1":
        total = 1024 + sum(x >> 8 * i & 255 for i in range(4))
        return np.float16(total * np.float64(half(0x1EEE)) + np.float64(half(0xC931)))
    x = x & 0x8FFF8FFF ^ 0x3B603B60
    return np.float16(np.float64(half(x & 0xFFFF)) + np.float64(half(x >> 16)))


# --- files ---


def write(folder, config, tensors, weight):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    n, k = weight.shape
    all_tensors = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    rows = [row for row in ROWS if row < n]
    all_tensors["expected_rows"] = np.array(rows, np.int32)
    all_tensors["expected"] = weight[rows].astype(np.float32)
    header, at, data = {"__metadata__": {"shape": f"[{n}, {k}]"}}, 0, b""
    for name, tensor in all_tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {"dtype": DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
