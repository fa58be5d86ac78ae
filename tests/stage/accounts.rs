//! What socklb says of flows, compared with what a worker saw of them.

use serde_json::Value;

use crate::Setup;
use crate::daemon::find;
use crate::ending::{ENDINGS, Ending};
use crate::ledger::{Flows, Ledger};

/// What a client counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Choices and open flows.
    Active,
    /// With `accounting = "full"`: how every flow ended as well.
    Full,
}

/// What this build counts.
pub const COUNTED: Counted = Counted::Full;

impl Counted {
    /// The lines of a client that ask for it.
    pub fn client(self) -> &'static str {
        match self {
            Self::Active => "",
            Self::Full => "accounting = \"full\"\n",
        }
    }

    /// Whether services can take datagrams.
    pub fn has_datagrams(self) -> bool {
        self == Self::Full
    }

    /// In what the status of a set-up's only client differs from a ledger: nothing, if every flow found room in the flow
    /// tables.
    pub fn differences(self, setup: &Setup, ledger: &Ledger) -> Vec<String> {
        self.differences_of(&setup.status()["clients"][0], ledger)
    }

    fn differences_of(self, client: &Value, ledger: &Ledger) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, flows) in &ledger.services {
            let sums = self.sums(client, name, &mut differences);
            let mut compare = |what: &str, counted: u64, seen: u64| {
                if counted != seen {
                    differences.push(format!("{name}: {what}: counted {counted}, seen {seen}"));
                }
            };
            compare("started", sums.chosen, flows.chosen);
            compare("active", sums.active, flows.held);
            compare("calls without a record", calls_without_a_record(client, name), 0);
            if self == Self::Full {
                compare("connecting", sums.connecting, flows.connecting);
                compare("established", sums.established, flows.established);
                compare("untracked", sums.untracked, 0);
                compare("reclaimed", sums.reclaimed, 0);
                compare("diverted", sums.diverted, 0);
                for (what, endings) in compared() {
                    let of = |flows: &Flows| endings.iter().map(|ending| flows.ended(*ending)).sum();
                    compare(&what, of(&sums.flows), of(flows));
                }
            }
        }
        differences
    }

    /// The same where the flow tables may be full: flows that found no room are counted as such, the others as they ended.
    pub fn differences_of_full_tables(self, setup: &Setup, ledger: &Ledger) -> Vec<String> {
        let client = setup.status()["clients"][0].clone();
        let mut differences = Vec::new();
        for (name, flows) in &ledger.services {
            let sums = self.sums(&client, name, &mut differences);
            if sums.chosen != flows.chosen {
                differences.push(format!("{name}: started: counted {}, seen {}", sums.chosen, flows.chosen));
            }
            let mut at_most = |what: &str, counted: u64, seen: u64| {
                if counted > seen {
                    differences.push(format!("{name}: {what}: counted {counted}, seen {seen} at most"));
                }
            };
            at_most("active", sums.active, flows.held);
            for (what, endings) in compared() {
                let of = |flows: &Flows| endings.iter().map(|ending| flows.ended(*ending)).sum();
                at_most(&what, of(&sums.flows), of(flows));
            }
        }
        differences
    }

    /// Adds a service's backends up, each of which must add up itself.
    fn sums(self, client: &Value, service: &str, differences: &mut Vec<String>) -> Sums {
        let mut sums = Sums::default();
        let service_row = find(&client["services"], service);
        let backends = service_row.and_then(|row| row["backends"].as_array()).into_iter().flatten();
        for backend in backends {
            let one = Sums::of(backend, self);
            if let Some(difference) = self.imbalance(&one) {
                differences.push(format!("{service} {}: {difference}", backend["address"]));
            }
            sums.add(&one);
        }
        sums
    }

    /// Chosen is ended, active, reclaimed and untracked.
    fn imbalance(self, sums: &Sums) -> Option<String> {
        let ended: u64 = ENDINGS.iter().map(|ending| sums.flows.ended(*ending)).sum();
        let Sums { chosen, active, reclaimed, untracked, .. } = *sums;
        match self {
            Self::Active => (active > chosen).then(|| format!("started {chosen} < active {active}")),
            Self::Full => (chosen != ended + active + reclaimed + untracked).then(|| {
                format!(
                    "started {chosen} != ended {ended} + active {active} + reclaimed {reclaimed} + untracked {untracked}"
                )
            }),
        }
    }
}

/// The endings that are compared, together where a worker cannot tell them apart: whether an answer was due when it gave up
/// depends on how busy the machine is.
fn compared() -> Vec<(String, Vec<Ending>)> {
    let given_up = [Ending::GaveUp, Ending::Unanswered];
    let alone = ENDINGS.into_iter().filter(|ending| !given_up.contains(ending));
    let alone = alone.map(|ending| (ending.to_string(), vec![ending]));
    alone.chain([("gave-up or unanswered".to_owned(), given_up.to_vec())]).collect()
}

/// Whether every backend of every client adds up: at all times, but for calls that are under way.
pub fn imbalances(setup: &Setup) -> Vec<String> {
    let status = setup.status();
    let mut differences = Vec::new();
    for client in status["clients"].as_array().into_iter().flatten() {
        for service in client["services"].as_array().into_iter().flatten() {
            COUNTED.sums(client, service["name"].as_str().expect("a name"), &mut differences);
        }
    }
    differences
}

