//! One recipe: what it does, what it lost on our models, and where each of its formats loads.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_num::page_command;
use mantissa_plan::contract::{Cell, EngineTarget};
use mantissa_quant::Recipe;
use mantissa_quant::recipe::{BUILT_IN, TRANSFORMS, spelled_out, unlike_preset};
use mantissa_quant::registry;
use mantissa_store::convention::Container;
use serde::Serialize;

use super::{Row, SIDE, calibration, figures, in_pairs, of_file_type, readers, row};
use crate::commands::losses::{Measured, print_measured};
use crate::commands::next_steps::quoted;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::{Align, Table, labelled};

#[derive(Serialize)]
struct Report {
    bits_per_weight_shape: [usize; 2],
    recipe: Details,
}

/// Recipe with its steps and uses.
#[derive(Serialize)]
struct Details {
    #[serde(flatten)]
    row: Row,
    /// Transform, methods and training, in their order.
    steps: Vec<Step>,
    /// Scheme of keys and values.
    kv: Option<String>,
    /// True if a method learns whole decoder layers, which needs a backward pass.
    learns_layers: bool,
    /// Types of each projection under a file type, in a model of 32 layers whose key heads are shared by four query heads.
    types: Vec<Types>,
    /// Checkpoint formats that hold it, the default first.
    formats: Vec<Held>,
    /// Loss on our models.
    measured: Vec<Measured>,
    /// Command that makes it.
    command: String,
    /// Difference from a preset of the name that was typed.
    #[serde(skip)]
    elsewhere: Option<String>,
}

/// Step of a recipe.
#[derive(Serialize)]
struct Step {
    name: &'static str,
    does: &'static str,
}

