//! HTML page of a quantized model.

use mantissa_quant::{ErrorReport, Figures, LayerReport, Quality};

use crate::output::{Align, Table, bytes, count, number, shape};
use crate::report::{Axis, Html, Page, Point, Scatter, table};

/// Maximum number of schemes with their own color.
const MAX_SCHEMES: usize = 8;

/// Makes the page of the model `name` from its quality report.
pub fn page(name: &str, quality: &Quality) -> Page {
    let mut page = Page::new(&format!("Quantized model {name}"));
    page.push(table(&summary(quality)));
    match &quality.evaluation {
        Some(figures) => {
            page.push(Html::heading("Quality"));
            page.push(table(&evaluation(figures)));
        }
        None => {
            page.push(Html::paragraph(
                "Quality not measured. Run mantissa quantize with --text or --tokens to measure it.",
            ));
        }
    }
    page.push(Html::heading("Layers"));
    page.push(Html::grid([errors_by_layer(&quality.layers), errors_by_bits(&quality.layers)]));
    page.push(Html::details("All quantized layers", [table(&layers(&quality.layers))]));
    page.push(Html::details("All other tensors", [table(&tensors(quality))]));
    for (heading, lines) in [
        ("Fallbacks", &quality.fallbacks),
        ("Layers kept unquantized", &quality.kept),
        ("Notes", &quality.notes),
    ] {
        if !lines.is_empty() {
            page.push(Html::heading(heading));
            page.push(Html::preformatted(&lines.join("\n")));
        }
    }
    page.push(Html::heading("Hashes"));
    page.push(table(&hashes(quality)));
    page
}

fn summary(quality: &Quality) -> Table {
    let mut table = Table::new([("", Align::Left), ("", Align::Left)]);
    let mut row = |what: &str, value: String| table.row([what.to_owned(), value]);
    row("recipe", quality.recipe.clone());
    row("method", quality.method.clone());
    row("weights", quality.weights.clone());
    row("activations", quality.activations.clone().unwrap_or_else(|| "unquantized".to_owned()));
    row("format", quality.container.clone());
    row("bits per weight of quantized layers, by scheme", number(Some(quality.linear_bits_per_weight), 4));
    if quality.linear_stored_bits_per_weight.is_some() {
        row(
            "bits per weight of quantized layers, as stored",
            number(quality.linear_stored_bits_per_weight, 4),
        );
    }
    row("bits per weight of all tensors", number(Some(quality.bits_per_weight), 4));
    row("size", bytes(quality.bytes));
    row("parameters", count(quality.parameters));
    if let Some(calibration) = &quality.calibration {
        row(
            "calibration",
            format!("{}: {} windows, {} tokens", calibration.name, calibration.windows, calibration.tokens),
        );
    }
    row("tool", quality.tool.clone());
    table
}

fn evaluation(figures: &Figures) -> Table {
    let mut table =
        Table::new([("figure", Align::Left), ("value", Align::Right), ("standard error", Align::Right)]);
    for (name, value, error) in [
        ("perplexity", figures.ppl, None),
        ("loss (nats/token)", figures.nll, Some(figures.nll_se)),
        ("KL (nats/token)", figures.kl, Some(figures.kl_se)),
        ("KL, 99th percentile", figures.kl_p99.into(), None),
        ("top-1 agreement", figures.top1, Some(figures.top1_se)),
        ("Δ loss (nats/token)", figures.delta_nll, Some(figures.delta_nll_se)),
        ("KL of the source in bf16 (nats/token)", figures.noise_floor_kl, Some(figures.noise_floor_kl_se)),
    ] {
        table.row([name.to_owned(), number(Some(value), 5), number(error, 2)]);
    }
    table.row(["predicted tokens".to_owned(), figures.predicted.to_string(), number(None, 2)]);
    table.row(["text".to_owned(), figures.text.name.clone(), number(None, 2)]);
    table
}

