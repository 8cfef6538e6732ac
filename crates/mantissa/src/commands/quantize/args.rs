//! Arguments of `quantize`.

use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::Result;
use mantissa_jobs::{CalibrationDtype, QuantizeArguments, ResolvedQuantize, RoundChoice};
use mantissa_plan::contract::EngineTarget;
use mantissa_store::convention::{Container, ModelFiles};

use super::super::calibration::CalibrationArgs;
use super::super::lint;
use super::super::model::ModelPath;
use super::super::outcome::MeasureArgs;
use super::super::parse::container;
use super::super::tables::TableArgs;
use super::super::workers::EngineArgs;

/// Quantize a model by a recipe, verify and measure the output
///
/// A recipe is a name such as rtn-int4-g128 ([TRANSFORM-]METHOD-SCHEME[+ACTIVATION]), a short name that
/// `mantissa recipes` lists, or a TOML file. Linear layers are quantized; embeddings, head and norms keep
/// their dtype. The output appears only when it is complete, and is the same at any number of threads. A run
/// that was killed, stopped or out of disk space resumes bit-exactly with the same command; GGUF output starts over.
///
/// With --text or --tokens the finished output is compared with the source before it appears at --out, and
/// quality.json next to the weights records the quality loss. With --max-kl the output appears only if the
/// loss is within the limit.
///
/// With --for and without --recipe the recipe with the least measured KL that loads there is chosen, for
/// --bits bits per weight. It is calibrated and measured on a built-in text unless one is given.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("choice").args(["targets", "recipe"]).required(true).multiple(true))]
#[command(after_help = "EXAMPLES
  mantissa quantize demo --for vllm
  mantissa quantize path/to/model --for llama.cpp --bits 5
  mantissa quantize demo --recipe rtn-int4-g128 --out demo-int4
  mantissa quantize demo --recipe gptq-int4-g128 --calibration story.txt \\
      --samples 16 --length 256 --out demo-gptq
  mantissa quantize demo --recipe nvfp4 --out demo-nvfp4 --text story.txt \\
      --context 256 --max-kl 1
  mantissa quantize demo --recipe rtn-q4_0 --out demo-q4_0.gguf
  mantissa quantize demo --recipe rtn-int4-g128 --head int8 --untie \\
      --out demo-int4-head
  mantissa quantize demo --recipe rtn-int4-g32 --format compressed-tensors \\
      --format gptq --out demo-both
  mantissa quantize path/to/model --recipe q4_k_m --imatrix imatrix.gguf \\
      --out model-q4_k_m.gguf
  mantissa quantize path/to/model --recipe rtn-int4-g128 \\
      --for vllm:tp=4,gpu=h100 --out model-int4
  mantissa quantize path/to/model --recipe recipe.toml --out out --dry-run")]
