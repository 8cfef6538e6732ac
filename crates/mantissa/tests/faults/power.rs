//! Simulates a power cut at every fsync: replays a run's recorded changes up to that point, in each state the
//! disk may then have, and runs the same command again.
//!
//! A file's bytes are certain only after the file is synced. Names are certain as of the last fsync of a
//! folder, as journaling file systems keep them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{XattrFlags, setxattr};
use serde_json::{Value, json};

use crate::harness::{ALL, Case, Figures, Out, Room, line, words};
use crate::rows::{ROWS, with_tokenizer};
use crate::support::{stderr, whole};
use crate::tree::{self, Tree};

/// Extended attribute that holds the job of an output.
const ATTRIBUTE: &str = "user.mantissa.job";

/// State of the disk after a power cut.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    /// Everything was written.
    Nothing,
    /// Unsynced bytes are missing.
    Absent,
    /// Unsynced bytes are zero.
    Zero,
    /// As [`Cut::Absent`], and names are those of the last fsync of a folder.
    Names,
}

/// States tried before and after each fsync.
const BEFORE: [Cut; 2] = [Cut::Absent, Cut::Zero];
const AFTER: [Cut; 4] = [Cut::Nothing, Cut::Absent, Cut::Zero, Cut::Names];

#[test]
fn quantize_survives_power_cuts() {
    prove("quantize");
}

#[test]
fn quantize_to_gguf_survives_power_cuts() {
    prove("quantize gguf");
}

#[test]
fn quantize_to_a_split_gguf_survives_power_cuts() {
    prove("quantize gguf, split");
}

#[test]
fn fit_survives_power_cuts() {
    prove("fit");
}

/// Resumes a training run from its last whole checkpoint, or starts anew if there is none yet.
#[test]
fn train_survives_power_cuts() {
    let room = Room::new(&TRAIN);
    let start = room.strangers().clone();
    let arguments = words("train in/run.toml --threads 1 --quiet");
    let (changes, data) = recorded(&room, &start, &arguments);
    let result = || (tree::below(&tree::read(&room.path("out/run")), "model"), losses(&room));
    let expected = result();
    let mut figures = Figures::default();
    let mut disk = Disk::new(&room, &start);
    let mut synced = 0;
    for change in &changes {
        disk.apply(change, &data);
        synced += usize::from(change.starts_with("sync\t"));
        let tried = change.starts_with("sync\t") && (whole() || synced % 4 == 1);
        for cut in AFTER.iter().filter(|_| tried) {
            disk.put(*cut);
            let mut wrong = go_on(&room, &arguments, disk.has_checkpoint(*cut));
            if wrong.is_empty() && result() != expected {
                wrong.push("another model, or other losses".to_owned());
            }
            figures.count(&format!("{cut:?} after {change}"), wrong);
        }
    }
    println!(
        "train                    power  {:5} tries {:4} failures",
        figures.tries,
        figures.failures.len()
    );
    assert!(
        figures.tries > if whole() { 30 } else { 8 } && figures.failures.is_empty(),
        "{}",
        figures.failures.join("\n")
    );
}

/// Resumes a run, or starts anew without a checkpoint; returns what failed.
fn go_on(room: &Room, arguments: &[String], whole: bool) -> Vec<String> {
    let run = |option| room.command(&[arguments, &words(option)].concat()).output().unwrap();
    let mut wrong = room.inputs_changed();
    let mut output = run("--resume");
    if !output.status.success() {
        if whole {
            wrong.push(format!("not resumed: {}", stderr(&output).trim()));
        }
        output = run("--restart");
    }
    if !output.status.success() {
        wrong.push(format!("{}: {}", output.status, stderr(&output).trim()));
    }
    let strange = room.strangers();
    let stray = |path: &&String| path.contains(".mantissa-") && !strange.contains_key(*path);
    let found = tree::read(&room.path("out"));
    wrong.extend(found.keys().find(stray).map(|path| format!("{path} is left")));
    wrong
}

/// Training run of six steps.
const TRAIN: Case =
    Case { name: "train", prepare: train, command: "", old: "", outputs: &[Out::Folder("run")], pace: ALL };

