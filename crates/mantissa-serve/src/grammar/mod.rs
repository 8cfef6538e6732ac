//! Grammars that a reply has to follow: JSON schemas, regular expressions, Lark and GBNF grammars, as constraints of
//! the runtime.
//!
//! The parser is the crate `llguidance`: a derivative-based lexer and an Earley parser over the trie of the
//! vocabulary. A grammar comes from a client, so its size, depth, complexity and compilation time are limited, and one
//! that cannot be used is an error: no reply is generated without the constraint that was asked for.

mod gbnf;
mod limits;
mod matcher;
mod vocabulary;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};
use mantissa_model::Tokenizer;
use mantissa_runtime::Constraint;
use serde_json::{Value, json};

pub(crate) use self::limits::options as schema_options;
use self::matcher::GrammarConstraint;

/// Longest compilation; ordinary schemas take milliseconds.
const LONGEST: Duration = Duration::from_secs(5);
/// Largest number of compilations at once.
const AT_ONCE: usize = 4;
/// Stack of a compilation, which recurses into the grammar.
const STACK: usize = 64 << 20;
/// Compiled grammars that are kept for requests with the same one.
const KEPT: usize = 32;

/// Grammar of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON values that a schema accepts.
    JsonSchema(Value),
    /// Texts that match a regular expression as a whole.
    Regex(String),
    /// Grammar in the variant of Lark that llguidance defines.
    Lark(String),
    /// Grammar in GBNF, the format of llama.cpp.
    Gbnf(String),
}

impl Grammar {
    /// Grammar of replies that are one of `texts`.
    pub fn choice(texts: &[String]) -> Self {
        let literals: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
        Grammar::Lark(format!("start: {}", literals.join(" | ")))
    }
}

/// Error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The grammar is too large or nested too deep.
    #[error("expected {allowed}, got {found}")]
    Limit {
        /// Value found.
        found: String,
        /// Values supported.
        allowed: String,
    },
    /// The grammar is not valid, or uses an unsupported feature.
    #[error("expected a grammar that can be used, got: {0}")]
    Invalid(String),
    /// The vocabulary does not tell the text of its tokens.
    #[error("expected a tokenizer for constrained replies, got: {0}")]
    Tokenizer(String),
    /// Too many grammars are being compiled.
    #[error("expected at most {AT_ONCE} grammars at once; fix: try again")]
    Busy,
}

/// Compiles grammars for the vocabulary of one model.
pub struct Grammars {
    vocabulary: usize,
    factory: OnceLock<Result<Arc<ParserFactory>, GrammarError>>,
    /// Compiled grammars by their text, the last used at the end.
    kept: Mutex<VecDeque<(String, Matcher)>>,
    running: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Creates a compiler for a model with `vocabulary` logits. The vocabulary is prepared by [`prepare`](Self::prepare), or
    /// for the first grammar.
    pub fn new(vocabulary: usize) -> Self {
        Grammars { vocabulary, factory: OnceLock::new(), kept: Mutex::default(), running: Arc::default() }
    }

    /// Prepares the vocabulary of the model's `tokenizer`, which takes .4 s for 150 000 tokens. A grammar that is compiled
    /// meanwhile waits for it; a fault is reported to each grammar.
    pub fn prepare(&self, tokenizer: &Tokenizer) {
        let _ = self.factory(tokenizer);
    }

    fn factory(&self, tokenizer: &Tokenizer) -> Result<Arc<ParserFactory>, GrammarError> {
        self.factory.get_or_init(|| self.make_factory(tokenizer)).clone()
    }

    /// Compiles a grammar for the model's `tokenizer`. Takes up to 5 s of the calling thread.
    ///
    /// # Errors
    /// [`GrammarError`].
    pub fn compile(
        &self,
        tokenizer: &Tokenizer,
        grammar: &Grammar,
    ) -> Result<Box<dyn Constraint>, GrammarError> {
        let (name, grammar) = prepare(grammar)?;
        if let Some(kept) = self.kept(&name) {
            return Ok(Box::new(GrammarConstraint::new(kept)));
        }
        let factory = self.factory(tokenizer)?;
        let slot = Slot::take(&self.running).ok_or(GrammarError::Busy)?;
        let (sender, receiver) = mpsc::channel();
        let work = move || {
            let parser = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
                factory.create_parser(grammar)
            }));
            let _ = sender.send(Matcher::new(parser));
            drop(slot);
        };
        let invalid = |message: &str| GrammarError::Invalid(limits::shorten(message));
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(work);
        thread.map_err(|error| invalid(&error.to_string()))?;
        let mut matcher = receiver.recv_timeout(LONGEST).map_err(|_| GrammarError::Limit {
            found: "one that takes longer".into(),
            allowed: format!("a grammar that compiles in {} s", LONGEST.as_secs()),
        })?;
        if let Some(error) = matcher.get_error() {
            return Err(invalid(&error));
        }
        if let Some(warning) = matcher.grammar_warnings().first() {
            // Such as a key of a schema that would be ignored.
            return Err(invalid(warning));
        }
        self.keep(name, &matcher);
        Ok(Box::new(GrammarConstraint::new(matcher)))
    }

    fn kept(&self, name: &str) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(other, _)| other == name)?;
        let found = kept.remove(at)?;
        let copy = found.1.deep_clone();
        kept.push_back(found);
        Some(copy)
    }

    fn keep(&self, name: String, matcher: &Matcher) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back((name, matcher.deep_clone()));
    }

    fn make_factory(&self, tokenizer: &Tokenizer) -> Result<Arc<ParserFactory>, GrammarError> {
        let fault = |message: String| GrammarError::Tokenizer(limits::shorten(&message));
        let texts = tokenizer.token_texts(self.vocabulary);
        let env: TokEnv = vocabulary::env(&texts.map_err(|error| fault(error.to_string()))?);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| fault(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits::parser();
        Ok(Arc::new(factory))
    }
}

/// Place among the compilations that run.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(running: &Arc<AtomicUsize>) -> Option<Self> {
        let slot = Slot(Arc::clone(running));
        (running.fetch_add(1, Ordering::Relaxed) < AT_ONCE).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Checks a grammar's size; returns its name among those kept, and its form for the parser.
fn prepare(grammar: &Grammar) -> Result<(String, TopLevelGrammar), GrammarError> {
    match grammar {
        Grammar::JsonObject => {
            let schema = limits::schema(&json!({ "type": "object" }))?;
            Ok(("object".into(), TopLevelGrammar::from_json_schema(schema)))
        }
        Grammar::JsonSchema(schema) => {
            let schema = limits::schema(schema)?;
            Ok((format!("schema {schema}"), TopLevelGrammar::from_json_schema(schema)))
        }
        Grammar::Regex(regex) => {
            limits::text("regular expression", regex, limits::REGEX)?;
            Ok((format!("regex {regex}"), TopLevelGrammar::from_regex(regex)))
        }
        Grammar::Lark(text) => {
            limits::text("grammar", text, limits::GRAMMAR)?;
            Ok((format!("lark {text}"), TopLevelGrammar::from_lark(text.clone())))
        }
        Grammar::Gbnf(text) => {
            limits::text("grammar", text, limits::GRAMMAR)?;
            Ok((format!("gbnf {text}"), TopLevelGrammar::from_lark(gbnf::to_lark(text)?)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
pub(crate) mod tests;
