//! Splits tensors over files named as in Hugging Face checkpoints, and writes them through one interface.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::commit::write_new;
use crate::disk;
use crate::error::{Error, Result, WriteFault};
use crate::hash::FileDigest;
use crate::writer::{SafetensorsWriter, TensorSpec, refuse_bad_names};

/// Default bound on the tensor bytes of one file: 5 GB, as `save_pretrained` has it.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// File name of the only weight file, if there is one.
pub const SINGLE_NAME: &str = "model.safetensors";

/// File name of the index of several weight files.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// One file of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// For example `model-00001-of-00003.safetensors`.
    pub file_name: String,
    /// Its tensors, in the order given to the plan.
    pub specs: Vec<TensorSpec>,
    /// Bytes of its tensors.
    pub bytes: u64,
}

/// Assignment of tensors to files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    shards: Vec<Shard>,
}

impl ShardPlan {
    /// Fills files in the given order, each up to `max_shard_bytes`; a tensor larger than that has its own file.
    ///
    /// # Errors
    /// [`Error::Write`] for a name given twice or a shape without a byte length.
    pub fn new(specs: Vec<TensorSpec>, max_shard_bytes: u64) -> Result<Self> {
        let path = Path::new(SINGLE_NAME);
        refuse_bad_names(path, &specs)?;
        let mut shards: Vec<Shard> = Vec::new();
        for spec in specs {
            let len = spec.len(path)?;
            match shards.last_mut() {
                Some(shard) if shard.bytes.saturating_add(len) <= max_shard_bytes => {
                    shard.bytes += len;
                    shard.specs.push(spec);
                }
                _ => shards.push(Shard { file_name: String::new(), specs: vec![spec], bytes: len }),
            }
        }
        if shards.is_empty() {
            shards.push(Shard { file_name: String::new(), specs: Vec::new(), bytes: 0 });
        }
        let count = shards.len();
        for (i, shard) in shards.iter_mut().enumerate() {
            shard.file_name = file_name(i, count);
        }
        Ok(Self { shards })
    }

    /// The files, in order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().fold(0, |sum: u64, shard| sum.saturating_add(shard.bytes))
    }

    /// Text of the index file; `None` when one file holds everything.
    pub fn index_json(&self) -> Option<String> {
        if self.shards.len() == 1 {
            return None;
        }
        let files: BTreeMap<&str, &str> = self
            .shards
            .iter()
            .flat_map(|shard| shard.specs.iter().map(|spec| (spec.name.as_str(), shard.file_name.as_str())))
            .collect();
        let weight_map: Map<String, Value> =
            files.into_iter().map(|(name, file)| (name.to_owned(), json!(file))).collect();
        let index = json!({"metadata": {"total_size": self.total_bytes()}, "weight_map": weight_map});
        Some(format!("{index:#}\n"))
    }
}

/// Writes tensors of a [`ShardPlan`] by name, in any order.
///
/// A file is created at its first write and finished (synced, hashed, closed) at its last, so writing in the plan's
/// order keeps only one file open.
#[derive(Debug)]
pub struct ShardedWriter {
    dir: PathBuf,
    plan: ShardPlan,
    metadata: BTreeMap<String, String>,
    states: Vec<State>,
    shard_of: HashMap<String, usize>,
}

#[derive(Debug)]
enum State {
    Pending,
    /// May be on disk, begun by another process.
    Left,
    Open(SafetensorsWriter),
    Done(FileDigest),
}

impl ShardedWriter {
    /// A writer into the existing folder `dir`; every file gets the same `metadata`.
    pub fn new(dir: &Path, plan: ShardPlan, metadata: BTreeMap<String, String>) -> Self {
        let names = plan.shards.iter().enumerate();
        let shard_of =
            names.flat_map(|(i, s)| s.specs.iter().map(move |spec| (spec.name.clone(), i))).collect();
        let states = plan.shards.iter().map(|_| State::Pending).collect();
        Self { dir: dir.to_owned(), plan, metadata, states, shard_of }
    }

