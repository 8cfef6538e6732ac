//! The packed products of each instruction-set level, and the choice of a level.

use std::ops::Range;
use std::sync::OnceLock;

use super::codes::pack_block;
use super::dot::{Dot, Plain, Quad};
use super::float_code::PairTable;
use super::float_product::{FloatTile, Strip, by_f32};
use super::panel_format::{Panel, PanelFormat};
use super::product::{Product, Scales, Shared, Tile, WideProduct, expand, product, wide_product, zero};
use super::quantize::{Shape, quantize};
use super::scales::{Stored, widen};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{BLOCK, ROWS};
use crate::Isa;

/// Level of the packed products: the level of [`kernels`](crate::kernels), with the integer dot products that the
/// processor has.
#[derive(Clone, Copy, Debug)]
pub struct PackedLevel {
    name: &'static str,
    /// Products of a width of codes, by [`index`].
    widths: [Width; 8],
    /// Products of expanded panels with many, some, few and one token.
    wide: [WideProduct; 4],
    sizes: Sizes,
    quantize: Quantize,
    pack: Pack,
    widen: Widen,
    zero: Zero,
    /// Floating-point products with one token, few, some and many.
    floats: [FloatTile; 4],
    /// The same by the processor's dot product of bf16.
    bf16: Option<Bf16>,
    /// True if many tokens are multiplied on AMX tiles, where those are faster.
    amx: bool,
}

/// Numbers of tokens for which a level has products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    few: usize,
    some: usize,
    wide: usize,
    /// Most tokens that read the codes directly: tile by tile is faster than expanding up to here (measured).
    direct: usize,
    /// True if more tokens than that take tiles of `wide` tokens only.
    only_wide: bool,
    /// True if there are products of any number of tokens up to `wide`.
    any: bool,
}

impl Sizes {
    /// True if a panel is expanded for so many tokens.
    pub(crate) fn expands(self, tokens: usize) -> bool {
        tokens > self.direct
    }

    /// Splits tokens into tiles: large ones, then smaller ones for the rest. The last tile may be longer than the rest:
    /// a tile costs little more than one token, since codes are unpacked once for it.
    pub(crate) fn tiles(self, tokens: usize) -> impl Iterator<Item = Range<usize>> + Clone + Send {
        let Sizes { few, some, .. } = self;
        let wide = if self.expands(tokens) { self.wide } else { usize::MAX };
        let mut start = 0;
        std::iter::from_fn(move || {
            let tokens = match tokens.saturating_sub(start) {
                0 => return None,
                left if self.any => left.min(self.wide),
                _ if self.only_wide && wide < usize::MAX => wide,
                1 => 1,
                // Two equal tiles are faster than a large one and a small rest.
                left if left > wide && left == 2 * some => some,
                left if left >= wide => wide,
                left if left > few + 1 => some,
                _ => few,
            };
            start += tokens;
            Some(start - tokens..start)
        })
    }

    /// Tokens of all tiles.
    pub(crate) fn padded(self, tokens: usize) -> usize {
        self.tiles(tokens).last().map_or(0, |tile| tile.end)
    }
}

/// Products in bf16.
#[derive(Clone, Copy, Debug)]
struct Bf16 {
    tiles: [FloatTile; 4],
    expand: ExpandPairs,
}

