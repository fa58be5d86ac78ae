//! The key `ejection` of a `[[service]]`: after how many failures a backend is ejected, and for how
//! long.

use std::time::Duration;

use lb_core::service::Ejection;

use crate::keys::ejection::{BASE, FAILURES, HANGS, MAX, SECTION};
use lb_document::Table;
use lb_document::{Item, fill, in_units};

/// The value that turns ejection off.
const OFF: &str = "off";

/// The value of the key `ejection`, if it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EjectionSetting {
    /// `None` if no backend is ever ejected.
    pub ejection: Option<Ejection>,
}

/// Reads the value of the key `ejection`. Reports all wrong values; if there are any, returns
/// `None`.
pub fn read(item: &Item<'_>) -> Option<EjectionSetting> {
    match item.as_str() {
        Some(OFF) => return Some(EjectionSetting { ejection: None }),
        Some(other) => {
            let message = format!("unknown ejection {}", lb_document::diagnostic::quote(other));
            item.fault(message, "write \"off\", or a table, as in { failures = 5 }".to_owned());
            return None;
        }
        None => {}
    }
    let keys = item.table(&SECTION)?;
    let (base, max) = (BASE.take(&keys), MAX.take(&keys));
    if let (Some(base), Some(max)) = (base, max) {
        check_order(&keys, base, max);
    }
    let ejection = fill!(&keys, Ejection { failures: FAILURES, base: (base), max: (max), hangs: HANGS })?;
    Some(EjectionSetting { ejection: Some(ejection) })
}

/// Refuses a first ejection that is longer than the longest ejection. Reports the fault at `base`
/// if `base` is written, else at `max`.
fn check_order(table: &Table<'_>, base: Duration, max: Duration) {
    if base <= max {
        return;
    }
    let (base, max) = (in_units(base), in_units(max));
    match BASE.item(table) {
        Some(item) => item.fault(
            format!("`base` is \"{base}\", but no ejection is longer than `max`, which is \"{max}\""),
            format!("write at most \"{max}\", or max = \"{base}\" or more"),
        ),
        None => {
            let Some(item) = MAX.item(table) else { return };
            item.fault(
                format!("`max` is \"{max}\", but the first ejection lasts `base`, which is \"{base}\""),
                format!("write at least \"{base}\", or base = \"{max}\" or less"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check, faults, services, with_line};

    fn ejection(line: &str) -> Option<Ejection> {
        services(&with_line(line)).remove(0).service.ejection
    }

    #[test]
    fn backends_are_ejected_unless_ejection_is_off() {
        let default = Ejection::default();
        assert_eq!(ejection(""), Some(default));
        assert_eq!(ejection("ejection = {}"), Some(default));
        assert_eq!(ejection("ejection = 'off'"), None);
        assert_eq!(ejection("protocol = 'udp'"), None, "no ejection over UDP by default");
        assert_eq!(
            ejection("ejection = { failures = 255, base = '1h', max = '1h' }"),
            Some(Ejection {
                failures: 255,
                base: Duration::from_hours(1),
                max: Duration::from_hours(1),
                hangs: true
            })
        );
        assert_eq!(
            ejection("ejection = { base = '100ms' }"),
            Some(Ejection { base: Duration::from_millis(100), ..default })
        );
        assert_eq!(ejection("ejection = { hangs = false }"), Some(Ejection { hangs: false, ..default }));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let times = "(write \"100ms\" to \"1h\")";
        let cases = [
            ("ejection = { failures = 0 }", "8:25: failures is 0 (write 1 to 255)".to_owned()),
            ("ejection = { failures = 256 }", "8:25: failures is 256 (write 1 to 255)".to_owned()),
            ("ejection = { base = '0s' }", format!("8:21: base is \"0s\" {times}")),
            ("ejection = { max = '2h' }", format!("8:20: max is \"2h\" {times}")),
            (
                "ejection = { base = '10m' }",
                "8:21: `base` is \"10m\", but no ejection is longer than `max`, which is \"5m\" (write at \
                 most \"5m\", or max = \"10m\" or more)"
                    .to_owned(),
            ),
            (
                "ejection = { max = '1s' }",
                "8:20: `max` is \"1s\", but the first ejection lasts `base`, which is \"5s\" (write at least \
                 \"5s\", or base = \"1s\" or less)"
                    .to_owned(),
            ),
            (
                "ejection = { base = '9s', max = '8s' }",
                "8:21: `base` is \"9s\", but no ejection is longer than `max`, which is \"8s\" (write at \
                 most \"8s\", or max = \"9s\" or more)"
                    .to_owned(),
            ),
            (
                "ejection = 'on'",
                "8:12: unknown ejection \"on\" (write \"off\", or a table, as in { failures = 5 })".to_owned(),
            ),
            ("ejection = { fails = 1 }", "8:14: unknown key \"fails\" in ejection (known keys: failures, base, max, hangs)".to_owned()),
            (
                "ejection = { max_share = 50 }",
                "8:14: former key \"max_share\" in ejection (leave the key out: only \
                 health.panic_threshold decides whether too many backends fail at once)"
                    .to_owned(),
            ),
            ("ejection = { hangs = 1 }", "8:22: hangs must be true or false, not a whole number".to_owned()),
            ("ejection = true", "8:12: ejection must be a table, not true or false".to_owned()),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[&expected]);
        }
        assert_eq!(faults(&with_line("ejection = { failures = 0, base = 'x' }")).len(), 2);
        assert_eq!(faults(&with_line("ejection = { failures = 0, base = '10m', max = '5m' }")).len(), 2);
    }
}
