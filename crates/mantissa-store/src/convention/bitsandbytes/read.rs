//! Tensors of a module → codes and scales.

use std::path::Path;

use mantissa_num::codebook::Book;
use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::Packing;
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, ScaleTree, Scheme};
use serde_json::Value;

use super::config::{BitWidth, Config};
use super::scheme::{BLOCK_SIZES, BOOKS, INT8_LEVELS, int8_input};
use crate::convention::sound::{self, Names};
use crate::convention::weight::StoredLinear;
use crate::convention::{ActivationQuant, ModelFiles, Weight};
use crate::finite::require_finite;
use crate::json::parse_strict;
use crate::{Dtype, Result};

/// Longest JSON text of a quantization state, in bytes; honest ones have about 170.
const MAX_STATE: u64 = 4096;

/// Largest relative difference of a level in a stored code book: the error of rounding to f16.
const LEVEL_TOLERANCE: f32 = 1e-3;

impl Config {
    /// Weight of `module`, `[rows, cols]`, and for LLM.int8() the quantization of its input. The tensors determine if
    /// the layer is quantized.
    ///
    /// # Errors
    /// A tensor of the module is missing or contradicts another.
    pub(super) fn layer(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<StoredLinear> {
        let name = format!("{module}.weight");
        let layer = Reader { files, module, rows, cols };
        match (files.meta(&name)?.dtype, self.kind) {
            (Dtype::U8, BitWidth::FourBit) => Ok(Weight::Quantized(layer.four_bits()?).into()),
            (Dtype::I8, BitWidth::EightBit) => {
                let keep_above = self.threshold;
                let input = ActivationQuant { keep_above, ..ActivationQuant::new(int8_input(), None) };
                Ok((Weight::Quantized(layer.int8()?), Some(input)).into())
            }
            (Dtype::U8 | Dtype::I8, kind) => {
                let (found, allowed) = match kind {
                    BitWidth::FourBit => ("I8", "U8, with load_in_4bit"),
                    BitWidth::EightBit => ("U8", "I8, with load_in_8bit"),
                };
                Err(files.fault(&name, format!("dtype {found}"), allowed, ""))
            }
            (_, kind) => {
                let scale = if kind == BitWidth::FourBit { "weight.absmax" } else { "SCB" };
                Ok(files.dense_without(module, scale, rows, cols)?.into())
            }
        }
    }
}

struct Reader<'a> {
    files: &'a ModelFiles,
    module: &'a str,
    rows: usize,
    cols: usize,
}

/// Fields of the JSON of a quantization state.
struct State {
    block: u32,
    /// Mean of the block scales and number of codes per amax, for double quantization.
    nested: Option<(f32, u32)>,
}

