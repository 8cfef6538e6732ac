//! Loading of a model for fine-tuning: frozen weights as they are stored or quantized, and the first adapters.

use std::sync::Mutex;

use mantissa_kernels::for_each;
use mantissa_model::{Linear, LinearInfo, LoadError, ModelConfig, Role, WeightSource, linear_weight};
use mantissa_num::stored::Transforms;
use mantissa_num::{Given, Quantized, Scheme, quantize};
use mantissa_store::convention::{LinearWeight, Weight};

use super::init::{self, Factors};
use crate::arena::Parameters;
use crate::error::TrainError;
use crate::frozen::{Base, Formats, FrozenWeight, misfit};
use crate::lora::{A, B, Init, MAGNITUDE, Tuning, adapter_name, is_adapter};
use crate::param_table::ParamTable;
use crate::policy::Policy;
use crate::store::Precision;

impl Tuning {
    /// Returns the formats in which the frozen weights of `source` will be packed.
    ///
    /// # Errors
    /// [`TrainError::Load`] if a weight cannot be read.
    pub fn formats(&self, source: &dyn WeightSource, config: &ModelConfig) -> Result<Formats, TrainError> {
        let mut formats = Formats::new();
        for info in config.decoder_linears().filter(|info| !self.trains_linear(info)) {
            let format = match &self.base {
                Some(scheme) => Some(scheme.format.clone()),
                None => match linear_weight(source, &info)?.weight {
                    Weight::Quantized(q) if !is_plain(&q) => Some(q.format),
                    _ => None,
                },
            };
            formats.extend(format.map(|format| (info.module, format)));
        }
        Ok(formats)
    }
}

impl Parameters {
    /// Reads a model for fine-tuning: quantizes the frozen linear weights to the base scheme, or takes them as they
    /// are stored, and initializes the adapters. Results do not depend on `threads`.
    ///
    /// # Errors
    /// [`TrainError::Tuning`] names a setting at fault; [`TrainError::Load`] if a weight cannot be read or quantized,
    /// or memory is missing.
    pub fn tuned(
        source: &dyn WeightSource,
        config: &ModelConfig,
        tuning: &Tuning,
        policy: &Policy,
        threads: usize,
    ) -> Result<Self, TrainError> {
        tuning.check(config)?;
        let mut trained = Self::empty(tuning.table(config), policy.initial_weights())?;
        let maker = Maker { source, tuning, precision: policy.weights };
        let formats = tuning.formats(source, config)?;
        let dense = tuning.dense(config, |info| formats.contains_key(&info.module));
        let (table, first) = (ParamTable::of(dense, trained.table().len()), trained.table().len());
        let bytes = ((table.len() - first) as u64).saturating_mul(policy.weights.bytes());
        let memory = || LoadError::Memory { what: "frozen weights", bytes };
        let mut base =
            Base::zeros(tuning.clone(), table.clone(), first, policy.weights).ok_or_else(memory)?;
        for param in table.iter() {
            if !matches!(param.tensor.role, Role::Linear { .. }) {
                let values = source.tensor_f32(&param.tensor.name, &param.tensor.shape)?;
                base.set(param.range.start, &values);
            }
        }
        for param in trained.table().clone().iter().filter(|param| !is_adapter(&param.tensor.name)) {
            let values = source.tensor_f32(&param.tensor.name, &param.tensor.shape)?;
            trained.set(param.range.start, &values);
        }
        let infos: Vec<_> =
            config.decoder_linears().filter(|info| !tuning.trains_linear(info)).enumerate().collect();
        // A few at a time, so that their f32 values are never held for the whole model.
        for infos in infos.chunks(threads.max(1)) {
            for (info, made) in maker.linears(infos, threads)? {
                keep(&mut base, &info, made, &mut trained);
            }
        }
        trained.set_base(base);
        Ok(trained)
    }
}

/// Stores a frozen linear layer in `base`, and its adapter among the trained tensors.
fn keep(base: &mut Base, info: &LinearInfo, made: Made, trained: &mut Parameters) {
    if let Some(param) = base.table().by_name(&format!("{}.weight", info.module)) {
        base.set(param.range.start, &made.values);
    }
    if let Some(packed) = made.packed {
        base.push(info.module.clone(), packed);
    }
    if let Some(Factors { a, b, magnitude }) = made.factors {
        trained.put(&adapter_name(&info.module, A), &a);
        trained.put(&adapter_name(&info.module, B), &b);
        if !magnitude.is_empty() {
            trained.put(&adapter_name(&info.module, MAGNITUDE), &magnitude);
        }
    }
}

/// True if a stored weight has codes and scales.
fn is_packed(weight: &Weight) -> bool {
    matches!(weight, Weight::Quantized(q) if !is_plain(q))
}

