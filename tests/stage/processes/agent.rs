//! Runs an agent beside backends as an operator does, and makes the keys of a service and its
//! backends.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::daemon::{ChildGuard, finish};
use crate::probe::die_with_us;
use crate::{Setup, eventually, patience, program, socket, window};

/// Writes a file that only its owner may read.
fn write_secret(path: &Path, text: &[u8]) {
    fs::write(path, text).expect("write the key");
    fs::set_permissions(path, Permissions::from_mode(0o600)).expect("restrict the key's mode");
}

/// Returns the output of a command of `socklb agent` that must succeed.
fn printed(command: &mut Command) -> Vec<u8> {
    let output = finish(command);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Makes a service's key in the set-up's folder with the command that operators use. Returns the
/// key's file.
pub fn make_key(setup: &Setup, name: &str, id: u16) -> PathBuf {
    let path = setup.folder.join(name);
    let id = id.to_string();
    write_secret(&path, &printed(Command::new(&setup.build).args(["agent", "key", "--id", &id])));
    path
}

/// Derives a backend's key from its service's key.
pub fn derive_key(setup: &Setup, service: &Path, backend: &str) -> PathBuf {
    let path = setup.folder.join(format!("{}.key", backend.replace([':', '[', ']', '/'], "-")));
    let mut command = Command::new(&setup.build);
    command.args(["agent", "key", "--of"]).arg(service).arg(backend);
    write_secret(&path, &printed(&mut command));
    path
}

/// The number and the bytes of the key in a file.
///
/// # Panics
/// If the file has no line `ID KEY`.
pub fn key_in(file: &Path) -> (u16, Vec<u8>) {
    let text = fs::read_to_string(file).expect("read the key");
    let (id, digits) = text.trim().split_once(' ').expect("the file has a line ID KEY");
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal");
    (id.parse().expect("the text is a number"), (0..digits.len()).step_by(2).map(byte).collect())
}

/// A running agent. Killed on drop.
pub struct Agent {
    child: ChildGuard,
    folder: PathBuf,
    build: PathBuf,
}

impl Agent {
    /// Starts an agent with these backends, and waits until the agent answers. The agent checks the
    /// backends by connecting to them, and listens at 127.0.0.1:9465.
    pub fn start(setup: &Setup, service_key: &Path, backends: &[&str]) -> Self {
        let mut text = "listen = [\"127.0.0.1:9465\"]\n".to_owned();
        for backend in backends {
            let key = derive_key(setup, service_key, backend);
            text += &format!(
                "[[backend]]\naddress = \"{backend}\"\nkey = \"{}\"\ninterval = \"200ms\"\ntimeout = \"{}\"\nvalid_for = \"{}\"\nhold = \"10m\"\n",
                key.display(),
                window("1s"),
                window("5s")
            );
        }
        setup.write("agent.toml", &text);
        Self::start_again(setup)
    }

    /// Starts an agent with the existing configuration file.
    pub fn start_again(setup: &Setup) -> Self {
        Self::start_with(setup, |_| ())
    }

    /// As [`Agent::start_again`], after `prepare` has changed the command.
    pub fn start_with(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Self {
        let folder = setup.folder.join("agent");
        fs::create_dir_all(&folder).expect("make the folder");
        let log = File::options().create(true).append(true).open(folder.join("log")).expect("open the log");
        let mut command = Command::new(program("socklb"));
        command.arg("--run").arg(folder.join("run")).arg("--state").arg(folder.join("state"));
        command.args(["agent", "serve"]).arg(setup.folder.join("agent.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        prepare(&mut command);
        die_with_us(&mut command);
        let child = ChildGuard::of(command.spawn().expect("start the agent"));
        let agent = Self { child, folder, build: setup.build.clone() };
        let answers = || socket::get(&agent.socket(), "/v1/status", socket::OF_COMMANDS).is_ok();
        eventually("the agent answers", answers, |answers| *answers);
        agent
    }

    /// Builds a command of `socklb agent` with this agent's socket.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.build);
        command.arg("--run").arg(self.folder.join("run")).arg("agent").args(arguments);
        command
    }

    /// Runs a command of `socklb agent` against this agent.
    pub fn run(&self, arguments: &[&str]) -> Output {
        finish(&mut self.command(arguments))
    }

    /// The document that `agent status --json` prints, read from the agent's socket.
    #[track_caller]
    pub fn status(&self) -> serde_json::Value {
        let answer = socket::get(&self.socket(), "/v1/status", patience()).expect("the agent answers");
        serde_json::from_str(&answer).expect("the text is JSON")
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("run/agent.sock")
    }

    /// Runs a command that must succeed.
    #[track_caller]
    pub fn run_checked(&self, arguments: &[&str]) {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Sets the utilization that a backend reports for five minutes, at 100 requests per second.
    #[track_caller]
    pub fn report(&self, backend: &str, utilization: &str) {
        let load = ["--utilization", utilization, "--qps", "100", "--valid-for", "300000"];
        self.run_checked(&[&["report", "--backend", backend], &load[..]].concat());
    }

    /// The metrics page, from the agent's socket.
    pub fn metrics(&self) -> String {
        crate::daemon::metrics_of(&self.socket())
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, what: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("the agent has a process id"), what)
            .expect("send the signal");
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the agent's log ---\n{}", self.log());
        }
    }
}
