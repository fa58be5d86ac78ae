//! The `backends` of a `[[service]]`: a file, a list in the configuration, or a remote source.
//!
//! A static list is checked in the same way as a file. This module reads no file.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use toml::de::DeValue;

use crate::discovery::{
    self, ConsulOrigin, DnsOrigin, DnsSettings, KubernetesOrigin, OnEmpty, Origin, ServerSettings,
};
use crate::endpoints::{self, ListContext, ListEntry, ListedAddress, NO_HOSTS};
use crate::keys::backends::{
    ALLOW, CONSUL, DNS, FILE, KUBERNETES, MAX_SHRINK, ON_EMPTY, ON_STALE, PORT, PORT_NAME, SECTION,
    STALE_AFTER, STATIC, TAG,
};
use crate::keys::path;
use crate::keys::service::BACKENDS;
use crate::{EndpointSource, ListFile, NamedFile, NamedList, RemoteSource};
use lb_core::service::Protocol;
use lb_document::diagnostic::quote;
use lb_document::kind::{Number, ValueKind as _};
use lb_document::{Item, Table};

/// The settings on which the value of `backends` depends.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// The address of this service.
    pub service: Option<SocketAddr>,
    /// The protocol of this service.
    pub protocol: Option<Protocol>,
    /// The addresses of all services.
    pub services: &'a [SocketAddr],
    /// The directory of the configuration.
    pub directory: &'a Path,
    pub servers: &'a ServerSettings,
}

/// The keys that name a source. A service has exactly one of them.
const SOURCES: [&str; 5] = [FILE.name, STATIC.name, DNS.name, CONSUL.name, KUBERNETES.name];

/// The keys that only some sources have: the key, the sources that have it, and the help text.
const ONLY_FOR: [(&str, &[&str], &str); 8] = [
    (PORT_NAME.name, &[FILE.name], "leave the key out: only the endpoints in a file have named ports"),
    (PORT.name, &[DNS.name, KUBERNETES.name], "leave the key out: the addresses in a list have ports"),
    (TAG.name, &[CONSUL.name], "leave the key out: only instances in Consul have tags"),
    (ALLOW.name, REMOTE, NOT_REMOTE),
    (ON_EMPTY.name, REMOTE, NOT_REMOTE),
    (STALE_AFTER.name, REMOTE, NOT_REMOTE),
    (ON_STALE.name, REMOTE, NOT_REMOTE),
    (MAX_SHRINK.name, REMOTE, NOT_REMOTE),
];

const REMOTE: &[&str] = &[DNS.name, CONSUL.name, KUBERNETES.name];
const NOT_REMOTE: &str = "leave the key out: only lists from a server use it";

/// Reads the source of a service's endpoints.
pub fn read(item: &Item<'_>, around: Surroundings<'_>) -> Option<EndpointSource> {
    // Two wrong forms show the operator's intention, so the help contains the right form.
    let instead = match item.value() {
        DeValue::String(file) => Some(format!("write {{ file = {} }}", quote(file))),
        DeValue::Array(_) => Some("write { static = [..] }".to_owned()),
        _ => None,
    };
    if let Some(help) = instead {
        item.wrong_kind_but("a table", help);
        return None;
    }
    let table = item.table(&SECTION)?;
    let mut written = SOURCES.iter().filter_map(|name| Some((*name, table.get(name)?)));
    let Some((source, _)) = written.next() else {
        let help = "write { file = \"users.toml\" }, { static = [\"10.0.0.1:8080\"] } or { dns = \"users.example.com\", port = 8080 }";
        item.absent("`backends` has no source", help.to_owned());
        return None;
    };
    if let Some((other, item)) = written.next() {
        let message = format!("`backends` has both `{source}` and `{other}`");
        item.fault(message, "write one of them".to_owned());
        return None;
    }
    drop(written);
    for (key, only_for, help) in ONLY_FOR {
        if let Some(item) = table.get(key).filter(|_| !only_for.contains(&source)) {
            let message = format!("{key} is only for {}", only_for.join(", "));
            item.fault(message, help.to_owned());
        }
    }
    if let Some(list) = STATIC.item(&table) {
        return read_static(&list, around.service, around.services);
    }
    if let Some(file) = FILE.item(&table) {
        let path = around.directory.join(&*FILE.kind.read(&file)?);
        let port_name = PORT_NAME.take_written(&table).flatten();
        return Some(EndpointSource::File(ListFile { path, port_name, protocol: around.protocol }));
    }
    let on_empty = if KUBERNETES.is_written(&table) { OnEmpty::Refuse } else { OnEmpty::Keep };
    let rules = discovery::read_rules(&table, on_empty);
    let origin = if let Some(consul) = CONSUL.item(&table) {
        let service = CONSUL.kind.read(&consul)?;
        let tag = TAG.take_written(&table)?;
        Origin::Consul(ConsulOrigin { service, tag, settings: around.servers.consul.clone() })
    } else if let Some(kubernetes) = KUBERNETES.item(&table) {
        Origin::Kubernetes(read_kubernetes(&table, &kubernetes, around.servers)?)
    } else {
        Origin::Dns(read_dns(&table, &around.servers.dns)?)
    };
    Some(EndpointSource::Remote(Arc::new(RemoteSource { origin, rules })))
}

