//! End tokens: the tokens after which a model has finished its text or turn.
//!
//! Five places state them: `config.json`, `generation_config.json` and `tokenizer_config.json` (or `special_tokens_map.json`) of
//! a folder, the keys of a GGUF file, and names that every publisher gives to such tokens. A model stops at the union.

use std::fmt;

use serde::Serialize;

use crate::error::Result;
use crate::gguf::{Metadata, Value};

/// Keys of a GGUF file: end of the text, of a turn, and of a message before the result of a tool. llama.cpp stops at each.
pub const GGUF_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Names of end tokens, by which llama.cpp finds them too (`llama-vocab.cpp`).
pub const NAMES: [&str; 20] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    // The result of a tool follows (Gemma 4).
    "<|tool_response>",
    // MiniMax-M2.
    "[e~[",
];

/// Names of tokens that end a text where nothing else states an end: they separate texts, and in some vocabularies are markup.
const LAST: [&str; 2] = ["</s>", "<eos>"];

/// End of a text in a GGUF file without its key, by the kind of tokenizer, if it is a control token (`llama-vocab.cpp`).
const DEFAULTS: [(&str, u32); 2] = [("llama", 2), ("gpt2", 11)];

/// Type of a control token (`tokenizer.ggml.token_type`).
const CONTROL: u64 = 3;

/// Returns the tokens `(id, text)` that are named like end tokens. In the formats of gpt-oss and Solar Open `<|end|>` ends a
/// message only, and others end the turn.
pub fn named<'a>(tokens: impl IntoIterator<Item = (u32, &'a str)>) -> impl Iterator<Item = (u32, &'a str)> {
    let named: Vec<_> = tokens.into_iter().filter(|(_, text)| NAMES.contains(text)).collect();
    let has = |name: &str| named.iter().any(|(_, text)| *text == name);
    let has_calls = has("<|call|>") || has("<|calls|>");
    let has_turns = has_calls && (has("<|return|>") || has("<|flush|>"));
    named.into_iter().filter(move |(_, text)| *text != "<|end|>" || !has_turns)
}

/// Place that states an end token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum Source {
    /// A field of a file, or a key of a GGUF file.
    Field(String),
    /// The name of the token.
    Name,
}

impl From<Source> for String {
    fn from(source: Source) -> Self {
        source.to_string()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Field(field) => f.write_str(field),
            Source::Name => f.write_str("its name"),
        }
    }
}

/// An end token with all places that state it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndToken {
    /// Id of the token.
    pub id: u32,
    /// Text of the token, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Places that state it, the first first.
    pub sources: Vec<Source>,
}

/// Returns the id at which llama.cpp ends if a file with a tokenizer of `kind` states none, be it a plain token or not; `None`
/// if it then ends nowhere.
pub fn default_of(kind: &str) -> Option<u32> {
    DEFAULTS.iter().find(|(of, _)| *of == kind).map(|(_, id)| *id)
}

/// End tokens of a model, in the order in which they are first stated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens {
    list: Vec<EndToken>,
}

impl EndTokens {
    /// Adds the tokens that a place states.
    pub fn add(&mut self, source: &Source, ids: impl IntoIterator<Item = u32>) {
        for id in ids {
            match self.list.iter_mut().find(|token| token.id == id) {
                Some(token) => token.sources.push(source.clone()),
                None => self.list.push(EndToken { id, text: None, sources: vec![source.clone()] }),
            }
        }
    }

