//! Checks of a `tokenizer.json` before the tokenizers library reads it.
//!
//! On some contradictions the library panics, on others it gives other tokens than the file states, and on a few it
//! takes exponential time or memory. Each is checked here, so a bad file is refused at loading with the field at
//! fault. Truncation and padding are dropped: a text is always encoded whole.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value};

use super::error::TokenizerError;
use super::fault::{Fault, fault};
use super::limits::{self, MAX_ADDED, MAX_NORMALIZED_TOKENS, MAX_TOKEN};
use super::regexes::Cost;
use super::steps::{self, Kind};

/// One more than the largest accepted id: an id is a row of a matrix.
const MAX_ID: usize = 1 << 24;

/// Longest text after all its replacements, in bytes. The library was measured to hold up to 480 bytes for each while
/// it splits a text: 2 GB at most for byte-level models, whose texts may double.
const MAX_NORMALIZED: u64 = 16 << 20;

/// Longest text if a regular expression may take quadratic time.
const MAX_QUADRATIC: u64 = 64 << 10;

/// Longest word that WordPiece looks up piece by piece, which takes cubic time. BERT's limit is 100 characters.
const MAX_WORD: u64 = 400;

/// Decoded bytes that one byte of a token may become. Public decoders turn a space of one byte into one of three.
const MAX_DECODED: u64 = 64;

/// A file that passed the checks.
pub(super) struct Checked {
    /// Contents to load.
    pub(super) json: Vec<u8>,
    /// Longest text that may be encoded in one piece, in bytes.
    pub(super) max_text: u64,
    /// Added tokens with the ids that the file gives them.
    pub(super) added: Vec<(String, u32)>,
}

/// Checks the file at `path` with the contents `file`.
///
/// # Errors
/// [`TokenizerError::Field`] for the first field that would not load, or would load with another meaning.
pub(super) fn check(path: &Path, file: Value) -> Result<Checked, TokenizerError> {
    checked(file).map_err(|Fault { field, found, allowed }| TokenizerError::Field {
        path: path.into(),
        field,
        found,
        allowed,
    })
}

fn checked(mut file: Value) -> Result<Checked, Fault> {
    let root = file.as_object_mut().ok_or_else(|| fault("the file", "no object", "a JSON object"))?;
    for limit in ["truncation", "padding"] {
        root.insert(limit.into(), Value::Null);
    }
    let vocabulary = Vocabulary::of(root.get("model").unwrap_or(&Value::Null))?;
    let list = root.get("added_tokens").unwrap_or(&Value::Null);
    let added = added_tokens(list, &vocabulary)?;
    let ids = known_ids(&vocabulary, &added)?;
    let (mut growth, mut taken) = (1u64, 0);
    let mut cost = Cost::Linear;
    for kind in [Kind::Normalizer, Kind::PreTokenizer, Kind::PostProcessor, Kind::Decoder] {
        let step = steps::check(kind, root.get(kind.field()).unwrap_or(&Value::Null), ids)?;
        let most = if kind == Kind::Decoder { MAX_DECODED } else { MAX_NORMALIZED };
        if step.growth > most {
            let allowed = format!("up to {most}-fold");
            return Err(fault(kind.field(), "steps that multiply the length of a text", allowed));
        }
        // Decoders work on tokens, the others on the text.
        if kind != Kind::Decoder {
            growth = growth.saturating_mul(step.growth);
            taken += step.steps;
        }
        if kind == Kind::Normalizer {
            check_normalized(list, step.growth)?;
        }
        if step.cost == Cost::Quadratic {
            cost = Cost::Quadratic;
        }
    }
    let longest_added = added.iter().map(|(token, _)| token.len()).max().unwrap_or(0);
    let time = vocabulary.cost + limits::cost_of_steps(taken) + limits::cost_of_added(longest_added);
    let longest = (limits::max_text(time, MAX_NORMALIZED) / growth).max(1);
    let max_text = if cost == Cost::Quadratic { longest.min(MAX_QUADRATIC) } else { longest };
    let json = serde_json::to_vec(&file).unwrap_or_default();
    Ok(Checked { json, max_text, added })
}

/// Tokens of the model with their ids.
struct Vocabulary<'a> {
    ids: HashMap<&'a str, u32>,
    /// Time that the model takes beyond that of ordinary ones, in nanoseconds per byte of a text.
    cost: u64,
}

impl<'a> Vocabulary<'a> {
    fn of(model: &'a Value) -> Result<Self, Fault> {
        let model = model.as_object().ok_or_else(|| fault("model", "no object", "an object"))?;
        let affixes = ["continuing_subword_prefix", "end_of_word_suffix", "unk_token"];
        affixes.into_iter().try_for_each(|name| {
            limits::affix(&format!("model.{name}"), model.get(name).and_then(Value::as_str))
        })?;
        let found = Self::by_type(model)?;
        for token in found.ids.keys() {
            limits::at_most(&format!("model.vocab.{token}"), "bytes", token.len(), MAX_TOKEN)?;
        }
        Ok(found)
    }

