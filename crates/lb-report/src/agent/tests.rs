//! Properties of the agent's reports for all datagrams that it receives.

use lb_common::net::Be16;
use lb_core::service::Protocol;
use proptest::prelude::*;

use super::entry::CheckRules;
use super::streak::Outcome;
use super::*;
use crate::keys::Numbered;
use crate::moment::moment;
use crate::wire::{BYTES, UNKNOWN};

const MS: Duration = Duration::from_millis(1);

fn named(address: &str) -> Name {
    Name::new(Protocol::Tcp, address.parse().unwrap()).unwrap()
}

fn name() -> Name {
    named("10.0.0.1:80")
}

fn key(id: u16) -> Numbered<BackendKey> {
    let text = format!("{id} {}", format!("{id:02x}").repeat(16));
    Keys::parse(&text).unwrap().current()
}

fn rules() -> Rules {
    let check = CheckRules { rise: 1, fall: 1, stale_after: Duration::from_secs(9) };
    Rules { valid_for: Duration::from_secs(45), hold: Duration::from_mins(10), check: Some(check) }
}

fn reports(now: Instant) -> Reports {
    let mut reports = Reports::new(7, [9; 16], now);
    reports.set(name(), Keys::new(key(1), Some(key(2))), rules(), now);
    reports
}

fn requester(n: u8) -> Requester {
    let address = format!("192.0.2.{n}:9467").parse().unwrap();
    Requester { address, via: Via { socket: 0, local: None } }
}

fn request(key: Numbered<BackendKey>, cookie: u64) -> Datagram {
    let mut request = Datagram::about(Kind::Request, name().protocol().number(), name().address());
    request.nonce = 0x1234;
    request.cookie = cookie;
    request.key_id = Be16::from_host(key.id);
    request.sealed(key.key.wire())
}

fn request_report(reports: &mut Reports, from: u8, cookie: u64, now: Instant) -> Datagram {
    reports.answer(request(key(1), cookie).bytes(), requester(from), now).expect("the request is answered")
}

/// Makes a requester a subscriber. This requires two requests.
fn subscribe(reports: &mut Reports, from: u8, now: Instant) -> u64 {
    let first = request_report(reports, from, 0, now);
    request_report(reports, from, first.cookie, now).cookie
}

fn pushes(reports: &mut Reports, now: Instant) -> Vec<(Requester, Datagram)> {
    let mut sent = Vec::new();
    reports.push(now, |requester, push| sent.push((requester, *push)));
    sent
}

fn count(reports: &Reports, refused: Refused) -> u64 {
    reports.counts().refused[refused.number()]
}

fn checked(reports: &mut Reports, outcome: Outcome, now: Instant) {
    reports.get_mut(name()).unwrap().checked(outcome, now);
}

#[test]
fn an_answer_has_the_nonce_of_its_request_and_the_current_state() {
    let now = moment();
    let mut reports = reports(now);
    checked(&mut reports, Outcome::Passed, now);
    let load = load::Load {
        qps: Some(100_000),
        eps: None,
        utilization: Some(600),
        window: Duration::from_secs(2),
        measured: now,
    };
    reports.get_mut(name()).unwrap().loaded(load, now + Duration::from_secs(10), now);
    let answer = request_report(&mut reports, 1, 0, now + MS * 1500);
    assert!(answer.is_authentic(key(1).key.wire()));
    assert_eq!((answer.kind(), answer.nonce), (Some(Kind::Answer), 0x1234));
    assert_eq!(answer.readiness(), Some(Readiness::Ready));
    assert_eq!((answer.qps.to_host(), answer.utilization.to_host()), (100_000, 600));
    assert_eq!(answer.eps.to_host(), UNKNOWN);
    assert_eq!((answer.window.to_host(), answer.age.to_host()), (2000, 1500));
    assert_eq!((answer.valid_for.to_host(), answer.hold.to_host()), (45_000, 600_000));
    assert_eq!((answer.incarnation.to_host(), answer.backend()), (7, name().address()));
}

#[test]
fn the_counter_rises_with_changes_and_not_with_answers() {
    let now = moment();
    let mut reports = reports(now);
    let counter = |reports: &mut Reports| request_report(reports, 1, 0, now).counter.to_host();
    let first = counter(&mut reports);
    assert_eq!(counter(&mut reports), first);
    checked(&mut reports, Outcome::Passed, now);
    assert_eq!(counter(&mut reports), first + 1);
    checked(&mut reports, Outcome::Passed, now);
    assert_eq!(counter(&mut reports), first + 2);
}

