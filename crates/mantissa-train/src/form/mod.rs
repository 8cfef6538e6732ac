//! Forms: matmul operands in the scheme, rotation and storage that a [`GemmPolicy`] asks for, and their product.
//!
//! A form is a matrix `[lines, k]` whose rows run along the contraction axis, so that every product is `A Bᵀ`. Its
//! values are the exact values of the scheme: bf16 with a factor per line or tensor where that holds them, otherwise
//! f32. Products accumulate in f32, which is at least the precision of the tensor cores that these recipes target.

mod draws;
mod history;
mod rounder;
mod scratch;
#[cfg(test)]
mod tests;

use std::sync::Mutex;

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::zeros;
use mantissa_num::blockwise::Range;
use mantissa_num::{Blocks, Hadamard, hadamard::TE_SIGNS16};

pub(crate) use draws::{Draw, Draws, Gemm, LinearPlace, Side};
pub(crate) use history::{Histories, History};
pub(crate) use rounder::Factors;
use rounder::Rounder;
pub(crate) use scratch::{FormSizes, Forms, Matrix, slot_of};

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::health::{OperandPlace, Sums, Watch};
use crate::linear::LinearOp;
use crate::policy::{GemmPolicy, LinearPolicy, OperandPolicy, OperandSource, Rotation, Signs};
use crate::store::{Precision, StoreRef};

/// Lines that a thread fills at a time when it transposes.
const LINES: usize = 16;

/// Operand of a matmul, ready to be made in every step.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    rounder: Rounder,
    /// Cast without scales.
    plain: Option<Precision>,
    source: OperandSource,
    storage: Precision,
    rotation: Option<Rotation>,
}

/// Rules of the two operands of each matmul of a linear layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearRules {
    /// X and W.
    pub(crate) fprop: [Rule; 2],
    /// dY and W.
    pub(crate) dgrad: [Rule; 2],
    /// dY and X.
    pub(crate) wgrad: [Rule; 2],
}

impl LinearRules {
    /// Makes the rules of a policy.
    pub(crate) fn new(policy: &LinearPolicy) -> Self {
        LinearRules { fprop: rules(&policy.fprop), dgrad: rules(&policy.dgrad), wgrad: rules(&policy.wgrad) }
    }

    /// Makes the rules of a policy for forms of any policy, which are stored in f32.
    pub(crate) fn wide(policy: &LinearPolicy) -> Self {
        let of = |gemm: &GemmPolicy| rules(gemm).map(Rule::stored_wide);
        LinearRules { fprop: of(&policy.fprop), dgrad: of(&policy.dgrad), wgrad: of(&policy.wgrad) }
    }

    /// Returns length and largest element of each operand's amax history.
    pub(crate) fn histories(&self) -> [(usize, f32); 6] {
        let [fprop, dgrad, wgrad] = [&self.fprop, &self.dgrad, &self.wgrad];
        [&fprop[0], &fprop[1], &dgrad[0], &dgrad[1], &wgrad[0], &wgrad[1]].map(Rule::history)
    }

    /// Checks that the schemes can hold the operands of a weight `[rows, cols]` and any number of tokens.
    ///
    /// # Errors
    /// [`TrainError::Policy`] names the operand.
    pub(crate) fn check(
        policy: &LinearPolicy,
        module: &str,
        (rows, cols): (usize, usize),
    ) -> Result<(), TrainError> {
        // Contraction lengths; tokens vary from batch to batch.
        let lengths = [Some(cols), Some(cols), Some(rows), Some(rows), None, None];
        for ((operand, policy), k) in policy.operands().into_iter().zip(lengths) {
            let refuse = |allowed: String| {
                Err(TrainError::Policy {
                    module: module.into(),
                    operand: operand.into(),
                    allowed,
                    found: policy.scheme.to_string(),
                })
            };
            if policy.scheme.format.trellis().is_some() {
                return refuse("a scheme whose values are rounded one by one".into());
            }
            if policy.scheme.source == mantissa_num::Source::Static {
                return refuse("@dynamic or @delayedN: training has no calibrated scales".into());
            }
            if let Some(codec) = policy.scheme.format.codec()
                && k.is_none_or(|k| !k.is_multiple_of(codec.elements))
            {
                let along = k.map_or("tokens of a batch".to_owned(), |k| format!("{k} values"));
                return refuse(format!(
                    "a scheme whose blocks divide the {along} along the contraction axis (blocks of {} do not)",
                    codec.elements
                ));
            }
            if matches!(policy.scheme.format.blocks(), Blocks::Flat(_)) && !operand.ends_with('w') {
                return refuse("a scheme with blocks along one axis: flat blocks would mix tokens".into());
            }
        }
        Ok(())
    }
}

