//! Load-balancing loss of mixtures of experts (Fedus et al. 2021, "Switch Transformers", eq. 4, in the form of
//! Mixtral's reference): over the tokens of a batch in all layers with experts, with E experts, the share f of the
//! tokens that choose an expert (its sum over the experts is the number of experts per token) and the mean P of the
//! router's softmax, `E Σ f P`. It is least for a uniform routing. f has no gradient.

use mantissa_kernels::kernels;

use crate::model::TrainModel;

/// Factor of the load-balancing loss if neither config nor run sets one: the default of Mixtral and Qwen.
const FACTOR: f32 = 0.001;

impl TrainModel {
    /// Sets the factor of the load-balancing loss of models with experts; 0 turns it off. By default the factor of the
    /// config (`router_aux_loss_coef`), or 0.001.
    pub fn set_balance_factor(&mut self, factor: f32) {
        self.balance_factor = Some(factor);
    }

    /// Returns the load-balancing loss of the last batch whose gradients were computed, without its factor; `None`
    /// without experts or with a factor of 0.
    pub fn balance_loss(&self) -> Option<f64> {
        self.balance_loss
    }

    /// Returns the number of tokens that chose each expert since gradients were set to zero, by layer; empty for layers
    /// without experts.
    pub fn expert_tokens(&self) -> &[Vec<u64>] {
        &self.routed
    }

    /// Counts the choices of a batch of `tokens` tokens after its forward pass, and prepares the gradient of `scale` times
    /// the load-balancing loss for its backward.
    pub(crate) fn balance(&mut self, tokens: usize, scale: f32) {
        self.balance.clear();
        self.balance_loss = None;
        let Some(experts) = &self.config.experts else { return };
        let count = usize::from(experts.count);
        let factor = self.balance_factor.or(experts.balance_loss).unwrap_or(FACTOR);
        let (mut chosen, mut mean) = (vec![0u64; count], vec![0.0f64; count]);
        let mut row = vec![0.0; count];
        let mut rows = 0;
        for ((layer, saved), routed) in self.layers.iter().zip(&self.saved).zip(&mut self.routed) {
            if layer.experts.is_none() {
                continue;
            }
            rows += tokens;
            for choice in &saved.choices {
                chosen[usize::from(choice.expert)] += 1;
                routed[usize::from(choice.expert)] += 1;
            }
            for logits in saved.router.chunks_exact(count).take(if factor == 0.0 { 0 } else { tokens }) {
                row.copy_from_slice(logits);
                kernels().softmax(&mut row);
                mean.iter_mut().zip(&row).for_each(|(mean, p)| *mean += f64::from(*p));
            }
        }
        if factor == 0.0 || rows == 0 {
            return;
        }
        let share = |chosen: &u64| count as f64 * *chosen as f64 / (rows * rows) as f64;
        self.balance_loss = Some(chosen.iter().zip(&mean).map(|(chosen, mean)| share(chosen) * mean).sum());
        let factor = f64::from(factor) * f64::from(scale);
        self.balance.extend(chosen.iter().map(|chosen| (factor * share(chosen)) as f32));
    }
}

/// Adds to `gradient` the gradient of the load-balancing loss in a token's router `logits`, which are overwritten. `slopes` are
/// ∂loss/∂p of the softmax p: `dl = p (slope - Σ p slope)`. Does nothing without slopes.
pub(crate) fn add_slopes(slopes: &[f32], logits: &mut [f32], gradient: &mut [f32]) {
    if slopes.is_empty() {
        return;
    }
    kernels().softmax(logits);
    let along: f32 = logits.iter().zip(slopes).map(|(p, slope)| p * slope).sum();
    for ((gradient, p), slope) in gradient.iter_mut().zip(logits).zip(slopes) {
        *gradient += *p * (slope - along);
    }
}