    /// Adds those of the special tokens `(id, text)` that [`named`] finds; if there is no end token then, those that separate
    /// texts.
    pub fn add_named<'a>(&mut self, special: impl IntoIterator<Item = (u32, &'a str)>) {
        let special: Vec<_> = special.into_iter().collect();
        self.add(&Source::Name, named(special.iter().copied()).map(|(id, _)| id));
        if self.list.is_empty() {
            let last = special.iter().filter(|(_, text)| LAST.contains(text));
            self.add(&Source::Name, last.map(|(id, _)| *id));
        }
    }

    /// Reads the end tokens of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Field`](crate::Error::Field) for a key of another type.
    pub fn of_metadata(metadata: &Metadata) -> Result<Self> {
        /// Types of tokens that are no plain text: unknown, control, user-defined.
        const SPECIAL: [u64; 3] = [2, 3, 4];
        let mut tokens = Self::default();
        for key in GGUF_KEYS {
            let id = metadata.uint(key)?.and_then(|id| u32::try_from(id).ok());
            tokens.add(&Source::Field(key.into()), id);
        }
        let array = |key: &str| metadata.get(key).and_then(Value::as_array);
        let texts = array("tokenizer.ggml.tokens").unwrap_or_default();
        let types = array("tokenizer.ggml.token_type");
        let type_of = |id: u32| types.and_then(|types| types.get(id as usize)?.as_u64());
        if metadata.get(GGUF_KEYS[0]).is_none() {
            let kind = metadata.text("tokenizer.ggml.model")?;
            let default = kind.and_then(default_of).filter(|id| type_of(*id) == Some(CONTROL));
            let place = Source::Field("tokenizer.ggml.model: the default".into());
            tokens.add(&place, default);
        }
        // A file without types does not say which tokens are plain text.
        let is_special = |id: u32| types.is_none() || type_of(id).is_some_and(|ty| SPECIAL.contains(&ty));
        let special = (0..).zip(texts).filter(|(id, _)| is_special(*id));
        tokens.add_named(special.map(|(id, text)| (id, text.as_str().unwrap_or_default())));
        Ok(tokens.with_texts(|id| Some(texts.get(id as usize)?.as_str()?.to_owned())))
    }

    /// Adds the texts that `text` knows.
    #[must_use]
    pub fn with_texts(mut self, text: impl Fn(u32) -> Option<String>) -> Self {
        self.list.iter_mut().for_each(|token| token.text = text(token.id));
        self
    }

    /// Returns the ids.
    pub fn ids(&self) -> Vec<u32> {
        self.list.iter().map(|token| token.id).collect()
    }

    /// Returns the tokens with their sources.
    pub fn iter(&self) -> impl Iterator<Item = &EndToken> {
        self.list.iter()
    }

    /// Returns the keys of a GGUF file for the end tokens `ids`, `first` as the end of the text if it is one of them. `names` gives
    /// a token's text. The second list has the tokens that no key and no name states.
    pub fn gguf_keys(
        ids: &[u32],
        first: Option<u32>,
        name: impl Fn(u32) -> Option<String>,
    ) -> (Vec<(&'static str, u32)>, Vec<u32>) {
        let first = first.filter(|first| ids.contains(first) || ids.is_empty()).or(ids.first().copied());
        let mut keys: Vec<_> = first.map(|first| (GGUF_KEYS[0], first)).into_iter().collect();
        // Tokens without a telling name need a key most; the end of a turn comes before the end of a message.
        let is_named = |id: &u32| name(*id).is_some_and(|name| NAMES.contains(&name.as_str()));
        let mut rest: Vec<u32> = ids.iter().copied().filter(|id| Some(*id) != first).collect();
        rest.sort_by_key(|id| is_named(id));
        let message = rest.iter().position(|id| name(*id).as_deref() == Some("<|eom_id|>"));
        if let Some(at) = message {
            keys.push((GGUF_KEYS[2], rest.remove(at)));
        }
        let mut lost = Vec::new();
        for id in rest {
            match GGUF_KEYS[1..].iter().find(|key| keys.iter().all(|(used, _)| used != *key)) {
                Some(key) => keys.push((key, id)),
                None if is_named(&id) => {}
                None => lost.push(id),
            }
        }
        (keys, lost)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_token_has_all_its_sources() {
        let mut tokens = EndTokens::default();
        let place = Source::Field("generation_config.json".into());
        tokens.add(&place, [7, 2]);
        tokens.add(&Source::Field("config.json".into()), [2]);
        tokens.add_named([(3, "<|im_end|>"), (4, "<|im_start|>"), (2, "<|endoftext|>")]);
        assert_eq!(tokens.ids(), [7, 2, 3]);
        let sources: Vec<String> = tokens.list[1].sources.iter().map(ToString::to_string).collect();
        assert_eq!(sources, ["generation_config.json", "config.json", "its name"]);
    }

    #[test]
    fn a_message_of_harmony_does_not_end_the_turn() {
        let mut tokens = EndTokens::default();
        tokens.add_named([(1, "<|end|>"), (2, "<|return|>"), (3, "<|call|>")]);
        assert_eq!(tokens.ids(), [2, 3]);
        let mut tokens = EndTokens::default();
        tokens.add_named([(1, "<|end|>")]);
        assert_eq!(tokens.ids(), [1]);
        for turns in [["<|calls|>", "<|flush|>"], ["<|calls|>", "<|return|>"]] {
            let mut tokens = EndTokens::default();
            tokens.add_named([(1, "<|end|>"), (2, turns[0]), (3, turns[1])]);
            assert_eq!(tokens.ids(), [2, 3], "{turns:?}");
        }
    }

    #[test]
    fn what_separates_texts_ends_one_where_nothing_else_does() {
        let mut tokens = EndTokens::default();
        tokens.add_named([(1, "<s>"), (2, "</s>")]);
        assert_eq!(tokens.ids(), [2]);
        let mut tokens = EndTokens::default();
        tokens.add_named([(2, "</s>"), (3, "[e~["), (4, "<eos>")]);
        assert_eq!(tokens.ids(), [3]);
    }

    /// Metadata of three tokens, with these types.
    fn metadata(kind: &str, texts: [&str; 3], types: Option<[i32; 3]>, eos: Option<u32>) -> Metadata {
        let mut pairs = vec![
            ("tokenizer.ggml.model".to_owned(), Value::String(kind.into())),
            ("tokenizer.ggml.tokens".to_owned(), Value::strings(texts.map(str::to_owned))),
        ];
        let types =
            types.map(|types| Value::Array(crate::gguf::ValueType::I32, types.map(Value::I32).to_vec()));
        pairs.extend(types.map(|types| ("tokenizer.ggml.token_type".to_owned(), types)));
        pairs.extend(eos.map(|id| (GGUF_KEYS[0].to_owned(), Value::U32(id))));
        Metadata::from_pairs(std::path::Path::new("m.gguf"), pairs)
    }

    #[test]
    fn a_file_without_a_key_has_the_default_of_its_tokenizer() {
        let ids = |kind: &str, texts, types, eos| {
            EndTokens::of_metadata(&metadata(kind, texts, types, eos)).unwrap().ids()
        };
        let plain = ["<unk>", "<s>", "end"];
        assert_eq!(ids("llama", plain, Some([2, 3, 3]), None), [2]);
        assert_eq!(ids("llama", plain, Some([2, 3, 3]), Some(1)), [1], "the key is what counts");
        assert!(ids("llama", plain, Some([2, 3, 1]), None).is_empty(), "a plain token ends nothing");
        assert!(ids("gpt2", plain, Some([2, 3, 3]), None).is_empty());
        let named = ["a", "<|im_end|>", "b"];
        assert_eq!(ids("gpt2", named, Some([1, 3, 1]), None), [1]);
        assert!(ids("gpt2", named, Some([1, 1, 1]), None).is_empty());
        assert_eq!(ids("gpt2", named, None, None), [1], "no types");
    }

    #[test]
    fn keys_hold_what_names_do_not_tell() {
        let name = |id: u32| {
            ["<s>", "</s>", "<|im_end|>", "x", "y", "<|eom_id|>"]
                .get(id as usize)
                .map(|name| (*name).to_owned())
        };
        let keys = |ids: &[u32], first| EndTokens::gguf_keys(ids, first, name);
        let [eos, eot, eom] = GGUF_KEYS;
        assert_eq!(keys(&[1, 0], Some(1)), (vec![(eos, 1), (eot, 0)], vec![]));
        assert_eq!(keys(&[2, 1], Some(1)), (vec![(eos, 1), (eot, 2)], vec![]));
        assert_eq!(keys(&[1, 2, 5], Some(1)), (vec![(eos, 1), (eom, 5), (eot, 2)], vec![]));
        assert_eq!(keys(&[1, 2, 3, 0], Some(1)), (vec![(eos, 1), (eot, 3), (eom, 0)], vec![]));
        assert_eq!(keys(&[1, 3, 4, 0], Some(1)).1, [0]);
        assert_eq!(keys(&[4], Some(1)), (vec![(eos, 4)], vec![]));
        assert_eq!(keys(&[], Some(1)), (vec![(eos, 1)], vec![]));
        assert_eq!(keys(&[], None), (vec![], vec![]));
    }
}
