//! A client with services over UDP, and the datagrams that its processes receive.

use lb_common::abi::{Datagrams, map};
use lb_view::backend::BackendStatus;

use crate::fixture::endpoints;
use crate::maps::hash;
use crate::{Cgroup, Daemon, DatagramBackend, Probe, Setup, Stage, eventually, replace};

/// The address of the first service. No interface has this address.
pub const SERVICE: &str = "10.96.0.10:53";
/// [`SERVICE`] as a v4-mapped IPv6 address.
pub const MAPPED: &str = "[::ffff:10.96.0.10]:53";

/// A client with services over UDP. Each service has its own backends in a file.
pub struct Scene {
    /// The daemon; `None` if it does not run.
    pub daemon: Option<Daemon>,
    /// All backends, sorted by service and then by number.
    pub backends: Vec<DatagramBackend>,
    pub setup: Setup,
    pub cgroup: Cgroup,
    _stage: Stage,
}

impl Scene {
    /// `services` services `s0` to `s8` at 10.96.0.10 to 18. Each has backends `<service>b1` to
    /// `<service>b<backends>`.
    pub fn new(services: u16, backends: u16) -> Self {
        Self::with(services, backends, "")
    }

    /// As [`Scene::new`], with more configuration.
    pub fn with(services: u16, backends: u16, more: &str) -> Self {
        let stage = Stage::new();
        let cgroup = Cgroup::new();
        let setup = Setup::new(&stage, "a");
        let mut scene = Self { daemon: None, backends: Vec::new(), setup, cgroup, _stage: stage };
        let mut text =
            format!("[[client]]\njob = \"web\"\ncgroup = \"{}\"\n", scene.cgroup.relative().display());
        for service in 0..services {
            text += &format!(
                "[[service]]\nname = \"s{service}\"\naddress = \"{}\"\nprotocol = \"udp\"\nbackends = {{ file = \
                 \"s{service}.toml\" }}\n",
                address_of(service)
            );
            for n in 1..=backends {
                let (name, address) = (format!("s{service}b{n}"), backend_of(service, n));
                scene.backends.push(DatagramBackend::start(&name, &address));
            }
            let list: Vec<String> = (1..=backends).map(|n| backend_of(service, n)).collect();
            let list: Vec<(&str, &str)> = list.iter().map(|address| (address.as_str(), "")).collect();
            scene.setup.write(&format!("s{service}.toml"), &endpoints(&list));
        }
        scene.daemon = Some(Daemon::start(&scene.setup, &(text + more)));
        scene
    }

    /// A process in the client's cgroup, on one CPU.
    pub fn probe(&self) -> Probe {
        let mut probe = Probe::start(&self.cgroup);
        probe.pin(0);
        probe
    }

    /// Stops the daemon and starts it again.
    pub fn restart(&mut self) {
        assert_eq!(self.daemon.take().expect("a daemon runs").stop(), Some(0));
        self.daemon = Some(Daemon::start_again(&self.setup));
    }

    /// Replaces the list of the first service.
    pub fn list(&self, list: &[(&str, &str)]) {
        replace(&self.setup.folder.join("s0.toml"), &endpoints(list));
    }

    /// The number of calls to a service with this outcome.
    pub fn outcome(&self, service: u16, name: &str) -> u64 {
        let client = self.setup.client();
        client.service(&format!("s{service}")).expect("the client has the service").outcomes[name]
    }

    /// The status of a service's backend with this number.
    pub fn backend(&self, service: u16, n: u16) -> BackendStatus {
        let (service, address) = (format!("s{service}"), backend_of(service, n));
        let backends = self.setup.backends("web", &service);
        let found = backends.iter().find(|backend| backend.address.to_string() == address);
        found.cloned().unwrap_or_else(|| panic!("no backend {address} in {backends:?}"))
    }

    /// Sum of a count over all backends of all services.
    pub fn sum(&self, count: impl Fn(&BackendStatus) -> u64) -> u64 {
        self.setup.client().services.iter().flat_map(|service| &service.backends).map(count).sum()
    }

    /// Number of sockets with flows of addressed datagrams.
    pub fn entries(&self) -> usize {
        let map = hash::<u64, Datagrams>(&self.setup.map("web", map::DATAGRAMS));
        map.keys().filter(Result::is_ok).count()
    }

    /// Asserts that no flow is open, and that every chosen flow is counted as ended, reclaimed or
    /// untracked.
    #[track_caller]
    pub fn all_gone(&self) {
        eventually("active counts return to 0", || self.setup.active(), |active| *active == 0);
        assert_eq!(self.entries(), 0, "closed sockets have no entries in the map of flows");
        // All counts come from one status, because the slot and the counts of a removed backend may
        // be missing in the next status.
        let client = self.setup.client();
        let sum = |count: fn(&BackendStatus) -> u64| -> u64 {
            client.services.iter().flat_map(|service| &service.backends).map(count).sum()
        };
        let chosen = sum(|backend| backend.started);
        assert!(chosen > 0, "a backend was chosen");
        let ended =
            sum(|backend| backend.endings.values().sum::<u64>() + backend.reclaimed + backend.untracked);
        assert_eq!(chosen, ended);
    }
}

pub fn address_of(service: u16) -> String {
    format!("10.96.0.{}:53", 10 + service)
}

pub fn backend_of(service: u16, n: u16) -> String {
    format!("127.0.0.1:{}", 8100 + 10 * service + n)
}
