//! Mixtures of experts (Shazeer et al. 2017; shared experts and groups: DeepSeek-V2, sec. 2.2): a router chooses
//! experts for each token, each an MLP, and weights their results; shared experts are added for every token.
//!
//! An expert reads the tokens routed to it as one matrix, padded like the whole pass, so that a token has the same
//! bits in any batch. Some experts at a time run in one call for each projection (grouped products); those of a single
//! token read the same input. Results are added in the order of the experts.

mod lower;

use std::cmp::Ordering;

use mantissa_kernels::kernels;

use crate::config::{DenseMlp, LimitedSwiglu, ModelConfig, Routing, Scores, SharedExperts};
use crate::error::ForwardError;
use crate::mixer::softplus;
use crate::operators::{ExpertChoice, Group, MIN_ROWS, MatmulJob, Operators};
use crate::program::Gating;
use mantissa_arch::kinds::{LinearInput, LinearKind, VectorKind};

/// Most experts of a call.
const TOGETHER: usize = 8;

/// Experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Experts {
    pub(crate) count: usize,
    pub(crate) per_token: usize,
    pub(crate) width: usize,
    pub(crate) routing: Routing,
    pub(crate) shared: Option<SharedExperts>,
    pub(crate) limited: Option<LimitedSwiglu>,
    /// True if experts and shared experts have a gate.
    pub(crate) gated: bool,
    /// Width of the latent that experts read and write.
    pub(crate) latent: Option<usize>,
    pub(crate) dense: DenseMlp,
    /// True if a token is multiplied by an expert's weight before it enters it, not after.
    pub(crate) scales_input: bool,
    /// True if every token runs through every expert, so that all experts see inputs. Results of experts that the router
    /// did not choose are left out.
    pub(crate) runs_all: bool,
}

/// Rows of an expert.
#[derive(Clone, Copy, Default)]
struct ExpertSpan {
    expert: u16,
    /// Tokens that chose it.
    tokens: usize,
    /// Tokens and padding.
    rows: usize,
}

/// Some experts, one after another in the buffers.
#[derive(Default)]
struct ExpertBatch {
    parts: [ExpertSpan; TOGETHER],
    count: usize,
}

impl ExpertBatch {
    /// Takes the next experts off `choices`, which are sorted by expert, and returns their choices too. An expert has
    /// at least `least` rows, and all but a single one have together at most `most`.
    fn take<'c>(choices: &mut &'c [ExpertChoice], least: usize, most: usize) -> (Self, &'c [ExpertChoice]) {
        let mut taken = ExpertBatch::default();
        let (mut tokens, mut rows) = (0, 0);
        for chosen in choices.chunk_by(|a, b| a.expert == b.expert).take(TOGETHER) {
            let part =
                ExpertSpan { expert: chosen[0].expert, tokens: chosen.len(), rows: chosen.len().max(least) };
            if taken.count > 0 && rows + part.rows > most {
                break;
            }
            taken.parts[taken.count] = part;
            (taken.count, tokens, rows) = (taken.count + 1, tokens + part.tokens, rows + part.rows);
        }
        (taken, choices.split_off(..tokens).unwrap_or_default())
    }

    fn each(&self) -> std::slice::Iter<'_, ExpertSpan> {
        self.parts[..self.count].iter()
    }

    /// Rows of all.
    fn rows(&self) -> usize {
        self.each().map(|part| part.rows).sum()
    }

    /// Copies the rows of `x` `[rows, width]` that chose each expert, multiplied by its weight if it `scales` them, and
    /// pads them with zeros.
    fn gather(&self, chosen: &[ExpertChoice], x: &[f32], width: usize, scales: bool, gathered: &mut [f32]) {
        let (mut chosen, mut gathered) = (chosen, gathered);
        for part in self.each() {
            let chosen = chosen.split_off(..part.tokens).unwrap_or_default();
            let rows = gathered.split_off_mut(..part.rows * width).unwrap_or_default();
            let (rows, padding) = rows.split_at_mut(part.tokens * width);
            for (row, choice) in rows.chunks_exact_mut(width).zip(chosen) {
                row.copy_from_slice(&x[choice.row as usize * width..][..width]);
                // Tokens that an expert sees without being chosen have a weight of 0.
                if scales && choice.weight != 0.0 {
                    row.iter_mut().for_each(|x| *x *= choice.weight);
                }
            }
            padding.fill(0.0);
        }
    }

    /// Runs `N` linear layers of each expert on its rows of `x` `[rows, width]` in one call.
    fn run<const N: usize>(
        &self,
        operators: &mut dyn Operators,
        input: impl Fn(u16) -> LinearInput,
        x: &[f32],
        width: usize,
        jobs: &mut [[MatmulJob<'_>; N]],
    ) -> Result<(), ForwardError> {
        let (mut x, mut jobs) = (x, jobs.iter_mut());
        let mut groups: [Group<'_, '_>; TOGETHER] =
            self.parts.map(|ExpertSpan { expert, tokens, rows }| Group {
                input: input(expert),
                x: x.split_off(..rows * width).unwrap_or_default(),
                tokens,
                jobs: jobs.next().map_or(&mut [], |jobs| jobs.as_mut_slice()),
            });
        operators.grouped(&mut groups[..self.count])
    }
}

/// Inputs of some experts.
struct ExpertRows<'a> {
    parts: &'a ExpertBatch,
    /// Choices of the tokens, sorted by expert.
    chosen: &'a [ExpertChoice],
    /// `[rows, d]`.
    x: &'a [f32],
    d: usize,
    /// True if a token is multiplied by an expert's weight.
    scales: bool,
}

