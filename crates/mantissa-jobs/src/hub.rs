//! Models by their name on the Hugging Face hub, in the cache that its tools share on a machine.
//!
//! Layout (`huggingface_hub`, "Understand caching"): `models--ORG--NAME/refs/BRANCH` holds a revision, and
//! `models--ORG--NAME/snapshots/REVISION` its files. Nothing is fetched here: the job `Pull` does that.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mantissa_num::nearest_list;
use mantissa_store::disk;

/// Prefixes that people copy with a name.
const PREFIXES: [&str; 6] = [
    "https://huggingface.co/",
    "http://huggingface.co/",
    "huggingface.co/",
    "https://hf.co/",
    "hf.co/",
    "hf://",
];

/// Longest part of a name in characters; the hub allows 96.
const LONGEST: usize = 96;

/// Largest file that names a revision, in bytes.
pub(crate) const REVISION: u64 = 256;

/// Name of a model on the hub: `ORG/NAME`, with `@REVISION` or, for a repository of GGUF files, `:TAG` after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `ORG/NAME`.
    pub repository: String,
    /// Branch, tag or commit; `None` for the newest.
    pub revision: Option<String>,
    /// Part of the name of a GGUF file, such as `Q4_K_M`.
    pub file: Option<String>,
}

impl HubName {
    /// Parses a name, with or without the hub's address; `None` for other text.
    pub fn parse(text: &str) -> Option<Self> {
        let text = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
        let (text, file) = split(text, ':');
        let (text, revision) = split(text, '@');
        let repository = text.trim_end_matches('/');
        let (organization, name) = repository.split_once('/')?;
        let is_given = file.is_none_or(is_part) && revision.is_none_or(is_revision);
        (is_part(organization) && is_part(name) && is_given).then(|| HubName {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// Finds the model in `cache`: its folder, or its GGUF file.
    pub fn cached(&self, cache: &Path) -> Option<PathBuf> {
        let snapshot = snapshot(&cache.join(folder_name(&self.repository)), self.revision.as_deref())?;
        let Some(tag) = &self.file else { return Some(snapshot) };
        let mut files = gguf_files(&snapshot);
        // Models of many parts have a folder for each quantization.
        subfolders(&snapshot).iter().for_each(|folder| files.extend(gguf_files(folder)));
        let inside =
            |file: &PathBuf| file.strip_prefix(&snapshot).unwrap_or(file).to_string_lossy().into_owned();
        let names: Vec<String> = files.iter().map(inside).collect();
        let found = tagged(&names.iter().map(String::as_str).collect::<Vec<_>>(), tag)?;
        Some(files.swap_remove(found))
    }

    /// Returns the command that fetches the model.
    fn download(&self) -> String {
        let revision = self.revision.as_ref().map_or_else(String::new, |name| format!(" --revision {name}"));
        let file = self.file.as_ref().map_or_else(String::new, |tag| format!(":{tag}"));
        format!("mantissa pull {}{file}{revision}", self.repository)
    }

    /// Says what to do where a cache with the models `known` lacks this one.
    fn fix_of_missing(&self, known: &[String]) -> String {
        let near = near(&self.repository, known);
        let or = near.map_or_else(String::new, |near| format!(", or give {near}"));
        format!("check the path, or fetch the model ({}) and give the name again{or}", self.download())
    }
}

/// Returns the name of the folder of `repository`, `ORG/NAME`, in a cache.
pub(crate) fn folder_name(repository: &str) -> String {
    format!("{FOLDER}{}", repository.replace('/', "--"))
}

/// First part of the name of a model's folder in a cache.
const FOLDER: &str = "models--";

/// Splits `text` at its last `at`.
fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.rsplit_once(at).map_or((text, None), |(text, rest)| (text, Some(rest)))
}

/// True for an organization, a name, a revision or a tag, as the hub allows them.
fn is_part(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c);
    !text.is_empty() && text.len() <= LONGEST && text.chars().all(allowed) && !text.starts_with('.')
}

/// True for a branch, a tag or a commit: parts that the hub allows, with `/` between them as in `refs/pr/1`.
pub(crate) fn is_revision(text: &str) -> bool {
    text.len() <= 200 && text.split('/').all(is_part)
}

/// Returns the cache of this machine, by the variables of `huggingface_hub` in their order.
pub fn cache() -> Option<PathBuf> {
    cache_by(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

fn cache_by(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).map(PathBuf::from);
    let home = || Some(path("HOME")?.join(".cache"));
    path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(|| {
        let of_home = path("HF_HOME");
        Some(of_home.or_else(|| Some(path("XDG_CACHE_HOME").or_else(home)?.join("huggingface")))?.join("hub"))
    })
}

/// Finds the snapshot of a repository's folder that `revision` names: a branch or tag, or a commit or its beginning;
/// without it, the branch `main`, or else the one that changed last.
pub fn snapshot(repository: &Path, revision: Option<&str>) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    let by_reference = |name: &str| {
        let text = mantissa_store::regular::read(&repository.join("refs").join(name), REVISION, "a revision")
            .ok()?;
        let commit = String::from_utf8(text).ok()?;
        let commit = commit.trim();
        is_part(commit).then(|| snapshots.join(commit)).filter(|found| found.is_dir())
    };
    if let Some(found) = by_reference(revision.unwrap_or("main")) {
        return Some(found);
    }
    let all =
        std::fs::read_dir(&snapshots).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let wanted = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        revision.is_none_or(|revision| name.starts_with(revision))
    };
    let changed =
        |path: &PathBuf| path.metadata().and_then(|of| of.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    all.filter(wanted).max_by_key(changed)
}

/// Lists the GGUF files of a folder, of a split model only the first, sorted by name.
pub fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_first = |path: &PathBuf| is_first_part(&path.file_name().unwrap_or_default().to_string_lossy());
    let mut found: Vec<PathBuf> = entries.filter(is_first).collect();
    found.sort();
    found
}

