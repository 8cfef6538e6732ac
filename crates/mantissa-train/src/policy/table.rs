//! Policies as TOML tables: what `[precision]` of a run holds, and what `mantissa train --show-policy` prints.
//!
//! `policy` names the policy that the table starts from; every other key replaces a part of it.

use std::borrow::Cow;

use mantissa_num::{Accumulator, Rounding, Scheme};

use super::fault::{Faulty, TableFault, fault};
use super::keys::{DgradTable, FpropTable, KeepTable, OperandTable, PolicyTable, RotationTable, WgradTable};
use super::learned::check_learned;
use super::named::recipes;
use super::operands::{GemmPolicy, OperandPolicy, OperandSource, Rotation, ScaleChoice, Signs};
use super::{Keep, LinearPolicy, Master, Policy};
use crate::scaling::SCALING_OPTIONS;
use crate::store::Precision;

impl PolicyTable {
    /// Returns the table of a recipe below 16 bits.
    pub fn named(name: &str) -> Option<Self> {
        let recipe = recipes().iter().find(|recipe| recipe.name == name)?;
        mantissa_options::from_toml(recipe.table).ok()
    }

    /// Returns the policy; `seed` is for stochastically rounded updates.
    ///
    /// # Errors
    /// [`TableFault`] names the first key that cannot be met.
    pub fn policy(&self, seed: u64) -> Result<Policy, TableFault> {
        let Some(mut policy) = Policy::by_name(&self.policy, seed) else {
            return fault("policy", &self.policy, &names_for(&self.policy));
        };
        let base = policy.clone();
        policy.weights = self.weights.unwrap_or(policy.weights);
        policy.gradients = self.gradients.unwrap_or(policy.gradients);
        policy.master = self.master.map_or(policy.master, |master| seeded(master, seed));
        check_storage(&policy)?;
        if let Some(dtype) = self.head {
            policy.head = LinearPolicy::plain(dtype);
        }
        if let Some(found) = &self.kv {
            policy.kv = super::cache::parse(found)?;
        }
        let gemms = [
            ("fprop", self.fprop.as_ref().map(FpropTable::parts), &mut policy.linear.fprop, ["x", "w"]),
            ("dgrad", self.dgrad.as_ref().map(DgradTable::parts), &mut policy.linear.dgrad, ["dy", "w"]),
            ("wgrad", self.wgrad.as_ref().map(WgradTable::parts), &mut policy.linear.wgrad, ["dy", "x"]),
        ];
        for (name, parts, gemm, operands) in gemms {
            if let Some(parts) = parts {
                apply(name, operands, parts, gemm)?;
            }
        }
        if let Some(KeepTable { first, last, dtype }) = self.keep {
            policy.keep = Keep { first, last, precision: dtype };
        }
        if let Some(scaling) = self.scaling {
            if policy.scaling.is_none() && policy.weights != Precision::F16 {
                let found = SCALING_OPTIONS.iter().find(|(_, options)| *options == scaling);
                let found = found.map_or("another", |(name, _)| name);
                return fault("scaling", found, "no such key: this policy uses no loss scaling");
            }
            policy.scaling = Some(scaling);
        }
        check_forward(&policy.linear)?;
        check_corrected(&policy.linear)?;
        check_learned(&policy.linear)?;
        if !policy.linear.is_plain() {
            policy.seed = seed;
        }
        // `scaling` chooses a rule of the named policy and makes no other policy of it.
        let same = Policy { scaling: base.scaling, ..policy.clone() } == base;
        if !same {
            policy.name = Cow::Borrowed("custom");
        }
        Ok(policy)
    }

    /// Returns the policy of a recipe's own table.
    pub(super) fn recipe(name: &'static str, seed: u64) -> Option<Policy> {
        let table = Self::named(name)?;
        Some(Policy { name: Cow::Borrowed(name), ..table.policy(seed).ok()? })
    }
}

/// Returns a master copy with the seed of the run.
fn seeded(master: Master, seed: u64) -> Master {
    match master {
        Master::Stochastic { .. } => Master::Stochastic { seed },
        Master::Int8 { .. } => Master::Int8 { seed },
        master => master,
    }
}

/// Returns the names for one that is no policy: those that it may mean, or all.
fn names_for(typed: &str) -> String {
    match Policy::meant_by(typed).as_slice() {
        [] => Policy::names().collect::<Vec<_>>().join(", "),
        meant => format!("{} (all: mantissa train --show-policy list)", meant.join(", ")),
    }
}

/// # Errors
/// [`TableFault`] for a master copy that does not fit the weights.
fn check_storage(policy: &Policy) -> Faulty<()> {
    match (policy.master, policy.weights) {
        (Master::Stochastic { .. } | Master::Remainder, found) if found != Precision::Bf16 => {
            fault("weights", found.scheme(), "bf16 with master = \"stochastic\" or \"remainder\"")
        }
        (Master::Int8 { .. }, found) if found != Precision::F32 => {
            fault("weights", found.scheme(), "f32 with master = \"int8\"")
        }
        (Master::F32, Precision::F32) => fault("master", "f32", "none with weights = \"f32\""),
        _ => Ok(()),
    }
}

