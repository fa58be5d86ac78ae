//! A service without a usable backend fails connects with exactly its errno.

use stage::kernel::refusal;
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

#[track_caller]
fn check(more: &str, errno: i32) {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let daemon = Daemon::start(&setup, &config(&cgroup, "{ static = [] }", more));
    let mut probe = Probe::start(&cgroup);
    for address in [SERVICE, "[::ffff:10.96.0.10]:80"] {
        let refused = probe.try_dial(address).map(|dialled| dialled.name);
        assert_eq!(refused, Err(refusal(errno)), "{address}");
    }
    look(|| setup.status()).has(|status| status.clients[0].services[0].outcomes["no-backend"], 2);
    assert_eq!(setup.run(&["status"]).status.code(), Some(3), "a service without a backend is degraded");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn without_a_backend_the_default_errno_is_ehostunreach() {
    check("", libc::EHOSTUNREACH);
}

#[test]
fn without_a_backend_the_errno_is_the_configured_one() {
    check("on_no_backend = \"ECONNREFUSED\"", libc::ECONNREFUSED);
}

#[test]
fn weight_zero_for_all_backends_stops_traffic_until_it_is_raised() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let all = |more| [("127.0.0.1:8001", more), ("127.0.0.1:8002", more), ("127.0.0.1:8003", more)];
    fixture.write_endpoints(&all("weight = 0"));
    let errno = || probe.try_dial(SERVICE).err();
    eventually("connects are refused", errno, |errno| *errno == Some(refusal(libc::EHOSTUNREACH)));
    fixture.write_endpoints(&all("weight = 2"));
    let mut probe = fixture.probe();
    let errno = || probe.try_dial(SERVICE).err();
    eventually("connects succeed again", errno, Option::is_none);
}
