//! Outliers in mantissa's own format, row by row. For a weight `n` `[rows, cols]`: `n.outlier_counts` `[rows]`, the
//! number per row, and `n.outlier_columns`, both U16 (U32 from 65536 columns on), and `n.outlier_values` F16, which
//! are added to the decoded values.

use mantissa_num::Rounding;
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::stored::{Extra, MisfitError};

use crate::convention::{LinearPlan, ModelFiles, NamedBytes, NotStorable, Storable};
use crate::{Dtype, Result, TensorSpec};

/// Suffixes of the tensors that hold the outliers of a weight.
pub const OUTLIER_PARTS: [&str; 3] = ["outlier_counts", "outlier_columns", "outlier_values"];

/// Tensors of `count` outliers of the weight `n`.
pub(super) fn specs(n: &str, (rows, cols): (usize, usize), count: usize) -> Vec<TensorSpec> {
    let integers = if cols > usize::from(u16::MAX) { Dtype::U32 } else { Dtype::U16 };
    let shapes = [(integers, rows), (integers, count), (Dtype::F16, count)];
    let spec = |(part, (dtype, len)): (&str, _)| TensorSpec::new(format!("{n}.{part}"), dtype, vec![len]);
    OUTLIER_PARTS.into_iter().zip(shapes).map(spec).collect()
}

/// Bits of `count` outliers of a weight `[rows, cols]`; 0 without outliers.
pub fn outlier_bits(rows: usize, cols: usize, count: usize) -> u64 {
    if count == 0 {
        return 0;
    }
    let bits = |spec: &TensorSpec| spec.dtype.bits() * spec.shape.iter().map(|&n| n as u64).product::<u64>();
    specs("", (rows, cols), count).iter().map(bits).sum()
}

/// Bytes of the tensors declared by [`specs`]. Values beyond f16 are clamped to its largest.
///
/// # Errors
/// [`NotStorable`] unless the side tensors are outliers with the planned count and shape.
pub(super) fn tensors(plan: &LinearPlan<'_>, extra: &Extra) -> Storable<NamedBytes> {
    let refuse = |why: String| Err(NotStorable { scheme: plan.scheme.to_string(), why });
    let Extra::Sparse { starts, index, values } = extra else {
        return refuse(format!("{}: native stores outliers, but no other side tensors", plan.module));
    };
    if let Err(error) = extra.check(plan.rows, plan.cols) {
        return refuse(format!("{}: {error}", plan.module));
    }
    if index.len() != plan.outliers {
        return refuse(format!("{}: {} outliers where {} fit", plan.module, index.len(), plan.outliers));
    }
    let value = |v: &f32| {
        let code = F16.encode(v.clamp(-F16.max(), F16.max()), Overflow::Special, Rounding::NearestEven, 0);
        (code as u16).to_le_bytes()
    };
    let specs = specs(&format!("{}.weight", plan.module), (plan.rows, plan.cols), plan.outliers);
    let wide = specs.iter().any(|spec| spec.dtype == Dtype::U32);
    let integers = |all: &mut dyn Iterator<Item = u32>| -> Vec<u8> {
        // All are at most the number of columns.
        if wide {
            all.flat_map(u32::to_le_bytes).collect()
        } else {
            all.flat_map(|i| (i as u16).to_le_bytes()).collect()
        }
    };
    let bytes = [
        integers(&mut starts.windows(2).map(|span| span[1] - span[0])),
        integers(&mut index.iter().copied()),
        values.iter().flat_map(value).collect(),
    ];
    Ok(specs.into_iter().map(|spec| spec.name).zip(bytes).collect())
}

/// The outliers of the weight `n`, if it has some.
pub(super) fn read(files: &ModelFiles, n: &str, (rows, cols): (usize, usize)) -> Result<Option<Extra>> {
    let [counts, columns, _] = OUTLIER_PARTS.map(|part| format!("{n}.{part}"));
    if !files.has(&counts) && !files.has(&columns) {
        return Ok(None);
    }
    let count = match files.meta(&columns)?.shape.as_slice() {
        &[count] => count,
        other => return Err(files.fault(&columns, format!("shape {other:?}"), "a list", "")),
    };
    let mut read = Vec::new();
    for spec in specs(n, (rows, cols), count) {
        let bytes = files.read_exact(&spec.name, &[spec.dtype], &spec.shape)?;
        if spec.dtype == Dtype::F16 {
            files.expect_finite(&spec.name, spec.dtype, &bytes)?;
        }
        read.push((spec.dtype, bytes));
    }
    let word = |b: &[u8; 2]| u32::from(u16::from_le_bytes(*b));
    let words = |(dtype, bytes): &(Dtype, Vec<u8>)| -> Vec<u32> {
        match dtype {
            Dtype::U32 => bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
            _ => bytes.as_chunks::<2>().0.iter().map(word).collect(),
        }
    };
    let [row_counts, index, values] = &read[..] else { return Ok(None) };
    let mut starts = vec![0u32];
    for row_count in words(row_counts) {
        let end = starts.last().copied().unwrap_or(0).checked_add(row_count);
        let found = || files.fault(&counts, "more outliers than 2^32", format!("{count} in all"), "");
        starts.push(end.ok_or_else(found)?);
    }
    let values = words(values).into_iter().map(|code| F16.decode(code)).collect();
    let extra = Extra::Sparse { starts, index: words(index), values };
    let misfit = |error: MisfitError| {
        files.fault(&counts, format!("{}: {}", error.what, error.found), error.allowed, "")
    };
    extra.check(rows, cols).map_err(misfit)?;
    rising(&extra).map_err(|row| {
        files.fault(
            &columns,
            format!("columns of row {row} that do not ascend"),
            "each column once, in order",
            "",
        )
    })?;
    Ok(Some(extra))
}

/// First row with columns that do not ascend.
fn rising(extra: &Extra) -> std::result::Result<(), usize> {
    let Extra::Sparse { starts, index, .. } = extra else { return Ok(()) };
    let rises = |span: &[u32]| {
        let columns = &index[span[0] as usize..span[1] as usize];
        columns.windows(2).all(|pair| pair[0] < pair[1])
    };
    starts.windows(2).position(|span| !rises(span)).map_or(Ok(()), Err)
}
