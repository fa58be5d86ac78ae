//! Scripts of endpoint files that change, are lost, or are invalid.

mod addresses;
mod hosts;
mod remote;
mod subsets;

use std::collections::BTreeMap;

use lb_common::abi::BackendState;
use lb_core::health::Health;
use lb_kernel::Snapshot;
use lb_view::status::SourceStatus;

use super::stage::{
    BACKENDS, FAULTS_PER_MILLE, LIST, SEED, SERVICE, Stage, address, cgroup_path, list_of, script,
};
use crate::controller::{BackgroundWork, Event};
use crate::output::status;

const LAST_GOOD: &str = "/var/lib/socklb";

/// A list of the three backends. Each has the lines at its position.
fn with(lines: [&str; 3]) -> String {
    let endpoint = |(backend, lines)| format!("{}{lines}\n", list_of(&[backend]));
    BACKENDS.into_iter().zip(lines).map(endpoint).collect()
}

/// The backends at these positions.
fn of(numbers: &[usize]) -> std::collections::BTreeSet<std::net::SocketAddr> {
    numbers.iter().map(|number| address(BACKENDS[*number])).collect()
}

/// The addresses of `count` backends in 10.`network`.0.0/16.
fn many(network: u8, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("10.{network}.{}.{}:80", n / 200, 1 + n % 200)).collect()
}

impl Stage {
    fn list_all(&mut self, backends: &[String]) {
        let backends: Vec<&str> = backends.iter().map(String::as_str).collect();
        self.list(&backends);
    }

    fn service_source(&self) -> SourceStatus {
        self.controller().sources(self.task(), self.now).remove("users").expect("the service has a source")
    }

    fn file_fault(&self) -> String {
        self.service_source().error.unwrap_or_default()
    }

    fn file_failures(&self) -> u64 {
        self.service_source().failures
    }
}

#[test]
fn a_reweighted_endpoint_gets_its_new_share() {
    script("", |stage| {
        stage.list_text(&with(["weight = 3", "", "weight = 0"]));
        stage.stop_faults();
        let before = stage.sent.clone();
        assert_eq!(stage.dial(400), 0);
        let sent = BACKENDS.map(|backend| {
            let before = before.get(&address(backend)).copied().unwrap_or(0);
            stage.sent.get(&address(backend)).copied().unwrap_or(0) - before
        });
        assert_eq!(sent, [300, 100, 0]);
        let snapshot = Snapshot::read(stage.task().datapath().tables()).expect("faults are off");
        let shown = snapshot.services[0].backends.iter();
        let shown = shown.map(|backend| (backend.address.as_str(), backend.share_wanted));
        assert_eq!(shown.collect::<BTreeMap<_, _>>(), [(BACKENDS[0], 0.75), (BACKENDS[1], 0.25)].into());
    });
}

#[test]
fn a_lame_duck_gets_no_new_connects_and_retains_open_ones() {
    let lame = "state = \"lame-duck\"";
    script("", |stage| {
        for _ in 0..30 {
            stage.connect().expect("all backends accept connects");
        }
        stage.list_text(&with(["", lame, ""]));
        stage.settle();
        assert_eq!(stage.dialled(60), of(&[0, 2]));
        stage.close_all();
        // When the last connection to a lame duck ends, the lame duck's slot is freed. But one of
        // the two lame ducks retains its slot, because it is the backup.
        stage.list_text(&with(["", lame, lame]));
        stage.stop_faults();
        assert_eq!(stage.dialled(60), of(&[0]));
        assert_eq!(stage.states().len(), 2);
        stage.list_text(&with(["", "", ""]));
        stage.stop_faults();
        assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
    });
}