fn read_kubernetes(table: &Table<'_>, item: &Item<'_>, servers: &ServerSettings) -> Option<KubernetesOrigin> {
    let name = KUBERNETES.kind.read(item)?;
    let (namespace, service) = name.split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned()))?;
    let port = match PORT.item(table) {
        Some(port) => Some(PORT_NAME.kind.read(&port)?),
        None => None,
    };
    let settings = servers.api_server(item, &format!("`backends` names the Service {name}"))?;
    Some(KubernetesOrigin { namespace, service, port, settings })
}

/// Reads a name and a port. SRV records are named `_service._protocol.domain` (RFC 2782) and
/// contain ports; other names have none.
fn read_dns(table: &Table<'_>, settings: &DnsSettings) -> Option<DnsOrigin> {
    let item = DNS.item(table)?;
    let name = DNS.kind.read(&item)?;
    if endpoints::is_localhost(&name) {
        let help = "write { static = [\"127.0.0.1:8080\"] }, with the right port".to_owned();
        item.fault(format!("`dns` {} {}", quote(&name), endpoints::LOCALHOST), help);
        return None;
    }
    let port = match PORT.item(table) {
        Some(port) => Some(u16::try_from(Number(1..=65_535).read(&port)?).ok()?),
        None => None,
    };
    if name.starts_with('_') && port.is_some() {
        let message = format!("`dns` {} is the name of SRV records, which contain ports", quote(&name));
        item.fault(message, "leave `port` out".to_owned());
        return None;
    }
    if !name.starts_with('_') && port.is_none() {
        let message = format!("`dns` {} is not the name of SRV records, so `port` is needed", quote(&name));
        let help = "write `port`, or the name of SRV records as in \"_users._tcp.example.com\"".to_owned();
        item.fault(message, help);
        return None;
    }
    Some(DnsOrigin { name, port, settings: settings.clone() })
}

/// The endpoint file that a service names; `None` if its path cannot be read. [`read`] reports the
/// faults.
pub fn named_file(
    table: &Table<'_>,
    name: Option<&str>,
    (service, protocol): (Option<SocketAddr>, Option<Protocol>),
    directory: &Path,
) -> Option<NamedFile> {
    let backends = table.get(BACKENDS.name)?;
    let DeValue::Table(entries) = backends.value() else { return None };
    let file = entries.get(FILE.name)?;
    let text = file.get_ref().as_str().filter(|text| path(text).is_ok())?;
    let port_name = entries.get(PORT_NAME.name).and_then(|name| name.get_ref().as_str()).map(str::to_owned);
    let name = name.map(str::to_owned);
    Some(NamedFile {
        name,
        service,
        file: ListFile { path: directory.join(text), port_name, protocol },
        span: file.span(),
    })
}

