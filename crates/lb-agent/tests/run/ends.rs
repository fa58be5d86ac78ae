//! `socklb agent run` ends in the same way as its command.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;

use rustix::process::{Signal, kill_process};

use super::stage::{IN_PID_NAMESPACE, Run, Stage, eventually, piped, state};

#[test]
fn the_run_has_the_exit_code_of_its_command() {
    let stage = Stage::new();
    let codes: Vec<i32> = (0..=255).collect();
    for codes in codes.chunks(16) {
        let start = |code: &i32| stage.start(&[], &["/bin/sh", "-c", &format!("exit {code}")]);
        let runs: Vec<Run> = codes.iter().map(start).collect();
        let ended: Vec<Option<i32>> = runs.into_iter().map(|mut run| run.end().code()).collect();
        assert_eq!(ended, codes.iter().copied().map(Some).collect::<Vec<_>>());
    }
}

#[test]
fn the_run_ends_by_the_signal_that_kills_its_command() {
    for signal in [Signal::TERM, Signal::KILL, Signal::INT, Signal::HUP, Signal::SEGV, Signal::USR1] {
        let stage = Stage::new();
        let mut run = stage.start(&[], &["/bin/sh", "-c", &format!("kill -{} $$", signal.as_raw())]);
        assert_eq!(run.end().signal(), Some(signal.as_raw()), "{signal:?}");
    }
}

#[test]
fn a_command_that_cannot_start_is_not_reported() {
    let stage = Stage::new();
    std::fs::write(stage.file("text"), "no program").unwrap();
    for (program, code) in [(stage.file("nobody"), 127), (stage.file("text"), 126)] {
        assert_eq!(stage.start(&[], &[program]).end().code(), Some(code));
    }
    assert_eq!(stage.log(), Vec::<String>::new());
}

#[test]
fn a_backend_that_crashes_is_down() {
    let stage = Stage::new();
    let mut run = stage.serve(&[], &[]);
    kill_process(stage.application(), Signal::KILL).unwrap();
    assert_eq!(run.end().signal(), Some(9));
    assert_eq!(stage.story(), ["reported LameDuck", "reported Ready", "reported Down"]);
}

#[test]
fn input_and_output_pass_through_to_the_command() {
    let stage = Stage::new();
    let mut run = Run::start(piped(&mut stage.command(&[], &["/bin/cat"])));
    let mut input = run.child.stdin.take().unwrap();
    input.write_all(b"through").unwrap();
    drop(input);
    let mut output = String::new();
    run.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    assert_eq!((output.as_str(), run.end().code()), ("through", Some(0)));
}

#[test]
fn a_command_that_forks_away_is_followed_to_its_end() {
    let stage = Stage::new();
    let mut run = stage.serve(&[], &["--fork"]);
    let application = stage.application();
    eventually("the first process has ended", || run.descendants(), |left| left == &[application]);
    run.signal(Signal::HUP);
    stage.until("app got HUP");
    run.signal(Signal::TERM);
    assert_eq!(run.end().code(), Some(0));
    assert_eq!(
        stage.story(),
        ["reported LameDuck", "reported Ready", "app got HUP", "reported LameDuck", "app got TERM"]
    );
}

#[test]
fn the_run_ends_by_the_crash_of_a_forked_application() {
    let stage = Stage::new();
    let mut run = stage.serve(&[], &["--fork"]);
    let application = stage.application();
    eventually("the first process has ended", || run.descendants(), |left| left == &[application]);
    kill_process(application, Signal::ABORT).unwrap();
    assert_eq!(run.end().signal(), Some(6));
    assert_eq!(stage.story(), ["reported LameDuck", "reported Ready", "reported Down"]);
}

#[test]
fn orphans_are_reaped_and_processes_left_by_a_crash_are_ended() {
    let stage = Stage::new();
    let program = stage.program(&["serve"]);
    let words: Vec<String> = program.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    // The application starts three processes that end at once, and one that continues. The
    // application waits for none of them.
    let line = format!(
        "(exit 1 &) ; (exit 2 &) ; (exit 3 &) ; (setsid /bin/sleep 600 &) ; exec {}",
        words.join(" ")
    );
    let mut run = stage.start(&[], &["/bin/sh", "-c", &line]);
    stage.until("app takes signals");
    let left = eventually("only two living processes are left", || run.descendants(), |left| left.len() == 2);
    assert!(left.iter().all(|pid| state(*pid) != Some('Z')));
    kill_process(stage.application(), Signal::KILL).unwrap();
    assert_eq!(run.end().signal(), Some(9));
    assert!(left.into_iter().all(|pid| state(pid).is_none()));
}

#[test]
fn process_1_reaps_orphans_and_exits_with_the_code_of_a_signal() {
    let stage = Stage::new();
    for (line, code) in [
        ("exit 7", 7),
        // `socklb agent run` is process 1, which its own signals do not kill.
        ("kill -TERM $$", 143),
        // The application is the process that the command has left behind. This process ends once
        // the command has been reaped.
        (r#"(setsid /bin/sh -c "while kill -0 $$ 2>/dev/null; do :; done; exit 3" &) ; exit 0"#, 3),
    ] {
        let program = stage.program(&["run", "--", "/bin/sh", "-c", line]);
        let mut command = std::process::Command::new(IN_PID_NAMESPACE[0]);
        command.args(&IN_PID_NAMESPACE[1..]).args(program);
        assert_eq!(Run::start(&mut command).end().code(), Some(code), "{line}");
    }
}

#[test]
fn the_application_outlives_a_run_that_is_killed() {
    /// Kills the application at the end of the test, because nothing else does.
    struct Application(rustix::process::Pid);
    impl Drop for Application {
        fn drop(&mut self) {
            let _ = kill_process(self.0, Signal::KILL);
        }
    }
    let stage = Stage::new();
    let mut run = stage.serve(&[], &[]);
    let application = Application(stage.application());
    run.signal(Signal::KILL);
    assert_eq!(run.end().signal(), Some(9));
    stage.dial();
    kill_process(application.0, Signal::HUP).expect("the application runs");
    stage.until("app got HUP");
}
