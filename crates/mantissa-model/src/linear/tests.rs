//! Tests every storage against the dense product.

use half::{bf16, f16};
use mantissa_num::{Given, Scheme, parse_activation, quantize};
use mantissa_store::convention::ActivationQuant;

use super::*;

fn wave(n: usize, phase: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.517 + phase).sin()).collect()
}

fn linear(rows: usize, cols: usize, weight: Weight) -> Linear {
    let bias = Some(wave(rows, 3.0));
    Linear::new("m", LinearWeight { rows, cols, weight, bias, input: None, transforms: Default::default() })
        .unwrap()
}

fn run(linear: &Linear, x: &[f32], accumulate: bool) -> Vec<u32> {
    let mut out = vec![0.25; x.len() / linear.cols() * linear.rows()];
    let mut scratch = vec![f32::NAN; Linear::scratch_len(linear.rows(), linear.cols())];
    linear.forward(x, &mut out, accumulate, &mut scratch);
    out.into_iter().map(f32::to_bits).collect()
}

fn storages(w: &[f32], rows: usize, cols: usize) -> Vec<(String, Weight)> {
    let bf16 = w.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
    let f16 = w.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    let mut all = vec![("bf16".to_string(), Weight::Bf16(bf16)), ("f16".into(), Weight::F16(f16))];
    for text in [
        "int4-g32",
        "int4-g32-asym",
        "int8-channel",
        "fp8-e4m3-channel",
        "nf4",
        "nvfp4",
        "mxfp4",
        "bf16",
        "q4_0",
        "gguf-nvfp4",
        "tq2_0",
    ] {
        let scheme: Scheme = text.parse().unwrap();
        if scheme.format.codec().is_some_and(|codec| !cols.is_multiple_of(codec.elements)) {
            continue;
        }
        let q = quantize(&scheme, w, rows, cols, Given::default()).unwrap();
        all.push((text.into(), Weight::Quantized(q)));
    }
    all
}

#[test]
fn every_storage_matches_the_dense_product_of_its_values() {
    for (rows, cols) in [(7, 33), (130, 64), (1100, 129), (397, 700), (40, 512)] {
        let w = wave(rows * cols, 0.0);
        for (name, weight) in storages(&w, rows, cols) {
            let stored = linear(rows, cols, weight);
            let mut values = vec![0.0; rows * cols];
            values.chunks_exact_mut(cols).enumerate().for_each(|(r, out)| stored.row(r, out));
            let dense = linear(rows, cols, Weight::F32(values));
            for tokens in [1, 3, 40] {
                let x = wave(tokens * cols, 1.0);
                for accumulate in [false, true] {
                    let same = run(&stored, &x, accumulate) == run(&dense, &x, accumulate);
                    assert!(same, "{name} [{rows}, {cols}], {tokens} tokens");
                }
            }
        }
    }
}

/// Every storage multiplies its values as bf16, for any part of the tokens.
#[test]
fn bf16_products_match_the_rounded_factors() {
    let (rows, cols, tokens) = (1100, 160, 40);
    let rounded =
        |values: &[f32]| -> Vec<f32> { values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect() };
    let (w, x) = (wave(rows * cols, 0.0), wave(tokens * cols, 1.0));
    for (name, weight) in storages(&w, rows, cols) {
        let mut stored = linear(rows, cols, weight);
        let mut values = vec![0.0; rows * cols];
        values.chunks_exact_mut(cols).enumerate().for_each(|(r, out)| stored.row(r, out));
        let exact = linear(rows, cols, Weight::F32(rounded(&values)));
        stored.set_products(Products::Bf16);
        let (got, exact) = (run(&stored, &x, true), run(&exact, &rounded(&x), true));
        for (got, exact) in got.iter().zip(exact) {
            let (got, exact) = (f32::from_bits(*got), f32::from_bits(exact));
            assert!((got - exact).abs() < 1e-4, "{name}: {got} for {exact}");
        }
        assert_eq!(run(&stored, &x[..3 * cols], true), got[..3 * rows], "{name}");
    }
}

#[test]
fn the_dense_product_is_the_product() {
    let (rows, cols, tokens) = (300, 700, 5);
    let (w, x) = (wave(rows * cols, 0.0), wave(tokens * cols, 1.0));
    let out = run(&linear(rows, cols, Weight::F32(w.clone())), &x, true);
    for (i, got) in out.iter().enumerate() {
        let (t, r) = (i / rows, i % rows);
        let dot: f64 = (0..cols).map(|k| f64::from(x[t * cols + k]) * f64::from(w[r * cols + k])).sum();
        let exact = dot + f64::from(wave(rows, 3.0)[r]) + 0.25;
        assert!((f64::from(f32::from_bits(*got)) - exact).abs() < 1e-4);
    }
}

