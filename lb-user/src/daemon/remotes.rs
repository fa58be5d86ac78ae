//! The servers that send lists: one provider for each list, even if several services use the list.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use lb_config::discovery::DnsSettings;
use lb_discovery::{
    DiscoveryRequest, HostName, HostTable, Hosts, Latest, ProviderContext, Running, StoredAddresses, spawn,
};
use tokio::sync::{Notify, watch};

use crate::controller::Event;

/// The servers that send lists, and the DNS servers.
pub trait Servers: Send + Sync {
    /// Requests this list from now on, and returns the server's answers.
    fn query(&self, wanted: DiscoveryRequest) -> watch::Receiver<Latest>;

    /// The known addresses of host names.
    fn host_table(&self) -> Arc<HostTable>;

    /// Resolves these host names in addition to all earlier ones, and returns the table of all
    /// results.
    fn resolve(&self, hosts: BTreeSet<HostName>, settings: &DnsSettings) -> watch::Receiver<Arc<HostTable>>;

    /// Also resolves the names in `stored`. Until a name is resolved, its stored addresses are
    /// used.
    fn adopt(&self, stored: StoredAddresses, settings: &DnsSettings);
}

/// Cheap to clone. Services with the same list share one provider.
#[derive(Clone)]
pub struct Remotes {
    running: Arc<Mutex<Vec<Running>>>,
    shared: Arc<ProviderContext>,
    pub hosts: Arc<Hosts>,
    /// Notified whenever a server has answered.
    pub news: Arc<Notify>,
}

impl Default for Remotes {
    fn default() -> Self {
        let (running, shared, news) = Default::default();
        let hosts = Arc::new(Hosts::new(&shared, &news));
        Self { running, shared, hosts, news }
    }
}

impl Remotes {
    /// Requests only these lists from now on. Notifies `news`.
    pub fn query_only(&self, wanted: Vec<DiscoveryRequest>) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|running| wanted.contains(&running.wanted));
        for wanted in wanted {
            self.start(&mut running, wanted);
        }
        self.news.notify_one();
    }

    /// Requests this list at once.
    pub fn query_again(&self, wanted: &DiscoveryRequest) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().filter(|running| running.wanted == *wanted).for_each(Running::refresh);
    }

    /// The newest answers of all servers, as an event.
    pub fn answers(&self) -> Event {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let latest = |running: &Running| (running.wanted.clone(), running.latest.borrow().clone());
        Event::Answered(running.iter().map(latest).collect(), self.hosts.table())
    }

    fn start(&self, running: &mut Vec<Running>, wanted: DiscoveryRequest) -> watch::Receiver<Latest> {
        if let Some(running) = running.iter().find(|running| running.wanted == wanted) {
            return running.latest.clone();
        }
        let started = spawn(wanted, &self.shared, Arc::clone(&self.news));
        let latest = started.latest.clone();
        running.push(started);
        latest
    }
}

impl Servers for Remotes {
    fn query(&self, wanted: DiscoveryRequest) -> watch::Receiver<Latest> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        self.start(&mut running, wanted)
    }

    fn host_table(&self) -> Arc<HostTable> {
        self.hosts.table()
    }

    fn resolve(&self, hosts: BTreeSet<HostName>, settings: &DnsSettings) -> watch::Receiver<Arc<HostTable>> {
        self.hosts.resolve_too(hosts, settings)
    }

    fn adopt(&self, stored: StoredAddresses, settings: &DnsSettings) {
        self.hosts.adopt(stored, settings);
    }
}
