//! Rules of operands: what a policy asks of each operand of a linear layer's matmuls, ready to be made in every step.

use mantissa_kernels::for_each;
use mantissa_model::ModelConfig;
use mantissa_num::blockwise::Range;
use mantissa_num::hadamard::TE_SIGNS16;
use mantissa_num::{Accumulator, Blocks, Hadamard};

use super::draws::Making;
use super::rounder::{Rounder, Shared};
use super::source::{LINES, Source, filler, union, with_band};
use super::storage::Storage;
use super::turn::Turn;
use crate::error::TrainError;
use crate::learned::LearnedScales;
use crate::policy::{GemmPolicy, LinearPolicy, OperandPolicy, OperandSource, Policy, Rotation, Signs};
use crate::store::Precision;

/// Operand of a matmul, ready to be made in every step.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(super) rounder: Rounder,
    /// Cast without scales.
    pub(super) plain: Option<Precision>,
    source: OperandSource,
    storage: Storage,
    rotation: Option<Rotation>,
    pub(super) accumulator: Accumulator,
    /// True if gradients of clipped values are 0.
    masks: bool,
    /// Operand with learned scales.
    learned: Option<Box<OperandPolicy>>,
}

/// Rules of the two operands of each matmul of a linear layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearRules {
    /// X and W.
    pub(crate) fprop: [Rule; 2],
    /// dY and W.
    pub(crate) dgrad: [Rule; 2],
    /// dY and X.
    pub(crate) wgrad: [Rule; 2],
}

impl LinearRules {
    /// Makes the rules of a policy.
    pub(crate) fn new(policy: &LinearPolicy) -> Self {
        LinearRules { fprop: rules(&policy.fprop), dgrad: rules(&policy.dgrad), wgrad: rules(&policy.wgrad) }
    }

    /// Makes the rules of a policy for forms of any policy, which are stored in f32.
    pub(crate) fn wide(policy: &LinearPolicy) -> Self {
        let of = |gemm: &GemmPolicy| rules(gemm).map(Rule::stored_wide);
        LinearRules { fprop: of(&policy.fprop), dgrad: of(&policy.dgrad), wgrad: of(&policy.wgrad) }
    }

    /// Returns length and largest element of each operand's amax history.
    pub(crate) fn histories(&self) -> [(usize, f32); 6] {
        let [fprop, dgrad, wgrad] = [&self.fprop, &self.dgrad, &self.wgrad];
        [&fprop[0], &fprop[1], &dgrad[0], &dgrad[1], &wgrad[0], &wgrad[1]].map(Rule::history)
    }

    /// Checks that the schemes can hold the operands of a weight `[rows, cols]` and any number of tokens.
    ///
    /// # Errors
    /// [`TrainError::Policy`] names the operand.
    pub(crate) fn check(
        policy: &LinearPolicy,
        module: &str,
        (rows, cols): (usize, usize),
    ) -> Result<(), TrainError> {
        // Contraction lengths; tokens vary from batch to batch.
        let lengths = [Some(cols), Some(cols), Some(rows), Some(rows), None, None];
        for ((operand, policy), k) in policy.operands().into_iter().zip(lengths) {
            let refuse = |allowed: String| {
                Err(TrainError::Policy {
                    module: module.into(),
                    operand: operand.into(),
                    allowed,
                    found: policy.scheme.to_string(),
                })
            };
            if policy.scheme.format.trellis().is_some() {
                return refuse("a scheme whose values are rounded one by one".into());
            }
            if policy.scheme.source == mantissa_num::Source::Static {
                return refuse("@dynamic or @delayedN: training has no calibrated scales".into());
            }
            if let Some(codec) = policy.scheme.format.codec()
                && k.is_none_or(|k| !k.is_multiple_of(codec.elements))
            {
                let along = k.map_or("tokens of a batch".to_owned(), |k| format!("{k} values"));
                return refuse(format!(
                    "a scheme whose blocks divide the {along} along the contraction axis (blocks of {} do not)",
                    codec.elements
                ));
            }
            if matches!(policy.scheme.format.blocks(), Blocks::Flat(_)) && !operand.ends_with('w') {
                return refuse("a scheme with blocks along one axis: flat blocks would mix tokens".into());
            }
        }
        Ok(())
    }
}

