//! Tensors of a checkpoint that a GGUF file stores in several parts.
//!
//! - gpt-oss joins the biases of its experts, `[experts, 2 · width]`, with gate and up interleaved; in GGUF each
//!   projection has its own, `[experts, width]`. (The weights are read expert by expert, [`super::place`].)
//! - DeepSeek's projection from the latent of keys and values has, per head, the rows of its keys and then those of
//!   its values, `[heads · (unrotated + value), rank]`. llama.cpp multiplies queries by it instead of expanding keys
//!   ("absorption"). So its converter splits it: keys transposed, `[heads, rank, unrotated]`, and values, `[heads,
//!   value, rank]`.
//!
//! - Granite 4 joins gate and up of its MLP; in GGUF each is a tensor.
//! - Qwen3-Next joins q, k, v and z of gated DeltaNet key head by key head; in GGUF all q, all k and all v are one tensor, and
//!   all z another.
//!
//! Source: llama.cpp, `conversion/gpt_oss.py`, `deepseek.py`, `granite.py` and `qwen.py`; `deepseek2.cpp`.

use super::Architecture;
use super::architecture::Split;
use super::names::{layer, text_name};
use super::order::RowOrder;

/// Tensor that GGUF stores in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined {
    /// Biases of experts, under these names; with several names, elements are interleaved.
    Biases(Vec<String>),
    /// Projections of the latent to keys and values.
    KeysAndValues([String; 2]),
    /// The first and the second half of the rows.
    Halves([String; 2]),
    /// Rows of q, k and v in the first part, those of z in the second. The weight has them in `groups` groups, each with these
    /// numbers of rows of q, k, v and z.
    KeyGroups {
        /// Names of the parts.
        names: [String; 2],
        /// Number of groups.
        groups: usize,
        /// Rows of a group.
        sizes: [usize; 4],
    },
}

/// One part of a split tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinedPart<T> {
    /// Its name in GGUF.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<T>,
}

impl Architecture {
    /// Parts of the tensor with this Hugging Face name, if the file has it in parts. Older files have the projection
    /// of [`Joined::KeysAndValues`] whole, at [`Architecture::place`].
    pub fn joined(&self, hf: &str, order: RowOrder) -> Option<Joined> {
        let hf = text_name(hf);
        let (layer, module) = layer(hf.strip_prefix("model.layers.")?)?;
        let stored = |name: &str| format!("blk.{layer}.{name}");
        let (_, split) = self.split.iter().find(|(name, _)| *name == module)?;
        Some(match split {
            Split::Biases(names) => Joined::Biases(names.iter().map(|name| stored(name)).collect()),
            Split::KeysAndValues(names) => Joined::KeysAndValues(names.map(stored)),
            Split::Halves(names) => Joined::Halves(names.map(stored)),
            Split::KeyGroups(names) => {
                let delta = order.delta?;
                let sizes = delta.of_key_head();
                Joined::KeyGroups { names: names.map(stored), groups: delta.keys, sizes }
            }
        })
    }
}

impl Joined {
    /// Names of the parts in GGUF.
    pub fn names(&self) -> &[String] {
        match self {
            Joined::Biases(names) => names,
            Joined::KeysAndValues(names) | Joined::Halves(names) => names,
            Joined::KeyGroups { names, .. } => names,
        }
    }

