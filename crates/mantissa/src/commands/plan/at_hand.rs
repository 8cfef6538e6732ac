//! Quantized model that a plan is asked about: what it is, and whether it fits as it stands.

use std::path::Path;

use mantissa_plan::recommend::{Load, Row, Wish, evaluate};
use mantissa_quant::Quality;
use mantissa_quant::recipe::FILE_TYPES;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::asked::Asked;
use super::text::interval;
use crate::commands::model::{self, ModelPath};
use crate::commands::next_steps::quoted;
use crate::output::bytes;

/// Quantized model at hand.
#[derive(Serialize)]
pub(super) struct AtHand {
    /// File type, recipe or checkpoint format.
    pub(super) name: String,
    /// Bytes of its tensors.
    pub(super) bytes: u64,
    /// True if it fits as it stands.
    pub(super) fits: bool,
    /// Precision that it has, if it is one of those that are planned.
    pub(super) precision: Option<&'static str>,
    /// Row of that precision.
    #[serde(skip)]
    row: Option<Row>,
}

impl AtHand {
    /// Describes the model of the question under `load`; `None` for one that is not quantized, or for a size or a config
    /// alone.
    pub(super) fn of(asked: &Asked<'_>, load: &Load) -> Option<Self> {
        let place = asked.args.subject.model()?;
        // A config without weights says nothing about them.
        let files = model::open_quietly(place).ok()?;
        let Named { name, recipe } = named(place, &files)?;
        let is_it = |row: &&Row| {
            let precision = &row.precision;
            let same = precision.name.eq_ignore_ascii_case(&name);
            (same && precision.convention == files.convention_name())
                || recipe.as_deref().is_some_and(|recipe| precision.recipe == Some(recipe))
        };
        // Whatever engine or bits the choice is restricted to.
        let rows = evaluate(asked.shape, asked.device, load, &Wish::default());
        let row = rows.iter().find(is_it).cloned();
        let size = files.checkpoint().stored_bytes();
        let memory = asked.memory().unwrap_or_else(|| asked.device.available());
        // The caches and activations of any row, beside the bytes of the model.
        let others = rows.first().map_or(0.0, |row| row.least.bytes.total() - row.least.bytes.weights());
        let fits = size as f64 / asked.args.devices as f64 + others <= memory;
        let precision = row.as_ref().map(|row| row.precision.name);
        Some(AtHand { name, bytes: size, fits, precision, row })
    }

    /// Says what it is and how it runs.
    pub(super) fn words(&self, place: &ModelPath) -> String {
        let fits = if self.fits { "fits as it stands" } else { "does not fit" };
        let speed = self.row.as_ref().filter(|_| self.fits).map_or_else(String::new, |row| {
            format!(", decodes {} tok/s (predicted)", interval(row.decode.tokens_per_s))
        });
        let run = if self.fits { format!("; mantissa run {}", quoted(place.typed())) } else { String::new() };
        let losses = "the losses below count from the unquantized model";
        format!("{}, {}: {fits}{speed}{run}; {losses}", self.name, bytes(self.bytes))
    }

    /// Says how the choice is made: from the unquantized model by the command `makes`, unless it is the model at hand.
    pub(super) fn makes(&self, chosen: Option<&str>, makes: &str) -> String {
        match self.precision.is_some() && self.precision == chosen {
            true => "nothing: it is the model at hand".to_owned(),
            false => format!("from the unquantized model, as rounding twice loses more: {makes}"),
        }
    }
}

/// Names of a quantized model.
struct Named {
    name: String,
    /// Recipe that made it, if it is known.
    recipe: Option<String>,
}

/// Names a quantized model; `None` if it is not quantized.
fn named(place: &Path, files: &ModelFiles) -> Option<Named> {
    if let Some(gguf) = files.gguf() {
        let number = gguf.metadata().get("general.file_type").and_then(mantissa_store::gguf::Value::as_u64);
        let ty = FILE_TYPES.into_iter().find(|ty| Some(u64::from(ty.number)) == number);
        return ty.map(|ty| Named { name: ty.name.to_uppercase(), recipe: None });
    }
    if !files.is_quantized() {
        return None;
    }
    let recipe = Quality::read(place).ok().flatten().map(|quality| quality.recipe);
    let format = files.convention_name();
    let name = recipe.as_ref().map_or_else(|| format.to_owned(), |recipe| format!("{recipe} in {format}"));
    Some(Named { name, recipe })
}
