//! optimum-quanto, read only: `quanto_qmap.json` beside `config.json` has the quantization of each module.
//!
//! For a module with weight `[N, K]`:
//!
//! ```text
//! weights                                          codes                                   others
//! qint8                                            weight._data I8 [N, K]                  weight._scale [N, 1]
//! qfloat8_e4m3fn, qfloat8_e4m3fnuz, qfloat8_e5m2   weight._data in that dtype [N, K]       weight._scale [N, 1]
//! qint4, qint2                                     weight._data._data U8: array            weight._scale, weight._shift
//!                                                  [N·K/g, g]                              [N·K/g, 1]
//! ```
//!
//! In qint4 and qint2, distant rows of the array share a byte ([`Strided`]). A float shift is subtracted after
//! scaling, `w = code · scale - shift`; an integer shift before. Groups have 128 columns, or the next smaller
//! multiple of 32 that divides a row, or are whole rows; the shape of the scales shows which. Activations that are
//! quantized too have an `input_scale`.
//!
//! Source: optimum-quanto 0.2.7, `models/transformers_models.py`, `tensor/{packed,grouped,qbits}.py`,
//! `tensor/weights/*.py`.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::minifloat::{self, MiniFloat};
use mantissa_num::pack::Strided;
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleTree};
use serde_json::Value;

use super::gptq::centred;
use super::sound::{self, Names};
use super::{CheckpointFolder, Convention, ModelFiles, Opened, StoredLinear, Weight};
use crate::json::read_strict;
use crate::{Dtype, Error, Result};

/// Name of the format, for messages.
pub const NAME: &str = "quanto";

/// File that identifies a folder of this format.
pub const FILE_NAME: &str = "quanto_qmap.json";

/// Longest [`FILE_NAME`] read: it lists every layer.
const MAX_BYTES: u64 = 16 << 20;

/// Storage of a module's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int8,
    Float(MiniFloat, Dtype),
    /// Integers of 2 or 4 bits.
    Packed(u32),
}

const KINDS: [(&str, Kind); 7] = [
    ("qint8", Kind::Int8),
    ("qint4", Kind::Packed(4)),
    ("qint2", Kind::Packed(2)),
    ("qfloat8", Kind::Float(minifloat::E4M3, Dtype::F8E4M3)),
    ("qfloat8_e4m3fn", Kind::Float(minifloat::E4M3, Dtype::F8E4M3)),
    ("qfloat8_e4m3fnuz", Kind::Float(minifloat::E4M3_FNUZ, Dtype::F8E4M3Fnuz)),
    ("qfloat8_e5m2", Kind::Float(minifloat::E5M2, Dtype::F8E5M2)),
];

/// Parsed map.
#[derive(Clone, Debug)]
pub struct Config {
    modules: BTreeMap<String, Kind>,
    notes: Vec<String>,
}

