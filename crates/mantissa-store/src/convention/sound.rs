//! Checks of quantized weights in every format: finite values, and zero points in the range of the codes.

use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, Codes, Quantized};

use super::ModelFiles;
use crate::{Error, Result};

/// Source tensors of a weight's parts, for messages.
#[derive(Clone, Copy)]
pub(super) struct Names<'a> {
    pub(super) codes: &'a str,
    pub(super) scales: &'a str,
    pub(super) zeros: &'a str,
}

/// Refuses a weight with a non-finite code, scale or dequantized value, or a zero point out of range. Leaves lists of
/// a wrong length to [`Quantized::check`].
///
/// # Errors
/// [`Error::NonFinite`] and [`Error::Field`] name the tensor.
pub(super) fn check(files: &ModelFiles, names: Names<'_>, q: &Quantized) -> Result<()> {
    check_zeros(files, names.zeros, q)?;
    let largest = check_codes(files, names.codes, q)?;
    check_scales(files, names.scales, q, largest)
}

fn check_zeros(files: &ModelFiles, name: &str, q: &Quantized) -> Result<()> {
    let Format::Affine(Affine { code: Code::Int(bits), .. }) = &q.format else { return Ok(()) };
    let allowed = -(1i32 << (bits - 1))..1i32 << (bits - 1);
    let Some(at) = q.zeros().iter().position(|z| !allowed.contains(z)) else { return Ok(()) };
    let range = format!("{} to {} in {bits} bits", allowed.start, allowed.end - 1);
    Err(files.fault(name, format!("zero point {} at element {at}", q.zeros()[at]), range, ""))
}

/// Refuses non-finite codes; returns the largest magnitude of a code, zero points included.
fn check_codes(files: &ModelFiles, name: &str, q: &Quantized) -> Result<f32> {
    let Codes::U8(codes) = &q.codes else {
        let wide = matches!(q.codes, Codes::U16(_) | Codes::U32(_));
        let values = |i| q.format.element(q.codes.get(i));
        return if wide { refuse(files, name, q.codes.len(), values).map(|()| 1.0) } else { Ok(1.0) };
    };
    if let Format::Affine(Affine { code: Code::Int(bits), .. }) = &q.format {
        let lowest = (1u32 << (bits - 1)) as f32;
        return Ok(if q.zeros().is_empty() { lowest } else { 2.0 * lowest });
    }
    let known = 1u32 << q.format.code_bits().min(8);
    let table: Vec<f32> = (0..known).map(|code| q.format.element(code)).collect();
    if table.iter().any(|v| !v.is_finite()) {
        // Codes narrower than their byte are unpacked, so they are below `known`.
        let value = |i: usize| table.get(usize::from(codes[i])).copied().unwrap_or(0.0);
        refuse(files, name, codes.len(), value)?;
    }
    Ok(table.iter().filter(|v| v.is_finite()).fold(0f32, |amax, v| amax.max(v.abs())))
}

/// Refuses blocks with a scale or largest possible value that is not finite.
fn check_scales(files: &ModelFiles, name: &str, q: &Quantized, largest: f32) -> Result<()> {
    let Some(tree) = q.format.scale() else { return Ok(()) };
    let scale = |i| tree.code.decode(q.scales.get(i));
    refuse(files, name, q.scales.len(), scale)?;
    if let Some(nested) = q.nested() {
        // `Quantized::check` reports lists of another length.
        let known = q.scales.len().min(nested.len() * nested.block);
        return refuse(files, name, known, |i| nested.scale(i, scale(i)) * largest);
    }
    let factor = |i| q.format.decoder(q.scales.get(i), 0, q.outer()).value(1.0);
    let Some(at) = (0..q.scales.len()).find(|&i| !(factor(i) * largest).is_finite()) else { return Ok(()) };
    let outer = q.outer().map_or(String::new(), |outer| format!(" with the tensor's {outer:e}"));
    let found = format!("scale {:e}{outer} at element {at}", scale(at));
    Err(files.fault(name, found, "scales under which every code is a finite f32", ""))
}

fn refuse(files: &ModelFiles, name: &str, len: usize, value: impl Fn(usize) -> f32) -> Result<()> {
    let mut found = (0..len).filter(|&i| !value(i).is_finite());
    let Some(first) = found.next() else { return Ok(()) };
    Err(Error::NonFinite {
        path: files.path_of(name).to_owned(),
        tensor: name.to_owned(),
        count: 1 + found.count() as u64,
        index: first as u64,
        value: value(first),
    })
}