    fn by_type(model: &'a Map<String, Value>) -> Result<Self, Fault> {
        match model_type(model)? {
            "BPE" => {
                let vocabulary = Self::by_name(model)?;
                check_merges(model, &vocabulary)?;
                Ok(vocabulary)
            }
            "WordPiece" => {
                let longest = model.get("max_input_chars_per_word").and_then(Value::as_u64);
                if let Some(found) = longest.filter(|n| *n > MAX_WORD) {
                    let field = "model.max_input_chars_per_word";
                    return Err(fault(field, found.to_string(), format!("up to {MAX_WORD}")));
                }
                let word = longest.unwrap_or(100);
                Ok(Vocabulary { cost: limits::cost_of_word_pieces(word), ..Self::by_name(model)? })
            }
            "WordLevel" => Self::by_name(model),
            _ => Self::by_position(model),
        }
    }

    fn by_name(model: &'a Map<String, Value>) -> Result<Self, Fault> {
        let vocab = model.get("vocab").and_then(Value::as_object);
        let vocab = vocab.ok_or_else(|| fault("model.vocab", "no object", "tokens with their ids"))?;
        let mut all = HashMap::with_capacity(vocab.len());
        for (token, id) in vocab {
            let small = id.as_u64().filter(|id| *id < MAX_ID as u64);
            let small = small.ok_or_else(|| {
                fault(format!("model.vocab.{token}"), id.to_string(), format!("an id below {MAX_ID}"))
            })?;
            all.insert(token.as_str(), small as u32);
        }
        Ok(Vocabulary { ids: all, cost: 0 })
    }

    /// Reads a Unigram vocabulary: tokens with scores, whose ids are their positions.
    fn by_position(model: &'a Map<String, Value>) -> Result<Self, Fault> {
        let vocab = model.get("vocab").and_then(Value::as_array);
        let vocab = vocab.ok_or_else(|| fault("model.vocab", "no list", "tokens with their scores"))?;
        let mut all = HashMap::with_capacity(vocab.len());
        for (id, entry) in vocab.iter().enumerate() {
            let at = || format!("model.vocab[{id}]");
            let pair = entry.as_array().map(Vec::as_slice);
            let Some([Value::String(token), Value::Number(_)]) = pair else {
                return Err(fault(at(), entry.to_string(), "a token and its score"));
            };
            if token.is_empty() {
                return Err(fault(at(), "an empty token", "some text"));
            }
            if let Some(first) = all.insert(token.as_str(), id as u32) {
                return Err(fault(at(), format!("\"{token}\", as at {first}"), "every token once"));
            }
        }
        let unknown = model.get("unk_id").filter(|id| !id.is_null());
        match unknown {
            Some(id) if id.as_u64().is_none_or(|id| id >= vocab.len() as u64) => {
                Err(fault("model.unk_id", id.to_string(), format!("below {}", vocab.len())))
            }
            _ => {
                let cost = limits::cost_of_unigram(all.keys())?;
                Ok(Vocabulary { ids: all, cost })
            }
        }
    }
}

/// Returns the kind of model; files without a name are of the first kind that their fields fit, as in the library.
fn model_type(model: &Map<String, Value>) -> Result<&str, Fault> {
    const TYPES: [&str; 4] = ["BPE", "WordPiece", "WordLevel", "Unigram"];
    match model.get("type") {
        Some(Value::String(name)) if TYPES.contains(&name.as_str()) => Ok(name),
        Some(other) => Err(fault("model.type", other.to_string(), TYPES.join(", "))),
        None if model.contains_key("merges") => Ok("BPE"),
        None if model.contains_key("max_input_chars_per_word") => Ok("WordPiece"),
        None if model.get("vocab").is_some_and(Value::is_array) => Ok("Unigram"),
        None => Ok("WordLevel"),
    }
}

/// Checks that each merge joins two tokens into a third. The library copies both into a buffer of the longest token's
/// size.
fn check_merges(model: &Map<String, Value>, vocabulary: &Vocabulary<'_>) -> Result<(), Fault> {
    let dropout = model.get("dropout").and_then(Value::as_f64);
    if let Some(p) = dropout.filter(|p| *p != 0.0) {
        return Err(fault("model.dropout", p.to_string(), "null: a text always has the same tokens"));
    }
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or_default();
    let merges = model.get("merges").and_then(Value::as_array);
    let merges = merges.ok_or_else(|| fault("model.merges", "no list", "pairs of tokens"))?;
    let mut whole = String::new();
    for (i, merge) in merges.iter().enumerate() {
        let at = || format!("model.merges[{i}]");
        let (left, right) = match merge {
            // The library skips this line in files made from `merges.txt`.
            Value::String(text) if text.starts_with("#version") => continue,
            Value::String(text) => text.split_once(' ').filter(|(_, right)| !right.contains(' ')),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
                _ => None,
            },
            _ => None,
        }
        .ok_or_else(|| fault(at(), merge.to_string(), "two tokens"))?;
        let rest = right.strip_prefix(prefix);
        let rest = rest.ok_or_else(|| {
            fault(at(), format!("\"{right}\""), format!("a token that begins with \"{prefix}\""))
        })?;
        whole.clear();
        whole.push_str(left);
        whole.push_str(rest);
        for token in [left, right, &whole] {
            if !vocabulary.ids.contains_key(token) {
                return Err(fault(
                    at(),
                    format!("\"{token}\", which is not a token"),
                    "tokens of model.vocab",
                ));
            }
        }
    }
    Ok(())
}

