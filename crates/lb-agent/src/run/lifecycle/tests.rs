//! Tests every path of the state machine, and the properties that hold on all paths.

use proptest::prelude::*;

use super::*;

const RULES: LifecycleOptions = LifecycleOptions {
    grace: Duration::from_secs(30),
    kill_after: Duration::from_secs(10),
    prewarms: false,
    notifies_application: false,
};

const QUIET: ConnectionSnapshot = ConnectionSnapshot { began: Duration::ZERO, busy: 0, idle: 0 };

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn ended(code: u8) -> Input {
    Input::Ended { is_command: true, status: ProcessStatus::Exited(code), left: Left::NoProcess }
}

/// A backend that has served since second 1.
fn serving(rules: LifecycleOptions) -> Lifecycle {
    let (mut lifecycle, actions) = Lifecycle::new(rules);
    assert_eq!(actions, [Action::ReportReadiness(Readiness::LameDuck)]);
    lifecycle.handle(s(1), Input::Ready);
    if rules.prewarms {
        lifecycle.handle(s(1), Input::Prewarmed(true));
    }
    assert_eq!(lifecycle.reported, Some(Readiness::Ready));
    lifecycle
}

/// A backend that received SIGTERM in second 10; all clients have acknowledged that it is a lame
/// duck.
fn waiting() -> Lifecycle {
    let mut lifecycle = serving(RULES);
    let actions = lifecycle.handle(s(10), Input::Signal(Signal::TERM));
    assert_eq!(actions, [Action::ReportReadiness(Readiness::LameDuck)]);
    assert_eq!(lifecycle.handle(s(10), Input::Unacknowledged(0)), []);
    lifecycle
}

fn report(
    cause: Cause,
    seconds: u64,
    unacknowledged: Option<usize>,
    look: Option<ConnectionSnapshot>,
) -> Action {
    Action::Report(Wait { cause, waited: s(seconds), unacknowledged, look })
}

#[test]
fn a_backend_is_ready_once_it_can_serve() {
    let (mut lifecycle, first) = Lifecycle::new(RULES);
    assert_eq!(first, [Action::ReportReadiness(Readiness::LameDuck)]);
    assert!(lifecycle.is_starting());
    assert_eq!(lifecycle.handle(s(1), Input::Ready), [Action::ReportReadiness(Readiness::Ready)]);
    assert!(!lifecycle.is_starting());
}

#[test]
fn prewarming_is_retried_until_it_succeeds_and_then_the_backend_is_ready() {
    let (mut lifecycle, _) = Lifecycle::new(LifecycleOptions { prewarms: true, ..RULES });
    assert_eq!(lifecycle.handle(s(1), Input::Ready), [Action::Prewarm]);
    assert_eq!(lifecycle.handle(s(2), Input::Prewarmed(false)), []);
    assert_eq!(lifecycle.deadline(), Some(s(7)));
    assert_eq!(lifecycle.handle(s(6), Input::Elapsed), []);
    assert_eq!(lifecycle.handle(s(7), Input::Elapsed), [Action::Prewarm]);
    assert_eq!(lifecycle.handle(s(8), Input::Prewarmed(true)), [Action::ReportReadiness(Readiness::Ready)]);
}

#[test]
fn a_request_to_end_makes_a_lame_duck_and_notifies_the_application() {
    let mut lifecycle = serving(LifecycleOptions { notifies_application: true, ..RULES });
    let actions = lifecycle.handle(s(10), Input::Signal(Signal::INT));
    assert_eq!(actions, [Action::ReportReadiness(Readiness::LameDuck), Action::NotifyApplication]);
    assert!(lifecycle.is_waiting());
}

#[test]
fn the_wait_ends_once_clients_have_acknowledged_and_a_later_count_is_quiet() {
    let mut lifecycle = waiting();
    let busy = ConnectionSnapshot { began: s(12), busy: 1, idle: 3 };
    assert_eq!(lifecycle.handle(s(12), Input::Looked(busy)), []);
    // A count that began before the end of `SETTLE` does not end the wait.
    assert_eq!(lifecycle.handle(s(13), Input::Looked(ConnectionSnapshot { began: s(13), ..QUIET })), []);
    let idle = ConnectionSnapshot { began: s(14), busy: 0, idle: 3 };
    let actions = lifecycle.handle(s(14), Input::Looked(idle));
    assert_eq!(actions, [report(Cause::Quiet, 4, Some(0), Some(idle)), Action::Stop(Signal::TERM)]);
    assert_eq!(lifecycle.handle(s(15), ended(0)), [Action::End(ProcessStatus::Exited(0))]);
}

