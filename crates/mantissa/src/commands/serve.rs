//! `mantissa serve`: serves models over HTTP.

mod args;
mod grammars;

use std::io::Write;
use std::sync::Arc;

use anyhow::Result;
use mantissa_jobs::names::Engine;
use mantissa_jobs::{Job, ServeServices};
use mantissa_serve::{Render, RenderError};
use mantissa_store::Paths;
use serde_json::Value;

use super::execute::Execute;
use super::load_preview::LoadPreview;
use super::render_chat::Renderer;
use crate::context::Context;
use crate::help::Group;
use crate::terminal;

pub use self::args::Args;
pub use self::grammars::grammar_process;

/// Renders chat templates in separate processes with limits.
struct Processes(Renderer);

impl Render for Processes {
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError> {
        let rendered = self.0.render(template, context);
        rendered.map_err(|error| RenderError::Failed(format!("{error:#}")))?.map_err(RenderError::Refused)
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job().paths();
        Ok(())
    }

    /// Runs the command until a signal.
    ///
    /// # Errors
    /// A model that cannot be run, an address that cannot be listened on, a key file that cannot be read.
    fn run(&self, context: &Context) -> Result<()> {
        if self.dry_run {
            let job = self.job();
            let (needs, grammars) = job.preview(context)?;
            let models = job.models.iter().map(|served| &served.model).chain(&job.draft);
            let preview = LoadPreview::new(models, Engine::Fast, needs, context)?;
            return preview.with_grammars(grammars).report(context);
        }
        let log: fn(&str) = |line| terminal::to_stderr(line);
        let services = ServeServices {
            renderer: Arc::new(Processes(Renderer::new(self.model.named()))),
            grammars: Some(grammars::confinement()),
            log: context.prints_notes().then_some(log),
        };
        let server = self.job().prepare(services, context)?;
        let mut told = Ok(());
        server.run(context, |report| {
            let lines = |out: &mut dyn Write| {
                let url = &report.url;
                writeln!(out, "{url} serves {}", report.models.join(", "))?;
                writeln!(out, "page: {url}/")?;
                writeln!(out, "API:  {url}/v1 (OpenAI, Anthropic), {url} (Ollama, llama.cpp)")
            };
            told = context.report(report, lines);
            told.is_ok()
        })?;
        told
    }
}
