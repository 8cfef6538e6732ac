//! Stored scales and levels of keys and values, for a quantized KV cache.
//!
//! The model runs over the calibration text with its weights as stored and nothing else quantized. A scale follows from
//! the amax of the keys (after RoPE) or values of a layer or head, like llm-compressor's minmax observer and ModelOpt's
//! max calibration. `convert` takes existing scales over. Levels of a policy such as `nuq4-1%` are calibrated likewise,
//! with inputs quantized as stored.

use mantissa_model::{KvPolicy, ModelConfig, find_kv_levels};
use mantissa_num::{RowKind, Scheme, Source};
use mantissa_store::TensorSpec;
use mantissa_store::convention::{Container, KvLevels, ModelFiles, cache};

use crate::calibrate::windows::check_windows;
use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::{QuantError, Result};
use crate::input_scales::scale;
use crate::plan::{Options, Plan, Use, model_not_storable};
use crate::recipe::Recipe;
use crate::unquantized::Unquantized;

/// Returns the specs of the tensors for scales or levels of keys and values that `recipe` stores.
///
/// # Errors
/// [`QuantError::NotStorable`] if the container cannot describe the scheme of keys and values,
/// [`QuantError::NoCalibration`] if scales need a calibration text and there is none.
pub(crate) fn planned(
    source: &ModelFiles,
    recipe: &Recipe,
    container: Container,
    config: &ModelConfig,
    options: &Options,
) -> Result<Vec<TensorSpec>> {
    let fault = |why: String| model_not_storable(container, why);
    if let Some(policy) = &recipe.kv_levels {
        if !container.facts().kv_levels {
            return Err(fault(format!("kv-{policy}: only the native format holds levels")));
        }
        // Fails if the policy does not fit heads of this width.
        policy.bytes_per_token(config)?;
        require_text(recipe, config, options)?;
        return Ok(level_specs(config, policy));
    }
    let Some(kv) = &recipe.kv else { return Ok(Vec::new()) };
    container.check_kv(kv).map_err(|error| fault(error.to_string()))?;
    if source.checkpoint().tensors().any(|meta| meta.name.ends_with(".k_scale")) {
        return Err(fault("the source already has scales of keys and values".to_owned()));
    }
    if kv.source == Source::Dynamic {
        // Fails if the scheme does not fit heads of this width.
        KvPolicy::of(kv).bytes_per_token(config)?;
        return Ok(Vec::new());
    }
    if config.latent.is_some() {
        return Err(fault(format!(
            "kv-{kv}: static scales of latents are not supported; fix: use a scheme without @static"
        )));
    }
    require_text(recipe, config, options)?;
    Ok(specs(config, container, kv))
}

/// Requires a calibration text.
fn require_text(recipe: &Recipe, config: &ModelConfig, options: &Options) -> Result<()> {
    let set = options.calibration.as_ref();
    check_windows(set.ok_or_else(|| QuantError::NoCalibration { recipe: recipe.name.clone() })?, config)
}

/// Returns the specs of the levels of all layers.
pub(crate) fn level_specs(config: &ModelConfig, policy: &KvPolicy) -> Vec<TensorSpec> {
    let blank = policy.blank_levels(config);
    let layer_tensors = |layer: usize| blank.tensors(&config.attention_module(layer)).into_iter();
    config.attention_layers().flat_map(layer_tensors).map(|(spec, _)| spec).collect()
}

/// Calibrates levels of `policy` for the model `stored` on `set`. Returns the tensors of [`level_specs`] with their
/// bytes.
///
/// # Errors
/// Errors of [`find_kv_levels`].
pub(crate) fn levels(
    stored: &ModelFiles,
    config: &ModelConfig,
    policy: &KvPolicy,
    set: &CalibrationSet,
    tick: &mut Tick<'_>,
) -> Result<Vec<(String, Vec<u8>)>> {
    let found = find_kv_levels(stored, config, policy, &set.windows, tick)?;
    let layer_tensors = |(layer, levels): (usize, Option<KvLevels>)| {
        levels.into_iter().flat_map(move |levels| levels.tensors(&config.attention_module(layer)))
    };
    let tensors = found.into_iter().enumerate().flat_map(layer_tensors);
    Ok(tensors.map(|(spec, bytes)| (spec.name, bytes)).collect())
}

/// Iterates over the layers that have keys and values of their own.
fn own_layers(config: &ModelConfig) -> impl Iterator<Item = usize> {
    (0..config.num_hidden_layers).filter(|layer| config.has_own_kv(*layer))
}

