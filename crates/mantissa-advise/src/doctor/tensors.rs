//! Stored tensors against those of the model that they were made from.

use std::collections::BTreeMap;

use mantissa_model::{LinearInfo, LoadError, Role, SourceView, StoredAs, WeightSource};
use mantissa_num::{Blocks, Format, Quantized, Scheme};
use mantissa_quant::{rtn, rule_of};
use mantissa_store::convention::{KvQuant, LinearWeight, ModelFiles, Weight};
use serde::Serialize;

use super::ALTERNATIVES;
use super::change::Stored;
use super::compare::{Comparing, beyond};
use crate::error::AdviseError;
use crate::values::{relative_error, values};

type Result<T> = std::result::Result<T, AdviseError>;

/// A tensor of both models.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorRow {
    /// Its name.
    pub tensor: String,
    /// Its layer; `None` of tables and the last norm.
    pub layer: Option<usize>,
    /// `||w - w_ref|| / ||w_ref||`.
    pub error: f64,
    /// The same of the reference rounded to nearest under its scheme.
    pub expected: f64,
    /// Whether it deviates by more than its scheme explains. Methods that move scales between layers, or rotate them, make
    /// tensors differ and leave what the model computes alone.
    pub faulty: bool,
    /// Whether it is the source's but for a scale of each column and row.
    pub diagonal: bool,
    /// The alternative under which it deviates least, and by how much, where it is faulty.
    pub best: Option<(&'static str, f64)>,
    /// Whether that brings it back within its scheme.
    pub repaired: bool,
    #[serde(skip)]
    pub(super) is_norm: bool,
}

impl TensorRow {
    fn new(tensor: String, layer: Option<usize>, error: f64, expected: f64) -> Self {
        let faulty = beyond(error, expected);
        let (diagonal, best, repaired, is_norm) = (false, None, false, false);
        TensorRow { tensor, layer, error, expected, faulty, diagonal, best, repaired, is_norm }
    }

    fn judged(mut self, tried: impl IntoIterator<Item = (&'static str, f64)>) -> Self {
        self.best = tried.into_iter().filter(|(_, e)| e.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1));
        let back =
            |error: f64| !beyond(error, self.expected) && (error < self.error / 2.0 || self.error.is_nan());
        self.repaired = self.faulty && self.best.is_some_and(|(_, error)| back(error));
        self
    }
}

/// Puts rows into the order of the forward pass.
pub(super) fn in_order(of: &Comparing<'_>, rows: &mut [TensorRow]) {
    let order: BTreeMap<String, usize> =
        of.config.tensors().into_iter().enumerate().map(|(i, tensor)| (tensor.name, i)).collect();
    rows.sort_by_key(|row| order.get(&row.tensor).copied().unwrap_or(usize::MAX));
}

/// Tensors that are no linear layers: of a layer, or those outside all layers. Those that either model stores in another way than
/// by themselves are left out.
pub(super) fn dense_rows(of: &Comparing<'_>, layer: Option<usize>) -> Result<Vec<TensorRow>> {
    let tied = of.config.tie_word_embeddings || of.theirs.tie_word_embeddings;
    let mut rows = Vec::new();
    for tensor in of.config.tensors() {
        let (its, is_norm) = match tensor.role {
            Role::Norm { layer } => (layer, true),
            Role::NormBias { layer } => (layer, true),
            Role::Bias { layer, .. } | Role::Side { layer, .. } | Role::SideBias { layer, .. } => {
                (Some(layer), false)
            }
            Role::Vector { layer, .. } => (Some(layer), false),
            Role::Head if tied => continue,
            Role::Embedding | Role::Head if layer.is_none() => {
                rows.extend(table_row(of, &tensor.name)?);
                continue;
            }
            Role::Positions | Role::HeadBias => (None, false),
            _ => continue,
        };
        if its != layer {
            continue;
        }
        let read = |files: &ModelFiles| files.tensor_f32(&tensor.name, &tensor.shape);
        let (Ok(ours), Ok(theirs)) = (read(of.files), read(of.reference)) else { continue };
        let row = TensorRow::new(tensor.name.clone(), its, relative_error(&ours, &theirs), 0.0);
        let shifted = |by: f32| relative_error(&ours.iter().map(|v| v + by).collect::<Vec<_>>(), &theirs);
        let tried: Vec<_> = if is_norm && row.faulty {
            ALTERNATIVES
                .iter()
                .filter_map(|entry| Some((entry.name, shifted(entry.alternative.of_norms()?))))
                .collect()
        } else {
            Vec::new()
        };
        rows.push(TensorRow { is_norm, ..row.judged(tried) });
    }
    Ok(rows)
}

