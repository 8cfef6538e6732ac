use super::multiply::multiply_at;
use super::*;
use crate::Isa;

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next() + next() + next()).collect()
}

/// A weight of random codes, with its dequantized values.
struct Case {
    panels: Panels,
    values: Vec<f32>,
}

fn case(format: PanelFormat, rows: usize, cols: usize) -> Case {
    let mut values = vec![0.0; rows * cols];
    let (bits, group, zero) = (format.bits, format.group, f32::from(format.zero));
    let (scales, mins) = (format.scales, format.mins);
    let (levels, factor) = (format.levels, format.factor);
    let values_of = std::sync::Mutex::new(&mut values);
    let panels = Panels::pack(format, rows, cols, 2, |r, row| {
        let draw = noise(cols + 64 + row.scales.len() * 2, r as u32 * 7919 + 1);
        for (code, x) in row.codes.iter_mut().zip(&draw[..cols]) {
            *code = ((x.to_bits() >> 3) & ((1 << bits) - 1)) as u8;
        }
        let value = |code: ScaleCode, x: f32, i: usize| match code {
            ScaleCode::Exponent => 2f32.powi((x * 3.0) as i32),
            ScaleCode::E4m3 => (1.0 + (i % 8) as f32 / 8.0) * 2f32.powi((x * 2.0) as i32),
            ScaleCode::Integer => (x * 30.0).round(),
            ScaleCode::Absent => 0.0,
            ScaleCode::Zero => (x * 30.0).round().abs(),
            _ => (x * 64.0).round() / 64.0,
        };
        for g in 0..row.scales.len() {
            row.scales[g] = value(scales, draw[cols + 64 + g], g);
            row.mins[g] = value(mins, draw[cols + g % 64], g);
        }
        for s in 0..row.scale_supers.len() {
            row.scale_supers[s] = if scales == ScaleCode::Integer { 0.125 + s as f32 / 16.0 } else { 1.0 };
            row.min_supers[s] = if mins == ScaleCode::Integer { 0.0625 + s as f32 / 32.0 } else { 1.0 };
        }
        for c in 0..cols {
            let code = row.codes[c];
            let level = levels.map_or(code, |levels| levels[usize::from(code)]);
            let scale = row.scales[c / group] * row.scale_supers[c / SUPER] * factor;
            let min = row.mins[c / group]
                * if mins == ScaleCode::Zero { -scale } else { row.min_supers[c / SUPER] };
            values_of.lock().unwrap()[r * cols + c] = scale * (f32::from(level) - zero) + min;
        }
    })
    .unwrap();
    Case { panels, values }
}

fn formats() -> Vec<PanelFormat> {
    let plain = PanelFormat {
        bits: 4,
        levels: None,
        zero: 8,
        group: 32,
        unit: 32,
        scales: ScaleCode::F16,
        mins: ScaleCode::Absent,
        factor: 1.0,
    };
    let table = Some(std::array::from_fn(|i| (i * i + 3) as u8));
    vec![
        plain.clone(),
        PanelFormat { group: 16, unit: 16, ..plain.clone() },
        PanelFormat { group: 128, unit: 32, ..plain.clone() },
        PanelFormat { group: 128, unit: 128, scales: ScaleCode::Bf16, ..plain.clone() },
        PanelFormat { zero: 0, mins: ScaleCode::F16, ..plain.clone() },
        PanelFormat { zero: 0, mins: ScaleCode::Zero, ..plain.clone() },
        PanelFormat { zero: 0, scales: ScaleCode::Integer, mins: ScaleCode::Integer, ..plain.clone() },
        PanelFormat {
            levels: table,
            zero: 128,
            group: 16,
            unit: 16,
            scales: ScaleCode::E4m3,
            factor: 0.25,
            ..plain.clone()
        },
        PanelFormat { levels: table, zero: 128, scales: ScaleCode::Exponent, ..plain.clone() },
        PanelFormat {
            bits: 2,
            zero: 1,
            group: 16,
            unit: 16,
            scales: ScaleCode::Integer,
            mins: ScaleCode::Integer,
            ..plain.clone()
        },
        PanelFormat { bits: 3, zero: 4, group: 16, unit: 16, scales: ScaleCode::Integer, ..plain.clone() },
        PanelFormat {
            bits: 3,
            levels: table,
            zero: 128,
            group: 16,
            unit: 16,
            scales: ScaleCode::Integer,
            factor: 0.125,
            ..plain.clone()
        },
        PanelFormat { bits: 5, zero: 16, ..plain.clone() },
        PanelFormat { bits: 6, zero: 32, group: 16, unit: 16, scales: ScaleCode::Integer, ..plain.clone() },
        PanelFormat { bits: 8, zero: 128, scales: ScaleCode::F32, ..plain },
    ]
}

