//! Configurations that each engine accepts and refuses, read from its source.

mod exllamav2;
mod llama_cpp;
mod lmdeploy;
mod mlx;
mod sglang;
mod tensorrt_llm;
mod transformers;
mod vllm;

use mantissa_num::Scheme;

use super::super::tests::subject;
use super::super::{Input, Observation, Observed, Server, Subject, Target, lint};
use crate::hardware::Gpu;

/// Configuration with the source that accepts or refuses it.
pub(super) struct Case {
    /// Checkpoint format.
    format: &'static str,
    /// Scheme of the weights; empty for a dense model.
    weights: &'static str,
    /// Scheme of the inputs; empty if unquantized.
    inputs: &'static str,
    /// Words that change the model or the target: `tp=4`, `gpu=a100`, `act-order`, `cols=352`, `f16`, `mixed`,
    /// `unfused-scales`, `seen=NAME`.
    options: &'static str,
    /// Rule that refuses it; empty if it loads.
    rule: &'static str,
    /// File that says so, in the project or package at the version that the rules name.
    source: &'static str,
}

impl Case {
    const fn takes(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule: "", source }
    }

    const fn refuses(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        rule: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule, source }
    }

    const fn with(self, options: &'static str) -> Self {
        Case { options, ..self }
    }

    /// Describes the model, and the engine that it is linted for.
    fn build(&self, server: Server) -> (Subject, Target) {
        let scheme = if self.weights.is_empty() { "int4-g128" } else { self.weights };
        let mut subject = subject(self.format, scheme);
        let mut target = Target { server, tp: 1, gpu: None };
        if self.weights.is_empty() {
            subject.linears.iter_mut().for_each(|linear| linear.stored = None);
        }
        if !self.inputs.is_empty() {
            let scheme = mantissa_num::parse_activation(self.inputs).unwrap();
            let is_static = scheme.source == mantissa_num::Source::Static;
            for stored in subject.linears.iter_mut().filter_map(|linear| linear.stored.as_mut()) {
                stored.input = Some(Input { format: scheme.format.clone(), is_static, scale: None });
            }
        }
        self.options.split_whitespace().for_each(|option| change(option, &mut subject, &mut target));
        (subject, target)
    }
}

/// Applies one word of [`Case::options`].
fn change(option: &str, subject: &mut Subject, target: &mut Target) {
    let down = |subject: &mut Subject| subject.linears.len() - 1;
    match option.split_once('=').unwrap_or((option, "")) {
        ("tp", n) => target.tp = n.parse().unwrap(),
        ("gpu", name) => target.gpu = Some(Gpu::parse(name).unwrap()),
        ("cols", n) => {
            let last = down(subject);
            subject.linears[last].cols = n.parse().unwrap();
        }
        ("act-order", _) => {
            subject.linears.iter_mut().for_each(|linear| linear.stored.as_mut().unwrap().act_order = true);
        }
        ("multiplied", _) => {
            subject.linears.iter_mut().for_each(|linear| linear.stored.as_mut().unwrap().multiplied = true);
        }
        ("f16", _) => subject.dtype = Some("float16".to_owned()),
        ("experts", _) => {
            subject.linears.retain(|linear| linear.module.contains("mlp"));
            let rename = |name: &str| name.replace("mlp.", "mlp.experts.0.");
            subject.linears.iter_mut().for_each(|linear| linear.module = rename(&linear.module));
        }
        // q in another scheme than k and v.
        ("mixed", scheme) => {
            let format = scheme.parse::<Scheme>().unwrap().format;
            subject.linears[0].stored.as_mut().unwrap().format = format;
        }
        // Global scales of gate and up that differ.
        ("unfused-scales", _) => {
            for (i, linear) in subject.linears.iter_mut().enumerate() {
                linear.stored.as_mut().unwrap().outer = Some(1.0 + i as f32);
            }
        }
        ("seen", name) => {
            let what = match name {
                "zero-points" => Observed::ZeroPointVersion,
                "router" => Observed::Router,
                "head" => Observed::Head,
                "tied-head" => Observed::TiedHead,
                "norm" => Observed::Norm,
                "tokenizer" => Observed::Tokenizer,
                "pre-tokenizer" => Observed::PreTokenizer,
                "vocabulary" => Observed::Vocabulary,
                "row-order" => Observed::RowOrder,
                _ => panic!("{name}"),
            };
            subject.examined.push(what);
            subject.observations.push(Observation { what, tensor: name.to_owned(), found: "planted".into() });
        }
        _ => panic!("{option}"),
    }
}

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
