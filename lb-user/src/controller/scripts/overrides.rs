//! Scripts of operators' overrides: backends are drained, and weights are multiplied.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_http::peer::PeerCredentials;
use lb_view::fault::FaultCode;
use lb_view::overrides::{ClientEffect, Overridden, Override, OverrideKind, OverrideStatus};
use tokio::sync::oneshot;

use super::FOR_LONG;
use super::stage::{BACKENDS, Death, Stage, address, cgroup_path, list_of, pins_of, script};
use crate::api::{ControllerQuery, OverrideAction, OverrideRequest, Reply};
use crate::controller::{BackgroundWork, Event};

const FILE: &str = "/var/lib/socklb/overrides/overrides.json";

const SECOND: Duration = Duration::from_secs(1);

const FIRST: &str = BACKENDS[0];
const MIDDLE: &str = BACKENDS[1];
const THIRD: &str = BACKENDS[2];

pub fn drain(backends: &[&str]) -> OverrideRequest {
    OverrideRequest {
        action: OverrideAction::Drain,
        backends: backends.join(","),
        client: None,
        for_s: None,
        reason: None,
        percent: None,
        force: false,
        dry_run: false,
    }
}

fn undrain(backend: &str) -> OverrideRequest {
    OverrideRequest { action: OverrideAction::Undrain, ..drain(&[backend]) }
}

fn weight(backend: &str, percent: u16) -> OverrideRequest {
    OverrideRequest { action: OverrideAction::Weight, percent: Some(percent), ..drain(&[backend]) }
}

impl Stage {
    pub fn request(&mut self, request: OverrideRequest) -> oneshot::Receiver<Overridden> {
        let (answer, reply) = Reply::new();
        let (service, who) = ("users".to_owned(), PeerCredentials { user: 7, groups: vec![7], process: 77 });
        self.dispatch(Event::Query(ControllerQuery::Override { service, request, who, answer }));
        reply
    }

    /// Requests an override, and lets time pass until the answer arrives.
    fn overridden(&mut self, request: OverrideRequest) -> Overridden {
        let mut reply = self.request(request);
        for _ in 0..6 {
            if let Ok(overridden) = reply.try_recv() {
                return overridden;
            }
            self.pass(SECOND);
        }
        panic!("the operator got no answer within five seconds");
    }

    /// Requests an override that must be accepted.
    fn accepted(&mut self, request: OverrideRequest) -> Overridden {
        let overridden = self.overridden(request);
        assert_eq!((&overridden.refused, &overridden.not_kept), (&None, &None));
        overridden
    }

    fn refused(&mut self, request: OverrideRequest) -> String {
        let before = self.overrides();
        let overridden = self.overridden(request);
        assert_eq!(self.overrides(), before, "a refused request changes nothing");
        overridden.refused.expect("the request is refused")
    }

    /// The overrides in force, each with its backend.
    fn overrides(&self) -> Vec<(SocketAddr, OverrideKind)> {
        let document = self.controller().overrides_document();
        document.overrides.into_iter().map(|one| (one.of.scope.backend, one.of.kind)).collect()
    }

    /// The effect of the overrides on the client `web`, for each backend with an override.
    fn effects(&self) -> BTreeMap<SocketAddr, ClientEffect> {
        let document = self.controller().overrides_document();
        let effect = |one: OverrideStatus| {
            Some((one.of.scope.backend, one.clients.into_iter().find(|effect| effect.client == "web")?))
        };
        document.overrides.into_iter().filter_map(effect).collect()
    }

    /// Dials, and returns the backends that were reached. No connect may fail.
    fn reached_backends(&mut self) -> Vec<SocketAddr> {
        let before = self.sent.clone();
        assert_eq!(self.dial(60), 0);
        let grown = self.sent.iter().filter(|(backend, sent)| before.get(backend) != Some(sent));
        grown.map(|(backend, _)| *backend).collect()
    }
}

fn addresses(backends: &[&str]) -> Vec<SocketAddr> {
    backends.iter().map(|backend| address(backend)).collect()
}

#[test]
fn a_drained_backend_gets_no_connects_until_it_is_undrained() {
    script("", |stage| {
        let accepted = stage.accepted(drain(&[FIRST]));
        assert_eq!(accepted.changed, [address(FIRST)]);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        stage.stop_faults();
        let shown = stage.backend(FIRST);
        assert_eq!((shown.state.as_str(), shown.witness.as_deref()), ("drained", Some("operator")));
        assert_eq!(shown.reason.as_deref(), Some("operator: drain"));
        let mut again = drain(&["12823"]);
        again.reason = Some("new disk".to_owned());
        assert_eq!(stage.accepted(again).changed, [address(FIRST)], "the index means the same backend");
        let shown = stage.controller().overrides_document().overrides.remove(0).of;
        assert_eq!((shown.reason.as_deref(), shown.user, shown.process), (Some("new disk"), 7, 77));
        assert_eq!(stage.accepted(drain(&[FIRST])).changed, [], "the backend is drained already");
        assert_eq!(stage.accepted(undrain(FIRST)).changed, [address(FIRST)]);
        assert_eq!(stage.accepted(undrain(FIRST)).changed, []);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
    });
}

