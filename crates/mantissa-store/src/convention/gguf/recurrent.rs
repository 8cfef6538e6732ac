//! Recurrent mixers: the keys of a file, as the fields of the `config.json` that it was made from.
//!
//! Keys are named as in llama.cpp's loaders (`src/models/`, one file for each architecture). Layers without keys and values, for
//! which `attention.head_count_kv` lists 0, are recurrent; gated DeltaNet has keys of its own for that.

use serde_json::{Map, Value as Json, json};

use super::config::{Reader, small};
use crate::error::Result;
use crate::gguf::Value;
use mantissa_arch::gguf::{DeltaHeads, Experts, Fixed, LayerTypes, MixerLayers, Stated};

impl Reader<'_> {
    /// Heads of gated DeltaNet layers.
    pub(super) fn delta_heads(&self) -> Result<Option<DeltaHeads>> {
        let Some(tiled) = self.architecture.recurrence.and_then(|mixers| mixers.tiled) else {
            return Ok(None);
        };
        let number = |key: &str| -> Result<usize> { Ok(small(self.uint(key)?.unwrap_or(0))) };
        let (keys, values) = (number("ssm.group_count")?, number("ssm.time_step_rank")?);
        let value_dim = number("ssm.inner_size")?.checked_div(values).unwrap_or(0);
        Ok(Some(DeltaHeads { keys, values, key_dim: number("ssm.state_size")?, value_dim, tiled }))
    }

    /// Width of the MLPs: a number, or in models of layers with one half each a list with 0 for those without an MLP.
    pub(super) fn feed_forward(&self) -> Result<Option<u64>> {
        const KEY: &str = "feed_forward_length";
        if self.architecture.recurrence.is_none_or(|mixers| mixers.types != LayerTypes::Blocks) {
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
    fn recurrent_layers(&self, stated: MixerLayers) -> Result<Vec<bool>> {
        let layers = self.number_of_layers()?;
        if stated == MixerLayers::Interval {
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
        if stated == MixerLayers::Every {
            return Ok(vec![true; layers]);
        }
        let keys = self.by_layer("attention.head_count_kv", layers)?.unwrap_or_default();
        Ok(keys.into_iter().map(|count| count == 0).collect())
    }

    /// Puts the fields of the mixers and their layers.
    pub(super) fn put_recurrence(&self, config: &mut Map<String, Json>) -> Result<()> {
        let Some(mixers) = self.architecture.recurrence else { return Ok(()) };
        let recurs = self.recurrent_layers(mixers.layers)?;
        for (field, stated) in mixers.fields.iter().copied().flatten() {
            self.put_stated(config, self.own_field(field), *stated)?;
        }
        match mixers.types {
            LayerTypes::None => {}
            LayerTypes::Named(name) => put_types(config, &recurs, name),
            LayerTypes::Period(fields) => {
                let attends: Vec<bool> = recurs.iter().map(|recurs| !recurs).collect();
                self.put_period(config, fields, &attends)?;
            }
            LayerTypes::Blocks => {
                let widths = self.by_layer("feed_forward_length", recurs.len())?.unwrap_or_default();
                let kind = |(recurs, width): (&bool, &u64)| match (width, recurs) {
                    (0, true) => "mamba",
                    (0, false) => "attention",
                    _ if self.architecture.experts != Experts::None => "moe",
                    _ => "mlp",
                };
                let kinds: Vec<_> = recurs.iter().zip(&widths).map(kind).collect();
                config.insert("layers_block_type".into(), json!(kinds));
            }
        }
        Ok(())
    }

    /// Puts a field that a file has as `stated`; nothing without its keys.
    fn put_stated(&self, config: &mut Map<String, Json>, field: &str, stated: Stated) -> Result<()> {
        let value = match stated {
            Stated::Size(key) => self.uint(key)?.map(|size| json!(size)),
            Stated::Number(key) => self.float(key)?.map(|number| json!(number)),
            Stated::Sizes(key) => self.by_layer(key, self.number_of_layers()?)?.map(|sizes| json!(sizes)),
            Stated::Quotient([key, by]) => {
                let (size, by) = (self.uint(key)?, self.uint(by)?);
                size.zip(by).and_then(|(size, by)| size.checked_div(by)).map(|size| json!(size))
            }
            Stated::Multiple([key, of], otherwise) => {
                let (Some(size), Some(of)) = (self.uint(key)?, self.uint(of)?) else { return Ok(()) };
                if size.checked_rem(of) != Some(0) {
                    config.insert(otherwise.into(), json!(size));
                    return Ok(());
                }
                Some(json!(size / of))
            }
            Stated::Switched(key, [on, off]) => {
                let stated = self.metadata.flag(&self.key(key))?.unwrap_or(true);
                Some(json!(if stated { on } else { off }))
            }
            Stated::Tensor(end) => {
                Some(json!(self.gguf.tensors().iter().any(|tensor| tensor.name.ends_with(end))))
            }
            Stated::Fixed(value) => Some(to_json(value)),
            Stated::Default(value) => {
                config.entry(field).or_insert_with(|| to_json(value));
                None
            }
            Stated::Removed => {
                config.remove(field);
                None
            }
        };
        value.map(|value| config.insert(field.into(), value));
        Ok(())
    }

    /// Returns the name that the model's own config has for a field.
    fn own_field(&self, field: &'static str) -> &'static str {
        let row = mantissa_arch::Architecture::find(self.architecture.model_type());
        let mut aliases = row.into_iter().flat_map(|row| row.aliases);
        aliases.find(|(ours, _)| *ours == field).map_or(field, |(_, own)| own)
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

/// Value of a field that llama.cpp fixes.
pub(super) fn to_json(value: Fixed) -> Json {
    match value {
        Fixed::Flag(flag) => json!(flag),
        Fixed::Size(size) => json!(size),
        Fixed::Number(number) => json!(number),
    }
}
