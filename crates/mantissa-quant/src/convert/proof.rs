//! Comparison of a converted output with its source.

use std::path::Path;

use mantissa_model::LinearInfo;
use mantissa_num::RowKind;
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};

use super::recode;
use crate::error::{QuantError, Refused, Result};
use crate::plan::{Plan, PlannedLinear, WeightJob};
use crate::values::{values_of, weight_of};

/// Compares every layer of the output at `staged` with the source.
///
/// # Errors
/// [`QuantError::NotLossless`] names the layers that differ, which is a fault of a reader or a writer.
pub(crate) fn prove(plan: &Plan, source: &ModelFiles, staged: &Path) -> Result<()> {
    let WeightJob::Convert { drops_inputs, .. } = plan.job else { return Ok(()) };
    let written = ModelFiles::open(staged)?;
    let mut refused = Vec::new();
    for PlannedLinear { info, .. } in &plan.linears {
        let ours = weight_of(&written, info)?;
        let mut theirs = weight_of(source, info)?;
        theirs.input = theirs.input.filter(|_| !drops_inputs);
        if let Err(why) = same(info, ours, theirs)? {
            refused.push((info.module.clone(), why));
        }
    }
    match refused.is_empty() {
        true => Ok(()),
        false => Err(QuantError::not_lossless(plan.container, plan.linears.len(), &Refused::layers(refused))),
    }
}

/// Checks that two layers compute the same function.
fn same(info: &LinearInfo, a: LinearWeight, b: LinearWeight) -> Result<std::result::Result<(), String>> {
    // The kind of row (token, ...) does not affect the values.
    let input = |weight: &LinearWeight| {
        let mut input = weight.input.clone()?;
        input.scheme = input.scheme.with_rows(RowKind::Token);
        Some((input.outer.take(), input))
    };
    let close = match (input(&a), input(&b)) {
        (None, None) => true,
        // One format may store the scale as the reciprocal of the other's.
        (Some((a, x)), Some((b, y))) => {
            let apart = a.zip(b).map_or(0, |(a, b): (f32, f32)| a.to_bits().abs_diff(b.to_bits()));
            x == y && a.is_some() == b.is_some() && apart <= 1
        }
        _ => false,
    };
    if !close {
        return Ok(Err("expected the source's input scheme and scale, got others".to_owned()));
    }
    if let (Weight::Quantized(a), Weight::Quantized(b)) = (&a.weight, &b.weight)
        && let Some(verdict) = recode::same_but_for_reciprocal(a, b)
    {
        return Ok(verdict);
    }
    let (a, b) = (values_of(info, a)?, values_of(info, b)?);
    let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) else { return Ok(Ok(())) };
    let (row, col) = (at / info.cols, at % info.cols);
    Ok(Err(format!("element [{row}, {col}]: expected {:e}, got {:e}", b[at], a[at])))
}
