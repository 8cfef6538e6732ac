//! Every topic answers for every kind of model and device, from texts whose placeholders all exist.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use super::expression::{Expression, Scope};
use super::topic::{Each, Line, TEXTS};
use super::value::{Row, Subject, Value};
use super::*;
use crate::hardware::Device;
use crate::parallel::Parallel;
use crate::recommend::Load;
use crate::shape::ModelShape;

/// Calls `test` with a subject: a model and a device by name, four sequences of 8192 tokens.
pub(super) fn with_subject(model: &str, device: &str, test: impl FnOnce(&Subject<'_>)) {
    let (shape, device) = (ModelShape::named(model).unwrap(), Device::named(device).unwrap());
    let usual = Load::usual(&shape, 1, Parallel::Tensor);
    let load = Load { context: 8192, batch: 4, prefill: 6144, decode: 1024, ..usual };
    test(&Subject::new(&Deployment { shape: &shape, device: &device, load: &load }));
}

/// Sections of the guide with a table, a list of causes or a question of their own.
const SECTIONS: [&str; 34] = [
    "1", "2.1", "2.2", "2.4", "3.1", "3.2", "3.4", "4.4", "4.5", "4.8", "4.9", "5.4", "5.5", "5.6", "6.1",
    "6.3", "6.6", "6.8", "6.9", "6.10", "7.2", "7.7", "7.8", "8.1", "8.7", "9.1", "9.2", "9.5", "11", "12.6",
    "15.1", "15.2", "15.3", "lecture",
];

/// Questions of the guide, its mistakes, its decision tree and tables, and the lesson's misunderstandings.
fn asked() -> BTreeSet<String> {
    let questions = (1..=8).map(|n| format!("13.{n}"));
    let mistakes = (1..=12).map(|n| format!("14.{n}"));
    let answers = (1..=15).map(|n| format!("Q{n}"));
    let lesson = (1..=5).map(|n| format!("lesson {n}"));
    let sections = SECTIONS.map(str::to_owned);
    questions
        .chain(mistakes)
        .chain(answers)
        .chain(lesson)
        .chain(sections)
        .chain(["15.4".to_owned()])
        .collect()
}

#[test]
fn every_standing_question_has_an_answer() {
    let answered: BTreeSet<String> = topics().flat_map(|topic| topic.answers.clone()).collect();
    let missing: Vec<_> = asked().difference(&answered).cloned().collect();
    let unknown: Vec<_> = answered.difference(&asked()).cloned().collect();
    assert!(missing.is_empty() && unknown.is_empty(), "missing {missing:?}, unknown {unknown:?}");
    let names: BTreeSet<_> = topics().map(|topic| &topic.name).collect();
    assert_eq!(names.len(), topics().count());
    let used: BTreeSet<u32> = topics().flat_map(|topic| topic.corrections.clone()).collect();
    assert_eq!(used, (1..=32).collect());
}

#[test]
fn every_file_of_topics_parses() {
    for text in TEXTS {
        toml::from_str::<Group>(text).unwrap();
    }
    let titles: BTreeSet<_> = groups().iter().map(|group| &group.title).collect();
    assert_eq!(titles.len(), TEXTS.len());
}

/// Every text parses, those of branches that no model takes included, and names only values that exist; every value and
/// every list is named by a text.
#[test]
fn texts_and_values_name_each_other() {
    let mut named = BTreeSet::new();
    let mut visit = |name: &str| {
        named.insert(name.to_owned());
    };
    for line in topics().flat_map(|topic| &topic.lines) {
        let text = match line {
            Line::Plain(text) => text,
            Line::Made(made) => {
                if let Some(condition) = &made.condition {
                    Expression::parse(condition).unwrap().names(&mut visit);
                }
                if let Some(Each::List(list)) = &made.each {
                    Expression::parse(list).unwrap().names(&mut visit);
                }
                &made.text
            }
        };
        template::names(&template::parse(text).unwrap(), &mut visit);
    }
    for figure in corrections::corrections().iter().flat_map(corrections::Correction::expressions) {
        Expression::parse(figure).unwrap().names(&mut visit);
    }
    let values: BTreeSet<String> = values::all().map(|(name, _)| (*name).to_owned()).collect();
    let known: BTreeSet<String> = values.iter().cloned().chain(lists::names().map(str::to_owned)).collect();
    let unknown: Vec<_> = named.difference(&known).filter(|name| !name.starts_with('$')).collect();
    let unused: Vec<_> = known.difference(&named).collect();
    assert!(unknown.is_empty() && unused.is_empty(), "unknown {unknown:?}, unused {unused:?}");
    assert_eq!(values.len(), values::all().count(), "two values have one name");
}

/// Every field of a list is stated by a text that has lines for its rows.
#[test]
fn fields_of_lists_are_used() {
    let mut used: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in topics().flat_map(|topic| &topic.lines) {
        let Line::Made(made) = line else { continue };
        let Some(Each::List(list)) = &made.each else { continue };
        let Expression::Named(name, arguments) = Expression::parse(list).unwrap() else { continue };
        let fields = used.entry(name.clone()).or_default();
        let mut visit = |name: &str| {
            fields.extend(name.strip_prefix('$').map(str::to_owned));
        };
        template::names(&template::parse(&made.text).unwrap(), &mut visit);
        if let Some(condition) = &made.condition {
            Expression::parse(condition).unwrap().names(&mut visit);
        }
        texts.insert(name, arguments);
    }
    with_subject("8B", "h100", |subject| {
        let row = Row::new();
        for (name, arguments) in &texts {
            let args = Scope { subject, row: &row }.arguments(name, arguments).unwrap();
            for row in lists::find(name).unwrap()(subject, &args).unwrap() {
                let unused: Vec<_> = row.iter().filter(|(field, _)| !used[name].contains(*field)).collect();
                assert!(unused.is_empty(), "{name}: {unused:?}");
            }
        }
    });
}

#[test]
fn answers_have_figures_everywhere() {
    for (model, device) in [
        ("32B", "rtx4090"),
        ("30B-A3B", "b200"),
        ("0.5B", "t4"),
        ("DeepSeek-V3", "mi300x"),
        ("8B", "v100"),
        ("1B", "m4-max"),
    ] {
        with_subject(model, device, |subject| {
            for topic in topics() {
                let lines = topic.checked(subject);
                assert!(lines.is_ok(), "{}: {lines:?}", topic.name);
                let lines = lines.unwrap();
                let text = lines.join("\n");
                assert!(
                    lines.len() >= 2 && text.contains(|c: char| c.is_ascii_digit()),
                    "{}: {text}",
                    topic.name
                );
                assert!(
                    !text.split(|c: char| !c.is_alphanumeric()).any(|word| ["NaN", "inf"].contains(&word)),
                    "{}: {text}",
                    topic.name
                );
                assert!(topic.measure.starts_with("mantissa "), "{}", topic.name);
            }
        });
    }
}

/// Values worked out by hand. DeepSeek-V3: 8 of 256 experts, in 61 - 3 layers; 7 (1 - (7/8)^8) = 4.595; 256 (1 -
/// (1 - 8/256)^64) = 222.4. Qwen3-30B-A3B: 8 of 128 in 48 layers. A layer of Llama 3.1 8B: attention 2 × 4096² + 2 × 4096
/// × 1024 = 41,943,040, MLP 3 × 4096 × 14,336 = 176,160,768; of Llama 2 7B: 4 × 4096² and 3 × 4096 × 11,008.
#[test]
fn values_are_those_worked_out_by_hand() {
    for (model, expression, right) in [
        ("8B", "moe_called", 8.0),
        ("8B", "moe_experts", 256.0),
        ("8B", "moe_layers", 58.0),
        ("8B", "moe_hidden", 7168.0),
        ("8B", "moe_reached(8)", 4.595),
        ("8B", "moe_read(64)", 222.4),
        ("30B-A3B", "moe_experts", 128.0),
        ("30B-A3B", "moe_layers", 48.0),
        ("30B-A3B", "expert_share", 0.0625),
        ("8B", "part_share(attention)", 0.19231),
        ("8B", "part_active(mlp)", 0.80769),
        ("8B", "part_share_of(mlp, Llama-2-7B)", 0.66840),
        ("30B-A3B", "part_share(mlp)", 0.0),
        ("8B", "recipe_moments(bf16-adam8)", 2.03125),
        ("8B", "100 * (1 - (1 + 4 / 128 + 2) / 4)", 24.21875),
    ] {
        with_subject(model, "h100", |subject| {
            let scope = Scope { subject, row: &Row::new() };
            let found = Expression::parse(expression).unwrap().evaluate(&scope).unwrap();
            let near = matches!(found, Value::Number(found) if (found - right).abs() <= 2e-4 * right);
            assert!(near, "{model}: {expression}: {found:?}, right is {right}");
        });
    }
}

/// What fits is chosen, and what does not is said: 405 B on one device, 8 B on several.
#[test]
fn scenarios_follow_the_model() {
    let field = |model: &str, list: &str, name: &str| {
        let mut found = Value::Absent;
        with_subject(model, "h100", |subject| {
            let Expression::Named(list, texts) = Expression::parse(list).unwrap() else { return };
            let row = Row::new();
            let args = Scope { subject, row: &row }.arguments(&list, &texts).unwrap();
            let rows = lists::find(&list).unwrap()(subject, &args).unwrap();
            found = rows[0].iter().find(|(field, _)| *field == name).unwrap().1.clone();
        });
        found
    };
    let words = Value::text;
    assert_eq!(field("405B", "serving(rtx4090, 8192, 1)", "precision"), Value::Absent);
    assert_eq!(field("8B", "serving(h100, 8192, 64)", "precision"), words("W8A8 FP8"));
    assert_eq!(field("405B", "fits_in(4e9, 2048)", "precision"), Value::Absent);
    assert_eq!(field("0.5B", "fits_in(4e9, 2048)", "precision"), words("Q8_0"));
    assert_eq!(field("70B", "fine_tuning(h100)", "recipe"), words("qlora"));
    // 16 bytes × 8.03 B = 128.5 GB, on two devices of 85.1 GB usable.
    assert_eq!(field("8B", "pretraining(h100)", "devices"), Value::Number(2.0));
}
