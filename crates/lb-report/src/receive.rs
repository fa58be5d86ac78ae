//! The rules by which reports are accepted and stored, and the receiver before the host's network
//! stack. The daemon, and the kernel program that processes reports before the daemon does, use the
//! same rules.
//!
//! In reading order: whether a report is accepted ([`judge`]), until when it makes the backend a
//! lame duck ([`lame_until_ns`]), and how this time is stored ([`store_lame_until`]). Then the
//! receiver ([`receive`]), which processes a frame that may contain a report. The kernel program
//! calls it with the maps of the host, and tests call it with their own maps.
//!
//! The receiver's checks are ordered by cost: first the destination of the frame, then the
//! datagram's length and layout, its backend, kind and number, and last its message authentication
//! code (MAC).

use bytemuck::Zeroable as _;
use lb_common::abi::host::{LastReport, Listener, RECEPTIONS, ReportBase, SenderName};
use lb_common::load::without_bounds;
use lb_common::net::{Address, Be16};

use crate::frame::{Frame, Udp, udp_to};
use crate::wire::{ACKNOWLEDGED_FOR_MS, Datagram, Key, Kind, Readiness};

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

/// Access to the words in the kernel's maps that a report changes. `id` is the report id of the
/// backend.
pub trait Words {
    /// The number of the last accepted report.
    fn base(&self, id: u32) -> ReportBase;
    /// The time until which the backend is a lame duck.
    fn lame_until_ns(&self, id: u32) -> u64;
    /// Replaces the time until which the backend is a lame duck, if this time is still `before`.
    /// Returns whether the time was replaced.
    fn replace_lame_until_ns(&self, id: u32, before: u64, after: u64) -> bool;
}

/// Stores the time until which a backend is a lame duck after the report with the number `base`,
/// which the caller has just stored as the last report. `of` computes the new time from the stored
/// time. If a later report has arrived in the meantime, the time from the later report remains, in
/// either order of the two stores.
#[inline(always)]
pub fn store_lame_until<W: Words>(words: &W, id: u32, base: ReportBase, of: impl Fn(u64) -> u64) {
    // There are two attempts, because an earlier report may store its time during the first
    // attempt.
    for _ in 0..2 {
        let before = words.lame_until_ns(id);
        let after = of(before);
        if before == after || words.base(id).to_word() != base.to_word() {
            return;
        }
        if words.replace_lame_until_ns(id, before, after) {
            // A later report may have arrived meanwhile, and may have stored nothing because its
            // time was already stored. In that case the store above must be undone.
            if words.base(id).to_word() != base.to_word() {
                words.replace_lame_until_ns(id, after, before);
            }
            return;
        }
    }
}

/// The maps of the host, as the receiver uses them.
pub trait Maps: Words {
    /// A reference to an entry of the register of senders.
    type Sender: Copy;

    /// The settings of an address; `None` if the daemon does not listen at it.
    fn listener(&self, address: Address) -> Option<Listener>;
    /// The register's entry of a backend.
    fn sender(&self, name: &SenderName) -> Option<Self::Sender>;
    /// The report id in the entry.
    fn id(&self, sender: Self::Sender) -> u32;
    /// The key with this number in the entry.
    fn key(&self, sender: Self::Sender, number: u16) -> Option<Key>;
    /// The last report that was accepted.
    fn last(&self, id: u32) -> Option<LastReport>;
    /// Replaces the last report `before` with `after`. Returns false if another CPU has replaced
    /// the last report first.
    fn believe(&self, id: u32, before: LastReport, after: LastReport) -> bool;
    /// Records the time at which a repeated push was passed on.
    fn set_repeated_ns(&self, id: u32, now_ns: u64);
}

/// The result of processing a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reception {
    /// The datagram was accepted and stored, and is passed on to the daemon.
    Believed,
    /// Another CPU stored a report of this backend at the same time, or the entry was reused. The
    /// datagram is passed on to the daemon, which judges it.
    Contended,
    /// The frame contains no valid datagram of this version.
    Malformed,
    /// The datagram is not accepted.
    Disbelieved(Disbelieved),
}

