//! Policies printed as the TOML tables that [`PolicyTable`](super::PolicyTable) reads.

use std::fmt::Write;

use super::keys::{DTYPES, SCALES, SIGNS};
use super::operands::{OperandPolicy, OperandSource, Rotation, ScaleChoice};
use super::{Keep, Master, Policy};
use crate::scaling::SCALING_OPTIONS;
use crate::store::Precision;

impl Policy {
    /// Writes the policy as a `[precision]` table with every key, which [`PolicyTable`](super::PolicyTable) reads back as this policy.
    pub fn to_toml(&self) -> String {
        let name = |precision: Precision| choice_name(&DTYPES, precision);
        let mut text = String::from("[precision]\n");
        let known = Policy::names().any(|known| known == self.name);
        let mut line = |key: &str, value: &str| {
            let _ = writeln!(text, "{key} = {value}");
        };
        let quoted = |value: &str| format!("\"{value}\"");
        line("policy", &quoted(if known { &self.name } else { "fp32" }));
        line("weights", &quoted(name(self.weights)));
        line("master", &quoted(master_name(self.master)));
        line("gradients", &quoted(name(self.gradients)));
        line("head", &quoted(name(self.head.shared_input())));
        if let Some(kv) = &self.kv {
            line("kv", &quoted(&kv.to_string()));
        }
        let Keep { first, last, precision } = self.keep;
        line("keep", &format!("{{ first = {first:?}, last = {last:?}, dtype = \"{}\" }}", name(precision)));
        if let Some(scaling) = &self.scaling {
            let rule = SCALING_OPTIONS.iter().find(|(_, options)| options == scaling);
            line("scaling", &quoted(rule.map_or("pytorch", |(name, _)| name)));
        }
        let linear = &self.linear;
        for (gemm, operands, policy) in [
            ("fprop", ["x", "w"], &linear.fprop),
            ("dgrad", ["dy", "w"], &linear.dgrad),
            ("wgrad", ["dy", "x"], &linear.wgrad),
        ] {
            let _ = writeln!(text, "\n[precision.{gemm}]");
            for (operand, policy) in operands.iter().zip([&policy.left, &policy.right]) {
                let _ = writeln!(text, "{operand} = {}", operand_text(policy));
            }
            if let Some(Rotation { order, signs }) = policy.rotation {
                let signs = choice_name(&SIGNS, signs);
                let _ = writeln!(text, "hadamard = {{ order = {order}, signs = \"{signs}\" }}");
            }
            let _ = writeln!(text, "accumulator = \"{}\"", policy.accumulator);
        }
        text
    }
}

fn choice_name<T: PartialEq + Copy>(all: &[(&'static str, T)], value: T) -> &'static str {
    all.iter().find(|(_, known)| *known == value).map_or("", |(name, _)| name)
}

fn master_name(master: Master) -> &'static str {
    match master {
        Master::None => "none",
        Master::Stochastic { .. } => "stochastic",
        Master::Int8 { .. } => "int8",
        Master::F32 => "f32",
        Master::Remainder => "remainder",
    }
}

fn operand_text(policy: &OperandPolicy) -> String {
    let mut text = format!("{{ scheme = \"{}\"", policy.scheme);
    if policy.is_stochastic() {
        text += ", round = \"stochastic\"";
    }
    if policy.scales != ScaleChoice::Rule {
        let _ = write!(text, ", scales = \"{}\"", choice_name(&SCALES, policy.scales));
    }
    if policy.source == OperandSource::Forward {
        text += ", source = \"forward\"";
    }
    if policy.headroom != 1.0 {
        let _ = write!(text, ", headroom = {:?}", policy.headroom);
    }
    if policy.mask {
        text += ", mask = true";
    }
    text + " }"
}
