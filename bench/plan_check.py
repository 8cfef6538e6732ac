#!/usr/bin/env python3
"""Recomputes what `mantissa plan` predicts, and fails where a figure differs by more than .5 %.

    bench/plan_check.py MANTISSA [--all] [--verbose]

Shares no code and no table with the program: shapes come from the models' published configs, bytes from the definitions
of the formats, times from the definitions in docs/guide/plan.md. Only memory, bandwidths, links and peaks of a device
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

TOLERANCE = 0.005
CHUNK = 2048  # tokens of a prompt at a time

# ---------------------------------------------------------------------------------------------------------------------
# Models: their matrices and caches, from the dimensions in their config.json.


@dataclass
class Matrix:
    """Equal matrices, one or more in each of `layers` layers."""

    part: str  # attention, mlp, experts, mixer
    role: str  # q, k, v, o, gate, up, down, other: as llama.cpp's file types distinguish them
    rows: int
    cols: int
    layers: int
    each: int = 1  # in a layer
    active: float = 1.0  # share of them that one token passes through

    @property
    def count(self):
        return self.layers * self.each

    @property
    def weights(self):
        return self.rows * self.cols


@dataclass
class Cache:
    """Layers with attention of one kind, of which `layers` keep keys and values."""

    layers: int
    heads: int  # key/value heads
    key: int  # width of a key, and of a value, in each of them
    value: int
    queries: int  # query heads
    window: int | None = None
    # Latent attention caches one vector of `key` elements for all heads. In a step of decoding a query has that width
    # and attends to the `latent` first ones; in a prompt heads have keys and values of their own widths.
    latent: int = 0
    head_key: int = 0
    head_value: int = 0

    def held(self, tokens):
        return min(tokens, self.window or tokens)

    def mean_seen(self, tokens):
        """Mean number of tokens that one of `tokens` causal tokens sees."""
        w = self.held(tokens)
        return w - w * w / (2 * tokens)

    def operations(self, phase):
        """Operations of one query and one key in one layer: of the score, and of the weighted value."""
        if self.latent and phase == "decode":
            return 2 * self.queries * (self.key + self.latent)
        key, value = (self.head_key, self.head_value) if self.latent else (self.key, self.value)
        return 2 * self.queries * (key + value)


@dataclass
class Model:
    name: str
    hidden: int
    layers: int
    vocab: int
    tied: bool
    matrices: list
    caches: list
    others: int  # norms, biases, routers
    inner: int  # width of what follows the attention, for one token
    mixed: int  # elements of queries, keys, values, attended values and latents of all layers
    grouped: bool  # at least four query heads share a key head
    expert_layers: int = 0
    experts: int = 0
    state: int = 0  # bytes of the recurrent states of a sequence
    state_heads: int = 1
    config: dict | None = None  # written as config.json; None: known by name

    @property
    def table(self):
        return self.vocab * self.hidden

    @property
    def linear(self):
        return sum(m.count * m.weights for m in self.matrices)

    @property
    def parameters(self):
        return self.linear + self.table * (1 if self.tied else 2) + self.others


def decoder(name, hidden, layers, heads, kv_heads, ffn, vocab, *, head=None, tied=False, bias=False, window=None,
            windowed=0, moe=None, mla=None, norms=2, head_norms=0, extra=0, attending=None, config=None):
    """Describes a decoder with a gated MLP. `moe` is (experts, per token, width, width of the shared one, dense layers),
    `mla` (latent of queries or 0, latent of keys, rotated, unrotated, value)."""
    head = head or hidden // heads
    attending = layers if attending is None else attending
    q, kv = heads * head, kv_heads * head
    matrices, latent = [], 0
    if mla:
        q_rank, rank, rotated, unrotated, value = mla
        width = rotated + unrotated
        if q_rank:
            matrices.append(Matrix("attention", "other", q_rank, hidden, attending))
        matrices += [
            Matrix("attention", "q", heads * width, q_rank or hidden, attending),
            Matrix("attention", "other", rank + rotated, hidden, attending),
            Matrix("attention", "v", heads * (unrotated + value), rank, attending),
            Matrix("attention", "o", hidden, heads * value, attending),
        ]
        mixed = 2 * heads * (width + value) + q_rank + rank + rotated
        latent = q_rank + rank
        caches = [Cache(attending, 1, rank + rotated, 0, heads, None, rank, width, value)]
    else:
        matrices += [
            Matrix("attention", "q", q, hidden, attending),
            Matrix("attention", "k", kv, hidden, attending),
            Matrix("attention", "v", kv, hidden, attending),
            Matrix("attention", "o", hidden, q, attending),
        ]
        mixed = 2 * q + 2 * kv
        full = Cache(attending - windowed, kv_heads, head, head, heads)
        near = Cache(windowed, kv_heads, head, head, heads, window)
        caches = [c for c in (full, near) if c.layers]
    dense, routers, inner = layers, 0, ffn
    if moe:
        experts, per_token, width, shared, dense = moe
        sparse = layers - dense
        for role, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            matrices.append(Matrix("experts", role, rows, cols, sparse, experts, per_token / experts))
        if shared:
            for role, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
                matrices.append(Matrix("mlp", role, rows, cols, sparse))
        routers, inner = sparse * experts * hidden, per_token * width + shared
    for role, rows, cols in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)) if dense else ():
        matrices.append(Matrix("mlp", role, rows, cols, dense))
    others = (norms * layers + 1) * hidden + attending * (head_norms * head + latent + bias * (q + 2 * kv)) + routers + extra
    return Model(name, hidden, layers, vocab, tied, matrices, caches, others, inner, attending * mixed,
                 heads >= 4 * kv_heads, layers - dense if moe else 0, moe[0] if moe else 0, config=config)


def config_of(model_type, hidden, layers, heads, kv_heads, ffn, vocab, context, **others):
    return dict(model_type=model_type, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=ffn, vocab_size=vocab, max_position_embeddings=context,
                rms_norm_eps=1e-6, **others)


def qwen3_next():
    """Qwen3-Next-80B-A3B: 36 layers of gated DeltaNet (16 heads of keys, 32 of values, width 128), 12 of attention whose
    queries have a gate; 512 experts."""
    dims = (2048, 48, 16, 2, 5120, 151_936)
    model = decoder("qwen3-next", *dims, head=256, moe=(512, 10, 512, 512, 0), head_norms=2, attending=12)
    keys, values, hidden = 16 * 128, 32 * 128, 2048
    for m in model.matrices:
        if m.role == "q":
            m.rows *= 2  # the gate
    model.mixed = 12 * 2 * (16 + 2) * 256
    made = 2 * keys + 2 * values + 2 * 32
    model.matrices += [
        Matrix("mixer", "other", 2 * keys + 2 * values, hidden, 36),
        Matrix("mixer", "other", 2 * 32, hidden, 36),
        Matrix("mixer", "other", hidden, values, 36),
    ]
    model.mixed += 36 * (made + values)
    model.others += 36 * ((2 * keys + values) * 4 + 2 * 32 + 128) + 48 * hidden
    # A state of 128 × 128 for each head of values, and three tokens of the convolution, in f32.
    model.state = 36 * 4 * (32 * 128 * 128 + 3 * (2 * keys + values))
    model.state_heads = 16
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)]
    model.config = config_of(
        "qwen3_next", *dims, 262_144, head_dim=256, layer_types=kinds, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False)
    return model


def models():
    oss = dict(head=64, window=128)
    kinds = lambda n, full: ["full_attention" if full(i) else "sliding_attention" for i in range(n)]
    gemma = dict(tie_word_embeddings=True)
    mistral, mixtral = (4096, 32, 32, 8, 14_336, 32_000), (4096, 32, 32, 8, 14_336, 32_000)
    gemma2, gemma3 = (3584, 42, 16, 8, 14_336, 256_000), (3840, 48, 16, 8, 15_360, 262_208)
    qwen3, moe2 = (4096, 36, 32, 8, 12_288, 151_936), (3584, 28, 28, 4, 18_944, 151_936)
    lite = (2048, 27, 16, 16, 10_944, 102_400)
    return {m.name: m for m in [
        decoder("SmolLM2-135M", 576, 30, 9, 3, 1536, 49_152, tied=True),
        decoder("Qwen2.5-0.5B", 896, 24, 14, 2, 4864, 151_936, tied=True, bias=True),
        decoder("Llama-3.2-1B", 2048, 16, 32, 8, 8192, 128_256, tied=True),
        decoder("Llama-2-7B", 4096, 32, 32, 32, 11_008, 32_000),
        decoder("Llama-3.1-8B", 4096, 32, 32, 8, 14_336, 128_256),
        decoder("Qwen2.5-32B", 5120, 64, 40, 8, 27_648, 152_064, bias=True),
        decoder("Llama-3.1-70B", 8192, 80, 64, 8, 28_672, 128_256),
        decoder("Llama-3.1-405B", 16_384, 126, 128, 8, 53_248, 128_256),
        decoder("Qwen3-30B-A3B", 2048, 48, 32, 4, 6144, 151_936, head=128, moe=(128, 8, 768, 0, 0), head_norms=2),
        decoder("Qwen3-235B-A22B", 4096, 94, 64, 4, 12_288, 151_936, head=128, moe=(128, 8, 1536, 0, 0), head_norms=2),
        decoder("gpt-oss-20b", 2880, 24, 64, 8, 2880, 201_088, windowed=12, moe=(32, 4, 2880, 0, 0),
                extra=24 * (64 + 2880 + 5120 + 32 + 32 * 3 * 2880), **oss),
        decoder("gpt-oss-120b", 2880, 36, 64, 8, 2880, 201_088, windowed=18, moe=(128, 4, 2880, 0, 0),
                extra=36 * (64 + 2880 + 5120 + 128 + 128 * 3 * 2880), **oss),
        decoder("DeepSeek-V3", 7168, 61, 128, 128, 18_432, 129_280, moe=(256, 8, 2048, 2048, 3),
                mla=(1536, 512, 64, 128, 128)),
        decoder("mistral", *mistral, window=4096, windowed=32,
                config=config_of("mistral", *mistral, 32_768, sliding_window=4096, tie_word_embeddings=False)),
        decoder("mixtral", *mixtral, moe=(8, 2, 14_336, 0, 0),
                config=config_of("mixtral", *mixtral, 32_768, num_local_experts=8, num_experts_per_tok=2,
                                 tie_word_embeddings=False)),
        decoder("gemma2-9b", *gemma2, head=256, tied=True, norms=4, window=4096, windowed=21,
                config=config_of("gemma2", *gemma2, 8192, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
                                 attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
                                 layer_types=kinds(42, lambda i: i % 2), hidden_activation="gelu_pytorch_tanh", **gemma)),
        decoder("gemma3-12b", *gemma3, head=256, tied=True, norms=4, head_norms=2, window=1024, windowed=40,
                config=config_of("gemma3_text", *gemma3, 131_072, head_dim=256, sliding_window=1024,
                                 query_pre_attn_scalar=256, layer_types=kinds(48, lambda i: i % 6 == 5),
                                 hidden_activation="gelu_pytorch_tanh", **gemma)),
        decoder("qwen3-8b", *qwen3, head_norms=2,
                config=config_of("qwen3", *qwen3, 40_960, head_dim=128, tie_word_embeddings=False)),
        decoder("qwen2-57b-a14b", *moe2, bias=True, moe=(64, 8, 2560, 20_480, 0), extra=28 * 3584,
                config=config_of("qwen2_moe", *moe2, 32_768, num_experts=64, num_experts_per_tok=8,
                                 moe_intermediate_size=2560, shared_expert_intermediate_size=20_480,
                                 decoder_sparse_step=1, norm_topk_prob=False, tie_word_embeddings=False)),
        decoder("deepseek-v2-lite", *lite, moe=(64, 6, 1408, 2816, 1), mla=(0, 512, 64, 128, 128),
                config=config_of("deepseek_v2", *lite, 32_768, n_routed_experts=64, num_experts_per_tok=6, n_group=1,
                                 topk_group=1, topk_method="greedy", moe_intermediate_size=1408, n_shared_experts=2,
                                 first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=False, scoring_func="softmax",
                                 routed_scaling_factor=1.0, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
                                 qk_nope_head_dim=128, v_head_dim=128, tie_word_embeddings=False)),
        qwen3_next(),
    ]}


# ---------------------------------------------------------------------------------------------------------------------
# Formats: bytes from their definitions.

# Weights of a block and its bytes (ggml-common.h).
GGUF = {"q8_0": (32, 34), "q6_k": (256, 210), "q5_k": (256, 176), "q4_k": (256, 144), "q3_k": (256, 110),
        "q2_k": (256, 84), "iq4_xs": (256, 136), "iq4_nl": (32, 18), "q5_0": (32, 22), "q5_1": (32, 24)}
# Types in place of those whose blocks do not divide a row (llama-quant.cpp).
NARROWER = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def gguf_row(kind, cols):
    """Bytes of a row."""
    if kind not in GGUF:
        return 2 * cols
    size, block = GGUF[kind]
    if cols % size == 0:
        return cols // size * block
    return gguf_row(NARROWER.get(kind, "f16"), cols)


def more_bits(layers):
    """Layers that `use_more_bits` of llama.cpp chooses."""
    return [i for i in range(layers) if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2]


def gguf_types(file_type, role, layers, grouped):
    """Type of the matrices of a role in each layer, without an importance matrix (`llama_tensor_get_type`)."""
    base = {"Q8_0": "q8_0", "Q6_K": "q6_k", "Q5_K_M": "q5_k", "Q4_K_M": "q4_k", "IQ4_XS": "iq4_xs", "Q3_K_M": "q3_k",
            "Q2_K": "q2_k"}[file_type]
    types = [base] * layers
    if file_type in ("Q4_K_M", "Q5_K_M") and role in ("v", "down"):
        for i in more_bits(layers):
            types[i] = "q6_k"
    elif file_type == "IQ4_XS" and role == "v" and grouped:
        types = ["q5_k"] * layers
    elif file_type == "IQ4_XS" and role == "down":
        types[:layers // 8] = ["q5_k"] * (layers // 8)
    elif file_type == "Q3_K_M" and role in ("v", "down", "o"):
        first = {"v": 2, "down": layers // 16, "o": 0}[role]
        types = ["q5_k"] * first + ["q4_k"] * (layers - first)
    elif file_type == "Q2_K" and role in ("v", "down", "o"):
        types = ["q4_k" if role == "v" and grouped else "q3_k"] * layers
    return types


def scheme_bytes(scheme, rows, cols):
    """Bytes of a matrix under a scheme: codes, 16-bit scales (NF4: f32), zero points of the codes' width."""
    base = scheme.split(":")[0]
    element, *rest = base.split("-")
    if base == "nf4":
        return rows * cols / 2 + 4 * math.ceil(rows * cols / 64)
    if element == "nvfp4":
        return rows * (cols / 2 + math.ceil(cols / 16)) + 4
    if element.startswith("mx"):
        bits = {"mxfp4": 4, "mxfp6": 6, "mxfp8": 8, "mxint8": 8}[element]
        return rows * (cols * bits / 8 + math.ceil(cols / 32))
    if base == "bf16":
        return 2 * rows * cols
    bits = {"int": lambda: int(element[3:]), "fp8": lambda: 8}[element[:3]]()
    asym = bits / 8 if "asym" in rest else 0
    groups = next((math.ceil(cols / int(r[1:])) for r in rest if r[0] == "g" and r[1:].isdigit()), 1)
    return rows * (cols * bits / 8 + groups * (2 + asym))


