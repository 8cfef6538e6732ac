//! Files of importance matrices: GGUF (read and written) and llama.cpp's older `.dat` (read).

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_store::gguf::{GgmlType, Gguf, GgufTensorSpec, GgufWriter, Value};
use mantissa_store::{Error, Output, StagedFile, regular};

use super::{Entry, Importance};
use crate::error::Result;

/// Suffixes of the two tensors of an entry: sums of squares, and token counts.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// Size limit of a `.dat`. A model of some hundred billion parameters needs a hundredth of it.
const MAX_DAT: u64 = 1 << 30;

/// Length limit of a name in a `.dat`.
const MAX_NAME: usize = 256;

impl Importance {
    /// Reads an importance matrix in either encoding, recognized by its first bytes.
    ///
    /// # Errors
    /// [`Error`] with the faulty field.
    pub fn read(path: &Path) -> Result<Self> {
        let found = if Gguf::sniff(path) { read_gguf(path)? } else { read_dat(path)? };
        if found.entries.is_empty() {
            return Err(fault(path, "entries", "none", "the importance of at least one weight"));
        }
        for (name, entry) in &found.entries {
            check(path, name, entry)?;
        }
        Ok(found)
    }

    /// Writes GGUF like llama.cpp's `llama-imatrix`. The file appears only when it is complete.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, output: &Output) -> Result<()> {
        let metadata = [
            ("general.type".to_owned(), Value::String("imatrix".to_owned())),
            ("imatrix.datasets".to_owned(), Value::strings(self.datasets.iter().cloned())),
            ("imatrix.chunk_count".to_owned(), Value::U32(self.chunks)),
            ("imatrix.chunk_size".to_owned(), Value::U32(self.chunk_size)),
        ];
        let staged = StagedFile::begin(output)?;
        let mut writer = GgufWriter::create(staged.path(), &metadata, &self.specs())?;
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        for (name, entry) in &self.entries {
            writer.write(&format!("{name}{SUMS}"), &bytes(&entry.sums))?;
            writer.write(&format!("{name}{COUNTS}"), &bytes(&entry.counts))?;
        }
        writer.finish()?;
        Ok(staged.commit()?)
    }

    /// Declares the sums and the counts of each tensor.
    fn specs(&self) -> Vec<GgufTensorSpec> {
        let spec = |name: &str, suffix: &str, matrices: usize, cols: usize| {
            GgufTensorSpec::new(format!("{name}{suffix}"), GgmlType::F32, [matrices, cols])
        };
        let entry_tensors = |(name, entry): (&String, &Entry)| {
            let matrices = entry.counts.len();
            let cols = entry.sums.len() / matrices.max(1);
            [spec(name, SUMS, matrices, cols), spec(name, COUNTS, matrices, 1)]
        };
        self.entries.iter().flat_map(entry_tensors).collect()
    }
}

fn fault(path: &Path, field: &str, got: impl Into<String>, expected: impl Into<String>) -> crate::QuantError {
    Error::field(path, field, got, expected, "fix: give an importance matrix of llama.cpp (.gguf or .dat)")
        .into()
}

/// Checks that sums and counts are finite and not negative, and that their numbers match.
fn check(path: &Path, name: &str, entry: &Entry) -> Result<()> {
    let bad = |v: &f32| !v.is_finite() || *v < 0.0;
    if let Some(v) = entry.sums.iter().chain(&entry.counts).find(|v| bad(v)) {
        return Err(fault(path, name, v.to_string(), "finite values that are not negative"));
    }
    let (sums, matrices) = (entry.sums.len(), entry.counts.len());
    if matrices == 0 || sums == 0 || !sums.is_multiple_of(matrices) {
        let got = format!("{sums} sums with {matrices} counts");
        return Err(fault(path, name, got, "the same number of sums, at least one, for each count"));
    }
    Ok(())
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into())
}

