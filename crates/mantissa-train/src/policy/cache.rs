//! KV cache schemes in training: keys and values are quantized and decoded before attention reads them, as a cache does,
//! and gradients pass the rounding unchanged (LLM-QAT: Liu et al. 2023, arXiv 2305.17888, section 2.2).

use mantissa_model::kv::KvQuantizer;
use mantissa_model::{KvPolicy, ModelConfig};

use super::Policy;
use super::fault::{Faulty, fault};
use crate::error::TrainError;

/// Parses the key `kv`.
///
/// # Errors
/// [`TableFault`](super::TableFault) for a policy that training cannot apply.
pub(super) fn parse(found: &str) -> Faulty<Option<KvPolicy>> {
    let policy: KvPolicy = match found.parse() {
        Ok(policy) => policy,
        Err(error) => return fault("kv", found, &format!("a KV cache policy such as int8-head ({error})")),
    };
    if policy.is_calibrated() {
        return fault("kv", found, "a policy without calibrated levels, such as int8-head or int4-g32-asym");
    }
    if policy.window > 0 {
        return fault("kv", found, "no window: every token is read quantized in training");
    }
    Ok((!policy.is_f32()).then_some(policy))
}

impl Policy {
    /// Returns the quantizer of keys and values of each layer.
    ///
    /// # Errors
    /// [`TrainError::Load`] if the model's heads cannot be stored that way, [`TrainError::Unsupported`] for clipped
    /// values.
    pub(crate) fn kv_quantizer(&self, config: &ModelConfig) -> Result<Option<KvQuantizer>, TrainError> {
        let Some(kv) = &self.kv else { return Ok(None) };
        if let Some(clip) = config.clip_qkv {
            let allowed = "none with precision.kv: clipped values are not told from quantized ones";
            return Err(TrainError::Unsupported { field: "clip_qkv", found: clip.to_string(), allowed });
        }
        Ok(Some(kv.quantizer(config)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_model::{Batch, ModelConfig};
    use mantissa_options::{Faults, from_toml};

    use crate::arena::Parameters;
    use crate::model::TrainModel;
    use crate::plan::Options;
    use crate::policy::{Policy, PolicyTable};

    /// Keys and values that attention reads are those that the cache decodes from what it stores of the exact ones.
    #[test]
    fn attention_reads_what_the_cache_decodes() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5
        });
        let config = ModelConfig::from_json(&config, "config").unwrap();
        let tokens: Vec<u32> = (0..48).map(|i| i * 13 % 64).collect();
        let read = |policy: Policy| {
            let params = Parameters::random(&config, 0.3, 5).unwrap();
            let options = Options { max_tokens: 48, max_len: 48, threads: 1, policy };
            let mut model = TrainModel::new(config.clone(), params, options).unwrap();
            model.logits(&Batch { tokens: &tokens, lens: &[20, 28] }, &mut vec![0.0; 48 * 64]).unwrap();
            let rows = |x: &[f32]| x[..48 * 32].to_vec();
            (rows(&model.saved[0].k), rows(&model.saved[0].v))
        };
        let exact = read(Policy::fp32());
        for kv in ["int8-head", "int4-head-asym", "int4-g16-asym", "fp8-e4m3-head", "keys=int2-g8"] {
            let table: PolicyTable = from_toml(&format!("kv = \"{kv}\"")).unwrap();
            let policy = table.policy(1).unwrap();
            let quantizer = policy.kv_quantizer(&config).unwrap().unwrap();
            let found = read(policy);
            let sides = [
                (&quantizer.parts().keys, &exact.0, found.0),
                (&quantizer.parts().values, &exact.1, found.1),
            ];
            for (side, exact, found) in sides {
                let mut decoded = exact.clone();
                for row in decoded.chunks_exact_mut(32) {
                    let Some(side) = side else { continue };
                    let mut bytes = Vec::new();
                    side.encode(row, &mut bytes).unwrap();
                    side.decode(&bytes, row);
                }
                assert_eq!(found, decoded, "{kv}");
            }
        }
    }

    #[test]
    fn policies_that_training_cannot_apply_are_refused() {
        let parsed = |kv: &str| {
            from_toml::<PolicyTable>(&format!("policy = \"bf16\"\nkv = \"{kv}\"")).unwrap().policy(1)
        };
        for kv in ["int8-head", "keys=int4-g32-asym,values=int4-head-asym,channel-keys,pre-rope"] {
            let policy = parsed(kv).unwrap();
            assert_eq!(policy.kv.as_ref().unwrap().to_string(), kv);
            assert_eq!(policy.name, "custom");
            let table: toml::Table = toml::from_str(&policy.to_toml()).unwrap();
            let table = table["precision"].as_table().unwrap();
            let again: PolicyTable = mantissa_options::read(table, "", &mut Faults::default());
            assert_eq!(again.policy(1).unwrap(), policy);
        }
        assert_eq!(parsed("f32").unwrap().kv, None);
        for (kv, part) in [
            ("int9-head", "a KV cache policy such as int8-head"),
            ("nuq4-1%", "without calibrated levels"),
            ("int8-head,window=16", "no window"),
        ] {
            let fault = parsed(kv).unwrap_err();
            assert!(fault.key == "kv" && fault.allowed.contains(part), "{kv}: {}", fault.allowed);
        }
    }
}
