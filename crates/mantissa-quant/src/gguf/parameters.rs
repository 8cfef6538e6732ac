//! Parameters of a model as GGUF lists them, with the values of those that a checkpoint stores differently.

use std::collections::HashMap;

use mantissa_model::graph::SideKind;
use mantissa_model::{LinearInfo, ModelConfig, Role, StoredAs, TensorInfo, linear_weight};
use mantissa_num::{Code, Format, Rule, Scheme, minifloat};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{self, Joined, Place, block_type};
use mantissa_store::gguf::{GgmlType, GgufTensorSpec};

use super::limits::fault;
use super::schemes::{fitting, plain, source_scheme};
use crate::error::Result;
use crate::plan::{JoinedCast, Layout, Options, PlannedLinear, WeightJob, scheme_of};
use crate::values::values_of;

/// Lists every parameter: linear layers as `[out, in]` and experts one by one, also if the checkpoint stores them
/// otherwise.
pub(crate) fn parameters(config: &ModelConfig) -> Vec<TensorInfo> {
    let mut all: Vec<TensorInfo> = Vec::new();
    let mut experts_of = None;
    for info in config.tensors() {
        match info.role {
            Role::Linear { layer, kind } => {
                let LinearInfo { rows, cols, .. } = config.linear(layer, kind);
                all.push(TensorInfo { shape: vec![rows, cols], ..info });
            }
            Role::Stacked { layer } if !info.name.ends_with("_bias") => {
                if experts_of.replace(layer) == Some(layer) {
                    continue;
                }
                let stacked = |info: &LinearInfo| matches!(info.stored, StoredAs::Stacked(_));
                let experts = config.layer_linears(layer).into_iter().filter(stacked);
                all.extend(experts.map(|LinearInfo { module, layer, kind, rows, cols, .. }| TensorInfo {
                    name: format!("{module}.weight"),
                    shape: vec![rows, cols],
                    role: Role::Linear { layer, kind },
                }));
            }
            _ => all.push(info),
        }
    }
    all
}

/// Returns the linear layer of a parameter, which a checkpoint may store in another form.
pub(crate) fn linear_of(config: &ModelConfig, info: &TensorInfo) -> Option<LinearInfo> {
    match info.role {
        Role::Linear { layer, kind } => Some(config.linear(layer, kind)),
        _ => None,
    }
}

/// Returns the checkpoint tensor that holds a parameter.
pub(crate) fn dense_name(config: &ModelConfig, info: &TensorInfo) -> String {
    linear_of(config, info).map_or_else(|| info.name.clone(), |linear| linear.dense_tensor().0)
}

/// Returns the number of heads, and the rows of each head's keys in the projection from the latent (MLA).
pub(crate) fn heads(config: &ModelConfig) -> (usize, usize) {
    (config.num_attention_heads, config.latent.map_or(0, |latent| latent.unrotated))
}

/// Reads the values of a parameter, `[rows, cols]`.
pub(crate) fn values(source: &ModelFiles, config: &ModelConfig, info: &TensorInfo) -> Result<Vec<f32>> {
    match linear_of(config, info) {
        None => Ok(source.tensor_f32(&info.name, &info.shape)?),
        Some(linear) => {
            let linear = LinearInfo { bias: false, ..linear };
            values_of(&linear, linear_weight(source, &linear)?)
        }
    }
}

/// Inputs of the declaration of tensors.
pub(super) struct Adding<'a> {
    pub(super) source: &'a ModelFiles,
    pub(super) job: &'a WeightJob,
    /// Scheme of linear weights without an exception.
    pub(super) weights: &'a Scheme,
    pub(super) options: &'a Options,
    /// Planned linear layers by module.
    pub(super) planned: HashMap<&'a str, &'a PlannedLinear>,
    /// Number of experts of a layer.
    pub(super) experts: usize,
    /// Number of projections to parallel streams of states, and of those back.
    pub(super) streams: usize,
    /// Types of stacked tensors.
    pub(super) stacks: HashMap<String, GgmlType>,
}

