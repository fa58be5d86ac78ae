//! Tests of `socklb agent run` until the backend is announced as ready, and of signals in that
//! time.

use std::fs;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::stage::{IN_PID_NAMESPACE, Run, Stage, eventually, state};

#[test]
fn a_backend_is_announced_once_ready_and_prewarmed() {
    let stage = Stage::new();
    let prewarm = format!("echo test prewarms $SOCKLB_PID >> {}", stage.file("log").display());
    let check = format!("cmd:test -e {}", stage.file("ready").display());
    let _run = stage.start(&["--ready", &check, "--prewarm", &prewarm], &stage.program(&["serve"]));
    stage.until("app takes signals");
    stage.until("reported LameDuck");
    assert_eq!(stage.story(), ["reported LameDuck"]);
    fs::write(stage.file("ready"), "").unwrap();
    stage.until("reported Ready");
    let prewarms = format!("test prewarms {}", stage.application());
    assert_eq!(stage.story(), ["reported LameDuck", &prewarms, "reported Ready"]);
}

#[test]
fn a_failing_agent_does_not_stop_the_application_and_receives_the_report_later() {
    let stage = Stage::new();
    fs::write(stage.file("broken"), "").unwrap();
    let mut run = stage.start(&[], &stage.program(&["serve"]));
    stage.until("app takes signals");
    stage.dial();
    fs::remove_file(stage.file("broken")).unwrap();
    stage.until("reported Ready");
    fs::write(stage.file("broken"), "").unwrap();
    // The agent receives no report, but `socklb agent run` ends.
    run.signal(Signal::TERM);
    assert_eq!(run.end().code(), Some(0));
}

#[test]
fn other_signals_are_passed_on() {
    let stage = Stage::new();
    let run = stage.serve(&[], &[]);
    passes_signals_on(&stage, run.pid());
}

/// In the PID namespace, the process group of `socklb agent run` has no number, but the command's
/// group has one.
#[test]
fn the_first_process_of_a_pid_namespace_passes_signals_on() {
    let stage = Stage::new();
    let program = stage.program(&["run", "--"]).into_iter().chain(stage.program(&["serve"]));
    let mut run = Run::start(Command::new(IN_PID_NAMESPACE[0]).args(&IN_PID_NAMESPACE[1..]).args(program));
    stage.until("app takes signals");
    stage.until("reported Ready");
    let first = run.descendants()[0];
    passes_signals_on(&stage, first);
    kill_process(first, Signal::TERM).expect("the first process runs");
    run.end();
}

fn passes_signals_on(stage: &Stage, run: Pid) {
    for (signal, name) in
        [(Signal::HUP, "HUP"), (Signal::USR1, "USR1"), (Signal::USR2, "USR2"), (Signal::WINCH, "WINCH")]
    {
        kill_process(run, signal).expect("the process has not ended");
        stage.until(&format!("app got {name}"));
    }
    // rustix has no real-time signals.
    let kill =
        |number: &str| Command::new("/bin/sh").args(["-c", number]).status().expect("the shell starts");
    assert!(kill(&format!("kill -37 {run}")).success());
    stage.until("app got 37");
}

#[test]
fn a_stopped_application_is_down_until_it_continues() {
    let stage = Stage::new();
    let run = stage.serve(&[], &[]);
    let application = stage.application();
    run.signal(Signal::TSTP);
    eventually("the application is stopped", || state(application), |state| *state == Some('T'));
    stage.until("reported Down");
    run.signal(Signal::CONT);
    eventually("the application continues", || state(application), |state| *state == Some('S'));
    eventually(
        "the backend is reported as ready again",
        || stage.story(),
        |story| story.last().is_some_and(|entry| entry == "reported Ready"),
    );
}

#[test]
fn the_command_ignores_signals_that_the_run_was_started_to_ignore() {
    let stage = Stage::new();
    let program = stage.program(&["run", "--", "/bin/grep", "SigIgn", "/proc/self/status"]);
    let output = Command::new("/usr/bin/nohup").args(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mask = u64::from_str_radix(text.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    assert_eq!(mask & 1, 1, "{text}");
}

#[test]
fn the_command_has_the_sigpipe_disposition_of_the_run() {
    let stage = Stage::new();
    let words: Vec<String> = stage
        .program(&["run", "--", "/bin/grep", "SigIgn", "/proc/self/status"])
        .iter()
        .map(|word| format!("'{}'", word.to_string_lossy()))
        .collect();
    for (trap, is_ignored) in [("trap '' PIPE", true), ("trap - PIPE", false)] {
        let line = format!("{trap}; exec {}", words.join(" "));
        let output = Command::new("/bin/sh").args(["-c", &line]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mask = u64::from_str_radix(text.trim_start_matches("SigIgn:").trim(), 16).unwrap();
        assert_eq!(mask >> 12 & 1 == 1, is_ignored, "{trap}: {text}");
    }
}

#[test]
fn systemds_variables_apply_to_the_command() {
    let stage = Stage::new();
    let run = stage.program(&["run", "--", "/bin/sh", "-c", "echo $$ $LISTEN_PID $WATCHDOG_PID; cat <&3"]);
    let words: Vec<String> = run.iter().map(|word| format!("'{}'", word.to_string_lossy())).collect();
    fs::write(stage.file("socket"), "passed").unwrap();
    let line = format!(
        "exec 3<{}; LISTEN_FDS=1 LISTEN_PID=$$ WATCHDOG_USEC=1 WATCHDOG_PID=$$ exec {}",
        stage.file("socket").display(),
        words.join(" ")
    );
    let output = Command::new("/bin/sh").args(["-c", &line]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (numbers, rest) = text.split_once('\n').unwrap();
    let numbers: Vec<&str> = numbers.split(' ').filter(|number| !number.is_empty()).collect();
    assert_eq!((numbers.len(), rest), (2, "passed"), "{text}");
    assert_eq!(numbers[0], numbers[1]);
}
