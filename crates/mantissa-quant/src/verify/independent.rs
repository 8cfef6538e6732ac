//! A second decoder of quantized weights, written from the format descriptions and not from the writer: bits are taken one
//! by one from a big number of the byte stream, values come from arithmetic in f64, and nothing but the layout tables
//! (code books, the packing of each convention) is shared with `mantissa-num`.

use std::path::Path;

use mantissa_model::{LoadError, WeightSource};
use mantissa_num::codebook::{FP4_BNB, NF4};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::{Dtype, Error};
use serde_json::Value;

type Result<T> = std::result::Result<T, Error>;

/// Decodes the weight of linear layer `module` (`[rows, cols]`), in whichever convention it is stored.
///
/// # Errors
/// A tensor that is missing or does not hold enough bytes.
pub fn decode(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Vec<f32>> {
    let reader = Reader { files, module, rows, cols };
    let has = |suffix: &str| files.has(&format!("{module}.{suffix}"));
    if has("weight.packed") {
        reader.native()
    } else if has("weight_global_scale") {
        reader.fp4(Some(reader.scalar("weight_global_scale")?))
    } else if has("weight_packed") && !has("weight_shape") {
        reader.fp4(None)
    } else if has("weight_packed") {
        reader.pack_quantized()
    } else if has("weight_scale") {
        reader.one_byte_codes()
    } else {
        files.checkpoint().read_f32(&format!("{module}.weight"))
    }
}

/// A model whose linear layers are decoded independently.
pub struct Source<'a> {
    files: &'a ModelFiles,
}

impl<'a> Source<'a> {
    /// Of an opened model.
    pub fn new(files: &'a ModelFiles) -> Self {
        Source { files }
    }
}

impl WeightSource for Source<'_> {
    fn config(&self) -> Option<&Value> {
        self.files.config()
    }

    fn dir(&self) -> Option<&Path> {
        Some(self.files.dir())
    }

    fn location(&self) -> String {
        self.files.dir().display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.has(tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        Ok(self.files.tensor_f32(tensor, shape)?)
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        // Bias and input scheme are not part of what is decoded twice.
        let ordinary = self.files.linear(module, rows, cols, bias)?;
        let weight = Weight::F32(decode(self.files, module, rows, cols)?);
        Ok(LinearWeight { weight, ..ordinary })
    }
}

struct Reader<'a> {
    files: &'a ModelFiles,
    module: &'a str,
    rows: usize,
    cols: usize,
}

/// A list of scales as read, with the shape of their grid and the rows and columns that share one.
struct Scales {
    values: Vec<f32>,
    down: usize,
    across: usize,
    side: (usize, usize),
}

