//! Speed of every kernel at every available level, compared with the limits of this machine: `cargo run --release
//! --example kernel_bench [kernel] [elements]`.
//!
//! The memory limits are measured with plain loops of the same read/write mix over buffers larger than the last
//! private cache. The arithmetic limits are measured with loops of independent fused multiply-adds and bf16 dot
//! products in registers. Every figure is the median of several runs, in processor time of the running thread if the
//! system reports it (Unix), so that other load on the machine matters less.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use mantissa_kernels::{Activation, AdamWStep, CausalAttention, Isa, Kernels, MatMut, MatRef};
use std::hint::black_box;
use std::time::Duration;

const RUNS: usize = 9;
/// Default number of elements of the streaming operands: 64 MiB of f32, more than the private caches.
const BIG: usize = 16 << 20;
const ROW: usize = 4096;

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let big = std::env::args().nth(2).map_or(BIG, |n| n.parse().expect("a number of elements"));
    let big = big.next_multiple_of(8 * ROW);
    let mut bench = Bench { filter: wanted, big, x: wave(BIG), y: wave(BIG), out: vec![0.0; BIG] };
    bench.limits();
    for isa in Isa::available() {
        let kernels = Kernels::new(isa).expect("an available level has kernels");
        println!("\n{isa}");
        bench.streaming(&kernels);
        bench.dequantize(&kernels);
        bench.quantize(&kernels);
    }
    println!("\nmatrix products, {}", Isa::detect());
    let best = Kernels::new(Isa::detect()).expect("the detected level is available");
    bench.products(&best);
    bench.half_products(&best);
}

struct Bench {
    filter: String,
    big: usize,
    x: Vec<f32>,
    y: Vec<f32>,
    out: Vec<f32>,
}

impl Bench {
    fn limits(&mut self) {
        println!("limits");
        let lanes = Kernels::new(Isa::detect()).expect("the detected level is available");
        let big = self.big;
        let (x, y, out) = (&self.x[..big], &self.y[..big], &mut self.out[..big]);
        report("memory read", 4 * big, || _ = black_box(lanes.amax(black_box(x))));
        report("memory copy", 8 * big, || out.copy_from_slice(black_box(x)));
        report("memory write", 4 * big, || black_box(&mut *out).fill(1.0));
        report("memory read two, write one (add)", 12 * big, || {
            for ((o, a), b) in out.iter_mut().zip(x.iter()).zip(y.iter()) {
                *o = a + b;
            }
        });
        for (name, peak) in [
            ("f32 FMA peak", fma_peak(seconds)),
            ("bf16 dot peak", bf16_dot_peak(seconds)),
            ("bf16 tile peak", bf16_tile_peak(seconds)),
        ] {
            if let Some(peak) = peak {
                println!("  {name:36} {:8.1} GFLOP/s", peak * 1e-9);
            }
        }
    }

