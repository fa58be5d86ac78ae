//! The operators' overrides of a host: backends that are drained, and weights that are multiplied.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_document::control::is_obeyed;
use serde::{Deserialize, Deserializer, Serialize};

use crate::text::{age, counted, percent};

pub const SCHEMA: u32 = 2;

/// The largest percentage of a weight.
pub const MAX_PERCENT: u16 = 1_000;

/// The longest time after which an override ends by itself: a year.
pub const MAX_DURATION: Duration = Duration::from_hours(365 * 24);

/// The error for a time that cannot be parsed or is not in the limits.
pub const WRITE_A_TIME: &str =
    "write a number with the unit s, m or h, from 1s to 8760h (one year), such as 90s, 10m or 2h";

/// The longest reason, in characters.
pub const MAX_REASON: usize = 200;

/// Checks a percentage of a weight.
///
/// # Errors
/// If it is not in the range 1 to [`MAX_PERCENT`].
pub fn check_percent(percent: u16) -> Result<(), String> {
    match percent {
        0 => Err("a weight of 0 % is a drain: use `socklb drain`".to_owned()),
        percent if percent > MAX_PERCENT => Err(format!("write 1% to {MAX_PERCENT}%")),
        _ => Ok(()),
    }
}

/// Checks the time after which an override ends.
///
/// # Errors
/// If it is shorter than a second, longer than [`MAX_DURATION`], or not a whole number of seconds.
pub fn check_duration(duration: Duration) -> Result<(), String> {
    let is_possible =
        (Duration::from_secs(1)..=MAX_DURATION).contains(&duration) && duration.subsec_nanos() == 0;
    if is_possible { Ok(()) } else { Err(WRITE_A_TIME.to_owned()) }
}

/// Checks the reason for an override.
///
/// # Errors
/// If it is empty, is longer than [`MAX_REASON`], or contains a control character.
pub fn check_reason(reason: &str) -> Result<(), String> {
    if reason.trim().is_empty() {
        return Err("the reason is empty: leave it out if there is none".to_owned());
    }
    let length = reason.chars().count();
    if length > MAX_REASON {
        return Err(format!("the reason has {length} characters; at most {MAX_REASON} are allowed"));
    }
    match reason.chars().find(|character| is_obeyed(*character)) {
        Some(character) => {
            Err(format!("the reason contains the control character U+{:04X}", u32::from(character)))
        }
        None => Ok(()),
    }
}

/// The effect of an override.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum OverrideKind {
    /// The backend gets no new connections.
    Drain,
    /// The backend's weight is multiplied by this percentage, 1 to 1,000.
    Weight {
        #[serde(deserialize_with = "any_percent")]
        percent: u16,
    },
}

/// Reads a percentage that no command accepts as the nearest one, so that a single wrong number
/// does not make a whole file of overrides unreadable.
fn any_percent<'de, D: Deserializer<'de>>(percent: D) -> Result<u16, D::Error> {
    i64::deserialize(percent).map(|percent| u16::try_from(percent.max(0)).unwrap_or(u16::MAX))
}

/// The scope of an override on this host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OverrideScope {
    pub service: String,
    pub backend: SocketAddr,
    /// The only client that the override concerns; `None` for all clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
}

/// An override, and the user that set it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Override {
    #[serde(flatten)]
    pub scope: OverrideScope,
    #[serde(flatten)]
    pub kind: OverrideKind,
    /// The operator's reason, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The user and the process that set the override.
    pub user: u32,
    pub process: u32,
    /// When the override was set, in seconds since 1970.
    pub since: u64,
    /// When the override ends, in seconds since 1970; `None` if it remains until it is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

/// The answer to `socklb overrides`, and to each step of `socklb drain --wait`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverridesDocument {
    pub schema: u32,
    pub overrides: Vec<OverrideStatus>,
    /// A sentence with the reason why the overrides could not be read or stored. A restarted daemon
    /// may then not apply them. `None` if they were stored.
    pub not_kept: Option<String>,
    /// What was lost because a file of overrides could not be parsed, and where the file is;
    /// `None` if nothing was, or if the operator has removed the file.
    #[serde(default)]
    pub lost: Option<String>,
}