fn rules(gemm: &GemmPolicy) -> [Rule; 2] {
    let both = [&gemm.left, &gemm.right];
    let all = |precision| both.iter().all(|operand| operand.precision() == Some(precision));
    let storage = match () {
        () if both.iter().all(|operand| operand.fits_bf16()) => Precision::Bf16,
        () if all(Precision::F16) && gemm.rotation.is_none() => Precision::F16,
        () => Precision::F32,
    };
    both.map(|operand| Rule::new(operand, storage, gemm.rotation))
}

/// Matrix from which a form is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) values: StoreRef<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// True if lines are the columns.
    pub(crate) transposed: bool,
}

impl Source<'_> {
    fn shape(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Copies lines `first..` into `to`, as many as it holds.
    fn lines(&self, first: usize, to: &mut [f32]) {
        let (_, k) = self.shape();
        if !self.transposed {
            return self.values.slice(first * k..first * k + to.len()).widen(to);
        }
        if let StoreRef::F32(values) = self.values {
            return kernels().transpose_columns(values, self.cols, first, self.rows, to);
        }
        let n = to.len() / k.max(1);
        let mut wide = [0.0; LINES];
        for (i, row) in (0..self.rows).map(|row| row * self.cols + first).enumerate() {
            let wide = &mut wide[..n];
            self.values.slice(row..row + n).widen(wide);
            for (line, value) in wide.iter().enumerate() {
                to[line * k + i] = *value;
            }
        }
    }

    /// Values at `range` in storage order.
    fn range(&self, range: std::ops::Range<usize>) -> std::borrow::Cow<'_, [f32]> {
        self.values.slice(range).widened()
    }
}

/// What a form needs from the run: seed of its random numbers, threads, history of its amax.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Making<'a> {
    pub(crate) seed: u64,
    /// Seed of the signs of the matmul's rotation.
    pub(crate) signs: u64,
    pub(crate) history: Option<&'a History>,
    pub(crate) threads: usize,
    /// Watch of the roundings, with the operand's place.
    pub(crate) watch: Option<(&'a Watch, OperandPlace)>,
}

impl Rule {
    fn new(policy: &OperandPolicy, storage: Precision, rotation: Option<Rotation>) -> Self {
        let plain = policy.precision().or_else(|| {
            let cast = policy.source == OperandSource::Forward && !policy.is_stochastic();
            Precision::of(&policy.scheme.format).filter(|_| cast)
        });
        Rule { rounder: Rounder::new(policy), plain, source: policy.source, storage, rotation }
    }

    /// Makes operands for forms of any policy, which are stored in f32.
    pub(crate) fn stored_wide(mut self) -> Self {
        self.storage = Precision::F32;
        self
    }

    /// Storage of the form.
    pub(crate) fn storage(&self) -> Precision {
        self.storage
    }

    /// True if the form is made from the forward's operand.
    pub(crate) fn reads_forward(&self) -> bool {
        self.source == OperandSource::Forward
    }

    /// Length of the amax history (0 without delayed scaling) and largest element.
    pub(crate) fn history(&self) -> (usize, f32) {
        (self.rounder.history().unwrap_or(0) as usize, self.rounder.max())
    }

