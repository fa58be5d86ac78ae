//! Reports that the kernel takes in by itself, on the network interfaces that the configuration names: connects heed them also while the
//! daemon cannot. Everywhere else the daemon's socket takes them in, by the same rules.
//!
//! A thread of its own attaches the program and follows interfaces and addresses as they come and go: a driver may take a second to
//! change the program of an interface, and packets do not wait for the event loop. What it has attached outlives it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_common::abi::host::{Listener, MAX_LISTENERS};
use lb_kernel::receiver::{self, Receiver};
use lb_kernel::{Changes, DatapathError, Features, HostMaps, Interface, XdpMode, interfaces};
use lb_view::fault::{Fault, FaultCode};
use lb_view::status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use crate::error::chain;
use crate::wake::Wake;

/// Where reports are to be taken in by the kernel.
#[derive(Clone)]
pub struct Wanted {
    /// The maps that hold what is believed.
    pub maps: Arc<HostMaps>,
    /// Where the daemon listens.
    pub address: SocketAddr,
    /// Names of network interfaces.
    pub interfaces: Vec<String>,
    /// Whether interfaces of devices may run it in the network stack.
    pub allows_generic: bool,
    /// Whether the daemon is to see what is not believed.
    pub passes_unbelieved: bool,
}

impl Wanted {
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.maps, &other.maps)
            && (self.address, &self.interfaces) == (other.address, &other.interfaces)
            && (self.allows_generic, self.passes_unbelieved)
                == (other.allows_generic, other.passes_unbelieved)
    }
}

/// How reports come in on the interfaces of the configuration, and whoever sees to that.
#[derive(Default)]
pub struct Receiving {
    thread: Option<Handle>,
    wanted: Option<Wanted>,
    /// Why there is no thread.
    error: Option<String>,
    /// Whether interfaces are named and nothing that is asked for comes there.
    pub has_no_use: bool,
}

struct Handle {
    shared: Arc<Mutex<Shared>>,
    /// Wakes the thread.
    wake: Wake,
}

/// What the thread and the loop share.
#[derive(Default)]
struct Shared {
    wanted: Option<Wanted>,
    found: Found,
    is_stopping: bool,
}

/// What the thread has found.
#[derive(Clone, Default)]
struct Found {
    interfaces: Vec<status::Interface>,
    /// What is wrong, whatever the interface.
    error: Option<String>,
}

impl Receiving {
    /// Has reports taken in there from now on, and nowhere else. Does nothing that takes long.
    pub fn want(&mut self, wanted: Option<Wanted>, pins: &Path, features: Features) {
        let is_same = match (&self.wanted, &wanted) {
            (Some(before), Some(now)) => before.is_same(now),
            (None, None) => true,
            _ => false,
        };
        // A daemon before this one may have left what is not wanted any more.
        let is_idle = self.thread.is_none() && wanted.is_none() && self.error.is_none();
        if is_same
            && (self.thread.is_some() || is_idle && receiver::attached(pins).is_ok_and(|all| all.is_empty()))
        {
            return;
        }
        if self.thread.is_none() {
            // It knows what is wanted from the start: else it would take the program away that a daemon before has left.
            match start(pins.to_owned(), features, wanted.clone()) {
                Ok(thread) => (self.thread, self.error) = (Some(thread), None),
                Err(error) => {
                    self.error = Some(format!("cannot follow network interfaces: {error}"));
                    return;
                }
            }
        }
        self.wanted.clone_from(&wanted);
        if let Some(thread) = &self.thread {
            lock(&thread.shared).wanted = wanted;
            thread.wake.wake();
        }
    }

    /// How reports come in on the interfaces of the configuration.
    pub fn interfaces(&self) -> Vec<status::Interface> {
        self.thread.as_ref().map(|thread| lock(&thread.shared).found.interfaces.clone()).unwrap_or_default()
    }

