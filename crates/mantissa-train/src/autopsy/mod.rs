//! Autopsy of a training step: which matmul operand's low precision makes the step's gradients wrong.
//!
//! The step is replayed in f32 and with the run's policy. Then operands are switched to the run's format while all
//! others stay f32: first all operands of one name (`dgrad.dy` of every layer), then of some layers, then single
//! ones. Only groups with a large share of the error, or with a non-finite result, are split further, so that a model
//! of 8 layers takes tens of replays. The operand found is confirmed by a replay of all others without it.

mod lab;
mod measure;
mod remedy;
mod search;
mod site;

use std::fmt;

use serde::Serialize;

use crate::error::TrainError;
use crate::health::{OperandHealth, Watch};
use crate::loss::Loss;
use crate::param_table::{ParamInfo, ParamTable};
use crate::plan::Options;
use crate::policy::OperandPolicy;
use crate::trainer::{Trainer, UpdateSize};
use lab::Lab;
use measure::{Effect, Measure};
pub use remedy::Remedy;
use remedy::SchemeCandidate;
pub use search::Switched;
use search::{Leaf, Search};
use site::Site;

/// Error of the gradients up to which a step is sound: the root mean square of the tensors' relative errors.
pub const SOUND: f64 = 0.15;

/// Share of the error from which on an operand is named as its cause.
pub const CAUSE: f64 = 1.0 / 3.0;

/// Share of the error from which on a group of operands is named as its cause though no single one stands out.
pub const MOST: f64 = 0.75;

/// Error from which on all operands of one name are named as the cause: half of the gradient.
pub const RUINED: f64 = 0.5;

/// Norm of an update over that of the weights from which on the learning rate is named as the cause, whatever the operands
/// do: half of what the weights held is replaced in one step. Runs that learn have 1e-4 to 1e-1.
pub const RATE: f64 = 0.5;

/// Conclusion of an autopsy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The gradients equal the f32 gradients but for small errors.
    Sound,
    /// The step goes wrong in f32 too.
    NotPrecision,
    /// An update before the step was as large as the weights: the learning rate.
    Rate,
    /// One operand of one matmul.
    Operand,
    /// Operands of one name in a layer or in many, none of which stands out.
    Group,
    /// Many operands, none of which stands out.
    Spread,
}

/// A figure of the step with the run's policy and in f32; `None` if not finite.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Both {
    /// With the run's policy.
    pub run: Option<f64>,
    /// With f32 operands.
    pub f32: Option<f64>,
}

/// Relative error of a parameter's gradient.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorError {
    /// Name of the parameter.
    pub tensor: String,
    /// Relative error; `None` if not finite.
    pub error: Option<f64>,
}

/// Operand that caused the error.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Culprit {
    /// Decoder layer; `None` for the head.
    pub layer: Option<usize>,
    /// Module name of the linear layer; of an input that several read, the first.
    pub linear: String,
    /// Other linear layers that read the same rounded input.
    pub shared_with: Vec<String>,
    /// `fprop`, `dgrad` or `wgrad`.
    pub gemm: &'static str,
    /// `x`, `w` or `dy`.
    pub operand: &'static str,
    /// Tensor that is rounded.
    pub tensor: String,
    /// Its format in the run.
    pub format: String,
    /// Error with this operand alone in the run's format; `None` if not finite.
    pub error: Option<f64>,
    /// Share of the error of all operands; `None` if not finite.
    pub share: Option<f64>,
    /// Error that is left with this tensor alone in f32, in every matmul that reads it; `None` if not finite.
    pub error_without: Option<f64>,
    /// Largest magnitude, underflow, saturation and SQNR of its rounding in this step.
    pub health: Option<OperandHealth>,
    /// Change of the settings that helps.
    pub remedy: Remedy,
}

