//! Training of one decoder layer alone: forward on given hidden states, and backward.
//!
//! Block reconstruction (BRECQ, Li et al., ICLR 2021; SignRound, Cheng et al. 2023, arXiv:2309.05516)
//! minimizes the error of a layer's output after weight quantization. It needs weight gradients for one layer
//! at a time, without the rest of the model in memory.

use mantissa_model::flow::{LayerFlow, MIN_ROWS, Sequences};
use mantissa_model::{
    ForwardError, InputQuantizer, LinearInfo, LinearInput, LinearKind, ModelConfig, WeightSource,
};

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::gradients::Wanted;
use crate::model::TrainModel;
use crate::plan::Options;
use crate::store::{Precision, Store};
use crate::weights::Weights;

/// Decoder layer with forward and backward.
#[derive(Debug)]
pub struct LayerTrainer {
    model: TrainModel,
}

impl LayerTrainer {
    /// Loads layer `layer` of the model in `source`.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part of the architecture without a backward;
    /// [`TrainError::Load`] if a weight cannot be read or memory is missing.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        layer: usize,
        options: Options,
    ) -> Result<Self, TrainError> {
        Self::check(config)?;
        let single = single(config, layer);
        let mut params = Parameters::zeros(&single, Precision::F32)?;
        for kind in LinearKind::PLAIN {
            let LinearInfo { module, rows, cols, .. } = config.linear(layer, kind);
            let to = single.linear(0, kind).module;
            let weight = source.tensor_f32(&format!("{module}.weight"), &[rows, cols])?;
            params.put(&format!("{to}.weight"), &weight);
            let bias = format!("{to}.bias");
            if params.table().by_name(&bias).is_some() {
                params.put(&bias, &source.tensor_f32(&format!("{module}.bias"), &[rows])?);
            }
        }
        for (kind, width) in config.norms(layer) {
            let norm = source.tensor_f32(&config.norm_name(layer, kind), &[width])?;
            params.put(&single.norm_name(0, kind), &norm);
        }
        let threads = options.threads;
        let mut model = TrainModel::new(single, params, options)?;
        model.layers[0].flow = LayerFlow::new(config, layer, threads);
        Ok(LayerTrainer { model })
    }

    /// Checks that the layers of this architecture have a backward.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part without one.
    pub fn check(config: &ModelConfig) -> Result<(), TrainError> {
        crate::support::check_plain(config)
    }

    /// Predicts the bytes of a layer: weights, their gradients, and saved activations for a batch of
    /// `options`.
    pub fn bytes_needed(config: &ModelConfig, options: &Options) -> u64 {
        crate::plan::MemoryPlan::new(&single(config, 0), options).bytes()
    }

    /// Predicts the extra bytes of one [quantized](Self::quantize_input) input.
    pub fn quantized_input_bytes(config: &ModelConfig, input: LinearInput, options: &Options) -> u64 {
        4 * (options.max_tokens.max(MIN_ROWS) as u64).saturating_mul(config.input_width(input) as u64)
    }

    /// Quantizes `input` with `quantizer` from now on, as at run time. Gradients pass the rounding unchanged
    /// (straight-through estimator).
    ///
    /// # Errors
    /// [`TrainError::Load`] if memory is missing.
    ///
    /// # Panics
    /// If it is not an input of a dense (non-expert) layer.
    pub fn quantize_input(
        &mut self,
        input: LinearInput,
        quantizer: InputQuantizer,
    ) -> Result<(), TrainError> {
        self.model.quantize_input(0, input, quantizer, None)
    }

    /// Passes the weight `[rows, cols]` of a linear layer to `write`, which overwrites it.
    pub fn set_weight(&mut self, kind: LinearKind, write: impl FnOnce(&mut [f32])) {
        let range = self.model.layers[0].linear(kind).weight();
        match self.model.params.split_mut().1 {
            Weights::Float(Store::F32(values)) => write(&mut values[range]),
            narrow => {
                let mut values = narrow.get(range.clone()).widened().into_owned();
                write(&mut values);
                narrow.set(range.start, &values);
            }
        }
    }

    /// Runs the layer in place on `states` `[tokens, hidden]` of sequences with `lens` tokens, saving
    /// activations for [`backward`](Self::backward). In f32 the result is bit-identical to evaluation.
    ///
    /// # Errors
    /// [`TrainError::Forward`] if the batch is inconsistent or larger than planned.
    pub fn forward(&mut self, states: &mut [f32], lens: &[usize]) -> Result<(), TrainError> {
        let d = self.model.config.hidden_size;
        let tokens: usize = lens.iter().sum();
        if tokens * d != states.len() {
            return Err(ForwardError::Lengths { sum: tokens, tokens: states.len() / d.max(1) }.into());
        }
        self.model.check_size(lens)?;
        let (own, padding) = self.model.scratch.residual[..tokens.max(MIN_ROWS) * d].split_at_mut(tokens * d);
        own.copy_from_slice(states);
        padding.fill(0.0);
        self.model.run_layers(&Sequences::whole(lens))?;
        states.copy_from_slice(&self.model.scratch.residual[..tokens * d]);
        Ok(())
    }

    /// Computes weight gradients from `d_states` `[tokens, hidden]`, the gradient of the last
    /// [`forward`](Self::forward)'s output. They overwrite the previous gradients.
    ///
    /// # Panics
    /// If `lens` differ from the forward.
    pub fn backward(&mut self, d_states: &[f32], lens: &[usize]) {
        self.model.grads.zero();
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::Weights);
    }

    /// Computes weight gradients and the input gradient in one pass; `d_states` becomes the latter.
    ///
    /// # Panics
    /// If `lens` differ from the forward.
    pub fn all_gradients(&mut self, d_states: &mut [f32], lens: &[usize]) {
        self.model.grads.zero();
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::All);
        d_states.copy_from_slice(&self.model.scratch.d_residual[..d_states.len()]);
    }

    /// Returns the gradient of a linear layer's weight, `[rows, cols]`.
    pub fn gradient(&self, kind: LinearKind) -> std::borrow::Cow<'_, [f32]> {
        self.model.grads.get(self.model.layers[0].linear(kind).weight()).widened()
    }

    /// Replaces `d_states` `[tokens, hidden]`, the gradient of the last [`forward`](Self::forward)'s output,
    /// by the gradient of its input. Consumes the saved activations.
    ///
    /// # Panics
    /// If `lens` differ from the forward.
    pub fn input_gradient(&mut self, d_states: &mut [f32], lens: &[usize]) {
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::Input);
        d_states.copy_from_slice(&self.model.scratch.d_residual[..d_states.len()]);
    }
}

/// Returns the configuration of a one-layer model with a vocabulary of one token.
fn single(config: &ModelConfig, layer: usize) -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 1,
        vocab_size: 1,
        tie_word_embeddings: true,
        windows: vec![config.windows[layer]],
        mixing: vec![config.mixing[layer]],
        has_mlp: vec![config.has_mlp[layer]],
        ..config.clone()
    }
}
