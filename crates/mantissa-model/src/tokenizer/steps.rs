//! Steps before and after the model in a `tokenizer.json`: normalizers, pre-tokenizers, post-processors, decoders.
//!
//! Checks for each: the library supports it, it cannot fail on any text, and how much it can lengthen one.

use serde_json::Value;

use super::charsmap;
use super::fault::{Fault, fault};
use super::limits::{self, MAX_ADDED};
use super::regexes::{self, Cost};

/// Largest number of steps of one kind, nested ones included.
const MAX_STEPS: usize = 64;

/// Largest number of special tokens added around a text.
const MAX_AROUND: usize = 64;

/// Kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normalizer,
    PreTokenizer,
    PostProcessor,
    Decoder,
}

impl Kind {
    /// Field in the file.
    pub(super) fn field(self) -> &'static str {
        match self {
            Kind::Normalizer => "normalizer",
            Kind::PreTokenizer => "pre_tokenizer",
            Kind::PostProcessor => "post_processor",
            Kind::Decoder => "decoder",
        }
    }

    /// Field of a sequence that holds its parts.
    fn parts(self) -> &'static str {
        match self {
            Kind::Normalizer => "normalizers",
            Kind::PreTokenizer => "pretokenizers",
            Kind::PostProcessor => "processors",
            Kind::Decoder => "decoders",
        }
    }

    /// Known steps, with the largest number of bytes that they make of one, unless it depends on their fields.
    fn known(self) -> &'static [(&'static str, u64)] {
        match self {
            Kind::Normalizer => &[
                ("BertNormalizer", 4),
                ("Strip", 1),
                ("StripAccents", 1),
                // The longest decompositions and compatibility forms of Unicode (UAX 15, table "expansion factors").
                ("NFC", 3),
                ("NFD", 3),
                ("NFKC", 11),
                ("NFKD", 11),
                ("Lowercase", 2),
                ("Nmt", 1),
                ("Precompiled", 1),
                ("Replace", 1),
                ("Prepend", 1),
                ("ByteLevel", 2),
            ],
            Kind::PreTokenizer => &[
                ("BertPreTokenizer", 1),
                ("ByteLevel", 2),
                ("Delimiter", 1),
                ("CharDelimiterSplit", 1),
                ("Metaspace", 4),
                ("Whitespace", 1),
                ("Split", 1),
                ("Punctuation", 1),
                ("WhitespaceSplit", 1),
                ("Digits", 1),
                ("UnicodeScripts", 1),
                ("FixedLength", 1),
            ],
            Kind::PostProcessor => &[
                ("BertProcessing", 1),
                ("RobertaProcessing", 1),
                ("ByteLevel", 1),
                ("TemplateProcessing", 1),
            ],
            Kind::Decoder => &[
                ("BPEDecoder", 1),
                ("ByteLevel", 1),
                ("WordPiece", 2),
                ("Metaspace", 1),
                ("CTC", 1),
                ("Replace", 1),
                ("Fuse", 1),
                ("Strip", 1),
                ("ByteFallback", 1),
            ],
        }
    }
}

/// Effect of steps on a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effect {
    /// Bytes that one byte may become.
    pub(super) growth: u64,
    /// Time of the worst regular expression.
    pub(super) cost: Cost,
    /// Number of steps.
    pub(super) steps: usize,
}

/// Checks the steps of a kind; `tokens` is the number of tokens.
pub(super) fn check(kind: Kind, value: &Value, tokens: usize) -> Result<Effect, Fault> {
    let mut walk =
        Walk { kind, tokens, left: MAX_STEPS, effect: Effect { growth: 1, cost: Cost::Linear, steps: 0 } };
    if !value.is_null() {
        walk.step(kind.field(), value)?;
    }
    Ok(walk.effect)
}

struct Walk {
    kind: Kind,
    tokens: usize,
    left: usize,
    effect: Effect,
}

