//! Settings of fine-tuning with adapters: which linear layers have one, which other tensors train, and their names.

use mantissa_model::{LinearInfo, ModelConfig, Role, StoredAs, TensorInfo};
use mantissa_num::Scheme;

use crate::error::TrainError;
use crate::param_table::ParamTable;
use crate::pattern::matches;

/// Initialization of adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Init {
    /// A uniform within `1 / √in`, as PEFT does, B zero.
    #[default]
    Zero,
    /// LoftQ with this number of alternating steps.
    LoftQ {
        /// Steps; 5 in the paper.
        steps: usize,
    },
}

/// Settings of LoRA adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rank of the update.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Share of an adapter's inputs that is set to 0 in training.
    pub dropout: f64,
    /// True if the scale is `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool,
    /// True for DoRA.
    pub dora: bool,
    /// Linear layers with an adapter: module names, or last parts of them, where `*` matches any characters.
    pub targets: Vec<String>,
    /// Initialization.
    pub init: Init,
}

impl Default for Lora {
    /// Rank 16, alpha 32, no dropout, all linear layers of the decoder.
    fn default() -> Self {
        let targets = vec!["*".to_owned()];
        Lora {
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            rslora: false,
            dora: false,
            targets,
            init: Init::default(),
        }
    }
}

impl Lora {
    /// Returns the factor of `B A`.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// True if the linear layer `module` has an adapter.
    pub fn targets(&self, module: &str) -> bool {
        self.targets.iter().any(|target| names(target, module))
    }
}

/// Fine-tuning of a model: adapters, and storage of the frozen rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Settings of the adapters.
    pub lora: Lora,
    /// Scheme of the linear layers' frozen weights. `None` keeps them as the source stores them: packed if it is
    /// quantized, else in the weight dtype of the policy.
    pub base: Option<Scheme>,
    /// Other tensors that train, by module or tensor name (PEFT's `modules_to_save`); `*` matches any characters.
    pub train: Vec<String>,
    /// Seed of initial values and dropout.
    pub seed: u64,
}

impl Tuning {
    /// Returns the linear layers with an adapter.
    pub fn adapted<'a>(&'a self, config: &'a ModelConfig) -> impl Iterator<Item = LinearInfo> + 'a {
        config.decoder_linears().filter(|info| self.lora.targets(&info.module))
    }

    /// True if the tensor trains as a whole.
    fn trains(&self, tensor: &TensorInfo) -> bool {
        let module = tensor.name.rsplit_once('.').map_or(&*tensor.name, |(module, _)| module);
        self.train.iter().any(|name| names(name, module) || names(name, &tensor.name))
    }

