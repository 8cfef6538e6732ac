//! `mantissa run`: generates text.

pub(super) mod fast;
mod interactive;
mod prompt;
mod reference;

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_model::{DecodeStream, GenerateOptions, KvPolicy, Sampling, StopReason, Tokenizer};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use self::fast::Drafted;
use self::prompt::Prompt;
use super::adapter::AdapterArgs;
use super::calibration::CalibrationArgs;
use super::model::load_tokenizer;
use super::model::{self, ModelPath};
use super::text::BosArg;
use crate::context::Context;
use crate::error::{BadInput, StdoutError};
use crate::machine::peak_anonymous;

/// Generate text from a prompt, streaming
///
/// Greedy unless --temperature is above 0; sampled text depends on --seed only. With --chat the prompt is a
/// user message, rendered with the model's chat template; the answer ends with the end-of-turn token.
/// Speed of prefill and decode goes to standard error.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa run demo -p 'Once upon a time' -n 200
  mantissa run demo -p 'Once upon a time' --temperature 0.8 --seed 7
  mantissa run demo -p 'Once upon a time' --kv int8-head
  mantissa run path/to/model -p 'Once upon a time' \\
      --kv keys=int4-g32-asym,values=int4-head-asym,window=64,channel-keys
  mantissa run path/to/model --chat -p 'Why is the sky blue?'
  mantissa run path/to/model --interactive
  mantissa run demo --interactive -n 40
  mantissa run path/to/model -p - < prompt.txt
  mantissa run path/to/model --adapter path/to/adapter --chat -p 'Hello'
  mantissa run path/to/model --draft path/to/smaller -p 'Once upon a time'")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// Dense or quantized. demo is the model inside the binary.
    model: ModelPath,
    /// Prompt; - reads standard input
    ///
    /// Without it, the prompt is standard input, unless that is a terminal. One line break at the end is dropped.
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt", conflicts_with = "interactive")]
    prompt: Option<String>,
    /// Chat: one message per line, until end of input or /exit
    ///
    /// Uses the model's chat template. A turn computes only what the turns before it have not. When the context is
    /// full, the oldest messages are left out. demo continues a story.
    #[arg(short, long, help_heading = "Prompt", conflicts_with_all = ["chat", "bos"])]
    interactive: bool,
    /// Use the prompt as a chat message of the user
    ///
    /// The model's chat template renders it.
    #[arg(long, conflicts_with = "bos", help_heading = "Prompt")]
    chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    system: Option<String>,
    /// Maximum number of new tokens
    #[arg(
        short,
        long = "max-tokens",
        visible_alias = "n-predict",
        value_name = "N",
        default_value_t = 128,
        help_heading = "Sampling"
    )]
    n: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    temperature: f32,
    /// Sample from the K most probable tokens
    ///
    /// 0 uses all.
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    top_k: usize,
    /// Sample from tokens of total probability P
    ///
    /// The smallest set of the most probable tokens whose probabilities sum to P.
    #[arg(long, value_name = "P", default_value_t = 1.0, help_heading = "Sampling")]
    top_p: f32,
    /// Sample from tokens with this share of the top probability
    #[arg(long, value_name = "P", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    min_p: f32,
    /// Divide positive logits of tokens so far by X, multiply negative ones
    #[arg(long, value_name = "X", default_value_t = 1.0, help_heading = "Sampling", hide_short_help = true)]
    repetition_penalty: f32,
    /// Subtract X from the logits of generated tokens
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    presence_penalty: f32,
    /// Subtract X times their count from the logits of generated tokens
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    frequency_penalty: f32,
    /// BOS before the prompt; auto follows the tokenizer
    #[arg(long, value_enum, default_value_t = BosArg::Auto, help_heading = "Prompt", hide_short_help = true)]
    bos: BosArg,
    /// Quantize the KV cache, such as int8-head
    ///
    /// A scheme (int8-head, int4-g32-asym …), or
    /// keys=SCHEME,values=SCHEME,window=N,sinks=N,scales=f16,channel-keys,pre-rope,rotate. nuq4-1% and
    /// similar learn their levels on --calibration, unless MODEL has them.
    #[arg(long, value_name = "SCHEME", help_heading = "KV cache")]
    kv: Option<KvPolicy>,
    /// Longest conversation in tokens, with --interactive
    ///
    /// At most the model's context. Memory for it is planned at the start.
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 8192,
        help_heading = "Prompt",
        hide_short_help = true
    )]
    context: usize,
    /// Kernels that run the model [default: fast]
    ///
    /// fast repacks weights and quantizes activations on the fly where the scheme allows. reference gives the bits of
    /// the products with the dequantized weights in f32, as eval does.
    #[arg(long, value_enum, value_name = "ENGINE", help_heading = "Speed")]
    engine: Option<Engine>,
    /// Smaller model that proposes tokens
    ///
    /// It has the same vocabulary. Changes no token, only the speed.
    #[arg(long, value_name = "MODEL", help_heading = "Speed")]
    draft: Option<ModelPath>,
    /// Source of proposed tokens
    ///
    /// A draft model takes precedence. lookup continues earlier places of the text that end alike, as long as that pays. Changes no token.
    #[arg(long, value_enum, value_name = "SOURCE", default_value_t = Speculate::Lookup, help_heading = "Speed")]
    speculate: Speculate,
    #[command(flatten, next_help_heading = "Adapter")]
    adapter: AdapterArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
}

