//! Configurations that each engine accepts and refuses, read from its source.

mod case;
mod exllamav2;
mod llama_cpp;
mod lmdeploy;
mod mlx;
mod sglang;
mod tensorrt_llm;
mod transformers;
mod vllm;

use crate::contract::{Server, lint};
use case::Case;

/// Checks that the rules agree with every case of an engine, and that there are enough.
fn check(server: Server, cases: &[Case]) {
    for case in cases {
        let Case { format, weights, inputs, options, rule, source } = case;
        let shown = format!("{} {format} {weights}+{inputs} {options} ({source})", server.name());
        assert!(source.len() > 12 && source.contains('.'), "{shown}: no source");
        let (subject, target) = case.build(server);
        let report = lint(&subject, &target);
        let broken: Vec<_> = report.findings.iter().filter(|f| f.severity.fails()).map(|f| f.rule).collect();
        if rule.is_empty() {
            assert!(broken.is_empty(), "{shown}: {:?}", report.findings);
        } else {
            assert!(broken.contains(rule), "{shown}: expected {rule}, got {broken:?}");
        }
    }
    let refused = cases.iter().filter(|case| !case.rule.is_empty()).count();
    let accepted = cases.len() - refused;
    assert!(accepted >= 10 && refused >= 10, "{}: {accepted} accepted, {refused} refused", server.name());
}

#[test]
fn configurations_of_vllm() {
    check(Server::Vllm, vllm::CASES);
}

#[test]
fn configurations_of_sglang() {
    check(Server::Sglang, sglang::CASES);
}

#[test]
fn configurations_of_transformers() {
    check(Server::Transformers, transformers::CASES);
}

#[test]
fn configurations_of_tensorrt_llm() {
    check(Server::TensorrtLlm, tensorrt_llm::CASES);
}

#[test]
fn configurations_of_lmdeploy() {
    check(Server::Lmdeploy, lmdeploy::CASES);
}

#[test]
fn configurations_of_llama_cpp() {
    check(Server::LlamaCpp, llama_cpp::CASES);
}

#[test]
fn configurations_of_mlx() {
    check(Server::Mlx, mlx::CASES);
}

#[test]
fn configurations_of_exllamav2() {
    check(Server::Exllamav2, exllamav2::CASES);
}
