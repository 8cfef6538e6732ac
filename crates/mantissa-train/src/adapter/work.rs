//! Buffers of the layer in work, used by all layers in turn: dequantized weights and the adapters' activations.

use std::ops::Range;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_model::flow::{MIN_ROWS, parts};
use mantissa_model::{LinearInfo, LinearKind, ModelConfig, zeros};

use super::init;
use crate::arena::Parameters;
use crate::form::Draw;
use crate::frozen::{Base, FrozenWeight};
use crate::linear::LinearOp;
use crate::lora::Tuning;
use crate::rows::rows_mut;
use crate::store::{Precision, Store, StoreRef};

/// Rows of a weight that a thread fills at a time.
const ROWS: usize = 64;

/// Place of a prepared weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Weight of the forward.
    Forward,
    /// Weight of dgrad; the weights of one half of a layer are alive together.
    Backward(usize),
}

impl Slot {
    /// Returns the place for dgrad of a linear layer.
    pub(crate) fn of(kind: LinearKind) -> Self {
        Slot::Backward(kind.slot())
    }

    /// The forward uses the first place of the backward.
    fn index(self) -> usize {
        match self {
            Slot::Forward => 0,
            Slot::Backward(slot) => slot,
        }
    }
}

/// Number of weights alive together.
const SLOTS: usize = 3;

/// Random numbers of dropout in one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dropout {
    pub(crate) seed: u64,
    pub(crate) draw: Draw,
}

impl Dropout {
    /// Sets a share `p` of the values to 0 and divides the others by `1 - p`. The mask depends on the adapter, step,
    /// batch and place; `first` is the place of the first value.
    pub(crate) fn mask(self, adapter: usize, p: f64, first: u64, values: &mut [f32]) {
        const PIECE: usize = 1024;
        let Draw { step, batch } = self.draw;
        let step_seed = init::stream(self.seed, step << 16 ^ u64::from(batch));
        let seed = init::stream(step_seed, adapter as u64);
        let (below, factor) = ((p * 4_294_967_296.0) as u32, (1.0 / (1.0 - p)) as f32);
        let mut words = [0; PIECE];
        for (i, values) in values.chunks_mut(PIECE).enumerate() {
            let words = &mut words[..values.len()];
            kernels().random_words(seed, first + (i * PIECE) as u64, words);
            let each = values.iter_mut().zip(words);
            each.for_each(|(v, word)| *v = if *word < below { 0.0 } else { *v * factor });
        }
    }
}

/// Buffers of adapters and frozen weights.
#[derive(Debug, Default)]
pub(crate) struct AdapterWork {
    /// Dropout of the batch; `None` outside training.
    pub(crate) draw: Option<Dropout>,
    /// Prepared weights, by slot; empty for weights that matmuls read where they are.
    weights: [Option<Store>; SLOTS],
    /// B with DoRA's factors, by slot.
    scaled_b: [Option<Store>; SLOTS],
    /// DoRA's factor of each output row, by slot.
    columns: [Vec<f32>; SLOTS],
    /// Norms of the rows of `W + s B A` since the forward, by adapter.
    pub(crate) norms: Vec<Vec<f32>>,
    /// Unscaled weight, for DoRA's magnitudes.
    unscaled: Option<Store>,
    /// `u` `[tokens, rank]`.
    pub(crate) low: Vec<f32>,
    /// `dU` `[tokens, rank]`, by slot.
    d_low: [Vec<f32>; SLOTS],
    /// Adapter whose `dU` a slot holds.
    held: [Option<usize>; SLOTS],
    /// Input under dropout.
    pub(crate) dropped: Vec<f32>,
    /// Its gradient, by slot.
    d_dropped: [Vec<f32>; SLOTS],
    /// Gradient of B before DoRA's factors.
    pub(crate) d_b: Vec<f32>,
    /// Output before DoRA's factors, `[tokens, out]`.
    pub(crate) z: Vec<f32>,
}

/// Lengths of [`AdapterWork`]'s buffers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AdapterSizes {
    precision: Precision,
    weights: [usize; SLOTS],
    scaled_b: [usize; SLOTS],
    columns: [usize; SLOTS],
    norms: Vec<usize>,
    unscaled: usize,
    low: usize,
    dropped: usize,
    d_dropped: [usize; SLOTS],
    d_b: usize,
    z: usize,
}

