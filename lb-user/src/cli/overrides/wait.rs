//! Waits until drained backends have no open flows. If the daemon ends meanwhile, the backends stay
//! drained, and the command waits for the next daemon.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use lb_kernel::trust::Untrusted;
use lb_view::overrides::{DrainProgress, OverrideScope, OverridesDocument};
use lb_view::text::{Style, age, counted};
use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

use crate::api;
use crate::cli::DEGRADED;
use crate::config::Paths;
use crate::error::is_permission;
use crate::output::print;

/// The exit code if a drain ends before the command ends.
pub const NOT_DRAINED: u8 = 1;

/// The pause between two queries.
pub const PAUSE: Duration = Duration::from_millis(500);
/// How long to wait for the daemon's answer to one query.
const TO_ANSWER: Duration = Duration::from_secs(2);
/// The shortest time between two lines of progress, if standard output is not a terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// The rate of ended flows is the mean over this time.
const RATE_OVER: Duration = Duration::from_secs(10);

/// The result of waiting.
pub struct Waited {
    /// The exit code: 0 if no flow is open.
    pub code: u8,
    /// The last state that the daemon reported.
    pub last: Option<OverridesDocument>,
}

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub enum WaitLimit {
    /// The time of `--timeout`, at the end of the command.
    Timeout(Duration),
    /// The time of `--after`, before flows are closed.
    After(Duration),
}

impl WaitLimit {
    const fn time(self) -> Duration {
        let (Self::Timeout(time) | Self::After(time)) = self;
        time
    }

    /// What follows when flows are still open at the end of the time.
    const fn then(self) -> &'static str {
        match self {
            Self::Timeout(_) => {
                "the time of --timeout is over, and the backends stay drained: to wait longer, repeat the \
                 command; to close the flows, use `socklb close`"
            }
            Self::After(_) => "the time of --after is over, and the backends stay drained",
        }
    }
}

/// The signals that end a command early. Once the first value of this type exists, these signals no
/// longer end the process by themselves: tokio does not restore the default action.
pub struct Interrupts {
    interrupt: unix::Signal,
    terminate: unix::Signal,
}

impl Interrupts {
    /// Starts to catch the signals. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If a handler cannot be installed.
    pub fn new() -> Result<Self> {
        let of = |signal: Signal| unix::signal(SignalKind::from_raw(signal.as_raw()));
        Ok(Self { interrupt: of(Signal::INT)?, terminate: of(Signal::TERM)? })
    }

    /// Waits for a signal. Returns 128 plus its number, which shells report for a process that a
    /// signal has ended.
    pub async fn next(&mut self) -> u8 {
        let number = tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
        };
        128 + u8::try_from(number.as_raw()).unwrap_or(0)
    }
}

/// Queries the overrides of the host, and the progress of the drains with these scopes. Both are
/// `None` if no daemon answers in time. The progress is also `None` if the daemon does not know all
/// drains yet.
///
/// # Errors
/// If the daemon is not trusted or refuses this user.
pub async fn observe(
    paths: &Paths,
    scopes: &[OverrideScope],
) -> Result<(Option<OverridesDocument>, Option<DrainProgress>)> {
    let query = api::fetch::<OverridesDocument>(paths, "/v1/overrides");
    match tokio::time::timeout(TO_ANSWER, query).await {
        Ok(Ok(Some(document))) => {
            let progress = document.progress(scopes);
            // A daemon that has not been able to read its stored overrides yet does not know all
            // drains.
            let is_known = progress.ended.is_empty() || document.not_kept.is_none();
            Ok((Some(document), is_known.then_some(progress)))
        }
        Ok(Err(error)) if is_permission(&error) || error.is::<Untrusted>() => Err(error),
        // The daemon does not run, is starting or stopping, or hangs.
        Ok(Ok(None) | Err(_)) | Err(_) => Ok((None, None)),
    }
}

/// Waits until the limit, or until these drains have no open flows. Prints the progress to
/// standard output, or to standard error if standard output is for JSON.
///
/// # Errors
/// If the daemon is not trusted or refuses this user, or the output cannot be written.
pub async fn wait(
    paths: &Paths,
    scopes: &[OverrideScope],
    limit: WaitLimit,
    json: bool,
    interrupts: &mut Interrupts,
) -> Result<Waited> {
    let mut shown =
        ProgressPrinter { is_terminal: !json && std::io::stdout().is_terminal(), json, last: None };
    let mut waiting = DrainWait::new(limit);
    let mut last = None;
    let mut pause = tokio::time::interval(PAUSE);
    pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let began = pause.tick().await;
    let mut now = began;
    let (code, text) = loop {
        let (document, seen) = tokio::select! {
            seen = observe(paths, scopes) => seen?,
            code = interrupts.next() => break (code, INTERRUPTED.to_owned()),
        };
        last = document.or(last);
        let at = now - began;
        match waiting.step(at, seen) {
            WaitStep::Waits(line) => shown.progress(at, &line)?,
            WaitStep::Ends(code, text) => break (code, text),
        }
        tokio::select! {
            tick = pause.tick() => now = tick,
            code = interrupts.next() => break (code, INTERRUPTED.to_owned()),
        }
    };
    shown.end(&text)?;
    Ok(Waited { code, last })
}

