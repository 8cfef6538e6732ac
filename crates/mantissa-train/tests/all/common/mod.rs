//! Support code shared by the integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::path::{Path, PathBuf};

use mantissa_model::{Batch, Buffers, Decoder, WeightSource, load_config};
use mantissa_store::SafeTensors;
use mantissa_store::convention::ModelFiles;
use mantissa_train::{LayerTrainer, Options, Policy, TrainError, TrainModel};

pub fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
}

/// The committed tiny models.
pub fn tiny() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data().join("tiny")).unwrap();
    let mut dirs: Vec<_> = entries.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    assert!(!dirs.is_empty());
    dirs
}

pub fn name(dir: &Path) -> &str {
    dir.file_name().unwrap().to_str().unwrap()
}

pub fn options(threads: usize) -> Options {
    Options { max_tokens: 1200, max_len: 32, threads, policy: Policy::fp32() }
}

pub fn train_model(dir: &Path, threads: usize) -> Result<TrainModel, TrainError> {
    TrainModel::load(&ModelFiles::open(dir).unwrap(), options(threads))
}

/// The tiny models that can be trained.
pub fn trainable() -> Vec<PathBuf> {
    tiny().into_iter().filter(|dir| train_model(dir, 1).is_ok()).collect()
}

/// The tiny model of tests that need any one: by its name, so that a new model does not change them.
pub fn one() -> PathBuf {
    let named = tiny().into_iter().find(|dir| dir.ends_with("arcee"));
    named.expect("tests/data/tiny has arcee")
}

/// Takes every `step`th of `all`, the first included; everything if sweeps run whole, as in `.ci/nightly`.
pub fn sampled<T>(all: impl IntoIterator<Item = T>, step: usize) -> impl Iterator<Item = T> {
    shared_out(all, step, 0)
}

/// As [`sampled`], from another place on: members of an outer sweep, each with its own `offset`, share `all` among them.
pub fn shared_out<T>(
    all: impl IntoIterator<Item = T>,
    step: usize,
    offset: usize,
) -> impl Iterator<Item = T> {
    let whole = std::env::var_os("MANTISSA_TESTS").is_some_and(|tests| tests == "all");
    let mine = move |place: usize| whole || place % step == offset % step;
    all.into_iter().enumerate().filter(move |(place, _)| mine(*place)).map(|(_, item)| item)
}

/// The tiny models whose layers can be trained alone.
pub fn plain() -> Vec<PathBuf> {
    let config = |dir: &Path| load_config(&ModelFiles::open(dir).unwrap()).unwrap();
    trainable().into_iter().filter(|dir| LayerTrainer::check(&config(dir)).is_ok()).collect()
}

/// The sequences recorded with a tiny model.
pub fn sequences(dir: &Path) -> Vec<Vec<u32>> {
    let file = SafeTensors::open(&dir.join("expected.safetensors")).unwrap();
    let ids = file.tensors().iter().find(|t| t.name == "input_ids").unwrap();
    let bytes = file.read(ids).unwrap();
    let flat: Vec<u32> =
        bytes.as_chunks::<8>().0.iter().map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect();
    flat.chunks(ids.shape[1]).map(<[u32]>::to_vec).collect()
}

/// `tokens` tokens made of the recorded ones, and lengths that add up to it: short, empty and long sequences.
pub fn batch(dir: &Path, tokens: usize) -> (Vec<u32>, Vec<usize>) {
    let recorded = sequences(dir).concat();
    let all = (0..tokens).map(|i| recorded[(i * 7 + i / 13) % recorded.len()]).collect();
    let (mut lens, mut left) = (Vec::new(), tokens);
    for len in [1, 9, 0, 11, 2].into_iter().cycle() {
        let len = left.min(len);
        lens.push(len);
        left -= len;
        if left == 0 {
            return (all, lens);
        }
    }
    unreachable!()
}

/// Logits in evaluation.
pub fn evaluate(source: &dyn WeightSource, batch: &Batch<'_>) -> Vec<f32> {
    let decoder = Decoder::load(source).unwrap();
    let mut buffers =
        Buffers::plan(decoder.config(), batch.tokens.len(), 32.min(decoder.config().max_position_embeddings))
            .unwrap();
    let mut out = vec![f32::NAN; batch.tokens.len() * decoder.config().vocab_size];
    decoder.forward(batch, &mut buffers).unwrap().logits(0..batch.tokens.len(), &mut out).unwrap();
    out
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
