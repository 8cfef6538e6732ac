//! Record of the folded changes, stored beside the output.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mantissa_model::ModelConfig;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Dtype, Error, regular};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::fold::sites::{Producer, Site, norm_parts, sites};
use crate::fold::{Coordinates, Folds, rounded};
use crate::orthogonal::Orthogonal;
use crate::rotate::{self, RotateOptions, Rotations};

/// File name of the record. Model loaders ignore it.
pub(crate) const FILE_NAME: &str = "mantissa-transform.json";

/// Size limit of the file, far above what any model needs: a hostile file is not read whole.
const MOST_BYTES: u64 = 256 << 20;

const VERSION: u32 = 1;

/// Changes folded into a model before it was quantized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    /// Name of the transform.
    pub(crate) transform: String,
    /// Divisors of the channels of a vector, by the module that produces it: f32 as hexadecimal digits of its bits.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    scales: BTreeMap<String, String>,
    /// Rotations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rotation: Option<RotateOptions>,
    /// Learned rotations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    learned: Option<Learned>,
}

/// Learned rotations as [`Orthogonal::digits`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Learned {
    /// Rotation of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    residual: Option<String>,
    /// Rotations of values within each head, by layer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    values: BTreeMap<usize, String>,
    /// KL divergence from the unquantized model on windows held out from learning: before and after.
    kl: [String; 2],
}

impl Record {
    pub(crate) fn new(transform: &str) -> Self {
        let (transform, scales) = (transform.to_owned(), BTreeMap::new());
        Record { version: VERSION, transform, scales, rotation: None, learned: None }
    }

    /// Returns the content of the file.
    ///
    /// # Errors
    /// Serialization failed, which no value causes.
    pub(crate) fn to_json(&self) -> Result<Vec<u8>> {
        let fault = |error: serde_json::Error| Error::Io {
            path: FILE_NAME.into(),
            operation: "serialize as JSON",
            error: error.into(),
        };
        let mut text = serde_json::to_vec_pretty(self).map_err(fault)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Records that the channels of `site` are divided by `s`.
    pub(crate) fn divide(&mut self, site: &Site, s: &[f32]) {
        let digits = s.iter().map(|s| format!("{:08x}", s.to_bits())).collect();
        self.scales.insert(site.name().to_owned(), digits);
    }

    /// Records learned rotations, and the KL divergence before and after learning.
    pub(crate) fn rotate(&mut self, options: RotateOptions, rotations: &Rotations, kl: [f64; 2]) {
        let digits = |by: &Coordinates| match by {
            Coordinates::Turned(matrix) => Some(matrix.digits()),
            _ => None,
        };
        let values = rotations.values.iter().enumerate();
        let values = values.filter_map(|(layer, by)| Some((layer, digits(by.as_ref()?)?))).collect();
        let residual = rotations.residual.iter().find_map(digits);
        self.learned = Some(Learned { residual, values, kl: kl.map(|kl| format!("{kl:.4e}")) });
        self.rotation = Some(options);
    }

    /// Returns the rotations: learned ones, or random ones from the seed.
    fn rotations(&self, config: &ModelConfig, options: RotateOptions) -> Result<Rotations> {
        let mut rotations = Rotations::random(config, options);
        let Some(learned) = &self.learned else { return Ok(rotations) };
        if let Some(digits) = &learned.residual {
            rotations.residual = vec![matrix("learned.residual".to_owned(), digits, config.hidden_size)?];
        }
        for (layer, digits) in &learned.values {
            let field = format!("learned.values.{layer}");
            let by = matrix(field.clone(), digits, config.head_dim)?;
            let fault = || {
                Error::field(
                    Path::new(FILE_NAME),
                    field,
                    "a layer that the model does not have",
                    "a layer of this model",
                    "",
                )
            };
            *rotations.values.get_mut(*layer).ok_or_else(fault)? = Some(by);
        }
        Ok(rotations)
    }

    /// Reads the record beside the model at `dir`; `None` if nothing was folded.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Field`].
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE_NAME);
        let expected = "a record written by mantissa quantize";
        let Some(text) = regular::read_optional(&path, MOST_BYTES, expected)? else { return Ok(None) };
        let fault = |field: &str, got: String, expected: &str| Error::field(&path, field, got, expected, "");
        let record: Record =
            serde_json::from_slice(&text).map_err(|error| fault("content", error.to_string(), expected))?;
        if record.version != VERSION {
            return Err(fault("version", record.version.to_string(), "1").into());
        }
        Ok(Some(record))
    }

    /// Returns the recorded changes as changes of the tensors of `source`.
    ///
    /// # Errors
    /// [`Error::Field`] if the record belongs to another model; errors of reading the source's norms.
    pub(crate) fn folds(&self, source: &ModelFiles, config: &ModelConfig) -> Result<Folds> {
        let mut folds = match self.rotation {
            Some(options) => rotate::folds(source, config, options, &self.rotations(config, options)?)?,
            None => Folds::default(),
        };
        let mut known = 0;
        for site in (0..config.num_hidden_layers).flat_map(|layer| sites(config, layer)) {
            let Some(digits) = self.scales.get(site.name()) else { continue };
            let s = scales(digits).filter(|s| s.len() == site.channels).ok_or_else(|| {
                let got = format!("{} digits", digits.len());
                let expected = format!("8 digits for each of {} positive numbers", site.channels);
                Error::field(Path::new(FILE_NAME), format!("scales.{}", site.name()), got, expected, "")
            })?;
            site.divide(config, &s, &mut folds);
            known += 1;
        }
        if known < self.scales.len() {
            let got = format!("{} modules that the model does not have", self.scales.len() - known);
            return Err(Error::field(Path::new(FILE_NAME), "scales", got, "modules of this model", "").into());
        }
        Ok(folds)
    }
}