/// An answered drain is in the maps and in the file. If the daemon is killed before it answers,
/// only the drain without an answer may be lost.
#[test]
fn answered_overrides_are_in_force_after_a_kill() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.accepted(weight(THIRD, 50));
        let before = stage.overrides();
        stage.kill();
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]), "no daemon runs");
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        assert_eq!(stage.overrides(), before);
        // The daemon is killed before the drain is stored.
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        let mut reply = stage.request(drain(&[MIDDLE]));
        assert!(reply.try_recv().is_err(), "the drain is not stored yet");
        stage.hangs = |_| false;
        stage.start(&BACKENDS);
        assert_eq!(stage.overrides(), before);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        // The end of a drain also survives.
        stage.accepted(undrain(FIRST));
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
    });
}

/// An operator's command, or a time without a command.
#[derive(Clone, Debug)]
enum Act {
    Request(OverrideRequest),
    /// Lets the time of a drain end.
    Pass(Duration),
}

/// Acts, each with the backends that are drained after it. The weight is set for the last backend.
fn acts() -> Vec<(Act, &'static [&'static str])> {
    let briefly = OverrideRequest { for_s: Some(10), ..drain(&[MIDDLE]) };
    vec![
        (Act::Request(drain(&[FIRST])), &[FIRST]),
        (Act::Request(weight(THIRD, 50)), &[FIRST]),
        (Act::Request(briefly), &[FIRST, MIDDLE]),
        (Act::Pass(12 * SECOND), &[FIRST]),
        (Act::Request(undrain(FIRST)), &[]),
    ]
}

/// The backends that are drained.
fn drained(stage: &Stage) -> BTreeSet<SocketAddr> {
    let drains = stage.overrides().into_iter().filter(|(_, kind)| kind.is_drain());
    drains.map(|(backend, _)| backend).collect()
}

/// Carries out the acts until the daemon is killed, and then checks the state. Returns whether the
/// daemon was killed.
fn dies_and_loses_nothing(death: Death, operations: Option<u64>) -> bool {
    let mut stage = Stage::new("");
    stage.start(&BACKENDS);
    stage.death = death;
    if let Some(operations) = operations {
        stage.kernel.faults().fail_from(operations);
    }
    let set = |backends: &[&str]| addresses(backends).into_iter().collect::<BTreeSet<SocketAddr>>();
    let (all, mut before) = (set(&BACKENDS), BTreeSet::new());
    for (act, backends) in acts() {
        let after = set(backends);
        let mut reply = None;
        match &act {
            Act::Request(request) => {
                reply = Some(stage.request(request.clone()));
                stage.pass(2 * SECOND);
            }
            Act::Pass(time) => stage.pass(*time),
        }
        if stage.controller.is_some() {
            let overridden = reply.map(|mut reply| reply.try_recv().expect("an answer"));
            assert!(overridden.is_none_or(|one| (one.refused, one.not_kept) == (None, None)));
            assert_eq!(drained(&stage), after, "{act:?}");
            before = after;
            continue;
        }
        // With `operations`, the daemon is killed only after the event in which an operation
        // failed. It may have sent an answer that a daemon killed at the failed operation would not
        // have sent.
        let is_answered = operations.is_none() && reply.is_some_and(|mut reply| reply.try_recv().is_ok());
        if is_answered {
            before.clone_from(&after);
        }
        // Without a daemon, connects reach the same backends as before, except for those that this
        // act changes.
        let reached: BTreeSet<SocketAddr> = stage.reached_backends().into_iter().collect();
        let (both, either) = (&before & &after, &before | &after);
        assert!(reached.is_disjoint(&both) && reached.is_superset(&(&all - &either)), "{act:?}: {reached:?}");
        stage.start(&BACKENDS);
        let now = drained(&stage);
        assert!(now == before || now == after, "{act:?}: {now:?}, neither {before:?} nor {after:?}");
        assert_eq!(stage.dialled(60), &all - &now, "{act:?}");
        // The operator repeats the command.
        match &act {
            Act::Request(request) => drop(stage.accepted(request.clone())),
            Act::Pass(time) => stage.pass(*time),
        }
        assert_eq!((drained(&stage), stage.dialled(60)), (after.clone(), &all - &after), "{act:?}");
        return true;
    }
    false
}

#[test]
fn a_kill_between_any_two_steps_loses_nothing_that_was_answered() {
    let killed = (0..).take_while(|steps| dies_and_loses_nothing(Death::AfterSteps(*steps), None)).count();
    assert!(killed > 50, "{killed} steps");
}

/// Within an event, all kernel operations fail from one operation on. After the event, the daemon
/// is killed. This has the same effect as a kill between two operations.
#[test]
fn a_kill_between_any_two_operations_of_the_kernel_loses_nothing_that_was_answered() {
    let killed = (0..).take_while(|count| dies_and_loses_nothing(Death::AtFailure, Some(*count))).count();
    assert!(killed > 10, "{killed} operations");
}

#[test]
fn the_answer_reports_an_override_that_cannot_be_stored() {
    script("", |stage| {
        stage.disk.set_broken(FILE, true);
        let overridden = stage.overridden(drain(&[FIRST]));
        assert!(overridden.not_kept.as_ref().is_some_and(|why| why.contains("os error 5")));
        let document = stage.controller().overrides_document();
        assert_eq!(document.not_kept, overridden.not_kept, "the same sentence");
        assert_eq!(
            stage.reached_backends(),
            addresses(&BACKENDS[1..]),
            "the override is in force nevertheless"
        );
        let is_fault =
            |stage: &Stage| stage.faults().iter().any(|fault| fault.contains("operators' overrides"));
        assert!(is_fault(stage));
        stage.disk.set_broken(FILE, false);
        stage.stop_faults();
        stage.pass(60 * SECOND);
        assert!(!is_fault(stage));
        assert_eq!(stage.controller().overrides_document().not_kept, None);
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        let overridden = stage.overridden(drain(&[MIDDLE]));
        let expected = format!(
            "cannot store the overrides ({FILE} does not answer): they are in force; changes that are not stored are \
             lost when the daemon restarts, because it returns to what was stored last; the daemon retries"
        );
        assert_eq!(overridden.not_kept, Some(expected));
        stage.finish_hung();
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]), "both were stored later");
    });
}

