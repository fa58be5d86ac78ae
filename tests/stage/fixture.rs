//! The common setup: one client task, one service over IPv4, and three backends in a file.

use std::path::PathBuf;

use crate::{Backend, Cgroup, Daemon, Probe, Setup, Stage, replace};

/// The address of the service. No interface has it: in a test's namespace only loopback can be
/// reached.
pub const SERVICE: &str = "10.96.0.10:80";

pub struct Fixture {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses.
    /// The daemon; `None` if it does not run.
    pub daemon: Option<Daemon>,
    /// The backends, with the names `b1` to `b3`.
    pub backends: Vec<Backend>,
    pub setup: Setup,
    /// The client's cgroup.
    pub cgroup: Cgroup,
    pub file: PathBuf,
    _stage: Stage,
}

impl Fixture {
    /// A fixture with three backends of weight 1 and a running daemon.
    #[expect(clippy::new_without_default, reason = "it starts processes")]
    pub fn new() -> Self {
        let mut fixture = Self::without_daemon();
        fixture.start();
        fixture
    }

    /// A fixture with the stage, the backends and the files, but without a daemon.
    pub fn without_daemon() -> Self {
        let stage = Stage::new();
        let cgroup = Cgroup::new();
        let setup = Setup::new(&stage, "a");
        let backends: Vec<Backend> =
            (1..=3).map(|n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"))).collect();
        let file = setup.write(
            "users.toml",
            &endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")]),
        );
        setup.write("socklb.toml", &config(&cgroup, r#"{ file = "users.toml" }"#, ""));
        Self { daemon: None, backends, setup, cgroup, file, _stage: stage }
    }

    /// As [`Fixture::without_daemon`], with active accounting: connections are not tracked, and a
    /// flow ends with its socket.
    pub fn with_active_accounting() -> Self {
        let fixture = Self::without_daemon();
        let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
        fixture.setup.write("socklb.toml", &with_active_accounting(&text));
        fixture
    }

    /// As [`Fixture::without_daemon`], with ejection off: failing backends are still chosen.
    pub fn without_ejection() -> Self {
        let fixture = Self::without_daemon();
        let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "ejection = \"off\"");
        fixture.setup.write("socklb.toml", &text);
        fixture
    }

    pub fn start(&mut self) {
        self.daemon = Some(Daemon::start_again(&self.setup));
    }

    /// Stops the daemon with a signal.
    pub fn stop(&mut self) {
        let daemon = self.daemon.take().expect("a daemon runs");
        assert_eq!(daemon.stop(), Some(0));
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("a daemon runs")
    }

    /// A process in the client's cgroup, on one CPU. The choices of the process are predictable,
    /// because each CPU has one cursor.
    pub fn probe(&self) -> Probe {
        let mut probe = Probe::start(&self.cgroup);
        probe.pin(0);
        probe
    }

    pub fn write_endpoints(&self, list: &[(&str, &str)]) {
        replace(&self.file, &endpoints(list));
    }
}

/// A configuration of one client, one service, and `more` keys of the service.
pub fn config(cgroup: &Cgroup, backends: &str, more: &str) -> String {
    format!(
        "[[client]]\njob = \"web\"\ncgroup = \"{}\"\n\n[[service]]\nname = \"users\"\naddress = \"{SERVICE}\"\n\
         backends = {backends}\n{more}\n",
        cgroup.relative().display()
    )
}

/// Changes a configuration so that clients' connections are not tracked.
pub fn with_active_accounting(text: &str) -> String {
    text.replace("[[client]]\n", "[[client]]\naccounting = \"active\"\n")
}

/// Changes a configuration so that passes over the flow records are one second apart.
pub fn with_passes(text: &str) -> String {
    text.to_owned() + "[accounting]\nreclaim_interval = \"1s\"\n"
}

/// The text of an endpoint file: the address and further lines of each endpoint. The key `index` is
/// the position in `list`, so slots and shares have the order of `list`.
pub fn endpoints(list: &[(&str, &str)]) -> String {
    let entry = |(index, (address, more)): (usize, &(&str, &str))| {
        format!("[[endpoint]]\naddress = \"{address}\"\n{more}\nindex = {index}\n")
    };
    list.iter().enumerate().map(entry).collect()
}
