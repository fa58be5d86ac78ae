//! The scenarios.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_view::backend::BackendStatus;
use lb_view::status::StatusDocument;

use crate::{BACKENDS, Flow, Reached, Row, World, rows, rows_become, rows_of, status_until, until};

fn address(backend: &str) -> SocketAddr {
    backend.parse().expect("the address is valid")
}

/// The backend with an address, as the client `web` uses it.
fn backend(status: &StatusDocument, address: SocketAddr) -> Option<&BackendStatus> {
    let client = status.client("web").expect("the client is configured");
    let service = client.service("users").expect("the service is configured");
    service.backends.iter().find(|backend| backend.address == address)
}

/// Starts a daemon, and waits until it balances these clients' connects to all backends.
fn begin<W: World>(world: &mut W, clients: &[&str]) {
    world.configure(clients);
    world.list(&BACKENDS);
    world.start();
    status_until(world, "all clients use all backends", |status| {
        clients.iter().all(|client| rows(status, client).len() == BACKENDS.len())
    });
}

/// The [`Row`] of a healthy member with these numbers of started, open and closed connections.
fn member(started: u64, active: u64, closed: u64) -> Row {
    let endings = [("closed".to_owned(), closed)].into_iter().filter(|(_, count)| *count > 0).collect();
    let (membership, state) = ("member".to_owned(), "healthy".to_owned());
    Row { membership, state, started, established: started, active, endings }
}

/// Dials from `cpus` CPUs in turn. Returns how often each backend was reached, and the connections.
fn dial<W: World>(
    world: &mut W,
    client: &str,
    count: usize,
    cpus: usize,
) -> (BTreeMap<SocketAddr, u64>, Vec<Flow>) {
    let (mut reached, mut flows) = (BTreeMap::new(), Vec::new());
    for number in 0..count {
        let (backend, flow) = world.dial(client, number % cpus).backend();
        *reached.entry(backend).or_default() += 1;
        flows.push(flow);
    }
    (reached, flows)
}

/// Counts of connections are sums over CPUs, and the counts of each backend match the connections
/// that the client has made.
pub fn connections_are_counted_on_every_cpu<W: World>(world: &mut W) {
    begin(world, &["web"]);
    let (reached, flows) = dial(world, "web", 12, 2);
    world.dial_directly("web", BACKENDS[0]);
    let open = |count: &u64| member(*count, *count, 0);
    let rows_of = |row: &dyn Fn(&u64) -> Row| {
        let all =
            BACKENDS.map(|backend| (address(backend), row(reached.get(&address(backend)).unwrap_or(&0))));
        BTreeMap::from(all)
    };
    rows_become(world, "web", &rows_of(&open));
    for flow in flows {
        world.close(flow);
    }
    rows_become(world, "web", &rows_of(&|count| member(*count, 0, *count)));
    let status = world.status();
    let client = status.client("web").expect("the client is configured");
    let outcomes = &client.service("users").expect("the service is configured").outcomes;
    let outcomes: BTreeMap<&str, u64> = outcomes
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(name, count)| (name.as_str(), *count))
        .collect();
    assert_eq!((client.not_a_service, outcomes), (1, BTreeMap::from([("forwarded", 12)])));
}

/// A backend that was removed from its list retains its slot while a connection to it is open, and
/// gets no new connections.
pub fn a_connection_holds_its_slot_until_it_ends<W: World>(world: &mut W) {
    begin(world, &["web"]);
    let (first, held) = world.dial("web", 0).backend();
    let slot_of =
        |world: &mut W| backend(&world.status(), first).map(|backend| (backend.slot, backend.generation));
    let slot = slot_of(world).expect("the backend has a slot");
    let others: Vec<&str> = BACKENDS.into_iter().filter(|backend| address(backend) != first).collect();
    world.list(&others);
    let leaving = Row { membership: "leaving".to_owned(), ..member(1, 1, 0) };
    status_until(world, "the backend is leaving", |status| rows(status, "web").get(&first) == Some(&leaving));
    let (reached, flows) = dial(world, "web", 6, 1);
    assert!(!reached.contains_key(&first), "the leaving backend {first} was reached: {reached:?}");
    flows.into_iter().for_each(|flow| world.close(flow));
    assert_eq!(slot_of(world), Some(slot));
    world.close(held);
    status_until(world, "the backend is gone", |status| !rows(status, "web").contains_key(&first));
    world.list(&BACKENDS);
    until(world, "the backend is a member again", |world| {
        rows(&world.status(), "web").get(&first).filter(|row| row.membership == "member").cloned()
    });
    assert_ne!(slot_of(world), Some(slot), "a flow with the old slot must not refer to the new backend");
    // The counts of the backend continue from their previous values.
    assert_eq!(rows(&world.status(), "web")[&first], member(1, 0, 1));
}

