//! Backends that report each second, over a link where the kernel processes the reports.

use std::net::SocketAddr;

use anyhow::Result;
use stage::router::Router;
use stage::{Setup, eventually};

use crate::place::announcer::Announcer;
use crate::place::keys::ServiceKey;

/// The agent's address, at the far end of the link.
const AGENT: &str = "10.77.0.2:9465";

/// The agent and the link.
pub struct Reports {
    endpoints: &'static str,
    backends: usize,
    key: ServiceKey,
    _announcer: Announcer,
    _router: Router,
}

impl Reports {
    /// Starts an agent that reports all of these backends as ready.
    pub fn start(setup: &Setup, backends: &[SocketAddr]) -> Result<Self> {
        let key = ServiceKey::make(setup)?;
        let agent = format!("agent = \"{AGENT}\"");
        let names: Vec<String> = backends.iter().map(ToString::to_string).collect();
        let list: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), agent.as_str())).collect();
        let endpoints = "reported.toml";
        setup.write(endpoints, &stage::fixture::endpoints(&list));
        let router = Router::new();
        let keys = backends.iter().map(|backend| (*backend, key.of_backend(*backend)));
        let announcer = router.within(|| Announcer::start(AGENT.parse()?, key.id, keys))?;
        Ok(Self { endpoints, backends: backends.len(), key, _announcer: announcer, _router: router })
    }

    /// Returns parts of a configuration: the list of a service, further lines for the service, and
    /// lines for the host.
    pub fn text(&self) -> (String, String, String) {
        // The subset has a fixed size that includes all backends. A size is necessary because
        // policies that examine all members need a limited subset, and a file may have more
        // endpoints.
        let health = format!(
            "subset = {{ size = {} }}\nhealth = {{ probe = \"report\", interval = \"1s\", idle_interval = \"1s\" }}\n",
            self.backends
        );
        let reports = format!(
            "[reports]\nlisten = \"10.77.0.1:9467\"\nkey = \"{}\"\nxdp = [\"near\"]\n",
            self.key.path.display()
        );
        (format!("{{ file = \"{}\" }}", self.endpoints), health, reports)
    }
}

/// Waits until the kernel has received a report of every backend.
pub fn wait(setup: &Setup) {
    let have_reported = || {
        let status = setup.status();
        let services = status.clients.iter().flat_map(|client| &client.services);
        let mut backends = services.flat_map(|service| &service.backends);
        let native = status.interfaces.iter().any(|one| one.mode == "native");
        native && backends.all(|backend| backend.probe.as_ref().is_some_and(|probe| probe.state == "ready"))
    };
    eventually("all backends have reported", have_reported, |have_reported| *have_reported);
}
