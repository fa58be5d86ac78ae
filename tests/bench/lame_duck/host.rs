//! A host of clients: a daemon that probes the backends of one service, and the client's cgroup.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use lb_view::status::ServiceStatus;
use stage::{Cgroup, Daemon, Setup, Stage};

/// The service that the client dials. No interface has this address, so a connect fails if it is
/// not rewritten.
pub const SERVICE: &str = "10.96.0.10:80";

/// The parameters of a host.
pub struct Wanted<'w> {
    /// The value of the key `health`, which defines how the daemon probes.
    pub health: &'w str,
    /// The file of the service's key; `None` if the daemon sends no requests to agents.
    pub key: Option<&'w Path>,
    /// The address from which the daemon sends requests.
    pub listen: &'w str,
    /// The network interface on which the kernel processes reports; `None` if the daemon's socket
    /// receives them.
    pub xdp: Option<&'w str>,
    pub backends: &'w [SocketAddr],
}

/// A host with its daemon.
pub struct Host {
    // The daemon is dropped before the cgroup to which its programs are attached.
    daemon: Option<Daemon>,
    pub setup: Setup,
    /// The client's cgroup.
    pub cgroup: Cgroup,
}

impl Host {
    /// Starts the daemon and waits until it serves.
    pub fn start(stage: &Stage, name: &str, wanted: &Wanted<'_>) -> Self {
        let setup = Setup::new(stage, name);
        let cgroup = Cgroup::new();
        let list = wanted.backends.iter().map(|address| format!("[[endpoint]]\naddress = \"{address}\"\n"));
        setup.write("users.toml", &list.collect::<String>());
        let xdp = wanted.xdp.map(|interface| format!("xdp = [{interface:?}]\n")).unwrap_or_default();
        let reports = wanted.key.map(|key| {
            format!("[reports]\nlisten = \"{}\"\nkey = \"{}\"\n{xdp}", wanted.listen, key.display())
        });
        let text = format!(
            "[limits]\nslots = 16384\n[[client]]\njob = \"web\"\ncgroup = \"{}\"\n[[service]]\nname = \"users\"\n\
             address = \"{SERVICE}\"\nsubset = \"all\"\nbackends = {{ file = \"users.toml\" }}\nhealth = {}\n{}",
            cgroup.relative().display(),
            wanted.health,
            reports.unwrap_or_default(),
        );
        let daemon = Some(Daemon::start(&setup, &text));
        Self { daemon, setup, cgroup }
    }

    /// The service as `socklb status` shows it.
    pub fn service(&self) -> Result<ServiceStatus> {
        let status = self.setup.status();
        let service = status.client("web").and_then(|client| client.service("users")).cloned();
        service.context("status does not show the service")
    }

    pub fn pid(&self) -> Result<u32> {
        Ok(self.daemon.as_ref().context("the daemon does not run")?.pid())
    }

    pub fn log(&self) -> String {
        self.daemon.as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// The address from which the daemon sends requests.
    pub fn queries_from(&self) -> Result<SocketAddr> {
        let log = self.log();
        let lines = log.lines().filter(|line| line.contains("polling agents"));
        let at = lines.filter_map(|line| line.split("address=").nth(1)).next_back();
        Ok(at.context("the log does not show the address of requests")?.trim().parse()?)
    }

    /// The number of backends that have this state according to their own reports.
    pub fn reported(&self, state: &str) -> Result<usize> {
        let service = self.service()?;
        let probes = service.backends.iter().filter_map(|backend| backend.probe.as_ref());
        Ok(probes.filter(|probe| probe.state == state).count())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.daemon.take());
        self.setup.run(&["detach", "--all"]);
    }
}

/// The value of a series on a page of metrics; 0 if the page does not have the series.
pub fn metric(page: &str, series: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok();
    page.lines().find_map(value).unwrap_or(0)
}
