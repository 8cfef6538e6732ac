//! The order of the rows of q and k in the llama architecture.
//!
//! Rotary embedding turns pairs. Hugging Face pairs row `i` of a head with row `i + d/2`, ggml's `llama` pairs rows `2i`
//! and `2i + 1`; so the converter interleaves the halves of every head. Whole rows move: block types stay as they are.

/// Which rows move: the query heads and the key heads whose halves are interleaved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowOrder {
    /// Heads of q and of k; `None` where rows stand as in Hugging Face.
    pub interleaved: Option<(usize, usize)>,
}

impl RowOrder {
    /// The heads of the tensor with this Hugging Face name, where its rows are interleaved.
    pub fn heads(self, name: &str) -> Option<usize> {
        let (query, key) = self.interleaved?;
        let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
        if module.ends_with("self_attn.q_proj") {
            Some(query)
        } else if module.ends_with("self_attn.k_proj") {
            Some(key)
        } else {
            None
        }
    }
}

/// Rows of `row` units in GGUF order, from Hugging Face order, in `heads` heads. Lengths that are not whole heads of an even
/// number of rows are returned as they are.
pub fn to_gguf_order<T: Copy>(rows: &[T], row: usize, heads: usize) -> Vec<T> {
    permuted(rows, row, heads, |i, half| (i % 2) * half + i / 2)
}

/// The inverse of [`to_gguf_order`].
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
