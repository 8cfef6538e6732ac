//! The paths that a command reads and writes, checked against each other before any work.
//!
//! An output must not be an input, compared by path and by device and inode, which resolves symbolic and hard links.
//! It must not be the output of another job without `--overwrite` ([`crate::output`]). Two outputs must not be the
//! same. A page that describes one thing, such as a model or a training run, is replaced by any later page of it.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, OutputFault, Result};
use crate::gguf::is_part_of;
use crate::manifest::{MANIFEST_NAME, beside, manifest_path};
use crate::nested::{Form, refuse_inside};
use crate::output::{JobKey, Output, is_output};
use crate::target::resolve;

/// Kinds of outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A single file.
    File,
    /// A folder that appears complete, apart from every input.
    Folder,
    /// A GGUF model: a file, or parts of one, with files beside it.
    Gguf,
    /// Folder of a training run, which has its own rules for existing files; it may lie in an input's folder.
    Run,
}

/// Paths of a command.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    reads: Vec<Read>,
    writes: Vec<Write>,
}

#[derive(Clone, Debug)]
struct Read {
    path: PathBuf,
    /// True if the content is part of the job's identity.
    decides: bool,
}

#[derive(Clone, Debug)]
struct Write {
    option: String,
    path: PathBuf,
    kind: Kind,
    /// Subject of a page; it then identifies the job instead of the command line and its inputs.
    about: Option<String>,
    /// True if the command itself refuses a finished output of another job.
    answers: bool,
}

/// Suffix of files that describe a GGUF model beside it.
const QUALITY_SUFFIX: &str = "quality.json";

/// Device and inode.
type FileId = (u64, u64);

impl Paths {
    /// Adds an input: a file, or a folder whose files are inputs. The command itself refuses a missing one.
    pub fn read(&mut self, path: impl Into<PathBuf>) {
        self.reads.push(Read { path: path.into(), decides: true });
    }

    /// Adds an input that may change between runs of the same job, such as the folder of a run in progress.
    pub fn watch(&mut self, path: impl Into<PathBuf>) {
        self.reads.push(Read { path: path.into(), decides: false });
    }

    /// Adds an output; messages name it by `option`.
    pub fn write(&mut self, option: impl Into<String>, path: impl Into<PathBuf>, kind: Kind) {
        let (option, path) = (option.into(), path.into());
        self.writes.push(Write { option, path, kind, about: None, answers: false });
    }

    /// Leaves it to the command to refuse a finished output of another job at a path named by `option`: it can say what
    /// differs, or that nothing does. What is no finished output is refused as always.
    pub fn answer_finished(&mut self, option: &str) {
        self.writes.iter_mut().filter(|write| write.option == option).for_each(|write| write.answers = true);
    }

    /// Adds a file that describes the existing file or folder `subject`. It replaces, without `--overwrite`, an
    /// unchanged file that describes the same path, whatever options that was made with.
    pub fn write_about(
        &mut self,
        option: impl Into<String>,
        path: impl Into<PathBuf>,
        subject: impl Into<PathBuf>,
    ) {
        let subject = subject.into();
        let about = fs::canonicalize(&subject).unwrap_or(subject).to_string_lossy().into_owned();
        let (option, path) = (option.into(), path.into());
        self.writes.push(Write { option, path, kind: Kind::File, about: Some(about), answers: false });
    }

    /// Refuses outputs that are inputs, that may not be replaced, or that coincide. `command` is the command line.
    /// With the identities of the inputs it forms the job, which may replace its own output.
    ///
    /// # Errors
    /// [`Error::Output`], [`Error::WrongKind`], [`Error::Io`].
    pub fn check(&self, command: &str, overwrite: bool) -> Result<Permits> {
        let inputs = Inputs::of(&self.reads, &self.writes);
        let job = JobKey::of(&format!("{command}\n{}", inputs.described));
        let mut permits = Permits { job, overwrite, writes: self.writes.clone(), refused: Vec::new() };
        let mut taken = None;
        for (at, write) in self.writes.iter().enumerate() {
            let resolved = resolve(&write.path)?;
            self.refuse_twice(write, &resolved, &self.writes[..at])?;
            inputs.refuse(write, &resolved)?;
            let output = permits.of(write);
            refuse_inside(&resolved, if write.kind == Kind::File { Form::File } else { Form::Tree })?;
            match existing(write, &resolved, &inputs, &output) {
                Err(Error::Output { fault: OutputFault::Exists { .. }, .. })
                    if write.answers && manifest_path(&resolved).is_file() =>
                {
                    permits.refused.push(write.path.clone());
                }
                Err(error @ Error::Output { fault: OutputFault::Exists { .. }, .. }) => {
                    taken = taken.or(Some(error));
                }
                checked => checked?,
            }
        }
        // What differs in the finished output tells more than that a report of the same run is there too. The report stays
        // refused when it is written.
        match taken.filter(|_| permits.refused.is_empty()) {
            Some(error) => Err(error),
            None => Ok(permits),
        }
    }

