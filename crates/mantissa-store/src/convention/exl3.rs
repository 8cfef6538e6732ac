//! EXL3 (exllamav3): trellis codes between two rotations.
//!
//! For a module with weight `[N, K]`, both multiples of 128:
//! - `trellis` I16 `[K/16, N/16, 16·b]` (`b` 1 to 8, or half-integer with `mul1`): tiles of the transposed, rotated
//!   weight ([`mantissa_num::trellis`]).
//! - `suh` F16 `[K]` and `svh` F16 `[N]`: signs and scales of input and output (in older files `su` and `sv` I16, one
//!   bit per sign).
//! - A scalar `mcg` or `mul1`, whose presence selects the code book.
//!
//! `y = svh · H(C · H(suh · x))`, with `H` the Hadamard matrices of blocks of 128, over √128.
//!
//! Source: exllamav3 0.0, `modules/quant/exl3.py`, `exllamav3_ext/quant/pack.cu`; half-integer rates:
//! `exl3_lib/quantize.py` (`frac_k`).

mod write;

use mantissa_num::trellis::{TILE, Trellis, TrellisBook};
use mantissa_num::{Codes, Format, Quantized, Scheme};
use serde_json::Value;

use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, ModelFiles, ModelPlan, NamedBytes, Opened,
    PlannedLayer, SideTensors, Storable, StoredLinear,
};
use crate::{Dtype, Result, TensorSpec};

pub use write::{FILE_NAME, quantization_config, specs, tensor_storage, tensors};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "exl3";

/// Order of the rotations.
const ROTATED: usize = 128;

/// Weight of `module`, `[rows, cols]`, with its input and output rotations.
///
/// # Errors
/// A tensor of the module is missing or has another dtype or shape.
fn weight(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
    let name = format!("{module}.trellis");
    if !files.has(&name) {
        return Ok(files.dense(module, rows, cols)?.into());
    }
    let whole = rows.is_multiple_of(ROTATED) && cols.is_multiple_of(ROTATED);
    if !whole {
        return Err(files.fault(&name, format!("[{rows}, {cols}]"), format!("multiples of {ROTATED}"), ""));
    }
    let (trellis, bytes) = codes(files, &name, book(files, module)?, rows, cols)?;
    let mut scales = signs(files, module, ["suh", "su"], cols)?;
    scales.extend(signs(files, module, ["svh", "sv"], rows)?);
    let (codes, scales) = (Codes::Packed(bytes), Codes::U16(scales));
    let q =
        Quantized { codes, scales: scales.into(), ..Quantized::empty(Format::Trellis(trellis), rows, cols) };
    files.unfolded(&name, &q)
}

fn book(files: &ModelFiles, module: &str) -> Result<TrellisBook> {
    for (suffix, book) in [("mcg", TrellisBook::Mcg), ("mul1", TrellisBook::Mul1)] {
        let name = format!("{module}.{suffix}");
        if !files.has(&name) {
            continue;
        }
        let meta = files.meta(&name)?;
        let single: &[usize] = if meta.shape.is_empty() { &[] } else { &[1] };
        let bytes = files.read_exact(&name, &[Dtype::I32, Dtype::U32], single)?;
        if bytes != book.multiplier().to_le_bytes() {
            return Err(files.fault(&name, format!("{bytes:x?}"), format!("{:#x}", book.multiplier()), ""));
        }
        return Ok(book);
    }
    Ok(TrellisBook::ThreeInst)
}

/// Trellis and its tiles, in the order of [`mantissa_num::trellis`].
fn codes(
    files: &ModelFiles,
    name: &str,
    book: TrellisBook,
    rows: usize,
    cols: usize,
) -> Result<(Trellis, Vec<u8>)> {
    let meta = files.meta(name)?;
    let width = meta.shape.last().copied().unwrap_or(0);
    // Half a bit per weight is half a line of a tile; only one code book supports it.
    let whole = width.is_multiple_of(TILE) || (book == TrellisBook::Mul1 && width.is_multiple_of(TILE / 2));
    let trellis = u8::try_from(2 * width / TILE).ok().and_then(|bits| Trellis::new(bits, book, true));
    let Some(trellis) = trellis.filter(|_| whole) else {
        let allowed = "a last axis of 16 · (1 to 8), or of 8 more with mul1";
        return Err(files.fault(name, format!("shape {:?}", meta.shape), allowed, ""));
    };
    let shape = [cols / TILE, rows / TILE, width];
    Ok((trellis, files.read_exact(name, &[Dtype::I16, Dtype::U16], &shape)?))
}

/// Scales with their signs as f16 patterns, or signs packed to bits (1 is negative).
fn signs(files: &ModelFiles, module: &str, [scales, packed]: [&str; 2], n: usize) -> Result<Vec<u16>> {
    let name = format!("{module}.{scales}");
    let old = format!("{module}.{packed}");
    if files.has(&name) || !files.has(&old) {
        let bytes = files.read_exact(&name, &[Dtype::F16], &[n])?;
        files.expect_finite(&name, Dtype::F16, &bytes)?;
        return Ok(bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect());
    }
    let bytes = files.read_exact(&old, &[Dtype::I16, Dtype::U16], &[n / 16])?;
    let sign = |i: usize| if bytes[i / 8] >> (i % 8) & 1 == 1 { 0xbc00 } else { 0x3c00 };
    Ok((0..n).map(sign).collect())
}

/// EXL3, read by exllamav3.
#[derive(Debug)]
pub(super) struct Exl3;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Exl3);

impl Convention for Exl3 {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, |_, _| Ok(Exl3))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts::default())
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        _: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        tensors(plan, q)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        Ok(quantization_config(mean_bits(model), model.weights))
    }

    fn side_files(&self) -> &'static [&'static str] {
        &[FILE_NAME]
    }

    fn side_config(
        &self,
        model: &ModelPlan<'_>,
        quantization: &Value,
    ) -> Storable<Option<(&'static str, Value)>> {
        Ok(Some((FILE_NAME, tensor_storage(quantization, model.specs))))
    }

    /// Gives a trellis the per-channel scale of EXL3.
    fn as_stored(&self, mut scheme: Scheme, _dtype: Dtype) -> Scheme {
        if let Format::Trellis(trellis) = &mut scheme.format {
            trellis.channels = true;
        }
        scheme
    }
}

/// Mean code bits over the trellis-coded weights.
fn mean_bits(model: &ModelPlan<'_>) -> f64 {
    let half_bits = |layer: &PlannedLayer<'_>| {
        layer.scheme.format.trellis().map_or(0, |trellis| trellis.half_bits() * layer.rows * layer.cols)
    };
    let bits = model.layers.iter().map(half_bits).sum::<usize>();
    bits as f64 / (2 * (model.weight_count() as u64).max(1)) as f64
}

impl Opened for Exl3 {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("trellis", &[])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        weight(files, module, rows, cols)
    }
}
