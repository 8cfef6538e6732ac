//! Models in several files, as llama.cpp's `gguf-split` writes them: `NAME-00001-of-00003.gguf` and so on.
//!
//! The first file holds the metadata. Each states its number (`split.no`, from 0), the number of files
//! (`split.count`) and the total number of tensors (`split.tensors.count`).

use std::path::{Path, PathBuf};

use super::Gguf;
use crate::error::{Error, Result};

/// Most files of a model: their numbers have five digits.
const MAX_FILES: u64 = 99_999;

impl Gguf {
    /// Opens the file and, if it is the first of a model split by llama.cpp (`split.count`), all others.
    ///
    /// # Errors
    /// As [`open`](Self::open) for each; [`Error::Field`] if files do not belong together.
    pub fn open_model(path: &Path) -> Result<Self> {
        open(Self::open(path)?)
    }
}

/// Opens the other files of the model that begins with `first`.
fn open(mut first: Gguf) -> Result<Gguf> {
    let path = first.path().to_owned();
    let Some(count) = first.metadata().uint("split.count")?.filter(|count| *count > 1) else {
        return Ok(first);
    };
    if count > MAX_FILES {
        return Err(first.metadata().fault("split.count", count.to_string(), format!("up to {MAX_FILES}")));
    }
    require_number(&first, 0, count)?;
    let tensors = first.metadata().uint("split.tensors.count")?;
    for number in 1..count {
        let part = Gguf::open(&part_path(&path, number, count)?)?;
        require_number(&part, number, count)?;
        first.first.push(first.header.tensors.len());
        let part_path = part.path().to_owned();
        first.header.extend(part.header.tensors).map_err(|name| {
            Error::field(&part_path, name, "a tensor of another file too", "every tensor once", "")
        })?;
        first.files.extend(part.files);
    }
    let found = first.header.tensors.len() as u64;
    match tensors.filter(|stated| *stated != found) {
        Some(stated) => {
            let allowed = format!("{found}, those of its {count} files");
            Err(first.metadata().fault("split.tensors.count", stated.to_string(), allowed))
        }
        None => Ok(first),
    }
}

/// The file says that it is `number` of `count`.
fn require_number(part: &Gguf, number: u64, count: u64) -> Result<()> {
    let metadata = part.metadata();
    for (key, wanted) in [("split.no", number), ("split.count", count)] {
        let found = metadata.uint(key)?;
        if found != Some(wanted) {
            let found = found.map_or_else(|| "nothing".to_owned(), |n| n.to_string());
            let hint = if number == 0 { "; open the first file" } else { "" };
            return Err(metadata.fault(key, found, format!("{wanted}{hint}")));
        }
    }
    Ok(())
}

/// Name of file `number` (from 0) of `count`.
pub(super) fn part_name(stem: &str, number: u64, count: u64) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", number + 1)
}

/// True if `file` is a part of the model `model` with any number, such as `m-00001-of-00003.gguf` for `m.gguf`.
pub fn is_part_of(model: &str, file: &str) -> bool {
    let stem = model.strip_suffix(".gguf").unwrap_or(model);
    let numbers = file.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".gguf"));
    let five = |digits: &str| digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
    numbers
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(number, count)| five(number) && five(count))
}

/// Name of file `number` (from 0), derived from the first. Keeps whatever surrounds the ending, for files that are
/// not in place yet.
fn part_path(first: &Path, number: u64, count: u64) -> Result<PathBuf> {
    let ending = part_name("", 0, count);
    let name = first.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((stem, rest)) = name.rsplit_once(&ending) else {
        let allowed = format!("a name that ends in {ending}, as split.count says");
        return Err(Error::field(
            first,
            "file name",
            name,
            allowed,
            "give the files the names they were split to",
        ));
    };
    Ok(first.with_file_name(part_name(stem, number, count) + rest))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gguf::{GgmlType, GgufTensorSpec, GgufWriter, Value};

    /// Writes file `number` of `count` with one tensor.
    fn write(dir: &Path, name: &str, number: u16, count: u16, tensor: &str, value: f32) -> PathBuf {
        let path = dir.join(name);
        let _ = std::fs::remove_file(&path);
        let metadata = [
            ("split.no".to_owned(), Value::U16(number)),
            ("split.count".to_owned(), Value::U16(count)),
            ("split.tensors.count".to_owned(), Value::I32(2)),
        ];
        let mut writer =
            GgufWriter::create(&path, &metadata, &[GgufTensorSpec::new(tensor, GgmlType::F32, [1])]).unwrap();
        writer.write(tensor, &value.to_le_bytes()).unwrap();
        writer.finish().unwrap();
        path
    }

    #[test]
    fn all_files_are_one_model() {
        let dir = tempfile::tempdir().unwrap();
        let first = write(dir.path(), "m-00001-of-00002.gguf", 0, 2, "a", 1.0);
        write(dir.path(), "m-00002-of-00002.gguf", 1, 2, "b", 2.0);
        let model = Gguf::open_model(&first).unwrap();
        let read = |name: &str| model.read(model.get(name).unwrap()).unwrap();
        assert_eq!((read("a"), read("b")), (1f32.to_le_bytes().to_vec(), 2f32.to_le_bytes().to_vec()));
        assert_eq!(model.tensors().len(), 2);
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let fault = |path: &Path| Gguf::open_model(path).unwrap_err().to_string();
        let first = write(dir.path(), "m-00001-of-00002.gguf", 0, 2, "a", 1.0);
        assert!(fault(&first).contains("m-00002-of-00002.gguf"));
        let second = write(dir.path(), "m-00002-of-00002.gguf", 1, 2, "a", 2.0);
        assert!(fault(&first).contains("every tensor once"));
        assert!(fault(&second).contains("open the first file"));
        write(dir.path(), "m-00002-of-00002.gguf", 1, 3, "b", 2.0);
        assert!(fault(&first).contains("split.count"));
        write(dir.path(), "m-00002-of-00002.gguf", 0, 2, "b", 2.0);
        assert!(fault(&first).contains("split.no"));
        let other = write(dir.path(), "m.gguf", 0, 2, "a", 1.0);
        assert!(fault(&other).contains("-00001-of-00002.gguf"));
    }
}
