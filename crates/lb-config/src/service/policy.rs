//! How a `[[service]]` chooses its backends: policy, limit of open flows, and times.
//!
//! This module refuses combinations that cannot work and keys that have no effect. Each fault is
//! reported at the value that should change.

use std::time::Duration;

use lb_core::service::{MAX_SCAN, Overflow, Policy, Protocol, ScanCause, Size, Subset};

use crate::EndpointSource;
use crate::keys::service::{
    ACTIVE_LIMIT, CONNECT_TIMEOUT, EJECTION, OVERFLOW, POLICY, REBALANCE, UDP, UNANSWERED_AFTER,
};
use crate::keys::udp::{REBIND, SECTION};
use lb_document::{Item, Table, fill};

/// How connects choose among the backends.
pub struct PolicyChoice {
    pub policy: Policy,
    /// The number of open flows at which a backend is skipped.
    pub active_limit: Option<u32>,
    /// What a connect does if all backends are at the limit.
    pub overflow: Overflow,
}

/// Reads the keys in [`PolicyChoice`] from a service's table; `None` if any of them is wrong.
pub fn read(table: &Table<'_>) -> Option<PolicyChoice> {
    let choice =
        fill!(table, PolicyChoice { policy: POLICY, active_limit: [ACTIVE_LIMIT], overflow: OVERFLOW });
    check_overflow(table);
    choice
}

/// Refuses keys that have no effect with the service's protocol, if the protocol is known.
pub fn check_protocols(table: &Table<'_>, protocol: Option<Protocol>) {
    for key in [EJECTION.name, CONNECT_TIMEOUT.name, UNANSWERED_AFTER.name, REBALANCE.name] {
        check_protocol(table, key, Protocol::Tcp, protocol);
    }
    check_protocol(table, UDP.name, Protocol::Udp, protocol);
}

/// Reads the key `udp`: the time after which an unconnected socket gets a new choice of backend.
pub fn read_udp(item: &Item<'_>) -> Option<Option<Duration>> {
    REBIND.take_written(&item.table(&SECTION)?)
}

fn check_overflow(table: &Table<'_>) {
    let Some(item) = OVERFLOW.item(table) else { return };
    if table.get(ACTIVE_LIMIT.name).is_none() {
        let help = "add `active_limit = 100`, or another number, or leave `overflow` out".to_owned();
        item.absent("`overflow` has no effect without `active_limit`", help);
    }
}

/// Refuses a key that has an effect only with another protocol.
fn check_protocol(table: &Table<'_>, key: &'static str, wanted: Protocol, protocol: Option<Protocol>) {
    if let Some(item) = table.get(key)
        && let Some(other) = protocol.filter(|protocol| *protocol != wanted)
    {
        let (wanted, other) = (wanted.name(), other.name());
        let message = format!("`{key}` is for protocol {wanted:?}, but this service has {other:?}");
        item.fault(message, format!("leave `{key}` out, or write protocol = {wanted:?}"));
    }
}

/// Refuses settings with which one choice of a backend may examine more backends than a kernel
/// program can examine in one run.
pub fn check_scan(table: &Table<'_>, choice: &PolicyChoice, subset: Subset, source: &EndpointSource) {
    let Some(scan) = ScanCause::of(choice.policy, choice.active_limit, choice.overflow) else { return };
    let endpoints = match source {
        EndpointSource::Static(list) => u32::try_from(list.as_slice().len()).unwrap_or(u32::MAX),
        EndpointSource::Named(_) | EndpointSource::File(_) | EndpointSource::Remote(_) => u32::MAX,
    };
    if subset.most_members().min(endpoints) <= MAX_SCAN {
        return;
    }
    let (what, algorithm) = match subset {
        Subset::All => ("subset \"all\"".to_owned(), ""),
        Subset::Sized { algorithm, .. } if algorithm.is_aperture() => {
            (format!("an arc of {algorithm}"), "algorithm = \"rocksteadier\", ")
        }
        Subset::Sized { size: Size::Band(_), .. } => ("a subset whose size follows load".to_owned(), ""),
        Subset::Sized { size: Size::Auto { .. } | Size::Fixed(_), .. } => {
            ("a subset of automatic size".to_owned(), "")
        }
    };
    let (key, who, or) = match (scan, table.get("overflow")) {
        (ScanCause::Policy, _) => ("policy", "policy \"least-loaded\"", ""),
        (ScanCause::Overflow, Some(_)) => {
            ("overflow", "overflow \"least-loaded\"", ", or overflow = \"refuse\"")
        }
        (ScanCause::Overflow, None) => {
            ("active_limit", "overflow \"least-loaded\", the default,", ", or overflow = \"refuse\"")
        }
    };
    let span = table.get(key).map_or_else(|| table.span(), |item| item.span());
    let message = format!(
        "{who} examines every backend of the subset, at most {MAX_SCAN}, but {what} can have more backends"
    );
    table.report().add(
        span,
        message,
        format!("write subset = {{ {algorithm}size = N }}, N at most {MAX_SCAN}{or}"),
    );
}

#[cfg(test)]
mod tests {
    use lb_core::service::Service;

