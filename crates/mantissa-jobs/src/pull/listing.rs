//! List of a model's files at a revision, and what the hub's refusals mean.

use mantissa_num::nearest_list;
use serde::Deserialize;

use super::address::{encoded, encoded_part};
use super::client::{Answer, Client};
use crate::error::{BadInput, JobError, Result};
use crate::escape;
use crate::host::Host;
use crate::hub;
use crate::pull_fault::PullFault;

/// Most files of a model; the hub recommends at most 100 000.
const MOST_FILES: usize = 200_000;

/// Files of a model at a commit.
pub(super) struct Listing {
    /// Commit.
    pub commit: String,
    /// Files in the order of the hub, which sorts by name.
    pub files: Vec<RemoteFile>,
}

/// File of a model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Path in the model, which is not checked yet.
    pub name: String,
    /// Size in bytes, if the listing names it.
    pub size: Option<u64>,
    /// Hash, if the listing names it.
    pub hash: Option<FileHash>,
}

/// Hash by which the hub names the content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileHash {
    /// SHA-256 of a large file, in hexadecimal digits.
    Sha256(String),
    /// Git's id of a small file, in hexadecimal digits.
    Git(String),
}

impl FileHash {
    /// Parses an `ETag` or a hash; `None` for other text.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches("W/").trim_matches('"');
        let is_hex = text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        match text.len() {
            64 if is_hex => Some(FileHash::Sha256(text.to_owned())),
            40 if is_hex => Some(FileHash::Git(text.to_owned())),
            _ => None,
        }
    }

    /// Returns the digits, which name the blob in a cache.
    pub fn hex(&self) -> &str {
        let (FileHash::Sha256(hex) | FileHash::Git(hex)) = self;
        hex
    }
}

/// Answer of `/api/models/NAME/revision/REVISION`.
#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl From<Sibling> for RemoteFile {
    fn from(sibling: Sibling) -> Self {
        let Sibling { rfilename, size, blob_id, lfs } = sibling;
        let of_lfs = lfs.as_ref().and_then(|lfs| lfs.sha256.clone());
        // The id of a large file's blob is that of a pointer to it.
        let hash = if lfs.is_some() { of_lfs } else { blob_id };
        RemoteFile {
            name: rfilename,
            size: lfs.and_then(|lfs| lfs.size).or(size),
            hash: hash.and_then(|text| FileHash::parse(&text)),
        }
    }
}

/// Model at a revision, for requests and messages.
pub(super) struct Asked<'a> {
    /// `ORG/NAME`.
    pub repository: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
}

