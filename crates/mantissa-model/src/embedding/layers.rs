//! Embeddings that each layer reads besides the states.

use std::sync::Arc;

use mantissa_kernels::{for_each, kernels};

use crate::config::ModelConfig;
use crate::error::LoadError;
use crate::linear::Linear;
use crate::norm::Norm;
use crate::source::WeightSource;

/// Rows that a thread takes at a time.
const ROWS: usize = 16;

/// Embeddings of all layers: `(norm(W e / sqrt(hidden)) + sqrt(width) · table[token]) / sqrt(2)`, where `e` is the
/// token's scaled embedding. A row does not depend on the others.
#[derive(Clone, Debug)]
pub struct LayerEmbeddings {
    /// Table and projection; `None` if layers read the tokens themselves, whose experts they choose.
    own: Option<OwnEmbeddings>,
    vocabulary: usize,
}

/// Embeddings of all layers.
#[derive(Clone, Debug)]
struct OwnEmbeddings {
    /// `[vocabulary, layers · width]`.
    table: Linear,
    /// `[layers · width, hidden]`.
    projection: Vec<f32>,
    norm: Norm,
    width: usize,
    hidden: usize,
}

impl LayerEmbeddings {
    /// Loads the embeddings of all layers, if the model has them.
    ///
    /// # Errors
    /// As [`WeightSource`].
    pub(super) fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
    ) -> Result<Option<Arc<Self>>, LoadError> {
        let Some(inputs) = config.by_layer.inputs else {
            let tokens = LayerEmbeddings { own: None, vocabulary: config.vocab_size };
            return Ok((config.own_input_width() > 0).then(|| Arc::new(tokens)));
        };
        let (width, hidden) = (inputs.width, config.hidden_size);
        let all = config.num_hidden_layers * width;
        let [table, projection, norm] = config.layer_input_names();
        let module = table.strip_suffix(".weight").unwrap_or(&table);
        let table = Linear::new(module, source.linear(module, inputs.vocabulary, all, false)?)?.folded();
        let projection = source.tensor_f32(&projection, &[all, hidden])?;
        let module = norm.strip_suffix(".weight").unwrap_or(&norm);
        let norm = Norm::load(source, config, module, width)?;
        let vocabulary = table.rows();
        let own = Some(OwnEmbeddings { table, projection, norm, width, hidden });
        Ok(Some(Arc::new(LayerEmbeddings { own, vocabulary })))
    }

    /// Rows of the table.
    pub(super) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Writes the embeddings of `layer` for `tokens`, whose scaled embeddings are `first` `[tokens, hidden]`, or the tokens
    /// themselves, into `out` `[tokens, width]`, on up to `threads` threads.
    ///
    /// # Panics
    /// If a token is not in the table or a slice is shorter.
    pub fn fill(&self, layer: usize, tokens: &[u32], first: &[f32], out: &mut [f32], threads: usize) {
        let Some(own) = &self.own else {
            return tokens.iter().zip(out).for_each(|(token, out)| *out = *token as f32);
        };
        let (width, hidden) = (own.width, own.hidden);
        let projection = &own.projection[layer * width * hidden..(layer + 1) * width * hidden];
        let (of_first, of_table) = ((hidden as f32).sqrt().recip(), (width as f32).sqrt());
        let out = &mut out[..tokens.len() * width];
        let pieces = tokens.chunks(ROWS).zip(first.chunks(ROWS * hidden)).zip(out.chunks_mut(ROWS * width));
        for_each(threads, pieces, |((tokens, first), out)| {
            let (mut row, mut projected) = (vec![0.0; own.table.cols()], vec![0.0; width]);
            for ((token, x), out) in
                tokens.iter().zip(first.chunks_exact(hidden)).zip(out.chunks_exact_mut(width))
            {
                kernels().gemv(projection, hidden, x, &mut projected, false);
                projected.iter_mut().for_each(|x| *x *= of_first);
                own.norm.forward(&projected, out);
                own.table.row(*token as usize, &mut row);
                let of_token = &row[layer * width..(layer + 1) * width];
                out.iter_mut()
                    .zip(of_token)
                    .for_each(|(x, own)| *x = (*x + own * of_table) * std::f32::consts::FRAC_1_SQRT_2);
            }
        });
    }
}