/// Kernels that run a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Repacked weights, quantized activations
    Fast,
    /// Dense f32 products
    Reference,
}

/// Source of proposed tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Speculate {
    /// Earlier places of the text
    Lookup,
    /// No proposals
    Off,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<&'a Path>,
    prompt: &'a str,
    /// Prompt as rendered by the chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    rendered: Option<&'a str>,
    text: &'a str,
    tokens: &'a [u32],
    prompt_tokens: usize,
    stopped: &'static str,
    engine: Engine,
    /// KV cache policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    /// Bytes per token in the cache.
    kv_bytes_per_token: f64,
    load_seconds: f64,
    /// Prompt tokens per second until the first token.
    prefill_tokens_per_s: f64,
    /// New tokens per second after the first.
    tokens_per_second: f64,
    /// Peak of anonymous memory in bytes, predicted before loading.
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_peak_memory: Option<u64>,
    /// Peak of anonymous memory of this process in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured_peak_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<Drafted>,
}

/// Result of one generation.
struct Answer {
    text: String,
    tokens: Vec<u32>,
    stopped: StopReason,
    speed: Speed,
}

/// Speed of one generation.
#[derive(Clone, Copy)]
struct Speed {
    /// Prompt tokens that were computed.
    prompt: usize,
    /// Time to the first token.
    first: Duration,
    /// New tokens, and the time for those after the first.
    new: usize,
    rest: Duration,
}

impl Speed {
    fn prefill(&self) -> f64 {
        rate(self.prompt, self.first)
    }

    fn decode(&self) -> f64 {
        rate(self.new.saturating_sub(1), self.rest)
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prefill {} tokens, {} tok/s", self.prompt, three_digits(self.prefill()))?;
        if self.new > 1 {
            write!(f, "; decode {} tokens, {} tok/s", self.new, three_digits(self.decode()))?;
        }
        Ok(())
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) }
}

/// Rounds to about three significant digits, as text.
fn three_digits(x: f64) -> String {
    let decimals = if x < 10.0 { 2 } else { usize::from(x < 100.0) };
    format!("{x:.decimals$}")
}

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.draft.iter().for_each(|draft| draft.paths(paths));
    args.adapter.paths(paths);
    args.calibration.paths(paths);
}

/// Runs the command.
///
/// # Errors
/// A model or prompt that cannot be run; standard output.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let files = model::open(&args.model, context)?;
    let tokenizer = args.adapter.templates(load_tokenizer(&files, context)?)?;
    let (engine, reason) = engine(args, &files)?;
    if args.interactive {
        reason.iter().for_each(|reason| context.note(reason));
        return interactive::run(args, engine, &files, &tokenizer, context);
    }
    let prompt = Prompt::read(args, &tokenizer, context)?;
    let limit = model::context_length(&files)?;
    let options = options(args, prompt.tokens.len(), limit, context);
    let (mut predicted, mut memory) = (None, None);
    let start = Instant::now();
    let (done, load) = match engine {
        Engine::Fast => {
            let sizes = (prompt.tokens.len(), &options);
            let loaded = fast::Loaded::load(args, &files, &tokenizer, sizes, context)?;
            let mut session = loaded.session()?;
            let load = start.elapsed();
            let answer = session.answer(&tokenizer, &prompt.tokens, &options, context)?;
            predicted = Some(loaded.predicted());
            memory = Some(loaded.memory());
            ((answer, loaded.kv_bytes_per_token(), session.drafted()), load)
        }
        Engine::Reference => {
            let model = reference::load(args, prompt.tokens.len(), limit, context)?;
            let load = start.elapsed();
            let answer = reference::answer(&model.decoder, &tokenizer, &prompt.tokens, &options, context)?;
            ((answer, model.decoder.kv_bytes_per_token(), None), load)
        }
    };
    let (answer, kv_bytes_per_token, speculation) = done;
    let report = Report {
        model: args.model.named(),
        adapter: args.adapter.named(),
        prompt: &prompt.text,
        rendered: prompt.rendered.as_deref(),
        text: &answer.text,
        tokens: &answer.tokens,
        prompt_tokens: prompt.tokens.len(),
        stopped: stop_name(answer.stopped),
        engine,
        kv: args.kv.as_ref().map(KvPolicy::to_string).or_else(|| files.kv_policy().map(str::to_owned)),
        kv_bytes_per_token,
        load_seconds: load.as_secs_f64(),
        prefill_tokens_per_s: answer.speed.prefill(),
        tokens_per_second: answer.speed.decode(),
        predicted_peak_memory: predicted,
        measured_peak_memory: peak_anonymous(),
        speculation,
    };
    context.report(&report, |out| writeln!(out))?;
    reason.iter().for_each(|reason| context.note(reason));
    if let Some(kv) = &report.kv {
        context.note(&format!("KV cache {kv}: {} bytes per token", report.kv_bytes_per_token));
    }
    memory.iter().for_each(|memory| context.note(memory));
    context.note(&told(&answer.speed, speculation));
    Ok(())
}

