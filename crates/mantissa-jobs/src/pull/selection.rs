//! Choice among the files of a model: what mantissa reads, or what patterns name.

use super::listing::RemoteFile;
use crate::error::{BadInput, Result};
use crate::escape;
use crate::hub;
use crate::text::bytes;

/// Endings of files at the top of a model beside the weights: configurations, tokenizers, templates and licences.
const BESIDE: [&str; 6] = [".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"];

/// Beginnings of such files.
const LICENCES: [&str; 3] = ["license", "notice", "copying"];

/// Folders of chat templates.
const TEMPLATES: [&str; 2] = ["chat_templates/", "additional_chat_templates/"];

/// Number of GGUF files that an error names.
const SHOWN: usize = 12;

/// Files that were chosen and those that were not.
pub(super) struct Selection<'a> {
    /// Files to fetch.
    pub chosen: Vec<&'a RemoteFile>,
    /// Names of the others.
    pub left_out: Vec<&'a RemoteFile>,
}

/// Chooses among `files` of `repository`: those that match `include`, or else the GGUF file of `tag`, or else what
/// mantissa reads.
///
/// # Errors
/// No file, several GGUF models without a tag, or a chosen file whose name leaves the model.
pub(super) fn select<'a>(
    repository: &str,
    files: &'a [RemoteFile],
    include: &[String],
    tag: Option<&str>,
) -> Result<Selection<'a>, BadInput> {
    let chosen: Vec<&RemoteFile> = match (include, tag) {
        ([], None) => read_by_mantissa(repository, files)?,
        ([], Some(tag)) => of_tag(repository, files, tag)?,
        (patterns, _) => {
            let patterns: Vec<String> = patterns.iter().map(|pattern| whole(pattern)).collect();
            let named = |file: &&RemoteFile| patterns.iter().any(|pattern| matches(pattern, &file.name));
            files.iter().filter(named).collect()
        }
    };
    if chosen.is_empty() {
        let patterns = include.join(" ");
        let found = format!("{} files, none of which matches {}", files.len(), escape::line(&patterns));
        let fix = format!("take one of {}", shown(files.iter()));
        return Err(BadInput::new(repository, found, "files to fetch").with_fix(fix));
    }
    if let Some(file) = chosen.iter().find(|file| !is_inside(&file.name)) {
        let place = format!("{repository}: name of a file");
        let found = format!("{:?}", escape::line(&file.name));
        return Err(BadInput::new(place, found, "a relative path inside the model"));
    }
    let left_out =
        files.iter().filter(|file| !chosen.iter().any(|chosen| std::ptr::eq(*chosen, *file))).collect();
    Ok(Selection { chosen, left_out })
}

/// True for a relative path that leads to a file below the folder it is relative to.
fn is_inside(name: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && part.len() <= 255;
    let allowed = |c: char| c != '\\' && !c.is_control();
    name.len() <= 1024 && name.chars().all(allowed) && name.split('/').all(plain)
}

/// Chooses configuration, tokenizer, templates and the weights in one format: safetensors, or else the only GGUF model.
fn read_by_mantissa<'a>(repository: &str, files: &'a [RemoteFile]) -> Result<Vec<&'a RemoteFile>, BadInput> {
    let safetensors = safetensors(files);
    let models = first_parts(files);
    let weights = match (safetensors.as_slice(), models.as_slice()) {
        ([], []) => {
            let fix = format!("name what you want by --include, such as {}", shown(files.iter()));
            let allowed = "weights in safetensors or GGUF at the top of the model";
            return Err(BadInput::new(repository, "none", allowed).with_fix(fix));
        }
        ([], [only]) => parts(files, only),
        ([], several) => return Err(several_models(repository, several)),
        _ => safetensors,
    };
    let beside = |file: &&RemoteFile| is_beside(&file.name);
    Ok(files.iter().filter(beside).chain(weights).collect())
}

/// True for the name of a file that mantissa, or its user, reads beside the weights.
fn is_beside(name: &str) -> bool {
    let lower = name.to_lowercase();
    if TEMPLATES.iter().any(|folder| lower.starts_with(folder)) {
        return true;
    }
    let ends = BESIDE.iter().any(|ending| lower.ends_with(ending));
    !lower.contains('/') && (ends || LICENCES.iter().any(|start| lower.starts_with(start)))
}

