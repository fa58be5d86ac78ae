//! Reclaims the flow records of sockets that are gone, if no program has processed the end of the
//! flow.
//!
//! If the kernel programs miss the end of a flow, its record remains, and the active count never
//! returns to zero. Causes are a lost link, callback flags that another program has cleared, and a
//! path of an MPTCP socket on a kernel that does not distinguish such paths. A record is
//! *suspected* if its socket is neither in a complete list of its network namespace nor open in any
//! process. The record is reclaimed if a second pass, an interval later, suspects it again.
//! (`suspect` contains the exact rules, including those for connections and for sockets without a
//! list.)
//!
//! Two passes are needed because a socket may be in transit between two processes (SCM_RIGHTS), may
//! be used only by io_uring, or may be missing in a list that changes while it is read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod suspect;

use suspect::{InUse, Observation, Suspect, Verdict};

use lb_diag::SocketLists;

use super::namespaces::{Namespaces, Sight, SocketSearch, SocketsByList};
use super::records::{Failed, Key, Record, Records};
use crate::client::links;
use crate::error::DatapathError;
use crate::host::{cgroup, pins::Pins};

/// The kernel operations of a pass over flow records. `lb-fake` implements them in memory.
pub trait FlowKernel: Send + Sync {
    /// Opens the flow records of a client.
    ///
    /// # Errors
    /// If a map is missing, or this process may not open it.
    fn records(&self, pins: &Pins) -> Result<Records, DatapathError>;

    /// A search for the sockets of a client. `turn`: the number of the pass.
    fn search(&self, target: &ReclaimTarget, turn: usize) -> Box<dyn SocketSearch>;

    /// The cookies in `wanted` that belong to sockets that a process has open.
    ///
    /// # Errors
    /// If the kernel does not list open files, or not those of all processes of the host.
    fn in_use(&self, wanted: &BTreeSet<u64>) -> Result<BTreeSet<u64>, DatapathError>;

    /// Blocks until every kernel program that is running now has ended.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn wait_for_readers(&self) -> Result<(), DatapathError>;
}

/// The results of one pass over a client's flow records, as numbers of flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimCounts {
    /// Flows that the pass has ended by reclaiming their records.
    pub removed: u64,
    /// Those of `removed` that were paths of MPTCP sockets, according to a list.
    pub removed_mptcp: u64,
    /// Suspected flows: the next pass reclaims their records if it suspects them again.
    pub suspected: u64,
    /// Flows that remain because a process has their sockets open, although the sockets are in no
    /// list and so not connected.
    pub kept_open: u64,
    /// Flows that remain because their network namespaces could not be examined, although no
    /// process is known to have their sockets open.
    pub kept_elsewhere: u64,
}

/// A client with records to examine.
#[derive(Clone, Debug)]
pub struct ReclaimTarget {
    pub pins: Pins,
    /// The client's cgroup, if it has one. The network namespaces of the processes in the cgroup
    /// are examined.
    pub cgroup: Option<PathBuf>,
}

impl ReclaimTarget {
    /// The network namespaces in which the client's sockets are searched.
    pub(crate) fn namespaces(&self, turn: usize) -> Namespaces {
        // For a leaving client, the cgroup is known only from its links.
        let linked = || links::linked_to(&self.pins).ok()?.into_iter().find_map(cgroup::path_of);
        Namespaces::of(self.cgroup.clone().or_else(linked), turn)
    }
}

/// The state that is stored between passes.
#[derive(Debug, Default)]
pub struct Suspects {
    clients: BTreeMap<String, Remembered>,
    /// The number of passes so far.
    turn: usize,
    /// Whether the query for open sockets has ever succeeded. After a success, a failure is treated
    /// as temporary.
    knows_holders: bool,
}

#[derive(Debug, Default)]
struct Remembered {
    suspects: BTreeMap<Key, Suspect>,
    /// Records that a list has shown as paths of an MPTCP socket.
    mptcp: BTreeSet<Key>,
}

/// The results of a pass for each client, and the error if the query for open sockets failed.
pub struct Pass {
    pub clients: Vec<(String, Result<ReclaimCounts, DatapathError>)>,
    pub holders: Result<(), DatapathError>,
}

/// Whether flow records can be compared with the kernel's lists of sockets on this host.
pub fn can_reclaim() -> bool {
    SocketLists::open()
        .and_then(|lists| lists.namespace().and(lists.each_tcp(|_| {})).and(lists.each_udp(|_| {})))
        .is_ok()
}

