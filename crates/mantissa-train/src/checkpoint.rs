//! Checkpoints: one safetensors file, replaced atomically, with everything a run needs to resume bit-exactly:
//! stored weights, optimizer state codes, master weights, loss scale, data position.
//!
//! ```text
//! weights.NAME                    each parameter, [shape], F32, BF16, F16, or I8 codes with the next
//! weights_scale.NAME              F32 [rows]
//! optimizer.m.NAME, .v.NAME       moments, [elements], F32, BF16 or U8 codes (two of 4 bits per byte); with codes also
//!                                 m_absmax, v_absmax or m_scale, v_scale, F32 [blocks]
//! optimizer.v_row.NAME, …         other arrays of an optimizer, F32
//! optimizer.master                master weights, the whole arena, F32 or U16 (the low halves)
//! policy.amax, .multipliers       delayed scaling: F32 [operands, steps], F32 [operands]
//! ```
//!
//! Counters and scaler state are JSON under `mantissa-train` in the file's metadata.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_store::{Dtype, Error, Output, SafeTensors, SafetensorsWriter, StagedFile, TensorSpec, sealed};
use serde_json::{Value, json};

use crate::array::{Array, ArrayMut};
use crate::config::differences;
use crate::data::Cursor;
use crate::error::TrainError;
use crate::teacher::Teacher;
use crate::trainer::{Progress, Trainer};

const KEY: &str = "mantissa-train";
const VERSION: u64 = 1;

impl Trainer {
    /// Writes the run's state to `output` with a checksum ([`sealed`]). `about` (for example the settings)
    /// must be equal on load.
    ///
    /// # Errors
    /// [`TrainError::Store`]; an older file at `output` is then unchanged.
    pub fn save(&self, output: &Output, about: &str) -> Result<(), TrainError> {
        let table = self.model.params.table();
        let mut specs = Vec::new();
        for param in table.iter() {
            let (array, scales) = self.model.params.arrays(param);
            let (name, shape) = (weight_name(&param.tensor.name), param.tensor.shape.clone());
            specs.push(TensorSpec::new(name, dtype(&array), shape));
            specs.extend(
                scales.map(|s| TensorSpec::new(scale_name(&param.tensor.name), Dtype::F32, [s.len()])),
            );
        }
        let mut arrays: Vec<_> = self
            .optimizer
            .arrays(table)
            .into_iter()
            .map(|(name, array)| (state_name(&name), array))
            .collect();
        arrays.extend(
            self.model.histories.arrays().map(|(name, values)| (name.to_owned(), Array::F32(values))),
        );
        for (name, array) in &arrays {
            specs.push(TensorSpec::new(name.clone(), dtype(array), [len(array)]));
        }
        let mut metadata = BTreeMap::from([(KEY.to_owned(), self.numbers(about).to_string())]);
        sealed::reserve(&mut metadata);
        let staged = StagedFile::begin(output)?;
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata)?;
        for param in table.iter() {
            let (array, scales) = self.model.params.arrays(param);
            write(&mut writer, &weight_name(&param.tensor.name), array)?;
            if let Some(scales) = scales {
                write(&mut writer, &scale_name(&param.tensor.name), Array::F32(scales))?;
            }
        }
        for (name, array) in arrays {
            write(&mut writer, &name, array)?;
        }
        writer.finish()?;
        sealed::seal(staged.path())?;
        Ok(staged.commit()?)
    }

    /// Restores the state that [`save`](Self::save) wrote to `path`, with the same `about`, for the same
    /// model, policy and optimizer.
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file is damaged or belongs to another run; the trainer must not be used
    /// afterwards.
    pub fn load(&mut self, path: &Path, about: &str) -> Result<(), TrainError> {
        sealed::check(path)?;
        let file = SafeTensors::open(path)?;
        let numbers = Numbers::read(&file, about)?;
        if numbers.base.as_deref() != self.model.params.base_digest() {
            let hint = "resume with the model that the run began with, or rerun with --restart";
            let (found, allowed) = ("another frozen base".to_owned(), "the frozen base of the run");
            return Err(Error::field(file.path(), "base", found, allowed, hint).into());
        }
        let teacher = self.teacher.as_ref().map(Teacher::digest);
        if numbers.teacher.as_deref() != teacher {
            let hint = "resume with the model.init that the run began with, or rerun with --restart";
            let (found, allowed) = ("another teacher".to_owned(), "the teacher of the run");
            return Err(Error::field(file.path(), "teacher", found, allowed, hint).into());
        }
        let params: Vec<_> = self.model.params.table().iter().cloned().collect();
        for param in &params {
            let (mut array, scales) = self.model.params.arrays_mut(param);
            let (name, expected) = (weight_name(&param.tensor.name), dtype_mut(&array));
            read(&file, &name, expected, &param.tensor.shape, |at, bytes| fill(&mut array, at, bytes))?;
            if let Some(scales) = scales {
                let (name, count) = (scale_name(&param.tensor.name), scales.len());
                let mut array = ArrayMut::F32(scales);
                read(&file, &name, Dtype::F32, &[count], |at, bytes| fill(&mut array, at, bytes))?;
            }
        }
        let table = self.model.params.table();
        for (name, array) in self.optimizer.restore(table, numbers.optimizer_steps) {
            let name = state_name(&name);
            let (expected, count) = (dtype_mut(&array), len_mut(&array));
            let mut array = array;
            read(&file, &name, expected, &[count], |at, bytes| fill(&mut array, at, bytes))?;
        }
        for (name, values) in self.model.histories.arrays_mut() {
            let mut array = ArrayMut::F32(values);
            let count = len_mut(&array);
            read(&file, name, Dtype::F32, &[count], |at, bytes| fill(&mut array, at, bytes))?;
        }
        self.restore(numbers.progress, numbers.scaler);
        Ok(())
    }

    fn numbers(&self, about: &str) -> Value {
        let Progress { steps, skipped, skipped_in_a_row, tokens, cursor } = self.progress;
        let mut numbers = json!({
            "version": VERSION,
            "about": about,
            "steps": steps,
            "skipped": skipped,
            "skipped_in_a_row": skipped_in_a_row,
            "tokens": tokens,
            "epoch": cursor.epoch,
            "taken": cursor.taken,
            "optimizer_steps": self.optimizer.steps(),
            "base": self.model.params.base_digest(),
            "scaler": self.scaler.map(|scaler| {
                let (scale, growth, hysteresis) = scaler.state();
                json!({ "scale_bits": scale.to_bits(), "growth_tracker": growth, "hysteresis_tracker": hysteresis })
            }),
        });
        if let Some(teacher) = &self.teacher {
            numbers["teacher"] = teacher.digest().into();
        }
        numbers
    }
}