    fn hadamard(&self, seed: u64) -> Option<Hadamard> {
        let rotation = self.rotation?;
        let transform = Hadamard::new(rotation.order)?;
        match rotation.signs {
            Signs::Plain => Some(transform),
            Signs::TransformerEngine => transform.with_signs(&TE_SIGNS16),
            Signs::Step => Some(transform.randomized(seed)),
        }
    }
}

/// A made operand.
#[derive(Debug, Default)]
pub(crate) struct Form {
    storage: Precision,
    lines: usize,
    k: usize,
    bits: Vec<u16>,
    values: Vec<f32>,
    /// Factor of the product.
    factor: f32,
    /// Factors of the lines; used if `has_factors`.
    factors: Vec<f32>,
    has_factors: bool,
}

/// Lines of a form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormRef<'a> {
    data: StoreRef<'a>,
    k: usize,
    factor: f32,
    factors: Option<&'a [f32]>,
}

impl Form {
    /// Allocates for up to `values` values in `lines` lines; `None` if memory is missing.
    pub(crate) fn new(storage: Precision, values: usize, lines: usize) -> Option<Self> {
        let (narrow, wide) = if storage == Precision::F32 { (0, values) } else { (values, 0) };
        Some(Form {
            storage,
            bits: zeros(narrow)?,
            values: zeros(wide)?,
            factors: zeros(lines)?,
            factor: 1.0,
            ..Form::default()
        })
    }

    /// Bytes of [`new`](Self::new).
    pub(crate) fn bytes(storage: Precision, values: usize, lines: usize) -> u64 {
        storage.bytes().saturating_mul(values as u64).saturating_add(4 * lines as u64)
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        2 * self.bits.capacity() as u64 + 4 * (self.values.capacity() + self.factors.capacity()) as u64
    }

    /// Rounds `source` by `rule`.
    pub(crate) fn make(&mut self, rule: &Rule, source: Source<'_>, making: Making<'_>) {
        let (lines, k) = source.shape();
        let n = lines * k;
        (self.lines, self.k, self.factor) = (lines, k, 1.0);
        self.has_factors = rule.rounder.has_line_factors() && rule.plain.is_none();
        if n == 0 {
            return;
        }
        let hadamard = rule.hadamard(making.signs);
        let fill = |first: usize, lines: &mut [f32]| {
            for (i, lines) in lines.chunks_mut(LINES * k).enumerate() {
                source.lines(first + i * LINES, lines);
            }
            if let Some(hadamard) = &hadamard {
                lines.chunks_exact_mut(k).for_each(|line| hadamard.forward(line));
            }
        };
        let height = rule.rounder.height();
        let band = height * LINES.div_ceil(height);
        let rounds = rule.plain.is_none();
        if rounds && rule.rounder.is_reference() {
            return self.refer(rule, &fill, making);
        }
        let mut shared = rule.rounder.shared(Range::EMPTY, None, making.seed);
        if rounds && rule.rounder.needs_range() {
            let range = match &hadamard {
                // The order of the values does not matter.
                None => {
                    let cut: Vec<_> = mantissa_model::flow::parts(n, 1 << 16).collect();
                    union(making.threads, cut.into_iter(), |part| rule.rounder.range(&source.range(part)))
                }
                Some(_) => union(making.threads, (0..lines).step_by(band), |first| {
                    with_band((lines - first).min(band) * k, |lines| {
                        fill(first, lines);
                        rule.rounder.range(lines)
                    })
                }),
            };
            let multiplier = making.history.map(|history| history.observe(range.amax()));
            shared = rule.rounder.shared(range, multiplier, making.seed);
        }
        if rounds {
            self.factor = shared.factor;
        }
        let finish = |i: usize, lines: &mut [f32], factors: &mut [f32]| {
            fill(i * band, lines);
            factors.fill(1.0);
            // NaN and infinity have no code; they stay as they are and show up in the product.
            if rounds && kernels().amax(lines).is_finite() {
                let exact = making.watch.map(|_| lines.to_vec());
                let saturated =
                    rule.rounder.round(lines, k, i * band, &shared, factors, making.watch.is_some());
                if let (Some((watch, place)), Some(exact)) = (making.watch, exact) {
                    let both = (&exact[..], &*lines);
                    watch.rounding(place, &rule.rounder.sums(both, k, &shared, factors, saturated));
                }
            }
        };
        let Form { storage, bits, values, factors, .. } = self;
        let factors = factors[..lines].chunks_mut(band).enumerate();
        if *storage == Precision::F32 {
            let pieces = values[..n].chunks_mut(band * k).zip(factors);
            return for_each(making.threads, pieces, |(lines, (i, factors))| {
                finish(i, lines, factors);
                if let Some(plain) = rule.plain {
                    crate::store::round(plain, lines);
                }
            });
        }
        let pieces = bits[..n].chunks_mut(band * k).zip(factors);
        for_each(making.threads, pieces, |(bits, (i, factors))| {
            with_band(bits.len(), |lines| {
                finish(i, lines, factors);
                match storage {
                    Precision::F16 => kernels().f32_to_f16(lines, bits),
                    _ => kernels().f32_to_bf16(lines, bits),
                }
            });
        });
    }

