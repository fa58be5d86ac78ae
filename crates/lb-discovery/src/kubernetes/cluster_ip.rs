//! The address of a Service: one of its cluster IPs, and the number of one of its ports. This file
//! performs no I/O.
//!
//! Source: `ServiceSpec` in `k8s.io/api/core/v1`.

use std::net::IpAddr;

use lb_config::discovery::{ClusterIpOrigin, IpFamily, found_address};
use lb_document::diagnostic::quote;
use serde::Deserialize;

use super::objects::read;
use crate::{DiscoveredList, Failure, Finding};

#[derive(Deserialize)]
#[serde(expecting = "a Service")]
struct Object {
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(expecting = "a spec", rename_all = "camelCase")]
struct Spec {
    r#type: Option<String>,
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    /// At most one for each address family; the first one equals `clusterIP`. Absent before
    /// Kubernetes 1.20.
    #[serde(rename = "clusterIPs")]
    cluster_ips: Option<Vec<String>>,
    ports: Option<Vec<ServicePort>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a port")]
struct ServicePort {
    name: Option<String>,
    protocol: Option<String>,
    port: i64,
}

/// Reads the address from the JSON text of a Service. The text of the returned list is only this
/// address.
///
/// # Errors
/// If the Service has no cluster IP of the wanted family, if not exactly one port matches, or if
/// the address cannot be balanced.
pub fn finding(text: &str, version: &str, wanted: &ClusterIpOrigin) -> Result<Finding, Failure> {
    let Object { spec } = read("the Service", text)?;
    let refuse =
        |why: String| Failure::Refused(format!("Service {}/{} {why}", wanted.namespace, wanted.service));
    let kind = spec.r#type.as_deref().unwrap_or("ClusterIP");
    let ips = spec.cluster_ips.or(spec.cluster_ip.map(|ip| vec![ip])).unwrap_or_default();
    let ips: Vec<&str> = ips.iter().map(String::as_str).filter(|ip| !ip.is_empty()).collect();
    if ips.contains(&"None") {
        return Err(refuse(
            "is headless: it has no address to balance, because processes dial its endpoints (write an \
             address of your own, and use backends with names)"
                .to_owned(),
        ));
    }
    let is_wanted = |ip: &&&str| {
        let ip = ip.parse().map(IpFamily::of);
        wanted.family.is_none_or(|family| ip == Ok(family))
    };
    let Some(ip) = ips.iter().find(is_wanted) else {
        let family = wanted.family.map_or(String::new(), |family| format!(" of family {}", family.name()));
        return Err(refuse(format!("has no cluster IP{family}; its type is {}", quote(kind))));
    };
    let ip: IpAddr = ip
        .parse()
        .map_err(|_| Failure::Malformed(format!("the cluster IP {} is not an address", quote(ip))))?;
    let protocol = wanted.protocol.name();
    let ports = spec.ports.unwrap_or_default();
    // In the API, the default protocol of a port is TCP.
    let is_of_protocol =
        |port: &&ServicePort| port.protocol.as_deref().unwrap_or("TCP").eq_ignore_ascii_case(protocol);
    let ports: Vec<&ServicePort> = ports.iter().filter(is_of_protocol).collect();
    let is_named =
        |port: &ServicePort, name: &str| port.name.as_deref() == Some(name) || name.parse() == Ok(port.port);
    let port = match (&wanted.port, &ports[..]) {
        (None, [port]) => port,
        (Some(name), ports) if ports.iter().any(|port| is_named(port, name)) => {
            ports.iter().find(|port| is_named(port, name)).expect("a port has this name")
        }
        (wanted, ports) => {
            let which = wanted.as_ref().map_or(String::new(), |name| format!(" {}", quote(name)));
            let names: Vec<String> = ports
                .iter()
                .take(16)
                .map(|port| port.name.as_deref().map_or(port.port.to_string(), quote))
                .collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(refuse(format!(
                "does not have exactly one {protocol} port{which} (write port as in {{ kubernetes = \
                 \"shop/users\", port = \"http\" }}; its {protocol} ports: {names})"
            )));
        }
    };
    let number = u16::try_from(port.port)
        .map_err(|_| refuse(format!("has the port {}, which is not 1 to 65535", port.port)))?;
    let address = std::net::SocketAddr::new(ip, number).to_string();
    found_address(&address)
        .map_err(|why| refuse(format!("has an address that cannot be balanced: {why}")))?;
    let version = version.to_owned();
    Ok(Finding::List(DiscoveredList {
        text: address.into_bytes().into(),
        endpoints: 1,
        version,
        notes: Vec::new(),
    }))
}

#[cfg(test)]
mod tests {
    use lb_config::discovery::KubernetesSettings;
    use lb_core::service::Protocol;
    use serde_json::{Value, json};

