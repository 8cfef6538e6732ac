//! Usage errors: clap's message on one line, with what stands for flags and commands of other programs.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use mantissa_jobs::escape::quoted;
use mantissa_quant::Recipe;

use crate::app::NAME;
use crate::foreign;

/// Returns clap's message and the tips that help, without its usage paragraph, and the help page of the command of `program`.
pub fn line(error: &clap::Error, arguments: &[OsString], program: &Command) -> String {
    let here = stands_for(error, arguments, program);
    let rendered = error.render().to_string();
    let paragraphs = rendered.trim().strip_prefix("error: ").unwrap_or(&rendered).split("\n\n");
    let kept = paragraphs.filter(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"));
    // Letters such as `-ngl` give an option of one letter a second time.
    let is_cluster = here.is_some() && error.kind() == ErrorKind::ArgumentConflict;
    let mut kept: Vec<String> = kept
        .filter(|p| !(is_cluster && p.ends_with(TWICE)))
        .map(|p| {
            let lines = p.split('\n').map(str::trim).filter(|l| !l.is_empty() && shows(l, here.is_some()));
            lines.map(plain).collect::<Vec<_>>().join(" ")
        })
        .filter(|paragraph| !paragraph.is_empty())
        .collect();
    if let Some((typed, here)) = here {
        let told = format!("what other programs call {typed} is here {here}");
        // What clap made of letters such as `-ngl` matters less than what was meant.
        let at = if error.kind() == ErrorKind::UnknownArgument { kept.len() } else { 0 };
        kept.insert(at.min(kept.len()), told);
    }
    // The word after an unknown command may be one by chance, such as `demo`.
    let help = || match error.kind() {
        ErrorKind::InvalidSubcommand => format!("{} --help", program.get_name()),
        _ => help_of(arguments, program),
    };
    let fix = in_order(error, arguments, program)
        .or_else(|| with_command(error, arguments, program))
        .or_else(|| with_option(error, arguments, program))
        .unwrap_or_else(help);
    format!("{}; fix: {fix}", kept.join("; "))
}

/// End of clap's message about an option that is given twice.
const TWICE: &str = "cannot be used multiple times";

/// Returns the line of `llama-cli`, which has no commands, as one of `run`: options of a model or a prompt, or a model's path,
/// stand in the place of the command; `None` for other lines.
fn with_command(error: &clap::Error, arguments: &[OsString], program: &Command) -> Option<String> {
    const OPTIONS: [&str; 6] = ["-m", "--model", "-p", "--prompt", "-hf", "-i"];
    let is_path = |word: &str| word.ends_with(".gguf") || word.contains('/');
    let runs = match error.kind() {
        ErrorKind::UnknownArgument if named(arguments, program).is_none() => {
            arguments.iter().any(|word| OPTIONS.iter().any(|option| word == option))
        }
        ErrorKind::InvalidSubcommand => arguments.get(1).and_then(|word| word.to_str()).is_some_and(is_path),
        _ => false,
    };
    let rest = arguments.get(1..).filter(|_| runs)?;
    let words = || [program.get_name(), "run"].map(OsString::from).into_iter().chain(rest.iter().cloned());
    // The model may stand after the command as well, where this reads it.
    let tried = words().filter(|word| !["-m", "--model", "-hf"].iter().any(|option| word == option));
    match program.clone().try_get_matches_from(tried) {
        Ok(_) => Some(words().map(|word| quoted(word.as_ref())).collect::<Vec<_>>().join(" ")),
        Err(_) => Some(format!("{NAME} run --help")),
    }
}

/// Returns the command with an option before the word that it does not expect: a second model, data to train on, or options of
/// an engine, which a colon joins to its name; `None` for other words.
fn with_option(error: &clap::Error, arguments: &[OsString], program: &Command) -> Option<String> {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument || typed.starts_with('-') {
        return None;
    }
    let command = named(arguments, program)?.get_name();
    let at = arguments.iter().skip(1).position(|word| word == &**typed)? + 1;
    let mut words: Vec<String> = arguments.iter().skip(1).map(|word| quoted(word.as_ref())).collect();
    let of_engine = at > 2 && arguments[at - 2] == "--for" && typed.contains('=');
    if of_engine {
        let joined = format!("{}:{}", arguments[at - 1].to_str()?, typed);
        words.splice(at - 2..at, [quoted(joined.as_ref())]);
    } else {
        words.insert(at - 1, foreign::option_of_word(command)?.to_owned());
    }
    Some(format!("{NAME} {}", words.join(" ")))
}

/// Returns the command with its options for a line in the order of `llama-quantize`: model, output, type, threads; `None` if it
/// is not in that order.
fn in_order(error: &clap::Error, arguments: &[OsString], program: &Command) -> Option<String> {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else { return None };
    // An option that is not known has another fix.
    if typed.starts_with('-') {
        return None;
    }
    let found = named(arguments, program)?;
    let command = found.get_name();
    if error.kind() != ErrorKind::UnknownArgument || !["quantize", "convert"].contains(&command) {
        return None;
    }
    let words: Vec<&str> = arguments.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let (mut line, mut changed, mut models) = (vec![NAME.to_owned()], false, 0);
    for (i, word) in words.iter().enumerate() {
        let is_value = i > 0 && [found, program].iter().any(|of| takes_value(of, words[i - 1]));
        if *word == command || word.starts_with('-') || is_value {
            line.push(quoted(word.as_ref()));
            continue;
        }
        let option = match models {
            0 => None,
            _ if !Recipe::is_file(word) && command == "quantize" && Recipe::load(word).is_ok() => {
                Some("--recipe")
            }
            _ if word.ends_with(".gguf") => Some("--out"),
            _ if word.parse::<u16>().is_ok() => Some("--threads"),
            _ => return None,
        };
        models += 1;
        changed |= option.is_some();
        line.extend(option.map(str::to_owned));
        line.push(quoted(word.as_ref()));
    }
    changed.then(|| line.join(" "))
}

/// True if a line of clap's message helps: not the tip to pass a flag as a value, which nobody means, and no similar name
/// where the one that stands for it is known.
fn shows(line: &str, known: bool) -> bool {
    !line.strip_prefix("tip: ").is_some_and(|tip| known || tip.starts_with("to pass "))
}

/// Finds what stands for a flag or command of another program that the error is about: what was typed, and what it is here.
fn stands_for(
    error: &clap::Error,
    arguments: &[OsString],
    program: &Command,
) -> Option<(String, &'static str)> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let named = named(arguments, program).map_or("", Command::get_name);
    let flag = |typed: String| foreign::flag(named, &typed).map(|here| (typed, here));
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = context(ContextKind::InvalidSubcommand)?;
            foreign::command(&typed).map(|here| (typed, here))
        }
        ErrorKind::UnknownArgument => {
            let typed = context(ContextKind::InvalidArg).filter(|typed| typed.starts_with('-'))?;
            // `-fa` is `-f -a` to clap: what stands for `-f` is not meant.
            let is_part = clustered(arguments).any(|word| word.starts_with(&typed));
            let found = clustered(arguments).find_map(|word| flag(word.to_owned()));
            found.or_else(|| flag(typed).filter(|_| !is_part))
        }
        // `-ngl 99` is `-n gl` to clap.
        ErrorKind::ValueValidation | ErrorKind::InvalidValue | ErrorKind::ArgumentConflict => {
            clustered(arguments).find_map(|word| flag(word.to_owned()))
        }
        _ => None,
    }
}

