//! Download of a model from the Hugging Face hub into the cache that its tools share.
//!
//! Protocol (`huggingface_hub`): `/api/models/NAME/revision/REVISION?blobs=true` lists files with size and hash, and
//! `/NAME/resolve/COMMIT/FILE` gives one, of large files by a redirect to a link of another server. Nothing that a
//! server names becomes a path before it is checked, and a file appears only if its hash is right.

mod address;
mod client;
mod hashing;
mod layout;
mod listing;
mod selection;
mod settings;
mod transfer;
mod trust;

use std::path::{Path, PathBuf};
use std::time::Instant;

use mantissa_store::disk;
use serde::{Deserialize, Serialize};

use self::client::Client;
use self::layout::{Place, Wanted};
use self::listing::Asked;
use self::selection::{Selection, select};
use self::transfer::{Transfers, left_over};
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;
use crate::hub::{self, HubName};
use crate::job::{Job, JobOutput};
use crate::progress::Unit;
use crate::pull_fault::PullFault;

/// Memory of a download: lists, buffers, and the certificates of the system.
const NEEDS: u64 = 48 << 20;

/// Branch that a name without a revision stands for.
const MAIN: &str = "main";

/// Fetches a model from the hub into the cache, or into a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pull {
    /// `ORG/NAME`.
    pub repository: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// Part of the name of a GGUF file, such as `Q4_K_M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Patterns of the files to fetch; none for what mantissa reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Address of the hub.
    pub endpoint: String,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Folder in place of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<PathBuf>,
}

/// Arguments of a download.
#[derive(Clone, Debug, Default)]
pub struct PullArguments {
    /// Name on the hub, with or without its address, a revision and a tag.
    pub name: String,
    /// Branch, tag or commit.
    pub revision: Option<String>,
    /// Patterns of the files to fetch.
    pub include: Vec<String>,
    /// Folder in place of the cache.
    pub out: Option<PathBuf>,
}

impl PullArguments {
    /// Makes the job, by the variables of `huggingface_hub` for hub and cache.
    ///
    /// # Errors
    /// A name or revision that is none of the hub; two revisions; a tag beside patterns; no place for a cache.
    pub fn resolve(self) -> Result<Pull> {
        let PullArguments { name, revision, include, out } = self;
        let Some(HubName { repository, revision: in_name, file }) = HubName::parse(&name) else {
            let fix = "give the two parts that its page on huggingface.co shows at the top";
            let allowed = "the name of a model on the hub, such as org/name or org/name:Q4_K_M";
            return Err(BadInput::new("MODEL", format!("{name:?}"), allowed).with_fix(fix).into());
        };
        if let (Some(given), Some(named)) = (&revision, &in_name) {
            let found = format!("{given}, and {named} in the name");
            return Err(BadInput::new("--revision", found, "one revision").into());
        }
        let revision = revision.or(in_name).unwrap_or_else(|| MAIN.to_owned());
        if !hub::is_revision(&revision) {
            let allowed = "a branch, a tag or a commit";
            return Err(BadInput::new("--revision", format!("{revision:?}"), allowed).into());
        }
        if let (Some(tag), false) = (&file, include.is_empty()) {
            let found = format!("a pattern beside :{tag}");
            return Err(
                BadInput::new("--include", found, "the tag of a GGUF file or patterns, not both").into()
            );
        }
        let cache = hub::cache().ok_or_else(|| {
            BadInput::new("HF_HUB_CACHE", "neither it nor HOME", "a folder for models")
                .with_fix("set HF_HUB_CACHE")
        })?;
        let endpoint = settings::endpoint(&settings::process_variable)?;
        Ok(Pull { repository, revision, tag: file, include, endpoint, cache, out })
    }
}

/// Result of a download.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PullReport {
    /// Name by which other commands find the model; the folder, if it is not in the cache.
    pub model: String,
    /// Commit of the files.
    pub commit: String,
    /// Folder with the files, or the GGUF file of a tag.
    pub path: PathBuf,
    /// Files in the order of the hub.
    pub files: Vec<PulledFile>,
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes that were fetched: fewer if some were there.
    pub fetched_bytes: u64,
    /// Files of the model that were not chosen.
    pub left_out: Vec<String>,
    /// Their bytes, as far as the hub names them.
    pub left_out_bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// File of a fetched model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PulledFile {
    /// Path in the model.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256, or of a small file its id of git, that the bytes were compared with.
    pub hash: String,
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
}

impl Pull {
    /// Returns the name by which other commands find the model.
    fn model(&self) -> String {
        if let Some(out) = &self.out {
            return out.display().to_string();
        }
        let revision = match self.revision.as_str() {
            MAIN => String::new(),
            other => format!("@{other}"),
        };
        let tag = self.tag.as_ref().map_or_else(String::new, |tag| format!(":{tag}"));
        format!("{}{revision}{tag}", self.repository)
    }

    fn place(&self) -> Place {
        match &self.out {
            Some(out) => Place::Folder(out.clone()),
            None => Place::Cache { cache: self.cache.clone(), folder: hub::folder_name(&self.repository) },
        }
    }

