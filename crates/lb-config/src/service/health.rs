//! The keys `health` and `on_backend_loss` of a `[[service]]`: how backends are probed, and what
//! happens when they are unavailable.

use lb_core::health::loss::OnBackendLoss;
use lb_core::service::{HealthRules, Protocol};
use lb_document::{Table, fill};

use super::probe::{self, Around, ProbeConfig, ProbeKind};
use crate::keys::health::{DRAIN_FALLBACK, PANIC_THRESHOLD, REPLACE_AFTER, SECTION};
use crate::keys::service::{HEALTH, ON_BACKEND_LOSS};

/// Reads both keys of a service's table; `None` if a value is wrong. For a key that is not written,
/// the defaults apply.
pub fn read(
    table: &Table<'_>,
    protocol: Option<Protocol>,
    around: Around<'_>,
) -> Option<(HealthRules, Option<ProbeConfig>)> {
    let on_backend_loss = read_on_backend_loss(table, protocol);
    let Some(item) = HEALTH.item(table) else {
        let rules = HealthRules { on_backend_loss: on_backend_loss?, ..HealthRules::default() };
        return Some((rules, None));
    };
    let keys = item.table(&SECTION)?;
    let probe = probe::read(&keys, protocol, around);
    let first_look = probe.as_ref().map(|probe| match probe.as_ref()?.kind {
        ProbeKind::Connect { timeout, .. } => Some(timeout),
        ProbeKind::Report { .. } => None,
    });
    let heeds_reports = probe.as_ref().map(|probe| probe.as_ref().is_some_and(ProbeConfig::is_by_report));
    let rules = fill!(
        &keys,
        HealthRules {
            panic_threshold: PANIC_THRESHOLD,
            replace_after: REPLACE_AFTER,
            drain_fallback: DRAIN_FALLBACK,
            on_backend_loss: (on_backend_loss),
            first_look: (first_look),
            heeds_reports: (heeds_reports),
        }
    );
    Some((rules?, probe?))
}

fn read_on_backend_loss(table: &Table<'_>, protocol: Option<Protocol>) -> Option<OnBackendLoss> {
    let value = ON_BACKEND_LOSS.take(table)?;
    if value == OnBackendLoss::CloseIdle
        && protocol == Some(Protocol::Udp)
        && let Some(item) = ON_BACKEND_LOSS.item(table)
    {
        let message = "`on_backend_loss` \"close-idle\" closes no UDP socket: the kernel does not record \
                       when a UDP socket was used";
        item.fault(message, "write \"keep\" or \"close\"".to_owned());
        return None;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tests::{check, faults, services, with_line};

    fn health(line: &str) -> HealthRules {
        services(&with_line(line)).remove(0).service.health
    }

    #[test]
    fn missing_keys_have_their_defaults() {
        let default = HealthRules::default();
        assert_eq!([health(""), health("health = {}")], [default; 2]);
        assert_eq!(
            health("health = { panic_threshold = 0, replace_after = '1m' }"),
            HealthRules { panic_threshold: 0, replace_after: Duration::from_mins(1), ..default }
        );
        assert_eq!(
            health("health = { panic_threshold = 100 }"),
            HealthRules { panic_threshold: 100, ..default }
        );
        assert!(health("health = { drain_fallback = true }").drain_fallback);
        assert_eq!(health("protocol = 'udp'\nhealth = { panic_threshold = 30 }").panic_threshold, 30);
    }

    #[test]
    fn on_backend_loss_is_a_key_of_the_service() {
        let on_loss = |lines: &str| services(&with_line(lines)).remove(0).service.health.on_backend_loss;
        assert_eq!(on_loss(""), OnBackendLoss::Keep);
        for value in OnBackendLoss::ALL {
            assert_eq!(on_loss(&format!("on_backend_loss = '{}'\nhealth = {{}}", value.name())), value);
        }
        assert_eq!(on_loss("protocol = 'udp'\non_backend_loss = 'close'"), OnBackendLoss::Close);
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            ("health = { panic_threshold = 101 }", "8:30: panic_threshold is 101 (write 0 to 100)"),
            ("health = { replace_after = '0s' }", "8:28: replace_after is \"0s\" (write \"1s\" to \"24h\")"),
            (
                "health = { replace_after = 'never' }",
                "8:28: replace_after is \"never\" (write \"1s\" to \"24h\")",
            ),
            (
                "health = { panic = 5 }",
                "8:12: unknown key \"panic\" in health (known keys: panic_threshold, replace_after, drain_fallback, probe, port, path, interval, \
                 idle_interval, timeout, rise, fall, key)",
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[expected]);
        }
        let both = "health = { panic_threshold = -1, replace_after = 3 }";
        assert_eq!(faults(&with_line(both)).len(), 2, "both faults are reported");
    }
}
