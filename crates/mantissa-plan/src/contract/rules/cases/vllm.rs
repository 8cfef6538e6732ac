//! vLLM 0.33.0, `vllm/model_executor/layers/quantization`.

use super::case::Case;

const CT: &str = "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts";
const WNA16: &str = "compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP; kernels/linear/mixed_precision/humming.py";
const GPTQ: &str = "auto_gptq.py: AutoGPTQConfig.TYPE_MAP";
const AWQ: &str = "auto_awq.py: AutoAWQConfig.TYPE_MAP";
const MODELOPT: &str = "modelopt.py: LINEAR_ALGOS";
const METHODS: &str = "__init__.py: get_quantization_config";
const DESC_ACT: &str = "utils/gptq_utils.py: normalize_and_validate_gptq_desc_act";
const GGUF: &str = "vllm-gguf-plugin 0.0.5 quantization/utils.py: DEQUANT_TYPES";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", METHODS),
    Case::takes("compressed-tensors", "int4-g128", "", WNA16),
    Case::takes("compressed-tensors", "int4-g128-asym", "", WNA16),
    Case::takes("compressed-tensors", "int3-g128", "", WNA16),
    Case::takes("compressed-tensors", "int8-channel", "", WNA16),
    Case::takes("compressed-tensors", "int4-channel", "int8-token", CT),
    Case::takes("compressed-tensors", "int8-channel", "int8-token", CT),
    Case::takes("compressed-tensors", "int8-tensor", "int8-tensor@static", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", CT),
    Case::takes("compressed-tensors", "nvfp4:ct", "", CT),
    Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
    Case::takes("compressed-tensors", "mxfp4", "", CT),
    Case::takes("compressed-tensors", "mxfp8-e4m3", "", CT),
    Case::takes("gptq", "int4-g128", "", GPTQ),
    Case::takes("gptq", "int8-channel", "", GPTQ),
    Case::takes("awq", "int4-g128-asym", "", AWQ),
    Case::takes("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", MODELOPT),
    Case::takes("modelopt", "nvfp4:torchao", "", MODELOPT),
    Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", "fp8.py: Fp8Config"),
    Case::takes("gguf", "q4_k", "", GGUF),
    Case::refuses("compressed-tensors", "int4-tensor", "", "vllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int8-g128", "int8-token", "vllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "fp8-e4m3-g128", "", "vllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "nvfp4:ct", "fp8-e4m3-token", "vllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int8-channel-asym", "int8-token", "vllm-int8-zero", CT),
    Case::refuses(
        "compressed-tensors",
        "int4-g8",
        "",
        "vllm-ct-groups",
        "humming-kernels 0.1.19 humming/kernel/humming.py: weight_scale_group_size >= 256 / bits",
    ),
    Case::refuses("compressed-tensors", "int4-g128", "", "vllm-act-order", WNA16).with("act-order"),
    Case::refuses("gptq", "int4-g128", "", "vllm-act-order", DESC_ACT).with("act-order"),
    Case::refuses("gptq", "int4-g128-asym", "", "vllm-gptq-bits", GPTQ),
    Case::refuses("gptq", "int3-g128", "", "vllm-gptq-bits", GPTQ),
    Case::refuses(
        "gptq",
        "int4-g256",
        "",
        "vllm-groups",
        "utils/marlin_utils.py: MARLIN_SUPPORTED_GROUP_SIZES",
    ),
    Case::refuses("modelopt", "int4-g128", "", "vllm-modelopt-schemes", MODELOPT),
    Case::refuses("bitsandbytes", "nf4", "", "vllm-convention", METHODS),
    Case::refuses("exl2", "int4-g128", "", "vllm-convention", METHODS),
    Case::refuses("mlx", "int4-g64-asym:minmax", "", "vllm-convention", METHODS),
    Case::refuses("gguf", "tq1_0", "", "gguf-cuda-types", GGUF),
    Case::refuses("gguf", "mxfp4", "", "gguf-cuda-kinds", GGUF),
    Case::refuses(
        "compressed-tensors",
        "int4-g128",
        "",
        "tp-group",
        "kernels/linear/mixed_precision/marlin.py: can_implement",
    )
    .with("tp=4"),
    Case::refuses(
        "compressed-tensors",
        "int4-g128",
        "",
        "fused-alike",
        "compressed_tensors/utils.py: get_matched_target of fused layers",
    )
    .with("mixed=int4-g32"),
    Case::refuses(
        "compressed-tensors",
        "nvfp4:ct",
        "",
        "nvfp4-global",
        "compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
    )
    .with("unfused-scales"),
    Case::refuses(
        "compressed-tensors",
        "int8-channel",
        "int8-token",
        "int8-gpu",
        "vLLM documentation, features/quantization/int8.md",
    )
    .with("gpu=b200"),
];
