//! Storage of AdamW's two moments and SGD's momentum.

use mantissa_kernels::kernels;
use mantissa_model::{LoadError, zeros};

use super::map::StateMap;
use crate::arena::ParamTable;
use crate::blockwise::{BLOCK, BlockwiseRule, MIN_ELEMENTS, Moment, ZERO_CODES};

/// Storage format of moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MomentFormat {
    /// Stored as f32.
    #[default]
    F32,
    /// Stored as bf16, rounded to nearest.
    Bf16,
    /// 8-bit blocks; see [`crate::blockwise`]. Tensors with fewer than [`MIN_ELEMENTS`] elements keep f32.
    Blockwise8(BlockwiseRule),
    /// Codes of an 8-bit map with its own block size, updated in PyTorch's order. Small tensors keep f32.
    Map(StateMap),
}

/// Moments of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Moments {
    F32 { m: Vec<f32>, v: Vec<f32> },
    Bf16 { m: Vec<u16>, v: Vec<u16> },
    Eight { m: Vec<u8>, v: Vec<u8>, m_max: Vec<f32>, v_max: Vec<f32> },
    Map { map: StateMap, m: Vec<u8>, v: Vec<u8>, m_max: Vec<f32>, v_max: Vec<f32> },
}

/// Part of the moments, in whole blocks.
pub(crate) enum MomentsMut<'a> {
    F32 { m: &'a mut [f32], v: &'a mut [f32] },
    Bf16 { m: &'a mut [u16], v: &'a mut [u16] },
    Eight { m: &'a mut [u8], v: &'a mut [u8], m_max: &'a mut [f32], v_max: &'a mut [f32] },
}

impl MomentFormat {
    /// Returns the format for a parameter of `n` elements.
    fn of(self, n: usize) -> Self {
        match self {
            MomentFormat::Blockwise8(_) | MomentFormat::Map(_) if n < MIN_ELEMENTS => MomentFormat::F32,
            format => format,
        }
    }

    /// Bytes of the moments of a parameter of `n` elements; `second` is true if there are two moments.
    fn bytes(self, n: usize, second: bool) -> u64 {
        let one = match self.of(n) {
            MomentFormat::F32 => 4 * n as u64,
            MomentFormat::Bf16 => 2 * n as u64,
            MomentFormat::Blockwise8(_) => n as u64 + 4 * n.div_ceil(BLOCK) as u64,
            MomentFormat::Map(map) => n as u64 + 4 * map.count(n) as u64,
        };
        if second { 2 * one } else { one }
    }

    /// Bytes of the moments of all parameters, plus the f32 buffer of formats that are decoded a whole
    /// parameter at a time.
    pub fn table_bytes(self, table: &ParamTable, second: bool) -> u64 {
        let stored: u64 = table.iter().map(|param| self.bytes(param.range.len(), second)).sum();
        stored + MomentFormat::F32.bytes(self.decoded(table), second)
    }

    /// Elements of the largest parameter that is decoded whole.
    pub(crate) fn decoded(self, table: &ParamTable) -> usize {
        let whole = |n: &usize| matches!(self.of(*n), MomentFormat::Map(_));
        table.iter().map(|param| param.range.len()).filter(whole).max().unwrap_or(0)
    }
}

impl Moments {
    /// Allocates zero moments for a parameter of `n` elements.
    pub(crate) fn new(format: MomentFormat, n: usize, second: bool) -> Result<Self, LoadError> {
        let memory = LoadError::Memory { what: "optimizer state", bytes: format.bytes(n, second) };
        let more = if second { n } else { 0 };
        let moments = || {
            Some(match format.of(n) {
                MomentFormat::F32 => Moments::F32 { m: zeros(n)?, v: zeros(more)? },
                MomentFormat::Bf16 => Moments::Bf16 { m: zeros(n)?, v: zeros(more)? },
                MomentFormat::Blockwise8(_) => Moments::Eight {
                    m: vec![ZERO_CODES.0; n],
                    v: vec![ZERO_CODES.1; more],
                    m_max: zeros(n.div_ceil(BLOCK))?,
                    v_max: zeros(more.div_ceil(BLOCK))?,
                },
                MomentFormat::Map(map) => Moments::Map {
                    map,
                    m: vec![map.zeros().0; n],
                    v: vec![map.zeros().1; more],
                    m_max: zeros(map.count(n))?,
                    v_max: zeros(if second { map.count(n) } else { 0 })?,
                },
            })
        };
        moments().ok_or(memory)
    }

    /// Decodes into `wide` (f32) moments that can only be updated whole; returns true if these are such.
    pub(crate) fn decode(&self, wide: &mut Moments) -> bool {
        let (Moments::Map { map, m, v, m_max, v_max }, Moments::F32 { m: wide_m, v: wide_v }) = (self, wide)
        else {
            return false;
        };
        wide_m.resize(m.len(), 0.0);
        wide_v.resize(v.len(), 0.0);
        map.decode(false, m, m_max, wide_m);
        map.decode(true, v, v_max, wide_v);
        true
    }

    /// Encodes updated moments that [`decode`](Self::decode) decoded.
    pub(crate) fn encode(&mut self, wide: &Moments) {
        if let (Moments::Map { map, m, v, m_max, v_max }, Moments::F32 { m: wide_m, v: wide_v }) =
            (self, wide)
        {
            map.encode(false, wide_m, m, m_max);
            map.encode(true, wide_v, v, v_max);
        }
    }