/// An override and its effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverrideStatus {
    #[serde(flatten)]
    pub of: Override,
    /// Whether the configuration has the service, for a client that the override concerns. If not,
    /// the override has no effect.
    #[serde(default = "yes")]
    pub is_configured: bool,
    /// Whether the list in force contains the backend. If not, the override has no effect until a
    /// list contains it again.
    pub is_listed: bool,
    /// The clients that have the backend.
    pub clients: Vec<ClientEffect>,
}

/// The state of an overridden backend at one client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientEffect {
    pub client: String,
    /// Whether every connect that began before the override has ended, so that no earlier connect
    /// can still increase `open_flows`.
    pub is_settled: bool,
    /// The backend's active flows.
    pub open_flows: u64,
    /// The number of flows to the backend so far that have no record. The ends of these flows are
    /// unknown.
    pub untracked: u64,
    /// The backend's part of the entries of the client's table, 0 to 1; 0 if it gets no
    /// connections.
    pub share: f64,
}

/// The answer to `socklb drain`, `undrain` and `weight`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overridden {
    pub schema: u32,
    pub service: String,
    /// The only client that the request concerns; `None` for all clients.
    #[serde(default)]
    pub client: Option<String>,
    /// Why nothing was changed; `None` if the request was accepted.
    pub refused: Option<String>,
    /// Whether this was a dry run, which changes nothing.
    pub is_dry_run: bool,
    /// Which backends the request changes; empty if the overrides already were as requested.
    pub changed: Vec<SocketAddr>,
    /// The overrides of the named backends after the request. For a dry run, nothing has changed.
    pub overrides: Vec<OverrideStatus>,
    /// As in [`OverridesDocument`].
    pub not_kept: Option<String>,
}

impl OverrideKind {
    pub const fn is_drain(self) -> bool {
        matches!(self, Self::Drain)
    }

    /// `drain` or `weight`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Weight { .. } => "weight",
        }
    }

    /// Why an override of this kind cannot be applied; `None` if it can. No command sets such an
    /// override, but the file of overrides may contain one.
    pub fn why_invalid(self) -> Option<String> {
        match self {
            Self::Weight { percent } if check_percent(percent).is_err() => {
                Some(format!("a weight must be from 1 % to {MAX_PERCENT} %"))
            }
            Self::Drain | Self::Weight { .. } => None,
        }
    }

    /// `drain`, or the weight with its percentage.
    pub fn in_words(self) -> String {
        match self {
            Self::Drain => "drain".to_owned(),
            Self::Weight { percent } => format!("weight {percent} %"),
        }
    }
}

impl Override {
    /// When the override ends, in words. `now` is in seconds since 1970.
    pub fn end_in_words(&self, now: u64) -> String {
        match self.until {
            None => "until it is removed".to_owned(),
            Some(until) if until <= now => "about to end".to_owned(),
            Some(until) => format!("for {}", age(until - now)),
        }
    }
}

/// An earlier daemon does not send whether the configuration has the service.
const fn yes() -> bool {
    true
}

impl OverrideStatus {
    /// Why the override has no effect; `None` if it has one.
    pub(crate) fn why_no_effect(&self) -> Option<String> {
        let invalid = self.of.kind.why_invalid();
        invalid.or_else(|| match &self.of.scope.client {
            None if !self.is_configured => Some("no such service in the configuration".to_owned()),
            Some(client) if !self.is_configured => {
                Some(format!("client {client} has no such service in the configuration"))
            }
            _ if !self.is_listed => Some("not in the list".to_owned()),
            _ => None,
        })
    }
}

impl ClientEffect {
    /// The effect in words, after the client's name.
    pub(crate) fn describe(&self, kind: OverrideKind) -> String {
        let Self { client, open_flows, untracked, share, .. } = self;
        let mut text = format!("client {client}: ");
        // A drained backend has a share only if there is no other backend.
        if !kind.is_drain() || *share > 0.0 {
            text += &format!("{} of its connects, ", percent(Some(*share)));
        }
        text += &counted(*open_flows, "open flow");
        if *untracked > 0 {
            text += &format!(", {untracked} untracked");
        }
        text
    }
}