impl AdapterSizes {
    /// Computes the lengths for up to `tokens` tokens; `packed` tells which frozen weights are packed.
    pub(crate) fn new(
        config: &ModelConfig,
        tuning: &Tuning,
        precision: Precision,
        tokens: usize,
        packed: impl Fn(&LinearInfo) -> bool,
    ) -> Self {
        let (rows, lora) = (tokens.max(MIN_ROWS), &tuning.lora);
        let mut sizes = AdapterSizes { precision, ..Default::default() };
        let grow = |to: &mut usize, n: usize| *to = (*to).max(n);
        for info in config.decoder_linears() {
            let (slot, adapted) = (info.kind.slot(), lora.targets(&info.module));
            let dora = adapted && lora.dora;
            if packed(&info) || dora {
                grow(&mut sizes.weights[slot], info.rows * info.cols);
                grow(&mut sizes.weights[0], info.rows * info.cols);
            }
            if !adapted {
                continue;
            }
            sizes.low = rows * lora.rank;
            if lora.dropout > 0.0 {
                grow(&mut sizes.dropped, rows * info.cols);
                grow(&mut sizes.d_dropped[slot], rows * info.cols);
            }
            sizes.norms.push(if dora { info.rows } else { 0 });
            if dora {
                for slot in [0, slot] {
                    grow(&mut sizes.scaled_b[slot], info.rows * lora.rank);
                    grow(&mut sizes.columns[slot], info.rows);
                }
                grow(&mut sizes.d_b, info.rows * lora.rank);
                grow(&mut sizes.z, rows * info.rows);
                if packed(&info) {
                    grow(&mut sizes.unscaled, info.rows * info.cols);
                }
            }
        }
        sizes
    }

    /// Sizes of the buffers in elements of the weight dtype, and in f32 values.
    fn totals(&self) -> (usize, usize) {
        let weights = self.weights.iter().chain(&self.scaled_b).sum::<usize>() + self.unscaled;
        let values = self.columns.iter().chain(&self.norms).chain(&self.d_dropped).sum::<usize>();
        (weights, values + (1 + SLOTS) * self.low + self.dropped + self.d_b + self.z)
    }

    /// Bytes of [`allocate`](Self::allocate).
    pub(crate) fn bytes(&self) -> u64 {
        let (weights, values) = self.totals();
        self.precision.bytes() * weights as u64 + 4 * values as u64
    }

    /// Allocates the buffers; `None` if memory is missing.
    pub(crate) fn allocate(&self) -> Option<AdapterWork> {
        let store = |n: &usize| match *n {
            0 => Some(None),
            n => Store::zeros(self.precision, n).map(Some),
        };
        let stores = |all: &[usize; SLOTS]| Some([store(&all[0])?, store(&all[1])?, store(&all[2])?]);
        let arrays = |all: [usize; SLOTS]| Some([zeros(all[0])?, zeros(all[1])?, zeros(all[2])?]);
        Some(AdapterWork {
            draw: None,
            weights: stores(&self.weights)?,
            scaled_b: stores(&self.scaled_b)?,
            columns: arrays(self.columns)?,
            norms: self.norms.iter().map(|n| zeros(*n)).collect::<Option<_>>()?,
            unscaled: store(&self.unscaled)?,
            low: zeros(self.low)?,
            d_low: arrays([self.low; SLOTS])?,
            held: [None; SLOTS],
            dropped: zeros(self.dropped)?,
            d_dropped: arrays(self.d_dropped)?,
            d_b: zeros(self.d_b)?,
            z: zeros(self.z)?,
        })
    }
}

impl Base {
    /// Returns the lengths of the buffers for up to `tokens` tokens.
    pub(crate) fn sizes(&self, config: &ModelConfig, precision: Precision, tokens: usize) -> AdapterSizes {
        let packed = |info: &LinearInfo| self.index(&info.module).is_some();
        AdapterSizes::new(config, &self.tuning, precision, tokens, packed)
    }
}

impl AdapterWork {
    /// Prepares the weight of a linear layer in `slot`: dequantizes a packed one, and scales rows and B for DoRA.
    /// The forward computes DoRA's norms, which hold until the next one.
    pub(crate) fn prepare(&mut self, params: &Parameters, linear: &LinearOp, slot: Slot, threads: usize) {
        let dora = linear.adapter().filter(|op| op.magnitude.is_some());
        if linear.packed().is_none() && dora.is_none() {
            return;
        }
        if dora.is_some() && slot == Slot::Forward {
            self.measure(params, linear, threads);
        }
        self.prepare_columns(params, linear, slot);
        let i = slot.index();
        let columns = dora.map(|_| &self.columns[i][..]);
        if let Some(store) = &mut self.weights[i] {
            fill(store, params, linear, threads, |row, out| {
                if let Some(columns) = columns {
                    out.iter_mut().for_each(|v| *v *= columns[row]);
                }
            });
        }
    }

