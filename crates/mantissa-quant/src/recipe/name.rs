//! Recipe names: `[TRANSFORM-][METHOD-]SCHEME[+ACTIVATION][+kv-SCHEME]`, and short names for common ones.

use mantissa_model::KvPolicy;
use mantissa_num::{Scheme, parse_activation};
use mantissa_store::FileDigest;
use mantissa_store::convention::Container;

use super::{FILE_TYPES, FileType, Recipe, RecipeError, TRANSFORMS, Transform};
use crate::autoround::AutoRoundOptions;
use crate::gptq::GptqOptions;
use crate::hqq;
use crate::input_scales::Observer;
use crate::qtip::QtipOptions;
use crate::spqr::SpqrOptions;

/// How codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// Round to nearest: each weight by itself.
    Rtn,
    /// Codes and scales that were there, in another container: no recipe has it.
    Repacked,
    /// GPTQ: column by column, later columns making up for the error of earlier ones, layer after layer.
    Gptq,
    /// SpQR: GPTQ with few weights beside the codes, in f16.
    Spqr,
    /// AutoRound: rounding and ranges learned by block reconstruction, layer after layer.
    AutoRound,
    /// Round to nearest under the range of each block that loses least.
    RtnMse,
    /// HQQ: zero points under which few weights are far off.
    Hqq,
    /// QTIP: paths of a trellis for the weight between two rotations, tile by tile, later ones making up for the error of earlier
    /// ones, layer after layer.
    Qtip,
}

/// Methods by name.
pub const METHODS: [(&str, Method); 7] = [
    ("rtn", Method::Rtn),
    ("rtn-mse", Method::RtnMse),
    ("hqq", Method::Hqq),
    ("gptq", Method::Gptq),
    ("spqr", Method::Spqr),
    ("autoround", Method::AutoRound),
    ("qtip", Method::Qtip),
];

/// The name of GPTQ whose weights make up for what their inputs have become, as GPTAQ has them.
const GPTAQ: &str = "gptaq";

/// The share of it that they make up for under that name: on the models measured all is no better.
const GPTAQ_SHARE: f32 = 0.5;

/// Recipes by name, most of them short for what they stand for.
pub const ALIASES: [(&str, &str); 19] = [
    ("rtn-int4-g128", "rtn-int4-g128"),
    ("hqq-int4-g64", "hqq-int4-g64"),
    ("gptq-int4-g128", "gptq-int4-g128"),
    ("gptq-nvfp4", "gptq-nvfp4"),
    ("gptaq-int4-g128", "gptaq-int4-g128"),
    ("awq-int4-g128-asym", "awq-int4-g128-asym"),
    ("autoround-int4-g128", "autoround-int4-g128"),
    ("autoround-nvfp4", "autoround-nvfp4"),
    ("w8a16", "rtn-int8-channel"),
    ("w4a16", "rtn-int4-g128"),
    ("w8a8", "rtn-int8-channel+int8-token"),
    ("w8a8-smooth", "smooth-int8-channel+int8-token"),
    ("fp8-weight", "rtn-fp8-e4m3-channel"),
    ("fp8-dynamic", "rtn-fp8-e4m3-channel+fp8-e4m3-token"),
    ("nvfp4", "rtn-nvfp4"),
    ("mxfp4", "rtn-mxfp4"),
    ("mxfp8", "rtn-mxfp8-e4m3"),
    ("nf4", "rtn-nf4"),
    ("bf16", "rtn-bf16"),
];

impl Method {
    /// Name in recipes.
    pub fn name(self) -> &'static str {
        METHODS.iter().find(|(_, method)| *method == self).map_or("repacked", |(name, _)| name)
    }

    /// Whether it needs text to calibrate on.
    pub const fn needs_calibration(self) -> bool {
        match self {
            Method::Rtn | Method::RtnMse | Method::Hqq | Method::Repacked => false,
            Method::Gptq | Method::Spqr | Method::AutoRound | Method::Qtip => true,
        }
    }

    /// The scheme that the method makes of one it is named with: HQQ has a zero point where none is said.
    pub(super) fn scheme(self, scheme: Scheme) -> Scheme {
        if self == Method::Hqq { hqq::with_float_zero(scheme) } else { scheme }
    }
}

