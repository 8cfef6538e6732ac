//! `tokenizer.json` → metadata.

use std::collections::HashMap;
use std::path::Path;

use mantissa_kernels::give_back_memory;
use mantissa_store::gguf::{Metadata, Value, ValueType};
use mantissa_store::{json, regular};
use serde_json::Value as Json;

use super::import::tokenizer_json;
use super::pre_tokenizers::{GPT2, PRE_TOKENIZERS, PUNCTUATION};
use super::{LOWERCASE, MERGED, SPACE, TOKENIZER_NOTE, WORDS, token_type};
use crate::tokenizer::{Bos, MAX_FILE, Tokenizer, TokenizerError};

/// Score of a token that no merge makes.
const UNREACHABLE: f32 = -1e9;

/// Tokenizer of a model folder as GGUF metadata.
#[derive(Clone, Debug)]
pub struct Exported {
    /// Keys and values.
    pub metadata: Vec<(String, Value)>,
    /// Omissions and their reasons.
    pub notes: Vec<String>,
}

/// Exports the tokenizer in the model folder `dir`, padded to the `rows` of the embedding; `merged` for an architecture whose
/// tokenizer with spaces as a character keeps its merges (`gemma4`). A folder without a tokenizer, or with one that GGUF
/// cannot express, gives the model `none` and a note: such a file runs on token ids.
///
/// # Errors
/// [`TokenizerError`] if a file is present and cannot be loaded.
pub fn export(dir: &Path, rows: usize, merged: bool) -> Result<Exported, TokenizerError> {
    // One tokenizer at a time is in memory, and the file only beside the one that it is.
    let tokenizer = match Tokenizer::load(dir) {
        Err(TokenizerError::Missing { .. }) => return Ok(without("there is no tokenizer.json")),
        tokenizer => tokenizer?,
    };
    let mut exported = match TokenizerJson::read(&tokenizer)?.exported(rows, merged)? {
        Ok(exported) => exported,
        Err(why) => return Ok(without(why)),
    };
    let (probes, path) = (tokenizer.probes()?, tokenizer.path.clone());
    drop(tokenizer);
    // What the file cannot express shows in what a reader of it encodes.
    let read = tokenizer_json(&Metadata::from_pairs(&path, exported.metadata.iter().cloned()))?.to_string();
    give_back_memory();
    let read = Tokenizer::from_json(&path, read.as_bytes())?;
    let elsewhere = as_llama_cpp_reads(&exported.metadata).map(|metadata| (metadata, probes.clone()));
    let mut found =
        read.first_difference_from(probes)?.map(|difference| ("the tokenizer of the GGUF file", difference));
    drop(read);
    if let (None, Some((metadata, probes))) = (&found, elsewhere) {
        let read = tokenizer_json(&Metadata::from_pairs(&path, metadata))?.to_string();
        let read = Tokenizer::from_json(&path, read.as_bytes())?;
        let difference = read.first_difference_from(probes)?;
        found = difference.map(|difference| ("with the GGUF file llama.cpp", difference));
    }
    if let Some((who, difference)) = found {
        let note = format!("{who} encodes other tokens than tokenizer.json: {difference}");
        exported.metadata.push((TOKENIZER_NOTE.to_owned(), Value::String(note.clone())));
        exported.notes.push(note);
    }
    give_back_memory();
    Ok(exported)
}

/// Returns the metadata of a tokenizer as llama.cpp takes it (`src/llama-vocab.cpp`), if that is otherwise than it says: for a
/// `llama` vocabulary it removes no spaces, and finds the tokens of bytes by their texts.
fn as_llama_cpp_reads(metadata: &[(String, Value)]) -> Option<Vec<(String, Value)>> {
    const KEYS: [&str; 2] = ["tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.token_type"];
    let get = |key: &str| metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value);
    if get("tokenizer.ggml.model")?.as_str() != Some("llama") {
        return None;
    }
    let texts = get("tokenizer.ggml.tokens")?.as_array()?;
    let types = get(KEYS[1])?.as_array()?;
    let as_read = |(ty, text): (&Value, &Value)| match text.as_str().is_some_and(is_byte) {
        true => Value::I32(token_type::BYTE),
        false => ty.clone(),
    };
    let read: Vec<Value> = types.iter().zip(texts).map(as_read).collect();
    if matches!(get(KEYS[0]), None | Some(Value::Bool(false))) && *types == read {
        return None;
    }
    let others = metadata.iter().filter(|(key, _)| !KEYS.contains(&key.as_str())).cloned();
    Some(others.chain([(KEYS[1].to_owned(), Value::Array(ValueType::I32, read))]).collect())
}

