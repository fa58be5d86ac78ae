//! The clients of a daemon. Each client has its own cgroup, and a service that no other client
//! dials.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use lb_common::abi::Policy;
use lb_view::status::{ServiceStatus, StatusDocument};
use stage::{Setup, Stage};

use super::caller::Caller;
use crate::place::{Place, cgroups, client, fixed, service, service_of};

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

/// A daemon with its clients.
pub struct Clients(Place);

impl Clients {
    /// Starts the daemon. If `daemon` is false, stops it again.
    pub fn start(stage: &Stage, name: &str, wanted: &[Wanted], daemon: bool) -> Result<Self> {
        ensure!(wanted.len() <= MOST_CLIENTS, "{} clients, at most {MOST_CLIENTS} allowed", wanted.len());
        let cgroups = cgroups(wanted.len());
        // The maps are small, because each of many clients has its own maps.
        let mut text = "[limits]\nflow_records = 16384\nslots = 256\nschedule_entries = 32768\n".to_owned();
        for (number, (wanted, cgroup)) in wanted.iter().zip(&cgroups).enumerate() {
            let (job, policy) = (job(number), wanted.policy.name());
            let ejection = if wanted.ejects { "" } else { "ejection = \"off\"\n" };
            let backends = fixed(wanted.backends.iter().copied());
            let of_service = format!("policy = \"{policy}\"\nsubset = \"all\"\n{ejection}");
            text += &client(&job, cgroup, &format!("services = [\"{job}\"]\n"));
            text += &service(&job, address(number), &backends, &of_service);
        }
        let mut place = Place::start(&Setup::new(stage, name), cgroups, &text);
        if !daemon {
            place.stop()?;
        }
        Ok(Self(place))
    }

    /// Starts a process in the cgroup of each client.
    pub fn callers(&self) -> Result<Vec<Caller>> {
        self.0.cgroups.iter().map(Caller::start).collect()
    }

    /// The output of `socklb status --json`.
    pub fn status(&self) -> StatusDocument {
        self.0.setup.status()
    }
}

/// The name of a client and of its service.
fn job(number: usize) -> String {
    format!("client-{number}")
}

/// The address of a client's service. No interface has this address, so a connect fails if it is
/// not rewritten.
pub fn address(number: usize) -> SocketAddr {
    let last = u8::try_from(number + 1).expect("a daemon has at most 64 clients");
    SocketAddr::from(([10, 96, 0, last], 80))
}

/// A client's service in a status.
pub fn of(status: &StatusDocument, number: usize) -> Result<ServiceStatus> {
    service_of(status, &job(number))
}
