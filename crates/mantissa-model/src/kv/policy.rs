//! Policy of the KV cache, as data and as text.
//!
//! Text: items separated by commas. A scheme (see [`super::scheme`]) alone sets keys and values; `keys=SCHEME` and
//! `values=SCHEME` set one each (`f32` leaves it unquantized). `window=N` keeps the last N tokens in f32, `sinks=N`
//! the first N (Xiao et al. 2023, arXiv 2309.17453). `scales=TYPE` stores block scales as `f16`, `bf16` or an FP8 type
//! instead of f32. `channel-keys` groups keys along tokens, each channel by itself (KIVI, Liu et al. 2024, arXiv
//! 2402.02750): the group of the scheme then counts tokens. `pre-rope` stores keys before their rotation (KVQuant,
//! Hooper et al. 2024, arXiv 2401.18079). `rotate` multiplies each head by a Hadamard matrix before quantization and
//! undoes it after (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use mantissa_num::{Affine, Blocks, Code, Format, Hadamard, ParseError, Scheme, lloyd};

use super::book::{BookCodec, LayerBooks, Scaling, Span};
use super::codec::{RowCodec, is_by_head};
use super::quantizer::{KvQuantizer, KvStorage};
use super::scheme::KvScheme;
use super::side::Side;
use crate::config::ModelConfig;
use crate::error::LoadError;

/// Storage of keys and values. Parses from and prints to text: see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvPolicy {
    /// Scheme of the keys; `None` keeps them in f32.
    pub keys: Option<KvScheme>,
    /// Scheme of the values; `None` keeps them in f32.
    pub values: Option<KvScheme>,
    /// Number of last tokens that stay in f32.
    pub window: usize,
    /// Number of first tokens that stay in f32.
    pub sinks: usize,
    /// Code of block scales; `None` keeps the scheme's own.
    pub scales: Option<Code>,
    /// True if keys are grouped along tokens, channel by channel.
    pub channel_keys: bool,
    /// True if keys are stored before RoPE.
    pub pre_rope: bool,
    /// True if each head is multiplied by a Hadamard matrix before quantization.
    pub rotate: bool,
}

/// The text does not parse as a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV cache \"{text}\": {fault}")]
pub struct KvParseError {
    text: String,
    /// Expected and found values, perhaps in the words of a scheme's error.
    fault: String,
}

/// Requirement of policies that rotate.
const NO_ROTATION: &str = "heads with a width that has a Hadamard matrix";

/// Seed of TurboQuant's random signs: constant, so that every run decodes the same cache.
const SIGNS: u64 = 0;

/// Largest window or number of sinks: far above any context, far below overflow.
const MAX_TOKENS: usize = 1 << 32;

impl FromStr for KvPolicy {
    type Err = KvParseError;

    fn from_str(text: &str) -> Result<Self, KvParseError> {
        let fault = |found: &str, allowed: &str| KvParseError {
            text: text.into(),
            fault: format!("expected {allowed}, got \"{found}\""),
        };
        let scheme = |name: &str| {
            let of_scheme = |error: ParseError| KvParseError { text: text.into(), fault: error.to_string() };
            let scheme = KvScheme::parse(name).map_err(of_scheme)?;
            Ok((scheme != KvScheme::Grid(Scheme::plain(Code::F32))).then_some(scheme))
        };
        let number = |part: &str, value: &str| match value.parse() {
            Ok(n) if n <= MAX_TOKENS => Ok(n),
            _ => Err(fault(part, "a number of tokens")),
        };
        let (mut policy, mut said) = (KvPolicy::default(), BTreeSet::new());
        for part in text.split(',') {
            let flag = ["channel-keys", "pre-rope", "rotate"].contains(&part);
            let says: &[&str] = match part.split_once('=') {
                Some((name, _)) => &[name],
                None if flag => &[part],
                None => &["keys", "values"],
            };
            if !says.iter().all(|name| said.insert(*name)) {
                return Err(fault(part, "each part once, without overlap"));
            }
            match part.split_once('=') {
                Some(("keys", name)) => policy.keys = scheme(name)?,
                Some(("values", name)) => policy.values = scheme(name)?,
                Some(("window", value)) => policy.window = number(part, value)?,
                Some(("sinks", value)) => policy.sinks = number(part, value)?,
                Some(("scales", name)) => {
                    let code =
                        scale_code(name).ok_or_else(|| fault(part, "scales=f32, f16, bf16, fp8-e4m3 …"))?;
                    policy.scales = (code != Code::F32).then_some(code);
                }
                None if part == "channel-keys" => policy.channel_keys = true,
                None if part == "pre-rope" => policy.pre_rope = true,
                None if part == "rotate" => policy.rotate = true,
                None => (policy.keys, policy.values) = (scheme(part)?, scheme(part)?),
                Some(_) => {
                    let allowed = "a SCHEME, keys=SCHEME, values=SCHEME, window=N, sinks=N, scales=TYPE, channel-keys, pre-rope, rotate";
                    return Err(fault(part, allowed));
                }
            }
        }
        Ok(policy)
    }
}