fn without(why: &str) -> Exported {
    let note = format!("the tokenizer is not in the GGUF file: {why}; the file runs on token ids only");
    let model = ("tokenizer.ggml.model".to_owned(), Value::String("none".to_owned()));
    Exported { metadata: vec![model], notes: vec![note] }
}

enum Kind {
    ByteLevel {
        pre: &'static str,
    },
    SentencePiece {
        prefix: bool,
        trim: bool,
    },
    /// As SentencePiece, with merges instead of scores.
    Merged,
    /// Merges of the characters of words, which white space separates.
    Words {
        lowercase: bool,
    },
}

struct TokenizerJson<'a> {
    json: Json,
    tokenizer: &'a Tokenizer,
}

impl<'a> TokenizerJson<'a> {
    /// Reads the file that `tokenizer` was loaded from.
    fn read(tokenizer: &'a Tokenizer) -> Result<Self, TokenizerError> {
        let path = &tokenizer.path;
        let bytes = regular::read(path, MAX_FILE, "a tokenizer.json")?;
        Ok(TokenizerJson { json: json::parse_strict(&bytes, path, MAX_FILE)?, tokenizer })
    }

    /// Exports the tokenizer, or says why GGUF cannot express it.
    fn exported(&self, rows: usize, merged: bool) -> Result<Result<Exported, &'static str>, TokenizerError> {
        let kind = match self.kind() {
            Err(why) => return Ok(Err(why)),
            Ok(Kind::SentencePiece { prefix: false, trim: false }) if merged => Kind::Merged,
            Ok(kind) => kind,
        };
        let mut exported = self.export(&kind, rows)?;
        exported.notes.extend(self.without_rows(rows));
        Ok(Ok(exported))
    }

    fn kind(&self) -> Result<Kind, &'static str> {
        let model = &self.json["model"];
        if model["type"].as_str().is_some_and(|ty| ty != "BPE") || !model["vocab"].is_object() {
            return Err("its model is not BPE");
        }
        let pre = &self.json["pre_tokenizer"];
        let steps = steps(pre, "pretokenizers");
        match steps.last().and_then(|step| step["type"].as_str()) {
            Some("ByteLevel") => self.byte_level(&steps),
            Some("WhitespaceSplit") if steps.len() == 1 => self.words(),
            Some("Metaspace") if steps.len() == 1 => {
                Ok(Kind::SentencePiece { prefix: pre["prepend_scheme"] != "never", trim: false })
            }
            None => self.sentence_piece(),
            // Nothing is split where the normalizer replaces all spaces.
            Some("Split") if steps.len() == 1 && pre["pattern"]["String"] == " " => self.sentence_piece(),
            _ => Err("its pre-tokenization has no name in GGUF"),
        }
    }

    fn byte_level(&self, steps: &[&Json]) -> Result<Kind, &'static str> {
        let mut splits = Vec::new();
        for step in steps {
            let isolated = step["behavior"].as_str().is_none_or(|behavior| behavior == "Isolated");
            splits.extend(match (step["type"].as_str(), step["pattern"]["Regex"].as_str()) {
                (Some("Split"), Some(regex)) if isolated && step["invert"] != true => Some(regex),
                (Some("Digits"), _) if step["individual_digits"] == true => Some(r"\p{N}"),
                (Some("Digits"), _) => Some(r"\p{N}+"),
                (Some("Punctuation"), _) if step["behavior"] == "Contiguous" => Some(PUNCTUATION),
                (Some("ByteLevel"), _) if step["use_regex"] != false => Some(GPT2),
                (Some("ByteLevel"), _) => None,
                _ => return Err("its pre-tokenization has no name in GGUF"),
            });
        }
        if steps.iter().any(|step| step["add_prefix_space"] == true) {
            return Err("it puts a space before the text");
        }
        let composed = match steps_of_type(&self.json["normalizer"], "normalizers")[..] {
            [] => false,
            ["NFC"] => true,
            _ => return Err("it normalizes text"),
        };
        let ignores = self.json["model"]["ignore_merges"] == true;
        // The best that has the expressions; a note tells what it encodes otherwise.
        // Some files have the characters themselves where others have their escapes.
        let splits: Vec<_> =
            splits.iter().map(|regex| regex.replace('\r', "\\r").replace('\n', "\\n")).collect();
        let fits = PRE_TOKENIZERS.iter().filter(|pre| pre.splits == splits);
        let best = fits.min_by_key(|pre| (pre.nfc != composed, pre.ignore_merges != ignores));
        best.map(|pre| Kind::ByteLevel { pre: pre.name }).ok_or("its pre-tokenization has no name in GGUF")
    }

    fn words(&self) -> Result<Kind, &'static str> {
        match steps_of_type(&self.json["normalizer"], "normalizers")[..] {
            [] => Ok(Kind::Words { lowercase: false }),
            ["Lowercase"] => Ok(Kind::Words { lowercase: true }),
            _ => Err("it normalizes text"),
        }
    }

    fn sentence_piece(&self) -> Result<Kind, &'static str> {
        let steps = steps(&self.json["normalizer"], "normalizers");
        let mut spaces = false;
        let (mut prefix, mut trim) = (false, false);
        for step in &steps {
            match (
                step["type"].as_str(),
                step["pattern"]["String"].as_str(),
                step["pattern"]["Regex"].as_str(),
            ) {
                (Some("Prepend"), ..) if step["prepend"] == SPACE => prefix = true,
                (Some("Replace"), Some(" "), _) if step["content"] == SPACE => spaces = true,
                (Some("Replace"), _, Some("\\A +| +\\z" | " {2,}")) => trim = true,
                _ => return Err("it normalizes text"),
            }
        }
        if spaces {
            Ok(Kind::SentencePiece { prefix, trim })
        } else {
            Err("it is neither byte-level nor SentencePiece")
        }
    }

    fn export(&self, kind: &Kind, rows: usize) -> Result<Exported, TokenizerError> {
        let merges = merges(&self.json["model"]["merges"]);
        let (tokens, types) = self.tokens(rows, !matches!(kind, Kind::ByteLevel { .. }));
        let mut all: Vec<(&str, Value)> = Vec::new();
        match kind {
            Kind::ByteLevel { pre } => {
                all.push(("model", Value::String("gpt2".to_owned())));
                all.push(("pre", Value::String((*pre).to_owned())));
                all.push(("merges", Value::strings(merges.iter().map(|(l, r)| format!("{l} {r}")))));
            }
            Kind::Merged => {
                all.push(("model", Value::String(MERGED.to_owned())));
                all.push(("merges", Value::strings(merges.iter().map(|(l, r)| format!("{l} {r}")))));
                all.push(("add_space_prefix", Value::Bool(false)));
            }
            Kind::Words { lowercase } => {
                all.push(("model", Value::String(WORDS.to_owned())));
                all.push(("pre", Value::String(WORDS.to_owned())));
                all.push(("merges", Value::strings(merges.iter().map(|(l, r)| format!("{l} {r}")))));
                all.push((LOWERCASE, Value::Bool(*lowercase)));
            }
            Kind::SentencePiece { prefix, trim } => {
                all.push(("model", Value::String("llama".to_owned())));
                all.push(("pre", Value::String("default".to_owned())));
                all.push(("scores", scores(&tokens, &types, &merges)));
                all.push(("add_space_prefix", Value::Bool(*prefix)));
                all.push(("remove_extra_whitespaces", Value::Bool(*trim)));
            }
        }
        all.push(("tokens", Value::strings(tokens)));
        all.push(("token_type", Value::Array(ValueType::I32, types.into_iter().map(Value::I32).collect())));
        self.put_special(&mut all)?;
        let mut metadata: Vec<_> =
            all.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
        metadata.extend(self.tokenizer.chat_templates().to_metadata());
        Ok(Exported { metadata, notes: Vec::new() })
    }

    /// Text and type of every row of the embedding; rows without a token are unused.
    fn tokens(&self, rows: usize, bytes: bool) -> (Vec<String>, Vec<i32>) {
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![token_type::UNUSED; rows];
        let mut put = |id: Option<u64>, text: &str, ty: i32| {
            let id = id.and_then(|id| usize::try_from(id).ok()).filter(|&id| id < rows);
            if let Some(id) = id {
                (tokens[id], types[id]) = (text.to_owned(), ty);
            }
        };
        let model = &self.json["model"];
        for (text, id) in model["vocab"].as_object().into_iter().flatten() {
            let byte = bytes && model["byte_fallback"] == true && is_byte(text);
            put(id.as_u64(), text, if byte { token_type::BYTE } else { token_type::NORMAL });
        }
        for added in self.json["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().unwrap_or_default();
            let ty = match (added["special"] == true, model["unk_token"] == text) {
                // A byte that is listed as an added token still stands for the byte.
                _ if bytes && model["byte_fallback"] == true && is_byte(text) => token_type::BYTE,
                (true, true) => token_type::UNKNOWN,
                (true, false) => token_type::CONTROL,
                (false, _) => token_type::USER_DEFINED,
            };
            put(added["id"].as_u64(), text, ty);
        }
        (tokens, types)
    }

    /// Returns the token that the post-processor puts before a text, for folders whose other files name none.
    fn begins_with(&self) -> Option<u32> {
        let [with, without] =
            [Bos::Auto, Bos::Never].map(|bos| self.tokenizer.encode("a", bos).unwrap_or_default());
        let at = with.windows(without.len().max(1)).position(|part| part == without)?;
        with[..at].first().copied()
    }

    /// Notes the added tokens that the embedding has no row for.
    fn without_rows(&self, rows: usize) -> Option<String> {
        let added = self.json["added_tokens"].as_array().into_iter().flatten();
        let outside = |token: &&Json| token["id"].as_u64().is_some_and(|id| id >= rows as u64);
        let names: Vec<&str> = added.filter(outside).filter_map(|token| token["content"].as_str()).collect();
        let shown = names.iter().take(5).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
        let more = if names.len() > 5 { format!(" and {} more", names.len() - 5) } else { String::new() };
        (!names.is_empty()).then(|| {
            format!("added tokens without a row in the embedding of {rows} are left out: {shown}{more}; fix: resize the embedding, or take them out of tokenizer.json")
        })
    }

    fn put_special(&self, all: &mut Vec<(&str, Value)>) -> Result<(), TokenizerError> {
        let inner = &self.tokenizer.inner;
        let named = |field: &str| self.tokenizer.special_tokens().get(field).cloned();
        let id_of = |text: Option<String>| text.and_then(|text| inner.token_to_id(&text));
        let unknown = self.json["model"]["unk_token"].as_str().map(str::to_owned);
        // Encoding an empty text shows what the tokenizer adds around one.
        let around = self.tokenizer.encode("", Bos::Auto)?;
        let bos = self.tokenizer.bos().or_else(|| self.begins_with());
        let eos = id_of(named("eos_token"));
        for (key, id) in [
            ("bos_token_id", bos),
            ("eos_token_id", eos),
            ("unknown_token_id", id_of(unknown)),
            ("padding_token_id", id_of(named("pad_token"))),
        ] {
            all.extend(id.map(|id| (key, Value::U32(id))));
        }
        all.push(("add_bos_token", Value::Bool(bos.is_some() && around.first() == bos.as_ref())));
        all.push((
            "add_eos_token",
            Value::Bool(eos.is_some() && around.len() > 1 && around.last() == eos.as_ref()),
        ));
        Ok(())
    }
}

