#!/usr/bin/env python3
"""Compares a training step of mantissa with PyTorch's: CPU time, and peak resident memory.

    bench/training.py STEP_BINARY [ROUNDS] [STEPS]

STEP_BINARY is the example `step` of mantissa-train; this interpreter needs torch. Both train the same architecture (a Llama of
8.3 M parameters, 16 x 256 random tokens, AdamW) on one thread. Each figure is the minimum over STEPS steps in a separate
process; rounds alternate. Prints medians over rounds, and medians of the ratio to torch's f32 within a round.
"""

import json
import re
import statistics
import subprocess
import sys
import time

OURS = [("fp32", "f32"), ("fp32", "8bit"), ("bf16", "f32"), ("bf16", "8bit"), ("bf16-pure-sr", "bf16"), ("fp16", "f32")]
TORCH = ["torch f32", "torch bf16 autocast"]
LAYERS, HIDDEN, HEADS, FFN, VOCAB, BATCH, LEN = 6, 288, 6, 768, 4096, 16, 256


def peer(name, steps):
    """Runs steps of PyTorch; prints CPU seconds of the best step and peak resident bytes."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = HIDDEN // HEADS
    angles = torch.outer(torch.arange(LEN).float(), 1e4 ** (-torch.arange(0, width, 2).float() / width))
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))

    def rotate(x):
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda n, m: nn.Linear(n, m, bias=False)
            self.q, self.k, self.v, self.o = (linear(HIDDEN, HIDDEN) for _ in range(4))
            self.gate, self.up, self.down = linear(HIDDEN, FFN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)
            self.first, self.second = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)

        def forward(self, x):
            h = self.first(x)
            q, k, v = (p(h).view(BATCH, LEN, HEADS, width).transpose(1, 2) for p in (self.q, self.k, self.v))
            h = F.scaled_dot_product_attention(rotate(q).to(v.dtype), rotate(k).to(v.dtype), v, is_causal=True)
            x = x + self.o(h.transpose(1, 2).reshape(BATCH, LEN, HIDDEN))
            h = self.second(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    model = nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), *(Layer() for _ in range(LAYERS)), nn.RMSNorm(HIDDEN, eps=1e-5),
        nn.Linear(HIDDEN, VOCAB, bias=False),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCAB, (BATCH, LEN))
    best = float("inf")
    for _ in range(steps):
        start = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name):
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        best = min(best, time.process_time() - start)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(json.dumps([best, peak]))


def ours(binary, policy, moments, steps):
    """Returns CPU seconds of the best step, and peak resident bytes."""
    out = subprocess.run([binary, str(steps), "1", policy, moments], capture_output=True, text=True, check=True).stdout
    times = [float(t) for t in re.findall(r"([\d.]+) CPU-s", out)]
    return min(times), float(re.search(r"peak resident +([\d.]+)", out)[1]) * 1e6


def main():
    if sys.argv[1] == "--peer":
        return peer(sys.argv[2], int(sys.argv[3]))
    given = sys.argv[1:]
    binary, rounds, steps = given + ["3", "3"][len(given) - 1 :]
    runs = {}
    for _ in range(int(rounds)):
        for name in TORCH:
            out = subprocess.run([sys.executable, __file__, "--peer", name, steps], capture_output=True, text=True, check=True)
            runs.setdefault(name, []).append(json.loads(out.stdout))
        for policy, moments in OURS:
            runs.setdefault(f"{policy}, {moments}", []).append(ours(binary, policy, moments, steps))
    print(f"{'':24} {'CPU-s':>7} {'of torch f32':>13} {'of torch bf16':>14} {'peak MB':>8}")
    for name, found in runs.items():
        ratio = lambda of: statistics.median(a[0] / b[0] for a, b in zip(found, runs[of]))
        seconds, peak = statistics.median(f[0] for f in found), max(f[1] for f in found)
        print(f"{name:24} {seconds:7.3f} {ratio(TORCH[0]):13.2f} {ratio(TORCH[1]):14.2f} {peak / 1e6:8.0f}")
    eight = [b[0] / a[0] for a, b in zip(runs["fp32, f32"], runs["fp32, 8bit"])]
    half = [b[0] / a[0] for a, b in zip(runs["fp32, f32"], runs["bf16, f32"])]
    print(f"8-bit moments / f32 moments {statistics.median(eight):.2f}; bf16 / fp32 {statistics.median(half):.2f}")


if __name__ == "__main__":
    main()
