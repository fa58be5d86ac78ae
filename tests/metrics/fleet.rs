//! Tests how many alerts fire in fleets of up to a thousand hosts, if a backend is dead, or if a
//! host sees most of its backends dead. `promtool` reads series one by one, so these tests write
//! its files; rules.test.yml has the cases that are short enough to write by hand. `promtool`
//! refuses queries over more than 10,000 samples, so the hosts of large fleets have few backends.

use std::fmt::Write;
use std::ops::Range;

use crate::shipped::{RULES, check, shipped};

/// Instances with the same number of client tasks each, which use the same backends of one service.
struct Fleet {
    instances: usize,
    clients: usize,
    backends: usize,
    /// Which instances see which backends dead, from minute 3 to minute 17.
    dead: Vec<(Range<usize>, Range<usize>)>,
    /// All alerts that fire in minute 15. None fires in minute 20.
    alerts: Vec<String>,
}

/// The series that report a dead backend: the end of the series' name, and its labels. Each client
/// task of an instance reports another series.
const SIGNS: [(&str, &str); 3] =
    [("ejected", ""), ("failing", ""), ("probe_state", r#",kind="tcp",state="failing""#)];

impl Fleet {
    fn new(instances: usize, clients: usize, backends: usize) -> Self {
        Self { instances, clients, backends, dead: Vec::new(), alerts: Vec::new() }
    }

    fn dead(mut self, instances: Range<usize>, backends: Range<usize>) -> Self {
        self.dead.push((instances, backends));
        self
    }

    /// Expects alerts for backends.
    fn backends(mut self, severity: &str, backends: Range<usize>) -> Self {
        self.alerts.extend(backends.map(|backend| {
            format!(
                r#"alertname="SocklbBackendDead",severity="{severity}",service="users",backend="b{backend}""#
            )
        }));
        self
    }

    /// Expects alerts for hosts.
    fn hosts(mut self, instances: Range<usize>) -> Self {
        self.alerts.extend(instances.map(|instance| {
            format!(r#"alertname="SocklbHostSeesMostBackendsDead",severity="page",instance="h{instance}""#)
        }));
        self
    }

    /// Appends the fleet as an entry of promtool's `tests`.
    fn write(&self, file: &mut String) {
        *file += "  - interval: 1m\n    input_series:\n";
        let tasks =
            (0..self.instances).flat_map(|instance| (0..self.clients).map(move |client| (instance, client)));
        for (instance, client) in tasks {
            for backend in 0..self.backends {
                let is_dead = self.dead.iter().any(|(instances, backends)| {
                    instances.contains(&instance) && backends.contains(&backend)
                });
                for (number, (sign, labels)) in SIGNS.iter().enumerate() {
                    let is_seen = is_dead && number == client % SIGNS.len();
                    let values = if is_seen { "0x2 1x14 0x5" } else { "0x23" };
                    let _ = writeln!(
                        file,
                        r#"      - {{ series: 'socklb_backend_{sign}{{instance="h{instance}",client="c{client}",service="users",backend="b{backend}"{labels}}}', values: '{values}' }}"#
                    );
                }
            }
        }
        let firing = r#"ALERTS{alertstate="firing"}"#;
        let _ = writeln!(file, "    promql_expr_test:\n      - {{ expr: '{firing}', eval_time: 20m }}");
        let _ = writeln!(file, "      - expr: '{firing}'\n        eval_time: 15m\n        exp_samples:");
        for alert in &self.alerts {
            let _ = writeln!(
                file,
                r#"          - {{ labels: 'ALERTS{{alertstate="firing",{alert}}}', value: 1 }}"#
            );
        }
    }
}

/// Makes promtool compare the alerts that fire with the expected ones.
#[track_caller]
fn fire(fleets: &[Fleet]) {
    let rules = std::fs::canonicalize(shipped(RULES)).expect("find the rules");
    let mut file = format!("rule_files: ['{}']\nevaluation_interval: 1m\ntests:\n", rules.display());
    for fleet in fleets {
        fleet.write(&mut file);
    }
    let folder = tempfile::tempdir().expect("create a folder");
    let path = folder.path().join("fleet.test.yml");
    std::fs::write(&path, file).expect("write the test");
    check(&["test", "rules", path.to_str().expect("the path is UTF-8")]);
}

#[test]
fn a_backend_that_a_thousand_instances_see_dead_is_one_alert() {
    fire(&[Fleet::new(1000, 3, 1).dead(0..1000, 0..1).backends("page", 0..1)]);
}

#[test]
fn an_instance_that_sees_all_its_backends_dead_is_one_alert() {
    fire(&[
        Fleet::new(1, 3, 125).dead(0..1, 0..125).hosts(0..1),
        Fleet::new(10, 1, 125).dead(7..8, 0..125).hosts(7..8),
        // If most of four backends look dead, the alert is about the host. With fewer than four
        // backends, it is about the backends, even if all of them look dead.
        Fleet::new(9, 1, 4).dead(7..8, 0..3).hosts(7..8),
        Fleet::new(9, 1, 4).dead(7..8, 0..2).backends("warn", 0..2),
        Fleet::new(9, 1, 3).dead(7..8, 0..3).backends("warn", 0..3),
    ]);
}

#[test]
fn a_backend_pages_if_two_instances_and_a_twentieth_of_its_users_see_it_dead() {
    let table = [
        (1000, 1, "warn"),
        (1000, 49, "warn"),
        (1000, 50, "page"),
        // One instance, which is a twentieth or more.
        (20, 1, "warn"),
        (1, 1, "warn"),
        // Two instances, which are exactly a twentieth.
        (40, 2, "page"),
        (41, 2, "warn"),
        // Also exactly a twentieth, of more instances.
        (60, 3, "page"),
        (61, 3, "warn"),
        (140, 7, "page"),
        (2, 2, "page"),
    ];
    let fleet = |(instances, witnesses, severity)| {
        Fleet::new(instances, 1, 1).dead(0..witnesses, 0..1).backends(severity, 0..1)
    };
    fire(&table.map(fleet));
}

#[test]
fn an_instance_that_sees_most_backends_dead_is_no_witness_against_any() {
    fire(&[
        // Ten of 100 instances see all backends dead, and one more instance sees a single backend
        // dead.
        Fleet::new(100, 1, 4).dead(0..10, 0..4).dead(10..11, 3..4).hosts(0..10).backends("warn", 3..4),
        // Five more instances see a single backend dead.
        Fleet::new(100, 1, 4).dead(0..10, 0..4).dead(10..15, 3..4).hosts(0..10).backends("page", 3..4),
    ]);
}

#[test]
fn backends_that_most_instances_see_dead_cause_no_host_alert() {
    fire(&[
        // All instances, and then most, see three quarters of the backends dead.
        Fleet::new(20, 2, 8).dead(0..20, 0..6).backends("page", 0..6),
        Fleet::new(20, 2, 8).dead(0..11, 0..6).backends("page", 0..6),
        // One instance also sees the remaining backends dead.
        Fleet::new(20, 2, 12).dead(0..20, 0..6).dead(4..5, 6..12).backends("page", 0..6).hosts(4..5),
    ]);
}
