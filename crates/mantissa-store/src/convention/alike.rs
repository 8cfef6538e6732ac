//! Comparison of two linear layers as they are stored: a head that repeats the embedding is tied to it.

use std::collections::BTreeMap;

use super::files::ModelFiles;
use crate::{Result, TensorMeta};

/// Bytes of a tensor, or elements of two, that are read at a time.
const PANEL: usize = 1 << 20;

/// Two layers and the result of their comparison.
#[derive(Clone, Debug)]
pub(super) struct Alike {
    layers: [String; 2],
    alike: bool,
}

impl ModelFiles {
    /// True if the linear layers `a` and `b` store the same weight: tensors of the same names with the same bytes, or
    /// the same values in two float dtypes. Biases do not count. The result of the first comparison is kept.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub fn stores_alike(&self, a: &str, b: &str) -> Result<bool> {
        let layers = [a, b].map(str::to_owned);
        if let Some(known) = self.alike.get().filter(|known| known.layers == layers) {
            return Ok(known.alike);
        }
        let (ours, theirs) = (self.parts(a), self.parts(b));
        let mut alike = !ours.is_empty() && ours.keys().eq(theirs.keys());
        for (ours, theirs) in ours.values().zip(theirs.values()) {
            alike = alike && self.same(ours, theirs)?;
        }
        // A second comparison is of other layers; only the first is kept.
        let _ = self.alike.set(Alike { layers, alike });
        Ok(alike)
    }

    /// Returns the tensors of `module` but its bias, by the ends of their names.
    fn parts(&self, module: &str) -> BTreeMap<&str, &TensorMeta> {
        let end = |meta: &TensorMeta| {
            let end = meta.name.strip_prefix(module)?.strip_prefix('.')?;
            Some(meta.name.len() - end.len()).filter(|_| end != "bias")
        };
        let tensors = self.checkpoint().tensors();
        tensors.filter_map(|meta| Some((&meta.name[end(meta)?..], meta))).collect()
    }

    fn same(&self, a: &TensorMeta, b: &TensorMeta) -> Result<bool> {
        let dense = |meta: &TensorMeta| self.is_dense(&meta.name);
        if a.shape != b.shape || (a.dtype != b.dtype && !(dense(a) && dense(b))) {
            return Ok(false);
        }
        if a.dtype != b.dtype {
            return self.same_values(a, b);
        }
        let mut panels = [vec![0; PANEL], vec![0; PANEL]];
        for at in (0..a.len).step_by(PANEL) {
            let len = (a.len - at).min(PANEL as u64) as usize;
            for (meta, panel) in [a, b].into_iter().zip(&mut panels) {
                self.checkpoint().read_range(&meta.name, at, &mut panel[..len])?;
            }
            if panels[0][..len] != panels[1][..len] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn same_values(&self, a: &TensorMeta, b: &TensorMeta) -> Result<bool> {
        let elements = usize::try_from(a.numel()).unwrap_or(usize::MAX);
        for at in (0..elements).step_by(PANEL) {
            let count = (elements - at).min(PANEL);
            let read = |meta: &TensorMeta| self.checkpoint().read_elements_f32(&meta.name, at, count);
            if read(a)? != read(b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
