//! Flow records that are to be given back: those whose socket is gone and whose end no program saw.
//!
//! The kernel programs end every flow that they see end. What they do not see (a link that was lost for a while, a program
//! of others that clears callback flags, a path of an MPTCP socket on kernels that do not tell) leaves a record, and an
//! active count that never returns to zero. A record is in doubt while its socket is neither in a complete list of its
//! network namespace nor held by any process; it is taken out if a second pass, an interval later, finds the same.
//!
//! Two passes, because a socket may be on its way between two processes (SCM_RIGHTS), or held by io_uring alone, and what
//! moves while a list is read can be missed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Sub;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::cgroup;
use super::error::DatapathError;
use super::holders;
use super::links;
use super::namespaces::{Namespaces, Sight, SocketsByList};
use super::pins::Pins;
use super::records::{Failed, Key, Record, Records, Version};
use super::sys::diag::SocketLists;

/// Intervals for which no process may have held a socket whose namespace cannot be looked into: connections that nobody
/// holds are closed by the kernel, which gives up within two minutes.
const WITHOUT_LIST: u32 = 10;

/// What a pass over a client's flow records found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimCounts {
    /// Flows whose records were taken out: they are over.
    pub removed: u64,
    /// Of these: paths of MPTCP sockets, as far as a list has shown them.
    pub removed_mptcp: u64,
    /// In doubt: to be taken out by the next pass if that finds the same.
    pub suspected: u64,
    /// Kept: in no list, but a process holds their sockets, which are not connected.
    pub kept_open: u64,
    /// Kept: in network namespaces that could not be looked into, and not known to be held by a process.
    pub kept_elsewhere: u64,
}

/// A client whose records are to be looked at.
#[derive(Clone, Debug)]
pub struct ReclaimTarget {
    /// Its pins.
    pub pins: Pins,
    /// Its cgroup, if it has one: the processes there tell which network namespaces there are.
    pub cgroup: Option<PathBuf>,
}

/// What passes have to remember.
#[derive(Debug, Default)]
pub struct Suspects {
    clients: BTreeMap<String, Remembered>,
    /// Passes so far.
    turn: usize,
    /// Whether it could once be told which sockets processes hold: if it cannot now, it can again.
    knows_holders: bool,
}

#[derive(Debug, Default)]
struct Remembered {
    suspects: BTreeMap<Key, Suspect>,
    /// Records that a list has shown as paths of an MPTCP socket.
    mptcp: BTreeSet<Key>,
}

/// What a pass found, by client; and why it is not known which sockets processes hold, if that was asked and is not.
pub struct Pass {
    pub clients: Vec<(String, Result<ReclaimCounts, DatapathError>)>,
    pub holders: Result<(), DatapathError>,
}

/// Whether flow records can be compared with the kernel's lists of sockets here.
pub fn can_reclaim() -> bool {
    SocketLists::open()
        .and_then(|lists| lists.namespace().and(lists.each_tcp(|_| {})).and(lists.each_udp(|_| {})))
        .is_ok()
}

