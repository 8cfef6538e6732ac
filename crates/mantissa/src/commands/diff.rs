//! `mantissa diff`: the first token at which the greedy continuations of two models differ.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{Diff, TokenCandidate, diff};
use mantissa_model::{Bos, Tokenizer};
use mantissa_store::Paths;
use serde::Serialize;

use super::execute::Execute;
use super::loaded_models::{self, Use};
use super::model::load_tokenizer;
use super::model::{self, ModelPath};
use super::render_chat;
use super::run::stop_name;
use super::text::{BosArg, read_text};
use crate::columns::side_by_side;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{Align, Table, number};
use crate::progress::Unit;

/// Show the first token at which two models part
///
/// Both models continue the prompt greedily. The report has the number of equal tokens, the KL divergence
/// KL(A || B) at the first difference, the most probable tokens of each model there, and both texts. A and B
/// need the same tokenizer.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa diff demo demo-int4 -p 'Once upon a time'
  mantissa diff demo demo-int4 -p 'Once upon a time' -n 64 --json
  mantissa diff path/to/model path/to/model-q4_k_m.gguf --chat \\
      -p 'Why is the sky blue?'
  mantissa diff path/to/model path/to/quantized --prompts prompts.txt")]
pub struct Args {
    /// Model, such as the unquantized one
    ///
    /// Hugging Face folder, .gguf file, or demo (the model inside the binary).
    a: ModelPath,
    /// Second model
    b: ModelPath,
    /// Prompt
    #[arg(short, long, value_name = "TEXT", required_unless_present = "prompts", help_heading = "Prompt")]
    prompt: Option<String>,
    /// Text file with one prompt per line
    ///
    /// Empty lines are skipped.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt", help_heading = "Prompt")]
    prompts: Option<PathBuf>,
    /// Maximum number of new tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Number of most probable tokens to show
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    top: u32,
    /// Use the prompt as a chat message of the user
    ///
    /// A's chat template renders it.
    #[arg(long, conflicts_with = "bos", help_heading = "Prompt")]
    chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat", help_heading = "Prompt")]
    system: Option<String>,
    /// BOS before the prompt; auto follows the tokenizer
    #[arg(long, value_enum, default_value_t = BosArg::Auto, help_heading = "Prompt", hide_short_help = true)]
    bos: BosArg,
}

#[derive(Serialize)]
struct Report<'a> {
    a: &'a Path,
    b: &'a Path,
    prompts: Vec<Compared>,
}

/// Comparison on one prompt.
#[derive(Serialize)]
struct Compared {
    prompt: String,
    prompt_tokens: usize,
    /// Number of equal tokens after the prompt.
    equal_tokens: usize,
    /// Their text.
    equal_text: String,
    /// Mean of KL(A || B) over the equal tokens and the first difference, in nats.
    kl_mean: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<Parting>,
    a: Side,
    b: Side,
}

/// Next-token distributions at the first difference.
#[derive(Serialize)]
struct Parting {
    /// Index of the token after the prompt.
    position: usize,
    /// KL(A || B) there, in nats.
    kl: f64,
    a: Vec<TokenChoice>,
    b: Vec<TokenChoice>,
}

/// Candidate for the next token.
#[derive(Serialize)]
struct TokenChoice {
    text: String,
    #[serde(flatten)]
    candidate: TokenCandidate,
}

