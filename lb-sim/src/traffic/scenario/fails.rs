//! Backends that fail while they are reported: which part of them, how, when and how often.
//!
//! Must not know which ones these are: that is decided when the scenario is played.

use toml::Spanned;

use super::{SpannedFault, sorted};
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
    let FailTable { at, lasts, share, backends, mode: how, slowdown, timeout, every, times } = *table;
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
    let (slowdown, timeout) = (slowdown.unwrap_or(SLOWDOWN), timeout.unwrap_or(TIMEOUT));
    Ok(Fail { at, lasts, part, how, slowdown, timeout, every, times })
}