    /// Splits into pieces of `piece` elements, a multiple of [`BLOCK`]; the last may be shorter. Empty for
    /// map codes, which are decoded whole.
    pub(crate) fn pieces(&mut self, piece: usize) -> Vec<MomentsMut<'_>> {
        match self {
            Moments::F32 { m, v } => {
                let mut v = v.chunks_mut(piece);
                m.chunks_mut(piece).map(|m| MomentsMut::F32 { m, v: v.next().unwrap_or_default() }).collect()
            }
            Moments::Bf16 { m, v } => {
                let mut v = v.chunks_mut(piece);
                m.chunks_mut(piece).map(|m| MomentsMut::Bf16 { m, v: v.next().unwrap_or_default() }).collect()
            }
            Moments::Eight { m, v, m_max, v_max } => {
                let (mut v, mut v_max) = (v.chunks_mut(piece), v_max.chunks_mut(piece / BLOCK));
                let all = m.chunks_mut(piece).zip(m_max.chunks_mut(piece / BLOCK));
                all.map(|(m, m_max)| MomentsMut::Eight {
                    m,
                    v: v.next().unwrap_or_default(),
                    m_max,
                    v_max: v_max.next().unwrap_or_default(),
                })
                .collect()
            }
            Moments::Map { .. } => Vec::new(),
        }
    }

    /// Returns every array with its name, for a checkpoint.
    pub(crate) fn arrays(&self) -> Vec<(&'static str, Array<'_>)> {
        match self {
            Moments::F32 { m, v } => vec![("m", Array::F32(m)), ("v", Array::F32(v))],
            Moments::Bf16 { m, v } => vec![("m", Array::Bf16(m)), ("v", Array::Bf16(v))],
            Moments::Eight { m, v, m_max, v_max } | Moments::Map { m, v, m_max, v_max, .. } => vec![
                ("m", Array::U8(m)),
                ("v", Array::U8(v)),
                ("m_absmax", Array::F32(m_max)),
                ("v_absmax", Array::F32(v_max)),
            ],
        }
    }

    /// Returns the same arrays for restoring.
    pub(crate) fn arrays_mut(&mut self) -> Vec<(&'static str, ArrayMut<'_>)> {
        match self {
            Moments::F32 { m, v } => vec![("m", ArrayMut::F32(m)), ("v", ArrayMut::F32(v))],
            Moments::Bf16 { m, v } => vec![("m", ArrayMut::Bf16(m)), ("v", ArrayMut::Bf16(v))],
            Moments::Eight { m, v, m_max, v_max } | Moments::Map { m, v, m_max, v_max, .. } => vec![
                ("m", ArrayMut::U8(m)),
                ("v", ArrayMut::U8(v)),
                ("m_absmax", ArrayMut::F32(m_max)),
                ("v_absmax", ArrayMut::F32(v_max)),
            ],
        }
    }
}

/// Array of an optimizer state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Array<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// f16 bits.
    F16(&'a [u16]),
    /// Low halves of f32 values.
    U16(&'a [u16]),
    /// 8-bit codes.
    U8(&'a [u8]),
}

/// Array of an optimizer state, for restoring.
#[derive(Debug, PartialEq)]
pub enum ArrayMut<'a> {
    /// f32 values.
    F32(&'a mut [f32]),
    /// bf16 bits.
    Bf16(&'a mut [u16]),
    /// f16 bits.
    F16(&'a mut [u16]),
    /// Low halves of f32 values.
    U16(&'a mut [u16]),
    /// 8-bit codes.
    U8(&'a mut [u8]),
}

impl MomentsMut<'_> {
    /// Passes the moments of block `block` to `update` as f32 and stores the results. 8-bit moments go to
    /// `eight` instead.
    pub(crate) fn block(
        &mut self,
        block: usize,
        update: impl FnOnce(&mut [f32], &mut [f32]),
        eight: impl FnOnce(Moment<'_>, Moment<'_>),
    ) {
        let span = |len: usize| (block * BLOCK).min(len)..((block + 1) * BLOCK).min(len);
        match self {
            MomentsMut::F32 { m, v } => {
                let (m_span, v_span) = (span(m.len()), span(v.len()));
                update(&mut m[m_span], &mut v[v_span]);
            }
            MomentsMut::Bf16 { m, v } => {
                let (mut wide_m, mut wide_v) = ([0.0; BLOCK], [0.0; BLOCK]);
                let (m_span, v_span) = (span(m.len()), span(v.len()));
                let (m, v) = (&mut m[m_span], &mut v[v_span]);
                let (wide_m, wide_v) = (&mut wide_m[..m.len()], &mut wide_v[..v.len()]);
                kernels().bf16_to_f32(m, wide_m);
                kernels().bf16_to_f32(v, wide_v);
                update(wide_m, wide_v);
                kernels().f32_to_bf16(wide_m, m);
                kernels().f32_to_bf16(wide_v, v);
            }
            MomentsMut::Eight { m, v, m_max, v_max } => {
                let span = span(m.len());
                let m = Moment { codes: &mut m[span.clone()], absmax: &mut m_max[block] };
                eight(m, Moment { codes: &mut v[span], absmax: &mut v_max[block] });
            }
        }
    }
}
