//! The event loop of `socklb agent run`: receives events, passes them to the
//! [lifecycle](super::lifecycle), and executes the actions that the lifecycle returns.

mod checks;
mod children;
mod looks;

use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::connections::BackendListener;
use super::events::RunEvent;
use super::lifecycle::{Action, Input, Lifecycle, LifecycleOptions};
use super::options::{Args, LameDuckHook};
use super::processes::{CommandPurpose, Processes};
use super::report_task::ReportTask;
use super::signal::Signal;
use super::status::ProcessStatus;
use super::terminal::Terminal;
use crate::reporter::ReadinessReporter;

pub struct RunDriver {
    args: Args,
    listener: BackendListener,
    processes: Processes,
    terminal: Option<Terminal>,
    report_task: ReportTask,
    lifecycle: Lifecycle,
    events: mpsc::Sender<RunEvent>,
    began: Instant,
    /// The task that checks repeatedly whether the application can serve.
    check: Option<JoinHandle<()>>,
    /// Number of readiness checks that were started.
    checks: u64,
    /// The time of the next count of the connections; `None` during a count.
    look_at: Option<Instant>,
    /// Whether a warning was logged that the connections cannot be counted.
    is_blind: bool,
    /// Whether a warning was logged that the application is being killed.
    is_killing: bool,
    ended: Option<ProcessStatus>,
}

impl RunDriver {
    /// `processes` must have started the command.
    pub fn new<V: ReadinessReporter + 'static>(
        args: Args,
        listener: BackendListener,
        processes: Processes,
        terminal: Option<Terminal>,
        events: mpsc::Sender<RunEvent>,
        reporter: V,
    ) -> Self {
        let rules = LifecycleOptions {
            grace: args.grace,
            kill_after: args.kill_after,
            prewarms: args.prewarm.is_some(),
            notifies_application: args.on_lame_duck.is_some(),
        };
        let report_task = ReportTask::start(reporter, events.clone());
        let (lifecycle, actions) = Lifecycle::new(rules);
        let began = Instant::now();
        let mut driver = Self {
            args,
            listener,
            processes,
            terminal,
            report_task,
            lifecycle,
            events,
            began,
            check: None,
            checks: 0,
            look_at: Some(began),
            is_blind: false,
            is_killing: false,
            ended: None,
        };
        driver.carry_out(actions);
        driver.start_check();
        // A process may have ended before the loop waits for SIGCHLD.
        driver.reap();
        driver
    }

    /// Runs until the command and all processes that it has left behind have ended. The tasks of
    /// `signals` receive signals until then.
    pub async fn run(mut self, mut events: mpsc::Receiver<RunEvent>, signals: JoinSet<()>) -> ProcessStatus {
        let status = loop {
            if let Some(status) = self.ended {
                break status;
            }
            let deadline = self.deadline();
            let elapsed = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = events.recv() => self.event(event.expect("this process holds a sender")),
                () = elapsed => self.input(Input::Elapsed),
            }
            self.go_on();
        };
        drop(signals);
        self.stop_checking();
        self.processes.kill_shells(None);
        if let Some(terminal) = &self.terminal {
            terminal.take_back(self.processes.group());
        }
        self.report_task.finish().await;
        status
    }

    fn deadline(&self) -> Option<Instant> {
        let lifecycle = self.lifecycle.deadline().map(|deadline| self.began + deadline);
        let look = self.look_at.filter(|_| self.lifecycle.is_waiting());
        lifecycle.into_iter().chain(look).min()
    }

    fn event(&mut self, event: RunEvent) {
        match event {
            RunEvent::Signal(signal) => {
                // The shell that continues this process may have put this process into the
                // terminal's foreground.
                if let Some(terminal) = self.terminal.as_ref().filter(|_| signal == Signal::CONT) {
                    terminal.give(self.processes.group());
                }
                self.input(Input::Signal(signal));
            }
            RunEvent::Child => self.reap(),
            RunEvent::Ready => self.ready(),
            RunEvent::Check => self.start_check(),
            RunEvent::CheckOverdue(number) => self.check_overdue(number),
            RunEvent::Late => self.late(),
            RunEvent::Unacknowledged(count) => self.input(Input::Unacknowledged(count)),
            RunEvent::Looked(began, result) => self.looked(began, result),
        }
    }

    fn input(&mut self, input: Input) {
        let now = self.began.elapsed();
        let actions = self.lifecycle.handle(now, input);
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::ReportReadiness(readiness) => {
                    tracing::info!(?readiness, "the backend's readiness changed");
                    self.report_task.set_readiness(readiness);
                }
                Action::Prewarm => {
                    if let Some(line) = self.args.prewarm.clone()
                        && !self.start_shell(CommandPurpose::Prewarm, &line)
                    {
                        self.input(Input::Prewarmed(false));
                    }
                }
                Action::NotifyApplication => match self.args.on_lame_duck.clone() {
                    Some(LameDuckHook::Signal(signal)) => self.processes.pass_on(signal),
                    Some(LameDuckHook::Command(line)) => {
                        self.start_shell(CommandPurpose::LameDuck, &line);
                    }
                    None => {}
                },
                Action::PassOn(signal) => self.processes.pass_on(signal),
                Action::Report(wait) => self.report(wait),
                Action::Stop(signal) => {
                    tracing::info!(%signal, "sent a signal to the application to end it");
                    self.processes.stop(signal);
                }
                Action::Kill => {
                    // The lifecycle repeats this action whenever a process ends and other processes
                    // remain.
                    if !std::mem::replace(&mut self.is_killing, true) {
                        tracing::warn!(kill_after = ?self.args.kill_after, "the application did not end in time; killing it");
                    }
                    self.processes.kill();
                }
                Action::End(status) => self.ended = Some(status),
            }
        }
    }

    fn start_shell(&mut self, purpose: CommandPurpose, line: &str) -> bool {
        let started = self.processes.start_shell(purpose, line);
        if let Err(error) = &started {
            tracing::warn!(?purpose, %error, "cannot start a shell command");
        }
        started.is_ok()
    }

    /// Does the work that the current state of the lifecycle requires, independent of the last
    /// event.
    fn go_on(&mut self) {
        if !self.lifecycle.is_starting() {
            self.stop_checking();
        }
        if !self.lifecycle.is_waiting() {
            return;
        }
        self.processes.kill_shells(Some(CommandPurpose::Prewarm));
        self.report_task.poll_unacknowledged();
        self.look_if_due();
    }
}
