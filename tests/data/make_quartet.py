#!/usr/bin/env python3
"""Records Quartet's forward quantizer with its gradient, and its backward quantizer, restated in PyTorch.

    python make_quartet.py train

Castro et al. 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models", arXiv 2505.14669. Own code.

Forward (section 4, QuEST in MXFP4): every run of 32 values is rotated by the orthonormal Hadamard matrix; the scale of a
group of 32 is the power of two at or below 2.92247856 / 6 * std + 1e-8 (population standard deviation); elements are
E2M1, to nearest, ties to even, saturating. A value passes its gradient on if its magnitude under the scale is below 6;
the gradient is rotated back. Backward: scale 2^(floor(log2 amax) - 2) * 4/3, without rotation here; recorded are scale
and the two neighbours on the grid, between which stochastic rounding chooses.

Writes quartet.safetensors: x, gradient, values, passed [8, 96]; neighbours [2, 8, 96]. All but the rotations are in
float64 until stored, so that no scale depends on the rounding of a logarithm.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def hadamard(n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / n**0.5


def nearest(x):
    """E2M1 to nearest; of two equally near, the one with the even mantissa."""
    magnitude = x.abs().clamp(max=6.0)
    high = torch.bucketize(magnitude, GRID).clamp(max=7)
    low = (high - 1).clamp(min=0)
    down, up = magnitude - GRID[low], GRID[high] - magnitude
    code = torch.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)
    return GRID[code] * x.sign()


def main():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 96, generator=generator)
    x[1] *= 1e-3
    x[2, 5::32] *= 30  # outliers: clipped after the rotation or before it
    x[3] = x[3].sign() * x[3].abs() ** 3
    x[4] = 0
    gradient = torch.randn(8, 96, generator=generator)
    matrix = hadamard(32)

    rotated = (x.double().view(-1, 32) @ matrix).float().double()
    scale = rotated.std(dim=-1, correction=0, keepdim=True) * (2.92247856 / 6) + 1e-8
    scale = scale.log2().floor().exp2()
    values = nearest(rotated / scale) * scale
    mask = (rotated / scale).abs() < 6
    passed = (gradient.double().view(-1, 32) * mask) @ matrix.T

    groups = x.double().view(-1, 32)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, (amax.log2().floor() - 2).exp2(), torch.full_like(amax, 2.0**-127)) * (4 / 3)
    magnitude = (groups / scale).abs()
    high = torch.bucketize(magnitude, GRID).clamp(max=7)
    low = torch.where(GRID[high] == magnitude, high, (high - 1).clamp(min=0))
    neighbours = torch.stack([GRID[low] * groups.sign() * scale, GRID[high] * groups.sign() * scale])

    save_file(
        {
            "x": x,
            "gradient": gradient,
            "values": values.float().view(8, 96).contiguous(),
            "mask": mask.to(torch.uint8).view(8, 96).contiguous(),
            "passed": passed.float().view(8, 96).contiguous(),
            "neighbours": neighbours.float().view(2, 8, 96).contiguous(),
        },
        Path(sys.argv[1]) / "quartet.safetensors",
    )


if __name__ == "__main__":
    main()
