//! Embedding and output head: matrices outside the decoder layers, quantized if the recipe names them.
//!
//! They are rounded to nearest whatever the recipe's method, and their inputs stay unquantized: no method sees the
//! statistics of the head's input, and an embedding has none. In a GGUF file the plan of the [layout](crate::gguf)
//! has them.

use mantissa_model::{LinearInfo, LinearKind, ModelConfig, load_config};
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, ModelFiles, SideTensors};
use mantissa_store::{Dtype, Error, TensorSpec};

use crate::error::Result;
use crate::fold::{Folded, Folds};
use crate::layers::QuantizedLayer;
use crate::plan::{Options, Plan, PlannedLinear, model_not_storable};
use crate::recipe::Recipe;
use crate::rotate;
use crate::rounding::{check_range, round_to_nearest};
use crate::rtn;
use crate::source::DenseTensor;

/// Plan of embedding and head.
pub(crate) struct Tables {
    /// Those that are quantized.
    pub(crate) planned: Vec<PlannedLinear>,
    /// Their tensors, and a dense head that the source does not have.
    pub(crate) specs: Vec<TensorSpec>,
    /// Weights of head and embedding, if they become separate.
    pub(crate) untied: Option<(String, String)>,
    /// Note for the user.
    pub(crate) note: Option<String>,
}

impl Tables {
    /// Plans the embedding and the head, as far as the recipe quantizes or unties them.
    ///
    /// # Errors
    /// [`QuantError::NotStorable`](crate::QuantError::NotStorable) if readers of the format take no quantized
    /// embedding or head, or not in this scheme; or if the head is the embedding.
    pub(crate) fn plan(
        source: &ModelFiles,
        recipe: &Recipe,
        container: Container,
        config: &ModelConfig,
        options: &Options,
    ) -> Result<Self> {
        let untied = untied_head(config, recipe);
        let request = Request { source, recipe, container, config, options, untied: untied.is_some() };
        request.refuse_tied_head()?;
        let (mut planned, mut specs) = (Vec::new(), Vec::new());
        // The layout of a GGUF file has the schemes of all its tensors.
        let kinds =
            [LinearKind::Embedding, LinearKind::Head].into_iter().filter(|_| !container.is_one_file());
        for info in kinds.map(|kind| config.table(kind)) {
            let Some(scheme) = recipe.table_scheme(&info.module) else { continue };
            let (scheme, own) = request.stored(&info, scheme)?;
            specs.extend(own);
            planned.push(PlannedLinear { info, scheme: Some(scheme) });
        }
        let dense = planned.iter().all(|table| table.info.kind != LinearKind::Head);
        specs.extend(untied.as_ref().filter(|_| dense).and_then(|names| spec_of_untied(source, names)));
        let idle = recipe.options.untie && !config.tie_word_embeddings;
        let note = idle.then(|| "untie: the model already has a head of its own".to_owned());
        Ok(Tables { planned, specs, untied, note })
    }
}

/// Returns the weights of head and embedding that become separate: a rotation folds the last norm into the head, or the
/// recipe asks for it.
fn untied_head(config: &ModelConfig, recipe: &Recipe) -> Option<(String, String)> {
    let rotation = recipe.transform.as_ref().and_then(|transform| transform.rotation());
    let rotated = rotation.is_some_and(|options| rotate::unties(config, options));
    let name = |module: &str| format!("{module}.weight");
    let unties = rotated || (recipe.options.untie && config.tie_word_embeddings);
    unties.then(|| (name(config.head_module()), name(&config.embedding_module())))
}

/// Declares the dense head of [`untied_head`], which the source stores as the embedding alone.
fn spec_of_untied(source: &ModelFiles, (head, embedding): &(String, String)) -> Option<TensorSpec> {
    let meta = source.checkpoint().get(embedding)?;
    Some(TensorSpec::new(head, meta.dtype, meta.shape.clone()))
}

