//! Scripts about host names in lists.

use std::time::Duration;

use lb_config::endpoints::MAX_HOSTS;
use lb_view::fault::FaultCode;

use crate::controller::scripts::stage::{BACKENDS, LIST, Stage, list_of, script};

const MINUTE: Duration = Duration::from_mins(1);
/// The file with the addresses of host names.
const FILE: &str = "/var/lib/socklb/hosts/hosts.json";
const STATIC: &str = "backends = { static = [\"10.0.0.1:80\", \"b.example:80\"] }";
const NAMES: [&str; 3] = ["10.0.0.1:80", "b.example:80", "c.example:80"];

impl Stage {
    fn fault(&self) -> String {
        self.controller().sources(self.task(), self.now)["users"].error.clone().unwrap_or_default()
    }

    /// The backends that 60 connects reach.
    fn dialled_backends(&mut self) -> Vec<String> {
        self.dialled(60).iter().map(ToString::to_string).collect()
    }

    /// The names in the file of addresses; none if there is no file.
    fn stored_names(&self) -> Vec<String> {
        let Ok(text) = self.disk.content(FILE) else { return Vec::new() };
        let file: serde_json::Value = serde_json::from_slice(&text).expect("the file is JSON");
        let names =
            file["hosts"].as_array().expect("the file has a list").iter().map(|host| host["name"].as_str());
        names.map(|name| name.expect("a host has a name").to_owned()).collect()
    }

    /// The addresses in the file of addresses, in the order of the names.
    fn stored_addresses(&self) -> Vec<serde_json::Value> {
        let text = self.disk.content(FILE).expect("the file exists");
        let file: serde_json::Value = serde_json::from_slice(&text).expect("the file is JSON");
        let hosts = file["hosts"].as_array().expect("the file has a list");
        hosts.iter().map(|host| host["addresses"].clone()).collect()
    }

    /// The age of the stored addresses of `b.example` in minutes, according to the fault.
    fn minutes_stored(&self) -> u32 {
        let fault = self.fault();
        let (_, age) = fault
            .split_once("(10.0.0.53:53: no answer; an earlier run stored its addresses ")
            .unwrap_or_else(|| panic!("{fault}"));
        age.split_once(" min ago; they remain in use)")
            .expect("the fault has an age")
            .0
            .parse()
            .expect("the age is a number")
    }

    /// Writes a list with two names, which have the addresses of the last two backends, and waits
    /// until the list is in force.
    fn use_names(&mut self) {
        self.name("b.example", &["10.0.0.2"]);
        self.name("c.example", &["10.0.0.3"]);
        self.list_text(&list_of(&NAMES));
        self.stop_faults();
        assert_eq!(self.dialled_backends(), BACKENDS);
    }
}

#[test]
fn a_host_name_is_one_endpoint_for_each_of_its_addresses_and_follows_them() {
    script("", |stage| {
        stage.use_names();
        assert_eq!(stage.fault(), "");
        stage.name("c.example", &["10.0.0.3", "10.0.0.4"]);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"]);
        stage.name("c.example", &["10.0.0.5"]);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.5:80"]);
        // Two names with one address are one endpoint.
        stage.name("c.example", &["10.0.0.2"]);
        stage.stop_faults();
        assert_eq!((stage.dialled_backends().len(), stage.fault()), (2, String::new()));
    });
}

#[test]
fn a_static_list_with_a_host_name_follows_its_addresses() {
    script(STATIC, |stage| {
        assert_eq!(stage.dial(10), 0);
        stage.name("b.example", &["10.0.0.2"]);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.2:80"]);
        stage.name("b.example", &["10.0.0.3"]);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.3:80"]);
        stage.configure("backends = { static = [\"10.0.0.1:80\", \"c.example:80\"] }");
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80"]);
        stage.configure("");
        assert_eq!(stage.dialled_backends(), BACKENDS);
    });
}

#[test]
fn a_host_name_that_stops_resolving_retains_its_addresses_and_is_a_fault_with_its_age() {
    script("", |stage| {
        stage.use_names();
        for why in ["NXDOMAIN", "no A records", "10.0.0.53:53: no answer within 5.0 s"] {
            stage.lose_name("b.example", why);
            stage.pass(MINUTE);
            assert_eq!(stage.dialled_backends(), BACKENDS);
        }
        let why = "10.0.0.53:53: no answer within 5.0 s";
        let expected = format!(
            "1 of 2 host names do not resolve: b.example for 3 min ({why}; its addresses remain in use)"
        );
        assert_eq!(stage.fault(), expected);
        assert!(stage.status().faults.iter().any(|fault| fault.code == FaultCode::Source));
        // The other name still follows its addresses.
        stage.name("c.example", &["10.0.0.4"]);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.4:80"]);
        stage.name("b.example", &["10.0.0.2"]);
        assert_eq!(stage.fault(), "");
    });
}

