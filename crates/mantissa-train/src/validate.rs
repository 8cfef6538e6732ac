//! Loss on held-out text, and samples of text, between two steps. Neither changes the run.

use mantissa_model::Batch;
use mantissa_num::round::random_u32;

use crate::data::chat::{ChatBatches, Conversations};
use crate::data::{Cursor, DataError, Sample, TokenFile};
use crate::error::TrainError;
use crate::form::Draw;
use crate::rows::rows;
use crate::trainer::Trainer;

/// Held-out windows, evenly spaced over a token file or over packed conversations and the same in every measurement.
#[derive(Debug)]
pub struct HeldOut {
    source: Source,
    batch: usize,
    /// Windows of the source, and those that are measured.
    windows: u64,
    measured: u64,
}

#[derive(Debug)]
enum Source {
    /// Windows of so many inputs of a text.
    Text(TokenFile, usize),
    Chat(ChatBatches),
}

impl HeldOut {
    /// Chooses at most `batches * batch` windows of `len` inputs.
    ///
    /// # Errors
    /// [`DataError::Field`] if the file is shorter than one window.
    pub fn new(file: TokenFile, len: usize, batch: usize, batches: usize) -> Result<Self, DataError> {
        let windows = file.len().saturating_sub(1) / (len.max(1) as u64);
        if windows == 0 {
            return Err(DataError::Field {
                file: "validation".to_owned(),
                field: "tokens".to_owned(),
                found: format!("{} held out", file.len()),
                allowed: format!(
                    "more than {len} (data.length); fix: raise validation.share, or name validation.files"
                ),
            });
        }
        let measured = windows.min((batch as u64).saturating_mul(batches as u64));
        Ok(HeldOut { source: Source::Text(file, len), batch, windows, measured })
    }

    /// Packs conversations into windows of up to `len` inputs and chooses at most `batches * batch` of them. `vocab_size`
    /// is the number of the tokenizer's ids.
    ///
    /// # Errors
    /// [`DataError::Field`] if there is no line, or one is longer than a window.
    pub fn of_conversations(
        lines: Conversations,
        vocab_size: usize,
        len: usize,
        batch: usize,
        batches: usize,
    ) -> Result<Self, DataError> {
        let packed = ChatBatches::new(lines, vocab_size, len, 0, Cursor::default())?;
        let windows = packed.windows();
        let measured = windows.min((batch as u64).saturating_mul(batches as u64));
        Ok(HeldOut { source: Source::Chat(packed), batch, windows, measured })
    }

    /// Reads batch `index`; false if there is none.
    fn read(&self, index: u64, sample: &mut Sample) -> Result<bool, DataError> {
        sample.clear();
        let first = index * self.batch as u64;
        let mut window = Vec::new();
        for i in first..(first + self.batch as u64).min(self.measured) {
            let at = (u128::from(i) * u128::from(self.windows) / u128::from(self.measured)) as u64;
            match &self.source {
                Source::Chat(packed) => packed.read(at, sample),
                Source::Text(file, len) => {
                    window.clear();
                    file.read(at * *len as u64, len + 1, &mut window)?;
                    sample.tokens.extend(&window[..*len]);
                    sample.targets.extend(&window[1..]);
                    sample.lens.push(*len);
                }
            }
        }
        Ok(!sample.lens.is_empty())
    }
}

/// Settings of a sampled text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// Largest number of new tokens.
    pub tokens: usize,
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Key of the random stream.
    pub seed: u64,
    /// Token that ends the text.
    pub end: Option<u32>,
}

impl Trainer {
    /// Returns the mean loss on held-out windows in nats per target that counts, with the operands of the policy.
    ///
    /// # Errors
    /// [`TrainError::Data`]; [`TrainError::Stopped`], which leaves the run as it was.
    pub fn validate(&mut self, held_out: &HeldOut) -> Result<f64, TrainError> {
        let loss = self.held_out_loss(held_out);
        self.model.histories.forget();
        loss
    }