#[test]
fn lame_ducks_and_down_backends_serve_only_if_no_better_one_has_a_weight() {
    let [lame, down, never] = ["state = \"lame-duck\"", "state = \"down\"", "weight = 0"];
    script("", |stage| {
        for (lines, expected) in [
            ([lame, never, lame], &[0, 2][..]),
            ([down, "", down], &[1]),
            ([down, lame, down], &[1]),
            ([down, never, down], &[0, 2]),
        ] {
            stage.list_text(&with(lines));
            stage.stop_faults();
            assert_eq!(stage.dialled(60), of(expected), "{lines:?}");
            stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        }
        assert_eq!(status::found(&stage.slot(address(BACKENDS[0]))).0, Health::Refusing);
    });
}

#[test]
fn a_list_may_change_its_format_between_reads() {
    let slice = r#"{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","addressType":"IPv4","endpoints":[
        {"addresses":["10.0.0.2"],"conditions":{"ready":true}}],"ports":[{"name":"","port":80}]}"#;
    let consul = r#"[{"Node":{"Address":"10.0.0.3"},"Service":{"Service":"users","Port":80},"Checks":[]}]"#;
    script("", |stage| {
        for (text, expected) in [
            ("- targets: ['10.0.0.1:80']\n", 0),
            (slice, 1),
            (consul, 2),
            ("endpoint = [{ address = '10.0.0.1:80' }]", 0),
        ] {
            stage.list_text(text);
            stage.settle();
            assert_eq!(stage.dialled(30), of(&[expected]), "{text}");
        }
    });
}

#[test]
fn an_unusable_file_changes_nothing_and_is_reported_once() {
    let good = list_of(&BACKENDS);
    script("", |stage| {
        for (times, (text, message)) in (1..).zip([
            ("", "no endpoint"),
            (&good[..good.len() / 2 + 3], "users.toml:"),
            ("<html>", "users.toml:1:1"),
            ("[[endpoint]]\naddress = \"db1.example\"\n", "users.toml:2:11"),
            ("[[endpoint]]\naddress = \"10.0.0.1:80\"\nweigth = 2\n", "weigth"),
        ]) {
            stage.list_text(text);
            stage.tick();
            assert!(stage.file_fault().contains(message), "{text}: {}", stage.file_fault());
            assert_eq!(stage.file_failures(), times, "{text}");
            assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
            assert!(stage.disk.content("/var/lib/socklb/last-good/users.toml").is_ok());
        }
        stage.list(&BACKENDS[..2]);
        stage.settle();
        assert_eq!((stage.file_fault().as_str(), stage.dialled(60)), ("", of(&[0, 1])));
    });
}

#[test]
fn a_missing_or_unreadable_file_changes_nothing_until_it_returns() {
    script("", |stage| {
        stage.disk.remove(LIST);
        stage.changed(LIST);
        assert!(stage.file_fault().contains("not found"), "{}", stage.file_fault());
        assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
        stage.list(&BACKENDS[..2]);
        stage.settle();
        assert_eq!(stage.dialled(60), of(&[0, 1]));
        // After a read error, for example for lack of memory, the same version is read again.
        stage.disk.set_broken(LIST, true);
        stage.list(&BACKENDS[1..]);
        stage.tick();
        assert!(stage.file_fault().contains("os error 5"), "{}", stage.file_fault());
        assert_eq!(stage.dialled(60), of(&[0, 1]));
        stage.disk.set_broken(LIST, false);
        stage.stop_faults();
        assert_eq!((stage.file_fault().as_str(), stage.dialled(60)), ("", of(&[1, 2])));
    });
}

#[test]
fn a_change_without_a_watch_event_is_found_within_two_seconds() {
    script("", |stage| {
        stage.write_list(&BACKENDS[..1]);
        stage.tick();
        stage.tick();
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[0]));
    });
}

