//! What a calibration shows of a model, found before anything is solved on it.
//!
//! A method knows a layer's inputs by the tokens that it is given. What these leave out it cannot know: an expert that no token is
//! routed to, a channel that is zero in all of them, more channels than tokens. The unquantized model runs over the calibration once
//! and says of every input what it saw, and what the method does where that is not enough; of a text that stands for the traffic to
//! come, how far the calibration is from it.
//!
//! Models without experts need one window in most cases: once every channel of every input was other than zero, more tokens show
//! nothing new, and windows are run (one, eight more, the rest) only until then. Experts are counted on all of them.

pub(crate) mod report;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use mantissa_methods::method::Lack;
use mantissa_model::LinearInput;
use mantissa_store::convention::ModelFiles;

pub use report::{Coverage, InputCoverage, Traffic};

use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::Result;
use crate::fold::Folded;
use crate::plan::Plan;

/// Windows that are run before it is asked whether every channel was seen, in steps; after the last, all.
const STEPS: [usize; 2] = [1, 9];

/// Channels and tokens seen of an input.
struct Seen {
    tokens: u64,
    /// By channel: zero so far.
    silent: Vec<bool>,
}

impl Seen {
    fn new(width: usize) -> Self {
        Seen { tokens: 0, silent: vec![true; width] }
    }

    fn add(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.silent.len().max(1)) {
            self.tokens += 1;
            self.silent.iter_mut().zip(row).for_each(|(silent, v)| *silent &= *v == 0.0);
        }
    }

    fn merge(&mut self, other: &Seen) {
        self.tokens += other.tokens;
        self.silent.iter_mut().zip(&other.silent).for_each(|(silent, other)| *silent &= *other);
    }
}

impl Coverage {
    /// Runs the unquantized `source` over what `plan` calibrates on; `None` where it does not. The result does not depend on threads.
    /// `tick` is asked after every window of each thread whether to go on.
    ///
    /// # Errors
    /// As [`Calibration`].
    pub fn find(plan: &Plan, source: &ModelFiles, tick: &mut Tick<'_>) -> Result<Option<Self>> {
        let Some(set) = plan.text() else { return Ok(None) };
        let (config, plain) = (&plan.config, Folded::plain(source));
        let mut seen: BTreeMap<(usize, LinearInput), Seen> = BTreeMap::new();
        let (mut first, mut tokens_run) = (0, 0);
        for end in STEPS.into_iter().filter(|_| config.experts.is_none()).chain([set.windows.len()]) {
            let windows = &set.windows[first..end.clamp(first, set.windows.len())];
            if windows.iter().all(Vec::is_empty) {
                continue;
            }
            let begun = Calibration::begin(&plain, config, windows, plan.threads())?;
            let mut calibration = begun.in_products(plan.options.products);
            while let Some(layer) = calibration.next_layer()? {
                let kinds = config.layer_linears(layer.index()).into_iter().map(|info| info.kind);
                for (input, new) in calibration.fold(&layer, kinds, true, tick, (Seen::new, Seen::add))? {
                    let all = seen.entry((layer.index(), input));
                    all.or_insert_with(|| Seen::new(new.silent.len())).merge(&new);
                }
            }
            first += windows.len();
            tokens_run += windows.iter().map(|tokens| tokens.len() as u64).sum::<u64>();
            if config.experts.is_none() && seen.values().all(|seen| !seen.silent.contains(&true)) {
                break;
            }
        }
        let inputs = Self::inputs(plan, set, &seen);
        let tokens = set.tokens() as u64;
        Ok(Some(Coverage { windows: set.windows.len(), tokens, tokens_run, inputs, traffic: None }))
    }

