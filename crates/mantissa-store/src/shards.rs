//! Checkpoint: a Hugging Face folder of safetensors files and its config, or one bare file.
//!
//! In a folder, `model.safetensors` comes before `model.safetensors.index.json`, as in transformers. A folder with
//! neither and exactly one other `.safetensors` file is read with a warning. The index names the shards and is
//! untrusted, so only file names inside the folder are allowed. Links inside the folder are followed, because the
//! Hugging Face cache uses them; only the name is checked. A bare file has no config.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::disk;
use crate::error::{Error, ForeignKind, IndexFault, Result};
use crate::json::{parse_strict, read_strict, with_spelled_floats};
use crate::quantization;
use crate::reader::Tail;
use crate::regular;
use crate::safetensors::{SafeTensors, TensorMeta};
use crate::shard_plan::{INDEX_NAME, SINGLE_NAME};
use crate::view::{View, Viewed};

/// Longest `config.json` read, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Longest index read, in bytes: the header cap, since it repeats the names of the headers.
const MAX_INDEX_BYTES: u64 = crate::safetensors::MAX_HEADER_BYTES;

/// An open checkpoint: headers and config checked, tensors read on demand.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<SafeTensors>,
    /// File and position in it, by tensor name.
    by_name: BTreeMap<String, (usize, usize)>,
    config: Option<Value>,
    warnings: Vec<String>,
    /// Tensors that are read otherwise than they are stored, by name.
    views: BTreeMap<String, View>,
    /// Bytes of the tensors in the files, however this checkpoint presents them; `None` if it presents them as they are.
    stored: Option<u64>,
}

impl Checkpoint {
    /// Opens a folder or one `.safetensors` file; reads headers, index and config, but no tensor.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::NoWeights`] or [`Error::Ambiguous`] if there is nothing, or too much, to read;
    /// [`Error::Foreign`] for pickles and GGUF; [`Error::Index`] if index and shards disagree; else as
    /// [`SafeTensors::open`] and [`crate::json::parse_strict`].
    pub fn open(path: &Path) -> Result<Self> {
        let expected = "a model folder or a .safetensors file";
        let metadata = fs::metadata(path).map_err(|e| Error::opening(path, expected, "open", e))?;
        if metadata.is_dir() { Self::open_folder(path) } else { Self::open_file(path) }
    }