/// # Errors
/// [`TableFault`] for a rotated forward whose backward would multiply values that are not rotated.
fn check_forward(linear: &LinearPolicy) -> Faulty<()> {
    if linear.fprop.rotation.is_none() {
        return Ok(());
    }
    for (key, operand) in [("dgrad.w.source", &linear.dgrad.right), ("wgrad.x.source", &linear.wgrad.right)] {
        if operand.source != OperandSource::Forward {
            return fault(key, "exact", "forward with fprop.hadamard: gradients are rotated back");
        }
    }
    Ok(())
}

/// # Errors
/// [`TableFault`] for MS-EDEN without the rotation that it is unbiased over.
fn check_corrected(linear: &LinearPolicy) -> Faulty<()> {
    for (name, gemm) in [("dgrad", &linear.dgrad), ("wgrad", &linear.wgrad)] {
        let corrected = [&gemm.left, &gemm.right].iter().any(|operand| operand.scales == ScaleChoice::Eden);
        let order = gemm.rotation.map_or(1, |rotation| rotation.order);
        if corrected && !order.is_multiple_of(16) {
            return fault(
                &format!("{name}.hadamard.order"),
                order,
                "a multiple of 16 with scales = \"eden\"",
            );
        }
    }
    Ok(())
}

/// Keys of one matmul: left and right operand, rotation, accumulator.
type Parts<'a> =
    (Option<&'a OperandTable>, Option<&'a OperandTable>, Option<&'a RotationTable>, Option<&'a str>);

macro_rules! parts {
    ($name:ident, $left:ident, $right:ident) => {
        impl $name {
            fn parts(&self) -> Parts<'_> {
                (
                    self.$left.as_ref(),
                    self.$right.as_ref(),
                    self.hadamard.as_ref(),
                    self.accumulator.as_deref(),
                )
            }
        }
    };
}

parts!(FpropTable, x, w);
parts!(DgradTable, dy, w);
parts!(WgradTable, dy, x);

fn apply(
    name: &str,
    operands: [&str; 2],
    (left, right, hadamard, accumulator): Parts<'_>,
    gemm: &mut GemmPolicy,
) -> Faulty<()> {
    for (operand, table, to) in [(operands[0], left, &mut gemm.left), (operands[1], right, &mut gemm.right)] {
        if let Some(table) = table {
            *to = operand_of(&format!("{name}.{operand}"), table)?;
            if name == "fprop" && to.source == OperandSource::Forward {
                return fault(&format!("{name}.{operand}.source"), "forward", "exact: this is the forward");
            }
        }
    }
    if let Some(found) = accumulator {
        let key = format!("{name}.accumulator");
        let Ok(parsed) = found.parse() else {
            return fault(&key, found, "f32, hopper, hopper-128 or another multiple of 32");
        };
        gemm.accumulator = parsed;
    }
    if gemm.accumulator != Accumulator::F32 && !super::accumulates(gemm) {
        let allowed = "f32: both operands must be 8-bit floats with a scale per tensor or line, or in blocks of a \
                       multiple of 32";
        return fault(&format!("{name}.accumulator"), gemm.accumulator, allowed);
    }
    if let Some(RotationTable { order, signs }) = hadamard {
        let key = format!("{name}.hadamard.order");
        if *order == 1 {
            gemm.rotation = None;
            return Ok(());
        }
        if !order.is_power_of_two() || *order < 2 || *order > 1024 {
            return fault(&key, order, "a power of two up to 1024; 1 for no rotation");
        }
        if *signs == Signs::TransformerEngine && *order != 16 {
            return fault(&key, order, "16 with signs = \"te\"");
        }
        gemm.rotation = Some(Rotation { order: *order, signs: *signs });
    }
    Ok(())
}