    /// Rows of the tensor, of `rows`, that each part has, if parts have whole rows; `None` too if they do not fit.
    pub fn rows(&self, rows: usize) -> Option<Vec<Vec<usize>>> {
        match self {
            Joined::Halves(_) => {
                let half = rows.is_multiple_of(2).then_some(rows / 2)?;
                Some(vec![(0..half).collect(), (half..rows).collect()])
            }
            Joined::KeyGroups { groups, sizes, .. } => {
                let each = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size))?;
                if each.checked_mul(*groups) != Some(rows) {
                    return None;
                }
                let of = |kind: usize| {
                    let first: usize = sizes[..kind].iter().sum();
                    (0..*groups)
                        .flat_map(move |group| (0..sizes[kind]).map(move |i| group * each + first + i))
                };
                Some(vec![(0..3).flat_map(of).collect(), of(3).collect()])
            }
            _ => None,
        }
    }

    /// Shapes of the parts of a tensor `[rows, cols]`. [`Joined::KeysAndValues`] has `heads` heads whose keys have
    /// `unrotated` rows. `None` if the rows do not fit.
    pub fn shapes(
        &self,
        rows: usize,
        cols: usize,
        (heads, unrotated): (usize, usize),
    ) -> Option<Vec<Vec<usize>>> {
        match self {
            Joined::Biases(names) => {
                cols.is_multiple_of(names.len()).then(|| vec![vec![rows, cols / names.len()]; names.len()])
            }
            Joined::KeysAndValues(_) => {
                let each = rows.checked_div(heads).filter(|each| each * heads == rows)?;
                let value = each.checked_sub(unrotated)?;
                Some(vec![vec![heads, cols, unrotated], vec![heads, value, cols]])
            }
            Joined::Halves(_) | Joined::KeyGroups { .. } => {
                Some(self.rows(rows)?.into_iter().map(|part| vec![part.len(), cols]).collect())
            }
        }
    }

    /// Splits `values`, `[rows, cols]`, into the parts; heads as in [`Self::shapes`].
    pub fn split<T: Copy>(
        &self,
        values: &[T],
        rows: usize,
        cols: usize,
        heads: (usize, usize),
    ) -> Option<Vec<JoinedPart<T>>> {
        let shapes = self.shapes(rows, cols, heads).filter(|_| values.len() == rows * cols)?;
        let parts: Vec<Vec<T>> = match self {
            Joined::Biases(names) => {
                let turn = |turn| values.iter().skip(turn).step_by(names.len()).copied().collect();
                (0..names.len()).map(turn).collect()
            }
            Joined::KeysAndValues(_) => {
                let (heads, unrotated) = heads;
                let each = rows / heads * cols;
                let (mut keys, mut others) = (Vec::new(), Vec::new());
                for head in values.chunks_exact(each.max(1)) {
                    let (key, value) = head.split_at(unrotated * cols);
                    keys.extend((0..cols).flat_map(|col| key.iter().skip(col).step_by(cols)));
                    others.extend_from_slice(value);
                }
                vec![keys, others]
            }
            Joined::Halves(_) | Joined::KeyGroups { .. } => {
                let gather = |part: Vec<usize>| {
                    let rows = part.into_iter().flat_map(|row| &values[row * cols..][..cols]);
                    rows.copied().collect()
                };
                self.rows(rows)?.into_iter().map(gather).collect()
            }
        };
        let named = self.names().iter().cloned().zip(shapes).zip(parts);
        Some(named.map(|((name, shape), values)| JoinedPart { name, shape, values }).collect())
    }

    /// Inverse of [`Self::split`]: the tensor `[rows, cols]`; `None` if the shapes do not match.
    pub fn join<T: Copy>(&self, parts: &[(&[usize], &[T])], rows: usize, cols: usize) -> Option<Vec<T>> {
        let heads = match (self, parts.first()) {
            (Joined::KeysAndValues(_), Some(([heads, _, unrotated], _))) => (*heads, *unrotated),
            _ => (0, 0),
        };
        let shapes = self.shapes(rows, cols, heads)?;
        let fits = |(shape, (found, values)): (&Vec<usize>, &(&[usize], &[T]))| {
            shape == found && values.len() == shape.iter().product::<usize>()
        };
        if parts.len() != shapes.len() || !shapes.iter().zip(parts).all(fits) {
            return None;
        }
        let mut out = Vec::with_capacity(rows * cols);
        match self {
            Joined::Biases(_) => {
                let width = cols / parts.len();
                out.extend((0..rows * width).flat_map(|i| parts.iter().map(move |(_, values)| values[i])));
            }
            Joined::KeysAndValues(_) => {
                let (heads, unrotated) = heads;
                let value = rows / heads - unrotated;
                for head in 0..heads {
                    let keys = &parts[0].1[head * cols * unrotated..][..cols * unrotated];
                    out.extend((0..unrotated).flat_map(|row| keys.iter().skip(row).step_by(unrotated)));
                    out.extend_from_slice(&parts[1].1[head * value * cols..][..value * cols]);
                }
            }
            Joined::Halves(_) | Joined::KeyGroups { .. } => {
                let mut places = vec![(0, 0); rows];
                for (part, order) in self.rows(rows)?.into_iter().enumerate() {
                    order.into_iter().enumerate().for_each(|(at, row)| places[row] = (part, at));
                }
                places
                    .iter()
                    .for_each(|&(part, at)| out.extend_from_slice(&parts[part].1[at * cols..][..cols]));
            }
        }
        Some(out)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::DeltaHeads;
    use super::*;

    fn split_of(architecture: &str, name: &str) -> Option<Joined> {
        let delta =
            DeltaHeads { keys: 2, values: 4, key_dim: 1, value_dim: 2, tiled: architecture == "qwen35" };
        let order = RowOrder { delta: Some(delta), ..RowOrder::default() };
        Architecture::parse(architecture, false).unwrap().joined(name, order)
    }

    fn round_trip(name: &str, architecture: &str, rows: usize, cols: usize, heads: (usize, usize)) {
        let joined = split_of(architecture, name).unwrap();
        let values: Vec<usize> = (0..rows * cols).collect();
        let parts = joined.split(&values, rows, cols, heads).unwrap();
        let borrowed: Vec<_> = parts.iter().map(|part| (&part.shape[..], &part.values[..])).collect();
        assert_eq!(joined.join(&borrowed, rows, cols).unwrap(), values);
        assert_eq!(joined.join(&borrowed, rows + 1, cols), None, "{name}");
        assert_eq!(joined.join(&borrowed[1..], rows, cols), None, "{name}");
    }

    #[test]
    fn split_tensors_are_joined_again() {
        round_trip("model.layers.3.mlp.experts.gate_up_proj_bias", "gpt-oss", 3, 8, (0, 0));
        round_trip("model.layers.3.mlp.experts.down_proj_bias", "gpt-oss", 3, 8, (0, 0));
        round_trip("model.layers.0.self_attn.kv_b_proj.weight", "deepseek2", 10, 4, (2, 3));
        round_trip("model.layers.0.shared_mlp.input_linear.weight", "granitehybrid", 6, 2, (0, 0));
        round_trip("model.layers.0.linear_attn.in_proj_qkvz.weight", "qwen3next", 20, 3, (0, 0));
    }

    #[test]
    fn parts_are_in_the_order_of_the_converter() {
        let joined = split_of("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj_bias").unwrap();
        let parts = joined.split(&[0, 1, 2, 3, 4, 5, 6, 7], 2, 4, (0, 0)).unwrap();
        assert_eq!(
            (parts[0].name.as_str(), &parts[0].values[..]),
            ("blk.1.ffn_gate_exps.bias", &[0, 2, 4, 6][..])
        );
        assert_eq!(parts[1].values, [1, 3, 5, 7]);
        // One head with two rows of keys and one of values, over a latent of three.
        let joined = split_of("deepseek2", "model.layers.1.self_attn.kv_b_proj.weight").unwrap();
        let parts = joined.split(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 3, 3, (1, 2)).unwrap();
        assert_eq!((&parts[0].shape[..], &parts[0].values[..]), (&[1, 3, 2][..], &[0, 3, 1, 4, 2, 5][..]));
        assert_eq!((&parts[1].shape[..], &parts[1].values[..]), (&[1, 1, 3][..], &[6, 7, 8][..]));
        assert_eq!(split_of("llama", "model.layers.1.self_attn.kv_b_proj.weight"), None);
        // Two key heads with two value heads of width 2 each: q k v0 v0 v1 v1 z0 z0 z1 z1, twice.
        let joined = split_of("qwen3next", "model.layers.1.linear_attn.in_proj_qkvz.weight").unwrap();
        let rows: Vec<usize> = (0..20).collect();
        let parts = joined.split(&rows, 20, 1, (0, 0)).unwrap();
        assert_eq!(parts[0].values, [0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15]);
        assert_eq!(parts[1].values, [6, 7, 8, 9, 16, 17, 18, 19]);
        // Columns that move do not divide a tensor.
        assert_eq!(split_of("qwen35", "model.layers.1.linear_attn.out_proj.weight"), None);
    }
}
