//! Embedding and head in a plan.

use mantissa_model::{LinearInfo, Role};
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;

use super::Plan;
use super::linear::is_table;
use crate::calibrate::CalibrationSet;

/// Sizes of the embedding or head before and after its quantization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSize {
    /// Module.
    pub module: String,
    /// Scheme.
    pub scheme: Scheme,
    /// Number of weights.
    pub weights: u64,
    /// Bytes in the source; for a head that was tied to the embedding, 0.
    pub before: u64,
    /// Bytes in the output.
    pub after: u64,
}

impl Plan {
    /// Iterates over the quantized embedding and head of a folder with their schemes.
    pub fn quantized_tables(&self) -> impl Iterator<Item = (&LinearInfo, &Scheme)> {
        self.tables.iter().filter_map(|table| Some((&table.info, table.scheme.as_ref()?)))
    }

    /// Returns the number of tokens to calibrate on.
    pub fn calibration_tokens(&self) -> usize {
        self.options.calibration.as_ref().map_or(0, CalibrationSet::tokens)
    }

    /// Returns the number of outliers of a layer. Embedding and head have none.
    pub(crate) fn outliers(&self, info: &LinearInfo) -> usize {
        if is_table(info) { 0 } else { self.job.outliers(&info.module, info.rows, info.cols) }
    }

    /// Returns the sizes of embedding and head, as far as a rule of the recipe quantizes them.
    pub fn table_sizes(&self, source: &ModelFiles) -> Vec<TableSize> {
        let size = |module: &str, scheme: &Scheme, weights: u64, after: u64| {
            let stored = source.checkpoint().get(&format!("{module}.weight"));
            let before = stored.map_or(0, |meta| meta.len);
            TableSize { module: module.to_owned(), scheme: scheme.clone(), weights, before, after }
        };
        let folder_tables = self.quantized_tables().map(|(info, scheme)| {
            let (weights, bits) = ((info.rows * info.cols) as u64, self.stored_bits(info, scheme));
            size(&info.module, scheme, weights, bits / 8)
        });
        let casts = self.gguf.iter().flat_map(|layout| &layout.casts).filter_map(|cast| {
            let module = cast.info.name.strip_suffix(".weight")?;
            let named = self.job.recipe().and_then(|recipe| recipe.table_scheme(module));
            named.filter(|_| matches!(cast.info.role, Role::Embedding | Role::Head))?;
            let weights = cast.info.shape.iter().map(|&n| n as u64).product();
            let &[rows, cols] = cast.info.shape.as_slice() else { return None };
            Some(size(module, &cast.scheme, weights, cast.scheme.format.total_bits(rows, cols) / 8))
        });
        folder_tables.chain(casts).collect()
    }
}