fn operand_of(key: &str, table: &OperandTable) -> Faulty<OperandPolicy> {
    let OperandTable { scheme, round, scales, source, headroom, mask } = table;
    let parsed: Scheme = match scheme.parse() {
        Ok(scheme) => scheme,
        Err(error) => return fault(key, scheme, &format!("a scheme ({error})")),
    };
    let mut policy = OperandPolicy::new(parsed);
    if *round == Some(true) {
        policy.scheme.encoder.rounding = Rounding::Stochastic { seed: 0 };
    }
    policy.source = source.unwrap_or(policy.source);
    policy.scales = scales.unwrap_or(policy.scales);
    policy.mask = mask.unwrap_or(false);
    if policy.mask && !key.starts_with("fprop") {
        return fault(&format!("{key}.mask"), true, "false: only operands of fprop are masked");
    }
    policy.headroom = headroom.unwrap_or(1.0);
    // A correction makes up for values that smaller scales clip.
    let least = if policy.scales == ScaleChoice::Eden { 0.5 } else { 1.0 };
    if !(least..=16.0).contains(&policy.headroom) {
        return fault(&format!("{key}.headroom"), policy.headroom, &format!("{least} to 16"));
    }
    let changes = policy.scales != ScaleChoice::Rule || policy.headroom != 1.0 || policy.mask;
    if changes && !policy.has_fast_path() {
        return fault(key, scheme, "a symmetric scheme with scales, to change its scales");
    }
    if policy.scales == ScaleChoice::Eden {
        if !policy.takes_eden() {
            return fault(key, scheme, "nvfp4:4over6 to nearest, for scales by MS-EDEN");
        }
        if key.starts_with("fprop") {
            return fault(
                &format!("{key}.scales"),
                "eden",
                "rule in fprop: MS-EDEN is for rotated gradients",
            );
        }
    }
    if policy.scales == ScaleChoice::Deviation && !policy.takes_deviations() {
        return fault(
            key,
            scheme,
            "FP4 with power-of-two block scales, such as mxfp4, for scales by deviation",
        );
    }
    Ok(policy)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The output of `--show-policy` is the policy again, also under another name.
    #[test]
    fn printed_policies_are_read_back() {
        /// Reads `[precision]`.
        fn precision(text: &str) -> PolicyTable {
            let file: toml::Table = text.parse().unwrap();
            let mut faults = mantissa_options::Faults::default();
            let table = mantissa_options::read(file["precision"].as_table().unwrap(), "", &mut faults);
            assert!(faults.is_empty(), "{text}: {faults:?}");
            table
        }
        for name in Policy::names() {
            let policy = Policy::by_name(name, 7).unwrap();
            let text = policy.to_toml();
            let mut table = precision(&text);
            assert_eq!(table.policy(7).unwrap(), policy, "{text}");
            table.policy = "fp32".to_owned();
            let same = table.policy(7);
            // Loss scaling belongs to f16 weights, which the table states before it.
            assert_eq!(same.unwrap().linear, policy.linear, "{text}");
        }
    }

    #[test]
    fn wishes_that_cannot_be_met_are_named() {
        for (text, expected) in [
            ("policy = \"fp9\"", "policy fp9"),
            ("fprop.x = \"fp9\"", "fprop.x fp9"),
            ("fprop.accumulator = \"f16\"", "fprop.accumulator f16"),
            ("fprop.accumulator = \"hopper\"", "fprop.accumulator hopper"),
            ("fprop.hadamard = { order = 16 }", "dgrad.w.source exact"),
            ("dgrad.dy = { scheme = \"mxfp4\", mask = true }", "dgrad.dy.mask true"),
            ("fprop.x = { scheme = \"mxfp8-e4m3\", scales = \"deviation\" }", "fprop.x mxfp8-e4m3"),
            ("fprop.x = { scheme = \"bf16\", source = \"forward\" }", "fprop.x.source forward"),
            ("wgrad.hadamard = { order = 12 }", "wgrad.hadamard.order 12"),
            ("wgrad.hadamard = { order = 32, signs = \"te\" }", "wgrad.hadamard.order 32"),
            ("dgrad.dy = { scheme = \"q8_0\", headroom = 2.0 }", "dgrad.dy q8_0"),
            ("dgrad.dy = { scheme = \"mxfp4\", headroom = 0.5 }", "dgrad.dy.headroom 0.5"),
            ("master = \"remainder\"", "weights f32"),
            ("policy = \"bf16\"\nmaster = \"int8\"", "weights bf16"),
            ("scaling = \"pytorch\"", "scaling pytorch"),
        ] {
            let table: PolicyTable = mantissa_options::from_toml(text).unwrap();
            let fault = table.policy(1).unwrap_err();
            assert_eq!(format!("{} {}", fault.key, fault.found), expected, "{}", fault.allowed);
        }
        for (text, expected) in [
            (
                "dgrad.dy = { scheme = \"mxfp4\", round = \"up\" }",
                "dgrad.dy.round: expected nearest, stochastic, got \"up\"",
            ),
            ("keep = { last = 2.0 }", "keep.last: expected 0 to 1, got 2"),
            ("head = \"fp8\"", "head: expected f32, bf16, f16, got \"fp8\""),
            ("gradients = \"f16\"", "gradients: expected f32, bf16, got \"f16\""),
            (
                "wgrad.hadamard = { signs = \"te\" }",
                "wgrad.hadamard.order: expected a whole number of at least 1, got nothing",
            ),
        ] {
            assert_eq!(mantissa_options::from_toml::<PolicyTable>(text).unwrap_err(), expected);
        }
        let unknown =
            mantissa_options::from_toml::<PolicyTable>("fprop.x = { sheme = \"bf16\" }").unwrap_err();
        assert!(unknown.starts_with("fprop.x.sheme: expected scheme, "), "{unknown}");
    }
}
