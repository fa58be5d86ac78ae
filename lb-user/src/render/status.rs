//! The status as text: of each service a table of its backends that fits a terminal, and below a backend what it fails with.

use std::fmt::Write as _;

use lb_common::ending::Ending;

use super::table::{Row, Side, table_of_rows};
use super::{Style, percent};
use crate::status::{Backend, Client, LONGEST_US, Latency, OutcomeCounts, Service, Status};

/// The status as text.
pub fn status(status: &Status, style: Style) -> String {
    let mut text = String::new();
    match &status.daemon {
        Some(daemon) => {
            let _ =
                writeln!(text, "socklb {} (pid {}), {}", daemon.version, daemon.pid, daemon.config.display());
        }
        None => {
            let _ = writeln!(text, "this is what the kernel holds, not what a daemon says");
        }
    }
    for client in &status.clients {
        one_client(&mut text, client, style);
    }
    for leaving in &status.leaving {
        let _ = writeln!(
            text,
            "\nclient {} (ABI {}) {}",
            style.paint("1", &leaving.client),
            leaving.abi,
            leaving.describe()
        );
    }
    if !status.degraded.is_empty() {
        text.push('\n');
        for fault in &status.degraded {
            let _ = writeln!(text, "{} {fault}", style.paint("33", "degraded:"));
        }
    }
    text
}

fn one_client(text: &mut String, client: &Client, style: Style) {
    let cgroup =
        client.cgroup.as_ref().map_or_else(|| "no cgroup".to_owned(), |path| path.display().to_string());
    let _ = writeln!(text, "\nclient {}  {cgroup}", style.paint("1", &client.name));
    for service in &client.services {
        one_service(text, service, style);
    }
}

fn one_service(text: &mut String, service: &Service, style: Style) {
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
    let diverted: u64 = service.backends.iter().map(|backend| backend.diverted).sum();
    if diverted > 0 {
        let _ = writeln!(text, "  {diverted} flows were rewritten by another program after ours");
    }
    let mut all: Vec<&Backend> = service.backends.iter().collect();
    all.sort_by_key(|backend| (backend.address, backend.slot));
    let is_watched = all.iter().any(|backend| backend.rates_60s.is_some());
    let row = |number: usize| row(all[number], is_watched);
    text.push_str(&table_of_rows(&columns(is_watched), all.len(), row, style));
}

/// The columns. Where nobody has watched, counts take the place of rates.
fn columns(is_watched: bool) -> Vec<(&'static str, Side)> {
    let flows = if is_watched { "conn/s" } else { "chosen" };
    Side::first_left(&["backend", "state", "weight", "wanted", "had", "active", flows, "mean", "p50", "p99"])
}

fn row(backend: &Backend, is_watched: bool) -> Row {
    let rates = backend.rates_60s.as_ref();
    let (had, flows, latency) = match rates {
        Some(rates) => (backend.share_60s, rate(rates.chosen), backend.latency_60s),
        None if is_watched => (None, "-".to_owned(), None),
        None => (backend.share, backend.chosen.to_string(), backend.latency),
    };
    let time = |of: fn(&Latency) -> f64| latency.as_ref().map_or_else(|| "-".to_owned(), |all| time(of(all)));
    let cells = vec![
        backend.address.to_string(),
        backend.state.clone(),
        backend.weight.to_string(),
        percent(Some(backend.share_wanted)),
        percent(had),
        backend.active.to_string(),
        flows,
        time(|latency| latency.mean_us),
        time(|latency| latency.p50_us),
        time(|latency| latency.p99_us),
    ];
    Row { cells, is_bad: backend.failing, note: failures(backend, is_watched) }
}

