//! Gated activations of the MLP, `out = act(gate) * up` in f32: SwiGLU and GEGLU (Shazeer 2020, "GLU Variants
//! Improve Transformer") and squared ReLU (So et al. 2021, "Primer").

use super::exp::{exp, exp_f64_nonpositive};
use crate::activation::Activation;

/// sqrt(2 / pi)
const GELU_SLOPE: f32 = 0.797_884_56;
/// Cubic coefficient of the tanh approximation (Hendrycks & Gimpel 2016, sec. 2).
const GELU_CUBIC: f32 = 0.044_715;

#[inline(always)]
pub(crate) fn act_mul(activation: Activation, numbers: [f32; 4], gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => silu_mul(gate, up, out),
        Activation::Relu2 => relu2_mul(gate, up, out),
        Activation::GeluTanh => gelu_tanh_mul(gate, up, out),
        Activation::Gelu => gelu_mul(gate, up, out),
        Activation::Xielu => xielu_mul(numbers, gate, up, out),
    }
}

#[inline(always)]
pub(crate) fn act_mul_backward(
    activation: Activation,
    numbers: [f32; 4],
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
) {
    match activation {
        Activation::Silu => silu_mul_backward(gate, up, out),
        Activation::Relu2 => relu2_mul_backward(gate, up, out),
        Activation::GeluTanh => gelu_tanh_mul_backward(gate, up, out),
        Activation::Gelu => gelu_mul_backward(gate, up, out),
        Activation::Xielu => xielu_mul_backward(numbers, gate, up, out),
    }
}

#[inline(always)]
pub(crate) fn act_sums(
    activation: Activation,
    numbers: [f32; 4],
    gate: &[f32],
    grads: &[f32],
    sums: &mut [f64; 4],
) {
    assert_eq!(gate.len(), grads.len(), "act_sums: lengths differ");
    match activation {
        Activation::Xielu => xielu_sums(numbers[3], gate, grads, sums),
        Activation::Silu | Activation::Relu2 | Activation::GeluTanh | Activation::Gelu => {}
    }
}

#[inline(always)]
pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated("silu_mul", gate, up, out, |g| g / (1.0 + exp(-g)));
}

/// With `s = sigmoid(g)` and `a = g s`: `da/dg = s + a (1 - s)`.
#[inline(always)]
pub(crate) fn silu_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]) {
    gated_backward("silu_mul_backward", gate, up, out, |g| {
        let denominator = 1.0 + exp(-g);
        let (a, s) = (g / denominator, 1.0 / denominator);
        (a, s + a * (1.0 - s))
    });
}

#[inline(always)]
fn relu2_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated("relu2_mul", gate, up, out, |g| {
        // Formulated so that NaN stays NaN.
        let r = if g < 0.0 { 0.0 } else { g };
        r * r
    });
}

/// `d max(g, 0)²/dg = 2 max(g, 0)`.
#[inline(always)]
fn relu2_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]) {
    gated_backward("relu2_mul_backward", gate, up, out, |g| {
        let r = if g < 0.0 { 0.0 } else { g };
        (r * r, 2.0 * r)
    });
}

#[inline(always)]
fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), which keeps its relative accuracy for large negative u.
    gated("gelu_tanh_mul", gate, up, out, |g| {
        let u = GELU_SLOPE * (g + GELU_CUBIC * (g * g * g));
        g / (1.0 + exp(-2.0 * u))
    });
}

/// With `s = 1 / (1 + e^(-2u))` and `a = g s`: `da/dg = s + a (1 - s) 2 du/dg`.
#[inline(always)]
fn gelu_tanh_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]) {
    gated_backward("gelu_tanh_mul_backward", gate, up, out, |g| {
        let u = GELU_SLOPE * (g + GELU_CUBIC * (g * g * g));
        let denominator = 1.0 + exp(-2.0 * u);
        let (a, s) = (g / denominator, 1.0 / denominator);
        // Beyond it `a (1 - s)` is 0, and the square might be infinite.
        let square = super::clamp(g * g, 0.0, 1e6);
        (a, s + a * (1.0 - s) * (2.0 * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * square)))
    });
}

#[inline(always)]
fn gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated("gelu_mul", gate, up, out, |g| {
        let tail = 0.5 * erfc_of_magnitude(f64::from(g) * std::f64::consts::FRAC_1_SQRT_2);
        let below = if g < 0.0 { tail } else { 1.0 - tail };
        (f64::from(g) * below) as f32
    });
}

