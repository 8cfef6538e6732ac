//! `--dry-run`: sizes and memory of a plan.

use std::collections::BTreeMap;
use std::io::{self, Write};

use mantissa_jobs::ResolvedQuantize;
use mantissa_jobs::choose::{RecipeChoice, predict};
use mantissa_jobs::notes::merged;
use mantissa_quant::memory::peak_stage;
use mantissa_quant::{Kept, MethodShare, Plan, QuantizedShare, SchemeShare, TableSize};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::super::outcome::linear_bits;
use super::super::tables;
use super::done::larger;
use crate::output::bytes;

/// Sizes and memory of a plan.
#[derive(Serialize)]
pub(super) struct DryRun<'a> {
    recipe: String,
    /// Full name of a recipe that was given by a short one.
    #[serde(skip_serializing_if = "Option::is_none")]
    stands_for: Option<&'a str>,
    /// Choice of a recipe that was not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<&'a RecipeChoice>,
    container: &'static str,
    layers: usize,
    kept: usize,
    linear_bits_per_weight: f64,
    /// Bits per weight as stored.
    linear_stored_bits_per_weight: f64,
    source_bytes: u64,
    output_bytes: u64,
    /// Predicted, not measured.
    predicted_peak_memory: u64,
    /// Predicted, not measured.
    predicted_seconds: f64,
    /// Smallest `--memory` that accepts the work.
    least_memory: u64,
    /// Stage with the peak, and its buffers.
    peak_stage: String,
    peak_buffers: BTreeMap<&'static str, u64>,
    /// Share of the parameters that is quantized.
    share: QuantizedShare,
    /// Layers under each method, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    methods: Vec<MethodShare>,
    notes: &'a [String],
    #[serde(skip)]
    tables: Vec<TableSize>,
}

/// Returns the share of the parameters that is quantized, in words.
pub(super) fn share_line(share: &QuantizedShare) -> String {
    let percent = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
    format!(
        "{:.1} % of the parameters of linear layers quantized ({} of {}), {:.1} % of all {}",
        percent(share.quantized, share.linear),
        count(share.quantized),
        count(share.linear),
        percent(share.quantized, share.parameters),
        count(share.parameters)
    )
}

/// Predicted seconds from which on a shorter way is named.
const LONG: f64 = 120.0;

/// Fewest calibration samples that are worth naming.
const FEW: usize = 16;

/// Names a shorter calibration for a run of `seconds`, with its predicted time; `None` if the run is short or that saves
/// little.
pub(super) fn shorter(plan: &Plan, seconds: f64, threads: usize) -> Option<String> {
    let set = plan.calibration().filter(|_| plan.runs_text() && seconds > LONG)?;
    let samples = set.windows.len() / 4;
    let less = predict::seconds(plan, set.tokens() / 4, threads);
    (samples >= FEW && less < 0.7 * seconds).then(|| {
        format!(
            "shorter: --samples {samples}, a quarter of the calibration: {} (predicted)",
            predict::duration(less)
        )
    })
}

/// Returns a number of parameters with three digits and its unit.
fn count(parameters: u64) -> String {
    let (value, unit) = match parameters {
        n if n >= 1_000_000_000 => (n as f64 / 1e9, "B"),
        n if n >= 1_000_000 => (n as f64 / 1e6, "M"),
        n if n >= 1000 => (n as f64 / 1e3, "k"),
        n => return n.to_string(),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

impl<'a> DryRun<'a> {
    /// Describes `plan`, given if the output is read back, the least memory that is accepted, and the predicted seconds.
    pub(super) fn of(
        plan: &'a Plan,
        source: &ModelFiles,
        resolved: &'a ResolvedQuantize,
        (verified, least_memory, predicted_seconds): (bool, u64, f64),
    ) -> Self {
        let peak = peak_stage(plan, verified);
        let layers = plan.quantized().count();
        DryRun {
            recipe: plan.job.name(),
            stands_for: resolved.stands_for.as_deref(),
            chosen: resolved.chosen.as_ref(),
            container: plan.container.name(),
            layers,
            kept: plan.linears.len() - layers,
            linear_bits_per_weight: plan.linear_bits_per_weight(),
            linear_stored_bits_per_weight: plan.linear_stored_bits_per_weight(),
            source_bytes: source.checkpoint().stored_bytes(),
            output_bytes: plan.output_bytes(),
            predicted_peak_memory: peak.bytes(),
            predicted_seconds,
            least_memory,
            peak_buffers: peak.buffers.iter().copied().collect(),
            peak_stage: peak.name,
            share: plan.share(source),
            methods: plan.method_shares(),
            notes: &plan.notes,
            tables: plan.table_sizes(source),
        }
    }

    /// Prints it.
    ///
    /// # Errors
    /// As `out`.
    pub(super) fn human(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{} layers quantized by {} in format {}; {} of the layers kept",
            self.layers, self.recipe, self.container, self.kept
        )?;
        writeln!(
            out,
            "{} in those layers, scales and zero points included",
            linear_bits(self.linear_bits_per_weight, Some(self.linear_stored_bits_per_weight))
        )?;
        writeln!(out, "{}", share_line(&self.share))?;
        for SchemeShare { scheme, layers, parameters, bytes: size } in &self.share.schemes {
            let (what, count) = (scheme.as_deref().unwrap_or("unquantized"), count(*parameters));
            match layers {
                0 => writeln!(out, "{what}: {} (expected)", bytes(*size))?,
                _ => writeln!(
                    out,
                    "{what}: {layers} weights, {count} parameters, {} (expected)",
                    bytes(*size)
                )?,
            }
        }
        if !self.methods.is_empty() {
            let share = |share: &MethodShare| {
                format!(
                    "{} weights ({} parameters) by {}",
                    share.layers,
                    count(share.parameters),
                    share.method
                )
            };
            let shares: Vec<_> = self.methods.iter().map(share).collect();
            writeln!(out, "methods: {}", shares.join(", "))?;
        }
        for Kept { modules, count: n, parameters, why } in &self.share.kept {
            writeln!(out, "kept {modules} ({n}, {} parameters): {why}", count(*parameters))?;
        }
        tables::human(out, &self.tables)?;
        let (output, source) = (bytes(self.output_bytes), bytes(self.source_bytes));
        let grown = larger(self.output_bytes, self.source_bytes);
        writeln!(out, "{output} of tensors, source {source}{grown}")?;
        let (peak, stage) = (bytes(self.predicted_peak_memory), &self.peak_stage);
        writeln!(out, "{peak} peak memory (predicted), at the step: {stage}")?;
        writeln!(out, "{} (predicted)", predict::duration(self.predicted_seconds))?;
        writeln!(out, "{} is the least that --memory accepts", bytes(self.least_memory))?;
        merged(self.notes).iter().try_for_each(|note| writeln!(out, "note: {note}"))
    }
}