/// The state words show which backends are drained.
#[test]
fn drained_backends_stay_drained_while_the_file_cannot_be_read() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.stop_faults();
        let stored = stage.disk.content(FILE).expect("the file is stored");
        stage.disk.set_broken(FILE, true);
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        assert!(
            stage
                .faults()
                .iter()
                .any(|fault| fault.contains("cannot read the operators' overrides of an earlier daemon"))
        );
        let (answer, mut reply) = Reply::new();
        stage.dispatch(Event::Query(ControllerQuery::Overrides(answer)));
        let document = reply.try_recv().expect("an answer");
        let why = document.not_kept.expect("the overrides cannot be stored");
        assert!(
            document.overrides.is_empty()
                && why.starts_with("the file of overrides cannot be read (")
                && why.contains("drains in the kernel's maps stay in force"),
            "{why}"
        );
        let why = stage.refused(undrain(FIRST));
        assert!(why.starts_with("the overrides of an earlier daemon cannot be read yet"), "{why}");
        let overridden = stage.overridden(drain(&[MIDDLE]));
        assert!(overridden.not_kept.is_some());
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]));
        stage.disk.set_broken(FILE, false);
        assert_eq!(
            stage.disk.content(FILE).expect("the file exists"),
            stored,
            "the file was not overwritten"
        );
        stage.pass(30 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]));
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]), "both are stored");
    });
}

impl Stage {
    /// Changes the stored overrides while no daemon runs.
    fn edit_stored(&mut self, edit: impl FnOnce(&mut Vec<serde_json::Value>)) {
        let stored = self.disk.content(FILE).expect("the file is stored");
        let mut stored: serde_json::Value = serde_json::from_slice(&stored).expect("JSON");
        edit(stored["overrides"].as_array_mut().expect("a list"));
        self.disk.write(FILE, stored.to_string());
    }

    /// Each override with its kind and the share of the client `web`.
    fn overridden_shares(&self) -> Vec<(SocketAddr, OverrideKind, f64)> {
        let document = self.controller().overrides_document();
        let of = |one: OverrideStatus| (one.of.scope.backend, one.of.kind, one.clients[0].share);
        document.overrides.into_iter().map(of).collect()
    }
}

/// Another program has written weights into the file that no command accepts.
#[test]
fn a_stored_weight_out_of_range_has_no_effect_and_is_not_lost() {
    for (stored, percent) in [(0, 0), (5_000, 5_000), (-1, 0), (70_000, u16::MAX)] {
        script("", |stage| {
            stage.accepted(drain(&[FIRST]));
            stage.accepted(weight(MIDDLE, 50));
            stage.accepted(weight(THIRD, 50));
            stage.stop_faults();
            stage.edit_stored(|overrides| {
                let third = overrides.iter_mut().find(|one| one["backend"] == THIRD).expect("it is stored");
                third["percent"] = stored.into();
            });
            for _ in 0..2 {
                stage.start(&BACKENDS);
                stage.stop_faults();
                let invalid = OverrideKind::Weight { percent };
                let expected = [
                    (address(FIRST), OverrideKind::Drain, 0.0),
                    (address(MIDDLE), OverrideKind::Weight { percent: 50 }, 1.0 / 3.0),
                    (address(THIRD), invalid, 2.0 / 3.0),
                ];
                let shares = stage.overridden_shares();
                for (shown, expected) in shares.iter().zip(&expected) {
                    assert_eq!((shown.0, shown.1), (expected.0, expected.1));
                    assert!((shown.2 - expected.2).abs() < 0.001, "{shown:?}");
                }
                assert_eq!(shares.len(), expected.len());
                // Another change does not remove the weight from the file.
                stage.accepted(OverrideRequest { for_s: Some(3_600), ..drain(&[FIRST]) });
            }
            let what = format!("kind=weight {percent} % why=\"a weight must be from 1 % to 1000 %\"");
            assert_eq!((stage.logged(&what), stage.logged(&format!("file={FILE}"))), (2, 2));
            // An operator replaces or ends it.
            stage.accepted(weight(THIRD, 50));
            stage.accepted(weight(MIDDLE, 100));
            stage.edit_stored(|overrides| {
                let third = overrides.iter_mut().find(|one| one["backend"] == THIRD).expect("it is stored");
                third["percent"] = stored.into();
            });
            stage.start(&BACKENDS);
            assert_eq!(stage.accepted(weight(THIRD, 100)).changed, [address(THIRD)]);
            assert_eq!(stage.overrides(), [(address(FIRST), OverrideKind::Drain)]);
        });
    }
}

