//! The model inside the binary, `demo`: a Llama of 1.3 million parameters that this program trained, with the texts it is
//! measured on and those it is calibrated on. `crates/mantissa/demo` has its sources, settings, log and licences.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use mantissa_store::{Output, Result, Scratch, disk, write_file_atomic};

/// What it is called where a model is asked for.
pub const NAME: &str = "demo";

/// Its files, as Hugging Face lays them out.
const FILES: [(&str, &[u8]); 4] = [
    ("config.json", include_bytes!("../demo/model/config.json")),
    ("model.safetensors", include_bytes!("../demo/model/model.safetensors")),
    ("tokenizer.json", include_bytes!("../demo/model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../demo/model/tokenizer_config.json")),
];

/// A kind of text.
#[derive(Clone, Copy, Debug)]
pub struct Domain {
    /// Its name.
    pub name: &'static str,
    /// Documents that the model has not seen, each ended by [`SEPARATOR`].
    pub held_out: &'static str,
}

/// What stands between documents.
pub const SEPARATOR: &str = "<|endoftext|>";

/// The kinds of text that the model was trained on.
pub const DOMAINS: [Domain; 3] = [
    Domain { name: "stories", held_out: include_str!("../demo/text/stories.txt") },
    Domain { name: "prose", held_out: include_str!("../demo/text/prose.txt") },
    Domain { name: "code", held_out: include_str!("../demo/text/code.txt") },
];

/// Documents of every domain out of the text that the model was trained on, for methods that calibrate.
pub const CALIBRATION: &str = include_str!("../demo/text/calibration.txt");

/// Where the files lie once they are asked for.
static FOLDER: Mutex<Option<Scratch>> = Mutex::new(None);

/// The model as a folder, which is written at the first call and lies there until [`remove`].
///
/// # Errors
/// There is no place for temporary files.
pub fn folder() -> Result<PathBuf> {
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(scratch) = folder.as_ref() {
        return Ok(scratch.path().join(NAME));
    }
    let scratch = Scratch::new()?;
    let path = scratch.path().join(NAME);
    disk::create_folder(&path).map_err(|error| mantissa_store::Error::Io {
        path: path.clone(),
        operation: "create folder",
        error,
    })?;
    for (name, bytes) in FILES {
        write_file_atomic(&Output::owned(path.join(name)), bytes)?;
    }
    *folder = Some(scratch);
    Ok(path)
}

/// Removes what [`folder`] has written: the way out of the process does not drop it.
pub fn remove() {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner).take();
}
