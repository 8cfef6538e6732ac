//! Server as a job.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mantissa_model::KvPolicy;
use mantissa_serve::grammar::Confinement;
use mantissa_serve::{Cors, Keys, Limits, Options, Reasoning, Render, RenderError, Server, ShadowOptions};
use mantissa_store::TextFile;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::load::{self, Loaded};
use crate::chat;
use crate::embedded;
use crate::error::{BadInput, InPlace, Result};
use crate::host::{Host, RenderChat};
use crate::job::{Job, JobOutput};
use crate::load_needs::LoadNeeds;
use crate::model::ModelPath;
use crate::names::AsText;

/// Serves models over HTTP until its host asks for a stop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serve {
    /// Models with the names that requests choose them by; the first one serves requests that name none.
    pub models: Vec<ServedModel>,
    /// Folder of an adapter of the first model, not merged.
    pub adapter: Option<PathBuf>,
    /// Chat template of the first model instead of its own: a name or a file.
    #[serde(default)]
    pub chat_template: Option<String>,
    /// Smaller model that proposes tokens for the first one.
    pub draft: Option<ModelPath>,
    /// True if earlier places of the text propose tokens.
    pub lookup: bool,
    /// Policy of the KV cache, if other than the models' own.
    pub kv: Option<AsText<KvPolicy>>,
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 for a free one.
    pub port: u16,
    /// File of the keys that clients need. The keys themselves are no part of the job.
    pub api_key_file: Option<PathBuf>,
    /// True if any address is served without keys.
    pub no_api_key: bool,
    /// Origins of web pages that may use the server.
    pub cors: Vec<String>,
    /// Share of the answers that a reference scores again.
    pub shadow: Option<Shadow>,
    /// Sequences at work at once.
    pub parallel: u16,
    /// Longest sequence in tokens.
    pub context: Option<usize>,
    /// Most tokens of a step, prompts included.
    pub step_tokens: u32,
    /// Most new tokens of a request.
    pub max_tokens: Option<usize>,
    /// Most sequences that wait, by model.
    pub queue: usize,
    /// Most connections at once.
    pub connections: u32,
    /// Seconds from the arrival of a request to its last token.
    pub time_limit: u64,
    /// Seconds for requests to finish after a stop was asked for.
    pub drain: u64,
    /// Most memory for grammars of constrained replies, in bytes.
    pub grammar_memory: Option<u64>,
    /// True if clients share the beginnings of their prompts.
    pub share_prefixes: bool,
    /// True if a request for a model that is not served is refused also where a single model could answer it.
    #[serde(default)]
    pub strict_model: bool,
    /// True if thoughts are separated from the text.
    pub separate_thoughts: bool,
    /// Most tokens of a thought.
    pub thought_tokens: Option<usize>,
}

/// Model that is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedModel {
    /// Name in requests.
    pub name: String,
    /// Model.
    pub model: ModelPath,
}

/// Comparison of the served models with one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shadow {
    /// Name of the model that is the reference.
    pub reference: String,
    /// Share of the sequences of the other models that it scores, greater than 0 and at most 1.
    pub share: f64,
    /// KL beyond which the alarm is raised, nats/token.
    pub limit: f64,
}

/// Services that a server uses beside those of its host.
pub struct ServeServices {
    /// Renders chat templates.
    pub renderer: Arc<dyn Render>,
    /// Place where grammars are held; without one no reply is constrained.
    pub grammars: Option<Confinement>,
    /// Takes a line for each request.
    pub log: Option<fn(&str)>,
}

impl ServeServices {
    /// Returns the services of a host for the templates of `model`: no grammars and no log.
    ///
    /// # Errors
    /// A host that renders no chat templates.
    fn of(host: &Host, model: &Path) -> Result<Self> {
        host.chat(model)?;
        let renderer = Arc::new(HostRenderer { chat: host.shared_chat(), model: model.to_owned() });
        Ok(ServeServices { renderer, grammars: None, log: None })
    }
}

/// Renders chat templates by the host.
struct HostRenderer {
    chat: Option<Arc<dyn RenderChat>>,
    /// Name of the model in messages.
    model: PathBuf,
}

impl Render for HostRenderer {
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError> {
        let failed = |what: String| RenderError::Failed(what);
        let chat = self.chat.as_deref().ok_or_else(|| failed("no renderer".to_owned()))?;
        let rendered = chat.render_each(&self.model, template, std::slice::from_ref(context));
        let text = rendered.map_err(|error| failed(error.to_string()))?.pop();
        text.ok_or_else(|| failed("expected a text, got none".to_owned()))?.map_err(RenderError::Refused)
    }
}

/// What is served where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServeReport {
    /// Address.
    pub url: String,
    /// Names of the models.
    pub models: Vec<String>,
    /// Peak of anonymous memory in bytes, predicted before loading.
    pub predicted_peak_memory: u64,
    /// Most memory in bytes of the processes that hold grammars, beside it.
    pub grammar_memory: u64,
}

/// Server that listens, with all models loaded.
pub struct PreparedServe {
    server: Server,
    listener: TcpListener,
    /// What is served where.
    pub report: ServeReport,
}

