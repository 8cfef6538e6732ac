//! `mantissa plan`: which precision to choose, what it takes and how fast it can be, before anything is quantized.

mod device;
mod page;
mod subject;
mod text;
mod train;

use std::path::PathBuf;

use anyhow::Result;
use mantissa_plan::hardware::Device;
use mantissa_plan::precision::Kv;
use mantissa_plan::recommend::{self, Answer, Load, MAX_KL, TrainAnswer};
use mantissa_plan::shape::ModelShape;
use mantissa_store::{Kind, Paths};
use serde::Serialize;

pub use self::device::device;
pub use self::subject::{Subject, context_of};

use super::model::ModelPath;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::bytes;

/// Predict memory and speed of each precision, and choose one
///
/// Needs no weights: a config.json is enough, or --params. Every figure is predicted from the sizes of the model and
/// the limits of the hardware; speeds are intervals. The quality losses were measured on our own models and rank
/// precisions. What no kernel of the hardware runs is refused with the name of its fallback.
///
/// --memory stands for the memory of the hardware here. Check a prediction with mantissa bench.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa plan --params 32B --hardware rtx4090 --context 32k
  mantissa plan demo
  mantissa plan path/to/config.json --hardware h100 --batch 64 --context 8192
  mantissa plan --params 30B-A3B --hardware a100 --devices 2
  mantissa plan --params 8B --hardware h100 --train
  mantissa plan --params 70B --hardware h100 --train qlora")]
pub struct Args {
    #[command(flatten)]
    subject: Subject,
    /// Tokens that each sequence may hold, such as 32k
    ///
    /// [default: 4096, or the model's context if that is shorter; for --train 2048]
    #[arg(long, value_name = "N", value_parser = tokens)]
    context: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    batch: u64,
    /// Tokens of a prompt [default: 3/4 of the context]
    #[arg(long, value_name = "N", value_parser = tokens)]
    prefill: Option<u64>,
    /// Tokens of an answer [default: the rest, at most 1024]
    #[arg(long, value_name = "N", value_parser = tokens)]
    decode: Option<u64>,
    /// Devices that share each layer
    ///
    /// Tensor parallelism. With --train, devices that share the state.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    devices: u64,
    /// Bits of the values that devices sum
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = clap::value_parser!(u8).range(4..=32), hide_short_help = true)]
    reduce_bits: u8,
    /// Storage of keys and values: f16, fp8, int8, int4
    ///
    /// [default: the widest that fits]
    #[arg(long, value_name = "SCHEME", value_parser = kv)]
    kv: Option<Kv>,
    /// Largest measured loss to recommend
    ///
    /// KL in nats/token on our own models.
    #[arg(long, value_name = "KL", default_value_t = MAX_KL)]
    max_kl: f64,
    /// Plan training: full, lora or qlora
    #[arg(long, value_name = "KIND", num_args = 0..=1, default_missing_value = "full", value_enum)]
    train: Option<train::What>,
    #[command(flatten)]
    training: train::TrainArgs,
    /// Write an HTML page as well
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Parses a number of tokens: digits, or with a k of 1024.
pub(super) fn tokens(text: &str) -> Result<u64, String> {
    let lower = text.to_lowercase();
    let (digits, factor) = lower.strip_suffix('k').map_or((&*lower, 1), |digits| (digits, 1024));
    let count = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
    let allowed = (1..=1 << 30).contains(&count.unwrap_or(0));
    count
        .filter(|_| allowed)
        .ok_or_else(|| format!("expected a number of tokens such as 8192 or 32k, got {text:?}"))
}

/// Parses a KV scheme.
fn kv(text: &str) -> Result<Kv, String> {
    Kv::named(text).map_err(|error| error.to_string())
}

/// Result of a plan.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a ModelShape,
    parameters: u64,
    active_parameters: u64,
    hardware: &'a Device,
    /// All figures of bytes and speed are predicted.
    predicted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<Load>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    inference: Option<&'a Answer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    training: Option<&'a TrainAnswer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page: Option<&'a PathBuf>,
}

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.subject.paths(paths);
    args.html.iter().for_each(|file| paths.write("--html", file, Kind::File));
}