#[test]
fn a_start_with_a_bad_file_uses_the_last_good_list_of_its_service() {
    script("", |stage| {
        stage.stop_faults();
        stage.kill();
        lb_kernel::Kernel::detach(&stage.kernel, &stage.pins()).expect("faults are off");
        (stage.sent, stage.open) = Default::default();
        stage.disk.write(LIST, "nonsense");
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
        assert!(stage.file_fault().contains("users.toml:1:"), "{}", stage.file_fault());
        // A truncated stored list is not used.
        stage.kill();
        lb_kernel::Kernel::detach(&stage.kernel, &stage.pins()).expect("faults are off");
        (stage.sent, stage.open) = Default::default();
        let stored = stage.disk.below(LAST_GOOD);
        assert_eq!(stored.len(), 1, "{stored:?}");
        let whole = stage.disk.content(&stored[0]).expect("the file exists");
        stage.disk.write(&stored[0], &whole[..whole.len() - 10]);
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.connect(), Err(113), "there is no list");
        stage.list(&BACKENDS[..1]);
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[0]));
    });
}

/// R13, a bug of another load balancer: all backends were removed when a source returned an empty
/// list, or when a daemon started without its source.
#[test]
fn r13_only_a_valid_list_removes_backends() {
    let whole = list_of(&BACKENDS);
    script("", |stage| {
        stage.stop_faults();
        for bad in ["", &whole[..whole.len() - 6], "[[endpoint]]\n", "\0\0\0"] {
            stage.list_text(bad);
            assert_ne!(stage.file_fault(), "", "{bad:?}");
            assert_eq!(stage.dialled(30), of(&[0, 1, 2]), "{bad:?}");
            stage.try_to_start(1);
            assert_ne!(stage.file_fault(), "", "a start with {bad:?}");
            assert_eq!(stage.dialled(30), of(&[0, 1, 2]), "a start with {bad:?}");
            stage.list_text(&whole);
            assert_eq!(stage.file_fault(), "");
        }
        stage.list(&BACKENDS[1..2]);
        stage.settle();
        assert_eq!((stage.file_fault().as_str(), stage.dialled(30)), ("", of(&[1])));
    });
}

#[test]
fn prometheus_json_is_read_and_ignored_keys_are_noted() {
    let group = |labels: &str| {
        format!(r#"[{{"targets": ["{}", "{}"], "labels": {{{labels}}}}}]"#, BACKENDS[0], BACKENDS[2])
    };
    script("", |stage| {
        let notes = |stage: &Stage| stage.service_source().notes;
        stage.list_text(&group(r#""weight": "2", "state": "running", "__meta_x": "y""#));
        stage.stop_faults();
        assert_eq!(stage.dialled(30), of(&[0, 2]));
        let note =
            "label state is ignored: unknown state \"running\" on line 1; write a label socklb_state instead";
        assert_eq!(notes(stage), [note]);
        stage.list_text(&group(r#""socklb_state": "lame-duck", "state": "running""#));
        stage.stop_faults();
        assert_eq!(notes(stage), [""; 0]);
        assert_eq!(stage.backend(BACKENDS[2]).state, "lame-duck");
        // The stored list is JSON. A start without the list's file uses the stored list.
        stage.disk.remove(LIST);
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.backend(BACKENDS[2]).state, "lame-duck");
        assert_eq!(stage.dialled(30), of(&[0, 2]));
    });
}

/// The daemon waits a limited time for the file, and then for the stored last good list. If neither
/// can be read, connects use the tables in the kernel.
#[test]
fn a_start_continues_if_a_file_system_hangs() {
    script("", |stage| {
        stage.list(&BACKENDS[..2]);
        stage.stop_faults();
        stage.disk.set_hung(LIST, true);
        stage.kill();
        lb_kernel::Kernel::detach(&stage.kernel, &stage.pins()).expect("faults are off");
        (stage.sent, stage.open) = Default::default();
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[0, 1]), "the last good list is in force");
        assert!(stage.file_fault().contains("users.toml does not answer"), "{}", stage.file_fault());
        stage.disk.set_hung(LAST_GOOD, true);
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[0, 1]), "the tables in the kernel serve");
        for path in [LIST, LAST_GOOD] {
            stage.disk.set_hung(path, false);
        }
        stage.pass(std::time::Duration::from_secs(3));
        assert_eq!(stage.file_fault(), "");
        stage.list(&BACKENDS[2..]);
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[2]));
    });
}