#[test]
fn clients_that_never_acknowledge_delay_the_end_for_a_bounded_time() {
    let mut lifecycle = serving(RULES);
    lifecycle.handle(s(10), Input::Signal(Signal::TERM));
    lifecycle.handle(s(11), Input::Unacknowledged(2));
    let early = ConnectionSnapshot { began: s(18), ..QUIET };
    assert_eq!(lifecycle.handle(s(18), Input::Looked(early)), []);
    let late = ConnectionSnapshot { began: s(19), ..QUIET };
    let actions = lifecycle.handle(s(19), Input::Looked(late));
    assert_eq!(actions, [report(Cause::Quiet, 9, Some(2), Some(late)), Action::Stop(Signal::TERM)]);
}

#[test]
fn the_end_of_the_grace_ends_the_wait_despite_open_connections() {
    let mut lifecycle = waiting();
    let busy = ConnectionSnapshot { began: s(39), busy: 2, idle: 1 };
    lifecycle.handle(s(39), Input::Looked(busy));
    assert_eq!(lifecycle.deadline(), Some(s(40)));
    assert_eq!(lifecycle.handle(s(39), Input::Elapsed), []);
    let actions = lifecycle.handle(s(40), Input::Elapsed);
    assert_eq!(actions, [report(Cause::Grace, 30, Some(0), Some(busy)), Action::Stop(Signal::TERM)]);
}

#[test]
fn if_connections_cannot_be_read_the_wait_lasts_the_whole_grace() {
    let mut lifecycle = waiting();
    assert_eq!(lifecycle.handle(s(39), Input::Elapsed), []);
    let actions = lifecycle.handle(s(40), Input::Elapsed);
    assert_eq!(actions, [report(Cause::Grace, 30, Some(0), None), Action::Stop(Signal::TERM)]);
}

#[test]
fn a_backend_that_is_not_ready_yet_ends_in_the_same_way() {
    for prewarms in [false, true] {
        let (mut lifecycle, _) = Lifecycle::new(LifecycleOptions { prewarms, ..RULES });
        if prewarms {
            lifecycle.handle(s(1), Input::Ready);
        }
        // The backend is already reported as a lame duck.
        assert_eq!(lifecycle.handle(s(2), Input::Signal(Signal::TERM)), []);
        assert!(lifecycle.is_waiting() && !lifecycle.is_starting());
        // If a check or a prewarm ends now, the backend must not be announced as ready.
        assert_eq!(lifecycle.handle(s(3), Input::Ready), []);
        assert_eq!(lifecycle.handle(s(3), Input::Prewarmed(true)), []);
    }
}

#[test]
fn every_further_request_to_end_is_passed_on_at_once() {
    let mut lifecycle = waiting();
    let actions = lifecycle.handle(s(11), Input::Signal(Signal::INT));
    assert_eq!(actions, [report(Cause::SecondSignal, 1, Some(0), None), Action::Stop(Signal::INT)]);
    assert_eq!(lifecycle.handle(s(12), Input::Signal(Signal::TERM)), [Action::Stop(Signal::TERM)]);
    // A third signal does not extend the time until the kill.
    assert_eq!(lifecycle.deadline(), Some(s(21)));
}

#[test]
fn processes_that_do_not_end_are_killed_until_none_is_left() {
    let mut lifecycle = waiting();
    lifecycle.handle(s(11), Input::Signal(Signal::TERM));
    assert_eq!(lifecycle.handle(s(21), Input::Elapsed), [Action::Kill]);
    assert_eq!(lifecycle.handle(s(22), Input::Elapsed), [Action::Kill]);
    let killed = ProcessStatus::Killed(Signal::KILL);
    let ended = |is_command, left| Input::Ended { is_command, status: killed, left };
    assert_eq!(lifecycle.handle(s(22), ended(true, Left::Others)), [Action::Kill]);
    assert_eq!(lifecycle.handle(s(22), ended(false, Left::NoProcess)), [Action::End(killed)]);
    assert_eq!(lifecycle.handle(s(23), Input::Signal(Signal::TERM)), []);
}

