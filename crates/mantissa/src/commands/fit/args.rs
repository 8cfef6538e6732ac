//! Arguments of `mantissa fit`.

use std::path::PathBuf;

use anyhow::Result;
use mantissa_jobs::{BudgetText, CandidateScheme, Fit, FitArguments};
use mantissa_plan::contract::EngineTarget;
use mantissa_store::convention::Container;

use crate::commands::calibration::CalibrationArgs;
use crate::commands::lint;
use crate::commands::model::ModelPath;
use crate::commands::outcome::MeasureArgs;
use crate::commands::parse::{container, page_path};
use crate::commands::tables::TableArgs;
use crate::commands::text::bound;
use crate::commands::workers::EngineArgs;

/// Choose each layer's scheme and method by KL, under a budget
///
/// Quantizes the model under each candidate scheme by each method, measures the KL of each layer alone on
/// --text, and chooses for each layer, so that the sum of KL is smallest.
///
/// Fused layers (qkv, gate_up) share one scheme and method, and so do all experts of a layer. Embeddings, head, norms
/// and routers keep their dtype; they count in a budget of bytes, not in one of bits per weight. Every other
/// window of the text, up to --windows, is used for the choice; the output is evaluated on the rest before it
/// appears at --out. A method that learns whole decoder layers (autoround) takes all of a layer or none. One with
/// a transform is not mixed with others: all layers use it if its sum is the smallest.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa fit demo --budget 6bpw --schemes int4-g32,int8-g32 \\
      --text story.txt --context 128 --out demo-fit
  mantissa fit path/to/model --budget 6GB --method gptq,qtip \\
      --calibration text.txt --text sample.txt --out model-fit
  mantissa fit path/to/model --budget 5bpw --schemes int4-g128,int8-g128 \\
      --for vllm:tp=2 --text sample.txt --out model-vllm")]
pub struct Args {
    /// Unquantized folder or .gguf file, or demo
    ///
    /// A Hugging Face folder, or a GGUF file of F16, BF16 or F32. demo is the model inside the binary.
    pub(super) model: ModelPath,
    /// Bits per weight (4.5bpw), total size (6GB) or memory
    ///
    /// Bits per weight count the quantized layers with their scales and zero points; a size counts all tensors.
    /// "24GB with 32k context and 8 sequences on rtx4090" counts tensors, KV caches and activations, at most what the
    /// device leaves to a model, and chooses the KV cache's scheme too: of f16, fp8, int8 and int4 those that the format
    /// stores, each by its measured KL.
    #[arg(long, value_name = "BUDGET", value_parser = BudgetText::parse, help_heading = "Recipe")]
    pub(super) budget: BudgetText,
    /// Output folder, or GGUF file if it ends in .gguf
    ///
    /// GGUF output in a folder is named MODEL-fit.gguf.
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    pub(super) out: PathBuf,
    /// Methods, as in recipe names
    ///
    /// Separated by commas. Each layer takes one of them, except those that cannot be mixed: the report says which and why.
    #[arg(
        long,
        value_name = "METHODS",
        value_delimiter = ',',
        default_value = "rtn",
        help_heading = "Recipe"
    )]
    pub(super) method: Vec<String>,
    /// Candidate schemes [default: int3,int4,int6,int8]
    ///
    /// Separated by commas, such as int4-g32,int8-channel. Integers without a group, as the default ones, have groups of 128
    /// (int4-g128), or of 32 if 128 does not divide every row; for qtip the default is trellis2, trellis3, trellis4. With
    /// several methods each takes those that it can.
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',', help_heading = "Recipe")]
    pub(super) schemes: Vec<CandidateScheme>,
    /// Checkpoint format [default: from the schemes]
    ///
    /// The default is the first format that holds the schemes.
    #[arg(long, value_name = "FORMAT", value_parser = container, help_heading = "Output")]
    pub(super) format: Option<Container>,
    #[command(flatten)]
    pub(super) tables: TableArgs,
    #[command(flatten)]
    pub(super) calibration: CalibrationArgs,
    /// Engine that the output must load in
    ///
    /// Refuses (exit code 1) what this engine would not load or would compute wrongly; see `mantissa lint` for
    /// ENGINE[:tp=N,gpu=NAME].
    #[arg(long = "for", value_name = "ENGINE", value_parser = lint::target, help_heading = "Recipe")]
    pub(super) targets: Vec<EngineTarget>,
    /// Maximum number of windows for measuring each layer
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Evaluation", hide_short_help = true)]
    pub(super) windows: u32,
    /// Measure no further scheme after this many minutes
    ///
    /// The choice is then among the schemes that are measured, the smallest first. Measurements are kept until the
    /// output is complete: the same command resumes.
    #[arg(long, value_name = "MINUTES", value_parser = bound, help_heading = "Evaluation", hide_short_help = true)]
    pub(super) time_limit: Option<f64>,
    /// Keep measurements in FILE and reuse those there
    ///
    /// Measurements do not depend on the budget: with the same file another budget quantizes only its output.
    #[arg(long, value_name = "FILE", help_heading = "Evaluation", hide_short_help = true)]
    pub(super) measurements: Option<PathBuf>,
    /// Save the recipe found, for `quantize --recipe`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) save_recipe: Option<PathBuf>,
    /// List every unit, not only the ten with the largest KL
    #[arg(long, help_heading = "Output")]
    pub(super) layers: bool,
    /// Write an HTML page as well
    #[arg(long, value_name = "FILE", value_parser = page_path(), help_heading = "Output")]
    pub(super) html: Option<PathBuf>,
    #[command(flatten)]
    pub(super) measure: MeasureArgs,
    #[command(flatten)]
    pub(super) workers: EngineArgs,
}

impl Args {
    /// Finds format and place of the output.
    ///
    /// # Errors
    /// As [`FitArguments::resolve`].
    pub(super) fn resolved(&self, seed: u64) -> Result<Fit> {
        let arguments = FitArguments {
            model: self.model.job_path().clone(),
            budget: self.budget.clone(),
            out: self.out.clone(),
            methods: self.method.clone(),
            schemes: self.schemes.clone(),
            format: self.format,
            tables: self.tables.value(),
            calibration: self.calibration.value(),
            targets: self.targets.clone(),
            windows: self.windows,
            time_limit: self.time_limit,
            measurements: self.measurements.clone(),
            save_recipe: self.save_recipe.clone(),
            measure: self.measure.value(),
            seed,
        };
        Ok(arguments.resolve()?)
    }
}
