use mantissa_num::codec::CodecId;
use mantissa_num::{Given, Scheme, grammar, parse_activation, quantize};
use mantissa_store::convention::ActivationQuant;

use super::*;

/// Values without a pattern, so that products do not cancel.
fn wave(n: usize, step: f32) -> Vec<f32> {
    let mut state = (step * 1e6) as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|i| (next() + next() + next()) * (1.0 + (i % 13) as f32 / 8.0)).collect()
}

fn weight(scheme: &Scheme, rows: usize, cols: usize, input: Option<&str>) -> Option<LinearWeight> {
    let q = quantize(scheme, &wave(rows * cols, 0.913), rows, cols, Given::default()).ok()?;
    let input = input.map(|text| ActivationQuant::new(parse_activation(text).unwrap(), None));
    let (weight, transforms) = (Weight::Quantized(q), Transforms::default());
    Some(LinearWeight { rows, cols, weight, bias: Some(wave(rows, 0.3)), input, transforms })
}

/// Root mean square of the difference, relative to the reference without its bias.
fn error(weight: &LinearWeight, tokens: usize) -> (f64, KernelChoice) {
    let (rows, cols) = (weight.rows, weight.cols);
    let x = wave(tokens * cols, 0.377);
    let prepared = PreparedLinear::new("m", weight.clone(), 2).unwrap();
    let mut out = vec![0.5; tokens * rows];
    let jobs = [PreparedMatmul { linear: &prepared, input: 0, out: &mut out, accumulate: true }];
    forward(jobs.into_iter(), &[Rows { x: &x, tokens }], &mut Scratch::default(), 2).unwrap();
    let reference = Linear::new("m", weight.clone()).unwrap();
    let (mut values, mut ready) = (vec![0.0; rows * cols], x.clone());
    values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| reference.row(row, out));
    if let Some(input) = reference.input() {
        input.apply(&mut ready, cols).unwrap();
    }
    let (mut wrong, mut size) = (0.0, 0.0);
    for (t, (x, out)) in ready.chunks_exact(cols).zip(out.chunks_exact(rows)).enumerate() {
        for (r, out) in out.iter().enumerate() {
            let terms = values[r * cols..][..cols].iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let exact: f64 = terms.sum();
            let got = f64::from(*out) - 0.5 - f64::from(weight.bias.as_ref().unwrap()[r]);
            assert!(got.is_finite(), "token {t}, row {r}");
            (wrong, size) = (wrong + (got - exact).powi(2), size + exact * exact);
        }
    }
    for row in [0, rows - 1] {
        let mut got = vec![0.0; cols];
        prepared.row(row, &mut got);
        let expected = &values[row * cols..][..cols];
        let size = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
        // Code books that are not integers are rounded to 8 bits.
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 5e-3 * size), "row {row}");
    }
    ((wrong / size).sqrt(), prepared.choice())
}

#[test]
fn every_scheme_multiplies_like_its_dequantized_weight() {
    let mut own = 0;
    for scheme in grammar::catalogue() {
        let Some(weight) = weight(&scheme, 40, 512, None) else { continue };
        for tokens in [1, 3, 20] {
            let (error, choice) = error(&weight, tokens);
            assert!(error < 1e-2, "{scheme}, {tokens} tokens: {error} by {choice:?}");
            own += usize::from(choice.reason.is_none());
        }
    }
    assert!(own > 100, "{own} schemes and token counts with a kernel of their own");
}

#[test]
fn formats_that_models_are_published_in_have_kernels_of_their_own() {
    let codecs = CodecId::ALL.iter().map(|id| id.codec().name);
    let schemes = [
        "fp8-e4m3-channel",
        "fp8-e5m2-tensor",
        "fp8-e4m3-t128x128",
        "mxfp8-e4m3",
        "mxfp6-e3m2",
        "mxfp6-e2m3",
        "mxfp4",
        "mxint8",
        "nvfp4",
        "nvfp4:te",
        "nf4",
        "nf4-dq",
        "fp4-bnb-g64",
        "int8-channel",
        "int8-tensor",
        "int8-g32-asym",
        "int4-g32",
        "int4-g128",
        "int4-g128-asym",
        "int4-channel",
        "int3-g128",
        "int3-g32-asym",
        "int2-g64",
        "int2-g16-asym",
        "ternary-tensor",
        "int5-g32",
        "int6-g48",
    ];
    for name in schemes.into_iter().chain(codecs) {
        let scheme: Scheme = name.parse().unwrap();
        let Some(weight) = weight(&scheme, 20, 768, None) else { continue };
        let (error, choice) = error(&weight, 2);
        assert!(choice.reason.is_none() && error < 1e-2, "{name}: {error} {choice:?}");
    }
}

