//! Norms in training: RMSNorm (Zhang & Sennrich 2019), also with the weight stored as its distance from 1 (Gemma), and
//! LayerNorm (Ba et al. 2016), forward and backward.

use std::borrow::Cow;
use std::ops::Range;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::config::NormForm;
use mantissa_model::flow::parts;

use crate::arena::Parameters;
use crate::gradients::Gradients;
use crate::operand::Operand;
use crate::rows::{PART, rows, rows_mut};

/// Norm over vectors of one width, with the places of its parameters.
#[derive(Clone, Debug)]
pub(crate) struct NormOp {
    form: NormForm,
    width: usize,
    eps: f32,
    /// Empty if it has none.
    weight: Range<usize>,
    /// Empty if it has none.
    bias: Range<usize>,
}

/// Weight and bias of a norm, `[width]` each.
#[derive(Debug)]
pub(crate) struct NormValues<'a> {
    weight: Cow<'a, [f32]>,
    /// `None` for RMSNorm.
    bias: Option<Cow<'a, [f32]>>,
    eps: f32,
}

impl NormOp {
    /// Makes the norm `module`.
    pub(crate) fn new(form: NormForm, module: &str, width: usize, eps: f32, params: &Parameters) -> Self {
        let place = |part: &str| params.place(&format!("{module}.{part}"));
        let (weight, bias) = (place("weight").unwrap_or_default(), place("bias").unwrap_or_default());
        NormOp { form, width, eps, weight, bias }
    }

    /// Values of a [partial gradient](NormValues::backward) of a norm of `width`.
    pub(crate) fn partial_len(form: NormForm, width: usize) -> usize {
        match form {
            NormForm::Rms | NormForm::RmsPlusOne => width,
            NormForm::Layer | NormForm::LayerWeight | NormForm::LayerPlain => 2 * width,
        }
    }

    /// Values of one of its partial gradients.
    pub(crate) fn partial(&self) -> usize {
        Self::partial_len(self.form, self.width)
    }

    /// Returns weight and bias.
    pub(crate) fn values<'a>(&self, params: &'a Parameters) -> NormValues<'a> {
        let (weight, bias) = match self.form {
            NormForm::Rms => (params.f32(&self.weight), None),
            NormForm::RmsPlusOne => {
                (params.f32(&self.weight).iter().map(|w| 1.0 + w).collect::<Vec<_>>().into(), None)
            }
            NormForm::Layer => (params.f32(&self.weight), Some(params.f32(&self.bias))),
            NormForm::LayerWeight => (params.f32(&self.weight), Some(vec![0.0; self.width].into())),
            NormForm::LayerPlain => (vec![1.0; self.width].into(), Some(vec![0.0; self.width].into())),
        };
        NormValues { weight, bias, eps: self.eps }
    }

    /// Normalizes every vector of `x` into `out`, and rounds the result into `rounded` for the linear layers that read
    /// it.
    pub(crate) fn run(
        &self,
        params: &Parameters,
        x: &[f32],
        out: &mut [f32],
        rounded: &mut Operand,
        threads: usize,
    ) {
        let (d, values) = (self.width, self.values(params));
        let cut = parts(x.len() / d, PART);
        let pieces = cut.clone().zip(rows_mut(out, d, cut.clone())).zip(rounded.parts(d, cut));
        for_each(threads, pieces, |((part, out), rounded)| {
            values.forward(rows(x, d, part), out);
            rounded.round(out);
        });
    }

    /// Adds to `dx`, in rows of `row` values (a multiple of the width), the gradient of its input `x` from the
    /// output's gradient `dy`, and to `grads` the gradients of its parameters. `partials` is scratch.
    pub(crate) fn backward(
        &self,
        params: &Parameters,
        row: usize,
        (x, dy): (&[f32], &[f32]),
        dx: &mut [f32],
        partials: &mut [f32],
        grads: &mut Gradients,
        threads: usize,
    ) {
        let values = self.values(params);
        let cut = parts(dx.len() / row, PART);
        let pieces = cut.clone().zip(rows_mut(dx, row, cut.clone()));
        let pieces = pieces.zip(rows_mut(partials, self.partial(), cut.clone().map(|_| 0..1)));
        for_each(threads, pieces, |((part, dx), partial)| {
            values.backward(rows(x, row, part.clone()), rows(dy, row, part), dx, partial);
        });
        self.add_partials(partials, cut.count(), grads);
    }

    /// Adds `count` partial gradients of the parameters in fixed order.
    pub(crate) fn add_partials(&self, partials: &[f32], count: usize, grads: &mut Gradients) {
        for (range, first) in [(&self.weight, 0), (&self.bias, self.width)] {
            if range.is_empty() {
                continue;
            }
            grads.add(range.clone(), |grad| {
                for partial in partials.chunks_exact(self.partial()).take(count) {
                    kernels().axpy(1.0, &partial[first..first + self.width], grad);
                }
            });
        }
    }

    /// Returns the place of the weight, of which models with norms without parameters have none.
    pub(crate) fn weight(&self) -> &Range<usize> {
        &self.weight
    }
}

impl NormValues<'_> {
    /// Normalizes every vector of `x` into `out`.
    pub(crate) fn forward(&self, x: &[f32], out: &mut [f32]) {
        match &self.bias {
            None => kernels().rms_norm(x, &self.weight, self.eps, out),
            Some(bias) => kernels().layer_norm(x, &self.weight, bias, self.eps, out),
        }
    }

    /// Adds to `dx` the gradient of `x` from the output's gradient `dy`, and writes the gradients of the parameters to
    /// `partial`: weight, then bias.
    pub(crate) fn backward(&self, x: &[f32], dy: &[f32], dx: &mut [f32], partial: &mut [f32]) {
        partial.fill(0.0);
        if self.bias.is_none() {
            return kernels().rms_norm_backward(x, &self.weight, self.eps, dy, dx, partial);
        }
        let (dweight, dbias) = partial.split_at_mut(self.weight.len());
        kernels().layer_norm_backward(x, &self.weight, self.eps, dy, dx, dweight, dbias);
    }
}
