//! TensorRT-LLM at the commits that the rules name, `tensorrt_llm`.

use super::case::Case;

const CT: &str = "models/quant_config_utils.py: _quant_config_from_config_group";
const LINEAR: &str = "_torch/modules/linear.py: get_quant_method";
const AWQ: &str = "_torch/modules/linear.py: W4A16_AWQ_LinearMethod.load_weights_vanilla";
const METHODS: &str = "llmapi/llm_utils.py: _update_from_hf_quant_config, NotImplementedError";
const FP8: &str = "_torch/model_config.py: load_hf_quant_config, FP8_BLOCK_SCALES";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", METHODS),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-t128x128", "fp8-e4m3-g128", CT),
    Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
    Case::takes("compressed-tensors", "mxfp4", "", CT).with("experts"),
    Case::takes("modelopt", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", LINEAR),
    Case::takes("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", LINEAR),
    Case::takes("modelopt", "nvfp4:torchao", "nvfp4", LINEAR),
    Case::takes("modelopt", "mxfp8-e4m3", "mxfp8-e4m3", LINEAR),
    Case::takes("modelopt", "int4-g128", "", AWQ).with("multiplied"),
    Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", FP8),
    Case::takes("mxfp4", "mxfp4", "", "_torch/model_config.py: get_mxfp4_quant_algo").with("experts"),
    Case::refuses("compressed-tensors", "int4-g128", "", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int8-channel", "", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int8-channel", "int8-token", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "nvfp4:ct", "", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "fp8-e4m3-channel", "", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "mxfp8-e4m3", "", "trtllm-ct-schemes", CT),
    Case::refuses("compressed-tensors", "mxfp4", "", "trtllm-dense-mxfp4", LINEAR),
    Case::refuses("modelopt", "int4-g128", "", "trtllm-awq-multiplier", AWQ),
    Case::refuses("modelopt", "nvfp4:torchao", "", "trtllm-modelopt-schemes", LINEAR),
    Case::refuses("awq", "int4-g128-asym", "", "trtllm-convention", METHODS),
    Case::refuses("gptq", "int4-g128", "", "trtllm-convention", METHODS),
    Case::refuses("bitsandbytes", "nf4", "", "trtllm-convention", METHODS),
    Case::refuses("gguf", "q4_k", "", "trtllm-convention", METHODS),
    Case::refuses(
        "compressed-tensors",
        "fp8-e4m3-channel",
        "fp8-e4m3-token",
        "trtllm-fp8-gpu",
        "NVIDIA Model Optimizer documentation, guides/0_support_matrix.html",
    )
    .with("gpu=a100"),
    Case::refuses(
        "modelopt",
        "nvfp4:torchao",
        "nvfp4",
        "trtllm-fp4-gpu",
        "NVIDIA Model Optimizer documentation, guides/0_support_matrix.html",
    )
    .with("gpu=h100"),
];
