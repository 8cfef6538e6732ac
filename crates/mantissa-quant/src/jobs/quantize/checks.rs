//! Checks that method, format, transform and calibration text fit one another.

use mantissa_methods::MethodError;
use mantissa_methods::method::{Feature, Fisher, Lack, Work};
use mantissa_methods::transform::Change;
use mantissa_model::{InputQuantizer, ModelConfig, Products};
use mantissa_num::{Format, Rounding, Rule, Scheme, Source};
use mantissa_store::convention::{ActivationQuant, Container, ModelFiles, Support};
use mantissa_train::LayerTrainer;

use crate::calibrate::CalibrationSet;
use crate::calibrate::windows::check_windows;
use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::input_scales::Observer;
use crate::plan::texts::{is_judged, stores_cache_scales, weighs};
use crate::plan::{Options, PlannedLinear, model_not_storable, stores_input_scales};
use crate::recipe::Recipe;
use crate::rotate;
use crate::rounding::{method_error, train_error};
use crate::spin;

/// The decided parts of a plan, for its checks.
pub(super) struct Asked<'a> {
    pub(super) source: &'a ModelFiles,
    pub(super) recipe: &'a Recipe,
    pub(super) container: Container,
    pub(super) config: &'a ModelConfig,
    pub(super) linears: &'a [PlannedLinear],
    pub(super) options: &'a Options,
}