/// Scale and code of a quantized value.
fn value(x: &Activations, t: usize, c: usize) -> (f32, i8) {
    let tile = PackedLevel::best().sizes(x.unit).tiles(x.tokens).find(|tile| tile.contains(&t)).unwrap();
    let units = x.units();
    let four = x.code(&tile, t, c / 4);
    let scale = x.scales[tile.start * units + c / x.unit * tile.len() + (t - tile.start)];
    (scale, four.to_le_bytes()[c % 4] as i8)
}

fn run(level: &PackedLevel, case: &Case, x: &Activations, threads: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.tokens() * case.panels.rows()];
    let job = PanelJob { panels: &case.panels, x, out: &mut out, accumulate: false };
    multiply_at(level, std::iter::once(job), threads);
    out
}

#[test]
fn products_are_those_of_the_dequantized_weight_at_every_level() {
    for format in formats() {
        for (rows, cols) in [(16, 32), (37, 256), (50, 512 + 32), (5, 72)] {
            let case = case(format.clone(), rows, cols);
            for tokens in [1, 3, 5, 14, 81] {
                let x = noise(tokens * cols, 5);
                let grid = Grid { group: format.unit.max(32), ..Grid::BLOCKS };
                let quantize = |level: &PackedLevel| {
                    let mut quantized = Activations::default();
                    quantized.quantize_at(level, &x, cols, grid, format.unit, 1);
                    quantized
                };
                let quantized = quantize(PackedLevel::best());
                let scalar = PackedLevel::available(Isa::Scalar).next().unwrap();
                let expected = run(&scalar, &case, &quantize(&scalar), 1);
                let mut row = vec![0.0; cols];
                let mut column = vec![0.0; rows];
                case.panels.column(cols - 3, &mut column);
                for r in 0..rows {
                    case.panels.row(r, &mut row);
                    assert_eq!(row[cols - 3].to_bits(), column[r].to_bits(), "{format:?} row {r}");
                    let expected = &case.values[r * cols..][..cols];
                    let size = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
                    assert!(
                        row.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-5 * size),
                        "{format:?}"
                    );
                }
                for t in 0..tokens {
                    for r in 0..rows {
                        let exact: f64 = (0..cols)
                            .map(|c| {
                                let (scale, code) = value(&quantized, t, c);
                                f64::from(case.values[r * cols + c]) * f64::from(scale) * f64::from(code)
                            })
                            .sum();
                        let size: f64 = (0..cols)
                            .map(|c| f64::from(case.values[r * cols + c] * x[t * cols + c]).abs())
                            .sum();
                        let got = f64::from(expected[t * rows + r]);
                        assert!((got - exact).abs() <= 1e-5 * size + 1e-6, "{format:?}: {got} for {exact}");
                    }
                }
                for level in PackedLevel::available(Isa::detect()) {
                    for threads in [1, 3] {
                        let got = run(&level, &case, &quantize(&level), threads);
                        let same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{} with {threads} threads, {tokens} tokens: {format:?}", level.name());
                    }
                }
            }
        }
    }
}

#[test]
fn a_token_does_not_depend_on_its_neighbours() {
    // Tokens read directly, expanded, and more than stay in the cache at once; chunks of 256 columns and of a row.
    for (format, tokens) in [(5, 30), (5, 100), (5, 800), (14, 100)] {
        let format = PanelFormat { group: if format == 14 { 4096 } else { 32 }, ..formats().remove(format) };
        let cols = if format.group > 32 { 4096 } else { 288 };
        let case = case(format.clone(), 20, cols);
        let x = noise(tokens * cols, 9);
        let quantize = |x: &[f32]| {
            let mut quantized = Activations::default();
            quantized.quantize(x, cols, Grid::BLOCKS, format.unit, 2);
            quantized
        };
        let all = run(PackedLevel::best(), &case, &quantize(&x), 2);
        for t in (0..tokens).step_by(tokens / 30) {
            let alone = run(PackedLevel::best(), &case, &quantize(&x[t * cols..][..cols]), 1);
            assert_eq!(alone, all[t * 20..][..20], "token {t} of {tokens}");
        }
    }
}

#[test]
fn activations_are_rounded_to_the_nearest_code_and_levels_agree() {
    let x = noise(3 * 100, 3);
    let mut quantized = Activations::default();
    quantized.quantize(&x, 100, Grid::BLOCKS, 16, 1);
    for t in 0..3 {
        for c in 0..100 {
            let (scale, code) = value(&quantized, t, c);
            let error = (f32::from(code) * scale - x[t * 100 + c]).abs();
            assert!(error <= 0.5001 * scale, "token {t}, column {c}: {error} of {scale}");
        }
        assert!((100..128).all(|c| value(&quantized, t, c).1 == 0));
    }
}

