//! Coverage of a model by the calibration set, measured before any layer is solved.
//!
//! A method learns about a layer's inputs only from the calibration tokens. Three gaps remain unseen: an expert that no
//! token is routed to, a channel that is zero in all tokens, and more channels than tokens. The unquantized model runs
//! over the calibration set once. For each input the report says what was seen, and what the method does about a gap.
//! With an in-domain sample it also says how far the calibration set is from it.
//!
//! Models without experts mostly need one window: once every channel of every input was nonzero, more tokens show
//! nothing new. Windows run in steps (one, eight more, the rest) until then. Models with experts run all windows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use mantissa_methods::method::CalibrationGap;
use mantissa_model::{LinearInfo, LinearInput};
use mantissa_store::convention::ModelFiles;

use crate::quality::{Coverage, InputCoverage, Traffic};

use crate::calibrate::{Calibration, CalibrationSet, Tick};
use crate::error::Result;
use crate::fold::Folded;
use crate::plan::Plan;

/// Numbers of windows after which channels are checked; after the last, all windows run.
const STEPS: [usize; 2] = [1, 9];

/// Tokens and channels seen of an input.
struct Seen {
    tokens: u64,
    /// True for channels that were zero so far.
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
    /// Runs the unquantized `source` over the calibration set of `plan`; `None` if the plan does not calibrate. The
    /// result does not depend on the number of threads. `tick` is called after each batch of windows.
    ///
    /// # Errors
    /// Errors of [`Calibration`].
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
            let begun = Calibration::begin(&plain, config, windows, plan.limits())?;
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
            // Without experts every token reaches every input, also tokens of windows that did not run.
            let routed = plan.config.experts.is_some();
            let tokens = if routed { seen.tokens } else { set.tokens() as u64 };
            let channels = info.cols;
            let fallback = fallback(plan, info, (tokens, silent)).map(str::to_owned);
            let (modules, site) = (vec![info.module.clone()], site(key.1).to_owned());
            inputs.push((key, InputCoverage { modules, site, tokens, channels, silent, fallback }));
        }
        inputs.into_iter().map(|(_, input)| input).collect()
    }

    /// Compares the calibration set of `plan` with `traffic`, an in-domain sample as windows of tokens.
    pub fn compare(&mut self, plan: &Plan, traffic: &[Vec<u32>]) {
        self.traffic = plan.text().map(|set| Traffic::between(&set.windows, traffic));
    }

    /// Returns warnings, one line for each kind of gap.
    pub fn warnings(&self) -> Vec<String> {
        let all = self.inputs.len();
        let line = |what: &str, found: &dyn Fn(&InputCoverage) -> Option<String>| {
            let mut on_gap = self.inputs.iter().filter_map(|input| Some((input, found(input)?)));
            let (first, of_first) = on_gap.next()?;
            let (count, done) = (on_gap.count() + 1, first.fallback.as_deref().unwrap_or_default());
            let module = &first.modules[0];
            Some(format!("calibration: {count} of {all} inputs {what}, first {module}{of_first}: {done}"))
        };
        let none = line("are reached by no token", &|input| (input.tokens == 0).then(String::new));
        let few = line("are reached by fewer tokens than they have channels", &|input| {
            // Inputs that all tokens reach are left out: the caller warns once about a small calibration set.
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

/// Returns the kind of an input, as reports name it.
fn site(input: LinearInput) -> &'static str {
    match input {
        LinearInput::Qkv => "q k v",
        LinearInput::O => "o",
        LinearInput::Mixed => "mixer out",
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

/// Returns how the recipe treats an input with a gap; `None` without a gap.
fn fallback(plan: &Plan, info: &LinearInfo, (tokens, silent): (u64, usize)) -> Option<&'static str> {
    let channels = info.cols;
    let few = tokens < channels as u64;
    if !few && silent == 0 {
        return None;
    }
    let unseen = tokens == 0;
    let gap = match () {
        () if unseen => CalibrationGap::Tokens,
        () if silent == channels => CalibrationGap::AllChannels,
        () if few => CalibrationGap::Few,
        () => CalibrationGap::Channels,
    };
    let method_effect = plan.method_of(info).and_then(|method| method.on_gap(gap));
    let transform_effect = plan.job.transform().and_then(|transform| transform.on_gap(gap));
    // If the method calibrates, its behavior decides, else the transform's.
    let found = if plan.needs_of(info).text {
        method_effect.or(transform_effect)
    } else {
        transform_effect.or(method_effect)
    };
    Some(found.unwrap_or(match () {
        () if unseen => "its scale assumes inputs of at most 1",
        () if few => "its statistics are of these tokens only",
        () => "these channels are ignored",
    }))
}

impl Traffic {
    /// Compares `traffic` with `calibration`, both as windows of tokens. Sequences do not cross windows.
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

/// Iterates over sequences of `N` tokens.
fn grams<const N: usize>(windows: &[Vec<u32>]) -> impl Iterator<Item = [u32; N]> + '_ {
    windows.iter().flat_map(|window| window.windows(N).filter_map(|gram| gram.try_into().ok()))
}

/// Returns the share of the sequences of `traffic` that `calibration` does not contain.
fn unseen<const N: usize>(calibration: &[Vec<u32>], traffic: &[Vec<u32>]) -> f64 {
    let known: HashSet<[u32; N]> = grams(calibration).collect();
    let (mut all, mut new) = (0u64, 0u64);
    for gram in grams::<N>(traffic) {
        all += 1;
        new += u64::from(!known.contains(&gram));
    }
    new as f64 / all.max(1) as f64
}

/// Returns the Jensen-Shannon distance between the distributions of sequences.
fn distance<const N: usize>(a: &[Vec<u32>], b: &[Vec<u32>]) -> f64 {
    let (a, b) = (counts(grams::<N>(a)), counts(grams::<N>(b)));
    let total = |counts: &HashMap<[u32; N], u64>| counts.values().sum::<u64>().max(1) as f64;
    let (in_a, in_b) = (total(&a), total(&b));
    // Summed in sorted order, so that the result has the same bits every time.
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
    fn distances_match_hand_computed_values() {
        let same = vec![vec![1, 2, 3, 1], vec![2, 3]];
        let found = Traffic::between(&same, &same);
        assert_eq!((found.tokens, found.unseen, found.distance), (6, [0.0; 3], [0.0; 2]));
        // Nothing in common.
        let found = Traffic::between(&same, &[vec![7, 8, 9]]);
        assert_eq!(found.unseen, [1.0; 3]);
        assert!(found.distance.iter().all(|distance| (distance - 1.0).abs() < 1e-12), "{found:?}");
        // 1 of 4 tokens is new (4), 2 of 3 pairs, and both triples.
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
    fn a_channel_is_silent_until_it_is_nonzero() {
        let mut seen = Seen::new(3);
        seen.add(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        let mut more = Seen::new(3);
        more.add(&[-1.0, 0.0, 0.0]);
        seen.merge(&more);
        assert_eq!((seen.tokens, seen.silent), (3, vec![false, true, false]));
    }
}
