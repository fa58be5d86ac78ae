//! A router in a network namespace. It forwards packets, and answers packets to an unreachable host
//! with ICMP.

use std::ops::Deref;

use crate::namespace::{Network, run};

/// An unused address: the router answers packets to it with "host unreachable".
pub const NOWHERE: &str = "10.77.9.9";

/// The router. Removed on drop, with both devices.
pub struct Router(Network);

impl Router {
    /// Connects the calling thread's network namespace with a router.
    ///
    /// # Panics
    /// As [`Network::beside`].
    pub fn new() -> Self {
        let router = Network::beside("near", "10.77.0");
        run("ip route add 10.77.9.0/24 via 10.77.0.2");
        router.run("ip route add unreachable 10.77.9.0/24");
        router.within(|| {
            for (setting, value) in [("ip_forward", "1"), ("icmp_ratelimit", "0")] {
                std::fs::write(format!("/proc/sys/net/ipv4/{setting}"), value).expect("set up the router");
            }
        });
        Self(router)
    }
}

impl Deref for Router {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.0
    }
}

impl Default for Router {
    fn default() -> Self {
        Self::new()
    }
}