    fn inputs(
        plan: &Plan,
        set: &CalibrationSet,
        seen: &BTreeMap<(usize, LinearInput), Seen>,
    ) -> Vec<InputCoverage> {
        let mut inputs: Vec<((usize, LinearInput), InputCoverage)> = Vec::new();
        for (info, _) in plan.quantized() {
            let key = (info.layer, info.kind.input());
            if let Some((_, known)) = inputs.iter_mut().rev().find(|(of, _)| *of == key) {
                known.modules.push(info.module.clone());
                continue;
            }
            let Some(seen) = seen.get(&key) else { continue };
            let silent = seen.silent.iter().filter(|silent| **silent).count();
            // Where fewer windows than all were run, every token reaches every input.
            let routed = plan.config.experts.is_some();
            let tokens = if routed { seen.tokens } else { set.tokens() as u64 };
            let channels = info.cols;
            let fallback = fallback(plan, tokens, channels, silent).map(str::to_owned);
            let (modules, site) = (vec![info.module.clone()], site(key.1).to_owned());
            inputs.push((key, InputCoverage { modules, site, tokens, channels, silent, fallback }));
        }
        inputs.into_iter().map(|(_, input)| input).collect()
    }

    /// Compares the calibration that `plan` has with `traffic`, windows of the model's tokens.
    pub fn compare(&mut self, plan: &Plan, traffic: &[Vec<u32>]) {
        self.traffic = plan.text().map(|set| Traffic::between(&set.windows, traffic));
    }

    /// Warnings, one line for each kind of gap.
    pub fn warnings(&self) -> Vec<String> {
        let all = self.inputs.len();
        let line = |what: &str, found: &dyn Fn(&InputCoverage) -> Option<String>| {
            let mut lacking = self.inputs.iter().filter_map(|input| Some((input, found(input)?)));
            let (first, of_first) = lacking.next()?;
            let (count, done) = (lacking.count() + 1, first.fallback.as_deref().unwrap_or_default());
            let module = &first.modules[0];
            Some(format!(
                "calibration: {count} of {all} inputs {what}, the first that of {module}{of_first}: {done}"
            ))
        };
        let none = line("are reached by no token", &|input| (input.tokens == 0).then(String::new));
        let few = line("are reached by fewer tokens than they have channels", &|input| {
            // Those that all tokens reach are spoken of once for the whole model.
            let few = input.tokens > 0 && input.tokens < self.tokens && input.tokens < input.channels as u64;
            few.then(|| format!(" ({} for {})", input.tokens, input.channels))
        });
        let silent = line("have channels that are zero in every token", &|input| {
            let some = input.tokens > 0 && input.silent > 0;
            some.then(|| format!(" ({} of {})", input.silent, input.channels))
        });
        [none, few, silent].into_iter().flatten().collect()
    }
}

/// Kind of the input.
fn site(input: LinearInput) -> &'static str {
    match input {
        LinearInput::Qkv => "q k v",
        LinearInput::O => "o",
        LinearInput::GateUp => "gate up",
        LinearInput::Down => "down",
        LinearInput::QLatent => "q latent",
        LinearInput::KvLatent => "kv latent",
        LinearInput::Expert(_) => "expert gate up",
        LinearInput::ExpertDown(_) => "expert down",
        LinearInput::SharedDown => "shared down",
        _ => "other",
    }
}

/// Behaviour of the recipe for an input with a gap.
fn fallback(plan: &Plan, tokens: u64, channels: usize, silent: usize) -> Option<&'static str> {
    let few = tokens < channels as u64;
    if !few && silent == 0 {
        return None;
    }
    let unseen = tokens == 0;
    let lack = match () {
        () if unseen => Lack::Tokens,
        () if silent == channels => Lack::AllChannels,
        () if few => Lack::Few,
        () => Lack::Channels,
    };
    let of_method = plan.job.recipe().and_then(|recipe| recipe.method.lacking(lack));
    let of_transform = plan.job.transform().and_then(|transform| transform.lacking(lack));
    // A method that calibrates by itself has the last word.
    let found = if plan.job.needs().text { of_method.or(of_transform) } else { of_transform.or(of_method) };
    Some(found.unwrap_or(match () {
        () if unseen => "what is found on it is as of inputs of 1",
        () if few => "what is found on it is of these tokens",
        () => "they do not count",
    }))
}

impl Traffic {
    /// Compares `traffic` with `calibration`, windows of tokens. Sequences do not cross the ends of windows.
    pub fn between(calibration: &[Vec<u32>], traffic: &[Vec<u32>]) -> Self {
        Traffic {
            tokens: traffic.iter().map(|window| window.len() as u64).sum(),
            unseen: [
                unseen::<1>(calibration, traffic),
                unseen::<2>(calibration, traffic),
                unseen::<3>(calibration, traffic),
            ],
            distance: [distance::<1>(calibration, traffic), distance::<2>(calibration, traffic)],
        }
    }
}

