//! The text form of active flows: one flow per line, oldest first.

use std::fmt::Write as _;

use lb_common::abi::Reason;

use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, wrap};
use crate::filter::Filter;
use crate::flows::ActiveFlow;
use crate::status::LeavingClient;

/// The flows to show. A flow is built only when it is shown, because there may be 100,000 flows.
pub struct Listing<'l, F> {
    pub count: usize,
    /// Builds a flow from its number; number 0 is the oldest.
    pub flow: F,
    /// Whether the flows belong to more than one client.
    pub has_many_clients: bool,
    /// Leaving clients of another version.
    pub leaving: &'l [LeavingClient],
    /// Clients with maps that could not be read, each with the reason.
    pub unreadable: &'l [String],
}

pub fn flows<'f, F: Fn(usize) -> ActiveFlow<'f>>(
    listing: &Listing<'_, F>,
    filter: &Filter,
    style: Style,
) -> String {
    let mut text = String::new();
    if listing.count == 0 {
        let _ = writeln!(text, "no active flows{}", filter_words(filter));
    } else {
        let row = |number| TableRow::of(row(&(listing.flow)(number), listing.has_many_clients));
        let table = table(&columns(listing.has_many_clients), listing.count, row, style);
        text = table.text;
        text.extend(left_out(&table.left_out));
    }
    for leaving in listing.leaving {
        let _ = writeln!(
            text,
            "client {} of another version (ABI {}) {}; only that version can list them",
            leaving.client,
            leaving.abi,
            leaving.describe()
        );
    }
    for problem in listing.unreadable {
        let _ = writeln!(text, "{} {problem}", style.paint("33", "degraded:"));
    }
    wrap(text, style.width)
}

fn filter_words(filter: &Filter) -> String {
    let Filter { client, service, backend } = filter;
    let mut text = String::new();
    let of = [
        ("client", client.clone()),
        ("service", service.clone()),
        ("backend", backend.map(|b| b.to_string())),
    ];
    for (kind, name) in of {
        if let Some(name) = name {
            let _ = write!(text, "{} {kind} {name}", if text.is_empty() { " of" } else { "," });
        }
    }
    text
}

/// The columns of the list of flows. If the terminal is narrow, the phase is omitted first, and
/// then the reason, which is the widest column.
fn columns(has_clients: bool) -> Vec<Column<'static>> {
    let mut columns = vec![
        Column::right("age", 5),
        Column::left("process", 6),
        Column::left("client", 3),
        Column::left("service", 4),
        Column::left("backend", ALWAYS),
        Column::left("state", ALWAYS),
        Column::left("phase", 1),
        Column::left("why", 2),
    ];
    columns.retain(|column| has_clients || column.title != "client");
    columns
}

fn row(flow: &ActiveFlow<'_>, has_clients: bool) -> Vec<String> {
    let process = flow.process_name.as_deref().unwrap_or("?");
    let mut row = vec![age(flow.age_s), format!("{process} ({})", flow.process)];
    if has_clients {
        row.push(flow.client.to_string());
    }
    row.extend([
        flow.service.as_deref().unwrap_or("?").to_owned(),
        flow.backend.map_or_else(|| format!("slot {}", flow.slot), |backend| backend.to_string()),
        flow.state.to_string(),
        flow.phase.to_string(),
        why(flow),
    ]);
    row
}

/// Why the flow goes to this backend: the policy, the reason, and the backend's part of the table.
fn why(flow: &ActiveFlow<'_>) -> String {
    let entries = match (flow.table_share, flow.table_entries) {
        (Some(share), _) => format!("{:.1} %", 100.0 * share),
        (None, 1) => "1 entry".to_owned(),
        (None, entries) => format!("{entries} entries"),
    };
    let reason =
        if flow.reason == Reason::Picked.name() { String::new() } else { format!(", {}", flow.reason) };
    format!("{}{reason}, {entries} of table {}", flow.policy, flow.table_generation)
}

