//! The scene of every fault: a supervised daemon, a client that connects without pause, and
//! everything that a daemon does on request. After each fault, the state must equal the state
//! without the fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use anyhow::{Context, Result, bail, ensure};
use lb_view::status::{ServiceStatus, StatusDocument};
use rustix::process::Signal;
use stage::fixture::{SERVICE, endpoints};
use stage::sys::{link_ids, remove_link};
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, patience, replace, within};

use crate::cases::Case;
use crate::filter;
use crate::supervisor::{Desk, Phase};

/// The port for metrics, in the stage's own network.
const METRICS: &str = "127.0.0.1:9500";
/// The two alternating endpoint lists. They differ in the third backend and in weights.
const LISTS: [[(&str, &str); 3]; 2] = [
    [("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")],
    [("127.0.0.1:8001", "weight = 2"), ("127.0.0.1:8002", ""), ("127.0.0.1:8004", "")],
];

pub struct Scene {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses.
    daemon: Option<Daemon>,
    load: Probe,
    _backends: Vec<Backend>,
    setup: Setup,
    cgroup: Cgroup,
    other: Cgroup,
    _stage: Stage,
    desk: Desk,
    /// Number of connects that the client has made so far.
    made: u64,
    /// The kernel's id of each link of the first client, keyed by the link's name. No fault may
    /// change the ids.
    links: BTreeMap<String, u32>,
    round: usize,
    starts: usize,
    /// Length of the log that earlier daemons wrote, in bytes.
    logged: usize,
}

impl Scene {
    /// Sets the stage up; no daemon runs yet.
    pub fn new(desk: &Desk) -> Self {
        let stage = Stage::new();
        let (cgroup, other) = (Cgroup::new(), Cgroup::new());
        let setup = Setup::new(&stage, "a");
        let backend = |n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"));
        setup.write("users.toml", &endpoints(&LISTS[0]));
        Self {
            daemon: None,
            load: Probe::start(&cgroup),
            _backends: (1..=4).map(backend).collect(),
            setup,
            cgroup,
            other,
            _stage: stage,
            desk: desk.clone(),
            made: 0,
            links: BTreeMap::new(),
            round: 0,
            starts: 0,
            logged: 0,
        }
    }

    /// Starts the first daemon, without a fault, and the client that connects without pause.
    ///
    /// # Errors
    /// If the daemon does not start, or reports a fault.
    pub fn begin(&mut self) -> Result<()> {
        if let Some(last) = self.start(None)? {
            bail!("the first start failed: {last}");
        }
        self.await_no_fault()?;
        self.links = link_ids(&self.setup.pins_of("web"));
        ensure!(self.links.len() == 10, "expected ten links: {:?}", self.links);
        self.load.start_dialling(SERVICE);
        Ok(())
    }

    /// Starts a daemon when only one of the two clients has programs in the kernel. At every second
    /// start, the endpoint list is unreadable. If the daemon refuses to start, returns its last
    /// message.
    ///
    /// # Errors
    /// If the daemon neither answers nor ends with a message.
    pub fn start(&mut self, fault: Option<Case>) -> Result<Option<String>> {
        self.setup.run(&["detach", "batch"]);
        self.configure(true);
        self.starts += 1;
        if self.starts.is_multiple_of(2) {
            self.list("[[endpoint]]\naddress = \n");
        }
        self.desk.enter(Phase::Start);
        if let Some(fault) = fault {
            self.desk.arm(fault);
        }
        let mut ours = None;
        let mut daemon = Daemon::spawn_with(&self.setup, |command| ours = Some(filter::put_under(command)));
        self.desk.supervise(daemon.pid(), filter::listener(&ours.expect("the filter is prepared")));
        self.logged = self.logged.max(daemon.log().len());
        let socket = self.setup.folder.join("run/socklb.sock");
        let look = || (daemon.ending(), UnixStream::connect(&socket).is_ok());
        let seen = within(3 * patience(), look, |(ending, answers)| ending.is_some() || *answers);
        match seen {
            Ok((Some(status), _)) => self.ended(&daemon, status, true).map(Some),
            Ok((None, _)) => {
                self.desk.enter(Phase::Run);
                self.list(&endpoints(&LISTS[self.round % LISTS.len()]));
                self.daemon = Some(daemon);
                Ok(None)
            }
            Err(_) => bail!("the daemon neither answers nor ends"),
        }
    }