/// Counters and scaler state in the metadata.
struct Numbers {
    progress: Progress,
    optimizer_steps: u64,
    scaler: Option<(f32, u32, i64)>,
    /// Hashes of the frozen base and of the teacher.
    base: Option<String>,
    teacher: Option<String>,
}

impl Numbers {
    fn read(file: &SafeTensors, about: &str) -> Result<Self, TrainError> {
        let fault = |field: &str, found: String, allowed: &str| {
            let hint = "resume with the original settings, or rerun with --restart";
            TrainError::from(Error::field(file.path(), field, found, allowed, hint))
        };
        let text = file.metadata().get(KEY).map_or("", String::as_str);
        let value: Value = serde_json::from_str(text)
            .map_err(|_| fault(KEY, "none".to_owned(), "metadata of a mantissa train checkpoint"))?;
        let number = |value: &Value, field: &str| {
            value[field].as_u64().ok_or_else(|| fault(field, value[field].to_string(), "a number"))
        };
        let version = number(&value, "version")?;
        if version != VERSION {
            return Err(fault("version", version.to_string(), "1"));
        }
        if value["about"].as_str() != Some(about) {
            let differences = differences(value["about"].as_str().unwrap_or_default(), about);
            return Err(TrainError::Settings { path: file.path().to_owned(), differences });
        }
        let scaler = match &value["scaler"] {
            Value::Null => None,
            scaler => {
                let bits = u32::try_from(number(scaler, "scale_bits")?).unwrap_or(0);
                let growth = u32::try_from(number(scaler, "growth_tracker")?).unwrap_or(0);
                let hysteresis = scaler["hysteresis_tracker"].as_i64().unwrap_or(0);
                Some((f32::from_bits(bits), growth, hysteresis))
            }
        };
        let progress = Progress {
            steps: number(&value, "steps")?,
            skipped: number(&value, "skipped")?,
            skipped_in_a_row: number(&value, "skipped_in_a_row")?,
            tokens: number(&value, "tokens")?,
            cursor: Cursor { epoch: number(&value, "epoch")?, taken: number(&value, "taken")? },
        };
        let [base, teacher] = ["base", "teacher"].map(|key| value[key].as_str().map(str::to_owned));
        Ok(Numbers { progress, optimizer_steps: number(&value, "optimizer_steps")?, scaler, base, teacher })
    }
}

fn weight_name(name: &str) -> String {
    format!("weights.{name}")
}

fn scale_name(name: &str) -> String {
    format!("weights_scale.{name}")
}

fn state_name(name: &str) -> String {
    format!("optimizer.{name}")
}

fn dtype(array: &Array<'_>) -> Dtype {
    match array {
        Array::F32(_) => Dtype::F32,
        Array::Bf16(_) => Dtype::BF16,
        Array::F16(_) => Dtype::F16,
        Array::U16(_) => Dtype::U16,
        Array::U8(_) => Dtype::U8,
        Array::I8(_) => Dtype::I8,
        Array::Paged(paged) => paged.dtype(),
    }
}

