//! Mixed precision: assigns one choice of storage to each unit at the least total cost within a budget of bits.
//!
//! This is the multiple-choice knapsack (Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 11): with
//! `size[u][c]` in bits and `cost[u][c]`, one choice `c_u` for each unit,
//!
//! `min Σ_u cost[u][c_u]  subject to  Σ_u size[u][c_u] <= budget`.
//!
//! It is solved exactly, by dynamic programming over the Pareto-optimal sizes and costs (Nemhauser and Ullmann,
//! Management Science 15, 1969). Partial solutions that cannot beat the best known one are pruned by the Lagrangian
//! relaxation: for any `λ >= 0` the remaining units cost at least `Σ min_c (cost + λ size) - λ · remaining budget`. `λ`
//! comes from the linear relaxation (section 11.2 there). If too many states remain for memory, some are dropped, and
//! the bound says how far the result may be from the optimum.

/// One way to store a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StorageOption {
    /// Size in bits, including scales and zero points.
    pub size: u64,
    /// Cost in any additive unit; finite.
    pub cost: f64,
}

/// Assignment of a choice to each unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Index of the choice of each unit.
    pub choices: Vec<usize>,
    /// Sum of their sizes.
    pub size: u64,
    /// Sum of their costs.
    pub cost: f64,
    /// Lower bound of the cost within the budget; equal to `cost` if the optimum is proven.
    pub bound: f64,
}

/// Reasons why there is no allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The smallest choices exceed the budget.
    #[error(
        "expected a budget of at least {least} bits, the smallest choice of every unit, got {budget} bits"
    )]
    Budget {
        /// Budget in bits.
        budget: u64,
        /// Smallest possible size in bits.
        least: u64,
    },
    /// A unit without choices, or with a choice of non-finite cost.
    #[error("unit {unit}: expected choices of finite cost, got none or a non-finite one")]
    Unit {
        /// Index of the unit.
        unit: usize,
    },
}

/// Maximum number of states kept per unit.
const MOST: usize = 1 << 18;

/// A combination of choices for the first units.
#[derive(Clone, Copy)]
struct State {
    size: u64,
    cost: f64,
    /// Index of the preceding state, of one unit fewer.
    before: u32,
    choice: u32,
}

/// Returns the allocation of least cost within `budget` bits; among equal costs the smaller one.
///
/// # Errors
/// [`AllocateError`].
pub fn allocate(units: &[Vec<StorageOption>], budget: u64) -> Result<Allocation, AllocateError> {
    allocate_within(units, budget, MOST)
}

fn allocate_within(
    units: &[Vec<StorageOption>],
    budget: u64,
    most: usize,
) -> Result<Allocation, AllocateError> {
    if let Some(unit) =
        units.iter().position(|choices| choices.is_empty() || choices.iter().any(|c| !c.cost.is_finite()))
    {
        return Err(AllocateError::Unit { unit });
    }
    let smallest = |choices: &Vec<StorageOption>| choices.iter().map(|c| c.size).min().unwrap_or(0);
    let least = units.iter().map(smallest).fold(0u64, u64::saturating_add);
    if least > budget {
        return Err(AllocateError::Budget { budget, least });
    }
    let (price, incumbent) = relaxed(units, budget);
    // Lower bounds for the units from each index on: Lagrangian cost at this price, and size.
    let (mut priced, mut smallest_left) = (vec![0.0; units.len() + 1], vec![0u64; units.len() + 1]);
    for (u, choices) in units.iter().enumerate().rev() {
        let least = choices.iter().map(|c| c.cost + price * c.size as f64).fold(f64::INFINITY, f64::min);
        priced[u] = priced[u + 1] + least;
        smallest_left[u] = smallest_left[u + 1] + smallest(choices);
    }
    let relaxation = priced[0] - price * budget as f64;
    // Rounding tolerance: sums in another order differ in their last bits.
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
        let mut states = pareto(extended.filter(open).collect());
        if states.len() > most {
            proven = false;
            let every = states.len().div_ceil(most);
            // Evenly spaced, keeping the smallest and the cheapest state.
            let (n, mut i) = (states.len(), 0);
            states.retain(|_| {
                i += 1;
                i == n || (i - 1) % every == 0
            });
        }
        levels.push(std::mem::replace(&mut last, states));
    }
    let found = best(&last).map(|at| trace(&levels, &last, at, units));
    let found = found.filter(|found| found.cost <= incumbent.cost).unwrap_or(incumbent);
    let bound = if proven { found.cost } else { relaxation.min(found.cost) };
    Ok(Allocation { bound, ..found })
}

