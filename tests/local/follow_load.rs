//! Weights that follow the load that backends report, by a real agent that is told what to report: tables change, operators see why and
//! can stop it, and a new daemon goes on where the one before was.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use lb_view::explanation::Explanation;
use lb_view::load::{ClientLoad, LoadDocument, MemberLoadStatus, ServiceLoadStatus};
use stage::agent::{Agent, make_key};
use stage::daemon::{failure, read};
use stage::eventually;
use stage::fixture::{Fixture, SERVICE, endpoints};

use crate::reports::{ALL, text};

/// Three backends, an agent that speaks for all, and no daemon yet.
fn prepare(load: &str) -> (Fixture, Agent) {
    let fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    let configuration =
        text(&fixture, "weighted-round-robin", "").replace("policy = ", &format!("{load}\npolicy = "));
    fixture.setup.write("socklb.toml", &configuration);
    (fixture, agent)
}

/// The same with a daemon, to which the first backend reports so much and the others 0.3.
fn start(load: &str, first: &str) -> (Fixture, Agent) {
    let (mut fixture, agent) = prepare(load);
    report(&agent, [first, "0.3", "0.3"]);
    fixture.start();
    (fixture, agent)
}

/// Has the backends report these utilizations.
fn report(agent: &Agent, utilizations: [&str; 3]) {
    for (backend, used) in ALL.iter().zip(utilizations) {
        agent.report(backend, used);
    }
}

/// What the daemon says of the service's weights.
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

/// The parts that the kernel's table has of each backend.
fn wanted(fixture: &Fixture) -> BTreeMap<String, f64> {
    let backends = fixture.setup.service().backends.into_iter();
    backends.map(|backend| (backend.address.to_string(), backend.share_wanted)).collect()
}

const FEEDBACK: &str = "load = { control = \"feedback\" }";

