//! Manages the programs that receive reports in the kernel, on the network interfaces that the
//! configuration names. On these interfaces, new reports affect connects even while the daemon does
//! not run, because attached programs outlive the daemon. On other interfaces, only the daemon's
//! socket receives reports, and the same rules apply.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use lb_common::abi::host::{Listener, MAX_LISTENERS};
use lb_kernel::receiver::{self, Receiver};
use lb_kernel::xdp::{Follower, Found, Work, addresses_of, attach_to};
use lb_kernel::{DatapathError, Features, Interface};
use lb_view::status;
use tracing::{info, warn};

use crate::controller::ReceiveAt;
use crate::error::chain;

/// How reports are received on the configured interfaces, and the thread that manages the programs
/// there.
#[derive(Default)]
pub struct Receiving {
    follower: Option<Follower<ReceiverWork>>,
    wanted: Option<ReceiveAt>,
    /// Why the thread could not be started.
    error: Option<String>,
}

impl Receiving {
    /// Makes the kernel receive reports only as `wanted` describes. Does not block.
    pub fn want(&mut self, wanted: Option<ReceiveAt>, pins: &Path, features: Features) {
        let is_same = self.wanted == wanted;
        // An earlier daemon may have left attached programs that are no longer wanted.
        let is_idle = self.follower.is_none() && wanted.is_none() && self.error.is_none();
        if is_same
            && (self.follower.is_some()
                || is_idle && receiver::attached(pins).is_ok_and(|all| all.is_empty()))
        {
            return;
        }
        match &self.follower {
            Some(follower) => follower.want(wanted.clone()),
            None => match Follower::start(ReceiverWork::new(pins, features), wanted.clone()) {
                Ok(follower) => (self.follower, self.error) = (Some(follower), None),
                Err(error) => {
                    self.error = Some(format!("cannot watch network interfaces: {error}"));
                    return;
                }
            },
        }
        self.wanted = wanted;
    }

    fn found(&self) -> Found {
        self.follower.as_ref().map(Follower::found).unwrap_or_default()
    }

    /// How reports are received on each configured interface.
    pub fn interfaces(&self) -> Vec<status::InterfaceStatus> {
        let interfaces = self.found().interfaces.into_iter().map(|one| status::InterfaceStatus {
            mode: one.mode().to_owned(),
            name: one.name,
            why: one.attached.err(),
        });
        interfaces.collect()
    }

    pub fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = self.error.iter().cloned().collect();
        let Found { interfaces, error } = self.found();
        faults.extend(error);
        let by_socket = interfaces.into_iter().filter_map(|one| {
            Some(format!(
                "interface {}: the kernel does not receive reports there: {}; the daemon's socket receives them while the daemon runs",
                one.name,
                one.attached.err()?
            ))
        });
        faults.extend(by_socket);
        faults
    }
}

/// The work of the thread that watches interfaces: it attaches and detaches the program that
/// receives reports.
struct ReceiverWork {
    pins: PathBuf,
    features: Features,
    /// The loaded program, and the port that it was loaded for.
    program: Option<(u16, Receiver)>,
}

impl Work for ReceiverWork {
    type Wanted = ReceiveAt;

    fn follow(&mut self, wanted: Option<&ReceiveAt>, all: &[Interface]) -> Found {
        let mut found = Found::default();
        let named = wanted.into_iter().flat_map(|wanted| wanted.place.named(all));
        let indexes: BTreeSet<u32> = named.map(|interface| interface.index).collect();
        match receiver::detach_others(&self.pins, &indexes) {
            Ok(left) => {
                for attachment in left {
                    info!(
                        interface = attachment.interface,
                        "the kernel no longer receives reports on this interface"
                    );
                }
            }
            Err(error) => {
                found.error =
                    Some(format!("cannot detach the program that receives reports: {}", chain(&error)));
            }
        }
        let Some(wanted) = wanted else { return found };
        let taken = wanted.maps.take_over();
        if let Err(error) = &taken {
            found.error =
                Some(format!("cannot take over the links of another socklb version: {}", chain(error)));
        }
        // The addresses are set first, because the program examines only datagrams to these
        // addresses. It passes all other datagrams on to the network stack.
        if let Err(error) = listen(wanted, all) {
            found.error = Some(error);
        }
        found.interfaces = match self.load(wanted) {
            Ok(program) => attach_to(&wanted.place, all, program.id(), |to, modes| program.attach(to, modes)),
            Err(error) => {
                // If the other version's program stayed attached, it would continue to judge
                // reports by its own maps, and would drop the reports that this daemon requests.
                if taken.is_ok_and(|taken| taken)
                    && let Err(error) = receiver::detach_others(&self.pins, &BTreeSet::new())
                {
                    found.error = Some(format!(
                        "cannot detach the program of another socklb version: {}",
                        chain(&error)
                    ));
                }
                wanted.place.refused(all, &chain(&error))
            }
        };
        found
    }

    fn log_findings(&mut self, news: Found) {
        if let Some(error) = news.error {
            warn!("{error}");
        }
        for one in news.interfaces {
            match one.attached {
                Ok(mode) => {
                    info!(interface = one.name, mode = mode.name(), "the kernel receives reports");
                }
                Err(why) => {
                    warn!(interface = one.name, "only the daemon's socket receives reports: {why}");
                }
            }
        }
    }
}

impl ReceiverWork {
    fn new(pins: &Path, features: Features) -> Self {
        Self { pins: pins.to_owned(), features, program: None }
    }

    /// Loads the program for the port of `wanted`, unless it is loaded already.
    fn load(&mut self, wanted: &ReceiveAt) -> Result<&Receiver, DatapathError> {
        let port = wanted.address.port();
        let loaded = match self.program.take().filter(|(of, _)| *of == port) {
            Some(loaded) => loaded,
            None => (port, Receiver::load(&wanted.maps, self.features, port)?),
        };
        Ok(&self.program.insert(loaded).1)
    }
}

/// Writes the addresses at which the daemon listens into the map that the program reads.
fn listen(wanted: &ReceiveAt, all: &[Interface]) -> Result<(), String> {
    let addresses = addresses_of(wanted.address.ip(), &wanted.place.interfaces, all);
    let listener = Listener { passes_unbelieved: wanted.passes_unbelieved.into() };
    match wanted.maps.set_listeners(&addresses, listener) {
        Ok(0) => Ok(()),
        Ok(more) => Err(format!(
            "this host has {more} addresses too many: the kernel receives reports at no more than \
             {MAX_LISTENERS} addresses, and prefers those of interfaces in `xdp`. Choose one address with \
             `listen` in [reports]"
        )),
        Err(error) => {
            Err(format!("cannot write the addresses of the daemon into the kernel's map: {}", chain(&error)))
        }
    }
}
