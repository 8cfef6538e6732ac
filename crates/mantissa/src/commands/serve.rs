//! `mantissa serve`: serves models over HTTP.

mod load;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::builder::TypedValueParser;
use mantissa_model::KvPolicy;
use mantissa_runtime::Speculation;
use mantissa_serve::{Cors, Keys, Limits, Options, Reasoning, Render, RenderError, Server, ShadowOptions};
use mantissa_store::{Paths, TextFile};
use serde::Serialize;
use serde_json::Value;

use super::adapter::AdapterArgs;
use super::model::ModelPath;
use super::render_chat::Renderer;
use super::run::Speculate;
use crate::context::Context;
use crate::error::BadInput;
use crate::interrupt;

/// Serve a model over HTTP, for clients of OpenAI's API
///
/// Requests run together: each step computes the next tokens of all of them. A sequence has the same tokens alone and
/// beside others. SIGTERM and Ctrl-C let requests at work finish for --drain seconds.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa serve demo
  mantissa serve path/to/model --parallel 16 --context 8192
  mantissa serve path/to/model.gguf --kv int8-head --api-key-file keys.txt
  mantissa serve path/to/model --also int4=path/to/model-int4
  mantissa serve path/to/int4 --also bf16=path/to/model --shadow bf16=0.05
  mantissa serve path/to/model --draft path/to/smaller")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// Dense or quantized. demo is the model inside the binary.
    model: ModelPath,
    /// Address to listen on
    ///
    /// Other addresses than loopback need --api-key-file.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), help_heading = "Server")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080, help_heading = "Server")]
    port: u16,
    /// Require a key of this file
    ///
    /// Lines of a key and, if wanted, a priority from 0, the default, to 9: each level doubles the share of the machine. # begins a
    /// comment.
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    api_key_file: Option<PathBuf>,
    /// Serve any address without keys
    #[arg(long, help_heading = "Server", hide_short_help = true)]
    no_api_key: bool,
    /// Let web pages of ORIGIN use the server
    ///
    /// SCHEME://HOST:PORT, localhost (pages of this machine, any port) or * (any page). May be given several times. Without it
    /// a browser keeps other pages out.
    #[arg(long, value_name = "ORIGIN", value_parser = origin, help_heading = "Server")]
    cors: Vec<String>,
    /// Seconds for requests to finish after SIGTERM
    ///
    /// Then the rest is cancelled.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 20,
        help_heading = "Server",
        hide_short_help = true
    )]
    drain: u64,
    /// Name of the model in requests [default: its file name]
    #[arg(long, value_name = "NAME", help_heading = "Models")]
    alias: Option<String>,
    /// Serve another model too, under NAME
    ///
    /// May be given several times. A request chooses by its field model; without it, MODEL answers.
    #[arg(long, value_name = "NAME=MODEL", value_parser = Also::parser(), help_heading = "Models")]
    also: Vec<Also>,
    /// Score a share of the answers again with the model NAME
    ///
    /// The KL per token of the other models against it is in /metrics. SHARE is a number from 0 to 1; scoring takes turns with
    /// answering.
    #[arg(long, value_name = "NAME=SHARE", value_parser = shadow, help_heading = "Models")]
    shadow: Option<(String, f64)>,
    /// KL in nats/token beyond which mantissa_shadow_alarm is 1
    #[arg(long, value_name = "KL", default_value_t = 0.1, help_heading = "Models", hide_short_help = true)]
    shadow_limit: f64,
    #[command(flatten, next_help_heading = "Models")]
    adapter: AdapterArgs,
    /// Sequences at work at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Limits")]
    parallel: u16,
    /// Longest sequence in tokens [default: up to 8192]
    ///
    /// Prompt and answer together; without the option, the context of the model or 8192, the smaller one. Memory for --parallel such sequences is planned at the start.
    #[arg(long, value_name = "TOKENS", help_heading = "Limits")]
    context: Option<usize>,
    /// Most tokens of a step, prompts included
    ///
    /// Fewer shorten the wait of other sequences while a long prompt is computed, at the cost of its speed.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(128..=8192), help_heading = "Limits", hide_short_help = true)]
    step_tokens: u32,
    /// Most new tokens of a request
    #[arg(long, value_name = "N", help_heading = "Limits")]
    max_tokens: Option<usize>,
    /// Most sequences that wait, by model
    ///
    /// Other requests are answered by 429 or 503 with Retry-After.
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Limits")]
    queue: usize,
    /// Seconds from the arrival of a request to its last token
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        help_heading = "Limits",
        hide_short_help = true
    )]
    time_limit: u64,
    /// Most connections at once
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Limits", hide_short_help = true)]
    connections: u32,
    /// Place of the thoughts of models that think
    ///
    /// A request's reasoning_format takes precedence.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = ReasoningFormat::Auto, help_heading = "Models", hide_short_help = true)]
    reasoning_format: ReasoningFormat,
    /// Most tokens of a thought [default: any number]
    ///
    /// Then the mark that ends it is generated. A request's reasoning_budget takes precedence.
    #[arg(long, value_name = "N", help_heading = "Limits", hide_short_help = true)]
    reasoning_budget: Option<usize>,
    /// Quantize the KV cache, such as int8-head
    ///
    /// As run --kv.
    #[arg(long, value_name = "SCHEME", help_heading = "Speed")]
    kv: Option<KvPolicy>,
    /// Smaller model that proposes tokens
    ///
    /// It has the same vocabulary. Changes no token, only the speed.
    #[arg(long, value_name = "MODEL", help_heading = "Speed")]
    draft: Option<ModelPath>,
    /// Source of proposed tokens
    ///
    /// As run --speculate.
    #[arg(long, value_enum, value_name = "SOURCE", default_value_t = Speculate::Lookup, help_heading = "Speed")]
    speculate: Speculate,
}

