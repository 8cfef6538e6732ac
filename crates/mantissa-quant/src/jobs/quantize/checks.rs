//! Checks that method, format, transform and calibration text fit one another.

use std::sync::Arc;

use mantissa_methods::method::{CalibrationGap, Feature, Fisher, Work};
use mantissa_methods::registry;
use mantissa_methods::transform::Change;
use mantissa_methods::{Method, MethodError};
use mantissa_model::{InputQuantizer, ModelConfig, Products, StoredAs};
use mantissa_num::{Format, Rounding, Rule, Scheme, Source};
use mantissa_store::convention::{ActivationQuant, Container, ModelFiles, Support};
use mantissa_train::LayerTrainer;

use super::mixes;
use crate::calibrate::CalibrationSet;
use crate::calibrate::windows::check_windows;
use crate::e2e;
use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::input_scales::Observer;
use crate::plan::alternative;
use crate::plan::{Options, PlannedLinear, is_judged, model_not_storable, uses_importance};
use crate::recipe::{BUILT_IN, Recipe};
use crate::rotate;
use crate::rounding::{method_error, train_error};
use crate::spin;

/// Method that tools for serving calibrate by where a scheme alone is named, such as llm-compressor's W4A16.
const CALIBRATING: &str = "gptq";

/// Parts of a plan to check.
pub(super) struct Request<'a> {
    pub(super) source: &'a ModelFiles,
    pub(super) recipe: &'a Recipe,
    pub(super) container: Container,
    pub(super) config: &'a ModelConfig,
    pub(super) linears: &'a [PlannedLinear],
    pub(super) options: &'a Options,
}

