//! The `[[service]]` tables.
//!
//! A service is read once and then given to each client task that dials it, with the seed of that client's job. Knows
//! nothing of clients.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use lb_common::abi::{MAX_SCHEDULE_LOG2, MIN_SCHEDULE_LOG2, SCHEDULE_ENTRIES_PER_BACKEND};
use lb_core::service::{Protocol, Service, Size, Subset, Task, seed};
use lb_core::subset::{Position, length};
use lb_core::weights;

use super::keys::service::{ADDRESS, BACKENDS, NAME, ON_NO_BACKEND, PROTOCOL, SUBSET};
use super::{Accounting, ClientService, NamedFile, Source, policy, source, subset};
use crate::diagnostic::Report;
use crate::document::kind::Read as _;
use crate::document::{Item, Table, Unique};

/// The services of a configuration, in the order of the file.
pub struct Services<'t>(Vec<Declared<'t>>);

/// A service as the file has it; what could not be read is `None`.
pub struct Declared<'t> {
    /// Its name as written, right or wrong: a client that names it is not at fault as well.
    pub name: Option<&'t str>,
    address: Option<SocketAddr>,
    protocol: Option<Protocol>,
    /// The endpoint file that it names.
    file: Option<NamedFile>,
    /// The rest, if nothing is wrong with it.
    pub entry: Option<ServiceEntry>,
}

impl<'t> Services<'t> {
    /// All of them.
    pub fn as_slice(&self) -> &[Declared<'t>] {
        &self.0
    }

    /// The addresses of all services.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().filter_map(|declared| declared.address).collect()
    }

    /// The endpoint files, also of services with faults.
    pub fn into_files(self) -> Vec<NamedFile> {
        self.0.into_iter().filter_map(|declared| declared.file).collect()
    }
}

/// A service before a client's job gives it its seed, and the client's accounting says whether errors are known.
pub struct ServiceEntry {
    service: Service,
    seed: Option<u64>,
    /// If it is written: where, and what.
    error_decay: Option<(Range<usize>, Option<Duration>)>,
    source: Source,
}

impl ServiceEntry {
    /// The service as a task of `job` with this accounting sees it.
    pub fn of_job(&self, job: &str, accounting: Accounting) -> ClientService {
        let seed = self.seed.unwrap_or_else(|| seed(job, &self.service.name));
        let error_decay = match (&self.error_decay, accounting) {
            (Some((_, written)), _) => *written,
            (None, Accounting::Full) => Some(policy::DEFAULT_ERROR_DECAY),
            (None, Accounting::Active) => None,
        };
        let service = Service { seed, error_decay, ..self.service.clone() };
        ClientService { service, source: self.source.clone() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.service.name
    }

    /// Where it is written that errors count, if it is and the policy counts them.
    pub fn counts_errors(&self) -> Option<&Range<usize>> {
        let (span, written) = self.error_decay.as_ref()?;
        written.filter(|_| self.service.policy.counts_errors()).map(|_| span)
    }

    /// The least backends that a client task takes of it, as far as the text alone tells. What a file will say is not known:
    /// as many as were asked for, and at least one. Which size `auto` chooses among those that it may choose is computed
    /// only once there is a list.
    pub fn backends(&self, task: Task) -> u32 {
        let listed = match &self.source {
            Source::Static(list) => Some(list.index_space()),
            Source::File(_) => None,
        };
        let (algorithm, size) = match (self.service.subset, listed) {
            (Subset::All, listed) => return listed.unwrap_or(1),
            (Subset::Sized { size: Size::Fixed(size), .. }, None) => return size,
            (Subset::Sized { size: Size::Auto { .. }, .. }, None) => return 1,
            (Subset::Sized { algorithm, size }, Some(_)) => (algorithm, size),
        };
        // A list in the configuration has no holes, and all its weights are 1.
        let backends = listed.unwrap_or(0);
        let position = Position { client: task.index, clients: task.count, backends, size: 0, seed: 0 };
        let size = match size {
            Size::Fixed(size) => size,
            Size::Auto { min } => weights::least_size(position, min),
        };
        length(algorithm, Position { size, ..position })
    }

    /// The entries of a schedule over [`Self::backends`].
    pub fn schedule_entries(&self, task: Task) -> u32 {
        let wanted = self.backends(task).saturating_mul(SCHEDULE_ENTRIES_PER_BACKEND);
        wanted.clamp(1 << MIN_SCHEDULE_LOG2, 1 << MAX_SCHEDULE_LOG2).next_power_of_two()
    }
}

/// Reads the services. Addresses first: no static endpoint may have that of any service.
pub fn read<'t>(tables: &[Table<'t>], directory: &Path, report: &mut Report<'_>) -> Services<'t> {
    let mut names = Unique::default();
    let mut listeners = Unique::default();
    let read = |table| read_identity(table, &mut names, &mut listeners, report);
    let mut declared: Vec<_> = tables.iter().map(read).collect();
    let addresses: Vec<SocketAddr> = declared.iter().filter_map(|declared| declared.address).collect();
    for (table, declared) in tables.iter().zip(&mut declared) {
        declared.entry = read_entry(table, declared, &addresses, directory, report);
        declared.file = source::named_file(table, declared.address, directory);
    }
    Services(declared)
}

