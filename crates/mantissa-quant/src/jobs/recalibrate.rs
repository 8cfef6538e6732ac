//! New scales of inputs and of the KV cache for a quantized model, with unchanged weights.
//!
//! The model runs over another text with its weights as stored and nothing else quantized. New scales replace the
//! calibrated ones, tensor by tensor, in the stored dtype and sense. All other tensors keep their bytes, dtype and
//! place in the files.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_model::{KvPolicy, LinearInput, LinearKind, ModelConfig, check_kv_levels};
use mantissa_num::minifloat::{self, MiniFloat, Overflow};
use mantissa_num::{Rounding, Scheme, Source, StaticScale};
use mantissa_store::convention::{ModelFiles, levels, native};
use mantissa_store::{
    Committed, Dtype, Error, FileDigest, INDEX_NAME, Manifest, Output, SafeTensors, SafetensorsWriter,
    Staging, TensorSpec, json, refuse_overlap,
};
use serde_json::Value;

use crate::cache_scales;
use crate::calibrate::windows::check_windows;
use crate::calibrate::{Calibration, CalibrationSet, Limits, Tick};
use crate::error::Result;
use crate::input_scales::{Observer, affine, scale};
use crate::load::{load_check, loadable};
use crate::plan::spec_bytes;
use crate::quality::{QUALITY_NAME, Quality};
use crate::sidecars::copy_sidecars;
use crate::tensors::write_changed;
use crate::unquantized::Unquantized;

/// New scales of an artifact.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recalibration {
    /// Bytes of the changed tensors, by name.
    tensors: BTreeMap<String, Vec<u8>>,
    /// Number of changed input scales.
    pub inputs: usize,
    /// Number of changed scales of keys and values.
    pub cache: usize,
    /// Policy of new KV cache levels, with their tensors.
    levels: Option<(KvPolicy, Vec<TensorSpec>)>,
}

impl Recalibration {
    /// Calibrates the scales of `source` on `set`, input scales with `observer`, and levels of keys and values: those
    /// of `policy`, or of the stored policy.
    ///
    /// # Errors
    /// Errors of [`Calibration`]; no stored scale depends on a text; the format does not hold levels.
    pub fn collect(
        source: &ModelFiles,
        config: &ModelConfig,
        set: &CalibrationSet,
        (observer, policy): (Observer, Option<&KvPolicy>),
        limits: impl Into<Limits>,
        tick: &mut Tick<'_>,
    ) -> Result<Self> {
        check_windows(set, config)?;
        // An incomplete source would give an incomplete output.
        loadable(source)?;
        let kv = cache_scales::of_source(source, config)?.unwrap_or_default();
        let mut found = Recalibration::default();
        check_kv_levels(source, config)?;
        if let Some(policy) = levels_to_find(source, policy, kv.as_ref())? {
            found.tensors.extend(cache_scales::levels(source, config, &policy, set, tick)?);
            found.levels = Some((policy.clone(), cache_scales::level_specs(config, &policy)));
        }
        let kv = kv.filter(|kv| kv.source == Source::Static);
        found.scales(source, config, set, (observer, kv.as_ref()), limits.into(), tick)?;
        match found.tensors.is_empty() {
            true => {
                let (got, expected) =
                    ("no scale that depends on a text", "static scales of inputs, keys or values");
                Err(Error::field(source.dir(), "scales", got, expected, "weights need no text").into())
            }
            false => Ok(found),
        }
    }

    /// True if new levels of keys and values were calibrated.
    pub fn has_levels(&self) -> bool {
        self.levels.is_some()
    }