impl Adding<'_> {
    /// Declares a tensor. For experts, declares the stacked tensor at the first one. With `factor` also declares one
    /// f32 per matrix.
    ///
    /// # Errors
    /// Experts of one tensor have different types.
    pub(super) fn declare(
        &mut self,
        tensors: &mut Vec<GgufTensorSpec>,
        place: &Place,
        ty: GgmlType,
        info: &TensorInfo,
        factor: bool,
    ) -> Result<()> {
        let stored = &place.tensor;
        if place.expert.is_some() {
            match self.stacks.get(stored) {
                Some(first_type) if *first_type == ty => return Ok(()),
                Some(first_type) => {
                    let expected =
                        format!("{}, as the experts before it: they are one tensor in GGUF", first_type.name);
                    return Err(fault(self.source, &info.name, ty.name, &expected));
                }
                None => drop(self.stacks.insert(stored.clone(), ty)),
            }
        }
        let (matrices, mut shape) = match place.expert {
            Some(_) => {
                let of_streams = matches!(
                    info.role,
                    Role::Side { kind: SideKind::EnterStream(_) | SideKind::LeaveStream(_), .. }
                );
                let of = if of_streams { self.streams } else { self.experts };
                (of * place.halves(), vec![of])
            }
            None => (1, Vec::new()),
        };
        if factor {
            let name = stored.replace(".weight", ".scale");
            tensors.push(GgufTensorSpec::new(name, GgmlType::F32, [matrices]));
        }
        shape.extend(&info.shape);
        if place.expert.is_some() {
            shape[1] *= place.halves();
        }
        tensors.push(GgufTensorSpec::new(stored.clone(), ty, shape));
        Ok(())
    }
}

impl Adding<'_> {
    /// Returns the scheme under which the method quantizes a parameter as a layer.
    pub(super) fn scheme_of_layer(&self, info: &TensorInfo) -> Option<Scheme> {
        self.planned.get(info.name.trim_end_matches(".weight"))?.scheme.clone()
    }
}

impl Layout {
    /// Declares the parts of a layer that the method quantizes whole: each has some of its rows.
    pub(super) fn declare_rows(&mut self, scheme: &Scheme, info: &TensorInfo, joined: &Joined) {
        let [rows, cols] = *info.shape.as_slice() else { return };
        let ty = block_type(&scheme.format).unwrap_or(GgmlType::F32);
        let parts = joined.names().iter().zip(joined.rows(rows).unwrap_or_default());
        self.tensors.extend(parts.map(|(name, rows)| GgufTensorSpec::new(name, ty, [rows.len(), cols])));
    }

    /// Declares the parts of a tensor: biases in f32, weights under the scheme of the layer or its substitute.
    pub(super) fn add_joined(
        &mut self,
        adding: &Adding<'_>,
        config: &ModelConfig,
        info: TensorInfo,
        joined: Joined,
    ) -> Result<()> {
        let [rows, cols] = *info.shape.as_slice() else { return Ok(()) };
        let shapes = joined.shapes(rows, cols, heads(config)).ok_or_else(|| {
            fault(adding.source, &info.name, format!("shape {:?}", info.shape), "rows of whole heads")
        })?;
        let mut schemes = Vec::new();
        for (name, shape) in joined.names().iter().zip(shapes) {
            let scheme = match &joined {
                Joined::Biases(_) => Scheme::new(Format::plain(Code::F32), Rule::Amax),
                _ => {
                    let wanted = linear_of(config, &info).and_then(|linear| match adding.job {
                        WeightJob::Quantize(recipe) => scheme_of(recipe, config, adding.options, &linear),
                        WeightJob::Convert { .. } => None,
                        WeightJob::Requantize { .. } => Some(adding.weights.clone()),
                    });
                    let dense = adding.source.checkpoint().get(&info.name).is_some();
                    let wanted = match wanted {
                        None if !dense => plain(minifloat::F16),
                        wanted => wanted.map_or_else(|| source_scheme(adding.source, &info.name), Ok)?,
                    };
                    self.fitted(name, wanted, shape.last().copied().unwrap_or(1))
                }
            };
            let ty = block_type(&scheme.format).ok_or_else(|| {
                fault(adding.source, &info.name, scheme.to_string(), "a scheme that GGUF holds")
            })?;
            self.tensors.push(GgufTensorSpec::new(name.clone(), ty, shape));
            schemes.push(scheme);
        }
        self.joined.push(JoinedCast { info, joined, schemes });
        Ok(())
    }

    /// Returns the scheme of a part with rows of `cols` columns.
    fn fitted(&mut self, name: &str, wanted: Scheme, cols: usize) -> Scheme {
        let fits = block_type(&wanted.format).is_some_and(|ty| cols.is_multiple_of(ty.block().0));
        if fits && !gguf::has_factor(&wanted.format) {
            return wanted;
        }
        let instead = fitting(&wanted, cols);
        self.notes.push(format!(
            "{name}: {instead} instead of {wanted}: rows of {cols} do not fit its blocks, or it needs a separate factor"
        ));
        instead
    }
}
