//! The text form of a comparison.

use std::fmt::Write as _;

use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, percent, wrap};
use crate::comparison::{
    BackendChange, ChangeKind, Comparison, ConfigurationChange, KeyChange, ShareChanges,
};

/// Values are cut after this number of characters, because a list may have thousands of endpoints.
const LONGEST: usize = 60;

pub fn comparison(comparison: &Comparison, style: Style) -> String {
    let Comparison { file, from_daemon, clients, services, host, shares, unchangeable, .. } = comparison;
    let mut text = String::new();
    let with =
        if *from_daemon { "the running daemon" } else { "the pinned maps, which do not have all keys" };
    let _ = writeln!(text, "{} compared with {with}", file.display());
    if comparison.is_empty() {
        text.push_str("nothing would change\n");
    }
    for change in clients {
        one(&mut text, "client", change, style);
    }
    for change in services {
        one(&mut text, "service", change, style);
    }
    for change in host {
        let _ = writeln!(text, "{}", key(change));
    }
    for change in shares {
        the_shares(&mut text, change, style);
    }
    for what in unchangeable {
        let _ = writeln!(text, "{} {what}", style.paint("33", "not while running:"));
    }
    wrap(text, style.width)
}

fn one(text: &mut String, what: &str, change: &ConfigurationChange, style: Style) {
    let ConfigurationChange { name, kind, keys, active } = change;
    let flows = match active {
        Some(1) => "; 1 open flow, which continues until it ends".to_owned(),
        Some(active @ 2..) => format!("; {active} open flows, which continue until they end"),
        Some(0) | None => String::new(),
    };
    let _ = writeln!(text, "{what} {} {}{flows}", style.paint("1", name), kind.name());
    for change in keys {
        let _ = writeln!(text, "  {}", key(change));
    }
}

fn key(change: &KeyChange) -> String {
    let KeyChange { key, before, after } = change;
    format!("{key}: {} -> {}", short(before), short(after))
}

fn short(value: &str) -> String {
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} ...", &value[..end]),
        None => value.to_owned(),
    }
}

fn the_shares(text: &mut String, change: &ShareChanges, style: Style) {
    let ShareChanges { client, service, backends, unchanged } = change;
    let of_kind = |kind: ChangeKind| {
        let count = backends.iter().filter(|backend| backend.kind == kind).count();
        (count > 0).then(|| format!("{count} {}", kind.name()))
    };
    let mut counts: Vec<String> = ChangeKind::ALL.into_iter().filter_map(of_kind).collect();
    counts.push(format!("{unchanged} as before"));
    let (client, service) = (style.paint("1", client), style.paint("1", service));
    let _ = writeln!(text, "client {client}, service {service}: backends {}", counts.join(", "));
    let table = table(&COLUMNS, backends.len(), |number| row(&backends[number]), style);
    text.push_str(&table.text);
    text.extend(left_out(&table.left_out));
}

const COLUMNS: [Column<'_>; 6] = [
    Column::left("backend", ALWAYS),
    Column::left("change", ALWAYS),
    Column::right("before", 3),
    Column::right("after", 4),
    Column::right("weight", 1),
    Column::right("active", 2),
];

fn row(change: &BackendChange) -> TableRow {
    let weight = match (change.weight_before, change.weight_after) {
        (Some(before), Some(after)) if before != after => format!("{before} -> {after}"),
        (Some(weight), _) | (None, Some(weight)) => weight.to_string(),
        (None, None) => "-".to_owned(),
    };
    let active = if change.kind == ChangeKind::Added { "-".to_owned() } else { change.active.to_string() };
    TableRow::of(vec![
        change.address.to_string(),
        change.kind.name().to_owned(),
        percent(change.before),
        percent(change.after),
        weight,
        active,
    ])
}

