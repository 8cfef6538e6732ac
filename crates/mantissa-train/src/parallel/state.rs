//! State of a run over ranks: what each rank keeps of it, sent to rank 0 for a checkpoint, and back.

use mantissa_ranks::{Link, RankError, Reader};
use mantissa_store::FileDigest;

use super::command::Command;
use super::group::Group;
use super::inventory::SharedArray;
use crate::arena::Parameters;
use crate::array::{Array, ArrayMut};
use crate::error::TrainError;
use crate::exchange::{length, to_all};
use crate::model::TrainModel;
use crate::optim::Optimizer;
use crate::param_table::{ParamInfo, within};

impl Group {
    /// Lists the arrays of the optimizer's state, whose parts the ranks keep; `tensors` are the names of the parameters.
    pub(crate) fn shared_arrays(&self, tensors: &[String]) -> Vec<SharedArray> {
        let kept = if self.shards_state() { &self.inventories[..] } else { &self.inventories[..1] };
        SharedArray::list(kept, tensors)
    }

    /// Number of ranks, and true if each keeps its part of the state.
    pub(crate) fn sharing(&self) -> (usize, bool) {
        (self.link.size(), self.shards_state())
    }

    /// Tells the other ranks to do something.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn tell_all(&mut self, command: &Command) -> Result<(), TrainError> {
        Ok(to_all(&mut self.link, &command.to_bytes())?)
    }

    /// Asks `rank` for the next array of its state: one at a time, so that none waits in memory.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn ask(&mut self, rank: usize) -> Result<Vec<u8>, TrainError> {
        self.link.send(rank, vec![NEXT])?;
        Ok(self.link.receive(rank)?)
    }

    /// Returns the scale of the loss that the errors of gradients in few bits belong to; `None` without such errors.
    pub(crate) fn error_scale(&self) -> Option<f32> {
        (!self.errors.is_empty()).then_some(self.error_scale)
    }

    /// Sends bytes to `rank`.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn send(&mut self, rank: usize, bytes: Vec<u8>) -> Result<(), TrainError> {
        Ok(self.link.send(rank, bytes)?)
    }

    /// Number of leaves with errors of gradients in few bits, those of all ranks; 0 for unquantized gradients.
    pub(crate) fn error_leaves(&self) -> usize {
        self.errors.len() * self.link.size()
    }

    /// Returns the errors of the own leaves, and the scale of the loss that they belong to.
    pub(crate) fn errors_mut(&mut self) -> (&mut [Vec<f32>], &mut f32) {
        (&mut self.errors, &mut self.error_scale)
    }

    /// Compares the weights of the other ranks with those of rank 0, by their digests.
    ///
    /// # Errors
    /// [`RankError::Weights`] on a rank whose weights differ; [`RankError`].
    pub(crate) fn compare_weights(&mut self, model: &TrainModel) -> Result<(), TrainError> {
        if self.link.size() == 1 {
            return Ok(());
        }
        let pieces = model.params.table().iter().map(|param| model.params.piece_bytes(param.range.clone()));
        // The frozen weights behind adapters too.
        let base = model.params.base_digest().map(|digest| digest.as_bytes().to_vec());
        let own = match model.params.made() {
            Some(hash) => hash.to_owned(),
            None => FileDigest::of_pieces(pieces.chain(base)).hex(),
        };
        if self.link.rank() == 0 {
            return Ok(to_all(&mut self.link, own.as_bytes())?);
        }
        let rank = self.link.rank();
        let expected = self.link.receive(0)?;
        let differs = || RankError::Weights {
            rank,
            got: own.clone(),
            expected: String::from_utf8_lossy(&expected).into_owned(),
        };
        if expected == own.as_bytes() { Ok(()) } else { Err(differs().into()) }
    }

    /// Sends the weights and the histories of amax of rank 0 to the others. Weights that are divided among ranks are `read` one after
    /// another, and each rank gets its part.
    ///
    /// # Errors
    /// [`RankError`]; those of `read`.
    pub(crate) fn share_weights(
        &mut self,
        model: &mut TrainModel,
        read: impl Fn(&mut Parameters, &ParamInfo) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let params: Vec<ParamInfo> = model.params.table().iter().cloned().collect();
        let (own, divided) = (self.link.rank(), model.remote.is_some());
        for param in &params {
            let part = |rank: usize| match divided {
                true => within(&param.range, &self.shards[rank]),
                false => param.range.clone(),
            };
            if own > 0 {
                let part = part(own);
                if part.is_empty() {
                    continue;
                }
                let message = self.link.receive(0)?;
                let mut rest = &message[..];
                let set = model.params.set_piece(part, &mut rest).filter(|()| rest.is_empty());
                set.ok_or_else(|| length(0, &message))?;
                continue;
            }
            if divided {
                read(&mut model.params, param)?;
            }
            for rank in 1..self.shards.len() {
                let part = part(rank);
                if !part.is_empty() {
                    self.link.send(rank, model.params.piece_bytes(part))?;
                }
            }
            if divided {
                model.params.release_outside(&self.shards[own], &param.range);
            }
        }
        if let Some(remote) = &mut model.remote {
            remote.renew(&mut model.params, None);
        }
        let is_first = own == 0;
        for (_, values) in model.histories.arrays_mut() {
            if is_first {
                to_all(&mut self.link, &Array::F32(values).le_bytes()?)?;
                continue;
            }
            let message = self.link.receive(0)?;
            ArrayMut::F32(values).read_le_bytes(&mut &message[..]).ok_or_else(|| length(0, &message))??;
        }
        model.histories.restored();
        Ok(())
    }

    /// Sends what this rank keeps of the state to rank 0.
    ///
    /// # Errors
    /// [`RankError`]; a paged state that cannot be read.
    pub(super) fn send_state(&mut self, optimizer: &Optimizer) -> Result<(), TrainError> {
        if self.shards_state() {
            for (_, array) in optimizer.parts().into_iter().flatten() {
                give(&mut self.link, &array)?;
            }
        }
        for errors in &self.errors {
            give(&mut self.link, &Array::F32(errors))?;
        }
        Ok(())
    }

    /// Takes over the number of updates and what this rank keeps of the state from rank 0.
    ///
    /// # Errors
    /// [`RankError`]; a paged state that cannot be written.
    pub(super) fn receive_state(&mut self, optimizer: &mut Optimizer) -> Result<(), TrainError> {
        let message = self.link.receive(0)?;
        let mut from = Reader(&message);
        let mut numbers = || Some((from.u64()?, from.f64()? as f32));
        let (steps, scale) = numbers().ok_or_else(|| length(0, &message))?;
        self.error_scale = scale;
        for (_, mut array) in optimizer.parts_mut(steps).into_iter().flatten() {
            fill(&mut self.link, &mut array)?;
        }
        for errors in &mut self.errors {
            fill(&mut self.link, &mut ArrayMut::F32(errors))?;
        }
        Ok(())
    }
}

/// Request of rank 0 for the next array.
const NEXT: u8 = 1;

/// Sends an array to rank 0 once it asks for it.
fn give(link: &mut dyn Link, array: &Array<'_>) -> Result<(), TrainError> {
    let message = link.receive(0)?;
    if message != [NEXT] {
        return Err(length(0, &message).into());
    }
    Ok(link.send(0, array.le_bytes()?)?)
}

/// Fills an array with the next message of rank 0.
fn fill(link: &mut dyn Link, array: &mut ArrayMut<'_>) -> Result<(), TrainError> {
    let message = link.receive(0)?;
    let mut rest = &message[..];
    let filled = array.read_le_bytes(&mut rest).filter(|_| rest.is_empty());
    filled.ok_or_else(|| TrainError::from(length(0, &message)))?
}