/// Examines the flow records of clients, and reclaims the records of flows that have ended. Reads
/// lists of sockets and of open files, and may start threads that enter network namespaces: do not
/// call this in the event loop. `knows_mptcp`: whether the kernel distinguishes paths of MPTCP
/// sockets, so that such paths have no records.
pub fn reclaim(
    kernel: &dyn FlowKernel,
    targets: &[ReclaimTarget],
    suspects: &mut Suspects,
    knows_mptcp: bool,
    now: Instant,
    interval: Duration,
) -> Pass {
    suspects.turn = suspects.turn.wrapping_add(1);
    let mut pass = Pass { clients: Vec::new(), holders: Ok(()) };
    let mut cases = Vec::new();
    for target in targets {
        let client = &target.pins.client;
        let remembered = suspects.clients.entry(client.clone()).or_default();
        match Case::examine(kernel, target, suspects.turn, remembered) {
            Ok(case) => cases.push(case),
            Err(failed) => pass.clients.push((client.clone(), Err(failed.of(client)))),
        }
    }
    // There is at most one query for all clients, because for each query the kernel reads all open
    // files of the host.
    let queried: BTreeSet<u64> = cases.iter().flat_map(Case::queried).collect();
    let mut holders = Holders::NotQueried;
    if !queried.is_empty() {
        holders = match kernel.in_use(&queried) {
            Ok(found) => {
                suspects.knows_holders = true;
                Holders::Known(found)
            }
            Err(error) => {
                let is_passing = suspects.knows_holders || error.is_shortage();
                pass.holders = Err(error);
                if is_passing { Holders::NotNow } else { Holders::NotReported }
            }
        };
    }
    for case in cases {
        let client = case.target.pins.client.clone();
        let remembered = suspects.clients.entry(client.clone()).or_default();
        let result = case.decide(&holders, remembered, knows_mptcp, now, interval);
        let result = result.map_err(|failed| failed.of(&client));
        pass.clients.push((client, result));
    }
    let is_here = |client: &String| targets.iter().any(|target| target.pins.client == *client);
    suspects.clients.retain(|client, remembered| is_here(client) && !remembered.is_empty());
    pass
}

impl Failed {
    fn of(self, client: &str) -> DatapathError {
        match self {
            Self::Io(source) => DatapathError::Reclaim { client: client.to_owned(), source },
            Self::Readers(error) => error,
        }
    }
}

impl Remembered {
    fn is_empty(&self) -> bool {
        self.suspects.is_empty() && self.mptcp.is_empty()
    }
}

/// The records of one client whose sockets no list contains, during one pass.
struct Case<'p> {
    kernel: &'p dyn FlowKernel,
    target: &'p ReclaimTarget,
    search: Box<dyn SocketSearch>,
    reclaim: ReclaimCounts,
    suspects: Vec<(Record, Sight)>,
}

impl<'p> Case<'p> {
    fn examine(
        kernel: &'p dyn FlowKernel,
        target: &'p ReclaimTarget,
        turn: usize,
        remembered: &mut Remembered,
    ) -> Result<Self, Failed> {
        let records = kernel.records(&target.pins)?;
        let reclaim = ReclaimCounts { removed: records.finish_claimed(kernel)?, ..ReclaimCounts::default() };
        let search = kernel.search(target, turn);
        let (mut suspects, mut missed, mut keys) = (Vec::new(), Vec::new(), BTreeSet::new());
        let all = records.read()?;
        let sockets = search.look(&wanted(&all));
        for record in all {
            keys.insert(record.key());
            match sockets.of(&record.list(), record.cookie) {
                Sight::Seen { is_mptcp } => {
                    remembered.suspects.remove(&record.key());
                    if is_mptcp {
                        remembered.mptcp.insert(record.key());
                    }
                }
                Sight::Missed => missed.push(record),
                sight @ Sight::Unknown { .. } => suspects.push((record, sight)),
            }
        }
        // The kernel returns a list in parts, and can miss a socket that moves within the list
        // between two parts. So missing sockets are searched again. By this time, most of their
        // flows have ended.
        let mut still = Vec::new();
        for record in missed {
            still.extend(records.again(&record)?);
        }
        let sockets = search.look(&wanted(&still));
        for record in still {
            match sockets.of(&record.list(), record.cookie) {
                Sight::Seen { .. } => drop(remembered.suspects.remove(&record.key())),
                sight @ (Sight::Missed | Sight::Unknown { .. }) => suspects.push((record, sight)),
            }
        }
        remembered.suspects.retain(|key, _| keys.contains(key));
        remembered.mptcp.retain(|key| keys.contains(key));
        Ok(Self { kernel, target, search, reclaim, suspects })
    }