impl Overridden {
    /// Whether an override of this kind for exactly this backend and client is in force.
    fn is_overridden(&self, is_drain: bool, backend: SocketAddr, client: Option<&str>) -> bool {
        let of_this_kind = self.overrides.iter().filter(|one| one.of.kind.is_drain() == is_drain);
        let mut scopes = of_this_kind.map(|one| &one.of.scope);
        scopes.any(|scope| scope.backend == backend && scope.client.as_deref() == client)
    }

    /// Whether a later command has undone this change of `action`, `drain` or `undrain`, before it
    /// was answered.
    pub fn is_undone(&self, action: &str) -> bool {
        let is_drained = |backend: &SocketAddr| self.is_overridden(true, *backend, self.client.as_deref());
        !self.is_dry_run
            && match action {
                "drain" => !self.changed.iter().all(is_drained),
                "undrain" => self.changed.iter().any(is_drained),
                _ => false,
            }
    }

    /// The answer for people, if the request was accepted. `action` is `drain`, `undrain` or
    /// `weight`; `now` is in seconds since 1970.
    pub fn describe(&self, action: &str, now: u64) -> String {
        let Self { service, is_dry_run, changed, overrides, not_kept, .. } = self;
        let is_drain = action != "weight";
        let only = |client: &Option<String>| {
            client.as_ref().map_or_else(String::new, |client| format!(" for client {client}"))
        };
        let only_wanted = only(&self.client);
        if *is_dry_run {
            let named: Vec<String> = changed.iter().map(ToString::to_string).collect();
            let named = if named.is_empty() { "nothing".to_owned() } else { named.join(", ") };
            return format!(
                "dry run: {action} would change {named} of service {service}{only_wanted} on this host only\n"
            );
        }
        let mut text = String::new();
        let is_wanted = |scope: &OverrideScope| scope.client == self.client;
        let of_this_kind = || overrides.iter().filter(|one| one.of.kind.is_drain() == is_drain);
        // A client's own override may end while that for all clients or for others continues.
        let is_overridden =
            |backend: &SocketAddr, client: Option<&str>| self.is_overridden(is_drain, *backend, client);
        for backend in changed.iter().filter(|backend| !is_overridden(backend, self.client.as_deref())) {
            let (own, over) = if is_drain {
                ("drain", "is no longer drained")
            } else {
                ("weight", "has its whole weight again")
            };
            text += &if is_overridden(backend, None) {
                format!(
                    "{backend} of service {service}: the {own}{only_wanted} alone has ended on this host; the {own} \
                     for all clients stays in force\n"
                )
            } else {
                format!("{backend} of service {service} {over}{only_wanted} on this host\n")
            };
        }
        for one in of_this_kind() {
            let Override { scope: OverrideScope { backend, client, .. }, kind, .. } = &one.of;
            let what = match kind {
                OverrideKind::Drain => "is drained".to_owned(),
                OverrideKind::Weight { percent } => format!("has {percent} % of its weight"),
            };
            let only = only(client);
            let is_new = changed.contains(backend) && is_wanted(&one.of.scope);
            let before = if is_new { "" } else { ", as before" };
            let end = one.of.end_in_words(now);
            text +=
                &format!("{backend} of service {service} {what}{only} on this host only, {end}{before}\n");
            if let Some(why) = one.why_no_effect() {
                text += &format!("  no effect: {why}\n");
            }
            for effect in &one.clients {
                text += &format!("  {}\n", effect.describe(*kind));
            }
        }
        if text.is_empty() {
            let what = if is_drain { "was drained" } else { "had a weight set by an operator" };
            text = format!(
                "no change: none of these backends of service {service} {what}{only_wanted} on this host\n"
            );
        }
        if let Some(why) = not_kept {
            text += &format!("{why}\n");
        }
        text
    }
}

/// The progress of the drains for which `socklb drain --wait` waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// The open flows of each backend, summed over the clients.
    pub open: BTreeMap<SocketAddr, u64>,
    /// Flows without a record. Their ends are unknown, and `open` does not include them.
    pub untracked: u64,
    /// Whether no connect that began before the drain can still add a flow.
    pub is_settled: bool,
    /// The backends that are no longer drained.
    pub ended: Vec<SocketAddr>,
}

