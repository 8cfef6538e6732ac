//! Sources cited by several rule files.

pub(super) const MLX_OPS: &str = "ml-explore/mlx mlx/ops.cpp (affine_quantize, fp_quantize) @846d1762";
pub(super) const EXLLAMA: &str =
    "turboderp-org/exllamav2 exllamav2/module.py, exllamav2_ext/ext_qmatrix.cpp @da07facd";
pub(super) const MARLIN_KERNEL: &str =
    "vllm 0.33.0 vllm/model_executor/kernels/linear/mixed_precision/marlin.py (can_implement)";
