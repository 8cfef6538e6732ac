#!/usr/bin/env python3
"""Decodes an EXL2 folder like exllamav2's kernels, and compares with our decoder.

    python exl2_weights.py DIR DENSE.safetensors

exllamav2 runs only on GPUs; this script reimplements its decoding in numpy, from `exllamav2_ext/cuda/q_matrix.cu` (make_group_map, the scales) and
`quant/qdq_{2,3,4,5,6,8}.cuh` before the shuffle. Each weight must equal the tensor of its name in DENSE.safetensors
(`cargo run --release -p mantissa-model --example dense -- DIR DENSE.safetensors`) bit for bit. Exit 1 if one does not.
Also checks the kernels' requirements: groups from the widest to the narrowest codes, whole words, q_weight padded to 32 columns.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def main():
    folder, dense = Path(sys.argv[1]), load_file(sys.argv[2])
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored.update(load_file_words(file))
    modules = [name.removesuffix(".q_weight") for name in stored if name.endswith(".q_weight")]
    equal, bits = 0, set()
    for module in modules:
        weight, widths = decode({key.removeprefix(f"{module}."): value for key, value in stored.items() if key.startswith(f"{module}.")})
        expected = dense[f"{module}.weight"]
        equal += bool(np.array_equal(weight[: expected.shape[0]], expected))
        bits |= widths
    print(json.dumps({"modules": len(modules), "equal": equal, "bits": sorted(bits)}))
    sys.exit(not modules or equal != len(modules))


def load_file_words(path):
    """Tensors of the EXL2 parts; others may have dtypes that numpy lacks."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if ".q_" in name}


def decode(parts):
    words = parts["q_weight"].view(np.uint32)
    groups = parts["q_groups"].view(np.uint16).reshape(-1, 2).astype(int)
    height, width = parts["q_invperm"].shape[0], words.shape[1]
    assert width % 32 == 0, "q_weight is padded to whole warps"
    assert (np.diff(groups[:, 0]) <= 0).all(), "groups come from the widest codes to the narrowest"
    # make_group_map: the rows of a group follow from the words up to the next group; the last one takes the rest.
    rows_of, row = [], 0
    for i, (bits, start) in enumerate(groups):
        if i + 1 < len(groups):
            assert (groups[i + 1, 1] - start) * 32 % bits == 0
            rows = (groups[i + 1, 1] - start) * 32 // bits
        else:
            rows = height - row
        rows_of.append(rows)
        row += rows
    shifts = 4 * np.arange(8)
    roots = (parts["q_scale"].view(np.uint32)[:, :, None] >> shifts & 15).reshape(len(groups), -1)[:, :width].astype(np.int32) + 1
    # The loader divides by 256 in half precision, and the kernel multiplies in it.
    largest = (parts["q_scale_max"].astype(np.float32) / 256).astype(np.float16)
    out, row = np.zeros((height, width), np.float32), 0
    for g, ((bits, start), rows) in enumerate(zip(groups, rows_of)):
        scale = ((roots[g] * roots[g]).astype(np.float16) * largest[g]).astype(np.float32)
        for r in range(rows):
            at = r * bits
            low = words[start + at // 32].astype(np.uint64)
            high = words[start + at // 32 + 1].astype(np.uint64) if at % 32 + bits > 32 else 0
            code = ((low | high << np.uint64(32)) >> np.uint64(at % 32)).astype(np.int64) & ((1 << bits) - 1)
            out[row] = (code - (1 << (bits - 1))).astype(np.float32) * scale
            row += 1
    # Row r of the matrix is at position q_invperm[r].
    return out[parts["q_invperm"].astype(int)].T, {int(bits) for bits in groups[:, 0]}


if __name__ == "__main__":
    main()
