//! Runs the entry functions of the fuzz targets on mutated valid files: a fixed ten thousand per parser (of which `.ci/run`
//! takes the first quarter), the same on every machine. A fuzzer on a nightly toolchain explores for hours; this test touches every target
//! everywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

#[path = "../../../fuzz/entries.rs"]
mod entries;
#[path = "cli/support.rs"]
#[allow(dead_code)]
mod support;

/// Mutations per parser.
const ROUNDS: u64 = 10_000;

/// Returns the rounds that are tried: these, or the first quarter.
fn tried(rounds: u64) -> std::ops::Range<u64> {
    0..if support::whole() { rounds } else { rounds / 4 }
}

/// Numbers and characters that break parsers.
const WORDS: [&[u8]; 28] = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b",",
    b":",
    b"null",
    b"-1",
    b"1e999",
    b"0",
    b"true",
    b"4294967296",
    b"18446744073709551615",
    b"9223372036854775807",
    b"1e-45",
    b"{{",
    b"%}",
    b"{% for x in y %}",
    b" ~ ",
    b"|",
    b"\\u0000",
    &[0xff; 8],
    &[0; 8],
    &[0, 0, 0, 0, 0, 0, 0, 0x80],
    "\u{2028}".as_bytes(),
];

struct Random(u64, u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        mantissa_num::round::random_u32(self.0, self.1) as usize % n.max(1)
    }
}

/// Mutates the seeds into one file: changed bytes, changed ranges, or ranges of another seed.
fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let (at, len) = (random.below(bytes.len()), random.below(24));
        let end = (at + len).min(bytes.len());
        match random.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
            2 => drop(bytes.drain(at..end)),
            3 => bytes.splice(at..at, WORDS[random.below(WORDS.len())].iter().copied()).for_each(drop),
            4 => bytes.splice(at..end, WORDS[random.below(WORDS.len())].iter().copied()).for_each(drop),
            5 => bytes.truncate(at),
            6 => {
                let part = bytes[at..end].to_vec();
                let times = random.below(60);
                bytes.splice(at..at, part.repeat(times)).for_each(drop);
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                let until = (from + random.below(200)).min(other.len());
                bytes.splice(at..end, other[from..until].iter().copied()).for_each(drop);
            }
        }
    }
    bytes
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the files below a repository folder with this suffix, sorted by name.
fn seeds(folder: &str, ending: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(root().join(folder)).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_str().unwrap().ends_with(ending));
    paths.sort();
    assert!(!paths.is_empty(), "{folder}");
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn survives(name: &str, entry: fn(&[u8]), seeds: &[Vec<u8>]) {
    seeds.iter().for_each(|seed| entry(seed));
    let mut random = Random(name.len() as u64, 0);
    for round in tried(ROUNDS) {
        let input = mutate(seeds, &mut random);
        if catch_unwind(|| entry(&input)).is_err() {
            let shown = String::from_utf8_lossy(&input).into_owned();
            panic!("{name}: round {round} panicked on {} bytes: {shown:?}", input.len());
        }
    }
}

#[test]
fn safetensors() {
    survives("safetensors", entries::safetensors, &seeds("tests/data/hostile", ".safetensors"));
}

#[test]
fn gguf() {
    // A whole model with its tokenizer, and small files.
    let all = [seeds("fuzz/seeds/gguf", ".gguf"), seeds("tests/data/hostile", ".gguf")].concat();
    survives("gguf", entries::gguf, &all);
}

#[test]
fn config() {
    survives("config", entries::config, &seeds("fuzz/seeds/config", ""));
}

#[test]
fn integers() {
    survives("integers", entries::integers, &modules("tests/data/conventions"));
}

#[test]
fn floats() {
    survives("floats", entries::floats, &modules("tests/data/float_conventions"));
}

/// Returns the weight files of modules in other tools' layouts.
fn modules(folder: &str) -> Vec<Vec<u8>> {
    let folders = fs::read_dir(root().join(folder)).unwrap();
    let mut paths: Vec<_> = folders.map(|entry| entry.unwrap().path().join("model.safetensors")).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Few cases: each writes, opens and runs a model.
#[test]
fn conventions() {
    let mut random = Random(77, 0);
    for round in tried(1500) {
        let input: Vec<u8> = (0..7 + 6 * random.below(3)).map(|_| random.below(256) as u8).collect();
        assert!(catch_unwind(|| entries::conventions(&input)).is_ok(), "round {round}: {input:?}");
    }
}

#[test]
fn split() {
    let mut random = Random(78, 0);
    entries::split(&[1, 2, 2, 5]);
    for round in tried(1500) {
        let mut input = vec![1, 2, 2, 5];
        if random.below(3) == 0 {
            input[random.below(4)] = random.below(256) as u8;
        }
        input.extend((0..2 * random.below(5)).map(|_| random.below(256) as u8));
        assert!(catch_unwind(|| entries::split(&input)).is_ok(), "round {round}: {input:?}");
    }
}

#[test]
fn windows() {
    let mut random = Random(79, 0);
    let seeds = seeds("fuzz/seeds/windows", "");
    seeds.iter().for_each(|seed| entries::windows(seed));
    for round in tried(ROUNDS) {
        let input = match round % 2 {
            0 => mutate(&seeds, &mut random),
            // Many short windows, some empty, with ids inside and outside the vocabulary.
            _ => {
                let mut byte =
                    || [250, random.below(200), random.below(200), random.below(256)][random.below(4)];
                (0..40).map(|_| byte() as u8).collect()
            }
        };
        assert!(catch_unwind(|| entries::windows(&input)).is_ok(), "round {round}: {input:?}");
    }
}

#[test]
fn imatrix() {
    survives("imatrix", entries::imatrix, &seeds("fuzz/seeds/imatrix", ""));
}

#[test]
fn train() {
    survives("train", entries::train, &seeds("fuzz/seeds/train", ".toml"));
}

#[test]
fn beside() {
    survives("beside", entries::beside, &seeds("fuzz/seeds/beside", ""));
}

#[test]
fn recipe() {
    survives("recipe", entries::recipe, &seeds("fuzz/seeds/recipe", ""));
}

#[test]
fn tokenizer() {
    survives("tokenizer", entries::tokenizer, &seeds("fuzz/seeds/tokenizer", ""));
}

#[test]
fn template() {
    survives("template", entries::template, &seeds("fuzz/seeds/template", ""));
}
