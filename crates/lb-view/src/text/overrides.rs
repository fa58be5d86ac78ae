//! The text form of operators' overrides: one override per line, and its effect below.

use std::fmt::Write as _;

use lb_document::control::escaped;

use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, age, wrap};
use crate::answers::overrides::{OverrideStatus, OverridesDocument};

/// The overrides as text. `service`: the only service whose overrides the document contains; `None`
/// if it contains all. `now` is in seconds since 1970.
pub fn overrides(document: &OverridesDocument, service: Option<&str>, now: u64, style: Style) -> String {
    let mut text = String::new();
    let all = &document.overrides;
    if all.is_empty() {
        // If the stored overrides could not be read, some may nevertheless be in force. The line
        // below has the reason.
        let known = if document.not_kept.is_some() { " are known" } else { "" };
        let of = service.map(|service| format!(" of service {service}")).unwrap_or_default();
        let _ = writeln!(text, "no overrides{of}{known} on this host");
    } else {
        let table = table(&COLUMNS, all.len(), |number| row(&all[number], now), style);
        text = table.text;
        text.extend(left_out(&table.left_out));
    }
    if let Some(why) = &document.not_kept {
        let _ = writeln!(text, "{} {why}", style.paint("33", "degraded:"));
    }
    if let Some(lost) = &document.lost {
        let _ = writeln!(text, "{} {lost}", style.paint("33", "degraded:"));
    }
    wrap(text, style.width)
}

const COLUMNS: [Column<'static>; 7] = [
    Column::left("service", ALWAYS),
    Column::left("backend", ALWAYS),
    Column::left("override", ALWAYS),
    Column::left("client", 4),
    Column::right("since", 2),
    Column::right("ends in", 3),
    Column::left("by", 1),
];

