#!/usr/bin/env python3
"""Cuts the golden reference files down to the subset committed under tests/data/golden.

    python make_golden_subset.py SHARED_GOLDEN OUT

Every kept tensor keeps its name, its dtype and its meaning; only rows, columns or whole tensors are left out, so one
test routine reads either the originals or this subset. Each file's `subset` metadata entry states what was cut.
Needs numpy and safetensors. The output is a pure function of the input: running it twice gives equal bytes.

After each cut the script recomputes, in plain numpy float32 and independently of the packages that produced the
originals, everything that the cut could break (block and row scales, tensor-wide maxima, the value of every kept code).
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

MAX_TOTAL_BYTES = 3_450_000
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
}
WIDE_FORMATS = ("f16", "bf16")


def main(source, out):
    out.mkdir(parents=True, exist_ok=True)
    makers = (
        elements_decode,
        elements_encode,
        codebooks,
        mx_formats,
        mx_compressed_tensors,
        nvfp4,
        int_affine,
        bnb_blockwise,
        gguf_blocks,
        fp8_tiles,
        kv_cache,
        hadamard,
        stochastic_rounding,
        gptq,
        hqq,
        awq_smoothquant,
        optimizer,
    )
    total = 0
    decode = read(source, "elements_decode")[0]
    for maker in makers:
        name = maker.__name__
        tensors, metadata = read(source, name)
        kept, metadata = maker(tensors, metadata, decode)
        size = write(out / f"{name}.safetensors", kept, metadata)
        total += size
        print(f"{name:24} {len(kept):4} of {len(tensors):4} tensors {size:8} bytes")
    print(f"{'total':24} {total:27} bytes")
    assert total <= MAX_TOTAL_BYTES, f"{total} bytes is more than {MAX_TOTAL_BYTES}"


# --- one function per file: (tensors, metadata, element tables) -> (kept tensors, metadata) ---


def optimizer(tensors, metadata, _decode):
    """Rows that are whole blocks of 256 of the flattened tensor."""
    rows, cols = 8, tensors["p0"].shape[1]
    blocks = rows * cols // 256
    assert blocks * 256 == rows * cols
    kept = {}
    for name, x in tensors.items():
        if name.startswith("torchao") and x.ndim == 2:
            # Scales, or codes of 4 bits, two per byte.
            block = 2 if x.dtype == np.uint8 else 128 if "4bit" in name else 256
            x = x[:, : rows * cols // block]
        elif x.ndim >= 2 and x.shape[-1] == cols:
            x = x[..., :rows, :]
        elif "absmax" in name:
            x = x[:, :blocks]
        kept[name] = np.ascontiguousarray(x)
    # The block's absmax is that of the kept first moments.
    last = kept["bnb_adamw8bit.qmap1"][kept["bnb_adamw8bit.state1_codes"][-1]] * np.repeat(
        kept["bnb_adamw8bit.absmax1"][-1], 256
    ).reshape(rows, cols)
    largest = np.abs(last).reshape(blocks, 256).max(axis=1)
    # The most negative level of the map is -0.993.
    assert np.all(largest >= 0.99 * kept["bnb_adamw8bit.absmax1"][-1])
    return kept, note(metadata, f"rows 0..{rows}")


def elements_decode(tensors, metadata, _decode):
    kept = {k: v for k, v in tensors.items() if k.split(".")[0] not in WIDE_FORMATS}
    return kept, note(metadata, "f16 and bf16 left out: elements_encode holds pairs for both")


def elements_encode(tensors, metadata, decode):
    kept = {}
    for name, values in tensors.items():
        family = name.split(".")[0]
        keep = wide_sample(tensors, family) if family in WIDE_FORMATS else slice(None)
        kept[name] = values[keep]
    for family in WIDE_FORMATS:
        check_wide_codes(kept, family)
    for family in sorted({k.split(".")[0] for k in kept if k.endswith(".x_bits")} - set(WIDE_FORMATS)):
        check_representable_values(kept, family, decode[f"{family}.decode"])
    return kept, note(metadata, "f16, bf16: every 8th sample, and all zeros, non-finite, f32-subnormal and just-overflowing inputs")


def codebooks(tensors, metadata, _decode):
    names = (
        "bnb.nf4",
        "bnb.fp4",
        "bnb.dynamic8_signed",
        "bnb.dynamic8_unsigned",
        "bnb.linear8_signed",
        "bnb.linear8_unsigned",
        "torchao_optim.dynamic4_signed",
    )
    kept = {k: tensors[k] for k in names}
    assert all(len(v) in (16, 256) and np.abs(v).max() == 1 for v in kept.values())
    return kept, note(metadata, "the seven books that are number formats")


def mx_formats(tensors, metadata, decode):
    labels = json.loads(metadata["row_labels"])
    # Rows whose feature is not in their first two blocks: the only outlier is in block 6, and block 2 holds -0.
    starts = [{"outliers_1pct_x60": 6, "zero_blocks": 2}.get(label, 0) for label in labels]
    special_starts = [0] * len(tensors["x_special"])
    kept = {}
    for name, values in tensors.items():
        if "microxcaling" in name:
            continue
        is_special = name == "x_special" or ".special." in name
        kept[name] = cut_blocks(values, special_starts if is_special else starts, tensors["x"].shape[1], 32, 2)
    check_mx_rows(kept["x"], labels)
    check_mx_special(kept["x_special"], json.loads(metadata["special_row_labels"]))
    for fmt, element in MX_ELEMENTS.items():
        check_mx_ocp(kept, fmt, element and decode[f"{element}.decode"])
    return kept, note(metadata, f"2 of 8 blocks per row, first kept block per row: {starts}; microxcaling left out")


MX_ELEMENTS = {
    "mxfp8_e4m3": "f8_e4m3fn",
    "mxfp8_e5m2": "f8_e5m2",
    "mxfp6_e2m3": "f6_e2m3fn",
    "mxfp6_e3m2": "f6_e3m2fn",
    "mxfp4_e2m1": "f4_e2m1fn",
    "mxint8": None,
}


def mx_compressed_tensors(tensors, metadata, _decode):
    labels = json.loads(metadata["row_labels"])
    starts = [{"zero_blocks": 2}.get(label, 0) for label in labels]
    kept = {k: cut_blocks(v, starts, tensors["x"].shape[1], 32, 2) for k, v in tensors.items()}
    check_mx_rows(kept["x"], labels)
    for fmt in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"):
        scale, values, dequant = (kept[f"{fmt}.compressed_tensors.{p}"] for p in ("scale_f32", "values", "dequant"))
        assert np.array_equal(np.repeat(scale, 32, axis=1) * values, dequant), fmt
    return kept, note(metadata, f"2 of 4 blocks per row, first kept block per row: {starts}")


def nvfp4(tensors, metadata, _decode):
    rows = {"weights_gaussian": slice(16, 32)}
    names = ("weights_gaussian", "all_zero", "mixed", "single_huge", "tiny_1e-38", "large_1e37", "dyadic_amax42", "dyadic_negzero")
    producers = ("compressed_tensors", "transformer_engine_1x16")
    kept = {k: v for k, v in tensors.items() if k.startswith("swizzle_")}
    for tensor in names:
        for name, values in tensors.items():
            if name.split(".")[0] != tensor:
                continue
            if name == f"{tensor}.x" or name.split(".")[1] in producers:
                kept[name] = values[rows[tensor]] if tensor in rows and values.shape != (1,) else values
            elif not name.rsplit(".", 1)[1].startswith("dequant") or tensor == "mixed":
                # The other four rules: scales and codes; their values follow from those.
                kept[name] = values[rows[tensor]] if tensor in rows and values.shape != (1,) else values
        check_nvfp4_globals(kept, tensor)
    return kept, note(metadata, "eight tensors, values under compressed_tensors and transformer_engine_1x16 only; weights_gaussian rows 16..32, which hold its amax")


def int_affine(tensors, metadata, _decode):
    rows = 8
    kept = {k: v for k, v in tensors.items() if k.startswith("pack_int32.")}
    for name, values in tensors.items():
        tensor, *rest = name.split(".")
        if tensor in ("gaussian", "dyadic", "outlier_channels", "skewed_positive") and not rest[0].endswith("_tensor"):
            assert len(values) == 32, name
            kept[name] = values[:rows]
    assert not kept["outlier_channels.x"].any(axis=1).all(), "the all-zero row is among the first eight"
    check_int_symmetric_scales(kept)
    return kept, note(metadata, "first 8 rows of four tensors, per-tensor granularity left out; pack_int32 whole")


def bnb_blockwise(tensors, metadata, _decode):
    inputs = ("rows", "last_dim_not_multiple_of_block", "ragged", "code_midpoints", "weights")
    weight_rows = 16
    kept = {}
    for name, values in tensors.items():
        tensor, *rest = name.split(".")
        if tensor in inputs and (rest == ["x"] or rest[0] in ("nf4_b64", "nf4_b128", "fp4_b64", "fp4_b128")):
            # Blocks run over the flattened tensor: 16 of 64 rows (5120 values) are whole blocks of 64 and of 128.
            kept[name] = values[: len(values) * weight_rows // 64] if tensor == "weights" else values
        elif rest[0].endswith("_b64_double_quant") and tensor == "rows":
            kept[name] = values
        elif rest[0].startswith("dynamic8_") and rest[0].endswith("_b256") and tensor != "weights":
            # Decoded values are products of a code's level and absmax; one tensor is enough.
            if rest[1] != "dequant_nearest" or tensor != "rows":
                kept[name] = values
    for name in [k for k in kept if k.endswith(".absmax") and "dynamic8" not in k]:
        check_flat_absmax(kept, name)
    return kept, note(metadata, "weights: first 16 rows of nf4 and fp4; double quantization of rows; dynamic maps in blocks of 256 of all but weights")


def gguf_blocks(tensors, metadata, _decode):
    kept = {}
    for name, values in tensors.items():
        family, *rest = name.split(".")
        if "grid_i8" in rest or "ksigns" in rest or name == "imatrix.student_t3":
            continue  # tables of the format, which are part of the crate
        if family == "imatrix":
            kept[name] = values
            continue
        if rest[0] in ("edge", "gaussian", "student_t3"):
            written = family in GGUF_WRITTEN or family == "input" or rest[-1].endswith("bytes")
            # The edge inputs test encoding; random blocks cover decoding.
            if not written or rest[0] == "student_t3" or (rest[0] == "edge" and "dequant" in rest[-1]):
                continue
            values = values[:2] if rest[0] == "gaussian" else values
        elif rest[0] == "random_bytes":
            values = values[:8]
        elif family == "MXFP4" and rest[0] == "all_scales":
            values = values[np.r_[0:4, 120:132, 250:256]]
        kept[name] = values
    check_gguf_q8_0(kept)
    return kept, note(metadata, "8 random blocks of every type; edge and gaussian (2 rows) inputs")


def fp8_tiles(tensors, metadata, _decode):
    kept = {}
    for name, values in tensors.items():
        kind, tensor, *rest = name.split(".")
        if kind == "act" and tensor in ("outliers", "ragged_200", "tiny", "zeros"):
            kept[name] = values[:4]
        elif kind == "weight" and tensor == "ragged":
            # The right tiles, ragged below and to the right.
            kept[name] = values[:, 1:] if rest[-1] == "scale" else values[:, 128:]
        elif kind == "weight" and tensor == "heavy" and rest[-1] != "dequant":
            # One of two tiles side by side; a tile cannot be cut.
            kept[name] = values[:, : values.shape[1] // 2]
        elif kind in ("plain", "fp4") and not (kind == "plain" and rest and rest[-1] == "dequant"):
            kept[name] = values
    check_fp8_tiles(kept)
    return kept, note(metadata, "act: 4 rows of four tensors; weight.heavy: the left tile; weight.ragged: the right tiles; plain: no values")


def kv_cache(tensors, metadata, _decode):
    return tensors_of_heads(tensors, 2), note(metadata, "first 2 of 4 heads; per-tensor FP8 left out")


def hadamard(tensors, metadata, _decode):
    lengths = ("n16", "n72", "n96", "n112", "n128", "n160")
    kept = {}
    for name, values in tensors.items():
        family, *rest = name.split(".")
        if family in lengths and rest[0] != "signs_i8" and "matrix" not in rest[0]:
            values = values[:2]
        if family in (*lengths, "te_rht16", "had12_i8", "had20_i8", "had172_i8"):
            kept[name] = values
    for n in lengths:
        norm = np.linalg.norm
        assert np.allclose(norm(kept[f"{n}.x_f64"], axis=1), norm(kept[f"{n}.y_f64"], axis=1), rtol=1e-13)
    return kept, note(metadata, f"{lengths}, 2 of 4 vectors, and three of the base matrices")


def stochastic_rounding(tensors, metadata, _decode):
    low16 = tensors["x_bits"] & 0xFFFF
    up = (tensors["x_bits"] >> 16) + (tensors["rand_u16"] < low16)
    finite = tensors["finite_mask"] != 0
    assert np.array_equal(up[finite], tensors["bf16_torchao_compare"][finite])
    return tensors, note(metadata, "whole")


def tensors_of_heads(tensors, heads):
    kept = {k: np.ascontiguousarray(v[:, :heads]) for k, v in tensors.items() if "per_tensor" not in k}
    for side in "kv":
        amax = np.abs(kept[f"{side}.x"]).max(axis=-1, keepdims=True)
        assert np.array_equal(np.maximum(amax / np.float32(127), np.float32(1e-8)), kept[f"{side}.int8_sym.scale"]), side
    return kept


GGUF_WRITTEN = ("Q1_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q8_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "BF16")


def gptq(tensors, metadata, _decode):
    """Rows of W are independent, so any of them are quantized as in the whole; their losses are recomputed."""
    kept_rows = {"a_64x96": 12, "b_256x256": 8}
    kept = {}
    for name, values in tensors.items():
        case, *rest = name.split(".")
        part = rest[-1]
        if part in ("W", "codes", "scale_f64", "zero"):
            kept[name] = values[: kept_rows[case]]
        elif part in ("H", "perm", "g_idx"):
            kept[name] = values
        elif part == "loss_f64":
            entry = name.removesuffix(".loss_f64")
            assert abs(gptq_loss(tensors, entry) / values[0] - 1) < 1e-9, f"{entry}: not the loss of its codes"
    for name in [k for k in kept if k.endswith(".codes")]:
        entry = name.removesuffix(".codes")
        kept[f"{entry}.loss_f64"] = np.array([gptq_loss(kept, entry)])
    return kept, note(metadata, f"first rows of W, losses of these rows: {kept_rows}; no losses of other implementations")


def gptq_loss(tensors, entry):
    """tr((W - Q) H (W - Q)^T) from codes, scales and zero points, in float64."""
    case = entry.split(".")[0]
    w, h = (tensors[f"{case}.{part}"].astype(np.float64) for part in ("W", "H"))
    codes, scale, zero = (tensors[f"{entry}.{part}"] for part in ("codes", "scale_f64", "zero"))
    groups = tensors.get(f"{entry}.g_idx", np.arange(w.shape[1]) // 32)
    d = w - scale[:, groups] * (codes.astype(np.float64) - zero[:, groups])
    return float(np.einsum("ij,jk,ik->", d, h, d))


def hqq(tensors, metadata, _decode):
    """HQQ stops when the mean error of the whole tensor rises, so W is kept complete, with the groups of some rows."""
    keep = ("W",) + tuple(f"hqq_lib.w{bits}_g64_axis1.{part}" for bits in (4, 3, 2) for part in ("codes", "scale", "zero"))
    kept = {name: tensors[name] for name in keep}
    for bits in (4, 3, 2):
        name = f"hqq_lib.w{bits}_g64_axis1"
        kept[f"{name}.f64.errors_per_iteration"] = tensors[f"{name}.f64.errors_per_iteration"]
        values = (kept[f"{name}.codes"] - kept[f"{name}.zero"]) * kept[f"{name}.scale"]
        assert np.abs(values.reshape(kept["W"].shape) - kept["W"]).max() < 8 * kept[f"{name}.scale"].max()
    return kept, note(metadata, "hqq's own groups of a row in 4, 3 and 2 bits; torchao left out")


def awq_smoothquant(tensors, metadata, _decode):
    """First tokens of X, with recomputed losses of llm-awq's search; clips depend on all tokens and are left out."""
    tokens, kept = 96, {"W": tensors["W"], "X": np.ascontiguousarray(tensors["X"][:96])}
    for name, values in tensors.items():
        if name.startswith("pseudo_quant.") or (name.startswith("smoothquant.") and ".w8a8." not in name):
            kept[name] = values
    for bits, group in ((4, 32), (3, 64)):
        name = f"search.llm_awq.w{bits}_g{group}"
        whole, _ = awq_search(tensors["X"], tensors["W"], bits, group)
        assert np.allclose(whole, tensors[f"{name}.losses_f64"], rtol=1e-5), name
        losses, scales = awq_search(kept["X"], tensors["W"], bits, group)
        kept[f"{name}.losses_f64"] = losses
        kept[f"{name}.best_index"] = np.array([int(losses.argmin())], np.int32)
        kept[f"{name}.best_scales_f64"] = scales
    return kept, note(metadata, f"X cut to {tokens} tokens, losses and scales of these; no clips, duo or int8 data")


