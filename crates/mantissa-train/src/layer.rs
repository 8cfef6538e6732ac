//! One decoder layer in training by itself: hidden states in, hidden states out, and gradients back.
//!
//! Block reconstruction (BRECQ, Li et al., ICLR 2021; SignRound, Cheng et al. 2023, arXiv:2309.05516) minimises what a layer's
//! output loses when its weights are quantized. It needs the gradient of that loss with respect to each weight, for one layer
//! at a time, with nothing else of the model in memory.

use mantissa_model::flow::{LayerFlow, MIN_ROWS, Sequences};
use mantissa_model::{
    ForwardError, InputQuantizer, LinearInfo, LinearInput, LinearKind, ModelConfig, WeightSource,
};

use crate::arena::Parameters;
use crate::backward::Wanted;
use crate::error::TrainError;
use crate::model::{Options, TrainModel};
use crate::store::{Precision, Store};

/// A decoder layer in training.
#[derive(Debug)]
pub struct LayerTrainer {
    model: TrainModel,
}

impl LayerTrainer {
    /// Reads layer `layer` of the model that `source` holds.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part of the architecture that has no backward; [`TrainError::Load`] where a weight
    /// cannot be read or there is not enough memory.
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
        for (kind, width) in config.norms() {
            let norm = source.tensor_f32(&config.norm_name(layer, kind), &[width])?;
            params.put(&single.norm_name(0, kind), &norm);
        }
        let threads = options.threads;
        let mut model = TrainModel::new(single, params, options)?;
        model.layers[0].flow = LayerFlow::new(config, layer, threads);
        Ok(LayerTrainer { model })
    }

    /// Whether the layers of this architecture have a backward.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part that has none.
    pub fn check(config: &ModelConfig) -> Result<(), TrainError> {
        crate::model::check_supported(config)
    }

    /// Bytes that a layer takes: values and gradients of its weights, and what a batch of `options` saves.
    pub fn bytes_needed(config: &ModelConfig, options: &Options) -> u64 {
        crate::plan::Plan::new(&single(config, 0), options).bytes()
    }

    /// Bytes that one input takes beside them where it is [quantized](Self::quantize_input).
    pub fn quantized_input_bytes(config: &ModelConfig, input: LinearInput, options: &Options) -> u64 {
        4 * (options.max_tokens.max(MIN_ROWS) as u64).saturating_mul(config.input_width(input) as u64)
    }

    /// From now on the linear layers that read `input` read what `quantizer` makes of it, as in a model whose inputs are quantized at
    /// run time. Gradients pass the rounding as if it were none.
    ///
    /// # Errors
    /// [`TrainError::Load`] where there is not enough memory.
    ///
    /// # Panics
    /// If it is not an input of a layer without experts.
    pub fn quantize_input(
        &mut self,
        input: LinearInput,
        quantizer: InputQuantizer,
    ) -> Result<(), TrainError> {
        self.model.quantize_input(0, input, quantizer, None)
    }

    /// Replaces the weight of a linear layer, `[rows, cols]`, by what `write` makes of it in place.
    pub fn set_weight(&mut self, kind: LinearKind, write: impl FnOnce(&mut [f32])) {
        let range = self.model.layers[0].linear(kind).weight();
        match self.model.params.split_mut().1 {
            Store::F32(values) => write(&mut values[range]),
            narrow => {
                let mut values = narrow.get(range.clone()).widened().into_owned();
                write(&mut values);
                narrow.set(range.start, &values);
            }
        }
    }

    /// Takes `states` `[tokens, hidden]` of sequences of `lens` tokens through the layer, in place, keeping what
    /// [`backward`](Self::backward) needs. In f32 the bits are those of evaluation.
    ///
    /// # Errors
    /// [`TrainError::Forward`] where the batch is inconsistent or larger than planned.
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

    /// From `d_states` `[tokens, hidden]`, the gradient of what the last [`forward`](Self::forward) gave, the gradients of the
    /// weights. They replace the last ones.
    ///
    /// # Panics
    /// If `lens` are not those of the forward.
    pub fn backward(&mut self, d_states: &[f32], lens: &[usize]) {
        self.model.grads.zero();
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::Weights);
    }

    /// [`backward`](Self::backward) and [`input_gradient`](Self::input_gradient) of `d_states` at once.
    ///
    /// # Panics
    /// If `lens` are not those of the forward.
    pub fn all_gradients(&mut self, d_states: &mut [f32], lens: &[usize]) {
        self.model.grads.zero();
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::All);
        d_states.copy_from_slice(&self.model.scratch.d_residual[..d_states.len()]);
    }

    /// The gradient of a linear layer's weight, `[rows, cols]`.
    pub fn gradient(&self, kind: LinearKind) -> std::borrow::Cow<'_, [f32]> {
        self.model.grads.get(self.model.layers[0].linear(kind).weight()).widened()
    }

    /// Takes `d_states` `[tokens, hidden]`, the gradient of what the last [`forward`](Self::forward) gave, in place to that of what
    /// the layer read. What the forward kept is used up.
    ///
    /// # Panics
    /// If `lens` are not those of the forward.
    pub fn input_gradient(&mut self, d_states: &mut [f32], lens: &[usize]) {
        self.model.scratch.d_residual[..d_states.len()].copy_from_slice(d_states);
        self.model.layer_backward(0, lens, Wanted::Input);
        d_states.copy_from_slice(&self.model.scratch.d_residual[..d_states.len()]);
    }
}

/// The configuration of a model that is this layer, with a vocabulary of one token.
fn single(config: &ModelConfig, layer: usize) -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 1,
        vocab_size: 1,
        tie_word_embeddings: true,
        windows: vec![config.windows[layer]],
        ..config.clone()
    }
}
