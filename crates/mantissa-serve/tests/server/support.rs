//! Starts servers of the model `demo` and speaks HTTP with them, byte by byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mantissa_model::{SamplingDefaults, Tokenizer, chat};
use mantissa_runtime::{FastModel, RuntimeOptions};
use mantissa_serve::grammar::Confinement;
use mantissa_serve::{Cors, Keys, Loaded, Options, Render, RenderError, Server, Turns};
use mantissa_store::convention::ModelFiles;
use serde_json::Value;

/// Longest time for anything in these tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Renders templates in this process: the template of `demo` is trusted.
struct Here;

impl Render for Here {
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError> {
        chat::render(template, context).map_err(|error| RenderError::Refused(error.to_string()))
    }
}

/// Folder of the model `demo`.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/demo/model")
}

/// Settings of a server under test.
pub struct Setup {
    pub options: Options,
    pub runtime: RuntimeOptions,
    pub keys: Option<&'static str>,
    pub names: &'static [&'static str],
    /// Origins whose pages may use the server.
    pub cors: &'static [&'static str],
    /// Chat template instead of the model's.
    pub template: Option<&'static str>,
    /// Sampling that the model recommends.
    pub sampling: SamplingDefaults,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            options: Options { drain: Duration::from_secs(5), ..Options::default() },
            runtime: RuntimeOptions::batch(4, 256),
            keys: None,
            names: &["demo"],
            cors: &[],
            template: None,
            sampling: SamplingDefaults::default(),
        }
    }
}

/// A server at work.
pub struct Running {
    pub address: SocketAddr,
    /// Holding a turn stops the engine before its next step.
    pub turns: Arc<Turns>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// Starts a server.
pub fn start(setup: Setup) -> Running {
    let files = ModelFiles::open(&demo()).unwrap();
    let cors = Cors::parse(setup.cors.iter().copied()).unwrap();
    // The grammars of these tests are trusted; the hostile ones have a target of their own.
    let options = Options { grammars: Some(Confinement::threads()), ..setup.options };
    let mut server = Server::new(options, Arc::new(Here)).with_cors(cors);
    if let Some(keys) = setup.keys {
        server = server.with_keys(Keys::parse(keys).unwrap());
    }
    for name in setup.names {
        let loaded = Loaded {
            name: (*name).to_owned(),
            tokenizer: tokenizer(setup.template),
            model: FastModel::load(&files, 1).unwrap(),
            format: "safetensors",
            file_type: None,
            draft: None,
            kv: "f16".into(),
            sampling: setup.sampling,
            runtime: setup.runtime,
        };
        server.add(loaded).unwrap();
    }
    let turns = server.turns();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let thread = std::thread::spawn(move || server.run(listener, || flag.load(Ordering::Relaxed)));
    Running { address, turns, stop, thread: Some(thread) }
}

/// Tokenizer of `demo`, with another chat template if there is one.
fn tokenizer(template: Option<&str>) -> Tokenizer {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let tokenizer = Tokenizer::load(&demo()).unwrap();
    let Some(template) = template else { return tokenizer };
    let name = format!("mantissa-serve-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let tokenizer = tokenizer.with_templates_of(&folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    tokenizer
}

/// Starts a server with default settings.
pub fn plain() -> Running {
    start(Setup::default())
}

/// Response of a server.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    /// Values of the events of a stream, without the last one; checks that it is `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let data: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let (last, events) = data.split_last().unwrap();
        assert_eq!(*last, "[DONE]", "{text}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Checks an error in the shape of the API; returns its message.
    #[track_caller]
    pub fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        let json = self.json();
        assert!(json["error"]["type"].is_string(), "{json}");
        json["error"]["message"].as_str().unwrap().to_owned()
    }
}

impl Running {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes and returns the response.
    pub fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // The server may answer and close before it has read all.
        let _ = stream.write_all(bytes);
        read(&mut stream)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.raw(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes())
    }

    pub fn post(&self, path: &str, body: &str) -> Reply {
        self.raw(&request(path, body, ""))
    }

    pub fn post_as(&self, key: &str, path: &str, body: &str) -> Reply {
        self.raw(&request(path, body, &format!("authorization: Bearer {key}\r\n")))
    }

    /// Posts JSON, which must succeed.
    #[track_caller]
    pub fn json(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Value of a metric without labels other than the model.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(&format!("mantissa_{name}{{")));
        let line = line.or_else(|| text.lines().find(|line| line.starts_with(&format!("mantissa_{name} "))));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{name}: {text}"))
    }

    /// Waits until `true_now`.
    #[track_caller]
    pub fn wait_for(&self, what: &str, true_now: impl Fn() -> bool) {
        let begin = Instant::now();
        while !true_now() {
            assert!(begin.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks the server to stop.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the end of the server.
    pub fn join(mut self) {
        self.stop();
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Makes a request with a JSON body.
pub fn request(path: &str, body: &str, headers: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Reads a response up to the end of the connection.
pub fn read(stream: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    // A reset after the response is an end too.
    let _ = stream.read_to_end(&mut bytes);
    parse(&bytes)
}

/// Takes a response apart.
pub fn parse(bytes: &[u8]) -> Reply {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no response: {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = bytes[end + 4..].to_vec();
    if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body);
    }
    Reply { status, head, body }
}

/// Joins the chunks of a body, as far as they came.
fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(at) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..at]).unwrap(), 16).unwrap();
        let chunk = &bytes[at + 2..];
        if size == 0 || chunk.len() < size + 2 {
            break;
        }
        body.extend_from_slice(&chunk[..size]);
        bytes = &chunk[size + 2..];
    }
    body
}