    /// Bytes read plus bytes written.
    fn streaming(&mut self, k: &Kernels) {
        let (big, filter) = (self.big, &self.filter);
        let (x, y, out) = (&self.x[..big], &self.y[..big], &mut self.out[..big]);
        let weight = wave(ROW);
        // A rotation, which neither vanishes nor overflows when repeated.
        let (cos, sin) = (vec![0.8; big / ROW * 64], vec![0.6; big / ROW * 64]);
        let mut halves = vec![0_u16; big];
        let run = |name: &str, bytes_per_value: usize, f: &mut dyn FnMut()| {
            if name.contains(filter.as_str()) {
                report(name, bytes_per_value * big, f);
            }
        };
        run("dot", 8, &mut || _ = black_box(k.dot(x, y)));
        run("axpy", 12, &mut || k.axpy(0.5, x, out));
        run("sum_f64", 4, &mut || _ = black_box(k.sum_f64(x)));
        run("amax", 4, &mut || _ = black_box(k.amax(x)));
        run("min_max", 4, &mut || _ = black_box(k.min_max(x)));
        run("argmax (rows of 32768)", 4, &mut || _ = black_box(x.chunks(32_768).map(|r| k.argmax(r)).max()));
        run("log_softmax_stats (rows of 32768)", 4, &mut || {
            x.chunks(32_768).for_each(|row| _ = black_box(k.log_softmax_stats(row)));
        });
        run("rms_norm (rows of 4096)", 8, &mut || k.rms_norm(x, &weight, 1e-5, out));
        run("rope_rotate (32 heads of 128)", 8, &mut || k.rope_rotate(out, ROW / 128, 128, &cos, &sin));
        run("silu_mul", 12, &mut || k.silu_mul(x, y, out));
        // Operands that backward passes change in place.
        let (mut grad, mut other) = (wave(big), wave(big));
        run("silu_mul_backward", 24, &mut || k.silu_mul_backward(&mut grad, &mut other, out));
        let mut d_weight = vec![0.0; ROW];
        run("rms_norm_backward (rows of 4096)", 16, &mut || {
            k.rms_norm_backward(x, &weight, 1e-5, y, out, &mut d_weight);
        });
        run("softmax_backward (rows of 4096)", 16, &mut || {
            let rows = grad.chunks_mut(ROW).zip(other.chunks_mut(ROW));
            rows.for_each(|(scores, grads)| k.softmax_backward(scores, grads, 0.1, 1.0, 0.0));
        });
        run("cross_entropy_backward (rows of 4096)", 8, &mut || {
            grad.chunks_mut(ROW).for_each(|row| _ = black_box(k.cross_entropy_backward(row, 7, 1.0)));
        });
        let step = AdamWStep {
            grad_scale: 1.0,
            decay: 1.0,
            one_minus_beta1: 0.1,
            beta2: 0.999,
            one_minus_beta2: 1e-3,
            sqrt_correction2: 1.0,
            eps: 1e-8,
            step_size: 1e-3,
        };
        other.fill(0.5);
        run("adamw", 28, &mut || k.adamw(&step, out, x, &mut grad, &mut other));
        for activation in Activation::ALL {
            let name = format!("act_mul {activation}");
            run(&name, 12, &mut || k.act_mul(activation, [0.8, 0.3, 0.5, -1e-6], x, y, out));
        }
        run("exp_inplace", 8, &mut || k.exp_inplace(black_box(out)));
        run("f32_to_bf16", 6, &mut || k.f32_to_bf16(x, &mut halves));
        run("bf16_to_f32", 6, &mut || k.bf16_to_f32(&halves, out));
        run("f32_to_f16", 6, &mut || k.f32_to_f16(x, &mut halves));
        run("f16_to_f32", 6, &mut || k.f16_to_f32(&halves, out));
        run("gemv (rows of 4096)", 4, &mut || k.gemv(x, ROW, &weight, &mut out[..big / ROW], false));
        run("gevm (rows of 4096)", 4, &mut || k.gevm(&y[..big / ROW], x, ROW, &mut out[..ROW], false));
    }

    /// Bytes of codes and scales read plus 4 bytes written per value; rows of 4096, groups of 128.
    fn dequantize(&mut self, k: &Kernels) {
        const GROUP: usize = 128;
        let big = self.big;
        let codes: Vec<u8> = (0..big).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let (lut4, lut8) =
            (std::array::from_fn(|i| i as f32 - 8.0), std::array::from_fn(|i| i as f32 - 128.0));
        let (scales, zeros) = (wave(ROW / GROUP), vec![8.0; ROW / GROUP]);
        let (filter, out) = (&self.filter, &mut self.out[..big]);
        let mut run = |name: &str, code_bits: usize, f: &mut dyn FnMut(&[u8], &mut [f32])| {
            if name.contains(filter.as_str()) {
                report(name, big * (code_bits + 32 + 32 / GROUP) / 8, || {
                    let rows = codes.chunks(ROW * code_bits / 8).zip(out.chunks_mut(ROW));
                    rows.for_each(|(codes, out)| f(codes, out));
                });
            }
        };
        run("dequant_lut4", 4, &mut |codes, out| k.dequant_lut4(codes, &lut4, &scales, GROUP, out));
        run("dequant_lut8", 8, &mut |codes, out| k.dequant_lut8(codes, &lut8, &scales, GROUP, out));
        run("dequant_int4_zero", 4, &mut |codes, out| {
            k.dequant_int4_zero(codes, &zeros, &scales, GROUP, out);
        });
        run("dequant_int8_zero", 8, &mut |codes, out| {
            k.dequant_int8_zero(codes, &zeros, &scales, GROUP, out);
        });
        let mut unpacked = vec![0; ROW];
        for bits in [2, 3, 4, 6] {
            let name = format!("unpack_codes_le {bits} bits");
            if name.contains(filter.as_str()) {
                report(&name, big * (bits + 8) / 8, || {
                    for row in codes[..big * bits / 8].chunks(ROW * bits / 8) {
                        k.unpack_codes_le(row, bits as u32, black_box(&mut unpacked));
                    }
                });
            }
        }
    }

