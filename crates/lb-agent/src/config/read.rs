//! Reads `agent.toml` from a file or from a text.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, chain, utf8};
use lb_document::{self as document};
use lb_document::{Item, Table, Unique, address};
use lb_host::regular_file;
use lb_kernel::xdp::Place;
use lb_report::agent::MAX_BACKENDS;

use super::backend::{self, ReadKeys};
use super::keys::agent::{GROUP, LISTEN, LOG_FORMAT, RUN, SECTION, STATE, XDP};
use super::keys::backend::{ADDRESS, SECTION as BACKEND};
use super::keys::xdp;
use super::{AgentConfig, DEFAULT_PATH, read_key_file};

/// Maximum size of a configuration, in bytes: a hundred times the size of a file with the maximum
/// number of backends.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Maximum number of addresses at which the agent listens.
const MAX_LISTEN: usize = 16;

/// The reason why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// There is no file at the default path.
    #[error(
        "there is no configuration at {DEFAULT_PATH}; name another file (`socklb agent serve FILE`), or serve one backend without a file (--backend)"
    )]
    None,
    /// The file is too long to be a configuration.
    #[error("read {}: longer than {MAX_FILE_BYTES} bytes, the limit for a configuration", .0.display())]
    TooLong(PathBuf),
    /// The file was read and has faults.
    #[error(transparent)]
    Faulty(#[from] Diagnostics),
}

/// Reads the configuration file at `path`, and the key files that it names.
///
/// # Errors
/// If the file cannot be read or has faults. The error lists all faults.
pub fn read(path: &Path) -> Result<AgentConfig, ConfigError> {
    let bytes = read_file(path)?;
    let text = utf8(&bytes, path)?;
    Ok(parse(text, path, &mut |path| read_key_file(path).map_err(|error| chain(&error)))?)
}

fn read_file(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let cannot = |source| ConfigError::Read { path: path.to_owned(), source };
    let (file, _) = match regular_file::open(path) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound && path == Path::new(DEFAULT_PATH) => {
            return Err(ConfigError::None);
        }
        Err(error) => return Err(cannot(error)),
    };
    let bytes = regular_file::read(&file, MAX_FILE_BYTES).map_err(cannot)?;
    bytes.ok_or_else(|| ConfigError::TooLong(path.to_owned()))
}

/// Parses the text of a configuration file. `keys` reads the key files that the text names.
///
/// # Errors
/// All faults of the text.
pub fn parse(text: &str, path: &Path, keys: &mut ReadKeys<'_>) -> Result<AgentConfig, Diagnostics> {
    let report = DiagnosticCollector::new(path, text);
    let root = document::read(text, &report);
    let root = Table::root(SECTION.what, &root, &report);
    root.check_keys(&SECTION.keys());
    let directory = path.parent().unwrap_or(Path::new(""));
    let listen = LISTEN.take_written(&root).flatten();
    let [state, run] = [&STATE, &RUN].map(|key| directory.join(&*key.take_or_default(&root)));
    let group = GROUP.take_written(&root).flatten().map(std::borrow::Cow::into_owned);
    let log_format = LOG_FORMAT.take_or_default(&root);
    let xdp = xdp(&root, listen.as_deref());
    let mut names = Unique::default();
    let mut backends = Vec::new();
    for table in root.tables(&BACKEND, MAX_BACKENDS) {
        let Some(backend) = backend::read(&table, directory, keys) else { continue };
        let span = ADDRESS.item(&table).map_or(table.span(), |item| item.span());
        if names.claim(backend.name, span, &format!("the backend {}", backend.name), &report) {
            backends.push(backend);
        }
    }
    let path = Some(path.to_owned());
    report.finish(Some(AgentConfig { path, listen, state, run, group, log_format, xdp, backends }))
}