    use super::*;

    fn wanted(protocol: Protocol, port: Option<&str>, family: Option<IpFamily>) -> ClusterIpOrigin {
        let settings = KubernetesSettings { server: "10.0.0.9:6443".to_owned(), token: None, tls: None };
        let (namespace, service) = ("shop".to_owned(), "users".to_owned());
        ClusterIpOrigin { namespace, service, protocol, port: port.map(str::to_owned), family, settings }
    }

    /// The address, or the reason why there is none.
    fn found(spec: &Value, wanted: &ClusterIpOrigin) -> String {
        match finding(&json!({ "spec": spec }).to_string(), "7", wanted) {
            Ok(Finding::List(list)) => String::from_utf8(list.text.to_vec()).unwrap(),
            Ok(other) => panic!("{other:?}"),
            Err(failure) => failure.to_string(),
        }
    }

    #[test]
    fn protocol_port_and_family_select_an_address() {
        let spec = json!({
            "type": "ClusterIP",
            "clusterIP": "10.96.0.10",
            "clusterIPs": ["10.96.0.10", "2001:db8::a"],
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53 },
                { "name": "dns-tcp", "protocol": "TCP", "port": 53 },
                { "name": "metrics", "port": 9153 },
            ],
        });
        let of = |protocol, port, family| found(&spec, &wanted(protocol, port, family));
        assert_eq!(of(Protocol::Udp, None, None), "10.96.0.10:53");
        assert_eq!(of(Protocol::Tcp, Some("metrics"), None), "10.96.0.10:9153");
        assert_eq!(of(Protocol::Tcp, Some("53"), Some(IpFamily::Ipv4)), "10.96.0.10:53");
        assert_eq!(of(Protocol::Tcp, Some("metrics"), Some(IpFamily::Ipv6)), "[2001:db8::a]:9153");
        for port in [None, Some("dns"), Some("54")] {
            let why = of(Protocol::Tcp, port, None);
            assert!(why.contains("its tcp ports: \"dns-tcp\", \"metrics\""), "{why}");
        }
        let old = json!({ "clusterIP": "10.96.0.10", "ports": [{ "port": 80 }] });
        assert_eq!(found(&old, &wanted(Protocol::Tcp, None, None)), "10.96.0.10:80");
        let why = found(&old, &wanted(Protocol::Tcp, None, Some(IpFamily::Ipv6)));
        assert_eq!(why, "Service shop/users has no cluster IP of family ipv6; its type is \"ClusterIP\"");
    }

    #[test]
    fn a_service_without_a_usable_address_is_refused_with_the_reason() {
        let cases = [
            (
                json!({ "clusterIP": "None", "clusterIPs": ["None"], "ports": [{ "port": 80 }] }),
                "is headless: it has no address to balance, because processes dial its endpoints",
            ),
            (json!({ "type": "ExternalName" }), "has no cluster IP; its type is \"ExternalName\""),
            (json!({ "clusterIP": "", "ports": [] }), "has no cluster IP"),
            (json!({ "clusterIP": "10.96.0.10" }), "does not have exactly one tcp port"),
            (json!({ "clusterIP": "127.0.0.1", "ports": [{ "port": 80 }] }), "is a loopback address"),
            (json!({ "clusterIP": "169.254.0.1", "ports": [{ "port": 80 }] }), "is a link-local address"),
            (json!({ "clusterIP": "0.0.0.0", "ports": [{ "port": 80 }] }), "is the unspecified address"),
            (json!({ "clusterIP": "10.96.0.10", "ports": [{ "port": 0 }] }), "has port 0"),
            (
                json!({ "clusterIP": "users", "ports": [{ "port": 80 }] }),
                "the cluster IP \"users\" is not an address",
            ),
            (
                json!({ "clusterIP": "10.96.0.10", "ports": [{ "port": 65_536 }] }),
                "Service shop/users has the port 65536, which is not 1 to 65535",
            ),
            (json!(7), "the Service: invalid type"),
        ];
        for (spec, why) in cases {
            let found = found(&spec, &wanted(Protocol::Tcp, None, None));
            assert!(found.contains(why), "{found}\n{why}");
        }
    }
}
