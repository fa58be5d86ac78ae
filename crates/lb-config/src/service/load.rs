//! The keys of a `[[service]]` that change weights: `load` and `slow_start`.
//!
//! Both keys change weights, so they are refused if the policy ignores weights. The fault is
//! reported at the value without effect.

use std::time::Duration;

use lb_core::control::{ControlRules, Mode};
use lb_core::service::{Policy, ignores_weights};
use lb_document::{Table, in_units};

use super::probe::ProbeConfig;
use crate::keys::load::{CONTROL, MODE, SECTION};
use crate::keys::service::{HEALTH, LOAD, POLICY, SLOW_START};

/// The maximum interval between reports. With a longer interval, a change is visible only after
/// more than a minute, and feedback does not use reports of this age.
const LONGEST_INTERVAL: Duration = Duration::from_secs(20);

/// Reads the keys of a service's table; `None` if any value is wrong. `policy` and `probe` are the
/// settings of the service, or `None` if they cannot be read.
pub fn read(
    table: &Table<'_>,
    policy: Option<Policy>,
    probe: Option<Option<&ProbeConfig>>,
) -> Option<ControlRules> {
    check_policy(table, policy);
    let slow_start = SLOW_START.take(table);
    let Some(item) = LOAD.item(table) else {
        return Some(ControlRules { law: None, mode: Mode::Enforce, slow_start: slow_start? });
    };
    let keys = item.table(&SECTION)?;
    let (control, mode) = (CONTROL.take(&keys), MODE.take(&keys));
    if probe.is_some_and(|probe| !probe.is_some_and(ProbeConfig::is_by_report)) {
        let help = format!("write {} = {{ probe = \"report\" }}, or leave load out", HEALTH.name);
        item.fault("`load` needs reports, but the service has no probe = \"report\"".to_owned(), help);
    }
    if let Some(Some(probe)) = probe
        && probe.is_by_report()
        && probe.interval > LONGEST_INTERVAL
    {
        let message = format!(
            "`load` needs recent reports, but the service requests them only every {}",
            in_units(probe.interval)
        );
        let longest = in_units(LONGEST_INTERVAL);
        item.fault(message, format!("write interval = \"{longest}\" in {}, or less", HEALTH.name));
    }
    Some(ControlRules { law: Some(control?), mode: mode?, slow_start: slow_start? })
}

/// Refuses `load` and `slow_start` if the policy ignores weights.
fn check_policy(table: &Table<'_>, policy: Option<Policy>) {
    let Some(why) = policy.and_then(ignores_weights) else { return };
    let written = [LOAD.name, SLOW_START.name].map(|key| (key, table.get(key)));
    for (key, item) in written.into_iter().filter_map(|(key, item)| Some((key, item?))) {
        if key == SLOW_START.name && item.as_str() == Some("off") {
            continue;
        }
        let policy = policy.map_or("", Policy::name);
        let message = format!("{key} has no effect: {} {policy:?} {why}", POLICY.name);
        let help = format!("leave {key} out, or write policy = \"weighted-round-robin\" or \"p2c\"");
        item.fault(message, help);
    }
}

#[cfg(test)]
mod tests {
    use lb_core::control::Law;

    use super::*;
    use crate::tests::{check, services, with_line};

    fn rules(lines: &str) -> ControlRules {
        services(&with_line(lines)).remove(0).service.control
    }

    const REPORT: &str = "health = { probe = 'report', key = '/x/key-4' }";

    #[test]
    fn weights_stay_fixed_unless_load_or_slow_start_is_configured() {
        assert_eq!([rules(""), rules("slow_start = 'off'")], [ControlRules::default(); 2]);
        let slow = ControlRules { slow_start: Some(Duration::from_secs(10)), ..ControlRules::default() };
        assert_eq!(rules("slow_start = '10s'"), slow);
        assert_eq!(rules("policy = 'p2c'\nslow_start = '10s'"), slow);
        assert_eq!(rules("policy = 'round-robin'\nslow_start = 'off'"), ControlRules::default());
        for law in Law::ALL {
            let follows = ControlRules { law: Some(law), ..ControlRules::default() };
            assert_eq!(rules(&format!("load = {{ control = '{}' }}\n{REPORT}", law.name())), follows);
        }
        assert_eq!(
            rules(&format!(
                "load = {{ control = 'feedback', mode = 'observe' }}\nslow_start = '1h'\n{REPORT}"
            )),
            ControlRules {
                law: Some(Law::Feedback),
                mode: Mode::Observe,
                slow_start: Some(Duration::from_hours(1))
            }
        );
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let with_load = |line: &str| with_line(&format!("{line}\n{REPORT}"));
        let cases = [
            (
                with_load("load = {}"),
                "8:8: control is missing in load (write control = \"feedback\" or \"a58\")",
            ),
            (
                with_load("load = { control = 'feedbak' }"),
                "8:20: unknown control \"feedbak\" (did you mean feedback? write \"feedback\" or \"a58\")",
            ),
            (
                with_load("load = { control = 'a58', mode = 'dry' }"),
                "8:34: unknown mode \"dry\" (write \"enforce\" or \"observe\")",
            ),
            (with_load("load = 'feedback'"), "8:8: load must be a table, not a string"),
            (
                with_load("load = { control = 'a58', gain = 1 }"),
                "8:27: unknown key \"gain\" in load (known keys: control, mode)",
            ),
            (
                with_line("slow_start = '0s'"),
                "8:14: slow_start is \"0s\" (write \"off\" or \"1s\" to \"1h\")",
            ),
            (
                with_line("load = { control = 'a58' }"),
                "8:8: `load` needs reports, but the service has no probe = \"report\" (write health = { \
                 probe = \"report\" }, or leave load out)",
            ),
            (
                with_line("load = { control = 'a58' }\nhealth = { probe = 'tcp' }"),
                "8:8: `load` needs reports, but the service has no probe = \"report\" (write health = { \
                 probe = \"report\" }, or leave load out)",
            ),
            (
                with_line(
                    "load = { control = 'a58' }\nhealth = { probe = 'report', key = '/x/key-4', interval = '21s' }",
                ),
                "8:8: `load` needs recent reports, but the service requests them only every 21s (write \
                 interval = \"20s\" in health, or less)",
            ),
            (
                with_load("policy = 'round-robin'\nload = { control = 'feedback' }"),
                "9:8: load has no effect: policy \"round-robin\" ignores weights (leave load out, or write policy = \
                 \"weighted-round-robin\" or \"p2c\")",
            ),
            (
                with_line("policy = 'least-loaded'\nsubset = { size = 20 }\nslow_start = '10s'"),
                "10:14: slow_start has no effect: policy \"least-loaded\" compares only open flows (leave slow_start out, or write \
                 policy = \"weighted-round-robin\" or \"p2c\")",
            ),
        ];
        for (text, expected) in cases {
            check(&text, &[expected]);
        }
    }
}
