//! Accepts connections until the server is asked to stop, then drains.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fmt, io};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use mantissa_model::{LoadError, SamplingDefaults, Tokenizer};
use mantissa_runtime::{FastModel, RuntimeOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;

use super::cors::Cors;
use super::io::Timed;
use super::keys::Keys;
use super::middleware::{Access, Peer, admit, observe};
use crate::api::{ApiError, App, Render, ollama_errors, routes};
use crate::artifact::Artifact;
use crate::engine::{Engine, EngineOptions, Failure, Turns};
use crate::metrics::Metrics;
use crate::options::{Limits, Options};
use crate::shadow::{Compared, Shadow, ShadowOptions};

/// Time between two looks at whether the server is asked to stop.
const LOOK: Duration = Duration::from_millis(20);

/// Time for responses to be written after the last job has ended.
const LAST_WRITES: Duration = Duration::from_secs(1);

/// Time between two looks at unused grammars.
const EXPIRES: Duration = Duration::from_secs(5);

/// Largest buffer of a connection.
const BUFFER: usize = 64 << 10;

/// Largest headers that are read: those beyond get a 431 without a body.
const MOST_HEADERS: usize = 48 << 10;

/// Most headers of a request.
const HEADERS: usize = 100;

/// Tokens of a prompt for which a client's part of the queue has room in any case.
const JOB_TOKENS: usize = 256;

/// Connections that are told at a time that there are too many.
const REFUSALS: usize = 64;

/// A model to be served.
#[derive(Debug)]
pub struct Loaded {
    /// Name in requests and metrics.
    pub name: String,
    /// Tokenizer and chat template.
    pub tokenizer: Tokenizer,
    /// Weights.
    pub model: FastModel,
    /// Format of the weights' files: `gguf` or `safetensors`.
    pub format: &'static str,
    /// File type of a GGUF file as llama.cpp names it, such as `Q4_K_M`.
    pub file_type: Option<String>,
    /// Smaller model that proposes tokens.
    pub draft: Option<FastModel>,
    /// Scheme of the KV cache.
    pub kv: String,
    /// Sampling that the model recommends, for what a request does not set.
    pub sampling: SamplingDefaults,
    /// Sizes of the session.
    pub runtime: RuntimeOptions,
}

/// A server of one or more models.
pub struct Server {
    options: Options,
    renderer: Arc<dyn Render>,
    keys: Option<Keys>,
    cors: Cors,
    log: Arc<dyn Fn(&str) + Send + Sync>,
    metrics: Metrics,
    turns: Arc<Turns>,
    artifacts: Vec<Arc<Artifact>>,
    shadow: Option<Shadow>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("options", &self.options).field("artifacts", &self.artifacts).finish()
    }
}

impl Server {
    /// Creates a server without models, keys or a log.
    pub fn new(options: Options, renderer: Arc<dyn Render>) -> Self {
        Server {
            options,
            renderer,
            keys: None,
            cors: Cors::default(),
            log: Arc::new(|_| {}),
            metrics: Metrics::new(),
            turns: Arc::default(),
            artifacts: Vec::new(),
            shadow: None,
        }
    }

    /// Serves only callers with one of these keys.
    #[must_use]
    pub fn with_keys(self, keys: Keys) -> Self {
        Server { keys: Some(keys), ..self }
    }

    /// Lets web pages of other origins use the server.
    #[must_use]
    pub fn with_cors(self, cors: Cors) -> Self {
        Server { cors, ..self }
    }

    /// Writes a line for each request: method, path, status and time.
    #[must_use]
    pub fn with_log(self, log: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Server { log: Arc::new(log), ..self }
    }