/// Returns the schemes in the order of their first layer.
fn schemes(layers: &[LayerReport]) -> Vec<&str> {
    let mut schemes = Vec::new();
    for layer in layers {
        if !schemes.contains(&layer.scheme.as_str()) && schemes.len() < MAX_SCHEMES {
            schemes.push(layer.scheme.as_str());
        }
    }
    schemes
}

fn scatter(title: &str, x: Axis, layers: &[LayerReport], place: impl Fn(usize, &LayerReport) -> f64) -> Html {
    let schemes = schemes(layers);
    let worst = layers.iter().map(|layer| layer.error.relative_error).fold(0.0, f64::max);
    let point = |(i, layer): (usize, &LayerReport)| {
        // Only the worst layer is labelled in the drawing; the others show their names on hover.
        let name = if layer.error.relative_error >= worst { layer.module.clone() } else { String::new() };
        let group = schemes.iter().position(|scheme| *scheme == layer.scheme).unwrap_or(MAX_SCHEMES - 1);
        Point { x: place(i, layer), y: layer.error.relative_error, label: name, group }
    };
    let points = layers.iter().enumerate().map(point).collect();
    Scatter { title, x, y: Axis::log("relative error"), groups: &schemes, points }.html()
}

fn errors_by_layer(layers: &[LayerReport]) -> Html {
    scatter("Relative error by layer", Axis::linear("layer, in model order"), layers, |i, _| i as f64)
}

fn errors_by_bits(layers: &[LayerReport]) -> Html {
    scatter("Relative error by bits", Axis::linear("bits per weight"), layers, |_, layer| {
        layer.bits_per_weight
    })
}

fn error_cells(error: &ErrorReport) -> [String; 3] {
    [number(error.sqnr_db, 4), number(Some(error.relative_error), 3), number(Some(error.max_abs_error), 3)]
}

fn layers(layers: &[LayerReport]) -> Table {
    let mut table = Table::new([
        ("layer", Align::Left),
        ("scheme", Align::Left),
        ("method", Align::Left),
        ("shape", Align::Right),
        ("bits", Align::Right),
        ("SQNR, dB", Align::Right),
        ("relative error", Align::Right),
        ("max error", Align::Right),
        ("notes", Align::Left),
    ]);
    for layer in layers {
        let [sqnr, relative, largest] = error_cells(&layer.error);
        let remarks = layer.fallback.iter().chain(&layer.notes).cloned().collect::<Vec<_>>().join("; ");
        let (shape, bits) = (shape(&layer.shape), number(Some(layer.bits_per_weight), 4));
        let (module, scheme, method) = (layer.module.clone(), layer.scheme.clone(), layer.method.clone());
        table.row([module, scheme, method, shape, bits, sqnr, relative, largest, remarks]);
    }
    table
}

fn tensors(quality: &Quality) -> Table {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("stored as", Align::Left),
        ("shape", Align::Right),
        ("SQNR, dB", Align::Right),
        ("relative error", Align::Right),
        ("max error", Align::Right),
    ]);
    for tensor in &quality.tensors {
        let [sqnr, relative, largest] = match &tensor.error {
            Some(error) => error_cells(error),
            None => ["exact", "0", "0"].map(str::to_owned),
        };
        table.row([
            tensor.tensor.clone(),
            tensor.scheme.clone(),
            shape(&tensor.shape),
            sqnr,
            relative,
            largest,
        ]);
    }
    table
}

fn hashes(quality: &Quality) -> Table {
    let mut table = Table::new([("file", Align::Left), ("bytes", Align::Right), ("SHA-256", Align::Left)]);
    for (of, digests) in [("source", &quality.hashes.source), ("output", &quality.hashes.weights)] {
        for (name, digest) in digests {
            table.row([format!("{of}: {name}"), digest.len.to_string(), digest.hex()]);
        }
    }
    table
}
