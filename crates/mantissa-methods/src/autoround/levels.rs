//! Elements of a format as a table, and the position of a weight between two of them.

use mantissa_num::pack::sign_extend;
use mantissa_num::{Code, Format, Rule, Scheme};

/// Tables up to this length are searched linearly, without branches.
const SHORT: usize = 16;

/// 2²³: adding and subtracting it rounds an f32 of smaller magnitude to an integer.
const INTEGERS_FROM: f32 = 8_388_608.0;

/// Elements of a format in ascending order, with their codes.
#[derive(Clone, Debug)]
pub(super) struct Levels {
    pub(super) values: Vec<f32>,
    pub(super) codes: Vec<u32>,
    /// True if the elements are consecutive integers.
    pub(super) integers: bool,
    /// Largest magnitude.
    pub(super) reach: f32,
}

/// A rounded weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounded {
    /// The element.
    pub(super) level: f32,
    /// True if the weight lies between two elements and can become either.
    pub(super) inside: bool,
}

impl Levels {
    /// Table of the scheme's elements; `None` for formats without one: codecs, plain casts, and elements wider than 8
    /// bits.
    pub(super) fn of(scheme: &Scheme) -> Option<Self> {
        let format = &scheme.format;
        let wide = match format {
            Format::Affine(affine) => affine.code.bits() > 8,
            Format::Table(_) => false,
            _ => true,
        };
        if wide || format.scale().is_none() || format.has_bias() {
            return None;
        }
        let low = match format {
            // The restricted range has one code less.
            Format::Affine(affine) if scheme.encoder.rule == Rule::Restricted => affine.code.bits(),
            _ => 0,
        };
        let allowed = |value: f32| low == 0 || value > -((1u32 << (low - 1)) as f32);
        let stored = |code: u32| match format {
            // Integers narrower than 8 bits are stored in 8.
            Format::Affine(affine) => match affine.code {
                Code::Int(bits) => sign_extend(code as u8, bits).into(),
                _ => code,
            },
            _ => code,
        };
        let mut all: Vec<(f32, u32)> = (0..1u32 << format.code_bits())
            .map(stored)
            .map(|code| (format.element(code), code))
            .filter(|(value, _)| value.is_finite() && allowed(*value))
            .collect();
        // If two codes have one value (-0 and 0), the smaller is written.
        all.sort_by(|a, b| a.0.total_cmp(&(b.0 + 0.0)).then(a.1.cmp(&b.1)));
        all.dedup_by(|b, a| {
            a.0 == b.0 && {
                a.1 = a.1.min(b.1);
                true
            }
        });
        let (values, codes): (Vec<f32>, Vec<u32>) = all.into_iter().unzip();
        let integers = values.windows(2).all(|pair| pair[1] - pair[0] == 1.0);
        let reach = values.iter().fold(0f32, |reach, value| reach.max(value.abs()));
        (values.len() > 1).then_some(Levels { values, codes, integers, reach })
    }

    /// Smallest and largest element.
    pub(super) fn ends(&self) -> (f32, f32) {
        (self.values[0], self.values[self.values.len() - 1])
    }

    /// Element for `u`, in units of the scale, under `offset`.
    #[inline(always)]
    pub(super) fn round(&self, u: f32, offset: f32) -> Rounded {
        if self.integers { integer(self.ends(), u, offset) } else { self.find(u, offset) }
    }

    /// The same for a table, by search.
    fn find(&self, u: f32, offset: f32) -> Rounded {
        let (low, high) = self.ends();
        let inside = low <= u && u < high;
        if !inside {
            return Rounded { level: if u >= high { high } else { low }, inside };
        }
        let above = if self.values.len() <= SHORT {
            self.values.iter().map(|level| usize::from(*level <= u)).sum()
        } else {
            self.values.partition_point(|level| *level <= u)
        };
        let above = above.clamp(1, self.values.len() - 1);
        let (a, b) = (self.values[above - 1], self.values[above]);
        Rounded { level: if (u - a) / (b - a) + offset >= 0.5 { b } else { a }, inside }
    }

    /// The code of an element.
    pub(super) fn code(&self, level: f32) -> u32 {
        let at = self.values.partition_point(|value| *value < level);
        self.codes[at.min(self.codes.len() - 1)]
    }
}

/// [`Levels::round`] for the integers from `low` to `high`; branch-free, so that loops over it vectorize.
#[inline(always)]
pub(super) fn integer((low, high): (f32, f32), u: f32, offset: f32) -> Rounded {
    let inside = low <= u && u < high;
    let above = if inside { u - low } else { 0.0 };
    let nearest = (above + INTEGERS_FROM) - INTEGERS_FROM;
    let whole = nearest - if nearest > above { 1.0 } else { 0.0 };
    // For `u` just below `high`, `u - low` may round to `high - low`.
    let below = low + whole.min(high - low - 1.0);
    let up = if inside && u - below + offset >= 0.5 { 1.0 } else { 0.0 };
    Rounded { level: if u >= high { high } else { below + up }, inside }
}
