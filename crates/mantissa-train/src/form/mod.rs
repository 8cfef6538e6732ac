//! Forms: matmul operands in the scheme, rotation and storage that a [`GemmPolicy`](crate::policy::GemmPolicy) asks for, and their product.
//!
//! A form is a matrix `[lines, k]` whose rows run along the contraction axis, so that every product is `A Bᵀ`. Its
//! values are the exact values of the scheme: 8-bit codes of integers with their scales, bf16 with a factor per line or
//! tensor where that holds them, otherwise f32. Products of codes are sums of integers ([`gemm_codes`]); the others
//! accumulate in f32, which is at least the precision of the tensor cores that these recipes target, or in an emulated
//! accumulator of fewer bits.
//!
//! [`gemm_codes`]: mantissa_kernels::Kernels::gemm_codes

mod draws;
mod eden;
mod history;
mod product;
mod rounder;
mod rounding;
mod rule;
mod scale_tables;
mod scales;
mod slot;
mod source;
mod storage;
#[cfg(test)]
mod tests;
mod turn;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::zeros;
use mantissa_num::Accumulator;

pub(crate) use draws::{Draw, Draws, LinearPlace, Making};
pub(crate) use history::Histories;
pub(crate) use product::product;

use rounder::Shared;
pub(crate) use rule::{LinearRules, Rule, histories};
use scales::Scales;
pub(crate) use slot::SLOTS;
pub(crate) use source::Matrix;
use source::{Source, filler, with_band};
pub(crate) use storage::Storage;

use crate::health::Sums;
use crate::store::{Precision, StoreRef};

/// A made operand.
#[derive(Debug, Default)]
pub(crate) struct Form {
    storage: Storage,
    accumulator: Accumulator,
    lines: usize,
    k: usize,
    codes: Vec<i8>,
    bits: Vec<u16>,
    values: Vec<f32>,
    /// Scales of the units of every line, `[lines, units]`, for codes and elements with units.
    scales: Vec<f32>,
    /// Factor of the product.
    factor: f32,
    /// Factors of the lines; used if `has_factors`.
    factors: Vec<f32>,
    has_factors: bool,
}

/// Lines of a form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormRef<'a> {
    data: Data<'a>,
    k: usize,
    /// Length of a unit, and the scales of the lines' units.
    scales: Option<(usize, &'a [f32])>,
    factor: f32,
    factors: Option<&'a [f32]>,
    accumulator: Accumulator,
}

