#!/usr/bin/env python3
"""Writes the tables of `src/codec/grids.rs` and `src/hadamard/bases.rs` from the golden reference files.

    python make_tables.py SHARED_GOLDEN CRATE

The grids of the GGUF IQ types and the Hadamard matrices of non-power-of-two order are data of the formats, without a
formula. They are packed as small integers; each packing is undone and compared before it is written.
Needs numpy and safetensors; run `cargo fmt` afterwards.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

GRIDS = (
    # name, golden tensor, levels, bits of a level's index, description
    ("IQ1", "IQ1_S.grid_i8", (-1, 0, 1), 2, "IQ1_S and IQ1_M: 2048 points of eight coordinates in {-1, 0, 1}"),
    ("IQ2_XXS", "IQ2_XXS.grid_i8", (8, 25, 43), 2, "IQ2_XXS: 256 points of eight coordinates in {8, 25, 43}"),
    ("IQ2_XS", "IQ2_XS.grid_i8", (8, 25, 43), 2, "IQ2_XS: 512 points of eight coordinates in {8, 25, 43}"),
    ("IQ2_S", "IQ2_S.grid_i8", (8, 25, 43), 2, "IQ2_S: 1024 points of eight coordinates in {8, 25, 43}"),
    ("IQ3_XXS", "IQ3_XXS.grid_i8", (4, 12, 20, 28, 36, 44, 52, 62), 3, "IQ3_XXS: 256 points of four coordinates in {4, 12, 20, 28, 36, 44, 52, 62}"),
    ("IQ3_S", "IQ3_S.grid_i8", (1, 3, 5, 7, 9, 11, 13, 15), 3, "IQ3_S: 512 points of four odd coordinates up to 15"),
)
BASES = (12, 20, 28, 36, 40, 52, 60, 108, 140, 156, 172)


def main(golden, crate):
    (crate / "src/codec/grids.rs").write_text(grids(load_file(golden / "gguf_blocks.safetensors")))
    (crate / "src/hadamard/bases.rs").write_text(bases(load_file(golden / "hadamard.safetensors")))


def grids(tensors):
    assert np.array_equal(tensors["IQ1_S.grid_i8"], tensors["IQ1_M.grid_i8"])
    parity = [i | (bin(i).count("1") & 1) << 7 for i in range(128)]
    assert tensors["IQ2.ksigns"].tolist() == parity, "the sign table is the parity rule that the decoder computes"
    text = "//! Grids of the GGUF IQ types. Written by `tables/make_tables.py`; do not edit.\n//!\n"
    text += "//! Each word is one grid point: its coordinates' level indices, first coordinate in the low bits.\n"
    for name, key, levels, bits, what in GRIDS:
        points = tensors[key]
        indices = np.searchsorted(levels, points)
        assert np.array_equal(np.array(levels)[indices], points)
        words = (indices << (bits * np.arange(points.shape[1]))).sum(axis=1)
        back = np.array(levels)[(words[:, None] >> (bits * np.arange(points.shape[1]))) & ((1 << bits) - 1)]
        assert np.array_equal(back, points)
        text += f"\n/// {what}.\npub(super) static {name}: [u16; {len(words)}] = [\n" + hex_lines(words, 4) + "];\n"
    return text


def bases(tensors):
    text = "//! Hadamard matrices of orders that no power of two gives. Written by `tables/make_tables.py`; do not edit.\n//!\n"
    text += "//! Each row takes `ceil(order / 32)` words; bit `j % 32` of word `j / 32` is set where entry `j` is -1.\n"
    for order in BASES:
        matrix = tensors[f"had{order}_i8"].astype(np.int64)
        assert matrix.shape == (order, order) and np.array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.int64))
        per_row = -(-order // 32)
        padded = np.zeros((order, 32 * per_row), np.uint64)
        padded[:, :order] = matrix < 0
        words = (padded.reshape(order, per_row, 32) << np.arange(32, dtype=np.uint64)).sum(axis=2).ravel()
        text += f"\npub(super) static HAD{order}: [u32; {len(words)}] = [\n" + hex_lines(words, 8) + "];\n"
    return text


def hex_lines(words, digits):
    per_line = 100 // (digits + 4)
    cells = [f"0x{int(w):0{digits}x}," for w in words]
    return "".join("    " + " ".join(cells[i : i + per_line]) + "\n" for i in range(0, len(cells), per_line))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