pub(super) fn parse(text: &str) -> Result<Recipe, RecipeError> {
    if let Some(file_type) = FileType::parse(text) {
        return Ok(of_file_type(text, file_type));
    }
    let spelt = ALIASES.iter().find(|(alias, _)| *alias == text).map_or(text, |(_, full)| full);
    let mut parts = spelt.split('+');
    let first = parts.next().unwrap_or_default();
    let (transform, rest) = transform_and_rest(first);
    let (method, weights) = method_and_scheme(text, rest, transform.is_some())?;
    let drifts = rest.strip_prefix(GPTAQ).is_some_and(|rest| rest.starts_with('-'));
    let (mut activations, mut kv, mut kv_levels) = (None, None, None);
    for part in parts {
        if let Some(rest) = part.strip_prefix("kv-") {
            if kv.is_some() || kv_levels.is_some() {
                return Err(fault(text, part, "one scheme of keys and values"));
            }
            kv_levels = levels_of(rest);
            if kv_levels.is_none() {
                kv = Some(scheme(text, "kv", rest, parse_activation)?);
            }
            continue;
        }
        if activations.is_some() {
            return Err(fault(text, part, "one activation scheme"));
        }
        activations = Some(scheme(text, "activations", part, parse_activation)?);
    }
    Ok(Recipe {
        name: text.to_owned(),
        transform,
        method,
        gptq: gptq_options(if drifts { GPTAQ } else { method.name() }),
        spqr: SpqrOptions::default(),
        autoround: AutoRoundOptions::of(&weights),
        qtip: QtipOptions::default(),
        weights,
        activations,
        observer: Observer::Max,
        kv,
        kv_levels,
        file_type: None,
        container: None,
        layers: Vec::new(),
        sha256: FileDigest::of(text.as_bytes()).hex(),
    })
}

/// The policy of a cache whose levels are found on a text, where `text` is one.
pub(super) fn levels_of(text: &str) -> Option<KvPolicy> {
    text.parse().ok().filter(KvPolicy::is_calibrated)
}

fn of_file_type(text: &str, file_type: FileType) -> Recipe {
    Recipe {
        name: text.to_owned(),
        transform: None,
        method: Method::Rtn,
        gptq: GptqOptions::default(),
        spqr: SpqrOptions::default(),
        autoround: AutoRoundOptions::default(),
        qtip: QtipOptions::default(),
        weights: Scheme::codec(file_type.base),
        activations: None,
        observer: Observer::Max,
        kv: None,
        kv_levels: None,
        file_type: Some(file_type),
        container: Some(Container::Gguf),
        layers: Vec::new(),
        sha256: FileDigest::of(text.as_bytes()).hex(),
    }
}

fn transform_and_rest(part: &str) -> (Option<Transform>, &str) {
    let found = TRANSFORMS
        .iter()
        .find_map(|(name, transform)| Some((Some(*transform), part.strip_prefix(name)?.strip_prefix('-')?)));
    found.unwrap_or((None, part))
}

/// What `[gptq]` is where nothing else is said, under a method by the name of `method`.
pub(super) fn gptq_options(method: &str) -> GptqOptions {
    let asymmetric = if method == GPTAQ { GPTAQ_SHARE } else { 0.0 };
    GptqOptions { asymmetric, ..GptqOptions::default() }
}

/// The name under which [`gptq_options`] are those of `method`.
pub(super) fn named_method(method: Method, options: GptqOptions) -> &'static str {
    if method == Method::Gptq && options == gptq_options(GPTAQ) { GPTAQ } else { method.name() }
}

/// Methods by what recipes call them.
pub(super) fn named_methods() -> impl Iterator<Item = (&'static str, Method)> {
    METHODS.into_iter().chain([(GPTAQ, Method::Gptq)])
}

/// After a transform, a method that is not named is round to nearest.
fn method_and_scheme(text: &str, part: &str, after: bool) -> Result<(Method, Scheme), RecipeError> {
    // "rtn-mse-…" is not a scheme of "rtn": the longest name counts.
    let rest = |name: &str| part.strip_prefix(name)?.strip_prefix('-');
    let named = named_methods().filter_map(|(name, method)| Some((method, rest(name)?)));
    let found = named.min_by_key(|(_, rest)| rest.len()).or_else(|| after.then_some((Method::Rtn, part)));
    let (method, rest) = found.ok_or_else(|| {
        let names: Vec<_> = named_methods().map(|(name, _)| format!("{name}-SCHEME")).collect();
        let aliases: Vec<_> = ALIASES.iter().map(|(alias, _)| *alias).collect();
        let file_types = FILE_TYPES.iter().map(|ty| ty.name);
        let near = super::suggestion(text, aliases.iter().copied().chain(file_types.clone()));
        let file_types: Vec<_> = file_types.collect();
        let all = [aliases.join(", "), file_types.join(", ")].join(", ");
        fault(text, text, &format!("{} or one of {all}{near}", names.join(", ")))
    })?;
    Ok((method, method.scheme(scheme(text, "weights", rest, str::parse)?)))
}

