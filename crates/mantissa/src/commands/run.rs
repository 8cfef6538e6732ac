//! `mantissa run`: generates text.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use mantissa_model::{
    Bos, Decoder, GenerateOptions, Generated, KvPolicy, Sampling, StopReason, Tokenizer, generate,
};
use mantissa_store::Paths;
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::model::load_tokenizer;
use super::model::{self, ModelPath};
use super::render_chat;
use super::running::{self, Use};
use super::text::BosArg;
use crate::context::Context;
use crate::error::StdoutError;

/// Generate text from a prompt, streaming
///
/// Greedy unless --temperature is above 0; sampled text depends on --seed only. With --chat the prompt is a
/// user message, rendered with the model's chat template; the answer ends with the end-of-turn token.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa run demo -p 'Once upon a time' -n 200
  mantissa run demo -p 'Once upon a time' --temperature 0.8 --seed 7
  mantissa run demo -p 'Once upon a time' --kv int8-head
  mantissa run path/to/model -p 'Once upon a time' \\
      --kv keys=int4-g32-asym,values=int4-head-asym,window=64,channel-keys
  mantissa run path/to/model --chat -p 'Why is the sky blue?'")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// Dense or quantized. demo is the model inside the binary.
    model: ModelPath,
    /// Prompt
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt")]
    prompt: String,
    /// Use the prompt as a chat message of the user
    ///
    /// The model's chat template renders it.
    #[arg(long, conflicts_with = "bos", help_heading = "Prompt")]
    chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat", help_heading = "Prompt")]
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
    #[command(flatten)]
    calibration: CalibrationArgs,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    prompt: &'a str,
    /// Prompt as rendered by the chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    rendered: Option<&'a str>,
    text: &'a str,
    tokens: &'a [u32],
    prompt_tokens: usize,
    stopped: &'static str,
    /// KV cache policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    /// Bytes per token in the cache.
    kv_bytes_per_token: f64,
    tokens_per_second: f64,
}

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.calibration.paths(paths);
}

/// Runs the command.
///
/// # Errors
/// A model or prompt that cannot be run; standard output.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let files = model::open(&args.model, context)?;
    let tokenizer = load_tokenizer(&files, context)?;
    let conversation =
        || render_chat::conversation(&args.model, &tokenizer, args.system.as_deref(), &args.prompt);
    let rendered = args.chat.then(conversation).transpose()?;
    let prompt = encode(args, rendered.as_deref(), &tokenizer, context)?;
    let limit = model::context_length(&files)?;
    let options = options(args, prompt.len(), limit, context);
    let used = Use {
        pass: prompt.len().min(mantissa_model::PREFILL),
        longest: prompt.len().saturating_add(args.n).min(limit),
        threads: 1,
        cached: true,
        logits: 1,
        kv: args.kv.as_ref(),
        calibration: Some(&args.calibration),
    };
    let [model] = running::load_all([&*args.model], used, context)?;
    let start = Instant::now();
    let (text, generated) = stream(&model.decoder, &tokenizer, &prompt, &options, context)?;
    let report = Report {
        model: args.model.named(),
        prompt: &args.prompt,
        rendered: rendered.as_deref(),
        text: &text,
        tokens: &generated.tokens,
        prompt_tokens: prompt.len(),
        stopped: stop_name(generated.stopped),
        kv: args.kv.as_ref().map(KvPolicy::to_string).or_else(|| model.files.kv_policy().map(str::to_owned)),
        kv_bytes_per_token: model.decoder.kv_bytes_per_token(),
        tokens_per_second: generated.tokens.len() as f64 / start.elapsed().as_secs_f64(),
    };
    context.report(&report, |out| writeln!(out))?;
    if let Some(kv) = &report.kv {
        context.note(&format!("KV cache {kv}: {} bytes per token", report.kv_bytes_per_token));
    }
    Ok(())
}

/// Tokenizes the prompt, or the conversation rendered from it.
fn encode(args: &Args, rendered: Option<&str>, tokenizer: &Tokenizer, context: &Context) -> Result<Vec<u32>> {
    let text = rendered.unwrap_or(&args.prompt);
    let needs = (text.len() as u64).saturating_mul(Tokenizer::ENCODING);
    context.require_more_memory("run: tokens of the prompt", needs)?;
    // A chat template writes the special tokens itself.
    let bos = if rendered.is_some() { Bos::Never } else { args.bos.into() };
    Ok(tokenizer.encode(text, bos)?)
}

/// Makes the options of the generation; warns if the model's context cuts the number of new tokens.
fn options(args: &Args, prompt: usize, limit: usize, context: &Context) -> GenerateOptions {
    let sampling =
        Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: context.seed };
    let max_new_tokens = args.n.min(limit.saturating_sub(prompt).max(1));
    if prompt.saturating_add(args.n) > limit {
        context.warn(&format!(
            "the model's context of {limit} tokens leaves room for {max_new_tokens} new tokens"
        ));
    }
    GenerateOptions { max_new_tokens, sampling, ..GenerateOptions::default() }
}

/// Generates text and prints it piece by piece, unless the JSON report takes standard output.
fn stream(
    decoder: &Decoder,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
    context: &Context,
) -> Result<(String, Generated)> {
    let mut stream = tokenizer.stream();
    stream.skip(prompt)?;
    let (mut text, mut failed) = (String::new(), None);
    let streaming = context.prints_text();
    let generated = generate(decoder, prompt, options, |token| {
        let piece = stream.push(token);
        match piece.map_err(anyhow::Error::from).and_then(|piece| emit(&mut text, &piece, streaming)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    emit(&mut text, &stream.finish()?, streaming)?;
    Ok((text, generated))
}

fn emit(text: &mut String, piece: &str, streaming: bool) -> Result<()> {
    text.push_str(piece);
    if streaming {
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
    }
}
