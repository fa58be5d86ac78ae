//! Scenarios of a whole daemon that tests run both on the simulated kernel (`lb-fake`) and on a
//! real kernel, to check that both kernels behave in the same way.
//!
//! Tests of the daemon on the simulated kernel are only as reliable as that kernel. Each scenario
//! covers a property in which the simulated kernel could differ from a real kernel: tables that are
//! published while programs read them, the wait until no program reads an old table, counts that
//! are summed over CPUs, links that are removed and created again, programs and maps that outlive
//! their daemon, records of flows whose end no program saw, the flows of datagram sockets, and the
//! order of the steps by which failures are judged.
//!
//! A [`World`] is a host with three backends, two cgroups, and a daemon that may be running or not.
//! Scenarios observe the daemon through its status, as an operator does. If an expected status
//! takes time to appear, the scenarios wait for it until a deadline.

mod scenarios;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_view::status::StatusDocument;

pub use scenarios::{
    a_connection_holds_its_slot_until_it_ends, a_flow_whose_end_no_program_saw_is_reclaimed,
    a_program_holds_the_slots_of_the_table_that_it_reads,
    a_removed_client_stays_until_its_last_flow_has_ended, connections_are_counted_on_every_cpu,
    datagrams_of_a_socket_are_one_flow_until_it_closes,
    failures_in_a_row_eject_a_backend_and_a_trial_readmits_it,
    links_removed_by_an_operator_are_created_again, programs_balance_and_count_while_no_daemon_runs,
};

/// The service that clients dial. A second service, over UDP, has the same address and list.
pub const SERVICE: &str = "10.96.0.10:80";

/// The addresses of the backends, all of which listen.
pub const BACKENDS: [&str; 3] = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];

pub trait World {
    /// Writes a configuration in which each of these clients has its own permanent cgroup, and all
    /// use the services `users` (TCP) and `queries` (UDP) at [`SERVICE`]. Passes over the flow
    /// records are a second apart. A running daemon reloads the configuration.
    fn configure(&mut self, clients: &[&str]);

    /// Replaces the service's list of endpoints. A running daemon reads the new list.
    fn list(&mut self, backends: &[&str]);

    /// Starts a daemon.
    fn start(&mut self);

    /// Kills the daemon.
    fn kill(&mut self);

    /// Dials [`SERVICE`] from a process in a client's cgroup, on CPU 0 or 1.
    fn dial(&mut self, client: &str, cpu: usize) -> Reached;

    /// Dials a backend's own address from a process in a client's cgroup, and closes the
    /// connection.
    fn dial_directly(&mut self, client: &str, backend: &str);

    /// Begins to dial [`SERVICE`] from a process in a client's cgroup. The client's programs choose
    /// a backend, but the kernel still counts them as running until [`World::release`].
    fn hold(&mut self, client: &str);

    /// Lets the programs of [`World::hold`] end. Returns what was reached.
    fn release(&mut self) -> Reached;

    /// Whether the daemon waits for the end of all running programs.
    fn waits_for_readers(&mut self) -> bool;

    /// Closes a connection in the process that has made it.
    fn close(&mut self, flow: Flow);

    /// Opens a datagram socket in a process in a client's cgroup.
    fn open_datagram(&mut self, client: &str) -> DatagramSocket;

    /// Sends a datagram to [`SERVICE`]. Returns the backend that receives it.
    fn send(&mut self, socket: DatagramSocket) -> SocketAddr;

    /// Closes a datagram socket.
    fn close_datagram(&mut self, socket: DatagramSocket);

    /// Makes a backend refuse or accept connections from now on.
    fn set_refusing(&mut self, backend: &str, is_refusing: bool);

    /// Removes all links of a client, as an operator may.
    fn unlink(&mut self, client: &str);

    /// The output of `socklb status`.
    fn status(&mut self) -> StatusDocument;

    /// The time since the beginning of the world.
    fn now(&self) -> Duration;

    /// The maximum time that a scenario waits for a condition.
    fn patience(&self) -> Duration;

    /// Waits for a short time.
    fn pass(&mut self);
}

/// A connection that a process has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow(pub usize);

/// A datagram socket that a process has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramSocket(pub usize);

/// The result of dialling the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    Backend(SocketAddr, Flow),
    /// The connect went to a backend that refuses connections.
    Refused,
    /// The connect was not balanced, and failed because no host has the service's address.
    Nothing,
}

impl Reached {
    /// The backend and the connection.
    #[track_caller]
    fn backend(self) -> (SocketAddr, Flow) {
        match self {
            Self::Backend(backend, flow) => (backend, flow),
            other => panic!("the connect reached no backend: {other:?}"),
        }
    }
}

/// The properties of a backend that must be the same on both kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    membership: String,
    state: String,
    started: u64,
    established: u64,
    active: u64,
    /// Only endings that have occurred.
    endings: BTreeMap<String, u64>,
}

/// The properties of each backend of a client's service `users`, keyed by address.
fn rows(status: &StatusDocument, client: &str) -> BTreeMap<SocketAddr, Row> {
    rows_of(status, client, "users")
}

/// The properties of each backend of a client's service, keyed by address.
fn rows_of(status: &StatusDocument, client: &str, service: &str) -> BTreeMap<SocketAddr, Row> {
    let backends = status.client(client).and_then(|client| client.service(service));
    let backends = backends.into_iter().flat_map(|service| &service.backends);
    backends
        .map(|backend| {
            let endings = backend.endings.iter().filter(|(_, count)| **count > 0);
            let row = Row {
                membership: backend.membership.clone(),
                state: backend.state.clone(),
                started: backend.started,
                established: backend.established,
                active: backend.active,
                endings: endings.map(|(ending, count)| (ending.clone(), *count)).collect(),
            };
            (backend.address, row)
        })
        .collect()
}

/// Calls `look` until it returns a value, and waits between the calls. `what` is the awaited
/// condition, for the message if the deadline passes.
#[track_caller]
fn until<W: World, T>(world: &mut W, what: &str, mut look: impl FnMut(&mut W) -> Option<T>) -> T {
    let deadline = world.now() + world.patience();
    loop {
        if let Some(seen) = look(world) {
            return seen;
        }
        assert!(world.now() < deadline, "deadline passed before {what}: {:#?}", world.status());
        world.pass();
    }
}

/// Waits until the status satisfies `fact`.
#[track_caller]
fn status_until<W: World>(world: &mut W, what: &str, fact: impl Fn(&StatusDocument) -> bool) {
    until(world, what, |world| fact(&world.status()).then_some(()));
}

/// Waits until [`rows`] of a client equals `expected`.
#[track_caller]
fn rows_become<W: World>(world: &mut W, client: &str, expected: &BTreeMap<SocketAddr, Row>) {
    status_until(world, &format!("the backends of {client} are {expected:#?}"), |status| {
        rows(status, client) == *expected
    });
}