fn scheme(
    name: &str,
    field: &str,
    text: &str,
    parse: impl Fn(&str) -> Result<Scheme, mantissa_num::ParseError>,
) -> Result<Scheme, RecipeError> {
    parse(text).map_err(|error| RecipeError::Scheme { name: name.to_owned(), field: field.to_owned(), error })
}

fn fault(name: &str, found: &str, allowed: &str) -> RecipeError {
    RecipeError::Name { name: name.to_owned(), found: format!("\"{found}\""), allowed: allowed.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_compose() {
        let recipe = parse("rtn-int8-channel+int8-token").unwrap();
        assert_eq!(recipe.weights.to_string(), "int8-channel");
        assert_eq!(recipe.activations.unwrap().to_string(), "int8-token");
        let recipe = parse("rtn-fp8-e4m3-channel+fp8-e4m3-token+kv-fp8-e4m3-tensor@static").unwrap();
        assert_eq!(recipe.kv.unwrap().to_string(), "fp8-e4m3-tensor@static");
        let recipe = parse("rtn-fp8-e4m3-channel+kv-keys=nuq4-1%,values=nuq3,pre-rope").unwrap();
        assert_eq!(recipe.cache().unwrap(), "keys=nuq4-1%,values=nuq3,pre-rope");
        assert_eq!((recipe.kv.is_none(), recipe.container()), (true, Container::Native));
        let recipe = parse("gptq-int3-g32-asym").unwrap();
        assert_eq!((recipe.method, recipe.weights.to_string().as_str()), (Method::Gptq, "int3-g32-asym"));
        let recipe = parse("spqr-int3-g16").unwrap();
        assert_eq!((recipe.method, recipe.weights.to_string().as_str()), (Method::Spqr, "int3-g16"));
        assert_eq!((recipe.outliers(100, 64), recipe.container()), (64, Container::Native));
        let recipe = parse("rtn-mse-int4-g32").unwrap();
        assert_eq!(recipe.outliers(100, 64), 0);
        assert_eq!((recipe.method, recipe.weights.to_string().as_str()), (Method::RtnMse, "int4-g32"));
        let gptaq = parse("rotate-gptaq-int4-g32").unwrap();
        let options = GptqOptions { asymmetric: 0.5, ..GptqOptions::default() };
        assert_eq!((gptaq.method, gptaq.gptq), (Method::Gptq, options));
        assert_eq!(parse("rotate-gptq-int4-g32").unwrap().gptq, GptqOptions::default());
        let recipe = parse("hqq-int4-g64").unwrap();
        assert_eq!(
            (recipe.method, recipe.weights.to_string().as_str()),
            (Method::Hqq, "int4-g64-asym:minmax")
        );
        let recipe = parse("rotate-gptq-int4-channel+int4-token").unwrap();
        assert_eq!((recipe.method_name().as_str(), recipe.needs_calibration()), ("rotate-gptq", true));
        let steps = |name: &str| parse(name).unwrap().autoround.iterations;
        assert_eq!((steps("autoround-nvfp4"), steps("autoround-mxfp4:ct")), (200, 600));
        let recipe = parse("awq-int4-g128-asym").unwrap();
        assert_eq!((recipe.method, recipe.transform), (Method::Rtn, Some(Transform::Awq)));
        assert!(recipe.needs_calibration() && !parse("rotate-int4-g32").unwrap().needs_calibration());
        assert_eq!(parse("fp8-dynamic").unwrap().weights.to_string(), "fp8-e4m3-channel");
    }

    #[test]
    fn every_alias_parses() {
        for (alias, full) in ALIASES {
            let (short, long) = (parse(alias).unwrap(), parse(full).unwrap());
            assert_eq!((short.weights, short.activations), (long.weights, long.activations), "{alias}");
        }
    }

    #[test]
    fn faults_name_the_part_and_the_nearest() {
        let message = |name: &str| parse(name).unwrap_err().to_string();
        assert!(message("mxpf4").contains("did you mean \"mxfp4\"?"));
        assert!(message("rtn-int4-g0").contains("g0"));
        assert!(message("magic-int4-g128").contains("gptq-SCHEME"));
        assert!(message("rtn-int4-g32+int8-token+int8-token").contains("one activation scheme"));
        assert!(message("rtn-int4-g32+kv-int8-head+kv-int8-head").contains("one scheme of keys"));
        assert!(message("rtn-int4-g32+kv-nuq4+kv-int8-head").contains("one scheme of keys"));
        assert!(message("rtn-int4-g32+kv-int9-head").contains("int9-head"));
    }
}
