//! Panels of weights whose codes stand for integers.

use mantissa_kernels::packed::{BLOCK, Grid, PanelFormat, Panels, Row, SUPER, ScaleCode};
use mantissa_num::codec::{BlockIntegers, Codec, ScaleStorage};
use mantissa_num::{Blocks, Code, Codes, Format, Quantized, Sense, minifloat};

/// Packs a weight; the inner value is `None` if memory does not hold it.
///
/// # Errors
/// The reason why the weight has no panels.
pub(super) fn panels(q: &Quantized, grid: Grid, threads: usize) -> Result<Option<Panels>, &'static str> {
    match (q.format.codec(), &q.codes) {
        (Some(codec), Codes::Packed(bytes)) => of_blocks(codec, bytes, (q.rows, q.cols), grid, threads),
        (None, Codes::U8(codes)) => of_codes(q, codes, grid, threads),
        _ => Err("codes wider than 8 bits, or of a trellis"),
    }
}

/// Columns that share an activation scale, for a weight with this group.
fn unit(group: usize, cols: usize, grid: Grid) -> usize {
    group.min(grid.group).min(cols.next_multiple_of(BLOCK))
}

/// Storage of scales or minima of a codec in panels.
pub(crate) fn scale_code(part: ScaleStorage) -> ScaleCode {
    match part {
        ScaleStorage::Absent => ScaleCode::Absent,
        ScaleStorage::Half => ScaleCode::F16,
        ScaleStorage::Power => ScaleCode::Exponent,
        ScaleStorage::Single => ScaleCode::F32,
        ScaleStorage::HalfE4m3 => ScaleCode::E4m3,
        ScaleStorage::Integer => ScaleCode::Integer,
    }
}

/// Packs the blocks of a codec.
fn of_blocks(
    codec: &'static Codec,
    bytes: &[u8],
    (rows, cols): (usize, usize),
    grid: Grid,
    threads: usize,
) -> Result<Option<Panels>, &'static str> {
    let form = codec.id.integers();
    let stride = bytes.len() / rows.max(1);
    // A power of two below the normal numbers of f32 has no exponent code.
    let tiny =
        form.scales == ScaleStorage::Power && bytes.chunks_exact(codec.bytes).any(|block| block[0] < 2);
    let scale_code =
        |part| if part == ScaleStorage::Power && tiny { ScaleCode::F32 } else { scale_code(part) };
    let (doubled, factor) = if form.scales == ScaleStorage::HalfE4m3 { (2.0, 0.5) } else { (1.0, 1.0) };
    let levels = form.levels.map(|levels| levels.map(|level| (level as u8) ^ 0x80));
    let format = PanelFormat {
        bits: form.bits,
        levels,
        zero: if levels.is_some() { 128 } else { form.zero },
        group: form.group,
        unit: unit(form.group, cols, grid),
        scales: scale_code(form.scales),
        mins: scale_code(form.mins),
        factor: factor * form.factor,
    };
    let groups = codec.elements / form.group;
    let fill = |row: usize, out: &mut Row| {
        let mut block = BlockIntegers::default();
        for (i, bytes) in bytes[row * stride..(row + 1) * stride].chunks_exact(codec.bytes).enumerate() {
            codec.id.split(bytes, &mut block);
            let first = i * codec.elements;
            out.codes[first..first + codec.elements].copy_from_slice(&block.codes[..codec.elements]);
            for group in 0..groups {
                out.scales[i * groups + group] = block.scales[group] * doubled;
                out.mins[i * groups + group] = block.mins[group];
            }
            if form.scales == ScaleStorage::Integer {
                // Blocks of codecs with integer scales are super-blocks.
                (out.scale_supers[first / SUPER], out.min_supers[first / SUPER]) = (block.scale, block.min);
            }
        }
    };
    Ok(Panels::pack(format, rows, cols, threads, fill))
}

