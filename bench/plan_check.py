#!/usr/bin/env python3
"""Recomputes what `mantissa plan` predicts, and fails where a figure differs by more than .5 %.

    bench/plan_check.py MANTISSA [--all] [--only TEXT] [--verbose]

Shares no code and no table with the program: shapes come from the models' published configs, bytes from the definitions
of the formats, times from the definitions in docs/explain/plan.md. Only memory, bandwidths, links and peaks of a device
are read from the program's own report. Prints a line for each figure that differs and a closing count.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from plan_formats import NoFormula, kv_bytes, matrix_bytes, of_part, table_bytes
from plan_models import Model, models

TOLERANCE = 0.005
CHUNK = 2048  # tokens of a prompt at a time

# ---------------------------------------------------------------------------------------------------------------------
# Devices and their shares (docs/results/plan.md).

GPU = dict(bandwidth=(0.5, 0.7, 0.88), compute=(0.4, 0.6, 0.78))
APPLE = dict(bandwidth=(0.5, 0.68, 0.85), compute=(0.35, 0.5, 0.7))
CPU_BANDWIDTH, CPU_ATTENTION, CPU_SPREAD, CPU_FEW = 0.87, 0.18, (0.85, 1.0, 1.15), 64
GPU_ATTENTION, LATENCY, LINK = 0.6, 8e-6, 0.75
# Host beside a GPU: shares of its bandwidth, and two channels of 8 bytes at 5.6 GT/s.
HOST, DDR5 = (0.75, 0.87, 1.0), 2 * 8 * 5.6e9


class Device:
    def __init__(self, report):
        self.rates = dict(report["rates"])
        self.maker = report["maker"]
        self.bandwidth, self.link, self.peers = report["bandwidth"], report["link"], report["peers"]
        self.memory = report["memory"] * report["usable"] - report["reserved"]
        self.block_scales, self.nvfp4 = report["block_scales"], report["nvfp4"]
        self.costs = [(k["scheme"], k["fixed"], k["token"], k["prompt"]) for k in report["kernels"]]
        self.shares = APPLE if self.maker == "apple" else GPU
        self.half = next((u for u in ("bf16", "f16") if u in self.rates), "f32")

    def unit(self, precision):
        """Unit that multiplies: that of the inputs if there is one, else 16 bits."""
        inputs, weights = precision["inputs"] or "", precision["weights"]
        if self.maker == "cpu":  # integers and tables of 16 levels as int8, floats of 8 bits and more as bf16
            unit = "bf16" if weights.startswith(("bf16", "fp8", "mxfp8")) else "int8"
            return unit if unit in self.rates else "f32"
        for start, unit, able in (("int8", "int8", True), ("int4", "int4", True), ("fp8", "fp8", True),
                                  ("mxfp8", "fp8", self.block_scales), ("mxfp6", "fp6", self.block_scales),
                                  ("mxfp4", "fp4", self.block_scales), ("nvfp4", "fp4", self.nvfp4)):
            if inputs.startswith(start):
                return unit if able and unit in self.rates else self.half
        return self.half

    def link_among(self, n):
        return self.link * (min(1, (n - 1) / self.peers) if self.peers else 1)


# ---------------------------------------------------------------------------------------------------------------------
# Inference.


@dataclass
class Case:
    model: Model
    hardware: str
    context: int = 4096
    batch: int = 1
    prefill: int = 2048
    decode: int = 512
    n: int = 1
    by: str = "tensor"
    kv: str | None = None
    host: str | None = None
    train: str | None = None
    zero: int = 0
    rank: int = 16
    device: Device = field(default=None)

    def arguments(self, folder):
        if self.model.config:
            file = folder / f"{self.model.name}.json"
            file.write_text(json.dumps(self.model.config))
            subject = [str(file)]
        else:
            subject = ["--params", self.model.name]
        hardware = str(folder / "cpu.json") if self.hardware == "cpu" else self.hardware
        given = ["plan", *subject, "--hardware", hardware, "--context", self.context, "--batch", self.batch, "--devices",
                 self.n, "--json"]
        if self.train:
            return given + ["--train", self.train, "--zero", self.zero, "--rank", self.rank]
        given += ["--prefill", self.prefill, "--decode", self.decode]
        given += ["--parallel", self.by] if self.n > 1 else []
        given += ["--host", self.host] if self.host else []
        return given + (["--kv", self.kv] if self.kv else [])

    def title(self):
        words = [self.model.name, self.hardware, f"{self.n} {self.by}" if self.n > 1 else "",
                 f"{self.batch} × {self.context}", self.train or self.kv or ""]
        return " ".join(w for w in words if w)

    def fits(self, total, theirs):
        """True if the bytes fit; `theirs` where they are as many as the memory within the tolerance."""
        near = abs(total / self.device.memory - 1) <= TOLERANCE
        return theirs if near else total <= self.device.memory

    # What one device holds, and reads or computes in a step.

    def own(self, sequences):
        """Sequences of one device, the most of any."""
        return math.ceil(sequences / self.n) if self.by in ("data", "expert") else sequences

    def stage(self, parts):
        """Share of indivisible parts on the fullest device."""
        return math.ceil(parts / self.n) / parts

    def share(self, part):
        """Share of the matrices of a part on one device."""
        if self.by == "pipeline":
            return self.stage(self.model.layers)
        if self.by == "expert":
            return self.stage(self.model.experts) if part == "experts" else 1
        return 1 if self.by == "data" and part in ("attention", "mixer") else 1 / self.n

    def token_bytes(self, cache, scheme):
        """Bytes of one token in one layer on one device: its heads, at least one, or the whole latent."""
        heads = math.ceil(cache.heads / self.n) if self.by == "tensor" else cache.heads
        return kv_bytes(scheme, heads, cache.key) + kv_bytes(scheme, heads, cache.value)

    def state(self):
        """Bytes of the recurrent states of a sequence on one device."""
        return self.model.state * (self.stage(self.model.state_heads) if self.by == "tensor" else 1)

    def cache(self, scheme, tokens):
        """Bytes of the keys, values and states of a sequence on one device, all layers."""
        return sum(c.layers * c.held(tokens) * self.token_bytes(c, scheme) for c in self.model.caches) + self.state()

    def read(self, scheme, tokens):
        """Bytes that a query reads of them: the index of all tokens, and those that it chooses. States are written back."""
        total = 2 * self.state()
        for c in self.model.caches:
            index = kv_bytes(scheme, 1, c.index)
            rest = self.token_bytes(c, scheme) - index
            total += c.layers * (c.held(tokens) * index + c.attended(tokens) * rest)
        return total

    def bytes(self, precision, scheme):
        model, n = self.model, self.n
        linears = sum(self.share(m.part) * m.count * matrix_bytes(precision, model, m) for m in model.matrices)
        linears += self.share("experts") * 2 * model.expert_biases
        embedding, head = table_bytes(precision, model)
        others = 2 * model.others
        if self.by == "pipeline" and n > 1:  # the first device has the embedding, the last the head
            tables = max(embedding, head) + self.stage(model.layers) * others
        else:
            tables = (embedding + head + others) / (1 if self.by == "expert" else n)
        kv = self.own(self.batch) * self.cache(scheme, self.context)
        if self.by == "pipeline":
            kv *= self.stage(model.layers)
        return dict(weights=linears + tables, kv=kv, activations=self.activations())

    def activations(self):
        """Bytes of a chunk of a prompt in 16 bits (the stream and its norm, queries, keys, values and attended values,
        gate, up and product) and f32 logits of every sequence."""
        model, own = self.model, self.own(self.batch)
        n = self.n if self.by == "tensor" else 1
        widest = 0
        for c in model.caches:
            heads = math.ceil(c.queries / n)
            if c.latent and not c.chosen:
                width = 2 * heads * (c.head_key + c.head_value) + c.key
            elif c.latent:
                width = heads * (c.key - c.index + c.latent) + c.key
            else:
                width = 2 * heads * c.key + 2 * math.ceil(c.heads / n) * c.key
            widest = max(widest, width)
        tokens = min(CHUNK, self.context * own)
        logits = 4 * model.vocab * (own if self.by == "expert" else self.batch)
        return tokens * 2 * (2 * model.hidden + widest + 3 * model.inner / n) + logits

    def unquantized(self, tokens):
        """Bytes, weights and operations of norms, routers and indexers, in 16 bits."""
        weights = self.model.others / (1 if self.by in ("pipeline", "expert") else self.n)
        parts = 1 if self.by == "pipeline" else self.n
        return 2 * weights, weights, 2 * tokens * self.model.others / parts

    def products(self, precision, tokens, apart=False):
        """Bytes, weights and operations of the linear layers, or of those stored apart, on one device in a step of `tokens`
        tokens. An expert is read if any token calls it."""
        read = weights = operations = 0
        for m in self.model.matrices:
            if (of_part(precision, m.part) is not precision) != apart:
                continue
            called = 1 - (1 - m.active) ** tokens
            share = {"pipeline": 1, "expert": 1 if m.part != "experts" else 1 / self.n}.get(self.by, self.share(m.part))
            read += share * m.count * called * matrix_bytes(precision, self.model, m)
            weights += share * m.count * called * m.weights
            own = 1 / self.n if self.by != "pipeline" else 1
            operations += own * 2 * tokens * m.count * m.active * m.weights
        return read, weights, operations

    def decoding(self, precision, scheme):
        """Tokens/s of decoding, in the middle of an answer."""
        model, n = self.model, self.n
        depth = min(self.prefill + self.decode // 2, self.context)
        if self.by == "pipeline":  # devices work on groups of sequences, one after another
            sequences = of_device = math.ceil(self.batch / n)
            # With a group for every device, each waits for the fullest one.
            slowest = n * self.stage(model.layers) if self.batch >= n else 1
        else:
            of_device, slowest = self.own(self.batch), 1
            sequences = of_device * n if self.by in ("data", "expert") else self.batch
        parts = 1 if self.by == "pipeline" else n
        linear = self.products(precision, sequences)
        head = table_bytes(precision, model)[1] / (1 if self.by in ("pipeline", "expert") else n)
        cached = of_device * self.read(scheme, depth)
        attention = sum(c.operations(depth, False) for c in model.caches) * sequences / parts
        work = dict(linear=linear, apart=self.products(precision, sequences, True), others=self.unquantized(sequences), cache=cached, attention=attention, tokens=sequences,
                    head=(head, model.table, 2 * sequences * model.table / parts))
        return [self.batch / (slowest * t + self.exchange(sequences, 1)) for t in self.seconds(precision, work)]

    def prompt(self, precision, scheme):
        """Tokens/s of a prompt."""
        model, n, tokens = self.model, self.n, self.prefill
        chunks = math.ceil(tokens / CHUNK)
        prompts = n if self.by in ("data", "expert") else 1
        filling = 1
        if self.by == "pipeline":  # fills and drains; each stage waits for the fullest one
            filling = (chunks + n - 1) / chunks * self.stage(model.layers)
        parts = 1 if self.by == "pipeline" else n
        linear = [filling * chunks * x for x in self.products(precision, prompts * tokens / chunks)]
        apart = [filling * chunks * x for x in self.products(precision, prompts * tokens / chunks, True)]
        others = [filling * chunks * x for x in self.unquantized(prompts * tokens / chunks)]
        head = table_bytes(precision, model)[1] / (1 if self.by in ("pipeline", "expert") else n)
        head = [filling * x for x in (head, model.table, 2 * prompts * model.table / parts)]
        earlier = [tokens / chunks * i for i in range(1, chunks)]
        cached = sum(self.read(scheme, t) for t in earlier)
        if self.by == "tensor":
            cached *= prompts
        attention = sum(c.operations(tokens, True, self.device.maker != "cpu") for c in model.caches)
        attention *= prompts * tokens / parts
        work = dict(linear=linear, apart=apart, others=others, head=head, cache=filling * cached, attention=filling * attention,
                    tokens=prompts * tokens / chunks, head_tokens=prompts)
        moved = self.exchange(prompts * tokens, chunks)
        return [prompts * tokens / (t + moved) for t in self.seconds(precision, work)]

    def seconds(self, precision, work):
        """Seconds of a step on one device: low, middle, high."""
        if self.device.maker == "cpu":
            return self.seconds_on_processor(precision, work)
        device, unit = self.device, self.device.unit(precision)
        apart_unit = device.unit({**precision, **(precision.get("apart") or {})})
        head_unit = unit if precision["convention"] == "gguf" else device.half
        times = []
        for bandwidth, compute in zip(device.shares["bandwidth"], device.shares["compute"]):
            read = work["linear"][0] + work["apart"][0] + work["others"][0] + work["head"][0] + work["cache"]
            read /= device.bandwidth * bandwidth
            computed = work["linear"][2] / (device.rates[unit] * compute)
            computed += work["apart"][2] / (device.rates[apart_unit] * compute)
            computed += work["others"][2] / (device.rates[device.half] * compute)
            computed += work["head"][2] / (device.rates[head_unit] * compute)
            computed += work["attention"] / (device.rates[device.half] * compute * GPU_ATTENTION)
            times.append(max(read, computed))
        return times

    def seconds_on_processor(self, precision, work):
        """Reads, or the measured cost of a kernel: a fixed one for each weight and one for each token."""
        device, total = self.device, 0
        bandwidth = device.bandwidth * CPU_BANDWIDTH
        unit = device.unit(precision)
        gguf = precision["convention"] == "gguf"
        head = ("q8_0" if precision["name"] == "Q8_0" else "q6_k") if gguf else "bf16"
        step = work["tokens"]
        apart = {**precision, **(precision.get("apart") or {})}
        for key, scheme, unit, tokens in (("linear", precision["weights"], unit, step),
                                          ("apart", apart["weights"], device.unit(apart), step), ("others", "bf16", device.half, step),
                                          ("head", head, unit if gguf else device.half, work.get("head_tokens", step))):
            read, weights, operations = work[key]
            cost = next((cost for cost in device.costs if scheme.startswith(cost[0])), (scheme, 0, 4, 4))
            fixed, each = (0, cost[3]) if tokens >= CPU_FEW else (cost[1], cost[2])
            total += max(read / bandwidth, (fixed * weights + each * operations / 2) / device.rates[unit])
        total += max(work["cache"] / bandwidth, work["attention"] / (device.rates[device.half] * CPU_ATTENTION))
        return [total / spread for spread in CPU_SPREAD]

    def split(self, precision, scheme, host, theirs):
        """Layers of a GGUF file on the GPU as llama.cpp fills it: the output layer, then layers from the last on, each with its
        keys and values, beside the activations. The embedding is on the host. Returns `-ngl`, the bytes on both sides and the
        tokens/s of decoding: the reads of both sides one after the other. `theirs` decides where a layer reaches the memory within
        the tolerance."""
        model, device = self.model, self.device
        head = table_bytes(precision, model)[1]
        # A tied table is the head on the GPU, and the embedding on the host.
        embedding = head if model.tied else table_bytes(precision, model)[0]
        weights = sum(m.count * matrix_bytes(precision, model, m) for m in model.matrices)
        weights += 2 * (model.others + model.expert_biases)
        layer = (weights + self.batch * self.cache(scheme, self.context)) / model.layers
        depth = min(self.prefill + self.decode // 2, self.context)
        reads = self.products(precision, self.batch)[0] + self.products(precision, self.batch, True)[0]
        reads += 2 * model.others + self.batch * self.read(scheme, depth)
        count, gpu = 0, self.activations()
        for size in [head] + [layer] * model.layers:
            near = abs((gpu + size) / device.memory - 1) <= TOLERANCE
            if count >= theirs if near else gpu + size > device.memory:
                break
            count, gpu = count + 1, gpu + size
        below = model.layers - max(count - 1, 0)
        on_host = embedding + below * layer + (0 if count or model.tied else head)
        own = (head if count else 0) + (model.layers - below) / model.layers * reads
        others = below / model.layers * reads + (0 if count else head)
        rates = [self.batch / (own / device.bandwidth / a + others / host / b)
                 for a, b in zip(device.shares["bandwidth"], HOST)]
        return count, gpu if count else 0, on_host, rates

    def exchange(self, tokens, chunks):
        """Seconds of the exchange between devices in 16 bits: ring all-reduces, gather and scatter, dispatch and combine,
        or states at the borders of stages."""
        model, n, link = self.model, self.n, self.device.link_among(self.n)
        if n < 2 or link == 0:
            return 0
        states, rate = 2 * tokens * model.hidden, link * LINK
        if self.by == "tensor":
            return 2 * model.layers * (LATENCY + 2 * (n - 1) / n * states / rate)
        if self.by == "data":
            return model.layers * (2 * LATENCY + 2 * (n - 1) / n * states / rate)
        if self.by == "expert":
            called = next(m.active * m.each for m in model.matrices if m.part == "experts")
            others = (n - 1) * (1 - (1 - 1 / n) ** called)
            return model.expert_layers * (2 * LATENCY + 2 * others / n * states / rate)
        return (n + chunks - 2) * (LATENCY + states / chunks / rate)

    def compare(self, report, check):
        check("", "parameters", self.model.parameters, report["parameters"])
        for row in report["rows"]:
            precision, scheme, name = row["precision"], row["kv"]["scheme"], row["precision"]["name"]
            try:
                ours = self.bytes(precision, scheme)
            except NoFormula as error:
                check(name, f"no formula for {error}", 0, 1)
                continue
            theirs = row["bytes"]
            check(name, "weights", ours["weights"], theirs["linears"] + theirs["tables"])
            check(name, "KV cache", ours["kv"], theirs["kv"])
            check(name, "activations", ours["activations"], theirs["activations"])
            check(name, "fits", self.fits(sum(ours.values()), row["fits"]), row["fits"])
            check(name, "unit", float(self.device.unit(precision) == row["execution"]["unit"]), 1.0)
            for which, edge in enumerate(("low", "", "high")):
                decode, prompt = self.decoding(precision, scheme), self.prompt(precision, scheme)
                check(name, f"decode {edge}", decode[which], row["decode"]["tokens_per_s"][which])
                check(name, f"prefill {edge}", prompt[which], row["prefill"]["tokens_per_s"][which])
            time = self.batch * (self.prefill / prompt[1] + self.decode / decode[1])
            check(name, "seconds", time, row["seconds"])
            split = row.get("offload")
            alone = self.n == 1 and self.device.maker not in ("apple", "cpu")
            wanted = alone and not row["fits"] and precision["convention"] == "gguf" and "llama.cpp" in row["loads"]["engines"]
            check(name, "is split", float(wanted), float(split is not None))
            if wanted and split:
                bandwidth = float(self.host.removesuffix("GB/s")) * 1e9 if self.host else DDR5
                count, gpu, host, rates = self.split(precision, scheme, bandwidth, split["gpu_layers"])
                check(name, "-ngl", count, split["gpu_layers"])
                check(name, "layers", self.model.layers + 1, split["layers"])
                check(name, "GPU", gpu, split["gpu_bytes"])
                check(name, "host", host, split["host_bytes"])
                for ours, theirs in zip(rates, split["tokens_per_s"]):
                    check(name, "split decode", ours, theirs)

    # Training.

    def training(self, report, check):
        model, d, tokens = self.model, self.n, self.context * self.batch
        layer = 2 * (4 * model.hidden + model.mixed / model.layers + 3 * model.inner)
        stored = dict(bytes=tokens * model.layers * layer,
                      recomputed=tokens * (model.layers * 2 * model.hidden + layer))
        logits = 6 * model.vocab * tokens
        adapters = sum(m.count * self.rank * (m.rows + m.cols) for m in model.matrices)
        others = 2 * (model.parameters - model.linear)
        frozen = dict(lora=2 * model.linear + others, qlora=model.linear * NF4_DQ / 8 + others)
        answer = report["training"]
        for row in answer["rows"]:
            name = row["name"]
            if name in frozen:
                each, state, base = 16, 16 * adapters, frozen[name]
            elif name in STATES:
                each = zero_bytes(STATES[name], self.zero, d)
                state, base = each * model.parameters, 0
                check(name, "trainer", trainer_bytes(model, row["policy"], STATES[name][-1]), row["trainer_bytes"] or 0)
            else:
                check(name, "a formula of its own", 0, 1)
                continue
            check(name, "bytes per parameter", each, row["bytes_per_parameter"])
            for which, activations in stored.items():
                theirs = row[which]
                check(name, f"{which}: state", state + base, theirs["state"] + theirs["frozen"])
                check(name, f"{which}: activations", activations, theirs["activations"])
                check(name, f"{which}: logits", logits, theirs["logits"])
            total = state + base + logits
            check(name, "fits", self.fits(total + stored["recomputed"], row["fits"]), row["fits"])
            recomputed = not self.fits(total + stored["bytes"], not row["needs_recompute"])
            if name == answer["recipe"]:
                speed = self.training_speed(name in frozen, recomputed)
                check(name, "tokens/s", speed, answer["tokens_per_s"][1])

    def training_speed(self, frozen, recomputed):
        """Tokens/s of one device: 2 operations a weight forward, 2 for the gradient of the input, 2 for that of the weight
        (not of frozen ones); layers, not the head, once more forward where they are recomputed."""
        model, again = self.model, int(recomputed)
        met = sum(m.count * m.active * m.weights for m in model.matrices)
        attention = sum(c.operations(self.context, True) for c in model.caches)
        passes = 2 if frozen else 3
        met += model.others
        operations = 2 * ((passes + again) * met + passes * model.table) + (3 + again) * attention
        if frozen:
            own = sum(m.count * m.active * self.rank * (m.rows + m.cols) for m in model.matrices)
            operations += (3 + again) * 2 * own
        return self.device.rates[self.device.half] * self.device.shares["compute"][1] / operations


# Bits of NF4 with double quantization: 4, an 8-bit absmax for 64, an f32 one for 256 of those (arXiv 2305.14314, section 3).
NF4_DQ = 4 + 8 / 64 + 32 / (64 * 256)

# Bytes of a moment in 8 bits (blocks of 256) and 4 bits (blocks of 128) with an f32 scale (arXiv 2110.02861; torchao).
M8, M4 = 1 + 4 / 256, 0.5 + 4 / 128
# Bytes per parameter as published: weights and copies, gradients, master and the optimizer's own gradients, moments.
STATES = {
    "fp32": (4, 4, 0, 8), "bf16": (2, 2, 4, 8), "bf16-fp32-grads": (2, 4, 4, 8), "fp16": (2, 2, 8, 8),
    "bf16-remainder": (2, 4, 2, 8), "bf16-no-master": (2, 2, 0, 8), "bf16-pure": (2, 2, 0, 4),
    "bf16-adam8": (2, 2, 0, 2 * M8), "bf16-adam8-master": (2, 2, 4, 2 * M8), "bf16-adam4": (2, 2, 0, 2 * M4),
    "bf16-lion": (2, 2, 4, 4), "bf16-lion8": (2, 2, 4, M8), "bf16-adafactor": (2, 2, 4, 0),
    # FP8 by row and by column is two copies of a byte; E4M3 and a byte of scale for 16 (NVFP4) or 32 (MXFP4) values.
    "fp8-te": (2 + 2, 4, 4, 8), "fp8-primary": (1 + 1, 4, 4, 8), "deepseek-v3": (1, 4, 4, 4), "ms-amp-o3": (1, 1, 2, 3),
    "int8-sr": (1, 2, 0, 2 * M8), "nvfp4": (2 * (0.5 + 1 / 16), 2, 4, 8), "quartet": (2 * (0.5 + 1 / 32), 2, 4, 4),
}
# Weights, master and gradients of a policy of `mantissa train` (docs/reference/training.md).
POLICIES = {"fp32": (4, 0, 4), "fp16": (2, 4, 4), "bf16": (2, 4, 4), "bf16-remainder": (2, 2, 4), "bf16-pure-sr": (2, 0, 2)}


def zero_bytes(states, stage, devices):
    """Bytes per parameter on one of the devices (arXiv 1910.02054): stage 1 divides the optimizer's, 2 gradients, 3 weights."""
    weights, gradients, master, moments = states
    of = lambda least, size: size / devices if stage >= least else size
    return of(3, weights) + of(2, gradients) + of(1, master + moments)


