//! `socklb agent run` with its command, and functions to observe both processes. At the end of a
//! test, its remaining processes are killed.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long a test waits for a condition. The time is long, because a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts the following command as the first process of a PID namespace, as a container does. The
/// command's group and session have no number in that namespace.
pub const IN_PID_NAMESPACE: [&str; 6] =
    ["/usr/bin/unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"];

const PROGRAM: &str = env!("CARGO_BIN_EXE_agent-stage");

/// Repeats `look` until `fact` accepts its result. `what` describes the expected fact.
#[track_caller]
pub fn eventually<T: std::fmt::Debug>(what: &str, look: impl FnMut() -> T, fact: impl Fn(&T) -> bool) -> T {
    within(PATIENCE, look, fact)
        .unwrap_or_else(|seen| panic!("not true in time: {what}; last seen: {seen:?}"))
}

/// As [`eventually`], with a given time limit. The error is the last result of `look`.
pub fn within<T>(time: Duration, mut look: impl FnMut() -> T, fact: impl Fn(&T) -> bool) -> Result<T, T> {
    let deadline = Instant::now() + time;
    loop {
        let seen = look();
        if fact(&seen) {
            return Ok(seen);
        }
        if Instant::now() >= deadline {
            return Err(seen);
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The surroundings of one test: a folder, and an address that no other test uses.
pub struct Stage {
    folder: TempDir,
    pub address: SocketAddr,
}

impl Stage {
    pub fn new() -> Self {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let [.., high, low] = std::process::id().to_be_bytes();
        let ip = [127, high.max(1), low, NEXT.fetch_add(1, Ordering::Relaxed)];
        let address = TcpListener::bind(SocketAddr::new(ip.into(), 0)).and_then(|socket| socket.local_addr());
        let address = address.expect("a loopback port is free");
        Self { folder: TempDir::new().expect("a folder is created"), address }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The lines of the log that a test compares: reports, signals that the application received,
    /// and lines that the test has written.
    pub fn story(&self) -> Vec<String> {
        let is_of_story = |line: &String| {
            line.starts_with("reported") || line.starts_with("app got") || line.starts_with("test")
        };
        self.log().into_iter().filter(is_of_story).collect()
    }

    pub fn write(&self, line: &str) {
        use std::io::Write;
        let mut file = fs::OpenOptions::new().append(true).open(self.file("log")).expect("the log exists");
        file.write_all(format!("{line}\n").as_bytes()).expect("the line is written");
    }

    #[track_caller]
    pub fn until(&self, line: &str) {
        eventually(line, || self.log(), |log| log.iter().any(|written| written == line));
    }

    pub fn dial(&self) -> TcpStream {
        TcpStream::connect(self.address).expect("the application accepts")
    }

    /// The command line of `agent-stage` in a role.
    pub fn program(&self, role: &[&str]) -> Vec<OsString> {
        let first = [PROGRAM.into(), self.file("log").into(), self.address.to_string().into()];
        first.into_iter().chain(role.iter().map(OsString::from)).collect()
    }

    /// `socklb agent run` with the command `words`.
    pub fn command(&self, options: &[&str], words: &[impl AsRef<OsStr>]) -> Command {
        let program = self.program(&[&["run"], options, &["--"]].concat());
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).args(words);
        command
    }

    pub fn start(&self, options: &[&str], words: &[impl AsRef<OsStr>]) -> Run {
        Run::start(&mut self.command(options, words))
    }

    /// Starts an application under `socklb agent run`, and waits until it is announced as ready.
    pub fn serve(&self, options: &[&str], application: &[&str]) -> Run {
        let run = self.start(options, &self.program(&[&["serve"], application].concat()));
        self.until("app takes signals");
        self.until("reported Ready");
        run
    }

    /// The application's process.
    pub fn application(&self) -> Pid {
        let log = self.log();
        let number = log.iter().rev().find_map(|line| line.strip_prefix("app ")?.parse().ok());
        number.and_then(Pid::from_raw).expect("the application has started")
    }
}

/// Restores the default effect of signals, because a command that a shell runs in the background
/// ignores some signals, and so do all its descendants.
fn with_usual_signals(command: &mut Command) {
    // SAFETY: the closure makes system calls only and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

/// A process of `socklb agent run`. It is ended with all its descendants, whether the test passes
/// or fails.
pub struct Run {
    pub child: Child,
    has_ended: bool,
}

impl Run {
    pub fn start(command: &mut Command) -> Self {
        with_usual_signals(command);
        Self { child: command.spawn().expect("the program starts"), has_ended: false }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process has not ended");
    }

    /// Waits for the end, and returns how the process ended.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        let look = || self.child.try_wait().expect("this process is the parent");
        let status = eventually("the process ends", look, Option::is_some);
        self.has_ended = true;
        status.expect("the process has ended")
    }

    /// All descendants of the process.
    pub fn descendants(&self) -> Vec<Pid> {
        let mut all = vec![self.pid()];
        let mut next = 0;
        // Bound: each process is added once, because it has one parent.
        while let Some(pid) = all.get(next) {
            for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
                all.extend(children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
            }
            next += 1;
        }
        all.split_off(1)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        // A stopped process reaps no child, so process IDs are not reused meanwhile.
        let _ = kill_process(self.pid(), Signal::STOP);
        for pid in self.descendants() {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The letter of a process's state: `T` is stopped, `Z` has not been reaped.
pub fn state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

pub fn piped(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::piped()).stdout(Stdio::piped())
}