#[test]
fn the_share_of_a_backend_that_is_busy_falls_until_an_operator_says_otherwise() {
    let (fixture, agent) = start(FEEDBACK, "0.9");
    let busy = eventually("its factor falls", || load(&fixture), |load| factor(load, 0) < 0.7);
    assert!(factor(&busy, 1) > 1.05 && factor(&busy, 2) > 1.05, "{busy:?}");
    let first = member(&busy, 0).expect("it is a member");
    assert!(first.utilization == Some(0.9) && first.held_by.is_none() && first.share < 0.25, "{first:?}");
    let run = fixture.setup.folder.join("run");
    let told = fixture.setup.run(&["load", "--run", run.to_str().expect("UTF-8"), "freeze", "users"]);
    assert!(told.status.success(), "{told:?}");
    // What connects get is what the table says.
    let share = wanted(&fixture)[ALL[0]];
    assert!(share < 0.25, "{share}");
    let counts = fixture.probe().dial_many(SERVICE, 512);
    let got = f64::from(counts["b1"]) / 512.0;
    assert!((got - share).abs() < 0.01, "{got} of {share}");
    // All that tells of it.
    let explanations: Vec<Explanation> = fixture.setup.document(&["explain", "users"]);
    assert!(explanations[0].load.as_ref().is_some_and(|load| load.switch == "freeze"));
    let explained = fixture.setup.run(&["explain", "users"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("feedback, frozen by an operator"), "{explained}");
    let page = fixture.setup.metrics();
    let line =
        format!("socklb_backend_load_factor{{client=\"web\",service=\"users\",backend=\"{}\"}} 0.", ALL[0]);
    assert!(page.contains(&line), "{page}");
    // An option that would have no effect is refused.
    let (code, text) = failure(&fixture.setup.run(&["load", "--client", "web", "off", "users"]));
    assert!(code == Some(2) && text.contains("have no effect"), "{text}");
    // While it is frozen nothing follows.
    let frozen = load(&fixture);
    report(&agent, ["0.1", "0.3", "0.3"]);
    let after = eventually(
        "it is heard",
        || load(&fixture),
        |load| member(load, 0).is_some_and(|member| member.utilization == Some(0.1)),
    );
    assert!((factor(&after, 0) - factor(&frozen, 0)).abs() < 1e-9, "{frozen:?} {after:?}");
    assert_eq!(member(&after, 0).and_then(|member| member.held_by.clone()).as_deref(), Some("operator"));
    assert!(fixture.setup.run(&["load", "off", "users"]).status.success());
    eventually(
        "weights are structural",
        || wanted(&fixture)[ALL[0]],
        |share| (share - 1.0 / 3.0).abs() < 0.01,
    );
    assert!(fixture.setup.run(&["load", "on", "users", "--client", "web"]).status.success());
    eventually("it gets more", || load(&fixture), |load| factor(load, 0) > 1.1);
    assert!(fixture.daemon().log().contains("asked to switch what follows load"));
}

#[test]
fn what_was_learnt_and_said_holds_over_kills_and_silence() {
    let (mut fixture, agent) = start(FEEDBACK, "0.9");
    eventually("its factor falls", || load(&fixture), |load| factor(load, 0) < 0.7);
    assert!(fixture.setup.run(&["load", "freeze", "users"]).status.success());
    let kept = fixture.setup.folder.join("state/load/factors.json");
    eventually(
        "it is kept",
        || fs::read_to_string(&kept).unwrap_or_default(),
        |text| text.contains("freeze"),
    );
    let before = wanted(&fixture);
    // Nobody reports any more, so that nothing but what is kept can tell the next daemon.
    drop(agent);
    fixture.daemon.take().expect("it runs").kill();
    fixture.start();
    assert_eq!(wanted(&fixture), before);
    let after = eventually("it has looked", || load(&fixture), |load| member(load, 0).is_some());
    assert!(
        after.as_ref().is_some_and(|load| load.switch == "freeze") && factor(&after, 0) < 0.75,
        "{after:?}"
    );
    // A file that is cut off is as good as none.
    fixture.stop();
    let text = read(&kept);
    fs::write(&kept, &text[..text.len() / 2]).unwrap();
    fixture.start();
    let after = eventually("it has looked", || load(&fixture), |load| member(load, 0).is_some());
    assert!(after.as_ref().is_some_and(|load| load.switch == "on"), "{after:?}");
    assert!((factor(&after, 0) - 1.0).abs() < 1e-9, "{after:?}");
    assert!((wanted(&fixture)[ALL[0]] - 1.0 / 3.0).abs() < 0.01);
    let log = fixture.daemon.as_ref().expect("it runs").log();
    assert!(log.contains("cannot be understood") && log.contains("line 1 column"), "{log}");
    assert_eq!(read(&kept.with_extension("json.not-understood")), text[..text.len() / 2]);
}

#[test]
fn what_is_said_while_the_file_cannot_be_read_holds_once_it_can_be() {
    let (mut fixture, _agent) = start(FEEDBACK, "0.3");
    let say = |fixture: &Fixture, what: &str| {
        let output = fixture.setup.run(&["load", what, "users"]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = say(&fixture, "freeze");
    assert!(!said.contains("not kept"), "{said}");
    let kept = fixture.setup.folder.join("state/load/factors.json");
    let text = || fs::read_to_string(&kept).unwrap_or_default();
    eventually("it is kept", text, |text| text.contains("freeze"));
    fixture.stop();
    let elsewhere = kept.with_extension("elsewhere");
    fs::rename(&kept, &elsewhere).expect("move it away");
    fs::create_dir(&kept).expect("what is no file");
    fixture.start();
    let switch = || load(&fixture).map(|load| load.switch);
    assert_eq!(switch().as_deref(), Some("on"));
    let said = say(&fixture, "off");
    assert!(
        said.contains("it is not kept for a later daemon yet") && said.contains("regular file"),
        "{said}"
    );
    fs::remove_dir(&kept).expect("remove it");
    fs::rename(&elsewhere, &kept).expect("move it back");
    // What is said is kept at once, and so the file is looked at.
    say(&fixture, "off");
    let log = || fixture.daemon.as_ref().expect("it runs").log();
    eventually("it is read", log, |log| log.contains("what was learnt of loads can be read"));
    eventually("it is kept", text, |text| text.contains("\"off\""));
    assert_eq!(switch().as_deref(), Some("off"));
}

#[test]
fn what_is_observed_is_shown_and_changes_nothing() {
    let (fixture, _agent) = start("load = { control = \"feedback\", mode = \"observe\" }", "0.9");
    let seen = eventually(
        "it would be less",
        || load(&fixture),
        |load| member(load, 0).is_some_and(|member| member.wanted < 0.95),
    );
    assert!((factor(&seen, 0) - 1.0).abs() < 1e-9, "{seen:?}");
    assert!((wanted(&fixture)[ALL[0]] - 1.0 / 3.0).abs() < 0.01);
    let text = fixture.setup.run(&["load"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("feedback, observed: nothing follows; idle: members are asked seldom;"), "{text}");
    assert!(text.contains("would be"), "{text}");
}

#[test]
fn a58_weights_are_requests_over_utilization() {
    let (fixture, _agent) = start("load = { control = \"a58\" }", "0.9");
    // 100 requests a second at 0.9 and twice at 0.3: 111 of 778; after ten seconds of blackout.
    let share = eventually("reports count", || wanted(&fixture)[ALL[0]], |share| *share < 0.3);
    assert!((share - 1.0 / 7.0).abs() < 0.01, "{share}");
}

#[test]
fn with_reports_of_fewer_than_half_weights_stay_and_that_is_told() {
    let (mut fixture, agent) = prepare(FEEDBACK);
    agent.tell(&["report", "--backend", ALL[0], "--utilization", "0.9", "--valid-for", "300000"]);
    fixture.start();
    eventually("it has looked", || load(&fixture), |load| member(load, 0).is_some());
    assert!(load(&fixture).is_some_and(|load| load.is_idle && !load.is_blind()), "nobody needs reports");
    let mut probe = fixture.probe();
    probe.start_dialling(SERVICE);
    let told = eventually(
        "it is told",
        || fixture.setup.faults().join("\n"),
        |faults| faults.contains("1 of 3 members report their utilization"),
    );
    assert!(told.contains("client web, service users: weights are to follow load"), "{told}");
    let seen = eventually(
        "it is held",
        || load(&fixture),
        |load| member(load, 0).is_some_and(|member| member.held_by.as_deref() == Some("few-reports")),
    );
    assert!((factor(&seen, 0) - 1.0).abs() < 1e-9, "{seen:?}");
    probe.stop_dialling();
}

#[test]
fn of_a_service_that_is_used_members_that_get_nothing_are_asked_as_often() {
    let (mut fixture, agent) = prepare(FEEDBACK);
    report(&agent, ["0.3"; 3]);
    let heavy = "weight = 60000";
    fixture.write_endpoints(&[(ALL[0], heavy), (ALL[1], heavy), (ALL[2], "weight = 1")]);
    let configuration = read(&fixture.setup.folder.join("socklb.toml"));
    let seldom = configuration.replace("idle_interval = \"100ms\"", "idle_interval = \"10m\"");
    assert_ne!(seldom, configuration);
    fixture.setup.write("socklb.toml", &seldom);
    fixture.start();
    let mut probe = fixture.probe();
    // A connect at each look: too few for one to go there.
    let mut reached = BTreeMap::new();
    let look = || {
        reached.extend(probe.dial_many(SERVICE, 1));
        load(&fixture)
    };
    // What an agent was told long ago is as new as the last answer. Once the service is not idle each is asked within an interval, one
    // after the other.
    eventually("it was told long ago", look, |load| {
        load.as_ref().is_some_and(|load| !load.is_idle && (load.reporting, load.expected) == (3, 3))
            && member(load, 2).and_then(|member| member.age_s).is_some_and(|age| age > 10.0)
    });
    assert_eq!(reached.into_keys().collect::<Vec<_>>(), ["b1", "b2"]);
}

#[test]
fn what_is_absurd_moves_a_share_as_far_as_it_goes_and_that_is_told() {
    let (fixture, agent) = start(FEEDBACK, "4000000");
    let look = || {
        // Anew each time: what is old is followed slowly.
        report(&agent, ["4000000", "0.3", "0.3"]);
        load(&fixture)
    };
    let is_there =
        |load: &Option<ServiceLoadStatus>| member(load, 0).is_some_and(|member| member.is_at_clamp);
    let seen = stage::within(Duration::from_secs(120), look, is_there).expect("it goes no further");
    let factors: Vec<f64> = (0..3).map(|at| factor(&seen, at)).collect();
    assert!(factors[0] > 0.1 && factors[0] < 0.2, "{factors:?}");
    assert!(
        (factors[1] - factors[2]).abs() < 0.05,
        "the others are as they were among each other: {factors:?}"
    );
    let faults = fixture.setup.faults().join("\n");
    assert!(faults.contains("as far as that goes") && faults.contains(ALL[0]), "{faults}");
}

#[test]
fn a_backend_that_is_new_or_available_again_starts_slowly() {
    let (mut fixture, agent) = prepare("slow_start = \"20s\"");
    fixture.start();
    assert!((wanted(&fixture)[ALL[0]] - 1.0 / 3.0).abs() < 0.01, "who is there at the start has its share");
    let list = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003", "127.0.0.1:8004"];
    let _fourth = stage::Backend::start("b4", list[3]);
    let with_fourth = endpoints(&list.map(|address| (address, "")));
    let configuration = fixture.setup.folder.join("socklb.toml");
    stage::replace(&configuration, &read(&configuration).replace("size = 3", "size = 4"));
    stage::replace(&fixture.file, &with_fourth);
    let new = |fixture: &Fixture| wanted(fixture).get(list[3]).copied().unwrap_or_default();
    let first = eventually("it is there", || new(&fixture), |share| *share > 0.0);
    // What it has when it is seen: a tenth of a quarter at the start, and a hundredth more in each second.
    assert!(first < 0.15, "a tenth of a share at first: {first}");
    eventually("it gets more", || new(&fixture), |share| *share > first + 0.02);
    // Who comes back does so with a tenth of its share, whatever it had.
    agent.tell(&["lame-duck", ALL[0]]);
    eventually("it is away", || wanted(&fixture)[ALL[0]], |share| *share < 0.05);
    agent.tell(&["ready", ALL[0]]);
    eventually("it has its share again", || wanted(&fixture)[ALL[0]], |share| *share > 0.15);
    assert_eq!(failure(&fixture.setup.run(&["load", "freeze", "users"])).0, Some(1), "there is no control");
}
