//! Features that distinguish the layers of a model: heads of layers without a window, keys and values that layers
//! share, embeddings of each layer, parallel streams of states (Gemma 3n and 4).

use serde_json::Value;

use super::attention::Heads;
use crate::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};
use crate::mixer::Compression;
use crate::mixer::entries;
use mantissa_arch::Architecture;

/// Heads of the layers without a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalHeads {
    /// Width of a head, even.
    pub head_dim: usize,
    /// Key and value heads; they divide the query heads.
    pub num_key_value_heads: usize,
    /// True if the keys, before their norm, are the values too.
    pub keys_are_values: bool,
}

/// Embeddings that each layer reads besides the states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Width of a layer's embedding.
    pub width: usize,
    /// Rows of the table.
    pub vocabulary: usize,
}

/// Shape of the heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerHeads {
    /// Query heads.
    pub query: usize,
    /// Key and value heads.
    pub key_value: usize,
    /// Width of a head.
    pub dim: usize,
}

/// Features that distinguish the layers of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerFeatures {
    /// Heads of the layers without a window, if they differ.
    pub global_heads: Option<GlobalHeads>,
    /// First of the layers that read keys and values of earlier ones: each those of the last layer before it that has
    /// its own and, like it, a window or none. The number of layers if there is none.
    pub shared_from: usize,
    /// True if the MLPs of these layers are twice as wide.
    pub wide_shared: bool,
    /// Embeddings of each layer.
    pub inputs: Option<LayerInputs>,
    /// True if the states are multiplied by a number after each layer.
    pub scales: bool,
    /// Length of the chunks within which rotated layers attend (Llama 4).
    pub chunk: Option<usize>,
    /// Parallel streams of states, of which a layer computes the first.
    pub streams: Option<Streams>,
    /// Parallel streams of states, which each half of a layer joins and mixes.
    pub hyper: Option<HyperStreams>,
    /// Compressed entries that each layer attends to beside a window; empty in models without.
    pub compression: Vec<Option<Compression>>,
    /// Standard deviations above the mean of a token's gate at which the MLP of each layer cuts it off; empty in models
    /// that do not.
    pub cutoffs: Vec<Option<f32>>,
}

/// Parallel streams of states (Gemma 3n).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Number of streams; a layer computes the first.
    pub count: usize,
    /// Inner width of the low-rank path beside attention.
    pub laurel: usize,
    /// True if the states that gate the embeddings of layers have factors.
    pub scales: bool,
}

impl Streams {
    /// Largest number of streams.
    pub const MOST: usize = 16;

    fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        fields.optional_size("altup_active_idx", 0..=0)?;
        Ok(Streams {
            count: fields.optional_size("altup_num_inputs", 2..=Self::MOST as u64)?.unwrap_or(4),
            laurel: fields.optional_size("laurel_rank", 1..=MAX_WIDTH)?.unwrap_or(64),
            scales: fields.flag("altup_correct_scale", true)?,
        })
    }
}

/// Parallel streams of states that each half of a layer joins into its input, and mixes (DeepSeek-V4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HyperStreams {
    /// Number of streams.
    pub count: usize,
    /// Times that the rows and columns of a mixing matrix are normalized.
    pub iterations: usize,
    /// Number that is added to weights and sums.
    pub eps: f32,
}

impl HyperStreams {
    /// Weights of a half of a layer: those that join and spread the streams, and the matrix that mixes them.
    pub fn weights(&self) -> usize {
        self.count * (self.count + 2)
    }

    /// Values of a row: its streams, and the weights that spread and mix them.
    pub fn row(&self, hidden: usize) -> usize {
        self.count * (hidden + self.count + 1)
    }

    fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        Ok(HyperStreams {
            count: fields.optional_size("hc_mult", 1..=Streams::MOST as u64)?.unwrap_or(4),
            iterations: fields.optional_size("hc_sinkhorn_iters", 1..=1000)?.unwrap_or(20),
            eps: fields.optional_positive("hc_eps")?.unwrap_or(1e-6) as f32,
        })
    }
}