/// A weight for one client hides that for all clients only if it can be applied.
#[test]
fn a_stored_weight_out_of_range_hides_no_other() {
    script("", |stage| {
        stage.accepted(weight(FIRST, 50));
        stage.accepted(OverrideRequest { client: Some("web".to_owned()), ..weight(FIRST, 20) });
        stage.stop_faults();
        stage.edit_stored(|overrides| {
            let own = overrides.iter_mut().find(|one| one["client"] == "web").expect("it is stored");
            own["percent"] = 5_000.into();
        });
        stage.start(&BACKENDS);
        stage.stop_faults();
        let document = stage.controller().overrides_document();
        let shown: Vec<_> = document.overrides.iter().map(|one| one.clients[0].share).collect();
        assert!(shown.len() == 2 && shown.iter().all(|share| (share - 0.2).abs() < 0.001), "{shown:?}");
        let percent = stage.backend(FIRST).weight_percent;
        assert_eq!(percent, Some(50));
    });
}

#[test]
fn drains_that_end_because_their_file_is_missing_are_logged() {
    const LOGGED: &str = "but the file of operators' overrides is missing";
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.accepted(drain(&[MIDDLE]));
        stage.stop_faults();
        stage.start(&BACKENDS);
        assert_eq!(stage.logged(LOGGED), 0);
        stage.disk.remove(FILE);
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
        assert_eq!(stage.logged(LOGGED), 2);
        for backend in [FIRST, MIDDLE] {
            assert_eq!(stage.logged(&format!("client=\"web\" service=\"users\" backend={backend}")), 1);
        }
        // Drains that an operator ends are not lost.
        stage.accepted(drain(&[FIRST]));
        stage.accepted(undrain(FIRST));
        assert_eq!(stage.logged(LOGGED), 2);
    });
    // Nor are those of a client that leaves and is added again.
    script("", |stage| {
        stage.accepted(drain(&[MIDDLE]));
        while stage.open.iter().all(|flow| flow.backend != address(FIRST)) {
            stage.connect().expect("a connect that is balanced");
        }
        stage.stop_faults();
        let place = stage.kernel.make_cgroup(&cgroup_path("one"));
        stage.write_clients(&[("one", "one")]);
        stage.dispatch(Event::Hangup);
        stage.accepted(undrain(MIDDLE));
        stage.write_clients(&[("web", "web"), ("one", "one")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        assert!(stage.reached(place, super::stage::SERVICE).is_some());
        assert_eq!((stage.logged(LOGGED), stage.reached_backends()), (0, addresses(&BACKENDS)));
    });
    // The file is missing only when it can be looked for.
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.stop_faults();
        stage.disk.set_broken(FILE, true);
        stage.start(&BACKENDS);
        stage.disk.remove(FILE);
        stage.disk.set_broken(FILE, false);
        stage.pass(30 * SECOND);
        assert_eq!((stage.logged(LOGGED), stage.reached_backends()), (1, addresses(&BACKENDS)));
    });
}

/// A second `undrain` of a backend that is known is a success; a name that nothing contains may be
/// misspelt, and is refused.
#[test]
fn ending_an_override_again_succeeds_while_its_name_is_known() {
    script(FOR_LONG, |stage| {
        stage.stop_faults();
        stage.accepted(drain(&[FIRST]));
        stage.accepted(drain(&[MIDDLE]));
        stage.list(&[MIDDLE, THIRD]);
        assert_eq!(stage.accepted(undrain(FIRST)).changed, [address(FIRST)]);
        let why = stage.refused(undrain(FIRST));
        let expected = format!("there is no override to end: service users has no backend {FIRST}: it has ");
        assert!(why.starts_with(&expected), "{why}");
        for changed in [addresses(&[MIDDLE]), vec![]] {
            assert_eq!(stage.accepted(undrain(MIDDLE)).changed, changed);
        }
        stage.accepted(drain(&[MIDDLE]));
        stage.reconfigure("name = \"users\"", "name = \"accounts\"");
        stage.settle();
        assert_eq!(stage.accepted(undrain(MIDDLE)).changed, addresses(&[MIDDLE]));
        let expected = "there is no override to end: no client here dials a service \"users\"; services here are: \
                        accounts";
        assert_eq!(stage.refused(undrain(MIDDLE)), expected);
    });
}

/// A file that was cut off, a file of a later version, and a file that contains something else.
const UNPARSABLE: [&str; 3] = ["{\"schema\":1,\"overrides\":[{\"serv", "{\"schema\":2}", "\u{0}garbage"];

impl Stage {
    /// Whether a fault reports that overrides were set aside.
    fn reports_lost_overrides(&self) -> bool {
        self.faults()
            .iter()
            .any(|fault| fault.contains("stored overrides could not be parsed and are now in"))
    }
}

#[test]
fn drains_in_the_tables_outlast_a_file_that_cannot_be_parsed() {
    let aside = format!("{FILE}.not-understood");
    for text in UNPARSABLE {
        script("", |stage| {
            stage.accepted(OverrideRequest { for_s: Some(3_600), ..drain(&[FIRST]) });
            stage.accepted(weight(THIRD, 50));
            stage.stop_faults();
            stage.disk.write(FILE, text);
            stage.start(&BACKENDS);
            assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
            assert_eq!(stage.disk.content(&aside).expect("it is renamed"), text.as_bytes());
            let document = stage.controller().overrides_document();
            assert!(
                document.lost.is_some_and(|lost| lost.contains(&aside)) && stage.reports_lost_overrides()
            );
            let of = &document.overrides[0].of;
            let known = (of.scope.backend, of.scope.client.as_deref(), of.until, of.process);
            assert_eq!(known, (address(FIRST), None, None, 0), "its end is not known");
            assert_eq!(stage.overrides(), [(address(FIRST), OverrideKind::Drain)]);
            // The drain is stored again, and the fault outlasts a restart.
            stage.start(&BACKENDS);
            assert_eq!(stage.overrides(), [(address(FIRST), OverrideKind::Drain)]);
            assert!(stage.reports_lost_overrides());
            // An operator can end the drain, and does not get it back.
            assert_eq!(stage.accepted(undrain(FIRST)).changed, [address(FIRST)]);
            stage.start(&BACKENDS);
            assert_eq!((stage.overrides(), stage.reached_backends()), (vec![], addresses(&BACKENDS)));
            assert!(stage.reports_lost_overrides());
            stage.disk.remove(&aside);
            stage.pass(20 * SECOND);
            assert!(!stage.reports_lost_overrides());
            assert_eq!(stage.controller().overrides_document().lost, None);
        });
    }
}

