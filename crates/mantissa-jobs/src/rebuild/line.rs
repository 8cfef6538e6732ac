//! Command lines that earlier versions recorded, as jobs.

use mantissa_quant::CommandLine;
use mantissa_store::Shown;
use mantissa_store::convention::Container;

use super::files::{SPLIT, require_plain};
use super::{RECORDED, RecordedJob};
use crate::calibration::WeightedText;
use crate::convert::Convert;
use crate::error::{BadInput, Result};
use crate::job::Job;
use crate::names::{AsText, Format};
use crate::quantize::{CalibrationDtype, Quantize, RecipeText, RoundChoice, WeightOptions};
use crate::tables::{scheme, short_or_scheme};
use crate::text::parse_bytes;

/// Options that decide the bytes of an output. Only these were recorded, and only these are accepted.
const DECIDING: [&str; 18] = [
    "recipe",
    "format",
    "head",
    "embeddings",
    "untie",
    "calibration",
    "calibration-tokens",
    "samples",
    "length",
    "generated-samples",
    "imatrix",
    "hold-out",
    "calibration-dtype",
    "route-all-experts",
    "round",
    "max-shard-size",
    "requantize",
    "drop-inputs",
];

/// Returns the name of an option `--name` or `--name=value`.
pub(super) fn option_name(argument: &str) -> Option<&str> {
    let option = argument.strip_prefix("--")?;
    Some(option.split_once('=').map_or(option, |(name, _)| name))
}

/// Turns a recorded command line into the job that it stands for; `place` names the record.
///
/// # Errors
/// A command or an option that decides no bytes; a value that is no plain name, or none of this version.
pub(super) fn job(place: &str, line: &CommandLine) -> Result<RecordedJob> {
    let foreign = |argument: &&String| {
        option_name(argument).is_none_or(|name| name != SPLIT && !DECIDING.contains(&name))
    };
    let foreign = line.arguments.iter().find(foreign);
    let foreign = foreign.or(Some(&line.command).filter(|command| !RECORDED.contains(&command.as_str())));
    if let Some(foreign) = foreign {
        let allowed = format!("{} with the options that decide its output", RECORDED.join(" or "));
        return Err(BadInput::new(place, Shown(foreign).to_string(), allowed).into());
    }
    line.arguments.iter().try_for_each(|argument| require_plain(place, argument, line.recipe.is_some()))?;
    let refused = |argument: &str, why: &str| {
        let found = format!("{argument} ({why})");
        BadInput::new(place, Shown(&found).to_string(), "a command of this version")
    };
    if line.command == Convert::NAME {
        let (mut job, mut format) = (Convert::default(), None);
        for argument in &line.arguments {
            convert_option(&mut job, &mut format, argument).map_err(|why| refused(argument, &why))?;
        }
        let format = format.ok_or_else(|| refused("convert", "no --format"))?;
        return Ok(RecordedJob::Convert(Box::new(Convert { format, ..job })));
    }
    let mut weights = WeightOptions { seed: line.seed, ..WeightOptions::default() };
    weights.recipe.text.clone_from(&line.recipe);
    for argument in &line.arguments {
        weight_option(&mut weights, argument).map_err(|why| refused(argument, &why))?;
    }
    Ok(RecordedJob::Quantize(Box::new(Quantize { weights, ..Quantize::default() })))
}

/// Sets the option of a quantization.
fn weight_option(weights: &mut WeightOptions, argument: &str) -> std::result::Result<(), String> {
    let (name, value) = (option_name(argument).unwrap_or_default(), value(argument));
    let calibration = &mut weights.calibration;
    match (name, value) {
        ("recipe", Some(name)) => {
            weights.recipe = RecipeText { name: name.to_owned(), text: weights.recipe.text.take() };
        }
        ("format", Some(name)) => weights.format = Some(format(name)?),
        ("head", Some(name)) => weights.tables.head = Some(short_or_scheme(name)?),
        ("embeddings", Some(name)) => weights.tables.embeddings = Some(short_or_scheme(name)?),
        ("untie", None) => weights.tables.untie = true,
        ("keep", Some(pattern)) => weights.keep.push(pattern.to_owned()),
        ("calibration", Some(text)) => calibration.texts.push(WeightedText::parse(text)?),
        ("calibration-tokens", Some(file)) => calibration.tokens = Some(file.to_owned()),
        ("samples", Some(n)) => calibration.samples = Some(number(n)?),
        ("length", Some(n)) => calibration.length = Some(number(n)?),
        ("generated-samples", Some(n)) => calibration.generated = number(n)?,
        ("imatrix", Some(file)) => weights.imatrix = Some(file.into()),
        ("hold-out", Some(n)) => weights.hold_out = number(n)?,
        ("calibration-dtype", Some("f32")) => weights.calibration_dtype = CalibrationDtype::F32,
        ("calibration-dtype", Some("bf16")) => weights.calibration_dtype = CalibrationDtype::Bf16,
        ("route-all-experts", None) => weights.route_all_experts = true,
        ("round", Some("nearest")) => weights.round = RoundChoice::Nearest,
        ("round", Some("stochastic")) => weights.round = RoundChoice::Stochastic,
        ("max-shard-size", Some(size)) => weights.max_shard_size = Some(parse_bytes(size)?),
        (SPLIT, Some(separator)) => weights.split = Some(separator.to_owned()),
        _ => return Err("expected an option of quantize with its value".to_owned()),
    }
    Ok(())
}

/// Sets the option of a conversion.
fn convert_option(
    job: &mut Convert,
    named: &mut Option<Format>,
    argument: &str,
) -> std::result::Result<(), String> {
    match (option_name(argument).unwrap_or_default(), value(argument)) {
        ("format", Some(name)) => *named = Some(format(name)?),
        ("requantize", Some(name)) => job.requantize = Some(AsText(scheme(name)?)),
        ("drop-inputs", None) => job.drop_inputs = true,
        ("max-shard-size", Some(size)) => job.max_shard_size = Some(parse_bytes(size)?),
        _ => return Err("expected an option of convert with its value".to_owned()),
    }
    Ok(())
}

fn value(argument: &str) -> Option<&str> {
    argument.split_once('=').map(|(_, value)| value)
}

fn format(name: &str) -> std::result::Result<Format, String> {
    let found = Container::named(&name.to_lowercase());
    found.map(Format).ok_or_else(|| "no checkpoint format".to_owned())
}

fn number<T: std::str::FromStr>(text: &str) -> std::result::Result<T, String> {
    text.parse().map_err(|_| "expected a whole number".to_owned())
}