impl fmt::Display for KvPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |scheme: &Option<KvScheme>| scheme.as_ref().map_or("f32".into(), KvScheme::to_string);
        let (keys, values) = (name(&self.keys), name(&self.values));
        match keys == values {
            true => f.write_str(&keys)?,
            false => write!(f, "keys={keys},values={values}")?,
        }
        for (tokens, name) in [(self.window, "window"), (self.sinks, "sinks")] {
            if tokens > 0 {
                write!(f, ",{name}={tokens}")?;
            }
        }
        if let Some(code) = self.scales {
            write!(f, ",scales={}", Scheme::plain(code))?;
        }
        let flags =
            [(self.channel_keys, "channel-keys"), (self.pre_rope, "pre-rope"), (self.rotate, "rotate")];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, ",{name}"))
    }
}

/// Parses a plain float of at most 16 bits, or f32.
fn scale_code(name: &str) -> Option<Code> {
    match name.parse::<Scheme>().ok()?.format {
        Format::Affine(Affine { code: code @ (Code::F32 | Code::Float(_)), scale: None, .. }) => Some(code),
        _ => None,
    }
}

impl KvPolicy {
    /// Creates a policy of one scheme for keys and values.
    pub fn of(scheme: &Scheme) -> Self {
        let scheme = Some(KvScheme::Grid(scheme.clone()));
        KvPolicy { keys: scheme.clone(), values: scheme, ..KvPolicy::default() }
    }

    /// True if nothing is quantized.
    pub fn is_f32(&self) -> bool {
        self.keys.is_none() && self.values.is_none()
    }

    /// True if levels of keys or values are found on a calibration text.
    pub fn is_calibrated(&self) -> bool {
        [&self.keys, &self.values].into_iter().flatten().any(KvScheme::is_calibrated)
    }

    /// Bytes of a token in all layers of a model, beyond window and sinks.
    ///
    /// # Errors
    /// As [`Decoder::set_kv`](crate::Decoder::set_kv).
    pub fn bytes_per_token(&self, config: &ModelConfig) -> Result<f64, LoadError> {
        let index: usize = config.attention_layers().map(|layer| 4 * config.index_width(layer)).sum();
        let heads = self.quantizer(config)?.bytes_per_token(config);
        Ok(heads * config.attention_layers().count() as f64 + index as f64)
    }

    /// Builds the quantizer of each layer of a model; calibrated levels are left blank.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`].
    pub fn quantizer(&self, config: &ModelConfig) -> Result<KvQuantizer, LoadError> {
        self.quantizer_with(config, &LayerBooks::default())
    }