impl Serve {
    /// Reads the keys, binds the address and loads the models.
    ///
    /// # Errors
    /// A model that cannot be run, an address that cannot be listened on, a key file that cannot be read.
    pub fn prepare(&self, services: ServeServices, host: &Host) -> Result<PreparedServe> {
        let keys = self.api_key_file.as_deref().map(keys).transpose()?;
        if !self.host.is_loopback() && keys.is_none() && !self.no_api_key {
            let allowed = "a loopback address, or --api-key-file";
            let fix = "--no-api-key serves everyone who reaches the address";
            return Err(BadInput::new(format!("--host {}", self.host), "no keys", allowed)
                .with_fix(fix)
                .into());
        }
        // Before the model is loaded: an address in use is found at once.
        let listener = self.listen()?;
        let url = format!("http://{}", listener.local_addr()?);
        let Loaded { models, predicted, memory, grammar_memory } = load::load(self, host)?;
        let names = models.iter().map(|model| model.name.clone()).collect();
        let server = self.server(models, keys, grammar_memory, services)?;
        host.note(&memory);
        if self.models.first().is_some_and(|first| first.model.is_embedded()) {
            host.note(embedded::ABOUT);
        }
        let report = ServeReport { url, models: names, predicted_peak_memory: predicted, grammar_memory };
        Ok(PreparedServe { server, listener, report })
    }

    /// Predicts what [`prepare`](Self::prepare) would load, and the most memory of the processes that hold grammars in
    /// bytes. Binds no address and loads no weights.
    ///
    /// # Errors
    /// A model that cannot be run; too little memory.
    pub fn preview(&self, host: &Host) -> Result<(LoadNeeds, u64)> {
        load::preview(self, host)
    }

    fn listen(&self) -> Result<TcpListener> {
        let what = format!("--host {} --port {}: cannot listen", self.host, self.port);
        // The reason stands before the fix.
        let fixed = |error: std::io::Error| {
            std::io::Error::new(error.kind(), format!("{error}; fix: choose another --port"))
        };
        TcpListener::bind(SocketAddr::new(self.host, self.port)).map_err(fixed).at(what)
    }

    /// Makes the server of loaded models.
    fn server(
        &self,
        models: Vec<mantissa_serve::Loaded>,
        keys: Option<Keys>,
        grammar_memory: u64,
        services: ServeServices,
    ) -> Result<Server> {
        let ServeServices { renderer, grammars, log } = services;
        let longest = models.iter().map(|model| model.runtime.context).max().unwrap_or(0);
        let grammars = grammars.filter(|_| grammar_memory > 0);
        let mut server = Server::new(Options { grammars, grammar_memory, ..self.options(longest) }, renderer);
        if let Some(keys) = keys {
            server = server.with_keys(keys);
        }
        if let Ok(cors) = Cors::parse(self.cors.iter().map(String::as_str)) {
            server = server.with_cors(cors);
        }
        if let Some(log) = log {
            server = server.with_log(log);
        }
        for model in models {
            server.add(model)?;
        }
        if let Some(Shadow { reference, share, limit }) = self.shadow.clone() {
            server.shadow(&ShadowOptions { reference, share, limit })?;
        }
        Ok(server)
    }

    /// Makes the settings of a server for sequences of up to `context` tokens.
    fn options(&self, context: usize) -> Options {
        let limits = Limits {
            // A token has few bytes, of which JSON may escape each into six.
            body: (1 << 20) + 64 * context,
            connections: self.connections as usize,
            new_tokens: self.max_tokens.unwrap_or(usize::MAX),
            time: Duration::from_secs(self.time_limit),
            ..Limits::default()
        };
        Options {
            limits,
            queue: self.queue,
            drain: Duration::from_secs(self.drain),
            reasoning: Reasoning { separate: self.separate_thoughts, budget: self.thought_tokens },
            share_prefixes: self.share_prefixes,
            strict_model: self.strict_model,
            ..Options::default()
        }
    }
}

impl PreparedServe {
    /// Answers requests until the host asks for a stop. Tells `announce` when a stop is orderly from now on; nothing is
    /// served if it returns false.
    ///
    /// # Errors
    /// The system allows no threads or the listener fails.
    pub fn run(self, host: &Host, announce: impl FnOnce(&ServeReport) -> bool) -> Result<()> {
        let PreparedServe { server, listener, report } = self;
        Ok(host.until_stopped(|stops| if announce(&report) { server.run(listener, stops) } else { Ok(()) })?)
    }
}

impl Job for Serve {
    const NAME: &'static str = "serve";
    const VERSION: u32 = 1;
    type Report = ServeReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let models = self.models.iter().map(|served| &served.model).chain(&self.draft);
        let files = models.flat_map(ModelPath::inputs).chain(self.adapter.clone());
        let template = chat::template_file(self.chat_template.as_deref());
        files.chain(template).chain(self.api_key_file.clone()).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        load::memory(self, host)
    }

    /// Serves until the host asks for a stop, without grammars.
    ///
    /// # Errors
    /// As [`Serve::prepare`] and [`PreparedServe::run`].
    fn run(&self, host: &Host) -> Result<ServeReport> {
        let named = self.models.first().map_or(Path::new(""), |first| first.model.named());
        let prepared = self.prepare(ServeServices::of(host, named)?, host)?;
        let report = prepared.report.clone();
        prepared.run(host, |_| true)?;
        Ok(report)
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