    /// Like [`Self::new`], in a folder where another process has begun the same files. Everything that
    /// [`Self::recover`] does not find must be written again.
    pub fn resume(dir: &Path, plan: ShardPlan, metadata: BTreeMap<String, String>) -> Self {
        let mut writer = Self::new(dir, plan, metadata);
        writer.states.iter_mut().for_each(|state| *state = State::Left);
        writer
    }

    /// Counts these tensors as written if all are on disk with these [checksums](crate::Checksum). Returns true if
    /// they are.
    ///
    /// # Errors
    /// [`Error::Write`] for a tensor written before, [`Error::Io`].
    pub fn recover(&mut self, tensors: &[(String, u64)]) -> Result<bool> {
        for (name, checksum) in tensors {
            let Some(&at) = self.shard_of.get(name) else { return Ok(false) };
            match self.left(at)? {
                Some(writer) if writer.holds(name, *checksum)? => {}
                _ => return Ok(false),
            }
        }
        for (name, _) in tensors {
            let at = self.shard(name)?;
            self.open(name, at, 0)?.count_as_written(name)?;
        }
        for (name, _) in tensors {
            self.close_if_complete(self.shard(name)?)?;
        }
        Ok(true)
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        self.states.iter().try_for_each(|state| match state {
            State::Open(writer) => writer.sync(),
            _ => Ok(()),
        })
    }

    /// Writes a whole tensor; see [`SafetensorsWriter::write`].
    ///
    /// # Errors
    /// As [`SafetensorsWriter::create`], [`SafetensorsWriter::write`] and [`SafetensorsWriter::finish`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let at = self.shard(name)?;
        if self.nothing_to_write(at, bytes) {
            return Ok(());
        }
        self.open(name, at, 0)?.write(name, bytes)?;
        self.close_if_complete(at)
    }

    /// Writes part of a tensor; see [`SafetensorsWriter::write_range`].
    ///
    /// # Errors
    /// As [`SafetensorsWriter::create`], [`SafetensorsWriter::write_range`] and [`SafetensorsWriter::finish`].
    pub fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.shard(name)?;
        if self.nothing_to_write(at, bytes) {
            return Ok(());
        }
        self.open(name, at, byte_offset)?.write_range(name, byte_offset, bytes)?;
        self.close_if_complete(at)
    }

    /// Finishes every file and writes the index. Returns each file's name and digest, the index last.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::finish`], naming the first incomplete tensor.
    pub fn finish(mut self) -> Result<Vec<(String, FileDigest)>> {
        let mut digests = Vec::with_capacity(self.states.len() + 1);
        for at in 0..self.states.len() {
            let digest = self.finish_shard(at)?;
            digests.push((self.plan.shards[at].file_name.clone(), digest));
        }
        if let Some(index) = self.plan.index_json() {
            write_new(&self.dir.join(INDEX_NAME), index.as_bytes())?;
            digests.push((INDEX_NAME.to_owned(), FileDigest::of(index.as_bytes())));
        }
        Ok(digests)
    }

    fn shard(&self, name: &str) -> Result<usize> {
        let known = self.shard_of.get(name).copied();
        known.ok_or_else(|| Error::write(&self.dir, name, WriteFault::Unknown))
    }

    /// Tensors without bytes may come after the last byte of their file.
    fn nothing_to_write(&self, at: usize, bytes: &[u8]) -> bool {
        bytes.is_empty() && matches!(self.states[at], State::Done(_))
    }

    /// The writer of shard `at`, created if nothing was written there yet.
    fn open(&mut self, name: &str, at: usize, offset: u64) -> Result<&mut SafetensorsWriter> {
        self.left(at)?;
        if let State::Pending = self.states[at] {
            self.states[at] = State::Open(self.create(at)?);
        }
        match &mut self.states[at] {
            State::Open(writer) => Ok(writer),
            // A complete file holds every byte of its tensors, so this write repeats one.
            _ => Err(Error::write(&self.dir, name, WriteFault::Twice { offset })),
        }
    }

    /// Writer of shard `at` if it exists, perhaps for a file begun by another process.
    fn left(&mut self, at: usize) -> Result<Option<&SafetensorsWriter>> {
        if let State::Left = self.states[at] {
            let shard = &self.plan.shards[at];
            let path = self.dir.join(&shard.file_name);
            self.states[at] =
                match SafetensorsWriter::reopen(&path, shard.specs.clone(), self.metadata.clone())? {
                    Some(writer) => State::Open(writer),
                    None => {
                        disk::remove_file_if_there(&path).map_err(|e| Error::io(&path, "clean up", e))?;
                        State::Pending
                    }
                };
        }
        match &self.states[at] {
            State::Open(writer) => Ok(Some(writer)),
            _ => Ok(None),
        }
    }

    fn create(&self, at: usize) -> Result<SafetensorsWriter> {
        let shard = &self.plan.shards[at];
        SafetensorsWriter::create(
            &self.dir.join(&shard.file_name),
            shard.specs.clone(),
            self.metadata.clone(),
        )
    }

    fn close_if_complete(&mut self, at: usize) -> Result<()> {
        if matches!(&self.states[at], State::Open(writer) if writer.remaining() == 0) {
            self.finish_shard(at)?;
        }
        Ok(())
    }

    fn finish_shard(&mut self, at: usize) -> Result<FileDigest> {
        self.left(at)?;
        let digest = match std::mem::replace(&mut self.states[at], State::Pending) {
            State::Pending | State::Left => self.create(at)?.finish()?,
            State::Open(writer) => writer.finish()?,
            State::Done(digest) => digest,
        };
        self.states[at] = State::Done(digest);
        Ok(digest)
    }
}

