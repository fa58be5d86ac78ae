//! A service without a usable backend fails connects with exactly its errno. The test has the name
//! of the effect, and the number of the bug in docs/design/bugs-of-others.md.

use stage::kernel::refusal;
use stage::{Cgroup, Daemon, Probe, Setup, Stage, look};

use stage::fixture::{SERVICE, config};

/// The bug: connects to a service without backends failed with EPERM, which clients take as a sign
/// of a firewall.
#[test]
fn r7_a_service_without_backends_fails_with_its_errno_and_never_eperm() {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    for (name, more, errno) in [
        ("default", "", libc::EHOSTUNREACH),
        ("refused", "on_no_backend = \"ECONNREFUSED\"", libc::ECONNREFUSED),
        ("unreachable", "on_no_backend = \"EHOSTUNREACH\"", libc::EHOSTUNREACH),
    ] {
        let setup = Setup::new(&stage, name);
        let daemon = Daemon::start(&setup, &config(&cgroup, "{ static = [] }", more));
        let mut probe = Probe::start(&cgroup);
        // The errno is the same for IPv4 in IPv6 form, and for a non-blocking call.
        for address in [SERVICE, "[::ffff:10.96.0.10]:80"] {
            let refused = probe.try_dial(address).map(|dialled| dialled.name);
            assert_eq!(refused, Err(refusal(errno)), "{name}, {address}");
        }
        assert_eq!(probe.try_start_connect(SERVICE), Err(refusal(errno)), "{name}");
        look(|| setup.status()).has(|status| status.clients[0].services[0].outcomes["no-backend"], 3);
        assert_eq!(setup.run(&["status"]).status.code(), Some(3), "a service without a backend is degraded");
        assert_eq!(daemon.stop(), Some(0));
        assert!(setup.run(&["detach", "--all"]).status.success());
    }
}