pub struct Args {
    /// Unquantized folder or .gguf file, or demo
    ///
    /// A Hugging Face folder, or a GGUF file of F16, BF16 or F32. demo is the model inside the binary.
    pub(super) model: ModelPath,
    /// Recipe name or TOML file [default with --for: chosen]
    ///
    /// `mantissa recipes` lists the names.
    #[arg(long, value_name = "RECIPE", help_heading = "Recipe")]
    pub(super) recipe: Option<String>,
    /// Bits per weight to choose for [default: 4]
    ///
    /// 2 to 8.
    #[arg(long, value_name = "BITS", conflicts_with = "recipe", value_parser = bits, help_heading = "Recipe")]
    pub(super) bits: Option<u32>,
    /// Output folder or .gguf file [default: MODEL-RECIPE]
    ///
    /// The default is in the working folder. GGUF output in a folder is named MODEL-RECIPE.gguf.
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    pub(super) out: Option<PathBuf>,
    /// Checkpoint format (repeatable) [default: the recipe's]
    ///
    /// The default is the recipe's own format, or the first that holds its schemes. With several formats --out is a
    /// folder that gets one output for each: a folder with the format's name, or model.gguf. Formats that store the
    /// layers alike share one solution. All outputs appear when all are complete.
    #[arg(long = "format", value_name = "FORMAT", value_parser = container, help_heading = "Recipe")]
    pub(super) formats: Vec<Container>,
    #[command(flatten)]
    pub(super) tables: TableArgs,
    /// Layers to leave unquantized, such as '*.down_proj'
    ///
    /// The name of a module, in which * matches any characters. May be given several times, and comes before all rules of
    /// the recipe.
    #[arg(long, value_name = "PATTERN", help_heading = "Recipe")]
    pub(super) keep: Vec<String>,
    #[command(flatten)]
    pub(super) calibration: CalibrationArgs,
    /// Importance matrix for K- and IQ-types
    ///
    /// From llama.cpp or `mantissa imatrix`. Replaces --calibration for types whose rounding is weighted by
    /// column importance.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["calibration", "calibration_tokens"], help_heading = "Calibration")]
    pub(super) imatrix: Option<PathBuf>,
    /// Number of held-out calibration samples
    ///
    /// The fallback test compares each method with RTN on these samples instead of on the calibration. They
    /// are taken evenly, in addition to --samples.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Calibration", hide_short_help = true)]
    pub(super) hold_out: u32,
    /// Matmul operand dtype during calibration
    ///
    /// For activations and Hessians. bf16 is several times faster on a CPU with AMX tiles, and gives the same
    /// result without them.
    #[arg(long, value_enum, value_name = "DTYPE", default_value_t = Factors::F32, help_heading = "Calibration", hide_short_help = true)]
    pub(super) calibration_dtype: Factors,
    /// Run every calibration token through every expert
    ///
    /// By default an expert is calibrated on the tokens that the router sends to it, and one without tokens falls
    /// back to RTN. The results of other experts are discarded, so the model's states stay the same. Costs
    /// calibration time in proportion to experts per token.
    #[arg(long, help_heading = "Calibration", hide_short_help = true)]
    pub(super) route_all_experts: bool,
    /// In-domain text sample to compare the calibration with
    ///
    /// Reports how far the calibration is from it before work begins.
    #[arg(long, value_name = "TEXT", help_heading = "Calibration", hide_short_help = true)]
    pub(super) traffic: Option<PathBuf>,
    /// Engine to quantize for; chooses a missing recipe
    ///
    /// With a recipe, refuses at once (exit code 1) what the engine would not load or would compute wrongly; see
    /// `mantissa lint` for ENGINE[:tp=N,gpu=NAME].
    #[arg(long = "for", value_name = "ENGINE", value_parser = lint::target, help_heading = "Recipe")]
    pub(super) targets: Vec<EngineTarget>,
    /// Preview size, bits per weight and memory; write nothing
    #[arg(long, help_heading = "Output")]
    pub(super) dry_run: bool,
    /// List every layer, not only the ten worst
    #[arg(long, help_heading = "Output")]
    pub(super) layers: bool,
    /// Verify the output before it appears at --out
    ///
    /// With --verify=false the output is only opened.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set, help_heading = "Output", hide_short_help = true)]
    pub(super) verify: bool,
    /// Resume an unfinished run of the same command (the default)
    #[arg(long, conflicts_with = "restart", help_heading = "Output", hide_short_help = true)]
    pub(super) resume: bool,
    /// Start over instead of resuming
    ///
    /// Removes what an unfinished run of the same command left.
    #[arg(long, help_heading = "Output", hide_short_help = true)]
    pub(super) restart: bool,
    /// Rounding between two codes
    ///
    /// Stochastic rounding uses --seed.
    #[arg(long, value_enum, default_value_t = Round::Nearest, help_heading = "Recipe", hide_short_help = true)]
    pub(super) round: Round,
    /// Maximum size of a weight file [default: 5G; GGUF: none]
    ///
    /// A split NAME.gguf becomes NAME-00001-of-0000N.gguf and so on.
    #[arg(long, value_name = "SIZE", value_parser = crate::output::parse_bytes, help_heading = "Output", hide_short_help = true)]
    pub(super) max_shard_size: Option<u64>,
    #[command(flatten)]
    pub(super) workers: EngineArgs,
    #[command(flatten)]
    pub(super) measure: MeasureArgs,
    /// Job, once recipe and output are found: a choice plans every candidate.
    #[arg(skip)]
    resolved: OnceLock<ResolvedQuantize>,
}

impl Args {
    /// Finds recipe and output, with `source` if the model is open; returns what an earlier call found.
    ///
    /// # Errors
    /// As [`QuantizeArguments::resolve`].
    pub(super) fn resolved(&self, source: Option<&ModelFiles>) -> Result<&ResolvedQuantize> {
        match self.resolved.get() {
            Some(found) => Ok(found),
            None => {
                let made = self.arguments().resolve(source)?;
                Ok(self.resolved.get_or_init(|| made))
            }
        }
    }

    /// Returns the arguments of the job.
    fn arguments(&self) -> QuantizeArguments {
        QuantizeArguments {
            model: self.model.job_path().clone(),
            recipe: self.recipe.clone(),
            bits: self.bits,
            out: self.out.clone(),
            formats: self.formats.clone(),
            tables: self.tables.value(),
            keep: self.keep.clone(),
            calibration: self.calibration.value(),
            imatrix: self.imatrix.clone(),
            hold_out: self.hold_out,
            calibration_dtype: match self.calibration_dtype {
                Factors::F32 => CalibrationDtype::F32,
                Factors::Bf16 => CalibrationDtype::Bf16,
            },
            route_all_experts: self.route_all_experts,
            traffic: self.traffic.clone(),
            targets: self.targets.clone(),
            verify: self.verify,
            restart: self.restart,
            round: match self.round {
                Round::Nearest => RoundChoice::Nearest,
                Round::Stochastic => RoundChoice::Stochastic,
            },
            max_shard_size: self.max_shard_size,
            measure: self.measure.value(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Round {
    Nearest,
    Stochastic,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Factors {
    F32,
    Bf16,
}

/// Parses the bits per weight to choose for.
///
/// # Errors
/// A message with the accepted values.
fn bits(text: &str) -> Result<u32, String> {
    let whole = text.parse().ok().filter(|bits| (2..=8).contains(bits));
    whole.ok_or_else(|| "expected a whole number from 2 to 8".to_owned())
}