    /// Builds the quantizer of a layer with calibrated `books`.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`].
    pub(crate) fn quantizer_with(
        &self,
        config: &ModelConfig,
        books: &LayerBooks,
    ) -> Result<KvQuantizer, LoadError> {
        if !self.is_f32() && config.attention_layers().next().is_none() {
            return Err(
                self.refused("f32: no layer caches keys and values, and the states of mixers are f32")
            );
        }
        let mut parts = KvStorage { window: self.window, sinks: self.sinks, ..KvStorage::default() };
        if let Some(latent) = &config.latent {
            parts.latent = self.latent(latent.kv_rank)?;
            return Ok(KvQuantizer::new(parts));
        }
        if self.is_calibrated() && config.by_layer.shared_from < config.num_hidden_layers {
            return Err(self.refused("schemes without calibrated levels: layers share keys and values"));
        }
        let width = config.key_value_width();
        parts.before_rope = self.pre_rope && self.keys.is_some();
        parts.keys = match (&self.keys, self.channel_keys) {
            (None, _) => None,
            (Some(KvScheme::Grid(scheme)), true) if matches!(scheme.format.blocks(), Blocks::Group(_)) => {
                let group =
                    if let Blocks::Group(group) = scheme.format.blocks() { group as usize } else { 1 };
                let codec = RowCodec::new(&self.narrowed(scheme), group)?;
                Some(Side::channels(codec, width, self.rotation(config.head_dim)?))
            }
            (Some(_), true) => {
                return Err(self.refused("groups such as int4-g32-asym, whose length counts tokens"));
            }
            (Some(scheme), false) => {
                let ranges = vec![Span::default(); width];
                let book = books.keys.as_ref().map(|book| (book.levels.clone(), book.spans.clone()));
                let (levels, spans) = book.map_or((None, ranges), |(levels, spans)| (Some(levels), spans));
                Some(self.tokens(config, scheme, Scaling::Columns(spans), levels)?)
            }
        };
        let values = self.values.as_ref();
        let side = |scheme| self.tokens(config, scheme, Scaling::Range, books.values.clone());
        parts.values = values.map(side).transpose()?;
        Ok(KvQuantizer::new(parts))
    }

    /// Builds the storage of a latent of `rank`, which has one scheme.
    fn latent(&self, rank: usize) -> Result<Option<Side>, LoadError> {
        let (keys, values, scales) = (self.keys.clone(), self.keys.clone(), self.scales);
        let plain = KvPolicy { keys, values, scales, ..KvPolicy::default() } == *self;
        match &self.keys {
            Some(KvScheme::Grid(scheme)) if plain => {
                let codec = RowCodec::new(&self.narrowed(scheme), rank)?;
                Ok(Some(Side::tokens(codec, rank, None)))
            }
            None if plain => Ok(None),
            _ => Err(self.refused("a single scheme (and scales=), because keys and values share a latent")),
        }
    }

    /// Builds the storage of keys or values token by token. `levels` and `scaling` are KVQuant's calibrated levels and
    /// the scaling of rows to them.
    fn tokens(
        &self,
        config: &ModelConfig,
        scheme: &KvScheme,
        scaling: Scaling,
        levels: Option<Vec<f32>>,
    ) -> Result<Side, LoadError> {
        let (width, head) = (config.key_value_width(), config.head_dim);
        match scheme {
            KvScheme::Grid(scheme) => {
                let cols = if is_by_head(scheme) { head } else { width };
                let codec = RowCodec::new(&self.narrowed(scheme), cols)?;
                Ok(Side::tokens(codec, width, self.rotation(head)?))
            }
            KvScheme::Turbo { bits } => {
                let rotation = Hadamard::new(head).ok_or_else(|| self.refused(NO_ROTATION))?;
                let levels = lloyd::sphere_levels(head, *bits);
                let codec = BookCodec::new(levels, head, Scaling::Length, 0);
                Ok(Side::tokens(codec, width, Some(rotation.randomized(SIGNS))))
            }
            KvScheme::Nuq { .. } if self.rotate || width > 1 << 16 => {
                Err(self.refused("nuq without rotate, for at most 65536 key and value elements per token"))
            }
            KvScheme::Nuq { bits, outliers } => {
                let levels = levels.unwrap_or_else(|| vec![0.0; 1 << bits]);
                let codec = BookCodec::new(levels, width, scaling, BookCodec::kept_of(width, *outliers));
                Ok(Side::tokens(codec, width, None))
            }
        }
    }