#[test]
fn quantized_inputs_have_the_codes_that_the_checkpoint_states() {
    for (weight_scheme, input) in [
        ("int8-channel", "int8-token"),
        ("int8-channel", "int8-token:restricted"),
        ("int4-g128", "int8-token"),
        ("int4-channel", "int4-token"),
        ("int8-g32", "int8-g32"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "mxfp4"),
        ("fp8-e4m3-channel", "fp8-e4m3-token"),
    ] {
        let weight = weight(&weight_scheme.parse().unwrap(), 24, 512, Some(input)).unwrap();
        let (error, choice) = error(&weight, 5);
        // Floats may be multiplied in bf16.
        let bound = if weight_scheme.starts_with("fp8") { 4e-3 } else { 2e-6 };
        assert!(choice.reason.is_none() && error < bound, "{weight_scheme} {input}: {error}");
    }
}

#[test]
fn static_inputs_with_zero_points_keep_their_codes() {
    for (scheme, zero) in
        [("int8-channel", -37), ("int8-channel", 0), ("int4-g128", 90), ("fp8-e4m3-channel", 5)]
    {
        let mut weight = weight(&scheme.parse().unwrap(), 24, 512, Some("int8-tensor-asym@static")).unwrap();
        let input = weight.input.as_mut().unwrap();
        (input.outer, input.zero) = (Some(0.021), zero);
        for tokens in [1, 5, 40] {
            let (error, choice) = error(&weight, tokens);
            let bound = if scheme.starts_with("fp8") { 4e-3 } else { 3e-6 };
            assert!(choice.reason.is_none() && error < bound, "{scheme} {zero}, {tokens} tokens: {error}");
        }
    }
}

#[test]
fn outliers_of_the_input_are_kept() {
    let mut weight = weight(&"int8-channel".parse().unwrap(), 8, 64, Some("int8-token:restricted")).unwrap();
    weight.input.as_mut().unwrap().keep_above = Some(1.5);
    for tokens in [1, 4, 20] {
        let (error, choice) = error(&weight, tokens);
        assert!(error < 1e-6 && choice.reason.is_none(), "{tokens}: {error}");
    }
    // Floats might be rounded to bf16.
    let mut weight =
        self::weight(&"fp8-e4m3-channel".parse().unwrap(), 8, 64, Some("fp8-e4m3-token")).unwrap();
    weight.input.as_mut().unwrap().keep_above = Some(1.5);
    let (error, choice) = error(&weight, 4);
    assert!(error < 1e-6 && choice.reason.unwrap().contains("outliers"), "{error}");
}

#[test]
fn layers_of_one_call_have_the_bits_of_each_alone() {
    // Some read the same form of an input; the last two round it to floats.
    let names = [
        ("q4_k", None),
        ("q6_k", None),
        ("q4_k", None),
        ("int8-channel", Some("int8-token")),
        ("int8-channel", Some("int8-token")),
        ("fp8-e4m3-channel", None),
        ("fp8-e4m3-channel", Some("fp8-e4m3-token")),
        ("fp8-e4m3-channel", Some("fp8-e4m3-token")),
    ];
    let linear = |(name, input): (&str, _)| {
        let weight = weight(&name.parse().unwrap(), 48, 512, input).unwrap();
        PreparedLinear::new("m", weight, 1).unwrap()
    };
    let linears: Vec<_> = names.into_iter().map(linear).collect();
    let x = wave(100 * 512, 0.2);
    let all = |tokens: usize| Rows { x: &x[..tokens * 512], tokens };
    // A row of padding, no token, and enough tokens for every way to multiply.
    let inputs = [Rows { x: &x[..4 * 512], tokens: 3 }, all(0), all(100), all(1), all(17)];
    let read = [[0; 8], [0, 1, 2, 2, 3, 3, 4, 4], [4, 3, 2, 1, 0, 2, 4, 0]];
    let mut scratch = Scratch::default();
    for read in read {
        let mut outs: Vec<_> = read.iter().map(|i| vec![0.5; (inputs[*i].tokens + 1) * 48]).collect();
        let jobs = linears.iter().zip(read).zip(&mut outs);
        let jobs =
            jobs.map(|((linear, input), out)| PreparedMatmul { linear, input, out, accumulate: input == 2 });
        forward(jobs, &inputs, &mut scratch, 3).unwrap();
        for ((linear, input), out) in linears.iter().zip(read).zip(&outs) {
            let mut alone = vec![0.5; out.len()];
            let job = PreparedMatmul { linear, input: 0, out: &mut alone, accumulate: input == 2 };
            forward(std::iter::once(job), &[inputs[input]], &mut Scratch::default(), 1).unwrap();
            assert_eq!(&alone, out, "{:?} on input {input}", linear.choice());
        }
    }
}
