//! One sequence that is driven pass by pass, for evaluation.

use std::ops::Range;

use mantissa_model::flow::Sequences;
use mantissa_model::{ForwardError, LoadError};

use crate::kv::Kv;
use crate::model::{FastBuffers, FastModel};

/// A sequence in a cache of its own.
#[derive(Debug)]
pub struct Single<'m> {
    model: &'m FastModel,
    kv: Kv,
    buffers: FastBuffers,
    rows: Vec<usize>,
}

impl<'m> Single<'m> {
    /// Allocates for passes of up to `pass` tokens and a sequence of up to `context`.
    ///
    /// # Errors
    /// [`LoadError::Context`], [`LoadError::Memory`].
    pub fn new(model: &'m FastModel, pass: usize, context: usize) -> Result<Self, LoadError> {
        let buffers = model.plan(pass, context)?;
        let tokens = context.next_multiple_of(model.kv().block_tokens());
        Ok(Single { model, kv: Kv::new(model, 1, tokens, context)?, buffers, rows: Vec::new() })
    }

    /// Model that runs.
    pub fn model(&self) -> &'m FastModel {
        self.model
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.kv.release(0);
    }

    /// Appends `tokens` in one pass.
    ///
    /// # Errors
    /// As [`FastModel::continued`]; [`ForwardError::Plan`] beyond the planned context. A model with recurrent layers has
    /// no tokens then.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<(), ForwardError> {
        let (start, lens) = (self.kv.len(0), [tokens.len()]);
        let needed = start + tokens.len();
        if !self.kv.reserve(0, needed) {
            return Err(ForwardError::Plan { what: "tokens of the KV cache", needed, planned: start });
        }
        let seqs = Sequences { lens: &lens, starts: &[start], rows: tokens.len() };
        let mut caches = self.kv.pass(&[0], &lens);
        if let Err(error) = self.model.continued(tokens, &seqs, &mut caches, &mut self.buffers) {
            // Some layers may have advanced their states.
            if self.kv.is_recurrent() {
                self.kv.release(0);
            }
            return Err(error);
        }
        self.kv.commit(&[0], &lens);
        Ok(())
    }

    /// Computes the logits of the tokens `rows` of the last pass into `out` `[rows.len(), vocabulary]`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    ///
    /// # Panics
    /// If a row is out of range or `out` has another length.
    pub fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<(), ForwardError> {
        self.rows.clear();
        self.rows.extend(rows);
        self.model.logits(&self.rows, out, &mut self.buffers)
    }
}
