//! `hadamard`: powers of two, the non-power-of-two bases, signs, Transformer Engine's 16-point transform.

use mantissa_num::Hadamard;
use mantissa_num::hadamard::TE_SIGNS16;

use crate::support::{Get, open};

/// 1e-12 of the largest magnitude, as the data's README allows in f64.
fn assert_close(what: &str, found: &[f64], expected: &[f64], relative: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |a, v| a.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= relative * largest, "{what}[{i}]: found {f:e}, expected {e:e}");
    }
}

#[test]
fn transforms_match_in_both_precisions() {
    let mut checked = 0;
    for file in open("hadamard.safetensors") {
        let t = file.tensors();
        for name in t.names() {
            let Some(n) = name.strip_suffix(".x_f64").and_then(|n| n.strip_prefix('n')) else { continue };
            let get = |kind: &str| t.f64(&format!("n{n}.{kind}")).unwrap();
            let x = get("x_f64");
            let h = Hadamard::new(n.parse().unwrap()).unwrap();
            let mut y = x.clone();
            h.forward(&mut y);
            assert_close(&format!("n{n}"), &y, &get("y_f64"), 1e-12);
            // QuaRot rounds 1/sqrt(n) to f32.
            assert_close(&format!("n{n} QuaRot"), &y, &get("y_quarot_f64"), 5e-8);
            let mut y = x.clone();
            h.transpose(&mut y);
            assert_close(&format!("n{n} transposed"), &y, &get("y_transpose_f64"), 1e-12);
            let mut y: Vec<f32> = x.iter().map(|&v| v as f32).collect();
            h.forward(&mut y);
            let wide: Vec<f64> = y.iter().map(|&v| v.into()).collect();
            assert_close(&format!("n{n} f32"), &wide, &get("y_f64"), 1e-6);
            let expected: Vec<f64> =
                t.f32(&format!("n{n}.y_f32_from_f32")).unwrap().into_iter().map(f64::from).collect();
            assert_close(&format!("n{n} f32 QuaRot"), &wide, &expected, 1e-6);
            let signs: Vec<i8> =
                t.ints(&format!("n{n}.signs_i8")).unwrap().into_iter().map(|s| s as i8).collect();
            let mut y = x.clone();
            h.clone().with_signs(&signs).unwrap().forward(&mut y);
            assert_close(&format!("n{n} signs"), &y, &get("randomized_y_f64"), 1e-12);
            if let Some(matrix) = t.ints(&format!("n{n}.matrix_unnormalized_i8")) {
                check_matrix(&h, &matrix);
            }
            checked += 1;
        }
    }
    assert!(checked >= 5, "{checked}");
}

/// `matrix` is `Hᵀ·sqrt(n)`: its rows are the transforms of unit vectors.
fn check_matrix(h: &Hadamard, matrix: &[i64]) {
    let n = h.order();
    for (i, row) in matrix.chunks_exact(n).enumerate() {
        let mut unit = vec![0.0f64; n];
        unit[i] = (n as f64).sqrt();
        h.forward(&mut unit);
        assert!(unit.iter().zip(row).all(|(u, &m)| (u - m as f64).abs() < 1e-12), "row {i} of {n}");
    }
}

#[test]
fn base_matrices_are_the_published_ones() {
    for file in open("hadamard.safetensors") {
        let t = file.tensors();
        for name in t.names() {
            let Some(k) = name.strip_prefix("had").and_then(|n| n.strip_suffix("_i8")) else { continue };
            let h = Hadamard::new(k.parse().unwrap()).unwrap();
            let k = h.order();
            assert_eq!(h.base(), k);
            let transposed: Vec<i64> = mantissa_num::pack::transpose(&t.ints(name).unwrap(), k, k);
            check_matrix(&h, &transposed);
        }
    }
}

#[test]
fn transformer_engine_rotates_by_sixteen() {
    for file in open("hadamard.safetensors") {
        let t = file.tensors();
        let signs: Vec<i8> = t.f32("te_rht16.signs").unwrap().iter().map(|&s| s as i8).collect();
        assert_eq!(signs, TE_SIGNS16);
        let mut y: Vec<f64> = t.f32("te_rht16.x").unwrap().into_iter().map(f64::from).collect();
        Hadamard::new(16).unwrap().with_signs(&TE_SIGNS16).unwrap().forward(&mut y);
        assert_close("te_rht16", &y, &t.f64("te_rht16.y_f64").unwrap(), 1e-12);
    }
}
