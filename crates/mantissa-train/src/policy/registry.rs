//! Registry of policies: those by dtype, and the recipes below 16 bits.

use super::Policy;
use super::keys::PolicyTable;
use super::named::recipes;

impl Policy {
    /// Returns the policy of this name; `seed` is for stochastically rounded updates.
    pub fn by_name(name: &str, seed: u64) -> Option<Self> {
        let all = [
            Self::fp32(),
            Self::fp16(),
            Self::bf16(),
            Self::bf16_remainder(),
            Self::bf16_pure(),
            Self::bf16_pure_stochastic(seed),
        ];
        let recipe = recipes().iter().find(|recipe| recipe.name == name);
        let table = || PolicyTable::recipe(recipe?.name, seed);
        all.into_iter().find(|policy| policy.name == name).or_else(table)
    }

    /// Names that [`by_name`](Self::by_name) accepts.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::described().map(|(name, _)| name)
    }

    /// Names that [`by_name`](Self::by_name) accepts, each with a description.
    pub fn described() -> impl Iterator<Item = (&'static str, &'static str)> {
        MIXED.into_iter().chain(recipes().iter().map(|recipe| (recipe.name, recipe.about)))
    }

    /// Returns the policies that a name may mean which is none: a dtype as other programs spell it, or the beginning of
    /// names. The one to start with is first.
    pub fn meant_by(name: &str) -> Vec<&'static str> {
        let typed = name.trim().to_ascii_lowercase().replace('_', "-");
        let spelled = SPELLED.iter().find(|(other, _)| *other == typed);
        let first = spelled.map(|(_, name)| *name);
        let begun = |name: &&str| {
            !typed.is_empty() && name.strip_prefix(&*typed).is_some_and(|rest| rest.starts_with('-'))
        };
        let others = Self::names().filter(begun).filter(|name| Some(*name) != first);
        first.into_iter().chain(others).collect()
    }
}

/// Policies by dtype.
const MIXED: [(&str, &str); 6] = [
    ("fp32", "f32 throughout"),
    ("fp16", "f16 matmuls, f32 master copy, loss scaling"),
    ("bf16", "bf16 matmuls, f32 master copy"),
    ("bf16-remainder", "as bf16; bf16 weights with the low half of the f32 value beside them"),
    ("bf16-pure", "bf16 weights without a master copy, rounded to nearest"),
    ("bf16-pure-sr", "bf16 weights without a master copy, updates rounded stochastically"),
];

/// Names as other programs have them, with the policy to start with.
const SPELLED: [(&str, &str); 18] = [
    ("f32", "fp32"),
    ("float32", "fp32"),
    ("32", "fp32"),
    ("tf32", "fp32"),
    ("f16", "fp16"),
    ("float16", "fp16"),
    ("half", "fp16"),
    ("16", "fp16"),
    ("16-mixed", "fp16"),
    ("bfloat16", "bf16"),
    ("bf16-mixed", "bf16"),
    ("fp8", "fp8-current"),
    ("float8", "fp8-current"),
    ("fp8-tensorwise", "fp8-current"),
    ("int8", "int8-rowwise"),
    ("fp4", "nvfp4"),
    ("mxfp4", "quartet"),
    ("bitnet", "ternary"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_policy() {
        for name in Policy::names() {
            assert!(Policy::by_name(name, 1).is_some_and(|policy| policy.name == name), "{name}");
        }
        assert_eq!(Policy::by_name("fp64", 1), None);
    }

    #[test]
    fn other_spellings_lead_to_policies() {
        for (typed, first) in SPELLED {
            assert!(Policy::by_name(typed, 1).is_none(), "{typed} is a policy");
            assert!(Policy::by_name(first, 1).is_some() && Policy::meant_by(typed)[0] == first, "{typed}");
        }
        let fp8 = ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-blockwise"];
        assert_eq!(Policy::meant_by("FP8"), fp8);
        assert!(Policy::meant_by("").is_empty() && Policy::meant_by("fp64").is_empty());
    }
}