/// Steps of a component: those of a sequence, itself, or none.
fn steps<'a>(component: &'a Json, list: &str) -> Vec<&'a Json> {
    match (component, component["type"].as_str()) {
        (Json::Null, _) => Vec::new(),
        (_, Some("Sequence")) => component[list].as_array().into_iter().flatten().collect(),
        _ => vec![component],
    }
}

fn steps_of_type<'a>(component: &'a Json, list: &str) -> Vec<&'a str> {
    steps(component, list).iter().map(|step| step["type"].as_str().unwrap_or_default()).collect()
}

/// Parses merges in either form: pairs, or texts with a space between.
fn merges(json: &Json) -> Vec<(String, String)> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(l, r)| (l.to_owned(), r.to_owned())),
        pair => Some((pair[0].as_str()?.to_owned(), pair[1].as_str()?.to_owned())),
    };
    json.as_array().into_iter().flatten().filter_map(pair).collect()
}

/// Computes scores that fall with the rank of the first merge that makes a token.
fn scores(tokens: &[String], types: &[i32], merges: &[(String, String)]) -> Value {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, (left, right)) in merges.iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    let score = |(token, ty): (&String, &i32)| match ranks.get(token) {
        Some(&rank) => -(rank as f32) - 1.0,
        None if *ty == token_type::NORMAL && token.chars().count() > 1 => UNREACHABLE,
        None => 0.0,
    };
    Value::Array(ValueType::F32, tokens.iter().zip(types).map(score).map(Value::F32).collect())
}

/// True if a token stands for one byte: `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}
