//! `mantissa convert`: stores the same codes and scales in another checkpoint format.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::{Convert, ConvertArguments, Job, finished};
use mantissa_num::Scheme;
use mantissa_quant::Quality;
use mantissa_quant::verify::Verification;
use mantissa_store::Paths;
use mantissa_store::convention::Container;
use serde::Serialize;

use super::execute::Execute;
use super::model::ModelPath;
use super::outcome::{MeasureArgs, human_figures, layer_table, linear_bits, tell_failure};
use super::parse::{container, scheme};
use super::quantize::ALREADY;
use super::workers::{Engaged, EngineArgs};
use crate::context::Context;
use crate::help::Group;
use crate::output::{bytes, counted, labelled};

/// Convert a quantized model to another format without loss
///
/// Keeps codes and scales: compressed-tensors, GPTQ, AWQ, ModelOpt, GGUF and others, wherever the target
/// format can hold them exactly. A dense model becomes a dense GGUF file.
///
/// Refuses, with layer and reason, what the target format cannot hold: a scale that does not fit a narrower
/// dtype, a zero point, a block type. The output is read back and compared layer by layer before it appears.
/// It is bit-exact, except for NVFP4's global scale, which some formats store as the reciprocal (within one
/// unit in the last place).
///
/// With --requantize, weights are decoded and rounded to nearest under another scheme, and the error is
/// reported; with --text or --tokens also the quality loss on that text.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa convert demo-nvfp4 --format gguf --out demo-nvfp4.gguf
  mantissa convert path/to/model.gguf --format compressed-tensors \\
      --out model-ct --json
  mantissa convert path/to/model-gptq --format gguf --requantize q4_0 \\
      --out model-q4_0.gguf --text sample.txt")]
pub struct Args {
    /// Model folder or .gguf file
    model: ModelPath,
    /// Checkpoint format of the output
    #[arg(long, value_name = "FORMAT", value_parser = container, help_heading = "Output")]
    format: Container,
    /// Output folder, or GGUF file if it ends in .gguf
    ///
    /// GGUF output in a folder is named MODEL-SCHEME.gguf.
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    out: PathBuf,
    /// Decode the weights and round them to this scheme
    #[arg(long, value_name = "SCHEME", value_parser = scheme, help_heading = "Output")]
    requantize: Option<Scheme>,
    /// Drop the run-time quantization of activations
    ///
    /// Not every format can hold it.
    #[arg(long, help_heading = "Output", hide_short_help = true)]
    drop_inputs: bool,
    /// Verify the output before it appears at --out
    ///
    /// With --verify=false the output is only opened.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set, help_heading = "Output", hide_short_help = true)]
    verify: bool,
    /// Maximum size of a weight file [default: 5G; GGUF: none]
    ///
    /// A split NAME.gguf becomes NAME-00001-of-0000N.gguf and so on.
    #[arg(long, value_name = "SIZE", value_parser = crate::output::parse_bytes, help_heading = "Output", hide_short_help = true)]
    max_shard_size: Option<u64>,
    /// With --requantize, list every layer, not only the ten worst
    #[arg(long, help_heading = "Output", hide_short_help = true)]
    layers: bool,
    #[command(flatten)]
    workers: EngineArgs,
    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Serialize)]
struct Done<'a> {
    output: &'a Path,
    /// True if the output was there: complete, of this job, and with the hashes of its manifest. Nothing was written.
    already_complete: bool,
    /// Checkpoint format of the source.
    from: &'static str,
    /// True if every layer's weight was read back unchanged.
    lossless: bool,
    /// True if run-time quantization of activations was dropped.
    dropped_inputs: bool,
    /// Largest relative error of a requantized layer against the source.
    max_relative_error: Option<f64>,
    #[serde(flatten)]
    quality: &'a Quality,
    verification: Option<&'a Verification>,
}

impl Args {
    /// Finds the place of the output.
    fn resolved(&self) -> Result<Convert> {
        let arguments = ConvertArguments {
            model: self.model.job_path().clone(),
            format: self.format,
            out: self.out.clone(),
            requantize: self.requantize.clone(),
            drop_inputs: self.drop_inputs,
            verify: self.verify,
            max_shard_size: self.max_shard_size,
            measure: self.measure.value(),
        };
        Ok(arguments.resolve()?)
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// As [`ConvertArguments::resolve`].
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.resolved()?.paths();
        paths.answer_finished("--out");
        Ok(())
    }

    /// # Errors
    /// Unreadable input; weights that the format cannot hold; I/O;
    /// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if the output does not verify.
    fn run(&self, context: &Context) -> Result<()> {
        let job = self.resolved()?;
        let mut prepared = job.prepare(context)?;
        let found = finished::output_of_plan(&prepared.plan, &prepared.source, &job.out, false, context)?;
        let already_complete = found.is_some();
        let outcome = match found {
            Some(outcome) => outcome,
            None => {
                let engaged = self.workers.engage(&job, &job.out, prepared.plan.units(), context)?;
                if let Engaged::Scripted = engaged {
                    return Ok(());
                }
                if let Engaged::Crew(crew) = &engaged {
                    prepared.share(&crew.team, context)?;
                }
                let outcome = tell_failure(prepared.run(context), context)?;
                if let Engaged::Crew(crew) = engaged {
                    crew.finish(context);
                }
                outcome
            }
        };
        let errors = outcome.quality.layers.iter().map(|layer| layer.error.relative_error);
        let done = Done {
            output: crate::output::written(&job.out, prepared.plan.container, &outcome),
            already_complete,
            from: prepared.source.dequantized_from().unwrap_or_else(|| prepared.source.convention_name()),
            lossless: self.requantize.is_none(),
            dropped_inputs: self.drop_inputs,
            max_relative_error: self.requantize.as_ref().map(|_| errors.fold(0.0, f64::max)),
            quality: &outcome.quality,
            verification: outcome.verification.as_ref().map(|(verification, _)| verification),
        };
        context.report(&done, |out| human(out, &done, self.layers))
    }
}

fn human(out: &mut dyn Write, done: &Done<'_>, layers: bool) -> io::Result<()> {
    let quality = done.quality;
    let (output, count) = (done.output.display(), quality.layers.len());
    let count = counted(count as u64, "layer");
    let formats = format!("{output}: {count} from {} to {}", done.from, quality.container);
    labelled(out, "output", &formats)?;
    labelled(out, "size", &bytes(quality.bytes))?;
    let linear = linear_bits(quality.linear_bits_per_weight, quality.linear_stored_bits_per_weight);
    labelled(out, "bits", &format!("{linear} in linear layers"))?;
    let codes = match done.max_relative_error {
        Some(error) => format!("requantized: largest relative error of a layer {error:.4}"),
        None => "all codes and scales kept, verified by reading back".to_owned(),
    };
    labelled(out, "codes", &codes)?;
    quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
    super::tasks::human(out, &quality.tasks)?;
    match done.verification {
        _ if done.already_complete => labelled(out, "time", ALREADY)?,
        Some(v) => super::verify::human(out, v)?,
        None => writeln!(out, "not verified")?,
    }
    if done.max_relative_error.is_some() { layer_table(out, quality, layers) } else { Ok(()) }
}