/// Only other files of the directory change, and time passes.
#[test]
fn an_idle_daemon_reads_no_file_again() {
    script("", |stage| {
        stage.stop_faults();
        let readings = |stage: &Stage| stage.controller().sources.readings;
        let before = readings(stage);
        for n in 0..5 {
            stage.disk.write(format!("/lists/other{n}"), "x");
            stage.changed(format!("/lists/other{n}"));
            stage.pass(std::time::Duration::from_mins(1));
        }
        // A change in the directory causes a check of the file's version. The content is not read
        // again, because the version is known.
        assert_eq!((readings(stage) - before, stage.service_source().failures), (5, 0));
        stage.hangs = |work| matches!(work, BackgroundWork::Read { .. });
        stage.pass(std::time::Duration::from_mins(1));
        assert_eq!(readings(stage) - before, 5);
    });
}

/// The arena has room for twice the limit, because tables that grow and shrink fragment it.
#[test]
fn tables_of_many_lengths_always_find_room() {
    // Up to 32 backends need 1,024 entries, 128 backends need 4,096.
    let sizes =
        [(4, 128), (4, 127), (4, 1), (0, 2), (1, 128), (3, 2), (2, 2), (3, 1), (1, 127), (1, 1), (2, 128)];
    let list = |service: usize, count: usize, version: usize| {
        let all: Vec<String> =
            (0..count).map(|n| format!("10.{}.{version}.{}:80", service + 1, n + 1)).collect();
        list_of(&all.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let mut stage = Stage::new("");
    let mut text =
        "[limits]\nschedule_entries = 8192\n[[client]]\njob = \"web\"\ncgroup = \"web\"\n".to_owned();
    for n in 0..5 {
        stage.disk.write(format!("/lists/{n}.toml"), list(n, 1, 0));
        text += &format!(
            "[[service]]\nname = \"s{n}\"\naddress = \"10.96.1.{n}:80\"\nbackends = {{ file = \"/lists/{n}.toml\" }}\n"
        );
    }
    stage.write_text(&text);
    stage.try_to_start(1);
    for (version, (service, count)) in (1..).zip(sizes) {
        stage.disk.write(format!("/lists/{service}.toml"), list(service, count, version));
        stage.changed(format!("/lists/{service}.toml"));
        stage.settle();
        let backends = stage.client().services.swap_remove(service).backends.into_iter();
        let version = format!("10.{}.{version}.", service + 1);
        let used =
            backends.filter(|one| one.share_wanted > 0.0 && one.address.to_string().starts_with(&version));
        assert_eq!((used.count(), stage.faults()), (count, vec![]), "backends in {version}");
    }
    for n in 0..5 {
        assert!((0..20).all(|_| stage.reached(stage.place, &format!("10.96.1.{n}:80")).is_some()));
    }
}

#[test]
fn a_static_list_without_free_slots_does_not_prevent_a_start() {
    let lines = |list: &[String]| format!("subset = \"all\"\nbackends = {{ static = {list:?} }}");
    let (old, new) = (many(1, 300), many(2, 300));
    script("", |stage| {
        stage.configure(&lines(&old));
        stage.stop_faults();
        stage.is_counted = false;
        let used = |stage: &Stage, of: &str| {
            let backends = stage.service().backends.into_iter();
            backends.filter(|one| one.usable && one.address.to_string().starts_with(of)).count()
        };
        // 300 other backends do not fit in addition to the 300 that are in force.
        stage.write_config(&lines(&new));
        stage.try_to_start(1);
        assert!(stage.file_fault().contains("all 512 slots"), "{}", stage.file_fault());
        assert_eq!((used(stage, "10.1."), stage.reached(stage.place, SERVICE).is_some()), (300, true));
        // A shorter list fits, and makes room for the rest.
        for count in [100, 300] {
            stage.configure(&lines(&new[..count]));
            stage.stop_faults();
            assert_eq!((used(stage, "10.2."), stage.file_fault().as_str()), (count, ""));
        }
    });
}

#[test]
fn a_first_start_without_any_list_refuses_connects_and_recovers() {
    let mut stage = Stage::new("");
    stage.try_to_start(1);
    stage.settle();
    assert_eq!(stage.connect(), Err(113));
    assert!(stage.file_fault().contains("not found"), "{}", stage.file_fault());
    stage.list(&BACKENDS[..1]);
    stage.settle();
    assert_eq!((stage.file_fault().as_str(), stage.dialled(30)), ("", of(&[0])));
}

#[test]
fn a_service_without_backends_refuses_connects_with_its_errno() {
    script("", |stage| {
        stage.list_text(&with(["weight = 0", "weight = 0", "weight = 0"]));
        stage.stop_faults();
        assert_eq!(stage.connect(), Err(113));
        for (name, errno) in [("ECONNREFUSED", 111), ("ETIMEDOUT", 110)] {
            stage.configure(&format!("on_no_backend = \"{name}\""));
            assert_eq!(stage.connect(), Err(errno));
        }
        stage.list_text(&with(["weight = 2", "weight = 2", "weight = 2"]));
        stage.stop_faults();
        assert_eq!((stage.dial(30), stage.sent.len()), (0, 3), "weights that are raised end the refusals");
    });
}

#[test]
fn a_list_without_free_slots_is_applied_once_slots_are_free() {
    script("subset = \"all\"", |stage| {
        let (old, new) = (many(1, 500), many(2, 500));
        stage.list_all(&old);
        stage.stop_faults();
        stage.connect().expect("all backends accept connects");
        // The new backends do not fit in addition to the old backends, so the old list stays in
        // force.
        stage.list_all(&new);
        stage.tick();
        assert!(stage.file_fault().contains("all 512 slots"), "{}", stage.file_fault());
        assert!(stage.dialled(30).iter().all(|backend| old.contains(&backend.to_string())));
        // First, a shorter list takes effect. The slots of the backends that it does not contain
        // are freed, except the slot with an open flow.
        stage.list_all(&old[..20]);
        stage.stop_faults();
        stage.list_all(&new[..400]);
        stage.stop_faults();
        assert_eq!(stage.file_fault(), "");
        assert!(stage.dialled(30).iter().all(|backend| new.contains(&backend.to_string())));
    });
}

/// The file has not changed since it was refused, so it is not read again.
#[test]
fn a_refused_list_is_applied_when_flows_have_ended() {
    script("subset = \"all\"", |stage| {
        let newest = many(3, 300);
        stage.list_all(&many(1, 300));
        stage.stop_faults();
        for _ in 0..300 {
            stage.connect().expect("all backends accept connects");
        }
        let second = many(2, 200);
        stage.list_all(&second);
        let list_in_force = list_of(&second.iter().map(String::as_str).collect::<Vec<_>>());
        stage.stop_faults();
        // The backends of the first list have open flows, and the second list is in force.
        stage.list_all(&newest);
        stage.tick();
        assert!(stage.file_fault().contains("all 512 slots"), "{}", stage.file_fault());
        let stored = |stage: &Stage| {
            stage.disk.content("/var/lib/socklb/last-good/users.toml").expect("the file exists")
        };
        assert!(stored(stage).starts_with(list_in_force.as_bytes()), "a list that was refused is not stored");
        stage.close_all();
        stage.stop_faults();
        assert_eq!((stage.file_fault().as_str(), stage.states().len()), ("", 300));
        assert!(!stored(stage).starts_with(list_in_force.as_bytes()));
        assert!(stage.dialled(30).iter().all(|backend| newest.contains(&backend.to_string())));
    });
}

/// If a list does not fit for one client task, this is not a fault of another task that has
/// accepted the list.
#[test]
fn a_list_without_free_slots_is_a_fault_of_one_client_only() {
    let mut stage = Stage::new("");
    let lists = ["big", "bigger"];
    for (number, name) in (1..).zip(lists) {
        let backends = many(number, 300);
        let backends: Vec<&str> = backends.iter().map(String::as_str).collect();
        stage.disk.write(format!("/lists/{name}.toml"), list_of(&backends));
    }
    let client = |job: &str, services: &str| {
        format!("[[client]]\njob = \"{job}\"\ncgroup = \"{job}\"\nservices = {services}\n")
    };
    let service = |(number, name): (usize, &str)| {
        format!(
            "[[service]]\nname = \"{name}\"\naddress = \"10.96.0.{}:80\"\nsubset = \"all\"\nbackends = {{ file = \
             \"/lists/{name}.toml\" }}\n",
            10 + number
        )
    };
    let services: String = lists.into_iter().enumerate().map(service).collect();
    stage.write_text(&(client("op", "[\"big\", \"bigger\"]") + &client("act", "[\"bigger\"]") + &services));
    stage.try_to_start(1);
    stage.pass(std::time::Duration::from_secs(3));
    let controller = stage.controller();
    let error = |client: &str| {
        let task = controller.clients.task(client).expect("the client runs");
        let sources = controller.sources(task, stage.now);
        sources["bigger"].error.clone().unwrap_or_default()
    };
    assert!(error("op").contains("all 512 slots"), "{}", error("op"));
    assert_eq!(error("act"), "");
}

#[test]
fn a_full_or_hung_disk_delays_nothing() {
    script("", |stage| {
        // The disk does not answer.
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        for list in [&BACKENDS[..1], &BACKENDS[1..], &BACKENDS[..2]] {
            stage.list(list);
            stage.settle();
            assert_eq!(stage.dialled(30).len(), list.len());
        }
        stage.finish_hung();
        stage.tick();
        let stored = stage.disk.content("/var/lib/socklb/last-good/users.toml").expect("the list is stored");
        assert!(stored.starts_with(list_of(&BACKENDS[..2]).as_bytes()), "the newest list is stored");
        // The disk is full, and a newer list arrives before the failure is reported.
        stage.hangs = |work| matches!(work, BackgroundWork::Store(_));
        for number in [0, 2] {
            stage.list(&BACKENDS[number..=number]);
            stage.settle();
            assert_eq!(stage.dialled(30), of(&[number]));
        }
        stage.disk.set_broken(LAST_GOOD, true);
        stage.finish_hung();
        stage.disk.set_broken(LAST_GOOD, false);
        stage.stop_faults();
        let stored = stage.disk.content("/var/lib/socklb/last-good/users.toml").expect("the list is stored");
        assert!(stored.starts_with(list_of(&BACKENDS[2..]).as_bytes()), "the newest list is stored");
    });
}

#[test]
fn a_hung_file_delays_nothing_and_is_read_when_it_answers() {
    script("", |stage| {
        stage.hangs = |work| matches!(work, BackgroundWork::Read { .. } | BackgroundWork::Look { .. });
        stage.list(&BACKENDS[..1]);
        stage.pass(std::time::Duration::from_secs(20));
        assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
        stage.configure("policy = \"round-robin\"");
        assert_eq!(stage.dialled(60).len(), 1, "a reload has read the file");
        stage.list(&BACKENDS[1..]);
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.dialled(60), of(&[1, 2]));
    });
}

/// The result of reading a file arrives after a reload has changed the service's file.
#[test]
fn the_late_result_of_a_former_file_is_dropped() {
    script("", |stage| {
        let other = "/lists/other.toml";
        stage.disk.write(other, list_of(&BACKENDS[1..2]));
        stage.hangs = |work| matches!(work, BackgroundWork::Read { .. });
        stage.list(&BACKENDS[..1]);
        stage.configure(&format!("backends = {{ file = \"{other}\" }}"));
        assert_eq!(stage.dialled(30), of(&[1]));
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.dialled(30), of(&[1]));
        // A read of the list that begins during a reload is newer than the reload's own read.
        stage.write_list(&BACKENDS[1..]);
        stage.hangs = |work| matches!(work, BackgroundWork::Load(_) | BackgroundWork::Read { .. });
        stage.write_config("");
        stage.dispatch(Event::Hangup);
        stage.disk.write(other, list_of(&BACKENDS[..1]));
        stage.changed(other);
        stage.finish_hung();
        assert_eq!(stage.dialled(30), of(&[1, 2]), "the late list is never in force");
        stage.stop_faults();
        assert_eq!(stage.dialled(30), of(&[1, 2]));
    });
}

