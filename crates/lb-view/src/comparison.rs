//! The differences between a configuration and the configuration in force: clients, services and
//! their keys, and the share of each backend at each client task.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::configured::{Keys, NONE};

pub const SCHEMA: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    pub schema: u32,
    pub file: PathBuf,
    /// Whether a running daemon of this version supplied the configuration in force. If not, the
    /// command has read it from the pinned maps, which do not contain all keys.
    pub from_daemon: bool,
    pub clients: Vec<ConfigurationChange>,
    pub services: Vec<ConfigurationChange>,
    /// Changed keys that belong to no client and no service.
    pub host: Vec<KeyChange>,
    pub shares: Vec<ShareChanges>,
    /// Changes that the daemon cannot make while it runs, each with the steps that the change
    /// requires.
    pub unchangeable: Vec<String>,
}

impl Comparison {
    pub fn is_empty(&self) -> bool {
        let Self { schema: _, file: _, from_daemon: _, clients, services, host, shares, unchangeable } = self;
        clients.is_empty()
            && services.is_empty()
            && host.is_empty()
            && shares.is_empty()
            && unchangeable.is_empty()
    }
}

lb_core::named! {
    /// How an item with a name or an address changes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum ChangeKind {
        Added = "added",
        Removed = "removed",
        /// The item exists before and after the change, with different values.
        Changed = "changed",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigurationChange {
    pub name: String,
    pub kind: ChangeKind,
    /// The keys that change; empty unless `kind` is [`ChangeKind::Changed`].
    pub keys: Vec<KeyChange>,
    /// The number of open flows of a removed client or service. These flows continue until they
    /// end.
    pub active: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyChange {
    pub key: String,
    pub before: String,
    pub after: String,
}

/// How the shares of one service change at one client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareChanges {
    pub client: String,
    pub service: String,
    /// The backends that change, in the order of their addresses.
    pub backends: Vec<BackendChange>,
    /// The number of backends that do not change.
    pub unchanged: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendChange {
    pub address: SocketAddr,
    pub kind: ChangeKind,
    /// The backend's share of the table before the change; `None` if the backend is added.
    pub before: Option<f64>,
    /// The backend's share of the table after the change; `None` if the backend is removed.
    pub after: Option<f64>,
    pub weight_before: Option<u32>,
    pub weight_after: Option<u32>,
    /// The number of open flows to the backend. These flows continue until they end, even if the
    /// backend is removed.
    pub active: u64,
}

/// The keys that differ. If one of the two configurations does not have a key but has the key's
/// table, the value is [`NONE`]. If that configuration does not have the table either, the key is
/// left out, because the pinned maps do not contain all keys.
pub fn keys(before: &Keys, after: &Keys) -> Vec<KeyChange> {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let change = |key: &String| {
        let value =
            |side: &Keys| side.get(key).cloned().or_else(|| has_table_of(side, key).then(|| NONE.to_owned()));
        let (before, after) = (value(before)?, value(after)?);
        (before != after).then(|| KeyChange { key: key.clone(), before, after })
    };
    names.into_iter().filter_map(change).collect()
}

/// Whether a configuration has the table of a key; for `ejection.base`, the table is `ejection`.
fn has_table_of(side: &Keys, key: &str) -> bool {
    let Some((table, _)) = key.split_once('.') else { return false };
    let first = side.range(table.to_owned()..).next();
    first.is_some_and(|(name, _)| {
        name == table || name.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'))
    })
}

/// The clients or services that differ, in the order of their names.
pub fn changes(before: &BTreeMap<String, Keys>, after: &BTreeMap<String, Keys>) -> Vec<ConfigurationChange> {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let change = |name: &String| {
        let (kind, keys) = match (before.get(name), after.get(name)) {
            (Some(before), Some(after)) => (ChangeKind::Changed, keys(before, after)),
            (None, _) => (ChangeKind::Added, Vec::new()),
            (_, None) => (ChangeKind::Removed, Vec::new()),
        };
        let is_any = kind != ChangeKind::Changed || !keys.is_empty();
        is_any.then(|| ConfigurationChange { name: name.clone(), kind, keys, active: None })
    };
    names.into_iter().filter_map(change).collect()
}

/// A backend's part of the table at one client task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    pub share: f64,
    pub weight: u32,
    pub active: u64,
}

/// The backends of one service at a client task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendShares {
    /// The number of entries of the table.
    pub entries: u32,
    pub backends: BTreeMap<SocketAddr, Part>,
}