    fn refuse_twice(&self, write: &Write, resolved: &Path, before: &[Write]) -> Result<()> {
        for other in before {
            let other_place = resolve(&other.path)?;
            let relation = if resolved == other_place
                || belongs(write, resolved, &other_place)
                || belongs(other, &other_place, resolved)
            {
                "is"
            } else if resolved.starts_with(&other_place) || other_place.starts_with(resolved) {
                "lies inside"
            } else {
                continue;
            };
            let (option, other) = (write.option.clone(), other.option.clone());
            return Err(Error::output(&write.path, OutputFault::Twice { option, relation, other }));
        }
        Ok(())
    }
}

/// Refuses to write over what is there at the resolved path of `write`, if that may not be replaced.
fn existing(write: &Write, resolved: &Path, inputs: &Inputs, output: &Output) -> Result<()> {
    match write.kind {
        Kind::Folder => output.check_folder(resolved).map(drop),
        Kind::File => {
            inputs.refuse_file(write, resolved, output)?;
            output.check_file(resolved).map(drop)
        }
        Kind::Gguf => gguf_files(resolved).iter().try_for_each(|path| {
            inputs.refuse_file(write, path, output)?;
            output.check_file(path).map(drop)
        }),
        Kind::Run => Ok(()),
    }
}

/// True if `file` is a part of the GGUF model written at `model`, or a file beside it or a part.
fn belongs(write: &Write, model: &Path, file: &Path) -> bool {
    if write.kind != Kind::Gguf || model.parent() != file.parent() {
        return false;
    }
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (model, file) = (name(model), name(file));
    let first =
        [QUALITY_SUFFIX, MANIFEST_NAME].iter().find_map(|end| file.strip_suffix(end)?.strip_suffix('.'));
    let file = first.unwrap_or(&file);
    file == model || is_part_of(&model, file)
}

/// Existing files of the GGUF model at `path`: itself, its parts, and files beside it.
fn gguf_files(path: &Path) -> Vec<PathBuf> {
    let mut files = vec![path.to_owned()];
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let entries = path.parent().and_then(|parent| fs::read_dir(parent).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if is_part_of(&name, &entry.file_name().to_string_lossy()) {
            files.push(entry.path());
        }
    }
    files.push(beside(path, MANIFEST_NAME));
    files.sort();
    files
}

/// Permission to write the outputs, granted after all paths are checked.
#[derive(Clone, Debug)]
pub struct Permits {
    job: JobKey,
    overwrite: bool,
    writes: Vec<Write>,
    /// Paths with a finished output of another job, which the command refuses.
    refused: Vec<PathBuf>,
}

impl Permits {
    /// Output at `path`; `None` if it is not among the command's [`Paths`].
    pub fn output(&self, path: &Path) -> Option<Output> {
        self.writes.iter().find(|write| write.path == path).map(|write| self.of(write))
    }

    /// True if outputs of other jobs may be replaced.
    pub fn replaces(&self) -> bool {
        self.overwrite
    }

    /// True if the path holds a finished output that this job may not replace by its mark.
    pub fn is_refused(&self, path: &Path) -> bool {
        self.refused.iter().any(|refused| refused == path)
    }

