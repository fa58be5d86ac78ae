//! Turns the configuration file into values that cannot be wrong.
//!
//! Everything that the text alone decides is decided here, and all faults are reported at once, so that nothing behind
//! it checks again. Must not look at the host: whether a cgroup exists is for the datapath, what an endpoint file says
//! for its source. Variables and the host name come in through [`Environment`].

use std::fs::File;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_common::abi::{MAX_CLIENTS, MAX_SERVICES};
use lb_core::endpoint::EndpointList;
use lb_core::service::{Service, Task};
use thiserror::Error;

use crate::diagnostic::{Faults, Report, utf8};
use crate::document::{self, Table};

pub mod keys;

pub mod reference;

mod paths;

mod limits;

mod metrics;

mod reclaim;

mod service;

mod source;

mod subset;

mod policy;

mod client;

mod task;

pub use limits::Limits;
pub use metrics::Metrics;
pub use paths::{Paths, detach_command, pins_option};

/// The longest configuration that is read, to bound memory and time when the wrong file is named: every service with
/// a hundred static endpoints needs less than 1 MiB.
pub const MAX_FILE_BYTES: u64 = 16 << 20;

/// Where the configuration is, unless `--config` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/socklb/socklb.toml";

/// What the operator configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that says so.
    pub path: PathBuf,
    /// The client tasks, in the order of the file; at least one.
    pub clients: Vec<Client>,
    /// The addresses of all services, used by a client or not: no backend may have one.
    pub addresses: Vec<SocketAddr>,
    /// Where state is kept.
    pub paths: Paths,
    /// Sizes of every client task's maps.
    pub limits: Limits,
    /// Where counters are told.
    pub metrics: Metrics,
    /// How far apart two passes over the flow records are.
    pub reclaim_interval: Duration,
}

/// One cgroup whose connects are balanced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The job it is a task of.
    pub job: String,
    /// Unique among the clients; letters, digits, `_` and `-`.
    pub name: String,
    /// Relative to the cgroup2 mount; not below that of another client.
    pub cgroup: PathBuf,
    /// Which task of its job it is.
    pub task: Task,
    /// The services that it dials, at least one.
    pub services: Vec<ClientService>,
    /// What is known of its flows.
    pub accounting: Accounting,
}

/// What is known of a client's flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// Those that are open, by the cheapest hooks. Why one failed is not known.
    Active,
    /// Also how they went and why they ended.
    Full,
}

impl Accounting {
    /// Both of them, in the order in which the documentation has them.
    pub const ALL: [Self; 2] = [Self::Full, Self::Active];

    /// The word for it in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Full => "full",
        }
    }
}

/// A service as one client task sees it, and where its endpoints come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientService {
    /// The service; its seed is that of the client's job.
    pub service: Service,
    /// Where its endpoints come from.
    pub source: Source,
}

/// Where the endpoints of a service come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The configuration itself.
    Static(EndpointList),
    /// A file that is watched.
    File(PathBuf),
}

/// An endpoint file that a configuration names, right or wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The address of its service, if that can be read.
    pub service: Option<SocketAddr>,
    /// The file.
    pub path: PathBuf,
    /// Where the configuration names it.
    pub span: Range<usize>,
}

/// What a configuration may ask about the process that reads it.
pub trait Environment {
    /// The value of an environment variable, if it is set.
    fn variable(&self, name: &str) -> Option<String>;
    /// The name of the host, if the kernel tells it.
    fn host_name(&self) -> Option<String>;
}

/// This process on this host.
pub struct Host;

impl Environment for Host {
    fn variable(&self, name: &str) -> Option<String> {
        // `var_os` panics on no name but these.
        let is_name = !name.is_empty() && !name.contains(['=', '\0']);
        is_name.then(|| std::env::var_os(name)).flatten().map(|value| value.to_string_lossy().into_owned())
    }

    fn host_name(&self) -> Option<String> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim_end().to_owned())
    }
}

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Nobody has written one yet.
    #[error(
        "there is no configuration at {DEFAULT_PATH}, and --config names no other: the package has an example, \
         /usr/share/doc/socklb/examples/socklb.toml, which is packaging/examples/socklb.toml in the repository"
    )]
    None,
    /// The file is too long to be a configuration.
    #[error("read {}: longer than {MAX_FILE_BYTES} bytes, which no configuration is", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The file was read and is wrong.
    #[error(transparent)]
    Faulty(#[from] Faults),
}