    /// All tensors: file by file in name order, within a file in the order of its bytes.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorMeta> {
        self.files.iter().flat_map(SafeTensors::tensors)
    }

    /// Tensor with this name.
    pub fn get(&self, name: &str) -> Option<&TensorMeta> {
        self.locate(name).map(|(_, meta)| meta)
    }

    /// Tensor with this name and the file that holds it.
    pub fn locate(&self, name: &str) -> Option<(&SafeTensors, &TensorMeta)> {
        let &(file, at) = self.by_name.get(name)?;
        let file = &self.files[file];
        Some((file, &file.tensors()[at]))
    }

    /// Bytes of a tensor.
    ///
    /// # Errors
    /// [`Error::NoTensor`], else as [`SafeTensors::read`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (file, meta) = self.require(name)?;
        match self.views.get(name) {
            Some(view) => view.read(file, meta),
            None => file.read(meta),
        }
    }

    /// Fills `buf` with a tensor's bytes from `byte_offset` on.
    ///
    /// # Errors
    /// [`Error::NoTensor`], else as [`SafeTensors::read_range`].
    pub fn read_range(&self, name: &str, byte_offset: u64, buf: &mut [u8]) -> Result<()> {
        let (file, meta) = self.require(name)?;
        match self.views.get(name) {
            Some(view) => view.read_range(file, meta, byte_offset, buf),
            None => file.read_range(meta, byte_offset, buf),
        }
    }

    /// A tensor of F64, F32, F16 or BF16 as f32, row-major.
    ///
    /// # Errors
    /// [`Error::NoTensor`], else as [`SafeTensors::read_f32`].
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let (file, meta) = self.require(name)?;
        match self.views.get(name) {
            Some(view) => view.read_elements_f32(file, meta, 0, meta.numel()),
            None => file.read_f32(meta),
        }
    }

    /// `count` elements of such a tensor, from element `first` on, as f32.
    ///
    /// # Errors
    /// As [`read_f32`](Self::read_f32), and [`Error::Range`].
    pub fn read_elements_f32(&self, name: &str, first: usize, count: usize) -> Result<Vec<f32>> {
        let (file, meta) = self.require(name)?;
        match self.views.get(name) {
            Some(view) => view.read_elements_f32(file, meta, first as u64, count as u64),
            None => file.read_elements_f32(meta, first as u64, count as u64),
        }
    }

    /// `config.json`, an object, where the folder has one.
    pub fn config(&self) -> Option<&Value> {
        self.config.as_ref()
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors().fold(0, |sum: u64, meta| sum.saturating_add(meta.len))
    }

    /// Bytes of all tensors in the files: those of a quantized model that is presented dequantized are fewer than
    /// [`total_bytes`](Self::total_bytes).
    pub fn stored_bytes(&self) -> u64 {
        self.stored.unwrap_or_else(|| self.total_bytes())
    }

    /// Every weight file, in name order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SafeTensors::path)
    }

    /// The folder, or the folder of the bare file; of a GGUF model the file itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Accepted irregularities, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn require(&self, name: &str) -> Result<(&SafeTensors, &TensorMeta)> {
        self.locate(name).ok_or_else(|| Error::NoTensor { path: self.dir.clone(), tensor: name.to_owned() })
    }

    fn open_file(path: &Path) -> Result<Self> {
        if let Some(kind) = foreign_kind(path) {
            return Err(Error::Foreign { path: path.to_owned(), kind });
        }
        Ok(Self::of_one(disk::folder_of(path), SafeTensors::open(path)?))
    }

    fn open_folder(dir: &Path) -> Result<Self> {
        let mut config = read_config(dir)?;
        let note = config.as_mut().and_then(quantization::to_root);
        let has = |name| fs::symlink_metadata(dir.join(name)).is_ok();
        let mut opened = if has(SINGLE_NAME) {
            Self::of_one(dir, SafeTensors::open(&dir.join(SINGLE_NAME))?)
        } else if has(INDEX_NAME) {
            Self::open_index(dir)?
        } else {
            Self::open_only(dir)?
        };
        if has(SINGLE_NAME) && has(INDEX_NAME) {
            opened.warnings.push(format!("{}: {INDEX_NAME} ignored, {SINGLE_NAME} read", dir.display()));
        }
        opened.warnings.extend(note.map(|note| format!("{}: {note}", dir.join("config.json").display())));
        opened.config = config;
        Ok(opened)
    }

    /// Files of a GGUF model: tensors as stored, and the config made from the metadata. The "folder" is the (first)
    /// file.
    pub(crate) fn of_gguf(path: &Path, files: Vec<SafeTensors>, config: Option<Value>) -> Self {
        let by_name = index(&files);
        let (warnings, views) = (Vec::new(), BTreeMap::new());
        Self { dir: path.to_owned(), files, by_name, config, warnings, views, stored: None }
    }

    /// The same files with other tensors: each is a range of the bytes of a tensor that this checkpoint has, under
    /// another name, with a [`View`] if it is read otherwise than it is stored.
    pub(crate) fn viewed(self, tensors: Vec<Viewed>, config: Option<Value>) -> Self {
        let stored = Some(self.stored_bytes());
        let mut file_tensors: Vec<Vec<TensorMeta>> = self.files.iter().map(|_| Vec::new()).collect();
        let mut views = BTreeMap::new();
        for Viewed { stored, meta, view } in tensors {
            let Some(&(file, _)) = self.by_name.get(&stored) else { continue };
            views.extend(view.map(|view| (meta.name.clone(), view)));
            file_tensors[file].push(meta);
        }
        let files: Vec<_> = self
            .files
            .into_iter()
            .zip(file_tensors)
            .map(|(file, tensors)| file.with_tensors(tensors))
            .collect();
        let by_name = index(&files);
        Self { files, by_name, config, views, stored, ..self }
    }

    /// The same files with one more accepted irregularity.
    pub(crate) fn with_warning(mut self, warning: String) -> Self {
        self.warnings.push(warning);
        self
    }

    /// The same files with `rows` rows in the matrix `name`, whose rows after its own are its first. `config` is the new
    /// configuration. Without that matrix, or with fewer rows, only the configuration changes.
    pub(crate) fn with_rows(self, name: &str, rows: usize, config: Value) -> Self {
        let (place, stored) = (self.by_name.get(name).copied(), Some(self.stored_bytes()));
        let mut views = self.views;
        let grown = |meta: &TensorMeta| {
            let [own, cols] = *meta.shape.as_slice() else { return None };
            let order: Vec<u32> =
                (0..rows as u32).map(|row| if (row as usize) < own { row } else { 0 }).collect();
            let len = (meta.len / own.max(1) as u64).saturating_mul(rows as u64);
            let fits = own > 0 && own < rows;
            fits.then(|| {
                (TensorMeta { shape: vec![rows, cols], len, ..meta.clone() }, View::Rows(order.into()))
            })
        };
        let file_tensors = |(number, file): (usize, SafeTensors)| {
            let found = place.filter(|(of, _)| *of == number).and_then(|_| file.get(name)).and_then(grown);
            let Some((meta, view)) = found else { return file };
            views.insert(name.to_owned(), view);
            let others = file.tensors().iter().filter(|other| other.name != name).cloned();
            let tensors = others.chain([meta]).collect();
            file.with_tensors(tensors)
        };
        let files: Vec<_> = self.files.into_iter().enumerate().map(file_tensors).collect();
        let by_name = index(&files);
        Self { files, by_name, views, config: Some(config), dir: self.dir, warnings: self.warnings, stored }
    }

    /// The same files with the tensors for which `keep` is true, and with computed tensors, `tail`, at the end of the first
    /// file; their offsets are counted from there.
    pub(crate) fn with_tail(
        mut self,
        keep: impl Fn(&str) -> bool,
        mut computed: Vec<TensorMeta>,
        tail: Box<dyn Tail>,
        config: Value,
    ) -> Self {
        let mut tail = Some(tail);
        let stored = Some(self.stored_bytes());
        let files: Vec<_> = self
            .files
            .drain(..)
            .map(|file| {
                let end = file.file_len();
                computed.iter_mut().for_each(|meta| meta.offset = meta.offset.saturating_add(end));
                file.with_tail(&keep, std::mem::take(&mut computed), tail.take())
            })
            .collect();
        let by_name = index(&files);
        Self { files, by_name, config: Some(config), stored, ..self }
    }

    /// Opens the files of `names` in `dir` that [`ShardedWriter`](crate::ShardedWriter) has begun, with the future
    /// config. Headers are complete; tensors hold what has been written so far.
    ///
    /// # Errors
    /// As [`SafeTensors::open`].
    pub(crate) fn of_begun<'n>(
        dir: &Path,
        names: impl IntoIterator<Item = &'n str>,
        config: Value,
    ) -> Result<Self> {
        let begun = names.into_iter().map(|name| dir.join(name)).filter(|path| path.exists());
        let files = begun.map(|path| SafeTensors::open(&path)).collect::<Result<Vec<_>>>()?;
        let by_name = index(&files);
        Ok(Self {
            dir: dir.to_owned(),
            files,
            by_name,
            config: Some(config),
            warnings: Vec::new(),
            views: BTreeMap::new(),
            stored: None,
        })
    }

    fn of_one(dir: &Path, file: SafeTensors) -> Self {
        let by_name =
            file.tensors().iter().enumerate().map(|(i, meta)| (meta.name.clone(), (0, i))).collect();
        Self {
            dir: dir.to_owned(),
            files: vec![file],
            by_name,
            config: None,
            warnings: Vec::new(),
            views: BTreeMap::new(),
            stored: None,
        }
    }

    /// Folder with a single weight file of another name, as some quantizers write it.
    fn open_only(dir: &Path) -> Result<Self> {
        let mut foreign = None;
        let mut weights = Vec::new();
        for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, "list folder", e))? {
            let path = entry.map_err(|e| Error::io(dir, "list folder", e))?.path();
            if path.extension().is_some_and(|ext| ext == "safetensors") {
                weights.push(path);
            } else {
                foreign = foreign.or(foreign_kind(&path));
            }
        }
        match (weights.as_slice(), foreign) {
            ([only], _) => {
                let mut opened = Self::of_one(dir, SafeTensors::open(only)?);
                opened.warnings.push(format!("{}: read as the folder's only weights", only.display()));
                Ok(opened)
            }
            ([], Some(kind)) => Err(Error::Foreign { path: dir.to_owned(), kind }),
            ([], None) => Err(Error::NoWeights { path: dir.to_owned() }),
            (several, _) => Err(Error::Ambiguous { path: dir.to_owned(), count: several.len() }),
        }
    }

    fn open_index(dir: &Path) -> Result<Self> {
        let path = dir.join(INDEX_NAME);
        let index = read_strict(&path, MAX_INDEX_BYTES, INDEX_NAME)?;
        let shard_of = weight_map(&path, &index)?;
        let names: BTreeSet<&str> = shard_of.values().map(String::as_str).collect();
        for (tensor, shard) in &shard_of {
            require_shard(&path, dir, tensor, shard)?;
        }
        let files =
            names.iter().map(|name| SafeTensors::open(&dir.join(name))).collect::<Result<Vec<_>>>()?;
        let names: Vec<&str> = names.into_iter().collect();
        let by_name = match_shards(&path, &shard_of, &names, &files)?;
        let mut opened = Self {
            dir: dir.to_owned(),
            files,
            by_name,
            config: None,
            warnings: Vec::new(),
            views: BTreeMap::new(),
            stored: None,
        };
        opened.warnings.extend(total_size_warning(&path, &index, opened.total_bytes()));
        Ok(opened)
    }
}

