//! A host behind a router that has no route to it: a pair of virtual Ethernet devices, with a
//! network namespace at the far end that forwards, and answers with ICMP.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::LinkNameSpaceType;

use crate::namespace::another_network;

/// An unused address: the router answers packets to it with "host unreachable".
pub const NOWHERE: &str = "10.77.9.9";

/// The router. Removed on drop, with both devices.
pub struct Router {
    namespace: File,
}

impl Router {
    /// Connects the calling thread's network namespace with a router.
    ///
    /// Both sides know each other's hardware address in advance, so the answer to a packet arrives
    /// while the packet is being sent.
    ///
    /// # Panics
    /// Without root, `ip`, or virtual Ethernet devices in the kernel.
    pub fn new() -> Self {
        let router = Self { namespace: another_network(|| ()) };
        let far_end = format!("/proc/{}/fd/{}", std::process::id(), router.namespace.as_raw_fd());
        let here = |arguments: &str| run(Command::new("ip").args(arguments.split(' ')));
        here(&format!("link add near address 02:00:00:00:00:01 type veth peer name far netns {far_end}"));
        router.run("ip link set far address 02:00:00:00:00:02 up");
        here("link set near up");
        here("address add 10.77.0.1/24 dev near");
        router.run("ip address add 10.77.0.2/24 dev far");
        here("neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev near nud permanent");
        router.run("ip neigh add 10.77.0.1 lladdr 02:00:00:00:00:01 dev far nud permanent");
        here("route add 10.77.9.0/24 via 10.77.0.2");
        router.run("ip route add unreachable 10.77.9.0/24");
        router.within(|| {
            for (setting, value) in [("ip_forward", "1"), ("icmp_ratelimit", "0")] {
                std::fs::write(format!("/proc/sys/net/ipv4/{setting}"), value).expect("set up the router");
            }
        });
        router
    }

    /// Makes a command run in the router.
    ///
    /// # Panics
    /// If no descriptor is left.
    pub fn place(&self, command: &mut Command) {
        let namespace = self.namespace.try_clone().expect("a descriptor");
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(move || enter(&namespace)) };
    }

    /// Runs a command line in the router.
    ///
    /// # Panics
    /// If the command fails.
    pub fn run(&self, line: &str) {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().expect("a program"));
        self.place(command.args(words));
        run(&mut command);
    }

    /// Runs `work` in the router, on a thread of its own.
    ///
    /// # Panics
    /// If the work panics.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let enter_and_work = || {
            enter(&self.namespace).expect("enter the router");
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter_and_work).join().expect("the work ends"))
    }
}

impl Default for Router {
    fn default() -> Self {
        Self::new()
    }
}

fn enter(namespace: &File) -> std::io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

#[track_caller]
fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