    /// True if the path holds an output that carries the mark of this very job: the same command line, and inputs of the
    /// same identity. The content of a folder is not compared.
    ///
    /// # Errors
    /// A path that cannot be resolved.
    pub fn wrote(&self, path: &Path) -> Result<bool> {
        let Some(write) = self.writes.iter().find(|write| write.path == path) else { return Ok(false) };
        let (resolved, output) = (resolve(&write.path)?, self.of(write));
        Ok(match write.kind {
            Kind::Folder => resolved.is_dir() && output.marks(&resolved),
            Kind::File => output.wrote_file(&resolved),
            Kind::Gguf => {
                let mut there = gguf_files(&resolved).into_iter().filter(|file| file.is_file()).peekable();
                there.peek().is_some() && there.all(|file| output.wrote_file(&file))
            }
            Kind::Run => false,
        })
    }

    fn of(&self, write: &Write) -> Output {
        let about = |subject: &String| JobKey::of(&format!("description of {subject}"));
        let job = write.about.as_ref().map_or_else(|| self.job.clone(), about);
        Output::of_job(&write.path, job, self.overwrite)
    }
}

/// Inputs that exist.
struct Inputs {
    /// Resolved paths with their original spelling.
    paths: Vec<(PathBuf, PathBuf)>,
    /// Files, and true for each that is named itself rather than its folder.
    files: HashMap<FileId, (PathBuf, bool)>,
    /// Text that changes when an input does.
    described: String,
}

impl Inputs {
    fn of(reads: &[Read], writes: &[Write]) -> Self {
        let mut inputs = Inputs { paths: Vec::new(), files: HashMap::new(), described: String::new() };
        let outputs: Vec<_> = writes.iter().filter_map(|write| resolve(&write.path).ok()).collect();
        for Read { path, decides } in reads {
            let Ok(resolved) = fs::canonicalize(path) else { continue };
            if resolved.is_dir() {
                let entries = fs::read_dir(&resolved).map(|entries| entries.flatten().collect::<Vec<_>>());
                let mut files: Vec<_> =
                    entries.unwrap_or_default().into_iter().map(|entry| entry.path()).collect();
                files.sort();
                // An output of this command inside a folder that it reads is not an input.
                for file in files.iter().filter(|file| file.is_file()) {
                    inputs.add(file, false, *decides && !outputs.contains(file));
                }
            } else {
                inputs.add(&resolved, true, *decides);
            }
            inputs.paths.push((resolved, path.clone()));
        }
        inputs
    }

