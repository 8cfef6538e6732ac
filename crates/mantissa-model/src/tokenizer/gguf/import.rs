//! Metadata → `tokenizer.json`.

use std::collections::{BTreeMap, HashMap};

use mantissa_store::Result;
use mantissa_store::gguf::{Metadata, Value};
use serde_json::{Value as Json, json};

use super::pre_tokenizers::{self, GPT2, PRE_TOKENIZERS};
use super::{LOWERCASE, MERGED, SPACE, WORDS, token_type};

/// Longest token that is split in all ways, in characters. SentencePiece's own default limit is 16.
const MAX_CUT: usize = 512;

/// Largest text of all merges that follow from a vocabulary, in bytes, and largest number of them. Vocabularies of a quarter
/// of a million tokens give 8 MB and 600 000.
const MAX_MERGES: (usize, usize) = (64 << 20, 4 << 20);

/// Converts the tokenizer of a GGUF file to a `tokenizer.json`.
///
/// # Errors
/// [`mantissa_store::Error::Field`] names the key that is missing, malformed or of an unknown kind.
pub(crate) fn tokenizer_json(metadata: &Metadata) -> Result<Json> {
    let vocabulary = Vocabulary::read(metadata)?;
    match metadata.text("tokenizer.ggml.model")? {
        Some("gpt2") => byte_level(metadata, &vocabulary),
        Some("llama") => sentence_piece(metadata, &vocabulary),
        Some(MERGED) => merged(metadata, &vocabulary),
        Some(WORDS) => words(metadata, &vocabulary, json!({ "type": "WhitespaceSplit" })),
        other => {
            let found = other.map_or("nothing".to_owned(), |name| format!("\"{name}\""));
            Err(metadata.fault(
                "tokenizer.ggml.model",
                found,
                "\"gpt2\", \"llama\", \"gemma4\" or \"whitespace\"; token windows need no tokenizer",
            ))
        }
    }
}

/// Reads the special tokens by their names in chat templates.
///
/// # Errors
/// As [`tokenizer_json`].
pub(crate) fn special_tokens(metadata: &Metadata) -> Result<BTreeMap<String, String>> {
    const KEYS: [(&str, &str); 4] = [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ];
    let vocabulary = Vocabulary::read(metadata)?;
    let mut all = BTreeMap::new();
    for (name, key) in KEYS {
        if let Some((_, token)) = vocabulary.named(metadata, key)? {
            all.insert(name.to_owned(), token.to_owned());
        }
    }
    Ok(all)
}

/// Special tokens of SentencePiece in a file that does not name them, if they are control tokens (`llama-vocab.cpp`).
const DEFAULTS: [(&str, usize); 2] = [("tokenizer.ggml.bos_token_id", 1), ("tokenizer.ggml.eos_token_id", 2)];

struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    types: Vec<i32>,
    ids: HashMap<&'a str, usize>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = metadata.list(TOKENS, "an array of strings", Value::as_str)?;
        let tokens = tokens.ok_or_else(|| metadata.fault(TOKENS, "nothing", "the list of tokens"))?;
        let types = list(metadata, "tokenizer.ggml.token_type", tokens.len(), |value| match value {
            Value::I32(ty) => Some(*ty),
            _ => None,
        })?;
        let types = types.unwrap_or_else(|| vec![token_type::NORMAL; tokens.len()]);
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if let Some(first) = ids.insert(*token, id) {
                let found = format!("token \"{token}\" twice, as {first} and {id}");
                return Err(metadata.fault(TOKENS, found, "every token once"));
            }
        }
        Ok(Vocabulary { tokens, types, ids })
    }

    fn json(&self) -> Json {
        self.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect()
    }

    fn added_tokens(&self) -> Vec<Json> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        all.filter_map(|(id, (token, ty))| {
            let special = match *ty {
                token_type::CONTROL | token_type::UNKNOWN => true,
                token_type::USER_DEFINED => false,
                _ => return None,
            };
            Some(json!({
                "id": id, "content": token, "special": special, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false
            }))
        })
        .collect()
    }

    /// Returns id and text of the token that a key names.
    fn named(&self, metadata: &Metadata, key: &str) -> Result<Option<(usize, &'a str)>> {
        let Some(id) = metadata.uint(key)? else { return self.default_of(metadata, key) };
        let at = usize::try_from(id).ok().filter(|&id| id < self.tokens.len());
        let at =
            at.ok_or_else(|| metadata.fault(key, id.to_string(), format!("below {}", self.tokens.len())))?;
        Ok(Some((at, self.tokens[at])))
    }

    /// Returns the token that a key names where it is missing.
    fn default_of(&self, metadata: &Metadata, key: &str) -> Result<Option<(usize, &'a str)>> {
        let default = DEFAULTS.into_iter().find(|(known, _)| *known == key);
        let is_sentence_piece = metadata.text("tokenizer.ggml.model")? == Some("llama");
        let default = default.filter(|(_, id)| {
            is_sentence_piece && self.types.get(*id).is_some_and(|ty| *ty == token_type::CONTROL)
        });
        Ok(default.map(|(_, id)| (id, self.tokens[id])))
    }
}

