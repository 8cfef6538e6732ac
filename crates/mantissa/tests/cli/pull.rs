//! Downloads from a hub, and the cache that they leave.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::hub_server::{COMMIT, File, Hub, Reply, Server, listing, ranged};
use crate::support::{command, root, stderr, strict_json, text};

const TOKEN: &str = "hf_neverToBeShown";

/// Folder of a test with its cache.
struct Machine {
    temp: TempDir,
}

impl Machine {
    fn new() -> Self {
        Machine { temp: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn repository(&self) -> PathBuf {
        self.path("hub/models--org--m")
    }

    fn snapshot(&self) -> PathBuf {
        self.repository().join("snapshots").join(COMMIT)
    }

    fn blob(&self, file: &File) -> PathBuf {
        self.repository().join("blobs").join(file.hash())
    }

    fn partial(&self, file: &File) -> PathBuf {
        self.blob(file).with_extension("incomplete")
    }

    /// The binary with a cache, a home and a hub of its own, and without a token.
    fn command(&self, hub: &Server, arguments: &[&str]) -> Command {
        let mut command = command();
        for name in [
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HOME",
            "HF_HUB_OFFLINE",
            "XDG_CACHE_HOME",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
            "http_proxy",
            "https_proxy",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        let cache = self.path("hub");
        command.env("HOME", self.temp.path()).env("HF_HUB_CACHE", cache).env("HF_ENDPOINT", hub.url());
        command.current_dir(self.temp.path()).args(arguments);
        command
    }

    fn pull(&self, hub: &Server, arguments: &[&str]) -> Output {
        self.command(hub, &[&["pull"], arguments].concat()).output().unwrap()
    }

    fn pulled(&self, hub: &Server, arguments: &[&str]) -> Value {
        let output = self.pull(hub, &[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        strict_json::parse(&output.stdout).unwrap()
    }

    /// Runs a download that must fail with `code`; returns its message.
    fn fails(&self, hub: &Server, code: i32, arguments: &[&str]) -> String {
        let output = self.pull(hub, arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{message}");
        let error = message.lines().filter(|line| line.starts_with("error: ")).collect::<Vec<_>>();
        assert_eq!(error.len(), 1, "{message}");
        error[0].to_owned()
    }
}

/// A model that mantissa runs.
fn model() -> Vec<File> {
    let folder = root().join("tests/data/tiny/llama2-gqa-tied");
    let mut files: Vec<File> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let (name, bytes) =
                (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
            if name.ends_with(".safetensors") { File::large(&name, bytes) } else { File::small(&name, bytes) }
        })
        .collect();
    files.push(File::small("chat_templates/plain.jinja", "x"));
    files.push(File::large("pytorch_model.bin", "twice"));
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

fn weights(files: &[File]) -> File {
    files.iter().find(|file| file.name.ends_with(".safetensors")).unwrap().clone()
}

/// A model of which one file is large enough for many pieces.
fn long() -> Vec<File> {
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    vec![File::small("config.json", "{}"), File::large("model.safetensors", bytes)]
}

#[test]
fn a_model_is_put_where_every_tool_finds_it() {
    let (machine, files) = (Machine::new(), model());
    let hub = Hub::plain(files.clone());
    let report = machine.pulled(&hub.hub, &["org/m"]);
    let snapshot = machine.snapshot();
    assert_eq!((report["commit"].as_str(), report["path"].as_str()), (Some(COMMIT), Some(text(&snapshot))));
    assert_eq!(report["left_out"], json!(["pytorch_model.bin"]));
    assert_eq!(report["fetched_bytes"], report["bytes"]);
    for file in files.iter().filter(|file| file.name != "pytorch_model.bin") {
        let link = fs::read_link(snapshot.join(&file.name)).unwrap();
        let up = if file.name.contains('/') { "../../.." } else { "../.." };
        assert_eq!(link, Path::new(&format!("{up}/blobs/{}", file.hash())));
        assert_eq!(fs::read(snapshot.join(&file.name)).unwrap(), file.bytes, "{}", file.name);
    }
    assert_eq!(fs::read_to_string(machine.repository().join("refs/main")).unwrap(), COMMIT);
    // The name works, without the hub.
    let gone = Server::start(|_| Reply::status(500));
    let shown = machine.command(&gone, &["inspect", "org/m", "--json"]).output().unwrap();
    assert!(shown.status.success() && gone.requests().is_empty(), "{}", stderr(&shown));
    // A second time there is nothing to fetch.
    let before = hub.files_server.requests().len();
    assert_eq!(machine.pulled(&hub.hub, &["hf.co/org/m"])["fetched_bytes"], 0);
    assert_eq!(hub.files_server.requests().len(), before);
    // Another revision of the same content needs its reference alone.
    machine.pulled(&hub.hub, &["org/m", "--revision", "v1"]);
    assert_eq!(fs::read_to_string(machine.repository().join("refs/v1")).unwrap(), COMMIT);
    // The page lists the fields.
    let page = fs::read_to_string(root().join("docs/reference/json.md")).unwrap();
    let section = page.split("\n## pull\n").nth(1).unwrap().split("\n## ").next().unwrap();
    for field in report.as_object().unwrap().keys() {
        assert!(section.contains(&format!("`{field}`")), "{field}");
    }
}

#[test]
fn the_token_goes_to_the_hub_alone_and_is_never_shown() {
    let (machine, files) = (Machine::new(), model());
    let hub = Hub::plain(files);
    let output = machine.command(&hub.hub, &["pull", "org/m"]).env("HF_TOKEN", TOKEN).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let sent = format!("Bearer {TOKEN}");
    assert!(hub.hub.requests().iter().all(|request| request.header("authorization") == Some(&sent)));
    let others = hub.files_server.requests();
    assert!(!others.is_empty() && others.iter().all(|request| request.header("authorization").is_none()));
    let shown = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
    assert!(!shown.contains(TOKEN) && !shown.contains("Signature"), "{shown}");
    // The file that `hf auth login` writes.
    let (machine, hub) = (Machine::new(), Hub::plain(model()));
    fs::create_dir_all(machine.path(".cache/huggingface")).unwrap();
    fs::write(machine.path(".cache/huggingface/token"), format!("{TOKEN}\n")).unwrap();
    machine.pulled(&hub.hub, &["org/m"]);
    assert!(hub.hub.requests().iter().all(|request| request.header("authorization") == Some(&sent)));
}

#[test]
fn a_killed_download_resumes_and_shows_nothing_before() {
    let (machine, files) = (Machine::new(), long());
    let weights = weights(&files);
    let bytes = weights.bytes.clone();
    let stalled = Hub::start(
        files.clone(),
        Box::new(|_| None),
        Box::new(move |request| {
            Some(Reply { cut: Some(1_000_000), stalls: true, ..ranged(request, &bytes) })
        }),
    );
    let mut child = machine.command(&stalled.hub, &["pull", "org/m"]).stderr(Stdio::null()).spawn().unwrap();
    let partial = machine.partial(&weights);
    let start = Instant::now();
    while fs::metadata(&partial).map_or(0, |found| found.len()) < 1_000_000 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing arrives");
        sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!machine.snapshot().exists() && !machine.blob(&weights).exists());
    let hub = Hub::plain(files);
    let report = machine.pulled(&hub.hub, &["org/m"]);
    assert_eq!(report["fetched_bytes"].as_u64(), Some(2_000_000));
    assert_eq!(hub.files_server.requests()[0].header("range"), Some("bytes=1000000-"));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), weights.bytes);
    assert!(!partial.exists());
}

#[test]
fn a_signal_ends_a_download_that_the_same_command_resumes() {
    let (machine, files) = (Machine::new(), long());
    let bytes = weights(&files).bytes;
    let hub = Hub::start(
        files.clone(),
        Box::new(|_| None),
        Box::new(move |request| Some(Reply { cut: Some(500_000), stalls: true, ..ranged(request, &bytes) })),
    );
    let mut started = machine.command(&hub.hub, &["pull", "org/m"]);
    let child = started.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let (partial, start) = (machine.partial(&weights(&files)), Instant::now());
    while fs::metadata(&partial).map_or(0, |found| found.len()) < 500_000
        && start.elapsed() < Duration::from_secs(60)
    {
        sleep(Duration::from_millis(20));
    }
    let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("Rerun the same command to resume"), "{}", stderr(&output));
    assert_eq!(fs::metadata(&partial).unwrap().len(), 500_000);
}

#[test]
fn a_connection_that_ends_early_is_continued_at_once() {
    let (machine, files) = (Machine::new(), long());
    let bytes = weights(&files).bytes;
    let hub = Hub::start(
        files,
        Box::new(|_| None),
        Box::new(move |request| Some(Reply { cut: Some(700_000), ..ranged(request, &bytes) })),
    );
    let report = machine.pulled(&hub.hub, &["org/m"]);
    assert_eq!(report["fetched_bytes"], report["bytes"]);
    let ranges: Vec<String> = hub
        .files_server
        .requests()
        .iter()
        .filter_map(|request| request.header("range").map(str::to_owned))
        .collect();
    assert_eq!(ranges, ["bytes=700000-", "bytes=1400000-", "bytes=2100000-", "bytes=2800000-"]);
}

#[test]
fn a_server_that_cannot_continue_files_sends_them_whole() {
    let (machine, files) = (Machine::new(), long());
    let (weights, bytes) = (weights(&files), weights(&files).bytes);
    let hub = Hub::start(
        files,
        Box::new(|_| None),
        Box::new(move |_| Some(Reply::status(200).body(bytes.clone()))),
    );
    fs::create_dir_all(machine.repository().join("blobs")).unwrap();
    fs::write(machine.partial(&weights), &weights.bytes[..1000]).unwrap();
    machine.pulled(&hub.hub, &["org/m"]);
    assert_eq!(fs::read(machine.blob(&weights)).unwrap(), weights.bytes);
}

#[test]
fn refusals_of_the_hub_say_what_to_do() {
    let with = |status: u16, code: &'static str| {
        let answer = move |request: &crate::hub_server::Request| {
            let listed = request.path.contains("/revision/");
            listed.then(|| Reply::status(status).with("X-Error-Code", code))
        };
        Hub::start(model(), Box::new(answer), Box::new(|_| None))
    };
    let machine = Machine::new();
    let message = |status, code, name: &str| machine.fails(&with(status, code).hub, 2, &[name]);
    let unknown = message(401, "RepoNotFound", "org/mm");
    assert!(
        unknown.contains("no such model, or it is private") && unknown.contains("or give org/m,"),
        "{unknown}"
    );
    assert!(unknown.contains("HF_TOKEN"), "{unknown}");
    let gated = message(401, "GatedRepo", "org/m");
    assert!(
        gated.contains("open http://127.0.0.1:") && gated.contains("/org/m, accept the conditions"),
        "{gated}"
    );
    assert!(message(403, "GatedRepo", "org/m").contains("accept the conditions"));
    assert!(message(403, "", "org/m").contains("give the token the right to read"));
    let missing = message(404, "RepoNotFound", "org/mn");
    assert!(missing.contains("check the name, or give org/m"), "{missing}");
    let denied =
        machine.command(&with(401, "").hub, &["pull", "org/m"]).env("HF_TOKEN", TOKEN).output().unwrap();
    let message = stderr(&denied);
    assert!(message.contains("settings/tokens") && !message.contains(TOKEN), "{message}");
    let revision = machine.fails(&Hub::plain(model()).hub, 2, &["org/m", "--revision", "v2"]);
    assert!(
        revision.starts_with("error: --revision: expected a branch") && revision.contains("give v1"),
        "{revision}"
    );
    let name = machine.fails(&Hub::plain(model()).hub, 2, &["gpt2"]);
    assert!(name.contains("such as org/name"), "{name}");
    assert!(!machine.repository().exists(), "nothing is made of a model that is not there");
    let offline =
        machine.command(&Hub::plain(model()).hub, &["pull", "org/m"]).env("HF_HUB_OFFLINE", "1").output();
    assert_eq!(offline.unwrap().status.code(), Some(2));
    // The command that fetches it is in the error of every command.
    let hub = Hub::plain(model()).hub;
    let output = machine.command(&hub, &["run", "org/m", "-p", "x"]).output().unwrap();
    assert!(stderr(&output).contains("mantissa pull org/m)"), "{}", stderr(&output));
    assert!(hub.requests().is_empty(), "nothing is fetched unasked");
}

#[test]
fn a_busy_hub_is_asked_again_when_it_says() {
    let machine = Machine::new();
    let (first, second) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let hub = Hub::start(
        model(),
        Box::new(move |request| {
            let listed = request.path.contains("/revision/");
            let busy = listed && first.fetch_add(1, Ordering::SeqCst) == 0;
            busy.then(|| Reply::status(429).with("Retry-After", "1"))
        }),
        Box::new(move |_| (second.fetch_add(1, Ordering::SeqCst) == 0).then(|| Reply::status(503))),
    );
    let start = Instant::now();
    machine.pulled(&hub.hub, &["org/m"]);
    assert!(start.elapsed() >= Duration::from_secs(1));
    // A wait that nobody would sit through ends the command, and so does a hub that stays broken.
    let slow = Reply::status(429).with("Retry-After", "7200").with("Content-Type", "text/plain");
    let slow = slow.body("slow \u{1b}[31m\ndown");
    let hours = Hub::start(model(), Box::new(move |_| Some(slow.clone())), Box::new(|_| None));
    let message = machine.fails(&hours.hub, 3, &["org/m"]);
    assert!(
        message.contains("429 (slow") && message.contains("in 7200 s") && !message.contains('\u{1b}'),
        "{message}"
    );
    assert_eq!(hours.hub.requests().len(), 1);
}

#[test]
fn a_file_with_wrong_content_never_appears() {
    let (machine, files) = (Machine::new(), long());
    let weights = weights(&files);
    let mut wrong = weights.bytes.clone();
    wrong[1_234_567] ^= 1;
    let other =
        Hub::start(files.clone(), Box::new(|_| None), Box::new(move |request| Some(ranged(request, &wrong))));
    let message = machine.fails(&other.hub, 3, &["org/m"]);
    assert!(
        message.contains("model.safetensors: expected SHA-256 ") && message.contains(&weights.hash()),
        "{message}"
    );
    assert!(
        !machine.blob(&weights).exists()
            && !machine.snapshot().exists()
            && !machine.partial(&weights).exists()
    );
    // Too many bytes are no file either.
    let longer = [weights.bytes.clone(), vec![0; 10]].concat();
    let hub = Hub::start(
        files.clone(),
        Box::new(|_| None),
        Box::new(move |_| Some(Reply::status(200).body(longer.clone()))),
    );
    assert!(machine.fails(&hub.hub, 3, &["org/m"]).contains("got more bytes"));
    assert!(!machine.snapshot().exists() && !machine.partial(&weights).exists());
    // Small files are compared as well.
    let small = |request: &crate::hub_server::Request| {
        request.path.contains("config.json").then(|| Reply::status(200).body("[]"))
    };
    let hub = Hub::start(files.clone(), Box::new(small), Box::new(|_| None));
    assert!(Machine::new().fails(&hub.hub, 3, &["org/m"]).contains("config.json: expected git's id"));
    // What an earlier run left may be damaged: the file is then fetched whole.
    fs::write(machine.partial(&weights), vec![7; 1_000_000]).unwrap();
    let hub = Hub::plain(files);
    machine.pulled(&hub.hub, &["org/m"]);
    assert_eq!(fs::read(machine.blob(&weights)).unwrap(), weights.bytes);
    let ranges =
        hub.files_server.requests().iter().map(|r| r.header("range").map(str::to_owned)).collect::<Vec<_>>();
    assert_eq!(ranges, [Some("bytes=1000000-".to_owned()), None]);
}

#[test]
fn no_name_of_a_server_becomes_a_path_outside() {
    let hostile = |change: fn(&mut Value)| {
        let files = long();
        let mut list = listing(&files);
        change(&mut list);
        let answer = move |request: &crate::hub_server::Request| {
            let listed = request.path.contains("/revision/");
            listed.then(|| Reply::status(200).body(list.to_string()))
        };
        Hub::start(files, Box::new(answer), Box::new(|_| None))
    };
    let machine = Machine::new();
    for name in ["../../../../evil.json", "/tmp/evil.json", "a/../../evil.json", "a\\..\\evil.json"] {
        let files = vec![File::small(name, "{}"), File::small("model.safetensors", "x")];
        let message = machine.fails(&Hub::plain(files.clone()).hub, 2, &["org/m", "--include", "*"]);
        assert!(message.contains("expected a relative path inside the model"), "{message}");
    }
    let commit = hostile(|list| list["sha"] = json!("../../evil"));
    assert!(machine.fails(&commit.hub, 3, &["org/m"]).contains("sha: expected a commit"));
    // A hash that is a path is none: the file is asked for its own.
    let hash = hostile(|list| list["siblings"][0]["blobId"] = json!("../../../evil"));
    machine.pulled(&hash.hub, &["org/m"]);
    assert!(hash.hub.requests().iter().any(|request| request.method == "HEAD"));
    let deep = hostile(|list| {
        list["siblings"] = serde_json::from_str(&("[".repeat(100) + &"]".repeat(100))).unwrap();
    });
    assert!(machine.fails(&deep.hub, 3, &["org/m"]).contains("expected a list of a model's files"));
    let away = Hub::start(
        long(),
        Box::new(|request| {
            request
                .path
                .contains("resolve")
                .then(|| Reply::status(302).with("Location", "file:///etc/passwd"))
        }),
        Box::new(|_| None),
    );
    let other = Machine::new();
    assert!(other.fails(&away.hub, 3, &["org/m"]).contains("Location: expected the address of the file"));
    // Nor does a link that lies in the snapshot.
    let nested = Machine::new();
    let files = vec![File::small("model.safetensors", "x"), File::small("chat_templates/a.jinja", "y")];
    fs::create_dir_all(nested.snapshot()).unwrap();
    fs::create_dir(nested.path("elsewhere")).unwrap();
    symlink(nested.path("elsewhere"), nested.snapshot().join("chat_templates")).unwrap();
    nested.fails(&Hub::plain(files).hub, 2, &["org/m"]);
    assert_eq!(fs::read_dir(nested.path("elsewhere")).unwrap().count(), 0);
    for machine in [&machine, &other] {
        let mut found = vec![machine.temp.path().to_owned()];
        while let Some(folder) = found.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                assert!(!text(&path).contains("evil"), "{}", path.display());
                if path.is_dir() && !path.is_symlink() {
                    found.push(path);
                }
            }
        }
    }
}