    fn add(&mut self, path: &Path, named: bool, describes: bool) {
        let Ok(found) = fs::metadata(path) else { return };
        let id = (found.dev(), found.ino());
        let named = named || self.files.get(&id).is_some_and(|(_, before)| *before);
        self.files.insert(id, (path.to_owned(), named));
        if !describes {
            return;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let [dev, ino, len] = [found.dev(), found.ino(), found.len()];
        self.described += &format!("{name} {dev} {ino} {len} {}.{}\n", found.mtime(), found.mtime_nsec());
    }

    /// Refuses an output that is an input, contains one, or is a folder inside one.
    fn refuse(&self, write: &Write, resolved: &Path) -> Result<()> {
        for (input, named) in &self.paths {
            let relation = if input == resolved {
                "is"
            } else if input.starts_with(resolved) {
                "contains"
            } else if matches!(write.kind, Kind::Folder | Kind::Gguf) && resolved.starts_with(input) {
                "lies inside"
            } else {
                continue;
            };
            return Err(overlap(write, relation, named));
        }
        Ok(())
    }

    /// Refuses a file that is an input by device and inode, unless it is an output of this job.
    fn refuse_file(&self, write: &Write, resolved: &Path, output: &Output) -> Result<()> {
        let Ok(found) = fs::metadata(resolved) else { return Ok(()) };
        match self.files.get(&(found.dev(), found.ino())) {
            // An output of ours in an input folder does not belong to the input.
            Some((input, named)) if *named || !(output.wrote_file(resolved) || is_output(resolved)) => {
                Err(overlap(write, "is", input))
            }
            _ => Ok(()),
        }
    }
}

fn overlap(write: &Write, relation: &'static str, input: &Path) -> Error {
    let input = input.to_string_lossy().into_owned();
    Error::output(&write.path, OutputFault::Overlap { relation, input })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::commit::write_file_atomic;

    fn paths(reads: &[&Path], write: &Path, kind: Kind) -> Paths {
        let mut paths = Paths::default();
        reads.iter().for_each(|path| paths.read(*path));
        paths.write("--out", write, kind);
        paths
    }

    fn fault(result: Result<Permits>) -> OutputFault {
        match result.unwrap_err() {
            Error::Output { fault, .. } => fault,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn an_input_is_never_an_output_under_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("model")).unwrap();
        fs::write(at("model/config.json"), "{}").unwrap();
        fs::write(at("text"), "text").unwrap();
        fs::hard_link(at("model/config.json"), at("hard")).unwrap();
        std::os::unix::fs::symlink("model/config.json", at("soft")).unwrap();
        std::os::unix::fs::symlink("model", at("alias")).unwrap();
        for name in ["model/config.json", "alias/config.json", "hard", "soft", "text"] {
            let paths = paths(&[&at("model"), &at("text")], &at(name), Kind::File);
            assert!(
                matches!(fault(paths.check("x", true)), OutputFault::Overlap { relation: "is", .. }),
                "{name}"
            );
        }
        for (name, expected) in
            [("model", "is"), ("alias", "is"), ("model/new", "lies inside"), ("", "contains")]
        {
            let paths = paths(&[&at("model"), &at("text")], &at(name), Kind::Folder);
            let fault = fault(paths.check("x", true));
            assert!(
                matches!(fault, OutputFault::Overlap { relation, .. } if relation == expected),
                "{name}: {fault}"
            );
        }
        paths(&[&at("model")], &at("model/report.json"), Kind::File).check("x", false).unwrap();
    }

    #[test]
    fn a_file_is_replaced_by_the_job_that_wrote_it_or_on_request() {
        let dir = tempfile::tempdir().unwrap();
        let (input, out) = (dir.path().join("in"), dir.path().join("out"));
        fs::write(&input, "input").unwrap();
        let paths = paths(&[&input], &out, Kind::File);
        let output = |command: &str, overwrite| Ok(paths.check(command, overwrite)?.output(&out).unwrap());
        write_file_atomic(&output("a", false).unwrap(), b"one").unwrap();
        if output("a", false).is_err() {
            println!("skipped: no extended attributes here");
            return;
        }
        write_file_atomic(&output("a", false).unwrap(), b"two").unwrap();
        let exists = |result: Result<Output>| {
            matches!(result, Err(Error::Output { fault: OutputFault::Exists { .. }, .. }))
        };
        assert!(exists(output("b", false)), "another command");
        output("b", true).unwrap();
        fs::write(&input, "another input").unwrap();
        assert!(exists(output("a", false)), "another input");
        fs::write(&input, "input").unwrap();
        write_file_atomic(&output("a", true).unwrap(), b"three").unwrap();
        fs::write(&out, "edited").unwrap();
        assert!(exists(output("a", false)), "edited since");
        assert_eq!(fs::read(&out).unwrap(), b"edited");
    }

    #[test]
    fn a_description_is_replaced_by_a_later_one_of_the_same_thing() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        ["a", "b", "text"].iter().for_each(|name| fs::write(at(name), name).unwrap());
        let output = |command: &str, subject: &str| {
            let mut paths = Paths::default();
            paths.watch(at(subject));
            paths.read(at("text"));
            paths.write_about("--out", at("page"), at(subject));
            Ok(paths.check(command, false)?.output(&at("page")).unwrap())
        };
        write_file_atomic(&output("report", "a").unwrap(), b"one").unwrap();
        if output("report", "a").is_err() {
            println!("skipped: no extended attributes here");
            return;
        }
        fs::write(at("text"), "another input").unwrap();
        write_file_atomic(&output("report --with options", "a").unwrap(), b"two").unwrap();
        let refused = |result: Result<Output>| {
            matches!(result, Err(Error::Output { fault: OutputFault::Exists { .. }, .. }))
        };
        assert!(refused(output("report", "b")), "a page of another thing");
        fs::write(at("page"), "edited").unwrap();
        assert!(refused(output("report", "a")), "edited since");
    }

    #[test]
    fn two_outputs_are_two_paths() {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Paths::default();
        paths.write("--out", dir.path().join("a"), Kind::Folder);
        paths.write("--json", dir.path().join("a/report.json"), Kind::File);
        assert!(matches!(fault(paths.check("x", false)), OutputFault::Twice { relation: "lies inside", .. }));
    }
}
