//! Gradients in few bits: messages of a leaf, and the sum of those of all leaves.

use std::ops::Range;

use mantissa_ranks::{Link, RankError};

use super::message::MessageFormat;
use super::sums::{length, own_places};
use super::tree::Tree;
use crate::gradients::Gradients;
use crate::param_table::{ParamInfo, within};

/// Lists the pieces of parameters in a shard, each with whether it is sent in few bits: those of matrices are.
pub(crate) fn pieces<'a>(
    params: impl Iterator<Item = &'a ParamInfo>,
    shard: &Range<usize>,
) -> impl Iterator<Item = (Range<usize>, bool)> {
    let piece = |param: &ParamInfo| (within(&param.range, shard), param.tensor.shape.len() > 1);
    params.map(piece).filter(|(piece, _)| !piece.is_empty())
}

/// Makes the messages of a leaf's gradients of `params`, one for every shard. What they lose is kept in `errors` and added to the
/// next ones.
pub(crate) fn encode<'a>(
    format: &MessageFormat,
    params: impl Iterator<Item = &'a ParamInfo> + Clone,
    shards: &[Range<usize>],
    grads: &Gradients,
    errors: &mut [f32],
) -> Vec<Vec<u8>> {
    let plain = MessageFormat::default();
    let message = |shard: &Range<usize>| {
        let mut message = Vec::new();
        for (piece, coded) in pieces(params.clone(), shard) {
            let mut values = grads.get(piece.clone()).widened().into_owned();
            let format = if coded { format } else { &plain };
            let errors = &mut errors[piece];
            values.iter_mut().zip(&*errors).for_each(|(value, error)| *value += error);
            let wanted = values.clone();
            if format.write(&mut values, &mut message) {
                let lost = wanted.iter().zip(&values).map(|(wanted, sent)| wanted - sent);
                errors.iter_mut().zip(lost).for_each(|(error, lost)| *error = lost);
            }
        }
        message
    };
    shards.iter().map(message).collect()
}

/// Sums the gradients of `params` that all leaves sent in few bits: this rank's part of them, in `shards[rank]`, is the sum
/// afterwards. `messages` are those of the own leaves, by leaf and shard; every rank has as many leaves.
///
/// # Errors
/// [`RankError`].
pub(crate) fn sum_coded<'a>(
    link: &mut dyn Link,
    format: &MessageFormat,
    params: impl Iterator<Item = &'a ParamInfo>,
    shards: &[Range<usize>],
    messages: Vec<Vec<Vec<u8>>>,
    grads: &mut Gradients,
) -> Result<(), RankError> {
    let (own, each) = (link.rank(), messages.len());
    let mut kept = Vec::new();
    for messages in messages {
        for (rank, message) in messages.into_iter().enumerate() {
            match rank == own {
                true => kept.push(message),
                false => link.send(rank, message)?,
            }
        }
    }
    let mut kept = kept.into_iter();
    let (pieces, coded): (Vec<_>, Vec<_>) = pieces(params, &shards[own]).unzip();
    let all = pieces.iter().map(Range::len).sum();
    let plain = MessageFormat::default();
    let mut tree = Tree::default();
    for rank in 0..shards.len() {
        for _ in 0..each {
            let message = if rank == own { kept.next().unwrap_or_default() } else { link.receive(rank)? };
            let (mut values, mut rest) = (vec![0.0; all], &message[..]);
            for (place, coded) in own_places(&pieces).zip(&coded) {
                let format = if *coded { format } else { &plain };
                format.read(&mut rest, &mut values[place]).ok_or_else(|| length(rank, &message))?;
            }
            tree.push(values, |left, right| {
                left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
            });
        }
    }
    let sum = tree.finish().unwrap_or_default();
    for (piece, place) in pieces.iter().zip(own_places(&pieces)) {
        grads.store_mut().set(piece.start, &sum[place]);
    }
    Ok(())
}