/// True for casts to 16 bits and more, which have no scales.
fn is_plain(q: &Quantized) -> bool {
    q.format.codec().is_none() && q.format.trellis().is_none() && q.format.scale().is_none()
}

/// Makes the linear layers of a base.
struct Maker<'a> {
    source: &'a dyn WeightSource,
    tuning: &'a Tuning,
    precision: Precision,
}

/// Linear layer of a base: packed weight or values, and the initial factors of its adapter.
#[derive(Default)]
struct Made {
    packed: Option<FrozenWeight>,
    values: Vec<f32>,
    factors: Option<Factors>,
}

impl Maker<'_> {
    /// Makes some linear layers, one per thread. Weights are read one after the other.
    fn linears(
        &self,
        infos: &[(usize, LinearInfo)],
        threads: usize,
    ) -> Result<Vec<(LinearInfo, Made)>, TrainError> {
        let mut stored = Vec::new();
        for (index, info) in infos {
            stored.push((*index, info, Some(linear_weight(self.source, info)?)));
        }
        let done = Mutex::new(Vec::new());
        let (tuning, precision) = (self.tuning, self.precision);
        for_each(threads, stored.iter_mut(), |(index, info, weight)| {
            let made = weight.take().map(|weight| linear(tuning, precision, info, *index, weight));
            let mut done = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            done.extend(made.map(|made| (*index, info.clone(), made)));
        });
        let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        done.sort_by_key(|(index, ..)| *index);
        done.into_iter().map(|(_, info, made)| Ok((info, made?))).collect()
    }
}

/// Quantizes a linear layer and initializes its adapter.
fn linear(
    tuning: &Tuning,
    precision: Precision,
    info: &LinearInfo,
    index: usize,
    stored: LinearWeight,
) -> Result<Made, TrainError> {
    let LinearInfo { module, rows, cols, .. } = info;
    let seed = tuning.lora.targets(module).then(|| init::stream(tuning.seed, index as u64));
    let mut made = match &tuning.base {
        None => as_stored(module, stored)?,
        Some(scheme) => quantized(tuning, info, scheme, &values(module, stored)?, seed)?,
    };
    let Some(seed) = seed else { return Ok(made) };
    let mut factors = made.factors.take().unwrap_or_else(|| init::zero(&tuning.lora, (*rows, *cols), seed));
    if tuning.lora.dora {
        let mut base = made.values.clone();
        match &made.packed {
            Some(packed) => {
                base.resize(rows * cols, 0.0);
                packed.dequantize(&mut base, 1);
            }
            None => crate::store::round(precision, &mut base),
        }
        factors.magnitude = init::row_norms(&base, &factors, tuning.lora.scale() as f32, *cols);
    }
    made.factors = Some(factors);
    Ok(made)
}

/// Keeps a weight as it is stored: packed if it is quantized.
fn as_stored(module: &str, mut stored: LinearWeight) -> Result<Made, TrainError> {
    if is_packed(&stored.weight) {
        let transforms = std::mem::take(&mut stored.transforms);
        if let Weight::Quantized(q) = stored.weight {
            let packed = Some(FrozenWeight::new(q, transforms).map_err(misfit(module))?);
            return Ok(Made { packed, ..Made::default() });
        }
    }
    Ok(Made { values: values(module, stored)?, ..Made::default() })
}

/// Quantizes `weight`, alternating with its adapter's approximation of the error under LoftQ.
fn quantized(
    tuning: &Tuning,
    info: &LinearInfo,
    scheme: &Scheme,
    weight: &[f32],
    seed: Option<u64>,
) -> Result<Made, TrainError> {
    let LinearInfo { module, rows, cols, .. } = info;
    let quantize = |w: &[f32]| quantize(scheme, w, *rows, *cols, Given::default()).map_err(misfit(module));
    let (q, factors) = match (tuning.lora.init, seed) {
        (Init::LoftQ { steps }, Some(seed)) => {
            let (q, factors) = init::loftq(&tuning.lora, weight, (*rows, *cols), steps, seed, quantize)?;
            (q, Some(factors))
        }
        _ => (quantize(weight)?, None),
    };
    let packed = Some(FrozenWeight::new(q, Transforms::default()).map_err(misfit(module))?);
    Ok(Made { packed, factors, ..Made::default() })
}

/// Dequantizes a stored weight, with its transforms.
fn values(module: &str, stored: LinearWeight) -> Result<Vec<f32>, LoadError> {
    if let (Weight::F32(values), true) = (&stored.weight, stored.transforms.is_empty()) {
        return Ok(values.clone());
    }
    let linear = Linear::new(module, LinearWeight { bias: None, input: None, ..stored })?.folded();
    let mut values = vec![0.0; linear.rows() * linear.cols()];
    let rows = values.chunks_exact_mut(linear.cols().max(1)).enumerate();
    rows.for_each(|(row, out)| linear.row(row, out));
    Ok(values)
}