/// `socklb agent run` removes and adds a backend when it restarts an application. A client may
/// subscribe with a cookie from before the restart, and lose the answer.
#[test]
fn a_returning_backend_continues_its_counter() {
    let now = moment();
    let mut reports = reports(now);
    for _ in 0..9 {
        checked(&mut reports, Outcome::Passed, now);
    }
    let cookie = subscribe(&mut reports, 1, now);
    let before = request_report(&mut reports, 1, cookie, now);
    reports.remove(name());
    assert_eq!(reports.answer(request(key(1), cookie).bytes(), requester(1), now), None);
    reports.set(name(), Keys::new(key(1), None), rules(), now);
    let lost = request_report(&mut reports, 1, before.cookie, now);
    checked(&mut reports, Outcome::Passed, now);
    let (_, push) = pushes(&mut reports, now)[0];
    let number = |report: &Datagram| (report.incarnation.to_host(), report.counter.to_host());
    assert!(number(&before) < number(&lost) && number(&lost) < number(&push));
}

#[test]
fn each_kind_of_refused_datagram_is_counted_and_not_answered() {
    let now = moment();
    let mut reports = reports(now);
    let good = request(key(1), 0);
    let changed = |change: fn(&mut Datagram)| {
        let mut datagram = good;
        change(&mut datagram);
        datagram.sealed(key(1).key.wire()).bytes().to_vec()
    };
    let other = named("10.0.0.1:81");
    let about = Datagram::about(Kind::Request, other.protocol().number(), other.address());
    let mut forged = good.bytes().to_vec();
    forged[BYTES - 1] ^= 1;
    let answer = request_report(&mut reports, 1, 0, now);
    let cases = [
        (good.bytes()[1..].to_vec(), Refused::Malformed(Malformed::Length)),
        ([good.bytes(), &[0]].concat(), Refused::Malformed(Malformed::Length)),
        (changed(|datagram| datagram.version = 9), Refused::Malformed(Malformed::Version)),
        (changed(|datagram| datagram.kind = 9), Refused::Malformed(Malformed::Kind)),
        (changed(|datagram| datagram.readiness = 9), Refused::Malformed(Malformed::Readiness)),
        (changed(|datagram| datagram.protocol = 9), Refused::Malformed(Malformed::Name)),
        (about.bytes().to_vec(), Refused::UnknownName),
        (changed(|datagram| datagram.key_id = Be16::from_host(3)), Refused::UnknownKey),
        (forged, Refused::Forged),
        (changed(|datagram| datagram.key_id = Be16::from_host(2)), Refused::Forged),
        (answer.bytes().to_vec(), Refused::NotARequest),
    ];
    for (bytes, expected) in cases {
        let before = count(&reports, expected);
        assert_eq!(reports.answer(&bytes, requester(1), now), None, "{expected:?}");
        assert_eq!(count(&reports, expected), before + 1, "{expected:?}");
    }
    assert_eq!(reports.counts().refused.iter().sum::<u64>(), 11);
    assert_eq!(reports.counts().answered, 1);
    let names: std::collections::BTreeSet<_> = Refused::ALL.map(Refused::name).into();
    assert_eq!(names.len(), Refused::ALL.len());
}

#[test]
fn only_clients_that_return_their_cookie_receive_pushes() {
    let now = moment();
    let mut reports = reports(now);
    let answer = request_report(&mut reports, 1, 0, now);
    // The same request arrives again, once from its own address and once from a victim's address.
    // Both requests are answered, and neither address becomes a subscriber.
    request_report(&mut reports, 1, 0, now);
    request_report(&mut reports, 66, 0, now);
    // An intercepted cookie is sent with the victim's address.
    request_report(&mut reports, 66, answer.cookie, now);
    assert_eq!(reports.get(name()).unwrap().subscribers(), 0);
    checked(&mut reports, Outcome::Passed, now);
    assert_eq!(pushes(&mut reports, now), []);
    request_report(&mut reports, 1, answer.cookie, now);
    assert_eq!(reports.get(name()).unwrap().subscribers(), 1);
}

#[test]
fn a_new_agent_may_not_know_all_clients_of_a_backend() {
    let now = moment();
    let reports = reports(now);
    let is_new = |at| reports.get(name()).unwrap().is_new(at);
    assert_eq!([now, now + MS * 2499, now + MS * 2500].map(is_new), [true, true, false]);
}

