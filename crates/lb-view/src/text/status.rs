//! The text form of the status. Each service has a table of its backends that fits the terminal. If
//! connects to a backend fail, the line below the backend shows how they fail.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use lb_common::abi::{BackendState, Outcome};
use lb_common::ending::Ending;
use lb_core::health::Health;
use lb_core::rebalance::RebalanceState;

use super::load::describe as load_in_words;
use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, counted, percent, wrap};
use crate::backend::{BackendStatus, ConnectLatency, LONGEST_US};
use crate::status::{
    ClientStatus, EjectionMode, NotChosen, RebalanceStatus, ServiceStatus, ShortBackend, StatusDocument,
};

pub fn status(status: &StatusDocument, style: Style) -> String {
    let mut text = String::new();
    match &status.daemon {
        Some(daemon) => {
            let _ =
                writeln!(text, "socklb {} (pid {}), {}", daemon.version, daemon.pid, daemon.config.display());
        }
        None => {
            let _ = writeln!(text, "no daemon answers; showing kernel state");
        }
    }
    if let Some(summary) = summary(status) {
        let _ = writeln!(text, "{summary}");
    }
    if !status.interfaces.is_empty() {
        let each = status.interfaces.iter().map(|interface| format!("{} {}", interface.name, interface.mode));
        let _ = writeln!(text, "interfaces that receive reports: {}", each.collect::<Vec<_>>().join(", "));
    }
    let mut missing = Vec::new();
    for client in &status.clients {
        one_client(&mut text, client, style, &mut missing);
    }
    // One line lists the omitted columns of all tables.
    text.extend(left_out(&missing));
    for leaving in &status.leaving {
        let _ = writeln!(
            text,
            "\nclient {} (ABI {}) {}",
            style.paint("1", &leaving.client),
            leaving.abi,
            leaving.describe()
        );
    }
    if !status.faults.is_empty() {
        text.push('\n');
        for fault in &status.faults {
            let _ = writeln!(text, "{} {fault}", style.paint("33", "degraded:"));
        }
    }
    wrap(text, style.width)
}

/// The numbers of services and backends, and the number of backends in each state except healthy.
/// `None` if there is no service.
fn summary(status: &StatusDocument) -> Option<String> {
    let services = status.clients.iter().flat_map(|client| &client.services);
    // A service that several clients use is counted once.
    let names: BTreeSet<&str> = services.clone().map(|service| service.name.as_str()).collect();
    let count = names.len();
    let backends: Vec<&BackendStatus> = services.flat_map(|service| &service.backends).collect();
    let clients = match status.clients.len() {
        0 | 1 => String::new(),
        clients => format!("{}, ", counted(clients, "client")),
    };
    // The worst state comes first.
    let states = [Health::Refusing, Health::Ejected, Health::LameDuck, Health::Unproven, Health::Drained];
    let states = ["failing"].into_iter().chain(states.map(Health::name));
    let is_in = |one: &BackendStatus, state: &str| {
        if one.has_withheld_ejection() { state == "failing" } else { one.state == state }
    };
    let in_state = states.map(|state| (state, backends.iter().filter(|one| is_in(one, state)).count()));
    let in_state = in_state.filter(|(_, count)| *count > 0);
    let in_state: String = in_state.map(|(state, count)| format!(", {count} {state}")).collect();
    let (all, backends) = (counted(count, "service"), counted(backends.len(), "backend"));
    (count > 0).then(|| format!("{clients}{all}, {backends}{in_state}"))
}

/// Appends one client to the text. Adds the columns that do not fit to `missing`.
fn one_client(text: &mut String, client: &ClientStatus, style: Style, missing: &mut Vec<&'static str>) {
    let cgroup =
        client.cgroup.as_ref().map_or_else(|| "no cgroup".to_owned(), |path| path.display().to_string());
    let _ = writeln!(text, "\nclient {}  {cgroup}", style.paint("1", &client.name));
    for service in &client.services {
        for title in one_service(text, service, style) {
            if !missing.contains(&title) {
                missing.push(title);
            }
        }
    }
}