/// Reads a list of one value per token.
fn list<'a, T>(
    metadata: &'a Metadata,
    key: &str,
    count: usize,
    of: impl Fn(&'a Value) -> Option<T>,
) -> Result<Option<Vec<T>>> {
    let values = metadata.list(key, "a list of one number for every token", of)?;
    match values {
        Some(values) if values.len() != count => Err(metadata.fault(
            key,
            format!("{} values", values.len()),
            format!("{count}, one for every token"),
        )),
        values => Ok(values),
    }
}

fn byte_level(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Json> {
    const PRE: &str = "tokenizer.ggml.pre";
    // Files of before the key was there have none.
    let name = metadata.text(PRE)?.unwrap_or("default");
    if pre_tokenizers::WHOLE_TEXT.contains(&name) {
        return merged(metadata, vocabulary);
    }
    if name == WORDS {
        // White space is a piece of its own here, and is left out if it is no token.
        return words(metadata, vocabulary, split(r"\S+"));
    }
    let pre = pre_tokenizers::find(name).ok_or_else(|| {
        let names: Vec<_> = PRE_TOKENIZERS
            .iter()
            .map(|pre| pre.name)
            .chain(pre_tokenizers::WHOLE_TEXT)
            .chain([WORDS])
            .collect();
        metadata.fault(
            PRE,
            format!("\"{name}\""),
            format!("{}; token windows need no tokenizer", names.join(", ")),
        )
    })?;
    let merges = merges(metadata)?;
    let (splits, uses_regex) = match pre.splits {
        [before @ .., GPT2] => (before, true),
        splits => (splits, false),
    };
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": uses_regex
    });
    let pre_tokenizer = match splits {
        [] => byte_level,
        _ => {
            let steps: Vec<Json> = splits.iter().map(|regex| split(regex)).chain([byte_level]).collect();
            json!({ "type": "Sequence", "pretokenizers": steps })
        }
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": if pre.nfc { json!({ "type": "NFC" }) } else { Json::Null },
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(metadata, vocabulary, Begin::Default(pre.add_bos))?,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignore_merges, "vocab": vocabulary.json(), "merges": merges
        }
    }))
}

/// Makes the step of a pre-tokenization that puts each match apart.
fn split(regex: &str) -> Json {
    json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
}

/// Merges over the characters of words, which `pre_tokenizer` finds; characters without a token are left out.
fn words(metadata: &Metadata, vocabulary: &Vocabulary<'_>, pre_tokenizer: Json) -> Result<Json> {
    let lowercase = metadata.flag(&format!("tokenizer.ggml.{LOWERCASE}"))?.unwrap_or(false);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": if lowercase { json!({ "type": "Lowercase" }) } else { Json::Null },
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(metadata, vocabulary, Begin::Default(false))?,
        "decoder": { "type": "Fuse" },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": vocabulary.types.contains(&token_type::BYTE),
            "ignore_merges": false, "vocab": vocabulary.json(), "merges": merges(metadata)?
        }
    }))
}

/// Pairs of tokens in the order in which they are merged.
fn merges(metadata: &Metadata) -> Result<Vec<Json>> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = metadata.list(MERGES, "an array of strings", |value| {
        let (left, right) = value.as_str()?.split_once(' ')?;
        Some(json!([left, right]))
    })?;
    merges.ok_or_else(|| metadata.fault(MERGES, "nothing", "the list of merges"))
}

/// Merges over text in which spaces are a character, newlines apart from the rest.
fn merged(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Json> {
    // As llama.cpp does: early files of Gemma 4 say that it has none.
    let gemma = metadata.text("tokenizer.ggml.pre")? != Some("sarvam-moe");
    let bos = if gemma { Begin::Always } else { Begin::Default(true) };
    let unknown = vocabulary.named(metadata, "tokenizer.ggml.unknown_token_id")?;
    let bytes = vocabulary.types.contains(&token_type::BYTE);
    let mut decoders = vec![json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " })];
    if bytes {
        decoders.push(json!({ "type": "ByteFallback" }));
    }
    decoders.push(json!({ "type": "Fuse" }));
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": SPACE },
        "pre_tokenizer": {
            "type": "Split", "pattern": { "Regex": "[^\\n]+|\\n+" }, "behavior": "Isolated", "invert": false
        },
        "post_processor": post_processor(metadata, vocabulary, bos)?,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown.map(|(_, token)| token),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": bytes, "ignore_merges": false, "vocab": vocabulary.json(),
            "merges": merges(metadata)?
        }
    }))
}

