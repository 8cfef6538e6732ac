use super::*;
use crate::gptq::GptqResult;
use mantissa_kernels::Isa;
use mantissa_num::trellis::states;

fn uniform(seed: u64, i: usize) -> f32 {
    random_u32(seed, i as u64) as f32 / u32::MAX as f32 - 0.5
}

/// Correlated neighbours, with some large channels.
fn correlated(seed: u64, rows: usize, width: usize) -> Vec<f32> {
    let value = |i: usize| {
        let (row, col) = (i / width, i % width);
        let shared = uniform(seed, 1000 * row + col / 5) + uniform(seed + 1, 1000 * row);
        (uniform(seed + 2, i) + 2.0 * shared) * if col % 11 == 3 { 4.0 } else { 1.0 }
    };
    (0..rows * width).map(value).collect()
}

fn moments(seed: u64, width: usize) -> Hessian {
    let mut hessian = Hessian::new(width).unwrap();
    hessian.add(&correlated(seed, 4 * width, width), 2);
    hessian
}

fn weight(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| uniform(9, i) * if i / cols == 5 { 3.0 } else { 1.0 }).collect()
}

fn scheme(text: &str) -> Scheme {
    text.parse().unwrap()
}

fn code(input: &RotatedInput, text: &str, w: &[f32], outputs: Option<&Hessian>) -> QtipResult {
    input.quantize(&scheme(text), w, outputs, 3, 2).unwrap()
}

/// `tr(G (a - b) H (a - b)ᵀ)`.
fn two_sided(g: &Hessian, h: &Hessian, a: &[f32], b: &[f32]) -> f64 {
    let (n, k) = (g.cols(), h.cols());
    let e: Vec<f64> = a.iter().zip(b).map(|(a, b)| f64::from(a - b)).collect();
    let (g, h) = (g.to_dense(), h.to_dense());
    let mut right = vec![0.0; n * k];
    for r in 0..n {
        for c in 0..k {
            right[r * k + c] = (0..k).map(|i| e[r * k + i] * f64::from(h[i * k + c])).sum();
        }
    }
    let pair = |r: usize, s: usize| (0..k).map(|c| e[r * k + c] * right[s * k + c]).sum::<f64>();
    (0..n * n).map(|at| f64::from(g[at]) * pair(at / n, at % n)).sum()
}

#[test]
fn more_bits_lose_less_and_inputs_count_by_their_moments() {
    let (rows, cols) = (48, 96);
    let (w, hessian) = (weight(rows, cols), moments(1, cols));
    let energy = hessian.loss(&w, &vec![0.0; w.len()]);
    let input = RotatedInput::new(hessian.clone(), 0.01, 5, 2).unwrap();
    let plain = RotatedInput::plain(cols, 5, 2).unwrap();
    let mut last = energy;
    // Share of the variance of a normal source with independent inputs that trellises leave: .27, .070, .018 and
    // .0047.
    for (text, most) in
        [("trellis1", 0.28), ("trellis2", 0.07), ("trellis3-3inst", 0.018), ("trellis4-channel", 0.0047)]
    {
        let found = code(&input, text, &w, None);
        let values = found.quantized.dequantize().unwrap();
        let loss = hessian.loss(&w, &values);
        assert!((loss - found.loss).abs() <= 1e-9 * loss, "{text}");
        assert!(loss < most * energy && loss < last / 2.5, "{text}: {} of all", loss / energy);
        let blind = code(&plain, text, &w, None).quantized.dequantize().unwrap();
        assert!(loss < 0.9 * hessian.loss(&w, &blind), "{text}");
        last = loss;
    }
}

#[test]
fn outputs_count_by_their_moments() {
    let (rows, cols) = (64, 48);
    let (w, hessian, outputs) = (weight(rows, cols), moments(1, cols), moments(2, rows));
    let input = RotatedInput::new(hessian.clone(), 0.01, 5, 2).unwrap();
    for text in ["trellis2", "trellis3-channel"] {
        let cost =
            |found: &QtipResult| two_sided(&outputs, &hessian, &w, &found.quantized.dequantize().unwrap());
        let (alike, weighed) = (code(&input, text, &w, None), code(&input, text, &w, Some(&outputs)));
        assert!(cost(&weighed) < 0.85 * cost(&alike), "{text}: {} {}", cost(&weighed), cost(&alike));
        assert!(weighed.loss > alike.loss);
    }
    // Degenerate moments change nothing.
    let nothing = Hessian::from_sum(vec![0.0; rows * rows], rows, 7).unwrap();
    assert_eq!(code(&input, "trellis2", &w, Some(&nothing)), code(&input, "trellis2", &w, None));
}

