//! Weights that are divided among the ranks (ZeRO 3): a pass gathers those of a unit when it reaches it, and gives them back at the
//! next.
//!
//! Within a step all ranks reach the same units in the same order and exchange their parts. Outside a step rank 0 alone runs
//! passes (validation, samples) or writes weights: it asks the others for their parts.

use std::ops::Range;
use std::sync::Arc;

use mantissa_ranks::{Link, RankError, SharedLink};

use super::coded::pieces;
use super::message::MessageFormat;
use super::sums::{Bucket, buckets, gather, length, to_all};
use super::units::{Unit, Units};
use crate::arena::Parameters;
use crate::param_table::ParamInfo;

/// Weights of which this rank holds a part.
#[derive(Debug)]
pub(crate) struct Remote {
    link: SharedLink,
    shards: Vec<Range<usize>>,
    units: Arc<Units>,
    /// Unit that is gathered.
    open: Option<usize>,
    /// Makes the message that asks another rank for its part of a unit.
    ask: fn(u64) -> Vec<u8>,
    /// True within a step, in which all ranks gather the same units.
    together: bool,
    /// Messages of the own part in few bits, by unit; `None` before the first update.
    coded: Option<(MessageFormat, Vec<Vec<u8>>)>,
}

impl Remote {
    /// Keeps the own part of `params` and gives the others back. `ask` makes the message that asks another rank for its part of a
    /// unit, to be answered by [`lend`](Self::lend).
    pub(crate) fn new(
        link: SharedLink,
        shards: &[Range<usize>],
        units: &Arc<Units>,
        ask: fn(u64) -> Vec<u8>,
        params: &mut Parameters,
    ) -> Self {
        params.hold(shards[link.rank()].clone());
        let (shards, units) = (shards.to_vec(), Arc::clone(units));
        Remote { link, shards, units, ask, open: None, together: false, coded: None }
    }

    /// Begins or ends a step, in which all ranks gather the same units.
    pub(crate) fn set_together(&mut self, together: bool) {
        self.together = together;
    }

    /// Gives the gathered weights back, whose values an update or a checkpoint changed. `coded` has the format and the messages of
    /// the own part by unit, if weights are gathered in few bits.
    pub(crate) fn renew(&mut self, params: &mut Parameters, coded: Option<(MessageFormat, Vec<Vec<u8>>)>) {
        params.hold(self.shards[self.link.rank()].clone());
        self.open = None;
        self.coded = coded;
    }