    fn client(&self, host: &Host) -> Result<Client> {
        let variable = &settings::process_variable;
        settings::online(variable)?;
        let endpoint = settings::parsed(&self.endpoint)?;
        let token = settings::token(variable)?;
        if token.is_some() && !endpoint.is_secure() && !endpoint.is_local() {
            host.warn(&format!("HF_ENDPOINT: {endpoint} is not encrypted: the token can be read on the way"));
        }
        Ok(Client::new(endpoint, token, variable)?)
    }

    /// Refuses a download that the disk has no space for.
    fn require_space(place: &Place, wanted: &[Wanted]) -> Result<()> {
        let mut needs: u64 = 0;
        for file in wanted {
            if !place.has(file)? {
                needs = needs.saturating_add(file.size - left_over(place, file));
            }
        }
        let existing = |path: &Path| path.ancestors().find(|path| path.is_dir()).map(Path::to_owned);
        let root = existing(place.root()).unwrap_or_else(|| PathBuf::from("."));
        match disk::free(&root) {
            Ok(free) if free < needs => {
                Err(PullFault::Space { path: place.root().to_owned(), needs, free }.into())
            }
            _ => Ok(()),
        }
    }

    fn fetch(&self, host: &Host) -> Result<PullReport> {
        let start = Instant::now();
        let client = self.client(host)?;
        let asked = Asked { repository: &self.repository, revision: &self.revision };
        let listing = asked.listing(&client, host)?;
        let Selection { chosen, left_out } =
            select(&self.repository, &listing.files, &self.include, self.tag.as_deref())?;
        let place = self.place();
        // The total is known when the sizes are, which the listing mostly has.
        let total = chosen.iter().filter_map(|file| file.size).sum();
        let meter = host.progress(total, Unit::Bytes);
        let asked = Asked { repository: &self.repository, revision: &listing.commit };
        let mut transfers = Transfers { client: &client, asked, place: &place, host, meter: &meter, done: 0 };
        let wanted: Vec<Wanted> = chosen.iter().map(|file| transfers.wanted(file)).collect::<Result<_>>()?;
        Pull::require_space(&place, &wanted)?;
        place.prepare()?;
        let mut files = Vec::with_capacity(wanted.len());
        for file in &wanted {
            meter.message(crate::escape::line(&file.name));
            let fetched_bytes = transfers.fetch(file)?;
            let (name, hash) = (file.name.clone(), file.hash.hex().to_owned());
            files.push(PulledFile { name, bytes: file.size, hash, fetched_bytes });
        }
        meter.finish();
        let folder = place.finish(&listing.commit, &self.revision, &wanted)?;
        // A tag names one file, if in several parts.
        let first = files.iter().find(|file| self.tag.is_some() && hub::is_first_part(&file.name));
        Ok(PullReport {
            model: self.model(),
            commit: listing.commit,
            path: first.map_or_else(|| folder.clone(), |file| folder.join(&file.name)),
            bytes: files.iter().map(|file| file.bytes).sum(),
            fetched_bytes: files.iter().map(|file| file.fetched_bytes).sum(),
            files,
            left_out: left_out.iter().map(|file| file.name.clone()).collect(),
            left_out_bytes: left_out.iter().filter_map(|file| file.size).sum(),
            seconds: start.elapsed().as_secs_f64(),
        })
    }
}

impl Job for Pull {
    const NAME: &'static str = "pull";
    const VERSION: u32 = 1;
    type Report = PullReport;

    fn inputs(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns none: cache and folder are filled file by file, and no file that is there is replaced.
    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, _: &Host) -> Result<u64> {
        Ok(NEEDS)
    }

    /// # Errors
    /// A model that is not there or not open to the user; a failure of the network after several attempts; a file with a
    /// wrong hash or size; a full disk; a stop, after which the job resumes.
    fn run(&self, host: &Host) -> Result<PullReport> {
        host.require_memory("pull", NEEDS)?;
        let _leaving = host.leaving("Interrupted. Rerun the same command to resume.".to_owned());
        host.orderly(|| self.fetch(host), JobError::is_stop)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_job_holds_what_was_asked_and_no_token() {
        let resolve = |name: &str, revision: Option<&str>, include: &[&str]| {
            let include = include.iter().map(|pattern| (*pattern).to_owned()).collect();
            let revision = revision.map(str::to_owned);
            PullArguments { name: name.into(), revision, include, out: None }.resolve()
        };
        let job = resolve("hf.co/org/m@v1:Q4_0", None, &[]).unwrap();
        assert_eq!((job.repository.as_str(), job.revision.as_str()), ("org/m", "v1"));
        assert_eq!((job.tag.as_deref(), job.model()), (Some("Q4_0"), "org/m@v1:Q4_0".to_owned()));
        assert_eq!(resolve("org/m", Some("refs/pr/1"), &[]).unwrap().revision, "refs/pr/1");
        let read = crate::job::from_json::<Pull>("j", crate::job::to_json(&job).unwrap()).unwrap();
        assert_eq!(read, job);
        let error = |name: &str, revision, include| resolve(name, revision, include).unwrap_err().to_string();
        assert!(error("m", None, &[]).contains("expected the name of a model on the hub"));
        assert!(error("org/m@a", Some("b"), &[]).starts_with("--revision: expected one revision"));
        assert!(error("org/m", Some("../x"), &[]).starts_with("--revision: expected a branch"));
        assert!(error("org/m:Q4_0", None, &["*"]).starts_with("--include: "));
    }
}
