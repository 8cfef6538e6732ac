//! QuaRot (Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456, section 4):
//! Hadamard rotations that spread outliers over all channels.
//!
//! * Residual stream: rotated by a randomized Hadamard matrix. The embedding, attention and MLP produce it rotated, and
//!   its readers rotate back. An RMSNorm without weights commutes with rotations, so the weights of norms are first
//!   folded into the layers that read them.
//! * LayerNorm also subtracts the mean, so it commutes only with rotations that keep the vector of ones. A Householder
//!   reflection after the Hadamard matrix maps that vector back to itself. Biases of norms are rotated with the output.
//!   Weights are not centered, because that would change the function of models with RMSNorm.
//! * Norms after attention or MLP do not commute with rotations. Such models keep their residual stream.
//! * Values: rotated within each head; the output projection rotates back.
//! * Input of the down projection: it follows a product of two vectors, through which no rotation can be folded. It is
//!   rotated at run time (online), by Sylvester's matrix in blocks of the largest power of two that divides its width.

use mantissa_model::config::{NormForm, NormPlaces};
use mantissa_model::graph::{NormKind, SideKind};
use mantissa_model::{LinearInfo, LinearInput, LinearKind, ModelConfig, Role, StoredAs, TensorInfo};
use mantissa_num::Hadamard;
use mantissa_store::Error;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::fold::sites::{Producer, norm_parts, values};
use crate::fold::{Coordinates, Folds};

pub use mantissa_methods::rotate::RotateOptions;

/// Minimum block length; shorter blocks do not spread outliers.
const LEAST_ORDER: usize = 4;

/// Returns the matrix for the residual stream, or the reason why it cannot be rotated.
pub(crate) fn residual_of(config: &ModelConfig) -> std::result::Result<Hadamard, &'static str> {
    if matches!(config.norm_places, NormPlaces::After | NormPlaces::Both) {
        return Err("the model has norms after attention or MLP, which do not commute with rotations");
    }
    if config.by_layer.hyper.is_some() {
        return Err("the states are parallel streams, which unquantized weights read and mix");
    }
    if config.experts.as_ref().is_some_and(|experts| experts.latent.is_some()) {
        return Err("experts write a latent, from which an unquantized projection leads to the states");
    }
    if config.decoder_linears().any(|info| matches!(info.stored, StoredAs::Stacked(_))) {
        return Err("experts stored in one tensor are not rotated");
    }
    order_of(config.hidden_size).ok_or("its width has no Hadamard matrix of order 4 or more")
}

/// Returns the Hadamard matrix of the whole width, or of the largest power of two that divides it.
fn order_of(width: usize) -> Option<Hadamard> {
    Hadamard::new(width).or_else(|| sylvester(width))
}

/// Returns Sylvester's matrix of the largest power of two that divides `width`.
fn sylvester(width: usize) -> Option<Hadamard> {
    let order = 1usize.checked_shl(width.trailing_zeros())?;
    Hadamard::new(order).filter(|_| width > 0 && order >= LEAST_ORDER)
}

/// True if a tied head becomes a tensor of its own, because the weights of the last norm are folded into the head
/// alone.
pub(crate) fn unties(config: &ModelConfig, options: RotateOptions) -> bool {
    options.residual && config.tie_word_embeddings && residual_of(config).is_ok()
}

/// Returns the linear layers whose inputs are rotated at run time, with their matrices.
pub(crate) fn rotated_inputs(
    config: &ModelConfig,
    options: RotateOptions,
) -> impl Iterator<Item = (LinearInfo, Hadamard)> {
    let down = move |info: &LinearInfo| {
        options.online && info.kind.dense() == LinearKind::Down && info.stored == StoredAs::Rows
    };
    config.decoder_linears().filter(down).filter_map(|info| {
        let matrix = sylvester(info.cols)?;
        Some((info, matrix))
    })
}

