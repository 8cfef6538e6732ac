//! Choices for whole decoder layers, beside methods that learn all weights of one together.

use mantissa_quant::allocate::{AllocateError, Allocation, StorageOption, allocate};

/// Candidates of the units of a decoder layer, one for each unit, with their sums.
#[derive(Clone, Debug, PartialEq)]
struct Combination {
    /// Sum of sizes and costs.
    sum: StorageOption,
    /// Index of the candidate of each unit.
    choices: Vec<usize>,
}

/// Returns the allocation of least cost within `budget` in which all units of a decoder layer take candidates with the same
/// `learned`. `rows` are the candidates of the units, whose decoder layers are `layers`, and of what else is chosen.
///
/// # Errors
/// [`AllocateError`].
pub(super) fn allocate_by_layer(
    rows: &[Vec<StorageOption>],
    (layers, learned): (&[usize], &[bool]),
    budget: u64,
) -> Result<Allocation, AllocateError> {
    if rows.iter().flatten().any(|choice| !choice.cost.is_finite()) {
        return allocate(rows, budget);
    }
    let (units, others) = rows.split_at(layers.len().min(rows.len()));
    let (mut joined, mut at) = (Vec::new(), 0);
    for of_layer in layers.chunk_by(|a, b| a == b) {
        joined.push(combinations(&units[at..at + of_layer.len()], learned));
        at += of_layer.len();
    }
    let sums = joined.iter().map(|all| all.iter().map(|combination| combination.sum).collect());
    let found = allocate(&sums.chain(others.iter().cloned()).collect::<Vec<Vec<StorageOption>>>(), budget)?;
    let chosen = |(at, &choice): (usize, &usize)| match joined.get(at) {
        Some(combinations) => combinations[choice].choices.clone(),
        None => vec![choice],
    };
    Ok(Allocation { choices: found.choices.iter().enumerate().flat_map(chosen).collect(), ..found })
}

/// Returns the combinations of candidates of `units` that no other surpasses in size and cost, from the smallest. All units of
/// a combination take candidates with the same `learned`, that of each candidate.
fn combinations<T: PartialEq>(units: &[Vec<StorageOption>], learned: &[T]) -> Vec<Combination> {
    let mut all = Vec::new();
    for (at, kind) in learned.iter().enumerate() {
        if !learned[..at].contains(kind) {
            all.extend(of_kind(units, |candidate| learned.get(candidate) == Some(kind)));
        }
    }
    unsurpassed(all)
}

/// Returns the combinations of the candidates that `takes` accepts.
fn of_kind(units: &[Vec<StorageOption>], takes: impl Fn(usize) -> bool) -> Vec<Combination> {
    let none = Combination { sum: StorageOption { size: 0, cost: 0.0 }, choices: Vec::new() };
    units.iter().fold(vec![none], |before, candidates| {
        let own = || candidates.iter().enumerate().filter(|(at, _)| takes(*at));
        let with = |first: &Combination| {
            let add = |(at, next): (usize, &StorageOption)| Combination {
                sum: StorageOption {
                    size: first.sum.size.saturating_add(next.size),
                    cost: first.sum.cost + next.cost,
                },
                choices: first.choices.iter().copied().chain([at]).collect(),
            };
            own().map(add).collect::<Vec<_>>()
        };
        unsurpassed(before.iter().flat_map(with).collect())
    })
}

/// Keeps the combinations that no other surpasses in size and cost.
fn unsurpassed(mut all: Vec<Combination>) -> Vec<Combination> {
    all.sort_by(|a, b| a.sum.size.cmp(&b.sum.size).then(a.sum.cost.total_cmp(&b.sum.cost)));
    let mut least = f64::INFINITY;
    all.retain(|combination| {
        let better = combination.sum.cost < least;
        least = least.min(combination.sum.cost);
        better
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units() -> Vec<Vec<StorageOption>> {
        let choice = |size, cost| StorageOption { size, cost };
        vec![
            vec![choice(2, 0.5), choice(4, 0.2), choice(3, 0.1), choice(5, 0.05)],
            vec![choice(2, 0.4), choice(4, 0.3), choice(3, 0.1), choice(5, 0.09)],
        ]
    }

    #[test]
    fn every_combination_within_a_kind_that_none_surpasses_is_kept() {
        let (units, learned) = (units(), [0, 0, 1, 1]);
        let found = combinations(&units, &learned);
        let mut expected: Vec<(u64, f64, Vec<usize>)> = Vec::new();
        for a in 0..4 {
            for b in (0..4).filter(|&b| learned[a] == learned[b]) {
                let (x, y) = (units[0][a], units[1][b]);
                expected.push((x.size + y.size, x.cost + y.cost, vec![a, b]));
            }
        }
        let all = expected.clone();
        expected.retain(|(size, cost, _)| {
            !all.iter().any(|(s, c, _)| (s <= size && c < cost) || (s < size && c <= cost))
        });
        expected.sort_by_key(|a| a.0);
        let found: Vec<_> = found.into_iter().map(|c| (c.sum.size, c.sum.cost, c.choices)).collect();
        assert_eq!(found, expected);
        assert!(found.iter().any(|(.., choices)| *choices == [2, 2]));
    }

    #[test]
    fn one_kind_takes_any_candidates() {
        let found = combinations(&units(), &[(); 4]);
        assert_eq!(found.first().map(|c| c.choices.clone()), Some(vec![0, 0]));
        assert!(found.iter().any(|c| c.choices == [2, 0]));
    }

    #[test]
    fn a_layer_is_learned_as_a_whole_or_not_at_all() {
        let rows = [
            units(),
            units(),
            vec![vec![StorageOption { size: 7, cost: 0.0 }, StorageOption { size: 1, cost: 0.3 }]],
        ]
        .concat();
        let (layers, learned) = ([0, 0, 1, 1], [true, false, true, true]);
        for budget in 9..28 {
            let found = allocate_by_layer(&rows, (&layers, &learned), budget);
            let mut best: Option<f64> = None;
            for code in 0..512usize {
                let picks: Vec<usize> =
                    (0..4).map(|i| code / 4usize.pow(i) % 4).chain([code / 256]).collect();
                let whole = |layer: usize| learned[picks[2 * layer]] == learned[picks[2 * layer + 1]];
                let size: u64 = rows.iter().zip(&picks).map(|(row, &at)| row[at].size).sum();
                let cost: f64 = rows.iter().zip(&picks).map(|(row, &at)| row[at].cost).sum();
                if whole(0) && whole(1) && size <= budget && best.is_none_or(|best| cost < best) {
                    best = Some(cost);
                }
            }
            match (found, best) {
                (Ok(found), Some(best)) => {
                    assert!((found.cost - best).abs() < 1e-12, "{budget}: {found:?} {best}");
                }
                (found, best) => assert!(found.is_err() && best.is_none(), "{budget}: {found:?} {best:?}"),
            }
        }
    }
}
