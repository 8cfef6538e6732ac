//! Optimizers against recorded runs of PyTorch and bitsandbytes, with the tolerances of the data's README.
//!
//! The committed file holds whole blocks of each tensor; the complete file is read as well if it exists beside the
//! repository.
use std::path::PathBuf;

use mantissa_kernels::{AdamWStep, kernels};
use mantissa_store::SafeTensors;
use mantissa_train::blockwise::{BLOCK, BlockwiseRule, BlockwiseStep, Moment};

/// Hyperparameters of the recorded runs.
const LR: f64 = 1e-3;
const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.01;
const STEPS: u64 = 20;

fn files() -> Vec<SafeTensors> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let whole = root.join("../shared/golden/optimizer.safetensors");
    if !whole.exists() {
        println!("skipped: the whole of the reference data is not beside the repository");
    }
    let committed = root.join("tests/data/golden/optimizer.safetensors");
    let paths = [Some(committed), whole.exists().then_some(whole)];
    paths.into_iter().flatten().map(|path| SafeTensors::open(&path).unwrap()).collect()
}

fn f32s(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.read_f32(file.get(name).unwrap()).unwrap()
}

fn bytes(file: &SafeTensors, name: &str) -> Vec<u8> {
    file.read(file.get(name).unwrap()).unwrap()
}

#[test]
fn adamw_stays_with_the_textbook_in_f64() {
    for file in files() {
        let (mut p, grads) = (f32s(&file, "p0"), f32s(&file, "grads"));
        let n = p.len();
        let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
        let exact = bytes(&file, "adamw_f64.params");
        let exact: Vec<f64> = exact.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        let mut checked = 0;
        for t in 1..=STEPS {
            let step = AdamWStep {
                grad_scale: 1.0,
                decay: (1.0 - LR * WEIGHT_DECAY) as f32,
                one_minus_beta1: (1.0 - BETAS.0) as f32,
                beta2: BETAS.1 as f32,
                one_minus_beta2: (1.0 - BETAS.1) as f32,
                sqrt_correction2: (1.0 - BETAS.1.powf(t as f64)).sqrt() as f32,
                eps: EPS as f32,
                step_size: (LR / (1.0 - BETAS.0.powf(t as f64))) as f32,
            };
            kernels().adamw(&step, &mut p, &grads[(t as usize - 1) * n..][..n], &mut m, &mut v);
            if let Some(at) = [1, 2, 5, 10, 20].iter().position(|&step| step == t) {
                let exact = &exact[at * n..][..n];
                let worst = p.iter().zip(exact).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
                println!("step {t}: largest difference {worst:e}");
                assert!(worst <= 2e-7, "step {t}: {worst:e}");
                checked += 1;
            }
        }
        assert_eq!(checked, 5);
    }
}

/// The recorded run is that of bitsandbytes' CPU backend.
#[test]
fn adamw_with_8_bit_moments_matches_bitsandbytes() {
    for file in files() {
        let (mut p, grads) = (f32s(&file, "p0"), f32s(&file, "grads"));
        let (n, blocks) = (p.len(), p.len() / BLOCK);
        assert_eq!(n, blocks * BLOCK, "whole blocks");
        let (mut codes1, mut codes2) = (vec![127; n], vec![0; n]);
        let (mut max1, mut max2) = (vec![0.0; blocks], vec![0.0; blocks]);
        let all = |name: &str| f32s(&file, &format!("bnb_adamw8bit.{name}"));
        let (params, absmax1, absmax2) = (all("params"), all("absmax1"), all("absmax2"));
        let state1 = bytes(&file, "bnb_adamw8bit.state1_codes");
        let state2 = bytes(&file, "bnb_adamw8bit.state2_codes");
        for t in 0..STEPS as usize {
            let (betas, grads) = ((BETAS.0, BETAS.1, EPS), &grads[t * n..][..n]);
            let step = BlockwiseStep::new(BlockwiseRule::Cpu, betas, LR, WEIGHT_DECAY, t as u64 + 1, 1.0);
            for block in 0..blocks {
                let at = block * BLOCK..(block + 1) * BLOCK;
                let m = Moment { codes: &mut codes1[at.clone()], absmax: &mut max1[block] };
                let v = Moment { codes: &mut codes2[at.clone()], absmax: &mut max2[block] };
                step.block(&mut p[at.clone()], &grads[at], m, v);
            }
            let different = |found: &[u8], expected: &[u8]| {
                found.iter().zip(&expected[t * n..][..n]).filter(|(a, b)| a != b).count()
            };
            let (first, second) = (different(&codes1, &state1), different(&codes2, &state2));
            assert_eq!((first, second), (0, 0), "step {}: codes that differ of {n}", t + 1);
            for (found, expected) in [(&max1, &absmax1), (&max2, &absmax2)] {
                let expected = &expected[t * blocks..][..blocks];
                let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f32::max);
                assert!(worst <= 1e-6, "step {}: absmax {worst:e}", t + 1);
            }
            let worst = p.iter().zip(&params[t * n..]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-7, "step {}: parameters {worst:e}", t + 1);
        }
    }
}
