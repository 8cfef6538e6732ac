//! Quantization-aware training converts without loss: the weight that the forward of a policy multiplies by has the
//! bits of the artifact that `quantize` makes of the trained model under the same scheme.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::model;
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
    let output = mantissa_store::Output::of_job(out, mantissa_store::Job::of("test"), true);
    run(&plan, source, &output, Start::Resume, &mut |_| ControlFlow::Continue(())).unwrap();
}

fn policy(scheme: &str, weights: &str) -> Policy {
    let base = if weights == "f32" { "fp32" } else { "bf16" };
    let text = format!("policy = \"{base}\"\nfprop.w = \"{scheme}\"");
    let table: PolicyTable = toml::from_str(&text).unwrap();
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
        // Fused layers share the global scale of NVFP4 in the artifact.
        if scheme.starts_with("nvfp4") && info.kind.fused().is_some() {
            continue;
        }
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
