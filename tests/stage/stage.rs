//! The stage of the kernel tests: a network and mount namespace of the test's own, cgroups,
//! backends that answer with their names, a probe process inside a cgroup, and the program under
//! test.
//!
//! Everything is removed when its owner is dropped, also when a test panics. The stage uses only
//! the interfaces that operators have: socklb's commands, files and pinned maps.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub mod kernel;

pub mod pace;

pub mod chance;

pub mod look;

#[cfg(test)]
mod looks;

pub mod fixture;

pub mod udp;

/// What a test gets of the host: namespaces, cgroups, file systems, and filters of packets.
mod host {
    pub mod namespace;

    pub mod router;

    pub mod cgroup;

    pub mod quota;

    pub mod filter;

    pub mod hung;

    pub mod machine;
}

/// Maps and programs of the kernel, as other tools than socklb see and make them.
mod bpf {
    pub mod sys;

    pub mod maps;

    pub mod foreign;

    pub mod held;

    pub mod record;
}

/// What listens behind the services.
mod backends {
    pub mod backend;

    pub mod datagram_backend;
}

/// The programs that a test runs, the requests to them, and their surroundings.
mod processes {
    pub mod rpc;

    pub mod protocol;

    pub mod probe;

    pub mod socket;

    pub mod daemon;

    pub mod agent;

    pub mod terminal;

    pub mod manager;
}

/// What happened to flows according to their owners, and the comparison with socklb's counts.
mod ledgers {
    pub mod ending;

    pub mod ledger;

    pub mod accounts;

    pub mod stress;

    pub mod workers;
}

// Tests name the modules without their folders.
pub use backends::{backend, datagram_backend};
pub use bpf::{foreign, held, maps, record, sys};
pub use host::{cgroup, filter, hung, machine, namespace, quota, router};
pub use ledgers::{accounts, ending, ledger, stress, workers};
pub use processes::{agent, daemon, manager, probe, protocol, rpc, socket, terminal};

pub use backend::{Backend, Manner};
pub use cgroup::Cgroup;
pub use daemon::{Daemon, Setup, faults_of};
pub use datagram_backend::DatagramBackend;
pub use look::look;
pub use machine::Machine;
pub use manager::Manager;
pub use namespace::Stage;
pub use pace::window;
pub use probe::Probe;
pub use protocol::{Dialled, Family, SocketId};
pub use quota::Quota;

/// Parses an address as tests and configurations write it.
///
/// # Panics
/// If the text is not an address.
#[track_caller]
pub fn address(text: &str) -> SocketAddr {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The time limit for an expected result. It is longer in a guest, because the guest's CPU is
/// emulated and shared.
pub fn patience() -> Duration {
    let seconds = std::env::var(PATIENCE_S).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(30))
}

/// Whether the tests run in an emulated guest, in which computation takes many times longer.
pub fn in_a_guest() -> bool {
    std::env::var_os(PATIENCE_S).is_some()
}

/// Selects the number of repetitions or the duration of a test: `long` with `cargo xtask test
/// --all`, else `short`.
pub fn amount<T>(short: T, long: T) -> T {
    if std::env::var_os(LONG).is_some() { long } else { short }
}

/// The environment variable that `cargo xtask test --all` sets.
const LONG: &str = "SOCKLB_TEST_LONG";

/// Environment variable with the patience in seconds. The starter of the tests sets it in guests.
pub const PATIENCE_S: &str = "SOCKLB_TEST_PATIENCE_S";

/// Calls `look` repeatedly until `fact` holds for its result; panics with `what` and the last
/// result after [`patience`].
#[track_caller]
pub fn eventually<T: std::fmt::Debug>(what: &str, look: impl FnMut() -> T, fact: impl Fn(&T) -> bool) -> T {
    let patience = patience();
    within(patience, look, fact)
        .unwrap_or_else(|seen| panic!("not true within {patience:?}: {what}; last seen: {seen:?}"))
}

/// As [`eventually`], with another time limit, and without a panic: if `fact` does not hold in
/// time, returns the last result as an error.
///
/// # Errors
/// If `fact` does not hold in time.
pub fn within<T>(time: Duration, mut look: impl FnMut() -> T, fact: impl Fn(&T) -> bool) -> Result<T, T> {
    let deadline = Instant::now() + time;
    loop {
        let seen = look();
        if fact(&seen) {
            return Ok(seen);
        }
        if Instant::now() >= deadline {
            return Err(seen);
        }
        // Yields the CPU between two calls of `look`, because `look` may be expensive. The pause is
        // 15 ms with the default patience.
        std::thread::park_timeout(patience() / 2000);
    }
}

/// The path of a program of this build: `socklb`, or a program of the tests.
pub fn program(name: &str) -> PathBuf {
    let mut directory = std::env::current_exe().expect("the path of the running test");
    // The path is target/<profile>/deps/<test> or target/<profile>/<bin>.
    directory.pop();
    if directory.ends_with("deps") {
        directory.pop();
    }
    let path = directory.join(name);
    assert!(
        path.exists(),
        "{} is not built: `cargo xtask test local` and `cargo xtask test proof` build it",
        path.display()
    );
    path
}

/// Waits until no process has a file open for writing. A child that another test starts at this
/// moment may have inherited this process's descriptor; until the child executes another program,
/// the kernel refuses to execute the file (ETXTBSY).
pub fn wait_until_not_written(path: &Path) {
    let file = std::fs::File::open(path).expect("open the file");
    let lease = |kind: libc::c_int| {
        // SAFETY: the call takes no pointers.
        unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_SETLEASE, kind) }
    };
    // The kernel grants a lease for reading only if no process has the file open for writing.
    eventually("no process has the file open for writing", || lease(libc::F_RDLCK), |result| *result == 0);
    lease(libc::F_UNLCK);
}

/// Replaces a file atomically: writes the text to a new file, then renames the new file.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).expect("write the new file");
    std::fs::rename(&new, path).expect("rename it into place");
}
