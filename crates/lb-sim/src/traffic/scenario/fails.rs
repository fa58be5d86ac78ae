//! Backends that fail while they are reported: which part of them, how, when and how often.
//!
//! Must not know which ones these are: that is decided when the scenario is played.

use toml::Spanned;

use super::{Scenario, SpannedFault, sorted};
use crate::traffic::document::{FailMode, FailTable};
use crate::traffic::values::Span;

/// Backends that fail while they are reported, once or again and again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fail {
    /// When the first time.
    pub at: Span,
    /// How long each time.
    pub lasts: Span,
    /// Which part of the backends.
    pub part: FailPart,
    /// What connects to them meet.
    pub how: FailMode,
    /// How many times as slow those are that are slow.
    pub slowdown: f64,
    /// The utilization that those report that lie, in thousandths.
    pub utilization: u32,
    /// After how long a client gives up a connect that nobody answers.
    pub timeout: Span,
    /// From the beginning of one time to that of the next.
    pub every: Span,
    /// How often.
    pub times: u32,
}

/// How many backends fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailPart {
    /// So many percent, rounded up.
    Share(u32),
    /// So many.
    Count(u32),
}

impl FailPart {
    /// How many of `count` backends.
    pub fn of(self, count: u32) -> u32 {
        match self {
            Self::Share(percent) => (count * percent).div_ceil(100),
            Self::Count(backends) => backends.min(count),
        }
    }
}

impl Fail {
    /// When the last time is over.
    pub const fn end_us(self) -> u64 {
        self.at.us + (self.times as u64 - 1) * self.every.us + self.lasts.us
    }
}

/// After how long a client gives up a connect that nobody answers, if nothing is written.
const TIMEOUT: Span = Span { us: 3_000_000 };

/// How many times as slow a slow backend is, if nothing is written.
const SLOWDOWN: f64 = 10.0;

pub(super) fn fails(tables: &[Spanned<FailTable>], end: Span) -> Result<Vec<Fail>, SpannedFault> {
    let mut by_time: Vec<&Spanned<FailTable>> = tables.iter().collect();
    by_time.sort_by_key(|table| table.get_ref().at);
    sorted(tables, end, |table| table.at)?;
    let mut fails: Vec<Fail> = Vec::with_capacity(tables.len());
    for spanned in by_time {
        let fail = fail(spanned.get_ref()).map_err(|message| (spanned.span(), message))?;
        // Two at once: each would bring up what the other has taken down.
        let free = fails.last().map_or(0, |before| before.end_us());
        if fail.at.us < free {
            let message = format!(
                "the failure at {} begins before the one before it has ended: write at least {:?} there",
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
        _ => return Err("a failure is of some backends: write share or backends".into()),
    };
    if lasts.us == 0 {
        return Err("a failure for \"0s\" is none: write at least \"1us\"".into());
    }
    let (every, times) = match (every, times) {
        (None, None) => (lasts, 1),
        (Some(every), Some(times)) if every > lasts => (every, times.0),
        (Some(every), Some(_)) => {
            return Err(format!(
                "every {every} begins before the {lasts} before it are over: write more than {lasts}"
            ));
        }
        _ => return Err("a failure that comes again has both: write every and times, or neither".into()),
    };
    if timeout.is_some() && how != FailMode::Blackhole {
        return Err(
            "only connects that nobody answers have a timeout: leave it out, or write mode = \"blackhole\""
                .into(),
        );
    }
    match (slowdown, how) {
        (None, _) => {}
        (Some(times), FailMode::Slow) if (1.0..=1000.0).contains(&times) => {}
        (Some(times), FailMode::Slow) => {
            return Err(format!("a backend that is {times} times as slow: write 1 to 1000"));
        }
        (Some(_), _) => {
            return Err("only what is slow has a slowdown: leave it out, or write mode = \"slow\"".into());
        }
    }
    let utilization = match (utilization, how) {
        (Some(told), FailMode::Lies) if (0.0..=4.0).contains(&told) => thousandths(told),
        (Some(told), FailMode::Lies) => {
            return Err(format!("a utilization of {told} that is reported: write 0 to 4"));
        }
        (None, FailMode::Lies) => {
            return Err("whoever lies says something: write utilization, as in 0.01".into());
        }
        (Some(_), _) => {
            return Err(
                "only who lies reports a utilization that it has not: leave it out, or write mode = \"lies\""
                    .into(),
            );
        }
        (None, _) => 0,
    };
    let (slowdown, timeout) = (slowdown.unwrap_or(SLOWDOWN), timeout.unwrap_or(TIMEOUT));
    Ok(Fail { at, lasts, part, how, slowdown, utilization, timeout, every, times })
}

/// Refuses lies and silence where nobody would hear reports.
pub(super) fn check_reports(scenario: &Scenario, tables: &[Spanned<FailTable>]) -> Result<(), SpannedFault> {
    if scenario.runs.iter().any(|run| run.reports(scenario).is_some()) {
        return Ok(());
    }
    let is_of_reports =
        |table: &&Spanned<FailTable>| matches!(table.get_ref().mode, FailMode::Lies | FailMode::Silent);
    tables.iter().find(is_of_reports).map_or(Ok(()), |table| {
        let message =
            "nobody hears what backends report: write reports = { delay = \"10ms\" }, or another mode";
        Err((table.span(), message.into()))
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 4, and never below 0")]
fn thousandths(number: f64) -> u32 {
    (number * 1000.0).round() as u32
}
