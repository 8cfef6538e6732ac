//! A linear layer, `y = x Wᵀ + b` with `W` `[rows, cols]` = `[out, in]`, in any storage.
//!
//! A product runs panel by panel: some rows of `W` are dequantized to f32 (into scratch, unless they are f32 already)
//! and multiplied. Every storage uses the same panels, so a layer gives the bits of the dense product with its
//! dequantized weight.

use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_num::codec::Codec;
use mantissa_num::stored::{Extra, Transforms};
use mantissa_num::{Accumulator, Codes, Quantized};
use mantissa_store::convention::{LinearWeight, Weight};

use crate::error::{ForwardError, LoadError};
use crate::factored::Factored;
use crate::flow::parts;
use crate::input::InputQuantizer;
use crate::packed::Packed;
use crate::products::{BF16_PANEL, Products};
use crate::simulated::Simulated;

/// f32 values of a panel, about the size of a core's second-level cache.
const PANEL: usize = 1 << 17;

/// Largest number of tokens for which a product runs row by row, so that a panel in the first-level cache is best.
const FEW: usize = 8;
const FEW_ROWS: usize = 16;

/// Tokens per product with a low-rank side tensor: few, so that every element has the bits of a dot product.
pub const LOW_RANK_TOKENS: usize = 16;

/// A linear layer, or a table of rows such as the embedding.
#[derive(Clone, Debug)]
pub struct Linear {
    module: String,
    rows: usize,
    cols: usize,
    storage: Storage,
    bias: Option<Vec<f32>>,
    input: Option<InputQuantizer>,
    transforms: Transforms,
    /// Accumulation of 8-bit float products, if not in f32.
    simulated: Option<Box<Simulated>>,
    products: Products,
}

#[derive(Clone, Debug)]
enum Storage {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    F16(Vec<u16>),
    Packed(Packed),
    /// Blocks of a codec, row by row.
    Blocks {
        codec: &'static Codec,
        bytes: Vec<u8>,
    },
}

impl Linear {
    /// Creates a layer from a weight as a checkpoint stores it. `module` is its name in errors.
    ///
    /// # Errors
    /// [`LoadError::Weight`] if the parts of the weight do not fit its shape, [`LoadError::InputScheme`] if its input
    /// cannot be quantized token by token, [`LoadError::Transform`] if a side tensor or transform does not fit.
    pub fn new(module: &str, weight: LinearWeight) -> Result<Self, LoadError> {
        let input = check_weight(module, &weight)?;
        let LinearWeight { rows, cols, weight, bias, transforms, .. } = weight;
        let fail = |error| LoadError::Weight { module: module.into(), error };
        let storage = match weight {
            Weight::F32(w) => Storage::F32(w),
            Weight::Bf16(w) => Storage::Bf16(w),
            Weight::F16(w) => Storage::F16(w),
            Weight::Quantized(q) => quantized(&q).map_err(fail)?,
        };
        let (module, simulated, products) = (module.into(), None, Products::default());
        Ok(Linear { module, rows, cols, storage, bias, input, transforms, simulated, products })
    }

