//! Frozen part of a model: packed linear weights, and an arena of the other tensors.

mod weight;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use mantissa_model::ModelConfig;
use mantissa_num::Format;
use mantissa_store::FileDigest;

use crate::lora::Tuning;
use crate::param_table::ParamTable;
use crate::store::{Precision, Store, StoreRef};

pub(crate) use weight::{FrozenWeight, misfit};

/// Formats of packed weights by module.
pub type Formats = BTreeMap<String, Format>;

/// Frozen part of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Base {
    /// Settings that the model is tuned with.
    pub(crate) tuning: Tuning,
    /// Tensors kept as values. Their ranges begin where the ranges of the trained tensors end.
    table: ParamTable,
    first: usize,
    store: Store,
    /// Packed weights by module.
    packed: Vec<(String, FrozenWeight)>,
    /// Hash of all of it, once asked for.
    fingerprint: OnceLock<String>,
}

impl Base {
    /// Allocates a base of the tensors in `table`, whose ranges begin at `first`, all 0; `None` if memory is missing.
    pub(crate) fn zeros(
        tuning: Tuning,
        table: ParamTable,
        first: usize,
        precision: Precision,
    ) -> Option<Self> {
        let store = Store::zeros(precision, table.len() - first)?;
        Some(Base { tuning, table, first, store, packed: Vec::new(), fingerprint: OnceLock::new() })
    }

    /// Overwrites the values from offset `first` of the arenas on, rounded to nearest.
    pub(crate) fn set(&mut self, first: usize, values: &[f32]) {
        self.store.set(first - self.first, values);
    }

    /// Adds the packed weight of the linear layer `module`.
    pub(crate) fn push(&mut self, module: String, weight: FrozenWeight) {
        self.packed.push((module, weight));
    }

    /// Returns the stored values of a range behind the trained tensors.
    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        self.store.get(range.start - self.first..range.end - self.first)
    }

    /// Returns the tensors kept as values.
    pub(crate) fn table(&self) -> &ParamTable {
        &self.table
    }

    /// Returns the index of the packed weight of a linear layer.
    pub(crate) fn index(&self, module: &str) -> Option<usize> {
        self.packed.iter().position(|(name, _)| name == module)
    }

    /// Returns the packed weight with this index.
    pub(crate) fn weight(&self, index: usize) -> &FrozenWeight {
        &self.packed[index].1
    }

    /// Bytes of packed weights and values.
    pub(crate) fn bytes(&self) -> u64 {
        let packed: u64 = self.packed.iter().map(|(_, weight)| weight.bytes()).sum();
        packed + self.store.precision().bytes() * self.store.len() as u64
    }

    /// Predicts [`bytes`](Self::bytes) for linear weights packed in these formats.
    pub(crate) fn bytes_of(
        tuning: &Tuning,
        config: &ModelConfig,
        weights: Precision,
        formats: &Formats,
    ) -> u64 {
        let dense = ParamTable::of(tuning.dense(config, |info| formats.contains_key(&info.module)), 0);
        let packed = config.decoder_linears().filter_map(|info| {
            let format = formats.get(&info.module)?;
            Some(FrozenWeight::bytes_in(format, info.rows, info.cols))
        });
        packed.sum::<u64>() + weights.bytes() * dense.len() as u64
    }

    /// Returns the [digest](Self::digest) at the first call, which later calls repeat: the base does not change.
    pub(crate) fn fingerprint(&self) -> &str {
        self.fingerprint.get_or_init(|| self.digest())
    }

    /// Computes a SHA-256 of all stored bits.
    pub(crate) fn digest(&self) -> String {
        const PIECE: usize = 1 << 18;
        let values = (0..self.store.len())
            .step_by(PIECE)
            .map(|first| self.store.get(first..self.store.len().min(first + PIECE)).float_bytes());
        let packed = self.packed.iter().flat_map(|(_, weight)| weight.bits());
        FileDigest::of_pieces(values.chain(packed)).hex()
    }
}
