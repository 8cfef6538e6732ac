//! Where a vector lies between what gives it and what reads it, with nothing but linear maps around: the places at which its
//! channels can be scaled.

use mantissa_model::config::{MlpForm, NormForm, NormPlaces, QkvForm};
use mantissa_model::graph::NormKind;
use mantissa_model::{LinearInfo, LinearInput, LinearKind, ModelConfig, StoredAs};

use super::{Coordinates, Folds, NormParts};

/// Module that gives a vector.
#[derive(Clone, Debug)]
pub(crate) enum Giver {
    /// A norm, by its module.
    Norm(String),
    /// The rows of a linear layer from one on.
    Linear(LinearInfo, usize),
}

/// A vector whose channels can be scaled.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Module that gives it.
    pub(crate) giver: Giver,
    /// Channels that it has where it is given.
    pub(crate) channels: usize,
    /// Channels of a run; where the vector is read, runs are repeated this many times (grouped-query attention).
    repeats: (usize, usize),
    /// As what it is read.
    pub(crate) input: LinearInput,
    /// Linear layers that read it.
    pub(crate) readers: Vec<LinearInfo>,
}

impl Site {
    /// The name of what gives it, which is unique.
    pub(crate) fn name(&self) -> &str {
        match &self.giver {
            Giver::Norm(module) => module,
            Giver::Linear(info, _) => &info.module,
        }
    }

    /// The channel that column `column` of its readers is.
    pub(crate) fn channel(&self, column: usize) -> usize {
        let (run, repeat) = self.repeats;
        column / (run * repeat) * run + column % run
    }

    /// Columns of its readers.
    pub(crate) fn width(&self) -> usize {
        self.channels * self.repeats.1
    }

    /// Values of its channels, for each column of its readers.
    pub(crate) fn spread(&self, of_channels: &[f32]) -> Vec<f32> {
        (0..self.width()).map(|column| of_channels[self.channel(column)]).collect()
    }

    /// Divides its channels by `s`.
    pub(crate) fn divide(&self, config: &ModelConfig, s: &[f32], folds: &mut Folds) {
        match &self.giver {
            Giver::Norm(module) => {
                folds.norm(module, self.channels, norm_parts(config), &Coordinates::Divided(s.to_vec()));
            }
            Giver::Linear(info, first) => {
                let mut all = vec![1.0; info.rows];
                all[*first..*first + s.len()].copy_from_slice(s);
                folds.gives(info, &Coordinates::Divided(all));
            }
        }
        let spread = Coordinates::Divided(self.spread(s));
        self.readers.iter().for_each(|info| folds.reads(info, &spread));
    }
}

/// Parts of the norms of a model.
pub(crate) fn norm_parts(config: &ModelConfig) -> NormParts {
    NormParts { plus_one: config.norm == NormForm::RmsPlusOne, bias: config.norm == NormForm::Layer }
}

/// The sites of layer `layer`. Experts' are not among them: their router reads what they do, and is not scaled.
pub(crate) fn sites(config: &ModelConfig, layer: usize) -> Vec<Site> {
    let linears = config.layer_linears(layer);
    let all_of = |inputs: &[LinearInput]| -> Vec<LinearInfo> {
        linears.iter().filter(|info| inputs.contains(&info.kind.input())).cloned().collect()
    };
    let mut found = Vec::new();
    let norms = config.norms().filter(|_| config.norm != NormForm::LayerPlain);
    for (kind, channels) in norms {
        let inputs: &[LinearInput] = match kind {
            NormKind::Input if config.norm_places == NormPlaces::ParallelShared => {
                &[LinearInput::Qkv, LinearInput::GateUp]
            }
            NormKind::Input => &[LinearInput::Qkv],
            NormKind::Post => &[LinearInput::GateUp],
            NormKind::AttentionSub => &[LinearInput::O],
            NormKind::MlpSub => &[LinearInput::Down],
            NormKind::QLatent => &[LinearInput::QLatent],
            NormKind::KvLatent => &[LinearInput::KvLatent],
            _ => continue,
        };
        let giver = Giver::Norm(config.norm_module(layer, kind));
        let readers = all_of(inputs);
        found.push(Site { giver, channels, repeats: (channels, 1), input: inputs[0], readers });
    }
    found.extend(values(config, &linears));
    found.extend(inner(config, &linears));
    let routed = linears.iter().any(|info| matches!(info.kind, LinearKind::ExpertUp(_)));
    found.retain(|site| {
        let by_rows = site.readers.iter().all(|info| !matches!(info.stored, StoredAs::Stacked(_)));
        // The norm before experts, and what their shared kin have inside.
        let mlp = matches!(site.input, LinearInput::GateUp | LinearInput::Down);
        let shared = config.norm_places == NormPlaces::ParallelShared;
        !site.readers.is_empty() && by_rows && !(routed && (mlp || shared))
    });
    found
}

/// From the values to the output projection.
pub(crate) fn values(config: &ModelConfig, linears: &[LinearInfo]) -> Option<Site> {
    let plain = config.qkv == QkvForm::Separate
        && config.latent.is_none()
        && config.clip_qkv.is_none()
        && !config.has_sub_norms();
    let find = |kind| linears.iter().find(|info| info.kind == kind);
    let (v, o) = (find(LinearKind::V)?, find(LinearKind::O)?);
    let repeat = config.num_attention_heads / config.num_key_value_heads.max(1);
    (plain && v.rows * repeat == o.cols).then(|| Site {
        giver: Giver::Linear(v.clone(), 0),
        channels: v.rows,
        repeats: (config.head_dim, repeat),
        input: LinearInput::O,
        readers: vec![o.clone()],
    })
}

/// From the half of the MLP that is multiplied with the gate to the output projection.
fn inner(config: &ModelConfig, linears: &[LinearInfo]) -> Option<Site> {
    let find = |kind| linears.iter().find(|info| info.kind == kind);
    let down = find(LinearKind::Down)?;
    let (up, first) = match config.mlp {
        MlpForm::Gated => (find(LinearKind::Up)?, 0),
        MlpForm::GatedJoined => (find(LinearKind::GateUp)?, down.cols),
        MlpForm::Plain => return None,
    };
    let fits = up.rows == first + down.cols && !config.has_sub_norms();
    fits.then(|| Site {
        giver: Giver::Linear(up.clone(), first),
        channels: down.cols,
        repeats: (down.cols, 1),
        input: LinearInput::Down,
        readers: vec![down.clone()],
    })
}