/// Returns the specs of the scales of all layers.
pub(crate) fn specs(config: &ModelConfig, container: Container, scheme: &Scheme) -> Vec<TensorSpec> {
    let layer_tensors = |layer| {
        let count = cache::stored_scales(scheme, config.heads(layer).key_value);
        let specs = (count > 0).then(|| container.kv_specs(&config.attention_module(layer), count));
        specs.into_iter().flatten()
    };
    own_layers(config).flat_map(layer_tensors).collect()
}

/// Returns the tensors that [`planned`] declares, with their bytes. `stored` opens the output, whose layers are already
/// written.
///
/// # Errors
/// Errors of [`Calibration`] and [`levels`]; source scales that cannot be read.
pub(crate) fn tensors(
    plan: &Plan,
    source: &ModelFiles,
    stored: impl FnOnce() -> Result<ModelFiles>,
    tick: &mut Tick<'_>,
) -> Result<Vec<(String, Vec<u8>)>> {
    if let (Some(policy), Some(set)) = (&plan.kv_levels, &plan.options.calibration) {
        return levels(&stored()?, &plan.config, policy, set, tick);
    }
    let Some(scheme) = &plan.kv else { return Ok(Vec::new()) };
    let scales = match plan.text_for(Use::Cache) {
        Some(set) => calibrated(plan, scheme, &stored()?, set, tick)?,
        // Without a text the scales are the source's: a recipe without a text was refused before.
        None => source_scales(plan, source)?,
    };
    let bytes = |values: &Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let specs = specs(&plan.config, plan.container, scheme);
    Ok(specs
        .into_iter()
        .zip(scales.iter().flatten())
        .map(|(spec, values)| (spec.name, bytes(values)))
        .collect())
}

/// Scales of keys and of values, by layer.
type Scales = Vec<[Vec<f32>; 2]>;

fn calibrated(
    plan: &Plan,
    scheme: &Scheme,
    stored: &ModelFiles,
    set: &CalibrationSet,
    tick: &mut Tick<'_>,
) -> Result<Scales> {
    let plain = Unquantized::new(stored);
    let mut calibration = Calibration::begin(&plain, &plan.config, &set.windows, plan.limits())?;
    let mut scales = Scales::new();
    while let Some(layer) = calibration.next_layer()? {
        let peaks = calibration.advance_with_cache_peaks(&layer, tick)?;
        if !plan.config.has_own_kv(layer.index()) {
            continue;
        }
        scales.push(peaks.map(|peaks| match scheme.row {
            RowKind::Head => peaks.into_iter().map(|peak| scale(scheme, peak)).collect(),
            _ => vec![scale(scheme, peaks.into_iter().fold(0.0, f32::max))],
        }));
    }
    Ok(scales)
}

fn source_scales(plan: &Plan, source: &ModelFiles) -> Result<Scales> {
    let config = &plan.config;
    let quants = own_layers(config)
        .map(|layer| source.kv_quant(&config.attention_module(layer), config.heads(layer).key_value));
    let scales =
        quants.map(|quant| Ok(quant?.map_or([vec![], vec![]], |quant| [quant.k_scale, quant.v_scale])));
    scales.collect()
}

/// Returns the scheme under which `source` stores keys and values.
///
/// # Errors
/// Errors of [`ModelFiles::kv_quant`]; `Ok(Err(why))` if layers differ.
pub fn of_source(
    source: &ModelFiles,
    config: &ModelConfig,
) -> Result<std::result::Result<Option<Scheme>, String>> {
    let mut found: Vec<Option<Scheme>> = Vec::new();
    for layer in own_layers(config) {
        let quant = source.kv_quant(&config.attention_module(layer), config.heads(layer).key_value)?;
        let Some(quant) = quant else {
            found.push(None);
            continue;
        };
        let fixed = quant.scheme.source == Source::Static;
        if fixed && quant.k_scale.len() != quant.v_scale.len() {
            return Ok(Err("keys and values have different numbers of scales".to_owned()));
        }
        let by_head = fixed && quant.k_scale.len() > 1;
        found.push(Some(if by_head { cache::by_head(&quant.scheme) } else { quant.scheme }));
    }
    match found.windows(2).all(|pair| pair[0] == pair[1]) {
        true => Ok(Ok(found.pop().flatten())),
        false => Ok(Err("layers store keys and values in different ways".to_owned())),
    }
}
