//! Accuracies with standard errors, and the answers that changed against a reference.

use serde::{Deserialize, Serialize};

use super::Item;
use super::run::Answer;
use crate::stats::{Estimate, Sum, estimate};

/// Accuracy on some items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Number of items.
    pub items: usize,
    /// Share of right answers.
    pub accuracy: f64,
    /// Standard error of `accuracy`; absent for a single item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy_se: Option<f64>,
    /// Share of right answers by log-likelihood per character; absent without choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy_norm: Option<f64>,
    /// Standard error of `accuracy_norm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy_norm_se: Option<f64>,
    /// Accuracy of guessing.
    pub chance: f64,
    /// Mean of `-ln p` of the right choice, nats; absent without choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_nll: Option<f64>,
    /// Comparison with the reference, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Compared>,
}

/// Paired comparison with the answers of a reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Accuracy of the reference.
    pub accuracy: f64,
    /// Accuracy minus the reference's.
    pub delta_accuracy: f64,
    /// Paired standard error of `delta_accuracy`; absent for a single item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_accuracy_se: Option<f64>,
    /// Answers that are right and were wrong.
    pub gained: usize,
    /// Answers that are wrong and were right.
    pub lost: usize,
    /// Answers that differ from the reference's, right or wrong.
    pub changed: usize,
    /// Mean `-ln p` of the right choice minus the reference's, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_answer_nll: Option<f64>,
    /// Paired standard error of `delta_answer_nll`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_answer_nll_se: Option<f64>,
}

/// Item whose answer became right or wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flip {
    /// Name of the item.
    pub id: String,
    /// True if the model is right and the reference is not.
    pub gained: bool,
    /// Answer of the model.
    pub model: Answer,
    /// Answer of the reference.
    pub reference: Answer,
}

/// Score of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the group.
    pub group: String,
    /// Its score.
    #[serde(flatten)]
    pub score: Score,
}

/// Result of a task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskSummary {
    /// Score of all items.
    #[serde(flatten)]
    pub score: Score,
    /// Score of each group, in order of first appearance.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
    /// Answers that became right or wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flips: Vec<Flip>,
}

/// Summarizes the answers to `items`, compared with a reference's if given.
pub fn summary(items: &[Item], answers: &[Answer], reference: Option<&[Answer]>) -> TaskSummary {
    let of = |chosen: &[usize]| score(items, answers, reference, chosen);
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let Some(name) = &item.group else { continue };
        match groups.iter_mut().find(|(known, _)| known == name) {
            Some((_, members)) => members.push(i),
            None => groups.push((name.clone(), vec![i])),
        }
    }
    let all: Vec<usize> = (0..items.len()).collect();
    let groups = groups.into_iter().map(|(group, members)| Group { group, score: of(&members) }).collect();
    let flips = reference.map_or_else(Vec::new, |reference| flips(items, answers, reference));
    TaskSummary { score: of(&all), groups, flips }
}

fn flips(items: &[Item], answers: &[Answer], reference: &[Answer]) -> Vec<Flip> {
    let pairs = items.iter().zip(answers.iter().zip(reference));
    let flipped = pairs.filter(|(_, (model, reference))| model.correct != reference.correct);
    let flip = |(item, (model, reference)): (&Item, (&Answer, &Answer))| Flip {
        id: item.id.clone(),
        gained: model.correct,
        model: model.clone(),
        reference: reference.clone(),
    };
    flipped.map(flip).collect()
}

fn score(items: &[Item], answers: &[Answer], reference: Option<&[Answer]>, chosen: &[usize]) -> Score {
    let right = |answer: &Answer| Some(truth(answer.correct));
    let norm = |answer: &Answer| answer.correct_norm.map(truth);
    let accuracy = mean(chosen, |i| right(&answers[i]));
    let accuracy_norm = mean(chosen, |i| norm(&answers[i]));
    let nll = mean(chosen, |i| answers[i].answer_logprob.map(|logprob| -logprob));
    let chance = mean(chosen, |i| Some(items[i].question.chance()));
    Score {
        items: chosen.len(),
        accuracy: accuracy.mean,
        accuracy_se: known(accuracy.se),
        accuracy_norm: known(accuracy_norm.mean),
        accuracy_norm_se: known(accuracy_norm.se),
        chance: chance.mean,
        answer_nll: known(nll.mean),
        reference: reference.map(|reference| compared(answers, reference, chosen)),
    }
}

