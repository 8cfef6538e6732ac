//! Calibration samples and training text that the unquantized model generates.
//!
//! "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (Liu et al. 2023, arXiv 2305.17888) trains on text that
//! the model samples itself; Williams et al. 2024 (arXiv 2410.17170) calibrate on such text.

use std::ops::ControlFlow;

use mantissa_kernels::for_each;
use mantissa_model::{Decoder, GenerateError, GenerateOptions, Sampling, generate};
use mantissa_num::round::random_u32;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::host::Host;
use crate::loaded::ModelUse;
use crate::progress::{Meter, Unit};

/// Tokens of a calibration sample that a generated sample continues.
const PROMPT: usize = 8;

/// Tokens after the first of a [`free`] sample that are the most probable ones, as in LLM-QAT (section 2.1).
const GREEDY: usize = 4;

/// Generates `count` samples of `length` tokens by the model in `source`, without any text: each begins with a random
/// token of the vocabulary, after the begin-of-text token if the model has one, goes on greedily for `GREEDY` tokens
/// and is then drawn from the model's probabilities. `seed` decides all draws.
///
/// # Errors
/// The model cannot be loaded or run; not enough memory.
pub fn free(
    source: &ModelFiles,
    (count, length): (usize, usize),
    seed: u64,
    host: &Host,
) -> Result<Vec<Vec<u32>>> {
    let threads = host.threads.min(count);
    let decoder = load(source, length, threads, host)?;
    let progress = host.progress((count * length) as u64, Unit::Items("tokens"));
    progress.message("generate text");
    let mut all: Vec<Result<Vec<u32>, GenerateError>> = (0..count).map(|_| Ok(Vec::new())).collect();
    for_each(threads, all.iter_mut().enumerate(), |(index, sample)| {
        *sample = invented(&decoder, length, seed, index);
        progress.add(length as u64);
    });
    progress.finish();
    Ok(all.into_iter().collect::<Result<_, _>>()?)
}

/// Generates the [`free`] sample with this `index`.
fn invented(decoder: &Decoder, length: usize, seed: u64, index: usize) -> Result<Vec<u32>, GenerateError> {
    let config = decoder.config();
    let first = random_u32(seed, index as u64) % u32::try_from(config.vocab_size).unwrap_or(u32::MAX);
    let mut tokens: Vec<u32> = config.bos_token_id.into_iter().chain([first]).take(length).collect();
    for (temperature, new) in [(0.0, GREEDY), (1.0, usize::MAX)] {
        // Streams of samples are far apart: two seeds that follow one another share none.
        let seed = seed.wrapping_add((index as u64 + 1) << 32);
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        let max_new_tokens = new.min(length - tokens.len());
        let options = GenerateOptions { max_new_tokens, sampling, stop: Vec::new(), ignore_eos: true };
        tokens.extend(generate(decoder, &tokens, &options, |_| ControlFlow::Continue(()))?.tokens);
    }
    Ok(tokens)
}

/// Generates `count` samples by the model in `source`, each of the length of the sample of `windows` that it continues.
/// `seed` decides all draws.
///
/// # Errors
/// The model cannot be loaded or run; not enough memory.
pub fn samples(
    source: &ModelFiles,
    windows: &[Vec<u32>],
    count: usize,
    seed: u64,
    host: &Host,
) -> Result<Vec<Vec<u32>>> {
    if windows.is_empty() {
        return Ok(Vec::new());
    }
    let longest = windows.iter().map(Vec::len).max().unwrap_or(0);
    let threads = host.threads.min(count);
    let decoder = load(source, longest, threads, host)?;
    let prompts: Vec<_> = (0..count)
        .map(|index| {
            let window = &windows[index % windows.len()];
            (window, prompt(window, index / windows.len()))
        })
        .collect();
    let total = prompts.iter().map(|(window, prompt)| (window.len() - prompt.len()) as u64).sum();
    let progress = host.progress(total, Unit::Items("tokens"));
    progress.message("generate samples");
    let mut all: Vec<Result<Vec<u32>, GenerateError>> = (0..count).map(|_| Ok(Vec::new())).collect();
    for_each(threads, all.iter_mut().enumerate(), |(index, sample)| {
        *sample = continued(&decoder, prompts[index], seed, index, &progress);
    });
    progress.finish();
    Ok(all.into_iter().collect::<Result<_, _>>()?)
}

/// The prompt that `window` gives in this `round`: other tokens in every round, as long as there are others.
fn prompt(window: &[u32], round: usize) -> &[u32] {
    let length = PROMPT.min(window.len().div_ceil(2));
    let places = (window.len() / length.max(1)).max(1);
    let start = round % places * length;
    &window[start..(start + length).min(window.len())]
}

/// Generates the sample with this `index`: `prompt` and its continuation, as long as `window`.
fn continued(
    decoder: &Decoder,
    (window, prompt): (&Vec<u32>, &[u32]),
    seed: u64,
    index: usize,
    progress: &Meter,
) -> Result<Vec<u32>, GenerateError> {
    let sampling = Sampling {
        temperature: 1.0,
        // Streams of samples are far apart: two seeds that follow one another share none.
        seed: seed.wrapping_add((index as u64 + 1) << 32),
        ..Sampling::default()
    };
    let options = GenerateOptions {
        max_new_tokens: window.len() - prompt.len(),
        sampling,
        stop: Vec::new(),
        ignore_eos: true,
    };
    let generated = generate(decoder, prompt, &options, |_| {
        progress.add(1);
        ControlFlow::Continue(())
    })?;
    Ok(prompt.iter().copied().chain(generated.tokens).collect())
}

/// Loads the model to generate texts of up to `longest` tokens on `threads` threads.
///
/// # Errors
/// Memory below what this takes; weights that cannot be read.
fn load(source: &ModelFiles, longest: usize, threads: usize, host: &Host) -> Result<Decoder> {
    let used = ModelUse { pass: PROMPT, longest, threads, cached: true, logits: 1, ..ModelUse::default() };
    used.require(&[source], host)?;
    Ok(Decoder::load(source)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_other_tokens_in_every_round() {
        let window: Vec<u32> = (0..20).collect();
        assert_eq!(prompt(&window, 0), &window[..8]);
        assert_eq!(prompt(&window, 1), &window[8..16]);
        assert_eq!(prompt(&window, 2), &window[..8]);
        assert_eq!(prompt(&window[..3], 5), &window[..2]);
        assert_eq!(prompt(&window[..1], 1), &window[..1]);
    }
}