/// With the normal distribution Φ and its density φ: `d g Φ(g)/dg = Φ(g) + g φ(g)`.
#[inline(always)]
fn gelu_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]) {
    /// 1 / sqrt(2 pi)
    const DENSITY: f64 = 0.398_942_280_401_432_7;
    gated_backward("gelu_mul_backward", gate, up, out, |g| {
        let g = f64::from(g);
        let tail = 0.5 * erfc_of_magnitude(g * std::f64::consts::FRAC_1_SQRT_2);
        let below = if g < 0.0 { tail } else { 1.0 - tail };
        let density = DENSITY * exp_f64_nonpositive(-0.5 * g * g);
        ((g * below) as f32, (below + g * density) as f32)
    });
}

/// `erfc(|x|)` within a relative error of 1e-8: `t · exp(-x² + P(2t - 1))` with `t = 1 / (1 + |x| / 2)`, the form of
/// Press et al., "Numerical Recipes", sec. 6.2; P, of degree 12, was fitted at Chebyshev points.
#[inline(always)]
fn erfc_of_magnitude(x: f64) -> f64 {
    /// Constant term first.
    const P: [f64; 13] = [
        -0.671_794_085_151_722_2,
        0.672_643_154_774_540_3,
        0.047_343_417_521_076_37,
        -0.046_893_640_559_954_4,
        -0.009_874_534_918_342_365,
        0.008_808_825_369_399_994,
        0.001_770_666_118_728_506,
        -0.002_288_765_238_676_522_5,
        -0.000_182_782_141_760_535_64,
        0.000_573_766_372_119_633_6,
        -3.211_377_236_549_363e-5,
        -8.728_381_026_820_904e-5,
        1.337_150_335_327_551_8e-5,
    ];
    let x = x.abs();
    let t = 1.0 / (1.0 + 0.5 * x);
    let s = 2.0 * t - 1.0;
    let mut p = P[12];
    for c in P[..12].iter().rev() {
        p = p * s + c;
    }
    t * exp_f64_nonpositive(p - x * x)
}

/// The numbers are the factor above 0, the factor below 0 without the slope, the slope at 0, and the greatest argument of the
/// exponential.
#[inline(always)]
fn xielu_mul([positive, negative, slope, eps]: [f32; 4], gate: &[f32], up: &[f32], out: &mut [f32]) {
    let negative = slope + negative;
    gated("xielu_mul", gate, up, out, |g| {
        // Formulated so that NaN stays NaN.
        let below = (exp(if g > eps { eps } else { g }) - 1.0 - g) * negative;
        let curved = if g > 0.0 { positive * g * g } else { below };
        curved + slope * g
    });
}

#[inline(always)]
fn xielu_mul_backward(
    [positive, negative, slope, eps]: [f32; 4],
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
) {
    let negative = slope + negative;
    gated_backward("xielu_mul_backward", gate, up, out, |g| {
        let power = exp(if g > eps { eps } else { g });
        let curved = if g > 0.0 { positive * g * g } else { (power - 1.0 - g) * negative };
        // Above eps the power is constant.
        let below = if g > eps { -negative } else { (power - 1.0) * negative };
        (curved + slope * g, if g > 0.0 { 2.0 * positive * g } else { below } + slope)
    });
}

/// Sums in f64, in order, so that every instruction set gives the same bits.
#[inline(always)]
fn xielu_sums(eps: f32, gate: &[f32], grads: &[f32], sums: &mut [f64; 4]) {
    for (&g, &grad) in gate.iter().zip(grads) {
        let below = exp(if g > eps { eps } else { g }) - 1.0 - g;
        if g > 0.0 {
            sums[0] += f64::from(grad * g * g);
        } else {
            sums[1] += f64::from(grad * below);
        }
    }
}

#[inline(always)]
pub(crate) fn limited_swiglu_mul(
    [alpha, limit, offset]: [f32; 3],
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "limited_swiglu_mul: gate, up and out differ");
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        // Formulated so that NaN stays NaN.
        let g = if g > limit { limit } else { g };
        *out = (super::clamp(u, -limit, limit) + offset) * (g / (1.0 + exp(-alpha * g)));
    }
}

