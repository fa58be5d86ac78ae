//! A process in a balanced cgroup. The endpoint list of its service comes from a server. Each kind
//! of server has a separate module.

use std::ops::Range;
use std::time::{Duration, Instant};

use stage::daemon::finish;
use stage::fixture::{SERVICE, config};
use stage::kernel::print_line;
use stage::protocol::Counts;
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, eventually, pace};

use crate::http::Server;

/// The minimum number of connects per second while servers fail. The probe dials without pause: an
/// idle machine opens thousands of connections per second, and a machine with eight other jobs on
/// each CPU still opens sixty. The pace would not help, because load may begin after the pace was
/// measured.
const LEAST_RATE: f64 = 20.0;

/// Time limit on an idle machine from a query until `status` shows its result. A watch counts as
/// accepted after one second.
const LATE: Duration = Duration::from_secs(2);

/// The section of the configuration for a client task that uses more than 4,096 endpoints.
pub const LARGE: &str = "[limits]\nslots = 16384\nschedule_entries = 262144\n";

pub struct Client {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses.
    pub probe: Probe,
    pub daemon: Option<Daemon>,
    /// The backends `b1` to `b3` at the ports 8001 to 8003.
    pub backends: Vec<Backend>,
    pub setup: Setup,
    dialling: Option<Instant>,
    _cgroup: Cgroup,
    _stage: Stage,
}

impl Client {
    /// Three backends, and no daemon yet. `backends` is the key of the service, and `server` the
    /// configuration's section about the server.
    pub fn new(backends: &str, server: &str) -> Self {
        let (stage, cgroup) = (Stage::new(), Cgroup::new());
        let setup = Setup::new(&stage, "a");
        setup.write("socklb.toml", &(config(&cgroup, backends, "") + server));
        let probe = Probe::start(&cgroup);
        let backend = |n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"));
        let backends = (1..=3).map(backend).collect();
        Self { probe, daemon: None, backends, setup, dialling: None, _cgroup: cgroup, _stage: stage }
    }

    pub fn start_daemon(&mut self) {
        self.daemon = Some(Daemon::start_again(&self.setup));
    }

    /// Waits until exactly these backends receive connects.
    #[track_caller]
    pub fn expect(&mut self, names: &[&str]) {
        let probe = &mut self.probe;
        let answering = || probe.dial_many(SERVICE, 64).into_keys().collect::<Vec<_>>();
        eventually("exactly the expected backends answer", answering, |answering| answering == names);
    }

    /// Waits until the source has a fault that contains this text. If the text is empty, waits
    /// until the source has no fault.
    #[track_caller]
    pub fn expect_fault(&self, text: &str) {
        let error = || self.setup.source().error.unwrap_or_default();
        eventually("the expected fault is reported", error, |error| {
            if text.is_empty() { error.is_empty() } else { error.contains(text) }
        });
    }

    /// Waits until the next query is due in at least `seconds`, because earlier queries have
    /// failed.
    #[track_caller]
    pub fn expect_next_query_in(&self, seconds: u64) {
        let next = || self.setup.source().remote.and_then(|remote| remote.next_s);
        eventually("the next query is due later", next, |next| next.is_some_and(|next| next >= seconds));
    }

    /// Waits until the source has no fault. The server works again, so that the next query must end
    /// the fault: at the time that `status` shows, at most 30 s from now.
    #[track_caller]
    pub fn expect_recovery(&self) {
        // A query in progress may have begun before the server's recovery.
        let due = eventually(
            "a query has a result",
            || self.setup.source(),
            |source| source.error.is_none() || source.remote.as_ref().is_some_and(|one| one.next_s.is_some()),
        );
        let next = due.remote.and_then(|remote| remote.next_s).unwrap_or(0);
        let begun = Instant::now();
        self.expect_fault("");
        let took = begun.elapsed();
        eprintln!("recovered after {took:?}, next query in {next} s");
        // `status` shows whole seconds.
        let most = Duration::from_secs(next + 1) + LATE * pace::pace();
        assert!(next <= 30 && took < most, "recovery took {took:?}, and the next query was due in {next} s");
    }

