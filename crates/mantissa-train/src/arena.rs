//! Parameters in one flat arena.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use mantissa_model::{LoadError, ModelConfig, TensorInfo};

use crate::array::{Array, ArrayMut};
use crate::frozen::Base;
use crate::learned::{LearnedScales, scales_name};
use crate::param_table::{ParamInfo, ParamTable, outside, within};
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
    /// Values that are held; `None` for all.
    held: Option<Held>,
}

/// Values of an arena that a rank holds; the others are with other ranks and read as 0 here.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    /// Part that is always held.
    shard: Range<usize>,
    /// Parameters that are held for the moment.
    open: Vec<Range<usize>>,
    /// Hash of all values as they were made.
    made: Option<String>,
}

impl Parameters {
    /// Allocates parameters of value 0.
    pub(crate) fn zeros(config: &ModelConfig, precision: Precision) -> Result<Self, LoadError> {
        Self::empty(ParamTable::new(config), precision)
    }

    /// Allocates the parameters of a table, of value 0.
    pub(crate) fn empty(table: ParamTable, precision: Precision) -> Result<Self, LoadError> {
        let bytes = (table.len() as u64).saturating_mul(precision.bytes());
        let memory = LoadError::Memory { what: "parameters", bytes };
        let store = Weights::Float(Store::zeros(precision, table.len()).ok_or(memory)?);
        Ok(Parameters { table, store, base: None, held: None })
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
        let all = 0..self.table.len();
        let shard = self.held.as_ref().map_or(&all, |held| &held.shard);
        for held in self.table.ranges().map(|range| within(&range, shard)) {
            store.set(held.start, &self.store.get(held).widened());
        }
        Ok(Parameters { table: self.table, store, base: self.base, held: self.held })
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
        Ok(Parameters { table: self.table, store, base: self.base, held: None })
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
        Parameters { table, store: Weights::Float(Store::F32(values)), base: None, held: None }
    }

    /// Returns the table of parameter ranges.
    pub fn table(&self) -> &ParamTable {
        &self.table
    }

    /// Returns the whole arena as f32; copies if it is stored otherwise.
    ///
    /// # Panics
    /// If other ranks hold a part of it.
    pub fn values(&self) -> Cow<'_, [f32]> {
        assert!(self.held.is_none(), "Parameters::values: parts are with other ranks");
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
        self.get(range).float_bytes()
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

    /// Keeps the values in `shard` and gives the memory of all others back.
    pub(crate) fn hold(&mut self, shard: Range<usize>) {
        self.release_outside(&shard, &(0..self.table.len()));
        self.held = Some(Held { shard, open: Vec::new(), made: None });
    }

    /// Counts the values in `shard` as held, the others as with other ranks; `made` is the hash of all.
    pub(crate) fn hold_made(&mut self, shard: Range<usize>, made: String) {
        self.held = Some(Held { shard, open: Vec::new(), made: Some(made) });
    }

    /// Returns the hash of all values as they were made, if other ranks hold a part of them.
    pub(crate) fn made(&self) -> Option<&str> {
        self.held.as_ref()?.made.as_deref()
    }

    /// Gives the memory of opened parameters back, and counts those at `places` as held, which are then to be filled.
    pub(crate) fn open(&mut self, places: &[Range<usize>]) {
        let Some(held) = self.held.take() else { return };
        held.open.iter().for_each(|place| self.release_outside(&held.shard, place));
        self.held = Some(Held { open: places.to_vec(), ..held });
    }

    /// Counts all values as held, which are then to be filled.
    pub(crate) fn hold_all(&mut self) {
        self.held = None;
    }

    /// Gives the memory of the values at `range` back that are not in `shard`.
    pub(crate) fn release_outside(&mut self, shard: &Range<usize>, range: &Range<usize>) {
        outside(range, shard).into_iter().for_each(|part| self.store.release(part));
    }

    /// Returns the stored values of a range, trained or frozen.
    ///
    /// # Panics
    /// If another rank holds them: they would read as 0.
    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        if let Some(held) = &self.held {
            let is_in = |place: &Range<usize>| place.start <= range.start && range.end <= place.end;
            let is_held = range.is_empty() || is_in(&held.shard) || held.open.iter().any(is_in);
            assert!(is_held, "Parameters::get: {range:?} is with another rank");
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use mantissa_model::Role;
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
}
