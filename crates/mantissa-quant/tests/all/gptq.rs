//! GPTQ compared with a float64 evaluation of the published algorithm, within the tolerance of the data's README.
//!
//! The committed file has some rows of each case. If all of them lie next to the repository, these are used too.
use std::path::PathBuf;

use mantissa_num::Scheme;
use mantissa_quant::gptq::{GptqOptions, GptqResult, GroupOrder, GroupRange, Hessian, gptq};
use mantissa_store::SafeTensors;

const GROUPS: [(&str, GroupOrder); 3] =
    [("static", GroupOrder::Static), ("original", GroupOrder::Original), ("current", GroupOrder::Current)];
const CASES: [&str; 2] = ["a_64x96", "b_256x256"];

#[test]
fn codes_and_losses_match_the_published_algorithm() {
    for file in files() {
        let mut checked = 0;
        for case in CASES {
            let w = f32s(&file, &format!("{case}.W"));
            let hessian = hessian(&file, case);
            for (bits, kind) in [(4, "asym"), (4, "sym"), (3, "asym"), (3, "sym")] {
                for (act, act_order) in [("noact", false), ("actorder", true)] {
                    for (name, groups) in GROUPS {
                        let entry = format!("{case}.w{bits}_{kind}_{act}_{name}");
                        if file.get(&format!("{entry}.codes")).is_none() {
                            continue;
                        }
                        let suffix = if kind == "asym" { "-asym" } else { "" };
                        let scheme: Scheme = format!("int{bits}-g32{suffix}").parse().unwrap();
                        let options = GptqOptions {
                            damp: 0.01,
                            block: 128,
                            act_order,
                            groups,
                            range: GroupRange::Amax,
                            asymmetric: 0.0,
                            first_order: 0.0,
                        };
                        let result = gptq(&scheme, &w, &hessian, options, None, 2).unwrap();
                        compare(&file, &entry, &result, bits, kind);
                        let exact = hessian.loss(&w, &result.dequantize().unwrap());
                        assert!(close(result.loss, exact, 1e-9), "{entry}: loss {} is {exact}", result.loss);
                        checked += 1;
                    }
                }
            }
        }
        assert_eq!(checked, 32, "entries of the file");
    }
}

fn compare(file: &SafeTensors, entry: &str, result: &GptqResult, bits: u32, kind: &str) {
    let equal = equal_codes(result, &bytes(file, &format!("{entry}.codes")).unwrap(), bits);
    let expected = f64::from_le_bytes(bytes(file, &format!("{entry}.loss_f64")).unwrap().try_into().unwrap());
    println!("{entry}: {:.3} % equal codes, loss {} for {expected}", 100.0 * equal, result.loss);
    // The data names each column's group also for static groups.
    let trivial: Vec<u32> = (0..result.quantized.cols as u32).map(|column| column / 32).collect();
    let g_idx = u32s(file, &format!("{entry}.g_idx"));
    assert_eq!(result.g_idx.as_ref().unwrap_or(&trivial), g_idx.as_ref().unwrap_or(&trivial), "{entry}");
    assert!(result.notes.is_empty() && result.damp_used == 0.01, "{entry}: {:?}", result.notes);
    if kind == "asym" {
        assert!(equal >= 0.999, "{entry}: {equal} equal codes");
        assert!(close(result.loss, expected, 1e-4), "{entry}: loss {} for {expected}", result.loss);
    } else {
        assert!(equal >= 0.9, "{entry}: {equal} equal codes");
        assert!(result.loss <= 1.03 * expected, "{entry}: loss {} for {expected}", result.loss);
    }
}

#[test]
fn columns_are_processed_in_the_order_of_the_data() {
    for file in files() {
        for case in CASES {
            let perm = u32s(&file, &format!("{case}.perm")).unwrap();
            let w = f32s(&file, &format!("{case}.W"));
            // With groups of one column, a column's group is its position.
            let scheme: Scheme = "int4-g1".parse().unwrap();
            let options = GptqOptions { groups: GroupOrder::Current, ..GptqOptions::default() };
            let result = gptq(&scheme, &w[..perm.len()], &hessian(&file, case), options, None, 1).unwrap();
            let g_idx = result.g_idx.unwrap();
            let agrees = |(position, &column): (usize, &u32)| g_idx[column as usize] as usize == position;
            assert!(perm.iter().enumerate().all(agrees), "{case}");
        }
    }
}

fn files() -> Vec<SafeTensors> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let whole = root.join("../shared/golden/gptq.safetensors");
    if !whole.exists() {
        println!("skipped: the whole of the reference data is not beside the repository");
    }
    let committed = root.join("tests/data/golden/gptq.safetensors");
    let paths = [Some(committed), whole.exists().then_some(whole)];
    paths.into_iter().flatten().map(|path| SafeTensors::open(&path).unwrap()).collect()
}

fn hessian(file: &SafeTensors, case: &str) -> Hessian {
    let h = f32s(file, &format!("{case}.H"));
    let cols = h.len().isqrt();
    Hessian::from_sum(h, cols, 1).unwrap()
}

fn bytes(file: &SafeTensors, name: &str) -> Option<Vec<u8>> {
    file.get(name).map(|meta| file.read(meta).unwrap())
}

fn f32s(file: &SafeTensors, name: &str) -> Vec<f32> {
    let bytes = bytes(file, name).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn u32s(file: &SafeTensors, name: &str) -> Option<Vec<u32>> {
    let bytes = bytes(file, name)?;
    Some(bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect())
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * b.abs()
}

/// Returns the share of equal codes; ours are signed.
fn equal_codes(result: &GptqResult, expected: &[u8], bits: u32) -> f64 {
    let offset = 1_i32 << (bits - 1);
    let ours = (0..expected.len()).map(|i| i32::from(result.quantized.codes.get(i) as u8 as i8) + offset);
    ours.zip(expected).filter(|(a, b)| *a == i32::from(**b)).count() as f64 / expected.len() as f64
}
