//! The result of `socklb close`.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::text::counted;

pub const SCHEMA: u32 = 2;

/// The daemon's answer to one request. A request closes connections for at most ten seconds; the
/// command repeats the request while any connection is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum CloseAnswer {
    Counted(Closed),
    Refused(CloseRefusal),
}

/// Why nothing was closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseRefusal {
    /// Whether the daemon lacks a privilege.
    pub is_permission: bool,
    /// Whether other close jobs prevent this job, so that a later request may succeed.
    #[serde(default)]
    pub is_busy: bool,
    pub text: String,
}

/// The result for the flows of a backend that were open when the command began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    pub schema: u32,
    pub service: String,
    pub backend: SocketAddr,
    /// Whether this was a dry run, which closes nothing. `closed` then counts the flows that a
    /// command without `--dry-run` closes.
    pub dry_run: bool,
    /// The client tasks that have the backend.
    pub clients: Vec<ClientClosed>,
}

/// The JSON of `socklb close` if the daemon has closed nothing.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ClosingRefused<'c> {
    pub schema: u32,
    pub service: &'c str,
    /// As the operator has written it.
    pub backend: &'c str,
    /// Why.
    pub refused: &'c str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientClosed {
    pub client: String,
    pub tcp: CloseCounts,
    pub udp: CloseCounts,
    /// Why the client's flows could not be read; `None` if they were read.
    pub error: Option<String>,
}

/// The number of flows in each state after the request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseCounts {
    pub closed: u64,
    /// Flows with connections that had already ended, or that a process had already closed.
    pub gone: u64,
    /// Flows with connections that were not idle. If the request has an idle time, all UDP sockets
    /// are counted here.
    pub not_idle: u64,
    /// Flows of UDP sockets that are not connected: they may have flows to other backends.
    pub unconnected: u64,
    /// Flows in network namespaces that the daemon cannot enter.
    pub other_namespaces: u64,
    /// Flow records for which the kernel's lists of sockets contain no connection to the backend.
    pub unlisted: u64,
    /// Flows that the request has not processed yet.
    pub left: u64,
    /// Flows with connections that the kernel did not close, keyed by the kernel's error.
    pub failed: BTreeMap<String, u64>,
}

impl CloseCounts {
    /// The flows that are still open although the request selects them.
    fn missed(&self) -> u64 {
        self.other_namespaces + self.unlisted + self.left + self.failed.values().sum::<u64>()
    }

    /// Adds the counts of the next request, which has processed all flows that this request has
    /// left open.
    fn followed_by(&mut self, later: Self) {
        *self = Self { closed: self.closed + later.closed, gone: self.gone + later.gone, ..later };
    }

    fn each(tcp: &Self, udp: &Self, of: impl Fn(&Self) -> u64) -> u64 {
        of(tcp) + of(udp)
    }
}

impl Closed {
    /// Whether every flow that the request selects is closed or has ended.
    pub fn is_complete(&self) -> bool {
        let is_complete =
            |client: &ClientClosed| client.error.is_none() && client.tcp.missed() + client.udp.missed() == 0;
        self.clients.iter().all(is_complete)
    }

    /// The sum of a count over clients and protocols.
    pub fn sum(&self, of: impl Fn(&CloseCounts) -> u64) -> u64 {
        self.clients.iter().map(|client| CloseCounts::each(&client.tcp, &client.udp, &of)).sum()
    }

    /// Adds the result of the request that followed this one.
    pub fn followed_by(&mut self, later: Self) {
        for client in later.clients {
            match self.clients.iter_mut().find(|known| known.client == client.client) {
                Some(known) => {
                    known.tcp.followed_by(client.tcp);
                    known.udp.followed_by(client.udp);
                    known.error = client.error;
                }
                None => self.clients.push(client),
            }
        }
    }

