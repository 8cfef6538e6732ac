//! Model, device and load that an answer is about.

use crate::hardware::Device;
use crate::precision::{Kv, Precision};
use crate::recommend::Load;
use crate::roofline::Setup;
use crate::shape::ModelShape;

/// Model, device and load that an answer is about.
#[derive(Clone, Copy, Debug)]
pub struct Deployment<'a> {
    /// Model.
    pub shape: &'a ModelShape,
    /// Device.
    pub device: &'a Device,
    /// Load.
    pub load: &'a Load,
}

impl<'a> Deployment<'a> {
    /// Returns the model in a precision with a KV scheme on the device.
    pub(crate) fn setup(&self, precision: &'a Precision, kv: &'a Kv) -> Setup<'a> {
        let (split, reduce_bits) = (self.load.split(), self.load.reduce_bits);
        Setup { shape: self.shape, precision, kv, device: self.device, split, reduce_bits }
    }
}
