//! Which of several choices each unit takes, at the least cost under a budget: mixed precision.
//!
//! The multiple-choice knapsack (Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 11): with `size[u][c]` in
//! bits and `cost[u][c]`, one choice `c_u` for each unit,
//!
//! `min Σ_u cost[u][c_u]  subject to  Σ_u size[u][c_u] <= budget`.
//!
//! Solved exactly, by dynamic programming over the sizes and costs that no other combination beats in both (Nemhauser and Ullmann,
//! Management Science 15, 1969), with partial solutions left out that cannot beat the best one known: for any `λ >= 0`,
//! `Σ min_c (cost + λ size) - λ · what is left of the budget` is the least that the units still open can cost (the Lagrangian
//! relaxation; `λ` is that of the linear relaxation, section 11.2 there). Where too many are left to be held, some are dropped, and
//! the bound says by how much the result may miss the optimum.

/// One way to store a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Bits of the unit, scales and zero points counted.
    pub size: u64,
    /// Cost, in any unit that adds up; finite.
    pub cost: f64,
}

/// Choice of each unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Index of the choice of each unit.
    pub choices: Vec<usize>,
    /// Sum of their sizes.
    pub size: u64,
    /// Sum of their costs.
    pub cost: f64,
    /// No allocation under the budget costs less than this; equal to `cost` where the optimum is proven.
    pub bound: f64,
}

/// Why there is no allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Even the smallest choices are too large together.
    #[error("found a budget of {budget} bits, allowed at least {least}, the smallest choice of every unit")]
    Budget {
        /// The budget, bits.
        budget: u64,
        /// The least that is possible, bits.
        least: u64,
    },
    /// A unit without a choice, or with one whose cost is no number.
    #[error("unit {unit}: found no choice of a finite cost")]
    Unit {
        /// Its index.
        unit: usize,
    },
}

/// Combinations held at a time.
const MOST: usize = 1 << 18;

/// A combination of choices of the first units.
#[derive(Clone, Copy)]
struct State {
    size: u64,
    cost: f64,
    /// Of the units before the last.
    before: u32,
    choice: u32,
}

/// The allocation of least cost under `budget` bits; of equal ones the smaller.
///
/// # Errors
/// [`AllocateError`].
pub fn allocate(units: &[Vec<Choice>], budget: u64) -> Result<Allocation, AllocateError> {
    allocate_within(units, budget, MOST)
}

fn allocate_within(units: &[Vec<Choice>], budget: u64, most: usize) -> Result<Allocation, AllocateError> {
    if let Some(unit) =
        units.iter().position(|choices| choices.is_empty() || choices.iter().any(|c| !c.cost.is_finite()))
    {
        return Err(AllocateError::Unit { unit });
    }
    let smallest = |choices: &Vec<Choice>| choices.iter().map(|c| c.size).min().unwrap_or(0);
    let least = units.iter().map(smallest).fold(0u64, u64::saturating_add);
    if least > budget {
        return Err(AllocateError::Budget { budget, least });
    }
    let (price, incumbent) = relaxed(units, budget);
    // What the units from each on cost at least, at this price, and what they take at least.
    let (mut priced, mut smallest_left) = (vec![0.0; units.len() + 1], vec![0u64; units.len() + 1]);
    for (u, choices) in units.iter().enumerate().rev() {
        let least = choices.iter().map(|c| c.cost + price * c.size as f64).fold(f64::INFINITY, f64::min);
        priced[u] = priced[u + 1] + least;
        smallest_left[u] = smallest_left[u + 1] + smallest(choices);
    }
    let relaxation = priced[0] - price * budget as f64;
    // Sums in another order differ in their last bits.
    let slack = 1e-12 * incumbent.cost.abs().max(relaxation.abs());
    let (mut levels, mut proven) = (Vec::with_capacity(units.len()), true);
    let mut last = vec![State { size: 0, cost: 0.0, before: 0, choice: 0 }];
    for (u, choices) in units.iter().enumerate() {
        let open = |s: &State| {
            s.size + smallest_left[u + 1] <= budget
                && s.cost + priced[u + 1] - price * (budget - s.size) as f64 <= incumbent.cost + slack
        };
        let extended = last.iter().enumerate().flat_map(|(before, state)| {
            choices.iter().enumerate().map(move |(choice, c)| State {
                size: state.size.saturating_add(c.size),
                cost: state.cost + c.cost,
                before: before as u32,
                choice: choice as u32,
            })
        });
        let mut states = unbeaten(extended.filter(open).collect());
        if states.len() > most {
            proven = false;
            let every = states.len().div_ceil(most);
            // Evenly, the smallest and the cheapest kept.
            let (n, mut i) = (states.len(), 0);
            states.retain(|_| {
                i += 1;
                i == n || (i - 1) % every == 0
            });
        }
        levels.push(std::mem::replace(&mut last, states));
    }
    let found = best(&last).map(|at| traced(&levels, &last, at, units));
    let found = found.filter(|found| found.cost <= incumbent.cost).unwrap_or(incumbent);
    let bound = if proven { found.cost } else { relaxation.min(found.cost) };
    Ok(Allocation { bound, ..found })
}

