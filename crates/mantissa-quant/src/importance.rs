//! Importance matrices: the mean square of each input of a linear layer over a text.
//!
//! The squared error of a weight times the importance of its column, summed, is the expected squared error of the
//! layer's output if inputs are independent. It is the diagonal of GPTQ's Hessian. llama.cpp calls the file an
//! importance matrix (imatrix). Both of its encodings are read: GGUF (`tools/imatrix`, since 2025), which is also
//! written, and the older `.dat`. Importance is computed here from a text, or read from a file.

mod file;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_model::{LinearInfo, LinearInput, ModelConfig};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, Joined, Moved, Place, place};

use crate::calibrate::{Calibration, CalibrationSet, Limits, Squares};
use crate::error::Result;
use crate::gptq::Hessian;
use crate::row_order::order_of;

/// Importance of the columns of some weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    /// Name of the file, or of the text.
    pub name: String,
    /// Names of the texts.
    pub datasets: Vec<String>,
    /// Number of windows.
    pub chunks: u32,
    /// Tokens per window.
    pub chunk_size: u32,
    /// Entries by the GGUF name of the weight.
    pub entries: BTreeMap<String, Entry>,
}

/// Importance of the columns of one weight, or of several stacked weights (experts).
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Sums of squares of each column, matrix after matrix: `[matrices, cols]`.
    pub sums: Vec<f32>,
    /// Number of tokens of each matrix.
    pub counts: Vec<f32>,
}

impl Entry {
    fn empty(matrices: usize, cols: usize) -> Self {
        Entry { sums: vec![0.0; matrices * cols], counts: vec![0.0; matrices] }
    }

    /// Sets the sums of matrix `index`; does nothing if there is no such matrix.
    fn put(&mut self, index: usize, seen: &Squares) {
        let cols = seen.sums.len();
        if let (Some(sums), Some(count)) =
            (self.sums.get_mut(index * cols..(index + 1) * cols), self.counts.get_mut(index))
        {
            sums.iter_mut().zip(&seen.sums).for_each(|(out, sum)| *out = *sum as f32);
            *count = seen.tokens as f32;
        }
    }

    /// Returns the mean square of each column of matrix `index`; `None` if there is no such matrix or it has no tokens.
    pub fn means(&self, index: usize) -> Option<Vec<f32>> {
        self.means_by(*self.counts.get(index)?, index, self.sums.len() / self.counts.len())
    }

    /// Returns the same for an expert of `cols` columns. The older encoding has one count for all experts.
    fn means_of_expert(&self, index: usize, cols: usize) -> Option<Vec<f32>> {
        match self.counts[..] {
            [of_all] => self.means_by(of_all, index, cols),
            _ => self.means(index),
        }
    }

    fn means_by(&self, count: f32, index: usize, cols: usize) -> Option<Vec<f32>> {
        let sums = self.sums.get(index * cols..(index + 1) * cols)?;
        (count > 0.0).then(|| sums.iter().map(|sum| sum / count).collect())
    }
}

impl Importance {
    /// Runs `set` through the unquantized model of `source` and sums the squares of the inputs of each linear layer.
    /// `tick` gets the layer's index after each batch of windows.
    ///
    /// # Errors
    /// Errors of [`Calibration`].
    pub fn collect(
        source: &ModelFiles,
        config: &ModelConfig,
        set: &CalibrationSet,
        limits: impl Into<Limits>,
        tick: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut calibration = Calibration::begin(source, config, &set.windows, limits)?;
        let mut entries = BTreeMap::new();
        while let Some(layer) = calibration.next_layer()? {
            let tick = &mut || tick(layer.index());
            let linears = config.layer_linears(layer.index());
            let kinds = linears.iter().map(|info| info.kind);
            let moments = calibration.squares(&layer, kinds, true, tick)?;
            for info in linears {
                let (places, columns) = places(config, &info);
                let Some(squares) = moments.get(&info.kind.input()) else { continue };
                let experts = config.experts.as_ref().map_or(0, |experts| usize::from(experts.count));
                for place in places {
                    let matrices = if place.expert.is_some() { experts } else { 1 };
                    let entry =
                        entries.entry(place.tensor).or_insert_with(|| Entry::empty(matrices, info.cols));
                    entry.put(place.expert.unwrap_or(0), &in_file_order(squares, columns));
                }
            }
        }
        Ok(Importance {
            name: set.name.clone(),
            datasets: vec![set.name.clone()],
            chunks: u32::try_from(set.windows.len()).unwrap_or(u32::MAX),
            chunk_size: u32::try_from(set.longest()).unwrap_or(u32::MAX),
            entries,
        })
    }