/// The backends that differ, and the number of backends that do not. A difference of one entry
/// between shares is ignored: of two backends with equal weight, one may get an entry more,
/// depending on the order in which they were added.
pub fn backends(before: &BackendShares, after: &BackendShares) -> (Vec<BackendChange>, usize) {
    let entry = 1.0 / f64::from(before.entries.min(after.entries).max(1)) + 1e-9;
    let addresses: BTreeSet<SocketAddr> =
        before.backends.keys().chain(after.backends.keys()).copied().collect();
    let all = addresses.len();
    let change = |address: SocketAddr| {
        let (before, after) = (before.backends.get(&address), after.backends.get(&address));
        let kind = match (before, after) {
            (Some(before), Some(after)) => {
                let is_same = before.weight == after.weight && (before.share - after.share).abs() <= entry;
                (!is_same).then_some(ChangeKind::Changed)?
            }
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
        };
        Some(BackendChange {
            address,
            kind,
            before: before.map(|part| part.share),
            after: after.map(|part| part.share),
            weight_before: before.map(|part| part.weight),
            weight_after: after.map(|part| part.weight),
            active: before.map_or(0, |part| part.active),
        })
    };
    let changed: Vec<BackendChange> = addresses.into_iter().filter_map(change).collect();
    let unchanged = all - changed.len();
    (changed, unchanged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(all: &[(&str, &[(&str, &str)])]) -> BTreeMap<String, Keys> {
        let keys = |keys: &[(&str, &str)]| {
            keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        all.iter().map(|(name, of)| ((*name).to_owned(), keys(of))).collect()
    }

    #[test]
    fn a_comparison_lists_changes_by_name_and_key() {
        let before =
            named(&[("a", &[("policy", "p2c"), ("subset", "all")]), ("b", &[]), ("c", &[("x", "1")])]);
        let after =
            named(&[("a", &[("policy", "random"), ("subset", "all")]), ("c", &[("y", "2")]), ("d", &[])]);
        let change =
            |name: &str, kind, keys| ConfigurationChange { name: name.to_owned(), kind, keys, active: None };
        let policy =
            KeyChange { key: "policy".to_owned(), before: "p2c".to_owned(), after: "random".to_owned() };
        let expected = [
            change("a", ChangeKind::Changed, vec![policy]),
            change("b", ChangeKind::Removed, Vec::new()),
            change("d", ChangeKind::Added, Vec::new()),
        ];
        assert_eq!(changes(&before, &after), expected);
        assert_eq!(changes(&after, &after), []);
    }

    #[test]
    fn a_missing_key_is_none_if_its_table_exists() {
        let of = |pairs: &[(&str, &str)]| named(&[("", pairs)]).remove("").unwrap();
        let shown = |before: &[(&str, &str)], after: &[(&str, &str)]| {
            let changes = keys(&of(before), &of(after)).into_iter();
            changes
                .map(|change| format!("{} {} {}", change.key, change.before, change.after))
                .collect::<Vec<_>>()
        };
        let (on, off) = ([("ejection", "on"), ("ejection.base", "5s")], [("ejection", "off")]);
        assert_eq!(shown(&off, &on), ["ejection off on", "ejection.base none 5s"]);
        assert_eq!(shown(&on, &off), ["ejection on off", "ejection.base 5s none"]);
        assert_eq!(
            shown(&[("health.probe", "none")], &[("health.probe", "none"), ("health.port", "none")]),
            [""; 0]
        );
        assert_eq!(shown(&[], &on), [""; 0], "the pinned maps do not have the table");
        assert_eq!(shown(&[("ejections", "1")], &on), [""; 0], "another key with the same prefix");
    }

    #[test]
    fn one_entry_more_or_less_is_no_change() {
        let parts = |entries: u32, parts: &[(u16, u32, u32)]| BackendShares {
            entries,
            backends: parts
                .iter()
                .map(|&(port, weight, part)| {
                    let share = f64::from(part) / f64::from(entries);
                    (([10, 0, 0, 1], port).into(), Part { share, weight, active: u64::from(port) })
                })
                .collect(),
        };
        let check = |before: &BackendShares,
                     after: &BackendShares,
                     expected: &[(u16, ChangeKind, u64)],
                     unchanged: usize| {
            let (changed, same) = backends(before, after);
            let seen: Vec<_> =
                changed.iter().map(|change| (change.address.port(), change.kind, change.active)).collect();
            assert_eq!((seen.as_slice(), same), (expected, unchanged));
        };
        let thirds = parts(1024, &[(1, 1, 342), (2, 1, 341), (3, 1, 341)]);
        check(&thirds, &thirds, &[], 3);
        check(&thirds, &parts(1024, &[(1, 1, 341), (2, 1, 341), (3, 1, 342)]), &[], 3);
        let halves = parts(1024, &[(1, 1, 512), (4, 1, 512)]);
        let expected = [
            (1, ChangeKind::Changed, 1),
            (2, ChangeKind::Removed, 2),
            (3, ChangeKind::Removed, 3),
            (4, ChangeKind::Added, 0),
        ];
        check(&thirds, &halves, &expected, 0);
        // If all weights are doubled, the shares do not change, but the backends are reported as
        // changed.
        let doubled = parts(1024, &[(1, 2, 512), (4, 2, 512)]);
        check(&halves, &doubled, &[(1, ChangeKind::Changed, 1), (4, ChangeKind::Changed, 4)], 0);
        check(&BackendShares::default(), &BackendShares::default(), &[], 0);
    }
}