const INTERRUPTED: &str = "stopped waiting; the backends stay drained until `socklb undrain`";

/// The message of a command that ends because a backend is no longer drained.
pub fn no_longer_drained(backend: SocketAddr) -> String {
    format!("{backend} is no longer drained: another command has ended the drain, or its time is over")
}

/// Prints the progress, and stores what it has printed last.
struct ProgressPrinter {
    /// Whether each line replaces the previous line.
    is_terminal: bool,
    json: bool,
    last: Option<(Duration, String)>,
}

impl ProgressPrinter {
    fn progress(&mut self, at: Duration, line: &str) -> Result<()> {
        if self.is_terminal {
            let width = Style::for_stdout().width.unwrap_or(usize::MAX);
            let line: String = line.chars().take(width.saturating_sub(1)).collect();
            self.last = Some((at, line.clone()));
            print::in_place(&line)?;
        } else if is_due(self.last.as_ref(), at, line) {
            self.last = Some((at, line.to_owned()));
            self.line(line)?;
        }
        Ok(())
    }

    fn end(&self, text: &str) -> Result<()> {
        if self.is_terminal && self.last.is_some() {
            print::in_place("")?;
        }
        self.line(text)
    }

    fn line(&self, line: &str) -> Result<()> {
        if self.json {
            print::message(line);
        } else {
            print::text(&format!("{line}\n"))?;
        }
        Ok(())
    }
}

/// Whether to print `line` at the time `at`. `last` is the last printed line and its time.
fn is_due(last: Option<&(Duration, String)>, at: Duration, line: &str) -> bool {
    last.is_none_or(|(time, text)| text != line && at.saturating_sub(*time) >= BETWEEN_LINES)
}

/// The next step after an observation.
#[derive(Debug, PartialEq)]
enum WaitStep {
    /// Continue to wait, and show this progress.
    Waits(String),
    /// End the command with this exit code and text.
    Ends(u8, String),
}

/// The observations so far. All times are measured from the beginning of the waiting.
struct DrainWait {
    limit: WaitLimit,
    /// The number of open flows at earlier times, within [`RATE_OVER`].
    counts: VecDeque<(Duration, u64)>,
    last: Option<DrainProgress>,
}

impl DrainWait {
    fn new(limit: WaitLimit) -> Self {
        Self { limit, counts: VecDeque::new(), last: None }
    }

    /// Evaluates an observation; `None` if the daemon has not answered.
    fn step(&mut self, at: Duration, seen: Option<DrainProgress>) -> WaitStep {
        let is_late = at >= self.limit.time();
        let Some(progress) = seen else {
            let known = self
                .last
                .as_ref()
                .map_or_else(String::new, |last| format!("; last seen: {}", last.open_in_words()));
            let text = format!("the daemon does not answer; the backends stay drained{known}");
            let late = || format!("{text}; not waiting any longer after {}", in_seconds(at));
            return if is_late { WaitStep::Ends(DEGRADED, late()) } else { WaitStep::Waits(text) };
        };
        if let Some(backend) = progress.ended.first() {
            return WaitStep::Ends(NOT_DRAINED, no_longer_drained(*backend));
        }
        let (open, untracked) = (progress.open(), progress.untracked);
        let not_counted = if untracked > 0 {
            format!(
                "; {} not counted, because no program sees their end",
                counted(untracked, "untracked flow")
            )
        } else {
            String::new()
        };
        let what = progress.open_in_words();
        let text = if !progress.is_settled {
            self.counts.clear();
            format!("{what}; connects that began before the drain may still add flows")
        } else if open == 0 {
            return WaitStep::Ends(0, format!("{what} after {}{not_counted}", in_seconds(at)));
        } else {
            format!("{what}{}", self.rate(at, open))
        };
        self.last = Some(progress);
        if is_late {
            let text = format!("{what} after {}{not_counted}; {}", in_seconds(at), self.limit.then());
            return WaitStep::Ends(DEGRADED, text);
        }
        WaitStep::Waits(text + &not_counted)
    }