fn read_identity<'t>(
    table: &Table<'t>,
    names: &mut Unique<Cow<'static, str>>,
    listeners: &mut Unique<(SocketAddr, u8)>,
    report: &mut Report<'_>,
) -> Declared<'t> {
    let item = NAME.item(table, report);
    if let Some(item) = &item
        && let Some(name) = NAME.kind.read(item, report)
    {
        let what = format!("service name \"{name}\"");
        names.claim(name, item.span(), &what, report);
    }
    let name = item.and_then(|item| item.as_str());
    let item = ADDRESS.item(table, report);
    let address = item.as_ref().and_then(|item| service_address(item, report));
    let protocol = PROTOCOL.take(table, report);
    if let (Some(item), Some(address), Some(protocol)) = (item, address, protocol) {
        let what = format!("address {address} with protocol {}", protocol.name());
        listeners.claim((address, protocol.number()), item.span(), &what, report);
    }
    Declared { name, address, protocol, file: None, entry: None }
}

// The address of an endpoint is checked in the core; that of a service has other faults.
fn service_address(item: &Item<'_>, report: &mut Report<'_>) -> Option<SocketAddr> {
    let address = item.address(report)?;
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
        ("has a zone", "write an address that has one meaning on every interface".to_owned())
    } else {
        return Some(address);
    };
    report.add(item.span(), format!("address \"{address}\" {why}"), help);
    None
}

fn read_entry(
    table: &Table<'_>,
    declared: &Declared<'_>,
    addresses: &[SocketAddr],
    directory: &Path,
    report: &mut Report<'_>,
) -> Option<ServiceEntry> {
    let choice = policy::read(table, declared.protocol, report);
    let subset = match SUBSET.item(table, report) {
        Some(item) => subset::read(&item, report),
        None => Some((subset::default(), None)),
    };
    let errno = read_errno(table, report);
    let backends = BACKENDS.item(table, report);
    let source =
        backends.and_then(|item| source::read(&item, declared.address, addresses, directory, report));
    if let (Some(choice), Some((subset, _)), Some(source)) = (&choice, subset, &source) {
        policy::check_scan(table, choice, subset, source, report);
    }
    let (subset, seed) = subset?;
    let choice = choice?;
    let service = Service {
        name: declared.name?.to_owned(),
        address: declared.address?,
        protocol: declared.protocol?,
        policy: choice.policy,
        active_limit: choice.active_limit,
        overflow: choice.overflow,
        error_decay: None,
        connect_timeout: choice.connect_timeout,
        unanswered_after: choice.unanswered_after,
        rebind: choice.rebind,
        subset,
        seed: 0,
        errno: errno?,
    };
    Some(ServiceEntry { service, seed, error_decay: choice.error_decay, source: source? })
}

fn read_errno(table: &Table<'_>, report: &mut Report<'_>) -> Option<u16> {
    if let Some(item) = ON_NO_BACKEND.item(table, report)
        && item.as_str() == Some("EPERM")
    {
        let message = "on_no_backend \"EPERM\" would look like a firewall to the caller";
        report.add(item.span(), message, "write \"EHOSTUNREACH\" or \"ECONNREFUSED\"".to_owned());
        return None;
    }
    let (_, errno) = ON_NO_BACKEND.take(table, report)?;
    u16::try_from(errno).ok()
}

#[cfg(test)]
pub mod tests {
    use super::super::keys::ERRNOS;
    use super::super::tests::{faults, good};
    use super::*;
    use lb_core::service::{Overflow, Policy, UNANSWERED_AFTER};
    use lb_core::subset::Algorithm;

    const HEAD: &str = "[[client]]\njob = 'j'\ncgroup = 'c'\n[[service]]\n";