    /// Returns the last message of a daemon that has ended. It is an error if the daemon had no
    /// permitted reason to end. `may_refuse`: whether the daemon was starting or stopping, so that
    /// it may exit with a message.
    fn ended(&mut self, daemon: &Daemon, status: ExitStatus, may_refuse: bool) -> Result<String> {
        let log = daemon.log().split_off(self.logged);
        self.logged += log.len();
        let is_refusal = may_refuse && matches!(status.code(), Some(1 | 4));
        // Rust aborts a program if the kernel refuses memory for the heap, or for the stack on
        // which overflows are handled. The daemon ends itself if a thread panics. The runtime ends
        // the daemon if the kernel refuses a thread for another reason than lack of memory, which
        // happens only under fault injection. The daemon that is started next continues the work
        // with the pinned maps, and connects are not affected.
        let is_out_of_memory = status.signal() == Some(Signal::ABORT.as_raw())
            && [
                "memory allocation of ",
                "failed to allocate an alternative stack",
                "OS can't spawn worker thread",
            ]
            .iter()
            .any(|words| log.contains(words));
        ensure!(is_refusal || is_out_of_memory, "the daemon ended, {status}; its log:\n{log}");
        let last = log
            .lines()
            .last()
            .filter(|line| !line.is_empty())
            .context("the daemon ended without a message")?;
        Ok(last.to_owned())
    }

    /// Stops the daemon, and waits.
    ///
    /// # Errors
    /// If the daemon does not end, or ends with another exit code than 0.
    pub fn stop(&mut self, fault: Option<Case>) -> Result<()> {
        let mut daemon = self.daemon.take().context("a daemon runs")?;
        self.desk.enter(Phase::Stop);
        if let Some(fault) = fault {
            self.desk.arm(fault);
        }
        daemon.signal(Signal::TERM);
        let ending = within(patience(), || daemon.ending(), Option::is_some);
        let status = ending.ok().flatten().context("the daemon does not stop")?;
        if status.code() != Some(0) {
            self.ended(&daemon, status, true)?;
        }
        self.logged = daemon.log().len();
        Ok(())
    }