impl ExpertRows<'_> {
    /// Runs `N` linear layers of each expert into `outs` `[rows of all experts, width]`.
    fn enter<const N: usize>(
        &self,
        operators: &mut dyn Operators,
        kinds: impl Fn(u16) -> [LinearKind; N],
        width: usize,
        mut outs: [&mut [f32]; N],
        gathered: &mut [f32],
    ) -> Result<(), ForwardError> {
        let ExpertRows { parts, chosen, x, d, scales } = *self;
        let mut jobs: [[MatmulJob<'_>; N]; TOGETHER] =
            parts.parts.map(|ExpertSpan { expert, rows, .. }| {
                let kinds = kinds(expert);
                let mut outs =
                    outs.iter_mut().map(|out| out.split_off_mut(..rows * width).unwrap_or_default());
                kinds.map(|kind| MatmulJob { kind, out: outs.next().unwrap_or_default(), accumulate: false })
            });
        let jobs = &mut jobs[..parts.count];
        if x.len() == d && !scales {
            // All read the only token.
            return operators.linears(LinearInput::GateUp, x, 1, jobs.as_flattened_mut());
        }
        parts.gather(chosen, x, d, scales, gathered);
        parts.run(operators, LinearInput::Expert, gathered, d, jobs)
    }
}

/// Buffers of a pass through experts.
pub(crate) struct ExpertBuffers<'a> {
    /// Inner projections and their product, `[rows of some experts, inner width]` or more.
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a mut [f32],
    pub(crate) inner: &'a mut [f32],
    /// Inputs of some experts, `[rows of a part, hidden]`.
    pub(crate) gathered: &'a mut [f32],
    /// Outputs of some experts, `[rows of a part, hidden]`.
    pub(crate) result: &'a mut [f32],
}

impl Experts {
    /// Creates the experts of layer `layer`, if it has some.
    pub(crate) fn new(config: &ModelConfig, layer: usize) -> Option<Self> {
        let experts = config.experts.as_ref().filter(|experts| experts.layers[layer])?;
        Some(Experts {
            count: experts.count.into(),
            per_token: experts.per_token,
            width: experts.width,
            routing: experts.routing,
            shared: experts.shared,
            limited: experts.limited,
            gated: experts.gated,
            latent: experts.latent,
            dense: experts.dense,
            scales_input: experts.scales_input,
            runs_all: false,
        })
    }

