//! Parts of a model that do not learn in a training run, step by step: for warnings when it happens, for the log, and for the outcome.
//!
//! A log line tells it only where it changed, so that a resumed run, the report and the autopsy read it from the log.

use std::collections::{BTreeMap, BTreeSet};

use mantissa_train::{LostOperand, LostUpdates, StepSignals};
use serde::{Deserialize, Serialize};

/// Names of parameters and operands in a log line; more are counted only.
const MOST_NAMED: usize = 1000;

/// Parameters and operands that do not learn from a step on, until another log line tells it anew.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NotLearning {
    /// Number of parameters that train.
    pub parameters: usize,
    /// Number of them whose gradient is 0 throughout.
    #[serde(default)]
    pub without_gradient: usize,
    /// Their names, in the order of the backward.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead: Vec<String>,
    /// Operands that lost their signal, in the order of the step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostOperand>,
    /// Number of matrices whose updates change next to no weight.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub without_update: usize,
    /// Their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost_updates: Vec<String>,
    /// Number of these matrices whose updates are all 0; those of the others are lost when the weights are rounded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero_updates: usize,
}

/// True for the default of a count, which log lines leave out.
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Experts of a layer that no token has chosen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusedExperts {
    /// Layer index.
    pub layer: usize,
    /// Indices of the experts.
    pub experts: Vec<usize>,
}

/// Part of a log line about learning, and a warning if something ceased to learn for the first time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// Parts that do not learn, if they are others than in the step before.
    pub not_learning: Option<NotLearning>,
    /// Experts that no token has chosen so far, if these are others.
    pub unused: Option<Vec<UnusedExperts>>,
    /// Warning of what ceased to learn for the first time.
    pub warning: Option<String>,
}

/// Steps in which a parameter had no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// The first of them.
    pub first_step: u64,
    /// The last of them.
    pub last_step: u64,
    /// Their number.
    pub steps: u64,
}

/// Learning of a run so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Learning {
    now: NotLearning,
    /// Last step, steps, and those of them that updated the weights.
    last: u64,
    steps: u64,
    updates: u64,
    /// Steps in which each parameter had no gradient.
    dead: BTreeMap<String, Span>,
    /// Operands that lost their signal, with the first step.
    lost: Vec<(u64, LostOperand)>,
    /// Matrices whose updates were lost.
    lost_updates: BTreeSet<String>,
    unused: Option<Vec<UnusedExperts>>,
    /// Loss of the first step, and the last smoothed one.
    losses: Option<(f64, f64)>,
}

/// Rise of the smoothed loss over the first one, in nats/token, from which on a run that ends above its start went wrong:
/// random weights are at most that far above the entropy of their tokens, and a run that learns nothing stays below.
const RISEN: f64 = 0.5;

/// Parameter without a gradient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeadParameter {
    /// Name.
    pub parameter: String,
    /// Steps without a gradient.
    #[serde(flatten)]
    pub span: Span,
}

/// Learning of a run in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LearningReport {
    /// Number of parameters that train.
    pub parameters: usize,
    /// Steps that updated the weights.
    pub updates: u64,
    /// Parameters that had no gradient in some steps.
    pub dead: Vec<DeadParameter>,
    /// Operands that lost their signal.
    pub lost: Vec<LostOperand>,
    /// Matrices whose updates changed next to no weight.
    pub lost_updates: BTreeSet<String>,
    /// Experts that no token chose in the run.
    pub unused_experts: Vec<UnusedExperts>,
}

impl Learning {
    /// Compares what the watch of step `step` saw with the step before. What telemetry measured holds until it measures again.
    pub fn observe(&self, step: u64, signals: &StepSignals) -> Change {
        let mut lost = signals.lost.clone();
        if !signals.measured {
            // An operand that became 0 is seen in every step; the others stay as they were.
            let is_other = |known: &&LostOperand| {
                known.sqnr_db.is_some_and(|db| db != 0.0) && !lost.iter().any(|lost| is_same(lost, known))
            };
            let others: Vec<_> = self.now.lost.iter().filter(is_other).cloned().collect();
            lost.extend(others);
        }
        lost.truncate(MOST_NAMED);
        let mut dead = signals.dead.clone();
        dead.truncate(MOST_NAMED);
        let (without_update, zero_updates, lost_updates) = match &signals.lost_updates {
            Some(LostUpdates { rounded, zero }) => {
                let names = rounded.iter().chain(zero).take(MOST_NAMED).cloned().collect();
                (rounded.len() + zero.len(), zero.len(), names)
            }
            None => (self.now.without_update, self.now.zero_updates, self.now.lost_updates.clone()),
        };
        let now = NotLearning {
            parameters: signals.parameters,
            without_gradient: signals.dead.len(),
            dead,
            lost,
            without_update,
            zero_updates,
            lost_updates,
        };
        let unused = self.unused_after(signals);
        Change {
            warning: self.warning(step, &now),
            not_learning: self.is_change(&now).then_some(now),
            unused: unused.filter(|unused| self.unused.as_ref() != Some(unused)),
        }
    }