fn dtype_mut(array: &ArrayMut<'_>) -> Dtype {
    match array {
        ArrayMut::F32(_) => Dtype::F32,
        ArrayMut::Bf16(_) => Dtype::BF16,
        ArrayMut::F16(_) => Dtype::F16,
        ArrayMut::U16(_) => Dtype::U16,
        ArrayMut::U8(_) => Dtype::U8,
        ArrayMut::I8(_) => Dtype::I8,
        ArrayMut::Paged(paged) => paged.dtype(),
    }
}

fn len(array: &Array<'_>) -> usize {
    match array {
        Array::F32(x) => x.len(),
        Array::Bf16(x) | Array::F16(x) | Array::U16(x) => x.len(),
        Array::U8(x) => x.len(),
        Array::I8(x) => x.len(),
        Array::Paged(paged) => paged.len(),
    }
}

fn len_mut(array: &ArrayMut<'_>) -> usize {
    match array {
        ArrayMut::F32(x) => x.len(),
        ArrayMut::Bf16(x) | ArrayMut::F16(x) | ArrayMut::U16(x) => x.len(),
        ArrayMut::U8(x) => x.len(),
        ArrayMut::I8(x) => x.len(),
        ArrayMut::Paged(paged) => paged.len(),
    }
}

/// Bytes copied at a time: the memory that a checkpoint needs beyond its content.
const PIECE: usize = 1 << 20;

/// Writes an array piece by piece.
fn write(writer: &mut SafetensorsWriter, name: &str, array: Array<'_>) -> Result<(), TrainError> {
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        let put = writer.write_range(name, at, bytes);
        at += bytes.len() as u64;
        put
    };
    match array {
        Array::F32(x) => {
            for x in x.chunks(PIECE / 4) {
                put(&x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())?;
            }
        }
        Array::Bf16(x) | Array::F16(x) | Array::U16(x) => {
            for x in x.chunks(PIECE / 2) {
                put(&x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())?;
            }
        }
        Array::U8(x) => put(x)?,
        Array::I8(x) => {
            for x in x.chunks(PIECE) {
                put(&x.iter().map(|v| v.cast_unsigned()).collect::<Vec<_>>())?;
            }
        }
        Array::Paged(paged) => {
            let total = paged.len() * paged.dtype().bits() as usize / 8;
            let mut bytes = vec![0; PIECE.min(total)];
            for at in (0..total).step_by(PIECE) {
                let bytes = &mut bytes[..PIECE.min(total - at)];
                paged.read(at as u64, bytes)?;
                put(bytes)?;
            }
        }
    }
    Ok(())
}

/// Copies whole elements to `to` from byte offset `at` on.
fn fill(to: &mut ArrayMut<'_>, at: usize, bytes: &[u8]) -> Result<(), TrainError> {
    match to {
        ArrayMut::F32(x) => {
            let to = x[at / 4..].iter_mut();
            to.zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
        }
        ArrayMut::Bf16(x) | ArrayMut::F16(x) | ArrayMut::U16(x) => {
            let to = x[at / 2..].iter_mut();
            to.zip(bytes.as_chunks::<2>().0).for_each(|(x, b)| *x = u16::from_le_bytes(*b));
        }
        ArrayMut::U8(x) => x[at..at + bytes.len()].copy_from_slice(bytes),
        ArrayMut::I8(x) => x[at..].iter_mut().zip(bytes).for_each(|(x, b)| *x = b.cast_signed()),
        ArrayMut::Paged(paged) => return paged.write(at as u64, bytes),
    }
    Ok(())
}

/// Passes the bytes of a tensor to `take`, piece by piece with their offsets.
fn read(
    file: &SafeTensors,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
    mut take: impl FnMut(usize, &[u8]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let missing = || Error::NoTensor { path: file.path().to_owned(), tensor: name.to_owned() };
    let meta = file.get(name).ok_or_else(missing)?;
    if meta.dtype != dtype || meta.shape != shape {
        let found = format!("{} {:?}", meta.dtype, meta.shape);
        let allowed = format!("{dtype} {shape:?}");
        let hint = "resume with the model, policy and optimizer of the checkpoint";
        return Err(Error::field(file.path(), name, found, allowed, hint).into());
    }
    // The array is in memory, so its length fits an address.
    let len = meta.len as usize;
    let mut bytes = vec![0; PIECE.min(len)];
    for at in (0..len).step_by(PIECE) {
        let bytes = &mut bytes[..PIECE.min(len - at)];
        file.read_range(meta, at as u64, bytes)?;
        take(at, bytes)?;
    }
    Ok(())
}
