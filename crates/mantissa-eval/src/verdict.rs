//! Plain words for a KL divergence: the one place of their thresholds.
//!
//! By Pinsker's inequality and Jensen's, a mean KL of `d` nats per token moves on average at most `sqrt(d / 2)` of the
//! probability of the next token (total variation distance; Tsybakov, *Introduction to Nonparametric Estimation*, 2009,
//! lemma 2.5). The thresholds bound that share by 3 %, 16 % and 50 %.

/// Largest mean KL, nats/token, that is called indistinguishable.
pub const INDISTINGUISHABLE: f64 = 0.002;
/// Largest mean KL, nats/token, that is called small.
pub const SMALL: f64 = 0.05;
/// Largest mean KL, nats/token, that is called visible.
pub const VISIBLE: f64 = 0.5;

/// Size of a quality loss in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// At most [`INDISTINGUISHABLE`], or within two standard errors of the noise floor.
    Indistinguishable,
    /// At most [`SMALL`].
    Small,
    /// At most [`VISIBLE`].
    Visible,
    /// Above [`VISIBLE`], or not a number.
    Severe,
}

impl Verdict {
    /// All words, from the smallest loss to the largest.
    pub const ALL: [Verdict; 4] =
        [Verdict::Indistinguishable, Verdict::Small, Verdict::Visible, Verdict::Severe];

    /// Judges a mean KL and its standard error against the noise floor: the KL of the source stored in bf16.
    /// Standard errors that are not finite count as 0.
    pub fn new(kl: (f64, f64), floor: (f64, f64)) -> Self {
        let se = |se: f64| if se.is_finite() { se } else { 0.0 };
        let at_floor = kl.0 <= floor.0 + 2.0 * se(kl.1).hypot(se(floor.1));
        // The floor of a bf16 source is 0: only the absolute thresholds hold.
        if floor.0 > 0.0 && at_floor {
            return Verdict::Indistinguishable;
        }
        let within =
            Verdict::ALL.into_iter().find(|verdict| verdict.limit().is_some_and(|most| kl.0 <= most));
        within.unwrap_or(Verdict::Severe)
    }

    /// Returns the word.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Indistinguishable => "indistinguishable",
            Verdict::Small => "small",
            Verdict::Visible => "visible",
            Verdict::Severe => "severe",
        }
    }

    /// Returns the largest mean KL of this word, nats/token.
    pub fn limit(self) -> Option<f64> {
        match self {
            Verdict::Indistinguishable => Some(INDISTINGUISHABLE),
            Verdict::Small => Some(SMALL),
            Verdict::Visible => Some(VISIBLE),
            Verdict::Severe => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_and_the_noise_floor_decide() {
        let word = |kl, se, floor, floor_se| Verdict::new((kl, se), (floor, floor_se)).word();
        assert_eq!(word(0.0, 0.0, 0.0, 0.0), "indistinguishable");
        assert_eq!(word(0.002, 1e-4, 0.0, 0.0), "indistinguishable");
        assert_eq!(word(0.0021, 1e-3, 0.0, 0.0), "small", "a bf16 source has no floor to hide in");
        assert_eq!(word(0.003, 1e-4, 0.0029, 1e-4), "indistinguishable", "bf16 itself loses as much");
        assert_eq!(word(0.003, f64::NAN, 1e-5, f64::NAN), "small");
        assert_eq!((word(0.05, 0.0, 0.0, 0.0), word(0.051, 0.0, 0.0, 0.0)), ("small", "visible"));
        assert_eq!((word(0.5, 0.0, 0.0, 0.0), word(0.6, 0.0, 0.0, 0.0)), ("visible", "severe"));
        assert_eq!(word(f64::NAN, 0.0, 0.0, 0.0), "severe");
    }

    #[test]
    fn the_documented_shares_follow_from_pinsker() {
        let share = |kl: f64| (100.0 * (kl / 2.0).sqrt()).round();
        assert_eq!([INDISTINGUISHABLE, SMALL, VISIBLE].map(share), [3.0, 16.0, 50.0]);
    }
}
