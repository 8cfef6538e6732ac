//! Configurations that each engine accepts and refuses, read from its source, against its rules.

use mantissa_num::Scheme;

use super::super::case::Case;
use super::super::tests::subject;
use super::super::{EngineTarget, Input, Observation, Observed, Subject, lint, rules};
use super::{ENGINES, Engine};
use crate::hardware::Gpu;

#[test]
fn rules_agree_with_every_case() {
    for engine in ENGINES.into_iter().filter(|engine| **engine != *Engine::MANTISSA) {
        for case in engine.cases {
            let shown = format!(
                "{} {} {}+{} {} ({})",
                engine.name, case.format, case.weights, case.inputs, case.options, case.source
            );
            assert!(case.source.len() > 12 && case.source.contains('.'), "{shown}: no source");
            let (subject, target) = build(case, engine);
            let report = lint(&subject, &target);
            let broken: Vec<_> =
                report.findings.iter().filter(|f| f.severity.fails()).map(|f| f.rule).collect();
            if case.rule.is_empty() {
                assert!(broken.is_empty(), "{shown}: {:?}", report.findings);
            } else {
                assert!(broken.contains(&case.rule), "{shown}: expected {}, got {broken:?}", case.rule);
            }
        }
        let refused = engine.cases.iter().filter(|case| !case.rule.is_empty()).count();
        let accepted = engine.cases.len() - refused;
        assert!(accepted >= 10 && refused >= 10, "{}: {accepted} accepted, {refused} refused", engine.name);
    }
}

#[test]
fn shared_rules_are_those_that_engines_name() {
    let shared: Vec<_> = rules::SHARED.iter().chain(rules::HEADS).map(|rule| rule.id).collect();
    for engine in ENGINES {
        let unknown: Vec<_> = engine.shared.iter().filter(|id| !shared.contains(id)).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", engine.name);
    }
    let unused: Vec<_> =
        shared.iter().filter(|id| !ENGINES.iter().any(|engine| engine.shared.contains(id))).collect();
    assert!(unused.is_empty(), "{unused:?}");
}

/// Describes the model, and the engine that it is linted for.
fn build(case: &Case, engine: &'static Engine) -> (Subject, EngineTarget) {
    let scheme = if case.weights.is_empty() { "int4-g128" } else { case.weights };
    let mut subject = subject(case.format, scheme);
    let mut target = EngineTarget { engine, tp: 1, gpu: None };
    if case.weights.is_empty() {
        subject.linears.iter_mut().for_each(|linear| linear.stored = None);
    }
    if !case.inputs.is_empty() {
        let scheme = mantissa_num::parse_activation(case.inputs).unwrap();
        let is_static = scheme.source == mantissa_num::Source::Static;
        for stored in subject.linears.iter_mut().filter_map(|linear| linear.stored.as_mut()) {
            stored.input = Some(Input { format: scheme.format.clone(), is_static, scale: None });
        }
    }
    case.options.split_whitespace().for_each(|option| change(option, &mut subject, &mut target));
    (subject, target)
}

/// Applies one word of [`Case::options`].
fn change(option: &str, subject: &mut Subject, target: &mut EngineTarget) {
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
                "other-tokenizer" => Observed::OtherTokenizer,
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
