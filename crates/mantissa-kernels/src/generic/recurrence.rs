//! Steps of recurrent token mixers, one token of one head at a time. Rows of a state are summed in order, value by
//! value, so every level has the same bits.

use super::exp::exp;

/// Rows of a state that are read at a time.
const ROWS: usize = 4;

#[inline(always)]
pub(crate) fn delta_rule_step(
    state: &mut [f32],
    [q, k, v]: [&[f32]; 3],
    decay: f32,
    beta: f32,
    delta: &mut [f32],
    out: &mut [f32],
) {
    let width = v.len();
    assert!(
        q.len() == k.len() && state.len() == k.len() * width && delta.len() == width && out.len() == width,
        "delta_rule_step: state {}, keys {}, values {width}",
        state.len(),
        k.len()
    );
    if width == 0 {
        return;
    }
    delta.fill(0.0);
    out.fill(0.0);
    // Reads the decayed state with the key and with the query.
    let whole = k.len() / ROWS * ROWS;
    let (first, rest) = state.split_at_mut(whole * width);
    for (rows, i) in first.chunks_exact_mut(ROWS * width).zip((0..).step_by(ROWS)) {
        let (a, b) = rows.split_at_mut(2 * width);
        let ((r0, r1), (r2, r3)) = (a.split_at_mut(width), b.split_at_mut(width));
        let (k, q) = (&k[i..i + ROWS], &q[i..i + ROWS]);
        let rows = r0.iter_mut().zip(r1).zip(r2.iter_mut().zip(r3));
        for (((r0, r1), (r2, r3)), (delta, out)) in rows.zip(delta.iter_mut().zip(&mut *out)) {
            (*r0, *r1, *r2, *r3) = (*r0 * decay, *r1 * decay, *r2 * decay, *r3 * decay);
            *delta = (((*delta + k[0] * *r0) + k[1] * *r1) + k[2] * *r2) + k[3] * *r3;
            *out = (((*out + q[0] * *r0) + q[1] * *r1) + q[2] * *r2) + q[3] * *r3;
        }
    }
    for (row, (k, q)) in rest.chunks_exact_mut(width).zip(k[whole..].iter().zip(&q[whole..])) {
        for (s, (delta, out)) in row.iter_mut().zip(delta.iter_mut().zip(&mut *out)) {
            *s *= decay;
            *delta += k * *s;
            *out += q * *s;
        }
    }
    delta.iter_mut().zip(v).for_each(|(delta, v)| *delta = beta * (v - *delta));
    // Qᵀ(S + k deltaᵀ) = QᵀS + (q·k) deltaᵀ.
    let product = q.iter().zip(k).fold(0.0, |sum, (q, k)| sum + q * k);
    out.iter_mut().zip(&*delta).for_each(|(out, delta)| *out += product * delta);
    for (row, k) in state.chunks_exact_mut(width).zip(k) {
        row.iter_mut().zip(&*delta).for_each(|(s, delta)| *s += k * delta);
    }
}

#[inline(always)]
pub(crate) fn state_space_step(
    state: &mut [f32],
    [b, c]: [&[f32]; 2],
    x: &[f32],
    decay: f32,
    out: &mut [f32],
) {
    let width = x.len();
    assert!(
        b.len() == c.len() && state.len() == b.len() * width && out.len() == width,
        "state_space_step: state {}, b {}, x {width}",
        state.len(),
        b.len()
    );
    out.fill(0.0);
    if width == 0 {
        return;
    }
    for (row, (b, c)) in state.chunks_exact_mut(width).zip(b.iter().zip(c)) {
        for (s, (x, out)) in row.iter_mut().zip(x.iter().zip(&mut *out)) {
            *s = *s * decay + b * x;
            *out += c * *s;
        }
    }
}

#[inline(always)]
pub(crate) fn mul_add(a: &[f32], b: &[f32], y: &mut [f32]) {
    assert!(a.len() == y.len() && b.len() == y.len(), "mul_add: lengths differ");
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y += a * b);
}

#[inline(always)]
pub(crate) fn silu_inplace(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x /= 1.0 + exp(-*x));
}

#[inline(always)]
pub(crate) fn sigmoid_mul(gate: &[f32], x: &mut [f32]) {
    assert_eq!(gate.len(), x.len(), "sigmoid_mul: lengths differ");
    x.iter_mut().zip(gate).for_each(|(x, gate)| *x /= 1.0 + exp(-gate));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 + seed) * 0.73).sin()).collect()
    }

    /// Equation 10 of the paper in f64, for sizes with and without a rest of rows.
    #[test]
    fn the_delta_rule_agrees_with_its_formula() {
        for (keys, width) in [(8, 6), (7, 5), (3, 1), (1, 9)] {
            let mut state = values(keys * width, 0.0);
            let (q, k, v) = (values(keys, 1.0), values(keys, 2.0), values(width, 3.0));
            let (decay, beta) = (0.9_f32, 0.4_f32);
            let mut wide: Vec<f64> = state.iter().map(|s| f64::from(*s) * f64::from(decay)).collect();
            let read = |state: &[f64], x: &[f32], j: usize| -> f64 {
                x.iter().enumerate().map(|(i, x)| f64::from(*x) * state[i * width + j]).sum()
            };
            let delta: Vec<f64> =
                (0..width).map(|j| f64::from(beta) * (f64::from(v[j]) - read(&wide, &k, j))).collect();
            for (i, row) in wide.chunks_exact_mut(width).enumerate() {
                row.iter_mut().zip(&delta).for_each(|(s, delta)| *s += f64::from(k[i]) * delta);
            }
            let (mut scratch, mut out) = (vec![9.0; width], vec![9.0; width]);
            delta_rule_step(&mut state, [&q, &k, &v], decay, beta, &mut scratch, &mut out);
            for j in 0..width {
                assert!((f64::from(out[j]) - read(&wide, &q, j)).abs() < 1e-5);
            }
            assert!(state.iter().zip(&wide).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5));
        }
    }

    #[test]
    fn a_state_space_step_agrees_with_its_formula() {
        let (mut state, x) = (values(12, 0.0), values(4, 1.0));
        let (b, c) = (values(3, 2.0), values(3, 3.0));
        let before = state.clone();
        let mut out = [9.0; 4];
        state_space_step(&mut state, [&b, &c], &x, 0.8, &mut out);
        for j in 0..4 {
            let expected = |i: usize| {
                f64::from(before[i * 4 + j]) * f64::from(0.8_f32) + f64::from(b[i]) * f64::from(x[j])
            };
            assert!((0..3).all(|i| (f64::from(state[i * 4 + j]) - expected(i)).abs() < 1e-6));
            let read: f64 = (0..3).map(|i| f64::from(c[i]) * expected(i)).sum();
            assert!((f64::from(out[j]) - read).abs() < 1e-6);
        }
    }

    #[test]
    fn gates_and_products_by_element() {
        let mut y = [1.0, 2.0];
        mul_add(&[2.0, 3.0], &[4.0, 5.0], &mut y);
        assert_eq!(y, [9.0, 17.0]);
        let mut x = [0.0, 2.0, -200.0];
        silu_inplace(&mut x);
        assert!(x[0] == 0.0 && (x[1] - 1.761_594_2).abs() < 1e-6 && x[2].abs() < 1e-30);
        let mut x = [4.0, 4.0, 4.0];
        sigmoid_mul(&[0.0, 200.0, -200.0], &mut x);
        assert!(x[0] == 2.0 && x[1] == 4.0 && x[2].abs() < 1e-30);
    }
}