    /// Adds the scales of inputs, keys and values.
    fn scales(
        &mut self,
        source: &ModelFiles,
        config: &ModelConfig,
        set: &CalibrationSet,
        (observer, kv): (Observer, Option<&Scheme>),
        limits: Limits,
        tick: &mut Tick<'_>,
    ) -> Result<()> {
        let is_input_scale = |name: &str| INPUT_SCALES.iter().any(|suffix| name.ends_with(suffix));
        if kv.is_none() && !source.checkpoint().tensors().any(|meta| is_input_scale(&meta.name)) {
            return Ok(());
        }
        let plain = Unquantized::new(source);
        let mut calibration = Calibration::begin(&plain, config, &set.windows, limits)?;
        while let Some(layer) = calibration.next_layer()? {
            let inputs = stored_inputs(source, config, layer.index())?;
            let kinds = inputs.iter().map(|input| input.kind);
            let scheme = |of: LinearInput| {
                inputs.iter().find(|input| input.kind.input() == of).map(|input| &input.scheme)
            };
            let peaks = match inputs.is_empty() {
                true => BTreeMap::new(),
                false => observer.magnitudes(&mut calibration, &layer, (kinds, false), scheme, tick)?,
            };
            let asymmetric = inputs.iter().find(|input| input.scheme.format.has_zero());
            let ends = match asymmetric {
                None => BTreeMap::new(),
                Some(input) => {
                    let kinds = inputs.iter().map(|input| input.kind);
                    observer.ends(&mut calibration, &layer, (kinds, false), &input.scheme, tick)?
                }
            };
            for input in &inputs {
                if input.scheme.format.has_zero() {
                    input.put_ends(
                        source,
                        ends.get(&input.kind.input()).copied().unwrap_or_default(),
                        self,
                    )?;
                    continue;
                }
                let peak = peaks.get(&input.kind.input()).copied().unwrap_or(0.0);
                input.put(source, peak, self)?;
            }
            let module = config.attention_module(layer.index());
            let peaks = calibration.advance_with_cache_peaks(&layer, tick)?;
            if let Some(kv) = kv.filter(|_| config.attends(layer.index())) {
                self.put_cache(source, &module, kv, peaks)?;
            }
        }
        Ok(())
    }

    /// Sets the scales of keys and values of a layer from their amax.
    fn put_cache(
        &mut self,
        source: &ModelFiles,
        module: &str,
        kv: &Scheme,
        peaks: [Vec<f32>; 2],
    ) -> Result<()> {
        let names = [["k_scale", "v_scale"], ["k_proj.k_scale", "v_proj.v_scale"]];
        for names in names.map(|names| names.map(|name| format!("{module}.{name}"))) {
            for (name, peaks) in names.into_iter().zip(&peaks) {
                let Some(meta) = source.checkpoint().get(&name) else { continue };
                let one = vec![scale(kv, peaks.iter().copied().fold(0.0, f32::max))];
                let count: usize = meta.shape.iter().product();
                let scales = match count == peaks.len() && count > 1 {
                    true => peaks.iter().map(|peak| scale(kv, *peak)).collect(),
                    false => one,
                };
                let bytes = stored(source, &name, &scales)?;
                self.cache += 1;
                self.tensors.insert(name, bytes);
            }
        }
        Ok(())
    }

