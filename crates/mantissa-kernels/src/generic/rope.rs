//! Rotary position embedding (Su et al. 2021, "RoFormer", eq. 34) in the half-split layout of GPT-NeoX and Hugging
//! Face Llama: component `i` of the first half of a head rotates with component `i` of the second half.

#[inline(always)]
pub(crate) fn rope_rotate(x: &mut [f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32]) {
    each_head(x, heads, head_dim, cos, sin, rotate_head);
}

#[inline(always)]
pub(crate) fn rope_rotate_back(x: &mut [f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32]) {
    each_head(x, heads, head_dim, cos, sin, rotate_head_back);
}

#[inline(always)]
fn each_head(
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    rotate: impl Fn(&mut [f32], &mut [f32], &[f32], &[f32]),
) {
    assert_eq!(cos.len(), sin.len(), "rope_rotate: cos and sin differ in length");
    if x.is_empty() {
        return;
    }
    let width = heads.checked_mul(head_dim).unwrap_or(0);
    assert!(
        width > 0 && x.len().is_multiple_of(width),
        "rope_rotate: x is not rows of {heads} heads of {head_dim}"
    );
    let rows = x.len() / width;
    assert!(
        cos.len().is_multiple_of(rows),
        "rope_rotate: tables of {} do not hold {rows} positions",
        cos.len()
    );
    let half = cos.len() / rows;
    assert!(half > 0 && half <= head_dim / 2, "rope_rotate: {half} angles for heads of {head_dim}");
    let tables = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    for (row, (cos, sin)) in x.chunks_exact_mut(width).zip(tables) {
        for head in row.chunks_exact_mut(head_dim) {
            let (first, rest) = head.split_at_mut(half);
            rotate(first, &mut rest[..half], cos, sin);
        }
    }
}

#[inline(always)]
fn rotate_head(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// Transpose of [`rotate_head`]: rotates by the negative angle and keeps the tables' factor (YaRN).
#[inline(always)]
fn rotate_head_back(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * c + *b * s, *b * c - *a * s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ⟨R x, y⟩ = ⟨x, Rᵀ y⟩ for a table that also scales.
    #[test]
    fn back_is_the_transpose() {
        let x: Vec<f32> = (0..24_u8).map(|i| f32::from(i).sin()).collect();
        let y: Vec<f32> = (0..24_u8).map(|i| f32::from(i).cos()).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            (0..6_u8).map(|i| (1.2 * f32::from(i).cos(), 1.2 * f32::from(i).sin())).unzip();
        let (mut turned, mut back) = (x.clone(), y.clone());
        rope_rotate(&mut turned, 2, 4, &cos, &sin);
        rope_rotate_back(&mut back, 2, 4, &cos, &sin);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert!((dot(&turned, &y) - dot(&x, &back)).abs() < 1e-5);
        assert!(turned != x && back != y);
    }

    #[test]
    fn halves_turn_together() {
        let mut x = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0];
        rope_rotate(&mut x, 2, 4, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(x, [-3.0, 2.0, 1.0, 4.0, -30.0, 20.0, 10.0, 40.0]);
    }

    #[test]
    fn values_after_the_rotated_part_are_unchanged() {
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rope_rotate(&mut x, 1, 3, &[0.0, 0.0], &[1.0, -1.0]);
        assert_eq!(x, [-2.0, 1.0, 3.0, 5.0, -4.0, 6.0]);
    }
}
