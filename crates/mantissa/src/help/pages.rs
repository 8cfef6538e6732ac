//! Pages of the documentation, which `mantissa help PAGE` shows: an installed program has no folder `docs`.

use mantissa_plan::contract::{ENGINES, Engine};
use mantissa_plan::hardware::GPUS;
use serde::Serialize;

/// Page of the documentation: its name, which is its path without `docs/` and `.md`, and its text.
type Page = (&'static str, &'static str);

macro_rules! page {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../../docs/", $name, ".md")))
    };
}

/// Every page.
const PAGES: &[Page] = &[
    page!("explain/arithmetic"),
    page!("explain/diagnose"),
    page!("explain/doctor"),
    page!("explain/gguf-search"),
    page!("explain/methods"),
    page!("explain/performance"),
    page!("explain/plan"),
    page!("explain/transforms"),
    page!("glossary"),
    page!("guide/calibration"),
    page!("guide/cast"),
    page!("guide/compare"),
    page!("guide/convert"),
    page!("guide/demo"),
    page!("guide/diagnose"),
    page!("guide/distill"),
    page!("guide/distributed"),
    page!("guide/doctor"),
    page!("guide/evaluate"),
    page!("guide/finetune"),
    page!("guide/fit"),
    page!("guide/gguf"),
    page!("guide/kv-cache"),
    page!("guide/lint"),
    page!("guide/plan"),
    page!("guide/pull"),
    page!("guide/python"),
    page!("guide/quantize"),
    page!("guide/quantized-sources"),
    page!("guide/run"),
    page!("guide/serve"),
    page!("guide/train"),
    page!("guide/train-numerics"),
    page!("guide/verify"),
    page!("guide/vllm"),
    page!("reference/architectures"),
    page!("reference/cli"),
    page!("reference/formats"),
    page!("reference/gguf"),
    page!("reference/hostile-input"),
    page!("reference/json"),
    page!("reference/kv-cache"),
    page!("reference/outputs"),
    page!("reference/recipes"),
    page!("reference/schemes"),
    page!("reference/server"),
    page!("reference/tasks"),
    page!("reference/training"),
    page!("results/README"),
    page!("results/arithmetic"),
    page!("results/distributed"),
    page!("results/doctor"),
    page!("results/fit"),
    page!("results/gguf"),
    page!("results/interop"),
    page!("results/kv-cache"),
    page!("results/outliers"),
    page!("results/plan"),
    page!("results/python"),
    page!("results/real"),
    page!("results/server"),
    page!("results/speed"),
    page!("results/tasks"),
    page!("results/training"),
    page!("results/weights"),
];

/// Name of the list of pages.
const LIST: &str = "docs";

/// Name of the list of GPUs.
const LIST_OF_GPUS: &str = "gpus";

/// Name of the list of engines.
const LIST_OF_ENGINES: &str = "engines";

/// Returns the text that `mantissa help NAME` shows: a page by its name or the last part of it, with or without `docs/` and
/// `.md`, the list of the pages that share that part, or another list. Names of commands are `taken`.
pub fn find(name: &str, taken: impl Fn(&str) -> bool) -> Option<String> {
    let name = name.to_lowercase();
    if taken(&name) {
        return None;
    }
    match &*name {
        LIST => return Some(list()),
        LIST_OF_GPUS => return Some(gpus()),
        LIST_OF_ENGINES => return Some(engines()),
        _ => {}
    }
    let bare = name.strip_prefix("docs/").unwrap_or(&name);
    let bare = bare.strip_suffix(".md").unwrap_or(bare);
    if let Some((_, text)) = PAGES.iter().find(|(page, _)| *page == bare) {
        return Some((*text).to_owned());
    }
    let ending: Vec<&Page> =
        PAGES.iter().filter(|(page, _)| page.rsplit('/').next().is_some_and(|last| last == bare)).collect();
    match ending.as_slice() {
        [] => None,
        [(_, text)] => Some((*text).to_owned()),
        several => Some(format!("Pages named {bare}:\n\n{}", lines(several.iter().copied()))),
    }
}

/// Term of the glossary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GlossaryEntry {
    /// Term, with its other names.
    pub term: String,
    /// Meaning.
    pub meaning: String,
}

/// Finds a term of the glossary by its name, one of its other names, or a word of it.
pub fn glossary_entry(name: &str) -> Option<GlossaryEntry> {
    let (_, text) = PAGES.iter().find(|(page, _)| *page == "glossary")?;
    let rows = || {
        text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | ")).skip(1)
    };
    let wanted = stem(name.trim());
    let is = |part: &str| stem(part.trim()) == wanted;
    let named = || rows().find(|(term, _)| term.split([',', '(', ')']).any(is));
    let with_word = || rows().find(|(term, _)| term.split(|c: char| !c.is_alphanumeric()).any(is));
    let (term, meaning) = named().or_else(with_word).filter(|_| !wanted.is_empty())?;
    Some(GlossaryEntry { term: term.to_owned(), meaning: without_links(meaning) })
}

