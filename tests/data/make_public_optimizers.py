"""Writes tests/data/train/public_optimizers.json: twelve steps of public implementations of Lion, Muon, SOAP and
Adafactor on small matrices, in f32; the weights after the first, second and last step.

Lion: lion-pytorch. Muon and Adafactor: torch.optim. Muon's iteration runs in bf16 there; here the same code runs with
float32 in its place, since bf16 leaves only the direction to compare. SOAP: pytorch-optimizer, a port of the authors'
implementation, on a square matrix: the null space of the preconditioner of a wide one has no unique basis.
Start and gradients are formulas, repeated in the test: see `values`.

    pip install torch lion-pytorch pytorch-optimizer numpy
    python tests/data/make_public_optimizers.py
"""

import importlib.metadata
import json
import os
import types

import numpy
import torch
import torch.optim._muon as muon
from lion_pytorch import Lion
from pytorch_optimizer import SOAP

STEPS, KEPT = 12, (1, 2, 12)
HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {"tall": (8, 4), "wide": (4, 8), "square": (4, 4)}


def values(shape, step):
    """Multiples of 2^-10 in [-1, 1): bits 12 to 22 of a linear congruential sequence; step 0 is the start."""
    state, all = 12345 + 1000 * step, []
    for _ in range(shape[0] * shape[1]):
        state = (state * 1664525 + 1013904223) % 2**32
        all.append(((state >> 12) % 2048 - 1024) / 1024)
    return torch.tensor(numpy.array(all, dtype=numpy.float32)).reshape(shape)


def run(make, shape):
    p = torch.nn.Parameter(0.25 * values(shape, 0))
    optimizer, kept = make([p]), {}
    for step in range(1, STEPS + 1):
        p.grad = values(shape, step) * 2.0 ** -(step // 3)
        optimizer.step()
        if step in KEPT:
            kept[step] = [round(x, 7) for x in p.detach().flatten().tolist()]
    return kept


class Float32(types.SimpleNamespace):
    """torch with float32 in place of bfloat16."""

    bfloat16 = torch.float32

    def __getattr__(self, name):
        return getattr(torch, name)


muon.torch = Float32()
adafactor = dict(beta2_decay=-0.8, d=1.0, weight_decay=0.0)
runs = {
    "lion": (SHAPES, lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)),
    "muon_original": (SHAPES, lambda p: muon.Muon(p, lr=2e-2, weight_decay=0.1, adjust_lr_fn="original")),
    "muon_match_rms_adamw": (SHAPES, lambda p: muon.Muon(p, lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")),
    "muon_spectral_unclamped": (SHAPES, lambda p: muon.Muon(p, lr=2e-2, weight_decay=0.1, adjust_lr_fn="spectral_unclamped")),
    "muon_no_nesterov": (SHAPES, lambda p: muon.Muon(p, lr=2e-2, weight_decay=0.1, nesterov=False)),
    "adafactor": (SHAPES, lambda p: torch.optim.Adafactor(p, lr=1e-2, **adafactor)),
    "soap_3": (["square"], lambda p: SOAP(p, lr=1e-2, weight_decay=0.1, precondition_frequency=3)),
    "soap_1": (["square"], lambda p: SOAP(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0, precondition_frequency=1)),
}
record = {"versions": {name: importlib.metadata.version(name) for name in ("torch", "lion-pytorch", "pytorch-optimizer")}}
record["runs"] = {label: {name: run(make, SHAPES[name]) for name in names} for label, (names, make) in runs.items()}
with open(os.path.join(HERE, "train", "public_optimizers.json"), "w") as file:
    file.write(json.dumps(record, separators=(",", ":")).replace('},"', '},\n"') + "\n")