/// The embedding or the head, which may be quantized.
fn table_row(of: &Comparing<'_>, name: &str) -> Result<Option<TensorRow>> {
    let Some(module) = name.strip_suffix(".weight") else { return Ok(None) };
    let (rows, cols) = (of.config.vocab_size, of.config.hidden_size);
    let ours = of.files.linear(module, rows, cols, false)?;
    let theirs = values(module, of.reference.linear(module, rows, cols, false)?)?;
    let expected = expected(module, &ours, &theirs, of.threads)?.0;
    let error = relative_error(&values(module, ours)?, &theirs);
    Ok(Some(TensorRow::new(name.to_owned(), None, error, expected)))
}

/// The linear layers of a decoder layer, and the source's under the same schemes.
pub(super) fn linear_rows(
    of: &Comparing<'_>,
    layer: usize,
) -> Result<(Vec<TensorRow>, BTreeMap<String, LinearWeight>)> {
    let infos = of.config.layer_linears(layer).into_iter().filter(|info| info.stored == StoredAs::Rows);
    let read = |info: LinearInfo| {
        let weight = of.files.linear(&info.module, info.rows, info.cols, info.bias)?;
        Ok((info, weight))
    };
    let stored: Stored = infos.map(read).collect::<Result<_>>()?;
    let (mut found, mut all) = (Vec::new(), BTreeMap::new());
    for (at, (info, ours)) in stored.iter().enumerate() {
        let mut theirs = of.reference.linear(&info.module, info.rows, info.cols, info.bias)?;
        let bias = theirs.bias.take();
        let theirs = values(&info.module, theirs)?;
        let (expected, rounded) = expected(&info.module, ours, &theirs, of.threads)?;
        let plain =
            |weight: &LinearWeight| values(&info.module, LinearWeight { bias: None, ..weight.clone() });
        let decoded = plain(ours)?;
        let row = TensorRow::new(
            format!("{}.weight", info.module),
            Some(layer),
            relative_error(&decoded, &theirs),
            expected,
        );
        let mut tried = Vec::new();
        if row.faulty {
            for entry in &ALTERNATIVES {
                let Some(weight) = entry.alternative.linear(of.config, &stored, at)? else { continue };
                if let Ok(changed) = plain(&weight) {
                    tried.push((entry.name, relative_error(&changed, &theirs)));
                }
            }
        }
        let diagonal = row.faulty && {
            let undone = without_diagonals(&decoded, &theirs, info.cols);
            !beyond(relative_error(&undone, &theirs), expected)
        };
        found.push(TensorRow { diagonal, ..row.judged(tried) });
        let (input, transforms) =
            (ours.input.clone().filter(|_| ours.transforms.is_empty()), Default::default());
        let (rows, cols) = (info.rows, info.cols);
        all.insert(
            info.module.clone(),
            LinearWeight { rows, cols, weight: rounded, bias, input, transforms },
        );
    }
    Ok((found, all))
}

