//! Evaluation of the committed tiny models against logits that transformers computed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use mantissa_eval::{EvalError, Sequence, check_sequences, evaluate, evaluate_while};
use mantissa_model::Decoder;
use mantissa_store::SafeTensors;
use mantissa_store::convention::ModelFiles;

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny").join(name)
}

fn decoder(name: &str) -> Decoder {
    Decoder::load(&ModelFiles::open(&tiny(name)).unwrap()).unwrap()
}

/// Token ids and recorded logits, one vector per sequence.
fn expected(name: &str) -> (Vec<Sequence>, Vec<Vec<f32>>) {
    let file = SafeTensors::open(&tiny(name).join("expected.safetensors")).unwrap();
    let ids = file.get("input_ids").unwrap();
    let (n, length) = (ids.shape[0], ids.shape[1]);
    let bytes = file.read(ids).unwrap();
    let ids: Vec<u32> =
        bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap()) as u32).collect();
    let logits = file.read_f32(file.get("logits").unwrap()).unwrap();
    let sequences = ids.chunks_exact(length).map(|t| Sequence { tokens: t.to_vec(), from: 1 }).collect();
    (sequences, logits.chunks_exact(logits.len() / n).map(<[f32]>::to_vec).collect())
}

/// ln-softmax in f64, straight from the definition.
fn log_probabilities(row: &[f32]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|&v| f64::from(v).exp()).sum();
    row.iter().map(|&v| f64::from(v) - sum.ln()).collect()
}

#[test]
fn the_loss_matches_the_recorded_logits() {
    for name in ["llama1-mha", "qwen3-qknorm", "bitnet-silu"] {
        let (sequences, logits) = expected(name);
        let found = evaluate(&decoder(name), None, &sequences, 2, &|_| {}).unwrap();
        let (mut sum, mut count) = (0.0, 0);
        for (sequence, logits) in sequences.iter().zip(&logits) {
            let vocabulary = logits.len() / sequence.tokens.len();
            for (row, &target) in logits.chunks_exact(vocabulary).zip(&sequence.tokens[1..]) {
                sum -= log_probabilities(row)[target as usize];
                count += 1;
            }
        }
        assert_eq!(found.tokens, count);
        assert!(
            (found.nll - sum / count as f64).abs() < 1e-5,
            "{name}: {} {}",
            found.nll,
            sum / count as f64
        );
        assert!((found.ppl - found.nll.exp()).abs() < 1e-12 && found.nll_se > 0.0);
    }
}

#[test]
fn divergence_and_agreement_follow_the_definitions() {
    // Two variants of one architecture with the same vocabulary serve as model and quantized model.
    let (sequences, p) = expected("llama-rope-linear");
    let q = {
        let model = decoder("llama3-rope");
        sequences.iter().map(|s| mantissa_eval::logits(&model, 0, s).unwrap()).collect::<Vec<_>>()
    };
    let (model, reference) = (decoder("llama3-rope"), decoder("llama-rope-linear"));
    let found = evaluate(&model, Some(&reference), &sequences, 1, &|_| {}).unwrap().comparison.unwrap();
    let (mut kl, mut same, mut count) = (0.0, 0, 0);
    for (sequence, (p, q)) in sequences.iter().zip(p.iter().zip(&q)) {
        let vocabulary = p.len() / sequence.tokens.len();
        for (p, q) in
            p.chunks_exact(vocabulary).zip(q.chunks_exact(vocabulary)).take(sequence.tokens.len() - 1)
        {
            let (log_p, log_q) = (log_probabilities(p), log_probabilities(q));
            kl += log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            same += usize::from(best(p) == best(q));
            count += 1;
        }
    }
    assert!(
        (found.kl - kl / f64::from(count)).abs() < 1e-4 * found.kl.max(1.0),
        "{} {}",
        found.kl,
        kl / f64::from(count)
    );
    assert!((found.top1 - same as f64 / f64::from(count)).abs() < 1e-12);
    assert!(found.kl_p99 >= found.kl_median && found.kl_max >= found.kl_p99);
}

#[test]
fn a_model_does_not_differ_from_itself_at_any_thread_count() {
    let (sequences, _) = expected("mistral-window");
    let model = decoder("mistral-window");
    let run = |threads| evaluate(&model, Some(&model), &sequences, threads, &|_| {}).unwrap();
    let one = run(1);
    let c = one.comparison.clone().unwrap();
    assert_eq!((c.top1, c.delta_nll, c.delta_nll_se), (1.0, 0.0, 0.0));
    assert!(c.kl.abs() < 1e-12);
    assert_eq!(run(2), one);
}

#[test]
fn only_fresh_tokens_of_overlapping_windows_count() {
    let (sequences, _) = expected("llama1-mha");
    let model = decoder("llama1-mha");
    let whole = evaluate(&model, None, &sequences[..1], 1, &|_| {}).unwrap();
    let late = Sequence { from: 10, ..sequences[0].clone() };
    let part = evaluate(&model, None, &[late], 1, &|_| {}).unwrap();
    assert_eq!(part.tokens, whole.tokens - 9);
    assert!(part.windows[0].nll.sum < whole.windows[0].nll.sum);
}

#[test]
fn different_vocabularies_and_foreign_tokens_are_refused() {
    let (sequences, _) = expected("llama1-mha");
    let (a, b) = (decoder("llama1-mha"), decoder("llama2-gqa-tied"));
    assert!(matches!(evaluate(&a, Some(&b), &sequences, 1, &|_| {}), Err(EvalError::Vocabulary { .. })));
    let foreign = [Sequence { tokens: vec![1, 4_000_000], from: 1 }];
    let error = evaluate(&a, None, &foreign, 1, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("window 0") && error.contains("4000000"), "{error}");
    // The same error before any work.
    assert_eq!(check_sequences(a.config(), &foreign).unwrap_err().to_string(), error);
    let long = [Sequence { tokens: vec![1; a.config().max_position_embeddings + 1], from: 1 }];
    let error = evaluate(&a, None, &long, 1, &|_| {}).unwrap_err().to_string();
    assert_eq!(check_sequences(a.config(), &long).unwrap_err().to_string(), error);
    check_sequences(a.config(), &sequences).unwrap();
}

#[test]
fn a_request_to_stop_ends_it_after_a_window() {
    let (sequences, _) = expected("llama1-mha");
    let many: Vec<_> = sequences.iter().cycle().take(20).cloned().collect();
    let done = AtomicUsize::new(0);
    let stop_at_three = |_| {
        let three = done.fetch_add(1, Ordering::Relaxed) == 2;
        if three { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = evaluate_while((&decoder("llama1-mha")).into(), None, &many, 1, None, &stop_at_three);
    assert!(matches!(stopped, Err(EvalError::Stopped)));
    assert_eq!(done.into_inner(), 3);
}