/// The linear relaxation, by its greedy solution: the price of a bit at which the budget is met, and the allocation without the
/// one step that would have been taken in part.
fn relaxed(units: &[Vec<Choice>], budget: u64) -> (f64, Allocation) {
    let mut choices = Vec::with_capacity(units.len());
    let mut steps = Vec::new();
    for (unit, of_unit) in units.iter().enumerate() {
        let hull = hull(of_unit);
        choices.push(hull[0]);
        for pair in hull.windows(2) {
            let (from, to) = (of_unit[pair[0]], of_unit[pair[1]]);
            steps.push(((from.cost - to.cost) / (to.size - from.size) as f64, unit, pair[1]));
        }
    }
    // The most that a bit brings first; within a unit the hull is steepest first already, and the sort is stable.
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let size_of = |choices: &[usize]| units.iter().zip(choices).map(|(u, &c)| u[c].size).sum::<u64>();
    let (mut size, mut price) = (size_of(&choices), 0.0);
    for (gain, unit, to) in steps {
        let grown = size - units[unit][choices[unit]].size + units[unit][to].size;
        if grown > budget {
            price = gain;
            break;
        }
        (choices[unit], size) = (to, grown);
    }
    let cost = units.iter().zip(&choices).map(|(u, &c)| u[c].cost).sum();
    (price, Allocation { choices, size, cost, bound: cost })
}

/// The choices of the lower convex hull of cost over size, from the smallest to the cheapest.
fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by(|&a, &b| {
        choices[a].size.cmp(&choices[b].size).then(choices[a].cost.total_cmp(&choices[b].cost))
    });
    let mut hull: Vec<usize> = Vec::new();
    for i in order {
        let c = choices[i];
        if hull.last().is_some_and(|&last| choices[last].cost <= c.cost) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            let (a, b) = (choices[a], choices[b]);
            let slope = |from: Choice, to: Choice| (from.cost - to.cost) / (to.size - from.size) as f64;
            if slope(a, b) > slope(a, c) {
                break;
            }
            hull.pop();
        }
        hull.push(i);
    }
    hull
}

/// Those that no other is as small and as cheap as, by size.
fn unbeaten(mut states: Vec<State>) -> Vec<State> {
    states.sort_by(|a, b| a.size.cmp(&b.size).then(a.cost.total_cmp(&b.cost)));
    let mut least = f64::INFINITY;
    states.retain(|state| {
        state.cost < least && {
            least = state.cost;
            true
        }
    });
    states
}

fn best(states: &[State]) -> Option<usize> {
    (0..states.len()).min_by(|&a, &b| states[a].cost.total_cmp(&states[b].cost))
}