    /// Adds a model and starts its engine. The first one serves requests that name none.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn add(&mut self, loaded: Loaded) -> Result<(), LoadError> {
        let Loaded { name, tokenizer, model, format, file_type, draft, kv, sampling, runtime } = loaded;
        let (model, draft) = (Arc::new(model), draft.map(Arc::new));
        let clients = self.keys.as_ref().map_or(1, Keys::len);
        let queue = self.options.queue;
        // One client of several leaves room for the others.
        let client_queue = if clients > 1 { queue.div_ceil(2) } else { queue };
        let options = EngineOptions {
            runtime,
            queue,
            client_queue,
            // As much as all sequences at work hold, and enough for short prompts.
            client_tokens: (runtime.sequences * runtime.context).max(client_queue * JOB_TOKENS),
            share_prefixes: self.options.share_prefixes,
            turns: Arc::clone(&self.turns),
            metrics: self.metrics.engine(&name),
        };
        let engine = Engine::start(Arc::clone(&model), draft, options)?;
        let artifact = Artifact { name, tokenizer, model, format, file_type, kv, sampling, engine };
        artifact.state_precision(&self.metrics);
        self.artifacts.push(Arc::new(artifact));
        Ok(())
    }

    /// Compares answers of the models added so far with the answers of the reference, which is one of them.
    ///
    /// # Errors
    /// [`LoadError::Shape`] if a vocabulary differs from the reference's, [`LoadError::Memory`]; does nothing if there
    /// is no model of that name.
    pub fn shadow(&mut self, options: &ShadowOptions) -> Result<(), LoadError> {
        let is_reference = |artifact: &&Arc<Artifact>| artifact.name == options.reference;
        let Some(reference) = self.artifacts.iter().find(is_reference) else { return Ok(()) };
        let others = || self.artifacts.iter().filter(|artifact| !is_reference(artifact));
        let compared = others().map(|artifact| Compared {
            name: artifact.name.clone(),
            model: Arc::clone(&artifact.model),
            metrics: self.metrics.shadow(&artifact.name),
        });
        let context = self.artifacts.iter().map(|artifact| artifact.engine.runtime().context).max();
        let (turns, log) = (Arc::clone(&self.turns), Arc::clone(&self.log));
        let model = Arc::clone(&reference.model);
        let shadow = Shadow::start(options, model, compared.collect(), context.unwrap_or(1), turns, log)?;
        for artifact in others() {
            if let Some(tap) = shadow.taps.get(&artifact.name) {
                artifact.engine.tap(Arc::clone(tap));
            }
        }
        self.shadow = Some(shadow);
        Ok(())
    }

    /// Turns in which the engines run their passes.
    pub fn turns(&self) -> Arc<Turns> {
        Arc::clone(&self.turns)
    }

    /// Serves connections of `listener` until `stop` returns true; then takes no others, lets jobs finish for the time
    /// of the options, cancels the rest and returns. `stop` is called every 20 ms.
    ///
    /// # Errors
    /// The system allows no threads or the listener fails.
    pub fn run(self, listener: TcpListener, stop: impl Fn() -> bool) -> io::Result<()> {
        let Options { limits, drain, .. } = self.options.clone();
        let loopback = listener.local_addr()?.ip().is_loopback();
        let app = Arc::new(App::new(
            self.artifacts,
            self.renderer,
            self.options,
            self.metrics,
            Arc::clone(&self.turns),
        ));
        app.prepare_grammars();
        let access =
            Access { app: Arc::clone(&app), keys: self.keys, cors: self.cors, loopback, log: self.log };
        let router = router(Arc::new(access));
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()?;
        let served = runtime.block_on(async {
            let (close, closing) = watch::channel(Closing::Nothing);
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let accepting = tokio::spawn(accept(listener, router, Arc::clone(&app), limits, closing));
            let expiring = tokio::spawn(expire_grammars(Arc::clone(&app)));
            while !stop() && !accepting.is_finished() {
                tokio::time::sleep(LOOK).await;
            }
            expiring.abort();
            app.stopping.store(true, Ordering::Relaxed);
            app.artifacts.iter().for_each(|artifact| artifact.engine.drain());
            // Connections end after the response at work; new ones are told that the server stops.
            let _ = close.send(Closing::Requests);
            let asked = Instant::now();
            let idle = || app.artifacts.iter().all(|artifact| artifact.engine.is_idle());
            while !idle() && asked.elapsed() < drain {
                tokio::time::sleep(LOOK).await;
            }
            app.artifacts.iter().for_each(|artifact| artifact.engine.cancel_all());
            let _ = close.send(Closing::Listener);
            match tokio::time::timeout(LAST_WRITES, accepting).await {
                Ok(Ok(result)) => result,
                _ => Ok(()),
            }
        });
        runtime.shutdown_timeout(LAST_WRITES);
        drop(self.shadow);
        served
    }
}