/// Lists the safetensors files at the top: without Mistral's second copy, and without variants of files that are there.
fn safetensors(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    let stem = |file: &RemoteFile| {
        let stem = file.name.strip_suffix(".safetensors").filter(|stem| !stem.contains('/'));
        stem.map(str::to_owned)
    };
    let all: Vec<&RemoteFile> = files.iter().filter(|file| stem(file).is_some()).collect();
    let is_copy = |file: &&RemoteFile| file.name.starts_with("consolidated");
    // `model.fp16.safetensors` and `model.fp16-00001-of-00002.safetensors` beside `model.safetensors`.
    let is_variant =
        |file: &&RemoteFile| stem(file).is_some_and(|stem| stem.contains(".fp16") || stem.contains(".bf16"));
    let without = |all: Vec<&'_ RemoteFile>, drop: &dyn Fn(&&RemoteFile) -> bool| -> Vec<usize> {
        let kept: Vec<usize> = (0..all.len()).filter(|&i| !drop(&all[i])).collect();
        if kept.is_empty() { (0..all.len()).collect() } else { kept }
    };
    let kept: Vec<&RemoteFile> = without(all.clone(), &is_copy).into_iter().map(|i| all[i]).collect();
    without(kept.clone(), &is_variant).into_iter().map(|i| kept[i]).collect()
}

/// Lists the first parts of the GGUF models, as a snapshot's are listed.
fn first_parts(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    files.iter().filter(|file| hub::is_first_part(&file.name) && file.name.split('/').count() <= 2).collect()
}

/// Chooses the GGUF file, with all its parts, that `tag` names in a snapshot too.
fn of_tag<'a>(repository: &str, files: &'a [RemoteFile], tag: &str) -> Result<Vec<&'a RemoteFile>, BadInput> {
    let models = first_parts(files);
    let names: Vec<&str> = models.iter().map(|file| file.name.as_str()).collect();
    match hub::tagged(&names, tag) {
        Some(found) => Ok(parts(files, models[found])),
        None if models.is_empty() => {
            let fix = format!("mantissa pull {repository}");
            Err(BadInput::new(repository, "no GGUF file", "GGUF files").with_fix(fix))
        }
        None => {
            let place = format!("{repository}:{tag}");
            let fix = format!("take one of {}", shown(models.iter().copied()));
            Err(BadInput::new(place, "no file of that name", "a part of the name of a GGUF file")
                .with_fix(fix))
        }
    }
}

/// Lists the files of the GGUF model that begins with `first`.
fn parts<'a>(files: &'a [RemoteFile], first: &'a RemoteFile) -> Vec<&'a RemoteFile> {
    let Some((stem, end)) = first.name.split_once("-00001-of-") else { return vec![first] };
    let is_part = |file: &&RemoteFile| {
        let number =
            || file.name.strip_prefix(stem)?.strip_prefix('-')?.strip_suffix(end)?.strip_suffix("-of-");
        number().is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    files.iter().filter(is_part).collect()
}

fn several_models(repository: &str, models: &[&RemoteFile]) -> BadInput {
    let found = format!("{} GGUF files: {}", models.len(), shown(models.iter().copied()));
    let tag = models.iter().find_map(|file| hub::tag_of(&file.name));
    let such = tag.unwrap_or_else(|| "Q4_K_M".to_owned());
    let fix = format!("name one, such as mantissa pull {repository}:{such}");
    BadInput::new(repository, found, "one GGUF model").with_fix(fix)
}

/// Names files with their sizes.
fn shown<'a>(files: impl Iterator<Item = &'a RemoteFile>) -> String {
    let mut names: Vec<String> = files
        .map(|file| {
            let name = escape::line(&file.name);
            file.size.map_or_else(|| name.clone(), |size| format!("{name} ({})", bytes(size)))
        })
        .collect();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", names.join(", "))
}

/// Completes the pattern of a folder, as `huggingface_hub` does.
fn whole(pattern: &str) -> String {
    if pattern.ends_with('/') { format!("{pattern}*") } else { pattern.to_owned() }
}

