//! The `[[service]]` tables.
//!
//! Each service is read once. Each client task that dials the service then receives a copy with the
//! seed of the task's job.

pub mod ejection;
pub mod health;
pub mod load;
pub mod policy;
pub mod probe;
pub mod rebalance;
pub mod source;
pub mod subset;
pub mod template;

use std::net::SocketAddr;
use std::path::Path;

use lb_core::service::{Protocol, Service};

use self::probe::Around;
use self::template::ServiceTemplate;
use super::discovery::{AddressLookup, ClusterIpOrigin, ServerSettings};
use super::keys::service::{
    ADDRESS, BACKENDS, CONNECT_TIMEOUT, EJECTION, ERROR_DECAY, NAME, ON_NO_BACKEND, PROTOCOL, REBALANCE,
    SUBSET, UDP, UNANSWERED_AFTER,
};
use super::keys::{lookup, port_name};
use super::{EndpointSource, NamedFile, ProcessEnvironment};
use crate::endpoints;
use lb_document::kind::{Number, Refusal, ValueKind as _};
use lb_document::{Item, Table, Unique, address, fill};
use toml::de::DeValue;

/// The services in the order of the file.
pub struct DeclaredServices<'t>(Vec<Declared<'t>>);

/// A service as written in the file. A part that could not be read is `None`.
pub struct Declared<'t> {
    /// The name as written, even if it is not valid. A client that dials this service then causes
    /// no second fault.
    pub name: Option<&'t str>,
    address: Option<SocketAddr>,
    /// The look-up of the address, if the file contains no address.
    lookup: Option<AddressLookup>,
    protocol: Option<Protocol>,
    file: Option<NamedFile>,
    /// `None` if any part of the service has a fault.
    pub template: Option<ServiceTemplate>,
}

impl<'t> DeclaredServices<'t> {
    pub fn as_slice(&self) -> &[Declared<'t>] {
        &self.0
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().filter_map(|declared| declared.address).collect()
    }

    /// The look-ups of all services for which the file contains no address.
    pub fn lookups(&self) -> Vec<AddressLookup> {
        self.0.iter().filter_map(|declared| declared.lookup.clone()).collect()
    }

    /// The endpoint files, including those of services with faults.
    pub fn into_files(self) -> Vec<NamedFile> {
        self.0.into_iter().filter_map(|declared| declared.file).collect()
    }
}

/// Reads the services. Their addresses are read first, because no static endpoint may have the
/// address of any service. `state` is the directory with the addresses that servers have sent.
pub fn read<'t>(
    tables: &[Table<'t>],
    around: Around<'_>,
    servers: &ServerSettings,
    state: &Path,
) -> DeclaredServices<'t> {
    let mut names = Unique::default();
    let mut listeners = Unique::default();
    let read = |table| read_identity(table, servers, &mut names, &mut listeners);
    let mut declared: Vec<_> = tables.iter().map(read).collect();
    look_up(tables, &mut declared, around.env, state);
    let addresses: Vec<SocketAddr> = declared.iter().filter_map(|declared| declared.address).collect();
    for (table, declared) in tables.iter().zip(&mut declared) {
        declared.template = read_template(table, declared, &addresses, around, servers);
        declared.file =
            source::named_file(table, declared.name, (declared.address, declared.protocol), around.directory);
    }
    DeclaredServices(declared)
}

fn read_identity<'t>(
    table: &Table<'t>,
    servers: &ServerSettings,
    names: &mut Unique<String>,
    listeners: &mut Unique<(SocketAddr, u8)>,
) -> Declared<'t> {
    if let Some((name, span)) = NAME.take_at(table) {
        let what = format!("service name \"{name}\"");
        names.claim(name, span, &what, table.report());
    }
    let name = table.get(NAME.name).and_then(|item| item.as_str());
    let protocol = PROTOCOL.take(table);
    let (mut address, mut lookup) = (None, None);
    if let Some(item) = ADDRESS.item(table) {
        if matches!(item.value(), DeValue::Table(_)) {
            lookup = protocol.and_then(|protocol| read_lookup(&item, name, protocol, servers));
        } else {
            address = item.parse(service_address).map(|address| (address, item.span()));
        }
    }
    if let (Some((address, span)), Some(protocol)) = (&address, protocol) {
        let what = format!("address {address} with protocol {}", protocol.name());
        listeners.claim((*address, protocol.number()), span.clone(), &what, table.report());
    }
    let address = address.map(|(address, _)| address);
    Declared { name, address, lookup, protocol, file: None, template: None }
}

