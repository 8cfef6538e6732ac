//! Losses of recipes that were measured on our models, for reports about one recipe or scheme.

use std::io::{self, Write};

use mantissa_num::page_command;
use mantissa_plan::figures::{Figure, PAGE};
use serde::Serialize;

use crate::output::{Align, Table, number};

/// Measured loss of a recipe.
#[derive(Serialize)]
pub struct Measured {
    /// Model.
    pub model: &'static str,
    /// Recipe.
    pub recipe: &'static str,
    /// KL in nats/token.
    pub kl: f64,
    /// Its standard error.
    pub kl_se: Option<f64>,
    /// Share of tokens with the same first choice, in percent.
    pub top1: Option<f64>,
    /// Processor seconds of `quantize`.
    pub cpu_seconds: Option<f64>,
}

impl From<&'static Figure> for Measured {
    fn from(figure: &'static Figure) -> Self {
        Measured {
            model: figure.model,
            recipe: figure.recipe,
            kl: figure.kl,
            kl_se: figure.kl_error,
            top1: figure.top1,
            cpu_seconds: figure.seconds,
        }
    }
}

/// Prints measured losses, if there are any.
///
/// # Errors
/// As `out`.
pub fn print_measured(measured: &[Measured], out: &mut dyn Write) -> io::Result<()> {
    if measured.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nMeasured on our models ({}); KL in nats/token:", page_command(PAGE))?;
    let right = Align::Right;
    let mut table = Table::new([
        ("recipe", Align::Left),
        ("model", Align::Left),
        ("KL", right),
        ("top-1, %", right),
        ("CPU-s", right),
    ]);
    for row in measured {
        table.row([
            row.recipe.to_owned(),
            row.model.to_owned(),
            format!("{:.5}", row.kl),
            row.top1.map_or_else(|| "-".to_owned(), |top1| format!("{top1:.2}")),
            number(row.cpu_seconds, 3),
        ]);
    }
    table.write(out)
}
