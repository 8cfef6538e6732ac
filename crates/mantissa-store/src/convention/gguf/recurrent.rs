//! Recurrent mixers: the keys of a file, as the fields of the `config.json` that it was made from.
//!
//! Keys are named as in llama.cpp's loaders (`src/models/`, one file for each architecture). Layers without keys and values, for
//! which `attention.head_count_kv` lists 0, are recurrent; gated DeltaNet has keys of its own for that.

use serde_json::{Map, Value as Json, json};

use super::config::{Reader, small};
use crate::error::Result;
use crate::gguf::Value;
use mantissa_arch::gguf::DeltaHeads;
use mantissa_arch::gguf::{Experts, Recurrence};

impl Reader<'_> {
    /// Heads of gated DeltaNet layers.
    pub(super) fn delta_heads(&self) -> Result<Option<DeltaHeads>> {
        let Recurrence::GatedDelta { tiled } = self.architecture.recurrence else { return Ok(None) };
        let number = |key: &str| -> Result<usize> { Ok(small(self.uint(key)?.unwrap_or(0))) };
        let (keys, values) = (number("ssm.group_count")?, number("ssm.time_step_rank")?);
        let value_dim = number("ssm.inner_size")?.checked_div(values).unwrap_or(0);
        Ok(Some(DeltaHeads { keys, values, key_dim: number("ssm.state_size")?, value_dim, tiled }))
    }

    /// Width of the MLPs: a number, or in models of layers with one half each a list with 0 for those without an MLP.
    pub(super) fn feed_forward(&self) -> Result<Option<u64>> {
        const KEY: &str = "feed_forward_length";
        if self.architecture.recurrence != (Recurrence::StateSpace { blocks: true }) {
            return self.uint(KEY);
        }
        let widths = self.by_layer(KEY, self.number_of_layers()?)?.unwrap_or_default();
        let mut stated = widths.into_iter().filter(|&width| width > 0);
        let first = stated.next();
        match stated.any(|width| Some(width) != first) {
            true => Err(self.metadata.fault(&self.key(KEY), "several widths", "one width, and 0")),
            false => Ok(first.or(Some(1))),
        }
    }

    /// Number of layers, at most as many as any model has.
    pub(super) fn number_of_layers(&self) -> Result<usize> {
        /// Largest number of layers.
        const MOST: u64 = 10_000;
        Ok(small(self.layers()?.unwrap_or(0).min(MOST)))
    }

    /// True for each layer with a recurrent mixer.
    fn recurrent_layers(&self) -> Result<Vec<bool>> {
        let layers = self.number_of_layers()?;
        if let Recurrence::GatedDelta { .. } = self.architecture.recurrence {
            let key = self.key("attention.recurrent_layers");
            let listed = match self.metadata.get(&key) {
                Some(Value::Array(_, flags)) => {
                    let flag = |value: &Value| {
                        matches!(value, Value::Bool(true)) || value.as_u64().is_some_and(|n| n > 0)
                    };
                    Some(flags.iter().map(flag).collect::<Vec<_>>())
                }
                _ => None,
            };
            if let Some(listed) = listed {
                return match self.is_by_layer(listed.len(), layers)? {
                    true => Ok(listed[..layers].to_vec()),
                    false => {
                        let allowed = format!("{layers} flags, one for each layer");
                        Err(self.metadata.fault(&key, listed.len().to_string(), allowed))
                    }
                };
            }
            let interval = self.uint("full_attention_interval")?.filter(|&n| n > 0).unwrap_or(4);
            return Ok((1..=layers as u64).map(|layer| !layer.is_multiple_of(interval)).collect());
        }
        if matches!(self.architecture.recurrence, Recurrence::Parallel | Recurrence::StateSpaceAlone) {
            return Ok(vec![true; layers]);
        }
        let keys = self.by_layer("attention.head_count_kv", layers)?.unwrap_or_default();
        Ok(keys.into_iter().map(|count| count == 0).collect())
    }

    /// Puts the fields of the mixers and their layers.
    pub(super) fn put_recurrence(&self, config: &mut Map<String, Json>) -> Result<()> {
        let form = self.architecture.recurrence;
        if form == Recurrence::None {
            return Ok(());
        }
        let recurs = self.recurrent_layers()?;
        match form {
            Recurrence::None => Ok(()),
            Recurrence::GatedDelta { .. } => {
                let heads = self.delta_heads()?.unwrap_or_default();
                for (field, number) in [
                    ("linear_num_key_heads", heads.keys),
                    ("linear_num_value_heads", heads.values),
                    ("linear_key_head_dim", heads.key_dim),
                    ("linear_value_head_dim", heads.value_dim),
                ] {
                    config.insert(field.into(), json!(number));
                }
                self.put_size(config, "linear_conv_kernel_dim", "ssm.conv_kernel")?;
                put_types(config, &recurs, "linear_attention");
                Ok(())
            }
            Recurrence::Compressed => self.put_compressed(config),
            Recurrence::ChannelDelta => {
                self.put_size(config, "linear_num_heads", "attention.head_count")?;
                self.put_size(config, "linear_head_dim", "kda.head_dim")?;
                self.put_size(config, "linear_conv_kernel_dim", "ssm.conv_kernel")?;
                put_types(config, &recurs, "linear_attention");
                Ok(())
            }
            Recurrence::ShortConvolution => {
                self.put_size(config, "conv_L_cache", "shortconv.l_cache")?;
                config.insert("block_auto_adjust_ff_dim".into(), json!(false));
                put_types(config, &recurs, "conv");
                Ok(())
            }
            Recurrence::SelectiveScan => {
                for (field, key) in [
                    ("mamba_d_conv", "ssm.conv_kernel"),
                    ("mamba_d_state", "ssm.state_size"),
                    ("mamba_dt_rank", "ssm.time_step_rank"),
                ] {
                    self.put_size(config, field, key)?;
                }
                self.put_expansion(config)?;
                let attends: Vec<bool> = recurs.iter().map(|recurs| !recurs).collect();
                self.put_period(config, ["attn_layer_period", "attn_layer_offset"], &attends)
            }
            Recurrence::StateSpace { blocks } => self.put_state_space(config, &recurs, blocks),
            Recurrence::Parallel => self.put_state_space(config, &recurs, false),
            Recurrence::StateSpaceAlone => {
                // There are none: the file has 0.
                for field in ["num_attention_heads", "num_key_value_heads", "intermediate_size"] {
                    config.remove(field);
                }
                self.put_state_space(config, &recurs, false)
            }
        }
    }

    /// Puts the fields of Mamba-2, under the names of the model's own config.
    fn put_state_space(&self, config: &mut Map<String, Json>, recurs: &[bool], blocks: bool) -> Result<()> {
        for (field, key) in [
            ("mamba_d_conv", "ssm.conv_kernel"),
            ("mamba_d_state", "ssm.state_size"),
            ("mamba_n_groups", "ssm.group_count"),
            ("mamba_n_heads", "ssm.time_step_rank"),
        ] {
            self.put_size(config, self.own_field(field), key)?;
        }
        let (inner, heads) = (self.uint("ssm.inner_size")?, self.uint("ssm.time_step_rank")?);
        let width = inner.zip(heads).and_then(|(inner, heads)| inner.checked_div(heads));
        width.map(|width| config.insert(self.own_field("mamba_d_head").into(), json!(width)));
        let has = |name: &str| self.gguf.tensors().iter().any(|tensor| tensor.name.ends_with(name));
        config.insert(self.own_field("mamba_conv_bias").into(), json!(has("ssm_conv1d.bias")));
        if self.architecture.recurrence == Recurrence::StateSpaceAlone {
            return self.put_expansion(config);
        }
        if self.architecture.recurrence == Recurrence::Parallel {
            inner.map(|inner| config.insert("mamba_d_ssm".into(), json!(inner)));
            config.insert("mamba_rms_norm".into(), json!(has("ssm_norm.weight")));
            // llama.cpp norms after the gate.
            config.insert("mamba_norm_before_gate".into(), json!(false));
            return Ok(());
        }
        if !blocks {
            config.entry("num_local_experts").or_insert(json!(0));
            self.put_expansion(config)?;
            let rotated = self.metadata.flag(&self.key("rope.scaling.finetuned"))?.unwrap_or(true);
            config.insert("position_embedding_type".into(), json!(if rotated { "rope" } else { "nope" }));
            put_types(config, recurs, "mamba");
            return Ok(());
        }
        let widths = self.by_layer("feed_forward_length", recurs.len())?.unwrap_or_default();
        let kind = |(recurs, width): (&bool, &u64)| match (width, recurs) {
            (0, true) => "mamba",
            (0, false) => "attention",
            _ if self.architecture.experts != Experts::None => "moe",
            _ => "mlp",
        };
        let kinds: Vec<_> = recurs.iter().zip(&widths).map(kind).collect();
        config.insert("layers_block_type".into(), json!(kinds));
        Ok(())
    }

    /// Returns the name that the model's own config has for a field.
    fn own_field(&self, field: &'static str) -> &'static str {
        let row = mantissa_arch::Architecture::find(self.architecture.model_type());
        let mut aliases = row.into_iter().flat_map(|row| row.aliases);
        aliases.find(|(ours, _)| *ours == field).map_or(field, |(_, own)| own)
    }

    fn put_size(&self, config: &mut Map<String, Json>, field: &str, key: &str) -> Result<()> {
        self.uint(key)?.map(|number| config.insert(field.into(), json!(number)));
        Ok(())
    }

    /// Puts the inner width of a mixer, as a multiple of the model's where it is one.
    fn put_expansion(&self, config: &mut Map<String, Json>) -> Result<()> {
        let (Some(inner), Some(hidden)) = (self.uint("ssm.inner_size")?, self.uint("embedding_length")?)
        else {
            return Ok(());
        };
        match inner.checked_rem(hidden) {
            Some(0) => config.insert(self.own_field("mamba_expand").into(), json!(inner / hidden)),
            _ => config.insert("mamba_d_ssm".into(), json!(inner)),
        };
        Ok(())
    }

    /// Puts the period and the place in it that give `has`.
    ///
    /// # Errors
    /// [`crate::Error::Field`] if no period does.
    pub(super) fn put_period(
        &self,
        config: &mut Map<String, Json>,
        fields: [&str; 2],
        has: &[bool],
    ) -> Result<()> {
        let offset = has.iter().position(|&has| has).unwrap_or(has.len());
        let fits =
            |period: &usize| has.iter().enumerate().all(|(layer, &has)| has == (layer % period == offset));
        let Some(period) = (offset + 1..=has.len() + 1).find(fits) else {
            let allowed = format!("layers at one place of each period ({}, {})", fields[0], fields[1]);
            return Err(self.metadata.fault(&self.key("block_count"), "other layers", allowed));
        };
        config.insert(fields[0].into(), json!(period));
        config.insert(fields[1].into(), json!(offset));
        Ok(())
    }
}

/// Puts the kind of each layer: `recurrent`, or full attention.
fn put_types(config: &mut Map<String, Json>, recurs: &[bool], recurrent: &str) {
    let kind = |recurs: &bool| if *recurs { recurrent } else { "full_attention" };
    config.insert("layer_types".into(), json!(recurs.iter().map(kind).collect::<Vec<_>>()));
}
