//! A configuration in a few words, and the subject that they describe.

use mantissa_num::Scheme;

use crate::contract::tests::subject;
use crate::contract::{Input, Observation, Observed, Server, Subject, Target};
use crate::hardware::Gpu;

/// Configuration with the source that accepts or refuses it.
pub(super) struct Case {
    /// Checkpoint format.
    pub(super) format: &'static str,
    /// Scheme of the weights; empty for a dense model.
    pub(super) weights: &'static str,
    /// Scheme of the inputs; empty if unquantized.
    pub(super) inputs: &'static str,
    /// Words that change the model or the target: `tp=4`, `gpu=a100`, `act-order`, `cols=352`, `f16`, `mixed`,
    /// `unfused-scales`, `seen=NAME`.
    pub(super) options: &'static str,
    /// Rule that refuses it; empty if it loads.
    pub(super) rule: &'static str,
    /// File that says so, in the project or package at the version that the rules name.
    pub(super) source: &'static str,
}

impl Case {
    pub(super) const fn takes(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule: "", source }
    }

    pub(super) const fn refuses(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        rule: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule, source }
    }

    pub(super) const fn with(self, options: &'static str) -> Self {
        Case { options, ..self }
    }

    /// Describes the model, and the engine that it is linted for.
    pub(super) fn build(&self, server: Server) -> (Subject, Target) {
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
