//! Operations with weights of a layer: linear layers, small projections and norms.

use super::elementwise;
use crate::error::ForwardError;
use crate::operators::{Activations, MatmulJob, Operators, Sequences};
use crate::program::{Buffer, Op, Output, Scope, View, memory};
use mantissa_arch::kinds::LinearInput;

/// Runs an operation that needs nothing of the layer but its weights.
///
/// # Errors
/// [`ForwardError::Input`].
pub(crate) fn run(
    op: &Op,
    operators: &mut dyn Operators,
    (seqs, scope): (&Sequences<'_>, &Scope),
    threads: usize,
    a: &mut Activations<'_>,
) -> Result<(), ForwardError> {
    match op {
        Op::Matmuls { input, x, outputs } => return matmuls(operators, *input, (*x, outputs), scope, a),
        Op::Norm { norm, x, out } => {
            let [x, out] = memory(a).views(scope, [*x, *out]);
            operators.norm(*norm, x, out);
        }
        Op::NormColumns { norm, x, out } => {
            let (stride, width) = (x.width, out.width);
            let [x, out] = memory(a).views(scope, [*x, *out]);
            for (x, out) in x.chunks_exact(stride).zip(out.chunks_exact_mut(width)) {
                operators.norm(*norm, &x[..width], out);
            }
        }
        Op::Side { side, x, out } => {
            let [x, out] = memory(a).views(scope, [*x, *out]);
            operators.side(*side, x, out);
        }
        op => elementwise::run(op, &*operators, (seqs, scope), threads, a),
    }
    Ok(())
}

fn matmuls(
    operators: &mut dyn Operators,
    input: LinearInput,
    (x, outputs): (View, &[Output]),
    scope: &Scope,
    a: &mut Activations<'_>,
) -> Result<(), ForwardError> {
    // Views beyond the outputs are empty.
    let mut views = [View::new(Buffer::Residual, 0); Op::MOST_OUTPUTS + 1];
    views[0] = x;
    views[1..].iter_mut().zip(outputs).for_each(|(view, output)| *view = output.out);
    let [x, outs @ ..] = memory(a).views(scope, views);
    let Some(last) = outputs.last() else { return Ok(()) };
    let mut all = outputs.iter();
    let mut jobs = outs.map(|out| {
        let Output { linear, add, .. } = *all.next().unwrap_or(last);
        MatmulJob { kind: linear, out, accumulate: add }
    });
    operators.linears(input, x, scope.tokens, &mut jobs[..outputs.len()])
}
