//! One forward: training's logits against evaluation's, and what training refuses.
use crate::common::{batch, bits, evaluate, name, shared_out, tiny, train_model, trainable};
use mantissa_model::Batch;
use mantissa_store::convention::ModelFiles;
use mantissa_train::TrainError;

#[test]
fn training_and_evaluation_give_the_same_bits() {
    for (i, dir) in trainable().into_iter().enumerate() {
        let files = ModelFiles::open(&dir).unwrap();
        for (j, tokens) in [1, 20, 65, 66, 600, 1200].into_iter().enumerate() {
            let (tokens, lens) = batch(&dir, tokens);
            let batch = Batch { tokens: &tokens, lens: &lens };
            let expected = bits(&evaluate(&files, &batch));
            // In a sample each model and length has one of these.
            for threads in shared_out([1, 2, 3], 3, i + j) {
                let mut model = train_model(&dir, threads).unwrap();
                let mut logits = vec![f32::NAN; expected.len()];
                model.logits(&batch, &mut logits).unwrap();
                let same = bits(&logits) == expected;
                assert!(same, "{}, {} tokens, {threads} threads", name(&dir), tokens.len());
            }
        }
    }
}

/// Architectures with a feature that has no backward are refused, and the feature is named.
#[test]
fn untrainable_models_are_refused() {
    let refused: Vec<_> = tiny()
        .iter()
        .filter_map(|dir| match train_model(dir, 1) {
            Err(TrainError::Unsupported { field, found, allowed }) => {
                assert!(!found.is_empty() && !allowed.is_empty());
                Some((name(dir).to_string(), field))
            }
            Err(error) => panic!("{}: {error}", dir.display()),
            Ok(_) => None,
        })
        .collect();
    assert!(trainable().len() > 32, "{refused:?}");
    for (name, feature) in [
        ("qwen3-5", "recurrent layers"),
        ("gemma4", "heads that differ by layer"),
        ("gemma3n", "keys and values shared by layers"),
        ("nemotron-h-latent", "experts without a gate"),
        ("cohere2-moe", "the mean of routed and shared experts"),
        ("granite-hybrid-moe", "experts beside an MLP"),
        ("qwen3-vl", "a multimodal model around it"),
        ("deepseek-v2", "latent attention"),
        ("deepseek-v3", "latent attention"),
        ("gpt-oss", "experts stored as one tensor"),
        ("glm4-moe", "correction of router scores"),
        ("granite", "a factor of the logits"),
        ("cohere2", "rotation of adjacent pairs"),
        ("ernie4-5", "rotation of adjacent pairs"),
        ("glm4", "rotation of adjacent pairs"),
    ] {
        assert!(refused.contains(&(name.to_owned(), feature)), "{name}: {refused:?}");
    }
}
