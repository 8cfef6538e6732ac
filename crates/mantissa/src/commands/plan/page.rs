//! HTML page of a plan: verdict, speed against memory, table.

use mantissa_plan::recommend::{Answer, Load, TrainAnswer};
use mantissa_plan::training::Run;

use super::asked::Asked;
use super::{text, training_text};
use crate::report::{Axis, Html, Page, Point, Scatter, Style, facts, table, tiles};

/// Facts under the title.
fn about(asked: &Asked<'_>) -> Html {
    facts([
        ("model", asked.shape.name.clone()),
        ("parameters", mantissa_plan::shape::billions(asked.shape.parameters())),
        ("hardware", asked.device.title.to_string()),
        ("source of its figures", asked.device.source.to_string()),
    ])
}

/// Makes the page of a plan for inference.
pub fn inference(asked: &Asked<'_>, load: &Load, answer: &Answer) -> Page {
    let choice = &answer.recommendation;
    let mut page = Page::new(&format!("Plan: {} on {}", asked.shape.name, asked.device.title));
    let headline = text::headline(answer);
    page.push(Html::lead(&match choice.precision {
        Some(_) => format!("Choose {headline}."),
        None => format!("{}.", headline.replacen("nothing", "Nothing", 1)),
    }));
    page.push(Html::paragraph(&asked.title()));
    page.push(about(asked));
    if let Some(row) = answer.chosen() {
        page.push(tiles([
            (
                "memory",
                crate::output::bytes(row.bytes.total() as u64),
                format!("{} × {} tokens", load.batch, load.context),
            ),
            (
                "decoding",
                format!("{} tok/s", text::interval(row.decode.tokens_per_s)),
                format!("waits for {}", row.decode.bound.words()),
            ),
            (
                "prompts",
                format!("{} tok/s", text::interval(row.prefill.tokens_per_s)),
                format!("{} tokens", load.prefill),
            ),
            ("loss", text::loss(row), "KL on our models, nats/token".to_owned()),
        ]));
    }
    page.push(Html::caution(
        "All bytes and speeds are predicted from sizes and limits; losses were measured on our own models.",
    ));
    page.push(Html::heading("Reasons"));
    page.push(Html::list(&choice.reasons));
    page.push(Html::heading("What would change it"));
    page.push(Html::list(&choice.changes));
    if let Some(plot) = plot(answer) {
        page.push(Html::heading("Time of a token against memory"));
        page.push(plot);
    }
    page.push(Html::heading("Candidates"));
    page.push(table("candidate precisions", &text::table(answer)));
    if let Some(splits) = text::offload_table(answer) {
        page.push(Html::heading("Layers on the GPU and on the host"));
        page.push(Html::paragraph(&text::offload_words(load)));
        page.push(table("layers on the GPU and on the host", &splits));
    }
    let refused: Vec<String> = answer
        .rows
        .iter()
        .filter_map(|row| Some(format!("{}: {}", row.precision.name, row.refusal()?)))
        .collect();
    if !refused.is_empty() {
        page.push(Html::heading("Not run as named"));
        page.push(Html::list(&refused));
    }
    page
}

/// Groups of the points of the chart.
const GROUPS: [&str; 3] = ["chosen", "fits", "does not fit"];

/// A blue diamond, a green circle, an orange triangle.
const STYLES: [Style; 3] =
    [Style { shape: 3, colour: 0 }, Style { shape: 0, colour: 2 }, Style { shape: 2, colour: 1 }];

/// Draws the time of a token against bytes, of the candidates that run.
fn plot(answer: &Answer) -> Option<Html> {
    let chosen = answer.recommendation.precision;
    let runs = answer.rows.iter().filter(|row| row.refusal().is_none());
    let points = runs.map(|row| Point {
        x: row.bytes.total() / 1e9,
        y: 1e3 / row.decode.tokens_per_s[1],
        label: row.precision.name.to_owned(),
        group: if Some(row.precision.name) == chosen { 0 } else { 2 - usize::from(row.fits) },
    });
    let points = points.collect();
    let (x, y) = (Axis::log("GB of memory"), Axis::log("ms for a token"));
    let (groups, styles, named) = (&GROUPS, &STYLES, Some(0));
    Scatter { title: "Time against memory", x, y, groups, styles, named, points }.html()
}

/// Makes the page of a plan for training.
pub fn training(asked: &Asked<'_>, run: &Run, answer: &TrainAnswer) -> Page {
    let mut page = Page::new(&format!("Training plan: {} on {}", asked.shape.name, asked.device.title));
    page.push(Html::lead(&format!("Choose {}.", training_text::headline(answer))));
    page.push(Html::paragraph(&format!("{} {}.", asked.title(), training_text::run_words(run))));
    page.push(about(asked));
    page.push(Html::caution("All bytes and speeds are predicted."));
    page.push(Html::heading("Reasons"));
    page.push(Html::list(&answer.reasons));
    page.push(Html::heading("What would change it"));
    page.push(Html::list(&answer.changes));
    page.push(Html::heading("Recipes"));
    page.push(table("training recipes", &training_text::table(answer)));
    if let Some(found) = training_text::exchanges(answer) {
        page.push(Html::heading("Exchange of a step"));
        page.push(table("exchanges of a step", &found));
    }
    page
}
