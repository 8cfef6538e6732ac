//! Predicted bytes of the weights beside the bytes of a loaded model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use common::tiny;
use mantissa_model::load_config;
use mantissa_runtime::FastModel;
use mantissa_runtime::footprint::Footprint;
use mantissa_store::convention::ModelFiles;

/// Everything that a decode step reads is predicted: norms and routers are too small to count here.
#[test]
fn weights_are_predicted_before_they_are_loaded() {
    let mut dirs = tiny();
    let conventions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/conventions");
    dirs.extend(std::fs::read_dir(conventions).unwrap().map(|entry| entry.unwrap().path()));
    let mut compared = 0;
    for dir in dirs.into_iter().filter(|dir| dir.is_dir()) {
        let Ok(files) = ModelFiles::open(&dir) else { continue };
        let Ok(config) = load_config(&files) else { continue };
        let Ok(model) = FastModel::load(&files, 1) else { continue };
        let (found, expected) =
            (Footprint::of(&files, &config, 1), mantissa_runtime::measure::weight_bytes(&model));
        // An embedding that is not tied is no part of a step; vectors are in the prediction only.
        let untied =
            if config.tie_word_embeddings { 0 } else { 4 * config.vocab_size * config.hidden_size } as u64;
        let most = expected + untied + expected / 5 + (64 << 10);
        let name = dir.display();
        assert!(found.weights >= expected - expected / 20, "{name}: {} of {expected}", found.weights);
        assert!(found.weights <= most, "{name}: {} of {expected}, at most {most}", found.weights);
        compared += 1;
    }
    assert!(compared >= 10, "{compared}");
}
