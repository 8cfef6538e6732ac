//! Runs a model one layer at a time on a few windows of text.

use std::ops::Deref;

use mantissa_eval::Sequence;
use mantissa_model::{
    Buffers, Carried, Embedding, Layer, Linear, LinearKind, LoadError, ModelConfig, Norm, Observer,
    WeightSource, load_embedding, require_head,
};
use mantissa_store::convention::{LinearWeight, Weight};

use crate::error::Result;

/// Hidden states of every window.
pub(crate) type States = Vec<State>;

/// Hidden states of one window, `[tokens, hidden]`, and what layers read besides them.
#[derive(Clone, Debug)]
pub(crate) struct State {
    x: Vec<f32>,
    carried: Carried,
}

impl Deref for State {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.x
    }
}

impl<'a> IntoIterator for &'a State {
    type Item = &'a f32;
    type IntoIter = std::slice::Iter<'a, f32>;

    fn into_iter(self) -> Self::IntoIter {
        self.x.iter()
    }
}

/// Rows of logits held at a time.
pub(crate) const ROWS: usize = 64;

/// Embedding, final norm and head.
pub(crate) struct Ends {
    embedding: Embedding,
    norm: Norm,
    head: Linear,
    scale: Option<f32>,
    softcap: Option<f32>,
}

impl Ends {
    pub(crate) fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        require_head(config, source)?;
        let (vocabulary, d) = (config.vocab_size, config.hidden_size);
        let linear = |module: &str, bias| -> std::result::Result<Linear, LoadError> {
            Linear::new(module, source.linear(module, vocabulary, d, bias)?)
        };
        let head = match config.tie_word_embeddings {
            true => linear(&config.embedding_module(), false)?.folded(),
            false => linear(config.head_module(), config.head_bias)?,
        };
        let norm = Norm::load(source, config, &config.final_norm_module(), d)?;
        let (scale, softcap) = (config.logit_scale, config.logit_softcap);
        Ok(Ends { embedding: load_embedding(source, config)?, norm, head, scale, softcap })
    }

    /// Rounds every step of the final norm; `None` computes it in f32.
    pub(crate) fn set_norm_rounding(&mut self, rounding: Option<fn(f32) -> f32>) {
        self.norm.set_rounding(rounding);
    }

    /// Returns the hidden states that enter the first layer.
    pub(crate) fn embed(&self, config: &ModelConfig, windows: &[Sequence]) -> Result<States> {
        let embed = |window: &Sequence| {
            let mut x = vec![0.0; window.tokens.len() * config.hidden_size];
            self.embedding.embed(&window.tokens, &[window.tokens.len()], 0, &mut x)?;
            let carried = Carried::new(&self.embedding, &window.tokens, &x);
            Ok(State { x, carried })
        };
        windows.iter().map(embed).collect()
    }

    /// Passes the logits `[vocabulary]` of every position to `take`; `states` come from the last layer.
    pub(crate) fn logits(&self, states: &[f32], mut take: impl FnMut(usize, &[f32])) -> Result<()> {
        let (vocabulary, d) = (self.head.rows(), self.head.cols());
        let mut scratch = vec![0.0; Linear::scratch_len(vocabulary, d)];
        let mut normed = vec![0.0; states.len()];
        self.norm.forward(states, &mut normed);
        if let Some(input) = self.head.input() {
            input.apply(&mut normed, d).map_err(|error| mantissa_model::ForwardError::Input {
                module: self.head.module().to_owned(),
                error,
            })?;
        }
        let mut logits = vec![0.0; ROWS * vocabulary];
        for (part, rows) in normed.chunks(ROWS * d).enumerate() {
            let logits = &mut logits[..rows.len() / d * vocabulary];
            self.head.forward(rows, logits, false, &mut scratch);
            if let Some(scale) = self.scale {
                logits.iter_mut().for_each(|x| *x *= scale);
            }
            if let Some(cap) = self.softcap {
                logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
            }
            logits.chunks_exact(vocabulary).enumerate().for_each(|(row, x)| take(part * ROWS + row, x));
        }
        Ok(())
    }
}

/// Runs `work` on every window, on up to `threads` threads; results keep window order.
pub(crate) fn each<T: Send>(
    windows: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let at_once = threads.clamp(1, windows.max(1));
    let of_thread = |thread: usize| (thread..windows).step_by(at_once).map(|i| Ok((i, work(i)?))).collect();
    let parts: Vec<Result<Vec<(usize, T)>>> = std::thread::scope(|scope| {
        let of_thread = &of_thread;
        let others: Vec<_> = (1..at_once).map(|thread| scope.spawn(move || of_thread(thread))).collect();
        let own = of_thread(0);
        let joined = others.into_iter().map(|other| match other.join() {
            Ok(part) => part,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        std::iter::once(own).chain(joined).collect()
    });
    let mut all = Vec::with_capacity(windows);
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(i, _)| *i);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

/// Runs the hidden states of every window through a layer.
pub(crate) fn through(
    layer: &Layer,
    config: &ModelConfig,
    states: &[State],
    threads: usize,
) -> Result<States> {
    each(states.len(), threads, |i| Ok(states[i].clone().through(layer, config, None)?.0))
}

impl State {
    /// Applies `of` to every value.
    pub(crate) fn map(&mut self, of: fn(f32) -> f32) {
        self.x.iter_mut().for_each(|x| *x = of(*x));
    }

    /// Runs the states through a layer; returns them with the buffers, which hold the layer's keys and values.
    pub(crate) fn through(
        self,
        layer: &Layer,
        config: &ModelConfig,
        observer: Option<&mut Observer<'_>>,
    ) -> Result<(State, Buffers)> {
        let State { mut x, mut carried } = self;
        let tokens = x.len() / config.hidden_size;
        let mut buffers = Buffers::plan(config, tokens, tokens)?;
        carried.enter(config, layer.index(), &mut buffers);
        layer.run(config, &[tokens], &mut x, observer, &mut buffers)?;
        carried.leave(config, layer.index(), tokens, &buffers);
        carried.advance(config, tokens, &buffers);
        Ok((State { x, carried }, buffers))
    }
}

/// Returns a layer with the linear layers `kinds` zeroed.
pub(crate) fn silenced(layer: &Layer, kinds: &[LinearKind]) -> Result<Layer> {
    let mut layer = layer.clone();
    for &kind in kinds {
        let Some(place) = layer.linear_mut(kind) else { continue };
        let (rows, cols, module) = (place.rows(), place.cols(), place.module().to_owned());
        let weight = Weight::F32(vec![0.0; rows * cols]);
        let zero =
            LinearWeight { rows, cols, weight, bias: None, input: None, transforms: Default::default() };
        *place = Linear::new(&module, zero)?;
    }
    Ok(layer)
}
