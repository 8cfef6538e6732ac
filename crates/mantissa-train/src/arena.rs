//! Parameters in one flat arena.

use std::borrow::Cow;
use std::f64::consts::TAU;
use std::ops::Range;
use std::sync::Arc;

use mantissa_model::config::ActivationParameter;
use mantissa_model::config::NormForm;
use mantissa_model::graph::VectorKind;
use mantissa_model::{LoadError, ModelConfig, Role, TensorInfo, WeightSource};
use mantissa_num::round::philox4x32_10;

use crate::array::{Array, ArrayMut};
use crate::frozen::Base;
use crate::learned::{LearnedScales, scales_name};
use crate::param_table::{ParamInfo, ParamTable, transposed};
use crate::policy::{Master, Policy};
use crate::store::{Precision, Store, StoreRef};
use crate::weights::{Int8Weights, Weights};

/// Arena of parameter values, stored in f32, bf16 or f16, or with INT8 matrices. In fine-tuning with adapters, these are the trained
/// tensors, and the frozen ones lie behind them.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    table: ParamTable,
    store: Weights,
    base: Option<Arc<Base>>,
}

impl Parameters {
    /// Reads a model's parameters as f32.
    ///
    /// # Errors
    /// As [`WeightSource::tensor_f32`], and [`LoadError::Memory`].
    pub fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self, LoadError> {
        Self::load_as(source, config, Precision::F32)
    }

