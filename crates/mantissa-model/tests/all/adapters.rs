//! Adapters that peft wrote, against the logits of transformers and peft; and merged models against unmerged ones.
use std::path::PathBuf;

use crate::common::{expected, logits, max_difference, workspace};
use mantissa_model::{Adapted, Decoder, Linear, LoadError, SourceView, WeightSource};
use mantissa_num::{Given, Scheme, quantize};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::{Adapter, AdapterFiles};

/// Adapters and their bases (`tests/data/make_peft.py`).
const ADAPTERS: [(&str, &str); 7] = [
    ("lora", "llama2-gqa-tied"),
    ("dora", "mqa"),
    ("patterns", "llama1-mha"),
    ("dora-bias", "qwen2-bias"),
    ("fused", "phi3"),
    ("conv1d", "gpt2"),
    ("saved", "smollm3"),
];

fn peft(name: &str) -> PathBuf {
    workspace().join("tests/data/peft").join(name)
}

fn adapter(name: &str) -> Adapter {
    AdapterFiles::open(&peft(name)).unwrap().load().unwrap()
}

fn base(name: &str) -> ModelFiles {
    ModelFiles::open(&workspace().join("tests/data/tiny").join(name)).unwrap()
}

#[test]
fn logits_agree_with_peft() {
    for (name, of) in ADAPTERS {
        let files = base(of);
        let decoder = Decoder::load(&Adapted::new(&files, adapter(name), name).unwrap()).unwrap();
        let (sequences, expected) = expected(&peft(name));
        let difference = max_difference(&logits(&decoder, &sequences), &expected);
        println!("{name:12} {difference:.1e}");
        assert!(difference <= 1e-4, "{name}: {difference}");
        let plain = Decoder::load(&files).unwrap();
        assert!(max_difference(&logits(&plain, &sequences), &expected) > 1e-2, "{name}");
    }
}

/// A model whose linear layers are quantized, or dequantized again, or merged with an adapter.
struct Changed<'a> {
    files: &'a ModelFiles,
    scheme: Option<Scheme>,
    merged: Option<Adapter>,
}

impl SourceView for Changed<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.files
    }

    fn adapt(&self, module: &str, weight: LinearWeight) -> Result<LinearWeight, LoadError> {
        let (rows, cols) = (weight.rows, weight.cols);
        let mut values = vec![0.0; rows * cols];
        let linear = Linear::new(module, weight.clone())?;
        values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| linear.row(row, out));
        let mut stored = Weight::F32(values.clone());
        if let Some(scheme) = &self.scheme {
            // Rows that the blocks do not divide stay as they are.
            if let Ok(codes) = quantize(scheme, &values, rows, cols, Given::default()) {
                values = codes.dequantize().unwrap();
                stored = Weight::Quantized(codes);
            }
        }
        if let Some(adapter) = &self.merged {
            if let Some(adapter) = adapter.modules.get(module) {
                adapter.merge(&mut values).unwrap();
            }
            stored = Weight::F32(values);
        }
        Ok(LinearWeight { weight: stored, ..weight })
    }
}

/// On every kind of storage the adapter beside the codes gives what merging into the dequantized weight gives.
#[test]
fn merged_models_equal_unmerged_ones() {
    for (name, of) in [("lora", "llama2-gqa-tied"), ("dora", "mqa"), ("fused", "phi3"), ("conv1d", "gpt2")] {
        let files = base(of);
        let (sequences, _) = expected(&peft(name));
        for scheme in [None, Some("nf4-g8"), Some("int4-g8-asym"), Some("fp8-e4m3-channel"), Some("nvfp4")] {
            let scheme: Option<Scheme> = scheme.map(|scheme| scheme.parse().unwrap());
            let stored = Changed { files: &files, scheme: scheme.clone(), merged: None };
            let unmerged = Decoder::load(&Adapted::new(&stored, adapter(name), name).unwrap()).unwrap();
            let merged = Changed { files: &files, scheme, merged: Some(adapter(name)) };
            let merged = Decoder::load(&merged).unwrap();
            let difference = max_difference(&logits(&unmerged, &sequences), &logits(&merged, &sequences));
            assert!(difference <= 5e-5, "{name}: {difference}");
        }
    }
}

#[test]
fn adapters_of_another_model_are_refused_by_module() {
    for (name, of, expected) in [
        ("lora", "llama1-mha", "expected an adapter from 32 inputs to 32 outputs, got one from 32 to 16"),
        ("fused", "llama1-mha", "expected a linear layer of the model, such as"),
        ("saved", "llama2-gqa-tied", "expected shape [288, 32], got [64, 32]"),
    ] {
        let files = base(of);
        let error = Adapted::new(&files, adapter(name), "path/to/adapter").unwrap_err();
        assert!(matches!(&error, LoadError::Adapter { .. }));
        let error = error.to_string();
        assert!(error.starts_with("path/to/adapter: ") && error.contains(expected), "{error}");
        assert!(error.contains("; fix: give the model that the adapter was trained on"), "{error}");
    }
}
