//! Fields of the config that are tried with the values of published models: a config that lost or changed one loads, and
//! predicts worse.

use mantissa_model::ModelConfig;

use super::Fault;

/// A field with a value to try.
pub(crate) struct Setting {
    /// Name in tables and JSON.
    pub(crate) name: &'static str,
    field: Field,
    /// Value to try.
    pub(crate) value: f64,
    fix: &'static str,
}

/// Field of the config.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    /// Base of the rotary embedding.
    RopeBase,
    /// Epsilon of the norms.
    Epsilon,
}

macro_rules! base {
    ($value:literal) => {
        Setting {
            name: concat!("rope_theta ", $value),
            field: Field::RopeBase,
            value: $value as f64,
            fix: concat!("set rope_theta to ", $value, ", or copy config.json from the source"),
        }
    };
}

/// Bases of published models: Llama 1 and 2 and most others, DeepSeek-V3's and Gemma's are the first; Llama 3; Qwen 2 and 3,
/// Mistral, Gemma 3; Code Llama; Phi-3 and Yi; SmolLM; Llama 4 and Qwen 3-Next. Then an
/// epsilon.
const SETTINGS: [Setting; 9] = [
    base!(10000),
    base!(500000),
    base!(1000000),
    base!(100000),
    base!(50000),
    base!(5000000),
    base!(10000000),
    base!(1000),
    Setting {
        name: "rms_norm_eps 1e-5",
        field: Field::Epsilon,
        value: 1e-5,
        fix: "set rms_norm_eps to 1e-5 (1e-6 in some architectures), or copy config.json from the source",
    },
];

/// Returns the bases to try on a model; none if it has no single rotary base: two, or scaled ones, have too many
/// combinations.
pub(crate) fn bases(config: &ModelConfig) -> impl Iterator<Item = &'static Setting> + '_ {
    SETTINGS.iter().filter(|setting| setting.field == Field::RopeBase && setting.is_other(config))
}

/// True if the model has a single rotary base.
pub(crate) fn has_base(config: &ModelConfig) -> bool {
    config.rotary_dim > 0 && config.local_rope.is_none()
}

/// Returns the settings to try on a model.
pub(super) fn of(config: &ModelConfig) -> Vec<&'static Setting> {
    SETTINGS.iter().filter(|setting| setting.is_other(config)).collect()
}

/// Finds the setting with this name.
pub(super) fn named(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// True if the model has this field with another value.
    fn is_other(&self, config: &ModelConfig) -> bool {
        match self.field {
            Field::RopeBase => has_base(config) && config.rope.theta != self.value,
            // Beside scaled residuals the config holds a quotient. Values of this order make no difference.
            Field::Epsilon => {
                config.residual_scale == 1.0 && f64::from(config.rms_norm_eps) > 10.0 * self.value
            }
        }
    }

    /// Returns `config` with the value of this setting.
    pub(crate) fn applied(&self, config: &ModelConfig) -> ModelConfig {
        let mut config = config.clone();
        match self.field {
            Field::RopeBase => config.rope.theta = self.value,
            Field::Epsilon => config.rms_norm_eps = self.value as f32,
        }
        config
    }

    /// Returns the fault that this setting repairs.
    pub(super) fn fault(&self) -> Fault {
        let (tensor, cause) = match self.field {
            Field::RopeBase => {
                ("config.json: rope_theta", "rope_theta is not the base that the model was trained with")
            }
            Field::Epsilon => {
                ("config.json: rms_norm_eps", "rms_norm_eps is not that which the model was trained with")
            }
        };
        Fault {
            alternative: Some(self.name),
            ..Fault::unknown(tensor.to_owned(), Vec::new(), cause, self.fix)
        }
    }
}
