//! Tests of whole configurations, and helpers for the tests of the other modules.

use std::time::Duration;

use lb_core::service::{
    Ejection, HealthRules, Overflow, Policy, Protocol, Size, Subset, UNANSWERED_AFTER, seed,
};
use lb_core::subset::Algorithm;
use lb_document::LogFormat;
use lb_report::keys::Numbered;
use proptest::prelude::*;

use super::*;

/// An environment with one variable and a host name.
pub struct Fake {
    /// The variable's name and value.
    pub variable: Option<(&'static str, &'static str)>,
    pub host_name: Option<&'static str>,
}

impl ProcessEnvironment for Fake {
    fn variable(&self, name: &str) -> Option<String> {
        self.variable.filter(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
    }

    fn host_name(&self) -> Option<String> {
        self.host_name.map(str::to_owned)
    }

    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        let id = path.file_stem().and_then(|stem| stem.to_str()?.strip_prefix("key-")?.parse().ok());
        id.map(key).ok_or_else(|| format!("{}: there is no such file", path.display()))
    }
}

/// The key that [`Fake`] reads from a file; the name of the file contains the key's number.
pub fn key(id: u16) -> Keys<ServiceKey> {
    Keys::new(Numbered { id, key: ServiceKey::from_bytes([7; 32]) }, None)
}

const NOTHING: Fake = Fake { variable: None, host_name: None };
const PATH: &str = "/etc/socklb/socklb.toml";

/// Parses a configuration that must be valid.
pub fn good_in(text: &str, env: &dyn ProcessEnvironment) -> Config {
    parse(text, Path::new(PATH), env).unwrap_or_else(|faults| panic!("{faults}\nin\n{text}"))
}

/// Parses a configuration that must be valid, with an empty environment.
pub fn good(text: &str) -> Config {
    good_in(text, &NOTHING)
}

/// The faults of a configuration, without its path.
pub fn faults_in(text: &str, env: &dyn ProcessEnvironment) -> Vec<String> {
    let faults = parse(text, Path::new(PATH), env).map(|_| ()).map_err(|faults| faults.to_string());
    let prefix = format!("{PATH}:");
    let text = faults.err().unwrap_or_default();
    text.lines().map(|line| line.strip_prefix(&prefix).unwrap_or(line).to_owned()).collect()
}

/// The faults of a configuration, with an empty environment.
pub fn faults(text: &str) -> Vec<String> {
    faults_in(text, &NOTHING)
}

#[track_caller]
pub fn check(text: &str, expected: &[&str]) {
    assert_eq!(faults(text), expected, "{text}");
}

/// A configuration with one client, which consists of these lines. The lines begin at line 6.
pub fn with_client(lines: &str) -> String {
    format!("{SERVICE}[[client]]\n{lines}\n")
}

/// A configuration with one client, which has one additional line, the 8th of the configuration.
pub fn with_client_line(line: &str) -> String {
    with_client(&format!("job = 'j'\ncgroup = 'c'\n{line}"))
}

/// A service in 4 lines.
pub const SERVICE: &str = "[[service]]\nname = 's'\naddress = '10.96.0.10:80'\nbackends = { static = [] }\n";

/// A configuration with one service, which consists of these lines. The lines begin at line 5.
pub fn with_service(lines: &str) -> String {
    format!("[[client]]\njob = 'j'\ncgroup = 'c'\n[[service]]\n{lines}\n")
}

/// A configuration with one service, which has one additional line, the 8th of the configuration.
pub fn with_line(line: &str) -> String {
    with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {{ static = [] }}\n{line}"))
}

/// Parses a configuration that must be valid, and returns the services of its first client.
pub fn services(text: &str) -> Vec<ClientService> {
    good(text).clients.remove(0).services
}

const GOOD: &str = r#"
[[client]]
job      = "frontend"
name     = "frontend-a"
cgroup   = "system.slice/frontend.service"
index    = 13
count    = 300
services = ["users"]
accounting = "active"