fn row(status: &OverrideStatus, now: u64) -> TableRow {
    let OverrideStatus { of, clients, .. } = status;
    let end = of.until.map_or_else(|| "-".to_owned(), |until| age(until.saturating_sub(now)));
    let cells = vec![
        escaped(&of.scope.service).into_owned(),
        of.scope.backend.to_string(),
        of.kind.in_words(),
        of.scope.client.as_deref().map_or_else(|| "all".to_owned(), |client| escaped(client).into_owned()),
        age(now.saturating_sub(of.since)),
        end,
        if of.process == 0 {
            "the daemon".to_owned()
        } else {
            format!("user {} (pid {})", of.user, of.process)
        },
    ];
    let reason = of.reason.as_ref().map(|reason| format!("reason: {}", escaped(reason)));
    let without_effect = status.why_no_effect().map(|why| format!("no effect: {why}"));
    let effects = clients.iter().map(|effect| effect.describe(of.kind));
    let notes: Vec<String> = reason.into_iter().chain(without_effect).chain(effects).collect();
    TableRow { cells, is_bad: false, note: (!notes.is_empty()).then(|| notes.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::overrides::tests::{effect, status};
    use crate::answers::overrides::{OverrideKind, SCHEMA};

    fn document() -> OverridesDocument {
        let mut drain = status(1, OverrideKind::Drain, vec![effect("web", 3, 0.0), effect("batch", 0, 0.0)]);
        (drain.of.reason, drain.of.until) = (Some("new kernel".to_owned()), Some(4_700));
        let mut weight = status(2, OverrideKind::Weight { percent: 50 }, Vec::new());
        (weight.of.scope.client, weight.is_listed) = (Some("web".to_owned()), false);
        let not_kept = Some("cannot store the overrides (No space left on device)".to_owned());
        OverridesDocument { schema: SCHEMA, overrides: vec![drain, weight], not_kept, lost: None }
    }

    #[test]
    fn each_override_shows_author_times_reason_and_effect() {
        assert_eq!(
            overrides(&document(), None, 1_100, Style::default()),
            "  service  backend      override     client  since  ends in  by\n  \
               users    10.0.0.1:80  drain        all     1m40s    1h00m  user 1000 (pid 4711)\n    \
                 reason: new kernel; client web: 3 open flows; client batch: 0 open flows\n  \
               users    10.0.0.2:80  weight 50 %  web     1m40s        -  user 1000 (pid 4711)\n    \
                 no effect: not in the list\n\
             degraded: cannot store the overrides (No space left on device)\n"
        );
        let mut adopted =
            OverridesDocument { not_kept: None, lost: Some("weights".to_owned()), ..document() };
        adopted.overrides.truncate(1);
        (adopted.overrides[0].of.process, adopted.overrides[0].is_configured) = (0, false);
        assert_eq!(
            overrides(&adopted, None, 1_100, Style::default()),
            "  service  backend      override  client  since  ends in  by\n  \
               users    10.0.0.1:80  drain     all     1m40s    1h00m  the daemon\n    \
                 reason: new kernel; no effect: no such service in the configuration; client web: 3 open flows; \
             client batch: 0 open flows\n\
             degraded: weights\n"
        );
        let none = OverridesDocument { overrides: Vec::new(), not_kept: None, ..document() };
        assert_eq!(overrides(&none, None, 0, Style::default()), "no overrides on this host\n");
        let of_one = overrides(&none, Some("users"), 0, Style::default());
        assert_eq!(of_one, "no overrides of service users on this host\n");
        let unread = OverridesDocument { not_kept: document().not_kept, ..none };
        let text = overrides(&unread, None, 0, Style::default());
        assert!(text.starts_with("no overrides are known on this host\ndegraded: "), "{text}");
        let text = overrides(&unread, Some("users"), 0, Style::default());
        assert!(text.starts_with("no overrides of service users are known on this host\n"), "{text}");
    }

    #[test]
    fn control_characters_of_a_stored_override_are_escaped() {
        let mut document = OverridesDocument { not_kept: None, ..document() };
        document.overrides.truncate(1);
        let of = &mut document.overrides[0].of;
        (of.scope.service, of.scope.client) = ("u\u{9b}".to_owned(), Some("w\u{202e}".to_owned()));
        of.reason = Some("new\u{1b}[31m\nkernel".to_owned());
        let text = overrides(&document, None, 1_100, Style::default());
        assert!(!text.contains(|c: char| c != '\n' && lb_document::control::is_obeyed(c)), "{text:?}");
        assert!(text.contains("reason: new\\u{1b}[31m\\u{a}kernel; client web"), "{text}");
        assert!(text.contains("u\\u{9b}  10.0.0.1:80  drain     w\\u{202e}"), "{text}");
    }

    #[test]
    fn an_override_without_effect_has_the_reason() {
        let mut one = status(1, OverrideKind::Drain, Vec::new());
        assert_eq!(one.why_no_effect(), None);
        (one.is_configured, one.is_listed) = (false, false);
        assert_eq!(one.why_no_effect().as_deref(), Some("no such service in the configuration"));
        one.of.scope.client = Some("web".to_owned());
        let expected = "client web has no such service in the configuration";
        assert_eq!(one.why_no_effect().as_deref(), Some(expected));
        for (percent, expected) in [
            (0, Some("a weight must be from 1 % to 1000 %")),
            (1_000, None),
            (1_001, Some("a weight must be from 1 % to 1000 %")),
        ] {
            let weight = status(1, OverrideKind::Weight { percent }, Vec::new());
            assert_eq!(weight.why_no_effect().as_deref(), expected, "{percent}");
        }
    }

    #[test]
    fn a_narrow_terminal_shows_what_and_where() {
        let style = Style { colour: false, width: Some(50) };
        let text = overrides(&OverridesDocument { not_kept: None, ..document() }, None, 1_100, style);
        assert!(text.lines().all(|line| line.chars().count() <= 50), "{text}");
        assert!(text.contains("weight 50 %") && text.contains("since, ends in, by left out"), "{text}");
    }
}