    /// Folds side tensors and transforms into an f32 weight; returns the layer unchanged if there are none.
    pub fn folded(self) -> Self {
        if self.transforms.is_empty() {
            return self;
        }
        let mut weight = vec![0.0; self.rows * self.cols];
        for (row, out) in weight.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.row(row, out);
        }
        self.transforms.fold(&mut weight, self.rows, self.cols);
        Linear { storage: Storage::F32(weight), transforms: Transforms::default(), ..self }
    }

    /// Module name.
    pub fn module(&self) -> &str {
        &self.module
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of the weight in memory.
    pub fn stored_bytes(&self) -> usize {
        match &self.storage {
            Storage::F32(w) => 4 * w.len(),
            Storage::Bf16(w) | Storage::F16(w) => 2 * w.len(),
            Storage::Packed(packed) => packed.bytes(),
            Storage::Blocks { bytes, .. } => bytes.len(),
        }
    }

    /// Bias, `[rows]`.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Quantization of the input, which the caller applies once for all layers that share it.
    pub fn input(&self) -> Option<&InputQuantizer> {
        self.input.as_ref()
    }

    /// Scratch that [`forward`](Self::forward) needs for a weight `[rows, cols]`, in f32 values.
    pub fn scratch_len(rows: usize, cols: usize) -> usize {
        panel_rows(cols).min(rows).saturating_mul(cols)
    }

    /// Simulates `accumulator` in the layer's products. Returns true if weight and input are 8-bit floats; all other
    /// products are accumulated in f32.
    pub(crate) fn set_accumulator(&mut self, accumulator: Accumulator) -> bool {
        let simulated = Simulated::new(self.input(), self.factored(), accumulator);
        let fits = simulated.is_some();
        self.simulated = simulated.filter(|_| accumulator != Accumulator::F32).map(Box::new);
        fits
    }

    /// Operand dtype of its products.
    pub fn products(&self) -> Products {
        self.products
    }

    /// Sets the operand dtype of the products with its codes; side tensors are not affected.
    pub fn set_products(&mut self, products: Products) {
        self.products = products;
    }

    /// Codes as elements and factors, if they are 8-bit floats.
    pub(crate) fn factored(&self) -> Option<Factored> {
        match &self.storage {
            Storage::Packed(packed) => packed.factored(),
            _ => None,
        }
    }

    /// Side tensors and transforms.
    pub fn transforms(&self) -> &Transforms {
        &self.transforms
    }

    /// Transforms inputs `x` `[t, cols]`, quantizes them if the input is quantized, and writes the matching `weight`
    /// `[rows, cols]`. Side tensors are folded into the weight; those that read the unquantized input still do.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn apart(&self, x: &mut [f32], weight: &mut [f32]) -> Result<(), ForwardError> {
        if let Some(input) = &self.input {
            self.transforms.before.iter().for_each(|map| map.apply(x, self.cols));
            let fault = |error| ForwardError::Input { module: self.module.clone(), error };
            input.apply(x, self.cols).map_err(fault)?;
        }
        self.apart_weight(weight);
        Ok(())
    }

    /// Writes the `weight` of [`apart`](Self::apart).
    pub(crate) fn apart_weight(&self, weight: &mut [f32]) {
        for (row, out) in weight.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.row(row, out);
        }
        let mut around = self.transforms.clone();
        if self.input.is_some() {
            around.before.clear();
        }
        if !around.is_empty() {
            around.fold(weight, self.rows, self.cols);
        }
    }

    /// Computes `out = x Wᵀ + b`, or `out += x Wᵀ + b` if `accumulate`; `x` `[t, cols]`, `out` `[t, rows]`, `W` with
    /// its side tensors and transforms. The input is not quantized.
    ///
    /// A row of `out` depends only on its row of `x`. Its last bits are the same in every product of more than 64
    /// rows; smaller ones may be summed in another order.
    ///
    /// # Panics
    /// If a slice does not have its shape or `scratch` is shorter than [`scratch_len`](Self::scratch_len).
    pub fn forward(&self, x: &[f32], out: &mut [f32], accumulate: bool, scratch: &mut [f32]) {
        if self.rows == 0 || self.cols == 0 {
            out.iter_mut().filter(|_| !accumulate).for_each(|y| *y = 0.0);
            return;
        }
        let tokens = x.len() / self.cols;
        assert!(
            x.len() == tokens * self.cols && out.len() == tokens * self.rows,
            "linear {}: input {} and output {} are not rows of {} and {}",
            self.module,
            x.len(),
            out.len(),
            self.cols,
            self.rows
        );
        if tokens == 0 {
            return;
        }
        match self.transforms.before.as_slice() {
            [] => self.product(x, None, x, out, accumulate, scratch),
            maps => {
                let mut mapped = x.to_vec();
                maps.iter().for_each(|map| map.apply(&mut mapped, self.cols));
                self.product(&mapped, None, x, out, accumulate, scratch);
            }
        }
    }

    /// Runs [`forward`](Self::forward) on the prepared input of the codes, `ready` (transformed and quantized). `raw`
    /// is the unquantized input; `factored` is the input as elements and factors, if products are not accumulated in
    /// f32.
    fn product(
        &self,
        ready: &[f32],
        factored: Option<&Factored>,
        raw: &[f32],
        out: &mut [f32],
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let codes = |out: &mut [f32], accumulate, scratch: &mut [f32]| match (&self.simulated, factored) {
            (Some(simulated), Some(x)) => simulated.product(x, out, accumulate),
            _ => self.codes(ready, out, accumulate, scratch),
        };
        if self.transforms.after.is_empty() {
            codes(out, accumulate, scratch);
        } else {
            let mut y = vec![0.0; out.len()];
            codes(&mut y, false, scratch);
            self.transforms.after.iter().for_each(|map| map.apply(&mut y, self.rows));
            match accumulate {
                true => out.iter_mut().zip(&y).for_each(|(out, y)| *out += y),
                false => out.copy_from_slice(&y),
            }
        }
        self.transforms.extras.iter().for_each(|extra| add_extra(extra, raw, out, (self.rows, self.cols)));
        if let Some(bias) = &self.bias {
            add_bias(bias, out);
        }
    }

    /// Computes `out = x Cᵀ` or `out += x Cᵀ` with the codes `C` alone.
    fn codes(&self, x: &[f32], out: &mut [f32], accumulate: bool, scratch: &mut [f32]) {
        if self.products == Products::Bf16 {
            return self.codes_in_bf16(x, out, accumulate);
        }
        for rows in panels(self.rows, self.cols, x.len() / self.cols) {
            let panel = self.panel(rows.clone(), &mut *scratch);
            multiply(panel, rows, (self.rows, self.cols), x, out, accumulate);
        }
    }

    /// Computes [`codes`](Self::codes) with both operands in bf16.
    fn codes_in_bf16(&self, x: &[f32], out: &mut [f32], accumulate: bool) {
        let (kernels, tokens) = (kernels().in_common_order(), x.len() / self.cols);
        let mut factors = vec![0; x.len()];
        kernels.f32_to_bf16_factors(x, &mut factors);
        let mut values = vec![0.0; self.cols];
        let mut panel = vec![0; BF16_PANEL.min(self.rows) * self.cols];
        for span in parts(self.rows, BF16_PANEL) {
            let panel = &mut panel[..span.len() * self.cols];
            for (row, out) in span.clone().zip(panel.chunks_exact_mut(self.cols)) {
                self.row(row, &mut values);
                kernels.f32_to_bf16_factors(&values, out);
            }
            let (a, b) =
                (MatRef::new(&factors, tokens, self.cols), MatRef::new(panel, span.len(), self.cols));
            let c = MatMut::with_stride(&mut out[span.start..], tokens, span.len(), self.rows);
            kernels.gemm_bf16_nt(a, b, c, accumulate);
        }
    }

    /// True if the codes of both layers read the same form of an input.
    fn same_input(&self, other: &Linear) -> bool {
        self.input == other.input && self.transforms.before == other.transforms.before
    }

    /// Dequantizes row `row` of the codes into `out` (`[cols]`).
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let span = row * self.cols..(row + 1) * self.cols;
        match &self.storage {
            Storage::F32(w) => out.copy_from_slice(&w[span]),
            Storage::Bf16(w) => kernels().bf16_to_f32(&w[span], out),
            Storage::F16(w) => kernels().f16_to_f32(&w[span], out),
            Storage::Packed(packed) => packed.row(row, out),
            Storage::Blocks { codec, bytes } => {
                let stride = bytes.len() / self.rows;
                kernels().decode_blocks(codec.id, &bytes[row * stride..(row + 1) * stride], out);
            }
        }
    }

    fn panel<'a>(&'a self, rows: Range<usize>, scratch: &'a mut [f32]) -> &'a [f32] {
        if let Storage::F32(w) = &self.storage {
            return &w[rows.start * self.cols..rows.end * self.cols];
        }
        let panel = &mut scratch[..rows.len() * self.cols];
        for (row, out) in rows.zip(panel.chunks_exact_mut(self.cols)) {
            self.row(row, out);
        }
        panel
    }
}