    /// Reads a model's parameters and stores them in `precision`, rounded to nearest. Converts tensor by
    /// tensor, so that the f32 copy is never held whole.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_as(
        source: &dyn WeightSource,
        config: &ModelConfig,
        precision: Precision,
    ) -> Result<Self, LoadError> {
        let mut parameters = Self::zeros(config, precision)?;
        for param in parameters.table.iter() {
            let shape = param.stored_shape();
            let mut values = source.tensor_f32(&param.tensor.name, &shape)?;
            if param.transposed {
                values = transposed(&values, shape[1]);
            }
            parameters.store.set(param.range.start, &values);
        }
        Ok(parameters)
    }

    /// Initializes a model: weights and embeddings from a normal distribution with standard deviation `std`,
    /// norms 1, biases and vectors 0, activations as published.
    ///
    /// A value depends only on the seed and its place (Philox4x32-10, key = seed, counter = group of four
    /// places; Box & Muller 1958).
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn random(config: &ModelConfig, std: f32, seed: u64) -> Result<Self, LoadError> {
        Self::random_as(config, std, seed, Precision::F32)
    }

    /// Initializes a model like [`random`](Self::random), stored in `precision`, rounded to nearest. The f32
    /// copy is never held whole.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn random_as(
        config: &ModelConfig,
        std: f32,
        seed: u64,
        precision: Precision,
    ) -> Result<Self, LoadError> {
        let mut parameters = Self::zeros(config, precision)?;
        let mut buffer = Vec::new();
        for ParamInfo { tensor, range, .. } in parameters.table.iter() {
            buffer.clear();
            buffer.resize(range.len(), 0.0);
            let values = &mut buffer[..];
            match tensor.role {
                Role::Norm { .. } if config.norm == NormForm::RmsPlusOne => {}
                Role::Norm { .. } => values.fill(1.0),
                Role::Vector { kind: VectorKind::Activation(name), .. } => {
                    let parameter = config.hidden_act.parameters().iter().find(|one| one.name == name);
                    values.fill(parameter.map_or(0.0, ActivationParameter::stored));
                }
                Role::Bias { .. }
                | Role::NormBias { .. }
                | Role::SideBias { .. }
                | Role::HeadBias
                | Role::Vector { .. } => {}
                _ => {
                    let first = range.start as u64 / 4;
                    for (group, values) in (first..).zip(values.chunks_mut(4)) {
                        let normals = normals(seed, group);
                        values.iter_mut().zip(normals).for_each(|(v, n)| *v = (n * f64::from(std)) as f32);
                    }
                }
            }
            parameters.store.set(range.start, &buffer);
        }
        Ok(parameters)
    }

    /// Allocates parameters of value 0.
    pub(crate) fn zeros(config: &ModelConfig, precision: Precision) -> Result<Self, LoadError> {
        Self::empty(ParamTable::new(config), precision)
    }

    /// Allocates the parameters of a table, of value 0.
    pub(crate) fn empty(table: ParamTable, precision: Precision) -> Result<Self, LoadError> {
        let bytes = (table.len() as u64).saturating_mul(precision.bytes());
        let memory = LoadError::Memory { what: "parameters", bytes };
        let store = Weights::Float(Store::zeros(precision, table.len()).ok_or(memory)?);
        Ok(Parameters { table, store, base: None })
    }

    /// Bytes of the parameters of `table` in a model trained with `policy`.
    pub(crate) fn bytes(table: &ParamTable, policy: &Policy) -> u64 {
        match policy.master {
            Master::Int8 { .. } => Int8Weights::bytes(table),
            _ => policy.weights.bytes().saturating_mul(table.len() as u64),
        }
    }

    /// Puts a frozen base behind the trained tensors.
    pub(crate) fn set_base(&mut self, base: Base) {
        self.base = Some(Arc::new(base));
    }

    /// Returns the frozen base, if the model is fine-tuned with adapters.
    pub(crate) fn base(&self) -> Option<&Base> {
        self.base.as_deref()
    }

    /// Computes a hash of the frozen base's bits; `None` without one.
    pub fn hash_base(&self) -> Option<String> {
        self.base.as_ref().map(|base| base.digest())
    }

    /// Returns the hash of the frozen base, computed once; `None` without one.
    pub(crate) fn base_digest(&self) -> Option<&str> {
        self.base.as_ref().map(|base| base.fingerprint())
    }

    /// Bytes of the frozen base; 0 without one.
    pub fn frozen_bytes(&self) -> u64 {
        self.base.as_ref().map_or(0, |base| base.bytes())
    }

    /// Returns the range of the trained or frozen tensor called `name`; `None` for packed weights.
    pub(crate) fn place(&self, name: &str) -> Option<Range<usize>> {
        let frozen = || self.base.as_ref().and_then(|base| base.table().place(name));
        self.table.place(name).or_else(frozen)
    }

    /// Converts the values to `precision`, rounded to nearest.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn stored_as(self, precision: Precision) -> Result<Self, LoadError> {
        if precision == self.store.precision() {
            return Ok(self);
        }
        let bytes = (self.table.len() as u64).saturating_mul(precision.bytes());
        let memory = LoadError::Memory { what: "parameters", bytes };
        let mut store = Weights::Float(Store::zeros(precision, self.table.len()).ok_or(memory)?);
        for param in self.table.iter() {
            store.set(param.range.start, &self.store.get(param.range.clone()).widened());
        }
        Ok(Parameters { table: self.table, store, base: self.base })
    }

    /// Converts the weights of the decoder's linear layers to INT8, rounded to nearest under the scale amax / 127 of each
    /// row, and all others to f32. Values that are on such a grid keep their bits.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub(crate) fn stored_as_int8(self) -> Result<Self, LoadError> {
        if matches!(self.store, Weights::Int8(_)) {
            return Ok(self);
        }
        let memory = LoadError::Memory { what: "parameters", bytes: Int8Weights::bytes(&self.table) };
        let mut store = Weights::Int8(Int8Weights::zeros(&self.table).ok_or(memory)?);
        for param in self.table.iter() {
            store.set(param.range.start, &self.store.get(param.range.clone()).widened());
        }
        Ok(Parameters { table: self.table, store, base: self.base })
    }

    /// Adds the learned scales that `policy` asks for, each at its first value for the weights, and removes those that
    /// it does not ask for. Parameters with adapters stay as they are.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn with_scales(self, config: &ModelConfig, policy: &Policy) -> Result<Self, LoadError> {
        let table = ParamTable::with_scales(config, policy);
        if self.base.is_some() || table == self.table {
            return Ok(self);
        }
        let mut all = Self::empty(table, self.store.precision())?;
        for param in self.table.iter() {
            if let Some(to) = all.table.place(&param.tensor.name) {
                all.store.set(to.start, &self.f32(&param.range));
            }
        }
        for info in config.decoder_linears() {
            let linear = policy.linear_of(info.layer, config.num_hidden_layers);
            let name = scales_name(&info.module);
            let weight = self.table.place(&format!("{}.weight", info.module));
            let Some((scales, weight)) = LearnedScales::of(&linear.fprop.right).zip(weight) else { continue };
            if self.table.place(&name).is_none() {
                all.put(&name, &scales.initial(&self.f32(&weight), info.cols));
            }
        }
        Ok(all)
    }

    /// Wraps values without a table.
    #[cfg(test)]
    pub(crate) fn bare(values: Vec<f32>) -> Self {
        let table = ParamTable::bare(values.len());
        Parameters { table, store: Weights::Float(Store::F32(values)), base: None }
    }

    /// Returns the table of parameter ranges.
    pub fn table(&self) -> &ParamTable {
        &self.table
    }

    /// Returns the whole arena as f32; copies if it is stored otherwise.
    pub fn values(&self) -> Cow<'_, [f32]> {
        match &self.store {
            Weights::Float(store) => store.get(0..self.table.len()).widened(),
            Weights::Int8(weights) => Cow::Owned(weights.widened()),
        }
    }

    /// Returns the storage precision; f32 if matrices are INT8, whose values are f32 products.
    pub fn precision(&self) -> Precision {
        self.store.precision()
    }

    /// Overwrites the values from offset `first` on, rounded to nearest; rows of INT8 matrices under the scale amax / 127,
    /// unless the values are on the grid of another scale near it.
    ///
    /// # Panics
    /// If they reach beyond the arena.
    pub fn set(&mut self, first: usize, values: &[f32]) {
        self.store.set(first, values);
    }

    /// Overwrites the parameter called `name`.
    ///
    /// # Panics
    /// If no parameter has this name and length.
    pub(crate) fn put(&mut self, name: &str, values: &[f32]) {
        let range = self.table.by_name(name).map(|param| param.range.clone()).unwrap_or_default();
        assert_eq!(range.len(), values.len(), "parameter {name}");
        self.store.set(range.start, values);
    }

    /// Returns the little-endian bytes of a range in the storage [precision](Self::precision).
    pub(crate) fn stored_bytes(&self, range: Range<usize>) -> Vec<u8> {
        self.store.get(range).float_bytes()
    }

    /// Returns the arrays of a parameter for a checkpoint: its values, or codes and scales per row.
    pub(crate) fn arrays(&self, param: &ParamInfo) -> (Array<'_>, Option<&[f32]>) {
        self.store.arrays(param.range.clone())
    }

    /// Returns the same arrays for restoring a checkpoint.
    pub(crate) fn arrays_mut(&mut self, param: &ParamInfo) -> (ArrayMut<'_>, Option<&mut [f32]>) {
        self.store.arrays_mut(param.range.clone())
    }

    /// True if parameters are stored as a whole: rows of INT8 matrices have scales.
    pub(crate) fn are_whole(&self) -> bool {
        matches!(self.store, Weights::Int8(_))
    }

    /// Returns the bytes of the piece of a parameter as it is stored: values, or codes and the scales of its rows.
    pub(crate) fn piece_bytes(&self, piece: Range<usize>) -> Vec<u8> {
        let (values, scales) = self.store.arrays(piece);
        // Weights are in memory: reading them does not fail.
        let mut bytes = values.le_bytes().unwrap_or_default();
        bytes.extend(scales.into_iter().flatten().flat_map(|scale| scale.to_le_bytes()));
        bytes
    }

    /// Overwrites the piece of a parameter with bytes from the beginning of `rest`; `None` if there are too few.
    pub(crate) fn set_piece(&mut self, piece: Range<usize>, rest: &mut &[u8]) -> Option<()> {
        let (mut values, scales) = self.store.arrays_mut(piece);
        values.read_le_bytes(rest)?.ok()?;
        scales.map_or(Some(Ok(())), |scales| ArrayMut::F32(scales).read_le_bytes(rest))?.ok()
    }

    /// Returns the stored values of a range, trained or frozen.
    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        match &self.base {
            Some(base) if range.start >= self.table.len() => base.get(range),
            _ => self.store.get(range),
        }
    }

    /// Returns a short range as f32, such as a norm weight.
    pub(crate) fn f32(&self, range: &Range<usize>) -> Cow<'_, [f32]> {
        self.get(range.clone()).widened()
    }

    /// Returns the table, and the arena for writing.
    pub(crate) fn split_mut(&mut self) -> (&ParamTable, &mut Weights) {
        (&self.table, &mut self.store)
    }

    /// Returns name, shape and values of every parameter.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorInfo, Cow<'_, [f32]>)> {
        self.table.iter().map(|param| (&param.tensor, self.f32(&param.range)))
    }
}