    /// A configuration whose one service is the given lines; they begin at line 5.
    pub fn with_service(lines: &str) -> String {
        format!("{HEAD}{lines}\n")
    }

    /// A configuration whose one service has one more line, the 8th.
    pub fn with_line(line: &str) -> String {
        with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {{ static = [] }}\n{line}"))
    }

    /// The services of a configuration that must be right, as its first client sees them.
    pub fn services(text: &str) -> Vec<ClientService> {
        good(text).clients.remove(0).services
    }

    /// Compares the faults of a configuration.
    #[track_caller]
    pub fn check(text: &str, expected: &[&str]) {
        assert_eq!(faults(text), expected, "{text}");
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let service = Service {
            name: "s".to_owned(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            policy: Policy::WeightedRoundRobin,
            active_limit: None,
            overflow: Overflow::LeastLoaded,
            error_decay: Some(Duration::from_secs(10)),
            connect_timeout: None,
            unanswered_after: UNANSWERED_AFTER,
            rebind: None,
            subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } },
            seed: seed("j", "s"),
            errno: 113,
        };
        let expected = [ClientService { service, source: Source::Static(Default::default()) }];
        assert_eq!(services(&with_line("")), expected);
        assert_eq!(
            services(&with_line("protocol = 'tcp'\npolicy = 'weighted-round-robin'\nsubset = {}")),
            expected
        );
    }

    #[track_caller]
    fn check_least(
        subset: &str,
        listed: Option<u32>,
        (index, count): (u32, u32),
        backends: u32,
        entries: u32,
    ) {
        let list = |count: u32| (1..=count).map(|n| format!("'10.0.{}.{}:80'", n / 250, n % 250 + 1));
        let source = match listed {
            Some(listed) => format!("{{ static = [{}] }}", list(listed).collect::<Vec<_>>().join(", ")),
            None => "{ file = 'f' }".to_owned(),
        };
        let text = format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {source}\nsubset = {subset}");
        let ClientService { service, source } = services(&with_service(&text)).remove(0);
        let entry = ServiceEntry { service, seed: None, error_decay: None, source };
        let task = Task { index, count };
        assert_eq!((entry.backends(task), entry.schedule_entries(task)), (backends, entries), "{text}");
    }

    #[test]
    fn what_a_subset_takes_is_known_as_far_as_the_text_tells() {
        // From a file: what was asked for.
        check_least("'all'", None, (0, 1), 1, 1024);
        check_least("{}", None, (0, 1), 1, 1024);
        check_least("{ size = 200 }", None, (0, 9), 200, 8192);
        check_least("{ size = { min = 200 } }", None, (0, 9), 1, 1024);
        // Listed: all that there are, but for those whom a size leaves out.
        check_least("'all'", Some(300), (0, 9), 300, 16_384);
        check_least("{ size = 200 }", Some(300), (0, 9), 200, 8192);
        check_least("{ size = 200 }", Some(33), (0, 9), 33, 2048);
        // A lone task takes all; of several each takes its part at least.
        check_least("{}", Some(300), (0, 1), 300, 16_384);
        check_least("{}", Some(300), (2, 5), 60, 2048);
        check_least("{}", Some(300), (2, 100), 12, 1024);
        check_least("{ size = { min = 40 } }", Some(300), (2, 100), 40, 2048);
        // An arc is as long as it is.
        check_least("{ algorithm = 'aperture', size = 20 }", Some(300), (0, 1), 300, 16_384);
        check_least("{ algorithm = 'aperture', size = 20 }", Some(300), (1, 7), 44, 2048);
    }

    #[test]
    fn every_errno_of_connect_is_taken() {
        for (name, number) in ERRNOS {
            let errno = services(&with_line(&format!("on_no_backend = '{name}'"))).remove(0).service.errno;
            assert_eq!(i32::from(errno), number, "{name}");
        }
    }

    #[test]
    fn a_wrong_value_names_itself_and_what_is_right() {
        let cases = [
            ("protocol = 'sctp'", "8:12: unknown protocol \"sctp\" (write \"tcp\" or \"udp\")"),
            (
                "protocol = 'upd'",
                "8:12: unknown protocol \"upd\" (did you mean udp? write \"tcp\" or \"udp\")",
            ),
            (
                "on_no_backend = 'EPERM'",
                "8:17: on_no_backend \"EPERM\" would look like a firewall to the caller (write \"EHOSTUNREACH\" or \
                 \"ECONNREFUSED\")",
            ),
            (
                "on_no_backend = 'EINVAL'",
                "8:17: unknown on_no_backend \"EINVAL\" (write \"ECONNREFUSED\" or \"EHOSTUNREACH\" or \"ENETUNREACH\" \
                 or \"ETIMEDOUT\" or \"EADDRNOTAVAIL\" or \"EAGAIN\" or \"ENETDOWN\" or \"EHOSTDOWN\" or \
                 \"ECONNABORTED\" or \"ECONNRESET\" or \"EACCES\")",
            ),
            (
                "weight = 1",
                "8:1: unknown key \"weight\" in a service (known keys: name, address, protocol, policy, \
                 active_limit, overflow, error_decay, connect_timeout, unanswered_after, udp, subset, on_no_backend, backends)",
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[expected]);
        }
    }

    #[test]
    fn an_address_must_be_one_that_processes_can_dial() {
        let cases = [
            ("10.96.0.10:0", "has port 0 (write 1 to 65535)"),
            ("0.0.0.0:80", "is the unspecified address (write the address that processes dial)"),
            ("[::]:80", "is the unspecified address (write the address that processes dial)"),
            ("239.0.0.1:80", "is a multicast address (write the address that processes dial)"),
            ("255.255.255.255:80", "is the broadcast address (write the address that processes dial)"),
            ("[ff02::1]:80", "is a multicast address (write the address that processes dial)"),
            ("[fe80::1%2]:80", "has a zone (write an address that has one meaning on every interface)"),
            (
                "[::ffff:10.0.0.1]:80",
                "is v4-mapped (write \"10.0.0.1:80\": IPv6 sockets that dial it are balanced too)",
            ),
            (
                "users.internal:80",
                "is a host name, and names are not resolved (write an IP address and a port, as in \"10.0.0.1:8080\" \
                 or \"[2001:db8::1]:8080\")",
            ),
        ];
        for (address, expected) in cases {
            let text =
                with_service(&format!("name = 's'\naddress = '{address}'\nbackends = {{ file = 'f' }}"));
            check(&text, &[&format!("6:11: address \"{address}\" {expected}")]);
        }
    }

    #[test]
    fn a_name_has_its_letters_and_its_length() {
        let named = |name: &str| {
            with_service(&format!("name = '{name}'\naddress = '10.96.0.10:80'\nbackends = {{ static = [] }}"))
        };
        assert_eq!(services(&named(&"n".repeat(63)))[0].service.name.len(), 63);
        let long = "n".repeat(64);
        let help = "(write 1 to 63 of letters, digits, _, - and .)";
        check(&named(&long), &[&format!("5:8: name \"{long}\" has 64 bytes {help}")]);
        check(&named(""), &[&format!("5:8: name is empty {help}")]);
        let expected =
            format!("5:8: name \"a/b\" has other characters than letters, digits, _, - and . {help}");
        check(&named("a/b"), &[&expected]);
    }

    #[test]
    fn what_is_missing_is_said_at_the_header() {
        let backends = "write backends = { file = \"users.toml\" } or { static = [\"10.0.0.1:8080\"] }";
        check(
            &with_service(""),
            &[
                "4:1: name is missing in a service (write name = \"users\")",
                "4:1: address is missing in a service (write address = \"10.96.0.10:80\" or \"[2001:db8::10]:80\")",
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
    fn an_address_may_be_a_service_of_each_protocol() {
        let second = "[[service]]\nname = 't'\naddress = '10.96.0.10:80'\nprotocol = 'udp'\nbackends = { static = [] }";
        let both = services(&with_line(second));
        let dialled: Vec<_> =
            both.iter().map(|one| (one.service.address, one.service.protocol.name())).collect();
        let address = "10.96.0.10:80".parse().unwrap();
        assert_eq!(dialled, [(address, "tcp"), (address, "udp")]);
        check(
            &with_line(&format!("protocol = 'udp'\n{second}")),
            &["11:11: address 10.96.0.10:80 with protocol udp is already on line 6"],
        );
    }

    #[test]
    fn a_static_endpoint_may_have_the_address_of_no_other_service_either() {
        let second =
            "[[service]]\nname = 't'\naddress = '10.96.0.11:80'\nbackends = { static = ['10.96.0.10:80'] }";
        check(
            &with_line(second),
            &[
                "11:24: 10.96.0.10:80 is the address of a service: its connections would come back to the balancer",
            ],
        );
    }
}