def awq_search(x, w, bits, group):
    """Losses of 20 ratios and the scales of the best one, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    mean, losses, found = np.abs(x).mean(axis=0), [], []
    for k in range(20):
        s = np.maximum(mean ** (k / 20), 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        grouped = (w * s).reshape(-1, group)
        low, high = grouped.min(axis=1, keepdims=True), grouped.max(axis=1, keepdims=True)
        scale = np.maximum(high - low, 1e-5) / (2**bits - 1)
        zero = np.clip(-np.round(low / scale), 0, 2**bits - 1)
        q = (np.clip(np.round(grouped / scale) + zero, 0, 2**bits - 1) - zero) * scale
        losses.append((((x @ w.T) - x @ (q.reshape(w.shape) / s).T) ** 2).mean())
        found.append(s)
    return np.array(losses), found[int(np.argmin(losses))]


# --- cutting ---


def cut_blocks(values, starts, columns, block, count):
    """Keeps `count` blocks of each row from block `starts[row]` on; a tensor may hold a value, a byte or a scale per column."""
    per_block = values.shape[1] * block // columns
    rows = [row[s * per_block : (s + count) * per_block] for row, s in zip(values, starts, strict=True)]
    return np.ascontiguousarray(np.stack(rows))


def wide_sample(tensors, family):
    bits = tensors[f"{family}.x_bits"]
    x = bits.view(np.float32)
    largest = np.float32(65504.0) if family == "f16" else np.array(0x7F7F0000, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        overflowing = (np.abs(x) >= largest) & (np.abs(x) <= largest * np.float32(1.01))
        special = ~np.isfinite(x) | (np.abs(x) < np.finfo(np.float32).tiny) | overflowing
    return special | (np.arange(len(bits)) % 8 == 0)


def note(metadata, text):
    return {**metadata, "subset": text}


# --- checks: each recomputes in float32 what an incorrect cut would break ---


def check_wide_codes(kept, family):
    bits = kept[f"{family}.x_bits"]
    x = bits.view(np.float32)
    finite = ~np.isnan(x)
    if family == "f16":
        with np.errstate(over="ignore"):
            want = x.astype(np.float16).view(np.uint16)
    else:
        want = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(want[finite], kept[f"{family}.code_ml_dtypes"][finite]), family
    assert np.isnan(x).any() and np.isinf(x).sum() == 2 and (x == 0).sum() == 2, family


def check_representable_values(kept, family, table):
    x = kept[f"{family}.x_bits"].view(np.float32)
    codes = kept[f"{family}.code_ml_dtypes"]
    exact = np.isin(x, table[np.isfinite(table)])
    assert exact.sum() >= np.isfinite(table).sum() - 2, family
    assert np.array_equal(table[codes[exact]], x[exact]), family


def check_mx_rows(x, labels):
    amax = np.abs(x).reshape(len(x), -1, 32).max(axis=2)
    by_label = dict(zip(labels, amax))
    assert not by_label["all_zero"].any()
    assert (by_label["zero_blocks"] == 0).sum() == 1
    assert np.signbit(x[labels.index("zero_blocks")][:32]).all(), "the zero block of negative zeros"
    assert by_label["one_outlier_every_second_block"].max() > 20 * by_label["one_outlier_every_second_block"].min()
    assert by_label["outliers_1pct_x60"].max() > 5 * by_label["outliers_1pct_x60"].min()
    assert (np.count_nonzero(x[labels.index("single_nonzero_per_block")].reshape(-1, 32), axis=1) == 1).all()
    assert (np.signbit(x[labels.index("many_signed_zeros")]) & (x[labels.index("many_signed_zeros")] == 0)).any()
    if "fp32_max_in_block" in by_label:
        assert (by_label["fp32_max_in_block"] == np.finfo(np.float32).max).all()
        assert (by_label["fp32_subnormals"] < np.finfo(np.float32).tiny).all()


def check_mx_special(x, labels):
    nan, inf = np.isnan(x).sum(axis=1), np.isinf(x).sum(axis=1)
    want = {"one_nan": (1, 0), "one_pos_inf": (0, 1), "one_neg_inf": (0, 1), "nan_and_inf": (1, 1), "all_nan": (32, 0)}
    assert [want[label] for label in labels] == list(zip(nan, inf))


def check_mx_ocp(kept, fmt, table):
    """dequant = element * 2^(scale - 127), computed in float64 where every product is exact."""
    codes = kept[f"{fmt}.ocp_floor.codes"]
    elements = codes / 64 if table is None else table[codes].astype(np.float64)
    scale = np.exp2(kept[f"{fmt}.ocp_floor.scale_e8m0"].astype(np.float64) - 127)
    dequant = (elements * np.repeat(scale, 32, axis=1)).astype(np.float32)
    assert np.array_equal(dequant.view(np.uint32), kept[f"{fmt}.ocp_floor.dequant"].view(np.uint32)), fmt


def check_nvfp4_globals(kept, tensor):
    amax = np.abs(kept[f"{tensor}.x"]).max()
    assert kept[f"{tensor}.transformer_engine_1x16.amax"][0] == amax, tensor
    if amax >= np.finfo(np.float32).tiny:
        with np.errstate(over="ignore"):
            global_scale = np.float32(2688.0) / amax
        if np.isfinite(global_scale):
            assert kept[f"{tensor}.compressed_tensors.global_scale"][0] == global_scale, tensor


def check_int_symmetric_scales(kept):
    checked = 0
    for name, scale in kept.items():
        tensor, scheme, *rest = name.split(".")
        if rest != ["compressed_tensors", "scale"] or "_sym_" not in scheme:
            continue
        bits, group = int(scheme[3]), scheme.rsplit("_", 1)[1]
        x = np.abs(kept[f"{tensor}.x"])
        blocks = x.reshape(len(x), -1, x.shape[1] if group == "channel" else int(group.removeprefix("group")))
        want = blocks.max(axis=2) / np.float32((2**bits - 1) / 2)
        want[want == 0] = np.finfo(np.float32).eps
        assert np.array_equal(want, scale), name
        checked += 1
    assert checked >= 4 * 2 * 2, f"{checked}: channel and group32, int8 and int4, of four tensors at least"


def check_flat_absmax(kept, name):
    tensor, scheme, _ = name.split(".")
    flat, block = np.abs(kept[f"{tensor}.x"]).ravel(), int(scheme.rsplit("_b", 1)[1])
    padded = np.pad(flat, (0, -len(flat) % block))
    assert np.array_equal(padded.reshape(-1, block).max(axis=1), kept[name]), name
    assert len(kept[f"{tensor}.{scheme}.packed"]) == (len(flat) + 1) // 2, name


def check_fp8_tiles(kept):
    checked = 0
    for name, scale in kept.items():
        if name.startswith("act.") and name.endswith(".deepgemm_1x128.scale"):
            x = np.abs(kept[name.rsplit(".", 2)[0] + ".x"])
            x = np.pad(x, ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
            assert np.array_equal(np.maximum(x.max(axis=2), np.float32(1e-4)) / np.float32(448), scale), name
            checked += 1
    assert checked == 4
    amax = np.abs(kept["weight.heavy.x"]).max()
    assert kept["weight.heavy.deepgemm_128x128.scale"].ravel() == amax / np.float32(448)


def check_gguf_q8_0(kept):
    """A kept row of bytes belongs to the kept row of input: scale and codes of Q8_0, whose formula is the simplest."""
    for name in ("edge", "gaussian"):
        x = kept[f"input.{name}"].reshape(-1, 32)
        blocks = kept[f"Q8_0.{name}.gguf_py_bytes"].reshape(-1, 34)
        d = np.abs(x).max(axis=1) / np.float32(127)
        assert np.array_equal(d.astype(np.float16).view(np.uint8).reshape(-1, 2), blocks[:, :2]), name
        assert blocks.shape[0] == x.shape[0], name


# --- safetensors in and out ---


def read(folder, name):
    with safe_open(folder / f"{name}.safetensors", framework="np") as file:
        return {key: file.get_tensor(key) for key in sorted(file.keys())}, dict(file.metadata())


def write(path, tensors, metadata):
    """Writes a safetensors file with sorted names; the package's own writer does not guarantee a metadata order."""
    header, offset = {"__metadata__": dict(sorted(metadata.items()))}, 0
    # Widest dtypes first, as the safetensors library does: every tensor stays aligned to its element.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in order:
        values = tensors[name]
        end = offset + values.nbytes
        header[name] = {"dtype": DTYPE_NAMES[values.dtype.name], "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in order)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path.stat().st_size


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