/// Rows of an output must not depend on the number of other rows.
#[test]
fn a_token_has_the_same_bits_in_any_batch_that_is_not_small() {
    for (rows, cols) in [(450, 1100), (385, 2000), (1025, 64), (32, 2000), (8, 40), (64, 700)] {
        let layer = linear(rows, cols, Weight::F32(wave(rows * cols, 0.0)));
        let x = wave(400 * cols, 1.0);
        let all = run(&layer, &x, false);
        for tokens in [65, 66, 100, 127, 256, 399] {
            let some = run(&layer, &x[..tokens * cols], false);
            assert!(some == all[..tokens * rows], "[{rows}, {cols}], {tokens} tokens");
        }
    }
}

/// Layers share a quantized input only if they ask for the same.
#[test]
fn fused_partners_get_the_input_they_ask_for() {
    let (rows, cols, tokens) = (20, 48, 3);
    let asking = |scheme: Option<&str>| {
        let quant = |text| ActivationQuant::new(parse_activation(text).unwrap(), None);
        let (weight, input) = (Weight::F32(wave(rows * cols, 0.0)), scheme.map(quant));
        Linear::new(
            "m",
            LinearWeight { rows, cols, weight, bias: None, input, transforms: Default::default() },
        )
        .unwrap()
    };
    let schemes = [Some("int8-token"), None, Some("int8-token"), Some("fp8-e4m3-token")];
    let linears = schemes.map(asking);
    let x = wave(tokens * cols, 1.0);
    let mut scratch = vec![0.0; Linear::scratch_len(rows, cols)];
    let mut outs: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; tokens * rows]);
    let mut slots = outs.iter_mut();
    let jobs = linears.each_ref().map(|linear| LinearMatmul {
        linear,
        out: slots.next().unwrap(),
        accumulate: false,
    });
    forward_fused(jobs, &x, &mut vec![0.0; tokens * cols + 5], &mut scratch).unwrap();
    for (linear, out) in linears.iter().zip(&outs) {
        let mut x = x.clone();
        linear.input().iter().for_each(|input| input.apply(&mut x, cols).unwrap());
        let out: Vec<u32> = out.iter().map(|y| y.to_bits()).collect();
        assert_eq!(run(linear, &x, false), out, "{:?}", linear.input());
    }
    assert!(outs[0] == outs[2] && outs[0] != outs[1] && outs[0] != outs[3] && outs[1] != outs[3]);
}

/// Side tensors and transforms give the product with the folded weight, alone and fused.
#[test]
fn transforms_match_the_folded_weight() {
    use mantissa_num::stored::{Extra, Map};
    let (rows, cols, tokens) = (16, 48, 3);
    let transforms = Transforms {
        before: vec![Map::Perm((0..cols as u32).rev().collect()), Map::Diag(wave(cols, 0.5))],
        after: vec![Map::Hadamard(mantissa_num::Hadamard::new(16).unwrap())],
        extras: vec![Extra::Columns { index: vec![5], values: wave(rows, 2.0) }],
    };
    let (w, x) = (wave(rows * cols, 0.0), wave(tokens * cols, 1.0));
    let made = |weight: Vec<f32>, transforms| {
        let (weight, bias) = (Weight::F32(weight), Some(wave(rows, 3.0)));
        Linear::new("m", LinearWeight { rows, cols, weight, bias, input: None, transforms }).unwrap()
    };
    let mut folded = w.clone();
    transforms.fold(&mut folded, rows, cols);
    let (whole, plain) = (made(w, transforms), made(folded, Transforms::default()));
    let near = |a: &[u32], b: &[u32]| {
        let pairs = a.iter().zip(b).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)));
        pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-4, "{a} {b}"));
    };
    for accumulate in [false, true] {
        near(&run(&whole, &x, accumulate), &run(&plain, &x, accumulate));
    }
    let mut outs = [vec![0.0; tokens * rows], vec![0.0; tokens * rows], vec![0.0; tokens * rows]];
    let linears = [&whole, &plain, &whole];
    let jobs =
        linears.iter().zip(&mut outs).map(|(&linear, out)| LinearMatmul { linear, out, accumulate: false });
    let mut scratch = vec![0.0; Linear::scratch_len(rows, cols)];
    forward_fused(jobs, &x, &mut vec![0.0; tokens * cols], &mut scratch).unwrap();
    let bits = outs.map(|out| out.iter().map(|y| y.to_bits()).collect::<Vec<_>>());
    assert!(bits[0] == bits[2] && bits[0] == run(&whole, &x, false));
    near(&bits[0], &bits[1]);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let weight = LinearWeight {
        rows: 2,
        cols: 3,
        weight: Weight::F32(vec![0.0; 5]),
        bias: None,
        input: None,
        transforms: Default::default(),
    };
    assert!(matches!(Linear::new("m", weight), Err(LoadError::Weight { .. })));
    let weight = Weight::F32(vec![0.0; 6]);
    let weight = LinearWeight {
        rows: 2,
        cols: 3,
        weight,
        bias: Some(vec![0.0; 3]),
        input: None,
        transforms: Default::default(),
    };
    assert!(Linear::new("m", weight).unwrap_err().to_string().contains("bias"));
}
