//! Element of a weight with the largest error relative to the error bound.

use mantissa_num::{Code, Quantized};
use mantissa_verify::gguf::{BlockType, allowed, bound_group};

use super::signal::Signal;

/// Results of checking some rows.
#[derive(Default)]
pub(super) struct Rows {
    /// First element that the readers decode differently.
    pub(super) difference: Option<String>,
    pub(super) worst: Worst,
    pub(super) signal: Signal,
}

impl Rows {
    /// Adds the rows that follow.
    pub(super) fn merge(mut self, next: Rows) -> Rows {
        self.difference = self.difference.or(next.difference);
        self.worst.take(next.worst);
        self.signal.merge(&next.signal);
        self
    }
}

/// Element with the largest error.
#[derive(Clone, Copy, Default)]
pub(super) struct Worst {
    /// Error relative to the bound.
    pub(super) ratio: f64,
    row: usize,
    col: usize,
    source: f32,
    decoded: f32,
}

impl Worst {
    pub(super) fn take(&mut self, other: Worst) {
        if other.ratio > self.ratio {
            *self = other;
        }
    }

    pub(super) fn text(&self, module: &str) -> String {
        let Worst { ratio, row, col, source, decoded } = self;
        format!(
            "{module}: element [{row}, {col}]: source {source:e}, stored {decoded:e}, {ratio:.3} × the bound"
        )
    }
}

/// Finds the largest `|w - ŵ|` of a row relative to the bound of RTN under any rule: `bound` steps.
pub(super) fn worst_error(
    q: &Quantized,
    bound: f32,
    row: usize,
    w: &[f32],
    decoded: &[f32],
    worst: &mut Worst,
) {
    // A scale that rounds down clips by its rounding error: at most 1/16 for E4M3, 1/256 for bf16.
    let slack = q.format.scale().map_or(0.0, |s| if s.code == Code::F32 { 1e-6 } else { 0.0625 });
    for (block, start, end) in q.format.blocks().runs(q.cols, row) {
        let (_, inner, tail) = q.block_decoder(block).parts();
        let step = f64::from((bound * inner * tail.unwrap_or(1.0)).abs()) * 1.0001;
        let nested = nested_slack(q, block, bound);
        let allowed = |w: f32| step + f64::from(w.abs()) * slack + nested;
        let error = |w: f32, decoded: f32| (f64::from(w) - f64::from(decoded)).abs();
        let (w, decoded) = (&w[start..end], &decoded[start..end]);
        // Most blocks hold no larger error than known, which multiplications show; only the others divide.
        let known = worst.ratio * (1.0 - 1e-12);
        let within = |w, decoded| error(w, decoded) <= known * allowed(w);
        if w.iter().zip(decoded).fold(true, |all, (&w, &decoded)| all & within(w, decoded)) {
            continue;
        }
        for (i, (&source, &decoded)) in w.iter().zip(decoded).enumerate() {
            let error = error(source, decoded);
            let ratio = if error == 0.0 { 0.0 } else { error / allowed(source) };
            let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
            worst.take(Worst { ratio, row, col: start + i, source, decoded });
        }
    }
}

/// Returns the error that double quantization adds to a block. Its scale is a level of the signed dynamic map times the
/// amax of its run, and levels are at most 1/64 apart. A scale that is too small clips by as much.
fn nested_slack(q: &Quantized, block: usize, bound: f32) -> f64 {
    let Some(nested) = q.nested() else { return 0.0 };
    f64::from(nested.factor(block)) / 64.0 * f64::from(1.0 + bound)
}

/// Finds the largest error of row `row` relative to the bound of its blocks. Type, factor and weighting as in
/// [`allowed`].
pub(super) fn worst_of_row(
    (ty, factor, weighed): (BlockType, f32, bool),
    row: usize,
    w: &[f32],
    decoded: &[f32],
    worst: &mut Worst,
) {
    let group = bound_group(ty);
    for (block, (w, decoded)) in w.chunks(group).zip(decoded.chunks(group)).enumerate() {
        let most = allowed(ty, w, factor, weighed);
        for (i, (&source, &decoded)) in w.iter().zip(decoded).enumerate() {
            let error = (f64::from(source) - f64::from(decoded)).abs();
            let ratio = if error == 0.0 { 0.0 } else { error / most };
            let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
            worst.take(Worst { ratio, row, col: block * group + i, source, decoded });
        }
    }
}