impl Asked<'_> {
    /// Requests the list of files.
    ///
    /// # Errors
    /// A model or revision that is not there or not open to the user; an answer that is none of the hub.
    pub fn listing(&self, client: &Client, host: &Host) -> Result<Listing> {
        let Asked { repository, revision } = self;
        let path =
            format!("/api/models/{}/revision/{}?blobs=true", encoded(repository), encoded_part(revision));
        let address = client.endpoint.below(&path);
        let (mut answer, text) = client.text(&address, host)?;
        if answer.status != 200 {
            return Err(self.refused(&mut answer, None, client, host));
        }
        let wrong = |field, expected, found: String| PullFault::Answer {
            address: address.to_string(),
            field,
            expected,
            found,
        };
        let info: Info = serde_json::from_str(&text).map_err(|error| {
            wrong("files", "a list of a model's files as JSON", escape::line(&error.to_string()))
        })?;
        let commit = info.sha.unwrap_or_default();
        if !matches!(FileHash::parse(&commit), Some(FileHash::Git(_))) {
            return Err(wrong("sha", "a commit of 40 digits", escape::line(&commit)).into());
        }
        if info.siblings.len() > MOST_FILES {
            return Err(wrong("siblings", "at most 200000 files", info.siblings.len().to_string()).into());
        }
        let files = info.siblings.into_iter().map(RemoteFile::from).collect();
        Ok(Listing { commit, files })
    }

    /// Returns the error for an answer of the hub with another status than 200, to a request for `file`, or for the list.
    pub fn refused(&self, answer: &mut Answer, file: Option<&str>, client: &Client, host: &Host) -> JobError {
        let Asked { repository, revision } = self;
        let code = answer.hub_header("x-error-code").unwrap_or_default().to_owned();
        let page = client.endpoint.below(&format!("/{}", encoded(repository)));
        let token = "a token of your account in HF_TOKEN, or by hf auth login";
        let place = repository.to_string();
        let status = answer.described();
        match (answer.status, code.as_str()) {
            (401 | 403, "GatedRepo") => {
                let found = format!("{status}: the authors ask for your consent");
                let fix = format!("open {page}, accept the conditions, and give {token}; then rerun");
                BadInput::new(place, found, "a model that is open to you").with_fix(fix).into()
            }
            (403, "DisabledRepo") => {
                let found = format!("{status}: the hub has disabled the model");
                BadInput::new(place, found, "a model that can be fetched")
                    .with_fix(format!("see {page}"))
                    .into()
            }
            (401, _) if client.has_token() => {
                let settings = client.endpoint.below("/settings/tokens");
                let fix = format!("check the name{}, and the token ({settings})", self.or_near(client, host));
                BadInput::new(place, status, "a model that your token opens").with_fix(fix).into()
            }
            (401, _) => {
                let found = format!("{status}: there is no such model, or it is private");
                let fix = format!("check the name{}, or give {token}", self.or_near(client, host));
                BadInput::new(place, found, "a public model").with_fix(fix).into()
            }
            (403, _) => {
                let settings = client.endpoint.below("/settings/tokens");
                let fix = format!(
                    "give the token the right to read this model ({settings}), or another in HF_TOKEN"
                );
                BadInput::new(place, status, "a model that is open to you").with_fix(fix).into()
            }
            (404, "RevisionNotFound") => {
                let known = self.revisions(client, host);
                let near =
                    (!known.is_empty()).then(|| nearest_list(revision, known.iter().map(String::as_str)));
                let fix = near.map_or_else(|| format!("see {page}/tree/main"), |near| format!("give {near}"));
                BadInput::new("--revision", (*revision).to_owned(), "a branch, tag or commit of the model")
                    .with_fix(fix)
                    .into()
            }
            (404, _) if file.is_some() => {
                let file = file.unwrap_or_default().to_owned();
                BadInput::new(file, status, "a file of the model").with_fix("rerun the same command").into()
            }
            (404, _) => {
                let fix = format!("check the name{}", self.or_near(client, host));
                BadInput::new(place, status, "a model on the hub").with_fix(fix).into()
            }
            _ => PullFault::Status { address: answer.at.to_string(), found: status, after: None }.into(),
        }
    }

    /// Returns the branches and tags of the model; none if they cannot be read.
    fn revisions(&self, client: &Client, host: &Host) -> Vec<String> {
        #[derive(Deserialize)]
        struct Reference {
            name: String,
        }
        #[derive(Deserialize)]
        struct References {
            #[serde(default)]
            branches: Vec<Reference>,
            #[serde(default)]
            tags: Vec<Reference>,
        }
        let path = format!("/api/models/{}/refs", encoded(self.repository));
        let Ok((_, text)) = client.text(&client.endpoint.below(&path), host) else { return Vec::new() };
        let Ok(found) = serde_json::from_str::<References>(&text) else { return Vec::new() };
        let names = found.branches.into_iter().chain(found.tags).map(|reference| reference.name);
        names.filter(|name| hub::is_revision(name)).collect()
    }

    /// Names models of the hub that the user may mean, after a comma; empty if there is none or the hub does not tell.
    fn or_near(&self, client: &Client, host: &Host) -> String {
        #[derive(Deserialize)]
        struct Found {
            id: String,
        }
        let name = self.repository.rsplit('/').next().unwrap_or_default();
        let path = format!("/api/models?search={}&limit=20", encoded_part(name));
        let Ok((_, text)) = client.text(&client.endpoint.below(&path), host) else { return String::new() };
        let found: Vec<Found> = serde_json::from_str(&text).unwrap_or_default();
        let names = found.into_iter().map(|found| found.id);
        let mut known: Vec<String> = names.filter(|name| hub::HubName::parse(name).is_some()).collect();
        known.extend(hub::cache().map(|cache| hub::cached_names(&cache)).unwrap_or_default());
        hub::near(self.repository, &known).map_or_else(String::new, |near| format!(", or give {near}"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_by_the_hash_of_their_content() {
        let text = r#"{"sha": "x", "more": 1, "siblings": [
            {"rfilename": "a.json", "size": 3, "blobId": "0123456789012345678901234567890123456789"},
            {"rfilename": "b", "size": 9, "blobId": "0123456789012345678901234567890123456789",
             "lfs": {"sha256": "00000000000000000000000000000000000000000000000000000000000000ff", "size": 10}},
            {"rfilename": "c"}]}"#;
        let info: Info = serde_json::from_str(text).unwrap();
        let files: Vec<RemoteFile> = info.siblings.into_iter().map(RemoteFile::from).collect();
        assert!(matches!(files[0].hash, Some(FileHash::Git(_))) && files[0].size == Some(3));
        assert!(matches!(files[1].hash, Some(FileHash::Sha256(_))) && files[1].size == Some(10));
        assert_eq!((&files[2].hash, files[2].size), (&None, None));
    }

    #[test]
    fn a_hash_is_all_that_becomes_the_name_of_a_blob() {
        assert_eq!(
            FileHash::parse(&format!("W/\"{}\"", "a".repeat(40))),
            Some(FileHash::Git("a".repeat(40)))
        );
        assert_eq!(FileHash::parse(&"0".repeat(64)), Some(FileHash::Sha256("0".repeat(64))));
        for wrong in ["", "../../x", &"A".repeat(40), &"a".repeat(41), &"/".repeat(64)] {
            assert_eq!(FileHash::parse(wrong), None, "{wrong}");
        }
    }
}
