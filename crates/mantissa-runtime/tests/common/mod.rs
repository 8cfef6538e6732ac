//! Helpers of the integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use std::path::{Path, PathBuf};

use mantissa_model::{Decoder, Linear, LoadError, Sampling, SourceView, WeightSource};
use mantissa_num::{Given, Scheme, quantize};
use mantissa_runtime::{EventKind, FastModel, Request, Runtime, RuntimeOptions, SequenceId, Speculation};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use serde_json::Value;

/// The committed tiny models.
pub fn tiny() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    let mut dirs: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    assert!(!dirs.is_empty());
    dirs
}

/// A tiny model with a context of 1024 tokens, more than it was made for.
pub struct Longer {
    files: ModelFiles,
    config: Value,
    /// Scheme that the linear layers are stored in, if not as they are.
    scheme: Option<Scheme>,
}

impl SourceView for Longer {
    fn base(&self) -> &dyn WeightSource {
        &self.files
    }

    fn config(&self) -> Option<&Value> {
        Some(&self.config)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let weight = WeightSource::linear(&self.files, module, rows, cols, bias)?;
        let Some(scheme) = &self.scheme else { return Ok(weight) };
        let mut values = vec![0.0; rows * cols];
        let linear = Linear::new(module, weight.clone())?;
        values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| linear.row(row, out));
        // Rows that the blocks do not divide are stored by channel.
        let codes = quantize(scheme, &values, rows, cols, Given::default())
            .or_else(|_| quantize(&"int8-channel".parse().unwrap(), &values, rows, cols, Given::default()));
        let codes = codes.unwrap();
        Ok(LinearWeight { weight: Weight::Quantized(codes), ..weight })
    }
}

pub fn load(dir: &Path, threads: usize) -> FastModel {
    load_as(dir, None, threads)
}

/// Loads a model with its linear layers quantized.
pub fn load_as(dir: &Path, scheme: Option<&str>, threads: usize) -> FastModel {
    FastModel::load(&longer(dir, scheme), threads).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

/// Loads the reference decoder of the model of [`load`].
pub fn reference(dir: &Path) -> Decoder {
    Decoder::load(&longer(dir, None)).unwrap()
}

pub fn longer(dir: &Path, scheme: Option<&str>) -> Longer {
    let scheme = scheme.map(|scheme| scheme.parse().unwrap());
    let files = ModelFiles::open(dir).unwrap();
    let mut config = files.config().unwrap().clone();
    // Learned positions are as many as the context; LongRoPE's frequencies depend on it.
    if !dir.ends_with("gpt2") && !dir.ends_with("phi3-longrope") {
        let name =
            if config["model_max_length"].is_null() { "max_position_embeddings" } else { "model_max_length" };
        config[name] = 1024.into();
    }
    Longer { files, config, scheme }
}

/// Schemes that are multiplied as integers.
pub const INTEGERS: [&str; 8] =
    ["int8-channel", "int4-g32", "int4-g32-asym", "nf4-g32", "q8_0", "q4_0", "nvfp4", "mxfp4"];

/// All tiny models, each in one of [`INTEGERS`].
pub fn quantized() -> impl Iterator<Item = (FastModel, String)> {
    tiny()
        .into_iter()
        .zip(INTEGERS.into_iter().cycle())
        .map(|(dir, scheme)| (load_as(&dir, Some(scheme), 2), format!("{} in {scheme}", dir.display())))
}

/// A tiny model in 8-bit integers.
pub fn model(name: &str) -> FastModel {
    load_as(&tiny().into_iter().find(|dir| dir.ends_with(name)).unwrap(), Some("int8-channel"), 2)
}

/// Prompt `seed` of `len` tokens.
pub fn prompt(model: &FastModel, seed: usize, len: usize) -> Vec<u32> {
    let vocabulary = model.config().vocab_size;
    (0..len).map(|i| ((i * i * 7 + i * 13 + seed * 31 + seed * seed * i) % vocabulary) as u32).collect()
}

pub fn greedy(prompt: Vec<u32>, max_new_tokens: usize) -> Request {
    Request { prompt, max_new_tokens, ignore_eos: true, ..Request::default() }
}

pub fn sampled(prompt: Vec<u32>, max_new_tokens: usize, seed: u64) -> Request {
    let sampling = Sampling { temperature: 1.0, top_p: 0.95, seed, ..Sampling::default() };
    Request { sampling, ..greedy(prompt, max_new_tokens) }
}

/// Runs until all sequences have ended; the new tokens of each of `ids`.
pub fn finish(runtime: &mut Runtime<'_>, ids: &[SequenceId]) -> Vec<Vec<u32>> {
    let mut out = vec![Vec::new(); ids.len()];
    let mut steps = 0;
    while !runtime.is_idle() {
        for event in runtime.step().unwrap() {
            if let (Some(at), EventKind::Token { token, .. }) =
                (ids.iter().position(|id| *id == event.sequence), &event.kind)
            {
                out[at].push(*token);
            }
        }
        steps += 1;
        assert!(steps < 10_000, "the sequences do not end");
    }
    out
}

/// Runtime for one sequence that proposes tokens.
pub fn speculating<'m>(model: &'m FastModel, draft: Option<&'m FastModel>) -> Runtime<'m> {
    let context = model.config().max_position_embeddings.min(1024);
    let options = RuntimeOptions { speculation: Speculation::Lookup, ..RuntimeOptions::single(context) };
    let runtime = Runtime::new(model, options).unwrap();
    match draft {
        None => runtime,
        Some(draft) => runtime.with_draft(draft).unwrap(),
    }
}

/// New tokens of a request alone.
pub fn alone(model: &FastModel, request: &Request) -> Vec<u32> {
    let context = model.config().max_position_embeddings.min(1024);
    let mut runtime = Runtime::new(model, RuntimeOptions::single(context)).unwrap();
    let id = runtime.add(request.clone()).unwrap();
    finish(&mut runtime, &[id]).remove(0)
}
