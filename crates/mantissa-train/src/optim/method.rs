//! Trait of an optimizer, and what an update is given: the state of one tensor, its weights and its gradients.

use std::fmt;
use std::sync::Mutex;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_model::{LoadError, zeros};

use super::master::{MasterCopy, MasterMut, WorkingMut, read, write};
use super::moment_format::{CodesMut, MomentFormat};
use super::moments::{Moment, MomentMut, MomentPiece, keep_first};
use super::page_buffer::PageBuffer;
use crate::array::{Array, ArrayMut};
use crate::blockwise::BLOCK;
use crate::error::TrainError;
use crate::gradients::Gradients;
use crate::health::WeightCounts;
use crate::pages::Unpaged;
use crate::param_table::ParamInfo;
use crate::shards::PIECE;
use crate::store::StoreRef;
use crate::weights::Weights;

/// Weights, gradients and N moments of a tensor that is f32 throughout.
pub(crate) type Plain<'a, const N: usize> = (&'a mut [f32], &'a [f32], [&'a mut [f32]; N]);

/// Optimizer: its hyperparameters. The state lies apart, so that memory, checkpoints and paging are the same for all.
pub(crate) trait UpdateRule: fmt::Debug + Send + Sync {
    /// Describes the state of a tensor.
    fn layout(&self, param: &ParamInfo) -> Layout;

    /// True if it updates the elements of a tensor one by one, so that parts of the tensor can be updated apart.
    fn is_elementwise(&self, _: &ParamInfo) -> bool {
        false
    }

    /// Updates a tensor and its state. `scratch` has the length of the layout; its content is arbitrary.
    ///
    /// # Errors
    /// [`TrainError::Store`] if a paged state cannot be read or written.
    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError>;
}

/// State of one tensor: moments of as many elements, other arrays in f32, and the f32 scratch of an update.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Layout {
    /// Name, true for means of squares, and format.
    pub(crate) moments: Vec<(&'static str, bool, MomentFormat)>,
    /// Names and lengths.
    pub(crate) arrays: Vec<(&'static str, usize)>,
    pub(crate) scratch: usize,
}

impl Layout {
    /// Bytes of the state of a tensor of `n` elements: in memory, and of moments that can be paged.
    pub(crate) fn bytes(&self, n: usize, paged: bool) -> (u64, u64) {
        let arrays: u64 = self.arrays.iter().map(|(_, len)| 4 * *len as u64).sum();
        let (mut memory, mut file) = (arrays, 0);
        for (_, _, format) in &self.moments {
            match paged && !format.is_whole(n) {
                true => {
                    memory += format.bytes(n) - format.code_bytes(n);
                    file += format.code_bytes(n).next_multiple_of(4096);
                }
                false => memory += format.bytes(n),
            }
        }
        (memory, file)
    }

    /// Length of the scratch of a tensor of `n` elements. Moments that are decoded whole take at least their values.
    pub(crate) fn scratch(&self, n: usize) -> usize {
        let whole = self.moments.iter().any(|(_, _, format)| format.is_whole(n));
        self.scratch.max(if whole { self.moments.len() * n } else { 0 })
    }
}

/// State of one tensor.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) moments: Vec<Moment>,
    pub(crate) arrays: Vec<(&'static str, Vec<f32>)>,
}

impl State {
    /// Allocates a fresh state for a tensor of `n` elements.
    pub(crate) fn new(layout: &Layout, n: usize, mut pages: Option<&mut Unpaged>) -> Result<Self, LoadError> {
        let moments = layout.moments.iter();
        let moments = moments
            .map(|(name, second, format)| Moment::new((name, *second), *format, n, pages.as_deref_mut()));
        let array = |(name, len): &(&'static str, usize)| {
            let memory = LoadError::Memory { what: "optimizer state", bytes: 4 * *len as u64 };
            Ok((*name, zeros(*len).ok_or(memory)?))
        };
        Ok(State {
            moments: moments.collect::<Result<_, LoadError>>()?,
            arrays: layout.arrays.iter().map(array).collect::<Result<_, LoadError>>()?,
        })
    }

    /// Returns every array with its name: moments, their scales, others.
    pub(crate) fn arrays(&self) -> Vec<(String, Array<'_>)> {
        let moments = self.moments.iter().map(Moment::array);
        let scales = self.moments.iter().filter_map(Moment::scale_array);
        let others = self.arrays.iter().map(|(name, values)| ((*name).to_owned(), Array::F32(values)));
        moments.chain(scales).chain(others).collect()
    }

    /// Returns the same arrays for restoring.
    pub(crate) fn arrays_mut(&mut self) -> Vec<(String, ArrayMut<'_>)> {
        let (mut moments, mut scales) = (Vec::new(), Vec::new());
        for [codes, moment_scales] in self.moments.iter_mut().map(Moment::arrays_mut) {
            moments.extend(codes);
            scales.extend(moment_scales);
        }
        moments.extend(scales);
        let others = self.arrays.iter_mut();
        moments.extend(others.map(|(name, values)| ((*name).to_owned(), ArrayMut::F32(values))));
        moments
    }
}

/// Numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// Step number, from 1.
    pub(crate) t: u64,
    /// Learning rate of the tensor.
    pub(crate) lr: f64,
    /// Weight decay of the tensor; 0 if it does not decay.
    pub(crate) weight_decay: f64,
    /// Factor of the gradients, for clipping and unscaling.
    pub(crate) grad_scale: f64,
}