/// Describes speed and proposals.
fn told(speed: &Speed, drafted: Option<Drafted>) -> String {
    match drafted.filter(|drafted| drafted.proposed > 0) {
        None => speed.to_string(),
        Some(Drafted { proposed, accepted }) => {
            format!("{speed}; {accepted} of {proposed} proposed tokens accepted")
        }
    }
}

/// Chooses the engine: what the fast one cannot run goes to the reference, for the reason returned, unless it was
/// asked for.
fn engine(args: &Args, files: &ModelFiles) -> Result<(Engine, Option<String>)> {
    let Some(found) = fast::unsupported(args, files)? else {
        return Ok((args.engine.unwrap_or(Engine::Fast), None));
    };
    match args.engine {
        Some(Engine::Fast) => Err(BadInput::new("--engine fast", found, "a model and cache that it runs")
            .with_fix("--engine reference")
            .into()),
        Some(Engine::Reference) => Ok((Engine::Reference, None)),
        None => Ok((Engine::Reference, Some(format!("{found} runs on the reference engine")))),
    }
}

/// Makes the options of the generation; warns if the model's context cuts the number of new tokens.
fn options(args: &Args, prompt: usize, limit: usize, context: &Context) -> GenerateOptions {
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition: args.repetition_penalty,
        presence: args.presence_penalty,
        frequency: args.frequency_penalty,
        seed: context.seed,
        ..Sampling::default()
    };
    let max_new_tokens = args.n.min(limit.saturating_sub(prompt).max(1));
    if prompt.saturating_add(args.n) > limit {
        context.warn(&format!(
            "the model's context of {limit} tokens leaves room for {max_new_tokens} new tokens"
        ));
    }
    GenerateOptions { max_new_tokens, sampling, ..GenerateOptions::default() }
}

/// Text of a generation, printed piece by piece unless the JSON report takes standard output.
struct Writer<'t> {
    stream: DecodeStream<'t>,
    text: String,
    prints: bool,
    start: Instant,
    first: Option<Instant>,
    tokens: Vec<u32>,
}

impl<'t> Writer<'t> {
    /// Begins after `prompt`, whose computation starts now.
    fn new(tokenizer: &'t Tokenizer, prompt: &[u32], context: &Context) -> Result<Self> {
        let mut stream = tokenizer.stream();
        stream.skip(prompt)?;
        let (text, prints, tokens) = (String::new(), context.prints_text(), Vec::new());
        Ok(Writer { stream, text, prints, start: Instant::now(), first: None, tokens })
    }

    fn push(&mut self, token: u32) -> Result<()> {
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(token);
        let piece = self.stream.push(token)?;
        emit(&mut self.text, &piece, self.prints)
    }

    /// Ends the text of a prompt of which `computed` tokens were computed.
    fn finish(self, computed: usize, stopped: StopReason) -> Result<Answer> {
        let end = Instant::now();
        let Writer { stream, mut text, prints, start, first, tokens } = self;
        emit(&mut text, &stream.finish()?, prints)?;
        let first = first.unwrap_or(end);
        let speed = Speed {
            prompt: computed,
            first: first.duration_since(start),
            new: tokens.len(),
            rest: end.duration_since(first),
        };
        Ok(Answer { text, tokens, stopped, speed })
    }
}

fn emit(text: &mut String, piece: &str, prints: bool) -> Result<()> {
    text.push_str(piece);
    if prints {
        let mut out = io::stdout().lock();
        out.write_all(piece.as_bytes()).and_then(|()| out.flush()).map_err(StdoutError)?;
    }
    Ok(())
}

/// Returns the name of a reason for the end of a text.
pub fn stop_name(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Length => "length",
        StopReason::Token(_) => "stop token",
        StopReason::Caller => "caller",
        StopReason::Constraint => "constraint",
    }
}