/// The daemon is killed when it has renamed the file and has not yet stored the drains again.
#[test]
fn drains_outlast_a_kill_after_their_file_was_set_aside() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.stop_faults();
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        stage.start(&BACKENDS);
        stage.hangs = |_| false;
        assert!(stage.disk.content(FILE).is_err(), "it is not stored yet");
        let lost = stage.controller().overrides_document().lost.expect("a file is set aside");
        assert!(lost.ends_with("and, after the daemon has stored them, remove it"), "{lost}");
        stage.start(&BACKENDS);
        assert_eq!(stage.overrides(), [(address(FIRST), OverrideKind::Drain)]);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        // A second such file does not replace the first one.
        stage.disk.write(FILE, UNPARSABLE[1]);
        stage.start(&BACKENDS);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        let aside = ["", "-2"].map(|number| stage.disk.content(format!("{FILE}.not-understood{number}")));
        let texts = aside.map(|text| String::from_utf8(text.expect("it exists")).expect("a text"));
        assert_eq!(texts, [UNPARSABLE[0], UNPARSABLE[1]]);
    });
}

impl Stage {
    /// The overrides in force, each with its client, and whether it is from the tables.
    fn known_drains(&self) -> Vec<(SocketAddr, Option<String>, bool)> {
        let document = self.controller().overrides_document();
        let of = document.overrides.into_iter().map(|one| one.of);
        of.map(|of| (of.scope.backend, of.scope.client, of.process == 0)).collect()
    }

    /// Adds a client `batch` with the same service.
    fn add_batch(&mut self) {
        self.kernel.make_cgroup(&cgroup_path("batch"));
        self.write_clients(&[("web", "web"), ("batch", "batch")]);
        self.dispatch(Event::Hangup);
        self.stop_faults();
    }

    /// Starts a daemon, which need not start every client, while operations fail; then stops the
    /// faults.
    fn start_with_faults(&mut self) {
        self.kernel.faults().fail_some(super::FAULTS_PER_MILLE, super::SEED);
        self.try_to_start(100);
        self.stop_faults();
    }
}

/// Client `batch` cannot be opened, so its drains are read from its pins. The operator removes the
/// file that was set aside before the client can be opened.
#[test]
fn a_drain_of_a_client_that_cannot_start_outlasts_its_file() {
    script("", |stage| {
        stage.add_batch();
        stage.accepted(drain(&[FIRST]));
        stage.accepted(OverrideRequest { client: Some("batch".to_owned()), ..drain(&[MIDDLE]) });
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.kernel.set_foreign_pins(&pins_of("batch"), true);
        stage.start_with_faults();
        let expected = [(address(FIRST), None, true), (address(MIDDLE), Some("batch".to_owned()), true)];
        assert_eq!(stage.known_drains(), expected);
        let lost = stage.controller().overrides_document().lost.expect("a file is set aside");
        assert!(lost.ends_with("repeat what is missing, then remove it"), "{lost}");
        stage.disk.remove(format!("{FILE}.not-understood"));
        stage.start_with_faults();
        stage.kernel.set_foreign_pins(&pins_of("batch"), false);
        stage.stop_faults();
        assert_eq!((stage.known_drains(), stage.faults()), (expected.to_vec(), Vec::new()));
        assert_eq!(stage.effects()[&address(FIRST)].share, 0.0);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
    });
}

/// The tables cannot be read at first. The file that was set aside may already be removed when they
/// can be read.
#[test]
fn a_drain_outlasts_its_file_while_the_tables_cannot_be_read() {
    let is_pending = |operation| {
        let mut stage = Stage::new("");
        stage.start(&BACKENDS);
        stage.accepted(drain(&[FIRST]));
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.kernel.faults().fail_after(operation);
        stage.try_to_start(2);
        let why = stage.controller().overrides_document().not_kept;
        let is_pending = why.is_some_and(|why| why.contains("cannot read the tables of client web"));
        if is_pending {
            assert!(stage.disk.content(FILE).is_err());
            let why = stage.refused(undrain(FIRST));
            assert!(why.starts_with("the overrides of an earlier daemon cannot be read yet"), "{why}");
            assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
            stage.disk.remove(format!("{FILE}.not-understood"));
        }
        stage.stop_faults();
        assert_eq!(stage.known_drains(), [(address(FIRST), None, true)]);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        is_pending
    };
    assert!((0..200).any(is_pending), "no failed operation delays the reading of the tables");
}

