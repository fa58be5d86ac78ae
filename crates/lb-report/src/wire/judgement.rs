//! The rules by which reports are accepted, and the time until which a report makes a backend a
//! lame duck. The daemon, and the kernel program that processes reports before the daemon does, use
//! the same rules.

use lb_common::abi::host::{LastReport, ReportBase};

use super::datagram::{Datagram, Kind, Readiness};

/// Why a datagram is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disbelieved {
    /// The datagram is not a report: it is a request, possibly a reflected one, or it has no
    /// number.
    NotAReport,
    /// The datagram is about a backend that is not polled.
    UnknownName,
    /// The backend has no key with the datagram's key number.
    UnknownKey,
    /// The MAC of the datagram is not valid under the key.
    Forged,
    /// The datagram is an answer without a matching request, or the request was answered before.
    Unrequested,
    /// The datagram is a push that is not later than the last accepted report.
    Replayed,
    /// The datagram is a push of a backend that has not answered any request yet.
    Premature,
}

impl Disbelieved {
    /// All reasons, in the order of the documentation.
    pub const ALL: [Self; 7] = [
        Self::NotAReport,
        Self::UnknownName,
        Self::UnknownKey,
        Self::Forged,
        Self::Unrequested,
        Self::Replayed,
        Self::Premature,
    ];

    /// The reason's name in metrics and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotAReport => "not-a-report",
            Self::UnknownName => "unknown-name",
            Self::UnknownKey => "unknown-key",
            Self::Forged => "forged",
            Self::Unrequested => "unasked",
            Self::Replayed => "replayed",
            Self::Premature => "premature",
        }
    }
}

/// Judges a report by its kind and number, given the last accepted report. Returns the state after
/// the report, which is correct only if the report's MAC is valid. The caller checks the MAC after
/// this function, because that check takes more time.
///
/// An answer is accepted if it has the nonce of the last request. The answer's number does not
/// matter, because an agent begins with lower numbers if its disk was lost and its clock was set
/// back. A push is accepted if it is later than the last accepted report. After any accepted report
/// the nonce is no longer valid, because an answer that was in flight when a push arrived may be
/// older than the push.
///
/// # Errors
/// The reason why the report is not accepted.
#[inline(always)]
pub fn judge(last: LastReport, datagram: &Datagram) -> Result<LastReport, Disbelieved> {
    let base = datagram.base();
    if base.to_word() == 0 {
        return Err(Disbelieved::NotAReport);
    }
    match datagram.kind() {
        Some(Kind::Answer) => {
            if last.nonce == 0 || last.nonce != datagram.nonce {
                return Err(Disbelieved::Unrequested);
            }
        }
        Some(Kind::Push) => {
            if last.base.to_word() == 0 {
                return Err(Disbelieved::Premature);
            }
            // After an agent has begun with lower numbers, its older pushes have higher numbers
            // than the last accepted report.
            let is_of_before =
                base.incarnation != last.base.incarnation && base.to_word() <= last.highest.to_word();
            if base.to_word() <= last.base.to_word() || is_of_before {
                return Err(Disbelieved::Replayed);
            }
        }
        Some(Kind::Request) | None => return Err(Disbelieved::NotAReport),
    }
    Ok(after(last, datagram))
}

/// The state after a report is accepted.
#[inline(always)]
pub fn after(last: LastReport, datagram: &Datagram) -> LastReport {
    let base = datagram.base();
    LastReport { base, highest: higher(last.highest, base), nonce: 0, ..last }
}

#[inline(always)]
fn higher(one: ReportBase, other: ReportBase) -> ReportBase {
    if one.to_word() < other.to_word() { other } else { one }
}