/// File and position in it of every tensor.
fn index(files: &[SafeTensors]) -> BTreeMap<String, (usize, usize)> {
    let mut by_name = BTreeMap::new();
    for (file, opened) in files.iter().enumerate() {
        by_name.extend(opened.tensors().iter().enumerate().map(|(i, meta)| (meta.name.clone(), (file, i))));
    }
    by_name
}

fn read_config(dir: &Path) -> Result<Option<Value>> {
    let path = dir.join("config.json");
    if fs::symlink_metadata(&path).is_err() {
        return Ok(None);
    }
    let bytes = regular::read(&path, MAX_CONFIG_BYTES, "a model's config.json")?;
    let config = parse_strict(&with_spelled_floats(&bytes), &path, MAX_CONFIG_BYTES)?;
    if config.is_object() {
        return Ok(Some(config));
    }
    Err(Error::field(&path, "root", kind_of(&config), "an object", ""))
}

/// `weight_map` of the index: tensor name to shard name.
fn weight_map(path: &Path, index: &Value) -> Result<BTreeMap<String, String>> {
    let bad = |field: String, found: &Value| {
        let allowed = "an object of tensor names to file names";
        Error::field(path, field, kind_of(found), allowed, "")
    };
    let map = index["weight_map"].as_object();
    let map = map.ok_or_else(|| bad("weight_map".to_owned(), &index["weight_map"]))?;
    map.iter()
        .map(|(tensor, shard)| match shard {
            Value::String(shard) => Ok((tensor.clone(), shard.clone())),
            other => Err(bad(format!("weight_map[\"{tensor}\"]"), other)),
        })
        .collect()
}