/// Client `batch` cannot be opened while its drain ends, so its tables still contain the drain.
#[test]
fn a_drain_that_was_ended_does_not_return_from_the_tables() {
    script("", |stage| {
        stage.add_batch();
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.start_with_faults();
        assert_eq!(stage.overrides(), [], "the tables contain no drain, which is stored");
        stage.accepted(drain(&[FIRST]));
        stage.kernel.set_foreign_pins(&pins_of("batch"), true);
        stage.start_with_faults();
        assert_eq!(stage.accepted(undrain(FIRST)).changed, [address(FIRST)]);
        stage.kernel.set_foreign_pins(&pins_of("batch"), false);
        stage.start_with_faults();
        assert_eq!((stage.overrides(), stage.reached_backends()), (vec![], addresses(&BACKENDS)));
        assert!(stage.reports_lost_overrides(), "the file that was set aside still exists");
    });
}

/// The drain is set and ends while the file cannot be read. Then the file cannot be parsed.
#[test]
fn a_drain_that_ended_while_the_file_was_unread_does_not_return() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.stop_faults();
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.disk.set_broken(FILE, true);
        stage.start_with_faults();
        stage.overridden(OverrideRequest { for_s: Some(60), ..drain(&[MIDDLE]) });
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]));
        stage.pass(65 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        stage.disk.set_broken(FILE, false);
        stage.pass(30 * SECOND);
        assert_eq!(stage.known_drains(), [(address(FIRST), None, true)]);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
    });
}

/// An input/output error does not mean that the files were removed.
#[test]
fn files_that_cannot_be_found_for_a_time_are_still_set_aside() {
    script("", |stage| {
        stage.stop_faults();
        stage.disk.write(FILE, UNPARSABLE[0]);
        stage.start(&BACKENDS);
        assert!(stage.reports_lost_overrides());
        stage.disk.set_broken(format!("{FILE}.not-understood"), true);
        stage.pass(30 * SECOND);
        assert!(stage.reports_lost_overrides());
    });
}

/// The tables of many clients may contain more drains than an operator may set.
#[test]
fn overrides_can_be_ended_if_there_are_too_many() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.stop_faults();
        stage.edit_stored(|overrides| {
            for number in 0..4_100 {
                let mut other = overrides[0].clone();
                other["backend"] = format!("10.1.{}.{}:80", number / 250, number % 250).into();
                overrides.push(other);
            }
        });
        stage.start(&BACKENDS);
        let why = stage.refused(drain(&[MIDDLE]));
        assert_eq!(why, "a host has at most 4096 overrides: end some first (`socklb overrides`)");
        stage.accepted(OverrideRequest { for_s: Some(60), ..drain(&[FIRST]) });
        assert_eq!(stage.accepted(undrain(FIRST)).changed, [address(FIRST)]);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
    });
}

#[test]
fn the_last_available_backend_is_drained_only_by_force() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        let why = stage.refused(drain(&[MIDDLE, THIRD]));
        assert_eq!(
            why,
            "no available backend of users would be left for web: use --force to drain nevertheless"
        );
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]), "several backends are one decision");
        stage.accepted(OverrideRequest { force: true, ..drain(&[MIDDLE, THIRD]) });
        assert_eq!(stage.dial(10), 10);
        stage.stop_faults();
        let codes: Vec<FaultCode> = stage.status().faults.iter().map(|fault| fault.code).collect();
        assert_eq!(codes, [FaultCode::OnlyDrained], "one cause is one fault");
        stage.configure("health = { drain_fallback = true }");
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
        stage.accepted(undrain(THIRD));
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]));
    });
}

/// A drain is no failure: two of three backends are drained, but there is no panic.
#[test]
fn drained_backends_do_not_lead_to_panic() {
    script("health = { panic_threshold = 100 }", |stage| {
        stage.accepted(drain(&[FIRST, MIDDLE]));
        stage.pass(20 * SECOND);
        assert!(!stage.status().clients[0].services[0].is_panic);
        assert_eq!(stage.reached_backends(), addresses(&[THIRD]));
    });
}

#[test]
fn an_override_ends_at_its_time() {
    script("", |stage| {
        let for_a_minute = || OverrideRequest { for_s: Some(60), ..drain(&[FIRST]) };
        stage.accepted(for_a_minute());
        stage.pass(58 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        stage.pass(3 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
        assert_eq!(stage.overrides(), []);
        // The time also passes while the host is suspended.
        stage.accepted(for_a_minute());
        stage.suspended += 60 * SECOND;
        stage.pass(2 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
        // While the daemon runs, the end of the override does not depend on the wall clock.
        stage.accepted(for_a_minute());
        stage.wall_ahead += 3_600 * SECOND;
        stage.pass(2 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
        stage.accepted(undrain(FIRST));
        // The time also passes while no daemon runs.
        stage.accepted(for_a_minute());
        stage.kill();
        stage.pass(61 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]), "no daemon ends the override");
        stage.start(&BACKENDS);
        stage.pass(2 * SECOND);
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
    });
}

#[test]
fn a_weight_override_multiplies_a_share() {
    script("", |stage| {
        let share = |overridden: &Overridden| overridden.overrides[0].clients[0].share;
        let halved = stage.accepted(weight(FIRST, 50));
        let text = stage.explained();
        assert!(text.contains(&format!("which multiply shares: {FIRST} x 50 %")), "{text}");
        assert!((share(&halved) - 0.2).abs() < 0.001, "{halved:?}");
        stage.stop_faults();
        let before = stage.sent.get(&address(FIRST)).copied().unwrap_or(0);
        assert_eq!(stage.dial(1_024), 0);
        let got = stage.sent[&address(FIRST)] - before;
        assert!((204..=206).contains(&got), "{got}");
        let least = stage.accepted(weight(FIRST, 1));
        assert!((share(&least) - 0.005).abs() < 0.001, "{least:?}");
        let most = stage.accepted(weight(FIRST, 1_000));
        assert!((share(&most) - 10.0 / 12.0).abs() < 0.001, "{most:?}");
        // A new list does not end the override; a weight of 100 % ends it.
        stage.list_text(
            &format!("{}weight = 2\n", list_of(&[FIRST]))
                .chars()
                .chain(list_of(&[THIRD]).chars())
                .collect::<String>(),
        );
        assert_eq!(stage.overrides(), [(address(FIRST), OverrideKind::Weight { percent: 1_000 })]);
        stage.accepted(weight(FIRST, 100));
        assert_eq!(stage.overrides(), []);
    });
}

/// Shares are computed among the backends that connects may choose.
#[test]
fn the_share_of_a_weight_does_not_include_drained_backends() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        let doubled = stage.accepted(weight(MIDDLE, 200));
        let share = doubled.overrides[0].clients[0].share;
        assert!((share - 2.0 / 3.0).abs() < 0.001, "{doubled:?}");
    });
}