[[client]]
job      = "batch"
cgroup   = "batch.slice"

[[service]]
name     = "users"
address  = "10.96.0.10:80"
protocol = "tcp"
policy   = "round-robin"
active_limit = 100
overflow = "refuse"
error_decay = "1m"
connect_timeout = "7s"
unanswered_after = "50ms"
ejection = { failures = 3 }
health = { panic_threshold = 30 }
subset   = { algorithm = "rocksteadier", size = 20 }
on_no_backend = "ECONNREFUSED"
backends = { file = "users.toml" }

[[service]]
name     = "mail.v6"
address  = "[2001:db8::10]:25"
protocol = "udp"
udp      = { rebind = "30s" }
backends = { static = [] }

[paths]
pins = "/sys/fs/bpf/other"
run  = "run"

[daemon]
watch = false
log_format = "json"

[limits]
schedule_entries = 1_048_576
flow_records = 64
slots = 65_535

[accounting]
reclaim_interval = "90s"

[metrics]
listen = "127.0.0.1:9464"
"#;

fn users(job: &str) -> ClientService {
    ClientService {
        service: Service {
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            policy: Policy::RoundRobin,
            active_limit: Some(100),
            overflow: Overflow::Refuse,
            error_decay: Some(Duration::from_secs(60)),
            ejection: Some(Ejection { failures: 3, ..Ejection::default() }),
            health: HealthRules { panic_threshold: 30, ..HealthRules::default() },
            control: lb_core::control::ControlRules::default(),
            rebalance: None,
            connect_timeout: Some(Duration::from_secs(7)),
            unanswered_after: Duration::from_millis(50),
            rebind: None,
            subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(20) },
            seed: seed(job, "users"),
            errno: 111,
        },
        source: EndpointSource::File(ListFile {
            path: "/etc/socklb/users.toml".into(),
            port_name: None,
            protocol: Some(Protocol::Tcp),
        }),
        probe: None,
    }
}

fn mail(job: &str) -> ClientService {
    ClientService {
        service: Service {
            name: "mail.v6".to_owned(),
            address: "[2001:db8::10]:25".parse().unwrap(),
            protocol: Protocol::Udp,
            policy: Policy::WeightedRoundRobin,
            active_limit: None,
            overflow: Overflow::LeastLoaded,
            error_decay: Some(Duration::from_secs(5)),
            ejection: None,
            health: HealthRules::default(),
            control: lb_core::control::ControlRules::default(),
            rebalance: None,
            connect_timeout: None,
            unanswered_after: UNANSWERED_AFTER,
            rebind: Some(Duration::from_secs(30)),
            subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } },
            seed: seed(job, "mail.v6"),
            errno: 113,
        },
        source: EndpointSource::Static(EndpointList::default()),
        probe: None,
    }
}

#[test]
fn a_valid_file_is_read_completely() {
    let frontend = ClientConfig {
        job: "frontend".to_owned(),
        name: "frontend-a".to_owned(),
        cgroup: "system.slice/frontend.service".into(),
        task: Task { index: 13, count: 300 },
        services: vec![users("frontend")],
        accounting: Accounting::Active,
    };
    let batch = ClientConfig {
        job: "batch".to_owned(),
        name: "batch".to_owned(),
        cgroup: "batch.slice".into(),
        task: Task { index: 0, count: 1 },
        services: vec![users("batch"), mail("batch")],
        accounting: Accounting::Full,
    };
    let expected = Config {
        path: PATH.into(),
        clients: vec![frontend, batch],
        addresses: vec!["10.96.0.10:80".parse().unwrap(), "[2001:db8::10]:25".parse().unwrap()],
        lookups: vec![],
        paths: Paths {
            pins: "/sys/fs/bpf/other".into(),
            run: "/etc/socklb/run".into(),
            state: "/var/lib/socklb".into(),
        },
        limits: Limits { schedule_entries: 1_048_576, flow_records: 64, slots: 65_535 },
        daemon: DaemonConfig { watch: false, log_format: LogFormat::Json },
        metrics: Metrics { listen: Some("127.0.0.1:9464".parse().unwrap()), hosts: Vec::new() },
        admins: None,
        reclaim_interval: Duration::from_secs(90),
        reports: ReportsConfig { listen: None, keys: None, xdp: Vec::new(), xdp_generic: false },
        dns: discovery::DnsSettings {
            servers: Vec::new(),
            transport: discovery::DnsTransport::Tcp,
            min_ttl: Duration::from_secs(5),
            max_ttl: Duration::from_mins(5),
        },
        envoy: None,
    };
    assert_eq!(good(GOOD), expected);
}