/// All backends of a set-up's only client together.
pub fn totals(setup: &Setup) -> Sums {
    let status = setup.status();
    let mut sums = Sums::default();
    for service in status["clients"][0]["services"].as_array().into_iter().flatten() {
        for backend in service["backends"].as_array().into_iter().flatten() {
            sums.add(&Sums::of(backend, COUNTED));
        }
    }
    sums
}

/// What the kernel programs have met that they should not, by name: nothing where they do not say.
pub fn anomalies(setup: &Setup) -> Vec<(String, u64)> {
    let status = setup.status();
    let fields = status["clients"][0]["anomalies"].as_object().into_iter().flatten();
    fields.map(|(name, count)| (name.clone(), count.as_u64().expect("a count"))).collect()
}

/// The counts of one backend, or of several.
#[derive(Debug, Default)]
pub struct Sums {
    /// Calls for which it was chosen.
    pub chosen: u64,
    /// Open flows.
    pub active: u64,
    /// Flows without a record.
    pub untracked: u64,
    /// Records without a socket that were removed.
    pub reclaimed: u64,
    connecting: u64,
    established: u64,
    diverted: u64,
    flows: Flows,
}

impl Sums {
    #[track_caller]
    fn of(backend: &Value, counted: Counted) -> Self {
        let count = |name: &str| backend[name].as_u64().unwrap_or_else(|| panic!("{name} of {backend}"));
        match counted {
            Counted::Active => Self { chosen: count("connects"), active: count("active"), ..Self::default() },
            Counted::Full => Self {
                chosen: count("started"),
                active: count("active"),
                connecting: count("connecting"),
                established: count("established"),
                untracked: count("untracked"),
                reclaimed: count("reclaimed"),
                diverted: count("diverted"),
                flows: Flows { endings: endings(&backend["endings"]), ..Flows::default() },
            },
        }
    }

    fn add(&mut self, other: &Self) {
        self.chosen += other.chosen;
        self.active += other.active;
        self.connecting += other.connecting;
        self.established += other.established;
        self.untracked += other.untracked;
        self.reclaimed += other.reclaimed;
        self.diverted += other.diverted;
        for (ending, count) in &other.flows.endings {
            *self.flows.endings.entry(*ending).or_default() += count;
        }
    }
}

/// What a service's outcomes say of calls for which there was no room.
#[track_caller]
pub fn calls_without_a_record(client: &Value, service: &str) -> u64 {
    let service = find(&client["services"], service).unwrap_or_else(|| panic!("no service {service}"));
    service["outcomes"]["untracked"].as_u64().expect("a count")
}

/// All twelve, by name.
#[track_caller]
fn endings(row: &Value) -> std::collections::BTreeMap<Ending, u64> {
    let count =
        |ending: Ending| row[ending.to_string()].as_u64().unwrap_or_else(|| panic!("{ending} of {row}"));
    ENDINGS.into_iter().map(|ending| (ending, count(ending))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Seen;

    /// A client with one service and two backends, each with three flows that ended in the first three ways, one that is
    /// open, and one without a record.
    fn client() -> Value {
        let mut backend = serde_json::json!({
            "started": 5, "active": 1, "connecting": 4, "established": 2, "untracked": 1, "reclaimed": 0, "diverted": 0,
            "endings": {},
        });
        for ending in ENDINGS {
            backend["endings"][ending.to_string()] = u64::from(ending <= Ending::TimedOut).into();
        }
        let outcomes = serde_json::json!({ "untracked": 2 });
        let service =
            serde_json::json!({ "name": "users", "outcomes": outcomes, "backends": [backend, backend] });
        serde_json::json!({ "services": [service] })
    }

    #[test]
    fn a_backend_adds_up_or_is_told() {
        let mut backend = client()["services"][0]["backends"][0].clone();
        assert_eq!(Counted::Full.imbalance(&Sums::of(&backend, Counted::Full)), None);
        backend["started"] = 6.into();
        let told = Counted::Full.imbalance(&Sums::of(&backend, Counted::Full)).unwrap();
        assert_eq!(told, "started 6 != ended 3 + active 1 + reclaimed 0 + untracked 1");
    }

    #[test]
    fn what_was_counted_is_compared_with_what_was_seen() {
        let mut ledger = Ledger::default();
        for _ in 0..2 {
            ledger.hold("users");
            for seen in [Seen::Closed, Seen::Refused, Seen::TimedOut] {
                ledger.ended("users", seen);
            }
        }
        // Those without a record.
        let chosen = "users: started: counted 10, seen 8";
        let untracked = "users: untracked: counted 2, seen 0";
        let calls = "users: calls without a record: counted 2, seen 0";
        assert_eq!(Counted::Full.differences_of(&client(), &ledger), [chosen, calls, untracked]);
        let mut client = client();
        for backend in client["services"][0]["backends"].as_array_mut().unwrap() {
            (backend["started"], backend["untracked"], backend["connecting"]) =
                (4.into(), 0.into(), 4.into());
        }
        client["services"][0]["outcomes"]["untracked"] = 0.into();
        assert_eq!(Counted::Full.differences_of(&client, &ledger), Vec::<String>::new());
        // Two wrong causes that add up.
        client["services"][0]["backends"][0]["endings"]["refused"] = 0.into();
        client["services"][0]["backends"][0]["endings"]["unreachable"] = 1.into();
        let told = ["users: refused: counted 1, seen 2", "users: unreachable: counted 1, seen 0"];
        assert_eq!(Counted::Full.differences_of(&client, &ledger), told);
    }
}