/// Returns length and largest element of the amax history of every operand; empty without delayed scaling.
pub(crate) fn histories(config: &ModelConfig, policy: &Policy) -> Vec<(usize, f32)> {
    let layers = config.num_hidden_layers;
    let delayed =
        |operand: &OperandPolicy| matches!(operand.scheme.source, mantissa_num::Source::Delayed { .. });
    let mut quantized = policy.quantized_layers().into_iter().flat_map(LinearPolicy::operands);
    if !quantized.any(|(_, operand)| delayed(operand)) {
        return Vec::new();
    }
    let layer_histories = |layer| {
        let policy = policy.linear_of(layer, layers);
        let linear_histories = LinearRules::new(&policy).histories();
        let plain = policy.is_plain();
        (0..config.layer_linears(layer).len())
            .flat_map(move |_| linear_histories.map(|own| if plain { (0, 1.0) } else { own }))
    };
    (0..layers).flat_map(layer_histories).collect()
}

pub(super) fn rules(gemm: &GemmPolicy) -> [Rule; 2] {
    let storage = Storage::of(gemm);
    [&gemm.left, &gemm.right].map(|operand| Rule::new(operand, storage, gemm))
}

impl Rule {
    fn new(policy: &OperandPolicy, storage: Storage, gemm: &GemmPolicy) -> Self {
        let plain = policy.precision().or_else(|| {
            let cast = policy.source == OperandSource::Forward && !policy.is_stochastic();
            Precision::of(&policy.scheme.format).filter(|_| cast)
        });
        Rule {
            rounder: Rounder::new(policy, gemm.rotation.map_or(0, |rotation| rotation.order)),
            plain,
            source: policy.source,
            storage,
            rotation: gemm.rotation,
            accumulator: gemm.accumulator,
            masks: policy.mask,
            learned: policy.learns_scales().then(|| Box::new(policy.clone())),
        }
    }

    /// True if gradients of clipped values are 0.
    pub(crate) fn masks(&self) -> bool {
        self.masks
    }

    /// Writes the mask of `source` into `out`, one bit for each value that is not clipped; lines begin at whole bytes.
    pub(crate) fn mask(&self, source: Source<'_>, making: Making<'_>, out: &mut [u8]) {
        let ((lines, k), hadamard, band) = (source.shape(), self.hadamard(making.signs), self.band());
        if lines * k == 0 {
            return;
        }
        let fill = filler(source, k, &hadamard);
        let shared = self.shared(source, &fill, hadamard.is_some(), making);
        let pieces = out[..lines * k.div_ceil(8)].chunks_mut(band * k.div_ceil(8)).enumerate();
        for_each(making.threads, pieces, |(i, out)| {
            with_band(out.len() / k.div_ceil(8) * k, |lines| {
                fill(i * band, lines);
                self.rounder.unclipped(lines, k, &shared, out);
            });
        });
    }

    /// Turns the gradient of the forward's operand, lines of `k`, into the gradient of the values that it was made
    /// from: 0 where `mask` says clipped, then rotated back. `signs` is the seed of the forward's rotation.
    pub(crate) fn pass_back(&self, gradient: &mut [f32], k: usize, mask: &[u8], signs: u64) {
        let hadamard = self.hadamard(signs);
        for (i, line) in gradient.chunks_exact_mut(k.max(1)).enumerate() {
            if self.masks {
                let bits = &mask[i * k.div_ceil(8)..];
                line.iter_mut().enumerate().for_each(|(at, x)| {
                    if bits[at / 8] >> (at % 8) & 1 == 0 {
                        *x = 0.0;
                    }
                });
            }
            if let Some(hadamard) = &hadamard {
                hadamard.transpose(line);
            }
        }
    }

    /// True if gradients of the operand differ from gradients of the values that it was made from.
    pub(crate) fn passes_back(&self) -> bool {
        self.masks || self.rotation.is_some() || self.learned.is_some()
    }

    /// True if fused layers share the operand's global scale, as when their model is quantized.
    pub(crate) fn shares_global_scale(&self) -> bool {
        self.rounder.scheme.has_outer_scale() && self.rotation.is_none() && !self.reads_forward()
    }

