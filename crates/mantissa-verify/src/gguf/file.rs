//! Second reader of the GGUF container, written from its description (`docs/gguf.md` of ggml). It reads the file
//! once, keeps the parts that verification needs and skips the rest.
//!
//! It is stricter than a reader has to be. It enforces the order that llama.cpp's reader requires (tensors
//! consecutive, in the order of their infos) and the described padding (zero bytes, nothing after the last tensor).

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{BlockType, Error};

type Result<T> = std::result::Result<T, Error>;

/// Longest key and longest stored string; longer strings are skipped.
const MAX_TEXT: u64 = 1 << 16;

/// Arrays within arrays, at most.
const MAX_DEPTH: u32 = 4;

/// Most layers of a model.
const MAX_LAYERS: u64 = 10_000;

/// Value of a key, as far as verification needs it.
#[derive(Clone, Debug, PartialEq)]
pub enum Key {
    /// An unsigned integer.
    Number(u64),
    /// A short string.
    Text(String),
    /// Array with this number of elements.
    List(u64),
    /// Array of f32.
    Floats {
        /// First byte of its elements, from the start of the file.
        start: u64,
        /// Number of its elements.
        count: u64,
    },
    /// Anything else.
    Other,
}

/// Type, dimensions and place of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Type of the elements or blocks.
    pub ty: BlockType,
    /// Index of the file of a split model.
    pub file: usize,
    /// Dimensions, fastest first, as in the file.
    pub dims: Vec<u64>,
    /// First byte, from the start of the file.
    pub start: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl Tensor {
    /// Number of rows of all matrices.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }
}

