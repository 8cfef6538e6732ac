//! The little of Markdown that the pages use: headings, links, fenced blocks, comments.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A Markdown file.
pub struct Page {
    pub path: PathBuf,
    pub text: String,
}

/// A fenced block.
pub struct Block {
    /// Line of the opening fence, from 1.
    pub line: usize,
    /// The word behind the opening fence.
    pub language: String,
    pub lines: Vec<String>,
    /// The comments `<!-- docs-test: … -->` in the lines before it.
    pub marks: Vec<String>,
}

impl Page {
    pub fn read(path: &Path) -> Self {
        Page { path: path.to_owned(), text: fs::read_to_string(path).unwrap() }
    }

    /// Gives the fenced blocks in their order.
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut marks = Vec::new();
        let mut lines = self.text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            if let Some(mark) = line.strip_prefix("<!-- docs-test: ") {
                marks.push(mark.strip_suffix(" -->").expect("a comment ends on its line").to_owned());
            } else if let Some(language) = line.strip_prefix("```") {
                let inside = lines.by_ref().map(|(_, line)| line).take_while(|line| !line.starts_with("```"));
                blocks.push(Block {
                    line: number + 1,
                    language: language.trim().to_owned(),
                    lines: inside.map(str::to_owned).collect(),
                    marks: std::mem::take(&mut marks),
                });
            } else {
                assert!(
                    marks.is_empty() || line.is_empty(),
                    "{}: no block behind {marks:?}",
                    self.path.display()
                );
            }
        }
        blocks
    }

    /// Gives the lines outside of fenced blocks, without the code spans in them.
    fn prose(&self) -> Vec<String> {
        let mut fenced = false;
        let mut prose = Vec::new();
        for line in self.text.lines() {
            if line.starts_with("```") {
                fenced = !fenced;
            } else if !fenced {
                prose.push(line.split('`').step_by(2).collect::<Vec<_>>().join("`"));
            }
        }
        prose
    }

    /// Gives the targets of all links and images.
    pub fn links(&self) -> Vec<String> {
        let text = self.prose().join("\n");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.map(|target| target.trim().to_owned()).collect()
    }

    /// Gives the code spans that are paths of files or folders of the tree.
    pub fn paths(&self) -> Vec<String> {
        let spans = self
            .text
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|span| !span.contains(['\n', ' ', '*', '<', '…', 'N']));
        let trees = ["crates/", "docs/", "tests/", "bench/", "fuzz/"];
        spans.filter(|span| trees.iter().any(|tree| span.starts_with(tree))).map(str::to_owned).collect()
    }

    /// Gives the anchors of the headings, as GitHub names them.
    pub fn anchors(&self) -> BTreeSet<String> {
        let mut fenced = false;
        let mut anchors = BTreeSet::new();
        for line in self.text.lines() {
            if line.starts_with("```") {
                fenced = !fenced;
            } else if !fenced && line.starts_with('#') {
                let base = anchor(line.trim_start_matches('#').trim());
                let numbered = (1..).map(|n| format!("{base}-{n}"));
                let name = std::iter::once(base.clone()).chain(numbered).find(|name| !anchors.contains(name));
                anchors.insert(name.unwrap());
            }
        }
        anchors
    }
}

/// GitHub's anchor of a heading: lower case, spaces as hyphens, no punctuation; of a link its text.
fn anchor(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, link)) = rest.split_once("](") {
        text.push_str(before);
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase()
}
