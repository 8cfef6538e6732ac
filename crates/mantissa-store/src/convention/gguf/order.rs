//! Row order of q and k, which the converter interleaves, and of fused projections.
//!
//! Rotary embedding rotates pairs. Hugging Face pairs row `i` of a head with row `i + d/2`; ggml's `llama` pairs rows
//! `2i` and `2i + 1`. So the converter interleaves the halves of every head (llama, olmo). GPT-NeoX fuses query, key
//! and value head by head; in GGUF all queries come first, then all keys, then all values. Only whole rows move, so
//! block types are unaffected.

/// Row order of a model, relative to Hugging Face's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowOrder {
    /// Heads of q and of k whose halves are interleaved; `None` for Hugging Face order.
    pub interleaved: Option<(usize, usize)>,
    /// Heads of a projection that Hugging Face fuses head by head.
    pub by_head: Option<usize>,
}

/// Permutation of the rows of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Interleaves the halves of each of this many heads.
    Interleaved(usize),
    /// Separates query, key and value of this many heads.
    ByHead(usize),
}

impl RowOrder {
    /// Permutation of the rows of the tensor with this Hugging Face name, if they move.
    pub fn of(self, name: &str) -> Option<Moved> {
        let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
        if module.ends_with("attention.query_key_value") {
            return self.by_head.map(Moved::ByHead);
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

impl Moved {
    /// Reorders rows of `row` units from Hugging Face to GGUF order.
    pub fn to_gguf<T: Copy>(self, rows: &[T], row: usize) -> Vec<T> {
        match self {
            Moved::Interleaved(heads) => to_gguf_order(rows, row, heads),
            Moved::ByHead(heads) => turned(rows, row, heads, 3),
        }
    }

    /// Inverse of [`Self::to_gguf`].
    pub fn to_hf<T: Copy>(self, rows: &[T], row: usize) -> Vec<T> {
        match self {
            Moved::Interleaved(heads) => to_hf_order(rows, row, heads),
            Moved::ByHead(heads) => turned(rows, row, 3, heads),
        }
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