/// True if `name` matches `pattern` by the rules of Python's `fnmatch`: `*` stands for any characters, `/` among them, `?`
/// for one, and `[a-c]` and `[!x]` for one of a set.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where to continue if what follows the last `*` does not match: that `*`, and the end of what it stands for.
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        let after = match pattern.get(p) {
            Some('*') => {
                back = Some((p, n));
                p += 1;
                continue;
            }
            Some(_) => one(&pattern[p..], name[n]),
            None => None,
        };
        match (after, back) {
            (Some(length), _) => (p, n) = (p + length, n + 1),
            (None, Some((star, end))) => {
                back = Some((star, end + 1));
                (p, n) = (star + 1, end + 1);
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Returns the length of the first item of a pattern if it stands for `c`.
fn one(pattern: &[char], c: char) -> Option<usize> {
    let plain = |matched: bool, length| matched.then_some(length);
    if pattern[0] != '[' {
        return plain(pattern[0] == '?' || pattern[0] == c, 1);
    }
    let negated = pattern.get(1) == Some(&'!');
    let start = if negated { 2 } else { 1 };
    // A bracket that comes first is one of the set.
    let end = (start + 1..pattern.len()).find(|&i| pattern[i] == ']');
    let Some(end) = end else { return plain(c == '[', 1) };
    let (mut i, mut is_member) = (start, false);
    while i < end {
        if i + 2 < end && pattern[i + 1] == '-' {
            is_member |= (pattern[i]..=pattern[i + 2]).contains(&c);
            i += 3;
        } else {
            is_member |= pattern[i] == c;
            i += 1;
        }
    }
    plain(is_member != negated, end + 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RemoteFile> {
        let file = |name: &&str| RemoteFile { name: (*name).to_owned(), size: Some(7), hash: None };
        names.iter().map(file).collect()
    }

    fn chosen(names: &[&str], include: &[&str], tag: Option<&str>) -> Result<Vec<String>, String> {
        let (files, include) = (files(names), include.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>());
        let selection = select("org/m", &files, &include, tag).map_err(|error| error.to_string())?;
        assert_eq!(selection.chosen.len() + selection.left_out.len(), files.len());
        let mut names: Vec<String> = selection.chosen.iter().map(|file| file.name.clone()).collect();
        names.sort();
        Ok(names)
    }

    #[test]
    fn a_model_is_its_weights_in_one_format_and_what_is_read_beside_them() {
        let all = [
            ".gitattributes",
            "LICENSE",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "flax_model.msgpack",
            "chat_template.jinja",
            "merges.txt",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "modeling_x.py",
            "onnx/model.onnx",
            "onnx/config.json",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "tokenizer.model",
            "training_args.bin",
        ];
        let expected = [
            "LICENSE",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "merges.txt",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.model",
        ];
        assert_eq!(chosen(&all, &[], None).unwrap(), expected);
        let only_copy = chosen(&["consolidated.safetensors", "params.json"], &[], None).unwrap();
        assert_eq!(only_copy, ["consolidated.safetensors", "params.json"]);
        let variants = chosen(&["model.fp16.safetensors", "model.safetensors"], &[], None).unwrap();
        assert_eq!(variants, ["model.safetensors"]);
        let none = chosen(&["config.json", "pytorch_model.bin"], &[], None).unwrap_err();
        assert!(
            none.contains("expected weights in safetensors or GGUF") && none.contains("pytorch_model.bin"),
            "{none}"
        );
    }

    #[test]
    fn a_tag_chooses_one_gguf_model_with_all_its_parts() {
        let all = [
            "README.md",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m-f16.gguf",
            "mmproj-m-f16.gguf",
            "Q8_0/m-Q8_0-00001-of-00002.gguf",
            "Q8_0/m-Q8_0-00002-of-00002.gguf",
            "UD/deep/m-Q2_K.gguf",
        ];
        let tag = |tag: &str| chosen(&all, &[], Some(tag));
        assert_eq!(tag("q4_k_m").unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(tag("F16").unwrap(), ["m-f16.gguf"]);
        assert_eq!(
            tag("Q8_0").unwrap(),
            ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]
        );
        let missing = tag("Q2_K").unwrap_err();
        assert!(missing.contains("org/m:Q2_K") && missing.contains("m-Q4_K_S.gguf (7 B)"), "{missing}");
        let several = chosen(&all, &[], None).unwrap_err();
        assert!(
            several.contains("got 4 GGUF files") && several.contains("mantissa pull org/m:Q4_K_M"),
            "{several}"
        );
        let one = chosen(&["README.md", "m.gguf", "mmproj-m.gguf"], &[], None).unwrap();
        assert_eq!(one, ["README.md", "m.gguf"]);
    }

    #[test]
    fn patterns_take_what_they_name() {
        let all = ["a.json", "onnx/b.json", "c.bin"];
        assert_eq!(chosen(&all, &["*.json"], None).unwrap(), ["a.json", "onnx/b.json"]);
        assert_eq!(chosen(&all, &["onnx/", "c.*"], None).unwrap(), ["c.bin", "onnx/b.json"]);
        let none = chosen(&all, &["x*"], None).unwrap_err();
        assert!(none.contains("none of which matches x*") && none.contains("a.json (7 B)"), "{none}");
        for (pattern, name, expected) in [
            ("*", "a/b", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("?.j", "a.j", true),
            ("?.j", ".j", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]", "]", true),
            ("[x", "[x", true),
            ("", "", true),
            ("", "a", false),
            ("**a", "bba", true),
            ("a", "A", false),
            ("[a-]", "-", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        // No pattern takes time that grows with a power of the name.
        assert!(!matches(&"*a".repeat(200), &"a".repeat(1000).replacen('a', "b", 999)));
    }

    #[test]
    fn no_name_leaves_the_model() {
        for hostile in [
            "../x.json",
            "/etc/x.json",
            "a/../../x.json",
            "a//x.json",
            "./x.json",
            "a\\..\\x.json",
            "x\n.json",
            "a/./x.json",
            "",
        ] {
            let error = chosen(&[hostile, "model.safetensors"], &["*"], None).unwrap_err();
            assert!(error.contains("expected a relative path inside the model"), "{hostile}: {error}");
        }
        // What is not chosen does no harm.
        assert!(chosen(&["../x.bin", "model.safetensors"], &[], None).is_ok());
        assert!(is_inside("a/b..c/...json") && !is_inside(&"a/".repeat(1000)));
    }
}