def trainer_bytes(model, policy, moments):
    """Bytes per parameter that `mantissa train` takes. Below 16 bits weights are f32; INT8 ones a byte and f32 scales of rows."""
    if policy is None:
        return 0
    if policy == "int8-sr":
        rows = sum(m.count * m.rows for m in model.matrices)
        own = model.linear + 4 * rows + 4 * (model.parameters - model.linear)
        return own / model.parameters + 4 + moments
    return sum(POLICIES.get(policy, (4, 0, 4))) + moments


# ---------------------------------------------------------------------------------------------------------------------
# Cases.


def cases(every):
    known = models()

    def case(name, hardware, **options):
        return Case(known[name], hardware, **options)

    wide = dict(context=32_768, prefill=30_000, decode=1024)
    small = [
        case("Llama-3.1-8B", "h100"), case("Llama-3.1-8B", "h100", batch=256, kv="fp8"),
        case("Llama-3.1-8B", "rtx4090", kv="int8", **wide), case("Llama-3.1-8B", "cpu", batch=4, kv="f16"),
        case("Qwen2.5-0.5B", "cpu", kv="int8"), case("Qwen2.5-0.5B", "rtx4090", batch=8),
        case("SmolLM2-135M", "t4", batch=64), case("Llama-3.2-1B", "m4-max"), case("Llama-2-7B", "a100", batch=16),
        case("Qwen2.5-32B", "rtx4090", **wide), case("Qwen2.5-32B", "b200", batch=512, n=2, kv="fp8"),
        case("Llama-3.1-70B", "h100", n=4, batch=32), case("Llama-3.1-70B", "mi300x", n=2, kv="int4", **wide),
        case("Llama-3.1-70B", "h100", n=8, by="pipeline", batch=64), case("Llama-3.1-70B", "h100", n=3, by="pipeline"),
        case("Llama-3.1-70B", "a100", n=4, by="data", batch=30), case("Llama-3.1-405B", "b200", n=8, batch=16),
        case("Llama-3.1-405B", "h200", n=16, by="pipeline", batch=16, kv="fp8"),
        case("Qwen3-30B-A3B", "h100", batch=64), case("Qwen3-30B-A3B", "h100", n=8, batch=64, kv="f16", **wide),
        case("Qwen3-30B-A3B", "a100", n=2, by="expert", batch=7), case("Qwen3-30B-A3B", "cpu"),
        case("Qwen3-235B-A22B", "h200", n=8, by="expert", batch=512, kv="fp8"),
        case("gpt-oss-20b", "rtx5090", **wide), case("gpt-oss-20b", "h100", n=16, batch=16),
        case("gpt-oss-120b", "mi355x", batch=64), case("gpt-oss-120b", "h100", n=4, by="data", batch=128),
        case("DeepSeek-V3", "h200", n=8, batch=64, kv="f16", **wide),
        case("DeepSeek-V3", "h200", n=8, by="data", batch=64, kv="fp8", **wide),
        case("DeepSeek-V3", "h200", n=16, by="expert", batch=1024, kv="f16"),
        case("DeepSeek-V3", "b200", n=8, by="pipeline", batch=64, kv="f16"), case("DeepSeek-V3", "gb300", n=4),
        case("mistral", "rtx4090", **wide), case("mistral", "a100", n=2, batch=32, prefill=6000, context=8192),
        case("mixtral", "h100", n=2, batch=8), case("mixtral", "a100", n=4, by="expert", batch=64),
        case("gemma2-9b", "h100", context=8192, prefill=7000, batch=16), case("gemma3-12b", "l40s", **wide),
        case("gemma3-12b", "h100", n=4, batch=64, kv="fp8"), case("qwen3-8b", "b300", batch=128),
        case("qwen2-57b-a14b", "h100", n=4, by="data", batch=64), case("deepseek-v2-lite", "rtx4090", **wide),
        case("deepseek-v2-lite", "a100", n=8, batch=32), case("deepseek-v2-lite", "cpu", kv="f16"),
        case("qwen3-next", "h200", batch=32, **wide),
        case("qwen3-next", "h100", n=4, batch=32),
        case("deepseek-v3.2", "h200", n=8, by="data", batch=64, kv="f16", **wide),
        case("deepseek-v3.2", "b200", n=8, batch=4, context=65_536, prefill=60_000, decode=1000),
        # More than the GPU holds: split with the host.
        case("Llama-3.1-70B", "rtx4090"), case("Llama-3.1-70B", "rtx5080", host="60GB/s", kv="int8"),
        case("Qwen3-30B-A3B", "rtx5070ti", batch=4), case("gpt-oss-120b", "rx7900xtx", host="204.8GB/s"),
        case("Llama-3.2-1B", "bandwidth=100GB/s,memory=1.5GB,f16=10TFLOPS"), case("gemma2-9b", "bandwidth=448GB/s,memory=8GB,bf16=60TFLOPS"),
        case("deepseek-v2-lite", "rtx4080", context=32_768, prefill=30_000), case("Qwen2.5-32B", "l4", batch=3),
        case("Llama-3.1-405B", "bandwidth=1TB/s,memory=1GB,bf16=100TFLOPS"), case("Llama-3.1-8B", "m3"),
        case("Llama-3.1-8B", "m5-pro", **wide), case("Llama-3.1-70B", "h20"), case("mistral", "a10", batch=4), case("mistral", "rtx-a6000"),
        case("qwen3-next", "h100-pcie", batch=2),
    ]
    small += [
        case(name, hardware, train=kind, context=context, batch=batch, n=n, zero=zero, rank=rank)
        for name, hardware, kind, context, batch, n, zero, rank in [
            ("Llama-3.1-8B", "h100", "full", 2048, 1, 1, 0, 16), ("Llama-3.1-8B", "h100", "full", 8192, 4, 8, 3, 16),
            ("Llama-3.1-8B", "a100", "lora", 4096, 2, 1, 0, 64), ("Llama-2-7B", "h100", "full", 4096, 1, 64, 1, 16),
            ("Llama-3.1-70B", "h100", "qlora", 2048, 1, 1, 0, 16), ("Llama-3.1-70B", "h200", "full", 8192, 1, 64, 2, 16),
            ("Qwen2.5-0.5B", "rtx4090", "full", 2048, 4, 1, 0, 16), ("Llama-3.2-1B", "h100", "full", 2048, 2, 1, 0, 16),
            ("Qwen3-30B-A3B", "h200", "full", 4096, 1, 16, 3, 16), ("Qwen3-30B-A3B", "h100", "qlora", 4096, 1, 1, 0, 8),
            ("gpt-oss-20b", "b200", "lora", 8192, 1, 1, 0, 32), ("DeepSeek-V3", "h100", "full", 4096, 1, 2048, 3, 16),
            ("DeepSeek-V3", "h200", "full", 4096, 1, 512, 3, 16), ("mistral", "a100", "full", 32_768, 1, 8, 3, 16),
            ("gemma2-9b", "h100", "full", 8192, 1, 4, 3, 16), ("qwen3-next", "h200", "full", 4096, 1, 32, 3, 16),
            ("deepseek-v2-lite", "h100", "lora", 4096, 2, 1, 0, 16),
        ]
    ]
    if not every:
        return small
    more = []
    for name, model in known.items():
        for hardware in ("t4", "a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "gb300", "mi300x", "mi355x", "m4-max"):
            counts = (1,) if hardware == "m4-max" else (1, 2, 8)
            # Engines refuse devices that do not divide the query heads.
            for n in (n for n in counts if model.caches[0].queries % n == 0):
                ways = ["tensor"] if n == 1 else ["tensor", "data", "pipeline"] + ["expert"] * (model.experts > 0)
                for by in ways:
                    for batch, context, kv in ((1, 4096, "f16"), (64, 4096, "fp8"), (13, 8192, "int4"), (4, 8192, None)):
                        more.append(case(name, hardware, n=n, by=by, batch=batch, context=context, kv=kv,
                                         prefill=context * 3 // 4, decode=700))
            for kind in ("full", "lora", "qlora"):
                for n, zero in ((1, 0), (8, 1), (64, 3)):
                    more.append(case(name, hardware, train=kind, context=4096, n=n, zero=zero))
        more += [case(name, "cpu", batch=batch, kv=kv) for batch in (1, 4, 128) for kv in ("f16", "int8")]
    return small + more


# Limits of a processor, as `bench` reports them: 8 threads of Zen 4.
CPU = dict(threads=8, level="avx512", machine_read_gb_per_s=210.0, machine_int8_gops=5200.0,
           machine_bf16_gflops=2600.0, machine_f32_gflops=1300.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa")
    parser.add_argument("--all", action="store_true", help="every model on every device, in every way of sharing")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--verbose", action="store_true", help="print every figure")
    args = parser.parse_args()
    rows, differing, configurations = set(), set(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cpu.json").write_text(json.dumps(CPU))
        for case in (case for case in cases(args.all) if args.only in case.title()):
            command = [args.mantissa, *map(str, case.arguments(folder))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: {done.stderr}")
            report = json.loads(done.stdout)
            case.device = Device(report["hardware"])
            configurations += 1

            def check(row, what, ours, theirs):
                key = (configurations, row)
                rows.add(key)
                wrong = abs(theirs - ours) > TOLERANCE * max(abs(ours), abs(theirs))
                if wrong:
                    differing.add(key)
                if wrong or args.verbose:
                    ratio = f"{theirs / ours:.4f}" if ours else "-"
                    print(f"{case.title()}: {row}: {what}: ours {ours:.6g}, theirs {theirs:.6g}, ratio {ratio}")

            (case.training if case.train else case.compare)(report, check)
    print(f"{configurations} configurations, {len(rows)} rows, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
