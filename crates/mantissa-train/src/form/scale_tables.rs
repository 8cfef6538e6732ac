//! Tables of block scales by amax, made once for a scheme from the reference rules.

use mantissa_kernels::Step as KernelStep;
use mantissa_num::blockwise::{Range, Step};
use mantissa_num::{Code, Rule, Scheme, e8m0};

/// NVFP4's block scales in one tensor by their E4M3 codes, made once: `code = E4M3(amax · multiplier)`.
#[derive(Clone, Debug)]
pub(super) struct ByAmax {
    multiplier: f32,
    /// Step and scale by code.
    blocks: Vec<(f32, f32)>,
}

impl ByAmax {
    /// Makes the table for the scale `outer` of the tensor, for rules whose steps are multipliers.
    pub(super) fn of(scheme: &Scheme, outer: Option<f32>) -> Option<Self> {
        let multiplier = scheme.scale_of_amax(outer)?;
        let block = |code: u32| {
            let block = scheme.block_of_scale(code, outer);
            let Step::Multiply(step) = block.step() else { return None };
            Some((step, scheme.format.decoder(block.scale, 0, outer).parts().1))
        };
        Some(ByAmax { multiplier, blocks: (0..128).map(block).collect::<Option<_>>()? })
    }

    /// Writes steps and scales of blocks with these largest magnitudes.
    pub(super) fn choose(
        &self,
        headroom: f32,
        amax: &mut [f32],
        steps: &mut [KernelStep],
        scales: &mut [f32],
    ) {
        amax.iter_mut().for_each(|amax| *amax = *amax * headroom * self.multiplier);
        for ((raw, step), scale) in amax.iter().zip(steps).zip(scales) {
            let (by, block_scale) = self.blocks[usize::from(e4m3_code(*raw)) & 127];
            (*step, *scale) = (KernelStep::Multiply(by), block_scale);
        }
    }
}

/// E4M3 code nearest to a non-negative value, ties to even, saturating.
fn e4m3_code(x: f32) -> u8 {
    // Below 2^-6 steps are 2^-9: a sum with 2^14 rounds to them.
    if x < 0.015_625 {
        return ((x + 16_384.0 - 16_384.0) * 512.0) as u8;
    }
    let bits = x.min(448.0).to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    ((rounded >> 20) - (120 << 3)).min(126) as u8
}

/// Power-of-two scales of a rule by the exponent of amax: the scale grows by one step within each binade at most.
#[derive(Clone, Debug)]
pub(super) struct Powers {
    /// By exponent field: the scale code of its smallest amax, and the bits from which on it is the next.
    codes: Vec<(u8, u32)>,
}

impl Powers {
    /// Makes the table; `None` for scales that are no powers of two or whose steps are no quotients.
    pub(super) fn of(scheme: &Scheme) -> Option<Self> {
        if scheme.format.scale()?.code != Code::E8m0 || scheme.encoder.rule == Rule::AbsMean {
            return None;
        }
        let code = |bits: u32| {
            let amax = f32::from_bits(bits);
            let block = scheme.block(Range { min: -amax, max: amax, count: 32, ..Range::EMPTY }, false, None);
            let scale = e8m0::decode(block.scale as u8);
            (block.step() == Step::Divide(scale)).then_some(block.scale as u8)
        };
        let binade = |field: u32| {
            let (first, last) = (field << 23, (field << 23) + 0x007f_ffff);
            let (low, high) = (code(first)?, code(last)?);
            // The least bits whose code is greater.
            let (mut below, mut above) = (first, last + 1);
            while above - below > 1 && high > low {
                let middle = below + (above - below) / 2;
                if code(middle)? > low { above = middle } else { below = middle }
            }
            (high <= low + 1).then_some((low, if high > low { above } else { u32::MAX }))
        };
        Some(Powers { codes: (0..255).map(binade).collect::<Option<_>>()? })
    }

    /// Writes steps and scales of blocks with these largest magnitudes.
    pub(super) fn choose(&self, headroom: f32, amax: &[f32], steps: &mut [KernelStep], scales: &mut [f32]) {
        for ((amax, step), scale) in amax.iter().zip(steps).zip(scales) {
            let bits = amax.to_bits();
            let (low, next) = self.codes[(bits >> 23) as usize];
            *scale = e8m0::decode(low + u8::from(bits >= next));
            // The product's factor makes up for the headroom, so that the scale itself stays a power of two.
            *step = KernelStep::Divide(*scale * headroom);
        }
    }
}
