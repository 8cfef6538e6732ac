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
//! gradients.error.LEAF            what gradients in few bits lost so far, the whole arena, F32
//! ```
//!
//! Counters and scaler state are JSON under `mantissa-train` in the file's metadata.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_ranks::Writer;
use mantissa_store::{Dtype, Error, Output, SafeTensors, SafetensorsWriter, StagedFile, TensorSpec, sealed};
use serde_json::{Value, json};

use crate::arena::Parameters;
use crate::array::{Array, ArrayMut};
use crate::config::differences;
use crate::data::Cursor;
use crate::error::TrainError;
use crate::parallel::{Command, Group, SharedArray};
use crate::param_table::ParamInfo;
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
    pub fn save(&mut self, output: &Output, about: &str) -> Result<(), TrainError> {
        let params: Vec<ParamInfo> = self.model.params.table().iter().cloned().collect();
        let mut specs = Vec::new();
        for param in &params {
            let (array, scales) = self.model.params.arrays(param);
            let (name, shape) = (weight_name(&param.tensor.name), param.tensor.shape.clone());
            specs.push(TensorSpec::new(name, array.dtype(), shape));
            specs.extend(
                scales.map(|s| TensorSpec::new(scale_name(&param.tensor.name), Dtype::F32, [s.len()])),
            );
        }
        let state = self.state_arrays();
        specs.extend(
            state.iter().map(|array| TensorSpec::new(state_name(&array.name), array.dtype, [array.len()])),
        );
        let histories = self.model.histories.arrays();
        specs.extend(histories.map(|(name, values)| TensorSpec::new(name, Dtype::F32, [values.len()])));
        let (leaves, len) = (self.group.as_ref().map_or(0, Group::error_leaves), self.model.grads.len());
        specs.extend((0..leaves).map(|leaf| TensorSpec::new(error_name(leaf), Dtype::F32, [len])));
        let mut metadata = BTreeMap::from([(KEY.to_owned(), self.numbers(about).to_string())]);
        sealed::reserve(&mut metadata);
        let staged = StagedFile::begin(output)?;
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata)?;
        for param in &params {
            self.model.reach_param(param)?;
            let (array, scales) = self.model.params.arrays(param);
            write(&mut writer, &weight_name(&param.tensor.name), array)?;
            if let Some(scales) = scales {
                write(&mut writer, &scale_name(&param.tensor.name), Array::F32(scales))?;
            }
        }
        self.write_state(&mut writer, &state)?;
        for (name, values) in self.model.histories.arrays() {
            write(&mut writer, name, Array::F32(values))?;
        }
        self.write_errors(&mut writer)?;
        writer.finish()?;
        sealed::seal(staged.path())?;
        Ok(staged.commit()?)
    }

    /// Lists the arrays of the optimizer's state, with the parts that ranks keep of them.
    fn state_arrays(&self) -> Vec<SharedArray> {
        let names: Vec<String> = self.model.params.table().iter().map(|p| p.tensor.name.clone()).collect();
        let alone = || SharedArray::of(&self.optimizer, &names);
        self.group.as_ref().map_or_else(alone, |group| group.shared_arrays(&names))
    }

    /// Writes the optimizer's state, in parts as the ranks keep it.
    fn write_state(
        &mut self,
        writer: &mut SafetensorsWriter,
        state: &[SharedArray],
    ) -> Result<(), TrainError> {
        let (ranks, shards) = self.group.as_ref().map_or((1, false), Group::sharing);
        if let Some(group) =
            self.group.as_mut().filter(|group| ranks > 1 && (shards || group.error_leaves() > 0))
        {
            group.tell_all(&Command::Save)?;
        }
        let mut own = self.optimizer.parts().into_iter().flatten();
        for array in state {
            let (name, mut at) = (state_name(&array.name), 0);
            for (rank, _) in array.parts.iter().enumerate().filter(|(_, part)| part.is_some()) {
                let Some(group) = self.group.as_mut().filter(|_| rank > 0) else {
                    if let Some((_, part)) = own.next() {
                        write_at(writer, &name, &mut at, part)?;
                    }
                    continue;
                };
                let bytes = group.ask(rank)?;
                writer.write_range(&name, at, &bytes)?;
                at += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// Writes the errors of gradients in few bits, by leaf.
    fn write_errors(&mut self, writer: &mut SafetensorsWriter) -> Result<(), TrainError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        let (own, all) = (group.errors_mut().0.len(), group.error_leaves());
        for leaf in 0..all {
            if leaf < own {
                write(writer, &error_name(leaf), Array::F32(&group.errors_mut().0[leaf]))?;
                continue;
            }
            let bytes = group.ask(leaf / own.max(1))?;
            writer.write_range(&error_name(leaf), 0, &bytes)?;
        }
        Ok(())
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
        // Weights that are divided among ranks are read and sent one after another instead.
        if self.model.remote.is_none() {
            let params: Vec<_> = self.model.params.table().iter().cloned().collect();
            params.iter().try_for_each(|param| read_weight(&file, &mut self.model.params, param))?;
        }
        for (name, values) in self.model.histories.arrays_mut() {
            let mut array = ArrayMut::F32(values);
            let count = array.len();
            read(&file, name, Dtype::F32, &[count], |at, bytes| array.fill(at, bytes))?;
        }
        self.read_state(&file, &numbers)?;
        self.restore(numbers.progress, numbers.scaler);
        Ok(())
    }

    /// Restores the optimizer's state and the errors of gradients in few bits, and sends the other ranks all that is theirs.
    fn read_state(&mut self, file: &SafeTensors, numbers: &Numbers) -> Result<(), TrainError> {
        let state = self.state_arrays();
        let (ranks, shards) = self.group.as_ref().map_or((1, false), Group::sharing);
        let scale = numbers.error_scale;
        if let Some(group) = self.group.as_mut().filter(|_| ranks > 1) {
            group.tell_all(&Command::Load)?;
            group.share_weights(&mut self.model, |params, param| read_weight(file, params, param))?;
        }
        let mut own = self.optimizer.parts_mut(numbers.optimizer_steps).into_iter().flatten();
        for array in state.iter().filter(|array| array.parts[0].is_some()) {
            let (Some((_, mut to)), Some((bytes, _))) = (own.next(), array.place(0)) else { continue };
            read(file, &state_name(&array.name), array.dtype, &[array.len()], |at, found| {
                // Parts are whole elements, and so are the pieces that are read.
                let left = bytes.saturating_sub(at).min(found.len());
                if left > 0 { to.fill(at, &found[..left]) } else { Ok(()) }
            })?;
        }
        drop(own);
        let Some(group) = &mut self.group else { return Ok(()) };
        let (errors, error_scale) = group.errors_mut();
        *error_scale = scale;
        let (own, len) = (errors.len(), self.model.grads.len());
        for (leaf, errors) in errors.iter_mut().enumerate() {
            let mut array = ArrayMut::F32(errors);
            read(file, &error_name(leaf), Dtype::F32, &[len], |at, bytes| array.fill(at, bytes))?;
        }
        for rank in 1..ranks {
            let mut message = Writer::default();
            message.u64(numbers.optimizer_steps);
            message.f64(scale.into());
            group.send(rank, message.0)?;
            for array in &state {
                // Without shards every rank has the whole.
                let Some((bytes, before)) = array.place(if shards { rank } else { 0 }) else { continue };
                group.send(rank, read_bytes(file, &state_name(&array.name), before, bytes)?)?;
            }
            for leaf in rank * own..(rank + 1) * own {
                group.send(rank, read_bytes(file, &error_name(leaf), 0, 4 * len)?)?;
            }
        }
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
        if let Some(scale) = self.group.as_ref().and_then(Group::error_scale) {
            numbers["gradient_error_scale_bits"] = scale.to_bits().into();
        }
        if let Some(teacher) = &self.teacher {
            numbers["teacher"] = teacher.digest().into();
        }
        numbers
    }
}

/// Reads a parameter.
fn read_weight(file: &SafeTensors, params: &mut Parameters, param: &ParamInfo) -> Result<(), TrainError> {
    let (mut array, scales) = params.arrays_mut(param);
    let (name, expected) = (weight_name(&param.tensor.name), array.dtype());
    read(file, &name, expected, &param.tensor.shape, |at, bytes| array.fill(at, bytes))?;
    if let Some(scales) = scales {
        let (name, count) = (scale_name(&param.tensor.name), scales.len());
        let mut array = ArrayMut::F32(scales);
        read(file, &name, Dtype::F32, &[count], |at, bytes| array.fill(at, bytes))?;
    }
    Ok(())
}

/// Counters and scaler state in the metadata.
struct Numbers {
    progress: Progress,
    optimizer_steps: u64,
    scaler: Option<(f32, u32, i64)>,
    /// Scale of the loss that the errors of gradients in few bits belong to.
    error_scale: f32,
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
        let optimizer_steps = number(&value, "optimizer_steps")?;
        let scale = value["gradient_error_scale_bits"].as_u64().and_then(|bits| u32::try_from(bits).ok());
        let error_scale = scale.map_or(1.0, f32::from_bits);
        Ok(Numbers { progress, optimizer_steps, scaler, error_scale, base, teacher })
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

fn error_name(leaf: usize) -> String {
    format!("gradients.error.{leaf}")
}

/// Bytes copied at a time: the memory that a checkpoint needs beyond its content.
const PIECE: usize = 1 << 20;

/// Writes an array piece by piece.
fn write(writer: &mut SafetensorsWriter, name: &str, array: Array<'_>) -> Result<(), TrainError> {
    write_at(writer, name, &mut 0, array)
}

/// Writes an array piece by piece from byte offset `at` of a tensor on, and advances it.
fn write_at(
    writer: &mut SafetensorsWriter,
    name: &str,
    at: &mut u64,
    array: Array<'_>,
) -> Result<(), TrainError> {
    let mut put = |bytes: &[u8]| {
        let put = writer.write_range(name, *at, bytes);
        *at += bytes.len() as u64;
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

/// Reads `len` bytes of a tensor from byte offset `at` on.
fn read_bytes(file: &SafeTensors, name: &str, at: usize, len: usize) -> Result<Vec<u8>, TrainError> {
    let missing = || Error::NoTensor { path: file.path().to_owned(), tensor: name.to_owned() };
    let meta = file.get(name).ok_or_else(missing)?;
    let mut bytes = vec![0; len];
    file.read_range(meta, at as u64, &mut bytes)?;
    Ok(bytes)
}