/// Continuation by one model.
#[derive(Serialize)]
struct Side {
    text: String,
    /// Text after the equal tokens.
    own_text: String,
    tokens: Vec<u32>,
    stopped: &'static str,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.a.paths(paths);
        self.b.paths(paths);
        self.prompts.iter().for_each(|path| paths.read(path));
        Ok(())
    }

    /// # Errors
    /// Models that cannot be run or have different tokenizers; prompts that cannot be read.
    fn run(&self, context: &Context) -> Result<()> {
        let prompts = prompts(self)?;
        let files = [model::open_quietly(&self.a)?, model::open_quietly(&self.b)?];
        let tokenizer = load_tokenizer(&files[0], context)?;
        let other = load_tokenizer(&files[1], context)?;
        same_vocabulary(
            self,
            [&tokenizer, &other],
            [model::vocabulary(&files[0])?, model::vocabulary(&files[1])?],
        )?;
        let mut encoded = Vec::with_capacity(prompts.len());
        for prompt in &prompts {
            encoded.push(encode(self, prompt, [&tokenizer, &other], context)?);
        }
        drop(other);
        let limit = model::context_length(&files[0])?.min(model::context_length(&files[1])?);
        let longest = encoded.iter().map(Vec::len).max().unwrap_or(0);
        let used = Use {
            pass: longest.min(mantissa_model::PREFILL),
            longest: longest.saturating_add(self.tokens as usize).min(limit),
            threads: 1,
            cached: true,
            logits: 1,
            kv: None,
            calibration: None,
            adapter: None,
        };
        let [a, b] = loaded_models::load_all([&*self.a, &*self.b], used, context)?;
        let progress = context.progress(prompts.len() as u64, Unit::Items("prompts"));
        let mut compared = Vec::with_capacity(prompts.len());
        for (prompt, tokens) in prompts.into_iter().zip(&encoded) {
            let new = (self.tokens as usize).min(limit.saturating_sub(tokens.len()).max(1));
            let found = diff([&a.decoder, &b.decoder], tokens, new, self.top as usize)?;
            compared.push(described(prompt, tokens, found, &tokenizer)?);
            progress.set(compared.len() as u64);
        }
        progress.finish();
        let report = Report { a: self.a.named(), b: self.b.named(), prompts: compared };
        context.report(&report, |out| human(out, &report))
    }
}

/// Returns the prompts.
fn prompts(args: &Args) -> Result<Vec<String>> {
    let Some(path) = &args.prompts else { return Ok(args.prompt.iter().cloned().collect()) };
    let text = read_text(path)?;
    let lines: Vec<String> =
        text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    if lines.is_empty() {
        let name = path.display().to_string();
        return Err(BadInput::new(name, "no prompt", "at least one prompt, each on a line of its own").into());
    }
    Ok(lines)
}

/// Refuses models whose tokens mean different texts.
fn same_vocabulary(args: &Args, tokenizers: [&Tokenizer; 2], sizes: [usize; 2]) -> Result<()> {
    let refused = |found: String| {
        let models = format!("{} and {}", args.a.named().display(), args.b.named().display());
        let fix = "two models with the same tokenizer; fix: name a model and a quantized version of it";
        Err(BadInput::new(models, found, fix).into())
    };
    if sizes[0] != sizes[1] {
        return refused(format!("vocabularies of {} and {} tokens", sizes[0], sizes[1]));
    }
    match tokenizers[0].first_difference(tokenizers[1], sizes[0]) {
        Some((id, [a, b])) => refused(format!("token {id} that is {a:?} in one and {b:?} in the other")),
        None => Ok(()),
    }
}

/// Tokenizes a prompt by both tokenizers, which must agree.
fn encode(args: &Args, prompt: &str, tokenizers: [&Tokenizer; 2], context: &Context) -> Result<Vec<u32>> {
    let rendered = match args.chat {
        true => Some(render_chat::conversation(&args.a, tokenizers[0], args.system.as_deref(), prompt)?),
        false => None,
    };
    let text = rendered.as_deref().unwrap_or(prompt);
    context.require_more_memory(
        "diff: tokens of the prompt",
        (text.len() as u64).saturating_mul(Tokenizer::ENCODING),
    )?;
    // A chat template writes the special tokens itself.
    let bos = if rendered.is_some() { Bos::Never } else { args.bos.into() };
    let [a, b] = [tokenizers[0].encode(text, bos)?, tokenizers[1].encode(text, bos)?];
    if a != b {
        let found = format!("{} and {} tokens of the prompt {prompt:?}, not all equal", a.len(), b.len());
        let fix = "two models with the same tokenizer; fix: name a model and a quantized version of it, or try --bos never";
        let models = format!("{} and {}", args.a.named().display(), args.b.named().display());
        return Err(BadInput::new(models, found, fix).into());
    }
    Ok(a)
}