/// A backend that was removed from its list retains its slot while a program runs that may have
/// read the replaced table.
pub fn a_program_holds_the_slots_of_the_table_that_it_reads<W: World>(world: &mut W) {
    begin(world, &["web"]);
    world.hold("web");
    let chosen = until(world, "the programs have chosen a backend", |world| {
        let rows = rows(&world.status(), "web");
        rows.iter().find(|(_, row)| row.started == 1).map(|(address, _)| *address)
    });
    let removed = BACKENDS.into_iter().map(address).find(|backend| *backend != chosen);
    let removed = removed.expect("there are three backends");
    let others: Vec<&str> = BACKENDS.into_iter().filter(|backend| address(backend) != removed).collect();
    world.list(&others);
    let leaving = Row { membership: "leaving".to_owned(), ..member(0, 0, 0) };
    until(world, "the daemon waits for the programs", |world| world.waits_for_readers().then_some(()));
    // The wait cannot end, so the daemon cannot free the slot. It frees slots once per second.
    let since = world.now();
    until(world, "two seconds have passed", |world| {
        (world.now() >= since + Duration::from_secs(2)).then_some(())
    });
    assert_eq!(rows(&world.status(), "web").get(&removed), Some(&leaving));
    assert!(world.waits_for_readers(), "the wait has ended before the programs");
    let (backend, flow) = world.release().backend();
    assert_eq!(backend, chosen);
    status_until(world, "the backend is gone", |status| !rows(status, "web").contains_key(&removed));
    world.close(flow);
}

/// Without a daemon, connects follow the last table, and flows that begin and end meanwhile are
/// counted.
pub fn programs_balance_and_count_while_no_daemon_runs<W: World>(world: &mut W) {
    begin(world, &["web"]);
    let (mut reached, before) = dial(world, "web", 3, 1);
    world.kill();
    let (more, meanwhile) = dial(world, "web", 6, 1);
    for (backend, count) in more {
        *reached.entry(backend).or_default() += count;
    }
    for flow in before.into_iter().chain(meanwhile) {
        world.close(flow);
    }
    world.start();
    let expected = BACKENDS.map(|backend| {
        let count = reached.get(&address(backend)).copied().unwrap_or(0);
        (address(backend), member(count, 0, count))
    });
    rows_become(world, "web", &BTreeMap::from(expected));
}

/// If no program sees the end of a flow, a pass over the flow records ends it. Other flows remain.
pub fn a_flow_whose_end_no_program_saw_is_reclaimed<W: World>(world: &mut W) {
    begin(world, &["web"]);
    let (first, lost) = world.dial("web", 0).backend();
    let (second, stays) = world.dial("web", 0).backend();
    world.kill();
    world.unlink("web");
    world.close(lost);
    world.start();
    status_until(world, "one record is reclaimed", |status| {
        let client = status.client("web").expect("the client is configured");
        client.reclaim.as_ref().is_some_and(|reclaim| reclaim.reclaimed == 1)
    });
    // Both flows have begun. Only the end of the second is counted.
    let expected = |active: u64| {
        let mut rows = BTreeMap::from(BACKENDS.map(|backend| (address(backend), member(0, 0, 0))));
        for backend in [first, second] {
            let started = rows[&backend].started + 1;
            rows.insert(backend, member(started, 0, 0));
        }
        let started = rows[&second].started;
        rows.insert(second, member(started, active, 1 - active));
        rows
    };
    rows_become(world, "web", &expected(1));
    world.close(stays);
    rows_become(world, "web", &expected(0));
}

/// The datagrams of a socket to a service are one flow. The flow moves if its backend leaves the
/// list, and ends with the socket.
pub fn datagrams_of_a_socket_are_one_flow_until_it_closes<W: World>(world: &mut W) {
    begin(world, &["web"]);
    let queries = |status: &StatusDocument| rows_of(status, "web", "queries");
    status_until(world, "all backends receive datagrams", |status| queries(status).len() == BACKENDS.len());
    let flow = |started, active, closed| Row { established: 0, ..member(started, active, closed) };
    let socket = world.open_datagram("web");
    let first = world.send(socket);
    assert_eq!(world.send(socket), first);
    status_until(world, "one flow is open", |status| queries(status)[&first] == flow(1, 1, 0));
    let others: Vec<&str> = BACKENDS.into_iter().filter(|backend| address(backend) != first).collect();
    world.list(&others);
    let leaving = Row { membership: "leaving".to_owned(), ..flow(1, 1, 0) };
    status_until(world, "the backend is leaving", |status| queries(status).get(&first) == Some(&leaving));
    let second = world.send(socket);
    assert_ne!(second, first);
    status_until(world, "the flow has moved", |status| {
        let rows = queries(status);
        !rows.contains_key(&first) && rows[&second] == flow(1, 1, 0)
    });
    world.close_datagram(socket);
    status_until(world, "no flow is open", |status| queries(status)[&second] == flow(1, 0, 1));
    let status = world.status();
    let client = status.client("web").expect("the client is configured");
    let outcomes = &client.service("queries").expect("the service is configured").outcomes;
    let counts = ["forwarded", "reused"].map(|outcome| outcomes[outcome]);
    assert_eq!(counts, [2, 1]);
}