#[inline(always)]
pub(crate) fn softcap(x: &mut [f32], scale: f32, cap: f32) {
    for x in x {
        *x = cap * tanh(*x * scale / cap);
    }
}

/// `d cap tanh(scale x / cap)/dx = scale (1 - (y / cap)²)`.
#[inline(always)]
pub(crate) fn softcap_backward(y: &[f32], scale: f32, cap: f32, grads: &mut [f32]) {
    assert_eq!(y.len(), grads.len(), "softcap_backward: lengths differ");
    for (y, grad) in y.iter().zip(grads) {
        let t = *y / cap;
        *grad = *grad * (1.0 - t * t) * scale;
    }
}

#[inline(always)]
pub(super) fn tanh(u: f32) -> f32 {
    let (u2, e) = (u * u, exp(-2.0 * u.abs()));
    // Near 0 use the series, whose first omitted term is 62/2835 u⁹; elsewhere (1 - e) / (1 + e) has no
    // cancellation.
    let near = u - u * u2 * (1.0 / 3.0 - u2 * (2.0 / 15.0 - u2 * (17.0 / 315.0)));
    let far = ((1.0 - e) / (1.0 + e)).copysign(u);
    if u2 < 0.04 { near } else { far }
}

#[inline(always)]
fn gated(kernel: &str, gate: &[f32], up: &[f32], out: &mut [f32], act: impl Fn(f32) -> f32) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "{kernel}: gate, up and out differ in length");
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *out = act(g) * u;
    }
}