/// Rotations of a model's vectors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rotations {
    /// Rotations of the residual stream, applied in order; empty if it stays unchanged.
    pub(crate) residual: Vec<Coordinates>,
    /// Rotation of the values within each head, by layer.
    pub(crate) values: Vec<Option<Coordinates>>,
}

impl Rotations {
    /// Returns randomized Hadamard matrices.
    pub(crate) fn random(config: &ModelConfig, options: RotateOptions) -> Self {
        let matrix = residual_of(config).ok().filter(|_| options.residual);
        let matrix = matrix.map(|matrix| matrix.randomized(options.seed));
        let mut residual: Vec<_> = matrix.clone().into_iter().map(Coordinates::Rotated).collect();
        if config.norm.centers() {
            residual.extend(matrix.and_then(|matrix| restore_ones(&matrix, config.hidden_size)));
        }
        let values = (0..config.num_hidden_layers).map(|layer| {
            // A gate multiplies the values element by element.
            let rotates = options.values && !config.attention.gated;
            values(config, &config.layer_linears(layer)).filter(|_| rotates)?;
            let seed = options.seed.wrapping_add(1 + layer as u64);
            Some(Coordinates::Rotated(order_of(config.head_dim)?.randomized(seed)))
        });
        Rotations { residual, values: values.collect() }
    }
}

/// Returns the reflection that maps `matrix` times the vector of ones back to the vector of ones.
fn restore_ones(matrix: &Hadamard, width: usize) -> Option<Coordinates> {
    let one = 1.0 / (width as f64).sqrt();
    let mut normal = vec![one; width];
    matrix.forward(&mut normal);
    normal.iter_mut().for_each(|v| *v -= one);
    let length = normal.iter().map(|v| v * v).sum::<f64>().sqrt();
    let unit = || normal.iter().map(|v| (v / length) as f32).collect();
    (length > 1e-9).then(|| Coordinates::Reflected(unit()))
}

/// Returns the changes of all tensors under `rotations`, and the online rotations of inputs.
///
/// # Errors
/// A norm of the source cannot be read, or has weights that cannot be folded into its readers.
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
        if let Producer::Linear(v, _) = &site.producer {
            folds.change_output(v, matrix);
        }
        site.readers.iter().for_each(|o| folds.change_input(o, matrix));
    }
    for (info, matrix) in rotated_inputs(config, options) {
        folds.rotate_input(&info, &matrix);
    }
    Ok(folds)
}

/// Rotates the residual stream: its producers, and the readers of every norm together with the norm's weights.
fn residual(
    source: &ModelFiles,
    config: &ModelConfig,
    rotated: &[Coordinates],
    folds: &mut Folds,
) -> Result<()> {
    let d = config.hidden_size;
    let embedding = format!("{}.weight", config.embedding_module());
    rotated.iter().for_each(|by| change_embeddings(config, &embedding, by, folds));
    let sides: Vec<_> = config.tensors().into_iter().collect();
    for layer in 0..config.num_hidden_layers {
        let linears = config.layer_linears(layer);
        for (kind, _) in config.norms(layer) {
            change_readers(source, config, (layer, kind), &sides, rotated, folds)?;
        }
        // These layers add to the residual stream, so they produce it rotated.
        let adds = |info: &&LinearInfo| {
            use LinearKind as L;
            matches!(info.kind, L::O | L::MixOut | L::Down | L::SharedDown | L::ExpertDown(_))
        };
        linears
            .iter()
            .filter(adds)
            .for_each(|info| rotated.iter().for_each(|by| folds.change_output(info, by)));
    }
    let weights = norm_weights(source, config, &config.final_norm_module(), rotated, folds)?;
    let head = format!("{}.weight", config.head_module());
    for by in weights.iter().chain(rotated) {
        folds.change_tensor_input(head.clone(), (config.vocab_size, d), by);
    }
    if config.tie_word_embeddings {
        folds.untie(head, embedding, source.config());
    }
    Ok(())
}

