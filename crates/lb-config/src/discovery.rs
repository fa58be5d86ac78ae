//! Remote sources of endpoint lists, as the configuration describes them: `[dns]`, `[consul]`,
//! `[kubernetes]`, and the keys of `backends` for remote sources. Also the look-up of service
//! addresses in Kubernetes.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;

use super::ProcessEnvironment;
use super::keys::{backends, consul, dns, kubernetes};
use super::service::service_address;
use lb_core::service::Protocol;
use lb_document::control::is_obeyed;
use lb_document::diagnostic::quote;
use lb_document::key::ConfigKey;
use lb_document::kind::{Refusal, Text};
use lb_document::{Item, Table, address};

/// The port of DNS servers.
const DNS_PORT: u16 = 53;

/// The maximum length of a DNS name in bytes (RFC 1035).
const MAX_NAME_BYTES: usize = 253;

/// A remote source, and the rules for its answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSource {
    pub origin: Origin,
    pub rules: RemoteRules,
}

/// The rules by which the answers of a remote source take effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRules {
    /// The networks in which endpoints may be; `None`: all addresses except loopback and link-local
    /// addresses.
    pub allow: Option<Vec<IpNet>>,
    pub on_empty: OnEmpty,
    pub on_stale: OnStale,
    /// The time without a confirmation after which a list is stale; `None`: never.
    pub stale_after: Option<Duration>,
    /// Whether an answer that removes most endpoints takes effect only after the server has
    /// repeated it.
    pub limits_shrink: bool,
}

impl RemoteRules {
    /// Whether `allow` contains this address.
    pub fn allows(&self, ip: IpAddr) -> bool {
        self.allow.as_ref().is_some_and(|allow| allow.iter().any(|network| network.contains(&ip)))
    }

    /// The reason why no endpoint may have this address; `None` if the address is allowed.
    pub fn refusal(&self, ip: IpAddr) -> Option<String> {
        match &self.allow {
            Some(allow) if allow.iter().any(|network| network.contains(&ip)) => None,
            Some(allow) => {
                let allow: Vec<String> = allow.iter().map(ToString::to_string).collect();
                Some(format!("it is outside allow = {allow:?}"))
            }
            None => refusal(ip).map(str::to_owned),
        }
    }
}

/// The reason why no endpoint from a server may have this address if the configuration has no
/// `allow`; `None` if the address is allowed.
pub fn refusal(ip: IpAddr) -> Option<&'static str> {
    if ip.is_loopback() {
        Some("it is a loopback address")
    } else if is_link_local(ip) {
        Some("it is a link-local address")
    } else {
        None
    }
}

/// The reason why no host name may have this address, unless `allow` of a list contains the
/// address; `None` if the address is allowed.
pub fn host_refusal(ip: IpAddr) -> Option<&'static str> {
    match ip {
        _ if ip.is_multicast() => Some("it is a multicast address"),
        _ if ip.is_unspecified() => Some("it is the unspecified address"),
        _ => refusal(ip),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

lb_core::named! {
    /// The effect on a service when the answers of its server contain no endpoints for a minute.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum OnEmpty {
        /// The list stays in force.
        Keep = "keep",
        /// Connects fail.
        Refuse = "refuse",
    }
}

lb_core::named! {
    /// The treatment of a stale list, which its server has not confirmed for `stale_after`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum OnStale {
        /// The list stays in force.
        Keep = "keep",
        /// Connects go to the service's own address.
        Pass = "pass",
        /// Connects fail.
        Refuse = "refuse",
    }
}

/// The settings of all kinds of servers.
pub struct ServerSettings {
    pub dns: DnsSettings,
    pub consul: ConsulSettings,
    /// Why no API server is known, if none is.
    pub kubernetes: Result<KubernetesSettings, Refusal>,
}