/// GGUF file with a valid container.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: fs::File,
    /// The other files of a model that is split.
    rest: Vec<GgufFile>,
    /// Values of the metadata.
    pub keys: BTreeMap<String, Key>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl GgufFile {
    /// Reads the files `opened` of one model and merges their tensors. Each file of a split model states its number.
    /// The caller opens the files, and sees to it that they are regular.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn read_all(opened: Vec<(&Path, fs::File)>) -> Result<Self> {
        let count = opened.len() as u64;
        let mut files = Vec::new();
        for (number, (path, file)) in opened.into_iter().enumerate() {
            let file = Self::from_file(path, file)?;
            for (key, wanted) in [("split.no", number as u64), ("split.count", count)] {
                if let Some(found) = file.number(key).filter(|&found| found != wanted) {
                    return Err(fault(path, key, found, &wanted.to_string()));
                }
                if count > 1 && file.number(key).is_none() {
                    return Err(fault(path, key, "nothing", &wanted.to_string()));
                }
            }
            files.push(file);
        }
        let mut rest = files.split_off(1.min(files.len()));
        let none = || fault(Path::new(""), "files", "none", "at least one");
        let mut first = files.pop().ok_or_else(none)?;
        for (number, part) in rest.iter_mut().enumerate() {
            for (name, tensor) in std::mem::take(&mut part.tensors) {
                let tensor = Tensor { file: number + 1, ..tensor };
                if first.tensors.insert(name.clone(), tensor).is_some() {
                    return Err(fault(
                        &part.path,
                        &name,
                        "a tensor of another file too",
                        "every tensor once",
                    ));
                }
            }
        }
        let found = first.tensors.len() as u64;
        match first.number("split.tensors.count").filter(|stated| *stated != found) {
            Some(stated) => Err(fault(&first.path, "split.tensors.count", stated, &found.to_string())),
            None => Ok(GgufFile { rest, ..first }.with_listed()),
        }
    }

    /// Adds a tensor of each layer for every key that lists a number of each in place of tensors.
    fn with_listed(mut self) -> Self {
        let architecture = self.text("general.architecture").unwrap_or("").to_owned();
        let layers = self.number(&format!("{architecture}.block_count")).unwrap_or(0);
        // Keys of the file's parts have their prefixes.
        let parts = ["general.", "tokenizer.", &format!("{architecture}.")].map(str::to_owned);
        for (key, value) in &self.keys {
            let &Key::Floats { start, count } = value else { continue };
            if count != layers || layers > MAX_LAYERS || parts.iter().any(|part| key.starts_with(part)) {
                continue;
            }
            for layer in 0..layers {
                let (dims, start) = (vec![1], start + 4 * layer);
                let tensor = Tensor { ty: BlockType::F32, file: 0, dims, start, bytes: 4 };
                self.tensors.entry(format!("blk.{layer}.{key}")).or_insert(tensor);
            }
        }
        self
    }

    /// Reads everything except the values of the tensors.
    ///
    /// # Errors
    /// [`Error::Field`] for the first deviation from the description; [`Error::Io`].
    pub fn from_file(path: &Path, file: fs::File) -> Result<Self> {
        let io = |error| Error::Io { path: path.to_owned(), operation: "open", error };
        let len = file.metadata().map_err(io)?.len();
        let mut stream = Stream { path, reader: BufReader::new(&file), at: 0, len };
        let magic: [u8; 4] = stream.take("magic")?;
        if magic != *b"GGUF" {
            return Err(stream.fault("magic", format!("{magic:02x?}"), "\"GGUF\""));
        }
        let version = stream.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(stream.fault("version", version, "2 or 3"));
        }
        let (tensor_count, key_count) = (stream.u64("tensor count")?, stream.u64("key count")?);
        let keys = stream.keys(key_count)?;
        let infos = stream.infos(tensor_count)?;
        let alignment = match keys.get("general.alignment") {
            None => 32,
            Some(Key::Number(n)) if n.is_power_of_two() => *n,
            Some(found) => {
                return Err(stream.fault("general.alignment", format!("{found:?}"), "a power of two"));
            }
        };
        let header = stream.at;
        let file = GgufFile { path: path.to_owned(), file, rest: Vec::new(), keys, tensors: BTreeMap::new() };
        file.placed(infos, header, alignment, len)
    }

    /// Reads the bytes of `count` rows from row `first` on.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn rows(&self, tensor: &Tensor, first: usize, count: usize) -> Result<Vec<u8>> {
        let row = tensor.bytes / tensor.rows().max(1);
        let mut bytes = vec![0; usize::try_from(row).unwrap_or(usize::MAX).saturating_mul(count)];
        self.of(tensor).read(tensor.start + row * first as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the optional scale of matrix `which` of `of`.
    ///
    /// # Errors
    /// [`Error::Field`] unless it is one f32 per matrix; [`Error::Io`].
    pub fn factor(&self, weight: &str, which: u64, of: u64) -> Result<Option<f32>> {
        let Some(name) = weight.strip_suffix(".weight").map(|module| format!("{module}.scale")) else {
            return Ok(None);
        };
        let Some(tensor) = self.tensors.get(&name) else { return Ok(None) };
        if tensor.ty != BlockType::F32 || tensor.bytes / 4 != of {
            let found = format!("{:?} {:?}", tensor.ty, tensor.dims);
            return Err(fault(&self.path, &name, found, &format!("{of} F32")));
        }
        let mut bytes = [0; 4];
        self.of(tensor).read(tensor.start + 4 * which, &mut bytes)?;
        Ok(Some(f32::from_le_bytes(bytes)))
    }

    /// The first file of the model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that holds a tensor.
    fn of(&self, tensor: &Tensor) -> &GgufFile {
        tensor.file.checked_sub(1).and_then(|i| self.rest.get(i)).unwrap_or(self)
    }

    /// Unsigned integer of a key.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.keys.get(key) {
            Some(Key::Number(n)) => Some(*n),
            _ => None,
        }
    }

    /// Text of a key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.keys.get(key) {
            Some(Key::Text(text)) => Some(text),
            _ => None,
        }
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let io = |error| Error::Io { path: self.path.clone(), operation: "read", error };
        self.file.read_exact_at(bytes, at).map_err(io)
    }

    /// Places the tensors by the sizes of those before them, and compares that with their offsets.
    fn placed(mut self, infos: Vec<Info>, header: u64, alignment: u64, len: u64) -> Result<Self> {
        let path = self.path.clone();
        let past = |name: &str| fault(&path, name, "sizes past 64 bits", "a tensor that the file holds");
        let data = header.checked_next_multiple_of(alignment).ok_or_else(|| past("data section"))?;
        self.require_zeros("data section", header, data.min(len))?;
        let (mut end, mut padded) = (data, data);
        for Info { name, ty, dims, offset } in infos {
            if padded.checked_sub(data) != Some(offset) {
                let expected = format!("{}, after the tensor before it", padded - data);
                return Err(fault(&path, &name, format!("offset {offset}"), &expected));
            }
            self.require_zeros(&name, end, padded)?;
            let bytes = byte_len(ty, &dims).map_err(|allowed| {
                fault(&path, &name, format!("dimensions {dims:?} of type {ty:?}"), allowed)
            })?;
            end = padded.checked_add(bytes).ok_or_else(|| past(&name))?;
            if end > len {
                let found = format!("its last byte at {end}");
                return Err(fault(&path, &name, found, &format!("at most {len}, the file's length")));
            }
            let tensor = Tensor { ty, file: 0, dims, start: padded, bytes };
            padded = end.checked_next_multiple_of(alignment).ok_or_else(|| past(&name))?;
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(fault(&path, &name, "two tensors of this name", "one"));
            }
        }
        if len > padded {
            let found = format!("{} bytes after the last tensor", len - padded);
            return Err(fault(&path, "file", found, "none"));
        }
        self.require_zeros("end of the file", end.min(len), len)?;
        Ok(self)
    }

    fn require_zeros(&self, before: &str, from: u64, to: u64) -> Result<()> {
        let mut padding = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or(0)];
        self.read(from, &mut padding)?;
        match padding.iter().position(|&byte| byte != 0) {
            None => Ok(()),
            Some(at) => {
                let found = format!("byte {} of the file is {:#04x}", from + at as u64, padding[at]);
                Err(fault(&self.path, &format!("padding before {before}"), found, "zero bytes"))
            }
        }
    }
}