type Quantize = unsafe fn(&Shape, &[f32], &mut [[i8; BLOCK]], &mut [f32], &mut [i32]);
type Pack = unsafe fn(&[[u8; BLOCK]; ROWS], u32, &mut [Quad]);
type Widen = unsafe fn(&Stored<'_>, &[[f32; ROWS]], &mut [[f32; ROWS]]);
type Zero = fn(&PanelFormat) -> i32;
type ExpandPairs = unsafe fn(&[Quad], &PairTable, &mut [Quad]);
type Expand = unsafe fn(&[Quad], &[u8; 16], &mut [Quad]);

/// Functions of one width of codes.
#[derive(Clone, Copy, Debug)]
struct Width {
    one: Product,
    few: Product,
    some: Product,
    expand: Expand,
}

/// Place of a width in [`PackedLevel::widths`]; the last are 4 and 3 bits with a table.
const fn index(bits: u32, table: bool) -> usize {
    match bits {
        4 if table => 6,
        3 if table => 7,
        8 => 5,
        bits => bits as usize - 2,
    }
}

impl PackedLevel {
    /// The level for this process: the best one below the level of [`kernels`](crate::kernels).
    pub fn best() -> &'static PackedLevel {
        static LEVEL: OnceLock<PackedLevel> = OnceLock::new();
        LEVEL.get_or_init(|| Self::available(crate::kernels().isa()).next().unwrap_or(PLAIN))
    }

    /// Every level that `isa` and the processor allow, the best one first.
    pub fn available(isa: Isa) -> impl Iterator<Item = PackedLevel> {
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let vector =
                matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Amx) && is_x86_feature_detected!("f16c");
            if matches!(isa, Isa::Avx512 | Isa::Amx) && is_x86_feature_detected!("avx512vnni") {
                let bf16 =
                    (crate::isa::has_bf16_dot() && is_x86_feature_detected!("avx512vbmi")).then_some(BF16);
                if isa == Isa::Amx && bf16.is_some() && crate::amx::has_int8() {
                    levels.push(PackedLevel { bf16, ..AMX });
                }
                // On some Intel processors f32 is faster than the dot product of bf16.
                let bf16 = bf16.filter(|_| crate::isa::prefers_bf16_dot());
                levels.push(PackedLevel { bf16, ..AVX512_VNNI });
            }
            if vector && is_x86_feature_detected!("avxvnni") {
                levels.push(AVX_VNNI);
            }
            if vector {
                levels.push(AVX2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if isa == Isa::Neon {
            let dotprod = std::arch::is_aarch64_feature_detected!("dotprod");
            if dotprod && std::arch::is_aarch64_feature_detected!("i8mm") {
                levels.push(NEON_I8MM);
            }
            if dotprod {
                levels.push(NEON_DOTPROD);
            }
            levels.push(NEON);
        }
        let _ = isa;
        levels.push(PLAIN);
        levels.into_iter()
    }

    /// Name of the level, for reports.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Quantizes a token.
    pub(crate) fn quantize(
        &self,
        shape: &Shape,
        x: &[f32],
        codes: &mut [[i8; BLOCK]],
        scales: &mut [f32],
        sums: &mut [i32],
    ) {
        // SAFETY: `available`, the only source of levels, has checked the level's features.
        unsafe { (self.quantize)(shape, x, codes, scales, sums) }
    }

    /// Packs a block of codes.
    pub(crate) fn pack(&self, codes: &[[u8; BLOCK]; ROWS], bits: u32, out: &mut [Quad]) {
        // SAFETY: as in `quantize`.
        unsafe { (self.pack)(codes, bits, out) }
    }

    /// Widens the scales or minima of a panel.
    pub(crate) fn widen(&self, stored: &Stored<'_>, scales: &[[f32; ROWS]], out: &mut [[f32; ROWS]]) {
        // SAFETY: as in `quantize`.
        unsafe { (self.widen)(stored, scales, out) }
    }

    /// Level that stands for 0 in the bytes that the level multiplies.
    pub(crate) fn zero(&self, format: &PanelFormat) -> i32 {
        (self.zero)(format)
    }

    /// Expands the codes of a panel to bytes.
    pub(crate) fn expand(&self, format: &PanelFormat, codes: &[Quad], out: &mut [Quad]) {
        let levels = format.levels.unwrap_or([0; 16]);
        // SAFETY: as in `quantize`.
        unsafe { (self.width(format).expand)(codes, &levels, out) }
    }

    /// Tiles of products of integers with units of `unit` columns.
    pub(crate) fn sizes(&self, unit: usize) -> Sizes {
        #[cfg(target_arch = "x86_64")]
        if let Some(direct) = self.amx.then(|| tiles::direct_tokens(unit)).flatten() {
            return Sizes { wide: tiles::TOKENS, direct, only_wide: true, ..self.sizes };
        }
        let _ = (unit, self.amx);
        self.sizes
    }

    /// Quads of a token that lie together for products with units of `unit` columns.
    pub(crate) fn together(&self, tokens: usize, unit: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.by_tiles(tokens, unit) {
            return tiles::quads_of_step(unit);
        }
        let _ = (tokens, unit);
        1
    }

    /// True if products of so many tokens run on AMX tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn by_tiles(&self, tokens: usize, unit: usize) -> bool {
        let sizes = self.sizes(unit);
        sizes.only_wide && sizes.expands(tokens)
    }

    fn width(&self, format: &PanelFormat) -> &Width {
        &self.widths[index(format.bits, format.levels.is_some())]
    }

    /// Multiplies a panel with a tile of `out.len()` tokens, which is one of [`tiles`](Sizes::tiles) of few tokens.
    pub(crate) fn product(
        &self,
        format: &PanelFormat,
        shared: &Shared,
        w: &Panel<'_>,
        x: &Tile<'_>,
        memory: &mut Scales<'_>,
        out: &mut [[f32; ROWS]],
    ) {
        let width = self.width(format);
        let product = match out.len() {
            1 => width.one,
            tokens if tokens == self.sizes.few => width.few,
            _ => width.some,
        };
        // SAFETY: as in `quantize`.
        unsafe { product(shared, w, x, memory, out) };
    }

    /// Multiplies an expanded panel with a tile of `out.len()` tokens, which is one of [`tiles`](Sizes::tiles) of many
    /// tokens.
    pub(crate) fn wide_product(
        &self,
        shared: &Shared,
        w: &[Quad],
        scales: &Scales<'_>,
        x: &Tile<'_>,
        out: &mut [[f32; ROWS]],
    ) {
        let product = match out.len() {
            1 => self.wide[3],
            tokens if tokens == self.sizes.few => self.wide[2],
            tokens if tokens == self.sizes.some => self.wide[1],
            _ => self.wide[0],
        };
        // SAFETY: as in `quantize`.
        unsafe { product(shared, w, scales, x, out) };
    }
}