/// What connects fail with, if any do: by the second, or since the backend was first seen where nobody has watched. What
/// the application or this host did is told as well, and after what the backend did.
fn failures(backend: &Backend, is_watched: bool) -> Option<String> {
    let failed = |ending: &Ending| !matches!(ending, Ending::Closed | Ending::Unknown);
    let (errors, others): (Vec<Ending>, Vec<Ending>) =
        Ending::ALL.into_iter().filter(failed).partition(|ending| ending.is_error());
    let tell = |ending: Ending| {
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
    let told: Vec<String> = errors.into_iter().chain(others).filter_map(tell).collect();
    (!told.is_empty()).then(|| told.join(", "))
}

/// A number by the second.
fn rate(rate: f64) -> String {
    match rate {
        rate if rate <= 0.0 => "0".to_owned(),
        rate if rate < 0.095 => format!("{rate:.2}"),
        rate if rate < 99.95 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

/// A time in three digits or so.
fn time(us: f64) -> String {
    match us {
        us if us >= LONGEST_US => format!(">{:.1}s", LONGEST_US / 1e6),
        us if us < 1e3 => format!("{us:.0}us"),
        us if us < 1e4 => format!("{:.1}ms", us / 1e3),
        us if us < 1e6 => format!("{:.0}ms", us / 1e3),
        us => format!("{:.1}s", us / 1e6),
    }
}

/// How connects ended, if some did not as usual. Each has one outcome, and five of these are balanced.
fn odd(outcomes: &OutcomeCounts) -> Option<String> {
    let OutcomeCounts { forwarded, fallback, overflowed, reused, untracked, refused, limited, passed } =
        *outcomes;
    let balanced =
        [forwarded, fallback, overflowed, reused, untracked].into_iter().fold(0, u64::saturating_add);
    let odd = [
        (fallback, "of them to the fallback"),
        (overflowed, "of them over the limit, to the least loaded"),
        (reused, "of them datagrams of flows that there were"),
        (untracked, "of them not in the active count (untracked)"),
        (refused, "refused"),
        (limited, "refused, all at their limit"),
        (passed, "passed unchanged"),
    ];
    let odd: Vec<String> =
        odd.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!odd.is_empty()).then(|| format!("connects: {balanced} balanced; {}", odd.join("; ")))
}

#[cfg(test)]
mod tests {
    use lb_common::abi::{self, BackendState};

    use super::*;
    use crate::window::Recent;
    use lb_kernel::{Counts, SlotView};

    #[test]
    fn connects_that_end_oddly_are_told_with_all_that_were_balanced() {
        let check = |counts: [u64; 5], expected: Option<&str>| {
            let [forwarded, fallback, untracked, refused, passed] = counts;
            let outcomes =
                OutcomeCounts { forwarded, fallback, untracked, refused, passed, ..OutcomeCounts::default() };
            assert_eq!(odd(&outcomes).as_deref(), expected, "{outcomes:?}");
        };
        check([128, 0, 0, 0, 0], None);
        check(
            [128, 0, 272, 0, 0],
            Some("connects: 400 balanced; 272 of them not in the active count (untracked)"),
        );
        check(
            [1, 2, 0, 3, 4],
            Some("connects: 3 balanced; 2 of them to the fallback; 3 refused; 4 passed unchanged"),
        );
    }

    fn service() -> Service {
        let slot = |slot: u32, state, weight| SlotView {
            slot,
            generation: 0,
            service: 0,
            address: format!("255.255.255.25{slot}:65535").parse().unwrap(),
            weight,
            entries: 0,
            state,
            usable: true,
        };
        let mut sums = abi::SlotCounters { chosen: 123_456_789, ..abi::SlotCounters::default() };
        (sums.connect.buckets[6], sums.connect.buckets[14], sums.connect.sum_us) = (980, 20, 1_300_000);
        (sums.endings[Ending::Refused as usize], sums.endings[Ending::NotSent as usize]) = (7, 2);
        let mut recent =
            Recent { seconds: 60.0, chosen: 740_736, connect: sums.connect, ..Recent::default() };
        (recent.endings[Ending::Refused as usize], recent.endings[Ending::GaveUp as usize]) = (720, 3);
        let counts = Counts { sums, active: 131_072, swept: 0 };
        let busy = Backend {
            share_wanted: 0.75,
            share_60s: Some(0.751),
            share: Some(0.75),
            ..Backend::of(&slot(0, BackendState::Unweighted, 65_535), &counts, Some(&recent))
        };
        let idle = Backend::of(
            &slot(1, BackendState::Healthy, 1),
            &Counts::default(),
            Some(&Recent { seconds: 60.0, ..Recent::default() }),
        );
        Service::with_backends(vec![busy, idle])
    }

    #[track_caller]
    fn check_table(service: &Service, expected: &str) {
        let mut text = String::new();
        one_service(&mut text, service, Style { colour: false });
        assert_eq!(text, expected);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "it fits a terminal of 100 columns: {widest:?}");
    }

    #[test]
    fn with_a_daemon_the_table_has_rates_and_fits_100_columns() {
        check_table(
            &service(),
            "service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
               backend                     state  weight  wanted     had  active  conn/s   mean    p50    p99\n  \
               255.255.255.250:65535  unweighted   65535  75.0 %  75.1 %  131072   12346  1.3ms  773us  197ms\n    \
                 refused 12.0/s, gave-up 0.05/s\n  \
               255.255.255.251:65535     healthy       1   0.0 %       -       0       0      -      -      -\n",
        );
    }

    #[test]
    fn a_backend_that_fails_is_marked_and_rows_are_in_the_order_of_addresses() {
        let mut service = service();
        service.backends.swap(0, 1);
        service.backends[0].failing = true;
        let mut text = String::new();
        one_service(&mut text, &service, Style { colour: false });
        let rows: Vec<&str> = text.lines().filter_map(|line| line.get(..16)).collect();
        assert_eq!(rows[2..], ["  255.255.255.25", "    refused 12.0", "! 255.255.255.25"]);
    }

    #[test]
    fn without_one_it_has_counts_since_the_start() {
        let mut service = service();
        for backend in &mut service.backends {
            (backend.rates_60s, backend.latency_60s, backend.share_60s) = (None, None, None);
        }
        service.backends.truncate(1);
        check_table(
            &service,
            "service users 10.96.0.10:80/tcp  table 1 of 1024 entries\n  \
               backend                     state  weight  wanted     had  active     chosen   mean    p50    p99\n  \
               255.255.255.250:65535  unweighted   65535  75.0 %  75.0 %  131072  123456789  1.3ms  773us  197ms\n    \
                 refused 7, not-sent 2\n",
        );
    }

    #[test]
    fn numbers_have_as_many_digits_as_mean_something() {
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