    /// As [`Self::expect_recovery`], after an outage that ended when the test began to start the
    /// server again. On an idle machine, if the outage was shorter than a second, the recovery
    /// takes at most two, which include the start of the server.
    #[track_caller]
    pub fn expect_recovery_after(&self, outage: Range<Instant>) {
        self.expect_recovery();
        let (took, outage) = (outage.end.elapsed(), outage.end - outage.start);
        eprintln!("recovered in {took:?} after an outage of {outage:?}");
        let short = Duration::from_secs(1) * pace::pace();
        if outage < short {
            assert!(took < LATE * pace::pace(), "{took:?} after {outage:?}");
        } else {
            print_line(&format!(
                "not checked: recovery after an outage of {outage:?}, longer than {short:?}"
            ));
        }
    }

    /// Waits until the server's newest list has this many endpoints.
    #[track_caller]
    pub fn expect_endpoints(&self, count: u64) {
        let endpoints = || self.setup.source().remote.and_then(|remote| remote.endpoints);
        eventually("the list has the expected length", endpoints, |endpoints| *endpoints == Some(count));
    }

    /// The number of different lists that the server has sent so far.
    #[track_caller]
    pub fn lists(&self) -> u64 {
        self.setup.source().remote.map_or(0, |remote| remote.lists)
    }

    /// Waits until the server's answers have been empty for two seconds. Empty answers must not
    /// change the list in force within the first minute.
    #[track_caller]
    pub fn expect_empty(&self, fault: &str) {
        self.expect_fault(fault);
        let empty = || self.setup.source().remote.and_then(|remote| remote.empty_s);
        eventually("the list is empty for two seconds", empty, |seconds| {
            seconds.is_some_and(|seconds| seconds >= 2)
        });
    }

    /// Waits until the number of different answers exceeds `before`.
    #[track_caller]
    pub fn expect_more_lists(&self, before: u64) {
        eventually("another list is received", || self.lists(), |lists| *lists > before);
    }

    /// Starts other servers on the server's port, one after the other: one for each answer in
    /// `cases`, one that is no HTTP server, and one that is overloaded. Each must lead to its
    /// fault.
    #[track_caller]
    pub fn expect_faults_of_impostors<const N: usize>(&self, port: u16, cases: [(String, &str); N]) {
        let of_any_server = [
            ("SSH-2.0-OpenSSH_9.2\r\n\r\n".to_owned(), "invalid HTTP version parsed"),
            (
                "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n".to_owned(),
                "503 Service Unavailable",
            ),
        ];
        for (answer, fault) in cases.into_iter().chain(of_any_server) {
            let _impostor = Server::impostor(port, answer);
            self.refresh();
            self.expect_fault(fault);
        }
    }

    /// Makes the daemon query the server at once.
    #[track_caller]
    pub fn refresh(&self) {
        let (code, text) = self.run(&["source", "refresh", "users"]);
        assert_eq!(code, Some(0), "{text}");
    }

    /// Runs a command with the configuration of the scene.
    pub fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let mut command = self.setup.socklb(arguments);
        let output = finish(command.arg("--config").arg(self.setup.folder.join("socklb.toml")));
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    #[track_caller]
    pub fn start_dialling(&mut self) {
        self.probe.start_dialling(SERVICE);
        self.dialling = Some(Instant::now());
    }

    /// Stops dialling. Panics unless every connect since [`Self::start_dialling`] reached one of
    /// these backends, at a rate of at least [`LEAST_RATE`].
    #[track_caller]
    pub fn expect_no_failure(&mut self, names: &[&str]) {
        let counts: Counts = self.probe.stop_dialling();
        let seconds = self.dialling.take().expect("the probe dials").elapsed().as_secs_f64();
        assert_eq!(counts.keys().collect::<Vec<_>>(), names, "{counts:?}");
        let rate = f64::from(counts.values().sum::<u32>()) / seconds;
        eprintln!("{rate:.0} connects per second for {seconds:.1} s");
        assert!(rate >= LEAST_RATE, "{rate} connects per second");
    }
}