impl Asked<'_> {
    /// Checks that the method can do what is asked and has what it needs; gives what the user should know of it.
    pub(super) fn notes(&self) -> Result<Vec<String>> {
        let Asked { recipe, container, linears, options, .. } = *self;
        if recipe.observer != Observer::Max && !stores_input_scales(recipe, container) {
            let what =
                "observer: no scale of inputs is stored; name a static scheme of activations, or nvfp4";
            return Err(model_not_storable(container, what));
        }
        let per_block = recipe.activations.as_ref().is_some_and(Scheme::has_outer_scale);
        if recipe.observer == Observer::Kl && per_block {
            let what = "observer: kl is of one scale for all inputs, not of blocks with their own: max, percentile or mse";
            return Err(model_not_storable(container, what));
        }
        if let Some(scheme) = &recipe.activations {
            // What stores a scale finds it.
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
        let mut notes = self.check_transform()?;
        notes.extend(self.inputs_of_no_server());
        if weighs(recipe, container, linears) {
            return self.importance();
        }
        if let Some(importance) = &options.importance {
            let why = "no layer has blocks that depend on it, into GGUF and without another method";
            return Ok(vec![format!("{}: not used, as {why}", importance.name)]);
        }
        if recipe.method.needs().text {
            notes.extend(self.alike());
            notes.extend(self.few_tokens(self.windows()?)?);
            return Ok(notes);
        }
        if recipe.needs_calibration() || stores_input_scales(recipe, container) {
            return self.windows().map(|_| notes);
        }
        if is_judged(recipe, container) && options.calibration.is_some() {
            return self.windows().map(|_| notes);
        }
        let set = options
            .calibration
            .as_ref()
            .filter(|_| !stores_cache_scales(recipe.kv.as_ref(), recipe.kv_levels.as_ref()));
        notes.extend(set.map(|set| format!("{}: {} does not calibrate", set.name, recipe.method_name())));
        Ok(notes)
    }

    /// Whether what is asked for of rounding between two codes is done: methods that choose codes by a search of their own, code books
    /// and blocks with one do not round.
    fn check_rounding(&self) -> Result<()> {
        let Asked { recipe, container, linears, options, .. } = *self;
        if options.rounding == Rounding::NearestEven {
            return Ok(());
        }
        let refused = |what: String| {
            let why = format!(
                "--round: expected nearest, got stochastic with {what}: it does not support stochastic rounding"
            );
            Err(model_not_storable(container, why))
        };
        if recipe.method.refuses(Feature::StochasticRounding).is_some() {
            return refused(recipe.method_name());
        }
        let chooses = |scheme: &&Scheme| !matches!(scheme.format, Format::Affine(_));
        match linears.iter().filter_map(|linear| linear.scheme.as_ref()).find(chooses) {
            Some(scheme) => refused(scheme.to_string()),
            None => Ok(()),
        }
    }

    /// Whether something is solved on what the layers read, and may read it with its products rounded. AutoRound learns to come near
    /// the outputs of the original model, which it has in f32; SpinQuant learns in f32 too.
    fn check_products(&self) -> Result<()> {
        let Asked { recipe, container, options, .. } = *self;
        let change = recipe.transform.as_ref().map(|transform| transform.change());
        let searched = matches!(change, Some(Change::Scales(_)));
        let judged = is_judged(recipe, container) && options.calibration.is_some();
        let learned = matches!(recipe.method.work(), Work::Layer(_));
        let solved = recipe.method.needs().text || searched || judged;
        if options.products == Products::F32 || (solved && !learned) {
            return Ok(());
        }
        let why = match learned {
            true => format!("{} learns in f32", recipe.method.name()),
            false => "nothing is solved on what layers read".to_owned(),
        };
        Err(QuantError::Products { recipe: recipe.name.clone(), got: options.products.name(), why })
    }

    /// The text, which there must be.
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
        let Asked { source, recipe, container, options, .. } = *self;
        let refused = |why: &str| Err(model_not_storable(container, why));
        if container.facts().square_scales && recipe.method.refuses(Feature::GivenScales).is_some() {
            return refused(
                "exl2 has scales that rows of a group share, which rounding to nearest knows and GPTQ with groups = \"static\": \
                 use rtn- or gptq-",
            );
        }
        if let Some(why) =
            recipe.method.refuses(Feature::QuantizedInputs).filter(|_| recipe.activations.is_some())
        {
            return refused(why);
        }
        let fault = |what: &str, error| method_error(&Folded::plain(source), what, error);
        if recipe.method.needs().gradients {
            let checked = LayerTrainer::check(self.config);
            checked.map_err(|error| fault(recipe.method.name(), train_error(error)))?;
        }
        // compressed-tensors of today refuses it: only who asks for the container has it.
        let asked = options.container.or(recipe.container) == Some(container);
        let holds_g_idx = match container.facts().group_order {
            Support::No => false,
            Support::Yes => true,
            Support::OnRequest(_) => asked,
        };
        self.quantized().try_for_each(|(PlannedLinear { info, .. }, scheme)| {
            let (module, method) = (&info.module, recipe.method.name());
            let trellis =
                recipe.method.refuses(Feature::Trellis).filter(|_| scheme.format.trellis().is_some());
            let takes = match trellis {
                Some(expected) => Err(MethodError::Scheme(expected)),
                None => recipe.method.takes(scheme, (info.rows, info.cols), holds_g_idx),
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

    /// Notes that errors of outputs count alike although the method would weigh them.
    fn alike(&self) -> Option<String> {
        let Asked { recipe, config, .. } = *self;
        let wanted = recipe.method.needs().fisher == Some(Fisher::Outputs);
        let error = LayerTrainer::check(config).err().filter(|_| wanted)?;
        Some(format!("errors of a layer's outputs count alike, as what they cost takes a backward: {error}"))
    }

    /// Checks that format and method go with the transform. Returns notes on what it leaves out.
    fn check_transform(&self) -> Result<Vec<String>> {
        let Asked { recipe, container, config, .. } = *self;
        let Some(transform) = &recipe.transform else { return Ok(Vec::new()) };
        let refused = |why: &str| Err(model_not_storable(container, why));
        if !container.facts().folded_transforms {
            return refused("transforms go into the other containers, as norms are folded into weights");
        }
        if let Some(why) = recipe.method.refuses(Feature::Transform) {
            return refused(why);
        }
        let Some(options) = transform.rotation() else { return Ok(Vec::new()) };
        let table = transform.name();
        let online = rotate::rotated_inputs(config, options).next().is_some();
        if online && !container.facts().rotations {
            return refused(&format!("it cannot say that inputs are rotated: online = false in [{table}]"));
        }
        if let Some(why) = recipe.method.refuses(Feature::RotatedInputs).filter(|_| online) {
            return refused(&format!("{why}: online = false in [{table}]"));
        }
        if matches!(transform.change(), Change::LearnedRotation(_)) {
            spin::check(self.source, config)?;
        }
        let residual = rotate::residual_of(config).err().filter(|_| options.residual);
        Ok(residual.map(|why| format!("the residual stream is not rotated: {why}")).into_iter().collect())
    }

    /// Inputs that are quantized by a rule which servers' kernels do not have.
    fn inputs_of_no_server(&self) -> Option<String> {
        let scheme = self.recipe.activations.as_ref()?;
        (scheme.encoder.rule == Rule::FourOverSix).then(|| {
            format!(
                "inputs under {scheme} are mantissa's alone: vLLM and SGLang map every block's largest value to 6, as +nvfp4 does"
            )
        })
    }

    /// Fewer tokens than a layer has inputs say nothing of some directions of them.
    fn few_tokens(&self, set: &CalibrationSet) -> Result<Vec<String>> {
        let widest = self.quantized().map(|(linear, _)| linear.info.cols).max().unwrap_or(0);
        let (name, tokens) = (&set.name, set.tokens());
        let what = self.recipe.method.lacking(Lack::Few);
        let what = what.unwrap_or("the Hessian is singular but for its damping");
        let few =
            format!("{name}: {tokens} tokens for layers of {widest} inputs: {what}; more text is better");
        Ok((tokens < widest).then_some(few).into_iter().collect())
    }

    /// Checks the importance, or what it is to be found on.
    fn importance(&self) -> Result<Vec<String>> {
        let Asked { config, linears, options, .. } = *self;
        let Some(importance) = &options.importance else {
            options.calibration.as_ref().map_or(Ok(()), |set| check_windows(set, config))?;
            let low = |(_, scheme): (&PlannedLinear, &Scheme)| {
                let codec = scheme.format.codec();
                codec.is_some_and(|codec| codec.is_searched() && codec.bytes * 8 < 3 * codec.elements)
            };
            let blind = options.calibration.is_none() && self.quantized().any(low);
            let note = "types below three bits without importance lose much: give --calibration TEXT or --imatrix FILE";
            return Ok(blind.then(|| note.to_owned()).into_iter().collect());
        };
        let mut missing = 0;
        for linear in linears.iter().filter(|linear| linear.scheme.is_some()) {
            missing += usize::from(importance.of(&linear.info)?.is_none());
        }
        let note = format!("{}: no importance of {missing} layers", importance.name);
        Ok((missing > 0).then_some(note).into_iter().collect())
    }
}
