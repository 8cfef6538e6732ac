//! Rules on a quantized output head or token embedding.
//!
//! Where an entry of the config decides and is not looked at, the rule is a warning that names the entry.

use super::super::rule::{Check, Rule, Severity};
use super::super::subject::Observed;

use Observed::{CodedEmbedding, CodedHead, IntegerHead, TileHead, UnnamedHead, WideHead};
use Severity::{Refused, Warning, Wrong};

const TARGETS: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/utils.py (find_matched_target) and sglang 0.5.23 srt/layers/quantization/compressed_tensors/compressed_tensors.py (get_lm_head_scheme)";
const TILES: &str = "vllm 0.33.0 vllm/model_executor/layers/vocab_parallel_embedding.py (weight_loader) and sglang 0.5.23 srt/layers/quantization/compressed_tensors/compressed_tensors.py (get_lm_head_scheme)";
const VLLM_FP8: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/fp8.py (get_quant_method: LinearBase alone), models/utils.py (AutoWeightsLoader)";
const VLLM_AWQ: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/auto_awq.py (get_quant_method)";
const VLLM_EMBEDDING: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization (get_quant_method: none for VocabParallelEmbedding), models/utils.py (AutoWeightsLoader)";
const VLLM_CT_EMBEDDING: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (get_quant_method), models/llama.py (LlamaModel: embed_tokens without prefix)";
const SGLANG_FP8: &str = "sglang 0.5.23 srt/layers/quantization/fp8.py (get_quant_method: LinearBase alone), srt/models/llama.py (_legacy_load_weights)";
const SGLANG_BNB: &str = "sglang 0.5.23 srt/layers/vocab_parallel_embedding.py (weight_loader), srt/model_loader/loader.py (BitsAndBytesModelLoader)";
const SGLANG_AWQ: &str = "sglang 0.5.23 srt/layers/quantization/awq/awq.py (AWQMarlinConfig.get_quant_method), marlin_utils.py (check_marlin_supports_layer)";
const SGLANG_EMBEDDING: &str = "sglang 0.5.23 srt/layers/quantization (get_quant_method: none for VocabParallelEmbedding), srt/models/llama.py (_legacy_load_weights)";
const AUTO_ROUND: &str = "auto-round 0.16.1 auto_round/inference/convert_model.py (get_layer_config); vllm 0.33.0 vllm/model_executor/layers/quantization/inc/config_parser.py and sglang 0.5.23 srt/layers/quantization/auto_round.py (ParallelLMHead)";
const OPTIMUM: &str = "optimum 2.3.0 optimum/gptq/quantizer.py (convert_model: layers of the blocks alone), as transformers 5.23.0 calls it";
const TRANSFORMERS_AWQ: &str =
    "transformers 5.23.0 src/transformers/quantizers/quantizer_awq.py (add_default_skips)";
const TRANSFORMERS_FP8: &str = "transformers 5.23.0 src/transformers/quantizers/quantizer_finegrained_fp8.py, base.py (get_modules_to_not_convert)";
const TRANSFORMERS_EMBEDDING: &str = "transformers 5.23.0 src/transformers/integrations (replacement of Linear alone), optimum 2.3.0 optimum/gptq/quantizer.py";
const TURBOMIND: &str =
    "InternLM/lmdeploy lmdeploy/turbomind/weight_format.py (WeightFormatResolver) @1263d5cd8";
const TURBOMIND_EMBEDDING: &str =
    "InternLM/lmdeploy lmdeploy/turbomind/models/llama.py (model: embed_tokens.weight) @1263d5cd8";
const TRTLLM_CT: &str = "NVIDIA/TensorRT-LLM tensorrt_llm/models/quant_config_utils.py (_quant_config_from_config_group) @21156a7a";
const TRTLLM_AWQ: &str =
    "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/linear.py (W4A16_AWQ_LinearMethod) @3105370b";
const TRTLLM_HEAD: &str = "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_utils.py (_resolve_lm_head_quant_config), modules/linear.py (copy_weight) @3105370b; pull request 17728";
const TRTLLM_EMBEDDING: &str = "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/embedding.py (Embedding), modules/linear.py (load_weights_vanilla_helper) @3105370b";
const EXLLAMA_HEAD: &str =
    "turboderp-org/exllamav2 exllamav2/exllamav2_ext/ext_qmatrix.cpp (make_q_matrix) @da07facd";
