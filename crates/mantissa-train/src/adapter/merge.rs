//! Merging: the weights that a model with adapters computes with, and the weights of its frozen base.

use mantissa_model::{LinearInfo, ModelConfig};

use super::init::{self, Factors};
use crate::arena::Parameters;
use crate::lora::{A, B, MAGNITUDE, adapter_name};

impl Parameters {
    /// Returns the weight `[rows, cols]` of a linear layer with its adapter merged in f32: `W + s B A`, under DoRA with
    /// rows scaled to the magnitudes. Layers without an adapter return their weight.
    pub fn merged(&self, info: &LinearInfo) -> Vec<f32> {
        let LinearInfo { module, cols, .. } = info;
        let mut weight = self.unadapted(info);
        let Some(base) = self.base() else { return weight };
        let part = |part: &str| self.values_of(&adapter_name(module, part));
        let factors = Factors { a: part(A), b: part(B), magnitude: part(MAGNITUDE) };
        if factors.a.is_empty() {
            return weight;
        }
        let scale = base.tuning.lora.scale() as f32;
        init::add_product(&mut weight, &factors, scale, *cols);
        if !factors.magnitude.is_empty() {
            let none = Factors { a: Vec::new(), b: Vec::new(), magnitude: Vec::new() };
            let norms = init::row_norms(&weight, &none, 0.0, *cols);
            let lines = weight.chunks_exact_mut((*cols).max(1)).zip(factors.magnitude.iter().zip(norms));
            lines.for_each(|(line, (m, norm))| {
                let c = if norm > 0.0 { m / norm } else { 0.0 };
                line.iter_mut().for_each(|v| *v *= c);
            });
        }
        weight
    }

    /// Returns the weight `[rows, cols]` of a linear layer without its adapter, dequantized.
    pub fn unadapted(&self, info: &LinearInfo) -> Vec<f32> {
        let packed = self.base().and_then(|base| Some((base, base.index(&info.module)?)));
        let Some((base, index)) = packed else { return self.values_of(&format!("{}.weight", info.module)) };
        let mut values = vec![0.0; info.rows * info.cols];
        base.weight(index).dequantize(&mut values, 1);
        values
    }

    /// Returns every tensor of the model with its values in forward order, adapters merged in f32 or left out.
    pub fn written_tensors<'a>(
        &'a self,
        config: &'a ModelConfig,
        merged: bool,
    ) -> impl Iterator<Item = (mantissa_model::TensorInfo, Vec<f32>)> + 'a {
        config.tensors().into_iter().map(move |tensor| {
            let values = match tensor.role {
                mantissa_model::Role::Linear { layer, kind } if merged => {
                    self.merged(&config.linear(layer, kind))
                }
                mantissa_model::Role::Linear { layer, kind } => self.unadapted(&config.linear(layer, kind)),
                _ => self.values_of(&tensor.name),
            };
            (tensor, values)
        })
    }

    /// Returns the values of a trained or frozen tensor; none if there is no such tensor.
    pub(crate) fn values_of(&self, name: &str) -> Vec<f32> {
        self.place(name).map_or_else(Vec::new, |range| self.f32(&range).into_owned())
    }
}