/// Place of thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ReasoningFormat {
    /// In reasoning_content, if the chat template has marks of thoughts
    Auto,
    /// In the text
    None,
}

/// Model with the name that requests choose it by.
#[derive(Clone, Debug)]
struct Also {
    name: String,
    model: ModelPath,
}

impl Also {
    /// Parser of `NAME=MODEL`.
    fn parser() -> impl TypedValueParser<Value = Self> {
        clap::builder::StringValueParser::new().try_map(|text: String| {
            let (name, path) = text
                .split_once('=')
                .filter(|(name, path)| !name.is_empty() && !path.is_empty())
                .ok_or("expected NAME=MODEL")?;
            let model = ModelPath::from_str(path).map_err(|error| error.to_string())?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Also { name: name.to_owned(), model })
        })
    }
}

/// Parses `NAME=SHARE`.
fn shadow(text: &str) -> Result<(String, f64), String> {
    let parsed = text.rsplit_once('=').and_then(|(name, share)| Some((name.to_owned(), share.parse().ok()?)));
    let parsed =
        parsed.filter(|(name, share): &(String, f64)| !name.is_empty() && *share > 0.0 && *share <= 1.0);
    parsed.ok_or_else(|| "expected NAME=SHARE with a share greater than 0 and at most 1".to_owned())
}

/// Checks an origin.
fn origin(text: &str) -> Result<String, String> {
    let origins = Cors::parse([text]).map(|_| text.to_owned());
    origins.map_err(|_| "expected SCHEME://HOST[:PORT], localhost or *".to_owned())
}

/// Result: what is served where.
#[derive(Serialize)]
struct Report<'a> {
    url: String,
    models: Vec<&'a str>,
    /// Peak of anonymous memory in bytes, predicted before loading.
    predicted_peak_memory: u64,
}

/// Renders chat templates in separate processes with limits.
struct Processes(Renderer);

impl Render for Processes {
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError> {
        let rendered = self.0.render(template, context);
        rendered.map_err(|error| RenderError::Failed(format!("{error:#}")))?.map_err(RenderError::Refused)
    }
}

/// Adds the paths that the command reads.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.also.iter().for_each(|also| also.model.paths(paths));
    args.draft.iter().for_each(|draft| draft.paths(paths));
    args.adapter.paths(paths);
    args.api_key_file.iter().for_each(|file| paths.read(file));
}

/// Runs the command until a signal.
///
/// # Errors
/// A model that cannot be run, an address that cannot be listened on, a key file that cannot be read.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let keys = args.api_key_file.as_deref().map(keys).transpose()?;
    if !args.host.is_loopback() && keys.is_none() && !args.no_api_key {
        let allowed = "a loopback address, or --api-key-file";
        let fix = "--no-api-key serves everyone who reaches the address";
        return Err(BadInput::new(format!("--host {}", args.host), "no keys", allowed).with_fix(fix).into());
    }
    // Before the model is loaded: an address in use is found at once.
    let listener = listen(args)?;
    let url = format!("http://{}", listener.local_addr()?);
    let loaded = load::load(args, context)?;
    let (predicted, memory) = (loaded.predicted, loaded.memory);
    let names: Vec<String> = loaded.models.iter().map(|model| model.name.clone()).collect();
    let server = server(args, loaded.models, keys, context)?;
    context.note(&memory);
    if args.model.is_embedded() {
        context.note("demo is a story model of 1.3 million parameters: it continues your text and answers no questions");
    }
    let models = names.iter().map(String::as_str).collect();
    let report = Report { url: url.clone(), models, predicted_peak_memory: predicted };
    context.report(&report, |out| writeln!(out, "{url} serves {}", names.join(", ")))?;
    Ok(interrupt::serving(|| server.run(listener, || interrupt::received().is_some()))?)
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
    context: &Context,
) -> Result<Server> {
    let longest = models.iter().map(|model| model.runtime.context).max().unwrap_or(0);
    let renderer = Processes(Renderer::new(args.model.named()));
    let mut server = Server::new(options(args, longest), Arc::new(renderer));
    if let Some(keys) = keys {
        server = server.with_keys(keys);
    }
    if let Ok(cors) = Cors::parse(args.cors.iter().map(String::as_str)) {
        server = server.with_cors(cors);
    }
    if context.prints_notes() {
        server = server.with_log(|line| {
            // A failure to write to standard error cannot be reported anywhere.
            let _ = writeln!(std::io::stderr().lock(), "{line}");
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
    Options { limits, queue: args.queue, drain: Duration::from_secs(args.drain), reasoning }
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

/// Source of proposed tokens of a session.
fn speculation(source: Speculate) -> Speculation {
    match source {
        Speculate::Lookup => Speculation::Lookup,
        Speculate::Off => Speculation::Off,
    }
}
