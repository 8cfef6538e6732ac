//! Presents a GGUF file as the tensors of its source checkpoint.

use std::ops::Range;
use std::path::Path;

use super::file::{GgufFile, Tensor};
use super::{BlockType, Blocks, Error};

/// Place of a checkpoint's tensor in a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the tensor in the file.
    pub tensor: String,
    /// Index of the matrix in it, if the tensor stacks all experts.
    pub expert: Option<usize>,
}

/// Tensor of the file, and a matrix index with the number of matrices.
pub type Found<'a> = (String, &'a Tensor, (u64, u64));

/// Finds the place of a checkpoint's tensor in a GGUF file.
type Places<'a> = Box<dyn Fn(&str) -> Option<Place> + Sync + 'a>;

type Result<T> = std::result::Result<T, Error>;

/// Architectures whose converter interleaves the rows of q and k.
const INTERLEAVED: [&str; 6] = ["llama", "olmo", "smollm3", "arcee", "granite", "mistral3"];

/// Architectures whose converter takes a projection that is fused head by head apart.
const FUSED_BY_HEAD: [&str; 1] = ["gptneox"];

/// Architectures whose converter adds 1 to the weights of norms.
const RAISED_NORMS: [&str; 3] = ["gemma", "gemma2", "gemma3"];

/// A GGUF model under the names and in the row order of Hugging Face checkpoints.
pub struct Model<'a> {
    /// The container.
    pub file: GgufFile,
    pub(super) blocks: Blocks,
    pub(super) architecture: String,
    /// Finds the place of a checkpoint's tensor.
    places: Places<'a>,
    /// Heads of q and k whose rows are interleaved.
    interleaved: Option<(u64, u64)>,
    /// Heads of a fused projection that checkpoints fuse head by head.
    by_head: Option<u64>,
}

impl<'a> Model<'a> {
    /// Wraps `file`, with `places` to find its tensors by Hugging Face name.
    pub fn new(file: GgufFile, places: impl Fn(&str) -> Option<Place> + Sync + 'a) -> Self {
        let architecture = file.text("general.architecture").unwrap_or("").to_owned();
        let heads = file.number(&format!("{architecture}.attention.head_count"));
        let key_heads = file.number(&format!("{architecture}.attention.head_count_kv")).or(heads);
        let interleaved = heads.zip(key_heads).filter(|_| INTERLEAVED.contains(&architecture.as_str()));
        let by_head = heads.filter(|_| FUSED_BY_HEAD.contains(&architecture.as_str()));
        let places = Box::new(places);
        Model { file, blocks: Blocks::new(), architecture, places, interleaved, by_head }
    }

    /// The place of the tensor `name`, if the architecture has it.
    pub fn place(&self, name: &str) -> Option<Place> {
        (self.places)(name)
    }