impl Reader<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    fn int8(&self) -> Result<Quantized> {
        let (name, scales_name) = (self.name("weight"), self.name("SCB"));
        let format = self.name("weight_format");
        if self.files.has(&format) {
            let layout = self.files.checkpoint().read(&format)?;
            if layout.iter().any(|&b| b != 0) {
                let hint = "layouts of single kernels are not read; save it again with a newer bitsandbytes";
                return Err(self.files.fault(&format, format!("{layout:?}"), "0, rows", hint));
            }
        }
        let codes = self.files.read_exact(&name, &[Dtype::I8], &[self.rows, self.cols])?;
        let amax = self.floats(&scales_name, self.rows)?;
        let scales = amax.into_iter().map(|amax| (amax / INT8_LEVELS).to_bits()).collect();
        let scale = Some(ScaleTree::leaf(Code::F32));
        let affine = Affine { code: Code::Int(8), blocks: Blocks::Row, scale, offset: Offset::None };
        let empty = Quantized::empty(Format::Affine(affine), self.rows, self.cols);
        let q = Quantized { codes: Codes::U8(codes), scales: Codes::U32(scales).into(), ..empty };
        sound::check(self.files, Names { codes: &name, scales: &scales_name, zeros: &scales_name }, &q)?;
        Ok(q)
    }

    fn four_bits(&self) -> Result<Quantized> {
        let name = self.name("weight");
        let (book, state) = self.state()?;
        self.check_map("weight.quant_map", book)?;
        let (rows, cols) = (self.rows, self.cols);
        let packing = Packing::bitsandbytes();
        let meta = self.files.meta(&name)?;
        let bytes = packing.total_bytes(rows, cols);
        if meta.shape.iter().product::<usize>() != bytes || meta.shape.first() != Some(&bytes) {
            return Err(self.files.fault(
                &name,
                format!("shape {:?}", meta.shape),
                format!("[{bytes}, 1]"),
                "",
            ));
        }
        let codes = packing.unpack(&self.files.checkpoint().read(&name)?, rows, cols, false);
        let codes =
            codes.ok_or_else(|| self.files.fault(&name, "a wrong length", "two codes to a byte", ""))?;
        let scales_name = self.name("weight.absmax");
        let q = match state.nested {
            None => {
                let format = Scheme::table(book, state.block).format;
                let blocks = format.blocks().count(rows, cols);
                let amax = self.floats(&scales_name, blocks)?;
                let scales = Codes::U32(amax.into_iter().map(f32::to_bits).collect());
                Quantized {
                    codes: Codes::U8(codes),
                    scales: scales.into(),
                    ..Quantized::empty(format, rows, cols)
                }
            }
            Some((mean, block)) => {
                let mut format = Scheme::double_quantized(book, state.block).format;
                if let Format::Table(table) = &mut format
                    && let Some((blocks, _)) = &mut table.scale.outer
                {
                    *blocks = Blocks::Flat(block);
                }
                let blocks = format.blocks().count(rows, cols);
                let scales = Codes::U8(self.files.read_exact(&scales_name, &[Dtype::U8], &[blocks])?);
                self.check_map("weight.nested_quant_map", Book::Dyn8)?;
                let factors =
                    self.floats(&self.name("weight.nested_absmax"), Blocks::Flat(block).count(1, blocks))?;
                let nested = ScaleLevel::residual(&factors, mean);
                Quantized {
                    codes: Codes::U8(codes),
                    scales: ScaleLevel::from(scales).with_residual(nested),
                    ..Quantized::empty(format, rows, cols)
                }
            }
        };
        sound::check(self.files, Names { codes: &name, scales: &scales_name, zeros: &scales_name }, &q)?;
        Ok(q)
    }

    /// A list of `n` F32 values, all of them numbers.
    fn floats(&self, name: &str, n: usize) -> Result<Vec<f32>> {
        let bytes = self.files.read_exact(name, &[Dtype::F32], &[n])?;
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        require_finite(&values, self.files.path_of(name), name)?;
        Ok(values)
    }

    /// Refuses a code book that differs from the named one, because other readers use the stored levels.
    fn check_map(&self, suffix: &str, book: Book) -> Result<()> {
        let name = self.name(suffix);
        let levels = self.floats(&name, book.levels().len())?;
        let other = |(found, level): (&f32, &f32)| (found - level).abs() > LEVEL_TOLERANCE * level.abs();
        let Some(at) = levels.iter().zip(book.levels()).position(other) else { return Ok(()) };
        let allowed = format!("{} of {}", book.levels()[at], book.name());
        Err(self.files.fault(&name, format!("level {} of code {at}", levels[at]), allowed, ""))
    }

    /// Quantization state, with the code book that its name gives.
    fn state(&self) -> Result<(Book, State)> {
        let (book, name, state) = read_state(self.files, self.module)?;
        let book_name = BOOKS.iter().find(|(known, _)| *known == book).map_or("", |(_, name)| name);
        self.check_state(&name, book_name, &state).map(|state| (book, state))
    }

    fn check_state(&self, name: &str, book: &str, state: &Value) -> Result<State> {
        let fault = |key: &str, allowed: String| {
            let found = state.get(key).map_or("nothing".to_owned(), Value::to_string);
            self.files.fault(name, format!("{key} {found}"), allowed, "")
        };
        if state.get("quant_type").and_then(Value::as_str) != Some(book) {
            return Err(fault("quant_type", format!("\"{book}\", as in the tensor's name")));
        }
        if state.get("shape") != Some(&serde_json::json!([self.rows, self.cols])) {
            return Err(fault("shape", format!("[{}, {}]", self.rows, self.cols)));
        }
        let size = |key: &str, allowed: &[u32]| {
            let found = state.get(key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
            let list = || allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            found.filter(|n| allowed.contains(n)).ok_or_else(|| fault(key, list()))
        };
        let block = size("blocksize", &BLOCK_SIZES)?;
        if state.get("nested_blocksize").is_none_or(Value::is_null) {
            return Ok(State { block, nested: None });
        }
        let mean = state.get("nested_offset").and_then(Value::as_f64).map(|x| x as f32);
        let mean = mean.filter(|x| x.is_finite());
        let mean = mean.ok_or_else(|| fault("nested_offset", "a finite number".to_owned()))?;
        Ok(State { block, nested: Some((mean, size("nested_blocksize", &BLOCK_SIZES)?)) })
    }
}

/// Code book in the name of a quantization state, that name, and the state.
fn read_state(files: &ModelFiles, module: &str) -> Result<(Book, String, Value)> {
    let named = |name: &str| format!("{module}.weight.quant_state.bitsandbytes__{name}");
    let found = BOOKS.iter().find(|(_, name)| files.has(&named(name))).unwrap_or(&BOOKS[0]);
    let name = named(found.1);
    let meta = files.meta(&name)?;
    files.expect_dtype(meta, &[Dtype::U8])?;
    if meta.len > MAX_STATE {
        return Err(files.fault(&name, format!("{} bytes", meta.len), format!("at most {MAX_STATE}"), ""));
    }
    let bytes = files.checkpoint().read(&name)?;
    let state = parse_strict(&bytes, Path::new(&name), MAX_STATE)
        .map_err(|error| files.fault(&name, error.to_string(), "a JSON object", ""))?;
    Ok((found.0, name, state))
}

/// Rows and columns in a quantization state, if they agree with the number of codes.
pub(super) fn shape(files: &ModelFiles, module: &str) -> Option<(usize, usize)> {
    let (_, _, state) = read_state(files, module).ok()?;
    let side = |i: usize| usize::try_from(state.get("shape")?.get(i)?.as_u64()?).ok();
    let (rows, cols) = (side(0)?, side(1)?);
    let elements = rows.checked_mul(cols)?;
    let codes = files.meta(&format!("{module}.weight")).ok()?;
    (codes.len == elements.div_ceil(2) as u64).then_some((rows, cols))
}
