//! Statistics of a step of another rank than 0.

use std::collections::BTreeSet;
use std::time::Duration;

use mantissa_ranks::{Reader, Traffic, Writer};

/// Losses of batches, each with its number of targets.
pub(super) type Losses = Vec<(f64, u64)>;

/// Statistics of a step of another rank than 0.
pub(super) struct Statistics {
    pub(super) losses: Losses,
    /// Places of the parameters with a gradient that is not 0.
    pub(super) places: BTreeSet<usize>,
    /// Largest magnitudes of the operands with delayed scaling.
    pub(super) seen: Vec<u32>,
    /// Tokens that chose each expert, by layer.
    pub(super) routed: Vec<Vec<u64>>,
    pub(super) traffic: Traffic,
    /// Operands that lost their signal.
    pub(super) lost: Vec<[u64; 4]>,
}

impl Statistics {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.len(self.losses.len());
        for (nll, targets) in &self.losses {
            out.f64(*nll);
            out.u64(*targets);
        }
        out.len(self.places.len());
        self.places.iter().for_each(|place| out.u64(*place as u64));
        out.indices(&self.seen);
        out.len(self.routed.len());
        for counts in &self.routed {
            out.len(counts.len());
            counts.iter().for_each(|count| out.u64(*count));
        }
        out.u64(self.traffic.sent);
        out.f64(self.traffic.waited.as_secs_f64());
        out.len(self.lost.len());
        self.lost.iter().flatten().for_each(|word| out.u64(*word));
        out.0
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let losses = (0..from.len(16)?).map(|_| Some((from.f64()?, from.u64()?))).collect::<Option<_>>()?;
        let places = (0..from.len(8)?).map(|_| usize::try_from(from.u64()?).ok()).collect::<Option<_>>()?;
        let seen = from.indices()?;
        let counts =
            |from: &mut Reader<'_>| (0..from.len(8)?).map(|_| from.u64()).collect::<Option<Vec<_>>>();
        let routed = (0..from.len(8)?).map(|_| counts(&mut from)).collect::<Option<_>>()?;
        let (sent, waited) = (from.u64()?, Duration::try_from_secs_f64(from.f64()?).ok()?);
        let place = |from: &mut Reader<'_>| Some([from.u64()?, from.u64()?, from.u64()?, from.u64()?]);
        let lost = (0..from.len(32)?).map(|_| place(&mut from)).collect::<Option<_>>()?;
        Some(Statistics { losses, places, seen, routed, traffic: Traffic { sent, waited }, lost })
    }
}
