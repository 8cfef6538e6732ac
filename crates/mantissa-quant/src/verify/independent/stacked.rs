//! One of the experts that gpt-oss stores stacked in MXFP4, by the description of its layout.

use mantissa_store::convention::{ModelFiles, Stack};
use mantissa_store::{Dtype, Error};

use super::{Reader, Result, Scales, Stored, float_values, power_of_two};

/// Elements that share a scale.
const GROUP: usize = 32;

/// The weight `[rows, cols]` of an expert, to be decoded row by row.
///
/// # Errors
/// A tensor is missing or too short.
pub(in crate::verify) fn open(
    files: &ModelFiles,
    module: &str,
    stack: &Stack,
    rows: usize,
    cols: usize,
) -> Result<Stored> {
    let groups = cols / GROUP;
    // Row r of the expert's projection among all rows of all experts.
    let part = |suffix: &str, row_bytes: usize| -> Result<Vec<u8>> {
        let name = format!("{}_{suffix}", stack.tensor);
        let missing = || Error::NoTensor { path: files.dir().to_owned(), tensor: name.clone() };
        let meta = files.checkpoint().get(&name).ok_or_else(missing)?;
        let expected = stack.experts * stack.turns * rows * row_bytes;
        if !matches!(meta.dtype, Dtype::U8 | Dtype::F8E8M0) || meta.len != expected as u64 {
            let found = format!("{} bytes of {}", meta.len, meta.dtype);
            return Err(Error::field(files.dir(), &name, found, format!("{expected} bytes"), ""));
        }
        let mut out = vec![0; rows * row_bytes];
        for (r, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let row = (stack.expert * rows + r) * stack.turns + stack.turn;
            files.checkpoint().read_range(&name, (row * row_bytes) as u64, out)?;
        }
        Ok(out)
    };
    let (codes, scales) = (part("blocks", groups * GROUP / 2)?, part("scales", groups)?);
    let values = scales.into_iter().map(power_of_two).collect();
    let scales = Scales { values, down: rows, across: groups, side: (1, GROUP), flat: None };
    let reader = Reader { files, module, rows, cols };
    Ok(Stored { scales: Some(scales), ..reader.stored(codes, 4, 8, float_values(2, 1, 1)) })
}
