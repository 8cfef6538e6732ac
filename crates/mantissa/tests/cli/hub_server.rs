//! A server on this machine that answers as the Hugging Face hub does, with a second one for large files.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use mantissa_store::FileDigest;
use serde_json::json;
use sha1::{Digest, Sha1};

/// Commit of every model.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Request as the server read it.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path with query.
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Answer.
#[derive(Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Number of bytes of the body after which the connection ends, or, with `stalls`, hangs.
    pub cut: Option<usize>,
    pub stalls: bool,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Reply { status, ..Reply::default() }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        Reply { body: body.into(), ..self }
    }
}

/// Answers a request, or leaves it to the hub.
type Handler = dyn Fn(&Request) -> Option<Reply> + Send + Sync;

/// Server on a port of its own, until the test ends.
#[derive(Clone)]
pub struct Server {
    pub address: SocketAddr,
    /// Requests so far.
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen) = (Arc::new(answer), Arc::clone(&requests));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, seen) = (Arc::clone(&answer), Arc::clone(&seen));
                thread::spawn(move || {
                    if let Some(request) = read(&stream) {
                        seen.lock().unwrap().push(request.clone());
                        // The client may have ended.
                        let _ = write(stream, &request, &answer(&request));
                    }
                });
            }
        });
        Server { address, requests }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    Some(Request { method, path, headers })
}

fn write(mut stream: TcpStream, request: &Request, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} x\r\nContent-Length: {}\r\n", reply.status, reply.body.len());
    reply.headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    stream.write_all(&reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())])?;
    if reply.stalls {
        // Until the client goes.
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let _ = stream.read(&mut [0]);
    }
    Ok(())
}

/// File of a model.
#[derive(Clone)]
pub struct File {
    pub name: String,
    pub bytes: Vec<u8>,
    /// True for a file that another server holds.
    pub large: bool,
}

impl File {
    pub fn small(name: &str, bytes: impl Into<Vec<u8>>) -> Self {
        File { name: name.to_owned(), bytes: bytes.into(), large: false }
    }

    pub fn large(name: &str, bytes: impl Into<Vec<u8>>) -> Self {
        File { large: true, ..File::small(name, bytes) }
    }

    /// The hash that names the file.
    pub fn hash(&self) -> String {
        if self.large {
            return FileDigest::of(&self.bytes).hex();
        }
        let digest = Sha1::new_with_prefix(format!("blob {}\0", self.bytes.len()))
            .chain_update(&self.bytes)
            .finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Hub with one model, `org/m`, and the server of its large files.
pub struct Hub {
    pub hub: Server,
    pub files_server: Server,
}

impl Hub {
    /// Starts both; `on_hub` and `on_files` may answer otherwise than a hub in order.
    pub fn start(files: Vec<File>, on_hub: Box<Handler>, on_files: Box<Handler>) -> Self {
        let large = files.clone();
        let files_server = Server::start(move |request| {
            on_files(request).unwrap_or_else(|| {
                let hash = request.path.split('?').next().unwrap().trim_start_matches('/');
                let file = large.iter().find(|file| file.hash() == hash);
                file.map_or(Reply::status(404), |file| ranged(request, &file.bytes))
            })
        });
        let link = files_server.url();
        let hub =
            Server::start(move |request| on_hub(request).unwrap_or_else(|| in_order(request, &files, &link)));
        Hub { hub, files_server }
    }

    pub fn plain(files: Vec<File>) -> Self {
        Hub::start(files, Box::new(|_| None), Box::new(|_| None))
    }
}

/// A file's bytes from where the request asks for them.
pub fn ranged(request: &Request, bytes: &[u8]) -> Reply {
    let start = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
    match start.map(|start| start.parse::<usize>().unwrap()) {
        None => Reply::status(200).body(bytes),
        Some(start) if start < bytes.len() => Reply::status(206)
            .with("Content-Range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len()))
            .body(&bytes[start..]),
        Some(_) => Reply::status(416),
    }
}

/// The list of `files`, with what a test says otherwise of them.
pub fn listing(files: &[File]) -> serde_json::Value {
    let entry = |file: &File| match file.large {
        true => json!({
            "rfilename": file.name, "size": file.bytes.len(), "blobId": "f".repeat(40),
            "lfs": {"sha256": file.hash(), "size": file.bytes.len(), "pointerSize": 134},
        }),
        false => json!({"rfilename": file.name, "size": file.bytes.len(), "blobId": file.hash()}),
    };
    json!({"id": "org/m", "sha": COMMIT, "siblings": files.iter().map(entry).collect::<Vec<_>>()})
}

fn in_order(request: &Request, files: &[File], link: &str) -> Reply {
    let path = request.path.as_str();
    let resolved = format!("/org/m/resolve/{COMMIT}/");
    let cached = "/api/resolve-cache/";
    let json = |value: serde_json::Value| {
        Reply::status(200).with("Content-Type", "application/json").body(value.to_string())
    };
    if path.starts_with("/api/models/org/m/revision/") {
        let known = ["main", "v1", COMMIT].iter().any(|name| path.contains(&format!("/revision/{name}?")));
        return if known {
            json(listing(files))
        } else {
            Reply::status(404).with("X-Error-Code", "RevisionNotFound")
        };
    }
    if path == "/api/models/org/m/refs" {
        return json(json!({"branches": [{"name": "main"}], "tags": [{"name": "v1"}, {"name": "../x"}]}));
    }
    if path.starts_with("/api/models?search=") {
        return json(json!([{"id": "org/m"}, {"id": "else/other"}, {"id": "../../x"}]));
    }
    let named = path.strip_prefix(&resolved).or_else(|| path.strip_prefix(cached));
    let Some(file) = named.and_then(|name| files.iter().find(|file| file.name == name)) else {
        return Reply::status(404)
            .with("X-Error-Code", "RepoNotFound")
            .with("X-Error-Message", "Repository not found");
    };
    let tagged = |reply: Reply| reply.with("X-Repo-Commit", COMMIT);
    match (file.large, path.starts_with(cached)) {
        (true, _) => tagged(Reply::status(302))
            .with("X-Linked-Etag", format!("\"{}\"", file.hash()))
            .with("X-Linked-Size", file.bytes.len().to_string())
            .with("Location", format!("{link}/{}?Signature=secret", file.hash())),
        // The hub gives small files from a cache of its own.
        (false, false) => tagged(Reply::status(307)).with("Location", format!("{cached}{}", file.name)),
        (false, true) => tagged(ranged(request, &file.bytes)).with("ETag", format!("W/\"{}\"", file.hash())),
    }
}