    /// Predicts the peak memory of [`collect`](Self::collect): hidden states, a layer in f32 and the inputs of linear
    /// layers.
    pub fn bytes_needed(config: &ModelConfig, set: &CalibrationSet, limits: impl Into<Limits>) -> u64 {
        buffers(config, set, limits.into()).iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the importance of the columns of a linear layer's weight, in the model's order.
    ///
    /// # Errors
    /// [`mantissa_store::Error::Field`] if the number of columns differs.
    pub fn of(&self, config: &ModelConfig, info: &LinearInfo) -> Result<Option<Vec<f32>>> {
        let (places, columns) = places(config, info);
        // Parts of a weight have the same inputs.
        let known = |place: &&Place| self.entries.contains_key(&place.tensor);
        let Some(place) = places.iter().find(known).or(places.first()).cloned() else { return Ok(None) };
        // Gate and up of experts may share an entry: they have the same inputs.
        let joined = place.other_form().filter(|_| !self.entries.contains_key(&place.tensor));
        let Place { tensor, expert, .. } =
            joined.filter(|it| self.entries.contains_key(&it.tensor)).unwrap_or(place);
        let means = self.entries.get(&tensor).and_then(|entry| match expert {
            Some(expert) => entry.means_of_expert(expert, info.cols),
            None => entry.means(0),
        });
        match means {
            Some(means) if means.len() != info.cols => Err(mantissa_store::Error::field(
                std::path::Path::new(&self.name),
                tensor,
                means.len().to_string(),
                format!("{} columns", info.cols),
                "fix: give the importance matrix of this model",
            )
            .into()),
            means => Ok(match columns {
                Some(order) => means.map(|means| order.to_hf(&means, 1)),
                None => means,
            }),
        }
    }
}

/// Returns the places in a GGUF file of the weight of a layer, several if the file has its rows in parts, and the order of its
/// columns there if they move.
fn places(config: &ModelConfig, info: &LinearInfo) -> (Vec<Place>, Option<Moved>) {
    let name = format!("{}.weight", info.module);
    let Some(row) = Architecture::of_model_type(config.architecture.name, config.experts.is_some()) else {
        return (place(&name).into_iter().collect(), None);
    };
    let order = order_of(row, config);
    let parts = row.joined(&name, order).filter(|joined| joined.rows(info.rows).is_some());
    let whole = |tensor: &String| Place { tensor: tensor.clone(), expert: None, half: None };
    let places = match parts.as_ref().map(Joined::names) {
        Some(names) => names.iter().map(whole).collect(),
        None => row.place(&name).or_else(|| place(&name)).into_iter().collect(),
    };
    (places, order.columns(&name))
}

/// Returns the sums in the order of the file's columns.
fn in_file_order(squares: &Squares, columns: Option<Moved>) -> Squares {
    let sums = columns.map_or_else(|| squares.sums.clone(), |order| order.to_gguf(&squares.sums, 1));
    Squares { sums, tokens: squares.tokens }
}

/// Returns the buffers of a pass over all windows that sums the squares of inputs. All layers need the same.
pub(crate) fn buffers(
    config: &ModelConfig,
    set: &CalibrationSet,
    limits: Limits,
) -> Vec<(&'static str, u64)> {
    let layer = config.layer_linears(0).iter().map(|l| 4 * (l.rows * l.cols) as u64).sum();
    let of_input = |&input| {
        let all = Calibration::statistics_bytes(config, set, input, limits.threads);
        all.saturating_sub(Hessian::bytes_needed(config.input_width(input)))
    };
    vec![
        ("states and buffers of the calibration", Calibration::held_bytes(config, set, limits)),
        ("layer in f32", layer),
        (
            "inputs of a window per thread",
            LinearInput::PLAIN.iter().chain(&[LinearInput::Mixed]).map(of_input).sum(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_have_separate_or_shared_counts() {
        let entry = |counts: &[f32]| Entry { sums: vec![2.0, 4.0, 6.0, 8.0], counts: counts.to_vec() };
        assert_eq!(entry(&[2.0]).means_of_expert(1, 2), Some(vec![3.0, 4.0]));
        assert_eq!(entry(&[2.0]).means_of_expert(2, 2), None);
        assert_eq!(entry(&[1.0, 2.0]).means_of_expert(1, 2), Some(vec![3.0, 4.0]));
        assert_eq!(entry(&[1.0, 0.0]).means_of_expert(1, 2), None);
        let mut seen = Entry::empty(2, 2);
        seen.put(1, &Squares { sums: vec![5.0, 6.0], tokens: 3 });
        seen.put(2, &Squares { sums: vec![7.0, 7.0], tokens: 9 });
        assert_eq!(seen, Entry { sums: vec![0.0, 0.0, 5.0, 6.0], counts: vec![0.0, 3.0] });
    }
}
