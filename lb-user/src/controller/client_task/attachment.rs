//! The attachment of a client task: to the cgroup that is now at its path, and to earlier cgroups
//! until their flows have ended.
//!
//! A cgroup may be removed and created again at the same path, and a client may be configured for
//! another cgroup. The programs are first attached to the new cgroup. Old links are removed once no
//! flow is open that may have begun through them. This module reads no clock.

use std::path::Path;
use std::time::{Duration, Instant};

use lb_kernel::{Cgroup, ClientKernel, DatapathError};

use super::ClientTask;

/// The interval at which links to a cgroup that still exists are checked. It is long, because only
/// an operator removes such links, and because each check takes three system calls.
const LINKS: Duration = Duration::from_secs(10);

/// The result of a check of a client's cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// The attachment did not change.
    Unchanged,
    /// The programs were attached to another cgroup, or again to the same cgroup.
    Attached,
    /// The cgroup was removed, or the configuration names one that does not exist.
    Lost,
    /// An operator has removed the client's pins.
    Unpinned,
}

impl ClientTask {
    fn kernel(&self) -> &dyn ClientKernel {
        self.datapath.kernel()
    }

    /// Attaches this build's programs to the client's cgroup, or replaces programs that are
    /// attached there. Afterwards the cgroup's connects are balanced. If there is no cgroup yet,
    /// does nothing. Programs on other cgroups stay attached until
    /// [`ClientTask::leave_other_cgroups`].
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&mut self) -> Result<Followed, DatapathError> {
        let result = match self.kernel().cgroup(&self.path) {
            Ok(now) => self.kernel().attach(&now).map(|()| {
                self.cgroup = Some(now);
                self.has_moved = true;
                Followed::Attached
            }),
            Err(DatapathError::NoCgroup(_)) => {
                Ok(if self.cgroup.take().is_some() { Followed::Lost } else { Followed::Unchanged })
            }
            Err(error) => Err(error),
        };
        self.attach_error = result.as_ref().err().map(|error| crate::error::chain(error));
        result
    }

    /// Attaches the programs if they are not attached to the cgroup that is now at the configured
    /// path: a restarted systemd unit has a new cgroup at its old path, an operator may have
    /// removed links, and an earlier attachment may have been interrupted. After a failure, does
    /// nothing until a retry is due.
    ///
    /// # Errors
    /// If the kernel refuses, or the attachment cannot be read. In both cases nothing changes. The
    /// `bool` is `true` if the error differs from the last one.
    pub fn follow_cgroup(&mut self, now: Instant) -> Result<Followed, (DatapathError, bool)> {
        if self.is_unpinned || self.first_look.is_some() || !self.attaching.is_due(now) {
            return Ok(Followed::Unchanged);
        }
        match self.attach_if_needed(now) {
            Ok(followed) => {
                self.attaching.succeeded();
                Ok(followed)
            }
            Err(error) => {
                let is_new = self.attaching.failed(now, &crate::error::chain(&error));
                Err((error, is_new))
            }
        }
    }

    fn attach_if_needed(&mut self, now: Instant) -> Result<Followed, DatapathError> {
        if let Some((seen, at)) = self.links_seen
            && self.kernel().is_cgroup(&self.path, seen)
            && now.saturating_duration_since(at) < LINKS
        {
            return Ok(Followed::Unchanged);
        }
        let there = self.cgroup_there()?;
        // If an earlier daemon has created these links (`self.cgroup` is `None`), `attach` replaces
        // their programs with this daemon's.
        self.links_seen = None;
        if let Some(there) = there
            && self.kernel().is_fully_attached(there.id)?
        {
            self.attach_error = None;
            if self.cgroup.is_some() {
                self.links_seen = Some((there.id, now));
                return Ok(Followed::Unchanged);
            }
        }
        if self.look_for_pins()? { self.attach() } else { Ok(Followed::Unpinned) }
    }

    /// Call this when the client's cgroup has changed, so that the next check follows without a
    /// pause.
    pub fn cgroup_changed(&mut self) {
        self.links_seen = None;
        self.attaching.retry_now();
    }

    /// Checks whether the client's pins still exist. If the whole directory was removed, an
    /// operator has removed the client: it stays removed until another client task is opened for
    /// it.
    ///
    /// # Errors
    /// If this cannot be determined.
    pub fn look_for_pins(&mut self) -> Result<bool, DatapathError> {
        if !self.is_unpinned && !self.kernel().is_pinned()? {
            self.is_unpinned = true;
            self.cgroup = None;
            self.attach_error = None;
        }
        Ok(!self.is_unpinned)
    }

    /// Whether an operator has removed the client's pins.
    pub fn is_unpinned(&self) -> bool {
        self.is_unpinned
    }

    /// Leaves cgroups that are no longer the client's: prevents new flows there, and detaches once
    /// no flow is open that may have begun there. If another client takes over such a cgroup, call
    /// this only after that client is attached to it. After a failure, does nothing until a retry
    /// is due.
    ///
    /// # Errors
    /// If a link cannot be read or removed. The `bool` is `true` if the error differs from the last
    /// one.
    pub fn leave_other_cgroups(&mut self, now: Instant) -> Result<(), (DatapathError, bool)> {
        if !self.leaving.is_due(now) || !self.has_moved && !self.has_old_links {
            return Ok(());
        }
        let result = if self.has_moved { self.retire_other_links() } else { Ok(()) };
        match result.and_then(|()| self.remove_other_links()) {
            Ok(()) => {
                self.has_moved = false;
                self.leaving.succeeded();
                Ok(())
            }
            Err(error) => {
                let is_new = self.leaving.failed(now, &crate::error::chain(&error));
                Err((error, is_new))
            }
        }
    }

    /// Whether flows may still begin in cgroups that the client has left.
    pub fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// The ids of cgroups in which the client's flows still begin, other than the client's present
    /// cgroup.
    ///
    /// # Errors
    /// If the links cannot be read.
    pub fn begins_elsewhere(&self) -> Result<Vec<u64>, DatapathError> {
        let mut cgroups = self.kernel().begins_at()?;
        cgroups.retain(|cgroup| self.cgroup.as_ref().is_none_or(|ours| ours.id != *cgroup));
        Ok(cgroups)
    }

    /// Retires the links to other cgroups. If there is no cgroup at the client's path, the links to
    /// the cgroup that was removed from this path remain, because sockets that were created in that
    /// cgroup may still connect.
    fn retire_other_links(&self) -> Result<(), DatapathError> {
        match &self.cgroup {
            Some(cgroup) => self.kernel().leave_other_cgroups(cgroup.id),
            None => self.kernel().leave_cgroups_elsewhere(&self.path),
        }
    }

    fn remove_other_links(&mut self) -> Result<(), DatapathError> {
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        // Only this daemon creates links, so no old link can appear before the client moves again.
        self.has_old_links = self.kernel().has_old_links(cgroup.id)?;
        if !self.has_old_links || self.open_flows() > 0 {
            return Ok(());
        }
        self.kernel().remove_old_links(cgroup.id)
    }

    /// Whether this client task's programs are attached to the cgroup that is now at the configured
    /// path.
    ///
    /// # Errors
    /// If this cannot be determined. The programs may or may not be attached.
    pub fn is_effective(&self) -> Result<bool, DatapathError> {
        match self.cgroup_there()? {
            Some(there) => self.kernel().is_fully_attached(there.id),
            None => Ok(false),
        }
    }

    /// The cgroup that is now at the configured path, if there is one.
    fn cgroup_there(&self) -> Result<Option<Cgroup>, DatapathError> {
        match self.kernel().cgroup(&self.path) {
            Ok(now) => Ok(Some(now)),
            Err(DatapathError::NoCgroup(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the client's connects are balanced in the cgroup with this id.
    ///
    /// # Errors
    /// If this cannot be determined.
    pub fn covers(&self, cgroup: u64) -> Result<bool, DatapathError> {
        self.kernel().is_balanced(cgroup)
    }

    /// Whether there is a cgroup at the client's path; `false` also if this cannot be determined.
    pub fn has_cgroup(&self) -> bool {
        self.cgroup_there().is_ok_and(|there| there.is_some())
    }

    /// The full path of the client's cgroup, which may not exist.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the programs are not attached, if the kernel refused.
    pub fn attach_error(&self) -> Option<&str> {
        self.attach_error.as_deref()
    }

    /// The cgroup that the programs were attached to at the last check.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }
}