    /// True if its scales are learned.
    pub(crate) fn learns(&self) -> bool {
        self.learned.is_some()
    }

    /// Turns the gradient `[lines, k]` of the operand into the gradient of the values that it was made from, `source`, and
    /// adds the gradients of its learned scales to `scale_grads`.
    pub(crate) fn learn(
        &self,
        source: Source<'_>,
        gradient: &mut [f32],
        making: Making<'_>,
        scale_grads: &mut [f32],
    ) {
        let (lines, k) = source.shape();
        let learned = self.learned.as_ref().and_then(|operand| LearnedScales::of(operand));
        let (Some(learned), Some(scales), true) = (learned, making.scales, lines * k > 0) else { return };
        let (scales, blocks) = (scales.widened(), scale_grads.len() / lines);
        let pieces = gradient.chunks_mut(LINES * k).zip(scale_grads.chunks_mut(LINES * blocks)).enumerate();
        for_each(making.threads, pieces, |(i, (gradient, scale_grads))| {
            with_band(gradient.len(), |values| {
                source.lines(i * LINES, values);
                let own = scales[i * LINES * blocks..].chunks_exact(blocks);
                let rows = gradient.chunks_exact_mut(k).zip(scale_grads.chunks_exact_mut(blocks)).zip(own);
                for (values, ((gradient, scale_grads), scales)) in values.chunks_exact(k).zip(rows) {
                    learned.pull_back(values, scales, gradient, scale_grads);
                }
            });
        });
    }

    /// Makes operands for forms of any policy, which are stored in f32.
    pub(crate) fn stored_wide(mut self) -> Self {
        (self.storage, self.accumulator) = (Storage::default(), Accumulator::F32);
        self
    }

    /// Storage of the form.
    pub(crate) fn storage(&self) -> Storage {
        self.storage
    }

    /// True if the form is made from the forward's operand.
    pub(crate) fn reads_forward(&self) -> bool {
        self.source == OperandSource::Forward
    }

    /// Length of the amax history (0 without delayed scaling) and largest element.
    pub(crate) fn history(&self) -> (usize, f32) {
        (self.rounder.history().unwrap_or(0) as usize, self.rounder.max())
    }

    pub(super) fn hadamard(&self, seed: u64) -> Option<Turn> {
        let rotation = self.rotation?;
        let transform = Hadamard::new(rotation.order)?;
        Some(Turn::new(match rotation.signs {
            Signs::Plain => transform,
            Signs::TransformerEngine => transform.with_signs(&TE_SIGNS16)?,
            Signs::Step => transform.randomized(seed),
        }))
    }
}

impl Rule {
    /// Lines that are filled at a time: a multiple of the height of the rounder's tiles.
    pub(super) fn band(&self) -> usize {
        let height = self.rounder.height();
        height * LINES.div_ceil(height)
    }

    /// Returns what the lines of `source` share, from its range where the scheme needs that.
    pub(super) fn shared(
        &self,
        source: Source<'_>,
        fill: &(impl Fn(usize, &mut [f32]) + Sync),
        rotates: bool,
        making: Making<'_>,
    ) -> Shared {
        if self.plain.is_some() || !self.rounder.needs_range() {
            let learned = making.scales.filter(|_| self.learns()).map(|scales| scales.widened().into_owned());
            let mut shared = self.rounder.shared(Range::EMPTY, None, making.seed);
            shared.learned = learned;
            return shared;
        }
        let ((lines, k), band) = (source.shape(), self.band());
        let range = if let Some(amax) = making.amax {
            self.rounder.range_of(amax, lines * k)
        } else if rotates {
            union(making.threads, (0..lines).step_by(band), |first| {
                with_band((lines - first).min(band) * k, |lines| {
                    fill(first, lines);
                    self.rounder.range(lines)
                })
            })
        } else {
            // The order of the values does not matter.
            let cut: Vec<_> = mantissa_model::flow::parts(lines * k, 1 << 16).collect();
            union(making.threads, cut.into_iter(), |part| self.rounder.range(&source.range(part)))
        };
        let multiplier = making.history.map(|history| history.observe(range.amax()));
        self.rounder.shared(range, multiplier, making.seed)
    }
}