/// An age, with tenths of a second if it is short.
fn age(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an age for people")]
    let whole = seconds.max(0.0) as u64;
    if whole < 10 { format!("{seconds:.1}s") } else { super::age(whole) }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::Phase;

    use super::*;

    #[test]
    fn an_age_has_two_units() {
        let ages = [0.0, 9.94, 10.0, 59.9, 60.0, 3599.0, 3600.0, 86_399.0, 86_400.0, 1e6];
        let expected =
            ["0.0s", "9.9s", "10s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "11d13h"];
        assert_eq!(ages.map(age), expected);
    }

    fn flow() -> ActiveFlow<'static> {
        ActiveFlow {
            client: "web".into(),
            service: Some("users".into()),
            address: Some(([10, 96, 0, 10], 80).into()),
            backend: Some(([10, 0, 0, 1], 8080).into()),
            slot: 3,
            generation: 1,
            state: "healthy".into(),
            phase: Phase::Established.name().into(),
            process: 4711,
            process_name: Some("nginx".into()),
            age_s: 62.0,
            policy: "p2c".into(),
            reason: Reason::Picked.name().into(),
            table_generation: 7,
            table_entries: 512,
            table_share: Some(0.5),
            sample: 1,
            cookie: 2,
            namespace: 3,
        }
    }

    #[test]
    fn a_flow_is_shown_with_the_reason_for_its_backend() {
        let line = |flow: &ActiveFlow<'_>| row(flow, false).join(" | ");
        assert_eq!(
            line(&flow()),
            "1m02s | nginx (4711) | users | 10.0.0.1:8080 | healthy | established | p2c, 50.0 % of table 7"
        );
        // An odd flow: its process has ended, its table is not the current one, and its slot has
        // another backend, which must not happen.
        let odd = ActiveFlow {
            process_name: None,
            backend: None,
            state: "another backend".into(),
            reason: Reason::Fallback.name().into(),
            table_share: None,
            ..flow()
        };
        assert_eq!(
            line(&odd),
            "1m02s | ? (4711) | users | slot 3 | another backend | established | p2c, fallback, 512 entries of table 7"
        );
        assert_eq!(row(&flow(), true)[2], "web");
        assert_eq!(row(&flow(), true).len(), columns(true).len());
    }

    #[test]
    fn the_list_is_no_wider_than_its_terminal() {
        #[track_caller]
        fn check(width: usize, expected: &str) {
            let flow = |_| ActiveFlow { service: Some("a-service-with-a-name".into()), ..flow() };
            let listing = Listing { count: 1, flow, has_many_clients: true, leaving: &[], unreadable: &[] };
            let style = Style { colour: false, width: Some(width) };
            assert_eq!(flows(&listing, &Filter::default(), style), expected);
        }
        check(
            200,
            "    age  process       client  service                backend        state    phase        why\n  \
               1m02s  nginx (4711)  web     a-service-with-a-name  10.0.0.1:8080  healthy  established  p2c, 50.0 % of table 7\n",
        );
        check(
            120,
            "    age  process       client  service                backend        state    phase        why\n  \
               1m02s  nginx (4711)  web     a-service-with-a-name  10.0.0.1:8080  healthy  established  p2c, 50.0 % of table 7\n",
        );
        check(
            80,
            "    age  process       client  service                backend        state\n  \
               1m02s  nginx (4711)  web     a-service-with-a-name  10.0.0.1:8080  healthy\n\
             (narrow terminal: phase, why left out)\n",
        );
        check(
            40,
            "  process       backend        state\n  \
               nginx (4711)  10.0.0.1:8080  healthy\n\
             (narrow terminal: age, client, service,\n  \
               phase, why left out)\n",
        );
    }

    #[test]
    fn an_empty_list_names_its_filter() {
        let mut filter = Filter::default();
        assert_eq!(filter_words(&filter), "");
        filter.service = Some("users".to_owned());
        assert_eq!(filter_words(&filter), " of service users");
        filter.client = Some("web".to_owned());
        filter.backend = Some(([10, 0, 0, 1], 80).into());
        assert_eq!(filter_words(&filter), " of client web, service users, backend 10.0.0.1:80");
    }
}