impl ServerSettings {
    /// Returns the settings for queries to the API server. If no API server is known, reports a
    /// fault at `item`. The message begins with `what`, a clause about the key that needs the API
    /// server.
    pub fn api_server(&self, item: &Item<'_>, what: &str) -> Option<KubernetesSettings> {
        match &self.kubernetes {
            Ok(settings) => Some(settings.clone()),
            Err((why, help)) => {
                item.fault(format!("{what}, but {why}"), help.clone());
                None
            }
        }
    }
}

/// The origin of a remote list: the object to query, and the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Dns(DnsOrigin),
    Consul(ConsulOrigin),
    Kubernetes(KubernetesOrigin),
}

/// The records of a DNS name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsOrigin {
    /// The absolute name, without a dot at its end.
    pub name: String,
    /// The port of the endpoints, whose addresses are the name's A or AAAA records. `None`: the
    /// name has SRV records, which contain ports.
    pub port: Option<u16>,
    pub settings: DnsSettings,
}

/// How DNS servers are queried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsSettings {
    /// The servers, in the order in which the daemon tries them. Empty: the servers in
    /// /etc/resolv.conf, which the daemon reads again when the file changes.
    pub servers: Vec<SocketAddr>,
    pub transport: DnsTransport,
    /// The shortest and the longest time between two queries. Within these limits, the TTL of the
    /// records decides.
    pub min_ttl: Duration,
    pub max_ttl: Duration,
}

lb_core::named! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DnsTransport {
        Tcp = "tcp",
        /// UDP with EDNS; TCP if an answer is truncated.
        Udp = "udp",
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(DnsOrigin { name, port: None, .. }) => write!(f, "dns {name} (SRV)"),
            Self::Dns(DnsOrigin { name, port: Some(port), .. }) => write!(f, "dns {name} port {port}"),
            Self::Consul(ConsulOrigin { service, tag: None, .. }) => write!(f, "consul {service}"),
            Self::Consul(ConsulOrigin { service, tag: Some(tag), .. }) => {
                write!(f, "consul {service} tag {tag}")
            }
            Self::Kubernetes(KubernetesOrigin { namespace, service, .. }) => {
                write!(f, "kubernetes {namespace}/{service}")
            }
        }
    }
}

/// The instances of a service in Consul's catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsulOrigin {
    pub service: String,
    /// The endpoints are only the instances with this tag; `None`: all instances.
    pub tag: Option<String>,
    pub settings: ConsulSettings,
}

/// How Consul is queried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsulSettings {
    /// The agent's HTTP address. With `tls`, its HTTPS address.
    pub address: SocketAddr,
    /// The file with the token.
    pub token: Option<PathBuf>,
    /// `None`: without TLS.
    pub tls: Option<TlsSettings>,
}

/// The EndpointSlices of a Kubernetes service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesOrigin {
    pub namespace: String,
    pub service: String,
    /// The name of the port; `None` if the service has one port.
    pub port: Option<String>,
    pub settings: KubernetesSettings,
}

/// The cluster IP of a Kubernetes service, and a port of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIpOrigin {
    pub namespace: String,
    pub service: String,
    pub protocol: Protocol,
    /// The name or the number of the port; `None` if the service has one port with this protocol.
    pub port: Option<String>,
    /// `None`: the family of the service's first cluster IP.
    pub family: Option<IpFamily>,
    pub settings: KubernetesSettings,
}

/// The text does not contain the settings of the API server, so that a stored address remains valid
/// when the settings change.
impl fmt::Display for ClusterIpOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, service, protocol, port, family, settings: _ } = self;
        write!(f, "kubernetes {namespace}/{service} cluster IP")?;
        if let Some(family) = family {
            write!(f, " {}", family.name())?;
        }
        write!(f, " {}", protocol.name())?;
        port.as_ref().map_or(Ok(()), |port| write!(f, " port {port}"))
    }
}

lb_core::named! {
    /// An address family.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum IpFamily {
        Ipv4 = "ipv4",
        Ipv6 = "ipv6",
    }
}

impl IpFamily {
    pub const fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }
}

