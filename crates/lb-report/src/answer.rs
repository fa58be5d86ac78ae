//! The answer to a request for a backend's report. The agent, and the kernel program that answers
//! in the agent's place, use the same rules.

use lb_common::abi::responder::{PreparedAnswer, REFUSALS};
use lb_common::net::Be16;

use crate::wire::{Cookies, Datagram, Key, Kind, Malformed, Readiness, RequestSource};

/// The reason why a datagram is not answered. Every datagram that arrives is either answered or
/// counted by its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The bytes are not a datagram of the protocol.
    Malformed(Malformed),
    /// This host has no backend with this name.
    UnknownName,
    /// The backend has no key with this number.
    UnknownKey,
    /// The MAC of the datagram is not valid under the key.
    Forged,
    /// The datagram is an authentic answer or push, which was reflected to its sender.
    NotARequest,
}

impl Refused {
    /// All reasons, in the order in which metrics list them.
    pub const ALL: [Self; REFUSALS] = [
        Self::Malformed(Malformed::Length),
        Self::Malformed(Malformed::Version),
        Self::Malformed(Malformed::Kind),
        Self::Malformed(Malformed::Readiness),
        Self::Malformed(Malformed::Name),
        Self::UnknownName,
        Self::UnknownKey,
        Self::Forged,
        Self::NotARequest,
    ];

    /// The index of the reason's counter, which is its position in [`Refused::ALL`].
    #[inline(always)]
    pub const fn number(self) -> usize {
        match self {
            Self::Malformed(what) => what as usize,
            Self::UnknownName => 5,
            Self::UnknownKey => 6,
            Self::Forged => 7,
            Self::NotARequest => 8,
        }
    }

    /// The reason's name in metrics and status.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed(Malformed::Length) => "malformed-length",
            Self::Malformed(Malformed::Version) => "malformed-version",
            Self::Malformed(Malformed::Kind) => "malformed-kind",
            Self::Malformed(Malformed::Readiness) => "malformed-readiness",
            Self::Malformed(Malformed::Name) => "malformed-name",
            Self::UnknownName => "unknown-name",
            Self::UnknownKey => "unknown-key",
            Self::Forged => "forged",
            Self::NotARequest => "not-a-request",
        }
    }
}

/// Turns the prepared answer of a backend into the answer to a request. If the request contains a
/// valid cookie, returns the number of the change that the client acknowledges with the cookie, and
/// the caller must make the client a subscriber. If the request contains no valid cookie, returns
/// `None`.
///
/// # Errors
/// The reason why the request is not answered.
#[inline(always)]
pub fn answer(
    request: &Datagram,
    source: &RequestSource,
    prepared: &mut PreparedAnswer,
    cookies: &Cookies,
    now_ns: u64,
) -> Result<Option<u16>, Refused> {
    let Some(key) = key_of(prepared, request.key_id.to_host()) else { return Err(Refused::UnknownKey) };
    if !request.is_authentic(key) {
        return Err(Refused::Forged);
    }
    // The MAC covers the kind, so an answer cannot be changed into a request.
    if !matches!(request.kind(), Some(Kind::Request)) {
        return Err(Refused::NotARequest);
    }
    let name = request.name();
    let answer = Datagram::in_words_mut(&mut prepared.report);
    answer.kind = Kind::Answer as u8;
    answer.key_id = request.key_id;
    answer.nonce = request.nonce;
    answer.cookie = cookies.cookie(&name, source, prepared.change);
    if now_ns > prepared.deadline_ns {
        answer.readiness = Readiness::Unknown as u8;
    }
    answer.age = later(answer.age, now_ns.saturating_sub(prepared.written_ns));
    answer.seal(&key);
    Ok(cookies.acknowledged(request.cookie, &name, source))
}

#[inline(always)]
fn key_of(prepared: &PreparedAnswer, number: u16) -> Option<Key> {
    let [first, second] = &prepared.keys;
    let key = if first.id == number {
        first
    } else if second.id == number {
        second
    } else {
        return None;
    };
    if number == 0 { None } else { Some(Key::from_bytes(key.key)) }
}