/// The choices that led to a state of the last level.
fn traced(levels: &[Vec<State>], last: &[State], at: usize, units: &[Vec<Choice>]) -> Allocation {
    let State { size, cost, .. } = last[at];
    let mut choices = vec![0; units.len()];
    let (mut states, mut at) = (last, at);
    for (u, level) in levels.iter().enumerate().rev() {
        choices[u] = states[at].choice as usize;
        at = states[at].before as usize;
        states = level;
    }
    Allocation { choices, size, cost, bound: cost }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// SplitMix64.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
    }

    fn units(seed: u64, n: usize, choices: usize) -> Vec<Vec<Choice>> {
        let mut state = seed;
        let mut choice = || Choice {
            size: random(&mut state) % 50 + 1,
            cost: (random(&mut state) % 1000) as f64 / 7.0 - 20.0,
        };
        (0..n).map(|_| (0..choices).map(|_| choice()).collect()).collect()
    }

    /// Every combination.
    fn exhaustive(units: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = units.split_first() else { return Some(0.0) };
        let with = |c: &Choice| Some(c.cost + exhaustive(rest, budget.checked_sub(c.size)?)?);
        first.iter().filter_map(with).min_by(f64::total_cmp)
    }

    #[test]
    fn the_result_is_the_best_of_all_combinations() {
        for seed in 0..200 {
            let units = units(seed, 6, 1 + seed as usize % 4);
            let least: u64 = units.iter().map(|u| u.iter().map(|c| c.size).min().unwrap()).sum();
            for budget in [least, least + 7, least + 40, 1000] {
                let found = allocate(&units, budget).unwrap();
                let best = exhaustive(&units, budget).unwrap();
                assert!((found.cost - best).abs() < 1e-9, "{seed} {budget}: {} {best}", found.cost);
                assert_eq!(found.bound, found.cost);
                let size: u64 = units.iter().zip(&found.choices).map(|(u, &c)| u[c].size).sum();
                let cost: f64 = units.iter().zip(&found.choices).map(|(u, &c)| u[c].cost).sum();
                assert!(size == found.size && size <= budget && (cost - found.cost).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn with_too_little_memory_the_bound_holds_all_the_same() {
        for seed in 0..50 {
            let units = units(seed, 9, 3);
            let budget = 9 * 20;
            let Ok(exact) = allocate(&units, budget) else { continue };
            let rough = allocate_within(&units, budget, 2).unwrap();
            assert!(rough.size <= budget && rough.cost >= exact.cost - 1e-9);
            assert!(rough.bound <= exact.cost + 1e-9, "{seed}: {} {}", rough.bound, exact.cost);
        }
    }

    #[test]
    fn a_model_of_many_layers_is_solved_to_the_end() {
        // Four widths; the cost of a unit falls fourfold with each bit, by factors that differ.
        let mut state = 3;
        let units: Vec<Vec<Choice>> = (0..400)
            .map(|_| {
                let (weight, size) = ((random(&mut state) % 1000 + 1) as f64, random(&mut state) % 900 + 100);
                let bits = [2, 3, 4, 8];
                bits.map(|b| Choice { size: b * size, cost: weight * 0.25f64.powi(b as i32) }).to_vec()
            })
            .collect();
        let all: u64 = units.iter().map(|u| u[2].size).sum();
        let found = allocate(&units, all).unwrap();
        let uniform: f64 = units.iter().map(|u| u[2].cost).sum();
        assert!(found.cost < uniform && found.bound >= found.cost * (1.0 - 1e-4), "{found:?}");
    }

    #[test]
    fn what_cannot_be_allocated_is_told() {
        let one = vec![vec![Choice { size: 10, cost: 1.0 }]];
        assert_eq!(allocate(&one, 9), Err(AllocateError::Budget { budget: 9, least: 10 }));
        assert_eq!(allocate(&[Vec::new()], 9), Err(AllocateError::Unit { unit: 0 }));
        let nan = vec![vec![Choice { size: 1, cost: f64::NAN }]];
        assert_eq!(allocate(&nan, 9), Err(AllocateError::Unit { unit: 0 }));
        assert_eq!(allocate(&[], 0).unwrap().choices, Vec::<usize>::new());
    }
}
