//! Mixtures of experts: the model, or DeepSeek-V3 in place of one that is not a mixture.

use std::borrow::Cow;

use super::super::measures::router_changes;
use super::super::value::{Compute, Fault, Subject, Value};
use crate::shape::{Matrices, ModelPart, ModelShape};

/// Mixture that answers take as an example.
const EXAMPLE: &str = "DeepSeek-V3";

/// Values about experts.
pub(super) const VALUES: &[(&str, Compute)] = &[
    ("moe_model", |s, _| Ok(Value::text(mixture(s)?.shape.name.clone()))),
    ("moe_hidden", |s, _| number(mixture(s)?.shape.hidden as f64)),
    ("moe_layers", |s, _| number(mixture(s)?.layers())),
    ("moe_experts", |s, _| number(mixture(s)?.shape.experts as f64)),
    ("moe_called", |s, _| number(mixture(s)?.called())),
    // Expected number of other devices, of so many that divide the experts, which a token is sent to.
    ("moe_reached", |s, a| {
        let devices = a.count(0)? as f64;
        number((devices - 1.0) * (1.0 - (1.0 - 1.0 / devices).powf(mixture(s)?.called())))
    }),
    // Expected number of experts of a layer that so many tokens call.
    ("moe_read", |s, a| {
        let mixture = mixture(s)?;
        number(mixture.shape.experts as f64 * mixture.routed.read_by(a.number(0)?))
    }),
    // Share of made-up tokens whose experts change where the router is rounded by a scheme.
    ("router_changes", |s, a| {
        let mixture = mixture(s)?;
        let (experts, called) = (mixture.shape.experts as usize, mixture.called() as usize);
        Ok(Value::number(router_changes(a.text(0)?, experts, called)))
    }),
];

fn number(number: f64) -> Result<Value, Fault> {
    Ok(Value::Number(number))
}

/// Mixture with its routed experts.
struct Mixture<'a> {
    shape: Cow<'a, ModelShape>,
    routed: Matrices,
}

/// Returns the model, or the example.
fn mixture<'a>(subject: &Subject<'a>) -> Result<Mixture<'a>, Fault> {
    let unknown = || Fault::Unknown(EXAMPLE.to_owned());
    let own = subject.deployment.shape;
    let shape = match own.experts {
        0 => Cow::Owned(ModelShape::named(EXAMPLE).map_err(|_| unknown())?),
        _ => Cow::Borrowed(own),
    };
    let routed = shape.matrices.iter().find(|m| m.part == ModelPart::Experts).cloned().ok_or_else(unknown)?;
    Ok(Mixture { shape, routed })
}

impl Mixture<'_> {
    /// Experts of a token in a layer.
    fn called(&self) -> f64 {
        (self.shape.experts as f64 * self.routed.active as f64 / self.routed.count.max(1) as f64).round()
    }

    /// Layers with experts.
    fn layers(&self) -> f64 {
        let down = |m: &&Matrices| m.part == ModelPart::Experts && m.rows as u64 == self.shape.hidden;
        let count = self.shape.matrices.iter().find(down).map_or(0, |m| m.count);
        (count / self.shape.experts.max(1)) as f64
    }
}
