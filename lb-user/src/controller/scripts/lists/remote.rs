//! Scripts about lists that servers send.

use std::time::Duration;

use lb_view::fault::FaultCode;
use lb_view::status::RemoteStatus;

use crate::api::{ControllerQuery, Reply};
use crate::controller::scripts::stage::{BACKENDS, Stage, script};
use crate::controller::{BackgroundWork, Event};

const DNS: &str = "backends = { dns = \"users.example.com\", port = 80 }";

/// The lines of a service with these keys of a remote source.
fn dns(keys: &str) -> String {
    format!("backends = {{ dns = \"users.example.com\", port = 80, {keys} }}")
}

const MINUTE: Duration = Duration::from_mins(1);

impl Stage {
    fn error(&self) -> String {
        self.controller().sources(self.task(), self.now)["users"].error.clone().unwrap_or_default()
    }

    fn remote(&self) -> RemoteStatus {
        self.controller().sources(self.task(), self.now)["users"]
            .remote
            .clone()
            .expect("the service has a remote source")
    }

    /// The answer to `socklb source dump`: whether it is a list, or why there is none.
    fn dump(&mut self, service: &str, newest: bool) -> Result<(), String> {
        let ((answer, mut reply), service) = (Reply::new(), service.to_owned());
        self.dispatch(Event::Query(ControllerQuery::Source { service, newest, answer }));
        reply.try_recv().expect("an answer").map(drop)
    }

    /// The backends that 60 connects reach.
    fn used(&mut self) -> Vec<String> {
        self.dialled(60).iter().map(ToString::to_string).collect()
    }
}

#[test]
fn the_list_of_a_server_takes_effect() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        assert_eq!(stage.used(), BACKENDS);
        stage.answer(&["10.0.0.1:80", "10.0.0.2:80", "10.0.0.4:80"]);
        stage.stop_faults();
        assert_eq!(stage.used(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.4:80"]);
        assert_eq!((stage.error(), stage.remote().endpoints), (String::new(), Some(3)));
    });
}

#[test]
fn a_dump_without_a_list_has_the_reason() {
    script(DNS, |stage| {
        let unknown = "no client here dials a service \"user\"; did you mean users? services here are: users";
        let unsent = "no server has sent a list for service users";
        for newest in [false, true] {
            assert_eq!(stage.dump("user", newest), Err(unknown.to_owned()));
        }
        assert_eq!(stage.dump("users", false), Err("no list for service users is known yet".to_owned()));
        assert_eq!(stage.dump("users", true), Err(unsent.to_owned()));
        stage.answer(&BACKENDS);
        stage.answer_nothing();
        assert_eq!(stage.dump("users", false), Ok(()));
        assert_eq!(stage.dump("users", true), Err(unsent.to_owned()));
    });
}

#[test]
fn an_empty_or_failed_answer_leaves_the_list_in_force() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        for _ in 0..3 {
            stage.answer_nothing();
            stage.pass(2 * MINUTE);
            assert_eq!(stage.used(), BACKENDS);
            stage.fail_query();
            stage.pass(2 * MINUTE);
            assert_eq!(stage.used(), BACKENDS);
        }
        assert_eq!(stage.error(), "no list for 12 min: 10.0.0.53:53: no answer; the list in force stays");
        stage.answer_nothing();
        let error = stage.error();
        assert_eq!(error, "empty answer (NXDOMAIN) for 12 min; the list in force stays");
        stage.answer(&BACKENDS);
        assert_eq!(stage.error(), "");
    });
}

#[test]
fn without_a_list_the_fault_of_a_query_states_that_no_list_is_in_force() {
    script(DNS, |stage| {
        stage.fail_query();
        assert_eq!(stage.error(), "no list so far: 10.0.0.53:53: no answer; no list is in force");
        stage.answer_nothing();
        assert_eq!(stage.error(), "empty answer (NXDOMAIN); no list is in force");
        stage.answer(&BACKENDS);
        stage.stop_faults();
        assert_eq!((stage.used(), stage.error()), (BACKENDS.map(str::to_owned).into(), String::new()));
    });
}

