//! Arguments of `mantissa plan`.

use std::path::PathBuf;

use clap::ValueEnum;
use mantissa_jobs::parse_count;
use mantissa_plan::contract::{Engine, EngineTarget};
use mantissa_plan::hardware::Host;
use mantissa_plan::parallel::Parallel;
use mantissa_plan::precision::Kv;
use mantissa_plan::recommend::MAX_KL;
use mantissa_plan::training::parse_link;

use super::subject::Subject;

/// Predict memory and speed of each precision, and choose one
///
/// Needs no weights: a config.json is enough, or --params. Every figure is predicted from the sizes of the model and
/// the limits of the hardware; speeds are intervals. The quality losses were measured on our own models and rank
/// precisions. What no kernel of the hardware runs is refused with the name of its fallback.
///
/// --memory stands for the memory of the hardware here; of a Mac's, Metal lets the GPU use 3/4, or 2/3 below 36 GB. What
/// does not fit a GPU is split with the host as llama.cpp does (--host). Check a prediction with mantissa bench.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa plan --params 32B --hardware rtx4090 --context 32k
  mantissa plan demo
  mantissa plan --hardware list
  mantissa plan --params 70B --hardware rtx4090 --host 90GB/s
  mantissa plan --params 8B --hardware memory=12GB,bandwidth=672GB/s,bf16=62T
  mantissa plan path/to/config.json --hardware h100 --batch 64 --context 8192
  mantissa plan --params 30B-A3B --hardware a100 --devices 2
  mantissa plan --params DeepSeek-V3 --hardware h200 --devices 8 --parallel data
  mantissa plan --params 8B --hardware h100 --for vllm --bits 8
  mantissa plan --params 8B --hardware h100 --train
  mantissa plan --params 8B --hardware h100 --train --devices 8 --link 100Gb
  mantissa plan --params 70B --hardware h100 --train qlora")]
pub struct Args {
    #[command(flatten)]
    pub(super) subject: Subject,
    /// Tokens that each sequence may hold, such as 32k
    ///
    /// [default: 4096, or the model's context if that is shorter; for --train 2048]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) context: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(super) batch: u64,
    /// Tokens of a prompt [default: 3/4 of the context]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) prefill: Option<u64>,
    /// Tokens of an answer [default: the rest, at most 1024]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) decode: Option<u64>,
    /// Devices that share the model
    ///
    /// With --train, devices that share the state.
    #[arg(long, alias = "nodes", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub(super) devices: u64,
    /// How they share it, such as pipeline
    ///
    /// tensor: a part of every matrix and the heads of every sequence, at least one head; data: the attention of its own
    /// sequences, a part of the rest; expert: its own sequences and a part of the experts; pipeline: a part of the layers.
    #[arg(long, value_name = "WAY", default_value = "tensor", value_parser = parallel, conflicts_with = "train")]
    pub(super) parallel: Parallel,
    /// Bits of the values that devices exchange
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = clap::value_parser!(u8).range(4..=32), hide_short_help = true)]
    pub(super) reduce_bits: u8,
    /// Storage of keys and values: f16, fp8, int8, int4
    ///
    /// Also fp8-head (a stored scale for each head) and nvfp4, which the default does not choose. [default: the widest that
    /// fits]
    #[arg(long, value_name = "SCHEME", value_parser = kv)]
    pub(super) kv: Option<Kv>,
    /// Speed (and size) of the memory beside the GPU: 90GB/s
    ///
    /// Read bandwidth, or bandwidth=90GB/s,memory=64GB. Layers of a GGUF file that do not fit the GPU are read from there.
    /// [default: 89.6 GB/s, two channels of DDR5-5600]
    #[arg(long, value_name = "FIGURES", value_parser = host, conflicts_with = "train")]
    pub(super) host: Option<Host>,
    /// Engine that is to run it, such as vllm
    ///
    /// Only precisions that it runs on this hardware, in the format of its users, as mantissa quantize --for chooses them.
    #[arg(long = "for", value_name = "ENGINE", value_parser = engine, conflicts_with = "train")]
    pub(super) engine: Option<&'static Engine>,
    /// Nominal bits per weight, 2 to 8
    ///
    /// Its measured loss is not limited then.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u32).range(2..=8), conflicts_with_all = ["train", "max_kl"])]
    pub(super) bits: Option<u32>,
    /// Largest measured loss to recommend
    ///
    /// KL in nats/token on our own models.
    #[arg(long, value_name = "KL", default_value_t = MAX_KL)]
    pub(super) max_kl: f64,
    /// Plan training: full, lora or qlora
    #[arg(long, value_name = "KIND", num_args = 0..=1, default_missing_value = "full", value_enum)]
    pub(super) train: Option<What>,
    #[command(flatten)]
    pub(super) training: TrainArgs,
    /// Write an HTML page as well
    #[arg(long, value_name = "FILE", value_parser = crate::commands::parse::page_path())]
    pub(super) html: Option<PathBuf>,
}

/// Parses a KV scheme.
fn kv(text: &str) -> Result<Kv, String> {
    Kv::named(text).map_err(|error| error.to_string())
}

/// Parses the figures of a host.
fn host(text: &str) -> Result<Host, String> {
    Host::parse(text).map_err(|error| error.to_string())
}

/// Parses the name of an engine.
fn engine(text: &str) -> Result<&'static Engine, String> {
    match EngineTarget::parse(text) {
        Ok(EngineTarget { engine, tp: 1, gpu: None }) => Ok(engine),
        Ok(_) => Err("expected an engine alone: --hardware names the GPU, --devices their number".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a way of sharing.
fn parallel(text: &str) -> Result<Parallel, String> {
    Parallel::named(text).map_err(|error| error.to_string())
}

/// Trained part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Every weight
    Full,
    /// Low-rank adapters on bf16 weights
    Lora,
    /// Low-rank adapters on NF4 weights
    Qlora,
}

impl What {
    /// Returns the name of the adapter.
    pub(super) fn adapter(self) -> Option<&'static str> {
        match self {
            What::Full => None,
            What::Lora => Some("lora"),
            What::Qlora => Some("qlora"),
        }
    }
}

/// Flags of training.
#[derive(clap::Args)]
pub struct TrainArgs {
    /// Stage of ZeRO, 0 to 3
    #[arg(long, value_name = "STAGE", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3), help_heading = "Training")]
    pub(super) zero: u32,
    /// Speed of the link of each device, such as 100Gb
    ///
    /// Bits (100Gb, 400Gbit/s) or bytes (12.5GB/s) a second: what --devices exchange in a step, by stage of ZeRO and format.
    #[arg(long, value_name = "SPEED", value_parser = parse_link, requires = "train", help_heading = "Training")]
    pub(super) link: Option<f64>,
    /// Rank of adapters
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096), help_heading = "Training")]
    pub(super) rank: u64,
    /// Store attention scores too (no flash attention)
    #[arg(long, help_heading = "Training", hide_short_help = true)]
    pub(super) store_scores: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_tokens_parse() {
        assert_eq!((parse_count("32k"), parse_count("4096")), (Ok(32_768), Ok(4096)));
        for wrong in ["", "k", "0", "-1", "4M", "9999999999k"] {
            assert!(parse_count(wrong).is_err(), "{wrong}");
        }
    }
}
