//! QuaRot (Ashkboos, Mohtashami, Croci, Li, Cameron, Jaggi, Alistarh, Hoefler & Hensman 2024, "QuaRot: Outlier-Free 4-Bit Inference in
//! Rotated LLMs", arXiv 2404.00456, section 4): Hadamard rotations that spread outliers over all channels.
//!
//! * The residual stream is rotated by a randomized Hadamard matrix: the embedding gives it so, attention and MLP add to it so,
//!   and what reads it through a norm reads it so. An RMSNorm without weights commutes with a rotation, so the weights of norms
//!   are folded into what reads them first. A LayerNorm does not commute, nor does a norm of what is added: such models keep
//!   their residual stream. Embeddings are not centred.
//! * Values are rotated within each head, and the output projection reads them so.
//! * The input of the down projection lies behind a product of two vectors, through which nothing can be folded: it is rotated as the
//!   model runs, by Sylvester's matrix in runs of the largest power of two that divides its width.

use mantissa_model::config::{NormForm, NormPlaces};
use mantissa_model::flow::NormKind;
use mantissa_model::{LinearInfo, LinearInput, LinearKind, ModelConfig, Role, StoredAs};
use mantissa_num::Hadamard;
use mantissa_store::convention::ModelFiles;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::fold::sites::{norm_parts, values};
use crate::fold::{Coordinates, Folds};

/// What is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotateOptions {
    /// The residual stream.
    pub residual: bool,
    /// Values within each head.
    pub values: bool,
    /// Inputs of down projections, as the model runs.
    pub online: bool,
    /// Of the random signs.
    pub seed: u64,
}

impl Default for RotateOptions {
    fn default() -> Self {
        RotateOptions { residual: true, values: true, online: true, seed: 0 }
    }
}

/// Runs shorter than this spread nothing.
const LEAST_ORDER: usize = 4;

/// Whether the residual stream of the model can be rotated; if not, why.
pub(crate) fn residual_of(config: &ModelConfig) -> std::result::Result<Hadamard, &'static str> {
    if !matches!(config.norm, NormForm::Rms | NormForm::RmsPlusOne) {
        return Err("a LayerNorm does not commute with rotations");
    }
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

/// Whether the head, which was the embedding, becomes a tensor of its own: the weight of the last norm is folded into it alone.
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

/// The changes of all tensors.
///
/// # Errors
/// A norm of the source cannot be read.
pub(crate) fn folds(source: &ModelFiles, config: &ModelConfig, options: RotateOptions) -> Result<Folds> {
    let mut folds = Folds::default();
    if let Ok(matrix) = residual_of(config)
        && options.residual
    {
        residual(source, config, &matrix.randomized(options.seed), &mut folds)?;
    }
    if options.values {
        for layer in 0..config.num_hidden_layers {
            let Some(site) = values(config, &config.layer_linears(layer)) else { continue };
            let Some(matrix) = order_of(config.head_dim) else { continue };
            let matrix = Coordinates::Rotated(matrix.randomized(options.seed.wrapping_add(1 + layer as u64)));
            if let crate::fold::sites::Giver::Linear(v, _) = &site.giver {
                folds.gives(v, &matrix);
            }
            site.readers.iter().for_each(|o| folds.reads(o, &matrix));
        }
    }
    for (info, matrix) in rotated_inputs(config, options) {
        folds.rotate_input(&info, &matrix);
    }
    Ok(folds)
}

fn residual(source: &ModelFiles, config: &ModelConfig, matrix: &Hadamard, folds: &mut Folds) -> Result<()> {
    let d = config.hidden_size;
    let rotated = Coordinates::Rotated(matrix.clone());
    let embedding = format!("{}.weight", config.embedding_module());
    folds.holds(embedding.clone(), (config.vocab_size, d), &rotated);
    if config.learned_positions {
        let positions = format!("{}.weight", config.positions_module());
        folds.holds(positions, (config.max_position_embeddings, d), &rotated);
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
            let weights = norm_weights(source, config, &config.norm_module(layer, kind), folds)?;
            for info in readers {
                folds.reads(info, &weights);
                folds.reads(info, &rotated);
            }
            for side in sides.iter().filter(|t| matches!(t.role, Role::Side { layer: of, .. } if of == layer))
            {
                if kind == NormKind::Post {
                    let shape = (side.shape[0], d);
                    folds.reads_rows(side.name.clone(), shape, &weights);
                    folds.reads_rows(side.name.clone(), shape, &rotated);
                }
            }
        }
        let adds = |info: &&LinearInfo| {
            use LinearKind as L;
            matches!(info.kind, L::O | L::Down | L::SharedDown | L::ExpertDown(_))
        };
        linears.iter().filter(adds).for_each(|info| folds.gives(info, &rotated));
    }
    let weights = norm_weights(source, config, &config.final_norm_module(), folds)?;
    let head = format!("{}.weight", config.head_module());
    for coordinates in [&weights, &rotated] {
        folds.reads_rows(head.clone(), (config.vocab_size, d), coordinates);
    }
    if config.tie_word_embeddings {
        folds.untie(head, embedding, source.config());
    }
    Ok(())
}

/// Whether it is what the norm before the MLP gives.
fn of_mlp(input: LinearInput) -> bool {
    matches!(input, LinearInput::GateUp | LinearInput::Expert(_))
}

/// Sets the weights of a norm to 1, and gives them for what reads it.
fn norm_weights(
    source: &ModelFiles,
    config: &ModelConfig,
    module: &str,
    folds: &mut Folds,
) -> Result<Coordinates> {
    let (width, parts) = (config.hidden_size, norm_parts(config));
    let mut weights = source.tensor_f32(&format!("{module}.weight"), &[width])?;
    if parts.plus_one {
        weights.iter_mut().for_each(|w| *w += 1.0);
    }
    let weights = Coordinates::Divided(weights);
    folds.norm(module, width, parts, &weights);
    Ok(weights)
}
