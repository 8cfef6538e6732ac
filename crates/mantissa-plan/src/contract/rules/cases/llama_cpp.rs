//! llama.cpp, as of llama-cpp-python 0.3.36.

use super::case::Case;

const TYPES: &str = "ggml/src/ggml.c: type_traits";
const ROWS: &str = "ggml/src/gguf.cpp: gguf_init_from_file, rows are whole blocks";
const LOADER: &str = "src/llama-model-loader.cpp: gguf_init_from_file refuses other magic";
const VOCAB: &str = "src/llama-vocab.cpp: llama_vocab::impl::load";

pub(super) const CASES: &[Case] = &[
    Case::takes("gguf", "q4_0", "", TYPES),
    Case::takes("gguf", "q4_1", "", TYPES),
    Case::takes("gguf", "q5_0", "", TYPES),
    Case::takes("gguf", "q8_0", "", TYPES),
    Case::takes("gguf", "q2_k", "", TYPES),
    Case::takes("gguf", "q3_k", "", TYPES),
    Case::takes("gguf", "q4_k", "", TYPES),
    Case::takes("gguf", "q5_k", "", TYPES),
    Case::takes("gguf", "q6_k", "", TYPES),
    Case::takes("gguf", "iq2_xxs", "", TYPES),
    Case::takes("gguf", "iq3_s", "", TYPES),
    Case::takes("gguf", "iq4_nl", "", TYPES),
    Case::takes("gguf", "iq4_xs", "", TYPES),
    Case::takes("gguf", "tq1_0", "", TYPES),
    Case::takes("gguf", "tq2_0", "", TYPES),
    Case::takes("gguf", "mxfp4", "", TYPES),
    Case::takes("gguf", "q8_0", "", ROWS).with("cols=352"),
    Case::takes("gguf", "q6_k", "", "src/llama-quant.cpp: each tensor has its own type").with("mixed=q8_0"),
    Case::refuses("gguf", "q4_k", "", "gguf-blocks", ROWS).with("cols=352"),
    Case::refuses("gguf", "q8_0", "", "gguf-blocks", ROWS).with("cols=4104"),
    Case::refuses("gguf", "int4-g128", "", "gguf-kinds", TYPES),
    Case::refuses(
        "gguf",
        "q4_0",
        "",
        "gguf-norms",
        "ggml/src/ggml-cpu/binary-ops.cpp: products with norms take F32",
    )
    .with("seen=norm"),
    Case::refuses("gguf", "q4_0", "", "gguf-row-order", "conversion/llama.py: LlamaModel.permute")
        .with("seen=row-order"),
    Case::refuses("gguf", "q4_0", "", "gguf-tokenizer", VOCAB).with("seen=tokenizer"),
    Case::refuses("gguf", "q4_0", "", "gguf-pre-tokenizer", VOCAB).with("seen=pre-tokenizer"),
    Case::refuses("gguf", "q4_0", "", "gguf-vocabulary", "src/models/llama.cpp: token_embd has n_vocab rows")
        .with("seen=vocabulary"),
    Case::refuses("compressed-tensors", "int4-g128", "", "llama-cpp-convention", LOADER),
    Case::refuses("gptq", "int4-g128", "", "llama-cpp-convention", LOADER),
    Case::refuses("awq", "int4-g128-asym", "", "llama-cpp-convention", LOADER),
    Case::refuses("mlx", "int4-g64-asym:minmax", "", "llama-cpp-convention", LOADER),
    Case::refuses("exl2", "int4-g128", "", "llama-cpp-convention", LOADER),
    Case::refuses("dense", "", "", "llama-cpp-convention", LOADER),
];
