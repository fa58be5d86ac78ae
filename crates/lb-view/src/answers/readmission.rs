//! The result of `socklb readmit`.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 1;

/// The result for each client task that has the backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readmission {
    pub schema: u32,
    pub service: String,
    pub backend: SocketAddr,
    pub clients: Vec<Readmitted>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readmitted {
    pub client: String,
    /// Whether the backend was ejected. If not, nothing has changed.
    pub was_ejected: bool,
}

impl Readmission {
    /// Whether any client task has readmitted the backend.
    pub fn has_effect(&self) -> bool {
        self.clients.iter().any(|client| client.was_ejected)
    }

    /// The result for people: one line for each client task.
    pub fn describe(&self) -> String {
        let Self { service, backend, clients, .. } = self;
        let line = |Readmitted { client, was_ejected }: &Readmitted| {
            let what = if *was_ejected { "is readmitted" } else { "was not ejected" };
            format!("client {client}, service {service}: {backend} {what}\n")
        };
        clients.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_readmission_lists_each_client() {
        let client = |client: &str, was_ejected| Readmitted { client: client.to_owned(), was_ejected };
        let readmission = Readmission {
            schema: SCHEMA,
            service: "users".to_owned(),
            backend: "10.0.0.1:80".parse().unwrap(),
            clients: vec![client("web", true), client("batch", false)],
        };
        assert!(readmission.has_effect());
        assert_eq!(
            readmission.describe(),
            "client web, service users: 10.0.0.1:80 is readmitted\n\
             client batch, service users: 10.0.0.1:80 was not ejected\n"
        );
    }
}