impl OverridesDocument {
    /// The progress of the drains with these scopes.
    pub fn progress(&self, scopes: &[OverrideScope]) -> DrainProgress {
        let mut progress = DrainProgress { is_settled: true, ..DrainProgress::default() };
        for scope in scopes {
            let drain = self.overrides.iter().find(|one| one.of.kind.is_drain() && one.of.scope == *scope);
            let Some(drain) = drain else {
                progress.ended.push(scope.backend);
                continue;
            };
            let open = drain.clients.iter().map(|effect| effect.open_flows).sum();
            progress.open.insert(scope.backend, open);
            progress.untracked += drain.clients.iter().map(|effect| effect.untracked).sum::<u64>();
            progress.is_settled &= drain.clients.iter().all(|effect| effect.is_settled);
        }
        progress
    }
}

impl DrainProgress {
    /// The open flows of all backends.
    pub fn open(&self) -> u64 {
        self.open.values().sum()
    }

    /// The open flows in words. If there are several backends, names those with open flows.
    pub fn open_in_words(&self) -> String {
        /// The maximum number of backends that are named.
        const NAMED: usize = 4;
        let flows = counted(self.open(), "open flow");
        if let [backend] = &self.open.keys().collect::<Vec<_>>()[..] {
            return format!("{backend}: {flows}");
        }
        let left: Vec<_> = self.open.iter().filter(|(_, open)| **open > 0).collect();
        let mut named: Vec<String> =
            left.iter().take(NAMED).map(|(backend, open)| format!("{backend} {open}")).collect();
        if left.len() > NAMED {
            named.push(format!("and {} more", left.len() - NAMED));
        }
        let named = if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
        format!("{}: {flows}{named}", counted(self.open.len(), "backend"))
    }
}

#[cfg(test)]
/// Example overrides for tests.
pub(crate) mod tests {
    use super::*;

    fn scope(host: u8) -> OverrideScope {
        OverrideScope { service: "users".to_owned(), backend: ([10, 0, 0, host], 80).into(), client: None }
    }

    pub fn effect(client: &str, open_flows: u64, share: f64) -> ClientEffect {
        ClientEffect { client: client.to_owned(), is_settled: true, open_flows, untracked: 0, share }
    }

    /// An override of 10.0.0.`host`:80 by user 1000, since second 1,000.
    pub fn status(host: u8, kind: OverrideKind, clients: Vec<ClientEffect>) -> OverrideStatus {
        let of = Override {
            scope: scope(host),
            kind,
            reason: None,
            user: 1000,
            process: 4711,
            since: 1_000,
            until: None,
        };
        OverrideStatus { of, is_configured: true, is_listed: true, clients }
    }

    fn overridden(changed: &[u8], overrides: Vec<OverrideStatus>) -> Overridden {
        Overridden {
            schema: SCHEMA,
            service: "users".to_owned(),
            client: None,
            refused: None,
            is_dry_run: false,
            changed: changed.iter().map(|host| scope(*host).backend).collect(),
            overrides,
            not_kept: None,
        }
    }

    #[test]
    fn a_reason_contains_no_character_that_hides_or_reorders_text() {
        for character in [
            '\u{7}',
            '\u{1b}',
            '\u{9b}',
            '\u{202e}',
            '\u{200b}',
            '\u{feff}',
            '\u{2028}',
            '\u{2066}',
            '\u{e0041}',
        ] {
            let error = check_reason(&format!("new {character}kernel")).expect_err("the reason is refused");
            let expected = format!("the control character U+{:04X}", u32::from(character));
            assert!(error.contains(&expected), "{error}");
        }
        for reason in ["new kernel", "größer, “später” – 不要", "naïve e\u{301}"] {
            assert_eq!(check_reason(reason), Ok(()), "{reason}");
        }
        for reason in ["", " \t"] {
            assert_eq!(
                check_reason(reason),
                Err("the reason is empty: leave it out if there is none".to_owned())
            );
        }
    }

