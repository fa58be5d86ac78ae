//! Answers that the kernel gives in the agent's place (XDP), on the configured network interfaces.
//! These answers are fast even while the agent gets no processor time. The agent prepares them, and
//! reads from the kernel which clients have sent requests.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use lb_common::abi::responder::MAX_ADDRESSES;
use lb_common::abi::responder::REFUSALS;
use lb_common::net::socket_addr;
use lb_document::diagnostic::chain;
use lb_kernel::responder::{self, Answers, Responder, Secret};
use lb_kernel::xdp::{Follower, Found, Named, Place, Work, attach_to, takes};
use lb_kernel::{DatapathError, Interface, monotonic_ns};
use lb_report::agent::entry::PREPARED_EVERY;
use lb_report::agent::name::Name;
use lb_report::agent::{Reports, Requester};
use tracing::{info, warn};

use super::udp::BoundSockets;
use crate::config::PORT;

/// While clients are being notified of a change, the agent reads their acknowledgements from the
/// kernel at most once in this time.
const APART: Duration = Duration::from_millis(5);

/// The kernel's answers in the agent's place.
pub struct Responding {
    place: Place,
    /// The loaded program, or the reason why it cannot be loaded.
    loaded: Result<LoadedResponder, String>,
    /// The reason why an answer could not be prepared, in the last complete preparation or since
    /// then; `None` if all answers were prepared.
    unprepared: Option<String>,
    /// The reason why the last read of the clients that have sent requests failed; `None` if it
    /// succeeded.
    unread: Option<String>,
}

struct LoadedResponder {
    answers: Answers,
    follower: Follower<Attaching>,
    /// For each backend, the version of the report for which the answer was prepared last.
    prepared: BTreeMap<Name, u64>,
    /// The time of the last preparation of all answers.
    prepared_at: Instant,
    /// The time of the last read of the clients that have sent requests; `None` if some of these
    /// clients have not been read yet.
    looked_at: Option<Instant>,
}

impl Responding {
    /// Loads the program, prepares its answers, and attaches the program.
    pub fn start(
        place: Place,
        listen: &[SocketAddr],
        secret: [u8; 16],
        reports: &Reports,
        now: Instant,
    ) -> Self {
        let loaded = load(&place, listen, secret, reports, now);
        if let Err(why) = &loaded {
            warn!("the kernel does not answer requests in the agent's place: {why}");
        }
        Self { place, loaded, unprepared: None, unread: None }
    }

    /// Prepares the answers that have changed. Prepares all answers every [`PREPARED_EVERY`].
    pub fn prepare(&mut self, reports: &Reports, now: Instant) {
        let Ok(loaded) = &mut self.loaded else { return };
        let all = now.saturating_duration_since(loaded.prepared_at) >= PREPARED_EVERY;
        if all {
            loaded.prepared_at = now;
        }
        let result = prepare(&loaded.answers, &mut loaded.prepared, reports, all, now);
        if all || result.is_err() {
            note(&mut self.unprepared, "the preparation failed", result.err());
        }
    }

    /// Reads which clients have sent requests to the kernel, and makes them subscribers. Reads at
    /// most once per second, or every few milliseconds if `is_urgent`.
    pub fn look(&mut self, reports: &mut Reports, sockets: &BoundSockets, is_urgent: bool, now: Instant) {
        let Ok(loaded) = &mut self.loaded else { return };
        let apart = if is_urgent { APART } else { PREPARED_EVERY };
        if loaded.looked_at.is_some_and(|last| now.saturating_duration_since(last) < apart) {
            return;
        }
        let now_ns = ns_at(now);
        let taken = loaded.answers.take_subscribers(|name, subscriber| {
            let address = socket_addr(name.address, name.port);
            let local = socket_addr(subscriber.local, name.port).ip();
            let (Some(name), Some(via)) = (Name::of_sender(&name.backend), sockets.via(local)) else {
                return;
            };
            let ago = Duration::from_nanos(now_ns.saturating_sub(subscriber.asked_ns));
            let requested_at = now.checked_sub(ago).unwrap_or(now);
            reports.subscribe(
                name,
                Requester { address, via },
                subscriber.key_id,
                subscriber.heard,
                requested_at,
            );
        });
        // Remaining clients are read in the next iteration of the loop, after other work.
        loaded.looked_at = (!matches!(taken, Ok(false))).then_some(now);
        note(&mut self.unread, "cannot read which clients have sent requests", taken.err());
    }