    /// Computes the norms of the rows of `W + s B A`.
    fn measure(&mut self, params: &Parameters, linear: &LinearOp, threads: usize) {
        let Some(op) = linear.adapter() else { return };
        let (a, b) = (params.f32(&op.a.weight()), params.f32(&op.b.weight()));
        let (cols, rank) = (linear.cols(), op.a.rows());
        let mut norms = std::mem::take(&mut self.norms[op.index]);
        // The rows pass through the slot that the weight is about to be written to.
        if let Some(store) = &mut self.weights[0] {
            let sums: Vec<_> = norms.iter_mut().map(std::sync::Mutex::new).collect();
            fill(store, params, linear, threads, |row, out| {
                let factors = b[row * rank..(row + 1) * rank].iter().zip(a.chunks_exact(cols));
                factors.for_each(|(b, a)| kernels().axpy(op.scale * b, a, out));
                let norm = kernels().sum_squares_f64(out).sqrt() as f32;
                if let Ok(mut to) = sums[row].lock() {
                    **to = norm;
                }
            });
        }
        self.norms[op.index] = norms;
    }

    /// Computes DoRA's factors `m / ‖W + s B A‖` and the scaled B, from the norms of the forward.
    pub(crate) fn prepare_columns(&mut self, params: &Parameters, linear: &LinearOp, slot: Slot) {
        let Some((op, magnitude)) = linear.adapter().and_then(|op| Some((op, op.magnitude.as_ref()?))) else {
            return;
        };
        let (i, rank) = (slot.index(), op.a.rows());
        let magnitudes = params.f32(magnitude);
        let own = self.columns[i].iter_mut().zip(magnitudes.iter().zip(&self.norms[op.index]));
        own.for_each(|(c, (m, norm))| *c = if *norm > 0.0 { m / norm } else { 0.0 });
        let b = params.f32(&op.b.weight());
        if let Some(store) = &mut self.scaled_b[i] {
            let mut line = vec![0.0; rank];
            for (row, (b, c)) in b.chunks_exact(rank).zip(&self.columns[i]).enumerate() {
                line.iter_mut().zip(b).for_each(|(to, b)| *to = b * c);
                store.set(row * rank, &line);
            }
        }
    }

    /// Returns DoRA's factors in `slot`.
    pub(crate) fn columns(&self, slot: Slot) -> &[f32] {
        &self.columns[slot.index()]
    }

