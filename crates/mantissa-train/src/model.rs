//! Model in training: parameters, gradients, and one step's forward and backward.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::flow::Sequences;
use mantissa_model::graph::NormKind;
use mantissa_model::{
    Batch, ForwardError, LinearKind, LoadError, ModelConfig, WeightSource, load_config, require_head, zeros,
};

use crate::adapter::Dropout;
use crate::arena::Parameters;
use crate::error::TrainError;
use crate::exchange::{Reduction, Remote, Unit};
use crate::form::{Draw, Form, Histories, Making, Matrix, Rule, histories};
use crate::gradients::{Gradients, Wanted};
use crate::health::{LostSignals, OperandKind, Operator, Watch};
use crate::learned::{scales_name, usable};
use crate::linear::LinearOp;
use crate::loss::{IGNORE_TARGET, Loss};
use crate::norm::NormOp;
use crate::ops::LayerOps;
use crate::param_table::{ParamInfo, ParamTable};
use crate::plan::{Options, Saved, Scratch, allocate};
use crate::policy::{LinearPolicy, Master};
use crate::profile::{Profile, StepPart};
use crate::stop::Stop;
use crate::support::check_model;

/// Model in training.
#[derive(Debug)]
pub struct TrainModel {
    pub(crate) config: ModelConfig,
    pub(crate) options: Options,
    pub(crate) params: Parameters,
    pub(crate) grads: Gradients,
    pub(crate) layers: Vec<LayerOps>,
    pub(crate) embedding: Range<usize>,
    /// Place of the learned positions.
    pub(crate) positions: Option<Range<usize>>,
    pub(crate) final_norm: NormOp,
    pub(crate) head: LinearOp,
    pub(crate) saved: Vec<Saved>,
    pub(crate) scratch: Scratch,
    pub(crate) profile: Profile,
    pub(crate) watch: Watch,
    /// Operands of the step that rounding made 0.
    pub(crate) lost: LostSignals,
    /// amax histories of delayed scaling.
    pub(crate) histories: Histories,
    /// Step and batch, for random numbers.
    pub(crate) draw: Draw,
    /// Factor of the load-balancing loss, if it was set.
    pub(crate) balance_factor: Option<f32>,
    /// Load-balancing loss of the last batch.
    pub(crate) balance_loss: Option<f64>,
    /// Slopes of that loss in the router's probabilities, by expert; empty without it.
    pub(crate) balance: Vec<f32>,
    /// Tokens that chose each expert, by layer.
    pub(crate) routed: Vec<Vec<u64>>,
    /// Places of the parameters with a gradient that is not 0 throughout, where other ranks hold a part of the sums.
    pub(crate) with_gradient: Option<BTreeSet<usize>>,
    /// amax and sum of squares of the gradient of every parameter, where other ranks hold a part of the sums.
    pub(crate) grad_sizes: Option<Vec<(f32, f64)>>,
    /// Weights that are divided among ranks.
    pub(crate) remote: Option<Remote>,
    /// Sums of gradients over ranks in the middle of a pass.
    pub(crate) reduction: Option<Reduction>,
    /// Polled between two layers; true stops the step.
    pub(crate) stop: Option<Stop>,
}

impl TrainModel {
    /// Loads the model in `source`.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part that cannot be trained, [`TrainError::Policy`] the
    /// unsupported operand; [`TrainError::Load`] if a weight cannot be read or memory is missing.
    pub fn load(source: &dyn WeightSource, options: Options) -> Result<Self, TrainError> {
        let config = load_config(source)?;
        require_head(&config, source)?;
        check_model(&config)?;
        let params = Parameters::load(source, &config)?;
        Self::new(config, params, options)
    }

    /// Checks that a model of this configuration can be trained as a whole.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] names the part that cannot be trained.
    pub fn check_config(config: &ModelConfig) -> Result<(), TrainError> {
        check_model(config)
    }

