//! Runs the binary and makes its inputs.

#[path = "strict_json.rs"]
pub mod strict_json;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use mantissa_kernels::Isa;
use mantissa_store::{Dtype, SafeTensors, SafetensorsWriter, TensorSpec};
use serde_json::Value;

/// Returns the binary, ready for arguments.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mantissa"));
    command.stdin(Stdio::null()).env_remove("MANTISSA_ISA").env_remove("COLUMNS");
    command
}

/// Runs the binary.
pub fn mantissa<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    command().args(arguments).output().unwrap()
}

/// Runs the binary, which must succeed; returns its standard output.
pub fn succeed<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    let output = mantissa(arguments);
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the binary, which must succeed and print one JSON object.
pub fn json<S: AsRef<OsStr>>(arguments: &[S]) -> Value {
    let text = succeed(arguments);
    let value = strict_json::parse(&text).unwrap();
    assert!(value.is_object(), "{text}");
    value
}

/// Runs the binary, which must exit with `code` and one line on standard error that starts with `error: `;
/// returns that line.
pub fn fail<S: AsRef<OsStr>>(code: i32, arguments: &[S]) -> String {
    let output = mantissa(arguments);
    let line = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{line}");
    assert!(line.starts_with("error: ") && line.trim_end().lines().count() == 1, "{line}");
    line
}

/// Returns the binary with these arguments, ready to run on a terminal of its own, whose screen is standard output; says so if
/// this machine has no util-linux to make one.
pub fn on_terminal(arguments: &[&str]) -> Option<Command> {
    let made = Command::new("script").arg("--version").output().is_ok_and(|output| output.status.success());
    if !made {
        println!("skipped: script of util-linux is not there");
        return None;
    }
    let quoted = |word: &&str| format!("'{}'", word.replace('\'', "'\\''"));
    let words: Vec<String> = [env!("CARGO_BIN_EXE_mantissa")].iter().chain(arguments).map(quoted).collect();
    let mut command = Command::new("script");
    command.args(["-qec", &words.join(" "), "/dev/null"]).env("SHELL", "/bin/sh");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(command)
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// True if sweeps run whole, as in `.ci/nightly`; otherwise they take a sample.
pub fn whole() -> bool {
    std::env::var_os("MANTISSA_TESTS").is_some_and(|tests| tests == "all")
}

/// True if this member of a sweep runs in `.ci/nightly` only; says so.
pub fn left_to_nightly() -> bool {
    if !whole() {
        eprintln!("left to .ci/nightly (MANTISSA_TESTS=all runs it)");
    }
    !whole()
}

/// Takes every `step`th of `all`, the first included; everything if sweeps run [`whole`].
pub fn sampled<T>(all: impl IntoIterator<Item = T>, step: usize) -> impl Iterator<Item = T> {
    all.into_iter().step_by(if whole() { 1 } else { step })
}

/// Takes, of `all`, what is `offset` places after every `step`th, so that members of an outer sweep, each with its own offset,
/// share `all` among them; everything if sweeps run [`whole`].
pub fn shared_out<T>(
    all: impl IntoIterator<Item = T>,
    step: usize,
    offset: usize,
) -> impl Iterator<Item = T> {
    let mine = move |place: usize| whole() || place % step == offset % step;
    all.into_iter().enumerate().filter(move |(place, _)| mine(*place)).map(|(_, item)| item)
}

/// Returns instruction set levels, each with numbers of threads: one and two if sweeps run [`whole`]; otherwise one at the plain
/// level, which takes longest, and two at the others, among which equal bytes show what they show for all.
pub fn levels_and_threads() -> Vec<(Isa, &'static str)> {
    let levels: Vec<Isa> = Isa::available().collect();
    let all = levels.iter().flat_map(|level| ["1", "2"].map(|threads| (*level, threads)));
    let sample = |level: Isa, threads: &str| (level == levels[0]) == (threads == "1");
    all.filter(|(level, threads)| whole() || levels.len() == 1 || sample(*level, threads)).collect()
}

/// Returns the models of every architecture variant, in order of their names.
pub fn tiny_models() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("tests/data/tiny")).unwrap();
    let mut all: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

/// Returns a test path as text; it is UTF-8.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns a folder of the data that may exist next to the checkout; prints a note if it does not.
pub fn shared(folder: &str) -> Option<PathBuf> {
    let path = root().join("../shared").join(folder);
    if !path.is_dir() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

/// Writes a safetensors file.
pub fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) {
    let specs =
        tensors.iter().map(|(name, dtype, shape, _)| TensorSpec::new(*name, *dtype, *shape)).collect();
    let mut writer = SafetensorsWriter::create(path, specs, BTreeMap::new()).unwrap();
    for (name, _, _, bytes) in tensors {
        writer.write(name, bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes a safetensors file of one F32 tensor `x`.
pub fn write_x(path: &Path, shape: &[usize], x: &[f32]) {
    write(path, &[("x", Dtype::F32, shape, le(x))]);
}

pub fn le(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Opens a safetensors file.
pub struct File(SafeTensors);

impl File {
    pub fn open(path: &Path) -> Self {
        File(SafeTensors::open(path).unwrap())
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some()
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.0.tensors().iter().map(|t| t.name.clone()).collect();
        names.sort();
        names
    }

    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.0.metadata().get(key).map(String::as_str)
    }

    pub fn dtype(&self, name: &str) -> Dtype {
        self.0.get(name).expect(name).dtype
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.0.get(name).expect(name).shape.clone()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.read(self.0.get(name).expect(name)).unwrap()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.0.read_f32(self.0.get(name).expect(name)).unwrap()
    }

    pub fn i32(&self, name: &str) -> Vec<i32> {
        assert_eq!(self.dtype(name), Dtype::I32, "{name}");
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
    }
}

/// Returns values with signs, zeros, a wide range and no two equal rows; always the same.
pub fn values(n: usize) -> Vec<f32> {
    (0..n as u64)
        .map(|i| {
            let word = mantissa_num::round::random_u32(11, i);
            let magnitude = ((word >> 8) as f32 / 16_777_216.0) * [0.01, 0.1, 1.0, 3.0][(word & 3) as usize];
            if word & 4 == 0 { magnitude } else { -magnitude }
        })
        .collect()
}