#[test]
fn a_weight_is_refused_if_the_policy_ignores_weights() {
    script("policy = \"least-loaded\"\nsubset = { size = 3 }", |stage| {
        let why = stage.refused(weight(FIRST, 50));
        assert_eq!(why, "the policy of service users, least-loaded, compares only open flows");
    });
}

/// An operator repeats a drain to wait again. The second request contains neither a time nor a
/// reason.
#[test]
fn values_that_a_repeated_drain_omits_do_not_change() {
    script("", |stage| {
        let first =
            OverrideRequest { for_s: Some(3_600), reason: Some("new disk".to_owned()), ..drain(&[FIRST]) };
        let first = stage.accepted(first).overrides.remove(0).of;
        assert_eq!(stage.accepted(drain(&[FIRST])).changed, []);
        let again = stage.accepted(OverrideRequest { for_s: Some(60), ..drain(&[FIRST]) });
        assert_eq!(again.changed, addresses(&[FIRST]));
        let again = &again.overrides[0].of;
        assert_eq!(again.reason, first.reason);
        assert!(again.until < first.until, "{again:?}");
        // To repeat the drain of the last available backend, no `--force` is necessary.
        stage.accepted(OverrideRequest { force: true, ..drain(&[MIDDLE, THIRD]) });
        assert_eq!(stage.accepted(drain(&[THIRD])).changed, []);
        stage.accepted(OverrideRequest { for_s: Some(60), ..drain(&[THIRD]) });
    });
}

#[test]
fn what_a_second_weight_leaves_out_does_not_change() {
    script("", |stage| {
        let first = OverrideRequest {
            for_s: Some(3_600),
            reason: Some("cold cache".to_owned()),
            ..weight(FIRST, 30)
        };
        let first = stage.accepted(first).overrides.remove(0).of;
        let second = stage.accepted(weight(FIRST, 60)).overrides.remove(0).of;
        let since = second.since;
        assert_eq!(second, Override { kind: OverrideKind::Weight { percent: 60 }, since, ..first });
        assert_eq!(stage.accepted(weight(FIRST, 60)).changed, []);
        // The end of the override ends both.
        stage.accepted(weight(FIRST, 100));
        let third = stage.accepted(weight(FIRST, 60)).overrides.remove(0).of;
        assert_eq!((third.until, third.reason), (None, None));
    });
}

/// A backend may have flows after its list, its service or its client was removed.
#[test]
fn the_flows_of_a_drained_backend_are_counted_until_they_end() {
    script(FOR_LONG, |stage| {
        stage.stop_faults();
        while stage.connect() != Ok(address(FIRST)) {}
        stage.accepted(drain(&[FIRST]));
        let open = |stage: &Stage| {
            let document = stage.controller().overrides_document();
            let scopes: Vec<_> = document.overrides.iter().map(|one| one.of.scope.clone()).collect();
            document.progress(&scopes).open()
        };
        assert_eq!(open(stage), 1);
        stage.list(&BACKENDS[1..]);
        stage.pass(60 * SECOND);
        assert_eq!(open(stage), 1, "the list no longer contains the backend");
        stage.start(&BACKENDS[1..]);
        assert_eq!(open(stage), 1, "a new daemon has a list without the backend");
        stage.reconfigure("name = \"users\"", "name = \"accounts\"");
        stage.settle();
        assert_eq!(open(stage), 1, "the service is gone");
        stage.is_counted = false;
        stage.write_clients(&[("heir", "web")]);
        stage.dispatch(Event::Hangup);
        stage.settle();
        assert_eq!(open(stage), 1, "the client is gone");
        stage.close_all();
        stage.pass(10 * SECOND);
        assert_eq!(open(stage), 0);
    });
}

#[test]
fn an_override_of_a_service_that_has_left_the_configuration_has_no_effect() {
    script(FOR_LONG, |stage| {
        stage.stop_faults();
        stage.accepted(drain(&[FIRST]));
        let shown = |stage: &Stage| {
            let document = stage.controller().overrides_document();
            let of = &document.overrides[0];
            (of.is_configured, of.is_listed)
        };
        assert_eq!(shown(stage), (true, true));
        stage.reconfigure("name = \"users\"", "name = \"accounts\"");
        stage.settle();
        assert_eq!(shown(stage), (false, false));
        stage.reconfigure("name = \"accounts\"", "name = \"users\"");
        stage.settle();
        assert_eq!(shown(stage), (true, true));
    });
}

