"""Bytes of formats for `plan_check.py`, from their definitions."""

import math


class NoFormula(Exception):
    """A format that is not defined here."""


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
            "Q2_K": "q2_k", "Q5_0": "q5_0", "IQ4_NL": "iq4_nl"}.get(file_type)
    if not base:
        raise NoFormula(file_type)
    types = [base] * layers
    if file_type in ("Q4_K_M", "Q5_K_M") and role in ("v", "down"):
        for i in more_bits(layers):
            types[i] = "q6_k"
    elif file_type in ("IQ4_XS", "IQ4_NL") and role == "v" and grouped:
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
        bits = {"mxfp4": 4, "mxfp6": 6, "mxfp8": 8, "mxint8": 8}.get(element)
        if not bits:
            raise NoFormula(scheme)
        return rows * (cols * bits / 8 + math.ceil(cols / 32))
    if base == "bf16":
        return 2 * rows * cols
    if element.startswith("trellis"):  # tiles of 16 x 16, a sign for each row and column, a scale for each rotation of rows
        rotated = math.gcd(rows, 128)
        return math.ceil(rows / 16) * math.ceil(cols / 16) * 32 * int(element[7:]) + (rows + cols) / 8 + 2 * rows / rotated
    if base == "fp8-e4m3-tensor":
        return rows * cols + 2
    if not (element == "fp8" and "channel" in rest or element[:3] == "int" and element[3:].isdigit()):
        raise NoFormula(scheme)
    bits = 8 if element == "fp8" else int(element[3:])
    asym = bits / 8 if "asym" in rest else 0
    groups = next((math.ceil(cols / int(r[1:])) for r in rest if r[0] == "g" and r[1:].isdigit()), 1)
    return rows * (cols * bits / 8 + groups * (2 + asym))


def of_part(precision, part):
    """Precision of a part of the layers: some store attention or shared layers otherwise than experts."""
    apart = precision.get("apart") or {"parts": []}
    return {**precision, **apart, "apart": None} if part in apart["parts"] else precision


def matrix_bytes(precision, model, m):
    """Mean bytes of the matrices `m`."""
    precision = of_part(precision, m.part)
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
    if not (element == "fp8" or element[:3] == "int" and element[3:].isdigit()):
        raise NoFormula(scheme)
    bits = 8 if element == "fp8" else int(element[3:])
    scale = 0 if "tensor" in rest else 2 + (bits / 8 if "asym" in rest else 0)
    return heads * (width * bits / 8 + scale)