fn train(room: &Room) {
    with_tokenizer(room);
    let words: Value = serde_json::from_slice(&fs::read(room.path("in/words/config.json")).unwrap()).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu",
        "vocab_size": words["vocab_size"], "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    fs::write(room.path("in/config.json"), config.to_string()).unwrap();
    let settings = "seed = 3\nout = \"../out/run\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"words\"\n\
        [data]\nfiles = [\"text.txt\"]\nlength = 16\nbatch = 2\n[precision]\npolicy = \"bf16\"\n[optimizer]\nlr = 5e-3\n\
        [schedule]\nsteps = 6\nwarmup = 1\n[checkpoint]\nevery = 2\nkeep = 2\n[telemetry]\nevery = 3\n";
    fs::write(room.path("in/run.toml"), settings).unwrap();
}

/// Returns steps and losses of the log.
fn losses(room: &Room) -> Vec<(u64, String)> {
    let log = fs::read_to_string(room.path("out/run/log.jsonl")).unwrap_or_default();
    let line = |line: &str| serde_json::from_str(line).unwrap_or(Value::Null);
    let of = |line: Value| (line["step"].as_u64().unwrap_or(0), line["loss"].to_string());
    log.lines().map(line).map(of).collect()
}

fn prove(name: &str) {
    let case = ROWS.iter().find(|row| row.name == name).unwrap();
    let room = Room::new(case);
    let (mut lines, mut failures) = (Vec::new(), Vec::new());
    for scenario in room.scenarios() {
        let (changes, data) = recorded(&room, &scenario.start, &scenario.arguments);
        let mut figures = Figures::default();
        let mut disk = Disk::new(&room, &scenario.start);
        let mut cut = |disk: &Disk<'_>, cuts: &[Cut], place: &str, change: &str| {
            for cut in cuts {
                disk.put(*cut);
                let mut wrong = room.state(&scenario, true, false);
                wrong.extend(room.again(&scenario));
                figures.count(&format!("over {}, {cut:?} {place} {change}", scenario.name), wrong);
            }
        };
        let mut synced = 0;
        for change in &changes {
            let syncs = change.starts_with("sync\t") && {
                synced += 1;
                whole() || synced % 4 == 1
            };
            if syncs {
                cut(&disk, &BEFORE, "before", change);
            }
            disk.apply(change, &data);
            if syncs {
                cut(&disk, &AFTER, "after", change);
            }
        }
        lines.push(line(case, &scenario, "power", &figures));
        failures.extend(figures.failures);
    }
    println!("{}", lines.join("\n"));
    assert!(failures.is_empty(), "{name}: {} failures\n{}", failures.len(), failures.join("\n"));
}

/// Recorded changes of a run, and the bytes it wrote.
fn recorded(room: &Room, start: &Tree, arguments: &[String]) -> (Vec<String>, Vec<u8>) {
    room.reset(start);
    let trace = room.path("trace");
    let output = room.command(arguments).env("MANTISSA_TRACE", &trace).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = fs::read_to_string(&trace).unwrap().lines().map(str::to_owned).collect();
    let data = fs::read(room.path("trace.data")).unwrap();
    fs::remove_file(trace).unwrap();
    fs::remove_file(room.path("trace.data")).unwrap();
    (lines, data)
}

/// File or folder.
#[derive(Clone, Default)]
struct Node {
    /// Content of a file.
    bytes: Option<Vec<u8>>,
    /// Content as of the last sync.
    synced: Vec<u8>,
    /// Attribute, and its value as of the last sync.
    mark: Option<String>,
    synced_mark: Option<String>,
    /// Nodes referred to, for a file that lists inodes.
    listed: HashMap<u64, usize>,
}

type Names = BTreeMap<PathBuf, usize>;

/// Simulated disk during the replay.
struct Disk<'a> {
    room: &'a Room,
    out: PathBuf,
    nodes: Vec<Node>,
    names: Names,
    synced_names: Names,
}