/// Part of a server that is closed when it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    Nothing,
    /// Connections after their response at work. New ones are accepted, so that `/health` is answered.
    Requests,
    /// The listener too.
    Listener,
}

/// Makes the routes with the checks around them.
fn router(access: Arc<Access>) -> Router {
    let app = Arc::clone(&access.app);
    routes()
        .layer(CatchPanicLayer::custom(|_| ApiError::failed(&Failure::Panicked).into_response()))
        .layer(from_fn_with_state(Arc::clone(&access), admit))
        .layer(from_fn(ollama_errors))
        .layer(from_fn_with_state(access, observe))
        .with_state(app)
}

/// Ends the processes of grammars that nobody uses any more.
async fn expire_grammars(app: Arc<App>) {
    loop {
        tokio::time::sleep(EXPIRES).await;
        let own = Arc::clone(&app);
        let expire = move || own.grammars.iter().for_each(|grammars| grammars.expire());
        let _ = tokio::task::spawn_blocking(expire).await;
    }
}

/// Accepts connections until `closing`, and returns when the last one has ended.
async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    app: Arc<App>,
    limits: Limits,
    mut closing: watch::Receiver<Closing>,
) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(limits.connections));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.wait_for(|closing| *closing == Closing::Listener) => break,
        };
        // No descriptors are left, or the client has gone: others may do better.
        let Ok((stream, address)) = accepted else {
            tokio::time::sleep(LOOK).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            app.metrics.refused("connections");
            if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(LAST_WRITES, refuse(stream)).await;
                    drop(permit);
                });
            }
            continue;
        };
        // Tokens are sent as they come.
        let _ = stream.set_nodelay(true);
        let (router, limits, closing) = (router.clone(), limits.clone(), closing.clone());
        let connections = app.metrics.connections.clone();
        tokio::spawn(async move {
            connections.inc();
            connection(stream, Peer(address.ip()), router, &limits, closing).await;
            connections.dec();
            drop(place);
        });
    }
    drop(listener);
    // All places are free when the last connection has ended.
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    let _ = places.acquire_many(all).await;
    Ok(())
}

/// Tells a client that there are too many connections.
async fn refuse(mut stream: TcpStream) -> io::Result<()> {
    const BODY: &str = r#"{"error":{"message":"too many connections","type":"overloaded_error","param":null,"code":"too_many_connections"}}"#;
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n",
        BODY.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(BODY.as_bytes()).await?;
    stream.shutdown().await?;
    // A reset before the client has read would lose the answer.
    let mut unread = [0; 1024];
    while stream.read(&mut unread).await? > 0 {}
    Ok(())
}

/// Serves one connection.
async fn connection(
    stream: TcpStream,
    peer: Peer,
    router: Router,
    limits: &Limits,
    mut closing: watch::Receiver<Closing>,
) {
    let later = *closing.borrow() != Closing::Nothing;
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        router.clone().oneshot(request)
    });
    let io = TokioIo::new(Timed::new(stream, limits.write_time));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_buf_size(BUFFER)
        .max_header_size(MOST_HEADERS)
        .max_headers(HEADERS)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // What is wrong with a connection is its client's business.
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closing| *closing != Closing::Nothing) => {}
    }
    // A connection that came later still has its first request.
    if later && tokio::time::timeout(LAST_WRITES, connection.as_mut()).await.is_ok() {
        return;
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

impl Artifact {
    /// States the formats and kernels of the linear layers by phase.
    fn state_precision(&self, metrics: &Metrics) {
        let mut counts = std::collections::BTreeMap::new();
        for linear in self.model.linears() {
            let choice = linear.choice();
            for (phase, kernel) in [("decode", choice.kernel), ("prefill", choice.prefill)] {
                *counts.entry((phase, choice.format.clone(), kernel)).or_insert(0) += 1;
            }
        }
        for ((phase, format, kernel), layers) in counts {
            metrics.precision(&self.name, phase, &format, &kernel, layers);
        }
    }
}
