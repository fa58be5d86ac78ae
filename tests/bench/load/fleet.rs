//! The fleet: backends with different quotas, clients with different rates, and the cost of
//! requests. The planner simulates a fleet with the same numbers.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use stage::agent::Agent;
use stage::daemon::ChildGuard;
use stage::quota::Used;
use stage::{Quota, Setup, eventually};

use super::sender::Pace;
use crate::place::process::{self, part};
use crate::place::{ServiceKey, metric};

/// The quota of each backend, in percent of a processor.
pub const QUOTAS: [u32; 8] = [4, 4, 4, 8, 8, 8, 16, 16];

/// The period of the quotas. With this period, the smallest quota is a millisecond, the smallest
/// that the kernel accepts.
pub const PERIOD: Duration = Duration::from_millis(25);

/// The relative rates of the client tasks.
pub const RATES: [f64; 4] = [1.0, 1.5, 2.5, 0.6];

/// The load, as a share of the sum of all quotas.
const LOAD: f64 = 0.6;

/// The lifetime of a reused connection.
const LIFE: Duration = Duration::from_secs(10);

/// The pause after each request on a connection. It is so long that there are many connections. So
/// one connection more or less at a backend does not matter.
const PAUSE: Duration = Duration::from_secs(2);

/// How clients dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// A connection for each request
    Fresh,
    /// Connections that are reused for 10 s, with a request every 2 s
    Retained,
}

impl Mode {
    pub const ALL: [Self; 2] = [Self::Fresh, Self::Retained];

    /// The name of the mode, of its job and of its service.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Retained => "kept",
        }
    }

    /// The service that the mode's clients dial.
    pub fn service(self) -> SocketAddr {
        SocketAddr::from(([10, 96, 0, self.number()], 80))
    }

    pub fn backends(self) -> impl Iterator<Item = SocketAddr> {
        (1..).take(QUOTAS.len()).map(move |last| SocketAddr::from(([127, 10, self.number(), last], 8080)))
    }

    fn number(self) -> u8 {
        match self {
            Self::Fresh => 1,
            Self::Retained => 2,
        }
    }
}

/// The mean cost of requests, and its variation.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The mean CPU time.
    pub mean: Duration,
    /// The standard deviation of the logarithm of the cost; 0 if all requests cost the same.
    pub sigma: f64,
}

impl Cost {
    /// Returns the [`Pace`] of each client task.
    pub fn paces(self, mode: Mode) -> [Pace; RATES.len()] {
        let cores = f64::from(QUOTAS.iter().sum::<u32>()) / 100.0;
        let requests = LOAD * cores / self.mean.as_secs_f64();
        RATES.map(|rate| {
            let requests = requests * rate / RATES.iter().sum::<f64>();
            match mode {
                Mode::Fresh => Pace { connections: requests, life: Duration::ZERO, pause: Duration::ZERO },
                Mode::Retained => {
                    let open = requests * PAUSE.as_secs_f64();
                    Pace { connections: open / LIFE.as_secs_f64(), life: LIFE, pause: PAUSE }
                }
            }
        })
    }
}

/// A backend. It is killed on drop.
pub struct Backend {
    // The process is dropped before the cgroup in which it runs.
    _process: ChildGuard,
    pub address: SocketAddr,
    quota: Quota,
}

impl Backend {
    fn start(address: SocketAddr, quota: Quota, cost: Cost, agent: &Path) -> Result<Self> {
        let mut command = part("serve-load")?;
        command.args([
            &address.to_string(),
            "--cost",
            &cost.mean.as_micros().to_string(),
            "--sigma",
            &cost.sigma.to_string(),
        ]);
        command.arg("--agent").arg(agent);
        quota.enter(&mut command);
        Ok(Self { _process: process::start(&mut command)?, address, quota })
    }

    /// Limits the backend to this percentage of a processor.
    pub fn limit(&self, percent: u32) -> Result<()> {
        self.quota.limit(PERIOD * percent / 100, PERIOD)
    }

    pub fn used(&self) -> Result<Used> {
        self.quota.used()
    }
}

/// All backends, with their agent.
pub struct Fleet {
    /// The backends of each mode.
    pub backends: Vec<(Mode, Vec<Backend>)>,
    pub agent: Agent,
    /// The services' key.
    pub key: ServiceKey,
}

impl Fleet {
    pub fn start(setup: &Setup, modes: &[Mode], cost: Cost) -> Result<Self> {
        let key = ServiceKey::make(setup)?;
        let addresses = || modes.iter().flat_map(|mode| mode.backends());
        let quotas = addresses().map(|_| Quota::new()).collect::<Result<Vec<_>>>()?;
        let measured =
            |quota: &Quota| format!("interval = \"1s\"\nutilization = {{ cgroup = \"{}\" }}\n", quota.name());
        let backends = addresses().zip(quotas.iter().map(measured));
        key.configure_agent(setup, "listen = [\"0.0.0.0:9465\"]\n", backends);
        let agent = Agent::start_again(setup);
        let socket = setup.folder.join("agent/run/agent.sock");
        let (mut quotas, mut backends) = (quotas.into_iter(), Vec::new());
        for mode in modes {
            let mut of_mode = Vec::new();
            for (address, percent) in mode.backends().zip(QUOTAS) {
                let quota = quotas.next().context("there are too few quotas")?;
                let backend = Backend::start(address, quota, cost, &socket)?;
                backend.limit(percent)?;
                of_mode.push(backend);
            }
            backends.push((*mode, of_mode));
        }
        let fleet = Self { backends, agent, key };
        let unready = || {
            let page = fleet.agent.metrics();
            let ready = |line: &&str| line.contains("readiness=\"ready\"") && line.ends_with(" 1.0");
            fleet.backends.iter().map(|(_, of_mode)| of_mode.len()).sum::<usize>()
                - page.lines().filter(ready).count()
        };
        eventually("all backends are ready", unready, |unready| *unready == 0);
        Ok(fleet)
    }

    /// The utilization of each backend that the agent reports, for each mode; 0 if it is unknown.
    pub fn reported(&self) -> Vec<Vec<f64>> {
        let page = self.agent.metrics();
        let reported = |backend: &Backend| {
            metric(&page, &format!("socklb_agent_backend_utilization{{backend=\"{}\"}}", backend.address))
        };
        self.backends.iter().map(|(_, of_mode)| of_mode.iter().map(reported).collect()).collect()
    }
}
