//! Linear layers as they run: weights repacked once for the kernels, inputs quantized on the fly.
//!
//! A weight of integer codes (integers, small tables, 4-bit floats, GGUF's blocks) becomes
//! [`Panels`](mantissa_kernels::packed::Panels) and multiplies 8-bit activations; a weight of floats becomes
//! [`FloatPanels`](mantissa_kernels::packed::FloatPanels) and multiplies f32, or bf16 where the processor does. Both
//! run on a [`Device`]. What has no
//! such form runs from its stored codes, strip by strip; [`PreparedLinear::choice`] says so, and why.

mod choice;
mod floats;
mod input;
mod integers;
mod outliers;
mod strips;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use mantissa_kernels::device::{Cpu, Device, PackedWeight, Product};
use mantissa_kernels::{for_each, kernels};
use mantissa_model::{ForwardError, LOW_RANK_TOKENS, Linear, LoadError, Table, add_extra, check_weight};
use mantissa_num::stored::{Extra, Transforms};
use mantissa_num::{Quantized, Rule, Scheme};
use mantissa_store::convention::{LinearWeight, Weight};

pub use self::choice::KernelChoice;
use self::input::Input;
pub(crate) use self::integers::scale_code;
use self::outliers::Outliers;

/// Most weights of one call of the kernels.
const MOST_WEIGHTS: usize = 16;

/// Most inputs of a call of [`forward`].
pub(crate) const MOST_INPUTS: usize = MOST_WEIGHTS;

/// A linear layer `y = x Wᵀ + b`, prepared for running.
#[derive(Debug)]
pub struct PreparedLinear {
    module: String,
    rows: usize,
    cols: usize,
    weight: Prepared,
    bias: Option<Vec<f32>>,
    input: Input,
    transforms: Transforms,
    /// Format of the stored weight.
    stored: String,
}

/// A weight in the form that runs.
#[derive(Debug)]
enum Prepared {
    /// Packed for the device.
    Packed(<Cpu<'static> as Device>::Weight),
    /// Stored codes, for this reason.
    Stored(Box<Linear>, &'static str),
}

/// One linear layer of a call to [`forward`].
#[derive(Debug)]
pub struct PreparedMatmul<'a> {
    /// The linear layer.
    pub linear: &'a PreparedLinear,
    /// Index of the input that it reads.
    pub input: usize,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to `out`, false to overwrite it.
    pub accumulate: bool,
}

/// An input of [`forward`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows<'a> {
    /// Values, `[rows, cols]`; those beyond the first `tokens` rows are padding.
    pub x: &'a [f32],
    /// Rows that are computed.
    pub tokens: usize,
}

/// Scratch of [`forward`]; grows at the first use of a shape.
#[derive(Debug, Default)]
pub struct Scratch {
    inputs: <Cpu<'static> as Device>::Scratch,
    /// Transformed copy of the input.
    mapped: Vec<f32>,
    /// Quantized copy of the input.
    input: Vec<f32>,
    outliers: Outliers,
    /// Outputs before the transforms.
    output: Vec<f32>,
}

impl PreparedLinear {
    /// Prepares a weight as a checkpoint stores it, on up to `threads` threads. `module` is its name in errors.
    ///
    /// # Errors
    /// As [`Linear::new`], and [`LoadError::Memory`].
    pub fn new(module: &str, weight: LinearWeight, threads: usize) -> Result<Self, LoadError> {
        let input = Input::new(check_weight(module, &weight)?);
        let LinearWeight { rows, cols, weight, bias, transforms, .. } = weight;
        let stored = format_name(&weight);
        let sums = match &weight {
            Weight::Quantized(q) if input.shift != 0.0 => Some(row_sums(q, threads)),
            _ => None,
        };
        let weight = prepare(module, weight, (rows, cols), &input, threads)?;
        let bias = match (sums, &weight) {
            (Some(sums), Prepared::Packed(PackedWeight::Integers(_))) => {
                let shift = f64::from(input.shift);
                let bias = bias.unwrap_or_else(|| vec![0.0; rows]);
                Some(
                    bias.iter()
                        .zip(sums)
                        .map(|(bias, sum)| (f64::from(*bias) - shift * sum) as f32)
                        .collect(),
                )
            }
            _ => bias,
        };
        Ok(PreparedLinear { module: module.into(), rows, cols, weight, bias, input, transforms, stored })
    }

