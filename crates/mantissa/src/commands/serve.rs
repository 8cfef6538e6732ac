//! `mantissa serve`: serves models over HTTP.

mod args;
mod grammars;
mod load;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use mantissa_serve::{Cors, Keys, Limits, Options, Reasoning, Render, RenderError, Server, ShadowOptions};
use mantissa_store::{Paths, TextFile};
use serde::Serialize;
use serde_json::Value;

use self::args::ReasoningFormat;
use super::execute::Execute;
use super::render_chat::Renderer;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::interrupt;
use crate::terminal;

pub use self::args::Args;
pub use self::grammars::grammar_process;

/// Result: what is served where.
#[derive(Serialize)]
struct Report<'a> {
    url: String,
    models: Vec<&'a str>,
    /// Peak of anonymous memory in bytes, predicted before loading.
    predicted_peak_memory: u64,
    /// Most memory in bytes of the processes that hold grammars, beside it.
    grammar_memory: u64,
}

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
        self.model.paths(paths);
        self.also.iter().for_each(|also| also.model.paths(paths));
        self.draft.iter().for_each(|draft| draft.paths(paths));
        self.adapter.paths(paths);
        self.api_key_file.iter().for_each(|file| paths.read(file));
        Ok(())
    }

    /// Runs the command until a signal.
    ///
    /// # Errors
    /// A model that cannot be run, an address that cannot be listened on, a key file that cannot be read.
    fn run(&self, context: &Context) -> Result<()> {
        let keys = self.api_key_file.as_deref().map(keys).transpose()?;
        if !self.host.is_loopback() && keys.is_none() && !self.no_api_key {
            let allowed = "a loopback address, or --api-key-file";
            let fix = "--no-api-key serves everyone who reaches the address";
            return Err(BadInput::new(format!("--host {}", self.host), "no keys", allowed)
                .with_fix(fix)
                .into());
        }
        // Before the model is loaded: an address in use is found at once.
        let listener = listen(self)?;
        let url = format!("http://{}", listener.local_addr()?);
        let loaded = load::load(self, context)?;
        let (predicted, memory, grammar_memory) = (loaded.predicted, loaded.memory, loaded.grammar_memory);
        let names: Vec<String> = loaded.models.iter().map(|model| model.name.clone()).collect();
        let server = server(self, loaded.models, keys, grammar_memory, context)?;
        context.note(&memory);
        if self.model.is_embedded() {
            context.note("demo is a story model of 1.3 million parameters: it continues your text and answers no questions");
        }
        let models = names.iter().map(String::as_str).collect();
        let report = Report { url: url.clone(), models, predicted_peak_memory: predicted, grammar_memory };
        context.report(&report, |out| writeln!(out, "{url} serves {}", names.join(", ")))?;
        Ok(interrupt::serving(|| server.run(listener, || interrupt::received().is_some()))?)
    }
}

/// Binds the address.
fn listen(args: &Args) -> Result<TcpListener> {
    let address = SocketAddr::new(args.host, args.port);
    TcpListener::bind(address).map_err(|error| {
        let what = format!("--host {} --port {}: cannot listen", args.host, args.port);
        anyhow::Error::from(error).context(format!("{what}; fix: choose another --port"))
    })
}

/// Makes the server of loaded models.
fn server(
    args: &Args,
    models: Vec<mantissa_serve::Loaded>,
    keys: Option<Keys>,
    grammar_memory: u64,
    context: &Context,
) -> Result<Server> {
    let longest = models.iter().map(|model| model.runtime.context).max().unwrap_or(0);
    let renderer = Processes(Renderer::new(args.model.named()));
    let options = Options {
        grammars: (grammar_memory > 0).then(grammars::confinement),
        grammar_memory,
        ..options(args, longest)
    };
    let mut server = Server::new(options, Arc::new(renderer));
    if let Some(keys) = keys {
        server = server.with_keys(keys);
    }
    if let Ok(cors) = Cors::parse(args.cors.iter().map(String::as_str)) {
        server = server.with_cors(cors);
    }
    if context.prints_notes() {
        server = server.with_log(|line| {
            terminal::to_stderr(line);
        });
    }
    for model in models {
        server.add(model)?;
    }
    if let Some((reference, share)) = &args.shadow {
        let (reference, share, limit) = (reference.clone(), *share, args.shadow_limit);
        server.shadow(&ShadowOptions { reference, share, limit })?;
    }
    Ok(server)
}

/// Makes the settings of a server for sequences of up to `context` tokens.
fn options(args: &Args, context: usize) -> Options {
    let limits = Limits {
        // A token has few bytes, of which JSON may escape each into six.
        body: (1 << 20) + 64 * context,
        connections: args.connections as usize,
        new_tokens: args.max_tokens.unwrap_or(usize::MAX),
        time: Duration::from_secs(args.time_limit),
        ..Limits::default()
    };
    let separate = args.reasoning_format == ReasoningFormat::Auto;
    let reasoning = Reasoning { separate, budget: args.reasoning_budget };
    let drain = Duration::from_secs(args.drain);
    Options {
        limits,
        queue: args.queue,
        drain,
        reasoning,
        share_prefixes: args.share_prefixes,
        ..Options::default()
    }
}

/// Reads a key file.
fn keys(path: &Path) -> Result<Keys> {
    const MOST: u64 = 1 << 20;
    let shown = path.display().to_string();
    let text = TextFile::open(path)?.whole(MOST)?;
    let text = text.ok_or_else(|| {
        BadInput::new(&shown, "more", format!("at most {MOST} bytes of lines KEY [PRIORITY]"))
    })?;
    Keys::parse(&text).map_err(|error| {
        BadInput::new(format!("{shown}: line {}", error.line), error.found, error.expected).into()
    })
}
