//! Scripts about services with an address that the daemon requests from a server.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use lb_fake::Connect;
use lb_view::fault::FaultCode;

use crate::config::addresses;
use crate::controller::Event;
use crate::controller::scripts::stage::{BACKENDS, SERVICE, Stage, address};

/// The configuration of a service with an address from the API server.
const LINES: &str = "backends = { static = [\"10.0.0.1:80\", \"10.0.0.2:80\", \"10.0.0.3:80\"] }\n\
                     [kubernetes]\nserver = \"http://10.0.0.9:8001\"";

/// A daemon whose service has the first answer of the API server as its address.
fn answered(lines: &str) -> Stage {
    let mut stage = Stage::new(lines);
    stage.look_up();
    stage.start(&BACKENDS);
    stage.answer_address(SERVICE);
    stage.settle();
    stage
}

impl Stage {
    /// Configures the service with an address from the API server.
    fn look_up(&mut self) {
        let text = self.config_text();
        let written = format!("address = \"{SERVICE}\"");
        assert!(text.contains(&written));
        self.write_text(&text.replace(&written, "address = { kubernetes = \"shop/users\" }"));
    }

    fn address_fault(&self) -> Option<String> {
        let faults = self.status().faults;
        faults
            .into_iter()
            .find(|fault| fault.code == FaultCode::ServiceAddress)
            .map(|fault| fault.to_string())
    }

    fn stored(&self) -> String {
        let path = addresses::path(Path::new("/var/lib/socklb"));
        String::from_utf8(self.disk.content(path).unwrap_or_default()).unwrap()
    }

    /// The backends that were reached by connects to this address; empty if these connects are not
    /// balanced.
    fn used_at(&mut self, to: &str) -> Vec<String> {
        let mut used: Vec<String> = Vec::new();
        for _ in 0..30 {
            let backend = self.reached(self.place, to).map(|backend| backend.to_string());
            used.extend(backend.filter(|backend| !used.contains(backend)));
        }
        used.sort();
        used
    }
}

#[test]
fn a_service_is_balanced_once_its_address_is_known() {
    let mut stage = Stage::new(LINES);
    stage.look_up();
    stage.start(&BACKENDS);
    assert!(stage.used_at(SERVICE).is_empty());
    let fault = stage.address_fault().expect("a fault reports the unknown address");
    assert_eq!(
        fault,
        "service users: no usable address from the server for 1 s: 10.0.0.53:53: no answer; its connects are not \
         balanced"
    );
    assert_eq!(stage.stored(), "");
    stage.answer_address(SERVICE);
    stage.settle();
    assert_eq!(stage.used_at(SERVICE), BACKENDS);
    assert_eq!(stage.address_fault(), None);
    assert_eq!(stage.stored(), "{\n  \"kubernetes shop/users cluster IP tcp\": \"10.96.0.10:80\"\n}\n");
}

#[test]
fn a_restart_begins_with_the_stored_address_and_a_failed_query_changes_nothing() {
    let mut stage = answered(LINES);
    stage.fail_query();
    stage.start(&BACKENDS);
    assert_eq!(stage.used_at(SERVICE), BACKENDS);
    let fault = stage.address_fault().expect("a fault reports the silent server");
    assert!(fault.ends_with("10.0.0.53:53: no answer; 10.96.0.10:80 stays the service's address"), "{fault}");
    stage.answer_nothing();
    stage.settle();
    assert_eq!(stage.used_at(SERVICE), BACKENDS, "a deleted Service retains its address");
}

#[test]
fn a_changed_address_is_a_reload_and_is_stored_only_once_it_is_in_force() {
    let mut stage = answered(LINES);
    let text = stage.config_text();
    stage.write_text("[[service");
    stage.answer_address("10.96.0.11:80");
    stage.settle();
    assert_eq!(stage.used_at(SERVICE), BACKENDS);
    assert!(stage.used_at("10.96.0.11:80").is_empty());
    let fault = stage.address_fault().expect("a fault reports the failed reload");
    assert!(fault.contains("is now 10.96.0.11:80, which takes effect at the next reload"), "{fault}");
    assert!(stage.stored().contains(SERVICE));
    // For the kernel, a service with a new address is a new service, so its counts begin at zero.
    stage.is_counted = false;
    stage.write_text(&text);
    stage.dispatch(Event::Hangup);
    stage.settle();
    assert!(stage.used_at(SERVICE).is_empty());
    assert_eq!(stage.used_at("10.96.0.11:80"), BACKENDS);
    assert!(stage.stored().contains("10.96.0.11:80"));
    assert_eq!(stage.address_fault(), None);
}

