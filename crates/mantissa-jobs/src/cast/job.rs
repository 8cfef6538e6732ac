//! Casts of all float tensors of a safetensors file to one scheme, as a job.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mantissa_num::{Format, Rounding, Scheme, Source};
use mantissa_store::convention::native;
use mantissa_store::{
    Dtype, Kind, SafeTensors, SafetensorsWriter, Shown, StagedFile, TensorMeta, TensorSpec,
};
use serde::{Deserialize, Serialize};

use super::panels::{Caster, Cost, Parts};
use crate::error::{BadInput, Result};
use crate::float_tensor::FloatTensor;
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::names::AsText;
use crate::progress::Unit;

/// Arguments of a cast.
#[derive(Clone, Debug, PartialEq)]
pub struct CastArguments {
    /// Safetensors file to read.
    pub input: PathBuf,
    /// Scheme of the codes.
    pub scheme: Scheme,
    /// Safetensors file to write.
    pub out: PathBuf,
    /// True to write the packed bytes too.
    pub packed: bool,
    /// True to write the packed bytes and scales alone.
    pub packed_only: bool,
    /// Seed of stochastic rounding; `None` for rounding to nearest.
    pub stochastic: Option<u64>,
}

/// Cast of all float tensors of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
    input: PathBuf,
    /// Scheme without rounding between codes.
    scheme: AsText<Scheme>,
    out: PathBuf,
    packed: bool,
    /// True for the packed bytes and scales alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    packed_only: bool,
    /// Seed of stochastic rounding; absent for rounding to nearest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stochastic: Option<u64>,
}

/// Result of a cast.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CastReport {
    /// File that was read.
    pub input: PathBuf,
    /// File that was written.
    pub output: PathBuf,
    /// Scheme of the codes.
    pub scheme: String,
    /// Rounding between two codes: nearest or stochastic.
    pub rounding: &'static str,
    /// Seed of stochastic rounding.
    pub seed: Option<u64>,
    /// Tensors that were cast.
    pub tensors: Vec<CastTensor>,
    /// Tensors that are no floats.
    pub skipped: Vec<SkippedTensor>,
}

/// Tensor with the error of its cast.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CastTensor {
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Signal-to-quantization-noise ratio in dB; `None` if error or signal is zero.
    pub sqnr_db: Option<f64>,
    /// Largest magnitude of an error.
    pub max_abs_error: f64,
    /// Bits per weight, scales and zero points included.
    pub bits_per_weight: f64,
    /// Bytes of codes and scales, packed.
    #[serde(skip)]
    pub packed_bytes: u64,
    /// Number of elements excluded from the figures because their value or decoded code is not finite.
    pub non_finite: u64,
}

/// Tensor that was not cast.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkippedTensor {
    /// Name.
    pub name: String,
    /// Dtype.
    pub dtype: &'static str,
}

impl Cast {
    /// Combines scheme and rounding, if they are compatible.
    ///
    /// # Errors
    /// A scheme with static scales, or one that cannot be rounded stochastically.
    pub fn resolve(arguments: CastArguments) -> Result<Self> {
        let CastArguments { input, scheme, out, packed, packed_only, stochastic } = arguments;
        if scheme.source != Source::Dynamic {
            let found = format!("\"{scheme}\"");
            return Err(
                BadInput::new("--scheme", found, "@dynamic: scales are computed from the tensors").into()
            );
        }
        if stochastic.is_some() && matches!(scheme.format, Format::Table(_) | Format::Codec(_)) {
            let found = format!("stochastic with {scheme}");
            return Err(BadInput::new("--round", found, "nearest for codebooks and block types").into());
        }
        Ok(Cast { input, scheme: AsText(scheme), out, packed, packed_only, stochastic })
    }

    /// Returns the tensors that are written beside the scales.
    fn parts(&self) -> Parts {
        match (self.packed_only, self.packed) {
            (true, _) => Parts::Packed,
            (_, true) => Parts::Both,
            _ => Parts::Plain,
        }
    }

    /// Returns the scheme with its rounding between codes.
    fn rounded(&self) -> Scheme {
        let mut scheme = self.scheme.0.clone();
        if let Some(seed) = self.stochastic {
            scheme.encoder.rounding = Rounding::Stochastic { seed };
        }
        scheme
    }
}

impl Job for Cast {
    const NAME: &'static str = "cast";
    const VERSION: u32 = 1;
    type Report = CastReport;

    fn inputs(&self) -> Vec<PathBuf> {
        vec![self.input.clone()]
    }

    fn outputs(&self) -> Vec<JobOutput> {
        vec![JobOutput { option: "--out", path: self.out.clone(), kind: Kind::File }]
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let (scheme, input) = (self.rounded(), SafeTensors::open(&self.input)?);
        let mut most = 0;
        for tensor in input.tensors().iter().filter_map(|meta| FloatTensor::new(&input, meta)) {
            most = most.max(Caster::new(&scheme, tensor, self.parts())?.memory(host.threads));
        }
        Ok(most)
    }