impl Reader<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    fn bytes(&self, suffix: &str) -> Result<Vec<u8>> {
        self.files.checkpoint().read(&self.name(suffix))
    }

    fn scalar(&self, suffix: &str) -> Result<f32> {
        let values = self.files.checkpoint().read_f32(&self.name(suffix))?;
        values.first().copied().ok_or_else(|| self.short(suffix))
    }

    fn short(&self, suffix: &str) -> Error {
        Error::field(self.files.dir(), self.name(suffix), "too few bytes", "what the shape needs", "")
    }

    fn scales(&self, suffix: &str) -> Result<Scales> {
        let name = self.name(suffix);
        let missing = || Error::NoTensor { path: self.files.dir().to_owned(), tensor: name.clone() };
        let meta = self.files.checkpoint().get(&name).ok_or_else(missing)?.clone();
        let values = match meta.dtype {
            // The native container keeps both kinds of 8-bit scale as raw bytes; the scheme tells them apart.
            Dtype::U8 | Dtype::F8E8M0 if !self.native_scheme().starts_with("nvfp4") => {
                self.bytes(suffix)?.into_iter().map(power_of_two).collect()
            }
            Dtype::U8 | Dtype::F8E4M3 => {
                self.bytes(suffix)?.into_iter().map(|b| mini_float(b.into(), 4, 3, 7) as f32).collect()
            }
            _ => self.files.checkpoint().read_f32(&name)?,
        };
        let (down, across) = match meta.shape.as_slice() {
            [down, across] => (*down, *across),
            [n] => (1, *n),
            _ => (1, 1),
        };
        if values.len() != down * across || values.is_empty() {
            return Err(self.short(suffix));
        }
        let block = self.block(&meta.name);
        let even = |n: usize, blocks: usize| n.div_ceil(blocks.max(1)).max(1);
        let side = block.unwrap_or((even(self.rows, down), even(self.cols, across)));
        Ok(Scales { values, down, across, side })
    }

    /// Rows and columns of a block where the file says so: in the scheme's text, or in the group's arguments. Otherwise the
    /// grid divides the weight evenly (a scale per row, or one for all).
    fn block(&self, scale: &str) -> Option<(usize, usize)> {
        if let Some(n) = scale.strip_suffix(".scale") {
            let (file, _) = self.files.checkpoint().locate(scale)?;
            return block_of_text(file.metadata().get(n)?);
        }
        let weights = self.group_weights()?;
        if let Some([rows, cols]) =
            weights.get("block_structure").and_then(Value::as_array).map(Vec::as_slice)
        {
            return Some((rows.as_u64()? as usize, cols.as_u64()? as usize));
        }
        Some((1, weights.get("group_size")?.as_u64()? as usize))
    }

    /// The `weights` arguments of the compressed-tensors group that names this module, or of the first.
    fn group_weights(&self) -> Option<&Value> {
        let groups = self.files.config()?.get("quantization_config")?.get("config_groups")?.as_object()?;
        let quoted = format!("\"{}\"", self.module);
        let names = |group: &&Value| group.get("targets").is_some_and(|t| t.to_string().contains(&quoted));
        groups.values().find(names).or_else(|| groups.values().next())?.get("weights")
    }

    fn scale_at(&self, scales: &Scales, row: usize, col: usize) -> usize {
        let (rows, cols) = scales.side;
        ((row / rows.max(1)).min(scales.down - 1) * scales.across
            + (col / cols.max(1)).min(scales.across - 1))
        .min(scales.values.len() - 1)
    }

    fn values(&self, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        (0..self.rows).flat_map(|r| (0..self.cols).map(move |c| (r, c))).map(|(r, c)| value(r, c)).collect()
    }

    fn fp4(&self, global: Option<f32>) -> Result<Vec<f32>> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let stride = self.cols.div_ceil(2);
        if packed.len() < self.rows * stride {
            return Err(self.short("weight_packed"));
        }
        Ok(self.values(|r, c| {
            let byte = packed[r * stride + c / 2];
            let code = if c % 2 == 0 { byte & 15 } else { byte >> 4 };
            let scale = scales.values[self.scale_at(&scales, r, c)];
            let scale = global.map_or(scale, |g| scale / g);
            mini_float(code.into(), 2, 1, 1) as f32 * scale
        }))
    }

    fn one_byte_codes(&self) -> Result<Vec<f32>> {
        let name = self.name("weight");
        let integer = self.files.checkpoint().get(&name).is_some_and(|m| m.dtype == Dtype::I8);
        let codes = self.bytes("weight")?;
        let scales = self.scales("weight_scale")?;
        if codes.len() < self.rows * self.cols {
            return Err(self.short("weight"));
        }
        let zeros = if self.files.has(&self.name("weight_zero_point")) {
            self.bytes("weight_zero_point")?
        } else {
            Vec::new()
        };
        Ok(self.values(|r, c| {
            let at = self.scale_at(&scales, r, c);
            let code = codes[r * self.cols + c];
            let zero = zeros.get(at).map_or(0.0, |&z| f32::from(z as i8));
            let element =
                if integer { f32::from(code as i8) } else { mini_float(code.into(), 4, 3, 7) as f32 };
            (element - zero) * scales.values[at]
        }))
    }

    fn pack_quantized(&self) -> Result<Vec<f32>> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let words = packed.len() / 4 / self.rows.max(1);
        let bits = self.group_weights().and_then(|w| w.get("num_bits")).and_then(Value::as_u64).unwrap_or(8)
            as usize;
        if !(1..=8).contains(&bits) || (self.cols * bits).div_ceil(32) > words {
            return Err(self.short("weight_packed"));
        }
        let zeros = self.packed_zeros(bits, &scales)?;
        let offset = f32::from(1u8 << (bits - 1));
        Ok(self.values(|r, c| {
            let code = f32::from(field(&packed[r * words * 4..(r + 1) * words * 4], c * bits, bits));
            let at = self.scale_at(&scales, r, c);
            let zero = zeros.as_ref().map_or(0.0, |z| z[at]);
            (code - offset - zero) * scales.values[at]
        }))
    }

    /// Zero points of `pack-quantized`: word `w` of line `l` holds rows from `32 w / bits` of group column `l`.
    fn packed_zeros(&self, bits: usize, scales: &Scales) -> Result<Option<Vec<f32>>> {
        if !self.files.has(&self.name("weight_zero_point")) {
            return Ok(None);
        }
        let bytes = self.bytes("weight_zero_point")?;
        let words = (scales.down * bits).div_ceil(32);
        if bytes.len() < words * scales.across * 4 {
            return Err(self.short("weight_zero_point"));
        }
        let offset = f32::from(1u8 << (bits - 1));
        let zero = |row: usize, line: usize| {
            let stream: Vec<u8> =
                (0..words).flat_map(|w| bytes[4 * (w * scales.across + line)..][..4].to_vec()).collect();
            f32::from(field(&stream, row * bits, bits)) - offset
        };
        let lines: Vec<Vec<f32>> =
            (0..scales.across).map(|line| (0..scales.down).map(|row| zero(row, line)).collect()).collect();
        Ok(Some((0..scales.down).flat_map(|row| lines.iter().map(move |line| line[row])).collect()))
    }

    /// The scheme's text in the metadata of the native container; empty in other conventions.
    fn native_scheme(&self) -> &str {
        let n = self.name("weight");
        let file = self.files.checkpoint().locate(&format!("{n}.packed")).map(|(file, _)| file);
        let text = file.and_then(|f| f.metadata().get(&n)).map_or("", String::as_str);
        text.split(' ').next().unwrap_or_default()
    }

    fn native(&self) -> Result<Vec<f32>> {
        let n = self.name("weight");
        let scheme = self.native_scheme();
        let element = Element::of(scheme).ok_or_else(|| {
            Error::field(
                self.files.dir(),
                &n,
                format!("scheme \"{scheme}\""),
                "a scheme of the native container",
                "",
            )
        })?;
        let packed = self.bytes("weight.packed")?;
        let has = |suffix: &str| self.files.has(&self.name(suffix));
        let scales = if has("weight.scale") { Some(self.scales("weight.scale")?) } else { None };
        let global = if has("weight.global") { Some(self.scalar("weight.global")?) } else { None };
        let zeros: Option<Vec<f32>> = if has("weight.zero") {
            let words = self.bytes("weight.zero")?;
            Some(words.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32).collect())
        } else {
            None
        };
        if packed.len() * 8 < element.bits_needed(self.rows, self.cols) {
            return Err(self.short("weight.packed"));
        }
        Ok(self.values(|r, c| {
            let value = element.value(&packed, r, c, self.cols);
            let Some(scales) = &scales else { return value };
            let at = match element.flat_block() {
                Some(block) => (r * self.cols + c) / block,
                None => self.scale_at(scales, r, c),
            };
            let scale = scales.values[at.min(scales.values.len() - 1)];
            let zero = zeros.as_ref().map_or(0.0, |z| z[at.min(z.len() - 1)]);
            match global {
                Some(amax) if scheme.ends_with(":te") => value * scale * (amax / 2688.0),
                Some(global) => value * (scale / global),
                None => (value - zero) * scale,
            }
        }))
    }
}

