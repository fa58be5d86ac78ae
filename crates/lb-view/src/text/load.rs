//! The text form of weights that follow load. Each service has a table of its members, which also
//! shows why a factor is held.

use std::fmt::Write as _;

use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, percent, wrap};
use crate::load::{ClientLoad, LoadDocument, MemberLoadStatus, ServiceLoadStatus};

pub fn loads(loads: &LoadDocument, style: Style) -> String {
    let mut text = String::new();
    let mut missing = Vec::new();
    for (number, ClientLoad { client, service, load }) in loads.services.iter().enumerate() {
        if number > 0 {
            text.push('\n');
        }
        let (client, service) = (style.paint("1", client), style.paint("1", service));
        let _ = writeln!(text, "client {client}, service {service}: {}", describe(load));
        let members = &load.members;
        let is_observed = load.mode == "observe";
        let table = table(&columns(is_observed), members.len(), |at| row(&members[at], is_observed), style);
        text.push_str(&table.text);
        for title in table.left_out {
            if !missing.contains(&title) {
                missing.push(title);
            }
        }
    }
    text.extend(left_out(&missing));
    wrap(text, style.width)
}

/// One line about a service: what changes the weights, how fast, and how many members report.
pub fn describe(load: &ServiceLoadStatus) -> String {
    let mut parts = Vec::new();
    if let Some(control) = &load.control {
        let state = match (load.switch.as_str(), load.mode.as_str()) {
            ("freeze", _) => ", frozen by an operator",
            ("off", _) => ", switched off by an operator",
            (_, "observe") => " (observe only): weights are not changed",
            _ => "",
        };
        parts.push(format!("{control}{state}"));
        parts.push(if load.is_idle {
            "idle: members are polled rarely".to_owned()
        } else {
            format!("{} of {} members report", load.reporting, load.expected)
        });
        parts.push(format!("mean flow lifetime {}", span(load.flows_live_s)));
    }
    if let Some(settling) = load.settling_s {
        parts.push(format!("converges in about {}", span(settling)));
    }
    if let Some(slow_start) = load.slow_start_s {
        parts.push(format!("slow start of {}", span(slow_start)));
    }
    parts.join("; ")
}

/// The columns of a service's members. The reported load is the most important column; the results
/// of load control are next.
fn columns(is_observed: bool) -> [Column<'static>; 6] {
    [
        Column::left("backend", ALWAYS),
        Column::right("utilization", 5),
        Column::right("age", 1),
        Column::right(if is_observed { "would be" } else { "factor" }, 4),
        Column::right("share", 3),
        Column::left("held by", 2),
    ]
}

fn row(member: &MemberLoadStatus, is_observed: bool) -> TableRow {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let factor = if is_observed { member.wanted } else { member.factor };
    TableRow::of(vec![
        member.address.to_string(),
        or_none(member.utilization.map(|used| format!("{used:.2}"))),
        or_none(member.age_s.map(|age| format!("{age:.1}s"))),
        format!("{factor:.2}"),
        percent(Some(member.share)),
        or_none(member.held_by.clone()),
    ])
}

/// A duration with about two significant digits.
pub fn span(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 0.0995 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 9.95 => format!("{seconds:.1} s"),
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds if seconds < 7_200.0 => format!("{:.0} min", seconds / 60.0),
        seconds => format!("{:.0} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::SCHEMA;
    use crate::load::tests::{member, service};

    #[test]
    fn each_member_has_a_row_with_its_load_and_factor() {
        let held = MemberLoadStatus { held_by: Some("no-report".to_owned()), ..member(2, None, 1.0) };
        let load = service(vec![member(1, Some(0.8), 1.5), held]);
        let one = ClientLoad { client: "web".to_owned(), service: "users".to_owned(), load };
        let of = |load| {
            let whole = LoadDocument { schema: SCHEMA, services: vec![ClientLoad { load, ..one.clone() }] };
            loads(&whole, Style::default())
        };
        assert_eq!(
            of(one.load.clone()),
            "client web, service users: feedback; 1 of 2 members report; mean flow lifetime 30 s; converges in about \
             2 min\n  \
               backend     utilization   age  factor   share  held by\n  \
               10.0.0.1:1         0.80  1.2s    1.50  50.0 %  -\n  \
               10.0.0.1:2            -     -    1.00  50.0 %  no-report\n"
        );
        let observed = ServiceLoadStatus {
            mode: "observe".to_owned(),
            ..service(vec![MemberLoadStatus { factor: 1.0, ..member(1, Some(0.8), 1.5) }])
        };
        let text = of(observed);
        assert!(
            text.contains("feedback (observe only): weights are not changed; 1 of 1")
                && text.contains("would be"),
            "{text}"
        );
        assert!(text.contains("1.50"), "{text}");
        let idle = ServiceLoadStatus { is_idle: true, reporting: 0, expected: 0, ..one.load.clone() };
        assert!(of(idle).contains("feedback; idle: members are polled rarely; mean flow lifetime 30 s;"));
        let slow = ServiceLoadStatus {
            control: None,
            settling_s: None,
            slow_start_s: Some(10.0),
            ..one.load.clone()
        };
        assert!(of(slow).starts_with("client web, service users: slow start of 10 s\n"));
    }

    #[test]
    fn spans_are_short() {
        let spans = [0.02, 2.5, 45.0, 300.0, 40_000.0].map(span);
        assert_eq!(spans, ["20 ms", "2.5 s", "45 s", "5 min", "11 h"]);
    }
}
