//! `mantissa run`: generates text.

mod answer;
mod args;
mod fast;
mod interactive;
mod prompt;
mod reference;

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use mantissa_jobs::machine::peak_anonymous;
use mantissa_jobs::names::stop_name;
use mantissa_jobs::{adapter, chat};
use mantissa_model::{KvPolicy, StopReason, Tokenizer};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use self::answer::{Answer, Drafted, told};
use self::args::{longest_turn, options, sampling};
use self::prompt::Prompt;
use super::execute::Execute;
use super::load_preview::LoadPreview;
use super::model::{self, ModelPath, load_tokenizer};
use super::text::BosArg;
use crate::context::Context;
use crate::error::{AnswerCut, BadInput};
use crate::help::Group;
use crate::terminal;

pub use self::args::{Args, Engine};

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
    engine: mantissa_jobs::names::Engine,
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

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.draft.iter().for_each(|draft| draft.paths(paths));
        self.adapter.paths(paths);
        self.calibration.paths(paths);
        chat::template_file(self.chat_template.as_deref()).into_iter().for_each(|file| paths.read(file));
        Ok(())
    }

    /// # Errors
    /// A model or prompt that cannot be run; standard output.
    fn run(&self, context: &Context) -> Result<()> {
        let files = model::open(&self.model, context)?;
        let tokenizer = adapter::templates(load_tokenizer(&files, context)?, self.adapter.named())?;
        let tokenizer = chat::with_template(tokenizer, self.chat_template.as_deref())?;
        let (engine, reason) = engine(self, &files)?;
        let begun = self.begins_chat(&tokenizer, context);
        let begun = begun.then(|| self.as_chat());
        let asked = begun.as_ref().unwrap_or(self);
        if asked.dry_run {
            return preview(asked, engine, &files, &tokenizer, context);
        }
        if asked.interactive {
            reason.iter().for_each(|reason| context.note(reason));
            return interactive::run(asked, engine, &files, &tokenizer, context);
        }
        let limit = self.longest(&files, context)?;
        if self.continues_pipe(&tokenizer, context) {
            context.note("the prompt is standard input, continued as a text; the model has a chat template: --chat makes it a message");
        }
        let prompt = Prompt::read(self, &tokenizer, context)?;
        self.require_room(prompt.tokens.len(), limit)?;
        let sampling = sampling(self, &files, context);
        let options = options(self, sampling, (prompt.tokens.len(), limit), context);
        let (mut predicted, mut memory) = (None, None);
        let start = Instant::now();
        let (done, load) = match engine {
            Engine::Fast => {
                let sizes = (prompt.tokens.len(), &options);
                let loaded = fast::Loaded::load(self, &files, &tokenizer, sizes, context)?;
                let mut session = loaded.session()?;
                let load = start.elapsed();
                let answer = session.answer(&tokenizer, &prompt.tokens, &options, context)?;
                predicted = Some(loaded.predicted());
                memory = Some(loaded.memory());
                ((answer, loaded.kv_bytes_per_token(), session.drafted()), load)
            }
            Engine::Reference => {
                let decoder = reference::load(self, prompt.tokens.len(), limit, context)?;
                let load = start.elapsed();
                let answer = reference::answer(&decoder, &tokenizer, &prompt.tokens, &options, context)?;
                ((answer, decoder.kv_bytes_per_token(), None), load)
            }
        };
        let (answer, kv_bytes_per_token, speculation) = done;
        let report = Report {
            model: self.model.named(),
            adapter: self.adapter.named(),
            prompt: &prompt.text,
            rendered: prompt.rendered.as_deref(),
            text: &answer.text,
            tokens: &answer.tokens,
            prompt_tokens: prompt.tokens.len(),
            stopped: stop_name(answer.stopped),
            engine: engine.into(),
            kv: self.kv.as_ref().map(KvPolicy::to_string).or_else(|| files.kv_policy().map(str::to_owned)),
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
        self.note_end(&answer, (prompt.tokens.len(), limit), &tokenizer, context);
        match answer.stopped {
            StopReason::Caller => Err(AnswerCut.into()),
            _ => Ok(()),
        }
    }
}

impl Args {
    /// True if a chat begins though none was asked for: a person is at the terminal and gave no prompt.
    fn begins_chat(&self, tokenizer: &Tokenizer, context: &Context) -> bool {
        let unasked = self.text.is_none() && self.prompt.is_none() && self.bos == BosArg::Auto;
        unasked && terminal::is_person() && context.prints_text() && tokenizer.chat_template().is_some()
    }

    /// True if a chat model continues what is piped into it, which looks as if it ignored it.
    fn continues_pipe(&self, tokenizer: &Tokenizer, context: &Context) -> bool {
        let unasked = self.text.is_none() && self.prompt.is_none() && !self.chat;
        unasked && context.prints_text() && tokenizer.chat_template().is_some()
    }

    /// Says, unless JSON does, how an answer ended that its reader may have expected to be longer.
    fn note_end(
        &self,
        answer: &Answer,
        (prompt, limit): (usize, usize),
        tokenizer: &Tokenizer,
        context: &Context,
    ) {
        match answer.stopped {
            StopReason::Length => self.note_length((prompt, answer.tokens.len()), limit, context),
            StopReason::Token(_) if context.prints_text() && answer.text.trim().is_empty() => {
                let hint = match tokenizer.chat_template() {
                    Some(_) if !self.chat => "; it has a chat template: add --chat",
                    _ => "",
                };
                context.note(&format!("the model ended at once{hint}"));
            }
            _ => {}
        }
    }
}

/// Says what would be loaded for the prompt, or for the longest conversation.
fn preview(
    args: &Args,
    engine: Engine,
    files: &ModelFiles,
    tokenizer: &Tokenizer,
    context: &Context,
) -> Result<()> {
    let limit = args.longest(files, context)?;
    let sampling = sampling(args, files, context);
    let prompt = match args.interactive {
        true => longest_turn(args, sampling, limit).0,
        false => {
            let prompt = Prompt::read(args, tokenizer, context)?.tokens.len();
            args.require_room(prompt, limit)?;
            prompt
        }
    };
    let needs = match engine {
        Engine::Fast => {
            let options = options(args, sampling, (prompt, limit), context);
            fast::preview(args, files, (prompt, &options), context)?
        }
        Engine::Reference => reference::preview(args, files, (prompt, limit), context)?,
    };
    let models = [Some(&args.model), args.draft.as_ref()].into_iter().flatten().map(ModelPath::job_path);
    LoadPreview::new(models, engine.into(), needs, context)?.report(context)
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