/// Returns four standard normal values.
fn normals(seed: u64, group: u64) -> [f64; 4] {
    let words = philox4x32_10([group as u32, (group >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let pair = |a: u32, b: u32| {
        // Uniform in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * ((f64::from(a) + 1.0) / 4_294_967_296.0).ln()).sqrt();
        let angle = TAU * f64::from(b) / 4_294_967_296.0;
        [radius * angle.cos(), radius * angle.sin()]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::param_table::ALIGN;

    fn config(width: u64, layers: u64) -> ModelConfig {
        let config = json!({
            "model_type": "qwen2", "hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers,
            "num_attention_heads": 1, "vocab_size": 13, "max_position_embeddings": 32, "rms_norm_eps": 1e-5
        });
        ModelConfig::from_json(&config, "config.json").unwrap()
    }

    #[test]
    fn places_are_aligned_and_disjoint_and_values_depend_only_on_place() {
        let config = config(6, 2);
        let params = Parameters::random(&config, 0.5, 3).unwrap();
        let table = params.table();
        let mut end = 0;
        for param in table.iter() {
            assert!(param.range.start.is_multiple_of(ALIGN) && param.range.start >= end);
            assert_eq!(param.range.len(), param.tensor.shape.iter().product::<usize>());
            assert!(params.values()[end..param.range.start].iter().all(|v| *v == 0.0), "gaps are 0");
            end = param.range.end;
        }
        assert_eq!(config.parameters(), table.iter().map(|p| p.range.len() as u64).sum::<u64>());
        for (tensor, values) in params.iter() {
            match tensor.role {
                Role::Norm { .. } => assert!(values.iter().all(|v| *v == 1.0)),
                Role::Bias { .. } => assert!(values.iter().all(|v| *v == 0.0)),
                _ => assert!(values.iter().any(|v| *v > 0.1) && values.iter().any(|v| *v < -0.1)),
            }
        }
        assert_eq!(params, Parameters::random(&config, 0.5, 3).unwrap());
        let bf16 = Parameters::random_as(&config, 0.5, 3, Precision::Bf16).unwrap();
        assert_eq!(bf16, params.clone().stored_as(Precision::Bf16).unwrap());
        assert_ne!(params, Parameters::random(&config, 0.5, 4).unwrap());
    }

    #[test]
    fn a_model_without_end_is_no_panic() {
        let config = config(1 << 24, 10_000);
        assert_eq!(ParamTable::new(&config).len(), usize::MAX);
        assert!(matches!(Parameters::random(&config, 1.0, 0), Err(LoadError::Memory { .. })));
    }

    #[test]
    fn normals_are_normal() {
        let all: Vec<f64> = (0..20_000).flat_map(|group| normals(7, group)).collect();
        let n = all.len() as f64;
        let mean = all.iter().sum::<f64>() / n;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let beyond = all.iter().filter(|x| x.abs() > 1.959_964).count() as f64 / n;
        assert!(mean.abs() < 5.0 / n.sqrt() && (variance - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
        assert!((beyond - 0.05).abs() < 5.0 * (0.05 * 0.95 / n).sqrt());
    }
}