/// Rotates the rows of the embedding, and of learned positions.
fn change_embeddings(config: &ModelConfig, embedding: &str, by: &Coordinates, folds: &mut Folds) {
    let d = config.hidden_size;
    folds.change_rows(embedding.to_owned(), (config.vocab_size, d), by);
    if config.learned_positions {
        let positions = format!("{}.weight", config.positions_module());
        folds.change_rows(positions, (config.max_position_embeddings, d), by);
    }
}

/// Folds the weights of a norm into its readers, and rotates these: linear layers, routers and gates.
fn change_readers(
    source: &ModelFiles,
    config: &ModelConfig,
    (layer, kind): (usize, NormKind),
    sides: &[TensorInfo],
    rotated: &[Coordinates],
    folds: &mut Folds,
) -> Result<()> {
    let linears = config.layer_linears(layer);
    let mut readers = linears.iter().filter(|info| reads_norm(config, kind, info.kind.input())).peekable();
    if readers.peek().is_none() {
        return Ok(());
    }
    // Readers take over the weights of the norm, which become 1, and rotate back.
    let weights = norm_weights(source, config, &config.norm_module(layer, kind), rotated, folds)?;
    let read = || weights.iter().chain(rotated);
    readers.for_each(|info| read().for_each(|by| folds.change_input(info, by)));
    // Routers and gates read the norm before the MLP, rates of a mixer that before it.
    let reads = |side: &&TensorInfo| matches!(side.role, Role::Side { layer: of, kind: side } if of == layer && norm_of(config, side) == Some(kind));
    for side in sides.iter().filter(reads) {
        let shape = (side.shape[0], config.hidden_size);
        read().for_each(|by| folds.change_tensor_input(side.name.clone(), shape, by));
    }
    Ok(())
}

/// Norm whose output a small projection reads; `None` if it reads no norm's.
fn norm_of(config: &ModelConfig, side: SideKind) -> Option<NormKind> {
    match side.reads() {
        // Attention and MLP read one norm.
        Some(NormKind::Post) if config.norm_places == NormPlaces::ParallelShared => Some(NormKind::Input),
        norm => norm,
    }
}

/// True if the input is the output of the norm `kind`.
fn reads_norm(config: &ModelConfig, kind: NormKind, input: LinearInput) -> bool {
    match kind {
        NormKind::Input if config.norm_places == NormPlaces::ParallelShared => {
            input == LinearInput::Qkv || reads_mlp_norm(input)
        }
        NormKind::Input => input == LinearInput::Qkv,
        NormKind::Post => reads_mlp_norm(input),
        _ => false,
    }
}

/// True if the input is the output of the norm before the MLP.
fn reads_mlp_norm(input: LinearInput) -> bool {
    matches!(input, LinearInput::GateUp | LinearInput::Expert(_))
}

/// Sets the weights of a norm to 1, rotates its bias, and returns the weights for its readers; `None` if it has no
/// weights.
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
    if parts.bias {
        refuse_zeros(source, &name, &weights)?;
    }
    let weights = Coordinates::Divided(weights);
    folds.norm(module, width, parts, &weights);
    if parts.bias {
        rotated.iter().for_each(|by| folds.change_rows(bias.clone(), (1, width), by));
    }
    Ok(Some(weights))
}

/// Refuses a weight of 0 in the norm `name`, which has a bias: readers would be multiplied by 0, which would lose the
/// channel's bias.
fn refuse_zeros(source: &ModelFiles, name: &str, weights: &[f32]) -> Result<()> {
    let Some(channel) = weights.iter().position(|w| *w == 0.0) else { return Ok(()) };
    let expected = "a weight other than 0, because the norm has a bias and the residual stream is rotated";
    let fix = "fix: set residual = false in [rotate]";
    Err(Error::field(source.dir(), format!("{name}[{channel}]"), "0", expected, fix).into())
}
