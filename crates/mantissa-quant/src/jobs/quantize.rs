//! Plans the quantization of a dense model by a recipe.

mod checks;
mod kept;
mod mixes;

use std::collections::{BTreeMap, BTreeSet};

use mantissa_methods::method::Scope;
use mantissa_model::{LinearInfo, ModelConfig, StoredAs, Tokenizer, load_config};
use mantissa_num::Scheme;
use mantissa_store::convention::gguf::Model as GgufModel;
use mantissa_store::convention::{Container, Experts, ModelFiles, Support};
use mantissa_store::{Dtype, TensorMeta};

pub use kept::require_modules;

use crate::cache_scales;
use crate::dense_source::dequantizing_bytes;
use crate::error::{QuantError, Result};
use crate::gguf;
use crate::load::loadable;
use crate::plan::Layout;
use crate::plan::alternative;
use crate::plan::{Methods, Options, Plan, PlannedLinear, Use, WeightJob, scheme_of};
use crate::recipe::{Glob, Recipe};
use crate::rotate;
use crate::sidecars::note_on_tokenizer;
use crate::stacks;
use crate::tables::Tables;
use crate::tensors::{EXPERTS_APART, output_of_linears, output_specs};
use crate::unused;

impl Plan {
    /// Plans another recipe in `container` with the options of this plan.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_recipe(&self, source: &ModelFiles, recipe: Recipe, container: Container) -> Result<Self> {
        Plan::new(source, recipe, Options { container: Some(container), ..self.options.clone() })
    }

    /// Plans the quantization of `source` by `recipe`.
    ///
    /// # Errors
    /// [`QuantError::AlreadyQuantized`]; [`QuantError::NoCalibration`], [`QuantError::Calibrate`] and
    /// [`QuantError::Method`] if the method or its calibration text does not fit; [`QuantError::NotStorable`] with the
    /// layers that the container cannot hold; [`QuantError::NothingToDo`]; an incomplete source, with the missing
    /// tensor or file.
    pub fn new(source: &ModelFiles, recipe: Recipe, options: Options) -> Result<Self> {
        Self::new_for(source, recipe, options, &|_| true)
    }

    /// Plans as [`new`](Self::new). What an error advises is a plan that `accepts` takes, such as one that an engine loads.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_for(
        source: &ModelFiles,
        recipe: Recipe,
        options: Options,
        accepts: &dyn Fn(&Plan) -> bool,
    ) -> Result<Self> {
        let plan = |recipe, options| Self::of_recipe(source, recipe, options);
        plan(recipe.clone(), options.clone()).map_err(|error| match &error {
            QuantError::NotStorable { list, .. } if !list.contains("fix: ") => {
                let works = |recipe, options| plan(recipe, options).is_ok_and(|plan| accepts(&plan));
                let fix = alternative::options(source, &recipe, &options, works);
                error.with_fix(fix)
            }
            _ => error,
        })
    }

    /// Plans the quantization as [`new`](Self::new), without a fix for what the format cannot hold.
    fn of_recipe(source: &ModelFiles, recipe: Recipe, options: Options) -> Result<Self> {
        // A GGUF file or a quantized model is a source only as `dequantized_source` presents it.
        if source.is_quantized() || source.as_convention::<GgufModel>().is_some() {
            let (path, convention) = (source.dir().to_owned(), source.convention_name());
            return Err(QuantError::AlreadyQuantized { path, convention });
        }
        let config = load_config(source)?;
        let container = options.container.unwrap_or_else(|| recipe.container());
        let mut linears = planned_linears(source, &recipe, &config, container, &options)?;
        let learns = |module: &str| recipe.method_of(module).scope() == Scope::Layer;
        let fallbacks = match container.is_one_file() {
            true => gguf::fall_back(&config, &mut linears, learns),
            false => Vec::new(),
        };
        let job = WeightJob::Quantize(Box::new(recipe.clone()));
        let input = |info: &LinearInfo| recipe.activations_of(&info.module);
        let quantized = output_of_linears(&job, input, container, &linears, recipe.follows_order())?;
        let inputs = other_inputs(&recipe, &linears);
        let methods = Methods::of(&recipe, &linears);
        let asked = checks::Request {
            source,
            recipe: &recipe,
            container,
            config: &config,
            linears: &linears,
            options: &options,
        };
        // A cache that the format cannot hold needs no calibration either.
        let cached = cache_scales::planned(source, &recipe, container, &config, &options)?;
        let calibrating = asked.notes()?;
        let tables = Tables::plan(source, &recipe, container, &config, &options)?;
        let copied = copied_tensors(source, &config, &linears, &tables.planned);
        let parts: Vec<_> = unused::tensors(source, &config).collect();
        refuse_other_parts(&recipe, &config, &parts)?;
        kept::check_names(source, &config, &recipe)?;
        let mut notes = notes(source, &recipe, container, &config, &parts);
        notes.extend(fallbacks.iter().map(|(module, why)| format!("{module}: {why}")));
        notes.extend(calibrating);
        notes.extend(tables.note);
        notes.extend(note_on_order(container, &recipe));
        notes.extend(note_on_tokenizer(source, container));
        let layout = || Layout::new(source, &job, &recipe.weights, &config, &linears, &options);
        let gguf = container.is_one_file().then(layout).transpose()?;
        notes.extend(gguf.iter().flat_map(|layout| layout.notes.iter().cloned()));
        let own = quantized.into_iter().chain(cached);
        let specs = output_specs(gguf.as_ref(), &copied, own).into_iter().chain(tables.specs).collect();
        let rotation = recipe.transform.as_ref().and_then(|transform| transform.rotation());
        let rotated = rotation.map(|options| rotate::rotated_inputs(&config, options));
        let rotated = rotated.into_iter().flatten().map(|(info, matrix)| (info.module, matrix.order()));
        let mut plan = Plan {
            uses: Use::all(&recipe, container, &linears, &options),
            by_group: recipe.follows_order(),
            rotations: rotated.collect(),
            untied: tables.untied,
            observer: recipe.options.observer(),
            activations: recipe.activations,
            inputs,
            methods,
            kv: recipe.kv,
            kv_levels: recipe.kv_levels,
            specs,
            tables: tables.planned,
            copied,
            notes,
            fallbacks: fallbacks.into_iter().collect(),
            gguf,
            unused: parts.iter().filter_map(|meta| unused::linear_module(meta)).map(str::to_owned).collect(),
            ..Plan::begun(job, recipe.weights, container, config, linears, options)
        };
        // Some combinations of layers cannot be described although each layer can be stored.
        plan.output_config(source)?;
        plan.require_share(source)?;
        plan.dequantizing = dequantizing_bytes(source);
        plan.tokenizer = Tokenizer::bytes_to_load(source.dir());
        // An incomplete source would give an incomplete output.
        loadable(source)?;
        Ok(plan)
    }
}