/// Values of a form, or codes of values.
#[derive(Clone, Copy, Debug)]
enum Data<'a> {
    Values(StoreRef<'a>),
    Codes(&'a [i8]),
}

impl Form {
    /// Allocates for up to `values` values in `lines` lines; `None` if memory is missing.
    pub(crate) fn new(storage: Storage, values: usize, lines: usize) -> Option<Self> {
        let of = |used: bool| if used { values } else { 0 };
        Some(Form {
            storage,
            codes: zeros(of(storage.has_codes()))?,
            bits: zeros(of(storage.has_bits()))?,
            values: zeros(of(storage.has_values()))?,
            scales: zeros(storage.scales(values, lines))?,
            factors: zeros(lines)?,
            factor: 1.0,
            ..Form::default()
        })
    }

    /// Bytes of [`new`](Self::new).
    pub(crate) fn bytes(storage: Storage, values: usize, lines: usize) -> u64 {
        let scale_bytes = 4 * (storage.scales(values, lines) as u64 + lines as u64);
        storage.bytes().saturating_mul(values as u64).saturating_add(scale_bytes)
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        let wide = self.values.capacity() + self.factors.capacity() + self.scales.capacity();
        self.codes.capacity() as u64 + 2 * self.bits.capacity() as u64 + 4 * wide as u64
    }

    /// Rounds `source` by `rule`, and notes if nothing is left of it.
    pub(crate) fn make(&mut self, rule: &Rule, source: Source<'_>, making: Making<'_>) {
        self.make_of(rule, source, making);
        if let Some((lost, place)) = making.lost
            && self.all().is_zero()
            && source.has_signal()
        {
            lost.note(place);
        }
    }

    fn make_of(&mut self, rule: &Rule, source: Source<'_>, making: Making<'_>) {
        let (lines, k) = source.shape();
        (self.lines, self.k, self.factor, self.accumulator) = (lines, k, 1.0, rule.accumulator);
        self.has_factors =
            self.storage.keeps_factors() || rule.rounder.has_line_factors() && rule.plain.is_none();
        if lines * k == 0 {
            return;
        }
        let hadamard = rule.hadamard(making.signs);
        let fill = filler(source, k, &hadamard);
        if rule.plain.is_none() && rule.rounder.is_reference() {
            return self.refer(rule, &fill, making);
        }
        let shared = rule.shared(source, &fill, hadamard.is_some(), making);
        if rule.plain.is_none() {
            self.factor = shared.factor;
        }
        let direct = (hadamard.is_none() && !source.transposed).then_some(source.values);
        let work = Work { rule, fill: &fill, direct, shared: &shared, k, making };
        self.fill_all(&work);
    }

    /// Fills the storage band by band.
    fn fill_all(&mut self, work: &Work<'_, impl Fn(usize, &mut [f32]) + Sync>) {
        let (n, k, band, threads) = (self.lines * self.k, self.k, work.rule.band(), work.making.threads);
        let units = self.storage.units(k);
        let Form { storage, codes, bits, values, factors, scales, lines, .. } = self;
        let factors = factors[..*lines].chunks_mut(band).enumerate();
        match *storage {
            Storage::Codes { .. } => {
                let scales = crate::rows::rows_mut(scales, units, bands(*lines, band));
                let pieces = codes[..n].chunks_mut(band * k).zip(scales).zip(factors);
                for_each(threads, pieces, |((codes, scales), (i, factors))| {
                    work.encode(i, Scales { factors, scales }, codes);
                });
            }
            Storage::Elements { .. } => {
                let scales = crate::rows::rows_mut(scales, units, bands(*lines, band));
                let pieces = values[..n].chunks_mut(band * k).zip(scales).zip(factors);
                for_each(threads, pieces, |((lines, scales), (i, factors))| {
                    (work.fill)(i * band, lines);
                    work.round(i, lines, Scales { factors, scales });
                });
            }
            Storage::Float(Precision::F32) => {
                let pieces = values[..n].chunks_mut(band * k).zip(factors);
                for_each(threads, pieces, |(lines, (i, factors))| {
                    (work.fill)(i * band, lines);
                    work.round(i, lines, Scales { factors, scales: &mut [] });
                    if let Some(plain) = work.rule.plain {
                        crate::store::round(plain, lines);
                    }
                });
            }
            Storage::Float(precision) => {
                let pieces = bits[..n].chunks_mut(band * k).zip(factors);
                for_each(threads, pieces, |(bits, (i, factors))| {
                    with_band(bits.len(), |lines| {
                        (work.fill)(i * band, lines);
                        work.round(i, lines, Scales { factors, scales: &mut [] });
                        match precision {
                            Precision::F16 => kernels().f32_to_f16(lines, bits),
                            _ => kernels().f32_to_bf16(lines, bits),
                        }
                    });
                });
            }
        }
    }

    /// Rounds the whole matrix by the reference, on this thread.
    fn refer(&mut self, rule: &Rule, fill: &impl Fn(usize, &mut [f32]), making: Making<'_>) {
        let (n, k) = (self.lines * self.k, self.k);
        self.factor = 1.0;
        let round = |lines: &mut [f32]| {
            fill(0, lines);
            let exact = making.watch.map(|_| lines.to_vec());
            rule.rounder.reference(lines, k, making.amax, making.seed);
            if let (Some((watch, place)), Some(exact)) = (making.watch, exact) {
                let mut sums = Sums::of_rounding(&exact, lines);
                sums.join(&Sums::saturated(rule.rounder.clipped(&exact)));
                watch.rounding(place, &sums);
            }
        };
        if self.storage.has_values() {
            return round(&mut self.values[..n]);
        }
        with_band(n, |lines| {
            round(lines);
            kernels().f32_to_bf16(lines, &mut self.bits[..n]);
        });
    }

    /// Returns all lines.
    pub(crate) fn all(&self) -> FormRef<'_> {
        let n = self.lines * self.k;
        let data = match self.storage {
            Storage::Codes { .. } => Data::Codes(&self.codes[..n]),
            Storage::Elements { .. } | Storage::Float(Precision::F32) => {
                Data::Values(StoreRef::F32(&self.values[..n]))
            }
            Storage::Float(Precision::Bf16) => Data::Values(StoreRef::Bf16(&self.bits[..n])),
            Storage::Float(Precision::F16) => Data::Values(StoreRef::F16(&self.bits[..n])),
        };
        let factors = self.has_factors.then(|| &self.factors[..self.lines]);
        let scales =
            self.storage.unit().map(|unit| (unit, &self.scales[..self.lines * self.storage.units(self.k)]));
        FormRef { data, k: self.k, scales, factor: self.factor, factors, accumulator: self.accumulator }
    }

    /// Writes the values of all lines to `out`.
    pub(crate) fn values(&self, out: &mut [f32]) {
        let all = self.all();
        match all.data {
            Data::Values(values) => values.widen(out),
            Data::Codes(codes) => out.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(*code)),
        }
        for (i, line) in out.chunks_exact_mut(self.k.max(1)).enumerate() {
            if let Some((unit, scales)) = all.scales {
                let units = self.storage.units(self.k);
                let scaled = line.chunks_mut(unit).zip(&scales[i * units..][..units]);
                scaled.for_each(|(line, scale)| line.iter_mut().for_each(|x| *x *= scale));
            }
            let line_factor = all.factors.map_or(1.0, |factors| factors[i]);
            if self.factor != 1.0 || line_factor != 1.0 {
                line.iter_mut().for_each(|x| *x = *x * line_factor * self.factor);
            }
        }
    }
}

