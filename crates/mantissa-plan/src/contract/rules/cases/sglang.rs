//! SGLang 0.5.23, `python/sglang/srt`.

use super::case::Case;

const CT: &str = "layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts";
const WNA16: &str =
    "layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP";
const MARLIN: &str =
    "layers/quantization/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES";
const GPTQ: &str =
    "layers/quantization/gptq/gptq.py: GPTQMarlinConfig.TYPE_MAP; \"gptq\" itself is not registered on CUDA";
const AWQ: &str = "layers/quantization/awq/awq.py: AWQConfig";
const MODELOPT: &str = "configs/model_config.py: _parse_modelopt_quant_config";
const README: &str =
    "layers/quantization/compressed_tensors/README.md: mxfp4-pack-quantized linears are not supported yet";
const GGUF: &str = "layers/quantization/gguf.py: DEQUANT_TYPES";

pub(super) const CASES: &[Case] = &[
    Case::takes("compressed-tensors", "int4-g128", "", CT),
    Case::takes("compressed-tensors", "int4-channel", "", CT),
    Case::takes("compressed-tensors", "int8-channel", "", CT),
    Case::takes("compressed-tensors", "int4-g128-asym", "", MARLIN),
    Case::takes("compressed-tensors", "int8-channel", "int8-token", CT),
    Case::takes("compressed-tensors", "int8-channel", "int8-tensor@static", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", CT),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "", CT),
    Case::takes("compressed-tensors", "nvfp4:ct", "", CT),
    Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
    Case::takes("gptq", "int4-g128", "", GPTQ),
    Case::takes("gptq", "int8-g128", "", GPTQ),
    Case::takes("gptq", "int4-g128", "", GPTQ).with("act-order"),
    Case::takes("awq", "int4-g128-asym", "", AWQ),
    Case::takes("modelopt", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", MODELOPT),
    Case::takes("modelopt", "nvfp4:torchao", "", MODELOPT),
    Case::takes("modelopt", "mxfp8-e4m3", "mxfp8-e4m3", MODELOPT),
    Case::takes(
        "deepseek-fp8",
        "fp8-e4m3-t128x128",
        "fp8-e4m3-g128",
        "layers/quantization/fp8.py: Fp8Config",
    ),
    Case::takes("gguf", "q4_k", "", GGUF),
    Case::takes("gguf", "iq4_xs", "", GGUF),
    Case::refuses("compressed-tensors", "mxfp4", "", "sglang-ct-schemes", README),
    Case::refuses("compressed-tensors", "mxfp8-e4m3", "", "sglang-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int4-g128", "int8-token", "sglang-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int4-channel", "int4-token", "sglang-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int8-g128", "int8-token", "sglang-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int4-tensor", "", "sglang-ct-schemes", CT),
    Case::refuses("compressed-tensors", "int3-g128", "", "sglang-bits", WNA16),
    Case::refuses("compressed-tensors", "int8-g128-asym", "", "sglang-bits", MARLIN),
    Case::refuses("compressed-tensors", "int8-channel-asym", "int8-token", "sglang-int8-zero", CT),
    Case::refuses("compressed-tensors", "int4-g16", "", "sglang-groups", MARLIN),
    Case::refuses("gptq", "int4-g128-asym", "", "sglang-gptq-bits", GPTQ),
    Case::refuses("gptq", "int3-g128", "", "sglang-gptq-bits", GPTQ),
    Case::refuses("gptq", "int2-g64", "", "sglang-gptq-bits", GPTQ),
    Case::refuses("gptq", "int4-g256", "", "sglang-groups", MARLIN),
    Case::refuses("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", "sglang-modelopt-schemes", MODELOPT),
    Case::refuses("modelopt", "int4-g128", "", "sglang-modelopt-schemes", MODELOPT),
    Case::refuses(
        "exl2",
        "int4-g128",
        "",
        "sglang-convention",
        "layers/quantization/__init__.py: BASE_QUANTIZATION_METHODS",
    ),
    Case::refuses(
        "mlx",
        "int4-g64-asym:minmax",
        "",
        "sglang-convention",
        "layers/quantization/__init__.py: mlx only on Apple",
    ),
    Case::refuses("gguf", "mxfp4", "", "gguf-cuda-kinds", GGUF),
    Case::refuses("gguf", "tq1_0", "", "gguf-cuda-types", GGUF),
    Case::refuses(
        "compressed-tensors",
        "int4-g128",
        "",
        "tp-group",
        "layers/parameter.py: assert input_size_per_partition % group_size",
    )
    .with("tp=4"),
    Case::refuses(
        "compressed-tensors",
        "int8-channel",
        "int8-token",
        "int8-gpu",
        "layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py: no kernel on SM100",
    )
    .with("gpu=b200"),
];
