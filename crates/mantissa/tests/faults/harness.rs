//! Runs a row of the table under faults, and checks after each:
//!
//! 1. no byte of an input has changed;
//! 2. no foreign file next to the outputs has changed;
//! 3. each output is the old or the new one, and whole; of a GGUF model in several files, a kill may leave some
//!    of the old or of the new files, never of both, and then no command accepts it as whole;
//! 4. the same command, undisturbed, succeeds and leaves exactly what an undisturbed run leaves: all bytes of
//!    the outputs, and nothing else of its own;
//! 5. the exit code is 3 with one line on standard error, and never that of a panic.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{command, left_to_nightly, stderr, whole};
use crate::tree::{self, Tree};

/// Command that writes.
pub struct Case {
    /// Name of the row.
    pub name: &'static str,
    /// Writes the inputs into the folder `in` of the test folder.
    pub prepare: fn(&Room),
    /// Command line, split at spaces; it reads from `in` and writes to `out`.
    pub command: &'static str,
    /// Command line that writes other outputs to the same paths.
    pub old: &'static str,
    /// Outputs.
    pub outputs: &'static [Out],
    /// Sampling of its changes.
    pub pace: Pace,
}

/// Output in the folder `out`.
#[derive(Clone, Copy)]
pub enum Out {
    /// A file.
    File(&'static str),
    /// JSON report, whose numbers may be timings.
    Report(&'static str),
    /// HTML page, whose digits may be timings.
    Page(&'static str),
    /// A folder with a manifest.
    Folder(&'static str),
    /// GGUF model: its name, and all weight files of the old and the new one.
    Gguf(&'static str, &'static [&'static str]),
}

impl Out {
    pub fn name(self) -> &'static str {
        match self {
            Out::File(name)
            | Out::Report(name)
            | Out::Page(name)
            | Out::Folder(name)
            | Out::Gguf(name, _) => name,
        }
    }

    /// Returns the part of the tree `out` that belongs to this output.
    pub fn of(self, tree: &Tree) -> Tree {
        let Out::Gguf(_, parts) = self else { return tree::below(tree, self.name()) };
        let beside = ["", ".quality.json", ".mantissa-manifest.json"];
        let names = parts.iter().flat_map(|part| beside.map(|end| format!("{part}{end}")));
        names.filter_map(|name| Some((name.clone(), tree.get(&name)?.clone()))).collect()
    }
}

/// Sampling of a command's changes. Moves and removals of foreign files are always tried: they cannot be
/// undone.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Stride over changes other than writes.
    pub others: usize,
    /// Stride over writes.
    pub writes: usize,
    /// Stride over faults after which the command runs again.
    pub again: usize,
    /// Number of full-disk positions.
    pub full: usize,
    /// Rounds of two processes started together.
    pub together: usize,
    /// Number of changes at which one process is stopped while another runs.
    pub stops: usize,
    /// True if everything is repeated over old outputs.
    pub over_old: bool,
}

/// All changes, and a sample of the writes.
pub const ALL: Pace =
    Pace { others: 1, writes: 6, again: 1, full: 12, together: 3, stops: 8, over_old: true };

impl Pace {
    /// Sample of this one, unless sweeps run whole.
    fn sampled(self) -> Self {
        if whole() {
            return self;
        }
        Pace {
            others: 8 * self.others,
            writes: self.writes.div_ceil(3),
            again: 3 * self.again,
            full: self.full.div_ceil(6),
            together: 1,
            stops: self.stops.div_ceil(4),
            ..self
        }
    }
}

/// Kinds of faults, by their environment names.
pub const KINDS: [&str; 3] = ["kill", "error", "full"];

/// Folder in which a row runs.
pub struct Room {
    temp: TempDir,
    case: &'static Case,
    inputs: Tree,
    strangers: Tree,
}

/// State before a command, and the result of an undisturbed run.
pub struct Scenario {
    pub name: &'static str,
    pub start: Tree,
    pub end: Tree,
    pub arguments: Vec<String>,
    /// Lines of the trace, one per change.
    pub changes: Vec<String>,
}

/// Tries and failures of one kind of fault.
#[derive(Default)]
pub struct Figures {
    pub tries: usize,
    pub failures: Vec<String>,
}

impl Room {
    pub fn new(case: &'static Case) -> Self {
        let temp = folder();
        let mut room = Room { temp, case, inputs: Tree::new(), strangers: strangers(case.outputs) };
        fs::create_dir(room.path("in")).unwrap();
        room.reset(&Tree::new());
        (case.prepare)(&room);
        room.inputs = tree::read(&room.path("in"));
        room
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// Returns the foreign files in the folder `out`.
    pub fn strangers(&self) -> &Tree {
        &self.strangers
    }

    /// Resets the folder `out` to this tree, and empties the folder for temporary files.
    pub fn reset(&self, out: &Tree) {
        tree::put(&self.path("out"), out);
        tree::put(&self.path("tmp"), &Tree::new());
    }

    /// Returns the binary with arguments, ready to run in the test folder.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = command();
        command.args(arguments).current_dir(self.temp.path()).env("TMPDIR", self.path("tmp"));
        command.env_remove("MANTISSA_FAULT").env_remove("MANTISSA_TRACE");
        command
    }

    pub fn succeed(&self, line: &str) {
        let output = self.command(&words(line)).output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
    }

    /// Returns the content of the folder `out`, without timings.
    pub fn found(&self) -> Tree {
        self.plain(&tree::read(&self.path("out")))
    }

    /// Prepares two scenarios: with nothing at the outputs, and with `--overwrite` over another command's outputs.
    /// Foreign files are present in both.
    pub fn scenarios(&self) -> Vec<Scenario> {
        let base = [words(self.case.command), words("--threads 1 --quiet")].concat();
        self.reset(&Tree::new());
        self.succeed(&format!("{} --threads 1 --quiet", self.case.old));
        let old = tree::joined(&tree::read(&self.path("out")), &self.strangers);
        let over = [base.clone(), words("--overwrite")].concat();
        // Without attributes a command cannot recognize its own output.
        let first = if keeps_attributes(self.temp.path()) { base } else { over.clone() };
        let mut scenarios = vec![self.scenario("nothing", self.strangers.clone(), first)];
        if self.case.pace.over_old {
            scenarios.push(self.scenario("old", old, over));
        }
        scenarios
    }

    fn scenario(&self, name: &'static str, start: Tree, arguments: Vec<String>) -> Scenario {
        self.reset(&start);
        let trace = self.path("trace");
        let output = self.command(&arguments).env("MANTISSA_TRACE", &trace).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}: {}", self.case.name, stderr(&output));
        let changes = fs::read_to_string(&trace).unwrap().lines().map(str::to_owned).collect();
        fs::remove_file(&trace).unwrap();
        fs::remove_file(self.path("trace.data")).unwrap();
        let end = self.found();
        let mut outputs = Tree::new();
        for output in self.case.outputs {
            let made = output.of(&end);
            assert!(!made.is_empty(), "{}: {} is not written", self.case.name, output.name());
            outputs.extend(made);
        }
        let expected = tree::joined(&outputs, &self.strangers);
        assert_eq!(tree::difference(&end, &expected), "", "{}, over {name}, undisturbed", self.case.name);
        assert_eq!(tree::read(&self.path("tmp")).len(), 0, "{}: temporary files are left", self.case.name);
        Scenario { name, start, end, arguments, changes }
    }

    /// Runs the command with a fault and, if `again`, once more without; returns what failed.
    pub fn try_fault(&self, scenario: &Scenario, kind: &str, at: usize, again: bool) -> Vec<String> {
        self.reset(&scenario.start);
        let fault = format!("{kind}:{at}");
        let output = self.command(&scenario.arguments).env("MANTISSA_FAULT", &fault).output().unwrap();
        let mut wrong = exit(kind, &output);
        wrong.extend(self.state(scenario, kind == "kill", output.status.code() == Some(0)));
        if again {
            wrong.extend(self.again(scenario));
        }
        wrong
    }

    /// Checks inputs, foreign files and outputs after a disturbed run; returns what failed.
    pub fn state(&self, scenario: &Scenario, killed: bool, done: bool) -> Vec<String> {
        let (found, mut wrong, mut known) = (self.found(), self.inputs_changed(), self.strangers.clone());
        for output in self.case.outputs {
            let [now, old, new] =
                [&found, &self.plain(&scenario.start), &scenario.end].map(|tree| output.of(tree));
            let name = output.name();
            if now == new || (now == old && !done) {
            } else if let (Out::Gguf(_, parts), true) = (output, killed) {
                wrong.extend(self.part(&now, &old, &new, parts));
            } else {
                let (of_old, of_new) = (tree::difference(&now, &old), tree::difference(&now, &new));
                wrong.push(format!("{name} is neither the old one ({of_old}) nor the new one ({of_new})"));
            }
            known.extend(now);
        }
        let strange = |path: &str| self.strangers.contains_key(path.split('/').next().unwrap_or_default());
        let ours =
            |path: &str| !strange(path) && self.case.outputs.iter().any(|output| is_ours(path, output));
        let rest: Tree =
            found.into_iter().filter(|(path, _)| known.contains_key(path) || !ours(path)).collect();
        let difference = tree::difference(&rest, &known);
        if !difference.is_empty() {
            wrong.push(difference);
        }
        wrong
    }

    /// Checks a partial GGUF model: files of the old or of the new one only, and not accepted as whole.
    fn part(&self, now: &Tree, old: &Tree, new: &Tree, parts: &[&str]) -> Option<String> {
        let of = |whole: &Tree| now.iter().all(|(name, bytes)| whole.get(name) == Some(bytes));
        if !of(old) && !of(new) {
            return Some(format!("parts of two models: {}", tree::difference(now, new)));
        }
        let first = parts.iter().find(|part| now.contains_key(**part))?;
        let arguments = ["verify", &format!("out/{first}"), "--strict", "--quiet"].map(str::to_owned);
        let output = self.command(&arguments).output().unwrap();
        output.status.success().then(|| format!("verify takes a part of a model for whole: {:?}", now.keys()))
    }

    /// Checks the state after the same command ran undisturbed; returns what failed.
    pub fn again(&self, scenario: &Scenario) -> Vec<String> {
        let output = self.command(&scenario.arguments).output().unwrap();
        let mut wrong = self.inputs_changed();
        if output.status.code() != Some(0) {
            wrong.push(format!("again: {}: {}", output.status, stderr(&output).trim()));
        }
        let (mut found, mut end) = (self.found(), scenario.end.clone());
        // The report of a job that was complete already has what the output records, not what the first run showed.
        let complete = "\"already_complete\": true";
        for name in self.case.outputs.iter().filter_map(|output| match output {
            Out::Report(name) => Some(*name),
            _ => None,
        }) {
            let report = fs::read_to_string(self.path("out").join(name));
            if report.is_ok_and(|report| report.contains(complete)) {
                found.remove(name);
                end.remove(name);
            }
        }
        let difference = tree::difference(&found, &end);
        if !difference.is_empty() {
            wrong.push(format!("again: {difference}"));
        }
        wrong
    }

    pub fn inputs_changed(&self) -> Vec<String> {
        let difference = tree::difference(&tree::read(&self.path("in")), &self.inputs);
        if difference.is_empty() { Vec::new() } else { vec![format!("inputs: {difference}")] }
    }

    /// Returns a tree of the folder `out` with reports in the form of [`Self::found`].
    fn plain(&self, tree: &Tree) -> Tree {
        let mut tree = tree.clone();
        for output in self.case.outputs {
            let plain = match output {
                Out::Report(_) => tree::without_numbers,
                Out::Page(_) => tree::without_digits,
                _ => continue,
            };
            if let Some(Some(bytes)) = tree.get_mut(output.name()) {
                *bytes = plain(bytes).unwrap_or_else(|| bytes.clone());
            }
        }
        tree
    }
}

/// Runs a row under every kind of fault, and next to a second process.
pub fn prove(case: &'static Case) {
    // Every try of it takes seconds.
    if case.name == "demo" && left_to_nightly() {
        return;
    }
    let (room, pace) = (Room::new(case), case.pace.sampled());
    let (mut lines, mut failures) = (Vec::new(), Vec::new());
    for scenario in room.scenarios() {
        for kind in KINDS {
            let mut figures = Figures::default();
            for (i, at) in moments(&scenario.changes, kind, pace).into_iter().enumerate() {
                let change = scenario.changes[at].replace(&*room.path("").to_string_lossy(), "");
                let wrong = room.try_fault(&scenario, kind, at, i % pace.again == 0);
                figures.count(&format!("{kind}:{at} ({})", change.replace('\t', " ")), wrong);
            }
            lines.push(line(case, &scenario, kind, &figures));
            failures.extend(figures.failures);
        }
        let figures = crate::twin::twins(&room, &scenario, pace);
        lines.push(line(case, &scenario, "twin", &figures));
        failures.extend(figures.failures);
        failures.extend(room.stranger_inside(&scenario));
    }
    println!("{}", lines.join("\n"));
    assert!(failures.is_empty(), "{}: {} failures\n{}", case.name, failures.len(), failures.join("\n"));
}

impl Room {
    /// Checks that a foreign file in an output folder stops the command, also with `--overwrite`.
    fn stranger_inside(&self, scenario: &Scenario) -> Option<String> {
        let folder = self.case.outputs.iter().find_map(|output| match output {
            Out::Folder(name) if scenario.start.contains_key(*name) => Some(*name),
            _ => None,
        })?;
        let mut start = scenario.start.clone();
        start.insert(format!("{folder}/thesis.tex"), Some(b"years".to_vec()));
        self.reset(&start);
        let output = self.command(&scenario.arguments).output().unwrap();
        let difference = tree::difference(&tree::read(&self.path("out")), &start);
        let refused = output.status.code() == Some(2) && stderr(&output).contains("thesis.tex");
        (!refused || !difference.is_empty())
            .then(|| format!("a stranger inside {folder}: {} {difference}", stderr(&output).trim()))
    }
}

impl Figures {
    pub fn count(&mut self, try_: &str, wrong: Vec<String>) {
        self.tries += 1;
        if !wrong.is_empty() {
            self.failures.push(format!("{try_}: {}", wrong.join("; ")));
        }
    }
}

pub fn line(case: &Case, scenario: &Scenario, kind: &str, figures: &Figures) -> String {
    let (tries, failures) = (figures.tries, figures.failures.len());
    format!("{:24} over {:8} {kind:6} {tries:5} tries {failures:4} failures", case.name, scenario.name)
}

/// Returns the numbers of the changes to disturb.
fn moments(changes: &[String], kind: &str, pace: Pace) -> Vec<usize> {
    if kind == "full" {
        return spread((0..changes.len()).collect(), pace.full);
    }
    let is = |at: usize, kinds: &[&str]| kinds.contains(&changes[at].split('\t').next().unwrap());
    let beside = |at: usize| changes[at].contains("/out/");
    let final_ = |at: &usize| is(*at, &["rename", "exchange", "unlink", "rmdir"]) && beside(*at);
    let content = |at: &usize| is(*at, &["write", "length"]);
    let others = (0..changes.len()).filter(|at| !final_(at) && !content(at)).step_by(pace.others);
    let writes = spread((0..changes.len()).filter(content).collect(), pace.writes);
    let mut moments: Vec<usize> = (0..changes.len()).filter(final_).chain(others).chain(writes).collect();
    moments.sort_unstable();
    moments
}

/// Returns `count` of the items, evenly from the first to the last.
pub fn spread(items: Vec<usize>, count: usize) -> Vec<usize> {
    let count = count.min(items.len());
    (0..count).map(|i| items[i * (items.len() - 1) / (count - 1).max(1)]).collect()
}

/// Returns what is wrong with the end of a disturbed process.
fn exit(kind: &str, output: &Output) -> Vec<String> {
    let mut wrong = Vec::new();
    let line = stderr(output);
    if kind == "kill" {
        if output.status.signal() != Some(9) {
            wrong.push(format!("not killed: {} {line}", output.status));
        }
        return wrong;
    }
    match output.status.code() {
        // Failures after the output is in place, such as removing the lock, are not errors.
        Some(0) => {}
        Some(3) if line.starts_with("error: ") && line.trim_end().lines().count() == 1 => {}
        _ => wrong.push(format!("{}: {}", output.status, line.trim_end())),
    }
    wrong
}

/// True if the path is, or lies in, a work folder or lock of an output.
fn is_ours(path: &str, output: &Out) -> bool {
    path.starts_with(&format!(".{}.mantissa-", output.name()))
}

/// Makes a temporary folder, in memory if that supports attributes: an fsync on disk takes longer than the
/// rest of a run.
fn folder() -> TempDir {
    let in_memory = TempDir::new_in("/dev/shm").ok().filter(|dir| keeps_attributes(dir.path()));
    in_memory.unwrap_or_else(|| TempDir::new().unwrap())
}

/// True if the file system supports the attributes by which a command recognizes its own outputs.
fn keeps_attributes(dir: &Path) -> bool {
    let run = || command().current_dir(dir).args(["schemes", "--json=report.json"]).output().unwrap();
    let both = [run(), run()].iter().all(|output| output.status.success());
    let _ = fs::remove_file(dir.join("report.json"));
    both
}

/// Foreign files and folders, with names similar to ours.
fn strangers(outputs: &[Out]) -> Tree {
    let mut tree = Tree::from([("notes.txt".to_owned(), Some(b"buy milk".to_vec()))]);
    for name in outputs.iter().map(|output| output.name()) {
        for (folder, file) in [
            (format!(".{name}.mantissa-partial-123"), "thesis.tex"),
            (format!(".{name}.mantissa-partial-4242-1"), "model.safetensors"),
            (format!(".{name}.mantissa-fit-7"), "notes"),
            (format!(".{name}.mantissa-old-1"), "notes"),
            (format!("{name}.fit"), "thesis.tex"),
        ] {
            tree.insert(format!("{folder}/{file}"), Some(b"years of work".to_vec()));
            tree.insert(folder, None);
        }
        tree.insert(format!("{name}.bak"), Some(b"the good one".to_vec()));
    }
    tree
}

pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}
