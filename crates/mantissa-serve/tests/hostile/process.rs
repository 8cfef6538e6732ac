//! The server in a process of its own, and what it and its processes use.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mantissa_model::{SamplingDefaults, Tokenizer, chat};
use mantissa_runtime::{FastModel, RuntimeOptions};
use mantissa_serve::grammar::Confinement;
use mantissa_serve::{Keys, Loaded, Options, Render, RenderError, Server as Served};
use mantissa_store::convention::ModelFiles;
use serde_json::Value;

use super::client::Client;

/// Argument of the server's process.
pub const SERVER: &str = "--hostile-server";
/// Argument of the processes that hold grammars.
pub const GRAMMARS: &str = "--hostile-grammars";

/// Renders templates in this process: the template of `demo` is trusted.
struct Here;

impl Render for Here {
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError> {
        chat::render(template, context).map_err(|error| RenderError::Refused(error.to_string()))
    }
}

/// Serves until the standard input ends; writes the address first.
pub fn serve() -> ExitCode {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/demo/model");
    let files = ModelFiles::open(&demo).unwrap();
    let grammars = Confinement::processes(|| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(GRAMMARS);
        Ok(command)
    });
    let options = Options {
        grammars: Some(grammars),
        grammar_memory: 160 << 20,
        drain: Duration::from_secs(2),
        ..Options::default()
    };
    let mut server = Served::new(options, Arc::new(Here)).with_keys(Keys::parse("mallory\nalice\n").unwrap());
    for name in ["demo", "other"] {
        let loaded = Loaded {
            name: name.into(),
            tokenizer: Tokenizer::load(&demo).unwrap(),
            model: FastModel::load(&files, 2).unwrap(),
            format: "safetensors",
            file_type: None,
            draft: None,
            kv: "f16".into(),
            sampling: SamplingDefaults::default(),
            runtime: RuntimeOptions::batch(8, 512),
        };
        server.add(loaded).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Relaxed);
    });
    server.run(listener, || stop.load(Ordering::Relaxed)).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

/// The server's process.
pub struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    pub fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(SERVER).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let server = Server { child, address: line.trim().parse().unwrap() };
        // Once the fork servers stand, the numbers of threads and processes equal an idle server's.
        let begin = Instant::now();
        while server.usage().processes < 3 && begin.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    pub fn client(&self, key: &'static str) -> Client {
        Client { address: self.address, key }
    }

    /// Sums over the server and the processes that it started.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        let mut open = vec![self.child.id()];
        let all = processes();
        while let Some(pid) = open.pop() {
            open.extend(all.iter().filter(|process| process.parent == pid).map(|process| process.pid));
            if let Some(process) = all.iter().find(|process| process.pid == pid) {
                usage.processes += 1;
                usage.threads += process.threads;
                usage.bytes += process.bytes;
            }
        }
        usage
    }

    /// Stops the server and checks that it ends well, with all of its processes.
    pub fn stop(mut self) -> Result<(), String> {
        let pid = self.child.id();
        let children: Vec<u32> =
            processes().iter().filter(|process| process.parent == pid).map(|process| process.pid).collect();
        drop(self.child.stdin.take());
        let status = self.child.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("the server ended with {status}"));
        }
        let left = processes().iter().filter(|process| children.contains(&process.pid)).count();
        if left > 0 { Err(format!("{left} processes outlived the server")) } else { Ok(()) }
    }
}

/// What the server uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub processes: usize,
    pub threads: usize,
    /// Memory that is not shared with files.
    pub bytes: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = self.bytes as f64 / 1e6;
        write!(f, "{} processes, {} threads, {megabytes:.0} MB", self.processes, self.threads)
    }
}

struct Process {
    pid: u32,
    parent: u32,
    threads: usize,
    bytes: u64,
}

/// All processes of the machine that have not ended.
fn processes() -> Vec<Process> {
    let folders = std::fs::read_dir("/proc").unwrap().flatten();
    folders.filter_map(|folder| process(folder.file_name().to_str()?.parse().ok()?)).collect()
}

fn process(pid: u32) -> Option<Process> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().trim_end_matches(" kB").to_owned())
    };
    if field("State")?.starts_with('Z') {
        return None;
    }
    let kilobytes: u64 = field("RssAnon")?.parse().ok()?;
    Some(Process {
        pid,
        parent: field("PPid")?.parse().ok()?,
        threads: field("Threads")?.parse().ok()?,
        bytes: kilobytes * 1024,
    })
}