impl<'a> Disk<'a> {
    /// Starts with the disk before the run, all of it synced.
    fn new(room: &'a Room, start: &Tree) -> Self {
        let out = fs::canonicalize(room.path("out")).unwrap();
        let mut disk = Disk {
            room,
            out: out.clone(),
            nodes: Vec::new(),
            names: Names::new(),
            synced_names: Names::new(),
        };
        disk.create(out.clone(), None);
        for (path, content) in start {
            let node = disk.create(out.join(path), content.clone());
            disk.nodes[node].synced = content.clone().unwrap_or_default();
        }
        disk.synced_names = disk.names.clone();
        disk
    }

    fn create(&mut self, path: PathBuf, bytes: Option<Vec<u8>>) -> usize {
        // Parents of the run's folder are created before it, not one by one.
        let parent = path.parent().unwrap().to_owned();
        if parent.starts_with(&self.out) && !self.names.contains_key(&parent) {
            self.create(parent, None);
        }
        self.nodes.push(Node { bytes, ..Node::default() });
        self.names.insert(path, self.nodes.len() - 1);
        self.nodes.len() - 1
    }

    /// Replays one line of the trace.
    fn apply(&mut self, change: &str, data: &[u8]) {
        let mut fields = change.split('\t');
        let (kind, path) = (fields.next().unwrap(), self.resolved(fields.next().unwrap()));
        let rest: Vec<&str> = fields.collect();
        if !path.starts_with(&self.out) {
            return;
        }
        match kind {
            // The lock may exist already.
            "create" if self.names.contains_key(&path) => {}
            "create" => drop(self.create(path, Some(Vec::new()))),
            "mkdir" => drop(self.create(path, None)),
            "unlink" | "rmdir" => drop(self.names.remove(&path)),
            "rename" => self.rename(&path, &self.resolved(rest[0])),
            "exchange" => {
                let (other, aside) = (self.resolved(rest[0]), self.out.join("aside"));
                self.rename(&path, &aside);
                self.rename(&other, &path);
                self.rename(&aside, &other);
            }
            "length" => {
                let len = rest[0].parse().unwrap();
                self.node(&path).bytes.as_mut().unwrap().resize(len, 0);
            }
            "write" => {
                let [from, len]: [usize; 2] = [1, 2].map(|i| rest[i].parse().unwrap());
                let bytes = self.node(&path).bytes.as_mut().unwrap();
                let at = rest[0].parse().unwrap_or(bytes.len());
                bytes.resize(bytes.len().max(at + len), 0);
                bytes[at..at + len].copy_from_slice(&data[from..from + len]);
                self.list(&path);
            }
            "mark" => self.node(&path).mark = Some(rest[0].to_owned()),
            "sync" => {
                let node = self.node(&path);
                node.synced_mark.clone_from(&node.mark);
                match &node.bytes {
                    Some(bytes) => node.synced.clone_from(bytes),
                    None => self.synced_names = self.names.clone(),
                }
            }
            other => panic!("{other}"),
        }
    }

    /// Returns an absolute path without `..`, the form of this disk's names.
    fn resolved(&self, path: &str) -> PathBuf {
        let mut resolved = self.out.parent().unwrap().to_owned();
        for part in PathBuf::from(path).components() {
            match part {
                Component::ParentDir => drop(resolved.pop()),
                Component::CurDir => {}
                part => resolved.push(part),
            }
        }
        resolved
    }

    /// True if a checkpoint exists as it was synced.
    fn has_checkpoint(&self, cut: Cut) -> bool {
        let names = if cut == Cut::Names { &self.synced_names } else { &self.names };
        names.keys().any(|path| {
            path.parent().is_some_and(|parent| parent.ends_with("run/checkpoints")) && path.is_file()
        })
    }

    fn node(&mut self, path: &Path) -> &mut Node {
        let node = *self.names.get(path).unwrap_or_else(|| panic!("{} is not there", path.display()));
        &mut self.nodes[node]
    }

    /// Moves a name and everything below it.
    fn rename(&mut self, from: &Path, to: &Path) {
        let moved: Vec<_> = self.names.keys().filter(|path| path.starts_with(from)).cloned().collect();
        for path in moved {
            let node = self.names.remove(&path).unwrap();
            let rest = path.strip_prefix(from).unwrap();
            let to = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
            self.names.insert(to, node);
        }
    }