/// Checks that the shard's name is a plain file name and that the file exists.
fn require_shard(path: &Path, dir: &Path, tensor: &str, shard: &str) -> Result<()> {
    let (tensor, shard) = (tensor.to_owned(), shard.to_owned());
    let plain = shard.ends_with(".safetensors") && !shard.contains(['/', '\\', '\0']);
    if !plain {
        return Err(Error::index(path, IndexFault::ShardName { tensor, shard }));
    }
    match fs::metadata(dir.join(&shard)) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::index(path, IndexFault::MissingShard { tensor, shard })),
    }
}

/// Checks that index and shards hold the same tensors in the same places.
fn match_shards(
    path: &Path,
    shard_of: &BTreeMap<String, String>,
    names: &[&str],
    files: &[SafeTensors],
) -> Result<BTreeMap<String, (usize, usize)>> {
    let mut by_name: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (file, opened) in files.iter().enumerate() {
        for (at, meta) in opened.tensors().iter().enumerate() {
            let (tensor, shard) = (meta.name.clone(), names[file].to_owned());
            let fault = match (by_name.insert(meta.name.clone(), (file, at)), shard_of.get(&meta.name)) {
                (Some((first, _)), _) => {
                    IndexFault::TwoShards { tensor, first: names[first].to_owned(), second: shard }
                }
                (None, None) => IndexFault::Unlisted { tensor, shard },
                (None, Some(_)) => continue,
            };
            return Err(Error::index(path, fault));
        }
    }
    for (tensor, shard) in shard_of {
        if by_name.get(tensor).is_none_or(|&(file, _)| names[file] != shard) {
            let fault = IndexFault::LacksTensor { tensor: tensor.clone(), shard: shard.clone() };
            return Err(Error::index(path, fault));
        }
    }
    Ok(by_name)
}

/// Some writers count tied tensors twice, so a wrong total is only a warning.
fn total_size_warning(path: &Path, index: &Value, total: u64) -> Option<String> {
    let stated = &index["metadata"]["total_size"];
    if stated.is_null() || stated.as_u64() == Some(total) || stated.as_f64() == Some(total as f64) {
        return None;
    }
    let stated: String = stated.to_string().chars().take(40).collect();
    Some(format!(
        "{}: metadata.total_size: expected {total}, the bytes of the tensors, got {stated}",
        path.display()
    ))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
/// Recognises a file that is no safetensors by its name; one that ends in `.bin`, which many programs write, by its first bytes.
fn foreign_kind(path: &Path) -> Option<ForeignKind> {
    let kind = ForeignKind::from_extension(path)?;
    if path.extension().is_none_or(|extension| extension != "bin") {
        return Some(kind);
    }
    let mut head = Vec::new();
    let file = regular::open(path, "weights");
    Some(match file.map(|file| file.take(64).read_to_end(&mut head)) {
        Ok(Ok(_)) => ForeignKind::sniff(&head).unwrap_or(ForeignKind::Bin),
        // What cannot be read is taken for what the name usually stands for.
        _ => kind,
    })
}