impl PackedLevel {
    /// True if products of bf16 use the processor's dot product.
    pub fn has_bf16(&self) -> bool {
        self.bf16.is_some()
    }

    /// Tiles of products of floats.
    pub(crate) fn float_sizes(&self, in_bf16: bool) -> Sizes {
        #[cfg(target_arch = "x86_64")]
        if self.floats_by_tiles(in_bf16) {
            return Sizes { wide: tiles::TOKENS, any: true, ..self.sizes };
        }
        let _ = in_bf16;
        self.sizes
    }

    /// True if products of floats run on AMX tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn floats_by_tiles(&self, in_bf16: bool) -> bool {
        self.amx && in_bf16
    }

    /// Floating-point products with a tile of `tokens`.
    pub(crate) fn float_tile(&self, tokens: usize, in_bf16: bool) -> &FloatTile {
        let tiles = self.bf16.as_ref().filter(|_| in_bf16).map_or(&self.floats, |bf16| &bf16.tiles);
        tiles.iter().find(|tile| tile.tokens == tokens).unwrap_or(&tiles[0])
    }

    /// Expands 8-bit floats, in the order of [`PairDot::wide_pairs`](super::float_product::PairDot::wide_pairs), to
    /// pairs of bf16.
    pub(crate) fn expand_pairs(&self, codes: &[Quad], table: &PairTable, out: &mut [Quad]) {
        if let Some(bf16) = &self.bf16 {
            // SAFETY: as in `quantize`.
            unsafe { (bf16.expand)(codes, table, out) };
        }
    }
}

/// [`zero`] of the level of a proof.
const fn zero_of<D: Dot>(_: unsafe fn() -> D) -> Zero {
    zero::<D>
}

/// Most tokens of a tile.
pub(crate) const MOST_TOKENS: usize = 12;

/// [`AVX512_VNNI`] with AMX tiles for many tokens.
#[cfg(target_arch = "x86_64")]
const AMX: PackedLevel = PackedLevel { name: "amx", amx: true, ..AVX512_VNNI };