    /// Makes a model from parameters, which are converted to the policy's precision.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Panics
    /// If the parameters belong to another configuration.
    pub fn new(config: ModelConfig, params: Parameters, options: Options) -> Result<Self, TrainError> {
        check_model(&config)?;
        options.policy.check()?;
        let params = params.with_scales(&config, &options.policy)?;
        let base = params.base();
        let with_scales = || ParamTable::with_scales(&config, &options.policy);
        let table = base.map_or_else(with_scales, |base| base.tuning.table(&config));
        assert!(params.table() == &table, "TrainModel::new: parameters of another configuration");
        let place = |name: &str| params.place(name).unwrap_or_default();
        let mut linears = 0;
        let kv = options.policy.kv_quantizer(&config)?;
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let policy = options.policy.linear_of(layer, config.num_hidden_layers);
            LayerOps::new(
                &config,
                layer,
                &policy,
                (&params, options.policy.weights),
                (&kv, options.threads),
                &mut linears,
            )
        });
        let layers = layers.collect::<Result<Vec<_>, TrainError>>()?;
        let embedding = config.embedding_module();
        let head = if config.tie_word_embeddings { &embedding } else { config.head_module() };
        let shape = (config.vocab_size, config.hidden_size);
        let (weight, bias) = (place(&format!("{head}.weight")), params.place(&format!("{head}.bias")));
        let embedding = place(&format!("{embedding}.weight"));
        let positions = params.place(&format!("{}.weight", config.positions_module()));
        let positions = positions.filter(|_| config.learned_positions);
        let final_norm = NormOp::new(
            config.norm,
            &config.final_norm_module(),
            config.hidden_size,
            config.rms_norm_eps,
            &params,
        );
        // Converted first, so that the f32 values are freed before the rest is allocated.
        let params = match options.policy.master {
            Master::Int8 { .. } => params.stored_as_int8()?,
            _ => params.stored_as(options.policy.weights)?,
        };
        let (saved, mut scratch) = allocate(&config, &options)?;
        if let Some(base) = params.base() {
            let sizes = base.sizes(&config, options.policy.weights, options.max_tokens);
            let memory = || LoadError::Memory { what: "adapters", bytes: sizes.bytes() };
            scratch.forms.adapters = sizes.allocate().ok_or_else(memory)?;
        }
        Ok(TrainModel {
            grads: Gradients::new(&table, options.policy.gradients)?,
            layers,
            embedding,
            positions,
            final_norm,
            head: LinearOp::new(
                head,
                shape,
                weight,
                bias.filter(|_| config.head_bias),
                &options.policy.head,
            )?,
            saved,
            scratch,
            profile: Profile::default(),
            watch: Watch::Off,
            lost: LostSignals::default(),
            histories: Histories::new(&histories(&config, &options.policy)),
            draw: Draw::default(),
            balance_factor: None,
            balance_loss: None,
            balance: Vec::new(),
            routed: expert_counts(&config),
            with_gradient: None,
            grad_sizes: None,
            remote: None,
            reduction: None,
            stop: None,
            params,
            config,
            options,
        })
    }

    /// Returns the model configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.params
    }

    /// Returns the parameters for writing.
    pub fn parameters_mut(&mut self) -> &mut Parameters {
        &mut self.params
    }

    /// Returns the weight `[rows, cols]` that the forward of a linear layer multiplies by: the parameter under the
    /// scheme of `fprop.w`. Under a scheme that rounds to nearest, without a rotation or an amax history, these are
    /// the values of the quantized model that `mantissa quantize --recipe rtn-SCHEME` makes of the trained one,
    /// unless its format rounds scales further. Empty for a frozen weight.
    ///
    /// # Errors
    /// [`TrainError::Load`] if memory is missing.
    ///
    /// # Panics
    /// If the layer does not exist.
    pub fn forward_weight(&self, layer: usize, kind: LinearKind) -> Result<Vec<f32>, TrainError> {
        let linear = self.layers[layer].linear(kind);
        if linear.weight().is_empty() {
            return Ok(Vec::new());
        }
        let Some(rules) = linear.rules() else {
            return Ok(self.params.get(linear.weight()).widened().into_owned());
        };
        let bytes = 8 * (linear.rows() * linear.cols()) as u64;
        let memory = LoadError::Memory { what: "a rounded weight", bytes };
        let of = (&self.layers[layer], kind);
        let values = rounded_weight(&rules.fprop[1], &self.params, of, self.options.threads);
        Ok(values.ok_or(memory)?)
    }

    /// Returns the learned scales `[rows, blocks]` of every linear layer that has them, by module, before they are
    /// rounded to the scheme's dtype.
    pub fn learned_scales(&self) -> BTreeMap<String, Vec<f32>> {
        let of = |info: mantissa_model::LinearInfo| {
            let place = self.params.table().place(&scales_name(&info.module))?;
            let scales = self.params.f32(&place).iter().map(|scale| usable(*scale)).collect();
            Some((info.module, scales))
        };
        self.config.decoder_linears().filter_map(of).collect()
    }

    /// Returns the gradients, at the places of the parameters' [`table`](Parameters::table).
    pub fn gradients(&self) -> &Gradients {
        &self.grads
    }

    /// Returns the last parameter in forward order (the first in backward order) with a non-finite gradient.
    pub(crate) fn first_non_finite(&self) -> Option<String> {
        let params: Vec<_> = self.params.table().iter().collect();
        let bad =
            params.into_iter().rev().find(|param| !self.grads.sum_squares(param.range.clone()).is_finite());
        bad.map(|param| param.tensor.name.clone())
    }

    /// Bytes of the buffers of adapters and frozen weights.
    pub fn adapter_bytes(&self) -> u64 {
        self.scratch.forms.adapters.bytes()
    }

    /// Number of threads of a step.
    pub fn threads(&self) -> usize {
        self.options.threads
    }

    /// Starts profiling with `profile`.
    pub fn set_profile(&mut self, profile: Profile) {
        self.profile = profile;
    }

    /// Returns the profile so far.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Sets all gradients to zero.
    pub fn zero_gradients(&mut self) {
        self.profile.time(StepPart::Copies, || self.grads.zero());
        self.routed.iter_mut().for_each(|counts| counts.fill(0));
    }

    /// Computes the loss of a batch and adds `scale` times the gradient of its sum to the gradients: `1 /
    /// targets` gives the gradient of the mean. `targets[i]` is the token after token `i`, or
    /// [`IGNORE_TARGET`]. With experts, the gradient includes the load-balancing loss of this batch, with the
    /// weight of the mean loss; the loss does not.
    ///
    /// # Errors
    /// [`TrainError::Forward`], [`TrainError::Targets`] or [`TrainError::Target`] if the batch is
    /// inconsistent or larger than planned; gradients are then unchanged. [`TrainError::Stopped`] leaves
    /// gradients partly updated.
    pub fn forward_backward(
        &mut self,
        batch: &Batch<'_>,
        targets: &[u32],
        scale: f32,
    ) -> Result<Loss, TrainError> {
        self.forward_backward_by(batch, targets, scale, |model| model.head_backward(targets, scale))
    }

    /// Computes the same for the loss that `head` computes from the hidden states in the scratch, with its gradient.
    pub(crate) fn forward_backward_by(
        &mut self,
        batch: &Batch<'_>,
        targets: &[u32],
        scale: f32,
        head: impl FnOnce(&mut Self) -> Loss,
    ) -> Result<Loss, TrainError> {
        self.check(batch)?;
        self.check_targets(batch, targets)?;
        self.scratch.forms.adapters.draw = self.dropout();
        let passed = self.forward_saving(batch);
        if passed.is_err() {
            self.scratch.forms.adapters.draw = None;
        }
        passed?;
        let loss = head(self);
        self.completed(Unit::Head)?;
        self.balance(batch.tokens.len(), scale * loss.targets as f32);
        let passed = self.backward(batch);
        self.scratch.forms.adapters.draw = None;
        passed.map(|()| loss)
    }

    /// Returns the random numbers of the adapters' dropout in this batch.
    fn dropout(&self) -> Option<Dropout> {
        let tuning = &self.params.base()?.tuning;
        (tuning.lora.dropout > 0.0).then_some(Dropout { seed: tuning.seed, draw: self.draw })
    }

    /// Computes the loss of a batch like [`forward_backward`](Self::forward_backward), without gradients.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward).
    pub fn loss(&mut self, batch: &Batch<'_>, targets: &[u32]) -> Result<Loss, TrainError> {
        self.check(batch)?;
        self.check_targets(batch, targets)?;
        self.forward_saving(batch)?;
        Ok(self.head_loss(targets))
    }

    /// Passes the weights of all linear layers to the watch before the matmuls round them.
    ///
    /// # Errors
    /// [`TrainError::Rank`].
    pub(crate) fn watch_weights(&mut self) -> Result<(), TrainError> {
        if self.watch.is_off() {
            return Ok(());
        }
        for i in 0..self.layers.len() {
            self.reach(Unit::Layer(i))?;
            let layer = &self.layers[i];
            for (kind, linear) in layer.linears() {
                self.watch_weight(Operator::Linear(layer.index, kind), &layer.policy, linear.weight());
            }
        }
        self.reach(Unit::Head)?;
        self.watch_weight(Operator::Head, &self.options.policy.head, self.head.weight());
        Ok(())
    }
    fn watch_weight(&self, at: Operator, policy: &LinearPolicy, weight: Range<usize>) {
        // Packed weights are not looked at.
        if !weight.is_empty() {
            self.watch.operand(at, OperandKind::W, policy, &self.params.get(weight).widened());
        }
    }

    /// # Errors
    /// [`TrainError::Stopped`] if a stop was requested.
    pub(crate) fn go_on(&self) -> Result<(), TrainError> {
        if self.stop.as_ref().is_some_and(Stop::is_wanted) { Err(TrainError::Stopped) } else { Ok(()) }
    }

    /// Computes the logits of every token of a batch, `[tokens, vocabulary]`, bit-identical to evaluation.
    ///
    /// # Errors
    /// [`TrainError::Forward`] if the batch is inconsistent or larger than planned.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn logits(&mut self, batch: &Batch<'_>, out: &mut [f32]) -> Result<(), TrainError> {
        self.check(batch)?;
        self.forward_saving(batch)?;
        let states = &self.scratch.normed[..batch.tokens.len() * self.config.hidden_size];
        let states = self.scratch.head_input.of(states);
        self.head.fprop(&self.params, states, out, false, self.options.threads);
        if let Some(cap) = self.config.logit_softcap {
            kernels().softcap(out, 1.0, cap);
        }
        Ok(())
    }

    pub(crate) fn check(&self, batch: &Batch<'_>) -> Result<(), ForwardError> {
        let tokens = batch.tokens.len();
        let sum = batch.lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if sum != tokens {
            return Err(ForwardError::Lengths { sum, tokens });
        }
        self.check_size(batch.lens)?;
        let vocab_size = self.config.vocab_size;
        match batch.tokens.iter().enumerate().find(|(_, t)| **t as usize >= vocab_size) {
            Some((index, &token)) => Err(ForwardError::Vocabulary { index, token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Checks that sequences of these lengths fit the plan.
    pub(crate) fn check_size(&self, lens: &[usize]) -> Result<(), ForwardError> {
        let tokens = lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        let longest = lens.iter().max().copied().unwrap_or(0);
        let planned = [
            ("tokens of a batch", tokens, self.options.max_tokens),
            ("tokens of a sequence", longest, self.options.max_len),
        ];
        for (what, needed, planned) in planned {
            if needed > planned {
                return Err(ForwardError::Plan { what, needed, planned });
            }
        }
        Ok(())
    }

    fn check_targets(&self, batch: &Batch<'_>, targets: &[u32]) -> Result<(), TrainError> {
        let (found, allowed) = (targets.len(), batch.tokens.len());
        if found != allowed {
            return Err(TrainError::Targets { found, allowed });
        }
        let vocab_size = self.config.vocab_size;
        let wrong = |target: u32| target != IGNORE_TARGET && target as usize >= vocab_size;
        match targets.iter().enumerate().find(|(_, target)| wrong(**target)) {
            Some((index, &target)) => Err(TrainError::Target { index, target, vocab_size }),
            None => Ok(()),
        }
    }

    /// Propagates the gradient in `d_residual` from the last layer to the embedding.
    pub(crate) fn backward(&mut self, batch: &Batch<'_>) -> Result<(), TrainError> {
        // Below the first layer, only the embedding and the first norm could need a gradient.
        let first_norm = self.layers.first().and_then(|layer| layer.norm(NormKind::Input));
        let below = self.grads.holds(&self.embedding)
            || self.positions.as_ref().is_some_and(|positions| self.grads.holds(positions))
            || first_norm.is_some_and(|norm| self.grads.holds(norm.weight()));
        for i in (0..self.layers.len()).rev() {
            self.go_on()?;
            self.reach(Unit::Layer(i))?;
            self.layer_backward(i, batch.lens, if i > 0 || below { Wanted::All } else { Wanted::Weights });
            self.completed(Unit::Layer(i))?;
        }
        let d = self.config.hidden_size;
        let (grads, d_residual) = (&mut self.grads, &self.scratch.d_residual);
        self.profile.time(StepPart::Embedding, || {
            grads.add(self.embedding.clone(), |table| {
                // Token by token, so that repeated rows are summed in batch order.
                let scale = self.config.embedding_scale.unwrap_or(1.0);
                for (&token, dx) in batch.tokens.iter().zip(d_residual.chunks_exact(d)) {
                    kernels().axpy(scale, dx, &mut table[token as usize * d..][..d]);
                }
                self.watch.result(Operator::Embedding, "gradient", table);
            });
            if let Some(positions) = self.positions.clone() {
                grads.add(positions, |table| {
                    let places = batch.lens.iter().flat_map(|&len| 0..len);
                    for (position, dx) in places.zip(d_residual.chunks_exact(d)) {
                        kernels().axpy(1.0, dx, &mut table[position * d..][..d]);
                    }
                });
            }
        });
        self.completed(Unit::Embedding)
    }

    /// Gathers the weights of a unit that other ranks hold.
    pub(crate) fn reach(&mut self, unit: Unit) -> Result<(), TrainError> {
        let Some(remote) = &mut self.remote else { return Ok(()) };
        Ok(remote.open(unit, &mut self.params)?)
    }

    /// Gathers the weights of the unit of `param` that other ranks hold.
    pub(crate) fn reach_param(&mut self, param: &ParamInfo) -> Result<(), TrainError> {
        let Some(remote) = &mut self.remote else { return Ok(()) };
        Ok(remote.open_param(&param.range, &mut self.params)?)
    }

    /// Sums the gradients that a unit completed with those of other ranks, in a step that does so unit by unit.
    fn completed(&mut self, unit: Unit) -> Result<(), TrainError> {
        let Some(reduction) = &mut self.reduction else { return Ok(()) };
        Ok(reduction.unit(unit, &mut self.grads)?)
    }

    /// Returns amax and sum of squares of the gradient of parameter `index` at `range`.
    pub(crate) fn grad_size(&self, index: usize, range: &Range<usize>) -> (f32, f64) {
        match self.grad_sizes.as_ref().and_then(|sizes| sizes.get(index)) {
            Some(size) => *size,
            None => {
                let amax = kernels().amax(&self.grads.get(range.clone()).widened());
                (amax, self.grads.sum_squares(range.clone()))
            }
        }
    }

    /// Returns the sequences of a batch for the decoder layers.
    pub(crate) fn sequences<'a>(batch: &Batch<'a>) -> Sequences<'a> {
        Sequences::whole(batch.lens)
    }
}

/// Returns the values to which `rule` rounds the weight of a linear layer; `None` if memory is missing.
fn rounded_weight(
    rule: &Rule,
    params: &Parameters,
    (layer, kind): (&LayerOps, LinearKind),
    threads: usize,
) -> Option<Vec<f32>> {
    let linear = layer.linear(kind);
    let weight = Matrix::new(params.get(linear.weight()), linear.cols());
    let n = linear.rows() * linear.cols();
    let mut form = Form::new(rule.storage(), n, linear.rows())?;
    let scales = linear.scales().map(|scales| params.get(scales.clone()));
    let amax = rule.shares_global_scale().then(|| layer.fused_amax(params, kind, threads)).flatten();
    let making = Making { seed: 0, signs: 0, history: None, scales, amax, threads, watch: None, lost: None };
    form.make(rule, weight.lines(), making);
    let mut values = zeros(n)?;
    form.values(&mut values);
    Some(values)
}

/// Returns a count of 0 for each expert of each layer.
fn expert_counts(config: &ModelConfig) -> Vec<Vec<u64>> {
    let layer_params = |layer| {
        let experts = config.experts.as_ref().filter(|experts| experts.layers[layer]);
        vec![0; experts.map_or(0, |experts| experts.count.into())]
    };
    (0..config.num_hidden_layers).map(layer_params).collect()
}
