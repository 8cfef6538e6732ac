//! Windows of `fit`: some to choose schemes on, the others to evaluate the output.

use mantissa_eval::Sequence;

use super::Fit;
use crate::error::{BadInput, Result};
use crate::host::Host;

/// Returns the windows to choose schemes on and those to evaluate on.
///
/// # Errors
/// No text, or one window.
pub(super) fn windows(job: &Fit, host: &Host) -> Result<(Vec<Sequence>, Vec<Sequence>)> {
    let Some(sequences) = job.measure.text.sequences(&job.source, false, host)? else {
        let error = BadInput::new("fit", "neither", "--text or --tokens");
        return Err(error.with_fix("--text default, the built-in text").into());
    };
    if sequences.len() < 2 {
        let allowed = "at least two windows, one to choose schemes on and one to evaluate";
        return Err(BadInput::new("--text", "one window", allowed)
            .with_fix("set a smaller --context")
            .into());
    }
    Ok(halves(sequences, job.windows as usize))
}

/// Splits off every other window, up to `most`; returns them and the rest.
fn halves(sequences: Vec<Sequence>, most: usize) -> (Vec<Sequence>, Vec<Sequence>) {
    let (mut measured_on, mut rest) = (Vec::new(), Vec::new());
    for (i, sequence) in sequences.into_iter().enumerate() {
        let to = if i % 2 == 0 && measured_on.len() < most { &mut measured_on } else { &mut rest };
        to.push(sequence);
    }
    (measured_on, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_measured_on_or_evaluated_on() {
        let all = |n: u32| (0..n).map(|i| Sequence { tokens: vec![i], from: 1 }).collect::<Vec<_>>();
        let ids = |part: &[Sequence]| part.iter().map(|s| s.tokens[0]).collect::<Vec<_>>();
        let (measured_on, rest) = halves(all(7), 2);
        assert_eq!((ids(&measured_on), ids(&rest)), (vec![0, 2], vec![1, 3, 4, 5, 6]));
    }
}