fn read_lookup(
    item: &Item<'_>,
    name: Option<&str>,
    protocol: Protocol,
    servers: &ServerSettings,
) -> Option<AddressLookup> {
    let table = item.table(&lookup::SECTION)?;
    let written = lookup::KUBERNETES.take(&table)?;
    let family = lookup::FAMILY.take_written(&table)?;
    let port = match lookup::PORT.item(&table) {
        None => None,
        Some(port) if port.as_str().is_some() => Some(port.parse(port_name)?),
        Some(port) => Some(Number(1..=65_535).read(&port)?.to_string()),
    };
    let (namespace, service) = written.split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned()))?;
    let settings = servers.api_server(item, &format!("`address` names the Service {written}"))?;
    let origin = ClusterIpOrigin { namespace, service, protocol, port, family, settings };
    Some(AddressLookup { service: name?.to_owned(), origin, address: None, taken: None })
}

/// Adds the addresses that servers have sent. An address from a server must not make a
/// configuration faulty: if another service already has the address, or a static list contains it,
/// this service remains without an address.
fn look_up(tables: &[Table<'_>], declared: &mut [Declared<'_>], env: &dyn ProcessEnvironment, state: &Path) {
    let statics: Vec<Vec<SocketAddr>> = tables.iter().map(source::static_addresses).collect();
    for index in 0..declared.len() {
        let Declared { lookup: Some(lookup), protocol, .. } = &declared[index] else { continue };
        let Some(address) = env.service_address(&lookup.origin, state) else { continue };
        let mut others = declared.iter();
        let other = others.find(|other| other.address == Some(address) && other.protocol == *protocol);
        let name = |other: &Declared<'_>| other.name.unwrap_or("?").to_owned();
        let listing = statics.iter().position(|addresses| addresses.contains(&address));
        let taken = match (other, listing) {
            (Some(other), _) => Some(format!("the address of service {}", name(other))),
            (None, Some(listing)) => Some(format!("an endpoint of service {}", name(&declared[listing]))),
            (None, None) => None,
        };
        let taken = taken.map(|what| (address, what));
        let Declared { address: known, lookup, .. } = &mut declared[index];
        *known = Some(address).filter(|_| taken.is_none());
        if let Some(lookup) = lookup {
            (lookup.address, lookup.taken) = (*known, taken);
        }
    }
}

/// Reads the address of a service. lb-core checks the addresses of endpoints, by other rules.
pub fn service_address(text: &str) -> Result<SocketAddr, Refusal> {
    let address = address(text)?;
    let mapped = match address {
        SocketAddr::V4(_) => None,
        SocketAddr::V6(v6) => v6.ip().to_ipv4_mapped(),
    };
    let (why, help) = if let Some(ip) = mapped {
        (
            "is v4-mapped",
            format!("write \"{ip}:{}\": IPv6 sockets that dial it are balanced too", address.port()),
        )
    } else if address.port() == 0 {
        ("has port 0", "write 1 to 65535".to_owned())
    } else if address.ip().is_unspecified() {
        ("is the unspecified address", "write the address that processes dial".to_owned())
    } else if address.ip().is_multicast() {
        ("is a multicast address", "write the address that processes dial".to_owned())
    } else if matches!(address, SocketAddr::V4(v4) if v4.ip().is_broadcast()) {
        ("is the broadcast address", "write the address that processes dial".to_owned())
    } else if matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0) {
        ("has a zone", "write an address that needs no zone".to_owned())
    } else {
        return Ok(address);
    };
    Err((format!("\"{address}\" {why}"), Some(help)))
}