/// The look-up of a service's address on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLookup {
    /// The name of the service.
    pub service: String,
    pub origin: ClusterIpOrigin,
    /// `None` if the server has not sent an address, or if the address is `taken`. No client dials
    /// a service without an address.
    pub address: Option<SocketAddr>,
    /// The address that the server has sent, if this service cannot have it, and what has it: "the
    /// address of service users" or "an endpoint of service users", which is in a static list.
    pub taken: Option<(SocketAddr, String)>,
}

/// Parses the address that a server sent for a service. The address must be valid for a service,
/// and must be neither a loopback nor a link-local address.
///
/// # Errors
/// The reason for the refusal: a clause that begins with the quoted address.
pub fn found_address(text: &str) -> Result<SocketAddr, String> {
    let address = service_address(text).map_err(|(why, _)| why)?;
    if address.ip().is_loopback() {
        return Err(format!("{} is a loopback address", quote(text)));
    }
    if is_link_local(address.ip()) {
        return Err(format!("{} is a link-local address", quote(text)));
    }
    Ok(address)
}

/// How the API server is queried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// Host and port.
    pub server: String,
    /// The file with the token. The daemon reads the file for every request, because tokens are
    /// replaced.
    pub token: Option<PathBuf>,
    /// `None`: without TLS.
    pub tls: Option<TlsSettings>,
}

/// Files in PEM, which are read again when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// The certificates that may sign the server's certificate.
    pub ca: PathBuf,
    /// The name in the server's certificate; `None`: the server's address.
    pub server_name: Option<String>,
    /// The client's own certificate and key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Reads `[dns]`, which may be absent.
pub fn read_dns(root: &Table<'_>) -> DnsSettings {
    let table = root.table(&dns::SECTION);
    let servers = dns::SERVERS.take_written(&table).flatten().unwrap_or_default();
    let transport = dns::TRANSPORT.take_or_default(&table);
    let min_ttl = dns::MIN_TTL.take_or_default(&table);
    let max_ttl = dns::MAX_TTL.take_or_default(&table);
    if min_ttl > max_ttl {
        let span = table.get(dns::MIN_TTL.name).map_or(table.span(), |item| item.span());
        root.report().add(
            span,
            "`min_ttl` is longer than `max_ttl`",
            "write a `min_ttl` of at most `max_ttl`".to_owned(),
        );
    }
    DnsSettings { servers, transport, min_ttl, max_ttl }
}

/// Reads the address of a DNS server. The port is optional.
pub fn dns_server(text: &str) -> Result<SocketAddr, Refusal> {
    match text.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketAddr::new(ip, DNS_PORT)),
        Err(_) => server(text),
    }
}

/// Reads the address of a server to which the daemon connects.
pub fn server(text: &str) -> Result<SocketAddr, Refusal> {
    match address(text)? {
        address if address.port() == 0 => {
            Err((format!("{} has port 0", quote(text)), Some("write 1 to 65535".to_owned())))
        }
        address => Ok(address),
    }
}

/// Reads a DNS name: labels of letters, digits, `-` and `_`. The name is absolute, with or without
/// a dot at its end: search domains do not apply.
pub fn dns_name(text: &str) -> Result<String, Refusal> {
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let why = if name.len() > MAX_NAME_BYTES {
        format!("is longer than {MAX_NAME_BYTES} bytes")
    } else if name.parse::<IpAddr>().is_ok() {
        format!("{} is an address", quote(text))
    } else if !name.split('.').all(is_label) {
        format!("{} is not a DNS name", quote(text))
    } else {
        return Ok(name.to_ascii_lowercase());
    };
    Err((why, Some("write a name as in \"users.example.com\"".to_owned())))
}

/// Reads `[consul]`, which may be absent.
pub fn read_consul(root: &Table<'_>, directory: &Path) -> ConsulSettings {
    let table = root.table(&consul::SECTION);
    let address = consul::ADDRESS.take_or_default(&table);
    let rows = [&consul::TOKEN, &consul::CA, &consul::CERTIFICATE, &consul::KEY];
    let [token, ca, certificate, key] = rows.map(|row| file(row, &table, directory));
    let server_name = consul::SERVER_NAME.take_written(&table).flatten();
    let tls = read_tls(&table, ca, (certificate, key), server_name);
    ConsulSettings { address, token, tls }
}

