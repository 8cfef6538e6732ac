//! QuaRot (Ashkboos, Mohtashami, Croci, Li, Cameron, Jaggi, Alistarh, Hoefler & Hensman 2024, "QuaRot: Outlier-Free 4-Bit Inference in
//! Rotated LLMs", arXiv 2404.00456, section 4): Hadamard rotations that spread outliers over all channels.
//!
//! * The residual stream is rotated by a randomized Hadamard matrix: the embedding gives it so, attention and MLP add to it so,
//!   and what reads it through a norm reads it so. An RMSNorm without weights commutes with a rotation, so the weights of norms
//!   are folded into what reads them first. A LayerNorm takes the mean away, and commutes with the rotations that keep the vector of
//!   ones: a mirror after the Hadamard matrix takes that vector, wherever it went, back to its place; biases of norms are rotated with
//!   what the norms give. So nothing is centred, which would be another function where norms are RMSNorms. A norm of what is added does
//!   not commute: such models keep their residual stream.
//! * Values are rotated within each head, and the output projection reads them so.
//! * The input of the down projection lies behind a product of two vectors, through which nothing can be folded: it is rotated as the
//!   model runs, by Sylvester's matrix in runs of the largest power of two that divides its width.

use mantissa_model::config::{NormForm, NormPlaces};
use mantissa_model::graph::NormKind;
use mantissa_model::{LinearInfo, LinearInput, LinearKind, ModelConfig, Role, StoredAs};
use mantissa_num::Hadamard;
use mantissa_store::Error;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::fold::sites::{Giver, norm_parts, values};
use crate::fold::{Coordinates, Folds};

pub use mantissa_methods::rotate::RotateOptions;

/// Runs shorter than this spread nothing.
const LEAST_ORDER: usize = 4;

/// Matrix for the residual stream, or the reason why it cannot be rotated.
pub(crate) fn residual_of(config: &ModelConfig) -> std::result::Result<Hadamard, &'static str> {
    if matches!(config.norm_places, NormPlaces::After | NormPlaces::Both) {
        return Err("what is added to it is normed, which does not commute with rotations");
    }
    if config.decoder_linears().any(|info| matches!(info.stored, StoredAs::Stacked(_))) {
        return Err("experts that are stored stacked are not rotated");
    }
    order_of(config.hidden_size).ok_or("its width has no Hadamard matrix")
}

/// The matrix of the whole width, or of the largest runs that divide it.
fn order_of(width: usize) -> Option<Hadamard> {
    Hadamard::new(width).or_else(|| sylvester(width))
}

/// Sylvester's matrix of the largest power of two that divides `width`.
fn sylvester(width: usize) -> Option<Hadamard> {
    let order = 1usize.checked_shl(width.trailing_zeros())?;
    Hadamard::new(order).filter(|_| width > 0 && order >= LEAST_ORDER)
}

/// True if the head, tied to the embedding, becomes a tensor of its own: the weight of the last norm is folded into it alone.
pub(crate) fn unties(config: &ModelConfig, options: RotateOptions) -> bool {
    options.residual && config.tie_word_embeddings && residual_of(config).is_ok()
}

/// The linear layers whose inputs are rotated as the model runs, and the matrices.
pub(crate) fn rotated_inputs(
    config: &ModelConfig,
    options: RotateOptions,
) -> impl Iterator<Item = (LinearInfo, Hadamard)> {
    let down = move |info: &LinearInfo| {
        let kind = matches!(info.kind, LinearKind::Down | LinearKind::SharedDown | LinearKind::ExpertDown(_));
        options.online && kind && info.stored == StoredAs::Rows
    };
    config.decoder_linears().filter(down).filter_map(|info| {
        let matrix = sylvester(info.cols)?;
        Some((info, matrix))
    })
}

/// By what a model's vectors are multiplied.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rotations {
    /// The residual stream, one after the other; by none where it stays as it is.
    pub(crate) residual: Vec<Coordinates>,
    /// Values within each head, layer by layer.
    pub(crate) values: Vec<Option<Coordinates>>,
}

impl Rotations {
    /// Randomized Hadamard matrices.
    pub(crate) fn random(config: &ModelConfig, options: RotateOptions) -> Self {
        let matrix = residual_of(config).ok().filter(|_| options.residual);
        let matrix = matrix.map(|matrix| matrix.randomized(options.seed));
        let mut residual: Vec<_> = matrix.clone().into_iter().map(Coordinates::Rotated).collect();
        if matches!(config.norm, NormForm::Layer | NormForm::LayerPlain) {
            residual.extend(matrix.and_then(|matrix| back_to_ones(&matrix, config.hidden_size)));
        }
        let values = (0..config.num_hidden_layers).map(|layer| {
            values(config, &config.layer_linears(layer)).filter(|_| options.values)?;
            let seed = options.seed.wrapping_add(1 + layer as u64);
            Some(Coordinates::Rotated(order_of(config.head_dim)?.randomized(seed)))
        });
        Rotations { residual, values: values.collect() }
    }
}

/// The mirror that takes what `matrix` makes of the vector of ones back to it.
fn back_to_ones(matrix: &Hadamard, width: usize) -> Option<Coordinates> {
    let one = 1.0 / (width as f64).sqrt();
    let mut across = vec![one; width];
    matrix.forward(&mut across);
    across.iter_mut().for_each(|v| *v -= one);
    let length = across.iter().map(|v| v * v).sum::<f64>().sqrt();
    let unit = || across.iter().map(|v| (v / length) as f32).collect();
    (length > 1e-9).then(|| Coordinates::Mirrored(unit()))
}

