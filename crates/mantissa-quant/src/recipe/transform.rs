//! What is done to a dense model before its weights are quantized.

use crate::rotate::RotateOptions;
use crate::smooth::SmoothOptions;
use crate::spin::SpinOptions;

/// A change of the dense model that leaves what it computes as it is, and makes it easier to quantize.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Transform {
    /// SmoothQuant: large channels of activations become smaller, their columns of weights larger.
    Smooth(SmoothOptions),
    /// AWQ: weights of large channels become larger, and groups are clipped.
    Awq,
    /// QuaRot: Hadamard rotations spread outliers.
    Rotate(RotateOptions),
    /// SpinQuant: the same rotations, learned.
    Spin(SpinOptions),
}

/// Transforms by name, with their defaults.
pub const TRANSFORMS: [(&str, Transform); 4] = [
    ("smooth", Transform::Smooth(SmoothOptions { alpha: Some(crate::smooth::ALPHA) })),
    ("awq", Transform::Awq),
    ("rotate", Transform::Rotate(RotateOptions { residual: true, values: true, online: true, seed: 0 })),
    ("spin", Transform::Spin(SpinOptions::DEFAULT)),
];

impl Transform {
    /// Name in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Transform::Smooth(_) => "smooth",
            Transform::Awq => "awq",
            Transform::Rotate(_) => "rotate",
            Transform::Spin(_) => "spin",
        }
    }

    /// What is rotated, where something is.
    pub const fn rotation(self) -> Option<RotateOptions> {
        match self {
            Transform::Rotate(options) | Transform::Spin(SpinOptions { rotate: options, .. }) => {
                Some(options)
            }
            Transform::Smooth(_) | Transform::Awq => None,
        }
    }

    /// Whether it needs text to calibrate on.
    pub const fn needs_calibration(self) -> bool {
        !matches!(self, Transform::Rotate(_))
    }
}
