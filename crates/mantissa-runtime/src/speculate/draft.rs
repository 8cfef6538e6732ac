//! Proposals of a smaller model with the same vocabulary.

use mantissa_model::flow::Sequences;
use mantissa_model::{ForwardError, LoadError, Sampling};

use crate::kv::Kv;
use crate::model::{FastBuffers, FastModel};

/// Tokens of a pass that catches up with the text.
pub(crate) const CHUNK: usize = 512;

/// A draft model with the caches of its sequences, by slot.
#[derive(Debug)]
pub(crate) struct Draft<'m> {
    model: &'m FastModel,
    kv: Kv,
    buffers: FastBuffers,
    logits: Vec<f32>,
    context: usize,
}

impl<'m> Draft<'m> {
    /// Plans for `slots` sequences of up to `context` tokens.
    pub(crate) fn new(model: &'m FastModel, slots: usize, context: usize) -> Result<Self, LoadError> {
        Ok(Draft {
            model,
            kv: Kv::new(
                model,
                slots,
                slots.saturating_mul(context.next_multiple_of(model.kv().block_tokens())),
                context,
            )?,
            buffers: model.plan(CHUNK.min(context), context)?,
            logits: vec![0.0; model.config().vocab_size],
            context,
        })
    }

    /// Forgets the tokens of a slot from `len` on.
    pub(crate) fn truncate(&mut self, slot: usize, len: usize) {
        self.kv.truncate(slot, len);
    }

    /// Proposes `n` tokens after `tokens` into `out`; the first takes the random number `draw`. Proposes none
    /// beyond its context.
    pub(crate) fn propose(
        &mut self,
        slot: usize,
        tokens: &[u32],
        n: usize,
        (sampling, draw): (&Sampling, u64),
        choices: &mut Vec<(f64, u32)>,
        out: &mut Vec<u32>,
    ) -> Result<(), ForwardError> {
        out.clear();
        let needed = tokens.len() + n;
        if needed > self.context || !self.kv.reserve(slot, needed) {
            return Ok(());
        }
        for chunk in tokens[self.kv.len(slot)..].chunks(CHUNK) {
            self.run(slot, chunk)?;
        }
        for i in 0..n {
            self.model.logits(&[self.buffers.last_row()], &mut self.logits, &mut self.buffers)?;
            let Some(token) = sampling.choose(&self.logits, draw + i as u64, choices) else { break };
            out.push(token);
            if i + 1 < n {
                self.run(slot, &[token])?;
            }
        }
        Ok(())
    }

    fn run(&mut self, slot: usize, tokens: &[u32]) -> Result<(), ForwardError> {
        let (lens, starts, slots) = ([tokens.len()], [self.kv.len(slot)], [slot]);
        let seqs = Sequences { lens: &lens, starts: &starts, rows: tokens.len() };
        self.model.continued(tokens, &seqs, &mut self.kv.pass(&slots, &lens), &mut self.buffers)?;
        self.kv.commit(&slots, &lens);
        Ok(())
    }
}