/// Runs the command.
///
/// # Errors
/// A model, a size or hardware that cannot be used; I/O.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let shape = args.subject.shape(context)?;
    let device = device(args.subject.hardware(), context)?;
    if !args.max_kl.is_finite() || args.max_kl < 0.0 {
        return Err(BadInput::new("--max-kl", args.max_kl.to_string(), "a number of at least 0").into());
    }
    let asked =
        Asked { args, shape: &shape, device: &device, memory: context.memory.map(|memory| memory as f64) };
    match args.train {
        Some(what) => train::run(&asked, what, context),
        None => inference(&asked, context),
    }
}

/// Question with its model and device.
struct Asked<'a> {
    args: &'a Args,
    shape: &'a ModelShape,
    device: &'a Device,
    memory: Option<f64>,
}

impl Asked<'_> {
    /// Describes what is planned, for the first line.
    fn title(&self) -> String {
        let ModelShape { name, assumed, .. } = self.shape;
        let parameters = mantissa_plan::shape::billions(self.shape.parameters());
        let active = match self.shape.is_mixture() {
            true => format!(", {} active", mantissa_plan::shape::billions(self.shape.active_parameters())),
            false => String::new(),
        };
        let assumed = assumed.as_ref().map_or_else(String::new, |assumed| format!("; {assumed}"));
        let memory = self.memory.map_or_else(
            || format!("{} usable", bytes(self.device.available() as u64)),
            |memory| format!("--memory {}", bytes(memory as u64)),
        );
        let devices =
            if self.args.devices > 1 { format!("{} × ", self.args.devices) } else { String::new() };
        format!(
            "{name}: {parameters} parameters{active}{assumed}. {devices}{} ({memory}, {:.0} GB/s).",
            self.device.title,
            self.device.bandwidth / 1e9
        )
    }
}

fn inference(asked: &Asked<'_>, context: &Context) -> Result<()> {
    let load = load(asked)?;
    let answer = recommend::answer(asked.shape, asked.device, &load);
    if let Some(file) = &asked.args.html {
        page::inference(asked, &load, &answer).write(&context.output(file)?)?;
    }
    let report = Report {
        model: asked.shape,
        parameters: asked.shape.parameters(),
        active_parameters: asked.shape.active_parameters(),
        hardware: asked.device,
        predicted: true,
        load: Some(load),
        inference: Some(&answer),
        training: None,
        page: asked.args.html.as_ref(),
    };
    context.report(&report, |out| text::inference(asked, &load, &answer, out))
}

/// Completes the load from the flags and the model.
fn load(asked: &Asked<'_>) -> Result<Load> {
    let args = asked.args;
    let context = context_of(args.context, 4096, asked.shape)?;
    let prefill = args.prefill.unwrap_or(context * 3 / 4).max(1);
    let decode = args.decode.unwrap_or_else(|| context.saturating_sub(prefill).clamp(1, 1024));
    if prefill + decode > context && (args.prefill.is_some() || args.decode.is_some()) {
        let found = format!("{prefill} + {decode}");
        return Err(BadInput::new(
            "--prefill, --decode",
            found,
            format!("at most --context {context} together"),
        )
        .with_fix(format!("--context {}", prefill + decode))
        .into());
    }
    Ok(Load {
        context,
        batch: args.batch,
        prefill,
        decode,
        devices: args.devices,
        reduce_bits: f64::from(args.reduce_bits),
        kv: args.kv,
        max_kl: args.max_kl,
        memory: asked.memory,
    })
}

/// Returns the command that measures what a plan predicts.
fn measures(model: Option<&ModelPath>) -> String {
    let model = model.map_or_else(|| "MODEL".to_owned(), |model| super::ending::quoted(model.typed()));
    format!("mantissa bench {model}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_tokens_parse() {
        assert_eq!((tokens("32k"), tokens("4096")), (Ok(32_768), Ok(4096)));
        for wrong in ["", "k", "0", "-1", "4M", "9999999999k"] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
    }
}
