//! Layers that another output of the same run has solved.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_methods::Solved;
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;

use crate::convert;
use crate::error::Result;
use crate::plan::Plan;
use crate::report::LayerReport;
use crate::transform::Prepared;

/// Filled output whose layers have the codes and scales of another one.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    files: ModelFiles,
    reports: BTreeMap<&'a str, &'a LayerReport>,
    /// Result of the transform.
    pub(crate) prepared: &'a Prepared,
}

impl<'a> Shared<'a> {
    /// Opens the filled output at `path`, with the reports of its layers.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(crate) fn open(path: &Path, layers: &'a [LayerReport], prepared: &'a Prepared) -> Result<Self> {
        let reports = layers.iter().map(|report| (report.module.as_str(), report)).collect();
        Ok(Shared { files: ModelFiles::open(path)?, reports, prepared })
    }

    /// Reads codes and scales of a layer for `plan`; returns them with the report of the layer.
    pub(crate) fn layer(
        &self,
        plan: &Plan,
        info: &LinearInfo,
        scheme: &Scheme,
    ) -> Result<(Solved, LayerReport)> {
        let solved = convert::recoded(plan, &self.files, info, scheme, false)?;
        let missing = || mantissa_store::Error::NoTensor {
            path: self.files.dir().to_owned(),
            tensor: info.module.clone(),
        };
        let report = self.reports.get(info.module.as_str()).ok_or_else(missing)?;
        let stored = plan.stored_bits(info, scheme) as f64 / (info.rows * info.cols).max(1) as f64;
        Ok((solved, LayerReport { stored_bits_per_weight: Some(stored), ..(*report).clone() }))
    }
}
