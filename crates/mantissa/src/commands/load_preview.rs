//! `--dry-run` of the commands that run a model: what would be loaded, and the memory that it is predicted to take.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use mantissa_jobs::inspect::Inspect;
use mantissa_jobs::names::Engine;
use mantissa_jobs::{Job, LoadNeeds, ModelPath};
use serde::Serialize;

use crate::context::Context;
use crate::output::{bytes, labelled};

/// What a command would load.
#[derive(Serialize)]
pub struct LoadPreview {
    /// Models in the order of loading.
    models: Vec<PreviewedModel>,
    engine: Engine,
    #[serde(flatten)]
    needs: LoadNeeds,
    /// Most memory in bytes of the processes that hold grammars, beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    grammar_memory: Option<u64>,
}

/// Model that would be loaded.
#[derive(Serialize)]
struct PreviewedModel {
    model: PathBuf,
    /// Checkpoint format.
    format: &'static str,
    parameters: u64,
    /// Bytes of all tensors as stored.
    stored_bytes: u64,
    bits_per_weight: Option<f64>,
    /// Bits per weight of the linear layers, scales and zero points included.
    #[serde(skip_serializing_if = "Option::is_none")]
    linear_bits_per_weight: Option<f64>,
    /// Schemes of the tensors, most bytes first.
    schemes: Vec<String>,
}

impl PreviewedModel {
    /// Reads the headers of a model.
    fn of(model: &ModelPath, context: &Context) -> Result<Self> {
        let mut report = Inspect { model: model.clone(), stats: false }.run(context)?;
        report.by_scheme.sort_by_key(|total| std::cmp::Reverse(total.bytes));
        Ok(PreviewedModel {
            model: model.named().to_owned(),
            format: report.convention,
            parameters: report.parameters,
            stored_bytes: report.bytes,
            bits_per_weight: report.bits_per_weight,
            linear_bits_per_weight: report.linear_bits_per_weight,
            schemes: report.by_scheme.into_iter().map(|total| total.scheme).collect(),
        })
    }

    /// Describes it in words.
    fn words(&self) -> String {
        let bits = self.linear_bits_per_weight.or(self.bits_per_weight);
        let bits = bits.map_or_else(String::new, |bits| format!(", {bits:.3} bits per weight"));
        format!(
            "{}: {} in {} ({}){bits}",
            self.model.display(),
            bytes(self.stored_bytes),
            self.format,
            self.schemes.join(", ")
        )
    }
}

impl LoadPreview {
    /// Describes the models at these paths, with their predicted memory.
    ///
    /// # Errors
    /// Headers that cannot be read.
    pub fn new<'a>(
        models: impl IntoIterator<Item = &'a ModelPath>,
        engine: Engine,
        needs: LoadNeeds,
        context: &Context,
    ) -> Result<Self> {
        let models = models.into_iter().map(|model| PreviewedModel::of(model, context));
        Ok(LoadPreview { models: models.collect::<Result<_>>()?, engine, needs, grammar_memory: None })
    }

    /// Adds the memory of the processes that hold grammars.
    pub fn with_grammars(self, most: u64) -> Self {
        LoadPreview { grammar_memory: Some(most), ..self }
    }

    /// Reports it.
    ///
    /// # Errors
    /// Output.
    pub fn report(&self, context: &Context) -> Result<()> {
        context.report(self, |out| self.human(out))
    }

    fn human(&self, out: &mut dyn Write) -> io::Result<()> {
        self.models.iter().try_for_each(|model| labelled(out, "load", &model.words()))?;
        let LoadNeeds { sequences, context, kv, kv_bytes, weights, loading, buffers, .. } = &self.needs;
        let engine = match self.engine {
            Engine::Fast => "fast: repacked weights, quantized activations",
            Engine::Reference => "reference: dense f32 products",
        };
        labelled(out, "engine", engine)?;
        let tokens = match sequences {
            0 | 1 => format!("one sequence of up to {context} tokens"),
            n => format!("{n} sequences of up to {context} tokens"),
        };
        labelled(out, "context", &tokens)?;
        let each = bytes(self.needs.kv_bytes_per_token.round() as u64);
        let cache = match kv.as_str() {
            "none" => "none: a window is computed at once".to_owned(),
            kv => format!("{kv}: {} ({each} per token)", bytes(*kv_bytes)),
        };
        labelled(out, "KV cache", &cache)?;
        let beside = self.needs.resident_files.map_or_else(String::new, |pages| {
            format!("; beside it {} of file pages, those of the program", bytes(pages))
        });
        let parts = format!(
            "{} of anonymous memory predicted (weights {}, {} more while they load, buffers {}, process at most {}){beside}",
            bytes(self.needs.predicted_peak_memory),
            bytes(*weights),
            bytes(*loading),
            bytes(*buffers),
            bytes(self.needs.process)
        );
        labelled(out, "memory", &parts)?;
        match self.grammar_memory {
            Some(most) => {
                labelled(out, "grammars", &format!("up to {} in processes of their own", bytes(most)))
            }
            None => Ok(()),
        }
    }
}