#[test]
fn during_a_fault_the_number_of_endpoints_of_the_newest_list_stays() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.fail_query();
        assert_eq!(stage.remote().endpoints, Some(3));
        stage.pass(Duration::from_secs(24));
        assert_eq!(stage.error(), "no list for 24 s: 10.0.0.53:53: no answer; the list in force stays");
        stage.pass(3 * MINUTE);
        assert_eq!(stage.error(), "no list for 3 min: 10.0.0.53:53: no answer; the list in force stays");
        stage.answer_nothing();
        assert_eq!(stage.remote().endpoints, Some(3));
    });
}

#[test]
fn a_query_of_consul_that_is_under_way_waits_for_a_change() {
    script("backends = { consul = \"users\" }", |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        let waits = |stage: &Stage| {
            let remote = stage.remote().describe(Some(0), !stage.error().is_empty());
            remote.ends_with(", waits for a change")
        };
        assert!(waits(stage));
        // A query that repeats a failed one does not wait for a change.
        stage.fail_query();
        assert!(!waits(stage));
    });
}

#[test]
fn a_list_that_is_faulty_or_not_allowed_leaves_the_list_in_force() {
    script(&dns("allow = [\"10.0.0.0/24\"]"), |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        for backends in
            [&["10.0.0.1:80", "10.0.1.1:80"][..], &["10.0.0.1:0"], &["10.96.0.10:80"], &["[::1]:80"]]
        {
            stage.answer(backends);
            assert!(stage.error().contains("dns users.example.com port 80"), "{}", stage.error());
            assert_eq!(stage.used(), BACKENDS);
        }
        stage.answer(&["10.0.0.1:0"]);
        assert_eq!(
            stage.error(),
            "dns users.example.com port 80: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535); the list in force \
             stays"
        );
        stage.answer(&["10.0.0.1:80", "10.0.1.1:80"]);
        assert_eq!(
            stage.error(),
            "dns users.example.com port 80: 10.0.1.1:80 is not allowed: it is outside allow = [\"10.0.0.0/24\"] (for 1 s); the list in force stays"
        );
        // An answer with an address that is not allowed does not confirm the list.
        stage.pass(2 * MINUTE);
        stage.answer(&["10.0.0.1:80", "10.0.1.1:80"]);
        let confirmed = stage.controller().sources(stage.task(), stage.now)["users"].good_for_s;
        assert!(confirmed.is_some_and(|seconds| seconds >= 120), "{confirmed:?}");
    });
}

#[test]
fn the_removal_of_most_endpoints_waits_until_the_server_repeats_it() {
    let four = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"];
    script(DNS, |stage| {
        stage.answer(&four);
        stage.stop_faults();
        assert_eq!(stage.used(), four);
        stage.answer(&["10.0.0.4:80", "10.0.0.5:80"]);
        assert_eq!(stage.used(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80", "10.0.0.5:80"]);
        assert_eq!(stage.remote().pending_removals, 3);
        assert!(stage.status().faults.iter().any(|fault| fault.code == FaultCode::ListShrunk));
        // Without another answer, the removals never take effect.
        stage.pass(2 * MINUTE);
        assert_eq!((stage.used().len(), stage.queried_again.len()), (5, 1));
        stage.answer(&["10.0.0.4:80", "10.0.0.5:80"]);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), ["10.0.0.4:80", "10.0.0.5:80"]);
        assert_eq!(stage.remote().pending_removals, 0);
    });
}

