//! Streaming of blocks: each thread writes its blocks panel by panel. A tensor's blocks are never in memory together,
//! and are written from the core's cache.

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
use crate::gguf::fault;
use crate::layers::Layers;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::report::LayerReport;
use crate::rtn;
use crate::source::{DenseError, WeightReader};

impl Plan {
    /// Returns the codec of a layer whose blocks can be streamed: it has a tensor of its own, and its rows keep their
    /// order.
    pub(crate) fn streamed(&self, info: &LinearInfo, scheme: &Scheme) -> Option<&'static Codec> {
        let layout = self.gguf.as_ref()?;
        let name = format!("{}.weight", info.module);
        let own = info.stored == StoredAs::Rows
            && layout.order.of(&name).is_none()
            && layout.order.columns(&name).is_none()
            && layout.architecture.joined(&name, layout.order).is_none()
            && layout.architecture.place(&name).is_some_and(|place| place.expert.is_none());
        // Workers exchange whole layers.
        let rounded =
            self.job.recipe().is_some_and(Recipe::rounds_to_nearest) && !self.options.team.is_shared();
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
        let sink = sink_to(&mut self.writer, &stored);
        layers.stream(info, (scheme, codec), &sink)
    }

    /// Streams the blocks of a matrix that is not a layer.
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
        let sink = sink_to(&mut self.writer, &stored);
        Ok(rtn::stream_blocks(codec, values, (linear.rows, linear.cols), None, threads, &sink))
    }

    /// Returns the name of the tensor that stores a matrix.
    fn stored(&self, linear: &LinearPlan<'_>) -> Result<String> {
        let specs = gguf::specs(linear)
            .map_err(|e| fault(self.source, linear.module, e.to_string(), "a scheme that GGUF holds"))?;
        Ok(specs.into_iter().next().map(|spec| spec.name).unwrap_or_default())
    }
}

/// Returns a sink that writes to the tensor `stored`, one thread at a time.
fn sink_to<'a>(
    writer: &'a mut GgufSplitWriter,
    stored: &'a str,
) -> impl Fn(u64, &[u8]) -> std::result::Result<(), DenseError> + Sync + 'a {
    let writer = Mutex::new(writer);
    move |at, bytes| {
        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_range(stored, at, bytes).map_err(DenseError::Store)
    }
}