/// The changes of all tensors under `rotations`, and those of inputs that are rotated as the model runs.
///
/// # Errors
/// A norm of the source cannot be read, or has weights that cannot be folded into what reads it.
pub(crate) fn folds(
    source: &ModelFiles,
    config: &ModelConfig,
    options: RotateOptions,
    rotations: &Rotations,
) -> Result<Folds> {
    let mut folds = Folds::default();
    if !rotations.residual.is_empty() {
        residual(source, config, &rotations.residual, &mut folds)?;
    }
    for (layer, matrix) in rotations.values.iter().enumerate() {
        let Some((matrix, site)) = matrix.as_ref().zip(values(config, &config.layer_linears(layer))) else {
            continue;
        };
        if let Giver::Linear(v, _) = &site.giver {
            folds.gives(v, matrix);
        }
        site.readers.iter().for_each(|o| folds.reads(o, matrix));
    }
    for (info, matrix) in rotated_inputs(config, options) {
        folds.rotate_input(&info, &matrix);
    }
    Ok(folds)
}

fn residual(
    source: &ModelFiles,
    config: &ModelConfig,
    rotated: &[Coordinates],
    folds: &mut Folds,
) -> Result<()> {
    let d = config.hidden_size;
    let embedding = format!("{}.weight", config.embedding_module());
    let positions = format!("{}.weight", config.positions_module());
    for rotated in rotated {
        folds.holds(embedding.clone(), (config.vocab_size, d), rotated);
        if config.learned_positions {
            folds.holds(positions.clone(), (config.max_position_embeddings, d), rotated);
        }
    }
    let sides: Vec<_> = config.tensors().into_iter().collect();
    for layer in 0..config.num_hidden_layers {
        let linears = config.layer_linears(layer);
        for (kind, _) in config.norms() {
            let reads = |input: LinearInput| match kind {
                NormKind::Input if config.norm_places == NormPlaces::ParallelShared => {
                    input == LinearInput::Qkv || of_mlp(input)
                }
                NormKind::Input => input == LinearInput::Qkv,
                NormKind::Post => of_mlp(input),
                _ => false,
            };
            let readers: Vec<_> = linears.iter().filter(|info| reads(info.kind.input())).collect();
            if readers.is_empty() {
                continue;
            }
            let weights = norm_weights(source, config, &config.norm_module(layer, kind), rotated, folds)?;
            let read = || weights.iter().chain(rotated);
            readers.into_iter().for_each(|info| read().for_each(|by| folds.reads(info, by)));
            for side in sides.iter().filter(|t| matches!(t.role, Role::Side { layer: of, .. } if of == layer))
            {
                if kind == NormKind::Post {
                    read().for_each(|by| folds.reads_rows(side.name.clone(), (side.shape[0], d), by));
                }
            }
        }
        let adds = |info: &&LinearInfo| {
            use LinearKind as L;
            matches!(info.kind, L::O | L::Down | L::SharedDown | L::ExpertDown(_))
        };
        linears.iter().filter(adds).for_each(|info| rotated.iter().for_each(|by| folds.gives(info, by)));
    }
    let weights = norm_weights(source, config, &config.final_norm_module(), rotated, folds)?;
    let head = format!("{}.weight", config.head_module());
    for by in weights.iter().chain(rotated) {
        folds.reads_rows(head.clone(), (config.vocab_size, d), by);
    }
    if config.tie_word_embeddings {
        folds.untie(head, embedding, source.config());
    }
    Ok(())
}

/// True if it is the output of the norm before the MLP.
fn of_mlp(input: LinearInput) -> bool {
    matches!(input, LinearInput::GateUp | LinearInput::Expert(_))
}

/// Sets the weights of a norm to 1, rotates its bias, and gives the weights for what reads it; `None` of a norm that has neither.
fn norm_weights(
    source: &ModelFiles,
    config: &ModelConfig,
    module: &str,
    rotated: &[Coordinates],
    folds: &mut Folds,
) -> Result<Option<Coordinates>> {
    if config.norm == NormForm::LayerPlain {
        return Ok(None);
    }
    let (width, parts) = (config.hidden_size, norm_parts(config));
    let (name, bias) = (format!("{module}.weight"), format!("{module}.bias"));
    let mut weights = source.tensor_f32(&name, &[width])?;
    if parts.plus_one {
        weights.iter_mut().for_each(|w| *w += 1.0);
    }
    // What reads a channel of weight 0 would have to read its bias all the same.
    if let Some(channel) = weights.iter().position(|w| *w == 0.0).filter(|_| parts.bias) {
        let allowed = "others, where there is a bias and the residual stream is rotated";
        let cure = "residual = false in [rotate]";
        return Err(Error::field(source.dir(), format!("{name}[{channel}]"), "0", allowed, cure).into());
    }
    let weights = Coordinates::Divided(weights);
    folds.norm(module, width, parts, &weights);
    if parts.bias {
        rotated.iter().for_each(|by| folds.holds(bias.clone(), (1, width), by));
    }
    Ok(Some(weights))
}
