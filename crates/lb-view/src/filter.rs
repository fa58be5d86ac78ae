//! What is asked for of all that could be shown: a client, a service, a backend.

use std::net::SocketAddr;

use crate::fault::Subject;

/// Which parts are asked for; all, as far as nothing is named.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this client.
    pub client: Option<String>,
    /// Of this service.
    pub service: Option<String>,
    /// Of this backend.
    pub backend: Option<SocketAddr>,
}

impl Filter {
    /// Whether a client of this name is asked for.
    pub fn has_client(&self, name: &str) -> bool {
        self.client.as_ref().is_none_or(|client| client == name)
    }

    /// Whether a service of this name is asked for.
    pub fn has_service(&self, name: &str) -> bool {
        self.service.as_ref().is_none_or(|service| service == name)
    }

    /// Whether a backend at this address is asked for.
    pub fn has_backend(&self, address: SocketAddr) -> bool {
        self.backend.is_none_or(|backend| backend == address)
    }

    /// Whether what is asked for is this, is part of it, or has it as a part.
    pub fn concerns(&self, subject: &Subject) -> bool {
        subject.client.as_ref().is_none_or(|client| self.has_client(client))
            && subject.service.as_ref().is_none_or(|service| self.has_service(service))
            && subject.backend.is_none_or(|backend| self.has_backend(backend))
    }
}