    fn rotation(&self, head: usize) -> Result<Option<Hadamard>, LoadError> {
        match self.rotate {
            true => Hadamard::new(head).map(Some).ok_or_else(|| self.refused(NO_ROTATION)),
            false => Ok(None),
        }
    }

    fn refused(&self, allowed: &'static str) -> LoadError {
        LoadError::KvScheme { scheme: self.to_string(), allowed }
    }

    /// Returns the scheme with its scales stored in the policy's type.
    fn narrowed(&self, scheme: &Scheme) -> Scheme {
        match self.scales {
            Some(code) if scheme.format.scale().is_some_and(|tree| tree.code == Code::F32) => {
                Scheme { format: scheme.format.clone().with_scale_code(code), ..scheme.clone() }
            }
            _ => scheme.clone(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn policies_round_trip_as_text() {
        for text in [
            "int8-head",
            "f32",
            "keys=int4-g32-asym:minmax,values=int4-head-asym,window=128,sinks=4,channel-keys",
            "int2-g32-asym,window=128,scales=f16,pre-rope,rotate",
            "keys=f32,values=fp8-e4m3-head",
            "nvfp4",
            "keys=nuq3-1%,values=turbo4,pre-rope",
            "nuq4-0.5%",
            "nuq2",
        ] {
            assert_eq!(text.parse::<KvPolicy>().unwrap().to_string(), text);
        }
        let same: KvPolicy = "keys=int8-head,values=int8-head".parse().unwrap();
        assert_eq!(same.to_string(), "int8-head");
        for (short, full) in [
            ("int8", "int8-head"),
            ("INT4", "int4-head-asym"),
            ("fp8", "fp8-e4m3-head"),
            ("keys=int8,values=int4,window=64", "keys=int8-head,values=int4-head-asym,window=64"),
        ] {
            assert_eq!(short.parse::<KvPolicy>().unwrap().to_string(), full);
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_expected_form() {
        for text in [
            "",
            "int9-head",
            "window=-1",
            "window=99999999999999",
            "scales=int8",
            "rotated",
            "keys=",
            "turbo9",
            "nuq",
            "nuq4-51%",
            "int8-head,int4-head",
            "keys=int8-head,int4-head",
            "int8-head,sinks=1,sinks=2",
        ] {
            let error = text.parse::<KvPolicy>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn bytes_per_token_match_the_scheme() {
        let config = crate::config::example("llama");
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        let elements = (2 * config.key_value_width() * config.num_hidden_layers) as f64;
        let (d, bytes) = (config.head_dim as f64, |text: &str| {
            text.parse::<KvPolicy>().unwrap().bytes_per_token(&config).unwrap()
        });
        assert_eq!(bytes("f32"), 4.0 * elements);
        assert_eq!(bytes("int8-head"), elements * (1.0 + 4.0 / d));
        assert_eq!(bytes("int4-head-asym:minmax,scales=f16"), elements * (0.5 + 6.0 / d));
        assert_eq!(bytes("turbo3"), elements * (3.0 / 8.0 + 2.0 / d));
        let width = config.key_value_width() as f64;
        let kept = 4.0 * (width / 100.0).ceil();
        assert_eq!(bytes("nuq4-1%"), elements * (0.5 + (2.0 + kept) / width));
        assert_eq!(bytes("keys=nuq2,values=f32,pre-rope"), elements / 2.0 * (0.25 + 4.0));
        assert_eq!(bytes("keys=int2-g32-asym:minmax,values=f32,channel-keys"), elements / 2.0 * (0.5 + 4.0));
    }
}