/// One linear layer of [`forward_fused`].
pub(crate) struct LinearMatmul<'a> {
    pub(crate) linear: &'a Linear,
    pub(crate) out: &'a mut [f32],
    pub(crate) accumulate: bool,
}

/// Runs linear layers that read the same input `x`. The input is transformed and quantized into `quantized` (at least
/// `x.len()`) if needed, once for consecutive layers with the same transform and quantizer.
pub(crate) fn forward_fused<'a>(
    jobs: impl IntoIterator<Item = LinearMatmul<'a>>,
    x: &[f32],
    quantized: &mut [f32],
    scratch: &mut [f32],
) -> Result<(), ForwardError> {
    let quantized = &mut quantized[..x.len()];
    let fault = |linear: &Linear| {
        let module = linear.module().to_owned();
        move |error| ForwardError::Input { module, error }
    };
    let mut held: Option<&Linear> = None;
    for LinearMatmul { linear, out, accumulate } in jobs {
        if linear.rows == 0
            || linear.cols == 0
            || (linear.input.is_none() && linear.transforms.before.is_empty())
        {
            linear.forward(x, out, accumulate, scratch);
            continue;
        }
        if !held.is_some_and(|held| held.same_input(linear)) {
            quantized.copy_from_slice(x);
            linear.transforms.before.iter().for_each(|map| map.apply(quantized, linear.cols));
            if let Some(input) = &linear.input {
                input.apply(quantized, linear.cols).map_err(fault(linear))?;
            }
            held = Some(linear);
        }
        let factored = match (&linear.simulated, &linear.input) {
            (Some(_), Some(input)) => input.factored(quantized, linear.cols).map_err(fault(linear))?,
            _ => None,
        };
        linear.product(quantized, factored.as_ref(), x, out, accumulate, scratch);
    }
    Ok(())
}