/// Size of a tensor in bytes, or the expected value if it has none.
fn byte_len(ty: BlockType, dims: &[u64]) -> std::result::Result<u64, &'static str> {
    let (elements, bytes) = ty.block();
    if !dims[0].is_multiple_of(elements as u64) {
        return Err("rows of whole blocks");
    }
    let blocks = dims[1..].iter().try_fold(dims[0] / elements as u64, |n, &dim| n.checked_mul(dim));
    blocks.and_then(|n| n.checked_mul(bytes as u64)).ok_or("a product below 2^64")
}

/// A tensor info as read.
struct Info {
    name: String,
    ty: BlockType,
    dims: Vec<u64>,
    offset: u64,
}

/// Sequential part of the file.
struct Stream<'a> {
    path: &'a Path,
    reader: BufReader<&'a fs::File>,
    at: u64,
    len: u64,
}

impl Stream<'_> {
    fn fault(&self, field: &str, found: impl ToString, allowed: &str) -> Error {
        fault(self.path, field, found, allowed)
    }

    /// Refuses to read past the end.
    fn require(&self, n: u64, what: &str) -> Result<()> {
        let left = self.len - self.at;
        if n <= left {
            return Ok(());
        }
        Err(self.fault(what, format!("{n} bytes at byte {}", self.at), &format!("the {left} that are left")))
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.require(N as u64, what)?;
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let io = |error| Error::Io { path: self.path.to_owned(), operation: "read", error };
        self.reader.read_exact(bytes).map_err(io)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn skip(&mut self, n: u64, what: &str) -> Result<()> {
        self.require(n, what)?;
        let io = |error| Error::Io { path: self.path.to_owned(), operation: "seek", error };
        let step = i64::try_from(n).map_err(|_| self.fault(what, n, "a length below 2^63"))?;
        self.reader.seek_relative(step).map_err(io)?;
        self.at += n;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// Reads a string; `None` if it is too long to keep.
    fn text(&mut self, what: &str) -> Result<Option<String>> {
        let n = self.u64(what)?;
        self.require(n, what)?;
        if n > MAX_TEXT {
            return self.skip(n, what).map(|()| None);
        }
        let mut bytes = vec![0; n as usize];
        self.fill(&mut bytes)?;
        let text = String::from_utf8(bytes).map_err(|_| self.fault(what, "other bytes", "UTF-8"))?;
        Ok(Some(text))
    }

    fn name(&mut self, what: &str) -> Result<String> {
        let name = self.text(what)?.filter(|name| !name.is_empty());
        name.ok_or_else(|| self.fault(what, "none or a very long one", "1 to 65536 bytes"))
    }

    fn keys(&mut self, count: u64) -> Result<BTreeMap<String, Key>> {
        let mut keys = BTreeMap::new();
        for i in 0..count {
            let key = self.name(&format!("key {i}"))?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind, 0)?;
            if keys.insert(key.clone(), value).is_some() {
                return Err(self.fault(&key, "this key twice", "once"));
            }
        }
        Ok(keys)
    }

    /// Types of `gguf.h`: u8 i8 u16 i16 u32 i32 f32 bool string array u64 i64 f64, from 0 on.
    fn value(&mut self, key: &str, kind: u32, depth: u32) -> Result<Key> {
        Ok(match kind {
            0 => Key::Number(u8::from_le_bytes(self.take(key)?).into()),
            2 => Key::Number(u16::from_le_bytes(self.take(key)?).into()),
            4 => Key::Number(self.u32(key)?.into()),
            5 => u64::try_from(i32::from_le_bytes(self.take(key)?)).map_or(Key::Other, Key::Number),
            10 => Key::Number(self.u64(key)?),
            8 => self.text(key)?.map_or(Key::Other, Key::Text),
            9 => self.array(key, depth)?,
            _ => {
                let size = width(kind).ok_or_else(|| self.fault(key, format!("type {kind}"), "0 to 12"))?;
                self.skip(size, key)?;
                Key::Other
            }
        })
    }

    /// Skips an array; returns its number of elements, and their place if they are f32.
    fn array(&mut self, key: &str, depth: u32) -> Result<Key> {
        let (kind, count) = (self.u32(key)?, self.u64(key)?);
        let start = self.at;
        self.elements(key, (kind, count), depth)?;
        Ok(if kind == 6 { Key::Floats { start, count } } else { Key::List(count) })
    }

    /// Skips the elements of an array.
    fn elements(&mut self, key: &str, (kind, count): (u32, u64), depth: u32) -> Result<()> {
        if let Some(size) = width(kind) {
            let bytes =
                count.checked_mul(size).ok_or_else(|| self.fault(key, count, "an array in the file"))?;
            return self.skip(bytes, key);
        }
        if depth == MAX_DEPTH {
            return Err(self.fault(key, "arrays in arrays", "at most 4 levels"));
        }
        for _ in 0..count {
            match kind {
                8 => {
                    let n = self.u64(key)?;
                    self.skip(n, key)?;
                }
                kind => drop(self.value(key, kind, depth + 1)?),
            }
        }
        Ok(())
    }

    fn infos(&mut self, count: u64) -> Result<Vec<Info>> {
        let mut infos = Vec::new();
        for i in 0..count {
            let name = self.name(&format!("tensor {i}"))?;
            let n = self.u32(&name)?;
            if !(1..=4).contains(&n) {
                return Err(self.fault(&name, format!("{n} dimensions"), "1 to 4"));
            }
            let dims = (0..n).map(|_| self.u64(&name)).collect::<Result<_>>()?;
            let id = self.u32(&name)?;
            let ty = BlockType::from_id(id)
                .ok_or_else(|| self.fault(&name, format!("type {id}"), "a type of ggml"))?;
            let offset = self.u64(&name)?;
            infos.push(Info { name, ty, dims, offset });
        }
        Ok(infos)
    }
}

/// Size of a fixed-size value, in bytes.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn fault(path: &Path, field: &str, got: impl ToString, expected: &str) -> Error {
    let (field, expected) = (field.to_owned(), expected.to_owned());
    Error::Field { path: path.to_owned(), field, expected, got: got.to_string() }
}
