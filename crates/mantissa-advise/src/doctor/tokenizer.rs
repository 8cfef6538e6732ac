//! Compares a tokenizer with the source's.

use mantissa_model::{Bos, Tokenizer};
use mantissa_store::convention::ModelFiles;

use super::{Alternative, Fault};

/// Sample with words, digits, punctuation, white space and multi-byte characters.
const SAMPLE: &str = "Once upon a time there was 1 girl, named Lily; she didn't know that 12 + 7 = 19.\n\n  \"Why?\" — naïve café 你好\n\tfn main() {}";

/// Finds the fault if both models have a tokenizer and the two tokenize the sample differently.
pub(super) fn tokenizer_fault(files: &ModelFiles, reference: &ModelFiles) -> Option<Fault> {
    let encode = |files: &ModelFiles| Tokenizer::load(files.dir()).ok()?.encode(SAMPLE, Bos::Auto).ok();
    let (ours, theirs) = (encode(files)?, encode(reference)?);
    if ours == theirs {
        return None;
    }
    if ours.get(1..) == Some(&theirs[..]) || theirs.get(1..) == Some(&ours[..]) {
        return Some(Fault {
            alternative: None,
            ..Fault::of(Alternative::OtherBos, "the first token".to_owned(), Vec::new())
        });
    }
    let at = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    let cause = "the tokenizer splits text differently from the source's";
    let fix =
        "copy tokenizer.json and tokenizer_config.json from the source (GGUF: check tokenizer.ggml.pre)";
    Some(Fault::unknown(format!("tokenizer: token {at} of a sample"), Vec::new(), cause, fix))
}
