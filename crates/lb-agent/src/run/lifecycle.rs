//! The state machine of `socklb agent run`, from the start of the command to its end: states,
//! inputs and actions.
//!
//! The state machine is pure: it uses no processes and no sockets. The time since the start is an
//! argument, and the driver executes the actions that the state machine returns.

use std::time::Duration;

use lb_report::wire::Readiness;

use super::signal::Signal;
use super::status::ProcessStatus;

/// How long clients that have requested reports may take to acknowledge that the backend is a lame
/// duck. A running client acknowledges within a few round trips. A client on a dead host never
/// acknowledges.
pub const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(5);

/// Time in which connections may still arrive after all clients have acknowledged, because a SYN
/// may have been in flight, or may have been lost twice. Kernel fact: a SYN is retransmitted one
/// second and three seconds after the first SYN (since Linux 6.5: one and two seconds,
/// tcp_syn_linear_timeouts).
pub const SETTLE: Duration = Duration::from_millis(3200);

/// Pause after a failed prewarm, before the next attempt.
pub const PREWARM_PAUSE: Duration = Duration::from_secs(5);

/// Pause between two attempts to kill processes that do not end.
pub const KILL_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub struct LifecycleOptions {
    /// How long connections may take to end.
    pub grace: Duration,
    /// How long the application may take to end.
    pub kill_after: Duration,
    /// Whether the application is prewarmed before it is announced as ready.
    pub prewarms: bool,
    /// Whether the application is notified that it is a lame duck.
    pub notifies_application: bool,
}

/// One count of the backend's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSnapshot {
    /// The time from the start of `socklb agent run` to the start of the count.
    pub began: Duration,
    /// The number of connections in use.
    pub busy: usize,
    /// The number of open connections that have been idle for so long that `socklb agent run` does
    /// not wait for them.
    pub idle: usize,
}

/// Which descendants are left after a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// No descendant is left.
    NoProcess,
    /// Some descendants are left, and a socket listens at the backend's port.
    Serving,
    /// Some descendants are left, and no socket listens at the backend's port.
    Others,
}

#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// The application can serve.
    Ready,
    /// The prewarm command has ended; `true` means exit code 0.
    Prewarmed(bool),
    /// This process received a signal.
    Signal(Signal),
    /// A signal stopped the command.
    Stopped,
    /// The command continues after a stop.
    Continued,
    /// The agent reports how many clients have not acknowledged that the backend is a lame duck.
    Unacknowledged(usize),
    /// The connections have been counted.
    Looked(ConnectionSnapshot),
    /// A process has ended.
    Ended {
        /// Whether the process is the command itself, not a descendant.
        is_command: bool,
        status: ProcessStatus,
        left: Left,
    },
    /// The [`deadline`](Lifecycle::deadline) has passed.
    Elapsed,
}

/// The reason why the wait for connections is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// All clients have acknowledged, or the time to acknowledge is over; and no connection is in
    /// use.
    Quiet,
    /// The grace (`--grace`) has passed.
    Grace,
    /// A second signal requested the end.
    SecondSignal,
}

/// The result of the wait for connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub cause: Cause,
    /// How long the wait took.
    pub waited: Duration,
    /// The number of clients that had not acknowledged the lame duck; `None` if the agent never
    /// reported this number.
    pub unacknowledged: Option<usize>,
    /// The last count of the connections; `None` if there was none.
    pub look: Option<ConnectionSnapshot>,
}

/// An action for the driver to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Makes the agent report this readiness from now on.
    ReportReadiness(Readiness),
    /// Starts the prewarm command.
    Prewarm,
    /// Notifies the application that it is a lame duck.
    NotifyApplication,
    /// Sends a signal to the command, or to the processes that it has left behind.
    PassOn(Signal),
    /// Logs the result of the wait.
    Report(Wait),
    /// Sends a signal to the command's process group, or to the processes that the command has left
    /// behind, and continues these processes if they are stopped.
    Stop(Signal),
    /// Kills all remaining processes.
    Kill,
    /// Ends `socklb agent run` with this status.
    End(ProcessStatus),
}

/// The wait for connections to end.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Duration,
    signal: Signal,
    unacknowledged: Option<usize>,
    /// The time at which all clients had acknowledged.
    acknowledged_at: Option<Duration>,
    look: Option<ConnectionSnapshot>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Starting,
    /// `None` while the prewarm command runs. After it has failed, the time of the next attempt.
    Prewarming(Option<Duration>),
    Serving,
    Waiting(Waiting),
    Stopping {
        signal: Signal,
        kill_at: Duration,
        killing: bool,
    },
    Ended,
}