/// Result of an autopsy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Autopsy {
    /// Step number, from 1.
    pub step: u64,
    /// Loss scale of the step.
    pub loss_scale: f64,
    /// Mean loss before the update, nats/token.
    pub loss: Both,
    /// Gradient norm before clipping, without the loss scale.
    pub grad_norm: Both,
    /// Error of the run's gradients: root mean square of the tensors' relative errors; `None` if not finite.
    pub error: Option<f64>,
    /// Conclusion.
    pub verdict: Verdict,
    /// Operands named as the cause, the first one first; of a group the one with the largest effect.
    pub culprits: Vec<Culprit>,
    /// Operands that lost their signal, in the order of the step: the first is the first culprit.
    pub dead: Vec<OperandHealth>,
    /// Largest of the updates that were replayed before the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update: Option<UpdateSize>,
    /// Operands with the largest share if no single one is the cause.
    pub largest: Option<Switched>,
    /// Every set of operands that was switched, in order.
    pub switched: Vec<Switched>,
    /// Parameters with the largest gradient error in the run.
    pub tensors: Vec<TensorError>,
    /// Number of operands that the policy rounds.
    pub operands: usize,
    /// Number of replays of the step.
    pub replays: usize,
}

/// Number of parameters listed.
const TENSORS: usize = 5;

fn finite(value: f64) -> Option<f64> {
    Some(value).filter(|value| value.is_finite())
}

impl Trainer {
    /// Replays the next step in f32 and with single operands in the run's format, and names the one that makes its
    /// gradients wrong. The run itself does not step: its state stays as it is. `replayed` is called with the number
    /// of replays done.
    ///
    /// # Errors
    /// [`TrainError::Unsupported`] for a model with adapters; [`TrainError::Stopped`], [`TrainError::Data`];
    /// [`TrainError::Load`] if memory is missing.
    pub fn autopsy(&mut self, replayed: &mut dyn FnMut(usize)) -> Result<Autopsy, TrainError> {
        self.autopsy_after(None, replayed)
    }

    /// As [`autopsy`](Self::autopsy), given the largest `update` of the steps before. From [`RATE`] on the learning rate is the
    /// cause, and operands are not searched: after such an update they are wrong in any format.
    ///
    /// # Errors
    /// As [`autopsy`](Self::autopsy).
    pub fn autopsy_after(
        &mut self,
        update: Option<UpdateSize>,
        replayed: &mut dyn FnMut(usize),
    ) -> Result<Autopsy, TrainError> {
        if self.teacher.is_some() {
            let (field, found) = ("distill", "in use".to_owned());
            let allowed = "none: an autopsy replays the loss on the text";
            return Err(TrainError::Unsupported { field, found, allowed });
        }
        if self.model.params.table().iter().any(ParamInfo::is_scales) {
            let (field, found) = ("precision.fprop.w.scales", "learned".to_owned());
            let allowed = "rule: scales that follow from the weights";
            return Err(TrainError::Unsupported { field, found, allowed });
        }
        if self.model.params.table() != &ParamTable::new(&self.model.config) {
            let (field, found, allowed) = ("adapter", "in use".to_owned(), "a run that trains all weights");
            return Err(TrainError::Unsupported { field, found, allowed });
        }
        let (scale, samples) = self.next_samples()?;
        let loss_scale = f64::from(self.loss_scale());
        let mut lab = Lab::new(self, samples, scale)?;
        let (run, health) = self.observed_gradients()?;
        replayed(1);
        let reference = lab.replay(&[])?;
        replayed(2);
        let threads = self.model.options.threads;
        let mut measure = Measure::new(self.model.params.table(), &lab.model.gradients().to_f32(), threads);
        let gradients = self.model.gradients().to_f32();
        let error = measure.effect(&gradients).error.filter(|_| run.nll.is_finite());
        let tensors = measure.tensors(&gradients).into_iter().take(TENSORS);
        let run_norm = (0..gradients.len())
            .step_by(1 << 16)
            .map(|at| self.model.grads.sum_squares(at..gradients.len().min(at + (1 << 16))));
        let mut found = Autopsy {
            step: self.progress.steps + 1,
            loss_scale,
            loss: Both { run: finite(run.mean()), f32: finite(reference.mean()) },
            grad_norm: Both {
                run: finite(run_norm.sum::<f64>().sqrt() / loss_scale),
                f32: finite(measure.norm() / loss_scale),
            },
            error,
            verdict: Verdict::Sound,
            culprits: Vec::new(),
            dead: Vec::new(),
            update,
            largest: None,
            switched: Vec::new(),
            tensors: tensors.map(|(tensor, error)| TensorError { tensor, error }).collect(),
            operands: lab.sites.len(),
            replays: 0,
        };
        drop(gradients);
        let lost = lost_sites(&lab, &self.model.config, &health);
        let of_site = |&site: &usize| site_health(lab.sites[site], &self.model.config, &health).cloned();
        found.dead = lost.iter().filter_map(of_site).collect();
        if update.is_some_and(|update| update.ratio >= RATE) {
            found.verdict = Verdict::Rate;
        } else if found.loss.f32.is_none() || found.grad_norm.f32.is_none() {
            found.verdict = Verdict::NotPrecision;
        } else if error.is_none_or(|error| error > SOUND) {
            let every: Vec<usize> = (0..lab.sites.len()).collect();
            let all = lab.replay(&every)?;
            if all.nll.is_finite() {
                measure.set_all(&lab.model.gradients().to_f32());
            }
            let mut search = Search::new(lab, measure, replayed);
            let leaf = search.descend(&every)?;
            self.conclude(&mut found, &mut search, leaf, &health)?;
            if let Some(first) = lost.first() {
                self.accuse(&mut found, &mut search, *first, &health)?;
            }
            found.switched = std::mem::take(&mut search.switched);
            lab = search.lab;
        }
        found.replays = lab.replays + 1;
        Ok(found)
    }

