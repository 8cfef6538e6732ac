//! Environment of a download, by the variables of `huggingface_hub`.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use super::address::Address;
use crate::error::{BadInput, Result};

/// The hub.
const ENDPOINT: &str = "https://huggingface.co";

/// Largest token file in bytes.
const TOKEN: u64 = 4096;

/// Secret that identifies a user to the hub; it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Token(String);

impl Token {
    /// Returns the value of the header that carries it.
    pub fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Reads variables that are set and not empty.
pub(super) type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Reads a variable of the process.
pub(super) fn process_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the address of the hub: `HF_ENDPOINT`, or the public one.
///
/// # Errors
/// A variable that is no address.
pub(super) fn endpoint(variable: Variables<'_>) -> Result<String, BadInput> {
    let Some(given) = variable("HF_ENDPOINT") else { return Ok(ENDPOINT.to_owned()) };
    let given = given.to_string_lossy().trim().trim_end_matches('/').to_owned();
    parsed(&given).map(|_| given)
}

/// Parses the address of a hub.
///
/// # Errors
/// Text that is no address.
pub(super) fn parsed(endpoint: &str) -> Result<Address, BadInput> {
    Address::parse(endpoint).ok_or_else(|| {
        // A password in it is not repeated.
        let found = if endpoint.contains('@') {
            "one with a user or password".into()
        } else {
            format!("{endpoint:?}")
        };
        BadInput::new("HF_ENDPOINT", found, "an address such as https://huggingface.co")
    })
}

/// Refuses to go online where the user has switched that off.
///
/// # Errors
/// `HF_HUB_OFFLINE` is set.
pub(super) fn online(variable: Variables<'_>) -> Result<(), BadInput> {
    match is_on(variable, "HF_HUB_OFFLINE") {
        true => {
            let expected = "a network that may be used";
            Err(BadInput::new("HF_HUB_OFFLINE", "1", expected).with_fix("unset HF_HUB_OFFLINE"))
        }
        false => Ok(()),
    }
}

fn is_on(variable: Variables<'_>, name: &str) -> bool {
    let value = variable(name).map(|value| value.to_string_lossy().to_uppercase());
    value.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.as_str()))
}

/// Returns the user's token: a variable, or the file that `hf auth login` wrote.
///
/// # Errors
/// A token that no header can carry; a file that cannot be read.
pub(super) fn token(variable: Variables<'_>) -> Result<Option<Token>> {
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        if let Some(value) = variable(name) {
            return Ok(checked(name, &value.to_string_lossy())?);
        }
    }
    if is_on(variable, "HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return Ok(None);
    }
    let Some(path) = token_file(variable) else { return Ok(None) };
    match mantissa_store::regular::read_optional(&path, TOKEN, "a token")? {
        Some(text) => Ok(checked(&path.display().to_string(), &String::from_utf8_lossy(&text))?),
        None => Ok(None),
    }
}

fn checked(place: &str, text: &str) -> Result<Option<Token>, BadInput> {
    let text = text.trim();
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let expected = "one token of printable ASCII characters";
        return Err(BadInput::new(place, "other characters", expected).with_fix("hf auth login"));
    }
    Ok((!text.is_empty()).then(|| Token(text.to_owned())))
}

fn token_file(variable: Variables<'_>) -> Option<PathBuf> {
    if let Some(path) = variable("HF_TOKEN_PATH") {
        return Some(path.into());
    }
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let folder = variable("HF_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?.join("huggingface")));
    Some(folder?.join("token"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    fn with(set: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        let set: Vec<(String, OsString)> =
            set.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        move |name| set.iter().find(|(own, _)| own == name).map(|(_, value)| value.clone())
    }

    #[test]
    fn the_token_is_that_of_the_variable_or_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (home, other) = (folder.path().join("home"), folder.path().join("other"));
        std::fs::create_dir(&home).unwrap();
        std::fs::write(home.join("token"), "hf_file\n").unwrap();
        std::fs::write(&other, " hf_other ").unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (home, other) = (text(&home), text(&other));
        let of = |set: &[(&str, &str)]| token(&with(set)).unwrap().map(|token| token.header());
        assert_eq!(of(&[("HF_TOKEN", "hf_a"), ("HF_HOME", &home)]).as_deref(), Some("Bearer hf_a"));
        assert_eq!(of(&[("HF_HOME", &home)]).as_deref(), Some("Bearer hf_file"));
        assert_eq!(of(&[("HF_HOME", &home), ("HF_TOKEN_PATH", &other)]).as_deref(), Some("Bearer hf_other"));
        assert_eq!(of(&[("HF_HOME", &home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!((of(&[("HOME", &home)]), of(&[])), (None, None));
        let error = token(&with(&[("HF_TOKEN", "hf_sec ret")])).unwrap_err().to_string();
        assert!(error.starts_with("HF_TOKEN: expected one token") && !error.contains("sec"), "{error}");
        assert_eq!(format!("{:?}", Token("hf_a".into())), "Token(…)");
    }

    #[test]
    fn the_endpoint_is_an_address() {
        assert_eq!(endpoint(&with(&[])).unwrap(), ENDPOINT);
        let given = |text: &str| endpoint(&with(&[("HF_ENDPOINT", text)])).map_err(|error| error.to_string());
        assert_eq!(given("https://hf-mirror.com/").as_deref(), Ok("https://hf-mirror.com"));
        assert!(
            given("hf-mirror.com").is_err_and(|error| error.contains("HF_ENDPOINT: expected an address"))
        );
        assert!(given("https://me:pw@a").is_err_and(|error| !error.contains("pw")));
        assert!(online(&with(&[("HF_HUB_OFFLINE", "1")])).is_err() && online(&with(&[])).is_ok());
    }
}