    /// Writes the artifact with its new scales to the folder `out`.
    ///
    /// # Errors
    /// A file cannot be read or written. The old content of `out`, if any, is then still in place.
    pub fn write(&self, source: &ModelFiles, set: &CalibrationSet, out: &Output) -> Result<Committed> {
        refuse_overlap(source.dir(), out.path())?;
        let mut staging = Staging::begin(out)?;
        let index = self.write_configs(source, &mut staging)?;
        // Weights and their errors are unchanged; figures measured with the old scales no longer hold.
        let mut quality = Quality::read(source.dir())?.map(|old| Quality {
            rebuild: None,
            calibration: Some(set.identity()),
            held_out: None,
            coverage: None,
            evaluation: None,
            tasks: Vec::new(),
            kv: self.levels.as_ref().map(|(policy, _)| policy.to_string()).or(old.kv),
            ..old
        });
        if let (Some(quality), Some(index)) = (&mut quality, index) {
            quality.hashes.weights.insert(INDEX_NAME.to_owned(), index);
        }
        let files: Vec<_> = source.checkpoint().files().map(Path::to_owned).collect();
        for (i, path) in files.iter().enumerate() {
            let name = file_name(path);
            let last = i + 1 == files.len();
            let digest = self.copy(&SafeTensors::open(path)?, &staging.path().join(&name), last)?;
            if let Some(quality) = &mut quality {
                quality.hashes.weights.insert(name.clone(), digest);
            }
            staging.record(name, digest);
        }
        if let Some(quality) = &quality {
            staging.write(QUALITY_NAME, quality.to_json()?.as_bytes())?;
        }
        copy_sidecars(source.dir(), &mut staging)?;
        let fields = serde_json::json!({
            "command": "recalibrate", "calibration": set.name, "windows": set.windows.len(), "tokens": set.tokens(),
            "input_scales": self.inputs, "cache_scales": self.cache,
            "kv_levels": self.levels.as_ref().map(|(policy, _)| policy.to_string()),
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        staging.seal(Manifest::run_after(source.dir(), fields)?)?;
        // An output that does not open must not replace one that works.
        load_check(staging.path())?;
        Ok(staging.publish()?)
    }

    /// Copies the configuration files; new levels change config and index. Returns the digest of a changed index.
    fn write_configs(&self, source: &ModelFiles, staging: &mut Staging) -> Result<Option<FileDigest>> {
        let mut digest = None;
        for name in ["config.json", INDEX_NAME, "hf_quant_config.json", "quantize_config.json"] {
            let path = source.dir().join(name);
            match (&self.levels, name) {
                _ if !path.is_file() => {}
                (Some((policy, _)), "config.json") => {
                    let mut config = source.config().cloned().unwrap_or_default();
                    native::declare_levels(&mut config["quantization_config"], &policy.to_string());
                    staging.write(name, format!("{config:#}\n").as_bytes())?;
                }
                (Some((_, specs)), INDEX_NAME) => {
                    let index =
                        indexed(json::read_strict(&path, MAX_INDEX_BYTES, "an index")?, source, specs);
                    let index = format!("{index:#}\n");
                    digest = Some(FileDigest::of(index.as_bytes()));
                    staging.write(name, index.as_bytes())?;
                }
                _ => staging.copy(&path, name)?,
            }
        }
        Ok(digest)
    }

    /// Writes one weight file with its changed tensors; the `last` gets the levels.
    fn copy(&self, from: &SafeTensors, to: &Path, last: bool) -> Result<FileDigest> {
        let replaced = |name: &str| self.levels.is_some() && is_level(name);
        let kept = || from.tensors().iter().filter(|meta| !replaced(&meta.name));
        let specs = kept().map(|meta| TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()));
        let added = self.levels.iter().filter(|_| last).flat_map(|(_, specs)| specs);
        let specs = specs.chain(added.clone().cloned()).collect();
        let mut writer = SafetensorsWriter::create(to, specs, from.metadata().clone())?;
        for spec in added {
            writer.write(&spec.name, self.tensors.get(&spec.name).map_or(&[][..], Vec::as_slice))?;
        }
        write_changed(&mut writer, from, kept(), &self.tensors)?;
        Ok(writer.finish()?)
    }
}

/// Size limit of an index, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Suffixes of input scale tensors.
const INPUT_SCALES: [&str; 2] = ["input_scale", "input_global_scale"];

/// Name of the stored zero point of an asymmetric input.
const INPUT_ZERO: &str = "input_zero_point";

/// Returns the policy whose levels are calibrated: the given or the stored one.
fn levels_to_find(
    source: &ModelFiles,
    policy: Option<&KvPolicy>,
    scheme: Option<&Scheme>,
) -> Result<Option<KvPolicy>> {
    let refuse = |got: String, expected: &str, hint: &str| {
        Err(Error::field(source.dir(), "KV cache", got, expected, hint).into())
    };
    let Some(policy) = policy else {
        return Ok(source.kv_policy().and_then(|policy| policy.parse().ok()));
    };
    if !policy.is_calibrated() {
        return refuse(
            policy.to_string(),
            "a policy with calibrated levels: nuq4, nuq3-1% …",
            "other policies need no calibration: give them to --kv of run and eval",
        );
    }
    if source.convention_name() != native::NAME {
        let hint = "fix: mantissa convert --format native";
        return refuse(format!("levels in {}", source.convention_name()), "the native format", hint);
    }
    match scheme {
        Some(scheme) => {
            refuse(format!("keys and values under {scheme}"), "a model with an unquantized KV cache", "")
        }
        None => Ok(Some(policy.clone())),
    }
}

fn is_level(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| levels::SUFFIXES.contains(&last))
}

fn file_name(path: &Path) -> String {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned()
}