/// The variable with the API server's port, which every pod has.
const POD_PORT: &str = "KUBERNETES_SERVICE_PORT";
/// The files that Kubernetes provides in every pod.
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Reads `[kubernetes]`, which may be absent.
///
/// # Errors
/// If no server is known. This is a fault only if a service needs the server.
pub fn read_kubernetes(
    root: &Table<'_>,
    directory: &Path,
    env: &dyn ProcessEnvironment,
) -> Result<KubernetesSettings, Refusal> {
    let table = root.table(&kubernetes::SECTION);
    // A faulty `server` has been reported. The placeholder prevents a second fault for a missing
    // server.
    let written = kubernetes::SERVER.take_written(&table).unwrap_or_else(|| Some(HTTP.to_owned()));
    let rows = [&kubernetes::TOKEN, &kubernetes::CA, &kubernetes::CERTIFICATE, &kubernetes::KEY];
    let [token, ca, certificate, key] = rows.map(|row| file(row, &table, directory));
    let pair = (certificate, key);
    let server_name = kubernetes::SERVER_NAME.take_written(&table).flatten();
    let Some(server) = written else {
        let Some(host) = env.variable("KUBERNETES_SERVICE_HOST") else {
            let help = "write server in [kubernetes], or run the daemon in a pod".to_owned();
            return Err(("no API server is known".to_owned(), Some(help)));
        };
        let port: u16 = match env.variable(POD_PORT) {
            None => 443,
            Some(text) => text.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                let why =
                    format!("the environment variable {POD_PORT} is {}, which is not a port", quote(&text));
                (why, Some("set it to a number from 1 to 65535, or write server in [kubernetes]".to_owned()))
            })?,
        };
        // An IPv6 address needs brackets before a port.
        let server = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let token = Some(token.unwrap_or_else(|| POD_TOKEN.into()));
        let ca = Some(ca.unwrap_or_else(|| POD_CA.into()));
        let tls = read_tls(&table, ca, pair, server_name);
        return Ok(KubernetesSettings { server, token, tls });
    };
    let host = server.strip_prefix(HTTPS);
    if host.is_some() && ca.is_none() {
        let span = table.get(kubernetes::SERVER.name).map_or(table.span(), |item| item.span());
        let help = "write `ca`, the file with the certificates that sign the server's certificate".to_owned();
        root.report().add(span, "`server` uses TLS, but `ca` is missing", help);
    }
    let tls = read_tls(&table, ca, pair, server_name).filter(|_| host.is_some());
    let server = host.or_else(|| server.strip_prefix(HTTP)).unwrap_or(&server).to_owned();
    Ok(KubernetesSettings { server, token, tls })
}

const HTTPS: &str = "https://";
const HTTP: &str = "http://";

/// A key with a path as its value.
type PathText = Text<Cow<'static, str>>;

/// The file that a key names, relative to the directory of the configuration.
fn file(key: &ConfigKey<PathText>, table: &Table<'_>, directory: &Path) -> Option<PathBuf> {
    key.take_written(table).flatten().map(|path| directory.join(&*path))
}

/// Reads the keys of TLS. Without `ca` there is no TLS, and the other keys have no effect.
fn read_tls(
    table: &Table<'_>,
    ca: Option<PathBuf>,
    pair: (Option<PathBuf>, Option<PathBuf>),
    server_name: Option<String>,
) -> Option<TlsSettings> {
    let client = match pair {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(_), None) | (None, Some(_)) => {
            let help = "write both, or leave both out".to_owned();
            table.fault("`certificate` and `key` belong together, but one of them is missing", help);
            None
        }
    };
    if ca.is_none() && (client.is_some() || server_name.is_some()) {
        let help = "write `ca`, or leave out `certificate`, `key` and `server_name`".to_owned();
        table.fault("without `ca` there is no TLS", help);
    }
    Some(TlsSettings { ca: ca?, server_name, client })
}

