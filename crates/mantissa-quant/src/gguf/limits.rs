//! Limits of llama.cpp's architectures. Refuses a model that needs more, by its field.
//!
//! The facts are rows of [`Architecture`]; what its loaders require is in `src/models/` of llama.cpp.

use mantissa_model::config::{Experts, HeadNorms, Latent, LimitedSwiglu, NormForm, Scores};
use mantissa_model::rope::{RopeScaling, Yarn, yarn_mscale};
use mantissa_model::{Activation, ModelConfig};
use mantissa_store::Error;
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{self, Architecture, GgufExperts, Presence, Unrotated, Windows};

use crate::error::{QuantError, Result};

/// Returns the error of a part of the model that GGUF or llama.cpp cannot express.
pub(crate) fn fault(source: &ModelFiles, field: &str, got: impl Into<String>, expected: &str) -> QuantError {
    Error::field(&source.config_path(), field, got, expected, "fix: write another format").into()
}

/// Returns the architecture that the model is written as.
///
/// # Errors
/// Names the field that llama.cpp does not compute in it.
pub(super) fn architecture(source: &ModelFiles, config: &ModelConfig) -> Result<&'static Architecture> {
    let name = config.architecture.name;
    let Some(row) = Architecture::of_model_type(name, config.experts.is_some()) else {
        return Err(fault(source, "model_type", name, &Architecture::nearest_model_types(name)));
    };
    let limits = Limits { source, config, row };
    limits.check_activation()?;
    limits.check_windows()?;
    if let Some(experts) = &config.experts {
        limits.check_experts(experts)?;
    }
    limits.check_scores()?;
    limits.check_biases()?;
    limits.check_unrotated()?;
    limits.check_head()?;
    limits.check_rope_scaling()?;
    limits.check_latent()?;
    limits.check_by_layer()?;
    limits.check_streams()?;
    limits.check_compressed()?;
    limits.check_recurrence()?;
    Ok(row)
}

/// A model, and the architecture that it is to be written as.
pub(super) struct Limits<'a> {
    source: &'a ModelFiles,
    pub(super) config: &'a ModelConfig,
    pub(super) row: &'static Architecture,
}

