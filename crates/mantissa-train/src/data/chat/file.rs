//! Files of tokenized lines: safetensors with the tensors `tokens` and `targets` (U32) and `ends` (U64), sealed with a
//! checksum; counts, vocabulary size and the data's origin are in the metadata.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_store::{Dtype, Output, SafeTensors, SafetensorsWriter, StagedFile, TensorSpec, sealed};

use super::{Conversations, Counts, Places};
use crate::data::DataError;
use crate::loss::IGNORE_TARGET;

const VOCAB_SIZE: &str = "vocab_size";
const COUNTS: [&str; 10] = [
    "lines",
    "rendered",
    "cut",
    "left_out",
    "answer_tokens",
    "without_targets",
    "lost_tokens",
    "lost_answer_tokens",
    "ended",
    "longest",
];
const PLACES: [&str; 3] = ["first_cut", "first_too_long", "first_without_targets"];

impl Conversations {
    /// Writes the lines atomically. `vocab_size` is above every id; `about` records the origin of the lines.
    ///
    /// # Errors
    /// As [`StagedFile`] and [`SafetensorsWriter`].
    pub fn write(
        &self,
        output: &Output,
        vocab_size: usize,
        about: BTreeMap<String, String>,
    ) -> Result<(), DataError> {
        let mut metadata = about;
        metadata.insert(VOCAB_SIZE.to_owned(), vocab_size.to_string());
        let of = &self.counts;
        let counts = [
            of.lines as u64,
            of.rendered as u64,
            of.cut as u64,
            of.left_out() as u64,
            of.answer_tokens,
            of.without_targets as u64,
            of.lost_tokens,
            of.lost_answer_tokens,
            of.ended as u64,
            of.longest as u64,
        ];
        metadata
            .extend(COUNTS.iter().zip(counts).map(|(name, count)| ((*name).to_owned(), count.to_string())));
        let Places { cut, too_long, without_targets } = &self.places;
        let places = PLACES.iter().zip([cut, too_long, without_targets]);
        metadata.extend(places.filter_map(|(name, place)| Some(((*name).to_owned(), place.clone()?))));
        sealed::reserve(&mut metadata);
        let staged = StagedFile::begin(output)?;
        let specs = vec![
            TensorSpec::new("tokens", Dtype::U32, [self.tokens.len()]),
            TensorSpec::new("targets", Dtype::U32, [self.targets.len()]),
            TensorSpec::new("ends", Dtype::U64, [self.ends.len()]),
        ];
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata)?;
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        writer.write("tokens", &words(&self.tokens))?;
        writer.write("targets", &words(&self.targets))?;
        let ends: Vec<u8> = self.ends.iter().flat_map(|end| (*end as u64).to_le_bytes()).collect();
        writer.write("ends", &ends)?;
        writer.finish()?;
        sealed::seal(staged.path())?;
        Ok(staged.commit()?)
    }

    /// Opens a file written by [`write`](Self::write); returns the lines, the vocabulary size and the metadata.
    ///
    /// # Errors
    /// As [`SafeTensors::open`]; [`DataError::Field`] if it is no such file.
    pub fn open(path: &Path) -> Result<(Self, usize, BTreeMap<String, String>), DataError> {
        sealed::check(path)?;
        let file = SafeTensors::open(path)?;
        let fault = |field: &str, allowed: &str| DataError::Field {
            file: path.display().to_string(),
            field: field.to_owned(),
            found: "others".to_owned(),
            allowed: allowed.to_owned(),
        };
        let tensor = |name: &str, dtype: Dtype| {
            let meta = file.get(name).filter(|meta| meta.dtype == dtype && meta.shape.len() == 1);
            meta.ok_or_else(|| fault(name, "a file of conversations made by mantissa"))
        };
        let words = |name: &str| {
            let bytes = file.read(tensor(name, Dtype::U32)?)?;
            let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            Ok::<_, DataError>(words.collect::<Vec<_>>())
        };
        let (tokens, targets) = (words("tokens")?, words("targets")?);
        let ends = file.read(tensor("ends", Dtype::U64)?)?;
        let ends: Vec<usize> =
            ends.as_chunks::<8>().0.iter().map(|end| u64::from_le_bytes(*end) as usize).collect();
        let number = |name: &str| {
            let number = file.metadata().get(name).and_then(|text| text.parse::<u64>().ok());
            number.ok_or_else(|| fault(name, "a number"))
        };
        let vocab_size = number(VOCAB_SIZE)? as usize;
        let rising = ends.windows(2).all(|pair| pair[0] < pair[1]) && ends.first() != Some(&0);
        let inside = tokens.iter().all(|id| (*id as usize) < vocab_size)
            && targets.iter().all(|id| *id == IGNORE_TARGET || (*id as usize) < vocab_size);
        if tokens.len() != targets.len() || ends.last() != Some(&tokens.len()) || !rising || !inside {
            return Err(fault("ends", "lines of tokens and targets of the vocabulary"));
        }
        // Files of earlier builds have the first counts only.
        let other = |name: &str| number(name).unwrap_or(0);
        let without_targets = other("without_targets") as usize;
        let counts = Counts {
            lines: number("lines")? as usize,
            rendered: other("rendered") as usize,
            cut: number("cut")? as usize,
            too_long: (number("left_out")? as usize).saturating_sub(without_targets),
            without_targets,
            lost_tokens: other("lost_tokens"),
            lost_answer_tokens: other("lost_answer_tokens"),
            answer_tokens: number("answer_tokens")?,
            ended: other("ended") as usize,
            longest: other("longest") as usize,
        };
        let mut about = file.metadata().clone();
        let [cut, too_long, without_targets] = PLACES.map(|name| about.remove(name));
        let places = Places { cut, too_long, without_targets };
        let ended = vec![false; ends.len()];
        Ok((Conversations { tokens, targets, ends, ended, counts, places }, vocab_size, about))
    }
}
