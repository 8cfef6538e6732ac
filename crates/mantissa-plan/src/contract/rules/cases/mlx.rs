//! mlx-lm 0.32.2 on mlx 0.32.4.

use super::case::Case;

const LOAD: &str = "mlx_lm/utils.py: load_model";
const AWQ: &str = "mlx_lm/utils.py: _transform_awq_weights";
const OPS: &str = "mlx/ops.cpp: affine_quantize, fp_quantize";
const LLAMA: &str = "mlx_lm/models/llama.py: sanitize leaves weight_packed, which no parameter has; only deepseek_v3.py renames it";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", LOAD),
    Case::takes("mlx", "int4-g64-asym:minmax", "", OPS),
    Case::takes("mlx", "int2-g64-asym:minmax", "", OPS),
    Case::takes("mlx", "int3-g64-asym:minmax", "", OPS),
    Case::takes("mlx", "int6-g32-asym:minmax", "", OPS),
    Case::takes("mlx", "int8-g128-asym:minmax", "", OPS),
    Case::takes("mlx", "mxfp4", "", OPS),
    Case::takes("mlx", "mxfp8-e4m3", "", OPS),
    Case::takes("mlx", "nvfp4:torchao-1level", "", OPS),
    Case::takes("awq", "int4-g128-asym", "", AWQ),
    Case::takes("awq", "int4-g64", "", AWQ),
    Case::takes("mxfp4", "mxfp4", "", LOAD),
    Case::refuses("compressed-tensors", "nvfp4:ct", "", "mlx-convention", LLAMA),
    Case::refuses("compressed-tensors", "int4-g32", "", "mlx-convention", LLAMA),
    Case::refuses("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", "mlx-convention", LLAMA),
    Case::refuses("gptq", "int4-g128", "", "mlx-convention", AWQ),
    Case::refuses("gptq", "int4-g128", "", "mlx-convention", AWQ).with("act-order"),
    Case::refuses("gguf", "q4_0", "", "mlx-convention", LOAD),
    Case::refuses("modelopt", "nvfp4:torchao", "", "mlx-convention", LOAD),
    Case::refuses("bitsandbytes", "nf4", "", "mlx-convention", LOAD),
    Case::refuses("awq", "int4-channel", "", "mlx-groups", AWQ),
    Case::refuses("awq", "int4-g256-asym", "", "mlx-groups", OPS),
    Case::refuses("mlx", "int4-g16-asym:minmax", "", "mlx-groups", OPS),
    Case::refuses("mlx", "int4-channel-asym:minmax", "", "mlx-schemes", OPS),
    Case::refuses("mlx", "int5-g64-asym:minmax", "", "whole-groups", OPS).with("cols=352"),
];
