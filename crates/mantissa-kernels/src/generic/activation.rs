//! Gated activations of the MLP, `out = act(gate) * up` in f32: SwiGLU and GEGLU (Shazeer 2020, "GLU Variants
//! Improve Transformer") and squared ReLU (So et al. 2021, "Primer").

use super::exp::exp;

/// sqrt(2 / pi)
const GELU_SLOPE: f32 = 0.797_884_56;
/// Cubic coefficient of the tanh approximation (Hendrycks & Gimpel 2016, sec. 2).
const GELU_CUBIC: f32 = 0.044_715;

#[inline(always)]
pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated("silu_mul", gate, up, out, |g| g / (1.0 + exp(-g)));
}

/// With `s = sigmoid(g)` and `a = g s`: `da/dg = s + a (1 - s)`.
#[inline(always)]
pub(crate) fn silu_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]) {
    assert!(
        gate.len() == out.len() && up.len() == out.len(),
        "silu_mul_backward: gate, up and out differ in length"
    );
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let (g, u, dy) = (*gate, *up, *out);
        let denominator = 1.0 + exp(-g);
        let (a, s) = (g / denominator, 1.0 / denominator);
        (*gate, *up, *out) = (dy * u * (s + a * (1.0 - s)), dy * a, a * u);
    }
}

#[inline(always)]
pub(crate) fn relu2_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated("relu2_mul", gate, up, out, |g| {
        // Written so that NaN stays NaN.
        let r = if g < 0.0 { 0.0 } else { g };
        r * r
    });
}

#[inline(always)]
pub(crate) fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), which keeps its relative accuracy for large negative u.
    gated("gelu_tanh_mul", gate, up, out, |g| {
        let u = GELU_SLOPE * (g + GELU_CUBIC * (g * g * g));
        g / (1.0 + exp(-2.0 * u))
    });
}

#[inline(always)]
fn gated(kernel: &str, gate: &[f32], up: &[f32], out: &mut [f32], act: impl Fn(f32) -> f32) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "{kernel}: gate, up and out differ in length");
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *out = act(g) * u;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest relative error over [-20, 20] against `exact`.
    fn worst(kernel: fn(&[f32], &[f32], &mut [f32]), exact: fn(f64) -> f64) -> f64 {
        let gate: Vec<f32> = (-20_000_i16..20_000).map(|i| f32::from(i) * 1e-3).collect();
        let mut out = vec![0.0; gate.len()];
        kernel(&gate, &vec![2.0; gate.len()], &mut out);
        let errors = gate.iter().zip(&out).filter(|(g, _)| **g != 0.0).map(|(&g, &y)| {
            let exact = 2.0 * exact(f64::from(g));
            (f64::from(y) - exact).abs() / exact.abs().max(1e-30)
        });
        errors.fold(0.0, f64::max)
    }

    #[test]
    fn activations_match_their_definitions() {
        assert!(worst(silu_mul, |x| x / (1.0 + (-x).exp())) < 5e-7);
        assert!(worst(relu2_mul, |x| x.max(0.0).powi(2)) < 2e-7);
        // u is large where gelu is tiny, so its rounding shows as |u| * 2^-24 in the result; only the useful
        // range is held to more.
        let gelu = |x: f64| {
            x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).exp())
        };
        let mut out = [0.0];
        for i in -3000..6000 {
            let x = i as f32 * 1e-3;
            gelu_tanh_mul(&[x], &[1.0], &mut out);
            assert!(
                (f64::from(out[0]) - gelu(f64::from(x))).abs() <= 2e-6 * gelu(f64::from(x)).abs(),
                "gelu({x})"
            );
        }
    }

    #[test]
    fn the_gradient_of_swiglu_matches_central_differences() {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for i in -200..=200 {
            let (g, u, dy) = (f64::from(i) * 0.1, 1.5 + f64::from(i % 7), -0.75);
            let (mut gate, mut up, mut out) = ([g as f32], [u as f32], [dy as f32]);
            let (g, u) = (f64::from(gate[0]), f64::from(up[0]));
            let mut forward = [0.0];
            silu_mul(&gate, &up, &mut forward);
            silu_mul_backward(&mut gate, &mut up, &mut out);
            assert_eq!(out, forward, "the forward's bits");
            let slope = (silu(g + 1e-5) - silu(g - 1e-5)) / 2e-5;
            assert!((f64::from(gate[0]) - dy * u * slope).abs() < 1e-5, "gate {g}");
            assert!((f64::from(up[0]) - dy * silu(g)).abs() < 1e-5, "up at {g}");
        }
        let (mut gate, mut up, mut out) = ([-200.0, 200.0], [1.0; 2], [1.0; 2]);
        silu_mul_backward(&mut gate, &mut up, &mut out);
        assert_eq!((gate, up), ([-0.0, 1.0], [-0.0, 200.0]));
    }

    #[test]
    fn large_inputs_saturate() {
        let mut out = [0.0; 3];
        silu_mul(&[-200.0, 200.0, f32::NAN], &[1.0; 3], &mut out);
        assert_eq!(out[..2], [-0.0, 200.0]);
        assert!(out[2].is_nan());
    }
}
