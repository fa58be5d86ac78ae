//! Client tasks do not affect each other, and programs of other owners in cgroups above still see
//! every connect.

use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, address, look};

use stage::fixture::{SERVICE, config};

/// A second balancer is attached to the parent cgroup. Its programs run after ours, and see the
/// address that ours have written.
#[test]
fn a_balancer_on_the_parent_cgroup_works_beside_ours_and_can_rewrite_our_choice() {
    let stage = Stage::new();
    let parent = Cgroup::new();
    let child = parent.child("service");
    let _backends = [Backend::start("b1", "127.0.0.1:8001"), Backend::start("deep", "127.0.0.1:8002")];
    let upper = Setup::new(&stage, "upper");
    let upper_text =
        config(&parent, r#"{ static = ["127.0.0.1:8002"] }"#, "").replace(SERVICE, "10.96.0.11:80");
    let _upper = Daemon::start(&upper, &upper_text);
    let lower = Setup::new(&stage, "lower");
    let daemon = Daemon::start(&lower, &config(&child, r#"{ static = ["127.0.0.1:8001"] }"#, ""));
    let mut probe = Probe::start(&child);
    // The programs of each balancer serve their own service...
    let ours = probe.dial(SERVICE);
    assert_eq!((ours.name.as_str(), ours.peer), ("b1", address(SERVICE)));
    let theirs = probe.dial("10.96.0.11:80");
    assert_eq!((theirs.name.as_str(), theirs.peer), ("deep", address("10.96.0.11:80")));
    // ... and count the service of the other balancer as `not_a_service`.
    look(|| lower.client().not_a_service).becomes(1);
    look(|| upper.client().not_a_service).becomes(1);
    lower.active_becomes(1);
    upper.active_becomes(1);
    // A process of the parent itself is balanced only by the upper program.
    let mut outside = Probe::start(&parent);
    assert_eq!(outside.dial("10.96.0.11:80").name, "deep");
    assert_eq!(outside.try_dial(SERVICE).map(|d| d.name), Err(libc::ENETUNREACH));
    for socket in [ours.socket, theirs.socket] {
        probe.close(socket);
    }
    outside.kill();
    lower.active_becomes(0);
    upper.active_becomes(0);
    assert_eq!(daemon.stop(), Some(0));
    // A program of the parent cgroup can rewrite our choice.
    // The child's backend is the parent's service.
    let lower = Setup::new(&stage, "lower");
    let _daemon = Daemon::start(&lower, &config(&child, r#"{ static = ["10.96.0.11:80"] }"#, ""));
    let dialled = probe.dial(SERVICE);
    assert_eq!(dialled.name, "deep");
    lower.active_becomes(1);
    upper.active_becomes(1);
    probe.close(dialled.socket);
    lower.active_becomes(0);
    upper.active_becomes(0);
}