    /// Gathers the weights that `unit` reads, unless it is the last that was gathered.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn open(&mut self, unit: Unit, params: &mut Parameters) -> Result<(), RankError> {
        self.open_index(self.units.index(unit), params)
    }

    /// Gathers the unit of the parameter at `range`.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn open_param(
        &mut self,
        range: &Range<usize>,
        params: &mut Parameters,
    ) -> Result<(), RankError> {
        self.open_index(self.units.of(range), params)
    }

    fn open_index(&mut self, unit: usize, params: &mut Parameters) -> Result<(), RankError> {
        if self.open == Some(unit) {
            return Ok(());
        }
        self.open = None;
        let places: Vec<_> = self.units.reads(unit).map(|param| param.range.clone()).collect();
        params.open(&places);
        self.fetch(unit, params)?;
        self.open = Some(unit);
        Ok(())
    }

    /// Gathers all weights on rank 0, to keep them.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn gather_all(mut self, params: &mut Parameters) -> Result<(), RankError> {
        params.hold_all();
        (0..self.units.count()).try_for_each(|unit| self.fetch(unit, params))
    }

    /// Fills the parts of a unit that other ranks hold.
    fn fetch(&mut self, unit: usize, params: &mut Parameters) -> Result<(), RankError> {
        let all = self.buckets(unit);
        let (coded, units, shards) = (&self.coded, &self.units, &self.shards);
        let take = |params: &mut Parameters, bucket: &Bucket, message: &[u8]| match coded {
            Some((format, _)) => read_coded(format, units, unit, (bucket, message), params),
            None => read_stored(bucket, message, params),
        };
        if self.together {
            let bytes = |params: &Parameters, bucket: &Bucket| message(coded.as_ref(), unit, bucket, params);
            return gather(&mut self.link, &all, params, bytes, take);
        }
        to_all(&mut self.link, &(self.ask)(unit as u64))?;
        let own = self.link.rank();
        for rank in (0..shards.len()).filter(|rank| *rank != own) {
            for bucket in &all[rank] {
                let message = self.link.receive(rank)?;
                take(params, bucket, &message).ok_or_else(|| length(rank, &message))?;
            }
        }
        Ok(())
    }

    /// Sends rank 0 the own part of unit `unit`.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn lend(&mut self, unit: u64, params: &Parameters) -> Result<(), RankError> {
        let unit = usize::try_from(unit).unwrap_or(usize::MAX);
        if unit >= self.units.count() {
            return Err(RankError::Message { rank: 0, expected: "a unit", got: unit.to_string() });
        }
        for bucket in &self.buckets(unit)[self.link.rank()] {
            self.link.send(0, message(self.coded.as_ref(), unit, bucket, params))?;
        }
        Ok(())
    }

    /// Lists the messages of a unit by rank: buckets, or in few bits all at once.
    fn buckets(&self, unit: usize) -> Vec<Vec<Bucket>> {
        let ranges = self.units.reads(unit).map(|param| param.range.clone());
        let of = |shard: &Range<usize>| match &self.coded {
            Some(_) => {
                let bucket: Bucket = pieces(self.units.reads(unit), shard).map(|(piece, _)| piece).collect();
                if bucket.is_empty() { Vec::new() } else { vec![bucket] }
            }
            None => buckets(ranges.clone(), shard, 4, false),
        };
        self.shards.iter().map(of).collect()
    }
}

/// Makes the message of a bucket of the own part.
fn message(
    coded: Option<&(MessageFormat, Vec<Vec<u8>>)>,
    unit: usize,
    bucket: &Bucket,
    params: &Parameters,
) -> Vec<u8> {
    match coded {
        Some((_, messages)) => messages[unit].clone(),
        None => bucket.iter().flat_map(|piece| params.piece_bytes(piece.clone())).collect(),
    }
}

/// Reads weights as they are stored; `None` for a message of another length.
pub(crate) fn read_stored(bucket: &Bucket, message: &[u8], params: &mut Parameters) -> Option<()> {
    let mut rest = message;
    bucket.iter().try_for_each(|piece| params.set_piece(piece.clone(), &mut rest))?;
    rest.is_empty().then_some(())
}

/// Reads weights in few bits; `None` for a message of another length.
fn read_coded(
    format: &MessageFormat,
    units: &Units,
    unit: usize,
    (bucket, message): (&Bucket, &[u8]),
    params: &mut Parameters,
) -> Option<()> {
    let is_matrix = |piece: &Range<usize>| {
        let of = |param: &&ParamInfo| param.range.start <= piece.start && piece.end <= param.range.end;
        units.reads(unit).find(of).is_some_and(|param| param.tensor.shape.len() > 1)
    };
    let mut rest = message;
    for piece in bucket {
        read_piece(format, piece, is_matrix(piece), &mut rest, params)?;
    }
    rest.is_empty().then_some(())
}

/// Reads a piece of weights: that of a matrix in `format`, another as it is stored.
pub(crate) fn read_piece(
    format: &MessageFormat,
    piece: &Range<usize>,
    is_matrix: bool,
    rest: &mut &[u8],
    params: &mut Parameters,
) -> Option<()> {
    if !is_matrix {
        return params.set_piece(piece.clone(), rest);
    }
    let mut values = vec![0.0; piece.len()];
    format.read(rest, &mut values)?;
    params.set(piece.start, &values);
    Some(())
}