/// True if `word` is an option of `command` whose value is the next word.
fn takes_value(command: &Command, word: &str) -> bool {
    let is_named = |arg: &&clap::Arg| {
        let long = arg.get_long().is_some_and(|long| word == format!("--{long}"));
        long || arg.get_short().is_some_and(|short| word == format!("-{short}"))
    };
    command.get_arguments().find(is_named).is_some_and(|arg| arg.get_action().takes_values())
}

/// Returns the arguments of one hyphen and several letters, such as `-ngl`, of programs that have such flags.
fn clustered(arguments: &[OsString]) -> impl Iterator<Item = &str> {
    let flags = arguments.iter().take_while(|argument| *argument != "--").filter_map(|word| word.to_str());
    let is_word = |name: &str| name.len() > 1 && name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    flags.filter(move |word| word.strip_prefix('-').is_some_and(|n| !n.starts_with('-') && is_word(n)))
}

/// Rewrites clap's notation and the standard library's number errors in words: `<--a <A>|--b <B>>` becomes
/// `--a <A> or --b <B>`.
fn plain(line: &str) -> String {
    let either = line.strip_prefix('<').and_then(|line| line.strip_suffix('>'));
    if let Some(either) = either.filter(|either| either.contains('|')) {
        return either.split('|').map(|one| one.replace(['<', '>'], "")).collect::<Vec<_>>().join(" or ");
    }
    line.replace("invalid digit found in string", "expected a whole number")
        .replace("invalid float literal", "expected a number")
}