/// Lists the folders in a folder, sorted by name.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

/// True for the path of a GGUF model: one file, or the first part of a split one. Projectors of images are none.
pub(crate) fn is_first_part(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default().to_lowercase();
    let stem = name.strip_suffix(".gguf").filter(|stem| !stem.starts_with("mmproj"));
    stem.is_some_and(|stem| !stem.contains("-of-") || stem.contains("-00001-of-"))
}

/// Returns the index of the path that `tag` names, whatever its case: as a whole word of the file's name if there is one,
/// or else as a part of it.
pub(crate) fn tagged(paths: &[&str], tag: &str) -> Option<usize> {
    let tag = tag.to_lowercase();
    let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_lowercase();
    let is_end = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
    let is_word = |path: &&str| {
        let name = name(path);
        name.match_indices(&tag).any(|(at, found)| {
            is_end(name[..at].chars().next_back()) && is_end(name[at + found.len()..].chars().next())
        })
    };
    paths.iter().position(is_word).or_else(|| paths.iter().position(|path| name(path).contains(&tag)))
}

/// Returns the tag in the name of a GGUF model, such as `Q4_K_M`: its last word.
pub(crate) fn tag_of(path: &str) -> Option<String> {
    let name = path.rsplit('/').next().unwrap_or_default();
    let stem = name.get(..name.len().checked_sub(".gguf".len())?)?;
    let stem = stem.split("-00001-of-").next().unwrap_or_default();
    let tag = stem.rsplit(['-', '.']).next().filter(|tag| is_part(tag))?;
    Some(tag.to_owned())
}

/// Returns the model that a path stands for: the snapshot of a repository's folder in a cache, the only GGUF file of a
/// folder without other weights, or the snapshot in `cache` of a name on the hub that is no path; `None` for other paths.
pub fn location(named: &Path, cache: impl FnOnce() -> Option<PathBuf>) -> Option<PathBuf> {
    if !named.exists() {
        let found = HubName::parse(named.to_str()?)?.cached(&cache()?)?;
        return Some(only_gguf(&found).unwrap_or(found));
    }
    let is_repository = named.file_name()?.to_string_lossy().starts_with(FOLDER);
    let snapshot = is_repository.then(|| snapshot(named, None)).flatten();
    only_gguf(snapshot.as_deref().unwrap_or(named)).or(snapshot)
}

/// Returns the GGUF file of a folder that holds one and no other weights.
fn only_gguf(folder: &Path) -> Option<PathBuf> {
    if !folder.is_dir() || folder.join("config.json").exists() {
        return None;
    }
    match gguf_files(folder).as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    }
}

