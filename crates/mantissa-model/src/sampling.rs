//! Parameters of sampling, and the penalties on logits before it.

use serde::{Deserialize, Serialize};

/// Sampling of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Keeps this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest tokens with this much probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens with at least this share of the probability of the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Repetition penalty θ; 1 changes nothing.
    pub repetition: f32,
    /// Presence penalty; 0 changes nothing.
    pub presence: f32,
    /// Frequency penalty; 0 changes nothing.
    pub frequency: f32,
    /// Key of the random stream.
    pub seed: u64,
    /// Order of the cuts, and the random numbers.
    pub sampler: Sampler,
}

impl Default for Sampling {
    /// Greedy decoding.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            seed: 0,
            sampler: Sampler::default(),
        }
    }
}

/// Order of cuts and source of random numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sampler {
    /// Temperature first, then `min_p`, `top_k`, `top_p`; random numbers of Philox.
    #[default]
    #[serde(rename = "mantissa")]
    Mantissa,
    /// As llama.cpp: `top_k`, `top_p`, `min_p`, then temperature; random numbers of MT19937.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
}

impl Sampling {
    /// True if a penalty changes logits.
    pub fn penalizes(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    /// Applies the penalties to the `logits` `[vocabulary]` of the token after `prompt` and `output`.
    pub fn penalize(&self, prompt: &[u32], output: &[u32], logits: &mut [f32]) {
        let mut seen = vec![false; logits.len()];
        let mut first = |token: u32| match seen.get_mut(token as usize) {
            Some(seen) => !std::mem::replace(seen, true),
            None => false,
        };
        if self.repetition != 1.0 {
            for &token in prompt.iter().chain(output).filter(|token| first(**token)) {
                let logit = &mut logits[token as usize];
                *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            }
        }
        if self.presence == 0.0 && self.frequency == 0.0 {
            return;
        }
        seen.fill(false);
        for &token in output {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit -= self.frequency;
            if !std::mem::replace(&mut seen[token as usize], true) {
                *logit -= self.presence;
            }
        }
    }
}