    /// The cookies of the sockets for which the decision depends on whether a process has them
    /// open.
    fn queried(&self) -> impl Iterator<Item = u64> {
        let matters =
            |(record, sight): &&(Record, Sight)| !(*sight == Sight::Missed && record.is_connection());
        self.suspects.iter().filter(matters).map(|(record, _)| record.cookie)
    }

    fn decide(
        mut self,
        holders: &Holders,
        remembered: &mut Remembered,
        knows_mptcp: bool,
        now: Instant,
        interval: Duration,
    ) -> Result<ReclaimCounts, Failed> {
        let (mut gone, mut suspects) = (Vec::new(), BTreeMap::new());
        for (record, sight) in std::mem::take(&mut self.suspects) {
            let key = record.key();
            let before =
                remembered.suspects.remove(&key).filter(|suspect| suspect.version == record.version());
            let mut suspect = before.unwrap_or_else(|| Suspect::of(&record));
            let is_missed = sight == Sight::Missed;
            let observation = Observation {
                is_missed,
                is_connection: record.is_connection(),
                in_use: holders.of(record.cookie),
                may_be_mptcp: !knows_mptcp
                    && !record.list().datagrams
                    && sight == Sight::Unknown { is_nowhere: false },
            };
            let verdict = suspect.judge(observation, now, interval);
            let count = match verdict {
                Verdict::Gone => {
                    gone.push((record, is_missed));
                    continue;
                }
                Verdict::Suspected => &mut self.reclaim.suspected,
                Verdict::Open => &mut self.reclaim.kept_open,
                Verdict::Elsewhere => &mut self.reclaim.kept_elsewhere,
                Verdict::InUse => continue,
            };
            *count += record.flows();
            if suspect.missed_since.is_some() || suspect.unused_since.is_some() {
                suspects.insert(key, suspect);
            }
        }
        remembered.suspects = suspects;
        if !gone.is_empty() {
            let reclaimed = self.reclaim_gone(gone)?;
            self.reclaim.removed += reclaimed.values().sum::<u64>();
            let mptcp = reclaimed.iter().filter(|(key, _)| remembered.mptcp.contains(key));
            self.reclaim.removed_mptcp += mptcp.map(|(_, flows)| flows).sum::<u64>();
        }
        Ok(self.reclaim)
    }

    fn reclaim_gone(&self, gone: Vec<(Record, bool)>) -> Result<BTreeMap<Key, u64>, Failed> {
        let records = self.kernel.records(&self.target.pins)?;
        // If a list did not contain a record's socket before, the list must still be readable and
        // still not contain the socket. For records without a readable list, only the use of their
        // sockets was decisive, so no list is required now.
        let missed: BTreeSet<Key> =
            gone.iter().filter(|(_, is_missed)| *is_missed).map(|(record, _)| record.key()).collect();
        records.reclaim(self.kernel, gone.into_iter().map(|(record, _)| record).collect(), |claimed| {
            let sockets = self.search.look(&wanted(claimed.iter().copied()));
            let lives = |record: &&Record| match sockets.of(&record.list(), record.cookie) {
                Sight::Seen { .. } => true,
                Sight::Missed => false,
                Sight::Unknown { .. } => missed.contains(&record.key()),
            };
            claimed.iter().map(lives).collect()
        })
    }
}

fn wanted<'r>(records: impl IntoIterator<Item = &'r Record>) -> SocketsByList {
    let mut wanted = SocketsByList::new();
    for record in records {
        wanted.entry(record.list()).or_default().insert(record.cookie);
    }
    wanted
}

/// The result of the query for sockets that processes of the host have open.
enum Holders {
    /// No query was necessary.
    NotQueried,
    /// The cookies of the queried sockets that some process has open.
    Known(BTreeSet<u64>),
    /// The kernel does not report open sockets, or not to this process.
    NotReported,
    /// The query failed, but may succeed later.
    NotNow,
}

impl Holders {
    fn of(&self, cookie: u64) -> InUse {
        match self {
            Self::Known(in_use) if in_use.contains(&cookie) => InUse::Yes,
            Self::Known(_) => InUse::No,
            Self::NotReported => InUse::NotReported,
            Self::NotQueried | Self::NotNow => InUse::NotNow,
        }
    }
}