#[test]
fn values_that_are_not_finite_reach_the_output() {
    let case = case(formats().remove(0), 16, 64);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = noise(64, 1);
        x[40] = bad;
        let mut quantized = Activations::default();
        quantized.quantize(&x, 64, Grid::BLOCKS, 32, 1);
        assert!(run(PackedLevel::best(), &case, &quantized, 1).iter().all(|y| !y.is_finite()));
    }
}

#[test]
fn scales_take_the_smallest_exact_storage() {
    assert_eq!(ScaleCode::fitting(&[0.5, 4.0, 2f32.powi(-100)]), ScaleCode::Exponent);
    assert_eq!(ScaleCode::fitting(&[0.5, 0.1875, 0.0]), ScaleCode::F16);
    assert_eq!(ScaleCode::fitting(&[0.5, f32::from_bits(0x0123_0000)]), ScaleCode::Bf16);
    assert_eq!(ScaleCode::fitting(&[0.1]), ScaleCode::F32);
}

fn float_panels(code: FloatCode, rows: usize, cols: usize, group: usize) -> (FloatPanels, Vec<f32>) {
    let draw = noise(rows * cols, 11);
    let mut bytes = Vec::new();
    for x in &draw {
        match code {
            FloatCode::F32 => bytes.extend(x.to_le_bytes()),
            FloatCode::Bf16 => bytes.extend(&x.to_le_bytes()[2..]),
            FloatCode::F16 => bytes.extend(scales::f16_bits(*x).to_le_bytes()),
            FloatCode::Mini { bits, .. } => {
                bytes.push((x.to_bits() >> 5) as u8 & ((1u32 << bits) - 1) as u8 & !0x40);
            }
        }
    }
    let groups = if group >= cols { 1 } else { cols.div_ceil(group) };
    let factors: Vec<f32> = (0..rows * groups).map(|i| 1.0 + i as f32 / 64.0).collect();
    let weight = FloatPanels::new(code, (rows, cols), &bytes, group, &factors, 2).unwrap();
    let mut values = vec![0.0; rows * cols];
    values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| weight.row(row, out));
    (weight, values)
}

fn multiply_floats(weight: &FloatPanels, x: &[f32], threads: usize) -> Vec<f32> {
    let mut activations = FloatActivations::default();
    activations.arrange(x, weight, threads);
    let mut out = vec![1.0; x.len() / weight.cols() * weight.rows()];
    let job = FloatJob { weight, x: &activations, out: &mut out, accumulate: true };
    FloatPanels::multiply(std::iter::once(job), threads);
    out
}

#[test]
fn minifloats_have_their_values() {
    let e4m3 = FloatCode::Mini { bits: 8, mantissa_bits: 3, bias: 7 };
    let e3m2 = FloatCode::Mini { bits: 6, mantissa_bits: 2, bias: 3 };
    for (code, format) in [(e4m3, mantissa_num::minifloat::E4M3), (e3m2, mantissa_num::minifloat::E3M2)] {
        let count = 1usize << format.bits();
        let bytes: Vec<u8> = (0..count).map(|c| c as u8).collect();
        let weight = FloatPanels::new(code, (1, count), &bytes, usize::MAX, &[1.0], 1).unwrap();
        let mut out = vec![0.0; count];
        weight.row(0, &mut out);
        for (c, got) in out.iter().enumerate() {
            let expected = format.decode(c as u32);
            assert!(
                expected.is_nan() || got.to_bits() == expected.to_bits(),
                "{code:?} {c}: {got} for {expected}"
            );
        }
    }
}

#[test]
fn float_panels_multiply_like_their_values_and_tokens_keep_their_bits() {
    let minis = [(8, 3, 7), (8, 2, 15), (6, 2, 3)];
    let minis = minis.map(|(bits, mantissa_bits, bias)| FloatCode::Mini { bits, mantissa_bits, bias });
    for code in [FloatCode::F32, FloatCode::F16, FloatCode::Bf16].into_iter().chain(minis) {
        for (rows, cols, group) in [(7, 64, 32), (33, 100, usize::MAX), (400, 160, 64)] {
            let (weight, values) = float_panels(code, rows, cols, group);
            let x = noise(70 * cols, 2);
            let all = multiply_floats(&weight, &x, 1);
            assert_eq!(all, multiply_floats(&weight, &x, 3));
            for (i, got) in all.iter().enumerate() {
                let (t, r) = (i / rows, i % rows);
                let products =
                    || (0..cols).map(|c| f64::from(x[t * cols + c]) * f64::from(values[r * cols + c]));
                let (exact, size) = (1.0 + products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                let bound = if weight.in_bf16() { 4e-3 } else { 1e-6 };
                assert!(
                    (f64::from(*got) - exact).abs() <= bound * size + 1e-5,
                    "{code:?}: {got} for {exact}"
                );
            }
            for tokens in [1, 3, 6, 30] {
                let some = multiply_floats(&weight, &x[..tokens * cols], 2);
                assert_eq!(some, all[..tokens * rows], "{code:?}, {tokens} tokens");
            }
        }
    }
}
