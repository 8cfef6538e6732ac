//! `quality.json` of an output.

use mantissa_model::Products;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{TOOL, TensorMeta};

use crate::calibrate::CalibrationSet;
use crate::fold::Folded;
use crate::plan::{Plan, Use};
use crate::quality::{Digests, Hashes, Quality, TensorReport, VERSION};
use crate::report::LayerReport;

/// Contents of a filled output.
pub(super) struct Contents {
    /// Reports of quantized layers.
    pub(super) layers: Vec<LayerReport>,
    /// Reports of embedding and head, if they are quantized.
    pub(super) tables: Vec<LayerReport>,
    /// Reports of all other tensors.
    pub(super) tensors: Vec<TensorReport>,
    /// Digests of the source's files.
    pub(super) source: Digests,
    /// Digests of the weight files written.
    pub(super) weights: Digests,
    /// Notes on the run.
    pub(super) notes: Vec<String>,
}

impl TensorReport {
    /// Describes a tensor that is copied, or changed by a transform and stored in its own dtype.
    pub(super) fn kept(meta: &TensorMeta, folded: &Folded<'_>) -> Self {
        let copied = Self::copied(meta);
        match folded.changes(&meta.name) {
            true => TensorReport { scheme: format!("{}, folded", copied.scheme), ..copied },
            false => copied,
        }
    }
}

impl Quality {
    /// Describes an output of `plan` before its evaluation.
    pub(super) fn new(plan: &Plan, source: &ModelFiles, found: Contents) -> Self {
        let Contents { layers, tables, tensors, source: source_hashes, weights, notes } = found;
        let share = plan.share(source);
        let (bytes, parameters) = (plan.output_bytes(), share.parameters);
        // Notes may contain the source's path on this machine, which must not affect the output's bytes.
        let place = format!("{}/", source.dir().display());
        let fallbacks = layers.iter().filter(|layer| layer.fallback.is_some());
        Quality {
            version: VERSION,
            tool: TOOL.to_owned(),
            recipe: plan.job.label(),
            method: plan.method_name(),
            weights: plan.weights.to_string(),
            activations: plan.activation_names(),
            kv: plan.cache(),
            container: plan.container.name().to_owned(),
            linear_bits_per_weight: plan.linear_bits_per_weight(),
            linear_stored_bits_per_weight: Some(plan.linear_stored_bits_per_weight()),
            bits_per_weight: bytes as f64 * 8.0 / parameters.max(1) as f64,
            bytes,
            expected_bytes: Some(bytes),
            parameters,
            share: Some(share),
            source_format: source.dequantized_from().map(str::to_owned),
            hashes: Hashes { source: source_hashes, recipe: plan.job.sha256(), weights },
            calibration: plan.text().or(plan.text_for(Use::Cache)).map(CalibrationSet::identity),
            calibration_dtype: match plan.options.products {
                Products::F32 => None,
                rounded => Some(rounded.name().to_owned()),
            },
            route_all_experts: plan.options.route_all_experts,
            coverage: plan.coverage.clone(),
            held_out: plan.held_out().map(|set| set.identity()),
            evaluation: None,
            tasks: Vec::new(),
            fallbacks: fallbacks.map(|layer| layer.module.clone()).collect(),
            kept: plan.linears.iter().filter(|l| l.scheme.is_none()).map(|l| l.info.module.clone()).collect(),
            notes: plan.notes.iter().map(|note| note.replace(&place, "")).chain(notes).collect(),
            layers,
            tables,
            tensors,
            rebuild: plan.options.rebuild.clone(),
        }
    }
}