/// Lists the models in `cache` by their names on the hub, sorted.
pub fn cached_names(cache: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(cache).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| {
        let folder = entry.file_name().to_string_lossy().into_owned();
        Some(folder.strip_prefix(FOLDER)?.replacen("--", "/", 1))
    };
    let mut found: Vec<String> = entries.filter_map(name).collect();
    found.sort();
    found
}

/// Says what to do about a path that is not there: the name like it beside it, or the download of a name on the hub.
pub fn fix_of_missing(missing: &Path, cache: Option<&Path>) -> String {
    if is_server(missing) {
        return "a running server is asked by its clients, such as curl; give the path or the name of a model".to_owned();
    }
    let folder = disk::folder_of(missing);
    let name = missing.file_name().unwrap_or_default().to_string_lossy();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let beside: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if let Some(near) = near(&name, &beside).or_else(|| file_of(&name, &beside)) {
        return format!("check the path; there is {near} in {}", folder.display());
    }
    let known = || cache.map(cached_names).unwrap_or_default();
    // A folder that exists is no organization.
    match HubName::parse(&missing.to_string_lossy()).filter(|_| !folder.is_dir()) {
        Some(name) => name.fix_of_missing(&known()),
        None => bare(missing).map_or_else(|| "check the path".to_owned(), |name| fix_of_bare(name, &known())),
    }
}

/// True for the address of a server that is not the Hugging Face hub, whose pages are named by people who mean a model.
fn is_server(path: &Path) -> bool {
    let text = path.to_string_lossy().to_lowercase();
    let host = text.strip_prefix("http:").or_else(|| text.strip_prefix("https:"));
    host.is_some_and(|host| {
        !["huggingface.co", "hf.co"].contains(&host.trim_matches('/').split('/').next().unwrap_or_default())
    })
}

/// Endings of files that hold a model.
const ENDINGS: [&str; 2] = [".gguf", ".safetensors"];

/// Returns the model files of `known` whose name without its ending is near to `name`, or begins with it.
fn file_of(name: &str, known: &[String]) -> Option<String> {
    let lower = name.to_lowercase();
    let stem = |file: &String| {
        let file = file.to_lowercase();
        ENDINGS.iter().find_map(|ending| file.strip_suffix(ending).map(str::to_owned))
    };
    let fits = |stem: String| {
        let distance = strsim::damerau_levenshtein(&lower, &stem);
        distance <= few(name) || (lower.chars().count() >= 3 && stem.starts_with(&lower))
    };
    let close: Vec<&str> =
        known.iter().filter(|file| stem(file).is_some_and(fits)).map(String::as_str).collect();
    (!close.is_empty()).then(|| nearest_list(name, close))
}

/// Returns the word that people type for a model of another hub, such as `llama3` or `llama3:8b`, without its tag; `None` for
/// a path or the name of a file.
fn bare(missing: &Path) -> Option<&str> {
    let text = missing.to_str()?;
    let name = text.split([':', '@']).next()?;
    let is_file = ENDINGS.iter().any(|ending| name.to_lowercase().ends_with(ending));
    (is_part(name) && !is_file).then_some(name)
}

/// Says what to do about a name without an organization: the models of that name in a cache with the models `known`, or the
/// form of a name on the hub.
fn fix_of_bare(name: &str, known: &[String]) -> String {
    let lower = name.to_lowercase();
    let same =
        |full: &&String| full.split_once('/').is_some_and(|(_, own)| own.to_lowercase().starts_with(&lower));
    let held: Vec<&str> = known.iter().filter(same).map(String::as_str).collect();
    let form = format!(
        "name a model of the Hugging Face hub in full, ORG/{name}, and fetch it first: mantissa pull ORG/{name}"
    );
    match held.as_slice() {
        [] => format!("check the path, or {form}"),
        held => format!(
            "check the path, or give {}, which the cache holds; else {form}",
            nearest_list(name, held.iter().copied())
        ),
    }
}

/// Returns the number of letters in which a name that is meant may differ.
fn few(name: &str) -> usize {
    name.chars().count().max(3) / 3
}

