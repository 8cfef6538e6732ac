//! Help pages: main flags on one line each (`-h`), with the description of the command (`--help`), and every flag
//! with its details (`--help-all`).
//!
//! A flag with `hide_short_help` is advanced: only `--help-all` shows it.

mod pages;

pub use pages::{GlossaryEntry, glossary_entry, stem};

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

use crate::table::{columns_or, wrap};

/// Columns of help that goes to no terminal.
const PIPED: usize = 80;

/// Most columns of help: longer lines are hard to read.
const MOST: usize = 100;

/// Most columns of the names of flags; longer ones have their text on the next line.
const NAMES: usize = 28;

/// Heading of the flags that every command has.
pub const COMMON: &str = "Common options";

/// Group of commands in the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Start,
    Quantize,
    Measure,
    Train,
    Shell,
}

impl Group {
    /// Every group, in the order of the help.
    pub const ALL: [Self; 5] = [Self::Start, Self::Quantize, Self::Measure, Self::Train, Self::Shell];

    /// Returns the heading.
    pub fn heading(self) -> &'static str {
        match self {
            Group::Start => "Start",
            Group::Quantize => "Quantize",
            Group::Measure => "Run, measure, check",
            Group::Train => "Train",
            Group::Shell => "Shell",
        }
    }
}

/// Groups of flags that only `--help-all` shows, by command: they serve another flag that is advanced.
const ADVANCED: [(&str, &str); 2] = [("eval", "Calibration"), ("run", "Calibration")];

/// Returns the flag `--help-all`.
pub fn flag() -> Arg {
    let flag = Arg::new(ALL).long(ALL).action(ArgAction::HelpLong).global(true);
    flag.help("Print every flag with its details").help_heading(COMMON)
}

/// Name of the flag.
const ALL: &str = "help-all";

/// Finds the group of a command.
pub type Grouping = fn(&str) -> Group;

/// Detail of a help page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// One line for each main flag.
    Short,
    /// The description of the command, and one line for each main flag.
    Long,
    /// Every flag with its details.
    All,
}

impl Detail {
    /// Returns the detail that the arguments ask for.
    fn of(arguments: &[OsString]) -> Self {
        let flags = || arguments.iter().skip(1).take_while(|argument| *argument != "--");
        match (flags().any(|flag| flag == "--help-all"), flags().any(|flag| flag == "--help")) {
            (true, _) => Detail::All,
            (_, true) => Detail::Long,
            _ => Detail::Short,
        }
    }
}

/// Turns `help COMMAND` into `COMMAND --help`.
pub fn without_subcommand(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if arguments.get(1).is_some_and(|first| first == "help") {
        arguments.remove(1);
        if !arguments.iter().any(|argument| argument.to_str().is_some_and(is_help)) {
            arguments.push("--help".into());
        }
    }
    arguments
}

/// Returns the page that `mantissa help NAME` asks for, if that is no help of a command.
pub fn page_of(arguments: &[OsString], command: &Command) -> Option<String> {
    let [_, help, name] = arguments else { return None };
    let name = name.to_str().filter(|_| help == "help")?;
    pages::find(name, |name| command.find_subcommand(name).is_some())
}

fn is_help(argument: &str) -> bool {
    ["-h", "--help", "--help-all"].contains(&argument)
}

/// Returns the help page that `arguments` ask `command` for.
pub fn page(command: Command, group: Grouping, arguments: &[OsString]) -> String {
    let detail = Detail::of(arguments);
    let width = columns_or(PIPED).min(MOST);
    let error = with_pages(command, group, detail, width).try_get_matches_from(arguments).err();
    error.map(|error| error.render().to_string()).unwrap_or_default()
}

/// Replaces the help page of `command` and its subcommands.
pub fn with_pages(mut command: Command, group: Grouping, detail: Detail, width: usize) -> Command {
    command.build();
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(name, |mut sub| {
            let text = Page { detail, width, group, command: &mut sub }.text();
            sub.override_help(text)
        });
    }
    let text = Page { detail, width, group, command: &mut command }.text();
    command.override_help(text)
}

/// A help page in the making.
struct Page<'a> {
    detail: Detail,
    width: usize,
    group: Grouping,
    command: &'a mut Command,
}

