//! Options of a command line that makes the same job, as `rebuild` shows them.

use crate::convert::Convert;
use crate::quantize::{CalibrationDtype, RoundChoice, WeightOptions};

/// Returns the options that differ from the defaults, each `--name` or `--name=value`.
pub(super) fn of_weights(weights: &WeightOptions) -> Vec<String> {
    let mut options = Vec::new();
    let value = |name: &str, value: &dyn std::fmt::Display| format!("--{name}={value}");
    let calibration = &weights.calibration;
    options.push(value("recipe", &weights.recipe.name));
    options.extend(weights.format.map(|format| value("format", &format.name())));
    options.extend(weights.tables.head.as_ref().map(|scheme| value("head", scheme)));
    options.extend(weights.tables.embeddings.as_ref().map(|scheme| value("embeddings", scheme)));
    options.extend(weights.tables.untie.then(|| "--untie".to_owned()));
    options.extend(weights.keep.iter().map(|pattern| value("keep", pattern)));
    for text in &calibration.texts {
        let share = if text.weight == 1.0 { String::new() } else { format!(":{}", text.weight) };
        options.push(format!("--calibration={}{share}", text.path.display()));
    }
    options.extend(calibration.tokens.as_ref().map(|tokens| value("calibration-tokens", tokens)));
    options.extend(calibration.samples.map(|samples| value("samples", &samples)));
    options.extend(calibration.length.map(|length| value("length", &length)));
    options.extend((calibration.generated > 0).then(|| value("generated-samples", &calibration.generated)));
    options.extend(weights.imatrix.as_ref().map(|path| value("imatrix", &path.display())));
    options.extend((weights.hold_out > 0).then(|| value("hold-out", &weights.hold_out)));
    let bf16 = weights.calibration_dtype == CalibrationDtype::Bf16;
    options.extend(bf16.then(|| "--calibration-dtype=bf16".to_owned()));
    options.extend(weights.route_all_experts.then(|| "--route-all-experts".to_owned()));
    let stochastic = weights.round == RoundChoice::Stochastic;
    options.extend(stochastic.then(|| "--round=stochastic".to_owned()));
    options.extend(weights.max_shard_size.map(|size| value("max-shard-size", &size)));
    options.extend(weights.split.as_ref().map(|split| value("split", split)));
    options
}

/// Returns the options of a conversion.
pub(super) fn of_conversion(job: &Convert) -> Vec<String> {
    let mut options = vec![format!("--format={}", job.format.name())];
    options.extend(job.requantize.as_ref().map(|scheme| format!("--requantize={}", scheme.0)));
    options.extend(job.drop_inputs.then(|| "--drop-inputs".to_owned()));
    options.extend(job.max_shard_size.map(|size| format!("--max-shard-size={size}")));
    options
}
