//! Dates in `strftime` format, in UTC.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats the current time.
///
/// # Errors
/// Names the unknown directive.
pub(super) fn now(format: &str) -> Result<String, String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(format, since.as_secs())
}

/// Formats seconds since 1970.
///
/// # Errors
/// As [`now`].
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[((days + 4) % 7) as usize]);
    let hour = second / 3600;
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // Writing to a string cannot fail.
        let _ = match rest.next() {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{:03}", days - days_before(year) + 1),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(out, "{:02}", second / 60 % 60),
            Some('S') => write!(out, "{:02}", second % 60),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{:02}:{:02}", second / 60 % 60, second % 60),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') => write!(out, "%"),
            other => {
                let name = other.map_or(String::new(), String::from);
                return Err(format!(
                    "strftime_now: expected one of %Y %y %m %B %b %d %e %j %A %a %H %I %p %M %S %F %T %Z %z %%, got %{name}"
                ));
            }
        };
    }
    Ok(out)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Days from 1970-01-01 to the first day of `year`, by the rule of the Gregorian calendar.
fn days_before(year: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

/// Year, month and day (both from 1) of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, usize, u64) {
    // No year is longer than 366 days, so this is at most the year, and little before it.
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut left = days - days_before(year);
    for month in 1..=12 {
        let length = match month {
            2 => 28 + u64::from(is_leap(year)),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 Thu 001"),
            (951_782_400, "2000-02-29 Tue 060"),
            (951_868_800, "2000-03-01 Wed 061"),
            (1_735_689_599, "2024-12-31 Tue 366"),
            (1_735_689_600, "2025-01-01 Wed 001"),
            (4_107_542_400, "2100-03-01 Mon 060"),
        ] {
            assert_eq!(strftime("%F %a %j", seconds).unwrap(), text);
        }
        let noon = 1_735_689_600 + 12 * 3600 + 5 * 60 + 9;
        assert_eq!(strftime("%d %b %Y %B %e %y %A", noon).unwrap(), "01 Jan 2025 January  1 25 Wednesday");
        assert_eq!(
            strftime("%H:%M:%S %I %p %T %Z%z %%", noon).unwrap(),
            "12:05:09 12 PM 12:05:09 UTC+0000 %"
        );
        assert_eq!(strftime("%I %p", 1_735_689_600).unwrap(), "12 AM");
        for bad in ["%", "%Q", "%1000000000d"] {
            assert!(strftime(bad, 0).is_err(), "{bad}");
        }
    }
}