    /// Predicts the bytes that [`autopsy`](Self::autopsy) takes in addition to the run's.
    pub fn autopsy_bytes(config: &mantissa_model::ModelConfig, options: &Options) -> u64 {
        Lab::bytes(options, config)
    }

    /// Sets the verdict from what the search ended with.
    fn conclude(
        &self,
        found: &mut Autopsy,
        search: &mut Search<'_>,
        leaves: Vec<Leaf>,
        health: &[OperandHealth],
    ) -> Result<(), TrainError> {
        let single = |leaf: &&Leaf| match (leaf.sites.as_slice(), leaf.effect.error) {
            ([_], None) => true,
            ([_], Some(error)) => error > SOUND / 2.0 && leaf.effect.share.is_some_and(|share| share > CAUSE),
            _ => false,
        };
        let mut causes: Vec<&Leaf> = leaves.iter().filter(single).collect();
        // What is not finite comes first, in the order of a step; then the larger shares.
        causes.sort_by_key(|leaf| leaf.effect.error.is_some());
        for leaf in &causes {
            found.culprits.push(self.culprit(search, leaf.sites[0], leaf.effect, health)?);
        }
        found.verdict = Verdict::Operand;
        if !found.culprits.is_empty() {
            return Ok(());
        }
        let key = |leaf: &Leaf| leaf.effect.share.or(leaf.effect.error).unwrap_or(f64::INFINITY);
        let most = leaves.iter().max_by(|a, b| key(a).total_cmp(&key(b)));
        found.largest = most.map(|leaf| leaf.named(&search.lab));
        let least = |leaf: &Leaf| if leaf.is_class { RUINED } else { SOUND };
        let guilty = |leaf: &&Leaf| {
            leaf.effect.error.is_none_or(|error| error > least(leaf))
                && leaf.effect.share.is_none_or(|share| share > MOST)
        };
        found.verdict = Verdict::Spread;
        if let Some(group) = most.filter(guilty) {
            found.verdict = Verdict::Group;
            let part = group.most.as_ref().unwrap_or(&group.sites);
            // Of a part of several operands, the one that keeps least.
            let lost = |&&i: &&usize| {
                let health = site_health(search.lab.sites[i], &self.model.config, health);
                health.map_or(0.0, |health| {
                    health.underflowed + health.saturated - health.sqnr_db.unwrap_or(0.0) / 1e3
                })
            };
            if let Some(&site) = part.iter().max_by(|a, b| lost(a).total_cmp(&lost(b))) {
                let effect = search.effect(&[site])?;
                found.culprits.push(self.culprit(search, site, effect, health)?);
            }
        }
        Ok(())
    }