/// If an operator removes the `# ` before a key of the packaged example, the resulting
/// configuration is valid and contains the value of that key.
#[test]
fn the_packaged_example_is_valid_with_all_its_suggestions() {
    let text = include_str!("../../../packaging/examples/socklb.toml");
    let is_suggested = |line: &str| {
        let key = line.split(['=', ' ']).next().unwrap_or_default();
        line.starts_with('[')
            || (!key.is_empty() && line.trim_start_matches(key).trim_start().starts_with('='))
    };
    let suggested: String = text
        .lines()
        .map(|line| {
            line.strip_prefix("# ").filter(|rest| is_suggested(rest)).unwrap_or(line).to_owned() + "\n"
        })
        .collect();
    let plain = good(text);
    let host = Fake { variable: None, host_name: Some("web-7") };
    let all = good_in(&suggested, &host);
    assert_eq!((plain.clients[0].task, all.clients[0].task.index), (Task { index: 0, count: 1 }, 7));
    assert_eq!(all.clients[0].accounting, Accounting::Active);
    let services: Vec<_> = all.clients[0].services.iter().map(|one| &one.service).collect();
    let [users, dns] = services[..] else { panic!("{services:?}") };
    assert_eq!(
        (users.policy, users.active_limit, users.overflow),
        (Policy::P2c, Some(100), Overflow::Refuse)
    );
    assert_eq!(users.connect_timeout, Some(Duration::from_secs(7)));
    assert_eq!((dns.protocol, dns.rebind), (Protocol::Udp, Some(Duration::from_secs(30))));
    assert!(all.metrics.listen.is_some() && plain.metrics.listen.is_none());
    assert_eq!((all.admins.as_deref(), plain.admins), (Some("socklb-admin"), None));
    assert_eq!((all.envoy, plain.envoy), (Some(PathBuf::from("/var/lib/socklb-envoy")), None));
}

#[test]
fn an_empty_file_is_refused_with_a_correction() {
    let expected = [
        "1:1: no client is configured (write [[client]] with a job and a cgroup)",
        "1:1: no service is configured (write [[service]] with a name, an address and backends)",
    ];
    for text in ["", "# nothing\n", "client = []\nservice = []\n"] {
        check(text, &expected);
    }
}

/// The shortest configuration, in 7 lines.
pub const LEAST: &str = "[[client]]\njob = 'j'\ncgroup = 'c'\n\
     [[service]]\nname = 's'\naddress = '10.96.0.10:80'\nbackends = { static = [] }\n";

#[test]
fn defaults_are_the_documented_ones() {
    let config = good(LEAST);
    let paths = ["/sys/fs/bpf/socklb", "/run/socklb", "/var/lib/socklb"].map(PathBuf::from);
    assert_eq!([config.paths.pins, config.paths.run, config.paths.state], paths);
    let expected = Limits { schedule_entries: 524_288, flow_records: 131_072, slots: 4_096 };
    assert_eq!(config.limits, expected);
}