#[test]
fn an_address_that_is_an_endpoint_changes_nothing() {
    let (_, without_list) = LINES.split_once('\n').expect("the list is the first line");
    for lines in [LINES, without_list] {
        let mut stage = answered(lines);
        stage.answer_address("10.0.0.2:80");
        stage.settle();
        assert_eq!(stage.used_at(SERVICE), BACKENDS, "the earlier address stays");
        let fault = stage.address_fault().expect("a fault reports the refused address");
        assert_eq!(
            fault,
            "service users: kubernetes shop/users cluster IP tcp is 10.0.0.2:80, which is an endpoint of service users; \
             10.96.0.10:80 stays the service's address"
        );
        assert!(stage.stored().contains(SERVICE));
        stage.is_counted = false;
        stage.answer_address("10.96.0.11:80");
        stage.settle();
        assert_eq!(
            (stage.used_at("10.96.0.11:80"), stage.address_fault()),
            (BACKENDS.map(str::to_owned).into(), None)
        );
    }
}

#[test]
fn a_first_address_that_is_an_endpoint_leaves_the_service_without_an_address() {
    let (_, without_list) = LINES.split_once('\n').expect("the list is the first line");
    for lines in [LINES, without_list] {
        let mut stage = Stage::new(lines);
        stage.look_up();
        stage.start(&BACKENDS);
        for _ in 0..2 {
            stage.answer_address("10.0.0.2:80");
            stage.settle();
            let fault = stage.address_fault().expect("a fault reports the refused address");
            assert_eq!(
                fault,
                "service users: kubernetes shop/users cluster IP tcp is 10.0.0.2:80, which is an endpoint of service \
                 users; its connects are not balanced"
            );
            let to = stage.kernel.connect(stage.place, 1, address("10.0.0.2:80"));
            assert_eq!((to, stage.stored()), (Connect::Unchanged, String::new()));
            // The configuration is not faulty.
            stage.dispatch(Event::Hangup);
            stage.settle();
            assert!(
                !stage.faults().iter().any(|fault| fault.contains("configuration")),
                "{:?}",
                stage.faults()
            );
        }
        stage.answer_address(SERVICE);
        stage.settle();
        assert_eq!(
            (stage.used_at(SERVICE), stage.address_fault()),
            (BACKENDS.map(str::to_owned).into(), None)
        );
    }
}

#[test]
fn an_address_takes_effect_once_the_list_does_not_contain_it_any_more() {
    let (_, without_list) = LINES.split_once('\n').expect("the list is the first line");
    let mut stage = answered(without_list);
    stage.answer_address("10.0.0.2:80");
    stage.settle();
    assert!(stage.address_fault().is_some());
    stage.is_counted = false;
    let rest = ["10.0.0.1:80", "10.0.0.3:80"];
    stage.list(&rest);
    stage.settle();
    assert_eq!((stage.used_at("10.0.0.2:80"), stage.address_fault()), (rest.map(str::to_owned).into(), None));
}

#[test]
fn the_certificate_of_the_server_of_an_address_has_an_expiry() {
    let mut stage = Stage::new(LINES);
    stage.look_up();
    stage.start(&BACKENDS);
    stage.answer_address(SERVICE);
    let expiry = |stage: &Stage| stage.service().source.and_then(|source| source.certificate_expiry_s());
    assert_eq!(expiry(&stage), None, "the connection has no TLS");
    stage.set_certificate_expiry(UNIX_EPOCH + Duration::from_secs(1_800_000_000));
    stage.answer_address(SERVICE);
    assert_eq!(expiry(&stage), Some(1_800_000_000));
}