    /// Names the first operand that lost its signal before all others: what follows it gets nothing.
    fn accuse(
        &self,
        found: &mut Autopsy,
        search: &mut Search<'_>,
        index: usize,
        health: &[OperandHealth],
    ) -> Result<(), TrainError> {
        let site = search.lab.sites[index];
        let is_same = |culprit: &Culprit| {
            culprit.linear == site.linear(&self.model.config)
                && (culprit.gemm, culprit.operand) == (site.gemm.name(), site::operand(site.gemm, site.side))
        };
        match found.culprits.iter().position(is_same) {
            Some(at) => found.culprits[..=at].rotate_right(1),
            None => {
                let effect = search.effect(&[index])?;
                found.culprits.insert(0, self.culprit(search, index, effect, health)?);
            }
        }
        if found.verdict == Verdict::Spread {
            let is_group = found.largest.as_ref().is_some_and(|largest| largest.count > 1);
            found.verdict = if is_group { Verdict::Group } else { Verdict::Operand };
        }
        Ok(())
    }

    fn culprit(
        &self,
        search: &mut Search<'_>,
        index: usize,
        effect: Effect,
        health: &[OperandHealth],
    ) -> Result<Culprit, TrainError> {
        let site = search.lab.sites[index];
        let error_without = search.without(index)?.error;
        let health = site_health(site, &self.model.config, health).cloned();
        let layer = site.layer.map(|layer| &self.model.layers[layer]);
        let kinds = layer.into_iter().flat_map(crate::ops::LayerOps::linears).map(|(kind, _)| kind);
        let shared = kinds.filter(|&kind| kind != site.kind && site.is_read_by(kind));
        let remedy = self.remedy(search, index, effect, health.as_ref())?;
        Ok(Culprit {
            layer: site.layer,
            linear: site.linear(&self.model.config),
            shared_with: shared.map(|kind| Site { kind, ..site }.linear(&self.model.config)).collect(),
            gemm: site.gemm.name(),
            operand: site::operand(site.gemm, site.side),
            tensor: site.tensor(&self.model.config),
            format: site.policy(&self.model).scheme.to_string(),
            error: effect.error,
            share: effect.share,
            error_without,
            remedy,
            health,
        })
    }

    /// Finds the smallest change of an operand with which its error is half or less, by replays.
    fn remedy(
        &self,
        search: &mut Search<'_>,
        index: usize,
        effect: Effect,
        health: Option<&OperandHealth>,
    ) -> Result<Remedy, TrainError> {
        let (site, policy) = (search.lab.sites[index], &self.model.options.policy);
        let found = site.policy(&self.model);
        if let Some(scaling) = Remedy::scaling(site, found, policy, health) {
            return Ok(scaling);
        }
        let mut candidates = SchemeCandidate::all(site, found, health).into_iter().peekable();
        while let Some(candidate) = candidates.next() {
            let Ok(scheme) = candidate.scheme.parse() else { continue };
            let operand = OperandPolicy { scheme, ..found.clone() };
            let error = search.error_as(index, &operand)?;
            let most = effect.error.map_or(RUINED, |error| error / 2.0);
            if error.is_some_and(|error| error <= most) || candidates.peek().is_none() {
                return Ok(Remedy::new(site, found, policy, &candidate, error));
            }
        }
        Ok(Remedy { set: Vec::new(), why: "no finer format is known".to_owned(), error: None })
    }