#[test]
fn a_list_is_used_without_a_host_name_that_never_resolved() {
    script("", |stage| {
        stage.name("b.example", &["10.0.0.2"]);
        stage.list_text(&list_of(&NAMES));
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.2:80"]);
        assert!(
            stage.fault().contains("c.example for 1 min (NXDOMAIN; no address so far)"),
            "{}",
            stage.fault()
        );
        stage.name("c.example", &["10.0.0.3"]);
        stage.stop_faults();
        assert_eq!(
            (stage.dialled_backends(), stage.fault()),
            (BACKENDS.map(str::to_owned).to_vec(), String::new())
        );
    });
}

#[test]
fn a_list_of_which_no_host_name_resolves_leaves_the_list_in_force() {
    script("", |stage| {
        stage.stop_faults();
        stage.list_text(&list_of(&["b.example:80", "c.example:80"]));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), BACKENDS);
        let expected = "no endpoint is left: none of its 2 host names resolves (NXDOMAIN)";
        assert!(stage.fault().contains(expected), "{}", stage.fault());
        stage.name("b.example", &["10.0.0.2"]);
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80"]);
    });
}

#[test]
fn a_list_takes_effect_only_when_every_host_name_has_an_answer() {
    script("", |stage| {
        stage.stop_faults();
        stage.name("b.example", &["10.0.0.2"]);
        stage.ignore_name("c.example");
        stage.list_text(&list_of(&NAMES[1..]));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), BACKENDS);
        let expected = "1 of the list's host names have no answer yet, such as c.example";
        assert!(stage.fault().contains(expected), "{}", stage.fault());
        stage.lose_name("c.example", "no answer");
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80"]);
    });
}

#[test]
fn an_address_of_a_host_name_that_is_not_allowed_replaces_no_address_and_stops_no_edit() {
    for (ip, why) in [
        ("127.0.0.1", "127.0.0.1 is not allowed: it is a loopback address"),
        ("169.254.1.1", "169.254.1.1 is not allowed: it is a link-local address"),
        ("224.0.0.1", "224.0.0.1 is not allowed: it is a multicast address"),
        ("0.0.0.0", "0.0.0.0 is not allowed: it is the unspecified address"),
    ] {
        script("", |stage| {
            stage.use_names();
            let stored = stage.stored_addresses();
            stage.name("b.example", &[ip]);
            stage.pass(2 * MINUTE);
            let fault = |why| {
                format!(
                    "1 of 2 host names do not resolve: b.example for 2 min ({why}; its addresses remain in use)"
                )
            };
            assert_eq!(
                (stage.dialled_backends(), stage.fault()),
                (BACKENDS.map(str::to_owned).into(), fault(why))
            );
            stage.lose_name("b.example", "SERVFAIL");
            assert_eq!(stage.fault(), fault("SERVFAIL"));
            stage.expect("10.0.0.9:80");
            stage.list_text(&list_of(&LATER));
            stage.pass(Duration::from_secs(1));
            assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
            assert_eq!(stage.stored_addresses(), stored);
            stage.name("b.example", &["10.0.0.4"]);
            stage.pass(MINUTE);
            assert_eq!(
                stage.dialled_backends(),
                ["10.0.0.1:80", "10.0.0.3:80", "10.0.0.4:80", "10.0.0.9:80"]
            );
            assert_eq!(stage.fault(), "");
        });
    }
    script("", |stage| {
        stage.use_names();
        stage.name("b.example", &["10.96.0.10"]);
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), BACKENDS);
        let why = "4:11: 10.96.0.10:80 is the address of a service";
        assert!(stage.fault().contains(why), "{}", stage.fault());
    });
    // The list itself may contain a loopback address.
    script("", |stage| {
        stage.name("b.example", &["10.0.0.2"]);
        stage.expect("127.0.0.1:80");
        stage.list_text(&list_of(&["127.0.0.1:80", "b.example:80"]));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80", "127.0.0.1:80"]);
    });
}