const _: () = assert!(RECEPTIONS == 3 + Disbelieved::ALL.len());

impl Reception {
    /// The names of all results in metrics and JSON, ordered by number.
    pub const NAMES: [&str; RECEPTIONS] = {
        let mut names = ["believed", "contended", "malformed", "", "", "", "", "", "", ""];
        let mut at = 0;
        while at < Disbelieved::ALL.len() {
            names[3 + at] = Disbelieved::ALL[at].name();
            at += 1;
        }
        names
    };

    /// The index of the result's counter.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        match self {
            Self::Believed => 0,
            Self::Contended => 1,
            Self::Malformed => 2,
            Self::Disbelieved(why) => 3 + why as u32,
        }
    }
}

/// The result for a frame that is addressed to the daemon's socket, and whether the socket receives
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The result of processing the datagram.
    pub reception: Reception,
    /// Whether the datagram is passed on to the socket. Accepted reports are passed on, because the
    /// daemon also uses their load and round-trip time.
    pub goes_on: bool,
}

impl Received {
    const fn dropped(reception: Reception) -> Option<Self> {
        Some(Self { reception, goes_on: false })
    }

    const fn disbelieved(why: Disbelieved) -> Option<Self> {
        Self::dropped(Reception::Disbelieved(why))
    }
}

/// Processes a frame. `None` if the frame is not for the daemon's port at one of its addresses; the
/// program then passes the frame to the network stack.
#[inline(always)]
pub fn receive<F: Frame + ?Sized, M: Maps>(
    frame: &F,
    maps: &M,
    port: Be16,
    now_ns: impl FnOnce() -> u64,
) -> Option<Received> {
    let udp = udp_to(frame, port)?;
    let listener = maps.listener(udp.to)?;
    let Received { reception, goes_on } = take(frame, udp, maps, now_ns)?;
    Some(Received { reception, goes_on: goes_on || listener.passes_unbelieved != 0 })
}

/// Processes a frame that is for the daemon.
#[inline(always)]
fn take<F: Frame + ?Sized, M: Maps>(
    frame: &F,
    udp: Udp,
    maps: &M,
    now_ns: impl FnOnce() -> u64,
) -> Option<Received> {
    let mut datagram = Datagram::zeroed();
    if udp.read(frame, &mut datagram).is_none() {
        return Received::dropped(Reception::Malformed);
    }
    if datagram.check().is_err() {
        return Received::dropped(Reception::Malformed);
    }
    let Some(sender) = maps.sender(&datagram.name()) else {
        return Received::disbelieved(Disbelieved::UnknownName);
    };
    let id = maps.id(sender);
    let Some(last) = maps.last(id) else { return Received::disbelieved(Disbelieved::UnknownName) };
    let now_ns = now_ns();
    let judged = judge(last, &datagram);
    if let Err(why) = judged
        && !is_to_be_acknowledged_again(last, &datagram, why, now_ns)
    {
        return Received::disbelieved(why);
    }
    // While the verifier of Linux 6.1 checks the function that computes a MAC, it loses the
    // precision of the values on which this flag depends. It then treats the two values of the flag
    // as equal, and removes the code for one of them from the program. If the verifier knows no
    // bounds of the flag, it does not remove this code.
    let is_news = without_bounds(u64::from(judged.is_ok()), now_ns);
    let authentic = match maps.key(sender, datagram.key_id.to_host()) {
        None => Err(Disbelieved::UnknownKey),
        Some(key) if datagram.is_authentic(key) => Ok(()),
        Some(_) => Err(Disbelieved::Forged),
    };
    if is_news == 0 {
        let repeated = Reception::Disbelieved(Disbelieved::Replayed);
        if authentic.is_err() {
            return Received::dropped(repeated);
        }
        maps.set_repeated_ns(id, now_ns);
        return Some(Received { reception: repeated, goes_on: true });
    }
    if let Err(why) = authentic {
        return Received::disbelieved(why);
    }
    let after = after(last, &datagram);
    // If the entry's memory was reused for another backend since the lookup, the daemon must judge
    // the datagram.
    if maps.id(sender) != id || !maps.believe(id, last, after) {
        return Some(Received { reception: Reception::Contended, goes_on: true });
    }
    store_lame_until(maps, id, after.base, |before| lame_until_ns(&datagram, before, now_ns));
    Some(Received { reception: Reception::Believed, goes_on: true })
}

