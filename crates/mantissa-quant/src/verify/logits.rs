//! Comparison of the logits of two readers of a model.

use mantissa_model::{Batch, Buffers, Decoder, ModelConfig, WeightSource};

use crate::error::Result;
use crate::quality::Verification;

/// Largest number of parameters for which logits are compared: two copies are in memory as f32.
pub(crate) const MAX_LOGIT_PARAMETERS: u64 = 64 << 20;

/// Number of tokens of the comparison.
pub(super) const LOGIT_TOKENS: usize = 32;

/// Compares the logits of a model in the ordinary and in the independent reader.
pub(super) fn compare_readers(
    ordinary: &dyn WeightSource,
    independent: &dyn WeightSource,
    config: &ModelConfig,
    found: &mut Verification,
) -> Result<()> {
    let what = "logits of the ordinary and the independent reader";
    found.max_logit_difference = compare_logits(ordinary, independent, config, what, found)?;
    Ok(())
}

/// Compares the logits of two models that should be equal, on fixed pseudo-random tokens. Returns their largest
/// difference; `what` names them in faults.
pub(super) fn compare_logits(
    one: &dyn WeightSource,
    other: &dyn WeightSource,
    config: &ModelConfig,
    what: &str,
    found: &mut Verification,
) -> Result<Option<f32>> {
    if config.parameters() > MAX_LOGIT_PARAMETERS {
        let millions = config.parameters() / 1_000_000;
        found.notes.push(format!(
            "{what} were not compared: {millions} million parameters, more than the {} million of which this check holds two copies (verify --text TEXT measures the output)",
            MAX_LOGIT_PARAMETERS / 1_000_000
        ));
        return Ok(None);
    }
    let length = LOGIT_TOKENS.min(config.max_position_embeddings);
    let vocabulary = config.vocab_size as u64;
    let token = |i: usize| (u64::from(mantissa_num::round::random_u32(1, i as u64)) % vocabulary) as u32;
    let tokens: Vec<u32> = (0..length).map(token).collect();
    let one = logits(&Decoder::load(one)?, config, &tokens)?;
    let other = logits(&Decoder::load(other)?, config, &tokens)?;
    let scale = one.iter().fold(0f32, |a, v| a.max(v.abs()));
    let difference = one.iter().zip(&other).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
    let finite = one.iter().all(|v| v.is_finite());
    if !finite || difference.is_nan() || difference > 1e-4 * scale.max(1.0) {
        let how = if finite { format!("differ by {difference:e}") } else { "are not finite".to_owned() };
        found.faults.push(format!("{what} {how}"));
    }
    Ok(Some(difference))
}

fn logits(decoder: &Decoder, config: &ModelConfig, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut buffers = Buffers::plan(config, tokens.len(), tokens.len())?;
    let mut logits = vec![0.0; tokens.len() * config.vocab_size];
    let mut hidden = decoder.forward(&Batch { tokens, lens: &[tokens.len()] }, &mut buffers)?;
    hidden.logits(0..tokens.len(), &mut logits)?;
    Ok(logits)
}
