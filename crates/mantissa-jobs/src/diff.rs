//! Comparison of two models: the first token at which their greedy continuations differ.

use std::path::{Path, PathBuf};

use mantissa_eval::{TokenCandidate, diff};
use mantissa_model::{Bos, Decoder, PREFILL, Tokenizer};
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::chat;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::loaded::ModelUse;
use crate::measured_text::BosChoice;
use crate::model::{ModelPath, context_length, load_tokenizer, open, open_quietly, vocabulary};
use crate::names::stop_name;
use crate::progress::Unit;
use crate::settings::read_text;

/// Continues prompts greedily by two models, up to the first token that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diff {
    /// First model, whose chat template is used.
    pub a: ModelPath,
    /// Second model, with the same tokenizer.
    pub b: ModelPath,
    /// Prompts.
    pub prompts: Prompts,
    /// Maximum number of new tokens.
    pub tokens: u32,
    /// Number of most probable tokens to report at the difference.
    pub top: u32,
    /// True if each prompt is rendered as a chat message of the user.
    pub chat: bool,
    /// System message before the prompt.
    pub system: Option<String>,
    /// Beginning-of-text token before the prompt.
    pub bos: BosChoice,
}

/// Prompts of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Prompts {
    /// One prompt.
    Text(String),
    /// Text file with one prompt per line; empty lines are skipped.
    File(PathBuf),
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiffReport {
    /// First model as named.
    pub a: PathBuf,
    /// Second model as named.
    pub b: PathBuf,
    /// Comparisons in the order of the prompts.
    pub prompts: Vec<ComparedPrompt>,
}

/// Comparison on one prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedPrompt {
    /// Prompt.
    pub prompt: String,
    /// Number of its tokens.
    pub prompt_tokens: usize,
    /// Number of equal tokens after the prompt.
    pub equal_tokens: usize,
    /// Their text.
    pub equal_text: String,
    /// Mean of KL(A || B) over the equal tokens and the first difference, in nats.
    pub kl_mean: f64,
    /// First difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Parting>,
    /// Continuation by the first model.
    pub a: ContinuedText,
    /// Continuation by the second model.
    pub b: ContinuedText,
}

/// Next-token distributions at the first difference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parting {
    /// Index of the token after the prompt.
    pub position: usize,
    /// KL(A || B) there, in nats.
    pub kl: f64,
    /// Most probable tokens of the first model.
    pub a: Vec<NextToken>,
    /// Most probable tokens of the second model.
    pub b: Vec<NextToken>,
}

/// Candidate for the next token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NextToken {
    /// Its text; of a special token its name.
    pub text: String,
    /// Token and its probabilities.
    #[serde(flatten)]
    pub candidate: TokenCandidate,
}

/// Continuation by one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ContinuedText {
    /// Text.
    pub text: String,
    /// Text after the equal tokens.
    pub own_text: String,
    /// Tokens.
    pub tokens: Vec<u32>,
    /// Reason for the end.
    pub stopped: &'static str,
}

/// Prompts with their tokens, and the tokenizer of the first model.
struct Encoded {
    prompts: Vec<String>,
    tokens: Vec<Vec<u32>>,
    tokenizer: Tokenizer,
    /// Most tokens of a sequence.
    limit: usize,
}

impl Diff {
    fn models(&self) -> [&Path; 2] {
        [&self.a, &self.b]
    }

    /// Tokenizes the prompts by both tokenizers, which must agree.
    fn encoded(&self, files: [&ModelFiles; 2], host: &Host) -> Result<Encoded> {
        let prompts = self.prompts.read()?;
        let (tokenizer, other) = (load_tokenizer(files[0], host)?, load_tokenizer(files[1], host)?);
        let sizes = [vocabulary(files[0])?, vocabulary(files[1])?];
        self.same_vocabulary([&tokenizer, &other], sizes)?;
        let encode = |prompt: &String| self.encode(prompt, [&tokenizer, &other], host);
        let tokens = prompts.iter().map(encode).collect::<Result<_>>()?;
        let limit = context_length(files[0])?.min(context_length(files[1])?);
        Ok(Encoded { prompts, tokens, tokenizer, limit })
    }

    /// Refuses models whose tokens mean different texts.
    fn same_vocabulary(&self, tokenizers: [&Tokenizer; 2], sizes: [usize; 2]) -> Result<()> {
        let refused = |found: String| {
            let fix = "two models with the same tokenizer; fix: name a model and a quantized version of it";
            Err(BadInput::new(self.names(), found, fix).into())
        };
        if sizes[0] != sizes[1] {
            return refused(format!("vocabularies of {} and {} tokens", sizes[0], sizes[1]));
        }
        match tokenizers[0].first_difference(tokenizers[1], sizes[0]) {
            Some((id, [a, b])) => refused(format!("token {id} that is {a:?} in one and {b:?} in the other")),
            None => Ok(()),
        }
    }

    fn names(&self) -> String {
        format!("{} and {}", self.a.named().display(), self.b.named().display())
    }