/// Appends one service to the text. Returns the columns that do not fit.
fn one_service(text: &mut String, service: &ServiceStatus, style: Style) -> Vec<&'static str> {
    let skew = service.skew.map_or_else(String::new, |skew| format!(", skew {skew:.3}"));
    let closed = if service.open { "" } else { " (removed; waiting for its last connection to end)" };
    let _ = writeln!(
        text,
        "service {} {}/{}  table {} of {} entries{skew}{closed}",
        style.paint("1", &service.name),
        service.address,
        service.protocol,
        service.table_generation,
        service.table_entries,
    );
    if let Some(odd) = odd(&service.outcomes) {
        let _ = writeln!(text, "  {odd}");
    }
    if service.ejection == EjectionMode::CausesUnknown {
        let _ = writeln!(text, "  ejection off: causes unknown (`socklb doctor`)");
    }
    if let Some(load) = &service.load {
        let _ = writeln!(text, "  {}", load_in_words(load));
    }
    if let Some(rebalance) = &service.rebalance {
        let _ = writeln!(text, "  {}", rebalance_in_words(rebalance));
    }
    if let Some(source) = &service.source
        && let Some(remote) = &source.remote
    {
        let _ = writeln!(text, "  {}", remote.describe(source.good_for_s, source.error.is_some()));
    }
    for note in service.source.iter().flat_map(|source| &source.notes) {
        let _ = writeln!(text, "  note: {note}");
    }
    if let Some(unused) = service.unused {
        let _ = writeln!(text, "  {unused}");
    }
    if let Some(not_chosen) = not_chosen(&service.not_chosen) {
        let _ = writeln!(text, "  {not_chosen}");
    }
    let diverted: u64 = service.backends.iter().map(|backend| backend.diverted).sum();
    if diverted > 0 {
        let _ = writeln!(
            text,
            "  another program rewrote the destination of {} after socklb",
            counted(diverted, "flow")
        );
    }
    let all = &service.backends;
    let is_watched = all.iter().any(|backend| backend.rates_60s.is_some());
    let row = |number: usize| row(&all[number], is_watched);
    let table = table(&columns(is_watched), all.len(), row, style);
    text.push_str(&table.text);
    table.left_out
}

/// The columns of a service's table. Only a daemon measures rates; without a daemon the table has
/// counts instead. If the terminal is narrow, the mean and median connect times are omitted first,
/// and shares, active flows and flows are omitted last.
fn columns(is_watched: bool) -> [Column<'static>; 10] {
    let flows = if is_watched { "flows/s" } else { "started" };
    [
        Column::left("backend", ALWAYS),
        Column::right("state", ALWAYS),
        Column::right("weight", 3),
        Column::right("wanted", 5),
        Column::right("share", 6),
        Column::right("active", 7),
        Column::right(flows, 8),
        Column::right("mean", 1),
        Column::right("p50", 2),
        Column::right("p99", 4),
    ]
}

