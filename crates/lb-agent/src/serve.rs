//! The running agent: one event loop that owns the state of all backends, and the parts that
//! exchange messages with it.
//!
//! In reading order: the queries to the loop (`query`) and the programs that send them
//! (`registrations`); the inputs (`checks`, `measurements`, `udp`); the kernel's answers in the
//! agent's place (`responders`); the stored state (`lame_duck_store`); the loop (`event_loop`),
//! which applies queries and a changed configuration (`reload`) and shows its status (`summary`);
//! and HTTP (`pages`, and [`control`]). Two callers start an agent here: the command `socklb agent
//! serve`, and a program that runs a backend and has its own agent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use lb_document::diagnostic::chain;
use lb_host::notify::Notifier;
use lb_host::store::StateDirectory;
use lb_host::watch::Watch;
use lb_http::peer;
use lb_report::agent::Reports;
use lb_report::agent::name::Name;
use lb_report::agent::streak::Outcome;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::config::AgentConfig;
use crate::control;
use crate::incarnation;
use crate::utilization::Measured;

mod checks;
mod event_loop;
mod lame_duck_store;
mod measurements;
pub mod query;
pub mod registrations;
mod responders;
mod udp;

pub use event_loop::list;

mod pages;
mod reload;
mod summary;

use checks::Checks;
use event_loop::Server;
use lame_duck_store::{LameDuckLists, LameDuckStore};
use measurements::Measuring;
use query::Query;
use registrations::Registrations;
use reload::ConfigReload;
use responders::Responding;

/// Events for the event loop, from other tasks and threads.
#[derive(Debug)]
enum AgentEvent {
    /// A health check has ended.
    Checked { name: Name, number: u64, outcome: Outcome },
    /// The cgroups were read.
    Measured(Vec<(Name, Measured)>),
    /// The configuration was read.
    Read(Result<Box<AgentConfig>, String>),
    /// The watches of directories are in place.
    Watched,
}

/// Reads the configuration again, in the same way as at the start.
pub type Reread = Arc<dyn Fn() -> Result<AgentConfig> + Send + Sync>;

/// Optional functions of an agent, in addition to reports about backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The host's agent. This agent has a control socket, stores its state, applies changes of its
    /// configuration file, and notifies the service manager.
    Host,
    /// An agent in the process of a program that runs a backend. This agent only reports.
    Within,
}

/// A running agent. Dropping this value ends the agent; [`Agent::stop`] also removes the control
/// socket.
pub struct Agent {
    queries: mpsc::Sender<Query>,
    addresses: Vec<SocketAddr>,
    event_loop: JoinHandle<()>,
    servers: Vec<JoinHandle<()>>,
    socket: Option<PathBuf>,
}

/// Maximum number of simultaneous HTTP connections, for each port and for the control socket.
const CONNECTIONS: usize = 64;

/// Capacity of the channels for queries and for events. While a channel is full, its senders wait.
const WAITING: usize = 256;

/// Starts an agent in the caller's runtime. When this function returns, the agent answers requests.
/// If `reread` is given, the agent applies changes of its configuration file.
///
/// # Errors
/// If the agent cannot listen at an address, or another agent has the control socket.
pub async fn start(config: AgentConfig, role: Role, reread: Option<Reread>) -> Result<Agent> {
    let is_host = role == Role::Host;
    let (sockets, ports) = udp::listen_at(config.listen.as_deref())?;
    let addresses = sockets.addresses()?;
    let (queries, query_receiver) = mpsc::channel(WAITING);
    let (events, inbox) = mpsc::channel(WAITING);
    let group = config.group.as_deref().map(group_number).transpose()?;
    let control = is_host.then(|| {
        let bound = lb_host::socket::bind(&config.run, control::SOCKET, group);
        bound.with_context(|| format!("create the socket {}", control::socket(&config.run).display()))
    });
    let control = control.transpose()?;
    let wall = SystemTime::now();
    let StoredAgentState { incarnation, lame_duck_lists, lame_duck_store } = if is_host {
        StoredAgentState::of(&config.state, wall).await
    } else {
        StoredAgentState::nothing(wall, None)
    };
    let (now, secret) = (Instant::now(), secret()?);
    let mut server = Server {
        reports: Reports::new(incarnation, secret, now),
        sockets,
        addresses: addresses.clone(),
        registrations: Registrations::default(),
        checks: Checks::new(events.clone()),
        measuring: Measuring::new(events.clone()),
        responding: None,
        lame_ducks: lame_duck_lists.lame_ducks.clone(),
        lame_duck_store,
        reload: ConfigReload::new(config.path.clone().filter(|_| reread.is_some()), reread, events),
        watch: if is_host { watch(&config) } else { Watch::none() },
        notifier: is_host.then(Notifier::new),
        config: AgentConfig { backends: Vec::new(), ..config.clone() },
    };
    server.take_on(config.clone(), now);
    server.remember(&lame_duck_lists.by_run, now);
    let place = config.xdp.clone().filter(|_| is_host);
    server.responding = place.map(|place| Responding::start(place, &addresses, secret, &server.reports, now));
    server.follow_files();
    server.notify_ready();
    let event_loop = tokio::spawn(server.run(query_receiver, inbox));
    let mut agent = Agent { queries, addresses, event_loop, servers: Vec::new(), socket: None };
    for port in ports {
        agent.servers.push(tokio::spawn(lb_http::serve(port, pages::router(&agent.queries), CONNECTIONS)));
    }
    if let Some(control) = control {
        let path = control::socket(&config.run);
        let listener = control.show().with_context(|| format!("create the socket {}", path.display()))?;
        let router = control::router(&agent.queries, group).merge(pages::router(&agent.queries));
        agent.servers.push(tokio::spawn(lb_http::serve(listener, router, CONNECTIONS)));
        agent.socket = Some(path);
    }
    let listen: Vec<String> = agent.addresses.iter().map(ToString::to_string).collect();
    let socket = agent.socket.as_ref().map(|socket| socket.display().to_string());
    info!(listen = listen.join(", "), socket, backends = config.backends.len(), incarnation, "running");
    Ok(agent)
}