    fn encode(&self, prompt: &str, tokenizers: [&Tokenizer; 2], host: &Host) -> Result<Vec<u32>> {
        let (named, system) = (self.a.named(), self.system.as_deref());
        let rendered = match self.chat {
            true => Some(chat::conversation(named, tokenizers[0], system, prompt, host.chat(named)?)?),
            false => None,
        };
        let text = rendered.as_deref().unwrap_or(prompt);
        let needs = (text.len() as u64).saturating_mul(Tokenizer::ENCODING);
        host.require_more_memory("diff: tokens of the prompt", needs)?;
        // A chat template writes the special tokens itself.
        let bos = if rendered.is_some() { Bos::Never } else { self.bos.into() };
        let [a, b] = [tokenizers[0].encode(text, bos)?, tokenizers[1].encode(text, bos)?];
        if a != b {
            let found = format!("{} and {} tokens of the prompt {prompt:?}, not all equal", a.len(), b.len());
            let fix = "two models with the same tokenizer; fix: name a model and a quantized version of it, or try --bos never";
            return Err(BadInput::new(self.names(), found, fix).into());
        }
        Ok(a)
    }

    fn usage(&self, encoded: &Encoded) -> ModelUse<'static> {
        let longest = encoded.tokens.iter().map(Vec::len).max().unwrap_or(0);
        ModelUse {
            pass: longest.min(PREFILL),
            longest: longest.saturating_add(self.tokens as usize).min(encoded.limit),
            threads: 1,
            cached: true,
            logits: 1,
            ..ModelUse::default()
        }
    }
}

impl Prompts {
    /// Returns the prompts.
    fn read(&self) -> Result<Vec<String>> {
        let path = match self {
            Prompts::Text(text) => return Ok(vec![text.clone()]),
            Prompts::File(path) => path,
        };
        let text = read_text(path)?;
        let lines = text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty());
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        if lines.is_empty() {
            let (name, allowed) =
                (path.display().to_string(), "at least one prompt, each on a line of its own");
            return Err(BadInput::new(name, "no prompt", allowed).into());
        }
        Ok(lines)
    }
}

impl Job for Diff {
    const NAME: &'static str = "diff";
    const VERSION: u32 = 1;
    type Report = DiffReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let file = match &self.prompts {
            Prompts::Text(_) => None,
            Prompts::File(path) => Some(path.clone()),
        };
        self.a.inputs().into_iter().chain(self.b.inputs()).chain(file).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let [a, b] = self.models().map(open_quietly);
        let files = [&a?, &b?];
        Ok(self.usage(&self.encoded(files, host)?).needed(&files)?.1)
    }

    /// # Errors
    /// Models that cannot be run or have different tokenizers; prompts that cannot be read.
    fn run(&self, host: &Host) -> Result<DiffReport> {
        let [a, b] = self.models().map(open_quietly);
        let encoded = self.encoded([&a?, &b?], host)?;
        let [a, b] = self.models().map(|path| open(path, host));
        let files = [&a?, &b?];
        self.usage(&encoded).require(&files, host)?;
        let [a, b] = files.map(|files| Decoder::load(files));
        let (a, b) = (a?, b?);
        let Encoded { prompts, tokens, tokenizer, limit } = encoded;
        let progress = host.progress(prompts.len() as u64, Unit::Items("prompts"));
        let mut compared = Vec::with_capacity(prompts.len());
        for (prompt, tokens) in prompts.into_iter().zip(&tokens) {
            let new = (self.tokens as usize).min(limit.saturating_sub(tokens.len()).max(1));
            let found = diff([&a, &b], tokens, new, self.top as usize)?;
            compared.push(described(prompt, tokens, found, &tokenizer)?);
            progress.set(compared.len() as u64);
        }
        progress.finish();
        let (a, b) = (self.a.named().to_owned(), self.b.named().to_owned());
        Ok(DiffReport { a, b, prompts: compared })
    }
}

/// Turns tokens into texts.
fn described(
    prompt: String,
    tokens: &[u32],
    found: mantissa_eval::Diff,
    tokenizer: &Tokenizer,
) -> Result<ComparedPrompt> {
    let text = |from: &[u32], new: &[u32]| -> Result<String> {
        let mut stream = tokenizer.stream();
        stream.skip(from)?;
        let pieces = new.iter().map(|&token| stream.push(token)).collect::<Result<String, _>>()?;
        Ok(pieces + &stream.finish()?)
    };
    let equal = &found.continuations[0].tokens[..found.equal];
    let before = [tokens, equal].concat();
    let choice = |candidate: &TokenCandidate| -> Result<NextToken> {
        let plain = text(&before, &[candidate.token])?;
        // A special token has no text but a name.
        let named = if plain.is_empty() { tokenizer.decode_with_special(&[candidate.token])? } else { plain };
        Ok(NextToken { text: named, candidate: *candidate })
    };
    let choices = |candidates: &[TokenCandidate]| candidates.iter().map(choice).collect::<Result<Vec<_>>>();
    let difference = match &found.difference {
        None => None,
        Some(at) => Some(Parting {
            position: found.equal,
            kl: at.kl,
            a: choices(&at.top[0])?,
            b: choices(&at.top[1])?,
        }),
    };
    let equal_text = text(tokens, equal)?;
    let kl_mean = found.kl.iter().sum::<f64>() / found.kl.len().max(1) as f64;
    let prompt_tokens = tokens.len();
    let equal_tokens = found.equal;
    let [a, b] = found.continuations.map(|side| {
        Ok::<_, crate::JobError>(ContinuedText {
            text: text(tokens, &side.tokens)?,
            own_text: text(&before, &side.tokens[equal_tokens..])?,
            stopped: stop_name(side.stopped),
            tokens: side.tokens,
        })
    });
    Ok(ComparedPrompt { prompt, prompt_tokens, equal_tokens, equal_text, kl_mean, difference, a: a?, b: b? })
}
