//! Experts chosen by the token (DeepSeek-V4): the keys of a file, as the fields of the published `config.json`.
//!
//! Keys are named as in llama.cpp's loader (`src/models/deepseek4.cpp`).

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;
use crate::gguf::Value;
use mantissa_arch::gguf::Experts;

/// Number of llama.cpp for scores that are roots of softplus.
const SQRT_SOFTPLUS: u64 = 4;

impl Reader<'_> {
    /// Puts the experts, of which `count` exist, as wide as `own`.
    pub(super) fn put_hashed_experts(
        &self,
        config: &mut Map<String, Json>,
        count: u64,
        own: Option<u64>,
    ) -> Result<()> {
        if self.architecture.experts != Experts::Hashed {
            return Ok(());
        }
        let key = self.key("expert_gating_func");
        if let Some(found) = self.metadata.uint(&key)?.filter(|&found| found != SQRT_SOFTPLUS) {
            return Err(self.metadata.fault(&key, found.to_string(), SQRT_SOFTPLUS.to_string()));
        }
        config.insert("n_routed_experts".into(), json!(count));
        config.insert("n_shared_experts".into(), json!(self.uint("expert_shared_count")?.unwrap_or(1)));
        own.map(|own| config.insert("moe_intermediate_size".into(), json!(own)));
        config.remove("intermediate_size");
        let scale = self.float("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
        config.insert("routed_scaling_factor".into(), json!(scale));
        let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?.unwrap_or(false);
        config.insert("norm_topk_prob".into(), json!(normalized));
        let limits = ["swiglu_clamp_exp", "swiglu_clamp_shexp"].map(|key| self.limit(key));
        for limit in limits {
            limit?.map(|limit| config.insert("swiglu_limit".into(), json!(limit)));
        }
        Ok(())
    }

    /// Limit of gate and up, which a key states for every layer.
    fn limit(&self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        let Some(Value::Array(_, limits)) = self.metadata.get(&key) else { return self.metadata.float(&key) };
        let first = limits.first().and_then(Value::as_f64);
        match first.is_some() && limits.iter().all(|limit| limit.as_f64() == first) {
            true => Ok(first),
            false => Err(self.metadata.fault(&key, "several limits", "one limit for all layers")),
        }
    }
}
