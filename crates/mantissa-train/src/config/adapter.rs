//! `[adapter]`: fine-tuning with adapters over the frozen initial model.

use mantissa_options::{AtLeast, Count, Flag, Note, Text, Texts, Unset, Within, options};

use crate::lora::{Init, Lora, Tuning};
use crate::policy::TableFault;

/// Scheme of QLoRA's base.
const QLORA_BASE: &str = "nf4-dq";

/// Accepted values of schemes, for messages.
const SCHEME: &str = "a weight scheme such as nf4-dq or int4-g32 (`mantissa schemes` lists all)";

options! {
    /// `[adapter]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct AdapterConfig {
        /// lora dora qlora
        kind: String, Text, Note::needed("\"lora\"");
        /// rank of the update
        rank: usize = Lora::default().rank, Count(1 << 16);
        /// scale: alpha / rank, or alpha / sqrt(rank) with rslora
        alpha: f64 = Lora::default().alpha, Within::ALL;
        /// true: the scale alpha / sqrt(rank)
        rslora: bool = false, Flag;
        /// share of the adapters' inputs set to 0
        dropout: f64 = 0.0, Within(0.0, 0.999_999), Note::NONE.before("rslora");
        /// linear layers, by module name or the last parts of it
        targets: Vec<String> = Lora::default().targets, Texts;
        /// other tensors that train whole, such as "*norm" or "lm_head"
        train: Vec<String>, Texts;
        /// scheme of the frozen linear weights; qlora: nf4-dq, else as stored
        base: Option<String>, Unset(Text), Note::example("\"nf4-dq\"");
        /// alternating steps of LoftQ's initialization; 0: B starts at zero
        loftq: usize = 0, AtLeast(0);
        /// true: also write the merged model
        merge: bool = false, Flag;
        /// also write the merged model in this scheme
        requantize: Option<String>, Unset(Text), Note::example("\"int4-g32\"");
    }
}

impl AdapterConfig {
    /// Says what trains on what: `qlora, rank 16, alpha 32, on weights rounded to nf4-dq`.
    pub fn words(&self) -> String {
        let base = match self.base_name() {
            None => "on weights as they are stored".to_owned(),
            Some(base) => format!("on weights rounded to {base}"),
        };
        format!("{}, rank {}, alpha {}, {base}", self.kind, self.rank, self.alpha)
    }

    /// Returns the scheme that the frozen weights are rounded to, if they are.
    fn base_name(&self) -> Option<&str> {
        let default = (self.kind == "qlora").then_some(QLORA_BASE);
        self.base.as_deref().or(default).filter(|name| *name != "none")
    }

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
        let base = match self.base_name() {
            None => None,
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Tuning, String> {
        let config: AdapterConfig = mantissa_options::from_toml(text)?;
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
            ("kind = \"lora\"\nrank = 0", "rank: expected a whole number from 1 to 65536, got 0"),
            ("kind = \"lora\"\nrank = 65537", "rank: expected a whole number from 1 to 65536, got 65537"),
            ("kind = \"lora\"\ndropout = 1.0", "dropout: expected 0 to 0.999999, got 1"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
