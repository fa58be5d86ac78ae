//! A thread that attaches a program to the configured network interfaces, and adapts the
//! attachments when interfaces appear, disappear or are renamed.
//!
//! The work has a separate thread because a driver may take a second to change the program of an
//! interface, which would block an event loop for too long.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_host::wake::Wake;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::interfaces::{Changes, Interface, interfaces};
use crate::error::DatapathError;
use crate::sys::{self, XdpMode};

/// The work that the thread does after every change of interfaces or of the wanted state.
pub trait Work: Send + 'static {
    /// The wanted state.
    type Wanted: Clone + Send;

    /// Establishes the wanted state, and returns the resulting state. `all` contains every
    /// interface of the host.
    fn follow(&mut self, wanted: Option<&Self::Wanted>, all: &[Interface]) -> Found;

    /// Logs those findings that the previous call of [`Work::follow`] did not return.
    fn log_findings(&mut self, news: Found);
}

/// The state of the interfaces that the configuration names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// One entry for each of these interfaces.
    pub interfaces: Vec<Named>,
    /// An error that does not concern a particular interface.
    pub error: Option<String>,
}

/// An interface that the configuration names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    /// The mode in which the program runs on the interface, or the reason why the program does not
    /// run on the interface.
    pub attached: Result<XdpMode, String>,
}

impl Named {
    /// How packets are received on the interface: the name of the program's mode, or `socket` if
    /// only the socket of this process receives them.
    pub fn mode(&self) -> &'static str {
        self.attached.as_ref().map_or("socket", |mode| mode.name())
    }
}

impl Found {
    fn is_complete(&self) -> bool {
        self.error.is_none() && self.interfaces.iter().all(|one| one.attached.is_ok())
    }

    /// The findings that `before` does not contain.
    fn since(&self, before: &Self) -> Self {
        let is_news = |one: &&Named| !before.interfaces.contains(one);
        Self {
            interfaces: self.interfaces.iter().filter(is_news).cloned().collect(),
            error: self.error.clone().filter(|error| before.error.as_ref() != Some(error)),
        }
    }
}

/// The prefix of the names of the receiver's pins.
const PREFIX: &str = "receive-";

/// A network interface to which the receiver is attached, and the mode in which the receiver runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    pub interface: u32,
    pub mode: XdpMode,
}

/// The name of an attachment's pin in the directory with the host's maps.
pub(crate) fn pin_name(attachment: Attachment) -> String {
    format!("{PREFIX}{}@{}", attachment.mode.name(), attachment.interface)
}

/// Parses the name of a pin; `None` if it is not the name of a link.
pub(crate) fn of_pin(name: &str) -> Option<Attachment> {
    let (mode, interface) = name.strip_prefix(PREFIX)?.split_once('@')?;
    let mode = XdpMode::ALL.into_iter().find(|known| known.name() == mode)?;
    Some(Attachment { interface: interface.parse().ok()?, mode })
}

/// Whether the pin with this name, in the directory with the host's maps, is a link.
pub(crate) fn is_link(name: &str) -> bool {
    of_pin(name).is_some()
}

/// The handle of the thread. The thread ends when the handle is dropped.
pub struct Follower<W: Work> {
    shared: Arc<Mutex<Shared<W::Wanted>>>,
    wake: Wake,
}

struct Shared<T> {
    wanted: Option<T>,
    found: Found,
    is_stopping: bool,
}

fn lock<T>(shared: &Mutex<Shared<T>>) -> MutexGuard<'_, Shared<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W: Work> Follower<W> {
    /// Starts the thread with the wanted state. (If the state were set later, the thread would
    /// first remove existing attachments.)
    ///
    /// # Errors
    /// If the thread cannot be started, or the kernel does not report changes of interfaces.
    pub fn start(work: W, wanted: Option<W::Wanted>) -> io::Result<Self> {
        let changes = Changes::listen()?;
        let shared = Shared { wanted, found: Found::default(), is_stopping: false };
        let shared = Arc::new(Mutex::new(shared));
        let wake = Wake::new()?;
        let thread = Thread { work, changes, shared: Arc::clone(&shared), wake: wake.clone() };
        std::thread::Builder::new().name("interfaces".to_owned()).spawn(move || thread.run())?;
        Ok(Self { shared, wake })
    }

    /// Changes the wanted state.
    pub fn want(&self, wanted: Option<W::Wanted>) {
        lock(&self.shared).wanted = wanted;
        self.wake.wake();
    }

    /// The latest findings.
    pub fn found(&self) -> Found {
        lock(&self.shared).found.clone()
    }
}

