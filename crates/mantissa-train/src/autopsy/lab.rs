//! A copy of a run's model on which one step is replayed, with each matmul operand in f32 or in the run's format.

use std::sync::Arc;

use mantissa_model::{Batch, LinearKind, LoadError, Role};

use super::site::Site;
use crate::arena::Parameters;
use crate::array::Array;
use crate::data::Sample;
use crate::error::TrainError;
use crate::form::{Draw, LinearRules};
use crate::forms::FormSizes;
use crate::loss::Loss;
use crate::model::TrainModel;
use crate::optim::joined;
use crate::plan::{MemoryPlan, Options};
use crate::policy::Gemm;
use crate::policy::{LinearPolicy, OperandPolicy, Policy};
use crate::store::{Precision, StoreRef};
use crate::trainer::Trainer;

/// Model in f32 with a step's batches.
pub(crate) struct Lab {
    pub(crate) model: TrainModel,
    pub(crate) sites: Vec<Site>,
    /// The run's policy of each decoder layer, and of the head.
    layers: Vec<Arc<LinearPolicy>>,
    head: LinearPolicy,
    samples: Vec<Sample>,
    step: u64,
    /// Factor of the gradient of a batch's summed loss.
    scale: f32,
    pub(crate) replays: usize,
}

impl Lab {
    /// Copies the run's weights in f32 (linear layers from the master copy) with the batches of its next step.
    ///
    /// # Errors
    /// Not enough memory; data that cannot be read.
    pub(crate) fn new(trainer: &mut Trainer, samples: Vec<Sample>, scale: f32) -> Result<Self, TrainError> {
        let run = &trainer.model;
        let Policy { seed, kv, .. } = run.options.policy.clone();
        let policy = Policy { seed, kv, ..Policy::fp32() };
        let options = Options { policy, ..run.options.clone() };
        let mut model = TrainModel::new(run.config.clone(), exact(trainer)?, options)?;
        let forms = FormSizes::of_any(&run.config, run.options.max_tokens);
        let memory = || LoadError::Memory { what: "autopsy", bytes: forms.bytes() };
        model.scratch.forms = forms.allocate().ok_or_else(memory)?;
        model.histories =
            crate::form::Histories::new(&crate::form::histories(&run.config, &run.options.policy));
        model.histories.copy_from(&run.histories);
        (model.stop, model.balance_factor) = (run.stop.clone(), run.balance_factor);
        Ok(Lab {
            model,
            sites: Site::all(run),
            layers: run.layers.iter().map(|layer| layer.policy.clone()).collect(),
            head: run.options.policy.head.clone(),
            samples,
            step: trainer.progress.steps + 1,
            scale,
            replays: 0,
        })
    }

    /// Predicts the bytes of the copy and of the gradients that are compared.
    pub(crate) fn bytes(options: &Options, config: &mantissa_model::ModelConfig) -> u64 {
        let plan = MemoryPlan::new(config, &Options { policy: Policy::fp32(), ..options.clone() });
        // Those of f32, of all operands, and the run's own in f32.
        let gradients = 3 * 4 * crate::param_table::ParamTable::new(config).len() as u64;
        plan.bytes() + FormSizes::of_any(config, options.max_tokens).bytes() + gradients
    }

    /// Replays the step with the operands `on` in the run's format; its gradients are in the model.
    ///
    /// # Errors
    /// [`TrainError::Stopped`].
    pub(crate) fn replay(&mut self, on: &[usize]) -> Result<Loss, TrainError> {
        self.switch(on)?;
        self.replays += 1;
        self.model.zero_gradients();
        let mut all = Loss::default();
        for (i, Sample { tokens, targets, lens }) in self.samples.iter().enumerate() {
            self.model.draw = Draw { step: self.step, batch: i as u32 };
            let loss = self.model.forward_backward(&Batch { tokens, lens }, targets, self.scale)?;
            all.nll += loss.nll;
            all.targets += loss.targets;
        }
        self.model.histories.forget();
        Ok(all)
    }

    /// Replays the step with the tensor of operand `site` alone rounded, to `operand`, in every matmul that rounds it.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub(crate) fn replay_as(&mut self, site: usize, operand: &OperandPolicy) -> Result<Loss, TrainError> {
        let tensor = self.sites[site].tensor(&self.model.config);
        let (layers, head) = (self.layers.clone(), self.head.clone());
        let all: Vec<usize> =
            (0..self.sites.len()).filter(|&i| self.sites[i].tensor(&self.model.config) == tensor).collect();
        for Site { gemm, side, layer, .. } in all.iter().map(|&i| self.sites[i]) {
            let policy = match layer {
                Some(layer) => Arc::make_mut(&mut self.layers[layer]),
                None => &mut self.head,
            };
            *side.of_mut(gemm.of_mut(policy)) = operand.clone();
        }
        let loss = self.replay(&all);
        (self.layers, self.head) = (layers, head);
        loss
    }

    fn switch(&mut self, on: &[usize]) -> Result<(), TrainError> {
        let on: Vec<Site> = on.iter().map(|&i| self.sites[i]).collect();
        for (layer, run_policy) in self.model.layers.iter_mut().zip(&self.layers) {
            let own: Vec<Site> = on.iter().filter(|site| site.layer == Some(layer.index)).copied().collect();
            let kinds: Vec<LinearKind> = layer.linears().map(|(kind, _)| kind).collect();
            for kind in kinds {
                let mut policy = mixed(run_policy, own.iter().filter(|site| site.is_read_by(kind)));
                // Operands that share an input are rotated alike.
                for gemm in Gemm::ALL {
                    if own.iter().any(|site| site.gemm == gemm) {
                        gemm.of_mut(&mut policy).rotation = gemm.of(run_policy).rotation;
                    }
                }
                if let Some(linear) = layer.linear_mut(kind) {
                    linear.set_rules(LinearRules::wide(&policy));
                }
            }
        }
        let policy = mixed(&self.head, on.iter().filter(|site| site.layer.is_none()));
        self.model.head = self.model.head.with_policy(&policy)?;
        Ok(())
    }
}

/// Returns f32 operands, except at `sites`, where they are as in `policy`.
fn mixed<'a>(policy: &LinearPolicy, sites: impl Iterator<Item = &'a Site>) -> LinearPolicy {
    let mut mixed = LinearPolicy::f32();
    for Site { gemm, side, .. } in sites {
        *side.of_mut(gemm.of_mut(&mut mixed)) = side.of(gemm.of(policy)).clone();
    }
    mixed
}

/// Returns the run's weights in f32: linear layers from the master copy, which their operands are rounded
/// from, all others as the run reads them.
fn exact(trainer: &Trainer) -> Result<Parameters, TrainError> {
    let run = &trainer.model.params;
    let mut params = Parameters::zeros(&trainer.model.config, Precision::F32)?;
    let arrays = trainer.optimizer.arrays(run.table());
    let master = arrays.into_iter().find(|(name, _)| name == "master").map(|(_, array)| array);
    for param in run.table().iter() {
        let range = param.range.clone();
        let stored = run.get(range.clone());
        let linear = matches!(param.tensor.role, Role::Linear { .. } | Role::Head);
        match (master.filter(|_| linear), stored) {
            (Some(Array::F32(values)), _) => params.set(range.start, &values[range]),
            (Some(Array::U16(low)), StoreRef::Bf16(high)) => {
                let values: Vec<f32> =
                    high.iter().zip(&low[range.clone()]).map(|(high, low)| joined(*high, *low)).collect();
                params.set(range.start, &values);
            }
            _ => params.set(range.start, &stored.widened()),
        }
    }
    Ok(params)
}
