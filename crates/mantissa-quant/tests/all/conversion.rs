//! Quantization-aware training converts without loss: the weight that the forward of a policy multiplies by has the
//! bits of the artifact that `quantize` makes of the trained model under the same scheme.
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::model;
use mantissa_model::{LinearInfo, linear_weight, load_config};
use mantissa_quant::{Options, Plan, Recipe, Start, run};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, ModelFiles, Weight, native};
use mantissa_train::{Policy, PolicyTable, TrainModel};
use tempfile::TempDir;

fn quantize(source: &ModelFiles, scheme: &str, out: &Path, container: Option<Container>) {
    let options = Options { threads: 1, container, ..Options::default() };
    let recipe = Recipe::load(&format!("rtn-{scheme}")).unwrap();
    let plan = Plan::new(source, recipe, options).unwrap();
    let output = mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true);
    run(&plan, source, &output, Start::Resume, &mut |_| ControlFlow::Continue(())).unwrap();
}

fn policy(scheme: &str, weights: &str) -> Policy {
    let base = if weights == "f32" { "fp32" } else { "bf16" };
    let text = format!("policy = \"{base}\"\nfprop.w = \"{scheme}\"");
    let table: PolicyTable = mantissa_options::from_toml(&text).unwrap();
    table.policy(1).unwrap()
}

/// Compares every linear layer; `container` is the format of the artifact.
fn compare(dtype: Dtype, scheme: &str, container: Option<Container>) {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), dtype, 7)).unwrap();
    let out = temp.path().join("out");
    quantize(&source, scheme, &out, container);
    let stored = ModelFiles::open(&out).unwrap();
    let weights = if dtype == Dtype::BF16 { "bf16" } else { "f32" };
    let options =
        mantissa_train::Options { max_tokens: 8, max_len: 8, threads: 2, policy: policy(scheme, weights) };
    let trained = TrainModel::load(&source, options).unwrap();
    for info in load_config(&source).unwrap().decoder_linears() {
        let linear = linear_weight(&stored, &LinearInfo { bias: false, ..info.clone() }).unwrap();
        let Weight::Quantized(q) = linear.weight else { panic!("{}: not quantized", info.module) };
        let (forward, artifact) =
            (trained.forward_weight(info.layer, info.kind).unwrap(), q.dequantize().unwrap());
        let differs = forward.iter().zip(&artifact).position(|(a, b)| a.to_bits() != b.to_bits() && *a != *b);
        assert_eq!(differs, None, "{scheme} {dtype}: {}", info.module);
    }
}

#[test]
fn the_forward_of_f32_masters_has_the_bits_of_the_artifact() {
    for scheme in [
        "int4-g32",
        "int4-g32-asym",
        "int3-g32",
        "int2-g32",
        "nf4",
        "mxfp4",
        "nvfp4:te",
        "nvfp4:ct",
        "nvfp4:4over6",
        "fp8-e4m3-channel",
        "int8-channel",
    ] {
        compare(Dtype::F32, scheme, Some(native::CONTAINER));
    }
    for scheme in ["int4-g32", "int4-g32-asym", "int8-channel", "fp8-e4m3-channel"] {
        compare(Dtype::F32, scheme, None);
    }
}

/// The native format keeps f32 scales beside a bf16 model; other formats would round them to bf16.
#[test]
fn the_forward_of_bf16_weights_has_the_bits_of_the_native_artifact() {
    for scheme in
        ["int4-g32", "int4-g32-asym", "int3-g32", "nf4", "mxfp4", "fp8-e4m3-channel", "int8-channel"]
    {
        compare(Dtype::BF16, scheme, Some(native::CONTAINER));
    }
}

/// The native artifact under learned scales has the weights that the forward multiplied by.
#[test]
fn learned_scales_are_stored_bit_for_bit() {
    for scheme in ["int2-g32", "int3-g32", "int4-g64", "int8-channel"] {
        for dtype in [Dtype::F32, Dtype::BF16] {
            let temp = TempDir::new().unwrap();
            let source = ModelFiles::open(&model(temp.path(), dtype, 7)).unwrap();
            let base = if dtype == Dtype::BF16 { "bf16" } else { "fp32" };
            let text = format!(
                "policy = \"{base}\"\nfprop.w = {{ scheme = \"{scheme}\", scales = \"learned\" }}\n\
                 dgrad.w = {{ scheme = \"f32\", source = \"forward\" }}"
            );
            let policy = mantissa_options::from_toml::<PolicyTable>(&text).unwrap().policy(1).unwrap();
            let options = mantissa_train::Options { max_tokens: 8, max_len: 8, threads: 2, policy };
            let mut trained = TrainModel::load(&source, options).unwrap();
            let scales: Vec<_> =
                trained.parameters().table().iter().filter(|p| p.is_scales()).cloned().collect();
            for (i, param) in scales.into_iter().enumerate() {
                let moved = trained.parameters().values()[param.range.clone()].to_vec();
                let moved: Vec<f32> = moved.iter().map(|s| s * (1.0 + 0.01 * i as f32)).collect();
                trained.parameters_mut().set(param.range.start, &moved);
            }
            let options = Options {
                threads: 1,
                container: Some(native::CONTAINER),
                scales: Some(trained.learned_scales().into()),
                ..Options::default()
            };
            let plan = Plan::new(&source, Recipe::load(&format!("rtn-{scheme}")).unwrap(), options).unwrap();
            let out = temp.path().join("out");
            let output = mantissa_store::Output::of_job(&out, mantissa_store::JobKey::of("test"), true);
            run(&plan, &source, &output, Start::Restart, &mut |_| ControlFlow::Continue(())).unwrap();
            let stored = ModelFiles::open(&out).unwrap();
            for info in load_config(&source).unwrap().decoder_linears() {
                let linear = linear_weight(&stored, &LinearInfo { bias: false, ..info.clone() }).unwrap();
                let Weight::Quantized(q) = linear.weight else { panic!("{}: not quantized", info.module) };
                let forward = trained.forward_weight(info.layer, info.kind).unwrap();
                let differs = forward.iter().zip(q.dequantize().unwrap()).position(|(a, b)| *a != b);
                assert_eq!(differs, None, "{scheme} {dtype}: {}", info.module);
            }
        }
    }
}