/// The read that ends late found an earlier answer, which removes nothing.
#[test]
fn a_late_read_does_not_drop_the_removals_of_a_newer_answer() {
    let four = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"];
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.hangs = |work| matches!(work, BackgroundWork::Read { .. });
        stage.answer(&four);
        let late = stage.results_of_hung();
        stage.answer(&["10.0.0.4:80"]);
        stage.dispatch(Event::Hangup);
        assert_eq!(stage.remote().pending_removals, 3);
        late.into_iter().for_each(|event| stage.dispatch(event));
        stage.pass(MINUTE);
        assert_eq!((stage.remote().pending_removals, stage.queried_again.len()), (3, 1));
        stage.answer(&["10.0.0.4:80"]);
        stage.pass(MINUTE);
        assert_eq!((stage.remote().pending_removals, stage.used()), (0, vec!["10.0.0.4:80".to_owned()]));
    });
}

/// The load that ends late has read an earlier answer, which removes most endpoints.
#[test]
fn a_late_load_does_not_restore_the_removals_of_an_earlier_answer() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.hangs = |work| matches!(work, BackgroundWork::Load(_));
        stage.dispatch(Event::Hangup);
        stage.answer(&["10.0.0.4:80"]);
        assert_eq!(stage.remote().pending_removals, 3);
        let late = stage.results_of_hung();
        stage.answer(&BACKENDS);
        assert_eq!(stage.remote().pending_removals, 0);
        late.into_iter().for_each(|event| stage.dispatch(event));
        assert_eq!(stage.remote().pending_removals, 0);
        stage.pass(MINUTE);
        assert_eq!((stage.logged("the answer removes most endpoints"), stage.queried_again.len()), (1, 0));
        assert_eq!((stage.used(), stage.error()), (BACKENDS.map(str::to_owned).into(), String::new()));
    });
}

#[test]
fn a_removal_that_is_repeated_early_takes_effect_only_after_ten_seconds() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.answer(&["10.0.0.4:80"]);
        stage.pass(Duration::from_secs(5));
        stage.answer(&["10.0.0.4:80"]);
        assert_eq!(stage.used().len(), 4);
        stage.pass(Duration::from_secs(6));
        assert_eq!(stage.used(), ["10.0.0.4:80"], "the removal was repeated, and ten seconds have passed");
        // The list returns before the removal takes effect.
        stage.answer(&["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"]);
        stage.answer(&["10.0.0.1:80"]);
        stage.pass(Duration::from_secs(5));
        stage.answer(&["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"]);
        stage.pass(MINUTE);
        assert_eq!((stage.used().len(), stage.remote().pending_removals), (4, 0));
    });
}

#[test]
fn an_invalid_answer_ends_no_suspension() {
    script(&dns("on_empty = \"refuse\""), |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.answer_nothing();
        stage.pass(2 * MINUTE);
        assert!(stage.used().is_empty());
        for _ in 0..2 {
            stage.answer(&["10.0.0.1:0"]);
            stage.pass(MINUTE);
            assert!(stage.used().is_empty());
            assert_eq!(stage.remote().suspension.as_deref(), Some("refuse"));
            let error = stage.error();
            assert!(error.contains("10.0.0.1:0") && error.ends_with("; connects fail"), "{error}");
        }
        stage.answer(&BACKENDS);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), BACKENDS);
        assert_eq!((stage.remote().suspension, stage.error()), (None, String::new()));
    });
}

#[test]
fn an_invalid_answer_confirms_no_list() {
    script(&dns("stale_after = \"10m\", on_stale = \"refuse\""), |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        for _ in 0..4 {
            stage.pass(2 * MINUTE);
            stage.answer(&["10.0.0.1:0"]);
            assert_eq!(stage.used(), BACKENDS);
        }
        stage.pass(3 * MINUTE);
        stage.answer(&["10.0.0.1:0"]);
        stage.pass(MINUTE);
        assert!(stage.used().is_empty(), "no list was confirmed for 10 minutes");
        stage.answer(&BACKENDS);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), BACKENDS);
    });
}