#[derive(Debug)]
pub struct Lifecycle {
    rules: LifecycleOptions,
    state: State,
    /// The readiness that was reported last.
    reported: Option<Readiness>,
    /// Whether a signal has stopped the command, which then serves no client.
    stopped: bool,
    /// How the command itself has ended or, if it has left the application behind, how the
    /// application has ended.
    status: Option<ProcessStatus>,
    /// Whether the command has ended with exit code 0 while its descendants continue: the
    /// descendants are the application.
    forked_away: bool,
    /// Whether the application has ended or has stopped serving without a signal that requested its
    /// end.
    down: bool,
}

impl Lifecycle {
    /// The state machine of a command that has just started, and the first actions.
    pub fn new(rules: LifecycleOptions) -> (Self, Vec<Action>) {
        let mut lifecycle = Self {
            rules,
            state: State::Starting,
            reported: None,
            stopped: false,
            status: None,
            forked_away: false,
            down: false,
        };
        let mut actions = Vec::new();
        lifecycle.report_readiness(&mut actions);
        (lifecycle, actions)
    }

    /// Whether the driver has to check that the application can serve.
    pub fn is_starting(&self) -> bool {
        matches!(self.state, State::Starting)
    }

    /// Whether the driver has to wait for clients and connections.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Whether the command itself has ended.
    pub fn has_lost_command(&self) -> bool {
        self.status.is_some()
    }

