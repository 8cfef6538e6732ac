//! One rank among those of a run: gradients of its leaves, their sum with all others, and the update.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use mantissa_model::{Batch, LoadError, zeros};
use mantissa_ranks::{Alone, Link, RankError, Reader, SharedLink, Traffic, Writer};

use super::command::{Command, StepOrder, StepWork};
use super::grad_norm::{grad_norm, grad_sizes};
use super::inventory::Inventory;
use super::options::ParallelOptions;
use super::statistics::{Losses, Statistics};
use crate::arena::Parameters;
use crate::data::Sample;
use crate::error::TrainError;
use crate::exchange::{
    Bucket, MessageFormat, Reduction, Remote, Tree, Units, buckets, encode, gather, gather_sums, length,
    most_waiting, pieces, read_piece, read_stored, reduce, sum_coded, to_all,
};
use crate::form::Draw;
use crate::health::WeightCounts;
use crate::loss::Loss;
use crate::model::TrainModel;
use crate::optim::Optimizer;
use crate::param_table::within;
use crate::store::Store;

/// One rank among those of a run.
#[derive(Debug)]
pub struct Group {
    pub(super) link: SharedLink,
    options: ParallelOptions,
    pub(super) shards: Vec<Range<usize>>,
    units: Arc<Units>,
    /// Sum of what the own leaves sent in few bits and should have sent, by leaf; empty for unquantized gradients.
    pub(super) errors: Vec<Vec<f32>>,
    /// Scale of the loss that the errors belong to.
    pub(super) error_scale: f32,
    /// What each rank keeps of the optimizer's state, on rank 0.
    pub(super) inventories: Vec<Inventory>,
    /// Arenas for sums that wait.
    spare: Vec<Store>,
    /// Gradients of the own leaves in few bits, by leaf and rank that sums them.
    coded: Vec<Vec<Vec<u8>>>,
    /// True if the last pass summed its gradients unit by unit.
    is_summed: bool,
    /// What the other ranks sent and waited for up to the last step, on rank 0.
    others: Vec<Traffic>,
}

impl Group {
    /// Makes the rank at this end of `link` for a model and its optimizer, which with [ZeRO](ParallelOptions::zero) 1 keeps the
    /// rank's part of the state ([`Optimizer::for_rank`]).
    ///
    /// # Errors
    /// [`LoadError::Memory`]; [`TrainError::Rank`].
    ///
    /// # Panics
    /// If the number of leaves is no power of two, ranks do not divide it, or the optimizer keeps another part.
    pub fn new(
        link: Box<dyn Link>,
        options: &ParallelOptions,
        model: &TrainModel,
        optimizer: &Optimizer,
    ) -> Result<Self, TrainError> {
        let (table, precision) = (model.params.table(), model.grads.store().precision());
        let (ranks, own) = (link.size(), options.leaves / link.size().max(1));
        assert!(
            options.leaves.is_power_of_two() && own * ranks == options.leaves,
            "Group::new: {ranks} ranks, {} leaves",
            options.leaves
        );
        let shards = optimizer.shards(table, ranks);
        let own_shard = shards.get(link.rank()).filter(|_| options.zero > 0 && ranks > 1);
        assert!(optimizer.shard() == own_shard, "Group::new: the optimizer keeps {:?}", optimizer.shard());
        let memory =
            || LoadError::Memory { what: "leaves", bytes: options.bytes((table.len(), 0), precision, ranks) };
        let (mut errors, mut spare) = (Vec::new(), Vec::new());
        if options.gradients.is_plain() {
            for _ in 0..most_waiting(own) {
                spare.push(Store::zeros(precision, table.len()).ok_or_else(memory)?);
            }
        } else {
            for _ in 0..own {
                errors.push(zeros(table.len()).ok_or_else(memory)?);
            }
        }
        let mut group = Group {
            link: SharedLink::new(link),
            options: options.clone(),
            shards,
            units: Arc::new(Units::new(&model.config, table)),
            errors,
            error_scale: 1.0,
            inventories: Vec::new(),
            spare,
            coded: Vec::new(),
            is_summed: false,
            others: vec![Traffic::default(); ranks.saturating_sub(1)],
        };
        group.meet(optimizer)?;
        Ok(group)
    }

    /// Tells rank 0 what each rank keeps.
    fn meet(&mut self, optimizer: &Optimizer) -> Result<(), RankError> {
        let own = Inventory::of(optimizer);
        if self.link.rank() > 0 {
            return self.link.send(0, own.to_bytes());
        }
        self.inventories.push(own);
        for rank in 1..self.link.size() {
            let message = self.link.receive(rank)?;
            self.inventories.push(Inventory::read(&message).ok_or_else(|| length(rank, &message))?);
        }
        Ok(())
    }