impl<W: Work> Drop for Follower<W> {
    fn drop(&mut self) {
        lock(&self.shared).is_stopping = true;
        self.wake.wake();
    }
}

struct Thread<W: Work> {
    work: W,
    changes: Changes,
    shared: Arc<Mutex<Shared<W::Wanted>>>,
    wake: Wake,
}

/// Delay before a retry if a program could not be attached to an interface: another program may
/// have been detached from the interface by then.
const RETRIED: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Delay after a change. Interfaces change in bursts, and a burst is usually over after this time.
const SETTLES: Duration = Duration::from_millis(20);

impl<W: Work> Thread<W> {
    fn run(mut self) {
        // Runs until the follower is dropped.
        loop {
            let wanted = {
                let shared = lock(&self.shared);
                if shared.is_stopping {
                    return;
                }
                shared.wanted.clone()
            };
            self.changes.forget();
            let found = match interfaces() {
                Ok(all) => self.work.follow(wanted.as_ref(), &all),
                // Attached programs remain attached.
                Err(error) => Found {
                    error: Some(format!("cannot list network interfaces: {error}")),
                    ..lock(&self.shared).found.clone()
                },
            };
            let is_complete = found.is_complete();
            let before = std::mem::replace(&mut lock(&self.shared).found, found.clone());
            self.work.log_findings(found.since(&before));
            let limit = (!is_complete).then_some(&RETRIED);
            let mut waiting =
                [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.changes, PollFlags::IN)];
            // An error means that a signal has arrived or that the kernel has no memory. The loop
            // then continues.
            let _ = poll(&mut waiting, limit);
            let is_woken = !waiting[0].revents().is_empty();
            if is_woken {
                self.wake.woken();
            } else {
                let settles = Timespec::try_from(SETTLES).ok();
                let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], settles.as_ref());
            }
        }
    }
}

/// The interfaces to which a program should be attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub interfaces: Vec<String>,
    /// Whether the program may also run in the network stack (generic mode) on interfaces that
    /// carry the traffic of a physical device.
    pub allows_generic: bool,
    /// The configuration key that sets `allows_generic`.
    pub generic_key: &'static str,
}

/// Why the program is not attached to a configured interface that does not exist.
const NO_INTERFACE: &str = "no such interface; the program is attached when the interface appears";

impl Place {
    /// The configured interfaces among `all`.
    pub fn named<'a>(&self, all: &'a [Interface]) -> impl Iterator<Item = &'a Interface> {
        all.iter().filter(|interface| self.interfaces.contains(&interface.name))
    }

    /// The result for all configured interfaces if the program cannot be loaded. `why` is the
    /// reason for interfaces that exist.
    pub fn refused(&self, all: &[Interface], why: &str) -> Vec<Named> {
        let named = self.interfaces.iter().map(|name| {
            let is_there = all.iter().any(|interface| interface.name == *name);
            let why = if is_there { why } else { NO_INTERFACE };
            Named { name: name.clone(), attached: Err(why.to_owned()) }
        });
        named.collect()
    }
}