/// The state that earlier agents have stored.
struct StoredAgentState {
    incarnation: u32,
    lame_duck_lists: LameDuckLists,
    /// Stores changes of the state. Stores nothing if the earlier state cannot be read.
    lame_duck_store: LameDuckStore,
}

impl StoredAgentState {
    /// Time limit for reading the directory. After this time, the agent starts without the stored
    /// state, because reports are more important.
    const WITHIN: Duration = Duration::from_secs(5);

    /// Reads the state directory on a separate thread, because its file system may hang.
    async fn of(state: &std::path::Path, wall: SystemTime) -> Self {
        let store = StateDirectory::at(state);
        let (sender, read) = tokio::sync::oneshot::channel();
        let work = move || {
            let _ = sender.send(Self::read(&store, wall));
        };
        if let Err(error) = std::thread::Builder::new().name("stored".to_owned()).spawn(work) {
            return Self::nothing(wall, Some(error.to_string()));
        }
        match tokio::time::timeout(Self::WITHIN, read).await {
            Ok(Ok(stored)) => stored,
            Ok(Err(_)) | Err(_) => {
                let fault = format!("{} does not answer", state.display());
                warn!(
                    error = fault,
                    "cannot read the state directory; no change is saved until a restarted agent can read it"
                );
                Self::nothing(wall, Some(fault))
            }
        }
    }

    fn read(store: &StateDirectory, wall: SystemTime) -> Self {
        let lame_duck_lists = LameDuckLists::read(store);
        let incarnation = incarnation::draw(store, wall);
        match lame_duck_lists {
            Ok(lame_duck_lists) => Self {
                incarnation,
                lame_duck_store: LameDuckStore::new(store, lame_duck_lists.clone()),
                lame_duck_lists,
            },
            Err(error) => {
                let error = chain(&error);
                warn!(
                    error,
                    "cannot read the lame-duck list; no change is saved until a restarted agent can read it"
                );
                Self {
                    incarnation,
                    lame_duck_lists: LameDuckLists::default(),
                    lame_duck_store: LameDuckStore::none(Some(error)),
                }
            }
        }
    }

    /// No earlier state is known, and no state will be stored. `fault` is the reason, if there is
    /// one.
    fn nothing(wall: SystemTime, fault: Option<String>) -> Self {
        Self {
            incarnation: incarnation::next(None, wall),
            lame_duck_lists: LameDuckLists::default(),
            lame_duck_store: LameDuckStore::none(fault),
        }
    }
}

/// Watches files. Without a watch, the agent applies changes only on SIGHUP.
fn watch(config: &AgentConfig) -> Watch {
    if config.path.is_none() {
        return Watch::none();
    }
    Watch::new().unwrap_or_else(|error| {
        warn!(%error, "cannot watch files; changes are applied only on SIGHUP");
        Watch::none()
    })
}

fn group_number(name: &str) -> Result<u32> {
    let number = peer::group_number(name).with_context(|| format!("look up the group {name}"))?;
    number.with_context(|| {
        format!("`group` is {name}, but there is no such group (groupadd {name}, or leave `group` out)")
    })
}

/// Sixteen random bytes from the kernel, which cannot be guessed.
fn secret() -> Result<[u8; 16]> {
    let mut secret = [0; 16];
    crate::keys::fill(&mut secret)?;
    Ok(secret)
}

impl Agent {
    /// The channel for queries to the agent.
    pub const fn queries(&self) -> &mpsc::Sender<Query> {
        &self.queries
    }

    /// The addresses at which the agent listens, for UDP and TCP.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Makes the agent read its configuration again.
    pub async fn reload(&self) {
        let _ = self.queries.send(Query::Reload).await;
    }

    /// Waits until all clients have acknowledged the last change, for at most `within`.
    pub async fn wait_acknowledged(&self, within: Duration) {
        let all_have = async {
            let mut looks = tokio::time::interval(Duration::from_millis(10));
            // Runs until all clients have acknowledged; the caller's time limit bounds it.
            while let Some(status) = control::status(&self.queries).await
                && status.backends.iter().any(|backend| backend.unheard > 0)
            {
                looks.tick().await;
            }
        };
        let _ = tokio::time::timeout(within, all_have).await;
    }

    /// Ends the agent, and frees its ports and its socket for the next agent. Clients continue to
    /// use its last reports.
    pub async fn stop(mut self) {
        let _ = self.queries.send(Query::Stopping).await;
        // The socket is removed before the listener is closed: while the listener exists, no other
        // agent can have put a socket of its own at the path.
        if let Some(socket) = self.socket.take() {
            let _ = std::fs::remove_file(socket);
        }
        let mut tasks = std::mem::take(&mut self.servers);
        tasks.iter().for_each(JoinHandle::abort);
        self.event_loop.abort();
        let _ = (&mut self.event_loop).await;
        for task in &mut tasks {
            let _ = task.await;
        }
    }

    /// Waits until the event loop ends, which is a fault.
    pub async fn ended(&mut self) {
        let _ = (&mut self.event_loop).await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.servers.iter().for_each(JoinHandle::abort);
        self.event_loop.abort();
    }
}
