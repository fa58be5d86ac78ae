//! Tests of the shutdown of `socklb agent run`, from SIGTERM to its end.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use rustix::process::Signal;

use super::stage::{Stage, within};

/// Longer than a shutdown without clients takes: a second more than `lifecycle::SETTLE`.
const LONG: Duration = Duration::from_millis(4200);

#[test]
fn shutdown_waits_for_a_connection_in_use() {
    let stage = Stage::new();
    let mut run = stage.serve(&["--idle", "150s", "--grace", "150s", "--on-lame-duck", "USR1"], &[]);
    let client = stage.dial();
    run.signal(Signal::TERM);
    stage.until("app got USR1");
    let is_notified = |story: &Vec<String>| story.iter().any(|line| line == "app got TERM");
    assert!(within(LONG, || stage.story(), is_notified).is_err());
    stage.write("test closes");
    drop(client);
    assert_eq!(run.end().code(), Some(0));
    // The agent and the application are notified in no fixed order.
    let story = stage.story();
    assert_eq!(story[..2], ["reported LameDuck", "reported Ready"]);
    let mut notified = story[2..4].to_vec();
    notified.sort();
    assert_eq!(notified, ["app got USR1", "reported LameDuck"]);
    assert_eq!(story[4..], ["test closes", "app got TERM"]);
}

#[test]
fn shutdown_does_not_wait_for_an_idle_connection() {
    let stage = Stage::new();
    let lame = format!("kill -USR2 $SOCKLB_PID; touch {}", stage.file("lame").display());
    let mut run = stage.serve(&["--idle", "100ms", "--grace", "150s", "--on-lame-duck", &lame], &[]);
    let _client = stage.dial();
    run.signal(Signal::INT);
    assert_eq!(run.end().code(), Some(0));
    assert!(stage.file("lame").exists());
    // The application receives the signal that requested the end.
    assert_eq!(stage.story().last().unwrap(), "app got INT");
    assert!(stage.story().contains(&"app got USR2".to_owned()));
}

#[test]
fn shutdown_waits_for_clients_that_have_not_acknowledged() {
    let stage = Stage::new();
    let mut run = stage.serve(&[], &[]);
    fs::write(stage.file("unheard"), "").unwrap();
    run.signal(Signal::TERM);
    let is_notified = |story: &Vec<String>| story.iter().any(|line| line == "app got TERM");
    assert!(within(LONG, || stage.story(), is_notified).is_err());
    fs::remove_file(stage.file("unheard")).unwrap();
    assert_eq!(run.end().code(), Some(0));
    assert_eq!(stage.story(), ["reported LameDuck", "reported Ready", "reported LameDuck", "app got TERM"]);
}

#[test]
fn the_grace_bounds_the_wait_and_a_stubborn_application_is_killed() {
    let stage = Stage::new();
    let options = ["--idle", "150s", "--grace", "10s", "--kill-after", "200ms"];
    let mut run = stage.serve(&options, &["--stubborn"]);
    let _client = stage.dial();
    run.signal(Signal::TERM);
    assert_eq!(run.end().signal(), Some(9));
    assert_eq!(stage.story(), ["reported LameDuck", "reported Ready", "reported LameDuck", "app got TERM"]);
}

#[test]
fn a_second_signal_is_passed_on_at_once() {
    let stage = Stage::new();
    let mut run = stage.serve(&["--idle", "150s", "--grace", "150s"], &[]);
    let _client = stage.dial();
    run.signal(Signal::TERM);
    stage.until("reported LameDuck");
    let twice = |log: &Vec<String>| log.iter().filter(|line| *line == "reported LameDuck").count() == 2;
    super::stage::eventually("the backend is a lame duck again", || stage.log(), twice);
    run.signal(Signal::TERM);
    assert_eq!(run.end().code(), Some(0));
}
