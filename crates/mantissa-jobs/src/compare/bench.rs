//! Measurement of candidates on the same windows: quantization with verification, and the comparison with one reference.

use std::ops::ControlFlow;
use std::path::Path;

use mantissa_eval::{Evaluation, Sequence};
use mantissa_model::Decoder;
use mantissa_quant::{Check, Outcome, Plan, Start, run as run_plan};
use mantissa_store::Output;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::execute;
use crate::host::Host;

/// Model that candidates are compared with, and the texts that they are measured on.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// Unquantized model.
    pub reference: &'a Decoder,
    /// Texts by name, tokenized.
    pub texts: &'a [(String, Vec<Sequence>)],
    /// Number of threads.
    pub threads: usize,
}

impl Bench<'_> {
    /// Measures the reference itself on every text.
    ///
    /// # Errors
    /// As [`mantissa_eval::evaluate_while`].
    pub fn reference(&self, told: &(dyn Fn(u64) -> ControlFlow<()> + Sync)) -> Result<Vec<Evaluation>> {
        self.on_texts(self.reference, None, told)
    }

    /// Compares `model` with the reference on every text. `told` receives the number of tokens done so far, and may end the
    /// work.
    ///
    /// # Errors
    /// As [`mantissa_eval::evaluate_while`].
    pub fn compared(
        &self,
        model: &Decoder,
        told: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Vec<Evaluation>> {
        self.on_texts(model, Some(self.reference), told)
    }

    fn on_texts(
        &self,
        model: &Decoder,
        reference: Option<&Decoder>,
        told: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Vec<Evaluation>> {
        let mut before = 0;
        let mut found = Vec::with_capacity(self.texts.len());
        for (_, sequences) in self.texts {
            let told = |done| told(before + done);
            let threads = self.threads;
            let measured =
                mantissa_eval::evaluate_while(model.into(), reference, sequences, threads, None, &told)?;
            before += tokens(sequences);
            found.push(measured);
        }
        Ok(found)
    }
}

/// Returns the number of tokens of all windows.
pub(super) fn tokens(sequences: &[Sequence]) -> u64 {
    sequences.iter().map(|sequence| sequence.tokens.len() as u64).sum()
}

/// Quantizes `source` by `plan` to `out`, which only this process uses, and verifies the result against the dense model at
/// `reference` before it appears. `shown` shows the progress, if there is one.
///
/// # Errors
/// As [`run_plan`], and an output that does not verify.
pub fn quantize_verified(
    plan: Plan,
    source: &ModelFiles,
    reference: &Path,
    out: &Path,
    shown: Option<&Host>,
) -> Result<(Plan, Outcome)> {
    let plan = plan.with_check(Check::Verify(Some(reference.to_owned())));
    let output = Output::owned(out);
    let outcome = match shown {
        Some(host) => execute::run(&plan, source, &output, Start::Restart, host)?,
        None => run_plan(&plan, source, &output, Start::Restart, &mut |_| ControlFlow::Continue(()))?,
    };
    Ok((plan, outcome))
}