    fn held_out_loss(&mut self, held_out: &HeldOut) -> Result<f64, TrainError> {
        let (mut nll, mut targets) = (0.0, 0u64);
        let mut sample = Sample::default();
        for index in 0.. {
            if !held_out.read(index, &mut sample)? {
                break;
            }
            self.model.draw = Draw { step: self.progress.steps, batch: u32::MAX - index as u32 };
            let loss =
                self.model.loss(&Batch { tokens: &sample.tokens, lens: &sample.lens }, &sample.targets)?;
            nll += loss.nll;
            targets += loss.targets as u64;
        }
        Ok(nll / targets as f64)
    }

    /// Continues `prompt` and returns the new tokens. Each token runs through the whole text again, of which the model
    /// sees the last tokens that a training window holds. An empty prompt is not continued.
    ///
    /// # Errors
    /// [`TrainError::Forward`] for an id outside the vocabulary; [`TrainError::Stopped`], which leaves the run as it was.
    pub fn sample(&mut self, prompt: &[u32], options: SampleOptions) -> Result<Vec<u32>, TrainError> {
        let text = self.continued(prompt, options);
        self.model.histories.forget();
        text
    }

    fn continued(&mut self, prompt: &[u32], options: SampleOptions) -> Result<Vec<u32>, TrainError> {
        let mut text = prompt.to_vec();
        let mut logits = vec![0.0; self.model.config.vocab_size];
        let tokens = if prompt.is_empty() { 0 } else { options.tokens };
        for index in 0..tokens {
            let seen = &text[text.len().saturating_sub(self.model.options.max_len)..];
            self.model.draw = Draw { step: self.progress.steps, batch: u32::MAX - index as u32 };
            self.model.last_logits(&Batch { tokens: seen, lens: &[seen.len()] }, &mut logits)?;
            let next = choose(&logits, options.temperature, random_u32(options.seed, index as u64));
            if options.end == Some(next) {
                break;
            }
            text.push(next);
        }
        Ok(text.split_off(prompt.len()))
    }
}

impl crate::model::TrainModel {
    /// Computes the logits of the last token of a batch.
    fn last_logits(&mut self, batch: &Batch<'_>, out: &mut [f32]) -> Result<(), TrainError> {
        self.check(batch)?;
        self.forward_saving(batch)?;
        let (d, last) = (self.config.hidden_size, batch.tokens.len().saturating_sub(1));
        let states = rows(&self.scratch.normed, d, last..last + 1);
        let states = self.scratch.head_input.at_row(last, d, states);
        self.head.fprop(&self.params, states, out, false, self.options.threads);
        Ok(())
    }
}

/// Chooses a token: the most probable, or the one at the share `word / 2³²` of the softmax of `logits / temperature`.
fn choose(logits: &[f32], temperature: f32, word: u32) -> u32 {
    let best = |a: &(usize, &f32), b: &(usize, &f32)| a.1.total_cmp(b.1).then(b.0.cmp(&a.0));
    let (top, max) = logits.iter().enumerate().max_by(best).map_or((0, 0.0), |(i, max)| (i, *max));
    if temperature <= 0.0 {
        return top as u32;
    }
    let weight = |logit: &f32| f64::from((logit - max) / temperature).exp();
    let threshold = logits.iter().map(weight).sum::<f64>() * (f64::from(word) / 4_294_967_296.0);
    let mut sum = 0.0;
    let reached = logits.iter().position(|logit| {
        sum += weight(logit);
        sum > threshold
    });
    reached.unwrap_or(top) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_chosen_by_their_probability() {
        let logits = [0.0, 2.0f32.ln(), f32::NEG_INFINITY, 5.0f32.ln()];
        assert_eq!(choose(&logits, 0.0, 0), 3);
        let n = 8000u32;
        let mut counts = [0u32; 4];
        (0..n).for_each(|i| counts[choose(&logits, 1.0, random_u32(3, i.into())) as usize] += 1);
        for (count, share) in counts.into_iter().zip([0.125, 0.25, 0.0, 0.625]) {
            assert!((f64::from(count) / f64::from(n) - share).abs() < 0.02, "{counts:?}");
        }
    }
}
