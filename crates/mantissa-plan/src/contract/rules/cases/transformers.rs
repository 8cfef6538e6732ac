//! transformers 5.23.0 with compressed-tensors 0.20.0, gptqmodel 7.7.0, bitsandbytes 0.50.2 and gguf 0.19.

use super::case::Case;

const LOADED: &str = "tests/interop/loads.py";
const AUTO: &str = "quantizers/auto.py: AUTO_QUANTIZER_MAPPING";
const GPTQ: &str = "utils/quantization_config.py: GPTQConfig.post_init, bits in 2, 3, 4, 8";
const ACT_ORDER: &str = "compressed-tensors quantization/quant_args.py: actorder";

pub(super) const CASES: &[Case] = &[
    Case::takes("dense", "", "", AUTO),
    Case::takes("compressed-tensors", "int4-g128", "", LOADED),
    Case::takes("compressed-tensors", "int4-channel", "", LOADED),
    Case::takes("compressed-tensors", "int8-channel", "", LOADED),
    Case::takes("compressed-tensors", "int8-channel", "int8-token", LOADED),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "", LOADED),
    Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", LOADED),
    Case::takes("compressed-tensors", "nvfp4:ct", "", LOADED),
    Case::takes("compressed-tensors", "mxfp4", "", LOADED),
    Case::takes("compressed-tensors", "mxfp8-e4m3", "", LOADED),
    Case::takes("bitsandbytes", "nf4", "", LOADED),
    Case::takes("bitsandbytes", "int8-channel:restricted", "int8-token:restricted", LOADED),
    Case::takes("gptq", "int4-g128-asym", "", GPTQ),
    Case::takes("gptq", "int3-g128", "", GPTQ),
    Case::takes("awq", "int4-g128-asym", "", "integrations/awq.py: replace_with_awq_linear"),
    Case::takes("gguf", "q4_k", "", LOADED),
    Case::takes("gguf", "tq1_0", "", LOADED),
    Case::takes(
        "deepseek-fp8",
        "fp8-e4m3-t128x128",
        "fp8-e4m3-g128",
        "quantizers/quantizer_finegrained_fp8.py",
    ),
    Case::refuses("compressed-tensors", "int4-g128-asym", "", "transformers-ct-zero-points", LOADED),
    Case::refuses("compressed-tensors", "int8-g32-asym", "", "transformers-ct-zero-points", LOADED),
    Case::refuses("compressed-tensors", "int4-g128", "", "transformers-ct-act-order", ACT_ORDER)
        .with("act-order"),
    Case::refuses(
        "compressed-tensors",
        "int4-g128",
        "",
        "whole-groups",
        "compressed_tensors/compressors/pack_quantized.py: sizes",
    )
    .with("cols=352"),
    Case::refuses("gptq", "int5-g128", "", "transformers-gptq-bits", GPTQ),
    Case::refuses("gptq", "int6-g128", "", "transformers-gptq-bits", GPTQ),
    Case::refuses(
        "gptq",
        "int4-g128",
        "",
        "gptq-zero-points",
        "gptqmodel utils/model.py: convert_gptq_v1_to_v2_format",
    )
    .with("seen=zero-points"),
    Case::refuses("gguf", "nvfp4:ct", "", "transformers-gguf-kinds", LOADED),
    Case::refuses("modelopt", "nvfp4:torchao", "", "transformers-convention", AUTO),
    Case::refuses("mlx", "int4-g64-asym:minmax", "", "transformers-convention", AUTO),
    Case::refuses("exl2", "int4-g128", "", "transformers-convention", AUTO),
    Case::refuses("exl3", "trellis4", "", "transformers-convention", AUTO),
    Case::refuses("native", "nf4", "", "transformers-convention", AUTO),
    Case::refuses("onnx", "int4-g128", "", "transformers-convention", AUTO),
    Case::refuses("dense", "", "", "tied-head", "modeling_utils.py: tie_weights").with("seen=tied-head"),
];
