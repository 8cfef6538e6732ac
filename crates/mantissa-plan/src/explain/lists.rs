//! Lists of which a text makes a line for each row.

use super::corrections::corrections;
use super::scenarios::{fine_tuning, fits_in, pretraining, serving};
use super::value::{Args, Fault, List, Row, Subject, Value};
use crate::contract::{ENGINES, Engine, LOADS, Load};
use crate::memory::inference;
use crate::parallel::{PARALLELS, Parallel, Split};
use crate::precision::{KVS, PRECISIONS};
use crate::recommend;
use crate::roofline::Setup;

/// Lists by name.
const LISTS: [(&str, List); 17] = [
    ("precisions", |_, _| Ok(PRECISIONS.iter().map(|p| vec![("name", Value::text(p.name))]).collect())),
    ("kvs", |_, _| Ok(KVS.iter().map(|kv| vec![("name", Value::text(kv.name))]).collect())),
    ("plan_rows", plan_rows),
    ("plan_reasons", |s, _| Ok(texts(&s.plan().recommendation.reasons))),
    ("plan_changes", |s, _| Ok(texts(&s.plan().recommendation.changes))),
    ("train_reasons", |s, _| Ok(texts(&s.train().reasons))),
    ("train_changes", |s, _| Ok(texts(&s.train().changes))),
    ("parallels", parallels),
    ("depths", |s, _| Ok(depths(s))),
    ("loads", |_, _| Ok(LOADS.iter().map(load_test).collect())),
    ("engines", |_, _| Ok(engines())),
    ("best", |s, _| Ok(best(s))),
    ("serving", serving),
    ("fits_in", fits_in),
    ("fine_tuning", fine_tuning),
    ("pretraining", pretraining),
    ("corrections", |s, _| corrected(s)),
];

/// Finds a list.
pub(super) fn find(name: &str) -> Option<List> {
    LISTS.into_iter().find(|(known, _)| *known == name).map(|(_, list)| list)
}

/// Returns the name of every list.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    LISTS.into_iter().map(|(name, _)| name)
}

/// Makes a row of each text.
fn texts(lines: &[String]) -> Vec<Row> {
    lines.iter().map(|line| vec![("text", Value::text(line))]).collect()
}

/// Rows of the plan for the load: the precisions that are named, in their order, or all.
fn plan_rows(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let rows = &subject.plan().rows;
    let of = |row: &recommend::Row| {
        let engines = (!row.loads.engines.is_empty()).then(|| row.loads.engines.join(", "));
        vec![
            ("name", Value::text(row.precision.name)),
            ("weights", Value::Number(row.bytes.weights())),
            ("bytes", Value::Number(row.bytes.total())),
            ("kv", Value::text(row.kv.name)),
            ("decode", Value::Number(row.decode.tokens_per_s[1])),
            ("prompt", Value::Number(row.prefill.tokens_per_s[1])),
            ("unit", Value::text(row.execution.unit.name())),
            ("fallback", Value::words(row.execution.fallback.clone())),
            ("engines", Value::words(engines)),
            ("refusal", Value::words(row.refusal())),
        ]
    };
    if args.list.is_empty() {
        return Ok(rows.iter().map(of).collect());
    }
    for index in 0..args.list.len() {
        args.precision(index)?;
    }
    Ok(args
        .texts_from(0)
        .filter_map(|name| rows.iter().find(|row| row.precision.name == name))
        .map(of)
        .collect())
}

/// Load test that passed.
fn load_test(load: &Load) -> Row {
    vec![
        ("reader", Value::text(load.reader)),
        ("format", Value::text(load.format)),
        ("schemes", Value::text(load.schemes.join(", "))),
        ("version", Value::text(load.version)),
        ("date", Value::text(load.date)),
    ]
}

/// Engines other than our own, each with the source of its rules.
fn engines() -> Vec<Row> {
    let of = |engine: &'static Engine| {
        // The rule on checkpoint formats, which names a version.
        let formats = engine.own_rules().find(|rule| rule.id.ends_with("-convention"));
        let source = formats.or_else(|| engine.own_rules().next()).map(|rule| rule.source);
        vec![("name", Value::text(engine.title)), ("source", Value::words(source))]
    };
    ENGINES.into_iter().filter(|engine| *engine != Engine::MANTISSA).map(of).collect()
}

/// Figure of which the best row has least.
type Cost = fn(&recommend::Row) -> f64;

/// Precisions that run on the device: those with the least loss, the least memory and the fastest decoding.
fn best(subject: &Subject<'_>) -> Vec<Row> {
    let runs = || subject.plan().rows.iter().filter(|row| row.refusal().is_none());
    let corners: [(&str, Cost); 3] = [
        ("least loss", |row| row.precision.measured_kl().unwrap_or(f64::INFINITY)),
        ("least memory", |row| row.bytes.total()),
        ("fastest decoding", |row| -row.decode.tokens_per_s[1]),
    ];
    let of = |(what, cost): (&str, Cost)| {
        let row = runs().min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
        Some(vec![
            ("what", Value::text(what)),
            ("name", Value::text(row.precision.name)),
            ("kl", Value::number(row.precision.measured_kl())),
            ("bytes", Value::Number(row.bytes.total())),
            ("decode", Value::Number(row.decode.tokens_per_s[1])),
        ])
    };
    corners.into_iter().filter_map(of).collect()
}

/// Tokens of a short, a middle and a long sequence of the model.
fn depths(subject: &Subject<'_>) -> Vec<Row> {
    let longest = subject.deployment.shape.context.clamp(2048, 131_072);
    [1024, longest / 4, longest].map(|tokens| vec![("tokens", Value::Number(tokens as f64))]).to_vec()
}

/// Bytes that each of so many devices (argument 0) holds under every way of sharing that suits the model, in BF16.
fn parallels(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let (shape, load) = (subject.deployment.shape, subject.deployment.load);
    let (devices, batch) = (args.count(0)?, args.count(1)?);
    let of = |by: Parallel| {
        let split = Split { devices, by };
        let bytes = inference(shape, &PRECISIONS[0], &KVS[0], load.context, batch, split);
        let setup = Setup { split, ..subject.setup(&PRECISIONS[0], &KVS[0]) };
        vec![
            ("name", Value::text(by.name())),
            ("weights", Value::Number(bytes.weights())),
            ("cache", Value::Number(bytes.kv)),
            ("decode", Value::Number(setup.decode(batch, load.depth()).tokens_per_s[1])),
        ]
    };
    Ok(PARALLELS.into_iter().filter(|by| by.suits(shape)).map(of).collect())
}

/// Statements that are often made and wrong, with their computed figures.
fn corrected(subject: &Subject<'_>) -> Result<Vec<Row>, Fault> {
    let of = |correction: &super::corrections::Correction| {
        Ok(vec![
            ("id", Value::Number(f64::from(correction.id))),
            ("said", Value::text(&correction.said)),
            ("right", Value::text(&correction.right)),
            ("source", Value::text(&correction.source)),
            ("computed", Value::words(correction.computed(subject)?)),
        ])
    };
    corrections().iter().map(of).collect()
}
