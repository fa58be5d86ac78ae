//! Scripts of the states that backends report: under each policy, and when a host starts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::Policy;
use lb_common::abi::host::{MAX_SENDERS, Sender, SenderName};
use lb_common::net::{Address, Be16, IPPROTO_TCP};
use lb_kernel::Kernel as _;
use lb_report::wire::Readiness;

use super::REPORTS;
use crate::controller::scripts::stage::{BACKENDS, PINS, SECOND, Stage, address, script};

#[test]
fn a_lame_duck_gets_no_connects_under_any_policy_with_and_without_a_daemon() {
    let others: BTreeSet<SocketAddr> = BACKENDS[1..].iter().map(|backend| address(backend)).collect();
    for policy in Policy::ALL {
        script(&format!("policy = \"{}\"\n{REPORTS}", policy.name()), |stage| {
            BACKENDS.iter().for_each(|backend| stage.announce(backend, Readiness::Ready));
            stage.pass(3 * SECOND);
            stage.settle();
            assert_eq!((stage.dial(60), stage.sent.len()), (0, 3), "{policy:?}");
            stage.announce(BACKENDS[0], Readiness::LameDuck);
            stage.pass(3 * SECOND);
            assert_eq!(stage.dialled(300), others, "{policy:?}");
            stage.settle();
            assert_eq!((stage.dial(300), stage.dialled(300)), (0, others.clone()), "{policy:?}");
            stage.kill();
            assert_eq!(
                (stage.dial(300), stage.dialled(300)),
                (0, others.clone()),
                "{policy:?}, without a daemon"
            );
            stage.start(&BACKENDS);
            stage.announce(BACKENDS[0], Readiness::Ready);
            stage.pass(3 * SECOND);
            stage.settle();
            assert_eq!(stage.dialled(300).len(), 3, "{policy:?}");
        });
    }
}

/// The interval of polls is long, so only the first poll can have found the lame duck.
#[test]
fn an_existing_lame_duck_gets_no_connect_from_a_new_host() {
    let mut stage = Stage::new(&REPORTS.replace("\"1s\"", "\"30s\""));
    BACKENDS[1..].iter().for_each(|backend| stage.announce(backend, Readiness::Ready));
    stage.announce(BACKENDS[0], Readiness::LameDuck);
    stage.write_list(&BACKENDS);
    stage.try_to_start(1);
    assert_eq!(stage.connect(), Err(0), "the client is not attached yet");
    // Bound: the daemon attaches the client after at most half a second.
    while stage.connect().is_err() {
        stage.pass(Duration::from_millis(10));
    }
    assert_eq!(stage.dial(300), 0);
    assert!(stage.sent.keys().copied().eq(BACKENDS[1..].iter().map(|one| address(one))), "{:?}", stage.sent);
}

/// The register is full of entries of earlier backends. So a new backend gets no entry, but no
/// other backend loses its entry.
#[test]
fn backends_beyond_the_last_report_id_are_counted_and_do_not_affect_others() {
    let name = |address: SocketAddr| SenderName {
        address: Address::from(address.ip()),
        port: Be16::from_host(address.port()),
        protocol: IPPROTO_TCP,
        _reserved: 0,
    };
    let [first, second, third] = BACKENDS.map(address);
    script(REPORTS, |stage| {
        BACKENDS.iter().for_each(|backend| stage.announce(backend, Readiness::Ready));
        stage.stop_faults();
        stage.kill();
        let maps = stage.kernel.host_maps(PINS.as_ref()).expect("faults are off");
        let sender =
            |address| maps.sender(&name(address)).expect("faults are off").expect("the backend has a sender");
        let (model, held) = (sender(third), [first, second].map(|address| sender(address).id));
        assert!(maps.remove_sender(&name(third)).expect("faults are off"));
        for id in (1..=MAX_SENDERS).filter(|id| !held.contains(id)) {
            let [_, _, high, low] = id.to_be_bytes();
            let other = SocketAddr::from(([127, 9, high, low], 1));
            maps.set_sender(&name(other), &Sender { id, ..model }).expect("faults are off");
        }
        stage.try_to_start(1);
        stage.pass(3 * SECOND);
        let faults = stage.degraded();
        let phrase = "no report id is free for the reports of 1 backend";
        assert!(faults.len() == 1 && faults[0].contains(phrase), "{faults:?}");
        assert_eq!([first, second].map(|address| sender(address).id), held);
        stage.announce(BACKENDS[2], Readiness::LameDuck);
        stage.pass(3 * SECOND);
        let probe = stage.backend(BACKENDS[2]).probe.expect("the backend is probed");
        assert_eq!(probe.state, "lame-duck", "the daemon has the backend's report");
        assert_eq!(stage.dialled(60), [first, second, third].into(), "connects ignore the report");
        stage.announce(BACKENDS[0], Readiness::LameDuck);
        stage.pass(3 * SECOND);
        assert_eq!(stage.dialled(60), [second, third].into());
        stage.announce(BACKENDS[0], Readiness::Ready);
        stage.pass(3 * SECOND);
        assert_eq!(stage.dialled(60), [first, second, third].into());
    });
}
