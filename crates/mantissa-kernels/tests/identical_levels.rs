//! Every kernel at every available level against the scalar level, bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::LazyLock;

use mantissa_kernels::{
    Activation, AdamDirection, AdamLength, AdamWStep, BlockwiseAdamW, CodeTable, IntGrid, Isa, Kernels,
    MatMut, MatRef, MinifloatLayout, STATE_BLOCK, Step, TrellisScratch, TrellisValues,
};
use mantissa_num::CodecId;
use mantissa_num::codebook::Book;

/// Lengths around every vector width, unroll and group boundary.
const LENGTHS: [usize; 27] = [
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257,
];
const GROUPS: [usize; 7] = [1, 3, 16, 32, 48, 64, 128];
const SPECIALS: [f32; 16] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MIN_POSITIVE,
    -1e-45,
    1e-40,
    f32::MAX,
    f32::MIN,
    65_504.0,
    65_520.0,
    -0.5,
    1.5,
    88.73,
    -103.9,
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    /// Ordinary values, any bit pattern, or special values among ordinary ones.
    fn floats(&mut self, kind: Kind, len: usize) -> Vec<f32> {
        let mut one = || match kind {
            Kind::Ordinary => self.unit() * 4.0,
            Kind::AnyBits => f32::from_bits(self.next() as u32),
            Kind::Special if self.next().is_multiple_of(4) => SPECIALS[self.next() as usize % SPECIALS.len()],
            Kind::Special => self.unit() * 100.0,
        };
        (0..len).map(|_| one()).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Ordinary,
    AnyBits,
    Special,
}

/// Bits with a canonical NaN: only its payload is unspecified.
fn bits(x: &[f32]) -> Vec<u64> {
    x.iter().map(|v| if v.is_nan() { u64::MAX } else { u64::from(v.to_bits()) }).collect()
}

fn bits64(x: f64) -> u64 {
    if x.is_nan() { u64::MAX } else { x.to_bits() }
}

