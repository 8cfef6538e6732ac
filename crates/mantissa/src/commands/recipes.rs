//! `mantissa recipes`: lists recipes by name, or shows one.

mod one;

use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::Result;
use mantissa_num::codec::Codec;
use mantissa_num::{Scheme, Source, page_command};
use mantissa_plan::contract::{self, Cell, EngineTarget, Input, LOADS, Linear, Load, Shape, Stored, Subject};
use mantissa_plan::figures::{FIGURES, Figure, MODELS, PAGE};
use mantissa_quant::Recipe;
use mantissa_quant::recipe::{ALIASES, BUILT_IN, FILE_TYPES, FileType, METHODS, TRANSFORMS, TYPED};
use mantissa_store::Dtype;
use mantissa_store::convention::Container;
use serde::Serialize;

use super::execute::Execute;
use super::lint;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{Align, Table, paragraph};

/// Rows and columns of the bf16 weight for which bits per weight are given.
const SIDE: usize = 4096;

/// List recipes, and where their outputs load
///
/// Any [TRANSFORM-]METHOD-SCHEME[+ACTIVATION] is a recipe, also with +kv-SCHEME at its end; `mantissa schemes`
/// lists the schemes. +e2e trains scales and norms after the method.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa recipes
  mantissa recipes --for vllm --bits 4
  mantissa recipes gptq-int4-g128
  mantissa recipes --json")]
pub struct Args {
    /// One recipe: a name, or a file
    ///
    /// Shows what it does, its measured loss, the checkpoint formats that hold it, and the programs that load each, with the
    /// evidence.
    recipe: Option<String>,
    /// List recipes that load in this engine (repeatable)
    ///
    /// In the format that the recipe has by default; see `mantissa lint` for ENGINE[:tp=N,gpu=NAME].
    #[arg(long = "for", value_name = "ENGINE", value_parser = lint::target, conflicts_with = "recipe")]
    targets: Vec<EngineTarget>,
    /// List recipes with codes of this many bits
    #[arg(long, value_name = "BITS", conflicts_with = "recipe")]
    bits: Option<u32>,
}

#[derive(Serialize)]
struct Report {
    transforms: Vec<&'static str>,
    methods: Vec<&'static str>,
    bits_per_weight_shape: [usize; 2],
    recipes: Vec<Row>,
    /// Other names, with the recipes of the list that they stand for.
    other_names: BTreeMap<&'static str, &'static str>,
    /// Load tests that passed.
    load_tests: &'static [Load],
}

#[derive(Serialize)]
struct Row {
    name: String,
    recipe: String,
    weights: String,
    activations: Option<String>,
    bits_per_weight: f64,
    /// KL in nats/token on the largest of our models where it was measured.
    measured_kl: Option<f64>,
    calibration: bool,
    /// True if rounding is weighted by an importance matrix when one is available.
    importance: bool,
    format: &'static str,
    /// Programs that load it; ✓ if we loaded it.
    loads_in: String,
    /// The same with the evidence.
    readers: Vec<Cell>,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;
    const CEILING: bool = false;

    /// # Errors
    /// A name that is no recipe; standard output cannot be written.
    fn run(&self, context: &Context) -> Result<()> {
        if let Some(name) = &self.recipe {
            return one::run(name, context);
        }
        let aliases = ALIASES.into_iter().map(|(name, full)| (name, full.to_owned()));
        let file_types = FILE_TYPES.into_iter().map(|ty| (ty.name, of_file_type(ty)));
        let files = BUILT_IN.iter().map(|(name, _)| Ok((*name, in_pairs(&Recipe::load(name)?))));
        let files = files.collect::<Result<Vec<_>>>()?;
        let mut recipes = Vec::new();
        for (name, full) in aliases.chain(files).chain(file_types) {
            let recipe = Recipe::load(name)?;
            if self.asks_for(&recipe) {
                recipes.push(row(&recipe, full));
            }
        }
        if recipes.is_empty() {
            let found = "no listed recipe";
            let fix = "mantissa quantize MODEL --for ENGINE --bits N chooses one for a model";
            return Err(BadInput::new("recipes", found, "another engine or other bits").with_fix(fix).into());
        }
        let methods = METHODS.iter().map(|row| row.name).collect();
        let transforms = TRANSFORMS.iter().map(|row| row.name).collect();
        let other_names = TYPED.into_iter().collect();
        let report = Report {
            transforms,
            methods,
            bits_per_weight_shape: [SIDE, SIDE],
            recipes,
            other_names,
            load_tests: LOADS,
        };
        context.report(&report, |out| human(out, &report))
    }
}

impl Args {
    /// True if a recipe has the bits that are asked for and loads in every engine.
    fn asks_for(&self, recipe: &Recipe) -> bool {
        let wide = self.bits.is_none_or(|bits| bits == recipe.weights.format.code_bits());
        let loads = || {
            let subject = subject(recipe, recipe.container());
            self.targets.iter().all(|target| !contract::lint(&subject, target).fails())
        };
        wide && loads()
    }
}

/// Describes a file type.
fn of_file_type(ty: FileType) -> String {
    format!("llama.cpp file type {}, mostly {}", ty.number, ty.base.name())
}

