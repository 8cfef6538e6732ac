#!/usr/bin/env python3
"""Measures the shares of a GPU's limits that PyTorch's kernels reach, which `mantissa plan` assumes for GPUs.

    python3 bench/gpu.py out.json        (needs torch with CUDA; TORCHINDUCTOR_COMPILE_THREADS=1 on small machines)

Sixteen decoder layers of the shape of Llama 3.1 8B with random weights, and its head, in one CUDA graph: decoding one
token of each sequence at a depth, and a prompt without the head. bf16, FP8 (per row and token, `torch._scaled_mm`) and
4-bit integers in groups of 128 (`_weight_int4pack_mm`). Medians of 20 replays, of 10 for prompts.
"""

import json
import sys

import torch
import torch.nn.functional as F

HIDDEN, INNER, KV, HEADS, WIDTH, VOCAB, LAYERS = 4096, 14336, 1024, 32, 128, 128256, 16
SHAPES = {"qkv": (HIDDEN + 2 * KV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
WEIGHTS = LAYERS * sum(rows * cols for rows, cols in SHAPES.values())
BF16 = torch.bfloat16


def seconds(step, replays=20):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def quantize_fp8(x):
    scale = x.abs().amax(1, keepdim=True).float() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


class Dense:
    bits = 16

    def weight(self, weight):
        return weight

    def product(self, weight, x):
        return F.linear(x, weight)


class Fp8:
    bits = 8

    def __init__(self):
        self.quantize = torch.compile(quantize_fp8)

    def weight(self, weight):
        codes, scale = quantize_fp8(weight)
        return codes.t(), scale.t().contiguous()

    def product(self, weight, x):
        codes, scale = self.quantize(x)
        return torch._scaled_mm(codes, weight[0], scale_a=scale, scale_b=weight[1], out_dtype=BF16, use_fast_accum=True)


class Int4:
    bits = 4.25

    def weight(self, weight):
        rows, group = weight.shape[0], 128
        groups = weight.float().reshape(-1, group)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-6)
        codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).reshape(weight.shape)
        packed = ((codes[:, ::2] << 4) | codes[:, 1::2]).to(torch.uint8)
        pair = torch.stack([scale.reshape(rows, -1), (low + scale * 8).reshape(rows, -1)], 2)
        return torch.ops.aten._convert_weight_to_int4pack(packed, 8), pair.to(BF16).transpose(0, 1).contiguous()

    def product(self, weight, x):
        return torch.ops.aten._weight_int4pack_mm(x, weight[0], 128, weight[1])


class Model:
    def __init__(self, kind, dense, head):
        self.kind, self.head = kind, head
        self.layers = [{name: kind.weight(weight) for name, weight in layer.items()} for layer in dense]
        self.scale = torch.ones(HIDDEN, dtype=BF16, device="cuda")
        self.norm = torch.compile(lambda x, scale: F.rms_norm(x, (HIDDEN,), scale, 1e-5))
        self.act = torch.compile(lambda both: F.silu(both[:, :INNER]) * both[:, INNER:])

    def layer(self, weights, x, attend):
        product = self.kind.product
        x = x + product(weights["o"], attend(product(weights["qkv"], self.norm(x, self.scale))))
        return x + product(weights["down"], self.act(product(weights["gate_up"], self.norm(x, self.scale))))

    def decode(self, x, keys, values):
        for index, weights in enumerate(self.layers):
            # The queries of a group are rows of one product.
            attend = lambda qkv: F.scaled_dot_product_attention(
                qkv[:, :HIDDEN].view(len(x), KV // WIDTH, -1, WIDTH), keys[index], values[index]).reshape(len(x), HIDDEN)
            x = self.layer(weights, x, attend)
        return F.linear(x, self.head)

    def prompt(self, x):
        def attend(qkv):
            q, k, v = (part.view(1, len(x), -1, WIDTH).transpose(1, 2) for part in qkv.split([HIDDEN, KV, KV], 1))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return found.transpose(1, 2).reshape(len(x), HIDDEN)

        for weights in self.layers:
            x = self.layer(weights, x, attend)
        return x


def main():
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, dtype=BF16, device="cuda")
    dense = [{name: random(*shape) * 0.02 for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    head, rows = random(VOCAB, HIDDEN) * 0.02, []
    side = random(8192, 8192)
    peak = 2 * 8192**3 / seconds(lambda: side @ side)
    for name, kind in (("bf16", Dense()), ("fp8", Fp8()), ("int4-g128", Int4())):
        model = Model(kind, dense, head)
        for batch, depth in ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (128, 1024)):
            keys, x = random(LAYERS, batch, KV // WIDTH, depth, WIDTH), random(batch, HIDDEN)
            values = torch.randn_like(keys)
            time = seconds(lambda: model.decode(x, keys, values))
            read = WEIGHTS * kind.bits / 8 + 2 * VOCAB * HIDDEN + 4 * keys.numel()
            rows.append({"kind": name, "phase": "decode", "batch": batch, "depth": depth, "seconds": time, "bytes_per_s": read / time})
            print(rows[-1], flush=True)
        for tokens in (512, 2048, 8192):
            x = random(tokens, HIDDEN)
            time = seconds(lambda: model.prompt(x), 10)
            operations = 2 * tokens * WEIGHTS + 2 * LAYERS * HIDDEN * tokens**2
            rows.append({"kind": name, "phase": "prefill", "tokens": tokens, "seconds": time, "operations_per_s": operations / time})
            print(rows[-1], flush=True)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "product_of_8192_operations_per_s": peak, "rows": rows}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