    /// Computes the gradients of the next step as the run does, with telemetry of its operands.
    fn observed_gradients(&mut self) -> Result<(Loss, Vec<OperandHealth>), TrainError> {
        self.model.watch = Watch::health();
        let loss_scale = self.loss_scale();
        let result = self.gradients(loss_scale);
        let watch = std::mem::take(&mut self.model.watch);
        self.rewind();
        let (nll, targets) = result?;
        let health = watch.operands(&self.model.options.policy, &self.model.config);
        Ok((Loss { nll, targets: targets as usize }, health))
    }
}

/// Returns the operands that lost their signal, in the order of a step.
fn lost_sites(lab: &Lab, config: &mantissa_model::ModelConfig, health: &[OperandHealth]) -> Vec<usize> {
    let layers = lab.model.layers.len();
    let is_lost =
        |&site: &usize| site_health(lab.sites[site], config, health).is_some_and(|health| health.lost);
    let mut lost: Vec<usize> = (0..lab.sites.len()).filter(is_lost).collect();
    lost.sort_by_key(|&site| {
        let (backward, layer, kind) = lab.sites[site].order(layers);
        // The backward takes the linear layers of a layer in reverse.
        (backward, layer, backward.then_some(std::cmp::Reverse(kind)), kind)
    });
    lost
}

/// Finds the telemetry of an operand; a shared rounding is listed with the first product that reads it.
fn site_health<'h>(
    site: Site,
    config: &mantissa_model::ModelConfig,
    all: &'h [OperandHealth],
) -> Option<&'h OperandHealth> {
    let (linear, operand) = (site.linear(config), site::operand(site.gemm, site.side));
    let of = |gemm: &str| {
        let name = format!("{gemm} {operand}");
        all.iter().find(|health| health.linear == linear && health.operand == name)
    };
    of(site.gemm.name()).or_else(|| ["fprop", "dgrad"].into_iter().find_map(of))
}

impl fmt::Display for Autopsy {
    /// Writes the verdict in a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |value: Option<f64>| match value {
            Some(value) => format!("{:.3} %", 100.0 * value),
            None => "not finite".to_owned(),
        };
        match (self.verdict, self.culprits.first(), &self.largest) {
            (Verdict::Rate, ..) => {
                let UpdateSize { step, lr, ratio } =
                    self.update.unwrap_or(UpdateSize { step: 0, lr: f64::NAN, ratio: f64::NAN });
                write!(
                    f,
                    "the learning rate: at lr {lr} the update of step {step} was {ratio:.3} times as large as the weights"
                )
            }
            (Verdict::NotPrecision, ..) => {
                f.write_str("not the precision: loss or gradients are not finite in f32 either")
            }
            (Verdict::Operand, Some(culprit), _) => {
                let Culprit { gemm, operand, linear, format, error, share, .. } = culprit;
                write!(f, "{linear}: {gemm}, operand {operand} in {format}: ")?;
                match (error, share) {
                    (None, _) => f.write_str("alone makes the step not finite"),
                    (_, Some(share)) => write!(f, "{} of the gradient error", percent(Some(*share))),
                    (error, None) => write!(f, "alone has a gradient error of {}", percent(*error)),
                }
            }
            (Verdict::Group, _, Some(class)) => {
                write!(
                    f,
                    "{} ({} operands): {} of the gradient error, no single one most",
                    class.operands,
                    class.count,
                    percent(class.share)
                )
            }
            (Verdict::Spread, _, largest) => {
                write!(
                    f,
                    "no single operand: a gradient error of {} over {} operands",
                    percent(self.error),
                    self.operands
                )?;
                largest.iter().try_for_each(|largest| {
                    write!(f, ", most in {} ({})", largest.operands, percent(largest.share))
                })
            }
            _ => write!(f, "no operand at fault: the gradient error is {} of f32's", percent(self.error)),
        }?;
        match (self.verdict, self.dead.first()) {
            (Verdict::Rate, _) | (_, None) => Ok(()),
            (_, Some(OperandHealth { linear, operand, format, .. })) => write!(
                f,
                "; the first of {} operands that lost their signal: {linear}, {operand} in {format}",
                self.dead.len()
            ),
        }
    }
}
