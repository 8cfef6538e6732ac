//! Helpers of the integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::path::{Path, PathBuf};

use mantissa_model::{Batch, Buffers, Decoder};
use mantissa_store::SafeTensors;
use mantissa_store::convention::ModelFiles;

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The committed tiny models.
pub fn tiny() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(workspace().join("tests/data/tiny")).unwrap();
    let mut dirs: Vec<_> = entries.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    assert!(!dirs.is_empty());
    dirs
}

/// Takes every `step`th of `all`, the first included; everything if sweeps run whole, as in `.ci/nightly`.
pub fn sampled<T>(all: impl IntoIterator<Item = T>, step: usize) -> impl Iterator<Item = T> {
    let whole = std::env::var_os("MANTISSA_TESTS").is_some_and(|tests| tests == "all");
    all.into_iter().step_by(if whole { 1 } else { step })
}

/// A file of the data beside the repository; `None`, with a message on stderr, if it does not exist.
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = workspace().join("../shared").join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: no ../shared/{name}");
    None
}

pub fn load(dir: &Path) -> Decoder {
    let files = ModelFiles::open(dir).unwrap();
    Decoder::load(&files).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

/// Recorded inputs `[sequences][tokens]` and logits `[sequences, tokens, vocabulary]`.
pub fn expected(dir: &Path) -> (Vec<Vec<u32>>, Vec<f32>) {
    let file = SafeTensors::open(&dir.join("expected.safetensors")).unwrap();
    let tensor = |name: &str| file.tensors().iter().find(|t| t.name == name).unwrap();
    let (ids, logits) = (tensor("input_ids"), tensor("logits"));
    let bytes = file.read(ids).unwrap();
    let flat: Vec<u32> =
        bytes.as_chunks::<8>().0.iter().map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect();
    let sequences = flat.chunks(ids.shape[1]).map(<[u32]>::to_vec).collect();
    (sequences, file.read_f32(logits).unwrap())
}

/// Logits of every token of `sequences`, run as one batch.
pub fn logits(decoder: &Decoder, sequences: &[Vec<u32>]) -> Vec<f32> {
    let tokens = sequences.concat();
    let lens: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let longest = lens.iter().copied().max().unwrap();
    let mut buffers = Buffers::plan(decoder.config(), tokens.len(), longest).unwrap();
    let mut out = vec![f32::NAN; tokens.len() * decoder.config().vocab_size];
    let mut hidden = decoder.forward(&Batch { tokens: &tokens, lens: &lens }, &mut buffers).unwrap();
    hidden.logits(0..tokens.len(), &mut out).unwrap();
    out
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
