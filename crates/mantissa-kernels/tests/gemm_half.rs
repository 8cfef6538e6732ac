//! Products of bf16 and f16 operands against their definition, at every available level and on both bf16 paths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::{bf16, f16};
use mantissa_kernels::{Isa, Kernels, MatMut, MatRef};

/// Length of a block of k, as documented for `gemm_bf16_nt`.
const DEPTH: usize = 512;

/// Around every vector, tile and block boundary.
const SIZES: [usize; 8] = [1, 7, 15, 16, 17, 33, 64, 257];

type Product = fn(&Kernels, MatRef<'_, u16>, MatRef<'_, u16>, MatMut<'_>, bool);

/// A half type with its products.
struct Half {
    name: &'static str,
    products: [(&'static str, Product); 3],
    narrow: fn(f32) -> u16,
    widen: fn(u16) -> f32,
}

const BF16: Half = Half {
    name: "bf16",
    products: [("nt", Kernels::gemm_bf16_nt), ("nn", Kernels::gemm_bf16_nn), ("tn", Kernels::gemm_bf16_tn)],
    narrow: |x| bf16::from_f32(x).to_bits(),
    widen: |h| bf16::from_bits(h).to_f32(),
};

const F16: Half = Half {
    name: "f16",
    products: [("nt", Kernels::gemm_f16_nt), ("nn", Kernels::gemm_f16_nn), ("tn", Kernels::gemm_f16_tn)],
    narrow: |x| f16::from_f32(x).to_bits(),
    widen: |h| f16::from_bits(h).to_f32(),
};

/// Every level, and avx512 and amx with both bf16 paths if available.
fn paths() -> Vec<Kernels> {
    let levels = Isa::available().map(|isa| Kernels::new(isa).unwrap());
    levels.flat_map(|k| [false, true].map(|dot| k.with_bf16_dot(dot))).flatten().collect()
}

fn path(k: &Kernels) -> String {
    format!("{}{}", k.isa(), if k.bf16_dot() { " dot" } else { "" })
}

/// The elements of A[m, k], B[k, n] and C[m, n] of one product.
struct Operands {
    shape: (usize, usize, usize),
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Operands {
    /// Elements that `half` holds exactly, of mixed sign and magnitude.
    fn wave(half: &Half, (m, n, k): (usize, usize, usize)) -> Self {
        let value = |i: usize| (i as f32 * 0.37).sin() * (1 + i % 7) as f32;
        let exact = |i| (half.widen)((half.narrow)(value(i)));
        Self {
            shape: (m, n, k),
            a: (0..m * k).map(exact).collect(),
            b: (0..k * n).map(|i| exact(i + 5)).collect(),
            c: (0..m * n).map(|i| value(i + 3)).collect(),
        }
    }

    /// (A B, |A| |B|) in f64.
    fn exact(&self) -> Vec<(f64, f64)> {
        let (m, n, k) = self.shape;
        let mut sums = vec![(0.0, 0.0); m * n];
        for (i, p) in (0..m * k).map(|e| (e / k, e % k)) {
            let a = f64::from(self.a[i * k + p]);
            for (sum, &b) in sums[i * n..][..n].iter_mut().zip(&self.b[p * n..][..n]) {
                let product = a * f64::from(b);
                *sum = (sum.0 + product, sum.1 + product.abs());
            }
        }
        sums
    }

    /// The product `which` (nt, nn, tn) with padded rows; asserts that the padding of C is left alone.
    fn run(&self, half: &Half, which: usize, k: &Kernels, accumulate: bool) -> Vec<f32> {
        let (m, n, depth) = self.shape;
        let store = |x: &[f32], rows: usize, cols: usize, transposed: bool| {
            let (rows, cols, stride) =
                if transposed { (cols, rows, rows + 3) } else { (rows, cols, cols + 3) };
            let mut bits = vec![0x7fc1; rows * stride];
            for (r, c) in (0..rows * cols).map(|e| (e / cols, e % cols)) {
                bits[r * stride + c] =
                    (half.narrow)(if transposed { x[c * rows + r] } else { x[r * cols + c] });
            }
            (bits, rows, cols, stride)
        };
        let a = store(&self.a, m, depth, which == 2);
        let b = store(&self.b, depth, n, which == 0);
        let stride = n + 2;
        let mut c = vec![0.25; m * stride];
        for r in 0..m {
            c[r * stride..][..n].copy_from_slice(&self.c[r * n..][..n]);
        }
        (half.products[which].1)(
            k,
            MatRef::with_stride(&a.0, a.1, a.2, a.3),
            MatRef::with_stride(&b.0, b.1, b.2, b.3),
            MatMut::with_stride(&mut c, m, n, stride),
            accumulate,
        );
        assert!((0..m).all(|r| c[r * stride + n..][..2] == [0.25; 2]), "padding is untouched");
        (0..m).flat_map(|r| c[r * stride..][..n].to_vec()).collect()
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// All three products within the documented error of the definition, with the same result for any storage.
fn check_definition(half: &Half, shape: (usize, usize, usize)) {
    let operands = Operands::wave(half, shape);
    let exact = operands.exact();
    let k = shape.2;
    let roundings = (k.min(DEPTH) + k.div_ceil(DEPTH)) as f64 * 1.001 / 16_777_216.0;
    for kernels in paths() {
        // Here a fused multiply-add is a function call; the large shapes are left to the other levels.
        if kernels.isa() == Isa::Scalar && shape.0 * shape.1 * shape.2 > 300_000 {
            continue;
        }
        for accumulate in [false, true] {
            let first = operands.run(half, 0, &kernels, accumulate);
            for which in 0..3 {
                let label = format!(
                    "gemm_{}_{} {shape:?} at {}, accumulate {accumulate}",
                    half.name,
                    half.products[which].0,
                    path(&kernels)
                );
                if which > 0 {
                    let got = operands.run(half, which, &kernels, accumulate);
                    assert_eq!(bits(&got), bits(&first), "{label} is not nt");
                    continue;
                }
                for ((got, exact), c) in first.iter().zip(&exact).zip(&operands.c) {
                    let c = if accumulate { f64::from(*c) } else { 0.0 };
                    let error = (f64::from(*got) - (exact.0 + c)).abs();
                    assert!(error <= roundings * (exact.1 + c.abs()), "{label}: {got} for {}", exact.0 + c);
                }
            }
        }
    }
}

/// All shapes of [`SIZES`] except those that are large in two dimensions.
fn check_sizes(half: &Half) {
    for (m, n) in SIZES.iter().flat_map(|&m| SIZES.map(|n| (m, n))) {
        let shapes = SIZES.iter().map(|&k| (m, n, k));
        let large = |&(m, n, k): &(usize, usize, usize)| [m, n, k].iter().filter(|&&size| size > 64).count();
        shapes.filter(|shape| large(shape) < 2).for_each(|shape| check_definition(half, shape));
    }
}

#[test]
fn bf16_products_match_the_definition() {
    check_sizes(&BF16);
}

#[test]
fn f16_products_match_the_definition() {
    check_sizes(&F16);
}

#[test]
fn blocks_of_all_three_dimensions_meet() {
    for half in [BF16, F16] {
        for shape in [(193, 769, 513), (200, 50, 1024), (5, 1600, 3), (400, 3, 1500), (2, 2, 1025)] {
            check_definition(&half, shape);
        }
    }
}

/// Without subnormals, widening gives the same bits at every level, and so do the tiles of level amx.
#[test]
fn levels_agree_bit_for_bit() {
    for half in [BF16, F16] {
        let operands = Operands::wave(&half, (37, 131, 1101));
        let scalar = Kernels::new(Isa::Scalar).unwrap();
        let expected = bits(&operands.run(&half, 0, &scalar, true));
        for kernels in paths() {
            if half.name == "bf16" && kernels.bf16_dot() && kernels.isa() != Isa::Amx {
                continue;
            }
            let got = bits(&operands.run(&half, 0, &kernels, true));
            assert!(got == expected, "{} at {}", half.name, path(&kernels));
        }
    }
}

/// Bits of every element: starting at its old value, `add(sum, products)` for each `block` elements of k.
fn in_order(operands: &Operands, block: usize, add: impl Fn(f32, &[(f32, f32)]) -> f32) -> Vec<u32> {
    let (m, n, k) = operands.shape;
    let element = |(i, j): (usize, usize)| {
        let products: Vec<_> = (0..k).map(|p| (operands.a[i * k + p], operands.b[p * n + j])).collect();
        products.chunks(block).fold(operands.c[i * n + j], &add).to_bits()
    };
    (0..m * n).map(|e| element((e / n, e % n))).collect()
}

/// Orders in which bf16 products are added, as documented for `gemm_bf16_nt`. For each 32 elements of k: two chains
/// that start at 0, of the even and of the odd elements, then their sum, then C. On the dot product of AVX-512: for
/// each 512 elements one chain, with the odd element of each pair first.
#[test]
fn bf16_is_added_in_the_documented_order() {
    let operands = Operands::wave(&BF16, (37, 41, 1101));
    let pairs = in_order(&operands, 32, |sum, products| {
        let mut chains = [0.0_f32; 2];
        for (p, &(a, b)) in products.iter().enumerate() {
            chains[p % 2] = a.mul_add(b, chains[p % 2]);
        }
        sum + (chains[0] + chains[1])
    });
    let one = in_order(&operands, DEPTH, |sum, products| {
        let odd_first = products.chunks(2).flat_map(|pair| pair.iter().rev());
        sum + odd_first.fold(0.0_f32, |chain, &(a, b)| a.mul_add(b, chain))
    });
    for kernels in paths() {
        let dot = kernels.bf16_dot() && kernels.isa() == Isa::Avx512;
        if dot && !is_intel() {
            eprintln!("not compared: the dot product of another vendor, which may round less");
            continue;
        }
        let got = bits(&operands.run(&BF16, 0, &kernels, true));
        assert!(got == if dot { &one } else { &pairs }[..], "{}", path(&kernels));
    }
}

fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has leaf 0.
        #[allow(unused_unsafe)]
        let id = unsafe { std::arch::x86_64::__cpuid(0) };
        id.ebx.to_le_bytes() == *b"Genu"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Splitting rows, columns, or k at whole blocks must not affect the result.
#[test]
fn splits_change_no_bit() {
    let (m, n, k) = (203, 810, 2 * DEPTH + 101);
    for half in [BF16, F16] {
        let operands = Operands::wave(&half, (m, n, k));
        let narrow = |x: &[f32]| x.iter().map(|&x| (half.narrow)(x)).collect::<Vec<_>>();
        let (a, b) = (narrow(&operands.a), narrow(&operands.b));
        let product = half.products[1].1;
        for kernels in paths().into_iter().filter(|k| k.isa() != Isa::Scalar) {
            let run = |rows: usize, cols: usize, depth: usize| {
                let mut c = vec![f32::NAN; m * n];
                for i in (0..m).step_by(rows) {
                    for j in (0..n).step_by(cols) {
                        for p in (0..k).step_by(depth) {
                            let (rows, cols) = (rows.min(m - i), cols.min(n - j));
                            let depth = depth.min(k - p);
                            let a = MatRef::with_stride(&a[i * k + p..], rows, depth, k);
                            let b = MatRef::with_stride(&b[p * n + j..], depth, cols, n);
                            product(
                                &kernels,
                                a,
                                b,
                                MatMut::with_stride(&mut c[i * n + j..], rows, cols, n),
                                p > 0,
                            );
                        }
                    }
                }
                bits(&c)
            };
            let whole = run(m, n, k);
            for (rows, cols, depth) in
                [(1, n, k), (m, 1, k), (m, n, DEPTH), (50, 97, k), (101, 33, 2 * DEPTH)]
            {
                let label = format!("{rows} x {cols} x {depth} at {}", path(&kernels));
                assert!(run(rows, cols, depth) == whole, "{} {label}", half.name);
            }
        }
    }
}

#[test]
fn small_integers_are_exact() {
    for half in [BF16, F16] {
        for shape in [(1, 1, 1), (9, 50, 33), (17, 49, 257), (3, 5, 1001)] {
            let mut operands = Operands::wave(&half, shape);
            let integer = |(i, x): (usize, &mut f32)| *x = (i * 7 % 31) as f32 - 15.0;
            operands.a.iter_mut().enumerate().for_each(integer);
            operands.b.iter_mut().enumerate().for_each(integer);
            operands.c.iter_mut().enumerate().for_each(integer);
            let exact = operands.exact();
            for kernels in paths() {
                for which in 0..3 {
                    let got = operands.run(&half, which, &kernels, true);
                    for ((got, exact), c) in got.iter().zip(&exact).zip(&operands.c) {
                        assert_eq!(
                            f64::from(*got),
                            exact.0 + f64::from(*c),
                            "{shape:?} at {}",
                            path(&kernels)
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_their_rows_and_columns_and_no_other() {
    let (m, n, k) = (10, 53, 35);
    for half in [BF16, F16] {
        for kernels in paths() {
            for which in 0..3 {
                let mut operands = Operands::wave(&half, (m, n, k));
                operands.a[2 * k + 34] = f32::NAN;
                operands.a[5 * k + 3] = f32::INFINITY;
                operands.b[7 * n + 50] = f32::NEG_INFINITY;
                // Infinity times 0 is NaN; elsewhere B's row 3 is not 0.
                (0..n).for_each(|j| operands.b[3 * n + j] = if j % 2 == 0 { 1.0 } else { 0.0 });
                (0..m).for_each(|i| operands.a[i * k + 7] = 2.0);
                let c = operands.run(&half, which, &kernels, false);
                for (i, j) in (0..m * n).map(|e| (e / n, e % n)) {
                    let got = c[i * n + j];
                    let right = match (i, j) {
                        (2, _) => got.is_nan(),
                        // Infinities of both signs.
                        (5, 50) => got.is_nan(),
                        (5, _) if j % 2 == 0 => got == f32::INFINITY,
                        (5, _) => got.is_nan(),
                        (_, 50) => got == f32::NEG_INFINITY,
                        _ => got.is_finite(),
                    };
                    assert!(right, "{} {which} at {}: ({i}, {j}) is {got}", half.name, path(&kernels));
                }
            }
        }
    }
}

/// f16's subnormals are normal f32; bf16's are f32 subnormals, which the dot product may flush.
#[test]
fn subnormals_count_or_are_flushed_as_documented() {
    for kernels in paths() {
        let run = |product: Product, a: u16, b: u16| {
            let mut c = [0.0];
            product(
                &kernels,
                MatRef::new(&[a], 1, 1),
                MatRef::new(&[b], 1, 1),
                MatMut::new(&mut c, 1, 1),
                false,
            );
            c[0]
        };
        assert_eq!(run(Kernels::gemm_f16_nt, 1, 1), 2_f32.powi(-48), "{}", path(&kernels));
        // 2^-133, the least bf16, times 2^127.
        let got = run(Kernels::gemm_bf16_nt, 1, 0x7f00);
        assert_eq!(got, if kernels.bf16_dot() { 0.0 } else { 2_f32.powi(-6) }, "{}", path(&kernels));
    }
}

#[test]
fn empty_products() {
    let bits = [0x3f80; 12];
    for half in [BF16, F16] {
        for kernels in paths() {
            for (which, (_, product)) in half.products.iter().enumerate() {
                for (m, n, k) in [(0, 3, 4), (3, 0, 4), (2, 3, 0), (0, 0, 0)] {
                    for accumulate in [false, true] {
                        let a = if which == 2 { (k, m) } else { (m, k) };
                        let b = if which == 0 { (n, k) } else { (k, n) };
                        let mut c = [0.5; 12];
                        let (a, b) = (MatRef::new(&bits, a.0, a.1), MatRef::new(&bits, b.0, b.1));
                        product(&kernels, a, b, MatMut::new(&mut c, m, n), accumulate);
                        let (inside, outside) = c.split_at(m * n);
                        assert!(inside.iter().all(|&c| c == if accumulate { 0.5 } else { 0.0 }));
                        assert!(outside.iter().all(|&c| c == 0.5));
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "gemm_bf16: the inner dimensions")]
fn inner_dimensions_are_checked() {
    let (a, mut c) = ([0; 8], [0.0; 4]);
    let kernels = mantissa_kernels::kernels();
    kernels.gemm_bf16_nt(MatRef::new(&a, 2, 3), MatRef::new(&a, 2, 4), MatMut::new(&mut c, 2, 2), false);
}

#[test]
#[should_panic(expected = "gemm_f16: C does not have the shape")]
fn the_shape_of_the_result_is_checked() {
    let (a, mut c) = ([0; 8], [0.0; 4]);
    let kernels = mantissa_kernels::kernels();
    kernels.gemm_f16_tn(MatRef::new(&a, 2, 3), MatRef::new(&a, 2, 4), MatMut::new(&mut c, 2, 2), false);
}

#[test]
fn a_path_is_given_only_where_there_is_one() {
    for isa in Isa::available() {
        let kernels = Kernels::new(isa).unwrap();
        assert!(!kernels.with_bf16_dot(false).unwrap().bf16_dot());
        match kernels.with_bf16_dot(true) {
            Some(dot) => assert!(dot.bf16_dot() && dot.isa() == isa && matches!(isa, Isa::Avx512 | Isa::Amx)),
            None => assert!(!kernels.bf16_dot()),
        }
    }
}