impl Walk {
    fn step(&mut self, at: &str, value: &Value) -> Result<(), Fault> {
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| fault(self.kind.field(), "more steps", format!("up to {MAX_STEPS}")))?;
        let name = value.get("type").and_then(Value::as_str).unwrap_or_default();
        if name == "Sequence" {
            let parts = value.get(self.kind.parts()).and_then(Value::as_array);
            let parts = parts.ok_or_else(|| {
                fault(format!("{at}.{}", self.kind.parts()), "no list", "the steps of the sequence")
            })?;
            return parts
                .iter()
                .enumerate()
                .try_for_each(|(i, part)| self.step(&format!("{at}.{}[{i}]", self.kind.parts()), part));
        }
        let known = self.kind.known();
        let Some((_, growth)) = known.iter().find(|(known, _)| *known == name) else {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let found = value.get("type").map_or("nothing".into(), Value::to_string);
            return Err(fault(format!("{at}.type"), found, format!("Sequence, {}", names.join(", "))));
        };
        let own = self.fields(at, name, value)?;
        self.effect.steps += 1;
        self.effect.growth = self.effect.growth.saturating_mul(growth.saturating_mul(own));
        Ok(())
    }

    /// Checks the critical fields of a step; returns the largest number of bytes that they make of one.
    fn fields(&mut self, at: &str, name: &str, value: &Value) -> Result<u64, Fault> {
        let text = |field: &str| value.get(field).and_then(Value::as_str);
        match (self.kind, name) {
            (_, "Replace") => {
                let matched = self.pattern(at, value)?;
                let content = text("content").unwrap_or_default().len() as u64;
                // A pattern that matches the empty string inserts between all bytes.
                Ok(if matched == 0 { 1 + content } else { content.div_ceil(matched).max(1) })
            }
            (_, "Split") => self.pattern(at, value).map(|_| 1),
            // Applies once per piece between added tokens, which takes more memory than a short prefix by itself.
            (_, "Prepend") => {
                limits::affix(&format!("{at}.prepend"), text("prepend"))?;
                Ok(1 + text("prepend").unwrap_or_default().len() as u64 / 8)
            }
            (_, "Precompiled") => charsmap::check(at, text("precompiled_charsmap").unwrap_or_default()),
            (_, "FixedLength") => match value.get("length").map(Value::as_u64) {
                None | Some(Some(1..)) => Ok(1),
                Some(_) => Err(fault(format!("{at}.length"), value["length"].to_string(), "1 or more")),
            },
            (Kind::Decoder, "Strip") if value.get("stop").and_then(Value::as_u64) != Some(0) => {
                let found = value.get("stop").map_or("nothing".into(), Value::to_string);
                Err(fault(format!("{at}.stop"), found, "0: the library fails on tokens shorter than that"))
            }
            (_, "TemplateProcessing") => self.template(at, value),
            (_, "BertProcessing" | "RobertaProcessing") => {
                ["sep", "cls"].into_iter().try_for_each(|field| {
                    let token = value.get(field).and_then(|pair| pair.get(0)).and_then(Value::as_str);
                    limits::at_most(
                        &format!("{at}.{field}[0]"),
                        "bytes",
                        token.map_or(0, str::len),
                        MAX_ADDED,
                    )?;
                    let id = value.get(field).and_then(|pair| pair.get(1)).unwrap_or(&Value::Null);
                    self.id(&format!("{at}.{field}[1]"), id)
                })?;
                Ok(1)
            }
            _ => Ok(1),
        }
    }

    /// Checks a pattern; returns the least number of bytes that it matches.
    fn pattern(&mut self, at: &str, value: &Value) -> Result<u64, Fault> {
        let pattern = value.get("pattern").unwrap_or(&Value::Null);
        if let Some(text) = pattern.get("String").and_then(Value::as_str) {
            return Ok((text.len() as u64).max(1)); // an empty one never matches
        }
        let field = || format!("{at}.pattern.Regex");
        let regex = pattern.get("Regex").and_then(Value::as_str);
        let regex = regex.ok_or_else(|| {
            fault(format!("{at}.pattern"), pattern.to_string(), "an object with String or Regex")
        })?;
        let measure = regexes::measure(regex).map_err(|found| {
            let allowed =
                "an expression that the `regex` crate supports, or the look-around of a known tokenizer";
            fault(field(), format!("{found} in {regex}"), allowed)
        })?;
        if measure.cost == Cost::Quadratic {
            self.effect.cost = measure.cost;
        }
        Ok(measure.shortest as u64)
    }

    /// Checks a template: one text, and known special tokens around it.
    fn template(&self, at: &str, value: &Value) -> Result<u64, Fault> {
        let special = value.get("special_tokens").unwrap_or(&Value::Null);
        let mut around = 0;
        for list in ["single", "pair"] {
            let pieces = value.get(list).and_then(Value::as_array);
            let pieces = pieces
                .ok_or_else(|| fault(format!("{at}.{list}"), "no list", "the pieces of the template"))?;
            let mut texts = Vec::new();
            for (i, piece) in pieces.iter().enumerate() {
                let at = || format!("{at}.{list}[{i}]");
                if let Some(sequence) = piece.get("Sequence") {
                    texts.push(sequence.get("id").and_then(Value::as_str).unwrap_or_default());
                    continue;
                }
                let name =
                    piece.get("SpecialToken").and_then(|token| token.get("id")).and_then(Value::as_str);
                let name =
                    name.ok_or_else(|| fault(at(), piece.to_string(), "a Sequence or a SpecialToken"))?;
                around += self.special(&at(), name, special.get(name).unwrap_or(&Value::Null))?;
            }
            let allowed: &[&[&str]] =
                if list == "single" { &[&["A"]] } else { &[&["A", "B"], &["B", "A"], &[]] };
            if !allowed.contains(&texts.as_slice()) {
                let allowed = "the sequence A once in single, A and B once in pair";
                return Err(fault(format!("{at}.{list}"), format!("sequences {texts:?}"), allowed));
            }
        }
        if around > MAX_AROUND {
            return Err(fault(at, format!("{around} special tokens"), format!("up to {MAX_AROUND}")));
        }
        Ok(1)
    }

    /// Checks a special token of a template; returns the number of its ids.
    fn special(&self, at: &str, name: &str, token: &Value) -> Result<usize, Fault> {
        let list = |field: &str| token.get(field).and_then(Value::as_array);
        let (Some(ids), Some(texts)) = (list("ids"), list("tokens")) else {
            let allowed = "a token of special_tokens with its ids and tokens";
            return Err(fault(at, format!("\"{name}\""), allowed));
        };
        if ids.len() != texts.len() {
            let found = format!("{} ids and {} tokens of \"{name}\"", ids.len(), texts.len());
            return Err(fault(at, found, "equally many ids and tokens"));
        }
        ids.iter().try_for_each(|id| self.id(at, id))?;
        texts.iter().try_for_each(|text| {
            limits::at_most(at, "bytes of a token", text.as_str().map_or(0, str::len), MAX_ADDED)
        })?;
        Ok(ids.len())
    }

    fn id(&self, at: &str, id: &Value) -> Result<(), Fault> {
        match id.as_u64().filter(|id| *id < self.tokens as u64) {
            Some(_) => Ok(()),
            None => Err(fault(at, format!("id {id}"), format!("an id below {}", self.tokens))),
        }
    }
}