/// The daemon creates links again if an operator removes them, and the counts continue.
pub fn links_removed_by_an_operator_are_created_again<W: World>(world: &mut W) {
    begin(world, &["web", "batch"]);
    let (backend, flow) = world.dial("web", 0).backend();
    world.close(flow);
    rows_become(world, "web", &with(backend, member(1, 0, 1)));
    world.unlink("web");
    assert_eq!(world.dial("web", 0), Reached::Nothing);
    // The other client has its own links.
    let (other, flow) = world.dial("batch", 0).backend();
    world.close(flow);
    rows_become(world, "batch", &with(other, member(1, 0, 1)));
    let (again, flow) = until(world, "the client is balanced again", |world| match world.dial("web", 0) {
        Reached::Backend(backend, flow) => Some((backend, flow)),
        _ => None,
    });
    world.close(flow);
    let mut expected = with(backend, member(1, 0, 1));
    let row = expected.get_mut(&again).expect("the backend is a member");
    *row = member(row.started + 1, 0, row.started + 1);
    rows_become(world, "web", &expected);
}

/// The [`Row`] of each backend: `row` for `backend`, and no connections for the others.
fn with(backend: SocketAddr, row: Row) -> BTreeMap<SocketAddr, Row> {
    let mut rows = BTreeMap::from(BACKENDS.map(|backend| (address(backend), member(0, 0, 0))));
    rows.insert(backend, row);
    rows
}

/// A client that is no longer configured begins no flow, and remains until its last flow has ended.
pub fn a_removed_client_stays_until_its_last_flow_has_ended<W: World>(world: &mut W) {
    begin(world, &["web", "batch"]);
    let (_, flow) = world.dial("batch", 0).backend();
    world.configure(&["web"]);
    status_until(world, "the client is leaving", |status| {
        let leaving = status.leaving.iter().map(|leaving| (leaving.client.as_str(), leaving.active));
        leaving.eq([("batch", Some(1))]) && status.client("batch").is_none()
    });
    assert_eq!(world.dial("batch", 0), Reached::Nothing);
    let (_, other) = world.dial("web", 0).backend();
    world.close(flow);
    status_until(world, "the client is gone", |status| status.leaving.is_empty());
    world.close(other);
}

/// The programs eject a backend after failures in a row, and a trial connect readmits it.
pub fn failures_in_a_row_eject_a_backend_and_a_trial_readmits_it<W: World>(world: &mut W) {
    begin(world, &["web"]);
    world.set_refusing(BACKENDS[2], true);
    let mut refused = 0;
    let look = |world: &mut W| {
        let status = world.status();
        backend(&status, address(BACKENDS[2])).expect("the backend is a member").clone()
    };
    // The daemon's probes are off, so only connects show the state of the backend.
    let ejected = until(world, "the backend is ejected", |world| {
        match world.dial("web", 0) {
            Reached::Backend(_, flow) => world.close(flow),
            Reached::Refused => refused += 1,
            Reached::Nothing => panic!("the connect was not balanced"),
        }
        let backend = look(world);
        (backend.ejections > 0).then_some(backend)
    });
    let ejection = ejected.ejection.expect("the backend is ejected");
    assert_eq!((ejection.failures, ejection.cause.as_str(), ejection.times), (refused, "refused", 1));
    assert_eq!((ejected.state.as_str(), ejected.started), ("ejected", refused.into()));
    world.set_refusing(BACKENDS[2], false);
    let readmitted = until(world, "a trial has readmitted the backend", |world| {
        if let Reached::Backend(_, flow) = world.dial("web", 0) {
            world.close(flow);
        }
        let backend = look(world);
        (backend.readmissions > 0).then_some(backend)
    });
    assert_eq!((readmitted.ejections, readmitted.readmissions, readmitted.trials), (1, 1, 1));
    assert_eq!(readmitted.ejection, None);
}
