//! The key of a service, made by `socklb agent key`, and the keys of its backends. The keys of
//! backends are derived here, because a command for each of 10,000 backends would take minutes. The
//! derivation follows the specification and does not use the product's code, so it also checks the
//! product's derivation.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::Result;
use hkdf::Hkdf;
use lb_report::wire::Key;
use sha2::Sha256;
use stage::Setup;

/// The key of a service.
pub struct ServiceKey {
    /// The file of the key.
    pub path: PathBuf,
    /// The number of the key.
    pub id: u16,
    key: Vec<u8>,
}

impl ServiceKey {
    /// Makes a key with the command `socklb agent key`.
    pub fn make(setup: &Setup) -> Result<Self> {
        let path = stage::agent::make_key(setup, "service.key", 1);
        let (id, key) = stage::agent::key_in(&path);
        Ok(Self { path, id, key })
    }

    /// The lines of a host that receives reports under the key at this address.
    pub fn reports(&self, listen: &str) -> String {
        format!("[reports]\nlisten = \"{listen}\"\nkey = \"{}\"\n", self.path.display())
    }

    /// Writes the configuration of an agent: lines for the agent, and further lines for each
    /// backend.
    pub fn configure_agent(
        &self,
        setup: &Setup,
        agent: &str,
        backends: impl IntoIterator<Item = (SocketAddr, String)>,
    ) {
        let of_backend = |(address, more): (SocketAddr, String)| {
            let key = stage::agent::derive_key(setup, &self.path, &address.to_string());
            format!("[[backend]]\naddress = \"{address}\"\nkey = \"{}\"\n{more}", key.display())
        };
        let backends: String = backends.into_iter().map(of_backend).collect();
        setup.write("agent.toml", &format!("{agent}{backends}"));
    }

    /// Derives the key of a backend over TCP.
    pub fn of_backend(&self, backend: SocketAddr) -> Key {
        let address = match backend.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let name = [&self.id.to_be_bytes()[..], &[6], &address, &backend.port().to_be_bytes()].concat();
        let mut key = [0; 16];
        Hkdf::<Sha256>::new(None, &self.key)
            .expand(&name, &mut key)
            .expect("16 bytes are within the limit of HKDF");
        Key::from_bytes(key)
    }
}