/// Reads the configuration file at `path`.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read(path: &Path, env: &dyn Environment) -> Result<Config, ConfigError> {
    read_with(path, env, |_, _, _| ())
}

/// Reads `[paths]` of the configuration file at `path`, whatever else is wrong with it: who looks what is wrong needs no more.
///
/// # Errors
/// The file cannot be read, or the faults of that table. If there is none, and the text cannot be parsed, the faults of the
/// text.
pub fn read_paths(path: &Path) -> Result<Paths, ConfigError> {
    let bytes = read_file(path)?;
    let text = utf8(&bytes, path)?;
    let mut syntax = Report::new(path, text);
    let root = document::read(text, &mut syntax);
    let root = Table::root("a configuration", &keys::names(), &root, &mut syntax);
    if root.get("paths").is_none() && !syntax.is_clean() {
        return Ok(syntax.finish(None)?);
    }
    let mut report = Report::new(path, text);
    let paths = paths::read(&root, path.parent().unwrap_or(Path::new("")), &mut report);
    Ok(report.finish(Some(paths))?)
}

/// As [`read`], and shows the endpoint files that the text names, whatever else is wrong with it, and the addresses of
/// all services to `look`. What that reports is a fault of the configuration.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read_with(
    path: &Path,
    env: &dyn Environment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut Report<'_>),
) -> Result<Config, ConfigError> {
    let bytes = read_file(path)?;
    Ok(parse_with(utf8(&bytes, path)?, path, env, look)?)
}

