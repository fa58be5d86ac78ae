//! The backends of a service as Envoy reads them: a `DiscoveryResponse` of EDS with one
//! `ClusterLoadAssignment`, in JSON.
//!
//! This module determines the backends in Envoy's file, and their weights and health. `controller`
//! decides when the file is written.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Add;
use std::time::Duration;

use lb_core::balancer::Balancer;
use lb_core::health::Health;
use lb_core::plan::entries_by_slot;
use serde_json::{Value, json};

use super::explain::may_be_chosen;

/// An endpoint in a file. The weight is at least 1, because Envoy rejects 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvoyLbEndpoint {
    pub address: SocketAddr,
    pub weight: u32,
    pub health: EnvoyHealth,
}

lb_core::named! {
    /// The health of an endpoint in Envoy's terms.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum EnvoyHealth {
        /// A connect may choose the endpoint.
        Healthy = "HEALTHY",
        /// The endpoint is a lame duck, or an operator has drained it: it gets no new connections,
        /// but open connections continue.
        Draining = "DRAINING",
        /// A connect may not choose the endpoint.
        Unhealthy = "UNHEALTHY",
    }
}

/// The endpoints of the service at a position of the configuration, sorted by address; `None`
/// before the service has a list.
///
/// The endpoints are the backends in the table. The weight of a backend is its number of entries,
/// and the sum of all weights is the length of the table. Lame ducks that are not in the table are
/// added with weight 1, so that Envoy retains their open connections.
pub fn endpoints<T: Copy + Ord + Add<Duration, Output = T>>(
    balancer: &Balancer<T>,
    position: usize,
) -> Option<Vec<EnvoyLbEndpoint>> {
    let (service, schedule) = balancer.schedule(position)?;
    let (row, (_, _, in_use)) = (balancer.row(position)?, balancer.services().nth(position)?);
    let entries = entries_by_slot(schedule);
    let weight = |address| entries.get(&balancer.slot(position, address)?.slot).copied();
    let in_table = row.members.iter().filter_map(|(address, _)| Some((*address, weight(*address)?)));
    let mut weights: BTreeMap<SocketAddr, u32> = in_table.collect();
    let has = |address: &SocketAddr, health: Health| {
        row.usable.get(address).is_some_and(|(_, seen)| *seen == health)
    };
    let is_lame = |address: &SocketAddr| has(address, Health::LameDuck);
    let listed = in_use.iter().flat_map(|(_, membership)| &membership.lame_ducks);
    let listed = listed.map(|member| member.endpoint.address);
    let lame: Vec<SocketAddr> = listed.chain(row.replaced.keys().copied().filter(is_lame)).collect();
    lame.iter().for_each(|address| {
        weights.entry(*address).or_insert(1);
    });
    let health = |address| {
        if may_be_chosen(balancer, service, row, address) {
            EnvoyHealth::Healthy
        } else if is_lame(&address) || has(&address, Health::Drained) || lame.contains(&address) {
            EnvoyHealth::Draining
        } else {
            EnvoyHealth::Unhealthy
        }
    };
    let endpoint = |(address, weight)| EnvoyLbEndpoint { address, weight, health: health(address) };
    Some(weights.into_iter().map(endpoint).collect())
}

/// The text of a service's file. Equal endpoints result in equal bytes.
pub fn render(service: &str, endpoints: &[EnvoyLbEndpoint]) -> Vec<u8> {
    let endpoint = |EnvoyLbEndpoint { address, weight, health }: &EnvoyLbEndpoint| -> Value {
        let socket = json!({ "address": address.ip().to_string(), "port_value": address.port() });
        json!({
            "endpoint": { "address": { "socket_address": socket } },
            "health_status": health.name(),
            "load_balancing_weight": weight,
        })
    };
    let endpoints: Vec<Value> = endpoints.iter().map(endpoint).collect();
    let assignment = json!({
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": service,
        "endpoints": [{ "lb_endpoints": endpoints }],
    });
    let mut text = json!({ "resources": [assignment] }).to_string();
    text.push('\n');
    text.into_bytes()
}

/// Whether a daemon may remove the service's file with this content; `None` if it cannot be read.
/// If an operator has replaced the file, the operator's file is not removed.
pub fn may_be_removed(service: &str, text: Option<&[u8]>) -> bool {
    text.is_none_or(|text| is_ours(service, text))
}

/// Whether a daemon has rendered this text for the service.
fn is_ours(service: &str, text: &[u8]) -> bool {
    let empty = render(service, &[]);
    let end = empty.iter().rposition(|byte| *byte == b'[').map_or(0, |open| open + 1);
    text.starts_with(&empty[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_become_a_response_of_eds() {
        let endpoint = |address: &str, weight, health| EnvoyLbEndpoint {
            address: address.parse().unwrap(),
            weight,
            health,
        };
        let endpoints = [
            endpoint("10.0.0.1:80", 38, EnvoyHealth::Healthy),
            endpoint("[2001:db8::1]:8080", 1, EnvoyHealth::Draining),
        ];
        let text = String::from_utf8(render("users", &endpoints)).unwrap();
        let expected = r#"{"resources":[{"@type":"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment","cluster_name":"users","endpoints":[{"lb_endpoints":[{"endpoint":{"address":{"socket_address":{"address":"10.0.0.1","port_value":80}}},"health_status":"HEALTHY","load_balancing_weight":38},{"endpoint":{"address":{"socket_address":{"address":"2001:db8::1","port_value":8080}}},"health_status":"DRAINING","load_balancing_weight":1}]}]}]}"#;
        assert_eq!(text, format!("{expected}\n"));
        let empty = String::from_utf8(render("users", &[])).unwrap();
        assert!(empty.contains(r#""endpoints":[{"lb_endpoints":[]}]"#), "{empty}");
        let may_be_removed = |service, text: &str| may_be_removed(service, Some(text.as_bytes()));
        assert!(may_be_removed("users", &text) && may_be_removed("users", &empty));
        assert!(!may_be_removed("mail", &text) && !may_be_removed("users", "{\"resources\":[]}"));
        assert!(super::may_be_removed("users", None), "the file cannot be read");
    }
}