#[test]
fn a_drain_outlasts_the_absence_of_its_backend() {
    script("", |stage| {
        stage.accepted(drain(&[FIRST]));
        stage.list(&BACKENDS[1..]);
        stage.pass(60 * SECOND);
        assert!(!stage.controller().overrides_document().overrides[0].is_listed);
        stage.list(&BACKENDS);
        stage.stop_faults();
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS[1..]));
    });
}

/// A substitute receives load, so that the other members do not receive all load of a drained
/// member.
#[test]
fn a_drained_member_is_replaced() {
    let lines = "subset = { size = 2 }\nhealth = { replace_after = \"10s\" }";
    script(lines, |stage| {
        stage.stop_faults();
        let members = stage.reached_backends();
        let drained = members[0].to_string();
        stage.accepted(drain(&[&drained]));
        assert_eq!(stage.reached_backends(), members[1..]);
        stage.pass(12 * SECOND);
        let others: Vec<_> =
            addresses(&BACKENDS).into_iter().filter(|backend| *backend != members[0]).collect();
        assert_eq!(stage.reached_backends(), others);
        stage.accepted(undrain(&drained));
        stage.pass(45 * SECOND);
        assert_eq!(stage.reached_backends(), members);
    });
}

#[test]
fn connects_that_began_before_a_drain_are_waited_for() {
    script("", |stage| {
        stage.stop_faults();
        stage.hangs = |work| matches!(work, BackgroundWork::WaitForReaders);
        stage.accepted(drain(&[FIRST]));
        assert!(!stage.effects()[&address(FIRST)].is_settled);
        stage.finish_hung();
        stage.pass(2 * SECOND);
        assert!(stage.effects()[&address(FIRST)].is_settled);
    });
}

#[test]
fn an_override_of_one_client_concerns_no_other() {
    script(FOR_LONG, |stage| {
        stage.stop_faults();
        let batch = stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.dispatch(Event::Hangup);
        stage.settle();
        let only = |client: &str, request| OverrideRequest { client: Some(client.to_owned()), ..request };
        stage.accepted(only("batch", drain(&[FIRST])));
        assert_eq!(stage.reached_backends(), addresses(&BACKENDS));
        let reached: Vec<_> = (0..60).filter_map(|_| stage.reached(batch, super::stage::SERVICE)).collect();
        assert!(reached.len() == 60 && !reached.contains(&address(FIRST)));
        stage.accepted(drain(&[MIDDLE]));
        let why = stage.refused(only("web", undrain(MIDDLE)));
        let expected = "10.0.0.2:80 is drained for all clients, which cannot be ended for client web alone: leave \
                        --client out to end it for all";
        assert_eq!(why, expected);
        // If a backend is drained both for all clients and for one client, the drain for the one
        // client can be ended separately.
        stage.accepted(only("web", drain(&[MIDDLE])));
        stage.accepted(only("web", undrain(MIDDLE)));
        assert!(stage.overrides().contains(&(address(MIDDLE), OverrideKind::Drain)));
        let why = stage.refused(only("mail", drain(&[FIRST])));
        assert_eq!(why, "client mail has no service users here; clients with this service: web, batch");
        let (answer, mut reply) = Reply::new();
        let who = PeerCredentials { user: 7, groups: vec![7], process: 77 };
        let query =
            ControllerQuery::Override { service: "user".to_owned(), request: drain(&[FIRST]), who, answer };
        stage.dispatch(Event::Query(query));
        let why = reply.try_recv().expect("an answer").refused.expect("it is refused");
        assert_eq!(
            why,
            "no client here dials a service \"user\"; did you mean users? services here are: users"
        );
        let why = stage.refused(only("mail", undrain(FIRST)));
        assert_eq!(why, "client mail has no service users here; clients with this service: web, batch");
        // Without a client, every drain of the backend ends.
        stage.accepted(undrain(FIRST));
        assert_eq!(stage.overrides(), [(address(MIDDLE), OverrideKind::Drain)]);
    });
}

#[test]
fn two_operators_at_once_are_both_answered() {
    script("", |stage| {
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        let mut first = stage.request(drain(&[FIRST]));
        let mut second = stage.request(undrain(FIRST));
        stage.finish_hung();
        stage.pass(2 * SECOND);
        for reply in [&mut first, &mut second] {
            assert_eq!(reply.try_recv().expect("an answer").changed, [address(FIRST)]);
        }
        stage.start(&BACKENDS);
        assert_eq!((stage.overrides(), stage.reached_backends()), (vec![], addresses(&BACKENDS)));
    });
}

#[test]
fn a_request_for_an_unknown_backend_is_refused_with_the_known_ones() {
    script("", |stage| {
        let cases = [
            (
                drain(&["10.0.0.9:80"]),
                "service users has no backend 10.0.0.9:80: it has 10.0.0.3:80 (index 1550), 10.0.0.2:80 (index 7446), 10.0.0.1:80 (index 12823)",
            ),
            (
                drain(&["7"]),
                "service users has no backend 7: it has 10.0.0.3:80 (index 1550), 10.0.0.2:80 (index 7446), 10.0.0.1:80 (index 12823)",
            ),
        ];
        for (request, why) in cases {
            assert_eq!(stage.refused(request), why);
        }
        let dry = stage.overridden(OverrideRequest { dry_run: true, ..drain(&[FIRST]) });
        assert_eq!((dry.changed, stage.overrides()), (addresses(&[FIRST]), vec![]));
    });
}