    /// 4 bytes read and 1 written per value; rows of 4096, groups of 128.
    fn quantize(&mut self, k: &Kernels) {
        const GROUP: usize = 128;
        let (big, filter, x) = (self.big, &self.filter, &self.x[..self.big]);
        let mut codes = vec![0_i8; big];
        let (mut scales, mut zeros) = (vec![0.0; ROW / GROUP], vec![0_i8; ROW / GROUP]);
        let mut run = |name: &str, f: &mut dyn FnMut(&[f32], &mut [i8])| {
            if name.contains(filter.as_str()) {
                report(name, 5 * big, || {
                    x.chunks(ROW).zip(codes.chunks_mut(ROW)).for_each(|(x, codes)| f(x, codes));
                });
            }
        };
        run("quant_int_asym", &mut |x, codes| {
            k.quant_int_asym(x, GROUP, 4, &mut scales, &mut zeros, codes).unwrap();
        });
        run("quant_int_sym", &mut |x, codes| {
            k.quant_int_sym(x, GROUP, -8, 7, 7.5, &mut scales, codes).unwrap();
        });
        let mut packed = vec![0; big];
        for bits in [4, 8] {
            let name = format!("pack_codes_le {bits} bits");
            if name.contains(filter.as_str()) {
                report(&name, big * (8 + bits) / 8, || {
                    k.pack_codes_le(&codes, 1 << (bits - 1), bits as u32, &mut packed[..big * bits / 8]);
                });
            }
        }
        codes.iter_mut().for_each(|c| *c &= 3);
        for bits in [2, 3, 6] {
            let name = format!("pack_codes_le {bits} bits");
            if name.contains(filter.as_str()) {
                report(&name, big * (8 + bits) / 8, || {
                    k.pack_codes_le(&codes, 0, bits as u32, &mut packed[..big * bits / 8]);
                });
            }
        }
    }