impl LayerFeatures {
    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
        heads: &Heads,
        windows: &[Option<usize>],
    ) -> Result<Self, ConfigError> {
        let (rules, layers) = (&architecture.by_layer, windows.len());
        let global_heads = match rules.global_heads {
            Some(default) => global_heads(fields, default, heads, windows)?,
            None => None,
        };
        let mut features =
            LayerFeatures { global_heads, shared_from: layers, scales: rules.scales, ..Default::default() };
        if rules.chunks {
            features.chunk = match fields.has("attention_chunk_size") {
                true => fields.optional_size("attention_chunk_size", 1..=MAX_POSITIONS)?,
                false => Some(8192),
            };
        }
        if let Some(default) = rules.shared_kv {
            let shared =
                fields.optional_size("num_kv_shared_layers", 0..=layers as u64 - 1)?.unwrap_or(default);
            if shared >= layers {
                return Err(fields.error("num_kv_shared_layers", format!("fewer than {layers}")));
            }
            features.shared_from = layers - shared;
            features.wide_shared = fields.flag("use_double_wide_mlp", false)?;
            let (own, reading) = windows.split_at(features.shared_from);
            let held = |window: &Option<usize>| own.iter().any(|own| own.is_some() == window.is_some());
            if !reading.iter().all(held) {
                let allowed = "layers of each kind before those that share keys and values";
                return Err(fields.error("num_kv_shared_layers", allowed));
            }
        }
        if rules.inputs {
            let width = fields.optional_size("hidden_size_per_layer_input", 0..=MAX_WIDTH)?.unwrap_or(256);
            if width.saturating_mul(layers) as u64 > MAX_WIDTH {
                let allowed = format!("at most {MAX_WIDTH} / num_hidden_layers");
                return Err(fields.error("hidden_size_per_layer_input", allowed));
            }
            let limits = 1..=u64::from(u32::MAX);
            let vocabulary = fields.optional_size("vocab_size_per_layer_input", limits)?.unwrap_or(262_144);
            features.inputs = (width > 0).then_some(LayerInputs { width, vocabulary });
        }
        if rules.streams {
            features.streams = Some(Streams::parse(fields)?);
            if features.inputs.is_none() {
                return Err(fields.error("hidden_size_per_layer_input", "a number greater than 0"));
            }
        }
        if rules.hyper {
            features.hyper = Some(HyperStreams::parse(fields)?);
            features.compression = entries::layers(fields, layers)?;
        }
        if rules.sparsity {
            features.cutoffs = cutoffs(fields, layers)?;
        }
        Ok(features)
    }
}

/// Parses the share of a gate's values that each MLP cuts off, as standard deviations of a normal distribution. By
/// default the first ten layers of a deep model cut off 95 %.
fn cutoffs(fields: Fields<'_>, layers: usize) -> Result<Vec<Option<f32>>, ConfigError> {
    let field = "activation_sparsity_pattern";
    let shares = match fields.get(field) {
        None => (0..layers).map(|layer| if layers > 10 && layer < 10 { 0.95 } else { 0.0 }).collect(),
        Some(value) => {
            let share = |value: &Value| value.as_f64().filter(|share| (0.0..1.0).contains(share));
            let listed = value.as_array().filter(|list| list.len() == layers);
            let shares: Option<Vec<f64>> = listed.and_then(|list| list.iter().map(share).collect());
            shares.ok_or_else(|| fields.error(field, format!("{layers} numbers from 0 to less than 1")))?
        }
    };
    Ok(shares.into_iter().map(|share| (share > 0.0).then(|| normal_quantile(share) as f32)).collect())
}

