//! A host of backends at the far end of a link: an agent, and applications under `socklb agent
//! run`.

pub mod application;

use std::fs::File;
use std::net::SocketAddr;
use std::process::Stdio;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use stage::agent::Agent;
use stage::daemon::{ChildGuard, signal};
use stage::namespace::run;
use stage::probe::die_with_us;
use stage::{Cgroup, Setup};

use crate::place::process::start;
use crate::place::{Link, ServiceKey};

/// The port of all backends.
const PORT: u16 = 8080;

/// The addresses of `count` backends.
pub fn addresses(count: u8) -> Vec<SocketAddr> {
    (1..=count).map(|number| SocketAddr::from(([10, 78, 0, number], PORT))).collect()
}

/// Assigns these addresses to the host at the far end. Without this, the kernel accepts packets for
/// the addresses because of the route, but no interface has them.
pub fn add_addresses(backends: &[SocketAddr]) {
    backends.iter().for_each(|backend| run(&format!("ip address add {}/32 dev lo", backend.ip())));
}

/// The host. Its processes end when it is dropped.
pub struct Fleet<'l> {
    agent: Option<Agent>,
    runs: Vec<Option<ChildGuard>>,
    // The cgroup is dropped after the processes in it. Applications are not children of this
    // process.
    cgroup: Cgroup,
    backends: Vec<SocketAddr>,
    setup: Setup,
    link: &'l Link,
}

impl<'l> Fleet<'l> {
    /// Starts the agent and all backends.
    pub fn start(setup: &Setup, link: &'l Link, key: &ServiceKey, backends: &[SocketAddr]) -> Result<Self> {
        // `socklb agent run` reports the readiness of these backends.
        let unchecked = backends.iter().map(|backend| (*backend, "check = \"off\"\n".to_owned()));
        key.configure_agent(setup, "listen = [\"0.0.0.0:9465\"]\n", unchecked);
        let mut fleet = Self {
            agent: None,
            runs: backends.iter().map(|_| None).collect(),
            cgroup: Cgroup::new(),
            backends: backends.to_vec(),
            setup: setup.clone(),
            link,
        };
        fleet.start_agent();
        fleet.start_missing()?;
        Ok(fleet)
    }

    pub fn start_agent(&mut self) {
        self.agent = Some(Agent::start_with(&self.setup, |command| self.link.at_the_far_end(command)));
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
                let backend = self.backends[number].to_string();
                let agent = self.agent.as_ref().context("the agent does not run")?;
                let mut command =
                    agent.command(&["run", "--backend", &backend, "--on-lame-duck", "USR1", "--"]);
                command.arg(std::env::current_exe()?).args(["application", &backend]);
                let log =
                    File::options().create(true).append(true).open(self.setup.folder.join("run.log"))?;
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
                die_with_us(&mut command);
                self.link.at_the_far_end(&mut command);
                self.cgroup.enter(&mut command);
                self.runs[number] = Some(start(&mut command)?);
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
