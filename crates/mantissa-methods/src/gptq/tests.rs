use mantissa_kernels::{Isa, Kernels};
use mantissa_num::{Given, Rounding};

use super::*;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() + self.unit() + self.unit()).collect()
    }

    /// Inputs spanned by a few directions of different strength, like a model's, with some noise.
    fn inputs(&mut self, tokens: usize, cols: usize) -> Vec<f32> {
        let rank = cols.div_ceil(4);
        let directions = self.values(rank * cols);
        let mut x: Vec<f32> = self.values(tokens * cols).into_iter().map(|v| 0.2 * v).collect();
        for x in x.chunks_exact_mut(cols) {
            for (r, direction) in directions.chunks_exact(cols).enumerate() {
                let strength = self.unit() * 2.0 / (1 + r) as f32;
                x.iter_mut().zip(direction).for_each(|(x, d)| *x += strength * d);
            }
        }
        x
    }
}

fn hessian(x: &[f32], cols: usize) -> Hessian {
    let mut hessian = Hessian::new(cols).unwrap();
    hessian.add(x, 1);
    hessian
}

fn problem(seed: u64, rows: usize, cols: usize) -> (Vec<f32>, Hessian) {
    let mut random = Random(seed);
    let x = random.inputs(3 * cols, cols);
    (random.values(rows * cols), hessian(&x, cols))
}

fn options() -> impl Iterator<Item = GptqOptions> {
    let groups = [GroupOrder::Static, GroupOrder::Original, GroupOrder::Current];
    let all = groups.into_iter().flat_map(|groups| [false, true].map(|act_order| (groups, act_order)));
    all.map(|(groups, act_order)| GptqOptions { groups, act_order, ..GptqOptions::default() })
}

/// Every family of schemes whose blocks lie within rows of 192 columns.
const SCHEMES: [&str; 14] = [
    "int4-g32",
    "int4-g32-asym",
    "int3-channel-asym",
    "int2-g48",
    "int4-g160",
    "int8-channel",
    "int4-g32:restricted",
    "fp8-e4m3-channel",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "nvfp4:te",
    "nf4",
    "bf16",
];

/// The loop of the paper without blocks, on the whole matrix.
fn textbook(scheme: &Scheme, w: &[f32], hessian: &Hessian, act_order: bool) -> Vec<f32> {
    let k = hessian.cols();
    let options = GptqOptions { act_order, range: GroupRange::Amax, ..GptqOptions::default() };
    let InverseFactor { order, upper: u, .. } = InverseFactor::new(hessian, options, 1).unwrap();
    // Static parameters do not depend on the updates of their columns.
    let outer = scheme.outer_scale(kernels().amax(w)).filter(|_| scheme.has_outer_scale());
    let plain = mantissa_num::quantize(scheme, w, w.len() / k, k, Given::default()).unwrap();
    let group = group_columns(scheme, w.len() / k, k).unwrap();
    let mut out = w.to_vec();
    for (row, out) in out.chunks_exact_mut(k).enumerate() {
        let original = &w[row * k..][..k];
        let mut left: Vec<f64> = order.iter().map(|&column| f64::from(original[column])).collect();
        for position in 0..k {
            let column = order[position];
            let members = &original[column / group * group..(column / group * group + group).min(k)];
            let block = scheme.block(mantissa_num::blockwise::Range::of(members), false, outer);
            let decoder = plain.format.decoder(block.scale, block.zero, outer);
            let code = scheme.encode(left[position] as f32, &block, (row * k + column) as u64);
            out[column] = decoder.value(plain.format.element(code));
            let error = (left[position] - f64::from(out[column])) / u[position * k + position];
            for later in position + 1..k {
                left[later] = (-error).mul_add(u[position * k + later], left[later]);
            }
        }
    }
    out
}