    /// The tensor that holds `name`.
    ///
    /// # Errors
    /// [`Error::Missing`].
    pub fn tensor(&self, name: &str) -> Result<Found<'_>> {
        let place = self.place(name).unwrap_or_else(|| Place { tensor: name.to_owned(), expert: None });
        let missing = || Error::Missing { tensor: place.tensor.clone() };
        let tensor = self.file.tensors.get(&place.tensor).ok_or_else(missing)?;
        let part = match place.expert {
            None => (0, 1),
            Some(expert) => {
                let of = tensor.dims.get(2).copied().unwrap_or(0);
                (Some(expert as u64).filter(|&expert| expert < of).ok_or_else(missing)?, of)
            }
        };
        Ok((place.tensor, tensor, part))
    }

    /// True if the file stores the tensor plus 1: every norm of Gemma.
    pub fn adds_one(&self, name: &str) -> bool {
        RAISED_NORMS.contains(&self.architecture.as_str()) && name.contains("norm")
    }

    /// File row of row `row` of `rows` in Hugging Face order. Rotary embedding rotates rows `i` and `i + d/2` of a
    /// head of `d` together, and llama.cpp stores such pairs adjacently.
    fn stored_row(&self, stored: &str, row: usize, rows: usize) -> usize {
        let Some((_, part)) = stored.split_once(".attn_") else { return row };
        if let Some(heads) = self.by_head.filter(|_| part.starts_with("qkv.")) {
            // A checkpoint groups query, key and value by head; the file has all queries, then all keys, then all
            // values.
            let heads = usize::try_from(heads).unwrap_or(1).max(1);
            let width = rows / heads / 3;
            if width == 0 || rows != 3 * heads * width {
                return row;
            }
            let (head, which, i) = (row / (3 * width), row / width % 3, row % width);
            return (which * heads + head) * width + i;
        }
        let Some((query, key)) = self.interleaved else { return row };
        let heads = match part {
            "q.weight" | "q.bias" => query,
            "k.weight" | "k.bias" => key,
            _ => return row,
        };
        let width = rows / usize::try_from(heads).unwrap_or(1).max(1);
        if width < 2 {
            return row;
        }
        let (head, i, half) = (row / width, row % width, width / 2);
        head * width + if i < half { 2 * i } else { 2 * (i - half) + 1 }
    }

    /// Decodes rows `range` of the tensor `name` (`[rows, cols]`; a vector is a column) into `out`.
    ///
    /// # Errors
    /// A missing tensor; a scale that is not one f32 per matrix; I/O.
    pub fn rows(
        &self,
        name: &str,
        (rows, cols): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        if let Some(parts) = self.parts(name) {
            return self.rows_of_parts(&parts, (rows, cols), range, out);
        }
        let (stored, tensor, (which, of)) = self.tensor(name)?;
        let beside = self.file.factor(&stored, which, of)?;
        let (inside, factor) = match tensor.ty {
            BlockType::NVFP4 => (beside, None),
            _ => (None, beside),
        };
        let first = usize::try_from(which).unwrap_or(usize::MAX).saturating_mul(rows);
        // A vector is one row in the file, and a column here.
        let column = Tensor { dims: vec![1, tensor.dims[0]], ..tensor.clone() };
        let tensor = if tensor.dims.len() == 1 { &column } else { tensor };
        let in_order = range.clone().all(|row| self.stored_row(&stored, row, rows) == row);
        if in_order {
            let bytes = self.file.rows(tensor, first + range.start, range.len())?;
            self.blocks.decode(tensor.ty, &bytes, inside, out);
            if self.adds_one(name) {
                out.iter_mut().for_each(|value| *value -= 1.0);
            }
            multiply(out, factor);
            return Ok(());
        }
        for (row, out) in range.zip(out.chunks_exact_mut(cols.max(1))) {
            let bytes = self.file.rows(tensor, self.stored_row(&stored, row, rows), 1)?;
            self.blocks.decode(tensor.ty, &bytes, inside, out);
            multiply(out, factor);
        }
        Ok(())
    }

    /// Decodes the whole tensor `name` (`[rows, cols]`).
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn whole(&self, name: &str, rows: usize, cols: usize) -> Result<Vec<f32>> {
        let mut values = vec![0.0; rows * cols];
        self.rows(name, (rows, cols), 0..rows, &mut values)?;
        Ok(values)
    }

    /// True if the file has the tensor `name`, whole or in parts.
    pub fn has(&self, name: &str) -> bool {
        self.tensor(name).is_ok() || self.parts(name).is_some()
    }

    /// Reads and decodes the tensors `names` of the file.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn decoded(&self, names: &[String]) -> Result<Vec<(Tensor, Vec<f32>)>> {
        let mut all = Vec::new();
        for name in names {
            let missing = || Error::Missing { tensor: name.clone() };
            let tensor = self.file.tensors.get(name).ok_or_else(missing)?.clone();
            let rows = usize::try_from(tensor.rows()).unwrap_or(usize::MAX);
            let bytes = self.file.rows(&tensor, 0, rows)?;
            let count: u64 = tensor.dims.iter().product();
            let mut values = vec![0.0; usize::try_from(count).unwrap_or(0)];
            self.blocks.decode(tensor.ty, &bytes, None, &mut values);
            all.push((tensor, values));
        }
        Ok(all)
    }

    /// The first file, for messages.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

/// Multiplies by the scale stored with a weight.
fn multiply(values: &mut [f32], factor: Option<f32>) {
    if let Some(factor) = factor {
        values.iter_mut().for_each(|value| *value *= factor);
    }
}