    /// The time since the start at which the driver must pass [`Input::Elapsed`].
    pub fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Starting | State::Serving | State::Ended => None,
            State::Prewarming(again) => again,
            State::Waiting(waiting) => Some(waiting.since + self.rules.grace),
            State::Stopping { kill_at, .. } => Some(kill_at),
        }
    }

    /// Handles an input at time `now`. Returns the actions to execute, in this order.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Action> {
        let mut actions = Vec::new();
        if matches!(self.state, State::Ended) {
            return actions;
        }
        match input {
            Input::Ready => self.ready(&mut actions),
            Input::Prewarmed(well) => self.prewarmed(now, well),
            Input::Signal(signal) => self.signal(now, signal, &mut actions),
            Input::Stopped => self.stopped = true,
            Input::Continued => self.stopped = false,
            Input::Unacknowledged(count) => self.unacknowledged(now, count),
            Input::Looked(look) => self.looked(now, look, &mut actions),
            Input::Ended { is_command, status, left } => {
                self.ended(now, is_command, status, left, &mut actions);
            }
            Input::Elapsed => self.elapsed(now, &mut actions),
        }
        // Reports precede other actions, because a backend that is still reported as ready must not
        // be stopped.
        let mut announced = Vec::new();
        self.report_readiness(&mut announced);
        announced.extend(actions);
        announced
    }

    fn readiness(&self) -> Readiness {
        match self.state {
            _ if self.down => Readiness::Down,
            State::Serving if self.stopped => Readiness::Down,
            State::Serving => Readiness::Ready,
            State::Starting | State::Prewarming(_) | State::Waiting(_) => Readiness::LameDuck,
            // A lame duck stays a lame duck after its end, because the backend will be started
            // again.
            State::Stopping { .. } | State::Ended => self.reported.unwrap_or(Readiness::LameDuck),
        }
    }

    fn report_readiness(&mut self, actions: &mut Vec<Action>) {
        let readiness = self.readiness();
        if self.reported != Some(readiness) {
            self.reported = Some(readiness);
            actions.push(Action::ReportReadiness(readiness));
        }
    }

    fn ready(&mut self, actions: &mut Vec<Action>) {
        if !self.is_starting() {
            return;
        }
        if self.rules.prewarms {
            self.state = State::Prewarming(None);
            actions.push(Action::Prewarm);
        } else {
            self.state = State::Serving;
        }
    }

    fn prewarmed(&mut self, now: Duration, well: bool) {
        if matches!(self.state, State::Prewarming(_)) {
            self.state = if well { State::Serving } else { State::Prewarming(Some(now + PREWARM_PAUSE)) };
        }
    }

    fn signal(&mut self, now: Duration, signal: Signal, actions: &mut Vec<Action>) {
        if !signal.is_request_to_end() {
            actions.push(Action::PassOn(signal));
            return;
        }
        match self.state {
            State::Starting | State::Prewarming(_) | State::Serving => {
                let waiting =
                    Waiting { since: now, signal, unacknowledged: None, acknowledged_at: None, look: None };
                self.state = State::Waiting(waiting);
                if self.rules.notifies_application {
                    actions.push(Action::NotifyApplication);
                }
            }
            State::Waiting(waiting) => {
                self.wait_is_over(now, Waiting { signal, ..waiting }, Cause::SecondSignal, actions);
            }
            State::Stopping { .. } => actions.push(Action::Stop(signal)),
            State::Ended => {}
        }
    }

    fn unacknowledged(&mut self, now: Duration, count: usize) {
        if let State::Waiting(waiting) = &mut self.state {
            waiting.unacknowledged = Some(count);
            if count == 0 {
                waiting.acknowledged_at.get_or_insert(now);
            }
        }
    }

    fn looked(&mut self, now: Duration, look: ConnectionSnapshot, actions: &mut Vec<Action>) {
        let State::Waiting(waiting) = &mut self.state else { return };
        waiting.look = Some(look);
        let waiting = *waiting;
        let acknowledged_at = waiting.acknowledged_at.unwrap_or(waiting.since + ACKNOWLEDGED_WITHIN);
        if look.busy == 0 && look.began >= acknowledged_at + SETTLE {
            self.wait_is_over(now, waiting, Cause::Quiet, actions);
        }
    }

    fn wait_is_over(&mut self, now: Duration, waiting: Waiting, cause: Cause, actions: &mut Vec<Action>) {
        let waited = now.saturating_sub(waiting.since);
        let Waiting { unacknowledged, look, signal, .. } = waiting;
        actions.push(Action::Report(Wait { cause, waited, unacknowledged, look }));
        self.stop(now, signal, actions);
    }

    fn stop(&mut self, now: Duration, signal: Signal, actions: &mut Vec<Action>) {
        // The readiness is reported before the state changes, because in the state `Stopping` the
        // backend retains the readiness that was reported last.
        self.report_readiness(actions);
        self.state = State::Stopping { signal, kill_at: now + self.rules.kill_after, killing: false };
        actions.push(Action::Stop(signal));
    }

    fn ended(
        &mut self,
        now: Duration,
        is_command: bool,
        status: ProcessStatus,
        left: Left,
        actions: &mut Vec<Action>,
    ) {
        let is_requested = matches!(self.state, State::Waiting(_) | State::Stopping { .. });
        if is_command {
            self.stopped = false;
            self.forked_away = !is_requested && status == ProcessStatus::Exited(0) && left != Left::NoProcess;
        }
        // If the command has forked away, the application is the process that ends last.
        if is_command || self.forked_away {
            self.status = Some(status);
        }
        if left == Left::NoProcess {
            self.down |= !is_requested;
            let status = self.status.unwrap_or(status);
            self.report_readiness(actions);
            self.state = State::Ended;
            actions.push(Action::End(status));
            return;
        }
        match self.state {
            State::Starting | State::Prewarming(_) | State::Serving => {
                let has_failed = is_command && !self.forked_away;
                let serves_no_more =
                    self.has_lost_command() && left == Left::Others && matches!(self.state, State::Serving);
                if has_failed || serves_no_more {
                    self.down = true;
                    // The processes that are left are not the application, so their exit status is
                    // ignored.
                    self.forked_away = false;
                    self.stop(now, Signal::TERM, actions);
                }
            }
            // The wait continues for as long as the remaining processes have connections.
            State::Waiting(_) => {}
            State::Stopping { killing: true, .. } => actions.push(Action::Kill),
            // The remaining processes may be outside of the command's process group. These
            // processes have not received the signal.
            State::Stopping { signal, .. } if is_command => actions.push(Action::Stop(signal)),
            State::Stopping { .. } | State::Ended => {}
        }
    }

    fn elapsed(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match &mut self.state {
            State::Starting | State::Serving | State::Ended => {}
            State::Prewarming(again) => {
                *again = None;
                actions.push(Action::Prewarm);
            }
            State::Waiting(waiting) => {
                let waiting = *waiting;
                self.wait_is_over(now, waiting, Cause::Grace, actions);
            }
            State::Stopping { kill_at, killing, .. } => {
                *killing = true;
                *kill_at = now + KILL_PAUSE;
                actions.push(Action::Kill);
            }
        }
    }
}

#[cfg(test)]
mod tests;
