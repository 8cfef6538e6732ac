//! Rules on a quantized output head or token embedding.

use super::super::subject::Observed;
use super::super::{Check, Rule, Server, Severity};

use Observed::{CodedEmbedding, CodedHead, IntegerHead};
use Server::{Exllamav2, Lmdeploy, Sglang, TensorrtLlm, Transformers, Vllm};
use Severity::{Refused, Wrong};

const VLLM_HEAD: &str =
    "vllm-project/vllm pull request 37291 (compressed_tensors.py: ParallelLMHead); 52543 (FP8, not merged)";
const VLLM_OTHERS: &str = "vllm-project/vllm vllm/model_executor/layers/quantization (get_quant_method: LinearBase alone); issue 40999";
const SGLANG_HEAD: &str = "sgl-project/sglang issue 35358 (compressed_tensors.py: get_quant_method)";
const OPTIMUM: &str =
    "huggingface/optimum optimum/gptq/quantizer.py (convert_model: layers of the blocks alone)";
const EMBEDDINGS: &str = "vllm-project/vllm vllm/model_executor/layers/vocab_parallel_embedding.py; huggingface/transformers src/transformers/integrations (replacement of Linear alone)";
const NO_HEAD: &str = "quantize again without --head";
const GPTQ: &str = "quantize again with --format gptq and an integer scheme, or without --head";

/// Returns a rule that a checkpoint breaks if `what` is observed.
const fn rule(
    id: &'static str,
    servers: &'static [Server],
    conventions: &'static [&'static str],
    severity: Severity,
    what: Observed,
    (requires, source, fix): (&'static str, &'static str, &'static str),
) -> Rule {
    Rule { id, servers, conventions, severity, requires, check: Check::Seen(what), source, fix }
}

const UNQUANTIZED: &str = "an unquantized lm_head: the engine loads no other from this format";

pub(super) const RULES: &[Rule] = &[
    rule(
        "vllm-head",
        &[Vllm],
        &["compressed-tensors"],
        Refused,
        CodedHead,
        ("an lm_head in integers without quantized inputs, or unquantized", VLLM_HEAD, NO_HEAD),
    ),
    rule(
        "head-format",
        &[Vllm, Sglang],
        &["bitsandbytes", "modelopt", "deepseek-fp8", "fp8", "awq"],
        Refused,
        CodedHead,
        (UNQUANTIZED, VLLM_OTHERS, GPTQ),
    ),
    rule(
        "int-head-format",
        &[Vllm, Sglang],
        &["bitsandbytes", "modelopt", "deepseek-fp8", "fp8", "awq"],
        Refused,
        IntegerHead,
        (UNQUANTIZED, VLLM_OTHERS, GPTQ),
    ),
    rule(
        "sglang-head",
        &[Sglang],
        &["compressed-tensors"],
        Wrong,
        CodedHead,
        ("an unquantized lm_head: the engine computes with uninitialized weights", SGLANG_HEAD, GPTQ),
    ),
    rule(
        "sglang-int-head",
        &[Sglang],
        &["compressed-tensors"],
        Wrong,
        IntegerHead,
        ("an unquantized lm_head: the engine computes with uninitialized weights", SGLANG_HEAD, GPTQ),
    ),
    rule(
        "transformers-gptq-head",
        &[Transformers],
        &["gptq", "auto-round"],
        Wrong,
        IntegerHead,
        (
            "an unquantized lm_head: from_pretrained leaves a packed one uninitialized (GPTQModel loads it)",
            OPTIMUM,
            "quantize again with --format compressed-tensors, or without --head",
        ),
    ),
    rule(
        "int-head",
        &[Lmdeploy, TensorrtLlm],
        &[],
        Refused,
        IntegerHead,
        (
            UNQUANTIZED,
            "InternLM/lmdeploy lmdeploy/turbomind; NVIDIA/TensorRT-LLM tensorrt_llm/_torch (LMHead)",
            NO_HEAD,
        ),
    ),
    rule(
        "head",
        &[Lmdeploy, TensorrtLlm],
        &[],
        Refused,
        CodedHead,
        (
            UNQUANTIZED,
            "InternLM/lmdeploy lmdeploy/turbomind; NVIDIA/TensorRT-LLM tensorrt_llm/_torch (LMHead)",
            NO_HEAD,
        ),
    ),
    rule(
        "embedding",
        &[Vllm, Sglang, Lmdeploy, TensorrtLlm, Transformers, Exllamav2],
        &[
            "compressed-tensors",
            "gptq",
            "awq",
            "auto-round",
            "bitsandbytes",
            "modelopt",
            "deepseek-fp8",
            "fp8",
            "native",
        ],
        Refused,
        CodedEmbedding,
        ("an unquantized token embedding", EMBEDDINGS, "quantize again without --embeddings"),
    ),
];
