//! Learned scales in a policy: which operand may have them, and under which schemes.

use mantissa_num::{Blocks, Code, Format, Sense};

use super::fault::{Faulty, fault};
use super::operands::{LinearPolicy, OperandPolicy, OperandSource, ScaleChoice};

/// Operand whose scales may be learned.
const WEIGHT: &str = "fprop.w";

impl OperandPolicy {
    /// True if its scales are parameters that the optimizer trains.
    pub fn learns_scales(&self) -> bool {
        self.scales == ScaleChoice::Learned
    }

    /// True if the scheme is one of symmetric integers with a float scale per channel or group.
    fn takes_learned(&self) -> bool {
        let Format::Affine(affine) = &self.scheme.format else { return false };
        let floats = |code: &Code| matches!(code, Code::F32 | Code::Float(_));
        self.has_fast_path()
            && !self.is_stochastic()
            && matches!(affine.code, Code::Int(_))
            && matches!(affine.blocks, Blocks::Row | Blocks::Group(_))
            && affine.scale.as_ref().is_some_and(|tree| {
                floats(&tree.code) && tree.outer.is_none() && tree.sense == Sense::Multiplier
            })
    }
}

/// # Errors
/// [`TableFault`](super::TableFault) for learned scales of another operand than the forward's weight, of a scheme that
/// cannot have them, or without a backward that reads the rounded weight.
pub(super) fn check_learned(linear: &LinearPolicy) -> Faulty<()> {
    for (name, operand) in linear.operands() {
        if !operand.learns_scales() {
            continue;
        }
        let key = format!("{name}.scales");
        if name != WEIGHT {
            return fault(&key, "learned", "rule: only scales of fprop.w are learned");
        }
        if !operand.takes_learned() {
            let allowed = "a scheme of symmetric integers to nearest, with a scale per channel or group, such as \
                           int4-g32 or int8-channel, for learned scales";
            return fault(name, &operand.scheme, allowed);
        }
        if operand.mask {
            let allowed = "false with scales = \"learned\": clipped weights get no gradient already";
            return fault(&format!("{name}.mask"), true, allowed);
        }
        if operand.headroom != 1.0 {
            return fault(&format!("{name}.headroom"), operand.headroom, "1 with scales = \"learned\"");
        }
    }
    if !linear.fprop.right.learns_scales() {
        return Ok(());
    }
    if linear.fprop.rotation.is_some() {
        return fault("fprop.hadamard.order", "a rotation", "1 with fprop.w.scales = \"learned\"");
    }
    if linear.dgrad.right.source != OperandSource::Forward {
        let allowed = "forward with fprop.w.scales = \"learned\"; fix: dgrad.w = { scheme = \"f32\", source = \"forward\" }";
        return fault("dgrad.w.source", "exact", allowed);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_options::{Faults, from_toml, read};

    use crate::policy::PolicyTable;

    #[test]
    fn learned_scales_are_refused_where_they_cannot_be() {
        let ste = "dgrad.w = { scheme = \"f32\", source = \"forward\" }";
        let parsed = |text: &str| from_toml::<PolicyTable>(text).unwrap().policy(1);
        let weight = |keys: &str| format!("fprop.w = {{ {keys}, scales = \"learned\" }}\n{ste}");
        for scheme in ["int2-g32", "int3-g64", "int4-channel", "int8-channel:restricted"] {
            let policy = parsed(&weight(&format!("scheme = \"{scheme}\""))).unwrap();
            assert!(policy.linear.fprop.right.learns_scales(), "{scheme}");
            let again: toml::Table = toml::from_str(&policy.to_toml()).unwrap();
            let again = again["precision"].as_table().unwrap();
            let again: PolicyTable = read(again, "", &mut Faults::default());
            assert_eq!(again.policy(1).unwrap(), policy, "{scheme}");
        }
        for (text, expected) in [
            (weight("scheme = \"int4-g32-asym\""), "fprop.w int4-g32-asym"),
            (weight("scheme = \"nvfp4:te\""), "fprop.w nvfp4:te"),
            (weight("scheme = \"int8-tensor\""), "fprop.w int8-tensor"),
            (weight("scheme = \"int4-g32\", mask = true"), "fprop.w.mask true"),
            (weight("scheme = \"int4-g32\", headroom = 2.0"), "fprop.w.headroom 2"),
            ("fprop.w = { scheme = \"int4-g32\", scales = \"learned\" }".to_owned(), "dgrad.w.source exact"),
            (
                "fprop.x = { scheme = \"int8-token\", scales = \"learned\" }".to_owned(),
                "fprop.x.scales learned",
            ),
        ] {
            let fault = parsed(&text).unwrap_err();
            let found = format!("{} {}", fault.key, fault.found);
            assert!(found.starts_with(expected), "{found}: {}", fault.allowed);
        }
    }
}