    /// The next time at which [`Responding::prepare`] or [`Responding::look`] has work.
    pub fn next_at(&self, now: Instant) -> Option<Instant> {
        let loaded = self.loaded.as_ref().ok()?;
        let last = loaded.looked_at.map(|looked_at| looked_at.min(loaded.prepared_at));
        Some(last.map_or(now, |last| last + PREPARED_EVERY))
    }

    /// The number of requests that the kernel has answered, and for each reason the number of
    /// requests that it has refused.
    pub fn counts(&self) -> (u64, [u64; REFUSALS]) {
        let counts = self.loaded.as_ref().ok().and_then(|loaded| loaded.answers.counts().ok());
        counts.unwrap_or_default()
    }

    /// The state of the program on the configured interfaces.
    pub fn found(&self) -> Found {
        match &self.loaded {
            Ok(loaded) => loaded.follower.found(),
            Err(why) => {
                let refused = |name: &String| Named { name: name.clone(), attached: Err(why.clone()) };
                Found { interfaces: self.place.interfaces.iter().map(refused).collect(), error: None }
            }
        }
    }

    /// The faults of the program and its answers.
    pub fn faults(&self) -> Vec<String> {
        let Found { interfaces, error } = self.found();
        let errors = [&self.unprepared, &self.unread].into_iter().flatten().cloned();
        let mut faults: Vec<String> = errors.chain(error).collect();
        let by_socket = interfaces.into_iter().filter_map(|one| {
            let why = one.attached.err()?;
            Some(format!(
                "interface {}: the kernel does not answer requests: {why}; the agent's socket answers them",
                one.name
            ))
        });
        faults.extend(by_socket);
        faults
    }
}

/// Records an error, and logs it if it is new.
fn note(place: &mut Option<String>, what: &str, error: Option<DatapathError>) {
    let error = error.map(|error| format!("answers in the kernel: {what}: {}", chain(&error)));
    if let Some(error) = error.as_ref().filter(|error| place.as_ref() != Some(error)) {
        warn!("{error}");
    }
    *place = error;
}

/// Converts a past moment to nanoseconds of the clock of the kernel programs.
fn ns_at(moment: Instant) -> u64 {
    let ago = u64::try_from(moment.elapsed().as_nanos()).unwrap_or(u64::MAX);
    monotonic_ns().saturating_sub(ago)
}

fn load(
    place: &Place,
    listen: &[SocketAddr],
    secret: [u8; 16],
    reports: &Reports,
    now: Instant,
) -> Result<LoadedResponder, String> {
    let port = port_of(listen);
    let secret = Secret { bytes: secret, drawn_ns: ns_at(now) };
    let (responder, answers) = responder::load(port, secret).map_err(|error| chain(&error))?;
    // The answers are prepared before the program is attached, because the program drops requests
    // for backends without a prepared answer.
    let mut prepared = BTreeMap::new();
    prepare(&answers, &mut prepared, reports, true, now).map_err(|error| chain(&error))?;
    let wanted = WantedResponder { place: place.clone(), listen: listen.to_vec() };
    let follower = Follower::start(Attaching { responder }, Some(wanted))
        .map_err(|error| format!("cannot follow changes of network interfaces: {error}"))?;
    Ok(LoadedResponder { answers, follower, prepared, prepared_at: now, looked_at: None })
}

/// Prepares all answers if `all` is set. If it is not set, prepares only the answers of backends
/// with a report that has changed since the last preparation.
fn prepare(
    answers: &Answers,
    prepared: &mut BTreeMap<Name, u64>,
    reports: &Reports,
    all: bool,
    now: Instant,
) -> Result<(), DatapathError> {
    let (mut now_ns, mut result) = (None, Ok(()));
    // Answers of removed backends are deleted first, to make room.
    let gone: Vec<Name> = prepared.keys().copied().filter(|name| reports.get(*name).is_none()).collect();
    for name in gone {
        match answers.remove(&name.to_sender()) {
            Ok(()) => drop(prepared.remove(&name)),
            Err(error) => result = Err(error),
        }
    }
    for (name, entry) in reports.iter() {
        if all || prepared.get(&name) != Some(&entry.version()) {
            let now_ns = *now_ns.get_or_insert_with(|| ns_at(now));
            match answers.set(&name.to_sender(), entry.prepared(now, now_ns)) {
                Ok(()) => drop(prepared.insert(name, entry.version())),
                // A failed write does not prevent the other writes.
                Err(error) => result = Err(error),
            }
        }
    }
    result
}

