//! Backends that report each second, over a link where the kernel processes the reports.

use std::net::SocketAddr;

use anyhow::Result;
use stage::router::Router;
use stage::{Setup, eventually};

use crate::place::{Announcer, Place, ServiceKey, reported_each};

/// The agent's address, at the far end of the link.
const AGENT: &str = "10.77.0.2:9465";

/// The agent and the link.
pub struct Reports {
    _announcer: Announcer,
    _router: Router,
    /// Parts of a configuration: the list of a service, further lines for the service, and lines
    /// for the host.
    pub text: [String; 3],
}

impl Reports {
    /// Starts an agent that reports all of these backends as ready.
    pub fn start(setup: &Setup, backends: &[SocketAddr]) -> Result<Self> {
        let key = ServiceKey::make(setup)?;
        let agent = format!("agent = \"{AGENT}\"");
        let names: Vec<String> = backends.iter().map(ToString::to_string).collect();
        let list: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), agent.as_str())).collect();
        setup.write("reported.toml", &stage::fixture::endpoints(&list));
        let router = Router::new();
        let announcer = router.within(|| Announcer::start(AGENT, &key, backends))?;
        // The subset has a fixed size that includes all backends. A size is necessary because
        // policies that examine all members need a limited subset, and a file may have more
        // endpoints.
        let of_service = format!("subset = {{ size = {} }}\n{}", backends.len(), reported_each("1s"));
        let of_host = key.reports("10.77.0.1:9467") + "xdp = [\"near\"]\n";
        let text = ["{ file = \"reported.toml\" }".to_owned(), of_service, of_host];
        Ok(Self { _announcer: announcer, _router: router, text })
    }
}

/// Waits until the kernel has received a report of every backend.
pub fn wait(place: &Place, backends: usize) {
    let native = || place.setup.status().interfaces.iter().any(|one| one.mode == "native");
    eventually("the kernel listens", native, |is| *is);
    place.wait_for("ready", backends);
}
