//! Scripts of starts with faults of single clients, and with maps that do not fit.

use std::collections::BTreeSet;

use lb_fake::FakeCgroup;
use lb_kernel::Kernel as _;

use crate::controller::Event;
use crate::controller::scripts::stage::{
    BACKENDS, PINS, SECOND, SERVICE, Stage, cgroup_path, pins_of, script,
};

/// The message contains the commands for all clients.
#[test]
fn limits_change_after_the_commands_in_the_message() {
    script("", |stage| {
        stage.stop_faults();
        stage.kernel.make_cgroup(&cgroup_path("b"));
        stage.write_clients(&[("one", "web"), ("two", "b")]);
        let text = stage.config_text();
        let limits =
            |slots: u32| format!("[limits]\nschedule_entries = 32768\nflow_records = 64\nslots = {slots}\n");
        stage.write_text(&(text.clone() + &limits(512)));
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        assert_eq!(stage.degraded(), [""; 0]);
        stage.write_text(&(text + &limits(1_024)));
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let remove = format!("`for client in one two; do socklb detach $client --pins '{PINS}'; done`");
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].starts_with("limits.slots cannot"), "{faults:?}");
        assert!(faults[0].contains(&remove), "{faults:?}");
        // A restart without the steps in the fault is refused; the error names all clients.
        stage.try_to_start(1);
        assert!(stage.controller.is_none());
        for part in
            ["cannot start any of 2 clients", "client one: ", "client two: ", "maps/backends", &remove]
        {
            assert!(stage.refused.contains(part), "{part:?} is not in {}", stage.refused);
        }
        for client in ["one", "two"] {
            stage.kernel.detach(&pins_of(client)).expect("faults are off");
        }
        stage.is_counted = false;
        stage.try_to_start(1);
        stage.settle();
        assert_eq!((stage.dialled(30).len(), stage.degraded()), (3, vec![]));
    });
}

/// A fault is reported only for the client that has it. One client has pins of another system.
/// Another client was detached, and its cgroup has a program that allows no second program at the
/// hook.
#[test]
fn two_failed_clients_of_64_are_reported_and_the_others_are_balanced() {
    script("", |stage| {
        stage.is_counted = false;
        let names: Vec<String> = (0..64).map(|number| format!("job-{number}")).collect();
        let places: Vec<FakeCgroup> =
            names.iter().map(|name| stage.kernel.make_cgroup(&cgroup_path(name))).collect();
        stage.stop_faults();
        stage.kill();
        stage.write_clients(&names.iter().map(|name| (&**name, &**name)).collect::<Vec<_>>());
        let small = "[limits]\nschedule_entries = 8192\nslots = 256\nflow_records = 64\n";
        let text = stage.config_text() + small;
        stage.write_text(&text);
        stage.kernel.detach(&pins_of("web")).expect("faults are off");
        stage.try_to_start(1);
        stage.settle();
        assert_eq!((stage.pinned().len(), stage.degraded()), (64, vec![]));
        stage.kill();
        let (unfit, exclusive) = (20, 40);
        stage.kernel.set_foreign_pins(&pins_of("job-20"), true);
        stage.kernel.detach(&pins_of("job-40")).expect("faults are off");
        stage.kernel.set_exclusive(places[exclusive], true);
        stage.try_to_start(1);
        stage.pass(5 * SECOND);
        let faults = stage.degraded();
        let named: BTreeSet<&str> =
            faults.iter().map(|fault| fault.split(':').next().unwrap_or_default()).collect();
        assert!(faults.len() == 2 && named == ["client job-20", "client job-40"].into(), "{faults:?}");
        assert!(faults.iter().any(|fault| fault.contains("cannot attach connect4 to ")), "{faults:?}");
        // If a client cannot be started because of its pins, the programs of the previous daemon
        // continue to balance its connects.
        let is_reached = |stage: &mut Stage| {
            places.iter().map(|place| stage.reached(*place, SERVICE).is_some()).collect::<Vec<_>>()
        };
        let alone: Vec<usize> =
            (0..64).zip(is_reached(stage)).filter(|(_, is)| !is).map(|(at, _)| at).collect();
        assert_eq!((alone, unfit), (vec![exclusive], 20));
        stage.kernel.set_foreign_pins(&pins_of("job-20"), false);
        stage.kernel.set_exclusive(places[exclusive], false);
        stage.pass(11 * SECOND);
        assert_eq!(stage.degraded(), [""; 0], "the daemon retries both clients by itself");
        assert!(is_reached(stage).into_iter().all(|is| is));
    });
}

#[test]
fn inconsistent_maps_are_not_adopted() {
    script("", |stage| {
        stage.stop_faults();
        stage.kill();
        let mut before = 0;
        stage.kernel.change_service(&stage.pins(), 0, |row| {
            before = row.fallback;
            row.fallback = 77;
        });
        stage.try_to_start(1);
        assert!(stage.controller.is_none());
        for part in ["the fallback of service users is slot 77", "socklb detach web"] {
            assert!(stage.refused.contains(part), "{part:?} is not in {}", stage.refused);
        }
        assert_eq!(stage.dial(30), 0, "connects still succeed");
        stage.kernel.change_service(&stage.pins(), 0, |row| row.fallback = before);
        stage.start(&BACKENDS);
        assert_eq!(stage.degraded(), [""; 0]);
    });
}

/// The client's tables exist before its programs can be attached.
#[test]
fn a_client_is_attached_after_an_exclusive_program_is_removed() {
    script("", |stage| {
        stage.stop_faults();
        stage.kill();
        stage.kernel.detach(&stage.pins()).expect("faults are off");
        stage.sent.clear();
        let place = stage.place;
        stage.kernel.set_exclusive(place, true);
        stage.try_to_start(1);
        stage.pass(3 * SECOND);
        let faults = stage.degraded();
        let phrase = "cannot attach connect4 to /sys/fs/cgroup/web: ";
        assert!(faults.len() == 1 && faults[0].contains(phrase), "{faults:?}");
        assert_eq!((stage.connect(), stage.states().len()), (Err(0), 3));
        stage.kernel.set_exclusive(place, false);
        // Pauses between attempts grow: attempts were at 0, 1 and 3 s, and the next one is at 7 s.
        stage.pass(5 * SECOND);
        assert_eq!((stage.dial(30), stage.degraded()), (0, vec![]));
    });
}
