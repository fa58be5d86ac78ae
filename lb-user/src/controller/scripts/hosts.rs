//! Scripts about host names in lists.

use std::time::Duration;

use lb_config::endpoints::MAX_HOSTS;
use lb_view::fault::FaultCode;

use super::stage::{BACKENDS, Stage, list_of, script};

const MINUTE: Duration = Duration::from_mins(1);
const STATIC: &str = "backends = { static = [\"10.0.0.1:80\", \"b.example:80\"] }";
const NAMES: [&str; 3] = ["10.0.0.1:80", "b.example:80", "c.example:80"];

impl Stage {
    fn fault(&self) -> String {
        self.controller().sources(self.task(), self.now)["users"].error.clone().unwrap_or_default()
    }

    /// The backends to which 60 connects go.
    fn dialled_backends(&mut self) -> Vec<String> {
        self.dialled(60).iter().map(ToString::to_string).collect()
    }

    /// Gives the list two names with the addresses 2 and 3, and waits until it is in force.
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
fn a_host_name_that_stops_resolving_keeps_its_addresses_and_is_a_fault_with_its_age() {
    script("", |stage| {
        stage.use_names();
        for why in ["NXDOMAIN", "no A records", "10.0.0.53:53: no answer within 5.0 s"] {
            stage.lose_name("b.example", why);
            stage.pass(MINUTE);
            assert_eq!(stage.dialled_backends(), BACKENDS);
        }
        let why = "10.0.0.53:53: no answer within 5.0 s";
        let expected =
            format!("1 of 2 host names do not resolve: b.example for 3 min ({why}; its addresses stay)");
        assert_eq!(stage.fault(), expected);
        assert!(stage.status().faults.iter().any(|fault| fault.code == FaultCode::Source));
        // Another name still follows its addresses.
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
        let expected = "1 of its host names have no answer yet, such as c.example";
        assert!(stage.fault().contains(expected), "{}", stage.fault());
        stage.lose_name("c.example", "no answer");
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80"]);
    });
}

#[test]
fn an_address_of_a_host_name_that_is_not_allowed_leaves_the_list_in_force() {
    for (ip, why) in [
        ("127.0.0.1", "127.0.0.1:80 is not allowed: it is a loopback address (an address of b.example)"),
        (
            "169.254.1.1",
            "169.254.1.1:80 is not allowed: it is a link-local address (an address of b.example)",
        ),
        ("224.0.0.1", "4:11: 224.0.0.1:80 cannot be connected to: a multicast address"),
        ("0.0.0.0", "4:11: 0.0.0.0:80 cannot be connected to: the unspecified address"),
        ("10.96.0.10", "4:11: 10.96.0.10:80 is the address of a service"),
    ] {
        script("", |stage| {
            stage.use_names();
            stage.name("b.example", &[ip]);
            stage.pass(MINUTE);
            assert_eq!(stage.dialled_backends(), BACKENDS);
            assert!(stage.fault().contains(why), "{}", stage.fault());
            stage.name("b.example", &["10.0.0.4"]);
            stage.pass(MINUTE);
            assert_eq!(stage.dialled_backends(), ["10.0.0.1:80", "10.0.0.3:80", "10.0.0.4:80"]);
        });
    }
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
        let expected =
            "with its 1025 host names, the lists of this host have 1025, but at most 1024 are resolved";
        assert!(stage.fault().contains(expected), "{}", stage.fault());
        // Equal names count once.
        stage.list_text(&format!("{}{}", names(0..MAX_HOSTS), list_of(&["n0.example:81"])));
        stage.pass(MINUTE);
        assert_eq!(stage.dialled_backends(), ["10.0.0.9:80"]);
        // All names are replaced by as many others.
        stage.list_text(&names(MAX_HOSTS..2 * MAX_HOSTS));
        stage.pass(MINUTE);
        assert!(stage.fault().starts_with("1024 of 1024 host names do not resolve"), "{}", stage.fault());
    });
}

#[test]
fn a_restart_uses_the_stored_list_while_no_host_name_resolves() {
    script("", |stage| {
        stage.use_names();
        for name in ["b.example", "c.example"] {
            stage.lose_name(name, "10.0.0.53:53: no answer");
        }
        stage.list_text(&list_of(&["b.example:80", "c.example:80"]));
        stage.stop_faults();
        assert_eq!(stage.dialled_backends(), ["10.0.0.2:80", "10.0.0.3:80"]);
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
        let expected =
            "its host names no longer have 3 of 4 endpoints; they stay until the answers are repeated";
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