#[test]
fn a_change_is_pushed_until_its_cookie_is_returned() {
    let now = moment();
    let mut reports = reports(now);
    let before = subscribe(&mut reports, 1, now);
    checked(&mut reports, Outcome::Passed, now);
    let entry = |reports: &Reports| reports.get(name()).unwrap().unacknowledged(now);
    assert_eq!(entry(&reports), 1);
    let sent = pushes(&mut reports, now);
    let [(to, push)] = sent[..] else { panic!("not exactly one push: {sent:?}") };
    assert_eq!((to, push.kind(), push.readiness()), (requester(1), Some(Kind::Push), Some(Readiness::Ready)));
    assert!(push.is_authentic(key(1).key.wire()));
    // A request that crossed the push on the network has the previous cookie and acknowledges
    // nothing.
    let answer = request_report(&mut reports, 1, before, now + MS);
    assert_eq!(entry(&reports), 1);
    assert_eq!(reports.next_at(now + MS), Some(now + MS * 10));
    assert_eq!(pushes(&mut reports, now + MS * 10).len(), 1);
    request_report(&mut reports, 1, push.cookie, now + MS * 11);
    assert_eq!(entry(&reports), 0);
    assert_eq!(pushes(&mut reports, now + MS * 20), []);
    // The answer also contained the change.
    assert_eq!(answer.cookie, push.cookie);
    assert_eq!(reports.counts().pushed, 2);
}

/// The responder answered the client before the change, with the earlier prepared answer. The agent
/// reads the subscription from the responder's map after the change.
#[test]
fn a_client_that_subscribed_just_before_a_change_receives_it() {
    let now = moment();
    let mut reports = reports(now);
    let acknowledged = reports.get(name()).unwrap().change();
    checked(&mut reports, Outcome::Passed, now);
    assert_eq!(pushes(&mut reports, now), []);
    reports.subscribe(name(), requester(1), 1, acknowledged, now);
    let sent = pushes(&mut reports, now);
    assert_eq!((sent.len(), sent[0].0), (1, requester(1)));
    reports.subscribe(name(), requester(2), 1, acknowledged + 1, now);
    assert_eq!(pushes(&mut reports, now), [], "the client has acknowledged the change");
    assert_eq!(reports.get(name()).unwrap().unacknowledged(now), 1);
}

#[test]
fn a_prepared_answer_expires_with_its_check_and_its_report() {
    let now = moment();
    let mut reports = reports(now);
    let holds = |reports: &Reports, at: Instant| {
        Duration::from_nanos(reports.get(name()).unwrap().prepared(at, 7).deadline_ns - 7)
    };
    assert_eq!(holds(&reports, now), Duration::from_secs(5));
    checked(&mut reports, Outcome::Passed, now);
    assert_eq!(
        holds(&reports, now + MS * 8_400),
        MS * 600,
        "the result of a check is valid for nine seconds"
    );
    let briefly = Rules { valid_for: MS * 1_000, ..rules() };
    reports.set(name(), Keys::new(key(1), None), briefly, now);
    assert_eq!(holds(&reports, now), MS * 2_000);
}

#[test]
fn changes_of_load_alone_are_not_pushed() {
    let now = moment();
    let mut reports = reports(now);
    checked(&mut reports, Outcome::Passed, now);
    subscribe(&mut reports, 1, now);
    checked(&mut reports, Outcome::Passed, now);
    let load = load::Load { qps: Some(1), eps: None, utilization: None, window: MS, measured: now };
    reports.get_mut(name()).unwrap().loaded(load, now + MS * 10, now);
    assert_eq!(pushes(&mut reports, now), []);
}

#[test]
fn a_key_is_replaced_without_a_failed_request() {
    let now = moment();
    let mut reports = reports(now);
    let [one, two, three] = [key(1), key(2), key(3)];
    let request_report = |reports: &mut Reports, key: Numbered<BackendKey>| {
        let answer = reports.answer(request(key, 0).bytes(), requester(1), now);
        answer.is_some_and(|answer| answer.key_id.to_host() == key.id && answer.is_authentic(key.key.wire()))
    };
    assert_eq!([one, two, three].map(|key| request_report(&mut reports, key)), [true, true, false]);
    subscribe(&mut reports, 1, now);
    reports.set(name(), Keys::new(two, Some(three)), rules(), now);
    assert_eq!([one, two, three].map(|key| request_report(&mut reports, key)), [false, true, true]);
    // If a subscriber's last request used a removed key, the push uses the current key.
    checked(&mut reports, Outcome::Passed, now);
    let sent = pushes(&mut reports, now);
    assert!(sent[0].1.key_id.to_host() == 2 && sent[0].1.is_authentic(two.key.wire()));
}