/// The program answers only at the port of the first address. If the configuration was read from a
/// file, all addresses have this port.
fn port_of(listen: &[SocketAddr]) -> u16 {
    listen.first().map_or(PORT, SocketAddr::port)
}

#[derive(Clone)]
struct WantedResponder {
    place: Place,
    listen: Vec<SocketAddr>,
}

/// The work of the thread that follows interfaces, for the kernel's answers.
struct Attaching {
    responder: Responder,
}

impl Work for Attaching {
    type Wanted = WantedResponder;

    fn follow(&mut self, wanted: Option<&WantedResponder>, all: &[Interface]) -> Found {
        let Some(WantedResponder { place, listen }) = wanted else { return Found::default() };
        let named: Vec<&Interface> = place.named(all).collect();
        let indexes: BTreeSet<u32> = named.iter().map(|interface| interface.index).collect();
        for index in self.responder.detach_others(&indexes) {
            info!(interface = index, "the kernel no longer answers requests on this interface");
        }
        let responder = &mut self.responder;
        let error = match responder.set_addresses(&served_addresses(listen, &named)) {
            Ok(0) => None,
            Ok(more) => Some(format!(
                "the interfaces of [xdp] have {more} addresses too many: the kernel answers at no more \
                 than {MAX_ADDRESSES} addresses"
            )),
            Err(error) => Some(format!("cannot set the kernel's answering addresses: {}", chain(&error))),
        };
        let stations_error = responder.set_stations(&named).err();
        let error = error.or_else(|| {
            stations_error
                .map(|error| format!("cannot set the kernel's hardware addresses: {}", chain(&error)))
        });
        let id = responder.id();
        Found { interfaces: attach_to(place, all, id, |to, modes| responder.attach(to, modes)), error }
    }

    fn log_findings(&mut self, news: Found) {
        if let Some(error) = news.error {
            warn!("{error}");
        }
        for one in news.interfaces {
            match one.attached {
                Ok(mode) => {
                    info!(
                        interface = one.name,
                        mode = mode.name(),
                        "the kernel answers in the agent's place"
                    );
                }
                Err(why) => {
                    warn!(
                        interface = one.name,
                        "only the agent's socket answers requests on this interface: {why}"
                    );
                }
            }
        }
    }
}

/// The addresses at which the kernel answers: those addresses of the named interfaces at which the
/// agent listens with the program's port. Addresses of other interfaces are excluded because an
/// answer from them may need another path. Addresses of a VLAN are excluded because the program
/// would answer without a tag: the device below the VLAN removes the tag before its program
/// receives the frame.
fn served_addresses(listen: &[SocketAddr], named: &[&Interface]) -> Vec<IpAddr> {
    let port = port_of(listen);
    let is_listened_at =
        |address: &IpAddr| listen.iter().any(|at| at.port() == port && takes(at.ip(), *address));
    let named = named.iter().filter(|interface| interface.kind.as_deref() != Some("vlan"));
    let of_named = named.flat_map(|interface| interface.addresses.iter().copied());
    let addresses: BTreeSet<IpAddr> = of_named.filter(is_listened_at).collect();
    addresses.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers_at_addresses_of_named_interfaces_where_the_agent_listens() {
        let addresses = ["192.0.2.1", "2001:db8::1", "192.0.2.2"];
        let eth0 = Interface {
            index: 7,
            name: "eth0".to_owned(),
            is_up: true,
            mtu: 1500,
            kind: None,
            master: None,
            programs: Vec::new(),
            hardware_address: None,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let vlan = Interface { kind: Some("vlan".to_owned()), ..eth0.clone() };
        let of = |listen: &[&str]| {
            let listen: Vec<SocketAddr> = listen.iter().map(|text| text.parse().unwrap()).collect();
            let at = served_addresses(&listen, &[&eth0]);
            at.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(&["[::]:9465"]), "192.0.2.1 192.0.2.2 2001:db8::1");
        assert_eq!(of(&["0.0.0.0:9465"]), "192.0.2.1 192.0.2.2");
        assert_eq!(of(&["192.0.2.2:9465", "192.0.2.9:9465"]), "192.0.2.2");
        assert_eq!(
            of(&["192.0.2.2:9465", "192.0.2.1:9466"]),
            "192.0.2.2",
            "the program has another port than this address"
        );
        assert_eq!(served_addresses(&["[::]:9465".parse().unwrap()], &[&vlan]), [] as [IpAddr; 0]);
        assert_eq!(served_addresses(&["[::]:9465".parse().unwrap()], &[]), [] as [IpAddr; 0]);
    }
}