#[test]
fn a_reload_with_a_bad_file_retains_the_list_and_its_failure_count() {
    script("", |stage| {
        stage.list(&BACKENDS[1..2]);
        stage.settle();
        stage.list_text("[[endpoint]]\naddress = 5\n");
        assert_eq!(stage.file_failures(), 1);
        stage.configure("policy = \"round-robin\"");
        assert_eq!(stage.dialled(30), of(&[1]));
        assert_eq!(stage.file_failures(), 1, "each version of the file fails once");
        assert!(stage.file_fault().contains("users.toml:2:"), "{}", stage.file_fault());
        stage.list_text("[[endpoint]]\naddress = 6\n");
        assert_eq!(stage.file_failures(), 2);
        // A new client begins with the earlier list, so that it has backends before its assignment
        // of the new list is computed.
        let other = stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.hangs = |work| matches!(work, BackgroundWork::Compute { .. });
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.dispatch(Event::Hangup);
        stage.settle();
        assert_eq!(stage.reached(other, SERVICE), Some(address(BACKENDS[1])));
        stage.finish_hung();
        // A later start also uses the list in force.
        stage.stop_faults();
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.dialled(30), of(&[1]));
    });
}

#[test]
fn unwatched_files_are_read_only_at_sighup() {
    script("", |stage| {
        let text = stage.config_text();
        stage.write_text(&(text + "[daemon]\nwatch = false\n"));
        stage.dispatch(Event::Hangup);
        stage.settle();
        stage.list(&BACKENDS[..1]);
        stage.pass(std::time::Duration::from_secs(5));
        assert_eq!(stage.dialled(60), of(&[0, 1, 2]));
        stage.dispatch(Event::Hangup);
        stage.settle();
        assert_eq!(stage.dialled(60), of(&[0]));
    });
}

