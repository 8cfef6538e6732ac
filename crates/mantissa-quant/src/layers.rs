//! The layers of a plan, quantized one after another by its method.

use mantissa_model::{FusedGroup, LinearInfo};
use mantissa_num::codec::Codec;
use mantissa_num::format::Affine;
use mantissa_num::{Code, Format, Quantized, Scheme, TensorError};
use mantissa_store::Error;
use mantissa_store::convention::{Container, LinearPlan, ModelFiles};

use crate::calibrate::{CalibrateError, Tick};
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::exl2;
use crate::importance::Importance;
use crate::input_scales::{self, InputScales};
use crate::plan::Plan;
use crate::recipe::Method;
use crate::report::LayerReport;
use crate::rtn;
use crate::sequential::{Sequential, ToLearn};
use crate::source::{self, DenseError, DenseTensor, Source as _};

/// The tensors that a layer becomes, by name, and its error.
pub(crate) type QuantizedLayer = (Vec<(String, Vec<u8>)>, LayerReport);

/// A layer's weight as a method leaves it.
pub(crate) struct Solved {
    pub(crate) quantized: Quantized,
    /// Group of each column, where groups are not of neighbours.
    pub(crate) g_idx: Option<Vec<u32>>,
    /// The scale of the layer's inputs that is stored, of a model as it was read.
    pub(crate) input_scale: Option<f32>,
    pub(crate) stats: ErrorStats,
    /// Why another method than the recipe's was taken.
    pub(crate) fallback: Option<String>,
    /// `tr((W - Q) H (W - Q)ᵀ)` on the calibration, where the method has an H.
    pub(crate) output_error: Option<f64>,
    pub(crate) notes: Vec<String>,
}

impl Solved {
    /// Rounded to nearest.
    pub(crate) fn rounded((quantized, stats): (Quantized, ErrorStats)) -> Self {
        Solved {
            quantized,
            g_idx: None,
            input_scale: None,
            stats,
            fallback: None,
            output_error: None,
            notes: Vec::new(),
        }
    }
}

/// The layers of a plan.
pub(crate) struct Layers<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    /// The tensor-wide scale of the last group. Fused partners follow each other, so that one is enough.
    shared: Option<((usize, FusedGroup), Option<f32>)>,
    /// Of a method that calibrates.
    sequential: Option<Sequential<'a>>,
    /// What searched blocks are weighed by.
    importance: Option<&'a Importance>,
    /// The scales of inputs that are stored, once they are found.
    input_scales: Option<InputScales>,
}

impl<'a> Layers<'a> {
    /// `stored` reads back what a run that is resumed has taken over.
    pub(crate) fn new(
        plan: &'a Plan,
        source: &'a ModelFiles,
        stored: Box<dyn Fn() -> Result<ModelFiles> + 'a>,
    ) -> Self {
        let sequential = match plan.recipe.method {
            Method::Rtn | Method::Repacked => None,
            Method::Gptq | Method::AutoRound => Some(Sequential::new(plan, source, stored)),
        };
        Layers { plan, source, shared: None, sequential, importance: None, input_scales: None }
    }

    /// With what searched blocks are to be weighed by.
    pub(crate) fn weighed(self, importance: Option<&'a Importance>) -> Self {
        Layers { importance, ..self }
    }

    /// Reads a layer and quantizes it into the tensors of the plan's container. Layers come in the order of the plan. Long
    /// work asks `tick` whether to go on.
    pub(crate) fn quantize(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        tick: &mut Tick<'_>,
    ) -> Result<QuantizedLayer> {
        let solved = match &self.plan.conversion {
            Some(conversion) => {
                let outer = if conversion.requantized() { self.outer(info, scheme)? } else { None };
                conversion.layer(self.plan, self.source, info, scheme, outer)?
            }
            None => self.solve(info, scheme, tick)?,
        };
        let input_scale = match solved.input_scale {
            None => self.input_scale(info, tick)?,
            scale => scale,
        };
        let plan = LinearPlan { input_scale, ..self.plan.linear_plan(info, scheme) };
        let tensors = match &solved.g_idx {
            Some(g_idx) => self.plan.container.tensors_by_group(&plan, &solved.quantized, g_idx),
            None => self.plan.container.tensors(&plan, &solved.quantized),
        };
        let tensors = tensors.map_err(|e| {
            Error::field(
                self.source.dir(),
                &info.module,
                e.to_string(),
                "a scheme that the container holds",
                "",
            )
        })?;
        let method = if solved.fallback.is_some() { Method::Rtn } else { self.plan.recipe.method };
        Ok((tensors, LayerReport::new(self.plan, info, scheme, method, solved)))
    }