/// Tensor to update.
pub(crate) struct UpdateTarget<'a> {
    pub(crate) param: &'a ParamInfo,
    pub(crate) threads: usize,
    pub(crate) grads: &'a Gradients,
    pub(crate) working: &'a mut Weights,
    pub(crate) master: &'a mut MasterCopy,
    pub(crate) counts: Option<&'a WeightCounts>,
    /// Number of updates, for stochastic rounding.
    pub(crate) t: u64,
}

/// Elements that one thread updates at a time.
pub(crate) struct Piece<'a, 'm> {
    /// Offset of the first element in the tensor.
    pub(crate) offset: usize,
    /// Arena index of the first element, and number of the update.
    place: (u64, u64),
    working: WorkingMut<'a>,
    master: MasterMut<'a>,
    grads: StoreRef<'a>,
    counts: Option<&'a WeightCounts>,
    moments: Vec<MomentMut<'m>>,
}

impl UpdateTarget<'_> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.param.range.len()
    }

    /// Calls `update` with every piece of the tensor, its gradients and moments. Moments that are decoded whole lie
    /// in `scratch` meanwhile.
    ///
    /// # Errors
    /// [`TrainError::Store`] if a paged moment cannot be read or written.
    pub(crate) fn each_piece(
        &mut self,
        moments: &mut [Moment],
        scratch: &mut [f32],
        update: impl Fn(&mut Piece<'_, '_>) + Sync,
    ) -> Result<(), TrainError> {
        if !moments.iter().any(Moment::is_whole) {
            return self.pieces(moments.iter_mut().map(Moment::pieces).collect(), update);
        }
        let n = self.len();
        for (moment, wide) in moments.iter_mut().zip(scratch.chunks_mut(n)) {
            moment.read_all(self.threads, wide)?;
        }
        let wide = scratch.chunks_mut(n).take(moments.len());
        let pieces = wide.map(|wide| wide.chunks_mut(PIECE).map(MomentPiece::wide).collect());
        self.pieces(pieces.collect(), update)?;
        for (moment, wide) in moments.iter_mut().zip(scratch.chunks(n)) {
            moment.write_all(self.threads, wide)?;
        }
        Ok(())
    }

    /// Calls `update` with every piece, given the pieces of each moment.
    fn pieces(
        &mut self,
        moments: Vec<Vec<MomentPiece<'_>>>,
        update: impl Fn(&mut Piece<'_, '_>) + Sync,
    ) -> Result<(), TrainError> {
        let range = self.param.range.clone();
        let mut moments: Vec<_> = moments.into_iter().map(Vec::into_iter).collect();
        let weights = self.working.pieces(range.clone(), PIECE).into_iter();
        let weights = weights.zip(self.master.pieces(range.clone(), PIECE));
        let (grads, counts, t) = (self.grads, self.counts, self.t);
        let pieces = range.clone().step_by(PIECE).zip(weights).map(|(first, (working, master))| {
            let piece_moments: Vec<_> = moments.iter_mut().filter_map(Iterator::next).collect();
            let grads = grads.get(first..range.end.min(first + PIECE));
            (first, working, master, grads, piece_moments)
        });
        let failed = Mutex::new(None);
        let buffers = || [PageBuffer::default(), PageBuffer::default()];
        for_each_with(self.threads, buffers, pieces, |buffers, (first, working, master, grads, mut held)| {
            let opened = held.iter_mut().zip(&mut *buffers).map(|(moment, buffer)| moment.open(buffer));
            let updated = opened.collect::<Result<Vec<_>, _>>().map(|moments| {
                let (offset, place) = (first - range.start, (first as u64, t));
                update(&mut Piece { offset, place, working, master, grads, counts, moments });
            });
            let closed = updated.and_then(|()| {
                held.iter().zip(buffers).try_for_each(|(moment, buffer)| moment.close(buffer))
            });
            keep_first(&failed, closed);
        });
        failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
    }

    /// Writes the gradient times `scale` to `out`.
    pub(crate) fn gradient(&self, scale: f32, out: &mut [f32]) {
        let first = self.param.range.start;
        let pieces = out.chunks_mut(PIECE).enumerate();
        mantissa_kernels::for_each(self.threads, pieces, |(i, out)| {
            let at = first + i * PIECE;
            self.grads.get(at..at + out.len()).widen(out);
            out.iter_mut().for_each(|g| *g *= scale);
        });
    }

    /// Returns the sum of the squared weights, in f64.
    pub(crate) fn weight_squares(&mut self) -> f64 {
        let (range, mut buffer, mut sum) = (self.param.range.clone(), [0.0; BLOCK], 0.0);
        let pieces = self.working.pieces(range.clone(), PIECE).into_iter();
        let mut left = range.len();
        for (working, master) in pieces.zip(self.master.pieces(range, PIECE)) {
            let n = left.min(PIECE);
            for at in (0..n).step_by(BLOCK) {
                let buffer = &mut buffer[..BLOCK.min(n - at)];
                read(&working, &master, at, buffer);
                sum += kernels().sum_squares_f64(buffer);
            }
            left -= n;
        }
        sum
    }

    /// Subtracts `rate` times `update` from the weights, which are multiplied by `decay` first.
    pub(crate) fn apply(&mut self, update: &[f32], rate: f64, decay: f64) -> Result<(), TrainError> {
        let (rate, decay) = (rate as f32, decay as f32);
        self.each_piece(&mut [], &mut [], |piece| {
            piece.blocks(|at, p, _, []| {
                p.iter_mut().zip(&update[at..]).for_each(|(p, u)| *p = *p * decay - rate * u);
            });
        })
    }
}