fn read_template(
    table: &Table<'_>,
    declared: &Declared<'_>,
    addresses: &[SocketAddr],
    around: Around<'_>,
    servers: &ServerSettings,
) -> Option<ServiceTemplate> {
    policy::check_protocols(table, declared.protocol);
    let choice = policy::read(table);
    let health = health::read(table, declared.protocol, around);
    let probe = health.as_ref().map(|(_, probe)| probe.as_ref());
    let control = load::read(table, choice.as_ref().map(|choice| choice.policy), probe);
    let written = table.get(SUBSET.name);
    let subset = SUBSET.take_written(table);
    let subset = subset.map(|subset| subset.unwrap_or_else(|| (subset::default(), None)));
    let errno = read_errno(table);
    let backends = BACKENDS.item(table);
    let surroundings = source::Surroundings {
        service: declared.address,
        protocol: declared.protocol,
        services: addresses,
        directory: around.directory,
        servers,
    };
    let source = backends.and_then(|item| source::read(&item, surroundings));
    if let (Some(choice), Some((subset, _)), Some(source)) = (&choice, subset, &source) {
        policy::check_scan(table, choice, subset, source);
    }
    if let (Some(item), Some((subset, _)), Some(EndpointSource::Static(list))) = (&written, subset, &source)
        && let Some((message, help)) = endpoints::without_indexes(list, subset.needs_indexes())
    {
        item.fault(message, help);
    }
    let (subset, seed) = subset.unzip();
    let (health, probe) = health.unzip();
    let ejection = EJECTION.take_written(table);
    let service = fill!(
        table,
        Service {
            name: (declared.name.map(str::to_owned)),
            address: (declared.address),
            protocol: (declared.protocol),
            policy: (choice.as_ref().map(|choice| choice.policy)),
            active_limit: (choice.as_ref().map(|choice| choice.active_limit)),
            overflow: (choice.as_ref().map(|choice| choice.overflow)),
            error_decay: ERROR_DECAY,
            ejection: (Some(None)),
            health: (health),
            control: (control),
            rebalance: [REBALANCE],
            connect_timeout: [CONNECT_TIMEOUT],
            unanswered_after: UNANSWERED_AFTER,
            rebind: (UDP.take_written(table).map(Option::flatten)),
            subset: (subset),
            seed: (Some(0)),
            errno: (errno),
        }
    );
    let ejection = ejection?.map(|configured| configured.ejection);
    Some(ServiceTemplate { service: service?, seed: seed?, ejection, source: source?, probe: probe? })
}

fn read_errno(table: &Table<'_>) -> Option<u16> {
    if let Some(item) = ON_NO_BACKEND.item(table)
        && item.as_str() == Some("EPERM")
    {
        let message = "`on_no_backend` \"EPERM\" would look like a firewall to the caller";
        item.fault(message, "write \"EHOSTUNREACH\" or \"ECONNREFUSED\"".to_owned());
        return None;
    }
    let (_, errno) = ON_NO_BACKEND.take(table)?;
    u16::try_from(errno).ok()
}

#[cfg(test)]
mod tests {
    use super::super::keys::ERRNOS;
    use super::super::tests::{check, faults_in, good_in, services, with_line, with_service};
    use super::super::{ClientService, EndpointSource};
    use super::*;
    use lb_core::control::ControlRules;
    use lb_core::service::{Ejection, HealthRules, Overflow, Policy, Size, Subset, UNANSWERED_AFTER, seed};
    use lb_core::subset::Algorithm;
    use std::time::Duration;