fn sentence_piece(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let trim = metadata.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false);
    let bytes = vocabulary.types.contains(&token_type::BYTE);
    let unknown = vocabulary.named(metadata, "tokenizer.ggml.unknown_token_id")?;
    let unknown = unknown.or_else(|| {
        let at = vocabulary.types.iter().position(|ty| *ty == token_type::UNKNOWN)?;
        Some((at, vocabulary.tokens[at]))
    });
    let mut normalizers = Vec::new();
    if trim {
        for (regex, content) in [("\\A +| +\\z", ""), (" {2,}", " ")] {
            normalizers.push(json!({ "type": "Replace", "pattern": { "Regex": regex }, "content": content }));
        }
    }
    if prefix {
        normalizers.push(json!({ "type": "Prepend", "prepend": SPACE }));
    }
    normalizers.push(json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE }));
    let mut decoders = vec![json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " })];
    if bytes {
        decoders.push(json!({ "type": "ByteFallback" }));
    }
    decoders.push(json!({ "type": "Fuse" }));
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": post_processor(metadata, vocabulary, Begin::Default(true))?,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown.map(|(_, token)| token),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": bytes, "ignore_merges": false, "vocab": vocabulary.json(),
            "merges": merges_by_score(metadata, vocabulary)?
        }
    }))
}

/// Lists every way to split a token into two tokens, by falling score of the whole.
fn merges_by_score(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Vec<Json>> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = list(metadata, SCORES, vocabulary.tokens.len(), |value| match value {
        Value::F32(score) => Some(*score),
        Value::I32(score) => Some(*score as f32),
        _ => None,
    })?;
    let scores = scores.ok_or_else(|| metadata.fault(SCORES, "nothing", "the list of scores"))?;
    let (mut cuts, mut bytes) = (Vec::new(), 0);
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.types[id] != token_type::NORMAL {
            continue;
        }
        for (at, _) in token.char_indices().skip(1).take(MAX_CUT) {
            let (left, right) = token.split_at(at);
            if let (Some(&l), Some(&r)) = (vocabulary.ids.get(left), vocabulary.ids.get(right)) {
                cuts.push((id, l, r));
                bytes += token.len();
                if bytes > MAX_MERGES.0 || cuts.len() > MAX_MERGES.1 {
                    let found = format!("tokens that others are parts of, up to \"{token}\"");
                    let allowed = format!("at most {} merges of {} bytes in all", MAX_MERGES.1, MAX_MERGES.0);
                    return Err(metadata.fault("tokenizer.ggml.tokens", found, allowed));
                }
            }
        }
    }
    cuts.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    Ok(cuts.iter().map(|&(_, l, r)| json!([vocabulary.tokens[l], vocabulary.tokens[r]])).collect())
}

/// Rule whether a text begins with BOS.
#[derive(Clone, Copy)]
enum Begin {
    /// Whatever the file says.
    Always,
    /// As the file says, or this.
    Default(bool),
}

/// Builds the post-processor: tokens added before and after a text.
fn post_processor(metadata: &Metadata, vocabulary: &Vocabulary<'_>, begin: Begin) -> Result<Json> {
    let stated = metadata.flag("tokenizer.ggml.add_bos_token")?;
    let with_bos = match begin {
        Begin::Always => true,
        Begin::Default(default) => stated.unwrap_or(default),
    };
    let with_eos = metadata.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let bos = vocabulary.named(metadata, "tokenizer.ggml.bos_token_id")?.filter(|_| with_bos);
    let eos = vocabulary.named(metadata, "tokenizer.ggml.eos_token_id")?.filter(|_| with_eos);
    let piece = |token: &Option<(usize, &str)>| {
        token.map(|(_, t)| json!({ "SpecialToken": { "id": t, "type_id": 0 } }))
    };
    let sequence = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let single: Vec<Json> = piece(&bos).into_iter().chain([sequence("A")]).chain(piece(&eos)).collect();
    let pair: Vec<Json> =
        single.iter().cloned().chain(piece(&bos)).chain([sequence("B")]).chain(piece(&eos)).collect();
    let tokens = [bos, eos].into_iter().flatten();
    let special_tokens: serde_json::Map<_, _> =
        tokens.map(|(id, t)| (t.to_owned(), json!({ "id": t, "ids": [id], "tokens": [t] }))).collect();
    Ok(
        json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens }),
    )
}