/// Returns the note of a format that not all readers load with the group of each column.
fn note_on_order(container: Container, recipe: &Recipe) -> Option<String> {
    match container.facts().group_order {
        Support::OnRequest(note) if recipe.follows_order() => Some(note.to_owned()),
        _ => None,
    }
}

/// Plans the linear layers.
///
/// # Errors
/// [`QuantError::NothingToDo`] if none is quantized.
fn planned_linears(
    source: &ModelFiles,
    recipe: &Recipe,
    config: &ModelConfig,
    container: Container,
    options: &Options,
) -> Result<Vec<PlannedLinear>> {
    let mut linears: Vec<_> = config
        .decoder_linears()
        .map(|info| planned(source, recipe, config, container, options, info))
        .collect::<Result<_>>()?;
    if container.facts().experts == Experts::Stacked {
        stacks::require(config)?;
        stacks::keep_others(&mut linears)?;
    }
    match linears.iter().all(|linear| linear.scheme.is_none()) {
        true => Err(QuantError::NothingToDo { recipe: recipe.name.clone() }),
        false => Ok(linears),
    }
}

/// Plans one linear layer.
fn planned(
    source: &ModelFiles,
    recipe: &Recipe,
    config: &ModelConfig,
    container: Container,
    options: &Options,
    info: LinearInfo,
) -> Result<PlannedLinear> {
    let dtype = dense_dtype(source, config, &info)?;
    // With learned scales, layers without them stay as they are.
    let learned = options.scales.as_ref().is_none_or(|scales| scales.contains_key(&info.module));
    let scheme = scheme_of(recipe, config, options, &info).filter(|_| learned).map(|mut scheme| {
        scheme.encoder.rounding = options.rounding;
        recipe.stored_scheme_of(&info.module, container, scheme, dtype)
    });
    Ok(PlannedLinear { info, scheme })
}