/// Returns a word in lower case without the ending of its plural.
pub fn stem(word: &str) -> String {
    let word = word.to_lowercase();
    let is_plural = word.chars().count() > 3 && !word.ends_with("ss");
    match (word.strip_suffix("ies"), word.strip_suffix('s')) {
        (Some(stem), _) if is_plural => format!("{stem}y"),
        (_, Some(stem)) if is_plural => stem.to_owned(),
        _ => word,
    }
}

/// Returns a line of Markdown with the texts of its links alone.
fn without_links(line: &str) -> String {
    let mut shown = String::new();
    let mut rest = line;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((text, after)) = link.split_once("](") else { break };
        let Some((_, after)) = after.split_once(')') else { break };
        shown += before;
        shown += text;
        rest = after;
    }
    shown + rest
}

/// Lists the pages with their titles.
fn list() -> String {
    format!("Pages of the documentation:\n\n{}", lines(PAGES))
}

/// Returns a line for each page, with its title.
fn lines<'a>(pages: impl IntoIterator<Item = &'a Page>) -> String {
    let title =
        |text: &str| text.lines().next().unwrap_or_default().trim_start_matches('#').trim().to_owned();
    let line = |(name, text): &Page| format!("  mantissa help {name:<24} {}\n", title(text));
    pages.into_iter().map(line).collect()
}

/// Lists the engines that `--for` takes.
fn engines() -> String {
    let line = |engine: &&Engine| {
        let others = engine.typed.join(", ");
        let others = if others.is_empty() { others } else { format!("; also: {others}") };
        format!("  {:<16} {}{others}\n", engine.name, engine.title)
    };
    format!("Engines for --for:\n\n{}", ENGINES.iter().map(line).collect::<String>())
}

/// Lists the GPUs that `gpu=NAME` takes.
fn gpus() -> String {
    let line = |gpu: &mantissa_plan::hardware::Gpu| {
        format!("  {:<16} SM {}.{}\n", gpu.name, gpu.sm / 10, gpu.sm % 10)
    };
    let all: String = GPUS.iter().map(line).collect();
    format!(
        "GPUs for --for ENGINE:gpu=NAME, also without rtx (4090) or as sold (RTX 4070 Ti):\n\n{all}\nOr a compute capability, such as sm90. With figures: mantissa plan --hardware list\n"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_page_of_the_documentation_is_there() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for folder in ["guide", "reference", "explain", "results"] {
            for entry in fs::read_dir(docs.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "md") {
                    let name = format!("{folder}/{}", path.file_stem().unwrap().to_str().unwrap());
                    assert!(PAGES.iter().any(|(page, _)| *page == name), "{name}");
                }
            }
        }
    }

    #[test]
    fn terms_are_found_by_their_names_and_words() {
        let term = |name: &str| glossary_entry(name).map(|entry| entry.term);
        assert_eq!(term("kl").as_deref(), Some("KL divergence (KL)"));
        assert_eq!(term("e5m2").as_deref(), Some("E2M1, E4M3, E5M2, E8M0"));
        assert_eq!(term("Hadamard").as_deref(), Some("Hadamard matrix"));
        assert_eq!(term("outliers").as_deref(), Some("outlier"));
        assert_eq!((term("term"), term(""), term("xyzzy")), (None, None, None));
        assert!(glossary_entry("flatquant").unwrap().meaning.ends_with("; not built"));
    }

    #[test]
    fn pages_are_found_by_name() {
        let none = |_: &str| false;
        let weights = find("results/weights", none).unwrap();
        assert_eq!(find("docs/results/weights.md", none), Some(weights.clone()));
        assert_eq!(find("Weights", none), Some(weights));
        // More than one page has this name.
        let tasks = find("tasks", none).unwrap();
        assert!(tasks.starts_with("Pages named tasks:\n\n  mantissa help reference/tasks "), "{tasks}");
        assert_eq!((tasks.lines().count(), tasks.contains("results/tasks ")), (4, true), "{tasks}");
        assert_eq!(find("tasks.md", none), Some(tasks));
        assert_eq!((find("weights", |name| name == "weights"), find("nothing", none)), (None, None));
        assert!(find("docs", none).unwrap().contains("mantissa help reference/training"));
        assert!(find("gpus", none).unwrap().contains("rtx5070ti"));
        assert!(find("engines", none).unwrap().contains("llama.cpp"));
    }
}