    /// Chooses experts for tokens by the `logits` of their router, `[tokens, experts]`, which become scores, and appends the
    /// choices, sorted by expert. `tokens` are their numbers, if experts are listed by token.
    pub(crate) fn route(
        &self,
        operators: &dyn Operators,
        logits: &mut [f32],
        tokens: &[f32],
        choices: &mut Vec<ExpertChoice>,
    ) {
        let correction = operators.vector(VectorKind::Correction);
        let by_token = operators.vector(VectorKind::TokenExperts);
        for (row, logits) in logits.chunks_exact_mut(self.count).enumerate() {
            let begin = choices.len();
            match by_token {
                Some(table) => {
                    let listed = &table[tokens[row] as usize * self.per_token..][..self.per_token];
                    route_by_token(&self.routing, listed, logits, row as u32, choices);
                }
                None => route(&self.routing, self.per_token, logits, correction, row as u32, choices),
            }
            if self.runs_all {
                choose_others(self.count, row as u32, begin, choices);
            }
        }
        if let Some(scales) = operators.vector(VectorKind::ExpertScales) {
            choices.iter_mut().for_each(|choice| choice.weight *= scales[usize::from(choice.expert)]);
        }
        choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
    }

    /// Runs the chosen experts on their tokens of `x` `[rows, d]` and adds their weighted results to `sum` `[rows, d]`, `d`
    /// being the width of what experts read. `hidden` is that of the states.
    pub(crate) fn run(
        &self,
        operators: &mut dyn Operators,
        (gating, threads): (Gating, usize),
        choices: &[ExpertChoice],
        (x, sum): (&[f32], &mut [f32]),
        (hidden, mut buffers): (usize, ExpertBuffers<'_>),
    ) -> Result<(), ForwardError> {
        let d = self.latent.unwrap_or(hidden);
        // A pass of few tokens, through a cache, is not padded.
        let least = if x.len() / d >= MIN_ROWS { operators.least_rows() } else { 1 };
        let mut rest = choices;
        while !rest.is_empty() {
            let (parts, chosen) = ExpertBatch::take(&mut rest, least, buffers.gathered.len() / hidden);
            let input = ExpertRows { parts: &parts, chosen, x, d, scales: self.scales_input };
            self.run_some(operators, (gating, threads), input, &mut buffers, sum)?;
        }
        Ok(())
    }

    /// Runs some experts on the tokens that chose them.
    fn run_some(
        &self,
        operators: &mut dyn Operators,
        (gating, threads): (Gating, usize),
        input: ExpertRows<'_>,
        buffers: &mut ExpertBuffers<'_>,
        sum: &mut [f32],
    ) -> Result<(), ForwardError> {
        let (parts, chosen, d) = (input.parts, input.chosen, input.d);
        let (width, rows) = (self.width, parts.rows());
        let ExpertBuffers { gate, up, inner, gathered, result } = buffers;
        let (gate, up, inner) =
            (&mut gate[..rows * width], &mut up[..rows * width], &mut inner[..rows * width]);
        if self.gated {
            let kinds = |expert| [LinearKind::ExpertGate(expert), LinearKind::ExpertUp(expert)];
            input.enter(operators, kinds, width, [&mut *gate, &mut *up], gathered)?;
        } else {
            up.fill(1.0);
            let kinds = |expert| [LinearKind::ExpertUp(expert)];
            input.enter(operators, kinds, width, [&mut *gate], gathered)?;
        }
        gating.run(
            (threads, gating.numbers(|kind| operators.vector(kind)?.first().copied())),
            width,
            gate,
            up,
            inner,
        );
        let mut out = &mut result[..rows * d];
        let mut jobs: [[MatmulJob<'_>; 1]; TOGETHER] =
            parts.parts.map(|ExpertSpan { expert, rows, .. }| {
                let out = out.split_off_mut(..rows * d).unwrap_or_default();
                [MatmulJob { kind: LinearKind::ExpertDown(expert), out, accumulate: false }]
            });
        parts.run(operators, LinearInput::ExpertDown, inner, width, &mut jobs[..parts.count])?;
        let (mut chosen, mut result) = (chosen, &result[..rows * d]);
        for part in parts.each() {
            let result = result.split_off(..part.rows * d).unwrap_or_default();
            let chosen = chosen.split_off(..part.tokens).unwrap_or_default();
            // A weight of 0 adds nothing, even to a result that is not finite.
            let results = chosen.iter().zip(result.chunks_exact(d));
            for (choice, result) in results.filter(|(choice, _)| choice.weight != 0.0) {
                let row = choice.row as usize * d..(choice.row as usize + 1) * d;
                let weight = if self.scales_input { 1.0 } else { choice.weight };
                kernels().axpy(weight, result, &mut sum[row]);
            }
        }
        Ok(())
    }
}

/// Chooses experts for one token by its router's `logits`, which become scores, and appends them to `choices`. Ties go
/// to the lower index.
fn route(
    routing: &Routing,
    per_token: usize,
    logits: &mut [f32],
    correction: Option<&[f32]>,
    row: u32,
    choices: &mut Vec<ExpertChoice>,
) {
    scores(routing, logits);
    let corrected = |e: usize| logits[e] + correction.map_or(0.0, |correction| correction[e]);
    // Groups stand in the list for a while, so that nothing is allocated.
    let begin = choices.len();
    let each = push_groups(routing, logits.len(), corrected, row, choices);
    let first = choices.len();
    for _ in 0..per_token {
        let (groups, chosen) = choices[begin..].split_at(first - begin);
        let has = |list: &[ExpertChoice], e: usize| list.iter().any(|choice| usize::from(choice.expert) == e);
        let allowed = |e: &usize| each.is_none_or(|each| has(groups, e / each)) && !has(chosen, *e);
        let best = (0..logits.len()).filter(allowed).reduce(|best, e| {
            if corrected(e).total_cmp(&corrected(best)) == Ordering::Greater { e } else { best }
        });
        // There are no more experts than a u16 can count.
        let Some(expert) = best.and_then(|e| u16::try_from(e).ok()) else { break };
        choices.push(ExpertChoice { expert, row, weight: logits[usize::from(expert)] });
    }
    choices.drain(begin..first);
    weigh(routing, &mut choices[begin..]);
}

/// Turns the logits of a router into scores.
fn scores(routing: &Routing, logits: &mut [f32]) {
    match routing.scores {
        Scores::Softmax => kernels().softmax(logits),
        Scores::Sigmoid => sigmoid(logits),
        Scores::SoftmaxOfChosen => {}
        Scores::SqrtSoftplus => {
            logits.iter_mut().for_each(|x| *x = softplus(f64::from(*x)).sqrt() as f32);
        }
    }
}

/// Chooses the `listed` experts for one token, weighted by its router's `logits`, which become scores.
fn route_by_token(
    routing: &Routing,
    listed: &[f32],
    logits: &mut [f32],
    row: u32,
    choices: &mut Vec<ExpertChoice>,
) {
    scores(routing, logits);
    let begin = choices.len();
    choices.extend(listed.iter().map(|expert| ExpertChoice {
        expert: *expert as u16,
        row,
        weight: logits[*expert as usize],
    }));
    weigh(routing, &mut choices[begin..]);
}

/// Turns the scores of the chosen experts of one token into weights.
fn weigh(routing: &Routing, chosen: &mut [ExpertChoice]) {
    if routing.scores == Scores::SoftmaxOfChosen {
        let max = chosen.iter().fold(f32::NEG_INFINITY, |max, choice| max.max(choice.weight));
        for choice in &mut *chosen {
            let mut weight = [choice.weight - max];
            kernels().exp_inplace(&mut weight);
            [choice.weight] = weight;
        }
    }
    if routing.normalize || routing.scores == Scores::SoftmaxOfChosen {
        let sum: f32 = chosen.iter().map(|choice| choice.weight).sum();
        // The reference of DeepSeek-V3 adds this, because all sigmoids may vanish.
        let vanish = matches!(routing.scores, Scores::Sigmoid | Scores::SqrtSoftplus);
        let sum = if vanish { sum + 1e-20 } else { sum };
        chosen.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    chosen.iter_mut().for_each(|choice| choice.weight *= routing.scale);
}

/// Appends the experts that are not among `choices[begin..]`, the choices of one token, with weight 0.
fn choose_others(count: usize, row: u32, begin: usize, choices: &mut Vec<ExpertChoice>) {
    let end = choices.len();
    for expert in (0..count).filter_map(|e| u16::try_from(e).ok()) {
        if choices[begin..end].iter().all(|choice| choice.expert != expert) {
            choices.push(ExpertChoice { expert, row, weight: 0.0 });
        }
    }
}

/// Backward of the routing of one token: replaces its router's `logits` by their gradient. `chosen` are its choices,
/// in any order, `gradients` those of their weights in the same order. The choice itself has no gradient.
///
/// With scores s and weights `w = scale · s / Σ s` of the chosen (or `scale · s`): `ds = scale · dw / Σ s - Σ w dw / Σ s`
/// of the chosen, then the derivative of softmax, `dl = s (ds - Σ s ds)`, of the sigmoid, `dl = s (1 - s) ds`, or of the
/// root of softplus, `dl = sigmoid(l) ds / 2s`.
pub fn route_backward(routing: &Routing, logits: &mut [f32], chosen: &[ExpertChoice], gradients: &[f32]) {
    let scores = logits;
    self::scores(routing, scores);
    if routing.scores == Scores::SoftmaxOfChosen {
        // Weights of a softmax over the chosen: `dl = w (scale · dw - Σ w dw) / scale · scale`.
        let along: f32 = chosen.iter().zip(gradients).map(|(choice, dw)| choice.weight * dw).sum();
        scores.fill(0.0);
        for (choice, dw) in chosen.iter().zip(gradients) {
            scores[usize::from(choice.expert)] = choice.weight * (dw - along / routing.scale);
        }
        return;
    }
    let score = |choice: &ExpertChoice| scores[usize::from(choice.expert)];
    let (mut sum, mut along) = (1.0, 0.0);
    if routing.normalize {
        sum = chosen.iter().map(score).sum();
        along = chosen.iter().zip(gradients).map(|(choice, dw)| choice.weight * dw).sum();
    }
    let slope = |dw: f32| (routing.scale * dw - along) / sum;
    let weighted: f32 = chosen.iter().zip(gradients).map(|(choice, dw)| score(choice) * slope(*dw)).sum();
    for (e, s) in scores.iter_mut().enumerate() {
        let own = chosen.iter().position(|choice| usize::from(choice.expert) == e);
        let own = own.map_or(0.0, |i| slope(gradients[i]));
        *s = match routing.scores {
            Scores::Sigmoid => *s * (1.0 - *s) * own,
            // ds/dl = sigmoid(l) / 2s, and sigmoid(l) = 1 - exp(-s²).
            Scores::SqrtSoftplus => -(-*s * *s).exp_m1() / (2.0 * *s) * own,
            Scores::Softmax | Scores::SoftmaxOfChosen => *s * (own - weighted),
        };
    }
}

/// Appends the groups to choose experts from to `choices`, and returns the number of experts in each; `None` if the
/// choice is not limited.
fn push_groups(
    routing: &Routing,
    experts: usize,
    score: impl Fn(usize) -> f32,
    row: u32,
    choices: &mut Vec<ExpertChoice>,
) -> Option<usize> {
    let groups = routing.groups?;
    let each = experts / groups.count;
    let worth = |group: usize| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for score in (group * each..(group + 1) * each).map(&score) {
            if score > best {
                (best, second) = (score, best);
            } else if score > second {
                second = score;
            }
        }
        if groups.best_two { best + second } else { best }
    };
    let begin = choices.len();
    // There are no more groups than experts, which a u16 counts.
    let all = (0..groups.count).filter_map(|group| Some((group, u16::try_from(group).ok()?)));
    choices.extend(all.map(|(group, expert)| ExpertChoice { expert, row, weight: worth(group) }));
    choices[begin..].sort_unstable_by(|a, b| b.weight.total_cmp(&a.weight).then(a.expert.cmp(&b.expert)));
    choices.truncate(begin + groups.chosen);
    Some(each)
}

/// Replaces each of `x` by `1 / (1 + e^-x)`, the same on every platform.
pub fn sigmoid(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = -*x);
    kernels().exp_inplace(x);
    x.iter_mut().for_each(|x| *x = 1.0 / (1.0 + *x));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Groups;

    const PLAIN: Routing = Routing {
        scores: Scores::Softmax,
        normalize: false,
        scale: 1.0,
        groups: None,
        correction: false,
        bias: false,
    };

    fn chosen(routing: Routing, logits: &[f32], correction: Option<&[f32]>) -> Vec<(u16, f32)> {
        let mut choices = Vec::new();
        route(&routing, 2, &mut logits.to_vec(), correction, 0, &mut choices);
        choices.into_iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    fn assert_close(found: &[(u16, f32)], expected: &[(u16, f64)]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let close = (f64::from(found.1) - expected.1).abs() < 1e-6;
            assert!(found.0 == expected.0 && close, "{found:?} for {expected:?}");
        }
    }

    #[test]
    fn the_best_are_chosen_and_weighed_by_their_scores() {
        let logits = [0.0, 1.0, -1.0, 2.0];
        let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let e = std::f64::consts::E;
        assert_close(&chosen(PLAIN, &logits, None), &[(3, e * e / sum), (1, e / sum)]);
        let normalized = [(3, e / (1.0 + e)), (1, 1.0 / (1.0 + e))];
        assert_close(&chosen(Routing { normalize: true, ..PLAIN }, &logits, None), &normalized);
        let of_chosen = Routing { scores: Scores::SoftmaxOfChosen, ..PLAIN };
        assert_close(&chosen(of_chosen, &logits, None), &normalized);
        let scaled = Routing { normalize: true, scale: 2.0, ..PLAIN };
        assert_close(&chosen(scaled, &logits, None), &normalized.map(|(expert, w)| (expert, 2.0 * w)));
        assert_eq!(chosen(PLAIN, &[1.0; 4], None).iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn corrections_choose_and_do_not_weigh() {
        let routing = Routing { scores: Scores::Sigmoid, correction: true, ..PLAIN };
        let found = chosen(routing, &[0.0, 4.0, 3.0, -9.0], Some(&[0.9, 0.0, -2.0, 0.0]));
        assert_close(&found, &[(0, 0.5), (1, 1.0 / (1.0 + (-4.0_f64).exp()))]);
    }

    #[test]
    fn only_the_best_groups_are_chosen_from() {
        let groups = Groups { count: 2, chosen: 1, best_two: false };
        // Each expert of the second group scores lower than the first expert, but two of them more: 2 e^2.5 > e³.
        let logits = [3.0, -9.0, -9.0, 2.5, 2.5, 2.0];
        let experts = |best_two| {
            let routing = Routing { groups: Some(Groups { best_two, ..groups }), ..PLAIN };
            chosen(routing, &logits, None).iter().map(|choice| choice.0).collect::<Vec<_>>()
        };
        assert_eq!(experts(false), [0, 1]);
        assert_eq!(experts(true), [3, 4]);
    }

    /// Gradients of a weighted sum of the weights against central differences, for every kind of scores.
    #[test]
    fn gradients_of_the_weights_match_central_differences() {
        let logits = [0.3_f32, 1.1, -0.4, 0.9, 0.2];
        let factors = [0.7, -1.3, 0.2, 2.1, 0.4];
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxOfChosen, Scores::SqrtSoftplus] {
            for (normalize, scale) in [(false, 1.0), (true, 1.0), (true, 2.5), (false, 0.5)] {
                let routing = Routing { scores, normalize, scale, ..PLAIN };
                let value = |logits: &[f32]| -> f64 {
                    let weighted = chosen(routing, logits, None).into_iter();
                    weighted.map(|(e, w)| f64::from(factors[usize::from(e)]) * f64::from(w)).sum()
                };
                let mut choices = Vec::new();
                route(&routing, 2, &mut logits.to_vec(), None, 0, &mut choices);
                let given: Vec<f32> =
                    choices.iter().map(|choice| factors[usize::from(choice.expert)]).collect();
                let mut gradient = logits;
                route_backward(&routing, &mut gradient, &choices, &given);
                for e in 0..logits.len() {
                    let (mut up, mut down) = (logits, logits);
                    (up[e], down[e]) = (up[e] + 1e-2, down[e] - 1e-2);
                    let slope = (value(&up) - value(&down)) / 2e-2;
                    let found = f64::from(gradient[e]);
                    assert!((found - slope).abs() < 1e-4, "{routing:?} {e}: {found} for {slope}");
                }
            }
        }
    }

    #[test]
    fn tokens_without_numbers_are_routed_somewhere() {
        assert_eq!(chosen(PLAIN, &[f32::NAN; 3], None).len(), 2);
    }
}