    #[test]
    fn the_answer_to_a_drain_names_host_time_and_clients() {
        let mut first = status(1, OverrideKind::Drain, vec![effect("web", 12, 0.0), effect("batch", 1, 0.0)]);
        first.of.until = Some(1_900);
        first.clients[1].untracked = 3;
        let mut second = status(2, OverrideKind::Drain, Vec::new());
        second.of.scope.client = Some("web".to_owned());
        second.is_listed = false;
        // The answer to a drain does not mention weights.
        let weight = status(1, OverrideKind::Weight { percent: 50 }, vec![effect("web", 12, 0.0)]);
        let mut answer = overridden(&[1], vec![first, second, weight]);
        let lines = "10.0.0.1:80 of service users is drained on this host only, for 10m00s\n  \
                       client web: 12 open flows\n  \
                       client batch: 1 open flow, 3 untracked\n\
                     10.0.0.2:80 of service users is drained for client web on this host only, until it is removed, as before\n  \
                       no effect: not in the list\n";
        assert_eq!(answer.describe("drain", 1_300), lines);
        answer.not_kept = Some("cannot store the overrides".to_owned());
        assert_eq!(answer.describe("drain", 1_300), format!("{lines}cannot store the overrides\n"));
    }

    #[test]
    fn a_change_that_a_later_command_undoes_is_detected() {
        let drained = |number| status(number, OverrideKind::Drain, Vec::new());
        let weight = status(1, OverrideKind::Weight { percent: 50 }, Vec::new());
        let [in_force, undone] = [
            overridden(&[1, 2], vec![drained(1), drained(2)]),
            overridden(&[1, 2], vec![drained(1), weight]),
        ];
        assert!(!in_force.is_undone("drain") && in_force.is_undone("undrain"));
        assert!(undone.is_undone("drain") && undone.is_undone("undrain"));
        assert!(!overridden(&[1], Vec::new()).is_undone("undrain"));
        // A drain of one client does not concern that of another, or that of all.
        let of_web = Overridden { client: Some("web".to_owned()), ..overridden(&[1], vec![drained(1)]) };
        assert!(of_web.is_undone("drain") && !of_web.is_undone("undrain"));
        let planned = Overridden { is_dry_run: true, ..overridden(&[1], Vec::new()) };
        assert!(!planned.is_undone("drain") && !undone.is_undone("weight"));
    }

    #[test]
    fn the_end_of_an_override_is_confirmed() {
        let answer = overridden(&[1, 2], Vec::new());
        assert_eq!(
            answer.describe("undrain", 0),
            "10.0.0.1:80 of service users is no longer drained on this host\n\
             10.0.0.2:80 of service users is no longer drained on this host\n"
        );
        let unchanged = overridden(&[], Vec::new());
        assert_eq!(
            unchanged.describe("undrain", 0),
            "no change: none of these backends of service users was drained on this host\n"
        );
        // The drain for one client ends, and that for another one continues.
        let mut other = status(1, OverrideKind::Drain, Vec::new());
        other.of.scope.client = Some("batch".to_owned());
        let of_one = Overridden { client: Some("web".to_owned()), ..overridden(&[1], vec![other]) };
        assert_eq!(
            of_one.describe("undrain", 0),
            "10.0.0.1:80 of service users is no longer drained for client web on this host\n\
             10.0.0.1:80 of service users is drained for client batch on this host only, until it is removed, as before\n"
        );
        // The drain for one client ends, and that for all clients continues.
        let all = status(1, OverrideKind::Drain, vec![effect("web", 2, 0.0)]);
        let of_one = Overridden { client: Some("web".to_owned()), ..overridden(&[1, 2], vec![all]) };
        assert_eq!(
            of_one.describe("undrain", 0),
            "10.0.0.1:80 of service users: the drain for client web alone has ended on this host; the drain for all \
             clients stays in force\n\
             10.0.0.2:80 of service users is no longer drained for client web on this host\n\
             10.0.0.1:80 of service users is drained on this host only, until it is removed, as before\n  \
               client web: 2 open flows\n"
        );
        let all = status(1, OverrideKind::Weight { percent: 50 }, vec![effect("web", 2, 0.2)]);
        let of_one = Overridden { client: Some("web".to_owned()), ..overridden(&[1], vec![all]) };
        assert_eq!(
            of_one.describe("weight", 0),
            "10.0.0.1:80 of service users: the weight for client web alone has ended on this host; the weight for \
             all clients stays in force\n\
             10.0.0.1:80 of service users has 50 % of its weight on this host only, until it is removed, as before\n  \
               client web: 20.0 % of its connects, 2 open flows\n"
        );
        let unchanged = Overridden { client: Some("web".to_owned()), ..overridden(&[], Vec::new()) };
        assert_eq!(
            unchanged.describe("undrain", 0),
            "no change: none of these backends of service users was drained for client web on this host\n"
        );
        let whole = overridden(&[1], Vec::new());
        assert_eq!(
            whole.describe("weight", 0),
            "10.0.0.1:80 of service users has its whole weight again on this host\n"
        );
    }