/// Attaches a program to each of the named interfaces. The generic mode is used only if the
/// interface does not carry the traffic of a physical device or if `place` allows it. `attach` must
/// attach the program in one of the given modes; `ours` is the kernel's id of the program.
pub fn attach_to(
    place: &Place,
    all: &[Interface],
    ours: u32,
    mut attach: impl FnMut(&Interface, &[XdpMode]) -> Result<XdpMode, DatapathError>,
) -> Vec<Named> {
    let mut one = |name: &String| {
        let Some(interface) = all.iter().find(|interface| interface.name == *name) else {
            return Err(NO_INTERFACE.to_owned());
        };
        let is_allowed = place.allows_generic || !carries_a_device(interface);
        let modes: &[XdpMode] = if is_allowed { &XdpMode::ALL } else { &[XdpMode::Native] };
        attach(interface, modes).map_err(|error| {
            // The interfaces are listed again, because another program may have been attached since
            // `all` was read.
            let now = interfaces().unwrap_or_default().into_iter().find(|one| one.index == interface.index);
            let others = now.map(|now| names_of_others(&now, Some(ours))).unwrap_or_default();
            explain(&error, interface, all, &others, (!is_allowed).then_some(place.generic_key))
        })
    };
    place.interfaces.iter().map(|name| Named { name: name.clone(), attached: one(name) }).collect()
}

/// The addresses at which a socket that listens at `ip` receives datagrams: `ip` itself or, if `ip`
/// is the unspecified address, all addresses of the host, beginning with the addresses of the
/// interfaces in `names`.
pub fn addresses_of(ip: IpAddr, names: &[String], all: &[Interface]) -> Vec<IpAddr> {
    let (named, others): (Vec<&Interface>, Vec<&Interface>) =
        all.iter().partition(|interface| names.contains(&interface.name));
    let of_host = named.into_iter().chain(others).flat_map(|interface| interface.addresses.iter().copied());
    let mut addresses: Vec<IpAddr> =
        if ip.is_unspecified() { of_host.filter(|address| takes(ip, *address)).collect() } else { vec![ip] };
    let mut seen = BTreeSet::new();
    addresses.retain(|address| seen.insert(*address));
    addresses
}

/// Whether a socket that listens at `listens_at` receives datagrams to `address`. `::` includes
/// both families.
pub fn takes(listens_at: IpAddr, address: IpAddr) -> bool {
    match listens_at {
        IpAddr::V4(v4) if v4.is_unspecified() => address.is_ipv4(),
        IpAddr::V6(v6) if v6.is_unspecified() => true,
        ip => ip == address,
    }
}

/// The programs on an interface except the program with the id `ours`: the id of each and, if the
/// kernel reports it, the name.
pub fn names_of_others(interface: &Interface, ours: Option<u32>) -> Vec<String> {
    let others = interface.programs.iter().filter(|id| ours != Some(**id));
    others
        .map(|id| sys::program_name(*id).map_or_else(|_| id.to_string(), |name| format!("{id} ({name})")))
        .collect()
}

/// Attaches a program to an interface in the first of these modes that the interface supports.
pub fn link_to(
    program: BorrowedFd<'_>,
    interface: u32,
    modes: &[XdpMode],
) -> Result<(XdpMode, OwnedFd), DatapathError> {
    let mut failed = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    for mode in modes {
        match sys::xdp_link_create(program, interface, *mode) {
            Ok(link) => return Ok((*mode, link)),
            Err(error) => failed = error,
        }
        // If another program is attached, no other mode is tried.
        if matches!(failed.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) {
            break;
        }
    }
    Err(DatapathError::AttachInterface(failed))
}

/// Whether an interface carries the traffic of a physical device: the interface is such a device,
/// or a virtual interface on top of devices.
fn carries_a_device(interface: &Interface) -> bool {
    const OF_DEVICES: [&str; 7] = ["bond", "team", "vlan", "bridge", "macvlan", "macvtap", "ipvlan"];
    interface.kind.as_deref().is_none_or(|kind| OF_DEVICES.contains(&kind))
}