/// Lists the schemes of a recipe file: of most layers first, then of its exceptions.
fn in_pairs(recipe: &Recipe) -> String {
    let pair = |(weights, input): (&Scheme, Option<&Scheme>)| match input {
        Some(input) => format!("{weights}+{input}"),
        None => weights.to_string(),
    };
    let pairs = recipe.pairs().into_iter().map(pair).collect::<Vec<_>>();
    format!("{}-{}", recipe.method_name(), pairs.join("; "))
}

/// Returns the losses that were measured with a recipe, which stands for `full`.
fn figures<'a>(recipe: &'a Recipe, full: &'a str) -> impl Iterator<Item = &'static Figure> + use<'a> {
    let names = [recipe.name.as_str(), full];
    FIGURES.iter().filter(move |figure| figure.format.is_none() && names.contains(&figure.recipe))
}

/// Describes a recipe, which stands for `full`.
fn row(recipe: &Recipe, full: String) -> Row {
    let weighed = recipe.weights.format.codec().is_some_and(Codec::takes_importance);
    let container = recipe.container();
    let readers = readers(recipe, container);
    // Models stand from the smallest to the largest.
    let of = |model: &&str| figures(recipe, &full).find(|figure| figure.model == *model);
    let measured_kl = MODELS.iter().rev().find_map(of).map(|figure| figure.kl);
    Row {
        name: recipe.name.clone(),
        measured_kl,
        recipe: full,
        weights: recipe.weights.to_string(),
        activations: recipe.activations.as_ref().map(ToString::to_string),
        bits_per_weight: recipe
            .stored_scheme(container, recipe.weights.clone(), Dtype::BF16)
            .format
            .bits_per_weight(SIDE, SIDE),
        calibration: recipe.needs_calibration(),
        importance: weighed && recipe.rounds_to_nearest(),
        format: container.name(),
        loads_in: readers.iter().map(Cell::marked).collect::<Vec<_>>().join(", "),
        readers,
    }
}

fn human(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let mut table = Table::new([
        ("name", Align::Left),
        ("recipe", Align::Left),
        ("bits", Align::Right),
        ("KL", Align::Right),
        ("calibration", Align::Left),
        ("format", Align::Left),
        ("loads in", Align::Left),
    ])
    .optional(["recipe", "format", "calibration"]);
    report.recipes.iter().for_each(|row| table.row(cells(row)));
    table.write(out)?;
    writeln!(out)?;
    let shape =
        format!("bits: for a [{SIDE}, {SIDE}] weight of a bf16 model, scales and zero points included");
    paragraph(out, 2, &format!("{shape}; for a file type, its main type"))?;
    paragraph(out, 2, &format!("KL: nats/token, measured on our models ({})", page_command(PAGE)))?;
    let loads = "✓ loaded by us, the others by their source code; --json has scripts, versions and files";
    paragraph(out, 2, &format!("loads in: {loads}"))?;
    let recommended = "rounding is weighted by column importance if a calibration is given";
    paragraph(out, 2, &format!("calibration recommended: {recommended}"))?;
    paragraph(out, 2, "any [TRANSFORM-]METHOD-SCHEME[+ACTIVATION][+kv-SCHEME][+e2e] is a recipe")?;
    paragraph(out, 2, &format!("transforms: {}", report.transforms.join(", ")))?;
    paragraph(out, 2, &format!("methods: {}", report.methods.join(", ")))?;
    let others: Vec<_> = report.other_names.iter().map(|(name, of)| format!("{name} = {of}")).collect();
    paragraph(out, 2, &format!("upper or lower case; also: {}", others.join(", ")))
}

/// Says whether a recipe needs a calibration.
fn calibration(row: &Row) -> &'static str {
    match (row.calibration, row.importance) {
        (true, _) => "needed",
        (_, true) => "recommended",
        _ => "none",
    }
}

fn cells(row: &Row) -> [String; 7] {
    [
        row.name.clone(),
        row.recipe.clone(),
        format!("{:.3}", row.bits_per_weight),
        row.measured_kl.map_or_else(|| "-".to_owned(), |kl| format!("{kl:.4}")),
        calibration(row).to_owned(),
        row.format.to_owned(),
        row.loads_in.clone(),
    ]
}

/// Lists the programs that load what `recipe` writes in `container`, from the serving contract.
pub(super) fn readers(recipe: &Recipe, container: Container) -> Vec<Cell> {
    contract::cells(&subject(recipe, container))
}

/// Describes a layer of what `recipe` writes in `container`.
fn subject(recipe: &Recipe, container: Container) -> Subject {
    let format = |scheme: &Scheme| scheme.format.clone();
    let scheme = recipe.stored_scheme(container, recipe.weights.clone(), Dtype::BF16);
    // Weights without scales are stored unquantized.
    let quantized = scheme.format.scale().is_some() || scheme.format.codec().is_some();
    let stored = Stored {
        format: format(&scheme),
        outer: None,
        input: recipe.activations.as_ref().map(|input| Input {
            format: format(input),
            is_static: input.source == Source::Static,
            scale: None,
        }),
        act_order: recipe.follows_order(),
        multiplied: false,
    };
    let linear = Linear {
        module: "model.layers.0.mlp.up_proj".to_owned(),
        rows: SIDE,
        cols: SIDE,
        stored: quantized.then_some(stored),
    };
    Subject {
        planned: true,
        convention: container.name().to_owned(),
        dtype: Some("bfloat16".to_owned()),
        shape: Shape::default(),
        linears: vec![linear],
        examined: Vec::new(),
        observations: Vec::new(),
    }
}