#[test]
fn every_scheme_matches_the_unblocked_loop() {
    let (w, hessian) = problem(1, 5, 192);
    for text in SCHEMES {
        let scheme: Scheme = text.parse().unwrap();
        for act_order in [false, true] {
            let expected = textbook(&scheme, &w, &hessian, act_order);
            for block in [1, 50, 128, 1000] {
                let options =
                    GptqOptions { block, act_order, range: GroupRange::Amax, ..GptqOptions::default() };
                let found = gptq(&scheme, &w, &hessian, options, None, 1).unwrap().dequantize().unwrap();
                assert!(found == expected, "{text}, blocks of {block}, act-order {act_order}");
            }
        }
    }
}

#[test]
fn threads_and_levels_do_not_show() {
    let (w, hessian) = problem(2, 37, 192);
    for text in ["int4-g32", "int3-channel-asym", "nvfp4"] {
        let scheme: Scheme = text.parse().unwrap();
        for options in options() {
            let run = |isa, threads| {
                let kernels = Kernels::new(isa).unwrap();
                let factor = InverseFactor::at(kernels, &hessian, options, threads).unwrap();
                factor.quantize(&scheme, &w, None, threads).unwrap()
            };
            let expected = run(Isa::Scalar, 1);
            for isa in Isa::available() {
                for threads in [1, 2, 3] {
                    assert!(run(isa, threads) == expected, "{text} at {isa}, {threads} threads, {options:?}");
                }
            }
        }
    }
}

/// With all updates applied a group's parameters do not depend on where blocks end.
#[test]
fn current_groups_do_not_depend_on_the_block() {
    let (w, hessian) = problem(3, 4, 192);
    for text in ["int4-g48-asym", "int4-g160", "int4-channel"] {
        let scheme: Scheme = text.parse().unwrap();
        for act_order in [false, true] {
            let run = |block| {
                let options = GptqOptions {
                    block,
                    act_order,
                    groups: GroupOrder::Current,
                    damp: 0.01,
                    range: GroupRange::Amax,
                    asymmetric: 0.0,
                    first_order: 0.0,
                };
                gptq(&scheme, &w, &hessian, options, None, 1).unwrap()
            };
            let expected = run(192);
            assert!([1, 48, 100, 128].into_iter().all(|block| run(block) == expected), "{text}");
        }
    }
}

