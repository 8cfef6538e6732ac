//! Sampler of llama.cpp: another order in which a distribution is cut, and another source of random numbers.
//!
//! [`Sampler::LlamaCpp`](crate::Sampler::LlamaCpp) draws as llama.cpp does by default: `top_k`, `top_p` and `min_p` cut
//! the distribution at temperature 1, then the temperature is applied, then a token is drawn by a number of 53 bits from
//! MT19937 (Matsumoto and Nishimura 1998, "Mersenne Twister"), two words each, as
//! `std::uniform_real_distribution<double>` of libstdc++ makes it. The same seed and logits give llama.cpp's tokens, for
//! comparisons of the two programs.

use mantissa_num::round::random_u32;

use crate::sampling::Sampling;

/// Words of the state of MT19937.
const WORDS: usize = 624;

/// Chooses a token as llama.cpp does. `draw` counts the tokens drawn before; `choices` is scratch. The largest logit is
/// finite and the temperature is not 0.
pub(crate) fn llama_cpp(
    sampling: &Sampling,
    logits: &[f32],
    draw: u64,
    choices: &mut Vec<(f64, u32)>,
) -> Option<u32> {
    choices.clear();
    let all = logits.iter().zip(0u32..).filter(|(x, _)| !x.is_nan());
    choices.extend(all.map(|(&x, id)| (f64::from(x), id)));
    // The order of the candidates decides which one a number picks: sorted only where a cut sorts.
    if sampling.top_k > 0 {
        if sampling.top_k < choices.len() {
            choices.select_nth_unstable_by(sampling.top_k - 1, descending);
            choices.truncate(sampling.top_k);
        }
        choices.sort_unstable_by(descending);
    }
    let max = choices.iter().map(|(logit, _)| *logit).fold(f64::NEG_INFINITY, f64::max);
    let probability = |logit: f64, temperature: f32| ((logit - max) as f32 / temperature).exp();
    if sampling.top_p < 1.0 {
        choices.sort_unstable_by(descending);
        let total: f32 = choices.iter().map(|(logit, _)| probability(*logit, 1.0)).sum();
        let mut held = 0.0;
        let needed = choices.iter().take_while(|(logit, _)| {
            let needed = held < sampling.top_p;
            held += probability(*logit, 1.0) / total;
            needed
        });
        let needed = needed.count().max(1);
        choices.truncate(needed);
    }
    if sampling.min_p > 0.0 {
        let least = max + f64::from(sampling.min_p.ln());
        choices.retain(|(logit, _)| *logit >= least);
    }
    choices.iter_mut().for_each(|(logit, _)| *logit = f64::from(probability(*logit, sampling.temperature)));
    let total: f64 = choices.iter().map(|(weight, _)| weight).sum();
    let target = uniform(sampling.seed, draw) * total;
    let mut held = 0.0;
    let chosen = choices.iter().find(|(weight, _)| {
        held += weight;
        held >= target
    });
    chosen.or(choices.last()).map(|(_, id)| *id)
}

/// Order of choices: the largest first; of equals, the lowest id.
pub(crate) fn descending(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Number `draw` of the doubles in [0, 1) that MT19937 with this seed gives. Takes about `draw / 312` microseconds.
/// Draws beyond any text, which constraints take, are of Philox.
fn uniform(seed: u64, draw: u64) -> f64 {
    if draw >= 1 << 32 {
        return f64::from(random_u32(seed, draw)) / 4_294_967_296.0;
    }
    let mut state = seeded(seed as u32);
    // Two words a number; every 624 words the state is replaced.
    let first = draw * 2;
    for _ in 0..=first / WORDS as u64 {
        twist(&mut state);
    }
    let at = (first % WORDS as u64) as usize;
    let [low, high] = [state[at], state[at + 1]].map(|word| f64::from(temper(word)));
    let value = (low + high * 4_294_967_296.0) / 18_446_744_073_709_551_616.0;
    // Rounding may reach 1.
    value.min(1.0 - f64::EPSILON / 2.0)
}

/// State of MT19937 after it is seeded.
fn seeded(seed: u32) -> [u32; WORDS] {
    let mut state = [0; WORDS];
    state[0] = seed;
    for i in 1..WORDS {
        let last = state[i - 1];
        state[i] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
    }
    state
}

/// Replaces the state by the next one.
fn twist(state: &mut [u32; WORDS]) {
    for i in 0..WORDS {
        let y = (state[i] & 0x8000_0000) | (state[(i + 1) % WORDS] & 0x7fff_ffff);
        let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
        state[i] = state[(i + 397) % WORDS] ^ (y >> 1) ^ odd;
    }
}

/// Output of a word of the state.
fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sampling::Sampler;

    /// The C++ standard fixes the 10 000th word of the default seed, 5489: 4123659995.
    #[test]
    fn the_mersenne_twister_has_its_reference_value() {
        let mut state = seeded(5489);
        let at = 10_000 - 1;
        for _ in 0..=at / WORDS {
            twist(&mut state);
        }
        assert_eq!(temper(state[at % WORDS]), 4_123_659_995);
    }

    #[test]
    fn numbers_are_uniform_and_depend_on_seed_and_draw() {
        let mean = (0..2000).map(|draw| uniform(7, draw)).sum::<f64>() / 2000.0;
        assert!((mean - 0.5).abs() < 0.03, "{mean}");
        assert_ne!(uniform(7, 0).to_bits(), uniform(8, 0).to_bits());
        assert_ne!(uniform(7, 311).to_bits(), uniform(7, 312).to_bits());
    }

    #[test]
    fn cuts_come_before_the_temperature() {
        let logits = [1.0, 2.0, -1.0, 0.5];
        let base = Sampling { temperature: 2.0, sampler: Sampler::LlamaCpp, ..Sampling::default() };
        let kept = |sampling: Sampling| {
            let mut kept = [false; 4];
            for draw in 0..500 {
                kept[sampling.choose(&logits, draw, &mut Vec::new()).unwrap() as usize] = true;
            }
            kept
        };
        assert_eq!(kept(base), [true; 4]);
        assert_eq!(kept(Sampling { top_k: 2, ..base }), [true, true, false, false]);
        // Probabilities at temperature 1: .24, .65, .03, .14, although the draw is at temperature 2.
        assert_eq!(kept(Sampling { top_p: 0.6, ..base }), [false, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.8, ..base }), [true, true, false, false]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..base }), [true, true, false, false]);
        // As in the other order: NaN is no candidate, and temperature 0 takes the most probable.
        let greedy = Sampling { temperature: 0.0, ..base };
        assert_eq!(greedy.choose(&logits, 3, &mut Vec::new()), Some(1));
        assert_eq!(base.choose(&[f32::NAN, 1.0], 0, &mut Vec::new()), Some(1));
    }
}