    #[test]
    fn the_answer_to_a_weight_states_the_share_that_is_reached() {
        let kind = OverrideKind::Weight { percent: 50 };
        let answer = overridden(&[1], vec![status(1, kind, vec![effect("web", 2, 1.0 / 5.0)])]);
        assert_eq!(
            answer.describe("weight", 0),
            "10.0.0.1:80 of service users has 50 % of its weight on this host only, until it is removed\n  \
               client web: 20.0 % of its connects, 2 open flows\n"
        );
    }

    #[test]
    fn a_dry_run_names_the_backends_that_would_change() {
        let answer = Overridden { is_dry_run: true, ..overridden(&[1, 2], Vec::new()) };
        assert_eq!(
            answer.describe("drain", 0),
            "dry run: drain would change 10.0.0.1:80, 10.0.0.2:80 of service users on this host only\n"
        );
    }

    #[test]
    fn progress_sums_clients_and_notices_ended_drains() {
        let mut drained =
            status(1, OverrideKind::Drain, vec![effect("web", 2, 0.0), effect("batch", 1, 0.0)]);
        drained.clients[1].untracked = 4;
        let weight = status(2, OverrideKind::Weight { percent: 50 }, vec![effect("web", 9, 0.1)]);
        let mut document = OverridesDocument {
            schema: SCHEMA,
            overrides: vec![drained, weight],
            not_kept: None,
            lost: None,
        };
        let progress = document.progress(&[scope(1), scope(2)]);
        let open = [(scope(1).backend, 3)].into();
        let expected = DrainProgress { open, untracked: 4, is_settled: true, ended: vec![scope(2).backend] };
        assert_eq!(progress, expected);
        assert_eq!(progress.open_in_words(), "10.0.0.1:80: 3 open flows");
        document.overrides[0].clients[0].is_settled = false;
        assert!(!document.progress(&[scope(1)]).is_settled);
    }

    #[test]
    fn backends_with_open_flows_are_named() {
        let of = |open: &[u64]| {
            let backends = (1..).map(|host| scope(host).backend).zip(open.iter().copied());
            DrainProgress { open: backends.collect(), ..DrainProgress::default() }.open_in_words()
        };
        assert_eq!(of(&[0, 0]), "2 backends: 0 open flows");
        assert_eq!(of(&[0, 7]), "2 backends: 7 open flows (10.0.0.2:80 7)");
        assert_eq!(
            of(&[1, 1, 1, 1, 0, 1]),
            "6 backends: 5 open flows (10.0.0.1:80 1, 10.0.0.2:80 1, 10.0.0.3:80 1, 10.0.0.4:80 1, and 1 more)"
        );
    }

    #[test]
    fn impossible_values_are_refused() {
        assert!(check_percent(1).is_ok() && check_percent(1_000).is_ok());
        assert!(
            check_percent(0).unwrap_err().contains("use `socklb drain`") && check_percent(1_001).is_err()
        );
        let of = Duration::from_secs;
        assert!(check_duration(of(1)).is_ok() && check_duration(MAX_DURATION).is_ok());
        assert!(check_duration(of(0)).is_err() && check_duration(MAX_DURATION + of(1)).is_err());
        assert!(check_reason(&"\u{e9}".repeat(200)).is_ok());
        assert!(check_reason(&"x".repeat(201)).is_err() && check_reason("a\nb").is_err());
    }

    #[test]
    fn an_override_is_one_flat_object_in_json() {
        let mut one = status(1, OverrideKind::Weight { percent: 50 }, Vec::new());
        one.of.scope.client = Some("web".to_owned());
        let json = r#"{"service":"users","backend":"10.0.0.1:80","client":"web","kind":"weight","percent":50,"user":1000,"process":4711,"since":1000,"is_configured":true,"is_listed":true,"clients":[]}"#;
        assert_eq!(serde_json::to_string(&one).unwrap(), json);
        assert_eq!(serde_json::from_str::<OverrideStatus>(json).unwrap(), one);
    }
}