    /// Makes the only rank of a run; `None` if its steps are those of a single worker.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn alone(
        options: &ParallelOptions,
        model: &TrainModel,
        optimizer: &Optimizer,
    ) -> Result<Option<Self>, TrainError> {
        (!options.is_plain()).then(|| Self::new(Box::new(Alone), options, model, optimizer)).transpose()
    }

    /// Returns what this rank sent, and how long it waited.
    pub fn traffic(&self) -> Traffic {
        self.link.traffic()
    }

    /// Returns what each rank sent, and how long it waited, on rank 0; of the others, up to the last step.
    pub fn traffic_of_all(&self) -> Vec<Traffic> {
        [self.link.traffic()].into_iter().chain(self.others.iter().copied()).collect()
    }

    /// Leaves the other ranks at the end of the run; returns what was sent.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn leave(self) -> Result<Traffic, RankError> {
        let traffic = self.link.traffic();
        Box::new(self.link).leave().map(|()| traffic)
    }

    /// Number of leaves.
    pub fn leaves(&self) -> usize {
        self.options.leaves
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.link.size()
    }

    /// Numbers of the leaves of `rank`.
    pub(super) fn leaves_of(&self, rank: usize) -> Range<usize> {
        let each = self.options.leaves / self.link.size();
        rank * each..(rank + 1) * each
    }

    pub(super) fn shards_state(&self) -> bool {
        self.reaches(1)
    }

    /// True if this stage of ZeRO divides something: a single rank has all.
    fn reaches(&self, stage: u8) -> bool {
        self.options.zero >= stage && self.link.size() > 1
    }

    /// Leaves the weights of other ranks' parts to them with [ZeRO](ParallelOptions::zero) 3; all ranks have the same ones so far.
    pub(crate) fn divide_weights(&self, model: &mut TrainModel) {
        if self.reaches(3) {
            let remote = Remote::new(
                self.link.clone(),
                &self.shards,
                &self.units,
                |unit| Command::Lend(unit).to_bytes(),
                &mut model.params,
            );
            model.remote = Some(remote);
        }
    }

    /// Runs the forward and backward of a step over all ranks, on rank 0; returns the losses of all batches. The model then has the
    /// part of the gradients that this rank updates.
    ///
    /// # Errors
    /// [`TrainError`]; the other ranks have then dropped the step, unless they are lost.
    pub(crate) fn gradients(
        &mut self,
        model: &mut TrainModel,
        batches: &[Sample],
        order: StepOrder,
        pass: impl FnMut(&mut TrainModel, &Batch<'_>, &[u32], f32) -> Result<Loss, TrainError>,
    ) -> Result<Losses, TrainError> {
        let each = batches.len() / self.options.leaves;
        let of = |leaves: Range<usize>| leaves.start * each..leaves.end * each;
        for rank in 1..self.link.size() {
            let batches = batches[of(self.leaves_of(rank))].to_vec();
            self.link.send(rank, Command::Step(StepWork { order, batches }).to_bytes())?;
        }
        let own = &batches[of(self.leaves_of(0))];
        // What a leaf sent in few bits is in its errors already, and ranks that exchange within a pass wait for each other: such a
        // step is not dropped.
        let stop = model.stop.take_if(|_| !self.options.gradients.is_plain() || self.reaches(2));
        let computed = self.compute(model, own, &order, pass);
        model.stop = model.stop.take().or(stop);
        if !self.reaches(2) {
            to_all(&mut self.link, &[u8::from(computed.is_ok())])?;
        }
        let mut losses = computed?;
        self.sum(model, order.counts)?;
        let mut places = self.places_with_gradient(model);
        for rank in 1..self.link.size() {
            let message = self.link.receive(rank)?;
            let found = Statistics::read(&message).ok_or_else(|| length(rank, &message))?;
            losses.extend(found.losses);
            places.extend(found.places);
            self.others[rank - 1] = found.traffic;
            found.lost.iter().for_each(|place| model.note_lost(place));
            model.histories.see(&found.seen);
            for (own, more) in model.routed.iter_mut().zip(found.routed) {
                own.iter_mut().zip(more).for_each(|(own, more)| *own += more);
            }
        }
        model.with_gradient = (self.link.size() > 1).then_some(places);
        let mut seen = Writer::default();
        seen.indices(&model.histories.seen());
        to_all(&mut self.link, &seen.0)?;
        Ok(losses)
    }

    /// Does the part of a step before the update on another rank than 0; false if rank 0 dropped it.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(super) fn follow_gradients(
        &mut self,
        model: &mut TrainModel,
        work: &StepWork,
    ) -> Result<bool, TrainError> {
        let StepWork { order, batches } = work;
        let losses = self.compute(model, batches, order, TrainModel::forward_backward)?;
        if !self.reaches(2) && self.link.receive(0)? != [1] {
            return Ok(false);
        }
        self.sum(model, order.counts)?;
        let places = self.places_with_gradient(model);
        let (seen, routed, traffic) = (model.histories.seen(), model.routed.clone(), self.link.traffic());
        let statistics = Statistics { losses, places, seen, routed, traffic, lost: model.lost.places() };
        self.link.send(0, statistics.to_bytes())?;
        let message = self.link.receive(0)?;
        let seen = Reader(&message).indices().ok_or_else(|| length(0, &message))?;
        model.histories.see(&seen);
        Ok(true)
    }

    /// Computes the gradients of the own leaves: their sum, or what they send in few bits.
    fn compute(
        &mut self,
        model: &mut TrainModel,
        batches: &[Sample],
        order: &StepOrder,
        mut pass: impl FnMut(&mut TrainModel, &Batch<'_>, &[u32], f32) -> Result<Loss, TrainError>,
    ) -> Result<Losses, TrainError> {
        self.rescale_errors(order.loss_scale);
        model.routed.iter_mut().for_each(|counts| counts.fill(0));
        model.remote.iter_mut().for_each(|remote| remote.set_together(true));
        // Gradients of several batches are summed in memory before they are exchanged.
        self.is_summed = self.reaches(2) && batches.len() == 1 && self.options.leaves == self.link.size();
        let computed = match self.is_summed {
            true => self.compute_by_unit(model, &batches[0], order, &mut pass),
            false => self.compute_leaves(model, batches, order, &mut pass),
        };
        model.remote.iter_mut().for_each(|remote| remote.set_together(false));
        computed
    }

    /// Computes and sums the gradients of the only batch of the only leaf, unit by unit.
    fn compute_by_unit(
        &mut self,
        model: &mut TrainModel,
        Sample { tokens, targets, lens }: &Sample,
        &StepOrder { step, scale, .. }: &StepOrder,
        pass: &mut impl FnMut(&mut TrainModel, &Batch<'_>, &[u32], f32) -> Result<Loss, TrainError>,
    ) -> Result<Losses, TrainError> {
        model.grads.release();
        model.draw = Draw { step, batch: self.link.rank() as u32 };
        model.reduction = Some(Reduction {
            link: self.link.clone(),
            shards: self.shards.clone(),
            units: Arc::clone(&self.units),
            format: self.options.gradients.clone(),
            errors: self.errors.pop().unwrap_or_default(),
        });
        let computed = pass(model, &Batch { tokens, lens }, targets, scale);
        if let Some(reduction) = model.reduction.take().filter(|_| !self.options.gradients.is_plain()) {
            self.errors.push(reduction.errors);
        }
        computed.map(|loss| vec![(loss.nll, loss.targets as u64)])
    }

    /// Computes the gradients of the own leaves, each over its batches.
    fn compute_leaves(
        &mut self,
        model: &mut TrainModel,
        batches: &[Sample],
        &StepOrder { step, scale, .. }: &StepOrder,
        pass: &mut impl FnMut(&mut TrainModel, &Batch<'_>, &[u32], f32) -> Result<Loss, TrainError>,
    ) -> Result<Losses, TrainError> {
        let own = self.leaves_of(self.link.rank());
        let each = batches.len() / own.len().max(1);
        let (mut losses, mut tree) = (Losses::new(), Tree::default());
        let mut coded: Vec<Vec<Vec<u8>>> = Vec::new();
        for (place, leaf) in own.clone().enumerate() {
            model.grads.zero();
            for (i, sample) in batches[place * each..(place + 1) * each].iter().enumerate() {
                model.draw = Draw { step, batch: (leaf * each + i) as u32 };
                let Sample { tokens, targets, lens } = sample;
                match pass(model, &Batch { tokens, lens }, targets, scale) {
                    Ok(loss) => losses.push((loss.nll, loss.targets as u64)),
                    Err(error) => {
                        self.spare.extend(tree.into_waiting());
                        return Err(error);
                    }
                }
            }
            if !self.options.gradients.is_plain() {
                let (format, errors) = (&self.options.gradients, &mut self.errors[place]);
                coded.push(encode(format, model.params.table().iter(), &self.shards, &model.grads, errors));
                continue;
            }
            let next = match place + 1 < own.len() {
                // Any arena will do: it is set to 0 before the next leaf.
                true => self.spare.pop().unwrap_or_else(|| model.grads.store().clone()),
                // The sum takes its place.
                false => Store::F32(Vec::new()),
            };
            let leaf = std::mem::replace(model.grads.store_mut(), next);
            tree.push(leaf, |left, right| add_and_keep(left, right, &mut self.spare));
        }
        if let Some(sum) = tree.finish() {
            *model.grads.store_mut() = sum;
        }
        self.coded = coded;
        Ok(losses)
    }

    /// Multiplies the errors by the change of the loss scale.
    fn rescale_errors(&mut self, loss_scale: f32) {
        let factor = loss_scale / self.error_scale;
        self.error_scale = loss_scale;
        if factor != 1.0 {
            self.errors.iter_mut().flatten().for_each(|error| *error *= factor);
        }
    }

    /// Forgets the errors after a step that was skipped: what its gradients lost belongs to no update.
    pub(crate) fn forget_errors(&mut self) {
        self.errors.iter_mut().for_each(|errors| errors.fill(0.0));
    }

    /// Sums the gradients of all leaves: this rank's part of them, or without ZeRO, and where `all` are looked at, all of them.
    fn sum(&mut self, model: &mut TrainModel, all: bool) -> Result<(), TrainError> {
        let TrainModel { params, grads, .. } = model;
        let (link, table, shards) = (&mut self.link, params.table(), &self.shards);
        if !self.is_summed {
            match self.options.gradients.is_plain() {
                true => reduce(link, table.ranges(), shards, grads)?,
                false => {
                    let (format, messages) = (&self.options.gradients, std::mem::take(&mut self.coded));
                    sum_coded(link, format, table.iter(), shards, messages, grads)?;
                }
            }
        }
        if self.reaches(2) {
            if all {
                model.grad_sizes = grad_sizes(&mut self.link, table.ranges(), shards, grads)?;
            }
        } else if all || !self.shards_state() {
            gather_sums(&mut self.link, table.ranges(), shards, grads)?;
        }
        Ok(())
    }

    /// Returns the places of the parameters with a gradient that is not 0, as far as this rank holds the sums.
    fn places_with_gradient(&self, model: &TrainModel) -> BTreeSet<usize> {
        let shard = &self.shards[self.link.rank()];
        let params = model.params.table().iter();
        let held = params.map(|param| (param.range.start, within(&param.range, shard)));
        let held = held.filter(|(_, held)| !held.is_empty() && !model.grads.get(held.clone()).is_zero());
        held.map(|(start, _)| start).collect()
    }

    /// Updates the weights from the sums of gradients; returns the norm of the gradients before clipping.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`RankError`].
    pub(crate) fn update(
        &mut self,
        model: &mut TrainModel,
        optimizer: &mut Optimizer,
        (lr, loss_scale): (f64, f32),
        counts: Option<&[WeightCounts]>,
    ) -> Result<f64, TrainError> {
        if !self.shards_state() {
            let norm = optimizer.counted_step(model, lr, loss_scale.into(), counts)?;
            let all = 0..model.params.table().len();
            self.round_weights(model, optimizer, &all);
            return Ok(norm);
        }
        let norm = grad_norm(&mut self.link, &self.shards, &model.grads)? / f64::from(loss_scale);
        let norm = optimizer.step_with_norm(model, lr, loss_scale.into(), (norm, counts))?;
        let shard = self.shards[self.link.rank()].clone();
        if model.remote.is_some() {
            self.leave_weights(model, optimizer, &shard);
        } else {
            match self.round_weights(model, optimizer, &shard) {
                Some(message) => self.gather_rounded(model, &message)?,
                None => self.gather_weights(model)?,
            }
        }
        if let Some(counts) = counts {
            self.gather_counts(counts)?;
        }
        Ok(norm)
    }

    /// Rounds the matrices of a shard to the format of gathered weights, from their master copy; returns the shard's message.
    /// `None` for weights as stored.
    fn round_weights(
        &self,
        model: &mut TrainModel,
        optimizer: &Optimizer,
        shard: &Range<usize>,
    ) -> Option<Vec<u8>> {
        let format = self.options.gather.as_ref()?;
        let pieces: Vec<_> = pieces(model.params.table().iter(), shard).collect();
        Some(round(format, pieces, &mut model.params, optimizer))
    }

    /// Leaves updated weights to the ranks that hold them, rounded to the format in which they are gathered.
    fn leave_weights(&self, model: &mut TrainModel, optimizer: &Optimizer, shard: &Range<usize>) {
        let Some(remote) = &mut model.remote else { return };
        let params = &mut model.params;
        let coded = self.options.gather.clone().map(|format| {
            let of = |unit: usize| {
                round(&format, pieces(self.units.reads(unit), shard).collect(), params, optimizer)
            };
            let messages = (0..self.units.count()).map(of).collect();
            (format, messages)
        });
        remote.renew(params, coded);
    }

    /// Gathers weights in few bits; `message` is that of the own shard.
    fn gather_rounded(&mut self, model: &mut TrainModel, message: &[u8]) -> Result<(), TrainError> {
        let Some(format) = self.options.gather.clone() else { return Ok(()) };
        to_all(&mut self.link, message)?;
        let own = self.link.rank();
        for (rank, shard) in self.shards.iter().enumerate().filter(|(rank, _)| *rank != own) {
            let message = self.link.receive(rank)?;
            let mut rest = &message[..];
            let pieces: Vec<_> = pieces(model.params.table().iter(), shard).collect();
            for (piece, is_matrix) in pieces {
                read_piece(&format, &piece, is_matrix, &mut rest, &mut model.params)
                    .ok_or_else(|| length(rank, &message))?;
            }
            if !rest.is_empty() {
                return Err(length(rank, &message).into());
            }
        }
        Ok(())
    }

    /// Gathers the weights that the ranks updated.
    fn gather_weights(&mut self, model: &mut TrainModel) -> Result<(), TrainError> {
        let (table, whole) = (model.params.table(), model.params.are_whole());
        let all: Vec<_> = self.shards.iter().map(|shard| buckets(table.ranges(), shard, 4, whole)).collect();
        let bytes = |params: &Parameters, bucket: &Bucket| -> Vec<u8> {
            bucket.iter().flat_map(|piece| params.piece_bytes(piece.clone())).collect()
        };
        Ok(gather(&mut self.link, &all, &mut model.params, bytes, |params, bucket, message| {
            read_stored(bucket, message, params)
        })?)
    }

    /// Adds the counts of all ranks on rank 0.
    fn gather_counts(&mut self, counts: &[WeightCounts]) -> Result<(), TrainError> {
        if self.link.rank() > 0 {
            let mut message = Writer::default();
            for counts in counts {
                let (words, squares) = counts.to_words();
                message.len(words.len());
                words.iter().for_each(|word| message.u64(*word));
                message.len(squares.len());
                for (first, updates, weights) in squares {
                    message.u64(first);
                    message.f64(updates);
                    message.f64(weights);
                }
            }
            return Ok(self.link.send(0, message.0)?);
        }
        for rank in 1..self.link.size() {
            let message = self.link.receive(rank)?;
            let mut from = Reader(&message);
            for counts in counts {
                let mut read = || {
                    let words = (0..from.len(8)?).map(|_| from.u64()).collect::<Option<Vec<_>>>()?;
                    let square = |from: &mut Reader<'_>| Some((from.u64()?, from.f64()?, from.f64()?));
                    let squares =
                        (0..from.len(24)?).map(|_| square(&mut from)).collect::<Option<Vec<_>>>()?;
                    counts.add_words(&words, &squares);
                    Some(())
                };
                read().ok_or_else(|| length(rank, &message))?;
            }
        }
        Ok(())
    }
}

/// Adds `right` to `left`, and keeps its arena.
fn add_and_keep(left: &mut Store, right: Store, spare: &mut Vec<Store>) {
    left.add(&right);
    spare.push(right);
}

/// Rounds the pieces that are of matrices to `format`, from their master copy; returns the message of all pieces.
fn round(
    format: &MessageFormat,
    pieces: Vec<(Range<usize>, bool)>,
    params: &mut Parameters,
    optimizer: &Optimizer,
) -> Vec<u8> {
    let mut message = Vec::new();
    for (piece, is_matrix) in pieces {
        match optimizer.master(&piece).filter(|_| is_matrix) {
            Some(master) => {
                let mut values = master.to_vec();
                format.write(&mut values, &mut message);
                params.set(piece.start, &values);
            }
            None => message.extend(params.piece_bytes(piece)),
        }
    }
    message
}
