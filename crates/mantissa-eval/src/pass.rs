//! Logits of a window: from one pass over all tokens, or from a prefill followed by decode steps through the
//! KV cache.

use std::ops::{ControlFlow, Range};

use mantissa_kernels::kernels;
use mantissa_model::{
    Batch, Buffers, Decoder, Decoding, ForwardError, GenerateError, Hidden, KvCache, LoadError, ModelConfig,
};
use mantissa_runtime::{FastModel, Single};

use crate::error::EvalError;

/// Number of positions whose logits each thread holds at a time.
pub const ROWS: usize = 64;

/// A model to evaluate, on one of two engines.
#[derive(Clone, Copy, Debug)]
pub enum Evaluated<'a> {
    /// The reference decoder: whole windows without a cache, unless it decodes.
    Reference(&'a Decoder),
    /// The fast engine: always through its cache.
    Fast(&'a FastModel),
}

impl<'a> From<&'a Decoder> for Evaluated<'a> {
    fn from(decoder: &'a Decoder) -> Self {
        Evaluated::Reference(decoder)
    }
}

impl<'a> From<&'a FastModel> for Evaluated<'a> {
    fn from(model: &'a FastModel) -> Self {
        Evaluated::Fast(model)
    }
}

impl<'a> Evaluated<'a> {
    /// Configuration of the model.
    pub fn config(&self) -> &'a ModelConfig {
        match self {
            Evaluated::Reference(decoder) => decoder.config(),
            Evaluated::Fast(model) => model.config(),
        }
    }

    /// True if a pass over a whole window does not show the tokens as they are stored.
    pub(crate) fn hides_cache(&self) -> bool {
        match self {
            Evaluated::Reference(decoder) => decoder.has_kv_window(),
            Evaluated::Fast(model) => !model.kv().is_by_token(),
        }
    }
}

/// A model with the buffers of one thread.
pub(crate) struct Runner<'a> {
    model: Engine<'a>,
    logits: Vec<f32>,
    vocabulary: usize,
}