#[test]
fn every_other_signal_is_passed_on() {
    let (mut lifecycle, _) = Lifecycle::new(RULES);
    for signal in Signal::taken().filter(|signal| !signal.is_request_to_end()) {
        assert_eq!(lifecycle.handle(s(0), Input::Signal(signal)), [Action::PassOn(signal)]);
    }
}

#[test]
fn a_command_that_ends_by_itself_is_down() {
    let report_down = Action::ReportReadiness(Readiness::Down);
    let (mut lifecycle, _) = Lifecycle::new(RULES);
    assert_eq!(lifecycle.handle(s(1), ended(3)), [report_down, Action::End(ProcessStatus::Exited(3))]);
    assert_eq!(serving(RULES).handle(s(2), ended(0)), [report_down, Action::End(ProcessStatus::Exited(0))]);
    // A backend that received a request to end stays a lame duck, however it ends.
    assert_eq!(waiting().handle(s(11), ended(1)), [Action::End(ProcessStatus::Exited(1))]);
}

#[test]
fn processes_left_by_a_crash_are_ended_and_the_run_has_the_crashs_status() {
    let mut lifecycle = serving(RULES);
    let crash = ProcessStatus::Killed(Signal::from_raw(11));
    let input = Input::Ended { is_command: true, status: crash, left: Left::Serving };
    let actions = lifecycle.handle(s(2), input);
    assert_eq!(actions, [Action::ReportReadiness(Readiness::Down), Action::Stop(Signal::TERM)]);
    assert_eq!(lifecycle.deadline(), Some(s(12)));
    let last = Input::Ended {
        is_command: false,
        status: ProcessStatus::Killed(Signal::TERM),
        left: Left::NoProcess,
    };
    assert_eq!(lifecycle.handle(s(3), last), [Action::End(crash)]);
}

#[test]
fn a_command_that_forks_away_is_followed() {
    let well = |is_command, left| Input::Ended { is_command, status: ProcessStatus::Exited(0), left };
    // The command may fork away before or after the application can serve.
    let (mut lifecycle, _) = Lifecycle::new(RULES);
    assert_eq!(lifecycle.handle(s(1), well(true, Left::Others)), []);
    assert!(lifecycle.has_lost_command());
    assert_eq!(lifecycle.handle(s(2), Input::Ready), [Action::ReportReadiness(Readiness::Ready)]);
    assert_eq!(lifecycle.handle(s(3), well(false, Left::Serving)), []);
    let mut late = serving(RULES);
    assert_eq!(late.handle(s(2), well(true, Left::Serving)), []);
    // When the application ends, `socklb agent run` ends.
    let crash = Input::Ended { is_command: false, status: ProcessStatus::Exited(7), left: Left::NoProcess };
    let expected = [Action::ReportReadiness(Readiness::Down), Action::End(ProcessStatus::Exited(7))];
    assert_eq!(lifecycle.handle(s(4), crash), expected);
    assert_eq!(late.handle(s(4), crash), expected);
}

#[test]
fn remaining_processes_that_do_not_listen_are_not_the_application() {
    let mut lifecycle = serving(RULES);
    let input = Input::Ended { is_command: true, status: ProcessStatus::Exited(0), left: Left::Others };
    let actions = lifecycle.handle(s(2), input);
    assert_eq!(actions, [Action::ReportReadiness(Readiness::Down), Action::Stop(Signal::TERM)]);
    let last = Input::Ended {
        is_command: false,
        status: ProcessStatus::Killed(Signal::TERM),
        left: Left::NoProcess,
    };
    assert_eq!(lifecycle.handle(s(3), last), [Action::End(ProcessStatus::Exited(0))]);
}

#[test]
fn processes_left_by_a_requested_end_receive_the_signal() {
    let mut lifecycle = waiting();
    lifecycle.handle(s(11), Input::Signal(Signal::TERM));
    let input = Input::Ended { is_command: true, status: ProcessStatus::Exited(0), left: Left::Others };
    assert_eq!(lifecycle.handle(s(12), input), [Action::Stop(Signal::TERM)]);
    let last = Input::Ended {
        is_command: false,
        status: ProcessStatus::Killed(Signal::TERM),
        left: Left::NoProcess,
    };
    assert_eq!(lifecycle.handle(s(13), last), [Action::End(ProcessStatus::Exited(0))]);
}

