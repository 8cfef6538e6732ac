//! The decoder: embedding, layers, norm, head. `tokens` → `[tokens, hidden]` → `[tokens, vocabulary]`.

use std::ops::{ControlFlow, Range};

use mantissa_num::Accumulator;

use crate::buffers::Buffers;
use crate::cache::KvCache;
use crate::calibrate::{KvCalibrationError, Text};
use crate::config::ModelConfig;
use crate::embedding::{Embedding, load_embedding};
use crate::error::{ForwardError, LoadError};
use crate::flow::Sequences;
use crate::kv::policy::KvPolicy;
use crate::layer::Layer;
use crate::linear::{Linear, LinearMatmul, forward_fused};
use crate::model_config::{load_config, require_head};
use crate::norm::Norm;
use crate::operands::AttentionOperands;
use crate::source::WeightSource;

/// A model ready to run. `Sync`: any number of threads may run passes, each with its own [`Buffers`].
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    /// Output head; `None` if it is the embedding.
    head: Option<Linear>,
}

/// Independent sequences, concatenated, each starting at position 0.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Tokens of all sequences.
    pub tokens: &'a [u32],
    /// Length of each sequence.
    pub lens: &'a [usize],
}

/// Result of a pass: the hidden states after the last norm, `[tokens, hidden]`. Logits are computed on demand.
#[derive(Debug)]
pub struct Hidden<'a> {
    decoder: &'a Decoder,
    states: &'a [f32],
    quantized: &'a mut [f32],
    panel: &'a mut [f32],
}

impl Decoder {
    /// Loads the model that `source` describes, with all its weights.
    ///
    /// # Errors
    /// [`LoadError`] names the field, the tensor or the linear layer that does not fit.
    pub fn load(source: &dyn WeightSource) -> Result<Self, LoadError> {
        let config = load_config(source)?;
        require_head(&config, source)?;
        let layers = (0..config.num_hidden_layers).map(|layer| Layer::load(source, &config, layer));
        let head = || {
            let module = config.head_module();
            let weight = source.linear(module, config.vocab_size, config.hidden_size, config.head_bias)?;
            Linear::new(module, source.adapt(module, weight)?)
        };
        Ok(Decoder {
            embedding: load_embedding(source, &config)?,
            layers: layers.collect::<Result<_, _>>()?,
            norm: Norm::load(source, &config, &config.final_norm_module(), config.hidden_size)?,
            head: if config.tie_word_embeddings { None } else { Some(head()?) },
            config,
        })
    }

    /// Configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Decoder layers.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Stores keys and values of every layer by `policy` instead of the checkpoint's scheme. A pass over whole
    /// sequences uses the stored values of all keys and values except the sinks;
    /// [`forward_cached`](Self::forward_cached) stores tokens when they leave the window.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`] if the model's heads cannot be stored that way, or the policy needs a calibration
    /// text.
    pub fn set_kv(&mut self, policy: &KvPolicy) -> Result<(), LoadError> {
        if policy.is_calibrated() {
            let allowed = "a calibration text for its levels (--calibration, --calibration-tokens)";
            return Err(LoadError::KvScheme { scheme: policy.to_string(), allowed });
        }
        let quantizer = |layer| policy.quantizer(&self.config.of_layer(self.config.kv_layer(layer)));
        let quantizers = (0..self.layers.len()).map(quantizer).collect::<Result<Vec<_>, _>>()?;
        for (layer, quantizer) in self.layers.iter_mut().zip(quantizers) {
            layer.set_kv((!policy.is_f32()).then_some(quantizer));
        }
        Ok(())
    }