    /// The result for people: for each client, what was closed, and why other flows remain.
    pub fn describe(&self) -> String {
        let Self { service, backend, .. } = self;
        if self.clients.is_empty() {
            return format!(
                "service {service}: no client on this host uses {backend}, so there is nothing to close\n"
            );
        }
        let mut text = String::new();
        let did = if self.dry_run { "would close" } else { "closed" };
        for ClientClosed { client, tcp, udp, error } in &self.clients {
            let closed = format!(
                "{} and {}",
                counted(tcp.closed, "TCP connection"),
                counted(udp.closed, "UDP socket")
            );
            text += &format!("client {client}, service {service}: {did} {closed} to {backend}\n");
            let mut note = |count: u64, what: &str| {
                if count > 0 {
                    text += &format!("  {}: {what}\n", counted(count, "other flow"));
                }
            };
            let sum = |of: fn(&CloseCounts) -> u64| CloseCounts::each(tcp, udp, of);
            note(sum(|counts| counts.gone), "had ended already");
            note(sum(|counts| counts.not_idle), "not idle");
            note(sum(|counts| counts.unconnected), "the UDP socket is not connected");
            let elsewhere =
                "in a network namespace that the daemon cannot enter (see docs/guide/close-connections.md)";
            note(sum(|counts| counts.other_namespaces), elsewhere);
            note(
                sum(|counts| counts.unlisted),
                "the kernel lists no connection of the flow's socket to the backend",
            );
            note(sum(|counts| counts.left), "not reached in time; repeat the command");
            for (error, count) in tcp.failed.iter().chain(&udp.failed) {
                note(*count, error);
            }
            if let Some(error) = error {
                text += &format!("  the client's flows could not be read: {error}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(tcp: CloseCounts, udp: CloseCounts) -> Closed {
        let client = ClientClosed { client: "web".to_owned(), tcp, udp, error: None };
        let backend = ([10, 0, 0, 1], 80).into();
        Closed { schema: SCHEMA, service: "users".to_owned(), backend, dry_run: false, clients: vec![client] }
    }

    #[test]
    fn requests_in_a_row_count_each_flow_once() {
        let first = CloseCounts { closed: 1000, gone: 1, not_idle: 7, left: 200, ..CloseCounts::default() };
        let second = CloseCounts { closed: 190, gone: 3, not_idle: 14, ..CloseCounts::default() };
        let mut all = result(first, CloseCounts::default());
        assert!(!all.is_complete());
        all.followed_by(result(second, CloseCounts::default()));
        let sum = CloseCounts { closed: 1190, gone: 4, not_idle: 14, ..CloseCounts::default() };
        assert_eq!((&all.clients[0].tcp, all.is_complete()), (&sum, true));
        assert_eq!(all.sum(|counts| counts.closed + counts.gone), 1194);
    }

    #[test]
    fn the_text_has_the_reason_why_flows_remain() {
        let failed = [("Operation not permitted (os error 1)".to_owned(), 1)].into();
        let tcp =
            CloseCounts { closed: 1000, not_idle: 2, other_namespaces: 1, failed, ..CloseCounts::default() };
        let all = result(tcp, CloseCounts { closed: 1, unconnected: 3, ..CloseCounts::default() });
        assert!(!all.is_complete());
        assert_eq!(
            all.describe(),
            "client web, service users: closed 1000 TCP connections and 1 UDP socket to 10.0.0.1:80\n\
             \x20 2 other flows: not idle\n\
             \x20 3 other flows: the UDP socket is not connected\n\
             \x20 1 other flow: in a network namespace that the daemon cannot enter (see docs/guide/close-connections.md)\n\
             \x20 1 other flow: Operation not permitted (os error 1)\n"
        );
        let dry = Closed { dry_run: true, ..result(CloseCounts::default(), CloseCounts::default()) };
        let expected =
            "client web, service users: would close 0 TCP connections and 0 UDP sockets to 10.0.0.1:80\n";
        assert_eq!((dry.describe().as_str(), dry.is_complete()), (expected, true));
        let nowhere = Closed { clients: Vec::new(), ..dry };
        let expected =
            "service users: no client on this host uses 10.0.0.1:80, so there is nothing to close\n";
        assert_eq!((nowhere.describe().as_str(), nowhere.is_complete()), (expected, true));
    }

    #[test]
    fn the_document_parses() {
        let answers = [
            CloseAnswer::Counted(result(CloseCounts::default(), CloseCounts::default())),
            CloseAnswer::Refused(CloseRefusal { is_permission: true, is_busy: false, text: "no".to_owned() }),
        ];
        for answer in answers {
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<CloseAnswer>(&text).unwrap(), answer, "{text}");
        }
    }
}
