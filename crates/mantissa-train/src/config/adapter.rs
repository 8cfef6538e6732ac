//! `[adapter]`: fine-tuning with adapters over the frozen initial model.

use serde::{Deserialize, Serialize};

use crate::lora::{Init, Lora, Tuning};
use crate::policy::TableFault;

/// Scheme of QLoRA's base.
const QLORA_BASE: &str = "nf4-dq";

/// Accepted values of schemes, for messages.
const SCHEME: &str = "a weight scheme such as nf4-dq or int4-g32 (`mantissa schemes` lists all)";

/// `[adapter]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "`declared` describes every key")]
pub struct AdapterConfig {
    pub kind: String,
    #[serde(default = "rank")]
    pub rank: usize,
    #[serde(default = "alpha")]
    pub alpha: f64,
    #[serde(default)]
    pub dropout: f64,
    #[serde(default)]
    pub rslora: bool,
    #[serde(default = "all")]
    pub targets: Vec<String>,
    #[serde(default)]
    pub train: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    #[serde(default)]
    pub loftq: usize,
    #[serde(default)]
    pub merge: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requantize: Option<String>,
}

impl AdapterConfig {
    /// Returns the settings of fine-tuning; `seed` is for initial values and dropout.
    ///
    /// # Errors
    /// [`TableFault`] names the key and the accepted values.
    pub fn tuning(&self, seed: u64) -> Result<Tuning, TableFault> {
        let fault = |key: &str, found: String, allowed: &str| TableFault {
            key: key.to_owned(),
            found,
            allowed: allowed.to_owned(),
        };
        let kinds = ["lora", "dora", "qlora"];
        if !kinds.contains(&&*self.kind) {
            return Err(fault("kind", self.kind.clone(), &kinds.join(", ")));
        }
        let default = (self.kind == "qlora").then_some(QLORA_BASE);
        let base = match self.base.as_deref().or(default) {
            Some("none") | None => None,
            Some(text) => {
                Some(mantissa_num::parse_weight(text).map_err(|_| fault("base", text.to_owned(), SCHEME))?)
            }
        };
        if let Some(text) = &self.requantize {
            mantissa_num::parse_weight(text).map_err(|_| fault("requantize", text.clone(), SCHEME))?;
        }
        let lora = Lora {
            rank: self.rank,
            alpha: self.alpha,
            dropout: self.dropout,
            rslora: self.rslora,
            dora: self.kind == "dora",
            targets: self.targets.clone(),
            init: if self.loftq > 0 { Init::LoftQ { steps: self.loftq } } else { Init::Zero },
        };
        Ok(Tuning { lora, base, train: self.train.clone(), seed })
    }
}

fn rank() -> usize {
    Lora::default().rank
}

fn alpha() -> f64 {
    Lora::default().alpha
}

fn all() -> Vec<String> {
    Lora::default().targets
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Tuning, String> {
        let config: AdapterConfig = toml::from_str(text).map_err(|error| error.to_string())?;
        config.tuning(7).map_err(|fault| format!("{}: {}, not {}", fault.key, fault.allowed, fault.found))
    }

    #[test]
    fn kinds_have_their_defaults() {
        let tuning = parsed("kind = \"lora\"").unwrap();
        assert_eq!((tuning.lora.clone(), tuning.base, tuning.seed), (Lora::default(), None, 7));
        let tuning = parsed("kind = \"qlora\"\nrank = 4\nloftq = 5").unwrap();
        assert_eq!(tuning.base, Some(QLORA_BASE.parse().unwrap()));
        assert_eq!((tuning.lora.rank, tuning.lora.init), (4, Init::LoftQ { steps: 5 }));
        let tuning = parsed("kind = \"dora\"\nbase = \"int3-g32\"").unwrap();
        assert!(tuning.lora.dora && tuning.base.is_some());
        assert_eq!(parsed("kind = \"qlora\"\nbase = \"none\"").unwrap().base, None);
    }

    #[test]
    fn faults_name_the_key() {
        for (text, part) in [
            ("kind = \"ia3\"", "kind: lora, dora, qlora, not ia3"),
            ("kind = \"lora\"\nbase = \"nf3\"", "base: "),
            ("kind = \"lora\"\nrequantize = \"q9\"", "requantize: "),
            ("kind = \"lora\"\nranks = 4", "ranks"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
