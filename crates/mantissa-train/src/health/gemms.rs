//! Quality of the results of a linear layer's three matmuls, summed over the compared values.

use serde::Serialize;

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
    /// Signal-to-quantization-noise ratio of the result in dB; `None` if it is exact or not finite.
    pub sqnr_db: Option<f64>,
}

/// Sums over the compared values of a result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    rows: u64,
    signal: f64,
    noise: f64,
}

impl Compared {
    pub(super) fn health(&self, linear: String, gemm: Gemm) -> GemmHealth {
        let sqnr = 10.0 * (self.signal / self.noise).log10();
        let sqnr_db = Some(sqnr).filter(|db| db.is_finite());
        GemmHealth { linear, gemm: name(gemm), rows: self.rows, sqnr_db }
    }

    /// Adds the sums over other rows.
    pub(super) fn join(&mut self, other: &Compared) {
        self.rows += other.rows;
        self.signal += other.signal;
        self.noise += other.noise;
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
