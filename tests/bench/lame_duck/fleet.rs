//! A host of backends at the far end of a link: an agent, and applications under `socklb agent
//! run`.

pub mod application;

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use stage::daemon::{ChildGuard, signal};
use stage::probe::die_with_us;
use stage::{Cgroup, Setup, eventually};

use crate::place::keys::ServiceKey;
use crate::place::link::{Link, run};

/// The port of all backends.
const PORT: u16 = 8080;

/// The addresses of `count` backends.
pub fn addresses(count: u8) -> Vec<SocketAddr> {
    (1..=count).map(|number| SocketAddr::from(([10, 78, 0, number], PORT))).collect()
}

/// Assigns these addresses to the host at the far end. Without this, the kernel accepts packets for
/// the addresses because of the route, but no interface has them.
pub fn add_addresses(backends: &[SocketAddr]) -> Result<()> {
    backends.iter().try_for_each(|backend| run(&format!("ip address add {}/32 dev lo", backend.ip())))
}

/// The host. Its processes end when it is dropped.
pub struct Fleet<'l> {
    agent: Option<ChildGuard>,
    runs: Vec<Option<ChildGuard>>,
    // The cgroup is dropped after the processes in it. Applications are not children of this
    // process.
    cgroup: Cgroup,
    backends: Vec<SocketAddr>,
    folder: PathBuf,
    build: PathBuf,
    link: &'l Link,
}

impl<'l> Fleet<'l> {
    /// Starts the agent and all backends.
    pub fn start(setup: &Setup, link: &'l Link, key: &ServiceKey, backends: &[SocketAddr]) -> Result<Self> {
        let mut text = "listen = [\"0.0.0.0:9465\"]\n".to_owned();
        for backend in backends {
            let file = stage::agent::derive_key(setup, &key.path, &backend.to_string());
            // `socklb agent run` reports the readiness of these backends.
            text += &format!(
                "[[backend]]\naddress = \"{backend}\"\nkey = \"{}\"\ncheck = \"off\"\n",
                file.display()
            );
        }
        setup.write("agent.toml", &text);
        let mut fleet = Self {
            agent: None,
            runs: backends.iter().map(|_| None).collect(),
            cgroup: Cgroup::new(),
            backends: backends.to_vec(),
            folder: setup.folder.clone(),
            build: setup.build.clone(),
            link,
        };
        fleet.start_agent()?;
        let socket = fleet.folder.join("agent-run/agent.sock");
        eventually(
            "the agent answers",
            || std::os::unix::net::UnixStream::connect(&socket).is_ok(),
            |is| *is,
        );
        fleet.start_missing()?;
        Ok(fleet)
    }

    fn command(&self, name: &str) -> Result<Command> {
        let log = File::options().create(true).append(true).open(self.folder.join(name))?;
        let mut command = Command::new(&self.build);
        command.arg("--run").arg(self.folder.join("agent-run"));
        command.arg("--state").arg(self.folder.join("agent-state")).arg("agent");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        die_with_us(&mut command);
        self.link.at_the_far_end(&mut command)?;
        Ok(command)
    }

    pub fn start_agent(&mut self) -> Result<()> {
        let mut command = self.command("agent.log")?;
        command.arg("serve").arg(self.folder.join("agent.toml"));
        self.agent = Some(ChildGuard::of(command.spawn().context("start the agent")?));
        Ok(())
    }

    pub fn kill_agent(&mut self) {
        drop(self.agent.take());
    }

    /// Returns whether the agent was killed.
    pub fn is_without_agent(&self) -> bool {
        self.agent.is_none()
    }

    /// Starts all backends that do not run. Returns how many it has started.
    pub fn start_missing(&mut self) -> Result<usize> {
        let mut started = 0;
        for number in 0..self.runs.len() {
            let has_ended = match &mut self.runs[number] {
                Some(run) => run.try_wait()?.is_some(),
                None => true,
            };
            if has_ended {
                let mut command = self.command("run.log")?;
                let backend = self.backends[number].to_string();
                command.args(["run", "--backend", &backend, "--on-lame-duck", "USR1", "--"]);
                command.arg(std::env::current_exe()?).args(["application", &backend]);
                self.cgroup.enter(&mut command);
                self.runs[number] = Some(ChildGuard::of(command.spawn().context("run a backend")?));
                started += 1;
            }
        }
        Ok(started)
    }

    /// Returns whether a backend's `socklb agent run` has not ended.
    pub fn runs(&mut self, number: usize) -> Result<bool> {
        Ok(match &mut self.runs[number] {
            Some(run) => run.try_wait()?.is_none(),
            None => false,
        })
    }

    /// Sends SIGTERM to a backend's `socklb agent run`.
    pub fn terminate(&self, number: usize) -> Result<()> {
        signal(self.runs[number].as_ref().context("the backend does not run")?, Signal::TERM);
        Ok(())
    }

    /// Kills a backend's application.
    pub fn crash(&self, number: usize) -> Result<()> {
        let run = self.runs[number].as_ref().context("the backend does not run")?.id();
        let pids = std::fs::read_to_string(self.cgroup.path().join("cgroup.procs"))?;
        let is_child = |pid: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
            parent == Some(run.to_string().as_str())
        };
        let pid = pids.lines().filter_map(|pid| pid.parse().ok()).find(is_child);
        let pid = pid.and_then(Pid::from_raw).context("`socklb agent run` has no application")?;
        Ok(kill_process(pid, Signal::KILL)?)
    }
}