    /// The scale of a layer's inputs that is stored, where the plan has such. The first layer to ask has all of them found.
    fn input_scale(&mut self, info: &LinearInfo, tick: &mut Tick<'_>) -> Result<Option<f32>> {
        let (Some(scheme), Some(set)) = (self.plan.input_scheme(), self.plan.input_text()) else {
            return Ok(None);
        };
        let scales = match self.input_scales.take() {
            Some(scales) => scales,
            None => {
                let threads = self.plan.threads();
                input_scales::collect(self.source, &self.plan.config, scheme, set, threads, tick)?
            }
        };
        let scale = scales.get(&info.module).copied();
        self.input_scales = Some(scales);
        Ok(scale)
    }

    /// The recipe's method on a layer of the source.
    fn solve(&mut self, info: &LinearInfo, scheme: &Scheme, tick: &mut Tick<'_>) -> Result<Solved> {
        if self.plan.recipe.method == Method::AutoRound {
            return self.learned(info, tick);
        }
        let outer = self.outer(info, scheme)?;
        let w = DenseTensor::of_linear(self.source, info)?;
        match &mut self.sequential {
            Some(sequential) => sequential.quantize(info, scheme, &w, outer, tick),
            None if self.plan.container == Container::Exl2 => self.squares(info, scheme, &w),
            None => match (scheme.format.codec(), self.importance) {
                (Some(codec), Some(importance)) if codec.takes_importance() => {
                    self.search(info, codec, &w, importance)
                }
                _ => round_to_nearest(self.plan, self.source, info, scheme, &w, outer),
            },
        }
    }

    /// What AutoRound made of a layer; its linear layers are learned together when the first of them is asked for.
    fn learned(&mut self, info: &LinearInfo, tick: &mut Tick<'_>) -> Result<Solved> {
        if let Some(solved) = self.sequential.as_mut().and_then(|s| s.take_learned(&info.module)) {
            return Ok(solved);
        }
        let plan = self.plan;
        let of_layer: Vec<_> = plan.quantized().filter(|(other, _)| other.layer == info.layer).collect();
        let mut linears = Vec::with_capacity(of_layer.len());
        for (info, scheme) in of_layer {
            linears.push(ToLearn { info, scheme, outer: self.outer(info, scheme)? });
        }
        let Some(sequential) = &mut self.sequential else { return Err(CalibrateError::Empty.into()) };
        sequential.learn(info.layer, &linears, tick)?;
        sequential.take_learned(&info.module).ok_or_else(|| CalibrateError::Empty.into())
    }

    /// Rounded to nearest under scales that are squares times one f16 for all rows of a group.
    fn squares(&self, info: &LinearInfo, scheme: &Scheme, w: &DenseTensor<'_>) -> Result<Solved> {
        let mut scratch = Vec::new();
        let w = w.elements(0..info.rows * info.cols, &mut scratch);
        let w = w.map_err(|error| dense_error(self.source, info, error))?;
        let quantized = exl2::quantize(scheme, w, info.rows, info.cols).ok_or_else(|| {
            let found = "values that are no numbers, or beyond what f16 scales reach";
            Error::field(self.source.dir(), &info.module, found, "weights whose scales are f16", "")
        })?;
        let stats = ErrorStats::of(w, &quantized);
        Ok(Solved::rounded((quantized, stats)))
    }

