//! A process inside a cgroup that opens sockets on request: what a service behind socklb does, one step at a time.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::{Cgroup, Setup, program};

/// A socket that reached somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialled {
    /// The probe's number of the socket.
    pub socket: u32,
    /// Who answered.
    pub name: String,
    /// What getpeername says.
    pub peer: String,
}

/// The process.
pub struct Probe {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Probe {
    /// Starts a probe that enters `cgroup` before it opens its first socket.
    pub fn start(cgroup: &Cgroup) -> Self {
        Self::start_with(cgroup, |_| {})
    }

    /// Starts a probe whose command `prepare` has changed.
    pub fn start_with(cgroup: &Cgroup, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(program("probe"));
        command.arg(cgroup.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        die_with_us(&mut command);
        prepare(&mut command);
        Self::spawn(&mut command)
    }

    /// A probe by a command that becomes one.
    pub fn of(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        die_with_us(command);
        Self::spawn(command)
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.spawn().expect("start the probe");
        let requests = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        let mut probe = Self { child, requests, answers };
        assert_eq!(probe.ask("ready"), "ok");
        probe
    }

    /// Sends a request and returns the answer.
    #[track_caller]
    pub fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.receive()
    }

    /// Sends a request without waiting for its answer.
    pub fn send(&mut self, request: &str) {
        writeln!(self.requests, "{request}").and_then(|()| self.requests.flush()).expect("the probe lives");
    }

    /// Waits for an answer.
    #[track_caller]
    pub fn receive(&mut self) -> String {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the probe lives");
        assert!(!answer.is_empty(), "the probe ended");
        answer.trim_end().to_owned()
    }

    /// Dials and reads who answers; the socket stays open.
    #[track_caller]
    pub fn dial(&mut self, address: &str) -> Dialled {
        self.try_dial(address).unwrap_or_else(|errno| panic!("dial {address}: errno {errno}"))
    }

    /// Dials; the errno if that fails. The socket stays open in both cases until [`Probe::ask`] closes it.
    #[track_caller]
    pub fn try_dial(&mut self, address: &str) -> Result<Dialled, i32> {
        let answer = self.ask(&format!("dial {address}"));
        dialled(&answer)
    }

    /// Dials again on a socket that exists.
    #[track_caller]
    pub fn try_redial(&mut self, socket: u32, address: &str) -> Result<Dialled, i32> {
        dialled(&self.ask(&format!("redial {socket} {address}")))
    }

    /// Dials `count` times, closing each socket at once, and counts who answered. A failure counts as `errno N`.
    #[track_caller]
    pub fn dial_many(&mut self, address: &str, count: u32) -> BTreeMap<String, u32> {
        parse_counts(&self.ask(&format!("many {address} {count}")))
    }

    /// Runs a command of socklb inside the probe's cgroup, by a process that the probe starts; returns its exit code.
    #[track_caller]
    pub fn socklb(&mut self, setup: &Setup, arguments: &[&str]) -> i32 {
        self.send_socklb(setup, arguments);
        let answer = self.receive();
        answer.strip_prefix("ok ").and_then(|code| code.parse().ok()).expect("an exit code")
    }

    /// As [`Probe::socklb`], without waiting for its end.
    pub fn send_socklb(&mut self, setup: &Setup, arguments: &[&str]) {
        let command = setup.socklb(arguments);
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        self.send(&format!("run {}", words.join(" ")));
    }

    /// Runs the probe on one CPU only.
    #[track_caller]
    pub fn pin(&mut self, cpu: u32) {
        assert_eq!(self.ask(&format!("pin {cpu}")), "ok");
    }

    /// Closes a socket.
    #[track_caller]
    pub fn close(&mut self, socket: u32) {
        assert_eq!(self.ask(&format!("close {socket}")), "ok");
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process.
    pub fn kill(mut self) {
        self.child.kill().expect("kill the probe");
        self.child.wait().expect("reap the probe");
    }
}

#[track_caller]
fn dialled(answer: &str) -> Result<Dialled, i32> {
    let words: Vec<&str> = answer.split(' ').collect();
    match words.as_slice() {
        ["ok", socket, name, peer] => Ok(Dialled {
            socket: socket.parse().expect("a number"),
            name: (*name).to_owned(),
            peer: (*peer).to_owned(),
        }),
        ["err", _, errno] => Err(errno.parse().expect("an errno")),
        _ => panic!("the probe answers: {answer}"),
    }
}

/// Counts as the probe prints them: `name=count` with blanks between.
#[track_caller]
pub fn parse_counts(answer: &str) -> BTreeMap<String, u32> {
    let pairs = answer.split_whitespace().map(|pair| pair.split_once('=').expect("name=count"));
    pairs.map(|(name, count)| (name.to_owned(), count.parse().expect("a count"))).collect()
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets a child end when the test thread that started it does, however that happens.
pub fn die_with_us(command: &mut Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            Ok(())
        });
    }
}