    /// Stores keys and values by `policy`, with levels calibrated on `windows` of tokens, over which the model runs
    /// with keys and values in f32. For other policies, same as [`set_kv`](Self::set_kv).
    ///
    /// # Errors
    /// [`KvCalibrationError`].
    pub fn set_kv_calibrated(
        &mut self,
        policy: &KvPolicy,
        windows: &[Vec<u32>],
    ) -> Result<(), KvCalibrationError> {
        if !policy.is_calibrated() {
            return Ok(self.set_kv(policy)?);
        }
        // Checks that the heads can be stored that way.
        policy.quantizer(&self.config)?;
        self.layers.iter_mut().for_each(|layer| layer.set_kv(None));
        let mut text = Text::begin(&self.config, &self.embedding, windows)?;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let books = text.through(policy, &self.config, i, layer, &mut || ControlFlow::Continue(()))?;
            let Some(books) = books else { continue };
            layer.set_kv(Some(policy.quantizer_with(&self.config.of_layer(i), &books)?));
        }
        Ok(())
    }

    /// Rounds the attention operands of every layer to `operands`.
    ///
    /// # Errors
    /// [`LoadError::AttentionOperands`] if the model's heads cannot be rounded that way.
    pub fn set_attention_operands(&mut self, operands: &AttentionOperands) -> Result<(), LoadError> {
        let rounding = |layer| operands.rounding(&self.config.of_layer(layer));
        let roundings = (0..self.layers.len()).map(rounding).collect::<Result<Vec<_>, _>>()?;
        for (layer, rounding) in self.layers.iter_mut().zip(roundings) {
            layer.set_operands(Some(rounding));
        }
        Ok(())
    }

    /// Simulates `accumulator` in linear layers with 8-bit float weights and inputs, and returns the number of such
    /// layers. Their weights then take four more bytes per element.
    pub fn set_accumulator(&mut self, accumulator: Accumulator) -> usize {
        let linears = self.layers.iter_mut().flat_map(Layer::linears_mut).chain(&mut self.head);
        linears.map(|linear| linear.set_accumulator(accumulator)).filter(|set| *set).count()
    }

    /// True if keys and values of recent tokens stay in f32, which passes over whole sequences do not model.
    pub fn has_kv_window(&self) -> bool {
        self.layers.iter().filter_map(Layer::kv).any(|kv| kv.parts().window > 0)
    }

    /// Bytes of a token in the cache, beyond window and sinks.
    pub fn kv_bytes_per_token(&self) -> f64 {
        let of_layer = |(i, layer): (usize, &Layer)| {
            let config = self.config.of_layer(i);
            let heads = 8.0 * config.key_value_width() as f64;
            let exact = config.latent.map_or(heads, |latent| latent.bytes_per_token());
            let index = 4.0 * config.index_width(i) as f64;
            index + layer.kv().map_or(exact, |kv| kv.bytes_per_token(&config))
        };
        let own = self.layers.iter().enumerate().filter(|(i, _)| self.config.has_own_kv(*i));
        own.map(of_layer).sum()
    }

    /// Runs whole sequences. A sequence's states have the same bits in any batch.
    ///
    /// # Errors
    /// [`ForwardError`] if a token is not in the vocabulary, the batch is inconsistent or larger than planned, or an
    /// activation cannot be quantized.
    pub fn forward<'a>(
        &'a self,
        batch: &Batch<'_>,
        buffers: &'a mut Buffers,
    ) -> Result<Hidden<'a>, ForwardError> {
        let tokens = batch.tokens.len();
        let sum = batch.lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if sum != tokens {
            return Err(ForwardError::Lengths { sum, tokens });
        }
        let longest = batch.lens.iter().max().copied().unwrap_or(0);
        buffers.check(&self.config, tokens, longest)?;
        let seqs = Sequences::whole(batch.lens);
        self.run(batch.tokens, &seqs, None, buffers)
    }

    /// Continues the sequence in `cache` with `tokens` and appends them to it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`ForwardError::Cache`]. The cache then holds its previous tokens, some of
    /// which may have left its window.
    pub fn forward_cached<'a>(
        &'a self,
        tokens: &[u32],
        cache: &mut KvCache,
        buffers: &'a mut Buffers,
    ) -> Result<Hidden<'a>, ForwardError> {
        cache.check(&self.config, tokens.len())?;
        buffers.check(&self.config, tokens.len(), cache.len() + tokens.len())?;
        let (lens, held) = ([tokens.len()], cache.len());
        let starts = [held];
        let seqs = Sequences { lens: &lens, starts: &starts, rows: tokens.len() };
        cache.save();
        let result = self.run(tokens, &seqs, Some(cache), buffers);
        if result.is_err() {
            cache.restore(held);
        }
        result
    }

    fn run<'a>(
        &'a self,
        tokens: &[u32],
        seqs: &Sequences<'_>,
        mut cache: Option<&mut KvCache>,
        b: &'a mut Buffers,
    ) -> Result<Hidden<'a>, ForwardError> {
        self.embed(tokens, seqs, b)?;
        let inputs = self.embedding.layer_embeddings();
        let len = tokens.len() * self.config.hidden_size;
        if inputs.is_some() {
            b.keep_first(len);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if let Some(inputs) = inputs {
                inputs.fill(i, tokens, &b.first[..len], &mut b.layer_input, 1);
            }
            layer.forward(seqs, cache.as_mut().map(|cache| cache.layer(i)), None, b)?;
        }
        if let Some(cache) = cache {
            cache.commit(tokens.len());
        }
        self.norm.forward(&b.residual[..len], &mut b.normed[..len]);
        let states = &b.normed[..len];
        Ok(Hidden { decoder: self, states, quantized: &mut b.quantized, panel: &mut b.panel })
    }

    /// Fills the residual stream with the tokens' embeddings, and padding with zeros.
    fn embed(&self, tokens: &[u32], seqs: &Sequences<'_>, b: &mut Buffers) -> Result<(), ForwardError> {
        let d = self.config.hidden_size;
        let (states, padding) = b.residual[..seqs.rows * d].split_at_mut(tokens.len() * d);
        self.embedding.embed_at(tokens, seqs, states, &mut b.normed)?;
        padding.fill(0.0);
        Ok(())
    }
}