/// Computes `out = x Wᵀ + b`, or `out += x Wᵀ + b` if `accumulate`, for a borrowed f32 weight `[rows, cols]`, with the
/// bits of [`Linear::forward`]. `x` `[t, cols]`, `out` `[t, rows]`.
///
/// # Panics
/// If a slice does not have its shape or a size is 0.
pub fn forward_f32(
    weight: &[f32],
    bias: Option<&[f32]>,
    (rows, cols): (usize, usize),
    x: &[f32],
    out: &mut [f32],
    accumulate: bool,
) {
    for panel in panels(rows, cols, x.len() / cols) {
        let values = &weight[panel.start * cols..panel.end * cols];
        multiply(values, panel, (rows, cols), x, out, accumulate);
    }
    if let Some(bias) = bias {
        add_bias(bias, out);
    }
}

/// Adds the term of a side tensor to `out` `[t, rows]`, from the unquantized input `x` `[t, cols]`. A row of `out` has the
/// same bits in any number of rows.
pub fn add_extra(extra: &Extra, x: &[f32], out: &mut [f32], (rows, cols): (usize, usize)) {
    let Extra::LowRank { rank, down, up } = extra else { return extra.add(x, out, rows, cols) };
    if *rank == 0 || rows == 0 || cols == 0 {
        return;
    }
    let (down, up) = (MatRef::new(down, *rank, cols), MatRef::new(up, rows, *rank));
    let mut hidden = vec![0.0; LOW_RANK_TOKENS.min(x.len() / cols) * rank];
    for (x, out) in x.chunks(LOW_RANK_TOKENS * cols).zip(out.chunks_mut(LOW_RANK_TOKENS * rows)) {
        let tokens = x.len() / cols;
        let hidden = &mut hidden[..tokens * rank];
        kernels().gemm_nt(MatRef::new(x, tokens, cols), down, MatMut::new(hidden, tokens, *rank), false);
        kernels().gemm_nt(MatRef::new(hidden, tokens, *rank), up, MatMut::new(out, tokens, rows), true);
    }
}

