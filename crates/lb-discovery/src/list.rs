//! A complete list as text. Equal lists have equal texts, even if the server sends the endpoints in
//! another order.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;

use lb_config::endpoints::{ListEntry, ListedAddress};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use serde_json::{Map, Value, json};

/// A complete list from a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredList {
    /// JSON in the format `file_sd`, see [`render`].
    pub text: Arc<[u8]>,
    /// The number of endpoints.
    pub endpoints: usize,
    /// The server's version of this list, for messages: a serial number or an index. Empty if the
    /// server has none.
    pub version: String,
    /// The parts of the answer that are ignored, each with the reason. A note is a sentence without
    /// a full stop.
    pub notes: Vec<String>,
}

/// An endpoint as a server lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The number of the endpoint in the service. Either all endpoints of a list have a number, or
    /// none has one.
    pub index: Option<u32>,
    /// The capacity relative to the other endpoints; 0: no new connections.
    pub weight: u16,
    pub state: EndpointState,
    pub zone: Option<String>,
    /// The address of the endpoint's agent, if it differs from the default.
    pub agent: Option<SocketAddr>,
}

impl From<&Endpoint> for Listed {
    fn from(endpoint: &Endpoint) -> Self {
        let Endpoint { address: _, index, weight, state, zone, agent } = endpoint;
        Self { index: Some(*index), weight: *weight, state: *state, zone: zone.clone(), agent: *agent }
    }
}

impl Default for Listed {
    fn default() -> Self {
        Self { index: None, weight: 1, state: EndpointState::Healthy, zone: None, agent: None }
    }
}

impl Listed {
    /// Splits a parsed entry into its address and its other properties; `None` if the entry has no
    /// address.
    pub fn of(entry: ListEntry) -> Option<(ListedAddress, Self)> {
        let ListEntry { target, index, weight, state, zone, agent, .. } = entry;
        Some((target?, Self { index: index.number(), weight, state, zone, agent }))
    }
}

/// Renders a checked list. Indexes that are hashes of the addresses are omitted, so that parsing
/// the text results in an equal list.
pub fn render_list(list: &EndpointList) -> Arc<[u8]> {
    let listed = |endpoint: &Endpoint| {
        let mut listed = Listed::from(endpoint);
        if list.has_address_indexes() {
            listed.index = None;
        }
        (endpoint.address, listed)
    };
    render(&list.as_slice().iter().map(listed).collect())
}

/// Renders a list in the format `file_sd`. The keys are addresses, or [`ListedAddress`]s. Values
/// that are the defaults of endpoint files are omitted.
pub fn render<T: Display>(endpoints: &BTreeMap<T, Listed>) -> Arc<[u8]> {
    let groups: Vec<Value> = endpoints.iter().map(|(target, listed)| group(target, listed)).collect();
    let mut text = serde_json::to_vec_pretty(&groups).expect("maps with text as keys can be written");
    text.push(b'\n');
    text.into()
}

fn group(target: &impl Display, listed: &Listed) -> Value {
    let Listed { index, weight, state, zone, agent } = listed;
    let mut labels = Map::new();
    // The labels of `file_sd` are strings.
    let mut label = |name: &str, value: String| labels.insert(name.to_owned(), Value::String(value));
    if let Some(index) = index {
        label("index", index.to_string());
    }
    if *weight != 1 {
        label("weight", weight.to_string());
    }
    if *state != EndpointState::Healthy {
        label("state", state.name().to_owned());
    }
    if let Some(zone) = zone {
        label("zone", zone.clone());
    }
    if let Some(agent) = agent {
        label("agent", agent.to_string());
    }
    if labels.is_empty() {
        return json!({ "targets": [target.to_string()] });
    }
    json!({ "targets": [target.to_string()], "labels": labels })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lb_config::endpoints::{self, ListContext};

    use super::*;

    fn read(text: &[u8]) -> EndpointList {
        let path = Path::new("users.json");
        let context = ListContext::of(path);
        let parsed = endpoints::parse(text, &context).unwrap();
        assert!(parsed.notes.is_empty(), "{:?}", parsed.notes);
        parsed.list
    }

    #[test]
    fn a_rendered_list_reads_back_as_the_same_list() {
        let endpoint = |last: u8, index, weight, state, zone: Option<&str>, agent: Option<&str>| Endpoint {
            address: ([10, 0, 0, last], 80).into(),
            index,
            weight,
            state,
            zone: zone.map(str::to_owned),
            agent: agent.map(|agent| agent.parse().unwrap()),
        };
        let endpoints = vec![
            endpoint(2, 7, 0, EndpointState::Healthy, Some("b \"1\""), None),
            endpoint(1, 3, 5, EndpointState::LameDuck, None, Some("10.0.0.1:9465")),
            endpoint(3, 9, 1, EndpointState::Down, None, None),
        ];
        let service = "10.96.0.10:80".parse().unwrap();
        for make in [EndpointList::new, EndpointList::without_indexes] {
            let list = make(endpoints.clone(), service, &[]).unwrap();
            let text = render_list(&list);
            assert_eq!(read(&text), list);
            assert_eq!(render_list(&read(&text)), text);
        }
    }
}