fn read_gguf(path: &Path) -> Result<Importance> {
    let file = Gguf::open(path)?;
    let metadata = file.metadata();
    match metadata.text("general.type")? {
        Some("imatrix") => {}
        other => {
            return Err(fault(
                path,
                "general.type",
                format!("{:?}", other.unwrap_or("nothing")),
                "\"imatrix\"",
            ));
        }
    }
    let values = |name: &str| -> Result<Vec<f32>> {
        let tensor =
            file.get(name).ok_or_else(|| fault(path, name, "no such tensor", "both sums and counts"))?;
        if tensor.ty != GgmlType::F32 {
            return Err(fault(path, name, tensor.ty.name, "F32"));
        }
        Ok(file.read(tensor)?.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    let mut entries = BTreeMap::new();
    for tensor in file.tensors() {
        let Some(name) = tensor.name.strip_suffix(SUMS) else { continue };
        let entry = Entry { sums: values(&tensor.name)?, counts: values(&format!("{name}{COUNTS}"))? };
        entries.insert(name.to_owned(), entry);
    }
    let number = |key: &str| -> Result<u32> {
        Ok(u32::try_from(metadata.uint(key)?.unwrap_or(0)).unwrap_or(u32::MAX))
    };
    let datasets = match metadata.get("imatrix.datasets").and_then(Value::as_array) {
        Some(all) => all.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        None => Vec::new(),
    };
    let (chunks, chunk_size) = (number("imatrix.chunk_count")?, number("imatrix.chunk_size")?);
    Ok(Importance { name: file_name(path), datasets, chunks, chunk_size, entries })
}

/// Reads a `.dat`: the number of entries as i32. Each entry has its name (length as i32, bytes), calls (i32), number of
/// values (i32) and f32 values, which are means times calls. Newer versions add chunks (i32) and the name of the data
/// set (length as i32, bytes).
fn read_dat(path: &Path) -> Result<Importance> {
    let expected = "an importance matrix of llama.cpp, .gguf or .dat";
    let bytes = regular::read(path, MAX_DAT, expected)?;
    let mut rest = Cursor { path, bytes: &bytes };
    let count = rest.count("entries", 1 << 20)?;
    let mut entries = BTreeMap::new();
    for i in 0..count {
        let field = format!("entry {i}");
        let name = rest.text(&field)?;
        let calls = rest.count(&format!("calls of \"{name}\""), usize::MAX)?;
        let values = rest.count(&format!("values of \"{name}\""), 1 << 24)?;
        let values = rest.floats(&name, values)?;
        let old = entries.insert(name.clone(), Entry { sums: values, counts: vec![calls.max(1) as f32] });
        if old.is_some() {
            return Err(fault(path, &field, format!("\"{name}\" again"), "every weight once"));
        }
    }
    let (mut chunks, mut datasets) = (0, Vec::new());
    if !rest.bytes.is_empty() {
        chunks = u32::try_from(rest.count("chunks", usize::MAX)?).unwrap_or(u32::MAX);
        if !rest.bytes.is_empty() {
            datasets.push(rest.text("data set")?);
        }
    }
    if !rest.bytes.is_empty() {
        return Err(fault(
            path,
            "end",
            format!("{} more bytes", rest.bytes.len()),
            "none after the data set",
        ));
    }
    Ok(Importance { name: file_name(path), datasets, chunks, chunk_size: 0, entries })
}

/// Remaining bytes of a `.dat`.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
}

impl Cursor<'_> {
    fn take(&mut self, field: &str, n: usize) -> Result<&[u8]> {
        match self.bytes.split_at_checked(n) {
            Some((taken, rest)) => {
                self.bytes = rest;
                Ok(taken)
            }
            None => Err(fault(
                self.path,
                field,
                format!("{} bytes to the end of the file", self.bytes.len()),
                format!("{n}"),
            )),
        }
    }

    fn count(&mut self, field: &str, most: usize) -> Result<usize> {
        let bytes = self.take(field, 4)?;
        let n = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        match usize::try_from(n) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(fault(self.path, field, n.to_string(), format!("0 to {most}"))),
        }
    }

    fn text(&mut self, field: &str) -> Result<String> {
        let n =
            self.count(&format!("length of {field}"), if field == "data set" { 1 << 16 } else { MAX_NAME })?;
        let bytes = self.take(field, n)?.to_vec();
        String::from_utf8(bytes)
            .map_err(|_| fault(self.path, field, "bytes that are not UTF-8", "UTF-8 text"))
    }

    fn floats(&mut self, field: &str, n: usize) -> Result<Vec<f32>> {
        let bytes = self.take(field, 4 * n)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn dat(entries: &[(&str, i32, &[f32])], trailer: &[u8]) -> Vec<u8> {
        let mut bytes = (entries.len() as i32).to_le_bytes().to_vec();
        for (name, calls, values) in entries {
            bytes.extend((name.len() as i32).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(calls.to_le_bytes());
            bytes.extend((values.len() as i32).to_le_bytes());
            values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        }
        bytes.extend(trailer);
        bytes
    }

    fn read(bytes: &[u8]) -> std::result::Result<Importance, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix.dat");
        std::fs::write(&path, bytes).unwrap();
        Importance::read(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn the_older_encoding_is_means_times_calls() {
        let mut trailer = 7i32.to_le_bytes().to_vec();
        trailer.extend(4i32.to_le_bytes());
        trailer.extend(b"wiki");
        let found = read(&dat(&[("blk.0.attn_q.weight", 4, &[8.0, 2.0])], &trailer)).unwrap();
        assert_eq!((found.chunks, found.datasets), (7, vec!["wiki".to_owned()]));
        assert_eq!(found.entries["blk.0.attn_q.weight"].means(0).unwrap(), [2.0, 0.5]);
        assert!(read(&dat(&[("a", 1, &[1.0])], &[])).is_ok());
    }

    #[test]
    fn written_gguf_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix.gguf");
        let entry = Entry { sums: vec![4.0, 9.0, 1.0, 0.0], counts: vec![2.0, 0.0] };
        let written = Importance {
            name: "imatrix.gguf".to_owned(),
            datasets: vec!["a.txt".to_owned()],
            chunks: 3,
            chunk_size: 512,
            entries: BTreeMap::from([("blk.0.ffn_up.weight".to_owned(), entry)]),
        };
        written.write(&Output::new(&path)).unwrap();
        let read = Importance::read(&path).unwrap();
        assert_eq!(read, written);
        let entry = &read.entries["blk.0.ffn_up.weight"];
        assert_eq!((entry.means(0), entry.means(1), entry.means(2)), (Some(vec![2.0, 4.5]), None, None));
    }

    #[test]
    fn faults_are_named() {
        let good = dat(&[("blk.0.attn_q.weight", 4, &[8.0, 2.0])], &[]);
        for (bytes, part) in [
            (good[..good.len() - 1].to_vec(), "to the end of the file"),
            (dat(&[], &[]), "got none"),
            (dat(&[("a", 1, &[f32::NAN])], &[]), "NaN"),
            (dat(&[("a", 1, &[-1.0])], &[]), "-1"),
            (dat(&[("a", 1, &[1.0]), ("a", 1, &[1.0])], &[]), "again"),
            (dat(&[("a", -1, &[1.0])], &[]), "got -1"),
            (dat(&[("a", 1, &[])], &[]), "0 sums"),
            (vec![0xff; 8], "entries"),
            (vec![1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f], "length of entry 0"),
            ([&good[..], &[0, 0, 0, 0, 0, 0, 0, 0, 9][..]].concat(), "more bytes"),
        ] {
            let message = read(&bytes).unwrap_err();
            assert!(message.contains(part) && message.contains("imatrix.dat"), "{part}: {message}");
        }
    }
}