/// Whether a push is a repetition of the last push and must be acknowledged again. An agent repeats
/// a push if the daemon's request, which acknowledges the push, was lost. Such acknowledgements
/// have a minimum interval, so that replayed pushes cannot overload the daemon.
#[inline(always)]
fn is_to_be_acknowledged_again(last: LastReport, datagram: &Datagram, why: Disbelieved, now_ns: u64) -> bool {
    const APART_NS: u64 = ACKNOWLEDGED_FOR_MS as u64 * 1_000_000;
    matches!(why, Disbelieved::Replayed)
        && datagram.base().to_word() == last.base.to_word()
        && now_ns.wrapping_sub(last.repeated_ns) >= APART_NS
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::net::SocketAddr;
    use std::vec::Vec;

    use lb_common::abi::host::ReportBase;
    use lb_common::net::{Be32, IPPROTO_TCP};

    use super::*;
    use crate::fixtures::{Frame, OneBackend, Shape};

    const KEY: [u8; 16] = *b"of sixteen bytes";
    const NOW: u64 = 1_000_000_000;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("the address is valid")
    }

    /// The address of the daemon and the address of another host, for IPv6 or IPv4.
    fn ends(is_v6: bool) -> (SocketAddr, SocketAddr) {
        if is_v6 {
            (address("[2001:db8::2]:9467"), address("[2001:db8::1]:9465"))
        } else {
            (address("192.0.2.2:9467"), address("192.0.2.1:9465"))
        }
    }

    fn backend() -> SocketAddr {
        address("192.0.2.1:80")
    }

    fn maps(is_v6: bool) -> OneBackend {
        let maps = OneBackend::new(ends(is_v6).0.ip(), backend(), KEY);
        maps.last.set(LastReport {
            base: ReportBase { incarnation: 7, counter: 5 },
            highest: ReportBase { incarnation: 7, counter: 5 },
            nonce: 99,
            repeated_ns: 0,
        });
        maps
    }

    fn push(counter: u32) -> Datagram {
        let mut push = Datagram::about(Kind::Push, IPPROTO_TCP, backend());
        push.readiness = Readiness::LameDuck as u8;
        push.key_id = Be16::from_host(1);
        push.incarnation = Be32::from_host(7);
        push.counter = Be32::from_host(counter);
        push.hold = Be32::from_host(10_000);
        push
    }

    fn sealed(datagram: Datagram) -> Vec<u8> {
        datagram.sealed(Key::from_bytes(KEY)).bytes().to_vec()
    }

    fn take(maps: &OneBackend, shape: Shape, is_v6: bool, payload: &[u8]) -> Option<Received> {
        let (daemon, agent) = ends(is_v6);
        let frame = Frame::new(shape, agent, daemon, payload);
        receive(frame.bytes(), maps, Be16::from_host(daemon.port()), || NOW)
    }

    const BELIEVED: Option<Received> = Some(Received { reception: Reception::Believed, goes_on: true });

    #[test]
    fn a_report_is_believed_in_every_shape_of_a_frame() {
        for is_v6 in [false, true] {
            for tag in [0, 0x8100, 0x88a8] {
                for options in [0, 1, 10] {
                    let shape = Shape { tags: [tag, 0], options, ..Shape::PLAIN };
                    let maps = maps(is_v6);
                    assert_eq!(take(&maps, shape, is_v6, &sealed(push(6))), BELIEVED, "{shape:?}");
                    assert_eq!(maps.lame_until_ns.get(), NOW + 10_000_000_000);
                    assert_eq!(maps.last.get().base, ReportBase { incarnation: 7, counter: 6 });
                }
            }
        }
    }

    #[test]
    fn frames_for_other_receivers_pass() {
        let fine = sealed(push(6));
        let plain = Shape::PLAIN;
        for is_v6 in [false, true] {
            for (what, shape) in [
                ("two tags", Shape { tags: [0x88a8, 0x8100], ..plain }),
                ("tcp", Shape { protocol: 6, ..plain }),
                ("fragments, or destination options", Shape { protocol: 44, ..plain }),
            ] {
                assert_eq!(take(&maps(is_v6), shape, is_v6, &fine), None, "{what}");
            }
        }
        for fragment in [0x2000, 1, 0x1fff] {
            assert_eq!(take(&maps(false), Shape { fragment, ..plain }, false, &fine), None);
        }
        let whole = Shape { fragment: 0x4000, ..plain };
        assert_eq!(take(&maps(false), whole, false, &fine), BELIEVED, "the flag \"don't fragment\" is set");
        let (daemon, agent) = ends(false);
        for to in [address("192.0.2.3:9467"), SocketAddr::new(daemon.ip(), 9466)] {
            let frame = Frame::new(plain, agent, to, &fine);
            assert_eq!(receive(frame.bytes(), &maps(false), Be16::from_host(9467), || NOW), None, "to {to}");
        }
        // These frames end before the code can recognize that they are for the daemon.
        let frame = Frame::new(plain, agent, daemon, &fine);
        for length in 0..42 {
            let cut = &frame.bytes()[..length];
            assert_eq!(receive(cut, &maps(false), Be16::from_host(9467), || NOW), None, "{length} bytes");
        }
    }

    #[test]
    fn frames_without_a_valid_datagram_are_malformed() {
        let malformed = Some(Received { reception: Reception::Malformed, goes_on: false });
        let fine = sealed(push(6));
        for length in [0, 1, 79, 81, 160] {
            let mut payload = [7; 160];
            payload[..80].copy_from_slice(&fine);
            assert_eq!(
                take(&maps(false), Shape::PLAIN, false, &payload[..length]),
                malformed,
                "{length} bytes"
            );
        }
        for length_off in [-88, -80, -1, 1, 1_000] {
            let shape = Shape { length_off, ..Shape::PLAIN };
            assert_eq!(take(&maps(false), shape, false, &fine), malformed, "length_off {length_off}");
        }
        let (daemon, agent) = ends(false);
        let frame = Frame::new(Shape::PLAIN, agent, daemon, &fine);
        for length in 42..frame.bytes().len() {
            let cut = receive(&frame.bytes()[..length], &maps(false), Be16::from_host(9467), || NOW);
            assert_eq!(cut, malformed, "{length} bytes");
        }
        for (at, byte) in [(0, 2), (1, 0), (1, 4), (2, 4), (3, 1), (7, 0)] {
            let mut bytes = fine.clone();
            bytes[at] = byte;
            assert_eq!(take(&maps(false), Shape::PLAIN, false, &bytes), malformed, "byte {at}");
        }
    }

    #[test]
    fn disbelieved_reports_change_nothing_and_are_dropped() {
        use Disbelieved::*;
        let change = |change: &dyn Fn(&mut Datagram)| {
            let mut datagram = push(6);
            change(&mut datagram);
            sealed(datagram)
        };
        let mut forged = sealed(push(6));
        forged[79] ^= 1;
        let cases = [
            (UnknownName, change(&|datagram| datagram.port = Be16::from_host(81))),
            (UnknownKey, change(&|datagram| datagram.key_id = Be16::from_host(2))),
            (UnknownKey, change(&|datagram| datagram.key_id = Be16::from_host(0))),
            (Forged, forged),
            (NotAReport, change(&|datagram| datagram.kind = Kind::Request as u8)),
            (Unrequested, change(&|datagram| (datagram.kind, datagram.nonce) = (Kind::Answer as u8, 98))),
            (Replayed, sealed(push(4))),
        ];
        for (why, bytes) in cases {
            let maps = maps(false);
            let before = maps.last.get();
            let dropped = Some(Received { reception: Reception::Disbelieved(why), goes_on: false });
            assert_eq!(take(&maps, Shape::PLAIN, false, &bytes), dropped, "{why:?}");
            assert_eq!((maps.last.get(), maps.lame_until_ns.get()), (before, 0), "{why:?}");
        }
        let new = maps(false);
        new.last.set(LastReport::default());
        let dropped = Some(Received { reception: Reception::Disbelieved(Premature), goes_on: false });
        assert_eq!(take(&new, Shape::PLAIN, false, &sealed(push(6))), dropped);
        // This listener passes on datagrams that are not accepted.
        let mut full = maps(false);
        full.listener.passes_unbelieved = 1;
        let unknown = change(&|datagram| datagram.port = Be16::from_host(81));
        let passed = Some(Received { reception: Reception::Disbelieved(UnknownName), goes_on: true });
        assert_eq!(take(&full, Shape::PLAIN, false, &unknown), passed);
    }

    #[test]
    fn an_answer_is_believed_once() {
        let maps = maps(false);
        let mut answer = push(3);
        (answer.kind, answer.nonce, answer.readiness) = (Kind::Answer as u8, 99, Readiness::Down as u8);
        answer.valid_for = Be32::from_host(1_000);
        assert_eq!(take(&maps, Shape::PLAIN, false, &sealed(answer)), BELIEVED);
        assert_eq!(maps.lame_until_ns.get(), NOW + 1_000_000_000);
        let unrequested = Reception::Disbelieved(Disbelieved::Unrequested);
        let again = take(&maps, Shape::PLAIN, false, &sealed(answer));
        assert_eq!(again, Some(Received { reception: unrequested, goes_on: false }));
    }

    #[test]
    fn a_repeated_push_goes_on_at_a_limited_rate() {
        let maps = maps(false);
        let replayed = |goes_on| {
            let reception = Reception::Disbelieved(Disbelieved::Replayed);
            Some(Received { reception, goes_on })
        };
        let (daemon, agent) = ends(false);
        let frame = Frame::new(Shape::PLAIN, agent, daemon, &sealed(push(6)));
        let take_at = |now: u64| receive(frame.bytes(), &maps, Be16::from_host(9467), || now);
        const MS: u64 = 1_000_000;
        assert_eq!(take_at(NOW), BELIEVED);
        let until = maps.lame_until_ns.get();
        for (ms, goes_on) in [(1, true), (2, false), (5, false), (6, true), (10, false), (11, true)] {
            assert_eq!(take_at(NOW + ms * MS), replayed(goes_on), "{ms} ms");
        }
        assert_eq!(maps.lame_until_ns.get(), until, "a repetition does not extend the time");
        let mut forged = push(6).bytes().to_vec();
        forged[79] ^= 1;
        let forged = Frame::new(Shape::PLAIN, agent, daemon, &forged);
        let taken = receive(forged.bytes(), &maps, Be16::from_host(9467), || NOW + 100 * MS);
        assert_eq!(taken, replayed(false), "a forged datagram is not passed to the daemon");
    }

    /// An action of another CPU.
    type Deed<'d> = &'d dyn Fn(&OneBackend);

    /// Maps in which another CPU stores between two steps.
    struct Raced<'r> {
        maps: OneBackend,
        /// The action of the other CPU. It runs once, immediately before the first replacement of
        /// the time until which the backend is a lame duck.
        between: std::cell::Cell<Option<Deed<'r>>>,
    }

    impl Words for Raced<'_> {
        fn base(&self, id: u32) -> ReportBase {
            self.maps.base(id)
        }

        fn lame_until_ns(&self, id: u32) -> u64 {
            self.maps.lame_until_ns(id)
        }

        fn replace_lame_until_ns(&self, id: u32, before: u64, after: u64) -> bool {
            if let Some(between) = self.between.take() {
                between(&self.maps);
            }
            self.maps.replace_lame_until_ns(id, before, after)
        }
    }

    #[test]
    fn the_lame_until_of_the_later_report_remains_in_any_order() {
        let number = |counter| ReportBase { incarnation: 7, counter };
        // Each case has three times until which the backend is a lame duck: the time that is stored
        // before, the time from the earlier report, and the time from the later report.
        for (before, earlier, later) in
            [(0, 100, 0), (0, 100, 200), (50, 0, 200), (50, 100, 0), (50, 100, 50)]
        {
            let store = |maps: &OneBackend| {
                maps.last.set(LastReport { base: number(9), ..maps.last.get() });
                store_lame_until(maps, 1, number(9), |_| later);
            };
            let raced = Raced { maps: maps(false), between: std::cell::Cell::new(Some(&store)) };
            raced.maps.lame_until_ns.set(before);
            raced.maps.last.set(LastReport { base: number(8), ..raced.maps.last.get() });
            store_lame_until(&raced, 1, number(8), |_| earlier);
            assert_eq!(
                raced.maps.lame_until_ns.get(),
                later,
                "before {before}, earlier {earlier}, later {later}"
            );
        }
    }

    fn numbered(kind: Kind, incarnation: u32, counter: u32, nonce: u64) -> Datagram {
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
        let lower = judge(last, &numbered(Kind::Answer, 6, 1, 5)).expect("the report is accepted");
        assert_eq!(lower, LastReport { base: base(6, 1), highest: base(7, 9), nonce: 0, repeated_ns: 1 });
        let higher = judge(last, &numbered(Kind::Answer, 8, 1, 5)).expect("the report is accepted");
        assert_eq!(higher, LastReport { base: base(8, 1), highest: base(8, 1), nonce: 0, repeated_ns: 1 });
        assert_eq!(judge(last, &numbered(Kind::Answer, 7, 10, 6)), Err(Disbelieved::Unrequested));
        assert_eq!(
            judge(higher, &numbered(Kind::Answer, 8, 2, 5)),
            Err(Disbelieved::Unrequested),
            "the nonce was already used"
        );
        assert_eq!(judge(higher, &numbered(Kind::Answer, 8, 2, 0)), Err(Disbelieved::Unrequested));
        assert_eq!(judge(last, &numbered(Kind::Request, 7, 10, 5)), Err(Disbelieved::NotAReport));
        assert_eq!(judge(last, &numbered(Kind::Answer, 0, 0, 5)), Err(Disbelieved::NotAReport));
    }

    #[test]
    fn a_push_is_believed_if_it_is_later() {
        let last = LastReport { base: base(7, 9), highest: base(7, 9), nonce: 5, repeated_ns: 1 };
        let after = judge(last, &numbered(Kind::Push, 7, 10, 0)).expect("the report is accepted");
        assert_eq!(after, LastReport { base: base(7, 10), highest: base(7, 10), nonce: 0, repeated_ns: 1 });
        for (incarnation, counter) in [(7, 9), (7, 8), (6, 100)] {
            let push = numbered(Kind::Push, incarnation, counter, 5);
            assert_eq!(judge(last, &push), Err(Disbelieved::Replayed));
        }
        let nothing = LastReport::zeroed();
        assert_eq!(judge(nothing, &numbered(Kind::Push, 7, 9, 0)), Err(Disbelieved::Premature));
        // The agent has begun with lower numbers. Its older pushes are replays, and its new pushes
        // are accepted.
        let back = LastReport { base: base(3, 1), ..last };
        assert_eq!(judge(back, &numbered(Kind::Push, 7, 9, 0)), Err(Disbelieved::Replayed));
        assert!(judge(back, &numbered(Kind::Push, 3, 2, 0)).is_ok());
        assert!(judge(back, &numbered(Kind::Push, 8, 1, 0)).is_ok());
    }

    #[test]
    fn a_report_determines_the_end_of_a_lame_duck() {
        const MS: u64 = 1_000_000;
        let of = |readiness: Readiness, valid_for, hold| {
            let mut report = numbered(Kind::Push, 1, 1, 0);
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
