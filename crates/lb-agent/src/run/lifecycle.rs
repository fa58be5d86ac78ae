//! What a run does when: from its command's start to its end, as states, inputs and actions.
//!
//! Pure: time is an argument, counted since the run began, and every action is carried out by the driver. It knows neither
//! processes nor sockets.

use std::time::Duration;

use lb_report::wire::Readiness;

use super::signal::Signal;
use super::status::ProcessStatus;

/// How long clients that have probed may take to acknowledge that the backend is a lame duck. One that runs does so within
/// a few round trips; one whose host has died never does.
pub const HEARING: Duration = Duration::from_secs(5);

/// How long after all have heard a connection of theirs may still arrive: its SYN was under way, or was lost, even twice. Kernel fact:
/// it is sent again after a second, and after three seconds (after two, since Linux 6.5: tcp_syn_linear_timeouts).
pub const SETTLE: Duration = Duration::from_millis(3200);

/// Between two attempts of a prewarming that fails.
pub const PREWARM_PAUSE: Duration = Duration::from_secs(5);

/// Between two attempts to kill what does not end.
pub const KILL_PAUSE: Duration = Duration::from_secs(1);

/// What the operator has asked for.
#[derive(Clone, Copy, Debug)]
pub struct LifecycleOptions {
    /// How long connections may take to end.
    pub grace: Duration,
    /// How long the application may take to end.
    pub kill_after: Duration,
    /// Whether it is prewarmed before it is announced.
    pub prewarms: bool,
    /// Whether the application is told that it is a lame duck.
    pub tells_application: bool,
}

/// A look at the backend's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSnapshot {
    /// When it began.
    pub began: Duration,
    /// Connections that are in use.
    pub busy: usize,
    /// Connections that are open and have been idle for long enough not to be waited for.
    pub idle: usize,
}

/// Which descendants are left when one has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// None.
    Nobody,
    /// Some, and the backend's port is listened at.
    Serving,
    /// Some, and nobody listens.
    Others,
}

/// What has happened.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// The application can serve.
    Ready,
    /// The prewarming has ended, well or not.
    Prewarmed(bool),
    /// This process was sent a signal.
    Signal(Signal),
    /// The command was stopped by a signal.
    Stopped,
    /// The command goes on.
    Continued,
    /// The agent says how many clients have not acknowledged that the backend is a lame duck.
    Unheard(usize),
    /// A look at the connections is over.
    Looked(ConnectionSnapshot),
    /// A process has ended.
    Ended {
        /// Whether it was the command itself, and not a descendant of it.
        is_command: bool,
        /// How.
        status: ProcessStatus,
        /// Who is left.
        left: Left,
    },
    /// The [`deadline`](Lifecycle::deadline) has come.
    Elapsed,
}

/// Why the wait for connections is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// All clients were told, and none has a connection in use.
    Quiet,
    /// The grace is over.
    Grace,
    /// A second signal asked to end.
    SecondSignal,
}

/// How the wait for connections went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Why it is over.
    pub cause: Cause,
    /// How long it took.
    pub waited: Duration,
    /// Clients that had not acknowledged; `None` if the agent never said.
    pub unheard: Option<usize>,
    /// The last look; `None` if there was none.
    pub look: Option<ConnectionSnapshot>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Has the agent say from now on how the backend is.
    Say(Readiness),
    /// Starts the prewarming.
    Prewarm,
    /// Tells the application that it is a lame duck.
    TellApplication,
    /// Sends a signal to the command, or to what is left of it.
    PassOn(Signal),
    /// Logs how the wait went.
    Report(Wait),
    /// Sends a signal to the command's process group, or to what is left of it, and has it go on if it was stopped.
    Stop(Signal),
    /// Kills all that is left.
    Kill,
    /// Ends the run.
    End(ProcessStatus),
}

/// Waiting for connections to end.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Duration,
    signal: Signal,
    unheard: Option<usize>,
    /// When all had heard.
    heard: Option<Duration>,
    look: Option<ConnectionSnapshot>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Starting,
    /// With when to try again, after a failure.
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

/// A run.
#[derive(Debug)]
pub struct Lifecycle {
    rules: LifecycleOptions,
    state: State,
    /// What was said last.
    said: Option<Readiness>,
    /// The command is stopped: it serves nobody.
    stopped: bool,
    /// How the command itself ended, or the application that it has left behind.
    status: Option<ProcessStatus>,
    /// The command has ended well, and its descendants went on: they are the application.
    forked_away: bool,
    /// It has ended, and nobody had asked for it.
    down: bool,
}