/// The age after `ns` more nanoseconds, in milliseconds. The result saturates.
#[inline(always)]
fn later(age: Be16, ns: u64) -> Be16 {
    let ms = age.to_host() as u64 + ns / 1_000_000;
    #[expect(clippy::cast_possible_truncation, reason = "the number was compared with the maximum")]
    Be16::from_host(if ms > u16::MAX as u64 { u16::MAX } else { ms as u16 })
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    use bytemuck::Zeroable as _;
    use lb_common::abi::host::SenderKey;
    use lb_common::net::IPPROTO_TCP;

    use super::*;

    const KEYS: [[u8; 16]; 2] = [*b"of sixteen bytes", *b"and another one!"];
    const MS: u64 = 1_000_000;

    fn prepared() -> PreparedAnswer {
        let mut report = Datagram::about(Kind::Answer, IPPROTO_TCP, "10.0.0.1:80".parse().unwrap());
        report.readiness = Readiness::Ready as u8;
        report.age = Be16::from_host(700);
        let key = |id: u16| SenderKey { id, key: KEYS[usize::from(id - 1)], ..SenderKey::default() };
        PreparedAnswer {
            written_ns: 1_000 * MS,
            deadline_ns: 6_000 * MS,
            change: 3,
            keys: [key(2), key(1)],
            report: report.words(),
            ..PreparedAnswer::zeroed()
        }
    }

    fn request(key_id: u16) -> Datagram {
        let mut request = Datagram::about(Kind::Request, IPPROTO_TCP, "10.0.0.1:80".parse().unwrap());
        request.key_id = Be16::from_host(key_id);
        request.nonce = 99;
        request
    }

    fn sealed(request: Datagram) -> Datagram {
        request.sealed(Key::from_bytes(KEYS[usize::from(request.key_id.to_host() - 1)]))
    }

    fn source() -> RequestSource {
        RequestSource { address: Ipv4Addr::new(192, 0, 2, 7).into(), port: Be16::from_host(9467) }
    }

    fn cookies() -> Cookies {
        Cookies::new(Key::from_bytes([7; 16]), 0)
    }

    fn at(request: &Datagram, ms: u64) -> Result<(Datagram, Option<u16>), Refused> {
        let mut prepared = prepared();
        let acknowledged = answer(request, &source(), &mut prepared, &cookies(), ms * MS)?;
        Ok((*Datagram::in_words(&prepared.report), acknowledged))
    }

    #[test]
    fn an_answer_is_authentic_and_has_the_prepared_content() {
        for key_id in [1, 2] {
            let (answer, acknowledged) =
                at(&sealed(request(key_id)), 1_000).expect("the request is answered");
            assert!(answer.is_authentic(Key::from_bytes(KEYS[usize::from(key_id - 1)])));
            assert_eq!((answer.kind(), answer.nonce), (Some(Kind::Answer), 99));
            assert_eq!((answer.key_id.to_host(), answer.age.to_host()), (key_id, 700));
            assert_eq!((answer.readiness(), acknowledged), (Some(Readiness::Ready), None));
            let mut again = request(key_id);
            again.cookie = answer.cookie;
            assert_eq!(at(&sealed(again), 1_000).expect("the request is answered").1, Some(3));
        }
    }

    #[test]
    fn after_its_deadline_a_prepared_answer_reports_unknown() {
        let answered = |ms| {
            let (answer, _) = at(&sealed(request(1)), ms).expect("the request is answered");
            (answer.readiness().expect("the answer contains a readiness"), answer.age.to_host())
        };
        assert_eq!(answered(999), (Readiness::Ready, 700), "a clock that goes back does not reduce the age");
        assert_eq!(answered(1_300), (Readiness::Ready, 1_000));
        assert_eq!(answered(6_000), (Readiness::Ready, 5_700));
        assert_eq!(answered(6_001), (Readiness::Unknown, 5_701));
        assert_eq!(answered(1_000_000), (Readiness::Unknown, u16::MAX));
    }

    #[test]
    fn unanswered_requests_have_a_reason() {
        let mut forged = sealed(request(1));
        forged.nonce ^= 1;
        assert_eq!(at(&forged, 1_000), Err(Refused::Forged));
        for key_id in [0, 3] {
            assert_eq!(at(&request(key_id), 1_000), Err(Refused::UnknownKey));
        }
        let mut push = request(1);
        push.kind = Kind::Push as u8;
        assert_eq!(at(&sealed(push), 1_000), Err(Refused::NotARequest));
        assert_eq!(
            at(&push, 1_000),
            Err(Refused::Forged),
            "a sender without the key always gets the same reason"
        );
        let mut without = PreparedAnswer { keys: [SenderKey::default(); 2], ..prepared() };
        let of_zero = answer(&request(0), &source(), &mut without, &cookies(), 0);
        assert_eq!(of_zero, Err(Refused::UnknownKey));
    }

    #[test]
    fn each_reason_has_its_own_number_and_name() {
        for (number, refused) in Refused::ALL.into_iter().enumerate() {
            assert_eq!(refused.number(), number);
        }
        let names: BTreeSet<&str> = Refused::ALL.map(Refused::name).into();
        assert_eq!(names.len(), REFUSALS);
    }
}