    /// Returns the weight that the matmuls of a linear layer read, after [`prepare`](Self::prepare).
    pub(crate) fn weight<'a>(
        &'a self,
        params: &'a Parameters,
        linear: &LinearOp,
        slot: Slot,
    ) -> StoreRef<'a> {
        let scaled = linear.adapter().is_some_and(|op| op.magnitude.is_some());
        match &self.weights[slot.index()] {
            Some(store) if linear.packed().is_some() || scaled => store.get(0..linear.rows() * linear.cols()),
            _ => params.get(linear.weight()),
        }
    }

    /// Returns B as the matmuls read it.
    pub(crate) fn b<'a>(&'a self, params: &'a Parameters, linear: &LinearOp, slot: Slot) -> StoreRef<'a> {
        let Some(op) = linear.adapter() else { return StoreRef::F32(&[]) };
        match (&self.scaled_b[slot.index()], &op.magnitude) {
            (Some(store), Some(_)) => store.get(0..op.b.weight().len()),
            _ => params.get(op.b.weight()),
        }
    }

    /// Prepares the weight before DoRA's factors.
    pub(crate) fn prepare_unscaled(&mut self, params: &Parameters, linear: &LinearOp, threads: usize) {
        if let (Some(store), Some(_)) = (&mut self.unscaled, linear.packed()) {
            fill(store, params, linear, threads, |_, _| {});
        }
    }

    /// Returns the weight before DoRA's factors.
    pub(crate) fn unscaled<'a>(&'a self, params: &'a Parameters, linear: &LinearOp) -> StoreRef<'a> {
        match (&self.unscaled, linear.packed()) {
            (Some(store), Some(_)) => store.get(0..linear.rows() * linear.cols()),
            _ => params.get(linear.weight()),
        }
    }

    /// Forgets the gradients of the previous layer.
    pub(crate) fn forget(&mut self) {
        self.held = [None; SLOTS];
    }

    /// Returns the adapter whose `dU` the slot holds.
    pub(crate) fn d_low_of(&self, slot: Slot) -> Option<usize> {
        self.held[slot.index()]
    }

    pub(crate) fn d_low(&self, slot: Slot) -> &[f32] {
        &self.d_low[slot.index()]
    }

    pub(crate) fn take_d_low(&mut self, slot: Slot) -> Vec<f32> {
        std::mem::take(&mut self.d_low[slot.index()])
    }

    pub(crate) fn put_d_low(&mut self, slot: Slot, values: Vec<f32>, adapter: usize) {
        (self.d_low[slot.index()], self.held[slot.index()]) = (values, Some(adapter));
    }

    pub(crate) fn d_dropped(&self, slot: Slot) -> &[f32] {
        &self.d_dropped[slot.index()]
    }

    pub(crate) fn take_d_dropped(&mut self, slot: Slot) -> Vec<f32> {
        std::mem::take(&mut self.d_dropped[slot.index()])
    }

    pub(crate) fn put_d_dropped(&mut self, slot: Slot, values: Vec<f32>) {
        self.d_dropped[slot.index()] = values;
    }

    /// Bytes allocated.
    pub(crate) fn bytes(&self) -> u64 {
        let stores = self.weights.iter().chain(&self.scaled_b).chain([&self.unscaled]).flatten();
        let stores: u64 = stores.map(|store| store.precision().bytes() * store.len() as u64).sum();
        let arrays = self.columns.iter().chain(&self.norms).chain(&self.d_low).chain(&self.d_dropped);
        let arrays = arrays.chain([&self.low, &self.dropped, &self.d_b, &self.z]);
        stores + 4 * arrays.map(|values| values.capacity() as u64).sum::<u64>()
    }
}

/// Writes a frozen weight to `store` after passing each row, with its index, to `change` in f32.
fn fill(
    store: &mut Store,
    params: &Parameters,
    linear: &LinearOp,
    threads: usize,
    change: impl Fn(usize, &mut [f32]) + Sync,
) {
    let (rows, cols) = (linear.rows(), linear.cols());
    let packed = linear.packed().and_then(|index| Some(params.base()?.weight(index)));
    let reader = packed.map(FrozenWeight::reader);
    let direct = params.get(linear.weight());
    let read = |span: Range<usize>, codes: &mut Vec<u8>, out: &mut [f32]| {
        match &reader {
            Some(reader) => reader.rows(span.clone(), codes, out),
            None => direct.slice(span.start * cols..span.end * cols).widen(out),
        }
        out.chunks_exact_mut(cols.max(1)).zip(span).for_each(|(out, row)| change(row, out));
    };
    let cut = parts(rows, ROWS);
    match store {
        Store::F32(values) => {
            let pieces = cut.clone().zip(rows_mut(values, cols, cut));
            for_each_with(threads, Vec::new, pieces, |codes, (span, out)| read(span, codes, out));
        }
        Store::Bf16(bits) => narrow(threads, cols, rows_mut(bits, cols, cut.clone()), cut, read, |x, out| {
            kernels().f32_to_bf16(x, out);
        }),
        Store::F16(bits) => narrow(threads, cols, rows_mut(bits, cols, cut.clone()), cut, read, |x, out| {
            kernels().f32_to_f16(x, out);
        }),
    }
}

/// Passes the rows that `read` returns to `round`, piece by piece.
fn narrow<'a>(
    threads: usize,
    cols: usize,
    pieces: impl Iterator<Item = &'a mut [u16]> + Send,
    cut: impl Iterator<Item = Range<usize>> + Send,
    read: impl Fn(Range<usize>, &mut Vec<u8>, &mut [f32]) + Sync,
    round: impl Fn(&[f32], &mut [u16]) + Sync,
) {
    let new = || (Vec::new(), vec![0.0; ROWS * cols]);
    for_each_with(threads, new, cut.zip(pieces), |(codes, values), (span, out)| {
        let values = &mut values[..out.len()];
        read(span, codes, values);
        round(values, out);
    });
}
