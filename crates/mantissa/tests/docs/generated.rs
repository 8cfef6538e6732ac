//! Parts of pages between `<!-- generated: NAME -->` and `<!-- end generated -->` are what the binary says.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Mutex;

use mantissa_methods::{METHODS, TRANSFORMS};
use mantissa_model::Architecture;
use mantissa_store::convention::Container;

use crate::support::left_to_nightly;
use crate::tables::{self, Demo};
use crate::{engines, figures, pages, root, shown};

const BEGIN: &str = "<!-- generated: ";
const END: &str = "<!-- end generated -->";

/// Tables of a run's settings in the order of the page; adapters have a part of their own.
const TRAIN_TABLES: [&str; 12] = [
    "",
    "model",
    "data",
    "validation",
    "samples",
    "distill",
    "precision",
    "optimizer",
    "schedule",
    "checkpoint",
    "telemetry",
    "parallel",
];

/// Pages are written one at a time.
static WRITING: Mutex<()> = Mutex::new(());

#[test]
fn demo_tables_match_a_run() {
    if std::env::var_os("UPDATE_DOCS").is_none() && left_to_nightly() {
        return;
    }
    let demo = Demo::run();
    part("demo-table", &demo.table(), &|shown, ran| agree(shown, ran, 1.01e-4));
    part("demo-output", &demo.output(), &|shown, ran| agree(shown, ran, 2.01e-5));
}

#[test]
fn references_match_the_binary() {
    part("cli", &tables::commands(), &str::eq);
    part("recipes", &tables::recipes(), &str::eq);
    part("schemes", &tables::schemes(), &str::eq);
    part("keys", &tables::keys(), &str::eq);
    part("recipe-keys", &tables::recipe_keys(), &str::eq);
    part("train-keys", &tables::settings(&TRAIN_TABLES), &str::eq);
    part("adapter-keys", &tables::settings(&["adapter"]), &str::eq);
    part("optimizer-keys", &tables::own_keys(), &str::eq);
    part("precision-keys", &tables::precision_keys(), &str::eq);
    part("engines", &engines::sources(), &str::eq);
    part("load-tests", &engines::loads(), &str::eq);
    part("offers", &figures::offers(), &str::eq);
    part("figures-ref-32m", &figures::of_model("ref-32m"), &str::eq);
}

#[test]
fn every_method_is_named_and_explained() {
    for page in ["docs/reference/recipes.md", "docs/explain/methods.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        for method in METHODS {
            assert!(text.contains(&format!("`{}`", method.name)), "{page}: no `{}`", method.name);
        }
    }
    for page in ["docs/reference/recipes.md", "docs/explain/transforms.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        for transform in TRANSFORMS {
            assert!(text.contains(&format!("`{}`", transform.name)), "{page}: no `{}`", transform.name);
        }
    }
}

#[test]
fn every_architecture_and_format_is_listed() {
    let architectures = fs::read_to_string(root().join("docs/reference/architectures.md")).unwrap();
    for architecture in Architecture::all() {
        assert!(architectures.contains(&format!("`{}`", architecture.name)), "no `{}`", architecture.name);
    }
    let formats = fs::read_to_string(root().join("docs/reference/formats.md")).unwrap();
    for format in Container::names() {
        assert!(formats.contains(&format!("`{format}`")), "no `{format}`");
    }
}

#[test]
fn every_generated_part_is_checked() {
    let known = BTreeSet::from([
        "demo-table",
        "demo-output",
        "cli",
        "recipes",
        "schemes",
        "keys",
        "recipe-keys",
        "train-keys",
        "adapter-keys",
        "optimizer-keys",
        "precision-keys",
        "engines",
        "load-tests",
        "offers",
        "figures-ref-32m",
    ]);
    for page in pages() {
        for rest in page.text.split(BEGIN).skip(1).filter(|_| !page.path.ends_with("CONTRIBUTING.md")) {
            let name = rest.split(" -->").next().unwrap();
            assert!(known.contains(name), "{}: generated: {name}", shown(&page.path));
        }
    }
}

/// Compares all parts of this name with `text`, or writes them where `UPDATE_DOCS` is set.
fn part(name: &str, text: &str, agree: &dyn Fn(&str, &str) -> bool) {
    let _writing = WRITING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let begin = format!("{BEGIN}{name} -->\n");
    let mut found = 0;
    for page in pages() {
        let Some((before, rest)) = page.text.split_once(&begin) else { continue };
        let (old, after) = rest.split_once(END).expect("a generated part has an end");
        found += 1;
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&page.path, format!("{before}{begin}{text}{END}{after}")).unwrap();
        } else {
            assert!(
                agree(old, text),
                "{}: {name} is not current; UPDATE_DOCS=1 writes it. Expected:\n{text}",
                shown(&page.path)
            );
        }
    }
    assert!(found > 0, "no page has the part {name}");
}

/// True if two texts differ only in the last digits of measured figures, which depend on the processor's order of
/// sums: numbers with more than two decimals, by at most two per cent and a step.
fn agree(shown: &str, ran: &str, step: f64) -> bool {
    let (shown, ran): (Vec<_>, Vec<_>) =
        (shown.split_whitespace().collect(), ran.split_whitespace().collect());
    let decimals = |word: &str| word.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let close = |(a, b): (&&str, &&str)| match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(x), Ok(y)) if decimals(a) > 2 => (x - y).abs() <= 0.02 * x.abs() + step,
        _ => a == b,
    };
    shown.len() == ran.len() && shown.iter().zip(&ran).all(close)
}

#[test]
fn other_figures_do_not_agree() {
    assert!(agree("w8a8 1.61 MB 0.00318", "w8a8 1.61 MB 0.00319", 1e-5));
    assert!(!agree("w8a8 1.61 MB 0.00318", "w8a8 1.62 MB 0.00318", 1e-5));
    assert!(!agree("w8a8 0.0318", "w8a8 0.0418", 1e-5));
    assert!(!agree("w8a8 0.0318", "w8a8", 1e-5));
}
