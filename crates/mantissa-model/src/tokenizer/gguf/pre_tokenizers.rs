//! Pre-tokenizers by the names that GGUF gives them (`tokenizer.ggml.pre`; `llama-vocab.cpp` of llama.cpp, October 2026).
//!
//! A text is split by each expression in turn, and what is between two matches stays. Expressions are those of the models' own
//! `tokenizer.json` where llama.cpp has adapted them to its engine.

/// Splits a text into words as GPT-2's byte-level pre-tokenization does.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Punctuation in runs, as Falcon's name has it.
pub(super) const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const CJK: &str = "[一-龥\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// A pre-tokenizer by its name in GGUF.
pub(super) struct PreTokenizer {
    pub(super) name: &'static str,
    /// Other names of the same pre-tokenizer.
    pub(super) aliases: &'static [&'static str],
    /// Expressions that split the text, one after another.
    pub(super) splits: &'static [&'static str],
    /// True if a piece that is a token is not split by merges.
    pub(super) ignore_merges: bool,
    /// True if a text begins with BOS where the file does not state it.
    pub(super) add_bos: bool,
    /// True if the models' own tokenizer normalizes text to NFC first; llama.cpp does not.
    pub(super) nfc: bool,
}

const fn row(
    name: &'static str,
    aliases: &'static [&'static str],
    splits: &'static [&'static str],
) -> PreTokenizer {
    PreTokenizer { name, aliases, splits, ignore_merges: false, add_bos: false, nfc: false }
}

/// Names whose merges run over text in which spaces are a character, split at newlines alone.
pub(super) const WHOLE_TEXT: [&str; 3] = ["gemma4", "granite-embed-multi-311m", "sarvam-moe"];

/// Known pre-tokenizers. A tokenizer is written under the first that has its expressions.
pub(super) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    row(
        "gpt-2",
        &[
            "gpt2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..row(
            "llama-bpe",
            &["llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
            &[LLAMA3],
        )
    },
    // Without the rule for whole pieces.
    row("dbrx", &["smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizer { ignore_merges: true, ..row("glm4", &["glm5"], &[LLAMA3]) },
    PreTokenizer { nfc: true, ..row("qwen2", &["deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"], &[QWEN2]) },
    row("stablelm2", &["hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    PreTokenizer {
        nfc: true,
        ..row(
            "qwen35",
            &[],
            &[
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        )
    },
    row(
        "smollm",
        &["starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    PreTokenizer { nfc: true, ..row("command-r", &[], &[r"\p{N}", GPT2]) },
    row("gpt-4o", &["llama4", "kanana2", "talkie", "minimax-m2", "o200k", "o200k_base"], &[GPT4O]),
    PreTokenizer { ignore_merges: true, ..row("granite-embed-multi-97m", &[], &[GPT4O]) },
    row("tiny_aya", &["cohere2moe"], &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..row(
            "tekken",
            &[],
            &[
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        )
    },
    row("deepseek-v3", &["hunyuan-dense", "joyai-llm", "hy_v4"], &[r"\p{N}{1,3}", CJK, DEEPSEEK3]),
    row(
        "spark2_5",
        &[],
        &[
            r"\p{N}{1,3}",
            CJK,
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##,
            r"\p{N}",
        ],
    ),
    row(
        "deepseek-llm",
        &[],
        &[
            r"[\r\n]",
            "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            "[一-龥\u{800}-一가-\u{d7ff}]+",
            r"\p{N}+",
        ],
    ),
    row(
        "deepseek-coder",
        &[],
        &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u{800}-一가-\u{d7ff}]+", r"\p{N}"],
    ),
    PreTokenizer {
        ignore_merges: true,
        ..row(
            "youtu",
            &[],
            &[
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        )
    },
    row("falcon", &[], &[PUNCTUATION, GPT2, "[0-9][0-9][0-9]"]),
    row("default", &[], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    row("bloom", &["poro-chat", "gpt3-finnish"], &[BLOOM]),
    row("viking", &[], &[BLOOM, r"\p{N}"]),
    PreTokenizer {
        add_bos: true,
        ..row(
            "chameleon",
            &[],
            &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
        )
    },
    row(
        "kimi-k2",
        &[],
        &[
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    row("superbpe", &[], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    row(
        "bailingmoe",
        &["bailingmoe2", "llada-moe"],
        &[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    row(
        "seed-coder",
        &[],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    row(
        "ufakzeka",
        &[],
        &[r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    ),
    row(
        "afmoe",
        &[],
        &[
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[一-\u{9fff}㐀-\u{4dbf}\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+",
            DEEPSEEK3,
        ],
    ),
    row("laguna", &[], &[r"[^\n]+|[\n]+", QWEN2]),
    row(
        "exaone-moe",
        &[],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    row(
        "jais-2",
        &[],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        ],
    ),
    PreTokenizer {
        ignore_merges: true,
        ..row(
            "minicpm5",
            &[],
            &[
                r"\p{N}{1,3}",
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        )
    },
];

/// Finds a pre-tokenizer by one of its names.
pub(super) fn find(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|pre| pre.name == name || pre.aliases.contains(&name))
}