/// Codes the whole weight as one vector with Hessian `G ⊗ H`, tile by tile, as GPTQ takes columns.
#[test]
fn tiles_match_the_hessian_of_the_whole_weight() {
    let (rows, cols) = (32, 48);
    let targets: Vec<f32> = (0..rows * cols).map(|i| 3.0 * (uniform(4, i) + uniform(5, i))).collect();
    let table: Vec<f32> =
        mantissa_num::trellis::TrellisBook::Mcg.table().into_iter().map(|v| F16.decode(v.into())).collect();
    let values = TrellisValues::new(4, &table).unwrap();
    let options = GptqOptions { damp: 0.0, act_order: false, ..GptqOptions::default() };
    let (h, g) = (moments(1, cols), moments(2, rows));
    let inputs = InverseFactor::new(&h, options, 1).unwrap();
    let outputs = InverseFactor::new(&g, options, 1).unwrap();
    let lower: Vec<f64> = (0..rows * rows).map(|at| outputs.upper()[at % rows * rows + at / rows]).collect();
    let problem = Problem {
        kernels: kernels(),
        values: &values,
        table: &table,
        targets: &targets,
        rows,
        cols,
        inputs: inputs.upper(),
        outputs: Some(&lower),
    };
    let found = problem.solve(2);

    // Element `p` of the vector: tile by tile, inputs first within a tile.
    let (down, n) = (rows / TILE, rows * cols);
    let at = |p: usize| {
        let (tile, inner) = (p / TILE_WEIGHTS, p % TILE_WEIGHTS);
        (tile % down * TILE + inner % TILE, tile / down * TILE + inner / TILE)
    };
    let (dense_g, dense_h) = (g.to_dense(), h.to_dense());
    let element = |p: usize, q: usize| {
        let ((r, c), (s, d)) = (at(p), at(q));
        dense_g[r * rows + s] * dense_h[c * cols + d]
    };
    let whole = (0..n * n).map(|i| element(i / n, i % n)).collect();
    let whole = InverseFactor::new(&Hessian::from_sum(whole, n, 1).unwrap(), options, 2).unwrap();
    let upper = whole.upper();
    let mut w: Vec<f64> = (0..n).map(|p| f64::from(targets[at(p).0 * cols + at(p).1])).collect();
    let mut scratch = TrellisScratch::new(&values, TILE_WEIGHTS);
    for (tile, bytes) in found.chunks_exact(4 * 4 * TILE_WEIGHTS / 32).enumerate() {
        let first = tile * TILE_WEIGHTS;
        let place_of = |i: usize| {
            let (input, output) = mantissa_num::trellis::place(i);
            first + input * TILE + output
        };
        let ring: Vec<f32> = (0..TILE_WEIGHTS).map(|i| w[place_of(i)] as f32).collect();
        let mut expected = [0; TILE_WEIGHTS];
        kernels().trellis_ring(&values, &ring, &mut scratch, &mut expected);
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        assert_eq!(states(&words, 8).unwrap(), expected, "tile {tile}");
        let mut errors = vec![0.0; TILE_WEIGHTS];
        for (i, &state) in expected.iter().enumerate() {
            errors[place_of(i) - first] = w[place_of(i)] - f64::from(table[usize::from(state)]);
        }
        for p in first..first + TILE_WEIGHTS {
            let e = errors[p - first] / upper[p * n + p];
            for q in p..n {
                match q < first + TILE_WEIGHTS {
                    true => errors[q - first] -= e * upper[p * n + q],
                    false => w[q] -= e * upper[p * n + q],
                }
            }
        }
    }
}

#[test]
fn bytes_depend_on_neither_threads_nor_level() {
    let (rows, cols) = (80, 64);
    let (w, hessian, outputs) = (weight(rows, cols), moments(1, cols), moments(2, rows));
    let with = |isa: Isa, threads: usize| {
        let kernels = Kernels::new(isa).unwrap();
        let input = RotatedInput::at(kernels, hessian.clone(), 0.01, 5, threads).unwrap();
        input.quantize(&scheme("trellis2"), &w, Some(&outputs), 3, threads).unwrap()
    };
    let expected = with(Isa::detect(), 1);
    assert_eq!(with(Isa::detect(), 2), expected);
    assert_eq!(with(Isa::detect(), 7), expected);
    for isa in Isa::available() {
        assert_eq!(with(isa, 2), expected, "{isa}");
    }
}

#[test]
fn scales_are_shared_as_the_scheme_says() {
    let (rows, cols) = (96, 32);
    let (mut w, input) = (weight(rows, cols), RotatedInput::new(moments(1, 32), 0.01, 5, 2).unwrap());
    // Zeros need a nonzero scale too.
    w[..32 * cols].fill(0.0);
    for (text, shared) in [("trellis3", 32), ("trellis3-channel", 1)] {
        let q = code(&input, text, &w, None).quantized;
        let Codes::U16(scales) = &q.scales.codes else { unreachable!() };
        assert!(scales[..cols].iter().all(|scale| scale & 0x7fff == 0x3c00), "{text}");
        let magnitudes: Vec<u16> = scales[cols..].iter().map(|scale| scale & 0x7fff).collect();
        for run in magnitudes.chunks(shared) {
            assert!(run.iter().all(|scale| *scale == run[0]), "{text}");
        }
        assert!(magnitudes.iter().collect::<std::collections::BTreeSet<_>>().len() > 1, "{text}");
        assert!(q.dequantize().unwrap().iter().all(|v| v.is_finite()), "{text}");
    }
}

#[test]
fn uncodable_weights_are_refused() {
    let input = RotatedInput::plain(32, 1, 1).unwrap();
    let why = |text: &str, w: &[f32]| match input.quantize(&scheme(text), w, None, 1, 1) {
        Err(error) => error.to_string(),
        Ok(_) => String::new(),
    };
    let w = vec![0.5; 16 * 32];
    assert!(why("int4-g32", &w).contains("trellis1 to trellis8"));
    assert!(why("trellis2.5-channel-mul1", &w).contains("whole bits"));
    assert!(why("trellis2", &w[..24 * 32 / 2]).contains("multiples of 16"));
    assert!(why("trellis2", &[f32::NAN; 16 * 32]).contains("non-finite"));
    let short = Hessian::identity(8).unwrap();
    assert!(input.quantize(&scheme("trellis2"), &w, Some(&short), 1, 1).is_err());
    // Other methods refuse trellises.
    let found: Result<GptqResult, _> = crate::gptq::gptq(
        &scheme("trellis2"),
        &w,
        &Hessian::identity(32).unwrap(),
        GptqOptions::default(),
        None,
        1,
    );
    assert!(found.unwrap_err().to_string().contains("use qtip"));
}