fn compared(answers: &[Answer], reference: &[Answer], chosen: &[usize]) -> Compared {
    let delta = |i: usize| truth(answers[i].correct) - truth(reference[i].correct);
    let accuracy = mean(chosen, |i| Some(delta(i)));
    let nll = mean(chosen, |i| Some(reference[i].answer_logprob? - answers[i].answer_logprob?));
    let count = |test: &dyn Fn(usize) -> bool| chosen.iter().filter(|&&i| test(i)).count();
    Compared {
        accuracy: mean(chosen, |i| Some(truth(reference[i].correct))).mean,
        delta_accuracy: accuracy.mean,
        delta_accuracy_se: known(accuracy.se),
        gained: count(&|i| delta(i) > 0.0),
        lost: count(&|i| delta(i) < 0.0),
        changed: count(&|i| {
            (answers[i].chosen, &answers[i].text) != (reference[i].chosen, &reference[i].text)
        }),
        delta_answer_nll: known(nll.mean),
        delta_answer_nll_se: known(nll.se),
    }
}

/// Mean of the items that have a value, with the item as the independent unit.
fn mean(chosen: &[usize], value: impl Fn(usize) -> Option<f64>) -> Estimate {
    let values = chosen.iter().filter_map(|&i| value(i));
    let sums: Vec<Sum> = values.map(|value| Sum { count: 1, sum: value, squares: value * value }).collect();
    let found = estimate(&sums);
    // A single item has no spread.
    if sums.len() < 2 { Estimate { se: f64::NAN, ..found } } else { found }
}

fn truth(right: bool) -> f64 {
    f64::from(u8::from(right))
}

fn known(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::super::{Accept, Question};
    use super::*;

    fn item(line: usize, group: Option<&str>, choices: usize) -> Item {
        let question = match choices {
            0 => Question::Generate {
                targets: vec!["x".into()],
                accept: Accept::Exact,
                stop: Vec::new(),
                tokens: 1,
            },
            n => Question::Choice { choices: vec!["x".into(); n], answer: 0 },
        };
        let group = group.map(str::to_owned);
        Item { line, id: line.to_string(), group, prompt: String::new(), question }
    }

    fn answer(chosen: usize, logprob: f64) -> Answer {
        let correct = chosen == 0;
        Answer {
            correct,
            correct_norm: Some(true),
            chosen: Some(chosen),
            answer_logprob: Some(logprob),
            ..Answer::default()
        }
    }

    #[test]
    fn accuracy_is_paired_and_grouped() {
        let items = [item(1, Some("a"), 2), item(2, Some("b"), 4), item(3, Some("a"), 2), item(4, None, 4)];
        let model = [answer(0, -1.0), answer(1, -3.0), answer(0, -1.0), answer(2, -2.0)];
        let reference = [answer(0, -0.5), answer(0, -1.0), answer(1, -2.0), answer(3, -2.0)];
        let found = summary(&items, &model, Some(&reference));
        let score = &found.score;
        assert_eq!((score.items, score.accuracy, score.chance), (4, 0.5, 0.375));
        // Bernoulli: sqrt(p (1 - p) / (n - 1)).
        assert!((score.accuracy_se.unwrap_or(0.0) - (0.25f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!((score.accuracy_norm, score.answer_nll), (Some(1.0), Some(1.75)));
        let paired = score.reference.clone().unwrap_or_else(|| unreachable!());
        assert_eq!((paired.accuracy, paired.delta_accuracy), (0.5, 0.0));
        assert_eq!((paired.gained, paired.lost, paired.changed), (1, 1, 3));
        assert!((paired.delta_accuracy_se.unwrap_or(0.0) - (2.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert_eq!(paired.delta_answer_nll, Some(0.375));
        let groups: Vec<_> =
            found.groups.iter().map(|g| (&*g.group, g.score.items, g.score.accuracy)).collect();
        assert_eq!(groups, [("a", 2, 1.0), ("b", 1, 0.0)]);
        assert_eq!(found.groups[1].score.accuracy_se, None, "a single item has no spread");
        let flips: Vec<_> = found.flips.iter().map(|flip| (&*flip.id, flip.gained)).collect();
        assert_eq!(flips, [("2", false), ("3", true)]);
    }

    #[test]
    fn generated_answers_have_no_likelihood() {
        let found = summary(&[item(1, None, 0)], &[Answer { correct: true, ..Answer::default() }], None);
        assert_eq!((found.score.accuracy, found.score.chance), (1.0, 0.0));
        assert_eq!((found.score.accuracy_norm, found.score.answer_nll), (None, None));
    }
}
