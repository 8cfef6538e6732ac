//! Blocks written by the threads that make them, a panel at a time: neither a tensor's blocks stand in memory together, nor do
//! they leave the cache of a core before they are written.

use std::sync::{Mutex, PoisonError};

use mantissa_model::{LinearInfo, StoredAs};
use mantissa_num::Scheme;
use mantissa_num::codec::Codec;
use mantissa_store::convention::LinearPlan;
use mantissa_store::convention::gguf;
use mantissa_store::gguf::GgufSplitWriter;

use super::Run;
use crate::error::Result;
use crate::error_stats::ErrorStats;
use crate::gguf::layout::fault;
use crate::layers::Layers;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::report::LayerReport;
use crate::rtn;
use crate::source::{DenseError, WeightReader};

impl Plan {
    /// The blocks of a layer of a GGUF file that can be found and written panel by panel: it is a tensor by itself, and its
    /// rows stay in their order.
    pub(crate) fn streamed(&self, info: &LinearInfo, scheme: &Scheme) -> Option<&'static Codec> {
        let layout = self.gguf.as_ref()?;
        let name = format!("{}.weight", info.module);
        let own = info.stored == StoredAs::Rows
            && layout.order.of(&name).is_none()
            && layout.architecture.place(&name).is_some_and(|place| place.expert.is_none());
        let rounded = self.job.recipe().is_some_and(Recipe::rounds_to_nearest);
        let codec = scheme.format.codec().filter(|_| own && rounded)?;
        self.blocks_of_ternary(scheme).is_none().then_some(codec)
    }
}

impl Run<'_, '_> {
    /// Quantizes and writes a layer that is [streamed](Plan::streamed).
    pub(super) fn stream_layer(
        &mut self,
        layers: &mut Layers<'_>,
        info: &LinearInfo,
        (scheme, codec): (&Scheme, &'static Codec),
    ) -> Result<LayerReport> {
        let stored = self.stored(&self.plan.linear_plan(info, scheme))?;
        let sink = into(&mut self.writer, &stored);
        layers.stream(info, (scheme, codec), &sink)
    }

    /// Writes the blocks of a matrix that is no layer.
    pub(super) fn stream_matrix<S>(
        &mut self,
        linear: &LinearPlan<'_>,
        codec: &'static Codec,
        values: &S,
    ) -> Result<std::result::Result<ErrorStats, DenseError>>
    where
        S: WeightReader<Error = DenseError> + ?Sized,
    {
        let (stored, threads) = (self.stored(linear)?, self.plan.threads());
        let sink = into(&mut self.writer, &stored);
        Ok(rtn::stream_blocks(codec, values, (linear.rows, linear.cols), None, threads, &sink))
    }

    /// The name of the tensor that a matrix becomes.
    fn stored(&self, linear: &LinearPlan<'_>) -> Result<String> {
        let specs = gguf::specs(linear)
            .map_err(|e| fault(self.source, linear.module, e.to_string(), "a scheme that GGUF holds"))?;
        Ok(specs.into_iter().next().map(|spec| spec.name).unwrap_or_default())
    }
}

/// Writes to the tensor `stored`, one thread at a time.
fn into<'a>(
    writer: &'a mut GgufSplitWriter,
    stored: &'a str,
) -> impl Fn(u64, &[u8]) -> std::result::Result<(), DenseError> + Sync + 'a {
    let writer = Mutex::new(writer);
    move |at, bytes| {
        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_range(stored, at, bytes).map_err(DenseError::Store)
    }
}