    use super::*;
    use crate::tests::{check, services, with_line, with_service};

    fn service(lines: &str) -> Service {
        services(&with_line(lines)).remove(0).service
    }

    #[test]
    fn every_policy_and_overflow_parses_by_name() {
        for policy in Policy::ALL {
            assert_eq!(service(&format!("policy = '{}'", policy.name())).policy, policy);
        }
        for overflow in Overflow::ALL {
            let of = service(&format!("active_limit = 1\noverflow = '{}'", overflow.name()));
            assert_eq!((of.active_limit, of.overflow), (Some(1), overflow));
        }
        assert_eq!(service("active_limit = 4294967295").active_limit, Some(u32::MAX));
    }

    #[test]
    fn times_at_their_limits_are_accepted() {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        let cases = [("'1s'", Some(1)), ("'60m'", Some(3600)), ("'off'", None)];
        for (text, expected) in cases {
            let of = service(&format!("policy = 'p2c'\nerror_decay = {text}"));
            assert_eq!(seconds(of.error_decay), expected, "{text}");
        }
        for (text, expected) in [("1s", 1), ("2m", 120), ("127s", 127)] {
            let of = service(&format!("connect_timeout = '{text}'"));
            assert_eq!(seconds(of.connect_timeout), Some(expected));
        }
        for (text, expected) in [("10ms", 10), ("250ms", 250), ("2s", 2000), ("1m", 60_000)] {
            let of = service(&format!("unanswered_after = '{text}'"));
            assert_eq!(of.unanswered_after, Duration::from_millis(expected));
        }
        for (text, expected) in
            [("{}", None), ("{ rebind = '1s' }", Some(1)), ("{ rebind = '24h' }", Some(86_400))]
        {
            let of = service(&format!("protocol = 'udp'\nudp = {text}"));
            assert_eq!((of.protocol, seconds(of.rebind)), (Protocol::Udp, expected));
        }
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            (
                "policy = 'rr'",
                "8:10: unknown policy \"rr\" (did you mean round-robin? write \"round-robin\" or \"weighted-round-robin\" or \"least-loaded\" or \
                 \"p2c\" or \"random\")",
            ),
            (
                "policy = 'least-loded'",
                "8:10: unknown policy \"least-loded\" (did you mean least-loaded? write \"round-robin\" or \
                 \"weighted-round-robin\" or \"least-loaded\" or \"p2c\" or \"random\")",
            ),
            ("active_limit = 0", "8:16: active_limit is 0 (write 1 to 4294967295)"),
            ("active_limit = 4294967296", "8:16: active_limit is 4294967296 (write 1 to 4294967295)"),
            (
                "active_limit = 'none'",
                "8:16: active_limit must be a whole number, not a string (write 1 to 4294967295)",
            ),
            (
                "active_limit = 1\noverflow = 'refused'",
                "9:12: unknown overflow \"refused\" (did you mean refuse? write \"least-loaded\" or \"refuse\")",
            ),
            ("error_decay = '0s'", "8:15: error_decay is \"0s\" (write \"off\" or \"1s\" to \"1h\")"),
            ("error_decay = '3601s'", "8:15: error_decay is \"3601s\" (write \"off\" or \"1s\" to \"1h\")"),
            (
                "error_decay = 10",
                "8:15: error_decay must be a string, not a whole number (write \"off\" or \"1s\" to \"1h\")",
            ),
            (
                "error_decay = false",
                "8:15: error_decay must be a string, not true or false (write \"off\" or \"1s\" to \"1h\")",
            ),
            ("connect_timeout = '7'", "8:19: connect_timeout is \"7\" (write \"1s\" to \"127s\")"),
            ("connect_timeout = '128s'", "8:19: connect_timeout is \"128s\" (write \"1s\" to \"127s\")"),
            ("unanswered_after = '9ms'", "8:20: unanswered_after is \"9ms\" (write \"10ms\" to \"1m\")"),
            ("unanswered_after = '61s'", "8:20: unanswered_after is \"61s\" (write \"10ms\" to \"1m\")"),
            ("unanswered_after = 'off'", "8:20: unanswered_after is \"off\" (write \"10ms\" to \"1m\")"),
            (
                "protocol = 'udp'\nunanswered_after = '1s'",
                "9:20: `unanswered_after` is for protocol \"tcp\", but this service has \"udp\" (leave \
                 `unanswered_after` out, or write protocol = \"tcp\")",
            ),
            ("protocol = 'udp'\nudp = '30s'", "9:7: udp must be a table, not a string"),
            (
                "protocol = 'udp'\nudp = { rebnd = '30s' }",
                "9:9: unknown key \"rebnd\" in udp (did you mean rebind? known keys: rebind)",
            ),
            (
                "protocol = 'udp'\nudp = { rebind = '25h' }",
                "9:18: rebind is \"25h\" (write \"1s\" to \"24h\")",
            ),
        ];
        for (lines, expected) in cases {
            check(&with_line(lines), &[expected]);
        }
    }

    #[test]
    fn keys_without_effect_are_refused() {
        let cases = [
            (
                "overflow = 'refuse'",
                "8:12: `overflow` has no effect without `active_limit` (add `active_limit = 100`, or another \
                 number, or leave `overflow` out)",
            ),
            (
                "protocol = 'udp'\nconnect_timeout = '7s'",
                "9:19: `connect_timeout` is for protocol \"tcp\", but this service has \"udp\" (leave \
                 `connect_timeout` out, or write protocol = \"tcp\")",
            ),
            (
                "udp = { rebind = '30s' }",
                "8:7: `udp` is for protocol \"udp\", but this service has \"tcp\" (leave `udp` out, or write \
                 protocol = \"udp\")",
            ),
        ];
        for (lines, expected) in cases {
            check(&with_line(lines), &[expected]);
        }
        // A fault does not hide another fault. If the protocol cannot be read, no key is refused
        // because of the protocol.
        check(
            &with_line("udp = { rebind = '0s' }\noverflow = 'x'"),
            &[
                "8:7: `udp` is for protocol \"udp\", but this service has \"tcp\" (leave `udp` out, or write \
                 protocol = \"udp\")",
                "8:18: rebind is \"0s\" (write \"1s\" to \"24h\")",
                "9:12: unknown overflow \"x\" (write \"least-loaded\" or \"refuse\")",
                "9:12: `overflow` has no effect without `active_limit` (add `active_limit = 100`, or another \
                 number, or leave `overflow` out)",
            ],
        );
        check(
            &with_line("protocol = 'x'\nconnect_timeout = '7s'\nudp = {}"),
            &["8:12: unknown protocol \"x\" (write \"tcp\" or \"udp\")"],
        );
    }

    /// Settings that cause a scan of all backends: the lines of the service, the position and name
    /// of the key that causes the scan, and a further remedy in the help text.
    const SCANS: [(&str, &str, &str); 3] = [
        ("policy = 'least-loaded'", "8:10: policy \"least-loaded\"", ""),
        ("active_limit = 9", "8:16: overflow \"least-loaded\", the default,", ", or overflow = \"refuse\""),
        (
            "overflow = 'least-loaded'\nactive_limit = 9",
            "8:12: overflow \"least-loaded\"",
            ", or overflow = \"refuse\"",
        ),
    ];

    fn with_backends(listed: Option<u32>, lines: &str) -> String {
        let address = |n: u32| format!("'10.0.{}.{}:80'", n / 250, n % 250 + 1);
        let source = match listed {
            Some(listed) => format!("static = [{}]", (0..listed).map(address).collect::<Vec<_>>().join(", ")),
            None => "file = 'f'".to_owned(),
        };
        with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {{ {source} }}\n{lines}"))
    }

    #[test]
    fn least_loaded_is_refused_if_the_subset_can_be_too_large_to_scan() {
        let rocksteadier = "algorithm = \"rocksteadier\", ";
        let subsets = [
            ("", "a subset of automatic size", ""),
            ("subset = 'all'", "subset \"all\"", ""),
            ("subset = { size = 'auto' }", "a subset of automatic size", ""),
            ("subset = { size = { min = 1 } }", "a subset of automatic size", ""),
            ("subset = { algorithm = 'aperture', size = 1 }", "an arc of aperture", rocksteadier),
            ("subset = { algorithm = 'aperture-shuffled' }", "an arc of aperture-shuffled", rocksteadier),
        ];
        for (scan, who, or) in SCANS {
            for (subset, what, algorithm) in subsets {
                let expected = format!(
                    "{who} examines every backend of the subset, at most 256, but {what} can have more \
                     backends (write subset = {{ {algorithm}size = N }}, N at most 256{or})"
                );
                let lines = format!("{scan}\n{subset}");
                check(&with_backends(None, &lines), &[&expected]);
                // For a list without indexes, an arc is refused with another fault.
                if algorithm.is_empty() {
                    check(&with_backends(Some(257), &lines), &[&expected]);
                    assert_eq!(services(&with_backends(Some(256), &lines)).len(), 1, "{lines}");
                }
            }
            for subset in ["subset = { size = 256 }", "subset = { algorithm = 'random', size = 1 }"] {
                for listed in [None, Some(300)] {
                    assert_eq!(services(&with_backends(listed, &format!("{scan}\n{subset}"))).len(), 1);
                }
            }
        }
        for other in ["policy = 'p2c'", "active_limit = 9\noverflow = 'refuse'", "policy = 'random'"] {
            assert_eq!(services(&with_backends(None, other)).len(), 1, "{other}");
        }
    }

    #[test]
    fn other_faults_do_not_hide_a_subset_that_is_too_large() {
        check(
            &with_backends(None, "policy = 'least-loaded'\non_no_backend = 'EPERM'"),
            &[
                "8:10: policy \"least-loaded\" examines every backend of the subset, at most 256, but a \
                 subset of automatic size can have more backends (write subset = { size = N }, N at most \
                 256)",
                "9:17: `on_no_backend` \"EPERM\" would look like a firewall to the caller (write \
                 \"EHOSTUNREACH\" or \"ECONNREFUSED\")",
            ],
        );
    }
}
