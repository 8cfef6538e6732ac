//! Measured loss of recipes: the one table that `plan`, `explain`, `quantize --for` and the results pages read.
//!
//! `figures/recipes.tsv` is written by `bench/weights.py … figures`. KL is KL(source ‖ quantized) in nats/token with
//! its standard error over windows, on `eval_mix` of two models of our own (docs/results/weights.md). The figures rank
//! recipes and do not predict the loss of another model: larger models lose less at the same bits, models trained
//! longer lose more.

mod experiments;

use std::sync::LazyLock;

pub(crate) use experiments::experiment;
pub use experiments::{EXPERIMENTS, Experiment};

/// Models of the figures.
pub const MODELS: [&str; 2] = ["ref-8m", "ref-32m"];

/// Page with the figures.
pub const PAGE: &str = "docs/results/weights.md";

/// Measured loss of a recipe on a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// Model, one of [`MODELS`].
    pub model: &'static str,
    /// Recipe.
    pub recipe: &'static str,
    /// Checkpoint format, where its stored scales change the codes; `None` holds for the others.
    pub format: Option<&'static str>,
    /// Bits per weight of the quantized layers as stored.
    pub bits: Option<f64>,
    /// Megabytes of all files.
    pub megabytes: Option<f64>,
    /// KL in nats/token.
    pub kl: f64,
    /// Standard error of the KL.
    pub kl_error: Option<f64>,
    /// Share of tokens with the same most likely token, in percent.
    pub top1: Option<f64>,
    /// Difference of the mean negative log likelihood in nats/token.
    pub delta_nll: Option<f64>,
    /// Standard error of the difference.
    pub delta_nll_error: Option<f64>,
    /// Processor seconds of `quantize`.
    pub seconds: Option<f64>,
}

/// Rows of the table: each model's from the least KL to the largest.
pub static FIGURES: LazyLock<Vec<Figure>> =
    LazyLock::new(|| include_str!("figures/recipes.tsv").lines().skip(1).filter_map(parse).collect());

/// Parses a row; `None` if it is malformed, which a test excludes.
fn parse(line: &'static str) -> Option<Figure> {
    let mut cells = line.split('\t');
    let (model, recipe) = (cells.next()?, cells.next()?);
    let format = cells.next().filter(|format| !format.is_empty());
    let mut number = || match cells.next()? {
        "" => Some(None),
        text => text.parse::<f64>().ok().map(Some),
    };
    Some(Figure {
        model,
        recipe,
        format,
        bits: number()?,
        megabytes: number()?,
        kl: number()??,
        kl_error: number()?,
        top1: number()?,
        delta_nll: number()?,
        delta_nll_error: number()?,
        seconds: number()?,
    })
}

/// Finds the figure of `recipe` on `model`: the checkpoint format's own, if it has one, else the figure of the others.
pub fn figure(model: &str, recipe: &str, format: Option<&str>) -> Option<&'static Figure> {
    let of = |format: Option<&str>| {
        FIGURES.iter().find(|row| row.model == model && row.recipe == recipe && row.format == format)
    };
    format.and_then(|_| of(format)).or_else(|| of(None))
}

/// Returns the KL of a recipe on each of [`MODELS`], if measured.
pub fn kl(recipe: &str, format: Option<&str>) -> [Option<f64>; 2] {
    MODELS.map(|model| figure(model, recipe, format).map(|row| row.kl))
}

/// Says the KL of recipes on a model: `w8a8 .00191`.
pub(crate) fn losses(model: &str, recipes: &[&str]) -> String {
    let of = |recipe: &&str| match figure(model, recipe, None) {
        Some(row) => format!("{recipe} {}", format!("{:.5}", row.kl).trim_start_matches('0')),
        None => format!("{recipe} not measured"),
    };
    recipes.iter().map(of).collect::<Vec<_>>().join(", ")
}

/// Returns the larger of two measured KLs, by which recipes are ranked everywhere.
pub fn larger(kl: [Option<f64>; 2]) -> Option<f64> {
    kl.into_iter().flatten().reduce(f64::max)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_row_parses_and_stands_once() {
        let lines = include_str!("figures/recipes.tsv").lines().count() - 1;
        assert_eq!(FIGURES.len(), lines);
        for row in FIGURES.iter() {
            assert!(MODELS.contains(&row.model), "{row:?}");
            assert_eq!(figure(row.model, row.recipe, row.format), Some(row));
        }
    }

    #[test]
    fn a_format_with_its_own_codes_has_its_own_figure() {
        let of = |format| figure("ref-8m", "gptq-int4-g128", format).unwrap().kl;
        assert_eq!((of(Some("exl2")), of(Some("compressed-tensors")), of(None)), (0.00502, 0.00491, 0.00491));
        assert_eq!(larger(kl("fp8-dynamic", None)), Some(0.00333));
        assert_eq!(larger(kl("no-such-recipe", None)), None);
    }
}
