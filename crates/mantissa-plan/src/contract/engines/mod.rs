//! Every serving engine, a file for each. Sources name project, file and commit, or a documentation page. Engines
//! change: a rule holds for the version its source names.

mod exllamav2;
mod llama_cpp;
mod lmdeploy;
mod mantissa;
mod mlx;
mod sglang;
mod tensorrt_llm;
mod transformers;
mod vllm;

use super::engine::Engine;
use super::rule::Rule;
use super::rules;

/// Engines in the order of tables.
pub static ENGINES: [&Engine; 9] = [
    &vllm::ENGINE,
    &llama_cpp::ENGINE,
    &sglang::ENGINE,
    &lmdeploy::ENGINE,
    &transformers::ENGINE,
    &tensorrt_llm::ENGINE,
    &mlx::ENGINE,
    &exllamav2::ENGINE,
    &mantissa::ENGINE,
];

impl Engine {
    /// llama.cpp, which runs GGUF files.
    pub const LLAMA_CPP: &'static Engine = &llama_cpp::ENGINE;
    /// mantissa itself.
    pub const MANTISSA: &'static Engine = &mantissa::ENGINE;

    /// Returns the engine of this name, in any case.
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = name.to_lowercase();
        let own = ENGINES.into_iter().find(|engine| engine.name == name);
        own.or_else(|| ENGINES.into_iter().find(|engine| engine.typed.contains(&name.as_str())))
    }

    /// Returns the rules that apply to the engine: shared ones first, then its own, then those on embedding and head.
    pub fn all_rules(&'static self) -> impl Iterator<Item = &'static Rule> {
        let shared = |rules: &'static [Rule]| rules.iter().filter(|rule| self.shared.contains(&rule.id));
        shared(rules::SHARED).chain(self.rules).chain(shared(rules::HEADS))
    }

    /// Returns the rules that apply to no other engine.
    pub fn own_rules(&'static self) -> impl Iterator<Item = &'static Rule> {
        let others = move |id| ENGINES.into_iter().any(|other| other != self && other.shared.contains(id));
        self.all_rules().filter(move |rule| !others(&rule.id))
    }

    /// Source of the claim that the engine loads `convention`: the source of its rule about the format's schemes, or
    /// about formats.
    pub fn source(&'static self, convention: &str) -> &'static str {
        let format_rule = self.own_rules().find(|rule| rule.conventions.contains(&convention));
        format_rule.or_else(|| self.own_rules().next()).map_or("", |rule| rule.source)
    }
}

/// Returns every rule once: those shared by several engines first, then engine by engine, then those on embedding and
/// head.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    rules::SHARED.iter().chain(ENGINES.into_iter().flat_map(|engine| engine.rules)).chain(rules::HEADS)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