fn file_name(index: usize, count: usize) -> String {
    if count == 1 {
        return SINGLE_NAME.to_owned();
    }
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    fn specs(lens: &[usize]) -> Vec<TensorSpec> {
        let spec = |(i, &len): (usize, &usize)| TensorSpec::new(format!("t{i}"), Dtype::U8, [len]);
        lens.iter().enumerate().map(spec).collect()
    }

    #[test]
    fn files_fill_in_order() {
        let plan = ShardPlan::new(specs(&[4, 6, 1, 30, 2, 0]), 10).unwrap();
        let layout: Vec<_> =
            plan.shards().iter().map(|s| (s.file_name.as_str(), s.specs.len(), s.bytes)).collect();
        assert_eq!(
            layout,
            [
                ("model-00001-of-00004.safetensors", 2, 10),
                ("model-00002-of-00004.safetensors", 1, 1),
                ("model-00003-of-00004.safetensors", 1, 30),
                ("model-00004-of-00004.safetensors", 2, 2),
            ]
        );
        let index: Value = serde_json::from_str(&plan.index_json().unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 43);
        assert_eq!(index["weight_map"]["t3"], "model-00003-of-00004.safetensors");
    }

    #[test]
    fn one_file_needs_no_index() {
        for lens in [&[][..], &[1, 2, 3]] {
            let plan = ShardPlan::new(specs(lens), DEFAULT_SHARD_BYTES).unwrap();
            assert_eq!(plan.shards()[0].file_name, "model.safetensors");
            assert_eq!(plan.index_json(), None);
        }
    }

    #[test]
    fn a_name_in_two_files_is_refused() {
        let mut twice = specs(&[8, 8]);
        twice[1].name = "t0".into();
        let error = ShardPlan::new(twice, 8).unwrap_err();
        assert!(matches!(error, Error::Write { fault: WriteFault::Duplicate, .. }), "{error}");
    }
}
