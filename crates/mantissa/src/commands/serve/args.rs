//! Arguments of `mantissa serve`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;
use clap::builder::TypedValueParser;
use mantissa_jobs::names::AsText;
use mantissa_jobs::{Serve, ServedModel, Shadow};
use mantissa_model::KvPolicy;
use mantissa_serve::Cors;

use crate::commands::adapter::AdapterArgs;
use crate::commands::model::ModelPath;
use crate::commands::speculate::Speculate;
use crate::output::parse_bytes;

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
    pub(super) model: ModelPath,
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
    /// Chat template of MODEL: a Jinja file, or a name
    ///
    /// As run --chat-template.
    #[arg(long, value_name = "NAME", help_heading = "Models")]
    chat_template: Option<String>,
    /// Refuse requests for models that are not served
    ///
    /// Without it, a single model answers whatever name a request has, and a header (x-mantissa-note) and the log say so.
    #[arg(long, help_heading = "Models", hide_short_help = true)]
    strict_model: bool,
    #[command(flatten, next_help_heading = "Models")]
    adapter: AdapterArgs,
    /// Sequences at work at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Limits")]
    parallel: u16,
    /// Longest sequence in tokens [default: up to 8192]
    ///
    /// Prompt and answer together; without the option, the context of the model or 8192, the smaller one. Memory for --parallel such sequences is planned at the start.
    #[arg(short, long, alias = "ctx-size", value_name = "TOKENS", help_heading = "Limits")]
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
    /// Most memory for grammars of constrained replies
    ///
    /// Schemas, regular expressions and grammars of requests are compiled in processes of their own, which share this memory.
    /// Without the option, 256 MiB or what --memory leaves. 0 constrains no replies.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, help_heading = "Limits", hide_short_help = true)]
    grammar_memory: Option<u64>,
    /// Let clients share the beginnings of their prompts
    ///
    /// Saves their computation, and lets clients see from cached_tokens and from the time of answers whether another one has
    /// sent the same beginning.
    #[arg(long, help_heading = "Speed", hide_short_help = true)]
    share_prefixes: bool,
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
    /// Say what would be loaded; serve nothing
    #[arg(long, help_heading = "Server")]
    pub(super) dry_run: bool,
    /// Source of proposed tokens
    ///
    /// As run --speculate.
    #[arg(long, value_enum, value_name = "FROM", num_args = 0..=1, default_missing_value = "lookup", default_value_t = Speculate::Lookup, help_heading = "Speed")]
    speculate: Speculate,
}

impl Args {
    /// Returns the job.
    pub(super) fn job(&self) -> Serve {
        let name = self.alias.clone().unwrap_or_else(|| file_name(self.model.typed()));
        let first = ServedModel { name, model: self.model.job_path().clone() };
        let also =
            |also: &Also| ServedModel { name: also.name.clone(), model: also.model.job_path().clone() };
        let limit = self.shadow_limit;
        let shadow = |(reference, share)| Shadow { reference, share, limit };
        Serve {
            models: std::iter::once(first).chain(self.also.iter().map(also)).collect(),
            adapter: self.adapter.named().map(Into::into),
            chat_template: self.chat_template.clone(),
            draft: self.draft.as_ref().map(|draft| draft.job_path().clone()),
            lookup: self.speculate == Speculate::Lookup,
            kv: self.kv.clone().map(AsText),
            host: self.host,
            port: self.port,
            api_key_file: self.api_key_file.clone(),
            no_api_key: self.no_api_key,
            cors: self.cors.clone(),
            shadow: self.shadow.clone().map(shadow),
            parallel: self.parallel,
            context: self.context,
            step_tokens: self.step_tokens,
            max_tokens: self.max_tokens,
            queue: self.queue,
            connections: self.connections,
            time_limit: self.time_limit,
            drain: self.drain,
            grammar_memory: self.grammar_memory,
            share_prefixes: self.share_prefixes,
            strict_model: self.strict_model,
            separate_thoughts: self.reasoning_format == ReasoningFormat::Auto,
            thought_tokens: self.reasoning_budget,
        }
    }
}

/// Last part of a path, as the name of a model.
fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
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
