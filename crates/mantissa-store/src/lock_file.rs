//! Text of a lock file: the process that holds it, since when, and for what.

use std::fs::File;
use std::io::{Read, Seek};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// First word of a lock file, which distinguishes it from other files.
const WORD: &str = "mantissa-lock";

/// Name in the file name of a lock inside a folder: `.run.mantissa-lock`.
pub(crate) const INSIDE: &str = "run";

/// Longest lock file read, in bytes.
const MAX_LOCK: u64 = 256;

/// Number and distance of the reads of a lock file until it names the process that holds it.
const OWNER_TRIES: u32 = 20;
const OWNER_WAIT: Duration = Duration::from_millis(5);

/// Subject of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Output beside the lock, which appears complete.
    Output,
    /// Folder of a training run beside the lock, in which other files may be written.
    Run,
    /// Folder of a training run that the lock lies in.
    Inside,
}

impl Holder {
    fn word(self) -> &'static str {
        match self {
            Holder::Output => "output",
            Holder::Run => "run",
            Holder::Inside => "inside",
        }
    }

    /// Subject of the lock file with this text. Files of earlier versions do not tell it.
    pub(crate) fn of(text: &str) -> Self {
        let word = text.split_whitespace().nth(3);
        let is = |holder: &Holder| word == Some(holder.word());
        [Holder::Run, Holder::Inside].into_iter().find(is).unwrap_or(Holder::Output)
    }
}

/// Text of a lock file that this process holds.
pub(crate) fn text(holder: Holder) -> String {
    format!("{WORD} {} {} {}\n", std::process::id(), now(), holder.word())
}

/// True if a file with this text is a lock file: ours, or one that is not written yet.
pub(crate) fn is_lock(text: &str) -> bool {
    text.is_empty() || text.starts_with(WORD)
}

/// True if this process wrote the text.
pub(crate) fn is_own(text: &str) -> bool {
    text.split_whitespace().nth(1) == Some(&*std::process::id().to_string())
}

/// Text of an open lock file.
pub(crate) fn text_of(file: &mut File) -> String {
    let mut bytes = Vec::new();
    let read = file.rewind().and_then(|()| file.take(MAX_LOCK).read_to_end(&mut bytes));
    // Treat an unreadable file as foreign. A power cut may leave zeros in place of the owner.
    let text = || String::from_utf8_lossy(&bytes).trim_start_matches('\0').to_owned();
    read.map_or_else(|_| "?".to_owned(), |_| text())
}

/// Owner for messages. Waits briefly for one that has just taken the lock to write its name.
pub(crate) fn owner_of(file: &mut File, mut text: String) -> String {
    for _ in 0..OWNER_TRIES {
        if !text.is_empty() {
            break;
        }
        sleep(OWNER_WAIT);
        text = text_of(file);
    }
    owner(&text)
}

/// Owner for messages: process id and start.
pub(crate) fn owner(text: &str) -> String {
    let mut words = text.split_whitespace().skip(1);
    match (words.next(), words.next().and_then(|seconds| seconds.parse().ok())) {
        (Some(pid), Some(start)) => format!("{pid} (started {})", utc(start)),
        _ => "of unknown id".to_owned(),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Date and time of seconds since 1970, such as `2026-11-22 21:04:09 UTC`. Days to a date as in Howard Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms", `civil_from_days`.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let m = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * m + 2) / 5 + 1;
    let month = if m < 10 { m + 3 } else { m - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_795_381_449), "2026-11-22 21:04:09 UTC");
    }

    #[test]
    fn a_lock_tells_its_subject() {
        for holder in [Holder::Output, Holder::Run, Holder::Inside] {
            let text = text(holder);
            assert!(is_lock(&text) && is_own(&text) && Holder::of(&text) == holder, "{text}");
        }
        assert_eq!(Holder::of("mantissa-lock 12 34"), Holder::Output);
        assert!(!is_own("mantissa-lock 0 34") && !is_lock("shopping list"));
    }
}
