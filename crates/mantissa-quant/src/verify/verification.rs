//! The result of a verification.

use serde::Serialize;

use crate::quality::Figures;

/// Result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verification {
    /// True if there is no fault.
    pub ok: bool,
    /// Files whose hash was checked; 0 without a manifest.
    pub files: usize,
    /// Files of the source whose hash was compared with the recorded one.
    pub source_files: usize,
    /// Quantized weights decoded; of a GGUF file, all its tensors.
    pub weights: usize,
    /// Tensors compared with the source.
    pub compared: usize,
    /// Largest error against the source in units of the scheme's bound (at most 1 for round-to-nearest).
    pub max_error_in_bounds: Option<f64>,
    /// Largest difference of logits; absent where they were not compared.
    pub max_logit_difference: Option<f32>,
    /// The recorded figures as measured again.
    pub figures: Option<Figures>,
    /// Faults.
    pub faults: Vec<String>,
    /// Checks left out, with the reason.
    pub notes: Vec<String>,
    /// Notes on bytes that no hash covers: there is no manifest, or it omits a file.
    pub unhashed: Vec<String>,
}

impl Verification {
    /// The same, where bytes that no hash vouches for are a fault.
    #[must_use]
    pub fn strictly(mut self) -> Self {
        let unhashed = std::mem::take(&mut self.unhashed);
        self.notes.retain(|note| !unhashed.contains(note));
        self.faults.extend(unhashed);
        self.ok = self.faults.is_empty();
        self
    }

    /// Notes that no hash vouches for some bytes.
    pub(super) fn note_unhashed(&mut self, note: String) {
        self.unhashed.push(note.clone());
        self.notes.push(note);
    }
}
