//! Planted faults in a small workspace: each is found, and the sound workspace passes.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::check;

const ARCHITECTURE: &str = "\
| crate | charter |
|---|---|
| `mantissa-num` | numbers |
| `mantissa-store` | files |

| kind | enum | names | home | elsewhere |
|---|---|---|---|---|
| engine | `Engine` | `crates/mantissa-store/src/engine.rs` `name:` | `crates/mantissa-store/src/engine.rs` | 0 |
";

/// A sound workspace: four files in a row, two layers, one kind.
fn workspace() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let files = [
        ("ARCHITECTURE.md", ARCHITECTURE),
        ("Cargo.toml", "[workspace]\nmembers = [\"crates/*\"]\n"),
        ("crates/mantissa-num/Cargo.toml", "[package]\nname = \"mantissa-num\"\n"),
        ("crates/mantissa-num/src/lib.rs", "pub fn zero() -> u8 { 0 }\n"),
        (
            "crates/mantissa-store/Cargo.toml",
            "[package]\nname = \"mantissa-store\"\n\n[dependencies]\nmantissa-num.workspace = true\n",
        ),
        (
            "crates/mantissa-store/src/lib.rs",
            "// Layer: types.\nmod engine;\nmod file;\n\n// Layer: lists.\nmod list;\nmod top;\n\npub use file::File;\n",
        ),
        (
            "crates/mantissa-store/src/engine.rs",
            "pub enum Engine { Vllm, Mlx }\npub struct Row { pub name: &'static str }\n\
             pub const ROWS: [Row; 2] = [Row { name: \"vllm\" },\nRow { name: \"mlx\" }];\n\
             pub fn name(engine: Engine) -> &'static str { match engine { Engine::Vllm => \"vllm\", Engine::Mlx => \"mlx\" } }\n",
        ),
        (
            "crates/mantissa-store/src/file.rs",
            "use crate::engine::Engine;\npub struct File { pub engine: Engine }\n",
        ),
        (
            "crates/mantissa-store/src/list.rs",
            "use crate::File;\npub fn list() -> Vec<File> { Vec::new() }\n",
        ),
        ("crates/mantissa-store/src/top.rs", "pub fn count() -> usize { super::list::list().len() }\n"),
    ];
    for (path, text) in files {
        write(root.path(), path, text);
    }
    root
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn append(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    let old = fs::read_to_string(&path).unwrap();
    fs::write(path, old + text).unwrap();
}

/// The only problem after `text` is appended to a file of `mantissa-store`.
fn planted(file: &str, text: &str) -> String {
    let root = workspace();
    append(root.path(), &format!("crates/mantissa-store/src/{file}"), text);
    only(&root)
}

fn only(root: &TempDir) -> String {
    let problems = check(root.path()).unwrap().problems;
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.into_iter().next().unwrap()
}

#[test]
fn a_sound_workspace_has_no_problem() {
    let report = check(workspace().path()).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    assert_eq!(report.lines[1], "mantissa-store: 5 files, 3 imports, circles []");
}

#[test]
fn a_circle_is_named_with_its_way() {
    for import in [
        "use super::top::count;",
        "fn back() -> usize { crate::top::count() }",
        "fn back() { use crate::top::count; }",
    ] {
        let root = workspace();
        // One layer, so that only the circle is wrong.
        let lib = "mod engine;\nmod file;\nmod list;\nmod top;\npub use file::File;\n";
        write(root.path(), "crates/mantissa-store/src/lib.rs", lib);
        append(root.path(), "crates/mantissa-store/src/engine.rs", import);
        let problem = only(&root);
        assert!(problem.contains("circle of 4 files, expected at most 3"), "{problem}");
        assert!(problem.contains("engine.rs → top.rs → list.rs → file.rs → engine.rs"), "{problem}");
    }
}

#[test]
fn imports_of_tests_and_circles_of_three_are_allowed() {
    let root = workspace();
    append(
        root.path(),
        "crates/mantissa-store/src/engine.rs",
        "#[cfg(test)]\nmod tests { use crate::top::count; }\n",
    );
    append(root.path(), "crates/mantissa-store/src/list.rs", "use crate::top::count;\n");
    assert!(check(root.path()).unwrap().problems.is_empty());
}

#[test]
fn an_import_from_a_layer_above_is_found() {
    for import in [
        "use crate::list::list;\n",
        "fn up() { vec![crate::list::list()]; }\n",
        "mod inside { use super::super::list::list; }\n",
    ] {
        let problem = planted("engine.rs", import);
        assert!(
            problem.contains("engine.rs: layer \"types\" imports list of list.rs from layer \"lists\""),
            "{problem}"
        );
    }
}

#[test]
fn a_module_outside_the_layers_is_found() {
    let root = workspace();
    append(root.path(), "crates/mantissa-store/src/lib.rs", "#[path = \"beside.rs\"]\nmod beside_all;\n");
    write(root.path(), "crates/mantissa-store/src/beside.rs", "");
    assert!(check(root.path()).unwrap().problems.is_empty(), "it stands in the last layer");
    let lib = root.path().join("crates/mantissa-store/src/lib.rs");
    let text = fs::read_to_string(&lib).unwrap();
    fs::write(&lib, format!("mod early;\n{text}")).unwrap();
    write(root.path(), "crates/mantissa-store/src/early.rs", "");
    assert!(only(&root).contains("early: the root places it in no layer"));
}