    /// Prepares a table whose rows are looked up, such as an embedding: transforms are folded into it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn table(module: &str, weight: LinearWeight, threads: usize) -> Result<Self, LoadError> {
        if weight.transforms.is_empty() {
            return Self::new(module, weight, threads);
        }
        let (rows, cols, bias) = (weight.rows, weight.cols, weight.bias.clone());
        let folded = Linear::new(module, LinearWeight { input: None, ..weight })?.folded();
        let mut values = vec![0.0; rows * cols];
        values.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, out)| folded.row(row, out));
        let transforms = Transforms::default();
        let weight = LinearWeight { rows, cols, weight: Weight::F32(values), bias, input: None, transforms };
        Self::new(module, weight, threads)
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Module name.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Bytes that a pass over one token reads.
    pub fn bytes(&self) -> u64 {
        let codes = match &self.weight {
            Prepared::Packed(weight) => weight.bytes() as u64,
            Prepared::Stored(linear, _) => linear.stored_bytes() as u64,
        };
        codes + self.low_rank().map(|(_, values)| 4 * values as u64).sum::<u64>()
    }

    /// Rank of each low-rank side tensor, such as an adapter, and the number of its values.
    fn low_rank(&self) -> impl Iterator<Item = (usize, usize)> {
        self.transforms.extras.iter().filter_map(|extra| match extra {
            Extra::LowRank { rank, down, up } => Some((*rank, down.len() + up.len())),
            _ => None,
        })
    }

    /// True if it multiplies integers.
    pub fn is_integer(&self) -> bool {
        matches!(self.weight, Prepared::Packed(PackedWeight::Integers(_)))
    }

    /// Kernel that runs it, and the reason if that is no kernel of its own.
    pub fn choice(&self) -> KernelChoice {
        KernelChoice::of(self)
    }

    /// True if both layers read the same form of an input, so that one quantization serves them.
    fn reads_with(&self, other: &PreparedLinear) -> bool {
        let same = self.transforms.before.is_empty()
            && other.transforms.before.is_empty()
            && self.input == other.input;
        same && match (&self.weight, &other.weight) {
            (Prepared::Packed(a), Prepared::Packed(b)) => Cpu::new(1).reads_with(a, b),
            _ => false,
        }
    }
}

/// Rows that a thread sums at a time.
const SUMMED_ROWS: usize = 16;

/// Sums of the dequantized rows of a weight.
fn row_sums(q: &Quantized, threads: usize) -> Vec<f64> {
    let mut sums = vec![0.0; q.rows];
    for_each(threads, sums.chunks_mut(SUMMED_ROWS).enumerate(), |(i, sums)| {
        let mut values = vec![0.0; sums.len() * q.cols];
        let first = i * SUMMED_ROWS;
        q.dequantize_rows(first..first + sums.len(), &mut values);
        for (sum, row) in sums.iter_mut().zip(values.chunks_exact(q.cols.max(1))) {
            *sum = row.iter().map(|w| f64::from(*w)).sum();
        }
    });
    sums
}

/// Names the format of a stored weight.
fn format_name(weight: &Weight) -> String {
    match weight {
        Weight::F32(_) => "f32".into(),
        Weight::Bf16(_) => "bf16".into(),
        Weight::F16(_) => "f16".into(),
        // The writer's rule is not stored.
        Weight::Quantized(q) => {
            let text = Scheme::new(q.format.clone(), Rule::Amax).to_string();
            text.split_once(':').map_or(text.clone(), |(name, _)| name.to_owned())
        }
    }
}