impl Config {
    /// Reads [`FILE_NAME`] in `dir`; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::Field`] names the module and the key; as [`read_strict`].
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE_NAME);
        if !path.is_file() {
            return Ok(None);
        }
        let map = read_strict(&path, MAX_BYTES, "quanto's quantization map")?;
        let fault =
            |field: &str, found: String, allowed: &str| Error::field(&path, field, found, allowed, "");
        let entries = map.as_object().ok_or_else(|| fault("(whole file)", map.to_string(), "an object"))?;
        let (mut modules, mut active) = (BTreeMap::new(), 0);
        for (module, entry) in entries {
            let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or("none");
            active += usize::from(text("activations") != "none");
            let kind = match text("weights") {
                "none" => continue,
                name => KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind),
            };
            let names = KINDS.map(|(name, _)| name).join(", ");
            let kind =
                kind.ok_or_else(|| fault(&format!("{module}.weights"), text("weights").to_owned(), &names))?;
            modules.insert(module.clone(), kind);
        }
        let note = format!("quanto's quantization of the inputs of {active} modules is not applied");
        Ok(Some(Config { modules, notes: (active > 0).then_some(note).into_iter().collect() }))
    }

    /// Weight of `module`, `[rows, cols]`. A module that the map does not name is dense.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from the map.
    fn weight(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let Some(kind) = self.modules.get(module).copied() else { return files.dense(module, rows, cols) };
        let scales_name = format!("{module}.weight._scale");
        files.expect_dtype(files.meta(&scales_name)?, &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
        let (code, dtype) = match kind {
            Kind::Packed(bits) => return self.packed(files, module, bits, rows, cols),
            Kind::Int8 => (Code::Int(8), Dtype::I8),
            Kind::Float(float, dtype) => (Code::Float(float), dtype),
        };
        let codes_name = format!("{module}.weight._data");
        let codes = files.read_exact(&codes_name, &[dtype], &[rows, cols])?;
        let (scale, scales) = files.read_scales(&scales_name, &[rows, 1])?;
        let scale = Some(ScaleTree::leaf(scale));
        let affine = Affine { code, blocks: Blocks::Row, scale, offset: Offset::None };
        let empty = Quantized::empty(Format::Affine(affine), rows, cols);
        let q = Quantized { codes: Codes::U8(codes), scales: scales.into(), ..empty };
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &scales_name }, &q)?;
        Ok(Weight::Quantized(q))
    }

    fn packed(
        &self,
        files: &ModelFiles,
        module: &str,
        bits: u32,
        rows: usize,
        cols: usize,
    ) -> Result<Weight> {
        let [codes_name, scales_name, shift_name] =
            ["_data._data", "_scale", "_shift"].map(|suffix| format!("{module}.weight.{suffix}"));
        let meta = files.meta(&scales_name)?;
        let groups = match meta.shape.as_slice() {
            &[n, 1] if n > 0 && rows > 0 && n.is_multiple_of(rows) && cols.is_multiple_of(n / rows) => n,
            shape => {
                let allowed = format!("[{rows} · groups, 1], groups that divide {cols} columns");
                return Err(files.fault(&scales_name, format!("shape {shape:?}"), allowed, ""));
            }
        };
        let group = cols / (groups / rows);
        let packing = Strided::quanto(bits);
        let bytes = files.read_exact(&codes_name, &[Dtype::U8], &[packing.unit_lines(groups), group])?;
        let codes = packing.unpack(&bytes, groups, group);
        let codes = codes.ok_or_else(|| files.fault(&codes_name, "a wrong length", "whole lines", ""))?;
        let codes = codes.into_iter().map(|code| centred(code, bits) as u8).collect();

        let (scale, scales) = files.read_scales(&scales_name, &[groups, 1])?;
        let whole =
            files.meta(&shift_name)?.dtype == Dtype::I8 || files.meta(&shift_name)?.dtype == Dtype::U8;
        let offset = if whole { Offset::Zero } else { Offset::Bias };
        let blocks = if group == cols { Blocks::Row } else { Blocks::Group(group as u32) };
        let affine = Affine { code: Code::Int(bits), blocks, scale: Some(ScaleTree::leaf(scale)), offset };
        let empty = Quantized::empty(Format::Affine(affine), rows, cols);
        let mut q = Quantized { codes: Codes::U8(codes), scales: scales.into(), ..empty };
        if whole {
            let bytes = files.read_exact(&shift_name, &[Dtype::I8, Dtype::U8], &[groups, 1])?;
            let middle = 1 << (bits - 1);
            q.scales.extend_zeros(bytes.into_iter().map(|zero| i32::from(zero) - middle));
        } else {
            let shifts = files.tensor_f32(&shift_name, &[groups, 1])?;
            q.scales.extend_biases(shifts.into_iter().map(|shift| -shift));
        }
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &shift_name }, &q)?;
        Ok(Weight::Quantized(q))
    }
}

/// Quanto, as diffusers and optimum save it.
#[derive(Debug)]
pub(super) struct Quanto;

impl Convention for Quanto {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Recognises a folder by its map; there is no `quantization_config`.
    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        if folder.quantization.is_some() {
            return Ok(None);
        }
        let config = Config::open(folder.checkpoint.dir())?;
        Ok(config.map(|config| Box::new(config) as Box<dyn Opened>))
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        NAME
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("weight._data._data", &["weight._scale", "weight._shift"]), ("weight._data", &["weight._scale"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(self.weight(files, module, rows, cols)?.into())
    }
}