/// The message that explains why the program is not attached to an interface, with a remedy if one
/// is known.
fn explain(
    error: &DatapathError,
    interface: &Interface,
    all: &[Interface],
    others: &[String],
    generic_key: Option<&str>,
) -> String {
    if !others.is_empty() {
        return format!(
            "another program is attached, {}, and is not replaced, because an interface accepts only one program: stop \
             the process that attached it (`ip link show {}`), or remove the interface from the configuration",
            others.join(" and "),
            interface.name
        );
    }
    let mut text = match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    let master = interface.master.and_then(|index| all.iter().find(|one| one.index == index));
    if interface.kind.as_deref() == Some("bond") {
        text.push_str("; a bond needs Linux 5.15 and members whose drivers support native XDP");
    } else if let Some(bond) = master.filter(|master| master.kind.as_deref() == Some("bond")) {
        let _ = write!(text, "; the interface is part of bond {0}: configure {0} instead", bond.name);
    } else if let Some(key) = generic_key {
        let _ = write!(
            text,
            "; the driver does not support native XDP, or not with this MTU or these offloads (LRO): with `{key} = true` the network stack \
             runs the program"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, kind: Option<&str>, master: Option<u32>) -> Interface {
        Interface {
            index: 7,
            name: name.to_owned(),
            is_up: true,
            mtu: 1500,
            kind: kind.map(str::to_owned),
            master,
            programs: Vec::new(),
            hardware_address: None,
            addresses: Vec::new(),
        }
    }

    #[test]
    fn messages_about_missing_programs_contain_a_remedy() {
        let error = DatapathError::AttachInterface(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        let bond = Interface { index: 3, ..interface("bond0", Some("bond"), None) };
        let of = |one: &Interface, others: &[String], key| {
            explain(&error, one, std::slice::from_ref(&bond), others, key)
        };
        let device = interface("eth0", None, None);
        for (one, others, key, expected) in [
            (&device, &["5 (filter)".to_owned()][..], None, "another program is attached, 5 (filter), "),
            (&device, &[], Some("xdp_generic"), "with `xdp_generic = true` the network stack"),
            (&bond, &[], Some("xdp_generic"), "a bond needs Linux 5.15"),
            (&interface("eth1", None, Some(3)), &[], None, "part of bond bond0: configure bond0 instead"),
        ] {
            let text = of(one, others, key);
            assert!(text.contains(expected), "{text}");
        }
        assert!(!of(&device, &[], None).contains("true"));
    }

    #[test]
    fn addresses_of_named_interfaces_come_first_and_each_once() {
        let with = |name, addresses: &[&str]| Interface {
            addresses: addresses.iter().map(|text| text.parse().expect("the text is an address")).collect(),
            ..interface(name, None, None)
        };
        let all =
            [with("lo", &["127.0.0.1", "::1"]), with("eth0", &["192.0.2.1", "2001:db8::1", "192.0.2.1"])];
        let of = |ip: &str| {
            let found = addresses_of(ip.parse().expect("the text is an address"), &["eth0".to_owned()], &all);
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("0.0.0.0"), "192.0.2.1 127.0.0.1");
        assert_eq!(of("::"), "192.0.2.1 2001:db8::1 127.0.0.1 ::1");
        assert_eq!(of("192.0.2.9"), "192.0.2.9");
    }

    #[test]
    fn earlier_findings_are_not_reported_again() {
        let named = |name: &str, attached| Named { name: name.to_owned(), attached };
        let one = named("eth0", Ok(XdpMode::Native));
        let before = Found { interfaces: vec![one.clone()], error: Some("a".to_owned()) };
        let other = named("eth1", Err("why".to_owned()));
        let now = Found { interfaces: vec![one, other.clone()], error: Some("a".to_owned()) };
        assert_eq!(now.since(&before), Found { interfaces: vec![other], error: None });
        assert_eq!(now.since(&now), Found::default());
        assert!(!now.is_complete());
    }

    #[test]
    fn pin_names_identify_their_attachment() {
        for mode in XdpMode::ALL {
            let attachment = Attachment { interface: 7, mode };
            assert_eq!(of_pin(&pin_name(attachment)), Some(attachment));
        }
        for other in ["verdicts", "receive-native", "receive-other@7", "receive-native@x"] {
            assert!(!is_link(other), "{other}");
        }
    }
}