/// Elements of a format as unsigned levels: `factor · (level - zero)`.
struct Levels {
    bits: u32,
    /// Level of each code; `None` if the code itself, raised by `raise`, is its level.
    table: Option<Vec<u8>>,
    raise: u8,
    zero: u8,
    factor: f32,
}

/// Packs one code per element.
fn of_codes(q: &Quantized, codes: &[u8], grid: Grid, threads: usize) -> Result<Option<Panels>, &'static str> {
    let (rows, cols) = (q.rows, q.cols);
    let Levels { bits, table, raise, zero, factor } = levels(&q.format)?;
    let blocks = q.format.blocks().simplest(rows, cols);
    let group = group(blocks, cols)?;
    let scales: Vec<f32> = match q.format.scale() {
        None => vec![1.0],
        Some(_) => (0..q.scales.len()).map(|block| q.block_decoder(block).scale()).collect(),
    };
    let offsets = Offsets::of(q, raise)?;
    let tensor_factor = tensor_factor(q);
    let (scale_code, tensor_factor, values) = match tensor_factor {
        Some((values, factor)) => (ScaleCode::E4m3, factor, values),
        None => (ScaleCode::fitting(&scales), 1.0, scales),
    };
    let format = PanelFormat {
        bits,
        levels: table.as_ref().filter(|_| bits == 4).map(|table| std::array::from_fn(|i| table[i])),
        zero: if offsets.code() == ScaleCode::Absent { zero } else { 0 },
        group,
        unit: unit(group, cols, grid),
        scales: scale_code,
        mins: offsets.code(),
        factor: factor * tensor_factor,
    };
    let level = |code: u8| match &table {
        Some(table) if bits == 8 => table[usize::from(code)],
        Some(_) => code & 15,
        None => code.wrapping_add(raise),
    };
    let fill = |row: usize, out: &mut Row| {
        out.codes
            .iter_mut()
            .zip(&codes[row * cols..(row + 1) * cols])
            .for_each(|(out, code)| *out = level(*code));
        for g in 0..cols.div_ceil(group) {
            let block = if values.len() == 1 { 0 } else { blocks.index(cols, row, g * group) };
            out.scales[g] = values[block];
            out.mins[g] = offsets.value(block);
        }
    };
    Ok(Panels::pack(format, rows, cols, threads, fill))
}

/// Columns of a panel's group for these blocks.
fn group(blocks: Blocks, cols: usize) -> Result<usize, &'static str> {
    let whole = cols.next_multiple_of(BLOCK);
    match blocks {
        Blocks::Tensor | Blocks::Row => Ok(whole),
        Blocks::Group(g) | Blocks::Tile { cols: g, .. } => match g as usize {
            g if g >= cols => Ok(whole),
            g if g.is_multiple_of(BLOCK) => Ok(g),
            // The same scale is repeated.
            g if g.is_multiple_of(BLOCK / 2) => Ok(BLOCK / 2),
            _ => Err("groups are not multiples of 16 columns"),
        },
        Blocks::Flat(_) => Err("flat blocks do not divide the rows"),
        _ => Err("blocks of an unknown form"),
    }
}

/// Finds integers for the elements of a format.
fn levels(format: &Format) -> Result<Levels, &'static str> {
    let plain = |bits: u32, raise: u8| Levels { bits, table: None, raise, zero: raise, factor: 1.0 };
    let code = match format {
        Format::Affine(affine) => affine.code,
        Format::Table(table) if table.book.bits() <= 4 => return Ok(nibble_levels(format)),
        _ => return Err("a code book of more than 16 levels"),
    };
    Ok(match code {
        Code::Int(1) => return Err("1-bit integers"),
        Code::Int(bits) => plain(if bits == 7 { 8 } else { bits }, 1 << (bits - 1)),
        Code::Ternary => plain(2, 1),
        Code::Fixed64 => Levels { factor: 1.0 / 64.0, ..plain(8, 128) },
        Code::Float(float) if float.bits() <= 4 => nibble_levels(format),
        // Up to 7.5 in steps of an eighth.
        Code::Float(minifloat::E2M3) => {
            let table = (0..=255u32).map(|code| (format.element(code & 63) * 8.0 + 128.0) as u8).collect();
            Levels { bits: 8, table: Some(table), raise: 0, zero: 128, factor: 0.125 }
        }
        Code::Float(_) => return Err("8-bit floats are multiplied as floats"),
        _ => return Err("elements are not integers of 8 bits"),
    })
}

