//! Compares stored tensors with the source tensors.

use std::collections::BTreeMap;

use mantissa_model::{
    Layer, Linear, LinearInfo, LinearKind, LoadError, ModelConfig, Role, SourceView, WeightSource,
    linear_weight,
};
use mantissa_num::{Blocks, Format, Quantized, Scheme};
use mantissa_quant::rtn;
use mantissa_store::convention::gguf::stored_name;
use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles, Weight};
use serde::Serialize;

use super::ALTERNATIVES;
use super::change::LayerWeights;
use super::pair::{Comparing, beyond};
use crate::error::Result;
use crate::values::{relative_error, values};

/// Tensor present in both models.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorRow {
    /// Name in the checkpoint.
    pub tensor: String,
    /// Layer index; `None` for embedding, head and final norm.
    pub layer: Option<usize>,
    /// Relative error, `||w - w_ref|| / ||w_ref||`.
    pub error: f64,
    /// The same error for the source rounded to nearest under the tensor's scheme.
    pub expected: f64,
    /// True if the error exceeds what the scheme explains. Methods that rescale or rotate layers change
    /// tensors without changing the model's output.
    pub faulty: bool,
    /// True if the tensor equals the source's up to one scale per column and row.
    pub diagonal: bool,
    /// Alternative with the smallest error, and that error, if the tensor is faulty.
    pub best: Option<(&'static str, f64)>,
    /// True if that alternative brings the error back within the scheme's bound.
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

/// Sorts rows into forward order.
pub(super) fn in_order(of: &Comparing<'_>, rows: &mut [TensorRow]) {
    let mut order: BTreeMap<String, usize> =
        of.config.tensors().into_iter().enumerate().map(|(i, tensor)| (tensor.name, i)).collect();
    // An expert sorts at the place of its stacked tensor.
    for info in of.config.decoder_linears() {
        if let Some(&place) = order.get(&info.dense_tensor().0) {
            order.entry(format!("{}.weight", info.module)).or_insert(place);
        }
    }
    rows.sort_by_key(|row| order.get(&row.tensor).copied().unwrap_or(usize::MAX));
}

/// Compares tensors that are no linear layers, either in `layer` or outside all layers. Tensors that
/// either model stores fused or transposed are left out.
pub(super) fn dense_rows(of: &Comparing<'_>, layer: Option<usize>) -> Result<Vec<TensorRow>> {
    let tied = of.config.tie_word_embeddings || of.theirs.tie_word_embeddings;
    // The same tensors under the reference's names.
    let named = of.config.named_as(of.theirs);
    let mut rows = Vec::new();
    // Either may store experts fused.
    let others = |config: &ModelConfig| {
        let all = config.tensors().into_iter();
        all.filter(|tensor| !matches!(tensor.role, Role::Linear { .. } | Role::Stacked { .. })).collect()
    };
    let (ours, named): (Vec<_>, Vec<_>) = (others(of.config), others(&named));
    for (tensor, named) in ours.into_iter().zip(named) {
        let (its, is_norm) = match tensor.role {
            Role::Norm { layer } => (layer, true),
            Role::NormBias { layer } => (layer, true),
            Role::Bias { layer, .. } | Role::Side { layer, .. } | Role::SideBias { layer, .. } => {
                (Some(layer), false)
            }
            Role::Vector { layer, .. } => (Some(layer), false),
            Role::Head if tied => continue,
            Role::Embedding | Role::Head if layer.is_none() => {
                rows.extend(table_row(of, &tensor.name, &named.name)?);
                continue;
            }
            Role::Positions | Role::HeadBias | Role::LayerInputs => (None, false),
            _ => continue,
        };
        // Linear layers and tensors of other layers are compared elsewhere.
        if its != layer {
            continue;
        }
        let read = |files: &ModelFiles, name: &str| files.tensor_f32(name, &tensor.shape);
        let (Ok(ours), Ok(theirs)) = (read(of.files, &tensor.name), read(of.reference, &named.name)) else {
            continue;
            // A model may lack the tensor or store it differently; the layer comparison covers that.
        };
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

/// Compares embedding or head, which may be quantized; `named` is its name in the reference.
fn table_row(of: &Comparing<'_>, name: &str, named: &str) -> Result<Option<TensorRow>> {
    let (Some(module), Some(named)) = (name.strip_suffix(".weight"), named.strip_suffix(".weight")) else {
        return Ok(None);
    };
    let (rows, cols) = (of.config.vocab_size, of.config.hidden_size);
    let ours = of.files.linear(module, rows, cols, false)?;
    let theirs = values(named, of.reference.linear(named, rows, cols, false)?)?;
    let expected = expected(of, module, &ours, &theirs)?.0;
    let error = relative_error(&values(module, ours)?, &theirs);
    Ok(Some(TensorRow::new(name.to_owned(), None, error, expected)))
}

/// Compares the linear layers of a decoder layer, and returns the source's rounded under the same schemes.
pub(super) fn linear_rows(of: &Comparing<'_>, layer: usize) -> Result<(Vec<TensorRow>, Vec<RoundedLinear>)> {
    let mut counterparts: BTreeMap<LinearKind, LinearInfo> =
        of.theirs.layer_linears(layer).into_iter().map(|info| (info.kind, info)).collect();
    let (mut stored, mut sources) = (LayerWeights::new(), Vec::new());
    for info in of.config.layer_linears(layer) {
        let Some(source) = counterparts.remove(&info.kind) else { continue };
        // Either model may store the weight transposed or stacked.
        let weight = linear_weight(of.files, &info)?;
        stored.push((info, weight));
        sources.push(source);
    }
    let (mut found, mut all) = (Vec::new(), Vec::new());
    for (at, source) in sources.iter().enumerate() {
        let (row, linear) = linear_row(of, &stored, at, source)?;
        found.push(row);
        all.push(linear);
    }
    Ok((found, all))
}

/// Compares layer `at` of `stored` with its counterpart `source`, and rounds that under the same scheme.
fn linear_row(
    of: &Comparing<'_>,
    stored: &LayerWeights,
    at: usize,
    source: &LinearInfo,
) -> Result<(TensorRow, RoundedLinear)> {
    let (info, ours) = &stored[at];
    let mut theirs = linear_weight(of.reference, source)?;
    let bias = theirs.bias.take();
    let theirs = values(&source.module, theirs)?;
    let (expected, rounded) = expected(of, &info.module, ours, &theirs)?;
    let plain = |weight: &LinearWeight| values(&info.module, LinearWeight { bias: None, ..weight.clone() });
    let decoded = plain(ours)?;
    let name = format!("{}.weight", info.module);
    let row = TensorRow::new(name, Some(info.layer), relative_error(&decoded, &theirs), expected);
    let mut tried = Vec::new();
    if row.faulty {
        for entry in &ALTERNATIVES {
            let Some(weight) = entry.alternative.linear(of.config, stored, at)? else { continue };
            if let Ok(changed) = plain(&weight) {
                tried.push((entry.name, relative_error(&changed, &theirs)));
            }
        }
    }
    let diagonal = row.faulty && {
        let undone = without_diagonals(&decoded, &theirs, info.cols);
        !beyond(relative_error(&undone, &theirs), expected)
    };
    let input = ours.input.clone().filter(|_| ours.transforms.is_empty());
    let (rows, cols, transforms) = (info.rows, info.cols, Default::default());
    let rounded = LinearWeight { rows, cols, weight: rounded, bias, input, transforms };
    let linear = RoundedLinear { kind: info.kind, module: source.module.clone(), weight: rounded };
    Ok((TensorRow { diagonal, ..row.judged(tried) }, linear))
}

/// Returns the stored format of `ours`; `None` if it is unquantized.
fn stored_format(files: &ModelFiles, module: &str, ours: &LinearWeight) -> Option<Format> {
    if let Weight::Quantized(q) = &ours.weight {
        return Some(q.format.clone());
    }
    // GGUF blocks with a separate scale tensor have no format; they are read as values.
    let name = stored_name(&format!("{module}.weight"))?;
    let tensor = files.gguf()?.tensors().iter().find(|tensor| tensor.name == name)?;
    tensor.ty.codec().map(|codec| Format::Codec(codec.id))
}

/// Rounds `theirs` to nearest under the format of `ours`; returns the relative error and the weight. A format
/// without an encoder is approximated by integers of the same width in groups of 32.
fn expected(of: &Comparing<'_>, module: &str, ours: &LinearWeight, theirs: &[f32]) -> Result<(f64, Weight)> {
    let (rows, cols) = (ours.rows, ours.cols);
    // The error of an f32 source rounded to a 16-bit dtype is within `SLACK`.
    let Some(format) = stored_format(of.files, module, ours) else {
        return Ok((0.0, Weight::F32(theirs.to_vec())));
    };
    let quantize = |format: Format| -> Option<Quantized> {
        let scheme = Scheme::writing(format.clone());
        rtn::quantize(&scheme, theirs, rows, cols, None, of.threads).ok().map(|(q, _)| q)
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

/// Returns `w` with columns, then rows, rescaled to the least-squares fit to `reference`.
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

/// Linear layer of the source, rounded to nearest under the model's scheme.
pub(super) struct RoundedLinear {
    kind: LinearKind,
    module: String,
    weight: LinearWeight,
}

/// Loads layer `number` of the source with rounded linear layers and the model's KV quantization.
pub(super) fn rounded_layer(of: &Comparing<'_>, number: usize, linears: Vec<RoundedLinear>) -> Result<Layer> {
    let source = CacheOf { files: of.files, reference: of.reference };
    let mut layer = Layer::load(&source, of.theirs, number)?;
    for RoundedLinear { kind, module, weight } in linears {
        if let Some(place) = layer.linear_mut(kind) {
            *place = Linear::new(&module, weight)?;
        }
    }
    Ok(layer)
}

/// Source weights with the model's KV quantization.
struct CacheOf<'a> {
    files: &'a ModelFiles,
    reference: &'a ModelFiles,
}

impl SourceView for CacheOf<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.reference
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        WeightSource::kv_quant(self.files, module, kv_heads)
    }

    fn kv_levels(&self, module: &str, width: usize) -> std::result::Result<Option<KvLevels>, LoadError> {
        WeightSource::kv_levels(self.files, module, width)
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
