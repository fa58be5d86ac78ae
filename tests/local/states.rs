//! The state word and the fallback: what connect does with a table that is older than what is known of its backends.

use lb_common::abi::{Backend, BackendState, NO_SLOT, Service, StateWord, map};
use stage::kernel::refusal;
use stage::maps::{Raw, array};
use stage::protocol::failure;

use stage::fixture::{Fixture, SERVICE, config};

/// Stores state words as the daemon does, with nobody there to follow up with a new table.
fn set_usable(fixture: &Fixture, slot: u32, usable: bool) {
    let mut active = array::<Backend>(&fixture.setup.map("web", map::BACKENDS));
    let Raw(mut row) = active.get(&slot, 0).expect("a slot");
    row.state = StateWord::new(usable.into(), BackendState::Member);
    active.set(slot, Raw(row), 0).expect("store the state word");
}

fn set_fallback(fixture: &Fixture, slot: u32) {
    let mut services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
    let Raw(mut service) = services.get(&0, 0).expect("the service");
    service.fallback = slot;
    services.set(0, Raw(service), 0).expect("store the fallback");
}

/// The common case with slots in the order of the file, before its daemon starts.
fn fixture() -> Fixture {
    let fixture = Fixture::without_daemon();
    let all = config(&fixture.cgroup, "{ file = \"users.toml\" }", "subset = \"all\"");
    fixture.setup.write("socklb.toml", &all);
    fixture
}

#[test]
fn an_unusable_pick_is_skipped() {
    let mut fixture = fixture();
    fixture.start();
    fixture.stop();
    set_usable(&fixture, 0, false);
    let counts = fixture.probe().dial_many(SERVICE, 300);
    assert_eq!(counts.get("b1"), None, "{counts:?}");
    assert_eq!(counts.values().sum::<u32>(), 300);
    // Back at once, with one store.
    set_usable(&fixture, 0, true);
    let counts = fixture.probe().dial_many(SERVICE, 300);
    assert_eq!(counts.len(), 3, "{counts:?}");
}

#[test]
fn where_nobody_may_be_chosen_the_fallback_is_taken() {
    let mut fixture = fixture();
    fixture.start();
    fixture.stop();
    for slot in 0..3 {
        set_usable(&fixture, slot, false);
    }
    set_fallback(&fixture, 2);
    let counts = fixture.probe().dial_many(SERVICE, 100);
    assert_eq!(counts, [("b3".to_owned(), 100)].into());
    let outcomes = fixture.setup.service().outcomes;
    assert_eq!((outcomes["forwarded"], outcomes["fallback"]), (0, 100));
}

#[test]
fn when_the_fallback_says_refuse_connects_are_refused() {
    let mut fixture = fixture();
    fixture.start();
    fixture.stop();
    set_fallback(&fixture, NO_SLOT);
    assert_eq!(fixture.probe().dial_many(SERVICE, 50).values().sum::<u32>(), 50, "the table goes first");
    for slot in 0..3 {
        set_usable(&fixture, slot, false);
    }
    let counts = fixture.probe().dial_many(SERVICE, 50);
    assert_eq!(counts, [(failure(refusal(libc::EHOSTUNREACH)), 50)].into());
}

#[test]
fn all_but_one_may_be_unusable() {
    let mut fixture = fixture();
    let addresses: Vec<String> = (1..=5).map(|n| format!("127.0.0.1:800{n}")).collect();
    let more: Vec<_> =
        (4..=5).map(|n| stage::Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"))).collect();
    fixture.write_endpoints(&addresses.iter().map(|address| (address.as_str(), "")).collect::<Vec<_>>());
    fixture.start();
    fixture.stop();
    // Five equal weights are five different entries in a row; one of them that may be chosen gets all.
    for slot in 0..4 {
        set_usable(&fixture, slot, false);
    }
    set_fallback(&fixture, NO_SLOT);
    let counts = fixture.probe().dial_many(SERVICE, 200);
    assert_eq!(counts, [("b5".to_owned(), 200)].into());
    drop(more);
}