/// Changes the index of the weight files: levels `specs` in the last file replace old ones.
fn indexed(mut index: Value, source: &ModelFiles, specs: &[TensorSpec]) -> Value {
    let file = source.checkpoint().files().last().map(file_name).unwrap_or_default();
    let old: u64 =
        source.checkpoint().tensors().filter(|meta| is_level(&meta.name)).map(|meta| meta.len).sum();
    let new: u64 = specs.iter().map(spec_bytes).sum();
    if let Some(Value::Object(map)) = index.get_mut("weight_map") {
        map.retain(|name, _| !is_level(name));
        map.extend(specs.iter().map(|spec| (spec.name.clone(), file.clone().into())));
    }
    if let Some(size) = index.pointer_mut("/metadata/total_size") {
        *size = size.as_u64().map(|size| size.saturating_sub(old) + new).into();
    }
    index
}

/// A linear layer with a stored input scale.
struct StoredInput {
    kind: LinearKind,
    scheme: Scheme,
    /// Scale as the reader returns it.
    outer: f32,
    /// Tensor that stores it.
    tensor: String,
}

impl StoredInput {
    /// Sets scale and zero point from the ends of the values.
    fn put_ends(&self, source: &ModelFiles, ends: [f32; 2], found: &mut Recalibration) -> Result<()> {
        let StaticScale { scale, zero } = affine(&self.scheme, ends);
        found.inputs += 1;
        found.tensors.insert(self.tensor.clone(), stored(source, &self.tensor, &[scale])?);
        let module = self.tensor.rsplit_once('.').map_or("", |(module, _)| module);
        let name = format!("{module}.{INPUT_ZERO}");
        if source.has(&name) {
            found.tensors.insert(name, vec![zero as i8 as u8]);
            return Ok(());
        }
        let expected = "a stored zero point of the asymmetric input";
        Err(Error::field(source.dir(), name, "no tensor", expected, "quantize again").into())
    }

    fn put(&self, source: &ModelFiles, peak: f32, found: &mut Recalibration) -> Result<()> {
        let new = scale(&self.scheme, peak);
        // Some formats store the reciprocal.
        let old = source.checkpoint().read_f32(&self.tensor)?.first().copied().unwrap_or(self.outer);
        let direct = (old - self.outer).abs() <= 1e-2 * self.outer.abs();
        let bytes = stored(source, &self.tensor, &[if direct { new } else { 1.0 / new }])?;
        found.inputs += 1;
        found.tensors.insert(self.tensor.clone(), bytes);
        Ok(())
    }
}

/// Returns the stored input scales of a layer's linear layers.
fn stored_inputs(source: &ModelFiles, config: &ModelConfig, layer: usize) -> Result<Vec<StoredInput>> {
    let mut all = Vec::new();
    for info in config.layer_linears(layer) {
        let names = INPUT_SCALES.map(|name| format!("{}.{name}", info.module));
        let Some(tensor) = names.into_iter().find(|name| source.has(name)) else { continue };
        let input = source.linear(&info.module, info.rows, info.cols, false)?.input;
        if let Some((scheme, outer)) = input.and_then(|input| Some((input.scheme, input.outer?))) {
            all.push(StoredInput { kind: info.kind, scheme, outer, tensor });
        }
    }
    Ok(all)
}

/// Encodes scales as the tensor `name` stores them.
fn stored(source: &ModelFiles, name: &str, scales: &[f32]) -> Result<Vec<u8>> {
    let no_tensor = || Error::NoTensor { path: source.dir().to_owned(), tensor: name.to_owned() };
    let meta = source.checkpoint().get(name).ok_or_else(no_tensor)?;
    let word = |float: MiniFloat, x: f32| {
        (float.encode(x, Overflow::Saturate, Rounding::NearestEven, 0) as u16).to_le_bytes()
    };
    Ok(match meta.dtype {
        Dtype::BF16 => scales.iter().flat_map(|x| word(minifloat::BF16, *x)).collect(),
        Dtype::F16 => scales.iter().flat_map(|x| word(minifloat::F16, *x)).collect(),
        _ => scales.iter().flat_map(|x| x.to_le_bytes()).collect(),
    })
}
