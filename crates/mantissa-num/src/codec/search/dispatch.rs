//! The search of each codec, compiled for the instruction set of its lanes.

use super::{Lanes, Target, affine, lattice, single, symmetric, ternary_lattice};
use crate::codec::CodecId;
use crate::lanes::Work;

/// Encodes one block of `codec`, which must [take importance](crate::codec::Codec::takes_importance), using the lanes `l`.
/// `importance` has one finite, non-negative weight per element of the block.
#[inline(always)]
pub(in crate::codec) fn encode_block<L: Lanes>(
    l: L,
    codec: CodecId,
    x: &[f32],
    importance: Option<&[f32]>,
    block: &mut [u8],
) {
    let mut target = Target::new(l, x, importance);
    block.fill(0);
    if target.amax == 0.0 {
        return;
    }
    let search = Search { codec, target: &mut target, block };
    match codec {
        CodecId::Q2K => l.call(Q2K(search)),
        CodecId::Q4K => l.call(Q4K(search)),
        CodecId::Q5K => l.call(Q5K(search)),
        CodecId::Q3K => l.call(Q3K(search)),
        CodecId::Q6K => l.call(Q6K(search)),
        CodecId::Iq4Nl => l.call(Iq4Nl(search)),
        CodecId::Iq4Xs => l.call(Iq4Xs(search)),
        CodecId::Iq2Xxs | CodecId::Iq2Xs | CodecId::Iq2S => {
            search.target.favour_large();
            l.call(Iq2Or3(search));
        }
        CodecId::Iq3Xxs | CodecId::Iq3S => l.call(Iq2Or3(search)),
        CodecId::Iq1S => l.call(Iq1S(search)),
        CodecId::Iq1M => l.call(Iq1M(search)),
        CodecId::Q4_0 | CodecId::Q5_0 | CodecId::Q4_1 | CodecId::Q5_1 => l.call(Legacy(search)),
        _ => {}
    }
}

/// Operands of a search.
struct Search<'a> {
    codec: CodecId,
    target: &'a mut Target,
    block: &'a mut [u8],
}

/// Declares one type of [`Work`] for each search, which makes it a function of its own.
macro_rules! searches {
    ($($name:ident: |$l:ident, $s:ident| $search:expr;)*) => {
        $(struct $name<'a>(Search<'a>);

        impl Work for $name<'_> {
            type Out = ();

            #[inline(always)]
            fn run<L: Lanes>(self, $l: L) {
                let $s = self.0;
                $search;
            }
        })*
    };
}

searches! {
    Q2K: |l, s| affine::encode_q2_k(l, s.target, s.block);
    Q4K: |l, s| affine::encode_q4_k(l, s.target, s.block);
    Q5K: |l, s| affine::encode_q5_k(l, s.target, s.block);
    Q3K: |l, s| symmetric::encode_q3_k(l, s.target, s.block);
    Q6K: |l, s| symmetric::encode_q6_k(l, s.target, s.block);
    Iq4Nl: |l, s| single::encode_iq4_nl(l, s.target, s.block);
    Iq4Xs: |l, s| symmetric::encode_iq4_xs(l, s.target, s.block);
    Iq2Or3: |l, s| lattice::encode(l, s.codec, s.target, s.block);
    Iq1S: |l, s| ternary_lattice::encode_iq1_s(l, s.target, s.block);
    Iq1M: |l, s| ternary_lattice::encode_iq1_m(l, s.target, s.block);
    Legacy: |l, s| single::encode_legacy(l, s.codec, s.target, s.block);
}
