//! EXL3 (exllamav3), read: codes of a trellis between two rotations.
//!
//! For a module with weight `[N, K]`, both multiples of 128: `trellis` I16 `[K/16, N/16, 16·b]` (`b` 1 to 8, or half-integer with `mul1`), tiles of the transposed and
//! rotated weight ([`mantissa_num::trellis`]); `suh` F16 `[K]` and `svh` F16 `[N]`, signs and scales of input and output (in
//! older files `su` and `sv` I16, a bit for each sign); a scalar `mcg` or `mul1`, whose presence chooses the code book.
//! `y = svh · H(C · H(suh · x))` with `H` the Hadamard matrices of blocks of 128, over √128.
//!
//! Source: exllamav3 0.0, `modules/quant/exl3.py`, `exllamav3_ext/quant/pack.cu`; of half-integer rates `exl3_lib/quantize.py` (`frac_k`).

use mantissa_num::Hadamard;
use mantissa_num::minifloat::F16;
use mantissa_num::stored::{Map, Transforms};
use mantissa_num::trellis::{TILE, TrellisBook, place, states};

use super::{ModelFiles, Weight};
use crate::{Dtype, Result};

/// `quant_method` of this convention.
pub const QUANT_METHOD: &str = "exl3";

/// Order of the rotations.
const ROTATED: usize = 128;

/// The weight of `module`, `[rows, cols]`, with the rotations around it.
///
/// # Errors
/// A tensor of the module is missing or has another dtype or shape.
pub(super) fn linear(
    files: &ModelFiles,
    module: &str,
    rows: usize,
    cols: usize,
) -> Result<(Weight, Transforms)> {
    let name = format!("{module}.trellis");
    if !files.has(&name) {
        return Ok((files.dense(module, rows, cols)?, Transforms::default()));
    }
    let whole = rows.is_multiple_of(ROTATED) && cols.is_multiple_of(ROTATED);
    let Some(hadamard) = Hadamard::new(ROTATED).filter(|_| whole) else {
        return Err(files.fault(&name, format!("[{rows}, {cols}]"), format!("multiples of {ROTATED}"), ""));
    };
    let weight = Weight::F16(decode(files, &name, book(files, module)?, rows, cols)?);
    let rotation = || Map::Hadamard(hadamard.clone());
    let before = vec![Map::Diag(signs(files, module, ["suh", "su"], cols)?), rotation()];
    let after = vec![rotation(), Map::Diag(signs(files, module, ["svh", "sv"], rows)?)];
    Ok((weight, Transforms { before, after, extras: Vec::new() }))
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

/// The rotated weight `[rows, cols]` as f16 patterns.
fn decode(files: &ModelFiles, name: &str, book: TrellisBook, rows: usize, cols: usize) -> Result<Vec<u16>> {
    let meta = files.meta(name)?;
    let width = meta.shape.last().copied().unwrap_or(0);
    let half_bits = 2 * width / TILE;
    // Half a bit more to the weight is half a line of a tile, and only one code book has it.
    let whole = width.is_multiple_of(TILE) || (book == TrellisBook::Mul1 && width.is_multiple_of(TILE / 2));
    if !whole || !(2..=16).contains(&half_bits) {
        let allowed = "a last axis of 16 · (1 to 8), or of 8 more with mul1";
        return Err(files.fault(name, format!("shape {:?}", meta.shape), allowed, ""));
    }
    let bytes = files.read_exact(name, &[Dtype::I16, Dtype::U16], &[cols / TILE, rows / TILE, width])?;
    let table = book.table();
    let mut weight = vec![0; rows * cols];
    for (tile, bytes) in bytes.chunks_exact(2 * width).enumerate() {
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let states = states(&words, half_bits)
            .ok_or_else(|| files.fault(name, "a wrong length", "whole tiles", ""))?;
        let (down, across) = (tile / (rows / TILE) * TILE, tile % (rows / TILE) * TILE);
        for (i, state) in states.into_iter().enumerate() {
            let (row, col) = place(i);
            weight[(across + col) * cols + down + row] = table[usize::from(state)];
        }
    }
    Ok(weight)
}

/// Scales with their signs, or signs packed to bits: a set one is negative.
fn signs(files: &ModelFiles, module: &str, [scales, packed]: [&str; 2], n: usize) -> Result<Vec<f32>> {
    let name = format!("{module}.{scales}");
    let old = format!("{module}.{packed}");
    if files.has(&name) || !files.has(&old) {
        let bytes = files.read_exact(&name, &[Dtype::F16], &[n])?;
        files.expect_finite(&name, Dtype::F16, &bytes)?;
        return Ok(bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| F16.decode(u16::from_le_bytes(*b).into()))
            .collect());
    }
    let bytes = files.read_exact(&old, &[Dtype::I16, Dtype::U16], &[n / 16])?;
    let sign = |i: usize| if bytes[i / 8] >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
    Ok((0..n).map(sign).collect())
}
