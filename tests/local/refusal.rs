//! A service without a usable backend fails connects with exactly its errno.

use stage::kernel::refusal;
use stage::{Cgroup, Daemon, Probe, Setup, Stage, look};

use stage::fixture::{SERVICE, config};

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