    /// If the daemon has ended for a permitted reason, returns its last message. `may_refuse`:
    /// whether it may exit because of a fault of its start.
    ///
    /// # Errors
    /// If the daemon has ended for another reason.
    pub fn reap(&mut self, may_refuse: bool) -> Result<Option<String>> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(None) };
        match daemon.ending() {
            Some(status) => self.ended(&daemon, status, may_refuse).map(Some),
            None => {
                self.daemon = Some(daemon);
                Ok(None)
            }
        }
    }

    /// Makes every request that a daemon receives while it runs. Returns after the daemon has
    /// completed all requests.
    ///
    /// # Errors
    /// If the daemon does not complete a request in time.
    pub fn round(&mut self) -> Result<()> {
        self.round += 1;
        let list = LISTS[self.round % LISTS.len()];
        self.list(&endpoints(&list));
        let expected: BTreeSet<String> = list.iter().map(|(address, _)| (*address).to_owned()).collect();
        self.until("the endpoint list is in force", backends, &expected)?;
        let page = || page().unwrap_or_default();
        within(patience(), page, |page| page.contains("# EOF"))
            .map_err(|page| anyhow::anyhow!("no metrics: {page:?}"))?;
        self.configure(true);
        self.reload();
        self.until("a client is added", |status| attached(status, "batch"), &Some(self.other.id()))?;
        let link = self.setup.pins_of("batch").join(format!("links/sock_release@{}", self.other.id()));
        remove_link(&link);
        within(3 * patience(), || link.exists(), |exists| *exists)
            .map_err(|_| anyhow::anyhow!("the daemon does not recreate a link that was removed by hand"))?;
        self.other.remove();
        self.other.create();
        let mut visitor = Probe::start(&self.other);
        let code = visitor.socklb(&self.setup, &["wait", "batch"]);
        ensure!(code == 0, "`socklb wait` in a recreated cgroup failed with {code}");
        let reached = visitor.try_dial(SERVICE);
        ensure!(
            reached.as_ref().is_ok_and(|dialled| dialled.name.starts_with('b')),
            "a process in the recreated cgroup reached {reached:?}"
        );
        drop(visitor);
        self.until("the new cgroup is attached", |status| attached(status, "batch"), &Some(self.other.id()))?;
        self.configure(false);
        self.reload();
        self.until("a client is removed", clients, &vec!["web".to_owned()])
    }

    /// Waits until the daemon reports no fault, and checks that no link, connect or count was lost.
    ///
    /// # Errors
    /// If the wait takes too long, or if something was lost.
    pub fn await_whole(&mut self) -> Result<()> {
        self.await_no_fault()?;
        let links = link_ids(&self.setup.pins_of("web"));
        ensure!(links == self.links, "the links changed from {:?} to {links:?}", self.links);
        let counts = self.load.stop_dialling();
        self.made += counts.values().map(|count| u64::from(*count)).sum::<u64>();
        let failed: Vec<_> = counts.iter().filter(|(name, _)| !name.starts_with('b')).collect();
        ensure!(failed.is_empty(), "connects failed or went elsewhere: {failed:?}");
        let made = self.made;
        let counted = |status: &StatusDocument| (chosen(status), active(status));
        let result = self.until("every connect is counted once, and no flow is open", counted, &(made, 0));
        self.load.start_dialling(SERVICE);
        result
    }

    fn await_no_fault(&mut self) -> Result<()> {
        let status = |setup: &Setup| {
            let output = setup.run(&["status"]);
            (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        self.wait(status, |(code, _)| *code == Some(0))
            .map_err(|((code, text), why)| anyhow::anyhow!("{why}; status is {code:?}:\n{text}"))
    }

    /// Waits until a condition is true, the daemon ends, or the time limit passes. Returns the last
    /// result of `look` and the reason for the end of the wait.
    fn wait<T>(
        &mut self,
        look: impl Fn(&Setup) -> T,
        fact: impl Fn(&T) -> bool,
    ) -> Result<(), (T, &'static str)> {
        let Self { setup, daemon, .. } = self;
        let both = || {
            // The order matters: a daemon that ends between the two steps may have met the
            // condition before its end.
            let has_ended = daemon.as_mut().is_some_and(|daemon| daemon.ending().is_some());
            (look(setup), has_ended)
        };
        match within(3 * patience(), both, |(seen, has_ended)| *has_ended || fact(seen)) {
            Ok((seen, _)) if fact(&seen) => Ok(()),
            Ok((seen, _)) => Err((seen, "the daemon has ended")),
            Err((seen, _)) => Err((seen, "the time limit has passed")),
        }
    }

    /// Writes the configuration, with or without the second client.
    fn configure(&self, with_other: bool) {
        let client = |job: &str, cgroup: &Cgroup| {
            format!("[[client]]\njob = \"{job}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
        };
        // Passes over flow records are as frequent as possible, so that a failed pass is soon
        // followed by another.
        let mut text = format!(
            "[metrics]\nlisten = \"{METRICS}\"\n[accounting]\nreclaim_interval = \"1s\"\n{}",
            client("web", &self.cgroup)
        );
        if with_other {
            text += &client("batch", &self.other);
        }
        text += &format!(
            "[[service]]\nname = \"users\"\naddress = \"{SERVICE}\"\nbackends = {{ file = \"users.toml\" }}\n\
             [[service]]\nname = \"fixed\"\naddress = \"10.96.0.11:80\"\nbackends = {{ static = [\"127.0.0.1:8001\"] }}\n"
        );
        replace(&self.setup.folder.join("socklb.toml"), &text);
    }

    /// Replaces the list of the service that the load dials.
    fn list(&self, text: &str) {
        replace(&self.setup.folder.join("users.toml"), text);
    }

    fn reload(&self) {
        self.daemon.as_ref().expect("a daemon runs").signal(Signal::HUP);
    }

    /// Waits until `look` finds the expected value in the status.
    fn until<T: PartialEq + Debug>(
        &mut self,
        what: &str,
        look: impl Fn(&StatusDocument) -> T,
        expected: &T,
    ) -> Result<()> {
        // A daemon that ends while it answers has sent no status.
        let status = |setup: &Setup| serde_json::from_slice(&setup.run(&["status", "--json"]).stdout).ok();
        let look = |setup: &Setup| status(setup).map(|status| look(&status));
        self.wait(look, |seen| seen.as_ref() == Some(expected))
            .map_err(|(seen, why)| anyhow::anyhow!("{what}: {why}; expected {expected:?}, saw {seen:?}"))
    }

    /// The end of the daemon's log.
    pub fn log(&self) -> String {
        let log = std::fs::read_to_string(self.setup.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

/// The service that the load dials.
fn users(status: &StatusDocument) -> Option<&ServiceStatus> {
    status.client("web")?.service("users")
}

/// Backends of the service's table.
fn backends(status: &StatusDocument) -> BTreeSet<String> {
    let all = users(status).into_iter().flat_map(|service| &service.backends);
    all.filter(|backend| backend.share_wanted > 0.0).map(|backend| backend.address.to_string()).collect()
}

/// Open flows of the service, over all backends.
fn active(status: &StatusDocument) -> u64 {
    users(status).into_iter().flat_map(|service| &service.backends).map(|backend| backend.active).sum()
}

/// Connects of the service, including those of backends that have left.
fn chosen(status: &StatusDocument) -> u64 {
    users(status).into_iter().flat_map(|service| service.outcomes.values()).sum()
}

/// The id of the cgroup that a client is attached to.
fn attached(status: &StatusDocument, client: &str) -> Option<u64> {
    status.client(client)?.cgroup_id
}

/// Clients, including leaving ones.
fn clients(status: &StatusDocument) -> Vec<String> {
    let there = status.clients.iter().map(|client| &client.name);
    there.chain(status.leaving.iter().map(|leaving| &leaving.client)).cloned().collect()
}

/// The metrics page, from the port [`METRICS`].
fn page() -> std::io::Result<String> {
    let mut stream = TcpStream::connect(METRICS)?;
    stream.set_read_timeout(Some(patience()))?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\nConnection: close\r\n\r\n"
    )?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}