/// Row ranges of the panels of a weight in a product of `tokens` tokens.
fn panels(rows: usize, cols: usize, tokens: usize) -> impl Iterator<Item = Range<usize>> {
    parts(rows, if tokens <= FEW { FEW_ROWS } else { panel_rows(cols) })
}

/// Computes the columns `span` of `out = x Wᵀ` from the panel that holds those rows of `W`.
fn multiply(
    panel: &[f32],
    span: Range<usize>,
    (rows, cols): (usize, usize),
    x: &[f32],
    out: &mut [f32],
    accumulate: bool,
) {
    let tokens = x.len() / cols;
    let (a, b) = (MatRef::new(x, tokens, cols), MatRef::new(panel, span.len(), cols));
    let c = MatMut::with_stride(&mut out[span.start..], tokens, span.len(), rows);
    kernels().gemm_nt(a, b, c, accumulate);
}

fn add_bias(bias: &[f32], out: &mut [f32]) {
    out.chunks_exact_mut(bias.len()).for_each(|row| kernels().axpy(1.0, bias, row));
}

/// Maximum number of rows of a panel. A weight is split into nearly equal panels, so each of several has more than
/// half of this. With 192 rows, packing `x` costs little compared to the product, and no panel uses the path for
/// small products.
fn panel_rows(cols: usize) -> usize {
    (PANEL / cols.max(1)).clamp(384, 1024)
}

/// Checks that the parts of a stored weight fit its shape, and returns the quantizer of its input.
///
/// # Errors
/// As [`Linear::new`].
pub fn check_weight(module: &str, weight: &LinearWeight) -> Result<Option<InputQuantizer>, LoadError> {
    let LinearWeight { rows, cols, weight, bias, input, transforms } = weight;
    let (rows, cols) = (*rows, *cols);
    let fail = |error| LoadError::Weight { module: module.into(), error };
    let check = |what, found: usize, expected: usize| match found == expected {
        true => Ok(()),
        false => Err(fail(mantissa_num::TensorError::Length { what, found, expected, rows, cols })),
    };
    let elements = rows.saturating_mul(cols);
    if let Some(bias) = bias {
        check("bias", bias.len(), rows)?;
    }
    match weight {
        Weight::F32(w) => check("values", w.len(), elements)?,
        Weight::Bf16(w) | Weight::F16(w) => check("values", w.len(), elements)?,
        Weight::Quantized(q) => {
            check("rows", q.rows, rows)?;
            check("columns", q.cols, cols)?;
            q.check().map_err(fail)?;
        }
    }
    let input = input.as_ref().map(|quant| InputQuantizer::new(module, quant)).transpose()?;
    let misfit = |error| LoadError::Transform { module: module.into(), error };
    transforms.check(rows, cols).map_err(misfit)?;
    Ok(input)
}

fn quantized(q: &Quantized) -> Result<Storage, mantissa_num::TensorError> {
    if let (Some(codec), Codes::Packed(bytes)) = (q.format.codec(), &q.codes) {
        return Ok(Storage::Blocks { codec, bytes: bytes.clone() });
    }
    match Packed::new(q) {
        Some(packed) => Ok(Storage::Packed(packed)),
        // Codes of 16 and 32 bits are floats already.
        None => q.dequantize().map(Storage::F32),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
