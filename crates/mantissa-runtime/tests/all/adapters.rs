//! Adapters beside prepared weights.
use std::path::PathBuf;

use mantissa_model::{Adapted, Batch, Buffers, Decoder};
use mantissa_runtime::FastModel;
use mantissa_store::AdapterFiles;

use crate::common::{longer, tiny};

/// Adapters and their bases (`tests/data/make_peft.py`).
const ADAPTERS: [(&str, &str); 6] = [
    ("lora", "llama2-gqa-tied"),
    ("dora", "mqa"),
    ("patterns", "llama1-mha"),
    ("fused", "phi3"),
    ("conv1d", "gpt2"),
    ("saved", "smollm3"),
];

fn load(name: &str, of: &str, scheme: Option<&str>, threads: usize) -> (FastModel, Decoder) {
    let folder: PathBuf = tiny().into_iter().find(|dir| dir.ends_with(of)).unwrap();
    let peft = folder.join("../../peft").join(name);
    let base = longer(&folder, scheme);
    let adapter = AdapterFiles::open(&peft).unwrap().load().unwrap();
    let adapted = Adapted::new(&base, adapter, name).unwrap();
    (FastModel::load(&adapted, threads).unwrap(), Decoder::load(&adapted).unwrap())
}

fn logits(model: &FastModel, sequences: &[Vec<u32>]) -> Vec<f32> {
    let (tokens, lens) = (sequences.concat(), sequences.iter().map(Vec::len).collect::<Vec<_>>());
    let longest = lens.iter().copied().max().unwrap();
    let mut buffers = model.plan_whole(tokens.len(), longest).unwrap();
    model.whole(&Batch { tokens: &tokens, lens: &lens }, &mut buffers).unwrap();
    let mut out = vec![0.0; tokens.len() * model.config().vocab_size];
    model.logits(&(0..tokens.len()).collect::<Vec<_>>(), &mut out, &mut buffers).unwrap();
    out
}

fn sequences(model: &FastModel) -> Vec<Vec<u32>> {
    let long = model.config().max_position_embeddings.min(40);
    vec![
        crate::common::prompt(model, 1, 20),
        crate::common::prompt(model, 2, 1),
        crate::common::prompt(model, 3, long),
    ]
}

#[test]
fn logits_are_close_to_the_reference() {
    for (name, of) in ADAPTERS {
        for scheme in [None, Some("int8-channel"), Some("nf4-g8")] {
            let (model, decoder) = load(name, of, scheme, 2);
            let sequences = sequences(&model);
            let found = logits(&model, &sequences);
            let (tokens, lens) = (sequences.concat(), sequences.iter().map(Vec::len).collect::<Vec<_>>());
            let longest = lens.iter().copied().max().unwrap();
            let mut buffers = Buffers::plan(decoder.config(), tokens.len(), longest).unwrap();
            let mut expected = vec![0.0; found.len()];
            let batch = Batch { tokens: &tokens, lens: &lens };
            decoder.forward(&batch, &mut buffers).unwrap().logits(0..tokens.len(), &mut expected).unwrap();
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
            let relative = error / norm(&mut expected.iter().copied());
            // Activations are quantized too where weights are.
            let bound = if scheme.is_none() { 0.02 } else { 0.06 };
            assert!(relative < bound, "{name} on {scheme:?}: {relative}");
        }
    }
}

/// Rows of a pass do not depend on each other, nor on the number of threads.
#[test]
fn a_sequence_has_the_same_bits_in_any_batch_and_on_any_thread_count() {
    for (name, of) in ADAPTERS {
        let models = [load(name, of, Some("int8-channel"), 1).0, load(name, of, Some("int8-channel"), 3).0];
        if models[0].linears().any(|linear| !linear.choice().kernel.contains("int8")) {
            continue;
        }
        let sequences = sequences(&models[0]);
        let together = logits(&models[0], &sequences);
        assert_eq!(logits(&models[1], &sequences), together, "{name}");
        let alone: Vec<f32> =
            sequences.iter().flat_map(|s| logits(&models[0], std::slice::from_ref(s))).collect();
        assert_eq!(alone, together, "{name}");
    }
}

/// A report of the kernels names the rank; the bytes of a token count it.
#[test]
fn adapters_show_in_the_kernels_and_their_bytes() {
    let (with, _) = load("lora", "llama2-gqa-tied", Some("int8-channel"), 1);
    let without = crate::common::model("llama2-gqa-tied");
    let bytes = |model: &FastModel| {
        model.linears().map(mantissa_runtime::prepared::PreparedLinear::bytes).sum::<u64>()
    };
    let folder = tiny().into_iter().find(|dir| dir.ends_with("llama2-gqa-tied")).unwrap();
    let adapter = AdapterFiles::open(&folder.join("../../peft/lora")).unwrap();
    assert_eq!(bytes(&with), bytes(&without) + adapter.bytes());
    let formats: Vec<_> = with.linears().map(|linear| linear.choice().format).collect();
    assert_eq!(formats.iter().filter(|format| format.ends_with(" + rank 4")).count(), 14, "{formats:?}");
}