fn read_file(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let cannot = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    // A pipe would keep us waiting for a writer.
    let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound && path == Path::new(DEFAULT_PATH) => {
            return Err(ConfigError::None);
        }
        Err(error) => return Err(cannot(error)),
    };
    if !file.metadata().map_err(cannot)?.is_file() {
        return Err(cannot(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let length = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if length as u64 > MAX_FILE_BYTES {
        return Err(ConfigError::TooLong { path: path.to_owned() });
    }
    Ok(bytes)
}

/// Reads the text of a configuration; `path` is where it stands, and what the paths in it are relative to.
///
/// # Errors
/// All faults of the text.
pub fn parse(text: &str, path: &Path, env: &dyn Environment) -> Result<Config, Faults> {
    parse_with(text, path, env, |_, _, _| ())
}

fn parse_with(
    text: &str,
    path: &Path,
    env: &dyn Environment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut Report<'_>),
) -> Result<Config, Faults> {
    let mut report = Report::new(path, text);
    let root = document::read(text, &mut report);
    let root = Table::root("a configuration", &keys::names(), &root, &mut report);
    let (config, files) = read_root(&root, path, env, &mut report);
    look(&files, &config.addresses, &mut report);
    report.finish(Some(config))
}

// Returns what could be read: it is a configuration only if nothing was reported.
fn read_root(
    root: &Table<'_>,
    path: &Path,
    env: &dyn Environment,
    report: &mut Report<'_>,
) -> (Config, Vec<NamedFile>) {
    let directory = path.parent().unwrap_or(Path::new(""));
    let services = root.tables(&keys::service::SECTION, MAX_SERVICES as usize, report);
    let clients = root.tables(&keys::client::SECTION, MAX_CLIENTS, report);
    for (key, example) in [
        ("client", "write [[client]] with a job and a cgroup"),
        ("service", "write [[service]] with a name, an address and backends"),
    ] {
        if root.get(key).is_none_or(|item| item.is_empty_list()) {
            report.add_absent(0..0, format!("no {key} is configured"), example.to_owned());
        }
    }
    let paths = paths::read(root, directory, report);
    let limits = limits::read(root, report);
    let metrics = metrics::read(root, report);
    let reclaim_interval = reclaim::read(root, report);
    let services = service::read(&services, directory, report);
    let clients = client::read(&clients, &services, limits, env, report);
    let addresses = services.addresses();
    let config =
        Config { path: path.to_owned(), clients, addresses, paths, limits, metrics, reclaim_interval };
    (config, services.into_files())
}

#[cfg(test)]
pub mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use super::*;
    use lb_core::service::{Overflow, Policy, Protocol, Size, Subset, UNANSWERED_AFTER, seed};
    use lb_core::subset::Algorithm;
    use proptest::prelude::*;

    /// An environment of one variable and a host name.
    pub struct Fake {
        /// Name and value.
        pub variable: Option<(&'static str, &'static str)>,
        /// The host name.
        pub host_name: Option<&'static str>,
    }

    impl Environment for Fake {
        fn variable(&self, name: &str) -> Option<String> {
            self.variable.filter(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
        }

        fn host_name(&self) -> Option<String> {
            self.host_name.map(str::to_owned)
        }
    }

    const NOTHING: Fake = Fake { variable: None, host_name: None };
    const PATH: &str = "/etc/socklb/socklb.toml";

    /// Reads a configuration that must be right.
    pub fn good_in(text: &str, env: &dyn Environment) -> Config {
        parse(text, Path::new(PATH), env).unwrap_or_else(|faults| panic!("{faults}\nin\n{text}"))
    }

    /// Reads a configuration that must be right, without an environment.
    pub fn good(text: &str) -> Config {
        good_in(text, &NOTHING)
    }

    /// The faults of a configuration, without its path.
    pub fn faults_in(text: &str, env: &dyn Environment) -> Vec<String> {
        let faults = parse(text, Path::new(PATH), env).map(|_| ()).map_err(|faults| faults.to_string());
        let prefix = format!("{PATH}:");
        let text = faults.err().unwrap_or_default();
        text.lines().map(|line| line.strip_prefix(&prefix).unwrap_or(line).to_owned()).collect()
    }

    /// The faults of a configuration without an environment.
    pub fn faults(text: &str) -> Vec<String> {
        faults_in(text, &NOTHING)
    }

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        assert_eq!(faults(text), expected, "{text}");
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
                connect_timeout: Some(Duration::from_secs(7)),
                unanswered_after: Duration::from_millis(50),
                rebind: None,
                subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(20) },
                seed: seed(job, "users"),
                errno: 111,
            },
            source: Source::File("/etc/socklb/users.toml".into()),
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
                error_decay: Some(Duration::from_secs(10)),
                connect_timeout: None,
                unanswered_after: UNANSWERED_AFTER,
                rebind: Some(Duration::from_secs(30)),
                subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } },
                seed: seed(job, "mail.v6"),
                errno: 113,
            },
            source: Source::Static(EndpointList::default()),
        }
    }

    #[test]
    fn a_good_file_is_read_whole() {
        let frontend = Client {
            job: "frontend".to_owned(),
            name: "frontend-a".to_owned(),
            cgroup: "system.slice/frontend.service".into(),
            task: Task { index: 13, count: 300 },
            services: vec![users("frontend")],
            accounting: Accounting::Active,
        };
        let batch = Client {
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
            paths: Paths {
                pins: "/sys/fs/bpf/other".into(),
                run: "/etc/socklb/run".into(),
                state: "/var/lib/socklb".into(),
            },
            limits: Limits { schedule_entries: 1_048_576, flow_records: 64, slots: 65_535 },
            metrics: Metrics { listen: Some("127.0.0.1:9464".parse().unwrap()) },
            reclaim_interval: Duration::from_secs(90),
        };
        assert_eq!(good(GOOD), expected);
    }

    /// Whoever takes away the mark before a key of the packaged example gets what stands there.
    #[test]
    fn the_packaged_example_is_right_with_all_that_it_suggests() {
        let text = include_str!("../../packaging/examples/socklb.toml");
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
    }

    #[test]
    fn an_empty_file_says_what_to_write() {
        let expected = [
            "1:1: no client is configured (write [[client]] with a job and a cgroup)",
            "1:1: no service is configured (write [[service]] with a name, an address and backends)",
        ];
        for text in ["", "# nothing\n", "client = []\nservice = []\n"] {
            check(text, &expected);
        }
    }

    /// The shortest configuration, 7 lines.
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
                "8:3: unknown key \"clients\" in a configuration (did you mean client? known keys: client, service, \
                 paths, limits, metrics, accounting)",
            ),
            (
                "[path]\n",
                "8:2: unknown key \"path\" in a configuration (did you mean paths? known keys: client, service, \
                 paths, limits, metrics, accounting)",
            ),
            ("[[paths]]", "8:1: paths must be a table, not a list"),
            (
                "[paths]\npin = 'x'",
                "9:1: unknown key \"pin\" in [paths] (did you mean pins? known keys: pins, run, state)",
            ),
            ("[paths]\npins = ''", "9:8: pins is empty"),
            ("[paths]\nrun = 1", "9:7: run must be a string, not a whole number"),
            (
                "[limits]\nslot = 64",
                "9:1: unknown key \"slot\" in [limits] (did you mean slots? known keys: schedule_entries, \
                 flow_records, slots)",
            ),
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
    fn limits_go_to_their_limits_and_no_further() {
        let cases = [
            ("schedule_entries", 1_024, 4_194_304, Some((3_000, "2048 or 4096"))),
            ("flow_records", 64, 4_194_304, Some((65, "64 or 128"))),
            ("slots", 64, 65_535, None),
        ];
        for (key, least, most, between) in cases {
            let with = |number: u32| format!("{LEAST}[limits]\n{key} = {number}");
            let column = key.len() + 4;
            for number in [least, most] {
                assert_eq!(faults(&with(number)), [""; 0]);
            }
            for number in [least - 1, most + 1] {
                check(&with(number), &[&format!("9:{column}: {key} is {number} (write {least} to {most})")]);
            }
            if let Some((number, help)) = between {
                let expected =
                    format!("9:{column}: {key} is {number}, which is not a power of two (write {help})");
                check(&with(number), &[&expected]);
            }
        }
    }

    fn services(count: usize, rest: &str) -> String {
        (0..count).fold(String::new(), |mut text, n| {
            writeln!(
                text,
                "[[service]]\nname = 's{n}'\naddress = '10.96.{}.{}:80'\n{rest}",
                n / 200,
                n % 200
            )
            .unwrap();
            text
        })
    }

    fn clients(count: usize) -> String {
        (0..count).fold(String::new(), |mut text, n| {
            writeln!(text, "[[client]]\njob = 'j{n}'\ncgroup = 'c{n}'").unwrap();
            text
        })
    }

    #[test]
    fn clients_and_services_go_to_their_limits_and_no_further() {
        let rest = "backends = { static = [] }";
        let config = good(&format!("{}{}", clients(64), services(256, rest)));
        assert_eq!((config.clients.len(), config.clients[63].services.len()), (64, 256));
        check(
            &format!("{}{}", clients(65), services(1, rest)),
            &["193:1: client 65 is one too many (at most 64)"],
        );
        check(
            &format!("{}{}", clients(1), services(257, rest)),
            &["1028:1: service 257 is one too many (at most 256)"],
        );
    }

    #[test]
    fn schedules_and_slots_of_a_client_must_fit_its_maps() {
        let file = |size: u32| format!("subset = {{ size = {size} }}\nbackends = {{ file = 'f' }}");
        let text = |count: usize, rest: &str, limits: &str| {
            format!("{}{}[limits]\n{limits}\n", clients(1), services(count, rest))
        };
        let help = |key: &str| format!("(raise {key} in [limits], or use smaller subsets or fewer services)");
        // 256 backends take 8,192 entries; 524,288 is 64 times that.
        let slots = "slots = 20_000";
        good(&text(64, &file(256), slots));
        let expected = format!(
            "1:1: client \"j0\" needs 532480 schedule_entries, and 524288 are allowed {}",
            help("schedule_entries")
        );
        check(&text(65, &file(256), slots), &[&expected]);
        good(&text(65, &file(256), &format!("schedule_entries = 1_048_576\n{slots}")));

        let expected = format!("1:1: client \"j0\" needs 4352 slots, and 4096 are allowed {}", help("slots"));
        check(&text(17, &file(256), ""), &[&expected]);
        good(&text(4, &file(16), "slots = 64"));
        let expected = format!("1:1: client \"j0\" needs 68 slots, and 64 are allowed {}", help("slots"));
        check(&text(4, &file(17), "slots = 64"), &[&expected]);

        // A file may be empty of what `all` would take, but a schedule has its shortest length even so.
        let all = "backends = { file = 'f' }";
        good(&text(2, all, "schedule_entries = 2048"));
        let expected = format!(
            "1:1: client \"j0\" needs 3072 schedule_entries, and 2048 are allowed {}",
            help("schedule_entries")
        );
        check(&text(3, all, "schedule_entries = 2048"), &[&expected]);

        // A static list shorter than the subset takes what it has: 33 backends are past 1,024 entries, 32 are not.
        let listed = |count: u32| {
            let list: Vec<_> = (1..=count).map(|n| format!("'10.0.0.{n}:80'")).collect();
            format!("subset = {{ size = 256 }}\nbackends = {{ static = [{}] }}", list.join(", "))
        };
        good(&text(1, &listed(32), "schedule_entries = 1024"));
        let expected = format!(
            "1:1: client \"j0\" needs 2048 schedule_entries, and 1024 are allowed {}",
            help("schedule_entries")
        );
        check(&text(1, &listed(33), "schedule_entries = 1024"), &[&expected]);
    }

    #[test]
    fn all_faults_of_a_file_are_reported_in_its_order_and_none_twice() {
        check(
            "[[client]]\njob = 'j'\ncgroup = '/c'\nservices = ['t']\nindex = 1\n\
             [[service]]\nname = 'a b'\naddress = '10.0.0.1'\nbackends = { file = 'f' }\n\
             [other]\n",
            &[
                "3:10: cgroup \"/c\" is absolute (write \"c\": paths are relative to the cgroup2 mount)",
                "4:13: no service is named \"t\" (services: a b)",
                "5:9: index 1 is not below count, which is 1 (indexes start at 0)",
                "7:8: name \"a b\" has other characters than letters, digits, _, - and . (write 1 to 63 of letters, \
                 digits, _, - and .)",
                "8:11: address \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
                "10:2: unknown key \"other\" in a configuration (known keys: client, service, paths, limits, \
                 metrics, accounting)",
            ],
        );
    }

    #[test]
    fn a_line_that_cannot_be_parsed_makes_no_other_fault() {
        check(
            "[[client]]\njob = 'j'\ncgroup = 'c'\nservices = ['s']\nindex = 1\n\
             [[service]]\nname = s\naddress = 10.0.0.1\nbackends = { file = 'f' }\n",
            &[
                "5:9: index 1 is not below count, which is 1 (indexes start at 0)",
                "7:8: string values must be quoted, expected literal string",
                "8:15: invalid float (text, such as an address, is written in quotes)",
            ],
        );
        check("[[client]]\njob = 'j'\njob = 'k'\ncgroup = 'c'\n", &["3:1: duplicate key"]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_with_its_cause() {
        let error = read(Path::new("/nonexistent/socklb.toml"), &Host).unwrap_err();
        assert_eq!(error.to_string(), "read /nonexistent/socklb.toml");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "No such file or directory (os error 2)");
        let error = read(Path::new("/dev/zero"), &Host).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "it is not a regular file");
        let long = tempfile::NamedTempFile::new().unwrap();
        long.as_file().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(matches!(read(long.path(), &Host), Err(ConfigError::TooLong { .. })));
    }

    #[test]
    fn no_name_of_a_variable_panics() {
        for name in ["", "=", "A=B", "A\0"] {
            assert_eq!(Host.variable(name), None);
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,200}") {
            faults(&text);
        }

        #[test]
        fn no_mutation_of_a_good_file_panics(
            at in 0..GOOD.len(), length in 0_usize..30, put in "[\\[\\]{}=\"',.0-9a-z\n ]{0,6}",
        ) {
            let mut text = GOOD.to_owned();
            text.replace_range(at..(at + length).min(GOOD.len()), &put);
            faults(&text);
        }

        #[test]
        fn no_line_left_out_or_given_another_value_panics(
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
}