/// Repacks a weight.
fn prepare(
    module: &str,
    weight: Weight,
    (rows, cols): (usize, usize),
    input: &Input,
    threads: usize,
) -> Result<Prepared, LoadError> {
    let memory = || LoadError::Memory { what: "prepared weights", bytes: (rows * cols) as u64 };
    let place = |weight: Option<PackedWeight>| {
        let placed = weight.and_then(|weight| Cpu::new(threads).place(weight));
        placed.map(Prepared::Packed).ok_or_else(memory)
    };
    // Floats may round to bf16 what must stay unquantized.
    let kept = input.keep_above().map(|_| "outliers of the input stay unquantized");
    let reason = match (&weight, kept) {
        (Weight::Quantized(q), kept) => match (integers::panels(q, input.grid, threads), kept) {
            (Ok(panels), _) => return place(panels.map(PackedWeight::Integers)),
            (Err(_), Some(reason)) => reason,
            (Err(reason), None) => match floats::minifloats(q, threads) {
                Some(rows) => return place(rows.map(PackedWeight::Floats)),
                None => reason,
            },
        },
        (_, Some(reason)) => reason,
        (dense, None) => {
            return place(floats::dense(dense, rows, cols, threads).map(PackedWeight::Floats));
        }
    };
    let plain =
        LinearWeight { rows, cols, weight, bias: None, input: None, transforms: Transforms::default() };
    Ok(Prepared::Stored(Box::new(Linear::new(module, plain)?), reason))
}

impl Table for PreparedLinear {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        match &self.weight {
            Prepared::Packed(weight) => Cpu::new(1).row(weight, row, out),
            Prepared::Stored(linear, _) => linear.row(row, out),
        }
    }
}