    /// Records which nodes a file of inodes refers to: on the restored disk they have other numbers.
    fn list(&mut self, path: &Path) {
        let (name, work) = (path.file_name().unwrap(), path.parent().unwrap().to_owned());
        let bytes = self.node(path).bytes.clone().unwrap();
        let mut listed = HashMap::new();
        let at = |path: PathBuf| self.names.get(&path).copied();
        if name == "exchanged" {
            let inode = String::from_utf8(bytes).unwrap().parse().unwrap();
            listed.extend(at(work.join("new")).map(|node| (inode, node)));
        } else if name == "publish.json" {
            let intent: Value = serde_json::from_slice(&bytes).unwrap();
            for pair in intent["retired"].as_array().unwrap() {
                let node = at(self.out.join(pair[0].as_str().unwrap()));
                listed.extend(node.map(|node| (pair[1].as_u64().unwrap(), node)));
            }
            for entry in intent["files"].as_array().unwrap() {
                let name = entry[0].as_str().unwrap();
                listed.extend(at(work.join("new").join(name)).map(|node| (entry[1].as_u64().unwrap(), node)));
                let old = entry[2].as_u64().and_then(|inode| Some((inode, at(self.out.join(name))?)));
                listed.extend(old);
            }
        }
        self.node(path).listed = listed;
    }

    /// Fills the folder `out` with the state after a power cut.
    fn put(&self, cut: Cut) {
        self.room.reset(&BTreeMap::new());
        let names = if cut == Cut::Names { &self.synced_names } else { &self.names };
        let mut inodes = HashMap::new();
        for (path, &at) in names.iter().filter(|(path, _)| **path != self.out) {
            match content(&self.nodes[at], cut) {
                None => fs::create_dir(path).unwrap(),
                Some(bytes) => fs::write(path, bytes).unwrap(),
            }
            inodes.insert(at, fs::metadata(path).unwrap().ino());
        }
        for (path, &at) in names {
            let node = &self.nodes[at];
            if !node.listed.is_empty() {
                let bytes = fs::read(path).unwrap();
                fs::write(path, translated(&bytes, &node.listed, &inodes)).unwrap();
            }
            let mark = if cut == Cut::Nothing { &node.mark } else { &node.synced_mark };
            let Some(mark) = mark else { continue };
            let found = fs::metadata(path).unwrap();
            // The attribute records when the file was written.
            let text = match (&node.bytes, mark.split_once(' ')) {
                (Some(_), Some((job, _))) => {
                    format!("{job} {} {}.{:09}", found.len(), found.mtime(), found.mtime_nsec())
                }
                _ => mark.clone(),
            };
            // Without attributes the command runs with --overwrite.
            let _ = setxattr(path, ATTRIBUTE, text.as_bytes(), XattrFlags::empty());
        }
    }
}

/// Returns a file's bytes after a power cut; `None` for a folder.
fn content(node: &Node, cut: Cut) -> Option<Vec<u8>> {
    let bytes = node.bytes.as_ref()?;
    Some(match cut {
        Cut::Nothing => bytes.clone(),
        Cut::Absent | Cut::Names => node.synced.clone(),
        Cut::Zero => {
            let mut left = node.synced.clone();
            left.resize(bytes.len(), 0);
            left
        }
    })
}

/// Rewrites a file of inodes with the restored files' numbers; unchanged if it is incomplete.
fn translated(bytes: &[u8], listed: &HashMap<u64, usize>, inodes: &HashMap<usize, u64>) -> Vec<u8> {
    let new = |inode: u64| listed.get(&inode).and_then(|node| inodes.get(node)).copied().unwrap_or(0);
    if let Some(inode) = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok()) {
        return new(inode).to_string().into_bytes();
    }
    let Ok(intent) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
    let entries = |list: &Value| -> Vec<Value> {
        let entry = |entry: &Value| {
            let numbers =
                |value: &Value| value.as_u64().map_or_else(|| value.clone(), |inode| new(inode).into());
            entry.as_array().unwrap().iter().map(numbers).collect::<Value>()
        };
        list.as_array().unwrap().iter().map(entry).collect()
    };
    json!({ "retired": entries(&intent["retired"]), "files": entries(&intent["files"]) })
        .to_string()
        .into_bytes()
}
