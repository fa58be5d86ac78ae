//! Measurements with their requirements.

use std::time::Duration;

use super::statistics::percentile;
use super::table::table;

/// One measurement, which is one line of the results.
#[derive(Debug)]
pub struct Finding {
    what: String,
    measured: String,
    needed: Option<(String, bool)>,
}

impl Finding {
    /// Creates a measurement without a requirement.
    pub fn shown(what: impl Into<String>, measured: impl Into<String>) -> Self {
        Self { what: what.into(), measured: measured.into(), needed: None }
    }

    /// Creates a measurement with its requirement, and whether the requirement is met.
    pub fn judged(
        what: impl Into<String>,
        measured: impl Into<String>,
        needed: impl Into<String>,
        is_reached: bool,
    ) -> Self {
        Self { what: what.into(), measured: measured.into(), needed: Some((needed.into(), is_reached)) }
    }

    /// Returns a description if the requirement is missed.
    fn missed(&self) -> Option<String> {
        let (needed, is_reached) = self.needed.as_ref()?;
        (!is_reached).then(|| format!("{}: {}, needed: {needed}", self.what, self.measured))
    }
}

/// Prints a table. Returns the requirements that are missed.
pub fn show(findings: &[Finding]) -> Vec<String> {
    println!("{}", print(findings));
    findings.iter().filter_map(Finding::missed).collect()
}

fn print(findings: &[Finding]) -> String {
    let row = |finding: &Finding| {
        let needed = finding.needed.as_ref().map(|(needed, is_reached)| {
            format!("{needed}: {}", if *is_reached { "reached" } else { "**missed**" })
        });
        vec![finding.what.clone(), finding.measured.clone(), needed.unwrap_or_default()]
    };
    table(&["what", "measured", "needed"], &findings.iter().map(row).collect::<Vec<_>>())
}

/// A list of times, from which quantiles are read.
#[derive(Clone, Debug)]
pub struct Times(Vec<u64>);

impl Times {
    /// Sorts the times, which may be in any order.
    pub fn new(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut ns: Vec<u64> =
            times.into_iter().map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)).collect();
        ns.sort_unstable();
        Self(ns)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The quantile for a share: the time that is longer than this share of the times. Zero if
    /// there are no times.
    pub fn at(&self, share: f64) -> Duration {
        if self.0.is_empty() {
            return Duration::ZERO;
        }
        Duration::from_nanos(percentile(&self.0, share))
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [p50, p99, p999, most] = [0.5, 0.99, 0.999, 1.0].map(|share| self.at(share).as_secs_f64() * 1e3);
        write!(
            f,
            "p50 {p50:.2} ms, p99 {p99:.2} ms, p99.9 {p999:.2} ms, max {most:.2} ms ({} samples)",
            self.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missed_targets_are_reported() {
        let findings = [
            Finding::shown("a", "1"),
            Finding::judged("b", "2", "3 at most", true),
            Finding::judged("c", "4", "3 at most", false),
        ];
        let missed: Vec<String> = findings.iter().filter_map(Finding::missed).collect();
        assert_eq!(missed, ["c: 4, needed: 3 at most"]);
        assert!(print(&findings).contains("3 at most: **missed**"));
    }

    #[test]
    fn times_are_printed_as_quantiles() {
        let times = Times::new((1..=100).rev().map(Duration::from_millis));
        assert_eq!(
            times.to_string(),
            "p50 51.00 ms, p99 100.00 ms, p99.9 100.00 ms, max 100.00 ms (100 samples)"
        );
        assert_eq!(Times::new([]).at(0.5), Duration::ZERO);
    }
}
