//! ExLlamaV2 at da07facd (0.3.2).

use super::case::Case;

const MODULE: &str = "exllamav2/module.py: load_weight";
const MATRIX: &str = "exllamav2_ext/ext_qmatrix.cpp: make_q_matrix, height = q_weight.size(0) * 8";
const GROUPS: &str = "exllamav2_ext/cuda/q_matrix.cu: gptq_groupsize";
const ZEROS: &str = "exllamav2/config.py: checkpoint_offset_qzeros";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", MODULE),
    Case::takes("exl2", "int4-g128", "", MODULE),
    Case::takes("exl2", "int3-g32", "", MODULE),
    Case::takes("exl2", "int6-g64", "", MODULE),
    Case::takes("gptq", "int4-g128", "", MATRIX),
    Case::takes("gptq", "int4-g32", "", MATRIX),
    Case::takes("gptq", "int4-g128-asym", "", MATRIX),
    Case::takes("gptq", "int4-channel", "", GROUPS),
    Case::takes("gptq", "int4-g256", "", GROUPS),
    Case::takes("gptq", "int4-g128", "", "exllamav2/ext.py: make_q_matrix, g_idx").with("act-order"),
    Case::takes("auto-round", "int4-g128", "", MATRIX),
    Case::refuses("gptq", "int3-g128", "", "exllamav2-bits", MATRIX),
    Case::refuses("gptq", "int8-g128", "", "exllamav2-bits", MATRIX),
    Case::refuses("gptq", "int2-g64-asym", "", "exllamav2-bits", MATRIX),
    Case::refuses("gptq", "int4-g96", "", "exllamav2-groups", GROUPS),
    Case::refuses("gptq", "int4-g128", "", "gptq-zero-points", ZEROS).with("seen=zero-points"),
    Case::refuses("gptq", "int4-g128", "", "whole-groups", GROUPS).with("cols=352"),
    Case::refuses("awq", "int4-g128-asym", "", "exllamav2-convention", MATRIX),
    Case::refuses("compressed-tensors", "int4-g128", "", "exllamav2-convention", MODULE),
    Case::refuses("bitsandbytes", "nf4", "", "exllamav2-convention", MODULE),
    Case::refuses("modelopt", "int4-g128", "", "exllamav2-convention", MODULE),
    Case::refuses("gguf", "q4_k", "", "exllamav2-convention", MODULE),
    Case::refuses("mlx", "int4-g64-asym:minmax", "", "exllamav2-convention", MODULE),
    Case::refuses("exl3", "trellis4", "", "exllamav2-convention", MODULE),
];