/// Runs `kernel` at every level over the table of lengths and kinds, with the same random numbers at each.
fn assert_identical(name: &str, kernel: impl Fn(&Kernels, &mut Random, Kind, usize) -> Vec<u64>) {
    let scalar = Kernels::new(Isa::Scalar).unwrap();
    for isa in Isa::available() {
        let level = Kernels::new(isa).unwrap();
        for kind in [Kind::Ordinary, Kind::AnyBits, Kind::Special] {
            for len in LENGTHS {
                for seed in 0..3 {
                    let expected = kernel(&scalar, &mut Random(seed), kind, len);
                    let got = kernel(&level, &mut Random(seed), kind, len);
                    assert_eq!(got, expected, "{name} at {isa}, {kind:?}, length {len}, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn reductions() {
    assert_identical("reductions", |k, random, kind, len| {
        let (a, b) = (random.floats(kind, len), random.floats(kind, len));
        let (low, high) = k.min_max(&a);
        let mut out = bits(&[k.dot(&a, &b), k.amax(&a), low, high]);
        let stats = k.log_softmax_stats(&a);
        out.extend([bits64(k.sum_f64(&a)), bits64(stats.ln_sum)]);
        out.extend(bits(&[stats.max]));
        out.push(k.argmax(&a).map_or(u64::MAX, |i| i as u64));
        out
    });
}

/// Numbers of activations that have some.
const NUMBERS: [f32; 4] = [0.8, 0.3, 0.5, -1e-6];

#[test]
fn element_wise() {
    assert_identical("element-wise", |k, random, kind, len| {
        let (a, b) = (random.floats(kind, len), random.floats(kind, len));
        let mut all = Vec::new();
        let mut y = b.clone();
        k.axpy(a.first().copied().unwrap_or(1.0), &a, &mut y);
        all.extend(bits(&y));
        for activation in Activation::ALL {
            k.act_mul(activation, NUMBERS, &a, &b, &mut y);
            all.extend(bits(&y));
        }
        k.limited_swiglu_mul([1.702, 7.0, 1.0], &a, &b, &mut y);
        all.extend(bits(&y));
        y.copy_from_slice(&a);
        k.softcap(&mut y, 0.3, 30.0);
        all.extend(bits(&y));
        k.mul_add(&a, &b, &mut y);
        k.silu_inplace(&mut y);
        k.sigmoid_mul(&b, &mut y);
        all.extend(bits(&y));
        let (mut state, mut delta, small) =
            ([&*a, &b, &a, &b, &a].concat(), y.clone(), [0.5, -0.25, 1.5, 0.3, 2.0]);
        k.delta_rule_step(&mut state, [&small, &small, &b], 0.9, 0.4, &mut delta, &mut y);
        all.extend(bits(&y));
        k.state_space_step(&mut state, [&small, &small], &a, 0.8, &mut y);
        [&state, &y].iter().for_each(|part| all.extend(bits(part)));
        k.layer_norm(&a, &b, &b, 1e-5, &mut y);
        all.extend(bits(&y));
        y.copy_from_slice(&a);
        k.exp_inplace(&mut y);
        all.extend(bits(&y));
        for exponent in [2.4, -0.3] {
            y.iter_mut().zip(&a).for_each(|(y, a)| *y = a.abs());
            k.pow_inplace(&mut y, exponent);
            all.extend(bits(&y));
        }
        y.copy_from_slice(&a);
        k.softmax(&mut y);
        all.extend(bits(&y));
        y.copy_from_slice(&a);
        all.extend(bits(&[k.softmax_numerators(&mut y, 0.125)]));
        all.extend(bits(&y));
        all
    });
}

#[test]
fn rows() {
    assert_identical("rows", |k, random, kind, len| {
        let t = 3;
        let (x, w) = (random.floats(kind, t * len), random.floats(kind, len));
        let mut out = vec![0.0; t * len];
        k.rms_norm(&x, &w, 1e-5, &mut out);
        let mut all = bits(&out);
        let mut rotated = random.floats(kind, t * 2 * 2 * len);
        let (cos, sin) = (random.floats(kind, t * len), random.floats(kind, t * len));
        k.rope_rotate(&mut rotated, 2, 2 * len, &cos, &sin);
        all.extend(bits(&rotated));
        let n = 9;
        let b = random.floats(kind, n * (len + 1));
        let mut out = random.floats(kind, n);
        for accumulate in [true, false] {
            k.gemv(&b, len + 1, &w, &mut out, accumulate);
            all.extend(bits(&out));
        }
        let (a, mut c) = (random.floats(kind, 2 * len), random.floats(kind, 2 * n));
        k.gemm_nt_small((2, n, len), &a, len, &b, len + 1, &mut c, n, true);
        all.extend(bits(&c));
        let mut out = random.floats(kind, len);
        let x = random.floats(kind, n);
        for accumulate in [true, false] {
            k.gevm(&x, &b, len + 1, &mut out, accumulate);
            all.extend(bits(&out));
        }
        all
    });
}

#[test]
fn training() {
    assert_identical("training", |k, random, kind, len| {
        let t = 3;
        let (x, w, dy) =
            (random.floats(kind, t * len), random.floats(kind, len), random.floats(kind, t * len));
        let (mut dx, mut dw) = (random.floats(kind, t * len), random.floats(kind, len));
        k.rms_norm_backward(&x, &w, 1e-5, &dy, &mut dx, &mut dw);
        let mut all = bits(&dx);
        all.extend(bits(&dw));
        let mut rotated = random.floats(kind, t * 2 * 2 * len);
        let (cos, sin) = (random.floats(kind, t * len), random.floats(kind, t * len));
        k.rope_rotate_back(&mut rotated, 2, 2 * len, &cos, &sin);
        all.extend(bits(&rotated));
        let (mut gate, mut up, mut out) = (x.clone(), dy.clone(), random.floats(kind, t * len));
        k.silu_mul_backward(&mut gate, &mut up, &mut out);
        let (mut scores, mut grads) = (x.clone(), dy.clone());
        k.softmax_backward(&mut scores, &mut grads, 0.125, 1.5, -0.25);
        for activation in Activation::ALL {
            let (mut gate, mut up, mut out) = (x.clone(), dy.clone(), random.floats(kind, t * len));
            k.act_mul_backward(activation, NUMBERS, &mut gate, &mut up, &mut out);
            [gate, up, out].iter().for_each(|part| all.extend(bits(part)));
        }
        let (mut capped, mut of_capped) = (x.clone(), dy.clone());
        k.softmax_backward_capped(&mut capped, &mut of_capped, 0.125, 3.0, 1.5, -0.25);
        all.extend(bits(&capped));
        k.softcap_backward(&x, 0.5, 3.0, &mut of_capped);
        all.extend(bits(&of_capped));
        let (mut dx, mut dw, mut db) =
            (random.floats(kind, t * len), random.floats(kind, len), random.floats(kind, len));
        k.layer_norm_backward(&x, &w, 1e-5, &dy, &mut dx, &mut dw, &mut db);
        [dx, dw, db].iter().for_each(|part| all.extend(bits(part)));
        let mut row = x.clone();
        let (sum, max) = k.softmax_numerators_max(&mut row, 0.125);
        for part in [&gate, &up, &out, &scores, &grads, &row] {
            all.extend(bits(part));
        }
        all.extend(bits(&[sum, max]));
        all.push(bits64(k.sum_squares_f64(&x)));
        if len > 0 {
            row.copy_from_slice(&x);
            all.push(bits64(k.cross_entropy_backward(&mut row, len - 1, 0.5)));
            all.extend(bits(&row));
        }
        let step = AdamWStep {
            grad_scale: 0.9,
            decay: 0.999,
            one_minus_beta1: 0.1,
            beta2: 0.95,
            one_minus_beta2: 0.05,
            sqrt_correction2: 0.3,
            eps: 1e-8,
            step_size: 1e-3,
        };
        let (mut param, mut m, mut v) =
            (x.clone(), random.floats(kind, t * len), random.floats(kind, t * len));
        k.adamw(&step, &mut param, &dy, &mut m, &mut v);
        for part in [&param, &m, &v] {
            all.extend(bits(part));
        }
        let corrected = AdamLength::Corrected { corrections: [0.19, 0.02] };
        for (square_first, length) in
            [(false, corrected), (true, AdamLength::Damped { factor: 0.3, eps: 1e-8 })]
        {
            let (beta1, beta2) = (0.9, 0.99);
            let (one_minus_beta1, one_minus_beta2) = (0.1, 0.01);
            let rule = AdamDirection { beta1, one_minus_beta1, beta2, one_minus_beta2, square_first, length };
            let mut direction = dy.clone();
            k.adam_direction(&rule, &mut direction, &mut m, &mut v);
            for part in [&direction, &m, &v] {
                all.extend(bits(part));
            }
        }
        all
    });
}

/// AdamW with 8-bit moments in both orders of operations, and codes by table.
#[test]
fn coded_moments() {
    static MAPS: LazyLock<[CodeTable; 2]> =
        LazyLock::new(|| [Book::Dyn8, Book::Dyn8Unsigned].map(CodeTable::nearest));
    assert_identical("coded moments", |k, random, kind, len| {
        let mut all = Vec::new();
        let values = random.floats(kind, len);
        let mut codes = vec![0; len];
        k.table_codes(&MAPS[0], &values, 3.0, &mut codes);
        all.extend(codes.iter().map(|code| u64::from(*code)));
        let len = len.min(STATE_BLOCK);
        for decay_last in [false, true] {
            let step = BlockwiseAdamW {
                grad_scale: 0.9,
                decay: 0.999,
                decay_last,
                beta1: 0.9,
                one_minus_beta1: 0.1,
                beta2: 0.95,
                one_minus_beta2: 0.05,
                sqrt_correction2: 0.3,
                eps: 1e-8,
                step_size: 1e-3,
                maps: [&MAPS[0], &MAPS[1]],
                zeros: [127, 0],
            };
            let (mut param, grad) = (random.floats(kind, len), random.floats(kind, len));
            let (mut m, mut v) = (random.bytes(len), random.bytes(len));
            let (mut m_max, mut v_max) = (random.unit().abs(), random.unit().abs());
            k.adamw_blockwise(&step, &mut param, &grad, [&mut m, &mut v], [&mut m_max, &mut v_max]);
            all.extend(bits(&param));
            all.extend(bits(&[m_max, v_max]));
            all.extend(m.iter().chain(&v).map(|code| u64::from(*code)));
        }
        all
    });
}

/// Any bits, including subnormals; the bf16 path that may flush them is exempt.
#[test]
fn half_products() {
    assert_identical("half products", |k, random, _, len| {
        let k = k.with_bf16_dot(false).unwrap();
        let (m, n) = (7, 19);
        let mut halves = |count: usize| (0..count).map(|_| random.next() as u16).collect::<Vec<_>>();
        let (a, b) = (halves(m * len), halves(n * len));
        let mut all = Vec::new();
        for product in [Kernels::gemm_bf16_nt, Kernels::gemm_f16_nt] {
            let mut c = vec![0.5; m * n];
            product(&k, MatRef::new(&a, m, len), MatRef::new(&b, n, len), MatMut::new(&mut c, m, n), true);
            all.extend(bits(&c));
        }
        all
    });
}

#[test]
fn factorization_and_statistics() {
    assert_identical("block updates", |k, random, kind, len| {
        let doubles = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
        let (m, depth) = (5, 7);
        let (a, b) = (doubles(random.floats(kind, m * depth)), doubles(random.floats(kind, depth * len)));
        let mut c = doubles(random.floats(kind, m * len));
        k.gemm_sub_f64((m, len, depth), &a, depth, &b, len, &mut c, len);
        let mut all: Vec<u64> = c.iter().map(|&c| bits64(c)).collect();
        let mut y = c[..len].to_vec();
        k.sub_axpy_f64(a[0], &b[..len], &mut y);
        all.extend(y.iter().map(|&y| bits64(y)));
        let (tokens, width) = (len, 9);
        let (x, mut h) = (random.floats(kind, tokens * width), vec![0.0; width * width]);
        k.accumulate_xtx(MatRef::new(&x, tokens, width), 0..width, &mut h, 1);
        all.extend(bits(&h));
        all
    });
}

#[test]
fn converters() {
    assert_identical("converters", |k, random, kind, len| {
        let x = random.floats(kind, len);
        let (mut halves, mut bytes, mut wide) = (vec![0_u16; len], vec![0_u8; 2 * len], vec![0.0; len]);
        let mut all: Vec<u64> = Vec::new();
        // NaN payloads are specified here, so the raw bits are compared.
        for (narrow, widen) in [
            (
                Kernels::f32_to_bf16 as fn(&Kernels, &[f32], &mut [u16]),
                Kernels::bf16_to_f32 as fn(&Kernels, &[u16], &mut [f32]),
            ),
            (Kernels::f32_to_f16, Kernels::f16_to_f32),
        ] {
            narrow(k, &x, &mut halves);
            widen(k, &halves, &mut wide);
            all.extend(halves.iter().map(|&h| u64::from(h)));
            all.extend(wide.iter().map(|v| u64::from(v.to_bits())));
        }
        for (narrow, widen) in [
            (
                Kernels::f32_to_bf16_le as fn(&Kernels, &[f32], &mut [u8]),
                Kernels::bf16_le_to_f32 as fn(&Kernels, &[u8], &mut [f32]),
            ),
            (Kernels::f32_to_f16_le, Kernels::f16_le_to_f32),
        ] {
            narrow(k, &x, &mut bytes);
            widen(k, &bytes, &mut wide);
            all.extend(bytes.iter().map(|&b| u64::from(b)));
            all.extend(wide.iter().map(|v| u64::from(v.to_bits())));
        }
        all
    });
}

#[test]
fn dequantizers() {
    assert_identical("dequantizers", |k, random, kind, len| {
        let mut all = Vec::new();
        let (codes, nibbles) = (random.bytes(len), random.bytes(len.div_ceil(2)));
        let lut16: [f32; 16] = random.floats(kind, 16).try_into().unwrap();
        let lut256: [f32; 256] = random.floats(kind, 256).try_into().unwrap();
        let mut out = vec![0.0; len];
        for group in GROUPS {
            let groups = len.div_ceil(group);
            let (scales, zeros) = (random.floats(kind, groups), random.floats(kind, groups));
            k.dequant_lut4(&nibbles, &lut16, &scales, group, &mut out);
            all.extend(bits(&out));
            k.dequant_lut8(&codes, &lut256, &scales, group, &mut out);
            all.extend(bits(&out));
            k.dequant_int4_zero(&nibbles, &zeros, &scales, group, &mut out);
            all.extend(bits(&out));
            k.dequant_int8_zero(&codes, &zeros, &scales, group, &mut out);
            all.extend(bits(&out));
        }
        all
    });
}

#[test]
fn quantizers() {
    assert_identical("quantizers", |k, random, kind, len| {
        let x = random.floats(kind, len);
        let mut all = Vec::new();
        let mut codes = vec![0; len];
        for group in GROUPS {
            let groups = len.div_ceil(group);
            let (mut scales, mut zeros) = (vec![0.0; groups], vec![0; groups]);
            for bits_ in [2, 3, 4, 5, 6, 8] {
                let qmin = (-(1_i32 << (bits_ - 1))) as i8;
                let qmax = ((1_i32 << (bits_ - 1)) - 1) as i8;
                // A refused group keeps its previous content.
                codes.fill(0);
                let result = k.quant_int_sym(
                    &x,
                    group,
                    qmin,
                    qmax,
                    ((1 << bits_) - 1) as f32 / 2.0,
                    &mut scales,
                    &mut codes,
                );
                all.push(result.err().map_or(u64::MAX, |e| e.index as u64));
                all.extend(bits(&scales));
                all.extend(codes.iter().map(|&c| c as u64));
                let mut packed = vec![0; (len * bits_ as usize).div_ceil(8) + 1];
                k.pack_codes_le(&codes, 1_u8 << (bits_ - 1), bits_, &mut packed);
                let mut back = vec![0_u8; len];
                k.unpack_codes_le(&packed, bits_, &mut back);
                all.extend(packed.iter().chain(&back).map(|&b| u64::from(b)));
                let result = k.quant_int_asym(&x, group, bits_, &mut scales, &mut zeros, &mut codes);
                all.push(result.err().map_or(u64::MAX, |e| e.index as u64));
                all.extend(bits(&scales));
                all.extend(zeros.iter().chain(&codes).map(|&c| c as u64));
                if result.is_ok() {
                    k.int_codes_sym(&x, group, qmin, qmax, &scales, &mut codes);
                    all.extend(codes.iter().map(|&c| c as u64));
                }
            }
        }
        all
    });
}

#[test]
fn element_codes() {
    // Saturating E4M3, E2M1 and a format without a negative zero.
    let layouts = [(3, 7, 7, 0x7e, true), (1, 1, 3, 7, true), (2, 16, 7, 0x7f, false)].map(
        |(mantissa_bits, bias, sign_bit, max_code, signed_zero)| MinifloatLayout {
            mantissa_bits,
            bias,
            sign_bit,
            max_code,
            signed_zero,
        },
    );
    let midpoints = std::array::from_fn(|i| (i as f32 - 7.0) / 8.0);
    let orders = [std::array::from_fn(|i| i as u8), std::array::from_fn(|i| 15 - i as u8)];
    assert_identical("element codes", |k, random, kind, len| {
        let x = random.floats(kind, len);
        let mut all = Vec::new();
        let mut codes = vec![0; len];
        for group in GROUPS {
            let groups = len.div_ceil(group);
            let steps: Vec<Step> = (0..groups)
                .map(|g| (g % 2 == 0, random.unit().abs() + 1e-3))
                .map(|(divide, s)| if divide { Step::Divide(s) } else { Step::Multiply(s) })
                .collect();
            let zeros: Vec<f32> = (0..groups).map(|g| (g % 16) as f32 - 8.0).collect();
            let (mut low, mut high) = (vec![0.0; groups], vec![0.0; groups]);
            k.group_min_max(&x, group, &mut low, &mut high);
            all.extend(bits(&low).into_iter().chain(bits(&high)));
            k.group_amax(&x, group, &mut high);
            all.extend(bits(&high));
            for layout in &layouts {
                k.minifloat_codes(&x, group, &steps, layout, &mut codes);
                all.extend(codes.iter().map(|&c| u64::from(c)));
            }
            for order in &orders {
                k.book_codes(&x, group, &steps, &midpoints, order, &mut codes);
                all.extend(codes.iter().map(|&c| u64::from(c)));
            }
            for zero_after_rounding in [false, true] {
                let grid = IntGrid { low: -8, high: 7, zero_after_rounding };
                k.int_codes(&x, group, &steps, &zeros, grid, &mut codes);
                let defined = x.iter().zip(&codes).map(|(x, &c)| if x.is_nan() { 0 } else { u64::from(c) });
                all.extend(defined);
            }
            let (scales, mut values) = (vec![0.5; groups], vec![0.0; len]);
            k.dequant_i8_zero(&codes, &zeros, &scales, group, &mut values);
            all.extend(x.iter().zip(bits(&values)).map(|(x, v)| if x.is_nan() { 0 } else { v }));
        }
        all
    });
}

#[test]
fn error_sums() {
    assert_identical("error sums", |k, random, kind, len| {
        let (x, y) = (random.floats(kind, len), random.floats(kind, len));
        let sums = k.error_sums(&x, &y);
        let mut all = vec![bits64(sums.squared_error), bits64(sums.squared_value)];
        all.extend(bits(&[sums.max_error]));
        all
    });
}

/// Tests random blocks, whose scales may be infinite or NaN, at a length not divisible by a power of two.
#[test]
fn error_sums_of_blocks_match_their_values() {
    let mut random = Random(19);
    for id in CodecId::ALL {
        let codec = id.codec();
        let blocks = random.bytes(37 * codec.bytes);
        let x: Vec<f32> = (0..37 * codec.elements).map(|_| random.unit()).collect();
        let mut values = vec![0.0; x.len()];
        codec.decode(&blocks, &mut values);
        for isa in Isa::available() {
            let kernels = Kernels::new(isa).unwrap();
            let (found, expected) =
                (kernels.block_error_sums(id, &blocks, &x), kernels.error_sums(&x, &values));
            let all = |sums: mantissa_kernels::ErrorSums| {
                [bits64(sums.squared_error), bits64(sums.squared_value), u64::from(sums.max_error.to_bits())]
            };
            assert_eq!(all(found), all(expected), "{} at {isa}", codec.name);
        }
    }
}

/// Compares with the codec itself, which is not compiled for a level: finite values of all magnitudes, a row of
/// zeros, blocks with opposite extremes.
#[test]
fn blocks_of_formulas() {
    let mut random = Random(7);
    let scales = [1e-45, 3e-39, 1e-7, 0.02, 1.0, 6e4, 1e30];
    let mut x: Vec<f32> =
        scales.iter().flat_map(|s| (0..8 * 256).map(|_| random.unit() * s).collect::<Vec<_>>()).collect();
    x[..256].fill(0.0);
    x.chunks_exact_mut(64).for_each(|part| (part[5], part[40]) = (-2.0 * part[9], 2.0 * part[9]));
    for id in [CodecId::Q8_0, CodecId::Q8_1, CodecId::Q4_0, CodecId::Q4_1, CodecId::Q5_0, CodecId::Q5_1] {
        let codec = id.codec();
        let mut expected = vec![0; x.len() / codec.elements * codec.bytes];
        codec.encode(&x, None, &mut expected);
        for isa in Isa::available() {
            let mut blocks = vec![0; expected.len()];
            Kernels::new(isa).unwrap().encode_blocks(id, &x, None, &mut blocks);
            assert!(blocks == expected, "{} at {isa}", codec.name);
        }
    }
}

/// Compares every codec, most of which search, with and without importance, with the codec itself, which is not
/// compiled for a level: ordinary values, tiny and large ones, a block of zeros, one value that dominates its block,
/// ties.
#[test]
fn blocks_of_searches() {
    let mut random = Random(11);
    let mut x: Vec<f32> = [1e-6, 0.02, 1.0, 300.0]
        .iter()
        .flat_map(|s| (0..512).map(|_| random.unit() * s).collect::<Vec<_>>())
        .collect();
    x[..256].fill(0.0);
    x[700] = 5.0;
    x[1024..1056].iter_mut().enumerate().for_each(|(i, x)| *x = (i % 5) as f32 * 0.25 - 0.5);
    let weights: Vec<f32> = (0..512).map(|i| if i % 31 == 0 { 0.0 } else { random.unit().abs() }).collect();
    for id in CodecId::ALL {
        let codec = id.codec();
        for importance in [None, Some(&weights[..])] {
            let mut expected = vec![0; x.len() / codec.elements * codec.bytes];
            codec.encode(&x, importance, &mut expected);
            for isa in Isa::available() {
                let mut blocks = vec![0; expected.len()];
                Kernels::new(isa).unwrap().encode_blocks(id, &x, importance, &mut blocks);
                let weighed = importance.is_some();
                assert!(blocks == expected, "{} at {isa}, with importance: {weighed}", codec.name);
            }
        }
    }
}

#[test]
fn decoders_of_blocks_give_the_reference_at_every_level() {
    let mut random = Random(11);
    for id in CodecId::ALL {
        let codec = id.codec();
        let blocks = random.bytes(33 * codec.bytes);
        let mut expected = vec![0.0; 33 * codec.elements];
        let (single, out) = (blocks.chunks_exact(codec.bytes), expected.chunks_exact_mut(codec.elements));
        single.zip(out).for_each(|(block, out)| codec.decode_block(block, out));
        for isa in Isa::available() {
            let mut found = vec![1.0; expected.len()];
            Kernels::new(isa).unwrap().decode_blocks(id, &blocks, &mut found);
            let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{} at {isa}", codec.name);
        }
    }
}

#[test]
fn trellis_rings() {
    let table: Vec<f32> = {
        let f16 = mantissa_num::minifloat::F16;
        let book = mantissa_num::trellis::TrellisBook::Mcg.table();
        book.into_iter().map(|v| f16.decode(v.into())).collect()
    };
    let scalar = Kernels::new(Isa::Scalar).unwrap();
    for bits in 1..=8 {
        let values = TrellisValues::new(bits, &table).unwrap();
        let mut scratch = TrellisScratch::new(&values, 48);
        let mut random = Random(u64::from(bits));
        for kind in [Kind::Ordinary, Kind::Special] {
            let targets = random.floats(kind, 48);
            let mut states = |k: &Kernels| {
                let mut states = vec![0; targets.len()];
                k.trellis_ring(&values, &targets, &mut scratch, &mut states);
                states
            };
            let expected = states(&scalar);
            for isa in Isa::available() {
                assert_eq!(states(&Kernels::new(isa).unwrap()), expected, "{bits} bits at {isa}, {kind:?}");
            }
        }
    }
}

#[test]
fn every_available_level_has_a_table_and_no_other() {
    for isa in Isa::ALL {
        assert_eq!(Kernels::new(isa).map(|k| k.isa()), isa.is_available().then_some(isa));
    }
}