/// The block that a scheme's text names, as rows and columns.
fn block_of_text(text: &str) -> Option<(usize, usize)> {
    let base = text.split([':', '@', ' ']).next()?;
    if base.starts_with("mx") {
        return Some((1, 32));
    }
    if base == "nvfp4" {
        return Some((1, 16));
    }
    base.split('-').find_map(|part| {
        if let Some((rows, cols)) = part.strip_prefix('t').and_then(|t| t.split_once('x')) {
            return Some((rows.parse().ok()?, cols.parse().ok()?));
        }
        Some((1, part.strip_prefix('g')?.parse().ok()?))
    })
}

/// An element of the native container, from the first part of the scheme's text.
enum Element {
    Int(usize),
    Float { exponent: u32, mantissa: u32, bias: i32 },
    Book(&'static [f32; 16], usize),
    Fixed64,
    F32,
}

impl Element {
    fn of(scheme: &str) -> Option<Self> {
        let base = scheme.split([':', '@']).next()?;
        if let Some(rest) = base.strip_prefix("int") {
            return rest.get(..1)?.parse().ok().map(Element::Int);
        }
        let block = |rest: &str| rest.strip_prefix("-g").map_or(Some(64), |g| g.parse().ok());
        if let Some(rest) = base.strip_prefix("nf4") {
            return Some(Element::Book(&NF4, block(rest)?));
        }
        if let Some(rest) = base.strip_prefix("fp4-bnb") {
            return Some(Element::Book(&FP4_BNB, block(rest)?));
        }
        let float = |exponent, mantissa, bias| Some(Element::Float { exponent, mantissa, bias });
        match base {
            "f32" => Some(Element::F32),
            "mxint8" => Some(Element::Fixed64),
            "f16" => float(5, 10, 15),
            "bf16" => float(8, 7, 127),
            "nvfp4" | "mxfp4" => float(2, 1, 1),
            _ if base.contains("e4m3fnuz") => float(4, 3, 8),
            _ if base.contains("e5m2fnuz") => float(5, 2, 16),
            _ if base.contains("e4m3") => float(4, 3, 7),
            _ if base.contains("e5m2") => float(5, 2, 15),
            _ if base.contains("e2m3") => float(2, 3, 1),
            _ if base.contains("e3m2") => float(3, 2, 3),
            _ if base.contains("e2m1") => float(2, 1, 1),
            _ => None,
        }
    }

