//! The dashboard, the alert rules and the example for Alertmanager that the package ships name
//! existing metrics and alerts, and the alerts fire when they should.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use lb_view::backend::BackendStatus;
use serde_json::Value;
use stage::agent::{Agent, make_key};
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};

use crate::http;
use crate::page::{COUNTED, LISTEN, with};
use crate::prometheus::{amtool, promtool};

/// The path of a file that the package ships.
pub fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(name)
}

const DASHBOARD: &str = "grafana/socklb.json";
pub const RULES: &str = "prometheus/socklb.rules.yml";
const ALERTMANAGER: &str = "prometheus/alertmanager.yml";

/// The names of socklb's metrics in a text. Names of recorded series contain colons and are not the
/// daemon's.
fn names(text: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
    let words = text.split(|c| !is_name(c));
    words.filter(|word| word.starts_with("socklb_")).collect()
}

#[test]
fn dashboard_and_rules_use_only_existing_metrics() {
    let _alone = COUNTED.lock();
    // Metrics of program runs exist while the kernel counts them.
    let _counting = stage::sys::count_runs();
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let addresses: Vec<String> =
        fixture.backends.iter().map(|backend| backend.address().to_string()).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let agent = Agent::start(&fixture.setup, &key, &addresses);
    for backend in &addresses {
        agent.report(backend, "0.3");
    }
    // Services with reports have all metrics that probes by connection have. Metrics of load exist
    // if weights follow load.
    let reports = "policy = \"weighted-round-robin\"\nload = { control = \"feedback\" }\nhealth = { probe = \"report\", interval = \"100ms\", idle_interval = \"100ms\" }\n[reports]\nlisten = \"127.0.0.1:0\"\nkey = \"service.key\"";
    with(&fixture, &format!("{reports}\n[metrics]\nlisten = \"{LISTEN}\"\n"));
    fixture.start();
    let is_probed =
        |backend: &BackendStatus| backend.probe.as_ref().is_some_and(|probe| probe.state == "ready");
    let backends = || fixture.setup.backends("web", "users");
    eventually("all backends are probed", backends, |all| all.len() == 3 && all.iter().all(is_probed));
    assert_eq!(fixture.probe().dial_many(SERVICE, 9).len(), 3);
    // Load control reads the reported load once per second.
    let page = eventually(
        "load control has read the load",
        || http::get(LISTEN, "/metrics", http::OPEN_METRICS).body,
        |page| page.contains("\nsocklb_backend_load_factor{"),
    );
    let series: BTreeSet<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    for file in [DASHBOARD, RULES] {
        let text = stage::daemon::read(&shipped(file));
        let used = names(&text);
        assert!(used.len() > 5, "{file} uses few metrics: {used:?}");
        // This metric needs a server with TLS, so only unit tests have it.
        let is_known = |name: &str| {
            series.contains(name) || name == "socklb_source_certificate_expiry_timestamp_seconds"
        };
        let unknown: Vec<&&str> = used.iter().filter(|name| !is_known(name)).collect();
        assert!(unknown.is_empty(), "{file} uses unknown metrics: {unknown:?}");
    }
}

#[test]
fn every_panel_of_the_dashboard_has_a_query_and_a_description() {
    let text = stage::daemon::read(&shipped(DASHBOARD));
    let dashboard: Value = serde_json::from_str(&text).expect("the text is JSON");
    let variables = dashboard["templating"]["list"].as_array().expect("the dashboard has variables");
    let names: Vec<&str> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
    assert_eq!(names, ["datasource", "client", "service"]);
    let panels = dashboard["panels"].as_array().expect("the dashboard has panels");
    assert!(panels.len() >= 8, "the dashboard has {} panels", panels.len());
    let mut positions = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().expect("the panel has a title");
        assert!(!panel["description"].as_str().unwrap_or_default().is_empty(), "{title} has no description");
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        let position = &panel["gridPos"];
        assert!(
            positions.insert((position["x"].to_string(), position["y"].to_string())),
            "panel {title} has the position of another panel"
        );
        for target in panel["targets"].as_array().expect("the panel has targets") {
            let query = target["expr"].as_str().expect("the target has a query");
            // The metrics of datagrams to the daemon belong to no client, and an override may
            // concern all clients.
            let is_of_client = !query.contains("socklb_report_") && !query.contains("socklb_overrides");
            assert!(query.contains("socklb_"), "{title}: {query}");
            assert_eq!(query.contains("client=~\"$client\""), is_of_client, "{title}: {query}");
        }
    }
}

#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let text = stage::daemon::read(&shipped(DASHBOARD));
    let dashboard: Value = serde_json::from_str(&text).expect("the text is JSON");
    // The expressions are written as recording rules, because promtool reads them in this form.
    let mut rules = String::from("groups:\n  - name: dashboard\n    rules:\n");
    let panels = dashboard["panels"].as_array().expect("the dashboard has panels").iter();
    for (number, target) in
        panels.flat_map(|panel| panel["targets"].as_array().expect("the panel has targets")).enumerate()
    {
        let query =
            target["expr"].as_str().expect("the target has a query").replace("$__rate_interval", "5m");
        rules += &format!("      - record: dashboard:{number}\n        expr: {}\n", Value::from(query));
    }
    let folder = tempfile::tempdir().expect("create a folder");
    let path = folder.path().join("dashboard.rules.yml");
    std::fs::write(&path, rules).expect("write the rules");
    check(&["check", "rules", "--lint=none", path.to_str().expect("the path is UTF-8")]);
}

#[test]
fn promtool_accepts_the_rules_and_every_alert_fires_in_a_test() {
    check(&["check", "rules", "--lint-fatal", shipped(RULES).to_str().expect("the path is UTF-8")]);
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("metrics/rules.test.yml");
    check(&["test", "rules", tests.to_str().expect("the path is UTF-8")]);
    // The tests cause each alert of the file to fire.
    let tests = stage::daemon::read(&tests);
    for alert in alerts(&stage::daemon::read(&shipped(RULES))) {
        assert!(tests.contains(&format!("alertname: {alert}\n        exp_alerts:\n")), "{alert} never fires");
    }
}

#[test]
fn amtool_accepts_the_alertmanager_example_and_its_alerts_exist() {
    let path = shipped(ALERTMANAGER);
    succeeded(&amtool(&["check-config", path.to_str().expect("the path is UTF-8")]));
    let rules = stage::daemon::read(&shipped(RULES));
    let alerts = alerts(&rules);
    let example = stage::daemon::read(&path);
    let named = example.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| word.starts_with("Socklb"));
    let named: BTreeSet<&str> = named.collect();
    assert!(
        named.contains("SocklbBackendDead") && named.is_subset(&alerts),
        "the example names {named:?}, and the rules define {alerts:?}"
    );
}

/// The alerts of a file of rules.
fn alerts(rules: &str) -> BTreeSet<&str> {
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

/// Runs promtool, which must succeed.
#[track_caller]
pub fn check(arguments: &[&str]) {
    succeeded(&promtool(arguments, Stdio::null()));
}

#[track_caller]
fn succeeded(output: &Output) {
    let error_text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {error_text}", output.status);
}