    /// Blocks that lose least under the importance of their columns.
    fn search(
        &self,
        info: &LinearInfo,
        codec: &'static Codec,
        w: &DenseTensor<'_>,
        importance: &Importance,
    ) -> Result<Solved> {
        let weights = importance.of(info)?;
        let threads = self.plan.options.threads;
        let found = rtn::quantize_blocks(codec, w, info.rows, info.cols, weights.as_deref(), threads);
        let mut solved = found.map(Solved::rounded).map_err(|error| dense_error(self.source, info, error))?;
        if weights.is_none() {
            solved.notes.push(format!("no importance in {}", importance.name));
        }
        Ok(solved)
    }

    /// Says that a layer is taken over from an unfinished run as it is stored.
    ///
    /// # Errors
    /// As its reader.
    pub(crate) fn recovered(&mut self, info: &LinearInfo) -> Result<()> {
        self.sequential.as_mut().map_or(Ok(()), |sequential| sequential.recovered(info))
    }

    /// The tensor-wide scale that a layer shares with its fused partners, where it has one.
    fn outer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<Option<f32>> {
        let Some(group) = info.kind.fused().filter(|_| scheme.has_outer_scale()) else { return Ok(None) };
        if let Some((key, outer)) = self.shared
            && key == (info.layer, group)
        {
            return Ok(outer);
        }
        let outer = self.shared_outer(info.layer, group, scheme)?;
        self.shared = Some(((info.layer, group), outer));
        Ok(outer)
    }

    /// The tensor-wide scale of fused partners. vLLM runs q, k and v (gate and up) as one matrix with one global scale.
    fn shared_outer(&self, layer: usize, group: FusedGroup, scheme: &Scheme) -> Result<Option<f32>> {
        let mut amaxes = Vec::new();
        for (info, partner) in self.plan.quantized() {
            if info.layer == layer && info.kind.fused() == Some(group) && partner.format == scheme.format {
                if let Some(conversion) = &self.plan.conversion {
                    amaxes.push(conversion.amax(self.source, info)?);
                    continue;
                }
                let (len, threads) = (info.rows * info.cols, self.plan.options.threads);
                let amax = source::amax(&DenseTensor::of_linear(self.source, info)?, len, threads);
                amaxes.push(amax.map_err(|error| dense_error(self.source, info, error))?);
            }
        }
        Ok(rtn::shared_outer_scale(scheme, amaxes))
    }
}

/// Rounds a weight to nearest.
pub(crate) fn round_to_nearest(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
    outer: Option<f32>,
) -> Result<Solved> {
    let quantized = rtn::quantize_source(scheme, w, info.rows, info.cols, outer, plan.options.threads);
    let solved = quantized.map(Solved::rounded).map_err(|error| dense_error(source, info, error))?;
    if !solved.stats.is_finite() {
        refuse_overflow(plan, source, info, scheme, w)?;
    }
    Ok(solved)
}

/// A plain cast turns what its element does not reach into infinity, which is an error where the source is finite.
fn refuse_overflow(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
) -> Result<()> {
    let amax = source::amax(w, info.rows * info.cols, plan.options.threads);
    let amax = amax.map_err(|error| dense_error(source, info, error))?;
    match &scheme.format {
        Format::Affine(Affine { code: Code::Float(float), scale: None, .. }) if amax.is_finite() => {
            let error = TensorError::ValueOverflow { amax, allowed: float.max(), element: float.name };
            Err(dense_error(source, info, error.into()))
        }
        _ => Ok(()),
    }
}

/// An error of a layer's weight, with its name.
pub(crate) fn dense_error(files: &ModelFiles, info: &LinearInfo, error: DenseError) -> QuantError {
    match error {
        // A panel knows of its own elements; the message is about the whole tensor.
        DenseError::Store(error @ Error::NonFinite { .. }) => {
            let whole = source::require_finite(files, &info.dense_tensor().0);
            whole.err().unwrap_or(error).into()
        }
        DenseError::Store(error) => error.into(),
        DenseError::Tensor(error) => {
            let (path, tensor) = (files.dir().to_owned(), format!("{}.weight", info.module));
            QuantError::Tensor { path, tensor, error }
        }
    }
}