const EXLLAMA_EMBEDDING: &str =
    "turboderp-org/exllamav2 exllamav2/embedding.py (ExLlamaV2Embedding.load) @da07facd";

const UNQUANTIZED: &str = "an unquantized lm_head: the engine loads no other from this format";
const UNSCALED: &str = "an unquantized lm_head: the engine drops the scales of an FP8 one";
const NO_HEAD: &str = "quantize again without --head";
const NO_EMBEDDING: &str = "quantize again without --embeddings";
const NAME_HEAD: &str =
    "add \"lm_head\" to the targets of its group in quantization_config.config_groups of MODEL/config.json";
const CT: &str = "quantize again with --format compressed-tensors, or without --head";

/// Returns a rule that a checkpoint breaks if `what` is observed.
const fn rule(
    id: &'static str,
    conventions: &'static [&'static str],
    severity: Severity,
    what: Observed,
    (requires, source, fix): (&'static str, &'static str, &'static str),
) -> Rule {
    Rule { id, conventions, severity, requires, check: Check::Seen(what), source, fix }
}

pub(crate) const RULES: &[Rule] = &[
    rule(
        "vllm-head-target",
        &["compressed-tensors"],
        Refused,
        UnnamedHead,
        (
            "lm_head by name in the targets of a config group: the class Linear does not cover it",
            TARGETS,
            NAME_HEAD,
        ),
    ),
    rule(
        "sglang-head-target",
        &["compressed-tensors"],
        Wrong,
        UnnamedHead,
        (
            "lm_head by name in the targets of a config group: the class Linear does not cover it, and its weights stay uninitialized",
            TARGETS,
            NAME_HEAD,
        ),
    ),
    rule(
        "head-tiles",
        &["compressed-tensors"],
        Refused,
        TileHead,
        ("an lm_head without tiles", TILES, "quantize again with --head fp8, or without --head"),
    ),
    rule(
        "auto-round-head",
        &["auto-round"],
        Warning,
        IntegerHead,
        (
            "lm_head in extra_config: otherwise the head counts as unquantized",
            AUTO_ROUND,
            "add lm_head with its bits to quantization_config.extra_config of MODEL/config.json",
        ),
    ),
    rule("vllm-fp8-head", &["deepseek-fp8", "fp8"], Refused, CodedHead, (UNQUANTIZED, VLLM_FP8, CT)),
    rule(
        "vllm-awq-head",
        &["awq"],
        Warning,
        IntegerHead,
        (
            "lm_head: true in quantization_config: otherwise loading stops at lm_head.qweight",
            VLLM_AWQ,
            "set quantization_config.lm_head to true in MODEL/config.json",
        ),
    ),
    rule("sglang-fp8-head", &["deepseek-fp8", "fp8"], Wrong, CodedHead, (UNSCALED, SGLANG_FP8, CT)),
    rule("sglang-bnb-head", &["bitsandbytes"], Refused, CodedHead, (UNQUANTIZED, SGLANG_BNB, NO_HEAD)),
    rule("sglang-bnb-int-head", &["bitsandbytes"], Refused, IntegerHead, (UNQUANTIZED, SGLANG_BNB, NO_HEAD)),
    rule(
        "sglang-awq-head",
        &["awq"],
        Refused,
        IntegerHead,
        (
            "an unquantized lm_head: with lm_head: true in the config loading stops (Marlin reads output_size, which the head lacks), without it the weights stay uninitialized",
            SGLANG_AWQ,
            CT,
        ),
    ),
    rule(
        "transformers-gptq-head",
        &["gptq"],
        Wrong,
        IntegerHead,
        (
            "an unquantized lm_head: from_pretrained drops a packed one and initializes lm_head randomly (GPTQModel loads it)",
            OPTIMUM,
            CT,
        ),
    ),
    rule(
        "transformers-awq-head",
        &["awq"],
        Wrong,
        IntegerHead,
        (
            "an unquantized lm_head: from_pretrained drops a packed one and initializes lm_head randomly",
            TRANSFORMERS_AWQ,
            CT,
        ),
    ),
    rule(
        "transformers-fp8-head",
        &["deepseek-fp8"],
        Warning,
        CodedHead,
        (
            "modules_to_not_convert as a list without lm_head: without the list, from_pretrained drops the head's scales",
            TRANSFORMERS_FP8,
            "set quantization_config.modules_to_not_convert in MODEL/config.json to the unquantized modules",
        ),
    ),
    rule(
        "lmdeploy-int-head",
        &["compressed-tensors", "gptq", "awq"],
        Wrong,
        WideHead,
        (
            "an lm_head of 4 bits in the groups of the other layers, or unquantized: any other is read as if it were that",
            TURBOMIND,
            "quantize again with --head in the scheme of the layers, or without --head",
        ),
    ),
    rule(
        "lmdeploy-head",
        &["compressed-tensors"],
        Refused,
        CodedHead,
        (
            "an lm_head of 4-bit integers in the groups of the other layers, or unquantized",
            TURBOMIND,
            NO_HEAD,
        ),
    ),
    rule(
        "trtllm-head",
        &["compressed-tensors"],
        Refused,
        CodedHead,
        (
            "an lm_head in FP8 per row or NVFP4 with quantized inputs, or unquantized: heads with weights alone quantized are refused",
            TRTLLM_CT,
            NO_HEAD,
        ),
    ),
    rule(
        "trtllm-int-head",
        &["compressed-tensors"],
        Refused,
        IntegerHead,
        ("an unquantized lm_head: integers are refused", TRTLLM_CT, NO_HEAD),
    ),
    rule(
        "trtllm-awq-head",
        &["modelopt"],
        Refused,
        IntegerHead,
        ("an lm_head with pre_quant_scale if of 4 bits, or unquantized", TRTLLM_AWQ, NO_HEAD),
    ),
    rule("trtllm-fp8-head", &["deepseek-fp8"], Wrong, CodedHead, (UNSCALED, TRTLLM_HEAD, NO_HEAD)),
    rule(
        "exllamav2-head",
        &["gptq", "auto-round"],
        Refused,
        WideHead,
        (
            "an lm_head of 4 bits, or unquantized: a GPTQ matrix packs 8 rows into one word",
            EXLLAMA_HEAD,
            "quantize again with --head int4-g128, or without --head",
        ),
    ),
    rule(
        "vllm-ct-embedding",
        &["compressed-tensors"],
        Refused,
        CodedEmbedding,
        (
            "an unquantized token embedding, or integers without zero points in a config group with target Embedding",
            VLLM_CT_EMBEDDING,
            NO_EMBEDDING,
        ),
    ),
    rule(
        "vllm-embedding",
        &["gptq", "awq", "auto-round", "modelopt", "deepseek-fp8", "fp8"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", VLLM_EMBEDDING, NO_EMBEDDING),
    ),
    rule(
        "sglang-embedding",
        &["compressed-tensors", "gptq", "awq", "auto-round", "modelopt", "deepseek-fp8", "fp8"],
        Wrong,
        CodedEmbedding,
        (
            "an unquantized token embedding: the engine drops the tensors of a quantized one, except NVFP4 that modelopt lists by layer",
            SGLANG_EMBEDDING,
            NO_EMBEDDING,
        ),
    ),
    rule(
        "sglang-bnb-embedding",
        &["bitsandbytes"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", SGLANG_BNB, NO_EMBEDDING),
    ),
    rule(
        "transformers-embedding",
        &["gptq", "awq", "deepseek-fp8"],
        Wrong,
        CodedEmbedding,
        (
            "an unquantized token embedding: from_pretrained drops the packed tensors or scales of a quantized one",
            TRANSFORMERS_EMBEDDING,
            NO_EMBEDDING,
        ),
    ),
    rule(
        "transformers-bnb-embedding",
        &["bitsandbytes"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", TRANSFORMERS_EMBEDDING, NO_EMBEDDING),
    ),
    rule(
        "lmdeploy-embedding",
        &["compressed-tensors", "gptq", "awq"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", TURBOMIND_EMBEDDING, NO_EMBEDDING),
    ),
    rule(
        "trtllm-embedding",
        &["compressed-tensors", "modelopt"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", TRTLLM_EMBEDDING, NO_EMBEDDING),
    ),
    rule(
        "trtllm-fp8-embedding",
        &["deepseek-fp8", "fp8"],
        Wrong,
        CodedEmbedding,
        (
            "an unquantized token embedding: the engine drops the scales of an FP8 one",
            TRTLLM_EMBEDDING,
            NO_EMBEDDING,
        ),
    ),
    rule(
        "exllamav2-embedding",
        &["gptq", "auto-round", "exl2"],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", EXLLAMA_EMBEDDING, NO_EMBEDDING),
    ),
];
