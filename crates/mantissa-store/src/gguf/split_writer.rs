//! A model written to one GGUF file, or to several as llama.cpp's `gguf-split` names and numbers them ([`mod@super::split`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::split::part_name;
use super::{GgufTensorSpec, GgufWriter, Value};
use crate::error::{Error, Result};
use crate::hash::FileDigest;

/// Most files: their count is a u16.
const MAX_FILES: usize = u16::MAX as usize;

/// Distributes tensors over files in order, with at most `max_bytes` per file; a larger tensor gets its own file.
/// Without a limit, one file.
pub fn split(specs: &[GgufTensorSpec], max_bytes: Option<u64>) -> Vec<Vec<GgufTensorSpec>> {
    let mut files: Vec<Vec<GgufTensorSpec>> = vec![Vec::new()];
    let mut bytes = 0u64;
    for spec in specs {
        let len = spec.byte_len().unwrap_or(0);
        bytes = bytes.saturating_add(len);
        match files.last_mut() {
            Some(file) if file.is_empty() || max_bytes.is_none_or(|most| bytes <= most) => {
                file.push(spec.clone());
            }
            _ => {
                bytes = len;
                files.push(vec![spec.clone()]);
            }
        }
    }
    files
}

/// Paths of a model's `count` files: `out` for a single file, else `NAME-00001-of-00003.gguf` and so on for
/// `NAME.gguf`.
///
/// # Errors
/// [`Error::Field`] for more files than can be numbered.
pub fn split_paths(out: &Path, count: usize) -> Result<Vec<PathBuf>> {
    if count <= 1 {
        return Ok(vec![out.to_owned()]);
    }
    if count > MAX_FILES {
        let allowed = format!("up to {MAX_FILES}");
        return Err(Error::field(out, "files", count.to_string(), allowed, "allow larger files"));
    }
    let name = out.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    Ok((0..count).map(|number| out.with_file_name(part_name(stem, number as u64, count as u64))).collect())
}

/// Files of a model being written.
#[derive(Debug)]
pub struct GgufSplitWriter {
    files: Vec<GgufWriter>,
    of: HashMap<String, usize>,
}

impl GgufSplitWriter {
    /// Creates the files `paths`, one for each of `parts`. The first holds the metadata; with several files, each
    /// states its number and the count.
    ///
    /// # Errors
    /// As [`GgufWriter::create`].
    pub fn create(
        paths: &[impl AsRef<Path>],
        metadata: &[(String, Value)],
        parts: &[Vec<GgufTensorSpec>],
    ) -> Result<Self> {
        let count = parts.len();
        let tensors: usize = parts.iter().map(Vec::len).sum();
        let (mut files, mut of) = (Vec::with_capacity(count), HashMap::new());
        for (number, (path, specs)) in paths.iter().zip(parts).enumerate() {
            let mut own = if number == 0 { metadata.to_vec() } else { Vec::new() };
            if count > 1 {
                // The types are gguf-split's.
                let short = |n: usize| Value::U16(u16::try_from(n).unwrap_or(u16::MAX));
                own.push(("split.no".to_owned(), short(number)));
                own.push(("split.count".to_owned(), short(count)));
                let tensors = i32::try_from(tensors).unwrap_or(i32::MAX);
                own.push(("split.tensors.count".to_owned(), Value::I32(tensors)));
            }
            files.push(GgufWriter::create(path.as_ref(), &own, specs)?);
            of.extend(specs.iter().map(|spec| (spec.name.clone(), number)));
        }
        Ok(GgufSplitWriter { files, of })
    }

    /// File that holds a tensor. An unknown tensor goes to the first file, which refuses it by name.
    fn file(&mut self, name: &str) -> &mut GgufWriter {
        let number = self.of.get(name).copied().unwrap_or(0);
        &mut self.files[number]
    }

    /// Like [`GgufWriter::hash_beside`], for a single file.
    pub fn hash_beside(&mut self) {
        if let [file] = &mut self.files[..] {
            file.hash_beside();
        }
    }

    /// Writes a whole tensor.
    ///
    /// # Errors
    /// As [`GgufWriter::write`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.file(name).write(name, bytes)
    }

    /// Writes part of a tensor, from its byte `byte_offset` on.
    ///
    /// # Errors
    /// As [`GgufWriter::write_range`].
    pub fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> Result<()> {
        self.file(name).write_range(name, byte_offset, bytes)
    }

    /// Flushes written data to disk (fsync).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        self.files.iter().try_for_each(GgufWriter::sync)
    }

    /// Checks that every byte was written, makes the files durable and hashes what is on disk.
    ///
    /// # Errors
    /// As [`GgufWriter::finish`].
    pub fn finish(self) -> Result<Vec<FileDigest>> {
        self.files.into_iter().map(GgufWriter::finish).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gguf::{GgmlType, Gguf};

    fn spec(name: &str, count: usize) -> GgufTensorSpec {
        GgufTensorSpec::new(name, GgmlType::F32, [count])
    }

    #[test]
    fn files_are_filled_in_order() {
        let specs = [spec("a", 4), spec("b", 4), spec("c", 1), spec("d", 100), spec("e", 1)];
        let names = |most| -> Vec<String> {
            let files = split(&specs, most);
            files.iter().map(|file| file.iter().map(|spec| spec.name.as_str()).collect()).collect()
        };
        assert_eq!(names(None), ["abcde"]);
        assert_eq!(names(Some(32)), ["ab", "c", "d", "e"]);
        assert_eq!(names(Some(0)), ["a", "b", "c", "d", "e"]);
    }

    #[test]
    fn several_files_form_one_model() {
        let dir = tempfile::tempdir().unwrap();
        let specs = [spec("a", 1), spec("b", 2)];
        let parts = split(&specs, Some(4));
        let paths = split_paths(&dir.path().join("m.gguf"), parts.len()).unwrap();
        assert!(paths[1].ends_with("m-00002-of-00002.gguf"));
        let metadata = [("general.name".to_owned(), Value::String("m".to_owned()))];
        let mut writer = GgufSplitWriter::create(&paths, &metadata, &parts).unwrap();
        writer.write("b", &[0; 8]).unwrap();
        assert!(writer.write("c", &[0; 4]).is_err());
        writer.write_range("a", 0, &1f32.to_le_bytes()).unwrap();
        assert_eq!(writer.finish().unwrap().len(), 2);
        let model = Gguf::open_model(&paths[0]).unwrap();
        assert_eq!(model.tensors().len(), 2);
        assert_eq!(model.metadata().text("general.name").unwrap(), Some("m"));
        assert_eq!(model.read(model.get("a").unwrap()).unwrap(), 1f32.to_le_bytes());
    }
}