    /// Rounds the whole matrix by the reference, on this thread.
    fn refer(&mut self, rule: &Rule, fill: &impl Fn(usize, &mut [f32]), making: Making<'_>) {
        let (n, k) = (self.lines * self.k, self.k);
        self.factor = 1.0;
        let round = |lines: &mut [f32]| {
            fill(0, lines);
            let exact = making.watch.map(|_| lines.to_vec());
            rule.rounder.reference(lines, k, making.seed);
            if let (Some((watch, place)), Some(exact)) = (making.watch, exact) {
                let mut sums = Sums::of_rounding(&exact, lines);
                sums.join(&Sums::saturated(rule.rounder.clipped(&exact)));
                watch.rounding(place, &sums);
            }
        };
        if self.storage == Precision::F32 {
            return round(&mut self.values[..n]);
        }
        with_band(n, |lines| {
            round(lines);
            kernels().f32_to_bf16(lines, &mut self.bits[..n]);
        });
    }

    /// Returns the values to which `rule` rounds the weight of `linear`; `None` if memory is missing.
    pub(crate) fn of_weight(
        rule: &Rule,
        params: &Parameters,
        linear: &LinearOp,
        threads: usize,
    ) -> Option<Vec<f32>> {
        let weight = Matrix::new(params.get(linear.weight()), linear.cols());
        let n = linear.rows() * linear.cols();
        let mut form = Form::new(rule.storage(), n, linear.rows())?;
        form.make(rule, weight.lines(), Making { seed: 0, signs: 0, history: None, threads, watch: None });
        let mut values = zeros(n)?;
        form.values(&mut values);
        Some(values)
    }

    /// Returns all lines.
    pub(crate) fn all(&self) -> FormRef<'_> {
        let n = self.lines * self.k;
        let data = match self.storage {
            Precision::F32 => StoreRef::F32(&self.values[..n]),
            Precision::Bf16 => StoreRef::Bf16(&self.bits[..n]),
            Precision::F16 => StoreRef::F16(&self.bits[..n]),
        };
        let factors = self.has_factors.then(|| &self.factors[..self.lines]);
        FormRef { data, k: self.k, factor: self.factor, factors }
    }

    /// Writes the values of all lines to `out`.
    pub(crate) fn values(&self, out: &mut [f32]) {
        let all = self.all();
        all.data.widen(out);
        for (i, line) in out.chunks_exact_mut(self.k.max(1)).enumerate() {
            let of_line = all.factors.map_or(1.0, |factors| factors[i]);
            if self.factor != 1.0 || of_line != 1.0 {
                line.iter_mut().for_each(|x| *x = *x * of_line * self.factor);
            }
        }
    }
}