    /// The rate at which flows end, and an estimate of the time until no flow is open. Empty if no
    /// flow has ended within [`RATE_OVER`].
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an estimate for people"
    )]
    fn rate(&mut self, at: Duration, open: u64) -> String {
        self.counts.push_back((at, open));
        while self.counts.get(1).is_some_and(|(time, _)| *time + RATE_OVER <= at) {
            self.counts.pop_front();
        }
        let (since, before) = self.counts[0];
        let (seconds, ended) = ((at - since).as_secs_f64(), before.saturating_sub(open));
        if ended == 0 || seconds <= 0.0 {
            return String::new();
        }
        let rate = ended as f64 / seconds;
        let left = (open as f64 / rate).ceil() as u64;
        format!(", {rate:.1}/s end, about {} left", age(left))
    }
}

fn in_seconds(time: Duration) -> String {
    age(time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(open: u64) -> DrainProgress {
        DrainProgress {
            open: [(([10, 0, 0, 1], 80).into(), open)].into(),
            untracked: 0,
            is_settled: true,
            ended: Vec::new(),
        }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn waits(text: &str) -> WaitStep {
        WaitStep::Waits(text.to_owned())
    }

    #[test]
    fn waiting_ends_when_no_flow_is_open_and_none_can_begin() {
        let mut waiting = DrainWait::new(WaitLimit::Timeout(at(300)));
        let unsettled = DrainProgress { is_settled: false, ..seen(0) };
        assert_eq!(
            waiting.step(at(0), Some(unsettled)),
            waits("10.0.0.1:80: 0 open flows; connects that began before the drain may still add flows")
        );
        assert_eq!(waiting.step(at(1), Some(seen(40))), waits("10.0.0.1:80: 40 open flows"));
        assert_eq!(
            waiting.step(at(5), Some(seen(30))),
            waits("10.0.0.1:80: 30 open flows, 2.5/s end, about 12s left")
        );
        let untracked = DrainProgress { untracked: 2, ..seen(30) };
        assert_eq!(
            waiting.step(at(20), Some(untracked.clone())),
            waits(
                "10.0.0.1:80: 30 open flows; 2 untracked flows not counted, because no program sees their end"
            ),
            "no flow has ended in the last ten seconds"
        );
        let end = "10.0.0.1:80: 0 open flows after 1m01s";
        assert_eq!(waiting.step(at(61), Some(seen(0))), WaitStep::Ends(0, end.to_owned()));
        let end = format!("{end}; 2 untracked flows not counted, because no program sees their end");
        let untracked = DrainProgress { untracked: 2, ..seen(0) };
        assert_eq!(waiting.step(at(61), Some(untracked)), WaitStep::Ends(0, end));
    }

    #[test]
    fn the_timeout_states_how_many_flows_are_left() {
        let mut waiting = DrainWait::new(WaitLimit::Timeout(at(10)));
        let text = "10.0.0.1:80: 3 open flows after 10s; the time of --timeout is over, and the backends stay \
                    drained: to wait longer, repeat the command; to close the flows, use `socklb close`";
        assert_eq!(waiting.step(at(10), Some(seen(3))), WaitStep::Ends(DEGRADED, text.to_owned()));
        let mut waiting = DrainWait::new(WaitLimit::After(at(10)));
        let text =
            "10.0.0.1:80: 3 open flows after 10s; the time of --after is over, and the backends stay drained";
        assert_eq!(waiting.step(at(10), Some(seen(3))), WaitStep::Ends(DEGRADED, text.to_owned()));
    }

    #[test]
    fn waiting_continues_while_no_daemon_answers() {
        let mut waiting = DrainWait::new(WaitLimit::Timeout(at(10)));
        let text = "the daemon does not answer; the backends stay drained";
        assert_eq!(waiting.step(at(0), None), waits(text));
        assert!(matches!(waiting.step(at(1), Some(seen(3))), WaitStep::Waits(_)));
        let text = format!("{text}; last seen: 10.0.0.1:80: 3 open flows");
        assert_eq!(waiting.step(at(2), None), waits(&text));
        let late = format!("{text}; not waiting any longer after 10s");
        assert_eq!(waiting.step(at(10), None), WaitStep::Ends(DEGRADED, late));
        assert!(
            matches!(waiting.step(at(11), Some(seen(0))), WaitStep::Ends(0, _)),
            "the command evaluates an observation after its time"
        );
    }

    #[test]
    fn waiting_ends_when_another_command_ends_the_drain() {
        let mut waiting = DrainWait::new(WaitLimit::Timeout(at(10)));
        let ended = DrainProgress { ended: vec![([10, 0, 0, 1], 80).into()], ..seen(3) };
        assert!(
            matches!(waiting.step(at(1), Some(ended)), WaitStep::Ends(1, text) if text.contains("no longer drained"))
        );
    }

    #[test]
    fn a_log_gets_a_line_only_after_a_change_and_at_most_every_ten_seconds() {
        assert!(is_due(None, at(0), "a"));
        let last = (at(0), "a".to_owned());
        assert!(!is_due(Some(&last), at(9), "b") && is_due(Some(&last), at(10), "b"));
        assert!(!is_due(Some(&last), at(60), "a"));
    }
}
