//! Norm of the gradients of all ranks.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_ranks::{Link, RankError, Reader, Writer};

use crate::exchange::{length, to_all};
use crate::gradients::Gradients;
use crate::param_table::within;
use crate::shards::PIECE;
use crate::store::Store;

/// Returns the norm of the gradients whose parts the ranks hold, with the bits of the norm of the whole: rank 0 sums the pieces
/// in their order.
///
/// # Errors
/// [`RankError`].
pub(super) fn grad_norm(
    link: &mut dyn Link,
    shards: &[Range<usize>],
    grads: &Gradients,
) -> Result<f64, RankError> {
    let (len, own) = (grads.len(), link.rank());
    let whole = |piece: &Range<usize>| PIECE.min(len - piece.start / PIECE * PIECE);
    let mut message = Writer::default();
    for piece in pieces_of_sum(len, &shards[own]) {
        match piece.len() == whole(&piece) {
            true => message.f64(grads.sum_squares(piece)),
            false => message.floats(&grads.get(piece).widened()),
        }
    }
    if own > 0 {
        link.send(0, message.0)?;
        let message = link.receive(0)?;
        return Reader(&message).f64().ok_or_else(|| length(0, &message));
    }
    let (mut parts, mut sum) = (Vec::new(), 0.0);
    for (rank, shard) in shards.iter().enumerate() {
        let received = if rank == 0 { std::mem::take(&mut message.0) } else { link.receive(rank)? };
        let mut from = Reader(&received);
        for piece in pieces_of_sum(len, shard) {
            if piece.len() == whole(&piece) {
                sum += from.f64().ok_or_else(|| length(rank, &received))?;
                continue;
            }
            // A piece of which several ranks have a part.
            parts.extend(from.floats().ok_or_else(|| length(rank, &received))?);
            if parts.len() == whole(&piece) {
                sum += kernels().sum_squares_f64(&parts);
                parts.clear();
            }
        }
    }
    let norm = sum.sqrt();
    to_all(link, &norm.to_bits().to_le_bytes())?;
    Ok(norm)
}

/// Returns amax and sum of squares of the gradients of every parameter on rank 0, which takes the parts of one parameter at a time;
/// `None` on other ranks.
///
/// # Errors
/// [`RankError`].
pub(super) fn grad_sizes(
    link: &mut dyn Link,
    params: impl Iterator<Item = Range<usize>>,
    shards: &[Range<usize>],
    grads: &Gradients,
) -> Result<Option<Vec<(f32, f64)>>, RankError> {
    let (own, precision) = (link.rank(), grads.store().precision());
    let mut sizes = Vec::new();
    for param in params {
        let mut bytes = Vec::new();
        for (rank, shard) in shards.iter().enumerate() {
            let part = within(&param, shard);
            if part.is_empty() {
                continue;
            }
            match (rank == own, own == 0) {
                (true, true) => bytes.extend(grads.get(part).float_bytes()),
                (true, false) => link.send(0, grads.get(part).float_bytes())?,
                (false, true) => bytes.extend(link.receive(rank)?),
                (false, false) => {}
            }
        }
        if own == 0 {
            let whole = Store::from_le_bytes(precision, param.len(), &bytes);
            let whole = whole.ok_or_else(|| length(0, &bytes))?;
            let values = whole.get(0..param.len()).widened().into_owned();
            sizes.push((kernels().amax(&values), kernels().sum_squares_f64(&values)));
        }
    }
    Ok((own == 0).then_some(sizes))
}

/// Divides the part of an arena of `len` values into the pieces over which its norm is summed; pieces that the shard shares
/// with others are cut.
fn pieces_of_sum(len: usize, shard: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let shard = shard.clone();
    (0..len).step_by(PIECE).skip(shard.start / PIECE).map_while(move |first| {
        let piece = within(&(first..len.min(first + PIECE)), &shard);
        (first < shard.end && !piece.is_empty()).then_some(piece)
    })
}
