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
        const MIXED: [&str; 6] = ["fp32", "fp16", "bf16", "bf16-remainder", "bf16-pure", "bf16-pure-sr"];
        MIXED.into_iter().chain(recipes().iter().map(|recipe| recipe.name))
    }
}

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
}
