//! Hadamard transforms of runs along a row, with the bits of `mantissa_num::Hadamard`: every value takes part in the same
//! sums in the same order.

/// Values whose butterflies stay within a register.
const LANES: usize = 16;

#[inline(always)]
pub(crate) fn hadamard(x: &mut [f32], order: usize, signs: &[f32]) {
    assert!(
        order.is_power_of_two() && order >= LANES && (signs.is_empty() || signs.len() == order),
        "hadamard: order {order}, {} signs",
        signs.len()
    );
    let norm = (1.0 / (order as f64).sqrt()) as f32;
    for run in x.chunks_exact_mut(order) {
        for (x, sign) in run.iter_mut().zip(signs) {
            *x *= sign;
        }
        for lanes in run.as_chunks_mut::<LANES>().0 {
            stage::<1>(lanes);
            stage::<2>(lanes);
            stage::<4>(lanes);
            stage::<8>(lanes);
        }
        let mut half = LANES;
        while half < order {
            for pair in run.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for x in run {
            *x *= norm;
        }
    }
}

/// Butterflies of values `HALF` apart.
#[inline(always)]
fn stage<const HALF: usize>(x: &mut [f32; LANES]) {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        let other = x[i ^ HALF];
        out[i] = if i & HALF == 0 { x[i] + other } else { other - x[i] };
    }
    *x = out;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::Hadamard;

    use crate::{Isa, Kernels};

    #[test]
    fn transforms_have_the_bits_of_the_reference_at_every_level() {
        let x: Vec<f32> = (0..1111).map(|i| (i as f32 * 0.7).sin() * 2f32.powi(i % 9 - 4)).collect();
        for isa in Isa::ALL.into_iter().filter_map(Kernels::new) {
            for order in [16, 32, 128, 1024] {
                for transform in [Hadamard::new(order).unwrap(), Hadamard::new(order).unwrap().randomized(3)]
                {
                    let signs: Vec<f32> = transform.signs().iter().map(|sign| f32::from(*sign)).collect();
                    let (mut found, mut expected) = (x.clone(), x.clone());
                    isa.hadamard(&mut found, order, &signs);
                    transform.forward(&mut expected);
                    assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{order}");
                }
            }
        }
    }
}