/// Returns the names of `known` that are near to `name`, if one differs in few letters.
pub(crate) fn near(name: &str, known: &[String]) -> Option<String> {
    let differs = |known: &&String| strsim::damerau_levenshtein(&name.to_lowercase(), &known.to_lowercase());
    let close: Vec<&str> =
        known.iter().filter(|known| differs(known) <= few(name)).map(String::as_str).collect();
    (!close.is_empty()).then(|| nearest_list(name, close))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn names_of_the_hub_are_read_with_and_without_its_address() {
        let plain = HubName::parse("org/model-1.5_b").unwrap();
        assert_eq!((plain.repository.as_str(), plain.revision, plain.file), ("org/model-1.5_b", None, None));
        for prefix in PREFIXES {
            assert_eq!(HubName::parse(&format!("{prefix}org/m/")).unwrap().repository, "org/m", "{prefix}");
        }
        let file = HubName::parse("hf.co/org/m-GGUF:Q4_K_M").unwrap();
        assert_eq!((file.repository.as_str(), file.file.as_deref()), ("org/m-GGUF", Some("Q4_K_M")));
        for revision in ["v1.0", "refs/pr/1"] {
            let name = HubName::parse(&format!("org/m@{revision}")).unwrap();
            assert_eq!((name.repository.as_str(), name.revision.as_deref()), ("org/m", Some(revision)));
        }
        for other in [
            "model",
            "/org/model",
            "a/b/c",
            "../model",
            "./model",
            "org/",
            "org/a b",
            "org/m:",
            "org/m@../x",
            "",
        ] {
            assert_eq!(HubName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn the_cache_follows_the_variables_in_their_order() {
        let by = |set: &[(&str, &str)]| {
            let found =
                cache_by(|name| set.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).into()));
            found.map(|path| path.display().to_string())
        };
        let all = [
            ("HF_HUB_CACHE", "/a"),
            ("HUGGINGFACE_HUB_CACHE", "/b"),
            ("HF_HOME", "/c"),
            ("XDG_CACHE_HOME", "/d"),
            ("HOME", "/e"),
        ];
        let expected = ["/a", "/b", "/c/hub", "/d/huggingface/hub", "/e/.cache/huggingface/hub"];
        for (i, expected) in expected.into_iter().enumerate() {
            assert_eq!(by(&all[i..]).as_deref(), Some(expected));
        }
        assert_eq!(by(&[]), None);
    }

    #[test]
    fn a_snapshot_is_that_of_main_or_of_the_revision_or_the_only_one() {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("models--org--m");
        for commit in ["aaa1", "bbb2"] {
            write(&repository.join("snapshots").join(commit).join("config.json"), "{}");
        }
        write(&repository.join("refs/main"), "aaa1\n");
        write(&repository.join("refs/v2"), "bbb2");
        let found = |name: &str| {
            let found = HubName::parse(name).unwrap().cached(cache.path())?;
            Some(found.file_name().unwrap().to_string_lossy().into_owned())
        };
        assert_eq!(found("org/m").as_deref(), Some("aaa1"));
        assert_eq!(found("org/m@v2").as_deref(), Some("bbb2"));
        assert_eq!(found("org/m@bb").as_deref(), Some("bbb2"));
        assert_eq!((found("org/m@cc"), found("org/n")), (None, None));
        // A reference that leaves the folder is none.
        write(&repository.join("refs/main"), "../../..");
        assert!(found("org/m").is_some_and(|name| ["aaa1", "bbb2"].contains(&name.as_str())));
        assert_eq!(cached_names(cache.path()), ["org/m"]);
    }

    #[test]
    fn a_tag_names_a_gguf_file() {
        let cache = tempfile::tempdir().unwrap();
        let snapshot = cache.path().join("models--org--m-GGUF/snapshots/c1");
        for file in ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"] {
            write(&snapshot.join(file), "");
        }
        let found = |tag: &str| HubName::parse(&format!("org/m-GGUF:{tag}")).unwrap().cached(cache.path());
        assert_eq!(found("q4_k_m"), Some(snapshot.join("m-Q4_K_M.gguf")));
        assert_eq!(found("Q8_0"), Some(snapshot.join("m-Q8_0-00001-of-00002.gguf")));
        assert_eq!(found("Q2_K"), None);
        // A tag is a whole word before it is a part of one, and a folder may hold the parts.
        for file in ["m-Q4_K.gguf", "mmproj-Q2_K.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf"] {
            write(&snapshot.join(file), "");
        }
        assert_eq!(found("q4_k"), Some(snapshot.join("m-Q4_K.gguf")));
        assert_eq!(found("Q6_K"), Some(snapshot.join("Q6_K/m-Q6_K-00001-of-00002.gguf")));
        assert_eq!(found("Q2_K"), None);
        fs::remove_file(snapshot.join("m-Q4_K.gguf")).unwrap();
        // Without a tag one file is the model; of several none is.
        let at = |named: &Path| location(named, || Some(cache.path().to_owned()));
        assert_eq!(at(Path::new("org/m-GGUF")), Some(snapshot.clone()));
        fs::remove_file(snapshot.join("m-Q4_K_M.gguf")).unwrap();
        let only = Some(snapshot.join("m-Q8_0-00001-of-00002.gguf"));
        assert_eq!(at(Path::new("org/m-GGUF")), only);
        assert_eq!(at(&cache.path().join("models--org--m-GGUF")), only);
        assert_eq!(at(&snapshot), only);
        write(&snapshot.join("config.json"), "{}");
        assert_eq!(at(&snapshot), None);
    }

    #[test]
    fn a_missing_path_is_answered_with_the_nearest() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("stories260K/config.json"), "{}");
        write(&folder.path().join("models--org--Qwen3-8B/refs/main"), "a");
        let fix = fix_of_missing(&folder.path().join("stories260k"), None);
        assert!(fix.contains("there is stories260K in"), "{fix}");
        assert_eq!(fix_of_missing(&folder.path().join("nothing-like-it"), None), "check the path");
        let fix = fix_of_missing(Path::new("org/Qwen3-9B"), Some(folder.path()));
        assert!(fix.contains("mantissa pull org/Qwen3-9B)") && fix.contains("give org/Qwen3-8B"), "{fix}");
        let fix = |name: &str| fix_of_missing(Path::new(name), None);
        assert!(fix("org/m@v2").contains("mantissa pull org/m --revision v2)"), "{}", fix("org/m@v2"));
        assert!(fix("org/m:Q4_0").contains("mantissa pull org/m:Q4_0)"), "{}", fix("org/m:Q4_0"));
        // Below a folder that is there, a path is meant: the tests run in the crate's folder.
        assert!(fix("src/hub.r").contains("there is hub.rs in src"), "{}", fix("src/hub.r"));
        assert_eq!(fix("src/nothing-like-it"), "check the path");
    }

    #[test]
    fn a_bare_name_is_answered_with_files_beside_it_and_the_form_of_the_hub() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["smol.gguf", "Qwen3-8B-Q4_K_M.gguf", "notes.txt", "stories.safetensors"] {
            write(&at(name), "");
        }
        for (missing, found) in [
            ("smol", "smol.gguf"),
            ("smoll", "smol.gguf"),
            ("smoll.gguf", "smol.gguf"),
            ("Smol", "smol.gguf"),
            ("qwen3", "Qwen3-8B-Q4_K_M.gguf"),
            ("storys", "stories.safetensors"),
        ] {
            let fix = fix_of_missing(&at(missing), None);
            assert!(fix.contains(&format!("there is {found} in")), "{missing}: {fix}");
        }
        assert_eq!(fix_of_missing(&at("note"), None), "check the path");
        // A word alone, as in Ollama.
        write(&at("cache/models--meta--Llama3-8B/refs/main"), "a");
        let fix = |name: &str| fix_of_missing(Path::new(name), Some(&at("cache")));
        for name in ["mistral", "mistral:7b", "mistral@main"] {
            let fix = fix(name);
            assert!(
                fix.contains("in full, ORG/mistral, and fetch it first: mantissa pull ORG/mistral"),
                "{fix}"
            );
        }
        assert!(fix("llama3").contains("give meta/Llama3-8B, which the cache holds"), "{}", fix("llama3"));
        assert_eq!((fix("model.gguf"), fix("../none")), ("check the path".into(), "check the path".into()));
    }
}