#[test]
fn a_first_list_after_a_start_or_reload_that_is_refused_confirms_no_list() {
    let keys = "stale_after = \"10m\", on_stale = \"refuse\"";
    let narrow = format!("{keys}, allow = [\"10.0.1.0/24\"]");
    // The first list of the source is refused after a start, a reload, or an edit of `allow`.
    for case in ["start", "reload", "allow"] {
        script(&dns(keys), |stage| {
            stage.answer(&BACKENDS);
            stage.stop_faults();
            let why = match case {
                "start" => {
                    stage.answer(&["10.0.0.1:0"]);
                    stage.start(&BACKENDS);
                    "10.0.0.1:0"
                }
                "reload" => {
                    stage.answer(&["10.0.0.1:0"]);
                    stage.configure(&dns(keys));
                    "10.0.0.1:0"
                }
                _ => {
                    stage.configure(&dns(&narrow));
                    "is not allowed: it is outside allow"
                }
            };
            assert_eq!(stage.used(), BACKENDS);
            let error = stage.error();
            assert!(error.contains(why) && error.ends_with("; the list in force stays"), "{case}: {error}");
            for _ in 0..12 {
                stage.answer(if case == "allow" { &BACKENDS } else { &["10.0.0.1:0"] });
                stage.pass(MINUTE);
            }
            assert!(stage.used().is_empty(), "{case}: no list was confirmed for 10 minutes");
            stage.configure(&dns(keys));
            stage.answer(&BACKENDS);
            stage.pass(MINUTE);
            assert_eq!((stage.used(), stage.error()), (BACKENDS.map(str::to_owned).into(), String::new()));
        });
    }
}

#[test]
fn a_refused_first_list_confirms_no_list_when_the_rules_are_edited() {
    let keys = |pause: &str| dns(&format!("stale_after = \"{pause}\", on_stale = \"refuse\""));
    script(&keys("10m"), |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.answer(&["10.0.0.1:0"]);
        stage.start(&BACKENDS);
        for _ in 0..6 {
            stage.answer(&["10.0.0.1:0"]);
            stage.pass(MINUTE);
        }
        assert_eq!(stage.used(), BACKENDS);
        stage.configure(&keys("11m"));
        for _ in 0..6 {
            stage.answer(&["10.0.0.1:0"]);
            stage.pass(MINUTE);
        }
        assert!(stage.used().is_empty(), "no list was confirmed for 11 minutes");
        stage.answer(&BACKENDS);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), BACKENDS);
    });
}

#[test]
fn an_edit_of_the_rules_applies_no_deferred_removal() {
    script(&dns("stale_after = \"10m\""), |stage| {
        let defer = |stage: &mut Stage| {
            stage.answer(&BACKENDS);
            stage.pass(MINUTE);
            stage.answer(&["10.0.0.4:80"]);
            assert_eq!((stage.used().len(), stage.remote().pending_removals), (4, 3));
        };
        stage.answer(&BACKENDS);
        stage.stop_faults();
        defer(stage);
        stage.configure(&dns("stale_after = \"11m\""));
        assert_eq!((stage.used().len(), stage.remote().pending_removals), (4, 3));
        stage.pass(MINUTE);
        stage.answer(&["10.0.0.4:80"]);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), ["10.0.0.4:80"], "the server has repeated the removals");
        // These rules do not defer, or do not allow, the endpoints.
        for keys in ["max_shrink = \"off\"", "allow = [\"10.0.0.4/32\"]"] {
            stage.configure(&dns("stale_after = \"11m\""));
            defer(stage);
            stage.configure(&dns(keys));
            assert_eq!(stage.used(), ["10.0.0.4:80"], "{keys}");
        }
    });
}

#[test]
fn with_max_shrink_off_every_removal_takes_effect_at_once() {
    script(&dns("max_shrink = \"off\""), |stage| {
        stage.answer(&BACKENDS);
        stage.answer(&["10.0.0.4:80"]);
        stage.stop_faults();
        assert_eq!(stage.used(), ["10.0.0.4:80"]);
    });
}

