//! Weights follow the load that backends report. A real agent sends the reports, and the test sets
//! their content. The tests check the tables, the explanation for operators, and the commands that
//! stop changes.

use std::collections::BTreeMap;

use lb_view::explanation::Explanation;
use lb_view::load::{ClientLoad, LoadDocument, MemberLoadStatus, ServiceLoadStatus};
use stage::agent::{Agent, make_key};
use stage::daemon::failure;
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};

use crate::reports::{ALL, text};

/// Three backends, an agent for all of them, and a daemon with weights that follow their reports.
fn start() -> (Fixture, Agent) {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    let lines = "load = { control = \"feedback\" }\npolicy = ";
    fixture
        .setup
        .write("socklb.toml", &text(&fixture, "weighted-round-robin", "").replace("policy = ", lines));
    report(&agent, ["0.9", "0.3", "0.3"]);
    fixture.start();
    (fixture, agent)
}

/// Sets the utilizations that the backends report.
fn report(agent: &Agent, utilizations: [&str; 3]) {
    for (backend, used) in ALL.iter().zip(utilizations) {
        agent.report(backend, used);
    }
}

/// The daemon's status of the service's weights.
fn load(fixture: &Fixture) -> Option<ServiceLoadStatus> {
    let output = fixture.setup.run(&["load", "--json"]);
    let loads: LoadDocument = serde_json::from_slice(&output.stdout).ok()?;
    let [ClientLoad { client, service, load }] = &loads.services[..] else { return None };
    assert_eq!((client.as_str(), service.as_str()), ("web", "users"));
    Some(load.clone())
}

/// The member at a position of [`ALL`].
fn member(load: &Option<ServiceLoadStatus>, at: usize) -> Option<&MemberLoadStatus> {
    load.as_ref()?.members.iter().find(|member| member.address.to_string() == ALL[at])
}

fn factor(load: &Option<ServiceLoadStatus>, at: usize) -> f64 {
    member(load, at).map_or(1.0, |member| member.factor)
}

/// The share of each backend in the kernel's table.
fn wanted(fixture: &Fixture) -> BTreeMap<String, f64> {
    let backends = fixture.setup.service().backends.into_iter();
    backends.map(|backend| (backend.address.to_string(), backend.share_wanted)).collect()
}

#[test]
fn a_busy_backend_loses_share_until_an_operator_switches() {
    let (fixture, agent) = start();
    let busy = eventually("the busy backend's factor falls", || load(&fixture), |load| factor(load, 0) < 0.7);
    assert!(factor(&busy, 1) > 1.05 && factor(&busy, 2) > 1.05, "{busy:?}");
    let first = member(&busy, 0).expect("the backend is a member");
    assert!(first.utilization == Some(0.9) && first.held_by.is_none() && first.share < 0.25, "{first:?}");
    let run = fixture.setup.folder.join("run");
    let switched =
        fixture.setup.run(&["load", "--run", run.to_str().expect("the path is UTF-8"), "freeze", "users"]);
    assert!(switched.status.success(), "{switched:?}");
    // Connects follow the shares of the table.
    let share = wanted(&fixture)[ALL[0]];
    assert!(share < 0.25, "{share}");
    let counts = fixture.probe().dial_many(SERVICE, 512);
    let got = f64::from(counts["b1"]) / 512.0;
    assert!((got - share).abs() < 0.01, "share of connects: {got}, share of the table: {share}");
    // `explain` and the metrics also show that the weights are frozen.
    let explanations: Vec<Explanation> = fixture.setup.document(&["explain", "users"]);
    assert!(explanations[0].load.as_ref().is_some_and(|load| load.switch == "freeze"));
    let explained = fixture.setup.run(&["explain", "users"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("feedback, frozen by an operator"), "{explained}");
    let page = fixture.setup.metrics();
    let line =
        format!("socklb_backend_load_factor{{client=\"web\",service=\"users\",backend=\"{}\"}} 0.", ALL[0]);
    assert!(page.contains(&line), "{page}");
    // An option without effect is refused.
    let (code, text) = failure(&fixture.setup.run(&["load", "--client", "web", "off", "users"]));
    assert!(code == Some(2) && text.contains("have no effect"), "{text}");
    // While the weights are frozen, they do not change.
    let frozen = load(&fixture);
    report(&agent, ["0.1", "0.3", "0.3"]);
    let after = eventually(
        "the daemon shows the reported load",
        || load(&fixture),
        |load| member(load, 0).is_some_and(|member| member.utilization == Some(0.1)),
    );
    assert!(
        (factor(&after, 0) - factor(&frozen, 0)).abs() < 1e-9,
        "load before: {frozen:?}, after: {after:?}"
    );
    assert_eq!(member(&after, 0).and_then(|member| member.held_by.clone()).as_deref(), Some("operator"));
    assert!(fixture.setup.run(&["load", "off", "users"]).status.success());
    eventually(
        "the weights do not follow load",
        || wanted(&fixture)[ALL[0]],
        |share| (share - 1.0 / 3.0).abs() < 0.01,
    );
    assert!(fixture.setup.run(&["load", "on", "users", "--client", "web"]).status.success());
    assert!(fixture.daemon().log().contains("an operator changed whether weights follow load"));
}