/// The changes in one line for a log. The line has at most `most` names for each kind of change,
/// and at most `most` keys for each changed item.
pub fn changes_in_a_line(
    clients: &[ConfigurationChange],
    services: &[ConfigurationChange],
    host: &[KeyChange],
    most: usize,
) -> String {
    let mut parts = Vec::new();
    for (what, changes) in [("clients", clients), ("services", services)] {
        for kind in ChangeKind::ALL {
            let of_kind: Vec<&ConfigurationChange> =
                changes.iter().filter(|change| change.kind == kind).collect();
            let name = |change: &&ConfigurationChange| match change.keys.as_slice() {
                [] => change.name.clone(),
                keys => {
                    format!("{} ({})", change.name, names(keys.iter().map(|change| change.key.clone()), most))
                }
            };
            if !of_kind.is_empty() {
                parts.push(format!("{what} {}: {}", kind.name(), names(of_kind.iter().map(name), most)));
            }
        }
    }
    if !host.is_empty() {
        parts.push(format!("changed: {}", names(host.iter().map(|change| change.key.clone()), most)));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
}

/// The first `most` names, and the number of the other names.
pub fn names(names: impl ExactSizeIterator<Item = String>, most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let mut text = names.take(most).collect::<Vec<_>>().join(", ");
    if more > 0 {
        let _ = write!(text, " and {more} more");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(
        name: &str,
        kind: ChangeKind,
        keys: &[(&str, &str, &str)],
        active: Option<u64>,
    ) -> ConfigurationChange {
        let keys = keys.iter().map(|(key, before, after)| KeyChange {
            key: (*key).to_owned(),
            before: (*before).to_owned(),
            after: (*after).to_owned(),
        });
        ConfigurationChange { name: name.to_owned(), kind, keys: keys.collect(), active }
    }

    fn empty() -> Comparison {
        Comparison {
            schema: 1,
            file: "new.toml".into(),
            from_daemon: true,
            clients: Vec::new(),
            services: Vec::new(),
            host: Vec::new(),
            shares: Vec::new(),
            unchangeable: Vec::new(),
        }
    }

    #[test]
    fn a_file_without_changes_is_reported() {
        let text = comparison(&empty(), Style::default());
        assert_eq!(text, "new.toml compared with the running daemon\nnothing would change\n");
    }

    #[test]
    fn a_comparison_lists_configuration_changes_before_shares() {
        let long = "a".repeat(61);
        let backend = |port: u16, kind, before, after, weights: (Option<u32>, Option<u32>)| BackendChange {
            address: ([10, 0, 0, 1], port).into(),
            kind,
            before,
            after,
            weight_before: weights.0,
            weight_after: weights.1,
            active: 7,
        };
        let whole = Comparison {
            from_daemon: false,
            clients: vec![change("web", ChangeKind::Changed, &[("index", "0", "1")], None)],
            services: vec![
                change("mail", ChangeKind::Removed, &[], Some(3)),
                change("users", ChangeKind::Changed, &[("backends", &long, "file /x")], None),
            ],
            host: change("", ChangeKind::Changed, &[("limits.slots", "64", "128")], None).keys,
            shares: vec![ShareChanges {
                client: "web".to_owned(),
                service: "users".to_owned(),
                backends: vec![
                    backend(1, ChangeKind::Changed, Some(0.5), Some(0.25), (Some(1), Some(1))),
                    backend(2, ChangeKind::Removed, Some(0.5), None, (Some(1), None)),
                    backend(3, ChangeKind::Added, None, Some(0.75), (None, Some(3))),
                    backend(4, ChangeKind::Changed, Some(0.5), Some(0.5), (Some(1), Some(2))),
                ],
                unchanged: 2,
            }],
            unchangeable: vec!["limits.slots cannot change while running".to_owned()],
            ..empty()
        };
        let expected = format!(
            "new.toml compared with the pinned maps, which do not have all keys\n\
             client web changed\n  \
               index: 0 -> 1\n\
             service mail removed; 3 open flows, which continue until they end\n\
             service users changed\n  \
               backends: {} ... -> file /x\n\
             limits.slots: 64 -> 128\n\
             client web, service users: backends 1 added, 1 removed, 2 changed, 2 as before\n  \
               backend     change   before   after  weight  active\n  \
               10.0.0.1:1  changed  50.0 %  25.0 %       1       7\n  \
               10.0.0.1:2  removed  50.0 %       -       1       7\n  \
               10.0.0.1:3  added         -  75.0 %       3       -\n  \
               10.0.0.1:4  changed  50.0 %  50.0 %  1 -> 2       7\n\
             not while running: limits.slots cannot change while running\n",
            &long[..60]
        );
        assert_eq!(comparison(&whole, Style::default()), expected);
    }

    #[test]
    fn a_log_line_names_a_bounded_number_of_changes() {
        let many: Vec<ConfigurationChange> =
            (0..12).map(|n| change(&format!("s{n}"), ChangeKind::Added, &[], None)).collect();
        let changed =
            [change("web", ChangeKind::Changed, &[("a", "", ""), ("b", "", ""), ("c", "", "")], None)];
        assert_eq!(
            changes_in_a_line(&changed, &many, &changed[0].keys, 2),
            "clients changed: web (a, b and 1 more); services added: s0, s1 and 10 more; changed: a, b and 1 more"
        );
        assert_eq!(changes_in_a_line(&[], &[], &[], 2), "nothing");
    }
}
