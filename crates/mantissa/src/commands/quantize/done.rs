//! Report of `quantize`.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use mantissa_jobs::ResolvedQuantize;
use mantissa_jobs::choose::RecipeChoice;
use mantissa_jobs::notes;
use mantissa_quant::verify::Verification;
use mantissa_quant::{LayerReport, Outcome, Plan, Quality, TableSize};
use mantissa_store::FileDigest;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::super::next_steps::NextSteps;
use super::super::outcome::{human_figures, layer_table, linear_bits};
use super::super::{tables, tasks, verify};
use super::args::Args;
use crate::output::{bytes, counted, labelled};

#[derive(Serialize)]
pub(super) struct Done<'a> {
    output: &'a Path,
    /// True if the output was there: complete, of this job, and with the hashes of its manifest. Nothing was written.
    already_complete: bool,
    /// Full name of a recipe that was given by a short one.
    #[serde(skip_serializing_if = "Option::is_none")]
    stands_for: Option<&'a str>,
    /// Choice of a recipe that was not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<&'a RecipeChoice>,
    /// SHA-256 of an output that is a single file.
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    source_bytes: u64,
    /// Copied tensors and layers reused from an unfinished run.
    resumed: usize,
    /// Time from the first read until the output is in place, hashing included, without `sync_seconds` and
    /// `verify_seconds`.
    seconds: f64,
    /// Time to make a single output file durable; for a folder it is part of `seconds`.
    sync_seconds: Option<f64>,
    /// Weights quantized per second, reading and writing included.
    weights_per_second: f64,
    #[serde(flatten)]
    quality: &'a Quality,
    verification: Option<&'a Verification>,
    verify_seconds: Option<f64>,
    #[serde(flatten)]
    next_steps: NextSteps,
    /// Sizes of quantized embedding and head; `quality` lists them too.
    #[serde(skip)]
    tables: Vec<TableSize>,
}

