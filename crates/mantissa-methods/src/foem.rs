//! FOEM (Zheng, Qin, Li, Chu, Wang, Guo, Magno & Liu 2026, "First-Order Error Matters: Accurate Compensation for
//! Quantized Large Language Models", AAAI 2026, arXiv 2507.11017): GPTQ with the first-order term of the loss.
//!
//! GPTQ expands the loss to second order around the current weights and drops the gradient, which is zero at the
//! original weights `w⁰`. Quantizing a column moves the remaining columns to latent weights `w`, where the gradient
//! is `g = (w - w⁰) H` to first order. The solution needs only `g H⁻¹ = w - w⁰`, so nothing is differentiated. With a
//! share β of the term, the update of column j is ([`gptq`](mod@crate::gptq) defines U):
//!
//! ```text
//! w_j ← w_j - β (w_j - w⁰_j)
//! q_j = quantize(w_j)
//! e   = (w_j - q_j - β (w_j - w⁰_j)) / U[j, j]
//! w[j+1..] -= e · U[j, j+1..]
//! ```
//!
//! This is the update of the authors' code in GPTQModel (read for the algorithm), with β = 0.2. There the first
//! column of each block of 128 keeps its drift, a side effect of blocking that is not reproduced here. β = 0 gives
//! GPTQ.
//!
//! GPTQ's latent weights already minimize the layer's output error on the calibration, given the columns before them.
//! The first-order term pulls them back towards the original weights. It reduces overfitting to the calibration, not
//! the calibration error.

use mantissa_num::Scheme;
use mantissa_options::{Named, NamedMut, Number, options};

use crate::error::MethodError;
use crate::gptq::method::{self, Gptq, prepare};
use crate::method::{
    Arithmetic, Buffer, CalibrationGap, Extent, Feature, InputSolver, InputTask, Method, Needs, Phase,
    Prepared, SolveInput, Solver, WeightTask, Work,
};
use crate::solved::Solved;

/// Name in recipes, and of the table of its options.
const NAME: &str = "foem";

options! {
    /// Options of FOEM, in addition to [`GptqOptions`](crate::gptq::GptqOptions).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct FoemOptions {
        /// Share β of the first-order term. The authors recommend the default.
        beta: f32 = 0.2, Number(1.0);
    }
}

/// GPTQ with the first-order term (arXiv 2507.11017).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Foem {
    /// GPTQ, whose options FOEM shares; with `asymmetric` above 0 GPTAQ.
    pub gptq: Gptq,
    /// Options of FOEM itself.
    pub options: FoemOptions,
}

impl Method for Foem {
    fn name(&self) -> &'static str {
        NAME
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(method::TABLE, &self.gptq.options), (NAME, &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(method::TABLE, &mut self.gptq.options), (NAME, &mut self.options)]
    }

    fn needs(&self) -> Needs {
        self.gptq.needs()
    }

    fn takes(&self, scheme: &Scheme, shape: (usize, usize), group_order: bool) -> Result<(), MethodError> {
        self.gptq.takes(scheme, shape, group_order)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        self.gptq.refuses(feature)
    }

    fn follows_order(&self) -> bool {
        self.gptq.follows_order()
    }

    fn damping(&self) -> Option<f64> {
        self.gptq.damping()
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        self.gptq.on_gap(gap)
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        self.gptq.buffers(phase, extent)
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        self.gptq.arithmetic(extent)
    }
}

impl SolveInput for Foem {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        let options = crate::gptq::GptqOptions { first_order: self.options.beta.into(), ..self.gptq.options };
        let Prepared { solver, moments } = prepare(task, options, 0.0)?;
        let solver = match solver {
            Solver::Ready(columns) => Solver::Ready(Box::new(FirstOrder(columns))),
            round => round,
        };
        Ok(Prepared { solver, moments })
    }
}

/// The columns of GPTQ. The sum of squared `e` is not the loss here, so none is reported.
#[derive(Debug)]
struct FirstOrder(Box<dyn InputSolver>);

