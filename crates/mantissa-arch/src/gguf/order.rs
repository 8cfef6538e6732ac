//! Row order of q and k, which the converter interleaves, and of fused projections.
//!
//! Rotary embedding rotates pairs. Hugging Face pairs row `i` of a head with row `i + d/2`; ggml's `llama` pairs rows
//! `2i` and `2i + 1`. So the converter interleaves the halves of every head (llama, olmo). GPT-NeoX fuses query, key
//! and value head by head; in GGUF all queries come first, then all keys, then all values. Only whole rows move, so
//! block types are unaffected.
//!
//! Gated DeltaNet has several heads of values for each head of keys. Hugging Face counts the value heads of one key head
//! together; ggml's repetition needs the first value head of every key head, then the second of each (`conversion/qwen.py`
//! of llama.cpp, Qwen3.5). So rows of values, of their rates and of the convolution move, and columns of the output
//! projection.

/// Row order of a model, relative to Hugging Face's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowOrder {
    /// Heads of q and of k whose halves are interleaved; `None` for Hugging Face order.
    pub interleaved: Option<(usize, usize)>,
    /// Heads of a projection that Hugging Face fuses head by head.
    pub by_head: Option<usize>,
    /// Heads of gated DeltaNet layers.
    pub delta: Option<DeltaHeads>,
}

/// Heads of gated DeltaNet layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and keys.
    pub keys: usize,
    /// Heads of values.
    pub values: usize,
    /// Width of a head of queries or keys.
    pub key_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// True if the value heads are in ggml's order.
    pub tiled: bool,
}

impl DeltaHeads {
    /// Value heads of each key head.
    fn each(&self) -> usize {
        self.values.checked_div(self.keys).unwrap_or(0)
    }

    /// Permutation of the rows of value heads, after `skip` rows that stay, if any moves.
    fn moved(&self, skip: usize) -> Option<Moved> {
        let moves = self.tiled && self.keys > 1 && self.each() > 1;
        moves.then_some(Moved::Tiled { skip, keys: self.keys, each: self.each() })
    }

    /// Rows of q, k, v and z of one key head, in a projection that has them key head by key head.
    pub fn of_key_head(&self) -> [usize; 4] {
        let values = self.each().saturating_mul(self.value_dim);
        [self.key_dim, self.key_dim, values, values]
    }
}

/// Permutation of the rows of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Interleaves the halves of each of this many heads.
    Interleaved(usize),
    /// Separates query, key and value of this many heads.
    ByHead(usize),
    /// After `skip` rows that stay, the first value head of every key head, then the second of each, and so on.
    Tiled {
        /// Rows that stay.
        skip: usize,
        /// Key heads.
        keys: usize,
        /// Value heads of each key head.
        each: usize,
    },
}

impl RowOrder {
    /// Permutation of the rows of the tensor with this Hugging Face name, if they move.
    pub fn of(self, name: &str) -> Option<Moved> {
        let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
        if module.ends_with("attention.query_key_value") {
            return self.by_head.map(Moved::ByHead);
        }
        if let Some((_, part)) = module.split_once("linear_attn.") {
            let delta = self.delta?;
            return match part {
                "in_proj_qkv" | "conv1d" => {
                    delta.moved(delta.keys.saturating_mul(delta.key_dim).saturating_mul(2))
                }
                "in_proj_z" | "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias" => delta.moved(0),
                _ => None,
            };
        }
        let (query, key) = self.interleaved?;
        if module.ends_with("self_attn.q_proj") {
            Some(Moved::Interleaved(query))
        } else if module.ends_with("self_attn.k_proj") {
            Some(Moved::Interleaved(key))
        } else {
            None
        }
    }
}

impl RowOrder {
    /// Permutation of the columns of the tensor with this Hugging Face name, if they move.
    pub fn columns(self, name: &str) -> Option<Moved> {
        let delta = self.delta.filter(|_| name.ends_with("linear_attn.out_proj.weight"))?;
        delta.moved(0)
    }
}

impl Moved {
    /// Returns the places in Hugging Face order of `n` elements in GGUF order.
    pub fn places(self, n: usize) -> Vec<u32> {
        self.to_gguf(&(0..u32::try_from(n).unwrap_or(0)).collect::<Vec<_>>(), 1)
    }