/// Parses 8 hexadecimal digits for each scale; `None` unless all are positive and finite.
fn scales(digits: &str) -> Option<Vec<f32>> {
    let number = |chunk: &[u8]| {
        let text = std::str::from_utf8(chunk).ok().filter(|text| text.len() == 8)?;
        let value = f32::from_bits(u32::from_str_radix(text, 16).ok()?);
        (value.is_finite() && value > 0.0).then_some(value)
    };
    digits.as_bytes().chunks(8).map(number).collect()
}

/// Adjusts the scales `s` so that a 16-bit norm stores its divided weights without loss: `w / round(w / s)`. Otherwise
/// the rounding error of the norm would be missing in the layers that read it.
pub(crate) fn storable(
    source: &ModelFiles,
    config: &ModelConfig,
    site: &Site,
    s: Vec<f32>,
) -> Result<Vec<f32>> {
    let Producer::Norm(module) = &site.producer else { return Ok(s) };
    let name = format!("{module}.weight");
    let dtype = source.checkpoint().get(&name).map_or(Dtype::F32, |meta| meta.dtype);
    if !matches!(dtype, Dtype::BF16 | Dtype::F16) {
        return Ok(s);
    }
    let offset = if norm_parts(config).plus_one { 1.0 } else { 0.0 };
    let weights = source.tensor_f32(&name, &[site.channels])?;
    let stored = |(s, w): (f32, f32)| {
        let w = w + offset;
        let stored = rounded(w / s - offset, dtype) + offset;
        let exact = w / stored;
        if exact.is_finite() && exact > 0.0 { exact } else { s }
    };
    Ok(s.into_iter().zip(weights).map(stored).collect())
}

/// Reads an orthogonal matrix of `n` rows from the digits in `field`.
fn matrix(field: String, digits: &str, n: usize) -> Result<Coordinates> {
    let fault = || {
        let expected = format!("the digits of an orthogonal matrix of {n} rows");
        Error::field(Path::new(FILE_NAME), field, format!("{} digits", digits.len()), expected, "")
    };
    let matrix = Orthogonal::from_digits(digits, n).ok_or_else(fault)?;
    Ok(Coordinates::Turned(Arc::new(matrix)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_kept_to_the_bit_and_nonsense_is_refused() {
        let s = [1.0f32, 0.1, 3.402_823_5e38, f32::MIN_POSITIVE];
        let digits: String = s.iter().map(|s| format!("{:08x}", s.to_bits())).collect();
        assert_eq!(scales(&digits).unwrap(), s);
        for text in ["3f80000", "zz800000", "00000000", "7fc00000", "bf800000", "+f800000x"] {
            assert!(scales(text).is_none(), "{text}");
        }
    }

    #[test]
    fn a_record_of_another_version_or_with_more_in_it_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        for (text, part) in [
            ("{\"version\": 2, \"transform\": \"awq\"}", "version"),
            ("{\"version\": 1, \"transform\": \"awq\", \"more\": 1}", "more"),
            ("[", "content"),
        ] {
            std::fs::write(dir.path().join(FILE_NAME), text).unwrap();
            let error = Record::read(dir.path()).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(FILE_NAME), "{error}");
        }
        let record = Record::new("smooth");
        std::fs::write(dir.path().join(FILE_NAME), serde_json::to_vec(&record).unwrap()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(record));
    }
}
