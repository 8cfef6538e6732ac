//! Optimizer updates: Adam in f32, once in PyTorch's order of operations ([`AdamWStep`]) and once in that of the paper's
//! equations ([`AdamDirection`]), which differ in the last bits.

/// The factors of one AdamW update (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", alg. 2,
/// in the order of operations of PyTorch: decay before the update, `eps` outside the corrected root). With
/// the learning rate `lr`, decay `wd` and step number `t` from 1:
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Factor of the gradient, for clipping and unscaling; 1 leaves it unchanged.
    pub grad_scale: f32,
    /// Factor of the parameter before the update, `1 - lr wd`.
    pub decay: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `sqrt(1 - beta2^t)`.
    pub sqrt_correction2: f32,
    /// `eps`.
    pub eps: f32,
    /// `lr / (1 - beta1^t)`.
    pub step_size: f32,
}

#[inline(always)]
pub(crate) fn adamw(step: &AdamWStep, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    assert!(
        param.len() == grad.len() && m.len() == grad.len() && v.len() == grad.len(),
        "adamw: param, grad, m and v differ in length"
    );
    for (((param, grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let g = grad * step.grad_scale;
        *m += step.one_minus_beta1 * (g - *m);
        *v = *v * step.beta2 + step.one_minus_beta2 * (g * g);
        let denominator = v.sqrt() / step.sqrt_correction2 + step.eps;
        *param = *param * step.decay - step.step_size * (*m / denominator);
    }
}

/// Constants of a step of Adam in the order of operations of its equations (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1):
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g²`, and a direction from both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamDirection {
    /// `beta1`.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Order of the second moment's product: `(1 - beta2) (g g)` if true, `((1 - beta2) g) g` otherwise.
    pub square_first: bool,
    /// Length of the direction.
    pub length: AdamLength,
}

/// Direction that the moments of [`AdamDirection`] give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdamLength {
    /// `m / corrections[0] / sqrt(v / corrections[1])`, 0 where the root is 0; of magnitude 1 while all gradients are equal.
    Corrected {
        /// `1 - beta1^t` and `1 - beta2^t`.
        corrections: [f32; 2],
    },
    /// `factor m / (sqrt(v) + eps)`.
    Damped {
        /// Factor of the first moment, with the corrections of both in it.
        factor: f32,
        /// `eps`.
        eps: f32,
    },
}

impl AdamDirection {
    /// Returns the constants of step `number`, from 1, with the paper's β₁ = .9, β₂ = .999 and ε = 1e-8. Directions have the
    /// length `rate`.
    pub fn published(rate: f32, number: i32) -> Self {
        const BETA1: f32 = 0.9;
        const BETA2: f32 = 0.999;
        let factor = rate * (1.0 - BETA2.powi(number)).sqrt() / (1.0 - BETA1.powi(number));
        AdamDirection {
            beta1: BETA1,
            one_minus_beta1: 1.0 - BETA1,
            beta2: BETA2,
            one_minus_beta2: 1.0 - BETA2,
            square_first: false,
            length: AdamLength::Damped { factor, eps: 1e-8 },
        }
    }
}

#[inline(always)]
pub(crate) fn adam_direction(rule: &AdamDirection, grad: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    assert!(m.len() == grad.len() && v.len() == grad.len(), "adam_direction: grad, m and v differ in length");
    match rule.length {
        AdamLength::Corrected { corrections: [first, second] } => directions(rule, grad, m, v, |m, v| {
            let length = (v / second).sqrt();
            if length > 0.0 { m / first / length } else { 0.0 }
        }),
        AdamLength::Damped { factor, eps } => {
            directions(rule, grad, m, v, |m, v| factor * m / (v.sqrt() + eps));
        }
    }
}

/// Updates the moments and replaces each gradient by the direction that its moments give.
#[inline(always)]
fn directions(
    rule: &AdamDirection,
    grad: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    direction: impl Fn(f32, f32) -> f32,
) {
    for ((grad, m), v) in grad.iter_mut().zip(m).zip(v) {
        let g = *grad;
        let square = match rule.square_first {
            true => rule.one_minus_beta2 * (g * g),
            false => rule.one_minus_beta2 * g * g,
        };
        *m = rule.beta1 * *m + rule.one_minus_beta1 * g;
        *v = rule.beta2 * *v + square;
        *grad = direction(*m, *v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first step has `m / denominator = sign(g)` whatever the betas, so the parameter moves by `lr`.
    #[test]
    fn the_first_step_moves_by_the_learning_rate() {
        let step = AdamWStep {
            grad_scale: 0.5,
            decay: 1.0 - 1e-2 * 0.1,
            one_minus_beta1: 0.1,
            beta2: 0.999,
            one_minus_beta2: 1e-3,
            sqrt_correction2: 1e-3_f32.sqrt(),
            eps: 0.0,
            step_size: 1e-2 / 0.1,
        };
        let (mut p, mut m, mut v) = ([1.0, -2.0, 3.0], [0.0; 3], [0.0; 3]);
        adamw(&step, &mut p, &[4.0, -0.5, 1e-3], &mut m, &mut v);
        for (p, expected) in p.iter().zip([0.999 - 0.01, -1.998 + 0.01, 2.997 - 0.01]) {
            assert!((p - expected).abs() < 1e-6, "{p} for {expected}");
        }
        for (m, expected) in m.iter().zip([0.2, -0.025, 5e-5]) {
            assert!((m / expected - 1.0_f32).abs() < 1e-6, "{m} for {expected}");
        }
        assert!((v[0] - 4e-3).abs() < 1e-9);
    }
}
