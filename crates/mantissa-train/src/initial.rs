//! First weights of a model: read from files, or random.

use std::f64::consts::TAU;
use std::ops::Range;

use mantissa_model::config::ActivationParameter;
use mantissa_model::config::NormForm;
use mantissa_model::graph::VectorKind;
use mantissa_model::{LoadError, ModelConfig, Role, WeightSource};
use mantissa_num::round::philox4x32_10;
use mantissa_store::FileDigest;

use crate::arena::Parameters;
use crate::param_table::{ParamInfo, transposed};
use crate::store::Precision;

impl Parameters {
    /// Reads a model's parameters as f32.
    ///
    /// # Errors
    /// As [`WeightSource::tensor_f32`], and [`LoadError::Memory`].
    pub fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self, LoadError> {
        Self::load_as(source, config, Precision::F32)
    }

    /// Reads a model's parameters and stores them in `precision`, rounded to nearest. Converts tensor by
    /// tensor, so that the f32 copy is never held whole.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_as(
        source: &dyn WeightSource,
        config: &ModelConfig,
        precision: Precision,
    ) -> Result<Self, LoadError> {
        Self::load_part(source, config, precision, None)
    }

    /// Reads a model's parameters like [`load_as`](Self::load_as), and keeps those in `shard`, or all.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_part(
        source: &dyn WeightSource,
        config: &ModelConfig,
        precision: Precision,
        shard: Option<Range<usize>>,
    ) -> Result<Self, LoadError> {
        let mut making = Making::new(config, precision, shard)?;
        for param in making.params() {
            let shape = param.stored_shape();
            let mut values = source.tensor_f32(&param.tensor.name, &shape)?;
            if param.transposed {
                values = transposed(&values, shape[1]);
            }
            making.set(&param.range, &values);
        }
        Ok(making.finish())
    }

    /// Initializes a model: weights and embeddings from a normal distribution with standard deviation `std`,
    /// norms 1, biases and vectors 0, activations as published.
    ///
    /// A value depends only on the seed and its place (Philox4x32-10, key = seed, counter = group of four
    /// places; Box & Muller 1958).
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn random(config: &ModelConfig, std: f32, seed: u64) -> Result<Self, LoadError> {
        Self::random_as(config, std, seed, Precision::F32)
    }

    /// Initializes a model like [`random`](Self::random), stored in `precision`, rounded to nearest. The f32
    /// copy is never held whole.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn random_as(
        config: &ModelConfig,
        std: f32,
        seed: u64,
        precision: Precision,
    ) -> Result<Self, LoadError> {
        Self::random_part(config, std, seed, precision, None)
    }

    /// Initializes a model like [`random_as`](Self::random_as), and keeps the parameters in `shard`, or all.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn random_part(
        config: &ModelConfig,
        std: f32,
        seed: u64,
        precision: Precision,
        shard: Option<Range<usize>>,
    ) -> Result<Self, LoadError> {
        let mut making = Making::new(config, precision, shard)?;
        let mut buffer = Vec::new();
        for ParamInfo { tensor, range, .. } in making.params() {
            buffer.clear();
            buffer.resize(range.len(), 0.0);
            let values = &mut buffer[..];
            match tensor.role {
                Role::Norm { .. } if config.norm == NormForm::RmsPlusOne => {}
                Role::Norm { .. } => values.fill(1.0),
                Role::Vector { kind: VectorKind::Activation(name), .. } => {
                    let parameter = config.hidden_act.parameters().iter().find(|one| one.name == name);
                    values.fill(parameter.map_or(0.0, ActivationParameter::stored));
                }
                Role::Bias { .. }
                | Role::NormBias { .. }
                | Role::SideBias { .. }
                | Role::HeadBias
                | Role::Vector { .. } => {}
                _ => {
                    let first = range.start as u64 / 4;
                    for (group, values) in (first..).zip(values.chunks_mut(4)) {
                        let normals = normals(seed, group);
                        values.iter_mut().zip(normals).for_each(|(v, n)| *v = (n * f64::from(std)) as f32);
                    }
                }
            }
            making.set(&range, &buffer);
        }
        Ok(making.finish())
    }
}

/// Parameters that are made one after another.
struct Making {
    parameters: Parameters,
    /// Part that is kept; `None` for all.
    shard: Option<Range<usize>>,
    /// Hashes of the parameters, where only a part is kept: whole ones cannot be compared later.
    hashes: Vec<String>,
}

impl Making {
    fn new(
        config: &ModelConfig,
        precision: Precision,
        shard: Option<Range<usize>>,
    ) -> Result<Self, LoadError> {
        Ok(Making { parameters: Parameters::zeros(config, precision)?, shard, hashes: Vec::new() })
    }

    /// Returns the parameters to be made.
    fn params(&self) -> Vec<ParamInfo> {
        self.parameters.table().iter().cloned().collect()
    }

    /// Sets a parameter, of which the part that is not kept takes no memory afterwards.
    fn set(&mut self, range: &Range<usize>, values: &[f32]) {
        self.parameters.set(range.start, values);
        if let Some(shard) = &self.shard {
            self.hashes.push(FileDigest::of(&self.parameters.piece_bytes(range.clone())).hex());
            self.parameters.release_outside(shard, range);
        }
    }

    fn finish(mut self) -> Parameters {
        if let Some(shard) = self.shard {
            self.parameters.hold_made(shard, FileDigest::of_pieces(&self.hashes).hex());
        }
        self.parameters
    }
}

/// Returns four standard normal values.
fn normals(seed: u64, group: u64) -> [f64; 4] {
    let words = philox4x32_10([group as u32, (group >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let pair = |a: u32, b: u32| {
        // Uniform in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * ((f64::from(a) + 1.0) / 4_294_967_296.0).ln()).sqrt();
        let angle = TAU * f64::from(b) / 4_294_967_296.0;
        [radius * angle.cos(), radius * angle.sin()]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_are_normal() {
        let all: Vec<f64> = (0..20_000).flat_map(|group| normals(7, group)).collect();
        let n = all.len() as f64;
        let mean = all.iter().sum::<f64>() / n;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let beyond = all.iter().filter(|x| x.abs() > 1.959_964).count() as f64 / n;
        assert!(mean.abs() < 5.0 / n.sqrt() && (variance - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
        assert!((beyond - 0.05).abs() < 5.0 * (0.05 * 0.95 / n).sqrt());
    }
}
