"""Writes tests/data/train/optimizers.safetensors: six steps of Adafactor, Lion, Muon and SOAP on small tensors.

Adafactor is that of transformers 5.24, in f32. Lion and SOAP are restatements in f64 of the papers' algorithms (SOAP in
the order of its authors' implementation). Muon is a restatement in f64; `muon_torch` is torch.optim.Muon, whose
iteration runs in bf16. Needs torch, transformers, safetensors.

    python tests/data/make_optimizers.py
"""

import os

import torch
from safetensors.torch import save_file
from transformers.optimization import Adafactor

STEPS = 6
HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {"tall": (16, 8), "wide": (8, 16), "square": (8, 8), "vector": (8,)}

torch.manual_seed(20)
start = {name: 0.3 * torch.randn(shape) for name, shape in SHAPES.items()}
grads = {name: torch.randn(STEPS, *shape) * torch.logspace(0, -1.5, STEPS).view(-1, *[1] * len(shape)) for name, shape in SHAPES.items()}
out = {f"{name}.p0": p for name, p in start.items()} | {f"{name}.grads": g for name, g in grads.items()}


def steps(make, names, label):
    """Runs a torch optimizer and records the parameters after every step."""
    for name in names:
        p = torch.nn.Parameter(start[name].clone())
        optimizer, all = make([p]), []
        for g in grads[name]:
            p.grad = g.clone()
            optimizer.step()
            all.append(p.detach().clone())
        out[f"{name}.{label}"] = torch.stack(all).float()


def restated(make, names, label):
    """Runs a function of (parameters, gradient, step from 1) in f64."""
    for name in names:
        p, step, all = start[name].double(), make(), []
        for t, g in enumerate(grads[name].double(), 1):
            p = step(p, g, t)
            all.append(p.clone())
        out[f"{name}.{label}"] = torch.stack(all).float()


ALL = list(SHAPES)
fixed = dict(relative_step=False, warmup_init=False)
steps(lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, weight_decay=0.1, **fixed), ALL, "adafactor_fixed")
steps(lambda p: Adafactor(p, lr=3e-2, beta1=0.9, clip_threshold=0.5, **fixed), ALL, "adafactor_momentum")
steps(lambda p: Adafactor(p, relative_step=True, warmup_init=False), ALL, "adafactor_relative")
steps(lambda p: Adafactor(p, relative_step=True, warmup_init=True), ALL, "adafactor_warmup")
steps(lambda p: torch.optim.Muon(p, lr=2e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"), ["tall", "wide", "square"], "muon_torch")


def lion():
    m = 0.0
    lr, b1, b2, wd = 1e-3, 0.9, 0.99, 0.1

    def step(p, g, t):
        nonlocal m
        direction = torch.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        return p * (1 - lr * wd) - lr * direction

    return step


def muon(scale, nesterov):
    b = 0.0
    lr, beta, wd = 2e-2, 0.95, 0.1

    def step(p, g, t):
        nonlocal b
        b = beta * b + (1 - beta) * g
        x = beta * b + (1 - beta) * g if nesterov else b
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return p * (1 - lr * wd) - lr * scale(*p.shape) * x

    return step


def soap():
    lr, b1, b2, eps, wd, frequency = 1e-2, 0.95, 0.9, 1e-8, 0.1, 2
    s = {"k": 0}

    def step(p, g, t):
        if t == 1:
            s["gg"] = [(1 - b2) * g @ g.T, (1 - b2) * g.T @ g]
            s["q"] = [torch.linalg.eigh(gg)[1].flip(1) for gg in s["gg"]]
            s["m"], s["v"] = torch.zeros_like(g), torch.zeros_like(g)
            return p
        (l, r), s["k"] = s["q"], s["k"] + 1
        rotated = l.T @ g @ r
        s["m"] = b1 * s["m"] + (1 - b1) * rotated
        s["v"] = b2 * s["v"] + (1 - b2) * rotated**2
        rate = lr * (1 - b2 ** s["k"]) ** 0.5 / (1 - b1 ** s["k"])
        p = (p - rate * (l @ (s["m"] / (s["v"].sqrt() + eps)) @ r.T)) * (1 - lr * wd)
        s["gg"] = [b2 * gg + (1 - b2) * new for gg, new in zip(s["gg"], (g @ g.T, g.T @ g))]
        if s["k"] % frequency == 0:
            m, new = l @ s["m"] @ r.T, []
            for axis, (gg, q) in enumerate(zip(s["gg"], s["q"])):
                order = torch.argsort(torch.diag(q.T @ gg @ q), descending=True)
                s["v"] = s["v"].index_select(axis, order)
                new.append(torch.linalg.qr(gg @ q[:, order])[0])
            s["q"] = new
            s["m"] = new[0].T @ m @ new[1]
        return p

    return step


restated(lion, ALL, "lion")
matrices = ["tall", "wide", "square"]
restated(lambda: muon(lambda r, c: max(1, r / c) ** 0.5, True), matrices, "muon_jordan")
restated(lambda: muon(lambda r, c: 0.2 * max(r, c) ** 0.5, False), matrices, "muon_rms_plain")
restated(soap, ["square"], "soap")
save_file(out, os.path.join(HERE, "train", "optimizers.safetensors"))