impl Request<'_> {
    /// Checks that the method supports the request and has what it needs. Returns notes for the user.
    pub(super) fn notes(&self) -> Result<Vec<String>> {
        let Request { recipe, container, linears, options, .. } = *self;
        if recipe.options.observer() != Observer::Max && !recipe.stores_input_scales(container) {
            let what = "observer: no input scale is stored; fix: use a static activation scheme or nvfp4";
            return Err(model_not_storable(container, what));
        }
        let inputs: Vec<&Scheme> = recipe.pairs().into_iter().filter_map(|(_, input)| input).collect();
        if recipe.mixes_activations() && (!recipe.rounds_to_nearest() || recipe.transform.is_some()) {
            let what = "layers.activations: only rtn without a transform takes other inputs for some layers; fix: method = \"rtn\"";
            return Err(model_not_storable(container, what));
        }
        let per_block = inputs.iter().any(|scheme| scheme.has_outer_scale());
        if recipe.options.observer() == Observer::Kl && per_block {
            let what = "observer: kl supports one scale per tensor, not block scales; fix: use max, percentile or mse";
            return Err(model_not_storable(container, what));
        }
        for scheme in inputs {
            // Schemes with a stored scale need one to be checked; any positive value does.
            let found = (scheme.has_outer_scale() || scheme.source == Source::Static).then_some(1.0);
            if let Err(error) =
                InputQuantizer::new("activations", &ActivationQuant::new(scheme.clone(), found))
            {
                return Err(model_not_storable(container, error.to_string()));
            }
        }
        self.check_rounding()?;
        self.check_products()?;
        self.check_method()?;
        mixes::check(recipe, self.config, linears)?;
        self.check_tuning()?;
        let mut notes = self.check_transform()?;
        notes.extend(self.experts_note());
        notes.extend(self.unsupported_input_note());
        if uses_importance(recipe, container, linears) {
            let importance = self.importance()?;
            if !recipe.needs(|needs| needs.text) {
                return Ok(importance);
            }
            notes.extend(importance);
        }
        let weighted = uses_importance(recipe, container, linears);
        if let Some(importance) = options.importance.as_ref().filter(|_| !weighted) {
            let why = "only GGUF blocks quantized without another method depend on it";
            return Ok(vec![format!("{}: not used: {why}", importance.name)]);
        }
        if recipe.needs(|needs| needs.text) {
            notes.extend(self.unweighted_note());
            notes.extend(self.few_tokens(self.windows()?)?);
            return Ok(notes);
        }
        if recipe.needs_calibration_in(container) {
            return self.windows().map(|_| notes);
        }
        if is_judged(recipe, container) && options.calibration.is_some() {
            return self.windows().map(|_| notes);
        }
        let set = options.calibration.as_ref();
        notes.extend(set.map(|set| {
            let fix = self.calibrated().map_or_else(String::new, |fix| format!("; fix: {fix}"));
            format!("{}: {} does not calibrate{fix}", set.name, recipe.method_name())
        }));
        Ok(notes)
    }

    /// Returns the option for the same schemes by [`CALIBRATING`]; `None` if that does not take them, or for a recipe with a method
    /// of its own.
    fn calibrated(&self) -> Option<String> {
        let recipe = self.recipe;
        let listed = recipe.file_type.is_some() || BUILT_IN.iter().any(|(name, _)| *name == recipe.name);
        if listed || !recipe.rounds_to_nearest() {
            return None;
        }
        let method: Arc<dyn Method> = (registry::find(CALIBRATING)?.new)(&recipe.weights).into();
        let calibrated = Recipe { method, ..recipe.clone() };
        Request { recipe: &calibrated, ..*self }.check_method().ok()?;
        let named = alternative::full_name(recipe, CALIBRATING, &recipe.weights.to_string());
        Some(match Recipe::is_file(&recipe.name) {
            true => format!("method = \"{CALIBRATING}\" in {}", recipe.name),
            false => format!("--recipe {named}"),
        })
    }

    /// Checks that stochastic rounding is supported if requested. Methods that search codes, code books and searched
    /// blocks do not support it.
    fn check_rounding(&self) -> Result<()> {
        let Request { recipe, container, linears, options, .. } = *self;
        if options.rounding == Rounding::NearestEven {
            return Ok(());
        }
        let refused = |what: String| {
            let why = format!(
                "--round: expected nearest, got stochastic with {what}: it does not support stochastic rounding"
            );
            Err(model_not_storable(container, why))
        };
        if recipe.methods().any(|method| method.refuses(Feature::StochasticRounding).is_some()) {
            return refused(recipe.method_name());
        }
        let chooses = |scheme: &&Scheme| !matches!(scheme.format, Format::Affine(_));
        match linears.iter().filter_map(|linear| linear.scheme.as_ref()).find(chooses) {
            Some(scheme) => refused(scheme.to_string()),
            None => Ok(()),
        }
    }

    /// Checks that calibration may use rounded matmul operands: some solution must depend on the inputs of layers.
    /// AutoRound and SpinQuant learn in f32.
    fn check_products(&self) -> Result<()> {
        let Request { recipe, container, options, .. } = *self;
        let change = recipe.transform.as_ref().map(|transform| transform.change());
        let searched = matches!(change, Some(Change::Scales(_)));
        let judged = is_judged(recipe, container) && options.calibration.is_some();
        let learned = recipe.methods().find(|method| matches!(method.work(), Work::Layer(_)));
        let solved = recipe.needs(|needs| needs.text) || searched || judged;
        if options.products == Products::F32 || (solved && learned.is_none()) {
            return Ok(());
        }
        let why = match learned {
            Some(method) => format!("{} learns in f32", method.name()),
            None => "no method solves on inputs of layers".to_owned(),
        };
        Err(QuantError::Products { recipe: recipe.name.clone(), got: options.products.name(), why })
    }

    /// Returns the calibration text, which is required here.
    fn windows(&self) -> Result<&CalibrationSet> {
        let none = || QuantError::NoCalibration { recipe: self.recipe.name.clone() };
        let set = self.options.calibration.as_ref().ok_or_else(none)?;
        check_windows(set, self.config)?;
        if let Some(unseen) = self.options.held_out_set() {
            check_windows(&unseen, self.config)?;
        }
        Ok(set)
    }

    fn quantized(&self) -> impl Iterator<Item = (&PlannedLinear, &Scheme)> {
        self.linears.iter().filter_map(|linear| Some((linear, linear.scheme.as_ref()?)))
    }

    /// Checks that the method takes the schemes and their layout.
    fn check_method(&self) -> Result<()> {
        let Request { source, recipe, container, options, .. } = *self;
        let refused = |why: &str| Err(model_not_storable(container, why));
        let refusing = |feature| recipe.methods().find_map(|method| method.refuses(feature));
        if container.facts().square_scales && refusing(Feature::GivenScales).is_some() {
            return refused(
                "exl2 stores scales that rows of a group share, which only rtn and gptq with groups = \"static\" support",
            );
        }
        if let Some(why) = refusing(Feature::QuantizedInputs).filter(|_| recipe.activations.is_some()) {
            return refused(why);
        }
        let fault = |what: &str, error| method_error(&Folded::plain(source), what, error);
        if let Some(method) = recipe.methods().find(|method| method.needs().gradients) {
            let checked = LayerTrainer::check(self.config);
            checked.map_err(|error| fault(method.name(), train_error(error)))?;
        }
        // Current compressed-tensors refuses g_idx, so it is written only if the container was requested.
        let asked = options.container.or(recipe.container) == Some(container);
        let holds_g_idx = match container.facts().group_order {
            Support::No => false,
            Support::Yes => true,
            Support::OnRequest(_) => asked,
        };
        self.quantized().try_for_each(|(PlannedLinear { info, .. }, scheme)| {
            let own = recipe.method_of(&info.module);
            let (module, method) = (&info.module, own.name());
            let trellis = own.refuses(Feature::Trellis).filter(|_| scheme.format.trellis().is_some());
            let takes = match trellis {
                Some(expected) => Err(MethodError::Scheme(expected)),
                None => own.takes(scheme, (info.rows, info.cols), holds_g_idx),
            };
            match takes {
                Err(MethodError::Scheme(expected)) => {
                    let (path, module, scheme) =
                        (source.dir().to_owned(), module.clone(), scheme.to_string());
                    Err(QuantError::Unsuited { path, module, method, scheme, expected })
                }
                checked => checked.map_err(|error| fault(module, error)),
            }
        })
    }

    /// Checks that format and model support the training of scales and norms.
    fn check_tuning(&self) -> Result<()> {
        let Request { source, recipe, container, config, .. } = *self;
        if recipe.tuning.is_none() {
            return Ok(());
        }
        e2e::check(source, config)?;
        let refused = |why: &str| Err(model_not_storable(container, why));
        if container.is_one_file() {
            return refused(
                "e2e: expected a folder, got a single file; fix: --format native, then mantissa convert",
            );
        }
        if container.facts().square_scales {
            return refused("e2e: its scales are shared by rows and columns; fix: use another --format");
        }
        if recipe.stores_cache_scales() {
            return refused(
                "e2e: calibrated scales of keys and values would not fit the trained model; fix: use a dynamic KV scheme",
            );
        }
        let rotation = recipe.transform.as_ref().and_then(|transform| transform.rotation());
        if rotation.is_some_and(|options| rotate::rotated_inputs(config, options).next().is_some()) {
            return refused(
                "e2e: inputs rotated at run time have no backward pass; fix: set online = false in the recipe file",
            );
        }
        if self.quantized().any(|(linear, _)| linear.info.stored != StoredAs::Rows) {
            return refused(
                "e2e: expected weights stored as [out, in], one tensor per layer; fix: leave out +e2e",
            );
        }
        Ok(())
    }

    /// Notes that routing to all experts was requested in vain.
    fn experts_note(&self) -> Option<String> {
        let vain = self.options.route_all_experts && self.config.experts.is_none();
        vain.then(|| "--route-all-experts: not used: the model has no experts".to_owned())
    }

    /// Notes that output errors are unweighted although the method would weight them.
    fn unweighted_note(&self) -> Option<String> {
        let Request { recipe, config, .. } = *self;
        let wanted = recipe.needs(|needs| needs.fisher == Some(Fisher::Outputs));
        let error = LayerTrainer::check(config).err().filter(|_| wanted)?;
        Some(format!(
            "output errors of a layer are unweighted, because the Fisher information needs a backward pass: {error}"
        ))
    }

    /// Checks that format and method support the transform. Returns notes on parts that it leaves out.
    fn check_transform(&self) -> Result<Vec<String>> {
        let Request { recipe, container, config, .. } = *self;
        let Some(transform) = &recipe.transform else { return Ok(Vec::new()) };
        let refused = |why: &str| Err(model_not_storable(container, why));
        if !container.facts().folded_transforms {
            return refused("transforms are not supported in this format, because they change norms");
        }
        if let Some(why) = recipe.method.refuses(Feature::Transform) {
            return refused(why);
        }
        let Some(options) = transform.rotation() else { return Ok(Vec::new()) };
        let table = transform.name();
        let online = rotate::rotated_inputs(config, options).next().is_some();
        if online && !container.facts().rotations {
            return refused(&format!(
                "the format cannot store rotated inputs, unless a recipe file has online = false in [{table}]"
            ));
        }
        if let Some(why) = recipe.method.refuses(Feature::RotatedInputs).filter(|_| online) {
            return refused(&format!("{why}; fix: set online = false in [{table}] of the recipe file"));
        }
        if matches!(transform.change(), Change::LearnedRotation(_)) {
            spin::check(self.source, config)?;
        }
        let residual = rotate::residual_of(config).err().filter(|_| options.residual);
        Ok(residual.map(|why| format!("the residual stream is not rotated: {why}")).into_iter().collect())
    }

    /// Notes that inputs use a rule that kernels of engines do not have.
    fn unsupported_input_note(&self) -> Option<String> {
        let scheme = self.recipe.activations.as_ref()?;
        (scheme.encoder.rule == Rule::FourOverSix).then(|| {
            format!(
                "only mantissa quantizes inputs as {scheme}: vLLM and SGLang map every block's amax to 6, as +nvfp4 does"
            )
        })
    }

    /// Notes a calibration with fewer tokens than a layer has inputs, which leaves some directions unseen.
    fn few_tokens(&self, set: &CalibrationSet) -> Result<Vec<String>> {
        let widest = self.quantized().map(|(linear, _)| linear.info.cols).max().unwrap_or(0);
        let (name, tokens) = (&set.name, set.tokens());
        let what = self.recipe.methods().find_map(|method| method.on_gap(CalibrationGap::Few));
        let what = what.unwrap_or("only damping keeps the Hessian from being singular");
        let few =
            format!("{name}: {tokens} tokens for layers of {widest} inputs: {what}; more text is better");
        Ok((tokens < widest).then_some(few).into_iter().collect())
    }

    /// Checks the importance matrix, or the text that it is computed on.
    fn importance(&self) -> Result<Vec<String>> {
        let Request { config, linears, options, .. } = *self;
        let Some(importance) = &options.importance else {
            options.calibration.as_ref().map_or(Ok(()), |set| check_windows(set, config))?;
            let low = |(_, scheme): (&PlannedLinear, &Scheme)| {
                let codec = scheme.format.codec();
                codec.is_some_and(|codec| codec.is_searched() && codec.bytes * 8 < 3 * codec.elements)
            };
            let blind = options.calibration.is_none() && self.quantized().any(low);
            let note = "types below three bits need an importance matrix for good quality; fix: give --calibration TEXT or --imatrix FILE";
            return Ok(blind.then(|| note.to_owned()).into_iter().collect());
        };
        let mut missing = 0;
        for linear in linears.iter().filter(|linear| linear.scheme.is_some()) {
            missing += usize::from(importance.of(self.config, &linear.info)?.is_none());
        }
        let note = format!("{}: no importance for {missing} layers", importance.name);
        Ok((missing > 0).then_some(note).into_iter().collect())
    }
}
