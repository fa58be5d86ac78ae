//! Scripts about flows: records without a socket, and the flows of datagram sockets.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_fake::FakeSocket;

use super::stage::{BACKENDS, SERVICE, Stage, address, script};

/// The time in which two passes over the flow records end.
const TWO_PASSES: Duration = Duration::from_mins(3);

/// The number of active flows of each backend that has any.
fn active(stage: &Stage) -> BTreeMap<SocketAddr, u64> {
    let tables = stage.task().datapath().tables();
    let slots = tables.slots().into_iter();
    slots.map(|slot| (slot.address, tables.active(slot.at.slot))).filter(|(_, active)| *active > 0).collect()
}

fn reclaimed(stage: &Stage) -> u64 {
    stage.client().reclaim.expect("a daemon runs").reclaimed
}

#[test]
fn a_record_without_a_socket_is_reclaimed_and_its_slot_becomes_free() {
    script("", |stage| {
        for _ in 0..6 {
            stage.connect().expect("all backends accept connects");
        }
        // Four of the six sockets are closed while no program is attached.
        stage.kernel.unlink(&stage.pins());
        let stay = stage.open.split_off(4);
        stage.close_all();
        stage.open = stay;
        // `check` would compare the records with the open sockets.
        stage.is_counted = false;
        assert_eq!(active(stage).values().sum::<u64>(), 6);
        stage.list(&BACKENDS[1..]);
        stage.stop_faults();
        stage.pass(TWO_PASSES);
        assert_eq!((active(stage).values().sum::<u64>(), reclaimed(stage)), (2, 4));
        stage.is_counted = true;
        stage.check();
        stage.close_all();
        stage.pass(TWO_PASSES);
        assert_eq!((active(stage), reclaimed(stage)), (BTreeMap::new(), 4));
        assert_eq!(stage.states().len(), 2);
    });
}

/// Sends a datagram on each socket. Returns the number of datagrams that each backend receives.
fn send(stage: &Stage, sockets: &[FakeSocket]) -> BTreeMap<SocketAddr, u64> {
    let mut received = BTreeMap::new();
    for socket in sockets {
        let backend = stage.kernel.send_datagram(socket, address(SERVICE)).expect("a backend is usable");
        *received.entry(backend.expect("the address is a service")).or_default() += 1;
    }
    received
}

#[test]
fn a_datagram_socket_leaves_a_removed_backend_with_its_next_datagram() {
    script("protocol = \"udp\"", |stage| {
        // `check` counts connections only.
        stage.is_counted = false;
        let sockets = [(); 6].map(|()| stage.kernel.open_datagram(stage.place, 1));
        let all = BTreeMap::from(BACKENDS.map(|backend| (address(backend), 2)));
        for _ in 0..3 {
            assert_eq!(send(stage, &sockets), all);
            assert_eq!(active(stage), all);
        }
        stage.list(&BACKENDS[1..]);
        stage.stop_faults();
        // The flows hold the slot of the removed backend until the sockets send again.
        assert_eq!(active(stage), all);
        let others = BTreeMap::from([BACKENDS[1], BACKENDS[2]].map(|backend| (address(backend), 3)));
        assert_eq!(send(stage, &sockets), others);
        assert_eq!(active(stage), others);
        stage.stop_faults();
        assert_eq!(stage.states().len(), 2);
        let outcomes = stage.service().outcomes;
        assert_eq!(["forwarded", "reused"].map(|outcome| outcomes[outcome]), [8, 16]);
        for socket in sockets {
            stage.kernel.close_datagram(socket);
        }
        assert_eq!(active(stage), BTreeMap::new());
    });
}

#[test]
fn datagram_flows_of_a_lost_socket_are_reclaimed() {
    script("protocol = \"udp\"", |stage| {
        stage.is_counted = false;
        let [lost, stays] = [(); 2].map(|()| stage.kernel.open_datagram(stage.place, 1));
        send(stage, &[lost, stays]);
        let remaining = send(stage, &[stays]);
        stage.kernel.unlink(&stage.pins());
        stage.kernel.close_datagram(lost);
        stage.stop_faults();
        stage.pass(TWO_PASSES);
        assert_eq!((active(stage), reclaimed(stage)), (remaining, 1));
        assert_eq!(send(stage, &[stays]).len(), 1);
        stage.kernel.close_datagram(stays);
        assert_eq!(active(stage), BTreeMap::new());
    });
}
