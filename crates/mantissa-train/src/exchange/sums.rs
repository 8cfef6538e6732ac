//! Sums of gradients over ranks, and gathered parts: every message is a bucket of neighbouring pieces of parameters.

use std::ops::Range;

use mantissa_ranks::{Link, RankError};

use super::tree::Tree;
use crate::gradients::Gradients;
use crate::param_table::within;
use crate::store::Store;

/// Bytes of a bucket at least, unless its shard has less.
pub(crate) const BUCKET: usize = 4 << 20;

/// Neighbouring pieces of parameters, each with its place in the arena.
pub(crate) type Bucket = Vec<Range<usize>>;

/// Divides the part of parameters at `params` that is in a shard into buckets; `bytes` are those of a value. With `whole`, no parameter is cut.
pub(crate) fn buckets(
    params: impl Iterator<Item = Range<usize>>,
    shard: &Range<usize>,
    bytes: usize,
    whole: bool,
) -> Vec<Bucket> {
    let mut all = Vec::new();
    let (mut bucket, mut held) = (Bucket::new(), 0);
    for param in params {
        let Range { mut start, end } = within(&param, shard);
        while start < end {
            // A large parameter fills several.
            let most = if whole { end - start } else { BUCKET / bytes.max(1) };
            let piece = start..end.min(start + most);
            held += piece.len() * bytes;
            start = piece.end;
            bucket.push(piece);
            if held >= BUCKET {
                all.push(std::mem::take(&mut bucket));
                held = 0;
            }
        }
    }
    if !bucket.is_empty() {
        all.push(bucket);
    }
    all
}

/// Sends `message` to every other rank.
pub(crate) fn to_all(link: &mut dyn Link, message: &[u8]) -> Result<(), RankError> {
    let own = link.rank();
    (0..link.size()).filter(|rank| *rank != own).try_for_each(|rank| link.send(rank, message.to_vec()))
}

/// Returns the values of a bucket as bytes.
fn bucket_bytes(store: &Store, bucket: &Bucket) -> Vec<u8> {
    bucket.iter().flat_map(|piece| store.get(piece.clone()).float_bytes()).collect()
}

/// Returns the ranges of a bucket in a store of its own.
pub(crate) fn own_places(bucket: &Bucket) -> impl Iterator<Item = Range<usize>> {
    bucket.iter().scan(0, |at, piece| {
        let place = *at..*at + piece.len();
        *at = place.end;
        Some(place)
    })
}

/// Sums the gradients at `params` of all ranks: this rank's part of them, in `shards[rank]`, is the sum afterwards.
///
/// # Errors
/// [`RankError`].
pub(crate) fn reduce(
    link: &mut dyn Link,
    params: impl Iterator<Item = Range<usize>> + Clone,
    shards: &[Range<usize>],
    grads: &mut Gradients,
) -> Result<(), RankError> {
    if link.size() == 1 {
        // Its part is the sum already.
        return Ok(());
    }
    let (own, precision) = (link.rank(), grads.store().precision());
    let bytes = precision.bytes() as usize;
    let all: Vec<_> = shards.iter().map(|shard| buckets(params.clone(), shard, bytes, false)).collect();
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    for i in 0..most {
        for (rank, buckets) in all.iter().enumerate().filter(|(rank, _)| *rank != own) {
            if let Some(bucket) = buckets.get(i) {
                link.send(rank, bucket_bytes(grads.store(), bucket))?;
            }
        }
        let Some(bucket) = all[own].get(i) else { continue };
        let mut tree = Tree::default();
        for rank in 0..shards.len() {
            let message = match rank == own {
                true => bucket_bytes(grads.store(), bucket),
                false => link.receive(rank)?,
            };
            let len = bucket.iter().map(Range::len).sum();
            let part =
                Store::from_le_bytes(precision, len, &message).ok_or_else(|| length(rank, &message))?;
            tree.push(part, |left, right| left.add(&right));
        }
        if let Some(sum) = tree.finish() {
            place(grads, bucket, &sum);
        }
    }
    Ok(())
}

/// Sends every bucket of this rank to the others and takes theirs, in turns, so that little waits. `all` has the buckets of each
/// rank; `bytes` makes a message of one, and `take` reads it, and is `None` for a message that is not one.
///
/// # Errors
/// [`RankError`].
pub(crate) fn gather<T>(
    link: &mut dyn Link,
    all: &[Vec<Bucket>],
    values: &mut T,
    bytes: impl Fn(&T, &Bucket) -> Vec<u8>,
    take: impl Fn(&mut T, &Bucket, &[u8]) -> Option<()>,
) -> Result<(), RankError> {
    let own = link.rank();
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    // A single rank has all.
    for i in 0..if link.size() > 1 { most } else { 0 } {
        if let Some(bucket) = all[own].get(i) {
            to_all(link, &bytes(values, bucket))?;
        }
        for (rank, buckets) in all.iter().enumerate().filter(|(rank, _)| *rank != own) {
            let Some(bucket) = buckets.get(i) else { continue };
            let message = link.receive(rank)?;
            take(values, bucket, &message).ok_or_else(|| length(rank, &message))?;
        }
    }
    Ok(())
}

/// Gathers the sums of all ranks.
///
/// # Errors
/// [`RankError`].
pub(crate) fn gather_sums(
    link: &mut dyn Link,
    params: impl Iterator<Item = Range<usize>> + Clone,
    shards: &[Range<usize>],
    grads: &mut Gradients,
) -> Result<(), RankError> {
    let precision = grads.store().precision();
    let each = precision.bytes() as usize;
    let all: Vec<_> = shards.iter().map(|shard| buckets(params.clone(), shard, each, false)).collect();
    let bytes = |grads: &Gradients, bucket: &Bucket| bucket_bytes(grads.store(), bucket);
    gather(link, &all, grads, bytes, |grads, bucket, message| {
        let part = Store::from_le_bytes(precision, bucket.iter().map(Range::len).sum(), message)?;
        place(grads, bucket, &part);
        Some(())
    })
}

/// Copies the values of a bucket to their places.
fn place(grads: &mut Gradients, bucket: &Bucket, part: &Store) {
    for (piece, own) in bucket.iter().zip(own_places(bucket)) {
        grads.store_mut().copy_from(piece.start, part, own);
    }
}

/// Makes the error of a message of another length.
pub(crate) fn length(rank: usize, message: &[u8]) -> RankError {
    RankError::Message { rank, expected: "values of its part", got: format!("{} bytes", message.len()) }
}
