//! Rules of llama.cpp.

use super::super::subject::{Kind, Observed};
use super::super::{Check, Rule, Server, Severity};

use Kind::{Blocks, Mxfp4, Nvfp4};
use Server::LlamaCpp;
use Severity::{Refused, Warning, Wrong};

const GGUF: &str = "ggml-org/llama.cpp ggml/src/gguf.cpp (gguf_init_from_file: rows are whole blocks), as in llama-cpp-python 0.3.36";
const GGUF_LLAMA: &str = "ggml-org/llama.cpp conversion/llama.py (LlamaModel.permute)";
const GGUF_VOCAB: &str = "ggml-org/llama.cpp src/llama-vocab.cpp (llama_vocab::impl::load)";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "llama-cpp-convention",
        servers: &[LlamaCpp],
        conventions: &[],
        severity: Refused,
        requires: "one GGUF file",
        check: Check::Convention(&["gguf"]),
        source: "ggml-org/llama.cpp src/llama-model-loader.cpp",
        fix: "run mantissa quantize --format gguf or mantissa convert --format gguf",
    },
    Rule {
        id: "gguf-blocks",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "rows that are a whole number of blocks",
        check: Check::WholeGroups,
        source: GGUF,
        fix: "use a type with smaller blocks for this tensor; mantissa quantize falls back automatically",
    },
    Rule {
        id: "gguf-kinds",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "GGUF block types",
        check: Check::Kinds(&[Blocks, Mxfp4, Nvfp4]),
        source: GGUF,
        fix: "use q4_k_m, q8_0 or another recipe of block types",
    },
    Rule {
        id: "gguf-norms",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "norms and biases as F32",
        check: Check::Seen(Observed::Norm),
        source: "ggml-org/llama.cpp ggml/src/ggml-cpu/binary-ops.cpp: multiplication with norms takes F32",
        fix: "rewrite the file with F32 norms",
    },
    Rule {
        id: "gguf-row-order",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Wrong,
        requires: "q and k rows with the halves of each head interleaved, in the llama architecture only",
        check: Check::Seen(Observed::RowOrder),
        source: GGUF_LLAMA,
        fix: "convert again with the architecture's permutation",
    },
    Rule {
        id: "gguf-tokenizer",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "tokenizer.ggml.model and tokenizer.ggml.tokens in the metadata",
        check: Check::Seen(Observed::Tokenizer),
        source: GGUF_VOCAB,
        fix: "write the file from a model folder that has tokenizer.json",
    },
    Rule {
        id: "gguf-no-vocabulary",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Warning,
        requires: "a tokenizer for text; without one (no_vocab) the file runs on token ids only",
        check: Check::Seen(Observed::NoVocabulary),
        source: GGUF_VOCAB,
        fix: "write the file from a model folder that has tokenizer.json",
    },
    Rule {
        id: "gguf-pre-tokenizer",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Wrong,
        requires: "tokenizer.ggml.pre for a byte-level tokenizer: without it text is split differently",
        check: Check::Seen(Observed::PreTokenizer),
        source: GGUF_VOCAB,
        fix: "rewrite the file with a converter that knows the tokenizer",
    },
    Rule {
        id: "gguf-bos-rule",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Warning,
        requires: "tokenizer.ggml.add_bos_token next to bos_token_id: without it the tokenizer type decides",
        check: Check::Seen(Observed::BosRule),
        source: GGUF_VOCAB,
        fix: "write the key with the value of the source's tokenizer",
    },
    Rule {
        id: "gguf-vocabulary",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "as many tokens as embedding rows",
        check: Check::Seen(Observed::Vocabulary),
        source: GGUF_VOCAB,
        fix: "pad the token list to the embedding rows",
    },
];