enum Engine<'a> {
    Reference { decoder: &'a Decoder, buffers: Box<Buffers>, decode: Option<(Box<KvCache>, usize)> },
    Fast { single: Box<Single<'a>>, prefill: Option<usize> },
}

/// Forward pass over one window.
pub(crate) struct Pass<'p, 'a> {
    source: PassKind<'p, 'a>,
    logits: &'p mut [f32],
    vocabulary: usize,
}

enum PassKind<'p, 'a> {
    Whole(Hidden<'p>),
    Decode { decoder: &'p Decoder, buffers: &'p mut Buffers, cache: &'p mut KvCache, prefill: usize },
    FastWhole(&'p mut Single<'a>),
    FastDecode(&'p mut Single<'a>, usize),
}

impl<'a> Runner<'a> {
    /// Allocates buffers for windows of up to `longest` tokens. With `prefill`, that many tokens run in one
    /// pass and the rest one by one through the KV cache.
    pub(crate) fn new(
        model: Evaluated<'a>,
        longest: usize,
        prefill: Option<usize>,
    ) -> Result<Self, EvalError> {
        let config = model.config();
        let pass = prefill.map_or(longest, |prefill| prefill.clamp(1, longest.max(1)));
        let (len, mut logits) = (ROWS * config.vocab_size, Vec::new());
        let model = match model {
            Evaluated::Fast(model) => {
                let single = Box::new(Single::new(model, pass, longest)?);
                Engine::Fast { single, prefill: prefill.map(|_| pass) }
            }
            Evaluated::Reference(decoder) => {
                let buffers = Box::new(Buffers::plan(config, pass, longest)?);
                let decode = match prefill {
                    Some(_) => Some((Box::new(KvCache::for_decoder(decoder, longest)?), pass)),
                    None => None,
                };
                Engine::Reference { decoder, buffers, decode }
            }
        };
        let memory = |_| LoadError::Memory { what: "logits", bytes: 4 * len as u64 };
        logits.try_reserve_exact(len).map_err(memory)?;
        logits.resize(len, 0.0);
        Ok(Runner { model, logits, vocabulary: config.vocab_size })
    }

    /// Allocates buffers for the items of a task: passes of up to `pass` tokens, sequences of up to `sequence`.
    pub(crate) fn for_tasks(model: Evaluated<'a>, pass: usize, sequence: usize) -> Result<Self, EvalError> {
        let mut runner = Runner::new(model, pass, None)?;
        if let Engine::Fast { single, .. } = &mut runner.model {
            **single = Single::new(single.model(), pass, sequence)?;
        }
        Ok(runner)
    }

    /// Continues `prompt` greedily by up to `new` tokens. `take` receives each token and can end the text; an end token
    /// of the model ends it without being given.
    pub(crate) fn greedy(
        &mut self,
        prompt: &[u32],
        new: usize,
        take: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(), EvalError> {
        let ends = match &self.model {
            Engine::Reference { decoder, .. } => &decoder.config().eos_token_ids,
            Engine::Fast { single, .. } => &single.model().config().eos_token_ids,
        };
        let Runner { model, logits, vocabulary } = self;
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt.into());
        }
        let mut next: Box<dyn FnMut(Option<u32>) -> Result<u32, GenerateError>> = match model {
            Engine::Reference { decoder, .. } => {
                let mut decoding = Decoding::begin(decoder, prompt, new)?;
                Box::new(move |last| {
                    last.map_or(Ok(()), |token| decoding.push(token))?;
                    decoding.most_probable()
                })
            }
            Engine::Fast { single, .. } => {
                single.clear();
                let (row, mut length) = (&mut logits[..*vocabulary], 0);
                Box::new(move |last| {
                    let token = last.map(|token| [token]);
                    let input = token.as_ref().map_or(prompt, |token| &token[..]);
                    single.extend(input)?;
                    single.logits(input.len() - 1..input.len(), row)?;
                    length += input.len();
                    let none = ForwardError::NoLogits { position: length - 1 };
                    Ok(kernels().argmax(row).ok_or(none)? as u32)
                })
            }
        };
        let mut last = None;
        for _ in 0..new {
            let token = next(last)?;
            if ends.contains(&token) || take(token).is_break() {
                break;
            }
            last = Some(token);
        }
        Ok(())
    }

    /// Starts a window.
    pub(crate) fn begin(&mut self, tokens: &[u32]) -> Result<Pass<'_, 'a>, ForwardError> {
        let Runner { model, logits, vocabulary } = self;
        let source = match model {
            Engine::Reference { decoder, buffers, decode: None } => {
                PassKind::Whole(decoder.forward(&Batch { tokens, lens: &[tokens.len()] }, buffers)?)
            }
            Engine::Reference { decoder, buffers, decode: Some((cache, prefill)) } => {
                cache.truncate(0);
                PassKind::Decode { decoder, buffers, cache, prefill: *prefill }
            }
            Engine::Fast { single, prefill } => {
                single.clear();
                match prefill {
                    None => {
                        single.extend(tokens)?;
                        PassKind::FastWhole(single)
                    }
                    Some(prefill) => PassKind::FastDecode(single, *prefill),
                }
            }
        };
        Ok(Pass { source, logits, vocabulary: *vocabulary })
    }
}

impl Pass<'_, '_> {
    /// Returns the logits of positions `rows`, at most [`ROWS`], which must follow the positions of the previous
    /// call. When decoding, positions before the last prompt token are not computed and keep their old
    /// values.
    pub(crate) fn logits(&mut self, tokens: &[u32], rows: Range<usize>) -> Result<&[f32], ForwardError> {
        let vocabulary = self.vocabulary;
        let out = &mut self.logits[..rows.len() * vocabulary];
        match &mut self.source {
            PassKind::Whole(hidden) => hidden.logits(rows, out)?,
            PassKind::FastWhole(single) => single.logits(rows, out)?,
            PassKind::Decode { decoder, buffers, cache, prefill } => {
                for (input, out) in steps(tokens, *prefill, rows, out, vocabulary) {
                    let mut hidden = decoder.forward_cached(input, cache, buffers)?;
                    hidden.logits(input.len() - 1..input.len(), out)?;
                }
            }
            PassKind::FastDecode(single, prefill) => {
                for (input, out) in steps(tokens, *prefill, rows, out, vocabulary) {
                    single.extend(input)?;
                    single.logits(input.len() - 1..input.len(), out)?;
                }
            }
        }
        Ok(out)
    }
}

/// Returns the inputs of the decode steps that give the logits of positions `rows`, each with its place in `out`.
/// Positions before the last prompt token have none.
fn steps<'t>(
    tokens: &'t [u32],
    prefill: usize,
    rows: Range<usize>,
    out: &'t mut [f32],
    vocabulary: usize,
) -> impl Iterator<Item = (&'t [u32], &'t mut [f32])> {
    // A prompt as long as the window ends at the window's last position.
    let prompt = prefill.min(tokens.len());
    let positions = rows.zip(out.chunks_exact_mut(vocabulary.max(1)));
    positions.filter(move |(position, _)| position + 1 >= prompt).map(move |(position, out)| {
        let first = if position + 1 == prompt { 0 } else { position };
        (&tokens[first..=position], out)
    })
}
