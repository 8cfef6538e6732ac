//! The model beside its source on the text: error over depth, KL by position and by length of the context, head and layers
//! apart.

use mantissa_eval::Sequence;
use mantissa_eval::stats::{Sum, estimate};
use mantissa_model::{Layer, ModelConfig, WeightSource};
use serde::Serialize;

use crate::doctor::divergence;
use crate::error::Result;
use crate::run::{Ends, each, through};
use crate::values::relative_error;

/// First position of each range that KL is given for.
const RANGES: [usize; 5] = [0, 16, 64, 128, 256];

/// The model beside its source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Mean KL(source ‖ model), nats/token.
    pub kl: f64,
    /// Standard error of `kl`.
    pub kl_se: f64,
    /// KL with final norm and head of the model alone, the rest from the source.
    pub kl_head: f64,
    /// KL with all but final norm and head from the model.
    pub kl_layers: f64,
    /// Relative error of the states after each layer.
    pub depth: Vec<f64>,
    /// KL by position in the window.
    pub positions: Vec<AtPosition>,
    /// KL of the same tokens by length of their context.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub contexts: Vec<AtContext>,
}

/// KL of the last tokens of every window, after a context of one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AtContext {
    /// Tokens before the first of them; all windows hold as many.
    pub tokens: usize,
    /// Mean KL, nats/token.
    pub kl: f64,
    /// Standard error of `kl`; absent for a single window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_se: Option<f64>,
}

/// KL of some positions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AtPosition {
    /// First position.
    pub from: usize,
    /// Mean KL, nats/token.
    pub kl: f64,
    /// Standard error of `kl`; absent for a single window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_se: Option<f64>,
}

/// Sums of one window.
#[derive(Clone, Default)]
struct Sums {
    whole: Sum,
    head: Sum,
    layers: Sum,
    ranges: [Sum; RANGES.len()],
}

/// Runs both models over `windows`.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn compare(
    (files, config): (&dyn WeightSource, &ModelConfig),
    (reference, theirs): (&dyn WeightSource, &ModelConfig),
    windows: &[Sequence],
    threads: usize,
) -> Result<Compared> {
    let (own, right) = (Ends::load(files, config)?, Ends::load(reference, theirs)?);
    let (mut ours, mut states) = (own.embed(config, windows)?, right.embed(theirs, windows)?);
    let mut depth = Vec::with_capacity(config.num_hidden_layers);
    for number in 0..config.num_hidden_layers {
        ours = through(&Layer::load(files, config, number)?, config, &ours, threads)?;
        states = through(&Layer::load(reference, theirs, number)?, theirs, &states, threads)?;
        let flat = |states: &crate::run::States| states.iter().flatten().copied().collect::<Vec<f32>>();
        depth.push(relative_error(&flat(&ours), &flat(&states)));
    }
    let sums = each(windows.len(), threads, |i| {
        let mut expected: Vec<Vec<f32>> = Vec::new();
        right.logits(&states[i], |_, logits| expected.push(logits.to_vec()))?;
        let mut sums = Sums::default();
        own.logits(&ours[i], |row, logits| {
            let kl = divergence(&expected[row], logits);
            sums.whole.add(kl);
            if let Some(range) = RANGES.iter().rposition(|from| *from <= row) {
                sums.ranges[range].add(kl);
            }
        })?;
        own.logits(&states[i], |row, logits| sums.head.add(divergence(&expected[row], logits)))?;
        right.logits(&ours[i], |row, logits| sums.layers.add(divergence(&expected[row], logits)))?;
        Ok(sums)
    })?;
    let column = |of: &dyn Fn(&Sums) -> Sum| {
        estimate(&sums.iter().map(of).filter(|sum| sum.count > 0).collect::<Vec<_>>())
    };
    let whole = column(&|sums| sums.whole);
    let positions = RANGES.iter().enumerate().filter_map(|(i, &from)| {
        let found = column(&|sums| sums.ranges[i]);
        let kl_se = Some(found.se).filter(|se| se.is_finite());
        found.mean.is_finite().then_some(AtPosition { from, kl: found.mean, kl_se })
    });
    Ok(Compared {
        kl: whole.mean,
        kl_se: whole.se,
        kl_head: column(&|sums| sums.head).mean,
        kl_layers: column(&|sums| sums.layers).mean,
        depth,
        positions: positions.collect(),
        contexts: Vec::new(),
    })
}

/// Predictions at the end of each window whose KL is given by context, and the lengths of context.
const LAST: usize = 16;
const CONTEXTS: [usize; 5] = [8, 32, 96, 224, 480];

/// Measures the KL of the last predictions of every window after contexts of several lengths: what a longer context
/// itself adds to the error, where KL by position compares other tokens. A first token BOS stays before every context.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn contexts(
    (files, config): (&dyn WeightSource, &ModelConfig),
    (reference, theirs): (&dyn WeightSource, &ModelConfig),
    windows: &[Sequence],
    threads: usize,
) -> Result<Vec<AtContext>> {
    let (own, right) = (Ends::load(files, config)?, Ends::load(reference, theirs)?);
    let longest = windows.iter().map(|window| window.tokens.len()).max().unwrap_or(0);
    // The rest of a text may be a shorter window.
    let windows: Vec<&[u32]> =
        windows.iter().map(|window| &window.tokens[..]).filter(|tokens| tokens.len() == longest).collect();
    // Copies of the windows with each length of context, one after the other: all run in one pass over the layers.
    let lengths: Vec<usize> = CONTEXTS.into_iter().filter(|context| context + LAST < longest).collect();
    let cut = |context: usize| {
        windows.iter().map(move |tokens| {
            let (before, rest) = tokens.split_at(longest - LAST - context);
            let bos = before.first().filter(|first| config.bos_token_id == Some(**first));
            Sequence { tokens: bos.into_iter().chain(rest).copied().collect(), from: 1 }
        })
    };
    let all: Vec<Sequence> = lengths.iter().flat_map(|&context| cut(context)).collect();
    let (mut ours, mut states) = (own.embed(config, &all)?, right.embed(theirs, &all)?);
    for number in 0..config.num_hidden_layers {
        ours = through(&Layer::load(files, config, number)?, config, &ours, threads)?;
        states = through(&Layer::load(reference, theirs, number)?, theirs, &states, threads)?;
    }
    let sums = each(all.len(), threads, |i| {
        let first = all[i].tokens.len() - LAST;
        let mut expected: Vec<Vec<f32>> = Vec::new();
        let tail = |state: &[f32]| state[first * config.hidden_size..].to_vec();
        right.logits(&tail(&states[i]), |_, logits| expected.push(logits.to_vec()))?;
        let mut sum = Sum::default();
        own.logits(&tail(&ours[i]), |row, logits| sum.add(divergence(&expected[row], logits)))?;
        Ok(sum)
    })?;
    let length_sums = |(sums, &tokens): (&[Sum], &usize)| {
        let found = estimate(sums);
        let kl_se = Some(found.se).filter(|se| se.is_finite());
        found.mean.is_finite().then_some(AtContext { tokens, kl: found.mean, kl_se })
    };
    Ok(sums.chunks(windows.len().max(1)).zip(&lengths).filter_map(length_sums).collect())
}
