//! The daemon and its clients. Each client has its own cgroup, and a service that no other client
//! dials.

use std::fmt::Write as _;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use lb_common::abi::Policy;
use lb_view::backend::BackendStatus;
use lb_view::status::{ServiceStatus, StatusDocument};
use stage::{Cgroup, Daemon, Setup, Stage};

use super::caller::Caller;

/// The maximum number of clients of a daemon.
pub const MOST_CLIENTS: usize = 64;

/// The service that a client needs.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub policy: Policy,
    /// Whether dead backends are ejected.
    pub ejects: bool,
    pub backends: Vec<SocketAddr>,
}

/// A client with its cgroup.
pub struct Client {
    name: String,
    cgroup: Cgroup,
    /// The service that the client dials.
    pub service: SocketAddr,
}

impl Client {
    /// Starts a process in the client's cgroup, which dials the service.
    pub fn caller(&self) -> Result<Caller> {
        Caller::start(&self.cgroup)
    }

    /// The client's service, as `socklb status` shows it.
    pub fn of(&self, status: &StatusDocument) -> Result<ServiceStatus> {
        let client =
            status.client(&self.name).with_context(|| format!("status does not show {}", self.name))?;
        client.services.first().cloned().context("the client has no service")
    }
}

/// A daemon with its clients.
pub struct Place {
    // The daemon is dropped before the cgroups to which its programs are attached.
    daemon: Option<Daemon>,
    setup: Setup,
    /// The clients, in the order of `wanted`.
    pub clients: Vec<Client>,
}

impl Place {
    /// Starts the daemon. If `daemon` is false, stops it again.
    pub fn start(stage: &Stage, name: &str, wanted: &[Wanted], daemon: bool) -> Result<Self> {
        ensure!(wanted.len() <= MOST_CLIENTS, "{} clients, at most {MOST_CLIENTS} allowed", wanted.len());
        let setup = Setup::new(stage, name);
        // The maps are small, because each of many clients has its own maps.
        let mut text = "[limits]\nflow_records = 16384\nslots = 256\nschedule_entries = 32768\n".to_owned();
        let mut clients = Vec::new();
        for (number, wanted) in wanted.iter().enumerate() {
            let client = Client {
                name: format!("client-{number}"),
                cgroup: Cgroup::new(),
                // No interface has this address, so a connect fails if it is not rewritten.
                service: SocketAddr::from(([10, 96, 0, u8::try_from(number + 1)?], 80)),
            };
            write!(text, "{}", lines(&client, wanted))?;
            clients.push(client);
        }
        let started = Daemon::start(&setup, &text);
        let mut place = Self { daemon: Some(started), setup, clients };
        if !daemon {
            let code = place.daemon.take().and_then(Daemon::stop);
            ensure!(code == Some(0), "the daemon did not stop cleanly: {code:?}");
        }
        Ok(place)
    }

    /// The output of `socklb status --json`.
    pub fn status(&self) -> StatusDocument {
        self.setup.status()
    }
}

/// The part of the configuration for one client.
fn lines(client: &Client, wanted: &Wanted) -> String {
    let Client { name, cgroup, service } = client;
    let (cgroup, policy) = (cgroup.relative(), wanted.policy.name());
    let cgroup = cgroup.display();
    let ejection = if wanted.ejects { "" } else { "ejection = \"off\"\n" };
    let backends: Vec<String> = wanted.backends.iter().map(|backend| format!("\"{backend}\"")).collect();
    let backends = backends.join(", ");
    format!(
        "[[client]]\njob = \"{name}\"\ncgroup = \"{cgroup}\"\nservices = [\"{name}\"]\n[[service]]\nname = \"{name}\"\n\
         address = \"{service}\"\npolicy = \"{policy}\"\nsubset = \"all\"\n{ejection}\
         backends = {{ static = [{backends}] }}\n"
    )
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.daemon.take());
        self.setup.run(&["detach", "--all"]);
    }
}

/// The backend of a service that has this address.
pub fn backend(service: &ServiceStatus, address: SocketAddr) -> Result<&BackendStatus> {
    let mut backends = service.backends.iter();
    backends
        .find(|backend| backend.address == address)
        .with_context(|| format!("the service has no backend {address}"))
}