/// Returns the command in `arguments`.
fn named<'a>(arguments: &[OsString], program: &'a Command) -> Option<&'a Command> {
    arguments.iter().skip(1).find_map(|argument| program.find_subcommand(argument))
}

/// Returns the command that prints the help of the command in `arguments`, or of the program.
fn help_of(arguments: &[OsString], program: &Command) -> String {
    let name = program.get_name();
    named(arguments, program)
        .map_or_else(|| format!("{name} --help"), |sub| format!("{name} {} --help", sub.get_name()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::app;

    fn said(text: &str) -> String {
        let arguments: Vec<_> = text.split(' ').map(OsString::from).collect();
        let error = app::command().try_get_matches_from(&arguments).err().unwrap();
        line(&error, &arguments, &app::command())
    }

    #[test]
    fn usage_errors_take_one_line() {
        let line = said("mantissa schemes --jsom");
        assert!(line.ends_with("; fix: mantissa schemes --help"), "{line}");
        assert!(line.starts_with("unexpected argument '--jsom' found") && line.contains("--json"), "{line}");
        assert!(!line.contains('\n') && !line.contains("Usage"), "{line}");
    }

    #[test]
    fn flags_of_other_programs_lead_to_the_ones_here() {
        for (typed, here) in [
            ("quantize a --scheme W4A16", "what other programs call --scheme is here --recipe NAME, "),
            ("quantize a --scheme=W4A16", "--scheme is here --recipe NAME, "),
            ("quantize a --ignore lm_head", "--ignore is here --keep PATTERN"),
            ("quantize a --exclude lm_head", "--exclude is here --keep PATTERN"),
            ("quantize a --method gptq", "--method is here --recipe NAME"),
            ("quantize a --dataset c4", "--dataset is here --calibration TEXT"),
            ("quantize a --num_calibration_samples 4", "is here --samples N"),
            ("run a --num-ctx 512", "--num-ctx is here --context TOKENS"),
            ("run a -ngl 99", "-ngl is here the processor: mantissa uses no GPU"),
            ("serve a -ngl 99", "-ngl is here the processor: mantissa uses no GPU"),
            ("run -m a -p b -n 32 -c 512 --temp 0.7 -ngl 99 -t 2", "-ngl is here the processor"),
            ("run a -fa on", "-fa is here nothing: attention"),
            ("run a -s 42", "-s is here --seed N"),
            ("run a --verbose", "--verbose is here nothing: warnings"),
            ("serve a --temp 0.7", "--temp is here a field of each request"),
            ("serve a --system b", "--system is here a field of each request"),
            ("report a --html b.html", "--html is here --out FILE"),
            ("train --init 8m --out a.toml", "--out is here a redirection"),
            ("run a -p b -cnv", "-cnv is here --interactive"),
            ("serve a --max_model_len 512", "--max_model_len is here --context TOKENS"),
            ("train --wandb", "--wandb is here --tensorboard DIR"),
            ("train --policy bf16", "--policy is here --set precision.policy=NAME"),
            ("train --config a.toml", "--config is here the first argument: mantissa train run.toml"),
            ("plan a --gpu h100", "--gpu is here --hardware NAME"),
            ("convert a --recipe nf4", "--recipe is here --requantize SCHEME"),
            ("compare a --task cloze", "--task is here mantissa eval OUTPUT --reference MODEL --task NAME"),
            ("finetune a --qlora", "--qlora is here --adapter qlora, the default"),
            ("imatrix a --text b", "--text is here --calibration TEXT"),
            ("distill a --recipe nvfp4", "--recipe is here --scheme SCHEME"),
            ("compare a --kv int8-head", "--kv is here mantissa eval MODEL --kv SCHEME"),
            ("ps", "ps is here GET /api/ps of mantissa serve"),
            ("chat a", "chat is here mantissa run MODEL --interactive"),
            ("sensitivity demo", "sensitivity is here mantissa fit MODEL --budget 4.5bpw --text TEXT"),
            ("list", "list is here no command: models lie in the Hugging Face cache"),
        ] {
            let line = said(&format!("mantissa {typed}"));
            assert!(line.contains(here), "{typed}: {line}");
            assert!(!line.contains("tip:") && !line.contains("to pass "), "{typed}: {line}");
        }
    }

    #[test]
    fn what_was_meant_comes_before_what_was_understood() {
        let line = said("mantissa run a -ngl 99");
        assert!(line.starts_with("what other programs call -ngl is here the processor"), "{line}");
        // The help is that of the program, not of a word that is a command by chance.
        let line = said("mantissa sensitivity demo");
        assert!(line.ends_with("; fix: mantissa --help"), "{line}");
    }

    #[test]
    fn letters_that_clap_took_apart_are_not_told() {
        let line = said("mantissa run a -n 32 -ngl 99");
        assert!(!line.contains("multiple times"), "{line}");
        let line = said("mantissa run a -n 32 -n 33");
        assert!(line.contains("multiple times") && !line.contains("other programs"), "{line}");
        let line = said("mantissa run a -fzz on");
        assert!(!line.contains("other programs"), "{line}");
    }

    #[test]
    fn a_line_without_its_command_or_option_gets_it() {
        for (typed, fix) in [
            ("-m a.gguf -p b", "run -m a.gguf -p b"),
            ("a.gguf -p b", "run a.gguf -p b"),
            ("path/to/model", "run path/to/model"),
            ("-m a.gguf --nothing", "run --help"),
            ("verify a b", "verify a --reference b"),
            ("lint a b --for vllm", "lint a --reference b --for vllm"),
            ("lint fp8 --for vllm gpu=a100", "lint fp8 --for vllm:gpu=a100"),
            ("plan a --for vllm tp=2,gpu=a100 --quiet", "plan a --for vllm:tp=2,gpu=a100 --quiet"),
            ("finetune demo data.jsonl --out x", "finetune demo --data data.jsonl --out x"),
            ("inspect a b", "inspect --help"),
        ] {
            let line = said(&format!("mantissa {typed}"));
            assert!(line.ends_with(&format!("; fix: mantissa {fix}")), "{line}");
            assert!(!line.contains("other programs"), "{line}");
        }
    }

    #[test]
    fn usual_names_are_taken_as_they_are() {
        for line in ["run a --temp 0.5", "run a --ctx-size 512", "serve a --ctx-size 512", "run a -t 4 -p b"]
        {
            let arguments = format!("mantissa {line}");
            assert!(app::command().try_get_matches_from(arguments.split(' ')).is_ok(), "{line}");
        }
    }

    #[test]
    fn the_order_of_llama_quantize_is_answered_with_options() {
        for (typed, fix) in [
            ("quantize m.gguf out.gguf Q4_K_M", "quantize m.gguf --out out.gguf --recipe Q4_K_M"),
            ("quantize model Q4_K_M", "quantize model --recipe Q4_K_M"),
            (
                "quantize m.gguf out.gguf Q4_K_M 8",
                "quantize m.gguf --out out.gguf --recipe Q4_K_M --threads 8",
            ),
            ("quantize m Q4_K_M --out x.gguf", "quantize m --recipe Q4_K_M --out x.gguf"),
            ("quantize m --threads 2 Q8_0", "quantize m --threads 2 --recipe Q8_0"),
            ("quantize m --quiet x.gguf Q8_0", "quantize m --quiet --out x.gguf --recipe Q8_0"),
            ("convert m.gguf out.gguf", "convert m.gguf --out out.gguf"),
        ] {
            let line = said(&format!("mantissa {typed}"));
            assert!(line.ends_with(&format!("; fix: mantissa {fix}")), "{line}");
        }
        for typed in ["quantize m other", "quantize m --recipee nf4"] {
            let line = said(&format!("mantissa {typed}"));
            assert!(line.ends_with("; fix: mantissa quantize --help"), "{line}");
        }
    }

    #[test]
    fn only_what_is_known_is_told_and_near_names_stay() {
        let line = said("mantissa quantize a --nothing-like-it 1");
        assert!(!line.contains("tip:") && !line.contains("other programs"), "{line}");
        let line = said("mantissa quantize a --recipee nf4");
        assert!(line.contains("similar") && line.contains("'--recipe'"), "{line}");
        // A value that is wrong is no flag of another program.
        let line = said("mantissa run a -n many");
        assert!(line.contains("expected a number of tokens") && !line.contains("other programs"), "{line}");
        let line = said("mantissa quantise a");
        assert!(line.contains("'quantize'"), "{line}");
    }
}