/// Lines of each band of `band` lines.
fn bands(lines: usize, band: usize) -> impl Iterator<Item = std::ops::Range<usize>> + Clone {
    (0..lines).step_by(band).map(move |first| first..lines.min(first + band))
}

/// Work of making the bands of a form.
struct Work<'a, F> {
    rule: &'a Rule,
    /// Writes lines from a given one on.
    fill: &'a F,
    /// Values that are the lines already.
    direct: Option<StoreRef<'a>>,
    shared: &'a Shared,
    k: usize,
    making: Making<'a>,
}

impl<F: Fn(usize, &mut [f32])> Work<'_, F> {
    /// Rounds band `i` in place.
    fn round(&self, i: usize, lines: &mut [f32], mut to: Scales<'_>) {
        let (rounder, k, first) = (&self.rule.rounder, self.k, i * self.rule.band());
        to.clear();
        // NaN and infinity have no code; they stay as they are and show up in the product.
        if self.rule.plain.is_some() || !kernels().amax(lines).is_finite() {
            return;
        }
        let Some((watch, place)) = self.making.watch else {
            rounder.round(lines, k, first, self.shared, to, false);
            return;
        };
        let exact = lines.to_vec();
        let saturated = rounder.round(lines, k, first, self.shared, to.again(), true);
        watch.rounding(place, &rounder.sums((&exact, lines), k, self.shared, &to, saturated));
    }

    /// Writes the codes of band `i`. A line that is not finite gets the factor NaN, which shows up in the product.
    fn encode(&self, i: usize, mut to: Scales<'_>, codes: &mut [i8]) {
        let (rounder, k, first) = (&self.rule.rounder, self.k, i * self.rule.band());
        to.clear();
        if let Some(StoreRef::F32(values)) = self.direct.filter(|_| self.making.watch.is_none()) {
            return rounder.encode(&values[first * k..][..codes.len()], k, first, self.shared, to, codes);
        }
        with_band(codes.len(), |lines| {
            (self.fill)(first, lines);
            rounder.encode(lines, k, first, self.shared, to.again(), codes);
            if let Some((watch, place)) = self.making.watch
                && kernels().amax(lines).is_finite()
            {
                let exact = lines.to_vec();
                let saturated = rounder.round(lines, k, first, self.shared, to.again(), true);
                watch.rounding(place, &rounder.sums((&exact, lines), k, self.shared, &to, saturated));
            }
        });
    }
}

impl<'a> FormRef<'a> {
    /// Returns lines `range`.
    pub(crate) fn slice(self, range: std::ops::Range<usize>) -> Self {
        let span = range.start * self.k..range.end * self.k;
        let data = match self.data {
            Data::Values(values) => Data::Values(values.slice(span)),
            Data::Codes(codes) => Data::Codes(&codes[span]),
        };
        let scales = self.scales.map(|(unit, scales)| {
            let units = self.k.div_ceil(unit);
            (unit, &scales[range.start * units..range.end * units])
        });
        FormRef { data, scales, factors: self.factors.map(|factors| &factors[range]), ..self }
    }

    /// True if every value is 0; ends at the first code or scale of each kind that is not.
    pub(crate) fn is_zero(self) -> bool {
        let zero = |values: &[f32]| StoreRef::F32(values).is_zero();
        let data = match self.data {
            Data::Values(values) => values.is_zero(),
            Data::Codes(codes) => codes.iter().all(|code| *code == 0),
        };
        data || self.factor == 0.0
            || self.scales.is_some_and(|(_, scales)| zero(scales))
            || self.factors.is_some_and(zero)
    }

    /// Number of lines.
    pub(crate) fn lines(self) -> usize {
        let values = match self.data {
            Data::Values(values) => values.len(),
            Data::Codes(codes) => codes.len(),
        };
        values / self.k.max(1)
    }
}
