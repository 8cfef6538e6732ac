//! Random scales and rotations leave the logits of every architecture unchanged.

use std::path::{Path, PathBuf};

use mantissa_model::{Batch, Buffers, Decoder, WeightSource, load_config};
use mantissa_num::round::random_u32;
use mantissa_store::convention::ModelFiles;

use super::sites::sites;
use super::{Folded, Folds};
use crate::rotate::{self, RotateOptions, Rotations};

fn tiny_models() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    let entries = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = entries.filter(|path| path.join("config.json").exists()).collect();
    models.sort();
    models
}

fn logits(source: &dyn WeightSource) -> Vec<f32> {
    let decoder = Decoder::load(source).unwrap();
    let config = decoder.config().clone();
    let tokens: Vec<u32> = (0..24).map(|i| random_u32(7, i) % config.vocab_size as u32).collect();
    let mut buffers = Buffers::plan(&config, tokens.len(), tokens.len()).unwrap();
    let mut logits = vec![0.0; tokens.len() * config.vocab_size];
    let mut hidden =
        decoder.forward(&Batch { tokens: &tokens, lens: &[tokens.len()] }, &mut buffers).unwrap();
    hidden.logits(0..tokens.len(), &mut logits).unwrap();
    logits
}

/// Returns the largest difference relative to the largest logit, or to 1.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let scale = a.iter().fold(1f32, |scale, v| scale.max(v.abs()));
    a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / scale
}

#[test]
fn scaled_channels_leave_the_logits_of_every_architecture() {
    let mut scaled = Vec::new();
    for path in tiny_models() {
        let files = ModelFiles::open(&path).unwrap();
        let config = load_config(&files).unwrap();
        let mut folds = Folds::default();
        let mut count = 0;
        for site in (0..config.num_hidden_layers).flat_map(|layer| sites(&config, layer)) {
            let s: Vec<f32> = (0..site.channels)
                .map(|i| (random_u32(count, i as u64) as f32 / u32::MAX as f32 * 4.0 - 2.0).exp2())
                .collect();
            site.divide(&config, &s, &mut folds);
            count += 1;
        }
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let folded = Folded::new(&files, &folds);
        let difference = difference(&logits(&files), &logits(&folded));
        assert!(difference < 1e-4, "{name}: {difference:e} with {count} sites");
        if count > 0 {
            scaled.push((name, count / config.num_hidden_layers as u64));
        }
    }
    // Sites: two norms, the values, and the inside of the MLP.
    for name in ["llama2-gqa-tied", "gemma", "mistral-window", "qwen3-qknorm", "qwen2-bias", "mqa"] {
        assert!(scaled.contains(&(name.to_owned(), 4)), "{name} of {scaled:?}");
    }
    // LayerNorms with biases, fused projections, sub-norms, one norm for attention and MLP.
    for name in ["gpt2", "gpt-neox", "phi", "phi3", "bitnet-relu2", "gemma2", "mixtral", "deepseek-v2"] {
        assert!(scaled.iter().any(|(known, _)| known == name), "{name} of {scaled:?}");
    }
}

#[test]
fn rotations_leave_the_logits_of_every_architecture() {
    let mut rotated = Vec::new();
    for path in tiny_models() {
        let files = ModelFiles::open(&path).unwrap();
        let config = load_config(&files).unwrap();
        let options = RotateOptions::default();
        let rotations = Rotations::random(&config, options);
        let folds = rotate::folds(&files, &config, options, &rotations).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let folded = Folded::new(&files, &folds);
        let difference = difference(&logits(&files), &logits(&folded));
        assert!(difference < 1e-4, "{name}: {difference:e}");
        if rotate::residual_of(&config).is_ok() {
            rotated.push(name);
        }
    }
    for name in
        ["llama2-gqa-tied", "llama3-rope", "gemma", "mistral-window", "qwen3-qknorm", "phi3", "mixtral"]
            .into_iter()
            .chain(["gpt2", "gpt-neox", "phi"])
    {
        assert!(rotated.iter().any(|known| known == name), "{name} of {rotated:?}");
    }
    for name in ["gemma2", "olmo2", "gpt-oss"] {
        assert!(!rotated.iter().any(|known| known == name), "{name} of {rotated:?}");
    }
}
