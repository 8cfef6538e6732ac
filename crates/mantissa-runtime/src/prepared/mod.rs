//! Linear layers as they run: weights repacked once for the kernels.

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_model::{ForwardError, Linear};

/// A linear layer `y = x Wᵀ + b`, prepared for running.
#[derive(Debug)]
pub struct PreparedLinear {
    linear: Linear,
}

impl PreparedLinear {
    /// Prepares `linear`, whose storage is dropped.
    pub fn new(linear: Linear) -> Self {
        PreparedLinear { linear: if linear.input().is_none() { linear.folded() } else { linear } }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.linear.rows()
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.linear.cols()
    }

    /// Module name.
    pub fn module(&self) -> &str {
        self.linear.module()
    }
}

/// One linear layer of a call to [`forward`].
#[derive(Debug)]
pub struct Job<'a> {
    /// The linear layer.
    pub linear: &'a PreparedLinear,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to `out`, false to overwrite it.
    pub accumulate: bool,
}

/// Scratch of [`forward`]; grows at the first use of a shape.
#[derive(Debug, Default)]
pub struct Scratch {
    weight: Vec<f32>,
    input: Vec<f32>,
}

/// Runs linear layers on the same input `x` `[tokens, cols]`: transforms, activation quantization, product and bias,
/// on up to `threads` threads.
///
/// # Errors
/// [`ForwardError::Input`] if the input cannot be quantized.
pub fn forward(
    jobs: &mut [Job<'_>],
    x: &[f32],
    tokens: usize,
    scratch: &mut Scratch,
    _threads: usize,
) -> Result<(), ForwardError> {
    for job in jobs {
        let (linear, rows, cols) = (&job.linear.linear, job.linear.rows(), job.linear.cols());
        grow(&mut scratch.weight, rows * cols);
        grow(&mut scratch.input, tokens * cols);
        let (weight, input) = (&mut scratch.weight[..rows * cols], &mut scratch.input[..tokens * cols]);
        input.copy_from_slice(&x[..tokens * cols]);
        if linear.input().is_some() {
            linear.apart(input, weight)?;
        } else {
            weight.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| linear.row(row, out));
        }
        // Row by row, so that a row does not depend on its neighbours.
        for (input, out) in input.chunks_exact(cols).zip(job.out.chunks_exact_mut(rows)) {
            let (a, b) = (MatRef::new(input, 1, cols), MatRef::new(weight, rows, cols));
            kernels().gemm_nt(a, b, MatMut::new(&mut *out, 1, rows), job.accumulate);
            if let Some(bias) = linear.bias() {
                kernels().axpy(1.0, bias, out);
            }
        }
    }
    Ok(())
}

/// Lengthens `buffer` to at least `len`.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
