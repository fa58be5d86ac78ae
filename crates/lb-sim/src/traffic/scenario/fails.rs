//! Backends that fail while they are listed: how many, how, when and how often.
//!
//! This module must not choose the backends that fail: the simulation chooses them.

use toml::Spanned;

use super::{Scenario, SpannedFault, sorted};
use crate::traffic::document::{FailMode, FailTable};
use crate::traffic::values::Span;

/// Backends that fail, once or repeatedly, while they are listed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fail {
    /// When the first failure begins.
    pub at: Span,
    /// The length of each failure.
    pub lasts: Span,
    pub part: FailPart,
    /// The effect on connects to the failing backends.
    pub how: FailMode,
    /// The factor by which the backends are slower in mode `slow`.
    pub slowdown: f64,
    /// The utilization that the backends report in mode `lies`, in thousandths.
    pub utilization: u32,
    /// The time after which a client gives up an unanswered connect.
    pub timeout: Span,
    /// Time from the start of one failure to the start of the next.
    pub every: Span,
    /// The number of failures.
    pub times: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailPart {
    /// A percentage of the backends; the number is rounded up.
    Share(u32),
    /// A number of backends.
    Count(u32),
}

impl FailPart {
    /// The number of failing backends among `count`.
    pub fn of(self, count: u32) -> u32 {
        match self {
            Self::Share(percent) => (count * percent).div_ceil(100),
            Self::Count(backends) => backends.min(count),
        }
    }
}

impl Fail {
    /// The end of the last failure.
    pub const fn end_us(self) -> u64 {
        self.at.us + (self.times as u64 - 1) * self.every.us + self.lasts.us
    }
}

/// The default time after which a client gives up an unanswered connect.
const TIMEOUT: Span = Span { us: 3_000_000 };

/// The default factor by which a slow backend is slower.
const SLOWDOWN: f64 = 10.0;

pub(super) fn fails(tables: &[Spanned<FailTable>], end: Span) -> Result<Vec<Fail>, SpannedFault> {
    let mut by_time: Vec<&Spanned<FailTable>> = tables.iter().collect();
    by_time.sort_by_key(|table| table.get_ref().at);
    sorted(tables, end, |table| table.at)?;
    let mut fails: Vec<Fail> = Vec::with_capacity(tables.len());
    for spanned in by_time {
        let fail = fail(spanned.get_ref()).map_err(|message| (spanned.span(), message))?;
        // Rejects a failure that begins before the previous failure has ended, because the end of
        // one failure also restores the backends of the other.
        let free = fails.last().map_or(0, |before| before.end_us());
        if fail.at.us < free {
            let message = format!(
                "the failure at {} begins before the previous failure has ended: write at = {:?} or later",
                fail.at,
                Span { us: free }.to_string()
            );
            return Err((spanned.span(), message));
        }
        fails.push(fail);
    }
    Ok(fails)
}

fn fail(table: &FailTable) -> Result<Fail, String> {
    let FailTable { at, lasts, share, backends, mode: how, slowdown, utilization, timeout, every, times } =
        *table;
    let part = match (share, backends) {
        (Some(share), None) => FailPart::Share(share.0),
        (None, Some(backends)) => FailPart::Count(backends.0),
        _ => return Err("a failure needs backends: write either `share` or `backends`".into()),
    };
    if lasts.us == 0 {
        return Err("a failure for \"0s\" has no effect: write at least \"1us\"".into());
    }
    let (every, times) = match (every, times) {
        (None, None) => (lasts, 1),
        (Some(every), Some(times)) if every > lasts => (every, times.0),
        (Some(every), Some(_)) => {
            return Err(format!(
                "a failure every {every} begins before the previous one, of {lasts}, has ended: write more than {lasts}"
            ));
        }
        _ => return Err("a repeated failure needs both `every` and `times`: write both or neither".into()),
    };
    if timeout.is_some() && how != FailMode::Blackhole {
        return Err(
            "only unanswered connects have a timeout: leave `timeout` out, or write mode = \"blackhole\""
                .into(),
        );
    }
    match (slowdown, how) {
        (None, _) => {}
        (Some(times), FailMode::Slow) if (1.0..=1000.0).contains(&times) => {}
        (Some(times), FailMode::Slow) => {
            return Err(format!("a slowdown of {times}: write 1 to 1000"));
        }
        (Some(_), _) => {
            return Err(
                "only slow backends have a slowdown: leave `slowdown` out, or write mode = \"slow\"".into()
            );
        }
    }
    let utilization = match (utilization, how) {
        (Some(reported), FailMode::Lies) if (0.0..=4.0).contains(&reported) => thousandths(reported),
        (Some(reported), FailMode::Lies) => {
            return Err(format!("a reported utilization of {reported}: write 0 to 4"));
        }
        (None, FailMode::Lies) => {
            return Err("mode \"lies\" reports a utilization: write one, as in utilization = 0.01".into());
        }
        (Some(_), _) => {
            return Err(
                "`utilization` belongs to mode \"lies\": leave `utilization` out, or write mode = \"lies\""
                    .into(),
            );
        }
        (None, _) => 0,
    };
    let (slowdown, timeout) = (slowdown.unwrap_or(SLOWDOWN), timeout.unwrap_or(TIMEOUT));
    Ok(Fail { at, lasts, part, how, slowdown, utilization, timeout, every, times })
}

/// Rejects the modes `lies` and `silent` if no client receives reports.
pub(super) fn check_reports(scenario: &Scenario, tables: &[Spanned<FailTable>]) -> Result<(), SpannedFault> {
    if scenario.runs.iter().any(|run| run.reports(scenario).is_some()) {
        return Ok(());
    }
    let is_of_reports =
        |table: &&Spanned<FailTable>| matches!(table.get_ref().mode, FailMode::Lies | FailMode::Silent);
    tables.iter().find(is_of_reports).map_or(Ok(()), |table| {
        let message =
            "this mode needs clients that receive reports: write reports = { delay = \"10ms\" }, or another mode";
        Err((table.span(), message.into()))
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 4, and never below 0")]
fn thousandths(number: f64) -> u32 {
    (number * 1000.0).round() as u32
}