/// Value that a standard normal variable stays below with probability `share`.
fn normal_quantile(share: f64) -> f64 {
    // Φ(x) = 1/2 + φ(x) (x + x³/3 + x⁵/(3·5) + …).
    let below = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for i in 1..200 {
            term *= x * x / f64::from(2 * i + 1);
            sum += term;
        }
        0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
    };
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        if below(middle) < share { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// Parses the heads of layers without a window, as published or as transformers 5 writes them (`per_layer_config`).
fn global_heads(
    fields: Fields<'_>,
    default: usize,
    heads: &Heads,
    windows: &[Option<usize>],
) -> Result<Option<GlobalHeads>, ConfigError> {
    let keys_are_values = fields.flag("attention_k_eq_v", false)?;
    let stated = match fields.get("per_layer_config") {
        Some(by_layer) => of_layers(fields, by_layer, windows)?,
        None => None,
    };
    let limits = 1..=MAX_WIDTH;
    let (head_dim, key_value) = match stated {
        Some((head_dim, key_value)) => (head_dim.unwrap_or(heads.dim), key_value),
        None if fields.get("per_layer_config").is_some() => (heads.dim, None),
        None => (
            fields.optional_size("global_head_dim", limits.clone())?.unwrap_or(default),
            fields.optional_size("num_global_key_value_heads", limits)?.filter(|_| keys_are_values),
        ),
    };
    let global =
        GlobalHeads { head_dim, num_key_value_heads: key_value.unwrap_or(heads.key_value), keys_are_values };
    let found = || format!("{head_dim} and {} heads of keys", global.num_key_value_heads);
    if !head_dim.is_multiple_of(2) || heads.query.saturating_mul(head_dim) as u64 > MAX_WIDTH {
        return Err(fields.error_found("global_head_dim", found(), "an even number: RoPE rotates pairs"));
    }
    if !heads.query.is_multiple_of(global.num_key_value_heads) {
        let allowed = format!("a divisor of num_attention_heads, which is {}", heads.query);
        return Err(fields.error_found("num_global_key_value_heads", found(), allowed));
    }
    Ok(Some(global))
}

/// `head_dim` and `num_key_value_heads` as `per_layer_config` states them, each only where it does.
type StatedHeads = (Option<usize>, Option<usize>);

/// Reads `head_dim` and `num_key_value_heads` that `per_layer_config` states for every layer without a window, and for
/// no other.
fn of_layers(
    fields: Fields<'_>,
    by_layer: &Value,
    windows: &[Option<usize>],
) -> Result<Option<StatedHeads>, ConfigError> {
    let wrong = || {
        let allowed =
            "the same head_dim and num_key_value_heads for every layer without a window, and no other";
        fields.error("per_layer_config", allowed)
    };
    let of_layer = |layer: usize| by_layer.get(layer.to_string());
    let known = |value: &Value| {
        let names = value.as_object().map(|object| object.keys().cloned().collect::<Vec<_>>());
        names.is_some_and(|names| names.iter().all(|n| n == "head_dim" || n == "num_key_value_heads"))
    };
    let found = windows.iter().position(Option::is_none).and_then(of_layer);
    let stated = |layer: usize| if windows[layer].is_none() { found } else { None };
    if !found.is_none_or(known) || (0..windows.len()).any(|layer| of_layer(layer) != stated(layer)) {
        return Err(wrong());
    }
    let Some(found) = found else { return Ok(None) };
    let size = |name: &str| match found.get(name) {
        None => Ok(None),
        Some(value) => {
            let size = value.as_u64().filter(|n| (1..=MAX_WIDTH).contains(n)).ok_or_else(wrong)?;
            Ok(usize::try_from(size).ok())
        }
    };
    Ok(Some((size("head_dim")?, size("num_key_value_heads")?)))
}

#[cfg(test)]
mod tests {
    use super::normal_quantile;

    #[test]
    fn quantiles_are_those_of_tables() {
        for (share, expected) in
            [(0.5, 0.0), (0.95, 1.644_853_627), (0.975, 1.959_963_985), (0.01, -2.326_347_874)]
        {
            assert!((normal_quantile(share) - expected).abs() < 1e-8, "{share}");
        }
    }
}
