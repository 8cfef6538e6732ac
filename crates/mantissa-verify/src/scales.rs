//! Scales of blocks: their values, and the block of each element.

use serde_json::Value;

use crate::elements::{float_values, power_of_two};
use crate::reader::Reader;
use crate::tensors::Tensors;

/// Scales as read, with the shapes of their grid and of a block.
pub(crate) struct Scales {
    pub(crate) values: Vec<f32>,
    /// Scales along the rows of the weight.
    pub(crate) down: usize,
    /// Scales along its columns.
    pub(crate) across: usize,
    /// Rows and columns of a block.
    pub(crate) side: (usize, usize),
    /// Elements of a block of the flattened weight, and of a row, in place of a grid.
    pub(crate) flat: Option<(usize, usize)>,
}

impl Scales {
    /// Scale at (`row`, `start`), and the column of `cols` at which the next one begins.
    pub(crate) fn run(&self, row: usize, start: usize, cols: usize) -> (usize, usize) {
        let (at, end) = match self.flat {
            Some((block, per_row)) => {
                let (block, i) = (block.max(1), row * per_row + start);
                (i / block, start + block - i % block)
            }
            None => {
                let (rows, side) = (self.side.0.max(1), self.side.1.max(1));
                let (down, across) = ((row / rows).min(self.down - 1), (start / side).min(self.across - 1));
                (down * self.across + across, (start / side + 1) * side)
            }
        };
        (at.min(self.values.len() - 1), end.min(cols))
    }

    pub(crate) fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        self.values.iter_mut().for_each(|scale| *scale = f(*scale));
        self
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Scales with blocks stated by the file, or with a grid that divides the weight evenly.
    pub(crate) fn scales(&self, suffix: &str) -> Result<Scales, T::Error> {
        let Some(tensor) = self.tensor(suffix) else { return Err(self.missing(suffix)) };
        let values = match tensor.dtype {
            // The native format keeps all 8-bit scales as raw bytes; the scheme determines their kind.
            "U8" if self.has("weight.nested_scale") => self.nested_scales(suffix)?,
            "U8" | "F8_E8M0" if !self.native_scheme().starts_with("nvfp4") => {
                let values: [f32; 256] = std::array::from_fn(|code| power_of_two(code as u8));
                self.bytes(suffix)?.into_iter().map(|code| values[usize::from(code)]).collect()
            }
            "U8" | "F8_E4M3" => self.e4m3(suffix)?,
            _ => self.floats(suffix)?,
        };
        let (down, across) = match tensor.shape {
            [down, across] => (*down, *across),
            [n] => (1, *n),
            _ => (1, 1),
        };
        if values.len() != down * across || values.is_empty() {
            return Err(self.short(suffix));
        }
        let even = |n: usize, blocks: usize| n.div_ceil(blocks.max(1)).max(1);
        let side = self.block(suffix).unwrap_or((even(self.rows, down), even(self.cols, across)));
        Ok(Scales { values, down, across, side, flat: None })
    }

    /// Scales with blocks of `side` rows and columns, for any axes of the list.
    pub(crate) fn scales_of(&self, suffix: &str, side: (usize, usize)) -> Result<Scales, T::Error> {
        let values: Vec<f32> = match self.dtype(suffix) {
            Some("U8" | "F8_E8M0") => self.bytes(suffix)?.into_iter().map(power_of_two).collect(),
            Some("F8_E4M3") => self.e4m3(suffix)?,
            _ => self.floats(suffix)?,
        };
        let count = |n: usize, side: usize| n.div_ceil(side.max(1));
        let (down, across) = (count(self.rows, side.0), count(self.cols, side.1));
        match values.len() == down * across && !values.is_empty() {
            true => Ok(Scales { values, down, across, side, flat: None }),
            false => Err(self.short(suffix)),
        }
    }

    /// Scales of groups of `group` columns.
    pub(crate) fn lines(&self, values: Vec<f32>, group: usize) -> Scales {
        let across = (self.cols / group.max(1)).max(1);
        Scales { down: values.len() / across, across, values, side: (1, group), flat: None }
    }

    fn e4m3(&self, suffix: &str) -> Result<Vec<f32>, T::Error> {
        let values = float_values(4, 3, 7);
        Ok(self.bytes(suffix)?.into_iter().map(|code| values[usize::from(code)]).collect())
    }

    /// Rows and columns of a block, if the scheme's text or the group's arguments state them.
    fn block(&self, suffix: &str) -> Option<(usize, usize)> {
        if let Some(weight) = suffix.strip_suffix(".scale") {
            let weight = self.name(weight);
            return block_of_text(self.tensors.metadata(&format!("{weight}.scale"), &weight)?);
        }
        let weights = self.group_weights()?;
        if let Some([rows, cols]) =
            weights.get("block_structure").and_then(Value::as_array).map(Vec::as_slice)
        {
            return Some((rows.as_u64()? as usize, cols.as_u64()? as usize));
        }
        Some((1, weights.get("group_size")?.as_u64()? as usize))
    }
}

/// Block of a scheme's text, as rows and columns.
fn block_of_text(text: &str) -> Option<(usize, usize)> {
    let base = text.split([':', '@', ' ']).next()?;
    if base.starts_with("mx") {
        return Some((1, 32));
    }
    if base == "nvfp4" {
        return Some(if text.starts_with("nvfp4:te-2d") { (16, 16) } else { (1, 16) });
    }
    base.split('-').find_map(|part| {
        if let Some((rows, cols)) = part.strip_prefix('t').and_then(|t| t.split_once('x')) {
            return Some((rows.parse().ok()?, cols.parse().ok()?));
        }
        Some((1, part.strip_prefix('g')?.parse().ok()?))
    })
}
