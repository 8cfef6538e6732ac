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
    /// 0 for the gate and 1 for the up-projection, if the tensor has both of each expert.
    pub half: Option<usize>,
}

impl Place {
    /// Matrices of each expert in the tensor.
    pub fn halves(&self) -> u64 {
        if self.half.is_some() { 2 } else { 1 }
    }

    /// The same expert in a file with gate and up in one tensor, or else in two.
    fn in_other_form(&self) -> Option<Self> {
        const APART: [&str; 2] = ["_gate_exps.", "_up_exps."];
        const BOTH: &str = "_gate_up_exps.";
        let (tensor, half) = match self.half {
            Some(half) => (self.tensor.replace(BOTH, APART.get(half)?), None),
            None => {
                let half = APART.iter().position(|name| self.tensor.contains(name))?;
                (self.tensor.replace(APART[half], BOTH), Some(half))
            }
        };
        Some(Place { tensor, expert: self.expert, half })
    }
}

/// Tensor of the file, and a matrix index with the number of matrices.
pub type Found<'a> = (String, &'a Tensor, (u64, u64));

/// Finds the place of a checkpoint's tensor in a GGUF file.
type Places<'a> = Box<dyn Fn(&str) -> Option<Place> + Sync + 'a>;

type Result<T> = std::result::Result<T, Error>;

/// Architectures whose converter interleaves the rows of q and k.
const INTERLEAVED: [&str; 7] = ["llama", "olmo", "smollm3", "arcee", "granite", "mistral3", "granitehybrid"];

/// Architectures whose converter takes a projection that is fused head by head apart.
const FUSED_BY_HEAD: [&str; 1] = ["gptneox"];

/// Architectures whose converter adds 1 to the weights of norms.
const RAISED_NORMS: [&str; 6] = ["gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"];

/// Architectures with gated DeltaNet whose converter reorders the heads of values.
const TILED: [&str; 2] = ["qwen35", "qwen35moe"];

/// Tensors of a layer that are named like the factor of a weight, and are vectors of the model, by architecture.
const OWN_SCALES: [(&str, &[&str]); 1] = [("gemma4", &["ffn_gate_inp.scale", "ffn_down_exps.scale"])];

/// A GGUF model under the names and in the row order of Hugging Face checkpoints.
pub struct Model<'a> {
    /// The container.
    pub file: GgufFile,
    pub(super) blocks: Blocks,
    pub(super) architecture: String,
    /// Finds the place of a checkpoint's tensor.
    places: Places<'a>,
    /// Heads of q and k whose rows are interleaved; 0 if layers differ.
    interleaved: Option<(u64, u64)>,
    /// Width of a head.
    head_dim: u64,
    /// Heads of a fused projection that checkpoints fuse head by head.
    by_head: Option<u64>,
    /// Heads of gated DeltaNet.
    pub(super) delta: Option<Delta>,
}

/// Heads of gated DeltaNet, as the metadata state them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delta {
    pub(super) keys: usize,
    /// Heads of values for each of keys.
    pub(super) each: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// True if the file has the first head of values of every head of keys, then the second of each, and so on.
    tiled: bool,
}

impl Delta {
    fn read(file: &GgufFile, architecture: &str) -> Option<Self> {
        let number = |key: &str| usize::try_from(file.number(&format!("{architecture}.ssm.{key}"))?).ok();
        let (keys, values) = (number("group_count")?, number("time_step_rank")?);
        let (key_dim, inner) = (number("state_size")?, number("inner_size")?);
        /// Largest width of queries, or of values.
        const MOST: usize = 1 << 24;
        let narrow = inner <= MOST && keys.checked_mul(key_dim).is_some_and(|width| width <= MOST);
        let known = keys > 0 && values > 0 && values.is_multiple_of(keys);
        (known && narrow).then_some(Delta {
            keys,
            each: values / keys,
            key_dim,
            value_dim: inner / values,
            tiled: TILED.contains(&architecture),
        })
    }

    /// Place in the file of element `i` of values, in heads of `width`.
    pub(super) fn place(&self, i: usize, width: usize) -> usize {
        let (head, within) = (i / width.max(1), i % width.max(1));
        match self.tiled {
            true => (head % self.each * self.keys + head / self.each) * width + within,
            false => i,
        }
    }
}

impl<'a> Model<'a> {
    /// Wraps `file`, with `places` to find its tensors by Hugging Face name.
    pub fn new(file: GgufFile, places: impl Fn(&str) -> Option<Place> + Sync + 'a) -> Self {
        let architecture = file.text("general.architecture").unwrap_or("").to_owned();
        let heads = file.number(&format!("{architecture}.attention.head_count"));
        let key = format!("{architecture}.attention.head_count_kv");
        // A list of heads by layer has 0 for layers without attention; the others' heads are as wide as the queries'.
        let listed = file.keys.contains_key(&key).then_some(0);
        let key_heads = file.number(&key).or(listed).or(heads);
        let interleaved = heads.zip(key_heads).filter(|_| INTERLEAVED.contains(&architecture.as_str()));
        let stated = file.number(&format!("{architecture}.attention.key_length"));
        let hidden = file.number(&format!("{architecture}.embedding_length"));
        let derived = || hidden?.checked_div(heads?);
        let head_dim = stated.or_else(derived).unwrap_or(0);
        let by_head = heads.filter(|_| FUSED_BY_HEAD.contains(&architecture.as_str()));
        let places = Box::new(places);
        let delta = Delta::read(&file, &architecture);
        let blocks = Blocks::new();
        Model { file, blocks, architecture, places, interleaved, head_dim, by_head, delta }
    }