#[test]
fn wrong_tables_are_refused() {
    let cases = [
        (
            "[[clients]]",
            "8:3: unknown key \"clients\" in a configuration (did you mean client? known keys: client, service, daemon, \
             paths, limits, metrics, accounting, reports, dns, consul, kubernetes, envoy, admin)",
        ),
        ("[[paths]]", "8:1: paths must be a table, not a list"),
        ("[paths]\npins = ''", "9:8: pins is empty"),
        ("[paths]\nrun = 1", "9:7: run must be a string, not a whole number (write it as in \"/run/other\")"),
    ];
    for (lines, expected) in cases {
        check(&format!("{LEAST}{lines}"), &[expected]);
    }
    check(
        "client = 1\n[service]\n",
        &[
            "1:10: client must be a list of tables, not a whole number (write the header [[client]])",
            "2:1: service must be a list of tables, not a table (write the header [[service]])",
        ],
    );
}

#[test]
fn every_table_refuses_a_key_without_a_row() {
    for section in keys::SECTIONS.map(|sections| sections[0]) {
        let (what, known) = (section.what, section.keys().join(", "));
        let expected = format!("9:1: unknown key \"colour\" in {what} (known keys: {known})");
        let faults = faults(&format!("{LEAST}{}\ncolour = 1", section.header));
        assert!(faults.contains(&expected), "{expected}: {faults:?}");
    }
}

#[test]
fn all_faults_of_a_file_are_reported_once_and_in_order() {
    check(
        "[[client]]\njob = 'j'\ncgroup = '/c'\nservices = ['t']\nindex = 1\n\
         [[service]]\nname = 'a b'\naddress = '10.0.0.1'\nbackends = { file = 'f' }\n\
         [other]\n",
        &[
            "3:10: cgroup \"/c\" is absolute (write \"c\": paths are relative to the cgroup2 mount)",
            "4:13: no service is named \"t\" (services: a b)",
            "5:9: `index` is 1, but must be below `count`, which is 1 (indexes start at 0)",
            "7:8: name \"a b\" has other characters than letters, digits, _, - and . (write 1 to 63 bytes: \
             letters, digits, _, - and .)",
            "8:11: address \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
            "10:2: unknown key \"other\" in a configuration (known keys: client, service, daemon, paths, limits, \
             metrics, accounting, reports, dns, consul, kubernetes, envoy, admin)",
        ],
    );
}

#[test]
fn an_unparsable_line_causes_no_other_fault() {
    check(
        "[[client]]\njob = 'j'\ncgroup = 'c'\nservices = ['s']\nindex = 1\n\
         [[service]]\nname = s\naddress = 10.0.0.1\nbackends = { file = 'f' }\n",
        &[
            "5:9: `index` is 1, but must be below `count`, which is 1 (indexes start at 0)",
            "7:8: string values must be quoted, expected literal string",
            "8:15: invalid float (text, such as an address, is written in quotes)",
        ],
    );
    check("[[client]]\njob = 'j'\njob = 'k'\ncgroup = 'c'\n", &["3:1: duplicate key"]);
}

proptest! {
    #[test]
    fn no_text_panics(text in "(?s).{0,200}") {
        faults(&text);
    }

    #[test]
    fn no_mutation_of_a_valid_file_panics(
        at in 0..GOOD.len(), length in 0_usize..30, put in "[\\[\\]{}=\"',.0-9a-z\n ]{0,6}",
    ) {
        let mut text = GOOD.to_owned();
        text.replace_range(at..(at + length).min(GOOD.len()), &put);
        faults(&text);
    }

    #[test]
    fn no_removed_line_or_changed_value_panics(
        line in 0..GOOD.lines().count(),
        value in prop::sample::select(vec![
            "", "1", "-1", "''", "'x'", "[]", "{}", "true", "1.5", "[{}]", "{ min = 1 }", "{ env = 1 }", "'10s'",
            "'off'", "'least-loaded'", "{ rebind = '1s' }",
        ]),
    ) {
        let mut lines: Vec<_> = GOOD.lines().map(str::to_owned).collect();
        let key = lines[line].split('=').next().unwrap_or_default().to_owned();
        lines[line] = if value.is_empty() { String::new() } else { format!("{key} = {value}") };
        faults(&lines.join("\n"));
    }
}
