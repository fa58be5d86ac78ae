//! The place in which a benchmark measures: a daemon with its clients, and configurations of it. In
//! the folder: agents, listeners, keys, a link, processes and threads.

mod announcer;

mod keys;

mod link;

mod listener;

pub mod process;

mod thread;

use std::fmt::Display;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use lb_view::status::{ServiceStatus, StatusDocument};
use stage::{Cgroup, Daemon, Setup, Stage, eventually};

pub use announcer::{Announcer, Report};
pub use keys::ServiceKey;
pub use link::{Link, NEAR};
pub use listener::{Listener, Manner, QUEUE, bound};
pub use thread::Beside;

/// The service of a place with one service. No interface has the address, so a connect fails if it
/// is not rewritten.
pub const SERVICE: &str = "10.96.0.10:80";

/// A daemon, and the cgroups of its clients. On drop, the daemon ends and its programs are
/// detached.
pub struct Place {
    // The daemon is dropped before the cgroups to which its programs are attached.
    daemon: Option<Daemon>,
    pub setup: Setup,
    pub cgroups: Vec<Cgroup>,
}

impl Place {
    /// Starts a daemon with a configuration, and waits until it answers.
    pub fn start(setup: &Setup, cgroups: Vec<Cgroup>, text: &str) -> Self {
        Self { daemon: Some(Daemon::start(setup, text)), setup: setup.clone(), cgroups }
    }

    /// Starts a daemon with the client `web` and its service `users` at [`SERVICE`]. `health` and
    /// `host` are further lines of the service and of the host.
    pub fn of_one_service(
        stage: &Stage,
        name: &str,
        backends: &[SocketAddr],
        health: &str,
        host: &str,
    ) -> Self {
        let (setup, cgroup) = (Setup::new(stage, name), Cgroup::new());
        let backends = listed(&setup, "users.toml", backends);
        let text = "[limits]\nslots = 16384\n".to_owned()
            + &client("web", &cgroup, "")
            + &service("users", SERVICE, &backends, &format!("subset = \"all\"\n{health}"))
            + host;
        Self::start(&setup, vec![cgroup], &text)
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("the daemon runs")
    }

    /// Stops the daemon. Its programs stay attached.
    pub fn stop(&mut self) -> Result<()> {
        let code = self.daemon.take().and_then(Daemon::stop);
        ensure!(code == Some(0), "the daemon did not stop cleanly: {code:?}");
        Ok(())
    }

    /// Waits until this number of backends have this state according to their probes.
    #[track_caller]
    pub fn wait_for(&self, state: &str, count: usize) {
        let have = || {
            let status = self.setup.status();
            let services = status.clients.iter().flat_map(|client| &client.services);
            let probes =
                services.flat_map(|service| &service.backends).filter_map(|backend| backend.probe.as_ref());
            probes.filter(|probe| probe.state == state).count()
        };
        eventually(&format!("{count} backends are {state}"), have, |have| *have == count);
    }

    /// Returns the seconds of processor time that the daemon uses during `work`, and the seconds
    /// that `work` takes.
    pub fn watch(&self, work: impl FnOnce()) -> Result<(f64, f64)> {
        let (before, since) = (process::cpu_ticks(self.daemon().pid())?, Instant::now());
        work();
        let ticks = process::cpu_ticks(self.daemon().pid())? - before;
        Ok((ticks as f64 / 100.0, since.elapsed().as_secs_f64()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.daemon.take());
        self.setup.run(&["detach", "--all"]);
    }
}

/// Makes cgroups.
pub fn cgroups(count: usize) -> Vec<Cgroup> {
    (0..count).map(|_| Cgroup::new()).collect()
}

/// The part of a configuration for a client; `more` are further lines.
pub fn client(job: &str, cgroup: &Cgroup, more: &str) -> String {
    format!("[[client]]\njob = \"{job}\"\ncgroup = \"{}\"\n{more}", cgroup.relative().display())
}

/// The part of a configuration for a service; `backends` comes from [`fixed`] or [`listed`], and
/// `more` are further lines.
pub fn service(name: &str, address: impl Display, backends: &str, more: &str) -> String {
    format!("[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nbackends = {backends}\n{more}")
}

/// Backends that a configuration contains.
pub fn fixed(backends: impl IntoIterator<Item = SocketAddr>) -> String {
    let backends: Vec<String> = backends.into_iter().map(|backend| backend.to_string()).collect();
    format!("{{ static = {backends:?} }}")
}

/// The maximum number of endpoints without indexes.
pub const MOST_WITHOUT_INDEXES: usize = 8192;

/// Backends in a file, which is written.
pub fn listed(setup: &Setup, file: &str, backends: &[SocketAddr]) -> String {
    let entry = |(index, address): (usize, &SocketAddr)| {
        let index =
            if backends.len() > MOST_WITHOUT_INDEXES { format!("index = {index}\n") } else { String::new() };
        format!("[[endpoint]]\naddress = \"{address}\"\n{index}")
    };
    setup.write(file, &backends.iter().enumerate().map(entry).collect::<String>());
    format!("{{ file = \"{file}\" }}")
}

/// The line of a service whose daemon requests reports, at the default intervals.
pub const REPORTED: &str = "health = { probe = \"report\" }\n";

/// The line of a service whose daemon requests a report of each backend at this interval.
pub fn reported_each(interval: &str) -> String {
    format!("health = {{ probe = \"report\", interval = \"{interval}\", idle_interval = \"{interval}\" }}\n")
}

/// The first service of a client.
pub fn service_of(status: &StatusDocument, client: &str) -> Result<ServiceStatus> {
    let found = status.client(client).and_then(|client| client.services.first());
    found.cloned().with_context(|| format!("status does not show a service of {client}"))
}

/// The value of a series on a page of metrics; 0 if the page does not have the series.
pub fn metric<N: FromStr + Default>(page: &str, series: &str) -> N {
    let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok();
    page.lines().find_map(value).unwrap_or_default()
}