#[test]
fn a_branch_on_a_kind_is_found() {
    for code in [
        "fn f(e: Engine) -> u8 { match e { Engine::Vllm => 0, _ => 1 } }",
        "fn f(e: Engine) -> bool { matches!(e, crate::engine::Engine::Mlx) }",
        "fn f(e: Engine) { if let Engine::Mlx = e {} }",
        "fn f(e: &str) -> u8 { match e { \"vllm\" => 0, _ => 1 } }",
        "fn f(e: Option<&str>) -> u8 { match e { Some(\"other\" | \"mlx\") => 0, _ => 1 } }",
    ] {
        let problem = planted("file.rs", code);
        assert!(problem.contains("file.rs:3: branches on "), "{problem}");
        assert!(problem.contains(" of kind engine outside its home"), "{problem}");
    }
}

#[test]
fn a_crate_uses_only_crates_above_it() {
    let root = workspace();
    let manifest = "crates/mantissa-num/Cargo.toml";
    append(root.path(), manifest, "\n[dependencies]\nserde = \"1\"\nmantissa-store = { path = \"x\" }\n");
    assert!(only(&root).contains("mantissa-num: uses mantissa-store"));
    write(root.path(), manifest, "[package]\n\n[dev-dependencies]\nmantissa-store.workspace = true\n");
    assert!(check(root.path()).unwrap().problems.is_empty());
}

#[test]
fn long_files_and_functions_are_found_but_tables_are_not() {
    let lines = |count: usize, line: &str| format!("{line}\n").repeat(count);
    assert!(
        planted("file.rs", &lines(600, "// text")).contains("file.rs: expected at most 600 lines, got 602")
    );
    let table = format!("pub const TABLE: &[u8] = &[\n{}];\n", lines(700, "    1,"));
    let root = workspace();
    append(root.path(), "crates/mantissa-store/src/file.rs", &table);
    assert!(check(root.path()).unwrap().problems.is_empty());
    let body = lines(99, "    ();");
    assert!(
        planted("file.rs", &format!("fn long() {{\n{body}}}\n"))
            .contains("fn long: expected at most 100 lines, got 101")
    );
    assert!(
        planted("file.rs", &format!("impl File {{ fn long() {{\n{body}}} }}\n"))
            .contains("fn long: expected at most")
    );
}

#[test]
fn a_name_of_two_kinds_belongs_to_either_home() {
    let root = workspace();
    let second = "| format | | `crates/mantissa-store/src/file.rs` `NAME` | `crates/mantissa-store/src/file.rs` | 0 |\n";
    append(root.path(), "ARCHITECTURE.md", second);
    let code = "pub const NAME: &str = \"mlx\";\nfn f(e: &str) -> u8 { match e { \"mlx\" => 0, _ => 1 } }\n";
    append(root.path(), "crates/mantissa-store/src/file.rs", code);
    assert!(check(root.path()).unwrap().problems.is_empty());
}

#[test]
fn branches_that_are_left_are_counted_and_only_fall() {
    let root = workspace();
    let code = "fn f(e: Engine) -> bool { matches!(e, Engine::Mlx) }\n";
    append(root.path(), "crates/mantissa-store/src/file.rs", code);
    let left = |number: usize| {
        let table = ARCHITECTURE.replace("| 0 |", &format!("| {number} |"));
        write(root.path(), "ARCHITECTURE.md", &table);
        check(root.path()).unwrap().problems
    };
    assert!(left(1).is_empty(), "{:?}", left(1));
    assert!(left(0)[0].contains("branches on Engine::Mlx"), "{:?}", left(0));
    assert!(left(2)[0].contains("kind engine: expected 2 branches elsewhere, got 1"), "{:?}", left(2));
}

#[test]
fn an_example_that_no_test_runs_is_found() {
    let root = workspace();
    let docs = "/// Doubles.\n///\n/// ```text\n/// 2 x\n/// ```\n///\n/// ```\n/// assert_eq!(double(2), 4);\n/// ```\npub fn double(x: u8) -> u8 { 2 * x }\n";
    append(root.path(), "crates/mantissa-store/src/top.rs", docs);
    assert!(check(root.path()).unwrap().problems.is_empty());
    append(root.path(), "crates/mantissa-store/Cargo.toml", "\n[lib]\ndoctest = false\n");
    assert!(
        only(&root).starts_with("crates/mantissa-store/src/top.rs:8: an example that no test runs"),
        "{}",
        only(&root)
    );
}

#[test]
fn a_program_linked_without_vectorization_is_found() {
    let root = workspace();
    let profile = |level: &str| {
        format!("[profile.release.package.mantissa-store]\nopt-level = {level}\n\n[other]\nopt-level = 0\n")
    };
    write(root.path(), "Cargo.toml", &profile("\"s\""));
    assert!(check(root.path()).unwrap().problems.is_empty());
    write(root.path(), "crates/mantissa-store/src/main.rs", "fn main() {}\n");
    assert!(only(&root).contains("opt-level \"s\" of the linked crate mantissa-store"), "{}", only(&root));
    let whole = "[profile.release]\nopt-level = \"z\" # small\n";
    write(root.path(), "Cargo.toml", whole);
    assert!(only(&root).contains("[profile.release]: opt-level \"z\""), "{}", only(&root));
    write(root.path(), "Cargo.toml", &(profile("3") + whole));
    assert!(check(root.path()).unwrap().problems.is_empty());
}