    /// Checks settings and names.
    ///
    /// # Errors
    /// [`TrainError::Tuning`] names the setting.
    pub fn check(&self, config: &ModelConfig) -> Result<(), TrainError> {
        let fault = |field: &'static str, found: String, allowed: &str| {
            Err(TrainError::Tuning { field, found, allowed: allowed.to_owned() })
        };
        let Lora { rank, alpha, dropout, targets, init, .. } = &self.lora;
        if *rank == 0 || *rank > 1 << 16 {
            return fault("rank", rank.to_string(), "1 to 65536");
        }
        if !alpha.is_finite() || *alpha <= 0.0 {
            return fault("alpha", alpha.to_string(), "a number above 0");
        }
        if !(0.0..1.0).contains(dropout) {
            return fault("dropout", dropout.to_string(), "0 to below 1");
        }
        if matches!(init, Init::LoftQ { steps: 0 }) {
            return fault("init", "loftq with 0 steps".to_owned(), "at least one step");
        }
        if matches!(init, Init::LoftQ { .. }) && self.base.is_none() {
            return fault("init", "loftq without a base scheme".to_owned(), "a base scheme such as nf4-dq");
        }
        let lost = |name: &&String| !config.decoder_linears().any(|info| names(name, &info.module));
        if let Some(name) = targets.iter().find(lost) {
            let allowed = format!("names of this model's linear layers ({}) or *", last_parts(config));
            return fault("targets", name.clone(), &allowed);
        }
        let transposed = |info: &LinearInfo| info.stored == StoredAs::Columns && self.trains_linear(info);
        if let Some(info) = config.decoder_linears().find(transposed) {
            return fault("train", info.module, "tensors other than linear layers stored [in, out]");
        }
        let tensors = config.tensors();
        let lost = |name: &&String| {
            let only = Tuning { train: vec![(*name).clone()], ..self.clone() };
            !tensors.iter().any(|tensor| !self.is_adapted(tensor) && only.trains(tensor))
        };
        if let Some(name) = self.train.iter().find(lost) {
            return fault(
                "train",
                name.clone(),
                "names of tensors without an adapter such as *norm or lm_head",
            );
        }
        Ok(())
    }

    /// True if the tensor is the weight of a layer with an adapter.
    fn is_adapted(&self, tensor: &TensorInfo) -> bool {
        let module = tensor.name.strip_suffix(".weight");
        matches!(tensor.role, Role::Linear { .. }) && module.is_some_and(|module| self.lora.targets(module))
    }

    /// Returns the table of the trained tensors: adapters in forward order, and what [`Tuning::train`] names.
    pub fn table(&self, config: &ModelConfig) -> ParamTable {
        let rank = self.lora.rank;
        let mut tensors = Vec::new();
        for tensor in config.tensors() {
            let Role::Linear { layer, kind } = tensor.role else {
                if self.trains(&tensor) {
                    tensors.push(tensor);
                }
                continue;
            };
            let info = config.linear(layer, kind);
            if !self.is_adapted(&tensor) {
                if self.trains(&tensor) {
                    tensors.push(tensor);
                }
                continue;
            }
            let part = |part: &str, shape: &[usize], role| TensorInfo {
                name: adapter_name(&info.module, part),
                shape: shape.to_vec(),
                role,
            };
            let matrix = Role::Linear { layer, kind };
            tensors.push(part(A, &[rank, info.cols], matrix));
            tensors.push(part(B, &[info.rows, rank], matrix));
            if self.lora.dora {
                tensors.push(part(MAGNITUDE, &[info.rows], Role::Bias { layer, kind }));
            }
        }
        ParamTable::of(tensors, 0)
    }

    /// True if the weight of a linear layer trains as a whole.
    pub(crate) fn trains_linear(&self, info: &LinearInfo) -> bool {
        let name = format!("{}.weight", info.module);
        !self.lora.targets(&info.module)
            && self.train.iter().any(|pattern| names(pattern, &info.module) || names(pattern, &name))
    }

    /// Returns the frozen tensors kept as values: everything but adapted weights, trained tensors, and linear weights
    /// that are packed, which `packed` tells by module.
    pub(crate) fn dense(
        &self,
        config: &ModelConfig,
        packed: impl Fn(&LinearInfo) -> bool,
    ) -> Vec<TensorInfo> {
        let keeps = |tensor: &TensorInfo| match tensor.role {
            Role::Linear { layer, kind } => {
                let trains = self.trains(tensor) && !self.is_adapted(tensor);
                !trains && !packed(&config.linear(layer, kind))
            }
            _ => !self.trains(tensor),
        };
        config.tensors().into_iter().filter(keeps).collect()
    }
}

/// Parts of an adapter as PEFT names them.
pub(crate) const A: &str = "lora_A.weight";
pub(crate) const B: &str = "lora_B.weight";
pub(crate) const MAGNITUDE: &str = "lora_magnitude_vector";

/// Returns the name of an adapter tensor in PEFT's files.
pub(crate) fn adapter_name(module: &str, part: &str) -> String {
    format!("base_model.model.{module}.{part}")
}

/// True if the tensor belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.starts_with("base_model.model.") && [A, B, MAGNITUDE].iter().any(|part| name.ends_with(part))
}

/// True if `pattern` matches the name, or its last parts after a dot.
fn names(pattern: &str, name: &str) -> bool {
    let mut rest = name;
    loop {
        if matches(pattern, rest) {
            return true;
        }
        match rest.split_once('.') {
            Some((_, last)) => rest = last,
            None => return false,
        }
    }
}

/// Lists the last parts of the names of a model's linear layers: `q_proj`, or `qkv_proj` where they are stored as one.
fn last_parts(config: &ModelConfig) -> String {
    let mut parts: Vec<String> = Vec::new();
    for info in config.decoder_linears() {
        let part = info.module.rsplit('.').next().unwrap_or_default().to_owned();
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    parts.join(", ")
}
