//! Importance of the columns of weights: the mean square of what each input of a linear layer is, over some text.
//!
//! A weight's squared error times the importance of its column, summed, is the expected squared error of the layer's output
//! if inputs are independent: the diagonal of the Hessian that GPTQ takes whole. llama.cpp calls a file of them an importance
//! matrix (imatrix) and has written two encodings, which are both read: GGUF (`tools/imatrix`, since 2025), which is also
//! written, and the older `.dat`. They are found here from a text, or given.

mod file;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_model::{LinearInfo, ModelConfig};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::stored_name;

use crate::calibrate::{Calibration, CalibrationSet};
use crate::error::Result;

/// Importance of the columns of some weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    /// The file it is from, or the text it was found on.
    pub name: String,
    /// The texts it was found on.
    pub datasets: Vec<String>,
    /// Windows, and tokens of a window.
    pub chunks: u32,
    /// Tokens of a window.
    pub chunk_size: u32,
    /// By the name of the weight in GGUF.
    pub entries: BTreeMap<String, Entry>,
}

/// Importance of the columns of one weight, or of several stacked (the experts of a mixture).
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Sum of squares of each column, matrix after matrix: `[matrices, cols]`.
    pub sums: Vec<f32>,
    /// Tokens that each matrix saw.
    pub counts: Vec<f32>,
}

impl Entry {
    /// The mean square of each column of matrix `index`; `None` where there is none, or it saw nothing.
    pub fn means(&self, index: usize) -> Option<Vec<f32>> {
        let count = *self.counts.get(index)?;
        let cols = self.sums.len() / self.counts.len();
        let sums = self.sums.get(index * cols..(index + 1) * cols)?;
        (count > 0.0).then(|| sums.iter().map(|sum| sum / count).collect())
    }
}

impl Importance {
    /// Runs `set` through the model of `source`, unquantized, and sums the squares of what each linear layer reads. `tick` is
    /// told the layer after every few windows, and asked whether to go on.
    ///
    /// # Errors
    /// As [`Calibration`].
    pub fn collect(
        source: &ModelFiles,
        config: &ModelConfig,
        set: &CalibrationSet,
        threads: usize,
        tick: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut calibration = Calibration::begin(source, config, &set.windows, threads)?;
        let mut entries = BTreeMap::new();
        while let Some(layer) = calibration.next_layer()? {
            let tick = &mut || tick(layer.index());
            let linears = config.layer_linears(layer.index());
            let moments = calibration.squares(&layer, linears.iter().map(|info| info.kind), tick)?;
            for info in linears {
                let name = stored_name(&format!("{}.weight", info.module));
                let (Some(name), Some(sums)) = (name, moments.get(&info.kind.input())) else { continue };
                let sums = sums.iter().map(|&sum| sum as f32).collect();
                entries.insert(name, Entry { sums, counts: vec![set.tokens() as f32] });
            }
            calibration.advance(&layer, tick)?;
        }
        Ok(Importance {
            name: set.name.clone(),
            datasets: vec![set.name.clone()],
            chunks: u32::try_from(set.windows.len()).unwrap_or(u32::MAX),
            chunk_size: u32::try_from(set.longest()).unwrap_or(u32::MAX),
            entries,
        })
    }

    /// Predicted peak memory of [`collect`](Self::collect): hidden states, a layer in f32 and what its layers read.
    pub fn bytes_needed(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        crate::memory::importance_buffers(config, set, threads).iter().map(|(_, bytes)| bytes).sum()
    }

    /// The importance of the columns of a linear layer's weight.
    ///
    /// # Errors
    /// [`mantissa_store::Error::Field`] where it has another number of columns.
    pub fn of(&self, info: &LinearInfo) -> Result<Option<Vec<f32>>> {
        let Some(name) = stored_name(&format!("{}.weight", info.module)) else { return Ok(None) };
        let means = self.entries.get(&name).and_then(|entry| entry.means(0));
        match means {
            Some(means) if means.len() != info.cols => Err(mantissa_store::Error::field(
                std::path::Path::new(&self.name),
                name,
                format!("{} columns", means.len()),
                format!("{}, those of {}", info.cols, info.module),
                "it is of another model",
            )
            .into()),
            means => Ok(means),
        }
    }
}
