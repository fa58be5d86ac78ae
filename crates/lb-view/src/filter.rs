//! The client, service and backend to which a command is limited.

use std::net::SocketAddr;

use crate::fault::Subject;

/// The parts to show. A field that is `None` excludes nothing.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub client: Option<String>,
    pub service: Option<String>,
    pub backend: Option<SocketAddr>,
}

impl Filter {
    pub fn has_client(&self, name: &str) -> bool {
        self.client.as_ref().is_none_or(|client| client == name)
    }

    pub fn has_service(&self, name: &str) -> bool {
        self.service.as_ref().is_none_or(|service| service == name)
    }

    pub fn has_backend(&self, address: SocketAddr) -> bool {
        self.backend.is_none_or(|backend| backend == address)
    }

    /// Whether the filter selects the subject or something that the subject may contain. This is
    /// the case if no field of the subject contradicts the filter.
    pub fn concerns(&self, subject: &Subject) -> bool {
        subject.client.as_ref().is_none_or(|client| self.has_client(client))
            && subject.service.as_ref().is_none_or(|service| self.has_service(service))
            && subject.backend.is_none_or(|backend| self.has_backend(backend))
    }
}