/// Parses `[xdp]`: the interfaces on which the kernel answers in the agent's place.
fn xdp(root: &Table<'_>, listen: Option<&[SocketAddr]>) -> Option<Place> {
    let item = XDP.item(root)?;
    let table = item.table(&xdp::SECTION)?;
    let interfaces = xdp::INTERFACES.take(&table);
    let allows_generic = xdp::GENERIC.take_or_default(&table);
    let ports: BTreeSet<u16> = listen.unwrap_or_default().iter().map(SocketAddr::port).collect();
    if (ports.len() > 1 || ports.contains(&0))
        && let Some(item) = LISTEN.item(root)
    {
        let why = "with [xdp], all addresses of `listen` must have the same port, which must not be 0";
        item.fault(why, "write one port, 1 to 65535".to_owned());
    }
    Some(Place { interfaces: interfaces?, allows_generic, generic_key: "generic" })
}

pub fn listen(item: &Item<'_>) -> Option<Vec<SocketAddr>> {
    if item.as_str().is_some() {
        return item.parse(address).map(|address| vec![address]);
    }
    let entries = item.list()?;
    if entries.is_empty() || entries.len() > MAX_LISTEN {
        let message = format!("listen has {} addresses", entries.len());
        item.fault(message, format!("write 1 to {MAX_LISTEN}, or leave the key out"));
        return None;
    }
    let mut seen = Unique::default();
    let mut addresses = Vec::new();
    for entry in &entries {
        let Some(address) = entry.parse(address) else { continue };
        if seen.claim(address, entry.span(), &format!("listen {address}"), item.report()) {
            addresses.push(address);
        }
    }
    Some(addresses)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lb_report::keys::Keys;

    use super::super::{HealthCheck, Utilization};
    use super::*;
    use crate::check::CheckMethod;

    const LEAST: &str = "[[backend]]\naddress = '10.0.0.1:80'\nkey = 'k'\n";

    fn parsed(text: &str) -> Result<AgentConfig, Diagnostics> {
        parse(text, Path::new("/x/agent.toml"), &mut |path| match path.to_str() {
            Some("/x/k") => Ok(Keys::parse(&format!("1 {}", "0f".repeat(16))).unwrap()),
            _ => Err(format!("read {}: No such file or directory", path.display())),
        })
    }

    #[track_caller]
    fn good(text: &str) -> AgentConfig {
        parsed(text).unwrap_or_else(|faults| panic!("{faults}"))
    }

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        let faults = parsed(text).expect_err("faults").to_string();
        let faults: Vec<_> = faults.lines().map(|line| line.trim_start_matches("/x/agent.toml:")).collect();
        assert_eq!(faults, expected, "{text}");
    }

    fn with(line: &str) -> String {
        format!("{LEAST}{line}\n")
    }

    #[test]
    fn missing_keys_have_their_defaults() {
        let config = good(LEAST);
        let [backend] = &config.backends[..] else { panic!("not exactly one backend: {config:?}") };
        assert_eq!(backend.check, Some(HealthCheck::new(CheckMethod::Tcp("10.0.0.1:80".parse().unwrap()))));
        assert_eq!(backend.check.as_ref().unwrap().stale_after(), Duration::from_secs(9));
        assert_eq!((backend.hold, backend.valid_for), (Duration::from_mins(10), Duration::from_secs(45)));
        assert_eq!(backend.utilization, Utilization::Application);
        assert_eq!((config.listen.as_ref(), config.state.to_str()), (None, Some("/var/lib/socklb-agent")));
        assert_eq!(
            AgentConfig { backends: Vec::new(), ..config },
            AgentConfig { path: Some("/x/agent.toml".into()), ..AgentConfig::default() }
        );
        assert_eq!(good("").backends, [], "programs that are run by `socklb agent run` register themselves");
    }

    #[test]
    fn every_valid_value_parses() {
        let of = |line: &str| good(&with(line)).backends.remove(0);
        let check = |line: &str| of(line).check.map(|check| check.check);
        let at = |text: &str| text.parse().unwrap();
        assert_eq!(check("check = 'off'"), None);
        assert_eq!(check("check = { tcp = '127.0.0.1:81' }"), Some(CheckMethod::Tcp(at("127.0.0.1:81"))));
        let http = |address| Some(CheckMethod::Http { at: at(address), path: "/ok?a=b".to_owned() });
        assert_eq!(check("check = { http = '/ok?a=b' }"), http("10.0.0.1:80"));
        assert_eq!(check("check = { http = '/ok?a=b', at = '[::1]:8' }"), http("[::1]:8"));
        let command = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(check("check = { command = ['a', 'b'] }"), Some(CheckMethod::Command(command)));
        assert_eq!(of("protocol = 'udp'\ncheck = 'off'").name.to_string(), "10.0.0.1:80/udp");
        assert_eq!(of("utilization = 'off'").utilization, Utilization::Off);
        let cgroup = |cores| Utilization::Cgroup { cgroup: "a/b.service".into(), cores };
        assert_eq!(of("utilization = { cgroup = '/a/b.service' }").utilization, cgroup(None));
        assert_eq!(
            of("utilization = { cgroup = 'a/b.service', cores = 1.5 }").utilization,
            cgroup(Some(1500))
        );
        assert_eq!(of("utilization = { cgroup = 'a/b.service', cores = 2 }").utilization, cgroup(Some(2000)));
        let listen = |text: &str| good(text).listen.unwrap();
        assert_eq!(listen("listen = '10.0.0.1:1'"), [at("10.0.0.1:1")]);
        assert_eq!(listen("listen = ['10.0.0.1:1', '[::1]:2']"), [at("10.0.0.1:1"), at("[::1]:2")]);
        assert_eq!(good("state = 's'\ngroup = 'deploy'").state, Path::new("/x/s"));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let form = "(write \"tcp\", \"off\", { http = \"/healthz\" } or { command = [\"/usr/bin/app\", \"check\"] })";
        let cases = [
            ("check = 'http'", format!("4:9: unknown check \"http\" {form}")),
            ("check = {}", format!("4:9: `check` has no method {form}")),
            (
                "check = { http = '/', command = ['a'] }",
                "4:9: `check` has both `http` and `command` (write one of them)".to_owned(),
            ),
            ("check = { tcp = '[::1]:8', at = '[::1]:9' }", "4:33: `at` has no effect without `http`".to_owned()),
            (
                "check = { http = 'healthz' }",
                "4:18: http \"healthz\" is not the path of a page (write it as in \"/healthz\")".to_owned(),
            ),
            ("check = { command = [] }", "4:21: `command` is empty (write a program and its arguments)".to_owned()),
            ("check = { command = [1] }", "4:22: an entry of command must be a string, not a whole number".to_owned()),
            (
                "check = { http = '/', https = '/' }",
                "4:23: unknown key \"https\" in check (did you mean http? known keys: tcp, http, at, command)".to_owned(),
            ),
            (
                "protocol = 'udp'",
                format!("1:1: `check` is missing: a TCP connection cannot check a UDP backend {form}"),
            ),
            (
                "protocol = 'udp'\ncheck = 'tcp'",
                format!("5:9: `check` is \"tcp\", but a TCP connection cannot check a UDP backend {form}"),
            ),
            ("hold = '61m'", "4:8: hold is \"61m\" (write \"1s\" to \"1h\")".to_owned()),
            ("rise = 0", "4:8: rise is 0 (write 1 to 100)".to_owned()),
            ("interval = '100ms'", "4:12: interval is \"100ms\" (write \"200ms\" to \"1h\")".to_owned()),
            (
                "utilization = 'cgroup'",
                "4:15: unknown utilization \"cgroup\" (write \"application\", \"off\" or { cgroup = \
                 \"system.slice/app.service\" })"
                    .to_owned(),
            ),
            ("utilization = { cgroup = 'a', cores = 0 }", "4:39: `cores` is out of range (write 0.001 to \
                                                           65536)".to_owned()),
            ("utilization = { cgroup = 'a', cores = '1' }", "4:39: cores must be a number, not a string".to_owned()),
            (
                "utilization = { cgroup = '../a' }",
                "4:26: cgroup \"../a\" is not the path of a cgroup (write it as in \"system.slice/app.service\")".to_owned(),
            ),
        ];
        for (line, expected) in cases {
            check(&with(line), &[&expected]);
        }
    }

    #[test]
    fn faults_of_names_keys_and_ports_are_reported_together() {
        check(
            "listen = []\n[[backend]]\naddress = '[fe80::1]:80'\nkey = 'none'\n[[backend]]\nkey = 'k'\n",
            &[
                "1:10: listen has 0 addresses (write 1 to 16, or leave the key out)",
                "3:11: address \"[fe80::1]:80\" is no backend's name: a name is one host's address, not link-local, with a \
                 port of 1 or more",
                "4:7: key: read /x/none: No such file or directory",
                "5:1: address is missing in a backend (write address = \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
            ],
        );
        check(&format!("{LEAST}{LEAST}"), &["5:11: the backend 10.0.0.1:80 is already on line 2"]);
        let both = format!("{LEAST}{LEAST}protocol = 'udp'\ncheck = 'off'\n");
        assert_eq!(good(&both).backends.len(), 2);
        check("listen = ['[::]:1', '[::]:1']", &["1:21: listen [::]:1 is already in column 11 of this line"]);
        check(
            "[[backends]]",
            &[
                "1:3: unknown key \"backends\" in agent.toml (did you mean backend? known keys: listen, state, run, group, log_format, xdp, backend)",
            ],
        );
    }

    #[test]
    fn at_most_64_backends_are_accepted() {
        let backends =
            |count: usize| (1..=count).map(|n| LEAST.replace(":80'", &format!(":{n}'"))).collect::<String>();
        assert_eq!(good(&backends(64)).backends.len(), 64);
        check(&backends(65), &["193:1: backend 65 is one too many (at most 64)"]);
    }

    #[test]
    fn xdp_requires_interfaces_and_one_port() {
        let place = |allows_generic| Place {
            interfaces: vec!["eth0".to_owned(), "eth1".to_owned()],
            allows_generic,
            generic_key: "generic",
        };
        assert_eq!(good(LEAST).xdp, None);
        let text = "[xdp]\ninterfaces = ['eth0', 'eth1']\n";
        assert_eq!(good(text).xdp, Some(place(false)));
        assert_eq!(good(&format!("{text}generic = true\n")).xdp, Some(place(true)));
        check("[xdp]", &["1:1: interfaces is missing in [xdp] (write interfaces = [\"eth0\"])"]);
        check("xdp = 1", &["1:7: xdp must be a table, not a whole number"]);
        check(
            "[xdp]\ninterfaces = ['eth0', 'eth0']",
            &["2:23: interface eth0 is already in column 15 of this line"],
        );
        check(
            "[xdp]\ninterfaces = []\ngeneric = 1",
            &["3:11: generic must be true or false, not a whole number"],
        );
        for listen in ["['10.0.0.1:1', '10.0.0.2:2']", "'10.0.0.1:0'"] {
            check(
                &format!("listen = {listen}\n{text}"),
                &["1:10: with [xdp], all addresses of `listen` must have the same port, which must not be \
                     0 (write one port, 1 to 65535)"],
            );
        }
        assert_eq!(good(&format!("listen = ['10.0.0.1:1', '10.0.0.2:1']\n{text}")).xdp, Some(place(false)));
        assert_eq!(good(LEAST).fixed(&good(&format!("{text}{LEAST}"))), ["xdp"]);
    }

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let (one, other) = (good(LEAST), good(&format!("listen = '[::]:1'\ngroup = 'g'\n{LEAST}")));
        assert_eq!(one.fixed(&other), ["listen", "group"]);
        assert_eq!(one.fixed(&good("")), [""; 0]);
    }
}