/// A list that waits for room gets the slots that the daemon frees. This includes slots that became
/// idle while no daemon ran.
#[test]
fn slots_that_became_idle_without_a_daemon_are_free_at_a_start() {
    for is_static in [false, true] {
        script("subset = \"all\"", |stage| {
            stage.list_all(&many(1, 300));
            stage.stop_faults();
            for _ in 0..300 {
                stage.connect().expect("all backends accept connects");
            }
            stage.list_all(&many(2, 200));
            stage.stop_faults();
            let leaving =
                stage.states().values().filter(|(state, _)| *state == BackendState::Leaving).count();
            assert_eq!(leaving, 300);
            stage.kill();
            stage.close_all();
            let last = many(3, 300);
            stage.write_list(&last.iter().map(String::as_str).collect::<Vec<_>>());
            if is_static {
                stage.write_config(&format!("subset = \"all\"\nbackends = {{ static = {last:?} }}"));
            }
            stage.try_to_start(1);
            // A refusal would be counted, even if the list were accepted a moment later.
            assert_eq!((stage.file_fault().as_str(), stage.file_failures()), ("", 0));
            stage.stop_faults();
            assert_eq!((stage.file_fault().as_str(), stage.states().len()), ("", 300));
            assert!(stage.dialled(300).iter().all(|backend| last.contains(&backend.to_string())));
        });
    }
}
