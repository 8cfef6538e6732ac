//! Calibrated levels of a KV cache, stored with a model in the native format.
//!
//! `config.json` has the policy as text under `quantization_config.kv_levels`. An attention module `m` has, beside
//! its scales: `m.k_levels` F32 `[codes]`, the ascending levels of the keys' codes; `m.k_ranges` F32 `[2, width]`,
//! the middle and half-width of each key channel over all heads; and `m.v_levels` F32 `[codes]`, the levels of the
//! values. Keys or values that the policy stores otherwise have none.

use super::files::ModelFiles;
use crate::finite::require_finite;
use crate::{Dtype, Error, Result, TensorSpec};

/// Key of the native format's `quantization_config`.
pub(super) const KEY: &str = "kv_levels";

/// Names of the tensors of an attention module.
pub const SUFFIXES: [&str; 3] = ["k_levels", "k_ranges", "v_levels"];

/// Most levels: 8 bits.
const MOST: usize = 256;

/// Levels of the KV cache of one layer, found by calibration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvLevels {
    /// KV-cache policy, as in `--kv`.
    pub policy: String,
    /// Levels of the keys, if they have any.
    pub keys: Option<KeyLevels>,
    /// Levels of the values, ascending, if they have any.
    pub values: Option<Vec<f32>>,
}

/// Levels of keys, and the map of each channel: `middle + half · level`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyLevels {
    /// Ascending.
    pub levels: Vec<f32>,
    /// Middles of all channels.
    pub middles: Vec<f32>,
    /// Half-widths of all channels.
    pub halves: Vec<f32>,
}

impl KvLevels {
    /// Tensors of the attention `module`, with their bytes.
    pub fn tensors(&self, module: &str) -> Vec<(TensorSpec, Vec<u8>)> {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let tensor = |suffix: &str, shape: Vec<usize>, values: &[f32]| {
            (TensorSpec::new(format!("{module}.{suffix}"), Dtype::F32, shape), bytes(values))
        };
        let [k_levels, k_ranges, v_levels] = SUFFIXES;
        let mut all = Vec::new();
        if let Some(keys) = &self.keys {
            let ranges = [&keys.middles[..], &keys.halves].concat();
            all.push(tensor(k_levels, vec![keys.levels.len()], &keys.levels));
            all.push(tensor(k_ranges, vec![2, keys.middles.len()], &ranges));
        }
        all.extend(self.values.as_ref().map(|levels| tensor(v_levels, vec![levels.len()], levels)));
        all
    }
}

impl ModelFiles {
    /// KV-cache policy of a model that stores levels, as in `--kv`; `None` if it stores none.
    pub fn kv_policy(&self) -> Option<&str> {
        self.opened().kv_policy()
    }

    /// Reads the levels of the attention `module`, whose keys have `width` values per token.
    ///
    /// # Errors
    /// A tensor has another dtype or shape, or holds non-finite values, levels that do not ascend or a negative
    /// width.
    pub fn kv_levels(&self, module: &str, width: usize) -> Result<Option<KvLevels>> {
        let Some(policy) = self.kv_policy() else { return Ok(None) };
        let [k_levels, k_ranges, v_levels] = SUFFIXES.map(|suffix| format!("{module}.{suffix}"));
        let keys = match self.levels(&k_levels)? {
            None => None,
            Some(levels) => {
                let mut middles = self.f32s(&k_ranges, &[2, width])?;
                let halves = middles.split_off(width);
                if let Some(half) = halves.iter().find(|half| **half < 0.0) {
                    let found = format!("half a width of {half}");
                    return Err(self.fault(&k_ranges, found, "none below 0", ""));
                }
                Some(KeyLevels { levels, middles, halves })
            }
        };
        Ok(Some(KvLevels { policy: policy.to_owned(), keys, values: self.levels(&v_levels)? }))
    }

    fn levels(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(meta) = self.checkpoint().get(name) else { return Ok(None) };
        let count = match meta.shape[..] {
            [count] if count <= MOST && count.is_power_of_two() && count > 1 => count,
            _ => {
                let allowed = format!("[codes], a power of two up to {MOST}");
                return Err(self.fault(name, format!("shape {:?}", meta.shape), allowed, ""));
            }
        };
        let levels = self.f32s(name, &[count])?;
        match levels.windows(2).position(|pair| pair[0] > pair[1]) {
            None => Ok(Some(levels)),
            Some(at) => {
                let found = format!("{} after {}", levels[at + 1], levels[at]);
                Err(self.fault(name, found, "levels that ascend", ""))
            }
        }
    }

    fn f32s(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let meta = self.meta(name)?;
        self.expect_dtype(meta, &[Dtype::F32])?;
        self.expect_shape(meta, shape)?;
        let values = self.checkpoint().read_f32(name)?;
        require_finite(&values, self.path_of(name), name)?;
        Ok(values)
    }
}

/// Refuses a model that states both a scheme and levels for its cache.
pub(super) fn alone(path: &std::path::Path, scheme: bool, levels: bool) -> Result<()> {
    match scheme && levels {
        true => {
            let field = format!("quantization_config.{KEY}");
            Err(Error::field(path, field, "levels and a scheme of the cache", "one of them", ""))
        }
        false => Ok(()),
    }
}