/// Levels of a table of up to 16 elements: exact where they are multiples of a power of two, else the nearest of 8
/// bits.
fn nibble_levels(format: &Format) -> Levels {
    let elements: [f32; 16] = std::array::from_fn(|code| format.element(code as u32));
    let amax = elements.iter().fold(0f32, |max, x| max.max(x.abs()));
    let exact = (0..7)
        .map(|k| 1.0 / (1u32 << k) as f32)
        .find(|step| amax <= 127.0 * step && elements.iter().all(|x| (x / step).fract() == 0.0));
    let factor = exact.unwrap_or_else(|| nearest_factor(&elements, amax));
    let table = elements.iter().map(|x| ((x / factor).round_ties_even() as i8 as u8) ^ 0x80).collect();
    Levels { bits: 4, table: Some(table), raise: 0, zero: 128, factor }
}

/// Returns the factor whose multiples of up to 127 are nearest to `elements`, by their squared error.
fn nearest_factor(elements: &[f32; 16], amax: f32) -> f32 {
    let error = |factor: f32| {
        elements
            .iter()
            .map(|x| (x / factor - (x / factor).round_ties_even()) * factor)
            .map(|e| e * e)
            .sum::<f32>()
    };
    let candidates = (0..=640).map(|i| amax / (127.0 - i as f32 / 10.0));
    candidates.min_by(|a, b| error(*a).total_cmp(&error(*b))).unwrap_or(amax / 127.0)
}

/// Splits NVFP4's scales into the stored E4M3 magnitudes and the tensor's factor.
fn tensor_factor(q: &Quantized) -> Option<(Vec<f32>, f32)> {
    let (tree, outer) = (q.format.scale()?, q.outer()?);
    let global = tree.tensor_wide()?;
    let factor = match global.sense {
        Sense::Divisor => 1.0 / outer,
        Sense::Multiplier => outer,
        Sense::Amax { full_scale } => outer / full_scale as f32,
        _ => return None,
    };
    let values: Vec<f32> = (0..q.scales.len()).map(|block| tree.code.decode(q.scales.get(block))).collect();
    let fits = tree.code == Code::Float(minifloat::E4M3) && factor.is_finite();
    (fits && values.iter().all(|x| x.is_finite() && x.is_sign_positive())).then_some((values, factor))
}

/// Offsets of the blocks.
enum Offsets {
    Absent,
    /// Zero points of unsigned codes.
    Zeros(Vec<f32>),
    Biases(ScaleCode, Vec<f32>),
}

impl Offsets {
    fn of(q: &Quantized, raise: u8) -> Result<Self, &'static str> {
        if q.format.has_bias() {
            return Ok(Offsets::Biases(ScaleCode::fitting(q.biases()), q.biases().to_vec()));
        }
        if !q.format.has_zero() {
            return Ok(Offsets::Absent);
        }
        let zeros: Vec<f32> = q.zeros().iter().map(|zero| (zero + i32::from(raise)) as f32).collect();
        match zeros.iter().all(|zero| (0.0..=255.0).contains(zero)) {
            true => Ok(Offsets::Zeros(zeros)),
            false => Err("zero points outside of 8 bits"),
        }
    }

    fn code(&self) -> ScaleCode {
        match self {
            Offsets::Absent => ScaleCode::Absent,
            Offsets::Zeros(_) => ScaleCode::Zero,
            Offsets::Biases(code, _) => *code,
        }
    }

    fn value(&self, block: usize) -> f32 {
        match self {
            Offsets::Absent => 0.0,
            Offsets::Zeros(values) | Offsets::Biases(_, values) => values[block],
        }
    }
}
