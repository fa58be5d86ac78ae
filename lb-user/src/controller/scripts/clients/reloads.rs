//! Scripts of reloads: keys that change while flows are open, clients that are added and removed,
//! and files on a file system that does not answer.

use std::collections::BTreeMap;
use std::path::Path;

use lb_common::ending::Ending;
use lb_fake::Connect;
use lb_view::comparison::ChangeKind;

use crate::config::{self, Config, HostEnvironment};
use crate::controller::scripts::clients::{MORE, MORE_BACKEND};
use crate::controller::scripts::stage::{
    BACKENDS, CONFIG, FAULTS_PER_MILLE, LIST, PINS, SECOND, SEED, SERVICE, Stage, address, cgroup_path,
    list_of, script,
};
use crate::controller::{BackgroundWork, Event, Notice};
use crate::output::comparison::{self, RunningState};
use crate::output::configured::configured;
use crate::output::dry_run;

/// The configuration of another service, with these backends.
fn more(backends: &str) -> String {
    format!("[[service]]\nname = \"more\"\naddress = \"{MORE}\"\nbackends = {backends}\n")
}

impl Stage {
    fn services(&self) -> Vec<String> {
        self.client().services.into_iter().map(|service| service.name).collect()
    }
}

/// Changes every key of a task and of its subset, one after the other.
#[test]
fn keys_of_a_task_and_its_subset_change_under_flows_and_no_connect_fails() {
    let one = "subset = { algorithm = \"rocksteadier\", size = 1 }";
    script("", |stage| {
        for _ in 0..6 {
            stage.connect().expect("all backends accept connects");
        }
        let steps = [
            ("", "subset = { algorithm = \"rocksteadier\", size = 2 }", ("rocksteadier", Some(2), 0, 1), 2),
            ("", one, ("rocksteadier", Some(1), 0, 1), 1),
            ("index = 1\ncount = 3\n", one, ("rocksteadier", Some(1), 1, 3), 1),
            ("index = 1\ncount = 7\n", one, ("rocksteadier", Some(1), 1, 7), 1),
            ("", "subset = \"all\"", ("all", None, 0, 1), 3),
        ];
        for (task, subset, expected, backends) in steps {
            stage.write_config(subset);
            let text = stage.config_text().replace("[[client]]\n", &format!("[[client]]\n{task}"));
            stage.write_text(&text);
            stage.changed(CONFIG);
            for _ in 0..5 {
                stage.tick();
                assert_eq!(stage.dial(20), 0, "{task}{subset}");
            }
            stage.settle();
            let inputs = stage.explanation().inputs;
            let found = (inputs.algorithm.as_str(), inputs.size, inputs.index, inputs.count);
            assert_eq!(found, expected);
            assert_eq!(stage.dialled(60).len(), backends, "{task}{subset}");
        }
        stage.stop_faults();
        assert_eq!(stage.client().not_a_service, 0);
        let active =
            |stage: &Stage| stage.service().backends.iter().map(|backend| backend.active).sum::<u64>();
        assert_eq!(active(stage), 6);
        stage.close_all();
        assert_eq!(active(stage), 0);
    });
}

/// Changes in several files take effect together, at the signal.
#[test]
fn a_configuration_that_is_not_watched_changes_with_its_lists_at_sighup() {
    script("", |stage| {
        stage.stop_faults();
        let unwatched = stage.config_text() + "[daemon]\nwatch = false\n";
        stage.write_text(&unwatched);
        let endpoint = |index: usize, backend| format!("{}index = {index}\n", list_of(&[backend]));
        let all = BACKENDS.into_iter().enumerate().map(|(index, backend)| endpoint(index, backend));
        stage.disk.write(LIST, all.collect::<String>());
        stage.try_to_start(1);
        stage.disk.write(LIST, endpoint(0, BACKENDS[1]));
        stage.write_text(&(unwatched + &more(&format!("{{ static = [\"{MORE_BACKEND}\"] }}"))));
        stage.changed(CONFIG);
        stage.changed(LIST);
        stage.pass(5 * SECOND);
        assert_eq!((stage.services(), stage.dialled(30).len()), (vec!["users".to_owned()], 3));
        let read = stage.logged("endpoint list read");
        stage.dispatch(Event::Hangup);
        stage.pass(SECOND);
        assert_eq!(stage.services(), ["users", "more"]);
        assert_eq!(stage.dialled(30), [address(BACKENDS[1])].into());
        assert_eq!(stage.logged("endpoint list read") - read, 1);
        let changes = "removed: 10.0.0.1:80, 10.0.0.3:80; changed: 10.0.0.2:80 (index 1 -> 0)";
        assert_eq!(stage.logged(&format!("service=\"users\" endpoints=1 changes=\"{changes}\"")), 1);
    });
}