/// Types of a projection, each with its layers.
#[derive(Serialize)]
struct Types {
    part: &'static str,
    layers: Vec<(&'static str, usize)>,
}

/// Checkpoint format with the programs that load the recipe from it.
#[derive(Serialize)]
struct Held {
    format: &'static str,
    loads_in: String,
    readers: Vec<Cell>,
}

/// Prints one recipe.
///
/// # Errors
/// A name that is no recipe, or a file that is none; standard output cannot be written.
pub fn run(name: &str, context: &Context) -> Result<()> {
    let recipe = Recipe::load(name).map_err(|error| match EngineTarget::parse(name) {
        Ok(_) => {
            let fix = format!("mantissa recipes --for {name}");
            anyhow::Error::from(BadInput::new("recipes", name, "a recipe, not an engine").with_fix(fix))
        }
        Err(_) => error.into(),
    })?;
    let report = Report { bits_per_weight_shape: [SIDE, SIDE], recipe: details(name, &recipe) };
    context.report(&report, |out| print(&report.recipe, out))
}

fn details(typed: &str, recipe: &Recipe) -> Details {
    let listed = BUILT_IN.iter().any(|(name, _)| *name == recipe.name);
    let full = match recipe.file_type {
        Some(ty) => of_file_type(ty),
        None if listed || Recipe::is_file(typed) => in_pairs(recipe),
        None => spelled_out(typed).unwrap_or_else(|| recipe.name.clone()),
    };
    let measured = figures(recipe, &full).map(Measured::from).collect();
    let text = if recipe.needs_calibration() { " --calibration default" } else { "" };
    Details {
        steps: steps(recipe),
        kv: match &recipe.kv_levels {
            Some(levels) => Some(levels.to_string()),
            None => recipe.kv.as_ref().map(ToString::to_string),
        },
        learns_layers: recipe.learns_layers(),
        types: types(recipe),
        formats: formats(recipe),
        measured,
        command: format!("mantissa quantize MODEL --recipe {}{text} --out OUT", quoted(Path::new(typed))),
        row: row(recipe, full),
        elsewhere: unlike_preset(typed),
    }
}

/// Lists what a recipe does, in its order.
fn steps(recipe: &Recipe) -> Vec<Step> {
    let transform = recipe.transform.iter().filter_map(|transform| {
        let row = TRANSFORMS.iter().find(|row| row.name == transform.name())?;
        Some(Step { name: row.name, does: row.summary })
    });
    let mut steps: Vec<Step> = transform.collect();
    for row in recipe.methods().filter_map(|method| registry::find(method.recipe_name())) {
        if steps.iter().all(|known| known.name != row.name) {
            steps.push(Step { name: row.name, does: row.summary });
        }
    }
    if recipe.tuning.is_some() {
        steps.push(Step {
            name: "e2e",
            does: "trains scales, offsets and norms of the quantized model against the original",
        });
    }
    steps
}

/// Lists the types of a file type's projections and tables.
fn types(recipe: &Recipe) -> Vec<Types> {
    let Some(ty) = recipe.file_type else { return Vec::new() };
    let parts = ty.example().into_iter().map(|(part, layers)| Types {
        part,
        layers: layers.into_iter().map(|(codec, count)| (codec.name(), count)).collect(),
    });
    let tables = ["embedding", "head"]
        .into_iter()
        .zip(ty.tables())
        .map(|(part, codec)| Types { part, layers: vec![(codec.name(), 1)] });
    parts.chain(tables).collect()
}

/// Lists the checkpoint formats that hold a recipe, its default first.
fn formats(recipe: &Recipe) -> Vec<Held> {
    let default = recipe.container();
    let others = Container::names().into_iter().filter_map(Container::named).filter(|container| {
        recipe.container.is_none() && container.name() != default.name() && recipe.fits(*container)
    });
    let of = |container: Container| {
        let readers = readers(recipe, container);
        let loads_in = readers.iter().map(Cell::marked).collect::<Vec<_>>().join(", ");
        Held { format: container.name(), loads_in, readers }
    };
    std::iter::once(default).chain(others).map(of).collect()
}

fn print(recipe: &Details, out: &mut dyn Write) -> io::Result<()> {
    let row = &recipe.row;
    let stands =
        if row.name == row.recipe { row.name.clone() } else { format!("{} = {}", row.name, row.recipe) };
    labelled(out, "recipe", &stands)?;
    recipe.elsewhere.iter().try_for_each(|unlike| labelled(out, "here", unlike))?;
    for step in &recipe.steps {
        labelled(out, "does", &format!("{}: {}", step.name, step.does))?;
    }
    labelled(
        out,
        "weights",
        &format!("{}, {:.3} bits per weight of [{SIDE}, {SIDE}]", row.weights, row.bits_per_weight),
    )?;
    labelled(out, "inputs", row.activations.as_deref().unwrap_or("unquantized"))?;
    recipe.kv.iter().try_for_each(|kv| labelled(out, "KV cache", kv))?;
    let learns = if recipe.learns_layers { "; learns whole layers, which needs a backward pass" } else { "" };
    labelled(out, "calibration", &format!("{}{learns}", calibration(row)))?;
    for types in &recipe.types {
        let layers = types.layers.iter().map(|(codec, count)| format!("{codec} × {count}"));
        labelled(out, types.part, &layers.collect::<Vec<_>>().join(", "))?;
    }
    writeln!(out)?;
    let mut table = Table::new([("format", Align::Left), ("loads in (✓ loaded by us)", Align::Left)]);
    recipe.formats.iter().for_each(|held| table.row([held.format.to_owned(), held.loads_in.clone()]));
    table.write(out)?;
    print_measured(&recipe.measured, out)?;
    writeln!(out)?;
    labelled(out, "make", &recipe.command)?;
    labelled(
        out,
        "more",
        &format!("mantissa schemes {}; {}", row.weights, page_command("docs/explain/methods.md")),
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(name: &str) -> Details {
        details(name, &Recipe::load(name).unwrap())
    }

    #[test]
    fn a_recipe_has_its_steps_formats_and_losses() {
        let found = of("w8a8-smooth");
        assert_eq!(found.row.recipe, "smooth-int8-channel+int8-token");
        assert_eq!(found.steps.iter().map(|step| step.name).collect::<Vec<_>>(), ["smooth", "rtn"]);
        assert!(found.measured.len() == 1 && found.command.contains("--calibration default"));
        let found = of("gptq-int4-g128");
        let formats: Vec<&str> = found.formats.iter().map(|held| held.format).collect();
        assert_eq!(formats[0], "compressed-tensors");
        assert!(["gptq", "native"].iter().all(|format| formats.contains(format)), "{formats:?}");
        assert!(found.formats.iter().all(|held| held.loads_in.contains("mantissa")));
        assert_eq!(found.measured.len(), 2);
        assert!(of("autoround-int4-g128").learns_layers && !found.learns_layers);
        assert_eq!(of("gptaq-nvfp4").steps[0].name, "gptaq");
        assert_eq!(of("gptq-int4-g128+kv-int8-head").kv.as_deref(), Some("int8-head"));
        assert_eq!(of("efficientqat-int2-g32").steps.last().unwrap().name, "e2e");
    }

    /// Q4_K_M of 32 layers: values and down in Q6_K in the first and last four and every third between: 16.
    #[test]
    fn a_file_type_has_its_mixture() {
        let found = of("Q4_K_M");
        let of = |part: &str| found.types.iter().find(|types| types.part == part).unwrap().layers.clone();
        assert_eq!(of("values"), [("q6_k", 16), ("q4_k", 16)]);
        assert_eq!((of("down"), of("gate")), (of("values"), vec![("q4_k", 32)]));
        assert_eq!((of("embedding"), of("head")), (vec![("q4_k", 1)], vec![("q6_k", 1)]));
        assert_eq!(found.formats.iter().map(|held| held.format).collect::<Vec<_>>(), ["gguf"]);
    }
}