thread_local! {
    /// Lines in work.
    static BAND: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Passes `n` values of scratch memory to `work`.
fn with_band<T>(n: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    let mut band = BAND.take();
    if band.len() < n {
        band.resize(n, 0.0);
    }
    let result = work(&mut band[..n]);
    BAND.set(band);
    result
}

/// Computes the union of ranges of parts.
fn union<P: Send>(
    threads: usize,
    parts: impl Iterator<Item = P> + Send,
    range: impl Fn(P) -> Range + Sync,
) -> Range {
    let all = Mutex::new(Vec::new());
    for_each(threads, parts.enumerate(), |(i, part)| {
        let range = range(part);
        all.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, range));
    });
    let mut all = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // In order, because a mean is a sum.
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().fold(Range::EMPTY, |sum, (_, range)| sum.union(range))
}

impl<'a> FormRef<'a> {
    /// Returns lines `range`.
    pub(crate) fn slice(self, range: std::ops::Range<usize>) -> Self {
        FormRef {
            data: self.data.slice(range.start * self.k..range.end * self.k),
            factors: self.factors.map(|factors| &factors[range]),
            ..self
        }
    }

    /// Number of lines.
    pub(crate) fn lines(self) -> usize {
        self.data.len() / self.k.max(1)
    }
}

thread_local! {
    /// Product before it is scaled and added.
    static PRODUCT: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Rows of the product that are scaled and added at a time.
const ROWS: usize = 256;

/// Computes `out = A Bᵀ`, or `out += A Bᵀ` if `accumulate`, for forms `[m, k]` and `[n, k]` of one matmul.
pub(crate) fn product(a: FormRef<'_>, b: FormRef<'_>, out: &mut [f32], accumulate: bool) {
    let (m, n) = (a.lines(), b.lines());
    let factor = a.factor * b.factor;
    let scales = factor != 1.0 || a.factors.is_some() || b.factors.is_some();
    if !(scales && accumulate) {
        gemm(a, b, out, accumulate);
        if scales {
            for (i, row) in out.chunks_exact_mut(n).enumerate() {
                let by = factor * a.factors.map_or(1.0, |factors| factors[i]);
                match b.factors {
                    Some(factors) => row.iter_mut().zip(factors).for_each(|(y, f)| *y = *y * by * f),
                    None => row.iter_mut().for_each(|y| *y *= by),
                }
            }
        }
        return;
    }
    let mut product = PRODUCT.take();
    let mut first = 0;
    for part in mantissa_model::flow::parts(m, ROWS) {
        let of_part = &mut out[part.start * n..part.end * n];
        product.resize(of_part.len(), 0.0);
        gemm(a.slice(part.clone()), b, &mut product, false);
        for (i, (row, from)) in of_part.chunks_exact_mut(n).zip(product.chunks_exact(n)).enumerate() {
            let by = factor * a.factors.map_or(1.0, |factors| factors[first + i]);
            match b.factors {
                Some(factors) => {
                    row.iter_mut().zip(from).zip(factors).for_each(|((y, x), f)| *y += x * by * f);
                }
                None => kernels().axpy(by, from, row),
            }
        }
        first += part.len();
    }
    PRODUCT.set(product);
}

fn gemm(a: FormRef<'_>, b: FormRef<'_>, out: &mut [f32], accumulate: bool) {
    let (m, n, k) = (a.lines(), b.lines(), a.k);
    let to = MatMut::new(out, m, n);
    match (a.data, b.data) {
        (StoreRef::Bf16(a), StoreRef::Bf16(b)) => {
            kernels().gemm_bf16_nt(MatRef::new(a, m, k), MatRef::new(b, n, k), to, accumulate);
        }
        (StoreRef::F16(a), StoreRef::F16(b)) => {
            kernels().gemm_f16_nt(MatRef::new(a, m, k), MatRef::new(b, n, k), to, accumulate);
        }
        (a, b) => {
            let (a, b) = (a.widened(), b.widened());
            kernels().gemm_nt(MatRef::new(&a, m, k), MatRef::new(&b, n, k), to, accumulate);
        }
    }
}