/// Checks the added tokens. Their ids must be those that the library assigns: the id of the same text in the
/// vocabulary, else the next free one.
fn added_tokens(list: &Value, vocabulary: &Vocabulary<'_>) -> Result<Vec<(String, u32)>, Fault> {
    let empty = Vec::new();
    let list = match list {
        Value::Null => &empty,
        Value::Array(list) => list,
        other => return Err(fault("added_tokens", other.to_string(), "a list")),
    };
    let (mut seen, mut next) = (HashSet::with_capacity(list.len()), vocabulary.ids.len());
    let mut all = Vec::with_capacity(list.len());
    for (i, token) in list.iter().enumerate() {
        let at = |name: &str| format!("added_tokens[{i}].{name}");
        let content = token.get("content").and_then(Value::as_str).filter(|text| !text.is_empty());
        let content = content.ok_or_else(|| fault(at("content"), "nothing", "the text of the token"))?;
        limits::at_most(&at("content"), "bytes", content.len(), MAX_ADDED)?;
        let strips =
            ["lstrip", "rstrip"].into_iter().find(|side| token.get(side) == Some(&Value::Bool(true)));
        if let Some(side) = strips.filter(|_| content.trim().is_empty()) {
            // Each match would take all spaces around it, so a run of spaces would take quadratic time and memory.
            return Err(fault(at(side), "true for a token of spaces", "false"));
        }
        if !seen.insert(content) {
            return Err(fault(at("content"), format!("\"{content}\" a second time"), "every token once"));
        }
        let given = match vocabulary.ids.get(content) {
            Some(id) => *id as usize,
            None => {
                next += 1;
                next - 1
            }
        };
        let id = token.get("id").unwrap_or(&Value::Null);
        if given >= MAX_ID || id.as_u64() != Some(given as u64) {
            let allowed = format!("{given}, the id that follows from the vocabulary");
            return Err(fault(at("id"), id.to_string(), allowed));
        }
        all.push((content.to_owned(), given as u32));
    }
    Ok(all)
}

/// Checks the lengths of added tokens after a normalizer that multiplies bytes by up to `growth`, which is applied to
/// them at loading.
fn check_normalized(list: &Value, growth: u64) -> Result<(), Fault> {
    let normalized = |token: &&Value| token.get("normalized").and_then(Value::as_bool) == Some(true);
    let bytes = |token: &Value| token.get("content").and_then(Value::as_str).map_or(0, str::len) as u64;
    let all: u64 = list.as_array().into_iter().flatten().filter(normalized).map(bytes).sum();
    match all.saturating_mul(growth) {
        0..=MAX_NORMALIZED_TOKENS => Ok(()),
        found => {
            let found = format!("added tokens that the normalizer makes up to {found} bytes of");
            Err(fault("normalizer", found, format!("at most {MAX_NORMALIZED_TOKENS} bytes")))
        }
    }
}

/// Checks that ids are those from 0 on, each once.
fn known_ids(vocabulary: &Vocabulary<'_>, added: &[(String, u32)]) -> Result<usize, Fault> {
    const FIELD: &str = "model.vocab";
    let mut tokens: HashMap<u32, &str> = HashMap::with_capacity(vocabulary.ids.len() + added.len());
    let of_model = vocabulary.ids.iter().map(|(token, id)| (*token, *id));
    for (token, id) in of_model.chain(added.iter().map(|(token, id)| (token.as_str(), *id))) {
        if let Some(other) = tokens.insert(id, token).filter(|other| *other != token) {
            let (first, second) = if other < token { (other, token) } else { (token, other) };
            let found = format!("id {id} for \"{first}\" and for \"{second}\"");
            return Err(fault(FIELD, found, "every id once"));
        }
    }
    if tokens.is_empty() {
        return Err(fault(FIELD, "no token", "at least one"));
    }
    match (0..tokens.len() as u32).find(|id| !tokens.contains_key(id)) {
        Some(hole) => Err(fault(FIELD, format!("no token with id {hole}"), "ids without a hole")),
        None => Ok(tokens.len()),
    }
}