    fn products(&mut self, k: &Kernels) {
        let Self { filter, x, y, out, .. } = self;
        for (t, n, d) in [
            (1, 2048, 2048),
            (2, 2048, 2048),
            (3, 2048, 2048),
            (4, 2048, 2048),
            (8, 2048, 2048),
            (16, 2048, 2048),
            (64, 2048, 2048),
            (512, 2048, 2048),
            (512, 1024, 4096),
            (64, 1024, 64),
        ] {
            for (name, f) in [
                ("nt", Kernels::gemm_nt as fn(&Kernels, MatRef<'_>, MatRef<'_>, MatMut<'_>, bool)),
                ("nn", Kernels::gemm_nn),
                ("tn", Kernels::gemm_tn),
            ] {
                let label = format!("gemm_{name} {t} x {n} x {d}");
                if !label.contains(filter.as_str()) {
                    continue;
                }
                let a = if name == "tn" { MatRef::new(x, d, t) } else { MatRef::new(x, t, d) };
                let b = if name == "nt" { MatRef::new(y, n, d) } else { MatRef::new(y, d, n) };
                let ours = seconds(&mut || f(k, a, b, MatMut::new(out, t, n), false));
                let speed = (2 * t * n * d) as f64 / ours;
                let peak = fma_peak(once).unwrap_or(f64::NAN);
                println!(
                    "  {label:36} {:8.1} GFLOP/s   {:4.0} % of the f32 FMA peak",
                    speed * 1e-9,
                    100.0 * speed / peak
                );
            }
        }
        for (t, heads, kv_heads, head_dim) in
            [(1, 32, 8, 64), (512, 32, 8, 64), (2048, 32, 8, 64), (2048, 16, 4, 128)]
        {
            self.attention(k, t, heads, kv_heads, head_dim);
        }
    }

    /// The three products of a linear layer in training, (tokens, out, in), in bf16 and f16: on AMX tiles, on the
    /// AVX-512 dot product and widened, as available.
    fn half_products(&mut self, k: &Kernels) {
        let widening = k.with_bf16_dot(false).expect("every processor can widen");
        let dot = Kernels::new(Isa::Avx512).and_then(|k| k.with_bf16_dot(true));
        let paths: [(&str, Option<Kernels>, Peak); 3] = [
            ("tiles", Kernels::new(Isa::Amx), bf16_tile_peak),
            ("dot", dot, bf16_dot_peak),
            ("wide", Some(widening), bf16_dot_peak),
        ];
        for shape in [
            (512, 2048, 2048),
            (2048, 1024, 2048),
            (2048, 1024, 8192),
            (4096, 288, 288),
            (4096, 768, 288),
            (4096, 288, 768),
        ] {
            for (product, label) in ["nt", "nn", "tn"].iter().enumerate() {
                let label = format!("{label} {} x {} x {}", shape.0, shape.1, shape.2);
                let (bf16, f16) = HALF_PRODUCTS[product];
                for (path, kernels, peak) in &paths {
                    if let Some(kernels) = kernels {
                        self.half_product(
                            &format!("gemm_bf16_{label} {path}"),
                            kernels,
                            shape,
                            (bf16, *peak),
                        );
                    }
                }
                self.half_product(&format!("gemm_f16_{label}"), &widening, shape, (f16, bf16_dot_peak));
            }
        }
    }

    fn half_product(
        &mut self,
        label: &str,
        k: &Kernels,
        (t, out, inp): (usize, usize, usize),
        (f, peak): (HalfProduct, Peak),
    ) {
        if !label.contains(self.filter.as_str()) {
            return;
        }
        // 1 to 2 or -1 to -2 in bf16, with all bits of the fraction; small numbers in f16.
        let bits = |len: usize| -> Vec<u16> {
            (0..len).map(|i| 0x3f80 | (i.wrapping_mul(40_503) >> 4) as u16 & 0x807f).collect()
        };
        let ((a_rows, a_cols), (b_rows, b_cols), (m, n)) = match label.split(' ').next() {
            Some(name) if name.ends_with("nt") => ((t, inp), (out, inp), (t, out)),
            Some(name) if name.ends_with("nn") => ((t, out), (out, inp), (t, inp)),
            _ => ((t, out), (t, inp), (out, inp)),
        };
        let (a, b, c) = (bits(a_rows * a_cols), bits(b_rows * b_cols), &mut self.out[..m * n]);
        // Alternate with the peaks, because the clock of a shared machine varies; take medians of speeds and ratios.
        let mut runs: [Vec<f64>; 3] = Default::default();
        for _ in 0..RUNS {
            let (a, b) = (MatRef::new(&a, a_rows, a_cols), MatRef::new(&b, b_rows, b_cols));
            let time = once(&mut || f(k, a, b, MatMut::new(c, m, n), false));
            let speed = (2 * t * out * inp) as f64 / time;
            runs[0].push(speed * 1e-9);
            let peaks = [peak(once), fma_peak(once)];
            for (ratios, peak) in runs[1..].iter_mut().zip(peaks) {
                ratios.extend(peak.map(|peak| 100.0 * speed / peak));
            }
        }
        let [speed, own, fma] = runs.map(|runs| if runs.is_empty() { f64::NAN } else { median(runs) });
        println!(
            "  {label:36} {speed:8.1} GFLOP/s   {own:4.0} % of the bf16 peak of its kind   {fma:4.0} % of the f32 FMA peak"
        );
    }

    /// GFLOP/s, counting only visible scores: 4 operations per visible (query, key) pair and element.
    fn attention(&mut self, k: &Kernels, t: usize, heads: usize, kv_heads: usize, head_dim: usize) {
        let s = t.max(2048);
        let shape = CausalAttention { heads, kv_heads, head_dim, scale: 0.125, window: None, chunk: None };
        let label = format!("attention_causal {t} of {s}, {heads}/{kv_heads} x {head_dim}");
        if !label.contains(self.filter.as_str()) {
            return;
        }
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let mut scratch = vec![0.0; shape.scratch_len(t, s)];
        let (q, keys, values) = (&self.x[..t * q_width], &self.y[..s * kv_width], &self.x[..s * kv_width]);
        let out = &mut self.out[..t * q_width];
        let time = seconds(&mut || k.attention_causal(&shape, q, keys, values, out, &mut scratch));
        let visible = (t * (s - t) + t * (t + 1) / 2) * heads;
        println!("  {label:36} {:8.1} GFLOP/s", (4 * visible * head_dim) as f64 / time * 1e-9);
    }
}

type HalfProduct = fn(&Kernels, MatRef<'_, u16>, MatRef<'_, u16>, MatMut<'_>, bool);

/// nt, nn and tn of bf16 and of f16.
const HALF_PRODUCTS: [(HalfProduct, HalfProduct); 3] = [
    (Kernels::gemm_bf16_nt, Kernels::gemm_f16_nt),
    (Kernels::gemm_bf16_nn, Kernels::gemm_f16_nn),
    (Kernels::gemm_bf16_tn, Kernels::gemm_f16_tn),
];

/// The time of one call.
type Stopwatch = fn(&mut dyn FnMut()) -> f64;

/// Peak operations per second of the processor.
type Peak = fn(Stopwatch) -> Option<f64>;

/// Steps of a peak's loop, each with several independent instructions.
const STEPS: usize = 50_000;

/// Operations per second of fused multiply-adds in registers, 2 operations each.
fn fma_peak(seconds: Stopwatch) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        if Isa::Avx512.is_available() {
            // SAFETY: the level was just found to be available.
            let time = seconds(&mut || unsafe { fma_512(STEPS) });
            return Some((STEPS * 24 * 16 * 2) as f64 / time);
        }
        if Isa::Avx2.is_available() {
            // SAFETY: the level was just found to be available.
            let time = seconds(&mut || unsafe { fma_256(STEPS) });
            return Some((STEPS * 12 * 8 * 2) as f64 / time);
        }
    }
    None
}

/// Operations per second of `VDPBF16PS` in registers: 16 lanes of two multiplications and two additions.
fn bf16_dot_peak(seconds: Stopwatch) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the feature was just found to be available, and it implies AVX-512 F.
        let time = seconds(&mut || unsafe { bf16_dot_512(STEPS) });
        return Some((STEPS * 24 * 16 * 4) as f64 / time);
    }
    None
}