/// `theirs` rounded to nearest under the format of `ours`, and the relative error of that. Of a format that is not written here,
/// integers of as many bits in groups of 32.
fn expected(module: &str, ours: &LinearWeight, theirs: &[f32], threads: usize) -> Result<(f64, Weight)> {
    let (rows, cols) = (ours.rows, ours.cols);
    let format = match &ours.weight {
        Weight::Quantized(q) => q.format.clone(),
        Weight::F32(_) => return Ok((0.0, Weight::F32(theirs.to_vec()))),
        // A source in f32 has been rounded to the dtype, which the slack covers.
        Weight::Bf16(_) | Weight::F16(_) => return Ok((0.0, Weight::F32(theirs.to_vec()))),
    };
    let quantize = |format: Format| -> Option<Quantized> {
        let scheme = Scheme::new(format.clone(), rule_of(&format));
        rtn::quantize(&scheme, theirs, rows, cols, None, threads).ok().map(|(q, _)| q)
    };
    let bits = format.codec().map_or(format.code_bits(), |codec| (8 * codec.bytes / codec.elements) as u32);
    let group = if cols.is_multiple_of(32) { Blocks::Group(32) } else { Blocks::Row };
    let plain = || quantize(Scheme::int_symmetric(bits.clamp(2, 8), group).format);
    let Some(rounded) = quantize(format).or_else(plain) else {
        return Ok((1.0, Weight::F32(theirs.to_vec())));
    };
    let weight = Weight::Quantized(rounded);
    let (bias, input, transforms) = (None, None, Default::default());
    let whole = LinearWeight { rows, cols, weight: weight.clone(), bias, input, transforms };
    Ok((relative_error(&values(module, whole)?, theirs), weight))
}

/// `w` with each column, and then each row, scaled by what brings it nearest to `reference`.
fn without_diagonals(w: &[f32], reference: &[f32], cols: usize) -> Vec<f32> {
    let cols = cols.max(1);
    let fit = |w: &[f32], lines: usize, line: &dyn Fn(usize) -> usize| -> Vec<f32> {
        let (mut dot, mut square) = (vec![0f64; lines], vec![0f64; lines]);
        for (i, (w, r)) in w.iter().zip(reference).enumerate() {
            dot[line(i)] += f64::from(*w) * f64::from(*r);
            square[line(i)] += f64::from(*w) * f64::from(*w);
        }
        let scale = |i: usize| if square[i] > 0.0 { dot[i] / square[i] } else { 0.0 };
        w.iter().enumerate().map(|(i, w)| (f64::from(*w) * scale(line(i))) as f32).collect()
    };
    let columns = fit(w, cols, &|i| i % cols);
    fit(&columns, w.len() / cols, &|i| i / cols)
}

/// The source with the linear layers of one layer rounded under the schemes of the model, and its KV cache.
pub(super) struct Rounded<'a> {
    files: &'a ModelFiles,
    reference: &'a ModelFiles,
    linears: BTreeMap<String, LinearWeight>,
}

impl<'a> Rounded<'a> {
    pub(super) fn new(
        files: &'a ModelFiles,
        reference: &'a ModelFiles,
        linears: BTreeMap<String, LinearWeight>,
    ) -> Self {
        Rounded { files, reference, linears }
    }
}

impl SourceView for Rounded<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.reference
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        match self.linears.get(module) {
            Some(weight) => Ok(weight.clone()),
            None => self.base().linear(module, rows, cols, bias),
        }
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        WeightSource::kv_quant(self.files, module, kv_heads)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_columns_and_rows_are_undone() {
        let w: Vec<f32> = (0..24).map(|i| (i as f32 * 0.9).cos() + 0.1).collect();
        let scaled: Vec<f32> = w
            .iter()
            .enumerate()
            .map(|(i, w)| w * (1.0 + (i % 6) as f32) * if i / 6 == 2 { 1.0 } else { 0.5 })
            .collect();
        let columns: Vec<f32> = w.iter().enumerate().map(|(i, w)| w * (1.0 + (i % 6) as f32)).collect();
        assert!(relative_error(&without_diagonals(&columns, &w, 6), &w) < 1e-6);
        assert!(relative_error(&without_diagonals(&scaled, &w, 6), &w) < 0.3);
        let other: Vec<f32> = w.iter().rev().copied().collect();
        assert!(relative_error(&without_diagonals(&other, &w, 6), &w) > 0.3);
    }
}
