//! KL of an output with its source's embedding and head: the rest is what quantizing them costs.

use std::ops::ControlFlow;

use mantissa_eval::{Sequence, compare};
use mantissa_model::{Decoder, LoadError, SourceView, WeightSource};
use mantissa_store::convention::{LinearWeight, ModelFiles};

use crate::error::Result;
use crate::plan::Plan;

/// View of an output with the embedding and head of its source.
struct SourceTables<'a> {
    output: &'a ModelFiles,
    source: &'a ModelFiles,
    /// Module of the output, and the source's module with its weights.
    modules: Vec<(String, String)>,
}

impl SourceView for SourceTables<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.output
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        let given = self.modules.iter().find(|(output_module, _)| output_module == module);
        let (files, module) = given.map_or((self.output, module), |(_, own)| (self.source, own.as_str()));
        WeightSource::linear(files, module, rows, cols, bias)
    }
}

/// Measures KL(source ‖ output) in nats per token on `sequences` with the source's embedding and head. Returns `None`
/// if the recipe names neither, or if a rotation changes them.
///
/// # Errors
/// Errors of loading and running the models.
pub(crate) fn kl_without(
    plan: &Plan,
    source: &ModelFiles,
    output: &ModelFiles,
    sequences: &[Sequence],
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Option<f64>> {
    let transform = plan.job.recipe().and_then(|recipe| recipe.transform.as_ref());
    let tables = plan.table_sizes(source);
    if tables.is_empty() || transform.is_some_and(|transform| transform.rotation().is_some()) {
        return Ok(None);
    }
    // A head that was tied has the embedding's weights.
    let own = |module: &str| match source.has(&format!("{module}.weight")) {
        true => module.to_owned(),
        false => plan.config.embedding_module(),
    };
    let modules = tables.iter().map(|table| (table.module.clone(), own(&table.module))).collect();
    let view = SourceTables { output, source, modules };
    let (reference, model) = (Decoder::load(source)?, Decoder::load(&view)?);
    let (_, found) = compare(&model, &reference, sequences, plan.threads(), progress)?;
    Ok(Some(found.kl.max(0.0)))
}
