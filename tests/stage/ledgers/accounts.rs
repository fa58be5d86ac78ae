//! Compares the counts of socklb with the flows that a worker has recorded.

use lb_view::backend::BackendStatus;
use lb_view::status::{ClientStatus, ServiceStatus};

use crate::Setup;
use crate::ending::{ENDINGS, Ending};
use crate::ledger::{Flows, Ledger};

/// Lists the differences between the status of a set-up's only client and a ledger. Every flow must
/// have a record in the flow tables.
pub fn differences(setup: &Setup, ledger: &Ledger) -> Vec<String> {
    compare(setup, ledger, Sums::differences)
}

/// As [`differences`], for flow tables that may be full: a flow without a record counts as
/// untracked, every other flow by its ending.
pub fn differences_of_full_tables(setup: &Setup, ledger: &Ledger) -> Vec<String> {
    compare(setup, ledger, Sums::differences_of_full_tables)
}

fn compare(
    setup: &Setup,
    ledger: &Ledger,
    differences: impl Fn(&Sums, &Flows) -> Vec<String>,
) -> Vec<String> {
    let client = setup.client();
    let of_service = |(name, flows): (&String, &Flows)| {
        let service = client.service(name).unwrap_or_else(|| panic!("no service {name}"));
        let described =
            imbalances_of(service).into_iter().chain(differences(&Sums::of_service(service), flows));
        described.map(|difference| format!("{name}: {difference}")).collect::<Vec<_>>()
    };
    ledger.services.iter().flat_map(of_service).collect()
}

fn imbalances_of(service: &ServiceStatus) -> Vec<String> {
    let of_backend =
        |backend: &BackendStatus| Some(format!("{}: {}", backend.address, Sums::of(backend).imbalance()?));
    service.backends.iter().filter_map(of_backend).collect()
}

/// Lists the backends of all clients with another number of chosen flows than the sum of ended,
/// active, reclaimed and untracked flows. Only calls in progress may cause such a difference.
pub fn imbalances(setup: &Setup) -> Vec<String> {
    setup.status().clients.iter().flat_map(|client| &client.services).flat_map(imbalances_of).collect()
}

/// Sums over all backends of a set-up's only client.
pub fn totals(setup: &Setup) -> Sums {
    let mut sums = Sums::default();
    for service in &setup.client().services {
        sums.add(&Sums::of_service(service));
    }
    sums
}

/// The number of a service's calls for which the flow tables had no room: its outcome `untracked`.
#[track_caller]
pub fn calls_without_a_record(client: &ClientStatus, service: &str) -> u64 {
    Sums::of_service(client.service(service).unwrap_or_else(|| panic!("no service {service}"))).without_record
}

/// The endings to compare. Endings that a worker cannot distinguish are one group: whether an
/// answer was due when the worker gave up depends on how busy the machine is.
fn compared() -> Vec<(String, Vec<Ending>)> {
    let given_up = [Ending::GaveUp, Ending::Unanswered];
    let alone = ENDINGS.into_iter().filter(|ending| !given_up.contains(ending));
    let alone = alone.map(|ending| (ending.to_string(), vec![ending]));
    alone.chain([("gave-up or unanswered".to_owned(), given_up.to_vec())]).collect()
}

/// The counts of one backend, or sums over several backends.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    /// Number of calls that chose this backend.
    pub chosen: u64,
    pub active: u64,
    pub untracked: u64,
    /// Number of records that the daemon removed because their sockets were gone.
    pub reclaimed: u64,
    connecting: u64,
    established: u64,
    diverted: u64,
    flows: Flows,
    /// Number of calls for which the flow tables had no room. The status reports this count per
    /// service, and not per backend.
    without_record: u64,
}

impl Sums {
    #[track_caller]
    fn of(backend: &BackendStatus) -> Self {
        let endings = ENDINGS.into_iter().map(|ending| (ending, backend.endings[&ending.to_string()]));
        Self {
            chosen: backend.started,
            active: backend.active,
            connecting: backend.connecting,
            established: backend.established,
            untracked: backend.untracked,
            reclaimed: backend.reclaimed,
            diverted: backend.diverted,
            flows: Flows { endings: endings.collect(), ..Flows::default() },
            without_record: 0,
        }
    }

    fn of_service(service: &ServiceStatus) -> Self {
        let mut sums = Self { without_record: service.outcomes["untracked"], ..Self::default() };
        service.backends.iter().for_each(|backend| sums.add(&Self::of(backend)));
        sums
    }

    fn add(&mut self, other: &Self) {
        self.chosen += other.chosen;
        self.active += other.active;
        self.connecting += other.connecting;
        self.established += other.established;
        self.untracked += other.untracked;
        self.reclaimed += other.reclaimed;
        self.diverted += other.diverted;
        self.without_record += other.without_record;
        for (ending, count) in &other.flows.endings {
            *self.flows.endings.entry(*ending).or_default() += count;
        }
    }

