//! Distillation from a teacher: the loss is the KL divergence from its predictions, and its gradient is a slope.
use crate::common::{batch, bits, one, options, trainable};
use mantissa_model::{Batch, load_config};
use mantissa_store::Output;
use mantissa_store::convention::ModelFiles;
use mantissa_train::data::{Batches, Cursor, TokenFile, TokenWriter};
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    AdamW, AdamWOptions, IGNORE_TARGET, Parameters, Policy, Teacher, TrainModel, Trainer, TrainerOptions,
    next_token_targets,
};
use tempfile::TempDir;

/// The model in `dir` with slightly other weights.
fn student(dir: &std::path::Path) -> TrainModel {
    let files = ModelFiles::open(dir).unwrap();
    let config = load_config(&files).unwrap();
    let mut params = Parameters::load(&files, &config).unwrap();
    let moved: Vec<f32> =
        params.values().iter().enumerate().map(|(i, w)| w * (1.0 + 0.2 * (i as f32 * 0.7).sin())).collect();
    params.set(0, &moved);
    TrainModel::new(config, params, options(2)).unwrap()
}

fn teacher(dir: &std::path::Path, digest: &str) -> Teacher {
    let files = ModelFiles::open(dir).unwrap();
    let longest = 32.min(load_config(&files).unwrap().max_position_embeddings);
    Teacher::load(&files, (1200, longest), digest.to_owned()).unwrap()
}

#[test]
fn a_model_has_no_divergence_from_itself() {
    let dir = &one();
    let (tokens, lens) = batch(dir, 90);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    let mut same = crate::common::train_model(dir, 1).unwrap();
    same.zero_gradients();
    let loss = same.distill_from_model(&mut teacher(dir, ""), &batch, &targets, 1.0).unwrap();
    let counted = targets.iter().filter(|target| **target != IGNORE_TARGET).count();
    assert!(loss.nll.abs() < 1e-4 && loss.targets == counted, "{loss:?}");
    assert!(same.gradients().to_f32().iter().all(|g| g.abs() < 1e-3));
}

#[test]
fn gradients_are_slopes_of_the_divergence() {
    for dir in trainable().into_iter().take(3) {
        let (tokens, lens) = batch(&dir, 90);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        let (mut model, mut teacher) = (student(&dir), teacher(&dir, ""));
        model.zero_gradients();
        model.distill_from_model(&mut teacher, &batch, &targets, 1.0).unwrap();
        let g = model.gradients().to_f32().to_vec();
        let norm = g.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let before = model.parameters().values().to_vec();
        let mut loss = |h: f64| {
            let moved: Vec<f32> = before
                .iter()
                .zip(&g)
                .map(|(w, g)| (f64::from(*w) + h * f64::from(*g) / norm) as f32)
                .collect();
            model.parameters_mut().set(0, &moved);
            model.distill_from_model(&mut teacher, &batch, &targets, 0.0).unwrap().nll
        };
        // Shorter where the divergence is steep, and so curved.
        let h = f64::min(2e-3, 0.02 / norm);
        let slope = (loss(h) - loss(-h)) / (2.0 * h);
        assert!((slope / norm - 1.0).abs() < 2e-2, "{}: slope {slope} for {norm}", dir.display());
    }
}

/// A run learns the teacher's predictions, resumes to the same bits, and only with the same teacher.
#[test]
fn runs_resume_with_their_teacher() {
    let temp = TempDir::new().unwrap();
    let dir = &one();
    let path = temp.path().join("tokens.safetensors");
    let (tokens, _) = batch(dir, 1000);
    let vocab = load_config(&ModelFiles::open(dir).unwrap()).unwrap().vocab_size;
    let mut writer = TokenWriter::new(vocab);
    writer.push(&tokens).unwrap();
    writer.finish(&Output::owned(&path), Default::default()).unwrap();
    let new = |digest: Option<&str>| {
        let model = student(dir);
        let optimizer = AdamW::new(model.parameters(), &Policy::fp32(), AdamWOptions::default()).unwrap();
        let batches = Batches::new(TokenFile::open(&path).unwrap(), 16, 11, Cursor::default()).unwrap();
        let schedule = Schedule { peak: 1e-3, warmup_steps: 0, total_steps: 12, decay: Decay::Constant };
        let options = TrainerOptions { batch: 4, accumulate: 2, schedule };
        let mut trainer = Trainer::new(model, optimizer, batches, options).unwrap();
        if let Some(digest) = digest {
            trainer.set_teacher(teacher(dir, digest)).unwrap();
        }
        trainer
    };
    let mut whole = new(Some("a"));
    let losses: Vec<f64> = (0..12).map(|_| whole.step().unwrap().loss).collect();
    assert!(losses[11] < 0.6 * losses[0], "{losses:?}");
    let saved = temp.path().join("c.safetensors");
    let mut stopped = new(Some("a"));
    (0..5).for_each(|_| assert!(stopped.step().unwrap().loss > 0.0));
    stopped.save(&Output::owned(&saved), "s").unwrap();
    let mut resumed = new(Some("a"));
    resumed.load(&saved, "s").unwrap();
    (5..12).for_each(|i| assert_eq!(resumed.step().unwrap().loss.to_bits(), losses[i].to_bits()));
    let all = |trainer: &Trainer| bits(&trainer.model().parameters().values());
    assert!(all(&resumed) == all(&whole));
    for other in [Some("b"), None] {
        let message = new(other).load(&saved, "s").unwrap_err().to_string();
        assert!(message.contains("teacher: expected the teacher of the run"), "{message}");
    }
    assert!(whole.autopsy(&mut |_| {}).unwrap_err().to_string().contains("distill"));
}