impl Lifecycle {
    /// The command was started. What is to be said first is in the second part.
    pub fn new(rules: LifecycleOptions) -> (Self, Vec<Action>) {
        let mut lifecycle = Self {
            rules,
            state: State::Starting,
            said: None,
            stopped: false,
            status: None,
            forked_away: false,
            down: false,
        };
        let mut actions = Vec::new();
        lifecycle.say(&mut actions);
        (lifecycle, actions)
    }

    /// Whether it is to be found out if the application can serve.
    pub fn is_starting(&self) -> bool {
        matches!(self.state, State::Starting)
    }

    /// Whether clients and connections are waited for.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Whether the command itself has ended.
    pub fn has_lost_command(&self) -> bool {
        self.status.is_some()
    }

    /// When it wants [`Input::Elapsed`].
    pub fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Starting | State::Serving | State::Ended => None,
            State::Prewarming(again) => again,
            State::Waiting(waiting) => Some(waiting.since + self.rules.grace),
            State::Stopping { kill_at, .. } => Some(kill_at),
        }
    }

    /// Takes in what has happened at `now`, and says what is to be done, in this order.
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
            Input::Unheard(count) => self.unheard(now, count),
            Input::Looked(look) => self.looked(now, look, &mut actions),
            Input::Ended { is_command, status, left } => {
                self.ended(now, is_command, status, left, &mut actions);
            }
            Input::Elapsed => self.elapsed(now, &mut actions),
        }
        // What is announced comes before what is done: nobody shall be stopped who is still said to be ready.
        let mut announced = Vec::new();
        self.say(&mut announced);
        announced.extend(actions);
        announced
    }

    fn readiness(&self) -> Readiness {
        match self.state {
            _ if self.down => Readiness::Down,
            State::Serving if self.stopped => Readiness::Down,
            State::Serving => Readiness::Ready,
            State::Starting | State::Prewarming(_) | State::Waiting(_) => Readiness::LameDuck,
            // A lame duck that has ended stays one: another run of it is to follow.
            State::Stopping { .. } | State::Ended => self.said.unwrap_or(Readiness::LameDuck),
        }
    }

    fn say(&mut self, actions: &mut Vec<Action>) {
        let readiness = self.readiness();
        if self.said != Some(readiness) {
            self.said = Some(readiness);
            actions.push(Action::Say(readiness));
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
                let waiting = Waiting { since: now, signal, unheard: None, heard: None, look: None };
                self.state = State::Waiting(waiting);
                if self.rules.tells_application {
                    actions.push(Action::TellApplication);
                }
            }
            State::Waiting(waiting) => {
                self.wait_is_over(now, Waiting { signal, ..waiting }, Cause::SecondSignal, actions);
            }
            State::Stopping { .. } => actions.push(Action::Stop(signal)),
            State::Ended => {}
        }
    }

    fn unheard(&mut self, now: Duration, count: usize) {
        if let State::Waiting(waiting) = &mut self.state {
            waiting.unheard = Some(count);
            if count == 0 {
                waiting.heard.get_or_insert(now);
            }
        }
    }

    fn looked(&mut self, now: Duration, look: ConnectionSnapshot, actions: &mut Vec<Action>) {
        let State::Waiting(waiting) = &mut self.state else { return };
        waiting.look = Some(look);
        let waiting = *waiting;
        let heard = waiting.heard.unwrap_or(waiting.since + HEARING);
        if look.busy == 0 && look.began >= heard + SETTLE {
            self.wait_is_over(now, waiting, Cause::Quiet, actions);
        }
    }

    fn wait_is_over(&mut self, now: Duration, waiting: Waiting, cause: Cause, actions: &mut Vec<Action>) {
        let waited = now.saturating_sub(waiting.since);
        let Waiting { unheard, look, signal, .. } = waiting;
        actions.push(Action::Report(Wait { cause, waited, unheard, look }));
        self.stop(now, signal, actions);
    }

    fn stop(&mut self, now: Duration, signal: Signal, actions: &mut Vec<Action>) {
        // Said before, as what is said of one that stops is what was said last.
        self.say(actions);
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
            self.forked_away = !is_requested && status == ProcessStatus::Exited(0) && left != Left::Nobody;
        }
        // Of a command that has forked away the last one to end is the application.
        if is_command || self.forked_away {
            self.status = Some(status);
        }
        if left == Left::Nobody {
            self.down |= !is_requested;
            let status = self.status.unwrap_or(status);
            self.say(actions);
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
                    // What is left is not the application, and how it ends says nothing of that.
                    self.forked_away = false;
                    self.stop(now, Signal::TERM, actions);
                }
            }
            // The wait goes on as long as connections of what is left do.
            State::Waiting(_) => {}
            State::Stopping { killing: true, .. } => actions.push(Action::Kill),
            // What is left is perhaps not in the command's process group, and has not been told.
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