    /// Reads, quantizes and writes the tensors in panels, so that memory does not grow with the file size.
    ///
    /// # Errors
    /// A file without float tensors; a value without a code in the scheme; I/O.
    fn run(&self, host: &Host) -> Result<CastReport> {
        let scheme = self.rounded();
        let input = SafeTensors::open(&self.input)?;
        let (tensors, skipped) = split(&input, host)?;
        let casters: Vec<Caster<'_>> = tensors
            .into_iter()
            .map(|tensor| Caster::new(&scheme, tensor, self.parts()))
            .collect::<Result<_>>()?;
        let needs = casters.iter().map(|caster| caster.memory(host.threads)).max().unwrap_or(0);
        host.require_memory("cast", needs)?;

        let specs = casters.iter().flat_map(|caster| specs(&scheme, caster)).collect();
        let staged = StagedFile::begin(&host.output(&self.out)?)?;
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata(&scheme))?;
        let tensors = cast_all(&casters, &mut writer, host)?;
        writer.finish()?;
        staged.commit()?;
        Ok(CastReport {
            input: self.input.clone(),
            output: self.out.clone(),
            scheme: scheme.to_string(),
            rounding: rounding_name(&scheme),
            seed: seed_of(&scheme),
            tensors,
            skipped,
        })
    }
}

/// Returns the float tensors of the file and, with a warning each, the others.
fn split<'a>(input: &'a SafeTensors, host: &Host) -> Result<(Vec<FloatTensor<'a>>, Vec<SkippedTensor>)> {
    let mut tensors = Vec::new();
    let mut skipped = Vec::new();
    for meta in input.tensors() {
        match FloatTensor::new(input, meta) {
            Some(tensor) => tensors.push(tensor),
            None => skipped.push(SkippedTensor { name: meta.name.clone(), dtype: meta.dtype.name() }),
        }
    }
    if tensors.is_empty() {
        let what = format!("{}: tensors", input.path().display());
        return Err(
            BadInput::new(what, "no float tensor", "at least one of F64, F32, F16, BF16 or FP8").into()
        );
    }
    let name = |s: &SkippedTensor| format!("tensor \"{}\" skipped: {}", Shown(&s.name), s.dtype);
    host.warn_all(&skipped.iter().map(name).collect::<Vec<_>>())?;
    Ok((tensors, skipped))
}

/// Returns the tensors that one input tensor becomes.
fn specs(scheme: &Scheme, caster: &Caster<'_>) -> Vec<TensorSpec> {
    let FloatTensor { rows, cols, .. } = caster.tensor;
    let TensorMeta { name: n, shape, .. } = caster.tensor.meta();
    let mut specs = Vec::new();
    if caster.plain {
        specs.push(TensorSpec::new(format!("{n}.dequant"), Dtype::F32, shape.clone()));
    }
    if caster.plain && scheme.format.codec().is_none() {
        let dtype = match mantissa_num::code_unit(&scheme.format) {
            1 => Dtype::U8,
            2 => Dtype::U16,
            4 => Dtype::U32,
            _ => Dtype::U64,
        };
        specs.insert(0, TensorSpec::new(format!("{n}.codes"), dtype, shape.clone()));
    }
    specs.extend(native::scale_specs(n, &scheme.format, rows, cols));
    if caster.packed {
        specs.push(TensorSpec::new(format!("{n}.packed"), Dtype::U8, [caster.packed_bytes()]));
    }
    specs
}

fn metadata(scheme: &Scheme) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([
        ("scheme".to_owned(), scheme.to_string()),
        ("rounding".to_owned(), rounding_name(scheme).to_owned()),
    ]);
    if let Some(seed) = seed_of(scheme) {
        metadata.insert("seed".to_owned(), seed.to_string());
    }
    metadata
}

fn rounding_name(scheme: &Scheme) -> &'static str {
    if seed_of(scheme).is_some() { "stochastic" } else { "nearest" }
}

fn seed_of(scheme: &Scheme) -> Option<u64> {
    match scheme.encoder.rounding {
        Rounding::Stochastic { seed } => Some(seed),
        _ => None,
    }
}

fn cast_all(casters: &[Caster<'_>], writer: &mut SafetensorsWriter, host: &Host) -> Result<Vec<CastTensor>> {
    let total = casters.iter().map(|caster| caster.tensor.meta().len).sum();
    let progress = host.progress(total, Unit::Bytes);
    let mut reports = Vec::with_capacity(casters.len());
    for caster in casters {
        let meta = caster.tensor.meta();
        progress.message(Shown(&meta.name).to_string());
        let cost = caster.cast(writer, host.threads, &progress)?;
        reports.push(report(caster, &cost));
    }
    progress.finish();
    Ok(reports)
}

fn report(caster: &Caster<'_>, cost: &Cost) -> CastTensor {
    let meta = caster.tensor.meta();
    CastTensor {
        name: meta.name.clone(),
        shape: meta.shape.clone(),
        sqnr_db: cost.sqnr_db(),
        max_abs_error: cost.max_abs,
        bits_per_weight: caster.bits_per_weight(),
        packed_bytes: (caster.bits_per_weight() * caster.tensor.len() as f64 / 8.0).ceil() as u64,
        non_finite: cost.non_finite,
    }
}
