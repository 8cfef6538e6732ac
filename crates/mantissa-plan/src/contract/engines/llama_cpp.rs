//! llama.cpp: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::subject::{FormatClass, Observed};
use crate::hardware::Maker;

use FormatClass::{Blocks, Mxfp4, Nvfp4};
use Severity::{Refused, Warning, Wrong};

pub(super) static ENGINE: Engine = Engine {
    name: "llama.cpp",
    title: "llama.cpp",
    typed: &[
        "ollama",
        "lmstudio",
        "lm-studio",
        "koboldcpp",
        "llamafile",
        "jan",
        "gpt4all",
        "llamacpp",
        "llama-cpp",
        "llama-server",
        "kobold",
    ],
    makers: &[Maker::Nvidia, Maker::Amd, Maker::Apple, Maker::Cpu],
    command: Some("llama-cli -m {model} -p {prompt}"),
    split: None,
    keeps: &["gguf"],
    widens: &[],
    shared: &[],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const GGUF: &str = "ggml-org/llama.cpp ggml/src/gguf.cpp (gguf_init_from_file: rows are whole blocks), as in llama-cpp-python 0.3.36";
const GGUF_LLAMA: &str = "ggml-org/llama.cpp conversion/llama.py (LlamaModel.permute)";
const GGUF_VOCAB: &str = "ggml-org/llama.cpp src/llama-vocab.cpp (llama_vocab::impl::load)";

const RULES: &[Rule] = &[
    Rule {
        id: "llama-cpp-convention",
        conventions: &[],
        severity: Refused,
        requires: "one GGUF file",
        check: Check::Convention(&["gguf"]),
        source: "ggml-org/llama.cpp src/llama-model-loader.cpp",
        fix: "run mantissa quantize --format gguf or mantissa convert --format gguf",
    },
    Rule {
        id: "gguf-blocks",
        conventions: &["gguf"],
        severity: Refused,
        requires: "rows that are a whole number of blocks",
        check: Check::WholeGroups,
        source: GGUF,
        fix: "use a type with smaller blocks for this tensor; mantissa quantize falls back automatically",
    },
    Rule {
        id: "gguf-kinds",
        conventions: &["gguf"],
        severity: Refused,
        requires: "GGUF block types",
        check: Check::Kinds(&[Blocks, Mxfp4, Nvfp4]),
        source: GGUF,
        fix: "use q4_k_m, q8_0 or another recipe of block types",
    },
    Rule {
        id: "gguf-norms",
        conventions: &["gguf"],
        severity: Refused,
        requires: "norms and biases as F32",
        check: Check::Seen(Observed::Norm),
        source: "ggml-org/llama.cpp ggml/src/ggml-cpu/binary-ops.cpp: multiplication with norms takes F32",
        fix: "rewrite the file with F32 norms",
    },
    Rule {
        id: "gguf-row-order",
        conventions: &["gguf"],
        severity: Wrong,
        requires: "q and k rows with the halves of each head interleaved, in the llama architecture only",
        check: Check::Seen(Observed::RowOrder),
        source: GGUF_LLAMA,
        fix: "convert again with the architecture's permutation",
    },
    Rule {
        id: "gguf-tokenizer",
        conventions: &["gguf"],
        severity: Refused,
        requires: "tokenizer.ggml.model and tokenizer.ggml.tokens in the metadata",
        check: Check::Seen(Observed::Tokenizer),
        source: GGUF_VOCAB,
        fix: "write the file from a model folder that has tokenizer.json",
    },
    Rule {
        id: "gguf-no-vocabulary",
        conventions: &["gguf"],
        severity: Warning,
        requires: "a tokenizer for text; without one (no_vocab) the file runs on token ids only",
        check: Check::Seen(Observed::NoVocabulary),
        source: GGUF_VOCAB,
        fix: "write the file from a model folder that has tokenizer.json",
    },
    Rule {
        id: "gguf-pre-tokenizer",
        conventions: &["gguf"],
        severity: Wrong,
        requires: "tokenizer.ggml.pre for a byte-level tokenizer: without it text is split differently",
        check: Check::Seen(Observed::PreTokenizer),
        source: GGUF_VOCAB,
        fix: "rewrite the file with a converter that knows the tokenizer",
    },
    Rule {
        id: "gguf-other-tokenizer",
        conventions: &["gguf"],
        severity: Wrong,
        requires: "a tokenizer that encodes the tokens of the tokenizer.json that the file was made from",
        check: Check::Seen(Observed::OtherTokenizer),
        source: GGUF_VOCAB,
        fix: "run the model from its folder, or take the setting that the note names out of tokenizer.json",
    },
    Rule {
        id: "gguf-bos-rule",
        conventions: &["gguf"],
        severity: Warning,
        requires: "tokenizer.ggml.add_bos_token next to bos_token_id: without it the tokenizer type decides",
        check: Check::Seen(Observed::BosRule),
        source: GGUF_VOCAB,
        fix: "write the key with the value of the source's tokenizer",
    },
    Rule {
        id: "gguf-ends",
        conventions: &["gguf"],
        severity: Warning,
        requires: "control or user-defined tokens wherever a name is that of an end token: llama.cpp ends at these names, other readers follow the type",
        check: Check::Seen(Observed::EndOfName),
        source: GGUF_VOCAB,
        fix: "set the token's tokenizer.ggml.token_type to 3 (control), or convert the source again",
    },
    Rule {
        id: "gguf-default-end",
        conventions: &["gguf"],
        severity: Warning,
        requires: "tokenizer.ggml.eos_token_id: without it llama.cpp ends at token 2 (kind llama) or 11 (gpt2), even if that is plain text",
        check: Check::Seen(Observed::EndByDefault),
        source: GGUF_VOCAB,
        fix: "write the key with the id of the token that ends a text",
    },
    Rule {
        id: "gguf-vocabulary",
        conventions: &["gguf"],
        severity: Refused,
        requires: "as many tokens as embedding rows",
        check: Check::Seen(Observed::Vocabulary),
        source: GGUF_VOCAB,
        fix: "pad the token list to the embedding rows",
    },
];

/// Configurations that it accepts and refuses, read from its source: llama.cpp, as of llama-cpp-python 0.3.36.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

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
        Case::takes("gguf", "q6_k", "", "src/llama-quant.cpp: each tensor has its own type")
            .with("mixed=q8_0"),
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
        Case::refuses("gguf", "q4_0", "", "gguf-other-tokenizer", VOCAB).with("seen=other-tokenizer"),
        Case::refuses(
            "gguf",
            "q4_0",
            "",
            "gguf-vocabulary",
            "src/models/llama.cpp: token_embd has n_vocab rows",
        )
        .with("seen=vocabulary"),
        Case::refuses("compressed-tensors", "int4-g128", "", "llama-cpp-convention", LOADER),
        Case::refuses("gptq", "int4-g128", "", "llama-cpp-convention", LOADER),
        Case::refuses("awq", "int4-g128-asym", "", "llama-cpp-convention", LOADER),
        Case::refuses("mlx", "int4-g64-asym:minmax", "", "llama-cpp-convention", LOADER),
        Case::refuses("exl2", "int4-g128", "", "llama-cpp-convention", LOADER),
        Case::refuses("dense", "", "", "llama-cpp-convention", LOADER),
    ];
}