impl Page<'_> {
    fn text(self) -> String {
        let usage = self.command.render_usage().to_string();
        let mut text = self.description();
        text += "\n";
        text += &hanging(&usage, "Usage: ".len(), self.width);
        text += &self.commands();
        text += &self.flags();
        if let Some(examples) = self.command.get_after_help() {
            text += &format!("\n{}\n", examples.to_string().trim_end());
        }
        text + &self.pointer()
    }

    /// Returns the first line of the description; the whole of it beyond `-h`.
    fn description(&self) -> String {
        let whole = self.command.get_long_about().filter(|_| self.detail != Detail::Short);
        let about = whole.or(self.command.get_about()).map(ToString::to_string).unwrap_or_default();
        wrap(&about, self.width).join("\n") + "\n"
    }

    /// Returns the list of commands in groups.
    fn commands(&self) -> String {
        let shown: Vec<&Command> = self.command.get_subcommands().filter(|sub| !sub.is_hide_set()).collect();
        let longest = shown.iter().map(|sub| sub.get_name().len()).max().unwrap_or(0);
        let mut text = String::new();
        for group in Group::ALL {
            let lines: String = shown
                .iter()
                .filter(|sub| (self.group)(sub.get_name()) == group)
                .map(|sub| {
                    let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
                    entry(sub.get_name(), &about, longest, self.width)
                })
                .collect();
            if !lines.is_empty() {
                text += &format!("\n{}:\n{lines}", group.heading());
            }
        }
        text
    }

    /// Returns the flags in groups, those of every command last.
    fn flags(&self) -> String {
        let mut shown: Vec<&Arg> = self.command.get_arguments().filter(|arg| self.shows(arg)).collect();
        shown.sort_by_key(|arg| ["help", "version", ALL].contains(&arg.get_id().as_str()));
        let mut headings: Vec<&str> = Vec::new();
        for heading in shown.iter().map(|arg| heading(arg)).filter(|heading| *heading != COMMON) {
            if !headings.contains(&heading) {
                headings.push(heading);
            }
        }
        headings.push(COMMON);
        let longest = shown.iter().map(|arg| name(arg).chars().count()).filter(|n| *n <= NAMES).max();
        let mut text = String::new();
        for group in headings {
            text += &format!("\n{group}:\n");
            for arg in shown.iter().filter(|arg| heading(arg) == group) {
                text += &match self.detail {
                    Detail::All => self.detailed(arg),
                    _ => entry(&name(arg), &one_line(arg), longest.unwrap_or(0), self.width),
                };
            }
        }
        text
    }

    fn shows(&self, arg: &Arg) -> bool {
        let group = (self.command.get_name(), heading(arg));
        let advanced = arg.is_hide_short_help_set() || ADVANCED.contains(&group);
        !arg.is_hide_set() && (self.detail == Detail::All || !advanced)
    }

    /// Returns a flag with all that is known about it.
    fn detailed(&self, arg: &Arg) -> String {
        let details = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
        let mut lines = wrap(&details, self.width.saturating_sub(6));
        lines.retain(|line| !line.is_empty());
        let mut facts: Vec<String> = default(arg).into_iter().collect();
        let values: Vec<String> = values(arg);
        if !values.is_empty() {
            facts.push(format!("[possible values: {}]", values.join(", ")));
        }
        lines.extend(
            wrap(&facts.join(" "), self.width.saturating_sub(6)).into_iter().filter(|l| !l.is_empty()),
        );
        let lines: String = lines.iter().map(|line| format!("      {line}\n")).collect();
        format!("  {}\n{lines}", name(arg))
    }

    /// Returns the line that says where more help is.
    fn pointer(&self) -> String {
        let commands = self.command.has_subcommands();
        let of = if commands { "mantissa COMMAND" } else { "" };
        match (self.detail, commands) {
            (_, true) => format!("\n{of} --help describes a command; --help-all lists every flag.\n"),
            (Detail::Short, _) => {
                "\n--help describes the command; --help-all has every flag in detail.\n".into()
            }
            (Detail::Long, _) => "\n--help-all has every flag in detail.\n".into(),
            (Detail::All, _) => String::new(),
        }
    }
}

/// Returns the group of a flag.
fn heading(arg: &Arg) -> &str {
    match arg.get_help_heading() {
        Some(heading) => heading,
        None if ["help", "version"].contains(&arg.get_id().as_str()) => COMMON,
        None if arg.is_positional() => "Arguments",
        None => "Options",
    }
}

/// Returns the name of a flag with its value: `-p, --prompt <TEXT>`.
fn name(arg: &Arg) -> String {
    match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(_)) => format!("-{short}, {arg}"),
        _ => arg.to_string(),
    }
}

/// Returns the short help with the default value.
fn one_line(arg: &Arg) -> String {
    if arg.get_id() == "help" {
        return "Print help; shorter with -h".to_owned();
    }
    let help = arg.get_help().map(ToString::to_string);
    help.into_iter().chain(default(arg)).collect::<Vec<_>>().join(" ")
}

fn default(arg: &Arg) -> Option<String> {
    let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let shown = arg.get_action().takes_values() && !arg.is_hide_default_value_set() && !values.is_empty();
    shown.then(|| format!("[default: {}]", values.join(" ")))
}

/// Returns the names of the values that a flag takes, if they are listed.
fn values(arg: &Arg) -> Vec<String> {
    let listed = arg.get_action().takes_values() && !arg.is_hide_possible_values_set();
    let values = arg.get_possible_values().into_iter().filter(|value| listed && !value.is_hide_set());
    values.map(|value| value.get_name().to_owned()).collect()
}

/// Formats a name and its text, which continues below itself.
fn entry(name: &str, text: &str, longest: usize, width: usize) -> String {
    let start = longest + 4;
    let mut lines = wrap(text, width.saturating_sub(start)).into_iter();
    let mut shown = format!("  {name:<longest$}  ");
    if name.chars().count() > longest {
        shown = format!("  {name}\n{:start$}", "");
    }
    shown += &lines.next().unwrap_or_default();
    let rest: String = lines.map(|line| format!("{:start$}{line}\n", "")).collect();
    format!("{}\n{rest}", shown.trim_end())
}

/// Wraps a text with further lines indented.
fn hanging(text: &str, indent: usize, width: usize) -> String {
    let lines = wrap(text.trim(), width.saturating_sub(indent));
    lines.join(&format!("\n{:indent$}", "")) + "\n"
}