    /// Adds a step of the log.
    pub fn add(
        &mut self,
        step: u64,
        updated: bool,
        change: (Option<&NotLearning>, Option<&[UnusedExperts]>),
    ) {
        self.steps += 1;
        self.last = step;
        if let (Some(now), _) = change {
            self.now = now.clone();
        }
        if let (_, Some(unused)) = change {
            self.unused = Some(unused.to_vec());
        }
        if !updated {
            return;
        }
        self.updates += 1;
        for name in &self.now.dead {
            let span =
                self.dead.entry(name.clone()).or_insert(Span { first_step: step, last_step: step, steps: 0 });
            (span.last_step, span.steps) = (step, span.steps + 1);
        }
        self.lost_updates.extend(self.now.lost_updates.iter().cloned());
        for operand in &self.now.lost {
            if !self.lost.iter().any(|(_, known)| is_same(known, operand)) {
                self.lost.push((step, operand.clone()));
            }
        }
    }

    /// Adds the loss of a step, and the smoothed one.
    pub fn add_loss(&mut self, loss: f64, smoothed: f64) {
        let first = self.losses.map_or(loss, |(first, _)| first);
        self.losses = Some((first, smoothed));
    }

    /// True if something ceased to learn, or the loss rose.
    pub fn is_failing(&self) -> bool {
        self.has_ceased() || self.rise().is_some()
    }

    /// True if something has no gradient, or lost its signal, in the last step.
    pub fn has_ceased(&self) -> bool {
        !self.now.dead.is_empty() || !self.now.lost.is_empty()
    }

    /// Returns the first loss and the last smoothed one, if the run is above its start by more than one that learns nothing.
    pub fn rise(&self) -> Option<(f64, f64)> {
        self.losses.filter(|(first, last)| *last > first + RISEN)
    }

    /// Returns the first operand that has lost its signal now.
    pub fn first_lost(&self) -> Option<&LostOperand> {
        self.now.lost.first()
    }

    /// Returns the number of matrices whose updates are lost when the weights are rounded now, and of those whose updates are all 0.
    pub fn lost_updates(&self) -> (usize, usize) {
        (self.now.without_update.saturating_sub(self.now.zero_updates), self.now.zero_updates)
    }