    /// True if runs of columns that stay together, in rows of `cols`, are whole blocks of `block` columns.
    pub fn moves_whole(self, cols: usize, block: usize) -> bool {
        match self {
            Moved::Tiled { skip: 0, keys, each } => {
                let runs = keys.saturating_mul(each);
                cols.checked_div(runs)
                    .is_some_and(|run| run * runs == cols && block > 0 && run.is_multiple_of(block))
            }
            _ => false,
        }
    }

    /// Reorders the columns of a matrix of rows of `cols` elements from Hugging Face to GGUF order.
    pub fn columns_to_gguf<T: Copy>(self, values: &[T], cols: usize) -> Vec<T> {
        values.chunks(cols.max(1)).flat_map(|row| self.to_gguf(row, 1)).collect()
    }

    /// Inverse of [`Self::columns_to_gguf`].
    pub fn columns_to_hf<T: Copy>(self, values: &[T], cols: usize) -> Vec<T> {
        values.chunks(cols.max(1)).flat_map(|row| self.to_hf(row, 1)).collect()
    }

    /// Reorders rows of `row` units from Hugging Face to GGUF order.
    pub fn to_gguf<T: Copy>(self, rows: &[T], row: usize) -> Vec<T> {
        match self {
            Moved::Interleaved(heads) => to_gguf_order(rows, row, heads),
            Moved::ByHead(heads) => turned(rows, row, heads, 3),
            Moved::Tiled { skip, keys, each } => {
                after(rows, skip.saturating_mul(row), |rest| turned(rest, row, keys, each))
            }
        }
    }

    /// Inverse of [`Self::to_gguf`].
    pub fn to_hf<T: Copy>(self, rows: &[T], row: usize) -> Vec<T> {
        match self {
            Moved::Interleaved(heads) => to_hf_order(rows, row, heads),
            Moved::ByHead(heads) => turned(rows, row, 3, heads),
            Moved::Tiled { skip, keys, each } => {
                after(rows, skip.saturating_mul(row), |rest| turned(rest, row, each, keys))
            }
        }
    }
}

/// Leaves the first `skip` units, and reorders the others.
fn after<T: Copy>(rows: &[T], skip: usize, reorder: impl Fn(&[T]) -> Vec<T>) -> Vec<T> {
    match rows.split_at_checked(skip) {
        Some((first, rest)) => [first, &reorder(rest)[..]].concat(),
        None => rows.to_vec(),
    }
}

/// Transposes runs of whole rows: `out[i, o] = rows[o, i]`, with `outer · inner` runs. Other lengths are returned
/// unchanged.
fn turned<T: Copy>(rows: &[T], row: usize, outer: usize, inner: usize) -> Vec<T> {
    let runs = outer.saturating_mul(inner);
    let units = row.saturating_mul(runs);
    if units == 0 || !rows.len().is_multiple_of(units) {
        return rows.to_vec();
    }
    let run = rows.len() / runs;
    let mut out = Vec::with_capacity(rows.len());
    for i in 0..inner {
        (0..outer).for_each(|o| out.extend_from_slice(&rows[(o * inner + i) * run..][..run]));
    }
    out
}

/// Reorders rows of `row` units from Hugging Face to GGUF order, in `heads` heads. Lengths that are not whole heads
/// with an even number of rows are returned unchanged.
pub fn to_gguf_order<T: Copy>(rows: &[T], row: usize, heads: usize) -> Vec<T> {
    permuted(rows, row, heads, |i, half| (i % 2) * half + i / 2)
}

/// Inverse of [`to_gguf_order`].
pub fn to_hf_order<T: Copy>(rows: &[T], row: usize, heads: usize) -> Vec<T> {
    permuted(rows, row, heads, |i, half| 2 * (i % half) + i / half)
}

/// `out[head, i] = rows[head, from(i, d/2)]`.
fn permuted<T: Copy>(rows: &[T], row: usize, heads: usize, from: impl Fn(usize, usize) -> usize) -> Vec<T> {
    let units = row.saturating_mul(heads);
    if units == 0 || !rows.len().is_multiple_of(units) || !(rows.len() / units).is_multiple_of(2) {
        return rows.to_vec();
    }
    let width = rows.len() / units;
    let mut out = Vec::with_capacity(rows.len());
    for head in rows.chunks_exact(width * row) {
        (0..width).for_each(|i| out.extend_from_slice(&head[from(i, width / 2) * row..][..row]));
    }
    out
}
