//! Input of the first layer: rows of the embedding, scaled, with learned positions.

mod layers;

use std::sync::Arc;

use mantissa_kernels::kernels;
use mantissa_store::convention::LinearWeight;

use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::flow::Sequences;
use crate::linear::Linear;
use crate::source::WeightSource;

pub use self::layers::LayerEmbeddings;

/// Table whose rows are looked up.
pub trait Table {
    /// Number of rows and their length.
    fn shape(&self) -> (usize, usize);

    /// Writes row `row` into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    fn row(&self, row: usize, out: &mut [f32]);
}

impl Table for Linear {
    fn shape(&self) -> (usize, usize) {
        (self.rows(), self.cols())
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        Linear::row(self, row, out);
    }
}

/// Token embedding, with learned positions if the model has them.
#[derive(Clone, Debug)]
pub struct Embedding<T = Linear> {
    /// `[vocabulary, hidden]`.
    pub(crate) table: T,
    /// `[positions, hidden]`.
    pub(crate) positions: Option<Linear>,
    scale: Option<f32>,
    /// Embeddings of each layer.
    inputs: Option<Arc<LayerEmbeddings>>,
}

/// Loads the embedding by itself, for work that holds one layer at a time.
///
/// # Errors
/// As [`WeightSource`].
pub fn load_embedding(source: &dyn WeightSource, config: &ModelConfig) -> Result<Embedding, LoadError> {
    // Rows are looked up, which transforms around the codes would prevent.
    Embedding::load(source, config, |module, weight| Ok(Linear::new(module, weight)?.folded()))
}

impl<T: Table> Embedding<T> {
    /// Loads the embedding; `prepare` makes the table of tokens from the module's stored weight.
    ///
    /// # Errors
    /// As [`WeightSource`] and `prepare`.
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        prepare: impl FnOnce(&str, LinearWeight) -> Result<T, LoadError>,
    ) -> Result<Self, LoadError> {
        let weight = |module: &str, rows| source.linear(module, rows, config.hidden_size, false);
        let positions = match config.learned_positions {
            true => {
                let module = config.positions_module();
                let weight = weight(&module, config.max_position_embeddings)?;
                Some(Linear::new(&module, weight)?.folded())
            }
            false => None,
        };
        let module = config.embedding_module();
        let table = prepare(&module, weight(&module, config.vocab_size)?)?;
        let inputs = LayerEmbeddings::load(source, config)?;
        Ok(Embedding { table, positions, scale: config.embedding_scale, inputs })
    }

    /// Embeddings that each layer reads, if the model has them.
    pub fn layer_embeddings(&self) -> Option<&Arc<LayerEmbeddings>> {
        self.inputs.as_ref()
    }

    /// Table of token embeddings, `[vocabulary, hidden]`, before scaling.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Writes the input of the first layer for concatenated sequences of `lens` tokens that start at position `start`
    /// into `states` (`[tokens, hidden]`).
    ///
    /// # Errors
    /// [`ForwardError::Vocabulary`], [`ForwardError::Lengths`] or, for positions beyond the learned ones,
    /// [`ForwardError::Plan`]; `states` is unchanged then.
    ///
    /// # Panics
    /// If `states` has another length.
    pub fn embed(
        &self,
        tokens: &[u32],
        lens: &[usize],
        start: usize,
        states: &mut [f32],
    ) -> Result<(), ForwardError> {
        let starts: Vec<usize> = vec![start; lens.len()];
        let seqs = Sequences { lens, starts: &starts, rows: tokens.len() };
        self.embed_at(tokens, &seqs, states, &mut vec![0.0; self.table.shape().1])
    }

    /// Runs [`embed`](Self::embed) for sequences that start at their own positions. `scratch` holds at least one
    /// row.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// If `states` has another length than the tokens, or `scratch` is shorter than a row.
    pub fn embed_at(
        &self,
        tokens: &[u32],
        seqs: &Sequences<'_>,
        states: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), ForwardError> {
        let (vocab_size, d) = self.table.shape();
        let vocab_size =
            self.inputs.as_ref().map_or(vocab_size, |inputs| vocab_size.min(inputs.vocabulary()));
        assert_eq!(states.len(), tokens.len() * d, "embed: states are not a row of {d} per token");
        if let Some((index, &token)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= vocab_size) {
            return Err(ForwardError::Vocabulary { index, token, vocab_size });
        }
        let sum = seqs.lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if sum != tokens.len() {
            return Err(ForwardError::Lengths { sum, tokens: tokens.len() });
        }
        let spans = || seqs.lens.iter().enumerate().map(|(i, &len)| (seqs.start(i), len));
        let needed = spans().map(|(start, len)| start.saturating_add(len)).max().unwrap_or(0);
        if let Some(positions) = self.positions.as_ref().filter(|table| table.rows() < needed) {
            let planned = positions.rows();
            return Err(ForwardError::Plan { what: "learned positions", needed, planned });
        }
        for (&token, out) in tokens.iter().zip(states.chunks_exact_mut(d)) {
            self.table.row(token as usize, out);
            if let Some(scale) = self.scale {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
        if let Some(positions) = &self.positions {
            let row = &mut scratch[..d];
            let places = spans().flat_map(|(start, len)| start..start + len);
            for (position, out) in places.zip(states.chunks_exact_mut(d)) {
                positions.row(position, row);
                kernels().axpy(1.0, row, out);
            }
        }
        Ok(())
    }
}