impl Limits<'_> {
    pub(super) fn refuse(&self, field: &str, found: impl Into<String>, allowed: &str) -> Result<()> {
        Err(fault(self.source, field, found, allowed))
    }

    fn check_activation(&self) -> Result<()> {
        let (found, row) = (self.config.hidden_act, self.row);
        let known = [Some(row.activation), row.other_activation];
        if known.into_iter().flatten().any(|name| Activation::parse(name) == Some(found)) {
            return Ok(());
        }
        let allowed = Activation::parse(row.activation).map_or_else(String::new, |first| first.to_string());
        self.refuse("hidden_act", found.to_string(), &format!("{allowed} in this architecture"))
    }

    /// Refuses windows that llama.cpp does not have, or has on other layers.
    fn check_windows(&self) -> Result<()> {
        let config = self.config;
        let everywhere = self.row.recurrence.is_some_and(|mixers| mixers.attends);
        if everywhere || matches!(self.row.windows, Windows::Listed { .. }) {
            return Ok(());
        }
        if let Windows::Periodic { period, stated, .. } = self.row.windows
            && self.row.has_windows(config.num_hidden_layers)
        {
            if !stated && !is_window_period(config, period as usize) {
                let allowed = format!("windows on all layers but the last of each {period}");
                return self.refuse("layer_types", "another pattern", &allowed);
            }
            return match window_period(config) {
                Some(_) => Ok(()),
                None => {
                    let allowed = "all layers but each of so many with one and the same window";
                    self.refuse("layer_types", "another pattern", allowed)
                }
            };
        }
        let mut windows = config.windows.iter().flatten();
        let Some(window) = windows.find(|&&window| window < config.max_position_embeddings) else {
            return Ok(());
        };
        let allowed = match self.row.windows {
            Windows::Periodic { only_with: Some(layers), .. } => {
                format!("none: llama.cpp has windows in models of {layers} layers only")
            }
            _ => "none: llama.cpp has none in this architecture".to_owned(),
        };
        self.refuse("sliding_window", window.to_string(), &allowed)
    }

    /// Checks that layers have experts, and that their weights are normalized, as the architecture requires.
    fn check_experts(&self, experts: &Experts) -> Result<()> {
        let form = self.row.experts;
        if form == GgufExperts::None {
            return self.refuse(
                "experts",
                experts.count.to_string(),
                "none in this architecture of llama.cpp",
            );
        }
        if form == GgufExperts::Hashed {
            return self.check_hashed(experts);
        }
        if let (Some(limited), Some((alpha, limit))) = (experts.limited, self.row.swiglu)
            && limited != (LimitedSwiglu { alpha, limit, offset: 1.0 })
        {
            let found = format!("{} and {}", limited.alpha, limited.limit);
            let allowed = format!("{alpha} and {limit}: llama.cpp has no key");
            return self.refuse("swiglu_alpha, swiglu_limit", found, &allowed);
        }
        let dense = experts.layers.iter().take_while(|has| !**has).count();
        let leads = match form {
            GgufExperts::Grouped { .. } | GgufExperts::Averaged { .. } => true,
            GgufExperts::Routed { first, .. } => first.is_some() || dense == 0,
            _ => false,
        };
        let known = matches!(
            form,
            GgufExperts::Grouped { .. } | GgufExperts::Routed { .. } | GgufExperts::Averaged { .. }
        );
        if known && !(leads && experts.layers[dense..].iter().all(|has| *has)) {
            let allowed = "experts in every layer after the first dense ones: llama.cpp requires them";
            return self.refuse("layers with experts", "others", allowed);
        }
        if matches!(form, GgufExperts::Interleaved { .. }) {
            return match expert_step(experts) {
                Some(_) => Ok(()),
                None => {
                    let allowed = "experts in the last of each so many layers: llama.cpp requires them";
                    self.refuse("moe_layers", "others", allowed)
                }
            };
        }
        if matches!(
            form,
            GgufExperts::Grouped { .. } | GgufExperts::Beside { .. } | GgufExperts::Periodic { .. }
        ) {
            return Ok(());
        }
        match form {
            GgufExperts::Blocks { .. } => return self.check_blocks(experts),
            GgufExperts::Averaged { .. } => return self.check_averaged(experts),
            _ => {}
        }
        if let GgufExperts::Routed { shared, scaled, .. } = form {
            if shared.is_some() && experts.shared.is_none() {
                return self.refuse("shared experts", "0", "at least 1: llama.cpp requires them");
            }
            if experts.routing.groups.is_some() {
                return self.refuse(
                    "n_group",
                    "more than 1",
                    "1: llama.cpp has no groups in this architecture",
                );
            }
            if scaled {
                return Ok(());
            }
            if experts.routing.scale != 1.0 || !experts.routing.normalize {
                let allowed = "normalized weights without a factor: llama.cpp has no key";
                return self.refuse("routed_scaling_factor", experts.routing.scale.to_string(), allowed);
            }
            return Ok(());
        }
        if let Some(layer) = experts.layers.iter().position(|has| !has) {
            let found = format!("no experts in layer {layer}");
            return self.refuse("mlp_only_layers", found, "experts in every layer: llama.cpp requires them");
        }
        let normalized = match form {
            GgufExperts::Every { normalized, .. } => normalized,
            _ => Some(true),
        };
        match normalized.filter(|&normalized| experts.routing.normalize != normalized) {
            Some(normalized) if experts.routing.scores != Scores::SoftmaxOfChosen => {
                let allowed = format!("{normalized}: llama.cpp has no other in this architecture");
                self.refuse("norm_topk_prob", experts.routing.normalize.to_string(), &allowed)
            }
            _ => Ok(()),
        }
    }

    /// Checks experts that are averaged with shared ones.
    fn check_averaged(&self, experts: &Experts) -> Result<()> {
        if experts.shared.is_some_and(|shared| !shared.averaged) {
            let allowed = "average: llama.cpp has no other in this architecture";
            return self.refuse("shared_expert_combination_strategy", "sum", allowed);
        }
        if self.config.norm == NormForm::Rms {
            let allowed = "null: models of this architecture with RMSNorm are not written";
            return self.refuse("rms_norm_eps", self.config.rms_norm_eps.to_string(), allowed);
        }
        Ok(())
    }

    /// Checks experts in layers that have nothing else.
    fn check_blocks(&self, experts: &Experts) -> Result<()> {
        let mlp =
            (0..experts.layers.len()).find(|&layer| self.config.has_mlp[layer] && !experts.layers[layer]);
        if let Some(layer) = mlp {
            let found = format!("an MLP in layer {layer}");
            let allowed = "experts in every layer that is no mixer or attention: llama.cpp requires them";
            return self.refuse("layers_block_type", found, allowed);
        }
        if experts.shared.is_none() {
            return self.refuse("n_shared_experts", "0", "at least 1: llama.cpp requires them");
        }
        Ok(())
    }

    /// Checks scale and cap of the attention scores, for which llama.cpp has no key.
    fn check_scores(&self) -> Result<()> {
        let config = self.config;
        // DeepSeek's scale follows from its widths and from YaRN's parameters, which are checked.
        if config.latent.is_some() {
            return Ok(());
        }
        if self.row.has_key("attention.scale") {
            return Ok(());
        }
        let (layers, heads) = (config.num_hidden_layers, config.num_attention_heads);
        let width = self.row.query_scale(layers, config.hidden_size, heads, config.head_dim);
        let scale = (width as f64).powf(-0.5);
        if (f64::from(config.attention_scale) - scale).abs() > 1e-6 * scale {
            let found = f64::from(config.attention_scale).powi(-2).to_string();
            return self.refuse("query_pre_attn_scalar", found, &format!("{width}: llama.cpp has no key"));
        }
        const CAP: &str = "attn_logit_softcapping";
        if let Some(cap) = config.attention_softcap.filter(|_| !self.row.has_key(CAP)) {
            return self.refuse(CAP, cap.to_string(), "null in this architecture");
        }
        match &config.local_rope {
            Some(rope) if rope.scaling != RopeScaling::Default => {
                self.refuse("rope_parameters.sliding_attention", "a scaling", "none in layers with a window")
            }
            _ => Ok(()),
        }
    }

    /// Refuses biases that llama.cpp does not load, and the absence of those that it requires.
    fn check_biases(&self) -> Result<()> {
        let biases = &self.config.biases;
        let has = |tensor: &&str| match *tensor {
            "attn_output" => biases.output,
            tensor if tensor.starts_with("ffn_") => biases.mlp,
            _ => biases.qkv,
        };
        for bias in self.row.biases {
            let present = match bias.presence {
                Presence::Required => bias.tensors.iter().all(has),
                _ => bias.tensors.iter().any(has),
            };
            if !bias.presence.allows(present) {
                let allowed = format!("{} in this architecture", !present);
                return self.refuse(bias.field, present.to_string(), &allowed);
            }
        }
        Ok(())
    }

    /// Checks which layers have no position embedding.
    fn check_unrotated(&self) -> Result<()> {
        let config = self.config;
        let windowed = config.windows.iter().any(Option::is_some);
        let rotated = |layer: usize| match self.row.unrotated {
            Unrotated::None => true,
            Unrotated::LastOf(period) => !(layer + 1).is_multiple_of(period),
            Unrotated::WithoutWindow => !windowed || config.windows[layer].is_some(),
            Unrotated::NotWindowed => config.windows[layer].is_some(),
            Unrotated::NotWindowedButDense => {
                let dense = config.experts.as_ref().is_none_or(|experts| !experts.layers[layer]);
                dense || config.windows[layer].is_some()
            }
            Unrotated::All => false,
            // One flag for all layers.
            Unrotated::Switched => config.rotated_layers.first().copied().unwrap_or(true),
        };
        let differs = |(layer, found): (usize, &bool)| *found != rotated(layer);
        let Some(layer) = config.rotated_layers.iter().enumerate().position(differs) else { return Ok(()) };
        match self.row.unrotated {
            Unrotated::LastOf(period) => {
                let found = format!("{} in layer {layer}", u8::from(!rotated(layer)));
                let allowed = format!("1, and 0 in the last of each {period} layers: llama.cpp has no key");
                self.refuse("no_rope_layers", found, &allowed)
            }
            _ => {
                let found = "layers without window and position embedding";
                self.refuse("sliding_window", found, "null, or a window on other layers")
            }
        }
    }

    /// Checks the output head, and the width of the attention heads.
    fn check_head(&self) -> Result<()> {
        let config = self.config;
        let tied = config.tie_word_embeddings;
        if !self.row.tied.allows(tied) {
            let allowed = format!("{} in this architecture", !tied);
            return self.refuse("tie_word_embeddings", tied.to_string(), &allowed);
        }
        if self.row.heads_fill_width && config.query_width() != config.hidden_size {
            let allowed = format!("hidden_size / num_attention_heads, {}", config.hidden_size);
            let allowed = format!("{allowed} / {}", config.num_attention_heads);
            return self.refuse("head_dim", config.head_dim.to_string(), &allowed);
        }
        Ok(())
    }

    /// Refuses scalings of the rotary frequencies that llama.cpp does not compute.
    fn check_rope_scaling(&self) -> Result<()> {
        if let Some(fixed) = self.row.growth {
            let found = self.config.query_growth.map(|growth| [growth.rate, growth.period, growth.offset]);
            if found != Some(fixed) {
                let found =
                    found.map_or("no growth".to_owned(), |[rate, period, _]| format!("{rate}, {period}"));
                let allowed = format!("{} and {}: llama.cpp has no key", fixed[0], fixed[1]);
                return self.refuse("attn_scale, floor_scale", found, &allowed);
            }
        } else if let Some(growth) = self.config.query_growth {
            let context = match &self.config.rope.scaling {
                RopeScaling::Yarn(yarn) => yarn.original_context as f32,
                _ => 0.0,
            };
            if growth.period != context || growth.offset != 0.0 {
                let allowed = "YaRN with its original context: llama.cpp has no key";
                return self.refuse("llama_4_scaling_beta", growth.rate.to_string(), allowed);
            }
        }
        let allowed = match &self.config.rope.scaling {
            RopeScaling::Default | RopeScaling::Linear { .. } => return Ok(()),
            RopeScaling::Yarn(yarn) => return self.check_yarn(yarn),
            RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) if self.row.rope_factors => return Ok(()),
            RopeScaling::Long(_) if self.row.long_rope => return Ok(()),
            RopeScaling::Proportional { factor, .. } if self.row.by_layer && *factor == 1.0 => return Ok(()),
            _ if self.row.rope_factors => "linear, yarn or llama3; longrope in phi3",
            _ => "linear or yarn: llama.cpp has no divisors of frequencies in this architecture",
        };
        self.refuse("rope_scaling", "another kind", allowed)
    }

    /// Checks what llama.cpp computes of YaRN. In gpt-oss it rounds the ends of the ramp outwards where the model does not
    /// (`truncate`), which moves some frequencies; its files are written anyway, and read as the model is.
    fn check_yarn(&self, yarn: &Yarn) -> Result<()> {
        // DeepSeek's two factors cancel in cosines and sines; the scores have their square.
        let multiplier = self.row.yarn == gguf::Yarn::Multiplier;
        let of_all = match self.row.yarn {
            gguf::Yarn::Ratio => yarn_mscale(yarn.factor, yarn.mscale_all_dim),
            _ => 1.0,
        };
        let expected = if multiplier || self.row.yarn == gguf::Yarn::Unscaled {
            1.0
        } else {
            yarn_mscale(yarn.factor, 1.0) / of_all
        };
        let same = (yarn.attention_factor - expected).abs() < 1e-6 * expected
            && (!multiplier || yarn.mscale_all_dim != 0.0)
            && yarn.truncate == (self.row.yarn != gguf::Yarn::Untruncated);
        if !same || (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0) {
            let allowed = "YaRN with its default betas, truncation and attention factor";
            return self.refuse("rope_scaling", "other parameters", allowed);
        }
        Ok(())
    }

    /// Checks latent attention and the experts that come with it.
    fn check_latent(&self) -> Result<()> {
        let config = self.config;
        let Some(latent) = config.latent else { return Ok(()) };
        if config.rms_norm_eps != Latent::EPS && !self.row.one_epsilon.contains(&config.architecture.name) {
            let allowed = "1e-6, the epsilon of the latents' norms: llama.cpp has one for all";
            return self.refuse("rms_norm_eps", config.rms_norm_eps.to_string(), allowed);
        }
        if !latent.interleaved && self.row.unrotated != Unrotated::All {
            return self.refuse("rope_interleave", "false", "true: llama.cpp has no key");
        }
        if let Some(indexer) = config.indexer.as_ref().filter(|indexer| !indexer.dim.is_multiple_of(64)) {
            let allowed = "a multiple of 64: llama.cpp rotates index keys in such blocks";
            return self.refuse("index_head_dim", indexer.dim.to_string(), allowed);
        }
        let Some(experts) = &config.experts else { return Ok(()) };
        if experts.shared.is_none() {
            return self.refuse("n_shared_experts", "0", "at least 1: llama.cpp requires them");
        }
        if experts.routing.groups.is_some_and(|groups| !groups.best_two) {
            let allowed = "greedy: llama.cpp ranks groups by their best two experts only";
            return self.refuse("topk_method", "group_limited_greedy", allowed);
        }
        Ok(())
    }

    /// Checks chunks, norms of heads, and what distinguishes the layers.
    fn check_by_layer(&self) -> Result<()> {
        let (config, by_layer) = (self.config, &self.config.by_layer);
        if let Some(chunk) = self.row.chunk.filter(|_| by_layer.chunk != self.row.chunk) {
            let found = by_layer.chunk.map_or("null".to_owned(), |found| found.to_string());
            return self.refuse("attention_chunk_size", found, &format!("{chunk}: llama.cpp has no key"));
        }
        if let Some(without) = self.row.unnormed_with {
            let normed = config.head_norms == HeadNorms::Plain;
            let expected = config.experts.as_ref().is_none_or(|experts| experts.count != without);
            if normed != expected {
                let allowed = format!("{expected}: llama.cpp has false with {without} experts only");
                return self.refuse("use_qk_norm", normed.to_string(), &allowed);
            }
        }
        let inputs = by_layer.inputs.filter(|inputs| inputs.vocabulary != config.vocab_size);
        if let Some(inputs) = inputs {
            let allowed = format!("{}, as vocab_size: llama.cpp requires it", config.vocab_size);
            return self.refuse("vocab_size_per_layer_input", inputs.vocabulary.to_string(), &allowed);
        }
        // Layers that share keys and values read the last two layers before them.
        let from = by_layer.shared_from;
        let last_two =
            || from >= 2 && config.windows[from - 2].is_some() && config.windows[from - 1].is_none();
        if from < config.num_hidden_layers && !last_two() {
            let allowed =
                "a layer with a window and one without before the layers that share: llama.cpp requires them";
            return self.refuse(
                "num_kv_shared_layers",
                (config.num_hidden_layers - from).to_string(),
                allowed,
            );
        }
        Ok(())
    }
}

/// Least period of the layers without a window; 0 if all layers have one.
pub(super) fn window_period(config: &ModelConfig) -> Option<usize> {
    (0..=config.windows.len()).find(|&period| is_window_period(config, period))
}

/// Least number of layers of which the last has experts, and no other.
pub(super) fn expert_step(experts: &Experts) -> Option<usize> {
    let fits =
        |step: &usize| (1..).zip(&experts.layers).all(|(n, has): (usize, _)| *has == n.is_multiple_of(*step));
    (1..=experts.layers.len()).find(fits)
}

/// True if every layer but the last of each `period` has a window; for 0, if every layer has one.
pub(super) fn is_window_period(config: &ModelConfig, period: usize) -> bool {
    let windowed = |layer: usize| period == 0 || layer % period < period - 1;
    config.windows.iter().enumerate().all(|(layer, window)| window.is_some() == windowed(layer))
}
