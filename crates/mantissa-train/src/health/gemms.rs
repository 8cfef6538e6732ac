//! Quality of the results of a linear layer's three matmuls, summed over the compared values.

use serde::{Deserialize, Serialize};

use crate::policy::Gemm;

/// Health of a matmul's result in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GemmHealth {
    /// Module name of the linear layer.
    pub linear: String,
    /// Product and result: `fprop y`, `dgrad dx` or `wgrad dw`.
    pub gemm: &'static str,
    /// Rows compared in this step.
    pub rows: u64,
    /// Signal-to-quantization-noise ratio of the result in dB; `None` if it is exact, dead or not finite.
    pub sqnr_db: Option<f64>,
    /// Reason for a result without that ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<GemmState>,
}

/// State of a result that has no signal-to-quantization-noise ratio, or none that means anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GemmState {
    /// An operand is 0 throughout, so the result is: nothing passes.
    Dead,
    /// The result has no error.
    Exact,
    /// The result holds NaN or infinity.
    NotFinite,
    /// The rows that were compared are 0 in f32 too.
    ZeroRows,
}

/// Sums over the compared values of a result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    rows: u64,
    signal: f64,
    noise: f64,
    /// Matmuls, and those with an operand that is 0 throughout.
    matmuls: u64,
    dead: u64,
}

impl Compared {
    pub(super) fn health(&self, linear: String, gemm: Gemm) -> GemmHealth {
        let sqnr = 10.0 * (self.signal / self.noise).log10();
        let state = self.state();
        let sqnr_db = Some(sqnr).filter(|db| db.is_finite() && state != Some(GemmState::Dead));
        GemmHealth { linear, gemm: name(gemm), rows: self.rows, sqnr_db, state }
    }

    fn state(&self) -> Option<GemmState> {
        let Compared { signal, noise, matmuls, dead, .. } = *self;
        match (signal + noise).is_finite() {
            _ if matmuls > 0 && dead == matmuls => Some(GemmState::Dead),
            false => Some(GemmState::NotFinite),
            true if noise == 0.0 && self.rows > 0 => {
                Some(if signal > 0.0 { GemmState::Exact } else { GemmState::ZeroRows })
            }
            true => None,
        }
    }

    /// Adds the sums over other rows.
    pub(super) fn join(&mut self, other: &Compared) {
        self.rows += other.rows;
        self.signal += other.signal;
        self.noise += other.noise;
        self.matmuls += other.matmuls;
        self.dead += other.dead;
    }

    /// Counts a matmul; `dead` if an operand is 0 throughout.
    pub(crate) fn count(&mut self, dead: bool) {
        self.matmuls += 1;
        self.dead += u64::from(dead);
    }

    /// Adds rows of a result with their values in f32.
    pub(crate) fn add(&mut self, exact: &[f32], found: &[f32], rows: usize) {
        self.rows += rows as u64;
        for (x, y) in exact.iter().zip(found) {
            let error = f64::from(*x) - f64::from(*y);
            self.signal += f64::from(*x) * f64::from(*x);
            self.noise += error * error;
        }
    }
}

fn name(gemm: Gemm) -> &'static str {
    match gemm {
        Gemm::Fprop => "fprop y",
        Gemm::Dgrad => "dgrad dx",
        Gemm::Wgrad => "wgrad dw",
    }
}