    fn flat_block(&self) -> Option<usize> {
        match self {
            Element::Book(_, block) => Some(*block),
            _ => None,
        }
    }

    fn bits(&self) -> usize {
        match self {
            Element::Int(bits) => *bits,
            Element::Float { exponent, mantissa, .. } => 1 + (exponent + mantissa) as usize,
            Element::Book(..) => 4,
            Element::Fixed64 => 8,
            Element::F32 => 32,
        }
    }

    /// Bits from the start of one row to the start of the next: integers fill whole int32 words, the rest whole bytes.
    fn row_bits(&self, cols: usize) -> usize {
        match self {
            Element::Int(bits) => (cols * bits).div_ceil(32) * 32,
            Element::Book(..) => cols * 4,
            _ => (cols * self.bits()).div_ceil(8) * 8,
        }
    }

    fn bits_needed(&self, rows: usize, cols: usize) -> usize {
        rows * self.row_bits(cols)
    }

    fn value(&self, packed: &[u8], row: usize, col: usize, cols: usize) -> f32 {
        let bit = row * self.row_bits(cols) + col * self.bits();
        match self {
            Element::Int(bits) => f32::from(field(packed, bit, *bits)) - f32::from(1u8 << (bits - 1)),
            Element::Book(levels, _) => {
                let byte = packed[bit / 8];
                levels[usize::from(if bit.is_multiple_of(8) { byte >> 4 } else { byte & 15 })]
            }
            Element::Fixed64 => f32::from(packed[bit / 8] as i8) / 64.0,
            Element::F32 => f32::from_bits(u32::from_le_bytes([0, 1, 2, 3].map(|i| packed[bit / 8 + i]))),
            Element::Float { exponent, mantissa, bias } => {
                let code = (0..self.bits()).fold(0u32, |code, i| {
                    let at = bit + i;
                    code | u32::from(packed[at / 8] >> (at % 8) & 1) << i
                });
                special(code, *exponent, *mantissa, *bias)
                    .unwrap_or(mini_float(code, *exponent, *mantissa, *bias)) as f32
            }
        }
    }
}

/// `bits` bits from bit `at` of a little-endian stream, one by one.
fn field(bytes: &[u8], at: usize, bits: usize) -> u8 {
    (0..bits).fold(0, |code, i| code | (bytes[(at + i) / 8] >> ((at + i) % 8) & 1) << i)
}

fn power_of_two(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f64.powi(i32::from(code) - 127) as f32 }
}

/// Infinities and NaN of the formats that have them.
fn special(code: u32, exponent: u32, mantissa: u32, bias: i32) -> Option<f64> {
    let magnitude = code & ((1 << (exponent + mantissa)) - 1);
    let negative = code >> (exponent + mantissa) & 1 == 1;
    let top = ((1 << exponent) - 1) << mantissa;
    match (exponent, mantissa, bias) {
        // fnuz: the code of negative zero.
        (4, 3, 8) | (5, 2, 16) => (negative && magnitude == 0).then_some(f64::NAN),
        (4, 3, 7) => (magnitude == 0x7f).then_some(f64::NAN),
        (2, ..) | (3, ..) => None,
        _ if magnitude == top => Some(if negative { f64::NEG_INFINITY } else { f64::INFINITY }),
        _ => (magnitude > top).then_some(f64::NAN),
    }
}

/// `(-1)^s · 2^(E-B) · (1 + M/2^m)`, or `(-1)^s · 2^(1-B) · M/2^m` where `E` is 0.
fn mini_float(code: u32, exponent: u32, mantissa: u32, bias: i32) -> f64 {
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1u32 << mantissa);
    let field = (code >> mantissa & ((1 << exponent) - 1)) as i32;
    let sign = if code >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    match field {
        0 => sign * fraction * 2f64.powi(1 - bias),
        e => sign * (1.0 + fraction) * 2f64.powi(e - bias),
    }
}