#[test]
fn a_host_has_1024_host_names_in_all_of_its_lists() {
    let names = |range: std::ops::Range<usize>| {
        let name = |n: usize| format!("n{n}.example:80");
        let names: Vec<String> = range.map(name).chain(["10.0.0.9:80".to_owned()]).collect();
        list_of(&names.iter().map(String::as_str).collect::<Vec<_>>())
    };
    script("", |stage| {
        stage.stop_faults();
        stage.expect("10.0.0.9:80");
        stage.list_text(&names(0..MAX_HOSTS + 1));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), BACKENDS);
        let expected = "the list has 1025 host names, and all lists of this host have 1025, but at most 1024 are resolved";
        assert!(stage.fault().contains(expected), "{}", stage.fault());
        // Equal names count once.
        stage.list_text(&format!("{}{}", names(0..MAX_HOSTS), list_of(&["n0.example:81"])));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.9:80"]);
        // All names are replaced with the same number of other names.
        stage.list_text(&names(MAX_HOSTS..2 * MAX_HOSTS));
        stage.pass(MINUTE);
        assert!(stage.fault().starts_with("1024 of 1024 host names do not resolve"), "{}", stage.fault());
    });
}

#[test]
fn a_restart_uses_the_stored_list_while_no_host_name_resolves_and_no_addresses_are_stored() {
    script("", |stage| {
        stage.use_names();
        for name in ["b.example", "c.example"] {
            stage.lose_name(name, "10.0.0.53:53: no answer");
        }
        stage.list_text(&list_of(&["b.example:80", "c.example:80"]));
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80", "10.0.0.3:80"]);
        stage.kill();
        stage.disk.remove(FILE);
        stage.start(&["b.example:80", "c.example:80"]);
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80", "10.0.0.3:80"]);
        assert!(stage.fault().contains("none of its 2 host names resolves"), "{}", stage.fault());
        stage.name("b.example", &["10.0.0.4"]);
        stage.name("c.example", &["10.0.0.5"]);
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.4:80", "10.0.0.5:80"]);
    });
}

#[test]
fn the_removal_of_most_endpoints_by_host_names_waits_for_a_second_answer() {
    let four = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"];
    script("", |stage| {
        stage.stop_faults();
        stage.name("b.example", &["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]);
        stage.list_text(&list_of(&["b.example:80"]));
        stage.pass(Duration::from_secs(1));
        assert_eq!(stage.dialled_backends(), four);
        stage.name("b.example", &["10.0.0.4"]);
        stage.pass(Duration::from_secs(9));
        assert_eq!(stage.dialled_backends(), four);
        let expected = "DNS answers for the list's host names lack 3 of 4 endpoints; the endpoints stay \
                        until the answers are repeated";
        assert_eq!(stage.fault(), expected);
        stage.pass(Duration::from_secs(3));
        assert_eq!(
            (stage.dialled_backends(), stage.fault()),
            (vec!["10.0.0.4:80".to_owned()], String::new())
        );
        // An endpoint that the file itself no longer lists is removed at once.
        stage.name("b.example", &["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]);
        stage.list_text(&list_of(&["10.0.0.9:80", "c.example:80"]));
        stage.expect("10.0.0.9:80");
        stage.pass(Duration::from_secs(1));
        assert_eq!(stage.dialled_backends(), ["10.0.0.9:80"]);
    });
}

/// The list of [`Stage::use_names`], and another backend, so that the list differs from the stored
/// one.
const LATER: [&str; 4] = [NAMES[0], NAMES[1], NAMES[2], "10.0.0.9:80"];
const LATER_BACKENDS: [&str; 4] = [BACKENDS[0], BACKENDS[1], BACKENDS[2], "10.0.0.9:80"];

#[test]
fn a_host_name_that_does_not_resolve_after_a_restart_has_its_stored_addresses_and_their_age() {
    script("", |stage| {
        stage.use_names();
        stage.pass(MINUTE);
        stage.lose_name("b.example", "10.0.0.53:53: no answer");
        stage.pass(11 * MINUTE);
        stage.start(&LATER);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
        let first = stage.minutes_stored();
        assert!((11..16).contains(&first), "{first}");
        // After a second restart, the stored addresses are still used. Their age continues to grow,
        // although they were stored again.
        stage.pass(6 * MINUTE);
        stage.start(&LATER);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
        assert!(stage.minutes_stored() >= first + 6, "{}", stage.fault());
        stage.name("b.example", &["10.0.0.4"]);
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.3:80", "10.0.0.4:80", "10.0.0.9:80"]);
        assert_eq!(stage.fault(), "");
    });
}

#[test]
fn an_address_that_only_the_allow_of_a_list_contains_stays_in_use_even_after_a_restart() {
    script("backends = { consul = \"users\", allow = [\"127.0.0.0/8\", \"10.0.0.0/24\"] }", |stage| {
        let both = ["10.0.0.1:80", "127.0.0.1:80"];
        stage.name("b.example", &["127.0.0.1"]);
        stage.answer(&["10.0.0.1:80", "b.example:80"]);
        stage.stop_faults();
        stage.pass(MINUTE);
        assert_eq!(
            (stage.dialled_backends(), stage.fault()),
            (both.map(str::to_owned).into(), String::new())
        );
        stage.name("b.example", &["169.254.1.1"]);
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), both);
        assert!(stage.fault().contains("169.254.1.1 is not allowed"), "{}", stage.fault());
        stage.lose_name("b.example", "SERVFAIL");
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), both);
        assert!(stage.fault().ends_with("(SERVFAIL; its addresses remain in use)"), "{}", stage.fault());
        stage.start(&BACKENDS);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), both);
        assert!(stage.fault().ends_with("ago; they remain in use)"), "{}", stage.fault());
    });
}