fn row(backend: &BackendStatus, is_watched: bool) -> TableRow {
    let rates = backend.rates_60s.as_ref();
    let (share, flows, latency) = match rates {
        Some(rates) => (backend.share_60s, rate(rates.started), backend.latency_60s),
        None if is_watched => (None, "-".to_owned(), None),
        None => (backend.share, backend.started.to_string(), backend.latency),
    };
    let time =
        |of: fn(&ConnectLatency) -> f64| latency.as_ref().map_or_else(|| "-".to_owned(), |all| time(of(all)));
    let cells = vec![
        backend.address.to_string(),
        backend.state_in_words().to_owned(),
        backend.weight_in_words(),
        percent(Some(backend.share_wanted)),
        percent(share),
        backend.active.to_string(),
        flows,
        time(|latency| latency.mean_us),
        time(|latency| latency.p50_us),
        time(|latency| latency.p99_us),
    ];
    let ejection = backend.ejection_in_words();
    let probe = backend.probe.as_ref().filter(|probe| probe.is_remarkable()).map(ToString::to_string);
    // The text of an ejection, and the state of a drained backend, already contain the reason, so
    // the reason is not repeated. The notes are the same with and without a daemon, except for
    // details of probes, which only a daemon knows.
    let is_shown =
        ejection.is_some() && backend.state == Health::Ejected.name() || backend.is_drained_by_operator();
    let reason = backend.reason.clone().filter(|_| !is_shown);
    let is_replaced = backend.membership == BackendState::Replaced.name();
    let place = is_replaced.then(|| "replaced: another backend serves instead".to_owned());
    let notes = reason.into_iter().chain(ejection).chain(probe).chain(place);
    let notes: Vec<String> = notes.chain(failures(backend, is_watched)).collect();
    TableRow { cells, is_bad: backend.is_failing(), note: (!notes.is_empty()).then(|| notes.join("; ")) }
}

/// The activity of `rebalance`, or the reason why it closes nothing.
fn rebalance_in_words(rebalance: &RebalanceStatus) -> String {
    const SHOWN: usize = 4;
    let RebalanceStatus { state, backends, retry_s, closed } = rebalance;
    let short = |one: &ShortBackend| format!("{}, {} of {:.0} flows", one.address, one.open, one.share);
    let more = match backends.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    let short = backends.iter().take(SHOWN).map(short).collect::<Vec<_>>().join("; ") + &more;
    let known = RebalanceState::ALL.into_iter().find(|known| known.name() == state);
    let text = match known {
        Some(RebalanceState::Even) => "no backend has too few flows".to_owned(),
        Some(RebalanceState::Panic) => "closes nothing in panic".to_owned(),
        Some(RebalanceState::Refilling) => format!("refilling {short}"),
        // A state of a later daemon.
        None => format!("{state} ({short})"),
        Some(RebalanceState::Trial) => format!("closing a connection for the trial of {short}"),
        Some(RebalanceState::AwaitsTrial) => {
            format!("closed a connection for the trial of {short}")
        }
        Some(RebalanceState::NotDialled) => {
            format!("waiting until the client has replaced closed connections ({short})")
        }
        Some(RebalanceState::NothingIdle) => format!("no idle connection to close for {short}"),
        Some(RebalanceState::Failed) => format!("closing failed, see the log ({short})"),
        Some(RebalanceState::NoEffect) => format!("paused, closings brought no flows to {short}"),
    };
    let retry = retry_s.map_or_else(String::new, |seconds| format!("; retry in {seconds} s"));
    format!("rebalance: {text}{retry}; {} closed", counted(*closed, "connection"))
}

/// The first endpoints that the list excludes, and the number of the other excluded endpoints.
fn not_chosen(all: &[NotChosen]) -> Option<String> {
    const SHOWN: usize = 4;
    let shown: Vec<String> = all.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more (--json has all)"),
    };
    (!shown.is_empty()).then(|| format!("not chosen: {}{more}", shown.join(", ")))
}

/// How connects failed; `None` if no connect failed. The numbers are rates per second or, without a
/// daemon, counts since the backend was first seen. Errors of the backend come first, then endings
/// that the application or this host caused.
fn failures(backend: &BackendStatus, is_watched: bool) -> Option<String> {
    let failed = |ending: &Ending| !matches!(ending, Ending::Closed | Ending::Unknown);
    let (errors, others): (Vec<Ending>, Vec<Ending>) =
        Ending::ALL.into_iter().filter(failed).partition(|ending| ending.is_error());
    let count_of = |ending: Ending| {
        let name = ending.name();
        let text = match &backend.rates_60s {
            Some(rates) => {
                rates.endings.get(name).filter(|rate| **rate > 0.0).map(|each| format!("{}/s", rate(*each)))
            }
            None if is_watched => None,
            None => backend.endings.get(name).filter(|count| **count > 0).map(ToString::to_string),
        };
        text.map(|text| format!("{name} {text}"))
    };
    let described: Vec<String> = errors.into_iter().chain(others).filter_map(count_of).collect();
    (!described.is_empty()).then(|| described.join(", "))
}