impl<'a> Done<'a> {
    /// Describes the output at `path`, which appeared after `time`, or without one was there.
    pub(super) fn new(
        (args, resolved, source): (&Args, &'a ResolvedQuantize, &ModelFiles),
        (plan, outcome): (&Plan, &'a Outcome),
        path: &'a Path,
        time: Option<Duration>,
    ) -> Self {
        let sync_seconds = outcome.synced.map(|time| time.as_secs_f64());
        let verify_seconds = outcome.verification.as_ref().map(|(_, time)| time.as_secs_f64());
        let beside = sync_seconds.unwrap_or(0.0) + verify_seconds.unwrap_or(0.0);
        let seconds = time.map_or(0.0, |time| time.as_secs_f64() - beside);
        let written = crate::output::written(path, plan.container, outcome);
        Done {
            output: written,
            already_complete: time.is_none(),
            stands_for: resolved.stands_for.as_deref(),
            chosen: resolved.chosen.as_ref(),
            sha256: sha256(plan, outcome),
            source_bytes: source.checkpoint().stored_bytes(),
            resumed: outcome.resumed,
            seconds,
            sync_seconds,
            weights_per_second: time.map_or(0.0, |_| plan.linear_weights() as f64 / seconds),
            quality: &outcome.quality,
            verification: outcome.verification.as_ref().map(|(verification, _)| verification),
            verify_seconds,
            next_steps: NextSteps::new(plan, &args.model, source, written, &args.targets),
            tables: plan.table_sizes(source),
        }
    }
}

/// Says that a job had nothing to do.
pub const ALREADY: &str = "already complete: all files have the hashes of their manifest";

/// Returns the SHA-256 of an output that is a single file.
fn sha256(plan: &Plan, outcome: &Outcome) -> Option<String> {
    let files = &outcome.quality.hashes.weights;
    let single = plan.container.is_one_file() && files.len() == 1;
    files.values().next().filter(|_| single).map(FileDigest::hex)
}

/// Describes layers that are not stored or quantized as the recipe asks, with every reason; `None` if there are none.
pub fn fallback_line(quality: &Quality) -> Option<String> {
    let layers = quality.layers.iter();
    let fallen = layers.filter_map(|layer| Some((layer.module.as_str(), fallback(layer, quality)?)));
    let fallen: Vec<_> = fallen.collect();
    let kinds = notes::kinds(fallen.iter().map(|(module, why)| (*module, why.as_str())));
    let (count, all) = (fallen.len(), quality.layers.len());
    let kinds: Vec<_> = kinds.iter().map(ToString::to_string).collect();
    (count > 0).then(|| format!("{count} of {all} layers: {}", kinds.join("; ")))
}

/// Says why layers are unquantized, with how many modules for each reason; `None` if all are quantized.
fn kept_line(quality: &Quality) -> Option<String> {
    let share = quality.share.as_ref().filter(|_| !quality.kept.is_empty())?;
    let mut reasons: Vec<(&str, usize)> = Vec::new();
    for kept in &share.kept {
        match reasons.iter_mut().find(|(why, _)| *why == kept.why) {
            Some((_, count)) => *count += kept.count,
            None => reasons.push((&kept.why, kept.count)),
        }
    }
    let reasons: Vec<_> = reasons.iter().map(|(why, count)| format!("{count} ({why})")).collect();
    (!reasons.is_empty()).then(|| reasons.join(", "))
}

pub(super) fn human(out: &mut dyn Write, done: &Done<'_>, layers: bool) -> io::Result<()> {
    let r = done.quality;
    // The line of the reasons has the numbers, embeddings included.
    let reasons = kept_line(r);
    let kept = match &reasons {
        None if !r.kept.is_empty() => format!(", {} kept", r.kept.len()),
        _ => String::new(),
    };
    let output = done.output.display();
    labelled(out, "recipe", &r.recipe)?;
    labelled(
        out,
        "output",
        &format!("{output}: {} in format {}{kept}", counted(r.layers.len() as u64, "layer"), r.container),
    )?;
    if let Some(line) = reasons {
        labelled(out, "kept", &line)?;
    }
    let grown = larger(r.bytes, done.source_bytes);
    let (tensors, source) = (bytes(r.bytes), bytes(done.source_bytes));
    labelled(out, "size", &format!("{tensors} of tensors from {source}{grown}{}", in_files(r)))?;
    let linear = linear_bits(r.linear_bits_per_weight, r.linear_stored_bits_per_weight);
    let rest = if r.kept.is_empty() { "embeddings and head" } else { "kept layers, embeddings and head" };
    let all = format!("{:.3} with {rest}", r.bits_per_weight);
    labelled(out, "bits", &format!("{linear} in the quantized layers, {all}"))?;
    if let Some(line) = fallback_line(r) {
        labelled(out, "fallbacks", &line)?;
    }
    tables::human(out, &done.tables)?;
    match &r.evaluation {
        Some(figures) => human_figures(out, figures)?,
        None => labelled(out, "KL", "not measured (--text default measures it on the built-in text)")?,
    }
    tasks::human(out, &r.tasks)?;
    match done.verification {
        _ if done.already_complete => labelled(out, "time", ALREADY)?,
        Some(v) => verify::human(out, v)?,
        None => writeln!(out, "not verified")?,
    }
    if !done.already_complete {
        human_time(out, done)?;
    }
    if let Some(hash) = &done.sha256 {
        labelled(out, "sha256", hash)?;
    }
    layer_table(out, r, layers)?;
    done.next_steps.human(out)
}

/// Names the bytes of the weight files, where they print otherwise than those of the tensors.
pub fn in_files(quality: &Quality) -> String {
    let weights = quality.hashes.weights.iter().filter(|(name, _)| !name.ends_with(".json"));
    let files = bytes(weights.map(|(_, digest)| digest.len).sum());
    if files == bytes(quality.bytes) { String::new() } else { format!("; {files} in files") }
}

/// Says by how much an output is larger than its source, as one that is quantized itself may be; empty if it is not.
pub fn larger(output: u64, source: u64) -> String {
    let percent = 100.0 * (output as f64 / source.max(1) as f64 - 1.0);
    if percent < 0.5 { String::new() } else { format!(": {percent:.0} % larger than the source") }
}

/// Prints times, and what an unfinished run contributed.
fn human_time(out: &mut dyn Write, done: &Done<'_>) -> io::Result<()> {
    let beside =
        |what, seconds: Option<f64>| seconds.map(|s| format!(", {what} {s:.2} s")).unwrap_or_default();
    let resumed = match done.resumed {
        0 => String::new(),
        n => format!("; {n} tensors and layers from an unfinished run"),
    };
    let rate = crate::output::count(done.weights_per_second as u64);
    let (synced, verified) = (beside("fsync", done.sync_seconds), beside("verify", done.verify_seconds));
    let text = format!("{:.2} s, {rate} weights/s{synced}{verified}{resumed}", done.seconds);
    labelled(out, "time", &text)
}

/// Returns the notes of single layers, fallbacks of the method first.
pub(super) fn layer_notes(quality: &Quality) -> Vec<String> {
    let layers = &quality.layers;
    let notes = layers.iter().flat_map(|l| l.notes.iter().map(|note| format!("{}: {note}", l.module)));
    let fallen = layers.iter().filter(|layer| layer.fallback.is_some() && layer.method != quality.method);
    let fallen = fallen.filter(|layer| !layer.fallback.as_deref().is_some_and(is_of_scheme));
    let fallen = fallen.filter_map(|l| Some(format!("{}: {}", l.module, fallback(l, quality)?)));
    fallen.chain(notes).collect()
}

/// Returns what a layer has instead of what the recipe asks, with the reason: `q5_0 instead of q4_k: …`.
fn fallback(layer: &LayerReport, quality: &Quality) -> Option<String> {
    let why = layer.fallback.as_ref()?;
    let told = layer.method == quality.method || is_of_scheme(why);
    Some(if told { why.clone() } else { format!("{} instead of {}: {why}", layer.method, quality.method) })
}

/// True if the reason of a fallback names the scheme, as notes of the plan do.
fn is_of_scheme(why: &str) -> bool {
    why.contains(" instead of ")
}
