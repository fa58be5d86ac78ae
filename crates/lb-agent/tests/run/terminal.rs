//! On a terminal, the command is in the foreground, and a shell's job control works as without
//! `socklb agent run`.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::stage::{IN_PID_NAMESPACE, Run, Stage};

/// A terminal: its input, and the text that it shows.
struct Terminal {
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    /// Starts `starter`, which makes the command the leader of a session on a new terminal.
    fn start(starter: &[&str], words: &[impl AsRef<std::ffi::OsStr>]) -> (Self, Run) {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .expect("a terminal is created");
        grantpt(&keyboard).expect("the terminal is unlocked");
        unlockpt(&keyboard).expect("the terminal is unlocked");
        let name = ptsname(&keyboard, Vec::new())
            .expect("the terminal has a name")
            .into_string()
            .expect("the name is ASCII");
        let line =
            || Stdio::from(File::options().read(true).write(true).open(&name).expect("the terminal opens"));
        let first: Vec<&str> = starter.iter().copied().chain(["/usr/bin/setsid", "--ctty"]).collect();
        let mut command = Command::new(first[0]);
        command.args(&first[1..]).args(words).stdin(line()).stdout(line()).stderr(line());
        let run = Run::start(&mut command);
        let keyboard = File::from(keyboard);
        let mut output = keyboard.try_clone().expect("a descriptor is free");
        let (lines, screen) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The loop ends when no process uses the terminal any more.
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                if lines.send(bytes[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        (Self { keyboard, screen, shown: String::new() }, run)
    }

    fn type_in(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("the terminal accepts input");
    }

    /// Waits until the terminal shows this text, and discards the output up to it.
    #[track_caller]
    fn until(&mut self, text: &str) {
        while !self.shown.contains(text) {
            let Ok(bytes) = self.screen.recv_timeout(Duration::from_secs(60)) else {
                panic!("`{text}` is not shown; the terminal shows {:?}", self.shown);
            };
            self.shown += &String::from_utf8_lossy(&bytes);
        }
        let (_, rest) = self.shown.split_once(text).expect("the terminal shows the text");
        self.shown = rest.to_owned();
    }
}

/// Runs a command on a terminal. The command reads input. The stop key does not stop the command,
/// because no shell would continue it. The interrupt key ends it.
fn read_and_end_by_a_key(starter: &[&str]) -> std::process::ExitStatus {
    let stage = Stage::new();
    let (mut terminal, mut run) = Terminal::start(starter, &stage.program(&["run", "--", "/bin/cat"]));
    terminal.type_in("hello\n");
    // The text appears twice: the terminal echoes it, and the command prints it.
    terminal.until("hello");
    terminal.until("hello");
    // The processes are not stopped, because no shell could continue them.
    terminal.type_in("\u{1a}");
    terminal.type_in("again\n");
    terminal.until("again");
    terminal.until("again");
    terminal.type_in("\u{3}");
    run.end()
}

#[test]
fn the_command_reads_the_terminal_and_receives_its_keys() {
    assert_eq!(read_and_end_by_a_key(&[]).signal(), Some(2));
}

/// In the PID namespace of `socklb agent run`, the session and the group of its parent have no
/// number.
#[test]
fn the_command_receives_the_terminals_keys_in_a_pid_namespace() {
    let shell = ["/bin/sh", "-c", r#""$@"; exit $?"#, "sh"];
    let starter = [&IN_PID_NAMESPACE[..], &shell].concat();
    assert_eq!(read_and_end_by_a_key(&starter).code(), Some(128 + 2));
}

#[test]
fn a_shell_stops_and_continues_the_job() {
    let stage = Stage::new();
    let (mut terminal, mut run) = Terminal::start(&[], &["/bin/bash", "--norc", "--noprofile", "-i"]);
    let run_of: Vec<String> =
        stage.program(&["run", "--"]).iter().map(|word| word.to_string_lossy().into_owned()).collect();
    terminal.type_in("PS1='prompt-$? '\n");
    terminal.until("prompt-0 ");
    // Input that is typed before the shell has given the terminal to the command is not echoed.
    // Because of the quotes, the output of the command differs from the echo of the terminal.
    terminal.type_in(&format!("{} /bin/sh -c 'echo be\"\"gun; exec /bin/cat'\n", run_of.join(" ")));
    terminal.until("begun");
    terminal.type_in("hello\n");
    terminal.until("hello");
    terminal.until("hello");
    terminal.type_in("\u{1a}");
    terminal.until("Stopped");
    terminal.until("prompt");
    terminal.type_in("fg\n");
    terminal.until("/bin/cat");
    terminal.type_in("again\n");
    terminal.until("again");
    terminal.until("again");
    terminal.type_in("\u{4}");
    terminal.until("prompt-0 ");
    terminal.type_in("exit 5\n");
    assert_eq!(run.end().code(), Some(5));
}