/// Unties the head of `folds` if this config unties it and the source ties it.
pub(crate) fn untie(folds: &mut Folds, config: &ModelConfig, source: &ModelFiles) -> Result<()> {
    let tied = load_config(source)?.tie_word_embeddings;
    if tied && !config.tie_word_embeddings && folds.untied().is_none() {
        let name = |module: &str| format!("{module}.weight");
        let (head, embedding) = (name(config.head_module()), name(&config.embedding_module()));
        folds.untie(head, embedding, source.config());
    }
    Ok(())
}

/// Source and target of a plan.
#[derive(Clone, Copy)]
struct Request<'a> {
    source: &'a ModelFiles,
    recipe: &'a Recipe,
    container: Container,
    config: &'a ModelConfig,
    options: &'a Options,
    /// True if the head becomes a tensor of its own.
    untied: bool,
}

impl Request<'_> {
    /// Returns the scheme as stored, and the tensors.
    fn stored(&self, info: &LinearInfo, scheme: &Scheme) -> Result<(Scheme, Vec<TensorSpec>)> {
        let Request { container, options, .. } = *self;
        let (module, name) = (&info.module, container.name());
        let refused = |why: String| model_not_storable(container, format!("{module}: {why}"));
        let facts = container.facts();
        let (taken, flag) = if info.kind == LinearKind::Head {
            (facts.quantized_head, "--head")
        } else {
            (facts.quantized_embedding, "--embeddings")
        };
        if !taken {
            let what = format!("readers of {name} load it unquantized");
            return Err(refused(format!("{what}; fix: leave out {flag}, or use --format native")));
        }
        let mut scheme = container.as_stored(scheme.clone(), self.dtype(info));
        scheme.encoder.rounding = options.rounding;
        if scheme.format.trellis().is_some() {
            return Err(refused(format!("{scheme} needs the inputs of a layer; fix: {flag} int8-channel")));
        }
        let specs = container.specs(&crate::plan::table_plan(info, &scheme));
        let specs = specs.map_err(|error| refused(format!("{error}; fix: another scheme with {flag}")))?;
        Ok((scheme, specs))
    }

    /// Refuses a scheme for a head that is the embedding, and a GGUF file with such a head apart.
    fn refuse_tied_head(&self) -> Result<()> {
        let Request { recipe, container, config, untied, .. } = *self;
        let head = config.head_module();
        if untied && container.is_one_file() {
            let why = "llama.cpp uses the embedding as head; fix: leave out --untie, or quantize both by --embeddings q6_k";
            return Err(model_not_storable(container, format!("{head}: {why}")));
        }
        if untied || !config.tie_word_embeddings || recipe.table_scheme(head).is_none() {
            return Ok(());
        }
        let both = match container.facts() {
            facts if facts.one_file || facts.quantized_embedding => {
                "--embeddings SCHEME, which quantizes both"
            }
            _ => "--untie, which stores the head apart and makes the model larger by it",
        };
        let why = format!("{head}: the model has no head of its own, it uses the embedding; fix: {both}");
        Err(model_not_storable(container, why))
    }

    /// Returns the dtype of the dense table.
    fn dtype(&self, info: &LinearInfo) -> Dtype {
        let stored = |module: &str| self.source.checkpoint().get(&format!("{module}.weight"));
        let meta = stored(&info.module).or_else(|| stored(&self.config.embedding_module()));
        meta.map_or(Dtype::F32, |meta| meta.dtype)
    }
}

/// Quantizes embedding or head by RTN into the tensors of the plan's container.
pub(crate) fn quantize(
    plan: &Plan,
    source: &Folded<'_>,
    info: &LinearInfo,
    scheme: &Scheme,
) -> Result<QuantizedLayer> {
    let w = DenseTensor::of_linear(source, info)?;
    let solved = round_to_nearest(plan, source, info, scheme, &w, None)?;
    check_range(plan, source, info, scheme, &w, &solved.stats)?;
    let tensors =
        plan.container.tensors(&plan.linear_plan(info, scheme), &solved.quantized, SideTensors::Nothing);
    let tensors = tensors.map_err(|error| {
        let expected = "a scheme that the format holds";
        Error::field(source.path(), &info.module, error.to_string(), expected, "")
    })?;
    Ok((tensors, plan.layer_report(info, scheme, rtn::NAME, solved)))
}
