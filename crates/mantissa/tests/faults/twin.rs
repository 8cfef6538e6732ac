//! Runs two processes of one command together: one works and the other is refused with its process id, or
//! they run one after the other.

use std::fs;
use std::process::{Child, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::harness::{Figures, Pace, Room, Scenario, spread};
use crate::support::stderr;
use crate::tree;

/// Runs the command twice at once; returns tries and failures.
pub fn twins(room: &Room, scenario: &Scenario, pace: Pace) -> Figures {
    let mut figures = Figures::default();
    for round in 0..pace.together {
        room.reset(&scenario.start);
        let children = [start(room, scenario, None), start(room, scenario, None)];
        let pids = [children[1].id(), children[0].id()];
        let outputs = children.map(|child| child.wait_with_output().unwrap());
        let mut wrong: Vec<_> =
            outputs.iter().zip(pids).filter_map(|(output, other)| refused(output, other, false)).collect();
        if outputs.iter().all(|output| output.status.code() != Some(0)) {
            wrong.push("neither has done it".to_owned());
        }
        wrong.extend(room.state(scenario, false, true));
        wrong.extend(after(room, scenario));
        figures.count(&format!("together, round {round}"), wrong);
    }
    for at in spread((0..scenario.changes.len()).collect(), pace.stops) {
        let wrong = beside_stopped(room, scenario, at);
        figures.count(&format!("beside one stopped before change {at} ({})", scenario.changes[at]), wrong);
    }
    figures
}

/// Runs the second process from start to end while the first is stopped.
fn beside_stopped(room: &Room, scenario: &Scenario, at: usize) -> Vec<String> {
    room.reset(&scenario.start);
    let mut first = start(room, scenario, Some(at));
    if !stopped(&mut first) {
        return vec!["has not stopped".to_owned()];
    }
    let second = start(room, scenario, None).wait_with_output().unwrap();
    // The first holds the lock, but has not written its identity yet.
    let change = &scenario.changes[at];
    let unnamed = change.contains(".mantissa-") && change.contains("lock") && !change.starts_with("create");
    let mut wrong: Vec<String> = refused(&second, first.id(), unnamed).into_iter().collect();
    signal(&first, "CONT");
    let pid = first.id();
    let first = first.wait_with_output().unwrap();
    // The second may finish before the first takes its lock; the first then writes the same output again.
    if first.status.code() != Some(0) {
        wrong.push(format!("the first, {pid}: {}: {}", first.status, stderr(&first).trim()));
    }
    wrong.extend(room.state(scenario, false, true));
    wrong.extend(after(room, scenario));
    wrong
}

/// Checks that both are done: the outputs exist and nothing else.
fn after(room: &Room, scenario: &Scenario) -> Option<String> {
    let difference = tree::difference(&room.found(), &scenario.end);
    (!difference.is_empty()).then(|| format!("after both: {difference}"))
}

fn start(room: &Room, scenario: &Scenario, stop: Option<usize>) -> Child {
    let mut command = room.command(&scenario.arguments);
    if let Some(at) = stop {
        command.env("MANTISSA_FAULT", format!("stop:{at}"));
    }
    // Nobody reads while the process is waited for: a pipe that is full (64 KiB) would hold it before it stops.
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns what is wrong with a process's end next to `other`.
fn refused(output: &Output, other: u32, unnamed: bool) -> Option<String> {
    let line = stderr(output);
    match output.status.code() {
        Some(0) => None,
        Some(3) if line.starts_with("error: ") && line.contains(&format!("process {other} ")) => None,
        Some(3) if line.contains("process of unknown id ") && unnamed => None,
        _ => Some(format!("beside process {other}: {}: {}", output.status, line.trim())),
    }
}

/// Waits until a process is stopped; false if it has ended, or after a minute.
pub fn stopped(child: &mut Child) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(60) {
        let state = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        if state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        sleep(Duration::from_millis(1));
    }
    false
}

pub fn signal(child: &Child, name: &str) {
    let sent =
        std::process::Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}