/// The addresses in the service's static list, without a check of the list.
pub fn static_addresses(table: &Table<'_>) -> Vec<SocketAddr> {
    let entries = match table.get(BACKENDS.name).map(|backends| backends.value()) {
        Some(DeValue::Table(entries)) => entries.get(STATIC.name).map(toml::Spanned::get_ref),
        _ => None,
    };
    let Some(DeValue::Array(list)) = entries else { return Vec::new() };
    list.iter().filter_map(|item| item.get_ref().as_str()?.parse().ok()).collect()
}

fn read_static(
    list: &Item<'_>,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Option<EndpointSource> {
    let items = list.list()?;
    let targets: Vec<(Range<usize>, Option<ListedAddress>)> =
        items.iter().map(|item| (item.span(), item.parse(endpoints::target))).collect();
    let texts: Option<Vec<String>> =
        targets.iter().map(|(_, target)| Some(target.as_ref()?.to_string())).collect();
    let entries = targets.into_iter().map(|(span, target)| ListEntry::bare(span, target)).collect();
    let (path, port_name, hosts) = (Path::new(""), None, &NO_HOSTS);
    let reading = ListContext { path, port_name, protocol: None, service, services, hosts };
    let parsed = endpoints::check(entries, &reading, list.report(), &mut Vec::new())?;
    let texts = texts?;
    if parsed.hosts.is_empty() {
        return Some(EndpointSource::Static(parsed.list));
    }
    let text = serde_json::to_string(&texts).expect("a list of strings can be serialised").into();
    Some(EndpointSource::Named(NamedList { text }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ProcessEnvironment;
    use crate::discovery::{
        ConsulSettings, DnsTransport, KubernetesSettings, OnStale, RemoteRules, TlsSettings,
    };
    use crate::tests::{check, faults_in, good_in, services, with_service};

    #[test]
    fn a_wrong_address_does_not_hide_other_faults_of_the_list() {
        let list = "['10.0.0.1:0', '224.0.0.1:80', '10.0.0.2:80', '10.0.0.2:80']";
        check(
            &with_service(&format!("name = 's'\naddress = 'users:80'\nbackends = {{ static = {list} }}")),
            &[
                "6:11: address \"users:80\" is a host name, not an address (write an IP address and a port, \
                 as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
                "7:24: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)",
                "7:38: 224.0.0.1:80 cannot be connected to: a multicast address",
                "7:69: address 10.0.0.2:80 is already in column 54 of this line",
            ],
        );
    }

    #[test]
    fn backends_are_a_file_or_a_list() {
        let backends =
            |value: &str| with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {value}"));
        let source = |value: &str| services(&backends(value)).remove(0).source;
        let file = |path: &str, port_name: Option<&str>| {
            EndpointSource::File(ListFile {
                path: path.into(),
                port_name: port_name.map(str::to_owned),
                protocol: Some(Protocol::Tcp),
            })
        };
        assert_eq!(source("{ file = 'u.toml' }"), file("/etc/socklb/u.toml", None));
        assert_eq!(source("{ file = '/srv/u.yaml', port_name = 'http' }"), file("/srv/u.yaml", Some("http")));
        let EndpointSource::Static(list) = source("{ static = ['10.0.0.2:80', '10.0.0.1:80'] }") else {
            panic!("the source is not a static list")
        };
        let listed: Vec<_> = list.as_slice().iter().map(|e| (e.address.to_string(), e.weight)).collect();
        assert_eq!(listed, [("10.0.0.2:80".to_owned(), 1), ("10.0.0.1:80".to_owned(), 1)]);
        assert!(list.has_address_indexes());

        let cases = [
            (
                "'users.toml'",
                "7:12: backends must be a table, not a string (write { file = \"users.toml\" })",
            ),
            ("['10.0.0.1:80']", "7:12: backends must be a table, not a list (write { static = [..] })"),
            ("1", "7:12: backends must be a table, not a whole number"),
            (
                "{ static = ['10.0.0.1:1'], port_name = 'http' }",
                "7:51: port_name is only for file (leave the key out: only the endpoints in a file have named ports)",
            ),
            ("{ file = 'f', port_name = '' }", "7:38: port_name is empty"),
            (
                "{}",
                "7:12: `backends` has no source (write { file = \"users.toml\" }, { static = \
                 [\"10.0.0.1:8080\"] } or { dns = \"users.example.com\", port = 8080 })",
            ),
            (
                "{ file = 'f', static = [] }",
                "7:35: `backends` has both `file` and `static` (write one of them)",
            ),
            ("{ file = '' }", "7:21: file is empty"),
            (r#"{ file = "a\u0000" }"#, "7:21: file contains a zero byte"),
            ("{ static = 'x' }", "7:23: static must be a list, not a string (write [\"x\"])"),
            ("{ static = [1] }", "7:24: an entry of static must be a string, not a whole number"),
            (
                "{ static = ['10.0.0.1'] }",
                "7:24: an entry of static \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
            ),
            ("{ static = ['10.0.0.1:1',\n'10.0.0.1:1'] }", "8:1: address 10.0.0.1:1 is already on line 7"),
            (
                "{ static = ['[::1]:1'] }",
                "7:24: [::1]:1 is not of the family of its service 10.96.0.10:80: connect() cannot change the family \
                 of a socket",
            ),
            (
                "{ static = ['10.96.0.10:80'] }",
                "7:24: 10.96.0.10:80 is the address of a service: connections to this endpoint would be balanced again",
            ),
            (
                "{ static = ['10.0.0.1:0'] }",
                "7:24: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)",
            ),
        ];
        for (value, expected) in cases {
            check(&backends(value), &[expected]);
        }
        check(
            &backends("{ static = ['x', '10.0.0.1:0'] }"),
            &[
                "7:24: an entry of static \"x\" has no port (write \"x:8080\", with the right port)",
                "7:29: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)",
            ],
        );
    }
    #[test]
    fn a_name_of_this_host_itself_is_no_dns_name() {
        let text = "name = 's'\naddress = '10.96.0.10:80'\nbackends = { dns = 'localhost', port = 80 }";
        let fault = "7:20: `dns` \"localhost\" is a name of this host itself, which DNS servers do not resolve (write { static = \
                     [\"127.0.0.1:8080\"] }, with the right port)";
        check(&with_service(text), &[fault]);
    }

    #[test]
    fn a_dns_name_has_srv_records_or_a_port() {
        let backends =
            |value: &str| with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {value}"));
        let source = |value: &str, more: &str| {
            let EndpointSource::Remote(source) = services(&(backends(value) + more)).remove(0).source else {
                panic!("the source is not remote")
            };
            source
        };
        let srv = source("{ dns = '_Users._tcp.example.com.' }", "");
        let RemoteSource { origin: Origin::Dns(dns), rules } = &*srv else { panic!("the origin is not DNS") };
        assert_eq!((&*dns.name, dns.port), ("_users._tcp.example.com", None));
        assert_eq!(dns.settings.servers, []);
        let expected = RemoteRules {
            allow: None,
            on_empty: OnEmpty::Keep,
            on_stale: OnStale::Keep,
            stale_after: None,
            limits_shrink: true,
        };
        assert_eq!(*rules, expected);
        let written = source(
            "{ dns = 'users.example.com', port = 8080, allow = ['10.0.0.0/8', '2001:db8::/32'], on_empty = 'refuse', stale_after = \
             '10m', on_stale = 'pass', max_shrink = 'off' }",
            "\n[dns]\nservers = ['10.0.0.53', '[::1]:5353']\ntransport = 'udp'\nmin_ttl = '1s'\nmax_ttl = '30s'",
        );
        assert_eq!(written.origin.to_string(), "dns users.example.com port 8080");
        let rules = &written.rules;
        assert_eq!(
            (rules.on_empty, rules.on_stale, rules.limits_shrink),
            (OnEmpty::Refuse, OnStale::Pass, false)
        );
        assert_eq!(rules.stale_after, Some(Duration::from_mins(10)));
        let Origin::Dns(DnsOrigin { settings, .. }) = &written.origin else {
            panic!("the origin is not DNS")
        };
        let expected = DnsSettings {
            servers: vec!["10.0.0.53:53".parse().unwrap(), "[::1]:5353".parse().unwrap()],
            transport: DnsTransport::Udp,
            min_ttl: Duration::from_secs(1),
            max_ttl: Duration::from_secs(30),
        };
        assert_eq!(*settings, expected);

        let cases = [
            (
                "{ dns = '_users._tcp.example.com', port = 80 }",
                "7:20: `dns` \"_users._tcp.example.com\" is the name of SRV records, which contain ports \
                 (leave `port` out)",
            ),
            (
                "{ dns = 'users.example.com' }",
                "7:20: `dns` \"users.example.com\" is not the name of SRV records, so `port` is needed \
                 (write `port`, or the name of SRV records as in \"_users._tcp.example.com\")",
            ),
            ("{ dns = 'users.example.com', port = 0 }", "7:48: port is 0 (write 1 to 65535)"),
            ("{ dns = 'users.example.com', port = 65536 }", "7:48: port is 65536 (write 1 to 65535)"),
            (
                "{ dns = '', port = 80 }",
                "7:20: dns \"\" is not a DNS name (write a name as in \"users.example.com\")",
            ),
            (
                "{ dns = 'a..b', port = 80 }",
                "7:20: dns \"a..b\" is not a DNS name (write a name as in \"users.example.com\")",
            ),
            (
                "{ dns = '10.0.0.1', port = 80 }",
                "7:20: dns \"10.0.0.1\" is an address (write a name as in \"users.example.com\")",
            ),
            (
                "{ dns = 'a.b', port = 80, file = 'users.toml' }",
                "7:20: `backends` has both `file` and `dns` (write one of them)",
            ),
            (
                "{ file = 'users.toml', allow = ['10.0.0.0/8'] }",
                "7:43: allow is only for dns, consul, kubernetes (leave the key out: only lists from a server use it)",
            ),
            (
                "{ dns = 'a.b', port = 80, allow = ['10.0.0.1/8'] }",
                "7:47: an entry of allow \"10.0.0.1/8\" has bits after its prefix (write \"10.0.0.0/8\")",
            ),
            (
                "{ dns = 'a.b', port = 80, on_stale = 'refuse' }",
                "7:49: `on_stale` has no effect without `stale_after` (write `stale_after` as well, or leave \
                 `on_stale` out)",
            ),
        ];
        for (value, expected) in cases {
            check(&backends(value), &[expected]);
        }
        check(
            &(backends("{ dns = 'a.b', port = 80 }")
                + "\n[dns]\nservers = []\nmin_ttl = '1m'\nmax_ttl = '30s'"),
            &[
                "10:11: `servers` is empty (write a server, or leave `servers` out to use the servers in \
                 /etc/resolv.conf)",
                "11:11: `min_ttl` is longer than `max_ttl` (write a `min_ttl` of at most `max_ttl`)",
            ],
        );
    }

    /// The environment of a pod, with this port of the API server.
    struct Pod(Option<&'static str>);

    impl ProcessEnvironment for Pod {
        fn variable(&self, name: &str) -> Option<String> {
            match name {
                "KUBERNETES_SERVICE_HOST" => Some("10.96.0.1".to_owned()),
                "KUBERNETES_SERVICE_PORT" => self.0.map(str::to_owned),
                _ => None,
            }
        }
    }

    #[test]
    fn the_port_of_the_api_server_in_the_environment_is_checked_if_it_is_used() {
        let text = |backends: &str| {
            with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {backends}"))
        };
        let needs_it = text("{ kubernetes = 'shop/users' }");
        for (port, expected) in
            [(None, "10.96.0.1:443"), (Some("1"), "10.96.0.1:1"), (Some("65535"), "10.96.0.1:65535")]
        {
            let config = good_in(&needs_it, &Pod(port));
            let EndpointSource::Remote(source) = &config.clients[0].services[0].source else {
                panic!("the source is not remote")
            };
            let Origin::Kubernetes(origin) = &source.origin else { panic!("the origin is not Kubernetes") };
            assert_eq!(origin.settings.server, expected);
        }
        for port in ["0", "65536", "http", "", "tcp://10.96.0.1:443"] {
            assert_eq!(
                faults_in(&needs_it, &Pod(Some(port))),
                [format!(
                    "7:27: `backends` names the Service shop/users, but the environment variable \
                     KUBERNETES_SERVICE_PORT is {port:?}, which is not a port (set it to a number from 1 to 65535, or \
                     write server in [kubernetes])"
                )]
            );
            good_in(&text("{ static = [] }"), &Pod(Some(port)));
            good_in(&format!("{needs_it}\n[kubernetes]\nserver = 'http://[::1]:8001'"), &Pod(Some(port)));
        }
    }

    #[test]
    fn consul_and_kubernetes_name_a_service() {
        let text = |value: &str, more: &str| {
            with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {value}\n{more}"))
        };
        let origin = |value: &str, more: &str| {
            let EndpointSource::Remote(source) = services(&text(value, more)).remove(0).source else {
                panic!("the source is not remote")
            };
            (source.origin.clone(), source.rules.on_empty)
        };
        let (Origin::Consul(consul), OnEmpty::Keep) = origin("{ consul = 'users', tag = 'blue' }", "") else {
            panic!("the origin is not Consul, or `on_empty` has another value")
        };
        assert_eq!((&*consul.service, consul.tag.as_deref()), ("users", Some("blue")));
        let default = ConsulSettings { address: "127.0.0.1:8500".parse().unwrap(), token: None, tls: None };
        assert_eq!(consul.settings, default);
        let keys = "[consul]\naddress = '10.0.0.9:8501'\ntoken = 't'\nca = 'ca.pem'\ncertificate = 'c'\nkey = '/k'\nserver_name = 'a.b'";
        let (Origin::Consul(consul), _) = origin("{ consul = 'users' }", keys) else {
            panic!("the origin is not Consul")
        };
        let tls = TlsSettings {
            ca: "/etc/socklb/ca.pem".into(),
            server_name: Some("a.b".to_owned()),
            client: Some(("/etc/socklb/c".into(), "/k".into())),
        };
        let token = Some("/etc/socklb/t".into());
        assert_eq!(
            consul.settings,
            ConsulSettings { address: "10.0.0.9:8501".parse().unwrap(), token, tls: Some(tls.clone()) }
        );
        let server = "[kubernetes]\nserver = 'https://10.0.0.1:6443/'\nca = 'ca.pem'\ncertificate = 'c'\nkey = '/k'\nserver_name = 'a.b'";
        let (Origin::Kubernetes(kubernetes), OnEmpty::Refuse) =
            origin("{ kubernetes = 'shop/users', port = 'http' }", server)
        else {
            panic!("the origin is not Kubernetes, or `on_empty` has another value")
        };
        assert_eq!((&*kubernetes.namespace, &*kubernetes.service), ("shop", "users"));
        assert_eq!(kubernetes.port.as_deref(), Some("http"));
        let settings = KubernetesSettings { server: "10.0.0.1:6443".to_owned(), token: None, tls: Some(tls) };
        assert_eq!(kubernetes.settings, settings);
        let plain = "[kubernetes]\nserver = 'http://[::1]:8001'";
        let (Origin::Kubernetes(kubernetes), OnEmpty::Keep) =
            origin("{ kubernetes = 'shop/users', on_empty = 'keep' }", plain)
        else {
            panic!("the origin is not Kubernetes, or `on_empty` has another value")
        };
        let settings = KubernetesSettings { server: "[::1]:8001".to_owned(), token: None, tls: None };
        assert_eq!(kubernetes.settings, settings);

        let cases = [
            (
                "{ kubernetes = 'shop/users' }",
                "",
                "7:27: `backends` names the Service shop/users, but no API server is known (write server in \
                 [kubernetes], or run the daemon in a pod)",
            ),
            (
                "{ kubernetes = 'users' }",
                plain,
                "7:27: kubernetes \"users\" is not a namespace and the name of a Service (write both as in \"shop/users\")",
            ),
            (
                "{ kubernetes = 'shop/users', port = 8080 }",
                plain,
                "7:48: port must be a string, not a whole number (write it as in \"http\")",
            ),
            (
                "{ consul = '' }",
                "",
                "7:23: consul \"\" is not a name (write 1 to 253 bytes of printable characters)",
            ),
            (
                "{ consul = 'users', port = 80 }",
                "",
                "7:39: port is only for dns, kubernetes (leave the key out: the addresses in a list have ports)",
            ),
            (
                "{ dns = 'a.b', port = 80, tag = 'x' }",
                "",
                "7:44: tag is only for consul (leave the key out: only instances in Consul have tags)",
            ),
            (
                "{ consul = 'users' }",
                "[consul]\naddress = '127.0.0.1:0'",
                "9:11: address \"127.0.0.1:0\" has port 0 (write 1 to 65535)",
            ),
            (
                "{ consul = 'users' }",
                "[dns]\nservers = ['127.0.0.1:0']",
                "9:12: an entry of servers \"127.0.0.1:0\" has port 0 (write 1 to 65535)",
            ),
            (
                "{ consul = 'users' }",
                "[consul]\nkey = 'k'",
                "8:1: `certificate` and `key` belong together, but one of them is missing (write both, or \
                 leave both out)",
            ),
            (
                "{ consul = 'users' }",
                "[consul]\nserver_name = 'a.b'",
                "8:1: without `ca` there is no TLS (write `ca`, or leave out `certificate`, `key` and \
                 `server_name`)",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = 'https://10.0.0.1:6443'",
                "9:10: `server` uses TLS, but `ca` is missing (write `ca`, the file with the certificates \
                 that sign the server's certificate)",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = '10.0.0.1:6443'",
                "9:10: server \"10.0.0.1:6443\" does not begin with https:// or http:// (write it as in \"https://10.0.0.1:6443\")",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = 'http://10.0.0.1'",
                "9:10: server \"http://10.0.0.1\" has no port (write \"http://10.0.0.1:443\", with the right port)",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = 'https://10.0.0.1:6443/api'",
                "9:10: server \"https://10.0.0.1:6443/api\" has a path (write it as in \"https://10.0.0.1:6443\")",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = 'http://10.0.0.1:65536/'",
                "9:10: server \"http://10.0.0.1:65536/\" has a wrong port (write 1 to 65535)",
            ),
            (
                "{ kubernetes = 'shop/users' }",
                "[kubernetes]\nserver = 'http://a b:80'",
                "9:10: server \"http://a b:80\" names no host (write it as in \"https://10.0.0.1:6443\")",
            ),
        ];
        for (value, more, expected) in cases {
            check(&text(value, more), &[expected]);
        }
    }

    #[test]
    fn remote_endpoints_are_in_the_allowed_networks() {
        let rules = |allow: Option<&[&str]>| RemoteRules {
            allow: allow.map(|allow| allow.iter().map(|network| network.parse().unwrap()).collect()),
            on_empty: OnEmpty::Keep,
            on_stale: OnStale::Keep,
            stale_after: None,
            limits_shrink: true,
        };
        let refusal = |allow: Option<&[&str]>, ip: &str| rules(allow).refusal(ip.parse().unwrap());
        for ip in ["127.0.0.1", "::1", "169.254.1.1", "fe80::1"] {
            assert!(refusal(None, ip).is_some(), "{ip}");
        }
        for ip in ["10.0.0.1", "192.0.2.1", "2001:db8::1"] {
            assert_eq!(refusal(None, ip), None);
        }
        let allow: &[&str] = &["10.0.0.0/8", "127.0.0.1/32", "2001:db8::/32"];
        for ip in ["10.255.255.255", "127.0.0.1", "2001:db8:ffff::1"] {
            assert_eq!(refusal(Some(allow), ip), None);
        }
        for ip in ["11.0.0.0", "127.0.0.2", "2001:db9::1"] {
            let why = refusal(Some(allow), ip).unwrap();
            assert_eq!(why, "it is outside allow = [\"10.0.0.0/8\", \"127.0.0.1/32\", \"2001:db8::/32\"]");
        }
    }
}