/// Reads the name of a service or of a tag in a catalogue.
pub fn source_name(text: &str) -> Result<String, Refusal> {
    if text.is_empty() || text.len() > MAX_NAME_BYTES || text.contains(is_obeyed) {
        let help = format!("write 1 to {MAX_NAME_BYTES} bytes of printable characters");
        return Err((format!("{} is not a name", quote(text)), Some(help)));
    }
    Ok(text.to_owned())
}

/// Reads a namespace and the name of a Service: labels of letters, digits and `-` (RFC 1123).
pub fn kubernetes_service(text: &str) -> Result<String, Refusal> {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    match text.split_once('/') {
        Some((namespace, service)) if is_label(namespace) && is_label(service) => Ok(text.to_owned()),
        _ => Err((
            format!("{} is not a namespace and the name of a Service", quote(text)),
            Some("write both as in \"shop/users\"".to_owned()),
        )),
    }
}

/// Reads the URL of an API server, without a path.
pub fn api_server(text: &str) -> Result<String, Refusal> {
    let refuse = |why: &str, help: String| Err((format!("{} {why}", quote(text)), Some(help)));
    let example = || "write it as in \"https://10.0.0.1:6443\"".to_owned();
    let text = text.strip_suffix('/').unwrap_or(text);
    let Some(rest) = text.strip_prefix(HTTPS).or_else(|| text.strip_prefix(HTTP)) else {
        return refuse("does not begin with https:// or http://", example());
    };
    let (host, port) = rest.rsplit_once(':').unwrap_or((rest, ""));
    let host_name = host.trim_start_matches('[').trim_end_matches(']');
    let is_host = host_name.parse::<IpAddr>().is_ok() || dns_name(host_name).is_ok();
    if !is_host {
        return refuse("names no host", example());
    }
    match port.parse::<u16>() {
        Ok(1..) => Ok(text.to_owned()),
        _ if port.is_empty() => refuse("has no port", format!("write \"{text}:443\", with the right port")),
        _ if port.contains('/') => refuse("has a path", example()),
        Ok(0) | Err(_) => refuse("has a wrong port", "write 1 to 65535".to_owned()),
    }
}

/// Reads the rules for the answers of a remote source. `on_empty` is the default of the key
/// `on_empty`.
pub fn read_rules(table: &Table<'_>, on_empty: OnEmpty) -> RemoteRules {
    let stale_after = backends::STALE_AFTER.take_written(table).flatten();
    let on_stale = backends::ON_STALE.take_or_default(table);
    if stale_after.is_none()
        && let Some(item) = backends::ON_STALE.item(table)
        && !backends::STALE_AFTER.is_written(table)
    {
        let help = "write `stale_after` as well, or leave `on_stale` out";
        item.fault("`on_stale` has no effect without `stale_after`", help.to_owned());
    }
    RemoteRules {
        allow: backends::ALLOW.take_written(table).flatten(),
        on_empty: backends::ON_EMPTY.take_written(table).flatten().unwrap_or(on_empty),
        on_stale,
        stale_after,
        limits_shrink: backends::MAX_SHRINK.take_or_default(table),
    }
}

pub fn network(text: &str) -> Result<IpNet, Refusal> {
    let refuse = |why: &str, help: String| Err((format!("{} {why}", quote(text)), Some(help)));
    match (text.parse::<IpNet>(), text.parse::<IpAddr>()) {
        (Ok(network), _) if network.trunc() == network => Ok(network),
        (Ok(network), _) => refuse("has bits after its prefix", format!("write \"{}\"", network.trunc())),
        (Err(_), Ok(ip)) => refuse("has no prefix length", format!("write \"{}\"", IpNet::from(ip))),
        (Err(_), Err(_)) => refuse("is not a network", "write a network as in \"10.0.0.0/8\"".to_owned()),
    }
}
