//! Partial results of pieces of a sequence, combined in a fixed order.

use super::softmax::Softmax;
use crate::kernels;

/// Combines the partial results of one query over consecutive pieces of its tokens, in order, into `out`
/// `[head_dim]`: `pieces` yields slices of [`Softmax::partial_len`] floats. `sink` is the score of an attention sink,
/// which takes part in the softmax and has no value. A query that saw no token gives zeros.
///
/// # Panics
/// If a piece has another length.
pub fn combine_partials<'p>(
    pieces: impl Iterator<Item = &'p [f32]> + Clone,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let d = out.len();
    let len = Softmax::partial_len(d);
    assert!(pieces.clone().all(|piece| piece.len() == len), "paged: a partial result is not {len} floats");
    let (max_at, sum_at) = (d, d + 1);
    let seen = pieces.filter(|piece| piece[sum_at] != 0.0);
    let max = seen.clone().fold(f32::NEG_INFINITY, |max, piece| max.max(piece[max_at]));
    let mut total = 0.0;
    out.fill(0.0);
    for piece in seen {
        let mut factor = [piece[max_at] - max];
        kernels().exp_inplace(&mut factor);
        total += piece[sum_at] * factor[0];
        kernels().axpy(factor[0], &piece[..d], out);
    }
    if let Some(sink) = sink {
        // If this is infinite, the sink is so much larger that the values' weights are correctly 0.
        let mut sink = [sink - max];
        kernels().exp_inplace(&mut sink);
        total += sink[0];
    }
    if total != 0.0 {
        out.iter_mut().for_each(|x| *x /= total);
    }
}