def matrix_bytes(precision, model, m):
    """Mean bytes of the matrices `m`."""
    name, convention, scheme = precision["name"], precision["convention"], precision["weights"]
    if convention == "gguf":
        types = gguf_types(name, m.role, m.layers, model.grouped)
        return m.rows * sum(gguf_row(kind, m.cols) for kind in types) / m.layers
    if convention == "mlx":  # an f16 scale and an f16 bias for 64 weights
        bits = int(scheme[3])
        return m.rows * (m.cols * bits / 8 + 4 * math.ceil(m.cols / 64))
    return scheme_bytes(scheme, m.rows, m.cols)


def table_bytes(precision, model):
    """Bytes of embedding and head. GGUF stores the head as Q6_K below 8 bits; a tied table is the head."""
    row = 2 * model.hidden
    rows = [row, row]
    if precision["convention"] == "gguf":
        base = gguf_types(precision["name"], "other", 1, False)[0]
        rows = [gguf_row(base, model.hidden), gguf_row("q8_0" if base == "q8_0" else "q6_k", model.hidden)]
    embedding, head = (model.vocab * r for r in rows)
    return (0 if model.tied else embedding), head


def kv_bytes(scheme, heads, width):
    """Bytes of a key or value of one token in one layer."""
    if width == 0:
        return 0
    element, *rest = scheme.split("-")
    if element in ("f16", "bf16"):
        return 2 * heads * width
    if element == "nvfp4":
        return heads * (width / 2 + math.ceil(width / 16))
    bits = 8 if element == "fp8" else int(element[3:])
    scale = 0 if "tensor" in rest else 2 + (bits / 8 if "asym" in rest else 0)
    return heads * (width * bits / 8 + scale)