/// Operations per second of `TDPBF16PS` in registers: 16 x 16 x 32 multiplications and as many additions.
fn bf16_tile_peak(seconds: Stopwatch) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if Isa::Amx.is_available() {
        let time = seconds(&mut || bf16_tiles(STEPS));
        return Some((STEPS * 6 * 16 * 16 * 32 * 2) as f64 / time);
    }
    None
}

/// Sums six independent tiles, `steps` times. Only if the level amx is available.
#[cfg(target_arch = "x86_64")]
fn bf16_tiles(steps: usize) {
    // Palette 1; 16 rows of 64 bytes in each of eight tiles.
    let mut config = [0_u8; 64];
    config[0] = 1;
    (16..32).step_by(2).for_each(|place| config[place] = 64);
    config[48..56].fill(16);
    // SAFETY: the caller has checked that AMX is available; the configuration is only read, and the tiles, which
    // start as zeros, are used only within the block and released at its end.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{config}]",
            "2:",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "tdpbf16ps tmm4, tmm6, tmm7",
            "tdpbf16ps tmm5, tmm6, tmm7",
            "dec {steps}",
            "jnz 2b",
            "tilerelease",
            config = in(reg) config.as_ptr(),
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_dot_512(steps: usize) {
    use std::arch::x86_64::{__m512bh, __m512i, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_set1_ps};
    let halves = _mm512_set1_epi32(black_box(0x3f00_3f00));
    // SAFETY: registers of one size; all bit patterns are valid.
    let halves = unsafe { std::mem::transmute::<__m512i, __m512bh>(halves) };
    let mut sums = [_mm512_set1_ps(black_box(1.0)); 24];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, halves, halves);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_512(steps: usize) {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    let mut sums = [b; 24];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_256(steps: usize) {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps};
    let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
    let mut sums = [b; 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

fn report(name: &str, bytes: usize, mut f: impl FnMut()) {
    println!("  {name:36} {:8.1} GB/s", bytes as f64 / seconds(&mut f) * 1e-9);
}

/// Median time of one call, each run repeated until it lasts 20 ms.
fn seconds(f: &mut dyn FnMut()) -> f64 {
    f();
    median((0..RUNS).map(|_| once(f)).collect())
}

/// Time of one call, averaged over 20 ms.
fn once(f: &mut dyn FnMut()) -> f64 {
    let start = now();
    let mut calls = 0;
    while now() - start < Duration::from_millis(20) {
        f();
        calls += 1;
    }
    (now() - start).as_secs_f64() / f64::from(calls)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor time of this thread.
#[cfg(unix)]
fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("processor time is not negative")
}

/// Time since the first call.
#[cfg(not(unix))]
fn now() -> Duration {
    use std::{sync::OnceLock, time::Instant};
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

fn wave(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.618).sin()).collect()
}
