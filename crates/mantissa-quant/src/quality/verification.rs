//! The result of a verification.

use serde::Serialize;

use super::Figures;

/// Result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verification {
    /// True if there is no fault.
    pub ok: bool,
    /// Number of files whose hash was checked; 0 without a manifest.
    pub files: usize,
    /// Number of source files whose hash was compared with the recorded one.
    pub source_files: usize,
    /// Number of quantized weights decoded; for a GGUF file, of all tensors.
    pub weights: usize,
    /// Number of tensors compared with the source.
    pub compared: usize,
    /// Largest error relative to the scheme's bound (at most 1 for RTN).
    pub max_error_in_bounds: Option<f64>,
    /// Largest difference of logits; `None` if they were not compared.
    pub max_logit_difference: Option<f32>,
    /// Recorded figures, measured again.
    pub figures: Option<Figures>,
    /// Trusted comment of the signature of `quality.json`, if it was checked and is valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signed: Option<String>,
    /// Faults.
    pub faults: Vec<String>,
    /// Notes on checks left out, with the reason.
    pub notes: Vec<String>,
    /// Notes on bytes without a hash: there is no manifest, or it omits a file.
    pub unhashed: Vec<String>,
}

impl Verification {
    /// Turns notes on bytes without a hash into faults.
    #[must_use]
    pub fn strictly(mut self) -> Self {
        let unhashed = std::mem::take(&mut self.unhashed);
        self.notes.retain(|note| !unhashed.contains(note));
        self.faults.extend(unhashed);
        self.ok = self.faults.is_empty();
        self
    }

    /// Adds a note on bytes without a hash.
    pub(crate) fn note_unhashed(&mut self, note: String) {
        self.unhashed.push(note.clone());
        self.notes.push(note);
    }
}