#[test]
fn an_overdue_check_makes_the_backend_unknown() {
    let now = moment();
    let mut reports = reports(now);
    checked(&mut reports, Outcome::Passed, now);
    let at = |seconds| now + Duration::from_secs(seconds);
    assert_eq!(reports.next_at(now), Some(at(9)));
    let answer = request_report(&mut reports, 1, 0, at(9) - MS);
    assert_eq!(answer.readiness(), Some(Readiness::Ready));
    // An answer is never stale, even if the event loop has not run `expire` yet.
    let answer = request_report(&mut reports, 1, 0, at(9));
    assert_eq!(answer.readiness(), Some(Readiness::Unknown));
    checked(&mut reports, Outcome::Passed, at(10));
    checked(&mut reports, Outcome::Impossible("no such file".to_owned()), at(18));
    reports.expire(at(18));
    assert_eq!(reports.get(name()).unwrap().readiness(), Readiness::Ready);
    reports.expire(at(19));
    assert_eq!(reports.get(name()).unwrap().readiness(), Readiness::Unknown);
}

#[test]
fn one_backend_with_many_subscribers_delays_no_other() {
    let now = moment();
    let mut reports = reports(now);
    let other = named("10.0.0.1:81");
    reports.set(other, Keys::new(key(1), None), rules(), now);
    for n in 0..200 {
        reports.get_mut(name()).unwrap().subscribe(requester(n), 1, 0, now);
    }
    reports.get_mut(other).unwrap().subscribe(requester(1), 1, 0, now);
    for name in [name(), other] {
        reports.get_mut(name).unwrap().checked(Outcome::Passed, now);
    }
    let sent = pushes(&mut reports, now);
    assert_eq!(sent.len(), 100);
    assert!(sent.iter().any(|(_, push)| push.backend() == other.address()));
    assert_eq!(reports.next_at(now), Some(now + MS));
}

#[test]
fn requests_for_a_removed_backend_are_refused_as_unknown() {
    let now = moment();
    let mut reports = reports(now);
    reports.remove(name());
    assert_eq!(reports.answer(request(key(1), 0).bytes(), requester(1), now), None);
    assert_eq!(count(&reports, Refused::UnknownName), 1);
}

proptest! {
    /// Only an authentic request gets an answer, and the answer has the same length.
    #[test]
    fn only_authentic_requests_are_answered_with_as_many_bytes(
        mut bytes in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..200),
            Just(request(key(1), 0).bytes().to_vec()),
        ],
        flips in proptest::collection::vec((0..BYTES, any::<u8>()), 0..3),
        from: u8,
    ) {
        let now = moment();
        let mut reports = reports(now);
        for (at, with) in flips {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= with;
            }
        }
        let answer = reports.answer(&bytes, requester(from), now);
        let is_request = bytes == request(key(1), 0).bytes();
        prop_assert_eq!(answer.is_some(), is_request);
        if let Some(answer) = answer {
            prop_assert_eq!(answer.bytes().len(), bytes.len());
        }
        let counts = reports.counts();
        prop_assert_eq!(counts.answered + counts.refused.iter().sum::<u64>(), 1);
        prop_assert_eq!(reports.get(name()).unwrap().subscribers(), 0);
    }

    /// Replayed requests, in any order, do not subscribe an address that sent none, and do not
    /// change a readiness.
    #[test]
    fn replayed_requests_do_no_harm(replays in proptest::collection::vec((0..4usize, 1..4u8), 0..40)) {
        let now = moment();
        let mut reports = reports(now);
        let first = request_report(&mut reports, 1, 0, now);
        let seen = [request(key(1), 0), request(key(1), first.cookie), first, request(key(2), 0)];
        for (which, from) in replays {
            reports.answer(seen[which].bytes(), requester(from), now);
        }
        prop_assert!(reports.get(name()).unwrap().subscribers() <= 1);
        prop_assert_eq!(reports.get(name()).unwrap().readiness(), Readiness::Unknown);
        reports.get_mut(name()).unwrap().checked(Outcome::Passed, now);
        for (to, _) in pushes(&mut reports, now) {
            prop_assert_eq!(to, requester(1));
        }
    }

}
