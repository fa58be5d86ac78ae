//! Weights follow the load that backends report. A real agent sends the reports, and the test sets
//! their content. The tests check the tables, the explanation for operators, and the commands that
//! stop changes.

use std::collections::BTreeMap;

use lb_view::load::{ClientLoad, LoadDocument, MemberLoadStatus, ServiceLoadStatus};
use stage::agent::{Agent, make_key};
use stage::daemon::failure;
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};

use crate::agents::reports::{ALL, text};

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

/// `lb-user` has the weights of a busy backend as a script with the same name.
#[test]
fn a_busy_backend_loses_share_until_an_operator_switches() {
    let (fixture, agent) = start();
    let busy = eventually("the busy backend's factor falls", || load(&fixture), |load| factor(load, 0) < 0.7);
    let first = member(&busy, 0).expect("the backend is a member");
    assert!(first.utilization == Some(0.9) && first.held_by.is_none() && first.share < 0.25, "{first:?}");
    let switch = |to: &str| assert!(fixture.setup.run(&["load", to, "users"]).status.success());
    switch("freeze");
    // Connects follow the shares of the table.
    let share = wanted(&fixture)[ALL[0]];
    let counts = fixture.probe().dial_many(SERVICE, 512);
    let got = f64::from(counts["b1"]) / 512.0;
    assert!((got - share).abs() < 0.01, "share of connects: {got}, share of the table: {share}");
    let explained = fixture.setup.run(&["explain", "users"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("feedback, frozen by an operator"), "{explained}");
    // An option without effect is refused.
    let (code, text) = failure(&fixture.setup.run(&["load", "--client", "web", "off", "users"]));
    assert!(code == Some(2) && text.contains("have no effect"), "{text}");
    report(&agent, ["0.1", "0.3", "0.3"]);
    let after = eventually(
        "the daemon shows the reported load",
        || load(&fixture),
        |load| member(load, 0).is_some_and(|member| member.utilization == Some(0.1)),
    );
    assert_eq!(member(&after, 0).and_then(|member| member.held_by.clone()).as_deref(), Some("operator"));
    switch("off");
    eventually(
        "the weights do not follow load",
        || wanted(&fixture)[ALL[0]],
        |share| (share - 1.0 / 3.0).abs() < 0.01,
    );
    switch("on");
    assert!(fixture.daemon().log().contains("an operator changed whether weights follow load"));
}