/// Turns tokens into texts.
fn described(prompt: String, tokens: &[u32], found: Diff, tokenizer: &Tokenizer) -> Result<Compared> {
    let text = |from: &[u32], new: &[u32]| -> Result<String> {
        let mut stream = tokenizer.stream();
        stream.skip(from)?;
        let pieces = new.iter().map(|&token| stream.push(token)).collect::<Result<String, _>>()?;
        Ok(pieces + &stream.finish()?)
    };
    let equal = &found.continuations[0].tokens[..found.equal];
    let before = [tokens, equal].concat();
    let choice = |candidate: &TokenCandidate| -> Result<TokenChoice> {
        let plain = text(&before, &[candidate.token])?;
        // A special token has no text but a name.
        let named = if plain.is_empty() { tokenizer.decode_with_special(&[candidate.token])? } else { plain };
        Ok(TokenChoice { text: named, candidate: *candidate })
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
        let own_text = text(&before, &side.tokens[equal_tokens..])?;
        let stopped = stop_name(side.stopped);
        Ok::<_, anyhow::Error>(Side {
            text: text(tokens, &side.tokens)?,
            own_text,
            tokens: side.tokens,
            stopped,
        })
    });
    Ok(Compared { prompt, prompt_tokens, equal_tokens, equal_text, kl_mean, difference, a: a?, b: b? })
}

impl Side {
    /// Returns the text after the equal tokens, or why there is none.
    fn own(&self) -> &str {
        let own = self.own_text.trim_start();
        if own.is_empty() { "(end of the text)" } else { own }
    }
}

/// Width of the two texts side by side.
const WIDTH: usize = 80;

fn human(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    for (i, prompt) in report.prompts.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        human_prompt(out, report, prompt)?;
    }
    if report.prompts.len() > 1 {
        writeln!(out)?;
        summary(out, &report.prompts)?;
    }
    Ok(())
}

fn human_prompt(out: &mut dyn Write, report: &Report<'_>, c: &Compared) -> io::Result<()> {
    writeln!(out, "prompt  {}", quoted(&c.prompt))?;
    writeln!(out, "equal   {} tokens: {}", c.equal_tokens, quoted(&c.equal_text))?;
    let Some(parting) = &c.difference else {
        return writeln!(
            out,
            "No difference; KL(A || B) mean {} nats/token; both stopped: {}",
            number(Some(c.kl_mean), 3),
            c.a.stopped
        );
    };
    writeln!(
        out,
        "token {} differs; KL(A || B) {} nats there, mean up to it {}\n",
        parting.position + 1,
        number(Some(parting.kl), 3),
        number(Some(c.kl_mean), 3)
    )?;
    candidates(out, parting)?;
    writeln!(out)?;
    let heads = [format!("A: {}", report.a.display()), format!("B: {}", report.b.display())];
    side_by_side(out, WIDTH, [&heads[0], &heads[1]])?;
    side_by_side(out, WIDTH, [c.a.own(), c.b.own()])
}

/// Prints the most probable tokens of both models beside each other.
fn candidates(out: &mut dyn Write, parting: &Parting) -> io::Result<()> {
    let mut table = Table::new([
        ("A's tokens", Align::Left),
        ("p(A)", Align::Right),
        ("p(B)", Align::Right),
        ("B's tokens", Align::Left),
        ("p(B)", Align::Right),
        ("p(A)", Align::Right),
    ]);
    let cells = |choice: &TokenChoice| {
        let TokenCandidate { p, p_other, .. } = choice.candidate;
        [clipped(&quoted(&choice.text), 22), format!("{p:.4}"), format!("{p_other:.4}")]
    };
    for (a, b) in parting.a.iter().zip(&parting.b) {
        table.row(cells(a).into_iter().chain(cells(b)));
    }
    table.write(out)
}

/// Prints a line for each prompt.
fn summary(out: &mut dyn Write, prompts: &[Compared]) -> io::Result<()> {
    let mut table = Table::new([
        ("prompt", Align::Left),
        ("equal tokens", Align::Right),
        ("KL there", Align::Right),
        ("KL mean", Align::Right),
    ]);
    for c in prompts {
        let there = c.difference.as_ref().map_or("-".to_owned(), |at| number(Some(at.kl), 3));
        table.row([clipped(&c.prompt, 40), c.equal_tokens.to_string(), there, number(Some(c.kl_mean), 3)]);
    }
    table.write(out)?;
    let differing = prompts.iter().filter(|c| c.difference.is_some()).count();
    writeln!(out, "{differing} of {} prompts differ", prompts.len())
}

/// Returns `text` in quotes, with control characters escaped.
fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Cuts `text` to `most` characters.
fn clipped(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}