impl Piece<'_, '_> {
    /// Passes weights, gradients and moments of every block of [`BLOCK`] elements to `update` as f32, with the
    /// offset in the tensor, and stores the results.
    pub(crate) fn blocks<const N: usize>(
        &mut self,
        mut update: impl FnMut(usize, &mut [f32], &[f32], [&mut [f32]; N]),
    ) {
        let (offset, moments) = (self.offset, &mut self.moments);
        let (mut g, mut wide) = ([0.0; BLOCK], [[0.0; BLOCK]; N]);
        let grads = self.grads;
        by_blocks(&mut self.working, &mut self.master, grads.len(), self.place, self.counts, |block, p| {
            let (at, n) = (block * BLOCK, p.len());
            grads.slice(at..at + n).widen(&mut g[..n]);
            for (moment, wide) in moments.iter_mut().zip(&mut wide) {
                if moment.f32_block(block).is_none() {
                    moment.read(block, &mut wide[..n]);
                }
            }
            let mut values = moments.iter_mut().zip(&mut wide);
            let values = std::array::from_fn(|_| match values.next() {
                Some((moment, wide)) => moment.f32_block(block).unwrap_or(&mut wide[..n]),
                None => &mut [],
            });
            update(offset + at, p, &g[..n], values);
            for (moment, wide) in moments.iter_mut().zip(&wide) {
                moment.write(block, &wide[..n]);
            }
        });
    }