/// Returns the dtype of the dense weight of a layer.
///
/// # Errors
/// The source has no such tensor, or one in another shape.
fn dense_dtype(source: &ModelFiles, config: &ModelConfig, info: &LinearInfo) -> Result<Dtype> {
    let (name, shape) = info.tensor_in(source);
    let Some(meta) = source.checkpoint().get(&name) else {
        let path = source.dir().to_owned();
        return Err(match unknown_experts(source, config, info) {
            Some(found) => {
                let got = format!("tensor {} {:?}", found.name, found.shape);
                let fix = format!("{} stores experts under other names", config.architecture.name);
                let (fused, _) = config.fused_experts(info.layer);
                let expected = format!("{name} for each expert, or {fused} for all");
                mantissa_store::Error::field(&path, "fused experts", got, expected, fix)
            }
            None => mantissa_store::Error::NoTensor { path, tensor: name },
        }
        .into());
    };
    if meta.shape != shape {
        let (got, expected) = (format!("shape {:?}", meta.shape), format!("{shape:?}"));
        let why = "config.json and weights differ";
        return Err(mantissa_store::Error::field(source.dir(), &name, got, expected, why).into());
    }
    Ok(meta.dtype)
}

/// Returns a tensor of the expert's layer that may hold its experts fused, under a name that the architecture does not
/// have.
fn unknown_experts<'a>(
    source: &'a ModelFiles,
    config: &ModelConfig,
    info: &LinearInfo,
) -> Option<&'a TensorMeta> {
    info.kind.expert()?;
    let mut weights = unused::tensors(source, config).filter(|meta| meta.shape.len() == 3);
    weights.find(|meta| config.layer_of(&meta.name) == Some(info.layer))
}

/// Returns the source's tensors that are copied, by name: all but the weights of quantized layers, and those that
/// nothing reads. A tensor of stacked experts is copied if one of them stays unquantized.
fn copied_tensors(
    source: &ModelFiles,
    config: &ModelConfig,
    linears: &[PlannedLinear],
    tables: &[PlannedLinear],
) -> Vec<TensorMeta> {
    let tensors = |quantized: bool| {
        let all = linears.iter().chain(tables);
        let selected = all.filter(move |linear| linear.scheme.is_some() == quantized);
        selected.map(|linear| linear.info.tensor_in(source).0).collect::<BTreeSet<String>>()
    };
    let quantized = &tensors(true) - &tensors(false);
    let mut copied: Vec<_> =
        source.checkpoint().tensors().filter(|meta| !quantized.contains(&meta.name)).cloned().collect();
    // Engines that fuse q, k and v would find the three in different forms.
    // A head that repeats the embedding would differ from one that is quantized or transformed.
    copied.retain(|meta| !config.is_unread(&meta.name) && !config.is_tied_head(&meta.name));
    copied.sort_by(|a, b| a.name.cmp(&b.name));
    copied
}

