//! The scenarios that come with the program. Users select one by its name.
//!
//! The scenarios are compiled into the program, so it needs no files. This module must not depend
//! on the content of the scenarios.

use super::scenario::Scenario;

/// Names and texts, in the order of the documentation.
pub const SHIPPED: [(&str, &str); 22] = [
    ("figure-5", include_str!("../../scenarios/figure-5.toml")),
    ("rolling-update", include_str!("../../scenarios/rolling-update.toml")),
    ("aperture", include_str!("../../scenarios/aperture.toml")),
    ("aperture-by-load", include_str!("../../scenarios/aperture-by-load.toml")),
    ("small-jobs", include_str!("../../scenarios/small-jobs.toml")),
    ("ejection-tenth", include_str!("../../scenarios/ejection-tenth.toml")),
    ("ejection-half", include_str!("../../scenarios/ejection-half.toml")),
    ("ejection-flapping", include_str!("../../scenarios/ejection-flapping.toml")),
    ("ejection-all", include_str!("../../scenarios/ejection-all.toml")),
    ("book-load", include_str!("../../scenarios/book-load.toml")),
    ("book-load-08", include_str!("../../scenarios/book-load-08.toml")),
    ("book-load-skew", include_str!("../../scenarios/book-load-skew.toml")),
    ("book-load-equal", include_str!("../../scenarios/book-load-equal.toml")),
    ("load-reports", include_str!("../../scenarios/load-reports.toml")),
    ("load-kept", include_str!("../../scenarios/load-kept.toml")),
    ("load-small-jobs", include_str!("../../scenarios/load-small-jobs.toml")),
    ("load-changes", include_str!("../../scenarios/load-changes.toml")),
    ("load-faults", include_str!("../../scenarios/load-faults.toml")),
    ("sinkhole", include_str!("../../scenarios/sinkhole.toml")),
    ("active-limit", include_str!("../../scenarios/active-limit.toml")),
    ("restart-cost", include_str!("../../scenarios/restart-cost.toml")),
    ("bursts", include_str!("../../scenarios/bursts.toml")),
];

pub fn text(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Returns the shipped scenario with this name.
///
/// # Panics
/// No shipped scenario has this name.
pub fn scenario(name: &str) -> Scenario {
    let text = text(name).expect("the scenario is shipped");
    Scenario::read(name, name, text).expect("shipped scenarios are valid")
}

/// All names, for error messages.
pub fn names() -> String {
    SHIPPED.map(|(name, _)| name).join(", ")
}