#[test]
fn a_client_that_leaves_is_shown_until_its_last_flow_has_ended_also_by_the_next_daemon() {
    script("", |stage| {
        let place = stage.kernel.make_cgroup(&cgroup_path("one"));
        stage.write_clients(&[("web", "web"), ("one", "one")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let Connect::Sent(mut flow) = stage.kernel.connect(place, 1, address(SERVICE)) else {
            panic!("the connect was not balanced");
        };
        stage.kernel.send_syn(&flow);
        stage.kernel.establish(&mut flow);
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.write_clients(&[("web", "web")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let leaving = |stage: &Stage| {
            let all = stage.status().leaving.into_iter();
            all.map(|leaving| (leaving.client, leaving.in_force, leaving.active)).collect::<Vec<_>>()
        };
        let held = vec![("one".to_owned(), false, Some(1))];
        assert_eq!(leaving(stage), held);
        assert_eq!(stage.reached(place, SERVICE), None);
        assert_eq!(stage.dial(30), 0, "the other client's flows are not affected");
        stage.kill();
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(leaving(stage), held);
        stage.kernel.end(flow, Ending::Closed, 100, 100);
        stage.stop_faults();
        assert_eq!((stage.pinned(), leaving(stage)), (vec!["web".to_owned()], vec![]));
        assert_eq!(stage.degraded(), [""; 0]);
    });
}

/// The programs of new clients are loaded outside of the event loop, because this takes long for
/// many clients.
#[test]
fn a_reload_that_adds_many_clients_delays_no_other_work() {
    script("", |stage| {
        stage.stop_faults();
        let names: Vec<String> = (0..40).map(|number| format!("job-{number}")).collect();
        for name in &names {
            stage.kernel.make_cgroup(&cgroup_path(name));
        }
        let added = names.iter().map(|name| (&**name, &**name));
        stage.write_clients(&[("web", "web")].into_iter().chain(added).collect::<Vec<_>>());
        stage.notices.clear();
        stage.hangs = |work| matches!(work, BackgroundWork::Load(_));
        stage.dispatch(Event::Hangup);
        // Meanwhile the daemon answers queries, and applies changes of lists and cgroups.
        stage.list(&BACKENDS[1..]);
        stage.kernel.remove_cgroup(&cgroup_path("web"));
        stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
        stage.pass(2 * SECOND);
        assert_eq!(stage.dialled(30), [address(BACKENDS[1]), address(BACKENDS[2])].into());
        assert_eq!(stage.status().clients.len(), 1);
        assert_eq!(stage.notices, [Notice::Reloading]);
        stage.finish_hung();
        stage.settle();
        assert!(
            matches!(stage.notices[..], [Notice::Reloading, .., Notice::Ready(_)]),
            "{:?}",
            stage.notices
        );
        assert_eq!((stage.status().clients.len(), stage.degraded()), (41, vec![]));
    });
}

#[test]
fn a_hung_file_system_delays_only_its_own_service() {
    const FILE: &str = "/remote/more.toml";
    script("", |stage| {
        let other = cgroup_path("b");
        stage.kernel.make_cgroup(&other);
        stage.disk.write(FILE, list_of(&[MORE_BACKEND]));
        stage.write_clients(&[("web", "web"), ("other", "b")]);
        let text = stage.config_text() + &more(&format!("{{ file = \"{FILE}\" }}"));
        stage.write_text(&text);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        assert_eq!(stage.degraded(), [""; 0]);
        stage.disk.set_hung("/remote", true);
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.pass(3 * SECOND);
        // Everything else continues.
        let goes_on = |stage: &mut Stage| {
            for at in [1, 0] {
                stage.list(&BACKENDS[at..=at]);
                stage.settle();
                assert_eq!(stage.dialled(6), [address(BACKENDS[at])].into());
            }
            stage.kernel.remove_cgroup(&other);
            stage.tick();
            let recreated = stage.kernel.make_cgroup(&other);
            stage.changed(&other);
            // While operations fail, attempts to attach may fail, too.
            let reached = (0..16).find_map(|_| {
                stage.settle();
                stage.reached(recreated, SERVICE)
            });
            assert_eq!(reached, Some(address(BACKENDS[0])), "the backend of the other client");
            // The list that was in force is still in force.
            assert_eq!(stage.reached(stage.place, MORE), Some(address(MORE_BACKEND)));
        };
        goes_on(stage);
        stage.stop_faults();
        let faults = stage.degraded();
        assert!(
            !faults.is_empty() && faults.iter().all(|fault| fault.contains("more.toml does not answer")),
            "{faults:?}"
        );
        assert_eq!(stage.logged("does not answer"), 1, "the fault is logged once");
        // A reload is also completed, and the service with the hung file retains its list.
        let taken_on = stage.controller().facts(stage.now).reloads.taken_on;
        stage.dispatch(Event::Hangup);
        goes_on(stage);
        assert_eq!(stage.controller().facts(stage.now).reloads.taken_on - taken_on, 1);
        stage.disk.set_hung("/remote", false);
        stage.pass(3 * SECOND);
        assert_eq!(stage.degraded(), [""; 0]);
        stage.disk.write(FILE, list_of(&["10.0.0.8:80"]));
        stage.changed(FILE);
        assert_eq!(
            stage.reached(stage.place, MORE),
            Some(address("10.0.0.8:80")),
            "the list is followed again"
        );
    });
}

/// `check --against-running` predicts the changes of a file.
#[test]
fn the_predicted_changes_of_a_file_are_its_real_changes() {
    let [first, second, third] = BACKENDS;
    let added = "10.0.0.4:80";
    script("", |stage| {
        stage.stop_faults();
        stage.kernel.make_cgroup(&cgroup_path("batch"));
        for _ in 0..3 {
            stage.connect().expect("all backends accept connects");
        }
        let compared = |stage: &Stage, text: &str| {
            let running = &stage.controller().config;
            let parsed = config::parse(text, Path::new(CONFIG), &HostEnvironment).expect("the text is valid");
            let (limits, paths) = (running.limits, running.paths.clone());
            let wanted = Config { limits, paths, ..parsed };
            let lists = dry_run::assignments(&wanted.clients, &[]).expect("the list is in the text");
            let running = RunningState::of_daemon(configured(running), stage.status());
            comparison::compare_with(&running, &wanted, &lists, Path::new(PINS)).expect("the list fits")
        };
        let lines = format!("policy = \"p2c\"\nbackends = {{ static = [\"{first}\", \"{added}\"] }}");
        let before = stage.config_text();
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.write_config(&lines);
        let text = stage.config_text();
        stage.write_text(&before);
        let predicted = compared(stage, &text);
        let changes = predicted.clients.iter().chain(&predicted.services).map(|change| {
            let keys: Vec<&str> = change.keys.iter().map(|change| change.key.as_str()).collect();
            (change.name.as_str(), change.kind, keys.join(" "))
        });
        let expected = [
            ("batch", ChangeKind::Added, String::new()),
            (
                "users",
                ChangeKind::Changed,
                format!("backends backends.{first} backends.{added} backends.file policy"),
            ),
        ];
        assert_eq!(changes.collect::<Vec<_>>(), expected);
        let backends =
            &predicted.shares.iter().find(|shares| shares.client == "web").expect("it changes").backends;
        let seen = backends.iter().map(|backend| (backend.address, backend.kind, backend.active));
        let expected = [
            (address(first), ChangeKind::Changed, 1),
            (address(second), ChangeKind::Removed, 1),
            (address(third), ChangeKind::Removed, 1),
            (address(added), ChangeKind::Added, 0),
        ];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
        let with_metrics = compared(stage, &format!("{text}[metrics]\nlisten = \"127.0.0.1:9464\"\n"));
        let restart =
            "metrics.listen cannot change while the daemon runs; restart socklb to apply the new value";
        assert_eq!((predicted.unchangeable, with_metrics.unchangeable), (vec![], vec![restart.to_owned()]));
        // Connects may choose the new backend. The file itself is not read any more.
        stage.write_list(&[added]);
        stage.write_text(&text);
        stage.dispatch(Event::Hangup);
        stage.settle();
        let after = backends.iter().filter_map(|backend| Some((backend.address, backend.after?)));
        let shares = stage.service().backends.into_iter().filter(|backend| !backend.is_leaving());
        let shares = shares.map(|backend| (backend.address, backend.share_wanted));
        assert_eq!(shares.collect::<BTreeMap<_, _>>(), after.collect::<BTreeMap<_, _>>());
        assert!(compared(stage, &text).is_empty());
        assert_eq!(stage.logged("changed=\"clients added: batch; services changed: users (backends"), 1);
    });
}
