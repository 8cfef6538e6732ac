//! Record of a command line in `quality.json`, which `rebuild` replays.

use std::path::Path;

use mantissa_quant::Rebuild;
use mantissa_store::convention::Container;

use crate::context::Context;

/// Options whose values are files, by the names that quality.json has.
pub const FILES: [&str; 3] = ["calibration", "calibration-tokens", "imatrix"];

/// Commands that can be recorded.
pub const COMMANDS: [&str; 2] = ["quantize", "convert"];

/// Options that decide the bytes of an output. Only these are recorded, and only these are accepted from a file.
pub const DECIDING: [&str; 18] = [
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

/// Option of the measured text that also splits a calibration text.
pub const SPLIT: &str = "split";

/// Returns the name of an option `--name` or `--name=value`.
pub fn option_name(argument: &str) -> Option<&str> {
    let option = argument.strip_prefix("--")?;
    Some(option.split_once('=').map_or(option, |(name, _)| name))
}

/// Records the command line that `matches` holds: the options given that decide the bytes of the output, in a fixed
/// order, files by their names.
pub fn record(program: &clap::Command, matches: &clap::ArgMatches, seed: u64) -> Rebuild {
    let Some((name, given)) = matches.subcommand() else { return Rebuild::default() };
    let mut arguments = Vec::new();
    let known = program.find_subcommand(name).into_iter().flat_map(clap::Command::get_arguments);
    for argument in known {
        let Some(long) = argument.get_long().filter(|long| DECIDING.contains(long) || *long == SPLIT) else {
            continue;
        };
        let id = argument.get_id().as_str();
        if given.value_source(id) != Some(clap::parser::ValueSource::CommandLine) {
            continue;
        }
        if !argument.get_action().takes_values() {
            arguments.push(format!("--{long}"));
            continue;
        }
        for value in given.get_raw(id).into_iter().flatten() {
            let value = value.to_string_lossy();
            let name = Path::new(&*value).file_name().filter(|_| FILES.contains(&long) || long == "recipe");
            let value = name.map_or(value.clone(), |name| name.to_string_lossy());
            arguments.push(format!("--{long}={value}"));
        }
    }
    // Without a calibration text it only splits the text that is measured on.
    if !arguments.iter().any(|argument| option_name(argument) == Some("calibration")) {
        arguments.retain(|argument| option_name(argument) != Some(SPLIT));
    }
    Rebuild { command: name.to_owned(), arguments, seed, recipe: None }
}

/// Returns `rebuild` with `argument` in place of those of the same option.
pub fn with(mut rebuild: Rebuild, argument: &str) -> Rebuild {
    let name = option_name(argument).map(str::to_owned);
    rebuild.arguments.retain(|old| option_name(old) != name.as_deref());
    rebuild.arguments.push(argument.to_owned());
    rebuild
}

/// Returns the command line that quantizes by a recipe that this command made, with its calibration.
pub fn of_recipe(context: &Context, (name, text): (&str, String), container: Container) -> Rebuild {
    const KEPT: [&str; 8] = [
        "calibration",
        "calibration-tokens",
        "samples",
        "length",
        "generated-samples",
        "head",
        "embeddings",
        "untie",
    ];
    let mut record = context.job.clone();
    record.arguments.retain(|argument| option_name(argument).is_some_and(|name| KEPT.contains(&name)));
    record.command = "quantize".to_owned();
    record.recipe = Some(text);
    with(with(record, &format!("--recipe={name}")), &format!("--format={}", container.name()))
}
