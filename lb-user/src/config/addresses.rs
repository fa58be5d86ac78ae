//! Addresses of services that the daemon has received from servers, and the file in which it stores
//! these addresses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lb_config::discovery::found_address;
use lb_config::{ClusterIpOrigin, ProcessEnvironment};
use lb_report::keys::{Keys, ServiceKey};

use crate::source::{SourceError, last_good};

/// The maximum size of the file: 1 KiB for each of 256 services.
const MAX_BYTES: u64 = 256 << 10;

/// Addresses of services, keyed by the text of their origin.
pub type KnownAddresses = BTreeMap<String, SocketAddr>;

/// The path of the file, below the state directory.
pub fn path(state: &Path) -> PathBuf {
    state.join("addresses").join("services.json")
}

/// The text of the file.
pub fn render(known: &KnownAddresses) -> Arc<[u8]> {
    let mut text = serde_json::to_vec_pretty(known).expect("a map with string keys can be serialised");
    text.push(b'\n');
    text.into()
}

/// Parses the text of the file. Skips addresses that no service may have. If the text is invalid,
/// returns no addresses; the daemon then queries the servers for them.
pub fn parse(text: &[u8]) -> KnownAddresses {
    let texts: BTreeMap<String, String> = serde_json::from_slice(text).unwrap_or_default();
    texts.into_iter().filter_map(|(origin, address)| Some((origin, found_address(&address).ok()?))).collect()
}

/// Reads the file below the state directory.
///
/// # Errors
/// If the file cannot be read, or other users may write it.
pub fn read(state: &Path) -> Result<KnownAddresses, SourceError> {
    last_good::read_at_most(&path(state), MAX_BYTES).map(|text| parse(&text))
}

/// The addresses that an environment returns.
#[derive(Clone, Copy)]
pub enum AddressSource<'a> {
    /// These addresses.
    Known(&'a KnownAddresses),
    /// The stored addresses below this state directory; `None`: below the directory that the
    /// configuration names.
    Below(Option<&'a Path>),
}

/// An environment with other addresses of services.
pub struct WithAddresses<'a> {
    pub env: &'a dyn ProcessEnvironment,
    pub addresses: AddressSource<'a>,
}

impl ProcessEnvironment for WithAddresses<'_> {
    fn variable(&self, name: &str) -> Option<String> {
        self.env.variable(name)
    }

    fn host_name(&self) -> Option<String> {
        self.env.host_name()
    }

    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        self.env.service_keys(path)
    }

    fn service_address(&self, origin: &ClusterIpOrigin, state: &Path) -> Option<SocketAddr> {
        match self.addresses {
            AddressSource::Known(known) => known.get(&origin.to_string()).copied(),
            AddressSource::Below(other) => self.env.service_address(origin, other.unwrap_or(state)),
        }
    }
}
