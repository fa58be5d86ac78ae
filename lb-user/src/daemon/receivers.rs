//! Runs the programs that receive reports in the kernel, on the network interfaces that the
//! configuration names: the thread and the kernel's operations, for which `controller/receivers.rs`
//! decides. On these interfaces, new reports affect connects even while the daemon does not run,
//! because attached programs outlive the daemon. On other interfaces, only the daemon's socket
//! receives reports, and the same rules apply.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use lb_common::abi::host::Listener;
use lb_kernel::receiver::{self, Receiver};
use lb_kernel::xdp::{Attachment, Follower, Found, Named, Place, Work, attach_to};
use lb_kernel::{DatapathError, Features, HostMaps, Interface};
use lb_view::status;
use tracing::{info, warn};

use crate::controller::ReceiveAt;
use crate::controller::receivers::{ReceiverKernel, Receivers, ThreadState, is_due};

/// How reports are received on the configured interfaces, and the thread that manages the programs
/// there.
#[derive(Default)]
pub struct Receiving {
    /// The thread, or why it could not be started; `None` before its first start.
    thread: Option<Result<Follower<Receivers<ReceiverPrograms>>, String>>,
    wanted: Option<ReceiveAt>,
}

impl Receiving {
    /// Makes the kernel receive reports only as `wanted` describes. Does not block.
    pub fn want(&mut self, wanted: Option<ReceiveAt>, pins: &Path, features: Features) {
        let thread = match &self.thread {
            None => ThreadState::NotStarted,
            Some(Ok(_)) => ThreadState::Running,
            Some(Err(_)) => ThreadState::Failed,
        };
        let has_attachments = || receiver::attached(pins).map_or(true, |all| !all.is_empty());
        if !is_due(self.wanted.as_ref(), wanted.as_ref(), thread, has_attachments) {
            return;
        }
        if let Some(Ok(follower)) = &self.thread {
            follower.want(wanted.clone());
        } else {
            let work = Receivers::new(ReceiverPrograms { pins: pins.to_owned(), features, program: None });
            let started = Follower::start(work, wanted.clone());
            let started = started.map_err(|error| format!("cannot watch network interfaces: {error}"));
            if self.thread.insert(started).is_err() {
                return;
            }
        }
        self.wanted = wanted;
    }

    fn found(&self) -> Found {
        let follower = self.thread.as_ref().and_then(|thread| thread.as_ref().ok());
        follower.map(Follower::found).unwrap_or_default()
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
        let error = self.thread.as_ref().and_then(|thread| thread.as_ref().err());
        let mut faults: Vec<String> = error.into_iter().cloned().collect();
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

/// The work of the thread that watches interfaces.
impl Work for Receivers<ReceiverPrograms> {
    type Wanted = ReceiveAt;

    fn follow(&mut self, wanted: Option<&ReceiveAt>, all: &[Interface]) -> Found {
        self.follow(wanted, all)
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

/// The programs that receive reports, in this host's kernel.
struct ReceiverPrograms {
    pins: PathBuf,
    features: Features,
    /// The loaded program.
    program: Option<Receiver>,
}

impl ReceiverKernel for ReceiverPrograms {
    fn detach_others(&mut self, indexes: &BTreeSet<u32>) -> Result<Vec<Attachment>, DatapathError> {
        receiver::detach_others(&self.pins, indexes)
    }

    fn take_over(&mut self, maps: &HostMaps) -> Result<bool, DatapathError> {
        maps.take_over()
    }

    fn set_listeners(
        &mut self,
        maps: &HostMaps,
        addresses: &[IpAddr],
        listener: Listener,
    ) -> Result<usize, DatapathError> {
        maps.set_listeners(addresses, listener)
    }

    fn load(&mut self, maps: &HostMaps, port: u16) -> Result<(), DatapathError> {
        self.program = None;
        self.program = Some(Receiver::load(maps, self.features, port)?);
        Ok(())
    }

    fn attach(&mut self, place: &Place, all: &[Interface]) -> Vec<Named> {
        let program = self.program.as_ref().expect("the program is loaded before it is attached");
        attach_to(place, all, program.id(), |to, modes| program.attach(to, modes))
    }
}