/// The time until which connects treat a backend as a lame duck after a report, in nanoseconds of
/// the receiver's clock. `before` is the time that was stored before. A backend that reports that
/// it is down counts as a lame duck while this report is valid and no other report arrives.
#[inline(always)]
pub fn lame_until_ns(datagram: &Datagram, before: u64, now_ns: u64) -> u64 {
    const NS: u64 = 1_000_000;
    match datagram.readiness() {
        Some(Readiness::Ready) => 0,
        Some(Readiness::LameDuck) => now_ns + u64::from(datagram.hold_ms()) * NS,
        Some(Readiness::Down) => before.max(now_ns + u64::from(datagram.valid_for_ms()) * NS),
        Some(Readiness::Unknown) | None => before,
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use lb_common::net::{Be32, IPPROTO_TCP};

    use super::*;

    fn report(kind: Kind, incarnation: u32, counter: u32, nonce: u64) -> Datagram {
        let mut report =
            Datagram::about(kind, IPPROTO_TCP, "10.0.0.1:80".parse().expect("the address is valid"));
        report.incarnation = Be32::from_host(incarnation);
        report.counter = Be32::from_host(counter);
        report.nonce = nonce;
        report
    }

    fn base(incarnation: u32, counter: u32) -> ReportBase {
        ReportBase { incarnation, counter }
    }

    #[test]
    fn an_answer_is_believed_by_its_nonce_with_any_number() {
        let last = LastReport { base: base(7, 9), highest: base(7, 9), nonce: 5, repeated_ns: 1 };
        let lower = judge(last, &report(Kind::Answer, 6, 1, 5)).expect("the report is accepted");
        assert_eq!(lower, LastReport { base: base(6, 1), highest: base(7, 9), nonce: 0, repeated_ns: 1 });
        let higher = judge(last, &report(Kind::Answer, 8, 1, 5)).expect("the report is accepted");
        assert_eq!(higher, LastReport { base: base(8, 1), highest: base(8, 1), nonce: 0, repeated_ns: 1 });
        assert_eq!(judge(last, &report(Kind::Answer, 7, 10, 6)), Err(Disbelieved::Unrequested));
        assert_eq!(
            judge(higher, &report(Kind::Answer, 8, 2, 5)),
            Err(Disbelieved::Unrequested),
            "the nonce was already used"
        );
        assert_eq!(judge(higher, &report(Kind::Answer, 8, 2, 0)), Err(Disbelieved::Unrequested));
        assert_eq!(judge(last, &report(Kind::Request, 7, 10, 5)), Err(Disbelieved::NotAReport));
        assert_eq!(judge(last, &report(Kind::Answer, 0, 0, 5)), Err(Disbelieved::NotAReport));
    }

    #[test]
    fn a_push_is_believed_if_it_is_later() {
        let last = LastReport { base: base(7, 9), highest: base(7, 9), nonce: 5, repeated_ns: 1 };
        let after = judge(last, &report(Kind::Push, 7, 10, 0)).expect("the report is accepted");
        assert_eq!(after, LastReport { base: base(7, 10), highest: base(7, 10), nonce: 0, repeated_ns: 1 });
        for (incarnation, counter) in [(7, 9), (7, 8), (6, 100)] {
            let push = report(Kind::Push, incarnation, counter, 5);
            assert_eq!(judge(last, &push), Err(Disbelieved::Replayed));
        }
        let nothing = LastReport::zeroed();
        assert_eq!(judge(nothing, &report(Kind::Push, 7, 9, 0)), Err(Disbelieved::Premature));
        // The agent has begun with lower numbers. Its older pushes are replays, and its new pushes
        // are accepted.
        let back = LastReport { base: base(3, 1), ..last };
        assert_eq!(judge(back, &report(Kind::Push, 7, 9, 0)), Err(Disbelieved::Replayed));
        assert!(judge(back, &report(Kind::Push, 3, 2, 0)).is_ok());
        assert!(judge(back, &report(Kind::Push, 8, 1, 0)).is_ok());
    }

    #[test]
    fn a_report_determines_the_end_of_a_lame_duck() {
        const MS: u64 = 1_000_000;
        let of = |readiness: Readiness, valid_for, hold| {
            let mut report = report(Kind::Push, 1, 1, 0);
            report.readiness = readiness as u8;
            report.valid_for = Be32::from_host(valid_for);
            report.hold = Be32::from_host(hold);
            report
        };
        for (readiness, valid_for, hold, expected) in [
            (Readiness::Ready, 10_000, 600_000, 0),
            (Readiness::LameDuck, 10_000, 600_000, 1_000 + 600_000 * MS),
            (Readiness::LameDuck, 10_000, 1, 1_000 + 10_000 * MS),
            (Readiness::LameDuck, u32::MAX, 1, 1_000 + 300_000 * MS),
            (Readiness::LameDuck, 1, u32::MAX, 1_000 + 3_600_000 * MS),
            (Readiness::Down, 10_000, 600_000, 1_000 + 10_000 * MS),
            (Readiness::Down, 0, 600_000, 5_000),
            (Readiness::Unknown, 10_000, 600_000, 5_000),
        ] {
            let until = lame_until_ns(&of(readiness, valid_for, hold), 5_000, 1_000);
            assert_eq!(until, expected, "{readiness:?}, valid for {valid_for} ms, hold {hold} ms");
        }
    }
}