impl KvCache {
    /// Allocates for `capacity` tokens of `decoder`, quantized where its layers quantize.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn for_decoder(decoder: &Decoder, capacity: usize) -> Result<Self, LoadError> {
        let layers = decoder.layers();
        Self::with_layers(decoder.config(), capacity, layers.len(), |layer| layers[layer].kv())
    }
}

impl Hidden<'_> {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.states.len() / self.decoder.config.hidden_size
    }

    /// Hidden states, `[tokens, hidden]`.
    pub fn states(&self) -> &[f32] {
        self.states
    }

    /// Computes the logits of the tokens `rows` into `out` (`[rows.len(), vocabulary]`). In calls with more than 64
    /// rows a token has the same bits however the tokens are split; smaller calls may differ in the last bits.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    ///
    /// # Panics
    /// If a row is out of range, or `out` has another length.
    pub fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<(), ForwardError> {
        let d = self.decoder.config.hidden_size;
        let states = &self.states[rows.start * d..rows.end * d];
        let head = self.decoder.head.as_ref().unwrap_or(&self.decoder.embedding.table);
        let job = LinearMatmul { linear: head, out: &mut *out, accumulate: false };
        forward_fused([job], states, self.quantized, self.panel)?;
        self.decoder.config.finish_logits(out);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::source::MapSource;

    /// A model with every optional part: biases, sub-norms or QK norms, untied head.
    fn source(model_type: &str) -> MapSource {
        let mut config = crate::config::example(model_type);
        config["vocab_size"] = json!(30);
        // Its constant factors apply to results of projections without biases.
        if model_type != "falcon_h1" {
            (config["attention_bias"], config["mlp_bias"]) = (json!(true), json!(true));
        }
        let parsed = ModelConfig::from_json(&config, "config.json").unwrap();
        let values = |n: usize| (0..n).map(|i| (i as f32 * 0.77 + n as f32).sin() * 0.5).collect();
        let tensor = |t: crate::TensorInfo| {
            let n = t.shape.iter().product();
            (t.name, (t.shape, values(n)))
        };
        let tensors = parsed.tensors().into_iter().map(tensor).collect();
        MapSource { config, tensors, ..MapSource::default() }
    }

    #[test]
    fn every_tensor_of_the_graph_is_needed_and_no_other() {
        for model_type in crate::Architecture::all().map(|row| row.name) {
            let whole = source(model_type);
            let decoder = Decoder::load(&whole).unwrap();
            let mut buffers = Buffers::plan(decoder.config(), 3, 3).unwrap();
            let hidden = decoder.forward(&Batch { tokens: &[1, 2, 29], lens: &[3] }, &mut buffers).unwrap();
            assert!(hidden.states().iter().all(|x| x.is_finite()));
            for name in whole.tensors.keys() {
                let mut part = whole.clone();
                part.tensors.remove(name);
                let error = Decoder::load(&part).map(|_| ()).unwrap_err();
                assert!(
                    matches!(
                        &error,
                        LoadError::MissingTensor { tensor, .. } | LoadError::NoHead { tensor, .. } if tensor == name
                    ),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn weights_of_another_model_are_refused_with_both_shapes() {
        let mut source = source("llama");
        source.config["vocab_size"] = json!(31);
        let error = Decoder::load(&source).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("model.embed_tokens.weight") && error.contains("[30, 64]"), "{error}");
        assert!(error.contains("[31, 64]"), "{error}");
        source.config = json!({"model_type": "llama"});
        assert!(matches!(Decoder::load(&source), Err(LoadError::Config(_))));
    }

    #[test]
    fn decoders_are_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Decoder>();
        shared::<Buffers>();
        shared::<KvCache>();
    }
}