# ---------------------------------------------------------------------------------------------------------------------
# Devices and their shares (docs/results/plan.md).

GPU = dict(bandwidth=(0.5, 0.7, 0.88), compute=(0.4, 0.6, 0.78))
APPLE = dict(bandwidth=(0.5, 0.68, 0.85), compute=(0.35, 0.5, 0.7))
CPU_BANDWIDTH, CPU_ATTENTION, CPU_SPREAD, CPU_FEW = 0.87, 0.18, (0.85, 1.0, 1.15), 64
GPU_ATTENTION, LATENCY, LINK = 0.6, 8e-6, 0.75


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
        return given + (["--kv", self.kv] if self.kv else [])

    def title(self):
        words = [self.model.name, self.hardware, f"{self.n} {self.by}" if self.n > 1 else "",
                 f"{self.batch} × {self.context}", self.train or self.kv or ""]
        return " ".join(w for w in words if w)

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

    def bytes(self, precision, scheme):
        model, n = self.model, self.n
        linears = sum(self.share(m.part) * m.count * matrix_bytes(precision, model, m) for m in model.matrices)
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
            if c.latent:
                width = 2 * heads * (c.head_key + c.head_value) + c.key
            else:
                width = 2 * heads * c.key + 2 * math.ceil(c.heads / n) * c.key
            widest = max(widest, width)
        tokens = min(CHUNK, self.context * own)
        logits = 4 * model.vocab * (own if self.by == "expert" else self.batch)
        return tokens * 2 * (2 * model.hidden + widest + 3 * model.inner / n) + logits

    def products(self, precision, tokens, of_device):
        """Bytes, weights and operations of the linear layers and of the head on one device in a step of `tokens` tokens, of
        which `of_device` are its own sequences'. An expert is read if any token calls it."""
        read = weights = operations = 0
        for m in self.model.matrices:
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
        linear = self.products(precision, sequences, of_device)
        head = table_bytes(precision, model)[1] / (1 if self.by in ("pipeline", "expert") else n)
        cached = of_device * (self.cache(scheme, depth) + self.state())  # states are read and written
        attention = sum(c.layers * c.operations("decode") * c.held(depth) for c in model.caches) * sequences / parts
        work = dict(linear=linear, head=(head, model.table, 2 * sequences * model.table / parts), cache=cached,
                    attention=attention, tokens=sequences)
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
        linear = self.products(precision, prompts * tokens / chunks, tokens / chunks)
        linear = [filling * chunks * x for x in linear]
        head = table_bytes(precision, model)[1] / (1 if self.by in ("pipeline", "expert") else n)
        head = [filling * x for x in (head, model.table, 2 * prompts * model.table / parts)]
        earlier = [tokens / chunks * i for i in range(1, chunks)]
        cached = sum(self.cache(scheme, t) + self.state() for t in earlier)
        if self.by == "tensor":
            cached *= prompts
        attention = sum(c.layers * c.operations("prompt") * c.mean_seen(tokens) for c in model.caches)
        attention *= prompts * tokens / parts
        work = dict(linear=linear, head=head, cache=filling * cached, attention=filling * attention,
                    tokens=prompts * tokens / chunks, head_tokens=prompts)
        moved = self.exchange(prompts * tokens, chunks)
        return [prompts * tokens / (t + moved) for t in self.seconds(precision, work)]

    def seconds(self, precision, work):
        """Seconds of a step on one device: low, middle, high."""
        if self.device.maker == "cpu":
            return self.seconds_on_processor(precision, work)
        device, unit = self.device, self.device.unit(precision)
        head_unit = unit if precision["convention"] == "gguf" else device.half
        times = []
        for bandwidth, compute in zip(device.shares["bandwidth"], device.shares["compute"]):
            read = (work["linear"][0] + work["head"][0] + work["cache"]) / (device.bandwidth * bandwidth)
            computed = work["linear"][2] / (device.rates[unit] * compute)
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
        for key, scheme, unit, tokens in (("linear", precision["weights"], unit, work["tokens"]),
                                          ("head", head, unit if gguf else device.half, work.get("head_tokens", work["tokens"]))):
            read, weights, operations = work[key]
            cost = next((cost for cost in device.costs if scheme.startswith(cost[0])), (scheme, 0, 4, 4))
            fixed, each = (0, cost[3]) if tokens >= CPU_FEW else (cost[1], cost[2])
            total += max(read / bandwidth, (fixed * weights + each * operations / 2) / device.rates[unit])
        total += max(work["cache"] / bandwidth, work["attention"] / (device.rates[device.half] * CPU_ATTENTION))
        return [total / spread for spread in CPU_SPREAD]

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
            ours, theirs = self.bytes(precision, scheme), row["bytes"]
            check(name, "weights", ours["weights"], theirs["linears"] + theirs["tables"])
            check(name, "KV cache", ours["kv"], theirs["kv"])
            check(name, "activations", ours["activations"], theirs["activations"])
            check(name, "fits", float(sum(ours.values()) <= self.device.memory), float(row["fits"]))
            check(name, "unit", float(self.device.unit(precision) == row["execution"]["unit"]), 1.0)
            for which, edge in enumerate(("low", "", "high")):
                decode, prompt = self.decoding(precision, scheme), self.prompt(precision, scheme)
                check(name, f"decode {edge}", decode[which], row["decode"]["tokens_per_s"][which])
                check(name, f"prefill {edge}", prompt[which], row["prefill"]["tokens_per_s"][which])
            time = self.batch * (self.prefill / prompt[1] + self.decode / decode[1])
            check(name, "seconds", time, row["seconds"])

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
            fits = [total + stored[which] <= self.device.memory for which in ("bytes", "recomputed")]
            check(name, "fits", float(any(fits)), float(row["fits"]))
            if name == answer["recipe"]:
                speed = self.training_speed(name in frozen, adapters, not fits[0])
                check(name, "tokens/s", speed, answer["tokens_per_s"][1])

    def training_speed(self, frozen, adapters, recomputed):
        """Tokens/s of one device: 2 operations a weight forward, 2 for the gradient of the input, 2 for that of the weight
        (not of frozen ones); layers, not the head, once more forward where they are recomputed."""
        model, again = self.model, int(recomputed)
        met = sum(m.count * m.active * m.weights for m in model.matrices)
        attention = sum(c.layers * c.operations("prompt") * c.mean_seen(self.context) for c in model.caches)
        passes = 2 if frozen else 3
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
        case("deepseek-v2-lite", "a100", n=8, batch=32), case("qwen3-next", "h200", batch=32, **wide),
        case("qwen3-next", "h100", n=4, batch=32),
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
            for n in (1, 2, 8) if hardware != "m4-max" else (1,):
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
    parser.add_argument("--verbose", action="store_true", help="print every figure")
    args = parser.parse_args()
    rows, differing, configurations = set(), set(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cpu.json").write_text(json.dumps(CPU))
        for case in cases(args.all):
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
