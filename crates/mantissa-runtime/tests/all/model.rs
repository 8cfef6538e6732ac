//! The fast model beside the reference decoder.
use crate::common::{INTEGERS, load, load_as, prompt, reference, tiny};
use mantissa_model::{Batch, Buffers, Decoder};
use mantissa_runtime::Single;
use mantissa_store::convention::ModelFiles;

/// Logits of every architecture equal the reference decoder's, up to the rounding of the fast contract.
#[test]
fn logits_are_close_to_the_reference() {
    for dir in tiny() {
        let decoder = Decoder::load(&ModelFiles::open(&dir).unwrap()).unwrap();
        let model = load(&dir, 2);
        let tokens = [prompt(&model, 1, 20), prompt(&model, 2, 7)].concat();
        let batch = Batch { tokens: &tokens, lens: &[20, 7] };
        let mut buffers = Buffers::plan(decoder.config(), tokens.len(), 20).unwrap();
        let mut expected = vec![0.0; tokens.len() * decoder.config().vocab_size];
        decoder.forward(&batch, &mut buffers).unwrap().logits(0..tokens.len(), &mut expected).unwrap();

        let mut buffers = model.plan_whole(tokens.len(), 20).unwrap();
        model.whole(&batch, &mut buffers).unwrap();
        let mut found = vec![0.0; expected.len()];
        model.logits(&(0..tokens.len()).collect::<Vec<_>>(), &mut found, &mut buffers).unwrap();
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let error: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
        let relative = norm(&error) / norm(&expected);
        assert!(relative < 0.02, "{}: {relative}", dir.display());
    }
}

/// Rows of a pass do not depend on each other, nor on the number of threads.
#[test]
fn a_sequence_has_the_same_bits_in_any_batch_and_on_any_thread_count() {
    for (dir, scheme) in tiny().into_iter().zip(INTEGERS.into_iter().cycle()) {
        let models = [load_as(&dir, Some(scheme), 1), load_as(&dir, Some(scheme), 3)];
        // Stacked experts stay as they are: floats, which many tokens multiply in another order than few.
        if models[0].linears().any(|linear| !linear.choice().kernel.contains("int8")) {
            continue;
        }
        let long = models[0].config().max_position_embeddings.min(70);
        let sequences = [prompt(&models[0], 1, 20), prompt(&models[0], 2, 1), prompt(&models[0], 3, long)];
        let logits = |model: &mantissa_runtime::FastModel, sequences: &[Vec<u32>]| {
            let (tokens, lens) = (sequences.concat(), sequences.iter().map(Vec::len).collect::<Vec<_>>());
            let mut buffers = model.plan_whole(tokens.len(), long).unwrap();
            model.whole(&Batch { tokens: &tokens, lens: &lens }, &mut buffers).unwrap();
            let mut out = vec![0.0; tokens.len() * model.config().vocab_size];
            model.logits(&(0..tokens.len()).collect::<Vec<_>>(), &mut out, &mut buffers).unwrap();
            out
        };
        let together = logits(&models[1], &sequences);
        let apart: Vec<f32> =
            sequences.iter().flat_map(|s| logits(&models[0], std::slice::from_ref(s))).collect();
        assert!(together == apart, "{} {scheme}", dir.display());
    }
}

/// Attention over cached latents gives what attention over heads expanded from stored latents gives, in passes of any
/// lengths.
#[test]
fn cached_latents_attend_like_expanded_heads() {
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    for dir in tiny().into_iter().filter(|dir| dir.display().to_string().contains("deepseek")) {
        let (mut decoder, mut model) = (reference(&dir), load(&dir, 2));
        let (tokens, vocabulary) = (prompt(&model, 1, 300), model.config().vocab_size);
        let batch = Batch { tokens: &tokens, lens: &[tokens.len()] };
        let mut buffers = Buffers::plan(decoder.config(), tokens.len(), tokens.len()).unwrap();
        let all = ["f32", "f16", "bf16", "int8", "fp8", "int4-head-asym", "int4-g4-asym", "nf4-g4"];
        // Index keys in f16 may change the choice of tokens.
        let attends = model.config().attention_layers().next().is_some();
        let sparse = dir.display().to_string().contains("sparse") || !attends;
        for kv in &all[..if sparse { 1 } else { all.len() }] {
            let policy = kv.parse().unwrap();
            decoder.set_kv(&policy).unwrap();
            let mut expected = vec![0.0; tokens.len() * vocabulary];
            let mut hidden = decoder.forward(&batch, &mut buffers).unwrap();
            hidden.logits(0..tokens.len(), &mut expected).unwrap();
            model.set_kv(&policy).unwrap();
            let mut single = Single::new(&model, tokens.len(), tokens.len()).unwrap();
            let mut found = vec![0.0; expected.len()];
            let (mut rest, mut out) = (&tokens[..], &mut found[..]);
            for len in [20, 1, 3, 1, 100, 16, 1, 17, 1, 139, 1] {
                let (now, later) = rest.split_at(len);
                let (logits, others) = std::mem::take(&mut out).split_at_mut(len * vocabulary);
                single.extend(now).unwrap();
                single.logits(0..len, logits).unwrap();
                (rest, out) = (later, others);
            }
            assert!(rest.is_empty());
            let error: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
            let relative = norm(&error) / norm(&expected);
            println!("{} {kv}: {relative}, {} bytes", dir.display(), model.kv_bytes_per_token());
            // The rotated parts of quantized tokens are in f16, which may change the choice of experts of a token.
            let most = if *kv == "f32" { 1e-5 } else { 0.02 };
            assert!(relative < most, "{} {kv}: {relative}", dir.display());
        }
    }
}