/// Runs linear layers, each on one of at most 16 `inputs`: transforms, activation quantization, product and bias, on up
/// to `threads` threads. Consecutive layers that read the same form of an input run in one dispatch, and those of the
/// same input share its quantization.
///
/// # Errors
/// [`ForwardError::Input`] if an input cannot be quantized.
pub fn forward<'a>(
    jobs: impl Iterator<Item = PreparedMatmul<'a>>,
    inputs: &[Rows<'_>],
    scratch: &mut Scratch,
    threads: usize,
) -> Result<(), ForwardError> {
    let mut jobs = jobs.peekable();
    while let Some(first) = jobs.next() {
        let linear = first.linear;
        let mut slots: [Option<PreparedMatmul<'_>>; MOST_WEIGHTS] = [const { None }; MOST_WEIGHTS];
        slots[0] = Some(first);
        for slot in &mut slots[1..] {
            *slot = jobs.next_if(|job| job.linear.reads_with(linear));
            if slot.is_none() {
                break;
            }
        }
        together(linear, &mut slots, inputs, scratch, threads)?;
    }
    Ok(())
}

/// Runs linear layers that read the same form of an input as `first`, which is one of them.
fn together(
    first: &PreparedLinear,
    jobs: &mut [Option<PreparedMatmul<'_>>],
    inputs: &[Rows<'_>],
    scratch: &mut Scratch,
    threads: usize,
) -> Result<(), ForwardError> {
    // Rows of padding are not computed, nor inputs that no layer here reads.
    let read = |i: usize| jobs.iter().flatten().any(|job| job.input == i);
    let x: [&[f32]; MOST_INPUTS] = std::array::from_fn(|i| match inputs.get(i) {
        Some(rows) if read(i) => &rows.x[..rows.tokens * first.cols],
        _ => &[],
    });
    let x = &x[..inputs.len()];
    for job in jobs.iter_mut().flatten() {
        let out = std::mem::take(&mut job.out);
        job.out = &mut out[..inputs[job.input].tokens * job.linear.rows];
    }
    if first.cols == 0 || first.rows == 0 {
        jobs.iter_mut().flatten().filter(|job| !job.accumulate).for_each(|job| job.out.fill(0.0));
    } else if jobs.iter().flatten().all(|job| job.linear.transforms.is_empty()) {
        products(first, jobs, x, scratch, threads)?;
    } else if jobs.iter().flatten().all(|job| job.linear.transforms.before.is_empty() && !job.accumulate) {
        // Layers with side tensors share the quantization of their input.
        products(first, jobs, x, scratch, threads)?;
        for PreparedMatmul { linear, input, out, .. } in jobs.iter_mut().flatten() {
            around(linear, x[*input], out, threads);
        }
    } else {
        jobs.iter_mut().flatten().try_for_each(|job| transformed(job, x[job.input], scratch, threads))?;
    }
    for job in jobs.iter_mut().flatten() {
        if let Some(bias) = &job.linear.bias {
            job.out.chunks_exact_mut(bias.len()).for_each(|row| kernels().axpy(1.0, bias, row));
        }
    }
    Ok(())
}

/// Maps the product `y` of a layer and adds its side tensors, which read the input `x`.
fn around(linear: &PreparedLinear, x: &[f32], y: &mut [f32], threads: usize) {
    let PreparedLinear { rows, cols, transforms, .. } = linear;
    transforms.after.iter().for_each(|map| map.apply(y, *rows));
    for extra in &transforms.extras {
        let tokens = x.chunks(LOW_RANK_TOKENS * cols).zip(y.chunks_mut(LOW_RANK_TOKENS * rows));
        match extra {
            Extra::LowRank { .. } if threads > 1 && x.len() > LOW_RANK_TOKENS * cols => {
                for_each(threads, tokens, |(x, y)| add_extra(extra, x, y, (*rows, *cols)));
            }
            _ => add_extra(extra, x, y, (*rows, *cols)),
        }
    }
}

/// Runs a layer with transforms or side tensors around its product.
fn transformed(
    job: &mut PreparedMatmul<'_>,
    x: &[f32],
    scratch: &mut Scratch,
    threads: usize,
) -> Result<(), ForwardError> {
    let PreparedMatmul { linear, out, accumulate, .. } = job;
    let (mut mapped, mut y) = (std::mem::take(&mut scratch.mapped), std::mem::take(&mut scratch.output));
    let ready = match linear.transforms.before.as_slice() {
        [] => x,
        maps => {
            mapped.clear();
            mapped.extend_from_slice(x);
            maps.iter().for_each(|map| map.apply(&mut mapped, linear.cols));
            &mapped
        }
    };
    y.clear();
    y.resize(out.len(), 0.0);
    let product = PreparedMatmul { linear, input: 0, out: &mut y, accumulate: false };
    let done = products(linear, &mut [Some(product)], &[ready], scratch, threads);
    around(linear, x, &mut y, threads);
    match accumulate {
        true => kernels().axpy(1.0, &y, out),
        false => out.copy_from_slice(&y),
    }
    (scratch.mapped, scratch.output) = (mapped, y);
    done
}

/// Multiplies weights that read the same form of an input as `first`, which is one of them.
fn products(
    first: &PreparedLinear,
    jobs: &mut [Option<PreparedMatmul<'_>>],
    inputs: &[&[f32]],
    scratch: &mut Scratch,
    threads: usize,
) -> Result<(), ForwardError> {
    let Scratch { inputs: forms, input, outliers, .. } = scratch;
    let mut x: [&[f32]; MOST_INPUTS] = [&[]; MOST_INPUTS];
    outliers.clear();
    let aside = first.input.keep_above().filter(|_| first.is_integer());
    // Codes come from the values themselves.
    let direct = first.input.direct && first.is_integer();
    match &first.input.quantizer {
        Some(quantizer) if !direct || aside.is_some() => {
            input.clear();
            input.extend(inputs.iter().copied().flatten());
            let fault = |error| ForwardError::Input { module: first.module.clone(), error };
            let mut rest = input.as_mut_slice();
            for (i, (x, from)) in x.iter_mut().zip(inputs).enumerate() {
                let values = rest.split_off_mut(..from.len()).unwrap_or_default();
                if let Some(limit) = aside {
                    outliers.set_aside(i, values, first.cols, limit);
                }
                if !direct {
                    quantizer.apply(values, first.cols).map_err(fault)?;
                }
                if first.input.shift != 0.0 && first.is_integer() {
                    values.iter_mut().for_each(|x| *x += first.input.shift);
                }
                *x = values;
            }
        }
        _ => x[..inputs.len()].copy_from_slice(inputs),
    }
    let x = &x[..inputs.len()];
    match &first.weight {
        Prepared::Packed(_) => {
            let products = jobs.iter_mut().flatten().filter_map(|job| match &job.linear.weight {
                Prepared::Packed(weight) => {
                    Some(Product { weight, input: job.input, out: &mut *job.out, accumulate: job.accumulate })
                }
                Prepared::Stored(..) => None,
            });
            Cpu::new(threads).products(products, x, first.cols, first.input.grid, forms);
            for job in jobs.iter_mut().flatten().filter(|_| aside.is_some()) {
                if let Prepared::Packed(PackedWeight::Integers(panels)) = &job.linear.weight {
                    outliers.add(job.input, panels, job.out, threads);
                }
            }
        }
        Prepared::Stored(linear, _) => {
            jobs.iter_mut()
                .flatten()
                .for_each(|job| strips::multiply(linear, x[job.input], job.out, job.accumulate, threads));
        }
    }
    Ok(())
}