impl InputSolver for FirstOrder {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        Ok(Solved { output_error: None, ..self.0.solve(task)? })
    }

    fn corrects(&self) -> bool {
        self.0.corrects()
    }

    fn corrected(&mut self, w: &[f32], last: bool, threads: usize) -> Result<Option<Vec<f32>>, MethodError> {
        self.0.corrected(w, last, threads)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::gptq::{GptqOptions, Hessian, gptq};
    use crate::testing::values;

    const COLS: usize = 64;

    fn hessian() -> Hessian {
        let mut x = values(1, 400 * COLS);
        for row in x.chunks_exact_mut(COLS) {
            (1..COLS).for_each(|i| row[i] = 0.6 * row[i] + 0.6 * row[i - 1]);
        }
        let mut hessian = Hessian::new(COLS).unwrap();
        hessian.add(&x, 1);
        hessian
    }

    fn solve(method: &Foem, scheme: &Scheme, w: &[f32], hessian: &Hessian, threads: usize) -> Vec<f32> {
        let input = InputTask { hessian: hessian.clone(), drift: None, place: (0, 0), threads };
        let Solver::Ready(solver) = method.prepare(input).unwrap().solver else { panic!("no solver") };
        let (rows, cols) = (w.len() / COLS, COLS);
        let (target, outer, outputs, scales, place) = (w, None, None, None, (0, 0));
        let task = WeightTask { scheme, rows, cols, w, target, outer, outputs, scales, place, threads };
        let solved = solver.solve(&task).unwrap();
        assert!(solved.output_error.is_none());
        solved.values().unwrap()
    }

    /// Without the term it is GPTQ; with all of it every weight is drawn back to the original and rounded to nearest.
    #[test]
    fn shares_of_the_term_go_from_gptq_to_rounding() {
        let (hessian, w) = (hessian(), values(2, 20 * COLS));
        for text in ["int3-g16", "nvfp4", "int4-channel-asym"] {
            let scheme: Scheme = text.parse().unwrap();
            let options = GptqOptions { range: crate::gptq::GroupRange::Amax, ..GptqOptions::default() };
            let of = |beta| Foem { gptq: Gptq { options }, options: FoemOptions { beta } };
            let plain = gptq(&scheme, &w, &hessian, options, None, 1).unwrap().dequantize().unwrap();
            assert_eq!(solve(&of(0.0), &scheme, &w, &hessian, 1), plain, "{text}");
            let nearest =
                crate::rtn::quantize(&scheme, &w, 20, COLS, None, 1).unwrap().0.dequantize().unwrap();
            assert_eq!(solve(&of(1.0), &scheme, &w, &hessian, 1), nearest, "{text}");
            let part = solve(&of(FoemOptions::default().beta), &scheme, &w, &hessian, 1);
            assert_eq!(part, solve(&of(FoemOptions::default().beta), &scheme, &w, &hessian, 3), "{text}");
            let [none, some, all] = [&plain, &part, &nearest].map(|q| hessian.loss(&w, q));
            assert!(none < some && some < all, "{text}: {none} {some} {all}");
            let near = |q: &[f32]| q.iter().zip(&w).map(|(q, w)| f64::from(q - w).powi(2)).sum::<f64>();
            assert!(near(&plain) > near(&part) && near(&part) > near(&nearest), "{text}");
        }
    }

    /// The update of one row, written out.
    #[test]
    fn one_row_follows_the_formula() {
        let (hessian, w, beta) = (hessian(), values(3, COLS), 0.3f64);
        let scheme: Scheme = "int4-channel".parse().unwrap();
        let options =
            GptqOptions { range: crate::gptq::GroupRange::Amax, act_order: false, ..GptqOptions::default() };
        let upper = crate::gptq::InverseFactor::new(&hessian, options, 1).unwrap().upper().to_vec();
        let found = solve(
            &Foem { gptq: Gptq { options }, options: FoemOptions { beta: beta as f32 } },
            &scheme,
            &w,
            &hessian,
            1,
        );
        let nearest = mantissa_num::quantize(&scheme, &w, 1, COLS, mantissa_num::Given::default()).unwrap();
        let step = f64::from(f32::from_bits(nearest.scales.codes.get(0)));
        let mut x: Vec<f64> = w.iter().copied().map(f64::from).collect();
        for j in 0..COLS {
            let original = f64::from(w[j]);
            x[j] -= beta * (x[j] - original);
            let q = (x[j] / step).round_ties_even().clamp(-8.0, 7.0) * step;
            assert!((q - f64::from(found[j])).abs() < 1e-6, "{j}: {q} {}", found[j]);
            let e = (x[j] - q - beta * (x[j] - original)) / upper[j * COLS + j];
            (j + 1..COLS).for_each(|i| x[i] -= e * upper[j * COLS + i]);
        }
    }
}
