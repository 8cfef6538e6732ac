//! Sites: vectors between a producer and readers, all linear, whose channels can therefore be scaled.

use mantissa_model::config::{MlpForm, NormForm, NormPlaces, QkvForm};
use mantissa_model::graph::NormKind;
use mantissa_model::{LinearInfo, LinearInput, LinearKind, ModelConfig, StoredAs};

use super::{Coordinates, Folds, NormParts};

/// Module that produces a vector.
#[derive(Clone, Debug)]
pub(crate) enum Producer {
    /// Norm, by its module.
    Norm(String),
    /// Rows of a linear layer, from this one on.
    Linear(LinearInfo, usize),
}

/// A vector whose channels can be scaled.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Module that produces it.
    pub(crate) producer: Producer,
    /// Number of channels where it is produced.
    pub(crate) channels: usize,
    /// Channels of a block, and how many times each block is repeated where the vector is read (grouped-query
    /// attention).
    repeats: (usize, usize),
    /// Input of the readers.
    pub(crate) input: LinearInput,
    /// Linear layers that read it.
    pub(crate) readers: Vec<LinearInfo>,
}

impl Site {
    /// Returns the producer's module, which is unique.
    pub(crate) fn name(&self) -> &str {
        match &self.producer {
            Producer::Norm(module) => module,
            Producer::Linear(info, _) => &info.module,
        }
    }

    /// Returns the channel that column `column` of the readers reads.
    pub(crate) fn channel(&self, column: usize) -> usize {
        let (block, repeat) = self.repeats;
        column / (block * repeat) * block + column % block
    }

    /// Returns the number of columns of the readers.
    pub(crate) fn width(&self) -> usize {
        self.channels * self.repeats.1
    }

    /// Expands values of the channels to the columns of the readers.
    pub(crate) fn spread(&self, channel_scales: &[f32]) -> Vec<f32> {
        (0..self.width()).map(|column| channel_scales[self.channel(column)]).collect()
    }

    /// Divides the channels by `s`, and multiplies the readers' columns by it.
    pub(crate) fn divide(&self, config: &ModelConfig, s: &[f32], folds: &mut Folds) {
        match &self.producer {
            Producer::Norm(module) => {
                folds.norm(module, self.channels, norm_parts(config), &Coordinates::Divided(s.to_vec()));
            }
            Producer::Linear(info, first) => {
                let mut all = vec![1.0; info.rows];
                all[*first..*first + s.len()].copy_from_slice(s);
                folds.change_output(info, &Coordinates::Divided(all));
            }
        }
        let spread = Coordinates::Divided(self.spread(s));
        self.readers.iter().for_each(|info| folds.change_input(info, &spread));
    }
}

/// Returns the form of the model's norms.
pub(crate) fn norm_parts(config: &ModelConfig) -> NormParts {
    NormParts { plus_one: config.norm == NormForm::RmsPlusOne, bias: config.norm == NormForm::Layer }
}

/// Returns the sites of a layer. The input of experts is none, because the router, which is not scaled, reads it too;
/// nor is the input of a mixer with rates, or what an indexer reads.
pub(crate) fn sites(config: &ModelConfig, layer: usize) -> Vec<Site> {
    let linears = config.layer_linears(layer);
    let all_of = |inputs: &[LinearInput]| -> Vec<LinearInfo> {
        linears.iter().filter(|info| inputs.contains(&info.kind.input())).cloned().collect()
    };
    let mut found = Vec::new();
    let norms = config.norms(layer).filter(|_| config.norm != NormForm::LayerPlain);
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
        let producer = Producer::Norm(config.norm_module(layer, kind));
        let readers = all_of(inputs);
        found.push(Site { producer, channels, repeats: (channels, 1), input: inputs[0], readers });
    }
    found.extend(values(config, &linears));
    found.extend(inner(config, &linears));
    let read_beside = |norm| config.sides(layer).iter().any(|side| side.kind.reads() == Some(norm));
    let routed = linears.iter().any(|info| info.kind.expert().is_some());
    found.retain(|site| {
        let by_rows = site.readers.iter().all(|info| !matches!(info.stored, StoredAs::Stacked(_)));
        // With routed experts, the norm before them and the inside of shared experts are no sites.
        let mlp = matches!(site.input, LinearInput::GateUp | LinearInput::Down);
        let shared = config.norm_places == NormPlaces::ParallelShared;
        let beside = match site.input {
            LinearInput::Qkv => read_beside(NormKind::Input),
            LinearInput::QLatent => read_beside(NormKind::QLatent),
            _ => false,
        };
        !site.readers.is_empty() && by_rows && !(routed && (mlp || shared)) && !beside
    });
    found
}

/// Returns the site from the values to the output projection.
pub(crate) fn values(config: &ModelConfig, linears: &[LinearInfo]) -> Option<Site> {
    let plain = config.qkv == QkvForm::Separate
        && config.latent.is_none()
        && config.clip_qkv.is_none()
        // A norm of the values, or another layer's output projection, would see the change.
        && !config.attention.value_norm
        && config.by_layer.shared_from == config.num_hidden_layers
        && !config.has_sub_norms();
    let find = |kind| linears.iter().find(|info| info.kind == kind);
    let (v, o) = (find(LinearKind::V)?, find(LinearKind::O)?);
    let repeat = config.num_attention_heads / config.num_key_value_heads.max(1);
    (plain && v.rows * repeat == o.cols).then(|| Site {
        producer: Producer::Linear(v.clone(), 0),
        channels: v.rows,
        repeats: (config.head_dim, repeat),
        input: LinearInput::O,
        readers: vec![o.clone()],
    })
}

/// Returns the site from the up projection (the factor that the gate multiplies) to the down projection.
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
        producer: Producer::Linear(up.clone(), first),
        channels: down.cols,
        repeats: (down.cols, 1),
        input: LinearInput::Down,
        readers: vec![down.clone()],
    })
}