    /// What is wrong with it.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<String> = self.error.iter().cloned().collect();
        if self.has_no_use {
            faults.push("`xdp` of [reports] has no effect: no service asks agents from the host".to_owned());
        }
        if let Some(thread) = &self.thread {
            let Found { interfaces, error } = lock(&thread.shared).found.clone();
            faults.extend(error);
            let by_socket = interfaces.iter().filter_map(|interface| {
                let why = interface.why.as_ref()?;
                Some(format!(
                    "interface {}: reports that come there are not taken in by the kernel: {why}; the daemon takes them in while it runs",
                    interface.name
                ))
            });
            faults.extend(by_socket);
        }
        faults.into_iter().map(|text| Fault::of_host(FaultCode::Probes, text)).collect()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        lock(&self.shared).is_stopping = true;
        self.wake.wake();
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(pins: PathBuf, features: Features, wanted: Option<Wanted>) -> io::Result<Handle> {
    let changes = Changes::listen()?;
    let shared = Arc::new(Mutex::new(Shared { wanted, ..Shared::default() }));
    let wake = Wake::new()?;
    let thread =
        Thread { pins, features, changes, shared: Arc::clone(&shared), wake: wake.clone(), program: None };
    std::thread::Builder::new().name("interfaces".to_owned()).spawn(move || thread.run())?;
    Ok(Handle { shared, wake })
}

struct Thread {
    pins: PathBuf,
    features: Features,
    changes: Changes,
    shared: Arc<Mutex<Shared>>,
    wake: Wake,
    /// The program as it is loaded, and for which port.
    program: Option<(u16, Receiver)>,
}

/// An interface whose program could not be attached is tried again after this: whoever has it may have given it up.
const RETRIED: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Interfaces change in bursts: looked at once such a burst is over, most likely.
const SETTLES: Duration = Duration::from_millis(20);

impl Thread {
    fn run(mut self) {
        // Until the daemon ends.
        loop {
            let wanted = {
                let shared = lock(&self.shared);
                if shared.is_stopping {
                    return;
                }
                shared.wanted.clone()
            };
            self.changes.forget();
            let found = self.follow(wanted.as_ref());
            let is_complete = found.error.is_none() && found.interfaces.iter().all(|one| one.why.is_none());
            self.tell(found);
            let limit = (!is_complete).then_some(&RETRIED);
            let mut waiting =
                [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.changes, PollFlags::IN)];
            // A failure is that of a signal, or of a kernel without memory: looked at again.
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

    /// Says what was found, also in the log if it is news.
    fn tell(&self, found: Found) {
        let mut shared = lock(&self.shared);
        let before = std::mem::replace(&mut shared.found, found.clone());
        drop(shared);
        if let Some(error) = found.error.filter(|error| before.error.as_ref() != Some(error)) {
            warn!("{error}");
        }
        for interface in found.interfaces.iter().filter(|interface| !before.interfaces.contains(interface)) {
            let (name, mode) = (&interface.name, &interface.mode);
            match &interface.why {
                None => info!(interface = name, mode, "the kernel takes reports in"),
                Some(why) => {
                    warn!(interface = name, "reports are taken in by the daemon's socket alone: {why}");
                }
            }
        }
    }

    /// Attaches the program where it is wanted, and detaches it where it is not.
    fn follow(&mut self, wanted: Option<&Wanted>) -> Found {
        let mut found = Found::default();
        let all = match interfaces() {
            Ok(all) => all,
            Err(error) => {
                // What is attached stays.
                found.error = Some(format!("network interfaces cannot be listed: {error}"));
                found.interfaces = lock(&self.shared).found.interfaces.clone();
                return found;
            }
        };
        let named =
            |interface: &&Interface| wanted.is_some_and(|wanted| wanted.interfaces.contains(&interface.name));
        let indexes: BTreeSet<u32> = all.iter().filter(named).map(|interface| interface.index).collect();
        match receiver::detach_others(&self.pins, &indexes) {
            Ok(left) => {
                for attachment in left {
                    info!(interface = attachment.interface, "the kernel takes no more reports in there");
                }
            }
            Err(error) => {
                found.error = Some(format!("the program for reports cannot be detached: {}", chain(&error)));
            }
        }
        let Some(wanted) = wanted else { return found };
        if let Err(error) = wanted.maps.take_over() {
            found.error = Some(format!("links of another version cannot be taken over: {}", chain(&error)));
        }
        // Addresses first: the program passes on what is for none of them.
        if let Err(error) = listen(wanted, &all) {
            found.error = Some(error);
        }
        let loaded = self.load(wanted).map_err(|error| chain(&error));
        for name in &wanted.interfaces {
            let attached = match (&loaded, all.iter().find(|interface| interface.name == *name)) {
                (_, None) => Err("there is no such interface; it is attached when it appears".to_owned()),
                (Err(error), _) => Err(error.clone()),
                (Ok(program), Some(interface)) => attach(program, interface, &all, wanted.allows_generic),
            };
            let (mode, why) = match attached {
                Ok(mode) => (mode.name(), None),
                Err(why) => ("socket", Some(why)),
            };
            found.interfaces.push(status::Interface { name: name.clone(), mode: mode.to_owned(), why });
        }
        found
    }

    /// The program for this port.
    fn load(&mut self, wanted: &Wanted) -> Result<&Receiver, DatapathError> {
        let port = wanted.address.port();
        let loaded = match self.program.take().filter(|(of, _)| *of == port) {
            Some(loaded) => loaded,
            None => (port, Receiver::load(&wanted.maps, self.features, port)?),
        };
        Ok(&self.program.insert(loaded).1)
    }
}

/// Tells the program where the daemon listens: at one address, or at all that the host has, those of the interfaces first on which it
/// listens.
fn listen(wanted: &Wanted, all: &[Interface]) -> Result<(), String> {
    let ip = wanted.address.ip();
    let (named, others): (Vec<&Interface>, Vec<&Interface>) =
        all.iter().partition(|interface| wanted.interfaces.contains(&interface.name));
    let of_host = named.into_iter().chain(others).flat_map(|interface| interface.addresses.iter().copied());
    let mut addresses: Vec<IpAddr> = match ip {
        IpAddr::V4(v4) if v4.is_unspecified() => of_host.filter(IpAddr::is_ipv4).collect(),
        IpAddr::V6(v6) if v6.is_unspecified() => of_host.collect(),
        ip => vec![ip],
    };
    let mut seen = BTreeSet::new();
    addresses.retain(|address| seen.insert(*address));
    let listener = Listener { passes_unbelieved: wanted.passes_unbelieved.into() };
    match wanted.maps.set_listeners(&addresses, listener) {
        Ok(0) => Ok(()),
        Ok(more) => Err(format!(
            "this host has {more} addresses more than the {MAX_LISTENERS} at which the kernel takes reports in, those of the interfaces of \
             `xdp` first: name one with `listen` of [reports]"
        )),
        Err(error) => Err(format!("the kernel cannot be told where reports come in: {}", chain(&error))),
    }
}

/// Attaches the program to an interface. In the network stack it runs where there is no device, or where that is allowed.
fn attach(
    program: &Receiver,
    interface: &Interface,
    all: &[Interface],
    allows_generic: bool,
) -> Result<XdpMode, String> {
    let is_allowed = allows_generic || !carries_a_device(interface);
    let modes: &[XdpMode] = if is_allowed { &XdpMode::ALL } else { &[XdpMode::Native] };
    program.attach(interface, modes).map_err(|error| {
        // Looked at now: whoever was faster is there.
        let now = interfaces().unwrap_or_default().into_iter().find(|one| one.index == interface.index);
        let of_others = now.map(|now| receiver::names_of_others(&now, Some(program))).unwrap_or_default();
        explain(&error, interface, all, &of_others, is_allowed)
    })
}

/// Whether the traffic of a device goes through an interface: it is one, or is made of one.
fn carries_a_device(interface: &Interface) -> bool {
    const OF_DEVICES: [&str; 7] = ["bond", "team", "vlan", "bridge", "macvlan", "macvtap", "ipvlan"];
    interface.kind.as_deref().is_none_or(|kind| OF_DEVICES.contains(&kind))
}

/// Why the program cannot be attached, and what to do about it.
fn explain(
    error: &DatapathError,
    interface: &Interface,
    all: &[Interface],
    others: &[String],
    allows_generic: bool,
) -> String {
    if !others.is_empty() {
        return format!(
            "another program is there, {}, and an interface takes one: it is not replaced; end whoever has attached it (`ip link show {}`), \
             or leave the interface out of `xdp`",
            others.join(" and "),
            interface.name
        );
    }
    let mut text = chain(error);
    let master = interface.master.and_then(|index| all.iter().find(|one| one.index == index));
    if interface.kind.as_deref() == Some("bond") {
        text.push_str("; it is a bond, and needs Linux 5.15 and members whose drivers have native XDP");
    } else if let Some(bond) = master.filter(|master| master.kind.as_deref() == Some("bond")) {
        let _ = write!(text, "; it is a part of the bond {0}: name {0}", bond.name);
    } else if !allows_generic {
        text.push_str(
            "; its driver has no native XDP, or not with this MTU or these offloads (LRO): `xdp_generic = true` has the network stack run it",
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
            addresses: Vec::new(),
        }
    }

    #[test]
    fn why_a_program_is_not_there_says_what_to_do() {
        let error = DatapathError::AttachInterface(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        let bond = Interface { index: 3, ..interface("bond0", Some("bond"), None) };
        let of = |one: &Interface, others: &[String], allowed| {
            explain(&error, one, std::slice::from_ref(&bond), others, allowed)
        };
        let device = interface("eth0", None, None);
        for (one, others, allowed, expected) in [
            (&device, &["5 (filter)".to_owned()][..], false, "another program is there, 5 (filter), and an"),
            (&device, &[], false, "`xdp_generic = true` has the network stack run it"),
            (&bond, &[], false, "it is a bond, and needs Linux 5.15"),
            (&interface("eth1", None, Some(3)), &[], false, "it is a part of the bond bond0: name bond0"),
        ] {
            let text = of(one, others, allowed);
            assert!(text.contains(expected), "{text}");
        }
        assert!(!of(&device, &[], true).contains("xdp_generic"));
    }
}
