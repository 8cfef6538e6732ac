//! LMDeploy at 1263d5cd8, TurboMind.

use super::case::Case;

const CONFIG: &str = "lmdeploy/turbomind/converter.py: get_tm_config";
const GROUPS: &str = "lmdeploy/turbomind/converter.py: _SUPPORTED_GROUP_SIZES";
const FORMATS: &str = "lmdeploy/turbomind/weight_format.py: FP8Format, TrivialFormat";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", CONFIG),
    Case::takes("awq", "int4-g128-asym", "", CONFIG),
    Case::takes("awq", "int4-g128", "", CONFIG),
    Case::takes("awq", "int4-g128-asym", "", CONFIG).with("tp=2"),
    Case::takes("gptq", "int4-g128", "", CONFIG),
    Case::takes("gptq", "int4-g128", "", CONFIG).with("f16"),
    Case::takes("compressed-tensors", "int4-g128", "", CONFIG),
    Case::takes("compressed-tensors", "int4-g32", "", GROUPS),
    Case::takes(
        "compressed-tensors",
        "int4-g128-asym",
        "",
        "lmdeploy/turbomind/weight_format.py: CompressedTensorFormat",
    ),
    Case::takes("compressed-tensors", "int4-g32-asym", "", GROUPS),
    Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", FORMATS),
    Case::takes("mxfp4", "mxfp4", "", CONFIG),
    Case::refuses("compressed-tensors", "int4-g32", "int8-token", "lmdeploy-schemes", CONFIG),
    Case::refuses("compressed-tensors", "int8-channel", "int8-token", "lmdeploy-schemes", CONFIG),
    Case::refuses("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", "lmdeploy-schemes", CONFIG),
    Case::refuses("compressed-tensors", "nvfp4:ct", "", "lmdeploy-schemes", CONFIG),
    Case::refuses("compressed-tensors", "int4-channel", "", "lmdeploy-schemes", CONFIG),
    Case::refuses("compressed-tensors", "int8-g128", "", "lmdeploy-bits", CONFIG),
    Case::refuses("compressed-tensors", "int4-g64", "", "lmdeploy-ct-groups", GROUPS),
    Case::refuses("compressed-tensors", "int4-g128", "", "lmdeploy-ct-act-order", FORMATS).with("act-order"),
    Case::refuses("awq", "int4-g64-asym", "", "lmdeploy-groups", GROUPS),
    Case::refuses("gptq", "int4-g32", "", "lmdeploy-groups", GROUPS),
    Case::refuses("gptq", "int4-g128-asym", "", "lmdeploy-gptq", CONFIG),
    Case::refuses("gptq", "int8-g128", "", "lmdeploy-gptq", CONFIG),
    Case::refuses("gptq", "int4-g128", "", "lmdeploy-act-order", CONFIG).with("act-order"),
    Case::refuses("fp8", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", "lmdeploy-fp8", FORMATS),
    Case::refuses("modelopt", "nvfp4:torchao", "", "lmdeploy-convention", CONFIG),
    Case::refuses("bitsandbytes", "nf4", "", "lmdeploy-convention", CONFIG),
    Case::refuses("auto-round", "int4-g128", "", "lmdeploy-convention", CONFIG),
    Case::refuses("gguf", "q4_0", "", "lmdeploy-convention", CONFIG),
];