#[test]
fn a_stopped_command_is_down_until_it_continues() {
    let mut lifecycle = serving(RULES);
    assert_eq!(lifecycle.handle(s(2), Input::Stopped), [Action::ReportReadiness(Readiness::Down)]);
    assert_eq!(lifecycle.handle(s(3), Input::Continued), [Action::ReportReadiness(Readiness::Ready)]);
    let mut lifecycle = waiting();
    assert_eq!(lifecycle.handle(s(11), Input::Stopped), []);
}

fn inputs() -> impl Strategy<Value = Input> {
    let status = prop_oneof![
        any::<u8>().prop_map(ProcessStatus::Exited),
        (1..32).prop_map(|number| ProcessStatus::Killed(Signal::from_raw(number))),
    ];
    let left = prop_oneof![Just(Left::Serving), Just(Left::Others), Just(Left::NoProcess)];
    prop_oneof![
        4 => Just(Input::Ready),
        2 => any::<bool>().prop_map(Input::Prewarmed),
        2 => prop_oneof![Just(Signal::TERM), Just(Signal::INT), Just(Signal::HUP)].prop_map(Input::Signal),
        1 => prop_oneof![Just(Input::Stopped), Just(Input::Continued)],
        3 => (0..3usize).prop_map(Input::Unacknowledged),
        3 => (0..60u64, 0..3usize, 0..3usize)
            .prop_map(|(began, busy, idle)| Input::Looked(ConnectionSnapshot { began: s(began), busy, idle })),
        1 => (any::<bool>(), status, left)
            .prop_map(|(is_command, status, left)| Input::Ended { is_command, status, left }),
        4 => Just(Input::Elapsed),
    ]
}

proptest! {
    #[test]
    fn order_and_bounds_hold_for_all_inputs(
        prewarms: bool,
        steps in prop::collection::vec((0..20u64, inputs()), 1..60),
    ) {
        let (mut lifecycle, first) = Lifecycle::new(LifecycleOptions { prewarms, ..RULES });
        let mut reported = vec![first[0]];
        let (mut now, mut end_requested, mut stopped) = (Duration::ZERO, None, None);
        let (mut is_over, mut was_ready, mut was_prewarmed) = (false, false, false);
        for (pause, input) in steps {
            now += s(pause);
            was_ready |= matches!(input, Input::Ready);
            was_prewarmed |= was_ready && matches!(input, Input::Prewarmed(true));
            // A deadline that has passed is handled before other inputs.
            for input in [Input::Elapsed, input] {
                let actions = lifecycle.handle(now, input);
                if is_over {
                    prop_assert_eq!(&actions, &[]);
                }
                if let Input::Signal(signal) = input && signal.is_request_to_end() {
                    end_requested = end_requested.or(Some(now));
                }
                for action in actions {
                    match action {
                        Action::ReportReadiness(readiness) => {
                            prop_assert_ne!(reported.last(), Some(&action), "the same readiness was reported twice");
                            let is_ready = readiness == Readiness::Ready;
                            prop_assert!(!is_ready || end_requested.is_none() && was_ready && (!prewarms || was_prewarmed));
                            prop_assert!(stopped.is_none());
                            reported.push(action);
                        }
                        Action::Stop(_) => {
                            stopped = stopped.or(Some(now));
                            prop_assert_ne!(reported.last(), Some(&Action::ReportReadiness(Readiness::Ready)), "the application was stopped while it was reported as ready");
                        }
                        Action::Kill => {
                            let since = stopped.expect("a kill comes after a stop");
                            prop_assert!(now >= since + RULES.kill_after);
                        }
                        Action::Report(wait) => {
                            prop_assert!(end_requested.is_some() && stopped.is_none());
                            let is_quiet = wait.look.is_some_and(|look| look.busy == 0);
                            prop_assert!(wait.cause != Cause::Quiet || is_quiet);
                            prop_assert!(wait.cause != Cause::Grace || wait.waited >= RULES.grace);
                        }
                        Action::End(_) => is_over = true,
                        Action::Prewarm => prop_assert!(prewarms && was_ready && end_requested.is_none()),
                        Action::NotifyApplication => prop_assert!(false, "the application was notified, but no hook is configured"),
                        Action::PassOn(signal) => prop_assert!(!signal.is_request_to_end()),
                    }
                }
            }
            let waits = lifecycle.is_waiting().then_some(end_requested).flatten();
            prop_assert!(waits.is_none_or(|since| now < since + RULES.grace), "still waiting after the grace");
        }
    }
}