#[test]
fn connects_fail_after_a_server_has_reported_no_endpoints_for_a_minute() {
    script(&dns("on_empty = \"refuse\""), |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.answer_nothing();
        stage.pass(Duration::from_secs(55));
        assert_eq!(stage.used(), BACKENDS);
        // A failed query does not confirm that there are no endpoints.
        stage.fail_query();
        stage.pass(MINUTE);
        assert_eq!(stage.used(), BACKENDS);
        stage.answer_nothing();
        stage.pass(Duration::from_secs(70));
        assert_eq!(stage.dial(10), 10);
        assert!(stage.error().ends_with("connects fail"), "{}", stage.error());
        // A failed query does not show whether there are endpoints.
        stage.fail_query();
        stage.pass(MINUTE);
        assert_eq!(stage.dial(10), 10);
        stage.answer(&BACKENDS);
        stage.pass(Duration::from_secs(1));
        assert_eq!(stage.used(), BACKENDS);
    });
}

#[test]
fn on_stale_decides_what_connects_do_with_a_stale_list() {
    for (on_stale, reached) in
        [("keep", &BACKENDS[..]), ("pass", &[crate::controller::scripts::SERVICE]), ("refuse", &[])]
    {
        script(&dns(&format!("stale_after = \"10m\", on_stale = \"{on_stale}\"")), |stage| {
            stage.expect(crate::controller::scripts::SERVICE);
            stage.answer(&BACKENDS);
            stage.stop_faults();
            stage.answer(&BACKENDS);
            stage.pass(9 * MINUTE);
            assert_eq!(stage.used(), BACKENDS);
            stage.fail_query();
            stage.pass(2 * MINUTE);
            if reached.is_empty() {
                assert_eq!(stage.dial(10), 10);
            } else {
                assert_eq!(stage.used(), reached);
            }
            // After a reload, the stale list is not in use either.
            stage.configure(&dns(&format!("stale_after = \"10m\", on_stale = \"{on_stale}\"")));
            stage.pass(MINUTE);
            assert_eq!(stage.dial(10), if reached.is_empty() { 10 } else { 0 });
            stage.answer(&BACKENDS);
            stage.pass(Duration::from_secs(1));
            assert_eq!(stage.used(), BACKENDS);
        });
    }
}

#[test]
fn a_restart_uses_the_stored_list_while_the_server_is_down() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.fail_query();
        stage.start(&BACKENDS);
        assert_eq!(stage.used(), BACKENDS);
        assert_eq!(stage.error(), "no list so far: 10.0.0.53:53: no answer; the list in force stays");
        // Removals in the server's first answer after a restart of the daemon are also deferred.
        stage.answer(&["10.0.0.4:80"]);
        assert_eq!(stage.used().len(), 4);
    });
}

#[test]
fn without_a_stored_list_the_tables_of_an_earlier_run_stay_in_force() {
    script(DNS, |stage| {
        stage.answer(&BACKENDS);
        stage.stop_faults();
        stage.fail_query();
        stage.kill();
        stage.disk.remove("/var/lib/socklb/last-good/users.json");
        stage.start(&BACKENDS);
        assert_eq!(stage.used(), BACKENDS);
        assert_eq!(
            stage.error(),
            "no list so far: 10.0.0.53:53: no answer; the tables of an earlier run stay in force"
        );
        stage.answer(&BACKENDS);
        assert_eq!((stage.used(), stage.error()), (BACKENDS.map(str::to_owned).into(), String::new()));
    });
}

#[test]
fn a_reload_from_a_file_to_a_server_retains_the_list_until_the_server_answers() {
    script("", |stage| {
        stage.stop_faults();
        stage.configure(DNS);
        assert_eq!(stage.used(), BACKENDS);
        stage.answer(&["10.0.0.4:80"]);
        stage.pass(MINUTE);
        stage.answer(&["10.0.0.4:80"]);
        stage.pass(MINUTE);
        assert_eq!(stage.used(), ["10.0.0.4:80"]);
        stage.configure("");
        assert_eq!(stage.used(), BACKENDS);
    });
}