/// A rate per second.
fn rate(rate: f64) -> String {
    match rate {
        rate if rate <= 0.0 => "0".to_owned(),
        rate if rate < 0.095 => format!("{rate:.2}"),
        rate if rate < 99.95 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

/// A time in microseconds, formatted with a unit and about three digits.
fn time(us: f64) -> String {
    match us {
        us if us >= LONGEST_US => format!(">{:.1}s", LONGEST_US / 1e6),
        us if us < 1e3 => format!("{us:.0}us"),
        us if us < 1e4 => format!("{:.1}ms", us / 1e3),
        us if us < 1e6 => format!("{:.0}ms", us / 1e3),
        us => format!("{:.1}s", us / 1e6),
    }
}

/// The outcomes of connects; `None` if all outcomes are normal. Each connect has one outcome.
fn odd(outcomes: &BTreeMap<String, u64>) -> Option<String> {
    let of = |outcome: Outcome| outcomes.get(outcome.name()).copied().unwrap_or(0);
    let balanced = Outcome::OF_A_SERVICE.into_iter().filter(|outcome| outcome.is_balanced());
    let balanced = balanced.map(of).fold(0, u64::saturating_add);
    let odd = Outcome::OF_A_SERVICE.into_iter().filter(|outcome| of(*outcome) > 0);
    let odd: Vec<String> =
        odd.filter_map(|outcome| Some(format!("{} {}", of(outcome), outcome.remark()?))).collect();
    (!odd.is_empty()).then(|| format!("connects: {balanced} balanced; {}", odd.join("; ")))
}

#[cfg(test)]
mod tests {
    use lb_common::abi::Histogram;

    use super::*;
    use crate::backend::ConnectionRates;
    use crate::fault::{Fault, FaultCode};
    use crate::status::AnomalyCounts;

    #[test]
    fn unusual_outcomes_are_shown_with_the_number_of_balanced_connects() {
        let check = |counts: [u64; 5], expected: Option<&str>| {
            let [forwarded, fallback, untracked, no_backend, passed] = counts;
            let outcomes = [
                (Outcome::Forwarded, forwarded),
                (Outcome::Fallback, fallback),
                (Outcome::Untracked, untracked),
                (Outcome::NoBackend, no_backend),
                (Outcome::Passed, passed),
            ];
            let outcomes = outcomes.map(|(outcome, count)| (outcome.name().to_owned(), count)).into();
            assert_eq!(odd(&outcomes).as_deref(), expected, "{outcomes:?}");
        };
        check([128, 0, 0, 0, 0], None);
        check(
            [128, 0, 272, 0, 0],
            Some("connects: 400 balanced; 272 of them not in the active count (untracked)"),
        );
        check(
            [1, 2, 0, 3, 4],
            Some(
                "connects: 3 balanced; 2 of them to the fallback; 3 refused, no usable backend; 4 passed unchanged",
            ),
        );
    }

    fn service() -> ServiceStatus {
        let backend = |slot: u32| {
            let address = format!("255.255.255.25{slot}:65535").parse().expect("the address is valid");
            BackendStatus::unused(address, slot)
        };
        let mut connect = Histogram::default();
        (connect.buckets[6], connect.buckets[14], connect.sum_us) = (980, 20, 1_300_000);
        let named = |name: &str, number: f64| (name.to_owned(), number);
        let busy = BackendStatus {
            state: "lame-duck".to_owned(),
            weight: 65_535,
            share_wanted: 0.75,
            share_60s: Some(0.751),
            share: Some(0.75),
            started: 123_456_789,
            active: 131_072,
            endings: [("refused".to_owned(), 7), ("not-sent".to_owned(), 2)].into(),
            latency: ConnectLatency::of(&connect),
            latency_60s: ConnectLatency::of(&connect),
            rates_60s: Some(ConnectionRates {
                over_s: 60.0,
                started: 12_345.6,
                errors: 12.0,
                endings: [named("refused", 12.0), named("gave-up", 0.05)].into(),
            }),
            ..backend(0)
        };
        let rates = ConnectionRates { over_s: 60.0, started: 0.0, errors: 0.0, endings: BTreeMap::new() };
        let idle = BackendStatus { rates_60s: Some(rates), ..backend(1) };
        ServiceStatus::with_backends(vec![busy, idle])
    }

    #[track_caller]
    fn check_text(service: &ServiceStatus, expected: &str) {
        let mut text = String::new();
        assert_eq!(one_service(&mut text, service, Style::default()), [""; 0]);
        assert_eq!(text, expected);
    }

    #[track_caller]
    fn check_table(service: &ServiceStatus, text: &str) {
        check_text(service, text);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "the table must fit 100 columns: {widest:?}");
    }

    #[test]
    fn with_a_daemon_the_table_has_rates_and_fits_100_columns() {
        check_table(
            &service(),
            "service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
               backend                    state  weight  wanted   share  active  flows/s   mean    p50    p99\n  \
               255.255.255.250:65535  lame-duck   65535  75.0 %  75.1 %  131072    12346  1.3ms  773us  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n  \
               255.255.255.251:65535    healthy       1   0.0 %       -       0        0      -      -      -\n",
        );
    }

    #[test]
    fn the_status_marks_overrides() {
        let mut service = service();
        for backend in &mut service.backends {
            backend.rates_60s = None;
            backend.endings.clear();
        }
        let [drained, weighted] = &mut service.backends[..] else { panic!("expected two backends") };
        "drained".clone_into(&mut drained.state);
        (drained.witness, drained.reason) = (Some("operator".to_owned()), Some("operator: drain".to_owned()));
        (weighted.weight, weighted.weight_percent, weighted.share_wanted) = (4, Some(50), 1.0);
        check_text(
            &service,
            "service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
               backend                             state    weight   wanted   share  active    started   mean    p50    p99\n  \
               255.255.255.250:65535  drained (operator)     65535   75.0 %  75.0 %  131072  123456789  1.3ms  773us  197ms\n  \
               255.255.255.251:65535             healthy  4 (50 %)  100.0 %       -       0          0      -      -      -\n",
        );
    }

    #[test]
    fn the_state_of_rebalance_names_the_backends_with_too_few_flows() {
        let short = |port: u16| ShortBackend { address: ([127, 0, 0, 1], port).into(), open: 3, share: 6.25 };
        let check = |state: RebalanceState, backends, retry_s, expected: &str| {
            let state = state.name().to_owned();
            let status =
                RebalanceStatus { state, backends: (0..backends).map(short).collect(), retry_s, closed: 12 };
            assert_eq!(rebalance_in_words(&status), format!("rebalance: {expected}; 12 connections closed"));
        };
        check(RebalanceState::Even, 0, None, "no backend has too few flows");
        check(RebalanceState::Panic, 0, None, "closes nothing in panic");
        check(RebalanceState::Refilling, 1, None, "refilling 127.0.0.1:0, 3 of 6 flows");
        check(
            RebalanceState::NothingIdle,
            6,
            Some(20),
            "no idle connection to close for 127.0.0.1:0, 3 of 6 flows; 127.0.0.1:1, 3 of 6 flows; \
             127.0.0.1:2, 3 of 6 flows; 127.0.0.1:3, 3 of 6 flows; 2 more; retry in 20 s",
        );
        let state = "of-a-later-daemon".to_owned();
        let later = RebalanceStatus { state, backends: vec![short(1)], retry_s: None, closed: 12 };
        assert_eq!(
            rebalance_in_words(&later),
            "rebalance: of-a-later-daemon (127.0.0.1:1, 3 of 6 flows); 12 connections closed"
        );
        for state in RebalanceState::ALL {
            let status = RebalanceStatus {
                state: state.name().to_owned(),
                backends: vec![short(1)],
                retry_s: None,
                closed: 0,
            };
            let names_it = rebalance_in_words(&status).contains("127.0.0.1:1, 3 of 6 flows");
            assert_eq!(names_it, !matches!(state, RebalanceState::Even | RebalanceState::Panic), "{state:?}");
        }
        let mut service = service();
        let state = RebalanceState::Refilling.name().to_owned();
        service.rebalance =
            Some(RebalanceStatus { state, backends: vec![short(1)], retry_s: None, closed: 1 });
        let mut text = String::new();
        one_service(&mut text, &service, Style::default());
        let line = "\n  rebalance: refilling 127.0.0.1:1, 3 of 6 flows; 1 connection closed\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn a_summary_counts_all_backends_and_unhealthy_ones() {
        let (daemon, faults, clients) = (None, Vec::new(), Vec::new());
        let (leaving, interfaces) = (Vec::new(), Vec::new());
        let mut status = StatusDocument { schema: 1, daemon, faults, clients, leaving, interfaces };
        assert_eq!(summary(&status), None);
        let client = |services| ClientStatus { services, ..client() };
        status.clients.push(client(vec![service()]));
        assert_eq!(summary(&status).as_deref(), Some("1 service, 2 backends, 1 lame-duck"));
        let mut failing = service();
        for (backend, state) in failing.backends.iter_mut().zip(["ejected", "refusing"]) {
            state.clone_into(&mut backend.state);
        }
        status.clients.push(client(vec![failing, ServiceStatus::with_backends(Vec::new())]));
        assert_eq!(
            summary(&status).as_deref(),
            Some("2 clients, 1 service, 4 backends, 1 refusing, 1 ejected, 1 lame-duck")
        );
    }

    #[test]
    fn a_failing_backend_is_marked() {
        let mut service = service();
        service.backends[1].failing = true;
        let mut text = String::new();
        one_service(&mut text, &service, Style::default());
        let rows: Vec<&str> = text.lines().filter_map(|line| line.get(..16)).collect();
        assert_eq!(rows[2..], ["  255.255.255.25", "    refused 12.0", "! 255.255.255.25"]);
    }

    #[test]
    fn without_a_daemon_the_table_has_counts_since_the_start() {
        let mut service = service();
        for backend in &mut service.backends {
            (backend.rates_60s, backend.latency_60s, backend.share_60s) = (None, None, None);
        }
        service.backends.truncate(1);
        check_table(
            &service,
            "service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
               backend                    state  weight  wanted   share  active    started   mean    p50    p99\n  \
               255.255.255.250:65535  lame-duck   65535  75.0 %  75.0 %  131072  123456789  1.3ms  773us  197ms\n    \
                 refused 7, not-sent 2\n",
        );
    }

    /// A client with two services. The addresses of the second service are shorter, so its table
    /// has other column widths.
    fn client() -> ClientStatus {
        let mut other = service();
        other.backends.truncate(1);
        other.backends[0].address = ([10, 0, 0, 1], 80).into();
        ClientStatus {
            name: "web".to_owned(),
            configured_cgroup: None,
            cgroup: Some("/sys/fs/cgroup/websites.slice/web".into()),
            cgroup_id: None,
            neighbours: None,
            reclaim: None,
            not_a_service: 0,
            anomalies: AnomalyCounts::default(),
            services: vec![service(), other],
        }
    }

    #[test]
    fn a_status_is_no_wider_than_its_terminal() {
        #[track_caller]
        fn check(width: usize, expected: &str) {
            let faults =
                vec![Fault::of_client(FaultCode::NotAttached, "web", "run `socklb detach web` twice")];
            let clients = vec![client()];
            let whole = StatusDocument {
                schema: 0,
                daemon: None,
                faults,
                clients,
                leaving: Vec::new(),
                interfaces: Vec::new(),
            };
            let text = status(&whole, Style { colour: false, width: Some(width) });
            assert_eq!(text.trim_start_matches(|letter| letter != '\n'), expected, "width {width}");
            assert!(text.lines().all(|line| line.chars().count() <= width));
        }
        for width in [120, 200] {
            check(
                width,
                "\n\
                 1 service, 3 backends, 2 lame-duck\n\
                 \n\
                 client web  /sys/fs/cgroup/websites.slice/web\n\
                 service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
                 backend                    state  weight  wanted   share  active  flows/s   mean    p50    p99\n  \
                 255.255.255.250:65535  lame-duck   65535  75.0 %  75.1 %  131072    12346  1.3ms  773us  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n  \
                 255.255.255.251:65535    healthy       1   0.0 %       -       0        0      -      -      -\n\
                 service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
                 backend          state  weight  wanted   share  active  flows/s   mean    p50    p99\n  \
                 10.0.0.1:80  lame-duck   65535  75.0 %  75.1 %  131072    12346  1.3ms  773us  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n\
                 \n\
                 degraded: client web: run `socklb detach web` twice\n",
            );
        }
        check(
            80,
            "\n\
                 1 service, 3 backends, 2 lame-duck\n\
                 \n\
                 client web  /sys/fs/cgroup/websites.slice/web\n\
                 service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
                 backend                    state  wanted   share  active  flows/s    p99\n  \
                 255.255.255.250:65535  lame-duck  75.0 %  75.1 %  131072    12346  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n  \
                 255.255.255.251:65535    healthy   0.0 %       -       0        0      -\n\
                 service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
                 backend          state  weight  wanted   share  active  flows/s    p50    p99\n  \
                 10.0.0.1:80  lame-duck   65535  75.0 %  75.1 %  131072    12346  773us  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n\
                 (narrow terminal: weight, mean, p50 left out)\n\
                 \n\
                 degraded: client web: run `socklb detach web` twice\n",
        );
        check(
            40,
            "\n\
                 1 service, 3 backends, 2 lame-duck\n\
                 \n\
                 client web\n  \
                 /sys/fs/cgroup/websites.slice/web\n\
                 service users 10.96.0.10:80/tcp  table 1\n  \
                 of 1024 entries\n  \
                 backend                    state\n  \
                 255.255.255.250:65535  lame-duck\n    \
                 refused 12.0/s, gave-up 0.05/s\n  \
                 255.255.255.251:65535    healthy\n\
                 service users 10.96.0.10:80/tcp  table 1\n  \
                 of 1024 entries\n  \
                 backend          state  flows/s\n  \
                 10.0.0.1:80  lame-duck    12346\n    \
                 refused 12.0/s, gave-up 0.05/s\n\
                 (narrow terminal: weight, wanted, share,\n  \
                 active, flows/s, mean, p50, p99 left\n  \
                 out)\n\
                 \n\
                 degraded: client web: run\n  \
                 `socklb detach web` twice\n",
        );
    }

    #[test]
    fn rates_and_times_are_rounded_for_people() {
        assert_eq!(
            [0.0, 0.016, 0.1, 99.94, 100.4, 12_345.6].map(rate),
            ["0", "0.02", "0.1", "99.9", "100", "12346"]
        );
        assert_eq!(
            [7.6, 999.0, 1000.0, 9949.0, 21_000.0, 1.5e6].map(time),
            ["8us", "999us", "1.0ms", "9.9ms", "21ms", "1.5s"]
        );
        assert_eq!(time(LONGEST_US), ">4.2s");
    }
}
