//! Checks a model by its headers alone: every tensor that a reader needs exists in the right shape. Reads no weight.

use super::files::ModelFiles;
use super::stacked::Stack;
use crate::{Result, TensorMeta};

impl ModelFiles {
    /// Checks that [`tensor_f32`](Self::tensor_f32) will find a tensor of this name and shape.
    ///
    /// # Errors
    /// [`NoTensor`](crate::Error::NoTensor), [`NotFloat`](crate::Error::NotFloat), or [`Field`](crate::Error::Field)
    /// for another shape.
    pub fn check_tensor(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.opened().check_tensor(self, name, shape)
    }

    /// Checks that [`linear`](Self::linear) will find the tensors of a linear layer: a dense weight of this shape, or
    /// codes with the tensors that decode them.
    ///
    /// # Errors
    /// As [`check_tensor`](Self::check_tensor).
    pub fn check_linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<()> {
        if bias {
            self.check_tensor(&format!("{module}.bias"), &[rows])?;
        }
        let weight = format!("{module}.weight");
        if self.opened().types_every_tensor() {
            return self.check_tensor(&weight, &[rows, cols]);
        }
        match self.checkpoint().get(&weight) {
            Some(meta) if self.is_dense(&weight) => self.expect_shape(meta, &[rows, cols]),
            Some(meta) => self.check_one_code_each(meta, module, rows, cols),
            None => self.opened().check_codes(self, module, rows, cols),
        }
    }

    /// Checks that [`expert`](Self::expert) will find the tensors of stacked experts.
    ///
    /// # Errors
    /// As [`check_tensor`](Self::check_tensor).
    pub fn check_expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<()> {
        if let Some(names) = self.opened().expert_tensors(&stack.tensor).filter(|_| !self.has(&stack.tensor))
        {
            return names.iter().try_for_each(|name| self.meta(name).map(|_| ()));
        }
        let meta = self.meta(&stack.tensor)?;
        self.expect_shape(meta, &stack.shape(rows, cols))?;
        self.expect_float(meta)
    }

    /// Checks codes in a tensor `weight`.
    fn check_one_code_each(&self, meta: &TensorMeta, module: &str, rows: usize, cols: usize) -> Result<()> {
        if let Some(found) = self.coded_shape(module).filter(|found| *found != (rows, cols)) {
            let hint = "config.json and the weights must belong together";
            return Err(self.fault(
                &meta.name,
                format!("codes of {found:?}"),
                format!("[{rows}, {cols}]"),
                hint,
            ));
        }
        let scales = self.opened().weight_scales();
        if scales.iter().any(|scale| self.has(&format!("{module}.{scale}"))) {
            return Ok(());
        }
        let found = format!("dtype {} without scales", meta.dtype);
        let beside = scales.join(" or ");
        let allowed = if scales.is_empty() { "floats".to_owned() } else { format!("floats, or {beside}") };
        Err(self.fault(&meta.name, found, allowed, ""))
    }
}
