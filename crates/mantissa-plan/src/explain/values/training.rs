//! Bytes of training.

use super::super::value::{Args, Compute, Fault, Value};
use crate::training::{Recompute, TrainingRecipe, gpt_layer_activations};

/// Values about training.
pub(super) const VALUES: &[(&str, Compute)] = &[
    // Bytes per parameter of a recipe, of all and by purpose.
    ("recipe_bytes", |_, a| Ok(Value::Number(recipe(a)?.total()))),
    ("recipe_master", |_, a| Ok(Value::Number(recipe(a)?.master))),
    ("recipe_gradients", |_, a| Ok(Value::Number(recipe(a)?.gradients))),
    ("recipe_moments", |_, a| Ok(Value::Number(recipe(a)?.moments))),
    ("recipe_about", |_, a| Ok(Value::text(recipe(a)?.about))),
    // Bytes of fine-tuning on 2048 tokens with recomputed layers.
    ("fine_tune", |s, a| {
        let name = a.text(0)?;
        let row = s.fine_tune().rows.iter().find(|row| row.name == name);
        row.map(|row| Value::Number(row.recomputed.total())).ok_or_else(|| a.fault(0, "a recipe"))
    }),
    ("train_choice", |s, _| Ok(Value::words(s.train().recipe))),
    // Bytes of a value of the residual stream, which is all that a layer stores if it is recomputed.
    ("stream_bytes", |_, _| {
        let stored = gpt_layer_activations(2048, 4, 4096, 32, Recompute::Layers);
        Ok(Value::Number(stored / (2048.0 * 4.0 * 4096.0)))
    }),
];

/// Returns the recipe that the first argument names.
fn recipe(args: &Args<'_>) -> Result<TrainingRecipe, Fault> {
    TrainingRecipe::named(args.text(0)?).ok_or_else(|| args.fault(0, "a training recipe"))
}