/// Returns notes on the source and on patterns of the recipe.
fn notes(
    source: &ModelFiles,
    recipe: &Recipe,
    container: Container,
    config: &ModelConfig,
    parts: &[&TensorMeta],
) -> Vec<String> {
    let mut notes = source.notes();
    notes.extend(source.checkpoint().warnings().iter().cloned());
    let unread = source.checkpoint().tensors().filter(|meta| config.is_unread(&meta.name)).count();
    if unread > 0 {
        notes.push(format!(
            "{unread} tensors of layers that share keys and values are left out: nothing reads them"
        ));
    }
    notes.extend(notes_on_parts(container, config, parts));
    notes.extend(storage_note(config, container));
    let mut modules: Vec<_> = config.decoder_linears().map(|l| l.module).collect();
    modules.extend([config.embedding_module(), config.head_module().to_owned()]);
    for rule in &recipe.layers {
        let in_part = |glob: &&Glob| parts.iter().any(|meta| glob.matches(module_of(&meta.name)));
        let none = |glob: &&Glob| !modules.iter().any(|m| glob.matches(m)) && !in_part(glob);
        for glob in rule.modules.iter().filter(none) {
            notes.push(format!("recipe pattern \"{glob}\" matches no layer"));
        }
    }
    notes
}

/// Returns a note on each part of the source that the text model does not use.
fn notes_on_parts(
    container: Container,
    config: &ModelConfig,
    parts: &[&TensorMeta],
) -> impl Iterator<Item = String> {
    let fate = if container.is_one_file() { "left out" } else { "copied" };
    unused::parts(config, parts.iter().copied()).into_iter().map(
        move |unused::UnusedPart { name, tensors, bytes, .. }| {
            let size = bytes as f64 / 1e6;
            format!("{name}: {tensors} tensors ({size:.3} MB) that the text model does not use are {fate}")
        },
    )
}

/// Refuses a scheme for modules outside the text model. A pattern that also matches the text model is meant for it.
fn refuse_other_parts(recipe: &Recipe, config: &ModelConfig, parts: &[&TensorMeta]) -> Result<()> {
    let modules: Vec<String> =
        config.decoder_linears().chain(config.tables()).map(|info| info.module).collect();
    for rule in recipe.layers.iter().filter(|rule| rule.weights.is_some()) {
        for glob in rule.modules.iter().filter(|glob| !modules.iter().any(|module| glob.matches(module))) {
            let matched = parts.iter().find(|meta| glob.matches(module_of(&meta.name)));
            if let Some(meta) = matched {
                let part = unused::parts(config, [*meta].into_iter());
                return Err(QuantError::NotText {
                    recipe: recipe.name.clone(),
                    pattern: glob.to_string(),
                    module: module_of(&meta.name).to_owned(),
                    part: part.into_iter().next().map(|part| part.name).unwrap_or_default(),
                });
            }
        }
    }
    Ok(())
}

/// Module of a tensor.
fn module_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// Returns a note on layers that other engines do not read from a tensor `[out, in]` of their own.
fn storage_note(config: &ModelConfig, container: Container) -> Option<String> {
    // GGUF has one order for all models; gpt-oss has the source's.
    let facts = container.facts();
    if matches!(facts.experts, Experts::OwnNames | Experts::Stacked) {
        return None;
    }
    let elsewhere = |info: &LinearInfo| info.stored == StoredAs::Columns || stacks::only_fused(info);
    let first = config.decoder_linears().find(elsewhere)?;
    match first.stored {
        StoredAs::Stacked(_) => Some(EXPERTS_APART.to_owned()),
        _ if facts.conv1d => None,
        _ => Some(format!(
            "the source stores its layers as Conv1D, [in, out]: in {} only mantissa reads them; fix for other engines: --format gptq",
            container.name()
        )),
    }
}

/// Returns the schemes of inputs that differ from the recipe's, by module.
fn other_inputs(recipe: &Recipe, linears: &[PlannedLinear]) -> BTreeMap<String, Option<Scheme>> {
    let modules = linears.iter().filter(|linear| linear.scheme.is_some()).map(|linear| &linear.info.module);
    let own = modules.map(|module| (module, recipe.activations_of(module)));
    let other = own.filter(|(_, input)| *input != recipe.activations.as_ref());
    other.map(|(module, input)| (module.clone(), input.cloned())).collect()
}