/// Declares the functions of a level, each inside a function that enables the level's features.
macro_rules! level {
    ($(#[$cfg:meta])* $table:ident = $name:literal in $level:ident, $proof:expr, few $few:literal, some $some:literal, wide $wide:literal, direct $direct:literal,
        panels $panels_one:literal $panels_few:literal $panels_wide:literal $(, features $features:literal)?) => {
        $(#[$cfg])*
        const $table: PackedLevel = PackedLevel {
            name: $name,
            widths: [
                $level::b2::WIDTH,
                $level::b3::WIDTH,
                $level::b4::WIDTH,
                $level::b5::WIDTH,
                $level::b6::WIDTH,
                $level::b8::WIDTH,
                $level::t4::WIDTH,
                $level::t3::WIDTH,
            ],
            wide: [
                $level::w_many::PRODUCT,
                $level::w_some::PRODUCT,
                $level::w_few::PRODUCT,
                $level::w_one::PRODUCT,
            ],
            sizes: Sizes { few: $few, some: $some, wide: $wide, direct: $direct, only_wide: false, any: false },
            quantize: $level::quantize,
            pack: $level::pack,
            widen: $level::widen,
            zero: zero_of($level::proof),
            floats: [$level::f1::TILE, $level::few::TILE, $level::some::TILE, $level::many::TILE],
            bf16: None,
            amx: false,
        };
        $(#[$cfg])*
        mod $level {
            use super::*;

            level!(@width b2, 2, false, $proof, $few, $some $(, $features)?);
            level!(@width b3, 3, false, $proof, $few, $some $(, $features)?);
            level!(@width b4, 4, false, $proof, $few, $some $(, $features)?);
            level!(@width b5, 5, false, $proof, $few, $some $(, $features)?);
            level!(@width b6, 6, false, $proof, $few, $some $(, $features)?);
            level!(@width b8, 8, false, $proof, $few, $some $(, $features)?);
            level!(@width t4, 4, true, $proof, $few, $some $(, $features)?);
            level!(@width t3, 3, true, $proof, $few, $some $(, $features)?);

            level!(@wide w_one, 1, $proof $(, $features)?);
            level!(@wide w_few, $few, $proof $(, $features)?);
            level!(@wide w_some, $some, $proof $(, $features)?);
            level!(@wide w_many, $wide, $proof $(, $features)?);

            /// Proof of the level, for its type.
            $(#[target_feature(enable = $features)])?
            pub(super) fn proof() -> impl Dot {
                $proof
            }

            // The same code as everywhere, compiled for the level's registers.
            $(#[target_feature(enable = $features)])?
            pub(super) fn pack(codes: &[[u8; BLOCK]; ROWS], bits: u32, out: &mut [Quad]) {
                pack_block(codes, bits, out);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize(
                shape: &Shape,
                x: &[f32],
                codes: &mut [[i8; BLOCK]],
                scales: &mut [f32],
                sums: &mut [i32],
            ) {
                super::quantize($proof, shape, x, codes, scales, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn widen(stored: &Stored<'_>, scales: &[[f32; ROWS]], out: &mut [[f32; ROWS]]) {
                super::widen($proof, stored, scales, out);
            }

            level!(@floats f1, by_f32, $proof, 1, $panels_one $(, $features)?);
            level!(@floats few, by_f32, $proof, $few, $panels_few $(, $features)?);
            level!(@floats some, by_f32, $proof, $some, $panels_wide $(, $features)?);
            level!(@floats many, by_f32, $proof, $wide, $panels_wide $(, $features)?);
        }
    };
    (@floats $name:ident, $product:ident, $proof:expr, $tokens:literal, $panels:literal $(, $features:literal)?) => {
        pub(super) mod $name {
            use super::*;

            pub(crate) const TILE: FloatTile = FloatTile { tokens: $tokens, panels: $panels, several, one };

            $(#[target_feature(enable = $features)])?
            fn several(w: &Strip<'_>, x: &[u32], out: &mut [[f32; ROWS]]) {
                $product::<_, $tokens, $panels>($proof, w, x, out);
            }

            $(#[target_feature(enable = $features)])?
            fn one(w: &Strip<'_>, x: &[u32], out: &mut [[f32; ROWS]]) {
                $product::<_, $tokens, 1>($proof, w, x, out);
            }
        }
    };
    (@wide $name:ident, $tokens:literal, $proof:expr $(, $features:literal)?) => {
        pub(super) mod $name {
            use super::*;

            pub(crate) const PRODUCT: WideProduct = product;

            $(#[target_feature(enable = $features)])?
            fn product(s: &Shared, w: &[Quad], scales: &Scales<'_>, x: &Tile<'_>, out: &mut [[f32; ROWS]]) {
                wide_product::<_, $tokens>($proof, s, w, scales, x, out);
            }
        }
    };
    (@width $width:ident, $bits:literal, $is_table:literal, $proof:expr, $few:literal, $some:literal $(, $features:literal)?) => {
        pub(super) mod $width {
            use super::*;

            pub(crate) const WIDTH: Width = Width { one, few, some, expand };

            $(#[target_feature(enable = $features)])?
            fn one(s: &Shared, w: &Panel<'_>, x: &Tile<'_>, memory: &mut Scales<'_>, out: &mut [[f32; ROWS]]) {
                product::<_, $bits, $is_table, 1>($proof, s, w, x, memory, out);
            }

            $(#[target_feature(enable = $features)])?
            fn few(s: &Shared, w: &Panel<'_>, x: &Tile<'_>, memory: &mut Scales<'_>, out: &mut [[f32; ROWS]]) {
                product::<_, $bits, $is_table, $few>($proof, s, w, x, memory, out);
            }

            $(#[target_feature(enable = $features)])?
            fn some(s: &Shared, w: &Panel<'_>, x: &Tile<'_>, memory: &mut Scales<'_>, out: &mut [[f32; ROWS]]) {
                product::<_, $bits, $is_table, $some>($proof, s, w, x, memory, out);
            }

            $(#[target_feature(enable = $features)])?
            fn expand(codes: &[Quad], levels: &[u8; 16], out: &mut [Quad]) {
                super::super::expand::<_, $bits, $is_table>($proof, codes, levels, out);
            }
        }
    };
}

level!(PLAIN = "scalar" in plain, Plain, few 2, some 2, wide 4, direct 8, panels 2 1 1);
level!(
    #[cfg(target_arch = "aarch64")]
    NEON = "neon" in neon, crate::packed::neon::Neon::new(), few 2, some 2, wide 3, direct 8, panels 4 2 1,
    features "neon"
);
level!(
    #[cfg(target_arch = "aarch64")]
    NEON_DOTPROD = "neon-dotprod" in neon_dotprod, crate::packed::neon::NeonDotprod::new(), few 2, some 4, wide 4,
    direct 8, panels 4 2 1, features "neon,dotprod"
);
level!(
    #[cfg(target_arch = "aarch64")]
    NEON_I8MM = "neon-i8mm" in neon_i8mm, crate::packed::neon::NeonI8mm::new(), few 2, some 4, wide 4, direct 8,
    panels 4 2 1, features "neon,dotprod,i8mm"
);
level!(
    #[cfg(target_arch = "x86_64")]
    AVX2 = "avx2" in avx2, crate::packed::x86::Avx2::new(), few 2, some 2, wide 3, direct 8, panels 4 2 1, features "avx2,fma,f16c"
);
level!(
    #[cfg(target_arch = "x86_64")]
    AVX_VNNI = "avx-vnni" in avx_vnni, crate::packed::x86::AvxVnni::new(), few 2, some 2, wide 3, direct 8,
    panels 4 2 1, features "avx2,fma,f16c,avxvnni"
);
level!(
    #[cfg(target_arch = "x86_64")]
    AVX512_VNNI = "avx512-vnni" in avx512_vnni, crate::packed::x86::Avx512Vnni::new(), few 4, some 8, wide 12, direct 64,
    panels 8 4 2, features "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
);

/// Products of bf16 of [`AVX512_VNNI`], for processors with AVX-512 BF16 and VBMI.
#[cfg(target_arch = "x86_64")]
const BF16: Bf16 = Bf16 {
    tiles: [avx512_bf16::f1::TILE, avx512_bf16::few::TILE, avx512_bf16::some::TILE, avx512_bf16::many::TILE],
    expand: avx512_bf16::expand,
};

#[cfg(target_arch = "x86_64")]
mod avx512_bf16 {
    use super::super::float_product::{by_bf16, expand_pairs};
    use super::*;
    use crate::packed::x86::Avx512Bf16;

    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi"
    )]
    pub(super) fn expand(codes: &[Quad], table: &PairTable, out: &mut [Quad]) {
        expand_pairs(Avx512Bf16::new(), codes, table, out);
    }

    level!(@floats f1, by_bf16, Avx512Bf16::new(), 1, 8,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi");
    level!(@floats few, by_bf16, Avx512Bf16::new(), 4, 4,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi");
    level!(@floats some, by_bf16, Avx512Bf16::new(), 8, 2,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi");
    level!(@floats many, by_bf16, Avx512Bf16::new(), 12, 2,
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi");
}