/// Looks at the flow records of clients. Reads lists of sockets and of open files, and may enter network namespaces on
/// threads of its own, so it is not for the event loop. `knows_mptcp` says whether paths of MPTCP sockets have no records,
/// because the kernel tells them apart.
pub fn reclaim(
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
        match Case::examine(target, suspects.turn, suspects.clients.entry(client.clone()).or_default()) {
            Ok(case) => cases.push(case),
            Err(failed) => pass.clients.push((client.clone(), Err(failed.of(client)))),
        }
    }
    // Only now, and only if there is anything to ask: it goes through all open files of the host.
    let asked: BTreeSet<u64> = cases.iter().flat_map(Case::asked).collect();
    let mut holders = Holders::NotAsked;
    if !asked.is_empty() {
        holders = match holders::held(&asked) {
            Ok(found) => {
                suspects.knows_holders = true;
                Holders::Known(found)
            }
            Err(error) => {
                let is_passing = suspects.knows_holders || error.is_shortage();
                pass.holders = Err(error);
                if is_passing { Holders::NotNow } else { Holders::NeverTold }
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
    // Clients that are gone leave nothing behind.
    let is_here = |client: &String| targets.iter().any(|target| target.pins.client == *client);
    suspects.clients.retain(|client, remembered| is_here(client) && !remembered.is_empty());
    pass
}

impl Failed {
    fn of(self, client: &str) -> DatapathError {
        match self {
            Self::Io(source) => DatapathError::ReclaimCounts { client: client.to_owned(), source },
            Self::Readers(error) => error,
        }
    }
}

impl Remembered {
    fn is_empty(&self) -> bool {
        self.suspects.is_empty() && self.mptcp.is_empty()
    }
}

/// One client's records that no list has shown.
struct Case<'p> {
    target: &'p ReclaimTarget,
    namespaces: Namespaces,
    reclaim: ReclaimCounts,
    suspects: Vec<(Record, Sight)>,
}

impl<'p> Case<'p> {
    fn examine(target: &'p ReclaimTarget, turn: usize, remembered: &mut Remembered) -> Result<Self, Failed> {
        let records = Records::open(&target.pins)?;
        let reclaim = ReclaimCounts { removed: records.finish_what_was_begun()?, ..ReclaimCounts::default() };
        // Of a client that leaves only its links tell.
        let linked = || links::linked_to(&target.pins).ok()?.into_iter().find_map(cgroup::path_of);
        let namespaces = Namespaces::of(target.cgroup.clone().or_else(linked), turn);
        let (mut suspects, mut unlisted, mut keys) = (Vec::new(), Vec::new(), BTreeSet::new());
        let all = records.read()?;
        let shown = namespaces.look(&wanted(&all));
        for record in all {
            keys.insert(record.key());
            match shown.of(&record.list(), record.cookie) {
                Sight::Listed { is_mptcp } => {
                    remembered.suspects.remove(&record.key());
                    if is_mptcp {
                        remembered.mptcp.insert(record.key());
                    }
                }
                Sight::Missed => unlisted.push(record),
                sight @ Sight::Unknown { .. } => suspects.push((record, sight)),
            }
        }
        // A list is handed out in parts, and what moves between two parts can be missed. Most of these flows have ended
        // meanwhile.
        let mut still = Vec::new();
        for record in unlisted {
            still.extend(records.again(&record)?);
        }
        let shown = namespaces.look(&wanted(&still));
        for record in still {
            match shown.of(&record.list(), record.cookie) {
                Sight::Listed { .. } => drop(remembered.suspects.remove(&record.key())),
                sight @ (Sight::Missed | Sight::Unknown { .. }) => suspects.push((record, sight)),
            }
        }
        remembered.suspects.retain(|key, _| keys.contains(key));
        remembered.mptcp.retain(|key| keys.contains(key));
        Ok(Self { target, namespaces, reclaim, suspects })
    }

    /// Sockets of which it matters whether a process holds them.
    fn asked(&self) -> impl Iterator<Item = u64> {
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
            let before = remembered.suspects.remove(&key).filter(|doubt| doubt.version == record.version());
            let mut doubt = before.unwrap_or_else(|| Suspect::of(&record));
            let is_missed = sight == Sight::Missed;
            let seen = Seen {
                is_missed,
                is_connection: record.is_connection(),
                held: holders.of(record.cookie),
                may_be_mptcp: !knows_mptcp
                    && !record.list().datagrams
                    && sight == Sight::Unknown { is_nowhere: false },
            };
            let verdict = doubt.judge(seen, now, interval);
            let count = match verdict {
                Verdict::Gone => {
                    gone.push((record, is_missed));
                    continue;
                }
                Verdict::InDoubt => &mut self.reclaim.suspected,
                Verdict::Open => &mut self.reclaim.kept_open,
                Verdict::Elsewhere => &mut self.reclaim.kept_elsewhere,
                Verdict::InUse => continue,
            };
            *count += record.flows();
            if doubt.missed_since.is_some() || doubt.unheld_since.is_some() {
                suspects.insert(key, doubt);
            }
        }
        remembered.suspects = suspects;
        if !gone.is_empty() {
            let taken = self.take_out(gone)?;
            self.reclaim.removed += taken.values().sum::<u64>();
            let mptcp = taken.iter().filter(|(key, _)| remembered.mptcp.contains(key));
            self.reclaim.removed_mptcp += mptcp.map(|(_, flows)| flows).sum::<u64>();
        }
        Ok(self.reclaim)
    }

    fn take_out(&self, gone: Vec<(Record, bool)>) -> Result<BTreeMap<Key, u64>, Failed> {
        let records = Records::open(&self.target.pins)?;
        // Those that no list could be had for are known by their holders alone.
        let missed: BTreeSet<Key> =
            gone.iter().filter(|(_, is_missed)| *is_missed).map(|(record, _)| record.key()).collect();
        records.take_out(gone.into_iter().map(|(record, _)| record).collect(), |held| {
            let shown = self.namespaces.look(&wanted(held.iter().copied()));
            let lives = |record: &&Record| match shown.of(&record.list(), record.cookie) {
                Sight::Listed { .. } => true,
                Sight::Missed => false,
                Sight::Unknown { .. } => missed.contains(&record.key()),
            };
            held.iter().map(lives).collect()
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

/// What a pass has seen of a record whose socket no list has shown.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Whether a complete list of its namespace misses it; otherwise there was none.
    is_missed: bool,
    /// Whether a program has seen its SYN leave: its flow ends with the connection, whoever holds the socket.
    is_connection: bool,
    held: InUse,
    /// Whether it may be a path of an MPTCP socket: a process holds that, and not its paths.
    may_be_mptcp: bool,
}

/// What is known of all processes of the host.
enum Holders {
    /// Nothing was to be asked.
    NotAsked,
    /// Those of the sockets that were asked for which some process holds.
    Known(BTreeSet<u64>),
    /// The kernel does not tell, or not us.
    NeverTold,
    /// It could not be told this time.
    NotNow,
}

/// Whether a process holds a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InUse {
    Yes,
    No,
    NeverTold,
    NotNow,
}

impl Holders {
    fn of(&self, cookie: u64) -> InUse {
        match self {
            Self::Known(held) if held.contains(&cookie) => InUse::Yes,
            Self::Known(_) => InUse::No,
            Self::NeverTold => InUse::NeverTold,
            Self::NotAsked | Self::NotNow => InUse::NotNow,
        }
    }
}

/// Since when a record is in doubt, by any clock.
#[derive(Debug)]
struct Suspect<T = Instant> {
    /// Of this flow, not of a later one of the same socket.
    version: Version,
    /// Since when lists miss it and no process is known to hold it.
    missed_since: Option<T>,
    /// Since when no process holds it.
    unheld_since: Option<T>,
}

/// What becomes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Its flow is over.
    Gone,
    /// Its flow is over if the next pass sees the same.
    InDoubt,
    /// Its socket is open and not connected.
    Open,
    /// A process holds its socket, which may be connected.
    InUse,
    /// Nothing is known of its socket, or nothing yet.
    Elsewhere,
}

impl Suspect {
    fn of(record: &Record) -> Self {
        Self { version: record.version(), missed_since: None, unheld_since: None }
    }
}

impl<T: Copy + Sub<Output = Duration>> Suspect<T> {
    fn judge(&mut self, seen: Seen, now: T, interval: Duration) -> Verdict {
        self.unheld_since = match seen.held {
            InUse::No => self.unheld_since.or(Some(now)),
            InUse::NotNow => self.unheld_since,
            InUse::Yes | InUse::NeverTold => None,
        };
        if seen.is_missed {
            match seen.held {
                InUse::Yes if !seen.is_connection => {
                    self.missed_since = None;
                    return Verdict::Open;
                }
                InUse::NotNow if !seen.is_connection => return Verdict::InDoubt,
                // Where it is never told who holds sockets, a list alone decides: such a socket has no connection.
                InUse::Yes | InUse::No | InUse::NeverTold | InUse::NotNow => {}
            }
            let since = *self.missed_since.get_or_insert(now);
            return if now - since >= interval { Verdict::Gone } else { Verdict::InDoubt };
        }
        match (seen.held, self.unheld_since) {
            (InUse::Yes, _) => Verdict::InUse,
            (InUse::No, Some(since)) if !seen.may_be_mptcp && now - since >= WITHOUT_LIST * interval => {
                Verdict::Gone
            }
            _ => Verdict::Elsewhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    /// What becomes of a record that each pass sees so, a pass a minute.
    fn verdicts<const PASSES: usize>(seen: [(bool, bool, InUse); PASSES]) -> [Verdict; PASSES] {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let mut now = Duration::from_secs(1000);
        seen.map(|(is_missed, is_connection, held)| {
            now += INTERVAL;
            doubt.judge(Seen { is_missed, is_connection, held, may_be_mptcp: false }, now, INTERVAL)
        })
    }

    #[test]
    fn what_two_passes_find_neither_listed_nor_held_is_gone() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Gone, InDoubt, Open};
        assert_eq!(verdicts([(true, false, No), (true, false, No)]), [InDoubt, Gone]);
        assert_eq!(
            verdicts([(true, false, No), (true, false, Yes), (true, false, No)]),
            [InDoubt, Open, InDoubt]
        );
        assert_eq!(verdicts([(true, false, Yes), (true, false, Yes)]), [Open, Open]);
        // An error says nothing, and where nothing is ever told a list is enough.
        assert_eq!(
            verdicts([(true, false, No), (true, false, NotNow), (true, false, No)]),
            [InDoubt, InDoubt, Gone]
        );
        assert_eq!(verdicts([(true, false, NeverTold), (true, false, NeverTold)]), [InDoubt, Gone]);
        // A connection that no list shows is over, whoever holds its socket.
        for held in [Yes, No, NeverTold, NotNow] {
            assert_eq!(verdicts([(true, true, held), (true, true, held)]), [InDoubt, Gone], "{held:?}");
        }
    }

    #[test]
    fn where_no_list_can_be_had_nobody_may_have_held_it_for_ten_passes() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Elsewhere, Gone, InUse as IsHeld};
        let mut expected = [Elsewhere; 11];
        expected[10] = Gone;
        assert_eq!(verdicts([(false, true, No); 11]), expected);
        let mut seen = [(false, true, No); 11];
        seen[5].2 = NotNow;
        assert_eq!(verdicts(seen), expected);
        seen[5].2 = Yes;
        expected[5] = IsHeld;
        expected[10] = Elsewhere;
        assert_eq!(verdicts(seen), expected);
        assert_eq!(verdicts([(false, true, NeverTold); 11]), [Elsewhere; 11]);
    }

    /// A process holds the MPTCP socket and none of its paths: that nobody holds a path says nothing.
    #[test]
    fn what_may_be_a_path_of_mptcp_is_given_back_by_lists_only() {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let mut pass = |minute: u32, is_missed| {
            let seen = Seen { is_missed, is_connection: false, held: InUse::No, may_be_mptcp: !is_missed };
            doubt.judge(seen, minute * INTERVAL, INTERVAL)
        };
        assert!((1..100).all(|minute| pass(minute, false) == Verdict::Elsewhere));
        assert_eq!([pass(100, true), pass(101, true)], [Verdict::InDoubt, Verdict::Gone]);
    }

    #[test]
    fn passes_that_are_closer_than_the_interval_count_as_one() {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let seen = Seen { is_missed: true, is_connection: false, held: InUse::No, may_be_mptcp: false };
        let verdicts = [0, 30, 59, 60].map(|second| doubt.judge(seen, Duration::from_secs(second), INTERVAL));
        assert_eq!(verdicts, [Verdict::InDoubt, Verdict::InDoubt, Verdict::InDoubt, Verdict::Gone]);
    }
}