/// Sequences of `N` tokens.
fn grams<const N: usize>(windows: &[Vec<u32>]) -> impl Iterator<Item = [u32; N]> + '_ {
    windows.iter().flat_map(|window| window.windows(N).filter_map(|gram| gram.try_into().ok()))
}

/// The share of the sequences of `traffic` that `calibration` has not.
fn unseen<const N: usize>(calibration: &[Vec<u32>], traffic: &[Vec<u32>]) -> f64 {
    let known: HashSet<[u32; N]> = grams(calibration).collect();
    let (mut all, mut new) = (0u64, 0u64);
    for gram in grams::<N>(traffic) {
        all += 1;
        new += u64::from(!known.contains(&gram));
    }
    new as f64 / all.max(1) as f64
}

/// The Jensen-Shannon distance of the distributions of sequences.
fn distance<const N: usize>(a: &[Vec<u32>], b: &[Vec<u32>]) -> f64 {
    let (a, b) = (counts(grams::<N>(a)), counts(grams::<N>(b)));
    let total = |counts: &HashMap<[u32; N], u64>| counts.values().sum::<u64>().max(1) as f64;
    let (in_a, in_b) = (total(&a), total(&b));
    // In the order of the sequences: a sum has the same bits every time.
    let mut keys: Vec<&[u32; N]> = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))).collect();
    keys.sort_unstable();
    let term = |p: f64, m: f64| if p > 0.0 { p * (p / m).log2() } else { 0.0 };
    let divergence: f64 = keys
        .into_iter()
        .map(|key| {
            let p = a.get(key).map_or(0.0, |n| *n as f64 / in_a);
            let q = b.get(key).map_or(0.0, |n| *n as f64 / in_b);
            let m = (p + q) / 2.0;
            (term(p, m) + term(q, m)) / 2.0
        })
        .sum();
    divergence.clamp(0.0, 1.0).sqrt()
}

fn counts<K: Eq + Hash>(all: impl Iterator<Item = K>) -> HashMap<K, u64> {
    let mut counts = HashMap::new();
    all.for_each(|key| *counts.entry(key).or_default() += 1);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_as_far_as_its_tokens_say() {
        let same = vec![vec![1, 2, 3, 1], vec![2, 3]];
        let found = Traffic::between(&same, &same);
        assert_eq!((found.tokens, found.unseen, found.distance), (6, [0.0; 3], [0.0; 2]));
        // Nothing in common.
        let found = Traffic::between(&same, &[vec![7, 8, 9]]);
        assert_eq!(found.unseen, [1.0; 3]);
        assert!(found.distance.iter().all(|distance| (distance - 1.0).abs() < 1e-12), "{found:?}");
        // 4 is new; of the pairs (1, 2), (2, 4), (4, 1) two are; of the triples both.
        let found = Traffic::between(&same, &[vec![1, 2, 4, 1]]);
        assert_eq!(found.unseen, [0.25, 2.0 / 3.0, 1.0]);
        // p = (1/3, 1/3, 1/3, 0), q = (1/2, 1/4, 0, 1/4): by hand.
        let term = |p: f64, m: f64| p * (p / m).log2();
        let p_to_m = term(1.0 / 3.0, 5.0 / 12.0) + term(1.0 / 3.0, 7.0 / 24.0) + term(1.0 / 3.0, 1.0 / 6.0);
        let q_to_m = term(0.5, 5.0 / 12.0) + term(0.25, 7.0 / 24.0) + term(0.25, 0.125);
        assert!((found.distance[0].powi(2) - (p_to_m + q_to_m) / 2.0).abs() < 1e-12);
        // Sequences end with their windows.
        assert_eq!(Traffic::between(&[vec![1], vec![2]], &[vec![1, 2]]).unseen, [0.0, 1.0, 0.0]);
    }

    #[test]
    fn a_channel_speaks_once_it_is_not_zero() {
        let mut seen = Seen::new(3);
        seen.add(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        let mut more = Seen::new(3);
        more.add(&[-1.0, 0.0, 0.0]);
        seen.merge(&more);
        assert_eq!((seen.tokens, seen.silent), (3, vec![false, true, false]));
    }
}