/// Solves the linear relaxation greedily. Returns the price of a bit at which the budget is met, and the allocation
/// without the last, fractional step.
fn relaxed(units: &[Vec<StorageOption>], budget: u64) -> (f64, Allocation) {
    let mut choices = Vec::with_capacity(units.len());
    let mut steps = Vec::new();
    for (unit, options) in units.iter().enumerate() {
        let hull = hull(options);
        choices.push(hull[0]);
        for pair in hull.windows(2) {
            let (from, to) = (options[pair[0]], options[pair[1]]);
            steps.push(((from.cost - to.cost) / (to.size - from.size) as f64, unit, pair[1]));
        }
    }
    // Largest gain per bit first. Within a unit the hull is already sorted by gain, and the sort is stable.
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

/// Returns the choices on the lower convex hull of cost over size, from the smallest to the cheapest.
fn hull(choices: &[StorageOption]) -> Vec<usize> {
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
            let slope =
                |from: StorageOption, to: StorageOption| (from.cost - to.cost) / (to.size - from.size) as f64;
            if slope(a, b) > slope(a, c) {
                break;
            }
            hull.pop();
        }
        hull.push(i);
    }
    hull
}

/// Returns the Pareto-optimal states, sorted by size.
fn pareto(mut states: Vec<State>) -> Vec<State> {
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

/// Traces the choices that led to a state of the last level.
fn trace(levels: &[Vec<State>], last: &[State], at: usize, units: &[Vec<StorageOption>]) -> Allocation {
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

    fn units(seed: u64, n: usize, choices: usize) -> Vec<Vec<StorageOption>> {
        let mut state = seed;
        let mut choice = || StorageOption {
            size: random(&mut state) % 50 + 1,
            cost: (random(&mut state) % 1000) as f64 / 7.0 - 20.0,
        };
        (0..n).map(|_| (0..choices).map(|_| choice()).collect()).collect()
    }

    /// Tries every combination.
    fn exhaustive(units: &[Vec<StorageOption>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = units.split_first() else { return Some(0.0) };
        let with = |c: &StorageOption| Some(c.cost + exhaustive(rest, budget.checked_sub(c.size)?)?);
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
    fn the_bound_holds_if_states_are_dropped() {
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
    fn many_layers_are_solved_near_the_optimum() {
        // Four widths; each bit divides a unit's cost by four, from different starting costs.
        let mut state = 3;
        let units: Vec<Vec<StorageOption>> = (0..400)
            .map(|_| {
                let (weight, size) = ((random(&mut state) % 1000 + 1) as f64, random(&mut state) % 900 + 100);
                let bits = [2, 3, 4, 8];
                bits.map(|b| StorageOption { size: b * size, cost: weight * 0.25f64.powi(b as i32) }).to_vec()
            })
            .collect();
        let all: u64 = units.iter().map(|u| u[2].size).sum();
        let found = allocate(&units, all).unwrap();
        let uniform: f64 = units.iter().map(|u| u[2].cost).sum();
        assert!(found.cost < uniform && found.bound >= found.cost * (1.0 - 1e-4), "{found:?}");
    }

    #[test]
    fn impossible_allocations_are_errors() {
        let one = vec![vec![StorageOption { size: 10, cost: 1.0 }]];
        assert_eq!(allocate(&one, 9), Err(AllocateError::Budget { budget: 9, least: 10 }));
        assert_eq!(allocate(&[Vec::new()], 9), Err(AllocateError::Unit { unit: 0 }));
        let nan = vec![vec![StorageOption { size: 1, cost: f64::NAN }]];
        assert_eq!(allocate(&nan, 9), Err(AllocateError::Unit { unit: 0 }));
        assert_eq!(allocate(&[], 0).unwrap().choices, Vec::<usize>::new());
    }
}