#[test]
fn a_host_name_that_resolves_after_a_restart_never_has_its_stored_addresses() {
    script("", |stage| {
        stage.use_names();
        stage.pass(MINUTE);
        stage.kill();
        stage.name("b.example", &["10.0.0.4"]);
        stage.sent.clear();
        stage.is_counted = false;
        stage.start(&LATER);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.3:80", "10.0.0.4:80", "10.0.0.9:80"]);
        assert_eq!((stage.fault(), stage.logged("stored last good list")), (String::new(), 0));
    });
}

#[test]
fn the_file_of_addresses_has_only_the_host_names_of_lists_and_is_removed_with_the_last() {
    script("", |stage| {
        stage.stop_faults();
        assert!(stage.disk.content(FILE).is_err());
        stage.use_names();
        stage.pass(MINUTE);
        assert_eq!(stage.stored_names(), ["b.example", "c.example"]);
        stage.list_text(&list_of(&NAMES[..2]));
        stage.pass(MINUTE);
        assert_eq!(stage.stored_names(), ["b.example"]);
        // The next daemon removes the file, because its list has no host names.
        stage.start(&BACKENDS);
        stage.pass(MINUTE);
        assert!(stage.disk.content(FILE).is_err(), "{:?}", stage.stored_names());
    });
}

#[test]
fn the_addresses_of_a_list_that_cannot_be_read_yet_stay_stored() {
    script("", |stage| {
        stage.use_names();
        stage.pass(MINUTE);
        stage.disk.set_broken(LIST, true);
        stage.lose_name("b.example", "NXDOMAIN");
        stage.start(&LATER);
        stage.pass(11 * MINUTE);
        assert_eq!(stage.stored_names(), ["b.example", "c.example"]);
        stage.disk.set_broken(LIST, false);
        stage.changed(LIST);
        stage.pass(MINUTE);
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
    });
}

#[test]
fn a_file_of_addresses_that_cannot_be_read_is_retried_and_not_overwritten() {
    script("", |stage| {
        stage.use_names();
        stage.pass(MINUTE);
        let before = stage.disk.content(FILE).unwrap();
        stage.lose_name("b.example", "NXDOMAIN");
        stage.disk.set_broken(FILE, true);
        stage.start(&LATER);
        stage.pass(MINUTE);
        assert!(stage.fault().contains("b.example for "), "{}", stage.fault());
        assert!(stage.fault().contains("no address so far"), "{}", stage.fault());
        assert_eq!(stage.logged("cannot read the stored addresses of host names"), 1);
        stage.disk.set_broken(FILE, false);
        assert_eq!(stage.disk.content(FILE).unwrap(), before);
        stage.pass(MINUTE);
        stage.stop_faults();
        assert_eq!(stage.logged("the stored addresses of host names were read"), 1);
        assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
    });
}

#[test]
fn a_file_of_addresses_that_is_cut_or_of_a_later_version_is_renamed_and_replaced() {
    for text in ["{\"schema\":1,\"hosts\":[{\"name\":\"b.exa", "{\"schema\":2,\"names\":{}}"] {
        script("", |stage| {
            stage.use_names();
            stage.disk.write(FILE, text);
            stage.start(&LATER);
            stage.pass(MINUTE);
            assert_eq!(stage.dialled_backends(), LATER_BACKENDS);
            assert_eq!(stage.disk.content(format!("{FILE}.not-understood")).unwrap(), text.as_bytes());
            assert_eq!(stage.stored_names(), ["b.example", "c.example"]);
        });
    }
}
