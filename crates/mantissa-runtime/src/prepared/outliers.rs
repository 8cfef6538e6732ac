//! Large values of an input that stay unquantized (LLM.int8(), Dettmers et al. 2022, sec. 3.2; here value by value, as
//! the layers of the reference contract do): `y = Q(x - x_out) Wᵀ + x_out Wᵀ`, where `x_out` holds the values of
//! magnitude `limit` and above, with the dequantized columns of the weight that they meet.

use mantissa_kernels::packed::Panels;
use mantissa_kernels::{for_each, kernels};

/// Columns that are dequantized at a time.
const COLUMNS: usize = 16;

/// Values set aside, kept between calls.
#[derive(Debug, Default)]
pub(super) struct Outliers {
    /// Sorted by input, then column, then token.
    values: Vec<Outlier>,
    /// Dequantized columns, `[columns, rows]`.
    columns: Vec<f32>,
}

/// A value set aside.
#[derive(Clone, Copy, Debug)]
struct Outlier {
    input: usize,
    col: usize,
    token: usize,
    value: f32,
}

impl Outliers {
    /// Forgets the values of the last call.
    pub(super) fn clear(&mut self) {
        self.values.clear();
    }

    /// Replaces values of magnitude `limit` and above of input `input`, `x` `[tokens, cols]`, by 0, and remembers
    /// them. Inputs come in ascending order.
    pub(super) fn set_aside(&mut self, input: usize, x: &mut [f32], cols: usize, limit: f32) {
        let begin = self.values.len();
        for (token, x) in x.chunks_exact_mut(cols).enumerate() {
            for (col, value) in x.iter_mut().enumerate().filter(|(_, x)| x.is_finite() && x.abs() >= limit) {
                self.values.push(Outlier { input, col, token, value: std::mem::take(value) });
            }
        }
        self.values[begin..].sort_unstable_by_key(|outlier| (outlier.col, outlier.token));
    }

    /// Adds the products of the values of an input to `out` `[tokens, rows]`, column by column.
    pub(super) fn add(&mut self, input: usize, weight: &Panels, out: &mut [f32], threads: usize) {
        let Outliers { values, columns } = self;
        let begin = values.partition_point(|outlier| outlier.input < input);
        let values = &values[begin..values.partition_point(|outlier| outlier.input <= input)];
        let rows = weight.rows();
        let mut by_column = values.chunk_by(|a, b| a.col == b.col).peekable();
        while by_column.peek().is_some() {
            let some: [&[Outlier]; COLUMNS] = std::array::from_fn(|_| by_column.next().unwrap_or_default());
            columns.resize(COLUMNS * rows, 0.0);
            let places = some.iter().filter_map(|of| of.first()).zip(columns.chunks_exact_mut(rows));
            for_each(threads, places, |(outlier, column)| weight.column(outlier.col, column));
            for (of, column) in some.iter().zip(columns.chunks_exact(rows)) {
                for Outlier { token, value, .. } in *of {
                    kernels().axpy(*value, column, &mut out[token * rows..(token + 1) * rows]);
                }
            }
        }
    }
}