#[test]
fn the_loss_matches_the_codes_and_is_not_above_rtn() {
    let mut ratios = Vec::new();
    for seed in 0..20 {
        let (w, hessian) = problem(seed, 6, 192);
        for text in SCHEMES {
            let scheme: Scheme = text.parse().unwrap();
            let nearest = mantissa_num::quantize(&scheme, &w, 6, 192, Given::default()).unwrap();
            let baseline = hessian.loss(&w, &nearest.dequantize().unwrap());
            for options in options() {
                let result = gptq(&scheme, &w, &hessian, options, None, 1).unwrap();
                let exact = hessian.loss(&w, &result.dequantize().unwrap());
                assert!(
                    (result.loss - exact).abs() <= 1e-6 * exact,
                    "{text} {options:?}: {} {exact}",
                    result.loss
                );
                assert!(exact <= baseline, "{text} seed {seed} {options:?}: {exact} for {baseline}");
                ratios.push(exact / baseline);
            }
        }
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(mean < 0.6, "{mean} of the loss of round to nearest");
}

/// Independent inputs leave nothing to compensate, so the codes equal RTN's.
#[test]
fn a_diagonal_hessian_gives_rtn() {
    let (w, _) = problem(4, 3, 64);
    let mut sum = vec![0.0; 64 * 64];
    (0..64).for_each(|i| sum[i * 64 + i] = 1.0 + i as f32);
    let hessian = Hessian::from_sum(sum, 64, 7).unwrap();
    for text in ["int4-g32-asym", "nvfp4", "nf4"] {
        let scheme: Scheme = text.parse().unwrap();
        let expected = mantissa_num::quantize(&scheme, &w, 3, 64, Given::default()).unwrap();
        for options in options().filter(|o| !o.act_order || o.groups == GroupOrder::Static) {
            let options = GptqOptions { range: GroupRange::Amax, ..options };
            assert_eq!(gptq(&scheme, &w, &hessian, options, None, 1).unwrap().quantized, expected, "{text}");
        }
    }
}

#[test]
fn dead_columns_become_zero_and_touch_nothing_else() {
    let (rows, cols) = (4, 64);
    let mut random = Random(5);
    let (mut x, w) = (random.inputs(200, cols), random.values(rows * cols));
    let dead = [0, 17, 63];
    x.chunks_exact_mut(cols).for_each(|x| dead.iter().for_each(|&i| x[i] = 0.0));
    let with = hessian(&x, cols);
    for options in options() {
        let result = gptq(&"int4-channel".parse().unwrap(), &w, &with, options, None, 1).unwrap();
        assert_eq!((result.dead_columns, result.notes.len()), (3, 1), "{:?}", result.notes);
        let values = result.dequantize().unwrap();
        assert!(values.chunks(cols).all(|row| dead.iter().all(|&i| row[i] == 0.0)));
        // The live columns by themselves.
        let live = |m: &[f32]| -> Vec<f32> {
            let keep = |(i, v): (usize, &f32)| (!dead.contains(&(i % cols))).then_some(*v);
            m.iter().enumerate().filter_map(keep).collect()
        };
        let alone =
            gptq(&"int4-channel".parse().unwrap(), &live(&w), &hessian(&live(&x), 61), options, None, 1);
        let alone = alone.unwrap();
        assert_eq!(alone.dequantize().unwrap(), live(&values), "{options:?}");
        assert!((alone.loss - result.loss).abs() <= 1e-9 * alone.loss, "{} {}", alone.loss, result.loss);
    }
}

#[test]
fn a_singular_hessian_is_damped_more_and_says_so() {
    let cols = 48;
    let mut random = Random(6);
    let w = random.values(2 * cols);
    // Fewer tokens than columns: singular without damping.
    let few = hessian(&random.inputs(5, cols), cols);
    let scheme: Scheme = "int4-g16".parse().unwrap();
    let undamped = GptqOptions { damp: 0.0, ..GptqOptions::default() };
    let result = gptq(&scheme, &w, &few, undamped, None, 1).unwrap();
    assert!(result.damp_used > 0.0 && result.notes.len() == 1, "{:?}", result.notes);
    assert!(gptq(&scheme, &w, &few, GptqOptions::default(), None, 1).unwrap().notes.is_empty());
    // Not a Hessian at all: 3 off a diagonal of 1 needs a damping above 1.
    let mut sum = vec![3.0; cols * cols];
    (0..cols).for_each(|i| sum[i * cols + i] = 1.0);
    let indefinite = Hessian::from_sum(sum.clone(), cols, 1).unwrap();
    let error = gptq(&scheme, &w, &indefinite, GptqOptions::default(), None, 1).unwrap_err();
    assert!(matches!(error, GptqError::Singular { damp: 1.0, .. }), "{error}");
    // 1.05 off the diagonal: 0.01 is not enough, ten times as much is.
    sum.iter_mut().filter(|v| **v == 3.0).for_each(|v| *v = 1.05);
    let nearly = Hessian::from_sum(sum, cols, 1).unwrap();
    let result = gptq(&scheme, &w, &nearly, GptqOptions::default(), None, 1).unwrap();
    assert_eq!(result.damp_used, 0.1, "{:?}", result.notes);
}

#[test]
fn unsupported_requests_are_refused() {
    let (mut w, hessian) = problem(7, 2, 64);
    let run = |text: &str, w: &[f32], hessian: &Hessian, options| {
        gptq(&text.parse().unwrap(), w, hessian, options, None, 1).unwrap_err()
    };
    let usual = GptqOptions::default();
    for text in ["int8-tensor", "fp8-e4m3-t128x128", "nf4-g96"] {
        let error = run(text, &w, &hessian, usual);
        assert!(matches!(error, GptqError::Blocks { rows: 2, cols: 64, .. }), "{text}: {error}");
    }
    assert!(matches!(run("int4-g32", &w, &Hessian::new(64).unwrap(), usual), GptqError::NoTokens));
    assert!(matches!(run("int4-g32", &w[1..], &hessian, usual), GptqError::Length { found: 127, .. }));
    for bad in [f32::NAN, f32::INFINITY, -1.0] {
        let mut sum = vec![0.0; 64 * 64];
        sum[5 * 64 + 5] = bad;
        let error = run("int4-g32", &w, &Hessian::from_sum(sum, 64, 1).unwrap(), usual);
        assert!(matches!(error, GptqError::Value { column: 5, .. }), "{error}");
    }
    assert!(matches!(Hessian::from_sum(vec![0.0; 5], 2, 1), Err(GptqError::Length { expected: 4, .. })));
    for damp in [-0.1, 1.5, f64::NAN] {
        let error = run("int4-g32", &w, &hessian, GptqOptions { damp, ..usual });
        assert!(matches!(error, GptqError::Option { option: "damp", .. }), "{error}");
    }
    let error = run("int4-g32", &w, &hessian, GptqOptions { block: 0, ..usual });
    assert!(matches!(error, GptqError::Option { option: "block", .. }), "{error}");
    w[100] = f32::INFINITY;
    let error = run("int4-g32", &w, &hessian, usual);
    assert!(
        matches!(error, GptqError::Weight(TensorError::NonFinite { index: 100, count: 1, .. })),
        "{error}"
    );
}

#[test]
fn stochastic_rounding_draws_by_element() {
    let (w, hessian) = problem(8, 20, 64);
    let mut scheme: Scheme = "int4-g32".parse().unwrap();
    scheme.encoder.rounding = Rounding::Stochastic { seed: 3 };
    let run = |threads| gptq(&scheme, &w, &hessian, GptqOptions::default(), None, threads).unwrap();
    assert_eq!(run(1), run(3));
}

#[test]
fn a_scale_given_for_the_tensor_is_used() {
    let (w, hessian) = problem(9, 2, 64);
    let scheme: Scheme = "nvfp4".parse().unwrap();
    let given = gptq(&scheme, &w, &hessian, GptqOptions::default(), Some(123.0), 1).unwrap();
    assert_eq!(given.quantized.outer(), Some(123.0));
    // A format without `g_idx` refuses it.
    let scheme: Scheme = "int4-g32".parse().unwrap();
    let given = gptq(&scheme, &w, &hessian, GptqOptions::default(), Some(123.0), 1).unwrap();
    assert_eq!(given.quantized.outer(), None);
}

#[test]
fn scales_that_are_given_are_kept() {
    let (rows, cols) = (9, 192);
    let (w, hessian) = problem(31, rows, cols);
    let scheme: Scheme = "int3-g32".parse().unwrap();
    let chosen = gptq(&scheme, &w, &hessian, GptqOptions::default(), None, 1).unwrap();
    // Given scales make groups static, whatever the options.
    for options in options() {
        let factor = InverseFactor::new(&hessian, options, 1).unwrap();
        let found = factor.quantize_under(&scheme, &w, &chosen.quantized.scales.codes, 2).unwrap();
        assert!(found.g_idx.is_none() && found.quantized.scales.codes == chosen.quantized.scales.codes);
        if options.act_order {
            assert_eq!((&found.quantized, found.loss), (&chosen.quantized, chosen.loss), "{options:?}");
        }
        let short = factor.quantize_under(&scheme, &w, &Codes::U32(vec![0; 3]), 1);
        assert!(matches!(short, Err(GptqError::Length { what: "scales", .. })), "{short:?}");
    }
}

#[test]
fn empty_weights_are_quantized() {
    let hessian = hessian(&[1.0; 64], 32);
    let result = gptq(&"int4-g32".parse().unwrap(), &[], &hessian, GptqOptions::default(), None, 2).unwrap();
    assert_eq!((result.quantized.rows, result.loss, result.quantized.check()), (0, 0.0, Ok(())));
}

/// A searched range lowers the loss of weights with long tails.
#[test]
fn searched_ranges_lose_less() {
    let (rows, cols) = (16, 192);
    let w: Vec<f32> = Random(9).values(rows * cols).into_iter().map(|v| v * v * v).collect();
    let mut sum = vec![0.0; cols * cols];
    (0..cols).for_each(|i| sum[i * cols + i] = 1.0 + (i % 7) as f32);
    let hessian = Hessian::from_sum(sum, cols, 7).unwrap();
    for text in ["int4-g32", "int3-channel", "nvfp4", "mxfp4", "nf4", "int4-g32-asym"] {
        let scheme: Scheme = text.parse().unwrap();
        let [mse, amax] = GROUP_RANGES.map(|(_, range)| {
            let options = GptqOptions { range, ..GptqOptions::default() };
            gptq(&scheme, &w, &hessian, options, None, 2).unwrap().loss
        });
        assert!(mse < amax, "{text}: {mse} {amax}");
    }
}

/// Checks the number of outliers, that the loss includes them and falls with their number, and that the weights
/// furthest from all others are among them.
#[test]
fn outliers_are_stored_outside_the_codes() {
    let (rows, cols) = (24, 96);
    let (mut w, hessian) = problem(11, rows, cols);
    let far = [5usize, 100, 777, 1500];
    far.iter().for_each(|&at| w[at] = 40.0);
    for (text, counts) in [("int3-g16", &[4, 23, 115][..]), ("int3-g16-asym", &[4][..])] {
        let scheme: Scheme = text.parse().unwrap();
        let factor = InverseFactor::new(&hessian, GptqOptions::default(), 1).unwrap();
        let plain = factor.quantize(&scheme, &w, None, 1).unwrap();
        assert_eq!(plain.outliers, None);
        let mut before = plain.loss;
        for &count in counts {
            let found = factor.quantize_with_outliers(&scheme, &w, None, count, 1).unwrap();
            let Some(Extra::Sparse { index, values, starts }) = &found.outliers else {
                panic!("{text}: none")
            };
            assert_eq!((index.len(), values.len(), starts.len()), (count, count, rows + 1), "{text}");
            found.outliers.as_ref().unwrap().check(rows, cols).unwrap();
            let read = found.dequantize().unwrap();
            let loss = hessian.loss(&w, &read);
            assert!((loss / found.loss - 1.0).abs() < 1e-3, "{text} {count}: {loss} {}", found.loss);
            assert!(loss < 0.97 * before, "{text} {count}: {loss} for {before}");
            for &at in &far {
                let (row, column) = (at / cols, (at % cols) as u32);
                let of_row = &index[starts[row] as usize..starts[row + 1] as usize];
                assert!(of_row.contains(&column), "{text} {count}: {at}");
            }
            before = loss;
        }
    }
}

#[test]
fn outliers_depend_on_neither_threads_nor_level() {
    let (rows, cols) = (150, 64);
    let (w, hessian) = problem(12, rows, cols);
    let scheme: Scheme = "int3-g16".parse().unwrap();
    let mut first: Option<GptqResult> = None;
    for isa in Isa::available() {
        let kernels = Kernels::new(isa).unwrap();
        for threads in [1, 2, 5] {
            let factor = InverseFactor::at(kernels, &hessian, GptqOptions::default(), threads).unwrap();
            let found = factor.quantize_with_outliers(&scheme, &w, None, 96, threads).unwrap();
            assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{isa}, {threads} threads");
        }
    }
}

#[test]
fn outliers_need_groups_of_adjacent_columns() {
    let (w, hessian) = problem(13, 8, 64);
    let options = GptqOptions { groups: GroupOrder::Current, ..GptqOptions::default() };
    let factor = InverseFactor::new(&hessian, options, 1).unwrap();
    let error = factor.quantize_with_outliers(&"int3-g16".parse().unwrap(), &w, None, 5, 1).unwrap_err();
    assert!(error.to_string().contains("groups of adjacent columns"), "{error}");
}