    /// Describes the difference if the chosen flows are not the sum of the ended, active, reclaimed
    /// and untracked flows.
    fn imbalance(&self) -> Option<String> {
        let ended: u64 = ENDINGS.iter().map(|ending| self.flows.ended(*ending)).sum();
        let Self { chosen, active, reclaimed, untracked, .. } = *self;
        (chosen != ended + active + reclaimed + untracked).then(|| {
            format!(
                "started {chosen} != ended {ended} + active {active} + reclaimed {reclaimed} + untracked {untracked}"
            )
        })
    }

    fn differences(&self, flows: &Flows) -> Vec<String> {
        let mut rows = vec![
            ("started".to_owned(), self.chosen, flows.chosen),
            ("active".to_owned(), self.active, flows.held),
            ("calls without a record".to_owned(), self.without_record, 0),
            ("connecting".to_owned(), self.connecting, flows.connecting),
            ("established".to_owned(), self.established, flows.established),
            ("untracked".to_owned(), self.untracked, 0),
            ("reclaimed".to_owned(), self.reclaimed, 0),
            ("diverted".to_owned(), self.diverted, 0),
        ];
        rows.extend(self.endings(flows));
        let described = rows.into_iter().filter(|(_, counted, seen)| counted != seen);
        described.map(|(what, counted, seen)| format!("{what}: counted {counted}, seen {seen}")).collect()
    }

    fn differences_of_full_tables(&self, flows: &Flows) -> Vec<String> {
        let mut described = Vec::new();
        if self.chosen != flows.chosen {
            described.push(format!("started: counted {}, seen {}", self.chosen, flows.chosen));
        }
        let mut rows = vec![("active".to_owned(), self.active, flows.held)];
        rows.extend(self.endings(flows));
        let more = rows.into_iter().filter(|(_, counted, seen)| counted > seen);
        described.extend(
            more.map(|(what, counted, seen)| format!("{what}: counted {counted}, seen {seen} at most")),
        );
        described
    }

    /// Each group of compared endings, with the number that socklb counted and the number in
    /// `flows`.
    fn endings(&self, flows: &Flows) -> impl Iterator<Item = (String, u64, u64)> {
        compared().into_iter().map(|(what, endings)| {
            let of = |flows: &Flows| endings.iter().map(|ending| flows.ended(*ending)).sum();
            (what, of(&self.flows), of(flows))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Seen;

    /// A backend with five flows: one with each of the first three endings, an open one, and one
    /// without a record.
    fn one() -> Sums {
        let endings = ENDINGS.map(|ending| (ending, u64::from(ending <= Ending::TimedOut)));
        Sums {
            chosen: 5,
            active: 1,
            connecting: 4,
            established: 2,
            untracked: 1,
            flows: Flows { endings: endings.into(), ..Flows::default() },
            ..Sums::default()
        }
    }

    #[test]
    fn a_backend_with_an_imbalance_is_reported() {
        assert_eq!(one().imbalance(), None);
        let described = Sums { chosen: 6, ..one() }.imbalance().unwrap();
        assert_eq!(described, "started 6 != ended 3 + active 1 + reclaimed 0 + untracked 1");
    }

    #[test]
    fn counts_are_compared_with_the_ledger() {
        let mut ledger = Ledger::default();
        for _ in 0..2 {
            ledger.hold("users");
            for seen in [Seen::Closed, Seen::Refused, Seen::TimedOut] {
                ledger.ended("users", seen);
            }
        }
        let seen = &ledger.services["users"];
        let mut sums = Sums { without_record: 2, ..Sums::default() };
        sums.add(&one());
        sums.add(&one());
        // Only the number of flows without a record differs.
        let described = [
            "started: counted 10, seen 8",
            "calls without a record: counted 2, seen 0",
            "untracked: counted 2, seen 0",
        ];
        assert_eq!(sums.differences(seen), described);
        (sums.chosen, sums.untracked, sums.without_record) = (8, 0, 0);
        assert_eq!(sums.differences(seen), Vec::<String>::new());
        // The counts of two endings are wrong, but their sum is right.
        sums.flows.endings.extend([(Ending::Refused, 1), (Ending::Unreachable, 1)]);
        let described = ["refused: counted 1, seen 2", "unreachable: counted 1, seen 0"];
        assert_eq!(sums.differences(seen), described);
    }

    #[test]
    fn full_tables_may_count_less_and_never_more() {
        let mut ledger = Ledger::default();
        for _ in 0..5 {
            ledger.ended("users", Seen::Refused);
        }
        let seen = &ledger.services["users"];
        let endings = [(Ending::Refused, 3)].into();
        let mut sums = Sums { chosen: 5, flows: Flows { endings, ..Flows::default() }, ..Sums::default() };
        assert_eq!(sums.differences_of_full_tables(seen), Vec::<String>::new());
        (sums.chosen, sums.active) = (4, 1);
        let described = ["started: counted 4, seen 5", "active: counted 1, seen 0 at most"];
        assert_eq!(sums.differences_of_full_tables(seen), described);
    }
}
