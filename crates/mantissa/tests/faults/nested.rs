//! An output inside another output: one of two processes writes it and the other is refused before it works, in either
//! order, with both paths in the message. What a process has finished stays whole.

use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};

use tempfile::TempDir;

use crate::harness::spread;
use crate::support::{command, stderr};
use crate::tree::{self, Tree};
use crate::twin::{signal, stopped};

/// Changes before which one process is stopped while the other runs.
const STOPS: usize = 8;

/// Two commands, the output of the second inside that of the first, with the names of both outputs.
struct Pair {
    name: &'static str,
    outer: &'static str,
    inner: &'static str,
    outputs: [&'static str; 2],
}

const QUANTIZE: &str = "quantize in/model --recipe rtn-int4-g8 --verify=false --out out/o";

const PAIRS: [Pair; 5] = [
    Pair {
        name: "folders",
        outer: QUANTIZE,
        inner: "quantize in/model --recipe rtn-int8-g8 --format native --verify=false --out out/o/native",
        outputs: ["out/o", "out/o/native"],
    },
    Pair {
        name: "a folder two levels below",
        outer: "synth --preset tiny --hidden 32 --layers 1 --ffn 64 --heads 2 --kv-heads 1 --vocab 64 --out out/o",
        inner: "quantize in/model --recipe rtn-int8-g8 --verify=false --out out/o/a/b",
        outputs: ["out/o", "out/o/a/b"],
    },
    Pair {
        name: "a GGUF file",
        outer: QUANTIZE,
        inner: "quantize in/model --recipe rtn-q8_0 --format gguf --verify=false --out out/o/m.gguf",
        outputs: ["out/o", "out/o/m.gguf"],
    },
    Pair {
        name: "a fit",
        outer: "fit in/model --schemes int4-g8,int8-g8 --tokens in/windows.json:w --budget 11bpw --out out/o",
        inner: "quantize in/model --recipe rtn-int8-g8 --verify=false --out out/o/native",
        outputs: ["out/o", "out/o/native"],
    },
    Pair { name: "a run", outer: QUANTIZE, inner: "train in/run.toml", outputs: ["out/o", "out/o/run"] },
];

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Place(TempDir::new().unwrap());
        fs::create_dir(place.at("in")).unwrap();
        place.succeed(
            "synth --preset tiny --hidden 32 --layers 1 --ffn 64 --heads 2 --kv-heads 1 --vocab 64 --context 64 --out in/model",
        );
        let window = |seed: u64| (0..16).map(|i| (i * 7 + seed * 3) % 64).collect::<Vec<_>>();
        let sets = serde_json::json!({ "w": (1..5).map(window).collect::<Vec<_>>() });
        fs::write(place.at("in/windows.json"), sets.to_string()).unwrap();
        let tokenizer = crate::support::root().join("tests/data/tiny/llama2-gqa-tied");
        let mut model: serde_json::Value =
            serde_json::from_slice(&fs::read(tokenizer.join("config.json")).unwrap()).unwrap();
        for (key, value) in [("hidden_size", 16), ("intermediate_size", 16), ("num_hidden_layers", 1)] {
            model[key] = value.into();
        }
        for (key, value) in [("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 8)] {
            model[key] = value.into();
        }
        fs::write(place.at("in/config.json"), model.to_string()).unwrap();
        fs::write(place.at("in/text.txt"), "A line is before another.\n".repeat(40)).unwrap();
        let toml = format!(
            "out = \"../out/o/run\"\n[model]\nconfig = \"config.json\"\ntokenizer = {:?}\n[data]\nfiles = [\"text.txt\"]\n\
             length = 8\nbatch = 2\n[precision]\npolicy = \"fp32\"\n[optimizer]\nlr = 5e-3\n[schedule]\nsteps = 2\n",
            tokenizer.to_str().unwrap()
        );
        fs::write(place.at("in/run.toml"), toml).unwrap();
        place
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, line: &str) -> std::process::Command {
        let mut command = command();
        command.args(line.split(' ')).args(["--quiet", "--threads", "1"]).current_dir(self.0.path());
        command.env("TMPDIR", self.0.path()).env_remove("MANTISSA_FAULT").env_remove("MANTISSA_TRACE");
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn succeed(&self, line: &str) {
        let output = self.command(line).output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
    }

    /// Runs the command alone; returns its number of changes and its output.
    fn alone(&self, line: &str, output: &str) -> (usize, Tree) {
        self.reset();
        let trace = self.at("trace");
        let done = self.command(line).env("MANTISSA_TRACE", &trace).output().unwrap();
        assert!(done.status.success(), "{line}: {}", stderr(&done));
        let changes = fs::read_to_string(&trace).unwrap().lines().count();
        fs::remove_file(&trace).unwrap();
        (changes, self.written(output))
    }

    fn reset(&self) {
        tree::put(&self.at("out"), &Tree::new());
    }

    /// Returns the weights of an output; a run's logs hold times.
    fn written(&self, output: &str) -> Tree {
        let (all, below) = (tree::read(&self.at("out")), output.strip_prefix("out/").unwrap());
        let is_weights = |name: &str| name.ends_with(".safetensors") || name.ends_with(".gguf");
        let inside = |name: &str| Path::new(name).starts_with(below) && is_weights(name);
        all.into_iter().filter(|(name, _)| inside(name)).collect()
    }
}

/// True if the process was refused as nested, with both paths.
fn is_refused(output: &Output, pair: &Pair) -> bool {
    let said = stderr(output);
    let paths = pair.outputs.iter().all(|path| said.contains(path));
    let nested = said.contains("lies inside") || said.contains("contains");
    output.status.code() == Some(2) && paths && nested && said.contains("fix: choose a path")
}

/// True if the process found the output of another that had ended before it began.
fn came_later(output: &Output) -> bool {
    output.status.code() == Some(2) && stderr(output).contains("expected nothing at this path")
}

/// Checks the end of both processes, whose outputs are `expected` if they are written; returns what is wrong. Of two that
/// start `at_once` one may end before the other begins.
fn wrong(place: &Place, pair: &Pair, ends: [&Output; 2], expected: [&Tree; 2], at_once: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((end, expected), path) in ends.into_iter().zip(expected).zip(pair.outputs) {
        let found = place.written(path);
        // What the outer output holds besides is the inner one.
        let whole = expected.iter().all(|(name, bytes)| found.get(name) == Some(bytes));
        if end.status.success() && !whole {
            wrong.push(format!("{path} is written and lost: {}", tree::difference(&found, expected)));
        } else if !(end.status.success() || is_refused(end, pair) || at_once && came_later(end)) {
            wrong.push(format!("{path}: {}: {}", end.status, stderr(end).trim()));
        }
    }
    if ends.iter().filter(|end| end.status.success()).count() != 1 {
        wrong.push(format!("expected one writer: {:?}", ends.map(|end| end.status.code())));
    }
    let left = tree::read(&place.at("out")).into_keys().filter(|name| {
        let file = name.rsplit('/').next().unwrap_or_default();
        file.starts_with('.') && file.contains(".mantissa-")
    });
    wrong.extend(left.map(|name| format!("{name} is left")));
    wrong
}

fn start(place: &Place, line: &str, stop: Option<usize>) -> Child {
    let mut command = place.command(line);
    if let Some(at) = stop {
        command.env("MANTISSA_FAULT", format!("stop:{at}"));
    }
    command.spawn().unwrap()
}

/// Stops one process before several of its changes and runs the other meanwhile, in both orders, then both at once.
fn prove(name: &str) {
    let pair = PAIRS.iter().find(|pair| pair.name == name).unwrap();
    let place = Place::new();
    let lines = [pair.outer, pair.inner];
    let alone = [0, 1].map(|i| place.alone(lines[i], pair.outputs[i]));
    let expected = [&alone[0].1, &alone[1].1];
    let (mut tries, mut failures) = (0, Vec::new());
    for first in [0, 1] {
        // The first changes take the lock.
        let mut moments: Vec<usize> = (0..6).collect();
        moments.extend(spread((6..alone[first].0).collect(), STOPS));
        for at in moments {
            place.reset();
            let mut child = start(&place, lines[first], Some(at));
            assert!(stopped(&mut child), "{name}: has not stopped before change {at}");
            let second = start(&place, lines[1 - first], None).wait_with_output().unwrap();
            signal(&child, "CONT");
            let ended = child.wait_with_output().unwrap();
            let ends = if first == 0 { [&ended, &second] } else { [&second, &ended] };
            let order = ["outer", "inner"][first];
            let found = wrong(&place, pair, ends, expected, false);
            failures.extend(found.into_iter().map(|what| format!("{order} stopped before {at}: {what}")));
            tries += 1;
        }
    }
    for round in 0..4 {
        place.reset();
        let mut order = [0, 1];
        order.rotate_left(round % 2);
        let children = order.map(|i| start(&place, lines[i], None));
        let mut ends = children.map(|child| child.wait_with_output().unwrap());
        ends.rotate_left(round % 2);
        let found = wrong(&place, pair, [&ends[0], &ends[1]], expected, true);
        failures.extend(found.into_iter().map(|what| format!("at once, round {round}: {what}")));
        tries += 1;
    }
    println!("{name}: {tries} tries, {} failures", failures.len());
    assert!(failures.is_empty(), "{name}: {} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn a_folder_inside_a_folder_has_one_writer() {
    prove("folders");
}

#[test]
fn a_folder_below_a_folder_of_another_command_has_one_writer() {
    prove("a folder two levels below");
}

#[test]
fn a_gguf_file_inside_a_folder_has_one_writer() {
    prove("a GGUF file");
}

#[test]
fn a_folder_inside_a_fit_has_one_writer() {
    prove("a fit");
}

#[test]
fn a_run_inside_a_folder_has_one_writer() {
    prove("a run");
}

/// Reports lie where their readers look for them, and two runs side by side are apart.
#[test]
fn what_is_no_nested_output_is_written() {
    let place = Place::new();
    place.reset();
    place.succeed(QUANTIZE);
    place.succeed("inspect out/o --json=out/o/report.json");
    let refused = place.command(PAIRS[0].inner).output().unwrap();
    assert!(is_refused(&refused, &PAIRS[0]), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("a finished output"), "{}", stderr(&refused));
    place.succeed("train in/run.toml --set out=../out/runs/run");
    let mut child = start(&place, "train in/run.toml --set out=../out/runs/run --resume", Some(6));
    assert!(stopped(&mut child));
    // The lock of a run named `run` is not that of the folder it lies in.
    place.succeed("train in/run.toml --set out=../out/runs/other");
    let line = "quantize in/model --recipe rtn-int8-g8 --verify=false --out out/runs/run/q";
    let output = place.command(line).output().unwrap();
    assert!(stderr(&output).contains(&format!("which process {} ", child.id())), "{}", stderr(&output));
    place.succeed("report out/runs/run --out out/runs/run/page.html");
    signal(&child, "CONT");
    assert!(child.wait_with_output().unwrap().status.success());
    // A run keeps what others write in its folder once it is done.
    place.succeed(line);
}