/// Backward of [`gated`]; `act` returns the activation, computed as in the forward, and its derivative.
#[inline(always)]
fn gated_backward(
    kernel: &str,
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
    act: impl Fn(f32) -> (f32, f32),
) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "{kernel}: gate, up and out differ in length");
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let (g, u, dy) = (*gate, *up, *out);
        let (a, slope) = act(g);
        (*gate, *up, *out) = (dy * u * slope, dy * a, a * u);
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
        // u is large where gelu is tiny, so its rounding adds |u| * 2^-24 to the result; only the useful range is
        // tested more strictly.
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

    /// Slopes against central differences of the definitions in f64, and the output against the forward's bits.
    #[test]
    fn gradients_match_central_differences() {
        type Backward = fn(&mut [f32], &mut [f32], &mut [f32]);
        type Forward = fn(&[f32], &[f32], &mut [f32]);
        type Case<'a> = (Forward, Backward, &'a dyn Fn(f64) -> f64);
        let erf = |x: f64| {
            // Simpson's rule.
            let (n, mut sum) = (4000, 0.0);
            let f = |t: f64| (-t * t).exp();
            for i in 0..n {
                let (a, b) = (x * f64::from(i) / f64::from(n), x * f64::from(i + 1) / f64::from(n));
                sum += (b - a) / 6.0 * (f(a) + 4.0 * f(0.5 * (a + b)) + f(b));
            }
            2.0 / std::f64::consts::PI.sqrt() * sum
        };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let relu2 = |x: f64| x.max(0.0).powi(2);
        let gelu_tanh = |x: f64| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        };
        let gelu = |x: f64| 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()));
        let all: [Case<'_>; 4] = [
            (silu_mul, silu_mul_backward, &silu),
            (relu2_mul, relu2_mul_backward, &relu2),
            (gelu_tanh_mul, gelu_tanh_mul_backward, &gelu_tanh),
            (gelu_mul, gelu_mul_backward, &gelu),
        ];
        for (n, (forward, backward, exact)) in all.into_iter().enumerate() {
            for i in -60..=60 {
                let (g, u, dy) = (f64::from(i) * 0.1 + 0.03, 1.5 + f64::from(i % 7), -0.75);
                let (mut gate, mut up, mut out) = ([g as f32], [u as f32], [dy as f32]);
                let mut expected = [0.0];
                forward(&gate, &up, &mut expected);
                backward(&mut gate, &mut up, &mut out);
                assert_eq!(out, expected, "{n}: {g}");
                let slope = dy * u * (exact(g + 1e-4) - exact(g - 1e-4)) / 2e-4;
                assert!((f64::from(gate[0]) - slope).abs() < 4e-6 * (1.0 + slope.abs()), "{n}: {g}");
                assert!((f64::from(up[0]) - dy * exact(g)).abs() < 2e-6 * (1.0 + exact(g).abs()), "{n}: {g}");
            }
            let (mut gate, mut up, mut out) = ([-1e30, 1e30, f32::NAN], [1.0; 3], [1.0; 3]);
            backward(&mut gate, &mut up, &mut out);
            assert!(gate[0] == 0.0 && gate[1] >= 1.0 && gate[2].is_nan(), "{n}: {gate:?}");
        }
    }

    #[test]
    fn the_slope_of_the_cap_matches_central_differences() {
        for i in -100..100_i8 {
            let x = f32::from(i) * 0.1;
            let (mut y, mut grad) = ([x], [1.5]);
            softcap(&mut y, 0.5, 3.0);
            softcap_backward(&y, 0.5, 3.0, &mut grad);
            let exact = |x: f64| 1.5 * 3.0 * (x * 0.5 / 3.0).tanh();
            let slope = (exact(f64::from(x) + 1e-5) - exact(f64::from(x) - 1e-5)) / 2e-5;
            assert!((f64::from(grad[0]) - slope).abs() < 1e-6, "{x}: {} for {slope}", grad[0]);
        }
    }

    #[test]
    fn xielu_matches_its_definition() {
        let numbers = [0.9, 0.7 - 0.5, 0.5, -1e-6];
        for i in -200..=200_i16 {
            let x = f32::from(i) * 0.05;
            let mut out = [0.0];
            xielu_mul(numbers, &[x], &[2.0], &mut out);
            let x = f64::from(x);
            let curved = if x > 0.0 { 0.9 * x * x } else { 0.7 * (x.min(-1e-6).exp_m1() - x) };
            let exact = curved + 0.5 * x;
            // Below 0 the two terms cancel, so the bound is relative to them.
            let terms = 1.0 + curved.abs() + (0.5 * x).abs();
            assert!((f64::from(out[0]) - 2.0 * exact).abs() < 4e-7 * terms, "{x}: {out:?}");
        }
        let mut out = [0.0];
        xielu_mul(numbers, &[f32::NAN], &[1.0], &mut out);
        assert!(out[0].is_nan());
    }

    #[test]
    fn large_inputs_saturate() {
        let mut out = [0.0; 3];
        silu_mul(&[-200.0, 200.0, f32::NAN], &[1.0; 3], &mut out);
        assert_eq!(out[..2], [-0.0, 200.0]);
        assert!(out[2].is_nan());
    }

    #[test]
    fn gelu_matches_the_error_function() {
        // Values of 0.5 (1 + erf(x / √2)) x from a 30-digit computation.
        let cases = [
            (-6.0_f32, -5.919_526_9e-9_f64),
            (-3.0, -0.004_049_694_3),
            (-1.0, -0.158_655_254),
            (-0.25, -0.100_323_414),
            (0.0, 0.0),
            (0.5, 0.345_731_231),
            (1.0, 0.841_344_746),
            (4.0, 3.999_873_31),
            (20.0, 20.0),
        ];
        for (x, exact) in cases {
            let mut out = [0.0];
            gelu_mul(&[x], &[1.0], &mut out);
            assert!((f64::from(out[0]) - exact).abs() <= 2e-7 * exact.abs(), "gelu({x}) = {}", out[0]);
        }
        let mut out = [0.0];
        gelu_mul(&[f32::NAN], &[1.0], &mut out);
        assert!(out[0].is_nan());
    }

    #[test]
    fn soft_caps_match_the_hyperbolic_tangent() {
        for i in -4000..4000_i16 {
            let x = f32::from(i) * 0.01;
            let mut out = [x];
            softcap(&mut out, 0.5, 3.0);
            let exact = 3.0 * (f64::from(x) * 0.5 / 3.0).tanh();
            assert!((f64::from(out[0]) - exact).abs() <= 4e-7 * exact.abs(), "{x}: {} for {exact}", out[0]);
        }
    }

    #[test]
    fn limits_hold_inside_the_gate() {
        let mut out = [0.0; 3];
        limited_swiglu_mul([1.702, 7.0, 1.0], &[9.0, 1.0, -2.0], &[10.0, -10.0, 0.5], &mut out);
        let silu = |g: f64| g / (1.0 + (-1.702 * g).exp());
        for (out, exact) in out.iter().zip([8.0 * silu(7.0), -6.0 * silu(1.0), 1.5 * silu(-2.0)]) {
            assert!((f64::from(*out) - exact).abs() < 1e-5, "{out} for {exact}");
        }
    }
}