    /// The place of the tensor `name`, if the architecture has it.
    pub fn place(&self, name: &str) -> Option<Place> {
        let place = (self.places)(name)?;
        let other = place.in_other_form().filter(|other| {
            !self.file.tensors.contains_key(&place.tensor) && self.file.tensors.contains_key(&other.tensor)
        });
        Some(other.unwrap_or(place))
    }

    /// The tensor that holds `name`.
    ///
    /// # Errors
    /// [`Error::Missing`].
    pub fn tensor(&self, name: &str) -> Result<Found<'_>> {
        let place =
            self.place(name).unwrap_or_else(|| Place { tensor: name.to_owned(), expert: None, half: None });
        let missing = || Error::Missing { tensor: place.tensor.clone() };
        let tensor = self.file.tensors.get(&place.tensor).ok_or_else(missing)?;
        let part = match place.expert {
            None => (0, 1),
            Some(expert) => {
                let (of, halves) = (tensor.dims.get(2).copied().unwrap_or(0), place.halves());
                let expert = Some(expert as u64).filter(|&expert| expert < of).ok_or_else(missing)?;
                (expert * halves + place.half.unwrap_or(0) as u64, of * halves)
            }
        };
        Ok((place.tensor, tensor, part))
    }

    /// True if the file stores the tensor plus 1: every norm of Gemma, and of Qwen3-Next and its successors except the
    /// norm of a mixer's result.
    fn adds_one(&self, name: &str) -> bool {
        let raised = name.contains("norm") && !name.contains("linear_attn.norm");
        RAISED_NORMS.contains(&self.architecture.as_str()) && raised
    }

    /// Returns the function that maps a value of the tensor to what is read after it was stored, if the file has a
    /// function of it: the value plus 1, or the negative exponential of a logarithm of decay.
    pub fn round_trip(&self, name: &str) -> Option<fn(f32) -> f32> {
        match name {
            _ if self.adds_one(name) => Some(|value| (value + 1.0) - 1.0),
            _ if name.ends_with("A_log") => Some(|value| logarithm(-(f64::from(value).exp()) as f32)),
            _ => None,
        }
    }

    /// Turns stored values into the checkpoint's.
    fn restore(&self, name: &str, values: &mut [f32]) {
        if self.adds_one(name) {
            values.iter_mut().for_each(|value| *value -= 1.0);
        } else if name.ends_with("A_log") {
            values.iter_mut().for_each(|value| *value = logarithm(*value));
        }
    }

    /// File row of row `row` of `rows` in Hugging Face order. Rotary embedding rotates rows `i` and `i + d/2` of a
    /// head of `d` together, and llama.cpp stores such pairs adjacently.
    fn stored_row(&self, stored: &str, row: usize, rows: usize) -> usize {
        if let Some(delta) = self.delta.filter(|delta| delta.tiled) {
            let part = stored.splitn(3, '.').nth(2).unwrap_or("").trim_end_matches(".weight");
            let (skip, width) = match part {
                "attn_qkv" | "ssm_conv1d" => (2 * delta.keys * delta.key_dim, delta.value_dim),
                "attn_gate" => (0, delta.value_dim),
                "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt.bias" => (0, 1),
                _ => return row,
            };
            return row.checked_sub(skip).map_or(row, |value| skip + delta.place(value, width));
        }
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
            "k.weight" | "k.bias" if key == 0 => (rows as u64).checked_div(self.head_dim).unwrap_or(1),
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
        let beside = self.factor(&stored, which, of)?;
        let (inside, factor) = match tensor.ty {
            BlockType::NVFP4 => (beside, None),
            _ => (None, beside),
        };
        let first = usize::try_from(which).unwrap_or(usize::MAX).saturating_mul(rows);
        // A vector may have other dimensions in the file: one row for what is a column here, or outer ones of 1.
        let flat = Tensor { dims: vec![cols as u64, rows as u64], ..tensor.clone() };
        let elements: u64 = tensor.dims.iter().product();
        let same = of == 1 && !tensor.ty.is_blocks() && flat.dims.iter().product::<u64>() == elements;
        let tensor = if same { &flat } else { tensor };
        let in_order = range.clone().all(|row| self.stored_row(&stored, row, rows) == row);
        if in_order {
            let bytes = self.file.rows(tensor, first + range.start, range.len())?;
            self.blocks.decode(tensor.ty, &bytes, inside, out);
            self.restore(name, out);
            multiply(out, factor);
            return Ok(());
        }
        for (row, out) in range.zip(out.chunks_exact_mut(cols.max(1))) {
            let bytes = self.file.rows(tensor, self.stored_row(&stored, row, rows), 1)?;
            self.blocks.decode(tensor.ty, &bytes, inside, out);
            self.restore(name, out);
            multiply(out, factor);
        }
        Ok(())
    }

    /// The factor beside the weight `stored`, for matrix `which` of `of`, if it has one.
    ///
    /// # Errors
    /// A scale that is not one f32 per matrix; I/O.
    pub fn factor(&self, stored: &str, which: u64, of: u64) -> Result<Option<f32>> {
        let own = OWN_SCALES.iter().filter(|(architecture, _)| *architecture == self.architecture);
        let mut own = own.flat_map(|(_, names)| names.iter());
        let module = stored.trim_end_matches(".weight");
        if own.any(|name| format!("{module}.scale").ends_with(&format!(".{name}"))) {
            return Ok(None);
        }
        self.file.factor(stored, which, of)
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

/// Logarithm of the negative of a rate of decay.
fn logarithm(rate: f32) -> f32 {
    (-f64::from(rate)).ln() as f32
}

/// Multiplies by the scale stored with a weight.
fn multiply(values: &mut [f32], factor: Option<f32>) {
    if let Some(factor) = factor {
        values.iter_mut().for_each(|value| *value *= factor);
    }
}
