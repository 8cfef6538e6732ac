//! llama.cpp.

use super::super::subject::{Kind, Observed};
use super::super::{Check, Rule, Server, Severity};

use Kind::{Blocks, Mxfp4, Nvfp4};
use Server::LlamaCpp;
use Severity::{Refused, Warning, Wrong};

const GGUF: &str = "ggml-org/llama.cpp ggml/src/gguf.cpp (gguf_init_from_file: rows are whole blocks)";
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
        cure: "mantissa quantize --format gguf, or mantissa convert --format gguf",
    },
    Rule {
        id: "gguf-blocks",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "rows that are whole blocks",
        check: Check::WholeGroups,
        source: GGUF,
        cure: "a type with smaller blocks for this tensor; mantissa quantize falls back by itself",
    },
    Rule {
        id: "gguf-kinds",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "types of GGUF",
        check: Check::Kinds(&[Blocks, Mxfp4, Nvfp4]),
        source: GGUF,
        cure: "q4_k_m, q8_0 or another recipe of block types",
    },
    Rule {
        id: "gguf-norms",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "norms and biases as F32",
        check: Check::Seen(Observed::Norm),
        source: "ggml-org/llama.cpp ggml/src/ggml-cpu/binary-ops.cpp: products with norms take F32",
        cure: "write the file again with F32 norms",
    },
    Rule {
        id: "gguf-row-order",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Wrong,
        requires: "rows of q and k with the halves of each head interleaved, in the llama architecture only",
        check: Check::Seen(Observed::RowOrder),
        source: GGUF_LLAMA,
        cure: "convert again with the permutation of the architecture",
    },
    Rule {
        id: "gguf-tokenizer",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "tokenizer.ggml.model and tokenizer.ggml.tokens in the metadata",
        check: Check::Seen(Observed::Tokenizer),
        source: GGUF_VOCAB,
        cure: "write the file from a folder that has its tokenizer.json",
    },
    Rule {
        id: "gguf-no-vocabulary",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Warning,
        requires: "a tokenizer for text; without one (no_vocab) the file runs on token ids only",
        check: Check::Seen(Observed::NoVocabulary),
        source: GGUF_VOCAB,
        cure: "write the file from a folder that has its tokenizer.json",
    },
    Rule {
        id: "gguf-pre-tokenizer",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Wrong,
        requires: "tokenizer.ggml.pre beside a byte-level tokenizer: without it text is cut in another way",
        check: Check::Seen(Observed::PreTokenizer),
        source: GGUF_VOCAB,
        cure: "write the file again with a converter that knows the tokenizer",
    },
    Rule {
        id: "gguf-bos-rule",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Warning,
        requires: "tokenizer.ggml.add_bos_token beside bos_token_id: without it the kind of the tokenizer decides",
        check: Check::Seen(Observed::BosRule),
        source: GGUF_VOCAB,
        cure: "write the key as the source's tokenizer does it",
    },
    Rule {
        id: "gguf-vocabulary",
        servers: &[LlamaCpp],
        conventions: &["gguf"],
        severity: Refused,
        requires: "as many tokens as the embedding has rows",
        check: Check::Seen(Observed::Vocabulary),
        source: GGUF_VOCAB,
        cure: "pad the tokens to the rows of the embedding",
    },
];