#[test]
fn a_tag_and_patterns_choose_and_a_folder_takes_the_files() {
    let machine = Machine::new();
    let files: Vec<File> =
        ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md"].map(|name| File::large(name, name)).into();
    let hub = Hub::plain(files.clone());
    let several = machine.fails(&hub.hub, 2, &["org/m"]);
    assert!(several.contains("m-Q8_0.gguf (") && several.contains("mantissa pull org/m:Q4_K_M"), "{several}");
    let report = machine.pulled(&hub.hub, &["org/m:q4_k_m"]);
    assert_eq!(report["path"].as_str(), Some(text(&machine.snapshot().join("m-Q4_K_M.gguf"))));
    assert_eq!(report["files"].as_array().unwrap().len(), 1);
    assert!(machine.fails(&hub.hub, 2, &["org/m:Q2_K"]).contains("take one of m-Q4_K_M.gguf"));
    assert!(
        machine.fails(&hub.hub, 2, &["org/m", "--include", "*.bin"]).contains("none of which matches *.bin")
    );
    let out = machine.path("out");
    let report = machine.pulled(&hub.hub, &["org/m", "--include", "*.md", "--out", text(&out)]);
    assert_eq!(report["path"].as_str(), Some(text(&out)));
    let left: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["README.md"]);
    // A file that is there is kept if it is the model's, and is never replaced.
    assert_eq!(
        machine.pulled(&hub.hub, &["org/m", "--include", "*.md", "--out", text(&out)])["fetched_bytes"],
        0
    );
    fs::write(out.join("m-Q8_0.gguf"), "M-q8_0.GGUF").unwrap();
    let message = machine.fails(&hub.hub, 2, &["org/m:Q8_0", "--out", text(&out)]);
    assert!(message.contains("m-Q8_0.gguf: expected the file of the model"), "{message}");
    assert_eq!(fs::read(out.join("m-Q8_0.gguf")).unwrap(), b"M-q8_0.GGUF");
}