    /// Says in a sentence what did not learn; `None` if all did.
    pub fn summary(&self) -> Option<String> {
        let mut parts = Vec::new();
        let all = self.now.parameters;
        if self.steps > 0 && self.updates == 0 {
            parts.push("no step updated the weights: every gradient overflowed".to_owned());
        } else if let (now @ 1.., first) = (self.now.without_gradient, self.now.dead.first()) {
            let first = first.map_or("", String::as_str);
            let since = self.dead.get(first).map_or(self.last, |span| span.first_step);
            parts.push(format!(
                "{now} of {all} parameters stopped learning: their gradient is 0 in step {} (first: {first}, since step {since})",
                self.last
            ));
        } else if let Some((name, span)) = self.dead.iter().max_by_key(|(_, span)| span.steps) {
            parts.push(format!(
                "{} of {all} parameters had a gradient of 0 at times (most often: {name}, in {} of {} steps)",
                self.dead.len(),
                span.steps,
                self.updates
            ));
        }
        parts.extend(told_of_lost(&self.lost.iter().map(|(_, lost)| lost).collect::<Vec<_>>()));
        parts.extend(told_of_updates(&self.now, self.now.lost_updates.first()));
        let risen =
            |(first, last): (f64, f64)| format!("the loss rose from {first:.3} to {last:.3} (smoothed)");
        parts.extend(self.rise().map(risen));
        let unused: usize = self.unused.iter().flatten().map(|layer| layer.experts.len()).sum();
        if let Some(first) = self.unused.iter().flatten().find(|layer| !layer.experts.is_empty()) {
            let experts = if unused == 1 { "expert" } else { "experts" };
            parts.push(format!(
                "no token chose {unused} {experts} in the run (first: expert {} of layer {})",
                first.experts[0], first.layer
            ));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Returns the numbers of a run that trains so many `parameters`.
    pub fn report(&self, parameters: usize) -> LearningReport {
        let dead = self.dead.iter();
        let dead = dead.map(|(name, span)| DeadParameter { parameter: name.clone(), span: *span });
        LearningReport {
            parameters,
            updates: self.updates,
            dead: dead.collect(),
            lost: self.lost.iter().map(|(_, lost)| lost.clone()).collect(),
            lost_updates: self.lost_updates.clone(),
            unused_experts: self
                .unused
                .iter()
                .flatten()
                .filter(|layer| !layer.experts.is_empty())
                .cloned()
                .collect(),
        }
    }

    /// True if `now` is worth a log line: it is other than before, but for the ratios of operands.
    fn is_change(&self, now: &NotLearning) -> bool {
        let places = |state: &NotLearning| {
            state.lost.iter().map(|lost| (lost.linear.clone(), lost.operand.clone())).collect::<Vec<_>>()
        };
        let found = |state: &NotLearning| {
            state.without_gradient > 0 || state.without_update > 0 || !state.lost.is_empty()
        };
        let parts = |state: &NotLearning| (state.without_gradient, state.without_update, places(state));
        (found(now) || found(&self.now))
            && (parts(now) != parts(&self.now)
                || now.dead != self.now.dead
                || now.zero_updates != self.now.zero_updates
                || now.lost_updates != self.now.lost_updates)
    }

    /// Experts that were chosen neither before nor in this step; `None` in a model without experts.
    fn unused_after(&self, signals: &StepSignals) -> Option<Vec<UnusedExperts>> {
        if signals.idle.is_empty() {
            return None;
        }
        let left = |(layer, idle): &(usize, Vec<usize>)| {
            let before = self.unused.iter().flatten().find(|unused| unused.layer == *layer);
            let was_unused = |expert: &usize| {
                self.unused.is_none() || before.is_some_and(|unused| unused.experts.contains(expert))
            };
            UnusedExperts { layer: *layer, experts: idle.iter().copied().filter(was_unused).collect() }
        };
        Some(signals.idle.iter().map(left).filter(|layer| !layer.experts.is_empty()).collect())
    }

    fn warning(&self, step: u64, now: &NotLearning) -> Option<String> {
        let new: Vec<&String> = now.dead.iter().filter(|name| !self.dead.contains_key(*name)).collect();
        let is_new = |lost: &&LostOperand| !self.lost.iter().any(|(_, known)| is_same(known, lost));
        let lost: Vec<&LostOperand> = now.lost.iter().filter(is_new).collect();
        let dead = new.first().map(|first| {
            let count = if new.len() == now.dead.len() { now.without_gradient } else { new.len() };
            format!("{count} of {} parameters have a gradient of 0 (first: {first})", now.parameters)
        });
        let updates = now.lost_updates.iter().find(|name| !self.lost_updates.contains(*name));
        let updates = told_of_updates(now, updates);
        let parts: Vec<String> = dead.into_iter().chain(told_of_lost(&lost)).chain(updates).collect();
        (!parts.is_empty()).then(|| format!("step {step}: {}", parts.join("; ")))
    }
}

/// Says which operands lost their signal.
fn told_of_lost(lost: &[&LostOperand]) -> Option<String> {
    let first = lost.first()?;
    let LostOperand { linear, operand, format, sqnr_db } = first;
    let ratio = sqnr_db.map_or_else(String::new, |db| format!(", SQNR {db:.1} dB"));
    let count = match lost.len() {
        1 => "1 operand".to_owned(),
        n => format!("{n} operands"),
    };
    Some(format!("{count} lost the signal in rounding (first: {linear}, {operand} in {format}{ratio})"))
}

/// Says of how many parameters updates change no weight, if there is a `first`.
fn told_of_updates(now: &NotLearning, first: Option<&String>) -> Option<String> {
    let (first, NotLearning { parameters, without_update, zero_updates, .. }) = (first?, now);
    let how = if zero_updates == without_update { "are all 0" } else { "change next to no weight" };
    Some(format!("the updates of {without_update} of {parameters} parameters {how} (first: {first})"))
}

fn is_same(a: &LostOperand, b: &LostOperand) -> bool {
    (&a.linear, &a.operand) == (&b.linear, &b.operand)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn signals(dead: &[&str]) -> StepSignals {
        StepSignals { parameters: 5, dead: owned(dead), ..StepSignals::default() }
    }

    /// Runs steps and returns the learning with the warnings and the number of log lines that tell something.
    fn run(steps: &[StepSignals]) -> (Learning, Vec<String>, usize) {
        let (mut learning, mut warnings, mut lines) = (Learning::default(), Vec::new(), 0);
        for (i, signals) in steps.iter().enumerate() {
            let step = i as u64 + 1;
            let change = learning.observe(step, signals);
            warnings.extend(change.warning);
            lines += usize::from(change.not_learning.is_some());
            learning.add(step, true, (change.not_learning.as_ref(), change.unused.as_deref()));
        }
        (learning, warnings, lines)
    }

    #[test]
    fn a_run_that_learns_says_nothing() {
        let (learning, warnings, lines) = run(&[signals(&[]), signals(&[])]);
        assert_eq!((learning.summary(), warnings.len(), lines), (None, 0, 0));
        assert_eq!(learning.report(5).updates, 2);
    }

    #[test]
    fn a_run_that_ends_above_its_start_has_failed() {
        let (mut learning, ..) = run(&[signals(&[])]);
        learning.add_loss(6.9, 6.9);
        learning.add_loss(7.3, 7.2);
        assert_eq!((learning.summary(), learning.is_failing()), (None, false));
        learning.add_loss(90.0, 15.5);
        assert_eq!(learning.summary().unwrap(), "the loss rose from 6.900 to 15.500 (smoothed)");
        assert!(learning.is_failing() && !learning.has_ceased());
    }

    #[test]
    fn each_parameter_is_warned_of_once_and_the_log_tells_changes_only() {
        let (learning, warnings, lines) =
            run(&[signals(&["b", "a"]), signals(&["b", "a"]), signals(&["c", "b", "a"]), signals(&["b"])]);
        assert_eq!(
            warnings,
            [
                "step 1: 2 of 5 parameters have a gradient of 0 (first: b)",
                "step 3: 1 of 5 parameters have a gradient of 0 (first: c)"
            ]
        );
        assert_eq!(lines, 3);
        let summary = learning.summary().unwrap();
        assert!(
            summary.starts_with("1 of 5 parameters stopped learning")
                && summary.ends_with("(first: b, since step 1)"),
            "{summary}"
        );
        let spans: Vec<_> =
            learning.report(5).dead.iter().map(|dead| (dead.parameter.clone(), dead.span.steps)).collect();
        assert_eq!(spans, [("a".to_owned(), 3), ("b".to_owned(), 4), ("c".to_owned(), 1)]);
    }

    /// A gradient that came back is told too, in other words.
    #[test]
    fn parameters_that_learn_again_are_told() {
        let (learning, ..) = run(&[signals(&["a"]), signals(&["a"]), signals(&[])]);
        let summary = learning.summary().unwrap();
        assert_eq!(
            summary,
            "1 of 5 parameters had a gradient of 0 at times (most often: a, in 2 of 3 steps)"
        );
        assert!(!learning.is_failing());
    }

    #[test]
    fn a_run_that_skipped_every_step_learned_nothing() {
        let mut learning = Learning::default();
        (1..4).for_each(|step| learning.add(step, false, (None, None)));
        assert!(learning.summary().unwrap().starts_with("no step updated the weights"));
    }

    /// Updates are looked for in some steps; what was found holds until the next look.
    #[test]
    fn lost_updates_are_told_and_stay_between_looks() {
        let of = |lost: Option<&[&str]>| StepSignals {
            lost_updates: lost.map(|names| LostUpdates { rounded: owned(names), zero: Vec::new() }),
            ..signals(&[])
        };
        let (learning, warnings, lines) =
            run(&[of(None), of(Some(&["a", "b"])), of(None), of(Some(&["a", "b"])), of(None)]);
        let told = "the updates of 2 of 5 parameters change next to no weight (first: a)";
        assert_eq!((warnings, lines), (vec![format!("step 2: {told}")], 1));
        assert_eq!(learning.summary().as_deref(), Some(told));
        assert_eq!(learning.report(5).lost_updates, ["a", "b"].map(str::to_owned).into());
        assert!(!learning.is_failing(), "no operand is at fault");
        let (learning, warnings, lines) = run(&[of(Some(&["a"])), of(Some(&[])), of(Some(&["b"]))]);
        assert_eq!((warnings.len(), lines), (2, 3));
        assert!(
            learning.summary().unwrap().ends_with("1 of 5 parameters change next to no weight (first: b)")
        );
        let (learning, ..) = run(&[of(Some(&["a"])), of(Some(&[]))]);
        assert_eq!((learning.summary(), learning.lost_updates()), (None, (0, 0)));
    }

    #[test]
    fn updates_of_0_are_told_apart_from_those_lost_in_rounding() {
        let of = |rounded: &[&str], zero: &[&str]| StepSignals {
            lost_updates: Some(LostUpdates { rounded: owned(rounded), zero: owned(zero) }),
            ..signals(&[])
        };
        let (learning, warnings, _) = run(&[of(&[], &["a", "b"])]);
        assert_eq!(warnings, ["step 1: the updates of 2 of 5 parameters are all 0 (first: a)"]);
        assert_eq!(learning.lost_updates(), (0, 2));
        let (learning, warnings, lines) = run(&[of(&["b"], &["a"]), signals(&[])]);
        let told = "step 1: the updates of 2 of 5 parameters change next to no weight (first: b)";
        assert_eq!((warnings, lines), (vec![told.to_owned()], 1));
        assert_eq!(learning.lost_updates(), (1, 1));
    }

    #[test]
    fn experts_that_were_chosen_once_are_used() {
        let of = |idle: &[usize]| StepSignals { idle: vec![(1, idle.to_vec())], ..signals(&[]) };
        let (learning, warnings, _) = run(&[of(&[0, 2, 3]), of(&[1, 2]), of(&[0, 1, 2, 3])]);
        assert_eq!(learning.report(5).unused_experts, [UnusedExperts { layer: 1, experts: vec![2] }]);
        assert_eq!(
            learning.summary().unwrap(),
            "no token chose 1 expert in the run (first: expert 2 of layer 1)"
        );
        assert!(warnings.is_empty());
        let (learning, ..) = run(&[of(&[0, 2, 3]), of(&[1])]);
        assert_eq!(learning.summary(), None);
    }

    /// Checks that a measurement of telemetry holds until the next measurement; what became 0 is seen in every step.
    #[test]
    fn lost_operands_stay_between_measurements() {
        let lost = |sqnr_db| LostOperand {
            linear: "m.q".to_owned(),
            operand: "fprop x".to_owned(),
            format: "int8-tensor".to_owned(),
            sqnr_db,
        };
        let of =
            |found: &[LostOperand], measured| StepSignals { lost: found.to_vec(), measured, ..signals(&[]) };
        let mut learning = Learning::default();
        let mut step = |n: u64, signals: StepSignals| {
            let change = learning.observe(n, &signals);
            learning.add(n, true, (change.not_learning.as_ref(), None));
            (change.not_learning.map(|now| now.lost), change.warning.is_some())
        };
        let weak = lost(Some(0.4));
        assert_eq!(step(1, of(std::slice::from_ref(&weak), true)), (Some(vec![weak]), true));
        assert_eq!(step(2, of(&[], false)), (None, false), "unchanged");
        assert_eq!(step(3, of(&[], true)), (Some(Vec::new()), false));
        assert_eq!(step(4, of(&[], false)), (None, false));
        // One that became 0 needs no measurement, and is back without one.
        assert_eq!(
            step(5, of(&[lost(None)], false)),
            (Some(vec![lost(None)]), false),
            "it was told in step 1"
        );
        assert_eq!(step(6, of(&[], false)), (Some(Vec::new()), false));
        assert!(
            learning
                .summary()
                .unwrap()
                .contains("1 operand lost the signal in rounding (first: m.q, fprop x")
        );
    }
}