    /// Passes every block with the codes and absmax of both moments to `update`; false if they are not in
    /// bitsandbytes' format.
    pub(crate) fn coded_blocks(
        &mut self,
        mut update: impl FnMut(&mut [f32], &[f32], [&mut [u8]; 2], [&mut f32; 2]),
    ) -> bool {
        let [first, second] = &mut self.moments[..] else { return false };
        if first.coded_block(0).is_none() || second.coded_block(0).is_none() {
            return false;
        }
        let mut g = [0.0; BLOCK];
        let grads = self.grads;
        by_blocks(&mut self.working, &mut self.master, grads.len(), self.place, self.counts, |block, p| {
            let (at, n) = (block * BLOCK, p.len());
            grads.slice(at..at + n).widen(&mut g[..n]);
            if let (Some((m, m_max)), Some((v, v_max))) =
                (first.coded_block(block), second.coded_block(block))
            {
                update(p, &g[..n], [m, v], [m_max, v_max]);
            }
        });
        true
    }

    /// Returns weights, gradients and moments of the whole piece, if all are f32 and nothing is counted.
    pub(crate) fn plain<const N: usize>(&mut self) -> Option<Plain<'_, N>> {
        let (WorkingMut::F32(p), MasterMut::None, StoreRef::F32(g), None) =
            (&mut self.working, &self.master, self.grads, self.counts)
        else {
            return None;
        };
        if self.moments.len() != N || !self.moments.iter().all(|m| matches!(m.codes, CodesMut::F32(_))) {
            return None;
        }
        let mut moments = self.moments.iter_mut();
        let moments = std::array::from_fn(|_| match moments.next().map(|moment| &mut moment.codes) {
            Some(CodesMut::F32(values)) => &mut **values,
            _ => &mut [],
        });
        Some((p, g, moments))
    }
}

/// Passes the weights of a piece to `update` as f32, block by block, and stores the results. `place` is the
/// arena index of the first weight and the number of the update.
fn by_blocks(
    working: &mut WorkingMut<'_>,
    master: &mut MasterMut<'_>,
    len: usize,
    place: (u64, u64),
    counts: Option<&WeightCounts>,
    mut update: impl FnMut(usize, &mut [f32]),
) {
    let (mut p, mut before, mut after) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    let (mut exact, mut updates, mut weights) = ([0.0; BLOCK], 0.0, 0.0);
    for block in 0..len.div_ceil(BLOCK) {
        let at = block * BLOCK;
        let p = &mut p[..BLOCK.min(len - at)];
        let (before, after) = (&mut before[..p.len()], &mut after[..p.len()]);
        read(working, master, at, p);
        if counts.is_some() {
            read(working, &MasterMut::None, at, before);
            exact[..p.len()].copy_from_slice(p);
        }
        update(block, p);
        write(working, master, at, p, place);
        if let Some(counts) = counts {
            read(working, &MasterMut::None, at, after);
            counts.add(p, before, after);
            for (new, old) in p.iter().zip(&exact) {
                let (step, old) = (f64::from(*new) - f64::from(*old), f64::from(*old));
                updates += step * step;
                weights += old * old;
            }
        }
    }
    if let Some(counts) = counts {
        counts.add_squares(place.0, updates, weights);
    }
}