    #[test]
    fn defaults_are_the_documented_ones() {
        let service = Service {
            name: "s".to_owned(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            policy: Policy::WeightedRoundRobin,
            active_limit: None,
            overflow: Overflow::LeastLoaded,
            error_decay: Some(Duration::from_secs(5)),
            ejection: Some(Ejection::default()),
            health: HealthRules::default(),
            control: ControlRules::default(),
            rebalance: None,
            connect_timeout: None,
            unanswered_after: UNANSWERED_AFTER,
            rebind: None,
            subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } },
            seed: seed("j", "s"),
            errno: 113,
        };
        let expected =
            [ClientService { service, source: EndpointSource::Static(Default::default()), probe: None }];
        assert_eq!(services(&with_line("")), expected);
        assert_eq!(
            services(&with_line("protocol = 'tcp'\npolicy = 'weighted-round-robin'\nsubset = {}")),
            expected
        );
    }

    #[test]
    fn every_errno_of_connect_parses() {
        for (name, number) in ERRNOS {
            let errno = services(&with_line(&format!("on_no_backend = '{name}'"))).remove(0).service.errno;
            assert_eq!(i32::from(errno), number, "{name}");
        }
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            ("protocol = 'sctp'", "8:12: unknown protocol \"sctp\" (write \"tcp\" or \"udp\")"),
            (
                "protocol = 'upd'",
                "8:12: unknown protocol \"upd\" (did you mean udp? write \"tcp\" or \"udp\")",
            ),
            (
                "on_no_backend = 'EPERM'",
                "8:17: `on_no_backend` \"EPERM\" would look like a firewall to the caller (write \
                 \"EHOSTUNREACH\" or \"ECONNREFUSED\")",
            ),
            (
                "on_backend_loss = 'drop'",
                "8:19: unknown on_backend_loss \"drop\" (write \"keep\" or \"close-idle\" or \"close\")",
            ),
            (
                "on_backend_loss = 'close-idle'\nprotocol = 'udp'",
                "8:19: `on_backend_loss` \"close-idle\" closes no UDP socket: the kernel does not record \
                 when a UDP socket was used (write \"keep\" or \"close\")",
            ),
            (
                "on_no_backend = 'EINVAL'",
                "8:17: unknown on_no_backend \"EINVAL\" (write \"ECONNREFUSED\" or \"EHOSTUNREACH\" or \"ENETUNREACH\" \
                 or \"ETIMEDOUT\" or \"EADDRNOTAVAIL\" or \"EAGAIN\" or \"ENETDOWN\" or \"EHOSTDOWN\" or \
                 \"ECONNABORTED\" or \"ECONNRESET\" or \"EACCES\")",
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[expected]);
        }
    }

    #[test]
    fn an_address_that_processes_cannot_dial_is_refused() {
        let cases = [
            ("10.96.0.10:0", "has port 0 (write 1 to 65535)"),
            ("0.0.0.0:80", "is the unspecified address (write the address that processes dial)"),
            ("[::]:80", "is the unspecified address (write the address that processes dial)"),
            ("239.0.0.1:80", "is a multicast address (write the address that processes dial)"),
            ("255.255.255.255:80", "is the broadcast address (write the address that processes dial)"),
            ("[ff02::1]:80", "is a multicast address (write the address that processes dial)"),
            ("[fe80::1%2]:80", "has a zone (write an address that needs no zone)"),
            (
                "[::ffff:10.0.0.1]:80",
                "is v4-mapped (write \"10.0.0.1:80\": IPv6 sockets that dial it are balanced too)",
            ),
            (
                "users.internal:80",
                "is a host name, not an address (write an IP address and a port, as in \"10.0.0.1:8080\" \
                 or \"[2001:db8::1]:8080\")",
            ),
        ];
        for (address, expected) in cases {
            let text =
                with_service(&format!("name = 's'\naddress = '{address}'\nbackends = {{ file = 'f' }}"));
            check(&text, &[&format!("6:11: address \"{address}\" {expected}")]);
        }
    }

    /// An environment in which the server has sent this address for every service.
    struct Sent(&'static str);

    impl ProcessEnvironment for Sent {
        fn service_address(&self, _: &ClusterIpOrigin, _: &Path) -> Option<SocketAddr> {
            self.0.parse().ok()
        }
    }

    fn looked_up(value: &str) -> String {
        let service = format!("name = 's'\naddress = {value}\nbackends = {{ static = ['10.0.0.1:80'] }}");
        with_service(&format!("{service}\n[kubernetes]\nserver = 'http://[::1]:8001'"))
    }

    #[test]
    fn an_address_that_is_looked_up_becomes_the_address_of_the_service() {
        let text = looked_up("{ kubernetes = 'shop/users', port = 443, family = 'ipv4' }");
        let unknown = good_in(&text, &Sent(""));
        assert_eq!((unknown.clients[0].services.len(), &unknown.addresses[..]), (0, &[][..]));
        let lookup = &unknown.lookups[0];
        assert_eq!((&*lookup.service, lookup.address), ("s", None));
        assert_eq!(lookup.origin.to_string(), "kubernetes shop/users cluster IP ipv4 tcp port 443");
        let known = good_in(&text, &Sent("10.96.0.10:443"));
        let address = "10.96.0.10:443".parse().unwrap();
        assert_eq!(known.clients[0].services[0].service.address, address);
        assert_eq!((known.lookups[0].address, known.addresses), (Some(address), vec![address]));
    }

    #[test]
    fn a_sent_address_that_another_service_has_is_not_a_fault() {
        let second = "[[service]]\nname = 't'\naddress = '10.96.0.10:80'\nbackends = { static = [] }";
        let text = format!("{}\n{second}", looked_up("{ kubernetes = 'shop/users' }"));
        let config = good_in(&text, &Sent("10.96.0.10:80"));
        let names: Vec<_> = config.clients[0].services.iter().map(|one| &*one.service.name).collect();
        assert_eq!(names, ["t"]);
        let address = "10.96.0.10:80".parse().unwrap();
        assert_eq!(config.lookups[0].taken, Some((address, "the address of service t".to_owned())));
        assert_eq!(config.lookups[0].address, None);
    }

    #[test]
    fn a_sent_address_that_a_static_list_contains_is_not_a_fault() {
        let config = good_in(&looked_up("{ kubernetes = 'shop/users' }"), &Sent("10.0.0.1:80"));
        let taken = ("10.0.0.1:80".parse().unwrap(), "an endpoint of service s".to_owned());
        assert_eq!((config.lookups[0].address, &config.lookups[0].taken), (None, &Some(taken)));
        assert!(config.clients[0].services.is_empty());
    }

    #[test]
    fn a_lookup_without_a_service_or_a_server_is_reported() {
        let cases = [
            (
                "{ kubernetes = 'users' }",
                "6:26: kubernetes \"users\" is not a namespace and the name of a Service",
            ),
            ("{ port = 80 }", "6:11: kubernetes is missing in address (write kubernetes = \"shop/users\")"),
            ("{ kubernetes = 'shop/users', port = 0 }", "6:47: port is 0 (write 1 to 65535)"),
            ("{ kubernetes = 'shop/users', family = 'ip' }", "6:49: unknown family \"ip\""),
            ("80", "6:11: address must be a string, not a whole number"),
        ];
        for (value, expected) in cases {
            let faults = faults_in(&looked_up(value), &Sent("")).join("\n");
            assert!(faults.starts_with(expected), "{faults}");
        }
        let without = looked_up("{ kubernetes = 'shop/users' }").replace("server", "#");
        check(
            &without,
            &["6:11: `address` names the Service shop/users, but no API server is known (write server in \
                 [kubernetes], or run the daemon in a pod)"],
        );
    }

    #[test]
    fn a_name_with_wrong_letters_or_length_is_refused() {
        let named = |name: &str| {
            with_service(&format!("name = '{name}'\naddress = '10.96.0.10:80'\nbackends = {{ static = [] }}"))
        };
        assert_eq!(services(&named(&"n".repeat(63)))[0].service.name.len(), 63);
        let long = "n".repeat(64);
        let help = "(write 1 to 63 bytes: letters, digits, _, - and .)";
        check(&named(&long), &[&format!("5:8: name \"{long}\" has 64 bytes {help}")]);
        check(&named(""), &[&format!("5:8: name is empty {help}")]);
        let expected =
            format!("5:8: name \"a/b\" has other characters than letters, digits, _, - and . {help}");
        check(&named("a/b"), &[&expected]);
    }

    #[test]
    fn missing_keys_are_reported_at_the_header() {
        let backends = "write backends = { file = \"users.toml\" } or { static = [\"10.0.0.1:8080\"] }";
        check(
            &with_service(""),
            &[
                "4:1: name is missing in a service (write name = \"users\")",
                "4:1: address is missing in a service (write address = \"10.96.0.10:80\" or \"[2001:db8::10]:80\" or { kubernetes = \"shop/users\" })",
                &format!("4:1: backends is missing in a service ({backends})"),
            ],
        );
    }

    #[test]
    fn names_and_addresses_occur_once() {
        let second = "[[service]]\nname = 's'\naddress = '10.96.0.10:80'\nbackends = { static = [] }";
        check(
            &with_line(second),
            &[
                "9:8: service name \"s\" is already on line 5",
                "10:11: address 10.96.0.10:80 with protocol tcp is already on line 6",
            ],
        );
    }

    #[test]
    fn an_address_may_have_a_service_for_each_protocol() {
        let second = "[[service]]\nname = 't'\naddress = '10.96.0.10:80'\nprotocol = 'udp'\nbackends = { static = [] }";
        let both = services(&with_line(second));
        let addresses: Vec<_> =
            both.iter().map(|one| (one.service.address, one.service.protocol.name())).collect();
        let address = "10.96.0.10:80".parse().unwrap();
        assert_eq!(addresses, [(address, "tcp"), (address, "udp")]);
        check(
            &with_line(&format!("protocol = 'udp'\n{second}")),
            &["11:11: address 10.96.0.10:80 with protocol udp is already on line 6"],
        );
    }

    #[test]
    fn a_static_endpoint_with_the_address_of_another_service_is_refused() {
        let second =
            "[[service]]\nname = 't'\naddress = '10.96.0.11:80'\nbackends = { static = ['10.96.0.10:80'] }";
        check(
            &with_line(second),
            &[
                "11:24: 10.96.0.10:80 is the address of a service: connections to this endpoint would be balanced again",
            ],
        );
    }
}
