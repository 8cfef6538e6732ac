//! New scales of inputs and of keys and values for a quantized model whose weights stay as they are.
//!
//! The model runs over another text with its weights as stored and nothing else quantized; what is found of it takes the place
//! of the scales that calibration had found before, tensor by tensor, in the dtype and the sense in which each is stored. Every
//! other tensor keeps its bytes, its dtype and its place among the files.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_model::{LinearInput, LinearKind, ModelConfig};
use mantissa_num::minifloat::{self, MiniFloat, Overflow};
use mantissa_num::{Rounding, Scheme, Source};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{
    Committed, Dtype, Error, FileDigest, Manifest, SafeTensors, SafetensorsWriter, Staging, TensorSpec,
    refuse_overlap,
};
use serde_json::json;

use crate::cache_scales;
use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::Result;
use crate::input_scales::{Observer, scale};
use crate::pipeline::{COPY, copy_sidecars};
use crate::plan::calibration::check_windows;
use crate::quality::{QUALITY_NAME, Quality};
use crate::unquantized::Unquantized;

/// The new scales of an artifact.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recalibration {
    /// Bytes of the tensors that change, by name.
    tensors: BTreeMap<String, Vec<u8>>,
    /// Scales of inputs among them.
    pub inputs: usize,
    /// Scales of keys and values among them.
    pub cache: usize,
}

impl Recalibration {
    /// Finds the scales of `source` on `set`, those of inputs by `observer`.
    ///
    /// # Errors
    /// As [`Calibration`]; where no scale is stored that a text decides.
    pub fn collect(
        source: &ModelFiles,
        config: &ModelConfig,
        set: &CalibrationSet,
        observer: Observer,
        threads: usize,
        tick: &mut Tick<'_>,
    ) -> Result<Self> {
        check_windows(set, config)?;
        let kv = cache_scales::of_source(source, config)?.unwrap_or_default();
        let kv = kv.filter(|kv| kv.source == Source::Static);
        let plain = Unquantized(source);
        let mut calibration = Calibration::begin(&plain, config, &set.windows, threads)?;
        let mut found = Recalibration::default();
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
            for input in &inputs {
                let peak = peaks.get(&input.kind.input()).copied().unwrap_or(0.0);
                input.put(source, peak, &mut found)?;
            }
            let module = config.attention_module(layer.index());
            let peaks = calibration.advance_with_cache_peaks(&layer, tick)?;
            if let Some(kv) = &kv {
                found.put_cache(source, &module, kv, peaks)?;
            }
        }
        match found.tensors.is_empty() {
            true => {
                let (found, allowed) =
                    ("no scale that a text decides", "static scales of inputs, keys or values");
                Err(Error::field(source.dir(), "scales", found, allowed, "weights alone need no text").into())
            }
            false => Ok(found),
        }
    }

    /// The scales of keys and values of a layer from their peaks.
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

    /// Writes the artifact with its new scales into the folder `out`.
    ///
    /// # Errors
    /// Files that cannot be read or written. The old content of `out`, if any, is then still in place.
    pub fn write(&self, source: &ModelFiles, set: &CalibrationSet, out: &Path) -> Result<Committed> {
        refuse_overlap(source.dir(), out)?;
        let mut staging = Staging::begin(out)?;
        let index = source.dir().join("model.safetensors.index.json");
        for name in ["config.json", "hf_quant_config.json", "quantize_config.json"] {
            let path = source.dir().join(name);
            if path.is_file() {
                staging.copy(&path, name)?;
            }
        }
        if index.is_file() {
            staging.copy(&index, "model.safetensors.index.json")?;
        }
        // Weights and their errors are what they were; what was measured was of the old scales.
        let mut quality = Quality::read(source.dir())?.map(|old| Quality {
            calibration: Some(set.identity()),
            held_out: None,
            coverage: None,
            evaluation: None,
            ..old
        });
        let files: Vec<_> = source.checkpoint().files().map(Path::to_owned).collect();
        for path in files {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            let digest = self.copy(&SafeTensors::open(&path)?, &staging.path().join(&name))?;
            if let Some(quality) = &mut quality {
                quality.hashes.weights.insert(name.clone(), digest);
            }
            staging.record(name, digest);
        }
        if let Some(quality) = &quality {
            staging.write(QUALITY_NAME, quality.to_json()?.as_bytes())?;
        }
        copy_sidecars(source.dir(), &mut staging)?;
        let fields = json!({
            "command": "recalibrate", "calibration": set.name, "windows": set.windows.len(), "tokens": set.tokens(),
            "input_scales": self.inputs, "cache_scales": self.cache,
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        Ok(staging.commit(Manifest::run_after(source.dir(), fields)?)?)
    }

    /// Writes one file of weights, its changed tensors replaced.
    fn copy(&self, from: &SafeTensors, to: &Path) -> Result<FileDigest> {
        let specs =
            from.tensors().iter().map(|meta| TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()));
        let mut writer = SafetensorsWriter::create(to, specs.collect(), from.metadata().clone())?;
        let mut buffer = vec![0; COPY];
        for meta in from.tensors() {
            if let Some(bytes) = self.tensors.get(&meta.name) {
                writer.write(&meta.name, bytes)?;
                continue;
            }
            if meta.len == 0 {
                writer.write(&meta.name, &[])?;
            }
            let mut at = 0;
            while at < meta.len {
                let n = usize::try_from(meta.len - at).unwrap_or(usize::MAX).min(buffer.len());
                from.read_range(meta, at, &mut buffer[..n])?;
                writer.write_range(&meta.name, at, &buffer[..n])?;
                at += n as u64;
            }
        }
        Ok(writer.finish()?)
    }
}

/// A linear layer with a stored scale of its inputs.
struct StoredInput {
    kind: LinearKind,
    scheme: Scheme,
    /// The scale as the model is read.
    outer: f32,
    /// The tensor that holds it.
    tensor: String,
}

impl StoredInput {
    fn put(&self, source: &ModelFiles, peak: f32, found: &mut Recalibration) -> Result<()> {
        let new = scale(&self.scheme, peak);
        // Some conventions store the reciprocal of what others do.
        let old = source.checkpoint().read_f32(&self.tensor)?.first().copied().unwrap_or(self.outer);
        let direct = (old - self.outer).abs() <= 1e-2 * self.outer.abs();
        let bytes = stored(source, &self.tensor, &[if direct { new } else { 1.0 / new }])?;
        found.inputs += 1;
        found.tensors.insert(self.tensor.clone(), bytes);
        Ok(())
    }
}

/// The stored scales of inputs of a layer's linear layers.
fn stored_inputs(source: &ModelFiles, config: &ModelConfig, layer: usize) -> Result<Vec<StoredInput>> {
    let mut all = Vec::new();
    for info in config.layer_linears(layer) {
        let names = ["input_scale", "input_global_scale"].map(|name| format!("{}.{name}", info.module));
        let Some(tensor) = names.into_iter().find(|name| source.has(name)) else { continue };
        let input = source.linear(&info.module, info.rows, info.cols, false)?.input;
        if let Some((scheme, outer)) = input.and_then(|input| Some((input.scheme, input.outer?))) {
            all.push(StoredInput { kind: info.kind, scheme, outer, tensor });
        }
    }
    Ok(all)
}

/// Scales as the tensor `name` stores them.
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
